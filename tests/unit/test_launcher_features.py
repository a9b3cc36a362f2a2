"""docs/clusters.md: the recipes of jobs are complete. tests/programs/test_document_commands.py parses the commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from hf_fsdp_plugin.launcher.flags import parse_launch_arguments

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8"), re.DOTALL)
JOBS = [yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml" and "PyTorchJob" in text]


def parse(words: list[str]) -> None:
    """Parse a command as its launcher does, which must accept all flags and find the script."""
    if words[0] == "torchrun":
        found = get_args_parser().parse_args(words[1:])
        assert found.training_script == "train.py" or found.training_script_args[-1] == "train.py"
    else:
        assert parse_launch_arguments(words[2:]).script == "train.py"


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
