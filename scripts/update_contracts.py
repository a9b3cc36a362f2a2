"""Adds the source hashes of the replaced functions of the installed libraries to the tested ones.

    python -m scripts.update_contracts           after the tests have passed with these versions
    python -m scripts.update_contracts --check   only compare: exit code 1 if a replaced function has an unknown source

`hf-fsdp doctor` reports a replaced function whose source is in none of the tested versions.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import hf_fsdp_plugin
from hf_fsdp_plugin.tools.doctor.contract_probe import hook_rows, source_hash, tested_hashes

FILE = Path(hf_fsdp_plugin.__file__).parent / "tools" / "doctor" / "tested_sources.json"


def updated(known: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the hashes of all rows, with those of the installed libraries. Functions without a row are dropped."""
    found = {}
    for hook in hook_rows():
        module, _, path = hook.target.partition(":")
        current = source_hash(module, path)
        hashes = {*known.get(hook.target, []), *([current] if current is not None else [])}
        if hashes:
            found[hook.target] = sorted(hashes)
    return dict(sorted(found.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    known = tested_hashes()
    new = updated(known)
    changed = [target for target, hashes in new.items() if hashes != known.get(target)]
    for target in changed:
        print(f"{'unknown source' if check else 'added'}: {target}")
    if not check:
        FILE.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
