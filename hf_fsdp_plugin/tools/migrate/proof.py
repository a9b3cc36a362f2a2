"""``hf-fsdp migrate --prove``: the old and the new config train a tiny clone on CPU ranks, and are compared."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.problems import Problem, SpecError, has_errors
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.sources.tree import ConfigFile
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.spec.values import setting_to_json
from hf_fsdp_plugin.text import format_memory
from hf_fsdp_plugin.tools.common import colored_table
from hf_fsdp_plugin.tools.convert.conversion import with_converted_config
from hf_fsdp_plugin.tools.migrate.rewriting import Migration
from hf_fsdp_plugin.tools.preflight.run import PreflightResult, run_preflight

_TOLERANCES: Final = {False: 1e-5, True: 1e-3}
"""Whether a setting computes or reduces in 16 bits -> largest relative difference of losses that are equal."""
_LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
}  # fmt: skip
"""The model without ``--model``."""
_LLAMA_LAYER: Final = "LlamaDecoderLayer"
_ARGUMENTS: Final = (
    "--learning_rate=1e-3", "--lr_scheduler_type=constant", "--gradient_accumulation_steps=2",
    "--per_device_train_batch_size=2", "--per_device_eval_batch_size=2", "--eval_strategy=no", "--save_strategy=no",
)  # fmt: skip
"""Arguments of the runs: a step has two micro-batches, and changes the weights so much that an error is visible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The comparison of two runs.

    Attributes:
        rows: what is compared, and its value with the old and with the new config.
        problems: the differences of losses, and notes on what was changed for the runs.
        signal_number: the signal that stopped it, or 0.
    """

    tolerance: float
    rows: Sequence[dict[str, Any]]
    problems: Sequence[Problem]
    signal_number: int = 0

    def to_json(self) -> dict[str, Any]:
        equal = bool(self.rows) and not has_errors(self.problems)
        return {"equal": equal, "tolerance": self.tolerance, "rows": setting_to_json(self.rows)}


def prove(migration: Migration, model: str | None, limit_s: float) -> Proof:
    """Train a clone of the model with both configs, one after the other.

    Args:
        model: the folder or name of a model; ``None`` for a small Llama.
        limit_s: seconds until the ranks of a run are stopped.

    Raises:
        SpecError: one of the runs has failed.
    """
    with tempfile.TemporaryDirectory(prefix="hf_fsdp_migrate_") as folder:
        if model is None:
            (Path(folder) / "config.json").write_text(json.dumps(_LLAMA))
        runs = []
        for name, file in (("old", migration.old), ("new", migration.new)):
            run = _run(file, model or folder, limit_s, is_llama=model is None)
            if run.signal_number:
                return Proof(tolerance=0.0, rows=(), problems=run.problems, signal_number=run.signal_number)
            check_run(name, run)
            runs.append(run)
    precision = migration.old_spec.precision
    tolerance = _TOLERANCES[bool({precision.param, precision.reduce} & {"bf16", "fp16"})]
    return compare(runs[0], runs[1], tolerance)


def check_run(name: str, run: PreflightResult) -> None:
    """Raise ``SpecError`` if a run has failed."""
    if not run.tree["ok"] or has_errors(run.problems) or not run.steps:
        message = f"the run with the {name} config has failed; the losses are not compared."
        fix = "Correct the other problems. hf-fsdp check --run runs one config alone."
        raise SpecError([Problem(code="FSDP-E794", message=message, fix=fix), *run.problems])


def compare(old: PreflightResult, new: PreflightResult, tolerance: float) -> Proof:
    """Return the comparison of two runs that have not failed."""
    rows = list(_rows(old, new))
    problems = list(dict.fromkeys(each for run in (old, new) for each in run.problems if each.severity != "error"))
    differing = [row for row in rows if row["what"].startswith("loss") and not row["difference"] <= tolerance]
    if differing:
        values = "; ".join(f"{row['what']}: {row['old']:.6g} and {row['new']:.6g}" for row in differing)
        message = f"the losses differ by more than {tolerance:g} (relative): {values}."
        fix = "Do not migrate a training with this config before the reason is known. Nothing was written."
        problems.append(Problem(code="FSDP-E793", message=message, fix=fix))
    return Proof(tolerance=tolerance, rows=rows, problems=problems)


def _run(file: ConfigFile, model: str, limit_s: float, *, is_llama: bool) -> PreflightResult:
    from hf_fsdp_plugin.tools.preflight.stages import Options

    sources = with_converted_config(Sources(config=file, environ={}))
    spec = assess(sources).checked_spec()
    notes: list[Problem] = []
    if is_llama and spec.wrap.classes not in ((), (_LLAMA_LAYER,)):
        message = f"the model is a small Llama with {_LLAMA_LAYER}; --model names another one."
        notes.append(spec.problem("FSDP-N757", "wrap.classes", message))
        sources = replace(sources, overrides=(f"wrap.classes={_LLAMA_LAYER}",))
        spec = assess(sources).checked_spec()
    run = run_preflight(spec, sources, Options(model=model, arguments=_ARGUMENTS, records_steps=True), limit_s)
    return replace(run, problems=(*notes, *run.problems))


def _rows(old: PreflightResult, new: PreflightResult) -> Iterator[dict[str, Any]]:
    def row(what: str, one: Any, other: Any) -> dict[str, Any]:
        is_measured = what.startswith(("loss", "gradient", "memory")) and None not in (one, other)
        difference = abs(other - one) / max(abs(one), 1e-12) if is_measured else None
        return {"what": what, "old": one, "new": other, "difference": difference}

    reports = old.report, new.report
    yield row("backend", *(report["backend"] for report in reports))
    yield row("mesh", *(_sizes(report["mesh"]) for report in reports))
    yield row("units", *(len(report["units"]) for report in reports))
    for what, name in (("loss", "loss"), ("gradient norm", "grad_norm")):
        for number, (one, other) in enumerate(zip(old.steps, new.steps, strict=True), 1):
            yield row(f"{what}, step {number}", one[name], other[name])
    for name in ("params", "grads", "optimizer", "peak"):
        yield row(f"memory, {name}", *(report["memory"][f"{name}_bytes"] for report in reports))
    observed = [{each["setting"]: each["observed"] for each in report["settings"]} for report in reports]
    for name in sorted(observed[0].keys() & observed[1].keys() - {"fsdp.version"}):
        one, other = (each[name] for each in observed)
        if one != other and None not in (one, other):
            yield row(name, one, other)
    counts = (sum(each["status"] == "differs" for each in report["settings"]) for report in reports)
    yield row("settings that differ from the config", *counts)


def _sizes(mesh: Mapping[str, int]) -> str:
    return " × ".join(f"{size} {axis}" for axis, size in mesh.items() if size > 1 or axis == "shard")


def proof_table(proof: Proof) -> str:
    """Return the table old | new | difference."""
    cells = [("", "old", "new", "difference")]
    for row in proof.rows:
        difference = "" if row["difference"] is None else f"{row['difference']:.1e}"
        if not difference and row["old"] != row["new"]:
            difference = "differs"
        old, new = (_shown(row["what"], row[side]) for side in ("old", "new"))
        cells.append((row["what"], old, new, difference))
    table = colored_table(cells, [None] * len(proof.rows))
    result = "differ by more than" if has_errors(proof.problems) else "are equal within"
    return f"{table}\n\nlosses {result} {proof.tolerance:g} (relative)"


def _shown(what: str, value: Any) -> str:
    if what.startswith("memory"):
        return format_memory(value) if value is not None else "unknown"
    return f"{value:.7g}" if isinstance(value, float) else str(value)
