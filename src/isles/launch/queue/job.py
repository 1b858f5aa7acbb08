"""Common part of Slurm and PBS: a scheduler, the job of a run, and the nodes of a job."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from isles.config.load import Loaded
from isles.errors import CommunicationError, ExitCode, UserError
from isles.facts.secrets import without_secrets
from isles.facts.units import format_duration, printable
from isles.launch.ssh.shell import CommandResult, Shell, environment_failure
from isles.run.outcome import end, error_record
from isles.run.paths import Attempt, RunDir
from isles.run.records import write_text_atomic
from isles.run.restarts import newest_step
from isles.run.stop import read_stop_request, request_stop

JobState = Literal["pending", "running", "requeued", "ended", "unknown"]
"""requeued: it has run before, and waits to continue. unknown: this machine cannot query it."""

ASK_S = 20.0
"""Longest wait for a command of a scheduler, which may be busy for some seconds."""

_TAIL_BYTES = 4096
_TRIES, _WRITTEN_S = 3, 2.0
"""Interval of reads of a file that other hosts replace; also how long a new file may be empty."""

NEXT, LOST = "next", "lost"
"""Placeholder for the id of the job that trains an attempt: see `hand_on` and `claim`."""


@dataclass(frozen=True, slots=True)
class JobReport:
    """State of a job at one time.

    Args:
        reason: text: why it waits, where it runs, or how it ended.
        word: the scheduler's own state, such as `PENDING Resources`.
        fix: what the user can do; empty if nothing is needed.
        at: time of the query, in seconds since the epoch.
    """

    state: JobState
    reason: str
    job_id: str
    word: str = ""
    fix: str = ""
    at: float = field(default_factory=time.time)

    @property
    def is_alive(self) -> bool:
        """True if it is running or will run."""
        return self.state in ("pending", "running", "requeued")


@cache
def words_of(scheduler: str) -> Any:
    """The tables of `reasons.yaml` for slurm or pbs."""
    text = (resources.files("isles.launch") / "queue" / "reasons.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)[scheduler]


def explain(scheduler: str, table: str, text: str, **values: str) -> tuple[str, str] | None:
    """The meaning and the fix from the first row of a table whose pattern matches a scheduler's
    text; None: no row matches. `values` are inserted into both."""
    for pattern, meaning, fix in words_of(scheduler)[table]:
        if re.search(pattern, text, re.IGNORECASE):
            return meaning.format(**values), fix.format(**values)
    return None


class JobQueue(ABC):
    """A system that runs jobs: a scheduler, or a cluster that accepts jobs."""

    __slots__ = ()
    name: ClassVar[str]

    @abstractmethod
    def look(self, attempt: Attempt, job_id: str) -> JobReport:
        """Query the state of a job; changes nothing.

        Raises:
            UserError: it cannot be queried from this machine, or does not answer in time.
        """

    @abstractmethod
    def cancel(self, job: QueueJob, *options: str) -> None:
        """End a job; ignores the error of a job that is over.

        Raises:
            UserError: the scheduler refuses, or does not answer in time.
        """

    @abstractmethod
    def exit_code(self, attempt: Attempt, report: JobReport) -> tuple[ExitCode, bool]:
        """The exit code of an ended job without an outcome, and whether it was stopped."""

    @abstractmethod
    def output(self, attempt: Attempt, job_id: str) -> Path:
        """The file with a job's output."""

    def ask_to_save(self, job: QueueJob) -> None:
        """Make a running job read the stop request, if it does not do so by itself."""
        return

    def hasten(self, report: JobReport) -> str:
        """Start a job immediately that waits only because it was requeued.

        For a user who wants the run to continue, never for a user who only looks at it.

        Returns:
            A reason why it waits now. Empty if nothing has changed.
        """
        return ""


