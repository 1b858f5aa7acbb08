"""The section outer: its rules in words, and the part of a run file that one cluster has."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from isles.config.clusters import named_cluster
from isles.config.load import Loaded, load_run_file
from isles.config.resolve import dump_resolved, load_resolved, resolve
from isles.config.resume import changed_mathematics
from isles.config.sections.outer import DiLoCoConfig
from isles.config.show import show
from isles.errors import ConfigError, ConfigErrors
from tests.each import each

CONTENT = {
    "model": {"name_or_path": "llama-2m", "init": "scratch"},
    "data": {"sources": [{"type": "fake"}]},
    "training": {"max_steps": 1000},
}
TWO = "clusters=[{name: a, gpus_per_node: 2, strategy: {kind: fsdp}}, {name: b, balance: even}]"
DILOCO = "outer={kind: diloco}"


def load(folder: Path, *overrides: str) -> Loaded:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(CONTENT))
    return load_run_file(path, overrides)


def outer(folder: Path, text: str) -> DiLoCoConfig:
    found = load(folder, f"outer={{kind: diloco, {text}}}").config.diloco
    assert found is not None
    return found


@each(
    ("overrides", "what", "fix"),
    [
        (["outer=diloco"], 'outer is "diloco", not a section', "{kind: diloco}"),
        (
            ["outer=sparseloco"],
            "not a section",
            "{kind: diloco, codec: {kind: topk, density: 0.02}, lr: 1.0, momentum: 0.0}",
        ),
        (["outer={kind: none, lr: 1}"], "unknown key lr", "kind: diloco"),
        (["outer={kind: diloco, engine: gloo}"], "not one of its values", "mean hub?"),
        (["outer={kind: diloco, hivemind: {relay: true}}"], "nothing to engine hub", "hivemind"),
        (["outer={kind: diloco, engine: hivemind, public: 'h:1'}"], "public h:1", "engine: hub"),
        (
            [
                "outer={kind: diloco, engine: hivemind, "
                "hivemind: {initial_peers: [/ip4/192.0.2.1/tcp/30001]}}"
            ],
            "/ip4/192.0.2.1/tcp/30001",
            "",
        ),
        (["outer={kind: diloco, sync_every: 2000}"], "2000 is more than max_steps 1000", "500"),
        (["outer={kind: diloco, fragments: 501}"], "501 fragments", "at most 500"),
        (["outer={kind: diloco, fragments: 5, delay: 100}"], "100 steps later", "less than 100"),
        (
            ["outer={kind: diloco, warmup_sync_every: 50}"],
            "means nothing to warmup_rounds 0",
            "1 or more",
        ),
        (
            ["outer={kind: diloco, warmup_rounds: 2, warmup_sync_every: 501, sync_every: 400}"],
            "warmup_sync_every 501 is more than sync_every 400",
            "at most 400",
        ),
        (
            ["outer={kind: diloco, warmup_rounds: 2, warmup_sync_every: 2, fragments: 3}"],
            "3 fragments cannot have a round each in warmup_sync_every 2 steps",
            "at most 2",
        ),
        (
            ["outer={kind: diloco, warmup_rounds: 2}"],
            "last until step 1000, and max_steps is 1000",
            "use fewer",
        ),
        (
            [
                "outer={kind: diloco, sync_every: auto, warmup_rounds: 1, warmup_sync_every: 50, "
                "lr: 1}"
            ],
            "nothing to sync_every auto",
            "use sync_every with a number",
        ),
        (["outer={kind: diloco, wait: {grace: 5s}}"], "neither", "{time_boxed: 60s}"),
        (["outer={kind: diloco, wait: {time_boxed: 5s, quorum: 2}}"], "both", "{quorum: 2"),
        (["outer={kind: diloco, min_clusters: 3, wait: {quorum: 2}}"], "min_clusters 3", "lower"),
        (["outer={kind: diloco, codec: {density: 0.1}}"], "nothing to kind int8", "topk"),
        (
            ["outer={kind: diloco, codec: topk}"],
            "momentum 0.9 goes badly",
            "momentum: 0.7 and lr: 0.9",
        ),
        (["outer={kind: diloco, sync_every: auto, wait: {quorum: 2}}"], "auto", "wait: all"),
        (["outer={kind: diloco, alpha: 0.1}"], "nothing to delay 0", "delay"),
        (["outer={kind: diloco, max_sync_overhead: 0.1}"], "sync_every 500", "auto"),
        (["outer={kind: diloco, interface: eth0}"], "unknown key", "delete it: clusters average"),
        (["outer={kind: diloco, max_rate: 20}"], "max_rate is 20", "20MB"),
        (["outer={kind: diloco, max_rate: 20Mbit}"], "20Mbit", "20MB"),
        (["outer={kind: diloco, hub: hub}"], "not HOST:PORT", "hub.example.org:29400"),
        (["outer={kind: diloco, hub: 'h:1', public: 'g:1'}"], "public g:1", "delete it"),
        ([DILOCO, "strategy={kind: fsdp, pp_size: 2}"], "pp_size 2 does not go", "fsdp"),
        ([DILOCO, "data.streaming=true"], "forwards only", "streaming: false"),
        ([DILOCO, "training.num_train_epochs=2"], "share the samples", "max_steps"),
        (["clusters=[{name: a}, {name: b}]"], "2 clusters, and nothing", "{kind: diloco}"),
        ([DILOCO, "clusters=[{}, {}]"], "clusters.0 is called local, too", "a name of its own"),
        (
            [DILOCO, "clusters=[{name: a, strategy: {kind: ddp, pp_size: 2}}, {name: b}]"],
            "pp_size 2 does not go",
            "fsdp",
        ),
        (["hv.outer_lr=0.5"], "a name from OpenDiLoCo", "outer.lr"),
    ],
)
def test_a_fault_is_told_in_words(
    tmp_path: Path, overrides: list[str], what: str, fix: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, *overrides)
    text = str(caught.value)
    assert what in text and fix in text.partition("fix:")[2], text


def test_values_are_read_as_they_are_meant(tmp_path: Path) -> None:
    topk = outer(
        tmp_path,
        "codec: {kind: topk, density: 0.01}, momentum: 0, max_rate: 20MB/s, sync_every: auto",
    )
    assert (topk.codec_text, topk.max_bytes_per_s) == ("topk:0.01", 20e6)
    assert outer(tmp_path, "codec: bf16").codec_text == "bf16"
    boxed = outer(tmp_path, "wait: {time_boxed: 2m}, dead_after: 20s").hub_settings
    assert boxed["wait"] == "time_boxed"
    assert (boxed["time_box_s"], boxed["dead_after_s"]) == (120.0, 20.0)
    quorum = outer(tmp_path, "wait: {quorum: 3}, min_clusters: 2").hub_settings
    assert (quorum["wait"], quorum["quorum"], quorum["min_clusters"]) == ("quorum", 3, 2)


def test_the_hub_understands_its_settings(tmp_path: Path) -> None:
    from isles.outer.hub.rules import Settings

    for text in ("wait: all", "wait: {time_boxed: 2m}", "wait: {quorum: 3, grace: 0s}"):
        Settings.model_validate(outer(tmp_path, text).hub_settings)


def test_a_cluster_has_its_own_part(tmp_path: Path) -> None:
    loaded = load(tmp_path, TWO, DILOCO)
    with pytest.raises(ConfigError, match="one cluster is started at a time"):
        resolve(loaded)
    first, second = (named_cluster(loaded, name) for name in "ab")
    assert [own.config.clusters[0].name for own in (first, second)] == ["a", "b"]
    assert (first.config.strategy.kind, first.config.balance) == ("fsdp", "auto")
    assert (second.config.strategy.kind, second.config.balance) == ("auto", "even")
    resolved = resolve(first)
    assert resolved.world_size == 2 and resolved.derived["strategy"] == "fsdp"
    assert resolved.origins["strategy.kind"] == "command line"
    assert load_resolved(dump_resolved(resolved)).config == resolved.config
    for own in (first, second):
        path = tmp_path / "own.yaml"
        path.write_text(own.text)
        assert load_run_file(path).config == own.config


def test_one_cluster_may_have_a_strategy_of_its_own(tmp_path: Path) -> None:
    loaded = load(tmp_path, "clusters=[{strategy: {kind: fsdp}}]")
    resolved = resolve(loaded)
    assert resolved.derived["strategy"] == "fsdp" and "kind: fsdp" in show(resolved)


def test_what_a_resumed_run_may_change(tmp_path: Path) -> None:
    before = load(tmp_path, DILOCO).config
    free = load(
        tmp_path, "outer={kind: diloco, engine: hivemind, wait: {quorum: 2}, max_rate: 1MB}"
    )
    assert changed_mathematics(before, free.config) == []
    other = load(tmp_path, "outer={kind: diloco, lr: 0.5, codec: bf16}").config
    assert [change.key for change in changed_mathematics(before, other)] == [
        "outer.lr",
        "outer.codec",
    ]
