"""Finds machines by name: known ones in the table machines.yaml, calibrated ones in JSON files."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hf_fsdp_plugin.estimate.machines import Evidence, Link, Machine, MeasuredCollective
from hf_fsdp_plugin.problems import Problem, SpecError


def machine_named(name: str) -> Machine:
    """Return a machine: ``h100-sxm``, ``h100-sxm:efa-3200`` with another network, or the path of a machine file.

    Raises:
        SpecError: there is no such machine or network, or the file is invalid (FSDP-E830, FSDP-E831).
    """
    path = Path(name) if name != "calibrated" else calibration_path()
    if path.suffix in (".json", ".yaml", ".yml"):
        return read_machine(path)
    table = _table()
    base, _, network = name.lower().partition(":")
    if base not in table["machines"]:
        raise SpecError([_unknown("machine", base, [*table["machines"], "calibrated"])])
    row = table["machines"][base]
    network = network or row["network"]
    if network not in table["networks"]:
        raise SpecError([_unknown("network", network, list(table["networks"]))])
    link = table["networks"][network]
    figures = {key: value for key, value in row.items() if key not in ("network", "compared")}
    figures["evidence"] = Evidence(**table["evidence"][row["compared"]]) if row["compared"] else None
    figures |= {"intra": Link(**row["intra"]), "inter": Link(bandwidth=link["bandwidth"], latency=link["latency"])}
    return Machine(**{**figures, "name": base if network == row["network"] else f"{base}:{network}"})


def machine_names() -> tuple[str, ...]:
    return tuple(_table()["machines"])


def network_names() -> tuple[str, ...]:
    return tuple(_table()["networks"])


def _unknown(what: str, name: str, known: list[str]) -> Problem:
    close = [each for each in known if each.startswith(name)] or difflib.get_close_matches(name, known, n=1)
    hint = f"Use one of {', '.join(known)}, or the path of a machine file."
    if close:
        hint = f"Did you mean {' or '.join(close)}?"
    return Problem(code="FSDP-E830", message=f"{name!r} is not a known {what}.", fix=hint)


@cache
def _table() -> dict[str, Any]:
    text = files("hf_fsdp_plugin.estimate").joinpath("machines.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    return table


def calibration_path() -> Path:
    """Return the path of the calibrated machine: ``$XDG_CACHE_HOME/hf_fsdp_plugin/machine.json``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hf_fsdp_plugin" / "machine.json"


def write_machine(machine: Machine, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(path.name + ".tmp")
    staging.write_text(json.dumps(asdict(machine), indent=1), encoding="utf-8")
    staging.replace(path)


def read_machine(path: Path) -> Machine:
    """Return the machine in a file.

    Raises:
        SpecError: the file is missing or is not a machine file (FSDP-E831).
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return _machine(data)
    except OSError as error:
        reason = f"cannot read the machine file {path}: {error.strerror or error}."
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{path} is not a machine file: {error}."
    fix = "Run hf-fsdp plan --calibrate, or name a known machine."
    raise SpecError([Problem(code="FSDP-E831", message=reason, fix=fix)])


def _machine(data: dict[str, Any]) -> Machine:
    curves = {name: _points(curve) for name, curve in data["curves"].items()}
    measured = tuple(
        MeasuredCollective(kind=each["kind"], group_size=int(each["group_size"]), seconds=_points(each["seconds"]))
        for each in data["collectives"]
    )
    links = {name: Link(**data[name]) for name in ("intra", "inter")}
    evidence = Evidence(**data["evidence"]) if data.get("evidence") else None
    read = {"curves": curves, "collectives": measured, "spread": tuple(data["spread"]), "evidence": evidence}
    return Machine(**{**data, **links, **read})


def _points(curve: Any) -> tuple[tuple[float, float], ...]:
    return tuple((float(size), float(value)) for size, value in curve)
