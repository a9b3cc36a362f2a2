"""The only package that uses private APIs of torch. Read from torch 2.13.0; differences from 2.11 are handled here.

Each file is about one part of torch: ``modules`` (``torch.nn.Module``; imports no torch), ``functions`` (functions and
classes that have only private names), ``fsdp1`` (``FullyShardedDataParallel``) and ``fsdp2`` (``fully_shard``).
``live_unit`` defines a unit of either version as read from torch.

``tests/unit/test_private_apis.py`` fails when another file of the package uses a private name.
"""
