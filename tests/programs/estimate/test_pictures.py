"""The pictures of a plan and the page of a run: parsed, and opened in a browser where one is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_fsdp_plugin
from hf_fsdp_plugin.cli.main import VERBS, make_parser
from hf_fsdp_plugin.plan.fsdp_plan import equal_units
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.pages import COLORS
from hf_fsdp_plugin.tools.plan.estimate.machines import machine_named
from hf_fsdp_plugin.tools.plan.estimate.planner import Advice, advise
from hf_fsdp_plugin.tools.plan.estimate.types import KIND_NAMES, MemoryEstimate, Workload
from hf_fsdp_plugin.tools.plan.output import Planned, Prediction, predict
from hf_fsdp_plugin.tools.plan.page import advice_page, memory_by_strategy, plan_page
from hf_fsdp_plugin.tools.watch.page import run_page
from hf_fsdp_plugin.tools.watch.run_folder import RunFolder
from tests.support import watched_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def planned() -> Planned:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    spec = load_spec(
        {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config": fsdp}, environ={}
    )
    plan = replace(resolve(spec, model, world_size=8, device_type="cuda"), model_class="a <b>small</b> model")
    workload, machine = Workload(micro_batch=1, seq_len=32), machine_named("h100-sxm")
    return Planned(plan=plan, model=model, workload=workload, gpu_memory=10**6, machine=machine)


@pytest.fixture(scope="module")
def page(planned: Planned) -> str:
    return plan_page(predict(planned))


class Parsed(HTMLParser):
    """Tags that must be closed, sections, texts, and addresses of other files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.tags: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.links += [value for key, value in attrs if key in ("src", "href", "action") or "url(" in (value or "")]
        if tag == "section":
            self.sections.append(given["id"])
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_page_is_complete_and_self_contained(page):
    parsed = Parsed(page)
    assert parsed.open == []
    assert parsed.links == []
    assert "script" not in parsed.tags
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert parsed.sections == ["strategies", "timeline", "streams", "units", "assumptions"]
    words = " ".join(parsed.texts)
    assert "full_shard (planned)" in words and "model.layers.0–5" in words
    assert parsed.tags["svg"] == 2
    assert "<b>small" not in page and "&lt;b&gt;small" in page


def test_strategies_have_the_memory_of_their_plans(planned):
    prediction = predict(planned)
    found = memory_by_strategy(prediction)
    assert set(found) == {"full_shard", "shard_grad_op", "no_shard"}
    assert found["no_shard"].peak.bytes > found["full_shard"].peak.bytes
    assert found["full_shard"] is prediction.memory


def test_hybrid_strategies_are_shown_for_several_machines(planned):
    machines = replace(planned, machine=replace(planned.machine, ranks_per_machine=4))
    names = set(memory_by_strategy(predict(machines)))
    assert names == {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard 2×4", "hybrid_shard_zero2 2×4"}


def test_page_lists_equal_units_once(page):
    words = " ".join(" ".join(Parsed(page).texts).split())
    for unit in ("model.embed_tokens Embedding", "model.layers.0–5 LlamaDecoderLayer", "model.norm + lm_head"):
        assert unit in words
    assert "× 6" in words


def test_page_without_a_machine_has_no_streams(planned):
    parsed = Parsed(plan_page(predict(replace(planned, machine=None))))
    assert parsed.sections == ["strategies", "timeline", "units", "assumptions"]


LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
WIDTHS = (1200, 400)


def planned_llama(sizes: dict[str, int], ranks: int, mesh: dict[str, int]) -> Planned:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_key_value_heads=8, use_cache=False, **sizes))
    config = {
        "distributed_type": "FSDP",
        "num_processes": ranks,
        "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_sharding_strategy": "HYBRID_SHARD" if mesh else "FULL_SHARD",
        },
        "parallelism_config": {f"parallelism_config_{axis}_size": size for axis, size in mesh.items()},
    }
    plan = resolve(load_spec(config, environ={}), model, world_size=ranks, device_type="cuda")
    machine = machine_named("h100-sxm")
    workload = Workload(micro_batch=1, seq_len=2048)
    return Planned(plan=plan, model=model, workload=workload, gpu_memory=int(machine.memory_bytes), machine=machine)


@pytest.fixture(scope="module")
def predictions() -> dict[str, Prediction]:
    return {
        "8B": predict(planned_llama(LLAMA_8B, 8, {})),
        "405B": predict(planned_llama(LLAMA_405B, 512, {"dp_replicate": 8, "dp_shard": 64})),
    }


@pytest.fixture(scope="module")
def by_strategy(predictions: dict[str, Prediction]) -> dict[str, dict[str, MemoryEstimate]]:
    return {name: memory_by_strategy(prediction) for name, prediction in predictions.items()}


