"""Tensors as views of storages, and the table of the functions that PyTorch rebuilds them with.

A tensor is a view of a storage: ``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad,
hooks)``, in elements. Several tensors may share a storage. `_TENSORS` lists all functions of
PyTorch that return tensors, with a function here that interprets their arguments. None of PyTorch's
functions is ever called.

Specification: torch/_utils.py, torch/_tensor.py and torch/_weights_only_unpickler.py of
github.com/pytorch/pytorch, 2.15.
"""

from __future__ import annotations

import struct
from copy import copy
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import CheckpointError, FormatError, PayloadMissingError, UnsupportedError, shown
from xckpt.formats import kit
from xckpt.formats.pickles.records import (
    Call,
    Global,
    Pairs,
    Persistent,
    array_of,
    dict_of,
    is_plain,
    items_of,
    key_text,
    name_of,
    sizes_of,
    spelled,
)
from xckpt.index import Part, Quantization, Tensor, span_of, strides_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DEEPEST_TENSOR = 8  # a parameter of a parameter
_MOST_INLINE = 1 << 24  # bytes of all arrays in the pickle itself
_SHOWN = 200

# --- element types --------------------------------------------------------------------------------

_PLAIN = (
    "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool", "int64",
    "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
_PLAIN_TYPES = frozenset(_PLAIN)
_PAIRS = "float4_e2m1fn_x2"  # sizes count bytes
# The stored element types. Types outside of `_PLAIN` have a further meaning.
_STORED = {name: name for name in _PLAIN}
_STORED |= {"bits8": "uint8", "bits1x8": "uint8", "bits2x4": "uint8", "bits4x2": "uint8"}
_STORED |= {"bits16": "uint16", "qint8": "int8", "quint8": "uint8", "qint32": "int32"}
_STORED |= {_PAIRS: "float4_e2m1fn"}
_HALVES = {"complex32": "float16", "bcomplex32": "bfloat16"}
_PACKED = {"quint4x2", "quint2x4"}  # several codes in a byte
_ALIASES = {"double": "float64", "float": "float32", "half": "float16", "long": "int64"}
_ALIASES |= {"int": "int32", "short": "int16", "chalf": "complex32"}
_ALIASES |= {"cfloat": "complex64", "cdouble": "complex128"}
_STORAGES = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16"}
_STORAGES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}
_STORAGES |= {"Bool": "bool", "ComplexDouble": "complex128", "ComplexFloat": "complex64"}
_STORAGES |= {"QInt8": "qint8", "QUInt8": "quint8", "QInt32": "qint32"}
_STORAGES |= {"QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4", "Untyped": "uint8"}
_STORAGE_MODULES = {"torch", "torch.cuda", "torch.storage"}


def dtype_named(value: Any) -> str | None:
    """Return the element type of a record like ``torch.float32``; None for other records."""
    if type(value) is not Global or value.module != "torch":
        return None
    name = _ALIASES.get(value.name, value.name)
    return name if name in _STORED or name in _HALVES or name in _PACKED else None


