"""The table of times names every constant with its value, and those that depend on each other fit."""

from __future__ import annotations

import re

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.checkpoint.writing import manager


def test_table_contains_every_constant_with_its_value() -> None:
    rows = re.findall(r"^``(\w+)`` +([\d.]+)  \S", time_limits.__doc__ or "", re.MULTILINE)
    constants = {name: value for name, value in vars(time_limits).items() if name.isupper()}
    assert {name: float(value) for name, value in rows} == constants and len(rows) == len(constants)


def test_times_that_depend_on_each_other_fit() -> None:
    assert time_limits.SAVE > manager._SIGTERM_TIMEOUT, "ranks have longer than their own handler waits"
    assert time_limits.VERDICT > time_limits.SETTLE + time_limits.SAVE
    assert time_limits.TEARDOWN > time_limits.CAUSE, "a failed rank looks for the cause"
    assert time_limits.FAILED > time_limits.TEARDOWN + time_limits.TERM
    assert time_limits.FRESH > 2 * time_limits.TURN + time_limits.SAMPLE
    assert time_limits.ANSWER > time_limits.SAMPLE + 2 * time_limits.STACK
