"""The profile of all ranks: phases, units, collectives and slow ranks, and the settings that would shorten a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any, Final, NamedTuple

from hf_fsdp_plugin.text import format_memory
from hf_fsdp_plugin.tools.plan.estimate.types import CollectiveKind
from hf_fsdp_plugin.tools.profile.rank_profile import PHASES, RankProfile, Sums, TimedCollective, Times, UnitSeconds
from hf_fsdp_plugin.tools.text import format_seconds

_LEAST_SHARE: Final = 0.01
"""Share of a step below which a gain is not worth a suggestion."""
_LEAST_SECONDS: Final = 1e-4
Sort = tuple[CollectiveKind, str | None, bool]
"""Kind and unit of a collective, and whether it is called in forward."""
CallKey = tuple[str, int, Sort, int]
"""Group of ranks, step, sort, and number of the call with these: the same collective on every rank."""
RunProfile = Mapping[str, Any]
"""The profile of a run, as ``profile.json`` contains it (docs/json.schema.json). Seconds are those of one step and one
rank, averaged. ``units`` are in the order of their first all-gathers.
"""


@dataclass(kw_only=True)
class CallSums(Sums):
    """Collectives of one kind and phase, per step.

    Attributes:
        seconds, exposed: averages over the ranks.
        transfer: exposed seconds of the rank that waits least in each call. The rest is waiting for other ranks, which
            another collective would have to do instead.
    """

    calls: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0
    transfer: float = 0.0


class _Arrival(NamedTuple):
    """One rank in one collective. Its time is by the clock of the first rank's host."""

    time: float
    rank: int
    call: TimedCollective


def merge_ranks(ranks: Sequence[RankProfile]) -> RunProfile:
    """Return the profile of all ranks. Raises ``ValueError`` if there are none."""
    if not ranks:
        raise ValueError("no rank has a profile")
    first = ranks[0]
    ends = {key: call.end for key, call in _keyed(first)}
    arrivals: dict[CallKey, list[_Arrival]] = defaultdict(list)
    unit_seconds: dict[str, list[UnitSeconds]] = {}
    for rank in ranks:
        # Ranks finish a collective together, which shows by how much the clock of another host is ahead.
        shifts = [call.end - ends[key] for key, call in _keyed(rank) if key in ends]
        ahead = median(shifts) if shifts and rank.host != first.host else 0.0
        for key, call in _keyed(rank):
            arrivals[key].append(_Arrival(call.arrived - ahead, rank.rank, call))
            if call.unit is not None:
                unit_seconds.setdefault(call.unit, [])
        for name, of_unit in rank.units.items():
            unit_seconds.setdefault(name, []).append(of_unit)
    sums: dict[Sort, CallSums] = defaultdict(CallSums)
    collectives: dict[CollectiveKind, CallSums] = defaultdict(CallSums)
    for (_, _, sort, _), of_call in arrivals.items():
        exposed = [arrival.call.exposed for arrival in of_call]
        seconds, transfer = sum(arrival.call.seconds for arrival in of_call), min(exposed) * len(of_call)
        added = CallSums(calls=len(of_call), seconds=seconds, exposed=sum(exposed), transfer=transfer)
        sums[sort] += added.scaled(1 / len(ranks) / first.num_steps)
        collectives[sort[0]] += added.scaled(1 / len(ranks) / first.num_steps)
    times = {
        phase: sum((rank.times[phase] for rank in ranks if phase in rank.times), Times()).scaled(1 / len(ranks))
        for phase in PHASES
        if any(phase in rank.times for rank in ranks)
    }
    return {
        "world_size": first.world_size,
        "num_ranks": len(ranks),
        "num_steps": first.num_steps,
        "device": first.device,
        "phases": {phase: each.to_json() for phase, each in times.items()},
        "total": sum(times.values(), Times()).to_json(),
        "overhead": _overhead(ranks),
        "collectives": {kind: asdict(each) for kind, each in collectives.items()},
        "units": [
            {
                "name": name,
                "bytes": first.facts.get("units", {}).get(name, {}).get("bytes", 0),
                "gather_forward": asdict(sums["all_gather", name, True]),
                "gather_backward": asdict(sums["all_gather", name, False]),
                "reduce": asdict(sums["reduce_scatter", name, False] + sums["all_reduce", name, False]),
                "forward_seconds": mean([each.forward for each in of_unit] or [0.0]),
                "recomputed_seconds": mean([each.recomputed for each in of_unit] or [0.0]),
            }
            for name, of_unit in unit_seconds.items()
        ],
        "ranks": list(_waits(ranks, arrivals.values())),
    }


