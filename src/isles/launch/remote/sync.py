"""Copies files to the hosts before a start: rsync over the user's own ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from isles.config.load import Loaded
from isles.config.sections.cluster import SyncConfig
from isles.errors import PreflightError
from isles.launch.base import StartOptions
from isles.launch.ssh.channel import open_channel
from isles.launch.ssh.environment import python_of, quoted, setting_lines
from isles.launch.ssh.facts import machine_id
from isles.launch.ssh.hosts import refuse
from isles.launch.ssh.shell import SSH_FAILED, Shell, on_all

_LOOK_S = 60.0
_NO_RSYNC = 127


def sync_hosts(loaded: Loaded, sync: SyncConfig, workdir: str, options: StartOptions) -> str:
    """Copy the paths of `sync` to all hosts in parallel; in a dry run only describe it.

    Args:
        workdir: the folder on the hosts; created if it is missing.

    Returns:
        In a dry run, the complete text if hosts lack the folder; else an empty text.

    Raises:
        PreflightError: a path is missing on this machine, a host has no rsync, or a host cannot
            write.
        UserError: the run is running already; nothing was copied.
    """
    cluster = loaded.config.clusters[0]
    for path in sync.paths:
        if not Path(path).expanduser().exists():
            raise PreflightError(
                f"cannot copy {path} to the hosts, because it does not exist",
                where=f"clusters.0.sync.paths, in {Path.cwd()} on this machine",
                fix="correct the path; it is relative to the current folder",
                id="sync.rsync",
            )
    if shutil.which("rsync") is None:
        raise _no_rsync("this machine")
    timeout_s = cluster.launcher.connect_timeout if cluster.launcher.kind == "ssh" else 10.0
    shells = [Shell(host.ssh, timeout_s) for host in cluster.hosts]
    if options.dry_run:
        return _dry_run(shells, sync, workdir, options)
    _refuse_second(loaded, shells[0], workdir, options)
    running: list[subprocess.Popen[str]] = []
    try:
        lines, failures = on_all(shells, lambda shell: _copy(shell, sync, workdir, running))
    finally:
        # After Ctrl+C, some copies are still running.
        for process in running:
            process.terminate()
    refuse([failure for _, failure in failures], len(lines))
    for shell, line in zip(shells, lines, strict=True):
        options.print_line(f"copied to {shell.name}:{workdir}: {line}")
    return ""


def _dry_run(shells: Sequence[Shell], sync: SyncConfig, workdir: str, options: StartOptions) -> str:
    # Further facts need a query in the folder itself, on the hosts.
    look = ["bash", "-c", f"[ -d {quoted(workdir)} ] && echo there"]
    found, failures = on_all(shells, lambda shell: "there" in shell.run(look).stdout.split())
    refuse([failure for _, failure in failures], len(shells))
    text = f"would copy {', '.join(sync.paths)} to {workdir} on every host"
    missing = [shell.name for shell, is_it in zip(shells, found, strict=True) if not is_it]
    if not missing:
        options.print_line(text)
        return ""
    return (
        f"{text}; the folder does not exist yet on {', '.join(missing)}, and would be created.\n"
        "To see the whole plan, create it first: start the run, or run "
        f"mkdir -p {workdir}"
    )


def _refuse_second(loaded: Loaded, first: Shell, workdir: str, options: StartOptions) -> None:
    # Before anything is copied into the folder of a running run.
    config = loaded.config
    lines = setting_lines(config.clusters[0], workdir)
    python = python_of(config.clusters[0].environment)
    asked = {"output_dir": config.output_dir, "name": config.name, "resume": options.resume}
    with (
        suppress(PreflightError),  # no folder or no isles yet: the start itself reports errors
        open_channel(first, lines=lines, python=python) as channel,
    ):
        channel.call("second", timeout_s=_LOOK_S, **asked)


def rsync_argv(shell: Shell, sync: SyncConfig, workdir: str) -> list[str]:
    """The command line of rsync."""
    # [.] copies the content of the folder; every other path keeps its own name.
    paths = ["./" if path in (".", "./") else path.rstrip("/") for path in sync.paths]
    # With --protect-args no shell expands a ~; a relative path is in the home there.
    folder = "." if workdir in ("~", "~/") else workdir.removeprefix("~/")
    return [
        *("rsync", "--archive", "--protect-args", "--compress", "--stats"),
        *(f"--exclude={pattern}" for pattern in sync.exclude),
        f"--rsh={shlex.join(['ssh', *shell.ssh_options()])}",
        "--",
        *(os.path.expanduser(path) for path in paths),  # noqa: PTH111  # Path drops the slash
        f"{shell.destination}:{folder}/",
    ]


def _copy(
    shell: Shell, sync: SyncConfig, workdir: str, running: list[subprocess.Popen[str]]
) -> str:
    look = [
        f"mkdir -p {quoted(workdir)} || exit 1",
        f"command -v rsync >/dev/null || exit {_NO_RSYNC}",
        "echo $(cat /proc/sys/kernel/random/boot_id 2>/dev/null).$(hostname)",
        f"cd {quoted(workdir)} && pwd -P",
    ]
    done = shell.run(["bash", "-c", "\n".join(look)])
    if done.returncode == _NO_RSYNC:
        raise _no_rsync(f"host {shell.name}")
    if done.returncode:
        raise PreflightError(
            f"cannot create the folder {workdir}: {done.stderr.strip()}",
            where=f"host {shell.name}",
            fix="create it there, or set clusters.0.workdir to another folder",
            id="files.workdir",
        )
    if done.stdout.splitlines()[-2:] == [machine_id(), str(Path.cwd().resolve())]:
        return "nothing: it is the folder itself"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        rsync_argv(shell, sync, workdir),
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
    )
    running.append(process)
    out, err = process.communicate()
    if process.returncode:
        raise _failure(shell, workdir, process.returncode, err)
    keys = ("Number of regular files transferred", "Total transferred file size")
    stats = dict(line.partition(": ")[::2] for line in out.splitlines())
    return "{} files, {}".format(*(stats.get(key, "?") for key in keys))


def _failure(shell: Shell, workdir: str, code: int, noise: str) -> PreflightError:
    if code == SSH_FAILED:
        return shell.failure(noise)
    what = "rsync does not work, because the shell there prints output without a terminal"
    fix = "make ~/.bashrc print only in a terminal; its first line must be "
    fix += "[[ $- == *i* ]] || return"
    if "is your shell clean" not in noise:
        own = [line for line in noise.splitlines() if line.startswith("rsync")]
        lines = own or noise.strip().splitlines() or [f"exit code {code}"]
        what, fix = (
            f"rsync failed: {lines[0]}",
            f"check the free space in {workdir}, and that this user may write there",
        )
    return PreflightError(what, where=f"host {shell.name}", fix=fix, id="sync.rsync")


def _no_rsync(where: str) -> PreflightError:
    return PreflightError(
        "rsync, which clusters.0.sync needs, is not installed",
        where=where,
        fix="run sudo apt install rsync, or delete clusters.0.sync and copy the files yourself",
        id="sync.rsync",
    )
