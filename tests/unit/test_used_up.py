"""Limits that are used up and state that is damaged: the error names the true cause and its fix."""

from __future__ import annotations

import errno
import gzip
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isles.checkpoint.tensors import disk_failure
from isles.config.scratch import scratch_folder
from isles.config.sections.model import ModelConfig
from isles.data.sources.files import opened_whole
from isles.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from isles.errors import ConfigError, UserError
from isles.models.build import load_model_config
from isles.outer.hub.core import HubCore
from isles.outer.hub.journal import JOURNAL, Journal
from isles.outer.hub.rules import Settings
from isles.outer.hub.server import make_identity
from isles.run.manifest import MANIFEST
from isles.run.records import explain_write_errors
from tests.deadline import run_program
from tests.disks import small_disk
from tests.unit.test_models import make_base


def test_a_disk_without_inodes_is_not_a_full_disk(tmp_path: Path):
    disk = tmp_path / "disk"
    refused = pytest.raises(UserError)
    with small_disk(disk, "4m,nr_inodes=4"), refused as caught, explain_write_errors(disk):
        for number in range(9):
            (disk / str(number)).write_text("")
    assert "no inodes left" in caught.value.what
    assert "df -i" in caught.value.fix and "free some" not in caught.value.fix


def test_temporary_files_without_room_name_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And not the tokenizer, the model or the file that was to be copied or unpacked."""
    base = make_base(tmp_path / "base")
    train_tokenizer(["a few words"] * 9, 300).save_pretrained(base)
    base.chmod(0o777)  # others can write to it: isles reads a copy
    rows = tmp_path / "rows.parquet.gz"
    rows.write_bytes(gzip.compress(os.urandom(1 << 16)))

    def unpack() -> None:
        with opened_whole(rows):
            pass

    def save() -> None:
        with scratch_folder("a-") as folder:
            save_file({"a": torch.zeros(1 << 16)}, folder / "a")

    disk = tmp_path / "disk"
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    ways = (
        lambda: load_tokenizer(str(base), trust_remote_code=False),
        lambda: load_model_config(ModelConfig(name_or_path=str(base))),
        unpack,
        save,
    )
    with small_disk(disk, "16k"):
        (disk / "full").write_bytes(bytes(16 << 10))
        for way in ways:
            with pytest.raises(UserError) as caught:
                way()
            assert caught.value.where == "TMPDIR" and "set TMPDIR" in caught.value.fix
            assert f"no space left for temporary files in {disk}" in caught.value.what
    with pytest.raises(OSError), scratch_folder("a-"):
        raise OSError(errno.ENOSPC, "full", "/another/disk")


def test_a_machine_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nonexistent"])
    with (
        pytest.raises(UserError, match="cannot write to any folder for temporary"),
        scratch_folder("a-"),
    ):
        pass


def test_a_last_checkpoint_is_named_only_if_it_exists(tmp_path: Path):
    partial = tmp_path / "checkpoints" / ".partial-step-2"
    partial.mkdir(parents=True)
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "starts at step 0" in disk_failure(error, partial, 0).fix
    whole = partial.with_name("step-00000001")
    whole.mkdir()
    (whole / MANIFEST).write_text("{}")
    assert "which is unchanged" in disk_failure(error, partial, 0).fix


def test_a_hub_that_has_lost_its_memory_says_so(tmp_path: Path):
    HubCore(tmp_path, Settings(), lambda: 0.0)
    average = tmp_path / "rounds" / "00000003" / "average"
    average.parent.mkdir(parents=True)
    average.write_bytes(b"x")
    with pytest.raises(ConfigError, match="memory is damaged") as caught:
        HubCore(tmp_path, Settings(), lambda: 0.0)
    assert str(tmp_path) in caught.value.where and caught.value.fix


def test_a_journal_that_another_program_holds_is_not_a_full_disk(tmp_path: Path):
    other = Journal(tmp_path / JOURNAL)
    other.run("PRAGMA locking_mode=EXCLUSIVE")
    other.run("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(UserError, match="locked") as caught:
            Journal(tmp_path / JOURNAL)
        assert "end the program" in caught.value.fix
    finally:
        other.close()


def test_a_broken_certificate_is_named(tmp_path: Path):
    make_identity(tmp_path)
    (tmp_path / "certificate.pem").write_text("-----BEGIN CERTIFICATE-----\nno\n")
    done = run_program([sys.executable, "-m", "isles.outer.hub", tmp_path, "--run", "test"])
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "certificate.pem: cannot use the hub's certificate" in done.stderr
    assert "key.pem" in done.stderr.partition("fix: ")[2]
