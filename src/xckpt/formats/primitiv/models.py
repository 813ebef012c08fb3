"""Parameters and models: values and their statistics, by keys that are lists of any texts.

Names of variables, and places in a tree, are made of the keys. A byte of a key that is not UTF-8 is
a lone surrogate in the text of its element, as Python's error handler "surrogateescape" makes it.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats.primitiv.packed import (
    ARRAY,
    ObjectCursor,
    packed_string,
    packed_tensor,
    packed_uint32,
    read_tensor,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xckpt.formats import kit
    from xckpt.formats.plan import Draft, WantedTensor
    from xckpt.index import Tensor

    # What is written: bytes, and tensors in the place of their data.
    Pieces = Iterator[bytes | WantedTensor]

_K = TypeVar("_K", bound="Sequence[str]")
_N = TypeVar("_N")

# Each statistic repeats the name of its parameter: a small file must not make gigabytes of names.
_LONGEST_NAMES = 1 << 20
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_IN_ELEMENT = re.compile("[%.:\udc80-\udcff]")
_IN_STAT = re.compile("[%\udc80-\udcff]")
_IN_LEAF = re.compile("[%:]")
_ESCAPE = re.compile("%([0-9A-F]{2})")
_ERRORS = "surrogateescape"
# Longer keys state no path: a tree then splits their names, which it does up to a depth.
_DEEPEST = 64

# --- names ----------------------------------------------------------------------------------------


def variable_name(key: Sequence[str], stat: str | None = None) -> str:
    """Join the elements of a parameter's key, so that no two keys get one name."""
    if "" in key or _IN_ELEMENT.search("".join(key)) is not None:
        key = [_IN_ELEMENT.sub(_escaped, element) or "%" for element in key]
    name = ".".join(key)
    return name if stat is None else f"{name}:{_IN_STAT.sub(_escaped, stat)}"


def value_path(key: Sequence[str]) -> tuple[str, ...] | None:
    """Return the place of a parameter's value in a tree; its statistics are next to it."""
    if len(key) > _DEEPEST:
        return None
    return (*key[:-1], _IN_LEAF.sub(_escaped, key[-1]))


def key_and_stat(tensor: WantedTensor) -> tuple[tuple[str, ...], str | None]:
    """Return the key of a parameter, and which of its statistics a tensor is."""
    if tensor.path:
        own, colon, stat = tensor.path[-1].partition(":")
        key = (*tensor.path[:-1], _unescaped(own))
        placed = key, stat if colon else None
        # Where both should agree and do not, the variable was renamed.
        if "key" not in tensor.attrs or variable_name(*placed) == tensor.name:
            return placed
    return _taken_apart(tensor.name) or (whole_key(tensor), None)


def whole_key(tensor: WantedTensor) -> tuple[str, ...]:
    """Return the key of a tensor whose name means nothing here."""
    return tuple(tensor.path or tensor.name.split("."))


def _taken_apart(name: str) -> tuple[tuple[str, ...], str | None] | None:
    """Take the name of a variable apart, as `variable_name` joined it."""
    joined, colon, escaped = name.partition(":")
    elements = joined.split(".")
    key = tuple(["" if element == "%" else _unescaped(element) for element in elements])
    stat = _unescaped(escaped) if colon else None
    if variable_name(key, stat) != name or not all(map(_comes_back, (*key, stat or ""))):
        return None
    return key, stat


def _escaped(match: re.Match[str]) -> str:
    # The low byte of a lone surrogate is the byte that it stands for.
    return f"%{ord(match[0]) & 0xFF:02X}"


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: bytes.fromhex(match[1]).decode("ascii", _ERRORS), text)


def _comes_back(text: str) -> bool:
    """Whether reading returns the text: not if its single bytes make up a character."""
    try:
        return text.encode("utf-8", _ERRORS).decode("utf-8", _ERRORS) == text
    except UnicodeEncodeError:
        return False


# --- reading and writing --------------------------------------------------------------------------


def read_parameter(
    objects: ObjectCursor, notes: kit.Notes, key: list[str], attrs: Mapping[str, Any]
) -> list[Tensor]:
    """Read a value and its statistics, the value first."""
    name, path = variable_name(key), value_path(key)
    try:
        value = read_tensor(objects, name, attrs, path)
        stats: dict[str, Tensor] = {}
        for number in range(objects.uint32("number of statistics")):
            if number * len(name) > _LONGEST_NAMES:
                reason = f"more than {number} statistics of a parameter whose name has {len(name)}"
                reason += " characters"
                raise UnsupportedError(reason, offset=objects.at, rule="TextLength")
            stat = objects.string("name of a statistic")
            check_utf8(notes, "statistic", stat)
            full = variable_name(key, stat)
            more = {**attrs, "stat": full.partition(":")[2]}
            place = None if path is None else (*path[:-1], f"{path[-1]}:{stat}")
            tensor = read_tensor(objects, full, more, place)
            if stats.setdefault(stat, tensor) is not tensor:
                notes.add("there twice; the first counts, as for primitiv", _named(full))
    except CheckpointError as error:
        raise error.located(tensor=name) from None
    if value.dims is not None:
        notes.add("with a batch, which primitiv would not load", _named(name))
    return [value, *stats.values()]


