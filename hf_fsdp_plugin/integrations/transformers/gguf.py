"""GGUF files with RAM-efficient loading: one rank of a machine dequantizes them, and the others map the result.

For most architectures, Transformers dequantizes all tensors of such a file into a dictionary. Here the dictionary moves
each tensor to shared memory when the next one is added, so private memory grows by a few times the largest tensor. For
the others it converts tensor by tensor (:mod:`hf_fsdp_plugin.integrations.transformers.loading`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from hf_fsdp_plugin.backends.shared_weights import Publication, Received, exchange
from hf_fsdp_plugin.integrations.environment import loads_ram_efficiently

_PARTS = 2
"""Transformers fills the tensor of fused experts in place: it looks it up for the gates, and for the projections."""


class MovedTensors(dict[str, torch.Tensor]):
    """Tensors by name. Tensors are moved to shared memory when another one is added, unless a part is missing."""

    def __init__(self, publication: Publication) -> None:
        super().__init__()
        self._publication = publication
        self._reads: dict[str, int] = {}

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        for other in [other for other, count in self._reads.items() if count % _PARTS == 0]:
            super().__setitem__(other, self._publication.move(super().__getitem__(other)))
            del self._reads[other]
        super().__setitem__(name, tensor)
        self._reads[name] = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._reads:
            self._reads[name] += 1
        return super().__getitem__(name)


_moved: ContextVar[MovedTensors | None] = ContextVar("_moved", default=None)
"""The tensors of the file that this process is reading for the other ranks of its machine."""


def load_gguf_checkpoint(
    original: Callable[..., dict[str, Any]],
    gguf_checkpoint_path: str,
    return_tensors: bool = False,
    model_to_load: Any = None,
    torch_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Return the content of a GGUF file. Its tensors are in memory that the ranks of a machine share."""
    arguments = (gguf_checkpoint_path, return_tensors, model_to_load, torch_dtype)
    if not return_tensors or not loads_ram_efficiently():
        return original(*arguments)
    shared = exchange.join(_key(gguf_checkpoint_path, model_to_load, torch_dtype))
    if isinstance(shared, Received):
        return {**original(gguf_checkpoint_path), "tensors": shared.tensors([])}
    if shared is None:
        return original(*arguments)
    token = _moved.set(MovedTensors(shared))
    try:
        content = original(*arguments)
        content["tensors"] = dict(content["tensors"])
    except BaseException:
        shared.close()
        raise
    finally:
        _moved.reset(token)
    shared.publish(content["tensors"], [], None)
    return content


def _key(path: str, model: Any, dtype: torch.dtype | None) -> str:
    """Return a digest of everything that the tensors depend on."""
    real, status = os.path.realpath(path), os.stat(path)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    names = [[name, list(tensor.shape)] for name, tensor in model.state_dict().items()]
    content = [real, status.st_size, status.st_mtime_ns, kind, model.config.to_json_string(use_diff=False), names]
    return hashlib.sha256(json.dumps(["gguf", *content, str(dtype)]).encode()).hexdigest()


def get_gguf_hf_weights_map(
    original: Callable[..., dict[str, str]], hf_model: Any, processor: Any, *args: Any, **kwargs: Any
) -> dict[str, str]:
    """Return the names of the tensors. From now on, the processor adds tensors to those that are moved."""
    moved = _moved.get()
    if moved is not None and "process" not in vars(processor):  # Transformers calls the function for each submodule
        process = processor.process

        def process_into_moved(*args: Any, parsed_parameters: dict[str, Any], **kwargs: Any) -> Any:
            parsed_parameters["tensors"] = moved
            return process(*args, parsed_parameters=parsed_parameters, **kwargs)

        processor.process = process_into_moved
    return original(hf_model, processor, *args, **kwargs)
