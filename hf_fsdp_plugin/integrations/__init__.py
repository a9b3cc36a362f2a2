"""The integrations of Accelerate and Transformers.

``install`` replaces functions of both libraries in this process, as listed in ``hooks.py``. ``accelerator`` and
``FsdpTrainer`` do the same for one object. All of them prepare models in ``accelerate/prepare.py``, where a model is
planned and sharded. ``run_report.py`` writes the report at the end.
"""
