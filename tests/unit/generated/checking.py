"""Runs a case through ``assess`` and compares the result with what the document states."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.sources.interface import Sources, config_of
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.tools.convert.conversion import with_converted_config
from tests.unit.generated.cases import RULES, Case, Expected

SLOW_SECONDS = 5.0
"""CPU time after which a case counts as a hang."""


def disagreement(case: Case, folder: Path) -> str | None:
    """What is wrong with the result of a case; ``None`` if it agrees with the document."""
    sources = dict(case.sources)
    if "file" in sources:
        content = sources.pop("file")
        path = folder / f"config.{sources.pop('suffix', 'yaml')}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        sources["config"] = str(path)
    sources["config"] = config_of(sources.get("config"))
    began = time.process_time()
    try:
        read = Sources(**{"environ": {}, **sources})
        assessment = assess(with_converted_config(read) if case.kind == "value in a script's config" else read)
        text = "\n".join(str(problem) for problem in assessment.problems)
        assert assessment.ok or str(SpecError(assessment.problems)) or text
    except Exception:
        return "traceback: " + traceback.format_exc(limit=-3)
    if (seconds := time.process_time() - began) > SLOW_SECONDS:
        return f"took {seconds:.1f} seconds"
    errors = [problem for problem in assessment.problems if problem.severity == "error"]
    for problem in errors:
        if complaint := _incomplete(problem):
            return f"{complaint}: {problem}"
    if case.unchecked:
        return None
    if case.whole:
        found = {problem.code for problem in errors}
        return None if len(errors) == 1 and found <= case.whole else f"expected {set(case.whole)}, found {errors}"
    for expected in case.expected:
        if complaint := _compare(expected, assessment, errors):
            return complaint
    if case.overridden and not _is_reported(case, assessment):
        return f"{case.overridden} is overridden, which is not reported: {assessment.problems}"
    refused = {expected.key for expected in case.expected if expected.verdict.answer == "refused"}
    others = [p for p in errors if p.code not in case.codes and (p.origin is None or p.origin.spelling not in refused)]
    return f"unexpected errors: {'; '.join(map(str, others))}" if others else None


def _incomplete(problem: Problem) -> str:
    """Whether a refusal lacks the place, the value or what is expected, or a remedy."""
    if problem.origin is None and problem.code != "FSDP-E055":
        return "a refusal without a place"
    if not problem.fix:
        return "a refusal without a remedy"
    if problem.code == "FSDP-E101" and (" is " not in problem.message or "; expected " not in problem.message):
        return "a refusal without the value and what is expected"
    if not problem.message or len(str(problem)) > 2000:
        return "a refusal without a message of reasonable length"
    return ""


def _compare(expected: Expected, assessment: Assessment, errors: list[Problem]) -> str:
    own = [p for p in errors if p.origin is not None and p.origin.spelling == expected.key]
    answer, setting = expected.verdict.answer, expected.setting
    about = f"{expected.key} ({setting.name if setting else 'unknown'}) should be {expected.verdict}"
    if answer == "refused":
        has_parts = setting is not None and setting.kind in ("names", "options")  # each part has its own problem
        if len(own) != 1 and not (own and has_parts):
            return f"{about}; problems about it: {len(own)}; {_shown(expected, assessment)}"
        if expected.line is not None and own[0].origin is not None and own[0].origin.line != expected.line:
            return f"{about} in line {expected.line}; reported: {own[0]}"
        return ""
    if answer == "not set":
        origins = [origin for origin in assessment.spec.origins.values() if origin.spelling == expected.key]
        if own or origins:
            return f"{about}; it is {'refused' if own else 'set'}: {own or origins}"
        return ""
    assert setting is not None
    if setting.kind == "options":
        wrong_names = [name for name, value in expected.verdict.value.items() if assessment.spec.get(name) != value]
        return f"{about}; {wrong_names}, {_shown(expected, assessment)}" if wrong_names or own else ""
    name, value = _observed(setting.name, expected.verdict.value)
    found = _find(assessment, name) if name else None
    wrong = name and (type(found) is not type(value) or found != value)
    return f"{about}; {_shown(expected, assessment)}" if wrong or _refusals(expected, own) else ""


def _refusals(expected: Expected, own: list[Problem]) -> list[Problem]:
    assert expected.setting is not None
    allowed = RULES.get(expected.setting.name, frozenset())
    return [problem for problem in own if problem.code not in allowed]


def _shown(expected: Expected, assessment: Assessment) -> str:
    assert assessment.problems is not None
    name, _ = _observed(expected.setting.name, None) if expected.setting else ("", None)
    found = repr(_find(assessment, name)) if name else "–"
    return f"found {found}, problems: {'; '.join(map(str, assessment.problems))}"


def _find(assessment: Assessment, name: str) -> Any:
    if name.startswith("launch.dynamo_config."):
        return assessment.spec.launch.dynamo_config.get("dynamo_" + name.rpartition(".")[2])
    if name.startswith("fp8.te_options."):
        return assessment.spec.fp8.te_options.get(name.rpartition(".")[2])
    return assessment.spec.get(name)


_AXES = tuple(f"mesh.{name}" for name in ("shard", "replicate", "context", "context_exchange", "tensor", "expert"))


def _observed(name: str, value: Any) -> tuple[str, Any]:
    """The setting of the spec that shows the value of a setting, and its value there; empty if none does."""
    if name in ("sharding.reshard",):
        return "sharding.strategy", value
    if name == "precision.policy":
        return ("precision.param", value) if isinstance(value, str) else ("", None)
    if name in ("training.bf16", "training.fp16", "training.fp8", "launch.fp16") and value:
        return "launch.mixed_precision", name.rpartition(".")[2]
    if name == "xla.settings":
        return "", None
    if name.startswith(("launch.dynamo_config.", "fp8.te_options.")):
        return name, value
    prefixes = ("launch.extra", "training.", "distributed.", "launch.fsdp_config", "launch.parallelism_config",
                "launch.dynamo_config", "activation.trainer", "launch.fp16", "launch.fp8_config",
                "fp8.opt_level")  # fmt: skip
    if name.startswith(prefixes) or (name.startswith("mesh.") and name not in _AXES):
        return "", None
    return name, value


def _is_reported(case: Case, assessment: Assessment) -> bool:
    codes = ("FSDP-W103", "FSDP-N104", "FSDP-N105")
    return any(p.code in codes and p.origin and p.origin.spelling == case.overridden for p in assessment.problems)
