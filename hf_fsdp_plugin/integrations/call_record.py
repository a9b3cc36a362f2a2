"""Arms the record of collectives in this process, from which hangs are diagnosed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hf_fsdp_plugin.hangs.call_files import CallFiles
from hf_fsdp_plugin.hangs.record import record
from hf_fsdp_plugin.integrations.patching import install_hooks
from hf_fsdp_plugin.torch_private.unit_names import set_unit_names

if TYPE_CHECKING:  # the launcher imports this module without torch
    from torch import nn


def record_calls(files: CallFiles) -> None:
    """Record all collectives from now on. Does nothing if the files cannot be written."""
    from hf_fsdp_plugin.backends.arrivals import arrivals

    with contextlib.suppress(OSError):
        record.open(files)
        arrivals.listen(record.on_arrival)
        install_hooks("calls", "hangs")


def name_units(model: nn.Module) -> None:
    """Give the units of a sharded model their names for the record, if collectives are recorded."""
    if record.is_open:
        from hf_fsdp_plugin.observe.units import observe_units

        names = {id(module): unit.name for unit in observe_units(model) for module in unit.live.modules}
        set_unit_names(model, {path: names.get(id(module), path) for path, module in model.named_modules()})
