"""A user without a name or a home, as containers have who run as a bare number."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from isles.errors import UserError
from isles.run import env
from isles.run.env import (
    cache_home,
    datasets_cache,
    home,
    huggingface_access,
    huggingface_cache,
    settle_home,
    state_home,
)

NAMES = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "HF_HOME")
NAMES += ("XDG_STATE_HOME", "ISLES_SETTLED_HOME")


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No passwd entry, no variable; the folder for temporary files."""

    def unknown(_uid: int) -> Any:
        raise KeyError(_uid)

    for name in NAMES:
        monkeypatch.setenv(name, "")  # put back after the test, also if it is set in it
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_caches_are_below_tmpdir_and_it_is_said_once(nobody: Path) -> None:
    for folder in (huggingface_cache({}), datasets_cache({}), cache_home({}), state_home({})):
        assert folder.is_relative_to(nobody)
    assert huggingface_access({}).token == ""
    note = settle_home()
    assert str(nobody) in note and "no HOME" in note
    assert Path.home() == home() and stat.S_IMODE(home().stat().st_mode) == 0o700
    assert os.environ["USER"] == str(os.getuid())
    assert settle_home() == "", "a child has it already"
    assert Path("~/x").expanduser() == home() / "x"


@pytest.fixture
def closed(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that cannot be written to."""
    folder = nobody / "closed"
    folder.mkdir()
    monkeypatch.setattr(env.os, "access", lambda path, _mode: Path(path) not in (folder, Path("/")))
    return folder


def test_a_home_that_cannot_be_written_to(
    nobody: Path, closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/")  # docker run --user 54321
    assert "HOME is /" in settle_home() and Path(os.environ["HOME"]).parent == nobody
    monkeypatch.setenv("HOME", str(closed))
    assert "which is not writable" in settle_home()
    assert os.environ["HOME"] == str(closed), "it may have files to read"
    assert huggingface_cache(os.environ).is_relative_to(nobody / f"isles-home-{os.getuid()}")
    assert settle_home() == ""
    (closed / ".cache").mkdir()  # filled by somebody who may
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert settle_home() == "" and cache_home({"HOME": str(closed)}).is_relative_to(closed)


def test_caches_that_the_user_has_placed_are_not_said_to_be_elsewhere(
    nobody: Path, closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(nobody / "c"))
    monkeypatch.setenv("HF_HOME", str(nobody / "hf"))
    for given in (str(closed), ""):
        monkeypatch.setenv("HOME", given)
        assert settle_home() == ""
        assert os.environ["XDG_CACHE_HOME"] == str(nobody / "c")


def test_a_slash_at_the_end_of_home_changes_nothing(
    nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", f"{nobody}/")
    assert settle_home() == "" and "XDG_CACHE_HOME" not in os.environ


@pytest.mark.parametrize("caches", ["", "c"])
def test_a_process_and_its_children_make_one_folder(
    nobody: Path, closed: Path, monkeypatch: pytest.MonkeyPatch, caches: str
) -> None:
    taken = nobody / f"isles-home-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    monkeypatch.setenv("HOME", str(closed))
    if caches:
        monkeypatch.setenv("XDG_CACHE_HOME", str(nobody / caches))
    settle_home()
    for _ in range(3):
        assert settle_home() == ""
        state_home()
    (made,) = set(nobody.glob("isles-home-*")) - {taken}
    assert state_home().is_relative_to(made)


def test_a_tmpdir_that_cannot_be_used_gives_way_to_one_folder(
    nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(nobody / "nowhere"))
    for _ in range(2):
        assert home({"TMPDIR": str(nobody / "nowhere")}) == nobody / f"isles-home-{os.getuid()}"
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nonexistent"])
    with pytest.raises(UserError, match="cannot write to any folder for temporary"):
        home({"TMPDIR": str(nobody / "nowhere")})


def test_a_folder_of_another_user_is_not_taken(nobody: Path) -> None:
    taken = nobody / f"isles-home-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    assert home({}) != taken and home({}).stat().st_mode & 0o077 == 0
    taken.rmdir()
    taken.symlink_to(nobody)
    assert home({}) != taken


def test_no_command_shows_a_traceback(nobody: Path, monkeypatch: Any, capsys: Any) -> None:
    from isles.cli import main

    monkeypatch.chdir(nobody)
    Path("a.txt").write_text("some text\n" * 50)
    Path("run.yaml").write_text(
        "model: {name_or_path: llama-2m, init: scratch}\ntokenizer: {train_vocab_size: 300}\n"
        "data: {sources: [{path: a.txt}]}\ntraining: {max_steps: 2}\nclusters: [{device: cpu}]\n"
    )
    for words in ("config show run.yaml", "plan run.yaml", "report", "status", "data prune"):
        main(words.split())
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err and "bug in isles" not in shown.err
        assert ("note: this user has no HOME" in shown.err) == (words == "config show run.yaml")
