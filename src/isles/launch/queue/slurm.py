"""Slurm: its commands, and the nodes of a job."""

from __future__ import annotations

import difflib
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from isles.config.load import Loaded
from isles.config.sections.cluster import SlurmLauncherConfig
from isles.errors import ExitCode, PreflightError, UserError
from isles.facts.units import format_duration
from isles.launch.container.enter import Container, step_environ, step_options
from isles.launch.queue.job import (
    JobAllocation,
    JobNode,
    JobReport,
    JobState,
    QueueJob,
    Scheduler,
    address_of,
    explain,
    hand_on,
    no_answer,
    where_running,
    words_of,
)
from isles.launch.ssh.shell import CommandResult
from isles.run.paths import Attempt
from isles.run.process import handled
from isles.run.records import read_record

_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_BAD_NODES = "drain,down,fail,maint"
_FIELD = re.compile(r"(?:^|\s)([A-Za-z/:]+)=(.*?)(?=\s+[A-Za-z/:]+=|\s*$)")
_NAMED_NODES = 8
_UP = "check that slurmctld is running: scontrol ping"


class Slurm(Scheduler):
    """Slurm's commands on one machine."""

    name = "Slurm"
    submit_command = ("sbatch", "--parsable")
    cancel_command = "scancel"
    array_option = r"\s*(--array|-a)(=|\s|\d|$)"
    new_words = ("PENDING", "PENDING Priority")
    own_options = (
        (
            r"--signal(=|$)",
            "set clusters.0.launcher.save_before instead, the time between saving and the time "
            "limit",
        ),
        (r"(--output|--error)(=|$)|-[oe]", "see the job's output with `isles logs`"),
        (r"(--wait|-W)$", "`isles train` follows the run until it ends"),
    )

    def submit(self, script: Path, *options: str) -> CommandResult:
        """See `Scheduler.submit`.

        Options of the script are also passed on the command line: variables of the user's shell,
        such as SBATCH_PARTITION, override the script's lines. Some variables have no such option.
        """
        lines = script.read_text(encoding="utf-8").splitlines()
        found = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
        said = [word for option in found for word in _option_words(option)]
        unset = [f"--unset=SBATCH_{name}" for name in ("ARRAY_INX", "ERROR", "WAIT")]
        command = [self.path("sbatch"), "--parsable", *said, *options, str(script)]
        return self.shell.run(["env", *unset, *command], timeout_s=self.ask_s)

    def submitted_id(self, done: CommandResult) -> str | None:
        job_id = done.stdout.strip().partition(";")[0]
        return job_id if done.returncode == 0 and job_id.isdecimal() else None

    def look(self, attempt: Attempt, job_id: str) -> JobReport:
        done = self.run("scontrol", "show", "job", "-o", job_id)
        if done.returncode == 0 and done.stdout.strip():
            fields = {m[1]: m[2].strip() for m in _FIELD.finditer(done.stdout.strip())}
        elif "invalid job id" in done.stderr.lower():
            fields = self._from_accounting(job_id)
        else:
            raise no_answer(self, "scontrol show job", done, _UP)
        word, why = fields.get("JobState", "UNKNOWN"), fields.get("Reason", "None")
        state: JobState = "ended"
        if word in _WAITING:
            has_run = fields.get("Restarts", "0") != "0" or attempt.rank_record(0).exists()
            state = "requeued" if has_run else "pending"
            reason, fix = self._why_waiting(fields, word, why, job_id)
        elif word in _RUNNING:
            end = _time_of(fields.get("EndTime", ""))
            if fields.get("TimeLimit", "UNLIMITED") == "UNLIMITED":
                end = None
            left_s = None if end is None else end - time.time()
            doing = {"COMPLETING": "ending", "SUSPENDED": "suspended"}.get(word, "")
            nodes = fields.get("NodeList", "").replace("(null)", "")
            state, reason, fix = "running", where_running(nodes, doing, left_s), ""
        else:
            reason, fix = _how_ended(fields, word, why, job_id)
        return JobReport(state, reason, job_id, word if why == "None" else f"{word} {why}", fix)

    def exit_code(self, attempt: Attempt, report: JobReport) -> tuple[ExitCode, bool]:
        if (stopped := read_record(attempt.stopped)) is not None:
            return ExitCode(int(stopped["exit_code"])), True
        word, _, why = report.word.partition(" ")
        known = _row(word, why)
        code = ExitCode[known[1]] if known is not None else ExitCode.TRAINING
        return code, code in (ExitCode.INTERRUPTED, ExitCode.REQUEUE)

    def output(self, attempt: Attempt, job_id: str) -> Path:
        return attempt.path / f"slurm-{job_id}.out"

    def ask_to_save(self, job: QueueJob) -> None:
        # The script reads the request, on the host that sees the file immediately.
        self.cancel(job, "--signal=USR1", "--batch")

    def hasten(self, report: JobReport) -> str:
        # Slurm holds a requeued job for two minutes.
        if report.state != "requeued" or report.word.partition(" ")[2] not in ("", "BeginTime"):
            return ""
        done = self.run("scontrol", "update", f"jobid={report.job_id}", "StartTime=now")
        return f"{_HELD}; isles has asked Slurm to start it now" if not done.returncode else ""

    def refusal_fix(self, key: str, loaded: Loaded) -> str:
        """See Scheduler: lists the partitions."""
        launcher = loaded.config.clusters[0].launcher
        if key != "partition" or not isinstance(launcher, SlurmLauncherConfig):
            return ""
        try:
            names = self.run("sinfo", "-h", "-o", "%R").stdout.split()
        except PreflightError:
            return ""
        near = difflib.get_close_matches(launcher.partition or "", names, n=1)
        if near and near[0] != launcher.partition:
            return f"did you mean {near[0]}? There are: {', '.join(names)}"
        return f"the partitions are: {', '.join(names)}" if names else ""

    def _why_waiting(
        self, fields: dict[str, str], word: str, why: str, job_id: str
    ) -> tuple[str, str]:
        if word == "CONFIGURING":
            return "its nodes are being switched on", ""
        reason, fix = pending(why, job_id)
        if why == "BeginTime" and fields.get("Restarts", "0") != "0":
            reason = _HELD
        named = re.search(r"UnavailableNodes:(\S+)", why)
        if named is not None or why.startswith(("Nodes_required", "NodeDown", "Resources")):
            partition = ("-p", fields.get("Partition", ""), "-t", _BAD_NODES)
            reason += self._bad_nodes(*(("-n", named[1]) if named else partition))
        start = _time_of(fields.get("StartTime", ""))
        if start is not None and start > time.time():
            until = "starts" if why == "BeginTime" else "expected to start"
            reason += f"; {until} in {format_duration(start - time.time())}"
        return reason, fix

    def _bad_nodes(self, *query: str) -> str:
        # The drained or failed nodes, with the administrator's reason.
        try:
            done = self.run("sinfo", "-h", "-N", *query, "-o", "%n|%T|%E")
        except UserError:
            return ""
        texts = []
        for line in sorted({line.strip() for line in done.stdout.splitlines()}):
            if line.count("|") == 2:
                name, state, text = line.split("|")
                texts.append(f"{name} is {state}" + (f" ({text})" if text != "none" else ""))
        more = f" and {len(texts) - _NAMED_NODES} more" if len(texts) > _NAMED_NODES else ""
        return f": {', '.join(texts[:_NAMED_NODES])}{more}" if texts else ""

    def _from_accounting(self, job_id: str) -> dict[str, str]:
        # slurmctld forgets a job some minutes after its end; accounting may still have it.
        try:
            done = self.run("sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,ExitCode")
        except UserError:
            return {}
        rows = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
        if done.returncode or not rows:
            return {}
        return {"JobState": rows[-1][0].split(" ")[0], "ExitCode": rows[-1][1]}


