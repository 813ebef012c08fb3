"""Fitting of new tensors to the types, layouts, orders and attributes that a format supports.

The compression, digests and memory order of the old file are kept if the format supports them. A
request that the format cannot meet raises before anything is written. One warning lists all data
that is dropped or changes its form.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from copy import copy
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import translate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from xckpt.arrays.converted import Cast, Converted, holds
from xckpt.arrays.dense import OnePartArray
from xckpt.datasets.listing import free_name
from xckpt.elements import BLOCK_TYPES, ELEMENT_TYPES, element_type_of, nbytes_of
from xckpt.errors import (
    CheckpointError,
    UnsupportedError,
    causes_of,
    shown,
    some,
    unreadable_lines,
    warn,
)
from xckpt.formats.plan import Draft, WantedPart
from xckpt.index import Arrangement, is_json
from xckpt.writing.payloads import Gathered, Payload

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from xckpt.errors import Cause
    from xckpt.formats import Can, Format
    from xckpt.index import Part

_SHOWN_NAMES = 5
#: Changes of attributes.
FILE_ATTRS = "attributes of the file without a place"
TENSOR_ATTRS = "attributes of tensors without a place"
_SHARED = "tensors that shared their bytes with others are written by themselves"
# Part with the element type of the tensor, by layout.
_VALUES = {"dense": "data", "sparse_csr": "values", "sparse_csc": "values", "sparse_coo": "values"}
TENSOR_OPTIONS = ("compression", "level", "digest", "dtype", "layout")


class Changes:
    """Data that is dropped or changes its form, collected for one warning."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, None]] = defaultdict(dict)
        #: Number of tensors by their old and new element types.
        self.recast: Counter[tuple[str, str]] = Counter()
        #: Errors of tensors that cannot be read, by name.
        self.lost: dict[str, CheckpointError] = {}

    def add(self, change: str, name: str) -> None:
        """Add a name to a kind of change."""
        self._names[change][name] = None

    def add_all(self, change: str, names: Iterable[str]) -> None:
        """Add changes of the same kind."""
        for name in names:
            self.add(change, name)

    def warn(self, path: str) -> None:
        """Warn of all changes, if there are any."""
        if self._names:
            listed = [
                f"{change}: {some(list(names), '', _SHOWN_NAMES)}"
                for change, names in self._names.items()
            ]
            text = f"{path}: " + "; ".join(listed)
            warn(text)


# --- requests ------------------------------------------------------------------------------------


class Requests:
    """The user's storage options by glob of tensor names; ``encoding=`` of `xckpt.save`."""

    def __init__(self, encoding: Mapping[str, Mapping[str, Any]] | None, dtype: Any = None) -> None:
        self._requests = [
            (glob, re.compile(translate(glob)).match, _parse_request(glob, options))
            for glob, options in (encoding or {}).items()
        ]
        # For floats only, unless it is an integer type itself.
        self._dtype = None if dtype is None else _parse_request("*", {"dtype": dtype})["dtype"]

    def of(self, name: str, dtype: str) -> dict[str, Any]:
        """Return the options for a tensor of a type; if several globs match, later ones win."""
        request: dict[str, Any] = {}
        if self._dtype is not None and (_is_integer(self._dtype) or not _is_integer(dtype)):
            request["dtype"] = self._dtype
        for glob, matches, options in self._requests:
            # Brackets are special in globs, but a name that is spelled with them matches too.
            if glob == name or matches(name):
                request |= options
        return request

    def check_used(self, names: Iterable[str]) -> None:
        """Raise if a glob matches no tensor; this is usually a typo."""
        names = list(names)
        for glob, matches, _ in self._requests:
            if glob != "*" and not any(glob == name or matches(name) for name in names):
                similar = ", ".join(map(shown, get_close_matches(glob, names, n=3)))
                hint = f"; similar names: {similar}" if similar else ""
                raise ValueError(f"encoding: {shown(glob)} matches no tensor{hint}")


def _is_integer(dtype: str) -> bool:
    """Return whether elements are integers; values of quantised types are not."""
    element = ELEMENT_TYPES.get(dtype)
    return element is not None and element.range is not None


