"""``hfp.from_pretrained``: a sharded model from a folder or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hf_fsdp_plugin.backends.ranks.agreement import on_all_ranks
from hf_fsdp_plugin.backends.sharding.shard import shard
from hf_fsdp_plugin.integrations.accelerate.accelerator import accelerator
from hf_fsdp_plugin.integrations.accelerate.prepare import agree_on_plan, resolve_for, watch_model
from hf_fsdp_plugin.integrations.accelerate.private import mark_model_prepared
from hf_fsdp_plugin.integrations.patching import loading_ram_efficiently
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.meta_model import model_class_of
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec


def from_pretrained(
    name_or_folder: str | Path, spec_or_plan: FsdpSpec | FsdpPlan, *, model_class: Any = None, **kwargs: Any
) -> nn.Module:
    """Load a model and shard it. Collective: all ranks call it with the same arguments.

    No rank has the model in private memory: the files are mapped, and each rank copies its own shards to its device.
    The result can be passed to ``Accelerator.prepare`` or to a Trainer, or be trained by hand.

    Args:
        name_or_folder: what ``from_pretrained`` of Transformers accepts.
        spec_or_plan: from :func:`hf_fsdp_plugin.load_spec` or :func:`hf_fsdp_plugin.resolve`. A plan must be one for
            this model and this number of ranks.
        model_class: the class to load; by default the one in the config's ``architectures``.
        kwargs: other arguments of Transformers' ``from_pretrained``, such as ``dtype``.

    Raises:
        SpecError: the spec does not enable FSDP, the process is not a rank of a launcher, or the settings do not fit.
        ValueError: the config names no class of Transformers.
    """
    spec = spec_or_plan.spec if isinstance(spec_or_plan, FsdpPlan) else spec_or_plan
    if not spec.enabled:
        message = "hf_fsdp_plugin.from_pretrained was called with a spec that does not enable FSDP."
        fix = "Enable FSDP in the config (distributed_type: FSDP), or call from_pretrained of the model's class."
        raise SpecError([Problem(code="FSDP-E694", message=message, fix=fix)])
    state = accelerator(spec).state
    with on_all_ranks(f"loading {name_or_folder}"):
        loaded_class = model_class or model_class_of(name_or_folder)
        with loading_ram_efficiently():
            model = loaded_class.from_pretrained(name_or_folder, **kwargs)
    with on_all_ranks("planning"):
        plan = spec_or_plan if isinstance(spec_or_plan, FsdpPlan) else resolve_for(state, spec, model)
    plan = agree_on_plan(plan, model, state.device)
    sharded = shard(plan, model, state.device)
    watch_model(sharded)
    mark_model_prepared(sharded)
    return sharded
