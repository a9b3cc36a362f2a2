"""Integrations with Accelerate and Transformers.

``install`` replaces functions of both libraries in this process, as listed in ``hooks.py``. ``accelerator`` and
``FsdpTrainer`` do the same for one object. All of them plan and shard models in ``accelerate/prepare.py``.
``run_report.py`` writes the report at the end.
"""
