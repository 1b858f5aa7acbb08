"""Small programs that stand for those of the outside world: sbatch, qsub, ssh, nvidia-smi."""

from __future__ import annotations

from pathlib import Path
from shlex import quote


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
    cases = [f"*{quote(word)}*) printf %s {quote(text)}; exit ;;" for word, text in answers.items()]
    lines = ['case "$*" in', *cases, "esac", 'echo "not known: $*" >&2', "exit 1"]
    write_program(folder / name, "\n".join(lines))
