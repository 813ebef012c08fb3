r"""HDF5 files: a walk through groups and datasets, as Keras and h5py write them by default.

Integers are little-endian. Addresses count from the signature; all bits set stand for none::

    superblock 0, 1   signature, version u8, 4 bytes, sizes of addresses and lengths u8, ...;
                      base, free space, end of file, driver u64; then the entry of the root group
    superblock 2, 3   signature, version u8, sizes u8, flags u8; base, extension, end, root u64
    object header 1   1 u8, u8, messages u16, references u32, nbytes u32, u32; messages of
                      type u16, nbytes u16, flags u8, 3 bytes, data
    object header 2   "OHDR" 2 u8, flags u8, ...; messages of type u8, nbytes u16, flags u8, data
    group, old        message 17: addresses of a tree and of a heap of names
    group, new        messages 6, one for each link
    tree              "TREE" type u8, level u8, entries u16, left u64, right u64, key;
                      then a child u64 and a key for each entry
    leaf of a group   "SNOD" 1 u8, u8, entries u16; entries of 40 bytes: offset of the name u64,
                      object header u64, cache type u32, ...
    heap of names     "HEAP" 0 u8, 3 bytes, nbytes u64, free u64, address of the names u64
    global heap       "GCOL" 1 u8, 3 bytes, nbytes u64; objects of number u16, u16, u32,
                      nbytes u64, data

A dataset has messages with its extents (1), element type (3), fill value (4, 5), filters (11) and
layout (8): data in the header, in one range, or in chunks, which a tree lists. Soft and external
links, external storage and virtual datasets lead out of the group or the file, and are not
followed. Structures that only files for newer libraries have raise `NewerError`: heaps of links
and indexes of chunks other than the tree.

Specification: HDF5 File Format Specification 3.0, sections II to IV.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct, calcsize, unpack_from
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats import kit
from xckpt.formats.keras.types import Element, decode_attribute, element

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.index import Part
    from xckpt.readable import Readable

SIGNATURE = b"\x89HDF\r\n\x1a\n"
NONE = (1 << 64) - 1
_DEEPEST = 1000
_BLOCK, _MOST_BLOCKS = 1 << 14, 256
# Structures do not overlap, so all of them together are hardly larger than the file.
_MOST_READ = 8
# Bytes of paths, which repeat the names of groups, for each byte of the file.
_MOST_PATHS = 16
_ENTRY = Struct("<QQI20x")
_MESSAGE = Struct("<HHB3x")

Path = tuple[str, ...]
Attrs = dict[str, Any]
Message = tuple[int, bytes, int]  # type, data, and address of the data


class NewerError(UnsupportedError):
    """A structure that only the HDF5 library reads."""


class Chunk(NamedTuple):
    """A stored chunk: the position of its first element, its bytes, and the filters it skips."""

    origin: tuple[int, ...]
    at: int
    nbytes: int
    skipped: int


@dataclass(slots=True)
class Dataset:
    """A dataset as the file describes it: `nbytes` bytes at address `at`, or `chunks`."""

    header: int
    shape: tuple[int, ...] | None = None
    element: Element | None = None
    fill: bytes | None = None
    at: int | None = None  # None if the data were never written
    nbytes: int = 0
    chunk: tuple[int, ...] | None = None  # extents of a chunk
    chunks: list[Chunk] = field(default_factory=list)
    filters: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    attrs: Attrs = field(default_factory=dict)
    problem: CheckpointError | None = None  # the reason why the data cannot be read


@dataclass(slots=True)
class Contents:
    """Datasets and attributes of groups, by path."""

    datasets: dict[Path, Dataset] = field(default_factory=dict)
    groups: dict[Path, Attrs] = field(default_factory=dict)


class Image:
    """The bytes of an HDF5 file, by address: a range of `source`."""

    def __init__(self, source: Readable, start: int, size: int, outer: Part | None = None) -> None:
        # With `outer`, the source is the decoded bytes of that part.
        self.source, self.start, self.size, self.outer = source, start, size, outer
        self._blocks: dict[int, bytes] = {}
        self._heaps: dict[int, dict[int, bytes]] = {}
        self._budget = _MOST_READ * size + (1 << 16)

    def offset(self, at: int) -> int:
        """Return the offset in the file, for messages."""
        return self.outer.offset if self.outer is not None else self.start + min(at, self.size)

    def heap(self, at: int) -> dict[int, bytes]:
        """Return the objects of a global heap by their numbers. Number 0 is free space."""
        if at not in self._heaps:
            (nbytes,) = self.fields("<4xQ", at, "a heap", b"GCOL")
            data, place = self.take(at, nbytes, "a heap"), 16
            objects: dict[int, bytes] = {}
            while place + 16 <= nbytes:
                number, length = unpack_from("<H6xQ", data, place)
                occupied = 16 + -(-length // 8) * 8 if number else length
                if not 16 <= occupied <= nbytes - place:
                    raise self.broken("an object does not fit into its heap", at + place, "Heap")
                if number:
                    objects[number] = data[place + 16 : place + 16 + length]
                place += occupied
            self._heaps[at] = objects
        return self._heaps[at]

    def broken(self, reason: str, at: int, rule: str = "Hdf5") -> FormatError:
        """Return the error for a malformed structure at an address."""
        return FormatError(reason, offset=self.offset(at), rule=rule)

    def newer(self, reason: str, at: int) -> NewerError:
        """Return the error for a structure that needs the HDF5 library."""
        hint = "Install h5py to read it: pip install 'xckpt[hdf5]'"
        return NewerError(reason, offset=self.offset(at), rule="Hdf5", hint=hint)

    def take(self, at: int, nbytes: int, label: str) -> bytes:
        """Read a structure."""
        if at + nbytes > self.size:
            reason = f"{label}: {nbytes} bytes at address {at} are not in the file, of {self.size}"
            raise self.broken(reason, at, "Truncated")
        self._budget -= nbytes
        if self._budget < 0:
            raise self.broken("structures overlap: they take more bytes than the file", at)
        number, first = divmod(at, _BLOCK)
        if first + nbytes > _BLOCK:
            return bytes(self.source.read(self.start + at, nbytes))
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            begin = number * _BLOCK
            block = bytes(self.source.read(self.start + begin, min(_BLOCK, self.size - begin)))
            self._blocks[number] = block
        return block[first : first + nbytes]

    def fields(self, kind: str, at: int, label: str, magic: bytes) -> tuple[Any, ...]:
        """Read the fields of a structure that begins with `magic`."""
        data = self.take(at, len(magic) + calcsize(kind), label)
        if not data.startswith(magic):
            raise self.broken(f"{label} begins {data[: len(magic)]!r}", at, "Signature")
        return unpack_from(kind, data, len(magic))


def find(source: Readable, start: int, size: int) -> int:
    """Return the position of the signature, which may follow a user block."""
    at = 0
    while at + len(SIGNATURE) <= size:
        if source.read(start + at, len(SIGNATURE)) == SIGNATURE:
            return at
        at = max(512, 2 * at)
    raise FormatError("the signature of HDF5 is missing", offset=start, rule="Signature")


class Walk:
    """A walk through all groups of a file, each of them once."""

    def __init__(self, image: Image, notes: kit.Notes) -> None:
        self._image, self._notes = image, notes
        self._visited: set[int] = set()
        self._datasets: dict[int, Dataset] = {}
        self._paths_left = _MOST_PATHS * image.size
        self._texts_left = _MOST_READ * image.size
        self.contents = Contents()
        self._walk(self._root())

    def _root(self) -> int:
        """Read the superblock and return the address of the root group."""
        image = self._image
        version = image.take(8, 1, "the superblock")[0]
        if version > 3:
            reason = f"version {version} of the superblock is unknown"
            raise UnsupportedError(reason, offset=image.offset(8), rule="Superblock")
        head = image.take(0, 96 if version < 2 else 48, "the superblock")
        sizes = head[13:15] if version < 2 else head[9:11]
        if sizes != b"\x08\x08":
            reason = f"addresses and lengths of {sizes[0]} and {sizes[1]} bytes are unsupported"
            raise UnsupportedError(reason, offset=image.offset(9), rule="Superblock")
        if version < 2:
            base, end = unpack_from("<Q8xQ", head, 24 + 4 * version)
            (root,) = unpack_from("<Q", image.take(64 + 4 * version, 8, "the superblock"))
        else:
            base, end, root = unpack_from("<Q8xQQ", head, 12)
        # The end counts from the beginning of the file, and the base is the size of a user block.
        if end - base > image.size:
            reason = f"the file ends at byte {image.size + base}, not at {end}"
            error = image.broken(reason, image.size, "Truncated")
            error.hint = kit.TRUNCATED
            raise error
        return int(root)

    # --- groups -----------------------------------------------------------------------------------

    def _walk(self, root: int) -> None:
        stack: list[tuple[Path, int]] = [((), root)]
        while stack:
            path, at = stack.pop()
            if at in self._datasets:
                self.contents.datasets[path] = self._datasets[at]
                continue
            if at in self._visited:
                self._notes.add("a group with several names is read under one of them", _name(path))
                continue
            self._visited.add(at)
            messages = list(self._messages(at))
            kinds = {kind for kind, *_ in messages}
            if not kinds & {2, 6, 8, 17}:
                if path:
                    self._notes.add("neither a group nor a dataset, and left out", _name(path))
                    continue
                raise self._image.broken("the root is not a group", at)
            if 8 in kinds:
                self._datasets[at] = self.contents.datasets[path] = self._dataset(at, messages)
                continue
            self.contents.groups[path] = self._attributes(messages)
            if len(path) >= _DEEPEST:
                raise self._image.broken(f"groups are nested deeper than {_DEEPEST} levels", at)
            stack += self._entries(path, at, messages)

    def _entries(self, path: Path, at: int, messages: list[Message]) -> Iterator[tuple[Path, int]]:
        """Yield the paths and addresses of the entries of a group."""
        names = set()
        for name, address in self._links(messages):
            text = self._text(name, at)
            if text in names:
                raise self._image.broken(f"two entries have the name {shown(text)}", at, "Name")
            names.add(text)
            if address is None:
                self._notes.add("a link to elsewhere, which is not followed", _name((*path, text)))
                continue
            self._paths_left -= sum(map(len, path)) + len(text) + 1
            if self._paths_left < 0:
                raise self._image.broken("the paths take more bytes than the file allows", at)
            yield (*path, text), address

    def _text(self, name: bytes, at: int) -> str:
        try:
            text = name.decode()
        except UnicodeDecodeError as error:
            raise self._image.broken(f"a name is not UTF-8: {error}", at, "Utf8") from error
        if not text or "/" in text:
            raise self._image.broken(f"{shown(text)} is not the name of an entry", at, "Name")
        return text

    def _links(self, messages: list[Message]) -> Iterator[tuple[bytes, int | None]]:
        """Yield the names of entries and the addresses of their headers, None for other links."""
        for kind, data, at in messages:
            if kind == 17:
                tree, heap = self._fields("<QQ", data, 0, at)
                nbytes, start = self._image.fields("<4xQ8xQ", heap, "a heap of names", b"HEAP")
                names = self._image.take(start, nbytes, "names")
                for name, address, cache in self._symbols(tree):
                    end = names.find(b"\0", name)
                    if end < 0:
                        raise self._image.broken("a name is not in its heap", heap, "Name")
                    yield names[name:end], None if cache == 2 or address == NONE else address
            elif kind == 6:
                yield self._link(data, at)
            elif kind == 2:
                flags = self._fields("<BB", data, 0, at)[1]
                if self._fields("<Q", data, 2 + 8 * (flags & 1), at)[0] != NONE:
                    reason = "a group keeps its links in a heap of newer files"
                    raise self._image.newer(reason, at)

    def _link(self, data: bytes, at: int) -> tuple[bytes, int | None]:
        version, flags = self._fields("<BB", data, 0, at)
        if version != 1:
            raise self._image.broken(f"version {version} of a link is unknown", at)
        kind = self._fields("<B", data, 2, at)[0] if flags & 8 else 0
        place = 2 + bool(flags & 8) + 8 * bool(flags & 4) + bool(flags & 16)
        width = 1 << (flags & 3)
        nbytes = int.from_bytes(data[place : place + width], "little")
        name = data[place + width : place + width + nbytes]
        if len(name) != nbytes:
            raise self._image.broken("the name of a link is cut short", at, "Truncated")
        place += width + nbytes
        return name, None if kind else self._fields("<Q", data, place, at)[0]

    def _symbols(self, tree: int) -> Iterator[tuple[int, int, int]]:
        """Yield the fields of all entries of an old group."""
        image = self._image
        for _, at in self._leaves(tree, 0, 8):
            (count,) = image.fields("<xH", at, "a leaf of a group", b"SNOD\1")
            yield from _ENTRY.iter_unpack(image.take(at + 8, count * _ENTRY.size, "entries"))

    def _leaves(self, root: int, kind: int, key: int) -> Iterator[tuple[bytes, int]]:
        """Yield the keys and children of the lowest level of a tree."""
        image, stack = self._image, [(root, -1)]
        while stack:
            at, expected = stack.pop()
            level, count = image.fields("<BH16x", at, "a tree", b"TREE" + bytes([kind]))
            if expected not in {-1, level} or at in self._visited:
                reason = "a tree refers to a node again, or of another level"
                raise image.broken(reason, at, "Cycle")
            self._visited.add(at)
            data = image.take(at + 24, count * (key + 8), "a tree")
            for place in range(0, len(data), key + 8):
                (child,) = unpack_from("<Q", data, place + key)
                if level:
                    stack.append((child, level - 1))
                else:
                    yield data[place : place + key], child

    # --- object headers ---------------------------------------------------------------------------

    def _fields(self, kind: str, data: bytes, place: int, at: int) -> tuple[Any, ...]:
        fields = Struct(kind)
        if place + fields.size > len(data):
            raise self._image.broken("a message of an object header is cut short", at, "Truncated")
        return fields.unpack_from(data, place)

    def _messages(self, at: int) -> Iterator[Message]:
        """Yield the type, the data and the address of each message of an object header."""
        image = self._image
        head = image.take(at, 16, "an object header")
        is_new, fields = head.startswith(b"OHDR"), _MESSAGE
        if is_new:
            flags, place = head[5], 6 + 16 * bool(head[5] & 32) + 4 * bool(head[5] & 16)
            width = 1 << (flags & 3)
            size = int.from_bytes(image.take(at + place, width, "an object header"), "little")
            spans, left = [(at + place + width, size)], 1 << 16
            fields = Struct("<BHBH" if flags & 4 else "<BHB")
        else:
            left, size = unpack_from("<2xH4xI", head)
            spans = [(at + 16, size)]
        if (head[4] != 2) if is_new else (head[0] != 1):
            raise image.broken(f"an object header begins {head[:5]!r}", at, "ObjectHeader")
        for begin, nbytes in spans:  # which grows
            data, place = image.take(begin, nbytes, "an object header"), 0
            while place + fields.size <= nbytes and left:
                kind, length, flags, *_ = fields.unpack_from(data, place)
                place += fields.size
                if place + length > nbytes:
                    reason = f"a message of {length} bytes exceeds its object header"
                    raise image.broken(reason, begin + place, "ObjectHeader")
                message, where = data[place : place + length], begin + place
                place, left = place + length, left - 1
                if kind == 16:
                    address, more = self._fields("<QQ", message, 0, where)
                    if any(address == span for span, _ in spans):
                        raise image.broken("an object header continues in itself", where, "Cycle")
                    if is_new:  # a signature before, a checksum after the messages
                        address, more = address + 4, max(0, more - 8)
                    spans.append((address, more))
                elif kind:
                    # The data of a shared message are elsewhere.
                    yield kind, b"" if flags & 2 else message, where

    def _attributes(self, messages: list[Message]) -> Attrs:
        attrs = {}
        for kind, data, at in messages:
            if kind == 12:
                with kit.locating(offset=self._image.offset(at)):
                    name, value = decode_attribute(data, self._object)
                if value is not None:
                    attrs[name] = value
        return attrs

    def _object(self, at: int, number: int) -> bytes:
        """Return an object of a global heap."""
        data = self._image.heap(at).get(number, b"")
        self._texts_left -= len(data)
        if self._texts_left < 0:
            raise self._image.broken("attributes take more bytes than the file", at)
        return data

    # --- datasets ---------------------------------------------------------------------------------

    def _dataset(self, at: int, messages: list[Message]) -> Dataset:
        dataset = Dataset(at, attrs=self._attributes(messages))
        contents = {kind: (data, place) for kind, data, place in messages}
        try:
            for kind, label in ((1, "extents"), (3, "element type")):
                if not contents.get(kind, (b"", 0))[0]:
                    reason = f"its {label} are shared with another object, or missing"
                    raise UnsupportedError(reason, rule="Dataset")
            dataset.element = element(contents[3][0])[0]
            dataset.shape = self._extents(*contents[1])
            for kind in sorted(contents.keys() & {4, 5}):
                dataset.fill = self._fill(kind, *contents[kind])
            if 7 in contents:
                raise UnsupportedError("its data are in another file", rule="External")
            if 11 in contents:
                dataset.filters = self._filters(*contents[11])
            self._layout(dataset, *contents[8])
        except CheckpointError as error:
            dataset.problem = error.located(offset=self._image.offset(at))
        return dataset

    def _extents(self, data: bytes, at: int) -> tuple[int, ...] | None:
        version, rank, _, kind = self._fields("<4B", data, 0, at)
        if version not in {1, 2} or rank > kit.MOST_AXES:
            raise self._image.broken(f"{rank} axes of version {version}", at, "Shape")
        if version == 2 and kind == 2:
            return None
        return self._fields(f"<{rank}Q", data, 8 if version == 1 else 4, at)

    def _fill(self, kind: int, data: bytes, at: int) -> bytes | None:
        if kind == 4:
            place, is_stated = 0, True
        else:
            version, second = self._fields("<BB", data, 0, at)
            place = 4 if version < 3 else 2
            is_stated = bool(data[3:4] != b"\0") if version < 3 else bool(second & 32)
        nbytes = self._fields("<I", data, place, at)[0] if is_stated else 0
        return data[place + 4 : place + 4 + nbytes] if nbytes else None

    def _filters(self, data: bytes, at: int) -> list[tuple[int, tuple[int, ...]]]:
        version, count = self._fields("<BB", data, 0, at)
        place, filters = 8 if version == 1 else 2, []
        for _ in range(count):
            (number,) = self._fields("<H", data, place, at)
            is_named = version == 1 or number >= 256
            (name,) = self._fields("<H", data, place + 2, at) if is_named else (0,)
            place += 4 if is_named else 2
            _, values = self._fields("<HH", data, place, at)
            place += 4 + (-(-name // 8) * 8 if version == 1 else name)
            filters.append((number, self._fields(f"<{values}I", data, place, at)))
            place += 4 * (values + values % 2 if version == 1 else values)
        return filters

    def _layout(self, dataset: Dataset, data: bytes, at: int) -> None:
        version, kind = self._fields("<BB", data, 0, at)
        if version not in {3, 4}:
            raise self._image.newer(f"version {version} of a layout", at)
        if kind == 0:
            dataset.at, dataset.nbytes = at + 4, self._fields("<H", data, 2, at)[0]
        elif kind == 1:
            address, dataset.nbytes = self._fields("<QQ", data, 2, at)
            dataset.at = None if address == NONE else address
        elif kind == 3:
            raise UnsupportedError("its data are those of other datasets, or files", rule="Virtual")
        elif kind != 2:
            raise self._image.broken(f"layout {kind} is unknown", at)
        elif version == 4:
            raise self._image.newer("its chunks have an index of newer files", at)
        else:
            self._chunks(dataset, data, at)

    def _chunks(self, dataset: Dataset, data: bytes, at: int) -> None:
        rank = len(dataset.shape or ())
        if dataset.shape is None or data[2] != rank + 1:
            raise self._image.broken(f"chunks of {data[2] - 1} axes", at, "Chunks")
        (tree,) = self._fields("<Q", data, 3, at)
        dataset.chunk = self._fields(f"<{rank}I", data, 11, at)
        if tree == NONE:
            return
        for key, address in self._leaves(tree, 1, 8 * rank + 16):
            nbytes, skipped, *origin = unpack_from(f"<II{rank}Q", key)
            dataset.chunks.append(Chunk(tuple(origin), address, nbytes, skipped))


def _name(path: Path) -> str:
    return shown("/".join(path))
