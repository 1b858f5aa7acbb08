"""How large the house is, beside what each room should take: `make size`.

Lines are all lines of its .py files. The orientation is a design's, no limit; a room that is far
above it has layers, or scope, that nobody has looked at for long. A file that only a neighbor
imports is a part of that neighbor, unless it is a leaf worth reading by itself.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.test_architecture import FILES, SRC, file_graph

ORIENTATION: dict[str, int] = yaml.safe_load("""
{.: 390, facts: 450, config: 3750, run: 1630, launch: 3730, plan: 3000, check: 2220, monitor: 2120,
 agent: 2480, dist: 560, models: 790, data: 3730, strategies: 2520, balance: 610, checkpoint: 1060,
 outer: 4910, track: 400, train: 2650}
""")
_LEAF_LINES = 120


def lines_of(path: Path) -> int:
    """How many lines a file has."""
    return path.read_text(encoding="utf-8").count("\n")


def single_importers() -> list[tuple[str, str]]:
    """Files that one other file of their folder imports, and nobody else; each with that one."""
    importers = defaultdict[str, list[str]](list)
    for name, others in file_graph().items():
        for other in others:
            importers[other].append(name)
    single = [(name, users[0]) for name, users in importers.items() if len(users) == 1]
    return sorted((a, b) for a, b in single if b.rpartition(".")[0] == a.rpartition(".")[0])


def report() -> Iterator[str]:
    """The lines that are printed."""
    lines, files = Counter[str](), Counter[str]()
    for path in FILES:
        parts = path.relative_to(SRC).parts
        for room in (parts[0] if len(parts) > 1 else ".", "all"):
            lines[room] += lines_of(path)
            files[room] += 1
    wanted = {**ORIENTATION, "all": sum(ORIENTATION.values())}
    yield "room         files   lines  orientation  times"
    for room in (*sorted({*lines, *ORIENTATION} - {"all"}), "all"):
        times = f"{lines[room] / wanted[room]:.1f}" if room in wanted else "-"
        yield f"{room:12}{files[room]:6}{lines[room]:8}{wanted.get(room, 0):13}{times:>7}"
    paths = {".".join(path.relative_to(SRC.parent).with_suffix("").parts): path for path in FILES}
    single = [(name, user) for name, user in single_importers() if name in paths]
    small = [(name, user) for name, user in single if lines_of(paths[name]) < _LEAF_LINES]
    found = f"{len(single)} files have a single importer beside them; of these {len(small)} are"
    yield f"{found} below {_LEAF_LINES} lines:"
    for name, user in small:
        file, only = name.removeprefix("isles."), user.rpartition(".")[2]
        yield f"  {file} ({lines_of(paths[name])}) <- {only}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in report())
