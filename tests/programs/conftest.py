"""The fixtures of tests/unit."""

from tests.unit.conftest import *  # noqa: F403
