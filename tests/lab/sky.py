"""A stand-in for SkyPilot's command over the pretend hosts; what it copies: `sky/command.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deadline import until
from tests.lab.home import sh
from tests.lab.hosts import Lab

_PROGRAM = Path(__file__).parent / "sky" / "command.py"


@contextmanager
def sky(lab: Lab, nodes: tuple[str, ...]) -> Iterator[Path]:
    """The command on the laptop, for as long as the block lasts; yields the folder of its state.

    Args:
        lab: hosts that are up.
        nodes: those of which it makes clusters.
    """
    state = lab.shared / ".sky"
    state.mkdir()
    text = f"#!/bin/sh\nexport SKY_STANDIN=/shared/.sky SKY_HOSTS='{' '.join(nodes)}'\n"
    program = lab.shared / ".sky-program"
    program.write_text(f'{text}exec {sys.executable} {_PROGRAM} "$@"\n')
    program.chmod(0o755)
    sh(lab, "ctl", "install -m 755 /shared/.sky-program /usr/local/bin/sky")
    try:
        yield state
    finally:
        for job in state.glob("job-*"):
            (job / "cancel").touch()
            num = len(list(job.glob("pid-*")))
            until(lambda job=job, num=num: len(list(job.glob("end-*"))) >= num, f"{job.name} ends")
