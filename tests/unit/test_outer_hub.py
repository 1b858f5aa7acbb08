"""The hub's decisions, without network and with a clock that the test turns."""

from __future__ import annotations

import errno
import hashlib
import os
import random

import pytest

from isles.errors import ConfigError
from isles.outer.client.http import RateLimit
from isles.outer.hub.files import Incoming
from isles.outer.hub.rules import outliers
from isles.outer.hub.server import fingerprint, lock_folder, make_identity
from isles.outer.messages import CHUNK_BYTES, digest_of, hash_chunks
from isles.run.join_line import JoinLine, encode
from tests.outer_world import ZERO, World, after, member_id, refused

# When a turn is closed.


def test_all_waits_for_those_who_live_and_move_and_were_there_when_it_began(tmp_path):
    world = World(tmp_path, "abc", wait="all", still_after_s=100.0)
    assert world.turn("ac", 0) is None
    assert world.answer(0).waits_for == ["b"]
    world.now = 10.5
    world.heartbeat("a"), world.heartbeat("c")
    world.drop_silent()
    assert world.events("dropped") == ["b: no heartbeat for 10.5 s"]
    assert world.join("d").from_step == 1
    assert world.close() == ["a", "c"]
    world.leave("c"), world.complete("a", 1)
    world.heartbeat("d", step=7)
    while world.now < 110.5:
        assert world.close() is None
        world.now += 5.0
        world.heartbeat("d", step=7), world.heartbeat("a", step=int(world.now))
        world.drop_silent()
    world.now += 1.0
    assert world.close() == ["a"], "d lives but stands still"


def test_min_clusters_holds_a_turn_until_there_are_so_many(tmp_path):
    world = World(tmp_path, "a", wait="time_boxed", time_box_s=1.0, min_clusters=2)
    world.complete("a", 0)
    world.now = 500.0
    assert world.close() is None
    world.join("b")
    assert world.turn("b", 0) == ["a", "b"]
    world.leave("b")
    assert world.turn("a", 1) is None, "b pauses, and comes back"
    world.join("b", version=1)
    world.leave("b", has_finished=True)
    assert world.close() == ["a"], "nobody is left to count on"


def test_time_boxed_goes_on_without_the_late(tmp_path):
    world = World(tmp_path, "ab", wait="time_boxed", time_box_s=5.0)
    assert world.heartbeat("b").open == []
    world.now = 100.0
    world.complete("a", 0)
    world.now = 102.0
    [opened] = world.heartbeat("b").open
    assert (opened.due_in_s, opened.contributed, opened.waits_for) == (3.0, ["a"], ["b"])
    assert world.close() is None
    world.now = 105.0
    assert world.close() == ["a"]
    late = refused(world.complete, "b", 0)
    assert late.kind == "late" and "round 1" in late.what
    world.complete("b", 1, tokens=30)
    assert world.turn("a", 1) == ["a", "b"]
    assert world.answer(1).weights == {"a": 10, "b": 30}


def test_quorum_has_a_grace_and_a_closed_turn_is_averaged_over_the_same_after_a_restart(tmp_path):
    world = World(tmp_path, "bac", wait="quorum", quorum=2, grace_s=3.0)
    world.complete("a", 0, tokens=3)
    world.now = 50.0
    assert world.close() is None and world.heartbeat("c").open[0].due_in_s is None
    world.complete("b", 0, tokens=5)
    world.now = 52.9
    assert world.close() is None
    world.now = 53.0
    job = world.do(world.core.rounds.close)
    world.restart()
    world.heartbeat("a")
    assert world.do(world.core.rounds.close) == job
    assert job is not None and [tokens for _, tokens in job.parts] == [3, 5]  # by name
    assert "decided without" in refused(world.complete, "c", 0).what


# Who may join, and who is behind.