_HELD = "Slurm holds a job for two minutes after requeueing it"


def _option_words(option: str) -> list[str]:
    # The words of a line of options; empty if sbatch would read one of them as the script.
    words, before = shlex.split(option, comments=True), "="
    for word in words:
        if not word.startswith("-") and (not before.startswith("-") or "=" in before):
            return []
        before = word
    return words


def pending(why: str, job_id: str) -> tuple[str, str]:
    """Why a job waits, and a fix, from Slurm's reason."""
    head = why.partition(",")[0]
    limits = {"QOS": "qos", "Assoc": "account", "Part": "partition"}
    whose = next((word for sign, word in limits.items() if head.startswith(sign)), "")
    return explain("slurm", "pending", head, job=job_id, whose=whose) or (why.replace("_", " "), "")


def _row(word: str, why: str) -> list[str] | None:
    # The table's text for a job that ended in this state, for this reason.
    rows: dict[str, list[str]] = words_of("slurm")["ended"]
    return rows.get(word) or rows.get(why)


def _how_ended(fields: dict[str, str], word: str, why: str, job_id: str) -> tuple[str, str]:
    if word == "UNKNOWN":
        return "it is over, and Slurm has no further record of it", ""
    if (known := _row(word, why)) is not None:
        return known[0], known[2]
    if word == "FAILED" and why not in ("None", "NonZeroExitCode"):
        return pending(why, job_id)
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    if number not in ("", "0"):
        return f"its script was killed by signal {number}", "see the end of its output"
    if word == "COMPLETED" and code == "0":
        return "its script has ended", ""
    return f"its script ended with exit code {code}", "see the end of its output"


