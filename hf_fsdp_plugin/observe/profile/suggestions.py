"""Settings that would shorten a step, each with the milliseconds that the measured intervals promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hf_fsdp_plugin.observe.profile.run_profile import RunProfile
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


def suggest(run: RunProfile, facts: ProfileFacts) -> list[Suggestion]:
    """Return the suggestions, the largest gain first.

    A promise counts the time that remains if all ranks arrive together (``CallSums.transfer``): a collective that is
    left out does not remove the waiting for a slow rank. It is a part of the step without the profiler, which lengthens
    all that it measures. Prefetching is suggested only where collectives and computation run at the same time: gloo's
    collectives block the thread that trains.

    Args:
        facts: the facts of the first rank (:class:`~hf_fsdp_plugin.observe.profile.rank_profile.RankProfile`).
    """
    rules = _RULES if run["device"] == "cpu" else (*_RULES, *_RULES_OF_DEVICES)
    least = max(_LEAST_SECONDS, _LEAST_SHARE * run["total"]["seconds"])
    found = [each for rule in rules for each in rule(run, facts) if each.seconds >= least]
    share, overhead = 1.0, run["overhead"]
    if overhead["unprofiled_seconds"] and overhead["profiled_seconds"]:
        share = min(1.0, overhead["unprofiled_seconds"] / overhead["profiled_seconds"])
    scaled = [replace(each, seconds=share * each.seconds, of_seconds=share * each.of_seconds) for each in found]
    return sorted(scaled, key=lambda each: -each.seconds)


def _sync(run: RunProfile, facts: ProfileFacts) -> Iterator[Suggestion]:
    count = facts.get("forwards_per_step", 1)
    calls = max((unit["reduce"]["calls"] for unit in run["units"]), default=0.0)
    if count > 1 and calls > 1.5:
        whole = _sum(run["units"], "reduce")
        reason = f"gradients are reduced after each of {count} micro-batches. Without it, ranks keep whole gradients."
        yield Suggestion("training.sync_each_batch", "false", whole * (calls - 1) / calls, whole, reason)


def _reshard(run: RunProfile, facts: ProfileFacts) -> Iterator[Suggestion]:
    values = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_zero2"}
    gathered = [unit for unit in run["units"] if unit["gather_backward"]["calls"]]
    if gathered and (value := values.get(facts.get("plan", {}).get("strategy"))):
        exposed, size = _sum(gathered, "gather_backward"), sum(unit["bytes"] for unit in gathered)
        reason = f"{_names(gathered)} are gathered again in backward."
        yield Suggestion("sharding.strategy", value, exposed, exposed, reason, more_bytes=size or None)


def _micro_batch(run: RunProfile, facts: ProfileFacts) -> Iterator[Suggestion]:
    count, batch = facts.get("forwards_per_step", 1), facts.get("batch") or [0]
    if count % 2 == 0:
        whole = _sum(run["units"], "gather_forward", "gather_backward")
        reason = f"the units are gathered for each of {count} micro-batches of {batch[0]} samples. "
        reason += "Activations need twice the memory."
        value = f"{2 * batch[0]}, with gradient_accumulation_steps {count // 2}"
        yield Suggestion("training.per_device_train_batch_size", value, whole / 2, whole, reason)


def _data_loader(run: RunProfile, facts: ProfileFacts) -> Iterator[Suggestion]:
    seconds = run["phases"].get("data", {}).get("seconds", 0.0)
    reason = "the ranks wait for their data loaders. Workers load batches during the computation."
    yield Suggestion("training.dataloader_num_workers", "2", seconds, seconds, reason)


def _checkpointing(run: RunProfile, facts: ProfileFacts) -> Iterator[Suggestion]:
    units = [unit for unit in run["units"] if unit["recomputed_seconds"]]
    gain = sum(unit["recomputed_seconds"] for unit in units)
    backward = run["phases"].get("backward", {}).get("seconds", gain)
    reason = f"{_names(units)} are computed again in backward. Without that, their activations stay in memory: "
    reason += "`hf-fsdp plan` predicts whether they fit."
    yield Suggestion("activation.checkpointing", "none", gain, backward, reason)


def _prefetch_forward(run: RunProfile, facts: ProfileFacts) -> Iterator[Suggestion]:
    if facts.get("plan", {}).get("prefetch.forward") is False:
        units = run["units"][1:]
        gathers = [unit["gather_forward"] for unit in units]
        before = [unit["forward_seconds"] for unit in run["units"]]
        gain = sum(min(gather["transfer"], seconds) for gather, seconds in zip(gathers, before, strict=False))
        exposed = [unit for unit in units if unit["gather_forward"]["exposed"]]
        reason = f"all-gathers of {_names(exposed)} are exposed in forward."
        whole = sum(gather["exposed"] for gather in gathers)
        yield Suggestion("prefetch.forward", "true", gain, whole, reason)


def _prefetch_backward(run: RunProfile, facts: ProfileFacts) -> Iterator[Suggestion]:
    backward, now = run["phases"].get("backward"), facts.get("plan", {}).get("prefetch.backward")
    if backward is not None and now in ("post", "none"):
        units = [unit for unit in run["units"] if unit["gather_backward"]["calls"]]
        each = backward["compute_seconds"] / max(1, len(units))
        gain = sum(min(unit["gather_backward"]["transfer"], each) for unit in units[:-1])
        exposed = sum(unit["gather_backward"]["exposed"] for unit in units)
        reason = f"all-gathers of {_names(units)} begin when the unit's backward needs them ({now})."
        yield Suggestion("prefetch.backward", "pre", gain, exposed, reason)


def _reduce_dtype(run: RunProfile, facts: ProfileFacts) -> Iterator[Suggestion]:
    known = facts.get("units", {})
    units = [unit for unit in run["units"] if known.get(unit["name"], {}).get("reduce_dtype") == "fp32"]
    whole = _sum(units, "reduce")
    reason = "gradients are reduced in fp32. Sums over many ranks lose digits in bf16."
    yield Suggestion("precision.reduce", "bf16", whole / 2, whole, reason)


ProfileFacts = Mapping[str, Any]
Unit = Mapping[str, Any]
Rule = Callable[[RunProfile, ProfileFacts], Iterator[Suggestion]]
_RULES: Final[tuple[Rule, ...]] = (_sync, _reshard, _micro_batch, _data_loader, _checkpointing)
_RULES_OF_DEVICES: Final[tuple[Rule, ...]] = (_prefetch_forward, _prefetch_backward, _reduce_dtype)
"""Rules that do not hold for gloo: its collectives block the thread that trains, and it adds bf16 slowly."""


def _sum(units: Sequence[Unit], *names: str) -> float:
    """Return the seconds of collectives of units that remain if all ranks arrive together."""
    return sum(unit[name]["transfer"] for unit in units for name in names)


def _names(units: Sequence[Unit]) -> str:
    if not units:
        return "no unit"
    first, last = units[0]["name"] or "the root", units[-1]["name"] or "the root"
    return first if len(units) == 1 else f"{len(units)} units ({first} to {last})"
