"""Which way is better for each figure of the results, in one table. ``compare.py`` reads it.

A figure is named by the keys that lead to it, joined by ``/``; rows of a list are named by what identifies them. The
first row of the table whose pattern is found in the name decides. A new figure without a row fails a test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Better = Literal["smaller", "larger", "nearer 0", "not compared"]


@dataclass(frozen=True, slots=True)
class Direction:
    """``floor``: a change of less than this, in the unit of the figure, does not count."""

    pattern: str
    better: Better
    floor: float = 0.0


_LAST: Final = r"(^|/)({})$"


def _last(names: str, better: Better, floor: float = 0.0) -> Direction:
    """Return the row of figures whose last key is one of some alternatives."""
    return Direction(_LAST.format(names), better, floor)


_SUBJECT: Final = (
    "ranks|world_size|rounds|pairs|version|number|numbers|threads|num_params|num_functions|per_rank_batch|steps_per_block|blocks|steps"
    "|losses_compared|schema_version|range|seed|layers|hidden|seq_len|batch|weights_bytes|model_bytes|largest_bytes"
    "|shard_bytes|bound_bytes|loaded_bytes|held_bytes|checkpoint_bytes|measured_bytes|checkpoint_files|checksum|sum"
    "|published|predicted|low|high|data_reads|predicted_bytes|flops|peak_flops|num_cases|num_values|steps_between_saves"
    "|load_average_of_15_minutes|limit|full_disks|seconds_without|hand_step_seconds|rows|fit|rows_with_other_units|seeds"
    "|last_steps|trials|attempts|calls_per_step|minutes|exit_code"
)
"""Last keys of figures that describe what is measured, or what others need."""
DIRECTIONS: Final = (
    # Ratios with others come first, because the rows for what others need would match them too.
    Direction(r"(^|/)cp$", "not compared"),
    Direction(r"times_as_fast", "larger"),
    Direction(r"(^|/)comparisons/.*/ratio$", "larger", 0.01),
    Direction(r"^targets/|memory_of_stock|peak_of_stock|peak_at_4_gb_of_1_gb/ours", "smaller"),
    Direction(r"^ratios/|(^|/)ratio(_median)?$|_ratio$|^ratios_of_rounds$", "smaller", 0.01),
    # Exit codes, restarts, and moments of kills.
    Direction(r"^runs/.*(/exit_code|/losses|/bitwise_equal)$|/restarts$|^runs/[^/]+/kills", "not compared"),
    Direction(r"^cases/[^/]+/(promised_seconds|measured_seconds|gains|step_seconds|ratio)", "not compared"),
    # Migrations: configs with equal losses, and differences of losses and norms.
    Direction(r"^(equal|returned)$", "larger"),
    Direction(r"^rows/.*/(from_version|to_version|tolerance|changes)$|^configs$", "not compared"),
    Direction(r"^rows/.*/(norm_difference|settings_that_differ)$", "smaller", 1e-3),
    Direction(r"^rows/.*/peak_bytes/(old|new)$", "not compared"),
    Direction(r"^num_uncovered$", "smaller"),
    # What the dtype of the reduction changes: the losses themselves depend on seed and model.
    Direction(r"^gradient_error/", "smaller", 1e-3),
    Direction(r"^(loss_gap|final_loss)/", "not compared"),
    # Pairs of axes: differences from one process.
    Direction(r"^pairs/.*/(losses|norms|resumed_losses)$", "smaller", 1e-5),
    Direction(r"^pairs/.*/(verified|merged_equal|exported_equal)$", "larger"),
    Direction(r"^pairs/.*/settings_that_differ$", "smaller"),
    Direction(r"^pairs/.*/(sizes|mesh|asynchronous|ranks)(/|$)", "not compared"),
    # Tests of other libraries: those without the plugin are what it is compared with.
    Direction(r"^suites/.*/with/passed$", "larger"),
    Direction(r"^suites/.*/with/failed$", "smaller"),
    Direction(r"^suites/", "not compared"),
    # Versions of other libraries, and their names.
    Direction(r"^combinations/.*/passed$", "larger"),
    Direction(r"^counts/(refused|cannot be tried|cannot be created|layers not found)$", "smaller"),
    Direction(r"^combinations/|^counts/|^names/|^models/", "not compared"),
    # Public configs: keys by what becomes of them.
    Direction(r"^dialects/.*/(lost|unknown|refused)$", "smaller"),
    Direction(r"^dialects/.*/(same_spec|converted)$", "larger"),
    Direction(r"^dialects/|^refusals/|^repositories$", "not compared"),
    # Checks on a GPU: its figures, and those of other systems.
    Direction(
        r"/figures/(tokens_per_second/plugin|times_as_fast_as/|gb_per_second|tflop_per_second|overlapped)",
        "larger",
        0.01,
    ),
    Direction(r"/figures/errors/", "nearer 0", 0.005),
    Direction(r"/figures/(waits/plugin|peak_bytes/plugin|load_seconds/plugin|\w*stall_seconds|pin_seconds)", "smaller"),
    Direction(r"/figures/", "not compared"),
    # Host waits, and their largest numbers.
    Direction(r"^rows/(step|load|save|resume)[^/]*/plugin$", "smaller"),
    Direction(r"^rows/(step|load|save|resume)[^/]*/allowed$", "not compared"),
    # Connections of gloo between all ranks, for comparison.
    Direction(r"/all pairs/", "not compared"),
    # What the result describes, and other programs.
    _last(_SUBJECT, "not compared"),
    Direction(r"(^|/)(workload|settings|versions|samples|checkpoint_bytes)/", "not compared"),
    Direction(r"predicted/.*/(bytes|seconds)$|^kinds/[^/]+/(cases|values)$", "not compared"),
    Direction(r"^kills|flipped_bytes/.*/files$", "not compared"),
    Direction(r"\bstock\b|(^|/)(torchrun/|python(/|, )|accelerate env/)", "not compared"),
    Direction(r"_(quartiles|95)$|(^|/)(lowest|highest)$", "not compared"),
    # Predicted and published times: their error is compared.
    Direction(r"^rows/.*/(low|high|communication|compute|exposed|step|measured)_seconds$", "not compared"),
    Direction(r"^rows/.*/mfu$", "not compared"),
    Direction(r"^parameters/|^point|^rows/.*/(fitted|logarithm)$", "not compared"),
    Direction(r"^groups/.*/runs$|^runs$", "not compared"),
    Direction(r"(^|/)inside$", "larger"),
    Direction(r"median_signed_error$|^mean_of_sources$", "nearer 0", 0.005),
    # Figures of this package.
    _last("added_cpu_ms", "smaller", 0.2),
    _last("disabled_ms|added_ms|added_cpu_ms_low|added_cpu_ms_high", "not compared"),
    _last("(samples|tokens)_per_second|efficiency|mfu|found|agreement|full_memory_saved_bytes", "larger"),
    Direction(r"relative_difference$|relative_loss_difference$|(loss|weight)_difference$", "smaller", 1e-5),
    Direction(r"(^|/)(error|median_error|worst_error|summary)(/|$)", "nearer 0", 0.005),
    Direction(r"_error$|^loss_gap", "nearer 0", 1e-6),
    Direction(r"^(num_disagreements|most_steps_lost)", "smaller"),
    Direction(r"step_seconds", "smaller", 0.002),
    Direction(r"seconds|/fastest$|/updated$|/from_pretrained$|/(wall|cpu_of_a_rank|cpu_of_rank_0)$", "smaller", 0.02),
    Direction(r"bytes|_mb(/|$)|/Rss|opened_files$|(metadata_|resume/)reads$|read_over_held$", "smaller"),
    _last("loss|alarms|notices|start_sockets|used_sockets", "smaller"),
    _last("share", "smaller", 0.001),
    _last("watcher_share", "smaller", 0.001),
    Direction(r"overhead|(^|_|/)lost(_|$)|difference|false_alarms|missed", "smaller", 0.001),
    Direction(r"(^|/)(num_\w+|\w*count\w*)$", "not compared"),
)


def direction_of(name: str) -> Direction | None:
    """Return the row of a figure; ``None`` if the table has none."""
    return next((row for row in DIRECTIONS if re.search(row.pattern, name)), None)
