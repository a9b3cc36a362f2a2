"""``hf-fsdp disable``: Remove what hf-fsdp enable has written: stock launchers do not use the plugin any more.

Examples::

    hf-fsdp disable
    hf-fsdp disable --json
"""

from __future__ import annotations

import argparse
import sys

from hf_fsdp_plugin.cli.enable import cannot_change, enabled_files, find_enabled
from hf_fsdp_plugin.cli.output import print_result


def run(args: argparse.Namespace) -> int:
    """Remove the file. Returns 1 if that is not possible, and 0 if there is none."""
    found, problems = enabled_files(), []
    for file in found:
        try:
            file.unlink()
        except OSError as error:
            problems.append(cannot_change(file, error))
    removed = ", ".join(map(str, found))
    text = f"disabled: removed {removed}" if found else f"not enabled in {sys.prefix}: nothing to remove"
    return print_result(args, {"enabled": find_enabled()}, "" if problems else text, problems)
