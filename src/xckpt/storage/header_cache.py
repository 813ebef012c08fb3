r"""Headers of remote files on the local disk: a second open needs one request.

An entry is a file of its own, named by what it is of: the URL, the version of the file as the
server tells it, and the options. Bytes are kept as they were read, not what was made of them::

    "XCKPTHD1"
    length u32, JSON: {"name", "identity", "segments": [[offset, length], ...]}
    bytes of the segments
    BLAKE2b-128 of all before

The folder is ``xckpt/headers`` in the user's cache folder, or what the environment variable
``XCKPT_CACHE_DIR`` says; where that is empty nothing is kept. It has at most 512 MiB: entries that
were not used for longest make room.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.storage.remote import FsspecSource

__all__ = ["load", "store"]

_MAGIC = b"XCKPTHD1"
_DIGEST_NBYTES = 16
_SUFFIX = ".header"
_MOST_NBYTES = 512 << 20
_LARGEST_ENTRY = 64 << 20

# What identifies content, as opposed to times with a resolution of a second.
_STRONG = {"ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5", "sha"}


def load(source: FsspecSource, first: memoryview) -> list[tuple[int, memoryview]] | None:
    """Give what is kept of a file.

    Parameters
    ----------
    source : FsspecSource
        The file.
    first : memoryview
        What was just read of its beginning; an entry that disagrees is none.

    Returns
    -------
    list of (int, memoryview) or None
        Offsets and bytes of ranges that do not overlap. None where nothing is kept, or it is
        damaged.
    """
    path = _path(source)
    if path is None:
        return None
    try:
        if path.stat().st_size > 2 * _LARGEST_ENTRY:
            return None
        segments = _decoded(path.read_bytes(), source)
        os.utime(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    start, data = segments[0]
    shared = min(len(data), len(first))
    return segments if start == 0 and data[:shared] == first[:shared] else None


def store(source: FsspecSource, segments: Sequence[tuple[int, memoryview]]) -> None:
    """Keep what was read of a file; that it cannot be kept is no error.

    Parameters
    ----------
    source : FsspecSource
        The file.
    segments : sequence of (int, memoryview)
        Offsets and bytes of ranges that do not overlap.
    """
    path = _path(source)
    if path is None or sum(len(data) for _, data in segments) > _LARGEST_ENTRY:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Readable by the user alone, as the folder is.
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_encoded(source, segments))
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _make_room(path.parent)


def _path(source: FsspecSource) -> Path | None:
    """Say where the entry of a file is; None where its version is not known for sure."""
    identity: Any = source.identity
    strong = [v for key, v in identity[1:] if key in _STRONG and not v.startswith("W/")]
    folder = _folder()
    if not strong or folder is None:
        return None
    told = repr((source.name, identity, sorted(source.storage_options.items())))
    return folder / (blake2b(told.encode(), digest_size=20).hexdigest() + _SUFFIX)


def _folder() -> Path | None:
    given = os.environ.get("XCKPT_CACHE_DIR")
    if given is not None:
        return Path(given) / "headers" if given else None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "xckpt" / "headers"
    except RuntimeError:  # a user without a home
        return None


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
    starts = [start for start, _ in said["segments"]]
    ends = list(accumulate([nbytes for _, nbytes in said["segments"]], initial=begin))
    if ends[-1] != len(body):
        raise ValueError("of another size")
    return [(start, body[a:b]) for start, a, b in zip(starts, ends[:-1], ends[1:], strict=True)]


def _make_room(folder: Path) -> None:
    """Remove the entries that were not used for longest."""
    entries = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.stat()
            entries.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= _MOST_NBYTES:
            return
        path.unlink(missing_ok=True)
        total -= size
