"""Provokes hangs of every kind on two ranks, and checks that the output names rank and unit within the limit.

    python -m scripts.bench hangs                      # all kinds × FSDP1, FSDP2 × own loop, Trainer × launchers
    python -m scripts.bench hangs --kinds sleep skip --versions 2 --ways loop --launchers torchrun srun
    python -m scripts.bench hangs --kinds skip --replace   # measures one kind again
    python -m scripts.bench hangs --healthy 30 --launchers torchrun   # minutes of slow training: counts alarms

Each run is a real launch of ``scripts/bench/ranks/hangs.py``; srun is imitated by Slurm's variables. The result goes to
docs/results/hangs.json. FSDP1 and FSDP2 take turns under the launchers except ``hf-fsdp launch`` and torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from scripts.bench.common import RANKS, child_environment, free_port, make_parser
from scripts.bench.tables.update_results import write_result

SCRIPT = RANKS / "hangs.py"
LIMIT = 4.0
MARGIN = 10.0
"""Seconds from the limit to the message; all ranks share two cores."""
ANSWER_SECONDS = 10.0
"""The same again for a machine that is stopped, which has this time to answer the others."""
_UNIT = r"(of (model\.|lm_head|the root unit)|all-gather \(list\))"
"""Part of a collective: its FSDP unit. The Trainer also gathers the number of tokens, which needs no unit."""
_LATE = rf"rank 1 is late: rank 0 has waited .* {_UNIT}.*FSDP-E728"
_REDUCED = r"all-reduce \(3 × fp32\).*all-reduce \(4 × fp32\).*FSDP-E7(29|43)"
_GATHERS = r"rank 0: all-gather [^;]*; rank 1: all-gather [^;.]*.*FSDP-E743"
"""The Trainer's different gathers of the two ranks, whichever of them gloo aborts first."""
EXPECTED = {
    "sleep": rf"{_LATE}(?s:.*)time\.sleep",
    "loader": rf"{_LATE}(?s:.*)__getitem__",
    "busy": rf"{_LATE}(?s:.*)__getitem__",
    "stop": rf"{_LATE.replace('.*FSDP', '.*(SIGSTOP|rank 1 is on machine).*FSDP')}",
    "leave": rf"rank 1 exited with(out an exception| code 0) .* {_UNIT}.*FSDP-E734|"
    r"rank 1 is late.*had exited.*FSDP-E728|rank 1 is on machine .*, which does not answer.*FSDP-E7(28|43)",
    "skip": r"[Rr]ank 1 left out all-gather.* of model\.layers\.2.*FSDP-E7(29|34|43)",
    "steps": rf"{_GATHERS}|rank 1 was in all_gather .*all-gather.*FSDP-E7|{_UNIT}(?s:.*)rank 1 .*(ended|report)|"
    rf"rank 1 .*(ended|report).* {_UNIT}",
    "save": rf"rank 0 .*save.* {_UNIT}.*FSDP-E7|{_UNIT}.*FSDP-E7(?s:.*)rank 0 was in sav|"
    rf"{_UNIT}.*rank 0 has waited for \d+ s in .*save.*FSDP-E7",
    "evaluate": rf"{_UNIT}.*FSDP-E7|evaluation.*{_UNIT}.*FSDP-E7",
    "generate": rf"{_UNIT}.*rank 0 has waited for \d+ s in generate of.*FSDP-E7|generate.*{_UNIT}.*FSDP-E7",
    "clip": rf"clip_grad_norm_.*{_UNIT}.*FSDP-E7|{_UNIT}.*FSDP-E7(?s:.*)rank 0 was in clip_grad_norm_|"
    rf"{_UNIT}.*rank 0 has waited for \d+ s in .*clip_grad_norm_.*FSDP-E7",
    "shapes": _REDUCED,
    "lock": rf"{_LATE}(?s:.*)held\.acquire",
    "collate": rf"rank 1 is late: .* {_UNIT}.*data loader.*FSDP-E728",
    "barrier": r"rank 0 .*barrier.*FSDP-E7|rank 0: barrier.*FSDP-E7",
    "gather": r"rank 1: all-gather[^;]*\(5 × fp32\).*(by that of rank 1|[Rr]ank 1 ).*FSDP-E7",
    "nan": rf"{_GATHERS}|rank 1 was in all_gather .*all-gather.*FSDP-E7|{_UNIT}(?s:.*)rank 1 .*(ended|report)|"
    rf"rank 1 .*(ended|report).* {_UNIT}",
    "warm": rf"{_UNIT}.*Rank 0 had called the model twice, the others once.*FSDP-E7",
    "predict": rf"rank 1 .*(ended|report).*{_UNIT}|{_UNIT}(?s:.*)rank 1 .*(ended|report)|predict.*FSDP-E670",
    "dtypes": r"all-reduce \(4 × (fp32|float64)\).*all-reduce \(4 × (fp32|float64)\).*FSDP-E7(29|34|43)",
}
"""Kind -> what the output must contain: the rank, the unit or the collective, and the code of the problem."""
WAYS = {"predict": ("trainer",)}
"""Ways of the kinds that do not exist in both."""
LAUNCHERS = ("hf-fsdp", "torchrun", "two agents", "accelerate", "srun")
"""``two agents``: of torchrun on this host, with one rank each, which are two machines to the watch."""
FAIL_AT_ONCE = ("leave", "skip", "steps", "evaluate", "gather", "nan", "warm", "dtypes")
"""Kinds at which gloo fails before the limit. The ranks of other machines are not asked then."""
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_cpu_ram_efficient_loading: false
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One provoked hang.

    Attributes:
        code: the first code of a problem in the output; empty without one.
        launcher: one of :data:`LAUNCHERS`.
        seconds: from the fault to the message.
        named: whether the output names rank and unit.
        exit_code: of the launcher.
        output: what the launcher printed to stderr.
    """

    kind: str
    version: int
    way: str
    launcher: str
    code: str
    seconds: float
    named: bool
    exit_code: int
    output: str

    @property
    def passed(self) -> bool:
        margin = MARGIN + (ANSWER_SECONDS if (self.launcher, self.kind) == ("two agents", "stop") else 0.0)
        return self.named and self.exit_code not in (0, 2) and self.seconds < LIMIT + margin


def commands_of(launcher: str, version: int, limit: float | None) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands that start two ranks, without the script, and their variables."""
    python, number = sys.executable, str(version)
    plugin = ["-m", "hf_fsdp_plugin", "--config_file", "fsdp.yaml", "--fsdp_version", number]
    variables = {"HF_FSDP_HANG_TIMEOUT": f"{limit:g}"} if limit is not None else {}
    torchrun = [python, "-m", "torch.distributed.run"]
    if launcher == "hf-fsdp":
        flags = ["--hang_timeout", f"{limit:g}"] if limit is not None else []
        command = [python, "-m", "hf_fsdp_plugin.cli.main", "launch", "--config_file", "fsdp.yaml", "--cpu"]
        return [([*command, "--num_processes", "2", "--fsdp_version", number, *flags], {})]
    if launcher == "torchrun":
        return [([*torchrun, "--standalone", "--nproc_per_node", "2", *plugin], variables)]
    if launcher == "accelerate":
        flags = ["--num_processes", "2", "--main_process_port", "0", "--fsdp_version", number]
        command = [python, "-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml", *flags]
        return [([*command, *plugin[:2]], variables)]
    if launcher == "two agents":
        meeting = ["--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
        return [([*torchrun, *meeting, "--nproc_per_node", "1", *plugin], variables)] * 2
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    job |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}
    job |= {"MASTER_PORT": str(free_port()), **variables}
    return [([python, *plugin], {**job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in "01"]


def launch(
    folder: Path,
    version: int,
    arguments: Sequence[str],
    *,
    launcher: str = "hf-fsdp",
    limit: float | None = LIMIT,
    seconds: float = 300.0,
) -> tuple[int, str, float]:
    """Launch the script in a folder.

    Returns:
        The first exit code of a launcher, or of a rank that srun would start, that is not 0 (124 after ``seconds``),
        their stderr, and the time of the first problem in it.
    """
    (folder / "fsdp.yaml").write_text(CONFIG)
    base = child_environment() | {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TMPDIR": str(folder)}
    read, write = os.pipe()  # of all processes, as a terminal
    processes = [
        subprocess.Popen(
            [*command, str(SCRIPT), *arguments],
            cwd=folder,
            env={**base, **variables},
            stdout=subprocess.DEVNULL,
            stderr=write,
            start_new_session=True,
        )
        for command, variables in commands_of(launcher, version, limit)
    ]
    os.close(write)
    timer = threading.Timer(seconds, lambda: [process.terminate() for process in processes])
    timer.start()
    lines, found_at = [], 0.0
    with open(read, encoding="utf-8", errors="replace") as stderr:
        for line in stderr:
            lines.append(line)
            if not found_at and re.search(r"FSDP-E\d", line):
                found_at = time.time()
    codes = [process.wait() for process in processes]
    code = next((code for code in codes if code), 0) if timer.is_alive() else 124
    timer.cancel()
    return code, "".join(lines), found_at


def provoke(kind: str, version: int, way: str, launcher: str = "hf-fsdp") -> Outcome:
    """Provoke one hang."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exit_code, output, found_at = launch(folder, version, [kind, way], launcher=launcher)
        fault = folder / "provoked"
        seconds = found_at - float(fault.read_text()) if found_at and fault.exists() else float("inf")
    code = re.search(r"FSDP-E\d+", output)
    return Outcome(
        kind=kind,
        version=version,
        way=way,
        launcher=launcher,
        code=code[0] if code is not None else "",
        seconds=round(seconds, 1),
        named=re.search(EXPECTED[kind], output) is not None,
        exit_code=exit_code,
        output=output,
    )


def train_healthily(minutes: float, version: int, launcher: str = "hf-fsdp") -> dict[str, Any]:
    """Train slowly without faults, with the default limit, and count alarms and notices."""
    with tempfile.TemporaryDirectory() as name:
        exit_code, output, _ = launch(
            Path(name),
            version,
            ["healthy", str(60 * minutes)],
            launcher=launcher,
            limit=None,
            seconds=60 * minutes + 900,
        )
    alarms = len(re.findall(r"FSDP-E7(?:28|29|30|31)", output))
    notices = len(re.findall(r"FSDP-W73[23]", output))
    if exit_code:
        print(output)
    return {
        "launcher": launcher,
        "minutes": minutes,
        "version": version,
        "exit_code": exit_code,
        "alarms": alarms,
        "notices": notices,
    }


def _name(row: Mapping[str, object]) -> tuple[object, ...]:
    return row["kind"], row["version"], row["way"], row.get("launcher", LAUNCHERS[0])


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, int, str, str]]:
    """Yield launcher, version, way and kind of each run."""
    for launcher, (number, kind) in product(arguments.launchers, enumerate(EXPECTED)):
        takes_turns = launcher in LAUNCHERS[2:] and len(arguments.versions) == 2 and len(arguments.ways) == 2
        for version, way in product(arguments.versions, arguments.ways):
            if launcher == "two agents" and kind in FAIL_AT_ONCE:
                continue
            is_next = not takes_turns or (version, way) == ((1, 2)[number % 2], ("loop", "trainer")[number // 2 % 2])
            if (
                kind in arguments.kinds
                and way in WAYS.get(kind, (way,))
                and (is_next or (kind in WAYS and version == 2))
            ):
                yield launcher, version, way, kind


def main() -> int:
    parser = make_parser(__doc__, "hangs")
    parser.add_argument("--kinds", nargs="+", choices=sorted(EXPECTED), default=list(EXPECTED))
    parser.add_argument("--versions", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--ways", nargs="+", choices=("loop", "trainer"), default=["loop", "trainer"])
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--healthy", type=float, metavar="MINUTES", help="train without faults instead")
    parser.add_argument("--replace", action="store_true", help="keep the other runs of the result that is there")
    parser.add_argument("--show", action="store_true", help="print the output of runs that fail")
    arguments = parser.parse_args()
    if arguments.healthy:
        path = arguments.out.with_name("hangs_healthy.json")
        runs: list[dict[str, Any]] = []
        for launcher, version in product(arguments.launchers, arguments.versions):
            runs.append(train_healthily(arguments.healthy, version, launcher))
            print(runs[-1], flush=True)
            tried = {(run["launcher"], run["version"]) for run in runs}
            earlier = json.loads(path.read_text())["runs"] if arguments.replace else []
            rows = [*(run for run in earlier if (run["launcher"], run["version"]) not in tried), *runs]
            launchers = " ".join(dict.fromkeys(shlex.quote(row["launcher"]) for row in rows))
            command = f"python -m scripts.bench hangs --healthy {arguments.healthy:g} --launchers {launchers}"
            write_result("hangs_healthy", path, {"command": command, "runs": rows})
        return any(run["alarms"] or run["exit_code"] for run in runs)
    outcomes = []
    for launcher, version, way, kind in cases(arguments):
        outcome = provoke(kind, version, way, launcher)
        outcomes.append(outcome)
        verdict = "named" if outcome.passed else "FAILED"
        name = f"{launcher:10} FSDP{version} {way:8} {kind:9}"
        print(
            f"{name} {verdict:7} {outcome.code:10} {outcome.seconds:5.1f} s, exit code {outcome.exit_code}", flush=True
        )
        if arguments.show and not outcome.passed:
            print(outcome.output)
    num_passed = sum(outcome.passed for outcome in outcomes)
    print(f"{num_passed} of {len(outcomes)} named, limit {LIMIT:g} s")
    rows = [{name: value for name, value in asdict(outcome).items() if name != "output"} for outcome in outcomes]
    rows = [{**row, "passed": outcome.passed} for row, outcome in zip(rows, outcomes, strict=True)]
    if arguments.replace:
        again = {_name(row) for row in rows}
        rows = [row for row in json.loads(arguments.out.read_text())["runs"] if _name(row) not in again] + rows
        num_passed = sum(row["passed"] for row in rows)
    write_result("hangs", arguments.out, {"limit_seconds": LIMIT, "num_passed": num_passed, "runs": rows})
    return int(num_passed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