def _time_of(text: str) -> float | None:
    # Slurm prints times in the time zone of its machine.
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").astimezone().timestamp()
    except ValueError:
        return None


class SlurmAllocation(JobAllocation):
    """The nodes of a Slurm job."""

    def __init__(
        self,
        launcher: SlurmLauncherConfig,
        attempt: Attempt,
        environ: Mapping[str, str],
        container: Mapping[str, Any] | None = None,
    ) -> None:
        self._container = Container.of(container) if container is not None else None
        self._slurm = Slurm(launcher.bin_path)
        super().__init__(self._slurm, environ["SLURM_JOB_ID"], attempt, environ)
        self.key = f"{self.job_id}-{environ.get('SLURM_RESTART_COUNT', '0')}"
        self._cpus = launcher.cpus_per_node
        hosts = self._run("scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]).split()
        self.nodes = [JobNode(host, self._address(host, len(hosts))) for host in hosts]

    def _address(self, host: str, num_hosts: int) -> str:
        if num_hosts == 1:
            return "127.0.0.1"  # opens no port to the network
        # Nodes may not be able to resolve each other's names, so use Slurm's own address.
        found = re.search(r" NodeAddr=(\S+)", self._run("scontrol", "show", "node", "-o", host))
        return address_of([host, found[1] if found else host], host)

    def on_all_nodes(self, words: list[str], log: Path) -> list[list[str]]:
        """See JobAllocation: one task per node, which may use all cores of the job on that node."""
        nodes = len(self.nodes)
        step = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        # Since Slurm 22.05 a step does not inherit this from its job.
        step += [f"--cpus-per-task={self._cpus}"] if self._cpus else []
        step += ["--cpu-bind=none", "--export=ALL"]
        # The coordinator decides about the other nodes when a node is lost.
        step += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
        step += ["--output", str(log.parent).replace("%", "%%") + f"/{log.name}"]
        srun, run_dir = self._slurm.path("srun"), self._attempt.path.parent.parent
        python, before = sys.executable, list[str]()
        if self._container is not None:
            options = step_options(self._container, srun, [Path.cwd(), run_dir])
            if options is not None:
                step += options
                python, before = self._container.python, step_environ(self._container)
        agent = ["-m", "isles.agent", str(run_dir)]
        agent += ["--attempt", str(self._attempt.number), *words]
        return [[*before, srun, *step, "--open-mode=append", python, *agent]]

    def is_preempted(self) -> bool:
        """See JobAllocation: a job with a grace period gets SIGTERM, and is not requeued."""
        text = self._run("scontrol", "show", "job", "-o", self.job_id)
        return re.search(r" PreemptTime=\d", text) is not None

    def queue_again(self) -> str:
        # Slurm kills this job to requeue it, and would kill scontrol before it answers.
        with handled(signal.SIG_IGN, signal.SIGTERM):
            done = self._slurm.run("scontrol", "requeue", self.job_id)
        if done.returncode == 0:
            return f"{self.job} is queued again, to resume the run"
        hand_on(self._attempt)
        again = self._slurm.submit(self._attempt.script, f"--dependency=afterany:{self.job_id}")
        new = self._slurm.submitted_id(again)
        if new is None:
            error = again.stderr.strip() or done.stderr.strip() or "no output of sbatch"
            raise self.refused(error)
        hand_on(self._attempt, new)
        return f"Slurm does not requeue this job; the run continues as job {new}"

    def _run(self, command: str, *args: str) -> str:
        done = self._slurm.run(command, *args)
        if done.returncode:
            raise PreflightError(
                f"{command} {' '.join(args)} failed: {done.stderr.strip()}",
                where=self.job,
                fix=_UP,
                id="queue.commands",
            )
        return done.stdout
