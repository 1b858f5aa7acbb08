"""The index of a checkpoint: the type, the shape and the bytes of each tensor.

isles writes the index `tensors.json`. isles 0.1.0 wrote the index `.metadata` through torch, and
`run/pickled.py` reads it without running the pickle. Both become an `Index`. isles checks the whole
`Index` against the files of the checkpoint before it reads a tensor.
"""

from __future__ import annotations

import itertools
import json
import math
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.config.foreign import is_plain, read_bytes
from isles.run import pickled
from isles.run.manifest import is_count

INDEXES = INDEX, OLD_INDEX = "tensors.json", ".metadata"
_FORMAT = 1
_LONGEST_BYTES, _LEAST_BYTES, _LEAST_OPCODES = 1 << 30, 16 << 20, 1 << 20
_DATA_EACH = 512
"""The limits of an index grow by one byte or opcode for this many bytes of data.

A piece takes about 110 bytes of JSON, or 150 bytes and 70 opcodes of a pickle. With AdamW, a model
of 70 billion parameters on 64 ranks has 140,000 pieces of 6 MB, which are 15 MB of JSON.
"""
_MOST_CELLS = 1 << 18
"""Limit for the cells of all grids beyond one cell for each piece."""

_MOST_DIMENSIONS, _LONGEST_NAME = 64, 2_000

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e4m3fnuz"), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "complex128": 16,
}
"""The tensor types of a checkpoint, by their torch names."""


