"""What a preflight changes in ``TrainingArguments``, and what it reports as not tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.tools.preflight.stages import Options, preflight, problems_of, read_records
from hf_fsdp_plugin.tools.preflight.training import PreflightArguments, parse_arguments


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    preflight().begin(Options(folder=str(tmp_path)))
    yield tmp_path
    preflight().active = False


def parsed(*words: str) -> PreflightArguments:
    preflight().options = Options(folder=preflight().options.folder, arguments=("--use_cpu", "true", *words))
    return parse_arguments()


def test_batches_are_small_and_output_is_temporary(folder: Path) -> None:
    given = PreflightArguments(
        output_dir="user",
        use_cpu=True,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=16,
        dataloader_num_workers=8,
    )
    assert (given.per_device_train_batch_size, given.gradient_accumulation_steps) == (2, 2)
    assert (given.dataloader_num_workers, given.output_dir, given.report_to) == (1, str(folder / "out"), [])
    assert {problem.code for problem in problems_of(read_records(folder))} == {"FSDP-N757"}


def test_what_needs_a_gpu_is_reported_as_not_tested(folder: Path) -> None:
    given = PreflightArguments(use_cpu=True, torch_compile=True, use_liger_kernel=True, fp16=True, push_to_hub=True)
    assert given.bf16 and not given.fp16
    assert not (given.torch_compile or given.use_liger_kernel or given.push_to_hub)
    messages = [problem.message for problem in problems_of(read_records(folder)) if problem.code == "FSDP-W756"]
    assert len(messages) == 3 and "torch.compile" in messages[0]


def test_evaluation_is_on_by_default() -> None:
    found = parsed("--learning_rate", "0.25")
    assert (found.learning_rate, found.eval_strategy) == (0.25, "steps")
    assert parsed("--eval_strategy", "no").eval_strategy == "no"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--lerning_rate", "1"), "--lerning_rate"),
        (("--optim", "nonsense"), "nonsense"),
        (("--load_best_model_at_end", "true", "--eval_strategy", "no"), "load_best_model_at_end"),
    ],
)
def test_refused_arguments_have_a_code(words: tuple[str, ...], hint: str) -> None:
    with pytest.raises(SpecError) as refused:
        parsed(*words)
    (problem,) = refused.value.problems
    assert problem.code == "FSDP-E751" and hint in str(problem)
