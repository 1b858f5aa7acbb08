"""Engine hivemind without its network: who hosts, what a copy is worth, who may come."""

from __future__ import annotations

import sqlite3
import ssl
from pathlib import Path

import pytest

from isles.errors import ConfigError
from isles.outer.hivemind.choice import Hello, choose
from isles.outer.hivemind.copies import Copier, Copy
from isles.outer.hivemind.keys import Keys
from isles.outer.hub.core import Core
from isles.outer.hub.samples import Samples
from isles.outer.hub.settings import Settings
from isles.outer.messages import Join


def hello(host: str = "", turn: int = 0, changes: int = -1, term: int = 0) -> Hello:
    return Hello(name="n", host=host, turn=turn, changes=changes, term=term)


def chosen(me: str, everybody: dict[str, Hello], at_least: int = 1, *, settled: bool = True) -> str:
    others = {peer: said for peer, said in everybody.items() if peer != me}
    return choose(me, everybody[me], others, at_least=at_least, is_settled=settled)


def test_all_choose_the_one_with_the_newest_copy() -> None:
    everybody = {"a": hello(turn=4, changes=9), "b": hello(turn=5, changes=1), "c": hello(turn=5)}
    assert [chosen(me, everybody) for me in "abc"] == ["", "b", ""]
    assert [chosen(me, everybody, 4) for me in "abc"] == [""] * 3
    assert [chosen(me, everybody, settled=False) for me in "abc"] == [""] * 3


def test_a_host_is_followed_as_long_as_it_is_heard() -> None:
    ahead = {"a": hello("b", 7), "b": hello("b", 5, term=1), "c": hello("", 9)}
    assert [chosen(me, ahead, 9) for me in "abc"] == ["b", "b", "b"]
    without = {"a": hello("b", 5, 3), "c": hello("b", 5, 4)}
    assert [chosen(me, without) for me in "ac"] == ["", "c"]


def test_of_two_hosts_the_one_that_is_behind_steps_down() -> None:
    """A network was cut in two; each half has a host."""
    halves = {"a": hello("a", 5, term=3), "b": hello("b", 6, term=2), "c": hello("a", 5)}
    assert chosen("a", halves) == chosen("b", halves) == "b"
    assert chosen("c", halves) == "a"  # until that one has stepped down
    assert chosen("c", {**halves, "a": hello("", 5)}) == "b"


def join(name: str) -> Join:
    return Join(
        id=name.encode().hex().rjust(32, "0"),
        name=name,
        identity={"layout": "x"},
        codec="none",
        pieces=[[4]],
        version=0,
        outer_params=["0" * 64],
    )


def new_core(folder: Path) -> Core:
    folder.mkdir(exist_ok=True)
    return Core(folder, Settings(), lambda: 0.0)


def test_who_takes_over_a_copy_deals_no_sample_twice(tmp_path: Path) -> None:
    core = new_core(tmp_path / "first")
    copier = Copier(tmp_path / "first" / "rendezvous.sqlite", [(1, "peer", 0)])
    empty = copier.take()
    core.join(join("a"), [16])
    first = core.samples.claim(1, 1, 100)
    copy = copier.take()
    assert copier.take() is copy and empty.changes < copy.changes
    assert (copy.turn, copy.lineage) == (0, [(1, "peer", 0)])
    copy.save(tmp_path / "kept")
    kept = Copy.load(tmp_path / "kept")
    assert kept == copy
    (tmp_path / "second").mkdir()
    kept.unpack(tmp_path / "second")
    other = new_core(tmp_path / "second")
    other.join(join("b"))
    second = other.samples.claim(2, 1, 50)
    assert (first, second) == ([(0, 100)], [(100, 150)])
    assert Samples(other.book).audit() == []


def test_a_copy_knows_which_histories_go_on_from_it() -> None:
    copy = Copy([(1, "a", 0)], 7, 3, b"")
    assert copy.precedes([(1, "a", 0)])
    assert copy.precedes([(1, "a", 0), (2, "b", 8)])
    assert not copy.precedes([(1, "a", 0), (2, "b", 7)])  # b began before this cluster's last act
    assert not copy.precedes([(1, "c", 0)])
    assert not Copy([(1, "a", 0), (2, "b", 5)], 9, 3, b"").precedes([(1, "a", 0)])


def test_a_copy_leaves_out_what_is_long_past(tmp_path: Path) -> None:
    core = new_core(tmp_path / "book")
    core.join(join("a"), [16])
    for turn in range(600):
        core.book.run("INSERT INTO turns (turn, state) VALUES (?, 'committed')", turn)
        sql = "INSERT INTO samples VALUES (?, ?, 'committed', 1, ?)"
        core.book.run(sql, 10 * turn, 10 * turn + 10, turn)
    copy = Copier(tmp_path / "book" / "rendezvous.sqlite", [(1, "a", 0)]).take()
    (tmp_path / "small").mkdir()
    copy.unpack(tmp_path / "small")
    small = sqlite3.connect(tmp_path / "small" / "rendezvous.sqlite")
    assert copy.turn == 600
    assert small.execute("SELECT MIN(turn), MAX(turn) FROM turns").fetchone() == (88, 599)
    rows = small.execute("SELECT start, stop FROM samples ORDER BY start").fetchall()
    assert rows[0] == (0, 880) and rows[1] == (880, 890) and rows[-1] == (5990, 6000)


def test_all_clusters_make_the_same_certificate_of_a_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a line that is long enough\n")
    mine, yours = Keys.read("run", secret), Keys.read("run", secret)
    assert mine.line(1).secret_text() == yours.line(1).secret_text()
    assert mine.topic == yours.topic != Keys("run", b"another").topic
    assert mine.is_proof(yours.proof("a", "b"), "a", "b")
    assert not mine.is_proof(yours.proof("a", "b"), "c", "b")
    assert not mine.is_proof(Keys("run", b"another").proof("a", "b"), "a", "b")
    assert not mine.is_proof(None, "a", "b")
    mine.write_identity(tmp_path / "host")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "host" / "certificate.pem", tmp_path / "host" / "key.pem")
    secret.write_text("short")
    with pytest.raises(ConfigError, match="5 bytes, less than 16"):
        Keys.read("run", secret)
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.read("run", tmp_path / "none")
