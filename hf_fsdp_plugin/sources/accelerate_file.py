"""Reads the config: Accelerate's file, only its ``fsdp_config`` section, a training script's config file, or a dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.collector import Collector, entry_of
from hf_fsdp_plugin.sources.config_file import ConfigFile, ConfigFiles
from hf_fsdp_plugin.sources.deepspeed import equivalent_settings, is_deepspeed
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.sources.settings import SourceSettings, enables_fsdp
from hf_fsdp_plugin.sources.tree import Entry, Node
from hf_fsdp_plugin.sources.yaml_tree import ConfigFileError, dict_tree
from hf_fsdp_plugin.vocabulary import TRAINING_FILE_MARKS, find, plain_key

SOURCE = "config"


def read(sources: Sources) -> SourceSettings | None:
    """Read ``sources.config``; ``None`` if there is none."""
    config = sources.config
    if config is None:
        return None
    file = ConfigFile.at(SOURCE) if isinstance(config, Mapping) else config
    try:
        root = dict_tree(config, source=SOURCE) if isinstance(config, Mapping) else sources.files.tree(config)
    except ConfigFileError as error:
        return SourceSettings(problems=(error.problem,), dialect="accelerate")
    keys = {entry.key.strip().lower() for entry in root.value}
    out = Collector(file.shown)
    if keys & TRAINING_FILE_MARKS and "distributed_type" not in keys:
        _add_training_file(out, root, file, sources.files)
        return out.result("training_arguments")
    _add_tree(out, root)
    return out.result("accelerate")


def _add_training_file(out: Collector, root: Node, file: ConfigFile, files: ConfigFiles) -> None:
    """Add the config of a training script, which passes its FSDP keys to ``TrainingArguments``.

    There, only ``fsdp`` enables FSDP. axolotl (``base_model``) sets it for every ``fsdp_config``.
    """
    inner = Collector(out.source)
    inner.add_training_file(_without_path(root.value, inner, file, files))
    fsdp = next((entry for entry in root.value if plain_key(entry.key, "training") == "fsdp"), None)
    is_on = any(s.name == "launch.distributed_type" and s.value == "FSDP" for s in inner.settings)
    if not is_on and (fsdp is None or fsdp.value.is_empty) and any(entry.key == "base_model" for entry in root.value):
        is_on = any(enables_fsdp(s.name, s.value, s.origin) for s in inner.settings)
    if is_on:
        out.extend(inner)
        out.mentions_fsdp = True
        return
    out.problems += inner.problems
    out.set_inactive(s for s in inner.settings if s.name != "launch.distributed_type")
    out.add("launch.distributed_type", fsdp or entry_of("", "NO"), value="NO", implied=True)


def _add_tree(out: Collector, root: Node) -> None:
    """Add Accelerate's file, or only its ``fsdp_config`` section."""
    if _refuse_deepspeed(out, root):
        return
    keys = {entry.key.strip().lower() for entry in root.value}
    if any(_is_top_level(key) for key in keys):
        out.add_mapping(root.value, ("launch", "training"), misplaced=("fsdp", "parallelism"))
    else:
        out.add_mapping(root.value, ("fsdp", "parallelism"))


def _without_path(entries: Iterable[Entry], out: Collector, file: ConfigFile, files: ConfigFiles) -> Iterator[Entry]:
    """Yield the entries. If ``fsdp_config`` is a path, add the contents of its file to `out` instead.

    The path is relative to the working directory, as in the script, or to the folder of `file` if only that file
    exists.
    """
    for entry in entries:
        if plain_key(entry.key, "training") != "fsdp_config" or not isinstance(entry.value.value, str):
            yield entry
            continue
        path = Path(entry.value.value)
        sibling = ConfigFile(path=file.path.parent / path, shown=str(Path(file.shown).parent / path))
        named = sibling if sibling.path.exists() and not path.exists() else ConfigFile.at(path)
        inner = Collector(named.shown)
        try:
            add_fsdp_section(inner, files.tree(named))
        except ConfigFileError as error:
            inner.problems.append(error.problem)
        out.extend(inner)
        out.mentions_fsdp = True


def add_fsdp_section(out: Collector, root: Node) -> None:
    """Add the content of an ``fsdp_config``, which may also be a whole file of Accelerate."""
    if _refuse_deepspeed(out, root):
        return
    keys = {entry.key.strip().lower() for entry in root.value}
    if keys & {"fsdp_config", "distributed_type"}:
        out.add_mapping(root.value, ("launch", "training"), misplaced=("fsdp", "parallelism"))
    else:
        out.add_mapping(root.value, ("fsdp", "precision", "parallelism"))


def _refuse_deepspeed(out: Collector, root: Node) -> bool:
    """Report a config of DeepSpeed, with the equivalent settings. Return whether it is one."""
    if not is_deepspeed(entry.key for entry in root.value):
        return False
    settings = equivalent_settings(root.plain())
    equivalent = f" The equivalent settings are {', '.join(settings)}." if settings else ""
    fix = "Write a config with distributed_type: FSDP and an fsdp_config, or use accelerate launch to run DeepSpeed."
    message = f"this is a config of DeepSpeed, not of FSDP.{equivalent}"
    out.problems.append(Problem(code="FSDP-E060", message=message, fix=fix, origin=Origin(source=out.source)))
    return True


def _is_top_level(key: str) -> bool:
    row = find(key, ("launch",))
    return row is not None and row.scope == "launch" and plain_key(key, "launch") in row.spellings
