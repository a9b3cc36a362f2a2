"""Writes the model of any checkpoint to a Hugging Face folder.

Its memory does not grow with the model. The output is written to a staging folder, checked and renamed, so it is
complete or does not exist. An interrupted merge starts again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.checking.completeness import checkpoint_of
from hf_fsdp_plugin.checkpoint.checking.hashes import VerifiedFiles, check_headers, files_of_checkpoint
from hf_fsdp_plugin.checkpoint.errors import problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.file_io import InputFiles, write_atomically
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, refuse_deepspeed
from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest
from hf_fsdp_plugin.checkpoint.formats.safetensors import index_text
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredTensor
from hf_fsdp_plugin.problems import Problem, has_errors
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.tools.common import Progress
from hf_fsdp_plugin.tools.loaded_weights import fp32_names, has_root, without_root
from hf_fsdp_plugin.tools.merge import companions, copying, merge_plan
from hf_fsdp_plugin.tools.merge.folding import AdapterFold
from hf_fsdp_plugin.tools.meta_model import meta_model
from hf_fsdp_plugin.tools.verify.comparison import config_problems, manifest_problems

_WEIGHTS: Final = (file_names.safetensors_file(file_names.HF_MODEL), f"{file_names.HF_MODEL_BIN}.bin")
_DESCRIPTIONS: Final = (file_names.DCP_METADATA, file_names.INDEX_FILE, *map(file_names.index_file, _WEIGHTS))
"""Files beside the weights that contain no tensors and only describe other files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeOptions:
    """Options of a merge.

    Attributes:
        dtype: torch's name of the dtype for all floating-point tensors; ``None`` keeps their dtypes.
        max_shard_size: maximum number of bytes of tensors per file.
        config: the folder with the config and the tokenizer; ``None`` searches the checkpoint and the run folder above
            it. With ``fold_adapter``, the folder with the config of the adapter.
        fold_adapter: the folder of the base model, with which the adapter of the checkpoint is merged; ``None`` does
            not merge adapters.
        number: index of the model in the checkpoint, if ``Accelerator.prepare`` was called with several models.
        force: replace an existing output folder.
        verify_input: compare the bytes that are read with the hashes of the manifest.
        verify: compare every byte of the output with the checkpoint.
        delete_input: verify, and delete the merged files of the checkpoint if all checks pass.
    """

    dtype: str | None = None
    max_shard_size: int = 5 * 10**9
    config: Path | None = None
    fold_adapter: Path | None = None
    number: int = 0
    force: bool = False
    verify_input: bool = True
    verify: bool = False
    delete_input: bool = False


@dataclass(kw_only=True, slots=True)
class Merged:
    """The result of a merge.

    Attributes:
        format: name of the checkpoint's format, as in :class:`StoredModel`.
        num_tensors: number of tensors written; tied ones count once.
        num_bytes: size of all weight files in bytes.
        files: the weight files.
        companions: config, tokenizer and other files copied from ``config_folder``.
        aliases: omitted tied name -> the name under which its tensor is written.
        compared_with: what names and shapes were compared with: ``manifest``, ``model`` or empty.
        num_folded: number of tensors that an adapter has changed.
        verified: whether every byte was compared.
        deleted: whether the checkpoint's files were deleted.
        problems: warnings and notes; an error only if ``delete_input`` could not delete the input.
    """

    out: Path
    format: str
    num_tensors: int
    num_bytes: int
    files: list[str]
    config_folder: Path | None
    companions: list[str]
    aliases: dict[str, str]
    compared_with: str = ""
    num_folded: int = 0
    verified: bool = False
    deleted: bool = False
    problems: list[Problem] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": not has_errors(self.problems),
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "out": str(self.out),
            "config_folder": str(self.config_folder) if self.config_folder is not None else None,
            "compared_with": self.compared_with or None,
            "problems": [problem.to_json() for problem in self.problems],
        }


def merge(checkpoint: Path, out: Path, options: MergeOptions, progress: Progress | None = None) -> Merged:
    """Write the model of ``checkpoint`` to the folder ``out``, for ``from_pretrained``.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or of another model, ``out`` is in use, the disk is too
            small, or the output differs from the plan. ``out`` is then unchanged.
        OSError: writing failed. ``out`` is then unchanged.
    """
    places = [checkpoint, *([] if options.fold_adapter is None else [options.fold_adapter])]
    for place in places:
        refuse_deepspeed(place)
    out = merge_plan.prepare_output(out, places, force=options.force)
    job = _Job(checkpoint, out, options, progress or (lambda *_: None))
    job.compare_with_config()
    with merge_plan.MergeStaging(out) as staging:
        job.copy_tensors(staging.folder)
        job.write_companions(staging.folder)
        if options.verify or options.delete_input:
            job.compare_bytes(staging.folder)
        # Another merge may have finished meanwhile.
        merge_plan.check_places(checkpoint, out, force=options.force, is_complete=True)
        staging.commit()
        if options.delete_input:
            job.delete_input()
        return job.result


