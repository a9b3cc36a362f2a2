"""Reads the config of a model, and finds the class of Transformers that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_fsdp_plugin.problems import Origin, Problem, SpecError


def config_and_class(path_or_id: str | Path) -> tuple[Any, Any]:
    """Return a config and the class of Transformers that it names.

    The class is the one in ``architectures``, else the causal language model or base model of the config's type.

    Args:
        path_or_id: a folder with a ``config.json`` or one GGUF file, one of these files, or a hub id.

    Raises:
        SpecError: the model needs code of its own repository (FSDP-E720).
        ValueError: there is no config, it is invalid, or Transformers does not know the architecture.
    """
    import transformers

    config = _read_config(path_or_id)
    names = getattr(config, "architectures", None) or ()
    if (known := next((name for name in names if hasattr(transformers, name)), None)) is not None:
        return config, getattr(transformers, known)
    if getattr(config, "auto_map", None):
        raise _custom_code(path_or_id)
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if (usual := mapping.get(type(config), None)) is not None:
            return config, usual[0] if isinstance(usual, tuple | list) else usual
    raise ValueError(
        f"{path_or_id}: Transformers {transformers.__version__} has no model for config type "
        f"{type(config).__name__} (architectures: {', '.join(names) or 'none'}). Models with custom code are not "
        "supported here."
    )


def _read_config(path_or_id: str | Path) -> Any:
    from transformers import AutoConfig

    source, gguf = _source_of(path_or_id)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **({"gguf_file": gguf} if gguf else {}))
    except ImportError as error:  # the gguf package is optional
        raise ValueError(f"{path_or_id}: {error}") from error
    except Exception as error:  # each config class raises its own exception types
        if "trust_remote_code" in str(error):
            raise _custom_code(path_or_id) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
        advice = "Give a folder with a config.json, or a hub id that is in the cache or can be downloaded."
        if (Path(source) / "config.json").is_file():
            advice = "Correct its config.json."
        raise ValueError(f"{path_or_id}: cannot read a model config: {reason} {advice}") from error
    return config


def _source_of(path_or_id: str | Path) -> tuple[str, str]:
    """Return the folder or hub id of a config, and the name of its GGUF file; an empty name for a config.json."""
    path, source = Path(path_or_id), str(path_or_id)
    if not source.strip():
        raise ValueError("the name of the model is empty. Give a folder with a config.json, or a hub id.")
    if path.is_file():
        return str(path.parent), path.name if path.suffix == ".gguf" else ""
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            message = f"the folder contains no config.json and {len(found)} GGUF files."
            raise ValueError(f"{path}: {message} Give another folder, or one of the GGUF files.")
        return source, found[0].name
    return source, ""


def _custom_code(path_or_id: str | Path) -> SpecError:
    message = "the model is defined by Python code in its repository, which hf-fsdp does not run."
    fix = "Give a model whose class is in Transformers, or call hf_fsdp_plugin.resolve(spec, model, world_size=N) in "
    fix += "a script that builds the model with trust_remote_code=True."
    origin = Origin(source="--model", spelling="--model", text=str(path_or_id))
    return SpecError([Problem(code="FSDP-E720", message=f"{path_or_id}: {message}", fix=fix, origin=origin)])
