"""What an earlier run showed goes before a guess: a plan beside a real run's records."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from isles.config.load import load_run_file
from isles.plan.report import Speed
from isles.plan.show import text_of
from isles.plan.verb import PlanOptions, plan_of
from tests.e2e.typed import isles, the_run
from tests.runs import rows_of


def speed_of(run_file: Path, *typed: str, **options: str) -> Speed:
    """The speed that a plan tells of the only cluster."""
    (cluster,) = plan_of(load_run_file(run_file, typed), PlanOptions(**options)).clusters
    assert cluster.speed is not None
    return cluster.speed


def test_a_plan_tells_what_an_earlier_run_on_the_same_cores_showed(run_file: Path) -> None:
    # Long enough for the agent to have seen the ranks while they train.
    steps = 400
    two = ("clusters.0.gpus_per_node=2", "training.logging_steps=1", f"training.max_steps={steps}")
    assert speed_of(run_file, *two).measured is None, "nothing has run yet"
    isles("train", run_file, *two, cwd=run_file.parent)
    rows = rows_of(the_run(run_file))[2:]
    found = speed_of(run_file, *two).measured
    assert found is not None
    assert (found.run, found.first_step, found.last_step) == ("tiny-1", 3, steps)
    assert found.step_s == statistics.median(row["step_time_s"] for row in rows)
    assert found.memory_bytes == max(row["memory_bytes"] for row in rows)
    # As many seconds more as there are more rows; tokens are the run's.
    larger = speed_of(run_file, *two, "training.global_batch_size=24")
    assert larger.step_s == pytest.approx(2 * found.step_s)
    assert larger.tokens_per_s == found.tokens_per_s
    plan = plan_of(load_run_file(run_file, two), PlanOptions())
    shown = text_of(plan, details=False, is_terminal=False, width=100)
    assert f"in run tiny-1, steps 3 to {steps}" in " ".join(shown.split())
    assert speed_of(run_file, "clusters.0.gpus_per_node=1").measured is None
    for other in ("data.seq_length=16", "strategy={kind: fsdp}", "training.precision=bf16-mixed"):
        assert speed_of(run_file, *two, other).measured is None, other
    assert speed_of(run_file, *two, gpus="2x4090").measured is None
    # The same records, as a run on two cards would have left them: what has fitted fits.
    live = the_run(run_file).attempt(1).live
    live.write_text(live.read_text().replace('"CPU"', '"NVIDIA GeForce RTX 4090"'))
    (cluster,) = plan_of(load_run_file(run_file, two), PlanOptions(gpus="2x4090")).clusters
    assert cluster.own.seen_bytes == found.memory_bytes and cluster.own.fits
    # Records that another version may have written, or nobody.
    for text in ('{"nodes": [1]}', '{"nodes": {"0": {"name": 5}}}', "no record"):
        live.write_text(text)
        assert speed_of(run_file, *two).measured is None, text
