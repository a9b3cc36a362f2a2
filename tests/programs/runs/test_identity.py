"""The part of tests/unit/runs/test_identity.py that starts processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PRINT = (
    "import json, os; from hf_fsdp_plugin.runs.identity import identify_run;"
    "print(json.dumps(identify_run(os.environ).id))"
)
AGENT = """
import os, subprocess, sys
env = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
print(subprocess.run(sys.argv[1:], env=env, capture_output=True, text=True, check=True).stdout, end="")
"""


@pytest.mark.parametrize("wrapper", [[], ["/bin/sh", "-c", '"$@"; exit $?', "sh"]])
def test_agent_without_logs_is_a_process(wrapper: list[str]) -> None:
    """A shell may be between the agent and its rank. Two ranks of one agent have one id, those of two have not."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "SLURM"))}
    rank = [*wrapper, sys.executable, "-c", PRINT]
    both = [sys.executable, "-c", AGENT, "/bin/sh", "-c", '"$@"; "$@"', "sh", *rank]
    found = [
        subprocess.run(both, env=kept, capture_output=True, text=True, check=True).stdout.splitlines() for _ in "ab"
    ]
    ids = [json.loads(line) for lines in found for line in lines]
    assert len(ids) == 4 and len(set(ids)) == 2 and ids[0] == ids[1] and ids[0].startswith("none-")
