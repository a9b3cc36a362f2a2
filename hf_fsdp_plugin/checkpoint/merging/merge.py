"""Writes the model of any checkpoint to a Hugging Face folder.

This does not import torch, and the memory it needs does not grow with the model. The output is written to a staging
folder, checked and renamed, so it is complete or does not exist. An interrupted merge resumes where it stopped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.against_config import read_config
from hf_fsdp_plugin.checkpoint.checking.against_manifest import manifest_problems
from hf_fsdp_plugin.checkpoint.checking.byte_ranges import Progress
from hf_fsdp_plugin.checkpoint.checking.completeness import checkpoint_of
from hf_fsdp_plugin.checkpoint.checking.verified_files import check_headers, input_files
from hf_fsdp_plugin.checkpoint.commit import restore_replaced
from hf_fsdp_plugin.checkpoint.formats.errors import problem, raise_if_any
from hf_fsdp_plugin.checkpoint.formats.manifest_reader import read_manifest
from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import index_text
from hf_fsdp_plugin.checkpoint.formats.table import FORMATS, read_stored_model
from hf_fsdp_plugin.checkpoint.io import InputFiles, sync
from hf_fsdp_plugin.checkpoint.merging.companions import companions, copy_companions, find_config_folder
from hf_fsdp_plugin.checkpoint.merging.config_check import ConfigCheck
from hf_fsdp_plugin.checkpoint.merging.copy_tensors import copy_file
from hf_fsdp_plugin.checkpoint.merging.file_writer import FileWriter
from hf_fsdp_plugin.checkpoint.merging.options import Merged, MergeOptions
from hf_fsdp_plugin.checkpoint.merging.output_checks import (
    byte_problems,
    header_problems,
    same_elements,
)
from hf_fsdp_plugin.checkpoint.merging.plan import likely_ties, plan_merge
from hf_fsdp_plugin.checkpoint.merging.preconditions import check_places, check_space
from hf_fsdp_plugin.checkpoint.merging.staging import MergeStaging, fingerprint
from hf_fsdp_plugin.checkpoint.names import HF_MODEL, index_file, is_adapter, is_wrapped_by_peft, safetensors_file
from hf_fsdp_plugin.problems import CheckpointError, Problem, has_errors
from hf_fsdp_plugin.text import format_names, plural


def merge(checkpoint: Path, out: Path, options: MergeOptions, progress: Progress | None = None) -> Merged:
    """Write the model of ``checkpoint`` to the folder ``out``, for ``from_pretrained``.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or of another model, ``out`` is in use, the disk is too
            small, or the output differs from the plan. ``out`` is then unchanged.
        OSError: writing failed; finished files are kept for the next attempt.
    """
    out = Path(os.path.realpath(out))  # the target of a symbolic link is replaced, not the link
    restore_replaced(out)
    check_places(checkpoint, out, force=options.force)
    job = _Job(checkpoint, out, options, progress or (lambda *_: None))
    check_space(out, job.plan.num_bytes)
    with MergeStaging(out) as staging, job.config_check() as check:
        try:
            check_places(checkpoint, out, force=options.force)  # another merge may have finished since the first check
            return job.run(staging, check)
        except CheckpointError:  # a retry with the same input would fail again
            staging.discard()
            raise


class _Job:
    """One merge: its inputs, plan and steps."""

    def __init__(self, checkpoint: Path, out: Path, options: MergeOptions, progress: Progress) -> None:
        self.checkpoint, self.options, self.progress = checkpoint, options, progress
        self.folder = checkpoint_of(checkpoint)
        self.problems: list[Problem] = []
        self.config_folder = find_config_folder(checkpoint, options.config)
        self.model = read_stored_model(checkpoint, options.number)
        self.manifest = read_manifest(self.folder)
        self._verify_input = options.verify_input or options.delete_input
        with self._open() as files:
            check_headers(files, self.model)
        # The manifest describes the first of several models.
        self.model_manifest = self.manifest if options.number == 0 else None
        if self.model_manifest is not None:
            problems = manifest_problems(self.model, None, self.model_manifest)
            # The manifest of an adapter also lists the parameters of the base model.
            tolerated = {"FSDP-E478", "FSDP-E477"} if is_adapter(self.model.tensors) else {"FSDP-E478"}
            raise_if_any([problem for problem in problems if problem.code not in tolerated])
        ties = self.manifest.ties if self.manifest is not None else self._ties_of_config()
        self.plan = plan_merge(self.model, ties, dtype=options.dtype, max_shard_size=options.max_shard_size)
        self._report_plan()
        self.result = Merged(
            out=out,
            format=self.model.format,
            num_tensors=len(self.plan.tensors),
            num_bytes=self.plan.num_bytes,
            files=[file.name for file in self.plan.files],
            resumed=[],
            config_folder=self.config_folder,
            companions=companions(self.config_folder) if self.config_folder is not None else [],
            aliases=dict(self.plan.aliases),
            problems=self.problems,
        )

    def _open(self) -> InputFiles:
        return input_files(self.model, self.folder, self.manifest if self._verify_input else None)

    @contextlib.contextmanager
    def config_check(self) -> Iterator[ConfigCheck | None]:
        """Compare with the config's model in the background, unless a manifest makes this unnecessary."""
        is_model = not self.plan.adapter and not is_wrapped_by_peft(self.plan.tensors)
        if self.config_folder is None or self.model_manifest is not None or not is_model:
            yield None
            return
        with ConfigCheck(self.checkpoint, self.options.number, self.config_folder) as check:
            yield check

    def run(self, staging: MergeStaging, check: ConfigCheck | None) -> Merged:
        staging.prepare(fingerprint(self.model, self.plan, verify_input=self._verify_input))
        self._copy(staging)
        problems = self._compare(check)
        if not has_errors(problems):
            self._write_companions(staging)
            problems += self._read_back(staging.folder)
        raise_if_any(problems)
        staging.commit()
        if self.options.delete_input:
            self._delete_input()
        return self.result

    def _copy(self, staging: MergeStaging) -> None:
        self.result.resumed = [file.name for file in self.plan.files if staging.has(file)]
        with self._open() as source:
            for file in self.plan.files:
                if file.name in self.result.resumed:
                    self.progress("merge", file.size, self.plan.num_bytes)
                    continue
                with FileWriter(staging.part(file)) as writer:
                    infinite = copy_file(source, self.plan, file, writer, self.progress)
                staging.finish_file(file, infinite)
        if staging.infinite:
            counts = [f"{count:,} of '{name}'" for name, count in staging.infinite.items()]
            message = f"values that are too large for {self.options.dtype} became infinite: {format_names(counts)}."
            self._report("FSDP-W494", message, "Merge with --dtype bf16, or without --dtype.")

    def _write_companions(self, staging: MergeStaging) -> None:
        """Write the files next to the weights: the index, config, tokenizer and so on."""
        text = index_text(self.plan.files)
        if text is not None:
            path = staging.folder / index_file(safetensors_file(HF_MODEL))
            path.write_text(text, encoding="utf-8")
            sync(path)
        if self.config_folder is not None:
            copy_companions(self.config_folder, self.result.companions, staging.folder, self.options.dtype)

    def _compare(self, check: ConfigCheck | None) -> list[Problem]:
        """Wait for the comparison with the config's model. Return its errors, and add its notes to the result."""
        if check is None:
            self.result.compared_with = "manifest" if self.model_manifest is not None else ""
            return []
        found = check.problems()
        if not found:
            self.result.compared_with = "model"
        self.problems += [each for each in found if each.severity != "error"]
        return [each for each in found if each.severity == "error"]

    def _read_back(self, folder: Path) -> list[Problem]:
        problems = header_problems(folder, self.plan)
        if problems or not (self.options.verify or self.options.delete_input):
            return problems
        total = self.plan.num_bytes
        with self._open() as source:
            problems += byte_problems(source, self.plan, folder, lambda count: self.progress("verify", count, total))
        self.result.verified = not problems
        return problems

    def _delete_input(self) -> None:
        """Delete the files whose contents are all in the output; other files of the checkpoint are kept."""
        fix = "Delete the checkpoint manually if you do not need it."
        if not self.result.compared_with and not self.plan.adapter:
            message = "was not deleted, because there is no model to compare its names and shapes with."
            self._report("FSDP-E487", message, fix)
            return
        if self.model.objects:
            self._report("FSDP-E487", "was not deleted, because it contains entries that were not written.", fix)
            return
        files = {self.model.root / file for tensor in self.model.tensors.values() for file in tensor.files()}
        for path in files:
            path.unlink()
        for folder in {path.parent for path in files}:
            for name in (name for form in FORMATS for name in form.index_files):
                (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folder contains other files
                folder.rmdir()
        self.result.deleted = True

    def _report_plan(self) -> None:
        """Report what the user should know about the output."""
        if self.config_folder is None:
            fix = "Give the folder from which the model was loaded with --config."
            message = "no config.json was found; from_pretrained cannot load the output without one."
            self._report("FSDP-W488", message, fix)
        elif self.options.config is None and not self.config_folder.samefile(self.checkpoint):
            self._report("FSDP-N490", f"config and tokenizer are copied from {self.config_folder}.")
        if self.plan.aliases:
            ties = [f"'{name}' (tied to '{kept}')" for name, kept in self.plan.aliases.items()]
            message = f"the output omits {plural(len(ties), 'tied name')}, as Hugging Face does: {format_names(ties)}."
            self._report("FSDP-N491", message)
        if self.model.objects:
            omitted = plural(len(self.model.objects), "non-tensor entry", "non-tensor entries")
            self._report("FSDP-W499", f"the output omits {omitted}: {format_names(self.model.objects, 3)}.")
        if self.plan.adapter:
            names = format_names(self.plan.tensors, 3)
            self._report("FSDP-N492", f"contains an adapter, which is written under its own names: {names}.")
        elif is_wrapped_by_peft(self.plan.tensors):
            fix = "Load the weights into the PEFT model, and call merge_and_unload()."
            message = "contains a model with adapters, which is written under PEFT's names (base_layer)."
            self._report("FSDP-W493", message, fix)

    def _ties_of_config(self) -> list[tuple[str, ...]]:
        """Return embedding and output layer if the config ties them and both are stored with the same bytes."""
        fix = "Repair it, or give another folder with --config."
        config = (read_config(self.config_folder, fix) if self.config_folder is not None else None) or {}
        nested = config.get("text_config") or {}
        if not config.get("tie_word_embeddings", nested.get("tie_word_embeddings", False)):
            return []
        tensors = self.model.tensors
        with self._open() as files:
            return [
                (name, other)
                for name, other in likely_ties(self.model)
                if tensors[name].pieces == tensors[other].pieces
                or same_elements(files, tensors[name], files, tensors[other])
            ]

    def _report(self, code: str, message: str, fix: str = "") -> None:
        self.problems.append(problem(code, self.checkpoint, message, fix))
