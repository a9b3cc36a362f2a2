"""``hf-fsdp plan``: the answer, the tables, JSON, and bad input."""

import json
from dataclasses import asdict

import pytest
import yaml

from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.common import parse_bytes
from hf_fsdp_plugin.tools.plan.advise import num_machines_of
from hf_fsdp_plugin.tools.plan.estimate.machines import machine_named

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_hidden_layers": 6, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 512,
}  # fmt: skip
YAML = """\
distributed_type: FSDP
num_processes: 4
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
NO_ARCHITECTURE = {"hidden_size": 32}
CUSTOM_CODE = {
    "model_type": "foo", "architectures": ["FooModel"], "auto_map": {"AutoConfig": "configuration_foo.FooConfig"},
}  # fmt: skip


@pytest.fixture
def plan(hf_fsdp, tmp_path, monkeypatch):
    """Run ``hf-fsdp plan`` in a folder with a small Llama and a config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name, config in (("llama", LLAMA), ("unnamed", NO_ARCHITECTURE), ("custom", CUSTOM_CODE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "custom/configuration_foo.py").write_text("raise AssertionError('custom code was run')")
    (tmp_path / "fsdp.yaml").write_text(YAML)

    def run(*argv: str):
        return hf_fsdp("plan", *(word for text in argv for word in text.split()))

    return run


def codes_of(result) -> set[str]:
    return {problem["code"] for problem in json.loads(result[1])["problems"] if problem["severity"] == "error"}


def test_answer_comes_first_and_exit_code_says_it(plan):
    code, out, _ = plan("--model llama --config fsdp.yaml --seq-len 128 --gpu-memory 80GB")
    assert code == 0 and out.startswith("It fits: each rank needs ")
    code, out, _ = plan("--model llama --config fsdp.yaml --seq-len 128 --gpu-memory 2MiB")
    assert code == 1 and out.startswith("It does not fit: each rank needs ")
    assert "activations" in out and "peak in the" in out


def test_json_has_the_kinds_of_the_peak(plan):
    code, out, _ = plan("--model llama fsdp.yaml --seq-len 128 --json")
    found = json.loads(out)
    rank = found["per_rank"]
    assert code == 0 and found["method"] == "closed_form" and found["fits"] is None
    assert sum(size for kind, size in rank.items() if kind not in ("peak_bytes", "host_bytes")) == rank["peak_bytes"]
    assert found["peak_at"] in {moment["where"] for moment in found["timeline"]}


def test_world_size_overrides_num_processes(plan):
    sizes = [
        json.loads(plan(f"--model llama fsdp.yaml --seq-len 128 --json {flag}")[1])["per_rank"]["params_bytes"]
        for flag in ("", "--world-size 2")
    ]
    assert sizes[1] == 2 * sizes[0]


def test_without_a_config_full_shard_in_bf16_is_planned(plan):
    found = json.loads(plan("--model llama --world-size 2 --json")[1])
    assert (found["plan"]["strategy"], found["plan"]["precision"]["param"]) == ("full_shard", "bf16")
    assert found["workload"]["seq_len"] == 512  # the model's maximum


def test_flags_of_launch_are_accepted(plan):
    found = json.loads(plan("--model llama fsdp.yaml --fsdp_version 1 --mixed_precision no --json")[1])
    assert (found["plan"]["backend"], found["plan"]["precision"]["param"]) == ("fsdp1", "unchanged")


@pytest.mark.parametrize(
    ("argv", "codes"),
    [
        ("--model none/such", {"FSDP-E709"}),
        ("--model custom", {"FSDP-E720"}),
        ("--model unnamed", {"FSDP-E709"}),
        ("--model llama --seq-len 513", {"FSDP-E724"}),
        ("--model llama --global-batch 7", {"FSDP-E725"}),
        ("--model llama --global-batch 8 --accumulation 3", {"FSDP-E725"}),
        ("--model llama --advise", {"FSDP-E726"}),
    ],
)
def test_bad_input_is_a_problem(plan, argv, codes):
    result = plan(argv, "fsdp.yaml --json")
    assert result[0] == 1 and codes_of(result) == codes


@pytest.mark.parametrize("flag", ["--micro-batch 0", "--seq-len many", "--gpu-memory lots", "--world-size 1e9"])
def test_invalid_size_is_wrong_usage(plan, flag):
    assert plan(f"--model llama fsdp.yaml {flag}")[0] == 2


def test_all_problems_are_reported_at_once(plan):
    result = plan("--model custom fsdp.yaml --global-batch 7 --set sharding.strategy=9 --json")
    assert {"FSDP-E720", "FSDP-E725"} < codes_of(result) and len(codes_of(result)) == 3


def test_host_memory_is_compared_with_the_machine(plan, tmp_path):
    machine = asdict(machine_named("h100-sxm"))
    for memory, warns in ((100e3, True), (1e9, False), (0, False)):
        (tmp_path / "machine.json").write_text(json.dumps({**machine, "host_memory_bytes": memory}))
        argv = "--model llama fsdp.yaml --seq-len 64 --machine machine.json --set checkpoint.asynchronous=true"
        code, out, _ = plan(f"{argv} --json")
        found = json.loads(out)
        assert code == 0 and any(problem["code"] == "FSDP-W814" for problem in found["problems"]) == warns
        assert found["host_memory"]["staging_bytes"] == found["per_rank"]["host_bytes"] > 0
        assert (found["host_memory"]["ranks_per_machine"], found["host_memory"]["machine_bytes"]) == (4, memory or None)
    text = plan(argv)[1]
    assert "copies of asynchronous saves" in text and "on a machine with 4 ranks" in text


def test_global_batch_sets_the_accumulation(plan):
    found = json.loads(plan("--model llama fsdp.yaml --micro-batch 2 --global-batch 24 --json")[1])
    assert found["workload"]["accumulation"] == 3


def test_adapters_are_planned_with_frozen_weights(plan):
    whole, lora, packed = (
        json.loads(plan(f"--model llama fsdp.yaml --seq-len 64 --json {flags}")[1])["per_rank"]
        for flags in ("", "--lora-rank 4", "--qlora")
    )
    assert lora["optimizer_bytes"] < whole["optimizer_bytes"] / 2
    assert packed["params_bytes"] < lora["params_bytes"]


def test_missing_model_is_wrong_usage(plan):
    assert plan("fsdp.yaml")[0] == 2
    assert plan("fsdp.yaml --config fsdp.yaml --model llama")[0] == 2


def test_advice_ends_with_a_config_that_check_accepts(plan, hf_fsdp, tmp_path):
    code, out, _ = plan("--advise --model llama fsdp.yaml --seq-len 128 --global-batch 16 --gpu-memory 80GB")
    assert code == 0 and out.startswith("Best: ")
    (tmp_path / "best.yaml").write_text(out[out.index("compute_environment:") :])
    code, printed, _ = hf_fsdp("check", "best.yaml", "--model", "llama", "--json")
    settings = json.loads(printed)["settings"]
    assert code == 0 and settings["launch.num_processes"]["value"] == 4
    assert settings["precision.param"]["value"] == "bf16"


def test_advice_is_written_as_a_page(plan, tmp_path):
    argv = "--advise --model llama fsdp.yaml --seq-len 128 --global-batch 16 --gpu-memory 80GB --html page.html"
    code, out, _ = plan(argv)
    assert code == 0 and "written: page.html" in out
    page, config = (tmp_path / "page.html").read_text(), out[out.index("compute_environment:") :].strip()
    assert "Settings for LlamaForCausalLM on 4 ranks" in page and config in page
    assert plan(argv)[0] == 1  # the page exists


def test_advice_without_a_fitting_row_exits_1(plan):
    code, out, _ = plan("--advise --model llama fsdp.yaml --seq-len 512 --gpu-memory 1MiB")
    assert code == 1 and out.startswith("Nothing fits into ") and "compute_environment" not in out


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80 GB", 80 * 10**9),
        ("80GB", 80 * 10**9),
        ("80", 80 * 10**9),
        ("80GiB", 80 << 30),
        ("81559 MiB", 81559 << 20),
        ("79.6gib", int(79.6 * (1 << 30))),
        ("80 G", 80 * 10**9),
        ("0", None),
        ("-80GB", None),
        ("80 apples", None),
        ("1e9", None),
        ("", None),
        ("9" * 40, None),
    ],
)
def test_memory_sizes_are_read_as_written(text, size):
    assert parse_bytes(text) == size


