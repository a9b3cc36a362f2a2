"""The marks of a profiled rank around calls of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hf_fsdp_plugin.integrations.profiling.marking import marks
from hf_fsdp_plugin.integrations.profiling.run import profiling
from hf_fsdp_plugin.observe.profile.marks import GATHER, REDUCE, WAIT


def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with marks.phase("backward"):
        return original(*args, **kwargs)


@contextmanager
def wait() -> Iterator[None]:
    with marks(WAIT):
        yield
    profiling.after_collective()


def gather(state: Any) -> AbstractContextManager[Any]:
    return marks(f"{GATHER}{marks.names.get(id(state), '')}")


def reduction(state: Any) -> AbstractContextManager[Any]:
    return marks(f"{REDUCE}{marks.names.get(id(state), '')}")
