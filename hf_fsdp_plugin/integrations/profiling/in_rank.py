"""Profiles the script of a rank of ``hf-fsdp profile``. Imports torch only there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from hf_fsdp_plugin.integrations.profiling.options import OPTIONS_VARIABLE, ProfileOptions


@contextlib.contextmanager
def profiled_run() -> Iterator[None]:
    """Profile the script that runs in this context, if the launcher asks for it.

    Raises:
        SpecError: the profile cannot be made or written.
    """
    options = ProfileOptions.from_env(os.environ)
    if options is None:
        yield
        return
    os.environ.pop(OPTIONS_VARIABLE)  # processes that the script starts are not ranks
    from hf_fsdp_plugin.integrations.profiling.run import profiling

    profiling.begin(options)
    try:
        yield
    except SystemExit as error:
        profiling.end(failed=error.code not in (None, 0))
        raise
    except BaseException:
        profiling.end(failed=True)
        raise
    profiling.end()
