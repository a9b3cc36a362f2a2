"""The only package that uses private APIs of torch. Read from torch 2.13.0. Differences between torch 2.11 and 2.13 are
handled here.

Each file covers one part of torch: ``modules`` (``torch.nn.Module``; imports no torch), ``functions`` (functions and
classes that only have private names), ``process_groups``, ``elastic`` (the agent that starts ranks), ``fsdp1``
(``FullyShardedDataParallel``) and ``fsdp2`` (``fully_shard``).
``live_unit`` defines a unit of either FSDP version as read from torch.

``tests/unit/test_private_apis.py`` fails if another file of the package uses a private name.
"""