@dataclass(frozen=True, slots=True)
class Scheduler(JobQueue):
    """The commands of a scheduler on one machine.

    Args:
        bin_path: the folder of the commands; None: they are on PATH.
        ask_s: longest wait for one command.
    """

    submit_command: ClassVar[tuple[str, ...]]
    """The command that submits a job script, with its options."""
    cancel_command: ClassVar[str]
    array_option: ClassVar[str]
    """Pattern of an option that makes a job an array."""
    own_options: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Patterns of options that the script must have as isles writes them, and the keys to use
    instead."""
    new_words: ClassVar[tuple[str, ...]]
    """`JobReport.word` of a job that the scheduler has not considered yet."""

    bin_path: str | None = None
    shell: Shell = field(default_factory=Shell)
    ask_s: float = ASK_S

    def run(self, command: str, *args: str) -> CommandResult:
        """Run a command of the scheduler.

        Raises:
            PreflightError: the command is not installed, or does not answer in time.
        """
        return self.shell.run([self.path(command), *args], timeout_s=self.ask_s)

    def path(self, command: str) -> str:
        """A command as a user would type it."""
        return str(Path(self.bin_path).expanduser() / command) if self.bin_path else command

    @abstractmethod
    def submitted_id(self, done: CommandResult) -> str | None:
        """The id of the job, from the answer of the submit command; None: it was refused."""

    def submit(self, script: Path, *options: str) -> CommandResult:
        """Run the submit command. PreflightError: as in `run`."""
        return self.run(*self.submit_command, *options, str(script))

    def cancel(self, job: QueueJob, *options: str) -> None:
        """See `JobQueue.cancel`."""
        command = self.cancel_command
        done = self.run(command, *options, job.job_id)
        if done.returncode and job.look().is_alive:
            raise UserError(
                f"{command} could not end job {job.job_id}: {last_line(done)}",
                where=job.text,
                fix=f"run {command} {job.job_id} manually; the job must belong to you",
                id="queue.commands",
            )

    def refusal_fix(self, key: str, loaded: Loaded) -> str:
        """A better fix than the table's, for a refusal about a key; empty: use the table's."""
        return ""


@dataclass(frozen=True, slots=True)
class QueueJob:
    """The job of one start of a run."""

    run_dir: RunDir
    attempt: Attempt
    job_id: str
    queue: JobQueue

    @property
    def text(self) -> str:
        """Name for messages, such as `Slurm job 4711`."""
        return f"{self.queue.name} job {self.job_id}"

    def look(self) -> JobReport:
        """See `Scheduler.look`."""
        return self.queue.look(self.attempt, self.job_id)

    def cancel(self, *, now: bool) -> None:
        """End the job: with `now` immediately; else a running job saves first.

        Raises:
            UserError: the scheduler refuses, or does not answer in time.
        """
        report = self.look()
        if not report.is_alive:
            return
        request_stop(self.attempt, "now" if now else "save")
        if report.state == "running" and not now:
            self.queue.ask_to_save(self)
        else:
            self.queue.cancel(self)

    def write_outcome(self, report: JobReport) -> None:
        """Write the outcome of a job whose script was killed, unless the run has one."""
        if self.attempt.outcome.exists():
            return
        saved = newest_step(self.run_dir)
        kept = "nothing was saved" if saved is None else f"everything up to step {saved} is saved"
        code, is_stop = self.queue.exit_code(self.attempt, report)
        is_asked = is_stop and read_stop_request(self.attempt) is not None
        what, error = "asked to stop" if is_asked else f"{self.text}: {report.reason}", None
        if not is_stop:
            output = self.queue.output(self.attempt, self.job_id)
            fix, id = report.fix or f"see the end of {output.name}", ""
            if saved is None and not any(self.attempt.path.glob("rank-*.json")):
                # No rank has started: the script itself, or its environment, has failed.
                tail = _tail(output)
                line = tail.rpartition("\n")[2]
                if (found := environment_failure(tail)) is not None:
                    (line, fix), id = found, "python.runs"
                what = f"{what}: {line}" if line else what
            error = error_record(
                what,
                id=id,
                kind="JobEnded",
                code=code,
                where=str(output),
                fix=fix,
                at=report.at,
                host=None,
            )
        state: Literal["stopped", "failed"] = "stopped" if is_stop else "failed"
        end(self.attempt, state, code, f"{what}; {kept}", step=saved, error=error)


def _tail(output: Path) -> str:
    # The last lines of a job's output; empty if it cannot be read.
    with suppress(OSError), output.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = stream.read(_TAIL_BYTES).decode(errors="replace")
        return without_secrets(printable(text.strip()))
    return ""


def training_job(attempt: Attempt) -> str | None:
    """The id of the job that trains an attempt, or trained it until it was handed on;
    None: none."""
    found = [word for word in _holder(attempt) if word[0].isdecimal()]
    return found[-1] if found else None


def claim(attempt: Attempt, job_id: str, *, submitted: str = "") -> str:
    """Claim an attempt; returns the id of the job that trains it: this job, or another.

    If several jobs claim at the same time, only one of them can create the file. The answer is LOST
    if the start was given up before any of them began.

    Args:
        submitted: the job that the start has submitted, if known.

    Raises:
        OSError: the attempt's folder cannot be read or written.
    """
    path, own = attempt.path / "job-id", submitted or job_id
    deadline = time.monotonic() + _WRITTEN_S
    while True:
        try:
            with path.open("x", encoding="utf-8") as stream:
                stream.write(f"{own}\n")
        except FileExistsError:
            holder = _holder(attempt)
        else:
            return own
        if not holder and time.monotonic() < deadline:
            time.sleep(_WRITTEN_S / 20)  # another job is writing it now
            continue
        if holder and holder[-1] != NEXT:
            return holder[-1]
        # Handed on, or left empty by a kill: only one of the claiming jobs can move it away.
        own = job_id if holder else own
        moved = path.with_name(f"job-id-before-{job_id}")
        with suppress(FileNotFoundError):
            path.rename(moved)
            moved.unlink()


def hand_on(attempt: Attempt, job_id: str = NEXT) -> None:
    """Let another job train an attempt instead of this job; NEXT: the job that begins next.

    Raises:
        OSError: the attempt's folder cannot be written.
    """
    before = training_job(attempt) or "" if job_id == NEXT else ""
    write_text_atomic(attempt.path / "job-id", f"{before} {job_id}\n".lstrip())


def _holder(attempt: Attempt) -> list[str]:
    # The words of the file; the last word is the holder.
    for _ in range(_TRIES):
        try:
            text = (attempt.path / "job-id").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            # NFS: another host has replaced the file while it was read.
        else:
            return [word.partition(";")[0] for word in text.split()]
    return []


def last_line(done: CommandResult) -> str:
    """The last line of a command's output."""
    lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit status {done.returncode}"


