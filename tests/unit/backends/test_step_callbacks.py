"""Functions that are called after each optimizer step, and may be ended in one."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_fsdp_plugin.backends.optimizers.parameters import after_each_step


class Owner:
    """An object in a reference cycle, as a model that is not used any more."""

    def __init__(self) -> None:
        self.me = self


def test_callbacks_end_in_a_step_and_by_the_collector() -> None:
    called: list[str] = []
    owner = Owner()
    weakref.finalize(owner, after_each_step(lambda *_: called.append("of owner")))
    end_first = after_each_step(lambda *_: (called.append("first"), end_first()))
    end_second = after_each_step(lambda *_: (called.append("second"), gc.collect()))
    later = register_optimizer_step_post_hook(lambda *_: called.append("hook of torch"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    optimizer.step()
    del owner
    optimizer.step()
    optimizer.step()
    end_second()
    later.remove()
    optimizer.step()
    assert called == [
        "of owner", "first", "second", "hook of torch", "of owner", "second", "hook of torch", "second", "hook of torch"
    ]  # fmt: skip
