"""A process without FSDP settings behaves as without ``install()``."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.sharding import shard
from hf_fsdp_plugin.integrations import patching
from hf_fsdp_plugin.integrations.hooks import HOOKS, Hook
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.state import process

INSTALLED = [
    hook
    for group in ("accelerate", "transformers", "loading")
    for hook in HOOKS[group]  # type: ignore[index]
    if importlib.util.find_spec(hook.module.partition(".")[0])
]
PASSIVE = [hook for hook in INSTALLED if not hook.always]


@pytest.mark.parametrize("hook", PASSIVE, ids=lambda hook: hook.target)
def test_replaced_function_calls_the_original_alone(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same arguments, the same result, and nothing else of this package, which costs less than 2 µs."""
    module = importlib.import_module(hook.module)
    owner = getattr(module, hook.class_name) if hook.class_name else module
    if not hasattr(owner, hook.name):
        pytest.skip("does not exist in the installed version")
    received: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> str:
        received.append((args, kwargs))
        return "result"

    hfp.uninstall()
    monkeypatch.setattr(owner, hook.name, original)
    changes = patching.ProcessChanges()
    changes._replace(hook, module)
    session().uses_fsdp = False
    monkeypatch.delitem(process._parts, shard._ShardedModels, raising=False)  # other tests may keep models
    assert not shard.sharded_models()
    calls: list[str] = []
    try:
        function = vars(owner)[hook.name]
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
        try:
            result = function(1, 2, key=3)
        finally:
            sys.setprofile(None)
    finally:
        changes.remove()
    assert (result, received) == ("result", [((1, 2), {"key": 3})])
    assert calls == ["replacing", "get", "is_active", "get", "__len__", "original"]


def test_settings_of_fsdp_activate_the_replacements() -> None:
    hfp.install({})
    try:
        assert not session().uses_fsdp
        hfp.install({"distributed_type": "FSDP", "fsdp_config": {}})
        assert session().uses_fsdp
    finally:
        hfp.uninstall()
    assert not session().uses_fsdp
