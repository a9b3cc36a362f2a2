"""Probes every contract with other libraries on the installed versions.

The table of all contracts consists of the rows ``CONTRACTS`` of the files that use private names, and of the replaced
functions (:mod:`hf_fsdp_plugin.integrations.hooks`). torch is probed on a tiny sharded model of each FSDP version, in a
process group without communication; the other libraries by their source files, without importing them.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

from hf_fsdp_plugin.contracts import Contract
from hf_fsdp_plugin.integrations.hook import Hook
from hf_fsdp_plugin.integrations.hooks import HOOKS
from hf_fsdp_plugin.integrations.library_sources import defines, file_of, source_hash, text_of
from hf_fsdp_plugin.supported import installed_versions, release_of
from hf_fsdp_plugin.torch_private.live_objects import has_part, live_objects

Status = Literal["holds", "changed", "missing", "not installed", "not in this version"]

PRIVATE_FILES: Final = (
    *(f"torch_private.{name}" for name in ("elastic", "fake", "fsdp1", "fsdp2", "functions", "grad_scaler", "modules")),
    *(f"torch_private.{name}" for name in ("process_groups", "tracing")),
    *(f"integrations.{name}.private" for name in ("accelerate", "torchao", "transformers")),
)
"""The modules that use private names. Each has a tuple ``CONTRACTS``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedContract:
    """A contract, and whether it holds on the installed versions.

    Attributes:
        status: ``changed`` is a replaced function whose source differs from that of every tested version.
        hook: the row of the replaced function; ``None`` for other contracts.
    """

    contract: Contract
    status: Status
    hook: Hook | None = None

    def to_json(self) -> dict[str, Any]:
        row = {"target": self.contract.target, "status": self.status, "without": self.contract.without}
        return {**row, "use": self.contract.use, "replaced": self.hook is not None}


def private_contracts() -> list[Contract]:
    """Return the rows of all files that use private names."""
    modules = [importlib.import_module(f"hf_fsdp_plugin.{name}") for name in PRIVATE_FILES]
    return list(dict.fromkeys(row for module in modules for row in module.CONTRACTS))


def hook_rows() -> list[Hook]:
    """Return the replaced functions, each once."""
    return list({hook.target: hook for hooks in HOOKS.values() for hook in hooks}.values())


def probe_contracts() -> list[ProbedContract]:
    """Probe all contracts. Imports torch, and creates and destroys a process group."""
    probed = [ProbedContract(contract=row, status=_probe(row)) for row in private_contracts()]
    return probed + [ProbedContract(contract=hook.contract, status=probe_hook(hook), hook=hook) for hook in hook_rows()]


def probe_hook(hook: Hook) -> Status:
    """Return whether a replaced function exists, with the source of a tested version."""
    module, _, path = hook.target.partition(":")
    if file_of(module.partition(".")[0]) is None:
        return "not installed"
    current = source_hash(module, path)
    if current is None:  # a function of C++, or one that a class inherits
        paths = [path, *(path.removesuffix(hook.name) + name for name in hook.instead)]
        found = any(defines(module, each) or (module.startswith("torch") and _has(module, each, ())) for each in paths)
        return "holds" if found or hook.optional or hook.name == "__new__" else "missing"
    known = tested_hashes().get(hook.target, [])
    return "holds" if current in known else "changed"


@cache
def tested_hashes() -> dict[str, list[str]]:
    """Return target -> hashes of its source in the tested versions, written by ``scripts/update_contracts.py``."""
    file = files("hf_fsdp_plugin.integrations") / "tested_sources.json"
    hashes: dict[str, list[str]] = json.loads(file.read_text(encoding="utf-8"))
    return hashes


def _probe(row: Contract) -> Status:
    if file_of(row.library) is None:
        return "not installed"
    if _exists(row):
        return "holds"
    installed = installed_versions().get(row.library, "")
    return "not in this version" if row.since and release_of(installed) < release_of(row.since) else "missing"


def _exists(row: Contract) -> bool:
    module, _, path = row.target.partition(":")
    if row.behavior:
        return row.name in text_of(module)
    owner = path.rpartition(".")[0]
    candidates = [f"{owner}.{name}" if owner else name for name in (row.name, *row.instead)]
    # Of torch, modules that are not loaded yet (the compiler) are not imported either.
    found = module in sys.modules and any(_has(module, each, live_objects()) for each in candidates)
    return found or any(defines(module, each) for each in candidates)


def _has(module: str, path: str, subjects: Sequence[Any]) -> bool:
    """Whether a name exists: in a module or class, as a declared attribute, or on a live object of the class."""
    try:
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
    except (ImportError, AttributeError):
        return False
    if hasattr(owner, name):
        return True
    if not isinstance(owner, type):
        return False
    declared = any(name in vars(cls).get("__annotations__", {}) for cls in owner.__mro__)
    inner = (each for each in subjects if isinstance(each, owner))
    return declared or any(has_part(each, name) for each in inner)


def main() -> None:
    """Print all probed contracts as JSON, for ``hf-fsdp doctor``, which runs this in a process of its own."""
    json.dump([row.to_json() for row in probe_contracts()], sys.stdout)


if __name__ == "__main__":
    main()
