"""A merge writes what the checkpoint holds, whole or not at all, and touches nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, record_file, to_text
from hf_fsdp_plugin.checkpoint.merging import copy_tensors as merge_copy
from hf_fsdp_plugin.checkpoint.merging.merge import Merged, MergeOptions, merge
from hf_fsdp_plugin.checkpoint.merging.staging import Staging, replaced_path, staging_path
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.cli.main import main
from hf_fsdp_plugin.problems import CheckpointError

LOCAL = "pytorch_model_fsdp_local"
TENSORS = {
    "lm_head.weight": numpy.linspace(-1e5, 1e5, 60, dtype="<f4").reshape(12, 5),
    "model.norm.weight": numpy.linspace(-3, 3, 7, dtype="<f4"),
    "model.steps": numpy.array(7, dtype="<i8"),
    "model.embed_tokens.weight": numpy.arange(60, dtype="<f4").reshape(12, 5),
}
CONFIG = {"model_type": "llama", "dtype": "float32", "text_config": {"torch_dtype": "float32"}}


def save(folder: Path, tensors: dict[str, numpy.ndarray] = TENSORS, ties: Sequence[tuple[str, ...]] = ()) -> Path:
    """A checkpoint of two ranks as the plugin writes it: every tensor cut in its first dim, and a manifest."""
    (folder / LOCAL).mkdir(parents=True)
    for rank in (0, 1):
        entries, pieces = {}, {}
        for name, whole in tensors.items():
            parts = numpy.array_split(whole, 2) if whole.ndim else [whole, whole]
            offsets = [len(parts[0]) * rank, *[0] * (whole.ndim - 1)] if whole.ndim else []
            entries[name] = numpy.array(parts[rank], order="C")
            pieces[name] = {"name": name, "shape": list(whole.shape), "offsets": offsets}
        said = {"rank": rank, "world_size": 2, "pieces": pieces, "aliases": {b: a for a, *rest in ties for b in rest}}
        save_file(entries, folder / LOCAL / f"0_rank{rank}.safetensors", {"fsdp_local": json.dumps(said)})
    (folder / "optimizer.pt").write_bytes(b"moments")
    parameters = {name: (str(whole.dtype), whole.shape) for name, whole in tensors.items()}
    parameters |= {name: parameters[kept] for kept, *rest in ties for name in rest}
    write_manifest(folder, parameters, ties)
    return folder


def write_manifest(folder: Path, parameters: dict[str, Any], ties: Sequence[tuple[str, ...]] = ()) -> None:
    files = [path.relative_to(folder).as_posix() for path in (folder / LOCAL).iterdir()]
    manifest = Manifest(
        kind="local",
        backend="fsdp2",
        world_size=2,
        mesh={"shard": 2},
        strategy="full_shard",
        step=1,
        asynchronous=False,
        created="2026-01-01T00:00:00+00:00",
        versions={},
        settings={},
        parameters=parameters,
        ties=tuple(ties),
        files=tuple(record_file(folder, file) for file in files),
        batch={},
    )
    (folder / MANIFEST_NAME).write_text(to_text(manifest))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = save(tmp_path / "run" / "checkpoint-1")
    (folder / "trainer_state.json").write_text("{}")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "merged"


def read(folder: Path) -> dict[str, numpy.ndarray]:
    found: dict[str, numpy.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(found: dict[str, numpy.ndarray], expected: dict[str, numpy.ndarray] = TENSORS) -> None:
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        assert (found[name].dtype, found[name].shape) == (whole.dtype, whole.shape)
        assert found[name].tobytes() == whole.tobytes()


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, for "nothing was touched"."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def messages(merged: Merged) -> str:
    return "\n".join(map(str, merged.problems))


def test_all_ranks_parts_become_one_file(checkpoint: Path, out: Path) -> None:
    merged = merge(checkpoint, out, MergeOptions())
    assert_same(read(out))
    assert merged.compared_with == "manifest"
    assert sorted(path.name for path in out.parent.iterdir()) == ["merged", "run"]


def test_shards_and_their_index(checkpoint: Path, out: Path) -> None:
    merged = merge(checkpoint, out, MergeOptions(max_shard_size=250))
    assert_same(read(out))
    assert len(merged.files) == 3
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == TENSORS.keys()
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "np") as opened:
            assert name in opened.keys()  # noqa: SIM118 (it is no mapping)


def test_stock_shards_load_in_transformers(tmp_path: Path, out: Path) -> None:
    """The stock sharded format without a manifest: names and shapes are compared with the config's model."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    stock = tmp_path / "run" / "checkpoint-1"
    # Stored twice, as the stock stack does with tied weights.
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=stock / "pytorch_model_fsdp_0", no_dist=True)
    (stock / "trainer_state.json").write_text("{}")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(stock.parent)

    merged = merge(stock, out, MergeOptions(verify=True))
    assert (merged.compared_with, merged.verified) == ("model", True)
    assert merged.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert f"config and tokenizer come from {stock.parent}" in messages(merged)
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())

    # The same weights are those of no other architecture.
    LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 3}).save_pretrained(tmp_path / "other")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"9 of the 30 parameters of the LlamaForCausalLM .* are missing"):
        merge(stock, tmp_path / "new", MergeOptions(config=tmp_path / "other"))
    assert tree(tmp_path) == before
    assert not staging_path(tmp_path / "new").exists()


