"""Reads Accelerate's ``ParallelismConfig``, an argument of ``Accelerator`` and ``TrainingArguments``.

Accelerate is not imported: the source is an object with the fields as attributes, or a dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hf_fsdp_plugin.sources.collector import Collector, entry_of
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.sources.settings import SourceSettings
from hf_fsdp_plugin.vocabulary import find

SOURCE = "ParallelismConfig"
DATA_SIZES: Final = ("dp_replicate_size", "dp_shard_size")


def read(sources: Sources) -> SourceSettings | None:
    """Read ``sources.parallelism_config``; ``None`` if there is none.

    The object is also an argument of runs without FSDP, so it does not enable FSDP. Its constructor replaces missing
    sizes by 1: two data sizes of 1 are not set. If one of them is larger, a 1 is a size.
    """
    given = sources.parallelism_config
    if given is None:
        return None
    out = Collector(SOURCE)
    for name, value in fields_of(given).items():
        if find(name, ("parallelism",)) is None:
            out.add_mapping([entry_of(name, value)], ("parallelism",))  # reports it
        else:
            out.add_key("parallelism", name, value)
    inner = Collector(SOURCE)
    inner.set_inactive(out.settings, out.problems)
    return inner.result(None)


def fields_of(given: Any) -> dict[str, Any]:
    """Return the fields of a ``ParallelismConfig`` that are set: sizes, and handlers of axes that are not used."""
    fields = given if isinstance(given, Mapping) else vars(given)
    fields = {name: value for name, value in fields.items() if value is not None and not name.startswith("_")}
    if all(fields.get(name, 1) == 1 for name in DATA_SIZES):
        fields = {name: value for name, value in fields.items() if name not in DATA_SIZES}
    # The constructor sets the backends, and the handler of an axis above 1, which is refused.
    return {
        name: value
        for name, value in fields.items()
        if not name.endswith("_backend") and name != "device_mesh"
        if not (name.endswith("_handler") and fields.get(f"{name.partition('_')[0]}_size", 1) != 1)
    }
