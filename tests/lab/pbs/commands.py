"""The commands of the PBS stand-in: `commands.py FOLDER qsub|qstat|qdel|pbsdsh WORDS...`. Its
server (`server.py`) answers on any host, by a socket in the folder that all hosts see."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Client


def main() -> int:
    """Ask, and print the answer; the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    place = {"PBS_O_WORKDIR": os.getcwd(), "PBS_O_HOST": os.uname().nodename}  # noqa: PTH109
    with Client(f"{sys.argv[1]}/socket") as server:
        server.send((sys.argv[2:], {**os.environ, **place}))
        code, out, err = server.recv()
    sys.stdout.write(out)
    sys.stderr.write(err)
    return int(code)


sys.exit(main())
