"""``hf-fsdp convert`` turns whole weights into shards with the names of the model, and shards into whole weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools import loaded_weights
from hf_fsdp_plugin.tools.convert import checkpoint, verb
from hf_fsdp_plugin.tools.convert.checkpoint import ConvertedCheckpoint
from hf_fsdp_plugin.tools.convert.model_folder import convert_model_folder
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support.merge_inputs import MODEL, tree
from tests.support.tiny import tiny_deepseek, tiny_gpt2, tiny_llama, tiny_mixtral

MAKERS: dict[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "tied": lambda: tiny_llama(tied=True),
    "gpt2": tiny_gpt2,
    "mixtral": tiny_mixtral,
    "deepseek": tiny_deepseek,
}


def save(folder: Path, make: Callable[[], Any] = tiny_llama, **settings: Any) -> Path:
    make().save_pretrained(folder, max_shard_size="20KB", **settings)
    return folder


def convert(source: Path, out: Path, dtype: str | None = None, **settings: Any) -> ConvertedCheckpoint:
    return convert_model_folder(source, out, dtype=dtype, progress=lambda *_: None, **{"force": False, **settings})


def loaded(folder: Path, make: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """The state dict that ``dcp.load`` fills from a checkpoint, which must have each of its names."""
    model = make()
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder / MODEL, no_dist=True)
    return state


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("name", MAKERS)
def test_dcp_loads_the_weights_of_the_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_BATCH", 20_000)
    make = MAKERS[name]
    done = convert(save(tmp_path / "hf", make), tmp_path / "out")
    assert_equal(loaded(tmp_path / "out", make), make().state_dict())
    assert len(list((tmp_path / "out" / MODEL).glob("*.distcp"))) > 1
    assert done.problems == () and verify(tmp_path / "out").ok
    assert read_stored_model(tmp_path / "out").format == "dcp"
    assert {"config.json", "generation_config.json"} <= set(done.copied)


def test_dtype_converts_all_but_fp32_weights(tmp_path: Path) -> None:
    convert(save(tmp_path / "hf", tiny_deepseek), tmp_path / "out", "bfloat16")
    dtypes = {name: tensor.dtype for name, tensor in read_stored_model(tmp_path / "out").tensors.items()}
    kept = ("mlp.gate.weight", "e_score_correction_bias")
    assert dtypes == {name: "float32" if name.endswith(kept) else "bfloat16" for name in dtypes}
    state = tiny_deepseek().state_dict()
    wanted = {name: t if name.endswith(kept) else t.bfloat16().float() for name, t in state.items()}
    assert_equal(loaded(tmp_path / "out", tiny_deepseek), wanted)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_round_trip_through_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, shards, back = save(tmp_path / "hf"), tmp_path / "shards", tmp_path / "back"
    assert verb.run(verb.parse_argv([str(source), "--out", str(shards), "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["dialect"] == "full"
    assert verb.run(verb.parse_argv([str(shards), "--out", str(back)])) == 0
    from transformers import AutoModelForCausalLM

    assert_equal(AutoModelForCausalLM.from_pretrained(back).state_dict(), tiny_llama().state_dict())


def test_bin_folder_is_converted(tmp_path: Path) -> None:
    model: Any = tiny_llama(tied=True)
    model.config.save_pretrained(tmp_path / "hf")
    torch.save(model.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    convert(tmp_path / "hf", tmp_path / "out")
    assert_equal(loaded(tmp_path / "out", MAKERS["tied"]), model.state_dict())


def test_tensor_of_several_parameters_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    source, state = save(tmp_path / "hf"), tiny_llama().state_dict()
    for path in source.glob("model*"):
        path.unlink()
    for gate in [name for name in state if ".gate_proj." in name]:
        fused = torch.cat([state.pop(gate), state.pop(gate.replace("gate", "up"))])
        state[gate.replace("gate", "gate_up")] = fused
    save_file(state, source / "model.safetensors")
    rule = WeightConverter("gate_up_proj", ["gate_proj", "up_proj"], operations=[Chunk(dim=0)])
    monkeypatch.setattr(loaded_weights, "_mapping", lambda model: [rule])
    read, reads = loaded_weights.read_tensor, Counter[str]()

    def counted(files: Any, tensor: Any) -> torch.Tensor:
        reads[tensor.name] += 1
        return read(files, tensor)

    monkeypatch.setattr(loaded_weights, "read_tensor", counted)
    convert(source, tmp_path / "out")
    fused = [name for name in state if "gate_up" in name]
    assert {name: reads[name] for name in fused} == dict.fromkeys(fused, 1)
    assert_equal(loaded(tmp_path / "out", tiny_llama), tiny_llama().state_dict())
    assert verify(source).ok


def test_folder_without_config_keeps_its_names(tmp_path: Path) -> None:
    source = save(tmp_path / "hf")
    (source / "config.json").unlink()
    done = convert(source, tmp_path / "out")
    assert [problem.code for problem in done.problems] == ["FSDP-N475"]
    assert_equal(loaded(tmp_path / "out", tiny_llama), tiny_llama().state_dict())


def _add(source: Path, **values: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda source: _add(source, quantization_config={"bits": 4}), "FSDP-E445"),
        (lambda source: _add(source, hidden_size=16), "FSDP-E479"),
        (lambda source: _add(source, num_hidden_layers=4), "FSDP-E477"),
        (lambda source: next(source.glob("model-00001*")).unlink(), "FSDP-E4"),
    ],
    ids=["quantized", "shapes", "layers", "missing file"],
)
def test_folder_from_which_no_run_starts_is_refused(change: Any, code: str, tmp_path: Path) -> None:
    source = save(tmp_path / "hf")
    change(source)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=code):
        convert(source, tmp_path / "out")
    assert tree(tmp_path) == before


def test_adapter_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"--fold-adapter.*FSDP-E445"):
        convert(tmp_path / "adapter", tmp_path / "out")


def test_output_that_exists_needs_force(tmp_path: Path) -> None:
    source, out = save(tmp_path / "hf"), tmp_path / "out"
    convert(source, out)
    with pytest.raises(CheckpointError, match="FSDP-E481"):
        convert(source, out)
    convert(source, out, force=True)
    assert_equal(loaded(out, tiny_llama), tiny_llama().state_dict())
