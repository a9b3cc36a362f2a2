"""Train, save, merge, export and resume on pairs of axes of a mesh: on four gloo ranks, and three axes on eight.

The Trainer trains small models in fp32 for six steps and saves a checkpoint after three and six, in the background.
Compared are

- losses and norms of gradients with one process of the stock Trainer, on the same global batches,
- the merged checkpoint and the exported model with the weights that were trained,
- the losses after a resume from the third step on a mesh without the axes, with those of one process.

Meshes that are not possible have the code of their problem instead.

    python -m scripts.bench axes                          (ten minutes on 2 cores; writes docs/results/axes.json)
    python -m scripts.bench axes --only tensor --out /tmp/axes.json
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from scripts.bench.common import make_parser
from scripts.bench.tables.update_results import write_result
from tests.support.axes_runs import train

PAIRS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "shard × context": ("llama", {"cp": 2}),
    "shard × context (alltoall)": ("llama", {"cp": 2, "cp_comm_strategy": "alltoall"}),
    "shard × tensor": ("llama", {"tp": 2}),
    "shard × expert": ("mixtral", {"ep": 2}),
    "expert on all ranks": ("mixtral", {"ep": 4}),
    "replicate × context": ("llama", {"dp_replicate": 2, "cp": 2}),
    "replicate × tensor": ("llama", {"dp_replicate": 2, "tp": 2}),
    "replicate × expert": ("mixtral", {"dp_replicate": 2, "ep": 2}),
    "context × tensor": ("llama", {"cp": 2, "tp": 2}),
    "context × expert": ("mixtral", {"cp": 2, "ep": 2}),
    "tensor × expert": ("mixtral", {"tp": 2, "ep": 2}),
    "replicate × shard × context": ("llama", {"dp_replicate": 2, "dp_shard": 2, "cp": 2}),
    "replicate × shard × tensor": ("llama", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    "shard × sequence": ("llama", {"sp": 2}),
    "shard × pipeline": ("llama", {"pp": 2}),
}
"""Name of a pair -> model, and the sizes above 1. The ranks are four, or the product of three axes."""


def num_ranks(sizes: Mapping[str, Any]) -> int:
    """Return the number of ranks for the sizes of a row."""
    return max(4, math.prod(sizes.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp")))


def relative_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest difference of two numbers at the same place, as a part of the expected one."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def is_equal(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether all weights are equal bit for bit."""
    import torch

    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def codes_of(call: Callable[[], Any]) -> list[str]:
    """Return the codes of the errors with which a call is refused."""
    from hf_fsdp_plugin.problems import SpecError

    try:
        call()
    except SpecError as error:
        return [problem.code for problem in error.problems if problem.severity == "error"]
    return []


def refused_by_config(sizes: dict[str, Any], version: int) -> list[str]:
    """Return the codes with which the config of a mesh is refused, before any process starts."""
    from hf_fsdp_plugin.spec.load import load_spec
    from tests.support.axes_runs import config_of

    config = config_of(sizes, version) | {"num_processes": num_ranks(sizes)}
    return codes_of(lambda: load_spec(config, environ={}))


def measure(ranks: Any, weights: str, sizes: dict[str, Any], expected: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, save, merge, export and resume on one mesh."""
    from transformers import AutoModelForCausalLM

    from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest
    from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
    from hf_fsdp_plugin.tools.verify.verification import verify
    from tests.support.training import differing

    run = ranks.run(train, weights, str(folder), sizes, settings={"fsdp_async_save": True})[0]
    verdict, manifest = verify(folder / "checkpoint-6"), read_manifest(folder / "checkpoint-6")
    merge(folder / "checkpoint-6", folder / "merged", MergeOptions(verify=True, config=Path(weights)))
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", distributed_config=None).state_dict()
    resumed = ranks.run(train, weights, str(folder), {}, resume=True)[0]
    return {
        "losses": relative_difference(run["losses"], expected["losses"]),
        "norms": relative_difference(run["norms"], expected["norms"]),
        "settings_that_differ": len(differing(run["report"])),
        "mesh": manifest.mesh if manifest is not None else None,
        "asynchronous": manifest is not None and manifest.asynchronous,
        "verified": verdict.ok,
        "merged_equal": is_equal(merged, run["weights"]),
        "exported_equal": is_equal(run["exported"], run["weights"]),
        "resumed_losses": relative_difference(resumed["losses"], expected["losses"]),
    }


def main() -> int:
    parser = make_parser(__doc__, "axes")
    parser.add_argument("--only", default="", help="pairs whose names contain this text")
    args = parser.parse_args()

    from tests.support.distributed_config_runs import one_process
    from tests.support.ranks import RankError, Ranks
    from tests.support.tiny import tiny_llama, tiny_mixtral

    pairs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="axes_") as name, ExitStack() as at_end:
        worlds: dict[int, Ranks] = {}
        weights, expected = {}, {}
        for model, build in {"llama": tiny_llama, "mixtral": lambda: tiny_mixtral(experts=4)}.items():
            weights[model] = str(Path(name) / model)
            build().save_pretrained(weights[model])
            expected[model] = one_process(weights[model], str(Path(name) / "one"))
        for pair, (model, sizes) in PAIRS.items():
            if args.only not in pair:
                continue
            row: dict[str, Any] = {"model": model, "sizes": sizes, "ranks": num_ranks(sizes)}
            row["fsdp1"] = refused_by_config(sizes, 1)
            row["refused"] = refused_by_config(sizes, 2)
            if not row["refused"]:
                folder = Path(tempfile.mkdtemp(dir=name))
                if row["ranks"] not in worlds:
                    worlds[row["ranks"]] = Ranks(row["ranks"])
                    at_end.callback(worlds[row["ranks"]].stop)
                try:
                    row["fsdp2"] = measure(worlds[row["ranks"]], weights[model], sizes, expected[model], folder)
                except RankError as error:
                    row["failed"] = str(error).strip().splitlines()[-1]
            pairs[pair] = row
            print(pair, row, flush=True)
    write_result("axes", args.out, {"pairs": pairs})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