def test_tied_names_of_the_manifest_are_written_once(tmp_path: Path, out: Path) -> None:
    tensors = {name: whole for name, whole in TENSORS.items() if name != "lm_head.weight"}
    folder = save(tmp_path / "ck", tensors, ties=[("model.embed_tokens.weight", "lm_head.weight")])
    merged = merge(folder, out, MergeOptions())
    assert_same(read(out), tensors)
    assert "'lm_head.weight' is tied to 'model.embed_tokens.weight' and left out" in messages(merged)


def test_copies_that_differ_are_both_kept_whatever_the_config_ties(tmp_path: Path, out: Path) -> None:
    (tmp_path / "ck").mkdir()
    save_file(TENSORS, tmp_path / "ck" / "model.safetensors")
    (tmp_path / "ck" / "config.json").write_text('{"model_type": "no such", "tie_word_embeddings": true}')
    merged = merge(tmp_path / "ck", out, MergeOptions())
    assert_same(read(out))
    assert "names and shapes were not compared with a model" in messages(merged)


def test_dtype_converts_and_the_config_tells(checkpoint: Path, out: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    merge(checkpoint, out, MergeOptions(dtype="bfloat16", verify=True))
    with safe_open(out / "model.safetensors", "np") as opened:
        dtypes = {name: opened.get_slice(name).get_dtype() for name in TENSORS}
    assert dtypes == {**dict.fromkeys(TENSORS, "BF16"), "model.steps": "I64"}
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["torch_dtype"]) == ("bfloat16", "bfloat16")


def test_values_too_large_for_the_dtype_are_told_with_the_parameter(checkpoint: Path, out: Path) -> None:
    merged = merge(checkpoint, out, MergeOptions(dtype="float16"))
    count = int((numpy.abs(TENSORS["lm_head.weight"]) >= 65520).sum())
    assert f"{count} values of 'lm_head.weight' are too large for float16 and became infinite" in messages(merged)
    assert "embed_tokens" not in messages(merged)


def test_config_tokenizer_and_code_come_along_and_nothing_else(checkpoint: Path, out: Path) -> None:
    kept = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "spiece.model", "modeling_own.py"]
    kept += ["generation_config.json", "preprocessor_config.json", "special_tokens_map.json"]
    for name in (*kept, "training_args.bin", "optimizer.bin", "report.json"):
        (checkpoint / name).write_text("x")
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "modeling_own.Own"}}))
    merged = merge(checkpoint, out, MergeOptions())
    assert merged.companions == sorted([*kept, "config.json"])
    assert {path.name for path in out.iterdir()} == {*kept, "config.json", "model.safetensors"}


