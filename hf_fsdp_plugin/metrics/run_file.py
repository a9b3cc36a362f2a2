"""The file of a run: one JSON object a line, for programs that show the run while it goes on. See docs/metrics.md."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.messages import print_once

RUN_FILE: Final = "fsdp_run.jsonl"
VERSION: Final = 1
NOT_FINITE: Final = ("nan", "inf", "-inf")


class RunFile:
    """Appends events to a file. Does nothing after an error, such as of a full disk, which is printed once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RUN_FILE
        self._is_broken = False

    def write(self, event: str, **values: Any) -> None:
        """Append an event. Other values than numbers, texts and lists of them are left out."""
        if self._is_broken:
            return
        line = json.dumps({"time": time.time(), "event": event, **values})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            self._is_broken = True
            print_once(f"cannot write {self.path}: {error.strerror or error}. The run itself is not affected.")


def numbers_in(logs: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the numbers of a log. What JSON has no number for is a text: one of :data:`NOT_FINITE`."""
    found: dict[str, float | str] = {}
    for name, value in logs.items():
        value = value.item() if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1 else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[str(name)] = value if math.isfinite(value) else str(value)
    return found
