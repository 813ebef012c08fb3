"""New tensors in the types, layouts, orders and attributes that a format has.

The compression, digests and memory order of the old file are kept if the format has them. A request
that the format cannot meet is an error before anything is written. One warning lists everything
that changes its form or has no place.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import translate
from math import isclose, isnan, prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, get_args

from xckpt.arrays.dense import OnePartArray
from xckpt.datasets.listing import free_name
from xckpt.elements import BLOCK_TYPES, ELEMENT_TYPES, element_type_of, nbytes_of
from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown, some, warn
from xckpt.formats.plan import Draft, WantedPart, Written
from xckpt.index import Arrangement, is_json
from xckpt.storage.digests import Hasher
from xckpt.writing.casting import Cast, holds
from xckpt.writing.data import ArrayData, Gathered, Payload

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Hashable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from xckpt.formats import Can, Format, Readable
    from xckpt.formats.plan import LiteralBytes, Plan
    from xckpt.index import Index, Tensor

__all__ = [
    "TENSOR_OPTIONS",
    "Changes",
    "Fitting",
    "Requests",
    "choose_type",
]

_SHOWN_NAMES = 5
_OF_FILE = "attributes of the file without a place"
_OF_TENSORS = "attributes of tensors without a place"
_OTHERWISE = {
    _OF_FILE: "attributes of the file that it states otherwise",
    _OF_TENSORS: "attributes of tensors that the file states otherwise",
}
_SHARED = "tensors that shared their bytes with others are written by themselves"
# The parts that have the element type of the tensor.
_VALUES = {"dense": "data", "sparse_csr": "values", "sparse_csc": "values", "sparse_coo": "values"}
TENSOR_OPTIONS = ("compression", "level", "digest", "dtype", "layout")


class Changes:
    """Everything that is left out or changes its form, collected for one warning."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, None]] = defaultdict(dict)
        #: How many tensors change from which element type to which.
        self.recast: Counter[tuple[str, str]] = Counter()

    def add(self, what: str, name: str) -> None:
        """Add a name to a kind of change."""
        self._names[what][name] = None

    def warn(self, path: str) -> None:
        """Warn of all changes, if there are any."""
        if self._names:
            listed = [
                f"{what}: {some(list(names), '', _SHOWN_NAMES)}"
                for what, names in self._names.items()
            ]
            text = f"{path}: " + "; ".join(listed)
            warn(text)


# --- what is asked for ---------------------------------------------------------------------------


class Requests:
    """``encoding=``: how a user wants tensors to be stored; see `xckpt.save`."""

    def __init__(self, encoding: Mapping[str, Mapping[str, Any]] | None) -> None:
        self._requests = [
            (glob, re.compile(translate(glob)).match, _parsed(glob, wanted))
            for glob, wanted in (encoding or {}).items()
        ]

    def of(self, name: str) -> dict[str, Any]:
        """Return the request for a tensor; of several globs that match, later ones win."""
        wanted: dict[str, Any] = {}
        for glob, matches, request in self._requests:
            # A glob with brackets matches the name that is spelled like it, too.
            if glob == name or matches(name):
                wanted |= request
        return wanted

    def check_used(self, names: Iterable[str]) -> None:
        """Raise if a glob matches no tensor; this is usually a typo."""
        names = list(names)
        for glob, matches, _ in self._requests:
            if glob != "*" and not any(glob == name or matches(name) for name in names):
                alike = ", ".join(map(shown, get_close_matches(glob, names, n=3)))
                hint = f"; similar names: {alike}" if alike else ""
                raise ValueError(f"encoding: {shown(glob)} matches no tensor{hint}")


