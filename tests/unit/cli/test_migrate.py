"""``hf-fsdp migrate``: what it writes, the list of changes, and refused configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

from hf_fsdp_plugin import load_spec
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.tools.migrate.rewriting import behavior_changes, migrate

HEAD = "# ours\ndistributed_type: FSDP\nnum_machines: 2   # nodes\nnum_processes: 16\n"
FSDP1 = HEAD + (
    "fsdp_config:  # all of it\n"
    "    fsdp_sharding_strategy:   HYBRID_SHARD   # per node\n"
    "    fsdp_use_orig_params: false\n"
    "    # the units\n"
    "    fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
)
FSDP2 = HEAD + (
    "fsdp_config:  # all of it\n"
    "    fsdp_reshard_after_forward: true   # per node\n"
    "    # the units\n"
    "    fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "    fsdp_version: 2\n"
    "parallelism_config:\n"
    "  parallelism_config_dp_replicate_size: 2\n"
    "  parallelism_config_dp_shard_size: 8\n"
)


def config_of(text: str, name: str = "c.yaml") -> ConfigFile:
    return ConfigFile(path=ConfigFile.at(name).path, shown=name, data=text.encode())


def section(text: str, version: int | None = None) -> str:
    lines = [f"fsdp_version: {version}"] if version else []
    return HEAD + "fsdp_config:\n" + "".join(f"  {line}\n" for line in [*lines, *text.split("; ")])


def code_of(text: str, to: int | None = None) -> str:
    with pytest.raises(SpecError) as caught:
        migrate(config_of(text), to)
    return caught.value.problems[0].code


def changes_of(text: str) -> dict[str, tuple[str, str]]:
    migration = migrate(config_of(text))
    changes = behavior_changes(migration.old_spec, migration.new_spec)
    assert all(change.verify and change.was != change.becomes for change in changes)
    return {change.what: (change.was, change.becomes) for change in changes}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(FSDP1)
    return tmp_path


def test_hybrid_strategy_gets_the_mesh_of_the_machines():
    assert migrate(config_of(FSDP1)).after == FSDP2


def test_stock_accelerate_reads_the_result(tmp_path):
    (tmp_path / "c.yaml").write_text(migrate(config_of(FSDP1)).after)
    config = load_config_from_file(str(tmp_path / "c.yaml"))
    sizes = {key.removeprefix("parallelism_config_"): size for key, size in config.parallelism_config.items()}
    assert ParallelismConfig(**sizes).total_size == config.num_processes == 16


def test_way_back_removes_the_mesh():
    back = migrate(config_of(FSDP2))
    assert back.new_spec.mesh.shard == "auto" and back.new_spec.sharding.strategy == "hybrid_shard"
    assert "# per node" in back.after and "# the units" in back.after
    assert migrate(back.new).after == FSDP2


def test_stock_converter_loses_what_is_kept():
    stock = convert_config_to_fsdp2(yaml.safe_load(FSDP1))
    assert "parallelism_config" not in stock and "fsdp_use_orig_params" not in stock["fsdp_config"]
    ours = yaml.safe_load(migrate(config_of(FSDP1)).after)
    assert ours.pop("parallelism_config") and ours == {**stock, "fsdp_config": ours["fsdp_config"]}
    unsharded = section("fsdp_sharding_strategy: NO_SHARD")
    assert convert_config_to_fsdp2(yaml.safe_load(unsharded))["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert migrate(config_of(unsharded)).new_spec.sharding.strategy == "no_shard"


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "1", "2", "5"])
def test_fsdp2_gets_a_bool_that_stock_accelerate_reads(name):
    fsdp_config = yaml.safe_load(migrate(config_of(section(f"fsdp_sharding_strategy: {name}"))).after)["fsdp_config"]
    assert fsdp_config == {"fsdp_reshard_after_forward": name in ("FULL_SHARD", "1"), "fsdp_version": 2}


def test_mesh_of_the_user_is_kept_in_both_directions():
    sizes = "parallelism_config:\n  parallelism_config_dp_replicate_size: 4\n  parallelism_config_dp_shard_size: 4\n"
    text = section("fsdp_sharding_strategy: HYBRID_SHARD_ZERO2") + sizes
    there = migrate(config_of(text))
    assert sizes in there.after and "fsdp_reshard_after_forward: false" in there.after
    assert migrate(there.new).after == text.replace("ZERO2\n", "ZERO2\n  fsdp_version: 1\n")


def test_unknown_number_of_ranks_keeps_the_name():
    text = section("fsdp_sharding_strategy: HYBRID_SHARD").replace("num_processes: 16\n", "")
    assert "fsdp_sharding_strategy: HYBRID_SHARD" in migrate(config_of(text)).after


def test_section_of_fsdp2_without_effect_is_removed():
    text = section("fsdp_reshard_after_forward: true", 2) + "parallelism_config:\n  parallelism_config_tp_size: 1\n"
    there = migrate(config_of(text))
    assert "parallelism_config" not in yaml.safe_load(there.after)
    assert there.kept == ("parallelism_config_tp_size=1 is removed",)


def test_json_is_migrated_as_yaml():
    there = migrate(config_of(json.dumps(yaml.safe_load(FSDP1)), "c.json"))
    tree = json.loads(there.after)
    assert "fsdp_use_orig_params" not in tree["fsdp_config"]
    assert tree["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    back = json.loads(migrate(there.new).after)
    of_fsdp1 = yaml.safe_load(FSDP1)["fsdp_config"]
    del of_fsdp1["fsdp_use_orig_params"]
    assert back.pop("fsdp_config") == {**of_fsdp1, "fsdp_version": 1}
    assert back == {"distributed_type": "FSDP", "num_machines": 2, "num_processes": 16}


def test_line_ends_and_key_style_are_kept():
    text = section("sharding_strategy: 2; use_orig_params: true").replace("\n", "\r\n")
    after = migrate(config_of(text)).after
    assert after.count("\r\n") == after.count("\n")
    assert yaml.safe_load(after)["fsdp_config"] == {"reshard_after_forward": False, "version": 2}


@pytest.mark.parametrize(
    ("text", "to", "code"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", None, "FSDP-E788"),
        (section("fsdp_offload_params: true", 2), 2, "FSDP-E789"),
        (section("fsdp_offload_params: true"), 1, "FSDP-E789"),
        ("base_model: x\nfsdp: full_shard\nfsdp_config: none.json\n", 1, "FSDP-E001"),
        (section("fsdp_reshard_after_forward: true"), None, "FSDP-E795"),
        (section("fsdp_sharding_strategy: FULL_SHARD; fsdp_reshard_after_forward: 'yes'", 1), 2, "FSDP-E795"),
        (section("fsdp_fp32_modules: norm", 2), 1, "FSDP-E796"),
        (section("fsdp_offload_param: true"), None, "FSDP-E020"),
        (HEAD + "deepspeed_config: {zero_stage: 3}\nfsdp_config: {fsdp_version: 1}\n", None, "FSDP-E120"),
    ],
)
def test_config_that_cannot_be_migrated_is_refused(text, to, code):
    assert code_of(text, to) == code


def test_accepted_neighbors_of_refused_configs():
    for text in (
        section("fsdp_reshard_after_forward: FULL_SHARD", 1),
        section("fsdp_reshard_after_forward: 1"),
        section("fsdp_sharding_strategy: FULL_SHARD; fsdp_reshard_after_forward: true", 2),
    ):
        assert migrate(config_of(text)).new_spec.sharding.strategy == "full_shard"


@pytest.mark.parametrize("axis", ["cp", "tp", "ep"])
def test_axes_of_fsdp2_have_no_counterpart(axis):
    text = (
        section("fsdp_reshard_after_forward: true", 2) + f"parallelism_config:\n  parallelism_config_{axis}_size: 2\n"
    )
    with pytest.raises(SpecError) as caught:
        migrate(config_of(text))
    (problem,) = caught.value.problems
    assert (problem.code, problem.origin.line) == ("FSDP-E796", 9)


def test_settings_in_another_file_cannot_be_rewritten(folder):
    (folder / "fsdp.json").write_text('{"fsdp_offload_params": true}')
    assert code_of("base_model: x\nfsdp: full_shard\nfsdp_config: fsdp.json\n") == "FSDP-E792"


def test_changes_depend_on_the_settings():
    plain = section("fsdp_auto_wrap_policy: NO_WRAP; fsdp_sharding_strategy: SHARD_GRAD_OP")
    few = changes_of(plain + "  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n")
    assert [what.partition(",")[0].partition(" (")[0] for what in few] == [
        "parameters", "norm for clipping", "pieces in checkpoints", "optimizers that read whole parameters"
    ]  # fmt: skip
    more = changes_of(
        "mixed_precision: bf16\n"
        + section(
            "fsdp_auto_wrap_policy: SIZE_BASED_WRAP; fsdp_min_num_params: 1e8; fsdp_offload_params: true; "
            "fsdp_use_orig_params: false; fsdp_limit_all_gathers: false"
        )
    )
    assert more["gradients of several micro-batches before the reduction"] == ("summed in bf16", "summed in fp32")
    assert more["fsdp_backward_prefetch"][0].startswith("none") and more["fsdp_backward_prefetch"][1].startswith("pre")
    assert more["number of all-gathers in flight"] == ("not limited", "limited")
    assert {"boundaries of units", "boundaries of units by size", "parameters of the optimizer"} < set(more)
    assert {"offloaded gradients", "default format of checkpoints", "input embedding after its forward"} < set(more)
    unsharded = changes_of(section("fsdp_sharding_strategy: NO_SHARD"))
    assert "replicas without shards" in unsharded and not any("clipping" in what for what in unsharded)


def test_changes_of_the_way_back_are_those_of_the_way_there():
    there = migrate(config_of(FSDP1.replace("    fsdp_use_orig_params: false\n", "")))
    back = migrate(there.new)
    pairs = [behavior_changes(one.old_spec, one.new_spec) for one in (there, back)]
    texts = [
        {change.what: (change.was, change.becomes) for change in changes if not change.what.startswith("fsdp_")}
        for changes in pairs
    ]
    assert texts[1] == {what: (after, before) for what, (before, after) in texts[0].items()}


def test_config_goes_to_stdout_and_changes_to_stderr(hf_fsdp, folder):
    code, out, err = hf_fsdp("migrate", "c.yaml")
    assert (code, out) == (0, FSDP2)
    assert "fsdp_use_orig_params=false is removed" in err and "verify: " in err
    code, out, _ = hf_fsdp("migrate", "c.yaml", "--diff")
    assert out.startswith("--- c.yaml\n+++ c.yaml\n") and "\n+  parallelism_config_dp_shard_size: 8\n" in out
    assert (folder / "c.yaml").read_text() == FSDP1


def test_files_are_written_only_when_told(hf_fsdp, folder):
    assert hf_fsdp("migrate", "c.yaml", "--out", "new.yaml")[:2] == (0, "")
    assert (folder / "new.yaml").read_text() == FSDP2
    (folder / "new.yaml").write_text("other")
    code, _, err = hf_fsdp("migrate", "c.yaml", "--out", "new.yaml")
    assert code == 1 and "FSDP-E761" in err and (folder / "new.yaml").read_text() == "other"
    assert hf_fsdp("migrate", "c.yaml", "--out", "new.yaml", "--force")[0] == 0
    assert (folder / "new.yaml").read_text() == FSDP2
    assert hf_fsdp("migrate", "c.yaml", "--out", "none/new.yaml")[0] == 1
    assert hf_fsdp("migrate", "c.yaml", "--in-place")[0] == 0
    assert (folder / "c.yaml").read_text() == FSDP2 and sorted(p.name for p in folder.iterdir()) == [
        "c.yaml",
        "new.yaml",
    ]


@pytest.mark.parametrize(
    "argv",
    ["c.yaml --in-place --out x", "- --in-place", "c.yaml --force"],
)
def test_wrong_usage_exits_2(hf_fsdp, folder, argv):
    assert hf_fsdp("migrate", *argv.split())[:2] == (2, "")
    assert (folder / "c.yaml").read_text() == FSDP1


def test_missing_and_broken_configs(hf_fsdp, folder):
    assert hf_fsdp("migrate", "none.yaml")[0] == 2
    (folder / "broken.yaml").write_text("a: [")
    code, out, _ = hf_fsdp("migrate", "broken.yaml", "--json", "--in-place")
    assert code == 1 and json.loads(out)["ok"] is False
    assert (folder / "broken.yaml").read_text() == "a: ["


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "data/bad").iterdir()), ids=lambda path: path.name)
def test_bad_file_is_refused_and_stays(path, hf_fsdp, tmp_path):
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    code, out, err = hf_fsdp("migrate", copy, "--in-place")
    assert (code, out) == (1, "") and "[FSDP-E" in err
    assert copy.read_bytes() == path.read_bytes() and list(tmp_path.iterdir()) == [copy]


def test_json_has_text_changes_and_limits(hf_fsdp, folder):
    (folder / "c.yaml").write_text(section("fsdp_sharding_strategy: NO_SHARD; fsdp_forward_prefetch: true"))
    code, out, err = hf_fsdp("migrate", "c.yaml", "--json")
    tree = json.loads(out)
    assert (code, err, tree["from"], tree["to"], tree["path"]) == (0, "", 1, 2, None)
    assert load_spec(yaml.safe_load(tree["text"])).sharding.strategy == "no_shard"
    assert len(tree["stock_limits"]) == 2 and tree["changes"]


def test_migration_imports_no_torch(imports_no_heavy_library, folder):
    imports_no_heavy_library("migrate", "c.yaml", "--out", "new.yaml")
