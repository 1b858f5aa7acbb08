"""Clusters for tests, without a model: random weights, real outer steps, real links."""

from __future__ import annotations

import hashlib
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isles.dist.world import join_world, leave_world
from isles.outer.average import combine
from isles.outer.client.client import HubClient
from isles.outer.cluster import Cluster
from isles.outer.codec import Codec, parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.hub import __main__ as hub
from isles.outer.layout import make_layout
from isles.outer.messages import Adopt, Apply, Join, Lease, Pending, Reset, SendState
from isles.run.env import RankEnv
from isles.run.records import read_record, write_record
from tests.deadline import DEADLINE_S
from tests.outer_world import member_id
from tests.ranks import Gang, start_ranks

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

    def whole_weight(self, name: str) -> Tensor:
        return self.values[name]

    def set_whole_weight(self, name: str, value: Tensor) -> None:
        self.values[name].copy_(value.view_as(self.values[name]))

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
    """Takes part until it has applied so many turns; what it saw stands in NAME.json.

    Options: codec, fragments, turns, join (the file of the join line); scale of the weights and
    their seed, identity, link (settings of `HubClient`).
    """

    def __init__(self, env: RankEnv, folder: Path, name: str, options: dict[str, Any]) -> None:
        self.folder, self.name, self.options = folder, name, options
        self.world = join_world(env, device="cpu", timeout_s=DEADLINE_S)
        scale, self.fragments = options.get("scale", 1), options["fragments"]
        shapes = {n: (rows * scale, *rest) for n, (rows, *rest) in SHAPES.items()}
        self.weights = Numbers(options.get("seed", 0), shapes)
        self.layout = make_layout(
            shapes,
            parse_codec(options["codec"]),
            num_fragments=self.fragments,
            piece_numbers=PIECE * scale,
        )
        self.cluster = Cluster(self.weights, self.world, self.layout, OuterSettings())
        self.cluster.begin()
        self.version, self.contributed, self.steps = 0, -1, 0
        self.is_ready = self.is_refused = False
        self.samples: list[tuple[int, int]] = []
        self.sent: dict[int, list[tuple[int, int]]] = {}
        self.seen: list[str] = []
        self.history: dict[int, dict[str, Any]] = {}
        join = Join(
            id=member_id(name),
            name=name,
            identity={"layout": self.layout.digest, "lr": options.get("identity", "0.7")},
            codec=self.layout.codec.text,
            pieces=[self.layout.piece_counts(fragment) for fragment in range(self.fragments)],
            version=0,
            outer_params=self.digests(),
        )
        self.link = HubClient(
            join,
            join_file=Path(options["join"]),
            spool=folder / f"spool-{name}",
            note=self.note,
            **options.get("link", {}),
        )

    def note(self, text: object) -> None:
        self.seen.append(str(text)[:400])
        sys.stderr.write(f"{time.time():.2f} {self.seen[-1]}\n")

    def digests(self) -> list[str]:
        return [self.cluster.digest(fragment) for fragment in range(self.fragments)]

    def look(self, timeout_s: float) -> None:
        """Do what the link says."""
        self.link.wait(timeout_s)
        for command in self.link.poll():
            self.note(command)
            match command:
                case Lease():
                    self.samples += command.samples
                case Apply():
                    self.apply(command)
                case Adopt():
                    self.adopt(command)
                case SendState():
                    for fragment in range(self.fragments):
                        path = self.link.state_path(fragment)
                        self.cluster.export_state(fragment, path, version=self.version)
                    self.link.give_state(self.version, self.digests())
                case Reset():
                    self.link.reset_done()
        state = self.link.state
        self.is_ready = state.is_joined and not state.is_behind
        if state.refusal is not None:
            self.note(f"refused: {state.refusal.what}")
            self.is_refused = True
        self.write()

    def adopt(self, event: Adopt) -> None:
        for fragment, path in enumerate(event.paths):
            self.cluster.import_state(
                fragment,
                path,
                version=event.version,
                outer_params=event.outer_params[fragment],
                keeps_steps=self.steps > 0,
            )
        assert tuple(self.digests()) == event.outer_params
        self.version, self.contributed = event.version, event.version - 1
        self.samples += [span for spans in self.sent.values() for span in spans]
        self.sent.clear()
        self.link.adopted(self.version, self.digests())

    def apply(self, event: Apply) -> None:
        outer_step = event.outer_step
        assert outer_step == self.version
        fragment = outer_step % self.fragments
        is_in = outer_step in self.sent and self.name in event.weights
        digest = self.cluster.digest(fragment)
        if event.path is not None:
            mode = "on_time" if is_in else "late"
            digest = self.cluster.apply(fragment, event.path, len(event.weights), mode).digest
        elif fragment in self.cluster.pending:
            self.cluster.drop(fragment)
        samples = self.sent.pop(outer_step, [])
        if not is_in:
            self.samples += samples
        self.version = outer_step + 1
        self.history[outer_step] = {
            "outer_params": digest,
            "weights": self.weights.digest(self.layout.fragments[fragment].names),
            "is_in": is_in,
            "names": sorted(event.weights),
        }
        self.link.applied(outer_step, digest)

    def may_contribute(self) -> bool:
        """Whether it is this cluster's turn; a file of the test may hold all back."""
        hold = self.folder / "hold"
        limit = int(hold.read_text()) if hold.exists() else self.options["turns"]
        is_next = self.contributed < self.version < limit
        return self.is_ready and is_next and bool(self.samples)

    def contribute(self) -> None:
        self.steps += 1
        self.weights.learn(zlib.crc32(f"{self.name} {self.steps}".encode()))
        outer_step = self.version
        path = self.link.contribution_path(outer_step)
        self.cluster.snapshot(outer_step % self.fragments)
        self.cluster.encode(outer_step % self.fragments, path)
        self.sent[outer_step], self.samples = self.samples, []
        self.contributed = outer_step
        samples = tuple(self.sent[outer_step])
        self.link.contribute(Pending(outer_step, TOKENS[self.name], 1, samples, self.steps))
        self.link.lease(SAMPLES)
        self.link.report(step=self.steps, since=1, tokens_per_s=1e3, phase="waiting")

    def write(self, **more: Any) -> None:
        known = {"version": self.version, "is_ready": self.is_ready}
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
        self.write(weights=self.weights.digest(), outer_params=self.digests())
        self.link.close()
        leave_world()
        return int(self.is_refused)


