"""The mesh with which ``from_pretrained`` divides a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.integrations.transformers import loading
from hf_fsdp_plugin.plan import resolve
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.spec.load import load_spec


@dataclass
class Mesh:
    mesh_dim_names: tuple[str, ...]
    shape: tuple[int, ...]


def received(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], **arguments: Any) -> dict[str, Any]:
    """Return the arguments with which Transformers is called, for a config with an FSDP2 mesh on eight ranks."""
    config = {
        "distributed_type": "FSDP",
        "use_cpu": True,
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()},
    }
    monkeypatch.setattr(session(), "ambient", load_spec(config, environ={}))
    monkeypatch.setattr(session(), "trainer_spec", None)
    monkeypatch.setattr(session(), "uses_fsdp", True)
    monkeypatch.setenv("WORLD_SIZE", "8")
    return loading.from_pretrained_on_axes(lambda *args, **kwargs: kwargs, object, **arguments)


@pytest.mark.parametrize(
    ("installed", "sizes", "needed"),
    [
        ("5.18.1", {"tp_size": 2}, "5.19"),
        ("5.19.0", {"ep_size": 2}, "5.20"),
        ("5.18.1", {"tp_size": 2, "ep_size": 2}, "5.20"),
        ("5.22.0", {"tp_size": 2, "dp_replicate_size": 2, "dp_shard_size": 2}, "5.23"),
    ],
)
def test_mesh_that_transformers_cannot_make_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str, sizes: dict[str, int], needed: str
) -> None:
    monkeypatch.setattr(resolve, "version_of", lambda library: installed)
    with pytest.raises(SpecError, match=rf"Transformers {installed} cannot make.*Install transformers>={needed}\. "):
        received(monkeypatch, sizes)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tp_plan": {"layers.*.q_proj": "colwise"}, "device_mesh": Mesh(("dp_shard", "tp"), (4, 2))},
        {"tp_plan": "auto", "device_mesh": Mesh(("tp",), (8,))},
        {"tp_plan": "auto", "tp_size": 4, "device_mesh": Mesh(("dp_shard", "tp"), (4, 2))},
        {"tp_plan": "auto"},
    ],
)
def test_other_arguments_of_a_script_are_kept(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> None:
    assert received(monkeypatch, {}, **arguments) == arguments
