"""Containers of a checkpoint's pickle: a zip archive, or a chain of pickles and storages.

A zip archive (torch 1.6 and newer) has one folder, of any name, with ``data.pkl``, the storages as
``data/<key>``, ``version`` (decimal, 3) and ``byteorder`` (``little`` or ``big``, absent before
2.1). Members are stored, and aligned by padding in their local headers. A checksum of 0 stands for
none. A program of TorchScript has constants in ``constants.pkl`` and ``constants/<key>``: a tuple,
with all weights if the program is frozen. Other members are ignored: code, other pickles.

Before 1.6 a file has five consecutive pickles and then the storages::

    0x1950a86a20f9469cfc6c   1001   {"protocol_version": 1001, "little_endian": True, ...}
    the object   [keys of storages]
    for each key:  number of elements i64, elements

The persistent ids in the object name the classes of the storages, and thus their element types.

Specification: torch/serialization.py and caffe2/serialize/inline_container.cc of
github.com/pytorch/pytorch, 2.15.
"""

from __future__ import annotations

from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, FormatError, TruncatedError, UnsupportedError, shown
from xckpt.formats import archive, kit
from xckpt.formats.pickles.machine import Machine
from xckpt.formats.pickles.records import Pairs, spelled
from xckpt.formats.pickles.scanning import LARGEST, scan, scan_file
from xckpt.formats.torch.tensors import FileContents, Region, Storage, itemsize_of, storage_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.readable import Readable

PREVIEW = b"PYTORCH1"
# Deflating reduces the pickle of a checkpoint to about a tenth. These limits stop bombs.
_LARGEST_DEFLATED, _MOST_DEFLATED = 1 << 20, 32
# torch never deflates storages. A storage beyond these limits is listed, but cannot be read.
_BOMB, _BOMB_RATIO = 1 << 26, 512
# Members with pickles, and archives with pickles.
_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib", ".npy", ".zip")
_VERSIONS = range(1, 11)
_LONGEST_WORD = 32
_AGAIN = "Load it with torch.load(..., weights_only=True), and save it again"
_PROGRAM = "the file is a program of torch.export (.pt2), not a checkpoint"
_OTHERS = {
    ".data/extern_modules": "the file is a torch.package of code, not a checkpoint",
    "archive_format": _PROGRAM,
    "archive_version": _PROGRAM,
}

_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_BYTES = b"\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b"."
LEGACY_BEGINS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MAGIC_TEXT = b"L%dL\n." % _MAGIC
_PROTOCOL = 1001
_COUNT = Struct("<q")
_STEP = 1 << 20


def read(source: Readable, notes: kit.Notes) -> FileContents:
    """Read a file of any version."""
    head = kit.first_bytes(source, 512)
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        try:
            return read_zip(source, notes)
        except CheckpointError:
            # Other programs may read it, or run the code of packages and exported programs.
            scan_file(source, notes)
            raise
    if is_legacy(head):
        return _read_legacy(source, notes)
    if head.startswith(PREVIEW):
        reason = "the container is a preview of 2018, which is unsupported"
        raise UnsupportedError(reason, offset=0, rule="Container", hint=_AGAIN)
    if head[257:262] == b"ustar":
        scan_file(source, notes)
        reason = "tar archives of PyTorch 0.1 are unsupported"
        raise UnsupportedError(reason, offset=0, rule="Container", hint=_AGAIN)
    raise FormatError(f"the file begins {head[:16]!r}", offset=0, rule="Container")


# --- zip archives ---------------------------------------------------------------------------------


