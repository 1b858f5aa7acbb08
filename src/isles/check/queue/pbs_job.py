"""The nodes of PBS, checked by the job script of a run that does nothing else: in the job that this
is in, or in a short one that is submitted for it."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from isles.check.finding import Finding
from isles.check.queue.probe import findings_of, probe_run
from isles.check.subject import Subject
from isles.config.resolve import Resolved
from isles.config.sections.cluster import PbsLauncherConfig
from isles.errors import PreflightError, UserError
from isles.launch.pbs.job import Pbs, PbsJob, last_line
from isles.launch.pbs.script import InRunDir, pbs_script
from isles.launch.queue.start import in_workdir, settle
from isles.run.env import pbs_job
from isles.run.paths import RunDir

_RUN_S = 120.0
"""Beyond the wait for nodes: what the check itself may take before it is ended."""

_END_S, _LOOK_S = 20.0, 0.5


def check_in_pbs_job(
    subject: Subject, launcher: PbsLauncherConfig, timeout_s: float
) -> tuple[list[Finding], list[str]]:
    """Findings of the nodes of a job, and their names.

    Args:
        subject: what is checked, with its run file.
        launcher: of the run file.
        timeout_s: longest wait for the nodes, and then for one answer.

    Raises:
        PreflightError: PBS cannot be asked.
        UserError: it does not take the job.
    """
    assert subject.loaded is not None
    with in_workdir(subject.loaded) as workdir:
        resolved = settle(subject.loaded)
        pbs = Pbs(launcher.bin_path)
        with probe_run(subject, resolved) as folder:
            attempt = RunDir(folder).attempt(1)
            script = _script(resolved, launcher, pbs, folder, workdir, timeout_s)
            attempt.script.write_text(script, encoding="utf-8")
            if pbs_job() is not None:
                said = _run_here(attempt.script, timeout_s)
            else:
                said = _submit(pbs, folder, timeout_s)
            log = attempt.path / "pbs.log"
            words = log.read_text(errors="replace").splitlines() if log.exists() else []
            return findings_of(folder, [*words[-2:], said])


def _script(
    resolved: Resolved,
    launcher: PbsLauncherConfig,
    pbs: Pbs,
    folder: Path,
    workdir: Path,
    timeout_s: float,
) -> str:
    cluster = resolved.config.clusters[0]
    minutes = math.ceil((timeout_s + _RUN_S) / 60)
    short = launcher.model_copy(update={"time": 60.0 * minutes, "requeue": False})
    dialect = launcher.dialect if launcher.dialect != "auto" else pbs.dialect()
    return pbs_script(
        resolved.config,
        short,
        dialect,
        InRunDir(str(folder), 1, only_check_s=timeout_s),
        workdir=str(workdir),
        num_ranks=resolved.world_size // cluster.max_nodes,
        device=resolved.device,
    )


def _run_here(script: Path, timeout_s: float) -> str:
    """Run it in the job that this is in; how it ended."""
    process = subprocess.Popen(["bash", str(script)], stdin=subprocess.DEVNULL)
    try:
        return f"the check ended with exit status {process.wait(timeout_s + _RUN_S)}"
    except subprocess.TimeoutExpired:
        return f"the check has not ended within {timeout_s + _RUN_S:.0f} s"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()


def _submit(pbs: Pbs, folder: Path, timeout_s: float) -> str:
    """Submit it, and wait for its end; how that was. Nothing of it stays in the queue."""
    run_dir = RunDir(folder)
    attempt = run_dir.attempt(1)
    done = pbs.run("qsub", str(attempt.script))
    if done.returncode or not done.stdout.strip():
        raise UserError(
            f"PBS does not take the job of the check: {last_line(done)}",
            where=f"{pbs.path('qsub')} on {pbs.shell.name}",
            fix="isles check without --in-job looks at the queue; isles train --dry-run shows what "
            "a run would ask for",
            id="queue.refused",
        )
    launch = {"job_id": done.stdout.split()[-1], "bin_path": pbs.bin_path}
    job = PbsJob.of(run_dir, attempt, launch)
    began, said = time.monotonic(), "it has not begun"
    is_alive, has_begun = True, False
    try:
        while is_alive:
            limit_s = timeout_s + (_RUN_S if has_begun else 0.0)
            if time.monotonic() - began > limit_s:
                return f"{job.text}, after {limit_s:.0f} s: {said}"
            time.sleep(_LOOK_S)
            has_begun = has_begun or (attempt.path / "pbs.log").exists()
            if attempt.findings.exists() or not has_begun or _is_due(began):
                with suppress(PreflightError):
                    report = job.state()
                    said, is_alive = report.reason, report.is_alive
        return f"{job.text}: {said}"
    finally:
        if is_alive:
            with suppress(UserError):
                pbs.run("qdel", job.job_id)


def _is_due(began: float) -> bool:
    """Every few seconds: a job that was killed leaves no word."""
    return int((time.monotonic() - began) / _LOOK_S) % 10 == 0
