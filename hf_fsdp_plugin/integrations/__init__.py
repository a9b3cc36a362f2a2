"""Integrations with Accelerate, Transformers, PEFT and torch's functions.

``install`` replaces functions of these libraries in this process, as listed in ``hooks.yaml``. ``accelerator`` and
``FsdpTrainer`` do the same for one object. All of them plan and shard models in ``accelerate/prepare.py``.
``accelerate/run_report.py`` writes the report at the end.
"""
