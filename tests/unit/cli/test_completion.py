"""``hf-fsdp completion``: what the scripts complete, in the shells themselves where these are installed."""

import shutil
import subprocess

import pytest

from hf_fsdp_plugin.cli.main import VERBS
from hf_fsdp_plugin.tools.completion.verb import SCRIPTS, long_flags, visible_actions

CASES = [
    ("hf-fsdp ver", "verify"),
    ("hf-fsdp check --mixed_precision b", "bf16"),
    ("hf-fsdp launch --num_proc", "--num_processes"),
    ("hf-fsdp launch --machine-rank 1 --num_proc", "--num_processes"),
    ("hf-fsdp launch --fsdp_state_dict_type sh", "sharded"),
    ("hf-fsdp launch --show_ranks a", "all"),
    ("hf-fsdp merge --delete", "--delete-input"),
    ("hf-fsdp config --precision f", "fp16"),
    ("hf-fsdp completion z", "zsh"),
    ("hf-fsdp help laun", "launch"),
    ("hf-fsdp check --config-file conf", "config.yaml"),
    ("hf-fsdp launch --num_processes 2 tr", "train.py"),
]
HYPHENS = ("hf-fsdp launch --fsdp-sharding-strategy full", "full_shard")
BASH = """
source {script}
COMP_WORDS=({line}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) COMPREPLY=()
_hf_fsdp
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def scripts(tmp_path, hf_fsdp):
    for shell in SCRIPTS:
        code, out, _ = hf_fsdp("completion", shell)
        assert code == 0
        (tmp_path / f"script.{shell}").write_text(out)
    for name in ("config.yaml", "train.py"):
        (tmp_path / name).touch()
    return tmp_path


def completed(shell: str, program: str, folder) -> list[str]:
    done = subprocess.run([shell, "-c", program], capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [line.split("\t")[0].strip() for line in done.stdout.splitlines() if line.strip()]


def test_every_verb_and_flag_is_listed():
    found = {verb: {flag for action in visible_actions(verb) for flag in long_flags(action)} for verb in VERBS}
    assert {"--config-file", "--json", "--fsdp_version", "--mixed_precision"} <= found["check"]
    assert {"--dry_run", "--fsdp_offload_params", "--log_dir"} <= found["launch"]
    assert "--log_dir" not in found["check"] and "--use_deepspeed" not in found["launch"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(scripts):
    lines = [BASH.format(script="script.bash", line=line) for line, _ in [*CASES, HYPHENS]]
    found = completed("bash", "\necho --\n".join(lines), scripts)
    groups = " ".join(found).split(" -- ")
    assert groups == [expected for _, expected in [*CASES, HYPHENS]]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_leaves_arguments_of_the_script(scripts):
    line = "hf-fsdp launch --num_processes 2 train.py --num_proc"
    assert completed("bash", BASH.format(script="script.bash", line=line), scripts) == []


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(scripts):
    for line, expected in CASES:
        assert expected in completed("fish", f"source script.fish; complete -C '{line}'", scripts), line


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(scripts):
    # These builtins work only inside the line editor, so they are replaced: compadd prints the matches.
    head = (
        "compdef() {}; compset() { false }; compadd() { local w; for w in ${(P)@[-1]}; do "
        "[[ $w == ${words[CURRENT]}* ]] && print -r -- $w; done; true }; source script.zsh; "
    )
    for line, expected in [*CASES, HYPHENS]:
        program = f"{head} words=({line}); CURRENT=${{#words}}; PREFIX=${{words[CURRENT]}}; "
        program += "_bash_complete -o filenames -F _hf_fsdp"
        assert expected in completed("zsh", program, scripts), line
