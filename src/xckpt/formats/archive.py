"""Zip archives, for formats that store each tensor as a member: NumPy and PyTorch.

A member is a local header and its content. The central directory at the end of the file repeats the
headers of all members; only its sizes are reliable. Fields, little-endian::

    local header    "PK\\3\\4"  version, flags, method, time, date u16; crc32, stored size, size
                    u32; lengths of name and extra u16; name, extra; content
    central entry   "PK\\1\\2"  versions of writer and reader, flags, method, time, date u16; crc32,
                    stored size, size u32; lengths of name, extra, comment, disk, attributes u16;
                    attributes, offset of the local header u32; name, extra, comment
    extra data      "PK\\6\\x08"  length u32; any bytes; optional, before the central directory
    end             "PK\\5\\6"  disk, disk, entries, entries u16; size, offset of the directory u32;
                    length of comment u16, comment

A size, offset or count with all bits set stands for a number of 64 bits elsewhere (zip64): for an
entry in the extra field 1, for the end in the record "PK\\6\\6", whose offset is in the record
"PK\\6\\7" before the end. Local headers have other extra fields than the directory, since writers
use them as padding.

Specification: APPNOTE.TXT 6.3.10 of PKWARE.
"""

from __future__ import annotations

import zlib
from collections import Counter
from functools import cache, partial
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import FormatError, IntegrityError, UnsupportedError, shown
from xckpt.formats import kit
from xckpt.formats.plan import LiteralBytes, Plan, PlannedPart, WantedPart, Written
from xckpt.index import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xckpt.readable import Readable


STORED, DEFLATED = 0, 8
_ENCRYPTED, _UTF_8 = 1, 1 << 11  # of the flags
_MOST_INFLATED = 1032  # largest ratio of decoded to deflated bytes

_LOCAL = Struct("<4s5H3I2H")
_CENTRAL = Struct("<4s6H3I5H2I")
# The fields that are used: parsing only these is faster for 100,000 members.
_LOCAL_READ = Struct("<4s22x2H")
_CENTRAL_READ = Struct("<4s4x2H4x3I3H8xI")
_END = Struct("<4s4H2IH")
_LOCATOR_64 = Struct("<4sIQI")
_END_64 = Struct("<4sQ2H2I4Q")
_EXTRA = Struct("<2H")
_EXTRA_DATA, _EXTRA_MAGIC, _MOST_EXTRA_DATA = Struct("<4sI"), b"PK\6\x08", 64 << 20
_FULL_16, _FULL_32 = (1 << 16) - 1, (1 << 32) - 1
_DATE = 1 << 5 | 1  # 1980-01-01, as in numpy, so that files do not depend on the date
_ZIP_64, _PADDING = 1, 0xD935


class Member(NamedTuple):
    """An entry of the directory; `at` is the offset of the local header."""

    name: str
    method: int
    crc: int
    stored_nbytes: int
    nbytes: int
    at: int
    flags: int = _UTF_8
    comment: bytes = b""

    def check(self, at: int, *, is_whole: bool = True) -> None:
        """Raise an error if the content at offset `at` cannot be decoded, `is_whole` all of it."""
        if self.method == STORED and not self.flags & _ENCRYPTED:
            if self.stored_nbytes != self.nbytes:
                raise _broken(self, f"{self.stored_nbytes} bytes are stored of {self.nbytes}", at)
            return
        if self.flags & _ENCRYPTED:
            reason = "encrypted members are unsupported"
            raise UnsupportedError(reason, offset=at, rule="Method")
        if self.method != DEFLATED:
            reason = f"the compression method {self.method} is unsupported"
            raise UnsupportedError(reason, offset=at, rule="Method")
        if is_whole and self.nbytes > _MOST_INFLATED * (self.stored_nbytes + 1):
            reason = f"{self.stored_nbytes} bytes cannot decode to {self.nbytes} bytes"
            raise _broken(self, reason, at)


# --- reading --------------------------------------------------------------------------------------


def first_name(head: bytes) -> str:
    """Return the name of the first member from the first bytes of a file; "" if there is none."""
    if len(head) < _LOCAL.size or not head.startswith(b"PK\3\4"):
        return ""
    *_, nbytes, _ = _LOCAL.unpack_from(head)
    return head[_LOCAL.size : _LOCAL.size + nbytes].decode("utf-8", "replace")


