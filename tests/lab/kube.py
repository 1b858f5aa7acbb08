"""A stand-in for Kubernetes over the pretend hosts: `ctl` has kubectl, a1, a2 ... are its nodes.

What it copies from a real cluster, and what not, stands at the beginning of
`tests/lab/kubernetes/cluster.py`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deadline import DEADLINE_S
from tests.lab.hosts import Lab

_HERE = Path(__file__).parent
IMAGE = "isles:test"


@contextmanager
def kubernetes(lab: Lab, nodes: tuple[str, ...]) -> Iterator[Path]:
    """The stand-in, for as long as the block lasts: the folder in which it keeps its claims."""
    folder = lab.shared / ".kube"
    folder.mkdir()
    program = folder / "kubectl"
    line = f'exec {sys.executable} {_HERE}/kubernetes/kubectl.py "$@"\n'
    program.write_text(f"#!/bin/sh\nexport KUBE_STANDIN=/shared/.kube\n{line}")
    program.chmod(0o755)
    lab.run("ctl", ["cp", "/shared/.kube/kubectl", "/usr/local/bin/kubectl"])
    settings = {
        "KUBE_STANDIN": "/shared/.kube",
        "KUBE_STANDIN_HERE": str(folder),
        "KUBE_NODES": " ".join(nodes),
        "KUBE_ON": str(_HERE / "net/on.sh"),
    }
    server = subprocess.Popen(
        [sys.executable, str(_HERE / "kubernetes/cluster.py")],
        env={**lab.environ(), **settings},
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"serving\n"
        yield folder
    finally:
        (folder / "stop").touch()
        server.wait(DEADLINE_S)
