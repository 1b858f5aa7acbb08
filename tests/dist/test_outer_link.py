"""Clusters with real links, by a real hub or in a bucket of moto's S3 server in place of a
provider's: kills, freezes, newcomers, faults of the bucket."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from isles.outer.bucket import BucketSettings
from isles.outer.bucket.api import BucketMeeting
from isles.outer.hub.journal import Journal
from isles.outer.hub.samples import SampleLeases
from isles.run.objects import StoreError, open_store, probe
from tests.buckets import bucket
from tests.outer_trainer import SAMPLES, Clusters, serve
from tests.outer_world import overlaps, participants
from tests.ranks import start_ranks


class WithHub(Clusters):
    """A hub, and clusters."""

    def __init__(self, folder: Path, codec: str, fragments: int, **rules: Any) -> None:
        self.state, self.rules = folder / "state", folder / "rules.json"
        join, link = str(self.state / "join"), {"heartbeat_s": 0.5}
        super().__init__(folder, codec=codec, fragments=fragments, join=join, link=link)
        self.rules.write_text(json.dumps(rules))
        self.serve()

    def serve(self) -> None:
        self.running["hub"] = start_ranks(serve, 1, self.state, self.rules)
        self.until((self.state / "join").exists, "the hub")

    def journal(self) -> Journal:
        """The hub's, once it is killed; no sample was leased twice."""
        self.kill("hub")
        journal = Journal(self.state / "hub.sqlite")
        assert overlaps(journal) == []
        return journal


def test_kills_and_freezes_lose_no_contribution(tmp_path: Path) -> None:
    """The hub is killed, and a cluster stopped for a while, at random instants."""
    chance, blows = random.Random("int8"), ["hub", "freeze", "hub"]
    rules = {"wait": "all", "min_clusters": 3, "dead_after_s": 120.0}
    with WithHub(tmp_path, "int8", 2, **rules) as clusters:
        # A turn takes long enough to be hit.
        clusters.options |= {"scale": 16, "link": {"heartbeat_s": 0.5, "max_bytes_per_s": 1e6}}
        logs = [clusters.running["hub"].log]
        clusters.begin("abc")
        for outer_step, blow in enumerate(blows, start=1):
            clusters.hold(outer_step + 1)
            clusters.pause(chance.uniform(0.0, 0.5))
            if blow == "freeze":
                clusters.freeze(chance.choice("abc"), 3.0)
            else:
                clusters.kill("hub")
                clusters.serve()
            clusters.reached(outer_step + 1, "abc")
        logs += [gang.log for gang in clusters.running.values()]
        turns = len(blows) + 2
        records = clusters.end(turns, "abc")
        journal = clusters.journal()
        assert participants(journal) == [[1, 2, 3]] * turns
        assert SampleLeases(journal).counts()["averaged"] == turns * 3 * SAMPLES
        journal.close()
    history = records["a"]["history"]
    assert all(turn["is_in"] for turn in history.values())
    assert all(record["history"] == history for record in records.values())
    token = (clusters.state / "token").read_text().strip()
    for log in logs:
        text = log.read_text(errors="replace")
        assert token not in text and "Traceback" not in text, text


@pytest.mark.long
def test_a_straggler_applies_what_it_missed_and_a_newcomer_takes_the_state(tmp_path: Path) -> None:
    """b is frozen over two turns, c comes when four are over, d trains something else."""
    rules = {"wait": "all", "dead_after_s": 4.0, "keep_averages": 12}
    with WithHub(tmp_path, "topk:0.1", 2, **rules) as clusters:
        clusters.refused = "d"
        clusters.start("a"), clusters.start("b")
        clusters.until(lambda: all(clusters.record(n)["is_ready"] for n in "ab"), "a and b")
        clusters.reached(2, "ab")
        clusters.running["b"].signal(signal.SIGSTOP)
        clusters.reached(4, "a")
        clusters.start("c", seed=1)
        clusters.start("d", identity="another rate")
        clusters.reached(4, "c")
        clusters.until(lambda: clusters.record("c")["is_ready"], "c, of which the hub knows")
        clusters.running["b"].signal(signal.SIGCONT)
        clusters.reached(4, "b")
        a, b, c = clusters.end(6, "abc").values()
        assert clusters.running.pop("d").wait() == [1]
        clusters.journal().close()
    turns = list(a["history"].values())
    is_in = [turn["is_in"] for turn in b["history"].values()]
    assert is_in == [True, True, False, False, True, True]
    assert [turn["names"] for turn in turns[4:]] == [["a", "b", "c"]] * 2
    assert list(c["history"]) == ["4", "5"] and len(b["history"]) == 6
    assert any("Adopt(version=4" in event for event in c["seen"])
    assert not any("Adopt" in event for event in b["seen"])
    assert clusters.have_seen("lr is another rate in d, but 0.7 in the run", "d")


