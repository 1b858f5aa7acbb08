"""Records of a run that somebody else has written: any content is shown, or treated as absent."""

from __future__ import annotations

import copy
import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isles.cli import main
from isles.errors import ConfigError, ConfigErrors, UserError
from isles.run.join_line import JoinLine
from isles.run.process import ProcessId
from isles.run.records import write_record
from tests.live_records import gpu_record, metrics_row, node_record, rank_record, write_live
from tests.run_records import rank_error, recorded_run, two_hosts

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
    status = {"phase": "training", "step": 4, "total_steps": 8, "notes": ["a note"], "mfu": 0.4}
    status |= {"checkpoint_step": 4, "checkpoint_at": time.time()}
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
    remote = {"name": "q-1", "ssh": "me@h", "path": "/q", "lines": [], "python": "py"}
    remote |= {"launcher": "ssh", "hosts": ["me@h"], "started_at": 1.0, "owner": ""}
    (folder / "runs" / ".remote").mkdir()
    write_record(folder / "runs" / ".remote" / "q.json", remote)
    several = folder / "runs" / "m-1"
    several.mkdir()
    cluster = {"name": "a", "launcher": "local", "ssh": "", "path": str(run_dir.path)}
    whole = {"clusters": [cluster], "started_at": 1.0, "begun_at": 1.0, "values": {}, "hub": ""}
    write_record(several / "clusters.json", whole)
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
    kept, said = path.read_text(), io.StringIO()
    path.write_text(text)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            code = main([w.replace("x-1", "m-1") if "m-1" in str(path) else w for w in words])
    finally:
        path.write_text(kept)
    assert code in range(8) and "Traceback" not in said.getvalue(), said.getvalue()[-3000:]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: f"isles-join:{b.hex()}"))
def test_any_join_line_is_read_or_refused_in_words(text: str) -> None:
    try:
        JoinLine.parse(text)
    except (UserError, ConfigError, ConfigErrors) as error:
        assert str(error)