def _parse_request(glob: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a glob with a parsed element type; raise if they are invalid."""
    if not hasattr(options, "items"):
        raise TypeError("encoding maps globs of tensor names to mappings")
    for key in options:
        if key not in TENSOR_OPTIONS:
            similar = get_close_matches(str(key), TENSOR_OPTIONS, n=1)
            choices = f"known are {', '.join(TENSOR_OPTIONS)}"
            hint = f"did you mean {similar[0]!r}?" if similar else choices
            raise ValueError(f"encoding[{shown(glob)}]: {key!r} is not known; {hint}")
    request = dict(options)
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


# --- fitting to a format -------------------------------------------------------------------------

_SKIP = "Pass skip_unreadable=True to write the others"
_SKIP_ONE = "Pass skip_unreadable=True to leave it out"


def _unreadable_error(causes: Sequence[Cause], total: int, path: str) -> CheckpointError:
    """Return the error of writing a checkpoint from which tensors cannot be read."""
    error, names = causes[0]
    if len(causes) == len(names) == 1:
        hint = f"{error.hint}. {_SKIP_ONE}" if error.hint else _SKIP_ONE
        error = copy(error).located(path=path or None, tensor=names[0])
        error.hint = hint
        return error
    head, *lines = unreadable_lines(path, causes, total)
    reason = f"{head}: {'; '.join(lines)}" if lines else head
    return type(error)(reason, path=path or None, hint=_SKIP)


class Fitting:
    """Converts tensors to forms that a format supports, and collects the changes."""

    def __init__(
        self, writer: Format, requests: Requests, cast: Cast, *, skip_unreadable: bool = False
    ) -> None:
        if cast not in get_args(Cast):
            raise ValueError(f"cast must be 'exact', 'allow' or 'never', not {cast!r}")
        self.writer, self.requests, self.cast = writer, requests, cast
        self.skip_unreadable = skip_unreadable
        self.changes = Changes()

    def require_readable(self, count: int, path: str) -> None:
        """Raise if tensors cannot be read, unless they are to be left out.

        `count` is the number of readable tensors, and `path` the file or object for messages. A
        file without any tensor is never written instead.
        """
        causes = causes_of(self.changes.lost.items())
        if causes and not (self.skip_unreadable and count):
            raise _unreadable_error(causes, count + len(self.changes.lost), path)
        for cause in causes:
            for name in cause.tensors:
                self.changes.add(f"left out, unreadable ({cause.reason(path, brief=True)})", name)

    def draft(self, gathered: Gathered, path: str) -> tuple[Draft, dict[str, Payload]]:
        """Return the draft of a new file, and its tensors with their data."""
        can = self.writer.can_in(path)
        fitted: dict[str, Payload] = {}
        extra_attrs: dict[str, dict[str, Any]] = {}
        names = {payload.name for payload in gathered.payloads}
        parts: dict[Hashable, Part] = {}
        for payload, request in self._with_requests(gathered.payloads):
            if (stored := _stored_part(payload)) is not None:
                first = parts.setdefault(stored.place, stored.part)
                # Tied tensors have different parts; copies by the user share one.
                if first is not stored.part:
                    self.changes.add(_SHARED, payload.name)
            for before, after in self._stored_forms(payload, request, names):
                name = before.name
                if name in fitted:
                    raise ValueError(f"two tensors are called {shown(name)}")
                self._note_type(before, after)
                attrs, unsupported = _split_attrs(after.attrs, can.tensor_attrs)
                for key in unsupported:
                    if can.arrangement and is_json(key) and is_json(unsupported[key]):
                        extra_attrs.setdefault(name, {})[key] = unsupported[key]
                    else:
                        self.changes.add(TENSOR_ATTRS, str(key))
                fitted[name] = after if attrs == after.attrs else replace(after, attrs=attrs)
        self.requests.check_used([*names, *fitted])
        inline = [payload for payload in fitted.values() if self.writer.is_inline(payload)]
        fitted |= {payload.name: payload for payload in self._with_values(inline)}
        file_attrs, unsupported = _split_attrs(gathered.attrs, can.file_attrs)
        for key in unsupported:
            self.changes.add(FILE_ATTRS, key)
        arrangement = self._arrangement(gathered.arrangement.of(fitted), can)
        draft = Draft(fitted, file_attrs, path, arrangement, extra_attrs, gathered.attr_types)
        return draft, fitted

    def _note_type(self, before: Payload, after: Payload) -> None:
        if before.dtype != after.dtype:
            self.changes.recast[before.dtype, after.dtype] += 1
        elif after.widened:
            self.changes.add(after.widened, after.name)

    def _stored_forms(
        self, payload: Payload, request: Mapping[str, Any], names: set[str]
    ) -> list[tuple[Payload, Payload]]:
        """Return a tensor, or its parts, before and after encoding; empty if it is left out."""
        try:
            shaped = list(self._in_layout(payload, request, names))
            return [(tensor, self._encoded(tensor, request)) for tensor in shaped]
        except UnsupportedError as error:
            if not self.skip_unreadable:
                # Other hints already have a way to write it.
                if not error.hint or error.rule == "Dtype":
                    error.hint = f"{f'{error.hint}. ' if error.hint else ''}{_SKIP_ONE}"
                raise
            self.changes.add(f"left out ({error.reason})", payload.name)
            return []

    def _with_requests(
        self, payloads: Iterable[Payload]
    ) -> Iterator[tuple[Payload, dict[str, Any]]]:
        """Yield tensors with their requests; a quantised weight yields its stored tensors."""
        for payload in payloads:
            request = self.requests.of(payload.name, payload.dtype)
            if not payload.stored or request.get("layout") == "dense":
                yield payload, request
                continue
            for stored in payload.stored:
                options = request | self.requests.of(stored.name, stored.dtype)
                if "dtype" in options:
                    raise UnsupportedError(
                        "the element type of codes and scales cannot be chosen",
                        tensor=payload.name,
                        hint="layout='dense' writes the values, in any type",
                    )
                yield stored, options

    def _in_layout(
        self, payload: Payload, request: Mapping[str, Any], names: set[str]
    ) -> Iterator[Payload]:
        """Yield a tensor in a layout that the format supports: unchanged, dense, or its parts."""
        layout = payload.layout
        if layout in self.writer.can.layouts and request.get("layout", layout) == layout:
            yield payload
            return
        is_requested, may_change = "layout" in request, self.cast != "never"
        if layout != "structural" and payload.values is not None and (is_requested or may_change):
            if not is_requested:
                self.changes.add(f"{layout} tensors written dense", payload.name)
            values = payload.values()
            # Values of sparse tensors keep their stored type.
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
            hint = None if payload.values is None else "cast='exact' writes the values dense"
            raise UnsupportedError(
                f"{layout} tensors have no place in format {self.writer.name!r}",
                tensor=payload.name,
                rule="Layout",
                hint="cast='exact' writes its parts" if layout == "structural" else hint,
            )

    def _encoded(self, tensor: Payload, request: Mapping[str, Any]) -> Payload:
        """Return a tensor with its new element type, memory order, compression and digests."""
        can, name, dtype, parts = self.writer.can, tensor.name, tensor.dtype, dict(tensor.parts)
        role = _VALUES.get(tensor.layout)
        if role is not None:
            part = parts[role]
            dtype = request.get("dtype", part.dtype)
            dtype = choose_type(dtype, can.types_for(part.shape), self.cast, tensor=name)
            if dtype != part.dtype:
                # Values that are not rounded yet are cast to the new type.
                tensor = replace(tensor, rounds=False, data=tensor.wide_data or tensor.data)
                parts[role] = part._replace(dtype=dtype, nbytes=nbytes_of(dtype, prod(part.shape)))
        elif "dtype" in request:
            reason = f"the element type of a {tensor.layout} tensor cannot be chosen"
            hint = (
                "encoding={name: {'dtype': ...}} sets the type of each tensor that is not quantised"
            )
            raise UnsupportedError(reason, tensor=name, hint=hint)
        for option, supported in (("compression", can.compressions), ("digest", can.digests)):
            choice = request.get(option)
            if choice is not None and choice not in supported:
                has = f"has {', '.join(supported)}" if supported else "has none"
                reason = f"the {option} {choice!r} is not one of this format, which {has}"
                raise UnsupportedError(reason, tensor=name, rule="Encoding")
        level = request.get("level")
        for role, part in parts.items():
            compression = _choose_option(request, "compression", part.compression, can.compressions)
            algorithm = _choose_option(request, "digest", part.algorithm, can.digests)
            # Copies take time: files have up to 90,000 tensors, and most stay unchanged.
            if (compression, algorithm, level) != (part.compression, part.algorithm, None):
                parts[role] = part._replace(
                    compression=compression, algorithm=algorithm, level=level
                )
        order: Any = tensor.order if tensor.order in can.orders else can.orders[0]
        if (dtype, parts, order) == (tensor.dtype, tensor.parts, tensor.order):
            return tensor
        return replace(tensor, dtype=dtype, parts=parts, order=order)

    def _with_values(self, payloads: Sequence[Payload]) -> Iterator[Payload]:
        """Yield tensors with the values that a format writes into its header."""
        streams = [
            payload.part_bytes("data", payload.parts["data"], self.cast) for payload in payloads
        ]
        lazy = [data for data in streams if isinstance(data, Converted) and data.is_dask]
        if lazy:
            import dask

            # All at once, because they may share work.
            arrays = dask.compute(*(data.array for data in lazy))
            for unread, array in zip(lazy, arrays, strict=True):
                unread.array, unread.is_dask = array, False
        for payload, data in zip(payloads, streams, strict=True):
            try:
                value = b"".join(map(bytes, data.memories()))
            except CheckpointError as error:
                raise error.located(tensor=payload.name) from error.__cause__
            part = payload.parts["data"]._replace(inline=value)
            yield replace(payload, parts={"data": part})

    def _arrangement(self, arrangement: Arrangement, can: Can) -> Arrangement:
        """Return the parts of an arrangement that the format can write."""
        if not can.arrangement:
            for name in arrangement.coords:
                self.changes.add("coordinates that open as data variables", name)
            arrangement = Arrangement(modules=arrangement.modules)
        modules = {}
        for path, attrs in arrangement.modules.items():
            plain_attrs = _without_numpy(dict(attrs))
            if can.arrangement and is_json(path) and is_json(plain_attrs):
                modules[path] = plain_attrs
            elif attrs:
                self.changes.add("attributes of modules are not written", path)
        return replace(arrangement, modules=modules)


def _choose_option(
    request: Mapping[str, Any], option: str, before: str | None, supported: Sequence[str]
) -> str | None:
    """Return the requested value of an option, the old file's, or the format's default."""
    if option in request:
        choice: str | None = request[option]
        return choice
    return before if before is None or before in supported else next(iter(supported), None)


class _StoredPart(NamedTuple):
    place: Hashable  # file and byte range
    part: Part


def _stored_part(payload: Payload) -> _StoredPart | None:
    """Return the part of a dense tensor; None if it is not a range of a file."""
    array = payload.data.get("data")
    if not isinstance(array, OnePartArray) or not array.part_nbytes:
        return None
    part = array.reader.part
    if part.inline is not None:
        return None
    return _StoredPart((array.reader.source, part.offset, part.nbytes, part.skip), part)


def choose_type(dtype: str, supported: Sequence[str], cast: Cast, *, tensor: str) -> str:
    """Return a supported type for a tensor: its own, the smallest exact one, or else the widest."""
    if dtype in supported:
        return dtype
    kind, action = ELEMENT_TYPES[dtype].kind, "leave it out"
    targets = [ELEMENT_TYPES[name] for name in supported]
    lossy = [target for target in targets if target.kind == kind]
    lossy = lossy or [target for target in targets if target.kind == "float"]
    if exact := [target for target in targets if holds(target.name, dtype)]:
        smallest = min(exact, key=lambda target: (target.kind != kind, target.bits)).name
        if cast != "never":
            return smallest
        action = f"pass cast='exact' to write it as {smallest}"
    elif lossy and kind != "complex":
        if cast == "allow":
            return max(lossy, key=lambda target: target.bits).name
        action = "pass cast='allow' to lose some precision"
    raise UnsupportedError(
        f"{dtype} elements have no place in this format, which has {', '.join(supported)}",
        tensor=tensor,
        rule="Dtype",
        hint=f"Convert it with .astype(...), or {action}",
    )


def _split_attrs(
    attrs: Mapping[str, Any], supported: tuple[str, ...] | re.Pattern[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split attributes into supported and unsupported ones; None supports all names."""
    writable: dict[str, Any] = {}
    unsupported: dict[str, Any] = {}
    for name, value in attrs.items():
        if isinstance(supported, re.Pattern):
            is_supported = supported.fullmatch(str(name)) is not None
        else:
            is_supported = supported is None or name in supported
        group = writable if is_supported else unsupported
        group[name] = _without_numpy(value)
    return writable, unsupported


def _without_numpy(value: Any) -> Any:
    """Convert numpy scalars and arrays, also nested ones, to plain Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _without_numpy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        plain = [_without_numpy(inner) for inner in value]
        return plain if isinstance(value, list) else tuple(plain)
    return value