def where_running(nodes: str, doing: str, left_s: float | None) -> str:
    """Text about a running job; `doing`: empty, or that it is ending or suspended; `left_s`:
    seconds until its time limit, None: unknown."""
    if doing:
        return f"it is {doing} on {nodes}"
    if left_s is None:
        return f"on {nodes}"
    return f"on {nodes}; its time limit is in {format_duration(max(0.0, left_s))}"


def no_answer(queue: Scheduler, words: str, done: CommandResult, fix: str) -> UserError:
    """The error for a command of a scheduler that fails to report the state of a job."""
    what, where = f"{words} failed: {last_line(done)}", f"{queue.path(words)} on {queue.shell.name}"
    return UserError(what, where=where, fix=fix, id="queue.commands")


@dataclass(frozen=True, slots=True)
class JobNode:
    """A node of a job: its name in the scheduler, and its address for the other nodes; 127.0.0.1 in
    a job of one node."""

    name: str
    address: str


class JobAllocation(ABC):
    """The nodes of a job, as seen by its own script; the coordinator runs there.

    Args:
        attempt: attempt whose script this job runs.
        environ: the variables of the job.

    Attributes:
        job: name for messages, such as `Slurm job 4711`.
        job_id: as the scheduler writes it.
        key: a word that is unique among all starts of all jobs.
        nodes: in the order of their numbers; the first one is this host.
        first_port: added to network.port, so that two jobs on a node start at different ports.
        wait_s: time for the nodes to start, in addition to start_timeout.
    """

    brings_back: ClassVar[bool] = False
    """True if a lost node is replaced while the others stay."""

    nodes: list[JobNode]
    wait_s: float = 0.0

    def __init__(
        self, scheduler: Scheduler, job_id: str, attempt: Attempt, environ: Mapping[str, str]
    ) -> None:
        self.job = f"{scheduler.name} job {job_id}"
        self.key = self.job_id = job_id
        self.first_port = int(re.sub(r"\D", "", job_id.partition(".")[0])) % 100
        self._attempt = attempt
        self._environ = environ

    @abstractmethod
    def on_all_nodes(self, words: list[str], log: Path) -> list[list[str]]:
        """Command lines that start `python -m isles.agent RUN_DIR --attempt N WORDS` on all nodes.

        Args:
            words: further arguments of the agent.
            log: a path; `%n` in it stands for the number of the node.
        """

    def save_at(self) -> float | None:
        """Time to save before the time limit, by time.monotonic(); None: a signal announces it."""
        return None

    def is_preempted(self) -> bool:
        """True if another job takes the nodes, and the scheduler does not requeue this job by
        itself."""
        return False

    @abstractmethod
    def queue_again(self) -> str:
        """Requeue this job, to continue the run; returns a text about it.

        Raises:
            UserError: the scheduler refuses.
        """

    def refused(self, what: str) -> UserError:
        """The error for a job that cannot be requeued."""
        fix = "submit it again with `isles train`"
        return UserError(what, where=self.job, fix=fix, id="queue.refused")


def address_of(names: list[str], host: str) -> str:
    """An IPv4 address of a host for other hosts, never of the loopback interface.

    Args:
        names: names or addresses of the host, the best first.
        host: the host, for the message.

    Raises:
        CommunicationError: no name has such an address.
    """
    for name in names:
        try:
            found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue
        for entry in found:
            address = str(entry[4][0])
            if not address.startswith("127."):
                return address
    raise CommunicationError(
        f"no address found for the node {host}",
        where=f"host {socket.gethostname()}",
        fix=f"make sure that getent ahostsv4 {host} prints an address, or set "
        "clusters.0.network.interface",
        id="net.names",
    )
