"""What a preflight changes in ``TrainingArguments`` and data sets, and what it reports as not tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_fsdp_plugin.integrations.preflight.builtin_script import parse_arguments
from hf_fsdp_plugin.integrations.preflight.replacements import first_samples, validate_args
from hf_fsdp_plugin.integrations.preflight.run import preflight
from hf_fsdp_plugin.integrations.preflight.stages import Options, problems_of, read_events
from hf_fsdp_plugin.problems import SpecError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    Options().write(tmp_path)
    preflight.begin(tmp_path)
    yield tmp_path
    preflight.close()


def arguments(**more: object) -> TrainingArguments:
    return TrainingArguments(output_dir="user", use_cpu=True, **more)  # type: ignore[arg-type]


def test_batches_are_small_and_output_is_temporary(folder: Path) -> None:
    given = arguments(per_device_train_batch_size=64, gradient_accumulation_steps=16, dataloader_num_workers=8)
    validate_args(lambda: None, given)
    assert (given.per_device_train_batch_size, given.gradient_accumulation_steps) == (2, 2)
    assert (given.dataloader_num_workers, given.output_dir, given.report_to) == (1, str(folder / "out"), [])
    assert {problem.code for problem in problems_of(read_events(folder))} == {"FSDP-N757"}


def test_what_needs_a_gpu_is_reported_as_not_tested(folder: Path) -> None:
    given = arguments()
    given.torch_compile, given.use_liger_kernel, given.fp16, given.push_to_hub = True, True, True, True
    seen: list[bool] = []
    validate_args(lambda: seen.append(given.bf16 and not given.fp16), given)
    assert seen == [True]  # Transformers validates bf16
    assert not (given.torch_compile or given.use_liger_kernel or given.push_to_hub)
    messages = [problem.message for problem in problems_of(read_events(folder)) if problem.code == "FSDP-W756"]
    assert len(messages) == 3 and "torch.compile" in messages[0]


def test_arguments_are_unchanged_without_a_preflight() -> None:
    given = arguments(per_device_train_batch_size=64)
    validate_args(lambda: None, given)
    assert (given.per_device_train_batch_size, given.output_dir) == (64, "user")


def test_failure_that_needs_a_gpu_is_not_tested(folder: Path) -> None:
    preflight.recorder.enter("step")
    preflight.failed(RuntimeError("Torch not compiled with CUDA enabled"))
    assert [problem.code for problem in problems_of(read_events(folder))] == ["FSDP-W756"]


def test_flags_override_the_file_of_arguments(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("learning_rate: 0.5\noptim: sgd\nlr_scheduler_kwargs: {num_cycles: 2}\nuse_cpu: true\n")
    found = parse_arguments(Options(arguments=("--learning_rate", "0.25"), arguments_file=str(file)))
    assert (found.learning_rate, found.optim, found.lr_scheduler_kwargs) == (0.25, "sgd", {"num_cycles": 2})
    assert found.eval_strategy == "steps"


@pytest.mark.parametrize(
    ("words", "text", "hint"),
    [
        (("--lerning_rate", "1"), "", "Did you mean --learning_rate?"),
        (("--optim", "nonsense"), "", "nonsense"),
        ((), "[1, 2]", "expected a mapping"),
        ((), "a: [", "cannot be read"),
        (("--load_best_model_at_end", "true", "--eval_strategy", "no"), "", "load_best_model_at_end"),
    ],
)
def test_refused_arguments_have_a_code(tmp_path: Path, words: tuple[str, ...], text: str, hint: str) -> None:
    file = tmp_path / "args.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as refused:
        parse_arguments(Options(arguments=("--use_cpu", "true", *words), arguments_file=str(file) if text else ""))
    (problem,) = refused.value.problems
    assert problem.code == "FSDP-E751" and hint in str(problem)


def test_first_samples_keep_the_type_of_a_data_set() -> None:
    import datasets

    assert len(first_samples(datasets.Dataset.from_dict({"x": list(range(100))}), 8)) == 8
    assert len(first_samples(datasets.Dataset.from_dict({"x": [1]}), 8)) == 1
    assert len(first_samples(list(range(100)), 8)) == 8
    assert first_samples([1, 2], 8) == [1, 2]
