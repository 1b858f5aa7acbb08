"""The index of a checkpoint is read without running what it names."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from isles.checkpoint.load import SafeReader
from isles.checkpoint.save import disk_failure
from isles.errors import TrainingError
from tests.each import each


class Reduced:
    """Pickled, it is a call of a function, which a plain unpickler makes."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


def read_index(folder: Path, content: bytes) -> Metadata:
    (folder / ".metadata").write_bytes(content)
    return SafeReader(str(folder)).read_metadata()


def test_an_index_that_names_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    content = pickle.dumps(Reduced(os.mkdir, str(marker)))
    with pytest.raises(TrainingError, match="mkdir"):
        read_index(tmp_path, content)
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists(), "a plain unpickler would have run it"


def test_members_of_an_enum_are_read_as_every_python_writes_them(tmp_path: Path) -> None:
    # As Python 3.11.2 pickles a member.
    member = Reduced(getattr, _MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")
    metadata = read_index(tmp_path, pickle.dumps(Metadata({}, planner_data={"a": member})))
    assert metadata.planner_data == {"a": _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT}


@each("place", [(torch.Size, "mro"), (_MEM_FORMAT_ENCODING, "__class__")])
def test_nothing_else_is_reached_through_a_member(
    tmp_path: Path, place: tuple[object, str]
) -> None:
    with pytest.raises(TrainingError, match="no part of an index"):
        read_index(tmp_path, pickle.dumps(Reduced(getattr, *place)))


@each("content", [b"", b"\x80", b"not a pickle at all"])
def test_a_broken_index_is_an_error_with_its_place(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(TrainingError) as caught:
        read_index(tmp_path, content)
    assert ".metadata" in caught.value.where


def test_a_full_disk_is_named_before_what_torch_says_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    cut = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    what = disk_failure(cut, tmp_path, 0).what
    assert what.startswith("the disk is full, 4.0 KiB are free on this disk ([enforce fail")
    refused = OSError(errno.ENOSPC, "No space left on device")
    assert disk_failure(refused, tmp_path, 0).what.startswith("No space left on device; 4.0 KiB")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert disk_failure(cut, tmp_path, 0).what.startswith("[enforce fail")