def _overhead(ranks: Sequence[RankProfile]) -> dict[str, float | None]:
    """Return the median steps with and without the profiler, by the wall clock, and their difference.

    The difference is negative if steps differ for other reasons. A value is ``None`` without such steps.
    """
    profiled = [median(rank.profiled) for rank in ranks if rank.profiled]
    unprofiled = [median(rank.unprofiled) for rank in ranks if rank.unprofiled]
    return {
        "profiled_seconds": mean(profiled) if profiled else None,
        "unprofiled_seconds": mean(unprofiled) if unprofiled else None,
        "seconds": mean(profiled) - mean(unprofiled) if profiled and unprofiled else None,
    }


def _waits(ranks: Sequence[RankProfile], arrivals: Iterable[Sequence[_Arrival]]) -> Iterator[dict[str, Any]]:
    """Yield the step of each rank, and how long all other ranks of a collective wait for this rank alone."""
    late: dict[int, float] = defaultdict(float)
    last = Counter[int]()
    for of_call in arrivals:
        if len(of_call) > 1:
            before, latest = sorted(of_call, key=lambda arrival: arrival.time)[-2:]
            late[latest.rank] += latest.time - before.time
            last[latest.rank] += 1
    for rank in ranks:
        yield {
            "rank": rank.rank,
            "step_seconds": rank.total.seconds,
            "compute_seconds": rank.total.compute,
            "late_seconds": late[rank.rank] / ranks[0].num_steps,
            "last_share": last[rank.rank] / max(1, last.total()),
        }


def _keyed(rank: RankProfile) -> Iterator[tuple[CallKey, TimedCollective]]:
    """Yield the collectives with keys that are equal on all ranks that take part in one."""
    units, counts = rank.facts.get("units", {}), Counter[tuple[str, int, Sort]]()
    for call in rank.calls:
        group = units.get(call.unit, {}).get("group", "")
        if call.kind == "all_reduce" and call.unit is not None:
            group = f"replicas of rank {rank.rank}"  # which other ranks take part is not recorded
        sort: Sort = (call.kind, call.unit, call.phase not in ("backward", "clipping", "optimizer"))
        counts[group, call.step, sort] += 1
        yield (group, call.step, sort, counts[group, call.step, sort]), call


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


def suggest(run: RunProfile, facts: Mapping[str, Any]) -> list[Suggestion]:
    """Return the suggestions, the largest gain first.

    A promise counts the time that remains if all ranks arrive together (``CallSums.transfer``): a collective that is
    left out does not remove the waiting for a slow rank. It is a part of the step without the profiler, which lengthens
    all that it measures. Prefetching is suggested only where collectives and computation run at the same time: gloo's
    collectives block the thread that trains.

    Args:
        facts: the facts of the first rank (:class:`~hf_fsdp_plugin.tools.profile.rank_profile.RankProfile`).
    """
    least = max(_LEAST_SECONDS, _LEAST_SHARE * run["total"]["seconds"])
    found = [each for each in _suggestions(run, facts) if each.seconds >= least]
    share, overhead = 1.0, run["overhead"]
    if overhead["unprofiled_seconds"] and overhead["profiled_seconds"]:
        share = min(1.0, overhead["unprofiled_seconds"] / overhead["profiled_seconds"])
    scaled = [replace(each, seconds=share * each.seconds, of_seconds=share * each.of_seconds) for each in found]
    return sorted(scaled, key=lambda each: -each.seconds)


