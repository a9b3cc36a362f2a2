"""hf_fsdp_plugin: applies every FSDP setting of Accelerate and Transformers, and reports what ran.

The public names are loaded on first use: importing the package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.supported import runs_command_line, unsupported_versions
from hf_fsdp_plugin.version import __version__ as __version__

if not runs_command_line() and (_messages := unsupported_versions()):
    raise ImportError("\n".join(_messages))

_EXPORTS = {
    "backends.optimizers.matrix_rules": ("MatrixRule",),
    "backends.sharding.shard": ("full_parameters",),
    "integrations.accelerate.accelerator": ("accelerator",),
    "integrations.install": ("install", "uninstall"),
    "integrations.resuming": ("newest_checkpoint",),
    "integrations.report_on_request": ("report",),
    "integrations.save_requests": ("end_requested_save", "save_requested"),
    "integrations.transformers.loading": ("from_pretrained",),
    "integrations.transformers.weight_stream": ("stream_parameters",),
    "integrations.transformers.trainer": ("FsdpTrainer", "FsdpTrainerMixin", "FsdpTrainingArguments"),
    "integrations.transformers.weight_logs": ("WeightStatistics",),
    "observe.weight_statistics": ("weight_statistics",),
    "plan.fsdp_plan": ("FsdpPlan",),
    "plan.resolve": ("resolve",),
    "problems": ("Origin", "Problem", "SpecError"),
    "spec.load": ("load_spec",),
    "spec.fsdp_spec": ("FsdpSpec",),
}
"""Module below this package -> the names that it provides."""

__all__ = ["__version__"]
__all__ += [name for names in _EXPORTS.values() for name in names]

if TYPE_CHECKING:
    from hf_fsdp_plugin.backends.optimizers.matrix_rules import MatrixRule as MatrixRule
    from hf_fsdp_plugin.backends.sharding.shard import full_parameters as full_parameters
    from hf_fsdp_plugin.integrations.accelerate.accelerator import accelerator as accelerator
    from hf_fsdp_plugin.integrations.install import install as install
    from hf_fsdp_plugin.integrations.install import uninstall as uninstall
    from hf_fsdp_plugin.integrations.report_on_request import report as report
    from hf_fsdp_plugin.integrations.resuming import newest_checkpoint as newest_checkpoint
    from hf_fsdp_plugin.integrations.save_requests import end_requested_save as end_requested_save
    from hf_fsdp_plugin.integrations.save_requests import save_requested as save_requested
    from hf_fsdp_plugin.integrations.transformers.loading import from_pretrained as from_pretrained
    from hf_fsdp_plugin.integrations.transformers.trainer import FsdpTrainer as FsdpTrainer
    from hf_fsdp_plugin.integrations.transformers.trainer import FsdpTrainerMixin as FsdpTrainerMixin
    from hf_fsdp_plugin.integrations.transformers.trainer import FsdpTrainingArguments as FsdpTrainingArguments
    from hf_fsdp_plugin.integrations.transformers.weight_logs import WeightStatistics as WeightStatistics
    from hf_fsdp_plugin.integrations.transformers.weight_stream import stream_parameters as stream_parameters
    from hf_fsdp_plugin.observe.weight_statistics import weight_statistics as weight_statistics
    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan as FsdpPlan
    from hf_fsdp_plugin.plan.resolve import resolve as resolve
    from hf_fsdp_plugin.problems import Origin as Origin
    from hf_fsdp_plugin.problems import Problem as Problem
    from hf_fsdp_plugin.problems import SpecError as SpecError
    from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec as FsdpSpec
    from hf_fsdp_plugin.spec.load import load_spec as load_spec


def __getattr__(name: str) -> Any:
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
