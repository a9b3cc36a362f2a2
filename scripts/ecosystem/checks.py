"""What is read off a finished run: numbers, report, saved model, error; and the comparison of two runs."""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.ecosystem.runs import Run

Numbers = dict[str, float]

_NAMES = {"loss", "eval_loss", "grad_norm", "reward", "kl", "accuracy", "f1"}
_PREFIXES = ("eval_", "test_", "predict_")
# Not the same in every run, or averages over ranks with unequal numbers of tokens.
_NOT_COMPARED = (
    *("runtime", "per_second", "mem", "samples", "num_", "time", "tokens"),
    *("entropy", "token_accuracy", "rewards/", "logps", "logits", "completions"),
)
CODE = re.compile(r"FSDP-E\d{3}")
_FAILED = re.compile(r"hf-fsdp: rank \d+ failed \([^)]*\): (.*)")
_RAISED = re.compile(r"^(?:\[rank\d+\]: )?([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)", re.MULTILINE)


def read_numbers(run: Run) -> Numbers:
    """Return losses and metrics by step: from ``trainer_state.json``, otherwise from the printed dictionaries."""
    states = sorted(run.out.glob("out/**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    states += sorted(run.out.glob("trainer_state.json"))
    rows: list[tuple[str, Mapping[str, Any]]] = []
    if states:
        history = max((json.loads(path.read_text())["log_history"] for path in states), key=len)
        rows = [(f"step {row['step']}", row) for row in history]
    else:
        printed = [line for line in run.log.splitlines() if "{'" in line and line.rstrip().endswith("}")]
        for number, line in enumerate(printed):
            try:
                found = ast.literal_eval(line[line.index("{'") :].strip())
            except (ValueError, SyntaxError):
                continue
            rows.append((f"line {number + 1}", found))
    return {
        f"{where} {name}": float(value)
        for where, row in rows
        for name, value in row.items()
        if isinstance(value, (int, float)) and _is_compared(name)
    }


def _is_compared(name: str) -> bool:
    if name in _NAMES:
        return True
    return name.startswith(_PREFIXES) and not any(part in name for part in _NOT_COMPARED)


def compare_numbers(ours: Numbers, reference: Numbers, tolerance: float) -> tuple[float, list[str]]:
    """Return the largest relative difference, and the numbers that differ by more than `tolerance`."""
    faults = [f"{name} is missing" for name in reference if name not in ours]
    largest = 0.0
    for name, wanted in reference.items():
        if name not in ours:
            continue
        got = ours[name]
        if math.isnan(got) or math.isnan(wanted):
            faults.append(f"{name} is {got} instead of {wanted}")
            continue
        # A loss near zero is a sum of rounding errors, as norms and metrics are.
        difference = abs(got - wanted) / max(abs(wanted), 1e-2)
        if "loss" in name:
            largest = max(largest, difference)
        if difference > (tolerance if "loss" in name else 10 * tolerance):
            faults.append(f"{name} is {got:.6g} instead of {wanted:.6g}")
    return largest, faults


def check_report(run: Run) -> list[str]:
    """Return what is wrong with the report: none, a setting that differs, an error."""
    paths = sorted({*run.out.glob("fsdp_report.json"), *run.out.glob("out*/fsdp_report.json")})
    if not paths:
        return ["no fsdp_report.json"]
    faults = []
    for path in paths:
        report = json.loads(path.read_text())
        differing = [row["setting"] for row in report["settings"] if row["status"] == "differs"]
        errors = [problem["code"] for problem in report["problems"] if problem["severity"] == "error"]
        faults += [f"{path.name}: {name} differs" for name in differing] + [f"{path.name}: {code}" for code in errors]
        if not report.get("units"):
            faults.append(f"{path.name}: nothing is sharded")
    return faults


def read_error(run: Run) -> tuple[str, str]:
    """Return the first line of the error of a failed run, and the problem code if the plugin refused the script."""
    if run.timed_out:
        return f"no end after {run.seconds:.0f} s", ""
    text = run.log
    failed = _FAILED.search(text)
    if failed:
        return failed[1].strip()[:300], _first(CODE, text[failed.start() :])
    refused = [line.strip() for line in text.splitlines() if CODE.search(line)]
    if refused and "Traceback" not in text:
        return refused[0][:300], _first(CODE, refused[0])
    raised = _RAISED.findall(text)
    if raised:
        return raised[-1].strip()[:300], ""
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[-1].strip()[:300] if lines else "no output"), ""


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[0] if found else ""


def read_weights(folder: Path) -> dict[str, Any]:
    """Return the tensors of all safetensors files in a folder."""
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def compare_weights(ours: Path, reference: Path, start: Path | None, limit: float) -> tuple[float | None, list[str]]:
    """Return the L2 distance of two saved models relative to the change by the training, and what is wrong."""
    import torch

    got, wanted = read_weights(ours), read_weights(reference)
    if not got:
        return None, [f"no weights in {ours.name}"]
    if not wanted:
        return None, [f"the reference saved no weights in {reference.name}"]
    faults = []
    if got.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - got.keys()), sorted(got.keys() - wanted.keys())
        faults.append(f"saved tensors: {len(missing)} missing {missing[:2]}, {len(extra)} extra {extra[:2]}")
    first = read_weights(start) if start is not None else {}
    distance = change = 0.0
    for name in sorted(wanted.keys() & got.keys()):
        a, b = got[name].float(), wanted[name].float()
        # Under mixed precision FSDP keeps fp32 weights, where one process trains in bf16.
        if a.shape != b.shape or got[name].dtype not in (wanted[name].dtype, torch.float32):
            kinds = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (got[name], wanted[name])]
            faults.append(f"saved {name}: {kinds[0]}, expected {kinds[1]}")
            continue
        if not bool(a.isfinite().all()):
            faults.append(f"saved {name} is not finite")
        origin = first.get(name)
        origin = origin.float() if origin is not None and origin.shape == b.shape else None
        distance += float((a - b).square().sum())
        # The initial value of a new layer is unknown. lora_B begins with zeros; lora_A is random.
        if "lora_A" not in name:
            change += float((b if origin is None else b - origin).square().sum())
    if change == 0.0:
        return None, [*faults, "the saved weights are the initial ones"]
    relative = math.sqrt(distance / change)
    if not relative <= limit:
        faults.append(f"saved weights differ by {relative:.1e} of their change")
    return relative, faults


