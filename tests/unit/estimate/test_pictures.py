"""The pictures of a plan: parsed, and opened in a browser where one is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_plugin.estimate.machines import machine_named
from hf_fsdp_plugin.estimate.memory import estimate_memory
from hf_fsdp_plugin.estimate.pictures import PictureData, picture_data, plan_image, plan_page, tree_of_units
from hf_fsdp_plugin.estimate.time import TimeModel
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.spec.load import load_spec

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def planned() -> Any:
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
    plan = resolve(spec, model, world_size=8, device_type="cuda")
    workload = Workload(micro_batch=1, seq_len=32)
    return plan, model, workload, estimate_memory(plan, model, workload)


@pytest.fixture(scope="module")
def data(planned: Any) -> PictureData:
    plan, model, workload, memory = planned
    machine, times = machine_named("h100-sxm"), TimeModel(plan, model, workload)
    return picture_data(
        plan, model, workload, memory, 10**6, times.estimate(machine), times.timeline(machine).spans,
        times.scaling(machine, [8, 64, 512]),
    )  # fmt: skip


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


def test_page_is_complete_and_self_contained(data):
    text = plan_page(data)
    parsed = Parsed(text)
    assert parsed.open == []
    assert parsed.links == []
    assert "script" not in parsed.tags
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert parsed.sections == ["strategies", "timeline", "streams", "units", "scaling", "assumptions"]
    words = " ".join(parsed.texts)
    assert "full_shard (planned)" in words
    assert "model.layers.0 to model.layers.5" in words
    assert parsed.tags["svg"] == 3


def test_strategies_have_the_memory_of_their_plans(data):
    names = {row.name: row for row in data.strategies}
    assert set(names) == {"full_shard", "shard_grad_op", "no_shard"}
    assert names["no_shard"].memory.peak.bytes > names["full_shard"].memory.peak.bytes
    assert [row.name for row in data.strategies if row.is_planned] == ["full_shard"]
    assert names["full_shard"].memory is data.memory


def test_hybrid_strategies_are_shown_for_several_machines(planned):
    plan, model, workload, memory = planned
    names = {row.name for row in picture_data(plan, model, workload, memory, None, ranks_per_machine=4).strategies}
    assert names == {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard 2×4", "hybrid_shard_zero2 2×4"}


def test_units_in_the_tree_add_up(data, planned):
    assert data.units.total == planned[0].num_params
    nodes = [data.units, *data.units.children]
    assert [(node.name, node.num_units) for node in nodes] == [
        ("", 1), ("model.embed_tokens", 1), ("model.layers.0 to model.layers.5", 6), ("model.norm + lm_head", 1),
    ]  # fmt: skip


def test_nested_units_are_below_the_unit_around_them(planned):
    _, model, _, _ = planned
    classes = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,LlamaMLP"}
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, **classes}}
    config["fsdp_config"]["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    plan = resolve(load_spec(config, environ={}), model, world_size=8, device_type="cuda")
    tree = tree_of_units(plan.units)
    assert tree.total == plan.num_params
    (layers,) = (node for node in tree.children if node.class_name == "LlamaDecoderLayer")
    assert layers.num_units == 6
    assert [(child.name, child.num_units, child.num_params) for child in layers.children] == [("mlp", 1, 3 * 64 * 96)]


def test_names_in_the_page_are_escaped(data):
    from dataclasses import replace

    assert "<b>x</b>" not in plan_page(replace(data, title="<b>x</b>"))


def test_page_without_a_machine_has_no_streams(data):
    from dataclasses import replace

    parsed = Parsed(plan_page(replace(data, time=None, spans=(), scaling=(), gpu_memory=None)))
    assert parsed.sections == ["strategies", "timeline", "units", "assumptions"]


def test_png_is_an_image(data):
    pytest.importorskip("matplotlib")
    content = plan_image(data)
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20]) > 1000  # width


def test_png_without_matplotlib_is_refused(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SpecError) as caught:
        plan_image(data)
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E834"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_browser_shows_the_page_without_overflow(data, tmp_path, width):
    (tmp_path / "plan.html").write_text(plan_page(data))
    # The page has no scripts. This one only measures it, after it is shown in a frame of the given width.
    (tmp_path / "frame.html").write_text(
        f"<body style='margin:0'><iframe id=f src=plan.html style='width:{width}px;height:900px;border:0'></iframe>"
        "<script>f.onload=()=>{const d=f.contentDocument,e=d.documentElement;"
        "const sections=d.querySelectorAll('section').length,font=getComputedStyle(d.body).fontSize;"
        "document.title=[e.scrollWidth,e.clientWidth,sections,font].join(' ')}</script>"
    )
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom",
        (tmp_path / "frame.html").as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    title = shown.partition("<title>")[2].partition("</title>")[0]
    content, visible, sections, font = title.split()
    assert int(content) <= int(visible) == width
    assert int(sections) == 6
    assert font == "16px"
