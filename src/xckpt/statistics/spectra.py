"""`spectrum`: the singular values of every matrix, and what they say, out of core."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import xarray as xr

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.lazy import LazyArray, SlicedArray
from xckpt.arrays.scaled import CodebookArray, QuantizedArray
from xckpt.arrays.sparse import dense_values
from xckpt.datasets.stack_records import stack_of
from xckpt.errors import locating, warn
from xckpt.labels import select
from xckpt.labels.filters import suggest_filters, suggest_names
from xckpt.progress import Progress
from xckpt.scan.cluster import send_out
from xckpt.scan.entries import contents_of_all, entries_of, laid, laid_out
from xckpt.scan.kinds import kind_of
from xckpt.scan.statistics_cache import key_of, open_records
from xckpt.statistics.singular import (
    FLOOR,
    STATISTICS,
    RoundingNoise,
    describe_largest,
    describe_values,
    singular_values,
)
from xckpt.storage import reading_ahead
from xckpt.storage.limits import cpu_count

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from xckpt.datasets.tensors import OpenTensors
    from xckpt.labels import TensorFilter
    from xckpt.progress import ProgressOption
    from xckpt.scan.entries import Describable, Described
    from xckpt.scan.kinds import Kind
    from xckpt.scan.readers import Reader
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Dataset

Array = np.ndarray[Any, np.dtype[Any]]

#: Matrices with more elements than this are left out unless they are named: embeddings mostly.
LARGEST = 1 << 27

# Rows that are read at a time, as float64.
_BLOCK_NBYTES = 32 << 20
# Wide matrices up to this size are read whole: what is in a column is not stored together.
_WHOLE_NBYTES = 256 << 20
# Below it BLAS gains nothing from threads: several matrices are done at a time.
_SMALL_SIDE = 384
# Where these alone are asked for, a few passes with vectors are enough.
_OF_THE_LARGEST = {"spectral_norm", "frobenius", "stable_rank"}
# To learn how fast this machine is.
_TRIED_SIDE = 768
_WORTH_ESTIMATING = 2e10
_OPERATIONS_OF_EIGENVALUES = 12  # as those of products: half of them wait for memory


def spectrum(
    obj: Describable,
    tensors: TensorFilter | None = None,
    *,
    minus: Describable | None = None,
    statistics: Iterable[str] | None = None,
    values: bool = False,
    progress: ProgressOption = None,
    cache: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> Dataset:
    """Compute the singular values of every matrix, one after the other, and what they say.

    A convolution counts as a matrix of ``out`` rows and ``in * kernel`` columns; stacked layers and
    experts are matrices one by one. It runs on this machine, or with one task for each matrix on
    the cluster of an active `distributed.Client`.

    Parameters
    ----------
    obj : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        What to describe. Quantised tensors are taken as the numbers they stand for.
    tensors : str, iterable of str, re.Pattern or callable, optional
        Only these: a glob of whole names, several, a regular expression that is searched, or a
        function of the name. By default all matrices of up to 2**27 elements; larger ones, which
        are embeddings mostly, are done when they are named here.
    minus : as `obj`, optional
        Describe the differences to the tensors of the same names in another checkpoint: the rank
        of what fine-tuning added.
    statistics : iterable of str, optional
        Some of the names below. For ``spectral_norm``, ``frobenius`` and ``stable_rank`` alone a
        few passes by Lanczos's method are enough where scipy is installed.
    values : bool
        Whether to give the singular values themselves, instead of statistics.
    progress : bool or callable, optional
        As `xckpt.stats` takes it. A bar says how long it will take, as far as that is known.
    cache : bool
        Whether to keep the singular values of unchanged files in the user's cache, so that a
        second call computes nothing and an interrupted one goes on.
    storage_options : dict, optional
        For fsspec, where `obj` or `minus` is a URL.

    Returns
    -------
    xarray.Dataset
        Each variable with the dimension ``statistic`` first, then those along which tensors are
        stacked. Tensors that are not asked for, and matrices with NaN or infinities, are NaN.

        ==================  =====================================================================
        ``spectral_norm``   the largest singular value
        ``frobenius``       root of the sum of their squares
        ``stable_rank``     ``(frobenius / spectral_norm) ** 2``
        ``effective_rank``  exponential of the entropy of the values, divided by their sum
        ``rank``            how many are above ``noise_floor``
        ``condition``       largest by smallest; NaN where the smallest is below a floor
        ``alpha``           exponent of a power law that is fitted to the tail of the squares
        ``noise_floor``     ``max(shape) * eps`` of the largest, with the ``eps`` of float32 or
                            float64; with `minus`, the largest value that rounding both sides to
                            their stored types explains, if that is more
        ==================  =====================================================================

        With `minus`, values below ``noise_floor`` do not count for ``effective_rank`` and
        ``condition`` either. The rounding of quantised tensors is unknown: all three are NaN.

        With `values`, each variable has the singular values, largest first, along a last dimension
        ``value`` (``value_1``, ... for other sizes); those below the floor are NaN. With `minus`,
        ``attrs["noise_floor"]`` of a variable has a number for each of its tensors.
        ``attrs["floor"]`` is the share of the largest value, 1e-9, below which none is told; all
        above are right to 1e-6 of themselves.

    Raises
    ------
    CheckpointError
        If a tensor cannot be read.
    KeyError
        If `tensors` matches nothing.
    ValueError
        If a statistic is not known.

    Notes
    -----
    The inner products of the shorter side are summed in float64 over blocks of rows, and their
    eigenvalues found by LAPACK. ``alpha`` is the estimate of maximum likelihood, for a tail that
    begins where the distance of Kolmogorov and Smirnov is smallest (Clauset, Shalizi and Newman,
    SIAM Review 51, 661, 2009), as WeightWatcher has it; ``effective_rank`` is that of Roy and
    Vetterli (EUSIPCO 2007).

    Examples
    --------
    >>> found = xckpt.spectrum("m.zt", "*.mlp.*")  # doctest: +SKIP
    >>> found.ckpt.table().nsmallest(3, "stable_rank")  # doctest: +SKIP
    """
    names = STATISTICS if statistics is None else tuple(statistics)
    for name in names:
        if name not in STATISTICS:
            hint = suggest_names(STATISTICS, name) or f"; there are: {', '.join(STATISTICS)}"
            raise ValueError(f"a spectrum has no statistic {name!r}{hint}")
    objects = [obj] if minus is None else [obj, minus]
    contents, *others = contents_of_all(objects, storage_options)
    names_of_matrices = [name for name, v in contents.variables.items() if _has_matrices(v)]
    entries = entries_of(contents, names=names_of_matrices)
    matrices = _chosen(entries, tensors, others[0] if others else None)
    entries = [e for e in entries if any(reader.name in matrices for reader in e.readers)]
    is_quick = not values and set(names) <= _OF_THE_LARGEST and find_spec("scipy") is not None
    found = _find_all(list(matrices.values()), progress, is_quick=is_quick, cache=cache)
    if values:
        return cast("Dataset", _laid_out_values(entries, found, contents))
    columns = [STATISTICS.index(name) for name in names]
    nothing = [np.nan] * len(STATISTICS)
    rows = []
    for entry in entries:
        of_entry = [found[r.name].described if r.name in found else nothing for r in entry.readers]
        rows.append(laid(np.array(of_entry)[:, columns], entry.shape, entry.gone))
    result = laid_out(names, entries, rows, [{}] * len(entries), contents)
    return result.assign_attrs(floor=FLOOR)


def _has_matrices(variable: xr.Variable) -> bool:
    record = stack_of(variable)
    stacked = () if record is None else record.dims
    inner = [size for dim, size in variable.sizes.items() if dim not in stacked]
    is_float = variable.dtype.kind in "fc" or "float" in variable.dtype.name
    return is_float and len(inner) >= 2 and inner[0] >= 2 and prod(inner[1:]) >= 2


def _chosen(
    entries: Sequence[Described], tensors: TensorFilter | None, subtracted: OpenTensors | None
) -> dict[str, Matrix]:
    """Return the matrices by the names of their tensors; warn once about those left out."""
    sides = {r.name: _Side(r, _stored_kind(entry, r)) for entry in entries for r in entry.readers}
    names = select(sides, tensors)
    if tensors is not None and not names:
        raise KeyError(f"tensors={tensors!r} matches no matrix{suggest_filters(sides, tensors)}")
    others: dict[str, _Side] = {}
    for entry in entries_of(subtracted) if subtracted is not None else ():
        others |= {r.name: _Side(r, _stored_kind(entry, r)) for r in entry.readers}
    left_out: Counter[str] = Counter()
    matrices = {}
    for name in names:
        reader = sides[name].reader
        if tensors is None and prod(reader.array.shape) > LARGEST:
            left_out[f"have more than {LARGEST:,} elements (name them to have them done)"] += 1
        elif subtracted is None:
            matrices[name] = Matrix(name, reader.array, reader.kind, reader.identity)
        elif name not in others:
            left_out["are not in the other checkpoint"] += 1
        elif others[name].reader.array.shape != reader.array.shape:
            left_out["have another shape in the other checkpoint"] += 1
        else:
            other = others[name].reader
            kinds = sides[name].stored, others[name].stored
            identity = None
            if reader.identity is not None and other.identity is not None:
                stored = reader.identity[0] + other.identity[0]
                identity = stored, reader.identity[1:], other.identity[1:]
            difference = _Difference((reader.array, other.array), kinds)
            matrices[name] = Matrix(name, difference, reader.kind, identity)
    if left_out:
        reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
        warn(f"matrices without a spectrum: {reasons}")
    return matrices


class _Side(NamedTuple):
    """A tensor, and the element type that it was rounded to; None if that is unknown."""

    reader: Reader
    stored: Kind | None


def _stored_kind(entry: Described, reader: Reader) -> Kind | None:
    array, encoding = reader.array, entry.variable.encoding
    while isinstance(array, SlicedArray):
        array = array.base
    is_quantised = isinstance(array, QuantizedArray | CodebookArray | BlockArray)
    if is_quantised or encoding.get("layout") in {"quantized", "blocks"}:
        return None
    # Chunks of a Dataset may have a type that numpy computes with.
    stored = encoding.get("stored_dtype")
    return (kind_of(stored) if isinstance(stored, np.dtype) else None) or reader.kind


class _Difference:
    """Two arrays of one shape, subtracted when they are read, and their stored types."""

    def __init__(self, arrays: tuple[Any, Any], kinds: tuple[Kind | None, Kind | None]) -> None:
        self.arrays, self.kinds = arrays, kinds
        self.shape = arrays[0].shape
        is_complex = "c" in {array.dtype.kind for array in arrays}
        self.dtype = np.dtype(np.complex128 if is_complex else np.float64)

    def ranges(self, key: Any) -> Iterator[Range]:
        """Return the byte ranges of both sides."""
        for array in self.arrays:
            if isinstance(array, LazyArray):
                yield from array.ranges(key)


def in_memory(found: Any) -> Array:
    """Return what was read of an array, dense."""
    if hasattr(found, "dask"):
        found = found.compute()
    return dense_values(found)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor as a matrix; pickles by reference."""

    name: str
    array: Any
    #: The identity of its tensors, for the cache.
    kind: Kind
    identity: tuple[Any, ...] | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, which are along the first axis, and columns."""
        rows, *others = self.array.shape
        return rows, prod(others)

    @property
    def nbytes(self) -> int:
        """In memory, as its elements are."""
        return int(prod(self.shape) * self.array.dtype.itemsize)

    @property
    def operations(self) -> float:
        """About how many multiplications it takes."""
        least = min(self.shape)
        return prod(self.shape) * least / 2 + _OPERATIONS_OF_EIGENVALUES * least**3 / 3

    @property
    def epsilon(self) -> float:
        """Of the element type; of types of fewer bits it is that of float32."""
        is_double = self.kind.name == "float64" or self.array.dtype == np.complex128
        return float(np.finfo(np.float64 if is_double else np.float32).eps)

    def blocks(self, noise: RoundingNoise | None = None) -> Callable[[], Iterator[Array]]:
        """Return a function that yields blocks of rows, or of columns if there are more of them.

        The first pass over a difference adds both sides to `noise`.
        """
        rows, columns = self.shape
        long, short = max(self.shape), min(self.shape)
        step = max(64, _BLOCK_NBYTES // (8 * short))
        is_wide = columns > rows
        is_difference = isinstance(self.array, _Difference)
        sides = list(self.array.arrays) if is_difference else [self.array]
        whole = (slice(None),) * len(self.array.shape)
        is_cheap = self.nbytes <= _WHOLE_NBYTES if is_wide else long <= step
        if is_cheap or (is_wide and len(whole) > 2):
            sides = [in_memory(side[whole]).reshape(self.shape) for side in sides]
            whole = whole[:2]

        def read_side(side: Any, part: slice) -> Array:
            if is_wide:
                return in_memory(side[:, part]).T
            return in_memory(side[part, *whole[1:]]).reshape(-1, columns)

        def read() -> Iterator[Array]:
            for start in range(0, long, step):
                part = slice(start, min(start + step, long))
                blocks = [read_side(side, part) for side in sides]
                if not is_difference:
                    yield blocks[0]
                    continue
                if noise is not None and not noise.is_complete:
                    noise.add(blocks)
                difference = blocks[0].astype(self.array.dtype)
                difference -= blocks[1].astype(self.array.dtype)
                yield difference
            if noise is not None:
                noise.is_complete = True

        return read


@dataclass(frozen=True, slots=True)
class _Decomposed:
    described: list[float]
    values: Array | None = None
    noise: float | None = None


def _find(matrix: Matrix, *, is_quick: bool) -> _Decomposed:
    """Do one matrix."""
    with locating(tensor=matrix.name):
        if is_quick:
            return _Decomposed(describe_largest(matrix.blocks(), min(matrix.shape)))
        if not isinstance(matrix.array, _Difference):
            return _described(matrix, singular_values(matrix.blocks()), None)
        noise = RoundingNoise(matrix.array.kinds)
        values = singular_values(matrix.blocks(noise))
        return _described(matrix, values, noise.floor())


def _described(matrix: Matrix, values: Array, noise: float | None) -> _Decomposed:
    floor = 0.0 if noise is None else noise
    described = describe_values(values, matrix.shape, matrix.epsilon, floor)
    return _Decomposed(described, values, noise)


def _packed(values: Array, noise: float | None) -> bytes:
    """Return all singular values, and the noise of a difference after them."""
    return np.append(values, [] if noise is None else noise).astype("<f8").tobytes()


def _unpacked(matrix: Matrix, data: bytes) -> _Decomposed:
    values = np.frombuffer(data, "<f8").astype(np.float64)
    if isinstance(matrix.array, _Difference):
        return _described(matrix, values[:-1], float(values[-1]))
    return _described(matrix, values, None)


def _find_all(
    matrices: Sequence[Matrix], progress: ProgressOption, *, is_quick: bool, cache: bool
) -> dict[str, _Decomposed]:
    """Do all matrices that are not kept."""
    found: dict[str, _Decomposed] = {}
    with open_records(matrices, "singular values", enabled=cache) as opened:
        records = dict(zip([matrix.name for matrix in matrices], opened, strict=True))
        left: list[Matrix] = []
        for matrix in matrices:
            file = records[matrix.name]
            value = None if file is None else file.get(key_of(matrix))
            if value is None:
                left.append(matrix)
            else:
                found[matrix.name] = _unpacked(matrix, value)
        label = "spectrum" if is_quick or progress is False else f"spectrum{_estimate(left)}"
        with Progress(progress, label, sum(matrix.nbytes for matrix in left)) as bar:

            def deliver(matrix: Matrix, one: _Decomposed) -> None:
                found[matrix.name] = one
                file = records[matrix.name]
                if file is not None and one.values is not None and one.values[0] >= 0:
                    file.put(key_of(matrix), _packed(one.values, one.noise))
                bar.advance(matrix.nbytes)

            find = partial(_find, is_quick=is_quick)
            near = send_out(left, find, deliver, lambda matrix: matrix.array)
            large = [matrix for matrix in near if min(matrix.shape) >= _SMALL_SIDE]
            small = [matrix for matrix in near if min(matrix.shape) < _SMALL_SIDE]
            with reading_ahead(_ranges(large)), blas_threads(cpu_count()):
                for matrix in large:
                    deliver(matrix, find(matrix))
            threads = ThreadPoolExecutor(cpu_count(), "xckpt-spectrum")
            try:
                with reading_ahead(_ranges(small)), blas_threads(1):
                    futures = {threads.submit(find, matrix): matrix for matrix in small}
                    for future in as_completed(futures):
                        deliver(futures[future], future.result())
            finally:
                threads.shutdown(cancel_futures=True)
    return found


def _ranges(matrices: Iterable[Matrix]) -> Iterator[Range]:
    for matrix in matrices:
        if isinstance(matrix.array, LazyArray | _Difference):
            yield from matrix.array.ranges(...)


def blas_threads(count: int) -> Any:
    """Return a context in which BLAS has so many threads."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    return threadpool_limits(count, user_api="blas")


