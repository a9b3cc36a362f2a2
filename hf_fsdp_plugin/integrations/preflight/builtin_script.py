"""The built-in training script of a preflight, for ``check --run CONFIG --model MODEL``: a Trainer with made data."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
from pathlib import Path
from typing import Any, Final

import yaml
from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_fsdp_plugin.integrations.preflight.made_data import MadeData, collate
from hf_fsdp_plugin.integrations.preflight.replacements import not_tested
from hf_fsdp_plugin.integrations.preflight.run import preflight
from hf_fsdp_plugin.integrations.preflight.stages import Options
from hf_fsdp_plugin.plan.meta_model import config_and_class
from hf_fsdp_plugin.problems import Origin, Problem, SpecError

_NUM_SAMPLES: Final = 100_000
"""Samples that the data set claims to have, so that an epoch is as long as in a real training."""
_NUM_EVALUATED: Final = 8
_DEFAULTS: Final = {"eval_strategy": "steps"}


def main() -> None:
    options = preflight.options
    arguments = parse_arguments(options)
    try:
        config, model_class = config_and_class(options.model)
    except (ValueError, OSError) as error:
        origin = Origin(source="--model", spelling="--model", text=options.model)
        fix = "Give a directory with a config.json, or the name of a model in the local cache."
        message = " ".join(str(error).split())
        raise SpecError([Problem(code="FSDP-E709", message=message, fix=fix, origin=origin)]) from error
    kwargs = {"gguf_file": options.model} if options.model.endswith(".gguf") else {}
    model = model_class.from_pretrained(options.model, config=config, **kwargs)
    try:
        data = MadeData(model, _NUM_SAMPLES)
        evaluated = MadeData(model, _NUM_EVALUATED)
    except ValueError as error:
        fix = "Pass your training script instead of --model."
        raise SpecError([Problem(code="FSDP-E752", message=str(error), fix=fix)]) from error
    if getattr(config, "vision_config", None) is not None and "pixel_values" not in data[0]:
        not_tested("images: the made data has text only. Pass your training script to test them")
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=evaluated,
        data_collator=collate,
        compute_metrics=_metrics(arguments),
    )
    trainer.train()


def _metrics(arguments: Any) -> Any:
    """Return a function that makes up the metric of ``metric_for_best_model``, which the user's script computes."""
    name = (arguments.metric_for_best_model or "loss").removeprefix("eval_")
    if name == "loss":
        return None
    not_tested(f"the metric {name!r}, which is made up. Pass your training script to test it")
    return lambda prediction: {name: 0.5}


def parse_arguments(options: Options) -> TrainingArguments:
    """Return the ``TrainingArguments`` of the flags and of the file. Flags override the file.

    Raises:
        SpecError: an unknown field, or values that Transformers refuses.
    """
    words = [*_words_of_file(options.arguments_file), *options.arguments]
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    for name, value in _DEFAULTS.items():
        if name not in given:
            words = [f"--{name}", value, *words]
    parser: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            arguments, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except SystemExit as stop:
        raise SpecError([_refused(printed.getvalue().strip().splitlines()[-1])]) from stop
    except (ValueError, ImportError, NotImplementedError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError([_refused(" ".join(str(error).split()))]) from error
    unknown = [word for word in rest if word.startswith("--")] or rest
    if unknown:
        fields = [field for action in parser._actions for field in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], fields, n=1, cutoff=0.75)
        fix = f"Did you mean {near[0]}?" if near else "Use the names of TrainingArguments."
        message = f"{unknown[0]} is not an argument of TrainingArguments or of hf-fsdp check."
        raise SpecError([Problem(code="FSDP-E751", message=message, fix=fix)])
    found: TrainingArguments = arguments
    return found


def _refused(message: str) -> Problem:
    return Problem(code="FSDP-E751", message=f"TrainingArguments refuse the arguments: {message}")


def _words_of_file(path: str) -> list[str]:
    """Return the fields of a JSON or YAML file as flags."""
    if not path:
        return []
    try:
        tree = yaml.safe_load(Path(path).read_text())  # JSON is YAML
        if not isinstance(tree, dict):
            raise ValueError("expected a mapping of the fields of TrainingArguments")
    except (OSError, ValueError, yaml.YAMLError) as error:
        message = f"cannot be read: {' '.join(str(error).split())}"
        raise SpecError([Problem(code="FSDP-E751", message=message, origin=Origin(source=path))]) from error
    words: list[str] = []
    for name, value in tree.items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        words += [f"--{name}", *map(str, values)]
    return words


if __name__ == "__main__":
    main()
