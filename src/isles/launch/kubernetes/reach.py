"""A command in a pod of a run, as ssh runs a command on a host: `python -m` this module.

    python -m isles.launch.kubernetes.reach DESTINATION COMMAND...

Exits with the command's exit code, or with 255 if no pod can be reached or the pod is gone. If no
pod of the run is running, it creates a pod that sees the same volumes, for the duration of the
command.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from isles.errors import PreflightError, UserError
from isles.facts.terminal import show_streams
from isles.launch.kubernetes.kubectl import Kubectl, not_running
from isles.launch.ssh.shell import SSH_FAILED
from isles.run.env import IN_POD, state_home
from isles.run.records import explain_write_errors, read_own, write_record

_READER_S = 180.0
"""Longest wait for a pod that is created to read a run."""
_LOOK_S = 0.5
_EXITED = re.compile(r"command terminated with exit code (\d+)")
_KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class RunLocation:
    """Location of a run's directory: this machine's record of the last start.

    Args:
        context, namespace: for kubectl; None: kubectl's default.
        job: name of the objects of the last start.
        reader: a Job whose pod sees the run directory.
    """

    context: str | None
    namespace: str | None
    flavor: str
    job: str
    reader: dict[str, Any]

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.context, self.namespace)

    def write(self, destination: str) -> None:
        """Save it under a destination. UserError: it cannot be written."""
        path = _path(destination)
        with explain_write_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_record(path, asdict(self))

    def delete(self) -> None:
        """Delete the objects of the last start."""
        self.kubectl.delete(self.flavor, self.job)


def read_place(destination: str) -> RunLocation:
    """Read the record of a run started on this machine. PreflightError: there is no record."""
    try:
        return TypeAdapter(RunLocation).validate_python(read_own(_path(destination)))
    except ValidationError:
        raise PreflightError(
            f"this machine has no record of {destination}",
            where=str(_path(destination)),
            fix="use the machine that has started the run, or start it again with `isles train`",
            id="kubernetes.refused",
        ) from None


def main() -> int:
    """Run the command of the arguments; returns its exit code."""
    destination, *command = sys.argv[1:]
    try:
        place = read_place(destination)
        pods = [pod.name for pod in place.kubectl.pods(place.job) if pod.is_running]
        if pods:
            return _exec(place.kubectl, pods[0], command)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(SSH_FAILED))
        with _reader(place) as pod:
            return _exec(place.kubectl, pod, command)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return SSH_FAILED


def _exec(kubectl: Kubectl, pod: str, command: Sequence[str]) -> int:
    # kubectl exits with 1 for its own errors too; its last line distinguishes them.
    words = kubectl.argv("exec", "-i", pod, "-c", "node", "--", *command)
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    assert process.stderr is not None
    code = None
    try:
        for raw in process.stderr:
            line = raw.decode(errors="replace")
            if found := _EXITED.search(line):
                code = int(found[1])
                continue
            sys.stderr.write(line)
            sys.stderr.flush()
        ended = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
    if ended and (code is None or code in _KILLED):
        return SSH_FAILED
    return code or ended


@contextmanager
def _reader(place: RunLocation) -> Iterator[str]:
    kubectl = place.kubectl
    job, _ = kubectl.create(place.reader)
    try:
        deadline = time.monotonic() + _READER_S
        while True:
            pods = [pod for pod in kubectl.pods(job, label="job-name") if pod.is_running]
            if pods:
                break
            if time.monotonic() > deadline:
                what = (
                    f"the pod that reads the run directory did not start within {_READER_S:.0f} s"
                )
                raise not_running(kubectl, job, (), what)
            time.sleep(_LOOK_S)
        yield pods[0].name
    finally:
        with suppress(UserError):
            kubectl.run("delete", "job", job, "--ignore-not-found", "--wait=false")


def _path(destination: str) -> Any:
    return state_home() / "kubernetes" / f"{destination.removeprefix(IN_POD)}.json"


if __name__ == "__main__":
    show_streams()
    sys.exit(main())
