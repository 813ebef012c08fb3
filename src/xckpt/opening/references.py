"""References to raw tensors, with which readers of zarr open a checkpoint without a copy.

The result is in version 1 of kerchunk's form, which fsspec's ``reference`` file system reads: the
metadata of a zarr group (version 2, which readers of version 3 accept), and the file, offset and
length of each chunk.

References: https://fsspec.github.io/kerchunk/spec.html and
https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html.
"""

from __future__ import annotations

import base64
import json
from itertools import product
from math import isqrt, log, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.addresses import real
from xckpt.arrays.keys import chunks_along_slowest, target_nbytes
from xckpt.elements import ELEMENT_TYPES, stored_dtype
from xckpt.errors import MissingShardError, shown, warn
from xckpt.labels import AxisNamer, TensorFilter, select
from xckpt.labels.filters import combined, no_match
from xckpt.opening import open_index
from xckpt.options import takes
from xckpt.storage.source import sources_of
from xckpt.structure import structure_of
from xckpt.structure.dims import dims_of, with_stated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np

    from xckpt.index import Index, Tensor
    from xckpt.storage import Source

# Kinds of numpy's types that zarr supports: booleans, integers, floats, complex numbers.
_KINDS = frozenset("biufc")
# Names in a message.
_MOST_NAMES = 5


@takes()
def references(
    path: Any,
    engine: str | None = None,
    *,
    tensors: TensorFilter | None = None,
    exclude: TensorFilter | None = None,
    only: Literal["weights"] | None = None,
    dims: Mapping[str, Sequence[str | None]] | Literal["size"] | None = None,
    storage_options: dict[str, Any] | None = None,
    **format_options: Any,
) -> dict[str, Any]:
    """Describe the raw tensors of a checkpoint for readers of zarr, which open it without a copy.

    Parameters
    ----------
    path : str, os.PathLike, or list of these
        A file, URL, glob, or index of shards.
    engine : str, optional
        Name of the engine; detected from the content by default.
    dims : mapping of str to sequence of (str or None), or "size", optional
        Names of axes, as for ``xarray.open_dataset``.
    **format_options
        Options of a single engine.

    Returns
    -------
    dict
        References of version 1, to write as JSON, without `storage_options`. Chunks are cut along
        the slowest axis, to the ``array.chunk-size`` of dask's configuration if rows are smaller
        than that.

    Raises
    ------
    OSError
        If the file cannot be opened.
    CheckpointError
        If the file is malformed.

    Warns
    -----
    CheckpointWarning
        If tensors are omitted: types that zarr lacks (bfloat16, float8, 4-bit), compressed, sparse
        and quantised tensors, and names that zarr does not allow.

    Examples
    --------
    >>> refs = xckpt.references("m.zt")
    >>> Path("m.json").write_text(json.dumps(refs))
    >>> xr.open_dataset(
    ...     "reference://", engine="zarr",
    ...     backend_kwargs={"consolidated": False, "storage_options": {"fo": "m.json"}},
    ... )
    """
    source, index = open_index(
        path, engine, storage_options=storage_options, whole=False, **format_options
    )
    refs: dict[str, Any] = {
        ".zgroup": _json({"zarr_format": 2}),
        ".zattrs": _json(plain_attrs(index.attrs)),
    }
    chosen = combined(tensors, exclude, only, lambda: [structure_of(index)])
    for array in stored_arrays(source, index, chosen, dims):
        refs |= _array(array)
    return {"version": 1, "refs": refs}


class StoredArray(NamedTuple):
    """A raw tensor that readers of zarr can open, with the chunks that it is cut into."""

    tensor: Tensor
    dims: tuple[str, ...]
    url: str  # of the file with its elements
    chunk_shape: tuple[int, ...]

    @property
    def order(self) -> str:
        """Order of the elements in the file, "C" or "F"."""
        return _order_of(self.tensor)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the stored elements, with their byte order."""
        part = self.tensor.parts["data"]
        return stored_dtype(part.dtype).newbyteorder(">" if part.byteorder == "big" else "<")

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        pairs = zip(self.tensor.shape, self.chunk_shape, strict=True)
        return tuple([size // step for size, step in pairs])

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Offset and size in bytes of each chunk, along the only axis that is cut."""
        part, count = self.tensor.parts["data"], prod(self.grid)
        nbytes = part.nbytes // max(1, count)
        return [(part.offset + number * nbytes, nbytes) for number in range(count)]


