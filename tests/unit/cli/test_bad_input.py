"""Invalid config files on the command line: one message on stderr and exit code 1."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_fsdp_plugin.cli.main import main

HEAD = b"distributed_type: FSDP\nuse_cpu: true\n"
FSDP = HEAD + b"fsdp_config:\n"
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "FSDP-E008"),
    "comments only": (b"# nothing\n\n", "FSDP-E008"),
    "not YAML": (b"fsdp_config: [a", "c.yaml:1: FSDP-E006"),
    "tabs": (b"distributed_type: FSDP\nfsdp_config:\n\tfsdp_version: 2\n", "c.yaml:3: FSDP-E006"),
    "a list at top": (b"- a\n- b\n", "FSDP-E009"),
    "a text at top": (b"hello\n", "FSDP-E009"),
    "50 MB of junk": (b"\x00\xffjunk" * (50_000_000 // 6), "FSDP-E004"),
    "50 MB of lines": (b"key: value\n" * (50_000_000 // 11), "FSDP-E004"),
    "binary": (b"\x00\x01\x02", "FSDP-E006"),
    "not UTF-8": (b"a: \xff\n", "FSDP-E005"),
    "a key twice": (FSDP + b"  fsdp_version: 2\n  fsdp_version: 2\n", "c.yaml:5: FSDP-E013"),
    "NaN as a threshold": (
        FSDP + b"  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: .nan\n",
        "FSDP-E101",
    ),
    "a class name with a blank": (FSDP + b"  fsdp_transformer_layer_cls_to_wrap: Llama DecoderLayer\n", "FSDP-E144"),
    "a mesh of another size": (
        FSDP + b"  fsdp_version: 2\nnum_processes: 3\nparallelism_config:\n"
        b"  parallelism_config_dp_shard_size: 2\n  parallelism_config_dp_replicate_size: 2\n",
        "FSDP-E128",
    ),
    "fp16 on CPU": (FSDP + b"  fsdp_version: 2\nmixed_precision: fp16\n", "FSDP-E147"),
    "bf16 and fp16": (
        b"distributed_type: FSDP\nmixed_precision: fp16\nfsdp_config:\n  fsdp_mixed_precision_policy: bf16\n",
        "FSDP-E146",
    ),
    "both checkpointing switches": (
        b"output_dir: out\nfsdp: full_shard\ngradient_checkpointing: true\n"
        b"fsdp_config:\n  activation_checkpointing: true\n",
        "FSDP-E112",
    ),
    "another engine": (b"distributed_type: MEGATRON_LM\n", "FSDP-E120"),
    "a stage of ZeRO to come": (b"distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 4\n", "FSDP-E101"),
    "FSDP and DeepSpeed": (HEAD + b"zero_optimization: {stage: 3}\n", "FSDP-E064"),
    "MULTI_GPU with an fsdp_config": (b"distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2\n", "FSDP-E123"),
    "an alias of itself": (b"a: &x [*x]\n", "FSDP-E004"),
    "a Python tag": (b'!!python/object/apply:os.system ["true"]\n', "FSDP-E011"),
    "brackets without end": (b"a: " + b"[" * 5000 + b"]" * 5000, "FSDP-E004"),
    "two documents": (b"---\na: 1\n---\nb: 2\n", "FSDP-E006"),
    "a mapping as a key": (b"? {a: b}\n: c\n", "FSDP-E006"),
    "a version to come": (FSDP + b"  fsdp_version: 3\n", "FSDP-E101"),
    "a list for a section": (HEAD + b"fsdp_config: [a, b]\n", "FSDP-E022"),
    "a word for a number": (FSDP + b"  fsdp_version: 2\nnum_processes: two\n", "FSDP-E101"),
}
VERBS = {"check": ["check"], "launch": ["launch", "--dry-run", "--config_file"]}

RunVerb = Callable[[str], tuple[int, list[str]]]


@pytest.fixture(params=VERBS)
def run_verb(
    request: pytest.FixtureRequest, hf_fsdp: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RunVerb:
    """Run each verb with a config. Returns the exit code and the lines of stderr, without notes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def run(config: str) -> tuple[int, list[str]]:
        script = ["train.py"] if request.param == "launch" else []
        code, _, err = hf_fsdp(*VERBS[request.param], config, *script)
        return code, [line for line in err.splitlines() if ": note: " not in line]

    return run


@pytest.mark.parametrize("case", BAD)
def test_invalid_config_is_one_message(run_verb: RunVerb, tmp_path: Path, case: str) -> None:
    content, expected = BAD[case]
    (tmp_path / "c.yaml").write_bytes(content)
    code, lines = run_verb("c.yaml")
    assert code == 1
    assert len(lines) == 1 and lines[0].startswith("c.yaml"), lines
    assert all(part in lines[0] for part in expected.split()), lines


def test_path_that_is_not_a_file_is_one_message(run_verb: RunVerb, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for name, expected in (
            ("folder", "FSDP-E001"),
            ("pipe", "FSDP-E001"),
            ("socket", "FSDP-E001"),
            ("loop", "FSDP-E001"),
            ("missing.yaml", "FSDP-E001"),
            ("x" * 5000, "FSDP-E003"),
        ):
            code, lines = run_verb(name)
            assert code == (1 if expected == "FSDP-E003" else 2)  # 2: the argument is not the path of a file
            assert len(lines) == 1 and expected in lines[0], (name, lines)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_one_message(run_verb: RunVerb, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(FSDP)
    (tmp_path / "c.yaml").chmod(0)
    code, lines = run_verb("c.yaml")
    assert code == 1 and len(lines) == 1 and "FSDP-E003" in lines[0]


def test_valid_config_prints_no_message(run_verb: RunVerb, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(FSDP + b"  fsdp_version: 2\n  fsdp_auto_wrap_policy: NO_WRAP\nnum_processes: 2\n")
    assert run_verb("c.yaml") == (0, [])


def test_full_disk_under_stdout_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return False

    (tmp_path / "c.yaml").write_bytes(FSDP + b"  fsdp_version: 2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", Full())
        assert main(["check", str(tmp_path / "c.yaml")]) == 1
    assert capsys.readouterr().err == "hf-fsdp check: No space left on device\n"
