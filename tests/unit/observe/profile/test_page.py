"""The page of a profile: complete without its script, and opened in a browser where one is installed."""

import shutil
import subprocess
from dataclasses import replace

import pytest

from hf_fsdp_plugin.estimate.results import Moment
from hf_fsdp_plugin.observe.profile.names import canonical_units
from hf_fsdp_plugin.observe.profile.page import page
from hf_fsdp_plugin.observe.profile.phases import Segment
from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile, StepCall, Times
from hf_fsdp_plugin.observe.profile.run_profile import RunProfile, merge_ranks
from hf_fsdp_plugin.observe.profile.suggestions import suggest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "layers.<script>alert(1)</script>"


def rank(number: int) -> RankProfile:
    steps = [[Segment("forward", 0.0, 0.5), Segment("backward", 0.5, 0.9), Segment("optimizer", 0.9, 1.0)]]
    call = StepCall(
        step=0, phase="forward", kind="all_gather", unit="_orig_mod.norm, head", issued=0.1, arrived=0.1, start=0.1,
        end=0.3, exposed=0.2, bytes=1000,
    )  # fmt: skip
    kinds = {"params": 10, "grads": 0, "optimizer": 20, "activations": 5, "gathered": 4}
    memory = [
        Moment(where=where, bytes_by_kind=kinds, seconds=seconds)
        for seconds, where in enumerate(("forward of norm, head", "optimizer"))
    ]
    calls = [call, replace(call, unit=HOSTILE)]
    times = {"forward": Times(seconds=0.5, compute=0.3, communication=0.2, exposed=0.2)}
    made = RankProfile(
        rank=number, world_size=2, host="a", device="cpu", began=9.0, steps=steps, times=times, calls=calls,
        memory=memory,
    )  # fmt: skip
    return canonical_units(made, ["norm + head"])


@pytest.fixture(scope="module")
def run() -> RunProfile:
    return merge_ranks([rank(0), rank(1)])


def test_names_of_units_are_those_of_the_model(run):
    assert run.units[0].name == "norm + head"
    assert [moment.where for moment in run.memory] == ["forward of norm + head", "optimizer"]


def test_list_of_gathered_shards_counts_as_the_whole_unit():
    made = canonical_units(rank(0), ["norm + head"], {"norm + head": 4})
    assert [call.bytes for call in made.calls] == [4000, 1000]


def test_page_has_all_sections_and_escapes_names(run):
    text = page(run, suggest(run))
    for section in ("phases", "suggestions", "timeline", "units", "ranks", "memory"):
        assert f'<section id="{section}">' in text
    assert HOSTILE not in text and text.count('aria-label="Timeline of rank') == 2
    assert "//" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_browser_zooms_and_nothing_overflows(run, tmp_path):
    measure = (
        "document.querySelector('[data-by=\"2\"]').click();"
        "const e=document.documentElement;document.title=[e.scrollWidth<=e.clientWidth,"
        "document.querySelector('.lane svg').getAttribute('viewBox'),document.querySelector('.zoom').hidden].join('|')"
    )
    (tmp_path / "page.html").write_text(page(run, []).replace("</body>", f"<script>{measure}</script></body>"))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900", "--dump-dom",
        f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    assert shown.partition("<title>")[2].partition("</title>")[0] == "true|250 0 500 42|false"
