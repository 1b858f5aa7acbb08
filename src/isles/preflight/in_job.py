"""`isles check --in-job`: the nodes of Slurm, checked by a short job of one task each."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isles.config.launcher import LauncherConfig, SlurmLauncherConfig
from isles.config.resolve import Resolved, dump_resolved
from isles.errors import PreflightError, UserError
from isles.launch.queue_start import in_workdir, settle
from isles.launch.setting import python_of, setting_lines
from isles.launch.shell import Shell
from isles.launch.slurm_queue import Slurm
from isles.launch.slurm_script import JobText, sbatch_options
from isles.preflight.finding import Finding
from isles.preflight.subject import Subject
from isles.rundir.env import allocation
from isles.rundir.paths import RunDir
from isles.rundir.records import read_record

_SBATCH_ONLY = ("--output", "--open-mode", "--signal", "--requeue", "--no-requeue", "--time")
_RUN_S = 120.0
"""Beyond the wait for nodes: what the check itself may take before srun is ended."""

_ADDRESS = """\
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
names=$(IFS=,; echo "${hosts[*]}")
for name in "${hosts[0]}" "$(scontrol show node -o "${hosts[0]}" |
  sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')"; do
  address=$(getent ahostsv4 "$name" | awk '$1 !~ /^127[.]/ { print $1; exit }')
  [ -z "$address" ] || break
done"""


def check_in_job(
    subject: Subject, launcher: LauncherConfig, timeout_s: float
) -> tuple[list[Finding], list[str]]:
    """Findings of the nodes that Slurm gives, and their names.

    Args:
        subject: what is checked, with its run file.
        launcher: of the run file.
        timeout_s: longest wait for the nodes, and then for one answer.

    Raises:
        UserError: there is nothing to submit, or not here.
    """
    if not isinstance(launcher, SlurmLauncherConfig) or subject.loaded is None:
        raise UserError(
            f"--in-job is for a run file with launcher: slurm, and this has {launcher.kind}",
            where="command line",
            fix="leave it out; in a job of PBS call isles.preflight.step, see docs/check.md",
        )
    if launcher.login is not None:
        raise UserError(
            f"--in-job starts a job from here, and the run file has login: {launcher.login}",
            where=subject.loaded.where("clusters.0.launcher.login"),
            fix=f"ssh {launcher.login}, and there: isles check run.yaml --in-job "
            "clusters.0.launcher.login=null",
        )
    with in_workdir(subject.loaded) as workdir:
        resolved = settle(subject.loaded)
        above = Path(subject.output_dir).expanduser().absolute()
        while not above.exists():
            above = above.parent
        folder = Path(tempfile.mkdtemp(prefix=".isles-check-", dir=above))
        try:
            _fill(folder, resolved, subject.loaded.text)
            command = _srun(resolved, launcher, folder, workdir, timeout_s)
            return _ask(Slurm(launcher.bin_path), command, folder, timeout_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, resolved: Resolved, text: str) -> None:
    run_dir = RunDir(folder)
    run_dir.attempt(1).path.mkdir(parents=True)
    run_dir.resolved.write_text(dump_resolved(resolved), encoding="utf-8")
    run_dir.run_file.write_text(text, encoding="utf-8")


def _srun(
    resolved: Resolved,
    launcher: SlurmLauncherConfig,
    folder: Path,
    workdir: Path,
    timeout_s: float,
) -> list[str]:
    """What follows `srun`: one task a node, with the nodes that the run would ask for."""
    cluster = resolved.config.clusters[0]
    nodes = cluster.max_nodes
    job = JobText(launcher, nodes, resolved.world_size // nodes, resolved.device, str(workdir), ())
    options = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    if allocation() is None:
        options = [
            option
            for option in sbatch_options(resolved.config, job)
            if not option.startswith(_SBATCH_ONLY)
        ]
        minutes = int((timeout_s + _RUN_S) // 60 + 1)
        options += [f"--time={minutes}", f"--immediate={round(timeout_s)}"]
    python = shlex.quote(python_of(cluster.environment))
    step = f"exec {python} -m isles.preflight.step {shlex.quote(str(folder))} --attempt 1"
    step += ' --node "$SLURM_NODEID" --hosts "$names"'
    step += f' --master "$address:{cluster.network.port}" --timeout {timeout_s:.0f}'
    lines = [*setting_lines(cluster, str(workdir)), _ADDRESS, step]
    return [*options, "bash", "-c", "\n".join(lines)]


def _ask(
    slurm: Slurm, command: Sequence[str], folder: Path, timeout_s: float
) -> tuple[list[Finding], list[str]]:
    shell = Shell()
    try:
        done = shell.run([slurm.path("srun"), *command], timeout_s=timeout_s + _RUN_S)
        said = done.stderr.strip().splitlines()
    except PreflightError as error:
        said = [error.what[:200]]
    record: dict[str, Any] | None = read_record(RunDir(folder).attempt(1).findings)
    if record is not None:
        return [Finding(**finding) for finding in record["findings"]], record["hosts"]
    finding = Finding(
        "step.nodes",
        "error",
        "the job",
        f"no node has answered: {'; '.join(said[-3:]) or 'srun ended without a word'}",
        measured="no answer",
        fix="are nodes free? isles check without --in-job says which are; --timeout 10m waits "
        "longer for them",
    )
    return [finding], ["the job"]