def test_time_needs_a_machine(plan):
    without = json.loads(plan("--model llama --config fsdp.yaml --seq-len 128 --json")[1])
    assert without["step_seconds"] is without["tokens_per_second"] is without["machine"] is None
    given = json.loads(plan("--model llama --config fsdp.yaml --seq-len 128 --machine h100-sxm --json")[1])
    assert given["step_seconds"] > 0
    assert given["tokens_per_second"] == pytest.approx(4 * 128 / given["step_seconds"])
    assert "h100-sxm" in given["machine"]


def test_unknown_machine_is_a_problem(plan):
    result = plan("--model llama --config fsdp.yaml --seq-len 128 --machine h100 --json")
    assert result[0] == 1
    assert codes_of(result) == {"FSDP-E830"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ('"num_attention_heads": 7', "attention heads (7)"),
        ('"hidden_size": ', "not a valid JSON"),
    ],
)
def test_wrong_sizes_of_a_config_are_named_once(plan, tmp_path, changed, expected):
    content = json.dumps(LLAMA)[:-1] + f", {changed}}}"
    (tmp_path / "llama/config.json").write_text(content)
    code, _, err = plan("--model llama --world-size 2")
    assert code == 1 and expected in err and "FSDP-E709" in err
    assert err.count("config.json") - err.count("llama/config.json") == 1  # one piece of advice


