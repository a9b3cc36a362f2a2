"""Every bad config through the command line: one clear message on stderr, exit code 1, and nothing that looks like a
crash."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hf_fsdp_plugin.cli.main import main

HEAD = b"distributed_type: FSDP\nuse_cpu: true\n"
FSDP = HEAD + b"fsdp_config:\n"
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "comments only": (b"# nothing\n\n", "is empty"),
    "not YAML": (b"fsdp_config: [a", "c.yaml:1: is not YAML"),
    "tabs": (b"distributed_type: FSDP\nfsdp_config:\n\tfsdp_version: 2\n", "c.yaml:3: has a tab"),
    "a list at top": (b"- a\n- b\n", "holds a list at top level"),
    "a text at top": (b"hello\n", "holds a single value at top level"),
    "50 MB of junk": (b"\x00\xffjunk" * (50_000_000 // 6), "is larger than 1 MiB"),
    "50 MB of lines": (b"key: value\n" * (50_000_000 // 11), "is larger than 1 MiB"),
    "binary": (b"\x00\x01\x02", "is binary"),
    "not UTF-8": (b"a: \xff\n", "is not text in UTF-8"),
    "a key twice": (FSDP + b"  fsdp_version: 2\n  fsdp_version: 2\n", "c.yaml:5: has the key 'fsdp_version' twice"),
    "NaN as a threshold": (
        FSDP + b"  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: .nan\n",
        "fsdp_min_num_params is nan; expected a whole number",
    ),
    "a class name with a blank": (
        FSDP + b"  fsdp_transformer_layer_cls_to_wrap: Llama DecoderLayer\n",
        "'Llama DecoderLayer' has a blank inside",
    ),
    "a mesh of another size": (
        FSDP + b"  fsdp_version: 2\nnum_processes: 3\nparallelism_config:\n"
        b"  parallelism_config_dp_shard_size: 2\n  parallelism_config_dp_replicate_size: 2\n",
        "a mesh of 2 × 2 (replicate × shard) is not num_processes, 3",
    ),
    "fp16 on CPU": (FSDP + b"  fsdp_version: 2\nmixed_precision: fp16\n", "fp16 does not train on CPU ranks"),
    "bf16 and fp16": (
        b"distributed_type: FSDP\nmixed_precision: fp16\nfsdp_config:\n  fsdp_mixed_precision_policy: bf16\n",
        "it is bf16 or fp16",
    ),
    "both checkpointing switches": (
        b"output_dir: out\nfsdp: full_shard\ngradient_checkpointing: true\n"
        b"fsdp_config:\n  activation_checkpointing: true\n",
        "activations would be recomputed twice",
    ),
    "a deepspeed config": (
        b"distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n",
        "this is a config for DeepSpeed, not for FSDP",
    ),
    "MULTI_GPU with an fsdp_config": (
        b"distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_version: 2\n",
        "under which the FSDP settings",
    ),
    "an alias": (b"a: &x [*x]\n", "uses the YAML alias"),
    "a Python tag": (b'!!python/object/apply:os.system ["true"]\n', "uses the YAML tag"),
    "brackets without end": (b"a: " + b"[" * 5000 + b"]" * 5000, "is nested too deeply"),
    "two documents": (b"---\na: 1\n---\nb: 2\n", "holds two YAML documents"),
    "a mapping as a key": (b"? {a: b}\n: c\n", "has a key that is not a plain word"),
    "a version to come": (FSDP + b"  fsdp_version: 3\n", "fsdp_version is 3; expected 1 or 2"),
    "a list for a section": (HEAD + b"fsdp_config: [a, b]\n", "expected keys and values under it"),
    "a word for a number": (FSDP + b"  fsdp_version: 2\nnum_processes: two\n", "num_processes is 'two'"),
}
VERBS = {"check": ["check"], "launch": ["launch", "--dry-run", "--config_file"]}


def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, verb: str, config: str
) -> tuple[int, list[str]]:
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text("")
    code = main([*VERBS[verb], config, *(["train.py"] if verb == "launch" else [])])
    lines = capsys.readouterr().err.splitlines()
    return code, [line for line in lines if ": note: " not in line]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("case", BAD)
def test_a_bad_config_is_one_message_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str, verb: str
) -> None:
    content, message = BAD[case]
    (tmp_path / "c.yaml").write_bytes(content)
    code, lines = said(capsys, monkeypatch, tmp_path, verb, "c.yaml")
    assert code == 1
    assert len(lines) == 1 and lines[0].startswith("c.yaml") and message in lines[0], lines


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_file_is_one_message_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for name, message in (
            ("folder", "is a directory"),
            ("pipe", "is not a regular file"),
            ("socket", "is not a regular file"),
            ("loop", "there is no such file"),
            ("missing.yaml", "there is no such file"),
            ("x" * 5000, "cannot be read"),
        ):
            code, lines = said(capsys, monkeypatch, tmp_path, verb, name)
            assert (code, len(lines)) == (1, 1) and message in lines[0], (name, lines)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("verb", VERBS)
def test_a_file_without_permission_is_one_message_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "c.yaml").write_bytes(FSDP)
    (tmp_path / "c.yaml").chmod(0)
    code, lines = said(capsys, monkeypatch, tmp_path, verb, "c.yaml")
    assert (code, lines) == (1, ["c.yaml: may not be read by you. Change its permissions (chmod u+r)."])


@pytest.mark.parametrize("verb", VERBS)
def test_a_good_config_is_no_message_and_exit_code_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "c.yaml").write_bytes(FSDP + b"  fsdp_version: 2\nnum_processes: 2\n")
    assert said(capsys, monkeypatch, tmp_path, verb, "c.yaml") == (0, [])


def test_a_full_disk_under_stdout_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
