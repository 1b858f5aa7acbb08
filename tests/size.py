"""How large the house is, beside what each room should take: `make size`.

Lines are all lines of its .py files. The orientation is a design's, no limit; a room that is far
above it has layers, or scope, that nobody has looked at for long. A file that only a neighbour
imports is a part of that neighbour, unless it is a leaf worth reading by itself.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.test_architecture import FILES, SRC, file_graph

ORIENTATION = {
    ".": 390,
    "facts": 450,
    "config": 3_750,
    "run": 1_630,
    "launch": 3_730,
    "plan": 3_000,
    "check": 2_220,
    "monitor": 2_120,
    "agent": 2_480,
    "dist": 560,
    "models": 790,
    "data": 3_730,
    "strategies": 2_520,
    "balance": 610,
    "checkpoint": 1_060,
    "outer": 4_910,
    "track": 400,
    "train": 2_650,
}
_LEAF_LINES = 120


def lines_of(path: Path) -> int:
    """How many lines a file has."""
    return path.read_text(encoding="utf-8").count("\n")


def single_importers() -> list[tuple[str, str]]:
    """Files that one other file of their folder imports, and nobody else; each with that one."""
    importers: dict[str, list[str]] = {}
    for name, others in file_graph().items():
        for other in others:
            importers.setdefault(other, []).append(name)
    return sorted(
        (name, users[0])
        for name, users in importers.items()
        if len(users) == 1 and users[0].rpartition(".")[0] == name.rpartition(".")[0]
    )


def main() -> None:
    """Print it."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in FILES:
        parts = path.relative_to(SRC).parts
        for room in (parts[0] if len(parts) > 1 else ".", "all"):
            lines[room] += lines_of(path)
            files[room] += 1
    wanted = {**ORIENTATION, "all": sum(ORIENTATION.values())}
    _print_line("room         files   lines  orientation  times")
    for room in (*sorted({*lines, *ORIENTATION} - {"all"}), "all"):
        times = f"{lines[room] / wanted[room]:.1f}" if room in wanted else "-"
        _print_line(f"{room:12}{files[room]:6}{lines[room]:8}{wanted.get(room, 0):13}{times:>7}")
    paths = {".".join(path.relative_to(SRC.parent).with_suffix("").parts): path for path in FILES}
    single = [(name, user) for name, user in single_importers() if name in paths]
    small = [(a, b) for a, b in single if lines_of(paths[a]) < _LEAF_LINES]
    _print_line(
        f"{len(single)} files have a single importer beside them; of these {len(small)} are below "
        f"{_LEAF_LINES} lines:"
    )
    for name, user in small:
        file, only = name.removeprefix("isles."), user.rpartition(".")[2]
        _print_line(f"  {file} ({lines_of(paths[name])}) <- {only}")


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
