"""The wrap policy that the Trainer assigns to the plugin for a PEFT model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_fsdp_plugin.integrations.accelerate.plugin import planned_plugin
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import Problem


def update_fsdp_plugin_peft(original: Callable[..., None], model: Any, accelerator: Any) -> None:
    """Assign PEFT's policy, unless a source or the script has set a wrap policy, and report that it is not used.

    Assignments override the sources, but this one is not the user's choice: the Trainer makes it for every PEFT model.
    """
    plugin = planned_plugin(accelerator)
    if plugin is None or not (plugin.spec.asked("wrap.policy") or "auto_wrap_policy" in plugin.assigned):
        original(model, accelerator)
    elif plugin.spec.wrap.policy != "transformer" and "auto_wrap_policy" not in plugin.assigned:
        origin = plugin.spec.origin("wrap.policy")
        message = f"{origin.written} is used instead of PEFT's policy, which makes each layer a unit."
        fix = "Remove it to use PEFT's policy, which the Trainer assigns for models with adapters."
        print_once(Problem(code="FSDP-N680", setting="wrap.policy", origin=origin, message=message, fix=fix))
