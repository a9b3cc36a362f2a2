"""No damage to a checkpoint goes unnoticed, and what is said leads to the file and the parameter."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import saved
import torch

from hf_fsdp_plugin.checkpoint.checking.checksums import NotAnArchive, crc_file, stored_entries
from hf_fsdp_plugin.checkpoint.checking.verify import Verdict, verify
from hf_fsdp_plugin.checkpoint.formats.manifest import to_text
from hf_fsdp_plugin.checkpoint.formats.manifest_reader import read_manifest
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.cli.main import main

FILES = [
    "fsdp_manifest.json",
    "optimizer_local/0_rank0.safetensors",
    "optimizer_local/0_rank1.safetensors",
    "pytorch_model_fsdp_local/0_rank0.safetensors",
    "pytorch_model_fsdp_local/0_rank1.safetensors",
    "trainer_state.json",
]


@pytest.fixture
def local(tmp_path) -> Path:
    return saved.local_checkpoint(tmp_path / "checkpoint-20")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return saved.tiny_llama()


@pytest.fixture(scope="module")
def stock_once(tmp_path_factory, model) -> Path:
    return saved.stock_checkpoint(tmp_path_factory.mktemp("stock") / "checkpoint-7", model)


@pytest.fixture
def stock(tmp_path, stock_once) -> Path:
    return Path(shutil.copytree(stock_once, tmp_path / "checkpoint-7"))


@pytest.fixture
def hf(tmp_path, model) -> Path:
    """A Hugging Face folder with a manifest."""
    folder = tmp_path / "final"
    model.save_pretrained(folder)
    parameters = {name: ("float32", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    saved.write_manifest(folder, kind="full", world_size=1, parameters=parameters)
    return folder


def errors(verdict: Verdict) -> list[str]:
    return [str(problem) for problem in verdict.problems if problem.severity == "error"]


def notes(verdict: Verdict) -> list[str]:
    return [str(problem) for problem in verdict.problems if problem.severity == "note"]


def only_error(folder: Path, **options) -> str:
    found = errors(verify(folder, **options))
    assert len(found) == 1, found
    return found[0]


def test_a_whole_checkpoint_is_verified_to_its_last_byte(local):
    verdict = verify(local)
    assert verdict.ok and not errors(verdict)
    sizes = [path.stat().st_size for path in local.rglob("*") if path.is_file() and path.name != MANIFEST_NAME]
    assert (verdict.num_files, verdict.num_bytes) == (len(sizes), sum(sizes))


def test_these_are_all_the_files_that_are_damaged_below(local):
    assert sorted(path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()) == FILES


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("file", FILES)
def test_a_random_byte_flipped_in_any_file_is_found(local, file, seed):
    path = local / file
    saved.flip(path, random.Random(seed).randrange(path.stat().st_size))
    verdict = verify(local)
    assert not verdict.ok and any(file in text for text in errors(verdict))


def test_a_byte_flipped_in_a_tensor_names_the_parameter(local):
    manifest = read_manifest(local)
    assert manifest is not None
    tried = 0
    for record in manifest.files:
        whole = (local / record.path).read_bytes()
        for piece in record.ranges:
            saved.flip(local / record.path, random.Random(piece.start).randrange(piece.start, piece.stop))
            text = next(text for text in errors(verify(local)) if record.path in text)
            assert f"bytes {piece.start:,} to {piece.stop:,} are not what was saved" in text
            assert (f"they hold {piece.name}." if piece.name else "they hold no tensor.") in text
            (local / record.path).write_bytes(whole)
            tried += bool(piece.name)
    assert tried == 8


def test_much_damage_in_one_file_is_one_problem(local):
    manifest = read_manifest(local)
    assert manifest is not None
    record = next(record for record in manifest.files if record.path == FILES[3])
    for piece in record.ranges[-2:]:
        saved.flip(local / record.path, piece.start)
    assert "2 of 3 stretches (the first: bytes" in only_error(local)
    assert "they hold embed.weight, norm.weight." in only_error(local)


@pytest.mark.parametrize("file", FILES[1:])
def test_a_file_that_is_cut_short_is_found(local, file):
    path = local / file
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    text = only_error(local)
    assert f"{file}: has {size - 1:,} bytes; {size:,} were saved" in text
    assert ("it held norm.weight" in text) == file.endswith("safetensors")


def test_a_file_that_has_grown_is_found(local):
    with (local / FILES[5]).open("ab") as file:
        file.write(b"\n")
    assert "trainer_state.json: has 20 bytes; 19 were saved" in only_error(local)


def test_two_swapped_files_are_found_and_told_apart(local):
    first, second = (local / "optimizer_local" / f"0_rank{rank}.safetensors" for rank in range(2))
    first.rename(local / "other")
    second.rename(first)
    (local / "other").rename(second)
    found = errors(verify(local))
    assert len(found) == 2
    assert "The file is what optimizer_local/0_rank1.safetensors should be." in found[0]
    assert "The file is what optimizer_local/0_rank0.safetensors should be." in found[1]


@pytest.mark.parametrize("file", FILES[1:])
def test_a_missing_file_is_found_with_what_it_held(local, file):
    (local / file).unlink()
    text = only_error(local)
    assert f"{file}: is missing" in text
    assert ("it held embed.weight, norm.weight." in text) == file.endswith("safetensors")


def test_a_folder_in_a_file_s_place_is_a_missing_file(local):
    (local / FILES[5]).unlink()
    (local / FILES[5]).mkdir()
    assert "trainer_state.json: is missing" in only_error(local)


def test_extra_files_are_noted(local):
    (local / "notes").mkdir()
    (local / "notes" / "a.txt").write_text("mine")
    (local / "extra.bin").write_bytes(b"x")
    verdict = verify(local)
    assert verdict.ok
    assert any("the manifest does not know extra.bin, notes: not verified" in text for text in notes(verdict))


def test_a_manifest_from_the_future_is_told(local):
    path = local / MANIFEST_NAME
    path.write_text(path.read_text().replace('"version": 1', '"version": 2', 1))
    assert "has version 2; this hf_fsdp_plugin reads up to 1" in only_error(local)


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname"])
def test_a_manifest_that_names_a_file_elsewhere_is_not_followed(local, path):
    manifest = read_manifest(local)
    assert manifest is not None
    files = (replace(manifest.files[0], path=path), *manifest.files[1:])
    (local / MANIFEST_NAME).write_text(to_text(replace(manifest, files=files)))
    assert f'"{path}" was found, a file\'s path below the checkpoint expected' in only_error(local)


def test_a_link_in_a_file_s_place_is_not_followed(local, tmp_path):
    (local / FILES[5]).rename(tmp_path / "state")
    (local / FILES[5]).symlink_to(tmp_path / "state")
    assert "trainer_state.json: is a symbolic link" in only_error(local)


def test_no_json_is_told(local):
    (local / MANIFEST_NAME).write_text("not JSON")
    assert "fsdp_manifest.json: is no JSON" in only_error(local)


def test_a_half_written_folder_is_told(local):
    (local / MANIFEST_NAME).unlink()
    found = errors(verify(local))
    assert len(found) == 2
    assert all("but no fsdp_manifest.json: the save was not finished" in text for text in found)


def test_a_manifest_of_other_parameters_is_found(local):
    manifest = read_manifest(local)
    assert manifest is not None
    parameters = {"embed.weight": ("bfloat16", (4, 2)), "norm.weight": ("float32", (3,)), "more": ("float32", (1,))}
    (local / MANIFEST_NAME).write_text(to_text(replace(manifest, parameters=parameters, ties=())))
    said = "\n".join(errors(verify(local)))
    assert "1 of the 3 parameters of the manifest are not stored: more." in said
    assert "1 stored parameters are unknown to the manifest: head.weight." in said
    assert "embed.weight (float32 4×2 here, bfloat16 4×2 there)" in said
    assert "norm.weight (float32 2 here, float32 3 there)" in said
    assert "exp_avg of norm.weight (2 here, 3 there)" in said


def test_a_tensor_with_a_hole_is_found(local):
    path = local / FILES[3]
    data = path.read_bytes()
    moved = data.replace(rb"\"offsets\": [0, 0]", rb"\"offsets\": [2, 0]")
    assert moved != data
    path.write_bytes(moved)
    manifest = read_manifest(local)
    assert manifest is not None
    saved.write_manifest(local, parameters=manifest.parameters, ties=manifest.ties)
    assert "4 elements of 1 tensors are in none of its files; the first is 'embed.weight'" in only_error(local)


def test_a_part_leads_to_the_checkpoint_that_it_belongs_to(local):
    saved.flip(local / FILES[5], 3)
    verdict = verify(local / "pytorch_model_fsdp_local")
    assert verdict.checkpoint == local and "trainer_state.json" in errors(verdict)[0]


# Against the config.


def test_names_and_shapes_are_compared_with_the_config_s_model(hf):
    verdict = verify(hf)
    assert verdict.problems == ()


def test_the_config_of_a_larger_model_is_found(hf):
    saved.tiny_llama(vocab_size=48).config.save_pretrained(hf)
    said = "\n".join(errors(verify(hf)))
    assert "2 parameters have other shapes than those of the LlamaForCausalLM of its config.json" in said
    assert "model.embed_tokens.weight (32×16 here, 48×16 there)" in said


def test_the_config_of_another_architecture_is_found(hf):
    from transformers import GPT2Config

    GPT2Config(n_embd=16, n_layer=1, n_head=2, architectures=["GPT2LMHeadModel"]).save_pretrained(hf)
    said = "\n".join(errors(verify(hf)))
    assert "15 of the 17 parameters of the GPT2LMHeadModel of its config.json are missing: transformer." in said
    assert "parameters are unknown to the GPT2LMHeadModel of its config.json: " in said


def test_without_the_config_check_another_config_is_only_a_changed_file(hf):
    (hf / "config.json").write_text("{}")
    assert "config.json: has 2 bytes" in only_error(hf, config_check=False)


def test_a_config_that_is_no_json_is_found(hf):
    (hf / "config.json").write_text("{")
    assert any("config.json: cannot be read" in text for text in errors(verify(hf)))


def test_a_model_with_code_of_its_own_is_noted(hf):
    config = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "code.Own"}, "architectures": ["Own"]}
    (hf / "config.json").write_text(json.dumps(config))
    (hf / MANIFEST_NAME).unlink()
    verdict = verify(hf)
    assert verdict.ok and any("names and shapes were not compared with a model" in text for text in notes(verdict))


def test_tied_weights_are_stored_once(tmp_path):
    saved.tiny_llama(tied=True).save_pretrained(tmp_path)
    assert verify(tmp_path).ok


def test_old_names_of_a_hugging_face_folder_are_known(tmp_path):
    """Experts are stored one by one, and are one parameter in the model."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert errors(verify(tmp_path)) == []
    config.num_hidden_layers = 2
    config.save_pretrained(tmp_path)
    assert "are missing: model.layers.1." in only_error(tmp_path)


