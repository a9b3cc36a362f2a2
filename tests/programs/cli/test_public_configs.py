"""Configs of public repositories, from their keys: no key is lost, and each new config gives the same settings."""

from collections import Counter
from dataclasses import replace

from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.tools.convert import conversion
from scripts.bench.measure.public_configs import TITLES, convert, count_keys, load_facts, write_configs

FACTS = load_facts()


def test_collection_is_large_and_has_every_kind():
    kinds = Counter(TITLES[fact["dialect"]] for fact in FACTS)
    assert len(FACTS) >= 200 and set(kinds) == set(TITLES.values())
    assert len({(fact["repository"], fact["path"]) for fact in FACTS}) == len(FACTS)


def test_no_key_of_a_public_config_is_lost(tmp_path):
    for fact, path in list(write_configs(FACTS, tmp_path)):
        result = convert(path)
        assert result.keys["lost"] == 0, fact
        assert result.same is (result.state == "converted"), fact


def test_key_without_outcome_is_counted_as_lost(tmp_path):
    path = tmp_path / "axolotl.yaml"
    path.write_text("base_model: m\nfsdp_version: 2\nfsdp_config: {offload_params: true}\n")
    read = conversion.read(Sources(config=ConfigFile.at(path), environ={}))
    root = read.document.root.value
    assert count_keys(read, root, [])["lost"] == 0
    assert count_keys(replace(read, outcomes=read.outcomes[1:]), root, [])["lost"] == 1
