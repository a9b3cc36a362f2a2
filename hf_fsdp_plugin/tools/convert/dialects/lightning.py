"""Reads Lightning's FSDPStrategy and ModelParallelStrategy in a YAML of LightningCLI or of Hydra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hf_fsdp_plugin.sources.tree import ConfigEntry, from_python
from hf_fsdp_plugin.tools.convert.dialects.interface import (
    AUTO,
    ConfigDialect,
    DialectDocument,
    DialectReading,
    marked_by,
)
from hf_fsdp_plugin.vocabulary import BY_NAME, PROGRAM_KEYS, word_of

_CLASS: Final = ("class_path", "_target_")
"""Key of a class in a file of LightningCLI, and of Hydra."""
_MIN_NUM_PARAMS: Final = 100_000_000
"""torch's default threshold of ``size_based_auto_wrap_policy``."""


def _read(reading: DialectReading) -> None:
    entries = _entries_of_file(reading.document)
    reading.found = dict(entries)
    name = reading.text("strategy").rpartition(".")[2]
    is_composable = name == "modelparallelstrategy"
    reading.imply("launch.distributed_type", "FSDP")
    reading.imply("offload.params", name == "fsdp_cpu_offload")
    reading.imply("checkpoint.state_dict", "sharded" if is_composable else "full")
    if not is_composable:
        reading.imply("params.use_orig", True)
        reading.imply("wrap.policy", "none")
    for path, entry in entries:
        if path.endswith("_parallel_size") and word_of(entry.value.value) == AUTO:
            reading.ignore(entry, "It is the default.")
        else:
            reading.add_path(path, entry)
    if is_composable:
        _add_default_size(reading, "tensor_parallel_size", "mesh.tensor", "trainer.devices", None)
        _add_default_size(reading, "data_parallel_size", "mesh.shard", "trainer.num_nodes", 1)


def _entries_of_file(document: DialectDocument) -> list[tuple[str, ConfigEntry]]:
    """Return the arguments of the strategy by name, and those of the trainer with the prefix ``trainer.``."""
    keys = document.keys()
    trainer = keys.pop("trainer", None)
    entries = list(keys.items())
    for entry in trainer.value.value if trainer is not None else ():
        written = replace(entry, key=f"trainer.{entry.key}")
        if entry.key != "strategy":
            entries.append((written.key, written))
        elif entry.value.is_mapping:
            entries += _entries_of_object(written)
        else:
            entries.append(("strategy", written))
    return entries


def _entries_of_object(strategy: ConfigEntry) -> Iterator[tuple[str, ConfigEntry]]:
    for entry in strategy.value.value:
        written = f"{strategy.key}.{entry.key}"
        if entry.key == "init_args" and entry.value.is_mapping:
            yield from ((inner.key, replace(inner, key=f"{written}.{inner.key}")) for inner in entry.value.value)
        else:
            yield "strategy" if entry.key in _CLASS else entry.key, replace(entry, key=written)


def _object(entry: ConfigEntry) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a class or function and its arguments; the name is empty for other values."""
    value = entry.value.plain()
    if not isinstance(value, dict) or not any(key in value for key in _CLASS):
        return "", {}
    name = str(next(value[key] for key in _CLASS if key in value)).rpartition(".")[2]
    arguments = value.get("init_args", value)
    return (str(arguments["0"]), arguments) if name == "partial" and "0" in arguments else (name, arguments)


def _add_wrap_policy(reading: DialectReading, entry: ConfigEntry) -> None:
    name, arguments = _object(entry)
    given = arguments.get("module_classes", arguments.get("transformer_layer_cls", arguments.get("0")))
    classes = given if name else entry.value.plain()
    if "size_based_auto_wrap_policy" in (name, classes):
        reading.add("wrap.policy", entry, value="size")
        reading.add("wrap.min_num_params", entry, value=arguments.get("min_num_params", _MIN_NUM_PARAMS))
    elif name in ("", "ModuleWrapPolicy", "transformer_auto_wrap_policy") and isinstance(classes, list | dict):
        reading.add("wrap.policy", entry, value="transformer")
        reading.add("wrap.classes", entry, value=[str(kind).rpartition(".")[2] for kind in classes])
    elif not entry.value.is_empty:
        fix = "Pass a set of layer classes, or size_based_auto_wrap_policy with min_num_params."
        reading.refuse(entry, "a custom wrap function is not supported", fix)


def _add_offload(reading: DialectReading, entry: ConfigEntry) -> None:
    name, arguments = _object(entry)
    offloads = arguments.get("offload_params", arguments.get("0", False))
    reading.add_entry(BY_NAME["offload.params"], replace(entry, value=from_python(offloads)) if name else entry)


def _add_mixed_precision(reading: DialectReading, entry: ConfigEntry) -> None:
    """Add the dtypes of torch's ``MixedPrecision``."""
    _, arguments = _object(entry)
    for name in ("param", "reduce", "buffer"):
        if (dtype := arguments.get(f"{name}_dtype")) is not None:
            reading.add(f"precision.{name}", entry, value=str(dtype).rpartition(".")[2])


def _add_mesh(reading: DialectReading, entry: ConfigEntry) -> None:
    sizes = entry.value.plain()
    if isinstance(sizes, list) and len(sizes) == 2:
        reading.add("mesh.replicate", entry, value=sizes[0])
        reading.add("mesh.shard", entry, value=sizes[1])
    elif sizes is not None:
        reading.refuse(entry, "expected two numbers", "Write (replication size, sharding size).")


def _add_default_size(reading: DialectReading, name: str, setting: str, cause: str, default: int | None) -> None:
    """Add a size of ModelParallelStrategy that is ``auto``: the devices of a machine, or the machines."""
    given = reading.found.get(cause)
    size = default if given is None else given.value.value
    if reading.text(name, AUTO) != AUTO:
        return
    if isinstance(size, int):
        reading.imply(setting, size, given)
    else:
        reading.report_unresolved(replace(reading.found["strategy"], key=name, value=from_python(AUTO)))


def _add_number(reading: DialectReading, entry: ConfigEntry) -> None:
    """Add the number of machines, or of the ranks of all machines, if it is written."""
    name, number, factor = reading.row.to[0], entry.value.plain(), 1
    number = len(number) if isinstance(number, list) else number
    if name == "launch.num_processes" and "trainer.num_nodes" in reading.found:
        factor = reading.found["trainer.num_nodes"].value.value
    if isinstance(number, int) and number > 0 and isinstance(factor, int):
        reading.add(name, entry, value=number * factor)
    else:
        reading.skip(entry, f"--{name.removeprefix('launch.')}")


DIALECT: Final = ConfigDialect(
    name="lightning",
    title="Lightning",
    marks=marked_by(PROGRAM_KEYS["Lightning"]),
    read=_read,
    handlers={
        "cpu_offload": _add_offload,
        "mixed_precision": _add_mixed_precision,
        "auto_wrap_policy": _add_wrap_policy,
        "device_mesh": _add_mesh,
        "trainer.devices": _add_number,
        "trainer.num_nodes": _add_number,
    },
)
