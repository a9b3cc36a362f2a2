"""The only package that uses private APIs of torch, read from torch 2.13.0.

Only the targets of hooks (``integrations.hooks``) are private names, too. Differences between the supported versions of
torch are handled here. Each file covers one part of torch: ``modules`` (``torch.nn.Module``; imports no torch),
``functions`` (functions and classes that only have private names), ``elastic`` (the agent that starts ranks), ``fsdp1``
(``FullyShardedDataParallel``), ``fsdp2`` (``fully_shard``), ``context_parallel``, and ``fake_ranks`` (process groups of
ranks that do not exist, for predictions). ``live_unit`` defines a unit of either FSDP version as read from torch.

``tests/unit/test_private_apis.py`` fails if another file of the package uses a private name.
"""