def test_empty_model_is_refused(hf_fsdp):
    assert "name of the model is empty" in hf_fsdp("plan", "--model", "", "--world-size", "2")[2]


@pytest.mark.parametrize(
    ("written", "world_size", "machine", "machines"),
    [
        ("", 8, None, 1),
        ("", 16, None, 2),
        ("", 12, None, 2),
        ("", 13, None, 13),
        ("", 4, "h100-sxm", 1),
        ("", 32, "h100-sxm", 4),
        ("num_processes: 16\nnum_machines: 4", 16, "h100-sxm", 4),
        ("num_processes: 16\nnum_machines: 4", 32, "h100-sxm", 8),
        ("num_processes: 8\nnum_machines: 1", 16, None, 2),
        ("num_machines: 3", 24, None, 3),
    ],
)
def test_config_has_the_machines_of_the_world(written, world_size, machine, machines):
    overrides = {
        f"launch.{key}": int(value) for key, _, value in (line.partition(":") for line in written.split("\n") if line)
    }
    spec = load_spec(overrides={"launch.distributed_type": "FSDP", **overrides}, environ={})
    assert num_machines_of(spec, world_size, machine_named(machine) if machine else None) == machines


def test_advised_config_of_several_machines_is_valid(plan):
    words = "--advise --model llama --world-size 16 --seq-len 64 --global-batch 32 --gpu-memory 80GB --json"
    text = json.loads(plan(words)[1])["config"]
    config = yaml.safe_load(text)
    assert (config["num_machines"], config["num_processes"], config["machine_rank"]) == (2, 16, 0)
    assert config["main_process_ip"] == "ADDRESS" and config["main_process_port"] == 29500
    assert "# on the other machines: 1 to 1" not in text and "# on the other machine: 1" in text


def test_pictures_are_written_and_not_overwritten(plan, tmp_path):
    argv = "--model llama --config fsdp.yaml --seq-len 128 --html plan.html --json"
    assert plan(argv)[0] == 0
    page = (tmp_path / "plan.html").read_text()
    again = plan(argv)
    assert again[0] == 1
    assert codes_of(again) == {"FSDP-E833"}
    assert plan(f"{argv} --force --machine h100-sxm")[0] == 0
    assert (tmp_path / "plan.html").read_text() != page


def test_picture_in_a_missing_folder_is_a_problem(plan):
    result = plan("--model llama --config fsdp.yaml --seq-len 128 --html nowhere/plan.html --json")
    assert codes_of(result) == {"FSDP-E835"}
