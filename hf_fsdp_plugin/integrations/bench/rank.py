"""A rank of a benchmark: ``python -m hf_fsdp_plugin.integrations.bench.rank FOLDER``, started by ``hf-fsdp bench``."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.integrations.bench.jobs import Events, Job
from hf_fsdp_plugin.integrations.bench.measuring import Measuring
from hf_fsdp_plugin.integrations.install import uninstall
from hf_fsdp_plugin.messages import printer
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.sources.handover import LaunchHandover

_TIMEOUT: Final = timedelta(minutes=30)


def main(folder: Path) -> None:
    job, events = Job.read(folder), Events(folder)
    handover = LaunchHandover.from_env(os.environ)
    assert handover is not None, "hf-fsdp bench starts its ranks with a handover"
    uninstall()  # each case installs what it needs
    printer.quiet = True  # the settings were checked by the verb
    warnings.simplefilter("ignore")
    device = _join(job.device)
    measuring = Measuring(job.model, device, job.workload, handover.sources, events.write)
    for number, task in enumerate(job.tasks):
        try:
            if number == 0:
                measuring.prepare(task)
            measuring.run(task)
        except Exception as error:
            # The ranks may be in different collectives now, so that this world cannot go on.
            names = [case.name for case in task.cases]
            events.write(event="failed", cases=names, rank=dist.get_rank(), error=_text(error))
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def _join(device_type: str) -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    table = get_device(device_type)
    table.set_current(local_rank)
    if not dist.is_initialized():  # install() starts one for some settings
        dist.init_process_group(table.process_group_backend, timeout=_TIMEOUT)
    return torch.device("cpu") if device_type == "cpu" else torch.device(device_type, local_rank)


def _text(error: Exception) -> str:
    """Return the message of an error: of a refusal, its codes and texts."""
    if isinstance(error, SpecError):
        return " ".join(
            f"{problem.code}: {problem.message}" for problem in error.problems if problem.severity == "error"
        )
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
