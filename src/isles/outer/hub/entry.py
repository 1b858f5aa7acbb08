"""How a cluster is let in: what must be equal, who has its name, and where it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from isles.outer.hub.book import Book
from isles.outer.hub.membership import Membership
from isles.outer.hub.refusal import Refusal
from isles.outer.hub.samples import Samples
from isles.outer.hub.settings import Settings
from isles.outer.hub.turns import Turns
from isles.outer.messages import PROTOCOL, Join, JoinAnswer, Standing

_FIXED = {"layout", "codec", "adapter.type", "the frozen weights"}
"""What no run changes on its way. The rest may be changed while no cluster takes part."""

_FIX = "let these be the same on all clusters"


class Entry:
    """The door for clusters that have the token."""

    def __init__(
        self, book: Book, settings: Settings, membership: Membership, samples: Samples, turns: Turns
    ) -> None:
        self._book, self._settings = book, settings
        self._membership, self._samples, self._turns = membership, samples, turns

    def join(self, join: Join, sizes: Sequence[int]) -> JoinAnswer:
        """A cluster joins, or joins again.

        Args:
            join: what it says.
            sizes: of each fragment the bytes of a contribution; the first cluster's are kept.

        Raises:
            Refusal: it trains something else, its name is another's, or there are too many.
        """
        if join.protocol != PROTOCOL:
            raise Refusal(
                409,
                "protocol",
                f"{join.name} speaks version {join.protocol}, the rendezvous version {PROTOCOL}",
                "install the same version of isles on both",
            )
        known = self._book.get("identity")
        changes = {} if known is None else self._changes(join, known)
        self._membership.check(join)
        with self._book.transaction():
            if known is None:
                self._settle_first(join, sizes)
            elif changes:
                self._settle_anew(join, known, changes)
            if known is None:
                return self._let_in(join, "first", "")
            return self._let_in(join, *self._standing(join))

    def _let_in(self, join: Join, standing: Standing, why: str) -> JoinAnswer:
        book, turns = self._book, self._turns
        number, was_living = self._membership.settle(join)
        before = self._membership.get(number)
        if standing == "first" or int(book.get("start") or 0):
            self._samples.take_over(number, join.holding)
        _, lost = self._samples.give_back(number, join.holding)
        following = turns.next
        is_behind = standing == "behind"
        from_turn = before["from_turn"]
        if not was_living or before["is_behind"]:
            from_turn = following + int(turns.has_begun(following))
        order = "pull" if is_behind else ""
        values = (int(is_behind), from_turn, join.version, order, why, number)
        book.run(
            "UPDATE members SET is_behind = ?, from_turn = ?, version = ?, orders = ?, "
            "order_reason = ? WHERE number = ?",
            *values,
        )
        book.note(join.name, "joined", f"{standing}, from turn {from_turn} on; {why}")
        return JoinAnswer(
            standing=standing,
            turn=following,
            from_turn=from_turn,
            settings=self._settings.model_dump(),
            lost=lost,
            why=why,
        )

    # What must be equal.

    def _changes(self, join: Join, known: str) -> dict[str, tuple[str, str]]:
        """What this cluster would change, each with its value there and here.

        Raises:
            Refusal: it must not.
        """
        identity, pieces = json.loads(known)
        mine = identity_of(join)
        found = {
            key: (identity.get(key, "nothing"), mine.get(key, "nothing"))
            for key in sorted({*identity, *mine})
            if identity.get(key) != mine.get(key)
        }
        others = [row["name"] for row in self._membership.living() if row["id"] != join.id]
        refused = {key: both for key, both in found.items() if others or key in _FIXED}
        texts = [
            f"{key} is {here} in {join.name} and {there} in the run"
            for key, (there, here) in refused.items()
        ]
        if not texts and (pieces != join.pieces or len(join.outer_params) != len(pieces)):
            texts = ["the pieces into which the weights are cut differ"]
        if texts:
            raise Refusal(
                409,
                "other_run",
                f"{join.name} does not train what this run does: " + "; ".join(texts),
                _FIX,
            )
        return found

    def _settle_first(self, join: Join, sizes: Sequence[int]) -> None:
        if len(join.outer_params) != len(join.pieces):
            raise Refusal(
                422,
                "malformed",
                f"{len(join.outer_params)} digests for {len(join.pieces)} fragments",
            )
        self._book.put("start", str(join.version))
        self._book.put("outer_params", json.dumps(join.outer_params))
        self._book.put("sizes", json.dumps(list(sizes)))
        self._book.put("identity", json.dumps([identity_of(join), join.pieces]))

    def _settle_anew(self, join: Join, known: str, changes: Mapping[str, tuple[str, str]]) -> None:
        """Nobody else takes part: a run that goes on with other settings has these from now on.

        Whoever is away joins anew when he comes back, and is compared then.
        """
        _, pieces = json.loads(known)
        self._book.put("identity", json.dumps([identity_of(join), pieces]))
        texts = [f"{key} {there} -> {here}" for key, (there, here) in changes.items()]
        self._book.note(join.name, "settings", ", ".join(texts))
        for row in self._membership.away():
            if row["id"] != join.id:
                self._membership.part(row, "it must join anew: the run's settings have changed")

    # Where it stands.

    def _standing(self, join: Join) -> tuple[Standing, str]:
        following = self._turns.next
        if join.version > following:
            raise Refusal(
                409,
                "ahead",
                f"{join.name} has applied {join.version} turns, and the rendezvous knows of "
                f"{following}",
                "it joins the wrong run, or the rendezvous was set back to an old copy: start a "
                "rendezvous with an empty folder, and let the most advanced cluster join first",
            )
        for fragment, outer_params in enumerate(join.outer_params):
            right = self._turns.outer_params(fragment, join.version)
            if right and outer_params != right:
                return "behind", (
                    f"its outer parameters of fragment {fragment} after {join.version} turns are "
                    "not those of the run"
                )
        if join.version == following:
            return "current", ""
        if self._turns.is_kept_since(max(join.version, min(join.has, following))):
            return "late", ""
        return "behind", f"the average of turn {join.version} is not kept any more"


def identity_of(join: Join) -> dict[str, str]:
    """What must be equal on all clusters."""
    return {**join.identity, "codec": join.codec}
