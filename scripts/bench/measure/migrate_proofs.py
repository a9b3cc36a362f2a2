"""``hf-fsdp migrate --prove`` on 20 public configs: losses, gradient norms and memory under FSDP1 and FSDP2.

    python -m scripts.bench migrate_proofs    (half an hour on 2 cores; writes docs/results/migrate_proofs.json)

The settings are in migrate_proofs.yaml. Each config is written to a temporary folder and migrated to the other version.
Both train a tiny clone of a Llama on CPU ranks. The way back must give the same settings.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from hf_fsdp_plugin.sources.tree import ConfigFile
from hf_fsdp_plugin.tools.migrate.rewriting import migrate
from scripts.bench.common import child_environment, make_parser
from scripts.bench.tables.update_results import write_result

CONFIGS = Path(__file__).with_suffix(".yaml")
MIGRATE = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "migrate", "--prove", "--json"]
RANKS_PER_MACHINE = 2
IGNORED_BY_FSDP2 = ("params.use_orig", "prefetch.limit_all_gathers")


def main() -> int:
    parser = make_parser(__doc__, "migrate_proofs")
    parser.add_argument("--only", default="", help="only configs whose name contains this")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, row in yaml.safe_load(CONFIGS.read_text(encoding="utf-8")).items():
            if args.only in name:
                path = Path(folder) / "fsdp.yaml"
                path.write_text(config_text(row))
                rows.append({"config": name, "from": row["from"], **proved(path), "returns": returns(path)})
                print(rows[-1], flush=True)
    counts = {"equal": sum(row["equal"] for row in rows), "returned": sum(row["returns"] for row in rows)}
    write_result("migrate_proofs", args.out, {"rows": rows, "configs": len(rows), **counts})
    return 0 if set(counts.values()) == {len(rows)} else 1


def config_text(row: dict[str, Any]) -> str:
    """Return a file of Accelerate with the settings of a row."""
    replicas, shards = row.get("mesh", (0, 0))
    machines = row["launch"].get("num_machines", 1)
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_machines": machines}
    config |= {"num_processes": replicas * shards or machines * RANKS_PER_MACHINE, "use_cpu": False, **row["launch"]}
    config["fsdp_config"] = {f"fsdp_{key}": value for key, value in row["fsdp"].items()}
    if replicas:
        sizes = {"dp_replicate_size": replicas, "dp_shard_size": shards}
        config["parallelism_config"] = {f"parallelism_config_{key}": size for key, size in sizes.items()}
    return yaml.safe_dump(config, sort_keys=False)


def proved(path: Path) -> dict[str, Any]:
    """Return the versions, and the largest relative differences of the two runs."""
    command = [*MIGRATE, str(path)]
    environment = {**child_environment(), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    tree = json.loads(done.stdout)
    if tree.get("proof") is None:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        return {"equal": False, "exit_code": done.returncode}
    rows = {row["what"]: row for row in tree["proof"]["rows"]}

    def largest(start: str) -> float:
        return max(row["difference"] for what, row in rows.items() if what.startswith(start))

    return {
        "from_version": tree["from"],
        "to_version": tree["to"],
        "mesh": rows["mesh"]["new"],
        "equal": bool(tree["proof"]["equal"]),
        "tolerance": tree["proof"]["tolerance"],
        "loss_difference": largest("loss"),
        "norm_difference": largest("gradient norm"),
        "peak_bytes": {"old": rows["memory, peak"]["old"], "new": rows["memory, peak"]["new"]},
        "changes": len(tree["changes"]),
        "settings_that_differ": rows["settings that differ from the config"]["new"],
    }


def returns(path: Path) -> bool:
    """Return whether the migration there and back gives the same settings."""
    there = migrate(ConfigFile.at(path))
    back = migrate(there.new)
    ignored = IGNORED_BY_FSDP2 if there.old_spec.fsdp.version == 2 else ()
    return all(back.new_spec.get(name) == value for name, value, _ in there.old_spec.settings() if name not in ignored)


if __name__ == "__main__":
    raise SystemExit(main())
