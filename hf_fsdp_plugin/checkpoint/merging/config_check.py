"""Compares a checkpoint with the config's model in a child process, because the comparison imports torch.

``python -m hf_fsdp_plugin.checkpoint.merging.config_check CHECKPOINT NUMBER CONFIG_FOLDER`` prints a JSON list.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hf_fsdp_plugin.checkpoint.formats.errors import problem
from hf_fsdp_plugin.problems import Problem


class ConfigCheck:
    """Compares a checkpoint's names and shapes with the model of a config, in the background."""

    def __init__(self, checkpoint: Path, number: int, config: Path) -> None:
        self._config = config
        command = [sys.executable, "-m", __name__, str(checkpoint), str(number), str(config)]
        environ = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ)

    def __enter__(self) -> ConfigCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def problems(self) -> list[Problem]:
        """Wait for the child process, and return its problems, or a note if it failed."""
        output, errors = self._process.communicate()
        if self._process.returncode == 0:
            return [
                problem(found["code"], found["origin"]["file"], found["message"], found["fix"])
                for found in json.loads(output)
            ]
        reason = (errors.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]
        message = f"names and shapes were not compared with a model: {reason}"
        return [problem("FSDP-N475", self._config, f"{message}.")]


def _compare(checkpoint: str, number: str, config: str) -> str:
    from hf_fsdp_plugin.checkpoint.checking.against_config import config_problems
    from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model

    found = config_problems(read_stored_model(Path(checkpoint), int(number)), Path(config))
    return json.dumps([each.to_json() for each in found])


if __name__ == "__main__":
    standard_output = sys.stdout
    sys.stdout = sys.stderr  # libraries may have printed other lines
    print(_compare(*sys.argv[1:]), file=standard_output)
