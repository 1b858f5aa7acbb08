"""What Slurm and PBS have in common: a scheduler, the job of a run, and the nodes of a job."""

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
from isles.launch.ssh.shell import Result, Shell, environment_failure
from isles.run.outcome import end, error_record
from isles.run.paths import Attempt, RunDir
from isles.run.records import write_text_atomic
from isles.run.restarts import newest_step
from isles.run.stop import read_stop_request, request_stop

JobState = Literal["pending", "running", "requeued", "ended", "unknown"]
"""requeued: it has run before, and waits to go on. unknown: this machine cannot ask."""

ASK_S = 20.0
"""Longest wait for a command of a scheduler, which may be busy for some seconds."""

_TAIL_BYTES = 4096
_TRIES, _WRITTEN_S = 3, 2.0
"""How often a file is read that other hosts replace, and how long one may be empty that is made."""

NEXT, LOST = "next", "lost"
"""In place of the id of the job that trains an attempt: see `hand_on` and `claim`."""


@dataclass(frozen=True, slots=True)
class JobReport:
    """State of a job at one moment.

    Args:
        reason: in words: why it waits, where it runs, or how it ended.
        word: the scheduler's own words, such as `PENDING Resources`.
        fix: what can be done; empty where nothing needs to be.
        at: when the scheduler was asked, in seconds since the epoch.
    """

    state: JobState
    reason: str
    job_id: str
    word: str = ""
    fix: str = ""
    at: float = field(default_factory=time.time)

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or will."""
        return self.state in ("pending", "running", "requeued")


@cache
def words_of(scheduler: str) -> Any:
    """The tables of `reasons.yaml` for slurm or pbs."""
    text = (resources.files("isles.launch") / "queue" / "reasons.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)[scheduler]


def explain(scheduler: str, table: str, text: str, **values: str) -> tuple[str, str] | None:
    """The meaning and the fix of the first row of a table whose pattern is in a scheduler's
    text; None: there is no row. `values` are put into both."""
    for pattern, meaning, fix in words_of(scheduler)[table]:
        if re.search(pattern, text, re.IGNORECASE):
            return meaning.format(**values), fix.format(**values)
    return None


class JobQueue(ABC):
    """Whoever runs jobs: a scheduler, or a cluster that takes them."""

    __slots__ = ()
    name: ClassVar[str]

    @abstractmethod
    def look(self, attempt: Attempt, job_id: str) -> JobReport:
        """Ask how a job stands; this changes nothing.

        Raises:
            UserError: it cannot be asked from here, or does not answer in time.
        """

    @abstractmethod
    def cancel(self, job: QueueJob, *options: str) -> None:
        """End a job; an error of a job that is over is none.

        Raises:
            UserError: it refuses, or does not answer in time.
        """

    @abstractmethod
    def exit_code(self, attempt: Attempt, report: JobReport) -> tuple[ExitCode, bool]:
        """The exit code of an ended job without an outcome, and whether it was stopped."""

    @abstractmethod
    def output(self, attempt: Attempt, job_id: str) -> Path:
        """The file with what a job has printed."""

    def ask_to_save(self, job: QueueJob) -> None:
        """Have a running job look at the stop request, if it does not by itself."""
        return

    def hasten(self, report: JobReport) -> str:
        """Start a job at once that waits only because it was queued again.

        For a user who asks for the run to go on, never for one who looks at it.

        Returns:
            A reason why it waits now. Empty if nothing has changed.
        """
        return ""


@dataclass(frozen=True, slots=True)
class Scheduler(JobQueue):
    """The commands of a scheduler on one machine.

    Args:
        bin_path: the folder of the commands; None: they are on PATH.
        ask_s: longest wait for one of them.
    """

    submit_command: ClassVar[tuple[str, ...]]
    """The command that takes a job script, with its options."""
    cancel_command: ClassVar[str]
    array_option: ClassVar[str]
    """Pattern of an option that makes an array of a job."""
    own_options: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Patterns of options that the script must have as isles writes them, and what there is."""
    new_words: ClassVar[tuple[str, ...]]
    """`JobReport.word` of a job that the scheduler has not looked at yet."""

    bin_path: str | None = None
    shell: Shell = field(default_factory=Shell)
    ask_s: float = ASK_S

    def run(self, command: str, *args: str) -> Result:
        """Run a command of the scheduler.

        Raises:
            PreflightError: it is not here, or does not answer in time.
        """
        return self.shell.run([self.path(command), *args], timeout_s=self.ask_s)

    def path(self, command: str) -> str:
        """A command as it is typed."""
        return str(Path(self.bin_path).expanduser() / command) if self.bin_path else command

    @abstractmethod
    def submitted_id(self, done: Result) -> str | None:
        """The id of the job, from the answer of the submit command; None: it was refused."""

    def submit(self, script: Path, *options: str) -> Result:
        """Run the submit command. PreflightError: as of `run`."""
        return self.run(*self.submit_command, *options, str(script))

    def cancel(self, job: QueueJob, *options: str) -> None:
        """See `JobQueue.cancel`."""
        command = self.cancel_command
        done = self.run(command, *options, job.job_id)
        if done.returncode and job.look().is_alive:
            raise UserError(
                f"{command} does not end job {job.job_id}: {last_line(done)}",
                where=job.text,
                fix=f"by hand: {command} {job.job_id}; it must be a job of yours",
                id="queue.commands",
            )

    def refusal_fix(self, key: str, loaded: Loaded) -> str:
        """A better fix than that of the table, for a refusal about a key; empty: none."""
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
        """For messages, such as `Slurm job 4711`."""
        return f"{self.queue.name} job {self.job_id}"

    def look(self) -> JobReport:
        """See `Scheduler.look`."""
        return self.queue.look(self.attempt, self.job_id)

    def cancel(self, *, now: bool) -> None:
        """End the job: with `now` at once; else it saves first, if it runs.

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
            fix, id = report.fix or f"look at the end of {output.name}", ""
            if saved is None and not any(self.attempt.path.glob("rank-*.json")):
                # No rank has begun: the script itself, or what it loads, has failed.
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
    """The id of the job that trains an attempt, or has until it was handed on; None: none has."""
    found = [word for word in _holder(attempt) if word[0].isdecimal()]
    return found[-1] if found else None


def claim(attempt: Attempt, job_id: str, *, submitted: str = "") -> str:
    """The job that trains an attempt: this one, unless it is another's.

    Of several that ask at once the file system lets one make the file. The answer is LOST where
    the start was given up before any of them began.

    Args:
        submitted: the job that the start has submitted, where that is known.

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
            time.sleep(_WRITTEN_S / 20)  # another makes it just now
            continue
        if holder and holder[-1] != NEXT:
            return holder[-1]
        # Handed on, or left empty by a kill: of those that may have it, one moves it away.
        own = job_id if holder else own
        moved = path.with_name(f"job-id-before-{job_id}")
        with suppress(FileNotFoundError):
            path.rename(moved)
            moved.unlink()


