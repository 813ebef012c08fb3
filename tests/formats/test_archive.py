"""Zip archives that Python's own module reads and writes, and hostile ones."""

from __future__ import annotations

import io
import zipfile
import zlib
from struct import pack
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sources import CountingSource
from xckpt.errors import CheckpointError, FormatError, UnsupportedError
from xckpt.formats import archive
from xckpt.formats.plan import WantedPart, Written
from xckpt.storage import open_source

if TYPE_CHECKING:
    from pathlib import Path

    from xckpt.index import Part

TEXT = b"some text, some more text, and yet more text " * 40


def zipped(
    *members: tuple[str, bytes], method: int = zipfile.ZIP_STORED, note: bytes = b""
) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as writer:
        for name, data in members:
            writer.writestr(name, data)
        writer.comment = note
    return file.getvalue()


def heads(data: bytes, nbytes: int = 10) -> dict[str, tuple[bytes, Part]]:
    """Read the first bytes of all members, and what describes the rest."""
    return {
        member.name: (content.take(min(nbytes, member.nbytes), "a head"), content.rest())
        for member, content in archive.Archive(CountingSource(data)).contents()
    }


def refused(data: bytes, rule: str) -> FormatError:
    with pytest.raises(FormatError) as caught:
        heads(data)
    assert caught.value.rule == rule
    return caught.value


@pytest.mark.parametrize("note", [b"", b"PK\5\6" * 9, b"x" * 65535])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_heads_and_remainders_of_members(method: int, note: bytes) -> None:
    members = {"a/b": TEXT, "größe": b"", "z": TEXT[:7]}
    members_read = heads(zipped(*members.items(), method=method, note=note))
    assert list(members_read) == list(members)
    for name, data in members.items():
        head, remainder = members_read[name]
        assert head == data[:10]
        assert remainder.shape == (len(data) - len(head),)
        assert remainder.digest == (f"crc32:{zlib.crc32(data[10:]):08x}" if data else None)


def test_remaining_members_are_at_their_offsets() -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        data = zipped(("w", TEXT), method=method)
        [(_, remainder)] = heads(data).values()
        stored = data[remainder.offset : remainder.offset + remainder.nbytes]
        decoded = stored if remainder.encoding is None else zlib.decompress(stored, -15)
        assert decoded[remainder.skip :] == TEXT[10:]


def test_members_and_archives_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lower limit Python writes small files as it does large ones."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 20)
    members = heads(zipped(("a", TEXT), ("b", TEXT[:5]), ("c", TEXT)))
    assert {name: head for name, (head, _) in members.items()} == {
        "a": TEXT[:10],
        "b": TEXT[:5],
        "c": TEXT[:10],
    }


def test_large_members_are_written(tmp_path: Path) -> None:
    sizes = [3 << 30, 5 << 30, 7]
    new = [
        archive.NewMember(f"w{n}", f"w{n}", b"front", WantedPart("uint8", (size,), size))
        for n, size in enumerate(sizes)
    ]
    plan = archive.plan(new, alignment=64)
    digest = f"crc32:{zlib.crc32(bytes(7)):08x}"
    written = {
        (planned.tensor, "data"): Written(planned.offset or 0, planned.part.nbytes, digest)
        for planned in plan.parts
    }
    assert all((planned.offset or 0) % 64 == 0 for planned in plan.parts)
    path = tmp_path / "large.zip"
    with path.open("wb") as file:  # mostly a hole
        for literal in plan.finish(written):
            file.seek(literal.offset or 0)
            file.write(literal.data)
    with zipfile.ZipFile(path) as reader:
        assert [info.file_size for info in reader.infolist()] == [size + 5 for size in sizes]
        assert [reader.open(info).read(5) for info in reader.infolist()] == [b"front"] * 3
    results = [
        (m, c.take(5, "front"), c.rest()) for m, c in archive.Archive(open_source(path)).contents()
    ]
    assert [member.nbytes for _, _, member in results] == sizes
    assert [member.offset for _, _, member in results] == [planned.offset for planned in plan.parts]