def test_who_does_not_fit_is_told_why_and_a_dead_clusters_name_can_be_taken_over(tmp_path):
    world = World(tmp_path, "a", max_clusters=2)
    for change, kind, says in (
        ({"identity": {"layout": "b"}}, "other_run", "layout is b in b, but a in the run"),
        ({"codec": "int8"}, "other_run", "codec is int8 in b, but none in the run"),
        ({"pieces": [[5]]}, "other_run", "pieces"),
        ({"name": "a"}, "name_taken", "named 'a'"),
        ({"version": 3}, "ahead", "applied 3 rounds"),
        ({"protocol": 99}, "protocol", "version 99"),
        ({"outer_params": [ZERO] * 2}, "malformed", "2 digests for 1 fragments"),
    ):
        refusal = refused(world.join, "b", **change)
        assert refusal.kind == kind and says in refusal.what
    world.join("b")
    assert "the maximum is 2" in refused(world.join, "c").what
    world.lease("a", 1, 8)
    world.drop("a")
    for name, kind in (("a", "name_taken"), ("c", "full")):  # it may come back
        refusal = refused(world.join, "a2", name=name)
        assert refusal.kind == kind and "200 s" in refusal.fix
    # A killed cluster that has its run directory has its id, and is itself at any time; a new one
    # is told for how long it waits, and which other ways there are.
    fix = refused(world.join, "a2", name="a").fix
    assert "another name" in fix and "wait 189 s" in fix and "old run directory" in fix
    world.restart()
    assert world.join("a", holding=[(0, 8)]).lost == []
    world.drop("a", for_long=True)
    world.join("a2", name="a")
    assert "does not know this cluster" in refused(world.heartbeat, "a").what


def test_standings_and_stragglers(tmp_path):
    world = World(tmp_path, fragments=2, keep_averages=3)
    assert world.join("a").standing == "first"
    assert world.join("b").standing == "current"
    assert world.join("c", outer_params="1" * 64).standing == "behind"  # other initial weights
    world.turns("ab", 0, 1)
    for outer_step in range(2, 6):
        assert world.turn("ab", outer_step) == ["a", "b"]
        world.applied("a", outer_step, after(outer_step))
    # The third average was kept until the sixth was there: b has missed too many.
    told = world.heartbeat("b")
    assert told.command == "pull" and "round 2" in told.command_reason
    assert "must pull the state" in refused(world.complete, "b", 6).what
    outer_params = [after(4), after(3)]  # turns 3 and 4 are of fragments 1 and 0
    for version, standing in ((5, "late"), (4, "behind"), (2, "behind")):
        assert world.join("b", version=version, outer_params=outer_params).standing == standing
    assert not world.answer(2).is_kept and world.answer(3).is_kept


def test_nobody_is_behind_by_what_was_known_of_him_before_nor_who_has_kept_what_it_lacks(tmp_path):
    """That the first turn was applied is on its way, or lost with another host, as others go on."""
    world = World(tmp_path, "ab", keep_averages=1)
    for outer_step in range(2):
        assert world.turn("ab", outer_step) == ["a", "b"]
    assert world.heartbeat("a", version=1).command == ""
    assert world.heartbeat("b", version=2).command == ""
    world.restart()
    assert world.join("c").standing == "behind"
    assert world.want_state("c").source == "b"
    assert world.turn("ab", 2) == ["a", "b"]
    assert world.heartbeat("a", version=1).command == "pull"
    for outer_step in range(3, 6):
        world.turn("b", outer_step)
    assert world.join("a", version=2).standing == "behind"
    assert world.join("a", version=2, has=4).standing == "behind", "one is missing"
    assert world.join("a", version=2, has=5).standing == "late"
    assert world.join("b", version=2, has=99).standing == "late"
    assert world.want_state("c").source == "", "theirs are as old"
    world.heartbeat("b", version=5, has=6)
    assert world.want_state("c").source == "b"
    assert world.heartbeat("a", version=3, has=6).command == ""
    assert world.heartbeat("a", version=4, has=4).command == "pull", "its disk has lost one"


def test_who_has_other_weights_pulls_the_state(tmp_path):
    world = World(tmp_path, "abc")
    world.turn("abc", 0)
    world.applied("a", 0, "a" * 64)
    world.applied("c", 0, "c" * 64)
    assert world.heartbeat("c").command == "", "b may still say who of the two is right"
    world.applied("b", 0, "c" * 64)
    assert world.heartbeat("a").command == "pull" and world.heartbeat("c").command == ""
    assert [text.split(":")[0] for text in world.events("diverged")] == ["a"]


