"""`isles check --in-job`: the nodes of a queue, checked by a short job of one task each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from isles.check.finding import Finding
from isles.check.queue.probe import findings_of, probe_run
from isles.check.subject import Subject
from isles.config.resolve import Resolved
from isles.config.sections.cluster import LauncherConfig, PbsLauncherConfig, SlurmLauncherConfig
from isles.errors import PreflightError, UserError
from isles.launch.queue.start import in_workdir, settle
from isles.launch.slurm.job import Slurm
from isles.launch.slurm.script import JobText, sbatch_options
from isles.launch.ssh.setting import python_of, setting_lines
from isles.launch.ssh.shell import Shell
from isles.run.env import allocation

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
    subject: Subject,
    launcher: LauncherConfig,
    timeout_s: float,
    overrides: Sequence[str] = (),
) -> tuple[list[Finding], list[str]]:
    """Findings of the nodes that the queue gives, or of the job that this is in, and their names.

    Args:
        subject: what is checked, with its run file.
        launcher: of the run file.
        timeout_s: longest wait for the nodes, and then for one answer.
        overrides: of the command line, for isles on a login node.

    Raises:
        UserError: there is nothing to submit, or the login node cannot do it.
    """
    if not isinstance(launcher, SlurmLauncherConfig | PbsLauncherConfig) or subject.loaded is None:
        raise UserError(
            f"--in-job is for a run file with launcher: slurm or pbs, and this has {launcher.kind}",
            where="command line",
            fix="leave it out",
        )
    if launcher.login is not None:
        from isles.check.queue.login import check_on_login

        return check_on_login(subject.loaded, launcher.login, timeout_s, overrides)
    if isinstance(launcher, PbsLauncherConfig):
        from isles.check.queue.pbs_job import check_in_pbs_job

        return check_in_pbs_job(subject, launcher, timeout_s)
    with in_workdir(subject.loaded) as workdir:
        resolved = settle(subject.loaded)
        with probe_run(subject, resolved) as folder:
            command = _srun(resolved, launcher, folder, workdir, timeout_s)
            return _ask(Slurm(launcher.bin_path), command, folder, timeout_s)


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
    step = f"exec {python} -m isles.check.step {shlex.quote(str(folder))} --attempt 1"
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
    return findings_of(folder, said or ["srun ended without a word"])
