"""``hf-fsdp bench`` without ranks: arguments, what is left out, files, and tables."""

import json
import re

import pytest

from hf_fsdp_plugin.runs.failures import AttemptResult, RankExit
from hf_fsdp_plugin.tools.bench.cases import bench_text
from tests.support.json_schema import assert_valid

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip

OUT_OF_MEMORY = {"kind": "exception", "type": "OutOfMemoryError", "message": "OutOfMemoryError: 8 GiB"}


@pytest.fixture
def bench(hf_fsdp, tmp_path, monkeypatch):
    """Run ``hf-fsdp bench`` in a folder with models. Ranks are replaced by samples whose time is known."""
    monkeypatch.chdir(tmp_path)
    for name, change in (("llama", {}), ("large", {"hidden_size": 1 << 20, "intermediate_size": 1 << 20})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA | change))
    monkeypatch.setattr("hf_fsdp_plugin.tools.bench.verb.run_world", run_world)

    def run(words: str):
        return hf_fsdp("bench", "--cpu", *words.split())

    return run


def run_world(job, world, results, handover, spec):
    """Add measurements: 10 ms per rank, 20 ms for stock Accelerate. A world ends at a case with offload."""
    for group in job.groups:
        for case in group:
            if case.strategy == "offload":
                return AttemptResult(exits=(RankExit(rank=0, code=1, time=0.0, failure=OUT_OF_MEMORY),))
            seconds = [world.size * (0.02 if case.system == "stock" else 0.01)] * job.workload["blocks"]
            results.add(
                {
                    "case": case.name, "seconds": seconds, "losses": [1.0] * len(seconds), "peak_bytes": 1 << 20,
                    "peak_source": "resident memory",
                }
            )  # fmt: skip
    return AttemptResult(exits=())


def codes(text: str) -> list[str]:
    return re.findall(r"FSDP-[EWN]\d+", text)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--world-sizes 2000", "FSDP-E702"),
        ("--set sharding.stratgy=full_shard", "FSDP-E020"),
        ("--strategies hybrid_shard --world-sizes 2", "FSDP-E781"),
    ],
)
def test_bad_input_has_a_code_and_starts_nothing(bench, words, code):
    exit_code, out, err = bench(f"--model llama --seq-len 16 {words}")
    assert (exit_code, out) == (1, "") and code in codes(err)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--strategies zero3", "'zero3' is not one of ddp, shard_grad_op, full_shard"),
        ("--strategies full_shard,", "'' is not one of ddp"),
        ("--versions 3", "'3' is not one of 1, 2"),
        ("--vs stok", "invalid choice: 'stok'"),
        ("--world-sizes 2,four", "'four' is not a whole number from 1 on"),
        ("--blocks 0", "'0' is not a whole number from 1 on"),
        ("--warm-up -1", "'-1' is not a whole number from 1 on"),
    ],
)
def test_wrong_word_is_wrong_usage(bench, words, expected):
    code, out, err = bench(f"--model llama {words}")
    assert (code, out) == (2, "") and expected in err


def test_model_that_does_not_fit_is_refused_with_figures(bench):
    code, _, err = bench("--model large --strategies full_shard --seq-len 16")
    assert (code, codes(err)[-1]) == (1, "FSDP-E781") and re.search(r"need [\d.]+ TiB of .* has [\d.]+ GiB free", err)
    assert bench("--model large --strategies full_shard --seq-len 16 --force")[0] == 0


def test_impossible_case_is_left_out_and_others_run(bench):
    code, out, err = bench("--model llama --strategies full_shard,hybrid_shard --world-sizes 2,4 --seq-len 16")
    assert code == 0 and "FSDP-W782" in err
    rows = [line.split() for line in out.splitlines() if re.match(r"[24] ", line)]
    assert rows[0][-1] == "–" and rows[1][-1] != "–"


def test_more_ranks_than_cores_is_noted(bench):
    assert "FSDP-N783" in bench("--model llama --world-sizes 60 --strategies full_shard --seq-len 16 --force")[2]


def test_json_has_the_schema(bench):
    for words, code in (("--versions 1,2 --vs stock", 0), ("--strategies offload,ddp", 1), ("--set a=1", 1)):
        found, out, _ = bench(f"--model llama --seq-len 16 --json {words}")
        tree = json.loads(out)
        assert_valid("bench", tree)
        assert (found, tree["ok"]) == (code, code == 0)


def test_failed_case_does_not_end_the_others(bench):
    words = "--model llama --strategies offload,full_shard --seq-len 16"
    code, out, err = bench(words)
    assert code == 1 and "FSDP-E786" in err and "out of memory" in out
    statuses = {row["strategy"]: row["status"] for row in json.loads(bench(f"{words} --json")[1])["cases"]}
    assert statuses == {"offload": "failed", "full_shard": "measured"}


def test_new_ranks_measure_what_a_failure_has_left(bench, monkeypatch):
    ran = []

    def record(job, *more):
        ran.append([group[0].label for group in job.groups])
        return run_world(job, *more)

    monkeypatch.setattr("hf_fsdp_plugin.tools.bench.verb.run_world", record)
    assert bench("--model llama --seq-len 16 --strategies ddp,offload,full_shard")[0] == 1
    assert ran == [["DDP", "FSDP2 offload", "FSDP2 full_shard"], ["FSDP2 full_shard"]]


def test_signal_exits_130_with_the_results_until_then(bench, monkeypatch):
    monkeypatch.setattr(
        "hf_fsdp_plugin.tools.bench.verb.run_world", lambda *args: AttemptResult(exits=(), signal_number=2)
    )
    code, out, err = bench("--model llama --strategies ddp --seq-len 16 --json")
    assert code == 130 and "stopped by a signal" in err
    assert json.loads(out)["cases"][0]["status"] == "pending"


def test_comparisons_that_cannot_be_made_are_named(bench):
    code, out, err = bench("--model llama --strategies ddp,full_shard,no_shard --seq-len 16 --vs stock")
    assert code == 0 and codes(err).count("FSDP-W787") == 2
    assert re.search(r"FSDP2 full_shard +× 2\.000 +2\.000 to 2\.000", out)
    _, out, err = bench("--model llama --strategies full_shard --set prefetch.forward=true --seq-len 16 --vs stock")
    assert "no prefetch setting" in err and "stock Accelerate" not in out


def test_tables_have_the_shape_of_a_scaling_test(bench):
    _, out, _ = bench("--model llama --world-sizes 1,2 --strategies ddp,shard_grad_op,full_shard --seq-len 16")
    first = out.split("\n\n")[1].splitlines()
    assert first[1].split("  ")[0] == "ranks" and first[1].split() == ["ranks", "DDP", "ZeRO-2", "ZeRO-3"]
    assert first[2].split() == ["1", "1,600", "±0.0%", *["1,600", "±0.0%", "(+0%)"] * 2]
    assert "efficiency" in out and "50%" in out.split("efficiency")[1]
    _, out, _ = bench("--model llama --strategies full_shard --versions 1,2 --seq-len 16")
    assert out.split("\n\n")[1].splitlines()[1].split() == ["ranks", "FSDP1", "ZeRO-3", "FSDP2", "ZeRO-3"]


def test_text_of_a_result_without_memory(bench):
    tree = json.loads(bench("--model llama --strategies full_shard --seq-len 16 --json")[1])
    for row in tree["cases"]:
        row.update(peak_bytes=None, peak_source=None)
    assert "not measured" in bench_text(tree)
