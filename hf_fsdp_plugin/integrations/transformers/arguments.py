"""``TrainingArguments``' FSDP settings: read by our parser, before the Trainer's own drops or refuses them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hf_fsdp_plugin.integrations import session
from hf_fsdp_plugin.integrations.messages import tell_warnings
from hf_fsdp_plugin.integrations.transformers.loading import hook_loading
from hf_fsdp_plugin.spec.model import FsdpSpec

# The fields that say something about FSDP. Precision and checkpointing count only where they are switched on:
# False is what they hold when nobody said anything.
_SWITCHES = ("bf16", "fp16", "gradient_checkpointing", "activation_checkpointing")


def follow_launcher(arguments: Any) -> None:
    """Before validation: on CPU ranks that a launcher chose, ``use_cpu`` is true.

    Transformers refuses bf16 without a GPU unless the CPU is asked for, and does not look where launchers ask.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on"):
        arguments.use_cpu = True


def process_fsdp_args(original: Callable[[], Any], arguments: Any) -> Any:
    """Stands for ``TrainingArguments._process_fsdp_args``. Returns the keyword arguments of Accelerate's plugin: none.

    The spec is kept for the Trainer that will be made with these arguments. Where no source asks for FSDP, the host's
    own method runs. Raises ``SpecError`` with all problems of all sources.
    """
    spec = session.current_session().load(said_by(arguments))
    if not session.asks_for_fsdp(spec):
        return original()
    tell_warnings(spec.problems)
    session.remember(arguments, spec)
    if arguments.fsdp:
        arguments.fsdp = True
        # The Trainer looks these up without asking whether they are there.
        own = dict(arguments.fsdp_config) if isinstance(arguments.fsdp_config, Mapping) else {}
        arguments.fsdp_config = {"xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False, **own}
    set_loading_environment(spec)
    return None


def said_by(arguments: Any) -> dict[str, Any]:
    """What a ``TrainingArguments`` says about FSDP, as keyword arguments."""
    said = {name: getattr(arguments, name, None) for name in ("fsdp", "fsdp_config")}
    said |= {name: True for name in _SWITCHES if getattr(arguments, name, None)}
    return {name: value for name, value in said.items() if value not in (None, "", [], {})}


def set_loading_environment(spec: FsdpSpec) -> None:
    """Tell ``from_pretrained`` whether only rank 0 reads the weights; environment variables are all it looks at."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(spec.loading.ram_efficient).lower()
    if spec.loading.ram_efficient:
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        hook_loading()
