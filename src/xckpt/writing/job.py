"""From a plan to files; each appears complete under its name, or not at all.

Dask arrays are computed first, each chunk once and straight into its place, in one graph, so that
shared tasks run once. Chunks may be cut along any axis and come in any order. Their tasks open the
file by its path, so that any scheduler runs them, on any machine that has access to the file.
Arrays for compressed parts are computed into a temporary file. Then all other parts are streamed in
file order (`xckpt.writing.streaming`). Finally the files are renamed
(`xckpt.storage.sink.publish`).
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from functools import partial
from itertools import accumulate, islice, product
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np

from xckpt.arrays.converted import (
    BLOCK_NBYTES,
    ByteStream,
    Converted,
    StoredBytes,
    as_bytes,
    cast_block,
    count_lost,
    count_nonfinite,
    excess_zeros,
    packed_codes,
)
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.keys import chunks_along_slowest
from xckpt.arrays.parts import PartReader
from xckpt.elements import ELEMENT_TYPES, nbytes_of, stored_dtype
from xckpt.errors import CheckpointError, UnsupportedError, some, warn
from xckpt.formats.plan import Draft, LiteralBytes, Plan, PlannedPart, WantedPart, Written
from xckpt.formatting import counted
from xckpt.index import Index, Part, strides_of
from xckpt.interrupts import uninterrupted
from xckpt.opening.reading import CONFIGS
from xckpt.progress import Progress, report
from xckpt.storage import Source, is_remote
from xckpt.storage.limits import open_file
from xckpt.storage.sink import Sink, publish, write_at
from xckpt.writing.companions import Companions, companions_of, with_written_type
from xckpt.writing.origins import origin_of
from xckpt.writing.payloads import Gathered, Payload, lazy_dask_array
from xckpt.writing.rehearsal import changed_attributes
from xckpt.writing.streaming import NO_TENSOR, is_compressed, stored_nbytes, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from dask.delayed import Delayed

    from xckpt.arrays.converted import Cast
    from xckpt.arrays.streams import Block
    from xckpt.storage.partial import Place
    from xckpt.typing import Array
    from xckpt.writing.fitting import Fitting
    from xckpt.writing.targets import Target

# Runs shorter than this, in bytes, are written through a memory map instead of by system calls.
_SHORTEST_RUN = 1 << 12
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
# Computed tensors with NaN or infinities whose sources are read again, to find out whether they
# have some, too.
_MOST_SOURCES = 16


def _without_tensor(offset: int | None, data: ByteStream) -> PlannedPart:
    """Return a planned part for bytes that belong to no tensor."""
    part = WantedPart("uint8", (data.size,), data.size)
    return PlannedPart(*NO_TENSOR, part, offset, data=data)


def _literal(data: bytes) -> Converted:
    return Converted(np.frombuffer(data, np.uint8), "uint8", "exact")


class SpooledBytes(ByteStream):
    """A dask array in a temporary file, with at least a byte for each element."""

    whole = True

    def __init__(self, offset: int, data: Converted) -> None:
        super().__init__(data.name, data.size)
        self.offset, self.is_packed = offset, data.is_packed
        #: Size of the elements in the temporary file.
        self.spooled_nbytes = data.array.size * stored_dtype(data.dtype).itemsize
        self.file: Place | None = None  # once it is known

    def blocks(self, start: int, stop: int, buffer: Array) -> Iterator[Block]:
        """Read all elements back; see `ElementStream.blocks`."""
        if self.file is None:
            raise TypeError(self)
        position = 0
        for first in range(0, self.spooled_nbytes, BLOCK_NBYTES):
            nbytes = min(BLOCK_NBYTES, self.spooled_nbytes - first)
            codes = np.frombuffer(self.file.read(self.offset + first, nbytes), np.uint8)
            block = packed_codes(codes) if self.is_packed else codes
            yield position, (block,)
            position += len(block)


class _FileToWrite(NamedTuple):
    """One file of a checkpoint: its name if it is a companion, its plan, and parts with data."""

    name: str | None
    plan: Plan
    parts: list[PlannedPart]


class _ComputedPart(NamedTuple):
    """A dask array, and where it is computed into."""

    data: Converted
    file: int  # position among the temporary files; the spool is the last
    offset: int


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
        self._stores: list[_ComputedPart] = []
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
                _without_tensor(offset, _literal(data)) for offset, data in file_plan.literals
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
            if _is_scattered(data)
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
            return planned._replace(data=_literal(b""))
        if planned.offset is not None and planned.part.compression is None and not data.is_packed:
            self._stores.append(_ComputedPart(data, file, planned.offset))
            return planned
        spooled = SpooledBytes(self._spooled, data)
        self._stores.append(_ComputedPart(data, spool, self._spooled))
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

    def delayed(self) -> Any:
        """Make the tasks that write everything; the last one returns nothing."""
        import dask

        sinks = dask.delayed(self._begin_or_abort, pure=False)()
        count = len(self._files) + (self._spooled > 0)
        places = [dask.delayed(_place_of, pure=True)(sinks, file) for file in range(count)]
        return dask.delayed(self._end, pure=False)(sinks, self._store(places))

    def _store(self, places: Sequence[Any], observer: str = "") -> list[Any]:
        """Return the tasks that compute all dask arrays into the files at these places."""
        return [_store(data, places[file], offset, observer) for data, file, offset in self._stores]

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

    def _end(self, sinks: list[Sink], lost: Sequence[Array]) -> None:
        """Finish the files; the last task of `delayed`, which waits for those of `_store`."""
        self._finish(sinks, Progress(False, ""))  # noqa: FBT003  no bar
        self._warn_of_lost(lost)

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
        if new := _new_nonfinite(self._stores, lost):
            nans, infinities = (sum(numbers) for numbers in zip(*new.values(), strict=True))
            total = counted(nans + infinities, "computed element")
            kinds = " or ".join(["NaN"] * (nans > 0) + ["infinite"] * (infinities > 0))
            hint = _UNSTACK if _are_filled(self._stores, new) else ""
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
        attrs = {k: value for k, value in gathered.attrs.items() if f"{k}.json" not in CONFIGS}
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


# --- dask arrays into their places ----------------------------------------------------------------


class _ArrayTarget(NamedTuple):
    """The place, type and order of a dask array in a file, for its tasks."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    #: Type of the dask array; interpolation computes wider chunks than it declares.
    declared: np.dtype[Any]
    cast: Cast
    tensor: str  # for messages
    order: str
    observer: str  # name of the progress bar
    is_computed: bool  # from tensors of files, rather than in memory or by another engine


