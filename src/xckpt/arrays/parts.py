"""Bytes of a part: raw, decompressed, or some frames of it; digests checked as asked."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from xckpt.errors import CheckpointWarning, FormatError, UnsupportedError
from xckpt.storage import digests, encodings
from xckpt.storage.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Hashable

    from xckpt.index import Part
    from xckpt.storage import Source

__all__ = ["PartReader"]

# A table is read once, not for each of the chunks that need it.
_tables: Pool[encodings.SeekTable] = Pool(limit=256)

# Parts whose digests this process has checked; a part is hashed once however many tasks read it.
_verified: set[Hashable] = set()
_verifying = tuple(threading.Lock() for _ in range(64))


@dataclass(frozen=True, slots=True)
class PartReader:
    """The decoded bytes of one part of a tensor; pickles by reference.

    Parameters
    ----------
    source : Source
        The file that holds the part.
    part : Part
        Where and how it is stored.
    verify : bool or None
        True checks the digest once per process before the first use; None checks that of a
        compressed part whenever all of it is decoded; False never.
    """

    source: Source
    part: Part
    verify: bool | None = None

    def read(self, start: int, stop: int, nbytes: int) -> memoryview:
        """Give the decoded bytes from `start` to `stop`.

        Parameters
        ----------
        start, stop : int
            Half-open range in the decoded bytes.
        nbytes : int
            Size of all decoded bytes; a part that decodes to another size is an error.

        Returns
        -------
        memoryview
            A view of the memory map for a raw part of a mapped file; writable or not, it must
            not be written to.

        Raises
        ------
        FormatError
            If the bytes are not there, do not decode, or the digest is malformed.
        IntegrityError
            If the digest disagrees.
        UnsupportedError
            If the encoding is not known.
        """
        part = self.part
        if part.digest is not None and self.verify is not False:
            digests.parse(part.digest)  # a malformed one is an error even where it is not checked
            if self.verify:
                self._verify_once(nbytes)
        if part.encoding is None:
            if part.nbytes != nbytes:
                raise FormatError(
                    f"a part has {part.nbytes} bytes, but {nbytes} are needed",
                    offset=part.offset,
                    rule="LayoutData",
                )
            if part.inline is not None:
                return memoryview(part.inline)[start:stop]
            return self.source.view(part.offset + start, stop - start)
        if part.encoding == "zstd":
            return self._read_zstd(start, stop, nbytes)
        if part.encoding == "zstd-seekable":
            return self._read_seekable(start, stop, nbytes)
        raise UnsupportedError(f"encoding {part.encoding!r} is not known", offset=part.offset)

    def stored(self) -> memoryview:
        """Give all bytes as they are stored."""
        if self.part.inline is not None:
            return memoryview(self.part.inline)
        return self.source.view(self.part.offset, self.part.nbytes)

    def count_nbytes(self, limit: int) -> int:
        """Find the decoded size of a compressed part by decoding it.

        Parameters
        ----------
        limit : int
            The largest size that makes sense, in bytes.

        Returns
        -------
        int
            Size in bytes; memory use does not depend on it.

        Raises
        ------
        FormatError
            If it does not decode, or to more than `limit`.
        """
        return encodings.decompressed_nbytes(self.stored(), limit)

    def _read_zstd(self, start: int, stop: int, nbytes: int) -> memoryview:
        stored = self.stored()
        if (start, stop) != (0, nbytes):
            return encodings.decompress_prefix(stored, stop)[start:]
        decoded = encodings.decompress(stored, nbytes)
        self._check_decoded(stored, decoded)
        return decoded

    def _read_seekable(self, start: int, stop: int, nbytes: int) -> memoryview:
        part = self.part
        key = (self.source.name, self.source.identity, part.offset, part.nbytes, nbytes)
        table = _tables.get(
            key,
            lambda: encodings.read_seek_table(self.source.view, part.offset, part.nbytes, nbytes),
        )
        decoded = encodings.read_frames(self.source.view, part.offset, table, start, stop)
        if (start, stop) == (0, nbytes):
            self._check_decoded(None, decoded)
        return decoded

    def _check_decoded(self, stored: memoryview | None, decoded: memoryview) -> None:
        """Check the digest of what was just decoded, unless asked not to or done before."""
        if self.part.digest is None or self.verify is not None:
            return
        if not digests.is_known(self.part.digest):
            return
        if self.part.digest_of == "decoded":
            digests.check(self.part.digest, decoded)
        else:
            digests.check(self.part.digest, self.stored() if stored is None else stored)

    def _verify_once(self, nbytes: int) -> None:
        part = self.part
        key = (self.source.name, self.source.identity, part)
        with _verifying[hash(key) % len(_verifying)]:
            if key in _verified:
                return
            self._verify(cast("str", part.digest), nbytes)
            _verified.add(key)

    def _verify(self, digest: str, nbytes: int) -> None:
        if not digests.is_known(digest):
            text = f"{self.source.name}: byte {self.part.offset}: {digest!r} cannot be verified"
            warnings.warn(text, CheckpointWarning, stacklevel=2)
        elif self.part.digest_of == "stored" or self.part.encoding is None:
            digests.check(digest, self.stored())
        else:
            unverified = PartReader(self.source, self.part, verify=False)
            digests.check(digest, unverified.read(0, nbytes, nbytes))
