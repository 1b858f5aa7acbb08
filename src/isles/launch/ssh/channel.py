"""Requests to a process on a node and its answers: one JSON object per line, over any streams.

`serve` is the end on the node, `Channel` the end that sends requests. `open_channel` starts a
process that serves, locally or over ssh, and explains failures.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from isles.errors import ExitCode, PreflightError, UserError
from isles.launch.container.failure import explain
from isles.launch.ssh.shell import SSH_FAILED, Shell, python_failure

Operation = Callable[[dict[str, Any]], dict[str, Any]]

READY = "ISLES-NODE"
"""Prefix of the first answer; output of a login shell before it is skipped."""

_CLOSE_S = 5.0
_LINE_BYTES = 64 * 2**20
"""Longest answer: a host may send an endless line."""


def serve(operations: Mapping[str, Operation]) -> int:
    """Answer requests from stdin on stdout, each in a thread, until stdin is closed. After a lost
    connection, only processes that an operation has started remain.

    Args:
        operations: by name; each takes and returns JSON values.
    """
    # Output of the operations must not be mistaken for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()
    answers.write(f"{READY}\n")
    for line in sys.stdin:
        question = json.loads(line)
        work = operations.get(question["op"])
        threading.Thread(target=_answer, args=(work, question, answers, lock), daemon=True).start()
    return 0


def error_words(error: UserError) -> dict[str, Any]:
    """A user error in the form of an answer."""
    return {
        "what": error.what,
        "where": error.where,
        "fix": error.fix,
        "id": error.id,
        "exit_code": int(error.exit_code),
    }


@dataclass(frozen=True, slots=True)
class _Words:
    what: str
    where: str
    fix: str
    id: str
    exit_code: ExitCode

    def error(self, host: str) -> UserError:
        where = f"host {host}" + (f": {self.where}" if self.where else "")
        error = UserError(self.what, where=where, fix=self.fix, id=self.id)
        error.exit_code = self.exit_code
        return error


@dataclass(frozen=True, slots=True)
class _Reply:
    id: int
    result: dict[str, Any] | None = None
    error: _Words | None = None


def _answer(
    work: Operation | None, question: dict[str, Any], answers: IO[str], lock: threading.Lock
) -> None:
    reply: dict[str, Any] = {"id": question["id"]}
    try:
        if work is None:
            raise UserError(
                f"this version of isles does not know {question['op']!r}",
                fix="install the same isles on all hosts with isles setup",
                id="version.isles",
            )
        reply["result"] = work(question["args"])
    except UserError as error:
        reply["error"] = error_words(error)
    except Exception as error:  # the process' edge: the other end reports it
        found = UserError(f"{type(error).__name__}: {error}")
        reply["error"] = {**error_words(found), "traceback": traceback.format_exc()}
    with lock:
        answers.write(json.dumps(reply) + "\n")


class Channel:
    """Requests to one node, answered in any order. Closing the channel ends the process there.

    Args:
        reader: stream with the output of `serve`.
        writer: stream for the requests.
        lost: called once, when the answers end, with whether the node was ever ready; returns the
            error for every unanswered request.
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
        self._failure: UserError | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, op: str, **args: Any) -> Future[dict[str, Any]]:
        """Send a request without waiting; the future raises UserError, as `call` does."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._number += 1
            self._waiting[self._number] = future
            line = json.dumps({"id": self._number, "op": op, "args": args}) + "\n"
            with suppress(OSError, ValueError):  # the node is gone: the reader detects that
                self._writer.write(line.encode())
                self._writer.flush()
        return future

    def call(self, op: str, *, timeout_s: float, **args: Any) -> dict[str, Any]:
        """Send a request, and wait for the answer.

        Raises:
            UserError: an error of the node, with its name.
            PreflightError: the host cannot be reached, has no isles, or does not answer in time.
        """
        return self.wait(self.ask(op, **args), op, timeout_s)

    def wait(self, future: Future[dict[str, Any]], op: str, timeout_s: float) -> dict[str, Any]:
        """Wait for the answer to a request; errors as in `call`."""
        try:
            return future.result(timeout=timeout_s)
        except NoAnswer:
            raise PreflightError(
                f"no answer to `{op}` within {timeout_s:.0f} s",
                where=f"host {self.name}",
                fix="check the load of the host and the connection; then try again, or remove the "
                "host",
                id="host.answers",
            ) from None

    def close(self) -> None:
        """Close the channel; the process there ends with it."""
        self._end()

    def _read(self) -> None:
        is_ready = False
        with suppress(OSError, ValueError):  # the connection is lost, or was closed here
            while raw := self._reader.readline(_LINE_BYTES):
                line = raw.decode(errors="replace")
                if is_ready:
                    self._take(line)
                else:
                    is_ready = line.startswith(READY)
        failure = self._lost(is_ready)
        with self._lock:
            self._failure = failure
            left, self._waiting = list(self._waiting.values()), {}
        for future in left:
            future.set_exception(failure)

    def _take(self, line: str) -> None:
        from isles.launch.answers import parse_answer  # a node that serves may have no pydantic

        try:
            reply = parse_answer(_Reply, line)
        except ValueError:
            return  # cut off by the end of the connection, or not from isles: the request times out
        if reply.result is None and reply.error is None:
            return
        with self._lock:
            future = self._waiting.pop(reply.id, None)
        if future is None:
            return
        if reply.error is not None:
            future.set_exception(reply.error.error(self.name))
        else:
            future.set_result(reply.result or {})


def open_channel(
    shell: Shell,
    *,
    lines: Sequence[str] = (),
    python: str,
    module: str = "isles.launch.ssh.node",
    name: str = "",
    container: Mapping[str, Any] | None = None,
) -> Channel:
    """Start a process that serves, on this machine or over ssh.

    Args:
        shell: the node's shell.
        lines: lines of bash that come first, from `setting_lines`.
        module: the module that serves.
        container: the process' container, a record of `isles.launch.container`.

    Raises:
        PreflightError: this machine has no ssh.
    """
    words = [python, "-m", module]
    if container is not None:
        words = [python, "-m", "isles.launch.container", json.dumps(container), module]
    script = "\n".join([*lines, f"exec {shlex.join(words)}"])
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `lost`
    process = shell.popen(["bash", "-c", script], stderr=errors, own_group=True)
    assert process.stdin is not None and process.stdout is not None
    writer, host = process.stdin, name or shell.name

    def lost(was_ready: bool) -> UserError:
        code = process.wait()
        with errors:
            errors.seek(0)
            noise = errors.read().decode(errors="replace")
        if shell.destination is not None and code == SSH_FAILED:
            return shell.failure(noise)
        if not was_ready and (failure := explain(noise)) is not None:
            failure.where = f"host {host}"
            return failure
        if was_ready:
            return PreflightError(
                f"isles' process there exited (exit status {code})",
                where=f"host {host}",
                fix="it was killed, or the machine ran out of memory; run dmesg | tail there",
                id="host.answers",
            )
        words = noise.strip().splitlines() or [f"exit status {code}"]
        return python_failure(host, python, code, noise) or PreflightError(
            f"cannot set up the environment there: {words[-1]}",
            where=f"host {host}",
            fix="correct setup, modules, venv or conda in clusters.0.environment"
            + (f", and test with {shell.by_hand}" if shell.by_hand else ""),
            id="python.runs",
        )

    def end() -> None:
        with suppress(OSError):  # it has exited
            writer.close()
        try:
            process.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the connection hangs

    return Channel(host, process.stdout, writer, lost=lost, end=end)
