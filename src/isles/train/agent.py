"""Starts the ranks of one node: `python -m isles.train.agent RUN_DIR …`.

On one machine the local launcher runs it, with `--nproc-per-node`. Where a run may have several
nodes, one agent on each of them joins the run that is on its way: `RUN_DIR` is then enough, also
typed by hand, to bring a node back. SIGINT and SIGTERM are handed to the ranks, which save and
stop.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

from isles.errors import UserError
from isles.rundir.env import ATTEMPT, RUN_DIR, visible_devices
from isles.rundir.nodes import Meeting, claim_node, read_meeting
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.process import ProcessId
from isles.train.relay import SignalRelay

_LOOK_S = 0.5


def main() -> int:
    """Run the ranks to their end; returns the run's exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.train.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, help="left out: the newest")
    parser.add_argument("--nproc-per-node", type=int, help="for a run of one node")
    parser.add_argument("--node", type=int, help="for a run of several; left out: a free one")
    parser.add_argument("--resume-from", type=Path)
    options = parser.parse_args()
    try:
        return _run(options)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)


def _run(options: argparse.Namespace) -> int:
    run_dir = RunDir(options.run_dir.absolute())
    attempt = _attempt(run_dir, options.attempt)
    relay = SignalRelay(attempt)
    relay.install()
    node, meeting = 0, None
    if options.nproc_per_node is None:
        node, meeting = _join(attempt, options.node)
    with tempfile.TemporaryDirectory(prefix="isles-") as scratch:
        os.environ[RUN_DIR] = str(run_dir.path)
        os.environ[ATTEMPT] = str(attempt.number)
        # Else the agent opens a store to the whole network, which no rank here uses.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # Every node has as many ranks: their numbers need no exchange.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        # The fork server imports torch and the model's code once for all ranks, of all restarts.
        # It starts before anything heavy is imported here, which this process does beside it.
        forkserver.set_forkserver_preload(["isles.train.preload"])
        forkserver.ensure_running()

        from isles.config.resolve import load_resolved
        from isles.train.elastic import Gang
        from isles.train.gang import run_gang

        config = load_resolved(run_dir.resolved.read_text(encoding="utf-8")).config
        cluster = config.clusters[0]
        asked = Path(meeting.resume_from) if meeting and meeting.resume_from else None
        gang = Gang(
            run_dir=run_dir,
            attempt=attempt,
            node=node,
            nproc_per_node=meeting.nproc_per_node if meeting else options.nproc_per_node,
            max_restarts=cluster.max_restarts,
            timeout_s=cluster.comm_timeout,
            save_timeout_s=config.checkpoint.timeout,
            resume_from=options.resume_from or asked,
            scratch=Path(scratch),
            meeting=meeting,
        )
        return run_gang(gang, relay)


def _attempt(run_dir: RunDir, number: int | None) -> Attempt:
    attempt = run_dir.last_attempt() if number is None else run_dir.attempt(number)
    if attempt is None:
        raise UserError(
            "this run was never started", where=str(run_dir.path), fix="`isles train` starts it"
        )
    return attempt


def _join(attempt: Attempt, wanted: int | None) -> tuple[int, Meeting]:
    """Take a place among the nodes of a run that is on its way."""
    meeting = read_meeting(attempt)
    if meeting is None or attempt.outcome.exists():
        is_over = "is over" if meeting else "has one node only"
        raise UserError(
            f"this start of the run {is_over}: no node can join it",
            where=str(attempt.path),
            fix="`isles train` with its run file starts it again; clusters[0].nodes: MIN:MAX "
            "makes room for more nodes",
        )
    supervisor = meeting.supervisor_process
    if supervisor.is_here() and not supervisor.is_alive():
        raise UserError(
            f"the supervisor of this run (pid {supervisor.pid}) is gone: no node can join it",
            where=f"host {supervisor.host}",
            fix="`isles train` with its run file starts the run again",
        )
    node = claim_node(attempt, meeting, wanted)
    if supervisor.is_here():
        threading.Thread(target=_end_with, args=(supervisor,), daemon=True).start()
    if meeting.device == "cuda":
        _take_gpus(node, meeting)
    return node, meeting


def _take_gpus(node: int, meeting: Meeting) -> None:
    """Each node of one machine has GPUs of its own."""
    last = (node + 1) * meeting.nproc_per_node
    visible = visible_devices() or [str(gpu) for gpu in range(last)]
    mine = visible[last - meeting.nproc_per_node : last]
    if len(mine) < meeting.nproc_per_node:
        raise UserError(
            f"node {node} needs {meeting.nproc_per_node} GPUs of its own, {len(mine)} are left",
            where=f"host {os.uname().nodename}, CUDA_VISIBLE_DEVICES={','.join(visible)}",
            fix="make all GPUs of the run visible, or lower clusters[0].nodes",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def _end_with(supervisor: ProcessId) -> None:
    """A node whose supervisor was killed must not go on alone."""
    while supervisor.is_alive():
        time.sleep(_LOOK_S)
    sys.stderr.write(f"agent: the supervisor (pid {supervisor.pid}) is gone; ending with it\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
