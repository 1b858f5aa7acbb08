"""A PBS stand-in over the pretend hosts: `ctl` is the login node, a1, a2 ... compute.

The commands are programs on PATH in the hosts, not PBS itself; what they copy from a real one, and
what not, stands at the beginning of `tests/lab/pbs/server.py`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.home import end, install
from tests.lab.hosts import Lab

_PROGRAMS = Path(__file__).parent / "pbs"


@contextmanager
def pbs(lab: Lab, nodes: tuple[str, ...], flavor: str = "openpbs") -> Iterator[None]:
    """The stand-in, for as long as the block lasts.

    Args:
        lab: hosts that are up.
        nodes: those that run jobs.
        flavor: openpbs or torque.
    """
    folder = f"/shared/.pbs-{flavor}"
    (lab.shared / f".pbs-{flavor}").mkdir()
    commands = shlex.join([sys.executable, f"{_PROGRAMS}/commands.py", folder])
    line = f'exec {commands} "$(basename "$0")" "$@"'
    for host in ("ctl", *nodes):
        install(lab, host, "qsub qstat qdel pbsdsh", line)
    command = [sys.executable, f"{_PROGRAMS}/server.py", folder, flavor, *nodes]
    server = lab.popen("ctl", command, stdin=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"serving\n", server.stdout.read()
        yield
    finally:
        end(server)
