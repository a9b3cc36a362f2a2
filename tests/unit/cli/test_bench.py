"""``hf-fsdp bench`` without ranks: arguments, what is left out, files, and tables."""

import json
import re
from pathlib import Path

import pytest
from json_schema import assert_valid

from hf_fsdp_plugin.cli.bench.output import bench_text
from hf_fsdp_plugin.cli.bench.worlds import Bench

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


@pytest.fixture
def bench(hf_fsdp, tmp_path, monkeypatch):
    """Run ``hf-fsdp bench`` in a folder with models. Ranks are replaced by samples whose time is known."""
    monkeypatch.chdir(tmp_path)
    for name, change in (("llama", {}), ("large", {"hidden_size": 1 << 20, "intermediate_size": 1 << 20})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA | change))
    monkeypatch.setattr(Bench, "_run_world", run_world)

    def run(words: str):
        return hf_fsdp("bench", "--cpu", *words.split())

    return run


def run_world(self, world_size, tasks, results):
    """Add samples: 10 ms per rank, 20 ms for the hand-written loop, and a failure of offload."""
    for task in tasks:
        for case in task.cases:
            if case.setting.strategy == "offload":
                results.end(case.name, "failed", "rank 0: out of memory")
                return 0
            seconds = [world_size * (0.02 if case.system == "raw" else 0.01)] * self.request.workload.blocks
            results.add(
                {
                    "case": case.name, "round": task.round, "seconds": seconds, "cpu_seconds": seconds,
                    "losses": [1.0] * len(seconds), "peak_bytes": 1 << 20, "peak_source": "resident memory",
                }
            )  # fmt: skip
    return 0


def codes(text: str) -> list[str]:
    return re.findall(r"FSDP-[EWN]\d+", text)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--strategies zero3", "FSDP-E780"),
        ("--prefetch early", "FSDP-E780"),
        ("--versions 3", "FSDP-E780"),
        ("--vs stok", "FSDP-E780"),
        ("--strategies full_shard,", "FSDP-E780"),
        ("--world-sizes 2,four", "FSDP-E788"),
        ("--rounds 0", "FSDP-E788"),
        ("--warm-up -1", "FSDP-E788"),
        ("--resume", "FSDP-E784"),
        ("-o missing/bench.json", "FSDP-E789"),
        ("--world-sizes 100000", "FSDP-E788"),
        ("--world-sizes 2000", "FSDP-E702"),
        ("--set sharding.stratgy=full_shard", "FSDP-E032"),
        ("--strategies hybrid_shard --world-sizes 2", "FSDP-E781"),
    ],
)
def test_bad_input_has_a_code_and_starts_nothing(bench, words, code):
    exit_code, out, err = bench(f"--model llama --seq-len 16 {words}")
    assert (exit_code, out) == (1, "") and code in codes(err)
    assert not list(Path().glob("*.json"))


def test_unknown_word_lists_the_known_ones_and_a_near_one(bench):
    _, _, err = bench("--model llama --strategies full_shrad")
    assert "ddp, shard_grad_op, full_shard" in err and "Did you mean full_shard?" in err


def test_model_that_does_not_fit_is_refused_with_figures(bench):
    code, _, err = bench("--model large --strategies full_shard --seq-len 16 -o out.json")
    assert (code, codes(err)[-1]) == (1, "FSDP-E781") and re.search(r"need [\d.]+ TiB, and .* has [\d.]+ GiB free", err)
    assert not Path("out.json").exists()
    code, _, err = bench("--model large --strategies full_shard --seq-len 16 --force")
    assert code == 0 and "FSDP-W782" in err


def test_impossible_case_is_left_out_and_others_run(bench):
    code, out, err = bench("--model llama --strategies full_shard,hybrid_shard --world-sizes 2,4 --seq-len 16")
    assert code == 0 and "FSDP-W782" in err
    rows = [line.split() for line in out.splitlines() if re.match(r"[24] ", line)]
    assert [row[2] for row in rows[:2]] == ["–", rows[1][2]] and rows[1][2] != "–"


def test_more_ranks_than_cores_is_noted(bench):
    assert "FSDP-N783" in bench("--model llama --world-sizes 60 --strategies full_shard --seq-len 16 --force")[2]


def test_json_has_the_schema(bench):
    for words, code in (("--versions 1,2 --vs stock,raw", 0), ("--strategies offload,ddp", 1), ("--rounds x", 1)):
        found, out, _ = bench(f"--model llama --seq-len 16 --json {words}")
        tree = json.loads(out)
        assert_valid("bench", tree)
        assert (found, tree["ok"]) == (code, code == 0)


def test_failed_case_does_not_end_the_others(bench):
    code, out, err = bench("--model llama --strategies offload,full_shard --seq-len 16 -o out.json")
    assert code == 1 and "FSDP-E786" in err and "failed" in out
    statuses = {row["strategy"]: row["status"] for row in json.loads(Path("out.json").read_text())["cases"]}
    assert statuses == {"offload": "failed", "full_shard": "measured"}


