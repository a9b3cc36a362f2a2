"""Python objects of the wrong type, too deep or too large: an error with a place and a remedy, never a traceback."""

from typing import Any

import pytest

from hf_fsdp_plugin import SpecError, load_spec
from hf_fsdp_plugin.spec.load import with_script_settings

HUGE = 10**50


def _nested(depth: int, leaf: Any = 1) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def _cycle() -> list[Any]:
    found: list[Any] = []
    found += [found, found]
    return found


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no text")


STRANGE = [HUGE, -HUGE, Silent(), object(), float("nan"), 1j, b"1", [HUGE], {"a": HUGE}, {HUGE: 1}]


def _errors(**given: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(**{"environ": {}, **given})
    errors = [problem for problem in caught.value.problems if problem.severity == "error"]
    assert all(problem.fix or "; expected " in problem.message for problem in errors)
    return [problem.code for problem in errors]


@pytest.mark.parametrize("value", [_nested(25), _nested(2000), _cycle()], ids=["25", "2000", "cycle"])
def test_argument_that_is_too_deep_is_an_error(value: Any) -> None:
    key = "fsdp_transformer_layer_cls_to_wrap"
    for given in (
        {"config": {"fsdp_config": {key: value}}},
        {"training_arguments": {"fsdp": True, "fsdp_config": {key: value}}},
        {"training_arguments": {"fsdp": value}},
        {"fsdp": True, "fsdp_config": {key: value}},
        {"plugin_object": {"transformer_cls_names_to_wrap": value}},
        {"distributed_config": {"fsdp_size": value}},
        {"overrides": {key: value}},
    ):
        assert _errors(**given) == ["FSDP-E055"]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "key", ["fsdp_version", "fsdp_min_num_params", "fsdp_size", "fsdp_offload_params", "fsdp_sharding_strategy",
            "fsdp_reshard_after_forward", "fsdp_transformer_layer_cls_to_wrap", "fsdp_ignored_modules"],
)  # fmt: skip
def test_strange_value_is_an_error(key: str, value: Any) -> None:
    for given in ({"config": {"fsdp_config": {key: value}}}, {"fsdp": True, "fsdp_config": {key: value}}):
        assert _errors(**given)
    assert _errors(overrides={key: value})


@pytest.mark.parametrize("key", ["num_processes", "main_process_port", "main_process_ip", "gpu_ids", "dynamo_backend"])
@pytest.mark.parametrize("value", [HUGE, Silent(), 1j, {"a": HUGE}], ids=["huge", "silent", "complex", "mapping"])
def test_strange_launch_value_is_an_error(key: str, value: Any) -> None:
    assert _errors(config={"distributed_type": "FSDP", key: value})


@pytest.mark.parametrize("value", [HUGE, Silent(), 5, b"{}", ["a"], object()], ids=lambda value: type(value).__name__)
def test_fsdp_config_of_the_wrong_type_is_an_error(value: Any) -> None:
    assert _errors(fsdp=True, fsdp_config=value) == ["FSDP-E055"]


def test_later_distributed_config_that_is_too_deep_is_an_error() -> None:
    spec = load_spec({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, environ={})
    with pytest.raises(SpecError, match="FSDP-E055"):
        with_script_settings(spec, distributed_config={"fsdp_size": _nested(25)})


@pytest.mark.parametrize("text", ["0x" + "f" * 4000, "1" * 5000, "[" * 30 + "]" * 30, "1_0", "1__000", "0o17", "1e400"])
def test_number_in_a_file_that_is_none_is_an_error(tmp_path, text: str) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(f"distributed_type: FSDP\nnum_processes: {text}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path, environ={})
    assert [problem.origin.line for problem in caught.value.problems if problem.severity == "error"] == [2]


def test_unknown_argument_of_the_plugin_object_is_an_error() -> None:
    assert _errors(plugin_object={"banana": 1}) == ["FSDP-E020"]
    for key in ("mixed_precision_policy", "cpu_offload", "fsdp_version", "ignored_modules", "state_dict_type"):
        assert _errors(plugin_object={key: HUGE})
    assert _errors(plugin_object={"mixed_precision_policy": {"param_dtype": HUGE}}) == ["FSDP-E101"]
