"""Runs a script on one of several unsharded ranks, as ``python SCRIPT`` or ``python -m MODULE`` would.

The models in DistributedDataParallel are kept until the process ends. With torch 2.13, a rank that frees one after
``destroy_process_group`` may hang: the destructor joins gloo's thread and holds the GIL, for which the thread waits.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_models: list[DistributedDataParallel] = []
_initialize = DistributedDataParallel.__init__


def _keep(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    _initialize(model, *args, **kwargs)
    _models.append(model)


def main() -> None:
    DistributedDataParallel.__init__ = _keep  # type: ignore[method-assign]
    is_module = sys.argv[1] == "-m"
    name = sys.argv[2 if is_module else 1]
    sys.argv = sys.argv[2 if is_module else 1 :]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(name))
        runpy.run_path(name, run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter would free the models


if __name__ == "__main__":
    main()
