"""Ranks of one node: forked from a server that has imported torch, watched, ended.

The agent's process never imports torch. The function that ranks run is given as a string, and
imported in the forked process.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from isles.agent.failure import failure_report, oom_kills
from isles.agent.protocol import END_GRACE_S
from isles.errors import ExitCode, UserError
from isles.run.env import RankEnv
from isles.run.live import Tell
from isles.run.paths import Attempt, RunDir
from isles.run.process import die_with_parent
from isles.run.records import read_record

_END_OTHERS_S = 30.0
"""Longest time for ranks to end after another rank of this node has failed."""
_KILL_S = 30.0
"""Longest time for the kernel to end a killed process."""

_CAUSE_FIRST_S, _LOOK_S = 2.0, 0.05

_LONGEST_BYTES, _UNREAD_BYTES = 4000, 16 << 10
"""Maximum bytes of a rank's report, written atomically (PIPE_BUF is 4096). A rank skips a report
while this many bytes are unread."""

_RANK_PROCESS = "isles.agent.workers:rank_process"
_SCRIPT_PROCESS = "isles.agent.script.run:script_process"
_SERVE_STORE = "isles.dist.world:serve_store"


class WorkerGroup:
    """Ranks of one node. The coordinator decides which ranks, and when they start and end.

    Args:
        scratch: a folder for files of this attempt on this host.
        in_job: whether the run's job may be requeued after a stop.
        hears: whether the ranks of the built-in trainer report their progress.
        store: address of the store that the ranks of several nodes use, if this is the first node.
    """

    def __init__(
        self,
        run_dir: RunDir,
        attempt: Attempt,
        nproc: int,
        scratch: Path,
        *,
        in_job: bool = False,
        hears: bool = True,
        store: RankStore | None = None,
    ) -> None:
        self._run_dir, self._attempt = run_dir, attempt
        self._hears = hears
        self._nproc = nproc
        self._scratch = scratch
        self._in_job = in_job
        self._store = store
        self._ranks: RankProcesses | None = None
        self._seen: dict[int, dict[str, Any]] = {}
        self._command: dict[str, Any] = {}
        self._failed: dict[int, int] = {}
        self._oom_kills = 0
        self._end_by = 0.0
        self._is_handing_over = False
        self.report: dict[str, Any] = {"restart": -1, "state": "idle"}

    @property
    def is_running(self) -> bool:
        """True if ranks have been started and have not been seen to end."""
        return bool(self.report["state"] == "running")

    @property
    def is_script(self) -> bool:
        """True if the ranks run a user's own script."""
        return bool(self._command.get("script"))

    @property
    def restart(self) -> int:
        """Restart number of the ranks, running or not; -1 before the first."""
        return int(self._command.get("restart", -1))

    def begin(self, command: dict[str, Any]) -> None:
        """Start the ranks.

        Args:
            command: the coordinator's command: `restart`; `ranks`, the first local rank and their
                number; `world_size`; `group`, this node's index among the nodes that train and
                their
                number; `master`, host and port for torchrun's variables; `store`, address of the
                store
                for ranks of several nodes; `script`; `resume_from`.
        """
        self._command, self._failed, self._is_handing_over = command, {}, False
        self._oom_kills = oom_kills()
        restart, is_alone = int(command["restart"]), command["group"][1] == 1
        if self._store is not None and command["group"][0] == 0 and not command["script"]:
            self._store.open()
        host, port = command["store"]
        asked = Path(command["resume_from"]) if command["resume_from"] else None
        first, count = command["ranks"]
        starts: dict[int, tuple[dict[str, str], tuple[Any, ...]]] = {}
        for local_rank in range(count):
            env = RankEnv(
                rank=first + local_rank,
                local_rank=local_rank,
                world_size=int(command["world_size"]),
                local_world_size=self._nproc,
                attempt=self._attempt.number,
                store=self._scratch / f"store-{restart}" if is_alone else None,  # opens no port
                restart=restart,
                store_address=None if is_alone else (str(host), int(port)),
                in_job=self._in_job,
            )
            starts[env.rank] = self._environ(env), (self._run_dir.path, env, asked)
        what = _SCRIPT_PROCESS if command["script"] else _RANK_PROCESS
        self._ranks = RankProcesses(what, starts, hears=self._hears and not command["script"])
        self._seen = self._ranks.seen
        self.report = {"restart": restart, "state": "running"}

    def seen(self) -> dict[int, dict[str, Any]]:
        """The local ranks, running or ended: pid, whether it is alive, its exit code, and its last
        report. Any thread may call this."""
        seen = {rank: dict(known) for rank, known in self._seen.items()}
        for rank, known in seen.items() if self.is_script else ():
            record = read_record(self._attempt.rank_record(rank)) or {}
            if record.get("pid") == known["pid"]:  # that process only waits for the script
                known["pid"] = record["script_pid"]
        return seen

    def look(self) -> None:
        if not self.is_running:
            return
        assert self._ranks is not None
        done, failed = self._ranks.look()
        if failed:
            self._fail(failed)
        elif self._ranks.are_all(done):
            codes = {str(rank): code for rank, code in done.items()}
            self.report = {"restart": self.restart, "state": "succeeded", "codes": codes}

    def _fail(self, failed: dict[int, int]) -> None:
        # The others cannot continue without them. The cause is reported as soon as it is known.
        assert self._ranks is not None
        now = time.monotonic()
        if not self._failed:
            self._failed, self._end_by = failed, now + _END_OTHERS_S
            self._ranks.signal(signal.SIGTERM)
        found = failure_report(
            self._attempt,
            self.restart,
            self._ranks.numbers,
            int(self._command["world_size"]),
            self._failed,
            has_no_memory=oom_kills() > self._oom_kills,
        )
        has_cause = any(not error["is_communication"] for error in found["errors"])
        has_cause = has_cause or any(code < 0 for code in self._failed.values())
        if not has_cause and self._ranks.are_any_left() and now < self._end_by:
            return  # the rank that they lost may take longer to end
        self.report = {"restart": self.restart, "state": "failed", **found}
        self.report["codes"] = {str(rank): code for rank, code in self._failed.items()}

    def hand_over(self) -> bool:
        """Let the ranks save and end, to continue with other nodes; False if they are ending
        already."""
        if self._is_handing_over or not self.is_running:
            return False
        self._is_handing_over = True
        assert self._ranks is not None
        self._ranks.signal(signal.SIGUSR2)
        return True

    def end(self, *, at_once: bool) -> None:
        """End the ranks; ranks that are still running after a moment are killed."""
        if self._ranks is not None:
            if (
                self._failed and not at_once
            ):  # asked already; a second signal may mean an immediate stop
                self._ranks.end(0, max(END_GRACE_S, self._end_by - time.monotonic()))
            else:
                self._ranks.end(signal.SIGKILL if at_once else signal.SIGTERM, END_GRACE_S)
            self._ranks = None
        self.report = {"restart": self.restart, "state": "idle"}

    def _environ(self, env: RankEnv) -> dict[str, str]:
        # The environment variables that torchrun sets for a rank.
        command = self._command
        error = self._scratch / f"error-{env.restart}-{env.local_rank}.json"
        found = {
            "RANK": env.rank,
            "LOCAL_RANK": env.local_rank,
            "GROUP_RANK": command["group"][0],
            "ROLE_RANK": env.rank,
            "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": env.local_world_size,
            "WORLD_SIZE": env.world_size,
            "GROUP_WORLD_SIZE": command["group"][1],
            "ROLE_WORLD_SIZE": env.world_size,
            "MASTER_ADDR": command["master"][0],
            "MASTER_PORT": command["master"][1],
            "TORCHELASTIC_RESTART_COUNT": env.restart,
            "TORCHELASTIC_RUN_ID": f"{self._run_dir.name}.{env.attempt}",
            "TORCHELASTIC_USE_AGENT_STORE": False,
            "TORCHELASTIC_ERROR_FILE": error,
        }
        return {key: str(value) for key, value in found.items()}


