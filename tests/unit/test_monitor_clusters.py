"""A run on several clusters: which clusters a start means, what status and the end show."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.check.plan import Extent
from isles.check.verb import run_check
from isles.config.clusters import named_cluster
from isles.config.load import Loaded, load_run_file
from isles.errors import ConfigError, UserError
from isles.launch.base import StartOptions
from isles.launch.multi_cluster import hub_place, local_environs, refuse_peers
from isles.monitor.clusters import (
    MultiClusterReport,
    multi_cluster_lines,
    multi_cluster_report,
    outcome_lines,
)
from isles.monitor.multi_cluster import MultiClusterStart, choose
from isles.outer.hub.journal import Journal
from isles.outer.hub.members import Membership
from isles.outer.hub.rules import Settings
from isles.outer.hub.samples import SampleLeases
from isles.run.find import find_any, find_cluster, run_of
from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import write_record
from isles.run.remote import ClusterRun, MultiClusterRun, RemoteRun, write_remote
from tests.run_records import recorded_run
from tests.runs import bare_run
from tests.unit.test_begin import add_checkpoint
from tests.unit.test_launch import four_gpus

TWO = "[{name: a}, {name: b}]"
THREE = "[{name: a}, {name: b}, {name: c}]"


def load(folder: Path, clusters: str, *overrides: str) -> Loaded:
    content = {"name": "t", "output_dir": str(folder / "runs"), "outer": {"kind": "diloco"}}
    content |= {"model": {"name_or_path": "llama-2m", "init": "scratch"}}
    content |= {"data": {"sources": [{"type": "fake"}]}, "training": {"max_steps": 1000}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_run_file(path, (f"clusters={clusters}", *overrides))


def cluster_run(folder: Path, name: str, state: str = "", **status: Any) -> ClusterRun:
    """A cluster whose run ended so; empty: it was killed."""
    outcome = {"state": state} if state else None
    run_dir, _ = recorded_run(folder / "runs" / f"t-{name}-1", {}, outcome, status=status)
    return ClusterRun(name, "local", str(run_dir.path), "", 1)


def several(loaded: Loaded, *clusters: ClusterRun, typed: str = "") -> MultiClusterRun:
    """A run that was started before."""
    path = Path(loaded.config.output_dir) / f"{loaded.config.name}-1"
    path.mkdir(parents=True)
    config = loaded.config.model_dump(mode="json")
    run = MultiClusterRun(path, clusters, 1.0, time.time(), config, typed=typed)
    run.write()
    return run


def test_a_run_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    loaded, output_dir = load(tmp_path, TWO), tmp_path / "runs"
    far = RemoteRun("t-b-1", "me@far", "/far/t-b-1", (), "python3", "ssh", ("me@far",), 1.0)
    write_remote(output_dir, far)
    there = ClusterRun("b", "ssh", "/far/t-b-1", "me@far", 1)
    run = several(loaded, cluster_run(tmp_path, "a"), there)
    for given in (None, "t", "t-1", str(run.path)):
        assert find_any(given, output_dir) == run
    here = RunDir(Path(run.clusters[0].path))
    assert find_any("t-a-1", output_dir) == here == run_of(run, run.clusters[0])
    assert find_cluster("t", output_dir) == here
    assert find_cluster("t", output_dir, "b") == far
    bare_run(output_dir / "t-2")
    assert find_any("t", output_dir) == RunDir(output_dir / "t-2")


def test_a_start_goes_on_with_those_that_neither_run_nor_have_finished(tmp_path: Path) -> None:
    loaded = load(tmp_path, THREE)
    assert choose(loaded, "auto").todo == {"a": "no", "b": "no", "c": "no"}
    a, b = cluster_run(tmp_path, "a"), cluster_run(tmp_path, "b", "finished")
    old = several(loaded, a, b, ClusterRun("gone", "local"))
    choice = choose(loaded, "auto")
    assert choice.is_resumed and choice.run.path == old.path
    assert choice.todo == {"a": a.path, "c": "no"}
    for words in ("resuming t-1", "c is new", "b has finished", "gone is no longer"):
        assert words in choice.note
    assert [cluster.name for cluster in choice.run.clusters] == ["a", "b", "c"]
    fresh = choose(loaded, "no")
    assert fresh.run.name == "t-2" and not fresh.is_resumed
    with pytest.raises(UserError, match="not a multi-cluster run"):
        choose(loaded, "t-7")


def test_a_finished_run_is_not_begun_again(tmp_path: Path) -> None:
    loaded = load(tmp_path, TWO)
    several(loaded, *(cluster_run(tmp_path, name, "finished") for name in "ab"))
    choice = choose(loaded, "auto")
    assert choice.note == "t-1 is finished, so this is a new run: t-2"
    assert choice.todo == {"a": "no", "b": "no"}
    more = choose(load(tmp_path, THREE), "auto")
    assert more.run.name == "t-2", "nobody is left to give c the weights"
    for path in (cluster.path for cluster in choose(loaded, "t-1").run.clusters):
        status = {"step": 1000, "total_steps": 1000, "updated_at": time.time() + 1}
        write_record(RunDir(Path(path)).status, status)
    assert choose(loaded, "t-1").todo == {}, "there is nothing left to train"
    longer = choose(load(tmp_path, TWO, "training.max_steps=1200"), "t-1")
    assert set(longer.todo) == {"a", "b"} and "no" not in longer.todo.values()
    assert "have finished" not in longer.note


def test_other_mathematics_is_no_resume(tmp_path: Path) -> None:
    a = cluster_run(tmp_path, "a")
    add_checkpoint(RunDir(Path(a.path)), 5)
    several(load(tmp_path, TWO), a, ClusterRun("b", "local"))
    new = load(tmp_path, "[{name: a, strategy: {kind: fsdp}}, {name: b}]", "outer.lr=0.5")
    with pytest.raises(UserError, match=r"outer.lr: 0.7 -> 0.5") as caught:
        choose(new, "auto")
    assert "clusters" not in str(caught.value)
    assert "outer.lr: 0.7 -> 0.5" in choose(new, "t-1").note
    with pytest.raises(UserError, match="steps left after step 5: 995 -> 495"):
        choose(load(tmp_path, TWO, "training.max_steps=500"), "auto")


def test_clusters_of_one_machine_share_its_gpus_and_meet_on_loopback(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", four_gpus(tmp_path)["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    auto = local_environs(load(tmp_path, "[{name: a}, {name: b, gpus_per_node: 1}]"))
    cards = {"a": "0,1,2", "b": "3"}
    assert auto == {name: {"CUDA_VISIBLE_DEVICES": own} for name, own in cards.items()}
    own = "{name: b, environment: {variables: {CUDA_VISIBLE_DEVICES: '7'}}}"
    mixed = local_environs(load(tmp_path, f"[{{name: a, device: cpu, gpus_per_node: 2}}, {own}]"))
    assert mixed["b"] == {"CUDA_VISIBLE_DEVICES": "7"} and list(mixed["a"]) == ["OMP_NUM_THREADS"]
    with pytest.raises(ConfigError, match=r"more GPUs than the 4 .*: a 4, b at least 1") as caught:
        local_environs(load(tmp_path, "[{name: a, gpus_per_node: 4}, {name: b}]"))
    assert "device: cpu" in caught.value.fix
    assert local_environs(load(tmp_path, "[{name: a}]")) == {}
    assert hub_place(load(tmp_path, TWO)) == ("127.0.0.1:0", "")
    public = load(tmp_path, TWO, "outer.public=127.0.0.1:29400")
    assert hub_place(public) == ("127.0.0.1:29400", "127.0.0.1:29400")


def test_a_damaged_record_of_the_own_hub_is_named(tmp_path: Path) -> None:
    loaded = load(tmp_path, TWO)
    run = several(loaded, cluster_run(tmp_path, "a"))
    run.state.mkdir()
    options = StartOptions(loaded.path, (f"clusters={TWO}",), "auto", False, print, print)
    for damaged in ({}, {"settings": None}, {"settings": [1]}, {"settings": "gather"}):
        record = {**ProcessId.of(os.getpid()).record(), **damaged}
        write_record(run.state / "process.json", record)
        with pytest.raises(UserError, match="settings in the hub's record are invalid") as caught:
            MultiClusterStart(loaded, options).start()
        assert "process.json" in str(caught.value.where) and "isles stop" in caught.value.fix


def test_a_cluster_is_chosen_by_name(tmp_path: Path) -> None:
    loaded = load(tmp_path, f"[{{name: a}}, {{name: {'b' * 62}}}]")
    own = named_cluster(loaded, "a")
    assert own.config.name == "t-a" and len(own.config.clusters) == 1
    with pytest.raises(ConfigError, match="64 characters"):
        named_cluster(loaded, "b" * 62)
    with pytest.raises(ConfigError, match="cluster c not found"):
        named_cluster(loaded, "c")


def test_status_says_who_is_slow_and_who_is_away(tmp_path: Path) -> None:
    clusters = cluster_run(tmp_path, "a"), cluster_run(tmp_path, "b", "failed")
    run = several(load(tmp_path, TWO), *clusters)
    found = multi_cluster_report(run)
    assert (found.state, found.hub_error) == ("failed", "it does not run")
    training = {"state": "running", "phase": "training"}
    reports = {
        name: found.clusters[name].model_copy(update={**training, "tokens_per_second": speed})
        for name, speed in (("a", 1000.0), ("b", 100.0))
    }
    members = [
        {"name": "a", "state": "living", "is_behind": False, "heard_s": 1.0},
        {"name": "b", "state": "dropped", "is_behind": False, "heard_s": 40.0},
    ]
    waiting = {"round": 8, "waits_for": ["b"], "contributed": ["a"], "due_in_s": None}
    waiting["missing"] = {"b": "not heard for 40s"}
    answer = {"round": 8, "fragments": 2, "members": members, "open": [waiting]}
    text = "\n".join(multi_cluster_lines(MultiClusterReport(run, "running", reports, answer, "")))
    assert re.search("  a  .* running .* 1.0k .* 1s ago", text)
    assert "round 8 (2 fragments)" in text and "round 8 waits for b (not heard for 40s)" in text
    assert "b is in no round: dropped, last seen 40s ago" in text
    assert "b: computes 100 tokens/s, the fastest 1.0k" in text


def test_a_failure_counts_before_a_stop_and_the_end_says_what_goes_on(tmp_path: Path) -> None:
    stopped = cluster_run(tmp_path, "a", "stopped", step=5)
    run = several(load(tmp_path, TWO), stopped, typed="isles train run.yaml seed=3")
    for codes, expected in (((0, 0), 0), ((0, 130), 130), ((130, 3, 0), 3), ((85, 5), 5)):
        lines, code = outcome_lines(run, dict(enumerate(codes)))
        assert code == expected
    assert lines[-1] == "  `isles train run.yaml seed=3` resumes all of them"


def test_only_clusters_of_the_same_turns_are_said_to_hold_the_same(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[{name: a}, {name: b}, {name: c}, {name: d}]")
    turns = {"a": (7, True), "b": (9, True), "c": (9, True), "d": (9, False)}
    clusters = []
    for name, (step, is_averaged) in turns.items():
        outer = {"outer_step": step, "is_averaged": is_averaged}
        outer["last_outer_step"] = {"digest": str(step)}
        clusters.append(cluster_run(tmp_path, name, "finished", outer=outer))
    lines, code = outcome_lines(several(loaded, *clusters), dict.fromkeys("abcd", 0))
    text = "\n".join(lines)
    assert code == 0 and lines[0] == "t-1 is finished"
    a, b, c, d = (f"{cluster.path}/model" for cluster in clusters)
    assert f"the model   {b}" in text and f"the same weights {c}" in text
    assert f"OTHER weights, of fewer rounds {a}" in text
    assert f"OTHER weights, trained on since the last round {d}" in text


def test_clusters_that_begin_together_wait_for_one_another_at_first(tmp_path: Path) -> None:
    now, book = [100.0], Journal(tmp_path / "book.sqlite")
    started = (book, Settings(gather=2, gather_s=30.0), SampleLeases(book), lambda: now[0])
    membership = Membership(*started)
    membership.touch(1)
    assert membership.least == 2
    now[0] += 31.0
    assert membership.least == 1, "the other has not come"
    membership = Membership(*started)  # after a restart
    membership.touch(1)
    assert membership.least == 2
    membership.touch(2)
    assert membership.least == 1


def test_peers_that_cannot_find_one_another_are_refused(tmp_path: Path) -> None:
    """Engine hivemind from one run file."""
    peer = "/ip4/127.0.0.1/tcp/30001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    known, listens = f"initial_peers: [{peer}]", "host_maddrs: [/ip4/0.0.0.0/tcp/30002]"
    two_sites = "[{name: a}, {name: b, launcher: {kind: ssh, hosts: [me@b]}, workdir: /w}]"
    shared = (
        "a, b are on the same machine and would share /ip4/0.0.0.0/tcp/30002, identity_path k.pem"
    )
    for clusters, hivemind, words in (
        (TWO, "", "but none is set"),
        (two_sites, known, "other machines run b"),
        (TWO, f"{known}, {listens}, identity_path: k.pem", shared),
    ):
        more = ("outer.engine=hivemind", f"outer.hivemind={{{hivemind}}}")
        loaded = load(tmp_path, clusters, *more)
        with pytest.raises(ConfigError, match=re.escape(words)):
            refuse_peers(loaded)
        with pytest.raises(ConfigError, match=re.escape(words)):
            run_check(loaded.path, (f"clusters={clusters}", *more), (), Extent(), print)
    more = ("outer.engine=hivemind", f"outer.hivemind={{{known}, {listens}}}")
    refuse_peers(load(tmp_path, two_sites, *more))
