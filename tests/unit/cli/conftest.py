"""Runs verbs of ``hf-fsdp``, in this process or in a new one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from hf_fsdp_plugin.cli.main import main

HEAVY_LIBRARIES = ("torch", "transformers", "accelerate", "datasets")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def hf_fsdp(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a verb, and return the exit code, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def imports_no_heavy_library() -> Callable[..., None]:
    """Run a verb in a new process, and check that it succeeds without importing these libraries."""

    def run(*argv: object, libraries: Sequence[str] = HEAVY_LIBRARIES) -> None:
        program = (
            "import sys; from hf_fsdp_plugin.cli.main import main\n"
            f"code = main({[str(word) for word in argv]!r})\n"
            f"loaded = sorted({{*{libraries!r}}} & set(sys.modules))\n"
            "sys.exit(f'loaded {loaded}' if loaded else code)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture
def config(hf_fsdp, tmp_path, monkeypatch):
    """Run the verb in an empty folder, where it is Accelerate's default place, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*argv: str, code: int = 0) -> tuple[str, str]:
        found, out, err = hf_fsdp("config", *argv)
        assert found == code, err
        return out, err

    return run


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text(json.dumps(LLAMA))
