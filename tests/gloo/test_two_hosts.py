"""Two machines in network namespaces: bytes over the link, the loss of a machine, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.launching import is_gone

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "two_hosts.sh"


def not_allowed() -> str:
    """Why the script cannot run here; empty if it can."""
    try:
        done = subprocess.run(
            ["unshare", "-rnm", "ip", "link", "add", "a0", "type", "veth", "peer", "name", "a1"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


pytestmark = pytest.mark.skipif(bool(not_allowed()), reason=f"no namespaces: {not_allowed()}")


def start(*words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(["bash", str(SCRIPT), *words], stdout=subprocess.PIPE, text=True, env=env)


def namespaces() -> dict[str, list[int]]:
    """The network namespaces of all processes, with the processes."""
    found: dict[str, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.setdefault(os.readlink(folder / "ns" / "net"), []).append(int(folder.name))
        except OSError:  # it has exited, or it belongs to another user
            continue
    return found


def test_killed_hosts_leave_nothing_behind() -> None:
    before, mounts = set(namespaces()), Path("/proc/self/mounts").read_text()
    process = start("--only", "hold")
    assert process.stdout is not None
    ready = next((line for line in iter(process.stdout.readline, "") if line.startswith("hosts ")), "ended")
    assert ready.startswith("hosts 10.77.0.1 and 10.77.0.2")
    own = {name: pids for name, pids in namespaces().items() if name not in before}
    assert len(own) >= 3, "that of the script and those of both hosts"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert all(is_gone(pid) for pids in own.values() for pid in pids)
    assert not set(own) & set(namespaces())
    assert Path("/proc/self/mounts").read_text() == mounts


@pytest.mark.slow
def test_hybrid_shard_sends_the_predicted_bytes(tmp_path: Path) -> None:
    out = tmp_path / "two_hosts.json"
    process = start("--only", "bytes", "--versions", "2", "--out", str(out))
    process.communicate(timeout=600)
    assert process.returncode == 0
    full, hybrid = json.loads(out.read_text())["bytes"]
    for row in (full, hybrid):
        assert row["sent_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.03)
        assert row["received_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.03)
    assert hybrid["sent_bytes"] < 0.4 * full["sent_bytes"]


@pytest.mark.slow
def test_lost_host_ends_the_other_and_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "two_hosts.json"
    process = start("--only", "losses", "--out", str(out))
    process.communicate(timeout=900)
    assert process.returncode == 0
    (row,) = json.loads(out.read_text())["losses"]
    assert row["losses_equal"] and row["seconds_until_the_others_ended"] < 60
    assert row["failure"].startswith("rank ")


@pytest.mark.slow
def test_lost_disk_continues_from_the_storage(tmp_path: Path) -> None:
    out = tmp_path / "two_hosts.json"
    process = start("--only", "storage", "--out", str(out))
    process.communicate(timeout=900)
    assert process.returncode == 0
    (row,) = json.loads(out.read_text())["storage"]
    assert row["losses_equal"] and row["files_left_of_checkpoints"] == 0
