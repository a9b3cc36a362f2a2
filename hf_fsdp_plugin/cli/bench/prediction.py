"""What a benchmark predicts before it starts: whether each case fits, and the FLOPs for the MFU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.integrations.bench.cases import DDP, CaseSetting
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_bytes, plural

if TYPE_CHECKING:
    from torch import nn

    from hf_fsdp_plugin.estimate.machines import Machine
    from hf_fsdp_plugin.integrations.bench.cases import BenchWorkload
    from hf_fsdp_plugin.launcher.device_search import FoundDevices
    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
    from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

_LIBRARIES: Final = 450_000_000
"""Resident bytes of a CPU rank with torch, Transformers and Accelerate, before the model; measured with torch 2.13."""
_MACHINES: Final = (
    ("H100 PCIE", "h100-pcie"), ("H100", "h100-sxm"), ("H200", "h200"), ("B200", "b200"), ("A100", "a100-80gb"),
)  # fmt: skip
"""Part of a device's name -> machine of ``hf-fsdp plan --machine``."""
_SMALL_A100: Final = 50e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What is predicted for one setting.

    Attributes:
        peak_bytes: of the rank that needs most, on its device.
        host_bytes: memory of the machine that all ranks need to build the model.
        flops: of the model in one step of a rank.
        peak_flops: FLOP/s of a rank's device; ``None`` if its machine is unknown.
    """

    peak_bytes: int
    host_bytes: int
    flops: float | None = None
    peak_flops: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Available:
    """Memory of one device (0 if unknown, and on CPU ranks) and free memory of the machine (0 if unknown)."""

    device: int
    host: int


def available_memory(found: FoundDevices, device_type: str) -> Available:
    return Available(device=0 if device_type == "cpu" else found.memory_bytes, host=_free_memory())


def predict(
    setting: CaseSetting,
    spec: FsdpSpec,
    model: nn.Module,
    workload: BenchWorkload,
    device: str,
    machine: Machine | None,
) -> Prediction:
    """Return the prediction of a setting.

    Args:
        spec: of ``setting.planned``.
        model: the model on the meta device.

    Raises:
        SpecError: the settings do not fit the model or the number of ranks.
    """
    from hf_fsdp_plugin.estimate.memory import estimate_memory
    from hf_fsdp_plugin.estimate.time import TimeModel
    from hf_fsdp_plugin.estimate.workload import UpdateLoop, Workload
    from hf_fsdp_plugin.plan.resolve import resolve

    world = setting.world_size
    loop: UpdateLoop = "for_loop" if device == "cpu" else "foreach"  # torch's default, which the benchmark uses
    estimated = Workload(micro_batch=workload.micro_batch, seq_len=workload.seq_len, update_loop=loop)
    plan = resolve(spec, model, world_size=world, device_type=device)
    peak = estimate_memory(plan, model, estimated).peak.bytes
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    if setting.strategy == DDP:
        peak += whole  # DDP keeps its gradients in buckets, from which it copies them
    resident = max(peak, whole) if device == "cpu" else whole
    flops: float | None = None
    peak_flops = _peak_flops(plan, machine)
    if peak_flops is not None:
        flops = float(TimeModel(plan, model, estimated).model_flops())
    return Prediction(
        peak_bytes=peak,
        host_bytes=world * (resident + _LIBRARIES),
        flops=flops,
        peak_flops=peak_flops,
    )


def _peak_flops(plan: FsdpPlan, machine: Machine | None) -> float | None:
    if machine is None or not machine.peak:
        return None
    return machine.peak.get("bf16" if plan.precision.param in ("bf16", "fp16") else "fp32")


def too_large(prediction: Prediction, free: Available, num_systems: int) -> str:
    """Return why a setting does not fit, with the figures; empty if it fits or the memory is unknown.

    Args:
        num_systems: systems that are built together, so that their blocks alternate.
    """
    several = f" for each of {num_systems} systems, which are in memory together" if num_systems > 1 else ""
    device, host = prediction.peak_bytes * num_systems, prediction.host_bytes * num_systems
    if free.device and device > free.device:
        return f"a rank needs {_size(prediction.peak_bytes)}{several}, and a device has {_size(free.device)}"
    if free.host and host > free.host:
        return f"the ranks need {_size(prediction.host_bytes)}{several}, and this machine has {_size(free.host)} free"
    return ""


def fit_problems(reasons: Mapping[CaseSetting, str], num_settings: int, *, force: bool) -> list[Problem]:
    """Return an error if no setting fits, else a warning for each that does not."""
    if not reasons:
        return []
    shown = [f"{setting.name}: {reason}" for setting, reason in reasons.items()]
    if force:
        return [Problem(code="FSDP-W782", message=f"predicted not to fit, but run: {each}.") for each in shown]
    if len(reasons) == num_settings:
        message = f"none of {plural(num_settings, 'setting')} fits. {'; '.join(shown)}."
        fix = "Choose a smaller model, --micro-batch or --seq-len, or pass --force to run them anyway."
        return [Problem(code="FSDP-E781", message=message, fix=fix)]
    fix = "Pass --force to run it anyway."
    return [Problem(code="FSDP-W782", message=f"left out, because it does not fit: {each}.", fix=fix) for each in shown]


def machine_of(name: str | None, found: FoundDevices, device_type: str) -> Machine | None:
    """Return the machine of ``--machine``, else the known one of this accelerator; on the CPU the calibrated one.

    Raises:
        SpecError: ``--machine`` is unknown.
    """
    from hf_fsdp_plugin.estimate.machines import calibration_path, machine_named

    if name is not None:
        return machine_named(name)
    if device_type == "cpu":
        return _calibrated(calibration_path())
    known = next((machine for part, machine in _MACHINES if part in found.name.upper()), None)
    if known == "a100-80gb" and found.memory_bytes < _SMALL_A100:
        known = "a100-40gb"
    return machine_named(known) if known is not None else None


def _calibrated(path: Path) -> Machine | None:
    from hf_fsdp_plugin.estimate.machines import read_machine

    try:
        return read_machine(path) if path.exists() else None
    except SpecError:
        return None  # of an older version


def _free_memory() -> int:
    """Return the bytes that new processes can use; 0 if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    fields: dict[str, Any] = {line.partition(":")[0]: line.split()[1] for line in lines}
    return int(fields.get("MemAvailable", 0)) * 1024 if os.name == "posix" else 0


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes, binary=True)
