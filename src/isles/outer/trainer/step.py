"""What the outer steps leave on record: a row for each turn, and a part of status.json."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from isles.config.sections.outer import DiLoCoConfig
from isles.errors import TrainingError
from isles.outer.client.client import Line
from isles.outer.client.events import Interval, Sent, sent_from
from isles.outer.cluster import Applied, Cluster, Contribution
from isles.outer.diloco import Mode
from isles.outer.layout import Layout
from isles.outer.samples import OwnSamples
from isles.outer.trainer.sync import Adopt, OuterCoordinator, Progress, Recorder, SyncState, Take

log = logging.getLogger(__name__)


_STATUS_EVERY_S = 2.0


class OuterRecord:
    """Times and bytes of the turns.

    Args:
        recorder: of the run.
        progress: of the run.
        fragments: of the layout.
    """

    def __init__(self, recorder: Recorder, progress: Progress, fragments: int) -> None:
        self._recorder, self.progress, self._fragments = recorder, progress, fragments
        self._began: dict[int, float] = {}
        self._exposed: dict[int, float] = {}
        self._waiting: dict[int, float] = {}
        self._exposed_s = self._hidden_s = 0.0
        self._last: dict[str, Any] | None = None
        self._told_at = -math.inf

    def begin(self, turn: int) -> None:
        """The contribution to a turn is made now."""
        self._began[turn] = time.perf_counter()

    def exposed(self, turn: int, seconds: float) -> None:
        """No inner step was made for so long, because of this turn."""
        if turn not in self._waiting:  # it is counted there
            self._exposed[turn] = self._exposed.get(turn, 0.0) + seconds

    def waits(self, turn: int) -> None:
        """From now on no inner step is made, because of this turn."""
        self._waiting[turn] = time.perf_counter()

    def waits_no_more(self, turn: int) -> None:
        """Inner steps go on."""
        if (since := self._waiting.pop(turn, None)) is not None:
            self.exposed(turn, time.perf_counter() - since)

    def turn(self, take: Take, sent: Sent | None, applied: Applied, mode: Mode) -> None:
        """A turn has been taken in."""
        event = take.event
        self.waits_no_more(event.turn)
        exposed_s = self._exposed.pop(event.turn, 0.0)
        began = self._began.pop(event.turn, None)
        took_s = exposed_s if began is None else time.perf_counter() - began
        hidden_s = max(0.0, took_s - exposed_s)
        self._exposed_s += exposed_s
        self._hidden_s += hidden_s
        samples = [list(span) for span in sent.samples] if sent is not None else []
        row = {
            "kind": "outer",
            "step": self.progress.step,
            "turn": event.turn,
            "fragment": event.turn % self._fragments,
            "round": event.turn // self._fragments,
            "mode": mode,
            "num_clusters": len(event.weights),
            "weights": event.weights,
            "refused": event.refused,
            "tokens": 0 if sent is None else sent.tokens,
            "inner_steps": 0 if sent is None else sent.inner_steps,
            "samples": samples,
            "norm": applied.norm,
            "digest": applied.digest,
            "average_bytes": event.size_bytes,
            "sent_bytes": event.sent_bytes,
            "received_bytes": event.received_bytes,
            "send_s": event.send_s,
            "receive_s": event.receive_s,
            "exposed_s": exposed_s,
            "hidden_s": hidden_s,
            "at": time.time(),
        }
        self._last = {name: row[name] for name in ("turn", "step", "mode", "weights", "refused")}
        self._last |= {"norm": applied.norm, "digest": applied.digest, "at": row["at"]}
        self._told_at = -math.inf
        self._recorder.row(row)

    def state(
        self, sync_state: SyncState, coordinator: OuterCoordinator | None, *, is_last: bool = False
    ) -> None:
        """How it stands, for status.json; seldom, save after a turn and at the end."""
        now = time.monotonic()
        if coordinator is None or (now - self._told_at < _STATUS_EVERY_S and not is_last):
            return
        self._told_at = now
        line = coordinator.line
        total_s = self._exposed_s + self._hidden_s
        self._recorder.update(
            outer={
                "turn": sync_state.version,
                "round": sync_state.version // self._fragments,
                "fragments": self._fragments,
                "sync_every": coordinator.round_steps(sync_state.version),
                "steps_since": sync_state.steps - sync_state.contributed_at,
                "waits_for_turns": list(sync_state.sent),
                "is_averaged": not sync_state.sent and not sync_state.has_learnt,
                "clusters": list(line.members),
                "is_connected": line.is_connected,
                "is_behind": coordinator.is_behind,
                "sent_bytes": line.sent_bytes,
                "received_bytes": line.received_bytes,
                "bytes_per_s": coordinator.pace.bytes_per_s,
                "exposed_s": self._exposed_s,
                "hidden_s": self._hidden_s,
                "hidden_share": self._hidden_s / total_s if total_s else None,
                "last_turn": self._last,
            }
        )


_NOWHERE = Path("nowhere")
"""Stands on other ranks than 0 for a file that rank 0 has."""


@dataclass(frozen=True, slots=True)
class _Move:
    take: Take
    sent: Sent
    applied: Future[Applied]


class Turns:
    """Contributions and averages, the same on all ranks of the cluster; rank 0 has the line.

    All ranks must call every method but `hand_in` and `sync_state`, between the same two inner
    steps.

    Args:
        config: the section of the run file.
        name: of the cluster.
        cluster: outer parameters and outer optimizer.
        layout: of the run.
        samples: which ones this cluster reads.
        progress, recorder: of the run.
    """

    def __init__(
        self,
        config: DiLoCoConfig,
        name: str,
        cluster: Cluster,
        layout: Layout,
        samples: OwnSamples,
        progress: Progress,
        recorder: Recorder,
    ) -> None:
        self.line: Line | None = None
        """Rank 0 only; none before the cluster joins."""
        self.version = 0
        """Turns that have been applied."""
        self._saved = 0
        self.steps = 0
        """Inner steps of this cluster, over all its attempts."""
        self.sent: dict[int, Sent] = {}
        """By turn: contributions that no average has answered yet."""
        self.num_fragments = len(layout.fragments)
        self.record = OuterRecord(recorder, progress, self.num_fragments)
        self.samples = samples
        self.config, self._name = config, name
        self._cluster, self._layout = cluster, layout
        self.progress, self._recorder = progress, recorder
        self._contributed_at = 0
        # Of each fragment: trained tokens and inner steps at its last contribution, and what such
        # contributions brought that are in no average.
        self._tokens_at = [progress.target_tokens] * self.num_fragments
        self._steps_at = [0] * self.num_fragments
        self._owed = [(0, 0)] * self.num_fragments
        self._encodings: dict[int, Future[Contribution]] = {}
        self._move: _Move | None = None
        self._is_own_past = True
        """Whether a contribution in this cluster's name may be of an attempt before this one."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="outer")

    # State.

    def manifest(self) -> dict[str, Any]:
        """What a checkpoint says of the outer steps beside their tensors."""
        return {
            "layout": self._layout.digest,
            "version": self.version,
            "steps": self.steps,
            "contributed_at": self._contributed_at,
            # Copies: a checkpoint is written while steps go on.
            "tokens_at": list(self._tokens_at),
            "steps_at": list(self._steps_at),
            "owed": [list(owed) for owed in self._owed],
            "sent": [self.sent[turn].record() for turn in sorted(self.sent)],
            "samples": self.samples.record(),
        }

    def saved(self) -> None:
        """A checkpoint of now is under way, and the one before it is whole."""
        if self.line is not None:
            self.line.keep_since(self._saved)
        self._saved = self.version

    def restore(self, manifest: Mapping[str, Any]) -> None:
        """What a checkpoint says; the tensors are in `tensors` already."""
        self.version = self._saved = int(manifest["version"])
        self.steps = int(manifest["steps"])
        self._contributed_at = int(manifest["contributed_at"])
        self._tokens_at = [int(number) for number in manifest["tokens_at"]]
        self._steps_at = [int(number) for number in manifest["steps_at"]]
        self._owed = [(int(tokens), int(steps)) for tokens, steps in manifest["owed"]]
        sent = [sent_from(record) for record in manifest["sent"]]
        self.sent = {each.turn: each for each in sent}
        self.samples.restore(manifest["samples"])

    def tensors(self) -> dict[str, Tensor]:
        """This rank's part of the outer state, for a checkpoint."""
        return self._cluster.state_dict()

    @property
    def holding(self) -> list[tuple[int, int]]:
        """Samples of this cluster that no average has."""
        pending = [span for sent in self.sent.values() for span in sent.samples]
        return self.samples.holding(pending)

    # A turn.

    def contribute(self, turn: int) -> None:
        """Make a contribution; the steps that it holds end here."""
        began = time.perf_counter()
        self.finish_move()
        fragment = turn % self.num_fragments
        self.sent[turn] = self._held(turn, self.samples.tell(self.progress.samples))
        self._mark(fragment)
        self._contributed_at = self.steps
        self._is_own_past = False
        self.record.begin(turn)
        self._cluster.snapshot(fragment)
        self._encode(turn)
        if self.config.delay == 0:
            self.encoded(turn)
        self.exposed(turn, began)

    def _held(self, turn: int, samples: Sequence[Interval]) -> Sent:
        fragment = turn % self.num_fragments
        _, owed_steps = self._owed[fragment]
        return Sent(
            turn=turn,
            tokens=max(1, self._learnt_tokens(fragment)),
            inner_steps=self.steps - self._steps_at[fragment] + owed_steps,
            samples=tuple(samples),
            steps=self.steps,
        )

    def _mark(self, fragment: int) -> None:
        self._tokens_at[fragment] = self.progress.target_tokens
        self._steps_at[fragment] = self.steps
        self._owed[fragment] = (0, 0)

    def _encode(self, turn: int) -> None:
        # In a thread; its own group of ranks lets it run beside inner steps.
        path = _NOWHERE if self.line is None else self.line.contribution_path(turn)
        fragment = turn % self.num_fragments
        self._encodings[turn] = self._worker.submit(self._cluster.encode, fragment, path)

    def encoded(self, turn: int) -> None:
        """Wait for the encoding of a contribution, and send it."""
        if turn in self._encodings:
            self._encodings[turn].result()
        self.hand_in()
        self._encodings.pop(turn, None)

    def send_again(self) -> None:
        """Send what was under way when the checkpoint was saved; its bytes are the same."""
        for turn in sorted(self.sent):
            self._encode(turn)
            self.encoded(turn)

    def hand_in(self) -> None:
        """Send what is encoded; rank 0 only."""
        if self.line is None:
            return
        for turn, encoding in list(self._encodings.items()):
            if not encoding.done() or encoding.exception() is not None:
                continue  # an exception is raised on all ranks, when they need it
            del self._encodings[turn]
            self.line.contribute(self.sent[turn])

    def take(self, take: Take) -> None:
        """Take in an average; under overlap later, while inner steps go on."""
        began = time.perf_counter()
        self.finish_move()
        turn, event = take.event.turn, take.event
        assert turn == self.version, f"turn {turn} after {self.version} turns"
        fragment = turn % self.num_fragments
        sent = self._answered(turn)
        is_named = self._name in event.weights
        mode: Mode = "late"
        if sent is not None and is_named:
            mode = "on_time" if sent.steps == self.steps else "overlap"
        elif sent is not None:
            self._owe(sent)
        elif is_named and self._is_own_past:
            # Made by an earlier attempt, after the checkpoint that this one goes on from: what has
            # been learnt since is in the average.
            self._cluster.snapshot(fragment)
            sent = self._held(turn, ())
            self._mark(fragment)
            mode = "on_time"
        elif not self._learnt_tokens(fragment) and fragment not in self._cluster.pending:
            mode = "idle"
        if event.path is None:
            self._cluster.drop(fragment)
            self._applied(take, sent, Applied(self._cluster.digest(fragment), 0.0), mode)
            return
        alpha = self.config.alpha if self.config.delay else 0.0
        is_warmup = self.config.is_warmup(turn, self.num_fragments)
        if mode == "overlap" and sent is not None and self._is_early(sent):
            going = self._worker.submit(
                self._cluster.advance, fragment, event.path, mode, alpha=alpha, is_warmup=is_warmup
            )
            self._move = _Move(take, sent, going)
            return
        applied = self._cluster.apply(fragment, event.path, mode, alpha=alpha, is_warmup=is_warmup)
        self.exposed(turn, began)
        self._applied(take, sent, applied, mode)

    def _answered(self, turn: int) -> Sent | None:
        encoding = self._encodings.pop(turn, None)
        if encoding is not None:
            encoding.result()
            if self.line is not None:
                self.line.contribution_path(turn).unlink(missing_ok=True)
        return self.sent.pop(turn, None)

    def _is_early(self, sent: Sent) -> bool:
        return self.steps - sent.steps < self.config.delay

    def is_moving(self, turn: int) -> bool:
        """Whether its average is on its way into the weights."""
        return self._move is not None and self._move.take.event.turn == turn

    def finish_move(self, *, only_overdue: bool = False) -> None:
        """Give the weights what an average has led to meanwhile.

        Args:
            only_overdue: not before so many inner steps as the run file says.
        """
        move = self._move
        if move is None or (only_overdue and self._is_early(move.sent)):
            return
        self._move = None
        began = time.perf_counter()
        applied = move.applied.result()
        self._cluster.give(move.take.event.turn % self.num_fragments)
        self.exposed(move.take.event.turn, began)
        self._applied(move.take, move.sent, applied, "overlap")

    def _applied(self, take: Take, sent: Sent | None, applied: Applied, mode: Mode) -> None:
        turn = take.event.turn
        self.version = turn + 1
        if self.line is not None:
            self.line.applied(turn, applied.digest)
        self.progress.skip_to(take.step)
        self.record.turn(take, sent, applied, mode)

    def _owe(self, sent: Sent) -> None:
        fragment = sent.turn % self.num_fragments
        tokens, steps = self._owed[fragment]
        self._owed[fragment] = (tokens + sent.tokens, steps + sent.inner_steps)
        self.samples.owe(sent.samples)

    # State of another cluster.

    def donate(self) -> None:
        """Give the outer state to a cluster that needs it."""
        self.finish_move()
        paths = self.line.state_paths() if self.line is not None else []
        for fragment in range(self.num_fragments):
            path = paths[fragment] if paths else _NOWHERE
            self._cluster.export_state(fragment, path, version=self.version)
        outer_params = self.outer_params()
        if self.line is not None:
            self.line.give_state(self.version, paths, outer_params)
        log.info("outer state given version=%d", self.version)

    def adopt(self, adopt: Adopt) -> None:
        """Take over another cluster's outer state, and keep what was learnt since.

        Raises:
            TrainingError: it is not what it should be.
        """
        self.finish_move()
        event = adopt.event
        for turn in sorted(self.sent):
            sent = self._answered(turn)
            assert sent is not None
            self._owe(sent)
        keeps_steps = self.has_learnt
        for fragment in range(self.num_fragments):
            path = event.paths[fragment]
            self._cluster.import_state(fragment, path, keeps_steps=keeps_steps)
        self.version, self._is_own_past = event.version, False
        outer_params = self.outer_params()
        if outer_params != list(event.outer_params):
            raise TrainingError(
                f"the state that {event.donor} gave has other outer parameters than it said",
                where=str(event.paths[0].parent),
                fix="start this cluster again: it takes the state once more",
            )
        if self.line is not None:
            self.line.adopted(event.version, outer_params)
        self.progress.skip_to(adopt.step)
        self._recorder.note(
            f"the weights of {event.donor} after {event.version} turns are taken over"
        )

    def go_back(self) -> None:
        """Drop what was learnt since the last average; its samples are read again."""
        self.finish_move()
        for turn in sorted(self.sent):
            sent = self._answered(turn)
            assert sent is not None
            self.samples.owe(sent.samples)
        self._cluster.go_back()
        for fragment in range(self.num_fragments):
            self._mark(fragment)
        self.samples.deal(self.samples.tell(self.progress.samples))
        if self.line is not None:
            self.line.obeyed()

    def outer_params(self) -> list[str]:
        """The digest of each fragment's outer parameters."""
        return [self._cluster.digest(fragment) for fragment in range(self.num_fragments)]

    # How it stands.

    def exposed(self, turn: int, began: float) -> None:
        """Since `began` no inner step was made because of this turn."""
        self.record.exposed(turn, time.perf_counter() - began)

    def is_overdue(self, turn: int) -> bool:
        """Whether so many steps were made since the contribution as the average may take."""
        return self.steps - self.sent[turn].steps >= self.config.delay

    def is_done(self, turn: int) -> bool:
        """Whether a turn that this cluster has contributed to is in its weights."""
        return turn not in self.sent and not self.is_moving(turn)

    @property
    def has_learnt(self) -> bool:
        """Whether there is anything that no contribution has."""
        return any(self._learnt_tokens(fragment) for fragment in range(self.num_fragments))

    def _learnt_tokens(self, fragment: int) -> int:
        owed_tokens, _ = self._owed[fragment]
        return self.progress.target_tokens - self._tokens_at[fragment] + owed_tokens

    def sync_state(self) -> SyncState:
        """What decisions rest on."""
        return SyncState(
            version=self.version,
            steps=self.steps,
            contributed_at=self._contributed_at,
            sent=tuple(sorted(self.sent)),
            has_learnt=self.has_learnt,
            step=self.progress.step,
            samples_left=self.samples.left(self.progress.samples),
        )

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)
