"""The table of strategies against itself, the vocabulary and torch's enum."""

import pytest

from hf_fsdp_plugin.spec.fsdp_spec import ShardingSection
from hf_fsdp_plugin.strategies import STRATEGIES, Strategy, strategy_of
from hf_fsdp_plugin.vocabulary import BY_NAME


def test_every_strategy_is_a_member_of_torchs_enum():
    from torch.distributed.fsdp import ShardingStrategy

    members = {row.torch_name: row.number for row in STRATEGIES.values()}
    assert members == {member.name: member.value for member in ShardingStrategy}


def test_vocabulary_choices_are_the_table():
    choices = BY_NAME["sharding.strategy"].choices
    assert {name: others[0] for name, others in choices.items()} == {
        row.name: str(row.number) for row in STRATEGIES.values()
    }
    assert {name for row in STRATEGIES.values() for name in (row.name, row.torch_name.lower())} == {
        spelling for name, others in choices.items() for spelling in (name, *others) if not spelling.isdigit()
    }
    assert ShardingSection().strategy in STRATEGIES


@pytest.mark.parametrize("row", STRATEGIES.values(), ids=lambda row: row.name)
def test_properties_identify_a_strategy(row: Strategy):
    assert strategy_of(sharded=row.is_sharded, hybrid=row.hybrid, reshard=row.reshards_after_forward) is row


@pytest.mark.parametrize(
    ("name", "properties", "expected"),
    [
        ("full_shard", {"hybrid": True}, "hybrid_shard"),
        ("shard_grad_op", {"hybrid": True}, "hybrid_shard_zero2"),
        ("hybrid_shard_zero2", {"hybrid": False}, "shard_grad_op"),
        ("hybrid_shard", {"reshard": False}, "hybrid_shard_zero2"),
        ("shard_grad_op", {"reshard": True}, "full_shard"),
        ("no_shard", {"reshard": True}, "no_shard"),
        ("no_shard", {"hybrid": True}, "no_shard"),
    ],
)
def test_counterpart_differs_in_one_property(name: str, properties: dict[str, bool], expected: str):
    assert STRATEGIES[name].counterpart(**properties).name == expected