class RankProcesses:
    """The ranks of this node in one start of all ranks.

    Args:
        what: MODULE:FUNCTION that each rank runs; the function returns an exit code, or exits the
            process itself.
        starts: for each rank, by its number, its environment variables and its arguments.
        hears: whether the function gets another argument, a `Tell`.
    """

    def __init__(
        self,
        what: str,
        starts: Mapping[int, tuple[dict[str, str], tuple[Any, ...]]],
        *,
        hears: bool = False,
    ) -> None:
        self.seen: dict[int, dict[str, Any]] = {}
        """See `WorkerGroup.seen`; values are replaced, never changed."""
        context = multiprocessing.get_context("forkserver")
        self._processes: dict[int, ForkServerProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._codes: dict[int, int] = {}
        for rank, (environ, args) in starts.items():
            self._pipes[rank], end = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(what, args, environ, end, hears))
            _start(process)
            end.close()
            self._processes[rank] = process
            self.seen[rank] = {"pid": process.pid, "alive": True, "exit": None, "at": time.time()}

    @property
    def numbers(self) -> list[int]:
        return list(self._processes)

    def look(self) -> tuple[dict[int, int], dict[int, int]]:
        """Exit codes of the ranks that ended by themselves, and of the ranks that failed.

        A negative code is the signal that ended the process.
        """
        done, failed = {}, {}
        for rank, process in self._processes.items():
            exitcode = process.exitcode  # before the pipe: then the pipe's content is complete
            self._hear(rank)
            if exitcode is not None and self.seen[rank]["alive"]:
                code = exitcode or self._codes.get(rank, 0)
                self.seen[rank] = {**self.seen[rank], "alive": False, "exit": code}
            if exitcode == 0:
                # A rank that is asked to stop when it has finished ends without an answer.
                done[rank] = self._codes.get(rank, 0)
            elif exitcode is not None:
                failed[rank] = exitcode
        return done, failed

    def _hear(self, rank: int) -> None:
        # Its reports, up to its exit code.
        with suppress(EOFError, OSError):
            while rank not in self._codes and self._pipes[rank].poll():
                message = self._pipes[rank].recv()
                if isinstance(message, dict):
                    self.seen[rank] = {**self.seen[rank], **message, "at": time.time()}
                else:
                    self._codes[rank] = int(message)

    def are_all(self, done: Mapping[int, int]) -> bool:
        return len(done) == len(self._processes)

    def are_any_left(self) -> bool:
        return any(process.exitcode is None for process in self._processes.values())

    def signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.exitcode is None and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def end(self, number: int, timeout_s: float) -> None:
        """Send this signal to all ranks, and kill ranks that have not ended in time."""
        self.signal(number)
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self.signal(signal.SIGKILL)
        for process in self._processes.values():
            # With a limit: a process that hangs in the kernel, as on a lost disk, cannot be killed.
            process.join(_KILL_S)
            if process.exitcode is None:
                sys.stderr.write(
                    f"process {process.pid} did not exit within {_KILL_S:.0f} s after SIGKILL; it "
                    "hangs in a driver or a file system (see `dmesg | tail`)\n"
                )
        self.look()  # for `seen`
        for pipe in self._pipes.values():
            pipe.close()


