"""``ProfilerCallback``: profiles some steps of a Trainer, without ``hf-fsdp profile``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from hf_fsdp_plugin.backends.ranks.agreement import on_all_ranks
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import SpecError, has_errors
from hf_fsdp_plugin.sources.environment import absolute_path
from hf_fsdp_plugin.tools.profile import files
from hf_fsdp_plugin.tools.profile.run import profiling, remove_files


class ProfilerCallback(TrainerCallback):
    """Profiles some steps of ``Trainer.train``. The training continues after them.

    Every rank writes its file when its steps are done. At the end of the training, rank 0 writes
    ``profile.json``. An earlier profile in the folder is deleted when the training begins. A profile that fails
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
        folder = str(absolute_path(output_dir) or output_dir)
        self._options = files.ProfileOptions(
            folder=folder, wait=wait, warmup=warmup, active=active, after=after, stops=False, raises=False
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if _is_profiled_by_command():
            return
        if args.process_index == 0:
            with contextlib.suppress(OSError):  # no rank writes before the collectives of the first steps
                files.remove_paths(files.files_of_profile(Path(self._options.folder)))
        profiling().begin(self._options)
        if model is not None:
            profiling().watch(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the result. Collective."""
        if _is_profiled_by_command():
            return
        try:
            with on_all_ranks("profiling"):  # every rank has written its file, or none is kept
                profiling().end()
                if (failure := profiling().failure) is not None:
                    raise failure
            if args.process_index == 0:
                self._write_result()
        except SpecError as error:  # the training is complete, and must not fail
            remove_files(self._options, args.process_index)
            print_once(f"no profile: {error.problems[0]}")  # on a full disk, all ranks have the same failure

    def _write_result(self) -> None:
        folder = Path(self._options.folder)
        try:
            ranks = files.read_ranks(folder)
            problems = files.missing_parts(ranks, self._options)
            if has_errors(problems):
                print_once(f"no profile: {problems[0]}")
                return
            files.write_profile(folder, ranks, problems)
        except (OSError, ValueError) as error:
            print_once(f"no profile: {folder / files.RESULT} cannot be written: {error}.")
            return
        for each in problems:
            print_once(each)
        print_once(f"profile: {folder / files.RESULT}")


def _is_profiled_by_command() -> bool:
    return profiling().active and profiling().options.raises
