"""Pretend hosts on this machine: network namespaces, each with its own sshd and root.

`ctl` is the laptop, which holds the ssh key; `a1`, `a2` … and `b1` … are the machines that train.
Needs root and the Debian packages openssh-server, iproute2, rsync and nftables.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.__main__ import RUN
from tests.deadline import DEADLINE_S, run_program

_HERE = Path(__file__).parent
MARK = "LAB_STARTED"
"""Variable of all processes that a test has begun inside a host, also over ssh, and of those that
these start; the lab's own daemons do not have it."""


@dataclass(frozen=True, slots=True)
class Lab:
    """Hosts that are up.

    Args:
        state: the lab's own folder.
        shared: a folder of this machine that every host sees as /shared.
        prefix: begins the names of its network namespaces.
    """

    state: Path
    shared: Path
    prefix: str

    def environ(self) -> dict[str, str]:
        """For the scripts of `tests/lab/net`."""
        return {
            **os.environ,
            "LAB_STATE": str(self.state),
            "LAB_SHARED": str(self.shared),
            "LAB_PREFIX": self.prefix,
            "LAB_MARK": f"{MARK}={self.prefix}",
        }

    def argv(self, host: str, command: Sequence[str], **variables: str) -> list[str]:
        """The command line that runs a command inside a host, to be run here.

        A host sees the files of this machine; what it writes outside /shared is its own.
        """
        words = [f"{name}={value}" for name, value in {MARK: self.prefix, **variables}.items()]
        # A shell in the background ignores Ctrl+C; its children would as well.
        return [str(_HERE / "net/on.sh"), host, "env", "--default-signal=INT,HUP", *words, *command]

    def run(
        self, host: str, command: Sequence[str], **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside a host to its end."""
        return run_program(self.argv(host, command, **variables), env=self.environ(), input="")

    def popen(
        self, host: str, command: Sequence[str], stdin: int = subprocess.DEVNULL, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a command inside a host, in a session of its own; stdout and stderr are pipes."""
        return subprocess.Popen(
            self.argv(host, command, **variables),
            env=self.environ(),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def link(self, host: str, *what: str) -> None:
        """Change a host's network link: cut, restore, rate MBIT; of `wan`: set JSON."""
        run_script("net/link.sh", host, *what, environ=self.environ())

    def address(self, host: str) -> str:
        """The host's address."""
        if host == "ctl":
            return "10.77.1.100"
        return f"10.77.{1 if host[0] == 'a' else 2}.{host[1:]}"

    def root(self, host: str) -> Path:
        """Where this machine sees the host's own root, while the host lives."""
        return Path(f"/proc/{self.pid1(host)}/root")

    def pid1(self, host: str) -> int:
        """The host's first process, by its pid here: with it the host dies."""
        return int((self.state / "hosts" / host / "pid1").read_text())


def run_script(name: str, *args: str, environ: Mapping[str, str]) -> None:
    """Run a script of this folder.

    Raises:
        RuntimeError: it has failed; with what it printed.
    """
    done = run_program([_HERE / name, *args], env=environ, input="")
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(args)}: {done.stdout}{done.stderr}")


@contextmanager
def hosts(folder: Path, num_a: int = 3, num_b: int = 0) -> Iterator[Lab]:
    """Pretend hosts, for as long as the block lasts.

    Args:
        folder: an empty folder for the lab.
        num_a, num_b: machines on either side of the link `wan`; `ctl` is beside the first.

    Raises:
        RuntimeError: they cannot be started; never a skip.
    """
    # Also other labs of this machine, and what a killed one has left, have names of their own.
    prefix = f"isles-{os.environ.get(RUN, os.getpid())}-{secrets.token_hex(2)}"
    lab = Lab(folder / "lab", folder / "shared", prefix)
    lab.shared.mkdir(parents=True, exist_ok=True)
    # It takes the hosts down at the end of its input, also when this process is killed before: the
    # kernel closes that for a process which is gone.
    keeper = subprocess.Popen(
        ["bash", "-c", 'read -r; exec "$0"', str(_HERE / "net/down.sh")],
        env=lab.environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        run_script("net/up.sh", str(num_a), str(num_b), environ=lab.environ())
        yield lab
    finally:
        said, _ = keeper.communicate(timeout=DEADLINE_S)
        if keeper.returncode:
            raise RuntimeError(f"down.sh: {said}")
