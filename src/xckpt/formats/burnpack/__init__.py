"""Burnpack (``.bpk``), the checkpoints of Burn, in the three dialects of version 1.

All numbers are little-endian, and tensors are in C order::

    offset              size             what
    0                   4                magic, bytes "NRUB"
    4                   2                version, 1
    6                   4                size of the metadata, n
    10                  n                metadata, CBOR
    D                                    data

Metadata is a map; `metadata` and `scalars` may be absent, as may `param_id`::

    tensors    name -> {dtype, shape, data_offsets: [start, end], param_id}
    metadata   text -> text
    scalars    name -> {"Int" | "UInt" | "Float" | "Bool": value}

Offsets count from D. The versions of burn write different dialects, and no field states which::

    burn          D                              dtype of booleans         quantised tensors
    0.19          10 + n, tensors back to back   "Bool"                    none
    0.20          next multiple of 256, and so   "Bool"                    param, level
    0.21          every tensor's start           {"Bool": "Native" | ...}  param, level
    after 0.22-pre.2                                                       tensor, block

A start that is not a multiple of 256 identifies 0.19. If all are, as for a single tensor, the end
of the file does, where the last tensor ends. If other bytes follow it, only padding other than zero
identifies 0.19; a file that may be of both kinds is refused.

Names are in the order of their UTF-8 bytes, data in any order. The format has no digests. Burn's
reader, but not its writer, has limits (100 MiB of metadata, 100,000 tensors, 10 GiB for a tensor);
xckpt bounds all numbers by the size of the file instead.

xckpt writes the same bytes as burn if the tensors have the same order. Data are in the order of the
file that they are copied from, or else of the draft (burn uses the order of its modules);
each tensor begins at a multiple of 256, and nothing follows the last one. Empty maps and missing
param_ids are left out. Integers and floats are in their shortest form. The values of scalars are in
the metadata, so the draft has them as the `inline` bytes of their parts.

Specification: crates/burn-store (0.19 to 0.21) and crates/burn-pack (since) in
github.com/tracel-ai/burn, revision 2c06be35.
"""

from __future__ import annotations

import json
import struct as binary
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import nbytes_of
from xckpt.errors import CheckpointError, FormatError, UnsupportedError, escaped, shown
from xckpt.formats import Can, Format, Readable, kit
from xckpt.formats.burnpack import cbor
from xckpt.formats.burnpack.schemes import Scheme, placed_parts, scheme_of, split
from xckpt.formats.plan import Draft, Plan, PlannedPart, WantedTensor, by_source
from xckpt.index import Index, Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAGIC = b"NRUB"
_HEADER = binary.Struct("<4sHI")
_ALIGNMENT = 256
_MOST_COMPARED = 1 << 16
_NEWEST = 1
_DIALECTS = ("0.20", "0.21", "0.22")

_ROOT = frozenset({"tensors", "metadata", "scalars"})
_FIELDS = frozenset({"dtype", "shape", "data_offsets", "param_id"})
_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "Bool": "bool",
    "Flex32": "float32",
}
_BOOLEANS = {"Native": "bool", "U8": "bool", "U32": "bool32"}


