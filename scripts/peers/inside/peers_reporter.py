"""A plugin of pytest: writes the outcome of each test to a file at once, and lets tests run that ask for a GPU.

``PEERS_OUTCOMES`` is the file, one JSON object a line: tests that were begun are known after a crash or a time limit.
``PEERS_RELAXED`` has words separated by blanks: a decorator ``module:name`` skips nothing, and a function
``module:name=NUMBER`` returns the number.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest


def _keep(test: Any = None, **_: Any) -> Any:
    return test if test is not None else _keep


def _relax(word: str) -> None:
    name, _, number = word.partition("=")
    module, _, attribute = name.partition(":")
    library = importlib.import_module(module)
    getattr(library, attribute)  # a name that does not exist is an error in suites.yaml
    setattr(library, attribute, (lambda *_: int(number)) if number else _keep)


for _word in os.environ.get("PEERS_RELAXED", "").split():
    _relax(_word)


def _write(**row: str) -> None:
    with open(os.environ["PEERS_OUTCOMES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> Iterator[None]:
    result = yield
    if call.excinfo is not None:
        result.get_result().peers_error = call.excinfo.typename  # type: ignore[attr-defined]


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, outcome="begun")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome == "failed":
        error = getattr(report, "peers_error", "") or _first_line(report).partition(":")[0]
        _write(test=report.nodeid, outcome=f"failed ({error})", message=_first_line(report))
    elif report.when == "call" or report.outcome == "skipped":
        _write(test=report.nodeid, outcome=report.outcome, message="")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome == "failed":
        _write(test=f"{report.nodeid}::(import)", outcome="failed (import)", message=str(report.longrepr)[-500:])
    elif report.outcome == "skipped":
        _write(test=f"{report.nodeid}::(import)", outcome="skipped", message="")


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash is not None else str(report.longrepr)).strip()[:500]
