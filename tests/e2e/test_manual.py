"""`launcher: manual`: one command typed on each node, late and in any order."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from typing import Any

from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.lab.home import (
    assert_nothing_left,
    end,
    isles,
    outcome_of,
    signal_all,
    until,
    until_step,
    write_run,
)
from tests.lab.hosts import Lab

ADDRESSES = ["10.77.1.1", "10.77.1.2", "10.77.1.3"]


def prepare(lab: Lab, name: str, **options: Any) -> tuple[str, list[list[str]]]:
    """`isles train` on the first host; the token of the start, and the words to type on each."""
    launcher = {"kind": "manual", "hosts": ADDRESSES}
    shape = {"device": "cpu", "gpus_per_node": 1, "workdir": None}
    write_run(lab, name, output_dir="/root/runs", launcher=launcher, **shape, **options)
    text = isles(lab, "train", f"{name}.yaml", host="a1")
    commands = re.findall(r"^ +(\S.* -m isles\.agent .*)", text, re.M)
    assert len(commands) == 3, text
    token = text.split()[-1]
    assert not any(token in command for command in commands), "a secret is on no command line"
    return token, [shlex.split(command) for command in commands]


def type_on(lab: Lab, host: str, words: list[str], token: str) -> subprocess.Popen[bytes]:
    command = ["bash", "-c", 'cd /shared && exec "$@"', "-", *words]
    process = lab.popen(host, command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(f"{token}\n".encode())
    process.stdin.flush()
    return process


def first_to_stay(
    one: subprocess.Popen[bytes], other: subprocess.Popen[bytes], words: str, code: ExitCode
) -> subprocess.Popen[bytes]:
    """Of a command that was typed twice at once, the one that goes on; the other is refused."""
    until(lambda: {one.poll(), other.poll()} != {None}, "one is refused")
    gone, stays = (one, other) if one.poll() is not None else (other, one)
    text = end(gone)
    assert gone.returncode == code and words in text, text
    return stays


def test_typed_late_they_wait_train_and_stop_together(lab: Lab) -> None:
    token, (first, second, third) = prepare(lab, "typed", training={"max_steps": 100_000})
    run_dir = RunDir(lab.root("a1") / "root" / "runs" / "typed-1")
    attempt = run_dir.attempt(1)
    on_a2, twice_a2 = type_on(lab, "a2", second, token), type_on(lab, "a2", second, token)
    on_a1, twice_a1 = type_on(lab, "a1", first, token), type_on(lab, "a1", first, token)
    on_a1 = first_to_stay(on_a1, twice_a1, "typed-1 is running already", ExitCode.USER)
    on_a2 = first_to_stay(on_a2, twice_a2, "node 1 is connected already: a2", ExitCode.PREFLIGHT)
    missing = "waiting for node 2 (10.77.1.3)"
    until(lambda: missing in str((read_record(run_dir.status) or {}).get("detail")), "it is named")
    on_a3 = type_on(lab, "a3", third, token)
    until_step(attempt, 3)
    signal_all(lab, "a2", signal.SIGINT, "--node", "1")
    texts = [end(process) for process in (on_a1, on_a2, on_a3)]
    codes = [process.returncode for process in (on_a1, on_a2, on_a3)]
    assert codes == [ExitCode.INTERRUPTED] * 3, texts
    assert missing in texts[1], "who waits says for whom"
    assert "rank 2 of 3" in texts[2]
    assert list_checkpoints(run_dir)[-1].step == outcome_of(attempt)["step"]
    assert_nothing_left(lab)
    text = isles(lab, "train", "typed.yaml", host="a2", expected=ExitCode.PREFLIGHT)
    assert "the first host is 10.77.1.1, but this machine is" in text
