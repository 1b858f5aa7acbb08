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


class Evil:
    """Pickled, it makes a folder when it is read by a plain unpickler."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_an_index_that_names_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(TrainingError, match="mkdir"):
        SafeReader(str(tmp_path)).read_metadata()
    assert not marker.exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert marker.exists(), "a plain unpickler would have run it"


class Member:
    """A member of an enum as Python 3.11.2 pickles it."""

    def __init__(self, kind: object, name: str) -> None:
        self.kind = kind
        self.name = name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self.kind, self.name)


def test_members_of_an_enum_are_read_as_every_python_writes_them(tmp_path: Path) -> None:
    metadata = Metadata(
        {}, planner_data={"a": Member(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")}
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    found = SafeReader(str(tmp_path)).read_metadata().planner_data
    assert found == {"a": _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT}


@pytest.mark.parametrize(
    "member", [Member(torch.Size, "mro"), Member(_MEM_FORMAT_ENCODING, "__class__")]
)
def test_nothing_else_is_reached_through_a_member(tmp_path: Path, member: Member) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(member))
    with pytest.raises(TrainingError, match="no part of an index"):
        SafeReader(str(tmp_path)).read_metadata()


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle at all"])
def test_a_broken_index_is_an_error_with_its_place(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(TrainingError) as caught:
        SafeReader(str(tmp_path)).read_metadata()
    assert ".metadata" in caught.value.where


def test_a_full_disk_is_named_before_what_torch_says_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    cut = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    said = disk_failure(cut, tmp_path, 0).what
    assert said.startswith("the disk is full, 4.0 KiB are free on this disk ([enforce fail")
    refused = OSError(errno.ENOSPC, "No space left on device")
    assert disk_failure(refused, tmp_path, 0).what.startswith("No space left on device; 4.0 KiB")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert disk_failure(cut, tmp_path, 0).what.startswith("[enforce fail")
