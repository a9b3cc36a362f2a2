"""Checkpoints of DeepSpeed: each stage, universal checkpoints, and damaged or unsupported ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp_plugin.checkpoint.checking.inspection import completeness_problems, summarize
from hf_fsdp_plugin.checkpoint.formats import boxes
from hf_fsdp_plugin.checkpoint.formats.known_formats import (
    read_stored_model,
    read_stored_optimizer,
    stored_state_dict_type,
)
from hf_fsdp_plugin.checkpoint.merging.merge import MergeOptions, merge
from hf_fsdp_plugin.problems import CheckpointError
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


def assert_complete(folder: Path, zero: Zero = ZERO) -> None:
    """Compare all weights and states bit for bit."""
    model, optimizer = read_stored_model(folder), read_stored_optimizer(folder)
    assert optimizer is not None and model.format == optimizer.format == "deepspeed" and not model.objects
    assert list(model.tensors) == list(zero.weights)
    for name, tensor in model.tensors.items():
        trained = name in TRAINED or name in zero.shared
        expected = zero.weights[name] if trained else zero.rounded(name)
        assert (tensor.dtype, tensor.shape) == (str(expected.dtype).removeprefix("torch."), tuple(expected.shape))
        assert assembled(folder, tensor).tobytes() == bytes(expected.contiguous().view(-1).view(torch.uint8).tolist())
    assert model.tensors["head.weight"].pieces is model.tensors["embed.weight"].pieces
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
    place = ZERO.write(tmp_path, stage, world_size)
    assert_complete(tmp_path if world_size > 1 else place)
    assert stored_state_dict_type(tmp_path) == "sharded"


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoint_is_read(tmp_path: Path, stage: int) -> None:
    place = ZERO.write_universal(tmp_path, stage)
    assert_complete(tmp_path if stage == 2 else place)


def test_checkpoint_without_zero_numbers_its_parameters(tmp_path: Path) -> None:
    zero = Zero(weights=WEIGHTS, groups=GROUPS, buffers=["counts"], dtype=torch.float32)
    zero.write(tmp_path, 0, 1)
    model, optimizer = read_stored_model(tmp_path), read_stored_optimizer(tmp_path)
    assert optimizer is not None and [group["params"] for group in optimizer.groups] == [["0", "1"], ["2", "3"]]
    assert (assembled(tmp_path, model.tensors["frozen.weight"]) == WEIGHTS["frozen.weight"].numpy()).all()
    state = assembled(tmp_path, optimizer.state["1"]["exp_avg"])
    assert (state == zero.states["layer.weight"]["exp_avg"].numpy()).all()


def test_folders_of_trainer_and_accelerate_are_read(tmp_path: Path) -> None:
    ZERO.write(tmp_path / "checkpoint-3", 2, 2)
    torch.save({"other": torch.ones(1)}, tmp_path / "checkpoint-3" / "pytorch_model.bin")  # 16-bit weights
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": 3}')
    assert_complete(tmp_path / "checkpoint-3")
    for number, tag in enumerate(("pytorch_model", "pytorch_model_1")):  # `latest` names the last one
        (tmp_path / "state").mkdir(exist_ok=True)
        Zero(weights={f"w{number}": torch.ones(3)}, groups=[[f"w{number}"]]).write(tmp_path / "state", 3, 2, tag=tag)
    assert [list(read_stored_model(tmp_path / "state", number).tensors) for number in (0, 1)] == [["w0"], ["w1"]]


def test_summary_has_step_ranks_and_version(tmp_path: Path) -> None:
    ZERO.write(tmp_path, 3, 4)
    summary = summarize(tmp_path)
    assert (summary.step, summary.world_size, summary.format, summary.incomplete) == (STEP, 4, "deepspeed", None)
    assert summary.ties == (("embed.weight", "head.weight"),) and summary.versions == {"deepspeed": "0.19.8"}


def test_step_of_a_group_is_that_of_its_parameters(tmp_path: Path) -> None:
    """Early versions of DeepSpeed's FusedAdam count the steps in the groups."""
    place = ZERO.write(tmp_path, 1, 1)
    change(place / f"bf16_zero_pp_rank_0_{OPTIMIZER}", count_in_groups)
    optimizer = read_stored_optimizer(tmp_path)
    assert optimizer is not None and "step" not in optimizer.groups[0]
    assert [state["step"] for state in optimizer.state.values()] == [5] * 4


def test_part_is_read_without_the_files_of_other_ranks(tmp_path: Path) -> None:
    place = ZERO.write(tmp_path, 3, 4)
    cut(place / f"bf16_zero_pp_rank_3_{OPTIMIZER}")
    tensor = read_stored_model(tmp_path, partial=True).tensors["embed.weight"]
    assert {piece.file for piece in tensor.within(boxes.Box((0, 0), (4, 5)))} == {
        f"{place.name}/bf16_zero_pp_rank_{rank}_{OPTIMIZER}" for rank in (0, 1, 2)
    }
    with pytest.raises(CheckpointError, match=rf"rank_3_{OPTIMIZER}.*FSDP-E453"):
        read_stored_model(tmp_path)


def test_checkpoint_of_this_package_replaces_that_of_deepspeed(tmp_path: Path) -> None:
    ZERO.write(tmp_path, 2, 1)
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "fsdp_manifest.json").write_text("{}")
    assert list(read_stored_model(tmp_path).tensors) == ["w"]


def test_weights_that_were_kept_without_their_tag_are_read(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step9")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert read_stored_model(tmp_path).format == "bin" and read_stored_optimizer(tmp_path) is None


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
    "link outside": ("FSDP-E456", OPTIMIZER_1, lambda tag: to_link(tag / OPTIMIZER_1)),
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


def to_link(path: Path) -> None:
    path.rename(path.parents[2] / "outside.pt")
    path.symlink_to(path.parents[2] / "outside.pt")


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
    found = completeness_problems(run)
    assert {each.code for each in found} == {code} and all(each.fix and each.origin for each in found)
    assert place in str(CheckpointError(found))
    with pytest.raises(CheckpointError, match="FSDP-E483"):
        merge(run, tmp_path / "merged", MergeOptions())
    assert sorted(tmp_path.rglob("*")) == before and not (tmp_path / "executed").exists()


def test_merge_keeps_files_that_contain_the_optimizer(tmp_path: Path) -> None:
    names = [path.name for path in ZERO.write(tmp_path / "run", 2, 2).iterdir()]
    result = merge(tmp_path / "run", tmp_path / "out", MergeOptions(delete_input=True))
    assert not result.deleted and "FSDP-E487" in [problem.code for problem in result.problems]
    assert [path.name for path in (tmp_path / "run" / "global_step3").iterdir()] == names


@pytest.mark.parametrize(
    ("stage", "file", "edit"),
    [
        (1, OPTIMIZER_0, lambda state: optimizer_of(state).update(base_optimizer_state=[{}, {}])),
        (0, MODEL, lambda state: state.update(optimizer={"fp32_groups_flat": []})),
    ],
    ids=["elastic", "without ZeRO"],
)
def test_optimizer_without_names_is_refused(tmp_path: Path, stage: int, file: str, edit: Callable[[Any], Any]) -> None:
    change(ZERO.write(tmp_path, stage, 1) / file, edit)
    assert list(read_stored_model(tmp_path).tensors) == list(WEIGHTS)
    with pytest.raises(CheckpointError, match="FSDP-E416"):
        read_stored_optimizer(tmp_path)
