"""The index of a checkpoint is read without running what it names."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from isles.checkpoint.store import SafeReader
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


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle at all"])
def test_a_broken_index_is_an_error_with_its_place(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(TrainingError) as caught:
        SafeReader(str(tmp_path)).read_metadata()
    assert ".metadata" in caught.value.where
