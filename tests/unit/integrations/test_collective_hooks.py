"""The replacements that record collectives: names of other torch versions, and functional collectives."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from torch.distributed import _functional_collectives, distributed_c10d

from hf_fsdp_plugin.integrations import collective_hooks
from hf_fsdp_plugin.integrations.hooks import HOOKS, Hook

RESOLVE = ("_resolve_group(", "_resolve_group_name(")
ONLY_IN_GRAPHS = {"isend_inplace", "irecv_inplace", "batch_p2p_ops_inplace", "_resolve_group_name"}
"""Functions that resolve a process group, but that only torch.compile calls, or that are no collectives."""


def row(*instead: str) -> Hook:
    return Hook("m:C.new", "m:f", reason="r", until="u", instead=instead)


@pytest.mark.parametrize(
    ("names", "expected"),
    [(("new", "old"), "new"), (("new",), "new"), (("old",), "old"), (("older",), "older"), ((), None)],
)
def test_first_name_that_exists_is_replaced(names: tuple[str, ...], expected: str | None) -> None:
    assert row("old", "older").name_in(SimpleNamespace(**dict.fromkeys(names, print))) == expected


def test_the_replaced_method_is_the_one_that_torch_calls() -> None:
    source = inspect.getsource(distributed_c10d)
    for hook in HOOKS["hangs"]:
        if hook.class_name == "ProcessGroup" and hook.instead:
            assert f"group.{hook.name_in(distributed_c10d.ProcessGroup)}(" in source


def test_every_functional_collective_is_recorded() -> None:
    functions = inspect.getmembers(_functional_collectives, inspect.isfunction)
    own = {name: function for name, function in functions if function.__module__ == _functional_collectives.__name__}
    resolving = {name for name, function in own.items() if any(call in inspect.getsource(function) for call in RESOLVE)}
    resolving -= {*ONLY_IN_GRAPHS, "_resolve_group"}
    assert resolving and all(collective_hooks.functional_operation(name) for name in resolving)
    for name in resolving:
        assert {"self", "inputs"} & inspect.signature(own[name]).parameters.keys()
