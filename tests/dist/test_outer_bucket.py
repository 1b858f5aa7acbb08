"""Engine bucket with real links, and moto's S3 server in place of a provider's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    """All have made the same steps, and hold the same bits."""
    for outer_step in map(str, range(turns)):
        found = [record["history"].get(outer_step) for record in records.values()]
        assert len({turn["outer_params"] for turn in found if turn}) == 1, outer_step
    for field in ("outer_params", "weights"):
        assert len({str(record[field]) for record in records.values()}) == 1, field


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