def _suggestions(run: RunProfile, facts: Mapping[str, Any]) -> Iterator[Suggestion]:
    """Yield every setting that changes something, with its gain in the profiled steps."""
    units, phases, plan = run["units"], run["phases"], facts.get("plan", {})
    count, batch = facts.get("forwards_per_step", 1), facts.get("batch") or [0]

    calls = max((unit["reduce"]["calls"] for unit in units), default=0.0)
    if count > 1 and calls > 1.5:
        whole = _seconds(units, "reduce")
        reason = f"gradients are reduced after each of {count} micro-batches. Without it, ranks keep whole gradients."
        yield Suggestion("training.sync_each_batch", "false", whole * (calls - 1) / calls, whole, reason)

    values = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_zero2"}
    regathered = [unit for unit in units if unit["gather_backward"]["calls"]]
    if regathered and (value := values.get(plan.get("strategy"))):
        whole, size = _seconds(regathered, "gather_backward"), sum(unit["bytes"] for unit in regathered)
        reason = f"{_names(regathered)} are gathered again in backward."
        yield Suggestion("sharding.strategy", value, whole, whole, reason, more_bytes=size or None)

    if count % 2 == 0:
        whole = _seconds(units, "gather_forward", "gather_backward")
        reason = f"the units are gathered for each of {count} micro-batches of {batch[0]} samples. "
        reason += "Activations need twice the memory."
        value = f"{2 * batch[0]}, with gradient_accumulation_steps {count // 2}"
        yield Suggestion("training.per_device_train_batch_size", value, whole / 2, whole, reason)

    seconds = phases.get("data", {}).get("seconds", 0.0)
    reason = "the ranks wait for their data loaders. Workers load batches during the computation."
    yield Suggestion("training.dataloader_num_workers", "2", seconds, seconds, reason)

    recomputed = [unit for unit in units if unit["recomputed_seconds"]]
    gain = sum(unit["recomputed_seconds"] for unit in recomputed)
    reason = f"{_names(recomputed)} are computed again in backward. Without that, their activations stay in memory: "
    reason += "`hf-fsdp plan` predicts whether they fit."
    whole = phases.get("backward", {}).get("seconds", gain)
    yield Suggestion("activation.checkpointing", "none", gain, whole, reason)

    if run["device"] == "cpu":  # gloo's collectives block the thread that trains, and it adds bf16 slowly
        return
    if plan.get("prefetch.forward") is False:
        gathers = [unit["gather_forward"] for unit in units[1:]]
        before = [unit["forward_seconds"] for unit in units]
        gain = sum(min(gather["transfer"], seconds) for gather, seconds in zip(gathers, before, strict=False))
        exposed = [unit for unit in units[1:] if unit["gather_forward"]["exposed"]]
        reason = f"all-gathers of {_names(exposed)} are exposed in forward."
        yield Suggestion("prefetch.forward", "true", gain, sum(gather["exposed"] for gather in gathers), reason)

    if "backward" in phases and (now := plan.get("prefetch.backward")) in ("post", "none"):
        each = phases["backward"]["compute_seconds"] / max(1, len(regathered))
        gain = sum(min(unit["gather_backward"]["transfer"], each) for unit in regathered[:-1])
        whole = sum(unit["gather_backward"]["exposed"] for unit in regathered)
        reason = f"all-gathers of {_names(regathered)} begin when the unit's backward needs them ({now})."
        yield Suggestion("prefetch.backward", "pre", gain, whole, reason)

    known = facts.get("units", {})
    whole = _seconds([unit for unit in units if known.get(unit["name"], {}).get("reduce_dtype") == "fp32"], "reduce")
    reason = "gradients are reduced in fp32. Sums over many ranks lose digits in bf16."
    yield Suggestion("precision.reduce", "bf16", whole / 2, whole, reason)


def _seconds(units: Sequence[Mapping[str, Any]], *names: str) -> float:
    """Return the seconds of collectives of units that remain if all ranks arrive together."""
    return sum(unit[name]["transfer"] for unit in units for name in names)


def _names(units: Sequence[Mapping[str, Any]]) -> str:
    if not units:
        return "no unit"
    first, last = units[0]["name"] or "the root", units[-1]["name"] or "the root"
    return first if len(units) == 1 else f"{len(units)} units ({first} to {last})"
