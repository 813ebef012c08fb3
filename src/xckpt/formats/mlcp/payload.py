"""Where the data of a single-file checkpoint are: the records do not say.

A reading is an assumption that either makes the file end exactly where it does, or not::

    reading      bytes after the metadata                                   written by
    none         records of shard 0, of shard 1, ...                        upstream
    inline       every record is followed by its data                       -
    per_shard    the records of a shard are followed by their data          -
    tail         the records of all shards are followed by all data         this package

Data are in the order of the records, without gaps.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

from xckpt.errors import FormatError
from xckpt.formats.mlcp.cursor import NetCursor
from xckpt.formats.mlcp.records import Record, read_block, same_tensors, size_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xckpt.formats import Readable

__all__ = ["Body", "Reading", "find_payload", "read_as"]

Reading = Literal["none", "inline", "per_shard", "tail"]

# Where no metadata say how many there are: a file of zeros would be a quarter as many.
_MOST_SHARDS = 1 << 16
_HINT = "payload='none' lists the tensors, without values"


class Body(NamedTuple):
    """What follows the metadata, in one reading.

    Parameters
    ----------
    reading : {"none", "inline", "per_shard", "tail"}
        Which.
    blocks : list of list of Record
        The records of each shard.
    offsets : list of list of int
        Where the data of each are; empty for ``"none"``.
    rest : int
        Bytes after all that, which only ``"none"`` can leave.
    """

    reading: Reading
    blocks: list[list[Record]]
    offsets: list[list[int]]
    rest: int = 0


def find_payload(
    source: Readable, start: int, count: int | None, listed: Sequence[list[Record] | None] = ()
) -> Body:
    """Find the reading that explains every byte of the file."""
    readings: list[Reading] = ["per_shard", "inline"]
    fits: list[Body] = []
    failure = None
    try:
        body = _read_records(source, start, count)
        if not body.rest:
            return body
        fits.append(_with_tail(body, source.size))
        if count == 1:
            readings.remove("per_shard")  # the same
    except FormatError as error:
        failure = error
    for reading in readings:
        try:
            fits.append(read_as(reading, source, start, count))
        except FormatError as error:
            failure = failure or error
    agreeing = [body for body in fits if _agrees(body, listed)]
    if not agreeing:
        raise failure or _disagreement(fits[0], start)
    if any(body[1:] != agreeing[0][1:] for body in agreeing):
        found = " or ".join(body.reading for body in agreeing)
        raise FormatError(
            f"the data can be {found}: the sizes fit each of them",
            offset=start,
            rule="Ambiguous",
            hint="payload= says which it is",
        )
    return agreeing[0]


def _agrees(body: Body, listed: Sequence[list[Record] | None]) -> bool:
    # Writers leave lists empty that they do not fill.
    pairs = zip(body.blocks, listed, strict=False)
    return all(not tensors or same_tensors(tensors, records) for records, tensors in pairs)


def _disagreement(body: Body, start: int) -> FormatError:
    return FormatError(
        f"with the data {body.reading}, records are other tensors than the metadata list",
        offset=start,
        rule="Payload",
        hint=f"payload={body.reading!r} reads them",
    )


def read_as(reading: Reading, source: Readable, start: int, count: int | None) -> Body:
    """Read the records of a file of which it is known where the data are."""
    if reading == "none":
        return _read_records(source, start, count)
    if reading == "tail":
        body = _read_records(source, start, count, up_to_tail=True)
        return _with_tail(body, source.size)
    cursor = NetCursor(source, start)
    blocks: list[list[Record]] = []
    offsets = []
    while cursor.left if count is None else len(blocks) < count:
        records, places = read_block(cursor, inline=reading == "inline")
        if reading == "per_shard":
            places = _consecutive(records, cursor.at)
            cursor.skip(_nbytes(records), "the data of a shard")
        blocks.append(records)
        offsets.append(places)
        _check_number(blocks, count, cursor)
    if cursor.left:
        raise _unexplained(cursor.at, cursor.left)
    return Body(reading, blocks, offsets)


def _read_records(
    source: Readable, start: int, count: int | None, *, up_to_tail: bool = False
) -> Body:
    """Read records that follow each other, up to the end of the file or where data would fill it.

    Where the number of shards is known, that many are read, whatever follows.
    """
    cursor = NetCursor(source, start)
    blocks: list[list[Record]] = []
    tail = 0
    while cursor.left > tail if count is None else len(blocks) < count:
        records, _ = read_block(cursor)
        blocks.append(records)
        if up_to_tail:
            tail += _nbytes(records)
        _check_number(blocks, count, cursor)
    return Body("none", blocks, [], cursor.left)


def _check_number(blocks: Sequence[object], count: int | None, cursor: NetCursor) -> None:
    if count is None and len(blocks) > _MOST_SHARDS:
        reason = f"there are more than {_MOST_SHARDS} shards"
        raise FormatError(reason, offset=cursor.at, rule="Shards")


def _with_tail(body: Body, size: int) -> Body:
    start = size - body.rest
    expected = sum(_nbytes(records) for records in body.blocks)
    if expected != body.rest:
        raise _unexplained(start, body.rest, expected)
    offsets = []
    for records in body.blocks:
        offsets.append(_consecutive(records, start))
        start += _nbytes(records)
    return Body("tail", body.blocks, offsets)


def _consecutive(records: Iterable[Record], start: int) -> list[int]:
    """Place data one after the other, each of the size that the shape makes."""
    sizes = []
    for record in records:
        if not record.fits:
            error = size_error(record)
            error.offset = start
            raise error
        sizes.append(record.nbytes)
    return list(accumulate(sizes, initial=start))[:-1]


def _nbytes(records: Iterable[Record]) -> int:
    return sum([record.nbytes for record in records])


def _unexplained(at: int, nbytes: int, expected: int | None = None) -> FormatError:
    data = "" if expected is None else f", and the data of all tensors are {expected}"
    reason = f"{nbytes} bytes follow the last record{data}"
    return FormatError(reason, offset=at, rule="Payload", hint=_HINT)
