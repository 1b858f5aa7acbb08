"""Programs for PATH that stand for those of a driver or a scheduler."""

from __future__ import annotations

import sys
from pathlib import Path

_CODE = """\
#!{python}
import sys
line = " ".join(sys.argv[1:])
for words, text in {answers!r}.items():
    if words in line:
        sys.stdout.write(text)
        sys.exit(0)
sys.stderr.write("not known: " + line)
sys.exit(1)
"""


def program(folder: Path, name: str, answers: dict[str, str]) -> None:
    """A program that prints an answer by what its arguments contain, and fails for the rest."""
    path = folder / name
    path.write_text(_CODE.format(python=sys.executable, answers=answers))
    path.chmod(0o755)
