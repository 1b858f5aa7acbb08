"""The simulated run: closed forms, the protocol's own constants, the fleet file, and its size."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from isles.cli import main
from isles.config.sections.outer import CodecConfig
from isles.errors import ConfigErrors, ExitCode
from isles.facts.models import load_shape
from isles.outer.average import average_size
from isles.outer.client import http, meeting, session
from isles.outer.codec import Codec, parse_codec
from isles.outer.hub import rules
from isles.outer.layout import make_layout
from isles.outer.messages import CHUNK_BYTES
from isles.outer.trainer import outer, sync
from isles.plan.simulate import setting as protocol
from isles.plan.simulate import sizes
from isles.plan.simulate.engine import simulate
from isles.plan.simulate.fleet import (
    FailuresConfig,
    FleetConfig,
    GroupConfig,
    HubConfig,
    IncidentConfig,
    LeavesConfig,
    load_fleet,
)
from isles.plan.simulate.line import Flow, Line
from isles.plan.simulate.setting import ON_THE_WIRE, SimulationSettings
from tests.each import each

RUN_FILE = """\
name: sim
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 2048}
data: {sources: [{path: python-docs}]}
training: {max_steps: 200, global_batch_size: 8}
outer: {kind: diloco, sync_every: 50}
clusters: [{name: a}, {name: b}]
"""
NUMBERS = 4_000_000


def one_run(**changes: object) -> SimulationSettings:
    """One fragment, no overlap, 10 rounds of 20 steps."""
    base = SimulationSettings(
        "sim", (NUMBERS,), 512, 20, CodecConfig(), max_steps=200, save_every_s=None, deadline_s=1e6
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def fleet(*groups: GroupConfig, **changes: object) -> FleetConfig:
    return FleetConfig(clusters=groups, **changes)  # type: ignore[arg-type]


def group(name: str = "a", **changes: object) -> GroupConfig:
    return GroupConfig(**{"name": name, "step": 1.0, "latency": 0.0, **changes})  # type: ignore[arg-type]


# The protocol is that of the other wing.


@each("none", "bf16", "int8", "int4", "topk", "topk:0.02")
def test_bytes_are_those_of_the_codecs(kind: str):
    codec = parse_codec(kind)
    own = CodecConfig(kind=codec.kind, density=codec.density)
    for n in (1, 31, 4095, 4096, 100_001, 2**20):
        assert sizes.piece_bytes(own, n) == codec.size(n)
        assert sizes.average_bytes(own, n, 3) == average_size(kind, n, 3)


@each(("llama-15m", 1), ("llama-15m", 4), ("llama-2m", 3))
def test_fragments_are_those_of_the_layout(shape: str, num_fragments: int):
    config = load_shape(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    layout = make_layout(shapes, Codec("int8"), num_fragments=num_fragments)
    found = sizes.fragment_numbers(sizes.llama_sizes(config), num_fragments)
    assert found == [sum(layout.piece_counts(index)) for index in range(num_fragments)]
    # What ends between parameters is some bytes for each of them.
    for index, numbers in enumerate(found):
        exact = sum(map(Codec("int8").size, layout.piece_counts(index)))
        assert exact - 8 * len(shapes) <= sizes.contribution_bytes(CodecConfig(), numbers) <= exact


def test_schedule_and_constants_are_those_of_the_trainer() -> None:
    for fragments, every, rounds, short in [(1, 10, 0, 0), (4, 100, 3, 12), (3, 50, 2, 7)]:
        own = SimulationSettings(
            "s", (10,) * fragments, 1, every, CodecConfig(), None, warmup_rounds=rounds
        )
        own = replace(own, delay=0, warmup_sync_every=short)
        true = sync.Schedule(every, fragments, rounds, short)
        steps = range(5 * fragments)
        assert [own.step_of(t) for t in steps] == [true.step_of(t) for t in steps]
        assert [own.sync_every_at(t) for t in steps] == [true.sync_every_at(t) for t in steps]
    pairs = [
        (protocol.OPEN_STEPS, sync._OPEN_STEPS),
        (protocol.OPEN_STEPS, rules.Settings().open_rounds),
        (protocol.KEPT_AVERAGES, rules.Settings().keep_averages),
        (protocol.AHEAD, session._AHEAD),
        (protocol.ON_THE_WIRE, meeting._ON_THE_WIRE),
        (protocol.CHUNK_BYTES, CHUNK_BYTES),
        (protocol.CHUNKS_AT_ONCE, http._AT_ONCE),
        (protocol.LAST_WAIT_S, outer._LAST_WAIT_S),
        ((protocol.LEAST_SYNC, protocol.MOST_SYNC), (sync.LEAST, sync.MOST)),
    ]
    assert not [pair for pair in pairs if pair[0] != pair[1]]


# Closed forms.


def outer_s(setting: SimulationSettings, config: GroupConfig, *, sharing: int = 1) -> float:
    """Seconds of an outer step in which all wait, of equal clusters on one hub's line."""
    costs, n = setting.costs, setting.fragments[0]
    size = setting.contribution_bytes(0)
    up = min(config.uplink, HubConfig().downlink / sharing)
    down = min(config.downlink, HubConfig().uplink / sharing)
    measures = -(-sharing // protocol.NUMBER_THREADS)
    return (
        (n / costs.copy + n / costs.encode)
        + (ON_THE_WIRE * size / up + size / costs.hash)
        + (costs.fsync_s + measures * n / costs.measure)
        + (sharing * n / costs.average + n / costs.encode + size / costs.hash + 3 * costs.fsync_s)
        + (ON_THE_WIRE * size / down + size / costs.hash / 4 + costs.fsync_s)
        + (n / costs.apply + 4 * n / costs.hash + n / costs.copy)
    )


@each(1, 2, 40)
def test_equal_clusters_take_what_the_formula_says(count: int):
    """One alone; two whose own links limit; forty that share the hub's line."""
    setting, config = one_run(), group(count=count)
    found = simulate(fleet(config), setting)
    expected = 200 * 1.0 + 10 * outer_s(setting, config, sharing=count)
    assert found.seconds == pytest.approx(expected, rel=1e-6)
    assert found.goodput == pytest.approx(200 / expected, rel=1e-6)
    assert found.share("others") == pytest.approx(0.0, abs=1e-9)
    assert len(found.commits) == 10


def test_equal_clusters_together_are_as_each_by_itself() -> None:
    setting, wide = one_run(delay=3), fleet(group(count=6), group("b", count=3, step=1.5))
    single = simulate(wide, setting, is_batched=False)
    together = simulate(wide, setting, is_batched=True)
    assert together.seconds == pytest.approx(single.seconds, rel=1e-4)
    assert together.goodput == pytest.approx(single.goodput, rel=1e-4)
    assert together.hub_received_bytes == pytest.approx(single.hub_received_bytes, rel=1e-9)
    assert together.num_events < single.num_events / 2


def test_a_delay_hides_the_transfer() -> None:
    setting, config = one_run(max_steps=None), group(uplink=2e6, downlink=2e6)
    waiting = simulate(fleet(config), setting, rounds=8)
    hidden = simulate(fleet(config), replace(setting, delay=8), rounds=8)
    assert waiting.share("transfer") > 0.1
    assert hidden.share("transfer") == 0
    assert hidden.stale_steps == 8
    # Nothing but copies of the weights is left between inner steps.
    assert hidden.goodput > 0.998


def test_a_round_takes_as_long_as_the_slowest_unless_the_deadline_is_shorter() -> None:
    pair = fleet(group("fast"), group("slow", step=2.0))
    waits = simulate(pair, one_run(max_steps=None), rounds=10)
    fast, slow = waits.groups
    assert slow.shares["compute"] > 0.95
    assert fast.shares["compute"] == pytest.approx(slow.shares["compute"] / 2, rel=0.01)
    assert fast.shares["others"] == pytest.approx(20 / (40 + outer_s(one_run(), group())), rel=0.05)
    # After `deadline` inner steps go on, and are in the next contribution.
    goes_on = simulate(pair, one_run(max_steps=None, deadline_s=5.0), rounds=10)
    assert goes_on.groups[0].shares["compute"] > 0.8


def test_a_time_box_takes_what_there_is() -> None:
    pair = fleet(group("fast"), group("slow", step=10.0))
    boxed = simulate(pair, one_run(max_steps=None, wait="time_boxed", time_box_s=60.0), rounds=10)
    assert boxed.groups[0].goodput > 0.4
    assert set(boxed.parts) == {2}
    assert simulate(pair, one_run(max_steps=None), rounds=10).groups[0].goodput < 0.15


def test_a_failure_costs_what_the_protocol_says() -> None:
    """Steps since the last contribution that counts, or since the checkpoint, and the way back."""
    killed = IncidentConfig(cluster="a", kind="killed", at=50.5, lasts=7.0)
    pair = fleet(group("a"), group("b"), incidents=(killed,))
    late = simulate(pair, one_run(save_every_steps=None))
    # Of what came after the second contribution nothing is in the model; before it, all is.
    trained = math.floor(50.5 - 2 * outer_s(one_run(), group(), sharing=2))
    assert late.groups[0].steps_lost == trained - 40
    assert late.groups[0].num_failures == 1 and late.groups[1].steps_lost == 0
    assert late.groups[0].shares["down"] * late.groups[0].present_s == pytest.approx(7.0)
    # A checkpoint after it keeps more.
    saved = simulate(pair, one_run(save_every_steps=5))
    assert 0 < saved.groups[0].steps_lost < late.groups[0].steps_lost
    # Nobody waits for it once it was not heard for `dead_after`.
    long = killed.model_copy(update={"lasts": 300.0})
    without = simulate(fleet(group("a"), group("b"), incidents=(long,)), one_run())
    assert min(without.parts) == 1
    assert without.groups[1].shares["others"] < 0.1


def test_who_missed_too_many_averages_takes_the_state_of_another() -> None:
    setting = one_run(max_steps=600)
    size = setting.contribution_bytes(0)
    cut = [IncidentConfig(cluster="a", kind="cut", at=50.0, lasts=s) for s in (100.0, 300.0)]
    pairs = [fleet(group("a"), group("b"), incidents=(incident,)) for incident in cut]
    short, long = (simulate(pair, setting).groups[0] for pair in pairs)
    assert short.received_bytes == pytest.approx(30 * size, rel=0.1)
    assert long.received_bytes > 8 * NUMBERS
    assert short.steps_lost == long.steps_lost == 0


def test_a_line_is_shared_fairly_and_no_flow_exceeds_its_own_limit() -> None:
    line, over = Line(100.0), list[str]()
    line.add(0.0, 100.0, Flow(10.0, 1, lambda: over.append("slow")))
    line.add(0.0, 90.0, Flow(math.inf, 2, lambda: over.append("two")))
    assert line.next_end() == pytest.approx(2.0)  # (100 - 10) / 2 each
    for flow in line.finished(2.0):
        flow.done()
    assert over == ["two"]
    assert line.next_end() == pytest.approx(10.0)
    assert line.total_bytes == 280.0 and line.busy_s == pytest.approx(2.0)


@settings(max_examples=15, deadline=None)
@given(
    rate=st.floats(2e5, 5e7),
    more=st.floats(1.0, 20.0),
    delay=st.integers(0, 12),
    count=st.integers(1, 5),
)
def test_a_faster_link_never_costs(rate: float, more: float, delay: int, count: int) -> None:
    setting = one_run(delay=delay, max_steps=None)
    slow, fast = (
        simulate(fleet(group(count=count, uplink=each, downlink=each)), setting, rounds=6)
        for each in (rate, rate * more)
    )
    assert fast.seconds <= slow.seconds * (1 + 1e-9)
    assert fast.goodput >= slow.goodput - 0.01


# Chance, and size.

ROUGH = {
    "spread": 0.05,
    "failures": FailuresConfig(every=20_000.0, lasts=60.0),
    "leaves": LeavesConfig(every=100_000.0, away=3000.0),
}


def test_the_same_seed_gives_the_same_run() -> None:
    wide = fleet(group(count=20, **ROUGH))
    first, again, other = (
        simulate(wide, one_run(delay=2, max_steps=None), hours=2, seed=seed).figures()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other and first["failures"] > 0


def test_ten_thousand_clusters_end_within_ten_seconds() -> None:
    setting = one_run(max_steps=100 * 20, delay=5)
    wide = fleet(
        group(count=10_000, **ROUGH), hub=HubConfig(uplink=12.5e9, downlink=12.5e9, cpu=100.0)
    )
    began = time.process_time()  # other work on the machine is not what is measured
    found = simulate(wide, setting)
    assert time.process_time() - began < 10
    assert len(found.commits) >= 100
    assert sum(g.num_failures for g in found.groups) > 500
    assert 0.3 < found.goodput < 1


# The fleet file and the command.

ONE = "clusters: [{name: a, step: 1s}"
CUT = "{cluster: b, kind: cut, at: 5s, lasts: 3s}"


@each(
    ("clusters:\n  - {name: a, step: 1s, uplnk: 1MB/s}", ":2 clusters.0.uplnk", "mean uplink"),
    ("clusters:\n  - name: a\n    step: 1s\n    uplink: 100", ":4 clusters.0.uplink", "unit"),
    ("clusters:\n  - name: a\n    step: 5", ":3 clusters.0.step", "5s"),
    ("clusters:\n  - {name: a}", ":2 clusters.0", "either step or tokens_per_s"),
    ("hub: {}\ncluster: []", ":2 cluster", "mean clusters"),
    (f"{ONE}]\nincidents:\n  - {CUT}", ":3 incidents.0.cluster", "use one of a"),
    (f"{ONE}, {{name: a, step: 2s}}]", ":1 clusters.1.name", "two groups"),
    ("hub: {}", ":1 clusters", "is missing"),
)
def test_a_wrong_fleet_file_is_named_by_its_line(text: str, place: str, words: str, *, tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigErrors) as raised:
        load_fleet(path)
    shown = "\n".join(str(issue) for issue in raised.value.issues)
    assert f"{path}{place}" in shown and words in shown, shown
    assert "at least 1 item" not in shown, "a list of wrong groups is not an empty one"


def test_the_command(tmp_path, capsys):
    run, path = tmp_path / "run.yaml", tmp_path / "fleet.yaml"
    run.write_text(RUN_FILE)
    path.write_text(
        "parameters: 2M\nclusters:\n  - {name: home, tokens_per_s: 9000, uplink: 20Mbit/s}\n"
        "  - {name: lab, count: 3, step: 0.5s, time_limit: 1h, queue_wait: 10m}\n"
    )
    assert main(["plan", str(run), "--simulate"]) == ExitCode.OK
    shown = capsys.readouterr().out
    for words in ("goodput", "assumed: a step of a takes", "sync_every", "█"):
        assert words in shown
    assert "1 clusters" not in shown and "days" not in shown
    assert main(["plan", str(run), "--json"]) == ExitCode.OK
    planned = json.loads(capsys.readouterr().out)["clusters"]
    assert main(["plan", str(run), "--simulate", "--json"]) == ExitCode.OK
    played = json.loads(capsys.readouterr().out)
    steps = {each["name"]: each["step_s"] for each in played["groups"]}
    assert steps["a"] == pytest.approx(planned[0]["speed"]["step_s"], rel=0.01)
    assert played["goodput"] > 0.5, "the clusters are on one machine"
    assert (
        main(["plan", str(run), "--simulate", "--gpus", "4090", "--link", "1gbit"]) == ExitCode.OK
    )
    shown = capsys.readouterr().out
    assert "a step of b takes" in shown and "100 Mbit/s" not in shown
    command = ["plan", str(run), "--simulate", "--fleet", str(path), "--json", "--hours", "1"]
    assert main(command) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["clusters"] == 4 and 0 < found["goodput"] < 1
    run.with_name("plain.yaml").write_text(RUN_FILE.split("outer:", maxsplit=1)[0])
    for words, said in (
        (f"{run} --fleet {path}", "--fleet has no effect without --simulate"),
        (f"{run} --simulate --gpus 4090 --fleet {path}", "--gpus has no effect with --simulate"),
        (f"{run} --simulate --price 2/h", "--price has no effect with --simulate"),
        (f"{run} --simulate --png /nowhere/a.png", "folder not found: /nowhere"),
        (f"{run.with_name('plain.yaml')} --simulate", "has no outer steps"),
    ):
        assert main(["plan", *words.split()]) == ExitCode.USER
        assert said in capsys.readouterr().err
