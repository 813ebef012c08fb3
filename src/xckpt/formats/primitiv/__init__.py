r"""primitiv (usually ``.model``, ``.optimizer``, ``.param``), version 0.1 of its file format.

A file is a sequence of MessagePack objects, without an outer array, padding, checksum or end mark::

    file       uint32 major = 0, uint32 minor = 1, uint32 data type, then, by data type:

    0x0        Shape      array of uint32 dims, uint32 batch
    0x100      Tensor     Shape, bin data
    0x200      Parameter  Tensor value, uint32 N, N x (str name, Tensor statistic)
    0x300      Model      uint32 N, N x (array of str key, Parameter)
    0x400      Optimizer  map of str to uint32, map of str to float32

An integer is always ``ce`` and 4 bytes big-endian, never MessagePack's shorter forms, and a float
``ca`` and 4 bytes; so the first 15 bytes of a file are ``ce00000000 ce00000001 ce00000T00``. The
lengths of str, bin, array and map have any of MessagePack's forms. The data of a tensor are
little-endian float32 in column-major order, with the samples of a batch consecutively, at any
alignment.

The length of data precedes them, so the reader skips them: it moves a window of 4 KiB over the
headers.

Limits: 8 dims, no dim or batch of 0, fewer than 2**32 elements. primitiv computes the number of
elements in 32 bits and accepts files where it overflows; xckpt raises an error.

xckpt writes the same bytes as primitiv: parameters sorted by key, statistics in the order of their
tensors, and lengths in the shortest form. Applications choose the names of parameters; the examples
of primitiv have ``w`` and ``b``, with a ``p`` before or a number after them. Axes get names only if
such a pair has matching shapes: ``y = matmul(w, x) + b`` with ``w {out, in}`` and ``b {out}``.

Specification: primitiv File Format v0.1; github.com/primitiv/primitiv at db14ca4 (0.4.0), whose
reader is as strict with types; of repeated names it keeps the first statistic or setting and the
last parameter.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import Can, Format, Readable, kit
from xckpt.formats.plan import LOST_DIMS, Draft, LiteralBytes, Plan, PlannedPart, WantedTensor
from xckpt.formats.primitiv.models import (
    MAP,
    MOST_DIMS,
    U32,
    ObjectCursor,
    check_utf8,
    packed_float32,
    packed_model,
    packed_parameter,
    packed_shape,
    packed_string,
    packed_tensor,
    packed_uint32,
    parameters_of,
    read_model,
    read_parameter,
    read_shape,
    read_tensor,
    refused,
    trimmed,
    value_path,
    variable_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xckpt.formats.primitiv.models import Parameter, Pieces
    from xckpt.index import Index, Tensor

_MAGIC = bytes.fromhex("ce00000000 ce00000001 ce0000")
_CODES = {"Shape": 0x000, "Tensor": 0x100, "Parameter": 0x200, "Model": 0x300, "Optimizer": 0x400}
_KINDS = {code: kind for kind, code in _CODES.items()}
# Attributes of files of one data type.
_OWN_ATTRS = {
    "Shape": ("dims", "batch"),
    "Optimizer": ("uint_configs", "float_configs", "optimizer"),
}
# The tensor of a Tensor or Parameter file has no name there.
_UNNAMED = ["value"]
# The optimizers of primitiv itself; settings have the name of their class before a dot.
_OPTIMIZERS = frozenset({"SGD", "MomentumSGD", "AdaGrad", "RMSProp", "AdaDelta", "Adam"})
# Classes of settings that all optimizers have; optimizers were called trainers in some versions.
_COMMON = frozenset({"Optimizer", "Trainer"})
_WEIGHT = re.compile(r"(p?)w((?:_\w+?)?\d*)", re.ASCII)
_LINE_ENDS = (
    "Bytes 0d 0a are here: the file may have been written or copied in a text mode that changes "
    "line ends, as primitiv does on Windows. Write it again in binary mode"
)
_LOST_ONES = "axes of length 1 at the end, which primitiv leaves out"
_LOST_NAMES = "names that will read differently"
_FILTER = ("kernel_height", "kernel_width", "channels_in", "channels_out")


class Primitiv(Format):
    """primitiv, version 0.1: shapes, tensors, parameters, models, optimizers."""

    name = "primitiv"
    description = "primitiv files"
    shared_suffixes = (".model", ".optimizer", ".param")
    can = Can(
        types=("float32",),
        orders=("F",),
        tensor_attrs=("key", "stat"),
        file_attrs=("data_type", *(attr for attrs in _OWN_ATTRS.values() for attr in attrs)),
    )

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file begins with the 15 bytes of version 0.1."""
        return head[:13] == _MAGIC and int.from_bytes(head[13:15].rjust(2, b"\xff")) in _KINDS

    def read(self, source: Readable, *, with_stats: bool = True) -> Index:
        """Read all headers, no data.

        Parameters
        ----------
        source : Readable
            The file.
        with_stats : bool, default True
            List the statistics that optimizers keep of parameters.

        Returns
        -------
        Index
            Index of all tensors. The index of a Shape or an Optimizer has attributes only.
        """
        objects, notes = ObjectCursor(source), kit.Notes()
        try:
            tensors, attrs = _read_content(objects, notes)
        except FormatError as error:
            start = max(0, (error.offset or 0) - 5)
            if b"\r\n" in bytes(source.read(start, min(12, source.size - start))):
                error.hint = _LINE_ENDS
            raise
        if not with_stats:
            tensors = {
                name: tensor for name, tensor in tensors.items() if "stat" not in tensor.attrs
            }
        return kit.index_of(self.name, source, tensors, attrs, notes=notes, version="0.1")

    def plan(self, draft: Draft, *, data_type: str | None = None) -> Plan:
        """Lay out a file of any of the five types of data.

        Parameters
        ----------
        draft : Draft
            Contents of the file. The last axis is the batch if its name is ``batch``. Trailing
            axes of length 1 before it are dropped.
        data_type : {"Shape", "Tensor", "Parameter", "Model", "Optimizer"}, optional
            Type of the file. By default the attribute ``data_type`` of the draft; else Optimizer
            for settings without tensors; else Model.
        """
        kit.check_option("data_type", data_type, _CODES)
        self.check(draft)
        kind = data_type or draft.attrs.get("data_type")
        if kind is None:
            has_settings = bool({"uint_configs", "float_configs"} & draft.attrs.keys())
            kind = "Optimizer" if has_settings and not draft.tensors else "Model"
        if not isinstance(kind, str) or kind not in _CODES:
            reason = f"the attribute data_type is {kind!r}, not one of {', '.join(_CODES)}"
            hint = "Remove it, or pass data_type="
            raise UnsupportedError(reason, rule="DataType", hint=hint)
        for owner, attrs in _OWN_ATTRS.items():
            if owner != kind and (foreign := [attr for attr in attrs if attr in draft.attrs]):
                article = "an" if owner == "Optimizer" else "a"
                reason = f"the attribute {foreign[0]!r} belongs in {article} {owner} file, "
                reason += f"and this is a {kind} file"
                hint = f"Remove it, or write a file of its own with data_type={owner!r}"
                raise UnsupportedError(reason, rule="Attribute", hint=hint)
        header = bytearray(packed_uint32(0, 1, _CODES[kind]))
        literals, planned, at = [], [], 0
        for piece in _content(draft, kind):
            if not isinstance(piece, WantedTensor):
                header += piece
                continue
            literals.append(LiteralBytes(at, bytes(header)))
            at += len(header)
            planned.append(PlannedPart(piece.name, "data", piece.parts["data"], at))
            at += 4 * piece.size
            header.clear()
        if header:
            literals.append(LiteralBytes(at, bytes(header)))
        losses = self._losses(parameters_of(draft)) if kind not in _OWN_ATTRS else {}
        if kind != "Model":
            losses.pop(_LOST_NAMES, None)  # these files have no names
        return Plan(tuple(literals), tuple(planned), nbytes=at + len(header), losses=losses)

    def _losses(self, parameters: list[Parameter]) -> dict[str, list[str]]:
        """List tensors that will read back with other axes or names, by kind of loss."""
        modules: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
        for parameter in parameters:
            *module, leaf = parameter.key
            modules.setdefault((*module,), {})[leaf] = parameter.value.shape
        axes = {module: self.module_axes(shapes) for module, shapes in modules.items()}
        losses: dict[str, list[str]] = {_LOST_ONES: [], LOST_DIMS: [], _LOST_NAMES: []}
        for key, value, stats in parameters:
            read_dims = axes[key[:-1]].get(key[-1])
            for tensor, stat in [
                (value, None),
                *((statistic, stat) for stat, statistic in stats.items()),
            ]:
                dims = list(tensor.dims or ())
                is_batched = dims[-1:] == ["batch"]
                if tensor.shape[-1:] == (1,) or (is_batched and tensor.shape[-2:-1] == (1,)):
                    losses[_LOST_ONES].append(tensor.name)
                dims = dims[:-1] if is_batched else dims
                if any(dims) and (stat is not None or read_dims != (*dims,)):
                    losses[LOST_DIMS].append(tensor.name)
                if variable_name(key, stat) != tensor.name:
                    losses[_LOST_NAMES].append(tensor.name)
        return losses

    def module_axes(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[str | None, ...]]:
        """Name the axes of the tensors of one module."""
        axes: dict[str, tuple[str | None, ...]] = {}
        for name, shape in shapes.items():
            match = _WEIGHT.fullmatch(name)
            if match is None:
                continue
            bias = f"{match[1]}b{match[2]}"
            if len(shape) == 2 and shapes.get(bias) == shape[:1]:
                axes |= {name: ("out", "in"), bias: ("out",)}
            elif len(shape) == len(_FILTER):
                axes[name] = _FILTER
        return axes


