"""``hf-fsdp profile`` in a rank: profiles the script. Imports torch only if the launcher asks for a profile."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Final

OPTIONS_VARIABLE: Final = "HF_FSDP_PROFILE"
"""Environment variable with ``ProfileOptions`` as JSON."""


@contextlib.contextmanager
def profiled_run() -> Iterator[None]:
    """Profile the script that runs in this context, if the launcher asks for it.

    Raises:
        SpecError: the profile cannot be made or written.
    """
    options = os.environ.pop(OPTIONS_VARIABLE, None)  # processes that the script starts are not ranks
    if options is None:
        yield
        return
    from hf_fsdp_plugin.integrations.profiling.files import ProfileOptions
    from hf_fsdp_plugin.integrations.profiling.run import profiling

    profiling.begin(ProfileOptions(**json.loads(options)))
    try:
        yield
    except BaseException as error:
        profiling.end(failed=not isinstance(error, SystemExit) or error.code not in (None, 0))
        raise
    profiling.end()