def in_elements(dtype: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes in elements; the sizes of pairs count bytes."""
    return (*sizes[:-1], 2 * sizes[-1]) if dtype == _PAIRS and sizes else sizes


def element_named(dtype: str) -> str:
    """Return the stored element type of a PyTorch type, or its own name."""
    return _STORED.get(dtype, dtype)


@lru_cache(maxsize=256)
def itemsize_of(dtype: str) -> int:
    """Return the size in bytes of an element, or of a byte that several elements share."""
    if dtype in _HALVES:
        return 4
    bits = 8 if dtype in _PACKED else ELEMENT_TYPES[_STORED[dtype]].bits
    return max(bits, 8) // 8


# --- storages -------------------------------------------------------------------------------------


class Region(NamedTuple):
    """The position of a storage's bytes."""

    offset: int
    nbytes: int  # decoded
    stored_nbytes: int
    encoding: str | None = None
    crc: int = 0
    problem: CheckpointError | None = None  # the reason why the bytes cannot be read


class FileContents(NamedTuple):
    """The contents of a container: the unpickled value and a function that locates storages."""

    version: str
    value: Any
    place: Callable[[str], Region]
    nbytes: int  # of the pickle
    base: int  # offset of the pickle
    byteorder: str = "little"
    constants: FileContents | None = None  # of a program of TorchScript


class Storage(NamedTuple):
    """A storage in a persistent id: element type, key, and number of elements."""

    dtype: str | None  # None if it is unknown
    key: str  # the name of the type if that is unknown
    numel: int
    first: int = 0


@lru_cache(maxsize=256)
def _class_of(kind: Global) -> str | None:
    """Return the element type of a class of storages."""
    if kind.module not in _STORAGE_MODULES or not kind.name.endswith("Storage"):
        return None
    return _STORAGES.get(kind.name.removesuffix("Storage"))


def storage_of(value: Any) -> Storage | None:
    """Return the storage of a persistent id; None for other values."""
    words = value.id if type(value) is Persistent else None
    if type(words) is not tuple or len(words) not in {5, 6} or words[0] != "storage":
        return None
    kind, key, _, numel, *views = words[1:]
    if (
        type(kind) is Global
        and type(key) is str
        and type(numel) is int
        and numel >= 0
        and not views
    ):
        dtype = _class_of(kind)
        if dtype is not None:
            return Storage(dtype, key, numel)
    if type(kind) is Call and not kind.args:
        kind = kind.function
    key = str(key) if type(key) is int else key
    if type(kind) is not Global or type(key) is not str or type(numel) is not int or numel < 0:
        return None
    first = 0
    # Before 0.4 a storage could be a view of another one: (key of the view, offset, elements).
    if views and type(views[0]) is tuple:
        _, first, count = (*views[0], None, None, None)[:3]
        if type(first) is not int or type(count) is not int or not 0 <= first <= first + count:
            return None
        if first + count > numel:
            return None
    dtype = _class_of(kind)
    return Storage(dtype, f"{kind.module}.{kind.name}" if dtype is None else key, numel, first)


class Layout(NamedTuple):
    """The arrangement of elements: order, strides if it is neither C nor F, and the span."""

    order: Any
    strides: tuple[int, ...] | None
    span: int


@lru_cache(maxsize=4096)
def _layout(size: tuple[int, ...], stride: tuple[int, ...]) -> Layout | str:
    """Return the layout of sizes and strides, or a text that explains why they are invalid."""
    if len(size) != len(stride):
        return f"sizes {spelled(size)} and strides {spelled(stride)} have different lengths"
    if any(n < 0 for n in size + stride):
        return f"sizes {spelled(size)} and strides {spelled(stride)} are not all numbers >= 0"
    if kit.is_oversized(size) or len(size) > kit.MOST_AXES:
        return f"the shape {spelled(size)} is too large"
    count = prod(size)
    if not count:
        return Layout("C", None, 0)
    axes = [axis for axis, extent in enumerate(size) if extent > 1]
    for order, along in (("C", axes[::-1]), ("F", axes)):
        step = 1
        for axis in along:
            if stride[axis] != step:
                break
            step *= size[axis]
        else:
            return Layout(order, None, count)
    steps = tuple([stride[axis] if size[axis] > 1 else 0 for axis in range(len(size))])
    return Layout("C", steps, span_of(size, steps))


class _TensorView(NamedTuple):
    """The bytes of a tensor in its storage, from the first to the last of its elements."""

    region: Region
    at: int
    nbytes: int
    size: tuple[int, ...]
    layout: Layout


# --- views ----------------------------------------------------------------------------------------


class Tensors:
    """A factory of tensors from the records of one pickle."""

    def __init__(
        self,
        content: FileContents,
        notes: kit.Notes,
        shard: str | None = None,  # the file of the storages, in a checkpoint with several
    ) -> None:
        self.name = ""  # of the next tensor; callers set it
        self.content, self.notes = content, notes
        self._place, self._base, self._shard = content.place, content.base, shard
        self._byteorder: Any = content.byteorder
        self._is_simple = content.byteorder == "little" and shard is None
        self._inline_left = _MOST_INLINE

    def tensor(self, call: Any, level: int = 0) -> Tensor | None:
        """Return the tensor that a call would return; None for other results."""
        name = name_of(call) if type(call) is Call else ""
        make = _TENSORS.get(name)
        if make is None:
            is_tensor = name.startswith("torch.") and name.endswith("Tensor")
            return self.of_state(call, level) if is_tensor else None
        if level > _DEEPEST_TENSOR:
            raise self.broken(f"{name} is nested deeper than {_DEEPEST_TENSOR} levels", "Tensor")
        try:
            return make(self, call, level)
        except FormatError as error:
            raise error.located(offset=self._base) from error.__cause__
        except (IndexError, ValueError) as error:
            raise self.broken(f"{name} has {len(call.args)} arguments", "Tensor") from error

    def inner(self, call: Any, level: int) -> Tensor:
        """Return a tensor that is an argument of another one."""
        tensor = self.tensor(call, level + 1)
        if tensor is None:
            raise self.broken(f"{spelled(call)} is not a tensor", "Tensor")
        return tensor

    def of_state(self, call: Any, level: int) -> Tensor | None:
        """Return a tensor of PyTorch 0.1: an instance with a view, or a tensor, as its state."""
        state = call.state if type(call.state) is tuple else ()
        if len(state) == 4 and storage_of(state[0]) is not None:
            storage, offset, size, stride = state
            return self.view(storage, offset, (sizes_of(size), sizes_of(stride)))
        inner = self.tensor(state[0], level + 1) if len(state) == 5 else None
        return None if inner is None else _marked(inner, state[3])

    def array(self, call: Call) -> Tensor | None:
        """Return a numpy array, whose bytes are in the pickle."""
        tensor = array_of(call, self.name, self._inline_left)
        if tensor is not None:
            self._inline_left -= sum([part.nbytes for part in tensor.parts.values()])
        return tensor

    def broken(self, reason: str, rule: str) -> FormatError:
        """Return an error about the pickle."""
        return FormatError(reason, offset=self._base, rule=rule)

    def view(
        self,
        value: Any,
        offset: Any,
        sizes: tuple[Any, Any],
        dtype: str | None = None,
        *,
        meta: Any = None,  # bits for conjugated and negated values
        ordered: bool = True,  # otherwise, a view in Fortran order gets strides
    ) -> Tensor:
        """Return the tensor of a view, from a storage and from (sizes, strides)."""
        storage, (size, stride) = storage_of(value), sizes
        if storage is None:
            raise self.broken(f"{spelled(value)} is not a storage", "Storage")
        if type(offset) is not int or not 0 <= offset < 1 << 62:
            raise self.broken(f"{spelled(offset)} is not an offset in a storage", "Offset")
        layout = self.laid_out(size, stride)
        if storage.dtype is None:
            reason = f"the storage class {shown(storage.key)} is unsupported"
            return self.unread(storage.key[:_SHOWN], size, reason, "Storage")
        itemsize = itemsize_of(storage.dtype)
        region, storage_nbytes = self._place(storage.key), storage.numel * itemsize
        if storage_nbytes != region.nbytes and region.problem is None:
            if storage_nbytes > region.nbytes:
                reason = f"its storage should have {storage_nbytes} bytes, but has {region.nbytes}"
                problem = FormatError(reason, offset=region.offset, rule="Storage")
                region = region._replace(problem=problem)
            else:
                self.notes.add("bytes after a storage are ignored", f"storage {shown(storage.key)}")
        dtype = storage.dtype if dtype is None else dtype
        size_of = itemsize if dtype is storage.dtype else itemsize_of(dtype)
        at, nbytes = (offset + storage.first) * size_of, layout.span * size_of
        if nbytes and at + nbytes > storage_nbytes:
            reason = f"it ends at byte {at + nbytes} of a storage of {storage_nbytes} bytes"
            raise FormatError(reason, offset=region.offset, rule="Bounds")
        view = _TensorView(region, at if nbytes else 0, nbytes, size, layout)
        tensor = self._of_view(view, dtype, ordered=ordered)
        if meta is not None:
            tensor = self._with_bits(tensor, meta)
        if region.problem is None:
            return tensor
        # A copy, because several tensors can share the storage, and the error gets their names.
        return replace(tensor, problem=copy(region.problem))

    def laid_out(self, size: Any, stride: Any) -> Layout:
        """Return the layout of sizes and strides, or raise `FormatError`."""
        # True and 1.0 equal 1 in the cache of `_layout`.
        are_integers = {*map(type, size), *map(type, stride)} <= {int}
        layout = _layout(size, stride) if are_integers else "sizes and strides are not integers"
        if type(layout) is str:
            raise self.broken(layout, "Shape")
        return layout  # type: ignore[return-value]  # no text, which was an error

    def unread(self, dtype: str, size: tuple[int, ...], reason: str, rule: str) -> Tensor:
        """Return a tensor that is listed, but cannot be read."""
        return Tensor(self.name, dtype, size, {}, problem=UnsupportedError(reason, rule=rule))

    def _of_view(self, view: _TensorView, dtype: str, *, ordered: bool) -> Tensor:
        size, (order, strides, _) = view.size, view.layout
        if order == "C" and dtype in _PLAIN_TYPES:
            part = self._part(view, dtype, strides)
            return Tensor(self.name, dtype, size, {"data": part})
        if order == "F" and not ordered:
            order, strides = "C", strides_of(size, "F")
        if dtype in _HALVES:
            return self._halves(view, dtype)
        element = _STORED.get(dtype)
        if element is None:
            return self.unread(dtype, size, f"elements of the type {dtype} are not read", "Dtype")
        if dtype == _PAIRS:
            size = in_elements(dtype, size)
            if not size or order != "C" or strides is not None:
                return self.unread(element, size, "pairs that are not in C order", "Order")
        part = self._part(view._replace(size=size), element, strides)
        attrs = {} if dtype in _PLAIN_TYPES else {"torch_dtype": dtype}
        return Tensor(self.name, element, size, {"data": part}, "dense", order, attrs)

    def _part(self, view: _TensorView, element: str, strides: tuple[int, ...] | None) -> Part:
        region, at, nbytes, size, _ = view
        # A checksum covers the whole storage.
        has_all = region.crc and not at and nbytes == region.nbytes and strides is None
        digest = f"crc32:{region.crc:08x}" if has_all else None
        if strides is None and region.encoding is None and self._is_simple:
            return Part(element, size, region.offset + at, nbytes, None, None, digest)
        part = Part(
            element,
            size,
            region.offset + at,
            nbytes,
            digest=digest,
            strides=strides,
            byteorder=self._byteorder,
            shard=self._shard,
        )
        if region.encoding is None or not nbytes:
            return part
        return replace(
            part,
            offset=region.offset,
            nbytes=region.stored_nbytes,
            skip=None if nbytes == region.nbytes else at,
            encoding=region.encoding,
            decoded_nbytes=nbytes,
            digest_of="decoded",
        )

    def _halves(self, view: _TensorView, dtype: str) -> Tensor:
        """Return complex numbers of 16-bit floats, which numpy lacks, as two parts."""
        size, (order, strides, _) = view.size, view.layout
        steps = strides or strides_of(size, order)
        steps, half = tuple([2 * step for step in steps]), _HALVES[dtype]
        nbytes = max(0, view.nbytes - 2)
        parts = {}
        for role, shift in (("real", 0), ("imag", 2 if nbytes else 0)):
            component = view._replace(at=view.at + shift, nbytes=nbytes)
            parts[role] = self._part(component, half, steps)
        attrs = {"torch_dtype": dtype}
        return Tensor(self.name, half, size, parts, "structural", attrs=attrs)

    def _with_bits(self, tensor: Tensor, meta: Any) -> Tensor:
        """Apply the bits that mark values as conjugated, or negated, relative to their bytes."""
        bits = dict_of(meta.items()) if type(meta) is Pairs else {}
        is_conj, is_neg = bits.get("conj") is True, bits.get("neg") is True
        if not (is_conj or is_neg) or not tensor.parts:
            return tensor
        kind = ELEMENT_TYPES[tensor.dtype].kind
        if kind not in {"float", "complex"}:
            reason = "negated integers are unsupported"
            return self.unread(tensor.dtype, tensor.shape, reason, "Bits")
        # Whether to invert the sign of a real number, or of a real and an imaginary part.
        signs = {"real": [is_neg], "imag": [is_neg ^ is_conj]}
        signs["data"] = signs["real"] + (signs["imag"] if kind == "complex" else [])
        parts = {role: self._negated(part, signs[role]) for role, part in tensor.parts.items()}
        return replace(tensor, parts=parts)

    def _negated(self, part: Part, signs: list[bool]) -> Part:
        """Return a part with inverted signs of its elements' components."""
        if not any(signs):
            return part
        nbytes = ELEMENT_TYPES[part.dtype].bits // 8 // len(signs)
        masks = [bytes(nbytes - 1) + bytes((0x80 * sign,)) for sign in signs]
        inverted = b"".join(masks if self._byteorder == "little" else [m[::-1] for m in masks])
        return replace(part, inverted=inverted, digest=None)


# --- builders: functions of a call and the number of tensors around it ----------------------------


def _v2(o: Tensors, call: Call, _: int) -> Tensor:
    storage, offset, size, stride, *more = call.args
    tensor = o.view(storage, offset, (sizes_of(size), sizes_of(stride)), meta=_at(more, 2))
    return _marked(tensor, _at(more, 0))


def _v3(o: Tensors, call: Call, _: int) -> Tensor:
    storage, offset, size, stride, requires_grad, _hooks, kind, *more = call.args
    dtype = dtype_named(kind)
    if dtype is None:
        raise o.broken(f"{spelled(kind)} is not an element type", "Dtype")
    sizes = (sizes_of(size), sizes_of(stride))
    tensor = o.view(storage, offset, sizes, dtype, meta=_at(more, 0))
    return _marked(tensor, requires_grad)


def _parameter(o: Tensors, call: Call, level: int) -> Tensor | None:
    if not call.args:
        tensor = o.of_state(call, level)
        return tensor and replace(tensor, attrs={**tensor.attrs, "parameter": True})
    data, *more = call.args
    tensor = o.tensor(data, level + 1)
    if tensor is None:
        return None
    attrs = {key: value for key, value in tensor.attrs.items() if key != "requires_grad"}
    marked = _marked(replace(tensor, attrs=attrs), _at(more, 0))
    state = dict_of(items_of(_at(more, 2)))
    plain = {key_text(key): value for key, value in state.items() if is_plain(value)}
    return replace(marked, attrs={**marked.attrs, "parameter": True, **plain})


def _variable(o: Tensors, call: Call, level: int) -> Tensor | None:
    """Return the tensor in a Variable of PyTorch 0.1 to 0.3."""
    if not call.args:
        return o.of_state(call, level)
    tensor = o.tensor(call.args[0], level + 1)
    state = call.state if type(call.state) is tuple else ()
    return None if tensor is None else _marked(tensor, _at(state, 0))


def _typed(o: Tensors, call: Call, level: int) -> Tensor | None:
    return o.tensor(wrapped(call), level + 1)


def _of_device(o: Tensors, call: Call, level: int) -> Tensor | None:
    """Return the tensor, or the array, that represents a tensor of another device."""
    inner, kind, _, requires_grad, *_ = call.args
    tensor, dtype = o.tensor(inner, level + 1), dtype_named(kind)
    if tensor is None:
        return None
    if dtype is not None and dtype != tensor.dtype:
        tensor = replace(tensor, attrs={**tensor.attrs, "torch_dtype": dtype})
    return _marked(tensor, requires_grad)


def _quantized(o: Tensors, call: Call, level: int) -> Tensor:
    storage, offset, sizes, stride, params, *_ = call.args
    size = sizes_of(sizes)
    tensor = o.view(storage, offset, (size, sizes_of(stride)), ordered=False)
    if "data" not in tensor.parts or tensor.problem is not None:
        return tensor
    if type(params) is not tuple or len(params) < 3:
        raise o.broken(f"{spelled(params)} is not a scheme", "Scheme")
    scheme, scale, zero = params[:3]
    name = scheme.name if type(scheme) is Global and scheme.module == "torch" else spelled(scheme)
    block = tuple([max(1, extent) for extent in size])
    if name == "per_tensor_affine":
        if type(scale) is not float or type(zero) is not int or abs(zero) >= 1 << 31:
            raise o.broken(f"scale {spelled(scale)}, zero point {spelled(zero)}", "Scheme")
        data = struct.pack("<d", scale)
        more = {"scales": Part("float64", (1,) * len(size), 0, len(data), inline=data)}
    elif name in {"per_channel_affine", "per_channel_affine_float_qparams"}:
        axis = _at(params, 3)
        if type(axis) is not int or not 0 <= axis < len(size):
            raise o.broken(f"axis {spelled(axis)} of {len(size)}", "Scheme")
        grids = {"scales": o.inner(scale, level), "zeros": o.inner(zero, level)}
        if any(grid.shape != size[axis : axis + 1] for grid in grids.values()):
            reason = f"its {size[axis]} channels do not all have a scale and a zero point"
            raise o.broken(reason, "Scheme")
        if any("data" not in grid.parts or grid.problem is not None for grid in grids.values()):
            return o.unread(tensor.dtype, size, "its scales cannot be read", "Scheme")
        more = {role: grid.parts["data"] for role, grid in grids.items()}
        block, zero = (*block[:axis], 1, *block[axis + 1 :]), None
    else:
        raise o.broken(f"{shown(name)} is not a scheme", "Scheme")
    attrs = {"torch_dtype": tensor.attrs.get("torch_dtype", ""), "qscheme": name}
    parts = {**tensor.parts, **more}
    if not size:
        return replace(tensor, parts=parts, layout="structural", attrs=attrs)
    bits = ELEMENT_TYPES[tensor.dtype].bits
    # torch.dequantize multiplies with a single scale in float32, with scales of channels in their
    # own type.
    is_wide = zero is None and parts["scales"].dtype == "float64"
    axis = len(size) - 1
    quantization = Quantization(block, tensor.dtype, bits, bits, axis, zero=zero, wide=is_wide)
    return replace(tensor, parts=parts, layout="quantized", attrs=attrs, quantization=quantization)


def _sparse(o: Tensors, call: Call, level: int) -> Tensor:
    layout, data, *_ = call.args
    args = layout.args if type(layout) is Call and name_of(layout) == _LAYOUT else None
    name = args[0] if args and type(args[0]) is str else spelled(layout)
    kind = name.removeprefix("torch.")
    if kind not in _SPARSE or type(data) is not tuple or len(data) < len(_SPARSE[kind]) + 1:
        raise o.broken(f"{shown(name)} is not a layout", "Layout")
    roles = _SPARSE[kind]
    tensors = {role: o.inner(value, level) for role, value in zip(roles, data, strict=False)}
    size = sizes_of(data[len(roles)])
    o.laid_out(size, (0,) * len(size))
    values = tensors["values"]
    problem = next((t.problem for t in tensors.values() if t.problem is not None), None)
    if problem is not None or any(t.layout != "dense" for t in tensors.values()):
        reason = f"{kind} tensors with parts that are not dense are unsupported"
        problem = problem or UnsupportedError(reason, rule="Layout")
        return Tensor(o.name, values.dtype, size, {}, problem=problem)
    parts = {role: _in_c_order(tensor) for role, tensor in tensors.items()}
    stored = Tensor(o.name, values.dtype, size, parts)
    shapes = {role: tensor.shape for role, tensor in tensors.items()}
    make = _coordinates if kind == "sparse_coo" else _compressed
    try:
        tensor = make(stored, kind, shapes)
    except ValueError as error:
        raise o.broken(str(error), "Layout") from error
    return tensor or replace(stored, layout="structural", attrs={"torch_layout": kind})


def _coordinates(tensor: Tensor, kind: str, shapes: Mapping[str, Any]) -> Tensor | None:  # noqa: ARG001
    """Return a tensor in coordinate format: each entry is a value or, in hybrid ones, an array."""
    parts = {"values": tensor.parts["values"], "coords": tensor.parts["indices"]}
    count, *block = shapes["values"] or (0,)
    axes = tensor.ndim - len(block)
    if axes < 1 or shapes["indices"] != (axes, count) or tensor.shape[axes:] != (*block,):
        return None
    return replace(tensor, parts=parts, layout="sparse_hybrid" if block else "sparse_coo")


def _compressed(tensor: Tensor, kind: str, shapes: Mapping[str, Any]) -> Tensor | None:
    """Return a matrix compressed by rows or columns, of values or blocks; None if not a matrix."""
    count, *block = shapes["values"] or (0,)
    is_blocked = kind in {"sparse_bsr", "sparse_bsc"}
    block = block if is_blocked else [1, 1, *block]
    if tensor.ndim != 2 or len(block) != 2 or 0 in block or shapes["indices"] != (count,):
        return None
    if any(size % extent for size, extent in zip(tensor.shape, block, strict=True)):
        return None
    axis = 0 if kind in {"sparse_csr", "sparse_bsr"} else 1
    pointers = (tensor.shape[axis] // block[axis] + 1,)
    if shapes["indptr"] != pointers:
        reason = f"the pointers have shape {shapes['indptr']}, not {pointers}"
        raise ValueError(f"{reason}, for a matrix of shape {tensor.shape}")
    layout: Any = kind
    return replace(tensor, layout=layout)


def _in_c_order(tensor: Tensor) -> Part:
    """Return the part of a dense tensor, with strides if it is in Fortran order."""
    part = tensor.parts["data"]
    if tensor.order == "C":
        return part
    return replace(part, strides=strides_of(tensor.shape, "F"), digest=None)


def _meta(o: Tensors, call: Call, _: int) -> Tensor:
    kind, size = call.args[:2]
    dtype, size = dtype_named(kind), sizes_of(size)
    o.laid_out(size, (0,) * len(size))
    if dtype is None:
        raise o.broken(f"{spelled(kind)} is not an element type", "Dtype")
    problem = PayloadMissingError("it was saved without its values (device 'meta')", rule="Meta")
    return Tensor(o.name, _STORED.get(dtype, dtype), size, {}, problem=problem)


def _nested(o: Tensors, call: Call, level: int) -> Tensor:
    roles = ("buffer", "sizes", "strides", "offsets")
    tensors = {role: o.inner(value, level) for role, value in zip(roles, call.args, strict=True)}
    if any(t.layout != "dense" or t.problem is not None for t in tensors.values()):
        raise o.broken("the parts of a nested tensor are not dense", "Tensor")
    parts = {role: _in_c_order(tensor) for role, tensor in tensors.items()}
    buffer = tensors["buffer"]
    attrs = {"torch_layout": "nested"}
    return Tensor(o.name, buffer.dtype, buffer.shape, parts, "structural", attrs=attrs)


def _array(o: Tensors, call: Call, _: int) -> Tensor | None:
    return o.array(call)


def wrapped(call: Call) -> Any:
    """Return the value that a call wraps, such as the tensor of a parameter; None without one."""
    make, args = _TENSORS.get(name_of(call)), call.args
    if make is _typed and len(args) > 2 and type(args[2]) is tuple:
        # The inner function comes from the file; only functions in the table have a meaning.
        inner = Call(args[0], args[2], call.at)
        inner.state = _at(args, 3)
        return inner
    return args[0] if make in _ADDING and args else None


def _at(values: Any, position: int) -> Any:
    return values[position] if position < len(values) else None


def _marked(tensor: Tensor, requires_grad: Any) -> Tensor:
    if requires_grad is not True:
        return tensor
    return replace(tensor, attrs={**tensor.attrs, "requires_grad": True})


_LAYOUT = "torch.serialization._get_layout"
_COMPRESSED: tuple[str, ...] = ("indptr", "indices", "values")
_SPARSE: dict[str, tuple[str, ...]] = {"sparse_coo": ("indices", "values")}
_SPARSE |= dict.fromkeys(("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"), _COMPRESSED)
_TENSORS: dict[str, Callable[[Tensors, Call, int], Tensor | None]] = {
    "torch._utils._rebuild_tensor_v2": _v2,
    "torch._utils._rebuild_tensor": _v2,
    "torch._utils._rebuild_tensor_v3": _v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.nn.Parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_device_tensor_from_numpy": _of_device,
    "torch._utils._rebuild_xla_tensor": _of_device,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _of_device,
    "torch.autograd.variable.Variable": _variable,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy.core.numeric._frombuffer": _array,
}
_ADDING = {_parameter, _of_device, _variable}