def test_scripts_of_a_run_are_no_code_of_the_model(checkpoint: Path, out: Path) -> None:
    (checkpoint.parent / "config.json").write_text(json.dumps(CONFIG))
    (checkpoint.parent / "train.py").write_text("x")
    assert merge(checkpoint, out, MergeOptions()).companions == ["config.json"]


def test_without_a_config_the_remedy_is_told(checkpoint: Path, out: Path) -> None:
    merged = merge(checkpoint, out, MergeOptions())
    assert "no config.json was found" in messages(merged)
    assert "--config" in messages(merged)


def test_an_adapter_keeps_its_names_and_gets_pefts_file(tmp_path: Path, out: Path) -> None:
    adapter = {f"base_model.model.q_proj.lora_{part}.weight": numpy.ones((2, 3), "<f4") for part in "AB"}
    folder = save(tmp_path / "ck", adapter)
    (folder / "adapter_config.json").write_text("{}")
    base = {"base_model.model.q_proj.base_layer.weight": ("float32", (3, 3))}  # of which the checkpoint has nothing
    write_manifest(folder, {**base, **{name: ("float32", whole.shape) for name, whole in adapter.items()}})
    merged = merge(folder, out, MergeOptions(max_shard_size=1))
    assert merged.files == ["adapter_model.safetensors"]
    assert "these are an adapter's weights, under the names that they have" in messages(merged)
    assert_same(read(out), adapter)


def interrupt_after(num_files: int) -> Any:
    """Progress that is told of the header of one file too many, and kills."""
    finished = []

    def progress(what: str, count: int, total: int) -> None:
        finished.extend([count] if count % 4096 == 0 else [])
        if len(finished) > num_files:
            raise KeyboardInterrupt

    return progress


def test_a_killed_merge_goes_on_at_the_first_unfinished_file(checkpoint: Path, out: Path) -> None:
    options = MergeOptions(max_shard_size=130, dtype="float16")
    with pytest.raises(KeyboardInterrupt):
        merge(checkpoint, out, options, interrupt_after(2))
    assert not out.exists()
    finished = {path.name: path.stat().st_mtime_ns for path in staging_path(out).glob("*.safetensors")}
    assert len(finished) == 2
    merged = merge(checkpoint, out, options)
    assert merged.resumed == sorted(finished)
    assert all((out / name).stat().st_mtime_ns == changed for name, changed in finished.items())
    assert read(out).keys() == TENSORS.keys()
    assert not (out / "merge_plan.json").exists()
    assert "values of 'lm_head.weight' are too large for float16" in messages(merged)


