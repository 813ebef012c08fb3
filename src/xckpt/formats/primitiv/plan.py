"""Where each byte of a new primitiv file goes, of any of the five types of data."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.errors import UnsupportedError, shown
from xckpt.formats.primitiv.contents import KINDS, MOST_DIMS, optimizer_class
from xckpt.formats.primitiv.layout import WRITES, Layout, trimmed, unstorable
from xckpt.formats.primitiv.packing import (
    packed_float32,
    packed_length,
    packed_shape,
    packed_text,
    packed_uint32,
)
from xckpt.formats.primitiv.parameters import parameters_of
from xckpt.formats.primitiv.scan import ARRAY, MAP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xckpt.formats.primitiv.parameters import Parameter
    from xckpt.index import Index, Tensor
    from xckpt.plan import Plan

__all__ = ["FILE_ATTRS", "TENSOR_ATTRS", "WRITES", "plan"]

TENSOR_ATTRS = ("key", "stat")

_CODES = {name: code for code, (name, _) in KINDS.items()}
# What only files of one type have.
_OWN_ATTRS = {
    "Shape": ("dims", "batch"),
    "Optimizer": ("uint_configs", "float_configs", "optimizer"),
}
FILE_ATTRS = ("data_type", *(attr for attrs in _OWN_ATTRS.values() for attr in attrs))

_U32 = 1 << 32


def plan(index: Index, *, data_type: str | None = None) -> Plan:
    """Plan a primitiv file."""
    if data_type is not None and data_type not in _CODES:
        raise ValueError(f"data_type={data_type!r} is not one of {', '.join(_CODES)}")
    kind = data_type or _kind(index)
    for owner, attrs in _OWN_ATTRS.items():
        for attr in attrs:
            if owner != kind and attr in index.attrs:
                raise _misplaced(attr, owner, kind)
    layout = Layout()
    for number in (0, 1, _CODES[kind]):
        layout.put(packed_uint32(number))
    _WRITERS[kind](index, layout)
    return layout.plan()


def _kind(index: Index) -> str:
    said = index.attrs.get("data_type")
    if said is None:
        has_settings = bool({"uint_configs", "float_configs"} & index.attrs.keys())
        return "Optimizer" if has_settings and not index.tensors else "Model"
    if not isinstance(said, str) or said not in _CODES:
        raise UnsupportedError(
            f"the attribute data_type is {said!r}, not one of {', '.join(_CODES)}",
            rule="DataType",
            hint="Remove it, or say data_type=",
        )
    return said


def _misplaced(attr: str, owner: str, kind: str) -> UnsupportedError:
    article = "an" if owner == "Optimizer" else "a"
    return UnsupportedError(
        f"the attribute {attr!r} belongs into {article} {owner} file, and this is a {kind} file",
        rule="Attribute",
        hint=f"Remove it, or write a file of its own with data_type={owner!r}",
    )


def _put_shape(index: Index, layout: Layout) -> None:
    _refuse_tensors(index, "Shape")
    dims, batch = index.attrs.get("dims", []), index.attrs.get("batch", 1)
    sizes: list[Any] = [*dims, batch] if isinstance(dims, list | tuple) else [None]
    if not all(type(size) is int and size > 0 for size in sizes) or prod(sizes) >= _U32:
        raise UnsupportedError(
            f"dims {dims!r} and batch {batch!r} are no shape of 1 to {_U32 - 1} elements",
            rule="ShapeSize",
            hint="Correct the attributes dims and batch",
        )
    kept = trimmed(dims)
    if len(kept) > MOST_DIMS:
        reason = f"{len(kept)} dims, of which primitiv has at most {MOST_DIMS}"
        raise UnsupportedError(reason, rule="ShapeDepth", hint="Correct the attribute dims")
    layout.put(packed_shape(kept, batch))


def _put_tensor(index: Index, layout: Layout) -> None:
    parameters = parameters_of(index.tensors.values())
    if len(index.tensors) != 1:
        raise _not_one("Tensor", "tensor", [parameter.value for parameter in parameters])
    layout.put_tensor(parameters[0].value)


def _put_parameter(index: Index, layout: Layout) -> None:
    parameters = parameters_of(index.tensors.values())
    if len(parameters) != 1:
        raise _not_one("Parameter", "parameter", [parameter.value for parameter in parameters])
    _put(parameters[0], layout)


def _not_one(kind: str, what: str, tensors: Sequence[Tensor]) -> UnsupportedError:
    return UnsupportedError(
        f"a {kind} file holds one {what} without a name, and not {len(tensors)}",
        tensor=tensors[-1].name if tensors else None,
        rule="Count",
        hint="data_type='Model' holds any number of parameters by their names",
    )


def _put_model(index: Index, layout: Layout) -> None:
    parameters = parameters_of(index.tensors.values())
    layout.put(packed_uint32(len(parameters)))
    for parameter in parameters:
        layout.put(packed_length(ARRAY, len(parameter.key)))
        layout.put(b"".join(map(packed_text, parameter.key)))
        _put(parameter, layout)


def _put(parameter: Parameter, layout: Layout) -> None:
    layout.put_tensor(parameter.value, batched=False)
    layout.put(packed_uint32(len(parameter.stats)))
    for name, stat in parameter.stats.items():
        try:
            layout.put(packed_text(name))
        except UnicodeEncodeError:
            reason = "half of a surrogate pair in the name is no text"
            raise unstorable(stat, reason, "Statistic", "Rename it") from None
        layout.put_tensor(stat)


def _put_optimizer(index: Index, layout: Layout) -> None:
    _refuse_tensors(index, "Optimizer")
    names: list[str] = []
    writers: dict[str, Callable[[Any], bytes]] = {"uint_configs": _uint32, "float_configs": _float}
    for attr, write in writers.items():
        settings = index.attrs.get(attr, {})
        if not isinstance(settings, dict):
            raise _bad_setting(attr, f"is {settings!r}, no dict")
        layout.put(packed_length(MAP, len(settings)))
        for name, value in settings.items():
            try:
                layout.put(packed_text(name) + write(value))
            except (AttributeError, TypeError, ValueError, OverflowError) as error:
                raise _bad_setting(attr, f"has {shown(str(name))}: {value!r}, {error}") from None
        names += settings
    said = index.attrs.get("optimizer")
    if said not in {None, optimizer_class(names)}:
        reason = f"is {said!r}, but the names of the settings say {optimizer_class(names)!r}"
        raise _bad_setting("optimizer", reason)


def _uint32(value: Any) -> bytes:
    if type(value) is not int or not 0 <= value < _U32:
        raise ValueError("which is no integer of 32 bits without a sign")
    return packed_uint32(value)


def _float(value: Any) -> bytes:
    if not isinstance(value, float) and type(value) is not int:
        raise TypeError("which is no number")
    return packed_float32(value)


def _bad_setting(attr: str, reason: str) -> UnsupportedError:
    hint = "Correct or remove it"
    return UnsupportedError(f"the attribute {attr!r} {reason}", rule="Settings", hint=hint)


def _refuse_tensors(index: Index, kind: str) -> None:
    for name in index.tensors:
        reason = f"a file of type {kind} has no tensors"
        hint = "Write them to a file of their own, with data_type='Model'"
        raise UnsupportedError(reason, tensor=name, rule="Count", hint=hint)


_WRITERS: dict[str, Callable[[Index, Layout], None]] = {
    "Shape": _put_shape,
    "Tensor": _put_tensor,
    "Parameter": _put_parameter,
    "Model": _put_model,
    "Optimizer": _put_optimizer,
}
