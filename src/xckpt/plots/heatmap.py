"""An image of the elements of a tensor, ``ds.ckpt.plot.heatmap``, from a sample of them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import dask.array as da
import numpy as np

from xckpt.arrays.lazy import dense_values
from xckpt.datasets.tensors import OpenTensors
from xckpt.errors import shown
from xckpt.formatting import counted
from xckpt.plots.axes import (
    add_heading,
    add_legend,
    new_axes,
    require_drawable,
    safe,
    themed,
    whole_numbers,
)
from xckpt.plots.series import Drawn, codes_drawn

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

    from xckpt.typing import Array

_MOST_ELEMENTS = 1 << 24
# The last axes of a tensor with more than two are folded into at most this many columns.
_WIDEST_FOLD = 1 << 16
_MANY_FRAMES_NBYTES = 256 << 20
_FEWEST_LONG_ROWS = 16
# Most blocks along the rows of a picture that reads all rows.
_MOST_ROWS = 256
_MOST_MARKS = 1000
_START = np.array([0])
_NAN_COLOUR = "#e6007e"
_DEAD_COLOUR = "#d9731a"
_ROBUST = (1.0, 99.0)


class Sample(NamedTuple):
    """A few elements of a tensor, as a matrix, and the rows and columns that they represent."""

    values: Array
    #: Rows and columns of the whole tensor.
    shape: tuple[int, int]
    #: Numbers of the rows that were read, and how many elements of each.
    rows: Array
    read: int
    #: Numbers of the rows of zeros among them.
    dead: Array

    def describe(self) -> str:
        """Return a note on the rows and elements that were read; empty if all were."""
        nrows, ncolumns = self.shape
        if self.values.shape == self.shape:
            return ""
        count = len(self.rows)
        note = f"all {nrows:,} rows" if count == nrows else f"{count:,} of {nrows:,} rows"
        if self.read < ncolumns:
            note += f", {self.read:,} of {ncolumns:,} elements of each"
        is_reduced = self.values.shape != (count, self.read)
        return note + (", largest of each block" if is_reduced else "")


@themed
def draw_heatmap(
    source: Drawn,
    /,
    name: str | None = None,
    *,
    rows: int | Literal["all"] = 256,
    columns: int = 256,
    robust: bool = False,
    ax: Axes | None = None,
    **style: Any,
) -> Axes:
    """Draw the elements of a tensor, a large one with as many blocks as there are pixels.

    A large tensor is cut into `rows` x `columns` blocks. The middle row of each block is read,
    and its element of largest magnitude is shown, so that outliers along a column are not
    missed; one NaN in that row makes the block NaN. No other rows are read, and at most 2**24
    elements: long rows are read in part. Tensors that are compressed, or sparse with
    coordinates, are decoded whole, once. With ``rows="all"`` everything is read, chunk by
    chunk, and a block shows the element of largest magnitude in all of its rows.

    The heading states which rows and elements were read. If statistics were computed before, it
    also has the numbers of NaN, infinities and rows of zeros in the whole tensor. Such rows are
    marked at the right edge.

    Parameters
    ----------
    name : str
        Name of a tensor in the file, stacked or not, or of a variable. It can be omitted if
        there is a single tensor.
    rows : int or "all", default 256
        The largest number of blocks along the rows; ``"all"`` reads all rows for 256 blocks.
    columns : int, default 256
        The largest number of blocks along the columns.
    robust : bool, default False
        Whether colours span the middle 98 % of the elements instead of all of them.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default in a new figure.
    **style
        Passed on to `matplotlib.axes.Axes.imshow`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, with the indices of the tensor as ticks. A tensor of more than two axes has
        its first axis along the rows and all others along the columns.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    KeyError
        If the tensor does not exist.
    ValueError
        If it has no elements, or `rows` or `columns` is not positive, or there are several
        tensors and no name.

    Examples
    --------
    >>> ds.ckpt.plot.heatmap("model.layers.5.mlp.gate_proj.weight", robust=True)
    """
    require_drawable(ax, lambda trial: trial.imshow([[0.0]], **style))
    height: Any = rows
    if columns < 1 or (height != "all" and (isinstance(height, str) or height < 1)):
        raise ValueError(
            "a picture has at least one row, or 'all', and at least one column, not "
            f"{(rows, columns)}"
        )
    tensors = OpenTensors(source.obj)
    name = tensors.only if name is None else name
    variable = tensors.variable(name)
    if not variable.size:
        raise ValueError(f"{shown(name)} has no elements")
    if isinstance(rows, str):
        sample = blocks_of(variable.data, _MOST_ROWS, columns)
    else:
        sample = sampled(variable.data, rows, columns, by_row=_has_cheap_rows(variable))
    ax = new_axes(ax, 7.0, 5.4)
    options = _choose_colours(sample.values, robust=robust) | style
    nrows, ncolumns = sample.shape
    image = ax.imshow(
        np.ma.masked_invalid(sample.values),
        extent=(-0.5, ncolumns - 0.5, nrows - 0.5, -0.5),
        **{"aspect": "auto", "interpolation": "nearest", **options},
    )
    bar = ax.figure.colorbar(image, ax=ax, extend="both" if robust else "neither")
    image.set_cmap(image.get_cmap().with_extremes(bad=_NAN_COLOUR))
    scales = tensors.structure.scales.get(name)
    if scales is not None:
        bar.set_label("code")
    _mark_rows(ax, sample)
    split = _split(variable.shape)
    ax.set_ylabel(safe(" × ".join(map(str, variable.dims[:split]))))
    ax.set_xlabel(safe(" × ".join(map(str, variable.dims[split:]))))
    for axis, length in ((ax.yaxis, nrows), (ax.xaxis, ncolumns)):
        whole_numbers(axis)
        if length == 1:
            axis.set_ticks([])
    notes = (
        sample.describe(),
        _note_on_faults(tensors, name, source.stats, sample),
        codes_drawn(scales),
    )
    add_heading(ax, name, *notes)
    return ax


def _mark_rows(ax: Axes, sample: Sample) -> None:
    """Mark rows of zeros and rows with NaN or infinities at the right edge, with a legend."""
    from matplotlib.lines import Line2D

    height, nrows = len(sample.values), sample.shape[0]
    is_nonfinite = ~np.isfinite(sample.values)
    nonfinite_label = f"NaN or infinite, in {counted(int(is_nonfinite.sum()), 'block')}"
    nonfinite = np.flatnonzero(is_nonfinite.any(axis=1))
    dead = sample.dead if len(sample.dead) < len(sample.rows) else sample.dead[:0]
    marks = [
        (_NAN_COLOUR, (nonfinite + 0.5) * nrows / height - 0.5, nonfinite_label),
        (_DEAD_COLOUR, dead, f"{counted(len(dead), 'row')} of zeros"),
    ]
    handles, labels = [], []
    for colour, places, text in marks:
        if not len(places):
            continue
        look: dict[str, Any] = {
            "color": colour,
            "marker": "<",
            "markersize": 5,
            "linestyle": "",
            "clip_on": False,
        }
        if len(places) > _MOST_MARKS:  # more would overlap
            places = places[np.unique(places * _MOST_MARKS // nrows, return_index=True)[1]]  # noqa: PLW2901
        ax.plot(
            np.full(len(places), 1.012),
            places,
            transform=ax.get_yaxis_transform(),
            markeredgewidth=0,
            **look,
        )
        handles.append(Line2D([], [], **look))
        labels.append(text)
    add_legend(ax, handles, labels, below="labels")


def _note_on_faults(
    tensors: OpenTensors, name: str, computed: xr.Dataset | None, sample: Sample
) -> str:
    """Return a note on all NaN, infinities and dead rows, if the statistics are available."""
    from xckpt.health import findings
    from xckpt.statistics import known_stats

    stats = known_stats(tensors[name])
    if stats is None and computed is not None:
        (variable,) = tensors.variables_of([name])
        stats = computed[[variable]] if variable in computed else None
    if stats is None:
        return ""
    faults = findings(stats)
    faults = faults[faults["tensor"] == name]
    counts = {rule: int(value) for rule, value in zip(faults["rule"], faults["value"], strict=True)}
    words = {"nan": "NaN", "inf": "infinities", "dead_rows": "rows of zeros"}
    facts = [f"{counts[rule]:,} {word}" for rule, word in words.items() if rule in counts]
    if not facts:
        return ""
    hint = "" if len(sample.rows) == sample.shape[0] else ': rows="all" shows where'
    return f"{', '.join(facts)} in all{hint}"


def _choose_colours(values: Array, *, robust: bool) -> dict[str, Any]:
    """Return options for the colours: diverging from zero if values have both signs."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return {}
    low, high = np.percentile(finite, _ROBUST) if robust else (finite.min(), finite.max())
    if low >= 0 or high <= 0:
        return {"vmin": float(low), "vmax": float(high), "cmap": "viridis"}
    limit = float(max(-low, high))
    return {"vmin": -limit, "vmax": limit, "cmap": "RdBu_r"}