@pytest.mark.parametrize("change", ["input", "options"])
def test_what_another_merge_left_is_not_used(change: str, checkpoint: Path, out: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        merge(checkpoint, out, MergeOptions(max_shard_size=250), interrupt_after(2))
    if change == "input":
        os.utime(checkpoint / LOCAL / "0_rank0.safetensors", ns=(1, 1))
    dtype = None if change == "input" else "float64"
    merged = merge(checkpoint, out, MergeOptions(max_shard_size=250, dtype=dtype))
    assert merged.resumed == []
    as_asked = {name: whole.astype(dtype or whole.dtype) for name, whole in TENSORS.items() if whole.ndim}
    assert_same(read(out), {**as_asked, "model.steps": TENSORS["model.steps"]})


def test_a_full_disk_keeps_what_was_finished(checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    written = []

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        written.append(offset)
        if len(written) > 1:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "pwrite", full)
        merge(checkpoint, out, MergeOptions(max_shard_size=250))
    assert not out.exists()
    assert len(merge(checkpoint, out, MergeOptions(max_shard_size=250)).resumed) == 1


def test_too_little_space_is_said_beforehand(checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(CheckpointError, match=r"0\.00\d GB are needed, and 0\.000 GB are free"):
        merge(checkpoint, out, MergeOptions())
    assert list(out.parent.iterdir()) == [checkpoint.parent]


PLACES = {
    "the checkpoint itself": (".", "is the checkpoint itself"),
    "in the checkpoint": ("merged", "lies in the checkpoint"),
    "around the checkpoint": ("..", "holds the checkpoint"),
    "a file": ("../notes.txt", "is a file"),
    "not empty": ("../full", "is not empty"),
}


@pytest.mark.parametrize("place", PLACES)
def test_outputs_that_would_cost_something_are_refused(place: str, checkpoint: Path) -> None:
    (checkpoint.parent / "notes.txt").write_text("mine")
    (checkpoint.parent / "full").mkdir()
    (checkpoint.parent / "full" / "mine").write_text("mine")
    before = tree(checkpoint.parent)
    where, said = PLACES[place]
    with pytest.raises(CheckpointError, match=said):
        merge(checkpoint, checkpoint / where, MergeOptions(force=place != "not empty"))
    assert tree(checkpoint.parent) == before


def test_force_replaces_all_of_the_output(checkpoint: Path, out: Path) -> None:
    out.mkdir()
    (out / "old.txt").write_text("old")
    merge(checkpoint, out, MergeOptions(force=True))
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert not replaced_path(out).exists()


def test_an_output_that_a_killed_merge_moved_aside_comes_back(checkpoint: Path, out: Path) -> None:
    replaced_path(out).mkdir()
    (replaced_path(out) / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        merge(checkpoint, out, MergeOptions())
    assert tree(out) == {"mine": b"mine"}


def test_one_merge_at_a_time(checkpoint: Path, out: Path) -> None:
    with Staging(out), pytest.raises(CheckpointError, match="another merge is writing there"):
        merge(checkpoint, out, MergeOptions())
    merge(checkpoint, out, MergeOptions())


def test_all_that_is_wrong_with_the_places_comes_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(CheckpointError) as caught:
        merge(tmp_path / "gone", tmp_path / "out", MergeOptions())
    assert [problem.message for problem in caught.value.problems] == ["there is no such folder.", "is not empty."]


def test_an_incomplete_checkpoint_is_refused(checkpoint: Path, out: Path) -> None:
    (checkpoint / LOCAL / "0_rank1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: .*0_rank1\.safetensors"):
        merge(checkpoint, out, MergeOptions())
    assert not staging_path(out).exists()


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"model.norm.weight": ("float32", (8,))}, r"'model.norm.weight' is float32 \[7\], and float32 \[8\]"),
        ({"model.norm.weight": ("bfloat16", (7,))}, r"is float32 \[7\], and bfloat16 \[7\] in the manifest"),
        ({"model.gone": ("float32", ())}, "'model.gone' of the manifest is in no file"),
    ],
)
def test_another_model_than_the_manifests_is_refused(
    parameters: dict[str, Any], said: str, checkpoint: Path, out: Path
) -> None:
    write_manifest(checkpoint, parameters)
    with pytest.raises(CheckpointError, match=said):
        merge(checkpoint, out, MergeOptions())


