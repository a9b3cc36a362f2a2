"""The fixtures of tests/unit/backends."""

from tests.unit.backends.conftest import *  # noqa: F403
