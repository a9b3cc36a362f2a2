"""``hf-fsdp migrate`` there and back: the spec is the same for shipped, public and generated configs."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.tools.migrate.rewriting import migrate
from tests.unit.generated.cases import Builder, yaml_text
from tests.unit.generated.oracle import Oracle
from tests.unit.generated.settings_document import read_document

ROOT = Path(__file__).parents[3]
CONVERTED_FIRST = ("accelerate_deepspeed.yaml", "deepspeed_zero3_auto.json")
FILES = [
    path
    for path in sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "tests/data/good").iterdir()])
    if path.name not in CONVERTED_FIRST
]
NO_EFFECT = ("params.use_orig", "prefetch.limit_all_gathers")
"""Settings that FSDP2 ignores."""
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", 1, 2, 3, 4, 5)


def values(spec: FsdpSpec) -> dict[str, object]:
    """The settings with an effect under both versions, with the sizes of the mesh that a run has."""
    found = {name: value for name, value, _ in spec.settings() if name not in NO_EFFECT}
    world, mesh = spec.launch.num_processes, (spec.mesh.replicate, spec.mesh.shard)
    if mesh == ("auto", "auto") and world != "auto" and spec.sharding.strategy != "no_shard":
        replicas = spec.launch.num_machines if spec.sharding.strategy.startswith("hybrid") else 1
        mesh = (replicas, world // replicas)
    return found | {"mesh.replicate": mesh[0], "mesh.shard": mesh[1]}


def assert_round_trip(file: ConfigFile) -> None:
    there = migrate(file)
    back = migrate(there.new)
    again = migrate(back.new)
    assert there.new_spec.fsdp.version == 3 - there.old_spec.fsdp.version
    assert values(back.new_spec) == values(there.old_spec)
    assert values(again.new_spec) == values(there.new_spec)


def config_of(text: str, name: str = "c.yaml") -> ConfigFile:
    return ConfigFile(path=Path("/none") / name, shown=name, data=text.encode())


@pytest.mark.parametrize("name", CONVERTED_FIRST)
def test_config_of_another_program_is_converted_first(name):
    with pytest.raises(SpecError, match=r"config of .*Convert it first: hf-fsdp convert.*FSDP-E788"):
        migrate(ConfigFile.at(ROOT / "tests/data/good" / name))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_shipped_and_good_configs_return_to_their_spec(path):
    assert_round_trip(ConfigFile.at(path))


@pytest.mark.parametrize("path", [path for path in FILES if path.name.startswith("fsdp1_")], ids=lambda path: path.name)
def test_comments_and_order_return_unchanged(path):
    there = migrate(ConfigFile.at(path))
    back = migrate(there.new)
    if "fsdp_version" in there.before and "zero2" not in path.name:
        lines = there.before.splitlines()
        assert back.after.splitlines() == [line for line in lines if "fsdp_use_orig_params" not in line]


def random_config(random: Random, builder: Builder) -> dict:
    """A valid config of Accelerate with settings that exist in both versions, or that FSDP2 ignores."""
    section = {}
    for setting in random.sample(builder.oracle.document.section("fsdp"), random.randrange(8)):
        if not setting.name.startswith(("fsdp.", "sharding.", "mesh.", "xla.", "precision.")):
            section[setting.prefix + setting.keys[0]] = builder.accepted(setting)[0]
    version = random.choice((None, 1, 2))
    section |= {} if version is None else {"fsdp_version": version}
    if version == 2 and random.random() < 0.5:
        section["fsdp_reshard_after_forward"] = random.random() < 0.5
    elif random.random() < 0.8:
        section["fsdp_sharding_strategy"] = random.choice(STRATEGIES)
    machines = random.choice((1, 1, 2, 4))
    config = {"distributed_type": "FSDP", "num_machines": machines, "mixed_precision": random.choice(("no", "bf16"))}
    if random.random() < 0.8:
        config["num_processes"] = machines * random.choice((1, 2, 8))
        if random.random() < 0.4:
            replicas = random.choice((1, 2, machines))
            sizes = {"dp_replicate_size": replicas, "dp_shard_size": config["num_processes"] // replicas}
            config["parallelism_config"] = {f"parallelism_config_{key}": size for key, size in sizes.items()}
    items = [*config.items(), ("fsdp_config", section)]
    return dict(random.sample(items, len(items)))


def test_generated_configs_return_to_their_spec():
    builder, num_valid = Builder(Random(), Oracle(read_document())), 0
    for seed in range(60):
        builder.random.seed(seed)
        config = random_config(builder.random, builder)
        is_json = builder.random.random() < 0.3
        text = json.dumps(config, default=list) if is_json else yaml_text(builder.random, config)[0]
        file = config_of(text, f"{seed}.{'json' if is_json else 'yaml'}")
        if assess(Sources(config=file, environ={})).ok:
            num_valid += 1
            assert_round_trip(file)
    assert num_valid > 20
