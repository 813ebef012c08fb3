"""Conversions of values: to another element type, and of sparse arrays to the parts of tensors.

``cast="exact"`` permits conversions that can be reversed bit for bit, including NaN and signs of
zeros; ``"allow"`` rounds; ``"never"`` is exact, and raises if a format does not support a type.

A sparse dask array is computed once to count its stored elements, and again for the parts, in
blocks of rows. A dense array that was sparse in its old file becomes sparse again, with all
elements whose bits are not zero, such as -0.0. Elements without order, or with duplicates, are
sorted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xckpt.arrays.sparse import COOArray, CSRArray
from xckpt.elements import ELEMENT_TYPES, WIDE_FLOATS, stored_dtype
from xckpt.errors import FormatError, UnsupportedError, locating
from xckpt.formats.plan import WantedPart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.arrays.parts import PartReader
    from xckpt.arrays.sparse import SparseArray
    from xckpt.index import Tensor
    from xckpt.typing import Array

__all__ = [
    "Cast",
    "canonical_parts",
    "convert",
    "densified",
    "element_type",
    "holds",
    "is_sparse",
    "sparse_parts",
    "stored_elements",
]

Cast = Literal["exact", "allow", "never"]


def element_type(dtype: np.dtype[Any]) -> str | None:
    """Name the element type of a numpy dtype."""
    name = dtype.name
    return name if name in ELEMENT_TYPES and dtype.names is None else None


def holds(wide: str, narrow: str) -> bool:
    """Return whether every value of a type is one of another type."""
    w, n = ELEMENT_TYPES[wide], ELEMENT_TYPES[narrow]
    if wide == narrow:
        return True
    # Small floats hold no other type: they lack infinities or a zero, or have too few bits.
    if w.kind == "float" and wide not in WIDE_FLOATS:
        return False
    if n.kind == "complex" and w.kind != "complex":
        return False
    if n.kind == "bool":
        return True
    if n.range is not None and w.range is not None:
        return w.range[0] <= n.range[0] and n.range[1] <= w.range[1]
    if w.float_format is None:
        return False
    if n.range is not None:
        return n.range[1] <= 1 << w.float_format.fraction_bits + 1
    return n.float_format is not None and (
        w.float_format.fraction_bits >= n.float_format.fraction_bits
        and w.float_format.smallest <= n.float_format.smallest
        and w.float_format.largest >= n.float_format.largest
    )


def convert(
    values: Array, name: str, cast: Cast, *, tensor: str = "", origin: Sequence[int] = ()
) -> Array:
    """Return a block of elements in the dtype that stores a type, little-endian."""
    # Raise for an element that would not survive, and always for an integer out of range. `origin`
    # is the position of the block in the `tensor`, for messages.
    values = np.asarray(values)  # a selection of an array without axes is a scalar
    native = values.dtype.newbyteorder("=")
    stored = stored_dtype(name)
    if native == stored:
        return _little(values)
    values = values.astype(native, copy=False)
    if name == "bfloat16" and native == np.float32:
        # The upper half of a float32; several times faster than ml_dtypes' cast and a check.
        codes = values.view(np.uint32)
        if not (codes & 0xFFFF).any():
            return _little((codes >> 16).astype(np.uint16).view(stored))
    converted = _converted(values, stored)
    source = element_type(native)
    if source is None or not holds(name, source):
        lost = _lost(values, converted, name, cast)
        if lost.any():
            index = np.unravel_index(int(np.argmax(lost)), lost.shape)
            position = [int(i) + o for i, o in zip(index, origin or lost.ndim * [0], strict=True)]
            hint = "cast='allow' rounds; ds.drop_encoding() writes the values as they are"
            if cast == "allow":
                hint = "Convert it with .astype(...) first"
            reason = f"element {position} is {values[index]}, which {name} cannot hold"
            raise UnsupportedError(reason, tensor=tensor, rule="Cast", hint=hint)
    return _little(converted)


def _little(values: Array) -> Array:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


def _converted(values: Array, stored: np.dtype[Any]) -> Array:
    """Convert as numpy does, but round to integers, and keep the payloads of NaN."""
    if stored.kind == "c":
        converted = np.zeros(values.shape, stored)
        converted.real = _converted(values.real, converted.real.dtype)
        if values.dtype.kind == "c":
            converted.imag = _converted(values.imag, converted.imag.dtype)
        return converted
    if values.dtype.kind == "c":
        return _converted(values.real, stored)
    if stored.kind in "iu" and values.dtype.kind not in "iub":
        values = np.rint(values)
    with np.errstate(all="ignore"):
        converted = values.astype(stored)
    source, target = (ELEMENT_TYPES.get(dtype.name) for dtype in (values.dtype, stored))
    if source and target and source.is_ieee_float and target.is_ieee_float:
        with np.errstate(invalid="ignore"):  # ml_dtypes warns of NaN
            nan = np.isnan(values)
        if nan.any():
            converted[nan] = _nan_like(values[nan], stored)
    return converted


def _nan_like(values: Array, stored: np.dtype[Any]) -> Array:
    """Return NaN of another IEEE 754 type with the signs and leading payload bits of NaN values."""
    from_bits, to_bits = values.dtype.itemsize * 8, stored.itemsize * 8
    from_payload = ELEMENT_TYPES[values.dtype.name].fraction_bits
    to_payload = ELEMENT_TYPES[stored.name].fraction_bits
    codes = values.view(f"u{from_bits // 8}").astype(np.uint64)
    sign = codes >> np.uint64(from_bits - 1)
    payload = codes & np.uint64((1 << from_payload) - 1)
    if to_payload >= from_payload:
        payload <<= np.uint64(to_payload - from_payload)
    else:
        payload >>= np.uint64(from_payload - to_payload)
        payload[payload == 0] = 1 << (to_payload - 1)  # no payload at all would be infinity
    exponent = np.uint64((1 << to_bits - 1) - (1 << to_payload))
    whole = (sign << np.uint64(to_bits - 1)) | exponent | payload
    nan: Array = whole.astype(f"u{to_bits // 8}").view(stored)
    return nan


def _lost(values: Array, converted: Array, name: str, cast: Cast) -> Array:
    """Return a mask of the elements that a conversion loses."""
    lost = np.zeros(values.shape, bool)
    limits = ELEMENT_TYPES[name].range
    if limits is not None:  # wrapped integers come back as they were
        rounded = values
        if values.dtype.kind not in "iub":
            rounded = np.rint(values.real.astype(np.float64))
        lost = ~((rounded >= limits[0]) & (rounded < limits[1]))
    if cast == "allow":
        return lost
    lost |= _differ(_converted(converted, values.dtype), values)
    if values.dtype.kind in "iu" and ELEMENT_TYPES[name].kind == "float":
        # Values that are rounded up to the end of the range do not come back reliably.
        lost |= converted.astype(np.float64) >= float(np.iinfo(values.dtype).max + 1)
    return lost


def _differ(a: Array, b: Array) -> Array:
    """Compare bit by bit."""
    if a.dtype.kind == "c":
        return _differ(a.real, b.real) | _differ(a.imag, b.imag)
    code = f"u{a.dtype.itemsize}"
    differ: Array = np.asarray(a.view(code) != b.view(code))
    return differ


# --- sparse arrays -------------------------------------------------------------------------------

# Element type of indices; formats convert it to their own.
_INDEX = "int64"

_ARRAYS = {"sparse_csr": CSRArray, "sparse_coo": COOArray}


def is_sparse(array: Any) -> bool:
    """Return whether an array, or each chunk of a dask array, is one of pydata/sparse."""
    kind = type(getattr(array, "_meta", array))
    return kind.__module__.partition(".")[0] == "sparse"


def densified(array: Any) -> Any:
    """Return the values of a sparse array as a dense one, lazily if it is lazy."""
    if not is_sparse(array):
        return array
    if hasattr(array, "dask"):
        meta = np.empty((0,) * array.ndim, array.dtype)
        return array.map_blocks(densified, dtype=array.dtype, meta=meta)
    return array.todense()


def sparse_parts(
    array: Any, layout: str, stored: str, name: str
) -> tuple[dict[str, WantedPart], dict[str, Any]]:
    """Take a sparse array apart, with the values as the element type `stored`."""
    if hasattr(array, "dask"):
        return _wanted(_of_dask(array, layout, name), stored)
    coords, values = stored_elements(array, name)
    if layout == "sparse_coo":
        return _wanted({"values": values, "coords": coords}, stored)
    pointers = _row_pointers(coords[0], array.shape[0])
    return _wanted({"values": values, "indices": coords[1], "indptr": pointers}, stored)


def _wanted(arrays: dict[str, Any], stored: str) -> tuple[dict[str, WantedPart], dict[str, Any]]:
    """Return the wanted parts, with the arrays of their values."""
    parts = {}
    for role, part in arrays.items():
        dtype = stored if role == "values" else _INDEX
        parts[role] = WantedPart.of(dtype, part.shape)
    return parts, arrays


def stored_elements(block: Any, name: str) -> tuple[Array, Array]:
    """Return coordinates and values, sorted by position."""
    if not is_sparse(block):
        block = np.asarray(block)
        bits = np.ascontiguousarray(block).view(np.uint8)
        bits = bits.reshape(*block.shape, block.itemsize)
        coords = np.nonzero(bits.any(axis=-1))
        return np.stack(coords).astype(np.int64), block[coords]
    import sparse

    coo = sparse.COO(block) if not isinstance(block, sparse.COO) else block
    if np.asarray(coo.fill_value).tobytes().strip(b"\0"):
        raise UnsupportedError(
            f"the fill value of the array is {coo.fill_value}, but in a checkpoint it is zero",
            tensor=name,
            rule="LayoutData",
            hint="Save its dense values: array.todense()",
        )
    return np.asarray(coo.coords, np.int64), np.asarray(coo.data)


def _row_pointers(rows: Array, count: int) -> Array:
    """Return the position of the first element of each row, and of the end of the last row."""
    return np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))]).astype(np.int64)


def _of_dask(array: Any, layout: str, name: str) -> dict[str, Any]:
    """Return the parts of a dask array, each computed by blocks of rows."""
    array = array.rechunk(dict.fromkeys(range(1, array.ndim), -1))

    def part(role: str, chunks: tuple[Any, ...], dtype: Any, **known: list[int]) -> Any:
        return array.map_blocks(
            _share,
            role=role,
            tensor=name,
            known=known,
            chunks=chunks,
            # The axis of the blocks stays, and is the last one.
            drop_axis=list(range(1, array.ndim)),
            new_axis=[0] if len(chunks) == 2 else None,
            dtype=dtype,
            meta=np.empty((0,) * len(chunks), dtype),
        )

    counts = part("count", ((1,) * array.numblocks[0],), np.int64).compute().tolist()
    known = {
        "counts": counts,
        "starts": np.cumsum([0, *counts]).tolist(),
        "rows": np.cumsum([0, *array.chunks[0]]).tolist(),
    }
    along = (tuple(counts),)
    values = part("values", along, array.dtype, **known)
    if layout == "sparse_coo":
        return {
            "values": values,
            "coords": part("coords", ((array.ndim,), *along), np.int64, **known),
        }
    first, *others = array.chunks[0]
    return {
        "values": values,
        "indices": part("indices", along, np.int64, **known),
        "indptr": part("indptr", ((first + 1, *others),), np.int64, **known),
    }


def _share(
    block: Any, *, role: str, tensor: str, known: dict[str, list[int]], block_id: tuple[int, ...]
) -> Array:
    """Return the share of a block of rows in a part."""
    coords, values = stored_elements(block, tensor)
    if role == "count":
        return np.array([len(values)], np.int64)
    number = block_id[-1]
    if len(values) != known["counts"][number]:
        raise UnsupportedError(
            "it was computed twice, and did not store as many elements both times",
            tensor=tensor,
            hint="Compute it first, or make it reproducible: a random generator needs a seed",
        )
    first = known["rows"][number] if role == "coords" else 0
    before = known["starts"][number]
    moved = [coords[0] + first, *coords[1:]]
    return _of_role(role, moved, values, block.shape[0], before, is_first=number == 0)


def _of_role(
    role: str,
    coords: Sequence[Array],
    values: Array,
    rows: int,
    before: int,
    *,
    is_first: bool,
) -> Array:
    """Return the share of elements of some rows in a part, with the number of elements before."""
    if role == "values":
        return values
    if role == "coords":
        return np.asarray(coords)
    if role == "indices":
        return coords[1]
    pointers = _row_pointers(coords[0], rows) + before
    return pointers if is_first else pointers[1:]


def canonical_parts(
    tensor: Tensor, readers: Mapping[str, PartReader]
) -> tuple[dict[str, WantedPart], dict[str, Any]] | None:
    """Sort the elements of a tensor of a file; None if it is not sparse, or they are sorted."""
    if tensor.layout not in _ARRAYS or tensor.strict:
        return None
    lazy: SparseArray = _ARRAYS[tensor.layout](replace(tensor, strict=True), readers)
    with locating(path=lazy.source.name, tensor=tensor.name):
        try:
            for _ in lazy.blocks():
                pass
        except FormatError:
            lazy.strict = False
        else:
            return None
        blocks = [(block.start, block.stop, len(block.values)) for block in lazy.blocks()]
    if lazy.reads_whole:
        blocks = [(0, lazy.shape[0], sum(count for _, _, count in blocks))]
    return _wanted(_sorted(lazy, blocks), tensor.parts["values"].dtype)


def _sorted(lazy: SparseArray, blocks: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Return dask arrays of the parts, which read the elements again by blocks of rows."""
    import dask
    import dask.array as da

    read = dask.delayed(_read_share, pure=False, traverse=False)
    pieces: dict[str, list[Any]] = {role: [] for role in lazy.readers}
    before = 0
    for start, stop, count in blocks:
        shapes = {"coords": (lazy.ndim, count), "indptr": (stop - start + (start == 0),)}
        for role, arrays in pieces.items():
            dtype = lazy.dtype if role == "values" else np.dtype(np.int64)
            task = read(lazy, role, start, stop, before)
            arrays.append(da.from_delayed(task, shapes.get(role, (count,)), dtype))
        before += count
    return {role: da.concatenate(arrays, axis=-1) for role, arrays in pieces.items()}


def _read_share(lazy: SparseArray, role: str, start: int, stop: int, before: int) -> Any:
    """Read the share of some rows in a part."""
    with locating(path=lazy.source.name, tensor=lazy.name):
        stored = lazy.stored(start, stop)
    coords = (stored.coords[0] - start,) if role == "indptr" else stored.coords
    return _of_role(role, coords, stored.values, stop - start, before, is_first=start == 0)