@given(st.binary(max_size=40), st.binary(max_size=300))
def test_checksums_are_joined(first: bytes, second: bytes) -> None:
    both = zlib.crc32(first + second)
    assert archive.joined_crc(zlib.crc32(first), zlib.crc32(second), len(second)) == both
    assert archive.joined_crc(zlib.crc32(first), both, len(second)) == zlib.crc32(second)


@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 28) + 1, (1 << 40) + 12345])
def test_checksums_of_large_members(nbytes: int) -> None:
    """Halves that are joined are the whole, as one that cannot be computed shows."""
    first, second, half = 0x12345678, 0x9ABCDEF0, nbytes // 2
    at_once = archive.joined_crc(first, second, nbytes)
    in_two = archive.joined_crc(archive.joined_crc(first, 0, half), second, nbytes - half)
    assert at_once == in_two


def test_encrypted_and_unknown_members_are_not_read() -> None:
    data = bytearray(zipped(("w", TEXT)))
    for at, message in (
        (data.rindex(b"PK\1\2") + 8, "encrypted"),
        (data.rindex(b"PK\1\2") + 10, "98"),
    ):
        changed = bytearray(data)
        changed[at] = 1 if message == "encrypted" else 98
        [(_, content)] = archive.Archive(CountingSource(bytes(changed))).contents()
        with pytest.raises(UnsupportedError, match=message):
            content.take(1, "a head")


def test_broken_rules_are_errors() -> None:
    data = zipped(("a", TEXT), ("b", TEXT[:5]))
    directory = data.index(b"PK\1\2")
    end = data.rindex(b"PK\5\6")
    refused(data[:-1], "EndRecord")
    refused(data + b"\0", "EndRecord")
    refused(b"", "EndRecord")
    for nbytes in range(4, 22):
        refused(b"PK\5\6".ljust(nbytes, b"\0"), "EndRecord")

    def changed(at: int, new: bytes) -> bytes:
        return data[:at] + new + data[at + len(new) :]

    refused(changed(end + 10, b"\xff\x7f"), "Directory")  # entries without end
    refused(changed(end + 16, pack("<I", len(data))), "Directory")
    refused(changed(end + 4, b"\1"), "EndRecord")
    refused(changed(directory, rb"PK\9\9"), "Directory")
    refused(changed(directory + 28, b"\xff\xff"), "Truncated")  # a name without end
    refused(changed(directory + 42, pack("<I", directory - 10)), "Member")
    refused(changed(0, b"PK\7\7"), "Member")
    refused(changed(30, b"x"), "Member")  # another name
    refused(changed(directory + 20, pack("<2I", 9999, 9999)), "Member")
    refused(changed(directory + 20, pack("<I", 3)), "Member")  # stored, of another size
    second = data.index(b"PK\1\2", directory + 1)
    same = changed(second + 46, b"a")
    assert refused(same, "Name").tensor == "a"
    assert refused(changed(second + 42, pack("<I", 0)), "Member").tensor == "b"


def test_members_that_overlap() -> None:
    inner = zipped(("inner", TEXT))
    data = bytearray(zipped(("outer", inner), ("inner", TEXT)))
    second = data.index(b"PK\1\2", data.rindex(b"outer"))
    data[second + 42 : second + 46] = pack("<I", data.index(inner))
    refused(bytes(data), "Overlap")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_any_byte_changed_and_cut_short(method: int) -> None:
    data = zipped(("a", TEXT), ("b", TEXT[:20]), method=method)
    for at in range(len(data)):
        for new in (0, 255, data[at] ^ 1):
            changed = data[:at] + bytes([new]) + data[at + 1 :]
            try:
                heads(changed)
            except CheckpointError as error:
                assert error.rule  # noqa: PT017
        refused(data[:at], "EndRecord")


def test_decoding_stops_at_the_stated_size() -> None:
    bomb = zlib.compress(bytes(1 << 26), 9, wbits=-15)
    data = zipped(("w", bomb))
    directory = data.index(b"PK\1\2")
    data = data[: directory + 10] + b"\x08" + data[directory + 11 :]
    [(_, content)] = archive.Archive(CountingSource(data)).contents()
    assert content.take(100, "a head") == bytes(100)
    with pytest.raises(FormatError, match="only 65132 follow"):
        content.take(1 << 26, "a head")
