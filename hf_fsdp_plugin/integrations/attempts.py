"""The attempt of this process in its run: what was before, under any launcher.

``hf-fsdp launch`` writes a file for its ranks. Under other launchers, the lowest rank of each machine writes what its
machine knows (``runs.earlier_attempts``) to the store of the process group. The first rank that asks merges it for all,
so that no rank waits for a call of another one. A rank sends one message, and one per machine is read.

::

    ranks           number of ranks whose machines have written
    machines        number of machines that have
    machine<n>      what machine n knows
    complete        set when all machines have
    merging         the first increment decides which rank merges
    agreed          what all machines agree on
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp_plugin.backends.cluster import ranks_per_machine
from hf_fsdp_plugin.hangs.rank_files import RankFiles
from hf_fsdp_plugin.hangs.step_count import step_count
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.runs.earlier_attempts import Offer, make_offer, mark_begin, merge, remember
from hf_fsdp_plugin.runs.identity import attempt_folder, identify
from hf_fsdp_plugin.runs.restarts import Restarts

if TYPE_CHECKING:
    import torch.distributed as dist

_PREFIX = "hf_fsdp_attempt"


class Attempt:
    """The attempt of this process."""

    def __init__(self) -> None:
        self._has_begun = self._is_open = self._has_offered = False
        self._folder: Path | None = None
        self._refusal: Problem | None = None

    def begin(self, files: RankFiles | None = None) -> None:
        """Find out the run of this process and count its steps. Does nothing if that was done before.

        Args:
            files: those of this rank. Default: files that the next attempt on this machine finds.
        """
        if self._has_begun:
            return
        self._has_begun = True
        identity = session.identity = identify(os.environ, tuple(sys.argv))
        if files is None and identity.id and "RANK" in os.environ:
            files = _own_files(attempt_folder(identity, os.environ))
        if files is not None:
            with suppress(OSError):
                step_count.open(files.steps)
            with suppress(OSError, ValueError):
                session.restarts = Restarts.from_json(json.loads(files.restarts.read_text()))
                return
            self._folder = files.stem.parent
            if _is_lowest():
                mark_begin(self._folder)
        if identity.id:
            session.restarts = Restarts(run_id=identity.id, max_restarts=identity.max_restarts)
            self._is_open = True

    def offer(self) -> None:
        """Write what this machine knows to the store, if the process group exists."""
        if not self._is_open or self._has_offered or (store := _store()) is None:
            return
        import torch.distributed as dist

        self._has_offered = True
        if not _is_lowest():
            return
        world_size = dist.get_world_size()
        mine = make_offer(self._folder, session.identity, rank=dist.get_rank(), machine=_machine())
        number = store.add("machines", 1) - 1
        store.set(f"machine{number}", mine.to_text())
        if store.add("ranks", ranks_per_machine(os.environ, world_size, 0)) >= world_size:
            store.set("complete", "1")

    def agree(self) -> None:
        """Complete ``session.restarts`` with what the machines know. Collective, once the process group exists.

        Raises:
            SpecError: on all ranks, if another attempt would fail as those before.
        """
        self.begin()
        self.offer()
        if self._is_open and (store := _store()) is not None:
            agreed = _agreed(store)
            self._is_open = False
            session.restarts, self._refusal = agreed.known.restarts, agreed.known.problem
            if self._folder is not None and _is_lowest():
                remember(self._folder, agreed, session.identity.attempt)
            if session.restarts.count:
                print_once(f"{session.restarts.title}: {session.restarts.last_failure}")
        if self._refusal is not None:
            raise SpecError([self._refusal])


def _agreed(store: dist.Store) -> Offer:
    if store.add("merging", 1) == 1:
        store.wait(["complete"])
        offers = [Offer.from_text(store.get(f"machine{n}").decode()) for n in range(store.add("machines", 0))]
        store.set("agreed", merge(offers).to_text())
    return Offer.from_text(store.get("agreed").decode())


def _store() -> dist.Store | None:
    """Return the part of the process group's store in which the machines meet; ``None`` without a process group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from hf_fsdp_plugin.torch_private.functions import default_store

    return dist.PrefixStore(_PREFIX, default_store())


def _own_files(folder: Path) -> RankFiles | None:
    """Return the files of this rank in a folder that only this user can write; ``None`` if there cannot be one."""
    base = folder.parent.parent
    with suppress(OSError):
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if base.lstat().st_uid == os.getuid() and not base.is_symlink():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return RankFiles(folder / f"rank_{os.environ['RANK']}")
    return None


def _is_lowest() -> bool:
    """Return whether this is the lowest rank of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _machine() -> int:
    number = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or "0"
    return int(number) if number.isdecimal() else 0


_attempt = Attempt()
begin_attempt, offer_attempt, agree_on_attempt = _attempt.begin, _attempt.offer, _attempt.agree
