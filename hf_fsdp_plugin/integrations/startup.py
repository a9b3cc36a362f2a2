"""The plugin in ranks of stock launchers: what the file of ``hf-fsdp enable`` runs when Python starts.

A launcher's rank gets the hooks when the script has imported Accelerate or Transformers. ``install()`` runs when FSDP
is first asked for: at the first call of a hooked function if ``accelerate launch`` has FSDP settings, else when the
script creates an FSDP plugin or ``TrainingArguments`` with FSDP. Other processes, and ranks without FSDP, run as
without the plugin. A script that calls ``install()`` itself runs as if the plugin were not enabled.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from types import ModuleType
from typing import Final

from hf_fsdp_plugin.integrations import before_imports
from hf_fsdp_plugin.integrations.before_imports import ImportCallbacks, is_rank

_LAUNCHERS: Final = (
    *("accelerate", "accelerate-launch", "hf-fsdp", "torchrun"),
    *("accelerate.commands.accelerate_cli", "accelerate.commands.launch", "hf_fsdp_plugin.cli.main"),
    *("torch.distributed.launch", "torch.distributed.run"),
)
"""Programs and modules that start ranks. A cluster may have set the variables of a rank for them."""


def start() -> None:
    """Wait for the first import of Accelerate or Transformers if this process is a rank of a stock launcher."""
    if any(isinstance(finder, ImportCallbacks) for finder in sys.meta_path):
        return  # Python reads the files of a virtual environment twice
    program = _program()
    if program in _LAUNCHERS or sys.flags.ignore_environment or not before_imports.may_be_rank(os.environ):
        return
    os.environ[before_imports.RANK_VARIABLE] = before_imports.rank_process(os.environ)
    if program.partition(".")[0] != "hf_fsdp_plugin":  # modules of this package call install() themselves
        imports = ImportCallbacks()
        for library in ("accelerate", "transformers"):
            imports.add(library, partial(_install_hooks, imports))


def _program() -> str:
    """Return the module, or the name of the script, that this process runs. ``sys.argv`` is not complete yet."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word in ("-W", "-X"):
            next(words, None)
        elif word.startswith("-") and word.endswith("m"):
            return next(words, "")
        elif not word.startswith("-") or word.endswith("c"):
            return os.path.basename(word)
    return ""


def _install_hooks(imports: ImportCallbacks, module: ModuleType) -> None:
    imports.close()
    if not is_rank():
        return
    from hf_fsdp_plugin.integrations import patching
    from hf_fsdp_plugin.integrations.session import session

    launched_with_fsdp = patching.is_true("ACCELERATE_USE_FSDP")
    patching.changes().install("accelerate", "transformers")
    if launched_with_fsdp:
        patching.changes().install("loading")  # a script may load its model before anything else
    session().defer(_install, until_call=launched_with_fsdp)


def _install() -> None:
    if is_rank():
        from hf_fsdp_plugin.integrations.install import install
        from hf_fsdp_plugin.integrations.session import session

        install()
        session().is_automatic = True
