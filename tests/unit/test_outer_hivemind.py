"""Engine hivemind without its network: who hosts, what a new host begins with, who may come."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from isles.errors import ConfigError
from isles.outer.hivemind.dht import Keys
from isles.outer.hivemind.host import Hello, choose
from isles.outer.hub.rules import Refusal
from isles.outer.messages import RoundAnswer
from tests.outer_world import ZERO, World


def hello(host: str = "", has: int = 0, term: int = 0) -> Hello:
    return Hello(name="n", host=host, has=has, term=term)


def chosen(me: str, everybody: dict[str, Hello], at_least: int = 1, *, settled: bool = True) -> str:
    others = {peer: said for peer, said in everybody.items() if peer != me}
    return choose(me, everybody[me], others, at_least=at_least, has_listened=settled)


def test_all_choose_the_one_with_most_averages() -> None:
    everybody = {"a": hello(has=4), "b": hello(has=5), "c": hello(has=4)}
    assert [chosen(me, everybody) for me in "abc"] == ["", "b", ""]
    assert [chosen(me, everybody, 4) for me in "abc"] == [""] * 3
    assert [chosen(me, everybody, settled=False) for me in "abc"] == [""] * 3


def test_a_host_is_followed_as_long_as_it_is_heard() -> None:
    ahead = {"a": hello("b", 7), "b": hello("b", 5, term=1), "c": hello("", 9)}
    assert [chosen(me, ahead, 9) for me in "abc"] == ["b", "b", "b"]
    without = {"a": hello("b", 5), "c": hello("b", 5)}
    assert [chosen(me, without) for me in "ac"] == ["", "c"]


def test_of_two_hosts_the_one_that_is_behind_steps_down() -> None:
    """A network was cut in two; each half has a host."""
    halves = {"a": hello("a", 5, term=3), "b": hello("b", 6, term=2), "c": hello("a", 5)}
    assert chosen("a", halves) == chosen("b", halves) == "b"
    assert chosen("c", halves) == "a"  # until that one has stepped down
    assert chosen("c", {**halves, "a": hello("", 5)}) == "b"


def test_a_new_host_goes_on_from_what_clusters_hold(tmp_path: Path) -> None:
    """a, who hosts now, has applied turns 0 and 1, and has the average of turn 2; b lacks it."""
    world = World(tmp_path, keep_averages=8)
    answers = [
        RoundAnswer(
            outer_step=outer_step,
            state="committed",
            weights={"a": 3, "gone": 5},
            refused={"b": "nan"} if outer_step == 1 else {},
            digest=ZERO,
            size_bytes=16,
        )
        for outer_step in range(3)
    ]
    world.do(world.core.seed, list(zip(answers, ["1" * 64, "2" * 64, ""], strict=True)))
    first = world.join("a", version=2, has=3, outer_params="2" * 64, holding=[(10, 20)])
    assert (first.standing, first.outer_step, first.from_step) == ("first", 3, 3)
    b = world.join("b", version=2, has=2, outer_params="2" * 64, holding=[(20, 24), (0, 4)])
    assert (b.standing, b.lost) == ("late", []), "it goes on in its own block"
    assert world.answer(1).weights == {"a": 3, "gone": 5}
    assert world.answer(1).refused == {"b": "nan"}
    assert world.answer(2).is_kept
    with pytest.raises(Refusal, match="knows of 3") as caught:
        world.join("c", version=4, outer_params="4" * 64)
    assert caught.value.kind == "ahead", "it must host instead"
    assert world.join("c", version=1, outer_params="7" * 64).standing == "behind"
    assert world.lease("a", 1, 5) == [(24, 29)], "none is leased that was leased before"


def test_no_average_is_applied_that_some_living_cluster_lacks(tmp_path: Path) -> None:
    world = World(tmp_path, dead_after_s=10.0)
    world.join_all("abc")
    for name in "abc":
        world.complete(name, 0)
    world.close()
    assert not world.held("a", 0) and not world.held("b", 0)
    world.now = 6.0
    assert not world.held("a", 0) and not world.held("b", 0)
    world.now = 11.0
    world.drop_silent()
    assert world.held("a", 0), "c is not heard"
    world.heartbeat("c")
    assert not world.held("a", 0)
    world.heartbeat("c", has=1)
    assert world.held("a", 0)


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