class Burnpack(Format):
    """Burnpack, the three dialects of version 1 (``.bpk``)."""

    name = "burnpack"
    description = "Burnpack checkpoints"
    types = _TYPES
    storage_attrs = ("format", "producer", "version", "param_id", "burn_dtype", "scalar")
    can = Can(
        types=(*dict.fromkeys(_TYPES.values()), "bool32"),
        layouts=("dense", "quantized", "structural"),
        tensor_attrs=("param_id", "burn_dtype", "scalar"),
        file_attrs=None,
        arrangement=True,
    )

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file begins with the magic."""
        return head.startswith(_MAGIC)

    def read(self, source: Readable, *, layout: str | None = None) -> Index:
        """Read header and metadata, no data.

        Parameters
        ----------
        source : Readable
            The file.
        layout : {"aligned", "legacy"}, optional
            Start of the data: at a multiple of 256, or right after the metadata, as in burn 0.19.
            By default inferred from the size of the file.
        """
        kit.check_option("layout", layout, ("aligned", "legacy"))
        version, length = _header(source)
        end = _HEADER.size + length
        with kit.locating(offset=_HEADER.size):
            root = cbor.struct(
                "metadata", cbor.decode(bytes(source.read(_HEADER.size, length))), _ROOT
            )
            listed = cbor.mapping("tensors", root.get("tensors"))
            entries = kit.read_each(listed.items(), _descriptor)
            if layout is None:
                layout = _layout(entries, end, source)
            start = end if layout == "legacy" else kit.aligned(end, _ALIGNMENT)
            _check_ranges(entries, start, end, source.size)
            tensors = kit.read_each(entries.items(), partial(_tensor, start))
            names = cbor.ScalarNames(frozenset(tensors))
            for name, value in cbor.mapping("scalars", root.get("scalars", {})).items():
                free = names.shown(name)
                tensors[free] = _scalar(free, value)
            attrs = cbor.mapping("metadata", root.get("metadata", {}))
            for key, value in attrs.items():
                if type(value) is not str:
                    raise cbor.mistyped(f"metadata {key!r}", value, "text")
            if layout is None:  # another fault of the file is more certain
                raise _undecided(entries, end, source.size)
        dialect = str(version) if layout == "aligned" else f"{version}-legacy"
        warnings = () if version else ("version 0, which no burn has written, is read as 1",)
        name, size = source.name, source.size
        return kit.with_arrangement(
            Index(self.name, dialect, tensors, attrs, name, size, warnings=warnings)
        )

    def plan(self, draft: Draft, *, dialect: str = "0.22", param_ids: str = "keep") -> Plan:
        """Lay out the metadata, and the data after it.

        Parameters
        ----------
        draft : Draft
            Contents of the file.
        dialect : {"0.22", "0.21", "0.20"}, default "0.22"
            Version of burn that must be able to read the file. Booleans differ between 0.20 and
            0.21, and the schemes of quantised tensors change after 0.22.0-pre.2.
        param_ids : {"keep", "make"}, default "keep"
            Keep the stored ids only, or derive missing ids from the names of tensors. Burn makes
            random ids when it reads a file without them.
        """
        if dialect not in _DIALECTS:
            raise ValueError(f"dialect={dialect!r}: expected one of {', '.join(_DIALECTS)}")
        if param_ids not in {"keep", "make"}:
            raise ValueError(f"param_ids={param_ids!r}: expected 'keep' or 'make'")
        inline = [tensor for tensor in draft.tensors.values() if self.is_inline(tensor)]
        tensors = {n: tensor for n, tensor in draft.tensors.items() if not self.is_inline(tensor)}
        descriptors: dict[str, Any] = {}
        planned: list[PlannedPart] = []
        end = 0
        for name, tensor in by_source(tensors).items():
            kit.check_text("the name", name, name)
            dtype, offsets = self._described(tensor, dialect)
            start = kit.aligned(end, _ALIGNMENT)
            for role, offset in offsets.items():
                planned.append(PlannedPart(name, role, tensor.parts[role], start + offset))
            end = start + sum([tensor.parts[role].nbytes for role in offsets])
            fields = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
            param_id = _param_id(tensor, make=param_ids == "make")
            descriptors[name] = fields if param_id is None else {**fields, "param_id": param_id}
        names = cbor.ScalarNames(tensors)
        scalars = {}
        for scalar in inline:
            kit.check_text("the name", scalar.name, scalar.name)
            scalars[names.stored(scalar.name)] = cbor.kind_and_value(scalar)
        as_read = dict(sorted(tensors.items()))
        inline.sort(key=lambda scalar: names.stored(scalar.name))
        as_read |= {scalar.name: scalar for scalar in inline}
        metadata = cbor.encode(descriptors, kit.attribute_texts(draft, as_read), scalars)
        head = _HEADER.pack(_MAGIC, _NEWEST, len(metadata)) + metadata
        start = kit.aligned(len(head), _ALIGNMENT)
        placed = [part._replace(offset=start + (part.offset or 0)) for part in planned]
        return replace(Plan.headed(head, placed, start + end), alignment=_ALIGNMENT)

    def is_inline(self, tensor: WantedTensor) -> bool:
        """Return whether a tensor is a scalar, whose value is in the metadata."""
        return "scalar" in tensor.attrs and not tensor.shape and tensor.layout == "dense"

    def module_axes(self, shapes: Mapping[str, _Shape]) -> dict[str, _Names]:
        """Name the axes of weights if a bias identifies the axis of the outputs."""
        if "gamma" in shapes:
            normed = [name for name in _NORM if name in shapes]
            have_one_size = len({shapes[name] for name in normed}) == len(shapes["gamma"]) == 1
            return dict.fromkeys(normed, ("channels",)) if have_one_size else {}
        weight, bias = shapes.get("weight"), shapes.get("bias")
        size = bias[0] if bias is not None and len(bias) == 1 else None
        if weight is None or len(weight) not in _AXES:
            return {}
        outputs, inputs, *kernel = _AXES[len(weight)]
        usual = (outputs, inputs) if kernel else (inputs, outputs)
        for names in (usual, usual[::-1]):
            if weight[names.index(outputs)] == size:
                return {"weight": (*names, *kernel), "bias": (outputs,)}
        return {"weight": (None, None, *kernel)} if kernel else {}

    def _described(self, tensor: WantedTensor, dialect: str) -> tuple[Any, Mapping[str, int]]:
        """Return a tensor's dtype as the metadata spell it, and the offsets of its parts."""
        if tensor.order != "C":
            raise UnsupportedError("Fortran order", tensor=tensor.name, rule="Order")
        for part in tensor.parts.values():
            if part.compression is not None or part.algorithm is not None:
                reason = "burnpack has neither compression nor digests"
                raise UnsupportedError(reason, tensor=tensor.name, rule="Encoding")
        if tensor.layout in {"quantized", "structural"}:
            scheme = scheme_of(tensor)
            spelled = scheme.as_metadata(old=dialect != "0.22")
            if spelled is None:
                raise _not_before("0.22", f"the scheme {scheme}", tensor)
            return {"QFloat": spelled}, placed_parts(tensor, scheme)
        if tensor.layout != "dense" or set(tensor.parts) != {"data"}:
            reason, hint = f"burnpack has no {tensor.layout} layout", "Save it dense"
            raise UnsupportedError(reason, tensor=tensor.name, rule="Layout", hint=hint)
        dtype, stated_nbytes = tensor.parts["data"].dtype, tensor.parts["data"].nbytes
        spelled = self._spelled_type(tensor, dtype, dialect)
        nbytes = nbytes_of(dtype, tensor.size)
        if stated_nbytes != nbytes:
            reason = f"{stated_nbytes} bytes, but {dtype} of {tensor.shape} has {nbytes}"
            raise ValueError(f"{shown(tensor.name)}: {reason}")
        return spelled, {"data": 0}

    def _spelled_type(self, tensor: WantedTensor, dtype: str, dialect: str) -> Any:
        stated = tensor.attrs.get("burn_dtype")
        if dtype == "bool":
            variant = {"Bool": "U8" if stated == json.dumps({"Bool": "U8"}) else "Native"}
            return "Bool" if dialect == "0.20" else variant
        if dtype == "bool32":
            if dialect == "0.20":
                raise _not_before("0.21", "booleans of 32 bits", tensor)
            return {"Bool": "U32"}
        if dtype not in self.spellings:
            reason = f"burnpack does not support {escaped(dtype)}"
            hint = f"Supported types are {', '.join(self.can.types)}"
            raise UnsupportedError(reason, tensor=tensor.name, rule="Dtype", hint=hint)
        return stated if dtype == "float32" and stated == "Flex32" else self.spellings[dtype]