def _estimate(matrices: Sequence[Matrix]) -> str:
    """Return an estimate of the time, from the speed of a matrix product on this machine."""
    operations = sum(matrix.operations for matrix in matrices)
    if operations < _WORTH_ESTIMATING:
        return ""
    tried = np.ones((_TRIED_SIDE, _TRIED_SIDE))
    tried @ tried  # the first one starts threads
    start = time.perf_counter()
    tried @ tried.T.copy()
    seconds = operations * (time.perf_counter() - start) / _TRIED_SIDE**3
    told = f"{seconds / 60:.0f} min" if seconds > 90 else f"{max(seconds, 1):.0f} s"
    return f" (about {told})"


def _laid_out_values(
    entries: Sequence[Described], found: Mapping[str, _Decomposed], contents: OpenTensors
) -> xr.Dataset:
    variables: dict[Hashable, xr.Variable] = {}
    dims: dict[int, str] = {}
    for entry in entries:
        some = [found[r.name].values if r.name in found else None for r in entry.readers]
        size = max(len(values) for values in some if values is not None)
        nothing = np.full(size, np.nan)
        data = np.array([nothing if values is None else values for values in some])
        dim = dims.setdefault(size, f"value_{len(dims)}" if dims else "value")
        ordered = np.moveaxis(laid(data, entry.shape, entry.gone), 0, -1)
        noise = [found[r.name].noise if r.name in found else None for r in entry.readers]
        attrs: dict[str, Any] | None = None
        if any(floor is not None for floor in noise):
            attrs = {"noise_floor": [np.nan if floor is None else floor for floor in noise]}
        variables[entry.name] = xr.Variable((*entry.dims, dim), ordered, attrs, entry.encoding)
    held = {dim for variable in variables.values() for dim in variable.dims}
    coords = {name: c for name, c in contents.coords.items() if c.dims and held.issuperset(c.dims)}
    stated = {"source": contents.source} if contents.source else {}
    return xr.Dataset(variables, coords, {**stated, "floor": FLOOR})
