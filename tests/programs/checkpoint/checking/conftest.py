"""The fixtures of tests/unit/checkpoint/checking."""

from tests.unit.checkpoint.checking.conftest import *  # noqa: F403
