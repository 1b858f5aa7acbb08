"""Starts the ranks of one machine under torch's elastic agent, and says how they ended.

`python -m isles.train.agent RUN_DIR --attempt N --nproc-per-node W`, as the local launcher runs
it. SIGINT and SIGTERM are handed to the ranks, which save and stop.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from isles.errors import ExitCode
from isles.rundir.env import ATTEMPT, RUN_DIR, STORE
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.process import ProcessId
from isles.rundir.records import read_record, write_record
from isles.rundir.signals import send_signal
from isles.train.rank import rank_process

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

log = logging.getLogger(__name__)

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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s [agent] %(message)s")
    run_dir = RunDir(options.run_dir.absolute())
    attempt = run_dir.attempt(options.attempt)
    with tempfile.TemporaryDirectory(prefix="isles-") as scratch:
        os.environ[RUN_DIR] = str(run_dir.path)
        os.environ[ATTEMPT] = str(attempt.number)
        os.environ[STORE] = str(Path(scratch) / "store")
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_GRACE_S)
        # Else the agent opens a store to the whole network, which no rank here uses.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        relay = SignalRelay(attempt, options.nproc_per_node)
        relay.install()
        # The fork server imports torch and the model's code once for all ranks, and while it does
        # so this process imports torch beside it.
        forkserver.set_forkserver_preload(["isles.train.preload"])
        forkserver.ensure_running()
        code = _run(run_dir, attempt, options, Path(scratch))
    log.info("ended exit_code=%d", code)
    return code


def _run(run_dir: RunDir, attempt: Attempt, options: argparse.Namespace, scratch: Path) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.nproc_per_node,
        run_id=f"{run_dir.name}.{attempt.number}",
        # Ranks of one machine meet in a file: no port is opened, none can be taken.
        rdzv_backend="c10d",
        rdzv_endpoint=str(scratch / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        # INT and TERM are ours: the elastic agent would kill the ranks before they have saved.
        signals_to_handle="SIGQUIT",
    )
    try:
        codes: dict[int, int] = elastic_launch(config, rank_process)(
            run_dir.path, attempt.number, options.resume_from
        )
    except ChildFailedError as error:
        return _record_failure(attempt, options.nproc_per_node, error.failures)
    return max(codes.values())


class SignalRelay:
    """Hands SIGINT, SIGTERM and SIGUSR1 to every rank, also to one that is still starting."""

    def __init__(self, attempt: Attempt, world_size: int) -> None:
        self._attempt = attempt
        self._waiting = set(range(world_size))
        self._number = 0

    def install(self) -> None:
        """Take over the signals. Main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_first = self._number == 0
        self._number = number
        if is_first:
            threading.Thread(target=self._hand_on, daemon=True).start()

    def _hand_on(self) -> None:
        # A rank writes its record once it can take a signal; until then the signal waits here.
        while self._waiting:
            for rank in sorted(self._waiting):
                record = read_record(self._attempt.rank_record(rank))
                process = ProcessId.from_record(record) if record else None
                if process is not None:
                    send_signal(process, signal.Signals(self._number))
                    self._waiting.discard(rank)
            time.sleep(0.05)


def _record_failure(attempt: Attempt, world_size: int, failures: dict[int, ProcessFailure]) -> int:
    """Find the rank that failed first, write the outcome; returns the exit code."""
    errors = [read_record(attempt.rank_error(rank)) for rank in range(world_size)]
    culprit = find_culprit([error for error in errors if error], failures, world_size)
    write_record(
        attempt.outcome,
        {
            "state": "failed",
            "exit_code": culprit["exit_code"],
            "step": None,
            "reason": culprit["what"],
            "at": time.time(),
            "error": culprit,
        },
    )
    return int(culprit["exit_code"])


def find_culprit(
    errors: list[dict[str, Any]], failures: dict[int, ProcessFailure], world_size: int
) -> dict[str, Any]:
    """The error that the others are consequences of.

    Args:
        errors: the error records that ranks have left.
        failures: what the elastic agent saw end first, by rank.
        world_size: number of ranks.

    Returns:
        An error record: a rank's own earliest error that is not the loss of another rank; else the
        rank that died without a word; else the earliest error there is.
    """
    own = [error for error in errors if not error["is_communication"]]
    if own:
        return min(own, key=lambda error: float(error["at"]))
    silent = {rank: f.exitcode for rank, f in failures.items() if f.exitcode < 0}
    left_word = {int(error["rank"]) for error in errors}
    if not silent:
        gone = [rank for rank in range(world_size) if rank not in left_word]
        silent = dict.fromkeys(gone[:1], 0) if errors else {}
    if silent:
        rank, exit_code = min(silent.items())
        return _death(rank, exit_code)
    if errors:
        return min(errors, key=lambda error: float(error["at"]))
    rank, failure = next(iter(failures.items()))
    return _death(rank, failure.exitcode)


def _death(rank: int, exit_code: int) -> dict[str, Any]:
    """A record for a rank that could not write one."""
    how, fix = f"ended with exit code {exit_code}", "the end of its log may say why: `isles logs`"
    if exit_code == 0:
        how = "died without a word"
    elif exit_code < 0:
        name = signal.Signals(-exit_code).name
        how = f"was killed by {name}"
        if name == "SIGKILL":
            fix = "somebody killed it, or the machine ran out of memory: see `dmesg | tail`"
    return {
        "rank": rank,
        "host": os.uname().nodename,
        "at": time.time(),
        "kind": "ProcessDied",
        "what": f"rank {rank} {how}",
        "where": f"rank {rank} on {os.uname().nodename}",
        "fix": f"{fix}; `isles train` again goes on from the last checkpoint",
        "exit_code": int(ExitCode.TRAINING),
        "is_communication": False,
        "traceback": None,
    }


if __name__ == "__main__":
    sys.exit(main())
