"""The five things that a file can hold, and what is let pass in them with a warning."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats.primitiv.names import is_utf8, stat_path, value_path, variable_name
from xckpt.formats.primitiv.scan import ARRAY, BIN, MAP
from xckpt.index import Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xckpt.formats.primitiv.scan import Scan

__all__ = ["KINDS", "MOST_DIMS", "Content", "Notes", "optimizer_class", "read_content"]

_VERSION = (0, 1)
MOST_DIMS = 8
_ELEMENTS = 1 << 32
# Each statistic repeats the name of its parameter: a small file must not make gigabytes of names.
_LONGEST_NAMES = 1 << 20
# The tensor of a Tensor or Parameter file has no name there.
_UNNAMED = ("value",)
# The optimizers of primitiv itself; settings have the name of their class before a dot.
_OPTIMIZERS = frozenset({"SGD", "MomentumSGD", "AdaGrad", "RMSProp", "AdaDelta", "Adam"})
# What all optimizers have. For two days in November 2017 they were called trainers.
_COMMON = frozenset({"Optimizer", "Trainer"})

Content = tuple[dict[str, Tensor], dict[str, Any]]


class Notes:
    """What a user is to be warned of, briefly however often it occurs."""

    __slots__ = ("_notes",)

    def __init__(self) -> None:
        # For each reason, how often and where first.
        self._notes: dict[str, tuple[int, str]] = {}

    def add(self, where: str, reason: str) -> None:
        """Keep a reason to warn, and where it is."""
        count, first = self._notes.get(reason, (0, where))
        self._notes[reason] = (count + 1, first)

    def warnings(self) -> tuple[str, ...]:
        """Return one text for each reason."""
        return tuple(
            f"{first} {reason}" + (f"; so are {count - 1} more" if count > 1 else "")
            for reason, (count, first) in self._notes.items()
        )


def read_content(scan: Scan, notes: Notes) -> Content:
    """Read a whole file, but the data."""
    if scan.size == 0:
        raise FormatError("the file is empty", offset=0, rule="EndOfFile")
    version = scan.uint32("major version"), scan.uint32("minor version")
    if version != _VERSION:
        raise UnsupportedError(
            f"version {version[0]}.{version[1]} of the format, but only 0.1 is read",
            offset=0,
            rule="Version",
        )
    start = scan.at
    code = scan.uint32("data type")
    if code not in KINDS:
        known = ", ".join(f"0x{known:x}" for known in KINDS)
        raise FormatError(f"data type 0x{code:x} is none of {known}", offset=start, rule="DataType")
    kind, read = KINDS[code]
    tensors, attrs = read(scan, notes)
    if scan.at < scan.size:
        trailing = f"trailing bytes ({scan.size - scan.at} from byte {scan.at} on)"
        notes.add(trailing, "are ignored, as by primitiv")
    return tensors, {"data_type": kind, **attrs}


def _shape_file(scan: Scan, _notes: Notes) -> Content:
    dims, batch, _ = _shape(scan)
    return {}, {"dims": dims, "batch": batch}


def _tensor_file(scan: Scan, _notes: Notes) -> Content:
    name = variable_name(_UNNAMED)
    return {name: _tensor(scan, name, {}, _UNNAMED)}, {}


def _parameter_file(scan: Scan, notes: Notes) -> Content:
    return {tensor.name: tensor for tensor in _parameter(scan, notes, _UNNAMED, {})}, {}


def _model_file(scan: Scan, notes: Notes) -> Content:
    parameters: dict[str, list[Tensor]] = {}
    for _ in range(scan.uint32("number of parameters")):
        key = _key(scan, notes)
        tensors = _parameter(scan, notes, key, {"key": key})
        name = tensors[0].name
        if parameters.pop(name, None) is not None:
            notes.add(_tensor_named(name), "is there twice; the last counts, as for primitiv")
        parameters[name] = tensors
    _note_modules(notes, (tensors[0].attrs["key"] for tensors in parameters.values()))
    return {tensor.name: tensor for tensors in parameters.values() for tensor in tensors}, {}


def _key(scan: Scan, notes: Notes) -> list[str]:
    start = scan.at
    count = scan.length(ARRAY, "key")
    if count == 0:
        raise FormatError("a key without elements", offset=start, rule="Key")
    key = [scan.text("element of a key") for _ in range(count)]
    _check_utf8(notes, "key", ".".join(key))
    return key


def _check_utf8(notes: Notes, what: str, name: str) -> None:
    if not is_utf8(name):
        notes.add(f"{what} {shown(name)}", "is not UTF-8")


def _note_modules(notes: Notes, keys: Iterable[list[str]]) -> None:
    # What begins with a key comes right after it in order.
    for key, following in pairwise(sorted(keys)):
        if following[: len(key)] == key:
            notes.add(
                _tensor_named(variable_name(key)),
                "is also a module, which no model of primitiv can have",
            )


def _parameter(
    scan: Scan, notes: Notes, key: Sequence[str], attrs: Mapping[str, Any]
) -> list[Tensor]:
    """Read a value and its statistics, the value first."""
    name = variable_name(key)
    path = value_path(key)
    try:
        value = _tensor(scan, name, attrs, path)
        stats: dict[str, Tensor] = {}
        for number in range(scan.uint32("number of statistics")):
            if number * len(name) > _LONGEST_NAMES:
                raise _too_long(scan, number, name)
            stat = scan.text("name of a statistic")
            _check_utf8(notes, "statistic", stat)
            full = variable_name(key, stat)
            told = {**attrs, "stat": full.partition(":")[2]}
            tensor = _tensor(scan, full, told, stat_path(path, stat))
            if stats.setdefault(stat, tensor) is not tensor:
                notes.add(_tensor_named(full), "is there twice; the first counts, as for primitiv")
    except CheckpointError as error:
        raise error.located(tensor=name) from None
    if value.dims is not None:
        notes.add(_tensor_named(name), "has a batch, which primitiv would not load")
    return [value, *stats.values()]


def _too_long(scan: Scan, number: int, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"more than {number} statistics of a parameter whose name has {len(name)} characters",
        offset=scan.at,
        rule="TextLength",
    )


def _tensor(
    scan: Scan, name: str, attrs: Mapping[str, Any], path: tuple[str, ...] | None
) -> Tensor:
    try:
        dims, batch, size = _shape(scan)
        offset = _data(scan, 4 * size)
    except CheckpointError as error:
        raise error.located(tensor=name) from None
    # No other axis is sure: keys are the user's own words, and a shape does not tell its role.
    axes = (*(None for _ in dims), "batch") if batch > 1 else None
    shape = (*dims, batch) if batch > 1 else tuple(dims)
    data = Part("float32", shape, offset, 4 * size)
    return Tensor(
        name, "float32", shape, {"data": data}, order="F", attrs=attrs, dims=axes, path=path
    )


def _shape(scan: Scan) -> tuple[list[int], int, int]:
    """Read dims, without the trailing ones that are 1, and batch; count the elements."""
    start = scan.at
    count = scan.length(ARRAY, "dims")
    if count > MOST_DIMS:
        text = f"{count} dims are more than {MOST_DIMS}"
        raise FormatError(text, offset=start, rule="ShapeDepth")
    *dims, batch = scan.uint32s(count + 1, "dims and batch")
    size = prod(dims) * batch
    if not 0 < size < _ELEMENTS:
        raise FormatError(
            f"dims {dims} and batch {batch} are {size} elements, "
            f"which must be from 1 to {_ELEMENTS - 1}",
            offset=start,
            rule="ShapeSize",
        )
    while dims and dims[-1] == 1:
        dims.pop()
    return dims, batch, size


def _data(scan: Scan, expected: int) -> int:
    """Jump over data of a size; return where they are."""
    start = scan.at
    nbytes = scan.length(BIN, "data")
    if nbytes != expected:
        raise FormatError(
            f"{nbytes} bytes of data, but the shape needs {expected}",
            offset=start,
            rule="DataLength",
        )
    return scan.skip(nbytes, "data")


def _optimizer_file(scan: Scan, notes: Notes) -> Content:
    integers = _settings(scan, notes, "uint_configs", scan.uint32)
    floats = _settings(scan, notes, "float_configs", scan.float32)
    optimizer = optimizer_class([*integers, *floats])
    told = {} if optimizer is None else {"optimizer": optimizer}
    return {}, {**told, "uint_configs": integers, "float_configs": floats}


def _settings(
    scan: Scan, notes: Notes, what: str, read: Callable[[str], float]
) -> dict[str, float]:
    settings: dict[str, float] = {}
    for _ in range(scan.length(MAP, what)):
        name = scan.text(f"name in {what}")
        _check_utf8(notes, "setting", name)
        value = read(f"value in {what}")
        if name in settings:
            notes.add(f"setting {shown(name)}", "is there twice; the first counts, as for primitiv")
        settings.setdefault(name, value)
    return settings


def optimizer_class(names: Iterable[str]) -> str | None:
    """Infer the class of an optimizer, which no file states, from the names of its settings."""
    found = {name.partition(".")[0] for name in names if "." in name} - _COMMON
    classes = found & _OPTIMIZERS or found
    return classes.pop() if len(classes) == 1 else None


def _tensor_named(name: str) -> str:
    return f"tensor {shown(name)}"


KINDS: dict[int, tuple[str, Callable[[Scan, Notes], Content]]] = {
    0x000: ("Shape", _shape_file),
    0x100: ("Tensor", _tensor_file),
    0x200: ("Parameter", _parameter_file),
    0x300: ("Model", _model_file),
    0x400: ("Optimizer", _optimizer_file),
}
