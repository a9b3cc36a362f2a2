"""What a Trainer continues with: refused if it is missing or invalid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from hf_fsdp_plugin.checkpoint.checking import completeness
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import saved

STATE = {"global_step": 4, "epoch": 0.5, "max_steps": 6, "best_model_checkpoint": None, "log_history": []}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(completeness, "read_stored_optimizer", lambda *_, **__: object())
    for name in ("scheduler.pt", "rng_state_0.pth"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "trainer_state.json").write_text(json.dumps(STATE))
    return tmp_path


def check(checkpoint: Path, *, model_only: bool = False) -> Problem | None:
    return completeness.check_trainer_checkpoint(checkpoint, model_only=model_only)


def refusal(checkpoint: Path, *, model_only: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(checkpoint, model_only=model_only)
    (found,) = caught.value.problems
    return f"{found.code}: {found.message}"


def test_complete_checkpoint_is_accepted(checkpoint: Path) -> None:
    assert check(checkpoint) is check(checkpoint, model_only=True) is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[]", "FSDP-E453"), ("null", "FSDP-E453"), ("{", "FSDP-E453"),
        ("[" * 100_000, "FSDP-E453"), ('{"epoch": 1, "epoch": 2}', "FSDP-E453"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["trainer_state.json", "config.json"])
def test_damaged_json_is_refused(checkpoint: Path, name: str, text: str, code: str) -> None:
    (checkpoint / name).write_text(text)
    assert refusal(checkpoint).startswith(code)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"global_step": "2"}, "has global_step: '2'; expected an integer"),
        ({"global_step": True}, "has global_step: True; expected an integer"),
        ({"global_step": -5}, "has global_step: -5; expected 0 or more"),
        ({"log_history": {}}, "has log_history: {}; expected a list"),
        ({"epoch": "1"}, "has epoch: '1'; expected an integer or a number or null"),
        ({"best_model_checkpoint": "\033[2J"}, "has best_model_checkpoint: '\\x1b[2J'"),
        ({"\033[2J": 1}, "contains the name '\\x1b[2J', which the Trainer never writes"),
    ],
)
def test_values_that_cannot_be_continued_are_refused(checkpoint: Path, state: dict[str, object], message: str) -> None:
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    assert message in refusal(checkpoint)


def test_state_of_this_transformers_is_accepted(checkpoint: Path) -> None:
    transformers.TrainerState(epoch=0.5, best_metric=1).save_to_json(str(checkpoint / "trainer_state.json"))
    assert check(checkpoint) is None


def test_file_of_a_terabyte_is_not_read(checkpoint: Path) -> None:
    with (checkpoint / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert refusal(checkpoint).startswith("FSDP-E412")


def test_missing_state_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkpoint / "scheduler.pt").unlink()
    assert "no learning rate schedule," in refusal(checkpoint, model_only=True)
    (checkpoint / "rng_state_0.pth").unlink()
    monkeypatch.setattr(completeness, "read_stored_optimizer", lambda *_, **__: None)
    assert "optimizer state, learning rate schedule, random state" in refusal(checkpoint)
    warning = check(checkpoint, model_only=True)
    assert warning is not None and warning.code == "FSDP-W408"
    (checkpoint / "trainer_state.json").unlink()
    assert "step of the Trainer (trainer_state.json)" in refusal(checkpoint, model_only=True)


def test_link_to_a_device_is_missing(checkpoint: Path) -> None:
    (checkpoint / "scheduler.pt").unlink()
    (checkpoint / "scheduler.pt").symlink_to("/dev/zero")
    assert refusal(checkpoint).startswith("FSDP-E424")


@pytest.mark.parametrize(("text", "code"), [("[]", "FSDP-E453")])
def test_verify_refuses_it_too(tmp_path: Path, text: str, code: str) -> None:
    """With a manifest, the bytes are those that were saved."""
    folder = saved.local_checkpoint(tmp_path / "checkpoint-20")
    assert saved.errors(verify(folder)) == []
    (folder / "fsdp_manifest.json").unlink()
    (folder / "trainer_state.json").write_text(text)
    saved.only_error(folder, code)