def read_zip(source: Readable, notes: kit.Notes) -> FileContents:
    """Read an archive."""
    members = {member.name: (member, at) for member, at in archive.Archive(source).places()}
    root = _root_of(members)
    cursor = kit.Cursor(source)

    def word(name: str) -> str:
        """Read a short text, "" if the member is missing."""
        if f"{root}/{name}" not in members:
            return ""
        member, at = members[f"{root}/{name}"]
        if member.nbytes > _LONGEST_WORD:
            reason = f"{name} has {member.nbytes} bytes, more than {_LONGEST_WORD}"
            raise FormatError(reason, offset=at, rule="Word")
        return archive.Content(cursor, member, at).whole(name).decode("latin-1").strip()

    byteorder = word("byteorder") or "little"
    if byteorder not in {"little", "big"}:
        at = members[f"{root}/byteorder"][1]
        raise FormatError(f"byteorder is {shown(byteorder)}", offset=at, rule="Byteorder")
    version = word("version")
    if version and not (version.isascii() and version.isdigit()):
        raise FormatError(f"version is {shown(version)}", offset=0, rule="Version")
    if not version or int(version) not in _VERSIONS:
        notes.add(f"torch reads versions 1 to 10, not {version or 'none'}", "version")

    def contents(folder: str) -> FileContents:
        """Read a pickle, whose storages are in the folder of its name."""
        pickle, base = members[f"{folder}.pkl"]
        value = _read_pickle(archive.Content(cursor, pickle, base), pickle, notes)
        place = partial(_member, members, folder)
        return FileContents(version, value, place, pickle.nbytes, base, byteorder)

    for name, (member, at) in members.items():
        # torch.load ignores them; other programs may not.
        is_read = name in {f"{root}/data.pkl", f"{root}/constants.pkl"}
        if not is_read and name.lower().endswith(_SUFFIXES):
            content = archive.Content(cursor, member, at)
            scan(content.whole, member.nbytes, kit.file_name(name), notes)
    has_constants = f"{root}/constants.pkl" in members
    constants = contents(f"{root}/constants") if has_constants else None
    return contents(f"{root}/data")._replace(constants=constants)


def _root_of(members: Mapping[str, Any]) -> str:
    """Return the folder of an archive; raise an error unless it has the pickle of a checkpoint."""
    root = next(iter(members), "").partition("/")[0]
    if f"{root}/data.pkl" in members:
        return root
    for name, reason in _OTHERS.items():
        if f"{root}/{name}" in members:
            raise UnsupportedError(reason, offset=0, rule="Pickle")
    raise FormatError(f"the folder {shown(root)} has no data.pkl", offset=0, rule="Pickle")


def _read_pickle(content: archive.Content, member: archive.Member, notes: kit.Notes) -> Any:
    most = LARGEST
    if member.method != archive.STORED:
        most = min(most, _LARGEST_DEFLATED + _MOST_DEFLATED * member.stored_nbytes)
    if member.nbytes > most:
        reason = f"the pickle has {member.nbytes} bytes, more than {most}"
        raise UnsupportedError(reason, offset=content.at, rule="Pickle")
    label = kit.file_name(member.name)
    data = content.whole(label)
    machine = Machine(data, base=content.at)
    try:
        value = machine.run()
    except CheckpointError as error:
        if member.method != archive.STORED:
            error.offset = content.at
        # Other programs may read on.
        scan(lambda _: data, len(data), label, notes)
        raise
    notes.add_code(machine.uses.executes, machine.uses.imports)
    if machine.at < len(data):
        notes.add(f"{len(data) - machine.at} bytes after the pickle are ignored", label)
        scan(lambda _: data[machine.at :], len(data) - machine.at, label, notes)
    return value


def _member(members: Mapping[str, Any], folder: str, key: str) -> Region:
    """Return the position of the storage with a key."""
    entry = members.get(f"{folder}/{key}")
    if entry is None:
        reason = f"the archive has no member {shown(f'{folder}/{key}')}"
        return Region(0, 0, 0, problem=FormatError(reason, offset=0, rule="Storage", hint=kit.CUT))
    member, at = entry
    nbytes, stored = member.nbytes, member.stored_nbytes
    try:
        member.check(at)
    except UnsupportedError as problem:
        return Region(at, nbytes, stored, problem=problem)
    if member.method == archive.STORED:
        return Region(at, nbytes, stored, None, member.crc)
    if nbytes > max(_BOMB, _BOMB_RATIO * stored):
        reason = f"{nbytes} bytes are deflated to {stored}, which is implausible for weights"
        hint = "If the file is trustworthy, zip it again without compression (zip -0)"
        error = UnsupportedError(reason, rule="Deflated", hint=hint)
        return Region(at, nbytes, stored, problem=error)
    return Region(at, nbytes, stored, "deflate", member.crc)


# --- before 1.6 -----------------------------------------------------------------------------------


def is_legacy(head: bytes) -> bool:
    """Return whether a file begins with a pickle of the legacy magic number, in any protocol."""
    if head.startswith(_MAGIC_TEXT):
        return True
    return head.startswith(LEGACY_BEGINS) and _MAGIC_BYTES in head[2 : 11 + len(_MAGIC_BYTES)]


