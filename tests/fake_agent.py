"""A stand-in for isles.agent: obeys orders from a pipe, and leaves the same records.

Orders are JSON lines in RUN_DIR/orders; each is answered by a line in RUN_DIR/answers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from isles.run.paths import RunDir
from isles.run.records import write_record

run_dir = RunDir(Path(sys.argv[1]))
attempt = run_dir.attempt(int(sys.argv[3]))


def stop(signum: int, _: object) -> None:
    code = 130 if signum == signal.SIGINT else 85
    outcome(state="stopped", exit_code=code, step=7, reason=signal.Signals(signum).name, error=None)
    os._exit(code)


def outcome(**fields: Any) -> None:
    write_record(attempt.outcome, {**fields, "at": time.time()})


def obey(order: dict[str, Any]) -> None:
    match order.pop("do"):
        case "status":
            write_record(run_dir.status, {**order, "updated_at": time.time()})
        case "row":
            with run_dir.metrics.open("a") as stream:
                stream.write(json.dumps({**order, "at": time.time()}) + "\n")
        case "log":
            with attempt.rank_log(order["rank"]).open("a") as stream:
                stream.write(order["text"])
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "outcome":
            outcome(**order)
        case "exit":
            os._exit(order["code"])


signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
os.write(1, b"agent is ready\n")
with (run_dir.path / "answers").open("r+b", buffering=0) as answers:
    answers.write(b"ready\n")
    with (run_dir.path / "orders").open("r+b", buffering=0) as orders:
        while line := orders.readline():
            obey(json.loads(line))
            answers.write(b"done\n")