def _pretrained(name: str) -> Callable[[Path], list[str]]:
    def load(folder: Path) -> list[str]:
        import transformers

        _model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
        return [f"{kind}: {sorted(map(str, keys))[:3]}" for kind, keys in info.items() if keys]

    return load


def _adapter(folder: Path) -> list[str]:
    import peft

    kind = json.loads((folder / "adapter_config.json").read_text())["task_type"]
    names = {"CAUSAL_LM": "ForCausalLM", "SEQ_CLS": "ForSequenceClassification"}
    model = getattr(peft, f"AutoPeftModel{names.get(kind, '')}").from_pretrained(folder)
    # PEFT loads what it finds and leaves the rest as it was initialized.
    loaded, saved = peft.get_peft_model_state_dict(model), read_weights(folder)
    missing, extra = sorted(loaded.keys() - saved.keys()), sorted(saved.keys() - loaded.keys())
    faults = [f"{name} is not in the file" for name in missing[:2]] + [f"{name} is not loaded" for name in extra[:2]]
    other = [name for name in loaded.keys() & saved.keys() if not bool((loaded[name] == saved[name]).all())]
    return faults + [f"{name} is loaded with other values" for name in sorted(other)[:2]]


def _sentence_transformer(folder: Path) -> list[str]:
    import sentence_transformers

    shape = sentence_transformers.SentenceTransformer(str(folder)).encode(["a sentence"]).shape
    return [] if shape[0] == 1 else [f"encode returns {shape}"]


def _cross_encoder(folder: Path) -> list[str]:
    import sentence_transformers

    shape = sentence_transformers.CrossEncoder(str(folder)).predict([("a", "b")]).shape
    return [] if shape == (1,) else [f"predict returns {shape}"]


LOADERS: dict[str, Callable[[Path], list[str]]] = {
    "causal_lm": _pretrained("AutoModelForCausalLM"),
    "classification": _pretrained("AutoModelForSequenceClassification"),
    "tags": _pretrained("AutoModelForTokenClassification"),
    "masked_lm": _pretrained("AutoModelForMaskedLM"),
    "answers": _pretrained("AutoModelForQuestionAnswering"),
    "choice": _pretrained("AutoModelForMultipleChoice"),
    "seq2seq": _pretrained("AutoModelForSeq2SeqLM"),
    "adapter": _adapter,
    "sentence_transformer": _sentence_transformer,
    "cross_encoder": _cross_encoder,
}
"""Name -> a function that loads a saved model, and returns what is missing or unexpected in it."""


def check_model(kind: str, folder: Path, work: Path) -> list[str]:
    """Load a saved model as its users do, from the working folder of the run, and return what is wrong."""
    here = Path.cwd()
    os.chdir(work)
    try:
        return [f"the saved model: {fault}" for fault in LOADERS[kind](folder)]
    except Exception as error:
        return [f"the saved model does not load: {type(error).__name__}: {str(error).splitlines()[0][:200]}"]
    finally:
        os.chdir(here)