class Archive:
    """A reader of an archive."""

    def __init__(self, source: Readable) -> None:
        self._source = source
        self._end = 0  # of the members visited so far
        #: Members in the order of the directory.
        self.members: list[Member] = []
        #: Offset of the directory.
        self.start = 0
        count, nbytes, self.start = _read_end(source)
        if self.start + nbytes > source.size or count * _CENTRAL.size > nbytes:
            reason = f"the directory has {count} entries in {nbytes} bytes, beyond the file's end"
            at = min(self.start, source.size)
            raise FormatError(reason, offset=at, rule="Directory")
        cursor = kit.Cursor(source, self.start)
        cursor.enter(nbytes, "the directory")
        self.members += [_read_entry(cursor) for _ in range(count)]
        counts = Counter(member.name for member in self.members)
        [(name, count)] = counts.most_common(1) or [("", 0)]
        if count > 1:
            reason = f"{count} members have the same name"
            raise FormatError(reason, offset=self.start, tensor=name, rule="Name")

    def places(self) -> Iterator[tuple[Member, int]]:
        """Yield the members and the offsets of their contents; raise an error if any overlap."""
        cursor, spans = kit.Cursor(self._source), []
        for member in self.members:
            at = _content_offset(cursor, member, self.start)
            spans.append((member.at, at + member.stored_nbytes, member.name))
            self._end = max(self._end, at + member.stored_nbytes)
            yield member, at
        for at, name, other in kit.find_overlaps(spans):
            reason = f"the member overlaps {shown(other)}"
            raise FormatError(reason, offset=at, tensor=name, rule="Overlap")

    def contents(self) -> Iterator[tuple[Member, Content]]:
        """Yield the members and their contents."""
        cursor = kit.Cursor(self._source)
        for member, at in self.places():
            yield member, Content(cursor, member, at)

    def extra_data(self) -> bytes:
        """Return the extra data, empty if there are none; only after visiting all members."""
        nbytes = self.start - self._end
        if not _EXTRA_DATA.size <= nbytes <= _MOST_EXTRA_DATA:
            return b""
        data = bytes(self._source.read(self._end, nbytes))
        head = _EXTRA_DATA.pack(_EXTRA_MAGIC, len(data) - _EXTRA_DATA.size)
        return data[len(head) :] if data.startswith(head) else b""


def _read_end(source: Readable) -> tuple[int, int, int]:
    """Return the number of entries in the directory, its size, and its offset."""
    origin = max(0, source.size - _END.size - _FULL_16)
    tail = bytes(source.read(origin, source.size - origin))
    at = tail.rfind(b"PK\5\6", 0, max(0, len(tail) - _END.size + 4))
    while at >= 0 and at + _END.size + _END.unpack_from(tail, at)[-1] != len(tail):
        at = tail.rfind(b"PK\5\6", 0, at)
    if at < 0:
        raise _without_end(tail, origin)
    _, disk, first, _, count, nbytes, start, _ = _END.unpack_from(tail, at)
    if disk or first not in {0, _FULL_16}:
        reason = "the archive is split into several files"
        raise FormatError(reason, offset=origin + at, rule="EndRecord")
    end = origin + at
    locator = end - _LOCATOR_64.size
    if locator >= 0 and (count == _FULL_16 or _FULL_32 in {nbytes, start}):
        magic, _, at, _ = _LOCATOR_64.unpack(source.read(locator, _LOCATOR_64.size))
        if magic == b"PK\6\7":
            if at + _END_64.size > locator:
                reason = f"the zip64 end record at byte {at} is not before its locator"
                raise FormatError(reason, offset=locator, rule="EndRecord")
            magic, *_, count, nbytes, start = _END_64.unpack(source.read(at, _END_64.size))
            if magic != b"PK\6\6":
                reason = f"the zip64 end begins {magic!r}"
                raise FormatError(reason, offset=at, rule="EndRecord")
    _check_start(source, nbytes, start, end)
    return count, nbytes, start


def _check_start(source: Readable, nbytes: int, start: int, end: int) -> None:
    """Raise `FormatError` if other bytes precede the archive, such as another archive."""
    # Offsets in an archive count from its own first byte, so that those of the last of several
    # archives would lead into the first one.
    record = end - _LOCATOR_64.size - _END_64.size  # which some writers add without need
    if record >= 0 and bytes(source.read(record, 4)) == b"PK\6\6":
        end = record
    more = end - nbytes - start
    if more > 0 and (not nbytes or bytes(source.read(end - nbytes, 4)) == b"PK\1\2"):
        raise kit.joined_files(more)


