"""What an earlier run showed goes before a guess: a plan beside a real run's records."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from isles.config.load import load_run_file
from isles.errors import ExitCode
from isles.plan.report import Speed
from isles.plan.show import text_of
from isles.plan.verb import PlanOptions, plan_of
from isles.run.records import read_rows
from tests.e2e.typed import Command

Typed = tuple[str, ...]


def speed_of(run_file: Path, *typed: str, **options: str) -> Speed:
    """The speed that a plan tells of the only cluster."""
    (cluster,) = plan_of(load_run_file(run_file, typed), PlanOptions(**options)).clusters
    assert cluster.speed is not None
    return cluster.speed


def test_a_plan_tells_what_an_earlier_run_on_the_same_cores_showed(run_file: Path) -> None:
    # Long enough for the agent to have seen the ranks while they train.
    steps = 400
    two: Typed = ("clusters.0.gpus_per_node=2", "training.logging_steps=1")
    two = (*two, f"training.max_steps={steps}")
    assert speed_of(run_file, *two).measured is None, "nothing has run yet"
    command = Command("train", run_file, *two, cwd=run_file.parent)
    assert command.end() == ExitCode.OK, command.text
    metrics = run_file.parent / "runs" / "tiny-1" / "metrics.jsonl"
    rows = [row for row in read_rows(metrics) if row["kind"] == "train"][2:]
    found = speed_of(run_file, *two).measured
    assert found is not None
    assert (found.run, found.first_step, found.last_step) == ("tiny-1", 3, steps)
    assert found.step_s == statistics.median(row["step_time_s"] for row in rows)
    assert found.memory_bytes == max(row["memory_bytes"] for row in rows)
    # As many seconds more as there are more rows; tokens are the run's.
    larger = speed_of(run_file, *two, "training.global_batch_size=24")
    assert larger.step_s == pytest.approx(2 * found.step_s)
    assert larger.tokens_per_s == found.tokens_per_s
    shown = text_of(
        plan_of(load_run_file(run_file, two), PlanOptions()),
        details=False,
        is_terminal=False,
        width=100,
    )
    assert f"in run tiny-1, steps 3 to {steps}" in " ".join(shown.split())
    others: tuple[Typed, ...] = (
        ("clusters.0.gpus_per_node=1",),
        (*two, "data.seq_length=16"),
        (*two, "strategy={kind: fsdp}"),
        (*two, "training.precision=bf16-mixed"),
    )
    for typed in others:
        assert speed_of(run_file, *typed).measured is None, typed
    assert speed_of(run_file, *two, gpus="2x4090").measured is None
    # The same records, as a run on two cards would have left them: what has fitted fits.
    attempt = run_file.parent / "runs" / "tiny-1" / "attempts" / "001" / "live.json"
    attempt.write_text(attempt.read_text().replace('"CPU"', '"NVIDIA GeForce RTX 4090"'))
    (cluster,) = plan_of(load_run_file(run_file, two), PlanOptions(gpus="2x4090")).clusters
    assert cluster.own.seen_bytes == found.memory_bytes
    assert cluster.own.fits
    # Records that another version may have written, or nobody.
    for text in ('{"nodes": [1]}', '{"nodes": {"0": {"name": 5}}}', "no record"):
        attempt.write_text(text)
        assert speed_of(run_file, *two).measured is None, text