def packed_parameter(parameter: Parameter) -> Pieces:
    """Write a value and its statistics."""
    yield from packed_tensor(parameter.value, batched=False)
    yield packed_uint32(len(parameter.stats))
    for name, stat in parameter.stats.items():
        yield packed_string(name)
        yield from packed_tensor(stat)


def read_model(objects: ObjectCursor, notes: kit.Notes) -> list[Tensor]:
    """Read all parameters of a model."""
    parameters: dict[str, list[Tensor]] = {}
    for _ in range(objects.uint32("number of parameters")):
        start = objects.at
        count = objects.length(ARRAY, "key")
        if count == 0:
            raise FormatError("a key without elements", offset=start, rule="Key")
        key = [objects.string("element of a key") for _ in range(count)]
        check_utf8(notes, "key", ".".join(key))
        tensors = read_parameter(objects, notes, key, {"key": key})
        name = tensors[0].name
        if parameters.pop(name, None) is not None:
            notes.add("there twice; the last counts, as for primitiv", _named(name))
        parameters[name] = tensors
    for key, _ in _modules(sorted(each[0].attrs["key"] for each in parameters.values())):
        reason = "a parameter and also a module, which no model of primitiv can have"
        notes.add(reason, _named(variable_name(key)))
    return [each for tensors in parameters.values() for each in tensors]


def packed_model(parameters: list[Parameter]) -> Pieces:
    """Write parameters, which are in the order of their keys."""
    yield packed_uint32(len(parameters))
    for parameter in parameters:
        yield ARRAY.pack(len(parameter.key)) + b"".join(map(packed_string, parameter.key))
        yield from packed_parameter(parameter)


class Parameter(NamedTuple):
    """A parameter that is written: its statistics have the order of their tensors."""

    key: tuple[str, ...]
    value: WantedTensor
    stats: dict[str, WantedTensor]


def parameters_of(draft: Draft) -> list[Parameter]:
    """Find the parameters among tensors of any names, and their statistics."""
    values: dict[tuple[str, ...], WantedTensor] = {}
    stats: list[tuple[tuple[str, ...], str, WantedTensor]] = []
    for tensor in draft.tensors.values():
        key, stat = key_and_stat(tensor)
        try:
            _encoded((*key, stat or ""))
        except UnicodeEncodeError:
            reason = "half of a surrogate pair in the name is not text"
            rule = "Key" if stat is None else "Statistic"
            raise refused(tensor, reason, rule, "Rename it") from None
        if stat is None:
            _add(values, key, tensor)
        else:
            stats.append((key, stat, tensor))
    owned: dict[tuple[str, ...], dict[str, WantedTensor]] = {}
    for owner, stat, tensor in stats:
        if owner in values:
            _add(owned.setdefault(owner, {}), stat, tensor)
        elif "stat" in tensor.attrs:
            reason = f"a statistic of {shown(variable_name(owner))}, which is not written"
            hint = "Write the parameter too, or leave the statistic out"
            raise refused(tensor, reason, "Statistic", hint)
        else:
            # A colon in a name of another format.
            _add(values, whole_key(tensor), tensor)
    found = [Parameter(key, value, owned.get(key, {})) for key, value in values.items()]
    found.sort(key=lambda each: _encoded(each.key))
    for key, following in _modules([each.key for each in found]):
        reason = f"it is a parameter, and also a module that has {shown(values[following].name)}: "
        reason += "no model of primitiv can have both"
        raise refused(values[key], reason, "Key", "Rename one of them")
    return found


def _encoded(key: Sequence[str]) -> list[bytes]:
    return [element.encode("utf-8", "surrogateescape") for element in key]


def _modules(keys: list[_K]) -> Iterator[tuple[_K, _K]]:
    """Find keys that others begin with: each is right before such a one in order."""
    for key, following in pairwise(keys):
        if following[: len(key)] == key:
            yield key, following


def _add(tensors: dict[_N, WantedTensor], key: _N, tensor: WantedTensor) -> None:
    other = tensors.setdefault(key, tensor)
    if other is not tensor:
        reason = f"its key is that of {shown(other.name)} too"
        raise refused(tensor, reason, "DuplicateName", "Rename one of them")


def check_utf8(notes: kit.Notes, what: str, name: str) -> None:
    """Note a text that is not UTF-8."""
    if _NOT_UTF8.search(name) is not None:
        notes.add("not UTF-8", f"{what} {shown(name)}")


def _named(name: str) -> str:
    return f"tensor {shown(name)}"
