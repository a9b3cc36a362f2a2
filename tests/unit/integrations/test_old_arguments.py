"""Arguments of Transformers 4 that Transformers 5 removed, as keyword arguments and in commands."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.session import session

# The command of FastChat and Alpaca, after the script's name.
COMMAND = ["--output_dir", "out", "--use_cpu", "--fsdp", "full_shard auto_wrap"]
LAYER = ["--fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer"]


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default="facebook/opt-125m")


@dataclass
class OwnArguments(TrainingArguments):
    cache_dir: str | None = field(default=None)
    model_max_length: int = field(default=512)


@dataclass
class ArgumentsWithField(TrainingArguments):
    fsdp_transformer_layer_cls_to_wrap: str | None = field(default=None)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    hfp.uninstall()
    hfp.install({})
    yield
    hfp.uninstall()
    PartialState._reset_state()


def spec_of(arguments: TrainingArguments) -> hfp.FsdpSpec:
    spec = session().spec_of_arguments(arguments)
    assert spec is not None
    return spec


@pytest.mark.parametrize("kind", [TrainingArguments, OwnArguments, ArgumentsWithField], ids=lambda kind: kind.__name__)
def test_command_for_transformers_4_is_parsed(kind: Any) -> None:
    parser = HfArgumentParser((ModelArguments, kind))
    model, arguments = parser.parse_args_into_dataclasses([*COMMAND, *LAYER])
    assert (type(model), type(arguments)) == (ModelArguments, kind)
    assert spec_of(arguments).wrap.classes == ("LlamaDecoderLayer",)
    model, arguments, rest = parser.parse_args_into_dataclasses(COMMAND, return_remaining_strings=True)
    assert spec_of(arguments).wrap.classes == () and rest == []


@pytest.mark.parametrize("option", ["--fsdp_min_num_params", "--fsdp-min-num-params"])
def test_size_threshold_of_command_is_parsed(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *COMMAND, option, "2000"])
    (arguments,) = HfArgumentParser(OwnArguments).parse_args_into_dataclasses()
    assert (spec_of(arguments).wrap.policy, spec_of(arguments).wrap.min_num_params) == ("size", 2000)


def test_json_file_for_transformers_4_is_parsed(tmp_path: Path) -> None:
    content = {"output_dir": "out", "use_cpu": True, "fsdp": "full_shard", "fsdp_min_num_params": 2000}
    (tmp_path / "c.json").write_text(json.dumps(content))
    (arguments,) = HfArgumentParser(OwnArguments).parse_json_file(tmp_path / "c.json")
    assert spec_of(arguments).wrap.min_num_params == 2000


def test_trl_parser_reads_command_and_config(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    (tmp_path / "c.yaml").write_text("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n")
    for words in (LAYER, ["--config", str(tmp_path / "c.yaml")]):
        (arguments,) = trl.TrlParser(OwnArguments).parse_args_and_config([*COMMAND, *words])
        assert spec_of(arguments).wrap.classes == ("LlamaDecoderLayer",)


@pytest.mark.parametrize("config", [None, {"fsdp_version": 1}, '{"fsdp_version": 1}'], ids=["none", "dict", "json"])
def test_keyword_arguments_of_transformers_4_are_read(config: Any) -> None:
    given: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    spec = spec_of(TrainingArguments("out", use_cpu=True, fsdp_config=config, **given))
    assert (spec.wrap.classes, spec.fsdp.version) == (("LlamaDecoderLayer",), 2 if config is None else 1)
    own = hfp.FsdpTrainingArguments("out", use_cpu=True, fsdp_config=config, **given)
    assert spec_of(own).wrap.classes == ("LlamaDecoderLayer",)


GIVEN: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "use_cpu": True}
KEYWORDS: list[tuple[dict[str, Any], str, Any]] = [
    ({"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}, "wrap.classes", ("LlamaDecoderLayer",)),
    ({"fsdp_min_num_params": 2000}, "wrap.min_num_params", 2000),
]


def own_constructor() -> type:
    class Own(OwnArguments):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    return Own


def defined_now(base: type) -> type:
    @dataclass
    class TrainingArguments(base):  # type: ignore[valid-type,misc]  # Alpaca's has the name of its base
        model_max_length: int = field(default=512)

    return TrainingArguments


def trl_config() -> type:
    kind: type = pytest.importorskip("trl").SFTConfig
    return kind


SUBCLASSES: dict[str, Any] = {
    "defined before install": lambda: OwnArguments,
    "defined after install": lambda: defined_now(TrainingArguments),
    "subclass of a dataclass": lambda: defined_now(OwnArguments),
    "constructor of its own": own_constructor,
    "a field for one of them": lambda: ArgumentsWithField,
    "Seq2SeqTrainingArguments": lambda: Seq2SeqTrainingArguments,
    "SFTConfig": trl_config,
}


@pytest.mark.parametrize("given", KEYWORDS, ids=lambda given: next(iter(given[0])))
@pytest.mark.parametrize("kind", SUBCLASSES)
def test_keyword_arguments_of_subclasses_are_read(kind: str, given: tuple[dict[str, Any], str, Any]) -> None:
    keywords, name, value = given
    for _ in range(2):
        arguments = SUBCLASSES[kind]()("out", **GIVEN, **keywords)
        assert spec_of(arguments).get(name) == value
    assert spec_of(SUBCLASSES[kind]()("out", **GIVEN)).get(name) != value  # the next object has its own arguments


def test_subclass_of_our_arguments_needs_no_install() -> None:
    hfp.uninstall()
    kind = defined_now(hfp.FsdpTrainingArguments)
    for keywords, name, value in KEYWORDS:
        assert spec_of(kind("out", **GIVEN, **keywords)).get(name) == value


def test_constructors_are_restored() -> None:
    own = vars(OwnArguments)["__init__"]
    signature = inspect.signature(OwnArguments)
    OwnArguments("out", **GIVEN, fsdp_min_num_params=1)  # type: ignore[call-arg]
    assert inspect.signature(OwnArguments) == signature
    assert list(inspect.signature(TrainingArguments).parameters)[:1] == ["output_dir"]
    hfp.uninstall()
    for kind in (TrainingArguments, OwnArguments, Seq2SeqTrainingArguments):
        with pytest.raises(TypeError, match="fsdp_min_num_params"):
            kind("out", fsdp_min_num_params=1)
        assert kind("out", use_cpu=True).output_dir == "out"
    assert list(inspect.signature(TrainingArguments).parameters)[:1] == ["output_dir"]
    assert vars(OwnArguments)["__init__"] is own


def test_arguments_are_copied_and_pickled() -> None:
    arguments = OwnArguments("out", **GIVEN, fsdp_min_num_params=7)  # type: ignore[call-arg]
    for copied in (copy.deepcopy(arguments), pickle.loads(pickle.dumps(arguments))):
        assert copied.to_dict() == arguments.to_dict()


def test_old_arguments_without_fsdp_enable_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    (arguments,) = HfArgumentParser(OwnArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", *LAYER]
    )
    assert session().spec_of_arguments(arguments) is None and not arguments.fsdp
    assert capsys.readouterr().err.count("[FSDP-W033]") == 1


def test_conflicting_old_argument_is_error() -> None:
    config = {"transformer_layer_cls_to_wrap": "BertLayer"}
    given: dict[str, Any] = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    with pytest.raises(hfp.SpecError, match="FSDP-E102"):
        TrainingArguments("out", use_cpu=True, fsdp=True, fsdp_config=config, **given)


def test_parser_of_other_dataclasses_has_no_old_arguments() -> None:
    assert (
        HfArgumentParser(ModelArguments).parse_args_into_dataclasses(LAYER, return_remaining_strings=True)[1] == LAYER
    )
    hfp.uninstall()
    with pytest.raises(TypeError):
        TrainingArguments("out", fsdp_min_num_params=1)  # type: ignore[call-arg]
