"""Digests of bytes, computed and compared; their text in files is ``algorithm:value``.

==========  =============================  ==========================================
algorithm   value                          hash function
==========  =============================  ==========================================
``crc32``   8 hex digits                   CRC-32, as in zip files
``crc32c``  ``0x`` and 1 to 8 hex digits   CRC-32C (Castagnoli)
``sha256``  64 hex digits                  SHA-256
``xxh3``    16 hex digits, lower case      XXH3 with 64 bits and seed 0, big-endian
``blake3``  64 hex digits                  BLAKE3 with 256 bits
==========  =============================  ==========================================
"""

from __future__ import annotations

import hashlib
import re
import warnings
import zlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.errors import FormatError, IntegrityError, UnsupportedError, shown
from xckpt.storage.limits import Locks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# The libraries release the GIL while they hash. Ctrl-C takes effect after one block.
_BLOCK_NBYTES = 8 << 20

_FORM = re.compile(r"([a-z0-9_]+):(.+)", re.DOTALL)


class _Crc:
    """A CRC of 32 bits with the interface of `hashlib`, big-endian."""

    def __init__(self, extend: Callable[[memoryview, int], int]) -> None:
        self._extend = extend
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = self._extend(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


_importing = Locks(1)


def _crc32c() -> _Crc:
    # Without its C extension, the package warns on import that it is slow. Users who open a file
    # cannot change that, and the import would fail where warnings are errors.
    with _importing.of(None), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        from google_crc32c import extend
    # The C extension refuses memoryviews (googleapis/python-crc32c), but takes arrays.
    return _Crc(lambda data, value: extend(value, np.frombuffer(data, np.uint8)))


# By algorithm, the form of a value and a function that returns a new hash object.
_ALGORITHMS: dict[str, tuple[re.Pattern[str], Callable[[], Any]]] = {
    "crc32": (re.compile("[0-9a-fA-F]{8}"), lambda: _Crc(zlib.crc32)),
    "crc32c": (re.compile("0[xX][0-9a-fA-F]{1,8}"), _crc32c),
    "sha256": (re.compile("[0-9a-fA-F]{64}"), hashlib.sha256),
    "xxh3": (re.compile("[0-9a-f]{16}"), lambda: import_module("xxhash").xxh3_64()),
    "blake3": (re.compile("[0-9a-fA-F]{64}"), lambda: import_module("blake3").blake3()),
}


def parse(digest: str) -> tuple[str, bytes | None]:
    """Split a digest into its algorithm and its value."""
    form = _FORM.fullmatch(digest)
    if form is None:
        raise FormatError(f"digest {shown(digest)} is not algorithm:value", rule="Digest")
    algorithm, text = form[1], form[2]
    if algorithm not in _ALGORITHMS:
        return algorithm, None
    if _ALGORITHMS[algorithm][0].fullmatch(text) is None:
        raise FormatError(f"digest {shown(digest)} is not a {algorithm} value", rule="Digest")
    return algorithm, bytes.fromhex(text[2:].zfill(8) if algorithm == "crc32c" else text)


def is_known(digest: str) -> bool:
    """Return whether the algorithm of a digest is supported."""
    return digest.partition(":")[0] in _ALGORITHMS


class Hasher:
    """Computes the digest of bytes that arrive in several blocks."""

    __slots__ = ("_state", "algorithm")

    def __init__(self, algorithm: str) -> None:
        if algorithm not in _ALGORITHMS:
            raise UnsupportedError(
                f"digest algorithm {shown(algorithm)} is unsupported",
                rule="Digest",
                hint=f"Supported are {', '.join(_ALGORITHMS)}",
            )
        self.algorithm = algorithm
        self._state = _ALGORITHMS[algorithm][1]()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Hash more bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _BLOCK_NBYTES):
            self._state.update(view[start : start + _BLOCK_NBYTES])

    def value(self) -> bytes:
        """Return the digest of all bytes so far, big-endian."""
        value: bytes = self._state.digest()
        return value

    def digest(self) -> str:
        """Return the digest of all bytes so far as ``algorithm:value``."""
        value = self.value().hex()
        return f"{self.algorithm}:" + (
            f"0x{value.upper()}" if self.algorithm == "crc32c" else value
        )


class PassingBytes:
    """An iterator of blocks of known size, which compares their digest after the last block."""

    __slots__ = ("_blocks", "nbytes")

    def __init__(
        self, blocks: Iterable[memoryview], nbytes: int, digest: str | None = None
    ) -> None:
        self.nbytes = nbytes
        self._blocks = iter(blocks) if digest is None else checked(digest, blocks)

    def __len__(self) -> int:
        return self.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        return self._blocks

    def finish(self) -> None:
        """Read the remaining blocks, and compare the digest."""
        for _ in self._blocks:
            pass


def check(digest: str, data: bytes | bytearray | memoryview) -> None:
    """Raise `IntegrityError` if bytes do not match a digest."""
    for _ in checked(digest, [memoryview(data)]):
        pass


def checked(digest: str, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield all blocks that a digest covers; raise `IntegrityError` if they do not match it."""
    algorithm, expected = parse(digest)
    hasher = Hasher(algorithm)
    for block in blocks:
        hasher.update(block)
        yield block
    if hasher.value() != expected:
        raise IntegrityError(
            f"the bytes have the digest {hasher.digest()}, but the file states {digest}",
            rule="Digest",
        )