# --- reading --------------------------------------------------------------------------------------


def _header(source: Readable) -> tuple[int, int]:
    """Return the version and the size of the metadata."""
    if source.size < _HEADER.size:
        reason = f"{source.size} bytes are fewer than the {_HEADER.size} of a header"
        raise FormatError(reason, offset=0, rule="InvalidHeader")
    magic, version, length = _HEADER.unpack(source.read(0, _HEADER.size))
    if magic != _MAGIC:
        swapped = magic == _MAGIC[::-1]
        hint = "The bytes of its magic number are in big-endian order" if swapped else None
        reason = f"the file begins {magic!r}, not {_MAGIC!r}"
        raise FormatError(reason, offset=0, rule="InvalidMagicNumber", hint=hint)
    if version > _NEWEST:
        reason = f"version {version}: the newest supported version is {_NEWEST}"
        raise UnsupportedError(reason, offset=4, rule="InvalidVersion")
    if length > source.size - _HEADER.size:
        reason = f"metadata of {length} bytes, but {source.size - _HEADER.size} follow the header"
        raise FormatError(reason, offset=6, rule="InvalidHeader", hint=kit.TRUNCATED)
    return version, length


class _Descriptor(NamedTuple):
    """A tensor in the metadata; its byte range counts from the start of the data."""

    start: int
    end: int
    fields: dict[str, Any]


def _descriptor(_name: str, entry: Any) -> _Descriptor:
    fields = cbor.struct("descriptor", entry, _FIELDS)
    offsets = fields.get("data_offsets")
    if type(offsets) is not list or len(offsets) != 2:
        raise cbor.mistyped("data_offsets", offsets, "a start and an end")
    start, end = offsets
    if type(start) is not int or type(end) is not int or start < 0 or end < 0:
        cbor.number("the start of data_offsets", start)
        cbor.number("the end of data_offsets", end)
    if end < start:
        raise FormatError(f"data from {start} to {end}", rule="DataOffsets")
    return _Descriptor(start, end, fields)


