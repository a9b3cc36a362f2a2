"""``hf-fsdp enable``: Let stock accelerate launch and torchrun use the plugin in this Python environment, without -m
hf_fsdp_plugin and without a line in the script. Ranks without FSDP settings, and all other processes, run as before.

Examples::

    hf-fsdp enable
    hf-fsdp enable --user

The verb writes one ``.pth`` file to the environment. Python runs the line of such a file at each start.
"""

from __future__ import annotations

import argparse
import os
import re
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.cli.output import print_result
from hf_fsdp_plugin.integrations.before_imports import RANK_VARIABLE
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources.handover import LAUNCH_VARIABLE
from hf_fsdp_plugin.version import __version__

FILE_NAME: Final = "hf_fsdp_plugin_enabled.pth"
"""Name of the file. Python reads ``.pth`` files in the order of names: this one after those of editable installs."""
_HEADER: Final = "# Written by `hf-fsdp enable` of hf_fsdp_plugin "
_CODE: Final = f"""\
try:
 from hf_fsdp_plugin.integrations.startup import start
except ModuleNotFoundError:
 pass
except ImportError as error:
 os.environ[{RANK_VARIABLE!r}] = str(os.getpid())
 os.environ.get('RANK') == '0' and os.write(2, f'hf-fsdp: not used: {{error}}\\n'.encode())
else:
 start()
"""
"""The code that starts the plugin in a rank. It does nothing if the package was removed.

If versions of libraries are not supported, rank 0 prints that. The variable keeps child processes from repeating it.
"""
_LINE: Final = (
    f"import os; 'LOCAL_RANK' in os.environ and {LAUNCH_VARIABLE!r} not in os.environ "
    f"and os.environ.get({RANK_VARIABLE!r}, str(os.getpid())) == str(os.getpid()) and exec({_CODE!r})"
)
"""The line that Python runs at each start. In processes that are no ranks, it only looks up environment variables."""
TEXT: Final = f"{_HEADER}{__version__}; `hf-fsdp disable` removes it.\n{_LINE}\n"
_PROBE: Final = "import sys; sys.exit('hf_fsdp_plugin.integrations.startup' not in sys.modules)"
_LIMIT: Final = 60.0
"""Seconds after which the process that probes is ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enabled:
    """The file of ``hf-fsdp enable`` in this environment.

    Attributes:
        file: ``None`` if the plugin is not enabled.
        version: version of the package that has written it.
        starts: whether a rank that starts now runs the plugin.
    """

    file: Path | None = None
    version: str = ""
    starts: bool = False

    def to_json(self) -> dict[str, Any]:
        file = None if self.file is None else str(self.file)
        return {"environment": sys.prefix, "file": file, "version": self.version, "starts": self.starts}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "for a package in the user's own site-packages (pip install --user)"
    parser.add_argument("--user", action="store_true", help=about)


def run(args: argparse.Namespace) -> int:
    """Write the file. Returns 1 if that is not possible, or if Python does not run it."""
    from hf_fsdp_plugin.checkpoint.file_io import write_atomically  # doctor and disable run without the libraries of it

    file = _folder(user=args.user) / FILE_NAME
    problems = []
    if args.user and not site.ENABLE_USER_SITE:
        problems = [_refused(f"{sys.prefix} does not use {file.parent}.", "Leave --user out.")]
    else:
        try:
            write_atomically(file, TEXT, preserve=True)
        except OSError as error:
            problems = [cannot_change(file, error)]
    if not problems and not find_enabled().starts:
        file.unlink()
        fix = "Install the package in this environment: pip install hf_fsdp_plugin."
        problems = [_refused(f"a new Python process does not find hf_fsdp_plugin when it reads {file}.", fix)]
    text = "" if problems else f"enabled in {sys.prefix} by {file}"
    return print_result(args, {"enabled": find_enabled()}, text, problems)


def find_enabled() -> Enabled:
    """Return the file that is in effect in this environment."""
    for file in enabled_files():
        text = file.read_text(encoding="utf-8", errors="replace")
        version = re.match(rf"{re.escape(_HEADER)}([^;\n]+)", text)
        return Enabled(file=file, version=version[1] if version is not None else "unknown", starts=_starts())
    return Enabled()


def check_enabled(found: Enabled) -> list[Problem]:
    """Return a warning if the file is of another version, or has no effect."""
    if found.file is None or (found.starts and found.version == __version__):
        return []
    message = f"{found.file} was written by version {found.version}; {__version__} is installed."
    if not found.starts:
        message = f"{found.file} has no effect: a new Python process finds no hf_fsdp_plugin when it reads the file."
    fix = "`hf-fsdp enable` writes it again, `hf-fsdp disable` removes it."
    return [Problem(code="FSDP-W629", message=message, fix=fix)]


def enabled_files() -> list[Path]:
    """Return the files of ``hf-fsdp enable`` that Python reads in this environment."""
    folders = [_folder(user=False)] + ([_folder(user=True)] if site.ENABLE_USER_SITE else [])
    return [file for folder in folders if (file := folder / FILE_NAME).is_file()]


def _folder(*, user: bool) -> Path:
    return Path(site.getusersitepackages() if user else sysconfig.get_path("purelib"))


def cannot_change(file: Path, error: OSError) -> Problem:
    """Return the error of an environment that cannot be changed."""
    fix = "Use a virtual environment of your own (python -m venv), or --user for a package in your own site-packages."
    return _refused(f"cannot change {file.parent}: {error.strerror or error}.", fix)


def _refused(message: str, fix: str) -> Problem:
    return Problem(code="FSDP-E628", message=message, fix=fix)


def _starts() -> bool:
    """Return whether the plugin runs in a rank that is started now."""
    hidden = (LAUNCH_VARIABLE, RANK_VARIABLE)
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", _PROBE]
    try:
        return not subprocess.run(command, env=environ, capture_output=True, timeout=_LIMIT, check=False).returncode
    except subprocess.TimeoutExpired:
        return False
