"""Real text that every CPython carries: no network, no download."""

from __future__ import annotations

import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.data.sources.rows import PLAIN, Columns, Row, Rows

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


@dataclass(frozen=True, slots=True)
class PythonDocs:
    """`python-docs`: the topics of Python's language reference, as `help()` shows them."""

    def describe(self) -> str:
        """The name for messages."""
        return "python-docs"

    def identity(self) -> dict[str, Any]:
        """The Python version, on which the text depends."""
        return {"builtin": "python-docs", "python": _python()}

    def rows(self, columns: Columns) -> Rows:
        """One topic a row, by name."""
        from pydoc_data.topics import topics

        columns.check((PLAIN,), self.describe())
        for name in sorted(topics):
            yield Row(f"python-docs {name}", {PLAIN: topics[name]})


@dataclass(frozen=True, slots=True)
class PythonStdlib:
    """`python-stdlib`: the sources of Python's standard library, without its tests."""

    def describe(self) -> str:
        """The name for messages."""
        return "python-stdlib"

    def identity(self) -> dict[str, Any]:
        """The Python version and how much of the library is installed."""
        files = self._files()
        size = sum(file.stat().st_size for file in files)
        return {
            "builtin": "python-stdlib",
            "python": _python(),
            "files": len(files),
            "size_bytes": size,
        }

    def rows(self, columns: Columns) -> Rows:
        """One file a row, by path; files that are not UTF-8 are left out."""
        columns.check((PLAIN,), self.describe())
        for file in self._files():
            try:
                yield Row(str(file), {PLAIN: file.read_text(encoding="utf-8")})
            except UnicodeDecodeError:
                continue

    def _files(self) -> list[Path]:
        found: list[Path] = []
        for folder, inner, names in os.walk(sysconfig.get_path("stdlib")):
            inner[:] = [name for name in inner if name not in _LEFT_OUT]
            found += (Path(folder, name) for name in names if name.endswith(".py"))
        return sorted(found)