# Without a manifest.


def test_a_stock_checkpoint_is_verified_as_far_as_its_checksums_go(stock):
    verdict = verify(stock)
    assert verdict.ok
    (note,) = notes(verdict)
    covered = int(note.partition(" of ")[0].rpartition(" ")[2].replace(",", ""))
    assert "there is no fsdp_manifest.json" in note and 70_000 < covered < verdict.num_bytes


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_every_tensor_of_a_stock_checkpoint_is_found_when_a_byte_of_it_flips(stock, part):
    path = stock / part / "__0_0.distcp"
    whole = path.read_bytes()
    data = [entry for entry in stored_entries(path) if entry.stop - entry.start >= 1024]
    named = set()
    for entry in random.Random(0).sample(data, 4):
        saved.flip(path, random.Random(entry.start).randrange(entry.start, entry.stop))
        text = only_error(stock, config_check=False)
        assert f"{part}/__0_0.distcp: bytes {entry.start:,} to {entry.stop:,} are not what was saved" in text
        named.add(text.partition("they hold ")[2].partition(". ")[0])
        path.write_bytes(whole)
    assert len(named) == 4 and all("model." in name or "lm_head." in name for name in named)


@pytest.mark.parametrize("length", [-1, -300, 10_000, 4])
def test_a_stock_file_that_is_cut_short_is_found(stock, length):
    path = stock / "pytorch_model_fsdp_0" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:length])
    verdict = verify(stock, config_check=False)
    assert any("__0_0.distcp" in text for text in errors(verdict))


