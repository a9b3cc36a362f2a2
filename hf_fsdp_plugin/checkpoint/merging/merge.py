"""Any checkpoint as a Hugging Face folder, block by block, without torch: memory does not grow with the model.

The output comes to be in a folder beside its place and is renamed when it has been read back, so that it exists whole
or not at all; a merge that was killed goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.checking.completeness import checkpoint_of, listed
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, read_manifest
from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import index_text
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model
from hf_fsdp_plugin.checkpoint.io import InputFiles, sync
from hf_fsdp_plugin.checkpoint.merging.companions import companions, copy_companions, find_config_folder, read_config
from hf_fsdp_plugin.checkpoint.merging.config_check import ConfigCheck
from hf_fsdp_plugin.checkpoint.merging.copy_tensors import Progress, copy_file
from hf_fsdp_plugin.checkpoint.merging.output_checks import (
    byte_problems,
    damaged_input,
    header_problems,
    manifest_problems,
    same_elements,
)
from hf_fsdp_plugin.checkpoint.merging.plan import is_wrapped_by_peft, likely_ties, plan_merge
from hf_fsdp_plugin.checkpoint.merging.preconditions import check_places, check_space
from hf_fsdp_plugin.checkpoint.merging.staging import Staging, fingerprint, restore_replaced
from hf_fsdp_plugin.checkpoint.merging.write import FileWriter
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, HF_MODEL, HF_MODEL_BIN, index_file, safetensors_file
from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem, Severity, has_errors


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeOptions:
    """How to merge.

    Attributes:
        dtype: torch's name of the dtype for all floating-point tensors; ``None`` keeps each one's.
        max_shard_size: bytes of tensors a file.
        config: the folder with the config, tokenizer and so on; ``None`` looks at the checkpoint and above it.
        number: which model of the checkpoint, where ``Accelerator.prepare`` was given several.
        force: replace an output that is there already.
        verify: compare every byte with the checkpoint's.
        delete_input: delete the merged files of the checkpoint when all checks, ``verify`` too, have passed.
    """

    dtype: str | None = None
    max_shard_size: int = 5 * 10**9
    config: Path | None = None
    number: int = 0
    force: bool = False
    verify: bool = False
    delete_input: bool = False


@dataclass(kw_only=True, slots=True)
class Merged:
    """What a merge has done.

    Attributes:
        format: of the checkpoint: ``dcp``, ``local``, ``full``, ``bin`` or ``per_rank``.
        num_tensors: tensors written; tied ones count once.
        num_bytes: of all weight files.
        files: the weight files, and those of them (``resumed``) that an earlier, killed merge had finished.
        companions: config, tokenizer and so on, copied from ``config_folder``.
        aliases: tied name that is left out -> the name that holds its tensor.
        compared_with: what names and shapes were compared with: ``manifest``, ``model`` or nothing.
        verified: whether every byte was compared.
        deleted: whether the checkpoint's files were deleted.
        problems: warnings and notes; an error only where the input was to be deleted and is kept.
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


def merge(checkpoint: Path, out: Path, options: MergeOptions, progress: Progress | None = None) -> Merged:
    """Write the model of ``checkpoint`` to the folder ``out``, for ``from_pretrained``.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or another model's, ``out`` is in use or too large for
            the disk, or what was written does not read back. ``out`` is then as it was before.
        OSError: the disk failed; what was finished is kept for the next attempt.
    """
    out = Path(os.path.realpath(out))  # a link to a folder is replaced in the folder's place
    restore_replaced(out)
    check_places(checkpoint, out, force=options.force)
    job = _Job(checkpoint, out, options, progress or (lambda *_: None))
    check_space(out, job.plan.num_bytes)
    with Staging(out) as staging, job.config_check() as check:
        try:
            return job.run(staging, check)
        except CheckpointError:  # the same input would fail again
            staging.discard()
            raise


