"""What a cluster keeps of its turns: the files in its spool."""

from __future__ import annotations

from pathlib import Path

from isles.outer.client.spool import Spool
from isles.outer.messages import RoundAnswer


def averages(spool: Spool) -> str:
    """The last digits of the averages that are there."""
    return "".join(sorted(path.name[-1] for path in spool.folder.glob("average-????????")))


def test_the_spool_keeps_what_may_be_asked_for(tmp_path: Path) -> None:
    spool = Spool(tmp_path, version=5, kept=2, since=5, most_bytes=0)
    for outer_step in range(6):
        spool.average(outer_step).touch()
        spool.contribution(outer_step).touch()
    spool.pulled.mkdir()
    (tmp_path / "average-00000001.partial").touch()
    spool.tidy()
    assert averages(spool) == "345"
    others = {path.name for path in tmp_path.iterdir() if not path.name.startswith("average-")}
    assert others == {"contribution-00000005", "pulled"}
    assert not list(tmp_path.glob("*.partial"))


def test_averages_that_a_checkpoint_lacks_stay_as_long_as_there_is_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, version=2, kept=1, since=2, most_bytes=30)
    for outer_step in (0, 1, 2, 3, 4, 5, 6, 7, 9):
        spool.average(outer_step).write_bytes(b"x" * 10)
    assert spool.has == 8, "one is missing"
    spool.version = 6
    spool.tidy()
    assert averages(spool) == "2345679"
    spool.version = 7
    spool.tidy()
    assert averages(spool) == "345679", "30 bytes"
    spool.since = 6
    spool.tidy()
    assert averages(spool) == "679"
    spool.version = 2
    assert spool.has == 2


def test_a_new_host_is_given_the_last_turns_without_a_gap(tmp_path: Path) -> None:
    spool = Spool(tmp_path, version=3, kept=8, since=0, most_bytes=0)
    answers = [RoundAnswer(outer_step=t, state="committed", weights={"a": t}) for t in range(5)]
    for outer_step in (0, 2, 3, 4):
        spool.average(outer_step).touch()
        spool.note_answer(answers[outer_step])
    spool.note_outer_params(2, "f" * 64)
    found = [(answer.outer_step, digest) for answer, digest, _ in spool.kept_rounds()]
    assert found == [(2, "f" * 64), (3, ""), (4, "")]
    spool.version = 1
    assert spool.kept_rounds() == [(answers[0], "", spool.average(0))]
    spool.average(3).unlink()
    spool.version = 4
    assert spool.kept_rounds()[0][0].outer_step == 4
