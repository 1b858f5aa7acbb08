"""kubectl of the stand-in: asks its cluster over a socket; `exec` goes to the pod's host by ssh.

Its words and exit codes are those of kubectl 1.32: own errors end with 1, a command in a pod with
its own code and `command terminated with exit code N`.
"""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.connection import Client


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith(("--context=", "--namespace="))]
    with Client("/shared/.kube/socket") as cluster:
        cluster.send((words, sys.stdin.read() if "-f" in words else ""))
        code, out, err = cluster.recv()
    sys.stderr.write(err)
    if code or words[0] != "exec":
        sys.stdout.write(out)
        return int(code)
    code = subprocess.call(["ssh", "-o", "BatchMode=yes", *out])
    if code:
        sys.stderr.write(f"command terminated with exit code {code}\n")
    return code


sys.exit(main())
