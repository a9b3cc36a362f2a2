"""Rules of ``mixed_precision: fp8``: which library computes in fp8, and what it can be combined with."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Final

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

_PACKAGES: Final[Mapping[str, tuple[str, str]]] = {
    "ao": ("torchao", "torchao"),
    "te": ("transformer_engine", "transformer-engine"),
    "msamp": ("msamp", "MS-AMP"),
}
"""Backend -> its module, and the name of the package that is installed."""
_SETTINGS: Final = ("fp8.backend", "fp8.all_gather", "fp8.pad_inner_dim", "fp8.te_options")
_SUPPORTED: Final = ("ao", "te")
_OFF: Final = "set mixed_precision: bf16."


def fp8_backend(spec: FsdpSpec) -> str:
    """Return the backend of a spec, as Accelerate chooses it: the first that is installed, or torchao."""
    if spec.fp8.backend != "auto":
        return spec.fp8.backend
    return next((name for name in _SUPPORTED if _is_installed(name)), "ao")


def _is_installed(backend: str) -> bool:
    return importlib.util.find_spec(_PACKAGES[backend][0]) is not None


def check_fp8(spec: FsdpSpec) -> Iterator[Problem]:
    """Check that the backend is installed, and works with the other settings."""
    if not spec.enabled:
        return
    if not spec.uses_fp8:
        if given := [name for name in _SETTINGS if spec.asked(name) and spec.get(name) != "auto"]:
            message = f"{given[0]} has no effect: mixed_precision is {spec.launch.mixed_precision}."
            yield spec.problem("FSDP-W165", given[0], message, "Set mixed_precision: fp8, or remove it.")
        return
    backend = fp8_backend(spec)
    if backend == "msamp":
        message = "Accelerate does not combine MS-AMP with FSDP."
        yield spec.problem("FSDP-E121", "fp8.backend", message, f"Set backend: AO in fp8_config, or {_OFF}")
    elif not _is_installed(backend):
        package = _PACKAGES[backend][1]
        message = f"fp8 needs {package}, which is not installed."
        fix = f"Install it with `pip install {package}`, or {_OFF}"
        name = "fp8.backend" if spec.asked("fp8.backend") else "launch.mixed_precision"
        yield spec.problem("FSDP-E166", name, message, fix)
    if spec.fp8.all_gather and spec.fsdp.version == 1:
        where = spec.origin("fsdp.version")
        message = f"weights are all-gathered in fp8 by FSDP2 only, and the version is 1 ({where})."
        fix = "Set fsdp_version: 2, or enable_fsdp_float8_all_gather: false in fp8_config."
        yield spec.problem("FSDP-E167", "fp8.all_gather", message, fix)
    for axis in ("tensor", "expert"):
        if (size := getattr(spec.mesh, axis)) > 1:
            message = f"mesh.{axis}={size} with fp8: only whole layers are converted, and from_pretrained divides them."
            yield spec.problem("FSDP-E167", f"mesh.{axis}", message, f"Set mesh.{axis} to 1, or {_OFF}")
    if spec.precision.fp32_modules:
        message = "modules that compute in fp32 cannot be excluded from fp8, which Accelerate chooses by their sizes."
        fix = f"Remove fsdp_fp32_modules, or {_OFF}"
        yield spec.problem("FSDP-E167", "precision.fp32_modules", message, fix)
    if spec.precision.param == "fp16":
        message = f"fp8 is combined with bf16, and {spec.origin('precision.param')} sets fp16."
        yield spec.problem("FSDP-E167", "precision.param", message, "Remove it.")