def in_bucket(folder: Path, url: str, **rules: Any) -> Clusters:
    """Clusters that share a bucket."""
    settings = BucketSettings(url=url, rules={"min_clusters": 2, "dead_after_s": 4.0, **rules})
    return Clusters(folder, link={"heartbeat_s": 0.5, "meeting": BucketMeeting(settings)})


def test_clusters_meet_in_a_bucket_and_a_killed_one_comes_back(tmp_path: Path) -> None:
    with (
        bucket(tmp_path / "s3") as there,
        in_bucket(tmp_path / "run", f"{there.url}/test") as clusters,
    ):
        clusters.start("a"), clusters.start("b")
        clusters.reached(2, "ab")
        clusters.kill("b")
        clusters.start("b")
        clusters.reached(3, "ab")
        records = clusters.end(4, "ab")
    assert all(turn["names"] == ["a", "b"] for turn in records["a"]["history"].values())


@pytest.mark.long
def test_faults_of_a_bucket_end_in_patience(tmp_path: Path) -> None:
    """Slow, busy, full, forbidden, away, with old lists: nothing is lost, and each is named."""
    faults: list[tuple[str, dict[str, Any], str]] = [
        ("slow", {"seconds": 0.5}, ""),
        ("busy", {"share": 0.3}, ""),
        ("stale", {}, ""),
        ("full", {}, "The bucket is full"),
        ("forbidden", {}, "the bucket is unreachable, training continues: access is forbidden"),
        ("away", {}, "the bucket is unreachable, training continues"),
    ]
    rules = {"min_clusters": 3, "dead_after_s": 60.0}  # the first turn has all three, too
    with (
        bucket(tmp_path / "s3") as there,
        in_bucket(tmp_path / "run", f"{there.url}/test", **rules) as clusters,
    ):
        clusters.begin("abc")
        for turn, (kind, more, words) in enumerate(faults, start=1):
            there.have(kind, **more)
            clusters.hold(turn + 1)
            if words:
                clusters.until(lambda words=words: clusters.have_seen(words, "abc"), kind)
                there.have("")
            clusters.reached(turn + 1, "abc")
            there.have("")
        for kind, url in (("missing", "s3://nowhere-at-all/x"), ("unconditional", there.url)):
            there.have(kind)
            with pytest.raises(StoreError) as caught:
                probe(open_store(url, "outer.url"))
            assert caught.value.kind == kind
        there.have("")
        records = clusters.end(len(faults) + 1, "abc")
    for turn in records["a"]["history"].values():
        assert turn["names"] == ["a", "b", "c"] and turn["is_in"]


@pytest.mark.long
def test_kills_and_freezes_lose_nothing_and_a_newcomer_takes_the_state(tmp_path: Path) -> None:
    chance, turns = random.Random("bucket"), 8
    with (
        bucket(tmp_path / "s3") as there,
        in_bucket(tmp_path / "run", f"{there.url}/test", keep_averages=1) as clusters,
    ):
        clusters.options["scale"] = 16
        clusters.begin("abc")
        for turn in range(1, turns):
            name = chance.choice("abc")
            clusters.hold(turn + 1)
            clusters.pause(chance.uniform(0.0, 1.5))
            if turn % 2:
                clusters.kill(name)
                clusters.start(name)
            else:
                clusters.freeze(name, 6.0)
            clusters.reached(turn + 1, "abc")
        clusters.start("d", seed=1)
        clusters.reached(turns, "d")
        clusters.until(lambda: clusters.record("d")["is_ready"], "d as a member")
        records = clusters.end(turns + 1, "abcd")
    assert records["a"]["history"][str(turns)]["names"] == ["a", "b", "c", "d"]
