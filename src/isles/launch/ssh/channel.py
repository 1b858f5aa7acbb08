"""Questions to a node over any pair of streams: to `isles.launch.ssh.node`, JSON lines."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

from isles.errors import PreflightError, UserError
from isles.launch.ssh.channel import READY
from isles.launch.ssh.shell import Shell

_SSH_FAILED = 255
_CANNOT_RUN, _NOT_FOUND = 126, 127
_CLOSE_S = 5.0
_LAST_WORDS_S = 1.0
_NO_FOLDER = re.compile(r"cd: (?P<folder>.*): No such file or directory")
_NO_MODULE = re.compile(r"No module named '?(?P<name>isles[\w.]*)")


class Channel:
    """Questions to one node, answered in any order. Closing it ends the process there.

    Args:
        name: of the node, for messages.
        reader: brings what `isles.launch.ssh.node.serve` writes there.
        writer: takes the questions.
        lost: called once, when the answers end, with whether the node was ever ready: what is
            raised for every question without an answer.
        end: closes the streams.
    """

    def __init__(
        self,
        name: str,
        reader: IO[bytes],
        writer: IO[bytes],
        *,
        lost: Callable[[bool], UserError],
        end: Callable[[], object],
    ) -> None:
        self.name = name
        self._reader, self._writer = reader, writer
        self._lost, self._end = lost, end
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0
        self._fault: UserError | None = None
        self._lock = threading.Lock()
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
            if self._fault is not None:
                future.set_exception(self._fault)
                return future
            self._number += 1
            self._waiting[self._number] = future
            line = json.dumps({"id": self._number, "op": op, "args": args}) + "\n"
            with suppress(OSError, ValueError):  # the reader finds out that it is at its end
                self._writer.write(line.encode())
                self._writer.flush()
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
        self._end()

    def _read(self) -> None:
        is_ready = False
        with suppress(OSError, ValueError):  # the connection is cut, or was closed here
            for raw in self._reader:
                line = raw.decode(errors="replace")
                if is_ready:
                    self._take(line)
                else:  # what a login prints comes before
                    is_ready = line.startswith(READY)
        fault = self._lost(is_ready)
        with self._lock:
            self._fault = fault
            left, self._waiting = list(self._waiting.values()), {}
        for future in left:
            future.set_exception(fault)

    def _take(self, line: str) -> None:
        try:
            reply = json.loads(line)
        except ValueError:
            return  # torn by the end of the connection
        with self._lock:
            future = self._waiting.pop(reply["id"], None)
        if future is None:
            return
        if "error" in reply:
            future.set_exception(self._named(reply["error"]))
        else:
            future.set_result(reply["result"])

    def _named(self, error: dict[str, Any]) -> UserError:
        where = f"host {self.name}" + (f": {error['where']}" if error["where"] else "")
        fault = UserError(error["what"], where=where, fix=error["fix"], id=error.get("id", ""))
        fault.exit_code = error["exit_code"]
        return fault


def open_channel(
    shell: Shell,
    *,
    lines: Sequence[str] = (),
    python: str,
    module: str = "isles.launch.ssh.node",
    name: str = "",
) -> Channel:
    """Start a process that answers, here or over ssh.

    Args:
        shell: where the node is.
        lines: lines of bash that come first, of `setting_lines`.
        python: Python there.
        module: what answers.
        name: of the node, for messages.

    Raises:
        PreflightError: there is no ssh on this machine.
    """
    script = "\n".join([*lines, f"exec {shlex.quote(python)} -m {module}"])
    process = shell.popen(["bash", "-c", script], own_group=True)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    writer, messages = process.stdin, process.stderr
    last: deque[bytes] = deque(maxlen=31)
    reading = threading.Thread(target=lambda: last.extend(messages), daemon=True)
    reading.start()

    def lost(was_ready: bool) -> UserError:
        code = process.wait()
        reading.join(timeout=_LAST_WORDS_S)
        noise = b"".join(list(last)).decode(errors="replace")
        return _why_lost(shell, name or shell.name, python, code, noise, was_ready=was_ready)

    def end() -> None:
        with suppress(OSError):  # it has ended
            writer.close()
        try:
            process.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the connection hangs

    return Channel(name or shell.name, process.stdout, writer, lost=lost, end=end)


def _why_lost(
    shell: Shell, name: str, python: str, code: int, noise: str, *, was_ready: bool
) -> PreflightError:
    """Why a process answers no more, by its exit status and what it has printed."""
    if shell.destination is not None and code == _SSH_FAILED:
        return shell.fault(noise)
    words = noise.strip().splitlines() or [f"exit status {code}"]
    module, folder = _NO_MODULE.search(noise), _NO_FOLDER.search(noise)
    if was_ready:
        id, what = "host.answers", f"the process that answered there has ended (exit status {code})"
        fix = "somebody killed it, or the machine ran out of memory: see dmesg | tail"
    elif module and module["name"] == "isles":
        id, what = "isles.installed", f"isles is not installed for {python}"
        fix = (
            "isles setup run.yaml installs it; or name the right Python in "
            "clusters[0].environment (venv, conda or python)"
        )
    elif module:
        id = "version.isles"
        what = f"{python} has another version of isles, which lacks {module['name']}"
        fix = "install the same isles on all hosts: isles setup"
    elif folder:
        id = "files.workdir"
        what = f"there is no folder {folder['folder']}, in which the ranks are to run"
        fix = (
            "make it there, name another in clusters[0].workdir, or let isles copy this one: "
            "clusters[0].sync"
        )
    elif code in (_CANNOT_RUN, _NOT_FOUND):
        id, what = "python.runs", f"{python} cannot be run there: {words[-1]}"
        fix = "name the right Python in clusters[0].environment (venv, conda or python)"
    else:
        id, what = "python.runs", f"the environment cannot be set up there: {words[-1]}"
        fix = (
            "correct setup, modules, venv or conda in clusters[0].environment; by hand: "
            f"ssh {shell.destination}"
        )
    return PreflightError(what, where=f"host {name}", fix=fix, id=id)
