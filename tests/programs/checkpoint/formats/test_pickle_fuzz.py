"""The reader of pickles ends in time and within its memory, for thousands of damaged pickles and for the known attacks.

Each check runs in a process of its own, with limits: a reader that hangs or crashes would end the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.checkpoint.hostile_pickles import ATTACKS, SET_ATTRIBUTES

SEED = 20261124
COUNT = 4000
MEMORY = 1 << 30
SECONDS = 90

_READ = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
sys.path.insert(0, {tests!r})
from tests.unit.checkpoint import hostile_pickles
from hf_fsdp_plugin.checkpoint.formats.pickles import ALLOWED, read_pickle
from hf_fsdp_plugin.problems import CheckpointError

def state():
    return {{
        f"{{module}}.{{name}}": sorted(map(str, vars(found))) if isinstance(found, type) else dir(found)
        for module, names in ALLOWED.items() for name, found in names.items()
    }}

before, codes = state(), {{}}
for data in {pickles}:
    try:
        read_pickle(data, "x")
        code = "read"
    except CheckpointError as error:
        code = error.problems[0].code
    codes[code] = codes.get(code, 0) + 1
assert state() == before, "a pickle has changed a stand-in"
print(json.dumps(codes))
"""


def read_with_limits(pickles: str) -> dict[str, int]:
    """Read pickles in another process. Returns the number of those with each result."""
    tests = str(Path(__file__).parents[4])
    program = _READ.format(memory=MEMORY, seconds=SECONDS, tests=tests, pickles=pickles)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=4 * SECONDS, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_damaged_pickles_are_read_or_refused() -> None:
    pickles = f"hostile_pickles.mutations(hostile_pickles.samples(), {COUNT}, {SEED})"
    codes = read_with_limits(pickles)
    assert sum(codes.values()) == COUNT
    assert codes.keys() <= {"read", "FSDP-E453", "FSDP-E454", "FSDP-E455"}
    assert codes["FSDP-E453"] > COUNT // 4 and codes["read"] > COUNT // 100  # neither all nor none are damaged


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_ends_in_time_and_memory(name: str) -> None:
    assert read_with_limits(f"[hostile_pickles.ATTACKS[{name!r}]]") == {"FSDP-E455": 1}


def test_no_pickle_changes_a_stand_in() -> None:
    assert read_with_limits("hostile_pickles.SET_ATTRIBUTES.values()") == {"FSDP-E453": len(SET_ATTRIBUTES)}
