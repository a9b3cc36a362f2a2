"""``hf-fsdp schema``: a valid schema that accepts and rejects the same configs as the reader."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from hf_fsdp_plugin.cli.main import main
from hf_fsdp_plugin.tools.schema.verb import schema

ROOT = Path(__file__).parents[3]
ACCELERATE_FILES = [
    *sorted((ROOT / "configs").glob("seed_*.yaml")),
    *sorted((ROOT / "tests/data/good").glob("accelerate_*.yaml")),
]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema())


def test_schema_is_valid_and_printed_as_json(capsys):
    jsonschema.Draft202012Validator.check_schema(schema())
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


@pytest.mark.parametrize("path", ACCELERATE_FILES, ids=lambda path: path.name)
def test_schema_accepts_valid_configs(validator, path):
    validator.validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "config",
    [
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_param": True}},
        {"distributed_type": "FSPD"},
        {"num_proceses": 2},
        {"fsdp_config": {"fsdp_sharding_strategy": 9}},
        {"fsdp_config": {"fsdp_offload_params": "perhaps"}},
        {"fsdp_config": {"fsdp_min_num_params": -1}},
        {"parallelism_config": {"parallelism_config_pp_size": 2}},
        {"fsdp_config": "full_shard"},
    ],
)
def test_schema_rejects_invalid_configs(validator, codes, config):
    assert not validator.is_valid(config)
    assert codes(config)


def test_other_spellings_are_deprecated():
    keys = schema()["$defs"]["fsdp"]["properties"]
    assert "deprecated" not in keys["fsdp_offload_params"]
    assert keys["fsdp_cpu_offload"]["deprecated"]
    assert all(key["description"] for key in keys.values())