class IndexFault(ValueError):
    """An index is not usable. Its text is the reason.

    Args:
        file: the name of the index.
    """

    def __init__(self, what: str, file: str = INDEX) -> None:
        super().__init__(what)
        self.file = file


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor: consecutive bytes of one file.

    Args:
        offsets, sizes: position and size of the part, by dimension.
        file: the name of a file of the checkpoint.
        start, length: its bytes in that file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint. `dtype` is one of `ITEM_BYTES`."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """The tensors of a checkpoint by name.

    Args:
        is_old: each piece is a small archive of `torch.save` instead of plain numbers.
    """

    tensors: Mapping[str, SavedTensor]
    is_old: bool = False


def has_index(names: Mapping[str, object]) -> bool:
    """True if an index is among the files of a checkpoint."""
    return INDEX in names or OLD_INDEX in names


def index_text(tensors: Mapping[str, SavedTensor]) -> str:
    """The text of `tensors.json`."""
    records = {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "pieces": [
                {
                    "offsets": piece.offsets,
                    "sizes": piece.sizes,
                    "file": piece.file,
                    "start": piece.start,
                    "length": piece.length,
                }
                for piece in entry.pieces
            ],
        }
        for name, entry in tensors.items()
    }
    return json.dumps({"format": _FORMAT, "tensors": records}, separators=(",", ":")) + "\n"


def read_index(folder: Path, sizes: Mapping[str, int] | None = None) -> Index:
    """Read the index of a checkpoint and check it.

    Args:
        sizes: files of the manifest and their bytes, or None for the files of the folder.

    Raises:
        IndexFault: the index is missing, or a value in it is invalid.
    """
    try:
        if sizes is None:
            found = ((entry.name, entry.lstat()) for entry in folder.iterdir())
            sizes = {name: s.st_size for name, s in found if stat.S_ISREG(s.st_mode)}
        name = INDEX if INDEX in sizes else OLD_INDEX
        if name not in sizes:
            raise IndexFault(f"neither {INDEX} nor {OLD_INDEX} exists")
        most = min(_LONGEST_BYTES, _LEAST_BYTES + _data_share(sizes))
        if sizes[name] > most:
            raise IndexFault(f"an index of {sizes[name]} bytes is too long for its tensors", name)
        data = read_bytes(folder / name, most)
    except ValueError as error:
        raise IndexFault(str(error), name) from error
    except OSError as error:
        raise IndexFault(f"not readable: {error.strerror}") from error
    return index_from(data, sizes, is_old=name == OLD_INDEX)


def index_from(data: bytes, sizes: Mapping[str, int], *, is_old: bool) -> Index:
    """Check the bytes of an index. Raises the errors of `read_index`."""
    file = OLD_INDEX if is_old else INDEX
    try:
        records = _old_records(data, sizes) if is_old else _records(data)
        layouts = _Layouts()
        entries = {n: _entry(n, r, sizes, layouts, is_old) for n, r in records.items()}
        return Index(entries, is_old)
    except RecursionError:
        raise IndexFault("it is nested too deeply", file) from None
    except IndexFault as error:
        raise IndexFault(str(error), file) from None
    except ValueError as error:  # damaged JSON or pickle
        raise IndexFault(f"it is not an index: {ascii(str(error))[1:200]}", file) from None


def _data_share(sizes: Mapping[str, int]) -> int:
    return sum(size for name, size in sizes.items() if name not in INDEXES) // _DATA_EACH


def _records(data: bytes) -> dict[str, Any]:
    # An index has long names and few lists. Millions of tiny values would take far more memory.
    opened = data.count(b"[") + data.count(b"{")
    if 10 * opened + 3 * data.count(b",") > len(data) + 4096:
        raise IndexFault("it has more lists than an index of its length")
    found = json.loads(data)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise IndexFault(f"it is not an index of format {_FORMAT}")
    if not isinstance(found.get("tensors"), dict):
        raise IndexFault("it lists no tensors")
    return dict(found["tensors"])


def _old_records(data: bytes, file_sizes: Mapping[str, int]) -> dict[str, Any]:
    # Convert the index that torch wrote to the form of the JSON.
    most = _LEAST_OPCODES + _data_share(file_sizes)
    tensors, places = pickled.read_torch_index(data, most)
    records = {}
    for name, (dtype, shape, chunks) in tensors.items():
        pieces = []
        for offsets, sizes in chunks:
            file, start, length = places.get((name, offsets), (None, None, None))
            place = {"file": file, "start": start, "length": length}
            pieces.append({"offsets": offsets, "sizes": sizes, **place})
        records[name] = {"dtype": dtype, "shape": shape, "pieces": pieces}
    return records


def _entry(
    name: object, record: Any, sizes: Mapping[str, int], layouts: _Layouts, is_old: bool
) -> SavedTensor:
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise IndexFault("the name of a tensor is not text, or too long")
    shown = ascii(name)[1:-1][:80]
    if not isinstance(record, dict) or not isinstance(record.get("pieces"), list):
        raise IndexFault(f"{shown} is not a tensor")
    dtype, shape = record.get("dtype"), _numbers(record.get("shape"), shown)
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise IndexFault(f"{shown} has an unknown tensor type")
    total, numel = 0, math.prod(shape)
    if not is_count(numel * ITEM_BYTES[dtype]):
        raise IndexFault(f"{shown} is too large")
    pieces = []
    for one in record["pieces"]:
        if not isinstance(one, dict):
            raise IndexFault(f"a piece of {shown} is not valid")
        piece = _piece(shown, one, sizes)
        ends = zip(piece.offsets, piece.sizes, shape, strict=False)
        if not len(piece.offsets) == len(piece.sizes) == len(shape):
            raise IndexFault(f"a piece of {shown} has a wrong number of dimensions")
        part = math.prod(piece.sizes)
        if any(at + size > whole for at, size, whole in ends):
            raise IndexFault(f"a piece of {shown} is outside its tensor")
        if piece.length != part * ITEM_BYTES[dtype] and not (
            is_old and piece.length > part * ITEM_BYTES[dtype]
        ):
            raise IndexFault(f"a piece of {shown} has {piece.length} bytes for {part} numbers")
        total += part
        pieces.append(piece)
    if total != numel:
        raise IndexFault(f"the pieces of {shown} have {total} of its {numel} numbers")
    if not layouts.are_apart([piece for piece in pieces if piece.length]):
        raise IndexFault(f"pieces of {shown} overlap and leave a gap")
    return SavedTensor(dtype, shape, tuple(pieces))


class _Layouts:
    """Checks that the pieces of tensors do not overlap.

    The checkpoint's tensors have few different layouts, so each layout is checked once. All tensors
    of an index share one limit of work.
    """

    def __init__(self) -> None:
        self._known: set[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = set()
        self._left = _MOST_CELLS

    def are_apart(self, pieces: Sequence[Piece]) -> bool:
        layout = tuple((piece.offsets, piece.sizes) for piece in pieces)
        if len(pieces) < 2 or layout in self._known:
            return True
        # Count cells of the grid of all edges; ranks shard a tensor along such a grid, one cell for
        # each piece.
        grid = []
        for dim in range(len(pieces[0].offsets)):
            spans = [(at[dim], at[dim] + size[dim]) for at, size in layout]
            edges = sorted({edge for span in spans for edge in span})
            grid.append({edge: n for n, edge in enumerate(edges)})
        self._left -= max(0, math.prod(len(edges) - 1 for edges in grid) - len(pieces))
        if self._left < 0:
            raise IndexFault("the pieces of its tensors do not form grids")
        taken: set[tuple[int, ...]] = set()
        for at, size in layout:
            places = zip(grid, at, size, strict=True)
            for cell in itertools.product(*(range(e[o], e[o + n]) for e, o, n in places)):
                if cell in taken:
                    return False
                taken.add(cell)
        self._known.add(layout)
        return True


def _piece(shown: str, record: dict[str, Any], sizes: Mapping[str, int]) -> Piece:
    file, start, length = record.get("file"), record.get("start"), record.get("length")
    if not is_plain(file) or file not in sizes or file in (INDEX, OLD_INDEX):
        text = ascii(file)[:80] if isinstance(file, str) else "no file"
        raise IndexFault(f"the manifest does not list {text}, the file of a piece of {shown}")
    if not is_count(start) or not is_count(length) or start + length > sizes[file]:
        raise IndexFault(f"a piece of {shown} is outside {file}")
    offsets, extents = (_numbers(record.get(key), shown) for key in ("offsets", "sizes"))
    return Piece(offsets, extents, file, start, length)


def _numbers(value: object, shown: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_DIMENSIONS:
        raise IndexFault(f"{shown} has no valid shape")
    if not all(map(is_count, value)):
        raise IndexFault(f"{shown} has no valid shape")
    return tuple(value)
