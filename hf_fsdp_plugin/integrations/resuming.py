"""What was before this process: the failed attempts of its run, and the checkpoint from which it resumes.

``hf-fsdp launch`` writes a file for its ranks. Under other launchers, the lowest rank of each machine sends what its
machine knows (``runs.identity.read_attempts``) to all ranks, which agree on one of these histories.

The manifest of each checkpoint names the run that wrote it. After a launcher has started a run again, it resumes from
the newest complete checkpoint with that name, so that older checkpoints in the same folder, of other runs, are never
used.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks import agreement
from hf_fsdp_plugin.checkpoint.checking import completeness
from hf_fsdp_plugin.checkpoint.folders import check_visible, recover_interrupted_commit, recover_run
from hf_fsdp_plugin.checkpoint.formats.known_formats import refuse_deepspeed
from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest, readable_manifest
from hf_fsdp_plugin.checkpoint.names import ACCELERATE_RNG, TRAINER_RNG
from hf_fsdp_plugin.checkpoint.reading.pickled_states import check_states
from hf_fsdp_plugin.checkpoint.storage import Storage, fetched, is_url, url_of
from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.hangs.watch_files import RankFiles
from hf_fsdp_plugin.integrations.samples import samples_problem
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.session import current_run
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import CheckpointError, Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_world_size, variable_number
from hf_fsdp_plugin.runs import identity as runs
from hf_fsdp_plugin.runs.attempts import Restarts
from hf_fsdp_plugin.spec.fsdp_spec import CheckpointSection
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.text import plural

T = TypeVar("T")
_DEFAULTS: Final = CheckpointSection()


class ProcessAttempt:
    """The attempt of this process in its run.

    Args:
        environ: the variables of its launcher.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._is_lowest = variable_number(environ, "LOCAL_RANK") == 0  # the lowest rank of its machine
        self._identity = runs.RunIdentity()
        self._has_begun = self._is_open = False
        self._folder: Path | None = None

    def begin(self, files: RankFiles | None = None) -> None:
        """Find out the run of this process. Without files, do nothing if that was done before.

        Args:
            files: the files of this rank, which the next attempt on this machine finds; ``None`` if it has none.
        """
        if self._has_begun and files is None:
            return
        self._has_begun = True
        identity = current_run().identity = self._identity = runs.identify_run(self._environ, tuple(sys.argv))
        if files is not None:
            with suppress(OSError, ValueError):
                current_run().restarts = Restarts.from_json(json.loads(files.restarts.read_text()))
                return
            self._folder = files.stem.parent
        if identity.id:
            current_run().restarts = Restarts(run_id=identity.id, max_restarts=identity.max_restarts)
            self._is_open = True

    def agree(self, call: str) -> None:
        """Complete ``restarts`` of the run with what the machines know. Collective, at the first call.

        Args:
            call: the collective call that needs it, for the message about ranks that do not make it.
        """
        self.begin()
        if self._is_open and dist.is_initialized():
            with agreement.collective_preparation(call):
                own = runs.read_attempts(self._folder, self._identity) if self._is_lowest else None
                found = agreement.gather_objects((own, self._identity.attempt))
                known = [restarts for restarts, _ in found if restarts is not None]
                restarts = runs.agree_on_attempts(known, max(number for _, number in found))
            self._is_open = False
            current_run().restarts = restarts
            if self._folder is not None and self._is_lowest:
                runs.keep_attempts(self._folder, restarts)
            if restarts.count:
                print_once(f"{restarts.title}: {restarts.last_failure}")


attempt = process.owns(ProcessAttempt)


def find_checkpoint(
    run: Path | None,
    prefix: str,
    selected: str | os.PathLike[str] | None,
    setting: CheckpointSection = _DEFAULTS,
    *,
    fix: str,
    allow_pickles: bool = False,
) -> Path | None:
    """Return ``selected`` or, if it is ``None``, the newest complete checkpoint of the run folder. Collective.

    Interrupted commits are recovered first. Newer incomplete checkpoints are reported. All files of the checkpoint
    that are read, except model and optimizer, are checked. For a checkpoint in a storage, the result is the folder of
    this rank that stands for it.

    Args:
        run: the folder of the checkpoints; ``None`` if there is none.
        prefix: prefix of the checkpoint names, before the number.
        selected: the path or URL of the checkpoint that the user selected.
        setting: the settings of checkpoints.
        fix: what to do if ``selected`` is incomplete.
        allow_pickles: as in :func:`hf_fsdp_plugin.checkpoint.reading.pickled_states.check_states`.

    Returns:
        ``None`` if ``selected`` is ``None`` and the run has no checkpoint.

    Raises:
        CheckpointError: the selected checkpoint is incomplete, or all checkpoints of the run are. Or a file is damaged,
            or contains a pickle that may execute code.
    """

    def select() -> Path | str | None:
        if selected is None:
            names = completeness.by_number(Storage(setting.storage).checkpoints(), prefix) if setting.storage else []
            stored = _first_stored(setting.storage, names)
            return stored if stored is not None or run is None else _highest_numbered(run, prefix)
        if (url := stored_url(selected, setting.storage)) is not None:
            return url
        path = Path(selected)
        recover_interrupted_commit(path)
        refuse_deepspeed(path)
        reason = completeness.why_incomplete(path) if path.is_dir() else "the folder does not exist"
        if reason is not None:
            message = f"{path} is not a complete checkpoint: {reason}"
            raise CheckpointError([Problem(code="FSDP-E431", message=message, fix=fix)])
        return path

    found = _select_on_rank_0(select)
    if found is not None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        check_states(found, rank, world_size, verify=setting.verify, allow_pickles=allow_pickles)
    return found


