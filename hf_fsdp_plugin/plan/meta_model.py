"""Builds the model that a config describes, on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.problems import Origin, Problem, SpecError


def meta_model(path_or_id: str | Path) -> nn.Module:
    """Return the model that a config describes. Its parameters are on ``meta``, and are tied as in a loaded model.

    Args:
        path_or_id: a folder with a ``config.json`` or one GGUF file, one of these files, or a hub id.

    Raises:
        SpecError: the model needs code of its own repository (FSDP-E720), or the config names no model (FSDP-E721).
        ValueError: there is no config, it is invalid, or Transformers does not know the architecture.
    """
    config, model_class = config_and_class(path_or_id)
    with _quiet(), default_dtype(config), torch.device("meta"):
        try:
            model = model_class(config)
        except Exception as error:
            raise ValueError(
                f"{path_or_id}: {model_class.__name__} cannot be built from its config: {error}"
            ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path_or_id}: architectures is {model_class.__name__}, which is not a model class.")
    return model


_SIZES = ("num_hidden_layers", "hidden_size")
"""Sizes of a config that are at least 1 in every model. Classes of Transformers accept others, and fail later."""


def _config(path_or_id: str | Path) -> Any:
    from transformers import AutoConfig

    path = Path(path_or_id)
    options: dict[str, Any] = {}
    source = str(path_or_id)
    if not source.strip():
        raise ValueError("the name of the model is empty. Give a folder with a config.json, or a hub id.")
    if path.is_file() and path.suffix == ".gguf":
        source, options["gguf_file"] = str(path.parent), path.name
    elif path.is_file() and path.name == "config.json":
        source = str(path.parent)
    elif path.is_file():
        raise ValueError(f"{path}: not a config.json or GGUF file. Give a folder with one of them, or a hub id.")
    elif path.is_dir() and not (path / "config.json").is_file():
        options["gguf_file"] = _only_gguf(path)
    elif not path.is_dir() and (path.is_absolute() or source.startswith((".", "~"))):
        raise ValueError(f"{path}: no such file or folder. Correct the path, or give a hub id.")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    except ImportError as error:  # the gguf package is optional
        raise ValueError(f"{path_or_id}: {error}") from error
    except Exception as error:  # each config class raises its own exception types
        if "trust_remote_code" in str(error):
            raise SpecError([_custom_code(path_or_id)]) from error
        if "model_type" in str(error) and "Unrecognized model" in str(error):
            raise SpecError([_no_architecture(path_or_id)]) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
        advice = "Give a folder with a config.json, or a hub id that is in the cache or can be downloaded."
        if (Path(source) / "config.json").is_file():
            advice = "Correct its config.json."
        raise ValueError(f"{path_or_id}: cannot read a model config: {reason} {advice}") from error
    for name in _SIZES:
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            message = f"{path_or_id}: the model cannot be built from its config: {name}={size} is less than 1."
            raise ValueError(f"{message} Correct its config.json.")
    return config


def _check_custom_code(config: Any, path_or_id: str | Path) -> None:
    """Raise ``SpecError`` if the model class is code in the model's own repository, which is not run here."""
    import transformers

    names = getattr(config, "architectures", None) or ()
    if getattr(config, "auto_map", None) and not any(hasattr(transformers, name) for name in names):
        raise SpecError([_custom_code(path_or_id)])


def _custom_code(path_or_id: str | Path) -> Problem:
    return Problem(
        code="FSDP-E720",
        message=f"{path_or_id}: the model is defined by Python code in its repository, which hf-fsdp does not run.",
        fix="Give a model whose class is in Transformers, or call hf_fsdp_plugin.resolve(spec, model, world_size=N) in "
        "a script that builds the model with trust_remote_code=True.",
        origin=Origin(source="--model", spelling="--model", text=str(path_or_id)),
    )


def _no_architecture(path_or_id: str | Path) -> Problem:
    return Problem(
        code="FSDP-E721",
        message=f"{path_or_id}: the config names no architecture: it has neither `architectures` nor a model_type that "
        "Transformers knows.",
        fix='Add a model_type, such as "llama", or give the folder of another model.',
        origin=Origin(source="--model", spelling="--model", text=str(path_or_id)),
    )


def _only_gguf(folder: Path) -> str:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0].name
    if files:
        raise ValueError(f"{folder}: the folder contains {len(files)} GGUF files. Name one, such as {files[0]}.")
    raise ValueError(f"{folder}: the folder contains neither a config.json nor a GGUF file. Give another folder.")


def config_and_class(path_or_id: str | Path) -> tuple[Any, Any]:
    """Return a config and the class of Transformers that it names. Raises ``ValueError`` as :func:`meta_model` does."""
    config = _config(path_or_id)
    _check_custom_code(config, path_or_id)
    return config, _class_of_config(config, path_or_id)


def model_class_of(path_or_id: str | Path) -> Any:
    """Return the class of Transformers that a config names. Raises ``ValueError`` as :func:`meta_model` does."""
    return config_and_class(path_or_id)[1]


def _class_of_config(config: Any, path_or_id: str | Path) -> Any:
    """Return the class in ``architectures``, else the causal language model or base model of the config's type."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        found = mapping.get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple | list) else found
    named = ", ".join(getattr(config, "architectures", None) or ()) or "none"
    raise ValueError(
        f"{path_or_id}: Transformers {transformers.__version__} has no model for config type "
        f"{type(config).__name__} (architectures: {named}). Models with custom code are not supported here."
    )


@contextmanager
def default_dtype(config: Any) -> Iterator[None]:
    """Make the config's dtype the default dtype, for submodels too, as ``from_pretrained`` does."""
    dtype, before = getattr(config, "dtype", None), torch.get_default_dtype()
    for name in getattr(config, "sub_configs", ()):
        if (sub_config := getattr(config, name, None)) is not None:
            sub_config.dtype = dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings about generation settings, which do not affect a plan."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
