"""The options and the result of a merge."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.problems import Problem, has_errors


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeOptions:
    """Options of a merge.

    Attributes:
        dtype: torch's name of the dtype for all floating-point tensors; ``None`` keeps their dtypes.
        max_shard_size: maximum number of bytes of tensors per file.
        config: the folder with the config and the tokenizer; ``None`` searches the checkpoint and the run folder above
            it.
        number: index of the model in the checkpoint, if ``Accelerator.prepare`` was called with several models.
        force: replace an existing output folder.
        verify_input: compare the bytes that are read with the hashes of the manifest.
        verify: compare every byte of the output with the checkpoint.
        delete_input: verify, and delete the merged files of the checkpoint if all checks pass.
    """

    dtype: str | None = None
    max_shard_size: int = 5 * 10**9
    config: Path | None = None
    number: int = 0
    force: bool = False
    verify_input: bool = True
    verify: bool = False
    delete_input: bool = False


@dataclass(kw_only=True, slots=True)
class Merged:
    """The result of a merge.

    Attributes:
        format: name of the checkpoint's format: ``dcp``, ``full``, ``bin`` or ``per_rank``.
        num_tensors: number of tensors written; tied ones count once.
        num_bytes: size of all weight files in bytes.
        files: the weight files; ``resumed`` lists those that an earlier, interrupted merge had finished.
        companions: config, tokenizer and other files copied from ``config_folder``.
        aliases: omitted tied name -> the name under which its tensor is written.
        compared_with: what names and shapes were compared with: ``manifest``, ``model`` or empty.
        verified: whether every byte was compared.
        deleted: whether the checkpoint's files were deleted.
        problems: warnings and notes; an error only if ``delete_input`` could not delete the input.
    """

    out: Path
    format: str
    num_tensors: int
    num_bytes: int
    files: list[str]
    resumed: list[str]
    config_folder: Path | None
    companions: list[str]
    aliases: dict[str, str]
    compared_with: str = ""
    verified: bool = False
    deleted: bool = False
    problems: list[Problem] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": not has_errors(self.problems),
            "out": str(self.out),
            "format": self.format,
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "files": self.files,
            "resumed": self.resumed,
            "config_folder": str(self.config_folder) if self.config_folder is not None else None,
            "companions": self.companions,
            "aliases": self.aliases,
            "compared_with": self.compared_with or None,
            "verified": self.verified,
            "deleted": self.deleted,
            "problems": [problem.to_json() for problem in self.problems],
        }
