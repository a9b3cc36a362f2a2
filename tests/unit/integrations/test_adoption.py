"""Which models that ``from_pretrained`` has sharded are adopted."""

from types import SimpleNamespace

import pytest

from hf_fsdp_plugin.integrations.accelerate.accelerator import is_left_to_transformers
from hf_fsdp_plugin.messages import MessagePrinter
from hf_fsdp_plugin.state import process


@pytest.mark.parametrize("axis", ["tp_size", "pp_size", "ep_size"])
def test_other_parallelism_is_left_to_transformers(
    axis: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    process.end(MessagePrinter)
    assert not is_left_to_transformers(SimpleNamespace(tp_size=1, pp_size=None, ep_size=1))
    assert capsys.readouterr().err == ""
    assert is_left_to_transformers(SimpleNamespace(**{axis: 2}))
    assert "FSDP-W650" in capsys.readouterr().err
    process.end(MessagePrinter)