def test_a_state_is_asked_of_the_most_advanced_and_of_another_if_it_is_idle(tmp_path):
    world = World(tmp_path, "ab", source_s=20.0, keep_averages=2, dead_after_s=1000.0)
    world.turns("ab", 0, 1, 2)
    state = ("a", 3, after(2))
    assert "no state is requested" in refused(world.offer_state, *state).what
    assert world.join("n").standing == "behind"
    assert world.want_state("n").source == "a"
    assert world.heartbeat("a").send_state and not world.heartbeat("n").send_state
    for size_bytes, files in ((2**40, 1), (10, 2)):
        assert (
            "a state of this run has" in refused(world.offer_state, *state, size_bytes, files).what
        )
    assert world.offer_state(*state, 100) != world.offer_state(*state, 101)
    states = "SELECT COUNT(*) FROM states"
    assert world.core.journal.number(states) == 1, "the first, which never came, is forgotten"
    world.now = 21.0
    assert world.want_state("n").source == "b"  # a has sent nothing
    assert world.heartbeat("b").send_state and not world.heartbeat("a").send_state
    number = world.offer_state("b", 3, after(2))
    assert world.offer_state("b", 3, after(2)) == number  # it goes on
    assert "differs from the run's" in refused(world.offer_state, "b", 3, ZERO).what
    world.core.states.complete(number)
    world.leave("a")
    for outer_step in range(3, 9):  # its averages stay as long as somebody pulls
        world.turns("b", outer_step)
        world.now += 100.0
        world.core.states.touch()
    answer = world.want_state("n")
    assert (answer.state, answer.version) == (number, 3) and world.answer(3).is_kept
    world.now += 1000.0
    world.turns("b", 9)
    assert not world.answer(3).is_kept and world.answer(8).is_kept
    assert world.want_state("n").state is None
    world.leave("b")
    assert world.want_state("n").source == "", "both pause, and will give it"
    for name in "ab":
        world.join(name, version=10, outer_params=after(9))
        world.leave(name, has_finished=True)
    assert "other clusters have finished this run" in refused(world.want_state, "n").what


# Updates that nobody should average.


def test_outliers_and_what_is_not_finite_are_refused_by_name(tmp_path):
    world = World(tmp_path, "ab", outlier=10.0)
    world.turns("ab", 0, 1, 2)
    leased = world.lease("b", 1, 5)
    world.complete("a", 3), world.complete("b", 3, leased, norm=10.5)
    assert world.close() == ["a"]
    assert "its norm 10.5 is above 10" in world.answer(3).refused["b"]
    assert world.events("refused")[0].startswith("b: round 3: its norm 10.5")
    assert world.core.samples.counts() == {"leased": 5}  # still b's, not averaged
    what = refused(world.complete, "b", 4, norm=float("nan")).what
    assert "contribution of b to round 4 is refused: its norm is nan" in what
    assert world.heartbeat("b").command == "reset"
    assert world.turn("a", 4) == ["a"]
    world.core.reset_done(member_id("b"))
    assert world.heartbeat("b").command == ""
    assert world.turn("ab", 5) == ["a", "b"]
    # Where all are refused, the turn changes nothing, and nobody waits.
    world.leave("b")
    refused(world.complete, "a", 6, norm=float("inf"))
    assert world.close() == []
    answer = world.answer(6)
    assert (answer.state, answer.size_bytes, answer.weights) == ("committed", 0, {})
    assert world.turn("a", 7) == ["a"]


def test_outliers():
    for contributions, known, found in (
        ({1: (1.0, 100), 2: (9.0, 100)}, 4, []),
        ({1: (1.0, 100), 2: (11.0, 100)}, 4, [2]),
        ({1: (1.0, 100), 2: (11.0, 100)}, 3, []),  # too little to judge by
        ({1: (1.0, 100), 2: (11.0, 200)}, 4, []),  # twice the tokens: twice the norm may be
        ({1: (1.0, 100), 2: (5.0, 1)}, 4, []),  # few tokens never count against a cluster
        ({1: (50.0, 100), 2: (60.0, 100)}, 4, []),  # what all do is nobody's fault
        ({1: (50.0, 100), 2: (1e30, 100), 3: (60.0, 100)}, 4, [2]),
        # At first a contribution is compared with those of others; who of two is wrong?
        ({1: (1.0, 9), 2: (1e30, 9), 3: (2.0, 9)}, 0, [2]),
        ({1: (0.0, 9), 2: (1.0, 9), 3: (0.0, 9)}, 0, []),
        ({}, 0, []),
    ):
        history = [(1, 1.0, 100), (2, 1.0, 100)] * 4
        told = outliers(10.0, history[:known], contributions, 2, may_be_common=True)
        assert list(told) == found, contributions
    alone = outliers(10.0, history, {1: (50.0, 100)}, 2, may_be_common=False)
    assert list(alone) == [1], "alone it does not say what is common"


