"""What works under which launcher: the table of docs/clusters.md, each cell with the test that shows it.

``tests/unit/test_launcher_features.py`` checks that these tests exist. ``scripts/update_docs.py`` writes the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

LAUNCHERS: Final = ("hf-fsdp launch", "torchrun", "accelerate launch", "srun", "PyTorchJob", "Ray Train")
NO: Final = "no"
OWN: Final = "its own"
"""Texts of cells without a test: the plugin does not do it, and the launcher does not, or does it itself."""
BEGIN, END = "<!-- launchers:begin -->", "<!-- launchers:end -->"
PATH: Final = Path(__file__).resolve().parents[1] / "docs" / "clusters.md"


class Shown(NamedTuple):
    """A cell that a test shows. The test is in tests/gloo, without ``test_`` in the names of file and function."""

    test: str
    text: str = "yes"

    @property
    def node(self) -> str:
        """The id that pytest has for the test."""
        file, _, name = self.test.partition("::")
        return f"tests/gloo/test_{file}.py::test_{name}"


Cell = Shown | str


def _row(*cells: Cell) -> Mapping[str, Cell]:
    return dict(zip(LAUNCHERS, cells, strict=True))


def _hang(launcher: str, text: str = "yes") -> Shown:
    return Shown(f"hangs::hang_is_named[sleep-2-loop-{launcher}]", text)


def _guest(name: str, launcher: str, text: str = "yes") -> Shown:
    return Shown(f"guests::{name}[{launcher}]", text)


_ALL_SETTINGS: Final = "scripts::every_launcher_passes_all_settings"
_KILLED: Final = "killed_run_resumes_and_reports_lost_steps"
_REFUSED: Final = "third_identical_failure_is_refused"
_PLACE: Final = "failure_is_recorded_with_its_place"
_LOST: Final = "lost_connection_names_the_rank_that_ended"
_THREADS: Final = "threads_after_the_script_are_named"
_JOINS: Final = "machine_joins_and_samples_stay_the_same"
_OTHER_RANKS: Final = "start_on_other_ranks_keeps_samples_per_step"

FEATURES: Final[Mapping[str, Mapping[str, Cell]]] = {
    "settings applied, report": _row(
        Shown(f"{_ALL_SETTINGS}[hf-fsdp launch]"),
        Shown(f"{_ALL_SETTINGS}[torchrun]"),
        Shown(f"{_ALL_SETTINGS}[accelerate launch]"),
        _guest(_THREADS, "srun"),
        _guest(_THREADS, "PyTorchJob"),
        _guest(_KILLED, "Ray Train"),
    ),
    "no line in the script": _row(
        Shown(f"{_ALL_SETTINGS}[hf-fsdp launch]"),
        Shown("enable::trainer_under_torchrun_is_reported", "after `hf-fsdp enable`"),
        Shown("enable::trainer_under_accelerate_launch_is_reported[false]", "after `hf-fsdp enable`"),
        NO,
        Shown("enable::trainer_under_torchrun_is_reported", "after `hf-fsdp enable`"),
        NO,
    ),
    "hang named": _row(
        _hang("hf-fsdp"),
        _hang("torchrun"),
        _hang("accelerate"),
        _hang("srun"),
        _guest("hang_is_named", "PyTorchJob"),
        _guest("hang_is_named", "Ray Train"),
    ),
    "exit code of a hang": _row(
        _hang("hf-fsdp", "75"),
        _hang("torchrun", "1, prints 75"),
        _hang("accelerate", "1, prints 75"),
        _hang("srun", "75"),
        _guest("hang_is_named", "PyTorchJob", "1, prints 75"),
        OWN,
    ),
    "exception with its place": _row(
        Shown("launch::exception_is_shown_once_with_user_frames", "summary"),
        Shown("hangs::exception_is_the_root_cause_of_torchrun", "in `Root Cause`"),
        _guest(_PLACE, "accelerate launch", "in `Root Cause`"),
        _guest(_PLACE, "srun", "traceback, record"),
        _guest(_PLACE, "PyTorchJob", "in `Root Cause`"),
        OWN,
    ),
    "first cause of a lost connection": _row(
        Shown("launch::lost_connection_is_reported_in_one_line"),
        _guest(_LOST, "torchrun"),
        _guest(_LOST, "accelerate launch"),
        _guest(_LOST, "srun"),
        _guest(_LOST, "PyTorchJob"),
        NO,
    ),
    "restart resumes, lost steps in the report": _row(
        Shown("restarts::killed_run_has_the_losses_of_an_uninterrupted_one[2]"),
        Shown("restarts::torchrun_resumes_its_own_run_only"),
        _guest(_KILLED, "accelerate launch"),
        Shown("restarts::requeued_job_of_srun_resumes", "when requeued"),
        _guest(_KILLED, "PyTorchJob"),
        _guest(_KILLED, "Ray Train"),
    ),
    "third identical failure refused": _row(
        Shown("restarts::failure_at_the_same_step_ends_the_run"),
        Shown("restarts::torchrun_refuses_a_third_identical_failure"),
        _guest(_REFUSED, "accelerate launch"),
        _guest(_REFUSED, "srun"),
        _guest(_REFUSED, "PyTorchJob"),
        NO,
    ),
    "machines may leave and join": _row(
        _guest(_JOINS, "hf-fsdp launch"),
        _guest(_JOINS, "torchrun"),
        NO,
        NO,
        _guest(_JOINS, "PyTorchJob"),
        OWN,
    ),
    "samples per step kept on other ranks": _row(
        _guest(_JOINS, "hf-fsdp launch"),
        _guest(_JOINS, "torchrun"),
        _guest(_OTHER_RANKS, "accelerate launch-4", "new start"),
        _guest(_OTHER_RANKS, "srun-4", "when requeued"),
        _guest(_JOINS, "PyTorchJob"),
        _guest(_OTHER_RANKS, "Ray Train-1"),
    ),
    "threads that hold the exit (W741)": _row(
        Shown("launch_exit::thread_that_never_ends_fails_the_run"),
        Shown("hangs::threads_after_the_script_are_named"),
        _guest(_THREADS, "accelerate launch"),
        _guest(_THREADS, "srun"),
        _guest(_THREADS, "PyTorchJob"),
        NO,
    ),
    "exit code of the script": _row(
        Shown("launch::launcher_returns_exit_code_of_failed_rank[1-42]"), NO, NO, OWN, NO, NO
    ),
    "log file of each rank": _row(
        Shown("launch_exit::log_on_a_full_disk_does_not_stop_the_run", "`--log_dir`"), OWN, OWN, OWN, OWN, OWN
    ),
}
"""Feature -> launcher -> what it does. A PyTorchJob is torchrun that is started by the variables of its pod."""


def table() -> str:
    """Return the table in Markdown."""
    lines = [f"| | {' | '.join(f'`{name}`' if name.islower() else name for name in LAUNCHERS)} |"]
    lines.append("|---" * (len(LAUNCHERS) + 1) + "|")
    for feature, cells in FEATURES.items():
        texts = [cell if isinstance(cell, str) else cell.text for cell in cells.values()]
        lines.append(f"| {feature} | {' | '.join(texts)} |")
    return "\n".join(lines)


def clusters() -> str:
    """Return ``docs/clusters.md`` with the present table."""
    before, begin, rest = PATH.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PATH} has no place for the table"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"
