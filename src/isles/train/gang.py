"""The ranks of one machine under torch's elastic agent, and how they ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from isles.errors import ExitCode
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.records import read_record, write_record
from isles.train.rank import rank_process


def run_gang(
    run_dir: RunDir, attempt: Attempt, world_size: int, resume_from: Path | None, scratch: Path
) -> int:
    """Run the ranks of this machine to their end; returns the run's exit code.

    Args:
        run_dir: the run directory.
        attempt: the folder of this start.
        world_size: number of ranks.
        resume_from: a checkpoint that was asked for by name.
        scratch: a folder for the files through which the ranks meet.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
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
            run_dir.path, attempt.number, resume_from
        )
    except ChildFailedError as error:
        return _record_failure(attempt, world_size, error.failures)
    return max(codes.values())


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