# --- reading -------------------------------------------------------------------------------------


def _has_cheap_rows(variable: xr.Variable) -> bool:
    """Return whether reading a row is cheaper than reading its chunk; False if unknown."""
    encoding = variable.encoding
    parts = encoding.get("parts", {"data": encoding}).values()
    compressions = {part.get("stored_compression") for part in parts} - {None}
    if encoding.get("layout") in {None, "sparse_coo"} or compressions - {"zstd-seekable"}:
        return False
    # A row costs the decoding of its frame, usually 1 MiB.
    return not compressions or variable.nbytes > _MANY_FRAMES_NBYTES


def sampled(array: Any, rows: int, columns: int, *, by_row: bool = True) -> Sample:
    """Return the element of largest magnitude in the middle row of each block of an array."""
    # Rows of a dask array are read one by one if `by_row`, otherwise each chunk is read once for
    # all of its rows. Only parts of long rows are read.
    split = _split(array.shape)
    shape = prod(array.shape[:split]), prod(array.shape[split:])
    height, width = min(rows, shape[0]), min(columns, shape[1])
    if height * shape[1] > _MOST_ELEMENTS:
        height = min(height, max(_FEWEST_LONG_ROWS, _MOST_ELEMENTS // shape[1]))
    edges = np.arange(height + 1) * shape[0] // height
    middles = (edges[:-1] + edges[1:]) // 2
    indices = [np.unravel_index(row, array.shape[:split]) for row in middles]
    starts = np.arange(width) * shape[1] // width
    part_length = _MOST_ELEMENTS // (height * width)
    if height * shape[1] <= _MOST_ELEMENTS or len(array.shape) - split > 1:
        lines = _read([array[tuple(index)] for index in indices], by_row)
        lines = [line.reshape(-1) for line in lines]
        values = np.concatenate([_extremes(line, starts) for line in lines])
        dead = np.array([row for row, line in zip(middles, lines, strict=True) if not line.any()])
        read = shape[1]
    else:
        slices = [slice(start, start + part_length) for start in starts]
        parts = _read([array[(*index, part)] for index in indices for part in slices], by_row)
        values = np.concatenate([_extremes(part.reshape(-1), _START) for part in parts])
        dead, read = np.array([]), min(part_length * width, shape[1])
    return Sample(values.reshape(height, width), shape, middles, read, dead)


def blocks_of(array: Any, rows: int, columns: int) -> Sample:
    """Return the element of largest magnitude of each block; read the array chunk by chunk."""
    import dask

    split = _split(array.shape)
    shape = prod(array.shape[:split]), prod(array.shape[split:])
    size = min(rows, shape[0]), min(columns, shape[1])
    if isinstance(array, da.Array):
        starts = [np.cumsum([0, *lengths]).tolist() for lengths in array.chunks]
        chunks = array.to_delayed()
        tasks = [
            dask.delayed(_chunk_extremes)(
                chunks[position],
                [s[i] for s, i in zip(starts, position, strict=True)],
                array.shape,
                split,
                size,
            )
            for position in np.ndindex(chunks.shape)
        ]
        results = dask.compute(*tasks)
    else:
        results = (_chunk_extremes(array, [0] * array.ndim, array.shape, split, size),)
    values = np.zeros(size)
    is_dead = np.ones(shape[0], bool)
    for chunk in results:
        values[chunk.blocks] = _larger(values[chunk.blocks], chunk.extremes)
        # A row is dead if it is zero in all chunks that it crosses.
        is_dead[chunk.rows] &= chunk.is_zero
    return Sample(values, shape, np.arange(shape[0]), shape[1], np.flatnonzero(is_dead))


class _ChunkExtremes(NamedTuple):
    """The share of a picture that one chunk fills."""

    blocks: Any  # that it overlaps, as an index into the picture
    extremes: Array  # of these blocks
    rows: Array  # in the folded array
    is_zero: Array  # for each of these rows


def _chunk_extremes(
    chunk: Any, start: list[int], shape: tuple[int, ...], split: int, size: tuple[int, int]
) -> _ChunkExtremes:
    """Return the extremes of the blocks of a picture of `size` that a chunk overlaps."""
    values = _real_numbers(chunk)
    rows = _flat_indices(start[:split], values.shape[:split], shape[:split])
    columns = _flat_indices(start[split:], values.shape[split:], shape[split:])
    table = values.reshape(len(rows), len(columns))
    is_zero: Array = np.logical_not(table.any(axis=1))
    blocks = []
    lengths = prod(shape[:split]), prod(shape[split:])
    for axis, (numbers, length, count) in enumerate(
        zip((rows, columns), lengths, size, strict=True)
    ):
        block = np.searchsorted(np.arange(1, count) * length // count, numbers, side="right")
        first = np.flatnonzero(np.diff(block, prepend=-1))
        table = _extremes(table, first, axis)
        blocks.append(block[first])
    return _ChunkExtremes(np.ix_(*blocks), table, rows, is_zero)


def _flat_indices(start: list[int], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Return the flat indices of the elements of a box in an array of a shape."""
    if not shape:
        return np.zeros(1, np.int64)
    grid = np.ix_(*[np.arange(a, a + n) for a, n in zip(start, sizes, strict=True)])
    flat: Array = np.ravel_multi_index(grid, shape).ravel()
    return flat


def _split(shape: tuple[int, ...]) -> int:
    """Return how many axes are folded into the rows; the others are folded into the columns."""
    split = min(1, len(shape) - 1) if shape else 0
    while 0 < split < len(shape) - 1 and prod(shape[split:]) > _WIDEST_FOLD:
        split += 1
    return split


def _read(slices: list[Any], by_row: bool) -> list[Array]:  # noqa: FBT001  the only option
    """Compute slices of an array together, as real numbers."""
    import dask

    if by_row:  # optimised together, slices of one chunk would share the read of all of it
        slices = [optimized for part in slices for optimized in dask.optimize(part)]
    return [_real_numbers(part) for part in dask.compute(*slices)]


def _real_numbers(part: Any) -> Array:
    """Return elements as floats; magnitudes for complex numbers."""
    values = dense_values(part)
    if values.dtype.kind == "c":
        values = np.abs(values.astype(np.complex128))
    return values.astype(np.float64 if values.dtype.itemsize > 2 else np.float32)


def _extremes(values: Array, starts: Array, axis: int = 0) -> Array:
    """Return the element of largest magnitude of each block along an axis."""
    high = np.maximum.reduceat(values, starts, axis)
    return _larger(high, np.minimum.reduceat(values, starts, axis))


def _larger(a: Array, b: Array) -> Array:
    """Return the elements of larger magnitude; NaN if either is NaN."""
    larger: Array = np.where((np.abs(b) > np.abs(a)) | np.isnan(b), b, a)
    return larger
