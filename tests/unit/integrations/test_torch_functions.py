"""What the hooks of torch's functions read, beside the calls on real ranks in tests/gloo/test_user_code.py."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.integrations import torch_functions


def test_models_are_searched_only_if_a_tensor_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr(torch_functions, "sharded_models", lambda: [nn.Linear(2, 2)])
    monkeypatch.setattr(torch_functions, "flat_storages", lambda: searched.append("searched") or set())
    original = torch.save
    monkeypatch.setattr(torch, "save", lambda *args, **kwargs: torch_functions.torch_save(original, *args, **kwargs))

    # pickle calls torch.save for the memory of each tensor that ranks send each other.
    pickle.dumps([torch.ones(2) for _ in range(20)])
    assert not searched

    torch.save({"weight": torch.ones(2)}, "/dev/null")
    assert searched == ["searched"]
