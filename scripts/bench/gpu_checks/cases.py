"""Which checks run on this machine, and in which order: those that tell most come first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.strategies import STRATEGIES
from scripts.bench.gpu_checks.base import CHECKS, Case
from scripts.bench.gpu_checks.layers import MODES

_FP16 = {"precision": "fp16"}
_OFFLOAD = {"offload": True}
_EXPANDABLE = {"version": 2, "environment": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}
_FIRST: Sequence[str | tuple[str, Mapping[str, Any]]] = (
    # Does it start, and are results right that would be wrong silently?
    "training", ("scaler", _FP16), ("scaler", {**_FP16, **_OFFLOAD}), "fused_resume", "parity", "memory_error",
    ("extra_forward", _OFFLOAD), ("generation", _OFFLOAD), "sync_free_steps",
    # Speed and memory.
    "layers", "throughput", "host_time", "prediction", "load_speed", "save_stall",
    "generation", "compiled", "nccl", "overlap", "hangs", "profiler", "launcher",
    ("training", {"strategy": "hybrid_shard"}),
)  # fmt: skip
"""Run under FSDP2, then under FSDP1, before all others."""
_OTHERS: Sequence[str | tuple[str, Mapping[str, Any]]] = (
    "lora", "qlora", "collectives", "contexts", "pinned_saves", "state_dict", ("state_dict", _OFFLOAD),
    "checkpointed_prediction", ("prediction", _EXPANDABLE), ("host_prediction", {**_OFFLOAD, "version": 2}),
    ("training", _OFFLOAD), ("clipping", {"precision": "fp32"}), "activation_offload", "optimizer_offload",
    "loading", "extra_forward", "ignored_modules", ("ignored_modules", _FP16), "reports", "process_groups", "restart",
    "bench", "one_visible_gpu", "resume_on_one_rank",
)  # fmt: skip
_ONCE = ("pinning", "ranks_per_machine", "spawned_child")
"""They do not depend on the version of FSDP."""
_SHARED = ("training", "loading", "state_dict", "scaler")
"""Run by two ranks on one GPU."""


def cases(*, num_devices: int, device: str) -> list[Case]:
    """Return every case that a machine can run, in order: of several GPUs those of two ranks first.

    On one GPU, a case of one rank that needs two is listed too, because its row says that it was not seen.
    """
    base = {
        "device": device, "backend": get_device(device).collectives, "version": 2, "strategy": "full_shard",
        "precision": "bf16", "offload": False,
    }  # fmt: skip
    found: list[Case] = []
    for ranks in (2, 1) if num_devices > 1 else (1,):
        found += [{**base, **case, "ranks": ranks} for case in _of_one_world()]
    if num_devices >= 4:
        strategies = [name for name, strategy in STRATEGIES.items() if strategy.hybrid]
        found += [
            {**base, "check": "training", "strategy": strategy, "version": version, "ranks": 4}
            for strategy, version in product(strategies, (2, 1))
        ]
    if device == "cuda" and num_devices == 1:
        # NCCL rejects two ranks on one device. gloo copies through host memory, so that FSDP's streams and units run.
        position = next(number for number, case in enumerate(found) if case["check"] == "lora")
        found[position:position] = [
            {**base, "check": check, "version": version, "ranks": 2, "backend": "gloo", "shared": True,
             "precision": "fp16" if check == "scaler" else "bf16"}
            for check, version in product(_SHARED, (2, 1))
        ]  # fmt: skip
    if device == "cpu":
        found = [{**case, "precision": "fp32" if case["precision"] == "fp16" else case["precision"]} for case in found]
    once: dict[tuple[str, int, int], Case] = {}
    for case in found:
        once.setdefault(key(case), case)
    return sorted(once.values(), key=lambda case: case["ranks"] < CHECKS[case["check"]].min_ranks)


def _of_one_world() -> Iterator[Case]:
    for each in (*_FIRST, *_OTHERS):
        check, changed = (each, {}) if isinstance(each, str) else each
        if check == "layers":  # torchtitan's figures, and the hand-written loops, are of FSDP2
            yield from ({"check": check, "version": 2, "mode": mode} for mode in MODES)
            continue
        for version in (2, 1) if "version" not in changed else (changed["version"],):
            yield {"check": check, "version": version, **changed}
        if check == "save_stall":
            yield from ({"check": name} for name in _ONCE)
    for strategy, version, precision in product(STRATEGIES, (2, 1), ("bf16", "fp16", "fp32")):
        yield {"check": "training", "strategy": strategy, "version": version, "precision": precision}
    for version in (2, 1):
        yield {"check": "training", "strategy": "no_shard", "offload": True, "version": version}


def name_of(case: Case) -> str:
    """Return the name of a case without version and ranks: ``scaler fp16 offload``."""
    words = [case["check"], *([case["strategy"]] if case["check"] == "training" else []), case["precision"]]
    words += [case["mode"]] if "mode" in case else []
    words += ["expandable segments"] if "environment" in case else []
    return " ".join([*words, *(["offload"] if case["offload"] else []), *(["one GPU"] if case.get("shared") else [])])


def one_of_each(every: Sequence[Case]) -> list[Case]:
    """Return the first case of each check, and of each mode of a check."""
    first: dict[tuple[str, str], Case] = {}
    for case in every:
        first.setdefault((case["check"], case.get("mode", "")), case)
    return list(first.values())


def key(case: Case) -> tuple[str, int, int]:
    """Return what identifies the result of a case: name, FSDP version and number of ranks."""
    return name_of(case), case["version"], case["ranks"]


def full_name(case: Case) -> str:
    """Return the name that ``--only`` matches: ``scaler fp16, FSDP2, 1 rank``."""
    name, version, ranks = key(case)
    return f"{name}, FSDP{version}, {ranks} rank{'s' if ranks > 1 else ''}"
