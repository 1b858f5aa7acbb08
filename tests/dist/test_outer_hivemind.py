"""Engine hivemind with real peers: no hub is started, and whoever hosts it may be killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.errors import CommunicationError
from isles.outer.hivemind import HivemindSettings
from isles.run.join_line import JoinLine, ask_hub
from tests.outer_trainer import Clusters

TURNS = 6


class Swarm(Clusters):
    """Clusters that know of the first one's address, and of nothing else."""

    def __init__(self, folder: Path, **rules: Any) -> None:
        super().__init__(folder)
        self.rules = rules
        self.first: tuple[str, ...] = ()

    def start(self, name: str, secret: Path, **options: Any) -> None:
        settings = HivemindSettings(
            run="test", rules=self.rules, initial_peers=self.first, secret_file=str(secret)
        )
        given = {
            "codec": "int8",
            "fragments": 1,
            "turns": TURNS,
            "join": "not needed",
            "scale": 32,  # a turn takes long enough to be hit
            "link": {"heartbeat_s": 0.5, "max_bytes_per_s": 2e6, "hivemind": settings},
        }
        self.begin(name, {**given, **options})
        if not self.first:
            place = self.place(name) / "initial_peers"
            self.until(place.exists, f"the address of {name}")
            self.first = tuple(place.read_text().split())

    def place(self, name: str) -> Path:
        return self.folder / f"spool-{name}" / "hivemind"

    def host(self) -> str:
        """Who hosts the hub: nobody has done so in a later term."""
        found = {
            int(path.parent.name.partition("-")[2]): name
            for name in self.running
            for path in self.place(name).glob("hub-*/port")
        }
        return found[max(found)]

    def daemons(self, name: str) -> list[int]:
        """Peer-to-peer daemons of a cluster, wherever they have come to hang."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if f"-id={self.place(name)}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def seen_by(self, name: str) -> set[str]:
        """The clusters that the hub names to whoever asks through one of them."""
        with suppress(CommunicationError):
            answer = ask_hub(JoinLine.read(self.place(name) / "line"), "/v1/status", 10)
            return {member["name"] for member in answer["members"]}
        return set()


def test_the_host_is_killed_in_mid_average_and_nothing_is_lost(tmp_path: Path) -> None:
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_text("0123456789abcdef0123456789abcdef")
    wrong.write_text("fedcba9876543210fedcba9876543210")
    swarm = Swarm(tmp_path, min_clusters=2, dead_after_s=3.0, keep_averages=1)
    try:
        swarm.hold(1)
        swarm.start("a", secret)
        swarm.start("b", secret)
        swarm.start("d", wrong)
        swarm.reached(1, "ab")  # two of them
        swarm.start("c", secret, seed=1)
        swarm.until(lambda: swarm.record("c")["is_ready"] or swarm.record("c")["version"], "c")
        swarm.hold(2)
        swarm.reached(2, "abc")  # and three
        lost = swarm.host()
        assert swarm.daemons(lost)
        started = swarm.folder / f"spool-{lost}" / "contribution-00000002"
        swarm.hold(3)
        swarm.until(started.exists, "its contribution")
        swarm.kill(lost)
        rest = "abc".replace(lost, "")
        swarm.reached(3, rest)
        swarm.until(lambda: not swarm.daemons(lost), "the end of its daemon")
        assert swarm.host() in rest
        # Also who only looks finds the hub through any of them, as `isles top` does.
        swarm.until(lambda: {*rest} <= swarm.seen_by(rest[0]), "an answer of the hub")
        swarm.start(lost, secret)
        swarm.until(lambda: swarm.record(lost)["version"] >= 3, "the lost one's return")
        records = swarm.end(TURNS, "abc")
        assert swarm.record("d")["version"] == 0 and not swarm.record("d")["is_ready"]
    finally:
        swarm.stop()
    for outer_step in map(str, range(TURNS)):
        turns = [record["history"].get(outer_step) for record in records.values()]
        assert len({turn["outer_params"] for turn in turns if turn}) == 1, outer_step
    for name in rest:
        turn = records[name]["history"]["2"]
        assert turn["is_in"] and turn["names"] == [*rest]
    for field in ("outer_params", "weights"):
        assert len({str(record[field]) for record in records.values()}) == 1, field
