"""Engine gloo between clusters that cannot average directly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.test_outer_link import Clusters


@pytest.mark.long
def test_clusters_that_do_not_get_together_average_through_the_rendezvous(tmp_path: Path) -> None:
    """b names a network interface that its host does not have."""
    clusters = Clusters(tmp_path, "gloo", "int8", 1, 2, wait="all", min_clusters=2)
    try:
        clusters.start("a")
        clusters.start("b", link={**clusters.options["link"], "interface": "tailscale7"})
        a, b = clusters.end("a", "b")
    finally:
        clusters.stop()
    assert a["outer_params"] == b["outer_params"] and a["weights"] == b["weights"]
    for record in (a, b):
        assert [turn[1:3] for turn in record["history"].values()] == [[True, ["a", "b"]]] * 2
        (told,) = [event for event in record["seen"] if "go through the rendezvous" in event]
        assert "outer.interface tailscale7 is no network interface of b's host" in told
