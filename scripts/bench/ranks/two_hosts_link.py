"""Two network namespaces, named host0 and host1, and a link of limited rate and delay between them.

A namespace exists as long as a process is in it. Here these are two processes that sleep, and the launchers. All of
them die with this process, also if it is killed, and so do the namespaces, the link, and the mounts of this process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

INTERFACE = "link0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
FOLDER = Path("/mnt")
"""The folder that both hosts share: a tmpfs that only this process and its children see."""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """The two hosts. Call it in a network and a mount namespace of its own (see ``two_hosts.sh``).

    Attributes:
        delay: the delay of the link in each direction; empty if this kernel cannot delay packets (no netem).
    """

    def __init__(self, rate: str, delay: str) -> None:
        run("mount", "-t", "tmpfs", "tmpfs", str(FOLDER))
        hosts = FOLDER / "hosts"
        names = "".join(f"{address} host{number}\n" for number, address in enumerate(ADDRESSES))
        hosts.write_text(f"127.0.0.1 localhost\n{names}")
        run("mount", "--bind", str(hosts), "/etc/hosts")
        self._holders = [
            subprocess.Popen(["unshare", "-nu", "sleep", "infinity"], preexec_fn=_die_with_parent) for _ in ADDRESSES
        ]
        for number in range(len(ADDRESSES)):
            self._wait_for_namespace(number)
        pid = str(self._holders[1].pid)
        self.in_host(0, "ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", pid)
        self.delay = delay
        for number, address in enumerate(ADDRESSES):
            self.in_host(number, "hostname", f"host{number}")
            self.in_host(number, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
            for name in ("lo", INTERFACE):
                self.in_host(number, "ip", "link", "set", name, "up")
            tbf = ("tbf", "rate", rate, "burst", "128kb", "latency", "400ms")
            self.in_host(number, "tc", "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", *tbf)
            if self.delay:
                netem = ("netem", "delay", delay)
                try:
                    self.in_host(number, "tc", "qdisc", "add", "dev", INTERFACE, "parent", "1:1", *netem)
                except OSError as error:
                    print(f"no delay: this kernel has no netem ({error})", flush=True)
                    self.delay = ""

    def _wait_for_namespace(self, number: int) -> None:
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self._holders[number].pid}/ns/net") == own:
            if self._holders[number].poll() is not None:
                raise OSError("unshare -nu failed")

    def command(self, number: int, *words: str) -> list[str]:
        """Return the command that runs `words` on a host."""
        folder = f"/proc/{self._holders[number].pid}/ns"
        return ["nsenter", f"--net={folder}/net", f"--uts={folder}/uts", *words]

    def in_host(self, number: int, *words: str) -> None:
        run(*self.command(number, *words))

    def start(self, number: int, words: Sequence[str], log: Path, **env: str) -> subprocess.Popen[bytes]:
        """Start a program on a host. It dies with this process."""
        environ: Mapping[str, str] = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "TMPDIR": str(FOLDER), **env}
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(number, sys.executable, *words),
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environ, preexec_fn=_die_with_parent,
            )  # fmt: skip

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()


def transferred() -> tuple[int, int]:
    """Return the bytes that the link of this host has sent and received. Reads the namespace of this process."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise OSError(f"no interface {INTERFACE}")
