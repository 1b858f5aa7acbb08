"""Epochs: which members average a turn directly with one another, and whether all got the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from isles.outer.hub.book import Book
from isles.outer.hub.membership import Membership
from isles.outer.hub.refusal import Refusal
from isles.outer.hub.relays import Relays
from isles.outer.hub.rules import Decision, TurnView, judge_turn
from isles.outer.hub.settings import Settings
from isles.outer.hub.turns import Turns
from isles.outer.messages import EpochAnswer, Failed, OpenTurn, Prepared, Ready

_MOST_KEYS = 100_000
_MOST_BYTES = 2**26
_STILL_S = 180.0
"""An epoch in which nothing has moved for so long comes to nothing."""


@dataclass(slots=True)
class Epoch:
    """Members that average one turn together, once."""

    number: int
    turn: int
    ranks: list[int]
    """Members by rank."""
    ready: Mapping[int, Ready]
    prepared: dict[int, Prepared] = field(default_factory=dict)
    store: dict[str, bytes] = field(default_factory=dict)
    """What they tell one another of their addresses."""
    store_bytes: int = 0
    moved: tuple[int, ...] = ()
    """What has been told, prepared and sent, when that was last looked at."""
    moved_at: float = 0.0


class Epochs:
    """One epoch at a time, for the turn that is next.

    Contributions lie with the members; what is kept here dies with this process, and members say
    again that they are ready. The number of an epoch is kept, so that none comes twice.
    """

    def __init__(
        self,
        book: Book,
        settings: Settings,
        membership: Membership,
        turns: Turns,
        clock: Callable[[], float],
    ) -> None:
        self._book = book
        self._settings = settings
        self._membership = membership
        self._turns = turns
        self._clock = clock
        self._ready: dict[int, dict[int, Ready]] = {}
        self._first: dict[int, float] = {}
        self._quorum: dict[int, float] = {}
        self._again: frozenset[int] = frozenset()
        self._now: Epoch | None = None
        self._relays = Relays(clock)
        self._wanted: dict[int, tuple[int, float]] = {}

    def want_average(self, member: int, turn: int) -> None:
        """A member has missed a turn that others averaged among themselves, and needs the bytes."""
        self._wanted.setdefault(turn, (member, self._clock()))

    def average_asked_of(self, member: int) -> int | None:
        """The turn whose average a member shall upload: it took part, and somebody needs it.

        Another is asked after a while, and so on in turn.
        """
        for turn, (asker, since) in sorted(self._wanted.items()):
            row = self._book.row("SELECT participants FROM turns WHERE turn = ? AND kept = 0", turn)
            # Whoever needs one that is longer past pulls the state.
            if row is None or turn < self._turns.next - self._settings.keep_averages:
                del self._wanted[turn]
                continue
            living = {other["number"] for other in self._membership.living()}
            able = [n for n in json.loads(row["participants"]) if n in living and n != asker]
            asked = int((self._clock() - since) / self._settings.donor_s)
            if able and member == able[asked % len(able)]:
                return turn
        return None

    def ready(self, member: int, turn: int, ready: Ready) -> EpochAnswer:
        """A member has its contribution, and waits for others.

        Raises:
            Refusal: the turn is decided, or far off, or the member is behind.
        """
        if not self._took_part(member, turn):
            self._turns.check(self._membership.get(member), turn)
            self._check_sound(member, turn)
        epoch = self._now
        is_in = epoch is not None and epoch.turn == turn and member in epoch.ranks
        is_open = self._turns.state(turn) != "committed" and not is_in
        if is_open and self._is_relayed(turn):
            self._ready.pop(turn, None)
        elif is_open:
            weight = self._turns.parts.weight(turn, member, ready)
            waiting = self._ready.setdefault(turn, {})
            waiting[member] = ready.model_copy(update={"tokens": weight})
            self._first.setdefault(turn, self._clock())
            if len(waiting) >= self._settings.quorum:
                self._quorum.setdefault(turn, self._clock())
        return self.answer(member, turn)

    def _check_sound(self, member: int, turn: int) -> None:
        part = self._turns.parts.get(turn, member)
        if part is not None and part["state"] == "refused":
            name = self._membership.get(member)["name"]
            raise Refusal(
                422,
                "refused",
                f"the contribution of {name} to turn {turn} is refused: {part['reason']}",
                "apply the turn's average and go on; look for the step at which its loss rose",
            )

    def _took_part(self, member: int, turn: int) -> bool:
        return self._turns.state(turn) == "committed" and self._turns.is_counted(turn, member)

    def answer(self, member: int, turn: int) -> EpochAnswer:
        """How a turn stands for a member that is ready for it."""
        if self._turns.state(turn) == "committed":
            row = self._book.row("SELECT digest FROM turns WHERE turn = ?", turn)
            assert row is not None
            return EpochAnswer(state="committed", digest=row["digest"])
        epoch = self._now
        if epoch is not None and epoch.turn == turn and member in epoch.ranks:
            return EpochAnswer(
                state="formed",
                epoch=epoch.number,
                rank=epoch.ranks.index(member),
                members=[self._membership.get(number)["name"] for number in epoch.ranks],
                tokens=[epoch.ready[number].tokens for number in epoch.ranks],
                have_met=self._relays.have_met(epoch.ranks),
            )
        if (why := self._relays.reason(turn)) is not None:
            return EpochAnswer(state="relayed", why=why)
        decision = self._decision(turn)
        due_in_s = None if decision.due_at is None else max(0.0, decision.due_at - self._clock())
        return EpochAnswer(
            state="waiting", due_in_s=due_in_s, waits_for=self._membership.names(decision.waits_for)
        )

    def _is_relayed(self, turn: int) -> bool:
        """Whether a turn goes through the rendezvous; once it does, it goes on doing so."""
        if self._relays.reason(turn) is not None:
            return True
        why = self._relays.find_reason(self._membership.expected(turn))
        if why is None and self._turns.parts.members(turn, "complete"):
            why = "others have done so before the rendezvous was started again"
        if why is not None:
            self._relays.begin(turn, why)
            self._book.note("", "relayed", f"turn {turn} goes through the rendezvous: {why}")
        return why is not None

    def _decision(self, turn: int) -> Decision:
        ready = frozenset(self._ready.get(turn, {}))
        expected = self._membership.expected(turn)
        if self._again:  # the survivors of an epoch that came to nothing wait for no others
            expected &= self._again
        view = TurnView(
            expected=expected,
            complete=ready,
            refused=self._turns.parts.members(turn, "refused"),
            first_at=None if self._again else self._first.get(turn),
            quorum_at=None if self._again else self._quorum.get(turn),
            least=self._membership.least,
        )
        return judge_turn(self._settings, view, self._clock())

    def open_turns(self) -> list[OpenTurn]:
        """The turns for which somebody is ready, as clusters are told of them."""
        found = []
        for turn, ready in sorted(self._ready.items()):
            if turn < self._turns.next:
                continue
            decision = self._decision(turn)
            due = None if decision.due_at is None else max(0.0, decision.due_at - self._clock())
            found.append(
                OpenTurn(
                    turn=turn,
                    due_in_s=due,
                    contributed=self._membership.names(frozenset(ready)),
                    waits_for=self._membership.names(decision.waits_for),
                )
            )
        return found

    def open_for_s(self, turn: int) -> float:
        """Seconds since the first member was ready for a turn."""
        return self._clock() - self._first.get(turn, self._clock())

    def form(self) -> bool:
        """Form an epoch for the next turn, if its members are there.

        Returns:
            Whether that was done, or somebody was refused.
        """
        turn = self._turns.next
        ready = self._ready.get(turn)
        if ready and self._now is None and self._is_relayed(turn):
            del self._ready[turn]
            return True
        if self._now is not None or not ready or not self._decision(turn).is_closed:
            return False
        norms = {number: (part.norm, part.tokens) for number, part in ready.items()}
        if found := self._turns.parts.outliers(turn, norms):
            for number, reason in found.items():
                part = ready.pop(number)
                self._turns.refuse_direct(self._membership.get(number), turn, part, reason)
            return True
        living = {row["number"] for row in self._membership.living()}
        ranks = sorted(living & set(ready), key=lambda n: (self._membership.get(n)["name"], n))
        if not ranks:
            return False
        number = int(self._book.get("epoch") or 0) + 1
        self._book.put("epoch", str(number))
        self._now = Epoch(number, turn, ranks, {rank: ready[rank] for rank in ranks})
        self._ready.pop(turn)
        return True

    def prepared(self, member: int, number: int, prepared: Prepared) -> EpochAnswer:
        """A member has the whole average; the turn is committed once all have the same.

        Raises:
            Refusal: the epoch has ended: the average is void, the contribution is not.
        """
        epoch = self._find(member, number)
        if epoch is None:
            if self._took_part(member, prepared.turn):
                return self.answer(member, prepared.turn)
            raise _ended(number)
        if prepared.size_bytes > self._turns.parts.largest_average(epoch.turn, len(epoch.ranks)):
            what = f"an average of {prepared.size_bytes} bytes is larger than one can be"
            raise Refusal(422, "malformed", what)
        epoch.prepared[member] = prepared
        if len(epoch.prepared) == len(epoch.ranks):
            if len({(other.digest, other.size_bytes) for other in epoch.prepared.values()}) > 1:
                names = ", ".join(
                    f"{self._membership.get(n)['name']}: {p.digest[:12]}"
                    for n, p in sorted(epoch.prepared.items())
                )
                self.end(number, f"its members have different averages ({names})")
                raise _ended(number)
            seconds = self.open_for_s(epoch.turn)
            self._turns.commit_direct(epoch.turn, epoch.ready, prepared, seconds)
            self._relays.succeeded(epoch.turn, epoch.ranks)
            self._clear(epoch.turn)
        return self.answer(member, prepared.turn)

    def fail(self, member: int, number: int, failed: Failed) -> None:
        """A member could not average; another epoch will, without what was found to be unsound."""
        epoch = self._find(member, number)
        if epoch is None:
            return
        why = f"{self._membership.get(member)['name']} says: {failed.why}"
        self.end(number, why)
        if failed.culprit is None or failed.culprit >= len(epoch.ranks):
            places = range(len(epoch.ranks))
            known = [pair for pair in failed.apart if pair[0] in places and pair[1] in places]
            pairs = [frozenset(epoch.ranks[rank] for rank in pair) for pair in known]
            pairs = [pair for pair in pairs if len(pair) > 1]
            self._relays.failed(epoch.turn, epoch.ranks, pairs, failed.why)
            return
        culprit = epoch.ranks[failed.culprit]
        if culprit != member:
            row, ready = self._membership.get(culprit), epoch.ready[culprit]
            self._turns.refuse_direct(row, epoch.turn, ready, why)

    def drop(self) -> bool:
        """End the epoch if one of its members is gone, or nothing moves; whether that was done."""
        epoch = self._now
        if epoch is None:
            return False
        living = {row["number"] for row in self._membership.living()}
        gone = [number for number in epoch.ranks if number not in living]
        if gone:
            self.end(epoch.number, f"{', '.join(self._membership.names(gone))} is gone")
        return bool(gone) or self._end_still(epoch)

    def _end_still(self, epoch: Epoch) -> bool:
        """End the epoch if nothing has moved for long: a member hangs that gives signs of life."""
        beats = [self._membership.beats.get(number) for number in epoch.ranks]
        sent = [beat.sent_bytes + beat.received_bytes for beat in beats if beat is not None]
        moved = (len(epoch.store), len(epoch.prepared), *sent)
        now = self._clock()
        if moved != epoch.moved:
            epoch.moved, epoch.moved_at = moved, now
        if now - epoch.moved_at <= _STILL_S:
            return False
        late = ", ".join(
            self._membership.names([n for n in epoch.ranks if n not in epoch.prepared])
        )
        why = f"nothing has moved for {_STILL_S:g} s; it waited for {late}"
        self.end(epoch.number, why)
        self._relays.failed(epoch.turn, epoch.ranks, [], why)
        return True

    def end(self, number: int, why: str) -> None:
        """An epoch comes to nothing; its members lose nothing, and are asked again."""
        epoch = self._now
        if epoch is None or epoch.number != number:
            return
        self._now = None
        self._again = frozenset(epoch.ranks)
        self._book.note("", "epoch_ended", f"epoch {number} of turn {epoch.turn}: {why}")

    def _clear(self, turn: int) -> None:
        self._now = None
        self._again = frozenset()
        self._first.pop(turn, None)
        self._quorum.pop(turn, None)

    def _find(self, member: int, number: int) -> Epoch | None:
        epoch = self._now
        if epoch is None or epoch.number != number or member not in epoch.ranks:
            return None
        return epoch

    # What gloo's members tell one another.

    def put(self, member: int, number: int, key: str, value: bytes) -> None:
        """Keep a value for the other members of an epoch.

        Raises:
            Refusal: the epoch has ended, or has said too much.
        """
        epoch = self._find(member, number)
        if epoch is None:
            raise _ended(number)
        epoch.store_bytes += len(key) + len(value)
        if len(epoch.store) >= _MOST_KEYS or epoch.store_bytes > _MOST_BYTES:
            what = f"an epoch keeps at most {_MOST_KEYS} keys and {_MOST_BYTES} bytes"
            raise Refusal(413, "too_large", what)
        epoch.store[key] = value

    def get(self, member: int, number: int, key: str) -> bytes | None:
        """A value that a member of an epoch has put; None: not yet.

        Raises:
            Refusal: the epoch has ended.
        """
        epoch = self._find(member, number)
        if epoch is None:
            raise _ended(number)
        return epoch.store.get(key)

    def status(self) -> str:
        """For people."""
        if self._now is None:
            return ""
        names = ", ".join(self._membership.names(self._now.ranks))
        return f"epoch {self._now.number} of turn {self._now.turn}: {names}"


def _ended(number: int) -> Refusal:
    return Refusal(
        409, "epoch", f"epoch {number} has ended", "say again that the contribution is ready"
    )
