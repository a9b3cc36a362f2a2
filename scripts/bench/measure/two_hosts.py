"""Two machines on one: bytes over a link of limited rate, and the loss of a machine.

``scripts/two_hosts.sh`` starts this program. Two network namespaces are the machines; ``hf-fsdp launch --num_machines
2`` runs in each, with two gloo ranks. For full shard and hybrid shard, the bytes that a host sends over the link in a
step stand beside the predicted ones: the collectives that ``tools/plan/estimate/time.py`` predicts, times what gloo
sends for a byte of them. Then a machine is lost in the middle of a training, by SIGKILL to its launcher and ranks,
comes back, and the run must continue from the newest checkpoint with the losses of an uninterrupted run. At last,
a run with ``--num_machines 1:2`` goes on with one machine while the other is away, and with both when it is back; the
samples of a step stay the same, by gradient accumulation. With ``--only storage``, the machines have no common folder,
the checkpoints are in an object store on host 0, and the lost machine comes back with an empty disk.

Gloo's algorithms are rings over the ranks in order, so a group has one connection from host to host in each direction.
Of B bytes (the whole tensor) n ranks send over each connection: all-gather (n-1)/n B, all-reduce 2(n-1)/n B, and
reduce-scatter as much as an all-reduce, because ProcessGroupGloo implements it as one. The measured factors are in the
result.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from scripts.bench.common import RANKS, ROOT, make_parser
from scripts.bench.ranks.two_hosts_link import ADDRESSES, FOLDER, Hosts
from scripts.bench.tables.update_results import write_result

NUM_STEPS, LOSE_AT, RETURN_AT = 12, 7, 14
NUM_ELASTIC_STEPS, ELASTIC_PAUSE_S = 40, 0.5
LIMIT_S = 600.0
STORE_PORT = 5000
INSIDE = "HF_FSDP_TWO_HOSTS"
FACTORS = {"all_gather": 1.0, "reduce_scatter": 2.0, "all_reduce": 2.0}
"""What a rank of gloo sends, in units of (n-1)/n of the whole tensor."""
CONFIG = """\
distributed_type: FSDP
num_machines: 2
num_processes: 4
main_process_ip: host0
main_process_port: 29500
rdzv_backend: c10d
use_cpu: true
fsdp_config:
  fsdp_version: {version}
  fsdp_sharding_strategy: {strategy}
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 100000
"""
SCRIPT = str(RANKS / "two_hosts.py")


class Run:
    """A launcher on each host."""

    def __init__(
        self,
        hosts: Hosts,
        name: str,
        words: Sequence[str],
        *,
        strategy: str,
        version: int,
        flags: Sequence[str] = (),
        storage: str = "",
    ) -> None:
        self.hosts, self.name, self.words, self.flags = hosts, name, list(words), list(flags)
        self.config = FOLDER / f"{name}.yaml"
        self.config.write_text(CONFIG.format(version=version, strategy=strategy))
        if storage:
            self.config.write_text(f"{self.config.read_text()}  fsdp_checkpoint_storage: {storage}\n")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.processes = [self.start(0), self.start(1)]

    def log(self, number: int) -> str:
        return (FOLDER / f"{self.name}.{number}.log").read_text()

    def start(self, number: int) -> subprocess.Popen[bytes]:
        flags = ["--config_file", str(self.config), "--machine_rank", str(number), "--max_restarts", "2", *self.flags]
        words = ["-m", "hf_fsdp_plugin.cli.main", "launch", *flags, "--report", str(FOLDER / f"{self.name}.json")]
        log = FOLDER / f"{self.name}.{number}.log"
        environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(FOLDER / "hf_home")}
        return self.hosts.start(number, [*words, SCRIPT, *self.words], log, **environ)

    def until(self, what: Callable[[], Any], doing: str) -> float:
        """Wait for something, and return the seconds. Ends the program if it does not happen."""
        began = time.monotonic()
        while not what():
            if time.monotonic() - began > LIMIT_S:
                logs = "\n".join(f"host{n}: {self.log(n)[-3000:]}" for n in (0, 1))
                raise SystemExit(f"{self.name}: {doing} took too long.\n{logs}")
            time.sleep(0.05)
        return time.monotonic() - began

    def finish(self) -> None:
        self.until(lambda: all(each.poll() is not None for each in self.processes), "the run")
        if any(each.returncode for each in self.processes):
            raise SystemExit("\n".join([f"{self.name} failed", *(self.log(n)[-3000:] for n in (0, 1))]))


def predicted(collectives: Sequence[dict[str, Any]]) -> int:
    """Return the bytes that a host sends in a step."""
    total = 0.0
    for call in collectives:
        size = call["group_size"]
        # Groups of 4 have one connection from host to host. A replicate group of 2 has one too, and there are two such
        # groups. A shard group of 2 is on one host.
        connections = 1 if size == 4 else 2 if call["axis"] == "replicate" else 0
        total += connections * FACTORS[call["kind"]] * (size - 1) / size * call["bytes"] * call["calls"]
    return round(total)


def count_bytes(hosts: Hosts, strategy: str, version: int) -> dict[str, Any]:
    out = FOLDER / f"bytes_{strategy}_{version}.json"
    Run(hosts, f"measure_{strategy}_{version}", ["measure", str(out)], strategy=strategy, version=version).finish()
    found = json.loads(out.read_text())
    expected = predicted(found["collectives"])
    sent = statistics.median(row[0] for row in found["steps"])
    received = statistics.median(row[1] for row in found["steps"])
    row = {
        "strategy": strategy, "version": version, "predicted_bytes": expected, "sent_bytes": sent,
        "received_bytes": received, "measured_over_predicted": round(sent / expected, 4),
        "step_seconds": round(statistics.median(row[2] for row in found["steps"]), 3), "factors": found["factors"],
    }  # fmt: skip
    print(
        f"{strategy} FSDP{version}: a host sends {sent:,.0f} bytes a step, predicted {expected:,} "
        f"({row['measured_over_predicted']:.3f}); a step takes {row['step_seconds']} s",
        flush=True,
    )
    return row


def read_losses(folder: Path) -> list[list[str]]:
    path = folder / "losses_0"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def ranks_of(folder: Path) -> list[int]:
    """Return the process ids of the ranks that have written a loss last."""
    return [int((folder / f"losses_{rank}").read_text().splitlines()[-1].split()[2]) for rank in range(4)]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def uninterrupted(hosts: Hosts, num_steps: int) -> dict[str, str]:
    """Return the losses of a run without failures, by step."""
    folder = FOLDER / f"out_whole_{num_steps}"
    folder.mkdir()
    words = ["train", str(folder), str(num_steps), "0"]
    Run(hosts, f"whole_{num_steps}", words, strategy="full_shard", version=2).finish()
    return {step: loss for step, loss, *_ in read_losses(folder)}


def kill_host(run: Run) -> None:
    """Kill the launcher of host 1 and its ranks, as if the host were gone."""
    launcher = psutil.Process(run.processes[1].pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        process.kill()
    run.processes[1].wait()


def lose(hosts: Hosts, expected: dict[str, str]) -> dict[str, Any]:
    """Lose host 1 in the middle of a training, let it come back, and compare the losses."""
    folder = FOLDER / "out_kill"
    folder.mkdir()
    run = Run(hosts, "lose_kill", ["train", str(folder), str(NUM_STEPS), "0"], strategy="full_shard", version=2)
    run.until(lambda: len(read_losses(folder)) >= LOSE_AT and len(list(folder.glob("losses_*"))) == 4, "training")
    pids = ranks_of(folder)
    kill_host(run)
    ended = run.until(lambda: all(map(is_gone, pids)), "ending the ranks of host 0")
    run.processes[1] = run.start(1)
    back = time.monotonic()
    run.until(lambda: int(read_losses(folder)[-1][2]) not in pids, "resuming")
    resumed = time.monotonic() - back
    run.finish()
    found = read_losses(folder)
    report = json.loads((FOLDER / f"{run.name}.json").read_text())["restarts"]
    row = {
        "how": "kill",
        "seconds_until_the_others_ended": round(ended, 1),
        "seconds_until_the_first_step_after_return": round(resumed, 1),
        "failure": report["failures"][0]["failure"],
        "lost_steps": report["lost_steps"],
        "losses_equal": all(expected[step] == loss for step, loss, *_ in found) and len(expected) == NUM_STEPS,
    }
    print(f"host1 lost: {row}", flush=True)
    return row


def lose_disk(hosts: Hosts, expected: dict[str, str], version: int) -> dict[str, Any]:
    """Lose host 1 and its disk, let it come back, and compare the losses. The checkpoints are in an object store."""
    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_DEFAULT_REGION="us-east-1")
    os.environ["AWS_ENDPOINT_URL"] = f"http://{ADDRESSES[0]}:{STORE_PORT}"
    store = hosts.start(0, ["-m", "moto.server", "-H", "0.0.0.0", "-p", str(STORE_PORT)], FOLDER / "store.log")
    create = "import s3fs, time; time.sleep(5); s3fs.S3FileSystem().mkdir('checkpoints')"
    hosts.in_host(0, sys.executable, "-c", create)
    folder = FOLDER / f"out_storage_{version}"
    folder.mkdir()
    words, url = ["train", str(folder), str(NUM_STEPS), "0.2", "s3://checkpoints/run"], "s3://checkpoints/run"
    run = Run(hosts, f"storage_{version}", words, strategy="full_shard", version=version, storage=url)
    disks = [folder / f"host{number}" for number in (0, 1)]
    run.until(lambda: len(read_losses(disks[0])) >= LOSE_AT, "training")
    kill_host(run)
    shutil.rmtree(disks[1])
    run.processes[1] = run.start(1)
    run.finish()
    store.kill()
    found = read_losses(disks[0])
    report = json.loads((FOLDER / f"{run.name}.json").read_text())["restarts"]
    row = {
        "version": version,
        "lost_steps": report["lost_steps"],
        "files_left_of_checkpoints": sum(1 for disk in disks for _ in disk.rglob("*.distcp")),
        "losses_equal": all(expected[step] == loss for step, loss, *_ in found) and report["count"] > 0,
    }
    print(f"host1 and its disk lost: {row}", flush=True)
    return row


def shrink_and_grow(hosts: Hosts, expected: dict[str, str]) -> dict[str, Any]:
    """Lose host 1 by SIGKILL, go on with host 0 alone, let host 1 come back, and compare the losses."""
    folder = FOLDER / "out_elastic"
    folder.mkdir()
    words = ["train", str(folder), str(NUM_ELASTIC_STEPS), str(ELASTIC_PAUSE_S)]
    run = Run(hosts, "elastic", words, strategy="full_shard", version=2, flags=["--num_machines", "1:2"])
    run.until(lambda: len(read_losses(folder)) >= LOSE_AT, "training")
    kill_host(run)
    lost = time.monotonic()
    run.until(lambda: read_losses(folder)[-1][3] == "2", "going on with one host")
    alone = time.monotonic() - lost
    run.until(lambda: int(read_losses(folder)[-1][0]) >= RETURN_AT, "training on one host")
    run.processes[1] = run.start(1)
    back = time.monotonic()
    run.until(lambda: read_losses(folder)[-1][3] == "4", "going on with both hosts")
    both = time.monotonic() - back
    run.finish()
    found = read_losses(folder)
    worlds = [world for number, (*_, world) in enumerate(found) if number == 0 or found[number - 1][3] != world]
    report = json.loads((FOLDER / f"{run.name}.json").read_text())["restarts"]
    difference = max(abs(float(loss) / float(expected[step]) - 1) for step, loss, *_ in found)
    row = {
        "ranks": [int(world) for world in worlds],
        "seconds_until_the_first_step_on_one_host": round(alone, 1),
        "seconds_until_the_first_step_on_both": round(both, 1),
        "restarts": report["count"],
        "lost_steps": report["lost_steps"],
        "largest_relative_difference_of_losses": float(f"{difference:.1e}"),
        "losses_equal": difference < 1e-4 and {step for step, *_ in found} == set(expected),
    }
    print(f"2 hosts, 1, 2: {row}", flush=True)
    return row


def main() -> int:
    parser = make_parser(__doc__, "two_hosts")
    parser.add_argument("--rate", default="100mbit", help="of the link, in each direction")
    parser.add_argument("--delay", default="1ms", help="of the link, in each direction, if the kernel has netem")
    parser.add_argument("--versions", type=int, nargs="+", default=[1, 2])
    parts = ["bytes", "losses", "elastic", "storage", "hold"]
    parser.add_argument("--only", choices=parts, help="a part; hold: keep the hosts until killed")
    args = parser.parse_args()
    if INSIDE not in os.environ:  # the namespaces are made first
        return subprocess.run(["bash", str(ROOT / "scripts" / "two_hosts.sh"), *sys.argv[1:]], check=False).returncode
    hosts = Hosts(args.rate, args.delay)
    print(f"hosts {' and '.join(ADDRESSES)}, {args.rate}, delay {hosts.delay or 'none'}", flush=True)
    if args.only == "hold":
        signal.pause()
    strategies = ("full_shard", "hybrid_shard") if args.only in (None, "bytes") else ()
    rows = [count_bytes(hosts, strategy, version) for version in args.versions for strategy in strategies]
    lost = []
    if args.only in (None, "losses"):
        expected = uninterrupted(hosts, NUM_STEPS)
        lost = [lose(hosts, expected)]
    stored = []
    if args.only in (None, "storage"):
        expected = uninterrupted(hosts, NUM_STEPS)
        stored = [lose_disk(hosts, expected, version) for version in args.versions[-1:]]
    elastic = None
    if args.only in (None, "elastic"):
        elastic = shrink_and_grow(hosts, uninterrupted(hosts, NUM_ELASTIC_STEPS))
    hosts.close()
    result = {
        "command": f"scripts/two_hosts.sh --rate {args.rate} --delay {args.delay}",
        "model": "6 linear layers of 512 × 512, fp32; 2 gloo ranks on each host",
        "rate": args.rate,
        "delay": hosts.delay or "none: this kernel has no netem",
        "bytes": rows,
        "losses": lost,
        "storage": stored,
        "elastic": elastic,
    }
    write_result("two_hosts", args.out, result)
    return 0 if all(row["losses_equal"] for row in (*lost, *stored, *([elastic] if elastic is not None else []))) else 1


if __name__ == "__main__":
    raise SystemExit(main())
