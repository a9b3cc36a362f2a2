"""A real ``accelerate.Accelerator`` from a spec, FSDP on CPU ranks included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.integrations.hooks import hook_accelerate
from hf_fsdp_plugin.integrations.transformers.arguments import set_loading_environment
from hf_fsdp_plugin.spec.model import FsdpSpec

if TYPE_CHECKING:
    from accelerate import Accelerator


def accelerator(spec: FsdpSpec, **kwargs: Any) -> Accelerator:
    """An Accelerator whose ``prepare`` shards models as ``spec`` asks.

    Args:
        spec: from :func:`hf_fsdp_plugin.load_spec`.
        kwargs: the other arguments of ``accelerate.Accelerator``; ``fsdp_plugin`` and ``mixed_precision`` come from
        the spec.

    Raises:
        SpecError: there is no process group to be had (no launcher started this process).
    """
    from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin

    hook_accelerate()
    set_loading_environment(spec)
    from accelerate import Accelerator

    if spec.launch.use_cpu:
        kwargs.setdefault("cpu", True)
    return Accelerator(fsdp_plugin=PlannedFsdpPlugin(spec), **kwargs)
