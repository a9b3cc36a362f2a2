"""The only package that uses private APIs of torch, beside the targets of hooks (``integrations.hooks``). Read from
torch 2.13.0. Differences between the supported versions of torch are handled here.

Each file covers one part of torch: ``modules`` (``torch.nn.Module``; imports no torch), ``functions`` (functions and
classes that only have private names), ``process_groups``, ``live_objects`` (where private attributes are looked up),
``elastic`` (the agent that starts ranks), ``fsdp1`` (``FullyShardedDataParallel``) and ``fsdp2`` (``fully_shard``).
``live_unit`` defines a unit of either FSDP version as read from torch.

``tests/unit/test_private_apis.py`` fails if another file of the package uses a private name.
"""
