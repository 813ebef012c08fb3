"""OCDBT, the database of tensorstore: from a manifest to the ranges of bytes of its values.

The manifest and the nodes of a tree share a frame; varints are LEB128 with at most 64 bits::

    magic u32, big-endian    0CDB3A2A manifest, 0CDB20DE node
    size u64, little-endian  of the whole frame
    version varint           0
    compression varint       0 none, 1 zstd
    body
    crc32c u32               of all bytes before

    manifest   uuid 16, kind varint (0 single), largest inline value varint, largest node varint,
               arity u8, compression varint, level i32 if it is 1; files; versions; older nodes
    versions   count varint; columns: generation, height u8, file, offset, size, keys, tree bytes,
               indirect bytes, time u64; the last version counts
    files      count varint; columns without the first entry: length of the prefix in common with
               the entry before; lengths of suffixes; lengths of bases; suffixes
    node       height u8, files, count varint; lengths of prefixes (without the first), of suffixes,
               in inner nodes of the prefix of the subtree; suffixes; then columns
      inner    file, offset, size, keys, tree bytes, indirect bytes
      leaf     length of the value; kind u8 (0 inline, 1 in a file); file and offset of those of
               kind 1; inline values

Files are relative to the folder of the manifest. The files of a node are relative to the base of
the file that it is in. Keys rise, and their suffixes follow the prefix of the subtree.

Specification: kvstore/ocdbt/format of github.com/google/tensorstore, 0.1.86.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import FormatError, shown
from xckpt.formats import kit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from xckpt.readable import Readable

MAGIC = bytes.fromhex("0cdb3a2a")
_NODE = bytes.fromhex("0cdb20de")
_LARGEST_MANIFEST, _LARGEST_NODE = 1 << 20, 1 << 28
_MOST_KEYS, _MOST_NODES = 5_000_000, 100_000
# Decoded bytes for each stored byte, and bytes of keys for each byte of a node.
_DENSEST, _MOST_KEY_BYTES = 1 << 15, 256
_LONGEST_PATH = (1 << 16) - 1
_LARGEST = 1 << 63
_EMPTY = (1 << 64) - 1


class Value(NamedTuple):
    """The bytes of a value: inline, or a range of a file."""

    nbytes: int
    inline: bytes | None = None
    file: str = ""
    offset: int = 0


class _Node(NamedTuple):
    """A reference to a node: its file, the base of that file, its range, and its height."""

    file: str
    base: str
    offset: int
    nbytes: int
    height: int
    lead: bytes


# The paths and the bases of the files that a manifest or a node refers to.
_Files = list[tuple[str, str]]


def read(source: Readable, prefix: str, open_file: Callable[[str], Readable]) -> dict[bytes, Value]:
    """Return all values of the database whose manifest is in the folder `prefix`, by key."""
    if source.size > _LARGEST_MANIFEST:
        raise _broken(f"the manifest has {source.size} bytes", "Limit")
    body = _unframed(bytes(source.read(0, source.size)), MAGIC, "the manifest", _LARGEST_MANIFEST)
    root = _root(body, prefix)
    values: dict[bytes, Value] = {}
    stack = [] if root is None else [root]
    visited: set[tuple[str, int]] = set()
    while stack:
        node = stack.pop()
        if (node.file, node.offset) in visited:
            raise _broken(f"the node at byte {node.offset} of {node.file} is there twice", "Cycle")
        visited.add((node.file, node.offset))
        if len(visited) > _MOST_NODES:
            raise _broken(f"there are more than {_MOST_NODES} nodes", "Limit")
        label = f"the node at byte {node.offset} of {node.file}"
        file = open_file(node.file)
        if node.offset + node.nbytes > file.size or node.nbytes > _LARGEST_NODE:
            reason = f"{label} has {node.nbytes} bytes, but the file has {file.size}"
            raise _broken(reason, "Truncated")
        data = bytes(file.read(node.offset, node.nbytes))
        body = _unframed(data, _NODE, label, _LARGEST_NODE)
        stack += reversed(list(_children(_Fields(body, label), node, values)))
    return values


def _broken(reason: str, rule: str) -> FormatError:
    return FormatError(reason, offset=0, rule=rule)


def _unframed(data: bytes, magic: bytes, label: str, largest: int) -> Any:
    """Return the body of a frame."""
    import google_crc32c

    if len(data) < 18:
        raise _broken(f"{label} has {len(data)} bytes, too few", "Truncated")
    if not data.startswith(magic):
        raise _broken(f"{label} begins {data[:4].hex()}, not {magic.hex()}", "Magic")
    stated = int.from_bytes(data[4:12], "little")
    if stated != len(data):
        raise _broken(f"{label} has {len(data)} bytes, but states {stated}", "Length")
    crc = int.from_bytes(data[-4:], "little")
    if google_crc32c.value(data[:-4]) != crc:
        raise _broken(f"{label} does not have the checksum {crc:08x}", "Crc32c")
    fields = _Fields(data[12:-4], label)
    version, compression = fields.integer(), fields.integer()
    if version:
        raise _broken(f"version {version} of {label} is unknown", "Version")
    body = fields.raw(fields.left)
    if compression > 1:
        raise _broken(f"compression {compression} of {label} is unknown", "Compression")
    return _decompressed(body, label, min(largest, _DENSEST * len(body))) if compression else body


def _decompressed(data: bytes, label: str, largest: int) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as stream:
            body = bytes(stream.read(largest + 1))
    except zstandard.ZstdError as error:
        raise _broken(f"{label} does not decode: {error}", "Compression") from error
    if len(body) > largest:
        raise _broken(f"{label} decodes to more than {largest} bytes", "Limit")
    return body


class _Fields(kit.Cursor):
    """A reader of the fields of a body, which may not extend beyond it."""

    __slots__ = ("data", "label")

    def __init__(self, data: bytes, label: str) -> None:
        super().__init__(kit.Memory(label, data))
        self.enter(len(data), label)
        self.data, self.label = data, label

    def raw(self, nbytes: int) -> bytes:
        return self.take(nbytes, self.label)

    def require(self, nbytes: int, label: str) -> None:
        if nbytes > self.left:
            raise _broken(f"{label} ends within a field", "Truncated")

    def integer(self, most: int = (1 << 64) - 1) -> int:
        try:
            number = self.varint(self.label)
        except FormatError as error:
            error.offset = 0  # a position in the body is none in the file
            raise
        if number > most:
            raise _broken(f"{number} in {self.label} is more than {most}", "Varint")
        return number

    def count(self, nbytes: int = 1) -> int:
        """Read the number of entries, of at least `nbytes` bytes each."""
        count = self.integer()
        if count * nbytes > self.left:
            reason = f"{count} entries are in {self.label}, of which {self.left} bytes are left"
            raise _broken(reason, "Truncated")
        return count

    def column(self, count: int, most: int = (1 << 64) - 1) -> list[int]:
        """Read varints; mostly, all of them have one byte."""
        data = self.data[self.at : self.at + count]
        if len(data) == count and (not count or max(data) < 128):
            self.at += count
            return list(data)
        return [self.integer(most) for _ in range(count)]

    def files(self, folder: str) -> _Files:
        count = self.count()
        prefixes = [0, *self.column(max(0, count - 1), _LONGEST_PATH)]
        suffixes, bases = self.column(count, _LONGEST_PATH), self.column(count, _LONGEST_PATH)
        files, before = [], b""
        for prefix, suffix, base in zip(prefixes, suffixes, bases, strict=False):
            path = before[:prefix] + self.raw(suffix)
            if prefix > len(before) or base > len(path) or len(path) > _LONGEST_PATH:
                raise _broken(f"the names of files in {self.label} do not fit", "FileName")
            try:
                files.append((folder + path.decode(), folder + path[:base].decode()))
            except UnicodeDecodeError as error:
                raise _broken(f"the name of a file is not UTF-8: {error}", "FileName") from error
            before = path
        if sum([len(path) - len(folder) for path, _ in files]) > 16 * len(self.data):
            raise _broken(f"the names of files in {self.label} are too long", "Limit")
        return files


def _root(body: bytes, prefix: str) -> _Node | None:
    """Return the root of the last version in a manifest, None if the database is empty."""
    fields = _Fields(body, "the manifest")
    fields.raw(16)
    kind = fields.integer()
    if kind:
        raise _broken(f"manifests of kind {kind} are unsupported", "Kind")
    fields.integer()
    fields.integer()
    fields.raw(1)
    if fields.integer():
        fields.raw(4)
    files = fields.files(prefix)
    count = fields.count(16)
    if not count:
        raise _broken("the manifest has no version", "Versions")
    fields.column(count)
    heights = fields.raw(count)
    number, offset, nbytes = (fields.column(count)[-1] for _ in range(3))
    for _ in range(3):
        fields.column(count)
    fields.raw(8 * count)
    if fields.left and not fields.integer() and fields.left:
        raise _broken(f"{fields.left} bytes follow the manifest", "Versions")
    if offset == nbytes == _EMPTY:
        return None
    path, base = _file(files, number, offset, nbytes, "the manifest")
    return _Node(path, base, offset, nbytes, heights[-1], b"")


def _file(files: _Files, number: int, offset: int, nbytes: int, label: str) -> tuple[str, str]:
    """Return the path and the base of the file of a range."""
    if number >= len(files):
        raise _broken(f"file {number} in {label}, which has {len(files)}", "FileId")
    if offset + nbytes >= _LARGEST:
        raise _broken(f"{nbytes} bytes at byte {offset} in {label}", "Range")
    return files[number]


def _children(fields: _Fields, node: _Node, values: dict[bytes, Value]) -> Iterator[_Node]:
    """Yield the children of an inner node, or add the values of a leaf."""
    label = fields.label
    height = fields.raw(1)[0]
    if height != node.height:
        raise _broken(f"{label} has the height {height}, not {node.height}", "Height")
    files = fields.files(node.base)
    count = fields.count(2)
    if not count:
        raise _broken(f"{label} has no entries", "Keys")
    prefixes = [0, *fields.column(count - 1, _LONGEST_PATH)]
    suffixes = fields.column(count, _LONGEST_PATH)
    common = fields.column(count, _LONGEST_PATH) if height else []
    keys: list[bytes] = []
    before, left = b"", _MOST_KEY_BYTES * len(fields.data)
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        key = before[:prefix] + fields.raw(suffix)
        left -= len(key) + len(node.lead)
        if prefix > len(before) or left < 0 or (keys and key <= before):
            raise _broken(f"the keys in {label} do not rise, or do not fit", "Keys")
        keys.append(key)
        before = key
    if not height:
        _add_values(fields, node.lead, files, keys, values)
        return
    columns = [fields.column(count) for _ in range(3)]
    for key, length, number, offset, nbytes in zip(keys, common, *columns, strict=True):
        path, base = _file(files, number, offset, nbytes, label)
        yield _Node(path, base, offset, nbytes, height - 1, node.lead + key[:length])


def _add_values(
    fields: _Fields, lead: bytes, files: _Files, keys: list[bytes], values: dict[bytes, Value]
) -> None:
    label, count = fields.label, len(keys)
    if len(values) + count > _MOST_KEYS:
        raise _broken(f"there are more than {_MOST_KEYS} keys", "Limit")
    lengths = fields.column(count)
    kinds = fields.raw(count)
    if max(kinds) > 1:
        raise _broken(f"{label} has a value of kind {max(kinds)}", "Kind")
    stored = sum(kinds)
    places = zip(fields.column(stored), fields.column(stored), strict=True)
    for key, kind, nbytes in zip(keys, kinds, lengths, strict=True):
        name = lead + key
        if name in values:
            raise _broken(f"the key {shown(repr(name))} is there twice", "Keys")
        if kind:
            number, offset = next(places)
            path, _ = _file(files, number, offset, nbytes, label)
            values[name] = Value(nbytes, None, path, offset)
        else:
            values[name] = Value(nbytes, fields.raw(nbytes))
