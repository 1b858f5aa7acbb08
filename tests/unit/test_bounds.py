"""Records, logs and answers of others are shown within bounds of time and memory."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import resource
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.cli import main
from isles.config.foreign import parse_json
from isles.errors import ExitCode, UserError
from isles.facts.console import Console
from isles.facts.secrets import Redactor
from isles.monitor.bundle import Bundle
from isles.monitor.follow import RunFollower
from isles.monitor.live.model import Snapshot
from isles.monitor.live.multi_cluster import HubAnswer, MultiClusterView
from isles.monitor.live.rows import MOST_RANKS
from isles.monitor.logs import LineTail
from isles.run.begin import new_attempt
from isles.run.bucket import RunStore
from isles.run.checkpoints import _folders
from isles.run.manifest import MAX_MANIFEST_BYTES
from isles.run.outcome import end_failed, error_record
from isles.run.records import read_metrics, read_record
from isles.run.relay import unpack
from isles.run.restarts import (
    current_restart,
    last_restart,
    list_restarts,
    record_restart,
    restart_from,
)
from isles.track.local import JsonlTracker
from isles.train.record import Recorder
from tests.run_records import GONE, recorded_run

_ROOM_BYTES = 2 * 2**30


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """A read without end ends in a MemoryError, before the machine is full."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def packed(record: dict[str, Any]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(record).encode())).decode()


def restart(number: int, **more: Any) -> dict[str, Any]:
    known = {"number": number, "at": 1.0, "decision": "restart", "root_cause": {}, "why": "w"}
    known |= {"reached": 1, "saved": None, "count": number, "max_restarts": 3}
    return {**known, "is_counted": True, "world_size": 1, **more}


def test_any_number_of_ranks_is_counted_and_only_some_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = recorded_run(
        tmp_path / "x-1", {"launcher": "local", "world_size": 10**15, "device": "cpu", **GONE}
    )
    assert main(["top", str(run_dir.path), "--json"]) == 0
    shown = Snapshot.model_validate_json(capsys.readouterr().out)
    assert len(shown.ranks) == MOST_RANKS
    assert any(f"{10**15 - MOST_RANKS:,} more ranks" in note for note in shown.notes)
    assert main(["status", str(run_dir.path), "--check"]) in (0, 2)
    assert main(["dashboard", str(run_dir.path), "--export", str(tmp_path / "x.html")]) == 0


def test_all_members_of_a_hub_share_the_rows() -> None:
    nodes = {str(n): {"first_rank": 0, "num_ranks": 1024} for n in range(20_000)}
    texts = {
        "a": packed({"status": {"world_size": 2**61, "phase": "training"}}),
        "b": packed({"status": {"phase": "training"}, "live": {"nodes": nodes}}),
    }
    members = [
        {"name": name, "state": "living", "step": 1, "heard_s": 0.1, "slow": "", "is_behind": False}
        for name in texts
    ]
    answer = HubAnswer(
        "h:1",
        {"round": 1, "members": members},
        shown={name: (0.1, text) for name, text in texts.items()},
    )
    shown = MultiClusterView("r", "/r", {}).snapshot({}, {}, answer)
    assert len(shown.ranks) == MOST_RANKS and len(shown.hosts) < 5000
    assert sum("more ranks" in note for note in shown.notes) == 2


def test_names_that_a_hub_no_longer_shows_are_forgotten() -> None:
    view = MultiClusterView("r", "/r", {})
    for number in range(9):
        member = {"name": f"c{number}", "state": "living", "step": 1, "heard_s": 0.1, "slow": ""}
        view.snapshot({}, {}, HubAnswer("h:1", {"round": 1, "members": [member]}))
    assert len(view._views) == 1


def test_any_answer_of_a_hub_is_shown() -> None:
    odd = (None, 1, 1.5, "x", "\ud800", [], {}, [1], [[]], {"a": 1}, {"\ud800": "\ud800"}, 10**400)
    member = {"name": "a", "state": "living", "step": 1, "heard_s": 0.1, "slow": ""}
    member |= {"is_behind": False, "refused": "", "weight": 0.5, "since": 1, "tokens_per_s": 1.0}
    waits = {"round": 1, "waits_for": ["a"], "contributed": ["b"], "missing": {}, "due_in_s": 1.0}
    wrong = []
    for value in odd:
        answers = [{"round": 1, "members": [{**member, key: value}], "open": []} for key in member]
        answers += [{"round": 1, "members": [member], "open": [{**waits, k: value}]} for k in waits]
        answers += [{"members": [member], key: value} for key in ("round", "open", "heavy")]
        for answer in answers:
            try:
                view = MultiClusterView("r", "/r", {})
                view.snapshot({}, {}, HubAnswer("h:1", answer)).model_dump_json()
            except Exception as error:
                wrong.append(f"{answer}: {error!r:.200}")
    assert not wrong, "\n".join(wrong)


