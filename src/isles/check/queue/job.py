"""`isles check --in-job`: the nodes that a queue gives, checked by a short job or step.

Each node of it runs `isles.check.step` in a folder like a run directory, which it leaves its
findings in. With Slurm that is one `srun`; with PBS the job script of a run that does nothing else;
behind a login node isles there does it.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from isles.check.checks.files import existing
from isles.check.finding import Finding
from isles.check.plan import RunFacts
from isles.config.load import Loaded
from isles.config.resolve import Resolved, dump_resolved
from isles.config.sections.cluster import PbsLauncherConfig, SlurmLauncherConfig
from isles.errors import PreflightError, UserError, cut_more
from isles.launch.queue.job import QueueJob, last_line
from isles.launch.queue.pbs import Pbs, write_dialect
from isles.launch.queue.script import (
    JobText,
    job_script,
    slurm_options,
)
from isles.launch.queue.slurm import Slurm
from isles.launch.queue.submit import in_workdir, resolve_for_job
from isles.launch.remote.login import copied_file_script, login_setting, place_there
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.shell import Shell, python_failure
from isles.run.env import allocation, pbs_job
from isles.run.paths import RunDir
from isles.run.records import read_record

_RUN_S, _LOGIN_S = 120.0, 300.0
"""Beyond the wait for nodes: what the check itself may take before it is ended, and what isles on
a login node may take in all."""

_END_S, _LOOK_S = 20.0, 0.5
_SBATCH_ONLY = ("--output", "--open-mode", "--signal", "--requeue", "--no-requeue", "--time")

_ADDRESS = """\
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
names=$(IFS=,; echo "${hosts[*]}")
for name in "${hosts[0]}" "$(scontrol show node -o "${hosts[0]}" |
  sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')"; do
  address=$(getent ahostsv4 "$name" | awk '$1 !~ /^127[.]/ { print $1; exit }')
  [ -z "$address" ] || break
