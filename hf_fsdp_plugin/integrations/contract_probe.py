"""Probes every contract with other libraries on the installed versions.

The table of all contracts consists of the rows ``CONTRACTS`` of the files that use private names, and of the replaced
functions (:mod:`hf_fsdp_plugin.integrations.hooks`). torch is probed on a tiny sharded model of each FSDP version, in a
process group without communication; the other libraries by their source files, without importing them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

from hf_fsdp_plugin.contracts import Contract
from hf_fsdp_plugin.integrations.hook import Hook
from hf_fsdp_plugin.integrations.hooks import HOOKS
from hf_fsdp_plugin.integrations.library_sources import defines, file_of, source_hash, text_of
from hf_fsdp_plugin.torch_private.fake import fake_process_group
from hf_fsdp_plugin.torch_private.functions import checkpoint_wrapper

Status = Literal["holds", "changed", "missing", "not installed"]

PRIVATE_FILES: Final = (
    *(f"torch_private.{name}" for name in ("fake", "fsdp1", "fsdp2", "functions", "grad_scaler", "modules")),
    *(f"torch_private.{name}" for name in ("process_groups", "tracing", "unit_names")),
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
    module, _, path = row.target.partition(":")
    if file_of(row.library) is None:
        return "not installed"
    if row.behavior:
        return "holds" if row.name in text_of(module) else "missing"
    owner = path.rpartition(".")[0]
    candidates = [f"{owner}.{name}" if owner else name for name in (row.name, *row.instead)]
    # Of torch, modules that are not loaded yet (the compiler) are not imported either.
    found = module in sys.modules and any(_has(module, each, live_objects()) for each in candidates)
    return "holds" if found or any(defines(module, each) for each in candidates) else "missing"


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
    return declared or any(hasattr(each, name) or name in vars(each).get("_modules", {}) for each in inner)


@cache
def live_objects() -> tuple[Any, ...]:
    """Return torch's objects of a tiny model of each FSDP version, after a training step without communication."""
    with fake_process_group(2):
        return tuple(_live_objects())


def _live_objects() -> Iterator[Any]:
    for objects in (_fsdp2_objects, _fsdp1_objects, _other_objects):
        # What a newer torch lacks is missing among the objects, and so in the table.
        with contextlib.suppress(AttributeError, ImportError, TypeError, LookupError):
            yield from objects()


def _fsdp2_objects() -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    yield from (model, model[0], next(iter(model.parameters())), _step(model))
    state: Any = model[0]._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    yield from (state, state._state_ctx, groups[0], groups[0].mesh_info, *groups[0].fsdp_params)
    yield from (item._module_info for item in groups[0].fsdp_params)


def _fsdp1_objects() -> Iterator[Any]:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 4)), device_id=torch.device("cpu"), mixed_precision=precision, use_orig_params=True
    )
    yield from (model, _step(model))
    handle: Any = model._handle
    yield from (handle, handle.flat_param, *handle.flat_param._param_infos, *handle.flat_param._shard_param_infos)


def _other_objects() -> Iterator[Any]:
    yield torch.ops.aten.mm.default
    yield checkpoint_wrapper(nn.Linear(1, 1))


def _step(model: nn.Module) -> Any:
    """Run a forward and a backward, and return a node of the graph."""
    output = model(torch.zeros(2, 4)).float().sum()
    output.backward()
    return output.grad_fn


def main() -> None:
    """Print all probed contracts as JSON, for ``hf-fsdp doctor``, which runs this in a process of its own."""
    json.dump([row.to_json() for row in probe_contracts()], sys.stdout)


if __name__ == "__main__":
    main()
