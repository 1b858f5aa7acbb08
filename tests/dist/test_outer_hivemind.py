"""Engine hivemind with real peers: no hub is started, and whoever hosts it may be killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.errors import CommunicationError
from isles.outer.hivemind import HivemindSettings
from isles.outer.hivemind.host import HivemindMeeting
from isles.run.join_line import JoinLine, ask_hub
from tests.outer_trainer import Clusters


class Swarm(Clusters):
    """Clusters that know of the first one's address, and of nothing else."""

    first: tuple[str, ...] = ()

    def start(self, name: str, secret: str = "0123456789abcdef" * 2, **options: Any) -> None:
        file = self.folder / secret
        file.write_text(secret)
        rules = {"min_clusters": 2, "dead_after_s": 3.0, "keep_averages": 1}
        settings = HivemindSettings(
            run="test", rules=rules, initial_peers=self.first, secret_file=str(file)
        )
        # A turn takes long enough to be hit.
        link = {"heartbeat_s": 0.5, "max_bytes_per_s": 5e5, "meeting": HivemindMeeting(settings)}
        super().start(name, scale=8, link=link, **options)
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
    with Swarm(tmp_path, fragments=1) as swarm:
        swarm.start("a"), swarm.start("b")
        swarm.start("d", "fedcba9876543210" * 2)
        swarm.reached(1, "ab")  # two of them
        swarm.start("c", seed=1)
        swarm.until(lambda: swarm.record("c")["is_ready"] or swarm.record("c")["version"], "c")
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
        swarm.start(lost)
        swarm.until(lambda: swarm.record(lost)["version"] >= 3, "the lost one's return")
        records = swarm.end(6, "abc")
        assert swarm.record("d")["version"] == 0 and not swarm.record("d")["is_ready"]
    for name in rest:
        turn = records[name]["history"]["2"]
        assert turn["is_in"] and turn["names"] == [*rest]
    assert len({record["weights"] for record in records.values()}) == 1
