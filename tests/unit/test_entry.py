"""Entries that another user has put into an output folder: isles writes nowhere through them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.errors import UserError
from isles.launch.hub import end_hub, open_hub
from isles.launch.ssh.node import make_place
from isles.outer.hub.server import lock_folder, make_identity
from isles.run.begin import begin_run
from isles.run.claim import claimed
from isles.run.entry import make_own_folder, open_own_file, require_own
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import RunDir
from isles.run.remote import (
    RemoteRun,
    forget_remote,
    keep_report,
    last_report,
    list_remotes,
    write_remote,
)
from tests.deadline import at_once
from tests.each import each
from tests.unit.test_remote_checkpoints import begin, sent

USER = 65534  # nobody, on every Debian
FLEET = Fleet("ssh", (FleetNode(0, "a1", "a1", "10.0.0.1", 1),), 29500, 1, "cpu", 10.0, "digest")
FAR = RemoteRun("far-1", "me@h", "/x", (), "python3", "ssh", ("me@h",), 1.0)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder of this user, with one file; another user knows its name."""
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "private" / "thesis.txt").write_text("ten years of work")
    return tmp_path / "private"


def is_as_it_was(private: Path) -> bool:
    (thesis,) = private.iterdir()
    return thesis.read_text() == "ten years of work"


def link(path: Path, target: Path, give: Callable[..., None]) -> Path:
    """A link of another user."""
    path.symlink_to(target)
    give(path)
    return path


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(UserError, match=r"isles does not write into .* of games") as caught:
        yield
    assert caught.value.id == "run.foreign" and "output_dir" in caught.value.fix


def test_an_entry_is_taken_only_from_its_own_user(tmp_path: Path, give, private) -> None:
    folder, file = tmp_path / "theirs", tmp_path / "file"
    folder.mkdir()
    file.write_text("")
    give(folder, file)
    away = tmp_path / "away"
    away.mkdir()
    (tmp_path / "moved").symlink_to(away)
    assert make_own_folder(tmp_path / "new") and not make_own_folder(tmp_path / "new")
    assert not make_own_folder(tmp_path / "moved"), "a run that its user has moved"
    require_own(tmp_path / "nothing")
    (tmp_path / "through").symlink_to(folder)
    for path in (folder, link(tmp_path / "link", private, give), tmp_path / "through"):
        with refused():
            make_own_folder(path)
    os.link(private / "thesis.txt", tmp_path / "second")
    os.mkfifo(tmp_path / "pipe")
    give(tmp_path / "pipe")
    for path in (file, link(tmp_path / "to", private / "thesis.txt", give), tmp_path / "pipe"):
        with refused():
            open_own_file(path, os.O_WRONLY | os.O_CREAT)
    with pytest.raises(UserError, match="a file with several names"):
        open_own_file(tmp_path / "second", os.O_WRONLY | os.O_CREAT)
    with open_own_file(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND) as stream:
        stream.write(b"a line\n")
    assert (tmp_path / "log").read_text() == "a line\n" and is_as_it_was(private)


def open_tiny(state: Path) -> None:
    open_hub(state, run="tiny", settings={}, listen="127.0.0.1:0")


