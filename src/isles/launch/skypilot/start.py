"""A start by SkyPilot: submits the task file, and reads the log of its job until the run has
started.

If the start fails halfway, it ends the job, and also the machines if it has created them.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from isles import __version__
from isles.config.load import Loaded
from isles.config.sections.cluster import SkypilotLauncherConfig
from isles.config.show import show
from isles.errors import ConfigError, PreflightError, UserError
from isles.facts.units import format_duration
from isles.launch.answers import STARTED, Announced, read_started
from isles.launch.base import Started, StartOptions, resolve_for_nodes
from isles.launch.remote.login import started_elsewhere
from isles.launch.remote.setup import wheel_bytes, wheel_name
from isles.launch.skypilot.task import TaskText, node_cluster, secret_names, task_file
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.start import interruptible
from isles.run.env import SKY_JOIN, SKY_TOKEN, inherited

_STARTED = re.compile(re.escape(STARTED) + r"\{.*\}")
_JOB = re.compile(r"\bjob\b[^\n]*?\bID: *(\d+)", re.IGNORECASE)
_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_ASK_S = 120.0
"""Longest wait for an answer of sky, or for sky to end a job."""

_DOWN_S = 600.0
"""Longest wait for sky to return machines."""

_TAIL_LINES = 15


def start_skypilot(
    loaded: Loaded, launcher: SkypilotLauncherConfig, options: StartOptions
) -> Started | str:
    """Start a run on nodes of SkyPilot, or describe the start. For a managed job, returns the text
    to print, because SkyPilot follows that run.

    Raises:
        ConfigErrors: every issue in the run file.
        UserError: sky is not installed, or does not start the run; then nothing is left running.
    """
    # The data is on the nodes, and the first node checks it.
    resolved = resolve_for_nodes(loaded, needs_data=False)
    if launcher.managed and options.cluster:
        raise ConfigError(
            f"the cluster {options.cluster} is a managed job, which isles cannot follow",
            where=loaded.where("clusters.0.launcher.managed"),
            fix="set managed: false, or start it separately with isles join",
        )
    start = _SkyStart(loaded, launcher, options, resolved.device)
    if options.dry_run:
        words = shlex.join(start.submit_words("TASK.yaml"))
        return f"{show(resolved).rstrip()}\n\n{words} would get this task:\n\n{start.task(None)}"
    start.look_for_secrets()
    return start.run()


def cluster_name(loaded: Loaded, launcher: SkypilotLauncherConfig) -> str:
    """Name of SkyPilot's cluster: constant for a run file, so that its disks are found again."""
    own = loaded.config.clusters[0].name
    return launcher.cluster or f"isles-{loaded.config.name}" + (f"-{own}" * (own != "local"))


