"""Folds a LoRA adapter into the weights of its base model, one layer at a time, by PEFT's own code.

The model with its adapter is built on the meta device, and the weights of the adapter are in memory. A base layer is
read when it is written, and PEFT merges a copy of it. So the result is that of ``PeftModel.merge_and_unload``, but in
the memory of one layer.
"""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from hf_fsdp_plugin.checkpoint.errors import raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.file_io import InputFiles
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredTensor
from hf_fsdp_plugin.checkpoint.names import ADAPTER_CONFIG, is_adapter
from hf_fsdp_plugin.integrations.peft import adapted_layers, merge_layer
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.tools.loaded_weights import computed, loaded_groups, read_tensor, why_not_whole, without_root
from hf_fsdp_plugin.tools.merge.copying import same_elements
from hf_fsdp_plugin.tools.merge.merge_plan import FLOATS
from hf_fsdp_plugin.tools.meta_model import meta_model
from hf_fsdp_plugin.tools.verify.comparison import difference_problems

_PREFIX: Final = "base_model.model."
_ADAPTER: Final = "default"
_NAMED: Final = re.compile(r"(\.(?:lora_\w+|modules_to_save|trainable_tokens_delta))\.\w+")
"""The part of a name in a PEFT model that ends with the name of the adapter, which PEFT's own files do not contain."""
_OF_QUANTIZATION: Final = re.compile(r"\.weight\.\w+$")
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of ``init_lora_weights`` with which PEFT also changes the weights of the base model."""
_GIVE_BASE: Final = "Give the model from which the adapter was trained with --fold-adapter."
_USE_PEFT: Final = "Load the adapter with PEFT, and call merge_and_unload()."


class AdapterFold:
    """A LoRA adapter, its base model on the meta device, and what the model consists of after the merge.

    Attributes:
        num_changed: the number of tensors that the adapter changes or replaces.
        is_untied: whether the adapter has trained one of several weights that are tied in the base model.
    """

    num_changed: int
    is_untied: bool

    def __init__(self, checkpoint: Path, stored: StoredModel, base: StoredModel, folder: Path, config: Path) -> None:
        """Find the tensors of the adapter, which :meth:`read` reads.

        Args:
            checkpoint: the folder of an adapter, or a checkpoint of a run that trains one.
            stored: its tensors.
            base: the tensors of the base model.
            folder: the folder with the ``config.json`` of the base model.
            config: the folder with the ``adapter_config.json``.

        Raises:
            CheckpointError: the adapter is not LoRA, or is of another base model.
            SpecError: PEFT is not installed, or the base model has code of its own.
        """
        self._checkpoint = checkpoint
        if reason := why_not_whole(base, folder):
            refuse("FSDP-E441", folder, f"{reason}.", "Give the folder of the whole base model in 16 or 32 bits.")
        model: Any = meta_model(folder)
        self._groups = loaded_groups(base, model)
        self._base = {name: tensor for group in self._groups for name, tensor in group.targets.items()}
        names: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        tied: dict[int, list[str]] = {}
        for name, tensor in names.items():
            tied.setdefault(id(tensor), []).append(name)
        # Of tied names, the one in the files of the base model.
        owners = {key: next((name for name in tie if name in self._base), tie[0]) for key, tie in tied.items()}
        self._kept = {name: owners[id(tensor)] for name, tensor in names.items()}
        self._model = _with_adapter(model, config)
        self._layers: dict[str, Any] = dict(adapted_layers(model))
        state = self._model.state_dict(keep_vars=True)
        # The modules of PEFT hold the tensors of the base model under other names.
        self._base_of = {name: owners[id(held)] for name, held in state.items() if id(held) in owners}
        self._find_tensors(stored)
        self._merged: tuple[tuple[str, ...], dict[str, torch.Tensor]] = ((), {})

    def _find_tensors(self, stored: StoredModel) -> None:
        """Find the tensors of the adapter and those of the frozen base model in the checkpoint."""
        from peft import get_peft_model_state_dict

        state = self._model.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = get_peft_model_state_dict(self._model, state, _ADAPTER, save_embedding_layers=False)
        names = {*state, *saved}
        stored = without_root(stored, names | {name.removeprefix(_PREFIX) for name in names})
        places = {id(tensor): name for name, tensor in state.items()}
        place_of = {name: places[id(tensor)] for name, tensor in saved.items()}
        trained, only_adapter = set(place_of.values()), is_adapter(stored.tensors)
        prefix = "" if any(name.startswith(_PREFIX) for name in stored.tensors) else _PREFIX
        self._trained: dict[str, StoredTensor] = {}
        self._frozen: dict[str, StoredTensor] = {}
        for name, tensor in stored.tensors.items():
            key = prefix + name
            place = place_of.get(key) or _NAMED.sub(rf"\1.{_ADAPTER}", key)
            if place in self._trained:
                fix = "Save one of its adapters with PEFT, and fold its folder."
                refuse("FSDP-E441", self._checkpoint, f"has several adapters: {name!r} is in each of them.", fix)
            is_frozen = place in self._base_of and place not in trained and not only_adapter
            if not _OF_QUANTIZATION.search(place) or place in state:
                (self._frozen if is_frozen else self._trained)[place] = tensor
        compared = {**self._trained, **{n: tensor for n, tensor in self._frozen.items() if tensor.dtype in FLOATS}}
        other = [n for n, tensor in compared.items() if n in state and tensor.shape != tuple(state[n].shape)]
        missing = [name for name in trained if name not in self._trained]
        unexpected = [name for name in self._trained if name not in state]
        what = f"the base model with the adapter of {ADAPTER_CONFIG}"
        problems = difference_problems(self._checkpoint, missing, unexpected, other, len(trained), what, _GIVE_BASE)
        raise_if_any(problems)

    def tensors(self, base: StoredModel) -> dict[str, StoredTensor]:
        """Return the tensors of the merged model, by the names in the files of the base model. Sets the attributes.

        They read what :meth:`read` has read. Names that share a tensor after the merge are one.
        """
        changes: dict[str, list[str]] = {name: [] for name in map(self._base_of.get, self._trained) if name}
        replaced: dict[str, tuple[str, Any]] = {}  # name -> the layer that is replaced, and the identity of its tensor
        for layer, module in self._layers.items():
            if (saved := _module_to_save(module)) is not None:
                tensors = saved.state_dict(keep_vars=True)
                replaced |= {f"{layer}.{name}": (layer, id(tensor)) for name, tensor in tensors.items()}
            else:
                for place, name in self._base_of.items():
                    if place.startswith(f"{_PREFIX}{layer}.") and layer not in changes.setdefault(name, []):
                        changes[name].append(layer)
        outputs: dict[str, StoredTensor] = {}
        owners: dict[str, set[Any]] = {}
        for name in sorted(self._kept, key=lambda name: name != self._kept[name]):
            kept = self._kept[name]
            if kept not in self._base:  # a buffer that is not in the files
                continue
            layer, owner = replaced.get(name, ("", kept))
            if owner in owners.setdefault(kept, set()):
                continue
            owners[kept].add(owner)
            outputs[name] = like = self._base[kept]
            if layer:
                outputs[name] = computed(name, like.dtype, like.shape, partial(self._saved, layer, name, like.dtype))
            elif kept in changes or name != kept:
                layers = tuple(changes.get(kept, ()))
                outputs[name] = computed(name, like.dtype, like.shape, partial(self._folded, kept, layers))
        self.is_untied = any(len(each) > 1 for each in owners.values())
        self.num_changed = sum(name in changes or name in replaced for name in outputs)
        written = dict(base.tensors)
        for group in self._groups:
            if all(outputs.get(name) is tensor for name, tensor in group.targets.items()):
                continue  # written as it is stored, under its names in the files
            changed = {name: outputs[name] for name in group.targets if name in outputs}
            if len(group.sources) == len(group.targets) == len(changed) == 1:  # it keeps its name in the files
                (written[group.sources[0]],) = changed.values()
                continue
            for source in group.sources:
                del written[source]
            written |= changed
        in_groups = {name for group in self._groups for name in group.targets}
        return written | {name: tensor for name, tensor in outputs.items() if name not in in_groups}

    def read(self, files: InputFiles, base_files: InputFiles) -> None:
        """Read the weights of the adapter, and compare the frozen weights of a checkpoint with the base model.

        Args:
            files: those of the checkpoint.
            base_files: those of the base model.

        Raises:
            CheckpointError: the frozen weights differ.
        """
        trained, frozen = self._trained, self._frozen
        self._trained, self._frozen = {}, {}  # they keep the files of the checkpoint open
        values = {name: read_tensor(files, tensor) for name, tensor in trained.items()}
        self._own = {self._base_of[name]: values.pop(name) for name in list(values) if name in self._base_of}
        for name, value in values.items():
            if ".lora_" in name and value.dtype in (torch.float16, torch.bfloat16):
                values[name] = value.float()  # as PEFT does (autocast_adapter_dtype)
        self._model.load_state_dict(values, strict=False, assign=True)
        pairs = [(self._base_of[name], tensor) for name, tensor in frozen.items() if tensor.dtype in FLOATS]
        held = [(name, tensor) for name, tensor in pairs if name in self._base]
        if other := [n for n, tensor in held if not same_elements(base_files, self._base[n], files, tensor)]:
            message = f"has other values than the base model in {format_names(other, 3)}: the run has trained these "
            message += "weights too, or its base model is another one."
            refuse("FSDP-E442", self._checkpoint, message, f"{_GIVE_BASE} If it is that, merge without --fold-adapter.")

    def _read(self, kept: str, files: InputFiles) -> torch.Tensor:
        """Return a weight of the base model, or the one of the checkpoint if it is trained (biases)."""
        like = self._base[kept]
        own = self._own.get(kept)
        return read_tensor(files, like) if own is None else own.to(getattr(torch, like.dtype), copy=True)

    def _saved(self, layer: str, name: str, dtype: str, _files: InputFiles) -> torch.Tensor:
        """Return a tensor of a module that is trained as a whole (``modules_to_save``)."""
        saved = _module_to_save(self._layers[layer])
        assert saved is not None
        return saved.state_dict()[name.removeprefix(f"{layer}.")].to(getattr(torch, dtype))

    def _folded(self, kept: str, layers: tuple[str, ...], files: InputFiles) -> torch.Tensor:
        """Return a weight of the base model after the merge of these layers; several can have a tied weight."""
        if layers and self._merged[0] == layers:  # another tensor of the same layer was written before
            return self._merged[1][kept]
        value = self._read(kept, files)
        for layer in layers:
            prefix = f"{_PREFIX}{layer}."
            places = {place: name for place, name in self._base_of.items() if place.startswith(prefix)}
            inputs = {name: value if name == kept else self._read(name, files) for name in set(places.values())}
            module = copy.deepcopy(self._layers[layer])
            state = {place.removeprefix(prefix): inputs[name] for place, name in places.items()}
            module.load_state_dict(state, strict=False, assign=True)
            merged = {
                self._kept[f"{layer}.{name}"]: held
                for name, held in merge_layer(module, [_ADAPTER]).state_dict().items()
            }
            value = merged[kept]
            if len(layers) == 1:
                self._merged = (layers, merged)
        return value


def _with_adapter(model: Any, folder: Path) -> Any:
    """Return the PEFT model with the adapter of a config, on the meta device. It is merged once, to see that it can be.

    Raises:
        CheckpointError: it is not LoRA, does not fit the model, or PEFT cannot merge it.
        SpecError: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, PeftConfig, get_peft_model
    except ImportError as error:
        message = "--fold-adapter needs the package peft, which is not installed."
        raise SpecError([Problem(code="FSDP-E727", message=message, fix="Run pip install peft.")]) from error
    place = folder / ADAPTER_CONFIG
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config: Any = PeftConfig.from_pretrained(str(folder))
            if not isinstance(config, LoraConfig):
                raise ValueError(f"its type is {getattr(config.peft_type, 'value', config.peft_type)}, not LORA")
            if str(config.init_lora_weights).lower().startswith(_CHANGES_BASE):
                raise ValueError(f"init_lora_weights={config.init_lora_weights} changes the weights of the base model")
            if config.layer_replication:
                raise ValueError("layer_replication adds layers to the base model")
            config.task_type = None  # the class of PeftModel, which adds methods only
            adapted = get_peft_model(model, config, _ADAPTER)  # low_cpu_mem_usage would untie embeddings
            for _, module in adapted_layers(model):
                merge_layer(copy.deepcopy(module), [_ADAPTER])
    except Exception as error:  # PEFT raises exceptions of many types
        reason = " ".join(str(error).split()).removesuffix(".")
        refuse("FSDP-E441", place, f"cannot be folded into {type(model).__name__}: {reason}.", _USE_PEFT)
    return adapted


def _module_to_save(layer: Any) -> nn.Module | None:
    """Return the module of ``modules_to_save`` in a layer of PEFT; ``None`` for other layers."""
    saved: nn.ModuleDict | None = getattr(layer, "modules_to_save", None)
    return None if saved is None else saved[_ADAPTER]
