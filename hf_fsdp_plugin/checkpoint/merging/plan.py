"""The plan of a merge: the names, dtypes, files and offsets of the tensors in the output."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hf_fsdp_plugin.checkpoint.formats.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import SafetensorsFile, plan_files
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredTensor, shared_tensors
from hf_fsdp_plugin.checkpoint.merging.cast import FLOATS
from hf_fsdp_plugin.checkpoint.names import ADAPTER, HF_MODEL, is_adapter

OUTPUT_LAYERS = ("lm_head", "embed_out", "output_layer", "decoder", "output_projection")
"""Names of output layers. If weights are tied, Hugging Face files contain only the name of the embedding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergePlan:
    """The contents of a merge's output.

    Attributes:
        tensors: name -> where its elements are stored; tied tensors occur once.
        dtypes: name -> the dtype that is written.
        aliases: omitted name -> the name under which its tensor is written.
        files: the layout of the output files.
        adapter: whether the tensors are only the weights of an adapter, without the base model.
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
    """Plan the merge of all tensors of a checkpoint.

    Args:
        ties: groups of names that share one tensor, in addition to those with the same pieces.
        dtype: torch's name of the dtype for all floating-point tensors; ``None`` keeps their dtypes.
        max_shard_size: maximum number of bytes of tensors per file. Adapters are one file, because PEFT reads only one.

    Raises:
        CheckpointError: there are no tensors, or safetensors does not support their dtypes.
    """
    if not index.tensors:
        refuse("FSDP-E451", index.root, "contains no tensors.", "Give the folder of a checkpoint with a model.")
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


def likely_ties(index: StoredModel) -> list[tuple[str, str]]:
    """Return pairs (embedding, output layer) that may be tied: they have the same dtype and shape."""
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
    """Return omitted name -> kept name. The first name of each group that is not an output layer is kept."""
    aliases: dict[str, str] = {}
    order = {name: place for place, name in enumerate(index.tensors)}
    for group in ties:
        present = sorted({aliases.get(name, name) for name in group if name in order}, key=order.__getitem__)
        present.sort(key=is_output_layer)
        for name in present[1:]:
            aliases[name] = present[0]
            aliases.update({alias: present[0] for alias, kept in aliases.items() if kept == name})
    return aliases
