"""Counts the package's lines of code, without docstrings, comments and blank lines, and its files.

python scripts/size.py              # a table of the packages
python scripts/size.py --files      # every file, the largest first
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parents[1] / "hf_fsdp_plugin"
TOOLS: Final = "tools"
LIMITS: Final = {"runtime": 20_000, "tools": 10_500}
"""Lines of code: the runtime is what a training process imports and what starts it, the tools are all else."""
_NOT_CODE: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def code_lines(source: str) -> int:
    """Return the number of lines that contain code. A docstring is none, any other string is."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def count() -> dict[Path, int]:
    """Return the lines of code of each file of the package."""
    return {path: code_lines(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print every file")
    arguments = parser.parse_args()
    counts = count()
    if arguments.files:
        for path, lines in sorted(counts.items(), key=lambda item: -item[1]):
            print(f"{lines:6,}  {path.relative_to(PACKAGE.parent)}")
    packages: dict[str, list[int]] = defaultdict(list)
    for path, lines in counts.items():
        parts = path.relative_to(PACKAGE).parts
        packages[parts[0] if len(parts) > 1 else "(modules at the top)"].append(lines)
    print("| package | lines of code | files | median |\n|---|---|---|---|")
    for name, sizes in sorted(packages.items(), key=lambda item: -sum(item[1])):
        print(f"| {name} | {sum(sizes):,} | {len(sizes)} | {statistics.median(sizes):.0f} |")
    sizes = list(counts.values())
    print(f"| all | {sum(sizes):,} | {len(sizes)} | {statistics.median(sizes):.0f} |")
    tools = sum(packages[TOOLS])
    for part, lines in (("runtime", sum(sizes) - tools), ("tools", tools)):
        over = lines - LIMITS[part]
        print(f"{part}: {lines:,} lines of code, {abs(over):,} {'more' if over > 0 else 'fewer'} than {LIMITS[part]:,}")


if __name__ == "__main__":
    main()
