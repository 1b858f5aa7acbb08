"""Trackers: what they need, and that one which fails or hangs costs a run nothing."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from isles.config.sections.output import MLflowConfig
from isles.errors import ConfigError, MissingDependencyError
from isles.run.packages import require_packages
from isles.run.records import MAX_ROWS_BYTES, read_metrics
from isles.track.base import Background, RunFacts, Trackers, redacted
from isles.track.local import JsonlTracker, TensorBoardTracker
from isles.track.mlflow import MLflowTracker, load_mlflow
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.run_files import load

RUN = "model: {name_or_path: gpt2}\ndata: {sources: [{path: a}]}\ntraining: {max_steps: 5}\n"


@each("wandb", "mlflow", "tensorboard")
def test_a_package_that_is_missing_is_named_before_the_start(name, *, tmp_path, monkeypatch):
    config = load(tmp_path, RUN + f"track: [{name}]").config
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    require_packages(config)
    monkeypatch.setitem(sys.modules, name, None)  # as find_spec sees what is not installed
    with pytest.raises(MissingDependencyError, match=name) as raised:
        require_packages(config)
    assert "pip install 'isles[" in raised.value.fix


def test_mlflow_needs_a_server(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI is not set"):
        require_packages(load(tmp_path, RUN + "track: [mlflow]").config)
    there = "track: [{kind: mlflow, tracking_uri: 'http://a'}]"
    require_packages(load(tmp_path, RUN + there).config)


def row(step: int) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 1 / step, "at": 1.7e9 + step}


class Kept:
    """A remote tracker that keeps what it gets, and fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.rows: list[dict[str, Any]] = []
        self.summaries: list[object] = []
        self.opened = 0
        self.failures = failures

    def open(self) -> Kept:
        self.opened += 1
        return self

    def log(self, rows: Sequence[dict[str, Any]]) -> None:
        if rows and self.failures:
            self.failures -= 1
            raise OSError("http://user:secret@tracker is gone")
        self.rows += rows

    def close(self, summary: dict[str, Any] | None) -> None:
        self.summaries.append(summary)


def test_rows_arrive_once_and_in_order_and_those_that_a_slow_one_loses_are_counted():
    rows = [row(step) for step in range(1, 1201)]
    lost = "kept: 1195 recorded rows were not sent (metrics.jsonl has them)"
    for max_rows, told in ((1200, []), (5, [lost])):
        kept, said, opens = Kept(), list[str](), threading.Event()

        def open_slowly(kept: Kept = kept, opens: threading.Event = opens) -> Kept:
            assert opens.wait(DEADLINE_S)
            return kept.open()

        background = Background("kept", open_slowly, print_line=said.append, max_rows=max_rows)
        for one in rows:
            background.log(one)
        background.begin_close({"steps": 1200})
        opens.set()
        background.end_close(time.monotonic() + DEADLINE_S)
        assert kept.rows == rows[:max_rows] and said == told
        assert kept.summaries == [{"steps": 1200}] and kept.opened == 1


def test_one_that_fails_is_named_once_and_gets_later_rows_when_it_is_back():
    kept, said = Kept(failures=3), list[str]()
    background = Background("kept", kept.open, print_line=said.append)
    end, step = time.monotonic() + DEADLINE_S, 0
    while not kept.rows and time.monotonic() < end:
        step += 1
        background.log(row(step))
        background.wait(time.monotonic() + 0.01)
    background.begin_close(None)
    background.end_close(time.monotonic() + DEADLINE_S)
    assert kept.rows == [row(one) for one in range(kept.rows[0]["step"], step + 1)]
    assert kept.summaries == [None] and kept.opened == 4
    assert len(said) == 2 and "is gone" in said[0] and "secret" not in said[0]
    left = step - len(kept.rows)
    assert f"{left} recorded rows were not sent (metrics.jsonl has them)" in said[1]
    text = redacted("cannot reach http://me:pass@host:5000/api and https://token@other/x@y")
    assert text == "cannot reach http://...@host:5000/api and https://...@other/x@y"


@pytest.mark.usefixtures("own_environ")
def test_a_server_that_never_answers_costs_a_step_nothing_and_the_end_its_deadline(
    tmp_path, monkeypatch
):
    """It accepts connections, and that is all."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    load_mlflow()
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        facts = RunFacts("run-1", tmp_path, tmp_path / "track" / "mlflow.json", {"seed": 0})
        config = MLflowConfig(tracking_uri=uri)
        remote = Background("mlflow", lambda: MLflowTracker(config, facts), print_line=said.append)
        local = JsonlTracker(tmp_path / "metrics.jsonl", resumed_step=0)
        trackers = Trackers([local], [remote], said.append)
        server.settimeout(DEADLINE_S)
        connection, _ = server.accept()  # now it hangs
        began = time.monotonic()
        for step in range(1, 51):
            trackers.log(row(step))
        trackers.close(timeout_s=3.0)
        took = time.monotonic() - began
        connection.close()
    assert remote.wait(time.monotonic() + DEADLINE_S)  # it has been refused since
    assert took < 60, "less than what mlflow itself waits for an answer"
    assert said[0].startswith("waiting at most")
    assert "mlflow did not answer in time: 50 recorded rows were not sent" in said[1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 50


def test_a_local_tracker_that_fails_is_left_out_and_the_others_go_on(tmp_path):
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    broken = TensorBoardTracker(path / "logs", resumed_step=0)
    trackers = Trackers([broken, JsonlTracker(path, resumed_step=0)], (), said.append)
    for step in (1, 2, 3):
        trackers.log(row(step))
    trackers.close()
    assert len(path.read_text().splitlines()) == 3
    assert len(said) == 1 and "TensorBoard failed and is not used again" in said[0]


def test_metrics_go_neither_through_a_link_nor_into_a_pipe(tmp_path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    other.write_text('{"kind": "train", "step": 1}\n')
    path.symlink_to(other)
    for _ in range(2):
        tracker = JsonlTracker(path, resumed_step=5)
        tracker.log(row(6))
        tracker.close()
        assert not path.is_symlink() and json.loads(path.read_text().splitlines()[-1]) == row(6)
        path.unlink()
        os.mkfifo(path)
    assert len(other.read_text().splitlines()) == 1


def test_only_the_end_of_rows_without_end_is_read(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"kind": "train", "step": step}) + "\n" for step in (1, 2, 3)]
    with path.open("w") as stream:
        stream.write(rows[0])
        stream.truncate(MAX_ROWS_BYTES + 99)  # a hole, which takes no room on the disk
        stream.seek(0, os.SEEK_END)
        stream.writelines(["\n", *rows[1:]])
    assert [found["step"] for found in read_metrics(path)] == [2, 3]
    assert "is too long, so isles reads only its last 1.0 GiB" in caplog.text


@each(0, 20)
def test_tensorboard_shows_one_curve_over_a_restart(resumed_step, *, tmp_path):
    """Also when the run was killed before its first checkpoint, and begins anew."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardTracker(tmp_path, resumed_step=0)
    for step in range(10, 40, 10):
        first.log(row(step))  # killed: never closed
    second = TensorBoardTracker(tmp_path, resumed_step=resumed_step)
    redone = range(resumed_step + 10, 60, 10)
    for step in redone:
        second.log(row(step) | {"loss": 5.0})
    second.close()
    first.close()
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [event.step for event in shown] == list(range(10, 60, 10))
    assert [event.step for event in shown if event.value == 5.0] == list(redone)
