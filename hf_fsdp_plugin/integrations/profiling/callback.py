"""``ProfilerCallback``: profiles some steps of a Trainer, without ``hf-fsdp profile``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

from transformers.trainer_callback import TrainerCallback

from hf_fsdp_plugin.backends.ranks.agreement import on_all_ranks
from hf_fsdp_plugin.integrations.profiling import ProfileOptions
from hf_fsdp_plugin.integrations.profiling.files import (
    RESULT,
    files_of_profile,
    read_ranks,
    remove_paths,
    write_profile,
)
from hf_fsdp_plugin.integrations.profiling.run import profiling, remove_files
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.sources.launchers import absolute_path
from hf_fsdp_plugin.text import plural

_MAX_PRINTED: Final = 4
"""Maximum number of failures of ranks that are printed: on a full disk, all ranks have the same failure."""


class ProfilerCallback(TrainerCallback):
    """Profiles some steps of ``Trainer.train``. The training continues after them.

    Every rank writes its file when its steps are done. At the end of the training, rank 0 writes ``profile.json`` and
    prints the suggestions. An earlier profile in the folder is deleted when the training begins. A profile that fails
    is printed, leaves no files, and does not end the training. In a script that ``hf-fsdp profile`` runs, the callback
    does nothing.

    Args:
        output_dir: the folder for the result.
        wait: optimizer steps before the profiler starts; in a resumed training, those after the checkpoint.
        warmup, active, after: see ``hf-fsdp profile``.
    """

    def __init__(
        self, output_dir: str = "fsdp_profile", *, wait: int = 1, warmup: int = 2, active: int = 4, after: int = 3
    ) -> None:
        self._folder = Path(absolute_path(output_dir) or output_dir)
        self._options = ProfileOptions(
            folder=str(self._folder), wait=wait, warmup=warmup, active=active, after=after, stops=False, raises=False
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if _is_profiled_by_command():
            return
        if args.process_index == 0:
            with contextlib.suppress(OSError):
                remove_paths(files_of_profile(self._folder))  # no rank writes before the collectives of the first steps
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
            self._write_result()

    def _write_result(self) -> None:
        try:
            ranks = read_ranks(self._folder)
            problems = ranks.problems(self._options)
            if not ranks.paths:
                print_once(f"no profile: {problems[0]}")
                return
            suggestions, _ = write_profile(self._folder, ranks.merge(), problems)
        except (OSError, ValueError) as error:
            print_once(f"no profile: {self._folder / RESULT} cannot be written: {error}.")
            return
        for each in (*problems, *(f"profile: {suggestion}" for suggestion in suggestions)):
            print_once(each)
        print_once(f"profile: {self._folder / RESULT}")


def _is_profiled_by_command() -> bool:
    return profiling.active and profiling.options.raises
