"""How large the house is, beside what each room should take: `make size`.

Lines are all lines of its .py files. The orientation is a design's, no limit; a room that is far
above it has layers, or scope, that nobody has looked at for long. A file that only a neighbour
imports is a part of that neighbour, unless it is a leaf worth reading by itself.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tests.test_architecture import FILES, SRC, file_graph

ORIENTATION = {
    ".": 390,
    "facts": 450,
    "config": 3_750,
    "run": 1_630,
    "launch": 3_730,
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


def _path_of(name: str) -> Path:
    path = SRC.parent / Path(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def single_importers() -> list[tuple[str, str]]:
    """Files that one other file of their folder imports, and nobody else; each with that one."""
    graph = file_graph()
    importers: dict[str, list[str]] = {}
    for name, others in graph.items():
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
        room = parts[0] if len(parts) > 1 else "."
        lines[room] += lines_of(path)
        files[room] += 1
    table = Table("room", "files", "lines", "orientation", "times", box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    for room in sorted({*lines, *ORIENTATION}):
        wanted = ORIENTATION.get(room, 0)
        times = f"{lines[room] / wanted:.1f}" if wanted else "-"
        table.add_row(room, str(files[room]), str(lines[room]), str(wanted), times)
    total, wanted = lines.total(), sum(ORIENTATION.values())
    table.add_section()
    table.add_row("all", str(files.total()), str(total), str(wanted), f"{total / wanted:.1f}")
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    single = single_importers()
    paths = {name: _path_of(name) for name, _ in single}
    small = [(a, b) for a, b in single if lines_of(paths[a]) < _LEAF_LINES]
    console.print(
        f"{len(single)} files have a single importer beside them; of these {len(small)} are below "
        f"{_LEAF_LINES} lines:"
    )
    for name, user in small:
        file, only = name.removeprefix("isles."), user.rpartition(".")[2]
        console.print(f"  {file} ({lines_of(paths[name])}) <- {only}")


if __name__ == "__main__":
    main()