def test_a_config_folder_without_config_is_refused(checkpoint: Path, out: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        merge(checkpoint, out, MergeOptions(config=tmp_path))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_verify_finds_a_flipped_bit_of_the_output(checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Staging.finish_file

    def damaging(self: Staging, file: Any, infinite: dict[str, int]) -> None:
        flip(self.part(file), -1)
        finish(self, file, infinite)

    monkeypatch.setattr(Staging, "finish_file", damaging)
    before = tree(checkpoint)
    with pytest.raises(CheckpointError, match=r"'model\.embed_tokens\.weight' has other bytes than the checkpoint's"):
        merge(checkpoint, out, MergeOptions(delete_input=True))
    assert tree(checkpoint) == before
    assert not out.exists()
    assert not staging_path(out).exists()


def test_verify_finds_a_flipped_bit_of_the_input(checkpoint: Path, out: Path) -> None:
    flip(checkpoint / LOCAL / "0_rank1.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"0_rank1\.safetensors"):
        merge(checkpoint, out, MergeOptions(verify=True))
    assert not out.exists()


def test_a_header_that_is_not_the_planned_one_is_found(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Staging.finish_file

    def swapping(self: Staging, file: Any, infinite: dict[str, int]) -> None:
        save_file({"other": TENSORS["lm_head.weight"]}, self.part(file))
        finish(self, file, infinite)

    monkeypatch.setattr(Staging, "finish_file", swapping)
    with pytest.raises(CheckpointError, match="'other' was not written as planned"):
        merge(checkpoint, out, MergeOptions())


def test_delete_input_deletes_the_merged_files_only(checkpoint: Path, out: Path) -> None:
    before = tree(checkpoint)
    merged = merge(checkpoint, out, MergeOptions(delete_input=True))
    assert (merged.verified, merged.deleted) == (True, True)
    assert_same(read(out))
    assert tree(checkpoint) == {name: data for name, data in before.items() if not name.startswith(LOCAL)}
    assert not (checkpoint / LOCAL).exists()


def test_the_input_is_kept_where_there_was_no_model_to_compare_with(tmp_path: Path, out: Path) -> None:
    (tmp_path / "ck").mkdir()
    save_file(TENSORS, tmp_path / "ck" / "model.safetensors")
    before = tree(tmp_path / "ck")
    merged = merge(tmp_path / "ck", out, MergeOptions(delete_input=True))
    assert "the checkpoint is kept" in messages(merged)
    assert tree(tmp_path / "ck") == before
    assert_same(read(out))


def test_no_more_than_a_buffer_is_read_at_once(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"weight": numpy.arange(90 * 101, dtype="<f4").reshape(90, 101)}
    folder = save(tmp_path / "ck", large)
    asked = []
    read_run = merge_copy.read_run

    def watched(files: Any, tensor: Any, start: int, stop: int, target: memoryview) -> None:
        asked.append(len(target))
        read_run(files, tensor, start, stop, target)

    monkeypatch.setattr("hf_fsdp_plugin.checkpoint.merging.write.BUFFER", 8192)
    monkeypatch.setattr(merge_copy, "read_run", watched)
    merge(folder, out, MergeOptions())
    assert_same(read(out), large)
    assert max(asked) <= 8192
    assert sum(asked) == large["weight"].nbytes


class TestCommandLine:
    def test_a_merge_tells_what_it_wrote(self, checkpoint: Path, out: Path, capsys: pytest.CaptureFixture) -> None:
        assert main(["merge", str(checkpoint), str(out), "--verify"]) == 0
        said = capsys.readouterr()
        assert "4 tensors, 0.00 MB in model.safetensors" in said.out
        assert "names and shapes are those of the manifest; every byte was compared" in said.out
        assert "warning: no config.json was found" in said.err

    def test_json_is_one_object(self, checkpoint: Path, out: Path, capsys: pytest.CaptureFixture) -> None:
        assert main(["merge", str(checkpoint), str(out), "--json", "--max-shard-size", "250B"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["ok"]
        assert said["files"] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]

    def test_problems_are_1_and_on_stderr(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        assert main(["merge", str(tmp_path / "gone"), str(tmp_path / "out")]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert "gone: there is no such folder. Give the folder of a checkpoint" in said.err

    def test_problems_as_json(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        assert main(["merge", str(tmp_path / "gone"), str(tmp_path / "out"), "--json"]) == 1
        said = json.loads(capsys.readouterr().out)
        assert not said["ok"]
        assert said["problems"][0]["message"] == "there is no such folder."

    @pytest.mark.parametrize("words", [["--max-shard-size", "5XB"], ["--max-shard-size", "0"], ["--dtype", "int4"], []])
    def test_wrong_usage_is_2(self, words: list[str], checkpoint: Path) -> None:
        assert main(["merge", str(checkpoint), *([] if not words else ["out", *words])]) == 2

    def test_a_merge_loads_no_heavy_library(self, checkpoint: Path, out: Path) -> None:
        (checkpoint / "config.json").write_text(json.dumps(CONFIG))
        program = (
            "import sys; from hf_fsdp_plugin.cli.main import main\n"
            f"code = main(['merge', {str(checkpoint)!r}, {str(out)!r}, '--verify'])\n"
            "loaded = sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules))\n"
            "sys.exit(f'loaded {loaded}' if loaded else code)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