def _layout(entries: Mapping[str, _Descriptor], legacy: int, source: Readable) -> str | None:
    """Return the layout of a file, None if it may be either: only burn 0.19 wrote no padding."""
    # The data begin right after the metadata, or at the next multiple of the alignment.
    aligned, size = kit.aligned(legacy, _ALIGNMENT), source.size
    ranges = sorted([(entry.start, entry.end) for entry in entries.values()])
    nbytes = ranges[-1][1] if ranges else 0
    ends = [0, *(stop for _, stop in ranges)]
    is_contiguous = all(begin == before for (begin, _), before in zip(ranges, ends, strict=False))
    if aligned == legacy or not is_contiguous:
        return "aligned"
    if any(begin % _ALIGNMENT for begin, _ in ranges) or legacy + nbytes == size:
        return "legacy"
    if not nbytes or aligned + nbytes >= size:  # they end with the file, or are truncated
        return "aligned"
    if any(source.read(legacy, aligned - legacy)):
        return "legacy"
    compared = aligned + nbytes - legacy
    if compared <= _MOST_COMPARED and not any(source.read(legacy, compared)):
        return "aligned"  # both would be zeros
    return None


def _undecided(entries: Mapping[str, _Descriptor], end: int, size: int) -> FormatError:
    """Return the error for a file that may be of either layout, with different values."""
    start, last = kit.aligned(end, _ALIGNMENT), max([entry.end for entry in entries.values()])
    reason = f"the data begin at byte {end}, if burn 0.19 wrote the file, or at byte {start}; the "
    reason += f"size cannot tell, because at least {size - start - last} other bytes follow them"
    hint = f"Cut the file to {end + last} or {start + last} bytes, or pass layout='legacy' or "
    hint += "layout='aligned'"
    return FormatError(reason, offset=end, rule="Layout", hint=hint)


def _check_ranges(
    entries: Mapping[str, _Descriptor], start: int, metadata_end: int, size: int
) -> None:
    """Check that ranges are in the file and do not overlap."""
    ranges = [(entry.start, entry.end, name) for name, entry in entries.items()]
    end, last = max([(end, name) for _, end, name in ranges], default=(0, None))
    if start + end > size:
        hint = kit.TRUNCATED
        reason = f"the data end at byte {start + end}, but the file has {size} bytes"
        if metadata_end < start and metadata_end + end <= size:
            hint = "The file is truncated, or burn 0.19 wrote it; in that case pass layout='legacy'"
        raise FormatError(reason, offset=size, tensor=last, rule="Truncated", hint=hint)
    for at, name, other in kit.find_overlaps(ranges):
        reason = f"its data overlap the data of {shown(other)}"
        raise FormatError(reason, offset=start + at, tensor=name, rule="Overlap")


