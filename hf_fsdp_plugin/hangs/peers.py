"""The ranks of one machine, as they find each other: each writes its process to a file beside its others."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_plugin.hangs.places import request_stack, stack_file
from hf_fsdp_plugin.hangs.processes import is_gone, start_of
from hf_fsdp_plugin.hangs.rank_files import RankFiles, write_atomically


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank of this machine; also the calling one.

    Attributes:
        start: when its process has started (see ``processes.start_of``).
    """

    rank: int
    files: RankFiles
    pid: int
    start: int

    def is_gone(self) -> bool:
        """Return whether its process has exited."""
        return is_gone(self.pid, self.start)

    def request_stacks(self) -> None:
        """Make it record its stack."""
        if self.pid == os.getpid():
            stack_file.record()
        elif not self.is_gone():
            request_stack(self.files.stacks, self.pid)

    def send(self, number: int) -> None:
        if not self.is_gone():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def register(rank: int, files: RankFiles) -> None:
    """Write the file with which the other ranks of the machine find this process."""
    own = {"rank": rank, "pid": os.getpid(), "start": start_of(os.getpid()), "host": socket.gethostname()}
    write_atomically(files.process, json.dumps(own))


def find_peers(folder: Path) -> list[Peer]:
    """Return the ranks of this machine that have registered, by rank. The folder can be one that machines share."""
    found = []
    for path in folder.glob("rank_*.pid"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text())
            if content["host"] == socket.gethostname():
                found.append(Peer(content["rank"], RankFiles(path.with_suffix("")), content["pid"], content["start"]))
    return sorted(found, key=lambda peer: peer.rank)
