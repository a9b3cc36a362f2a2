"""hf_fsdp_plugin: FSDP settings as people write them, run as they are written, and proved.

The public names are loaded on first use: importing the package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.version import __version__

_PUBLIC = {
    "FsdpPlan": "hf_fsdp_plugin.plan.model",
    "FsdpSpec": "hf_fsdp_plugin.spec.model",
    "FsdpTrainer": "hf_fsdp_plugin.integrations.transformers.trainer",
    "FsdpTrainerMixin": "hf_fsdp_plugin.integrations.transformers.trainer",
    "FsdpTrainingArguments": "hf_fsdp_plugin.integrations.transformers.trainer",
    "Origin": "hf_fsdp_plugin.problems",
    "Problem": "hf_fsdp_plugin.problems",
    "SpecError": "hf_fsdp_plugin.problems",
    "accelerator": "hf_fsdp_plugin.integrations.accelerate.accelerator",
    "install": "hf_fsdp_plugin.integrations.install",
    "load_spec": "hf_fsdp_plugin.spec.load",
    "report": "hf_fsdp_plugin.integrations.report",
    "resolve": "hf_fsdp_plugin.plan.resolve",
    "uninstall": "hf_fsdp_plugin.integrations.install",
}

__all__ = [
    "FsdpPlan",
    "FsdpSpec",
    "FsdpTrainer",
    "FsdpTrainerMixin",
    "FsdpTrainingArguments",
    "Origin",
    "Problem",
    "SpecError",
    "__version__",
    "accelerator",
    "install",
    "load_spec",
    "report",
    "resolve",
    "uninstall",
]

if TYPE_CHECKING:
    from hf_fsdp_plugin.integrations.accelerate.accelerator import accelerator
    from hf_fsdp_plugin.integrations.install import install, uninstall
    from hf_fsdp_plugin.integrations.report import report
    from hf_fsdp_plugin.integrations.transformers.trainer import FsdpTrainer, FsdpTrainerMixin, FsdpTrainingArguments
    from hf_fsdp_plugin.plan.model import FsdpPlan
    from hf_fsdp_plugin.plan.resolve import resolve
    from hf_fsdp_plugin.problems import Origin, Problem, SpecError
    from hf_fsdp_plugin.spec.load import load_spec
    from hf_fsdp_plugin.spec.model import FsdpSpec


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
