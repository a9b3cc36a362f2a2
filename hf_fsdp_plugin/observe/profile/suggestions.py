"""Settings that would shorten a step, each with the milliseconds that the measured intervals promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hf_fsdp_plugin.observe.profile.run_profile import RunProfile, UnitProfile
from hf_fsdp_plugin.text import format_memory, format_seconds

_LEAST_SHARE: Final = 0.01
"""Share of a step below which a gain is not worth a suggestion."""
_LEAST_SECONDS: Final = 1e-4


@dataclass(frozen=True)
class Suggestion:
    """One setting.

    Attributes:
        setting: canonical name; of ``TrainingArguments`` if it begins with ``training.``.
        value: the suggested value.
        seconds: promised gain of a step.
        of_seconds: the time of a step of which the gain is a part.
        reason: what was measured.
        more_bytes: memory that a rank needs more with it; ``None`` if unknown or unchanged.
    """

    setting: str
    value: str
    seconds: float
    of_seconds: float
    reason: str
    more_bytes: int | None = None

    def __str__(self) -> str:
        gain, whole = format_seconds(self.seconds), format_seconds(self.of_seconds)
        text = f"{self.setting}: {self.value} would save about {gain} of {whole}: {self.reason}"
        if self.more_bytes is None:
            return text
        return f"{text} A rank needs up to {format_memory(self.more_bytes)} more memory."


def suggest(run: RunProfile) -> list[Suggestion]:
    """Return the suggestions, the largest gain first.

    A promise counts the time that remains if all ranks arrive together (``CallSums.transfer``): a collective that is
    left out does not remove the waiting for a slow rank. It is a part of the step without the profiler, which lengthens
    all that it measures. Prefetching is suggested only where collectives and computation run at the same time: gloo's
    collectives block the thread that trains.
    """
    rules = _RULES if run.device == "cpu" else (*_RULES, *_RULES_OF_DEVICES)
    least = max(_LEAST_SECONDS, _LEAST_SHARE * run.total.seconds)
    found = [each for rule in rules for each in rule(run) if each.seconds >= least and _fits(run, each)]
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
        yield Suggestion("training.sync_each_batch", "false", whole * (calls - 1) / calls, whole, reason)


def _reshard(run: RunProfile) -> Iterator[Suggestion]:
    values = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_zero2"}
    value = values.get(_plan(run).get("strategy", ""))
    gathered = [unit for unit in run.units if unit.gather_backward.calls]
    if gathered and value:
        exposed = sum(unit.gather_backward.transfer for unit in gathered)
        size = sum(unit.bytes for unit in gathered)
        reason = f"{_names(gathered)} are gathered again in backward."
        yield Suggestion("sharding.strategy", value, exposed, exposed, reason, more_bytes=size or None)


def _micro_batch(run: RunProfile) -> Iterator[Suggestion]:
    count, batch = _accumulation(run), run.facts.get("batch") or [0]
    if count % 2 == 0:
        whole = sum(unit.gather_forward.transfer + unit.gather_backward.transfer for unit in run.units)
        reason = f"the units are gathered for each of {count} micro-batches of {batch[0]} samples. "
        reason += "Activations need twice the memory."
        value = f"{2 * batch[0]}, with gradient_accumulation_steps {count // 2}"
        yield Suggestion("training.per_device_train_batch_size", value, whole / 2, whole, reason)


def _data_loader(run: RunProfile) -> Iterator[Suggestion]:
    if (times := run.times.get("data")) is not None:
        reason = "the ranks wait for their data loaders. Workers load batches during the computation."
        yield Suggestion("training.dataloader_num_workers", "2", times.seconds, times.seconds, reason)


def _checkpointing(run: RunProfile) -> Iterator[Suggestion]:
    units = [unit for unit in run.units if unit.recomputed_seconds]
    if units:
        gain = sum(unit.recomputed_seconds for unit in units)
        backward = run.times["backward"].seconds if "backward" in run.times else gain
        reason = f"{_names(units)} are computed again in backward. Without that, their activations stay in memory: "
        reason += "`hf-fsdp plan` predicts whether they fit."
        yield Suggestion("activation.checkpointing", "none", gain, backward, reason)


def _prefetch_forward(run: RunProfile) -> Iterator[Suggestion]:
    if _plan(run).get("prefetch.forward") is False:
        units = run.units[1:]
        exposed = sum(unit.gather_forward.exposed for unit in units)
        pairs = zip(run.units, units, strict=False)
        gain = sum(min(unit.gather_forward.transfer, before.forward_seconds) for before, unit in pairs)
        reason = f"all-gathers of {_names([u for u in units if u.gather_forward.exposed])} are exposed in forward."
        yield Suggestion("prefetch.forward", "true", gain, exposed, reason)


def _prefetch_backward(run: RunProfile) -> Iterator[Suggestion]:
    backward, now = run.times.get("backward"), _plan(run).get("prefetch.backward")
    if backward is not None and now in ("post", "none"):
        units = [unit for unit in run.units if unit.gather_backward.calls]
        each = backward.compute / max(1, len(units))
        gain = sum(min(unit.gather_backward.transfer, each) for unit in units[:-1])
        exposed = sum(unit.gather_backward.exposed for unit in units)
        reason = f"all-gathers of {_names(units)} begin when the unit's backward needs them ({now})."
        yield Suggestion("prefetch.backward", "pre", gain, exposed, reason)


def _reduce_dtype(run: RunProfile) -> Iterator[Suggestion]:
    facts = run.facts.get("units", {})
    units = [unit for unit in run.units if unit.reduce.calls and facts.get(unit.name, {}).get("reduce_dtype") == "fp32"]
    if units:
        whole = sum(unit.reduce.transfer for unit in units)
        reason = "gradients are reduced in fp32. Sums over many ranks lose digits in bf16."
        yield Suggestion("precision.reduce", "bf16", whole / 2, whole, reason)


Rule = Callable[[RunProfile], Iterator[Suggestion]]
_RULES: Final[tuple[Rule, ...]] = (_sync, _reshard, _micro_batch, _data_loader, _checkpointing)
_RULES_OF_DEVICES: Final[tuple[Rule, ...]] = (_prefetch_forward, _prefetch_backward, _reduce_dtype)
"""Rules that do not hold for gloo: its collectives block the thread that trains, and it adds bf16 slowly."""


def _plan(run: RunProfile) -> dict[str, Any]:
    plan: dict[str, Any] = run.facts.get("plan", {})
    return plan


def _accumulation(run: RunProfile) -> int:
    return int(run.facts.get("forwards_per_step", 1))


def _fits(run: RunProfile, suggestion: Suggestion) -> bool:
    """Whether the device has memory for a suggested setting, or one of both is unknown."""
    more, free = suggestion.more_bytes, run.facts.get("free_bytes")
    return more is None or free is None or more <= free


def _names(units: Sequence[UnitProfile]) -> str:
    if not units:
        return "no unit"
    first, last = units[0].name or "the root", units[-1].name or "the root"
    return first if len(units) == 1 else f"{len(units)} units ({first} to {last})"
