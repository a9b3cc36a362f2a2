"""The part of tests/unit/backends/test_shared_weights.py that starts processes or computes for seconds."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from hf_fsdp_plugin.backends.loading.shared_weights import Publication, WeightExchange

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")


def test_publisher_that_is_killed_releases_the_key(exchange: WeightExchange) -> None:
    program = "import sys; from hf_fsdp_plugin.backends.loading.shared_weights import exchange\n"
    program += "exchange.join('key'); print('computing', flush=True); sys.stdin.read()"
    arguments: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **arguments) as publisher:
        assert publisher.stdout.readline() == b"computing\n"  # type: ignore[union-attr]
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.append(exchange.join("key")))
        waiting.start()
        publisher.kill()
        waiting.join(30)
    assert isinstance(results[0], Publication)
