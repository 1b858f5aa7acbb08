"""The deadline of whatever a test waits for, and a program that is run within it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

DEADLINE_S = 600.0
"""Of a machine whose cores others keep busy: who reaches it has met a fault. A time that is
promised to people is no deadline: its test passes a clock in."""


def run_program(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    *,
    input: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, within the deadline; its output is kept as text."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        input=input,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