class RankStore:
    """The store that the ranks of all nodes use to rendezvous, on the first of those nodes.

    It listens from the start, so that early ranks wait. The fork server, which has torch, provides
    the process that answers.

    Args:
        address: address of this node, the only one that the store listens on.
    """

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0))
        self._process: ForkServerProcess | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def open(self) -> None:
        """Answer from now on, until this process exits."""
        if self._process is not None and self._process.exitcode is None:
            return
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_call, args=(_SERVE_STORE, (self._listener,)))
        _start(self._process)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._listener.close()


def _start(process: ForkServerProcess) -> None:
    try:
        process.start()
    except (EOFError, ConnectionError, BrokenPipeError) as error:
        raise UserError(
            "cannot start ranks on this host: the process that imports torch for all of them has "
            "exited",
            where=f"host {socket.gethostname()}",
            fix="see its last output above, and test on that host: "
            f"{sys.executable} -c 'import torch'",
            id="start.failed",
        ) from error


# Code from here on runs in the forked processes.


def _run(
    what: str, args: tuple[Any, ...], environ: dict[str, str], answer: Connection, hears: bool
) -> None:
    os.environ.update(environ)
    try:
        code = _call(what, (*args, functools.partial(_tell, answer)) if hears else args)
    except KeyboardInterrupt:  # before the rank has taken over the signals
        code = ExitCode.INTERRUPTED
    answer.send(int(code))


