"""Copying files from here to the hosts before a start: rsync over the user's own ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from isles.config.cluster import ClusterConfig
from isles.config.environment import SyncConfig
from isles.errors import PreflightError
from isles.launch.hosts import refuse
from isles.launch.node_facts import machine_id
from isles.launch.setting import quoted
from isles.launch.shell import Shell, on_all

if TYPE_CHECKING:
    from isles.launch.start import StartOptions

_COPY_S = 3600.0
_NO_RSYNC = 127
_SSH_FAILED = 255


def sync_hosts(
    cluster: ClusterConfig, sync: SyncConfig, workdir: str, options: StartOptions
) -> None:
    """Copy what `sync` names to all hosts at once; in a dry run only say so.

    Args:
        cluster: the run file's section.
        sync: what is copied.
        workdir: the folder on the hosts; made where it is missing.
        options: how `isles train` was typed.

    Raises:
        PreflightError: a path that is not here, a host without rsync, one that cannot be written.
    """
    for path in sync.paths:
        if not Path(path).expanduser().exists():
            raise PreflightError(
                f"there is no {path} to copy to the hosts",
                where=f"this machine, {Path.cwd()}: clusters[0].sync.paths",
                fix="correct the path; it is relative to the folder in which isles is called",
            )
    if shutil.which("rsync") is None:
        raise _no_rsync("this machine")
    if options.dry_run:
        options.say(f"would copy {', '.join(sync.paths)} to {workdir} on every host")
        return
    timeout_s = cluster.launcher.connect_timeout if cluster.launcher.kind == "ssh" else 10.0

    def copy(host: str) -> str:
        return _copy(Shell(host, timeout_s), sync, workdir)

    said, faults = on_all([host.ssh for host in cluster.hosts], copy)
    refuse([fault for _, fault in faults], len(said))
    for host, line in zip(cluster.hosts, said, strict=True):
        options.say(f"copied to {host.ssh}:{workdir}: {line}")


def rsync_argv(shell: Shell, sync: SyncConfig, workdir: str) -> list[str]:
    """The command line of rsync."""
    # What [.] names is what is in the folder, every other path comes under its own name.
    paths = ["./" if path in (".", "./") else path.rstrip("/") for path in sync.paths]
    return [
        "rsync",
        "--archive",
        "--protect-args",
        "--compress",
        "--stats",
        *(f"--exclude={pattern}" for pattern in sync.exclude),
        f"--rsh={shlex.join(['ssh', *shell.ssh_options()])}",
        *(os.path.expanduser(path) for path in paths),  # noqa: PTH111  # Path drops the slash
        # What is relative is in the home there; with --protect-args nobody reads a ~.
        f"{shell.destination}:{workdir.removeprefix('~/')}/",
    ]


def _copy(shell: Shell, sync: SyncConfig, workdir: str) -> str:
    folder = quoted(workdir)
    look = "\n".join(
        [
            f"mkdir -p {folder} || exit 1",
            f"command -v rsync >/dev/null || exit {_NO_RSYNC}",
            "echo $(cat /proc/sys/kernel/random/boot_id 2>/dev/null).$(hostname)",
            f"cd {folder} && pwd -P",
        ]
    )
    done = shell.run(["bash", "-c", look])
    if done.returncode == _NO_RSYNC:
        raise _no_rsync(f"host {shell.name}")
    if done.returncode:
        raise PreflightError(
            f"the folder {workdir} cannot be made: {done.stderr.strip()}",
            where=f"host {shell.name}",
            fix="make it there, or name another in clusters[0].workdir",
        )
    words = done.stdout.splitlines()
    if words[-2:] == [machine_id(), str(Path.cwd().resolve())]:
        return "nothing: it is the folder itself"
    return _rsync(shell, sync, workdir)


def _rsync(shell: Shell, sync: SyncConfig, workdir: str) -> str:
    try:
        done = subprocess.run(
            rsync_argv(shell, sync, workdir),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COPY_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PreflightError(
            f"rsync has not ended within {_COPY_S:.0f} s",
            where=f"host {shell.name}",
            fix="copy what is large by hand, or keep it on the hosts",
        ) from error
    if done.returncode:
        raise _fault(shell, workdir, done)
    keys = ("Number of regular files transferred", "Total transferred file size")
    stats = dict(line.partition(": ")[::2] for line in done.stdout.splitlines())
    return "{} files, {}".format(*(stats.get(key, "?") for key in keys))


def _fault(shell: Shell, workdir: str, done: subprocess.CompletedProcess[str]) -> PreflightError:
    if done.returncode == _SSH_FAILED:
        return shell.fault(done.stderr)
    if "is your shell clean" in done.stderr:
        return PreflightError(
            "rsync cannot be used, because the login there prints something also for commands",
            where=f"host {shell.name}",
            fix="let ~/.bashrc print only in a terminal, with this as its first line: "
            "[[ $- == *i* ]] || return",
        )
    own = [line for line in done.stderr.splitlines() if line.startswith("rsync")]
    said = own or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return PreflightError(
        f"rsync failed: {said[0]}",
        where=f"host {shell.name}:{workdir}",
        fix="is there room, and may this user write there?",
    )


def _no_rsync(where: str) -> PreflightError:
    return PreflightError(
        "there is no program rsync, which clusters[0].sync needs",
        where=where,
        fix="sudo apt install rsync; or delete sync and copy the files yourself",
    )
