"""Attributes that differ between two checkpoints: of the files, of their configs, of tensors.

Attributes that state how a file is stored (`Format.storage_attrs`) are left out, and so is what a
config says about the storage of weights. Two formats spell their own attributes differently: only
those that both files state are compared then, and others if both formats have room for any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isclose, isnan
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from xckpt.errors import CheckpointError, shown
from xckpt.formatting import counted, value_text
from xckpt.opening.detection import room_for_attributes
from xckpt.opening.reading import CONFIGS

if TYPE_CHECKING:
    import xarray as xr

    from xckpt.comparison.pairs import Match
    from xckpt.datasets.tensors import OpenTensors

#: Attributes that differ and are listed, at most.
MOST = 1000
_MOST_APART = 3  # characters or items of a long value that are shown
_DEEPEST = 8  # levels of a config that are compared key by key
# Keys of a config that state how weights are stored, and which program wrote them.
_STORAGE_KEYS = frozenset(
    {"torch_dtype", "dtype", "quantization_config", "transformers_version", "_name_or_path"}
)
# Files next to a checkpoint, which may lie elsewhere.
_CONFIG_NAMES = frozenset(name.removesuffix(".json") for name in CONFIGS)
_MISSING = object()


class AttributeChange(NamedTuple):
    """An attribute that differs; texts of the values, or None where it is missing."""

    name: str
    a: str | None
    b: str | None
    #: Number of the tensors whose attribute it is, and the first of them; 0 for a file.
    tensors: int = 0
    tensor: str = ""

    @classmethod
    def of(cls, name: str, a: Any, b: Any) -> Self:
        """Return the change of a value; `_MISSING` is no value."""
        first, second = (None if v is _MISSING else value_text(v) for v in (a, b))
        if first is not None and first == second:  # long values that begin alike
            first, second = _apart(first, a, b)
        return cls(name, first, second)

    def as_json(self) -> dict[str, Any]:
        """Return the change as a JSON object."""
        kind = "added" if self.a is None else "removed" if self.b is None else "changed"
        fields = {"name": self.name, "change": kind, "a": self.a, "b": self.b}
        return fields | ({"tensors": self.tensors, "tensor": self.tensor} if self.tensors else {})

    def __str__(self) -> str:
        subject = shown(self.name)[1:-1]
        if self.tensors:
            tensor, number = shown(self.tensor), counted(self.tensors, "tensor")
            subject += f" of {number}, such as {tensor}," if self.tensors > 1 else f" of {tensor}"
        if self.a is None or self.b is None:
            side, value = ("b", self.b) if self.a is None else ("a", self.a)
            return f"{subject} is only in {side}: {value}"
        return f"{subject} is {self.a} in a, {self.b} in b"


def attribute_changes(
    ours: OpenTensors, theirs: OpenTensors, rows: Iterable[Sequence[Match]]
) -> list[AttributeChange]:
    """Return the attributes of two checkpoints that differ, files first; at most `MOST`."""
    rooms = [room_for_attributes(tensors.format) for tensors in (ours, theirs)]
    storage = frozenset[str]().union(*[room.storage for room in rooms])
    # Names that may be on one side only; None if any may be.
    is_same_format = ours.format is not None and ours.format == theirs.format
    own = frozenset[str]().union(*[room.derived for room in rooms if not is_same_format])
    is_open = is_same_format or all(room.is_open for room in rooms)
    attrs = [_expanded(tensors) for tensors in (ours, theirs)]
    pairs = _pairs(attrs[0], attrs[1], storage, own if is_open else None)
    changes = list(islice((AttributeChange.of(*pair) for pair in pairs), MOST))
    is_open = is_same_format or all(room.is_open_for_tensors for room in rooms)
    by_name: dict[str, AttributeChange] = {}
    for match in (match for matches in rows for match in matches):
        first, second = _attrs_of(match.ours), _attrs_of(match.theirs)
        if first is None or second is None or not (first or second):
            continue
        for name, a, b in _pairs(first, second, storage, own if is_open else None):
            if name in by_name:
                old = by_name[name]
                by_name[name] = old._replace(tensors=old.tensors + 1)
            elif len(by_name) < MOST:
                change = AttributeChange.of(name, a, b)
                by_name[name] = change._replace(tensors=1, tensor=match.name)
    return [*changes, *by_name.values()][:MOST]


def state_attributes(result: xr.Dataset, changes: Sequence[AttributeChange]) -> None:
    """Add the attributes that differ to the result of a comparison, if any do."""
    if changes:
        result.attrs["attributes"] = list(map(str, changes))
        result.encoding["attributes"] = changes


def _attrs_of(stream: Any) -> Mapping[str, Any] | None:
    """Return the attributes of a tensor in its file; None if it is not a whole tensor of one."""
    origin = None if stream is None else getattr(stream.array, "origin", None)
    return None if origin is None else origin.tensor.attrs


def _pairs(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    storage: frozenset[str],
    own: frozenset[str] | None,
) -> Iterator[tuple[str, Any, Any]]:
    """Yield names and both values of the attributes that differ, apart from those in `storage`.

    If one side lacks an attribute in `own`, or any if `own` is None, it does not differ.
    """
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name, _MISSING), theirs.get(name, _MISSING)
        if name in storage:
            continue
        if a is not _MISSING and b is not _MISSING:
            yield from _differences(name, a, b)
        elif own is not None and name not in own and name not in _CONFIG_NAMES:
            yield name, a, b


def _expanded(tensors: OpenTensors) -> dict[str, Any]:
    """Return attributes by text; configs that a format keeps as text as mappings.

    The names of tied tensors that `safetensors.torch.save_model` adds are left out.
    """
    expanded = {}
    for name, value in tensors.read_attrs().items():
        if not isinstance(value, str):
            expanded[str(name)] = value
        elif name in _CONFIG_NAMES:
            expanded[str(name)] = _parsed(value)
        elif value not in tensors.structure:
            expanded[str(name)] = value
    return expanded


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; other texts unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _differences(name: str, a: Any, b: Any, depth: int = 0) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values that differ; mappings are compared key by key."""
    if isinstance(a, Mapping) and isinstance(b, Mapping) and depth < _DEEPEST:
        is_config = name.partition(".")[0] in _CONFIG_NAMES
        for key in dict.fromkeys([*a, *b]):
            if not (is_config and key in _STORAGE_KEYS):
                inner = a.get(key, _MISSING), b.get(key, _MISSING)
                yield from _differences(f"{name}.{key}", *inner, depth + 1)
    elif not _is_equal(a, b):
        yield name, a, b


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal: as numbers in 32 bits, or one as text."""
    if a is b:
        return True
    if a is _MISSING or b is _MISSING:
        return False
    a, b = _plain(a), _plain(b)
    try:
        if bool(a == b):
            return True
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(map(_is_equal, a, b))
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
        if isinstance(a, float) and isinstance(b, float):
            return (isnan(a) and isnan(b)) or isclose(a, b, rel_tol=2**-24)
        if isinstance(a, str) != isinstance(b, str):
            text, value = (a, b) if isinstance(a, str) else (b, a)
            return text == str(value) or _is_equal_as_json(text, value)
    except (CheckpointError, RecursionError, ValueError):
        pass  # a list that cannot be read, deep nesting, an array that is not a single value
    return False


def _is_equal_as_json(text: str, value: Any) -> bool:
    parsed = _parsed(text)
    return not isinstance(parsed, str) and _is_equal(parsed, value)


def _plain(value: Any) -> Any:
    """Return lists of files, arrays and tuples as lists, and mappings as dicts."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _apart(text: str, a: Any, b: Any) -> tuple[str, str]:
    """Return texts of two long values that begin alike, with the first place that differs."""
    place, ends = "other contents", ["", ""]
    try:
        sides = [value if isinstance(value, str) else list(_plain(value)) for value in (a, b)]
        pairs = enumerate(zip(*sides, strict=False))
        first = next((n for n, (x, y) in pairs if not _is_equal(x, y)), min(map(len, sides)))
        place = f"from {first:,}: "
        ends = [value_text(side[first : first + _MOST_APART]) for side in sides]
    except (CheckpointError, RecursionError, TypeError):
        pass  # a list that cannot be read
    return f"{text} ({place}{ends[0]})", f"{text} ({place}{ends[1]})"
