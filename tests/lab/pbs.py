"""A PBS stand-in over the pretend hosts: `ctl` is the login node, a1, a2 ... compute.

The commands are programs on PATH in the hosts (`tests/lab/pbs`), not PBS itself; what they copy
from a real one, and what not, stands at their beginning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deadline import DEADLINE_S
from tests.lab.hosts import Lab

_PROGRAMS = Path(__file__).parent / "pbs"
_COMMANDS = ("qsub", "qstat", "qdel", "pbsnodes", "pbsdsh")


@contextmanager
def pbs(lab: Lab, nodes: tuple[str, ...], flavour: str = "openpbs") -> Iterator[None]:
    """The stand-in, for as long as the block lasts.

    Args:
        lab: hosts that are up.
        nodes: those that run jobs.
        flavour: openpbs or torque.
    """
    folder = lab.shared / f".pbs-{flavour}"
    settings = {
        "PBS_STANDIN": f"/shared/{folder.name}",
        "PBS_FLAVOUR": flavour,
        "PBS_NODES": " ".join(nodes),
    }
    exports = "".join(f"export {name}='{value}'\n" for name, value in settings.items())
    (folder / "bin").mkdir(parents=True)
    for command in _COMMANDS:
        program = folder / "bin" / command
        line = f'exec {sys.executable} {_PROGRAMS}/commands.py {command} "$@"\n'
        program.write_text(f"#!/bin/sh\n{exports}{line}")
        program.chmod(0o755)
    for host in ("ctl", *nodes):
        lab.run(host, ["sh", "-c", f"cp /shared/{folder.name}/bin/* /usr/local/bin/"])
    server = lab.popen("ctl", [sys.executable, f"{_PROGRAMS}/server.py"], **settings)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"serving\n", server.stdout.read()
        yield
    finally:
        (folder / "stop").touch()
        server.wait(DEADLINE_S)
