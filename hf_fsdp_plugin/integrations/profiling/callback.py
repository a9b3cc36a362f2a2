"""``ProfilerCallback``: profiles some steps of a Trainer, without ``hf-fsdp profile``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

from transformers.trainer_callback import TrainerCallback

from hf_fsdp_plugin.backends.ranks.agreement import on_all_ranks
from hf_fsdp_plugin.integrations.profiling.files import RESULT, rank_files, read_ranks, write_profile
from hf_fsdp_plugin.integrations.profiling.options import MAX_TRACES, ProfileOptions
from hf_fsdp_plugin.integrations.profiling.result import remove_files
from hf_fsdp_plugin.integrations.profiling.run import profiling
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.observe.profile.suggestions import suggest
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.sources.launchers import absolute
from hf_fsdp_plugin.text import plural

_MAX_PRINTED: Final = 4
"""Failures of ranks that are printed: on a full disk, all ranks have the same."""


class ProfilerCallback(TrainerCallback):
    """Profiles some steps of ``Trainer.train``. The training continues after them.

    Every rank writes its file when its steps are done. At the end of the training, rank 0 writes ``profile.json`` and
    prints the suggestions. An earlier profile in the folder is deleted when the training begins. A profile that fails
    is printed, leaves no files, and does not end the training. In a script that ``hf-fsdp profile`` runs, the callback
    does nothing.

    Args:
        output_dir: the folder for the result.
        wait: optimizer steps before the profiler starts; in a resumed training, those after the checkpoint.
        warmup, active, after, memory, traces: see ``hf-fsdp profile``.
    """

    def __init__(
        self,
        output_dir: str = "fsdp_profile",
        *,
        wait: int = 1,
        warmup: int = 2,
        active: int = 4,
        after: int = 3,
        memory: bool = True,
        traces: int = MAX_TRACES,
    ) -> None:
        self._options = ProfileOptions(
            folder=absolute(output_dir) or output_dir, wait=wait, warmup=warmup, active=active, after=after,
            memory=memory, traces=traces, stops=False, raises=False,
        )  # fmt: skip

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if _is_profiled_by_command():
            return
        _remove_earlier(self._options, args.process_index, args.world_size)
        profiling.begin(self._options)
        if model is not None:
            profiling.watch(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the result. Collective."""
        if _is_profiled_by_command():
            return
        try:
            with on_all_ranks("profiling"):  # every rank has written its file, or none is kept
                profiling.end()
                if profiling.failure is not None:
                    raise profiling.failure
        except SpecError as error:  # the training is complete, and must not fail
            remove_files(self._options, args.process_index)
            for problem in error.problems[:_MAX_PRINTED]:
                print_once(f"no profile: {problem}")
            if (more := len(error.problems) - _MAX_PRINTED) > 0:
                print_once(f"no profile: and {plural(more, 'more rank')}")
            return
        if args.process_index == 0:
            self._write_result(Path(self._options.folder))

    def _write_result(self, folder: Path) -> None:
        try:
            results = read_ranks(folder)
            if not results.paths:
                print_once(f"no profile: {results.nothing(self._options)}")
                return
            run, problems = results.merge(self._options)
            suggestions = suggest(run)
            write_profile(folder, run, suggestions, problems)
        except (OSError, ValueError) as error:
            print_once(f"no profile: {folder / RESULT} cannot be written: {error}.")
            return
        for each in (*problems, *(f"profile: {suggestion}" for suggestion in suggestions)):
            print_once(each)
        print_once(f"profile: {folder / RESULT}")


def _is_profiled_by_command() -> bool:
    return profiling.active and profiling.options.raises


def _remove_earlier(options: ProfileOptions, rank: int, world_size: int) -> None:
    """Delete this rank's files of an earlier profile; on rank 0 also the result, and files of a larger world."""
    remove_files(options, rank)
    if rank == 0:
        for other in [int(path.stem.partition("_")[2]) for path in rank_files(Path(options.folder))]:
            if other >= world_size:
                remove_files(options, other)
        with contextlib.suppress(OSError):
            (Path(options.folder) / RESULT).unlink()
