"""Law 3 after a power cut: bytes are on the disk before the name that says that they are whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from isles.checkpoint.save import seal
from isles.run.records import write_record

_fsync, _replace = os.fsync, Path.replace


class Disk:
    """Remembers which files were forced to the disk, and what was when a file got its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.safe: set[int] = set()
        self.unsafe: list[str] = []
        monkeypatch.setattr(os, "fsync", self._fsync)

        def replace(path: Path, target: Path) -> Path:
            files = [path, *path.rglob("*")]
            self.unsafe += [file.name for file in files if file.stat().st_ino not in self.safe]
            return _replace(path, target)

        monkeypatch.setattr(Path, "replace", replace)

    def _fsync(self, handle: int) -> None:
        self.safe.add(os.fstat(handle).st_ino)
        _fsync(handle)


def test_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    write_record(tmp_path / "a.json", {"step": 1})
    assert disk.unsafe == []
    write_record(tmp_path / "b.json", {"step": 1}, durable=False)
    assert len(disk.unsafe) == 1


def test_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, final = tmp_path / ".partial-step-00000001", tmp_path / "step-00000001"
    partial.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (partial / name).write_bytes(b"weights")
    disk = Disk(monkeypatch)
    seal(partial, final, {"version": 1, "step": 1})
    assert disk.unsafe == []
    assert tmp_path.stat().st_ino in disk.safe  # the entry of the name itself
    assert (final / "manifest.json").exists()
