"""wandb offline and a real MLflow server: over kills and restarts a run stays one run there."""

from __future__ import annotations

import json
import os
import struct
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from isles.config.sections.output import WandbConfig
from isles.errors import UserError
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from isles.track.wandb import resolve_mode
from tests.deadline import run_program
from tests.e2e.typed import Command, typed
from tests.ports import free_port
from tests.ranks import start_training, train_to_end
from tests.runs import rows_of

EACH_STEP = (
    "training.logging_steps=1",
    "training.eval_steps=10",
    "training.lr_scheduler_type=constant",
    "checkpoint.every_steps=10",
    "checkpoint.async_save=false",
)


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))


def wandb_files(run_dir: RunDir) -> list[Path]:
    """Of all starts in their order."""
    return sorted((run_dir.path / "wandb").glob("offline-run-*/*.wandb"))


def records(data: bytes) -> Iterator[bytes]:
    """Whole records of a `.wandb` file; a last one that was cut short is left out.

    It is a log in the format of LevelDB's (github.com/google/leveldb/blob/main/doc/log_format.md):
    blocks of 32 KiB, and parts of records behind headers of seven bytes, as its own is.
    """
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:  # too little for a header: the block's end is padded
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7 + length
        if kind == 0 or position > len(data):
            return
        parts += data[position - length : position]
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def wandb_points(run_dir: RunDir) -> list[dict[str, Any]]:
    """Every whole point that these files hold: metrics by name, and `_step`."""
    from wandb.proto import wandb_internal_pb2

    points = []
    for data in (data for file in wandb_files(run_dir) for data in records(file.read_bytes())):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            points.append(
                {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            )
    return points


def mlflow_losses(client: Any, run_dir: RunDir) -> list[tuple[int, float]]:
    """Steps and losses that the server has of the run."""
    run_id = (read_record(run_dir.tracker_record("mlflow")) or {}).get("run_id")
    if run_id is None:
        return []
    history = client.get_metric_history(run_id, "train/loss")
    return [(point.step, point.value) for point in history]


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[Command]:
    """A real MLflow server on loopback with a store in SQLite; killed with its workers."""
    line = f"exec mlflow server --host 127.0.0.1 --workers 1 --port {port} "
    line += "--backend-store-uri sqlite:///mlflow.db --artifacts-destination artifacts"

    def is_healthy() -> bool:
        with suppress(OSError):
            return (
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
            )
        return False

    with typed(folder, f"export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false\n{line}") as (server,):
        server.until(is_healthy)
        yield server


@pytest.mark.long
def test_kills_of_the_run_and_of_a_server_leave_one_run_with_the_same_numbers(run_file, tmp_path):
    from mlflow import MlflowClient

    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    client = MlflowClient(tracking_uri=uri)
    wandb = "{kind: wandb, mode: offline, project: p, tags: [a, b]}"
    mlflow = f"{{kind: mlflow, tracking_uri: '{uri}', experiment: tests}}"
    options = (*EACH_STEP, f"track=[{wandb}, {mlflow}]")
    with mlflow_server(tmp_path, port) as server:
        run_dir, _, gang = start_training(run_file, 1, "training.max_steps=100000", *options)
        enough = (lambda: wandb_points(run_dir), lambda: mlflow_losses(client, run_dir))
        gang.until(lambda: all(len(seen()) >= 25 for seen in enough) and list_checkpoints(run_dir))
        gang.kill()
        reached = list(read_rows(run_dir.metrics))[-1]["step"]
        saved = list_checkpoints(run_dir)[-1].step
        assert reached >= 25 and saved >= 10
        middle = reached + 300
        resume = str(run_dir.path)
        steps = f"training.max_steps={middle}"
        _, attempt, gang = start_training(run_file, 1, steps, *options, resume=resume)
        gang.until(lambda: mlflow_losses(client, run_dir)[-1][0] > reached)
        known = {step for step, _ in mlflow_losses(client, run_dir)}
        server.kill()
        assert gang.wait() == [0], "a server that is gone stops no training"
    assert (read_record(attempt.outcome) or {})["state"] == "finished"
    notes = (read_record(run_dir.status) or {})["notes"]
    assert (
        len([note for note in notes if note.startswith("mlflow failed; training continues")]) == 1
    )
    assert any("recorded rows were not sent (metrics.jsonl has them)" in note for note in notes)

    with mlflow_server(tmp_path, port):
        last = middle + 5
        _, code = train_to_end(run_file, 1, f"training.max_steps={last}", *options, resume=resume)
        assert code == 0
        # One run at the server, with numbers of metrics.jsonl, those of the last start, and the
        # run file.
        experiment = client.get_experiment_by_name("tests")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.run_name == run_dir.name and run.info.status == "FINISHED"
        shown = mlflow_losses(client, run_dir)
    rows = {row["step"]: row["loss"] for row in rows_of(run_dir)}
    assert {step for step, _ in shown} >= known | set(range(last - 4, last + 1))
    assert all(value == pytest.approx(rows[step]) for step, value in shown)
    assert run.data.params["training.learning_rate"] == "0.001"
    assert run.data.tags["now.training.max_steps"] == str(last), "what a restart has changed"
    summary = read_record(run_dir.summary) or {}
    assert run.data.metrics["final/last_loss"] == pytest.approx(summary["last_loss"])

    # One id over all starts, and the numbers of metrics.jsonl; a kill has cost a point or two.
    files = wandb_files(run_dir)
    assert len(files) == 3 and len({file.name for file in files}) == 1, "three starts, one id"
    points: dict[tuple[str, int], float] = {}
    for point in wandb_points(run_dir):
        for kind in ("train", "eval"):
            if (loss := point.get(f"{kind}/loss")) is not None:
                before = points.setdefault((kind, point["_step"]), loss)
                assert before == loss, "what was done again gave the same numbers"
    recorded = {(row["kind"], row["step"]): row["loss"] for row in read_rows(run_dir.metrics)}
    assert points.items() <= recorded.items()
    trained = {step for kind, step in points if kind == "train"}
    assert trained >= {*range(1, 26), *range(saved + 1, last + 1)}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any("wandb-core" in word for word in process.cmdline()):
                open_files = [file.path for file in process.open_files()]
                assert not any(str(run_dir.path) in file for file in open_files), "it outlives it"


@pytest.mark.long
def test_without_a_key_it_is_offline_and_says_so_or_refuses(tmp_path: Path) -> None:
    """In a process without a terminal's answers: it must not ask."""
    code = "import sys; from pathlib import Path; from isles.track.wandb import resolve_mode; "
    code += "from isles.config.sections.output import WandbConfig; "
    code += "print(resolve_mode(WandbConfig(), Path(sys.argv[1])))"
    env = {**os.environ, "HOME": str(tmp_path)}
    asked = run_program([sys.executable, "-c", code, tmp_path], env=env, input="")
    assert "'offline'" in asked.stdout and "wandb login" in asked.stdout
    with pytest.raises(UserError, match="no API key") as refused:
        resolve_mode(WandbConfig(mode="online"), tmp_path)
    assert "WANDB_API_KEY" in refused.value.fix
    assert resolve_mode(WandbConfig(mode="offline"), tmp_path) == ("offline", "")
