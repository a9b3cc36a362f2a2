"""Conversion of checkpoints of DeepSpeed: each stage, universal checkpoints, and damaged or unsupported ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredOptimizer, shared_tensors
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.convert import checkpoint as conversion
from hf_fsdp_plugin.tools.convert.deepspeed_files import read_engines
from hf_fsdp_plugin.tools.inspect.summary import summarize
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support.assembled import assembled
from tests.support.deepspeed_files import STATES, STEP, Zero, change

WEIGHTS = {
    "embed.weight": torch.arange(35.0).reshape(7, 5) / 3,
    "layer.weight": torch.arange(48.0).reshape(4, 4, 3) / 7,
    "frozen.weight": torch.arange(22.0).reshape(11, 2) / 5,
    "layer.bias": torch.arange(9.0) / 11,
    "norm.weight": torch.tensor(2.5),
    "counts": torch.arange(3),
    "head.weight": torch.arange(35.0).reshape(7, 5) / 3,
}
GROUPS = [["embed.weight", "layer.weight"], ["layer.bias", "norm.weight"]]
ZERO = Zero(weights=WEIGHTS, groups=GROUPS, buffers=["counts"], shared={"head.weight": "embed.weight"})
TRAINED = [name for names in GROUPS for name in names]
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "mp_rank_00_optim_states.pt"


def convert(source: Path, out: Path) -> conversion.ConvertedCheckpoint:
    return conversion.convert_checkpoint(source, out, force=False, progress=lambda *_: None)


def states_of(checkpoint: Path, number: int = 0) -> tuple[StoredModel, StoredOptimizer]:
    optimizer = read_stored_optimizer(checkpoint, number)
    assert optimizer is not None
    return read_stored_model(checkpoint, number), optimizer


def assert_complete(source: Path, folder: Path, zero: Zero = ZERO) -> None:
    """Convert a checkpoint, and compare all weights and states bit for bit."""
    convert(source, folder)
    model, optimizer = states_of(folder)
    assert model.format == optimizer.format == "dcp" and not model.objects
    assert sorted(model.tensors) == sorted(zero.weights)
    for name, tensor in model.tensors.items():
        trained = name in TRAINED or name in zero.shared
        expected = zero.weights[name] if trained else zero.rounded(name)
        assert (tensor.dtype, tensor.shape) == (str(expected.dtype).removeprefix("torch."), tuple(expected.shape))
        assert assembled(folder, tensor).tobytes() == bytes(expected.contiguous().view(-1).view(torch.uint8).tolist())
    assert shared_tensors(model) == [("embed.weight", "head.weight")]
    assert [group["params"] for group in optimizer.groups] == GROUPS
    assert [group["betas"] for group in optimizer.groups] == [(0.9, 0.99)] * 2
    assert sorted(optimizer.state) == sorted(TRAINED)
    for name, state in optimizer.state.items():
        assert sorted(state) == [*STATES, "step"]
        assert assembled(folder, state["step"]).tolist() == STEP
        for key in STATES:
            assert assembled(folder, state[key]).tolist() == zero.states[name][key].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_and_states_of_stages_are_read(tmp_path: Path, stage: int, world_size: int) -> None:
    place = ZERO.write(tmp_path / "run", stage, world_size)
    assert_complete(tmp_path / "run" if world_size > 1 else place, tmp_path / "out")
    verdict = verify(tmp_path / "out", config_check=False)
    assert verdict.ok and verdict.num_checked_bytes == verdict.num_bytes


def test_batches_of_tensors_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_BATCH", 300)
    ZERO.write(tmp_path / "run", 2, 2)
    assert_complete(tmp_path / "run", tmp_path / "out")
    assert len(list((tmp_path / "out/optimizer_0").glob("__*.distcp"))) == 4  # and one with the scalars


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoint_is_read(tmp_path: Path, stage: int) -> None:
    place = ZERO.write_universal(tmp_path / "run", stage)
    assert_complete(tmp_path / "run" if stage == 2 else place, tmp_path / "out")


def test_checkpoint_without_zero_numbers_its_parameters(tmp_path: Path) -> None:
    zero = Zero(weights=WEIGHTS, groups=GROUPS, buffers=["counts"], dtype=torch.float32)
    zero.write(tmp_path / "run", 0, 1)
    convert(tmp_path / "run", tmp_path / "out")
    model, optimizer = states_of(tmp_path / "out")
    assert [group["params"] for group in optimizer.groups] == [["0", "1"], ["2", "3"]]
    assert (assembled(tmp_path / "out", model.tensors["frozen.weight"]) == WEIGHTS["frozen.weight"].numpy()).all()
    state = assembled(tmp_path / "out", optimizer.state["1"]["exp_avg"])
    assert (state == zero.states["layer.weight"]["exp_avg"].numpy()).all()


def test_folders_of_trainer_and_accelerate_are_read(tmp_path: Path) -> None:
    run, out = tmp_path / "checkpoint-3", tmp_path / "out"
    ZERO.write(run, 2, 2)
    torch.save({"other": torch.ones(1)}, run / "pytorch_model.bin")  # 16-bit weights
    for name in ("zero_to_fp32.py", "rng_state_0.pth", "rng_state_1.pth", "tokenizer.json", "scheduler.pt"):
        (run / name).write_text(name)
    (run / "trainer_state.json").write_text('{"global_step": 3}')
    assert_complete(run, out)
    names = {"rng_state_0.pth", "rng_state_1.pth", "tokenizer.json", "scheduler.pt", "trainer_state.json"}
    assert {path.name for path in out.iterdir() if path.is_file()} == {*names, "fsdp_manifest.json"}
    assert (out / "scheduler.pt").read_text() == "scheduler.pt"
    for number, tag in enumerate(("pytorch_model", "pytorch_model_1")):  # `latest` names the last one
        (tmp_path / "state").mkdir(exist_ok=True)
        Zero(weights={f"w{number}": torch.ones(3)}, groups=[[f"w{number}"]]).write(tmp_path / "state", 3, 2, tag=tag)
    convert(tmp_path / "state", tmp_path / "converted")
    found = [states_of(tmp_path / "converted", number) for number in (0, 1)]
    assert [(list(model.tensors), list(optimizer.state)) for model, optimizer in found] == [
        (["w0"], ["w0"]),
        (["w1"], ["w1"]),
    ]


@pytest.mark.parametrize("has_state_of_trainer", [False, True])
def test_schedule_of_the_engine_becomes_a_file(tmp_path: Path, has_state_of_trainer: bool) -> None:
    saved = {"last_epoch": 2, "_last_lr": [0.1]}
    zero = Zero(
        weights=WEIGHTS, groups=GROUPS, buffers=["counts"], shared={"head.weight": "embed.weight"}, schedule=saved
    )
    zero.write(tmp_path / "run", 1, 2)
    if has_state_of_trainer:
        (tmp_path / "run/trainer_state.json").write_text('{"global_step": 3}')
    done = convert(tmp_path / "run", tmp_path / "out")
    path = tmp_path / "out" / ("scheduler.pt" if has_state_of_trainer else "scheduler.bin")
    assert torch.load(path) == saved
    assert [each.code for each in done.problems] == ["FSDP-W415"] and "no random states" in done.problems[0].message


def test_other_schedule_continues_after_the_steps(tmp_path: Path) -> None:
    ZERO.write(tmp_path / "run", 1, 2)
    first, _ = convert(tmp_path / "run", tmp_path / "out").problems
    assert first.code == "FSDP-W415" and "continues after 3 steps" in first.message
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    schedule.load_state_dict(torch.load(tmp_path / "out/scheduler.bin"))
    assert schedule.last_epoch == 3 and schedule.lr_lambdas[0](3) == 0.25


def test_summary_has_step_ranks_and_version(tmp_path: Path) -> None:
    ZERO.write(tmp_path / "run", 3, 4)
    convert(tmp_path / "run", tmp_path / "out")
    summary = summarize(tmp_path / "out")
    assert (summary.step, summary.world_size, summary.kind, summary.incomplete) == (STEP, 4, "sharded", None)
    assert summary.ties == (("embed.weight", "head.weight"),) and summary.versions["deepspeed"] == "0.19.8"
    assert summary.manifest is not None and summary.manifest.strategy == "full_shard"


def test_step_of_a_group_is_that_of_its_parameters(tmp_path: Path) -> None:
    """Early versions of DeepSpeed's FusedAdam count the steps in the groups."""
    place = ZERO.write(tmp_path / "run", 1, 1)
    change(place / f"bf16_zero_pp_rank_0_{OPTIMIZER}", count_in_groups)
    convert(tmp_path / "run", tmp_path / "out")
    _, optimizer = states_of(tmp_path / "out")
    assert "step" not in optimizer.groups[0]
    assert [state["step"] for state in optimizer.state.values()] == [5] * 4


