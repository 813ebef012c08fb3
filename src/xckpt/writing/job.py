"""From a plan to files; each appears complete under its name, or not at all.

Dask arrays are computed first, each chunk once and straight into its place (`xckpt.writing.data`),
in one graph, so that shared tasks run once. Arrays for compressed parts are computed into a
temporary file. Then all other parts are streamed in file order (`xckpt.writing.streaming`).
Finally the files are renamed (`xckpt.storage.sink.publish`).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader
from xckpt.elements import ELEMENT_TYPES, stored_dtype
from xckpt.formats.plan import PlannedPart, WantedPart, Written
from xckpt.index import Part
from xckpt.interrupts import uninterrupted
from xckpt.progress import Progress
from xckpt.storage import new_file
from xckpt.storage.sink import publish
from xckpt.storage.source import components
from xckpt.writing.data import (
    ArrayData,
    SpooledData,
    StoredData,
    is_scattered,
    store,
)
from xckpt.writing.streaming import NO_TENSOR, is_compressed, stored_nbytes, stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xckpt.formats.plan import LiteralBytes, Plan
    from xckpt.storage import Source
    from xckpt.storage.partial import Place
    from xckpt.storage.sink import Sink
    from xckpt.writing.casting import Cast
    from xckpt.writing.data import PartData, Payload

__all__ = ["Target", "WriteJob"]


def _without_tensor(offset: int | None, data: PartData) -> PlannedPart:
    """Return a planned part for bytes that belong to no tensor."""
    part = WantedPart("uint8", (data.nbytes,), data.nbytes)
    return PlannedPart(*NO_TENSOR, part, offset, data=data)


def _literal(data: bytes) -> ArrayData:
    return ArrayData(np.frombuffer(data, np.uint8), "uint8", "exact", "")


class Target(NamedTuple):
    """The path of a new file, for any process."""

    path: str
    overwrite: bool
    storage_options: dict[str, Any] | None
    has_config: bool = False  # in a file next to it, instead of an attribute

    def companion(self, name: str) -> str:
        """Return the path of another file of the same checkpoint."""
        folder, slash, _ = self.path.rpartition("/")
        return folder + slash + "/".join(components(name))

    def open(self, name: str | None = None, *, beside: Sequence[Sink] = ()) -> Sink:
        """Begin the companion of that name, or the file itself for None."""
        return new_file(
            self.path if name is None else self.companion(name),
            overwrite=self.overwrite,
            storage_options=self.storage_options,
            beside=beside,
        )

    def check(self) -> None:
        """Raise the error that writing the file would begin with."""
        sink = self.open()
        try:
            sink.abort()
        finally:
            sink.abort()  # Ctrl-C may have come before the first call did anything


class _FileToWrite(NamedTuple):
    """One file of a checkpoint: its name if it is a companion, its plan, and parts with data."""

    name: str | None
    plan: Plan
    parts: list[PlannedPart]


class WriteJob:
    """A save that is planned, before a byte is written."""

    def __init__(
        self,
        plan: Plan,
        payloads: Mapping[str, Payload],
        cast: Cast,
        target: Target,
        label: str,  # of the progress
        *,
        # The file whose bytes the new file begins with.
        grown: Source | None = None,
        # Files that are read and replaced; no other writer may have changed them in the meantime.
        replaced: Sequence[Source] = (),
        # Name of a file in the same folder that is removed once the new files are complete.
        superseded: str | None = None,
    ) -> None:
        self.target, self._label, self._replaced = target, label, replaced
        self._superseded = superseded
        #: Names of the tensors that are written.
        self.tensors = tuple(payloads)
        # Dask arrays, which of the files they are computed into, and where in it.
        self._stores: list[tuple[ArrayData, int, int]] = []
        self._spooled = 0
        # Companions first, so that a file refers to nothing that is not there.
        plans: list[tuple[str | None, Plan]] = [*plan.companions.items(), (None, plan)]
        self._files = []
        for number, (name, file_plan) in enumerate(plans):
            parts = [
                self._with_data(planned, payloads[planned.tensor], cast, number, len(plans))
                for planned in file_plan.parts
            ]
            parts += [
                _without_tensor(offset, _literal(data)) for offset, data in file_plan.literals
            ]
            if grown is not None and name is None:
                reader = PartReader(grown, Part("uint8", (grown.size,), 0, grown.size))
                array = DenseArray("", reader, (grown.size,), decode=False)
                parts.append(_without_tensor(0, StoredData(array)))
            # Parts without an offset keep their order, after the others.
            parts.sort(key=lambda planned: inf if planned.offset is None else planned.offset)
            self._files.append(_FileToWrite(name, file_plan, parts))
        # The ranges that are written to by memory maps.
        self._reserved = [
            (file, offset, prod(data.array.shape) * stored_dtype(data.dtype).itemsize)
            for data, file, offset in self._stores
            if is_scattered(data)
        ]

    def __getstate__(self) -> dict[str, Any]:
        # Making and finishing the files needs no arrays, whose tasks are sent by themselves.
        return self.__dict__ | {"_stores": []}

    def _with_data(
        self, planned: PlannedPart, payload: Payload, cast: Cast, file: int, spool_number: int
    ) -> PlannedPart:
        """Add the source of its bytes to a planned part; dask arrays are computed before."""
        # `file` and `spool_number` are positions among the temporary files; see `_begin`.
        data = payload.part_data(planned.role, planned.part, cast)
        if not isinstance(data, ArrayData) or not data.is_dask:
            return planned._replace(data=data)
        if data.array.size == 0:
            return planned._replace(data=_literal(b""))
        packed = ELEMENT_TYPES[data.dtype].bits < 8
        if planned.offset is not None and planned.part.compression is None and not packed:
            self._stores.append((data, file, planned.offset))
            return planned
        spooled = SpooledData(self._spooled, data.array.size, data.dtype)
        self._stores.append((data, spool_number, self._spooled))
        self._spooled += data.array.size * stored_dtype(data.dtype).itemsize
        return planned._replace(data=spooled)

    def run(self, progress: Any = None) -> int:
        """Write everything now, and return how many bytes; after an error nothing is left."""
        total = sum([planned.part.nbytes for file in self._files for planned in file.parts])
        sinks: list[Sink] = []
        with Progress(progress, self._label, total) as bar:
            try:
                try:
                    self._begin(sinks)
                    if self._stores:
                        import dask

                        places = [sink.place for sink in sinks]
                        dask.compute(*self._store(places, bar.name))
                    return self._finish(sinks, bar)
                finally:
                    _abort(sinks)
            finally:
                _abort(sinks)  # Ctrl-C may have come before the first call did anything

    def delayed(self) -> Any:
        """Make the tasks that write everything; the last one returns nothing."""
        import dask

        sinks = dask.delayed(self._begin_or_abort, pure=False)()
        count = len(self._files) + (self._spooled > 0)
        places = [dask.delayed(_place_of, pure=True)(sinks, number) for number in range(count)]
        return dask.delayed(self._end, pure=False)(sinks, self._store(places))

    def _store(self, places: Sequence[Any], observer: str = "") -> list[Any]:
        """Return the tasks that compute all dask arrays into the files at these places."""
        return [store(data, places[file], offset, observer) for data, file, offset in self._stores]

    def _begin_or_abort(self) -> list[Sink]:
        """Make and return the temporary files; remove them all after an error."""
        sinks: list[Sink] = []
        try:
            self._begin(sinks)
        except BaseException:
            _abort(sinks)
            raise
        return sinks

    def _begin(self, sinks: list[Sink]) -> None:
        """Make the temporary files in their known sizes; the last one is the spool."""
        *companions, main = self._files
        # The main file comes first: its lock covers the companions, which are opened beside it.
        sinks.append(self.target.open(main.name))
        for number, file in enumerate(companions):
            sinks.insert(number, self.target.open(file.name, beside=sinks[-1:]))
        for file, sink in zip(self._files, sinks, strict=True):
            nbytes = file.plan.nbytes
            if nbytes is None:
                ends = [
                    planned.offset + stored_nbytes(planned)
                    for planned in file.parts
                    if planned.offset is not None and not is_compressed(planned)
                ]
                nbytes = max(ends, default=0)
            sink.resize(nbytes)
        if self._spooled:
            sinks.append(sinks[-1].another())
            sinks[-1].resize(self._spooled)
        for number, offset, nbytes in self._reserved:
            sinks[number].reserve(offset, nbytes)

    def _end(self, sinks: list[Sink], _tasks: Any) -> None:
        """Finish the files; the last task of `delayed`, which waits for `_tasks`."""
        self._finish(sinks, Progress(False, ""))  # noqa: FBT003  no bar

    def _finish(self, sinks: list[Sink], bar: Progress) -> int:
        """Stream all remaining parts, and rename the files."""
        written: dict[tuple[str, str], Written] = {}
        ends = []
        for file, sink in zip(self._files, sinks, strict=False):
            parts = [
                planned._replace(data=replace(planned.data, place=sinks[-1].place))
                if isinstance(planned.data, SpooledData)
                else planned
                for planned in file.parts
            ]
            done, end = stream(parts, sink, file.plan.alignment, bar)
            written |= done
            ends.append(end)
        nbytes = 0
        for file, sink, end in zip(self._files, sinks, ends, strict=False):
            nbytes += _complete(file.plan, sink, end, written)
        companions = {file.name or "": sink for file, sink in zip(self._files, sinks, strict=False)}
        main = companions.pop("")
        plan = self._files[-1].plan

        def referring(names: Mapping[str, str]) -> Sink:
            """Write the main file as it is when companions have other names."""
            if plan.renamed is None or plan.parts:
                text = "a plan with companions leaves all parts to them, and can rename them"
                raise TypeError(text)
            renamed = plan.renamed(names)
            sinks.append(main.another())
            _complete(renamed, sinks[-1], _put_literals(renamed.literals, sinks[-1], 0), written)
            return sinks[-1]

        publish(
            main,
            companions,
            replaced=self._replaced,
            referring=referring,
            superseded=self._superseded,
        )
        return nbytes


def _abort(sinks: Iterable[Sink]) -> None:
    with uninterrupted():
        for sink in sinks:
            sink.abort()


def _place_of(sinks: list[Sink], number: int) -> Place:
    return sinks[number].place


def _put_literals(literals: Iterable[LiteralBytes], sink: Sink, end: int) -> int:
    """Write literals, and return the end of the file so far."""
    for literal in literals:
        offset = end if literal.offset is None else literal.offset
        sink.write(literal.data, offset)
        end = max(end, offset + len(literal.data))
    return end


def _complete(plan: Plan, sink: Sink, end: int, written: dict[tuple[str, str], Written]) -> int:
    """Write bytes that depend on the places of parts; return the size of the file."""
    end = _put_literals(plan.finish(written), sink, end)
    nbytes = end if plan.nbytes is None else plan.nbytes
    sink.resize(nbytes)
    return nbytes