def _store(data: Converted, place: Any, offset: int, observer: str = "") -> Delayed:
    """Return a task that counts what is lost, after tasks for chunks wrote to a file."""
    # One layer for all chunks. `map_blocks` would run the task that makes the file a second time.
    import dask
    from dask.delayed import Delayed
    from dask.highlevelgraph import HighLevelGraph

    from xckpt.arrays.graph import is_computed

    if any(np.isnan(size) for sizes in data.array.chunks for size in sizes):
        raise UnsupportedError(
            "the sizes of its chunks are not known before it is computed",
            tensor=data.name,
            hint="Call .compute_chunk_sizes() on the dask array, or compute it",
        )
    # Bound, because dask looks for tasks in arguments: in all of it, once for each chunk.
    target = _ArrayTarget(
        offset,
        data.array.shape,
        data.dtype,
        data.array.dtype,
        data.cast,
        data.name,
        data.order,
        observer,
        is_computed(data.array),
    )
    write = partial(_store_block, target)
    name = f"xckpt-write-{uuid4().hex}"
    file = dask.delayed(place, pure=False, traverse=False)
    origins = product(*(accumulate(sizes[:-1], initial=0) for sizes in data.array.chunks))
    layer: dict[Any, Any] = {
        (name, *position): (write, (data.array.name, *position), file.key, list(origin))
        for position, origin in zip(np.ndindex(data.array.numblocks), origins, strict=True)
    }
    layer[name] = (sum, list(layer))
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[data.array, file])
    return Delayed(name, graph)