def stored_arrays(
    source: Source,
    index: Index,
    tensors: TensorFilter | None,
    dims: Mapping[str, Sequence[str | None]] | Literal["size"] | None,
) -> Iterator[StoredArray]:
    """Yield the tensors that readers of zarr can open, and warn about the others."""
    files = sources_of(source, index.shards)
    namer = AxisNamer(dims, set(index.tensors))
    suggested = with_stated(index, {} if namer.by_size else dims_of(index))
    namer.survey(index.tensors, suggested)  # names depend on all tensors
    target = target_nbytes()
    left_out: dict[str, list[str]] = {}
    selected = select(index.tensors, tensors)
    if tensors is not None and not selected and index.tensors:
        warn(f"{index.source}: {no_match(index.tensors, tensors)}")
    for name in selected:
        tensor = index.tensors[name]
        reason = _obstacle(tensor)
        if reason is not None:
            left_out.setdefault(reason, []).append(name)
            continue
        try:
            # The name of a shard next to its file may be unknown until it is opened.
            url = real(files[tensor.parts["data"].shard].file.name)
        except MissingShardError:
            left_out.setdefault("as their shard is missing", []).append(name)
            continue
        axes = namer.name_axes(name, tensor.shape, suggested.get(name), (), name)
        yield StoredArray(tensor, axes, url, _chunk_shape(tensor, target))
    for reason, omitted in left_out.items():
        names_text = ", ".join(map(shown, omitted[:_MOST_NAMES]))
        more = len(omitted) - _MOST_NAMES
        text = f"{source.name}: left out, {reason}: {names_text}"
        text += f" and {more} more" if more > 0 else ""
        warn(text)


def _obstacle(tensor: Tensor) -> str | None:
    """Return the reason why a tensor cannot be a zarr array, or None."""
    if tensor.problem is not None:
        return "as their values cannot be read"
    if tensor.layout != "dense":
        return f"as {tensor.layout} tensors are not zarr arrays"
    part = tensor.parts["data"]
    dtype = stored_dtype(part.dtype)
    # Types of ml_dtypes may have the kind of a numpy type.
    is_known = dtype.kind in _KINDS and dtype.type.__module__ == "numpy"
    is_stored_bool = ELEMENT_TYPES[part.dtype].decoded == "bool" and dtype.kind != "b"
    if ELEMENT_TYPES[part.dtype].bits < 8 or not is_known or is_stored_bool:
        return f"as zarr has no type for {part.dtype}"
    if part.strides is not None or part.inverted is not None:
        return "as their elements lie apart, or are changed"
    if part.encoding is not None:
        return f"as they are compressed ({part.encoding})"
    components = tensor.name.split("/")
    # Zarr 3 reserves names that begin with "__"; fsspec treats a backslash as a slash.
    if (
        any(name in {"", ".", ".."} or name.startswith((".z", "__")) for name in components)
        or components[-1] == "zarr.json"
        or "\\" in tensor.name
        or not tensor.name.isprintable()
    ):
        return "as no zarr array can have their names"
    return None


def _array(array: StoredArray) -> dict[str, Any]:
    """Return the references of one array."""
    tensor, part = array.tensor, array.tensor.parts["data"]
    metadata = {
        "zarr_format": 2,
        "shape": list(tensor.shape),
        "chunks": list(array.chunk_shape),
        "dtype": array.dtype.str,
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "order": array.order,
    }
    attrs = {**plain_attrs(tensor.attrs), "_ARRAY_DIMENSIONS": list(array.dims)}
    refs: dict[str, Any] = {
        f"{tensor.name}/.zarray": _json(metadata),
        f"{tensor.name}/.zattrs": _json(attrs),
    }
    positions = product(*map(range, array.grid))
    for position, (offset, nbytes) in zip(positions, array.ranges, strict=True):
        key = f"{tensor.name}/{'.'.join(map(str, position)) or '0'}"
        refs[key] = [array.url, offset, nbytes]
        if part.inline is not None:
            refs[key] = "base64:" + base64.b64encode(part.inline).decode()
    return refs


def _order_of(tensor: Tensor) -> str:
    return tensor.order if tensor.ndim > 1 else "C"


def _chunk_shape(tensor: Tensor, target: int) -> tuple[int, ...]:
    """Cut along the slowest axis only, into equal chunks about as large as dask's."""
    shape, order, part = tensor.shape, _order_of(tensor), tensor.parts["data"]
    if not tensor.size or not shape or part.inline is not None:  # an inline value is one chunk
        return tuple([max(1, size) for size in shape])
    axis = 0 if order == "C" else len(shape) - 1
    rows = shape[axis]
    preferred = chunks_along_slowest(shape, stored_dtype(part.dtype).itemsize, target, order)
    divisors = [n for n in range(1, isqrt(rows) + 1) if rows % n == 0]
    divisors += [rows // n for n in divisors]
    step = min(divisors, key=lambda n: abs(log(n / preferred[axis][0])))
    return (*shape[:axis], step, *shape[axis + 1 :])


def plain_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the attributes that JSON can represent."""
    plain = {}
    for key, value in attrs.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            continue
        plain[str(key)] = value
    return plain


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
