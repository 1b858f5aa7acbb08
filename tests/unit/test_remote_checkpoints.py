"""The copy of a run in object storage, with a folder in its place: sent whole, found, owned."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree

import pytest

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.errors import ConfigErrors, UserError
from isles.run import bucket
from isles.run.begin import begin_run
from isles.run.bucket import RunStore, TakenOver, bring_newer, take
from isles.run.checkpoints import checkpoint_name, list_checkpoints, verify_checkpoint
from isles.run.choose import Begun
from isles.run.objects import Folder, StoreError
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from isles.run.upload import Uploader
from tests.deadline import at_once, until
from tests.old_checkpoints import hash_files


def begin(run_file: Path, machine: Path, remote: Path, *more: str, resume: str = "auto") -> Begun:
    """What `isles train` does on a machine, whose disk is this folder."""
    places = (f"checkpoint.remote={remote}", f"output_dir={machine}")
    resolved = resolve(load_run_file(run_file, (*places, *more)), num_gpus=0)
    return begin_run(resolved, run_file.read_text(), resume)


def saved(run_dir: RunDir, step: int, words: str = "weights") -> None:
    """A whole checkpoint."""
    folder = run_dir.checkpoints / checkpoint_name(step)
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.distcp").write_text(f"{words} of step {step}, file {number}\n" * 99)
    manifest = {"version": 1, "step": step, "created_at": 1.0, "elapsed_s": 1.0}
    write_record(folder / "manifest.json", {**manifest, "files": hash_files(folder)})


def uploader(run_dir: RunDir, remote: Path) -> tuple[Uploader, list[str]]:
    notes: list[str] = []
    made = Uploader(RunStore(str(remote), run_dir.name), run_dir, keep=3, note=notes.append)
    made.take(notes.append, pause=lambda _: None)
    return made, notes


def sent(run_dir: RunDir, remote: Path, *steps: int) -> RunStore:
    """The copy of a run that has saved these steps, and has ended."""
    for step in steps:
        saved(run_dir, step)
    made, notes = uploader(run_dir, remote)
    assert notes == [], "who has ended is not waited for"
    made.start()
    assert made.finish(lambda _: None) == []
    return made.copy


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "a" / "tiny-1")


def test_a_fresh_machine_goes_on_with_what_the_bucket_has(run_file, tmp_path, remote):
    first = begin(run_file, tmp_path / "a", remote).run_dir
    first.metrics.write_text('{"step": 40}\n')
    first.join_line.write_text("isles://secret")
    copy = sent(first, remote, 20, 40, 60, 80)
    assert copy.steps() == [40, 60, 80], "as many as on the disk"
    assert not list(remote.rglob("join"))
    again = begin(run_file, tmp_path / "b", remote)
    assert again.resumed and again.run_dir.path == tmp_path / "b" / "tiny-1"
    assert f"which is not on this machine, from step 80 at {remote}/tiny-1" in again.note
    assert again.run_dir.metrics.read_bytes() == first.metrics.read_bytes()
    bring_newer(copy, again.run_dir, str, str, than=-1)
    (found,) = list_checkpoints(again.run_dir)
    assert found.step == 80 and verify_checkpoint(found.path) == []
    with pytest.raises(UserError, match=r"seed: 0 -> 3[\s\S]*--resume .*bucket/tiny-1"):
        begin(run_file, tmp_path / "c", remote, "seed=3")
    assert not (tmp_path / "c" / "tiny-1").exists()
    assert begin(run_file, tmp_path / "c", remote, resume="no").run_dir.name == "tiny-2"
    there = f"{remote}/tiny-1/checkpoints"
    named = begin(run_file, tmp_path / "d", remote, resume=f"{there}/step-00000060")
    assert named.resume_from == tmp_path / "d/tiny-1/checkpoints/step-00000060"
    with pytest.raises(UserError, match="checkpoint not found"):
        begin(run_file, tmp_path / "d", remote, resume=f"{there}/step-70")


def test_a_machine_that_was_overtaken_goes_on_where_the_other_ended(run_file, tmp_path, remote):
    first = begin(run_file, tmp_path / "a", remote).run_dir
    first.attempt(1).path.mkdir(parents=True)
    sent(first, remote, 20)
    second = begin(run_file, tmp_path / "b", remote).run_dir
    copy = sent(second, remote, 40)
    again = begin(run_file, tmp_path / "a", remote)
    assert "which this machine has up to step 20, from step 40" in again.note
    copy.store.write("summary.json", b"{}")
    over = begin(run_file, tmp_path / "a", remote)
    assert "tiny-1 is finished" in over.note and over.run_dir.name == "tiny-2"


def test_what_has_arrived_is_not_sent_again_after_a_kill(run_dir, remote, monkeypatch):
    saved(run_dir, 20)
    send, names = Folder.send, list[str]()

    def arrived():
        return (read_record(run_dir.remote) or {}).get("sent", {}).get("files", {})

    def cut(self, path, name, moved):
        names.append(path.name)
        if path.name == "2.distcp" and names.count(path.name) == 1:
            until(lambda: len(arrived()) == 2)
            raise StoreError("away", "503 Slow Down")
        return send(self, path, name, moved)

    monkeypatch.setattr(Folder, "send", cut)
    killed, _ = uploader(run_dir, remote)
    with pytest.raises(StoreError):
        killed._send_next()
    assert killed.copy.steps() == [], "no manifest, no checkpoint"
    assert sent(run_dir, remote).steps() == [20]
    assert sorted(names) == ["0.distcp", "1.distcp", "2.distcp", "2.distcp"]


def test_steps_that_are_done_again_and_broken_checkpoints_are_not_gone_on_with(run_dir, remote):
    copy = sent(run_dir, remote, 20, 40, 60)
    again, _ = uploader(run_dir, remote)
    for step in (40, 60):
        rmtree(run_dir.checkpoints / checkpoint_name(step))
    again.forget_after(20)
    bring_newer(copy, run_dir, str, str, than=20)
    assert [info.step for info in list_checkpoints(run_dir)] == [20], "also before they are deleted"
    saved(run_dir, 40, "other weights")
    again.start()
    assert again.finish(lambda _: None) == [] and copy.steps() == [20, 40]
    assert b"other" in (remote / "tiny-1/checkpoints/step-00000040/0.distcp").read_bytes()
    sent(run_dir, remote, 60)
    (remote / "tiny-1/checkpoints/step-00000060/1.distcp").write_text("x")
    (remote / "tiny-1/checkpoints/step-00000040/manifest.json").unlink()
    other, notes = RunDir(remote.parent / "b" / "tiny-1"), list[str]()
    bring_newer(copy, other, str, notes.append, than=-1)
    assert [info.step for info in list_checkpoints(other)] == [20]
    assert len(notes) == 1 and "step 60" in notes[0] and "1.distcp: 1 bytes" in notes[0]


def test_of_two_machines_one_is_refused_and_one_that_vanished_is_waited_for(remote):
    copy = RunStore(str(remote), "tiny-1")
    won: list[object] = []

    def start():
        try:
            won.append(take(copy, None, str, pause=lambda _: None))
        except UserError as error:
            assert "trains tiny-1 now" in error.what and "isles stop" in error.fix

    at_once(4, start)
    assert len(won) == 1
    there = {"host": "spot", "pid": 7, "started": 1.0, "boot": "other", "number": 7}

    def write(number, **more):
        copy.store.write(f"owner/{number:08d}", json.dumps({**there, **more}).encode())

    write(7, at=1.0)
    with pytest.raises(UserError, match="spot trains tiny-1 now"):
        take(copy, None, str, pause=lambda now: write(7, at=now))
    lines, waited = list[str](), list[float]()
    owner = take(copy, None, lines.append, pause=waited.append)
    assert sum(waited) == bucket.LOST_AFTER_S and "spot has written" in lines[0]
    assert owner.number == 8
    write(9, host="third")
    with pytest.raises(TakenOver, match="third"):
        owner.beat()
    write(9, released=True)
    waited.clear()
    assert take(copy, None, str, pause=waited.append).number == 10 and not waited
    assert take(copy, 10, str, pause=waited.append).number == 11, "a restart in the same directory"


def test_a_bucket_that_refuses_is_named_once_and_at_the_end(run_dir, remote, monkeypatch):
    made, notes = uploader(run_dir, remote)
    saved(run_dir, 20)

    def refuse(*_):
        raise StoreError("forbidden", "AccessDenied")

    monkeypatch.setattr(Folder, "send", refuse)
    monkeypatch.setattr("isles.run.upload._REFUSED_S", 0.0)
    made.start()
    until(lambda: notes)
    saved(run_dir, 40)
    made.look()
    (line,) = made.finish(lambda _: None)
    assert len(notes) == 1 and "refuses this machine: AccessDenied" in notes[0]
    assert "1 checkpoint on the disk to upload" in notes[0] and "Training continues" in notes[0]
    assert "not at" in line and "step 20, step 40" in line and "isles checkpoint push" in line
    made.close()


def test_a_place_that_holds_a_secret_or_is_none_is_refused(run_file):
    for url, why in (
        ("s3://key:hidden@bucket/runs", "contains a user, a key or a password"),
        ("bucket/runs", "neither a URL nor an absolute path"),
        ("s3://bucket/runs?X-Amz-Signature=1", "options after"),
    ):
        text = run_file.read_text().replace("checkpoint:\n", f"checkpoint:\n  remote: '{url}'\n")
        with pytest.raises(ConfigErrors, match=why) as error:
            load_run_file(run_file, text=text)
        assert "hidden" not in str(error.value)