def _without_end(tail: bytes, origin: int) -> FormatError:
    """Return the error for an archive that does not end with its end record."""
    size = origin + len(tail)
    at = tail.rfind(b"PK\5\6", 0, max(0, len(tail) - _END.size + 4))
    if at >= 0:
        *_, nbytes, start, comment = _END.unpack_from(tail, at)
        end = origin + at + _END.size + comment
        # The end record of an archive within a member has other offsets.
        if start + nbytes == origin + at and end < size:
            reason = f"{size - end} bytes follow the archive, which ends at byte {end}"
            hint = f"Its members may be intact: cut the file to {end} bytes to read them"
            return FormatError(reason, offset=end, rule="EndRecord", hint=hint)
    reason = "the end record of the archive is missing"
    return FormatError(reason, offset=size, rule="EndRecord", hint=kit.TRUNCATED)


def _read_entry(cursor: kit.Cursor) -> Member:
    at = cursor.at
    fields = _CENTRAL_READ.unpack(cursor.take(_CENTRAL_READ.size, "an entry"))
    magic, flags, method, crc, stored, nbytes, name_nbytes, extra_nbytes, more, header = fields
    if magic != b"PK\1\2":
        raise FormatError(f"an entry begins {magic!r}", offset=at, rule="Directory")
    data = cursor.take(name_nbytes + extra_nbytes + more, "a name")
    try:
        name = data[:name_nbytes].decode("utf-8" if flags & _UTF_8 else "cp437")
    except UnicodeDecodeError as error:
        raise FormatError(f"a name is not UTF-8: {error}", offset=at, rule="Name") from error
    if _FULL_32 in (nbytes, stored, header):
        wide, sizes = _wide(data[name_nbytes : name_nbytes + extra_nbytes]), []
        for value in (nbytes, stored, header):
            if value == _FULL_32 and len(wide) >= 8:
                value, wide = int.from_bytes(wide[:8], "little"), wide[8:]  # noqa: PLW2901
            sizes.append(value)
        nbytes, stored, header = sizes
    comment = data[name_nbytes + extra_nbytes :]
    return Member(name, method, crc, stored, nbytes, header, flags, comment)


def _wide(extra: bytes) -> bytes:
    """Return the extra field with numbers of 64 bits."""
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, nbytes = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _ZIP_64:
            return extra[at : at + nbytes]
        at += nbytes
    return b""


def _content_offset(cursor: kit.Cursor, member: Member, end: int) -> int:
    """Return the offset of a member's content, which must lie before `end`."""
    if member.at > end - _LOCAL.size:
        reason = f"its local header at byte {member.at} is not before the directory at byte {end}"
        raise _broken(member, reason, end)
    cursor.at = member.at
    expected = member.name.encode("utf-8" if member.flags & _UTF_8 else "cp437")
    data = cursor.take(_LOCAL.size + len(expected), "a local header")
    magic, name_nbytes, extra_nbytes = _LOCAL_READ.unpack_from(data)
    name = data[_LOCAL.size :]
    if magic != b"PK\3\4" or name != expected or name_nbytes != len(expected):
        reason = f"its local header is {magic!r} of {shown(name.decode(errors='replace'))}"
        raise _broken(member, reason, member.at)
    at = cursor.at + int(extra_nbytes)
    if at + member.stored_nbytes > end:
        reason = f"its {member.stored_nbytes} bytes do not end before the directory at byte {end}"
        raise _broken(member, reason, member.at)
    return at


def _broken(member: Member, reason: str, offset: int) -> FormatError:
    return FormatError(reason, offset=offset, tensor=member.name, rule="Member")


