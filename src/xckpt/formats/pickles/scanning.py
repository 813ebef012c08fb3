"""The code in pickles whose values are not read: of other programs, in arrays and in archives."""

from __future__ import annotations

import re
import zlib
from contextlib import suppress
from itertools import islice
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, FormatError
from xckpt.formats import archive, kit
from xckpt.formats.pickles.executing import BYTES_OF_TORCH
from xckpt.formats.pickles.machine import Machine
from xckpt.formats.pickles.records import Call, Persistent, dict_of, items_of, name_of, sizes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from xckpt.readable import Readable

LARGEST = 256 << 20  # bytes of a pickle
# Archives in archives, pickles one after another, and decoded bytes of an archive in an archive.
_DEEPEST, _MOST_PICKLES, _LARGEST_INNER = 3, 1000, 64 << 20
_PICKLES = (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")
_ZIP, _NUMPY = b"PK\3\4", b"\x93NUMPY"
_SUFFIXES = (".pkl", ".pickle")
# A local header of a zip archive: method, stored bytes, bytes of the name and of extra fields.
_HEADER = re.compile(rb"PK\x03\x04.{4}(.{22})", re.DOTALL)
_SIZES = Struct("<H8xI4xHH")
# Of gzip, bzip2, xz, lzma and zlib, which joblib and pandas read.
COMPRESSED = re.compile(rb"\x1f\x8b|BZh[1-9]1AY&SY|\xfd7zXZ\0|\]\0\0|x[\x01\x5e\x9c\xda]")
_STEP = 1 << 16  # bytes that are decompressed at a time
_TAR_BLOCK, _MOST_MEMBERS = 512, 1000
# A pickle, or the name of a function as old protocols have it.
_BEGINS = re.compile(rb"\x80[\2-\5]|c[A-Za-z_][\w.]{0,99}\n[A-Za-z_]\w{0,99}\n")
_ARRAYS = {
    "joblib.numpy_pickle.NumpyArrayWrapper",
    "sklearn.externals.joblib.numpy_pickle.NumpyArrayWrapper",
}
_CODE = re.compile(r"[<>|=]?([a-zA-Z])([0-9]{0,9})")


def scan(read: Callable[[str], bytes], nbytes: int, label: str, notes: kit.Notes) -> None:
    """Add the code in the pickles of a member or a file to `notes`.

    A warning states that they cannot be examined. `read` takes the label for its errors.
    """
    try:
        if nbytes > LARGEST:
            raise FormatError(f"it has {nbytes} bytes, more than {LARGEST}")
        _scan(read(label), label, notes, 0)
    except CheckpointError as error:
        notes.executes += error.executes
        notes.add(f"code in its pickle cannot be examined: {error.reason}", label)


def scan_file(source: Readable, notes: kit.Notes) -> None:
    """Add the code in the pickles of a whole file to `notes`; see `scan`."""
    scan(lambda _: bytes(source.read(0, source.size)), source.size, source.name, notes)


def tar_members(source: Readable) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of the members of a tar archive; of a part, those in it."""
    at = 0
    for _ in range(_MOST_MEMBERS):
        header = bytes(source.read(at, _TAR_BLOCK)) if at + _TAR_BLOCK <= source.size else b""
        digits = header[124:136].strip(b" \0")
        if header[257:262] != b"ustar" or not digits.isdigit() or set(digits) & set(b"89"):
            return
        at, nbytes = at + _TAR_BLOCK, int(digits, 8)
        yield header[:100].rstrip(b"\0").decode("utf-8", "replace"), at, nbytes
        at += kit.aligned(nbytes, _TAR_BLOCK)


def _scan(data: bytes, label: str, notes: kit.Notes, level: int) -> None:
    if level > _DEEPEST:
        raise FormatError(f"archives are nested deeper than {_DEEPEST} levels")
    if data.startswith(_NUMPY):
        width = 2 if data[6:7] == b"\1" else 4
        at = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
        head = data[:at]
        if b"O" in head or b"obj" in head:
            _scan_pickles(data, at, label, notes, level)
    elif data.startswith(_ZIP):
        _scan_zip(data, label, notes, level)
    elif COMPRESSED.match(data) is not None:
        _scan(_decompressed(data), label, notes, level + 1)
    elif data[257:262] == b"ustar":
        for _, at, nbytes in tar_members(kit.Memory(label, data)):
            _scan_mixed(data[at : at + nbytes], label, notes, level + 1)
    else:
        _scan_pickles(data, 0, label, notes, level)


def _scan_zip(data: bytes, label: str, notes: kit.Notes, level: int) -> None:
    try:
        contents = [*archive.Archive(kit.Memory(label, data)).contents()]
    except CheckpointError:
        # Other programs may read it, and each another one of two members with the same name.
        for name, inner in _damaged_members(data):
            with suppress(CheckpointError):
                _scan_member(name, inner, label, notes, level)
        raise
    remaining = _LARGEST_INNER
    for member, content in contents:
        remaining -= member.nbytes
        if remaining < 0:
            raise FormatError(f"its members have more than {_LARGEST_INNER} bytes")
        _scan_member(member.name, content.whole(label), label, notes, level)


def _scan_member(name: str, data: bytes, label: str, notes: kit.Notes, level: int) -> None:
    is_pickle = _BEGINS.match(data) is not None or name.lower().endswith(_SUFFIXES)
    if is_pickle or data.startswith((_ZIP, _NUMPY)):
        _scan(data, label, notes, level + 1)


def _damaged_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents at all local headers, whatever the directory has."""
    room = _LARGEST_INNER
    for match in islice(_HEADER.finditer(data), _MOST_MEMBERS):
        method, stored, names, extra = _SIZES.unpack(match[1])
        name = data[match.end() : match.end() + names].decode("utf-8", "replace")
        at = match.end() + names + extra
        inner = data[at : at + min(stored or room, room)]
        if method == archive.DEFLATED:
            with suppress(zlib.error):
                inner = zlib.decompressobj(-15).decompress(inner, room)
        yield name, inner
        room -= len(inner)
        if room <= 0:
            return


def _scan_pickles(data: bytes, at: int, label: str, notes: kit.Notes, level: int) -> int:
    """Add the code of pickles one after another, and return where they end."""
    # Raise an error if the first one is damaged.
    first = at
    for _ in range(_MOST_PICKLES):
        machine = _Scanner(data, at, label, notes, level)
        try:
            machine.run()
        except CheckpointError as error:
            notes.executes += error.executes
            if at == first and data.startswith(_PICKLES, at):
                raise
            break
        notes.add_code(machine.uses.executes, machine.uses.imports)
        at = machine.at
    return at


def _scan_mixed(data: bytes, label: str, notes: kit.Notes, level: int) -> None:
    """Add the code of pickles between other bytes, as in the archives of old PyTorch."""
    at = 0
    for match in islice(_BEGINS.finditer(data), _MOST_PICKLES):
        if match.start() >= at:
            with suppress(CheckpointError):  # most are values that look like a pickle
                at = _scan_pickles(data, match.start(), label, notes, level)


def _decompressed(data: bytes) -> bytes:
    """Return the first bytes of compressed data, as far as it is intact."""
    pieces, room = [], _LARGEST_INNER
    with suppress(Exception):  # decoders have various errors, or are missing
        decoder, count = _decoder(data), 0
        for start in range(0, len(data), _STEP):
            chunk = data[start : start + _STEP]
            while chunk and room > 0 and count < _MOST_MEMBERS:
                pieces.append(decoder.decompress(chunk, room))
                room -= len(pieces[-1])
                chunk = decoder.unused_data if decoder.eof else b""
                if decoder.eof:
                    decoder, count = _decoder(data), count + 1
    return b"".join(pieces)


def _decoder(data: bytes) -> Any:
    if data.startswith(b"BZh"):
        import bz2  # Python may be built without it

        return bz2.BZ2Decompressor()
    if data.startswith((b"\xfd7zXZ", b"]\0\0")):
        import lzma

        return lzma.LZMADecompressor(memlimit=2 * _LARGEST_INNER)
    return zlib.decompressobj(47)  # gzip or zlib


class _Scanner(Machine):
    """An interpreter that continues after the arrays of joblib, and enters bytes of torch.save."""

    __slots__ = ("_label", "_level", "_notes", "_room")

    def __init__(self, data: bytes, at: int, label: str, notes: kit.Notes, level: int) -> None:
        super().__init__(data, at)
        self._label, self._notes, self._level = label, notes, level
        self._room = len(data)  # the same bytes may be called many times

    def call(self, function: Any, args: Any) -> None:
        """Push the record of a call."""
        if function == BYTES_OF_TORCH and type(args) is tuple and [*map(type, args)] == [bytes]:
            self._room -= len(args[0])
            with suppress(CheckpointError):
                if self._room >= 0:
                    _scan(args[0], self._label, self._notes, self._level + 1)
                    self.stack.append(Call(function, args, self.at - 1))
                    return
        super().call(function, args)

    def set_items(self, items: list[Any]) -> None:
        """Set items. Python also sets items of lists and storages, and continues."""
        if type(self.top()) not in {list, Persistent}:
            super().set_items(items)

    def build(self) -> None:
        """Set the state of an instance, and skip the values that follow an array of joblib."""
        super().build()
        wrapper = self.stack[-1]
        if type(wrapper) is not Call or name_of(wrapper) not in _ARRAYS:
            return
        state = dict_of(items_of(wrapper.state))
        dtype, shape = state.get("dtype"), sizes_of(state.get("shape"))
        code = dtype.args[0] if type(dtype) is Call and dtype.args else None
        match = _CODE.fullmatch(code) if type(code) is str else None
        if match is None or not all(type(size) is int and size >= 0 for size in shape):
            raise self.broken("an array of joblib has an unknown type", "Joblib")
        if match[1] in "OV" and self.data.startswith(_PICKLES, self.at):
            if self._level >= _DEEPEST:
                raise self.broken(f"arrays are nested deeper than {_DEEPEST} levels", "Joblib")
            objects = _Scanner(self.data, self.at, self._label, self._notes, self._level + 1)
            objects.uses = self.uses
            objects.run()
            self.at = objects.at
            return
        if state.get("numpy_array_alignment_bytes") is not None:
            self.take(self.take(1)[0])
        nbytes = prod(shape) * int(match[2] or 1) * (4 if match[1] == "U" else 1)
        if nbytes > len(self.data) - self.at:
            raise self.broken(f"an array of joblib has {nbytes} bytes", "Truncated")
        self.at += nbytes
