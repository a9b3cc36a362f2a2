"""``hf-fsdp merge``: Write the model of any checkpoint as a Hugging Face folder. Memory use does not depend on the
model's size.

Examples::

    hf-fsdp merge out/checkpoint-500 merged --dtype bf16 --verify
    hf-fsdp merge lora/checkpoint-500 merged --fold-adapter llama
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from hf_fsdp_plugin.checkpoint.storage import url_of
from hf_fsdp_plugin.cli.output import print_result
from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem, UsageError
from hf_fsdp_plugin.text import SHORT_DTYPES, format_bytes, plural, printable
from hf_fsdp_plugin.tools.common import ProgressBars, check_folder, parse_bytes
from hf_fsdp_plugin.tools.merge.merging import Merged, MergeOptions, merge

DTYPES = {name: of_torch for of_torch, name in SHORT_DTYPES.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="the folder of a checkpoint, or of its model")
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all arguments except the checkpoint, for this verb and for ``export``."""
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="the folder to write; it is created when the merge is complete")
    add("--dtype", choices=DTYPES, help="dtype of floating-point tensors (default: unchanged)")
    add("--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="bytes per file (default: 5GB)")
    about = "folder of config and tokenizer (default: CKPT or the folder above it)"
    add("--config", type=Path, metavar="DIR", help=about)
    about = "merge the LoRA adapter of CKPT with the model in the folder BASE; --config is the folder of its config"
    add("--fold-adapter", type=Path, metavar="BASE", help=about)
    about = "the model to write, if the checkpoint contains several (default: 0)"
    add("--model-number", type=int, dest="number", default=0, metavar="N", help=about)
    add("--force", action="store_true", help="replace OUT if it is not empty")
    checks = parser.add_mutually_exclusive_group()
    checks.add_argument("--verify", action="store_true", help="compare every written byte with the checkpoint")
    about = "do not compare the bytes of the checkpoint with the hashes of its manifest while they are read"
    checks.add_argument("--no-verify", action="store_false", dest="verify_input", help=about)
    about = "verify, then delete the model files of CKPT if all checks pass; optimizer and other files are kept"
    add("--delete-input", action="store_true", help=about)


def run(args: argparse.Namespace) -> int:
    """Merge. Return 0 if OUT is complete and every option was applied, 1 otherwise, 2 if CKPT does not exist."""
    args.checkpoint = check_folder(args.checkpoint)
    if args.delete_input and not args.verify_input:
        raise UsageError("--no-verify conflicts with --delete-input. Keep one of them.")
    if args.fold_adapter is not None:
        check_folder(args.fold_adapter)
        if args.delete_input:
            raise UsageError("--fold-adapter conflicts with --delete-input. Keep one of them.")
    given = {field.name: vars(args)[field.name] for field in fields(MergeOptions) if field.name in args}
    return write(args, args.checkpoint, args.out, MergeOptions(**given | {"dtype": DTYPES.get(args.dtype)}))


def write(args: argparse.Namespace, checkpoint: Path, out: Path, options: MergeOptions) -> int:
    """Merge with these options, for this verb and for ``convert``. Returns what :func:`run` does."""
    if options.delete_input and (url := url_of(str(checkpoint))) is not None:
        raise UsageError(f"--delete-input deletes files of a folder. Delete {url} with the tools of its storage.")
    try:
        with ProgressBars() as progress:
            merged = merge(checkpoint, out, options, progress)
    except OSError as error:
        raise file_error(error, out) from error
    return print_result(args, merged.to_json(), _text(merged), merged.problems)


def file_error(error: OSError, out: str | Path) -> CheckpointError:
    """Return the error that a file cannot be read or written, for this verb and for ``convert``."""
    message = f"cannot be read or written: {error.strerror or error}."
    origin = Origin(source=str(error.filename or out))
    fix = "Fix the cause, and start again."
    return CheckpointError([Problem(code="FSDP-E495", message=message, fix=fix, origin=origin)])


def _text(merged: Merged) -> str:
    files = f"{len(merged.files)} files" if len(merged.files) > 1 else merged.files[0]
    lines = [f"{merged.out}: {plural(merged.num_tensors, 'tensor')}, {format_bytes(merged.num_bytes)} in {files}"]
    if merged.companions:
        lines.append(f"  copied: {', '.join(merged.companions)}")
    if merged.num_folded:
        lines.append(f"  merged with the adapter: {plural(merged.num_folded, 'tensor')}")
    checks = [f"names and shapes match the {merged.compared_with}"] if merged.compared_with else []
    checks += ["all bytes match the checkpoint"] if merged.verified else []
    if checks:
        lines.append(f"  checked: {'; '.join(checks)}")
    if merged.deleted:
        lines.append("  deleted: the model files of the checkpoint")
    return "\n".join(map(printable, lines))


def _size(text: str) -> int:
    """Return the number of bytes of ``5GB``, ``500MiB`` or a plain number, as Hugging Face does."""
    size = parse_bytes(text, plain=1, least=1)
    if size is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size; use a form such as 5GB, 500MB or 2GiB")
    return size
