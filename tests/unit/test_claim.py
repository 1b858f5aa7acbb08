"""Starts of one name at one instant: one process begins at a time, and no claim outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isles.errors import UserError
from isles.run.begin import begin_attempt
from isles.run.claim import claimed
from isles.run.find import is_run_dir
from isles.run.paths import RunDir
from isles.run.process import ProcessId
from tests.deadline import DEADLINE_S, at_once
from tests.each import each
from tests.unit.test_begin import resolved_from

# Each start waits for one byte of a pipe that all of them share, and lives until the pipe closes.
STARTS = """
import json, os, sys
from pathlib import Path
from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.errors import UserError
from isles.run.begin import begin_attempt
path, gate = Path(sys.argv[1]), int(sys.argv[2])
for line in sys.stdin:
    name, resume = json.loads(line)
    resolved = resolve(load_run_file(path, [f"name={name}"]), num_gpus=0)
    print("ready", flush=True)
    os.read(gate, 1)
    try:
        begun, attempt = begin_attempt(resolved, path.read_text(), resume)
        answer = [begun.run_dir.name, attempt.number]
    except UserError as error:
        answer = [error.id, error.what]
    print(json.dumps(answer), flush=True)
"""
HOLD = """
import sys, signal
from pathlib import Path
from isles.run.claim import claimed
with claimed(Path(sys.argv[1]), "tiny"):
    print("in", flush=True)
    sys.stdin.read()
