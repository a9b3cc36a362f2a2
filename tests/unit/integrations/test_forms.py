"""Every entry point decides alike: ``check``, ``load_spec``, ``launch``, ``install`` and ``FsdpTrainingArguments``.

What Transformers itself runs without FSDP, or with an FSDP version, is compared too.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import PartialState
from transformers import TrainingArguments

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.cli.main import main
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.launcher.flags import parse_launch_arguments
from hf_fsdp_plugin.sources.handover import LAUNCH_VARIABLE, LaunchHandover
from hf_fsdp_plugin.spec.load import read_settings

NAMES = ("fsdp.version", "sharding.strategy", "wrap.policy", "wrap.classes", "wrap.min_num_params", "offload.params")
Decision = tuple[Any, ...] | None
Form = dict[str, Any]
V4 = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
LAYER = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
_FULL = (2, "full_shard", "transformer", [], 0, False)
# Arguments of TrainingArguments -> what every entry point decides; None without FSDP.
ARGUMENTS: list[tuple[Form, Decision]] = [
    ({}, None),
    ({"fsdp": ""}, None),
    ({"fsdp": []}, None),
    ({"fsdp": False}, None),
    ({"fsdp": "", "fsdp_config": V4}, None),
    ({"fsdp": [], "fsdp_config": V4}, None),
    ({"fsdp_config": V4}, None),
    ({"fsdp_config": {}}, None),
    ({"fsdp_config": {"fsdp_version": 2, **LAYER}}, None),
    ({"fsdp": True}, _FULL),
    ({"fsdp": "full_shard"}, _FULL),
    ({"fsdp": "full_shard auto_wrap"}, _FULL),
    ({"fsdp": ["full_shard", "auto_wrap"]}, _FULL),
    ({"fsdp": "full_shard auto_wrap", "fsdp_config": V4}, _FULL),
    ({"fsdp": "full_shard auto_wrap offload"}, (*_FULL[:5], True)),
    ({"fsdp": True, "fsdp_config": LAYER}, (*_FULL[:3], ["LlamaDecoderLayer"], 0, False)),
    ({"fsdp": "shard_grad_op auto_wrap"}, (2, "shard_grad_op", *_FULL[2:])),
    ({"fsdp": "full_shard", "fsdp_config": {"version": 2, "reshard_after_forward": False}},
     (2, "shard_grad_op", *_FULL[2:])),
    ({"fsdp": "shard_grad_op", "fsdp_config": {"version": 2, "reshard_after_forward": True}}, _FULL),
    ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1}}, (1, *_FULL[1:])),
    ({"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"fsdp_version": 1}}, (1, "shard_grad_op", *_FULL[2:])),
    ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 9}},
     (2, "full_shard", "size", [], 9, False)),
]  # fmt: skip
# Config files -> what every entry point decides.
FILES: dict[str, tuple[Form, Decision]] = {
    "accelerate": ({"distributed_type": "FSDP"}, (1, "full_shard", "none", [], 0, False)),
    "accelerate 2": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, (2, "full_shard", "none", [], 0, False)
    ),
    "multi gpu": ({"distributed_type": "MULTI_GPU", "num_processes": 2}, None),
    "no": ({"distributed_type": "NO"}, None),
    "section": ({"fsdp_sharding_strategy": 2}, (1, "shard_grad_op", "none", [], 0, False)),
    "axolotl off": ({"base_model": "m", "fsdp": None, "fsdp_config": None}, None),
    # axolotl's own default is version 1.
    "axolotl": ({"base_model": "m", "fsdp": ["full_shard", "auto_wrap"]}, (1, *_FULL[1:])),
    "axolotl 2": ({"base_model": "m", "fsdp_config": {"offload_params": True}}, (1, *_FULL[1:5], True)),
    "llama factory": ({"model_name_or_path": "m", "fsdp": ["full_shard", "auto_wrap"]}, _FULL),
    "llama factory off": ({"model_name_or_path": "m", "fsdp": "", "fsdp_config": V4}, None),
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run without hooks, without other sources, and without the state of earlier TrainingArguments."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    monkeypatch.chdir(tmp_path)
    hfp.uninstall()
    yield
    hfp.uninstall()
    PartialState._reset_state()


def decided(spec: hfp.FsdpSpec | None) -> Decision:
    """Return the settings that an entry point decides, as JSON values; ``None`` without FSDP."""
    if spec is None or not spec.enabled:
        return None
    return tuple(list(value) if isinstance(value, tuple) else value for value in map(spec.get, NAMES))


def by_check(capsys: pytest.CaptureFixture[str], *argv: str) -> Decision:
    main(["check", "--json", *argv])
    result = json.loads(capsys.readouterr().out)
    return tuple(result["settings"][name]["value"] for name in NAMES) if result["enabled"] else None


def by_launch(monkeypatch: pytest.MonkeyPatch, *argv: str) -> Decision:
    """Return what ``install`` decides in a rank of ``hf-fsdp launch`` with these flags."""
    from hf_fsdp_plugin.cli.launch import _sources

    arguments = parse_launch_arguments([*argv, "train.py"])
    handover = LaunchHandover(given=tuple(read_settings(_sources(arguments))))
    monkeypatch.setenv(LAUNCH_VARIABLE, handover.to_env()[LAUNCH_VARIABLE])
    decision = decided(hfp.install())
    hfp.uninstall()
    monkeypatch.delenv(LAUNCH_VARIABLE)
    return decision


def by_arguments(kind: Callable[..., Any], form: Form) -> Decision:
    return decided(session().spec_of_arguments(kind("out", use_cpu=True, **form)))


def flags_of(form: Form) -> list[str]:
    flags = []
    if "fsdp" in form:
        given = form["fsdp"]
        flags.append(f"--fsdp={' '.join(given) if isinstance(given, list) else str(given)}")
    if "fsdp_config" in form:
        flags.append(f"--fsdp_config={json.dumps(form['fsdp_config'])}")
    return flags


@pytest.mark.parametrize(
    ("form", "expected"),
    [pytest.param(*row, marks=pytest.mark.slow if number % 3 else ()) for number, row in enumerate(ARGUMENTS)],
    ids=str,
)
def test_entry_points_agree_on_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: Form, expected: Decision
) -> None:
    assert decided(hfp.load_spec(**form, environ={})) == expected
    if form:  # check reads a default config otherwise
        assert by_check(capsys, *flags_of(form)) == expected
    assert by_launch(monkeypatch, *flags_of(form)) == expected
    assert by_arguments(hfp.FsdpTrainingArguments, form) == expected
    hfp.install({})
    assert by_arguments(TrainingArguments, form) == expected
    hfp.uninstall()
    stock: Any = TrainingArguments("out", use_cpu=True, **json.loads(json.dumps(form)))
    found = stock.fsdp_plugin_args
    assert (found and found["fsdp_version"]) == (expected and expected[0])
    if expected is not None and expected[0] == 2:
        assert found["reshard_after_forward"] is (expected[1] == "full_shard")


@pytest.mark.parametrize("name", FILES)
def test_entry_points_agree_on_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    form, expected = FILES[name]
    Path("c.yaml").write_text(yaml.safe_dump(form))
    assert by_check(capsys, "c.yaml") == expected
    assert by_launch(monkeypatch, "--config_file", "c.yaml") == expected
    for read in (functools.partial(hfp.load_spec, environ={}), hfp.install):
        if name.startswith(("axolotl", "llama factory")):  # only commands convert configs of other programs
            with pytest.raises(hfp.SpecError, match=r"hf-fsdp convert c\.yaml"):
                read("c.yaml")
        else:
            assert decided(read("c.yaml")) == expected


def test_second_install_names_the_replaced_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"fsdp{version}.yaml" for version in (1, 2)]
    for version, path in enumerate(paths, 1):
        path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": version}}))
    hfp.install(paths[0])
    hfp.install(paths[0])
    hfp.install(overrides=["precision.param=bf16"])
    assert "FSDP-W648" not in capsys.readouterr().err
    spec = hfp.install(paths[1])
    assert spec is not None and spec.get("fsdp.version") == 2
    assert f"{paths[1]}, which replaces {paths[0]}" in capsys.readouterr().err


def test_script_without_launcher_reads_its_config_once(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: true\n")
    hfp.install(path)
    path.unlink()
    arguments = TrainingArguments("out", use_cpu=True, fsdp=True, fsdp_config={"version": 2})
    spec = session().spec_of_arguments(arguments)
    assert spec is not None and spec.offload.params and spec.origin("offload.params").source_line == f"{path}:3"
    second = hfp.install(overrides=["mesh.shard=1"])  # it completes the settings of the first call
    assert second is not None and second.offload.params and second.mesh.shard == 1
