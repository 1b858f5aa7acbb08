"""What runs on a node while somebody starts or checks it: `python -m isles.launch.ssh.node`.

Answers questions, one JSON object a line on stdin and stdout, each in a thread of its own. It ends
when its stdin is closed, so that nothing is left behind when the connection is lost; only what
`start` starts lives on. It needs no torch.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

from isles.errors import UserError
from isles.launch.ssh.facts import node_facts

Operation = Callable[[dict[str, Any]], dict[str, Any]]

READY = "ISLES-NODE "
"""Begins the first line of the answers; what a login prints before it is skipped."""


def operations() -> dict[str, Operation]:
    """What every node can be asked, whatever for."""
    return {"facts": node_facts}


def serve(known: Mapping[str, Operation]) -> int:
    """Answer until stdin is closed.

    Args:
        known: operations by name; each takes and returns what JSON can hold.
    """
    # What the operations print must not be taken for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()
    answers.write(f"{READY}{json.dumps({'pid': os.getpid()})}\n")
    for line in sys.stdin:
        question = json.loads(line)
        work = known.get(question["op"])
        threading.Thread(target=_answer, args=(work, question, answers, lock), daemon=True).start()
    return 0


def _answer(
    work: Operation | None, question: dict[str, Any], answers: IO[str], lock: threading.Lock
) -> None:
    reply: dict[str, Any] = {"id": question["id"]}
    try:
        if work is None:
            raise UserError(
                f"this isles does not know {question['op']!r}",
                fix="install the same isles on all hosts: isles setup",
                id="version.isles",
            )
        reply["result"] = work(question["args"])
    except UserError as error:
        reply["error"] = {
            "what": error.what,
            "where": error.where,
            "fix": error.fix,
            "id": error.id,
            "exit_code": int(error.exit_code),
        }
    except Exception as error:  # the process' edge: the asker shows it
        reply["error"] = {
            "what": f"{type(error).__name__}: {error}",
            "where": "",
            "fix": "",
            "id": "",
            "exit_code": 1,
            "traceback": traceback.format_exc(),
        }
    with lock:
        answers.write(json.dumps(reply) + "\n")


def main() -> int:
    """Serve what the start of a run needs."""
    from isles.launch.ssh.node import NodeStart

    start = NodeStart()
    try:
        return serve({**operations(), **start.operations()})
    finally:
        start.close()


if __name__ == "__main__":
    code = main()
    os._exit(code)