def test_a_flipped_byte_beside_the_model_is_found(stock):
    entry = next(iter(stored_entries(stock / "scheduler.pt")))
    saved.flip(stock / "scheduler.pt", entry.start)
    assert "scheduler.pt: bytes" in only_error(stock)


def test_archives_without_checksums_are_not_called_damaged(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(100)}, tmp_path / "a.bin")
    finally:
        torch.serialization.set_crc32_options(before)
    torch.save({"a": torch.ones(100)}, tmp_path / "b.bin")
    without, with_them = (list(stored_entries(tmp_path / name)) for name in ("a.bin", "b.bin"))
    assert {entry.crc for entry in without} == {0}
    assert all(entry.crc == crc_file(tmp_path / "b.bin", entry.start, entry.stop) for entry in with_them)


def test_bytes_between_two_archives_belong_to_none(tmp_path):
    torch.save({"a": torch.ones(100)}, tmp_path / "a.bin")
    data = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "two").write_bytes(data + data)
    assert len(list(stored_entries(tmp_path / "two"))) == 2 * len(list(stored_entries(tmp_path / "a.bin")))
    (tmp_path / "torn").write_bytes(data + b"gap" + data)
    with pytest.raises(NotAnArchive, match=f"before {len(data) + 3:,} are no whole zip archive"):
        list(stored_entries(tmp_path / "torn"))


