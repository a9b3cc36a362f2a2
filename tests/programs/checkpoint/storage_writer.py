"""Saves two checkpoints to a storage: ``python -m tests.programs.checkpoint.storage_writer URL SEED``.

Prints ``begun NAME``, ``complete NAME`` and ``failed NAME``.
"""

from __future__ import annotations

import random
import secrets
import sys
import tempfile
from pathlib import Path

from hf_fsdp_plugin.checkpoint.storage import PARTS, Storage
from hf_fsdp_plugin.problems import CheckpointError
from tests.support.saved import write_manifest

LIMIT = 2


def save(storage: Storage, name: str, created: int, draw: random.Random) -> None:
    """Save as two ranks do: files and record of each, then the manifest and the marker."""
    files = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for rank in range(2):
            for number in range(2):
                path = root / f"rank{rank}" / f"{number}.bin"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(draw.randbytes(draw.randrange(1, 200_000)))
            storage.upload(root, [f"rank{rank}/0.bin", f"rank{rank}/1.bin"], f"{name}/{files}", lambda: False)
            storage.write(f"{name}/{files}/{PARTS}/rank{rank}.record", b"record")
        write_manifest(root)
        storage.upload(root, ["fsdp_manifest.json"], f"{name}/{files}", lambda: False)
    storage.commit(name, {"files": files, "created": f"{created:09d}"})


def main() -> None:
    url, seed = sys.argv[1], int(sys.argv[2])
    draw = random.Random(seed)
    storage = Storage(url)
    for number in range(2):
        name = f"checkpoint-{draw.randrange(1, 5)}"  # some are saved again
        print("begun", name, flush=True)
        try:
            save(storage, name, seed * 10 + number, draw)
        except CheckpointError as error:
            print("failed", name, error.problems[0].code, flush=True)
            continue
        print("complete", name, flush=True)
        try:
            storage.remove_uncommitted()
            for old in list(storage.checkpoints())[:-LIMIT]:
                print("removing", old, flush=True)
                storage.remove(old)
        except CheckpointError as error:
            print("kept", error.problems[0].code, flush=True)


if __name__ == "__main__":
    main()