def stored_url(path: str | os.PathLike[str], storage: str) -> str | None:
    """Return the URL of a checkpoint that is not a folder here: ``path`` itself, or that of its name in the storage."""
    if (url := url_of(os.fspath(path))) is not None:
        return url
    return None if not storage or os.path.isdir(path) else f"{storage.rstrip('/')}/{os.path.basename(path)}"


def present_folder(path: str | os.PathLike[str], storage: str) -> Path:
    """Return a folder with a checkpoint: ``path``, or the one of this rank that stands for it. Not collective."""
    url = stored_url(path, storage)
    return Path(path) if url is None else fetched(url)


def newest_checkpoint(folder: str | os.PathLike[str], *, this_run: bool = False) -> Path | None:
    """Return the newest complete checkpoint in a folder, for ``accelerator.load_state``. Collective.

    Newest is the one that was saved last, whatever its name. Interrupted commits are recovered first, and newer
    incomplete checkpoints are reported. Only checkpoints with a manifest are found: those that the plugin has written.

    Args:
        folder: the folder that contains the checkpoints.
        this_run: consider only checkpoints that the present run has written, before a restart by its launcher.

    Returns:
        ``None`` if there is none.

    Raises:
        SpecError: several ranks run, but there is no process group yet.
    """
    if not dist.is_initialized() and launched_world_size() > 1:
        message = "newest_checkpoint was called before the process group exists."
        fix = "Call it on all ranks, after the Accelerator has been created."
        raise SpecError([Problem(code="FSDP-E718", message=message, fix=fix)])
    attempt().agree("newest_checkpoint")
    return _select_on_rank_0(lambda: _last_saved(os.fspath(folder), "", this_run=this_run))


def checkpoint_after_restart(folder: Path, prefix: str, storage: str = "") -> Path | None:
    """Return the newest complete checkpoint that this ``train`` call had written before the restart. Collective.

    Args:
        storage: URL in which it is instead of ``folder``; empty for none.

    Returns:
        ``None`` on the first start, or if there is none: then the script's own choice applies.
    """
    if not is_started_again():
        return None
    place, training = storage or os.fspath(folder), current_run().num_trainings
    found = _select_on_rank_0(lambda: _last_saved(place, prefix, this_run=True, training=training))
    restarts = current_run().restarts
    title = restarts.title if restarts.count else f"run {restarts.run_id}"
    if found is not None:
        print_once(f"{title}: resuming from {found}, the newest complete checkpoint of this run.")
    elif restarts.count:
        found_none = f"{place} has no complete checkpoint of this run"
        print_once(f"{title}: {found_none}: training begins as on the first start.")
    return found


def _select_on_rank_0(select: Callable[[], Path | str | None]) -> Path | None:
    """Let rank 0, which asks for the files of the checkpoints, select one for all ranks, or a URL. Collective."""
    manager().wait()  # selecting removes the staging folders of interrupted saves
    selected = on_rank_0(select)
    with agreement.on_all_ranks("looking for a checkpoint"):
        if isinstance(selected, str):
            print_once(f"the checkpoint is {selected}")
            return fetched(selected)
        if selected is not None:
            check_visible(selected, "resumes from")
    return selected


def on_rank_0(look: Callable[[], T]) -> T:
    """Return rank 0's result on all ranks, or raise its error on all of them. Collective if there are ranks."""
    answer: Any = None, ()
    with agreement.on_all_ranks("looking for a checkpoint"):
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                answer = look(), ()
            except CheckpointError as error:  # the error is about the checkpoint, not about this rank
                answer = None, error.problems
    found, problems = agreement.broadcast_object(answer)
    if problems:
        raise CheckpointError(problems)
    return found


def _highest_numbered(run: Path, prefix: str) -> Path | None:
    """Return the complete checkpoint with the highest number. Raises ``CheckpointError`` if all are incomplete."""
    recover_run(run, prefix)
    numbered = completeness.numbered_checkpoints(run, prefix)
    for newest in numbered[:1]:
        refuse_deepspeed(newest)
    found = completeness.first_complete(numbered, _report_skipped)
    if found is None and numbered:
        message = f"none of the {len(numbered)} checkpoints in {run} is complete."
        fix = "Restore one from a backup, or start without resuming."
        raise CheckpointError([Problem(code="FSDP-E606", message=message, fix=fix)])
    return found