class _SkyStart:
    # One start.

    def __init__(
        self, loaded: Loaded, launcher: SkypilotLauncherConfig, options: StartOptions, device: str
    ) -> None:
        self._loaded, self._launcher, self._options = loaded, launcher, options
        self._device = device
        self._name = cluster_name(loaded, launcher)
        self._secrets = secret_names(launcher, has_join=bool(options.join))
        self._environ = {**inherited(), SKY_TOKEN: secrets.token_hex(16)}
        if options.join:
            self._environ[SKY_JOIN] = options.join
        self._job = ""
        self._was_there = True
        self._deadline = time.monotonic() + launcher.launch_timeout

    def task(self, wheel: str | None) -> str:
        """The text of the task file."""
        options = self._options
        text = TaskText(
            self._launcher,
            options.overrides,
            self._device,
            resume=options.resume,
            typed=options.typed,
            wheel=wheel,
            has_join=bool(options.join),
        )
        return task_file(self._loaded, text)

    def submit_words(self, path: str) -> list[str]:
        """The command that submits the task."""
        words = ["sky", "launch", "--cluster", self._name]
        if self._launcher.managed:
            words = ["sky", "jobs", "launch"]
        # Without a value sky reads it from its environment, which other users cannot see.
        given = [word for name in self._secrets for word in ("--secret", name)]
        return [*words, "--yes", "--detach-run", *given, path]

    def look_for_secrets(self) -> None:
        """Refuse a start if its secrets are missing in this environment, or sky is not
        installed."""
        for index, name in enumerate(self._launcher.secrets):
            if not self._environ.get(name):
                raise ConfigError(
                    f"{name} is not set in this shell, but the nodes need it",
                    where=self._loaded.where(f"clusters.0.launcher.secrets.{index}"),
                    fix=f"run export {name}=…, or delete it from secrets",
                )
        if shutil.which("sky") is None:
            raise PreflightError(
                "sky is not installed on this machine",
                where=self._loaded.where("clusters.0.launcher.kind", "clusters.0.launcher"),
                fix="run pip install 'skypilot[aws]', or with the extra of your cloud, in a "
                "separate environment whose bin is on PATH; then run sky check",
                id="queue.commands",
            )

    def run(self) -> Started | str:
        """Submit the task, and wait until the run has started."""
        print_line, managed = self._options.print_line, self._launcher.managed
        with interruptible() as hand_back, tempfile.TemporaryDirectory(prefix="isles-sky-") as made:
            wheel, path = Path(made) / wheel_name(), Path(made) / "task.yaml"
            wheel.write_bytes(wheel_bytes())
            path.write_text(self.task(str(wheel)), encoding="utf-8")
            if not managed:
                self._was_there = self._is_there()
            try:
                self._submit(self.submit_words(str(path)))
                begun = None if managed else self._begun()
                hand_back()
            except BaseException:
                self._give_up()
                raise
        if begun is None:
            return self._managed_text()
        if begun.version != __version__:
            print_line(
                f"warning: isles is version {begun.version} there, but {__version__} on this "
                "machine"
            )
        if self._launcher.autostop is None:
            print_line(
                f"its machines keep running until `sky stop {self._name}` or `sky down "
                f"{self._name}`"
            )
        there = node_cluster(self._loaded.config.clusters[0])
        assert there.workdir is not None
        # SkyPilot's backend for Slurm gives a job a home that ssh commands do not have.
        home = [f"export HOME={shlex.quote(begun.home)}"] if begun.home else []
        lines = [*home, *setting_lines(there, there.workdir)]
        num = there.max_nodes
        hosts = [self._name, *(f"{self._name}-worker{node}" for node in range(1, num))]
        python = python_of(there.environment)
        return started_elsewhere(self._loaded, self._options, begun, hosts, lines, python)

    def _submit(self, words: list[str]) -> None:
        lines: deque[str] = deque(maxlen=_TAIL_LINES)

        def take(line: str) -> None:
            lines.append(line)
            if found := _JOB.search(line):
                self._job = found[1]
            self._options.print_line(line)

        code = self._stream(words, take)
        if code != 0:
            raise self._failed("sky could not start the task", code, lines)

    def _begun(self) -> Announced:
        # The run that the first node has started, from the log of the job.
        announced: list[str] = []
        lines: deque[str] = deque(maxlen=_TAIL_LINES)

        def take(line: str) -> bool:
            if found := _STARTED.search(line):
                announced.append(found[0])
                return True
            lines.append(line)
            self._options.print_line(line)
            return False

        words = ["sky", "logs", self._name, *([self._job] if self._job else [])]
        code = self._stream(words, take)
        if not announced:
            raise self._failed("the job ended before the run started", code, lines)
        return read_started(
            announced[0],
            where=f"sky ({self._name})",
            fix=f"see the whole line with `sky logs {self._name}`. If environment.packages has "
            "isles, it must be this machine's version",
        )

    def _stream(self, words: list[str], take: Callable[[str], object]) -> int | None:
        # Run a command until it ends, or `take` returns True; its exit code, None: timeout.
        process = subprocess.Popen(
            words,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl+C is for this start, which ends sky
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        alarm = threading.Timer(max(1.0, self._deadline - time.monotonic()), end)
        alarm.daemon = True
        alarm.start()
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                line = _COLORS.sub("", raw.decode(errors="replace")).rstrip("\r\n ")
                if line and take(line.rpartition("\r")[2]):
                    return 0
            code = process.wait()
            return None if late.is_set() else code
        finally:
            alarm.cancel()
            _kill(process)
            process.wait()
            process.stdout.close()

    def _failed(self, what: str, code: int | None, lines: deque[str]) -> UserError:
        words = "\n".join(f"    {line}" for line in lines) or "    (no output)"
        fix = "fix the error above; see the task with `isles train --dry-run`"
        if code is None:
            limit = format_duration(self._launcher.launch_timeout)
            what = f"SkyPilot did not start the run within {limit}"
            fix = f"see `sky status` and `sky queue {self._name}`; to wait longer, raise "
            fix += "clusters.0.launcher.launch_timeout"
        return PreflightError(
            f"{what}; its last output was:\n{words}",
            where=f"sky ({self._name})",
            fix=fix,
            id="start.failed",
        )

    def _is_there(self) -> bool:
        # Whether SkyPilot already has a cluster of this name, which this start must not end.
        done = self._ask(["sky", "status", "--no-show-managed-jobs", self._name])
        return done is None or bool(re.search(rf"^{re.escape(self._name)}\s", done, re.M))

    def _give_up(self) -> None:
        # End the job of this start, or the machines with it.
        managed = self._launcher.managed
        if not managed and not self._was_there:
            words = ["sky", "down", "--yes", self._name]
        elif self._job:
            where = ["jobs", "cancel", "--yes"] if managed else ["cancel", "--yes", self._name]
            words = ["sky", *where, self._job]
        else:
            # Its server continues with the request; other jobs may have the same name.
            queue = "sky jobs queue" if managed else f"sky queue {self._name}"
            self._options.warn(f"SkyPilot may have accepted the job after all; check with {queue}")
            return
        self._options.print_line(shlex.join(words))
        # A cluster that sky has never created, or has removed itself, cannot be ended.
        if self._ask(words, _DOWN_S) is None and (managed or self._is_there()):
            self._options.warn(f"{shlex.join(words)} failed; run it manually")

    def _ask(self, words: list[str], timeout_s: float = _ASK_S) -> str | None:
        # Output of a command; None: it failed, or did not end in time.
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                words,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
                start_new_session=True,
            )
            return _COLORS.sub("", done.stdout) if done.returncode == 0 else None
        return None

    def _managed_text(self) -> str:
        job = self._job or "N"
        return (
            f"{self._loaded.config.name} is managed job {self._job or '(its number is above)'} of "
            f"SkyPilot, which restarts it when its nodes are taken away:\n"
            f"  sky jobs queue · sky jobs logs {job} · sky jobs cancel {job}"
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
