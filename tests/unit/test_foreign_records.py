"""Records of a run that somebody else has written: any content is shown, or treated as absent."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isles.cli import main
from isles.errors import ConfigError, ConfigErrors, UserError
from isles.monitor import bundle
from isles.monitor.clusters import group_by_run, multi_cluster_lines, multi_cluster_report
from isles.monitor.remote import reports_of_all
from isles.monitor.table import report_lines
from isles.run.join_line import JoinLine
from isles.run.process import ProcessId
from isles.run.records import write_record
from isles.run.remote import list_multi_cluster
from tests.live_records import gpu_record, metrics_row, node_record, rank_record, write_live
from tests.run_records import GONE, rank_error, recorded_run, two_hosts

ODD = st.sampled_from(
    [
        *(None, True, -1, 0, 1.5, 2**63, 10**400, 1e308, float("nan"), float("inf"), -(10**18)),
        *("", "x", "\x1b[31m", "../..", "9" * 5000, [], {}, [1], [[]], [None], {"a": 1}, {"0": 5}),
    ]
)
TEXTS = ("[" * 100_000, '{"a":' * 100_000, "", "\x00", "[]\n", "{}\n", '{"at": 1e999}\n')
VERBS = (
    ("status", "x-1"),
    ("status", "x-1", "--json"),
    ("status",),
    ("top", "x-1", "--json"),
    ("top", "x-1"),
    ("logs", "x-1"),
    ("checkpoint", "list", "x-1"),
    ("checkpoint", "verify", "x-1"),
    ("report", "x-1", "--print"),
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each value in a record, the record itself first."""
    yield place
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, part in value.items() if isinstance(value, dict) else listed:
        yield from places(part, (*place, key))