def _parsed(glob: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    if not hasattr(wanted, "items"):
        raise TypeError("encoding maps globs of tensor names to mappings")
    for key in wanted:
        if key not in TENSOR_OPTIONS:
            alike = get_close_matches(str(key), TENSOR_OPTIONS, n=1)
            known = f"known are {', '.join(TENSOR_OPTIONS)}"
            hint = f"did you mean {alike[0]!r}?" if alike else known
            raise ValueError(f"encoding[{shown(glob)}]: {key!r} is not known; {hint}")
    request = dict(wanted)
    if "dtype" in request:
        name = str(request["dtype"]).lower()
        if name in BLOCK_TYPES:
            reason = f"{name} elements are quantised: blocks are copied as they are stored, and "
            reason += "nothing is quantised here"
            raise UnsupportedError(reason, rule="Dtype", hint="llama-quantize of llama.cpp does it")
        try:
            request["dtype"] = element_type_of(request["dtype"])
        except ValueError as error:
            raise ValueError(f"encoding[{shown(glob)}]: {error}") from None
    if request.get("layout", "dense") != "dense":
        raise ValueError(f"encoding[{shown(glob)}]: the only layout to ask for is 'dense'")
    level = request.get("level")
    if level is not None and level not in range(1, 23):
        raise ValueError(f"encoding[{shown(glob)}]: level {level!r} is not in 1 to 22")
    return request


# --- what a format has ---------------------------------------------------------------------------


class Fitting:
    """Brings tensors into a form that a format has, and collects the changes."""

    def __init__(self, writer: Format, requests: Requests, cast: Cast) -> None:
        if cast not in get_args(Cast):
            raise ValueError(f"cast must be 'exact', 'allow' or 'never', not {cast!r}")
        self.writer, self.requests, self.cast = writer, requests, cast
        self.changes = Changes()

    def draft(self, gathered: Gathered, path: str) -> tuple[Draft, dict[str, Payload]]:
        """Return the draft of a new file, and its tensors with their data."""
        can = self.writer.can_in(path)
        fitted: dict[str, Payload] = {}
        more: dict[str, dict[str, Any]] = {}
        names = {payload.name for payload in gathered.payloads}
        places: set[Hashable] = set()
        for payload, wanted in self._asked_for(gathered.payloads):
            place = _place(payload)
            if place in places:
                self.changes.add(_SHARED, payload.name)
            elif place is not None:
                places.add(place)
            for shaped in self._in_layout(payload, wanted, names):
                name = shaped.name
                if name in fitted:
                    raise ValueError(f"two tensors are called {shown(name)}")
                stored = self._stored(shaped, wanted)
                if stored.dtype != shaped.dtype:
                    self.changes.recast[shaped.dtype, stored.dtype] += 1
                attrs, rest = _kept_attrs(stored.attrs, can.tensor_attrs)
                for key in rest:
                    if can.arrangement and is_json(key) and is_json(rest[key]):
                        more.setdefault(name, {})[key] = rest[key]
                    else:
                        self.changes.add(_OF_TENSORS, str(key))
                fitted[name] = stored if attrs == stored.attrs else replace(stored, attrs=attrs)
        self.requests.check_used([*names, *fitted])
        inline = [payload for payload in fitted.values() if self.writer.is_inline(payload)]
        fitted |= {payload.name: payload for payload in self._with_values(inline)}
        kept, rest = _kept_attrs(gathered.attrs, can.file_attrs)
        for key in rest:
            self.changes.add(_OF_FILE, key)
        arrangement = self._arrangement(gathered.arrangement.of(fitted), can)
        return Draft(fitted, kept, path, arrangement, more, gathered.attr_types), fitted

    def _asked_for(self, payloads: Iterable[Payload]) -> Iterator[tuple[Payload, dict[str, Any]]]:
        """Return tensors with their requests; for a quantised weight, the tensors in its place."""
        for payload in payloads:
            wanted = self.requests.of(payload.name)
            if not payload.stored or wanted.get("layout") == "dense":
                yield payload, wanted
                continue
            for stored in payload.stored:
                options = wanted | self.requests.of(stored.name)
                if "dtype" in options:
                    raise UnsupportedError(
                        "the element type of codes and scales cannot be chosen",
                        tensor=payload.name,
                        hint="layout='dense' writes the values, in any type",
                    )
                yield stored, options

    def _in_layout(
        self, payload: Payload, wanted: Mapping[str, Any], names: set[str]
    ) -> Iterator[Payload]:
        """Return a tensor in a layout that the format has: as it is, dense, or as its parts."""
        layout = payload.layout
        if layout in self.writer.can.layouts and wanted.get("layout", layout) == layout:
            yield payload
            return
        is_asked, may_change = "layout" in wanted, self.cast != "never"
        if layout != "structural" and payload.values is not None and (is_asked or may_change):
            if not is_asked:
                self.changes.add(f"{layout} tensors written dense", payload.name)
            values = payload.values()
            # Values of sparse tensors keep the type that they are stored as.
            dtype = payload.dtype if layout.startswith("sparse_") else values.dtype.name
            yield Payload(
                payload.name,
                dtype,
                payload.shape,
                {"data": WantedPart.of(dtype, payload.shape)},
                attrs=payload.attrs,
                dims=payload.dims,
                path=payload.path,
                data={"data": values},
            )
        elif layout == "structural" and may_change:
            self.changes.add("tensors written as their parts", payload.name)
            for role, part in payload.parts.items():
                name = free_name(f"{payload.name}:{role}", names)
                names.add(name)
                yield Payload(
                    name,
                    part.dtype,
                    part.shape,
                    {"data": part},
                    attrs=payload.attrs,
                    data={"data": payload.data[role]},
                )
        else:
            raise UnsupportedError(
                f"{layout} tensors have no place in format {self.writer.name!r}",
                tensor=payload.name,
                rule="Layout",
                hint=None if may_change else "cast='exact' writes the values dense",
            )

    def _stored(self, tensor: Payload, wanted: Mapping[str, Any]) -> Payload:
        """Choose element type, memory order, compression and digests of a tensor."""
        can, name, dtype, parts = self.writer.can, tensor.name, tensor.dtype, dict(tensor.parts)
        role = _VALUES.get(tensor.layout)
        if role is not None:
            part = parts[role]
            dtype = choose_type(wanted.get("dtype", part.dtype), can.types, self.cast, tensor=name)
            if dtype != part.dtype:
                parts[role] = part._replace(dtype=dtype, nbytes=nbytes_of(dtype, prod(part.shape)))
        elif "dtype" in wanted:
            reason = f"the element type of a {tensor.layout} tensor cannot be chosen"
            raise UnsupportedError(reason, tensor=name)
        for what, known in (("compression", can.compressions), ("digest", can.digests)):
            choice = wanted.get(what)
            if choice is not None and choice not in known:
                has = f"has {', '.join(known)}" if known else "has none"
                reason = f"the {what} {choice!r} is not one of this format, which {has}"
                raise UnsupportedError(reason, tensor=name, rule="Encoding")
        level = wanted.get("level")
        for role, part in parts.items():
            compression = _alike(wanted, "compression", part.compression, can.compressions)
            algorithm = _alike(wanted, "digest", part.algorithm, can.digests)
            # Files have 90,000 tensors of which nothing changes.
            if (compression, algorithm, level) != (part.compression, part.algorithm, None):
                parts[role] = part._replace(
                    compression=compression, algorithm=algorithm, level=level
                )
        order: Any = tensor.order if tensor.order in can.orders else can.orders[0]
        if (dtype, parts, order) == (tensor.dtype, tensor.parts, tensor.order):
            return tensor
        return replace(tensor, dtype=dtype, parts=parts, order=order)

    def _with_values(self, payloads: Sequence[Payload]) -> Iterator[Payload]:
        """Read or compute, all at once, the values that a format writes into its header."""
        data = [each.part_data("data", each.parts["data"], self.cast) for each in payloads]
        lazy = [each.array for each in data if isinstance(each, ArrayData) and each.is_dask]
        if lazy:
            import dask

            lazy = list(dask.compute(*lazy))
        for payload, known in zip(payloads, data, strict=True):
            if isinstance(known, ArrayData) and known.is_dask:
                known = replace(known, array=lazy.pop(0))  # noqa: PLW2901
            try:
                value = b"".join(known.blocks())
            except CheckpointError as error:
                raise error.located(tensor=payload.name) from error.__cause__
            part = payload.parts["data"]._replace(inline=value)
            yield replace(payload, parts={"data": part})

    def _arrangement(self, wanted: Arrangement, can: Can) -> Arrangement:
        if not can.arrangement:
            for name in wanted.coords:
                self.changes.add("coordinates that open as data variables", name)
            wanted = Arrangement(modules=wanted.modules)
        modules = {}
        for path, attrs in wanted.modules.items():
            kept = _without_numpy(dict(attrs))
            if can.arrangement and is_json(path) and is_json(kept):
                modules[path] = kept
            elif attrs:
                self.changes.add("attributes of modules are not written", path)
        return replace(wanted, modules=modules)

    def tell_stated(
        self,
        draft: Draft,
        plan: Plan,
        *,
        given: Collection[str],
        before: Callable[[], Index | None],
        grown: Readable | None,
    ) -> None:
        """Add attributes that do not come back because the file states something in their place.

        The reader of the format reads the planned file to find them. `given` are options that take
        the place of attributes. `before` returns the index of the old file if it has the same
        format: attributes that it states itself are not lost. `grown` is a file that the plan adds
        to.
        """
        can = self.writer.can_in(draft.path)
        names = {
            what: {*can.stated_attrs, *(kept if isinstance(kept, tuple) else ())}
            for what, kept in ((_OF_FILE, can.file_attrs), (_OF_TENSORS, can.tensor_attrs))
        }
        names[_OF_FILE].difference_update(given)
        every = [(_OF_TENSORS, each.name, each.attrs) for each in draft.tensors.values()]
        wanted = [
            (what, tensor, key, attrs[key])
            for what, tensor, attrs in [(_OF_FILE, None, draft.attrs), *every]
            for key in attrs
            if key in names[what]
        ]
        if not wanted:
            return
        files = _planned_files(draft.path, plan, grown)
        # An index of shards belongs to no format.
        read = [
            self.writer.read(files[name]) for name in (plan.companions if plan.is_index else [""])
        ]
        offsets = {planned.tensor: planned.offset for planned in reversed(plan.parts)}
        stated = _stated(read, offsets)
        lost = []
        for what, tensor, key, value in wanted:
            now = stated(tensor)
            if key not in now or not _is_same(value, now[key]):
                lost.append((what, key, value, key in now))
        old = before() if lost else None
        described: dict[str, set[tuple[str, str]]] = {_OF_FILE: set(), _OF_TENSORS: set()}
        if old is not None:
            described[_OF_FILE] = {(key, repr(value)) for key, value in old.attrs.items()}
            of = [tensor.attrs for tensor in old.tensors.values()]
            described[_OF_TENSORS] = {(key, repr(each[key])) for each in of for key in each}
        for what, key, value, is_stated in lost:
            if not is_stated and key not in can.stated_attrs:
                self.changes.add(what, key)
            elif (key, repr(value)) not in described[what]:
                self.changes.add(_OTHERWISE[what] if is_stated else what, key)


def _alike(
    wanted: Mapping[str, Any], what: str, before: str | None, known: Sequence[str]
) -> str | None:
    """Return the requested choice, the choice of the old file, or the format's own."""
    if what in wanted:
        found: str | None = wanted[what]
        return found
    return before if before is None or before in known else next(iter(known), None)


def _place(payload: Payload) -> Hashable:
    """Return the file and range of the bytes of a tensor; None if there are none."""
    array = payload.data.get("data")
    if not isinstance(array, OnePartArray) or not array.part_nbytes:
        return None
    part = array.reader.part
    if part.inline is not None:
        return None
    return array.reader.source, part.offset, part.nbytes, part.skip


def choose_type(name: str, writes: Sequence[str], cast: Cast, *, tensor: str) -> str:
    """Return the element type that a tensor is written as."""
    if name in writes:
        return name
    kind = ELEMENT_TYPES[name].kind
    types = [ELEMENT_TYPES[each] for each in writes]
    if cast != "never":
        holding = [each for each in types if holds(each.name, name)]
        if holding:
            return min(holding, key=lambda each: (each.kind != kind, each.bits)).name
    if cast == "allow":
        alike = [each for each in types if each.kind == kind]
        alike = alike or [each for each in types if each.kind == "float"]
        if alike and kind != "complex":
            return max(alike, key=lambda each: each.bits).name
    hint = "Convert it with .astype(...), or pass cast='allow' to lose some precision"
    raise UnsupportedError(
        f"{name} elements have no place in this format, which has {', '.join(writes)}",
        tensor=tensor,
        rule="Dtype",
        hint="Convert it with .astype(...), or leave it out" if cast == "allow" else hint,
    )


def _kept_attrs(
    attrs: Mapping[str, Any], known: tuple[str, ...] | re.Pattern[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes that have a place, and the others."""
    kept: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in attrs.items():
        if isinstance(known, re.Pattern):
            has_place = known.fullmatch(str(name)) is not None
        else:
            has_place = known is None or name in known
        place = kept if has_place else rest
        place[name] = _without_numpy(value)
    return kept, rest


def _without_numpy(value: Any) -> Any:
    """Return values of numpy as plain Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _without_numpy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        plain = [_without_numpy(inner) for inner in value]
        return plain if isinstance(value, list) else tuple(plain)
    return value


# --- attributes that the file will state itself --------------------------------------------------


def _stated(
    read: Sequence[Index], offsets: Mapping[str, int | None]
) -> Callable[[str | None], Mapping[str, Any]]:
    """Return a function from the name of a tensor to its attributes; None is the file."""
    of_file: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    places: dict[int | None, Tensor] = {}
    for index in reversed(read):
        of_file |= index.attrs
        tensors |= index.tensors
        for each in index.tensors.values():
            places |= {part.offset: each for part in each.parts.values() if part.shard is None}

    def find(name: str | None) -> Mapping[str, Any]:
        if name is None:
            return of_file
        # A format may have a name of its own for a tensor.
        tensor = tensors.get(name) or places.get(offsets.get(name))
        return {} if tensor is None else tensor.attrs

    return find


def _is_same(value: Any, stated: Any) -> bool:
    """Return whether a stated value equals another, as text, in 32 bits, or as a part of it."""
    if isinstance(value, dict) and isinstance(stated, dict):
        return all(key in stated and _is_same(value[key], stated[key]) for key in value)
    if isinstance(value, list | tuple) and isinstance(stated, list | tuple):
        return len(value) == len(stated) and all(map(_is_same, value, stated))
    if isinstance(value, float) and isinstance(stated, float) and not isnan(value):
        return isclose(value, stated, rel_tol=2**-24)
    return repr(value) == repr(stated) or str(value) == stated


class _PlannedFile:
    """A planned file for a reader of headers, with zeros in place of data."""

    def __init__(self, name: str, files: Mapping[str, _PlannedFile], old: Readable | None) -> None:
        self.name, self._files, self._old = name, files, old
        self.size = old.size if old else 0
        self._literals: list[tuple[int, bytes]] = []

    def put(self, literals: Iterable[LiteralBytes]) -> None:
        """Add literal bytes."""
        for literal in literals:
            offset = self.size if literal.offset is None else literal.offset
            self._literals.append((offset, literal.data))
            self.size = max(self.size, offset + len(literal.data))
        self._literals.sort(key=itemgetter(0))

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return exactly `nbytes` bytes."""
        end = offset + nbytes
        if not 0 <= offset <= end <= self.size:
            raise FormatError("what is read is not planned", path=self.name, offset=offset)
        read = bytearray(nbytes)
        if self._old is not None and offset < self._old.size:
            known = self._old.read(offset, min(end, self._old.size) - offset)
            read[: len(known)] = known
        first = bisect_right(self._literals, offset, key=itemgetter(0)) - 1
        for at, data in self._literals[max(first, 0) :]:
            if at >= end:
                break
            start, stop = max(at, offset), min(at + len(data), end)
            if start < stop:
                read[start - offset : stop - offset] = data[start - at : stop - at]
        return memoryview(read)

    def sibling(self, name: str) -> _PlannedFile:
        """Return another file of the plan."""
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name]


def _planned_files(path: str, plan: Plan, old: Readable | None) -> dict[str, _PlannedFile]:
    """Return the planned files by name; the one that is opened has the name ""."""
    plans = {**plan.companions, "": plan}
    files: dict[str, _PlannedFile] = {}
    written: dict[tuple[str, str], Written] = {}
    folder, slash, own = path.rpartition("/")
    for name, each in plans.items():
        file = _PlannedFile(folder + slash + (name or own), files, None if name else old)
        files[name] = file
        position = file.size
        for planned in each.parts:
            part, offset = planned.part, planned.offset
            if offset is None:
                offset = -(-(position + planned.gap) // each.alignment) * each.alignment
            digest = None
            if part.algorithm is not None:
                digest = f"{part.algorithm}:{Hasher(part.algorithm).value().hex()}"
            # The compressed size is unknown, and does not matter here.
            written[planned.tensor, planned.role] = Written(offset, part.nbytes, digest)
            position = offset + part.nbytes
            file.size = max(file.size, position)
        file.put(each.literals)
    for name, each in plans.items():
        files[name].put(each.finish(written))
        files[name].size = files[name].size if each.nbytes is None else each.nbytes
    return files
