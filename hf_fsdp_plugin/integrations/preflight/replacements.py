"""Replacements of functions in a preflight: it gets the clone, few samples, small batches and temporary folders."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.integrations.preflight.clone import Clone, find_clone, write_clone
from hf_fsdp_plugin.integrations.preflight.stages import preflight
from hf_fsdp_plugin.problems import Problem, SpecError

NUM_SAMPLES: Final = 64
"""Samples of each split that ``load_dataset`` returns."""
_CLONE_SECONDS: Final = 60.0
_PLACE_ARGUMENTS: Final = (
    "subfolder", "revision", "variant", "state_dict", "force_download", "local_files_only", "cache_dir", "token",
    "use_safetensors", "weights_only", "adapter_kwargs", "from_tf", "from_flax", "trust_remote_code", "code_revision",
    "gguf_file",
)  # fmt: skip
"""Arguments of ``from_pretrained`` that select files, which a clone does not have."""
_NOT_ON_CPU: Final = {
    "torch_compile": (False, "torch.compile"),
    "torch_compile_backend": (None, ""),
    "torch_compile_mode": (None, ""),
    "use_liger_kernel": (False, "Liger's kernels"),
    "tf32": (None, "TF32"),
}
"""Field -> (value in a preflight, what is not tested)."""
_LIMITS: Final = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 1,
}


def from_pretrained(
    original: Callable[..., Any], cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load the clone in place of the named model, also from files."""
    name = pretrained_model_name_or_path
    if not preflight.is_in_script or (name is None and kwargs.get("state_dict") is not None):
        return original(name, *args, **kwargs)
    if Path(str(name)).is_relative_to(preflight.folder):
        return original(name, *args, **kwargs)
    from transformers import PreTrainedConfig

    with preflight.stage("clone"):
        if kwargs.get("gguf_file"):
            preflight.not_tested("reading the GGUF file")
        config = kwargs.pop("config", None)
        if not isinstance(config, PreTrainedConfig):  # as the original reads it
            config, kwargs = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
        folder = _clone_folder(cls, config)
        if str(kwargs.get("attn_implementation") or "").startswith(("flash", "kernels")):
            preflight.not_tested(f"attn_implementation={kwargs['attn_implementation']}, sdpa is used instead")
            kwargs["attn_implementation"] = "sdpa"
        kwargs = {key: value for key, value in kwargs.items() if key not in _PLACE_ARGUMENTS}
        loaded = original(str(folder), *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # Libraries load the tokenizer, or the model again, by this name.
        model.name_or_path = model.config.name_or_path = str(name)
        return loaded


def from_config(original: Callable[..., Any], cls: Any, config: Any, **kwargs: Any) -> Any:
    """Build the clone of the model that a config describes."""
    if not preflight.is_in_script or preflight.record.running == "clone":
        return original(config, **kwargs)
    with preflight.stage("clone"):
        return original(_find(cls, config).config, **kwargs)


def load_dataset(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the first samples of each split."""
    loaded = original(*args, **kwargs)
    return first_samples(loaded) if preflight.is_in_script else loaded


def first_samples(data: Any, number: int = NUM_SAMPLES) -> Any:
    """Return the first samples of a data set, or of each one in a dictionary.

    Data sets of the library ``datasets`` keep their type.
    """
    if isinstance(data, dict) and not hasattr(data, "take"):
        return type(data)({name: first_samples(each, number) for name, each in data.items()})
    if hasattr(data, "take"):
        return data.take(min(number, len(data)) if hasattr(data, "__len__") else number)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data) > number:
        from torch.utils.data import Subset

        return Subset(data, range(number))
    return data


def _clone_folder(cls: Any, config: Any) -> Path:
    """Return the folder of the clone. The first rank writes it, the others wait for it."""
    key = hashlib.blake2b(f"{cls.__name__}{config.to_json_string(use_diff=False)}".encode(), digest_size=8).hexdigest()
    folder = preflight.folder / "clones" / key
    if preflight.rank == 0 and not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        write_clone(cls, _find(cls, config), folder)
    deadline = time.monotonic() + _CLONE_SECONDS
    while not folder.exists():
        if time.monotonic() > deadline:
            message = f"rank 0 did not write the clone of {cls.__name__} in {_CLONE_SECONDS:g} s."
            raise SpecError([Problem(code="FSDP-E752", message=message, fix="See the problem of rank 0.")])
        time.sleep(0.05)
    return folder


def _find(cls: Any, config: Any) -> Clone:
    clone = find_clone(cls, config, keep_vocabulary=bool(preflight.options.script))
    for problem in clone.problems:
        preflight.note(problem)
    if getattr(config, "quantization_config", None) is not None:
        preflight.not_tested("quantization that the config of the model declares")
    preflight.record.model |= {
        "name": cls.__name__, "num_params": clone.num_params, "real_num_params": clone.real_num_params
    }  # fmt: skip
    return clone


def validate_args(original: Callable[[], None], arguments: Any) -> None:
    """Let Transformers validate the values of the user, then change them for the preflight."""
    if not preflight.active:
        return original()
    if arguments.fp16:
        arguments.fp16, arguments.bf16 = False, True
        preflight.note_change("bf16 is used instead of fp16, which FSDP cannot run on the CPU")
    for name, (value, what) in _NOT_ON_CPU.items():
        if getattr(arguments, name, None):
            setattr(arguments, name, value)
            if what:
                preflight.not_tested(f"{what} ({name})")
    original()
    for name, limit in _LIMITS.items():
        value = getattr(arguments, name, None)
        if isinstance(value, int) and value > limit:
            setattr(arguments, name, limit)
            preflight.note_change(f"{name} is {limit} instead of {value}")
    arguments.output_dir = str(preflight.folder / "out")
    arguments.report_to = []
    arguments.disable_tqdm = True
    if arguments.push_to_hub:
        arguments.push_to_hub = False
        preflight.not_tested("pushes to the Hub")
    return None
