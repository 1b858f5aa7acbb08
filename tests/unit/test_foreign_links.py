"""Links that somebody else has made: none leads isles to a private file."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path

import pytest

from isles.config.files import named_files
from isles.config.foreign import check_folder
from isles.config.load import load_run_file
from isles.config.sections.data import SourceConfig
from isles.data.chat.template import _read_template
from isles.data.sources.find import open_source
from isles.data.sources.parse import make_parser
from isles.data.tokens.store import DOCUMENTS, FORMAT, TokenStore
from isles.errors import UserError
from isles.run.prepared import MANIFEST, TOKENS

OTHER = 12345


def texts(path: Path | str) -> str:
    source = SourceConfig(path=str(path))
    return str(list(open_source(source).rows(make_parser(source))))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of two users")
def test_a_link_of_another_user_leads_no_file_of_mine_into_the_data(tmp_path):
    secret, team = tmp_path / "netrc", tmp_path / "team"
    secret.write_text("my-password: x\n")
    secret.chmod(0o644)
    team.mkdir()
    (team / "inner").symlink_to(secret)
    (tmp_path / "mine.txt").symlink_to(team / "inner")
    (team / "zz.txt").symlink_to(secret)
    (team / "folder").symlink_to(tmp_path)
    mine = (tmp_path / "mine.txt", team / "*.txt", team / "folder" / "netrc")
    assert all("my-password" in texts(path) for path in mine), "own links"
    for name in ("inner", "zz.txt", "folder"):
        os.lchown(team / name, OTHER, OTHER)
    for path in mine:
        with pytest.raises(UserError, match="another user"):
            texts(path)
    for read in (_read_template, load_run_file):
        with pytest.raises(UserError, match="another user"):
            read(team / "zz.txt")
    os.chown(secret, OTHER, OTHER)
    assert all("my-password" in texts(path) for path in mine), "their own file"


def test_files_of_the_kernel_are_no_data(tmp_path):
    (tmp_path / "zz.txt").symlink_to("/proc/self/environ")
    for path in (tmp_path / "*.txt", tmp_path / "zz.txt"):
        with pytest.raises(UserError, match=r"of the kernel|private file"):
            texts(path)


def test_a_link_in_a_folder_leads_to_no_private_file_outside(tmp_path):
    secret, data = tmp_path / "private.json", tmp_path / "data"
    secret.write_text('{"a": "my-password"}')
    secret.chmod(0o600)
    data.mkdir()
    (data / "x.json").symlink_to(secret)
    with pytest.raises(UserError, match="private file") as caught:
        texts(data / "*.json")
    assert str(secret.parent) in caught.value.fix
    with pytest.raises(UserError, match="private file"):
        check_folder(data)
    assert "my-password" in texts(data / "x.json"), "typed"
    secret.chmod(0o644)
    assert "my-password" in texts(data / "*.json")
    check_folder(data)
    cache = tmp_path / "datasets--a--b" / "snapshots" / "c"
    cache.mkdir(parents=True)
    (cache / "x.json").symlink_to("../../blob")
    (cache / "../../blob").write_text('{"a": "of the hub"}')
    (cache / "../../blob").chmod(0o600)
    assert "of the hub" in texts(cache / "*.json")


def test_folder_links_in_a_circle_end(tmp_path):
    for name in ("b.txt", "x/c.txt", "x/y/x/d.txt", ".hidden/e.txt", "x/.f.txt", "[z]/g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    patterns = ("**/*.txt", "**", "x/**/d.txt", "*/**/*.txt", "**/x/**/*.txt", "**/.*", "**/**/*")
    names = [f"{tmp_path}/{pattern}" for pattern in patterns]
    before = {name: named_files(name) for name in names}
    for name in names:
        found = sorted(set(glob.glob(name, recursive=True)))  # noqa: PTH207
        assert before[name] == [Path(file) for file in found if Path(file).is_file()], name
    for name in ("a", "b", "x/c"):
        (tmp_path / name).symlink_to(tmp_path)
    assert named_files(names[0]) == before[names[0]]
    assert len(named_files(names[4])) < 100


def test_an_odd_manifest_of_prepared_tokens_ends_in_words(tmp_path):
    wrong = []
    for number, manifest in enumerate(({}, {"files": []}, {"files": {TOKENS: {}, DOCUMENTS: 1}})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **manifest}))
        try:
            TokenStore.open(folder)
        except UserError:
            continue
        wrong.append(manifest)
    assert not wrong
