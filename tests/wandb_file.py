"""Read an offline W&B run back from its file."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

# LevelDB's log format after seven bytes of W&B's own.
_START, _BLOCK = 7, 32_768
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _LAST = 1, 4


def history(folder: Path) -> list[dict[str, Any]]:
    """One dictionary per step, from the only offline run below `folder`."""
    (path,) = folder.rglob("*.wandb")
    for _ in range(100):  # W&B's process may still be writing when `finish` returns
        records = [(r.WhichOneof("record_type"), r) for r in _records(path.read_bytes())]
        if any(kind == "exit" for kind, _ in records):
            return [_row(record.history.item) for kind, record in records if kind == "history"]
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def _row(items: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for item in items:
        *outer, name = item.nested_key or [item.key]
        place = row
        for key in outer:  # a picture
            place = place.setdefault(key, {})
        place[name] = json.loads(item.value_json)
    return row


def _records(data: bytes) -> Iterator[Record]:
    at, held = _START, b""
    while at + _HEADER.size <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER.size:  # no header fits into the rest of the block
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        held, at = held + data[at : at + length], at + length
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(held)
            held = b""
