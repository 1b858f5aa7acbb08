"""Outer step on all ranks: contribute, apply an average; send, load and save the state."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from isles.config.sections.outer import DiLoCoConfig
from isles.outer.client.client import OuterLink
from isles.outer.client.meeting import HubState
from isles.outer.client.spool import Spool
from isles.outer.cluster import Cluster, CompletedStep
from isles.outer.diloco import Mode
from isles.outer.layout import FragmentLayout
from isles.outer.messages import Adopt, Apply, Pending
from isles.outer.samples import Interval, OwnSamples

log = logging.getLogger(__name__)

_NOWHERE = Path("nowhere")
"""Placeholder on other ranks for rank 0's folder of files."""


class Recorder(Protocol):
    """The records of the run, on rank 0; see `isles.train.record`."""

    status: dict[str, Any]

    def note(self, text: str) -> None: ...

    def phase(self, phase: str, detail: str = "") -> None: ...

    def update(self, *, progresses: bool = True, **fields: Any) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...


class Progress(Protocol):
    """Progress of the run; see `isles.train.progress`."""

    step: int
    samples: int
    target_tokens: int
    steps_here: int

    def skip_to(self, step: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Move:
    # An average that is being applied to the weights while inner steps continue.
    apply: Apply
    pending: Pending
    applied: Future[CompletedStep]


class Clock:
    """Seconds of outer steps: without inner steps at the same time (exposed), or with them
    (hidden).

    Exposed time counts for the outer step that is applied next.
    """

    def __init__(self) -> None:
        self.exposed_s = self.hidden_s = 0.0
        self._began: dict[int, float] = {}
        self._paused_at: float | None = None
        self._unrecorded_s = 0.0

    def pause(self) -> None:
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        self._count()
        self._paused_at = None

    def _count(self) -> float:
        now = time.perf_counter()
        if self._paused_at is not None:
            self._unrecorded_s += now - self._paused_at
            self._paused_at = now
        return now

    def begin(self, outer_step: int) -> None:
        """Note that the contribution to an outer step starts now."""
        self._began[outer_step] = time.perf_counter()

    def applied(self, outer_step: int) -> tuple[float, float]:
        """The exposed and hidden seconds of an outer step that is over."""
        now = self._count()
        exposed_s, self._unrecorded_s = self._unrecorded_s, 0.0
        hidden_s = max(0.0, now - self._began.pop(outer_step, now) - exposed_s)
        self.exposed_s += exposed_s
        self.hidden_s += hidden_s
        return exposed_s, hidden_s


class OuterStep:
    """Contributions and averages, equal on all ranks of the cluster; rank 0 has the hub.

    All ranks must call every method except `hand_in`, between the same two inner steps; first of
    all `begin`.

    Args:
        member_id: the cluster's id for the whole run.
        manifest: the checkpoint's record of outer steps; None: no record, or no checkpoint.
    """

    def __init__(
        self,
        config: DiLoCoConfig,
        name: str,
        member_id: str,
        cluster: Cluster,
        layout: FragmentLayout,
        recorder: Recorder,
        manifest: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.name, self.member_id = config, name, member_id
        self.layout, self.num_fragments = layout, len(layout.fragments)
        self.loaded = manifest
        self.hub = OuterLink(Spool(_NOWHERE, 0, kept=0, since=0, most_bytes=0), HubState())
        """On rank 0 replaced when the cluster joins."""
        self.version = 0
        """Number of applied outer steps."""
        self.delay = None if config.delay == "auto" else config.delay
        """Inner steps while an average is on its way; None: not decided yet, as if 0."""
        self.costs: list[float] = []
        """Seconds of the outer steps of this attempt that answer a contribution, without the wait
        for other clusters. Without an encoding and a transfer, a step is too fast to count."""
        self._own_s = 0.0
        self._steps_before = 0  # inner steps of earlier attempts
        self.sent: dict[int, Pending] = {}
        """By outer step: contributions that no average has answered yet."""
        self.samples = OwnSamples(member_id)
        self.clock = Clock()
        self.last_row: dict[str, Any] | None = None
        self._cluster, self._recorder = cluster, recorder
        self.contributed_at = 0
        """`steps` at the last contribution."""
        self._saved = 0
        # For each fragment the trained tokens and inner steps in averages, or in transfer.
        self._tokens_at = [0] * self.num_fragments
        self._steps_at = [0] * self.num_fragments
        self._encodings: dict[int, Future[float]] = {}
        self._move: _Move | None = None
        self._is_own_past = True
        """True if a contribution in this cluster's name may belong to an earlier attempt."""
        # One thread: all ranks must make the collective calls of its work in the same order.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="outer")

    # Checkpoints.

    def loaded_tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint with outer state is loaded into, in place."""
        return {} if self.loaded is None else self._cluster.state_dict()

    def begin(self, progress: Progress) -> OwnSamples:
        """Resume as in the checkpoint, or start; returns the samples that this cluster reads."""
        self.progress = progress
        if self.loaded is None:
            self._tokens_at = [progress.target_tokens] * self.num_fragments
            self.samples.begin_at(progress.samples)
            self._cluster.begin()
            return self.samples
        manifest = self.loaded
        self.version = self._saved = int(manifest["version"])
        self._steps_before = int(manifest["steps"])
        self.contributed_at = int(manifest["contributed_at"])
        self._tokens_at = [int(number) for number in manifest["tokens_at"]]
        self._steps_at = [int(number) for number in manifest["steps_at"]]
        if self.config.delay == "auto" and (delay := manifest.get("delay")) is not None:
            self.delay = int(delay)
        sent = [Pending.from_record(record) for record in manifest["sent"]]
        self.sent = {each.outer_step: each for each in sent}
        self.samples.restore(manifest["samples"])
        return self.samples

    def manifest(self) -> dict[str, Any]:
        """Record of the outer steps for a checkpoint, in addition to their tensors."""
        return {
            "layout": self.layout.digest,
            "version": self.version,
            "steps": self.steps,
            "contributed_at": self.contributed_at,
            "delay": self.delay,
            # Copies: a checkpoint is written while steps continue.
            "tokens_at": list(self._tokens_at),
            "steps_at": list(self._steps_at),
            "sent": [asdict(self.sent[outer_step]) for outer_step in sorted(self.sent)],
            "samples": self.samples.record(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """This rank's part of the outer state, for a checkpoint."""
        return self._cluster.state_dict()

    def saved(self) -> None:
        """Note that a checkpoint is being written, and the previous one is complete."""
        self.hub.keep_since(self._saved)
        self._saved = self.version

    # Contributing.

    def contribute(self, outer_step: int) -> None:
        """Make a contribution with all steps up to now."""
        self.finish_move()
        fragment = outer_step % self.num_fragments
        samples = self.samples.take_read(self.progress.samples)
        self.sent[outer_step] = self._take_learned(outer_step, samples)
        self.contributed_at = self.steps
        self._is_own_past = False
        self.clock.begin(outer_step)
        began = time.perf_counter()
        # A copy, because inner steps change the weights while the thread encodes.
        self._cluster.snapshot(fragment)
        self._encode(outer_step)
        if not self.delay:
            self.encoded(outer_step)
        self._own_s = time.perf_counter() - began

    def _take_learned(self, outer_step: int, samples: Sequence[Interval]) -> Pending:
        fragment = outer_step % self.num_fragments
        pending = Pending(
            outer_step=outer_step,
            tokens=max(1, self._learned_tokens(fragment)),
            inner_steps=self.steps - self._steps_at[fragment],
            samples=tuple(samples),
            steps=self.steps,
        )
        self._mark(fragment)
        return pending

    def _mark(self, fragment: int) -> None:
        self._tokens_at[fragment] = self.progress.target_tokens
        self._steps_at[fragment] = self.steps

    def _give_back(self, pending: Pending) -> None:
        # A contribution is in no average: its progress belongs in the next one.
        fragment = pending.outer_step % self.num_fragments
        self._tokens_at[fragment] -= pending.tokens
        self._steps_at[fragment] -= pending.inner_steps
        self.samples.give_back(pending.samples)

    def _encode(self, outer_step: int) -> None:
        # In a thread; a separate process group lets it run during inner steps.
        fragment, path = outer_step % self.num_fragments, self.hub.contribution_path(outer_step)
        self._encodings[outer_step] = self._worker.submit(self._cluster.encode, fragment, path)

    def encoded(self, outer_step: int) -> None:
        """Wait for the encoding of a contribution, and send it."""
        if outer_step in self._encodings:
            self._encodings[outer_step].result()
        self.hand_in()
        self._encodings.pop(outer_step, None)

    def send_again(self) -> None:
        """Send contributions again that were in transfer when the checkpoint was saved; the bytes
        are equal."""
        for outer_step in sorted(self.sent):
            self._encode(outer_step)
            self.encoded(outer_step)

    def hand_in(self) -> None:
        """Send encoded contributions."""
        for outer_step, encoding in list(self._encodings.items()):
            if not encoding.done() or encoding.exception() is not None:
                continue  # an exception is raised on all ranks, when they need the result
            del self._encodings[outer_step]
            self.hub.contribute(self.sent[outer_step])

    # Applying.

    def apply(self, apply: Apply) -> None:
        """Apply an average; under overlap later, while inner steps continue."""
        self.finish_move()
        outer_step = apply.outer_step
        assert outer_step == self.version, f"{outer_step} after {self.version} outer steps"
        fragment = outer_step % self.num_fragments
        pending = self._end_pending(outer_step)
        is_named = self.name in apply.weights
        mode: Mode = "late"
        if pending is not None and is_named:
            mode = "on_time" if pending.steps == self.steps else "overlap"
        elif pending is not None:
            self._give_back(pending)
        elif is_named and self._is_own_past:
            # Made by an earlier attempt, after the checkpoint that this one resumes from: the
            # average contains the progress since then.
            self._cluster.snapshot(fragment)
            pending = self._take_learned(outer_step, ())
            mode = "on_time"
        elif not self._learned_tokens(fragment) and fragment not in self._cluster.pending:
            mode = "idle"
        if apply.path is None:
            self._cluster.drop(fragment)
            self._applied(apply, pending, CompletedStep(self._cluster.digest(fragment), 0.0), mode)
            return
        arguments = (fragment, apply.path, len(apply.weights), mode)
        alpha = self.config.alpha if self.delay else 0.0
        is_warmup = self.config.is_warmup(outer_step, self.num_fragments)
        if mode == "overlap" and pending is not None and self._is_early(pending):
            going = self._worker.submit(
                self._cluster.advance, *arguments, alpha=alpha, is_warmup=is_warmup
            )
            self._move = _Move(apply, pending, going)
            return
        began = time.perf_counter()
        applied = self._cluster.apply(*arguments, alpha=alpha, is_warmup=is_warmup)
        own_s, self._own_s = self._own_s, 0.0
        if own_s:
            own_s += time.perf_counter() - began
            self.costs.append(own_s + apply.send_s + apply.receive_s)
        self._applied(apply, pending, applied, mode)

    def _end_pending(self, outer_step: int) -> Pending | None:
        encoding = self._encodings.pop(outer_step, None)
        if encoding is not None:
            encoding.result()
            self.hub.contribution_path(outer_step).unlink(missing_ok=True)
        return self.sent.pop(outer_step, None)

    def _end_all(self) -> list[Pending]:
        ended = [self._end_pending(outer_step) for outer_step in sorted(self.sent)]
        return [pending for pending in ended if pending is not None]

    def _is_early(self, pending: Pending) -> bool:
        return self.steps - pending.steps < (self.delay or 0)

    def finish_move(self, *, only_overdue: bool = False) -> None:
        """Update the weights after an average; only_overdue: not before `delay` steps."""
        move = self._move
        if move is None or (only_overdue and self._is_early(move.pending)):
            return
        self._move = None
        applied = move.applied.result()
        self._cluster.give(move.apply.outer_step % self.num_fragments)
        self._applied(move.apply, move.pending, applied, "overlap")

    def _applied(
        self, apply: Apply, pending: Pending | None, applied: CompletedStep, mode: Mode
    ) -> None:
        outer_step = apply.outer_step
        self.version = outer_step + 1
        self.hub.applied(outer_step, applied.digest)
        self.progress.skip_to(apply.step)
        exposed_s, hidden_s = self.clock.applied(outer_step)
        self.last_row = {
            "kind": "outer",
            "step": self.progress.step,
            "outer_step": outer_step,
            "fragment": outer_step % self.num_fragments,
            "round": outer_step // self.num_fragments,
            "mode": mode,
            "num_clusters": len(apply.weights),
            "weights": apply.weights,
            "refused": apply.refused,
            "tokens": 0 if pending is None else pending.tokens,
            "inner_steps": 0 if pending is None else pending.inner_steps,
            "samples": [] if pending is None else [list(span) for span in pending.samples],
            "norm": applied.norm,
            "digest": applied.digest,
            "average_bytes": apply.size_bytes,
            "sent_bytes": apply.sent_bytes,
            "received_bytes": apply.received_bytes,
            "send_s": apply.send_s,
            "receive_s": apply.receive_s,
            "exposed_s": exposed_s,
            "hidden_s": hidden_s,
            "at": time.time(),
        }
        self._recorder.row(self.last_row)

    # State of another cluster.

    def send_state(self) -> None:
        """Send the outer state to a cluster that needs it."""
        self.finish_move()
        for fragment in range(self.num_fragments):
            path = self.hub.state_path(fragment)
            self._cluster.export_state(fragment, path, version=self.version)
        self.hub.give_state(self.version, self.outer_params())
        log.info("outer state sent version=%d", self.version)

    def adopt(self, adopt: Adopt) -> None:
        """Load another cluster's outer state, and keep the progress since then."""
        self.finish_move()
        for pending in self._end_all():
            self._give_back(pending)
        keeps_steps = self.has_learned
        for fragment, path in enumerate(adopt.paths):
            self._cluster.import_state(
                fragment,
                path,
                version=adopt.version,
                outer_params=adopt.outer_params[fragment],
                keeps_steps=keeps_steps,
            )
        self.version, self._is_own_past = adopt.version, False
        self.hub.adopted(adopt.version, adopt.outer_params)
        self.progress.skip_to(adopt.step)
        self._recorder.note(
            f"copied the weights of {adopt.source} after {adopt.version} outer steps"
        )

    def go_back(self) -> None:
        """Drop the progress since the last average; its samples are read again."""
        self.finish_move()
        for pending in self._end_all():
            self.samples.give_back(pending.samples)
        self._cluster.go_back()
        for fragment in range(self.num_fragments):
            self._mark(fragment)
        self.samples.add(self.samples.take_read(self.progress.samples))
        self.hub.reset_done()

    # Queries.

    @property
    def steps(self) -> int:
        """Number of inner steps of this cluster, over all its attempts, without discarded steps."""
        return self._steps_before + self.progress.steps_here

    def outer_params(self) -> list[str]:
        """The digest of each fragment's outer parameters."""
        return [self._cluster.digest(fragment) for fragment in range(self.num_fragments)]

    @property
    def holding(self) -> list[Interval]:
        """Samples of this cluster that are in no average."""
        return self.samples.holding([span for sent in self.sent.values() for span in sent.samples])

    def is_overdue(self, outer_step: int) -> bool:
        """True if `delay` steps were made since the contribution."""
        return not self._is_early(self.sent[outer_step])

    def is_done(self, outer_step: int) -> bool:
        """True if the weights contain the average of an outer step that this cluster contributed
        to."""
        is_moving = self._move is not None and self._move.apply.outer_step == outer_step
        return outer_step not in self.sent and not is_moving

    @property
    def has_learned(self) -> bool:
        """True if there is progress that no contribution has."""
        return any(self._learned_tokens(fragment) for fragment in range(self.num_fragments))

    def _learned_tokens(self, fragment: int) -> int:
        return self.progress.target_tokens - self._tokens_at[fragment]

    @property
    def samples_left(self) -> int:
        """Number of leased, unread samples."""
        return self.samples.left(self.progress.samples)

    def close(self) -> None:
        """Stop the thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)
