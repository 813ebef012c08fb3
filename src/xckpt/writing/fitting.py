"""From what is to be written to what a format can hold: types, layouts, orders, attributes.

What a file was merely opened with (its compression, its digests, its memory order) comes back
where the format has it. What is asked for and cannot be had is an error, before anything is
written; what changes its form or has no place is told in one warning.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.dtypes import nbytes_of
from xckpt.errors import CheckpointWarning, UnsupportedError, shown
from xckpt.index import Index, Part, Tensor
from xckpt.listing import free_name
from xckpt.writing.casting import choose_type
from xckpt.writing.entries import ArrayPart, Contents, Entry
from xckpt.writing.inline import put_inline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xckpt.formats import Format
    from xckpt.writing.casting import Cast
    from xckpt.writing.requests import Requests

__all__ = ["Fitted", "Notes", "fit"]

_SHOWN_NAMES = 5
_OF_FILE = "attributes of the file without a place"
_OF_TENSORS = "attributes of tensors without a place"


class Notes:
    """What a user should know of a file that was written, collected for one warning."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = defaultdict(list)

    def add(self, what: str, name: str) -> None:
        """Note something."""
        self._names[what].append(name)

    def warn(self, path: str, stacklevel: int) -> None:
        """Warn of all that was noted, if anything was."""
        if not self._names:
            return
        lines = [f"{what}: {_listed(names)}" for what, names in self._names.items()]
        text = f"{path}: " + "; ".join(lines)
        warnings.warn(text, CheckpointWarning, stacklevel=stacklevel + 1)


