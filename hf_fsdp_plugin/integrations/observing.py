"""Attaches observers to this process: those that a tool has named in the environment, and those of a script."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_fsdp_plugin.backends.optimizers.parameters import after_each_step
from hf_fsdp_plugin.integrations.patching import changes
from hf_fsdp_plugin.observers import VARIABLE, Observer, observers
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec


def attach(observer: Observer) -> Callable[[], None]:
    """Call an observer from now on. Returns the function that ends that."""
    changes().install("calls", "phases")
    end_steps = after_each_step(lambda optimizer, *_: observers().notify_one(observer, "step_ended", optimizer))
    observers().add(observer)

    def detach() -> None:
        end_steps()
        observers().remove(observer)

    return detach


def attach_named(spec: FsdpSpec) -> None:
    """Call the functions that a tool has named in the environment of this rank. An error of them ends the run."""
    for name in os.environ.pop(VARIABLE, "").split():
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)(spec)


@contextmanager
def observed_run() -> Iterator[None]:
    """Tell the observers how the script that runs in the block has ended."""
    try:
        yield
    except BaseException as error:
        observers().notify("run_ended", error)
        raise
    observers().notify("run_ended", None)


def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass as a phase: the replacement of ``torch.autograd.backward``."""
    with observers().phase("backward"):
        return original(*args, **kwargs)
