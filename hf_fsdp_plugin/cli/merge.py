"""``hf-fsdp merge``: any checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.checkpoint import Merged, MergeOptions, merge
from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem, has_errors

if TYPE_CHECKING:
    from tqdm import tqdm

HELP = "Write any checkpoint's model as a Hugging Face folder, block by block, without loading it."
EXAMPLES = (
    "hf-fsdp merge out/checkpoint-500 merged",
    "hf-fsdp merge out/checkpoint-500 merged --dtype bf16 --verify",
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint's folder, or its model's")
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything but what to merge; for other verbs that write a merged folder."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write; it appears when it is complete")
    parser.add_argument("--dtype", choices=DTYPES, help="convert floating-point tensors; otherwise they are copied")
    parser.add_argument(
        "--max-shard-size", type=_size, default=_size("5GB"), metavar="SIZE", help="bytes a file (default: 5GB)"
    )
    parser.add_argument(
        "--config", type=Path, metavar="DIR", help="where config and tokenizer are; CKPT or the folder above it if not"
    )
    parser.add_argument(
        "--model-number", type=int, default=0, metavar="N", help="which of several models in the checkpoint"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if there is something in it")
    parser.add_argument("--verify", action="store_true", help="compare every byte written with the checkpoint's")
    parser.add_argument(
        "--delete-input",
        action="store_true",
        help="verify, and delete the model's files of CKPT if all checks passed; optimizer and the rest stay",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the folder is there and all that was asked has been done, 1 otherwise."""
    options = MergeOptions(
        dtype=DTYPES.get(args.dtype),
        max_shard_size=args.max_shard_size,
        config=args.config,
        number=args.model_number,
        force=args.force,
        verify=args.verify,
        delete_input=args.delete_input,
    )
    bar = _Bar() if sys.stderr.isatty() else None
    try:
        merged = merge(args.checkpoint, args.out, options, bar)
    except CheckpointError as error:
        return _failed(list(error.problems), as_json=args.json)
    except OSError as error:
        return _failed([_disk_problem(error, args.out)], as_json=args.json)
    finally:
        if bar is not None:
            bar.close()
    print(json.dumps(merged.to_json(), indent=2, ensure_ascii=False) if args.json else _text(merged))
    for problem in merged.problems if not args.json else ():
        print(problem, file=sys.stderr)
    return 1 if has_errors(merged.problems) else 0


def _failed(problems: list[Problem], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"ok": False, "problems": [problem.to_json() for problem in problems]}, indent=2))
    else:
        print("\n".join(map(str, problems)), file=sys.stderr)
    return 1


def _disk_problem(error: OSError, out: Path) -> Problem:
    fix = "Repair that and merge again: the files that were finished are kept."
    origin = Origin(source=str(error.filename or out))
    return Problem(severity="error", message=f"{error.strerror or error}.", fix=fix, origin=origin)


def _text(merged: Merged) -> str:
    files = f"{len(merged.files)} files" if len(merged.files) > 1 else merged.files[0]
    lines = [f"{merged.out}: {merged.num_tensors} tensors, {_shown(merged.num_bytes)} in {files}"]
    if merged.resumed:
        lines.append(f"  {len(merged.resumed)} of them were finished by an earlier merge")
    if merged.companions:
        lines.append(f"  with {', '.join(merged.companions)}")
    checks = [f"names and shapes are those of the {merged.compared_with}"] if merged.compared_with else []
    checks += ["every byte was compared"] if merged.verified else []
    if checks:
        lines.append(f"  {'; '.join(checks)}")
    if merged.deleted:
        lines.append("  the checkpoint's model files are deleted")
    return "\n".join(lines)


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.2f} MB"


def _size(text: str) -> int:
    """Bytes of ``5GB``, ``500MiB`` or a plain number, as Hugging Face reads them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?I?)B?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match is not None and match[2] in _UNITS else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; write 5GB, 500MB or 2GiB")
    return size


class _Bar:
    """A progress bar on the terminal for each thing that takes time."""

    def __init__(self) -> None:
        self._bars: dict[str, tqdm[Any]] = {}

    def __call__(self, what: str, count: int, total: int) -> None:
        from tqdm import tqdm

        if what not in self._bars:
            self._bars[what] = tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False)
        self._bars[what].update(count)

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()
