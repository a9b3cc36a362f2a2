"""Config files: all dialects in use, and files that are not a valid config."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from hf_fsdp_plugin.sources import config_tree
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec import load

DATA = Path(__file__).parents[2] / "data"
CONFIGS = Path(__file__).parents[3] / "configs"

BAD = {
    "a_sentence.yaml": (1, "FSDP-E009"),
    "binary.yaml": (1, "FSDP-E006"),
    "class_with_blank.yaml": (4, "FSDP-E144"),
    "deepspeed_in_fsdp.yaml": (4, "FSDP-E064"),
    "deepspeed_without_section.yaml": (1, "FSDP-E120"),
    "empty.yaml": (None, "FSDP-E008"),
    "fp16_on_cpu.yaml": (3, "FSDP-E147"),
    "key_twice.yaml": (4, "FSDP-E013"),
    "list.yaml": (1, "FSDP-E009"),
    "mesh_against_world.yaml": (3, "FSDP-E128"),
    "misspelt.yaml": (2, "FSDP-E020"),
    "multi_gpu_with_fsdp_config.yaml": (1, "FSDP-E123"),
    "nan_threshold.yaml": (2, "FSDP-E101"),
    "not_utf8.yaml": (1, "FSDP-E005"),
    "not_yaml.yaml": (1, "FSDP-E006"),
    "python_tag.yaml": (1, "FSDP-E011"),
    "ram_efficient_without_sync.yaml": (4, "FSDP-E149"),
    "tabs.yaml": (3, "FSDP-E006"),
    "pipeline_parallel.yaml": (8, "FSDP-E122"),
    "two_documents.yaml": (2, "FSDP-E006"),
}


@pytest.fixture
def assess(assess_converted):
    return assess_converted


def test_every_bad_file_is_tested():
    assert {path.name for path in (DATA / "bad").iterdir()} == set(BAD)


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_file_is_one_error_with_line(problems, name):
    line, code = BAD[name]
    path = DATA / "bad" / name
    errors = problems(path)
    assert (errors[0].code, errors[0].origin.source, errors[0].origin.line) == (code, str(path), line)
    assert len(errors) == (3 if name == "misspelt.yaml" else 1)


@pytest.mark.parametrize(
    "path", [*sorted((DATA / "good").iterdir()), *sorted(CONFIGS.glob("seed_*.yaml"))], ids=lambda p: p.name
)
def test_every_dialect_has_no_errors(codes, path):
    assert codes(path) == []


def test_origin_has_file_line_key_and_value(assess):
    path = CONFIGS / "seed_hf_guide.yaml"
    assert str(assess(path).spec.origin("sharding.strategy")) == f"{path}:12 fsdp_sharding_strategy=1"


def test_json_with_tabs_has_line_numbers(assess):
    spec = assess(DATA / "good" / "only_fsdp_config.json").spec
    assert spec.origin("prefetch.forward").line == 3


@pytest.mark.parametrize("shape", [lambda part: part, lambda part: {"fsdp_config": part}])
def test_fsdp_config_alone_equals_whole_file(assess, shape, tmp_path):
    part = {"fsdp_sharding_strategy": 2, "fsdp_offload_params": True}
    path = tmp_path / "c.json"
    path.write_text(json.dumps(shape(part)))
    for config in (shape(part), path):
        spec = assess(config).spec
        assert (spec.sharding.strategy, spec.offload.params, spec.fsdp.version) == ("shard_grad_op", True, 1)


@pytest.mark.parametrize(
    ("config", "code", "spelling", "part"),
    [
        ({"distributed_type": "FSDP", "parallelism_config": 2}, "FSDP-E022", "parallelism_config", "Indent"),
        ({"base_model": "m", "fsdp_vresion": 2}, "FSDP-E020", "fsdp_vresion", "fsdp_version"),
        ({"fsdp_config": {"fsdp_state_dict_config": {"x": 1}}}, "FSDP-E025", "fsdp_state_dict_config", "objects"),
        ({"fsdp_config": {"final_state_dict_type": "FULL"}}, "FSDP-W026", "final_state_dict_type", "axolotl"),
        ({"distributed_type": "FSDP", "fsdp_offload_params": True}, "FSDP-E020", "fsdp_offload_params", "fsdp_config"),
        ({"distributed_type": "FSDP", "_description": "ours"}, "FSDP-N027", "_description", "comment"),
        ({"base_model": "m", "fsdp_version": 2}, "FSDP-N067", "", "axolotl"),
    ],
)
def test_key_without_meaning_is_reported(assess, config, code, spelling, part):
    problem = assess(config).problems[0]
    assert (problem.code, problem.origin.spelling) == (code, spelling)
    assert part in str(problem)
    assert assess(config).ok is (problem.severity != "error")


def test_missing_file_directory_and_pipe_are_errors(codes, tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    assert codes(tmp_path / "no.yaml") == ["FSDP-E001"]
    assert codes(tmp_path) == codes(tmp_path / "pipe.yaml") == ["FSDP-E001"]


def test_unreadable_file_is_error(codes, tmp_path, monkeypatch):
    path = tmp_path / "secret.yaml"
    path.write_text("distributed_type: FSDP\n")
    for error in (PermissionError(), OSError("disk failure")):

        def fail(*_, reason=error):
            raise reason

        monkeypatch.setattr(Path, "open", fail)
        assert codes(path) == ["FSDP-E003"]


@pytest.mark.parametrize("content", [b"a: b\n" * 10_000_000, os.urandom(1 << 20) * 50], ids=["text", "noise"])
def test_large_file_is_rejected_before_parsing(codes, tmp_path, content, monkeypatch):
    parse = Mock()
    monkeypatch.setattr(config_tree, "parse_text", parse)
    path = tmp_path / "junk.yaml"
    path.write_bytes(content)
    assert codes(path) == ["FSDP-E004"]
    parse.assert_not_called()


@pytest.mark.parametrize("text", ["[" * 50_000, "{a: " * 50_000, "- " * 50_000, '{"a":' * 50_000, "? " * 50_000])
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_deep_nesting_is_one_error(codes, tmp_path, text, suffix):
    path = tmp_path / f"deep.{suffix}"
    path.write_text(text)
    assert codes(path)[0] in ("FSDP-E006", "FSDP-E004")
    assert len(codes(path)) == 1


def test_aliases_that_expand_without_end_are_rejected(codes, tmp_path):
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    assert codes(path) == ["FSDP-E004"]


def test_alias_is_its_value(assess, tmp_path):
    path = tmp_path / "alias.yaml"
    path.write_text("distributed_type: FSDP\nuse_cpu: &yes true\nfsdp_config:\n  fsdp_offload_params: *yes\n")
    assert assess(path).spec.offload.params


def test_dict_that_contains_itself_is_error():
    config: dict = {}
    config["fsdp_config"] = config
    (problem,) = load.assess(Sources(config=config, environ={})).problems
    assert problem.code == "FSDP-E055"


@pytest.mark.parametrize(
    "text", ["{{ x }}: 1", "fsdp_config: full_shard", "a: 2024-99-99", "x: " + "9" * 10_000, '"\\ud83d": 1']
)
def test_odd_yaml_is_one_error(codes, tmp_path, text):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    assert len(codes(path)) == 1


def test_training_script_file_is_read_for_fsdp(assess):
    first = assess(DATA / "good" / "axolotl_fsdp1.yaml").spec
    found = first.sharding.strategy, first.wrap.classes, first.params.use_orig
    assert found == ("full_shard", ("LlamaDecoderLayer",), False)
    assert (first.precision.param, first.activation.native) == ("bf16", True)
    second = assess(DATA / "good" / "axolotl_fsdp2.yaml").spec
    assert (second.fsdp.version, second.mesh.shard, second.activation.checkpointing) == (2, 4, "full")


def test_training_script_file_names_fsdp_config_file(assess, codes, tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("output_dir: x\nfsdp: full_shard auto_wrap\nfsdp_config: fsdp.json\n")
    assert codes(path) == ["FSDP-E001"]
    (tmp_path / "fsdp.json").write_text('{"_comment": "text", "offload_params": true}')
    spec = assess(path).spec
    assert spec.offload.params and spec.origin("offload.params").source == str(tmp_path / "fsdp.json")


@pytest.mark.parametrize(("value", "expected"), [("maybe", ["FSDP-E101"]), ("true", []), ("auto", []), ("no", [])])
def test_precision_flag_must_be_bool(codes, value, expected):
    assert codes({"base_model": "m", "fsdp_version": 2, "bf16": value}) == expected