class Content:
    """The content of a member at offset `at`, read from its beginning."""

    def __init__(self, cursor: kit.Cursor, member: Member, at: int) -> None:
        self._cursor, self._member = cursor, member
        self.at = at
        self._stored_left, self._left = member.stored_nbytes, member.nbytes
        self._inflater: Any = None  # on demand, since its window takes 32 KiB
        self._decoded = b""
        self._crc = 0

    def whole(self, label: str) -> bytes:
        """Read the whole content and verify its checksum."""
        member = self._member
        member.check(self.at)
        self._cursor.at = self.at
        content = self._cursor.take(member.stored_nbytes, label)
        if member.method == DEFLATED:
            try:
                content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, member.nbytes + 1)
            except zlib.error as error:
                raise self._broken(f"{label} does not decode: {error}") from error
        if len(content) != member.nbytes:
            raise self._broken(f"{label} does not decode to {member.nbytes} bytes")
        if member.crc and zlib.crc32(content) != member.crc:
            reason = f"{label} does not have the checksum {member.crc:08x}"
            raise IntegrityError(reason, offset=self.at, tensor=member.name, rule="Checksum")
        return content

    def take(self, nbytes: int, label: str) -> bytes:
        """Read exactly `nbytes` bytes; raise an error before allocating more than there are."""
        member = self._member
        member.check(self.at, is_whole=False)
        if nbytes > self._left:
            raise self._broken(f"{label} has {nbytes} bytes, but only {self._left} follow")
        self._cursor.at = self.at + member.stored_nbytes - self._stored_left
        if member.method == STORED:
            data = self._cursor.take(nbytes, label)
            self._stored_left -= nbytes
        else:
            data = self._inflate(nbytes, label)
        self._left -= nbytes
        self._crc = zlib.crc32(data, self._crc)
        return data

    def rest(self) -> Part:
        """Return the remaining bytes as a part, with their checksum if the archive has one."""
        member, nbytes = self._member, self._left
        crc = joined_crc(self._crc, member.crc, nbytes)
        digest = f"crc32:{crc:08x}" if member.crc else None
        if member.method != DEFLATED:
            at = self.at + member.stored_nbytes - self._stored_left
            return Part("uint8", (self._stored_left,), at, self._stored_left, digest=digest)
        skip = member.nbytes - nbytes
        stored = (self.at, member.stored_nbytes, "deflate", nbytes, digest)
        return Part("uint8", (nbytes,), *stored, "decoded", skip=skip)

    def _inflate(self, nbytes: int, label: str) -> bytes:
        self._inflater = self._inflater or zlib.decompressobj(-zlib.MAX_WBITS)
        while len(self._decoded) < nbytes:
            stored = self._cursor.take(min(self._stored_left, 512), label)
            self._stored_left -= len(stored)
            try:
                data = self._inflater.unconsumed_tail + stored
                decoded = self._inflater.decompress(data, nbytes - len(self._decoded))
            except zlib.error as error:
                raise self._broken(f"{label} does not decode: {error}") from error
            if not decoded and not self._stored_left:
                raise self._broken(f"the content ends within {label}")
            self._decoded += decoded
        inflated, self._decoded = self._decoded[:nbytes], self._decoded[nbytes:]
        return inflated

    def _broken(self, reason: str) -> FormatError:
        return _broken(self._member, reason, self.at)


# --- writing --------------------------------------------------------------------------------------


class NewMember(NamedTuple):
    """A member to write: the data of a tensor after the bytes `front`."""

    name: str
    tensor: str
    front: bytes
    part: WantedPart
    comment: bytes = b""


def plan(new: Sequence[NewMember], *, alignment: int, extra: bytes = b"") -> Plan:
    """Plan an archive; `extra` has the extra data, which other programs ignore."""
    # Uncompressed data are aligned, except after compressed data, whose size is unknown.
    if extra:
        if len(extra) > _MOST_EXTRA_DATA - _EXTRA_DATA.size:
            reason = f"the attributes have {len(extra)} bytes, more than {_MOST_EXTRA_DATA}"
            raise UnsupportedError(reason, rule="ExtraData", hint="Remove large ones")
        extra = _EXTRA_DATA.pack(_EXTRA_MAGIC, len(extra)) + extra
    planned, placed = [], []
    at: int | None = 0
    for new_member in new:
        part = new_member.part._replace(algorithm="crc32", digest_of="decoded")
        name = kit.check_text("the name", new_member.name, new_member.tensor).encode()
        if max(len(name), len(new_member.comment)) > _FULL_16:
            reason = "its name, or its names of axes, have 64 KiB or more"
            hint = "Rename it"
            raise UnsupportedError(reason, tensor=new_member.tensor, rule="Name", hint=hint)
        front = new_member.front
        if part.compression is not None:
            # The front becomes a stored block, which may precede deflated ones.
            size = len(front).to_bytes(2, "little")
            front = b"\0" + size + bytes(byte ^ 0xFF for byte in size) + front
        method = STORED if part.compression is None else DEFLATED
        nbytes = len(new_member.front) + part.nbytes
        member = Member(new_member.name, method, 0, 0, nbytes, at or 0, comment=new_member.comment)
        aligned = alignment if at is not None and method == STORED else 1
        header_nbytes = len(_local_header(member, len(front), aligned))
        gap = header_nbytes + len(front)
        planned.append(
            PlannedPart(new_member.tensor, "data", part, None if at is None else at + gap, gap)
        )
        placed.append(_PlacedMember(new_member, member, front, aligned, gap))
        at = at + gap + part.nbytes if at is not None and method == STORED else None
    return Plan((), tuple(planned), finish=partial(_finish, placed, extra))


class _PlacedMember(NamedTuple):
    """A member to write, with its header except for checksum and sizes."""

    new: NewMember
    member: Member
    front: bytes
    alignment: int
    gap: int  # bytes of the header and of the front


