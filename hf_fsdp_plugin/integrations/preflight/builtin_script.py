"""The built-in training script of a preflight, for ``check --run CONFIG --model MODEL``: a Trainer with made data."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any, Final

from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_fsdp_plugin.integrations.preflight.sample_data import MadeData, collate
from hf_fsdp_plugin.integrations.preflight.stages import preflight
from hf_fsdp_plugin.plan.meta_model import config_and_class
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spellings import did_you_mean, nearest_word

_NUM_SAMPLES: Final = 100_000
"""Samples that the data set claims to have, so that an epoch is as long as in a real training."""
_NUM_EVALUATED: Final = 8


def main() -> None:
    options = preflight.options
    arguments = parse_arguments(options.arguments)
    try:
        config, model_class = config_and_class(options.model)
    except SpecError:
        raise
    except (ValueError, OSError) as error:
        fix = "Give a directory with a config.json, or the name of a model in the local cache."
        problem = Problem(code="FSDP-E709", message=" ".join(str(error).split()), fix=fix)
        raise SpecError([problem]) from error
    kwargs = {"gguf_file": options.model} if options.model.endswith(".gguf") else {}
    model = model_class.from_pretrained(options.model, config=config, **kwargs)
    try:
        data = MadeData(model, _NUM_SAMPLES)
        evaluated = MadeData(model, _NUM_EVALUATED)
    except ValueError as error:
        fix = "Pass your training script instead of --model."
        raise SpecError([Problem(code="FSDP-E752", message=str(error), fix=fix)]) from error
    if getattr(config, "vision_config", None) is not None and "pixel_values" not in data[0]:
        preflight.not_tested("images: the made data has text only. Pass your training script to test them")
    metric = (arguments.metric_for_best_model or "loss").removeprefix("eval_")
    if metric != "loss":
        preflight.not_tested(f"the metric {metric!r}, which is made up. Pass your training script to test it")
    Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=evaluated,
        data_collator=collate,
        compute_metrics=None if metric == "loss" else lambda prediction: {metric: 0.5},
    ).train()


def parse_arguments(arguments: Sequence[str]) -> TrainingArguments:
    """Return the ``TrainingArguments`` of flags.

    Raises:
        SpecError: an unknown field, or values that Transformers refuses.
    """
    words = ["--eval_strategy", "steps", *arguments]
    parser: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            found, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except SystemExit as stop:
        raise _refused(printed.getvalue().strip().splitlines()[-1]) from stop
    except SpecError:
        raise
    except (ValueError, ImportError, NotImplementedError) as error:
        raise _refused(" ".join(str(error).split())) from error
    unknown = [word for word in rest if word.startswith("--")] or rest
    if unknown:
        fields = [field for action in parser._actions for field in action.option_strings]
        near = nearest_word(unknown[0].partition("=")[0], fields, cutoff=0.75)
        fix = did_you_mean(near, "Use the names of TrainingArguments.")
        message = f"{unknown[0]} is not an argument of TrainingArguments or of hf-fsdp check."
        raise SpecError([Problem(code="FSDP-E751", message=message, fix=fix)])
    parsed: TrainingArguments = found
    return parsed


def _refused(message: str) -> SpecError:
    return SpecError([Problem(code="FSDP-E751", message=f"TrainingArguments refuse the arguments: {message}")])


if __name__ == "__main__":
    main()
