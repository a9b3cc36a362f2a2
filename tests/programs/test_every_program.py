"""Every program of the repository starts, and those that take seconds run at their smallest size.

What takes longer runs in the test or in the set (``python -m scripts.last_runs``) that its row names.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench.registry import BENCHMARKS
from scripts.last_runs import SETS
from tests.support.leaks import ProcessState

ROOT = Path(__file__).resolve().parents[2]
RUN: dict[str, str] = {
    "scripts/bench/all.sh": "--list",
    "scripts/bench/__main__.py": "--list",
    "scripts/bench/gpu_checks/predict.py": "hidden=32,seq=16 cpu 0",
    "scripts/bench/measure/layer_classes.py": "--only bert --out {folder}/out.json",
    "scripts/bench/measure/public_configs.py": "--every 20 --out {folder}/out.json",
    "scripts/bench/tables/compare.py": "docs/results/merge.json docs/results/merge.json",
    "scripts/bench/tables/update_results.py": "--check",
    "scripts/generated_values.py": "--cases 500 --out {folder}/out.json",
    "scripts/gpu_check.sh": "--cpu --list",
    "scripts/last_runs.py": "--stale",
    "scripts/pictures.py": "--check",
    "scripts/run_ecosystem.py": "--list",
    "scripts/run_matrix.py": "--list",
    "scripts/size.py": "--files",
    "scripts/update_contracts.py": "--check",
}
"""Program -> the arguments of its smallest run. Each takes less than 15 seconds of CPU time."""
HELP: dict[str, str] = {
    "scripts/bench/calibration.py": "tests/gloo/test_step_time.py",
    "scripts/bench/measure/gpu_check.py": "set gpu_check",
    "scripts/coverage.sh": "set coverage",
    "scripts/ecosystem.sh": "set ecosystem",
    "scripts/finetune_bert.py": "tests/gloo/test_scripts.py",
    "scripts/matrix.sh": "set matrix",
    "scripts/quickstart.sh": "set matrix",
    "scripts/run_peers.py": "set peers",
    "scripts/slow_tests.py": "tests/unit/test_last_runs.py",
    "scripts/test.sh": ".ci/run",
    "scripts/train_causal_lm.py": "tests/gloo/test_scripts.py",
    "scripts/train_loop.py": "tests/gloo/test_scripts.py",
    "scripts/uncovered.py": "tests/unit/test_uncovered.py",
    "scripts/update_docs.py": "tests/unit/test_update_docs.py",
}
"""Program that only prints its help here -> the file or the set that runs it."""
BENCHMARK_PROGRAMS = {row.path(): row.name for row in BENCHMARKS}
"""Programs whose smallest run is a slow test (test_all_benchmarks.py), and each of which is a set."""
ELSEWHERE: dict[str, str] = {
    "scripts/bench/gpu_checks/child.py": "tests/gloo/test_gpu_check.py",
    "scripts/bench/ranks/hangs.py": "set hangs",
    "scripts/bench/ranks/host_waits.py": "tests/gloo/test_host_waits.py",
    "scripts/bench/ranks/restarts.py": "set restarts",
    "scripts/bench/ranks/two_hosts.py": "tests/gloo/test_two_hosts.py",
    "scripts/ecosystem/behaviors/run.py": "tests/gloo/test_ecosystem.py",
    "scripts/ecosystem/unsharded.py": "tests/gloo/test_ecosystem.py",
    "scripts/environment.sh": ".ci/run",
    "scripts/peers/inside/sitecustomize.py": "tests/programs/test_peers.py",
    "scripts/two_hosts.sh": "tests/gloo/test_two_hosts.py",
    **{
        f"scripts/ecosystem/scripts/{name}.py": "set ecosystem"
        for name in (
            "cross_encoder", "generate_callback", "peft_trainer", "save_loop", "sentence_transformer", "seq2seq",
            "sharded_loading",
        )
    },
}  # fmt: skip
"""Program without ``--help`` -> the file or the set that runs it."""
OPTIONAL = frozenset(
    {
        "bitsandbytes", "diffusers", "optuna", "ray", "schedulefree", "sentence_transformers", "setfit", "torch_npu",
        "torchao",
    }
)  # fmt: skip
"""Libraries that the environment of the tests does not need."""
NAMES = {row.name for row in SETS}


def programs() -> list[str]:
    """Return the paths of all files that are run, and not only imported."""
    paths = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").rglob("*.py"))
    guarded = [path for path in paths if '__name__ == "__main__"' in (ROOT / path).read_text(encoding="utf-8")]
    by_path = [path for path in paths if path.startswith("scripts/ecosystem/scripts/")]
    by_name = [path for path in paths if path.endswith("/sitecustomize.py")]
    shell = [path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").rglob("*.sh")]
    return sorted({*guarded, *by_path, *by_name, *shell})


PYTHON = [path for path in programs() if path.endswith(".py") and path not in ELSEWHERE]


def test_every_program_has_a_row() -> None:
    known = {*RUN, *HELP, *BENCHMARK_PROGRAMS, *ELSEWHERE}
    assert set(programs()) - known == set() and known - set(programs()) == set()


def test_rows_name_what_exists() -> None:
    assert [
        where
        for where in [*HELP.values(), *ELSEWHERE.values()]
        if not (where.removeprefix("set ") in NAMES if where.startswith("set ") else (ROOT / where).is_file())
    ] == []


@pytest.mark.parametrize("path", [path for path in PYTHON if not path.endswith("/predict.py")])
def test_program_prints_its_help(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # python -m scripts.bench changes it
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    monkeypatch.setattr(sys, "path", [str((ROOT / path).parent), *sys.path])
    modules, process = set(sys.modules), ProcessState.read()
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / path), run_name="__main__")
    process.restore()  # some programs handle SIGTERM
    sys.modules.pop("data", None) if "data" not in modules else None  # scripts/data.py, as the example scripts see it
    assert not stopped.value.code and "usage" in capsys.readouterr().out


@pytest.mark.parametrize("path", [path for path in HELP if path.endswith(".sh")])
def test_shell_script_prints_its_help(path: str) -> None:
    assert f"bash {path}" in run(["bash", path, "--help"])


@pytest.mark.parametrize("path", RUN)
def test_program_runs_at_its_smallest_size(path: str, tmp_path: Path) -> None:
    module = path.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    start = ["bash", path] if path.endswith(".sh") else [sys.executable, "-m", module]
    run([*start, *RUN[path].format(folder=tmp_path).split()])


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def imports() -> Iterator[tuple[Path, int, str, str]]:
    """Yield file, line, module and name of each import in a file of the repository, also inside of functions."""
    for folder in ("scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    yield from ((path, node.lineno, alias.name, "") for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    yield from ((path, node.lineno, node.module, alias.name) for alias in node.names)


def test_imports_inside_of_functions_exist() -> None:
    """A module of the repository that is renamed is found in imports that no quick test executes."""
    missing = {}
    for path, line, module, name in imports():
        first = module.partition(".")[0]
        if first in ("scripts", "tests", "hf_fsdp_plugin"):
            found = importlib.import_module(module)
            exists = not name or name == "*" or hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}")
        else:
            beside = any((folder / f"{first}.py").is_file() for folder in (path.parent, ROOT / "scripts"))
            exists = first in OPTIONAL or beside or importlib.util.find_spec(first) is not None
        if not exists:
            missing[f"{path.relative_to(ROOT)}:{line}"] = f"{module} {name}"
    assert missing == {}
