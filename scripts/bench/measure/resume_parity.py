"""Compare the losses after a resume with those of the uninterrupted run.

Trains a tiny Llama with the Trainer on real gloo ranks (the cases of tests/gloo/test_resume.py): once without
interruption, and once with resumes that change the world size, strategy, FSDP version or state dict type. Prints the
largest relative difference of the ten losses after the last resume.

    python -m scripts.bench resume_parity         (five minutes on 2 cores; writes docs/results/resume_parity.json)
"""

from __future__ import annotations

import tempfile
from typing import Any

from scripts.bench.common import make_parser
from scripts.bench.tables.update_results import write_result
from tests.support.resume_runs import NUM_STEPS, train

Leg = tuple[int, int, str, str, bool]
"""Number of ranks, FSDP version, strategy, state dict type, asynchronous save."""

FULL, GRAD, NONE, HYBRID = "full_shard", "shard_grad_op", "no_shard", "hybrid_shard"
CHAINS: dict[str, tuple[Leg, ...]] = {
    "the same": ((2, 2, FULL, "SHARDED", False),) * 2,
    "the same, FSDP1": ((2, 1, FULL, "SHARDED", False),) * 2,
    "the same, asynchronous": ((2, 2, FULL, "SHARDED", True),) * 2,
    "the same, full": ((2, 2, FULL, "FULL", False),) * 2,
    "the same, local": ((2, 2, FULL, "LOCAL", False),) * 2,
    "FSDP1 to FSDP2": ((2, 1, FULL, "SHARDED", False), (2, 2, FULL, "SHARDED", False)),
    "FSDP2 to FSDP1": ((2, 2, FULL, "SHARDED", False), (2, 1, FULL, "SHARDED", False)),
    "full to sharded to local": (
        (2, 2, FULL, "FULL", False), (2, 2, FULL, "SHARDED", False), (2, 2, FULL, "LOCAL", False),
        (2, 2, FULL, "FULL", False),
    ),
    "2 to 4 to 1 to 3 ranks": tuple((world, 2, FULL, "SHARDED", False) for world in (2, 4, 1, 3)),
    "2 to 4 to 1 to 3 ranks, FSDP1": tuple((world, 1, FULL, "SHARDED", False) for world in (2, 4, 1, 3)),
    "2 to 4 to 1 to 3 ranks, local": tuple((world, 2, FULL, "LOCAL", True) for world in (2, 4, 1, 3)),
    "2 to 4 to 1 to 3 ranks, full": tuple((world, 1, FULL, "FULL", True) for world in (2, 4, 1, 3)),
    "full to hybrid to none to grad-op": tuple((4, 2, s, "SHARDED", False) for s in (FULL, HYBRID, NONE, GRAD)),
    "full to hybrid to none to grad-op, FSDP1": tuple((4, 1, s, "SHARDED", False) for s in (FULL, HYBRID, NONE, GRAD)),
}  # fmt: skip


def config(leg: Leg) -> dict[str, Any]:
    world, version, strategy, kind, asynchronous = leg
    settings = {
        "fsdp_version": version, "sharding_strategy": strategy, "state_dict_type": kind, "async_save": asynchronous,
    }  # fmt: skip
    if strategy == HYBRID:
        settings["dp_shard_size"] = world // 2
    return {"fsdp": "auto_wrap", "fsdp_config": settings}


def run_chain(worlds: Any, chain: tuple[Leg, ...]) -> float:
    """Return the largest relative difference of the losses after the last resume from the uninterrupted run."""

    with tempfile.TemporaryDirectory() as folder:
        whole = worlds(chain[0][0]).run(train, f"{folder}/whole", until=NUM_STEPS, **config(chain[0]))[0]
        cuts = [*range(5 - len(chain), 4), NUM_STEPS]
        for number, (leg, until) in enumerate(zip(chain, cuts, strict=True)):
            ranks = worlds(leg[0])
            run = ranks.run(train, f"{folder}/cut", until=until, resume=number > 0, **config(leg))[0]
    steps = range(cuts[-2] + 1, cuts[-2] + 11)
    return max(abs(run["losses"][step] - whole["losses"][step]) / abs(whole["losses"][step]) for step in steps)


def main() -> int:
    args = make_parser(__doc__, "resume_parity").parse_args()
    from tests.support.ranks import Ranks

    started: dict[int, Any] = {}

    def worlds(size: int) -> Any:
        if size not in started:
            started[size] = Ranks(size)
        return started[size]

    rows = []
    for name, chain in CHAINS.items():
        limit = 1e-6 if len(set(chain)) == 1 else 1e-4
        distance = run_chain(worlds, chain)
        rows.append({"case": name, "largest_relative_difference": distance, "limit": limit})
        print(f"{name:40} {distance:.1e}  (at most {limit:.0e})", flush=True)
    for ranks in started.values():
        ranks.stop()
    write_result("resume_parity", args.out, {"losses_compared": 10, "cases": rows})
    return int(any(row["largest_relative_difference"] > row["limit"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