def _tell(answer: Connection, message: dict[str, Any]) -> None:
    # If the agent does not read, reports are skipped; there is always room for the exit code.
    data, unread = pickle.dumps(message), bytearray(4)
    fcntl.ioctl(answer.fileno(), termios.FIONREAD, unread)
    if len(data) <= _LONGEST_BYTES and struct.unpack("i", unread)[0] < _UNREAD_BYTES:
        answer.send_bytes(data)


def _call(what: str, args: tuple[Any, ...]) -> int:
    # The parent is the fork server, which ends with the agent in the same way.
    die_with_parent()
    module, _, name = what.partition(":")
    entry: Callable[..., int] = getattr(importlib.import_module(module), name)
    return entry(*args)


def rank_process(
    run_path: Path, env: RankEnv, resume_from: Path | None, tell: Tell | None = None
) -> int:
    """Train as this rank, with a separate log; returns the exit code."""
    run_dir = RunDir(run_path)
    attempt = run_dir.attempt(env.attempt)
    log_to_file(attempt, env)
    # By name: control packages never import worker packages, but this process is a rank now.
    worker = importlib.import_module("isles.train.worker")
    code = int(worker.run_rank(run_dir, attempt, env, resume_from, tell=tell))
    if code not in (ExitCode.OK, ExitCode.HANDOVER, ExitCode.REQUEUE, ExitCode.INTERRUPTED):
        let_cause_end_first(attempt, env, code)
        # Not an exception: the rank's own record has more than a traceback through torch.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # Done: only rank 0 may still be exporting, and nothing is left to save here.
        signal.signal(number, lambda *_: os._exit(0))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    return code


def log_to_file(attempt: Attempt, env: RankEnv) -> None:
    redirect_output(attempt.rank_log(env.rank))
    if env.restart:
        sys.stderr.write(f"---- restart {env.restart} ----\n")
        sys.stderr.flush()


def redirect_output(path: Path | str) -> None:
    """Append all output of this process to a file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def let_cause_end_first(attempt: Attempt, env: RankEnv, code: int) -> None:
    """Wait a moment, in a rank that exits with `code` only because it has lost another rank.

    The agent ends all ranks at the first exit that it sees, which must be the exit of the failed
    rank, unless that rank has recorded its error. A killed rank records none.
    """
    mine = read_record(attempt.rank_error(env.rank, env.restart))
    has_lost_another = code == ExitCode.COMMUNICATION if mine is None else mine["is_communication"]
    if not has_lost_another:
        return
    end = time.monotonic() + _CAUSE_FIRST_S
    while time.monotonic() < end:
        errors = (read_record(path) for path in attempt.rank_errors(env.restart))
        if any(not error.get("is_communication", True) for error in errors if error is not None):
            return
        time.sleep(_LOOK_S)
