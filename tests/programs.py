"""Small programs that stand for those of the outside world: sbatch, qsub, ssh, nvidia-smi."""

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


def write_program(path: Path, lines: str) -> Path:
    """A program that consists of these lines of bash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)
    return path


def write_ssh(folder: Path) -> Path:
    """A program ssh whose hosts are this machine; only the host `down` cannot be reached."""
    down = 'echo "ssh: connect to host down port 22: No route to host" >&2; exit 255'
    lines = f"for word; do case $word in -G) exit 0 ;; me@down) {down} ;; esac; done"
    return write_program(folder / "ssh", f'{lines}\nexec bash -c "${{@: -1}}"')


def program(folder: Path, name: str, answers: dict[str, str]) -> None:
    """A program that prints an answer by what its arguments contain, and fails for the rest."""
    path = folder / name
    path.write_text(_CODE.format(python=sys.executable, answers=answers))
    path.chmod(0o755)
