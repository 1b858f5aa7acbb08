"""A conversation with a node: questions to `isles.launch.node.operations` over one connection."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from types import TracebackType
from typing import Any

from isles.errors import PreflightError, UserError
from isles.launch.node.operations import READY
from isles.launch.ssh.shell import Shell

_SSH_FAILED = 255
_CANNOT_RUN, _NOT_FOUND = 126, 127
_CLOSE_S = 5.0
_LAST_WORDS_S = 1.0
_NO_FOLDER = re.compile(r"cd: (?P<folder>.*): No such file or directory")


class Channel:
    """Questions to one node, answered in any order. Closing it ends the process there.

    Args:
        shell: where the node is.
        lines: lines of bash that come first, of `setting_lines`.
        python: Python there.
        module: what answers.
        name: of the node, for messages.
    """

    def __init__(
        self,
        shell: Shell,
        *,
        lines: Sequence[str] = (),
        python: str,
        module: str = "isles.launch.node.operations",
        name: str = "",
    ) -> None:
        self.name = name or shell.name
        self.shell = shell
        self._python = python
        script = "\n".join([*lines, f"exec {shlex.quote(python)} -m {module}"])
        self._process = shell.popen(["bash", "-c", script], own_group=True)
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_ready = False
        self._noise: list[str] = []
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, op: str, **args: Any) -> Future[dict[str, Any]]:
        """Ask without waiting; the future raises UserError, as `call` does."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(self._lost())
                return future
            self._number += 1
            self._waiting[self._number] = future
            line = json.dumps({"id": self._number, "op": op, "args": args}) + "\n"
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            except OSError:
                pass  # the reader finds the end of the process, and what it said
        return future

    def call(self, op: str, *, timeout_s: float, **args: Any) -> dict[str, Any]:
        """Ask, and wait for the answer.

        Raises:
            UserError: what the node says is wrong, with its name.
            PreflightError: the host cannot be reached, has no isles, or does not answer in time.
        """
        try:
            return self.ask(op, **args).result(timeout=timeout_s)
        except NoAnswer:
            raise self.no_answer(op, timeout_s) from None

    def no_answer(self, op: str, timeout_s: float) -> PreflightError:
        """What to raise where an answer takes too long."""
        return PreflightError(
            f"no answer to `{op}` within {timeout_s:.0f} s",
            where=f"host {self.name}",
            fix="is it overloaded, or the connection cut? try again, or leave the host out",
            id="host.answers",
        )

    def close(self) -> None:
        """End the conversation; the process there ends with it."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the connection hangs

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace")
            if not self._is_ready:
                self._is_ready = line.startswith(READY)
                continue
            try:
                reply = json.loads(line)
            except ValueError:
                continue  # torn by the end of the connection
            with self._lock:
                future = self._waiting.pop(reply["id"], None)
            if future is None:
                continue
            if "error" in reply:
                future.set_exception(self._named(reply["error"]))
            else:
                future.set_result(reply["result"])
        self._process.wait()
        self._errors.join(timeout=_LAST_WORDS_S)
        with self._lock:
            self._is_closed = True
            left, self._waiting = list(self._waiting.values()), {}
        for future in left:
            future.set_exception(self._lost())

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            self._noise = [*self._noise[-30:], raw.decode(errors="replace")]

    def _named(self, error: dict[str, Any]) -> UserError:
        where = f"host {self.name}" + (f": {error['where']}" if error["where"] else "")
        fault = UserError(error["what"], where=where, fix=error["fix"], id=error.get("id", ""))
        fault.exit_code = error["exit_code"]
        return fault

    def _lost(self) -> PreflightError:
        noise = "".join(self._noise)
        code = self._process.returncode
        if self.shell.destination is not None and code == _SSH_FAILED:
            return self.shell.fault(noise)
        where = f"host {self.name}"
        if self._is_ready:
            return PreflightError(
                f"the process that answered there has ended (exit status {code})",
                where=where,
                fix="somebody killed it, or the machine ran out of memory: see dmesg | tail",
                id="host.answers",
            )
        if "No module named" in noise and "isles" in noise:
            return PreflightError(
                f"isles is not installed for {self._python}",
                where=where,
                fix="isles setup run.yaml installs it; or name the right Python in "
                "clusters[0].environment (venv, conda or python)",
                id="isles.installed",
            )
        if match := _NO_FOLDER.search(noise):
            return PreflightError(
                f"there is no folder {match['folder']}, in which the ranks are to run",
                where=where,
                fix="make it there, name another in clusters[0].workdir, or let isles copy this "
                "one: clusters[0].sync",
                id="files.workdir",
            )
        words = noise.strip().splitlines() or [f"exit status {code}"]
        if code not in (_CANNOT_RUN, _NOT_FOUND):
            return PreflightError(
                f"the environment cannot be set up there: {words[-1]}",
                where=where,
                fix="correct setup, modules, venv or conda in clusters[0].environment; by hand: "
                f"ssh {self.shell.destination}",
                id="python.runs",
            )
        return PreflightError(
            f"{self._python} cannot be run there: {words[-1]}",
            where=where,
            fix="name the right Python in clusters[0].environment (venv, conda or python)",
            id="python.runs",
        )
