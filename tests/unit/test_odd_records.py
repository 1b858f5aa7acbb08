"""Files of a run or a bucket that are swapped during the look, endless, or too large to be read."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from isles.cli import main
from isles.facts.secrets import Redactor
from isles.monitor.bundle import Bundle
from isles.monitor.live.history import MetricsReader
from isles.run.objects import Folder, StoreError
from isles.run.records import write_record
from tests.run_records import GONE, recorded_run

OTHER = 5  # games, on every Debian
_AT_CWD, _EXCHANGE = -100, 2
_TRIES = 400
_HUGE = 1 << 40


@contextmanager
def swapped(one: Path, other: Path) -> Iterator[None]:
    """Let two paths change places, over and over, in another thread."""
    if sys.platform != "linux":
        pytest.skip("only Linux exchanges two paths at once")
    libc = ctypes.CDLL(None)  # whose calls run beside the interpreter
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            for _ in range(99):
                libc.renameat2(_AT_CWD, bytes(one), _AT_CWD, bytes(other), _EXCHANGE)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_swapped_folder_of_a_bucket_leads_nowhere(tmp_path: Path) -> None:
    inside, outside, evil = (tmp_path / name for name in ("b/n/t", "outside", "b/n/evil"))
    for folder in (inside, outside):
        folder.mkdir(parents=True)
    (outside / "secret.json").write_text("my key")
    (inside / "fine.json").write_text("fine")
    evil.symlink_to(outside)
    store = Folder(f"file://{tmp_path}/b", "n")
    left = tmp_path / "left"
    acts: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("t/secret.json"),
        "list": lambda: "secret.json" in store.sizes("t"),
        "fetch": lambda: store.fetch("t/secret.json", left, lambda count: None) or left.read_text(),
        "write": lambda: store.write("t/written", b"x"),
        "create": lambda: store.create("t/created", b"x"),
        "send": lambda: store.send(tmp_path / "b/n/own", "t/sent", lambda count: None),
        "delete": lambda: store.delete(["t/secret.json"]),
    }
    (tmp_path / "b/n/own").write_text("own")
    got = []
    with swapped(inside, evil):
        for _ in range(_TRIES):
            for name, act in acts.items():
                with suppress(StoreError, FileNotFoundError):
                    if act() and name in ("read", "list", "fetch"):
                        got.append(name)
    assert not got
    assert [path.name for path in outside.iterdir()] == ["secret.json"]
    folder = next(path for path in (inside, evil) if not path.is_symlink())
    # On a busy machine, the folder may be swapped during each try to send.
    names = {path.name for path in folder.iterdir()} | {"sent"}
    assert names == {"fine.json", "written", "created", "sent"}


def test_names_of_objects_stay_below_their_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "secret").write_text("my key")
    store = Folder(str(tmp_path / "b"))
    assert store.read(f"{tmp_path}/secret") is None
    for name in ("../secret", "x/../../secret", "x\0"):
        with pytest.raises(StoreError, match="is not a valid object name"):
            store.read(name)


def test_a_swapped_log_shows_no_other_file_in_a_report(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "x-1", {"launcher": "local"})
    log, evil, secret = attempt.rank_log(0), attempt.path / "evil", tmp_path / "key"
    log.write_text("fine\n")
    secret.write_text("my key\n")
    evil.symlink_to(secret)
    name = str(log.relative_to(run_dir.path))
    with swapped(log, evil):
        for _ in range(4 * _TRIES):
            gathered = Bundle(Redactor(()))
            gathered.add_end(name, log, 1 << 10)
            assert b"my key" not in b"".join(gathered.files.values())


def huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(_HUGE)  # a sparse file: it takes no space


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def test_no_look_reads_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    looks = (["status"], ["logs"], ["top", "--json"], ["checkpoint", "list"], ["report", "--yes"])
    for number, make in enumerate((huge, zeros, os.mkfifo, Path.mkdir)):
        run_dir, attempt = recorded_run(tmp_path / f"x-{number}", {"launcher": "local"})
        write_record(attempt.launch, {"launcher": "local", **GONE})
        for path in (
            *(run_dir.metrics, run_dir.resolved, run_dir.status, run_dir.join_line),
            *(attempt.token, attempt.agent_log, attempt.rank_log(0), attempt.node_log(0)),
        ):
            path.unlink(missing_ok=True)
            make(path)
        for words in looks:
            more = ["-o", str(tmp_path / f"{number}.zip")] if words[0] == "report" else []
            code = main([*words[:2], str(run_dir.path), *more])
            said = capsys.readouterr()
            assert code in (0, 1, 2), (make, words, said.err)
            assert "Traceback" not in said.err, (make, words)


def test_the_end_of_a_huge_file_of_metrics_counts(tmp_path: Path) -> None:
    huge(path := tmp_path / "metrics.jsonl")
    with path.open("ab") as stream:
        stream.write(b'\n{"kind": "train", "step": 3, "loss": 1.0}\n')
    history = MetricsReader(path)
    history.read()
    assert history.newest["step"] == 3


def test_a_stop_at_once_waits_no_longer_than_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, attempt = recorded_run(
        tmp_path / "x-1",
        {"launcher": "slurm", "job_id": "1"},
        status={"phase": "training"},
    )
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    os.chown(attempt.launch, OTHER, OTHER)
    write_record(attempt.job, {"state": "running", "at": attempt.launch.stat().st_mtime})
    assert main(["stop", str(run_dir.path), "--now", "--timeout", "0.1s"]) != 0
    assert "has not ended within" in capsys.readouterr().err


def test_odd_settings_of_several_clusters_end_in_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "m-1"
    run.mkdir()
    whole = {"started_at": 1.0, "begun_at": 1.0, "hub": ""}
    cluster = {"name": "a", "launcher": "local", "ssh": "", "path": str(tmp_path / "none")}
    engines: tuple[object, ...] = ("x", 3, [1], {"engine": 3}, {"engine": "bucket", "url": 3})
    odd = [{"clusters": [cluster], "config": {"outer": outer}} for outer in engines]
    for record in (*odd, {"clusters": [], "config": {}}):
        write_record(run / "clusters.json", {**whole, **record})
        for words in (["status"], ["status", str(run)], ["logs", str(run)]):
            named = words if len(words) > 1 else [*words, "--output-dir", str(tmp_path)]
            code = main(named)
            said = capsys.readouterr()
            assert code in range(8) and "bug in isles" not in said.err, (record, words, said.err)
            assert "Traceback" not in said.err, (record, words)
