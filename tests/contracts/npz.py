"""Files that numpy writes, and hostile ones."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

import numpy as np
import pytest

from tests.contracts.declared import Bad, Declared, Expected, Want

PLAIN: dict[str, Any] = {
    "w": np.arange(12, dtype="f4").reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "big": np.arange(5, dtype=">i8"),
    "half": np.array([np.nan, -0.0, 1.5], "f2"),
    "flags": np.array([True, False]),
    "complex": np.array([1 + 2j], "c8"),
    "wide": np.array([1 + 2j], ">c16"),
    "bytes": np.arange(3, dtype="u1"),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), "i2"),
    "layers.0/größe": np.ones((2, 2), "u4"),
}
UNREAD: dict[str, Any] = {
    "objects": np.array([{"never": "unpickled"}, None], object),
    "texts": np.array(["ab", "c"]),
    "dates": np.array(["2024-01-01"], "M8[D]"),
    "records": np.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]),
    "extended": np.zeros(2, "f2").astype(np.longdouble),
}


def archive(write: Any, arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    write(file, **arrays)
    return file.getvalue()


def single(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def zipped(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as writer:
        for name, data in members:
            writer.writestr(name, data)
    return file.getvalue()


def head(text: str | bytes, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    """Write a single array with any head."""
    text = text.encode("latin-1") if isinstance(text, str) else text
    size = "<H" if version[0] == 1 else "<I"
    return b"\x93NUMPY" + version + struct.pack(size, len(text)) + text + data


def described(**changes: Any) -> bytes:
    """Write four bytes of data with a contradicting head."""
    fields = {"descr": "<f4", "fortran_order": False, "shape": (1,)} | changes
    return head(repr(fields), bytes(4))


NAMES = {"x": single(np.zeros(1)), "x.npy": single(np.ones(1)), "y": single(np.ones(2))}
GOOD: dict[str, tuple[bytes, dict[str, Any]]] = {
    "stored": (archive(np.savez, PLAIN | UNREAD), PLAIN | dict.fromkeys(UNREAD)),
    "deflated": (archive(np.savez_compressed, PLAIN | UNREAD), PLAIN | dict.fromkeys(UNREAD)),
    "positional": (archive(lambda file: np.savez(file, np.ones(3)), {}), {"arr_0": np.ones(3)}),
    "no arrays": (zipped(("a.npy", single(np.ones(1)))), {"a": np.ones(1)}),
    "names": (
        zipped(*NAMES.items(), ("z.npy.npy", single(np.zeros(2)))),
        {"x": np.zeros(1), "x.npy": np.ones(1), "y": np.ones(2), "z.npy": np.zeros(2)},
    ),
    "one": (single(PLAIN["fortran"]), {"arr_0": PLAIN["fortran"]}),
    "one of version 2": (single(PLAIN["w"], (2, 0)), {"arr_0": PLAIN["w"]}),
    "one of version 3": (single(PLAIN["big"], (3, 0)), {"arr_0": PLAIN["big"]}),
    "one without axes": (single(PLAIN["scalar"]), {"arr_0": PLAIN["scalar"]}),
    "one of objects": (single(UNREAD["objects"]), {"arr_0": None}),
    "several": (
        b"".join(single(PLAIN[name]) for name in ("w", "fortran", "scalar")),
        {"arr_0": PLAIN["w"], "arr_1": PLAIN["fortran"], "arr_2": PLAIN["scalar"]},
    ),
    "one by Python 2": (
        head("{'descr': '<f4', 'fortran_order': False, 'shape': (1L, 2L), }\n", bytes(8)),
        {"arr_0": np.zeros((1, 2), "f4")},
    ),
    "one by others": (
        head('{"shape":(2,),"fortran_order":False,"descr":"<i1"}', b"\1\2"),
        {"arr_0": np.array([1, 2], "i1")},
    ),
}
WARNS = {
    "other members": (zipped(("a.npy", single(np.ones(1))), ("README", b"?")), {"a": np.ones(1)}),
    "more after it": (single(np.ones(1)) + b"more", {"arr_0": np.ones(1)}),
}


def bomb() -> bytes:
    """Return a few bytes with a claimed size of 2 GiB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as writer:
        writer.writestr("w.npy", described(shape=(1 << 29,)))
    data = bytearray(file.getvalue())
    size = len(described(shape=(1 << 29,))) - 4 + (1 << 31)
    at = data.rindex(b"PK\1\2") + 24
    data[at : at + 4] = struct.pack("<I", size)
    return bytes(data)


def flipped() -> bytes:
    """Return an archive whose elements contradict the checksum."""
    data = bytearray(archive(np.savez, {"w": np.arange(100, dtype="f4")}))
    at = data.index(np.float32(50).tobytes())
    data[at] ^= 1
    return bytes(data)