# --- content, and shapes alone --------------------------------------------------------------------


def _read_content(
    objects: ObjectCursor, notes: kit.Notes
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a whole file except the data."""
    if not objects.left:
        raise FormatError("the file is empty", offset=0, rule="EndOfFile")
    major, minor = objects.uint32("major version"), objects.uint32("minor version")
    if (major, minor) != (0, 1):
        reason = f"version {major}.{minor} of the format, but only 0.1 is supported"
        raise UnsupportedError(reason, offset=0, rule="Version")
    start = objects.at
    code = objects.uint32("data type")
    if code not in _KINDS:
        supported = ", ".join(f"0x{number:x}" for number in _KINDS)
        reason = f"data type 0x{code:x} is not one of {supported}"
        raise FormatError(reason, offset=start, rule="DataType")
    kind = _KINDS[code]
    tensors: list[Tensor] = []
    attrs: dict[str, Any] = {}
    if kind == "Shape":
        attrs["dims"], attrs["batch"] = read_shape(objects)
    elif kind == "Tensor":
        tensors.append(read_tensor(objects, _UNNAMED[0], {}, value_path(_UNNAMED)))
    elif kind == "Parameter":
        tensors = read_parameter(objects, notes, _UNNAMED, {})
    elif kind == "Model":
        tensors = read_model(objects, notes)
    else:
        integers = _read_settings(objects, notes, "uint_configs", objects.uint32)
        floats = _read_settings(objects, notes, "float_configs", objects.float32)
        optimizer = _optimizer_class([*integers, *floats])
        attrs = {} if optimizer is None else {"optimizer": optimizer}
        attrs |= {"uint_configs": integers, "float_configs": floats}
    if objects.left:
        trailing = f"trailing bytes ({objects.left} from byte {objects.at} on)"
        notes.add("ignored, as by primitiv", trailing)
    return {tensor.name: tensor for tensor in tensors}, {"data_type": kind, **attrs}


def _content(draft: Draft, kind: str) -> Pieces:
    """Yield the content of a file of the given type."""
    if kind in _OWN_ATTRS:
        for tensor in draft.tensors.values():
            reason = f"a file of type {kind} has no tensors"
            hint = "Write them to a file of their own, with data_type='Model'"
            raise refused(tensor, reason, "Count", hint)
        yield from (_shape if kind == "Shape" else _optimizer)(draft)
        return
    parameters = parameters_of(draft)
    if kind == "Model":
        yield from packed_model(parameters)
        return
    count = len(draft.tensors) if kind == "Tensor" else len(parameters)
    if count != 1:
        reason = f"a {kind} file holds one {kind.lower()} without a name, not {count}"
        hint = "Use data_type='Model', which holds any number of named parameters"
        name = parameters[-1].value.name if parameters else None
        raise UnsupportedError(reason, tensor=name, rule="Count", hint=hint)
    [parameter] = parameters
    yield from packed_tensor(parameter.value) if kind == "Tensor" else packed_parameter(parameter)


def _shape(draft: Draft) -> Pieces:
    dims, batch = draft.attrs.get("dims", []), draft.attrs.get("batch", 1)
    sizes: list[Any] = [*dims, batch] if isinstance(dims, list | tuple) else [None]
    if not all(type(size) is int and size > 0 for size in sizes) or prod(sizes) >= U32:
        reason = f"dims {dims!r} and batch {batch!r} are not a shape of 1 to {U32 - 1} elements"
        hint = "Correct the attributes dims and batch"
        raise UnsupportedError(reason, rule="ShapeSize", hint=hint)
    trimmed_dims = trimmed(dims)
    if len(trimmed_dims) > MOST_DIMS:
        reason = f"{len(trimmed_dims)} dims, but primitiv has at most {MOST_DIMS}"
        raise UnsupportedError(reason, rule="ShapeDepth", hint="Correct the attribute dims")
    yield packed_shape(trimmed_dims, batch)


# --- optimizers -----------------------------------------------------------------------------------


def _read_settings(
    objects: ObjectCursor, notes: kit.Notes, label: str, read: Callable[[str], float]
) -> dict[str, float]:
    settings: dict[str, float] = {}
    for _ in range(objects.length(MAP, label)):
        name = objects.string(f"name in {label}")
        check_utf8(notes, "setting", name)
        value = read(f"value in {label}")
        if name in settings:
            reason = "there twice; the first counts, as for primitiv"
            notes.add(reason, f"setting {shown(name)}")
        settings.setdefault(name, value)
    return settings


def _optimizer_class(names: list[str]) -> str | None:
    """Infer the class of an optimizer, which no file states, from the names of its settings."""
    prefixes = {name.partition(".")[0] for name in names if "." in name} - _COMMON
    classes = prefixes & _OPTIMIZERS or prefixes
    return classes.pop() if len(classes) == 1 else None


def _optimizer(draft: Draft) -> Pieces:
    names: list[str] = []
    for attr, pack in (("uint_configs", _uint32), ("float_configs", _float)):
        settings = draft.attrs.get(attr, {})
        if not isinstance(settings, dict):
            raise _bad_setting(attr, f"is {settings!r}, not a dict")
        yield MAP.pack(len(settings))
        for name, value in settings.items():
            try:
                yield packed_string(name) + pack(value)
            except (AttributeError, TypeError, ValueError, OverflowError) as error:
                raise _bad_setting(attr, f"has {shown(str(name))}: {value!r}, {error}") from None
        names += settings
    optimizer = draft.attrs.get("optimizer")
    if optimizer not in {None, _optimizer_class(names)}:
        reason = f"is {optimizer!r}, but the settings are those of {_optimizer_class(names)!r}"
        raise _bad_setting("optimizer", reason)


def _uint32(value: Any) -> bytes:
    if type(value) is not int or not 0 <= value < U32:
        raise ValueError("which is not an integer of 32 bits without a sign")
    return packed_uint32(value)


def _float(value: Any) -> bytes:
    if not isinstance(value, float) and type(value) is not int:
        raise TypeError("which is not a number")
    return packed_float32(value)


def _bad_setting(attr: str, reason: str) -> UnsupportedError:
    hint = "Correct or remove it"
    return UnsupportedError(f"the attribute {attr!r} {reason}", rule="Settings", hint=hint)
