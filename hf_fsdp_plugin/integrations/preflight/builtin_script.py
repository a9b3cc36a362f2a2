"""The built-in training script of a preflight, for ``check --run CONFIG --model MODEL``: a Trainer with made data."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Final

from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_fsdp_plugin.integrations.preflight.clone import MadeData, collate
from hf_fsdp_plugin.integrations.preflight.stages import preflight
from hf_fsdp_plugin.plan.meta_model import config_and_class
from hf_fsdp_plugin.problems import Problem, SpecError

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
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            (parsed,) = parser.parse_args_into_dataclasses(["--eval_strategy", "steps", *arguments])
    except SpecError:
        raise
    except (SystemExit, ValueError, ImportError, NotImplementedError) as error:
        is_exit = isinstance(error, SystemExit)  # of argparse, which has printed the reason
        reason = printed.getvalue().strip().splitlines()[-1] if is_exit else " ".join(str(error).split())
        message = f"TrainingArguments refuse the arguments: {reason}"
        fix = "Correct the flags that belong neither to hf-fsdp check nor to the settings."
        raise SpecError([Problem(code="FSDP-E751", message=message, fix=fix)]) from error
    return parsed


if __name__ == "__main__":
    main()
