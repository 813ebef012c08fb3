"""Digests in the pass: those that are written, and those that the source states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.errors import IntegrityError
from xckpt.storage import digests
from xckpt.writing.stored_data import StoredData, VerbatimData

if TYPE_CHECKING:
    from xckpt.index import Part
    from xckpt.writing.data import Data

__all__ = ["Hashing", "stated_digest"]


def stated_digest(data: Data | None) -> str | None:
    """Return the digest that is to be checked while a stored part is copied."""
    if not isinstance(data, StoredData | VerbatimData) or data.reader.verify is False:
        return None
    digest = data.reader.part.digest
    return digest if digest is not None and digests.is_known(digest) else None


class Hashing:
    """Makes the digest of a part while it is written, and checks that of its source.

    Parameters
    ----------
    data : Data or None
        Where the bytes come from.
    part : Part
        What is written, with the algorithm that it wants.
    """

    def __init__(self, data: Data | None, part: Part) -> None:
        self._data = data
        self._of_raw: list[digests.Hasher] = []
        self._of_stored: list[digests.Hasher] = []
        self._wanted: digests.Hasher | None = None
        self._wants_decoded = part.digest_of == "decoded" and part.encoding is not None
        if part.digest is not None:
            self._wanted = digests.Hasher(part.digest)
            if not self._wants_decoded:
                self._of_stored.append(self._wanted)
            elif not isinstance(data, VerbatimData):
                self._of_raw.append(self._wanted)
        self._stated = stated_digest(data)
        self._check: digests.Hasher | None = None
        if self._stated is not None and self._is_in_the_pass():
            self._check = digests.Hasher(digests.parse(self._stated)[0])
            self._of_raw.append(self._check)

    def _is_in_the_pass(self) -> bool:
        """Return whether the source's digest covers the very bytes that come from it."""
        if isinstance(self._data, VerbatimData):
            return self._data.reader.part.digest_of == "stored"
        source = self._source
        return source.encoding is None or source.digest_of == "decoded"

    @property
    def _source(self) -> Part:
        if not isinstance(self._data, StoredData | VerbatimData):
            raise TypeError(self._data)
        return self._data.reader.part

    def add_raw(self, block: Any) -> None:
        """Hash bytes before compression."""
        for hasher in self._of_raw:
            hasher.update(block)

    def add_stored(self, block: Any) -> None:
        """Hash bytes as they are written."""
        for hasher in self._of_stored:
            hasher.update(block)

    def finish(self) -> str | None:
        """Check the source, and give the digest that is wanted."""
        if isinstance(self._data, VerbatimData):
            self._hash_decoded(self._data)
        if self._check is not None and self._stated is not None:
            if self._check.value() != digests.parse(self._stated)[1]:
                raise _disagrees(self._check.digest(), self._stated, self._source.offset)
        elif self._stated is not None and isinstance(self._data, StoredData):
            digests.check(self._stated, self._data.reader.stored_blocks())
        if self._wanted is None:
            return None
        return f"{self._wanted.algorithm}:{self._wanted.value().hex()}"

    def _hash_decoded(self, data: VerbatimData) -> None:
        """Decode what is copied as it is, for the digests that cover decoded bytes."""
        hashers = [self._wanted] if self._wanted is not None and self._wants_decoded else []
        if self._stated is not None and self._check is None:
            self._check = digests.Hasher(digests.parse(self._stated)[0])
            hashers.append(self._check)
        if hashers:
            for block in StoredData(data.reader, data.decoded_nbytes).blocks():
                for hasher in hashers:
                    hasher.update(block)


def _disagrees(found: str, stated: str, offset: int) -> IntegrityError:
    return IntegrityError(
        f"the bytes have the digest {found}, but the file says {stated}",
        offset=offset,
        rule="Digest",
        hint="xckpt.verify lists all that is damaged",
    )