def _last_saved(place: str, prefix: str, *, this_run: bool, training: int | None = None) -> Path | str | None:
    """Return the complete checkpoint with a manifest that was saved last, whatever its name: in a folder or storage."""
    folder, saved = Path(place), dict[str, tuple[Mapping[str, Any], str]]()  # name -> its run, and when it was saved
    if is_url(place):
        markers = Storage(place).checkpoints()
        saved = {name: (marker.get("run", {}), str(marker.get("created"))) for name, marker in markers.items()}
    elif folder.is_dir():
        recover_run(folder, prefix)
        for path in folder.glob(f"{prefix}*"):
            if path.is_dir() and not path.name.startswith(".") and (manifest := readable_manifest(path)) is not None:
                saved[path.name] = manifest.run, manifest.created
    candidates = []
    for name, (run, created) in saved.items():
        if name.startswith(prefix) and (not this_run or _is_of_this_run(run, training)):
            number = re.search(r"(\d+)$", name)
            order = created, int(number[1]) if number is not None else -1, name
            candidates.append((_run_steps(run) if this_run else 0, *order))
    names = [name for *_, name in sorted(candidates, reverse=True)]
    if is_url(place):
        return _first_stored(place, names)
    return completeness.first_complete((folder / name for name in names), _report_skipped)


def _first_stored(storage: str, names: Iterable[str]) -> str | None:
    """Return the URL of the first checkpoint in a storage of which no file is lost, and report those before it."""
    for name in names:
        try:
            fetched(url := f"{storage.rstrip('/')}/{name}")
        except CheckpointError as error:
            if error.problems[0].code != "FSDP-E470":
                raise
            _report_skipped(url, error.problems[0].message)
        else:
            return url
    return None


def _report_skipped(checkpoint: Path | str, reason: str) -> None:
    print_once(Problem(code="FSDP-W432", message=f"{checkpoint} is skipped: {reason}"))


def run_fact() -> dict[str, Any]:
    """Return the field ``run`` of the manifest of a checkpoint that is written now; empty without an identity."""
    if not current_run().restarts.run_id:
        return {}
    run = {"id": current_run().restarts.run_id, "steps": record().counts.total, "training": current_run().num_trainings}
    return run | ({"job": current_run().identity.job} if current_run().identity.job else {})


def is_started_again() -> bool:
    """Return whether this run may have written checkpoints before this process, which has agreed on its attempt."""
    return bool(current_run().restarts.count) or current_run().identity.may_have_checkpoints


def continue_run(path: Path) -> dict[str, Any]:
    """After a restart, count the steps of the run from the step of a checkpoint that it has written. Collective.

    Returns:
        The field ``batch`` of the checkpoint; empty without a restart, and for a checkpoint of another run.
    """
    if not is_started_again():
        return {}

    def read() -> tuple[int, dict[str, Any]]:
        manifest = readable_manifest(path)
        if manifest is None or not _is_of_this_run(manifest.run, None):
            return 0, {}
        return _run_steps(manifest.run), manifest.batch

    steps, batch = on_rank_0(read)
    if steps > record().counts.total:  # otherwise the script goes back to an earlier checkpoint by itself
        record().resume_at(steps)
    current_run().first_samples_per_step = batch.get("first_samples_per_step", batch.get("samples_per_step"))
    return batch


def _is_of_this_run(run: Mapping[str, Any], training: int | None) -> bool:
    run_id, job = current_run().restarts.run_id, current_run().identity.requeued
    is_own = bool(run_id) and run.get("id") == run_id
    # A job that was requeued has other agents of torch, so that its run has another id.
    is_own |= bool(job) and run.get("job") == job
    return is_own and training in (None, run.get("training"))


def _run_steps(run: Mapping[str, Any]) -> int:
    steps = run.get("steps")
    return steps if type(steps) is int and steps >= 0 else 0


def warn_differences(path: Path, batch: dict[str, Any]) -> None:
    """Report the effects of a world size or batch that differs from the checkpoint. Collective.

    Of checkpoints without a manifest, the random states are counted.
    """
    manifest = read_manifest(path)
    world_size = dist.get_world_size()
    if manifest is None and dist.get_rank() != 0:
        return  # only rank 0, which prints, lists the folder
    random_states = [*path.glob(f"{TRAINER_RNG}*"), *path.glob(f"{ACCELERATE_RNG}*")] if manifest is None else []
    num_saved = manifest.world_size if manifest is not None else len(random_states)
    if num_saved != world_size:
        message = f"{path} has the random state of {plural(num_saved, 'rank')}, but this run has "
        message += f"{plural(world_size, 'rank')}: dropout and other random operations differ from those of the "
        message += "uninterrupted run."
        print_once(Problem(code="FSDP-W433", message=message))
    if manifest is not None and (problem := samples_problem(path, manifest.batch, batch)) is not None:
        print_once(problem)