# Files, lines, secrets.


def test_a_file_survives_a_crash_as_far_as_its_bytes_do(tmp_path):
    data = random.Random(0).randbytes(2 * CHUNK_BYTES + 5)
    source, path = tmp_path / "source", tmp_path / "in" / "file"
    source.write_bytes(data)
    hashes = hash_chunks(source)
    incoming = Incoming(path, len(data))

    def put(incoming, index):
        incoming.put(index, data[index * CHUNK_BYTES :][:CHUNK_BYTES], hashes[index])

    put(incoming, 2), put(incoming, 0)
    assert "chunk 1 has sha256" in refused(incoming.put, 1, bytes(CHUNK_BYTES), hashes[1]).what
    assert "of the 3 chunks are missing" in refused(incoming.seal, digest_of(hashes)).what
    with incoming.path.open("r+b") as stream:  # a page that never reached the disk
        stream.seek(100)
        stream.write(b"torn")
    again = Incoming(path, len(data))
    assert [i for i, sha256 in again.received().items() if sha256 == hashes[i]] == [2]
    put(again, 0), put(again, 1)
    assert "missing or do not match the announcement" in refused(again.seal, ZERO).what
    again.seal(digest_of(hashes))
    assert again.path.read_bytes() == data and not path.exists()
    put(again, 0)  # the same again is no fault
    other = data[1 : CHUNK_BYTES + 1]
    refusal = refused(again.put, 0, other, hashlib.sha256(other).hexdigest())
    assert "complete already" in refusal.what
    again.keep()
    assert path.read_bytes() == data and not again.path.exists()
    for late in (incoming.put, again.put):  # of a link that was slow: it harms nobody
        incoming.close()
        late_refusal = refused(late, 0, other, hashlib.sha256(other).hexdigest())
        assert "not needed any more" in late_refusal.what
    assert "not needed any more" in refused(incoming.keep).what and path.read_bytes() == data


def test_a_join_line_survives_a_mail_and_shows_no_secret(tmp_path):
    token = encode(bytes(range(32)))
    line = JoinLine("::1", 8443, "llama-1", token, bytes(32))
    text = line.secret_text()
    assert JoinLine.parse(f" {text[:30]}\n  {text[30:]}\n") == line
    assert token not in str(line) and token not in repr(line)
    wrong_port, wrong_kind = text.replace(":8443", ":99999"), text.replace("isles:", "https:")
    for broken in (text[:-1], wrong_kind, "", wrong_port):
        with pytest.raises(ConfigError) as caught:
            JoinLine.parse(broken)
        assert token not in str(caught.value)
    with pytest.raises(ConfigError, match="is not readable"):
        JoinLine.read(tmp_path / "nowhere")


def test_secrets_are_for_their_owner_alone_and_folders_for_one(tmp_path, monkeypatch):
    names = {"token", "key.pem", "certificate.pem"}
    other = tmp_path / "other"
    other.mkdir()
    make_identity(tmp_path), make_identity(other)
    for name in names:
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / name).read_text() != (other / name).read_text()
    assert {path.name for path in other.iterdir()} == names
    before = (tmp_path / "token").read_text(), fingerprint(tmp_path)
    make_identity(tmp_path)
    assert ((tmp_path / "token").read_text(), fingerprint(tmp_path)) == before
    handle = lock_folder(tmp_path)
    with pytest.raises(ConfigError, match="another hub uses"):
        lock_folder(tmp_path)
    os.close(handle)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ConfigError, match=r"cannot lock this .*: No locks available"):
        lock_folder(tmp_path)


def test_a_pace_is_kept_to_one_percent():
    now = 0.0
    pace = RateLimit(1000.0, lambda: now)
    for _ in range(200):
        now += pace.delay(64)
    assert 200 * 64 / 1000.0 * 0.99 < now + 0.05 < 200 * 64 / 1000.0 * 1.01
