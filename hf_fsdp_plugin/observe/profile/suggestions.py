"""Settings that would shorten a step, each with the milliseconds that the measured intervals promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, Final

from hf_fsdp_plugin.estimate.results import Moment
from hf_fsdp_plugin.observe.profile.run_profile import RunProfile, UnitProfile
from hf_fsdp_plugin.text import format_bytes, format_seconds

_LEAST_SHARE: Final = 0.01
"""Share of a step below which a gain is not worth a suggestion."""
_LEAST_SECONDS: Final = 1e-4
_MEMORY_SHARE: Final = 0.9
"""Share of a device's memory that an estimated peak may take."""
_SHORT_CALL: Final = 2e-3
"""Seconds of an all-gather below which its latency matters."""
_MERGED: Final = 4
"""Units that are merged into one by the suggested unit size."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One setting.

    Attributes:
        setting: canonical name; of ``TrainingArguments`` if it begins with ``training.``.
        value: the suggested value.
        seconds: promised gain of a step.
        of_seconds: the time of a step of which the gain is a part.
        reason: what was measured.
        memory_bytes: estimated peak of memory with it, from the measured one; ``None`` if unknown or unchanged.
    """

    setting: str
    value: str
    seconds: float
    of_seconds: float
    reason: str
    memory_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        gain, whole = format_seconds(self.seconds), format_seconds(self.of_seconds)
        text = f"{self.setting}: {self.value} would save about {gain} of {whole}: "
        memory = f" Estimated peak: {format_bytes(self.memory_bytes, binary=True)}." if self.memory_bytes else ""
        return text + self.reason + memory


def suggest(run: RunProfile) -> list[Suggestion]:
    """Return the suggestions, the largest gain first.

    A promise counts the time that remains if all ranks arrive together (``CallSums.transfer``): a collective that is
    left out does not remove the waiting for a slow rank. It is a part of the step without the profiler, which lengthens
    all that it measures. Prefetching is suggested only where collectives and computation run at the same time: gloo's
    collectives block the thread that trains.
    """
    least = max(_LEAST_SECONDS, _LEAST_SHARE * run.total.seconds)
    found = [each for rule in _RULES for each in rule(run) if each.seconds >= least and _fits(run, each)]
    share = 1.0
    if run.unprofiled_seconds and run.profiled_seconds:
        share = min(1.0, run.unprofiled_seconds / run.profiled_seconds)
    scaled = [replace(each, seconds=share * each.seconds, of_seconds=share * each.of_seconds) for each in found]
    return sorted(scaled, key=lambda each: -each.seconds)


def _sync(run: RunProfile) -> Iterator[Suggestion]:
    count = _accumulation(run)
    calls = max((unit.reduce.calls for unit in run.units), default=0.0)
    if count > 1 and calls > 1.5:
        whole = sum(unit.reduce.transfer for unit in run.units)
        reason = f"gradients are reduced after each of {count} micro-batches. Without it, ranks keep whole gradients."
        gain = whole * (calls - 1) / calls
        yield Suggestion("training.sync_each_batch", "false", gain, whole, reason)


def _reshard(run: RunProfile) -> Iterator[Suggestion]:
    gathered = [unit for unit in run.units if unit.gather_backward.calls]
    plan = run.facts.get("plan", {})
    if gathered and plan.get("strategy") in ("full_shard", "hybrid_shard"):
        value = "shard_grad_op" if plan["strategy"] == "full_shard" else "hybrid_shard_zero2"
        exposed = sum(unit.gather_backward.transfer for unit in gathered)
        whole = sum(unit.gather_backward.bytes / unit.gather_backward.calls for unit in gathered)
        peak = _peak_with(run, lambda moment: whole - moment.bytes_by_kind.get("gathered", 0))
        reason = f"{_units(gathered)} are gathered again in backward."
        yield Suggestion("sharding.strategy", value, exposed, exposed, reason, memory_bytes=peak)


def _micro_batch(run: RunProfile) -> Iterator[Suggestion]:
    count, batch = _accumulation(run), run.facts.get("batch") or [0]
    if count < 2 or count % 2:
        return
    peak = _peak_with(run, _activations)
    whole = sum(u.gather_forward.transfer + u.gather_backward.transfer for u in run.units)
    reason = f"the units are gathered for each of {count} micro-batches of {batch[0]} samples."
    value = f"{2 * batch[0]}, with gradient_accumulation_steps {count // 2}"
    yield Suggestion("training.per_device_train_batch_size", value, whole / 2, whole, reason, memory_bytes=peak)


def _prefetch_forward(run: RunProfile) -> Iterator[Suggestion]:
    if not _overlaps(run) or run.facts.get("plan", {}).get("prefetch.forward") in (True, None):
        return
    gain, exposed = 0.0, 0.0
    for before, unit in zip(run.units, run.units[1:], strict=False):
        exposed += unit.gather_forward.exposed
        gain += min(unit.gather_forward.transfer, before.forward_seconds)
    reason = f"all-gathers of {_units([u for u in run.units[1:] if u.gather_forward.exposed])} are exposed in forward."
    yield Suggestion("prefetch.forward", "true", gain, exposed, reason)


def _prefetch_backward(run: RunProfile) -> Iterator[Suggestion]:
    backward = run.times.get("backward")
    now = run.facts.get("plan", {}).get("prefetch.backward")
    if not _overlaps(run) or now not in ("post", "none") or backward is None:
        return
    units = [unit for unit in run.units if unit.gather_backward.calls]
    exposed = sum(unit.gather_backward.exposed for unit in units)
    each = backward.compute / max(1, len(units))
    gain = sum(min(unit.gather_backward.transfer, each) for unit in units[:-1])
    reason = f"all-gathers of {_units(units)} begin when the unit's backward needs them ({now})."
    yield Suggestion("prefetch.backward", "pre", gain, exposed, reason)


