"""Time-outs that a script gives after `install` has started the process group."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_fsdp_plugin.integrations.accelerate.state import init_partial_state
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.torch_private.process_groups import timeout_of

pytestmark = pytest.mark.usefixtures("one_rank")
GIVEN = timedelta(seconds=77)


def give_timeout(**kwargs: Any) -> None:
    state = SimpleNamespace(initialized=True, device=None)
    init_partial_state(lambda *_, **__: None, state, **kwargs)


def test_later_timeout_is_applied_to_the_group_of_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "early_group", dist.group.WORLD)
    before = timeout_of()
    give_timeout()
    assert timeout_of() == before != GIVEN
    give_timeout(timeout=GIVEN)  # InitProcessGroupKwargs, and TrainingArguments on an accelerator
    assert timeout_of() == GIVEN
    with session.in_arguments(GIVEN * 2):  # TrainingArguments on CPU ranks
        give_timeout()
    assert timeout_of() == GIVEN * 2


def test_group_of_the_script_keeps_its_timeout() -> None:
    before = timeout_of()
    give_timeout(timeout=GIVEN)
    assert timeout_of() == before != GIVEN