def test_a_hub_writes_into_no_folder_of_another_user(tmp_path: Path, give, private) -> None:
    """Also where the other user makes it after isles has chosen the name, and before the hub."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "token").write_text("A" * 43)
    link(theirs / "hub.log", private / "thesis.txt", give)
    give(theirs, theirs / "token")
    states = theirs, link(tmp_path / "a-hub-1", private, give), link(tmp_path / "b", theirs, give)
    for state in states:
        try:
            with refused():
                open_tiny(state)
            with refused():
                lock_folder(state)
        finally:
            end_hub(state)  # where the start was not refused
    assert is_as_it_was(private)
    assert {path.name for path in theirs.iterdir()} == {"token", "hub.log"}


@each("token", "key.pem", "certificate.pem")
def test_a_hub_takes_no_secret_that_another_user_knows(name, *, tmp_path, give, private):
    file = tmp_path / name
    file.write_text("A" * 43)
    give(file)
    with refused():
        make_identity(tmp_path)
    file.unlink()
    link(file, private / "thesis.txt", give)
    with refused():
        make_identity(tmp_path)


def test_a_hub_in_a_folder_that_its_user_has_moved(tmp_path: Path, give, private) -> None:
    (tmp_path / "away").mkdir(mode=0o700)
    state = tmp_path / "tiny-hub-1"
    state.symlink_to(tmp_path / "away")
    try:
        open_tiny(state)
        assert (tmp_path / "away" / "token").exists()
    finally:
        assert end_hub(state)
    (state / "hub.log").unlink()
    link(state / "hub.log", private / "thesis.txt", give)
    try:
        with refused():
            open_tiny(state)
    finally:
        end_hub(state)
    assert is_as_it_was(private)


@each("link", "folder")
def test_a_run_from_a_bucket_goes_into_no_folder_of_another_user(kind, *, run_file, tmp_path, give):
    remote, private = tmp_path / "bucket", tmp_path / "private"
    private.mkdir()
    (private / "thesis.txt").write_text("ten years of work")
    sent(begin(run_file, tmp_path / "a", remote).run_dir, remote, 20)
    theirs = tmp_path / "b" / "tiny-1"
    theirs.parent.mkdir()
    if kind == "link":
        link(theirs, private, give)
    else:
        theirs.mkdir(mode=0o777)
        give(theirs)
    for resume in ("auto", f"{remote}/tiny-1"):
        with refused():
            begin(run_file, tmp_path / "b", remote, resume=resume)
    assert is_as_it_was(private) and (kind == "link" or not list(theirs.iterdir()))
    assert begin(run_file, tmp_path / "b", remote, resume="no").run_dir.name == "tiny-2"


def place(path: Path, begun_at: float = 1.0) -> bool:
    args = {"fleet": FLEET.record(), "resolved": "a: 1\n", "text": "b: 2\n", "token": "t"}
    run_dir = RunDir(path)
    return make_place(run_dir, run_dir.attempt(1), {**args, "born_at": 1.0, "begun_at": begun_at})


def test_a_node_writes_through_no_link_of_another_user(tmp_path: Path, give, private) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    # Links that stop nobody, since each user has locks and a place for old runs.
    for name in (".far-1.lock", ".old"):
        link(runs / name, private / "thesis.txt", give)
    assert not place(runs / "far-1") and not place(runs / "far-1", begun_at=2.0)
    link(runs / f".far-2.{os.geteuid()}.lock", private / "thesis.txt", give)
    link(runs / "far-3", private, give)
    for name in ("far-2", "far-3"):
        with refused():
            place(runs / name)
    # A folder with records that look like those of this start.
    whole = tmp_path / "theirs"
    assert not place(whole)
    give(whole)
    with refused():
        place(whole)
    assert is_as_it_was(private)


@each("link", "folder")
def test_a_remote_run_is_remembered_beside_another_users_records(kind, *, tmp_path, give):
    private, runs = tmp_path / "private", tmp_path / "runs"
    for folder in (private, runs):
        folder.mkdir()
    (private / "thesis.txt").write_text("ten years of work")
    if kind == "link":
        link(runs / ".remote", private, give)
    else:
        write_remote(runs, FAR)
        give(runs / ".remote", *(runs / ".remote").iterdir())
        assert [run.owner for run in list_remotes(runs)] == ["games"]
    write_remote(runs, FAR)
    assert [(run.name, run.owner) for run in list_remotes(runs)] == [("far-1", "")]
    keep_report(runs, FAR, {"step": 7})
    assert (last_report(runs, FAR) or (0, {}))[1] == {"step": 7}
    forget_remote(runs, FAR)
    assert not [run for run in list_remotes(runs) if not run.owner]
    assert last_report(runs, FAR) is None and is_as_it_was(private)
    own = runs / f".remote.{os.geteuid()}"
    (own / "last").rmdir()
    link(own / "last", private, give)
    keep_report(runs, FAR, {"step": 7})
    assert is_as_it_was(private)
    (own / "last").unlink()
    own.rmdir()
    link(own, private, give)
    with refused():
        write_remote(runs, FAR)
    assert is_as_it_was(private)


def test_a_claim_of_another_user_ends_no_claim_of_mine(give) -> None:
    """In a folder with the sticky bit, where nobody can replace the claim of another."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # not closed, as /tmp of tests is
        folder, user = Path(name), os.geteuid()
        folder.chmod(0o1777)
        theirs = [folder / entry for entry in (".tiny.claim", f".late.{USER}.claim")]
        for path in theirs:
            path.mkdir(mode=0o700)
        give(*theirs)
        inside, most = list[int](), list[int]()

        def start() -> None:
            with claimed(folder, "tiny"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

        os.seteuid(USER)
        try:
            with claimed(folder, "tiny"):
                assert (folder / f".tiny.{USER}.claim").is_dir()
            at_once(4, start)
            with refused():
                claimed(folder, "late").__enter__()
        finally:
            os.seteuid(user)
        assert len(most) == 4 and max(most) == 1
        assert sorted(folder.iterdir()) == sorted(theirs)


def test_two_users_share_a_folder_of_another_one(run_file: Path, give) -> None:
    """An administrator's folder for all, typed by the name of a link."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder, user = Path(name) / "runs", os.geteuid()
        folder.mkdir()
        folder.chmod(0o777)
        give(folder)
        (Path(name) / "typed").symlink_to(folder)
        Path(name).chmod(0o755)
        resolved = resolve(load_run_file(run_file, [f"output_dir={name}/typed"]), num_gpus=0)
        text, begun = run_file.read_text(), list[str]()
        for uid in (user, USER, user, USER):
            os.seteuid(uid)
            try:
                with claimed(Path(name) / "typed", "tiny"):
                    begun.append(begin_run(resolved, text, "no").run_dir.name)
            finally:
                os.seteuid(user)
        assert begun == ["tiny-1", "tiny-2", "tiny-3", "tiny-4"]