def test_existing_file_needs_force_or_resume(bench):
    words = "--model llama --strategies full_shard --seq-len 16 -o out.json"
    assert bench(words)[0] == 0
    before = Path("out.json").read_text()
    code, _, err = bench(words)
    assert (code, codes(err)[-1]) == (1, "FSDP-E784") and Path("out.json").read_text() == before
    assert bench(f"{words} --resume")[0] == 0
    assert bench(f"{words} --force")[0] == 0


def test_resume_measures_only_what_is_missing(bench, monkeypatch):
    words = "--model llama --seq-len 16 -o out.json --world-sizes 2"
    assert bench(f"{words} --strategies ddp --rounds 2")[0] == 0
    ran = []

    def record(self, world_size, tasks, results):
        ran.extend((case.name, task.round) for task in tasks for case in task.cases)
        return run_world(self, world_size, tasks, results)

    monkeypatch.setattr(Bench, "_run_world", record)
    assert bench(f"{words} --strategies ddp,full_shard --rounds 2 --resume")[0] == 0
    assert ran == [("2 ranks, FSDP2 full_shard, prefetch pre", number) for number in (0, 1)]
    ran.clear()
    assert bench(f"{words} --strategies full_shard --rounds 3 --resume")[0] == 0
    assert ran == [("2 ranks, FSDP2 full_shard, prefetch pre", 2)]
    rows = {row["strategy"]: len(row["samples"]) for row in json.loads(Path("out.json").read_text())["cases"]}
    assert rows == {"full_shard": 3, "ddp": 2}


@pytest.mark.parametrize("text", ["", "[]", '{"cases": 3}', '{"kind": "hf-fsdp bench", "cases": [{"case": 1}]}'])
def test_resume_of_another_file_is_refused(bench, text):
    Path("out.json").write_text(text)
    code, _, err = bench("--model llama --strategies ddp --seq-len 16 -o out.json --resume")
    assert (code, codes(err)[-1]) == (1, "FSDP-E785") and Path("out.json").read_text() == text


def test_resume_of_another_benchmark_is_refused(bench):
    assert bench("--model llama --strategies ddp --seq-len 16 -o out.json")[0] == 0
    code, _, err = bench("--model llama --strategies ddp --seq-len 32 -o out.json --resume")
    assert code == 1 and "FSDP-E785" in err and "workload differ" in err


def test_signal_leaves_the_file_and_exits_130(bench, monkeypatch):
    monkeypatch.setattr(Bench, "_run_world", lambda *args: 2)
    code, out, err = bench("--model llama --strategies ddp --seq-len 16 -o out.json")
    assert (code, out) == (130, "") and "--resume continues" in err
    assert json.loads(Path("out.json").read_text())["cases"][0]["status"] == "pending"


def test_comparisons_that_cannot_be_made_are_named(bench):
    code, out, err = bench("--model llama --strategies ddp,full_shard --prefetch pre,post --seq-len 16 --vs stock,raw")
    assert code == 0 and codes(err).count("FSDP-W787") == 4
    assert re.search(r"prefetch pre +hand-written loop +× 2\.000 +2\.000 to 2\.000", out)


def test_tables_have_the_shape_of_a_scaling_test(bench):
    _, out, _ = bench("--model llama --world-sizes 1,2 --strategies ddp,shard_grad_op,full_shard --seq-len 16")
    first = out.split("\n\n")[1].splitlines()
    assert first[1].split("  ")[0] == "ranks" and first[1].split() == ["ranks", "DDP", "ZeRO-2", "ZeRO-3"]
    assert first[2].split() == ["1", "100", "100", "(+0%)", "100", "(+0%)"]
    assert "efficiency" in out and "50%" in out.split("efficiency")[1]
    _, out, _ = bench("--model llama --strategies full_shard --prefetch pre,post --seq-len 16")
    assert out.split("\n\n")[1].splitlines()[1].split() == ["ranks", "ZeRO-3", "pre", "ZeRO-3", "post"]


def test_pictures_have_a_line_per_strategy(bench):
    words = "--model llama --world-sizes 1,2 --strategies ddp,full_shard --seq-len 16 --html out.html --png out.png"
    code, out, _ = bench(words)
    page = Path("out.html").read_text()
    assert (
        code == 0
        and "written: out.html" in out
        and page.count("<polyline") == 5  # two lines in each plot, and the rule of the efficiency
        and "http://" not in page.replace("http://www.w3.org", "")
    )
    assert Path("out.png").read_bytes()[:4] == b"\x89PNG"
    assert bench(words)[0] == 1


def test_text_of_a_result_without_memory(bench):
    bench("--model llama --strategies full_shard --seq-len 16 -o out.json")
    tree = json.loads(Path("out.json").read_text())
    for row in tree["cases"]:
        row.update(peak_bytes=None, peak_source=None)
    assert "not measured" in bench_text(tree)