class _Job:
    """One merge: its inputs, plan and steps."""

    def __init__(self, checkpoint: Path, out: Path, options: MergeOptions, progress: Progress) -> None:
        self.checkpoint, self.options, self.progress = checkpoint, options, progress
        self.fold: AdapterFold | None = None
        source, config, number = checkpoint, options.config, options.number
        if options.fold_adapter is not None:
            source, config, number = options.fold_adapter, None, 0
        self.folder = checkpoint_of(source)
        self.config_folder = companions.find_config_folder(source, config)
        self.manifest = read_manifest(self.folder)
        self.model = self._read_model(source, number)
        self.verify_input = options.verify_input or options.delete_input
        with self._open() as files:
            check_headers(files, self.model)
        # The manifest describes the first of several models.
        self.model_manifest = self.manifest if number == 0 else None
        if self.model_manifest is not None:
            raise_if_any(manifest_problems(self.model, self.model_manifest))
        ties = self.manifest.ties if self.manifest is not None else ()
        written = self.model
        if options.fold_adapter is not None:
            self.fold, tensors = self._read_adapter()
            written, ties = replace(self.model, tensors=tensors), ()
        fp32 = self._fp32_names()
        size = options.max_shard_size
        self.plan = merge_plan.plan_merge(written, ties, dtype=options.dtype, max_shard_size=size, fp32=fp32)
        self.result = Merged(
            out=out,
            format=self.model.format,
            num_tensors=len(self.plan.tensors),
            num_bytes=self.plan.num_bytes,
            files=[file.name for file in self.plan.files],
            config_folder=self.config_folder,
            companions=companions.companion_files(self.config_folder) if self.config_folder is not None else [],
            aliases=dict(self.plan.aliases),
            num_folded=self.fold.num_changed if self.fold is not None else 0,
        )
        self._report_plan()

    def _open(self) -> InputFiles:
        if self.manifest is None or not self.verify_input:
            return InputFiles(self.model.root)
        return VerifiedFiles(self.model.root, self.manifest, self.folder)

    def _read_adapter(self) -> tuple[AdapterFold, dict[str, StoredTensor]]:
        """Return the adapter of the checkpoint, and the merged tensors. Raises if it does not fit the base model."""
        stored = read_stored_model(self.checkpoint, self.options.number)
        config = companions.find_config_folder(self.checkpoint, self.options.config, (file_names.ADAPTER_CONFIG,))
        if config is None:
            fix = "Give its folder with --config, or merge without --fold-adapter if the run has no adapter."
            refuse("FSDP-E441", self.checkpoint, f"has no {file_names.ADAPTER_CONFIG}.", fix)
        if self.config_folder is None:
            refuse("FSDP-E441", self.model.root, "has no config.json.", "Give the folder of the base model.")
        fold = AdapterFold(self.checkpoint, stored, self.model, self.config_folder, config)
        tensors = fold.tensors(self.model)
        files_of = files_of_checkpoint(self.checkpoint, stored, verify=self.verify_input)
        with files_of as files, self._open() as base_files:
            check_headers(files, stored)
            fold.read(files, base_files)
        return fold, tensors

    @cached_property
    def _meta_model(self) -> Any:
        """The model of the config; ``None`` if there is none, or if it cannot be built."""
        if self.config_folder is not None:
            with contextlib.suppress(ImportError, ValueError):  # the comparison with the config reports errors
                return meta_model(self.config_folder)
        return None

    def _read_model(self, source: Path, number: int) -> StoredModel:
        """Return the model of a checkpoint, with the names of its class if torch has saved it as ``{"model": …}``."""
        stored = read_stored_model(source, number)
        is_hf = stored.format in ("full", "hf_shards") and self.manifest is None
        if not is_hf or not has_root(stored) or self._meta_model is None:
            return stored
        return without_root(stored, self._meta_model.state_dict().keys())

    def _fp32_names(self) -> list[str]:
        """Return the names of the tensors that the model keeps in fp32 when it is loaded in the new dtype."""
        if self.options.dtype not in ("bfloat16", "float16") or self._meta_model is None:
            return []
        return fp32_names(self.model, self._meta_model, self.options.dtype)

    def compare_with_config(self) -> None:
        """Compare with the config's model, unless a manifest makes this unnecessary. Raises its errors."""
        is_model = not self.plan.adapter and not file_names.is_wrapped_by_peft(self.plan.tensors)
        if self.config_folder is None or self.model_manifest is not None or not is_model:
            self.result.compared_with = "manifest" if self.model_manifest is not None else ""
            return
        found = config_problems(self.model, self.config_folder)
        raise_if_any([each for each in found if each.severity == "error"])
        self.result.compared_with = "" if found else "model"
        self.result.problems += found

    def copy_tensors(self, folder: Path) -> None:
        """Write the weights."""
        infinite: dict[str, int] = {}
        with self._open() as source:
            for file in self.plan.files:
                infinite |= copying.copy_file(source, self.plan, file, folder / file.name, self.progress)
        if infinite:
            counts = [f"{count:,} of '{name}'" for name, count in infinite.items()]
            message = f"values that are too large for {self.options.dtype} became infinite: {format_names(counts)}."
            self._report("FSDP-W494", message, "Merge with --dtype bf16, or without --dtype.")

    def write_companions(self, folder: Path) -> None:
        """Write the files next to the weights: the index, config, tokenizer and so on."""
        text = index_text(self.plan.files)
        if text is not None:
            write_atomically(folder / file_names.index_file(file_names.safetensors_file(file_names.HF_MODEL)), text)
        if self.config_folder is not None:
            untie = self.fold is not None and self.fold.is_untied
            names = self.result.companions
            companions.copy_companions(self.config_folder, names, folder, self.options.dtype, untie=untie)

    def compare_bytes(self, folder: Path) -> None:
        """Raise ``CheckpointError`` if the written bytes differ from the checkpoint."""
        with self._open() as source:
            raise_if_any(copying.byte_problems(source, self.plan, folder, self.progress))
        self.result.verified = True

    def delete_input(self) -> None:
        """Delete the files whose contents are all in the output; other files of the checkpoint are kept."""
        reason = ""
        if not self.result.compared_with and not self.plan.adapter:
            reason = "there is no model to compare its names and shapes with"
        elif self.model.objects:
            reason = "it contains entries that were not written"
        if reason:
            fix = "Delete the checkpoint manually if you do not need it."
            self._report("FSDP-E487", f"was not deleted, because {reason}.", fix)
            return
        files = {self.model.root / file for tensor in self.model.tensors.values() for file in tensor.files()}
        for path in files:
            path.unlink()
        for folder in {path.parent for path in files}:
            for name in _DESCRIPTIONS:
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
        elif not self.config_folder.samefile(self.checkpoint) and not (self.options.config or self.fold):
            self._report("FSDP-N490", f"config and tokenizer are copied from {self.config_folder}.")
        if self.plan.aliases:
            ties = [f"'{name}' (tied to '{kept}')" for name, kept in self.plan.aliases.items()]
            message = f"the output omits {plural(len(ties), 'tied name')}, as Hugging Face does: {format_names(ties)}."
            self._report("FSDP-N491", message)
        kept = [name for name, dtype in self.plan.dtypes.items() if dtype == "float32" != self.options.dtype]
        if self.options.dtype and kept:
            message = f"{plural(len(kept), 'tensor')} are written in fp32, which the model keeps at this dtype: "
            self._report("FSDP-N443", f"{message}{format_names(kept, 3)}.")
        if self.fold is not None and self.fold.is_untied:
            message = "the adapter has trained one of two tied embeddings: both are written, and config.json has "
            self._report("FSDP-W444", f"{message}tie_word_embeddings: false.", "Set ensure_weight_tying in LoraConfig.")
        if self.model.objects:
            omitted = plural(len(self.model.objects), "non-tensor entry", "non-tensor entries")
            self._report("FSDP-W499", f"the output omits {omitted}: {format_names(self.model.objects, 3)}.")
        if self.plan.adapter:
            names = format_names(self.plan.tensors, 3)
            self._report("FSDP-N492", f"contains an adapter, which is written under its own names: {names}.")
        elif file_names.is_wrapped_by_peft(self.plan.tensors):
            fix = "Give the base model with --fold-adapter, or call merge_and_unload() of the PEFT model."
            message = "contains a model with adapters, which is written under PEFT's names (base_layer)."
            self._report("FSDP-W493", message, fix)

    def _report(self, code: str, message: str, fix: str = "") -> None:
        self.result.problems.append(problem(code, self.checkpoint, message, fix))