def changed(record: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy of a record with another value at a place."""
    if not place:
        return new
    found = copy.deepcopy(record)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = new
    return found


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Any]:
    """The records of a run that goes on, all in one folder that is the working folder too."""
    folder = tmp_path_factory.mktemp("records")
    launch = {"launcher": "local", **ProcessId.of(os.getpid()).record(), "world_size": 3}
    launch |= {"device": "cpu", "command": ["isles", "train"], "resumed_from": None}
    status = {"phase": "training", "step": 4, "total_steps": 8, "notes": ["a note"], "mfu": 0.4}
    status |= {"checkpoint_step": 4, "checkpoint_at": time.time()}
    member = {"name": "a", "state": "living", "step": 4, "heard_s": 1.0, "slow": ""}
    waits = {"round": 2, "waits_for": ["a"], "missing": {"a": "late"}, "contributed": ["b"]}
    meeting = {"round": 2, "fragments": 2, "heavy": {"name": "a", "share": 0.9}}
    meeting |= {"members": [{**member, "is_behind": False, "refused": ""}]}
    meeting |= {"open": [{**waits, "due_in_s": 3.0}]}
    last = {"outer_step": 2, "step": 4, "weights": {"a": 3, "b": 4}, "digest": "00"}
    outer = {"outer_step": 2, "is_averaged": True, "is_connected": True, "is_behind": False}
    outer |= {"sent_bytes": 5, "received_bytes": 5, "bytes_per_s": 1.0, "exposed_s": 1.0}
    outer |= {"hidden_s": 1.0, "hidden_share": 0.5, "last_outer_step": last, "meeting": meeting}
    status |= {"outer": outer, "loss": 2.0, "tokens_per_second": 9.0, "eta_s": 4.0, "detail": "x"}
    run_dir, attempt = recorded_run(folder / "runs" / "x-1", launch, status=status)
    two_hosts(attempt, "local")
    nodes = node_record("h0", 0, [rank_record()] * 2, [gpu_record(0)]), node_record("h1", 2, [])
    write_live(attempt, *nodes)
    rank_error(attempt, 1, "it broke")
    made = {"what": "x", "where": "h0", "fix": "y", "id": "rank.died", "level": "warning"}
    write_record(attempt.findings, {"at": 1.0, "findings": [made]})
    write_record(attempt.restart(1), {"at": 1.0, "cause": made, "step": 4, "decision": "restart"})
    write_record(attempt.nodes, {"at": 1.0, "nodes": {"0": {"name": "h0", "at": 1.0}}})
    write_record(attempt.stacks, {"at": 1.0, "ranks": {"0": "x"}})
    write_record(run_dir.balance, {"at": 1.0, "rows": [2, 2], "changes": [{"step": 2}]})
    write_record(run_dir.remote, {"url": "file:///b", "forget_after": 4, "step": 4, "at": 1.0})
    step = run_dir.checkpoints / "step-00000004"
    step.mkdir(parents=True)
    manifest = {"version": 2, "step": 4, "created_at": 1.0, "files": {}, "world_size": 3}
    write_record(step / "manifest.json", manifest)
    run_dir.metrics.write_text(json.dumps(metrics_row(4)) + "\n")
    run_dir.telemetry.mkdir()
    telemetry = {"at": time.time(), "host": {"cpu": 0.5}, "gpus": [{"index": 0, "use": 0.9}]}
    run_dir.node_telemetry(0).write_text(json.dumps(telemetry) + "\n")
    error = {"rank": 1, "host": "h", "what": "w", "where": "h", "fix": "f", "note": "n"}
    ended = {"state": "failed", "reason": "it broke", "step": 4, "error": error}
    recorded_run(folder / "runs" / "y-1", {**launch, **GONE}, ended)
    remote = {"name": "q-1", "ssh": "me@h", "path": "/q", "lines": [], "python": "py"}
    remote |= {"launcher": "ssh", "hosts": ["me@h"], "started_at": 1.0, "owner": ""}
    (folder / "runs" / ".remote").mkdir()
    write_record(folder / "runs" / ".remote" / "q.json", remote)
    shared = {"started_at": 1.0, "begun_at": 1.0, "hub": "", "typed": "isles train m.yaml"}
    here = {"name": "a", "launcher": "local", "ssh": "", "path": str(run_dir.path), "attempt": 1}
    far = {"name": "b", "launcher": "ssh", "ssh": "me@h", "path": "/q", "attempt": 1}
    bucket = {"outer": {"engine": "bucket", "url": "file:///b"}}
    for name, clusters, config in (
        ("m-1", [here, far], bucket),
        ("n-1", [{**here, "path": str(folder / "runs" / "y-1")}], {"outer": {"engine": "hub"}}),
    ):
        (folder / "runs" / name / "hub").mkdir(parents=True)
        whole = {**shared, "clusters": clusters, "config": config}
        write_record(folder / "runs" / name / "clusters.json", whole)
    hub = {**GONE, "run": "n-1", "settings": {"gather": 2}, "listen": "127.0.0.1:0"}
    write_record(folder / "runs" / "n-1" / "hub" / "process.json", hub)
    assert len(list_multi_cluster(folder / "runs")) == 2, "both are read"
    found = [*folder.rglob("*.json"), *folder.rglob("*.jsonl")]
    return {path: json.loads(path.read_text()) for path in sorted(found)}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_record_of_a_run_is_shown_or_treated_as_absent(
    records: dict[Path, Any], monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(sorted(records)))
    place = data.draw(st.sampled_from(list(places(records[path]))))
    value = data.draw(ODD | st.sampled_from(TEXTS).map(lambda text: (text,)))
    is_text = isinstance(value, tuple)
    text = value[0] if is_text else json.dumps(changed(records[path], place, value)) + "\n"
    words = data.draw(st.sampled_from(VERBS))
    folder = next(parent.parent for parent in path.parents if parent.name == "runs")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder))  # no ssh, to ask the machines that records name
    monkeypatch.setattr(bundle, "_STACKS_S", 0.1)  # the ranks of these records never answer
    kept, said = path.read_text(), io.StringIO()
    path.write_text(text)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            # A run of several clusters shows the records of its clusters, too.
            own = path.relative_to(folder / "runs").parts[0]
            above = {"x-1": "m-1", "y-1": "n-1", ".remote": "m-1"}
            named = data.draw(
                st.sampled_from([own if own[0] != "." else "x-1", above.get(own, own)])
            )
            code = main([word.replace("x-1", named) for word in words])
    finally:
        path.write_text(kept)
    assert code in range(8) and "Traceback" not in said.getvalue(), said.getvalue()[-3000:]


def test_one_odd_record_does_not_hide_the_other_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ([], {}, 3):
        recorded_run(tmp_path / "x-1", {"launcher": "local", "device": value, **GONE})
        recorded_run(tmp_path / "y-1", {"launcher": "local", "device": "cpu", **GONE})
        for words in (["status"], ["status", "x-1"], ["top", "x-1", "--json"]):
            assert main([*words, "--output-dir", str(tmp_path)]) == 0, (words, value)
            said = capsys.readouterr().out
            assert "x-1" in said and ("y-1" in said or len(words) > 1)
        shutil.rmtree(tmp_path / "x-1")
        shutil.rmtree(tmp_path / "y-1")


@pytest.mark.long
def test_no_odd_value_in_any_place_of_a_record_hides_the_runs_of_a_folder(
    records: dict[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Through what the verbs call: a whole verb for each place takes too long.
    monkeypatch.setenv("PATH", "/none")
    wrong = []
    for path, record in records.items():
        folder = next(parent for parent in path.parents if parent.name == "runs")
        kept = path.read_text()
        for place in places(record):
            for value in ([], {"a": [None]}, "x", -1.5, None):
                path.write_text(json.dumps(changed(record, place, value)) + "\n")
                try:
                    shown = reports_of_all(folder)
                    lines = [line for report in shown for line in report_lines(report)]
                    group_by_run(shown, folder)
                    for run in list_multi_cluster(folder):
                        lines += multi_cluster_lines(multi_cluster_report(run))
                    assert {"x-1", "y-1"} <= {report.name for report in shown} and lines
                    unshown = [r.hint for r in shown if r.reason.startswith("its records")]
                    assert not unshown, unshown
                except Exception as error:
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    wrong.append(f"{path.name} {place} {value}: {error!r:.200} {where}")
        path.write_text(kept)
    assert not wrong, "\n".join(wrong)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: f"isles-join:{b.hex()}"))
def test_any_join_line_is_read_or_refused_in_words(text: str) -> None:
    try:
        JoinLine.parse(text)
    except (UserError, ConfigError, ConfigErrors) as error:
        assert str(error)
