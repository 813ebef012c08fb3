"""The bytes of a part of a tensor: raw, decompressed or gathered, with digests checked."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from xckpt.arrays.keys import (
    AxisKey,
    Chunks,
    chunks_along_slowest,
    contiguous_run,
    cut_along,
    positions,
    result_shape,
    take,
)
from xckpt.elements import ELEMENT_TYPES, nbytes_of
from xckpt.errors import FormatError, IntegrityError, UnsupportedError, warn
from xckpt.index import Part, Tensor, runs_of, strides_of
from xckpt.storage import Source, digests, encodings, seekable
from xckpt.storage.limits import Locks, Pool, require_expansion, require_memory
from xckpt.storage.source import empty

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array

# Largest span of bytes that is read at once with the unused bytes between elements.
_STRIDED_NBYTES = 4 << 20


class Strided(NamedTuple):
    """Elements of `itemsize` bytes that lie `strides` elements apart along each axis."""

    read: Callable[[int, int], memoryview]  # bytes from start to stop after the first element
    shape: Sequence[int]
    strides: Sequence[int]
    itemsize: int
    gaps_are_free: bool  # whether the bytes between elements cost nothing to read

    def select(self, key: Sequence[AxisKey]) -> Array:
        """Return a selection, as opaque elements."""
        shape = result_shape(self.shape, key)
        require_memory(prod(shape) * self.itemsize)
        out = np.empty(shape, f"V{self.itemsize}")
        if out.size:
            self._select_into(tuple(key), out)
        return out

    def _select_into(self, key: tuple[AxisKey, ...], out: Array) -> None:
        runs = [contiguous_run((n,), (entry,)) for n, entry in zip(self.shape, key, strict=True)]
        extents = [run.shape[0] for run in runs]
        spans = [(n - 1) * step for n, step in zip(extents, self.strides, strict=True)]
        span, itemsize = sum(spans) + 1, self.itemsize
        # Read the bytes in between if they are free, few, or at most as many as elements.
        if self.gaps_are_free or span * itemsize <= _STRIDED_NBYTES or span <= 2 * out.size:
            start = sum([run.start * step for run, step in zip(runs, self.strides, strict=True)])
            data = self.read(start * itemsize, (start + span) * itemsize)
            steps = [step * itemsize for step in self.strides]
            flat = np.frombuffer(data, out.dtype)
            block = as_strided(flat, extents, steps, writeable=False)
            out[...] = take(block, tuple([run.key[0] for run in runs]))
            return
        # Cut the axis whose positions lie farthest apart.
        axis = max(range(len(key)), key=spans.__getitem__)
        count = len(positions(key[axis], self.shape[axis]))
        step = max(1, min(_STRIDED_NBYTES // (self.strides[axis] * itemsize), count // 2))
        for place, part_key in cut_along(axis, step, self.shape, key):
            self._select_into(part_key, out[place])


def has_byte_each(part: Part) -> bool:
    """Return whether small elements do not share bytes, because their distances are given."""
    return part.strides is not None and ELEMENT_TYPES[part.dtype].bits < 8


def nbytes_of_elements(part: Part, count: int) -> int:
    """Return the size of `count` elements of a part after decoding, in bytes."""
    return count if has_byte_each(part) else nbytes_of(part.dtype, count)


def strided_chunks(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, target: int
) -> Chunks:
    """Cut along the axes whose positions lie farthest apart."""
    axes = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    cut = chunks_along_slowest(tuple([shape[axis] for axis in axes]), itemsize, target)
    placed = dict(zip(axes, cut, strict=True))
    return tuple([placed[axis] for axis in range(len(shape))])


_tables: Pool[seekable.SeekTable] = Pool(limit=256)

# Parts whose digests this process has checked; a part is hashed once however many tasks read it.
_verified: set[Hashable] = set()
_verifying = Locks(64)

# Bytes of a compressed part that are read for the headers of its frames.
_HEAD_NBYTES = 4096
# Size of blocks that are decoded only to be hashed.
_BLOCK_NBYTES = 8 << 20
_NO_LIMIT = 1 << 63  # more than any part decodes to


@dataclass(frozen=True, slots=True)
class PartReader:
    """The decoded bytes of one part of a tensor; pickles by reference."""

    source: Source
    part: Part
    # True checks the digest once per process before the first use; None checks the digest of a
    # compressed part whenever all of it is decoded; False never does.
    verify: bool | None = None

    def read(self, start: int, stop: int, nbytes: int) -> memoryview:
        """Return the decoded bytes from `start` to `stop`, of `nbytes` in total."""
        with self._locating_errors():
            self.check(nbytes)
            if (start, stop) != (0, nbytes):
                return self._bytes(start, stop, nbytes)
            stored_digest, decoded_digest = self._due_digests(raw=False)
            stored = None if stored_digest is None else self.stored()
            decoded = self._bytes(start, stop, nbytes, stored)
            if stored_digest is not None and stored is not None:
                digests.check(stored_digest, stored)
            if decoded_digest is not None:
                digests.check(decoded_digest, decoded)
            return decoded

    def blocks(
        self, nbytes: int, block_nbytes: int, *, compare: bool = False
    ) -> Iterator[memoryview]:
        """Read all decoded bytes in order, in little memory; `compare` checks raw parts as well."""
        part = self.part
        with self._locating_errors():
            self.check(nbytes)
            stored_digest, decoded_digest = self._due_digests(raw=compare)
            stored = None
            codec = None if self.is_arranged else encodings.STREAMS.get(part.encoding)
            if part.encoding == "zstd-seekable" and stored_digest and not self.is_arranged:
                # Its frames are a stream, too, which passes the digest once; the table is checked.
                self._seek_table(nbytes, self.source.view)
                codec = encodings.ZstdDecoder
            blocks: Iterable[memoryview]
            if self.is_raw:
                blocks = self._raw_blocks(nbytes, block_nbytes)
            elif codec is not None:
                stored = self._stored_blocks(stored_digest)
                blocks = codec.decompressed_blocks(stored, nbytes, block_nbytes, part.skip)
            else:
                starts = range(0, nbytes, block_nbytes)
                ends = (min(start + block_nbytes, nbytes) for start in starts)
                blocks = map(self._bytes, starts, ends, repeat(nbytes))
            yield from blocks if decoded_digest is None else digests.checked(decoded_digest, blocks)
            if stored_digest is not None:
                if stored is None:  # elements are gathered, so the part is read again
                    stored = self._stored_blocks(stored_digest)
                stored.finish()

    def _raw_blocks(self, nbytes: int, block_nbytes: int) -> Iterable[memoryview]:
        """Read all bytes of a part that is a range of the file."""
        source, offset = self.source, self.part.offset
        if not nbytes:
            return ()  # an empty part needs no file
        if not source.file.is_near:
            return source.blocks(offset, nbytes, block_nbytes)
        source.check_range(offset, nbytes)  # before memory of that size
        return source.blocks_in(empty(min(nbytes, block_nbytes)), offset, nbytes)

    def compared_blocks(self) -> Iterator[memoryview]:
        """Read all bytes as they are stored, and compare them with a digest of these."""
        stored_digest = self.part.digest if self.is_checked and not self._covers_decoded else None
        with self._locating_errors():
            yield from self._stored_blocks(stored_digest)

    def _due_digests(self, *, raw: bool) -> tuple[str | None, str | None]:
        """Return the digests to be compared when all stored, or all decoded bytes have passed."""
        is_compressed, digest = self.part.encoding is not None, self.part.digest
        if self.verify is not None or not self.is_checked or not (is_compressed or raw):
            return None, None
        covers_stored = is_compressed and not self._covers_decoded
        return (digest, None) if covers_stored else (None, digest)

    @property
    def _covers_decoded(self) -> bool:
        return self.part.encoding is not None and self.part.digest_of == "decoded"

    @property
    def is_checked(self) -> bool:
        """True if a digest can be compared when all bytes have passed."""
        digest = self.part.digest
        return digest is not None and self.verify is not False and digests.is_known(digest)

    def check(self, nbytes: int) -> None:
        """Check the stated size, and the digest if `verify` is true, before anything is decoded."""
        part = self.part
        if part.strides is not None:
            require_expansion(nbytes, part.nbytes)
        if self.verify and self.whole is not None:
            self.whole.check(self.whole.count_decoded_nbytes())
        if part.digest is not None and self.verify is not False:
            with self._locating_errors():
                digests.parse(part.digest)  # a malformed digest is always an error
                if self.verify:
                    self._verify_once(part.digest, nbytes)
        if part.encoding is None and self._stated_nbytes() != nbytes:
            raise FormatError(
                f"a part has {self._stated_nbytes()} bytes, but {nbytes} are needed",
                offset=part.offset,
                rule="LayoutData",
            )

    @property
    def whole(self) -> PartReader | None:
        """The reader of the longer part that a digest covers, if this part lies within one."""
        within = self.part.within
        return None if within is None else replace(self, part=within)

    @property
    def is_raw(self) -> bool:
        """True if the decoded bytes are a range of the file."""
        return self.part.encoding is None and self.part.inline is None and not self.is_arranged

    @property
    def is_arranged(self) -> bool:
        """Whether elements have to be gathered, or inverted, after decoding."""
        return self.part.strides is not None or self.part.inverted is not None

    def select(self, key: Sequence[AxisKey]) -> Array:
        """Return a selection of a part with strides or inverted bits, as opaque elements."""
        part, shape = self.part, self.part.shape or ()
        nbytes = part.nbytes if part.encoding is None else part.decoded_nbytes or 0
        with self._locating_errors():
            chosen = Strided(
                lambda start, stop: self._stored_bytes(start, stop, nbytes),
                shape,
                part.strides or strides_of(shape),
                nbytes_of(part.dtype, 1),
                gaps_are_free=part.encoding is not None or self.source.worth_skipping is None,
            ).select(key)
        if part.inverted is not None:
            memory = chosen.reshape(-1).view(np.uint8).reshape(-1, len(part.inverted))
            memory ^= np.frombuffer(part.inverted, np.uint8)
        return chosen

    def ranges(self) -> Iterator[Range]:
        """Return the range of the stored bytes, if they are in the file and are read in order."""
        if self.part.inline is None and self.part.nbytes and not self.is_arranged:
            yield self.source, self.part.offset, self.part.nbytes

    def stored(self) -> memoryview:
        """Return all bytes as they are stored."""
        if self.part.inline is not None or not self.part.nbytes:
            return memoryview(self.part.inline or b"")  # an empty part needs no file
        return self.source.view(self.part.offset, self.part.nbytes)

    def _stored_blocks(self, digest: str | None = None) -> digests.PassingBytes:
        """Return all bytes as they are stored, to be read block by block."""
        offset, nbytes, inline = self.part.offset, self.part.nbytes, self.part.inline
        if inline is not None or not nbytes:
            data = memoryview(inline or b"")
            return digests.PassingBytes([data], len(data), digest)
        self.source.check_range(offset, nbytes)  # before anything is made of that size
        return digests.PassingBytes(self.source.blocks(offset, nbytes), nbytes, digest)

    def _stated_nbytes(self) -> int | None:
        """Return the decoded size that the file or the headers of zstd frames state, or None."""
        part = self.part
        if self.is_arranged and part.shape is not None:
            return nbytes_of_elements(part, prod(part.shape))
        if part.encoding is None:
            return part.nbytes
        if part.decoded_nbytes is not None or part.encoding != "zstd":
            return part.decoded_nbytes
        with self._locating_errors():
            head = self.source.read(part.offset, min(part.nbytes, _HEAD_NBYTES))
            return encodings.stated_nbytes(head, part.nbytes)

    def count_decoded_nbytes(self, limit: int = _NO_LIMIT) -> int:
        """Return the decoded size; count it in memory of constant size if it is not stated."""
        stated = self._stated_nbytes()
        if stated is not None:
            return stated
        with self._locating_errors():
            try:
                return encodings.decompressed_nbytes(self._stored_blocks(), limit)
            except encodings.LongStreamError as error:
                raise UnsupportedError(
                    f"its size is not stated, and counting ends after {limit} decoded bytes",
                    rule="Encoding",
                    hint="Compress it anew, in one frame that states its size",
                ) from error

    @contextmanager
    def _locating_errors(self) -> Iterator[None]:
        """Add the offset of the part to errors."""
        try:
            yield
        except (FormatError, IntegrityError, UnsupportedError) as error:
            error.offset = self.part.offset if error.offset is None else error.offset
            raise

    def _bytes(
        self, start: int, stop: int, nbytes: int, stored: memoryview | None = None
    ) -> memoryview:
        """Return decoded bytes; `stored` has all stored bytes if these have been read."""
        if not self.is_arranged:
            return self._stored_bytes(start, stop, nbytes, stored)
        part = self.part
        itemsize = nbytes_of(part.dtype, 1)
        runs = runs_of(part.shape or (), start // itemsize, -(-stop // itemsize))
        blocks = [self.select(key).reshape(-1) for key in runs] if start < stop else []
        flat = (
            blocks[0]
            if len(blocks) == 1
            else np.concatenate([np.empty(0, f"V{itemsize}"), *blocks])
        )
        return flat.view(np.uint8).data[start % itemsize :][: stop - start]

    def _stored_bytes(
        self, start: int, stop: int, nbytes: int, stored: memoryview | None = None
    ) -> memoryview:
        """Return decoded bytes in the order of the file; see `_bytes`."""
        part = self.part
        if part.encoding is None:
            if part.inline is not None:
                return memoryview(part.inline)[start:stop]
            return self.source.view(part.offset + start, stop - start)
        if part.encoding in encodings.STREAMS:
            codec = encodings.STREAMS[part.encoding]
            if (start, stop) == (0, nbytes) and part.skip is None:
                return codec.decompress(self.stored() if stored is None else stored, nbytes)
            first = (part.skip or 0) + start
            data = self._stored_blocks() if stored is None else stored
            total = nbytes if part.skip is None else None
            return codec.decompress_range(data, first, first + stop - start, total)
        if part.encoding != "zstd-seekable":
            raise UnsupportedError(f"encoding {part.encoding!r} is not known")
        view = self.source.view

        if stored is not None:

            def view(offset: int, nbytes: int) -> memoryview:
                return stored[offset - part.offset :][:nbytes]

        table = self._seek_table(nbytes, view)
        return seekable.read_frames(view, part.offset, table, start, stop)

    def _seek_table(
        self, nbytes: int, view: Callable[[int, int], memoryview]
    ) -> seekable.SeekTable:
        """Read and check the seek table, once for all chunks of the part."""
        part = self.part
        key = (self.source.name, self.source.identity, part.offset, part.nbytes, nbytes)
        return _tables.get(
            key, lambda: seekable.read_seek_table(view, part.offset, part.nbytes, nbytes)
        )

    def _verify_once(self, digest: str, nbytes: int) -> None:
        key = (self.source.name, self.source.identity, self.part)
        with _verifying.of(key):
            if key in _verified:
                return
            if not digests.is_known(digest):
                text = f"{self.source.name}: byte {self.part.offset}: {digest!r} cannot be verified"
                warn(text)
            else:
                passing = replace(self, verify=None)  # or `blocks` would compare no digest
                if self._covers_decoded:
                    blocks = passing.blocks(nbytes, _BLOCK_NBYTES)
                else:
                    blocks = passing.compared_blocks()
                for _ in blocks:
                    pass
            _verified.add(key)


def part_readers(
    tensor: Tensor, sources: Mapping[str | None, Source], *, verify: bool | None = None
) -> dict[str, PartReader]:
    """Return a reader of each part, by role."""
    return {
        role: PartReader(sources[part.shard], part, verify) for role, part in tensor.parts.items()
    }


def decoded_shape(
    tensor: Tensor, role: str, reader: PartReader, limit: int = _NO_LIMIT
) -> tuple[int, ...]:
    """Return the shape of the array that a part decodes to."""
    part = reader.part
    if tensor.layout == "dense" and role == "data":
        return tensor.shape
    if part.shape is not None:
        return part.shape
    nbytes = reader.count_decoded_nbytes(limit)
    is_list_of_axes = tensor.layout == "sparse_coo" and role == "coords"
    lines = tensor.ndim if is_list_of_axes else 1
    count, left = divmod(nbytes, nbytes_of(part.dtype, 1) * lines)
    if left:
        raise FormatError(
            f"part {role!r} decodes to {nbytes} bytes, which is not a whole number of elements",
            offset=part.offset,
            rule="Encoding",
        )
    return (lines, count) if is_list_of_axes else (count,)
