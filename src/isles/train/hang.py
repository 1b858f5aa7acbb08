"""Detects a step that takes far longer than usual, and finds the rank that delays it.

The step records its stage in a `StepClock`, and a thread of each rank checks the clock. When a step
is overdue on some rank, all ranks write their positions into the store that they connected through.
The store works while the main threads wait inside torch. The lowest rank that answers decides.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from isles.config.sections.run import RunConfig
from isles.dist.world import World
from isles.errors import ExitCode
from isles.facts.units import format_duration
from isles.run.env import RankEnv
from isles.run.hang import Frame, Hang, RankPosition, collective_in, find_hang, place_in_words
from isles.run.live import StacksRequests
from isles.run.outcome import end_without_agent, error_record
from isles.run.paths import Attempt
from isles.run.records import read_record, write_record, write_text_atomic
from isles.train.clock import CurrentStage, StepClock
from isles.train.record import Recorder

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_ANSWER_S = 6.0
"""Seconds for an answer. A rank or store that does not answer in time counts as lost."""

_VIEW_S = 0.25
"""Seconds between two checks while a user waits for the stacks of all ranks."""

_CONNECT = timedelta(seconds=5)
_STOPPED_S = 10.0
"""Seconds between two checks after which the process was suspended: by a queue, or because its
machine was paused. A busy machine does not delay a thread by this much."""

_KNOWN_STEPS = 3
_FIRST, _COMPILING = 5, 20
"""Factors on min_time for the first steps and the first evaluation. The second factor is for
compiled models."""


@dataclass(frozen=True, slots=True)
class ThreadPositions:
    """The positions of a rank's threads.

    Args:
        at: the innermost frame, as text, such as `at my_data.py:88 read()`.
        waits_in: the collective operation in which the rank waits for other ranks; empty if its
            stack shows none.
        stacks: of all threads, the main thread first.
    """

    at: str
    waits_in: str
    stacks: str


def place_now(main: int, *, is_gpu: bool) -> ThreadPositions:
    """The positions of this process's threads. Call it from a thread other than the main thread.

    Args:
        main: the main thread's ident.
        is_gpu: whether it computes on a GPU, whose results a thread may wait for.
    """
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stack = _stack(frames.get(main))
    waits_in = collective_in(stack, is_gpu=is_gpu)
    leaf = stack
    # The innermost frame outside Python's own waiting functions.
    files = (file for file, _, _ in reversed(stack) if not file.endswith("/threading.py"))
    if not waits_in and "/concurrent/futures/" in next(files, ""):
        # The main thread waits for the thread that reads ahead, so show that thread's frame.
        ahead = [ident for ident, name in names.items() if name.startswith("data")]
        leaf = _stack(frames.get(ahead[0])) if ahead and ahead[0] is not None else stack
    own = threading.get_ident()
    texts = []
    for ident in [main, *(ident for ident in frames if ident not in (main, own))]:
        frame = frames.get(ident)
        lines = traceback.format_stack(frame) if frame else ["  this thread has no Python frame\n"]
        texts.append(f"thread {names.get(ident, ident)}:\n{''.join(lines)}")
    return ThreadPositions(place_in_words(leaf), waits_in, "\n".join(texts))


def _stack(frame: FrameType | None) -> list[Frame]:
    # The frames of a thread, innermost last.
    if frame is None:
        return []
    found = traceback.extract_stack(frame)
    return [(entry.filename, entry.lineno or 0, entry.name) for entry in found]


class Watchdog:
    """Watches the steps of one rank, together with the watchdogs of the other ranks.

    Args:
        connect: returns the ranks' store; called again after a failure.
        is_gpu: whether this rank computes on a GPU.
        saving_moved_at: returns when a save last made progress, by `clock`.
    """

    def __init__(
        self,
        config: RunConfig,
        attempt: Attempt,
        env: RankEnv,
        hosts: list[str],
        clock: StepClock,
        connect: Callable[[], Store],
        recorder: Recorder,
        *,
        is_gpu: bool,
        saving_moved_at: Callable[[], float],
    ) -> None:
        self._requests = StacksRequests(attempt) if env.rank == 0 else None
        self._viewed: tuple[float, int, float] | None = None
        self._config = config
        self._attempt, self._env, self._rank, self._hosts = attempt, env, env.rank, hosts
        self._clock, self._connect, self._recorder = clock, connect, recorder
        self._is_gpu = is_gpu
        self._saving_moved_at = saving_moved_at
        self._main = threading.main_thread().ident or 0
        self._store: Store | None = None
        self._store_answered_at = clock.now()
        self._answered = 0
        self._hang: _Overdue | None = None
        self._looked_at = self._resumed_at = clock.now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._is_over.set()
        self._thread.join(2 * _CONNECT.total_seconds())

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S if self._viewed is None else _VIEW_S):
            try:
                self.look()
            except Exception:  # a thread's top level: no bug in here may end a run
                log.exception("the watchdog failed; the run continues without it")
                break
            try:
                self._view()
            except (OSError, RuntimeError) as error:  # from a disk, or torch's store
                log.debug("%s", error)
            except Exception:  # a watcher must not stop the watchdog
                log.exception("this rank no longer answers with its stacks; the run continues")
                self._requests = self._viewed = None
        self._store = None

    def _view(self) -> None:
        # On rank 0: collect the stacks of all ranks when a user asks for them, and write them.
        store, requests, now = self._store, self._requests, self._clock.now()
        if store is None or requests is None:
            return
        if self._viewed is None:
            if (at := requests.new()) is None:
                return
            # Before asking, because only the question of a hang leaves stack files.
            store.set("viewed", str(store.add("asked", 0) + 1))
            self._viewed = at, int(store.add("asked", 1)), now
            return
        asked_at, question, since = self._viewed
        answers = self._answers(question)
        if len(answers) == len(self._hosts) or now - since > _ANSWER_S:
            self._viewed = None
            keys = ("step", "stage", "at", "waits_in", "stacks")
            requests.answer(
                asked_at,
                {
                    rank: {"host": self._hosts[rank], **{key: answer[key] for key in keys}}
                    for rank, answer in answers.items()
                },
            )

    def look(self) -> None:
        """Check once: answer questions, and ask or decide if this rank is overdue."""
        moment, now = self._clock.moment, self._clock.now()
        if now - self._looked_at > _STOPPED_S:
            self._resumed_at = now
        if self._hang is not None and self._hang.moment.since != moment.since:
            self._went_on(self._hang, now)
            self._hang = None
        since = max(moment.since, self._resumed_at)
        if moment.phase == "saving":  # a save may take any time while its files progress
            since = max(since, self._saving_moved_at())
        limit_s = self._limit_s(moment)
        is_overdue = limit_s is not None and now - since >= limit_s
        if is_overdue and self._hang is None:
            self._hang = _Overdue(moment, now)
        self._exchange()
        hang = self._hang
        if is_overdue and hang and not hang.is_decided and now - hang.noticed_at > _ANSWER_S:
            hang.is_decided = True
            self._decide(hang, now)
        self._looked_at = self._clock.now()

    def _limit_s(self, moment: CurrentStage) -> float | None:
        # Seconds that this phase may take; None: no limit.
        config, steps = self._config.watchdog, self._clock.steps
        times = _COMPILING if self._config.training.torch_compile is True else _FIRST
        match moment.phase:
            case "step" if len(steps) < _KNOWN_STEPS:
                return config.min_time * times
            case "step":
                return max(config.min_time, config.slow_factor * statistics.median(steps))
            case "evaluating":
                longest_s = config.slow_factor * self._clock.longest_evaluation_s
                return max(config.min_time * times, longest_s)
            case "saving":
                return self._config.checkpoint.timeout + config.min_time
            case _:
                return None

    def _exchange(self) -> None:
        # Ask once per hang, and answer each time that a rank asks.
        hang = self._hang
        try:
            store = self._store = self._store or self._connect()
            if hang is not None and not hang.question:
                hang.question = int(store.add("asked", 1))
                hang.noticed_at = self._clock.now()
            asked = int(store.get("asked")) if store.check(["asked"]) else 0
            if asked != self._answered:
                moment, place = self._clock.moment, place_now(self._main, is_gpu=self._is_gpu)
                answer = {"question": asked, **moment._asdict(), **asdict(place)}
                store.set(f"rank-{self._rank}", json.dumps(answer))
                self._answered = asked
                if not store.check(["viewed"]) or int(store.get("viewed")) != asked:
                    self._write_stacks(self._rank, answer)
            self._store_answered_at = self._clock.now()
        except RuntimeError:  # torch's, for a lost or unreachable store: retry
            self._store = None

    def _answers(self, question: int) -> dict[int, dict[str, Any]]:
        # The answers of ranks to this question or a later one.
        found: dict[int, dict[str, Any]] = {}
        if (store := self._store) is None:
            return found
        with suppress(RuntimeError):
            for rank in range(len(self._hosts)):
                if store.check([f"rank-{rank}"]):
                    answer = json.loads(store.get(f"rank-{rank}"))
                    if answer["question"] >= question:
                        found[rank] = answer
        return found

    def _decide(self, hang: _Overdue, now: float) -> None:
        # Report the rank that delays the step, unless a lower rank is alive to report it.
        silent_s = now - self._store_answered_at
        answers = self._answers(hang.question) if hang.question else {}
        if self._rank not in answers:
            text = (
                f"the ranks' store has not answered for {silent_s:.0f} s: the process that leads "
                f"the run "
                "is frozen or dead, or its machine or network is down"
            )
            self._report(hang, now, Hang((), text), may_stop=True)
            return
        # A lower rank in another phase has its own deadline: hours if it hangs in a save.
        if any(r < self._rank and a["phase"] == hang.moment.phase for r, a in answers.items()):
            return
        positions = {
            rank: RankPosition(a["step"], a["stage"], a["at"], a["waits_in"])
            for rank, a in answers.items()
        }
        for rank, answer in answers.items():
            if not self._stacks(rank, answer["step"]).exists():  # a rank on another host
                self._write_stacks(rank, answer)
        found = find_hang(positions, self._hosts, silent_s=now - hang.noticed_at)
        self._report(hang, now, found, may_stop=min(answers) == self._rank)

    def _stacks(self, rank: int, step: int) -> Path:
        return self._attempt.hangs / f"step-{step}-rank-{rank}.txt"

    def _write_stacks(self, rank: int, answer: dict[str, Any]) -> None:
        waits = f", waiting in {answer['waits_in']}" if answer["waits_in"] else ""
        head = f"rank {rank} on {self._hosts[rank]}, step {answer['step']}, {answer['stage']}"
        path = self._stacks(rank, answer["step"])
        with suppress(OSError):  # a full disk: the log still names the rank
            path.parent.mkdir(exist_ok=True)
            text = f"{head}{waits}, {answer['at']}\n\n{answer['stacks']}"
            write_text_atomic(path, text, durable=False)
            if rank == self._rank and self._is_gpu and (record := _flight_record()):
                write_text_atomic(path.with_suffix(".nccl.json"), record, durable=False)

    def _report(self, hang: _Overdue, now: float, found: Hang, *, may_stop: bool) -> None:
        moment, usual = hang.moment, ""
        hang.what = f"step {moment.step}"
        if moment.phase != "step":
            hang.what = f"{moment.phase} after step {moment.step}"
        elif len(self._clock.steps) >= _KNOWN_STEPS:
            usual = f" (usually {_seconds(statistics.median(self._clock.steps))})"
        text = f"{hang.what} has taken {_seconds(now - moment.since)}{usual}: {found.text}"
        self._recorder.note(f"{text}; stacks of the ranks: {self._attempt.hangs}")
        record = {"step": moment.step, "text": text, "at": time.time()}
        record |= {"root_causes": list(found.root_causes), "went_on_after_s": None}
        with suppress(OSError):
            self._attempt.hangs.mkdir(exist_ok=True)
            write_record(self._attempt.hangs / f"step-{moment.step}.json", record)
        if self._config.watchdog.action == "stop" and may_stop:
            self._end(text, found)

    def _went_on(self, hang: _Overdue, now: float) -> None:
        if not hang.what:
            return
        took_s = now - hang.moment.since
        self._recorder.note(f"{hang.what} continued after {_seconds(took_s)}")
        path = self._attempt.hangs / f"step-{hang.moment.step}.json"
        with suppress(OSError):
            write_record(path, {**(read_record(path) or {}), "went_on_after_s": took_s})

    def _end(self, text: str, found: Hang) -> None:
        # Exit this rank, and so all ranks, with an error that names the root cause.
        rank = found.root_causes[0] if found.root_causes else self._rank
        error = error_record(
            text,
            id="step.stalled",
            kind="Stalled",
            code=ExitCode.COMMUNICATION,
            where=f"rank {rank} on {self._hosts[rank]}",
            fix=f"read the stacks of the ranks in {self._attempt.hangs}. To wait instead of "
            f"stopping, "
            "set watchdog.action: report",
            rank=rank,
            host=self._hosts[rank],
            is_communication=False,
            will_recur=False,
            restart=self._env.restart,
        )
        with suppress(OSError):
            write_record(self._attempt.rank_error(self._rank, self._env.restart), error)
            if self._env.attempt == 0:  # without an agent nothing else finds the root cause
                end_without_agent(self._attempt, error)
        log.error("watchdog.action is stop: %s", text)
        sys.stderr.flush()
        os._exit(ExitCode.COMMUNICATION)  # an exception cannot reach the waiting main thread


@dataclass(slots=True)
class _Overdue:
    moment: CurrentStage
    noticed_at: float  # or asked, which may be later if the store is unreachable
    question: int = 0  # its number in the store; 0: not asked yet
    is_decided: bool = False
    what: str = ""  # as text, once this rank has reported it


@contextmanager
def watching(
    clock: StepClock,
    config: RunConfig,
    attempt: Attempt,
    env: RankEnv,
    world: World,
    recorder: Recorder,
    saving_moved_at: Callable[[], float],
) -> Iterator[None]:
    """Watch the steps within; see `Watchdog`. All ranks must call this."""
    ranks = world.gather((world.host, uuid.uuid4().hex))
    watchdog = Watchdog(
        config,
        attempt,
        env,
        [host for host, _ in ranks],
        clock,
        lambda: PrefixStore(f"watch-{ranks[0][1]}", _own_connection(env)),
        recorder,
        is_gpu=world.device.type == "cuda",
        saving_moved_at=saving_moved_at,
    )
    watchdog.start()
    try:
        yield
    finally:
        watchdog.close()


def _own_connection(env: RankEnv) -> Store:
    # A new connection to the ranks' store. The connection of the process group is blocked while its
    # main thread waits for a key.
    if env.store is not None:
        return FileStore(str(env.store), -1)
    store: Store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, is_master=False, timeout=_CONNECT)
    return store  # the in-memory store of a single rank


def _flight_record() -> str:
    # The dump of NCCL's flight recorder, as JSON; empty without one.
    with suppress(Exception):  # a private function of torch, which may disappear
        from torch._C import _distributed_c10d

        dump: Any = _distributed_c10d
        text = dump._dump_nccl_trace_json(includeCollectives=True, onlyActive=True)
        return text.decode() if isinstance(text, bytes) else str(text)
    return ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)
