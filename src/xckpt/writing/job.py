"""From a plan to files; each appears complete under its name, or not at all.

Dask arrays are computed first, straight into their places (`xckpt.writing.computed`). Then all
other parts are streamed in file order (`xckpt.writing.streaming`). Finally the files are renamed
(`xckpt.storage.sink.publish`).
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from functools import partial
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.arrays.converted import ByteStream, Converted, LiteralStream, StoredBytes
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader
from xckpt.elements import ELEMENT_TYPES, stored_dtype
from xckpt.errors import CheckpointError, some, warn
from xckpt.formats.plan import Draft, LiteralBytes, Plan, PlannedPart, WantedPart, Written
from xckpt.formatting import counted
from xckpt.index import Index, Part
from xckpt.interrupts import uninterrupted
from xckpt.progress import Progress
from xckpt.storage import Source, is_remote
from xckpt.storage.sink import Sink, publish
from xckpt.writing.companions import Companions, companions_of
from xckpt.writing.computed import (
    ComputedPart,
    SpooledBytes,
    are_filled,
    is_scattered,
    new_nonfinite,
    store_array,
)
from xckpt.writing.config_types import with_written_type
from xckpt.writing.origins import origin_of
from xckpt.writing.rehearsal import changed_attributes
from xckpt.writing.streaming import NO_TENSOR, is_compressed, stored_nbytes, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from xckpt.arrays.converted import Cast
    from xckpt.storage.partial import Place
    from xckpt.typing import Array
    from xckpt.writing.fitting import Fitting
    from xckpt.writing.payloads import Gathered, Payload
    from xckpt.writing.targets import Target

# Keys of torch checkpoints that hold the tensors of a model.
_STATE_DICTS = frozenset({"state_dict", "model_state_dict"})
_IN_STATE_DICT = (
    "all names begin with a key that load_state_dict of the model does not expect "
    "(ds.rename({n: n.split('.', 1)[1] for n in ds}), or names=('^[^.]*[.]', '') of convert, "
    "removes it)"
)
_OTHER_SHARDS = (
    "shards that were in the folder stay, though the new index names none of them; remove them"
)
_UNSTACK = (
    "; xarray fills numbers that a variable lacks and another one with the dim has "
    "(.ckpt.unstack() of both sides before assign keeps their layers apart)"
)


def plan_job(
    gathered: Gathered,
    fitting: Fitting,
    target: Target,
    format_options: Mapping[str, Any],
    *,
    # Files that the tensors are read from.
    sources: Iterable[Source],
    # Returns the index of the file that the tensors come from, if it has the same format.
    before: Callable[[], Index | None],
    # The file to append to, and whether to replace its tensors that have the same name.
    grown: Source | None = None,
    replace: bool = False,
) -> WriteJob:
    """Return the job that writes a planned file, and warn of changes; nothing is written yet."""
    origin = origin_of(gathered) if target.is_folder else None
    if origin is not None:
        target = target.in_folder(origin.stem({payload.name for payload in gathered.payloads}))
        attrs = {k: value for k, value in gathered.attrs.items() if not origin.is_written(k)}
        gathered = gathered._replace(attrs=attrs)
    path, label = target.path, os.path.basename(target.path)  # noqa: PTH119  it may be a URL
    try:
        draft, payloads = fitting.draft(gathered, path)
        if grown is None:
            typed_attrs = with_written_type(draft.attrs, gathered, payloads)
            draft = dataclasses.replace(draft, attrs=typed_attrs)
        plan = _plan(draft, fitting, format_options, before=before, grown=grown, replace=replace)
        fitting.changes.add_all(_IN_STATE_DICT, _wrapper_of(draft.tensors))
        fitting.changes.add_all(_OTHER_SHARDS, target.other_shards(plan.companions))
        paths = [path, *map(target.companion, plan.companions)]
        superseded = None
        if plan.suffix:
            target.check()  # an existing file is an error, though it is not written
            superseded = label if target.overwrite else None
            target = target._replace(path=path + plan.suffix)
            paths.append(target.path)
        elif not plan.companions:
            target.require_no_shards()
        overwritten = {_resolved(name) for name in paths if target.overwrite}
        companions = None
        if origin is not None:
            companions = companions_of(origin, draft.tensors, target, fitting.changes)
        job = WriteJob(
            plan,
            payloads,
            fitting.cast,
            target,
            label,
            grown=grown,
            replaced=[source for source in sources if _resolved(source.name) in overwritten],
            superseded=superseded,
            beside=companions,
        )
    except CheckpointError as error:
        raise error.located(path=path) from error.__cause__
    for existing in filter(os.path.lexists, () if is_remote(path) or grown is not None else paths):
        target._replace(path=existing).check()  # nothing changes if the file may not be replaced
    fitting.changes.warn(target.path)
    return job


def _wrapper_of(names: Collection[str]) -> list[str]:
    """Return the key of a torch checkpoint that all names begin with; empty without one."""
    prefixes = {name.partition(".")[0] for name in names}
    return [f"{key}." for key in prefixes & _STATE_DICTS if prefixes == {key}]


def _plan(
    draft: Draft,
    fitting: Fitting,
    format_options: Mapping[str, Any],
    *,
    before: Callable[[], Index | None],
    grown: Source | None,
    replace: bool,
) -> Plan:
    """Plan a file, or the end of the one to append to, and note what it does not keep."""
    writer = fitting.writer
    make_plan = writer.plan if grown is None else partial(writer.append, grown, replace=replace)
    plan = make_plan(draft, **format_options)
    for loss, names in plan.losses.items():
        fitting.changes.add_all(loss, names)
    changed = changed_attributes(
        draft, plan, writer, given=format_options, before=before, grown=grown
    )
    for change, name in changed:
        fitting.changes.add(change, name)
    return plan


def _resolved(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(os.path.expanduser(path))  # noqa: PTH111


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
        # Files that describe the model, written at the end.
        beside: Companions | None = None,
    ) -> None:
        self.target, self._label, self._replaced = target, label, replaced
        self._superseded, self._beside = superseded, beside
        #: Names of the tensors that are written.
        self.tensors = tuple(payloads)
        self._stores: list[ComputedPart] = []
        self._spooled = 0
        # Companions first, so that a file refers to nothing that is not there.
        plans: list[tuple[str | None, Plan]] = [*plan.companions.items(), (None, plan)]
        self._files = []
        for file, (name, file_plan) in enumerate(plans):
            parts = [
                self._with_data(planned, payloads[planned.tensor], cast, file, spool=len(plans))
                for planned in file_plan.parts
            ]
            parts += [
                _without_tensor(offset, LiteralStream(data)) for offset, data in file_plan.literals
            ]
            if grown is not None and name is None:
                reader = PartReader(grown, Part("uint8", (grown.size,), 0, grown.size))
                array = DenseArray("", reader, (grown.size,), decode=False)
                parts.append(_without_tensor(0, StoredBytes(array)))
            # Parts without an offset keep their order, after the others.
            parts.sort(key=lambda planned: inf if planned.offset is None else planned.offset)
            self._files.append(_FileToWrite(name, file_plan, parts))
        self._stored_types = [(store.data.name, store.data.dtype) for store in self._stores]
        self._counters = {name for name, payload in payloads.items() if payload.rounds}
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
        self, planned: PlannedPart, payload: Payload, cast: Cast, file: int, *, spool: int
    ) -> PlannedPart:
        """Add the source of its bytes to a planned part; dask arrays are computed before."""
        # `file` and `spool` are positions among the temporary files; see `_begin`.
        cast = "allow" if payload.rounds else cast
        data = payload.part_bytes(planned.role, planned.part, cast)
        if not isinstance(data, Converted) or not data.is_dask:
            return planned._replace(data=data)
        if data.size == 0:
            return planned._replace(data=LiteralStream(b""))
        if planned.offset is not None and planned.part.compression is None and not data.is_packed:
            self._stores.append(ComputedPart(data, file, planned.offset))
            return planned
        spooled = SpooledBytes(self._spooled, data)
        self._stores.append(ComputedPart(data, spool, self._spooled))
        self._spooled += spooled.spooled_nbytes
        return planned._replace(data=spooled)

    def run(self, progress: Any = None) -> int:
        """Write everything now, and return how many bytes; after an error nothing is left."""
        total = sum([planned.part.nbytes for file in self._files for planned in file.parts])
        sinks: list[Sink] = []
        with Progress(progress, self._label, total) as bar:
            try:
                try:
                    self._begin(sinks)
                    lost: Sequence[Array] = ()
                    if self._stores:
                        import dask

                        places = [sink.place for sink in sinks]
                        lost = dask.compute(*self._store(places, bar.name))
                    nbytes = self._finish(sinks, bar)
                    self._warn_of_lost(lost)
                    return nbytes
                finally:
                    _abort(sinks)
            finally:
                _abort(sinks)  # Ctrl-C may have come before the first call did anything

    def _begin(self, sinks: list[Sink]) -> None:
        """Make the temporary files in their known sizes; the last one is the spool."""
        *companions, main = self._files
        # The main file comes first: its lock covers the companions, which are opened beside it.
        sinks.append(self.target.open(main.name))
        for position, file in enumerate(companions):
            sinks.insert(position, self.target.open(file.name, beside=sinks[-1:]))
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
        for position, offset, nbytes in self._reserved:
            sinks[position].reserve(offset, nbytes)

    def _store(self, places: Sequence[Any], observer: str = "") -> list[Any]:
        """Return the tasks that compute all dask arrays into the files at these places."""
        return [
            store_array(data, places[file], offset, observer) for data, file, offset in self._stores
        ]

    def _finish(self, sinks: list[Sink], bar: Progress) -> int:
        """Stream all remaining parts, and rename the files."""
        written: dict[tuple[str, str], Written] = {}
        ends = []
        for file, sink in zip(self._files, sinks, strict=False):
            for planned in file.parts:
                if isinstance(planned.data, SpooledBytes):
                    planned.data.file = sinks[-1].place
            done, end = stream(file.parts, sink, file.plan.alignment, bar)
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
        if self._beside is not None:
            self._beside.write(self.target)
        return nbytes

    def _warn_of_lost(self, lost: Sequence[Array]) -> None:
        """Warn of lost elements, NaN, infinities and zeros, which `lost` counts for dask arrays."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)  # by element type and tensor
        zeroed: dict[str, Counter[str]] = defaultdict(Counter)
        streams = [planned.data for file in self._files for planned in file.parts]
        converted = [data for data in streams if isinstance(data, Converted)]
        for data in converted:
            counts[data.dtype][data.name] += sum(data.lost)
            zeroed[data.dtype][data.name] += sum(data.zeroed)
        for (name, dtype), (count, _, _, zeros) in zip(self._stored_types, lost, strict=False):
            counts[dtype][name] += int(count)
            zeroed[dtype][name] += int(zeros)
        for dtype, by_tensor in zeroed.items():
            if names := [name for name in by_tensor if by_tensor[name] > 0]:
                tensors = counted(len(names), "tensor")
                warn(
                    f"{self.target.path}: most values of {tensors} are too small for {dtype} and "
                    f"written as zero: {some(names)}"
                )
        if new := new_nonfinite(self._stores, lost):
            nans, infinities = (sum(numbers) for numbers in zip(*new.values(), strict=True))
            total = counted(nans + infinities, "computed element")
            kinds = " or ".join(["NaN"] * (nans > 0) + ["infinite"] * (infinities > 0))
            hint = _UNSTACK if are_filled(self._stores, new) else ""
            text = f"{total} {kinds}, unlike the sources: {some(list(new))}{hint}"
            warn(f"{self.target.path}: {text}")
        for dtype, by_tensor in counts.items():
            names = [name for name in by_tensor if by_tensor[name]]
            total = counted(by_tensor.total(), "element")
            is_float = ELEMENT_TYPES[dtype].kind == "float"
            if is_float and names:
                warn(
                    f"{self.target.path}: {total} too large for {dtype} written as infinity or "
                    f"NaN: {some(names)}; bfloat16 has the range of float32"
                )
            names = [name for name in names if name in self._counters and not is_float]
            if names:
                text = "counters and constants stay integers"
                warn(f"{self.target.path}: {total} rounded to {dtype}, as {text}: {some(names)}")

    def delayed(self) -> Any:
        """Make the tasks that write everything; the last one returns nothing."""
        import dask

        sinks = dask.delayed(self._begin_or_abort, pure=False)()
        count = len(self._files) + (self._spooled > 0)
        places = [dask.delayed(_place_of, pure=True)(sinks, file) for file in range(count)]
        return dask.delayed(self._end, pure=False)(sinks, self._store(places))

    def _begin_or_abort(self) -> list[Sink]:
        """Make and return the temporary files; remove them all after an error."""
        sinks: list[Sink] = []
        try:
            self._begin(sinks)
        except BaseException:
            _abort(sinks)
            raise
        return sinks

    def _end(self, sinks: list[Sink], lost: Sequence[Array]) -> None:
        """Finish the files; the last task of `delayed`, which waits for those of `_store`."""
        self._finish(sinks, Progress(False, ""))  # noqa: FBT003  no bar
        self._warn_of_lost(lost)


class _FileToWrite(NamedTuple):
    """One file of a checkpoint: its name if it is a companion, its plan, and parts with data."""

    name: str | None
    plan: Plan
    parts: list[PlannedPart]


def _without_tensor(offset: int | None, data: ByteStream) -> PlannedPart:
    """Return a planned part for bytes that belong to no tensor."""
    part = WantedPart("uint8", (data.size,), data.size)
    return PlannedPart(*NO_TENSOR, part, offset, data=data)


def _abort(sinks: Iterable[Sink]) -> None:
    with uninterrupted():
        for sink in sinks:
            sink.abort()


def _place_of(sinks: list[Sink], file: int) -> Place:
    return sinks[file].place


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
