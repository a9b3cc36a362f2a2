"""Progress bars of saves and loads: on a terminal, on rank 0."""

import io
import sys

import pytest

from hf_fsdp_plugin.cli.main import main
from hf_fsdp_plugin.messages import progress_bar
from hf_fsdp_plugin.tools.common import Progress
from hf_fsdp_plugin.tools.verify.verification import verify


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("rank", "stream", "is_shown"),
    [("0", Terminal(), True), ("1", Terminal(), False), ("0", io.StringIO(), False)],
    ids=["rank 0", "rank 1", "no terminal"],
)
def test_bar_is_shown_on_a_terminal_of_rank_0(monkeypatch, rank: str, stream: io.StringIO, is_shown: bool) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("saving", 2000, delay=0) as update:
        update(1000)
        update(1000)
    assert ("saving" in stream.getvalue()) == is_shown
    assert is_shown or not stream.getvalue()


def test_short_step_shows_no_bar(monkeypatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("saving", 10) as update:
        update(10)
    assert "saving" not in stream.getvalue()


def test_verify_reports_all_bytes_and_starts_at_zero(local) -> None:
    calls: list[tuple[str, int, int]] = []
    report: Progress = lambda *call: calls.append(call)  # noqa: E731
    verdict = verify(local, config_check=False, progress=report)
    assert calls[0] == ("verify", 0, verdict.num_bytes)
    assert sum(count for _, count, _ in calls) == verdict.num_bytes


@pytest.mark.parametrize("verb", ["verify", "merge", "export"])
def test_verbs_show_a_bar_on_a_terminal_only(monkeypatch, tmp_path, local, verb: str) -> None:
    source = local.parent if verb == "export" else local
    options = ["--no-config-check"] if verb == "verify" else [str(tmp_path / "out"), "--force"]
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert main([verb, str(source), *options]) == 0
        assert ("\rverify:" in stream.getvalue() or "\rmerge:" in stream.getvalue()) == stream.isatty()
