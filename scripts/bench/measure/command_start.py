"""The time of ``hf-fsdp check CONFIG`` and of ``hf-fsdp --version``, as complete processes, and what they are made of.

Each round runs, in turn: Python alone, Python with PyYAML, ``hf-fsdp --version``, ``hf-fsdp check`` of an Accelerate
YAML, and ``accelerate env``, the command of Accelerate that reads and prints its config. Times are medians of the
rounds. Bytecode files are in use, as in an installed package; ``PYTHONDONTWRITEBYTECODE`` is unset.

    python -m scripts.bench command_start    (half a minute; writes docs/results/command_start.json)
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from scripts.bench.common import ROOT, child_environment, make_parser
from scripts.bench.tables.update_results import write_result

CONFIG = "configs/fsdp2_full_shard.yaml"
HF_FSDP = "import sys; from hf_fsdp_plugin.cli.main import main; sys.exit(main())"
ACCELERATE = "import sys; from accelerate.commands.accelerate_cli import main; sys.exit(main())"
COMMANDS = {
    "python": ["-c", "pass"],
    "python, import yaml": ["-c", "import yaml"],
    "hf-fsdp --version": ["-c", HF_FSDP, "--version"],
    f"hf-fsdp check {CONFIG}": ["-c", HF_FSDP, "check", CONFIG],
    "accelerate env": ["-c", ACCELERATE, "env"],
}
SLOW = "accelerate env"
"""It takes seconds, so it runs in every tenth round and in the last one."""


def main() -> int:
    parser = make_parser(__doc__, "command_start")
    parser.add_argument("--rounds", type=int, default=41)
    args = parser.parse_args()
    environ = child_environment()
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(args.rounds + 1):  # the first round writes the bytecode files
        for name, arguments in COMMANDS.items():
            if name == SLOW and number % 10 and number != args.rounds:
                continue
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, check=True)
            if number:
                seconds[name].append(time.perf_counter() - start)
    result = {
        "rounds": args.rounds,
        "commands": {
            name: {"seconds": round(statistics.median(found), 3), "fastest": round(min(found), 3)}
            for name, found in seconds.items()
        },
    }
    write_result("command_start", args.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
