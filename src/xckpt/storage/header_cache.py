r"""Headers of remote files on the local disk: a second open needs one request.

An entry is a file of its own, named by what it is of: the URL, the version of the file as the
server tells it, and the options. Bytes are kept as they were read, not what was made of them::

    "XCKPTHD1"
    length u32, JSON: {"name", "identity", "segments": [[offset, length], ...]}
    bytes of the segments
    BLAKE2b-128 of all before

`xckpt.storage.cache` says where they lie. They have at most 512 MiB in total.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from xckpt.storage import cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xckpt.storage.remote import FsspecSource

__all__ = ["load", "store"]

_MAGIC = b"XCKPTHD1"
_DIGEST_NBYTES = 16
_FOLDER = "headers"
_SUFFIX = ".header"
_MOST_NBYTES = 512 << 20
_LARGEST_ENTRY = 64 << 20

# What identifies content, as opposed to times with a resolution of a second.
_STRONG = {"ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5", "sha"}


def load(source: FsspecSource, first: memoryview) -> list[tuple[int, memoryview]] | None:
    """Return what is kept of a file: offsets and bytes; None if it does not begin with `first`."""
    path = _path(source)
    content = None if path is None else cache.read(path, 2 * _LARGEST_ENTRY)
    if content is None:
        return None
    try:
        segments = _decoded(content, source)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    start, data = segments[0]
    shared = min(len(data), len(first))
    return segments if start == 0 and data[:shared] == first[:shared] else None


def store(source: FsspecSource, segments: Sequence[tuple[int, memoryview]]) -> None:
    """Keep what was read of a file; that it cannot be kept is not an error."""
    path = _path(source)
    if path is None or sum(len(data) for _, data in segments) > _LARGEST_ENTRY:
        return
    if cache.write(path, _encoded(source, segments)):
        cache.make_room(path.parent, _MOST_NBYTES)


def _path(source: FsspecSource) -> Path | None:
    """Return where the entry of a file is; None where its version is not known for sure."""
    identity: Any = source.identity
    strong = [v for key, v in identity[1:] if key in _STRONG and not v.startswith("W/")]
    folder = cache.folder(_FOLDER) if strong else None
    if folder is None:
        return None
    told = repr((source.name, identity, sorted(source.storage_options.items())))
    return folder / (blake2b(told.encode(), digest_size=20).hexdigest() + _SUFFIX)


def _encoded(source: FsspecSource, segments: Sequence[tuple[int, memoryview]]) -> bytes:
    places = [[start, len(data)] for start, data in segments]
    said = {"name": source.name, "identity": repr(source.identity), "segments": places}
    head = json.dumps(said).encode()
    parts: list[bytes | memoryview] = [
        _MAGIC,
        len(head).to_bytes(4, "little"),
        head,
        *(data for _, data in segments),
    ]
    content = b"".join(parts)
    return content + blake2b(content, digest_size=_DIGEST_NBYTES).digest()


def _decoded(content: bytes, source: FsspecSource) -> list[tuple[int, memoryview]]:
    """Take an entry apart; whatever is wrong with it is an error."""
    body, digest = memoryview(content)[:-_DIGEST_NBYTES], content[-_DIGEST_NBYTES:]
    if body[:8] != _MAGIC or blake2b(body, digest_size=_DIGEST_NBYTES).digest() != digest:
        raise ValueError("not an entry, or damaged")
    begin = 12 + int.from_bytes(body[8:12], "little")
    said = json.loads(bytes(body[12:begin]))
    if (said["name"], said["identity"]) != (source.name, repr(source.identity)):
        raise ValueError("of another file")
    places = said["segments"]
    if not places or any(type(number) is not int for place in places for number in place):
        raise ValueError("not of numbers")
    bounds = [0, *(at for start, nbytes in places for at in (start, start + nbytes)), source.size]
    if any(a > b for a, b in pairwise(bounds)):
        raise ValueError("ranges that overlap, or lie outside of the file")
    ends = list(accumulate([nbytes for _, nbytes in places], initial=begin))
    if ends[-1] != len(body):
        raise ValueError("of another size")
    return [(places[n][0], body[a:b]) for n, (a, b) in enumerate(pairwise(ends))]
