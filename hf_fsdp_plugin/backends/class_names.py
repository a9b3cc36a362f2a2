"""Names of the classes that ``fully_shard`` creates.

``fully_shard`` replaces the class of a module by a new subclass, ``FSDPGPTNeoXForCausalLM`` in a module of torch. Other
libraries find by these names what they write: Transformers the stored names of the weights and the files of custom
code, diffusers ``_class_name``, sentence-transformers ``modules.json``.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def keep_class_names(model: nn.Module) -> None:
    """Give the classes that ``fully_shard`` has created in a model the names and modules of the original classes.

    torch itself finds them by the class objects. ``_get_name`` returns the original name, too: by it the Trainer
    decides whether it shifts the labels that it smooths.
    """
    for created in {type(module) for module in model.modules() if isinstance(module, FSDPModule)}:
        original = next(base for base in created.__bases__ if base is not FSDPModule)
        # `torch.compile` has its own rules for the classes of torch, and these are in no file.
        if original.__module__.startswith("torch.") or created.__module__ == original.__module__:
            continue
        created.__name__, created.__qualname__ = original.__name__, original.__qualname__
        created.__module__ = original.__module__