def method(number: int, flags: int = 0) -> bytes:
    data = bytearray(archive(np.savez, {"w": np.ones(3), "v": np.ones(3)}))
    at = data.index(b"PK\1\2")
    data[at + 8 : at + 12] = struct.pack("<2H", flags, number)
    return bytes(data)


TWO = zipped(("a.npy", single(np.ones(1))), ("b.npy", single(np.ones(1))))
BAD: dict[str, tuple[bytes, str]] = {
    "bomb": (bomb(), "read:w"),
    "flipped": (flipped(), "read:w"),
    "encrypted": (method(0, 1), "read:w"),
    "unknown method": (method(14), "read:w"),
    # The header has its shape: like any file that was cut, it opens.
    "too few elements": (described(shape=(2,)), "read:arr_0"),
    "negative": (described(shape=(-1,)), "open"),
    "true as a size": (described(shape=(True,)), "open"),
    "a list as a shape": (described(shape=[1]), "open"),
    "a shape too large": (described(shape=(1 << 62, 0)), "open"),
    "a size too large": (described(shape=(1 << 62, 1 << 62)), "open"),
    "65 axes": (described(shape=(1,) * 65), "open"),
    "order": (described(fortran_order=1), "open"),
    "another key": (described(more=1), "open"),
    "type": (described(descr="f4"), "read:arr_0"),
    "native types": (described(descr="=f4"), "read:arr_0"),
    "type of another size": (described(descr="<f3"), "read:arr_0"),
    "no dictionary": (head("[]"), "open"),
    "a call": (head("{'descr': open('x'), 'fortran_order': False, 'shape': ()}"), "open"),
    "an operator": (head("{'descr': '<f4', 'fortran_order': False, 'shape': (9**9**9,)}"), "open"),
    "a set of keys": (head("{'descr', 'fortran_order', 'shape'}"), "open"),
    "a key that is a list": (head("{[]: 1, 'fortran_order': False, 'shape': ()}"), "open"),
    "deep": (head("(" * 60_000), "open"),
    "signs": (head("-" * 60_000), "open"),
    "digits that are none": (head("{'descr': '<f4', 'shape': (" + "1" * 60 + "!"), "open"),
    "digits": (described(shape=(10**4000,)), "open"),
    "not text": (head(b"\xff" * 20, version=b"\3\0"), "open"),
    "no end of a text": (head("{'descr': '<f4"), "open"),
    "other bytes after several": (single(np.ones(1)) * 2 + bytes(64), "open"),
    "several, cut": ((single(np.ones(1)) * 2)[:-4], "read:arr_1"),
    "several, cut in a head": ((single(np.ones(1)) * 2)[:-40], "read:arr_1"),
    "a head without end": (b"\x93NUMPY\2\0\xff\xff\xff\x7f", "read:arr_0"),
    "a later version": (head("{}", version=b"\4\0"), "read:arr_0"),
    "duplicates": (
        zipped(("a.npy", single(np.ones(1))), ("b.npy", single(np.ones(1)))).replace(
            b"b.npy", b"a.npy"
        ),
        "open",
    ),
    "no array": (zipped(("a.npy", b"something else, of some length")), "open"),
}


class Npz(Declared):
    def good(self) -> list[Any]:
        files = GOOD | WARNS
        return [pytest.param(data, id=label) for label, (data, _) in files.items()]

    def expected(self, path: Any) -> Expected:
        label, arrays = next((n, a) for n, (d, a) in (GOOD | WARNS).items() if d == path)
        tensors = {n: Want(None if a is None else native(a)) for n, a in arrays.items()}
        stored = {n: a.tobytes() for n, a in arrays.items() if a is not None and a.dtype.isnative}
        return Expected(tensors, stored, warns=label in WARNS)

    def bad(self) -> list[Any]:
        return [pytest.param(data, id=label) for label, (data, _) in BAD.items()]

    def verdict(self, path: Any) -> Bad:
        return Bad(path, next(failure for data, failure in BAD.values() if data == path))

    def small(self) -> dict[str, bytes]:
        arrays = {"w": np.ones((2, 3)), "v": np.arange(4, dtype=">i4")}
        return {
            **super().small(),
            "stored": archive(np.savez, arrays),
            "deflated": archive(np.savez_compressed, arrays),
            "one": single(arrays["w"]),
        }


def native(array: Any) -> Any:
    return array.astype(array.dtype.newbyteorder("="))


DECLARED = Npz(
    name="npz",
    names_problems=False,
    may_be_cut=True,  # a single array
    save_options=[{}, {"encoding": {"*": {"compression": "deflate"}}}],
)
