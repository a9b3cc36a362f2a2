"""Adapters of PEFT match training in one process, with and without ``use_orig_params``, or are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.matrices import slow
from tests.support.ranks import RankError, Ranks
from tests.support.tiny import parallel_config
from tests.support.training import RELATIVE, assert_same_training, assert_same_weights, differing, reference, sgd

pytest.importorskip("peft")

from hf_fsdp_plugin.checkpoint.checking.against_model import manifest_problems
from hf_fsdp_plugin.checkpoint.checking.verify import verify
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest
from tests.gloo import cases_peft as cases

BACKENDS = {
    "fsdp1": {"version": 1},
    "flat": {"version": 1, "fsdp_use_orig_params": False},
    "fsdp2": {"version": 2},
}
IN_ARGUMENTS = {
    "fsdp1": {"version": 1, "use_orig_params": True},
    "flat": {"version": 1, "use_orig_params": False},
    "fsdp2": {"version": 2},
}
QUICK = ("lora", "dora", "ia3", "modules", "prompt")
SAVED = ("lora", "dora", "ia3", "embedding", "prompt", "prefix", "two")
OTHERS = ("rslora", "embedding", "prefix", "ptuning", "loha", "vera", "two")


@cache
def reference_of(kind: str) -> dict[str, Any]:
    return reference(f"peft-{kind}", sgd, cases.NUM_STEPS)


def config_of(backend: str, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", world_size=2, **{**BACKENDS[backend], **settings})


def train_kind(ranks: Ranks, kind: str, backend: str, **settings: Any) -> dict[str, Any]:
    return ranks.run(cases.train_adapter, config_of(backend, **settings), kind)[0]


def codes(run: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in run["report"]["problems"]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [*QUICK, *(slow(kind) for kind in OTHERS)])
def test_adapter_trains_as_in_one_process(two_ranks: Ranks, kind: str, backend: str) -> None:
    run = train_kind(two_ranks, kind, backend)
    assert_same_training(run, reference_of(kind))
    assert differing(run["report"]) == []
    assert ("FSDP-W265" in codes(run)) == (backend == "flat")


@pytest.mark.parametrize("kind", ["bias", "tokens"])
def test_bare_adapter_parameters_need_original_parameters(two_ranks: Ranks, kind: str) -> None:
    with pytest.raises(RankError, match=r"(?s)fsdp_use_orig_params: true.*FSDP-E222"):
        train_kind(two_ranks, kind, "flat")
    for backend in ("fsdp1", "fsdp2"):
        assert_same_training(train_kind(two_ranks, kind, backend), reference_of(kind))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["lora", "modules"])
def test_disabled_adapters_leave_the_base_model(two_ranks: Ranks, kind: str, backend: str) -> None:
    expected = cases.disabled_first_reference(kind)
    run = two_ranks.run(cases.train_disabled_first, config_of(backend), kind)[0]
    for name in ("losses", "norms", "norm", "last", "disabled"):
        assert run[name] == pytest.approx(expected[name], rel=RELATIVE), name


def saved_adapter(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def errors_of(folder: Path) -> list[str]:
    return [str(problem) for problem in verify(folder, config_check=False).problems if problem.severity == "error"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dict_type", ["sharded", "full", "local"])
def test_checkpoint_of_an_adapter_is_undamaged(
    two_ranks: Ranks, tmp_path: Path, backend: str, state_dict_type: str
) -> None:
    config = {**IN_ARGUMENTS[backend], "state_dict_type": f"{state_dict_type}_state_dict".upper()}
    two_ranks.run(cases.save_adapter, str(tmp_path), "lora", fsdp="full_shard auto_wrap", fsdp_config=config)
    folder = tmp_path / "checkpoint-1"
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.parameters and all(".lora_" in name for name in manifest.parameters)
    assert errors_of(folder) == [] == errors_of(tmp_path / "final")
    # Manifests of earlier versions also list the parameters of the base model.
    kind, shape = next(iter(manifest.parameters.values()))
    base = {"base_model.model.lm_head.base_layer.weight": (kind, shape), "base_model.model.norm.weight": (kind, shape)}
    model = read_stored_model(folder)
    assert manifest_problems(model, None, replace(manifest, parameters={**manifest.parameters, **base})) == []
    lost = {**manifest.parameters, **base, "base_model.model.lm_head.lora_A.default.weight": (kind, shape)}
    assert [p.code for p in manifest_problems(model, None, replace(manifest, parameters=lost))] == ["FSDP-E477"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["modules", *(slow(kind) for kind in SAVED)])
def test_adapter_is_saved_resumed_and_merged(two_ranks: Ranks, tmp_path: Path, kind: str, backend: str) -> None:
    """Losses, the saved adapter, and the merged model that is loaded from it equal those of one process."""
    losses, adapters = cases.trainer_reference(str(tmp_path / "reference"), kind)
    arguments = {"fsdp": "full_shard auto_wrap", "fsdp_config": IN_ARGUMENTS[backend]}
    run = two_ranks.run(cases.train_save_and_resume, str(tmp_path), kind, **arguments)[0]
    assert run["whole"] == pytest.approx(losses, rel=RELATIVE)
    assert run["resumed"] == pytest.approx(losses, rel=RELATIVE)
    for folder in ("checkpoint-6", "final"):
        for name, expected in adapters.items():
            saved = saved_adapter(tmp_path / folder / ("" if name == "default" else name))
            assert_same_weights(saved, expected, 1e-4)
    assert errors_of(tmp_path / "checkpoint-6") == []
    if kind not in ("prompt", "prefix", "ptuning"):
        merged = cases.merged_logits(str(tmp_path / "final"), kind)
        assert torch.allclose(merged, cases.adapted_logits(str(tmp_path / "final"), kind), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["merge_adapter", "merge_and_unload", "unload"])
def test_merge_of_sharded_model_is_refused(two_ranks: Ranks, how: str, backend: str) -> None:
    assert two_ranks.run(cases.merge_sharded, config_of(backend), how) == [["FSDP-E631"]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_adalora_is_refused(two_ranks: Ranks, backend: str) -> None:
    with pytest.raises(RankError, match="FSDP-E630"):
        train_kind(two_ranks, "adalora", backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lora_on_parameters_needs_fsdp2(two_ranks: Ranks, backend: str) -> None:
    if backend == "fsdp2":
        assert_same_training(train_kind(two_ranks, "parameters", backend), reference_of("parameters"))
        return
    with pytest.raises(RankError, match="FSDP-E646"):
        train_kind(two_ranks, "parameters", backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_optimizer_of_lora_fa_is_refused(two_ranks: Ranks, backend: str) -> None:
    assert two_ranks.run(cases.prepare_lora_fa, config_of(backend))[0] == ["FSDP-E321"]


@pytest.mark.parametrize(
    ("by_peft", "settings", "expected"),
    [
        (True, {}, ["model.model.layers.0", "model.model.layers.1"]),
        (True, {"fsdp_auto_wrap_policy": "NO_WRAP"}, ["model.model.layers.0", "model.model.layers.1"]),
        (False, {}, ["FSDP-E037"]),
    ],
    ids=str,
)
def test_policy_of_peft_may_be_assigned(
    two_ranks: Ranks, by_peft: bool, settings: dict[str, Any], expected: list[str]
) -> None:
    config = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"fsdp_version": 2, **settings}}
    assert two_ranks.run(cases.assign_policy, config, by_peft) == [expected] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, slow(True)])
def test_gradient_checkpointing_of_frozen_layers(two_ranks: Ranks, backend: str, reentrant: bool) -> None:
    run = two_ranks.run(cases.train_checkpointed, config_of(backend), "lora", reentrant)[0]
    assert_same_training(run, reference_of("lora"))
