"""One end of the transfer of a folder of prepared tokens: whole or absent, verified by hash."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from isles.data.tokens.folders import publish, temporary_beside
from isles.data.tokens.store import TokenStore, find_fault
from isles.data.tokens.writer import disk_faults
from isles.dist.place import Place
from isles.errors import DataError, UserError
from isles.run.manifest import sync_folder

ByteArray = npt.NDArray[np.uint8]


class FolderCopy:
    """One rank's end of a transfer: reads, writes, or neither.

    A disk that fails does not break the exchange, or the others would only hear of a lost rank:
    the fault is kept, and told at the end.

    Args:
        files: names and sizes in bytes, in the order in which they are sent.
        folder: the name that the copy gets once it is whole, or what is sent.
        place: this rank's.
        sends, takes: which end this is.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, int]],
        folder: Path,
        place: Place,
        *,
        sends: bool,
        takes: bool,
    ) -> None:
        self._folder, self._place, self._sends, self._takes = folder, place, sends, takes
        self._temporary = temporary_beside(folder)
        self._bytes = sum(size for _, size in files)
        self._stream: tuple[str, io.FileIO] | None = None
        self._fault: UserError | None = None
        if takes:
            self._guard(lambda: self._make(files))

    def read(self, file: str, piece: ByteArray) -> None:
        """Fill a piece with what comes next in a file, at the sender."""
        if self._sends:
            self._guard(lambda: self._read(file, piece))

    def write(self, file: str, piece: ByteArray) -> None:
        """Append a piece to a file, at those that lack it."""
        if self._takes:
            self._guard(lambda: _write_all(self._open(file), piece))

    def finish(self, sender: str, progress: Callable[[str], None]) -> None:
        """Read back what was written, compare it with the hashes, and give it its name.

        It takes as long as a disk needs for all of it.

        Args:
            sender: where it came from, for messages.
            progress: told how far it is.

        Raises:
            DataError: it could not be read or written, or is not what was sent.
        """
        if self._takes:
            self._guard(lambda: self._verify(sender, progress))
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Close what is open; what has not got its name is removed."""
        with suppress(OSError):
            self._done_with_file()
        if self._takes:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _done_with_file(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream[1], None
            stream.close()

    def _make(self, files: Sequence[tuple[str, int]]) -> None:
        self._temporary.mkdir()
        for file, _ in files:  # a file without bytes has no pieces
            (self._temporary / file).touch()

    def _verify(self, sender: str, progress: Callable[[str], None]) -> None:
        self._done_with_file()
        for path in self._temporary.iterdir():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        fault = find_fault(self._temporary)
        if fault is None:
            try:
                TokenStore.open(self._temporary).verify(progress)
            except DataError as error:
                fault = error.what
        if fault is not None:
            raise DataError(
                f"the tokens that came from {sender} are not what was prepared there: {fault}",
                where=f"{self._place}: {self._folder}",
                fix=f"remove {self._folder.name} from the cache folder of {sender}: it is prepared "
                "anew at the next start",
            )
        sync_folder(self._temporary)
        publish(self._temporary, self._folder)

    def _read(self, file: str, piece: ByteArray) -> None:
        view = piece.data
        while view:
            count = self._open(file).readinto(view)
            if not count:
                raise DataError(
                    f"{file} has become shorter while it was sent",
                    where=str(self._folder),
                    fix="start again when nothing writes to the cache folder",
                )
            view = view[count:]

    def _open(self, file: str) -> io.FileIO:
        if self._stream is None or self._stream[0] != file:
            self._done_with_file()
            folder = self._folder if self._sends else self._temporary
            stream = io.FileIO(folder / file, "rb" if self._sends else "wb")
            self._stream = file, stream
        return self._stream[1]

    def _guard(self, action: Callable[[], None]) -> None:
        if self._fault is not None:
            return
        try:
            with disk_faults(self._folder.parent, lambda: self._bytes):
                action()
        except UserError as error:
            self._fault = error
        except OSError as error:
            self._fault = DataError(f"{error.strerror or error}", where=str(self._folder), fix="")


def _write_all(stream: io.FileIO, piece: ByteArray) -> None:
    view = piece.data
    while view:  # a disk that is nearly full takes a part
        view = view[stream.write(view) :]
