"""The fixtures of tests/unit/cli."""

from tests.unit.cli.conftest import *  # noqa: F403