@pytest.fixture(scope="module")
def advice(predictions: dict[str, Prediction]) -> Advice:
    planned = predictions["8B"].planned
    return advise(
        planned.model, planned.workload, global_batch=64, gpu_memory=80 * 10**9, num_machines=1, gpus_per_machine=8,
        machine=planned.machine, version=2, precision="bf16", wrap={},
    )  # fmt: skip


def shown_advice(advice: Advice) -> str:
    names = {id(row): (f"settings {number}", "micro-batches") for number, row in enumerate(advice.rows[-6:])}
    names |= {id(row): (f"settings {number + 6}", "micro-batches") for number, row in enumerate(advice.fitting[:6])}
    return advice_page("Settings", "Best: the first", advice, advice.best, names, "fsdp_version: 2\n# " + 150 * "x")


@pytest.fixture(scope="module")
def shown(
    predictions: dict[str, Prediction], advice: Advice, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What a browser shows of each page at each width: the result of measure_pages.js for ``405B-400``."""
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    folder = tmp_path_factory.mktemp("pages")
    script = Path(__file__).with_name("measure_pages.js").read_text(encoding="utf-8")
    frames = f"<!doctype html><meta charset=utf-8><body><script>{script}</script>"
    pages = {name: plan_page(prediction) for name, prediction in predictions.items()}
    watched_runs.write_report(watched_runs.restarted_run(folder / "llama"))
    run = run_page(RunFolder(folder / "llama").read())
    for name, page in {**pages, "advice": shown_advice(advice), "run": run}.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
        for width in WIDTHS:
            style = f"width:{width}px;height:4000px;border:0"
            frames += f"<iframe id={name}-{width} src={name}.html style='{style}'></iframe>"
    (folder / "frames.html").write_text(frames, encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1",
        "--disable-dev-shm-usage",  # containers have 64 MB of it
        "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000",
        "--dump-dom", (folder / "frames.html").as_uri(),
    ]  # fmt: skip
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    return json.loads(unescape(output.partition("<pre>")[2].partition("</pre>")[0]))


def test_plan_and_watch_are_the_only_verbs_with_a_page():
    """A page of another verb needs the tests below, too."""
    templates = {path.name for path in Path(hf_fsdp_plugin.__file__).parent.rglob("*.html")}
    assert templates == {"charts.html", "run.html"}
    assert [verb for verb in VERBS if make_parser(verb).find("--html") is not None] == ["watch", "plan"]


NAMES = [f"{name}-{width}" for name in ("8B", "405B") for width in WIDTHS]
PAGES = pytest.mark.parametrize("page_name", NAMES)
OTHERS = [f"{name}-{width}" for name in ("advice", "run") for width in WIDTHS]
ALL_PAGES = pytest.mark.parametrize("page_name", [*NAMES, *OTHERS])
Box = tuple[float, float, float, float]


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes have more in common than rounding explains."""
    return all(min(one[i + 2], other[i + 2]) - max(one[i], other[i]) > 1 for i in (0, 1))


def is_inside(box: Box, outer: Box) -> bool:
    return all(box[i] >= outer[i] - 0.1 and box[i + 2] <= outer[i + 2] + 0.1 for i in (0, 1))


@ALL_PAGES
def test_browser_cuts_nothing(shown, page_name):
    page = shown[page_name]
    width = float(page_name.partition("-")[2])
    assert page["content"] <= page["visible"] == width
    assert page["font"] == "16px"
    whole = (0, 0, width, 4000)
    for text in page["texts"]:
        assert all(is_inside(line, whole) for line in text["boxes"]), text
    for part in (*page["bars"], *page["pictures"]):
        assert is_inside(part["box"], whole)
    for picture in page["pictures"]:
        assert all(is_inside(shape, picture["box"]) for shape in picture["shapes"])


@ALL_PAGES
def test_browser_shows_nothing_over_anything_else(shown, page_name):
    page = shown[page_name]
    boxes = [line for text in page["texts"] for line in text["boxes"]]
    boxes += [*page["colors"], *(part["box"] for part in (*page["bars"], *page["pictures"]))]
    assert not [(one, other) for one, other in combinations(boxes, 2) if overlap(one, other)]


@PAGES
def test_browser_shows_every_row_and_label(shown, predictions, by_strategy, page_name):
    name = page_name.partition("-")[0]
    page, prediction, strategies = shown[page_name], predictions[name], by_strategy[name]
    words = " ".join(text["text"] for text in page["texts"])
    units = equal_units(prediction.planned.plan.units)
    for label in (*KIND_NAMES.values(), *strategies, *(name for name, _ in units), *prediction.memory.assumptions):
        assert label in words
    assert len(page["colors"]) == 2 * len(KIND_NAMES)
    expected = [sum(size > 0 for size in memory.peak.bytes_by_kind.values()) for memory in strategies.values()]
    expected += [int(same[0].num_params > 0) for _, same in units]
    assert [len(bar["bands"]) for bar in page["bars"]] == expected
    for bar in page["bars"]:
        assert all(is_inside(band, bar["box"]) and band[2] - band[0] >= 0.99 for band in bar["bands"])
    assert [len(bar["marks"]) for bar in page["bars"]] == [1] * len(strategies) + [0] * len(units)


@PAGES
def test_browser_shows_every_band_of_a_step(shown, predictions, page_name):
    name = page_name.partition("-")[0]
    moments, columns = predictions[name].memory.timeline, shown[page_name]["pictures"][0]["columns"]
    top, height = max(moment.bytes for moment in moments), 12 * 16
    for kind, color in COLORS.items():
        sizes = [moment.bytes_by_kind[kind] for moment in moments]
        assert any(color in column for column in columns) == any(sizes), kind
        if len(columns) < 4 * len(moments):  # several moments share a column
            continue
        for index, size in enumerate(sizes):
            column = columns[round(index / (len(moments) - 1) * (len(columns) - 1))]
            assert column.get(color, 0) == pytest.approx(height * size / top, rel=0.05, abs=5), (kind, index)
            assert not size or column.get(color, 0) >= 1, (kind, index)


@PAGES
def test_browser_shows_every_stream_of_a_step(shown, predictions, page_name):
    prediction, picture = predictions[page_name.partition("-")[0]], shown[page_name]["pictures"][1]
    spans = prediction.times.timeline(prediction.planned.machine).spans
    assert len(picture["shapes"]) == len(spans)
    shapes = sorted(picture["shapes"], key=lambda box: (box[1], box[0]))
    assert not [pair for pair in pairwise(shapes) if overlap(*pair)]
    painted = {color for column in picture["columns"] for color in column}
    streams = {"compute": "optimizer", "communication": "params"}
    if page_name.startswith("405B"):  # hybrid_shard
        streams["all_reduce"] = "grads"
    assert {span.stream for span in spans} == set(streams)
    assert painted == {COLORS[kind] for kind in streams.values()}


@pytest.mark.parametrize("width", WIDTHS)
def test_browser_shows_every_row_of_the_advice(shown, advice, width):
    page = shown[f"advice-{width}"]
    words = " ".join(text["text"] for text in page["texts"])
    rows = [row for row in advice.rows if id(row) in {id(row) for row in (*advice.rows[-6:], *advice.fitting[:6])}]
    assert len(rows) > 6 and all(f"settings {number}" in words for number in range(12))
    assert words.count("(the config below)") == 1 and "fsdp_version: 2" in words
    memory = [bar for bar in page["bars"] if bar["marks"]]
    kinds = [sum(size > 0 for size in row.memory.peak.bytes_by_kind.values()) for row in rows]
    expected = [num + (row.memory.needed_bytes > row.memory.peak.bytes) for num, row in zip(kinds, rows, strict=True)]
    assert [len(bar["bands"]) for bar in memory] == expected
    assert len(page["bars"]) - len(memory) == sum(row.tokens_per_second is not None for row in rows)


def test_page_of_the_advice_is_complete(advice):
    parsed = Parsed(shown_advice(advice))
    assert parsed.open == [] and parsed.links == [] and "script" not in parsed.tags
    assert parsed.sections == ["fitting", "rejected", "config"]


@pytest.mark.parametrize("width", WIDTHS)
def test_browser_shows_every_part_of_a_run(shown, width):
    page = shown[f"run-{width}"]
    words = [text["text"] for text in page["texts"]]
    assert [
        word for word in ("llama", "loss", "mfu", "Slow ranks", "memory reserved", "Report") if word not in words
    ] == []
    *figures, memory = page["pictures"]
    assert len(figures) == 11 and len(page["colors"]) == len(KIND_NAMES)
    painted = {color for column in memory["columns"] for color in column}
    assert painted == set(COLORS.values())
    for picture in figures:
        restart, line = picture["lines"]
        left, top, right, bottom = picture["box"]
        assert is_inside(line, picture["box"]) and line[2] - line[0] >= right - left - 1
        assert left < restart[0] < right and restart[3] - restart[1] >= bottom - top - 1
        assert all(COLORS["params"] in column for column in picture["columns"][2:-2])
    loss, flat = figures[0]["lines"][1], figures[5]["lines"][1]
    assert loss[3] - loss[1] > 90 and flat[3] - flat[1] < 3
