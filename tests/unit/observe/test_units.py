"""The units and parameters of the live model, compared with the plan's in both directions; bytes of storages."""

from typing import Any

import pytest
import torch

from hf_fsdp_plugin.observe.units import StructureComparison, compare_structure, storage_bytes
from tests.unit.observe.live_models import make_model, make_plan, make_unit


def compare(**changed: Any) -> StructureComparison:
    """Compare a model whose units are as planned, except those that are given by name of the module."""
    model = make_model()
    units = []
    for name, module in (("0", model[0]), ("1", model[1]), ("", model[2])):
        own = changed.get(f"unit_{name}", {})
        places = tuple((module, attribute, True) for attribute, _ in module.named_parameters())
        facts = {"places": places, "parameter_ids": frozenset(map(id, module.parameters())), **own}
        if facts.pop("exists", True):
            units.append(make_unit(name, **facts))
    return compare_structure(model, units, make_plan())


def test_planned_units_are_equal() -> None:
    assert compare() == StructureComparison()


def test_missing_unit_leaves_its_parameters_unsharded() -> None:
    found = compare(unit_0={"exists": False})
    assert found.unsharded == ("0.bias", "0.weight")
    assert "1 planned unit is not in the live model: 0" in found.reason


@pytest.mark.parametrize("unit", ["unit_0", "unit_"])
def test_parameters_without_unit_are_unsharded(unit: str) -> None:
    found = compare(**{unit: {"places": (), "parameter_ids": frozenset()}})
    assert len(found.unsharded) == 2 and found.reason.startswith("2 parameters are not sharded: ")


def test_shared_storage_is_counted_once() -> None:
    tensor = torch.ones(8)
    assert storage_bytes([tensor, tensor[:2], torch.ones(2, device="meta")]) == 32
    assert storage_bytes([tensor, torch.ones(1)], excluding=[tensor]) == 4


def test_quantized_state_counts_the_tensors_inside():
    quantized = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit.zeros((64, 64), block_size=64)
    codes, scales, table = 64 * 64, 64 * 4, 256 * 4
    assert storage_bytes([quantized]) == codes + scales + table
