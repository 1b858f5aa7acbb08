"""Runs whose directory is on another machine: status, following and stopping over ssh."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isles import __version__
from isles.config.foreign import parse_json
from isles.errors import ExitCode, PreflightError, UserError, cut_more
from isles.facts.console import Console
from isles.facts.terminal import copy_drawn
from isles.facts.units import format_duration
from isles.launch.queue.job import JobReport
from isles.launch.queue.status import refresh_all
from isles.launch.remote.login import ask_isles, pass_on, remote_isles
from isles.launch.ssh.shell import SSH_FAILED, Shell, on_all, python_failure
from isles.monitor.follow import Follower
from isles.monitor.status import ReportState, RunReport, collect
from isles.monitor.stop import WORDS
from isles.run.find import is_run_dir, list_runs, remote_runs
from isles.run.owner import shown_only
from isles.run.paths import RunDir
from isles.run.remote import RemoteRun, forget_remote, keep_report, last_report
from isles.run.state import QUEUES

log = logging.getLogger(__name__)

ANSWER = "ISLES-REPORT "
"""Begins the line with the answer; what a login prints before it is skipped."""

_RETRY_S = 2.0
_GIVE_UP_S = 600.0
"""Time after a lost connection during which isles reconnects."""

_STEADY_S = 20.0
"""After a connection of this length, the time to give up starts from zero again."""


def report_of(found: RunDir | RemoteRun, output_dir: Path) -> RunReport:
    """The status of one run.

    Raises:
        PreflightError: its machine cannot be reached, and has never answered.
    """
    report = reports_of([found], output_dir)[0]
    if isinstance(found, RemoteRun) and report.state == "unreachable" and report.begun_at is None:
        raise PreflightError(
            report.reason,
            where=f"host {found.host}",
            fix=f"try it manually: {Shell(found.ssh).by_hand}",
            id="host.answers",
        )
    return report


def reports_of_all(output_dir: Path) -> list[RunReport]:
    """The status of every run, the newest first, including runs on unreachable machines."""
    reports = reports_of([*list_runs(output_dir), *remote_runs(output_dir)], output_dir)
    return sorted(reports, key=lambda report: report.begun_at or 0.0, reverse=True)


def reports_of(runs: Sequence[RunDir | RemoteRun], output_dir: Path) -> list[RunReport]:
    """The status of some runs, in their order. Queries each machine once, all in parallel."""
    here = [run for run in runs if isinstance(run, RunDir)]
    groups: dict[tuple[object, ...], list[RemoteRun]] = defaultdict(list)
    for run in runs:
        if isinstance(run, RemoteRun) and not run.owner:
            groups[run.ssh, run.lines, run.python].append(run)
    answers, _ = on_all(list(groups.values()), lambda group: _ask(group, output_dir))
    jobs = refresh_all(here)
    found = {id(run): _collected(run, jobs) for run in here}
    for run in runs:
        if isinstance(run, RemoteRun) and run.owner:
            found[id(run)] = _shown_only(run)
    for group, answer in zip(groups.values(), answers, strict=True):
        found |= {id(run): report for run, report in zip(group, answer or (), strict=True)}
    return [found[id(run)] for run in runs]


def records_of(paths: Sequence[Path]) -> str:
    """The answer of `isles status-records` where these run directories are: one line."""
    runs = {path: RunDir(path) for path in paths if is_run_dir(path)}
    jobs = refresh_all(list(runs.values()))
    records = [
        _collected(runs[path], jobs).model_dump() if path in runs else {"gone": True}
        for path in paths
    ]
    return ANSWER + json.dumps({"version": __version__, "reports": records})


def _collected(run: RunDir, jobs: Mapping[Path, JobReport]) -> RunReport:
    # One run with records that isles cannot show must not hide all others.
    try:
        return collect(run, jobs=jobs)
    except UserError as error:
        why = f"{error.where}: {error.what}"
    except Exception as error:  # whatever its records are
        log.debug("%s", run.path, exc_info=True)
        why = f"isles does not understand one of its records ({type(error).__name__})"
    return RunReport(
        name=run.name,
        path=str(run.path.absolute()),
        reason="its records cannot be shown",
        hint=why,
    )


def _ask(runs: Sequence[RemoteRun], output_dir: Path) -> list[RunReport]:
    # All these runs are on one machine.
    first = runs[0]
    try:
        done = ask_isles(first, ["status-records", *(run.path for run in runs)])
        answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
        if not answers:
            failure = python_failure(first.host, first.python, done.returncode, done.stderr)
            noise, id = cut_more(done.stderr)
            words = noise.strip().splitlines()
            what = words[-1] if words else "no answer"
            raise failure or PreflightError(what, where=first.host, id=id or "host.answers")
        version, records = _read_answer(answers[-1].removeprefix(ANSWER), len(runs))
    except UserError as error:
        return [_last_known(run, output_dir, error) for run in runs]
    except ValueError as error:
        wrong = PreflightError(f"no answer of isles: {error}", where=first.host, id="host.answers")
        return [_last_known(run, output_dir, wrong) for run in runs]
    reports = []
    for run, record in zip(runs, records, strict=True):
        if record.get("gone"):
            forget_remote(output_dir, run)
            hint = "its directory is no longer there; it will not be shown again"
            reports.append(_bare(run, "gone", "", hint))
            continue
        try:
            report = RunReport(**{**record, "on": run.ssh})
        except ValidationError:
            what = f"isles {version} there and {__version__} here differ"
            differs = UserError(what, fix="install the same isles on both: isles setup")
            reports.append(_last_known(run, output_dir, differs))
            continue
        keep_report(output_dir, run, record)
        reports.append(report)
    return reports


def _read_answer(text: str, count: int) -> tuple[object, list[dict[str, Any]]]:
    # The version of isles there, and a record for each run. ValueError: they have another form.
    answer = parse_json(text)
    json.dumps(answer, allow_nan=False)  # no number of a report may be NaN or infinite
    records = answer.get("reports") if isinstance(answer, dict) else None
    if not isinstance(records, list) or len(records) != count:
        raise ValueError(f"it does not have the records of {count} runs")
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("a record in it is not an object")
    return answer.get("version"), records


def _shown_only(run: RemoteRun) -> RunReport:
    bare = _bare(run, "unknown", "", shown_only(run.owner))
    return bare.model_copy(update={"owner": run.owner, "begun_at": run.started_at})


def _last_known(run: RemoteRun, output_dir: Path, error: UserError) -> RunReport:
    known = last_report(output_dir, run)
    what = f"{run.host} cannot be asked: {error.what}"
    if known is None:
        return _bare(run, "unreachable", what, error.fix)
    at, record = known
    state = str(record.get("state", ""))
    changes: dict[str, Any] = {"on": run.ssh}
    if state != "finished":  # what is over for good is as it was
        hint = f"{format_duration(time.time() - at)} ago it was {state}"
        hint += f"; {error.fix}" if error.fix else ""
        changes |= {"state": "unreachable", "reason": what, "hint": hint, "phase": None}
    try:
        return RunReport(**{**record, **changes})
    except ValidationError:
        return _bare(run, "unreachable", what, error.fix)


def _bare(run: RemoteRun, state: ReportState, reason: str, hint: str) -> RunReport:
    return RunReport(
        name=run.name,
        path=run.path,
        launcher=run.launcher,
        host=run.host,
        state=state,
        reason=reason,
        hint=hint,
        on=run.ssh,
    )


class RemoteFollower(Follower):
    """Follows a run by `isles follow` on its machine; a connection that is lost is opened again.

    That isles draws the progress on this terminal, and reads signals as words on its stdin.

    Args:
        is_begun: show only new output.
    """

    def __init__(
        self,
        run: RemoteRun,
        attempt: int,
        console: Console,
        errors: Console,
        *,
        is_begun: bool = False,
    ) -> None:
        super().__init__(run.name, run.typed, console, errors)
        self._run = run
        self._words = ["follow", run.path, "--attempt", str(attempt), "--stdin"]
        self._words += ["--width", str(console.width)] if sys.stdout.isatty() else []
        self._is_begun = is_begun
        self._process: subprocess.Popen[bytes] | None = None
        self._readers: list[threading.Thread] = []
        self._tried_at = 0.0
        self._lost_at: float | None = None
        self._printed: set[str] = set()

    def look(self) -> int | None:
        now = time.monotonic()
        if self._process is None:
            if self._lost_at is not None and now - self._tried_at < _RETRY_S:
                return None
            if self._lost_at is not None and now - self._lost_at > _GIVE_UP_S:
                return self._leave(f"{self._run.host} could not be reached again")
            self._connect()
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return None
        for reader in self._readers:
            reader.join(timeout=1.0)
        if code != SSH_FAILED and code >= 0:
            return code
        self.close()
        if self._lost_at is None or now - self._tried_at > _STEADY_S:
            self._lost_at = now
            self.print_line(
                f"the connection to {self._run.host} is lost, but the run continues. isles "
                f"reconnects for {format_duration(_GIVE_UP_S)}. Ctrl+C leaves the run running"
            )
        self._tried_at = now
        return None

    def handle(self, number: signal.Signals) -> int | None:
        if self._process is None:
            return self._leave("not followed any more")
        assert self._process.stdin is not None
        with suppress(OSError):  # the connection is lost: its end says so
            self._process.stdin.write(f"{WORDS[number]}\n".encode())
            self._process.stdin.flush()
        return None

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with suppress(OSError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        if process.poll() is None:
            process.kill()
        process.wait()

    def _connect(self) -> None:
        self._tried_at = time.monotonic()
        words = [*self._words, *(["--begun"] if self._is_begun else [])]
        process = self._process = subprocess.Popen(
            remote_isles(self._run, words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl+C is sent in words there; it must not end the connection.
            start_new_session=True,
        )
        self._is_begun = True

        def read() -> None:
            assert process.stderr is not None
            for raw in process.stderr:
                line = raw.decode(errors="replace").rstrip()
                # Each try to connect again would print the same.
                if self._lost_at is None or line not in self._printed:
                    self.print_line(line)
                self._printed.add(line)

        def draw() -> None:
            assert process.stdout is not None
            with process.stdout, suppress(BrokenPipeError):  # closed: ssh ends, too
                copy_drawn(process.stdout.fileno(), sys.stdout)

        self._readers = [threading.Thread(target=each, daemon=True) for each in (read, draw)]
        for reader in self._readers:
            reader.start()

    def _leave(self, what: str) -> int:
        self.print_line(f"{what}; {self.name} was left running:")
        self.print_line(
            f"  isles status {self.typed} · isles logs -f {self.typed} · isles stop {self.typed}"
        )
        return ExitCode.COMMUNICATION


def stop_remote(
    run: RemoteRun,
    *,
    now: bool,
    timeout: str,
    print_line: Callable[[str], object],
    ask: Callable[[RemoteRun, list[str]], int] = pass_on,
) -> int:
    """Stop a run where its directory is.

    Args:
        ask: runs an isles command there, and returns its exit code.

    Raises:
        PreflightError: its machine cannot be reached.
    """
    words = ["stop", run.path, f"--timeout={timeout}", *(["--now"] if now else [])]
    if run.launcher == "kubernetes":
        return _stop_pods(run, words, print_line, ask)
    try:
        return ask(run, words)
    except PreflightError as error:
        if run.launcher in QUEUES or len(run.hosts) < 2:
            raise
        fix = f"{error.fix}. If it is gone for good: the ranks on the other hosts end by themselves"
        raise PreflightError(error.what, where=error.where, fix=fix, id=error.id) from error


def _stop_pods(
    run: RemoteRun,
    words: list[str],
    print_line: Callable[[str], object],
    ask: Callable[[RemoteRun, list[str]], int],
) -> int:
    # Kubernetes would start pods again for as long as there is a Job: it goes in any case.
    from isles.launch.kubernetes.reach import read_place

    run.require_own()
    place = read_place(run.ssh)
    code = 0
    if any(pod.is_running for pod in place.kubectl.pods(place.job)):
        code = ask(run, words)
    else:
        print_line(f"no pod of {run.name} is running. Its checkpoints are on its volume claim")
    if code == 0:
        place.delete()
    return code