def train(env: RankEnv, folder: Path, name: str, options: dict[str, Any]) -> int:
    return Trainer(env, folder, name, options).run()


def serve(env: RankEnv, state: Path, settings: Path) -> int:
    """A hub, until it is killed or told to end; its exit code."""
    return hub.main([str(state), "--run", "test", "--settings", str(settings)])


def until(condition: Callable[[], object], what: str, *gangs: Gang) -> None:
    """Look again and again, for as long as a deadline, and as all of these processes live."""
    end = time.monotonic() + DEADLINE_S
    sentinels = [process.sentinel for gang in gangs for process in gang.processes]
    while not condition():
        has_ended = bool(connection.wait(sentinels, 0.02))
        if (has_ended and not condition()) or time.monotonic() > end:
            logs = [gang.log.read_text(errors="replace")[-3000:] for gang in gangs]
            raise AssertionError("\n\n".join([what, *logs]))


class Clusters:
    """Several of them, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, Gang] = {}
        self.refused = ""
        """Who is not let in, and therefore ends by itself."""

    def begin(self, name: str, options: dict[str, Any]) -> None:
        self.running[name] = start_ranks(train, 1, self.folder, name, options)

    def until(self, condition: Callable[[], object], what: str) -> None:
        until(condition, what, *(g for name, g in self.running.items() if name != self.refused))

    def record(self, name: str) -> dict[str, Any]:
        return read_record(self.folder / f"{name}.json") or {"version": 0, "is_ready": False}

    def hold(self, outer_step: int) -> None:
        """Let nobody contribute to this turn, nor to any after it."""
        partial = self.folder / "hold.new"
        partial.write_text(str(outer_step))
        partial.replace(self.folder / "hold")

    def reached(self, outer_step: int, names: str) -> None:
        """Wait until these have applied so many turns."""
        self.until(
            lambda: all(self.record(name)["version"] >= outer_step for name in names),
            f"{outer_step} turns of {names}",
        )

    def end(self, turns: int, names: str) -> dict[str, dict[str, Any]]:
        """Wait until these have applied all turns; what they have seen."""
        self.hold(turns)
        self.reached(turns, names)
        (self.folder / "end").touch()
        for name in names:
            assert self.running.pop(name).wait() == [0]
        return {name: self.record(name) for name in names}

    def kill(self, name: str) -> None:
        self.running.pop(name).kill()

    def stop(self) -> None:
        for gang in self.running.values():
            gang.kill()
