"""A cluster for tests without a model: random weights, real outer steps, a real link.

To be started by `tests.ranks`; what a test does with several of them is `Clusters`.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
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
from isles.outer.layout import make_layout
from isles.outer.messages import Adopt, Apply, Join, Lease, Pending, Reset, SendState
from isles.run.env import RankEnv
from tests.ranks import Gang

DEADLINE_S = 500.0
SAMPLES = 8
TOKENS = {"a": 100, "b": 200, "c": 300, "d": 400, "e": 500}
SHAPES = {"embed": (300, 40), "layers.0.w": (130, 70), "layers.1.w": (130, 70), "norm": (70,)}
PIECE = 4096


class Numbers:
    """Weights as `Cluster` needs them."""

    def __init__(self, seed: int, shapes: dict[str, tuple[int, ...]]) -> None:
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

    def digest(self) -> str:
        whole = b"".join(value.numpy().tobytes() for value in self.values.values())
        return hashlib.sha256(whole).hexdigest()


def mean(codec: Codec, counts: Sequence[int], parts: Sequence[tuple[bytes, float]]) -> bytes:
    """What a hub makes of contributions, piece by piece."""
    found, start = b"", 0
    for count in counts:
        end = start + codec.size(count)
        found += combine(codec.text, count, [(data[start:end], weight) for data, weight in parts])
        start = end
    return found


class Trainer:
    """Takes part until it has applied so many turns; what it saw stands in NAME.json."""

    def __init__(self, env: RankEnv, folder: Path, name: str, options: dict[str, Any]) -> None:
        self.folder, self.name, self.options = folder, name, options
        self.world = join_world(env, device="cpu", timeout_s=DEADLINE_S)
        shapes = {n: (rows * options.get("scale", 1), *rest) for n, (rows, *rest) in SHAPES.items()}
        self.weights = Numbers(options.get("seed", 0), shapes)
        layout = make_layout(
            self.weights.trained_shapes(),
            parse_codec(options["codec"]),
            num_fragments=options["fragments"],
            piece_numbers=PIECE * options.get("scale", 1),
        )
        self.fragments, self.layout = options["fragments"], layout
        self.cluster = Cluster(self.weights, self.world, layout, OuterSettings())
        self.cluster.begin()
        self.version, self.contributed = 0, -1
        self.is_ready = self.is_refused = False
        self.samples: list[tuple[int, int]] = []
        self.listed: dict[int, list[tuple[int, int]]] = {}
        self.seen: list[str] = []
        self.history: dict[int, list[Any]] = {}
        self.steps = 0
        join = Join(
            id=name.encode().hex().rjust(32, "0"),
            name=name,
            identity={"layout": layout.digest, "lr": options.get("identity", "0.7")},
            codec=layout.codec.text,
            pieces=[layout.piece_counts(fragment) for fragment in range(self.fragments)],
            version=0,
            outer_params=self.digests(),
        )
        self.link = HubClient(
            join,
            join_file=Path(options["join"]),
            spool=folder / f"spool-{name}",
            note=lambda text: self.seen.append(f"{time.time():.2f} {text}"[:400]),
            **options.get("link", {}),
        )

    def digests(self) -> list[str]:
        return [self.cluster.digest(fragment) for fragment in range(self.fragments)]

    def note_heartbeat(self, timeout_s: float) -> None:
        self.link.wait(timeout_s)
        for command in self.link.poll():
            self.seen.append(f"{time.time():.2f} {command}"[:400])
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
        if state.refusal is not None and not self.is_refused:
            kind = getattr(state.refusal, "kind", "")
            (self.folder / f"{self.name}.refused").write_text(f"{kind} {state.refusal.what}")
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
        self.samples += [span for spans in self.listed.values() for span in spans]
        self.listed.clear()
        self.link.adopted(self.version, self.digests())

    def apply(self, event: Apply) -> None:
        assert event.outer_step == self.version
        fragment = event.outer_step % self.fragments
        is_in = event.outer_step in self.listed and self.name in event.weights
        digest = self.cluster.digest(fragment)
        if event.path is not None:
            mode = "on_time" if is_in else "late"
            digest = self.cluster.apply(fragment, event.path, len(event.weights), mode).digest
        elif fragment in self.cluster.pending:
            self.cluster.drop(fragment)
        listed = self.listed.pop(event.outer_step, [])
        if not is_in:
            self.samples += listed
        self.version = event.outer_step + 1
        self.history[event.outer_step] = [
            digest,
            is_in,
            sorted(event.weights),
            event.sent_bytes,
        ]
        self.link.applied(event.outer_step, digest)

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
        self.listed[outer_step], self.samples = self.samples, []
        self.contributed = outer_step
        sent = Pending(outer_step, TOKENS[self.name], 1, tuple(self.listed[outer_step]), self.steps)
        self.link.contribute(sent)
        self.link.lease(SAMPLES)
        self.link.report(step=self.steps, since=1, tokens_per_s=1e3, phase="waiting")

    def write(self, *, is_done: bool = False) -> None:
        record = {
            "version": self.version,
            "history": self.history,
            "is_ready": self.is_ready,
            "seen": self.seen,
            "weights": self.weights.digest() if is_done else "",
            "outer_params": self.digests() if is_done else [],
        }
        path = self.folder / f"{self.name}.json"
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps(record))
        partial.replace(path)

    def run(self) -> int:
        """Until the test says that it is the end; 1: it was not let in."""
        turns = self.options["turns"]
        self.link.lease(SAMPLES)
        self.write()
        end = time.monotonic() + DEADLINE_S
        while self.version < turns and not self.is_refused:
            assert time.monotonic() < end, "\n".join(self.seen[-40:])
            if self.may_contribute():
                self.contribute()
            self.note_heartbeat(0.2)
        self.write(is_done=True)
        # The others may need this one for what they have missed.
        while not (self.folder / "end").exists() and not self.is_refused:
            assert time.monotonic() < end, "nobody has said that it is the end"
            self.note_heartbeat(0.1)
        self.write(is_done=True)
        self.link.close()
        leave_world()
        return int(self.is_refused)


def train(env: RankEnv, folder: Path, name: str, options: dict[str, Any]) -> int:
    """A cluster, until it has applied so many turns."""
    return Trainer(env, folder, name, options).run()


class Clusters:
    """Several of them, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, Gang] = {}
        self.unknown = ""
        """Who is not let in, and therefore ends by itself."""

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Look again and again, for as long as a deadline."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            self.check()
            if time.monotonic() > end:
                words = [f"== {name}\n{self.words(name)}" for name in self.running]
                raise AssertionError(
                    "\n\n".join([f"{what}: not within {DEADLINE_S:.0f} s", *words])
                )
            time.sleep(0.02)

    def check(self) -> None:
        for name, gang in self.running.items():
            if name != self.unknown:
                assert not gang.wait_or_timeout(0.0), f"{name} has ended\n{self.words(name)}"

    def words(self, name: str) -> str:
        seen = "\n".join(self.record(name).get("seen", [])[-30:])
        return f"{seen}\n{self.running[name].log.read_text()[-3000:]}"

    def record(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {"version": 0, "is_ready": False}

    def hold(self, outer_step: int) -> None:
        """Let nobody contribute to this turn, nor to any after it."""
        partial = self.folder / "hold.new"
        partial.write_text(str(outer_step))
        partial.replace(self.folder / "hold")

    def reached(self, outer_step: int, names: str) -> None:
        """Wait until these have applied so many turns."""
        self.until(
            lambda: all(self.record(name)["version"] >= outer_step for name in names),
            f"{outer_step} turns",
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