def _tensor(data_start: int, name: str, entry: _Descriptor) -> Tensor:
    start, end, fields = entry
    dtype, shape, param_id = fields.get("dtype"), fields.get("shape"), fields.get("param_id")
    # A list of small numbers may be a byte string.
    shape = cbor.as_shape([*shape] if type(shape) is bytes else shape, kit.LARGEST // 8)
    attrs = {}
    if type(param_id) is int and param_id >= 0:
        # As text, because most of these numbers have more bits than JSON and netCDF preserve.
        attrs["param_id"] = str(param_id)
    elif cbor.optional(param_id) is not None:
        raise cbor.mistyped("param_id", param_id, "a non-negative integer")
    offset, nbytes = data_start + start, end - start
    if type(dtype) is str and dtype in _TYPES:
        if dtype == "Flex32":
            attrs["burn_dtype"] = dtype
        return _dense(name, Part(_TYPES[dtype], shape, offset, nbytes), shape, attrs)
    kind, content = cbor.variant("dtype", dtype)
    if kind in _TYPES and kind != "Bool":
        raise cbor.mistyped("dtype", dtype, "a variant without content")
    parts = {"data": Part("uint8", (nbytes,), offset, nbytes)}
    raw = Tensor(name, kind, shape, parts, attrs=attrs)
    try:
        return _composed(raw, kind, content)
    except UnsupportedError as problem:
        return _unreadable(raw, problem)


def _dense(name: str, part: Part, shape: _Shape, attrs: dict[str, Any]) -> Tensor:
    expected = nbytes_of(part.dtype, prod(shape))
    if part.nbytes != expected:
        reason = f"{part.nbytes} bytes != {expected} for {part.dtype} of shape {shape}"
        raise FormatError(reason, offset=part.offset, rule="TensorSize")
    return Tensor(name, part.dtype, shape, {"data": part}, attrs=attrs)


def _composed(raw: Tensor, kind: str, content: Any) -> Tensor:
    """Return a tensor whose dtype has content, such as a quantisation scheme."""
    data = raw.parts["data"]
    if kind == "Bool":
        store = cbor.unit("Bool", content, _BOOLEANS)
        store_attrs = {} if store == "Native" else {"burn_dtype": json.dumps({"Bool": store})}
        attrs = {**raw.attrs, **store_attrs}
        part = Part(_BOOLEANS[store], raw.shape, data.offset, data.nbytes)
        return _dense(raw.name, part, raw.shape, attrs)
    if kind != "QFloat":
        raise cbor.unknown("dtype", kind)
    scheme = Scheme.parse(content)
    raw = replace(raw, attrs={**raw.attrs, "burn_dtype": str(scheme)})
    if not scheme.packs(raw.ndim):
        reason = f"codes are packed along axis {scheme.packed_axis}, counted from the innermost, "
        reason += f"of a tensor of {raw.ndim} axes"
        return _unreadable(raw, FormatError(reason, rule="QuantScheme"))
    parts, quantization = split(scheme, raw.shape, data.offset, data.nbytes)
    return replace(
        raw,
        dtype=parts["data"].dtype,
        parts=parts,
        layout="structural" if quantization is None else "quantized",
        quantization=quantization,
    )


def _unreadable(raw: Tensor, problem: CheckpointError) -> Tensor:
    problem.located(tensor=raw.name)
    problem.offset = raw.parts["data"].offset
    problem.hint = kit.without(raw.name)
    # A traceback would keep all metadata alive.
    return replace(raw, problem=problem.with_traceback(None))


def _scalar(name: str, value: Any) -> Tensor:
    """Return the tensor of a scalar, whose value is in the metadata."""
    label = f"scalar {shown(name)}"
    kind, content = cbor.variant(label, value)
    attrs = {"scalar": kind}
    if kind not in cbor.KINDS:
        empty = {"data": Part("uint8", (0,), _HEADER.size, 0)}
        return _unreadable(Tensor(name, kind, (), empty, attrs=attrs), cbor.unknown("scalar", kind))
    dtype, python_type, form = cbor.KINDS[kind]
    if type(content) is not python_type:
        raise cbor.mistyped(label, content, kind)
    try:
        data = binary.pack(form, content)
    except binary.error:
        raise cbor.mistyped(label, content, f"{kind} of 64 bits") from None
    part = Part(dtype, (), _HEADER.size, len(data), inline=data)
    return Tensor(name, dtype, (), {"data": part}, attrs=attrs)


# --- writing --------------------------------------------------------------------------------------


def _not_before(dialect: str, feature: str, tensor: WantedTensor) -> UnsupportedError:
    reason, hint = f"burn {dialect} or newer is required for {feature}", f"Pass dialect={dialect!r}"
    return UnsupportedError(reason, tensor=tensor.name, rule="Dialect", hint=hint)


def _param_id(tensor: WantedTensor, *, make: bool) -> int | None:
    stated = tensor.attrs.get("param_id")
    if stated is None:
        digest = blake2b(tensor.name.encode(), digest_size=8).digest() if make else None
        return None if digest is None else int.from_bytes(digest, "little")
    text = str(stated)
    if text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 1 << 64:
        return int(text)
    reason = f"the param_id {shown(text)} is not an unsigned integer of 64 bits"
    hint = "Write it in decimal digits, or leave it out"
    raise UnsupportedError(reason, tensor=tensor.name, rule="ParamId", hint=hint)


# --- names of axes --------------------------------------------------------------------------------

# The file does not state the kind of a module, which determines the axes of its weight: linear
# layers have [d_input, d_output], embeddings [n_embedding, d_model], convolutions [channels_out,
# channels_in, kernel...], transposed convolutions [channels_in, channels_out, kernel...]. Therefore
# axes are named only if a bias identifies the outputs. If inputs and outputs have the same size,
# the usual layer is assumed, which is neither transposed nor of the layout Col. For a weight
# without a bias, only the kernel of a convolution is named. See the layers of crates/burn-nn.
_Names = tuple[str | None, ...]
_Shape = tuple[int, ...]

_NORM = ("gamma", "beta", "running_mean", "running_var")
# Outputs, inputs and others, by the number of axes.
_AXES = {
    2: ("d_output", "d_input"),
    3: ("channels_out", "channels_in", "kernel"),
    4: ("channels_out", "channels_in", "kernel_height", "kernel_width"),
    5: ("channels_out", "channels_in", "kernel_depth", "kernel_height", "kernel_width"),
}