def _rate_limit(run: RunProfile) -> Iterator[Suggestion]:
    plan = run.facts.get("plan", {})
    if not _overlaps(run) or plan.get("backend") != "fsdp1" or not plan.get("prefetch.limit_all_gathers"):
        return
    exposed = sum(unit.gather_forward.transfer + unit.gather_backward.transfer for unit in run.units)
    reason = f"FSDP1 waits {format_seconds(run.rate_limited)} before all-gathers because two units are gathered."
    gain = min(run.rate_limited, exposed)
    yield Suggestion("prefetch.limit_all_gathers", "false", gain, exposed, reason)


def _unit_size(run: RunProfile) -> Iterator[Suggestion]:
    facts = run.facts.get("units", {})
    units = [u for u in run.units if u.gather_forward.calls and not facts.get(u.name, {}).get("is_root", False)]
    calls = sum(unit.communication.calls for unit in units)
    if len(units) < 2 * _MERGED or not calls:
        return
    short = mean(unit.gather_forward.transfer / unit.gather_forward.calls for unit in units)
    if short > _SHORT_CALL:
        return
    whole = sum(unit.communication.transfer for unit in units)
    gain = call_latency(units) * calls * (1 - 1 / _MERGED)
    size = round(mean(facts.get(unit.name, {}).get("num_params", 0) for unit in units)) * _MERGED
    reason = f"{len(units)} units have all-gathers of {format_seconds(short)}. Larger units make fewer calls."
    yield Suggestion("wrap.min_num_params", f"{size}, with wrap.policy size", gain, whole, reason)


def call_latency(units: list[UnitProfile]) -> float:
    """Return the seconds of a collective that do not depend on its size: the intercept of a line through all units.

    With units of one size, the line goes through the shortest of their calls and half of its time.
    """
    each = [sums for u in units for sums in (u.gather_forward, u.gather_backward, u.reduce) if sums.calls]
    points = [(sums.bytes / sums.calls, sums.transfer / sums.calls) for sums in each]
    shortest = min(seconds for _, seconds in points)
    x, y = mean(size for size, _ in points), mean(seconds for _, seconds in points)
    spread = sum((size - x) ** 2 for size, _ in points)
    if spread < (0.1 * x) ** 2 * len(points):
        return shortest / 2
    slope = sum((size - x) * (seconds - y) for size, seconds in points) / spread
    return min(max(0.0, y - slope * x), shortest)


def _data_loader(run: RunProfile) -> Iterator[Suggestion]:
    times = run.times.get("data")
    if times is not None:
        reason = "the ranks wait for their data loaders. Workers load batches during the computation."
        yield Suggestion("training.dataloader_num_workers", "2", times.seconds, times.seconds, reason)


def _checkpointing(run: RunProfile) -> Iterator[Suggestion]:
    units = [unit for unit in run.units if unit.recomputed_seconds]
    if units:
        in_backward = [_activations(moment) for moment in run.memory if moment.where.startswith("backward")]
        kept = len(units) * mean(in_backward) if in_backward else 0.0
        peak = _peak_with(run, lambda moment: kept - _activations(moment))
        gain = sum(unit.recomputed_seconds for unit in units)
        backward = run.times["backward"].seconds if "backward" in run.times else gain
        reason = f"{_units(units)} are computed again in backward."
        yield Suggestion("activation.checkpointing", "none", gain, backward, reason, memory_bytes=peak)


def _reduce_dtype(run: RunProfile) -> Iterator[Suggestion]:
    facts = run.facts.get("units", {})
    units = [u for u in run.units if u.reduce.calls and facts.get(u.name, {}).get("reduce_dtype") == "fp32"]
    if not _overlaps(run) or not units:  # gloo adds bf16 more slowly than it saves time
        return
    whole = sum(unit.reduce.transfer for unit in units)
    gain = max(0.0, whole - call_latency(units) * sum(unit.reduce.calls for unit in units)) / 2
    reason = "gradients are reduced in fp32. Sums over many ranks lose digits in bf16."
    yield Suggestion("precision.reduce", "bf16", gain, whole, reason)


_RULES: Final[tuple[Callable[[RunProfile], Iterator[Suggestion]], ...]] = (
    _sync,
    _reshard,
    _micro_batch,
    _prefetch_forward,
    _prefetch_backward,
    _rate_limit,
    _unit_size,
    _data_loader,
    _checkpointing,
    _reduce_dtype,
)


def _overlaps(run: RunProfile) -> bool:
    return run.device != "cpu"


def _accumulation(run: RunProfile) -> int:
    return int(run.facts.get("forwards_per_step", 1))


def _peak_with(run: RunProfile, more: Callable[[Moment], float]) -> int | None:
    """Return the largest memory of the recorded step with more bytes at each moment; ``None`` if none was recorded."""
    return max((round(moment.bytes + max(0.0, more(moment))) for moment in run.memory), default=None)


def _activations(moment: Moment) -> float:
    return float(moment.bytes_by_kind.get("activations", 0))


def _fits(run: RunProfile, suggestion: Suggestion) -> bool:
    """Whether the device has memory for a suggested setting, or one of both is unknown."""
    peak, memory = suggestion.memory_bytes, run.facts.get("device_bytes")
    return peak is None or memory is None or peak <= _MEMORY_SHARE * memory


def _units(units: list[UnitProfile]) -> str:
    if not units:
        return "no unit"
    first, last = units[0].name or "the root", units[-1].name or "the root"
    return first if len(units) == 1 else f"{len(units)} units ({first} to {last})"
