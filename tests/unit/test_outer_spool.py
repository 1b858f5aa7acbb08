"""What a cluster keeps of its turns: the files in its spool."""

from __future__ import annotations

from pathlib import Path

from isles.outer.client.spool import Spool
from isles.outer.messages import RoundAnswer


def has(spool: Spool, version: int) -> int:
    spool.version = version
    return spool.has


def tidy(spool: Spool, version: int) -> None:
    spool.version = version
    spool.tidy()


def test_the_spool_keeps_what_may_be_asked_for(tmp_path: Path) -> None:
    spool = Spool(tmp_path, version=5, kept=2, since=5, most_bytes=0)
    for outer_step in range(6):
        spool.average(outer_step).touch()
        spool.contribution(outer_step).touch()
    spool.pulled.mkdir()
    (tmp_path / "average-00000001.partial").touch()
    spool.tidy()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "average-00000003",
        "average-00000004",
        "average-00000005",
        "contribution-00000005",
        "pulled",
    ]


def test_averages_that_a_checkpoint_lacks_stay_as_long_as_there_is_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, version=2, kept=1, since=2, most_bytes=30)
    for outer_step in (0, 1, 2, 3, 4, 5, 6, 7, 9):
        spool.average(outer_step).write_bytes(b"x" * 10)
    assert has(spool, 2) == 8 and has(spool, 8) == 8 and has(spool, 9) == 10
    tidy(spool, 6)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == list("2345679")
    assert has(spool, 2) == 8
    tidy(spool, 7)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == list("345679"), "30 bytes"
    assert has(spool, 2) == 2
    spool.since = 6
    tidy(spool, 7)
    assert [path.name[-1] for path in sorted(tmp_path.iterdir())] == list("679")


def test_a_new_host_is_given_the_last_turns_without_a_gap(tmp_path: Path) -> None:
    spool = Spool(tmp_path, version=3, kept=8, since=0, most_bytes=0)
    for outer_step in (0, 2, 3, 4):
        spool.average(outer_step).touch()
        spool.note_answer(
            RoundAnswer(outer_step=outer_step, state="committed", weights={"a": outer_step})
        )
    spool.note_outer_params(2, "f" * 64)
    kept = spool.kept_rounds()
    assert [(answer.outer_step, digest) for answer, digest, _ in kept] == [
        (2, "f" * 64),
        (3, ""),
        (4, ""),
    ]
    spool.version = 1
    assert spool.kept_rounds() == [(kept_of(0), "", spool.average(0))]
    spool.average(3).unlink()
    spool.version = 4
    assert spool.kept_rounds()[0][0].outer_step == 4


def kept_of(outer_step: int) -> RoundAnswer:
    return RoundAnswer(outer_step=outer_step, state="committed", weights={"a": outer_step})
