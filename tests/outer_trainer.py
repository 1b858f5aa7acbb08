"""Clusters for tests, without a model: random weights, real outer steps, real links."""

from __future__ import annotations

import hashlib
import signal
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from isles.config.sections.outer import DiLoCoConfig
from isles.dist.world import join_world, leave_world
from isles.outer.average import combine
from isles.outer.client.api import HubMeeting
from isles.outer.client.client import HubClient
from isles.outer.cluster import Cluster
from isles.outer.codec import Codec, parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.hub import __main__ as hub
from isles.outer.layout import make_layout
from isles.outer.messages import Adopt, Apply, Lease, Reset, Revoke, SendState
from isles.outer.trainer.step import OuterStep
from isles.run.env import RankEnv
from isles.run.records import read_record, write_record
from isles.train.progress import Progress
from tests.deadline import DEADLINE_S
from tests.outer_world import joining, member_id
from tests.ranks import Gang, start_ranks, until

SAMPLES = 8
TOKENS = {"a": 100, "b": 200, "c": 300, "d": 400}
SHAPES = {"embed": (300, 40), "layers.0.w": (130, 70), "layers.1.w": (130, 70), "norm": (70,)}
PIECE = 4096


class Numbers:
    """Weights as `Cluster` needs them."""

    def __init__(self, seed: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.values = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}

    def trained_shapes(self) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in self.values.items()}

    def whole_weights(self, names: Sequence[str]) -> list[Tensor]:
        return [self.values[name] for name in names]

    def set_whole_weight(self, name: str, value: Tensor) -> None:
        self.values[name].copy_(value.view_as(self.values[name]))

    def add_to_weight(self, name: str, value: Tensor) -> None:
        self.values[name].add_(value.view_as(self.values[name]))

    def weights_set(self) -> None:
        pass

    def learn(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for value in self.values.values():
            value.add_(0.01 * torch.randn(value.shape, generator=generator))

    def digest(self, names: Sequence[str] | None = None) -> str:
        """Of all weights, or of these."""
        values = [self.values[name] for name in names or self.values]
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def mean(codec: Codec, counts: Sequence[int], parts: Sequence[tuple[bytes, float]]) -> bytes:
    """What a hub makes of contributions, piece by piece."""
    found, start = b"", 0
    for count in counts:
        end = start + codec.size(count)
        found += combine(codec.text, count, [(data[start:end], weight) for data, weight in parts])
        start = end
    return found


class Trainer:
    """Takes part until the test ends it; what it saw stands in NAME.json.

    Options: codec, fragments, join (the file of the join line); scale of the weights and their
    seed, identity, link (settings of `HubClient`).
    """

    def __init__(self, env: RankEnv, folder: Path, name: str, options: dict[str, Any]) -> None:
        self.folder, self.name = folder, name
        world = join_world(env, device="cpu", timeout_s=DEADLINE_S)
        scale, fragments = options.get("scale", 1), options["fragments"]
        shapes = {n: (rows * scale, *rest) for n, (rows, *rest) in SHAPES.items()}
        codec, sizes = parse_codec(options["codec"]), {"piece_numbers": PIECE * scale}
        self.layout = make_layout(shapes, codec, num_fragments=fragments, **sizes)
        self.weights = Numbers(options.get("seed", 0), shapes)
        cluster = Cluster(self.weights, world, self.layout, OuterSettings())
        config = DiLoCoConfig(fragments=fragments)
        self.exchange = OuterStep(config, name, member_id(name), cluster, self.layout, self)
        self.samples = self.exchange.begin(Progress.fresh())
        self.is_ready = self.is_refused = False
        self.seen: list[str] = []
        self.history: dict[int, dict[str, Any]] = {}
        join = joining(
            name,
            identity={"layout": self.layout.digest, "lr": options.get("identity", "0.7")},
            codec=codec.text,
            pieces=[self.layout.piece_counts(fragment) for fragment in range(fragments)],
            outer_params=self.exchange.outer_params(),
        )
        link = {"meeting": HubMeeting(Path(options["join"])), **options.get("link", {})}
        self.link = HubClient(join, spool=folder / f"spool-{name}", note=self.note, **link)
        self.exchange.hub = self.link

    def note(self, text: object) -> None:
        self.seen.append(str(text)[:400])
        sys.stderr.write(f"{time.time():.2f} {self.seen[-1]}\n")

    def row(self, row: dict[str, Any]) -> None:
        """An average has been applied."""
        names = self.layout.fragments[row["fragment"]].names
        self.history[row["outer_step"]] = {
            "outer_params": row["digest"],
            "weights": self.weights.digest(names),
            "is_in": row["mode"] == "on_time",
            "names": sorted(row["weights"]),
        }

    def look(self, timeout_s: float) -> None:
        """Do what the link says."""
        self.link.wait(timeout_s)
        for command in self.link.poll():
            self.note(command)
            match command:
                case Lease():
                    self.samples.add(command.samples)
                case Revoke():
                    self.samples.lose(command.samples, self.exchange.progress.samples)
                    self.link.lease(SAMPLES)  # others in their place, as a coordinator does
                case Apply():
                    self.exchange.apply(command)
                case Adopt():
                    self.exchange.adopt(command)
                case SendState():
                    self.exchange.send_state()
                case Reset():
                    self.exchange.go_back()
        state = self.link.state
        self.is_ready = state.is_joined and not state.is_behind
        if state.refusal is not None:
            self.note(f"refused: {state.refusal.what}")
            self.is_refused = True
        self.write()

    def may_contribute(self) -> bool:
        """Whether it is this cluster's turn; a file of the test holds all back."""
        hold, version = self.folder / "hold", self.exchange.version
        is_next = hold.exists() and version < int(hold.read_text())
        has_samples = self.exchange.samples_left >= SAMPLES
        return self.is_ready and is_next and has_samples and version not in self.exchange.sent

    def contribute(self) -> None:
        progress, steps = self.exchange.progress, self.exchange.steps + 1
        self.weights.learn(zlib.crc32(f"{self.name} {steps}".encode()))
        tokens = TOKENS[self.name]
        progress.advance(samples=progress.samples + SAMPLES, tokens=tokens, target_tokens=tokens)
        self.exchange.contribute(self.exchange.version)
        self.link.lease(SAMPLES)
        self.link.report(step=steps, since=1, tokens_per_s=1e3, phase="waiting")

    def write(self, **more: Any) -> None:
        known = {"version": self.exchange.version, "is_ready": self.is_ready}
        record = {**known, "history": self.history, "seen": self.seen, **more}
        write_record(self.folder / f"{self.name}.json", record, durable=False)

    def run(self) -> int:
        """Until the test says that it is the end; 1: it was not let in."""
        self.link.lease(SAMPLES)
        end = time.monotonic() + DEADLINE_S
        # The others may need this one for what they have missed.
        while not (self.folder / "end").exists() and not self.is_refused:
            assert time.monotonic() < end, "nobody has said that it is the end"
            if self.may_contribute():
                self.contribute()
            self.look(0.1)
        self.write(weights=self.weights.digest(), outer_params=self.exchange.outer_params())
        self.exchange.close()
        self.link.close()
        leave_world()
        return int(self.is_refused)


def train(env: RankEnv, folder: Path, name: str, options: dict[str, Any]) -> int:
    return Trainer(env, folder, name, options).run()


def serve(env: RankEnv, state: Path, settings: Path) -> int:
    """A hub, until it is killed or told to end; its exit code."""
    return hub.main([str(state), "--run", "test", "--settings", str(settings)])


class Clusters:
    """Several of them, in processes of their own that end with a `with`; here without a hub.

    Args:
        options: of each `Trainer`, where its start has no others.
    """

    def __init__(self, folder: Path, *, codec: str = "int8", fragments: int = 2, **options: Any):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.running: dict[str, Gang] = {}
        self.options = {"codec": codec, "fragments": fragments, "join": "not needed", **options}
        self.refused = ""
        """Who is not let in, and therefore ends by itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for gang in self.running.values():
            gang.kill()

    def start(self, name: str, **options: Any) -> None:
        given = {**self.options, **options}
        self.running[name] = start_ranks(train, 1, self.folder, name, given)

    def until(self, condition: Callable[[], object], what: str) -> None:
        until(condition, what, *(g for name, g in self.running.items() if name != self.refused))

    def pause(self, seconds: float) -> None:
        """Let time pass, unless a process ends that should not."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end, "the end of a pause")

    def freeze(self, name: str, seconds: float) -> None:
        self.running[name].signal(signal.SIGSTOP)
        self.pause(seconds)
        self.running[name].signal(signal.SIGCONT)

    def record(self, name: str) -> dict[str, Any]:
        return read_record(self.folder / f"{name}.json") or {"version": 0, "is_ready": False}

    def have_seen(self, words: str, names: str) -> bool:
        """Whether each of these has been told something with such words in it."""
        return all(any(words in text for text in self.record(name)["seen"]) for name in names)

    def hold(self, outer_step: int) -> None:
        """Let nobody contribute to this turn, nor to any after it."""
        partial = self.folder / "hold.new"
        partial.write_text(str(outer_step))
        partial.replace(self.folder / "hold")

    def reached(self, outer_step: int, names: str) -> None:
        """Let all make so many turns, and wait until these have applied them."""
        self.hold(outer_step)
        self.until(
            lambda: all(self.record(name)["version"] >= outer_step for name in names),
            f"{outer_step} turns of {names}",
        )

    def begin(self, names: str) -> None:
        """Start these, and wait for their first turn."""
        for name in names:
            self.start(name)
        self.reached(1, names)

    def end(self, turns: int, names: str) -> dict[str, dict[str, Any]]:
        """Wait until these have applied all turns; what they have seen, which must be the same."""
        self.reached(turns, names)
        (self.folder / "end").touch()
        for name in names:
            assert self.running.pop(name).wait() == [0]
        records = {name: self.record(name) for name in names}
        for outer_step in map(str, range(turns)):
            found = [record["history"].get(outer_step) for record in records.values()]
            assert len({turn["outer_params"] for turn in found if turn}) == 1, outer_step
            # Who comes late keeps what it has learned since.
            weights = {turn["weights"] for turn in found if turn and turn["is_in"]}
            assert len(weights) == 1, outer_step
        assert len({str(record["outer_params"]) for record in records.values()}) == 1
        return records

    def kill(self, name: str) -> None:
        self.running.pop(name).kill()
