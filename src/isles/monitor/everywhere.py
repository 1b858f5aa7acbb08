"""How runs stand on all machines: those that are seen here, and those that ssh must ask about."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isles import __version__
from isles.errors import PreflightError, UserError, cut_more
from isles.facts.units import format_duration
from isles.launch.queue.jobs import refresh_all
from isles.launch.remote.passing import lost_python, remote_script
from isles.launch.ssh.shell import Shell, on_all
from isles.monitor.collect import RunReport, collect
from isles.run.find import is_run_dir, list_runs, remote_runs
from isles.run.paths import RunDir
from isles.run.remote import RemoteRun, forget_remote, keep_report, last_report

ANSWER = "ISLES-REPORT "
"""Begins the line with the answer; what a login prints before it is skipped."""

_CONNECT_S = 5.0
_ANSWER_S = 15.0
"""Longest wait for a machine; all of them are asked at once."""


def report_of(found: RunDir | RemoteRun, output_dir: Path) -> RunReport:
    """How one run stands.

    Args:
        found: the run, of `find_any`.
        output_dir: where runs of other machines are remembered.

    Raises:
        PreflightError: its machine cannot be reached, and has never told anything.
    """
    if isinstance(found, RunDir):
        return collect(found, jobs=refresh_all([found]))
    report = _ask([found], output_dir)[0]
    if report.state == "unreachable" and report.begun_at is None:
        raise PreflightError(
            report.reason,
            where=f"host {found.host}",
            fix=f"try it by hand: ssh {found.ssh}",
            id="host.answers",
        )
    return report


def reports_of_all(output_dir: Path) -> list[RunReport]:
    """How every run stands, the newest first; a machine that cannot be reached is said so."""
    reports = reports_of([*list_runs(output_dir), *remote_runs(output_dir)], output_dir)
    return sorted(reports, key=lambda report: report.begun_at or 0.0, reverse=True)


def reports_of(runs: Sequence[RunDir | RemoteRun], output_dir: Path) -> list[RunReport]:
    """How some runs stand, in their order; each machine is asked once, and all at once.

    Args:
        runs: of `find_any`.
        output_dir: where runs of other machines are remembered.
    """
    here = [run for run in runs if isinstance(run, RunDir)]
    groups: dict[tuple[object, ...], list[RemoteRun]] = defaultdict(list)
    for run in runs:
        if isinstance(run, RemoteRun):
            groups[run.ssh, run.lines, run.python].append(run)
    answers, _ = on_all(list(groups.values()), lambda group: _ask(group, output_dir))
    jobs = refresh_all(here)
    found = {id(run): collect(run, jobs=jobs) for run in here}
    for group, answer in zip(groups.values(), answers, strict=True):
        found |= {id(run): report for run, report in zip(group, answer or (), strict=True)}
    return [found[id(run)] for run in runs]


def records_of(paths: Sequence[Path]) -> str:
    """The answer of the machine that has these run directories, as one line."""
    runs = {path: RunDir(path) for path in paths if is_run_dir(path)}
    jobs = refresh_all(list(runs.values()))
    records = [
        collect(runs[path], jobs=jobs).record() if path in runs else {"gone": True}
        for path in paths
    ]
    return ANSWER + json.dumps({"version": __version__, "reports": records})


def _ask(runs: Sequence[RemoteRun], output_dir: Path) -> list[RunReport]:
    """Ask one machine about its runs."""
    first = runs[0]
    shell = Shell(first.ssh, _CONNECT_S)
    script = remote_script(first, ["report", *(run.path for run in runs)])
    try:
        done = shell.run(["bash", "-c", script], timeout_s=_ANSWER_S)
        said = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
        if not said:
            fault = lost_python(first.host, first.python, done.stderr, done.returncode)
            noise, id = cut_more(done.stderr)
            words = noise.strip().splitlines()
            what = words[-1] if words else "no answer"
            raise fault or PreflightError(what, where=first.host, id=id or "host.answers")
        answer = json.loads(said[-1].removeprefix(ANSWER))
    except UserError as error:
        return [_last_known(run, output_dir, error) for run in runs]
    reports = []
    for run, record in zip(runs, answer["reports"], strict=True):
        if record.get("gone"):
            forget_remote(output_dir, run)
            hint = "its directory is no longer there; it will not be shown again"
            reports.append(_bare(run, "gone", "", hint))
            continue
        keep_report(output_dir, run, record)
        reports.append(RunReport.of(record, on=run.ssh))
    return reports


def _last_known(run: RemoteRun, output_dir: Path, error: UserError) -> RunReport:
    known = last_report(output_dir, run)
    what = f"{run.host} cannot be asked: {error.what}"
    if known is None:
        return _bare(run, "unreachable", what, error.fix)
    at, record = known
    state = str(record.get("state", ""))
    changes: dict[str, Any] = {"on": run.ssh}
    if state != "finished":
        # What is over for good is as it was.
        age = format_duration(time.time() - at)
        hint = (
            f"{age} ago it was {state}; {error.fix}" if error.fix else f"{age} ago it was {state}"
        )
        changes |= {"state": "unreachable", "reason": what, "hint": hint, "phase": None}
    return RunReport.of(record, **changes)


def _bare(run: RemoteRun, state: str, reason: str, hint: str) -> RunReport:
    record = {"name": run.name, "path": run.path, "launcher": run.launcher, "host": run.host}
    return RunReport.of(record, state=state, reason=reason, hint=hint, on=run.ssh)