def _listed(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    text = ", ".join(map(shown, unique[:_SHOWN_NAMES]))
    more = len(unique) - _SHOWN_NAMES
    return f"{text} and {more} more" if more > 0 else text


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a format's plan is made of.

    Parameters
    ----------
    index : Index
        What is to be written.
    entries : dict of str to Entry
        The same with data, by tensor.
    """

    index: Index
    entries: dict[str, Entry]


def fit(
    contents: Contents,
    writer: Format,
    requests: Requests,
    cast: Cast,
    notes: Notes,
) -> Fitted:
    """Bring tensors into a form that a format has."""
    fitted: dict[str, Entry] = {}
    names = {entry.tensor.name for entry in contents.entries}
    for entry in contents.entries:
        wanted = requests.of(entry.tensor.name)
        for shaped in _in_layout(entry, writer, wanted, cast, notes, names=names):
            name = shaped.tensor.name
            if name in fitted:
                raise ValueError(f"two tensors are called {shown(name)}")
            shaped.level = wanted.get("level")
            shaped.tensor = _fitted(shaped.tensor, writer, wanted, cast, notes)
            fitted[name] = shaped
    requests.check_used(fitted)
    put_inline([each for each in fitted.values() if writer.is_inline(each.tensor)], cast)
    kept = _kept_attrs(contents.attrs, writer.can.file_attrs, _OF_FILE, notes)
    tensors = {name: entry.tensor for name, entry in fitted.items()}
    return Fitted(Index(writer.name, "", tensors, kept), fitted)


def _in_layout(
    entry: Entry,
    writer: Format,
    wanted: Mapping[str, Any],
    cast: Cast,
    notes: Notes,
    *,
    names: set[str],
) -> Iterator[Entry]:
    """Return a tensor in a layout that the format has: as it is, dense, or as its parts."""
    tensor = entry.tensor
    if tensor.layout in writer.can.layouts and wanted.get("layout", tensor.layout) == tensor.layout:
        yield entry
    elif "layout" in wanted and entry.values is not None and tensor.layout != "structural":
        yield dense_entry(tensor, entry.values())
    elif cast != "never" and tensor.layout != "structural" and entry.values is not None:
        notes.add(f"{tensor.layout} tensors written dense", tensor.name)
        values = entry.values()
        yield dense_entry(tensor, values)
    elif tensor.layout == "structural" and cast != "never":
        notes.add("tensors written as their parts", tensor.name)
        for role, part in tensor.parts.items():
            name = free_name(f"{tensor.name}:{role}", names)
            names.add(name)
            shape = part.shape or ()
            alone = Tensor(name, part.dtype, shape, {"data": part}, attrs=tensor.attrs)
            yield Entry(alone, {"data": entry.parts[role]})
    else:
        raise UnsupportedError(
            f"{tensor.layout} tensors have no place in format {writer.name!r}",
            tensor=tensor.name,
            rule="Layout",
            hint="cast='exact' writes the values dense" if cast == "never" else None,
        )


def dense_entry(tensor: Tensor, values: Any) -> Entry:
    """Make the dense entry of a tensor that was of another layout."""
    dtype = values.dtype.name
    part = Part(dtype, tensor.shape, 0, nbytes_of(dtype, tensor.size))
    alone = Tensor(
        tensor.name,
        dtype,
        tensor.shape,
        {"data": part},
        attrs=tensor.attrs,
        dims=tensor.dims,
        path=tensor.path,
    )
    return Entry(alone, {"data": ArrayPart(values, tensor.name)})


def _fitted(
    tensor: Tensor, writer: Format, wanted: Mapping[str, Any], cast: Cast, notes: Notes
) -> Tensor:
    """Choose element type, memory order, compression, digests and attributes of a tensor."""
    dtype, parts = _typed(tensor, writer, wanted, cast)
    compression = _choice("compression", tensor, writer.can.compressions, wanted)
    digest = _choice("digest", tensor, writer.can.digests, wanted)
    for role, part in parts.items():
        encoding, algorithm = compression, digest
        if compression is _UNASKED:
            encoding = _inherited(part.encoding, writer.can.compressions)
        if digest is _UNASKED:
            algorithm = _inherited(part.digest, writer.can.digests)
        # Files have 90,000 tensors of which nothing changes.
        if (encoding, algorithm) != (part.encoding, part.digest):
            parts[role] = replace(part, encoding=encoding, digest=algorithm)
    attrs = _kept_attrs(tensor.attrs, writer.can.tensor_attrs, _OF_TENSORS, notes)
    order: Any = tensor.order if tensor.order in writer.can.orders else writer.can.orders[0]
    if (dtype, parts, order, attrs) == (tensor.dtype, tensor.parts, tensor.order, tensor.attrs):
        return tensor
    return replace(tensor, dtype=dtype, parts=parts, order=order, attrs=attrs)


def _typed(
    tensor: Tensor, writer: Format, wanted: Mapping[str, Any], cast: Cast
) -> tuple[str, dict[str, Part]]:
    """Choose the element type, and give the parts with it."""
    parts = dict(tensor.parts)
    role = _VALUES.get(tensor.layout)
    if role is None:
        if "dtype" in wanted:
            reason = f"the element type of a {tensor.layout} tensor cannot be chosen"
            raise UnsupportedError(reason, tensor=tensor.name)
        return tensor.dtype, parts
    part = parts[role]
    dtype = choose_type(wanted.get("dtype", part.dtype), writer.can.types, cast, tensor=tensor.name)
    if dtype != part.dtype:
        count = tensor.size if part.shape is None else prod(part.shape)
        parts[role] = replace(part, dtype=dtype, nbytes=nbytes_of(dtype, count))
    return dtype, parts


# The parts that have the element type of the tensor.
_VALUES = {"dense": "data", "sparse_csr": "values", "sparse_coo": "values"}
_UNASKED: Any = object()


def _choice(what: str, tensor: Tensor, known: tuple[str, ...], wanted: Mapping[str, Any]) -> Any:
    choice = wanted.get(what, _UNASKED)
    if choice is _UNASKED or choice is None or choice in known:
        return choice
    has = f"has {', '.join(known)}" if known else "has none"
    raise UnsupportedError(
        f"the {what} {choice!r} is not one of this format, which {has}",
        tensor=tensor.name,
        rule="Encoding",
    )


def _inherited(before: str | None, known: tuple[str, ...]) -> str | None:
    """Return what a part was stored with, or what the format has of the same kind."""
    if before is None or before in known:
        return before
    return known[0] if known else None


def _kept_attrs(
    attrs: Mapping[str, Any], known: tuple[str, ...] | None, what: str, notes: Notes
) -> dict[str, Any]:
    kept = {}
    for name, value in attrs.items():
        if known is None or name in known:
            kept[name] = _plain(value)
        else:
            notes.add(what, str(name))
    return kept


def _plain(value: Any) -> Any:
    """Return what numpy wraps as what Python has."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        plain = [_plain(inner) for inner in value]
        return plain if isinstance(value, list) else tuple(plain)
    return value
