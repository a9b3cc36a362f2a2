"""Runs whose report cannot be made are announced at exit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_fsdp_plugin.integrations.accelerate.run_report import RunReporter


class Accelerator:
    """An accelerator as the reporter sees it: an object that can be deleted."""


@pytest.fixture
def reporter() -> Iterator[RunReporter]:
    reporter = RunReporter()
    yield reporter
    reporter.close()


def test_newest_unreported_accelerator_is_kept(reporter: RunReporter, capsys: pytest.CaptureFixture[str]) -> None:
    reporter.add_prepared(Accelerator())
    reporter._at_exit()
    # It is still known, but no process group exists to report it.
    assert "the process group was destroyed first" in capsys.readouterr().err


def test_deleted_accelerators_are_counted(reporter: RunReporter, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        last = Accelerator()
        reporter.add_prepared(last)
        reporter.add_prepared(last)
    reporter.add_reported(last)
    reporter._at_exit()
    assert "no report of 2 runs" in capsys.readouterr().err


def test_reported_runs_print_nothing(reporter: RunReporter, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator()
    reporter.add_prepared(accelerator)
    reporter.add_reported(accelerator)
    reporter.add_prepared(accelerator)
    reporter._at_exit()
    assert capsys.readouterr().err == ""


def test_report_of_an_earlier_run_prints_nothing(reporter: RunReporter, capsys: pytest.CaptureFixture[str]) -> None:
    reporter.add_reported(Accelerator())
    reporter._at_exit()
    assert capsys.readouterr().err == ""
