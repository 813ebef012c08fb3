"""A writer of small files of gpt.rs, of every version, for tests.

The fields of a tensor are derived from its data. Tests can override each of them.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

CHECKPOINT, ARCHIVE = b"GPTRSCHK", b"GPTRSTEN"
TAGS = {"float32": 0, "float16": 1, "bfloat16": 2, "int32": 3}
GPT = {
    "vocab_size": 7,
    "context_length": 5,
    "embed_dim": 4,
    "num_layers": 1,
    "num_heads": 2,
    "mlp_ratio": 3,
    "dropout": 0.1,
}


@dataclass(frozen=True)
class Record:
    """A tensor: its data and its fields in the file; `offset` counts from the start of data."""

    name: str | bytes
    shape: Sequence[int]
    data: bytes
    tag: int = 0
    flag: int = 0
    stored_id: bytes = bytes(16)
    offset: int | None = None
    nbytes: int | None = None

    @property
    def stated_nbytes(self) -> int:
        """The size that the file gives."""
        return len(self.data) if self.nbytes is None else self.nbytes


def record(name: str, array: np.ndarray, **stated: Any) -> Record:
    """Describe an array."""
    return Record(name, array.shape, array.tobytes(), TAGS[array.dtype.name], **stated)


def id_bytes(name: str) -> bytes:
    """Give the id of a name as it is stored."""
    return blake3(name.encode()).digest(16)


def tagged(kind: str, config: Any, **more: Any) -> bytes:
    """Write a config with a kind."""
    return json.dumps({"kind": kind, "config": config, **more}).encode()


CONFIG = tagged("custom", {})


def indexed_file(
    records: Sequence[Record],
    config: bytes | None = CONFIG,
    *,
    bincode: bool = False,
    slack: bytes = b"",
    tail: bytes = b"",
) -> bytes:
    """Write version 2: an archive where `config` is None.

    `slack` follows the last entry of the index, `tail` the data.
    """
    head = _head(2, config)
    start = (
        len(head) + 4 + len(slack) + sum(len(part) for part in _index(records, 0, config, bincode))
    )
    index = sized(b"".join(_index(records, start, config, bincode)) + slack)
    return head + index + b"".join(tensor.data for tensor in records) + tail


def inline_file(records: Sequence[Record], config: bytes | None = CONFIG) -> bytes:
    """Write version 1: an archive where `config` is None."""
    written = [_head(1, config), struct.pack("<I", len(records))]
    for tensor in records:
        head = struct.pack("<IBQ", tensor.tag, tensor.flag, tensor.stated_nbytes)
        written += [*_named(tensor, "<I", b""), head, tensor.data]
    return b"".join(written)


def _head(version: int, config: bytes | None) -> bytes:
    if config is None:
        return ARCHIVE + struct.pack("<I", version)
    return CHECKPOINT + struct.pack("<I", version) + sized(config)


def _index(
    records: Sequence[Record], start: int, config: bytes | None, bincode: bool
) -> Iterator[bytes]:
    length = "<Q" if bincode else "<I"
    yield struct.pack(length, len(records))
    at = start
    for tensor in records:
        offset = at if tensor.offset is None else start + tensor.offset
        at += len(tensor.data)
        yield from _named(tensor, length, b"" if config is None else tensor.stored_id)
        yield struct.pack("<IBQQ", tensor.tag, tensor.flag, offset % 2**64, tensor.stated_nbytes)


def _named(tensor: Record, length: str, stored_id: bytes) -> Iterator[bytes]:
    name = tensor.name if isinstance(tensor.name, bytes) else tensor.name.encode()
    yield struct.pack(length, len(name)) + name + stored_id
    yield struct.pack(length, len(tensor.shape))
    yield struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)


def sized(data: bytes) -> bytes:
    """Put its length before something."""
    return struct.pack("<I", len(data)) + data


WRITERS: dict[str, Callable[[Sequence[Record]], bytes]] = {
    "checkpoint 2": indexed_file,
    "archive 2": lambda records: indexed_file(records, None),
    "checkpoint bincode": lambda records: indexed_file(records, bincode=True),
    "archive bincode": lambda records: indexed_file(records, None, bincode=True),
    "checkpoint 1": inline_file,
    "archive 1": lambda records: inline_file(records, None),
}