def _finish(
    placed: Sequence[_PlacedMember],
    extra: bytes,
    written: Mapping[tuple[str, str], Written],
) -> tuple[LiteralBytes, ...]:
    """Return the bytes with checksums and sizes: local headers, and the directory."""
    literals, members, end = [], [], 0
    for new, member, front, alignment, gap in placed:
        place = written[new.tensor, "data"]
        digest = int(str(place.digest).partition(":")[2], 16)
        crc = joined_crc(zlib.crc32(new.front), digest, new.part.nbytes)
        at, stored = place.offset - gap, len(front) + place.nbytes
        done = member._replace(crc=crc, stored_nbytes=stored, at=at)
        literals.append(LiteralBytes(at, _local_header(done, len(front), alignment) + front))
        members.append(done)
        end = place.offset + place.nbytes
    return (*literals, LiteralBytes(end, extra + _directory(members, end + len(extra))))


def _local_header(member: Member, front_nbytes: int, alignment: int) -> bytes:
    """Return the local header of a member, padded so that the data after its front are aligned."""
    name = member.name.encode()
    version, extra = 20, b""
    sizes = (member.nbytes, member.stored_nbytes)
    # Deflate may enlarge data, so the limit has a margin.
    if member.nbytes >= 1 << 31:
        version, extra = 45, b"".join(size.to_bytes(8, "little") for size in sizes)
        sizes, extra = (_FULL_32, _FULL_32), _EXTRA.pack(_ZIP_64, len(extra)) + extra
    nbytes = _LOCAL.size + len(name) + len(extra) + front_nbytes
    if padding := -(member.at + nbytes) % alignment:
        padding += 0 if padding >= _EXTRA.size else alignment
        extra += _EXTRA.pack(_PADDING, padding - _EXTRA.size) + bytes(padding - _EXTRA.size)
    fields = (version, _UTF_8, member.method, 0, _DATE, member.crc, *reversed(sizes))
    return _LOCAL.pack(b"PK\3\4", *fields, len(name), len(extra)) + name + extra


def _directory(members: Sequence[Member], start: int) -> bytes:
    """Return the directory, which begins at `start`, and the end of an archive."""
    written = []
    for member in members:
        name = member.name.encode()
        numbers = (member.nbytes, member.stored_nbytes, member.at)
        large = [number for number in numbers if number >= _FULL_32]
        extra = b"".join(number.to_bytes(8, "little") for number in large)
        extra = _EXTRA.pack(_ZIP_64, len(extra)) + extra if large else b""
        size, stored, at = (min(number, _FULL_32) for number in numbers)
        lengths = (len(name), len(extra), len(member.comment))
        fields = (20, 20, _UTF_8, member.method, 0, _DATE, member.crc, stored, size)
        entry = _CENTRAL.pack(b"PK\1\2", *fields, *lengths, 0, 0, 0, at)
        written.append(entry + name + extra + member.comment)
    entries, wide, count = b"".join(written), b"", len(members)
    nbytes = len(entries)
    if count >= _FULL_16 or start + nbytes >= _FULL_32:
        fields_64 = (_END_64.size - 12, 45, 45, 0, 0, count, count, nbytes, start)
        wide = _END_64.pack(b"PK\6\6", *fields_64)
        wide += _LOCATOR_64.pack(b"PK\6\7", 0, start + nbytes, 1)
    few, small, near = min(count, _FULL_16), min(nbytes, _FULL_32), min(start, _FULL_32)
    return entries + wide + _END.pack(b"PK\5\6", 0, 0, few, few, small, near, 0)


# --- checksums ------------------------------------------------------------------------------------

_POLYNOMIAL = 0xEDB88320


def joined_crc(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two consecutive ranges of bytes; the second one has `nbytes` bytes."""
    # The function is its own inverse in `second`, so it also removes a beginning from a checksum.
    return _product(_power(nbytes), first) ^ second


def _product(a: int, b: int) -> int:
    """Multiply two polynomials modulo the polynomial of CRC-32, bits reflected."""
    product, bit = 0, 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@cache
def _square(number: int) -> int:
    """Return x to the power of 2 to the `number`."""
    return 1 << 30 if not number else _product(_square(number - 1), _square(number - 1))


@cache
def _power(nbytes: int) -> int:
    """Return the factor of a checksum when `nbytes` zero bytes are appended."""
    power = 1 << 31
    for bit in range(nbytes.bit_length()):
        if nbytes >> bit & 1:
            power = _product(_square((bit + 3) & 31), power)
    return power
