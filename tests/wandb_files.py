"""Reads the files of wandb, which a kill may have cut short."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_HEADER = 7
_FULL, _LAST = 1, 4


def read_points(file: Path) -> Iterator[dict[str, Any]]:
    """Every whole point of a `.wandb` file: metrics by name, and `_step`.

    The file is a log of protobuf records in the format of LevelDB's write-ahead log
    (github.com/google/leveldb/blob/main/doc/log_format.md), after a header of seven bytes.

    Raises:
        OSError, ValueError: it cannot be read, or is something else.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # generated, without types
    for data in _records(file.read_bytes()):
        record = messages.Record()
        try:
            record.ParseFromString(data)
        except DecodeError as error:
            raise ValueError(f"{file} holds something else than records of wandb") from error
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


def _records(data: bytes) -> Iterator[bytes]:
    """Whole records; a last one that was cut short is left out."""
    position, parts = _HEADER, b""  # the file's own header is as long as a record's
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:  # too little for a header: the block's end is padded
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        body = data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind == 0 or len(body) < length:
            return
        parts += body
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