def hand_on(attempt: Attempt, job_id: str = NEXT) -> None:
    """Let another job train an attempt in place of this one; NEXT: that which begins next.

    Raises:
        OSError: the attempt's folder cannot be written.
    """
    before = training_job(attempt) or "" if job_id == NEXT else ""
    write_text_atomic(attempt.path / "job-id", f"{before} {job_id}\n".lstrip())


def _holder(attempt: Attempt) -> list[str]:
    # The words of the file; the last is the holder.
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


def last_line(done: Result) -> str:
    """The last line that a command has printed."""
    lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit status {done.returncode}"


def where_running(nodes: str, doing: str, left_s: float | None) -> str:
    """Where a job runs; `doing`: empty, or that it is ending or suspended; `left_s`: until its time
    limit, None: not known."""
    if doing:
        return f"it is {doing} on {nodes}"
    if left_s is None:
        return f"on {nodes}"
    return f"on {nodes}; its time limit is in {format_duration(max(0.0, left_s))}"


def no_answer(queue: Scheduler, words: str, done: Result, fix: str) -> UserError:
    """What to raise where a command of a scheduler does not say how a job stands."""
    what, where = f"{words} fails: {last_line(done)}", f"{queue.path(words)} on {queue.shell.name}"
    return UserError(what, where=where, fix=fix, id="queue.commands")


@dataclass(frozen=True, slots=True)
class JobNode:
    """A node of a job: its name as the scheduler writes it, and the address at which the others
    reach it; 127.0.0.1 in a job of one node."""

    name: str
    address: str


class Allocation(ABC):
    """The nodes of a job, as its own script sees them; the coordinator runs there.

    Args:
        attempt: whose script this job runs.
        environ: the variables of the job.

    Attributes:
        job: for messages, such as `Slurm job 4711`.
        job_id: as the scheduler writes it.
        key: a word that no other start of any job has.
        nodes: in the order of their numbers; the first one is this host.
        first_port: added to network.port, so that two jobs on one node begin at different ports.
        wait_s: how long the nodes may take to run, on top of start_timeout.
    """

    brings_back: ClassVar[bool] = False
    """Whether a node that is lost is replaced while the others stay."""

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
        """Command lines that run `python -m isles.agent RUN_DIR --attempt N WORDS` on each node.

        Args:
            words: the agent's further arguments.
            log: a path in which `%n` stands for the number of the node.
        """

    def save_at(self) -> float | None:
        """When to save before the time limit, by time.monotonic(); None: a signal tells."""
        return None

    def is_preempted(self) -> bool:
        """Whether another job takes the nodes, and this one is not queued again by itself."""
        return False

    @abstractmethod
    def queue_again(self) -> str:
        """Queue this job again, to go on; returns what was done, in words.

        Raises:
            UserError: the scheduler refuses.
        """

    def refused(self, what: str) -> UserError:
        """What to raise where the job cannot be queued again."""
        fix = "`isles train` again submits it"
        return UserError(what, where=self.job, fix=fix, id="queue.refused")


def address_of(names: list[str], host: str) -> str:
    """An IPv4 address at which other hosts reach a host: never one of its own loopback.

    Args:
        names: of the host, or addresses, the best first.

    Raises:
        CommunicationError: none of the names has one.
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
        f"no address is known for the node {host}",
        where=f"host {socket.gethostname()}",
        fix=f"getent ahostsv4 {host} should say it; set clusters[0].network.interface otherwise",
        id="net.names",
    )
