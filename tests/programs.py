"""Small programs that stand for those of the outside world: sbatch, qsub, ssh, nvidia-smi."""

from __future__ import annotations

from pathlib import Path


def write_program(path: Path, lines: str) -> Path:
    """A program that consists of these lines of bash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)
    return path
