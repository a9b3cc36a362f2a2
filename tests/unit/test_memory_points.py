"""The points of scripts/bench/measure/memory_error.py."""

from __future__ import annotations

import pytest

from scripts.bench.measure.memory_points import Point, parse_point, points_of

POINTS = points_of("memory_error")


@pytest.mark.parametrize("point", [*POINTS, *points_of("memory_on_device")], ids=str)
def test_text_of_a_point_is_parsed_to_the_same_point(point: Point) -> None:
    assert parse_point(str(point)) == point


def test_points_cover_what_the_table_promises() -> None:
    assert len(set(POINTS)) == len(POINTS) >= 24
    seen = {name: {getattr(point, name) for point in POINTS} for name in ("family", "version", "strategy", "loop")}
    assert seen["family"] == {"llama", "gpt2", "bert", "mixtral", "t5", "whisper", "clip"}
    assert seen["version"] == {1, 2}
    assert seen["strategy"] == {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard"}
    assert seen["loop"] == {"for_loop", "foreach", "fused"}


def test_unknown_key_of_a_point_is_refused() -> None:
    with pytest.raises(ValueError, match="'width' is not one of"):
        parse_point("family=bert,width=3")
