"""Forwards outside of training steps, weights that change after them, and errors that a script catches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo import cases_between_steps as cases
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config

VERSIONS = pytest.mark.parametrize("version", [1, 2])
STRATEGIES = pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
PRECISIONS = pytest.mark.parametrize("precision", ["no", "bf16"])


def config_of(version: int, strategy: str = "full_shard", precision: str = "no") -> dict[str, Any]:
    return {**parallel_config(strategy, version, 2), "mixed_precision": precision}


@VERSIONS
@STRATEGIES
@PRECISIONS
@pytest.mark.parametrize("change", cases.CHANGES)
def test_weights_changed_after_evaluation_are_used(
    two_ranks: Ranks, version: int, strategy: str, precision: str, change: str
) -> None:
    config = config_of(version, strategy, precision)
    expected = two_ranks.run(cases.losses_with, config, "none", change)
    assert two_ranks.run(cases.losses_with, config, "no_grad", change) == expected


@VERSIONS
@STRATEGIES
@PRECISIONS
@pytest.mark.parametrize("change", [None, "optimizer"])
def test_forward_without_backward_does_not_change_training(
    two_ranks: Ranks, version: int, strategy: str, precision: str, change: str | None
) -> None:
    """Under FSDP1 in bf16, gradients would not be reduced in the next step."""
    config = config_of(version, strategy, precision)
    expected = two_ranks.run(cases.losses_with, config, "none", change)
    for forward in ("logged", "eval"):
        assert two_ranks.run(cases.losses_with, config, forward, change) == expected


@VERSIONS
def test_change_of_gathered_copies_is_refused(two_ranks: Ranks, version: int) -> None:
    case = (cases.losses_with, config_of(version, "shard_grad_op"), "logged", "parameters")
    assert two_ranks.run(cases.refused, *case) == [["FSDP-E317"]] * 2


@VERSIONS
@pytest.mark.parametrize("where", ["forward", "submodule", "backward"])
@PRECISIONS
def test_training_continues_after_caught_error(two_ranks: Ranks, version: int, where: str, precision: str) -> None:
    config = config_of(version, precision=precision)
    expected = two_ranks.run(cases.losses_around_failure, config, None)
    assert two_ranks.run(cases.losses_around_failure, config, where) == expected


@VERSIONS
@pytest.mark.parametrize("then", ["save", "accumulated"])
def test_caught_error_of_backward_is_followed_by(two_ranks: Ranks, version: int, then: str) -> None:
    config = config_of(version)
    expected = two_ranks.run(cases.losses_around_failure, config, None, then)
    assert two_ranks.run(cases.losses_around_failure, config, "backward", then) == expected


def test_failed_backward_is_refused_with_older_torch(two_ranks: Ranks) -> None:
    case = (cases.losses_after_failure_with_older_torch, config_of(2))
    assert two_ranks.run(cases.refused, *case) == [["FSDP-E318"]] * 2


@pytest.mark.parametrize(
    ("version", "strategy", "counts"),
    [
        (1, "full_shard", (7, 4, 7, 10)),
        (1, "shard_grad_op", (4, 4, 4, 4)),
        (2, "full_shard", (9, 5, 10, 14)),
        (2, "shard_grad_op", (5, 5, 6, 6)),
    ],
)
def test_steps_have_no_added_all_gather(
    two_ranks: Ranks, version: int, strategy: str, counts: tuple[int, int, int, int]
) -> None:
    """The units are the layers and one or two others. A forward in a step uses what the step has gathered.

    FSDP2 prefetches one unit too many in the first backward after a forward without gradients.
    """
    step, evaluation, after, both = counts
    expected = {"step": step, "evaluation": evaluation, "next evaluation": evaluation}
    for found in two_ranks.run(cases.count_all_gathers, config_of(version, strategy)):
        assert found == {**expected, "step after it": after, "step with a forward": both}


@pytest.mark.parametrize(("version", "strategy"), [(1, "full_shard"), (2, "full_shard"), (2, "shard_grad_op")])
@pytest.mark.parametrize("clip", cases.CLIPS)
def test_forward_before_clipping_changes_nothing(two_ranks: Ranks, version: int, strategy: str, clip: str) -> None:
    """After a forward with gradients, gathered parameters of FSDP2 are copies, which have no gradients."""
    config = config_of(version, strategy)
    expected = two_ranks.run(cases.losses_with_forward_before_clip, config, "none", clip)
    assert two_ranks.run(cases.losses_with_forward_before_clip, config, "logged", clip) == expected


@STRATEGIES
def test_optimizer_made_after_forward_gets_the_shards(two_ranks: Ranks, strategy: str) -> None:
    """Under FSDP1 and ``SHARD_GRAD_OP``, torch refuses the parameters then."""
    case = (cases.losses_with_forward_before_clip, config_of(2, strategy), "none", "norm")
    assert two_ranks.run(*case, "logged") == two_ranks.run(*case)


@VERSIONS
@pytest.mark.parametrize("forward", ["no_grad", "logged"])
def test_forward_before_step_of_offloaded_shards(two_accelerator_ranks: Ranks, version: int, forward: str) -> None:
    """The step waits until the device has read the shards: the device reports memory that changes during a copy."""
    config = parallel_config("full_shard", version, 2, use_cpu=False, fsdp_offload_params=True)
    expected = two_accelerator_ranks.run(cases.losses_with_forward_before_step, config, "none")
    assert two_accelerator_ranks.run(cases.losses_with_forward_before_step, config, forward) == expected


@VERSIONS
def test_generate_with_offloaded_shards(two_accelerator_ranks: Ranks, version: int) -> None:
    config = parallel_config("full_shard", version, 2, use_cpu=False, fsdp_offload_params=True)
    for found, expected in two_accelerator_ranks.run(cases.generate_on_device, config):
        assert found == expected


@VERSIONS
def test_direct_calls_of_forward_train_as_in_one_process(two_ranks: Ranks, version: int) -> None:
    for found, expected in two_ranks.run(cases.train_with_direct_calls, config_of(version)):
        assert found == pytest.approx(expected, rel=1e-6)


@VERSIONS
@pytest.mark.parametrize(
    ("error", "codes"), [("inside a unit", ["FSDP-E642"]), ("shape", []), ("shape in a layer", [])]
)
def test_errors_of_shards_name_their_cause(two_ranks: Ranks, version: int, error: str, codes: list[str]) -> None:
    for printed in two_ranks.run(cases.codes_of_error, config_of(version), error):
        assert printed == codes
