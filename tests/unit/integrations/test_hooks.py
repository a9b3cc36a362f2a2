"""The table of hooks: its targets exist, and install and uninstall replace and restore them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations import hooks
from hf_fsdp_plugin.integrations.hooks import HOOKS, Hook
from hf_fsdp_plugin.integrations.patching import changes

MAX_ROWS = 70
ROWS = [hook for group in HOOKS.values() for hook in group if importlib.util.find_spec(hook.module.partition(".")[0])]
"""The rows whose library is installed."""
BY_LAUNCHER = tuple(hook for group in ("calls", "hangs", "phases") for hook in HOOKS[group])
"""The rows that ``install()`` does not install."""
NATIVE = {"torch.distributed.distributed_c10d:Work.wait"}
"""Targets without a signature, because they are written in C++."""


def owner_of(hook: Hook) -> Any:
    module = importlib.import_module(hook.module)
    return getattr(module, hook.class_name) if hook.class_name else module


def current(hook: Hook) -> Any:
    """Return the target as it is now."""
    return vars(owner_of(hook))[hook.name]


def function_of(attribute: Any) -> Any:
    return getattr(attribute, "__func__", attribute)


@pytest.fixture(scope="module")
def originals() -> dict[str, Any]:
    """Return every hooked attribute as the libraries define it."""
    hfp.uninstall()
    for hook in ROWS:
        importlib.import_module(hook.module)
    hfp.install({})  # a class that gets a __new__ keeps it
    hfp.uninstall()
    return {hook.target: current(hook) for hook in existing()}


@pytest.fixture
def stock(originals: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same, for a test that installs hooks, which are removed after it."""
    hfp.uninstall()
    yield originals
    hfp.uninstall()


def existing() -> list[Hook]:
    """Return the rows whose target exists in the installed version: some have another name in older ones."""
    return [hook for hook in ROWS if hook.name in vars(owner_of(hook)) or not hook.instead]


def test_each_row_names_a_change_and_each_change_removes_rows() -> None:
    path = Path(__file__).parents[3] / "scripts" / "upstream.yaml"
    upstream = yaml.safe_load(path.read_text(encoding="utf-8"))
    titles = [title for library in upstream.values() for title in library]
    assert {hook.until for hooks in HOOKS.values() for hook in hooks} == set(titles) and len(titles) == len(set(titles))
    assert all(entry.keys() == {"problem", "change"} for library in upstream.values() for entry in library.values())


def test_hooks_do_not_become_more() -> None:
    table = yaml.safe_load(Path(hooks.__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    assert sum(map(len, table.values())) <= MAX_ROWS


@pytest.mark.parametrize("hook", ROWS, ids=lambda hook: hook.target)
def test_hook_targets_and_replacements_exist(hook: Hook, originals: dict[str, Any]) -> None:
    module, _, name = hook.replacement.partition(":")
    assert callable(getattr(importlib.import_module(f".{module}", "hf_fsdp_plugin.integrations"), name))
    assert hook.target in originals or any(hasattr(owner_of(hook), other) for other in hook.instead)
    assert hook.reason and hook.until


@pytest.mark.parametrize(
    "hook",
    [row for row in ROWS if row.name != "__new__" and not row.direct and row.target not in NATIVE],
    ids=lambda hook: hook.target,
)
def test_replacements_accept_the_keywords_of_the_target(hook: Hook, originals: dict[str, Any]) -> None:
    """A call with keyword arguments must reach the parameter of the same name."""
    if hook.target not in originals:
        pytest.skip("does not exist in the installed version")
    module, _, name = hook.replacement.partition(":")
    replacement = getattr(importlib.import_module(f".{module}", "hf_fsdp_plugin.integrations"), name)
    is_method = bool(hook.class_name) and not isinstance(originals[hook.target], staticmethod)
    # A decorator, such as torch.no_grad(), passes all arguments on.
    expected = positional(inspect.unwrap(function_of(originals[hook.target])))[is_method:]
    given = positional(replacement)[1 + is_method :]  # without the original function
    assert given == expected[: len(given)]


def positional(function: Any) -> list[str]:
    """Return the names of the parameters that may be given by position and by keyword."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def test_a_group_has_one_row_per_target() -> None:
    for group in HOOKS.values():
        assert len({hook.target for hook in group}) == len(group)


def test_uninstall_restores_identical_objects(stock: dict[str, Any]) -> None:
    environment, finders, excepthook = dict(os.environ), list(sys.meta_path), sys.excepthook
    hfp.install({"distributed_type": "FSDP", "fsdp_config": {"fsdp_cpu_ram_efficient_loading": True}})
    installed = [hook for hook in existing() if hook not in BY_LAUNCHER]
    assert all(current(hook) is not stock[hook.target] for hook in installed)
    replaced = {hook.target for hook in installed}
    assert all(current(hook) is stock[hook.target] for hook in BY_LAUNCHER if hook.target in stock.keys() - replaced)
    assert (sys.excepthook, os.environ["ACCELERATE_USE_FSDP"]) != (excepthook, environment.get("ACCELERATE_USE_FSDP"))
    hfp.uninstall()
    assert {hook.target: current(hook) for hook in existing()} == stock
    assert (dict(os.environ), sys.meta_path, sys.excepthook) == (environment, finders, excepthook)


def test_function_is_replaced_where_it_was_imported(stock: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    early, late = ModuleType("trl.early"), ModuleType("another_library.late")
    for module in (early, late):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    original = stock["trl.models.utils:prepare_fsdp"]
    early.prepare_fsdp = original  # type: ignore[attr-defined]
    changes().install("accelerate")
    late.prepare_fsdp = replacing = early.prepare_fsdp
    assert replacing.__wrapped__ is original
    hfp.uninstall()
    assert early.prepare_fsdp is late.prepare_fsdp is original


def test_installing_twice_wraps_once(stock: dict[str, Any]) -> None:
    changes().install(*HOOKS)
    first = {hook.target: current(hook) for hook in existing()}
    changes().install(*HOOKS)
    assert {hook.target: current(hook) for hook in existing()} == first
    for target, attribute in first.items():
        function = function_of(attribute)
        for _ in [hook for hook in ROWS if hook.target == target]:
            function = function_of(function.__wrapped__)
        assert function is function_of(stock[target])


def test_wrapped_replacement_calls_original_after_uninstall(stock: dict[str, Any]) -> None:
    import accelerate

    changes().install("accelerate")
    replacing = accelerate.Accelerator.end_training
    accelerate.Accelerator.end_training = wrapping = lambda self: replacing(self)  # type: ignore[method-assign]
    try:
        hfp.uninstall()
        assert accelerate.Accelerator.end_training is wrapping
        with pytest.raises(AttributeError, match="trackers"):  # the original's first access
            replacing(object())  # type: ignore[arg-type]
    finally:
        accelerate.Accelerator.end_training = stock["accelerate.accelerator:Accelerator.end_training"]  # type: ignore[method-assign]


def test_module_without_a_name_does_not_stop_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries put objects into sys.modules that are modules without this attribute."""
    nameless = ModuleType("nameless")
    for hook in ROWS:
        if not hook.class_name and hook.name in vars(importlib.import_module(hook.module)):
            setattr(nameless, hook.name, current(hook))
    del nameless.__name__
    monkeypatch.setitem(sys.modules, "nameless", nameless)
    hfp.install({})
    hfp.uninstall()