def _read_legacy(source: Readable, notes: kit.Notes) -> FileContents:
    """Read a chain of pickles and the positions of the storages after it."""
    machines = _Chain(source, notes)
    magic, _ = machines.next()
    if magic != _MAGIC:
        raise FormatError(f"the magic number is {spelled(magic)}", offset=0, rule="Magic")
    version, at = machines.next()
    if version != _PROTOCOL:
        reason = f"the protocol is {spelled(version)}, not {_PROTOCOL}"
        raise FormatError(reason, offset=at, rule="Protocol")
    info, _ = machines.next()
    if type(info) is Pairs and ("little_endian", False) in info.items():
        notes.add("it was written on a big-endian machine; storages are little-endian", "the file")
    value, base = machines.next()
    persistent, nbytes = machines.persistent, machines.at - base
    keys, at = machines.next()
    if type(keys) is not list or any(type(key) not in {str, int} for key in keys):
        raise FormatError(f"the keys of storages are {spelled(keys)}", offset=at, rule="Keys")
    kinds: dict[str, Storage] = {}
    for record in persistent:
        storage = storage_of(record)
        if storage is not None:
            kinds.setdefault(storage.key, storage)
    regions, end = _storages(source, machines.at, [str(key) for key in keys], kinds)
    _check_end(source, end, notes)

    def place(key: str) -> Region:
        if key not in regions:
            raise FormatError(f"no storage has the key {shown(key)}", rule="Storage")
        return regions[key]

    return FileContents(str(version), value, place, nbytes, base)


def _check_end(source: Readable, end: int, notes: kit.Notes) -> None:
    """Raise `FormatError` if another checkpoint follows the last storage; note other bytes."""
    if end < source.size:
        following = bytes(source.read(end, min(64, source.size - end)))
        if is_legacy(following) or following.startswith(b"PK\3\4"):
            raise kit.joined_files(end)
        reason = f"{source.size - end} bytes follow the last storage, and are ignored; "
        notes.add(reason + "the tensors are intact", f"byte {end}")


def _storages(
    source: Readable, at: int, keys: list[str], kinds: Mapping[str, Storage]
) -> tuple[dict[str, Region], int]:
    """Return the storages by key, with a problem if they are cut off the file, and their end."""
    cursor, regions = kit.Cursor(source, at), {}
    sizes = [s.numel * itemsize_of(s.dtype) for s in map(kinds.get, keys) if s and s.dtype]
    end = at + sum(sizes) + len(sizes) * _COUNT.size
    for position, key in enumerate(keys):
        kind, at = kinds.get(key), cursor.at
        if kind is None or kind.dtype is None:
            reason = f"the storage {shown(key)} has an unknown type, and thus an unknown size"
            raise UnsupportedError(reason, offset=at, rule="Storage")
        is_cut = cursor.left < _COUNT.size
        count = kind.numel if is_cut else cursor.number(_COUNT, "the size of a storage")
        if key in regions or count != kind.numel:
            reason = f"storage {position} has {count} elements, not {kind.numel}"
            raise FormatError(reason, offset=at, rule="Storage")
        nbytes = count * itemsize_of(kind.dtype)
        problem = None
        if is_cut or nbytes > cursor.left:
            problem = kit.cut_error(source.size, end, cursor.at)
        regions[key] = Region(cursor.at, nbytes, nbytes, problem=problem)
        cursor.skip(nbytes if problem is None else cursor.left, f"storage {position}")
    return regions, cursor.at


class _Chain:
    """A reader of consecutive pickles of unknown sizes."""

    def __init__(self, source: Readable, notes: kit.Notes) -> None:
        self._source, self._notes = source, notes
        self._data = b""
        self.at = 0
        self.persistent: list[Any] = []

    def next(self) -> tuple[Any, int]:
        """Return the value of the next pickle, and its offset."""
        start, size = self.at, self._source.size
        step = _STEP
        while True:
            machine = Machine(self._data, start)
            try:
                value = machine.run()
            except TruncatedError:
                if len(self._data) >= min(size, LARGEST):
                    raise
                more = min(size, len(self._data) + step)
                self._data = bytes(self._source.read(0, more))
                step *= 4
            else:
                self.at, self.persistent = machine.at, machine.persistent
                self._notes.add_code(machine.uses.executes, machine.uses.imports)
                return value, start
