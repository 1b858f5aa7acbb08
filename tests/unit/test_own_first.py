"""Runs of other users in the same output folder: a name means a run of this user first."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.errors import UserError
from isles.plan.report import ClusterPlan
from isles.plan.verb import PlanOptions, plan_of
from isles.run.find import find_any
from isles.run.paths import RunDir
from isles.run.remote import (
    ClusterRun,
    MultiClusterRun,
    RemoteRun,
    list_multi_cluster,
    list_remotes,
    parent_of,
    write_remote,
)
from tests.live_records import metrics_row, node_record, rank_record, write_live, write_metrics
from tests.run_records import GONE, recorded_run

LATER = 3e9
FAR = RemoteRun("x-5", "me@h", "/far/x-5", (), "python3", "ssh", ("me@h",), 1.0)


def a_run(folder: Path, name: str, begun_at: float) -> RunDir:
    return recorded_run(folder / name, {"launcher": "local", "begun_at": begun_at, **GONE})[0]


def test_an_own_run_comes_before_newer_runs_of_others(tmp_path: Path, give) -> None:
    own, other = a_run(tmp_path, "x-2", 1.0), a_run(tmp_path, "x-9", LATER)
    exact = a_run(tmp_path, "x", LATER)
    several = MultiClusterRun(tmp_path / "x-11", (), LATER, LATER, {})
    several.path.mkdir()
    several.write()
    write_remote(tmp_path, replace(FAR, started_at=LATER))
    for run in (other, exact):
        give(run.path, run.resolved, run.attempt(1).launch)
    give(several.path / "clusters.json", *(tmp_path / ".remote").glob("*.json"))
    link = tmp_path / "x-10"
    link.symlink_to(own.path)
    give(link)
    for given in ("x", None):
        assert find_any(given, tmp_path) == own, given
    # The others are shown to a user who names them.
    assert find_any("x-9", tmp_path) == other and find_any("x-5", tmp_path).name == "x-5"
    for path in (own.path, link):
        path.rename(tmp_path / f"y-{path.name}")
    assert find_any("x", tmp_path) == exact


def test_a_name_that_another_user_has_taken_too_means_the_own_run(tmp_path: Path, give) -> None:
    own = a_run(tmp_path, "x-5", 1.0)
    write_remote(tmp_path, FAR)
    theirs = (tmp_path / ".remote").rename(tmp_path / ".remote.5")
    with pytest.raises(UserError, match="matches 2 runs"):
        find_any("x-5", tmp_path)
    give(*theirs.glob("*.json"))
    assert find_any("x-5", tmp_path) == own
    give(own.path, own.resolved, own.attempt(1).launch)
    with pytest.raises(UserError, match="matches 2 runs"):
        find_any("x-5", tmp_path)


def test_a_run_of_another_user_is_not_the_shared_folder_of_an_own_remote_run(
    tmp_path: Path, give
) -> None:
    far = write_remote(tmp_path, replace(FAR, path=str(tmp_path / "x-5")))
    here, attempt = recorded_run(tmp_path / "x-5", {"launcher": "slurm", "job_id": "7"})
    assert find_any("x-5", tmp_path) == here
    give(attempt.launch)
    assert find_any("x-5", tmp_path) == far


def test_a_record_of_another_user_is_no_parent_of_an_own_run(tmp_path: Path, give) -> None:
    own = a_run(tmp_path, "x-1", LATER)
    write_remote(tmp_path, FAR)
    (far,) = list_remotes(tmp_path)
    clusters = ClusterRun("a", "local", str(own.path)), ClusterRun("b", "ssh", FAR.path, FAR.ssh)
    (tmp_path / "m-1").mkdir()
    parent = MultiClusterRun(tmp_path / "m-1", clusters, LATER, LATER, {})
    parent.write()
    assert find_any(None, tmp_path) == parent
    assert [parent_of([parent], run) for run in (own, far)] == [(parent, c) for c in clusters]
    give(tmp_path / "m-1" / "clusters.json")
    (parent,) = list_multi_cluster(tmp_path)
    assert find_any(None, tmp_path) == own
    assert [parent_of([parent], run) for run in (own, far)] == [None, None]
    give(own.attempt(1).launch)
    assert parent_of([parent], own) == (parent, clusters[0]), "both are of the other user"


def test_a_plan_counts_no_run_of_another_user(run_file: Path, give) -> None:
    loaded = load_run_file(run_file)

    def look() -> ClusterPlan:
        (cluster,) = plan_of(loaded, PlanOptions(gpus="2x4090")).clusters
        return cluster

    def measured() -> str | None:
        speed = look().speed
        assert speed is not None
        return speed.measured.run if speed.measured is not None else None

    assert measured() is None
    card = {"device": "NVIDIA GeForce RTX 4090"}
    ranks = [rank_record(**card, micro_batch=rank.micro_batch) for rank in look().own.ranks]
    for name in ("tiny-1", "tiny-2"):
        run_dir = a_run(Path(loaded.config.output_dir), name, LATER)
        run_dir.resolved.write_text(dump_resolved(resolve(loaded, num_gpus=2)))
        write_live(run_dir.attempt(1), node_record("h", 0, ranks))
        write_metrics(run_dir, *map(metrics_row, range(1, 9)))
    attempt = run_dir.attempt(1)
    for path in (run_dir.metrics, attempt.live, attempt.launch, run_dir.resolved):
        assert measured() == "tiny-2"
        give(path)
        assert measured() == "tiny-1", path
        os.chown(path, os.geteuid(), os.getegid())
