"""Provokes hangs of every kind on two ranks, and checks that the launcher names rank and unit within the limit.

    python scripts/bench/hangs.py                      # all kinds × FSDP1, FSDP2 × own loop, Trainer
    python scripts/bench/hangs.py --kinds sleep skip --versions 2 --ways loop
    python scripts/bench/hangs.py --kinds skip --replace   # measures one kind again
    python scripts/bench/hangs.py --healthy 30         # minutes of slow training without faults: counts alarms

Each run is a real ``hf-fsdp launch`` of ``hang_ranks.py``. The result goes to docs/results/hangs.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import ROOT, make_parser
from update_results import write_result

SCRIPT = Path(__file__).with_name("hang_ranks.py")
LIMIT = 4.0
MARGIN = 10.0
"""Seconds from the limit to the message: the launcher polls, collects stacks, and shares the machine with the ranks."""
_UNIT = r"(of (model\.|lm_head|the root unit)|all-gather \(list\))"
"""Part of a collective: its FSDP unit. The Trainer also gathers the number of tokens, which needs no unit."""
_LATE = rf"rank 1 is late: rank 0 has waited .* {_UNIT}.*FSDP-E728"
_REDUCED = r"all-reduce \(3 × fp32\).*all-reduce \(4 × fp32\).*FSDP-E7(29|43)"
EXPECTED = {
    "sleep": rf"{_LATE}(?s:.*)time\.sleep",
    "loader": rf"{_LATE}(?s:.*)__getitem__",
    "busy": rf"{_LATE}(?s:.*)__getitem__",
    "stop": rf"{_LATE.replace('.*FSDP', '.*SIGSTOP.*FSDP')}",
    "leave": rf"rank 1 exited with code 0 .* {_UNIT}.*FSDP-E734|rank 1 is late.*had exited.*FSDP-E728",
    "skip": r"[Rr]ank 1 left out all-gather.* of model\.layers\.2.*FSDP-E7(29|43)",
    "steps": rf"rank 1 was in all_gather .*all-gather.*FSDP-E7|{_UNIT}(?s:.*)rank 1 .*(ended|report)|"
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
    "nan": rf"rank 1 was in all_gather .*all-gather.*FSDP-E7|{_UNIT}(?s:.*)rank 1 .*(ended|report)|"
    rf"rank 1 .*(ended|report).* {_UNIT}",
    "warm": rf"{_UNIT}.*Rank 0 had called the model twice, the others once.*FSDP-E7",
    "predict": rf"rank 1 .*(ended|report).*{_UNIT}|{_UNIT}(?s:.*)rank 1 .*(ended|report)|predict.*FSDP-E670",
    "dtypes": r"all-reduce \(4 × (fp32|float64)\).*all-reduce \(4 × (fp32|float64)\).*FSDP-E7(29|43)",
}
"""Kind -> what the output must contain: the rank, the unit or the collective, and the code of the problem."""
WAYS = {"predict": ("trainer",)}
"""Ways of the kinds that do not exist in both."""
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
        seconds: from the fault to the message.
        named: whether the output names rank and unit.
        exit_code: of the launcher.
        output: what the launcher printed to stderr.
    """

    kind: str
    version: int
    way: str
    code: str
    seconds: float
    named: bool
    exit_code: int
    output: str

    @property
    def passed(self) -> bool:
        return self.named and self.exit_code not in (0, 2) and self.seconds < LIMIT + MARGIN


def launch(
    folder: Path, version: int, arguments: Sequence[str], *, limit: float | None = LIMIT, seconds: float = 300.0
) -> tuple[int, str, float]:
    """Launch the script in a folder.

    Returns:
        The exit code of the launcher (124 after ``seconds``), its stderr, and the time of the first problem in it.
    """
    (folder / "fsdp.yaml").write_text(CONFIG)
    flags = ["--hang_timeout", f"{limit:g}"] if limit is not None else []
    command = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "launch", "--config_file", "fsdp.yaml", "--cpu"]
    command += ["--num_processes", "2", "--fsdp_version", str(version), *flags, str(SCRIPT), *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=environ, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    timer = threading.Timer(seconds, process.terminate)
    timer.start()
    lines, found_at = [], 0.0
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if not found_at and re.search(r"FSDP-E\d", line):
            found_at = time.time()
    code = process.wait()
    if not timer.is_alive():
        code = 124
    timer.cancel()
    return code, "".join(lines), found_at


def provoke(kind: str, version: int, way: str) -> Outcome:
    """Provoke one hang."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exit_code, output, found_at = launch(folder, version, [kind, way])
        fault = folder / "provoked"
        seconds = found_at - float(fault.read_text()) if found_at and fault.exists() else float("inf")
    code = re.search(r"FSDP-E\d+", output)
    return Outcome(
        kind=kind,
        version=version,
        way=way,
        code=code[0] if code is not None else "",
        seconds=round(seconds, 1),
        named=re.search(EXPECTED[kind], output) is not None,
        exit_code=exit_code,
        output=output,
    )


def train_healthily(minutes: float, version: int) -> dict[str, object]:
    """Train slowly without faults, with the default limit, and count alarms and notices."""
    with tempfile.TemporaryDirectory() as name:
        exit_code, output, _ = launch(
            Path(name), version, ["healthy", str(60 * minutes)], limit=None, seconds=60 * minutes + 900
        )
    alarms = len(re.findall(r"FSDP-E7(?:28|29|30|31)", output))
    notices = len(re.findall(r"FSDP-W73[23]", output))
    if exit_code:
        print(output)
    return {"minutes": minutes, "version": version, "exit_code": exit_code, "alarms": alarms, "notices": notices}


def _name(row: Mapping[str, object]) -> tuple[object, ...]:
    return row["kind"], row["version"], row["way"]


def main() -> int:
    parser = make_parser(__doc__, "hangs")
    parser.add_argument("--kinds", nargs="+", choices=sorted(EXPECTED), default=list(EXPECTED))
    parser.add_argument("--versions", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--ways", nargs="+", choices=("loop", "trainer"), default=["loop", "trainer"])
    parser.add_argument("--healthy", type=float, metavar="MINUTES", help="train without faults instead")
    parser.add_argument("--replace", action="store_true", help="keep the other runs of the result that is there")
    parser.add_argument("--show", action="store_true", help="print the output of runs that fail")
    arguments = parser.parse_args()
    if arguments.healthy:
        runs = [train_healthily(arguments.healthy, version) for version in arguments.versions]
        for run in runs:
            print(run)
        path = arguments.out.with_name("hangs_healthy.json")
        write_result(
            "hangs_healthy",
            path,
            {"command": f"python scripts/bench/hangs.py --healthy {arguments.healthy:g}", "runs": runs},
        )
        return any(run["alarms"] or run["exit_code"] for run in runs)
    outcomes = []
    for version in arguments.versions:
        for way in arguments.ways:
            for kind in arguments.kinds:
                if way not in WAYS.get(kind, (way,)):
                    continue
                outcome = provoke(kind, version, way)
                outcomes.append(outcome)
                verdict = "named" if outcome.passed else "FAILED"
                print(
                    f"FSDP{version} {way:8} {kind:9} {verdict:7} {outcome.code:10} {outcome.seconds:5.1f} s", flush=True
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
