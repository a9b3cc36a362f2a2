"""What a merge will write: which tensors, under which names, as which dtype, at which place of which file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import SafetensorsFile, plan_files
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredTensor, refuse, shared_tensors
from hf_fsdp_plugin.checkpoint.merging.cast import FLOATS
from hf_fsdp_plugin.checkpoint.names import ADAPTER, HF_MODEL

OUTPUT_LAYERS = ("lm_head", "embed_out", "output_layer", "decoder", "output_projection")
"""Modules that take their weight from the embedding where weights are tied: Hugging Face files leave their name out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergePlan:
    """The output, decided.

    Attributes:
        tensors: name -> where its elements come from; tied tensors once.
        dtypes: name -> the dtype that is written.
        aliases: name that is left out -> the name that holds its tensor.
        files: what is written, byte by byte.
        adapter: whether these are the weights of an adapter, not of a model.
    """

    tensors: Mapping[str, StoredTensor]
    dtypes: Mapping[str, str]
    aliases: Mapping[str, str]
    files: tuple[SafetensorsFile, ...]
    adapter: bool

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)


def plan_merge(
    index: StoredModel, ties: Iterable[tuple[str, ...]], *, dtype: str | None, max_shard_size: int
) -> MergePlan:
    """The plan for all tensors of a checkpoint.

    Args:
        ties: groups of names that share one tensor, beyond those whose pieces lie at the same places.
        dtype: torch's name of the dtype for all floating-point tensors; ``None`` leaves each as it is.
        max_shard_size: bytes of tensors a file. Adapters are one file, since PEFT reads no more.

    Raises:
        CheckpointError: for no tensors at all, and for dtypes that safetensors does not have.
    """
    if not index.tensors:
        refuse(index.root, "holds no tensors.", "Give the folder of a checkpoint with a model in it.")
    aliases = _aliases(index, [*ties, *shared_tensors(index)])
    tensors = {name: tensor for name, tensor in index.tensors.items() if name not in aliases}
    dtypes = {
        name: dtype if dtype is not None and tensor.dtype in FLOATS else tensor.dtype
        for name, tensor in tensors.items()
    }
    adapter = is_adapter(tensors)
    files = plan_files(
        [(name, dtypes[name], tensor.shape) for name, tensor in tensors.items()],
        sys.maxsize if adapter else max_shard_size,
        stem=ADAPTER if adapter else HF_MODEL,
    )
    return MergePlan(tensors=tensors, dtypes=dtypes, aliases=aliases, files=tuple(files), adapter=adapter)


def is_adapter(names: Iterable[str]) -> bool:
    """Whether a PEFT adapter's weights are all there is: no layer of the model that it sits on."""
    names = list(names)
    return not is_wrapped_by_peft(names) and all(
        name.startswith(("base_model.model.", "prompt_embeddings")) or ".lora_" in name for name in names
    )


def is_wrapped_by_peft(names: Iterable[str]) -> bool:
    """Whether the model's own layers have the names that PEFT gives them."""
    return any(".base_layer." in name for name in names)


def likely_ties(index: StoredModel) -> list[tuple[str, str]]:
    """Pairs (embedding, output layer) that can be one tensor; whether they are, only their bytes tell."""
    return [
        (name, other)
        for other, tied in index.tensors.items()
        if is_output_layer(other) and len(tied.shape) == 2
        for name, tensor in index.tensors.items()
        if not is_output_layer(name) and (tensor.dtype, tensor.shape) == (tied.dtype, tied.shape)
    ]


def is_output_layer(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in OUTPUT_LAYERS


def _aliases(index: StoredModel, ties: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Of each group the first name stays, in the checkpoint's order, but an output layer's only if all are such."""
    aliases: dict[str, str] = {}
    order = {name: place for place, name in enumerate(index.tensors)}
    for group in ties:
        present = sorted({aliases.get(name, name) for name in group if name in order}, key=order.__getitem__)
        present.sort(key=is_output_layer)
        for name in present[1:]:
            aliases[name] = present[0]
            aliases.update({alias: present[0] for alias, kept in aliases.items() if kept == name})
    return aliases
