"""Data files that a run file names, opened: each must be a regular file, and hold no secret."""

from __future__ import annotations

import gzip
import io
import os
import re
import shlex
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from isles.config.endings import PACKED, ending_of
from isles.config.foreign import open_foreign
from isles.config.links import LinkRefused
from isles.config.scratch import naming_scratch
from isles.errors import DataError

_OWN_SECRETS = ("join", "token", "key.pem", "certificate.pem", "settings.json", "port")
"""Files that isles writes with mode 0600."""
_MAGIC = {
    "gzip": rb"\x1f\x8b",
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",  # a block, or the end of an empty file
    "xz": rb"\xfd7zXZ\0",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # a frame, or one that is skipped
}
_LONGEST_MAGIC = 10
_BOM = b"\xef\xbb\xbf"
_BINARY = {
    rb"PAR1.{0,64}[\0-\x08]": "a Parquet file",
    rb"ARROW1\0": "an Arrow file",
    rb"PK\x03\x04": "a ZIP archive (as .zip, .xlsx and .docx are)",
    rb"%PDF-": "a PDF document",
    rb"SQLite format 3\0": "a database of SQLite",
    rb"\x89HDF\r\n": "an HDF5 file",
    rb"\x93NUMPY": "a file of NumPy",
    rb"\x80[\x02-\x05]": "a pickle of Python",
    rb"Obj\x01": "an Avro file",
    rb"7z\xbc\xaf|Rar!\x1a": "an archive",
    rb"(?s:.{257})ustar": "a tar archive",
    rb"\x04\x22\x4d\x18": "a file packed with lz4",
}
_HEAD_BYTES = 4096
_BLOCK_BYTES = 2**18
_XZ_MEMORY_BYTES = 2**28

ROW_BYTES = 64 * 2**20
"""Largest size in bytes of a line, or of a row of CSV, a JSON array or a table."""

ROW_LINES = 2**20
"""Limit for the lines of a row of CSV."""

UNPACKED_BYTES = 2**30
"""Largest unpacked size in bytes of a packed Parquet or Arrow file, in a temporary file."""
_SECRET = re.compile(rb"\s*(?:isles://[^\s#]{1,300}#|-----BEGIN [A-Z ]*PRIVATE KEY)")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file to read from its beginning, unpacked if it is packed; DataError if it cannot be
    read."""
    with opened_raw(path) as raw, _damages(path, packing := packing_of(path, raw)):
        yield _unpacked(raw, packing) if packing else raw


@contextmanager
def opened_raw(path: Path) -> Iterator[io.BufferedReader]:
    """A file to read, as it is; DataError if it cannot be read."""
    try:
        with open_foreign(path)[0] as raw:
            _check_is_no_secret(path, raw)
            yield raw
    except io.UnsupportedOperation as error:
        raise DataError(
            str(error),
            where=str(path),
            fix="use a file: isles does not read a pipe, a socket or a device",
            id="files.data",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


@contextmanager
def opened_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to read from any place, such as a Parquet file; unpacked into a temporary file.

    Pass it to a library instead of the path, because another user may replace the path by a link.
    DataError: it cannot be read, or unpacks to more than `UNPACKED_BYTES`.
    """
    with opened_raw(path) as raw:
        packing = packing_of(path, raw)
        if not packing:
            yield raw
            return
        with naming_scratch():
            made = tempfile.TemporaryFile()  # noqa: SIM115  # closed below
        with made as file:
            with _damages(path, packing):
                stream = _unpacked(raw, packing)
                while block := stream.read(_BLOCK_BYTES):
                    if file.tell() + len(block) > UNPACKED_BYTES:
                        raise DataError(
                            f"it unpacks to more than {UNPACKED_BYTES >> 20} MiB",
                            where=str(path),
                            fix="unpack it first: isles reads Parquet and Arrow files out of order",
                            id="data.rows",
                        )
                    with naming_scratch():
                        file.write(block)
            file.seek(0)
            yield file


def packing_of(path: Path, raw: io.BufferedReader) -> str:
    """How a file is packed, by its first bytes: "gzip" or such; "": it is not.

    DataError: its name says that it is packed, and it is not.
    """
    head = raw.peek(_LONGEST_MAGIC)
    for packing, magic in _MAGIC.items():
        if re.match(magic, head):
            return packing
    if head and (named := ending_of(path.name).packing):
        program = PACKED[named]
        raise DataError(
            f"its name ends with {named}, but it is not packed with {program}",
            where=str(path),
            fix=f"remove {named} from its name if it was unpacked, as some browsers do, or "
            f"download "
            f"it again; {program} -t {shlex.quote(str(path))} tests it",
            id="data.damaged",
        )
    return ""


def skip(stream: IO[bytes], num_bytes: int) -> None:
    """Pass over the first bytes of a stream that `opened` gave."""
    if stream.seekable():
        stream.seek(num_bytes)
        return
    while num_bytes > 0 and (block := stream.read(min(num_bytes, _BLOCK_BYTES))):
        num_bytes -= len(block)


