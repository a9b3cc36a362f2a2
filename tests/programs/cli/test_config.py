"""The part of tests/unit/cli/test_config.py that starts processes or computes for seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_fsdp_plugin.tools.config.questions import QUESTIONS
from tests.support.json_schema import assert_valid
from tests.support.matrices import slow
from tests.unit.cli.conftest import LLAMA
from tests.unit.cli.test_config import options, spec_of

MODEL = {"model": "llama", "gpu_memory": "40GB", "seq_len": "100", "optimizer": "sgd"}
EVERY_OPTION = [
    {
        **MODEL, "num_machines": "2", "gpus": "4", "machine_rank": "1", "main_process_ip": "node-0",
        "main_process_port": "1234", "precision": "fp16", "global_batch": "32", "micro_batch": "2",
        "sync_each_batch": "yes", "fsdp_version": "1", "strategy": "hybrid_shard_zero2",
        "group_size": "2", "wrap_policy": "transformer", "wrap_classes": "LlamaMLP", "offload": "yes",
        "checkpointing": "full", "activation_offload": "yes", "state_dict": "full", "ram_efficient_loading": "no",
    },
    {"wrap_policy": "size", "min_num_params": "77"},
]  # fmt: skip


def test_every_option_sets_its_answer(config, llama):
    # These are asked for only if the model does not fit without them.
    known = {question.name for question in QUESTIONS} - {"context_size", "offload_optimizer"}
    assert {name for answers in EVERY_OPTION for name in answers} == known
    shown = {"yes": True, "no": False}
    for number, answers in enumerate(EVERY_OPTION):
        out, _ = config("--yes", "-o", f"{number}.yaml", "--json", *options(answers))
        result = json.loads(out)
        found = {name: result["answers"][name] for name in answers}
        assert found == {
            name: shown.get(value, int(value) if value.isdecimal() else value) for name, value in answers.items()
        }
        # Each setting arrives in the file.
        spec = spec_of(f"{number}.yaml")
        for question in QUESTIONS:
            if question.setting and question.name in answers:
                value = spec.get(question.setting)
                assert (",".join(value) if isinstance(value, tuple) else value) == found[question.name], question.name


# GPU memory and FSDP version -> the recommended strategy and checkpointing; "" for a table without a recommendation.
RECOMMENDED = [
    slow("4GB", "1", ("no_shard", "none")),
    ("4GB", "2", ("shard_grad_op", "none")),  # stock Accelerate has no no_shard under FSDP2
    slow("1760MB", "2", ("full_shard", "full")),
    ("100MB", "2", ("full_shard", "none")),  # nothing fits: the general default
    ("", "2", ("full_shard", "none")),
]


@pytest.mark.parametrize(("memory", "version", "best"), RECOMMENDED)
def test_recommended_settings_fit_and_are_those_of_plan(config, llama, hf_fsdp, memory, version, best):
    larger = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 8000}
    Path("llama/config.json").write_text(json.dumps({**LLAMA, **larger, "max_position_embeddings": 512}))
    argv = ["--yes", "-o", "fsdp.yaml", "--model", "llama", "--gpus", "4", "--fsdp-version", version, "--json"]
    out, err = config(*argv, "--global-batch", "16", "--gpu-memory", memory)
    result = json.loads(out)
    assert_valid("config", result)
    found = result["settings"]
    assert (found["sharding.strategy"], found["activation.checkpointing"]) == best
    fits = memory not in ("100MB", "")
    assert ("Recommended" in err, "Nothing fits" in err) == (fits, memory == "100MB")
    assert "Predicted memory of these settings: " in err
    micro_batch = result["answers"]["micro_batch"]
    accumulation = 4 // micro_batch
    syncs = ["--sync-each-batch"] if result["answers"].get("sync_each_batch") else []
    limit = ["--gpu-memory", memory] if memory else []
    code, plan, _ = hf_fsdp(
        "plan", "--model", "llama", "fsdp.yaml", "--seq-len", "512", "--accumulation", accumulation, "--micro-batch",
        micro_batch, "--json", *syncs, *limit,
    )  # fmt: skip
    assert json.loads(plan)["per_rank"] == result["per_rank"] and code == (memory == "100MB")
    if (memory, version) == ("4GB", "2"):
        config(*argv, "--force", "--gpu-memory", memory, "--strategy", "full_shard")
        again, _ = config(*argv, "--force", "--gpu-memory", memory)
        assert json.loads(again)["settings"]["sharding.strategy"] == "full_shard"  # the value of the file


LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 1 << 17,
}  # fmt: skip


def test_context_axis_is_asked_for_where_nothing_else_fits(config, llama):
    Path("llama/config.json").write_text(json.dumps({**LLAMA, **LLAMA_8B}))
    long = ["--yes", "--model", "llama", "--gpus", "8", "--gpu-memory", "80GB", "--global-batch", "8", "--json"]
    out, err = config(*long, "-o", "long.yaml", "--seq-len", str(1 << 16))
    result = json.loads(out)
    size = result["answers"]["context_size"]
    assert size > 1 and "Recommended" in err and result["stock_limits"] == []
    mesh = spec_of("long.yaml").mesh
    assert (mesh.context, mesh.shard) == (size, 8 // size)
    # The ranks of the axis have the same samples.
    samples = result["answers"]["micro_batch"] * int(err.split("--gradient_accumulation_steps ")[1].split()[0])
    assert samples == size
    _, err = config(*long, "-o", "short.yaml", "--seq-len", "1024", "--context-size", "2", code=2)
    assert "FSDP-E763" in err
    _, err = config(*long, "-o", "odd.yaml", "--seq-len", str(1 << 16), "--context-size", "3", code=2)
    assert "3 does not divide the 8 GPUs" in err


def test_model_gives_classes_and_limits(config, llama):
    _, err = config("--yes", "-o", "fsdp.yaml", "--model", "llama", "--gpus", "2")
    assert "LlamaDecoderLayer ×2" in err and spec_of("fsdp.yaml").wrap.policy == "transformer"
    assert "# one unit per layer: LlamaDecoderLayer ×2" in Path("fsdp.yaml").read_text()
    _, err = config("--yes", "-o", "a.yaml", "--model", "llama", "--seq-len", "129", code=2)
    assert "longest sequence" in err
    _, err = config("--yes", "-o", "a.yaml", "--model", "llama", "--wrap-classes", "LamaDecoderLayer", code=2)
    assert "LlamaForCausalLM has no LamaDecoderLayer" in err
    _, err = config("--yes", "-o", "a.yaml", "--model", "llama", "--gpu-memory", "10^30", code=2)
    assert "80GB" in err