done"""

Found = tuple[list[Finding], list[str]]
"""Findings, and the names of the nodes."""


def check_in_job(run: RunFacts, timeout_s: float, overrides: Sequence[str]) -> Found:
    """Check the nodes that the queue gives, or those of the job that this process is in.

    Args:
        run: what is checked, with its run file.
        timeout_s: longest wait for the nodes, and then for one answer.
        overrides: of the command line, for isles on a login node.

    Raises:
        UserError: there is nothing to submit, or the queue or login node refuses.
    """
    launcher, loaded = run.cluster.launcher, run.loaded
    if not isinstance(launcher, SlurmLauncherConfig | PbsLauncherConfig) or loaded is None:
        raise UserError(
            f"--in-job is for a run file with launcher: slurm or pbs, and this has {launcher.kind}",
            where="command line",
            fix="leave it out",
        )
    if launcher.login is not None:
        return _on_login(loaded, launcher.login, timeout_s, overrides)
    with in_workdir(loaded) as workdir:
        resolved = resolve_for_job(loaded)
        with _folder(run.output_dir, loaded, resolved) as folder:
            if isinstance(launcher, PbsLauncherConfig):
                output = _pbs(resolved, launcher, folder, workdir, timeout_s)
            else:
                output = _srun(resolved, launcher, folder, workdir, timeout_s)
            record: dict[str, Any] | None = read_record(RunDir(folder).attempt(1).findings)
    if record is not None:
        return [Finding(**finding) for finding in record["findings"]], record["hosts"]
    text = f"no node has answered: {'; '.join(output[-3:])}"
    fix = "are nodes free? isles check without --in-job says which are; --timeout 10m waits longer "
    fix += "for them"
    return [Finding("step.nodes", "error", "the job", text, "no answer", fix=fix)], ["the job"]


@contextmanager
def _folder(output_dir: str, loaded: Loaded, resolved: Resolved) -> Iterator[Path]:
    # Beside the run directories, in the form that `isles.check.step` reads.
    above = existing(Path(output_dir).expanduser())
    folder = Path(tempfile.mkdtemp(prefix=".isles-check-", dir=above))
    try:
        run_dir = RunDir(folder)
        run_dir.attempt(1).path.mkdir(parents=True)
        run_dir.resolved.write_text(dump_resolved(resolved), encoding="utf-8")
        run_dir.run_file.write_text(loaded.text, encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _srun(
    resolved: Resolved,
    launcher: SlurmLauncherConfig,
    folder: Path,
    workdir: Path,
    timeout_s: float,
) -> list[str]:
    # One task a node, with the nodes that the run would ask for; the lines of srun.
    cluster = resolved.config.clusters[0]
    nodes = cluster.max_nodes
    job = JobText(launcher, nodes, resolved.world_size // nodes, resolved.device, str(workdir))
    options = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    if allocation() is None:
        options = [
            option
            for option in slurm_options(resolved.config, job)
            if not option.startswith(_SBATCH_ONLY)
        ]
        minutes = int((timeout_s + _RUN_S) // 60 + 1)
        options += [f"--time={minutes}", f"--immediate={round(timeout_s)}"]
    python = shlex.quote(python_of(cluster.environment))
    step = f"exec {python} -m isles.check.step {shlex.quote(str(folder))} --attempt 1"
    step += ' --node "$SLURM_NODEID" --hosts "$names"'
    step += f' --master "$address:{cluster.network.port}" --timeout {timeout_s:.0f}'
    script = "\n".join([*setting_lines(cluster, str(workdir)), _ADDRESS, step])
    command = [Slurm(launcher.bin_path).path("srun"), *options, "bash", "-c", script]
    try:
        done = Shell().run(command, timeout_s=timeout_s + _RUN_S)
    except PreflightError as error:
        return [error.what[:200]]
    return done.stderr.strip().splitlines() or ["srun ended without a word"]


def _pbs(
    resolved: Resolved, launcher: PbsLauncherConfig, folder: Path, workdir: Path, timeout_s: float
) -> list[str]:
    # The job script of a run that only checks, here or submitted; its last lines.
    cluster, pbs = resolved.config.clusters[0], Pbs(launcher.bin_path)
    seconds = 60.0 * math.ceil((timeout_s + _RUN_S) / 60)
    dialect = launcher.dialect if launcher.dialect != "auto" else pbs.dialect()
    attempt = RunDir(folder).attempt(1)
    write_dialect(attempt, dialect)
    own = {"time": seconds, "requeue": False, "dialect": dialect}
    job = JobText(
        launcher=launcher.model_copy(update=own),
        nodes=cluster.max_nodes,
        nproc=resolved.world_size // cluster.max_nodes,
        device=resolved.device,
        workdir=str(workdir),
        run_dir=str(folder),
        attempt=1,
        only_check_s=timeout_s,
    )
    attempt.script.write_text(job_script(resolved.config, job), encoding="utf-8")
    if pbs_job() is not None:
        output = _run_here(attempt.script, timeout_s + _RUN_S)
    else:
        output = _submit(pbs, RunDir(folder), timeout_s)
    log = attempt.path / "pbs.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [*lines[-2:], output]


def _run_here(script: Path, timeout_s: float) -> str:
    process = subprocess.Popen(["bash", str(script)], stdin=subprocess.DEVNULL)
    try:
        return f"the check ended with exit status {process.wait(timeout_s)}"
    except subprocess.TimeoutExpired:
        return f"the check has not ended within {timeout_s:.0f} s"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()


def _submit(pbs: Pbs, run_dir: RunDir, timeout_s: float) -> str:
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
    job = QueueJob(run_dir, attempt, done.stdout.split()[-1], pbs)
    began, output = time.monotonic(), "it has not begun"
    is_alive, has_begun = True, False
    try:
        while is_alive:
            limit_s = timeout_s + (_RUN_S if has_begun else 0.0)
            if time.monotonic() - began > limit_s:
                return f"{job.text}, after {limit_s:.0f} s: {output}"
            time.sleep(_LOOK_S)
            has_begun = has_begun or (attempt.path / "pbs.log").exists()
            # Every few seconds also while it runs: a job that was killed leaves no word.
            is_due = int((time.monotonic() - began) / _LOOK_S) % 10 == 0
            if attempt.findings.exists() or not has_begun or is_due:
                with suppress(PreflightError):
                    report = job.look()
                    output, is_alive = report.reason, report.is_alive
        return f"{job.text}: {output}"
    finally:
        if is_alive:
            with suppress(UserError):
                pbs.run("qdel", job.job_id)


def _on_login(loaded: Loaded, login: str, timeout_s: float, overrides: Sequence[str]) -> Found:
    lines, python = login_setting(loaded)
    there = place_there(loaded)
    words = ["check", there, *overrides, "clusters.0.launcher.login=null", "--in-job", "--json"]
    script = copied_file_script(there, lines, python, [*words, f"--timeout={timeout_s:.0f}s"])
    shell = Shell(login)
    done = shell.run(["bash", "-c", script], stdin=loaded.text, timeout_s=timeout_s + _LOGIN_S)
    start = done.stdout.find("{")
    if start >= 0:
        answer = json.loads(done.stdout[start:])
        findings = [Finding(**finding) for finding in answer["findings"]]
        columns = [finding.where for finding in findings if finding.id == "os.kernel"]
        return findings, columns or ["the job"]
    text = done.stderr.replace(there, str(loaded.path)).strip()
    if failure := python_failure(login, python, done.returncode, text):
        raise failure
    text, id = cut_more(text)
    what, _, fix = text.partition("\n  fix: ")
    if what.startswith("error: "):
        raise UserError(what.removeprefix("error: "), where=f"host {login}", fix=fix, id=id)
    raise PreflightError(
        f"isles could not check there: {text or f'exit status {done.returncode}'}",
        where=f"host {login}",
        fix=f"try it by hand: ssh {login}",
        id="host.login",
    )
