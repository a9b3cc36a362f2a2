"""Prints a hang, and writes everything that is known of the ranks to a JSON file."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.hangs.describe import describe_difference
from hf_fsdp_plugin.hangs.hang_watch import Hang
from hf_fsdp_plugin.hangs.places import RanksAt, format_stack, merged
from hf_fsdp_plugin.hangs.rank_files import write_atomically
from hf_fsdp_plugin.text import plural
from hf_fsdp_plugin.version import SCHEMA_VERSION

_MAX_STACKS: Final = 2
_MAX_PLACES: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundHang:
    """A hang that ends the ranks of this machine, in ``RankFiles.hang``.

    Attributes:
        text: the whole output.
        message: the same in one line.
        code: of the problem.
        same_as: identifies the hang in another attempt.
        elsewhere: whether a rank of another machine has found it.
    """

    text: str
    message: str
    code: str
    same_as: str
    elsewhere: bool = False

    @classmethod
    def read(cls, path: Path) -> FoundHang | None:
        """Return the hang that a file describes; ``None`` if there is no such file."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def claim(self, path: Path) -> bool:
        """Write the file. Returns ``False`` if another rank has written it before."""
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            part.write_text(json.dumps(asdict(self)))
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError:  # such as a full disk: the other ranks of the machine end later
            return True
        finally:
            part.unlink(missing_ok=True)
        return True


def found_hang(hang: Hang, dump: Path | None) -> FoundHang:
    """Return what the ranks of this machine need to know of a hang."""
    waiting = hang.diagnosis.waiting
    return FoundHang(
        text=format_hang(hang, dump),
        message=f"hang: {hang.problem.message} [{hang.problem.code}]",
        code=hang.problem.code,
        same_as=f"{hang.problem.code} in {waiting.call.operation} of {waiting.call.unit}",
    )


def format_hang(hang: Hang, dump: Path | None) -> str:
    """Return the message, the stacks of ranks that cause the hang, the places of the others, and the file."""
    causes = hang.diagnosis.ranks
    lines = [f"hf-fsdp: hang: {hang.problem}"]
    if hang.diagnosis.kind != "different" and hang.diagnosis.difference is not None:
        lines.append(f"hf-fsdp: before, {describe_difference(hang.diagnosis.difference)}")
    for rank in [rank for rank in causes if hang.stacks.get(rank)][:_MAX_STACKS]:
        lines += [f"hf-fsdp: stack of rank {rank}:", *format_stack(hang.stacks[rank])]
    others = [] if hang.diagnosis.kind == "late" else list(causes)
    others += [rank for rank in sorted(hang.ranks) if rank not in causes]
    places = merged(RanksAt((rank,), "", hang.ranks[rank].place) for rank in others if hang.ranks[rank].place)
    lines += [f"hf-fsdp: {place}" for place in places[:_MAX_PLACES]]
    if len(places) > _MAX_PLACES:
        lines.append(f"hf-fsdp: and {plural(len(places) - _MAX_PLACES, 'more place')}")
    if dump is not None:
        lines.append(f"hf-fsdp: the collectives and stacks of the ranks are in {dump}")
    lines.append("hf-fsdp: all ranks are being ended")
    return "\n".join(lines)


def write_hang(hang: Hang, folder: Path | None, *, limit: float) -> Path | None:
    """Write the dump, and return its path; ``None`` if no folder is writable.

    Args:
        folder: where the user wants logs. By default the working directory, then the folder of temporary files.
    """
    content = json.dumps(_content(hang, limit), indent=1)
    name = f"fsdp_hang_{time.strftime('%Y%m%d_%H%M%S')}.json"
    write_atomically((folder or Path()) / name, content)
    if ((folder or Path()) / name).exists():
        return (folder or Path()) / name
    with suppress(OSError):  # a folder of this user only, because others could have put a link at a name that they know
        path = Path(tempfile.mkdtemp(prefix="fsdp_hang_")) / name
        write_atomically(path, content)
        return path if path.exists() else None
    return None


def _content(hang: Hang, limit: float) -> dict[str, Any]:
    diagnosis = hang.diagnosis
    waiting = diagnosis.waiting
    difference = diagnosis.difference
    return {
        "schema": SCHEMA_VERSION,
        "time": time.time(),
        "limit_seconds": limit,
        "code": hang.problem.code,
        "message": hang.problem.message,
        "kind": diagnosis.kind,
        "ranks": list(diagnosis.ranks),
        "waiting": [
            {
                "group": each.group,
                "number": each.number,
                "operation": each.call.operation,
                "unit": each.call.unit,
                "num_elements": each.call.num_elements,
                "dtype": each.call.dtype,
                "ranks": list(each.ranks),
                "seconds": each.seconds,
            }
            for each in (waiting, *diagnosis.others)
        ],
        "difference": difference
        and {
            "group": difference.group,
            "number": difference.number,
            "calls": [{"call": str(call), "unit": call.unit, "ranks": list(ranks)} for call, ranks in difference.calls],
            "skipped": {
                "ranks": list(difference.skipped[0]),
                "calls": [{"call": str(call), "unit": call.unit} for call in difference.skipped[1]],
            },
            "unusual_ranks": list(difference.unusual),
            "ranks_with_more_forwards": list(difference.more_forwards[0]),
        },
        "calls_of_ranks": [rank.to_json() for _, rank in sorted(hang.ranks.items())],
        "stacks": {str(rank): _frames(stack) for rank, stack in hang.stacks.items()},
    }


def _frames(stack: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"file": frame.file, "line": frame.line, "name": frame.name} for frame in stack]
