"""``ProfilerCallback``: profiles some steps of a Trainer, without ``hf-fsdp profile``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.trainer_callback import TrainerCallback

from hf_fsdp_plugin.integrations.messages import print_once, print_warnings
from hf_fsdp_plugin.integrations.profiling.options import MAX_TRACES, ProfileOptions, rank_files, write_file
from hf_fsdp_plugin.integrations.profiling.run import profiling
from hf_fsdp_plugin.observe.profile.page import page
from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile
from hf_fsdp_plugin.observe.profile.run_profile import merge_ranks
from hf_fsdp_plugin.observe.profile.suggestions import suggest
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.sources.handover import absolute


class ProfilerCallback(TrainerCallback):
    """Profiles some steps of ``Trainer.train``. The training continues after them.

    Every rank writes its file when its steps are done. At the end of the training, rank 0 writes ``profile.html`` and
    prints the suggestions. An earlier profile in the folder is replaced.

    Args:
        output_dir: the folder for the result.
        wait, warmup, active, after, memory, traces: see ``hf-fsdp profile``.
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
            memory=memory, traces=traces, stops=False,
        )  # fmt: skip

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        profiling.begin(self._options)
        if model is not None:
            profiling.watch(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the result. Collective."""
        try:
            profiling.end()
        except SpecError as error:  # the training is complete, and must not fail
            print_warnings(error.problems)
        if dist.is_initialized():
            dist.barrier()  # every rank has written its file
        if state.is_world_process_zero:
            self._write_page()

    def _write_page(self) -> None:
        folder = Path(self._options.folder)
        found = (json.loads(path.read_text())["profile"] for path in rank_files(folder))
        profiles = (RankProfile.from_json(tree) for tree in found if tree is not None)
        try:
            run = merge_ranks(profiles)
            suggestions = suggest(run)
            write_file(folder / "profile.html", page(run, suggestions))
        except (OSError, ValueError) as error:
            print_once(f"no profile: {error}.")
            return
        for suggestion in suggestions:
            print_once(f"profile: {suggestion}")
        print_once(f"profile: {folder / 'profile.html'}")