"""

CLAIM = f".tiny.{os.geteuid()}.claim"


class Starts:
    """Three processes, each of which starts the run that it is told to."""

    def __init__(self, run_file: Path) -> None:
        self._read, self._write = os.pipe()
        command = [sys.executable, "-c", STARTS, str(run_file), str(self._read)]
        pipe = subprocess.PIPE
        self._all = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=[self._read])
            for _ in range(3)
        ]

    def at_once(self, name: str, *resumes: str) -> list[tuple[str, str | int]]:
        """What each has begun, or the id and the words of its error."""
        for process, resume in zip(self._all, resumes, strict=True):
            process.stdin.write(f"{json.dumps([name, resume])}\n")
            process.stdin.flush()
        for process in self._all:
            assert process.stdout.readline() == "ready\n"
        os.write(self._write, b"123")
        return [tuple(json.loads(process.stdout.readline())) for process in self._all]

    def end(self) -> None:
        os.close(self._write)
        os.close(self._read)
        for process in self._all:
            process.stdin.close()
            process.wait(DEADLINE_S)
            process.stdout.close()


@contextmanager
def starts(run_file: Path) -> Iterator[Starts]:
    found = Starts(run_file)
    try:
        yield found
    finally:
        found.end()


def ids(answers: list[tuple[str, str | int]]) -> Counter[str]:
    return Counter(first for first, _ in answers)


def test_of_three_starts_at_one_instant_one_begins(run_file: Path, tmp_path: Path) -> None:
    """Also of three that resume a run. Each round has a new name."""
    output_dir, expected = tmp_path / "runs", set[str]()
    with starts(run_file) as three:
        for number in range(8):
            name = f"first{number}"
            answers = three.at_once(name, *["auto"] * 3)
            assert ids(answers) == {f"{name}-1": 1, "run.running": 2}, answers
            words = [str(what) for id, what in answers if id == "run.running"]
            assert all(what.startswith(f"{name}-1 is running on ") for what in words)
            expected.add(f"{name}-1")
        for number in range(4):
            run_dir = RunDir(output_dir / f"first{number}-1")
            # The three live: their starts have to be those of processes that have ended.
            for attempt in run_dir.attempts():
                record = json.loads(attempt.launch.read_text())
                attempt.launch.write_text(json.dumps({**record, "started": 1.0}))
            how = [str(run_dir.path), "auto", "auto"] if number % 2 else ["auto"] * 3
            answers = three.at_once(f"first{number}", *how)
            assert sorted(answers)[0] == (run_dir.name, 2), answers
            assert ids(answers) == {run_dir.name: 1, "run.running": 2}, answers
        for number in range(4):
            answers = three.at_once(f"new{number}", *["no"] * 3)
            names = [f"new{number}-{n}" for n in (1, 2, 3)]
            assert sorted(answers) == [(name, 1) for name in names], answers
            expected.update(names)
    assert {path.name for path in output_dir.iterdir()} == expected
    for path in output_dir.iterdir():
        assert is_run_dir(path), path
        left = {entry.name for entry in (path / "attempts").iterdir()}
        assert left <= {"001", "002"}, left


def test_a_killed_process_holds_no_claim(run_file: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "runs"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(output_dir)], stdin=pipe, stdout=pipe, text=True
    ) as holder:
        assert holder.stdout.readline() == "in\n"
        assert [path.name for path in output_dir.iterdir()] == [CLAIM]
        holder.send_signal(signal.SIGKILL)
        holder.wait(DEADLINE_S)
        begun, _ = begin_attempt(resolved_from(run_file), run_file.read_text(), "auto")
    assert [path.name for path in output_dir.iterdir()] == [begun.run_dir.name] == ["tiny-1"]


def claim_of(output_dir: Path, record: dict[str, object], name: str = CLAIM) -> Path:
    """A claim as a process with this record would leave it."""
    token = output_dir / name / ("a" * 32)
    token.parent.mkdir(parents=True)
    token.write_text(json.dumps(record))
    return token


HERE = {"host": socket.gethostname(), "pid": os.getpid(), "started": 1.0}
LIVES = ProcessId.of(os.getpid()).record()
ELSEWHERE = {"host": "elsewhere", "pid": 1, "started": 1.0}
OLD = 10_000.0


@each(
    (HERE, 0.0, ""),  # its pid is another's now
    (HERE, -OLD, ""),
    (ELSEWHERE, OLD, ""),
    (ELSEWHERE, -OLD, ""),  # a clock was ahead
    ({}, OLD, ""),  # cut short by a power failure
    (ELSEWHERE, 0.0, "elsewhere (pid 1)"),
    ({}, 0.0, "without a process"),
    (LIVES, 0.0, f"(pid {os.getpid()})"),
    (LIVES, OLD, f"(pid {os.getpid()})"),
)
def test_a_claim_counts_while_its_process_may_live(record, age, holder, *, tmp_path, monkeypatch):
    monkeypatch.setattr("isles.run.claim._PATIENCE_S", 0.0)
    token = claim_of(tmp_path, record)
    at = token.stat().st_mtime - age
    os.utime(token, (at, at))
    if not holder:
        with claimed(tmp_path, "tiny"):
            assert not token.exists()
        assert list(tmp_path.iterdir()) == []
        return
    with pytest.raises(UserError, match="another process is starting tiny now") as caught:
        claimed(tmp_path, "tiny").__enter__()
    assert holder in caught.value.what and caught.value.id == "run.running"
    assert [token] == list(token.parent.iterdir()) and [token.parent] == list(tmp_path.iterdir())
    with claimed(tmp_path, "tiny-2"):
        pass  # another name


def test_what_killed_starts_have_left_goes(tmp_path: Path) -> None:
    killed = claim_of(tmp_path, HERE, f".other.claim-{'b' * 32}")
    lives = claim_of(tmp_path, LIVES, f".third.claim-{'c' * 32}")
    empty, fresh = (tmp_path / f"{CLAIM}-{letter * 32}" for letter in "de")
    (tmp_path / CLAIM).mkdir()  # killed while it gave the claim back
    for path in (empty, fresh):
        path.mkdir()
    os.utime(empty, (1.0, 1.0))
    with claimed(tmp_path, "tiny"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted([lives.parent, fresh])
    assert lives.exists() and not killed.exists()


def test_those_who_find_a_stale_claim_at_once_come_in_one_by_one(tmp_path: Path) -> None:
    inside, most, came = list[int](), list[int](), list[int]()

    def start() -> None:
        with claimed(tmp_path, "tiny"):
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            came.append(1)

    for _ in range(6):
        claim_of(tmp_path, HERE)
        at_once(4, start)
    assert len(came) == 24 and max(most) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_claim_is_nothing_but_a_folder_of_records(tmp_path: Path) -> None:
    """A link or a file in its place is refused, and nothing behind it is touched."""
    behind = claim_of(tmp_path / "behind", HERE, "x")
    kept = claim_of(tmp_path / "odd", HERE).with_name("thesis.txt")
    kept.write_text("{}")
    os.utime(kept, (1.0, 1.0))
    for name in ("link", "file"):
        (tmp_path / name).mkdir()
    (tmp_path / "link" / CLAIM).symlink_to(behind.parent)
    (tmp_path / "file" / CLAIM).write_text("")
    for name in ("link", "file"):
        with pytest.raises(UserError, match="a file is in the place of a folder") as caught:
            claimed(tmp_path / name, "tiny").__enter__()
        assert caught.value.where == str(tmp_path / name / CLAIM)
        assert [path.name for path in (tmp_path / name).iterdir()] == [CLAIM]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isles.run.claim._PATIENCE_S", 0.0)
        with pytest.raises(UserError, match=r"thesis\.txt"):
            claimed(tmp_path / "odd", "tiny").__enter__()
    assert behind.exists() and kept.exists()


@each(32 * "a", "thesis.txt")
def test_a_link_in_a_claim_leads_nowhere(name, *, tmp_path, monkeypatch):
    """It ends no start's patience, and what it leads to stays."""
    monkeypatch.setattr("isles.run.claim._PATIENCE_S", 0.0)
    (tmp_path / CLAIM).mkdir()
    link = tmp_path / CLAIM / name
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=f"by {name}, without a process"):
        claimed(tmp_path, "tiny").__enter__()
    assert list(tmp_path.iterdir()) == [link.parent] and link.is_symlink()


def test_what_killed_starts_have_left_is_removed_over_no_link(tmp_path: Path) -> None:
    output_dir, own = tmp_path / "runs", tmp_path / "own"
    for folder in (output_dir / f".x.claim-{'b' * 32}", own):
        folder.mkdir(parents=True)
        for number, text in enumerate(("a file of this user", "", json.dumps(HERE))):
            path = folder / (str(number) * 32)
            path.write_text(text)
            os.utime(path, (1.0, 1.0))
    (output_dir / ".y.claim-z").symlink_to(own)
    with claimed(output_dir, "tiny"):
        pass
    assert [path.name for path in (output_dir / f".x.claim-{'b' * 32}").iterdir()] == ["0" * 32]
    assert len(list(own.iterdir())) == 3


def test_nothing_is_claimed_where_no_run_can_be_made() -> None:
    """A run in a folder that takes nothing new can be resumed: its attempts are claimed anyhow."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # not closed, as /tmp of tests is
        Path(name).chmod(0o555)
        try:
            if user == 0:
                os.seteuid(65534)
            with claimed(Path(name), "tiny"):
                assert list(Path(name).iterdir()) == []
        finally:
            os.seteuid(user)
