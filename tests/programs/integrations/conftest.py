"""The fixtures of tests/unit/integrations."""

from tests.unit.integrations.conftest import *  # noqa: F403
