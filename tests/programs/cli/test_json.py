"""The JSON output of every verb, compared with docs/json.schema.json."""

import json

import jsonschema
import pytest

from hf_fsdp_plugin.cli.main import VERBS
from tests.support import damages
from tests.support.json_schema import SCHEMA, assert_valid

GOOD = (
    "distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2\n"
    "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
)
BAD = GOOD + "  fsdp_offload_param: true\n  fsdp_sharding_strategy: 9\n"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


def validate(verb: str, printed: str) -> dict:
    tree = json.loads(printed)
    assert_valid(verb, tree)
    return tree


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deepspeed = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "gradient_clipping": 1}'
    texts = {"good.yaml": GOOD, "bad.yaml": BAD, "broken.yaml": "a: [", "train.py": "1", "ds.json": deepspeed}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_schema_is_valid_and_has_every_verb():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(VERBS) - set(SCHEMA["$defs"]) == {"schema", "completion", "help"}  # these print no such object


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ("check good.yaml", 0),
        ("check bad.yaml --set nonsense=1", 1),
        ("check broken.yaml", 1),
        ("check none.yaml", 2),
        ("check good.yaml bad.yaml", 1),
        ("check --fsdp full_shard --world-size 4", 0),
        ("check good.yaml --model none/such", 1),
        ("convert good.yaml", 0),
        ("convert ds.json", 1),
        ("convert none.json", 2),
        ("plan good.yaml --model llama --seq-len 16", 0),
        ("plan good.yaml --model llama --seq-len 99999", 1),
        ("plan --advise good.yaml --model llama --seq-len 16 --global-batch 4 --gpu-memory 80GB", 0),
        ("plan --advise good.yaml --model llama --seq-len 16 --gpu-memory 1MiB", 1),
        ("migrate good.yaml", 0),
        ("migrate good.yaml --to 2", 1),
        ("migrate none.yaml", 2),
        ("launch --dry_run --config_file good.yaml train.py", 0),
        ("launch --dry_run --config_file bad.yaml train.py", 1),
        ("launch --dry_run --config_file none.yaml train.py", 2),
        ("explain", 0),
        ("explain E701", 0),
    ],
)
def test_output_has_the_schema(hf_fsdp, folder, argv, code):
    verb, *rest = argv.split()
    found, out, _ = hf_fsdp(verb, "--json", *rest)
    assert (found, validate(verb, out).get("ok", True)) == (code, code == 0)


@pytest.mark.parametrize("verb", ["check", "launch"])
def test_plan_has_the_schema(hf_fsdp, folder, verb):
    argv = {"check": ["good.yaml"], "launch": ["--dry_run", "--config_file", "good.yaml"]}[verb]
    script = ["train.py"] if verb == "launch" else []
    code, out, _ = hf_fsdp(verb, "--json", "--model", "llama", *argv, *script)
    assert code == 0 and len(validate(verb, out)["plan"]["units"]) == 5


def test_checkpoints_have_the_schema(hf_fsdp, folder, local):
    assert validate("inspect", hf_fsdp("inspect", "--json", "--parameters", "--optimizer", local)[1])["complete"]
    assert validate("inspect", hf_fsdp("inspect", "--json", local.parent)[1])["newest_complete"] == str(local)
    assert validate("inspect", hf_fsdp("inspect", "--json", folder / "llama")[1])["complete"] is False
    assert validate("watch", hf_fsdp("watch", "--json", local.parent)[1])["checkpoints"][0]["complete"]
    assert validate("watch", hf_fsdp("watch", "--json", folder / "llama")[1])["ok"] is False
    assert validate("verify", hf_fsdp("verify", "--json", local)[1])["ok"]
    assert validate("verify", hf_fsdp("verify", "--json", local.parent)[1])["checkpoints"][0]["ok"]
    assert validate("merge", hf_fsdp("merge", "--json", local, "merged")[1])["ok"]
    assert validate("merge", hf_fsdp("merge", "--json", local, "merged")[1])["ok"] is False  # not empty
    assert validate("export", hf_fsdp("export", "--json", local.parent, "exported")[1])["ok"]
    damages.flip(local / "trainer_state.json", 0)
    assert validate("verify", hf_fsdp("verify", "--json", local)[1])["ok"] is False


@pytest.mark.parametrize("verb", ["inspect", "verify", "merge", "export", "watch"])
def test_missing_folder_exits_2_without_output(hf_fsdp, folder, verb):
    out_folder = ["out"] if verb in ("merge", "export") else []
    for name, reason in (("none", "does not exist"), ("good.yaml", "is not a folder")):
        code, out, err = hf_fsdp(verb, "--json", name, *out_folder)
        assert (code, out, err.count("\n")) == (2, "", 1) and f"{verb}: {name} {reason}" in err
