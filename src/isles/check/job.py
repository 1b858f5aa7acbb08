"""`isles check --in-job`: checks the nodes of Slurm in a short job or step.

Each node runs `isles.check.step` in a folder like a run directory, and writes its findings there.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isles.check.checks.files import existing
from isles.check.finding import Finding
from isles.check.plan import CheckedRun
from isles.config.load import Loaded
from isles.config.resolve import Resolved, dump_resolved
from isles.config.sections.cluster import PbsLauncherConfig, SlurmLauncherConfig
from isles.errors import PreflightError, UserError
from isles.launch.base import resolve_for_nodes
from isles.launch.container.enter import Container, container_record, step_options
from isles.launch.queue.script import JobText, slurm_options
from isles.launch.queue.slurm import Slurm
from isles.launch.queue.submit import in_workdir
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.shell import Shell
from isles.run.env import allocation
from isles.run.paths import RunDir
from isles.run.records import MAX_LIST_BYTES, explain_write_errors, read_record

_RUN_S = 120.0
"""Time limit of the check itself, after the wait for nodes."""

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
"""Findings and names of the nodes."""


def check_in_job(run: CheckedRun, timeout_s: float) -> Found:
    """Check nodes from Slurm, or the nodes of the job that runs this process.

    Args:
        timeout_s: longest wait for the nodes, and then for one answer.

    Raises:
        UserError: there is nothing to submit, or Slurm refuses.
    """
    launcher, loaded = run.cluster.launcher, run.loaded
    if not isinstance(launcher, SlurmLauncherConfig) or loaded is None:
        is_pbs = isinstance(launcher, PbsLauncherConfig)
        raise UserError(
            f"--in-job needs a run file with launcher slurm, and this one has {launcher.kind}",
            where="command line",
            fix="set clusters.0.launcher.check=true: the job then checks its nodes first"
            if is_pbs
            else "remove --in-job",
        )
    if launcher.login is not None:
        raise UserError(
            f"--in-job uses the Slurm of this machine, and the run file names {launcher.login}",
            where="command line",
            fix="run it on that host, with clusters.0.launcher.login=null; or set "
            "clusters.0.launcher.check=true: the job then checks its nodes first",
        )
    with in_workdir(loaded) as workdir:
        resolved = resolve_for_nodes(loaded)
        with _folder(run.output_dir, loaded, resolved) as folder:
            output = _srun(resolved, launcher, folder, workdir, timeout_s)
            record: dict[str, Any] | None = read_record(
                RunDir(folder).attempt(1).findings, MAX_LIST_BYTES
            )
    if record is not None:
        return [Finding(**finding) for finding in record["findings"]], record["hosts"]
    text = f"no response from any node: {'; '.join(output[-3:])}"
    fix = "see the free nodes with isles check without --in-job; --timeout 10m waits longer "
    fix += "for them"
    return [Finding("step.nodes", "error", "the job", text, "no answer", fix=fix)], ["the job"]


@contextmanager
def _folder(output_dir: str, loaded: Loaded, resolved: Resolved) -> Iterator[Path]:
    # Next to the run directories, in the form that `isles.check.step` reads.
    above = existing(Path(output_dir).expanduser())
    with explain_write_errors(above):
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
    # One task per node, on the nodes that the run would request. Returns the output of srun.
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
    record, module = container_record(cluster, resolved.config, resolved.device), "isles.check.step"
    if record is not None:
        srun = Slurm(launcher.bin_path).path("srun")
        if step_options(Container.of(record), srun, [workdir, folder]) is not None:
            raise UserError(
                f"--in-job calls Slurm inside its step, and the image {record['image']} of "
                "pyxis has no Slurm commands",
                where="command line",
                fix="set clusters.0.launcher.check=true: the job then checks its nodes first",
            )
        module = f"isles.launch.container {shlex.quote(json.dumps(record))} {module}"
    step = f"exec {python} -m {module} {shlex.quote(str(folder))} --attempt 1"
    step += ' --node "$SLURM_NODEID" --hosts "$names"'
    step += f' --master "$address:{cluster.network.port}" --timeout {timeout_s:.0f}'
    script = "\n".join([*setting_lines(cluster, str(workdir)), _ADDRESS, step])
    command = [Slurm(launcher.bin_path).path("srun"), *options, "bash", "-c", script]
    try:
        done = Shell().run(command, timeout_s=timeout_s + _RUN_S)
    except PreflightError as error:
        return [error.what[:200]]
    return done.stderr.strip().splitlines() or ["srun ended without output"]
