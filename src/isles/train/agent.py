"""Starts the ranks of one machine: `python -m isles.train.agent RUN_DIR --attempt N …`.

The local launcher runs it. SIGINT and SIGTERM are handed to the ranks, which save and stop.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

from isles.rundir.env import ATTEMPT, RUN_DIR, STORE

_GRACE_S = 30
"""How long surviving ranks may take to end after another has failed."""


def main() -> int:
    """Run the ranks to their end; returns the run's exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.train.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--resume-from", type=Path)
    options = parser.parse_args()
    run_path = options.run_dir.absolute()
    with tempfile.TemporaryDirectory(prefix="isles-") as scratch:
        os.environ[RUN_DIR] = str(run_path)
        os.environ[ATTEMPT] = str(options.attempt)
        os.environ[STORE] = str(Path(scratch) / "store")
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_GRACE_S)
        # Else the agent opens a store to the whole network, which no rank here uses.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # The fork server imports torch and the model's code once for all ranks. It starts before
        # anything else is imported here, and this process imports torch beside it.
        forkserver.set_forkserver_preload(["isles.train.preload"])
        forkserver.ensure_running()
        return _run(run_path, options, Path(scratch))


def _run(run_path: Path, options: argparse.Namespace, scratch: Path) -> int:
    from isles.rundir.paths import RunDir
    from isles.train.relay import SignalRelay

    run_dir = RunDir(run_path)
    attempt = run_dir.attempt(options.attempt)
    SignalRelay(attempt, options.nproc_per_node).install()

    from isles.train.gang import run_gang

    return run_gang(run_dir, attempt, options.nproc_per_node, options.resume_from, scratch)


if __name__ == "__main__":
    sys.exit(main())
