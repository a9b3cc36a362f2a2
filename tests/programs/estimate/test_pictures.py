"""The pictures of a plan: parsed, and opened in a browser where one is installed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_plugin.cli.plan.output import Planned, memory_by_strategy, plan_page, predict
from hf_fsdp_plugin.estimate.machines import machine_named
from hf_fsdp_plugin.estimate.types import Workload
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.load import load_spec

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


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_browser_shows_the_page_without_overflow(page, tmp_path, width):
    (tmp_path / "plan.html").write_text(page)
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
    assert int(sections) == 5
    assert font == "16px"