@pytest.mark.parametrize("seed", range(200))
def test_a_garbled_archive_never_crashes_the_walk(tmp_path, seed):
    chance = random.Random(seed)
    torch.save({"a": torch.ones(8)}, tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    for _ in range(chance.randrange(1, 6)):
        data[chance.randrange(len(data) - 700, len(data))] = chance.choice([0, 255, chance.randrange(256)])
    (tmp_path / "a").write_bytes(data)
    try:
        for entry in stored_entries(tmp_path / "a"):
            assert entry.start >= 0 and isinstance(crc_file(tmp_path / "a", entry.start, entry.stop), int)
    except NotAnArchive as error:
        assert error.stop == len(data)


# The verb.


def test_the_verb_exits_0_and_tells_how_much_it_checked(local, capsys):
    assert main(["verify", str(local)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{local}: whole; 5 files, ") and "note: has no config.json" in err


def test_the_verb_exits_1_and_complains_on_stderr(local, capsys):
    saved.flip(local / FILES[5], 0)
    assert main(["verify", str(local)]) == 1
    out, err = capsys.readouterr()
    assert "1 problem; 5 files" in out and "trainer_state.json: bytes 0 to 19 are not what was saved" in err


def test_the_verb_prints_one_json_object(local, capsys):
    saved.flip(local / FILES[3], -1)
    assert main(["verify", "--json", str(local)]) == 1
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert err == "" and said.keys() == {"ok", "checkpoint", "problems", "files", "bytes"}
    assert said["ok"] is False and said["checkpoint"] == str(local) and said["files"] == 5
    problem = next(problem for problem in said["problems"] if problem["severity"] == "error")
    assert problem["origin"] == str(local / FILES[3]) and "norm.weight" in problem["message"] and problem["fix"]


def test_the_verb_exits_2_for_what_is_no_folder_or_a_run(local, capsys):
    assert main(["verify", str(local / "nowhere")]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err
    assert main(["verify", str(local.parent)]) == 2
    assert f"is a run's folder. Name one of its checkpoints, such as {local}" in capsys.readouterr().err


def test_bytes_are_verified_without_torch(local):
    program = (
        "import sys; from hf_fsdp_plugin.cli.main import main\n"
        f"code = main(['verify', '--no-config-check', {str(local)!r}])\n"
        "loaded = {'torch', 'transformers', 'accelerate'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
