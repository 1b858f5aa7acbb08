"""kubectl of the stand-in: asks its cluster over a socket; `exec` goes to the pod's host by ssh.

Its words and exit codes are those of kubectl 1.32: own errors end with 1, a command in a pod with
its own code and `command terminated with exit code N`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith(("--context=", "--namespace="))]
    stdin = ""
    if "-f" in words or any(word.endswith("=/dev/stdin") for word in words):
        stdin = sys.stdin.read()
    place = {word.partition("=")[0]: word.partition("=")[2] for word in sys.argv[1:3]}
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"{os.environ['KUBE_STANDIN']}/socket")
        except OSError:
            sys.stderr.write("The connection to the server 10.77.0.1:6443 was refused\n")
            return 1
        request = {"words": words, "stdin": stdin, "context": place.get("--context", "")}
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(connection.makefile().readline())
    sys.stdout.write(answer.get("stdout", ""))
    sys.stderr.write(answer.get("stderr", ""))
    if "exec" not in answer:
        return int(answer["code"])
    sys.stdout.flush()
    host, command = answer["exec"]
    code = subprocess.call(["ssh", "-o", "BatchMode=yes", host, command])
    if code:
        sys.stderr.write(f"command terminated with exit code {code}\n")
    return code


sys.exit(main())
