"""docs/clusters.md: each cell of the table of launchers names a test that exists, and the recipes can be parsed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from hf_fsdp_plugin.launcher.flags import parse_launch_arguments

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8"), re.DOTALL)
JOBS = [yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml" and "PyTorchJob" in text]
COMMANDS = [
    command.replace("$SLURM_NNODES", "2").replace("$SLURM_NODEID", "1").replace("$MASTER_PORT", "29500")
    for kind, text in BLOCKS
    if kind == "bash"
    for command in re.findall(r"^(?:torchrun|hf-fsdp launch) .*", text.replace("\\\n", " "), re.MULTILINE)
]


def parse(words: list[str]) -> None:
    """Parse a command as its launcher does, which must accept all flags and find the script."""
    if words[0] == "torchrun":
        found = get_args_parser().parse_args(words[1:])
        assert found.training_script == "train.py" or found.training_script_args[-1] == "train.py"
    else:
        assert parse_launch_arguments(words[2:]).script == "train.py"


def test_commands_are_accepted_by_their_launchers() -> None:
    assert len(COMMANDS) >= 6
    for command in COMMANDS:
        parse(shlex.split(command))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["metadata"]["name"])
def test_pods_of_a_job_are_complete(job: dict) -> None:
    """As the training operator needs them: name of the container and of its port; and volumes that exist."""
    assert job["apiVersion"] == "kubeflow.org/v1"
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert replica["restartPolicy"] == "OnFailure" and replica["replicas"] >= 1
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert [port["name"] for port in container["ports"]] == ["pytorchjob-port"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert {"HF_FSDP_RUN_ID", "TMPDIR"} <= {variable["name"] for variable in container["env"]}
        parse(container["command"])


def test_both_kinds_of_jobs_are_shown() -> None:
    assert ["elasticPolicy" in job["spec"] for job in JOBS] == [True, False]