class _Job:
    """One merge: what is known beforehand, and the steps."""

    def __init__(self, checkpoint: Path, out: Path, options: MergeOptions, progress: Progress) -> None:
        self.checkpoint, self.options, self.progress = checkpoint, options, progress
        self.folder = checkpoint_of(checkpoint)
        self.notes: list[Problem] = []
        self.config_folder = find_config_folder(checkpoint, options.config)
        self.index = read_stored_model(checkpoint, options.number)
        self.manifest = read_manifest(self.folder)
        if self._manifest_applies() and (found := manifest_problems(self.index, self._manifest(), checkpoint)):
            raise CheckpointError(found)
        ties = self.manifest.ties if self.manifest is not None else self._ties_of_config()
        self.plan = plan_merge(self.index, ties, dtype=options.dtype, max_shard_size=options.max_shard_size)
        self._tell_what_is_special()
        self.result = Merged(
            out=out,
            format=self.index.format,
            num_tensors=len(self.plan.tensors),
            num_bytes=self.plan.num_bytes,
            files=[file.name for file in self.plan.files],
            resumed=[],
            config_folder=self.config_folder,
            companions=companions(self.config_folder) if self.config_folder is not None else [],
            aliases=dict(self.plan.aliases),
            problems=self.notes,
        )

    @contextlib.contextmanager
    def config_check(self) -> Iterator[ConfigCheck | None]:
        """Comparing with the model costs the import of torch, which a manifest spares; it runs beside the copying."""
        if self.config_folder is None or self._manifest_applies() or not self._is_a_model():
            yield None
            return
        with ConfigCheck(self.checkpoint, self.options.number, self.config_folder) as check:
            yield check

    def run(self, staging: Staging, check: ConfigCheck | None) -> Merged:
        staging.open(fingerprint(self.index, self.plan))
        self._copy(staging)
        problems = self._compare(check)
        if not has_errors(problems):
            self._complete(staging)
            problems += self._read_back(staging.folder)
        if has_errors(problems):
            raise CheckpointError(problems)
        staging.publish()
        if self.options.delete_input:
            self._delete_input()
        return self.result

    def _copy(self, staging: Staging) -> None:
        self.result.resumed = [file.name for file in self.plan.files if staging.has(file)]
        with InputFiles(self.index.root) as source:
            for file in self.plan.files:
                if file.name in self.result.resumed:
                    self.progress("merge", file.size, self.plan.num_bytes)
                    continue
                with FileWriter(staging.part(file)) as writer:
                    infinite = copy_file(source, self.plan, file, writer, self.progress)
                staging.finish_file(file, infinite)
        for name, count in staging.infinite.items():
            message = f"{count:,} values of '{name}' are too large for {self.plan.dtypes[name]} and became infinite."
            self._tell("warning", message, "Merge with --dtype bf16, or without --dtype.")

    def _complete(self, staging: Staging) -> None:
        """Everything beside the weights."""
        text = index_text(self.plan.files)
        if text is not None:
            path = staging.folder / index_file(safetensors_file(HF_MODEL))
            path.write_text(text, encoding="utf-8")
            sync(path)
        if self.config_folder is not None:
            copy_companions(self.config_folder, self.result.companions, staging.folder, self.options.dtype)

    def _compare(self, check: ConfigCheck | None) -> list[Problem]:
        """Names and shapes against the model's, where there is one to compare with. Returns the errors."""
        if check is None:
            self.result.compared_with = "manifest" if self._manifest_applies() else ""
            return []
        found = check.problems()
        if not found:
            self.result.compared_with = "model"
        self.notes += [each for each in found if each.severity != "error"]
        return [each for each in found if each.severity == "error"]

    def _read_back(self, folder: Path) -> list[Problem]:
        problems = header_problems(folder, self.plan)
        if problems or not (self.options.verify or self.options.delete_input):
            return problems
        if self.manifest is not None:
            problems += damaged_input(self.index, self.manifest, self.folder)
        total = self.plan.num_bytes

        def told(count: int) -> None:
            self.progress("verify", count, total)

        problems += byte_problems(self.index, self.plan, folder, told)
        self.result.verified = not problems
        return problems

    def _delete_input(self) -> None:
        """The files whose bytes are all in the output now; what else the checkpoint holds stays."""
        fix = "Delete it by hand if you are sure."
        if not self.result.compared_with and not self.plan.adapter:
            self._tell("error", "the checkpoint is kept: there was no model to compare names and shapes with.", fix)
            return
        if self.index.objects:
            self._tell("error", "the checkpoint is kept: it holds more than was written.", fix)
            return
        files = {self.index.root / piece.file for tensor in self.index.tensors.values() for piece in tensor.pieces}
        for path in files:
            path.unlink()
        for folder in {path.parent for path in files}:
            for name in (DCP_METADATA, index_file(safetensors_file(HF_MODEL)), index_file(f"{HF_MODEL_BIN}.bin")):
                (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other things are in it
                folder.rmdir()
        self.result.deleted = True

    def _tell_what_is_special(self) -> None:
        if self.config_folder is None:
            fix = "Give the folder that the model was loaded from with --config."
            self._tell("warning", "no config.json was found, so that from_pretrained cannot load the result.", fix)
        elif self.options.config is None and not self.config_folder.samefile(self.checkpoint):
            self._tell("note", f"config and tokenizer come from {self.config_folder}.")
        for name, kept in self.plan.aliases.items():
            self._tell("note", f"'{name}' is tied to '{kept}' and left out, as Hugging Face does.")
        if self.index.objects:
            message = (
                f"{len(self.index.objects)} entries are no tensors and are left out: {listed([*self.index.objects])}."
            )
            self._tell("warning", message)
        if self.plan.adapter:
            names = listed([*self.plan.tensors])
            self._tell("note", f"these are an adapter's weights, under the names that they have: {names}.")
        elif is_wrapped_by_peft(self.plan.tensors):
            fix = "Load them into the PEFT model, and call merge_and_unload() there."
            self._tell("warning", "the weights have PEFT's names (base_layer), and are written under them.", fix)

    def _ties_of_config(self) -> list[tuple[str, ...]]:
        """Embedding and output layer that are stored twice with the same bytes, where the config ties them."""
        config = read_config(self.config_folder) if self.config_folder is not None else {}
        nested = config.get("text_config") or {}
        if not config.get("tie_word_embeddings", nested.get("tie_word_embeddings", False)):
            return []
        with InputFiles(self.index.root) as files:
            return [
                (name, other)
                for name, other in likely_ties(self.index)
                if self.index.tensors[name].pieces == self.index.tensors[other].pieces
                or same_elements(files, self.index.tensors[name], files, self.index.tensors[other])
            ]

    def _manifest_applies(self) -> bool:
        """Whether the manifest speaks of this model: of several in a checkpoint, it knows the first."""
        return self.manifest is not None and self.options.number == 0

    def _manifest(self) -> Manifest:
        assert self.manifest is not None
        return self.manifest

    def _is_a_model(self) -> bool:
        return not self.plan.adapter and not is_wrapped_by_peft(self.plan.tensors)

    def _tell(self, severity: Severity, message: str, fix: str = "") -> None:
        origin = Origin(source=str(self.checkpoint))
        self.notes.append(Problem(severity=severity, message=message, fix=fix, origin=origin))