def _store_block(target: _ArrayTarget, block: Any, place: Place, origin: Sequence[int]) -> Array:
    """Convert a chunk and write it to its place; return the numbers that `_warn_of_lost` adds."""
    # Axes are in the order of the file from here on.
    is_turned = target.order == "F"
    values = np.asarray(block).T if is_turned else np.asarray(block)
    if values.dtype.kind == target.declared.kind == "f":
        values = values.astype(target.declared, copy=False)
    first, counts = origin[::-1] if is_turned else origin, np.zeros(4, np.int64)
    with place.named():
        fileno = open_file(place.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            # Small pieces, so that conversions need little memory besides the chunk.
            for key in _pieces(values.shape, stored_dtype(target.dtype).itemsize):
                start = [low + entry.start for low, entry in zip(first, key, strict=True)]
                piece = values[key]

                def position(number: int, start: Any = start, shape: Any = piece.shape) -> Any:
                    inside = np.unravel_index(number, shape)
                    place = [low + int(at) for low, at in zip(start, inside, strict=True)]
                    return place[::-1] if is_turned else place

                options: Any = {"tensor": target.tensor, "position": position}
                converted = cast_block(piece, target.dtype, target.cast, **options)
                if target.cast == "allow":
                    counts[0] += count_lost(piece, converted)
                    counts[3] += excess_zeros(piece, converted)
                if target.is_computed:
                    counts[1:3] += count_nonfinite(piece)
                _write_run(place.path, fileno, target, converted, start)
        finally:
            os.close(fileno)
    report(target.observer, nbytes_of(target.dtype, values.size))
    return counts


def _new_nonfinite(
    stores: Iterable[_ComputedPart], lost: Iterable[Array]
) -> dict[str, tuple[int, int]]:
    """Return the numbers of NaN and infinities by tensor, without those that sources explain."""
    from xckpt.arrays.graph import lazies_in  # which imports dask

    pairs = zip(stores, lost, strict=False)
    counts = [(store.data, (int(n), int(i))) for store, (_, n, i, _) in pairs if n or i]
    new = {}
    for data, (nans, infinities) in counts[:_MOST_SOURCES]:
        sources = [lazy_dask_array(lazy) for lazy in lazies_in(data.array).values()]
        if any(np.isnan(source).any().compute() for source in sources):
            continue
        is_new = infinities > 0 and not any(np.isinf(s).any().compute() for s in sources)
        if nans or is_new:
            new[data.name] = nans, infinities * is_new
    return new and new | {data.name: numbers for data, numbers in counts[_MOST_SOURCES:]}


def _are_filled(stores: Iterable[_ComputedPart], new: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether a tensor of a stack is NaN as a whole, as xarray fills missing numbers."""
    from xckpt.arrays.graph import lazies_in  # which imports dask

    return any(
        new.get(store.data.name, (0, 0))[0] == store.data.array.size
        and any(
            len([*islice(o.tensor_origins, 2)]) > 1 for o in lazies_in(store.data.array).values()
        )
        for store in stores
    )


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yield the keys of pieces of an array, of about `BLOCK_NBYTES` each."""
    if 0 in shape:
        return
    along = []
    for lengths in chunks_along_slowest(shape, itemsize, BLOCK_NBYTES):
        stops = accumulate(lengths)
        along.append([slice(b - n, b) for n, b in zip(lengths, stops, strict=True)])
    yield from product(*along)


def _write_run(
    path: str,
    fileno: int,
    target: _ArrayTarget,
    block: Array,
    start: Sequence[int],
) -> None:
    """Write a block that begins at `start`; its axes are in the order of the file."""
    shape = target.shape[::-1] if target.order == "F" else target.shape
    split, run = _longest_run(shape, block.shape)
    if split and run * block.itemsize < _SHORTEST_RUN and prod(block.shape[:split]) > 1:
        memory = np.memmap(path, block.dtype, "r+", target.offset, shape)
        memory[tuple(slice(a, a + n) for a, n in zip(start, block.shape, strict=True))] = block
        return
    strides = strides_of(shape)
    for position in np.ndindex(block.shape[:split]):
        inside = (*position, *(0 for _ in shape[split:]))
        first = sum((a + i) * s for a, i, s in zip(start, inside, strides, strict=True))
        write_at(fileno, as_bytes(block[position]), target.offset + first * block.itemsize)


def _longest_run(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, int]:
    """Return the first of the axes along which a block is contiguous, and the length of a run."""
    # A block of (2, 3, 8) elements in a tensor of (10, 4, 8): runs of 24, from axis 1 on.
    split = len(shape)
    while split and block[split:] == shape[split:]:
        split -= 1
    return split, prod(block[split:])


def _is_scattered(data: Converted) -> bool:
    """Return whether some chunks are written in runs so short that a memory map is used."""
    turned = data.order == "F"
    shape = data.array.shape[::-1] if turned else data.array.shape
    chunks = tuple(min(sizes) if sizes else 0 for sizes in data.array.chunks)
    split, run = _longest_run(shape, chunks[::-1] if turned else chunks)
    return split > 0 and run * stored_dtype(data.dtype).itemsize < _SHORTEST_RUN
