"""Bundles of a Ray cluster: what a run file asks for, and which nodes could give it."""

from __future__ import annotations

from typing import Any

from isles.config.sections.cluster import ClusterConfig
from isles.launch.ray.bundles import (
    RayNode,
    bundles,
    label_selectors,
    lacking,
    match_nodes,
    ranks_of,
)


def cluster(*given: dict[str, Any], **more: Any) -> ClusterConfig:
    launcher = {"kind": "ray", "bundles": list(given)}
    return ClusterConfig.model_validate({"launcher": launcher, "gpus_per_node": 4, **more})


def test_one_bundle_is_for_every_node_and_several_are_one_for_each() -> None:
    same = cluster({"resources": {"CPU": 16}}, nodes="2:3")
    assert bundles(same) == [{"GPU": 4.0, "CPU": 16.0}] * 3
    other = cluster({}, {"gpus": 2, "label_selector": {"card": "old"}})
    assert (other.min_nodes, ranks_of(other)) == (2, (4, 2))
    assert bundles(other)[1] == {"GPU": 2.0, "CPU": 2.0}
    assert label_selectors(other) == [{}, {"card": "old"}]
    assert bundles(cluster(device="cpu")) == [{"CPU": 4.0}]


def test_each_bundle_gets_a_node_of_its_own_also_where_the_first_choice_is_wrong() -> None:
    large = RayNode("large", {"GPU": 4, "CPU": 8}, {"card": "new"})
    small = RayNode("small", {"GPU": 1, "CPU": 8}, {"card": "old"})
    wanted = [{"GPU": 1.0}, {"GPU": 4.0}]
    found = match_nodes(wanted, [{}, {}], [large, small])
    assert {number: node.name for number, node in found.items()} == {0: "small", 1: "large"}
    labels = [{"card": "!in(old)"}, {"card": "old"}]  # only Ray itself knows what the first means
    found = match_nodes(wanted, labels, [large, small])
    assert list(found) == [0]
    text = lacking(wanted, labels, found)
    assert text == "Ray has no node for 1 of 2: node 1 needs GPU 4, card=old"
