"""The adapters to Accelerate and the Trainer: a spec goes in where their own FSDP plugin would, a report comes out.

``install`` hooks both libraries in this process; ``accelerator`` and ``FsdpTrainer`` are for those who would rather
say what they use. All three meet in ``prepare``, where a model is planned, sharded and observed.
"""
