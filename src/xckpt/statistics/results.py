"""Finished numbers that are kept between calls: one row for each tensor.

Statistics follow from sketches, but for thousands of tensors that takes seconds. So their rows are
kept as well: for each checkpoint and each set of options there is a file in the folder
``results-1`` of the cache of this user, of records like those of the sketches (see
`xckpt.statistics.store`). A record has some rows: a key of 16 bytes for each, then all numbers as
float64. Where no file can be written, rows stay in the memory of this process. Rows that cannot be
true of their tensor are not believed (see `xckpt.statistics.plausible`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.index import paused_collector
from xckpt.statistics.store import (
    LARGEST_FOLDER,
    CheckpointVersion,
    append_record,
    digest_of,
    origins_of,
    read_records,
)
from xckpt.storage import cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from xckpt.statistics.readers import Reader

FOLDER = "results-1"

Array = np.ndarray[Any, np.dtype[Any]]

_KEY_NBYTES = 16
_LARGEST_SESSION = 64 << 20

# Rows that no file has, by the digest of checkpoint and options; what was used last comes last.
_session: OrderedDict[bytes, dict[bytes, bytes]] = OrderedDict()


def rows_of(
    readers: Sequence[Reader],
    about: tuple[Any, ...],
    width: int,
    find: Callable[[list[int]], Iterable[Sequence[float]]],
    *,
    are_plausible: Callable[[Array, Sequence[Reader]], Array],
    enabled: bool,
) -> Array:
    """Return a row of numbers for each tensor: what is kept, or else what `find` finds.

    `about` are the options that rows depend on; `find` gets the positions of tensors.
    """
    rows = np.full((len(readers), width), np.nan)
    kept: set[int] = set()
    files: list[tuple[_KeptRows, dict[int, bytes]]] = []
    with paused_collector():
        folder = cache.folder(FOLDER) if enabled else None
        if folder is not None:
            keys = _keys(readers).items()
            files = [(_KeptRows(folder, origin, about, width), some) for origin, some in keys]
        for file, some in files:
            numbers = [number for number, key in some.items() if key in file.rows]
            data = b"".join([file.rows[some[number]] for number in numbers])
            found = np.frombuffer(data, "<f8").reshape(len(numbers), width)
            with np.errstate(all="ignore"):
                good = are_plausible(found, [readers[number] for number in numbers])
            believed = np.array(numbers, np.int64)[good]
            rows[believed] = found[good]
            kept.update(believed.tolist())
    wanted = [number for number in range(len(readers)) if number not in kept]
    for number, row in zip(wanted, find(wanted), strict=True):
        rows[number] = row
    for file, some in files:
        new = {number: key for number, key in some.items() if number not in kept}
        if new:
            file.keep(list(new.values()), rows[list(new)])
    return rows


def _keys(readers: Sequence[Reader]) -> dict[CheckpointVersion, dict[int, bytes]]:
    """Return what the tensors of each checkpoint are known by, by their numbers."""
    keys: dict[CheckpointVersion, dict[int, bytes]] = {}
    for number, (reader, origin) in enumerate(zip(readers, origins_of(readers), strict=True)):
        if origin is not None:
            keys.setdefault(origin, {})[number] = digest_of(reader.kind.name, reader.identity)
    return keys


class _KeptRows:
    """The rows of one checkpoint."""

    def __init__(
        self, folder: Path, origin: CheckpointVersion, about: tuple[Any, ...], width: int
    ) -> None:
        self._name = digest_of(*origin, about)
        self._path = folder / self._name.hex()
        self.rows = dict(_session.get(self._name, {}))
        data, records = read_records(self._path)
        nbytes = 8 * width
        for start, stop in records.values():
            count = (stop - start) // (_KEY_NBYTES + nbytes)
            first = start + _KEY_NBYTES * count
            if first + nbytes * count != stop:
                continue
            keys = range(start, first, _KEY_NBYTES)
            for at, row in zip(keys, range(first, stop, nbytes), strict=True):
                self.rows[data[at : at + _KEY_NBYTES]] = data[row : row + nbytes]

    def keep(self, keys: list[bytes], table: Array) -> None:
        """Add rows to the file, or remember them if there can be none."""
        table = table.astype("<f8")
        payload = b"".join([*keys, table.tobytes()])
        if append_record(self._path, digest_of(payload), payload):
            cache.make_room(self._path.parent, LARGEST_FOLDER)
            return
        own = _session.setdefault(self._name, {})
        own |= {key: row.tobytes() for key, row in zip(keys, table, strict=True)}
        _session.move_to_end(self._name)
        nbytes = [sum(map(len, each.values())) for each in _session.values()]
        while sum(nbytes) > _LARGEST_SESSION:
            _session.popitem(last=False)
            nbytes.pop(0)