def test_a_lone_surrogate_in_a_record_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = {"phase": "\ud800", "detail": "\ud800", "step": 1}
    recorded_run(tmp_path / "x-1", {"launcher": "local", "device": "\udfff", **GONE}, status=status)
    for words in (["top", "--json"], ["status"], ["status", "--json"]):
        assert main([words[0], str(tmp_path / "x-1"), *words[1:]]) == 0
        assert "x-1" in capsys.readouterr().out


def test_a_run_with_large_records_says_so_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_run(tmp_path / "y-1", {"launcher": "local", "device": "cpu", **GONE})
    run_dir, attempt = recorded_run(
        tmp_path / "x-1", {"launcher": "local", "device": "cpu", **GONE}
    )
    first = attempt.restart(1)
    first.write_text(json.dumps(restart(1, root_cause={"a": [{}] * 500_000})))
    for number in range(2, 60):
        os.link(first, attempt.restart(number))
    assert main(["status", "--output-dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "y-1" in said.out and "Traceback" not in said.err
    assert main(["status", str(tmp_path / "x-1")]) == 0
    assert "restart-059.json is not readable" in capsys.readouterr().out
    os.link(first, attempt.outcome)
    assert main(["status", str(tmp_path / "x-1")]) == 0
    assert "outcome.json: the record has 1" in capsys.readouterr().out
    with pytest.raises(UserError, match="the record has 1"):
        new_attempt(run_dir)


def test_restarts_are_counted_over_records_that_cannot_be_read(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "x-1", {"launcher": "local"})
    for number in range(1, 301):
        attempt.restart(number).write_text(json.dumps(restart(number)))
    attempt.restart(250).write_text(" " * 2**21)
    listed = list_restarts(attempt)
    assert [entry.number for entry in listed] == list(range(201, 301))
    made = record_restart(run_dir, attempt, 301, "w", max_restarts=400, is_counted=True)
    assert made.count == 301 and last_restart(attempt) == made
    attempt.restart(301).write_text("{")
    made = record_restart(run_dir, attempt, 302, "w", max_restarts=400)
    assert made.count == 301


def test_records_of_long_errors_are_read(tmp_path: Path) -> None:
    _, attempt = recorded_run(tmp_path / "x-1", {"launcher": "local"})
    long = "\U0001f600" * 2**20
    error = error_record(long, id="", kind="E", code=ExitCode.TRAINING, traceback=long)
    end_failed(attempt, error)
    outcome = read_record(attempt.outcome)
    assert outcome is not None and outcome["reason"].endswith("\U0001f600")
    attempt.restart(1).write_text(json.dumps(restart(1, root_cause=error, why=error["what"])))
    assert restart_from(read_record(attempt.restart(1))) is not None


def test_a_status_keeps_the_newest_notes_and_a_follower_shows_each_once(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "x-1", {"launcher": "local", "begun_at": 1.0})
    recorder = Recorder(run_dir, is_main=True, world_size=1)
    out = io.StringIO()
    follower = RunFollower(run_dir, attempt, Console(file=out, width=80), Console(file=out))
    try:
        for number in range(150):
            recorder.note(f"[{number}] " + "x" * 5000)
            if number in (9, 139):
                follower.look()
    finally:
        recorder.close()
    follower.look()
    status = read_record(run_dir.status)
    assert status is not None and len(status["notes"]) == 100 and status["num_notes"] == 150
    shown = [int(number) for number in re.findall(r"\[(\d+)\]", out.getvalue())]
    assert shown == [*range(10), *range(40, 150)]


def test_a_follower_shows_the_newest_of_very_many_rows(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "x-1", {"launcher": "local", "begun_at": 1.0})
    row = '{"kind": "train", "step": %d, "at": %d}\n'
    run_dir.metrics.write_text("".join(row % (n, n + 10) for n in range(20_000)))
    out = io.StringIO()
    RunFollower(run_dir, attempt, Console(file=out, width=80), Console(file=out)).look()
    text = out.getvalue()
    assert "19,000 earlier rows are not shown" in text and "step 19999 " in text
    assert text.count("\n") < 1100


def test_records_of_clusters_are_kept_within_bounds() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    texts = [packed({"status": {"n": n, "a": [{}] * 60_000}}) for n in range(16)]
    for _ in range(2):
        assert [unpack(text)["status"]["n"] for text in texts] == list(range(16))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 200 * 1024
    assert unpack(texts[-1]) is unpack(texts[-1])


def test_the_newest_restart_tells_how_many_there_were(tmp_path: Path) -> None:
    _, attempt = recorded_run(tmp_path / "x-1", {"launcher": "local"})
    assert (current_restart(attempt), last_restart(attempt)) == (0, None)
    for number, decision in ((1, "restart"), (2, "restart"), (3, "fail")):
        attempt.restart(number).write_text(json.dumps(restart(number, decision=decision)))
        last = last_restart(attempt)
        assert last is not None and last.number == number
        assert current_restart(attempt) == min(number, 2)


def test_a_read_of_a_log_ends_at_the_size_that_it_had(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a\nb\n")
    tail, seen = LineTail(path), []
    for line in tail.lines():
        seen.append(line)
        assert len(seen) < 10, "the read goes on for as long as the log grows"
        with path.open("a") as stream:
            stream.write("more\n" * 30_000)
    assert seen == ["a", "b"]
    assert len(tail.read()) == 60_000


def test_lines_of_a_log_are_whole_over_blocks(tmp_path: Path) -> None:
    path = tmp_path / "log"
    long = "x" * 200_000
    path.write_text(f"{long}\nold\rnew\n" + "0%\r" * 100_000 + "100%\r")
    tail = LineTail(path)
    assert tail.read() == [long, "new"]
    assert tail.read(final=True) == ["100%"]


def test_a_resumed_run_keeps_its_rows_without_all_of_them_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as stream:
        for step in range(30_000):
            stream.write(json.dumps({"kind": "train", "step": step, "loss": 1.0}) + "\n")
        stream.write('{"kind": "tr')
    JsonlTracker(path, resumed_step=20_000).close()
    rows = read_metrics(path)
    assert next(rows)["step"] == 0  # one at a time
    assert [row["step"] for row in rows] == list(range(1, 20_001))
    assert not list(tmp_path.glob(".metrics*"))


_SMALL = "[]," * 400_000 + "[]"


def test_very_many_small_values_are_not_parsed(tmp_path: Path) -> None:
    """An empty list of two bytes becomes an object of fifty."""
    junk = '{"junk": [' + _SMALL + "]}"
    path = tmp_path / "manifest.json"
    path.write_text(junk)
    assert read_record(path, MAX_MANIFEST_BYTES) is None
    with pytest.raises(ValueError, match="more than 4,000,000 values"):
        parse_json("[" + "[]," * 2_000_001 + "[]]")
    store = tmp_path / "bucket" / "x-1" / "checkpoints" / "step-00000003"
    store.mkdir(parents=True)
    (store / "manifest.json").write_text(junk)
    copy = RunStore(f"file://{tmp_path / 'bucket'}", "x-1")
    assert copy.record("checkpoints/step-00000003/manifest.json") is None
    # A run of a thousand ranks has long manifests and records.
    honest = {f"tensors-{n:05d}.bin": {"size_bytes": n, "sha256": "0" * 64} for n in range(20_000)}
    path.write_text(json.dumps({"files": honest}))
    assert (read_record(path, MAX_MANIFEST_BYTES) or {})["files"] == honest


def test_a_step_has_one_folder(tmp_path: Path) -> None:
    run_dir, _ = recorded_run(tmp_path / "x-1", {"launcher": "local"})
    for name in ("step-a0", "step-3", "step-00000003.old", "step-00000003"):
        (run_dir.checkpoints / name).mkdir(parents=True)
    assert [path.name for path in _folders(run_dir)] == ["step-00000003"]


def test_a_full_report_reads_no_more_files(tmp_path: Path) -> None:
    bundle = Bundle(Redactor([]), 100_000)
    for number in range(50):
        path = tmp_path / f"{number}.json"
        path.write_text('{"token": "hf_' + "a" * 20_000 + '"}\n')
        bundle.add_end(f"{number}.json", path, 1 << 20)
    assert len(bundle.files) <= 12
    assert [text for text in bundle.left_out if "the report is full" in text] == [
        bundle.left_out[-1]
    ]
