"""The attempt of this process in its run: what was before, under any launcher.

``hf-fsdp launch`` writes a file for its ranks. Under other launchers, the lowest rank of each machine writes what its
machine knows (``runs.earlier_attempts``) to the store of the process group. Rank 0 reads one message per machine, and
broadcasts what all agree on.

torch's agent may keep the store of the attempt before, with its keys. So rank 0 draws a new name for these::

    ranks           number of ranks whose machines have written
    machines        number of machines that have
    machine<n>      what machine n knows
    complete        set when all machines have
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object
from hf_fsdp_plugin.backends.ranks.cluster import ranks_per_machine
from hf_fsdp_plugin.backends.ranks.collective_entry import collective_call, load_failures, preparation_limit
from hf_fsdp_plugin.hangs.rank_files import RankFiles
from hf_fsdp_plugin.hangs.record import step_count
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.runs.earlier_attempts import Offer, make_offer, mark_begin, merge_offers, remember_run
from hf_fsdp_plugin.runs.identity import RunIdentity, identify_run
from hf_fsdp_plugin.runs.restart_policy import Restarts
from hf_fsdp_plugin.torch_private.functions import default_store


class ProcessAttempt:
    """The attempt of this process.

    Args:
        environ: the variables of its launcher.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ, self._identity = environ, RunIdentity()
        self._has_begun = self._has_files = self._is_open = False
        self._folder: Path | None = None
        self._refusal: Problem | None = None

    def begin(self, files: RankFiles | None = None) -> None:
        """Find out the run of this process and count its steps. Does nothing if that was done before.

        Args:
            files: those of this rank, which the next attempt on this machine finds; ``None`` without any.
        """
        if self._has_begun and (files is None or self._has_files):
            return
        self._has_begun, self._has_files = True, files is not None
        identity = session.identity = self._identity = identify_run(self._environ, tuple(sys.argv))
        if files is not None:
            with suppress(OSError):
                step_count.open(files.steps)
            with suppress(OSError, ValueError):
                session.restarts = Restarts.from_json(json.loads(files.restarts.read_text()))
                return
            self._folder = files.stem.parent
            if self._is_lowest:
                mark_begin(self._folder)
        if identity.id:
            session.restarts = Restarts(run_id=identity.id, max_restarts=identity.max_restarts)
            self._is_open = True

    def end(self) -> None:
        """Forget the attempt: the plugin is uninstalled in this process, and may be installed again."""
        self._identity = RunIdentity()
        self._has_begun = self._has_files = self._is_open = False
        self._folder = self._refusal = None

    def agree(self, call: str) -> None:
        """Complete ``session.restarts`` with what the machines know. Collective, at the first call.

        Args:
            call: the collective call that needs it, for the message about ranks that do not make it.

        Raises:
            SpecError: on all ranks, if another attempt would fail as those before.
        """
        self.begin()
        if self._is_open and dist.is_initialized():
            load_failures.close()  # this rank continues, even if a load failed
            with collective_call(call, limit=preparation_limit(), given_up=load_failures.raise_announced):
                agreed = self._exchange()
            self._is_open = False
            session.restarts, self._refusal = agreed.known.restarts, agreed.known.problem
            if self._folder is not None and self._is_lowest:
                remember_run(self._folder, agreed, self._identity.attempt)
            if session.restarts.count:
                print_once(f"{session.restarts.title}: {session.restarts.last_failure}")
        if self._refusal is not None:
            raise SpecError([self._refusal])

    def _exchange(self) -> Offer:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore(broadcast_object(f"hf_fsdp_attempt_{uuid.uuid4().hex}"), default_store())
        if self._is_lowest:
            mine = make_offer(self._folder, self._identity, rank=rank, machine=self._machine)
            store.set(f"machine{store.add('machines', 1) - 1}", mine.to_text())
            if store.add("ranks", ranks_per_machine(self._environ, world_size, 0)) >= world_size:
                store.set("complete", "1")
        text = ""
        if rank == 0:
            store.wait(["complete"])
            machines = range(store.add("machines", 0))
            text = merge_offers([Offer.from_text(store.get(f"machine{n}").decode()) for n in machines]).to_text()
        return Offer.from_text(broadcast_object(text))

    @property
    def _is_lowest(self) -> bool:
        """Whether this is the lowest rank of its machine."""
        return self._environ.get("LOCAL_RANK", "0") == "0"

    @property
    def _machine(self) -> int:
        number = self._environ.get("GROUP_RANK") or self._environ.get("SLURM_NODEID") or "0"
        return int(number) if number.isdecimal() else 0


_attempt = ProcessAttempt()
begin_attempt, agree_on_attempt, end_attempt = _attempt.begin, _attempt.agree, _attempt.end
