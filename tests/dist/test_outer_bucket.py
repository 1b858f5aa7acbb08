"""Engine bucket with real links, and moto's S3 server in place of a provider's."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from isles.outer.bucket import BucketSettings
from tests.buckets import bucket
from tests.outer_trainer import Clusters

RULES = {"min_clusters": 2, "dead_after_s": 4.0}


class InBucket(Clusters):
    """Clusters that share a bucket, or a folder."""

    def __init__(self, folder: Path, url: str, **rules: Any) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder)
        self.settings = BucketSettings(url=url, rules=rules)
        self.options: dict[str, Any] = {
            "codec": "int8",
            "fragments": 2,
            "turns": 99,
            "join": "not needed",
            "link": {"heartbeat_s": 0.5, "bucket": self.settings},
        }

    def start(self, name: str, **options: Any) -> None:
        self.begin(name, {**self.options, **options})


def same(records: dict[str, dict[str, Any]], turns: int) -> None:
    """All have made the same outer steps, and hold the same bits."""
    for outer_step in map(str, range(turns)):
        found = [record["history"].get(outer_step) for record in records.values()]
        assert len({turn["outer_params"] for turn in found if turn}) == 1, outer_step
        # Who comes late keeps what it has learnt since.
        assert len({turn["weights"] for turn in found if turn and turn["is_in"]}) == 1, outer_step
    assert len({str(record["outer_params"]) for record in records.values()}) == 1


def test_clusters_meet_in_a_bucket_and_a_killed_one_comes_back(tmp_path: Path) -> None:
    with bucket(tmp_path / "s3") as there:
        clusters = InBucket(tmp_path / "run", f"{there.url}/test", **RULES)
        try:
            clusters.hold(2)
            clusters.start("a"), clusters.start("b")
            clusters.reached(2, "ab")
            clusters.kill("b")
            clusters.start("b")
            clusters.hold(3)
            clusters.reached(3, "ab")
            records = clusters.end(4, "ab")
        finally:
            clusters.stop()
    same(records, 4)
    assert all(turn["names"] == ["a", "b"] for turn in records["a"]["history"].values())


@pytest.mark.long
def test_faults_of_a_bucket_end_in_patience(tmp_path: Path) -> None:
    """Slow, busy, full, forbidden, away, with old lists: nothing is lost, and each is named."""
    faults: list[tuple[str, dict[str, Any], str]] = [
        ("slow", {"seconds": 0.5}, ""),
        ("busy", {"share": 0.3}, ""),
        ("stale", {}, ""),
        ("full", {}, "The bucket is full"),
        ("forbidden", {}, "the bucket is away, training goes on: it is forbidden"),
        ("away", {}, "the bucket is away, training goes on"),
    ]
    with bucket(tmp_path / "s3") as there:
        clusters = InBucket(
            tmp_path / "run", f"{there.url}/test", **{**RULES, "dead_after_s": 60.0}
        )
        try:
            clusters.hold(1)
            for name in "abc":
                clusters.start(name)
            clusters.reached(1, "abc")
            for turn, (kind, more, words) in enumerate(faults, start=1):
                there.have(kind, **more)
                clusters.hold(turn + 1)
                if words:
                    clusters.until(
                        lambda words=words: all(
                            any(words in text for text in clusters.record(name)["seen"])
                            for name in "abc"
                        ),
                        kind,
                    )
                    there.have("")
                clusters.reached(turn + 1, "abc")
                there.have("")
            records = clusters.end(len(faults) + 1, "abc")
        finally:
            there.have("")
            clusters.stop()
    same(records, len(faults) + 1)
    for turn in records["a"]["history"].values():
        assert turn["names"] == ["a", "b", "c"] and turn["is_in"]


@pytest.mark.long
def test_kills_and_freezes_lose_nothing_and_a_newcomer_takes_the_state(tmp_path: Path) -> None:
    chance, turns = random.Random("bucket"), 8
    with bucket(tmp_path / "s3") as there:
        rules = {**RULES, "keep_averages": 1}
        clusters = InBucket(tmp_path / "run", f"{there.url}/test", **rules)
        clusters.options |= {"scale": 16}
        try:
            clusters.hold(1)
            for name in "abc":
                clusters.start(name)
            clusters.reached(1, "abc")
            for turn in range(1, turns):
                name = chance.choice("abc")
                clusters.hold(turn + 1)
                pause(clusters, chance.uniform(0.0, 1.5))
                if turn % 2:
                    clusters.kill(name)
                    clusters.start(name)
                else:
                    gang = clusters.running[name]
                    gang.signal(signal.SIGSTOP)
                    pause(clusters, 6.0)
                    gang.signal(signal.SIGCONT)
                clusters.reached(turn + 1, "abc")
            clusters.start("d", seed=1)
            clusters.reached(turns, "d")
            clusters.until(lambda: clusters.record("d")["is_ready"], "d as a member")
            records = clusters.end(turns + 1, "abcd")
        finally:
            clusters.stop()
    same(records, turns + 1)
    assert records["a"]["history"][str(turns)]["names"] == ["a", "b", "c", "d"]


@pytest.mark.long
def test_what_a_bucket_refuses_at_the_start_is_said(tmp_path: Path) -> None:
    with bucket(tmp_path / "s3") as there:
        for kind, words in {
            "forbidden": "it is forbidden",
            "unconditional": "does not know conditional writes",
            "": "there is no such bucket",
        }.items():
            there.have(kind)
            url = f"{there.url}/x" if kind else "s3://nowhere-at-all/x"
            clusters = InBucket(tmp_path / f"run-{kind}", url, **RULES)
            try:
                clusters.start("a")
                assert clusters.running["a"].wait() == [1]
                assert any(words in text for text in clusters.record("a")["seen"]), kind
            finally:
                clusters.stop()


def pause(clusters: Clusters, seconds: float) -> None:
    """Let time pass, unless a process ends that should not."""
    end = time.monotonic() + seconds
    clusters.until(lambda: time.monotonic() > end, "the end of a pause")