def test_tools_refuse_it_with_the_command_that_converts_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ZERO.write(run, 2, 2)
    torch.save({"other": torch.ones(1)}, run / "pytorch_model.bin")
    found = verify(run, config_check=False).problems
    assert [each.code for each in found] == ["FSDP-E417"]
    assert f"`hf-fsdp convert {run} --out {run}-fsdp`" in found[0].fix
    for read in (read_stored_model, read_stored_optimizer, summarize):
        with pytest.raises(CheckpointError, match="FSDP-E417"):
            read(run)
    with pytest.raises(CheckpointError, match="FSDP-E417"):
        merge(run, tmp_path / "merged", MergeOptions())


def test_checkpoint_of_this_package_replaces_that_of_deepspeed(tmp_path: Path) -> None:
    ZERO.write(tmp_path, 2, 1)
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "fsdp_manifest.json").write_text("{}")
    assert list(read_stored_model(tmp_path).tensors) == ["w"]


def test_weights_that_were_kept_without_their_tag_are_read(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step9")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert read_stored_model(tmp_path).format == "bin" and read_stored_optimizer(tmp_path) is None
    assert read_engines(tmp_path) == []


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def count_in_groups(state: dict[str, Any]) -> None:
    inner = state["optimizer_state_dict"]["base_optimizer_state"]
    for entry in inner["state"].values():
        del entry["step"]
    for group in inner["param_groups"]:
        group["step"] = 5


class Code:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def with_code(state: dict[str, Any]) -> None:
    state["client"] = Code()


def optimizer_of(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["optimizer_state_dict"]
    return found


MODEL_0, MODEL_1 = f"zero_pp_rank_0_{MODEL}", f"zero_pp_rank_1_{MODEL}"
OPTIMIZER_0, OPTIMIZER_1 = f"bf16_zero_pp_rank_0_{OPTIMIZER}", f"bf16_zero_pp_rank_1_{OPTIMIZER}"
DAMAGES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "file of a rank": ("FSDP-E457", OPTIMIZER_1, lambda tag: (tag / OPTIMIZER_1).unlink()),
    "file of the model": ("FSDP-E457", MODEL_1, lambda tag: (tag / MODEL_1).unlink()),
    "first file": ("FSDP-E457", OPTIMIZER_0, lambda tag: (tag / OPTIMIZER_0).unlink()),
    "all files of the optimizer": ("FSDP-E457", "zero_pp_rank_0_", lambda tag: remove_optimizer(tag)),
    "names": ("FSDP-E453", "global_step3", lambda tag: rename_all(tag)),
    "truncated": ("FSDP-E453", OPTIMIZER_1, lambda tag: cut(tag / OPTIMIZER_1)),
    "fewer ranks": ("FSDP-E459", "global_step3", lambda tag: change(tag / OPTIMIZER_0, with_ranks(1))),
    "more ranks": ("FSDP-E457", "rank_2_", lambda tag: change(tag / OPTIMIZER_0, with_ranks(3))),
    "two files": ("FSDP-E459", "rank 1", lambda tag: shutil.copy(tag / OPTIMIZER_1, tag / OPTIMIZER_1[5:])),
    "code": ("FSDP-E454", OPTIMIZER_1, lambda tag: change(tag / OPTIMIZER_1, with_code)),
    "missing tag": ("FSDP-E414", "latest", lambda tag: (tag.parent / "latest").write_text("global_step9\n")),
    "tag outside": ("FSDP-E456", "latest", lambda tag: (tag.parent / "latest").write_text("../other")),
    "two tags": ("FSDP-E414", "global_step5", lambda tag: add_tag(tag.parent)),
    "tensor parallelism": ("FSDP-E413", "mp_rank_01", lambda tag: (tag / "mp_rank_01_model_states.pt").touch()),
    "pipeline": ("FSDP-E413", "layer_00", lambda tag: (tag / "layer_00-model_00-model_states.pt").touch()),
    "experts": ("FSDP-E413", "expp_rank_0", lambda tag: (tag / "expp_rank_0_mp_rank_00_optim_states.pt").touch()),
    "degree": ("FSDP-E413", "tp_degree 2", lambda tag: change(tag / MODEL_0, in_degrees)),
    "other shapes": ("FSDP-E459", "fp32 of group 0", lambda tag: change(tag / MODEL_0, with_shape((7, 500)))),
    "no shapes": ("FSDP-E453", MODEL_0, lambda tag: change(tag / MODEL_0, with_shape((7, -5)))),
    "no groups": ("FSDP-E453", OPTIMIZER_1, lambda tag: change(tag / OPTIMIZER_1, dict.clear)),
    "no padding": ("FSDP-E453", "run", lambda tag: (tag.parent / "latest").write_text(str(pad(tag.parent)))),
    "no count": ("FSDP-E453", OPTIMIZER_0, lambda tag: change(tag / OPTIMIZER_0, with_ranks("2"))),
    "short vector": ("FSDP-E459", OPTIMIZER_1, lambda tag: change(tag / OPTIMIZER_1, with_vector(torch.zeros(3)))),
    "dtype": ("FSDP-E459", OPTIMIZER_1, lambda tag: change(tag / OPTIMIZER_1, with_vector(torch.zeros(50).half()))),
    "no vector": ("FSDP-E459", "fp32 of group 0", lambda tag: change(tag / OPTIMIZER_1, with_vector("x"))),
}


def remove_optimizer(tag: Path) -> None:
    for path in tag.glob(f"*_{OPTIMIZER}"):
        path.unlink()


def rename_all(tag: Path) -> None:
    for path in list(tag.iterdir()):
        path.rename(tag / f"x{path.name}")


def add_tag(folder: Path) -> None:
    ZERO.write(folder, 1, 1, tag="global_step5")
    (folder / "latest").unlink()


def pad(folder: Path) -> str:
    """Write another tag, in which the padding of a parameter is negative, and return its name."""
    tag = ZERO.write(folder, 2, 2, tag="global_step5")
    change(tag / OPTIMIZER_0, lambda state: optimizer_of(state)["param_alignment_paddings"][0].__setitem__(0, -8))
    return tag.name


def with_ranks(count: Any) -> Callable[[Any], object]:
    return lambda state: optimizer_of(state).update(partition_count=count)


def in_degrees(state: dict[str, Any]) -> None:
    state["checkpoint_parallel_dimensions"]["tp_degree"] = 2


def with_shape(shape: tuple[int, ...]) -> Callable[[Any], object]:
    return lambda state: state["param_shapes"][0].update({"embed.weight": shape})


def with_vector(value: Any) -> Callable[[Any], object]:
    return lambda state: optimizer_of(state)["fp32_flat_groups"].__setitem__(0, value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_refused_and_nothing_is_written(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, place, apply = DAMAGES[damage]
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    apply(ZERO.write(run, 3, 2))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        convert(run, tmp_path / "out")
    found = caught.value.problems
    assert {each.code for each in found} == {code} and all(each.fix and each.origin for each in found)
    assert place in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before and not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("out", "code"), [("run", "FSDP-E480"), ("run/inside", "FSDP-E480"), (".", "FSDP-E480"), ("full", "FSDP-E481")]
)
def test_output_overwrites_nothing(tmp_path: Path, out: str, code: str) -> None:
    ZERO.write(tmp_path / "run", 1, 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=code):
        convert(tmp_path / "run", tmp_path / out)
    assert (tmp_path / "full/notes.txt").read_text() == "mine"


def test_folder_without_files_of_deepspeed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match="FSDP-E451"):
        convert(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize(
    ("stage", "file", "edit"),
    [
        (1, OPTIMIZER_0, lambda state: optimizer_of(state).update(base_optimizer_state=[{}, {}])),
        (0, MODEL, lambda state: state.update(optimizer={"fp32_groups_flat": []})),
    ],
    ids=["elastic", "without ZeRO"],
)
def test_optimizer_without_names_is_reported(tmp_path: Path, stage: int, file: str, edit: Callable[[Any], Any]) -> None:
    change(ZERO.write(tmp_path / "run", stage, 1) / file, edit)
    problems = convert(tmp_path / "run", tmp_path / "out").problems
    assert "optimizer whose state is not converted" in problems[1].message and problems[1].code == "FSDP-W415"
    assert sorted(read_stored_model(tmp_path / "out").tensors) == sorted(WEIGHTS)
    assert read_stored_optimizer(tmp_path / "out") is None
