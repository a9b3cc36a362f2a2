"""Problems that the replacements raise or print, each next to a similar input that is accepted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.accelerate.accelerator import init_accelerator, init_accelerator_state
from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin, spec_of_stock_plugin
from hf_fsdp_plugin.integrations.accelerate.prepare import make_plan
from hf_fsdp_plugin.integrations.transformers.arguments import process_fsdp_args

pytestmark = pytest.mark.usefixtures("uninstalled")
FSDP = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}
DEEPSPEED = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}


def codes(error: pytest.ExceptionInfo[hfp.SpecError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


class StubAccelerator(SimpleNamespace):
    """An Accelerator's attributes; a subclass, because weak references to a namespace itself are not possible."""


def create_accelerator(num_processes: int = 2, **arguments: Any) -> dict[str, Any]:
    """Return the arguments that the replacement of ``Accelerator.__init__`` passes to the original."""
    passed: dict[str, Any] = {}

    def original(fsdp_plugin: Any = None, mixed_precision: Any = None, dynamo_plugin: Any = None) -> None:
        passed.update(fsdp_plugin=fsdp_plugin, mixed_precision=mixed_precision)

    accelerator = StubAccelerator(num_processes=num_processes, distributed_type=DistributedType.MULTI_CPU, scaler=None)
    init_accelerator(original, accelerator, **arguments)
    return passed


def test_single_process_without_group_is_refused() -> None:
    plugin = PlannedFsdpPlugin(hfp.load_spec(FSDP))
    state: Any = SimpleNamespace(distributed_type=DistributedType.NO)
    with pytest.raises(hfp.SpecError) as error:
        init_accelerator_state(lambda **_: None, state, fsdp_plugin=plugin)
    assert codes(error) == ["FSDP-E601"]
    state.distributed_type = DistributedType.MULTI_CPU
    init_accelerator_state(lambda **_: None, state, fsdp_plugin=plugin)
    assert state.distributed_type == DistributedType.FSDP and state.fsdp_plugin is plugin
    PartialState._reset_state()


@pytest.mark.parametrize(("given", "param", "code"), [("no", "auto", "FSDP-W103"), ("bf16", "bf16", None)])
def test_precision_of_script_overrides_config(given: str, param: str, code: str | None) -> None:
    hfp.install(FSDP)
    plugin = create_accelerator(mixed_precision=given)["fsdp_plugin"]
    assert plugin.spec.precision.param == param
    found = [problem for problem in plugin.spec.problems if problem.setting == "precision.param"]
    assert [problem.code for problem in found] == ([code] if code else [])


@pytest.mark.parametrize(("config", "num_lines"), [({}, 1), (FSDP, 0)], ids=["without-fsdp", "with-fsdp"])
def test_missing_fsdp_config_is_reported_once(
    config: dict[str, Any], num_lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hfp.install(config)
    create_accelerator()
    create_accelerator()
    assert capsys.readouterr().err.count("[FSDP-W602]") == num_lines


@pytest.mark.parametrize("config", [DEEPSPEED, {"zero_optimization": {"stage": 3}}, {"base_model": "m"}])
def test_config_of_another_program_names_convert(config: dict[str, Any]) -> None:
    for refuse in (hfp.install, partial(hfp.load_spec, environ={})):
        with pytest.raises(hfp.SpecError, match=r"hf-fsdp convert .*\[FSDP-E060\]"):
            refuse(config)


def test_install_leaves_other_engines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DEEPSPEED
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert hfp.install(config) is None
    with pytest.raises(hfp.SpecError, match="FSDP-E120"):
        process_fsdp_args(lambda: None, SimpleNamespace(fsdp="full_shard", fsdp_config=None))
    with pytest.raises(hfp.SpecError, match="FSDP-E120"):
        hfp.load_spec(config)


def test_accelerator_of_spec_without_fsdp_is_stock(capsys: pytest.CaptureFixture[str]) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        created = hfp.accelerator(hfp.load_spec(fsdp="", environ={}), cpu=True)
        assert getattr(created.state, "fsdp_plugin", None) is None
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert capsys.readouterr().err.count("[FSDP-W124]") == 1


def test_plugin_created_before_install_is_refused() -> None:
    early = FullyShardedDataParallelPlugin(fsdp_version=2)
    hfp.install()
    with pytest.raises(hfp.SpecError) as error:
        spec_of_stock_plugin(early)
    assert codes(error) == ["FSDP-E603"]
    late = FullyShardedDataParallelPlugin(fsdp_version=2)
    late.forward_prefetch = True
    spec = spec_of_stock_plugin(late)
    assert spec is not None and (spec.fsdp.version, spec.prefetch.forward) == (2, True)


def test_model_with_device_map_is_refused() -> None:
    plugin = PlannedFsdpPlugin(hfp.load_spec(FSDP))
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator: Any = SimpleNamespace(num_processes=2, device=torch.device("cpu"), state=state)
    accelerator.verify_device_map = lambda model: False
    assert make_plan(accelerator, plugin.spec, torch.nn.Linear(4, 4)).backend == "fsdp2"
    accelerator.verify_device_map = lambda model: True
    with pytest.raises(hfp.SpecError) as error:
        make_plan(accelerator, plugin.spec, torch.nn.Linear(4, 4))
    assert codes(error) == ["FSDP-E605"]


def test_arguments_with_xla_are_left_to_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    hfp.install({})
    arguments = SimpleNamespace(fsdp="full_shard", fsdp_config={"xla": True})
    assert process_fsdp_args(lambda: "stock", arguments) == "stock"
    assert arguments.fsdp == "full_shard"
    assert "[FSDP-W163]" in capsys.readouterr().err