def _unpacked(raw: io.BufferedReader, packing: str) -> IO[bytes]:
    match packing:
        case "gzip":
            return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
        case "zstd":
            import pyarrow as pa

            stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
            return io.BufferedReader(stream, _BLOCK_BYTES)
        case "bzip2":
            import bz2

            return io.BufferedReader(_Unpacked(raw, bz2.BZ2Decompressor), _BLOCK_BYTES)
        case _:
            import lzma

            make = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, _XZ_MEMORY_BYTES)
            return io.BufferedReader(_Unpacked(raw, make), _BLOCK_BYTES)


class _Unpacked(io.RawIOBase):
    # What bzip2 or xz has packed, in one stream or several. Not by lzma.open, which takes as much
    # memory as the file asks for.
    def __init__(self, raw: io.BufferedReader, make: Callable[[], Any]) -> None:
        self._raw, self._make = raw, make
        self._codec: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data, rest = b"", b""
        while not data:
            if self._codec is None or self._codec.eof:
                rest = getattr(self._codec, "unused_data", b"").lstrip(b"\0")
                rest = rest or self._raw.read(_BLOCK_BYTES).lstrip(b"\0")
                if not rest:
                    return 0
                self._codec = self._make()
            elif self._codec.needs_input:
                rest = self._raw.read(_BLOCK_BYTES)
                if not rest:
                    raise EOFError("it ends before its end was marked")
            try:
                data = self._codec.decompress(rest, len(buffer))
            except Exception as error:  # lzma has a class of its own, and not each Python has lzma
                raise EOFError(str(error)) from error
            rest = b""
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _damages(path: Path, packing: str) -> Iterator[None]:
    # The errors of the libraries that unpack: some of them are an OSError without a number.
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        is_ours = isinstance(error, io.UnsupportedOperation) or not packing
        if is_ours or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise DataError(
            f"the {packing} file is damaged: {error}",
            where=str(path),
            fix=f"download it again; {packing} -t {shlex.quote(str(path))} tests it",
            id="data.damaged",
        ) from error


def _check_is_no_secret(path: Path, raw: io.BufferedReader) -> None:
    # The run file of a stranger may name any file here, such as the join line of another run.
    own = path.name in _OWN_SECRETS and not os.fstat(raw.fileno()).st_mode & 0o077
    if own or _SECRET.match(raw.peek(512)[:512]):
        raise DataError(
            "it contains a key, a token or a join line, which is not data",
            where=str(path),
            fix="use only data files in data.sources.N.path",
            id="files.data",
        )


def decode(block: bytes, path: Path, offset: int, line: int) -> str:
    """A block of a file, from this byte and line (from 1) on, as text; DataError if not UTF-8."""
    if offset == 0:
        _check_is_text(block, path)
        block = block.removeprefix(_BOM)
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        fix = "convert it: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW (if it is WINDOWS-1252)"
        if error.reason == "unexpected end of data":
            fix = "the file ends in the middle of a character: download or write it again"
        line += block.count(b"\n", 0, error.start)
        raise DataError(
            f"not UTF-8: byte 0x{block[error.start]:02x} at offset {offset + error.start}",
            where=f"{path}:{line}",
            fix=fix,
        ) from error


def _check_is_text(block: bytes, path: Path) -> None:
    # The beginning of a file that is to be text.
    for bom, encoding in ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")):
        if block.startswith(bom):
            raise _other_encoding(encoding, path)
    for magic, kind in _BINARY.items():
        if re.match(magic, block):
            raise DataError(
                f"this is {kind}, not text",
                where=str(path),
                fix="if isles reads this format (docs/data.md), give the file its ending; else "
                "unpack it, or write its rows as JSON lines, or its text as .txt",
            )
    head = block[:_HEAD_BYTES]
    if head.count(0) * 10 > len(head):
        odd, even = head[1::2].count(0), head[::2].count(0)
        if max(odd, even) * 4 > len(head) and min(odd, even) * 40 < len(head):
            raise _other_encoding("UTF-16LE" if odd > even else "UTF-16BE", path)
        raise DataError(
            "this is not text: many of its first bytes are 0",
            where=str(path),
            fix="use only files of text or of rows in data.sources",
        )


def _other_encoding(encoding: str, path: Path) -> DataError:
    return DataError(
        f"not UTF-8 but {encoding}",
        where=f"{path}:1",
        fix=f"convert it: iconv -f {encoding} -t UTF-8 FILE > NEW",
    )


def too_large(what: str, where: str) -> DataError:
    """The error for a line or a row that is too large."""
    lines = f" or {ROW_LINES:,} lines" if what == "row" else ""
    return DataError(
        f"a {what} of more than {ROW_BYTES >> 20} MiB{lines}",
        where=where,
        fix="split it into several rows, or write it as text (.txt)",
        id="data.rows",
    )


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file that the system does not let us read."""
    what = f"cannot be read: {error.strerror or error}"
    fix = "check the disk or the network of this file"
    if isinstance(error, LinkRefused):
        fix = "use the path of the file itself, if you may read that file"
        return DataError(str(error), where=str(path), fix=fix, id="files.data")
    if isinstance(error, PermissionError):
        what = f"no read permission (this process runs as uid {os.geteuid()})"
        fix = f"chmod a+r {shlex.quote(str(path))}, or its folders, or run as its owner"
    return DataError(what, where=str(path), fix=fix, id="data.damaged")
