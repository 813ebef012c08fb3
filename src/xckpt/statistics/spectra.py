"""`spectrum`: the singular values of every matrix and their statistics, out of core."""

from __future__ import annotations

import time
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, cast

import numpy as np
import xarray as xr

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.kinds import Kind, kind_of
from xckpt.arrays.lazy import LazyArray, SlicedArray, dense_values
from xckpt.arrays.scaled import CodebookArray, QuantizedArray
from xckpt.arrays.streams import ArrayStream, ElementStream, Transposed
from xckpt.datasets.adapter_updates import Factors, factors_in
from xckpt.datasets.stack_records import stack_of
from xckpt.errors import locating, warn
from xckpt.labels import TensorFilter, select
from xckpt.labels.filters import Selection, suggest_filters, suggest_names, warn_of_exclusions
from xckpt.options import ScanOptions, takes
from xckpt.progress import Progress
from xckpt.scan.cluster import send_out
from xckpt.scan.entries import contents_of_all, entries_of, filter_of, laid, laid_out
from xckpt.scan.statistics_cache import key_of, open_records
from xckpt.statistics.singular import (
    FLOOR,
    STATISTICS,
    RoundingNoise,
    describe_largest,
    describe_values,
    singular_values,
    values_of_product,
)
from xckpt.storage import reading_ahead
from xckpt.storage.limits import available_nbytes, cpu_count
from xckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from xckpt.datasets.tensors import OpenTensors
    from xckpt.progress import ProgressOption
    from xckpt.scan.entries import Describable, Entry
    from xckpt.storage.prefetch import Range
    from xckpt.typing import Array, Dataset

R = TypeVar("R")

#: Largest number of elements of a matrix that is selected by default; most larger ones are
#: embeddings.
LARGEST = 1 << 27

# Size of a block of rows, as float64.
_BLOCK_NBYTES = 32 << 20
# Wide matrices up to this size are read at once, because a column is scattered over the file.
_WHOLE_NBYTES = 256 << 20
# Memory for the matrices that are decomposed at the same time.
_MOST_NBYTES = 4 << 30
# These statistics need only a few passes with vectors.
_LANCZOS_STATISTICS = {"spectral_norm", "frobenius", "stable_rank"}
# Side of the matrix product that measures the speed of this machine.
_BENCHMARK_SIDE = 768
_WORTH_ESTIMATING = 2e10
# Cost of the eigenvalues, in multiplications of a matrix product: half of them wait for memory.
_OPERATIONS_OF_EIGENVALUES = 12


@takes(ScanOptions)
def spectrum(
    obj: Describable,
    tensors: TensorFilter | None = None,
    *,
    minus: Describable | None = None,
    statistics: Iterable[str] | None = None,
    values: bool = False,
    **options: Unpack[ScanOptions],
) -> Dataset:
    """Compute the singular values of every matrix, and their statistics.

    A convolution counts as a matrix of ``out`` rows and ``in * kernel`` columns; each stacked
    layer or expert is a matrix. Matrices of more than 2**27 elements, mostly embeddings, are left
    out unless `tensors` names them. The computation runs on this machine, or with one task for each
    matrix on the cluster of an active `distributed.Client`.

    Parameters
    ----------
    obj : path, mapping, Index, xarray.Dataset, xarray.DataArray or xarray.DataTree
        Tensors to describe. Quantised tensors are decoded.
    minus : as `obj`, optional
        Checkpoint to subtract: describe the differences to its tensors of the same names, such as
        the rank of the weights that fine-tuning added.
    statistics : iterable of str, optional
        Some of the names below; all by default. ``spectral_norm``, ``frobenius`` and
        ``stable_rank`` alone need only a few passes of Lanczos's method if scipy is installed.
    values : bool
        Whether to return the singular values themselves, instead of statistics.

    Returns
    -------
    xarray.Dataset
        Each variable with the dimension ``statistic`` first, then the dimensions along which
        tensors are stacked. Tensors that are not selected, and matrices with NaN or infinities, are
        NaN.

        ==================  =====================================================================
        ``spectral_norm``   the largest singular value
        ``frobenius``       root of the sum of their squares
        ``stable_rank``     ``(frobenius / spectral_norm) ** 2``
        ``effective_rank``  exponential of the entropy of the values, divided by their sum
        ``rank``            number of values above ``noise_floor``
        ``condition``       largest by smallest; NaN if the smallest is below a floor
        ``alpha``           exponent of a power law fitted to the tail of the squares
        ``noise_floor``     ``max(shape) * eps`` of the largest, with the ``eps`` of float32 or
                            float64; with `minus`, the largest value that rounding both sides to
                            their stored types explains, if that is more
        ==================  =====================================================================

        With `minus`, values below ``noise_floor`` do not count for ``effective_rank`` and
        ``condition`` either. The rounding of quantised tensors is unknown: all three are NaN.

        With `values`, each variable has the singular values, largest first, along a last dimension
        ``value`` (``value_1``, ... for other sizes); values below the floor are NaN. With `minus`,
        ``attrs["noise_floor"]`` of a variable has a number for each of its tensors.
        ``attrs["floor"]`` is the floor as a share of the largest value, 1e-9. Values above it have
        a relative error of at most 1e-6.

    Raises
    ------
    CheckpointError
        If a tensor cannot be read.
    KeyError
        If `tensors` matches nothing.
    ValueError
        If a statistic is unknown.

    Notes
    -----
    The inner products of the shorter side are summed in float64 over blocks of rows, and their
    eigenvalues computed by LAPACK. ``alpha`` is the maximum likelihood estimate, for the start of
    the tail that minimises the Kolmogorov-Smirnov distance (Clauset, Shalizi and Newman, SIAM
    Review 51, 661, 2009), as in WeightWatcher. ``effective_rank`` is defined by Roy and Vetterli
    (EUSIPCO 2007). The updates of an adapter (``ds.ckpt.updates()``) are not formed: the singular
    values follow from QR decompositions of their factors.

    Examples
    --------
    >>> spectra = xckpt.spectrum("m.zt", "*.mlp.*")
    >>> spectra.ckpt.table().nsmallest(3, "stable_rank")
    """
    names = STATISTICS if statistics is None else tuple(statistics)
    for name in names:
        if name not in STATISTICS:
            hint = suggest_names(STATISTICS, name) or f"; there are: {', '.join(STATISTICS)}"
            raise ValueError(f"a spectrum has no statistic {name!r}{hint}")
    objects = [obj] if minus is None else [obj, minus]
    contents, *subtracted = contents_of_all(objects, options["storage_options"])
    names_of_matrices = [
        name
        for name, v in contents.variables.items()
        # The shape of a tensor in a missing file is unknown.
        if _has_matrices(v) or ("problem" in v.encoding and not v.dims)
    ]
    entries = entries_of(contents, names=names_of_matrices)
    chosen = filter_of(tensors, options, contents)
    matrices = select_matrices(entries, chosen, subtracted[0] if subtracted else None)
    entries = [e for e in entries if any(stream.name in matrices for stream in e.streams)]
    is_quick = not values and set(names) <= _LANCZOS_STATISTICS and find_spec("scipy") is not None
    progress, cache = options["progress"], options["cache"]
    decomposed = _decompose_all(list(matrices.values()), progress, is_quick=is_quick, cache=cache)
    if values:
        return cast("Dataset", _values_dataset(entries, decomposed, contents))
    columns = [STATISTICS.index(name) for name in names]
    missing = [np.nan] * len(STATISTICS)
    rows = []
    for entry in entries:
        entry_rows = [
            decomposed[r.name].described if r.name in decomposed else missing for r in entry.streams
        ]
        rows.append(laid(np.array(entry_rows)[:, columns], entry.shape, entry.gone))
    result = laid_out(names, entries, rows, [{}] * len(entries), contents)
    return result.assign_attrs(floor=FLOOR)


def _has_matrices(variable: xr.Variable) -> bool:
    record = stack_of(variable)
    stacked = () if record is None else record.dims
    inner = [size for dim, size in variable.sizes.items() if dim not in stacked]
    is_float = variable.dtype.kind in "fc" or "float" in variable.dtype.name
    return is_float and len(inner) >= 2 and inner[0] >= 2 and prod(inner[1:]) >= 2


def select_matrices(
    entries: Sequence[Entry], tensors: TensorFilter | None, subtracted: OpenTensors | None
) -> dict[str, Matrix]:
    """Return the matrices by the names of their tensors; warn once if some are left out."""
    sides, others = _operands(entries), _operands(entries_of(subtracted) if subtracted else [])
    factors = {entry.streams[0].name: factors_in(entry.variable) for entry in entries}
    names = select(sides, tensors)
    if tensors is not None and not names:
        raise KeyError(f"tensors={tensors!r} matches no matrix{suggest_filters(sides, tensors)}")
    warn_of_exclusions(sides, tensors)
    is_named = tensors.tensors is not None if isinstance(tensors, Selection) else bool(tensors)
    left_out: Counter[str] = Counter()
    matrices = {}
    for name in names:
        stream = sides[name].stream
        if not is_named and not factors.get(name) and prod(stream.array.shape) > LARGEST:
            left_out[f"have more than {LARGEST:,} elements (name them to have them done)"] += 1
        elif subtracted is None:
            array = factors.get(name) or stream.array
            matrices[name] = Matrix(name, array, stream.kind, stream.identity)
        elif name not in others:
            left_out["are not in the other checkpoint"] += 1
        elif others[name].stream.array.shape != stream.array.shape:
            left_out["have another shape in the other checkpoint"] += 1
        else:
            other_stream = others[name].stream
            kinds = sides[name].stored, others[name].stored
            identity = None
            if stream.identity is not None and other_stream.identity is not None:
                stored = stream.identity[0] + other_stream.identity[0]
                identity = stored, stream.identity[1:], other_stream.identity[1:]
            difference = _Difference((stream.array, other_stream.array), kinds)
            matrices[name] = Matrix(name, difference, stream.kind, identity)
    if left_out:
        reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
        warn(f"matrices without a spectrum: {reasons}")
    return matrices


class _Operand(NamedTuple):
    """A tensor, and the element type that it was rounded to; None if the type is unknown."""

    stream: ElementStream
    stored: Kind | None


def _operands(entries: Iterable[Entry]) -> dict[str, _Operand]:
    return {r.name: _Operand(r, _stored_kind(entry, r)) for entry in entries for r in entry.streams}


def _stored_kind(entry: Entry, stream: ElementStream) -> Kind | None:
    """Return the element type that a tensor was rounded to, or None if it is unknown."""
    array, encoding = stream.array, entry.variable.encoding
    while isinstance(array, SlicedArray):
        array = array.base
    is_quantised = isinstance(array, QuantizedArray | CodebookArray | BlockArray)
    if is_quantised or encoding.get("layout") in {"quantized", "blocks"}:
        return None
    # Chunks of a Dataset may be read as a wider type.
    return kind_of(encoding.get("stored_dtype", "")) or stream.kind


class _Difference:
    """The difference of two arrays of the same shape, computed on reading."""

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


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor as a matrix: rows along its first axis, columns along all others."""

    name: str
    array: Any
    #: Identity of the tensors, for the cache.
    kind: Kind
    identity: tuple[Any, ...] | None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, along the first axis, and of columns."""
        rows, *inner = self.array.shape
        return rows, prod(inner)

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return int(prod(self.shape) * self.array.dtype.itemsize)

    @property
    def operations(self) -> float:
        """Approximate number of multiplications that the decomposition takes."""
        least = min(self.shape)
        return prod(self.shape) * least / 2 + _OPERATIONS_OF_EIGENVALUES * least**3 / 3

    @property
    def epsilon(self) -> float:
        """Machine epsilon of the element type; types with fewer than 32 bits count as float32."""
        is_double = self.kind.name == "float64" or self.array.dtype == np.complex128
        return float(np.finfo(np.float64 if is_double else np.float32).eps)

    @property
    def working_nbytes(self) -> int:
        """Memory that the decomposition takes, about: inner products, vectors, blocks of rows."""
        least = min(self.shape)
        return 3 * 8 * least**2 + 3 * _BLOCK_NBYTES + (self.nbytes if self._is_read_at_once else 0)

    @property
    def _is_read_at_once(self) -> bool:
        rows, columns = self.shape
        if columns > rows:
            return self.nbytes <= _WHOLE_NBYTES or len(self.array.shape) > 2
        return rows <= self._rows_at_once

    @property
    def _rows_at_once(self) -> int:
        """Number of rows in a block, or of columns of a wide matrix."""
        return max(64, _BLOCK_NBYTES // (8 * min(self.shape)))

    def noise(self) -> RoundingNoise:
        """Return an empty bound on the rounding of a difference."""
        return RoundingNoise(self.array.kinds)

    def blocks(self, noise: RoundingNoise | None = None) -> Callable[[], Iterator[Array]]:
        """Return a function that yields blocks of rows, or of transposed columns if wide."""
        # The first pass over a difference adds both sides to `noise`.
        rows, columns = self.shape
        array = self.array
        sides: list[Any] = list(array.arrays) if isinstance(array, _Difference) else [array]
        if self._is_read_at_once:
            key = (slice(None),) * len(array.shape)
            sides = [dense_values(side[key]).reshape(self.shape) for side in sides]
        if columns > rows:
            sides = [Transposed(side, (1, 0)) for side in sides]
        width = min(rows, columns)

        def read_side(side: Any) -> Iterator[Array]:
            stream = ArrayStream(side)
            stream.read_rows(self._rows_at_once * width * side.dtype.itemsize)
            for _, (values,) in stream.blocks(0, rows * columns):
                yield values.reshape(-1, width)

        def read() -> Iterator[Array]:
            for blocks in zip(*map(read_side, sides), strict=True):
                if not isinstance(array, _Difference):
                    yield blocks[0]
                    continue
                if noise is not None and not noise.is_complete:
                    noise.add(blocks)
                difference = blocks[0].astype(array.dtype)
                difference -= blocks[1].astype(array.dtype)
                yield difference
            if noise is not None:
                noise.is_complete = True

        return read


@dataclass(frozen=True, slots=True)
class _Decomposed:
    described: list[float]
    values: Array | None = None
    noise: float | None = None


def _decompose(matrix: Matrix, threads: int = 1, *, is_quick: bool) -> _Decomposed:
    """Decompose one matrix; the threads share the work on inner products."""
    with locating(tensor=matrix.name):
        if isinstance(matrix.array, Factors):
            parts = matrix.array
            return _describe(matrix, values_of_product(*parts.arrays(), parts.scale), None)
        if is_quick:
            return _Decomposed(describe_largest(matrix.blocks(), min(matrix.shape)))
        if not isinstance(matrix.array, _Difference):
            return _describe(matrix, singular_values(matrix.blocks(), threads), None)
        noise = matrix.noise()
        values = singular_values(matrix.blocks(noise), threads)
        return _describe(matrix, values, noise.floor())


def _decompose_alone(matrix: Matrix, *, is_quick: bool) -> _Decomposed:
    """Decompose a matrix on one thread of BLAS, as without a cluster."""
    with blas_threads(1):
        return _decompose(matrix, is_quick=is_quick)


def _describe(matrix: Matrix, values: Array, noise: float | None) -> _Decomposed:
    floor = 0.0 if noise is None else noise
    described = describe_values(values, matrix.shape, matrix.epsilon, floor)
    return _Decomposed(described, values, noise)


def _decompose_all(
    matrices: Sequence[Matrix], progress: ProgressOption, *, is_quick: bool, cache: bool
) -> dict[str, _Decomposed]:
    """Return the decompositions by name; compute those that are not cached."""
    results: dict[str, _Decomposed] = {}
    with open_records(matrices, "singular values", enabled=cache) as opened:
        records = dict(zip([matrix.name for matrix in matrices], opened, strict=True))
        missing: list[Matrix] = []
        for matrix in matrices:
            file = records[matrix.name]
            packed = None if file is None else file.get(key_of(matrix))
            if packed is None:
                missing.append(matrix)
            else:
                numbers, noise = np.frombuffer(packed, "<f8").astype(np.float64), None
                if isinstance(matrix.array, _Difference):  # its noise follows its values
                    numbers, noise = numbers[:-1], float(numbers[-1])
                results[matrix.name] = _describe(matrix, numbers, noise)
        label = "spectrum" if is_quick or progress is False else f"spectrum{_estimate(missing)}"
        with Progress(progress, label, sum(matrix.nbytes for matrix in missing)) as bar:

            def deliver(matrix: Matrix, decomposed: _Decomposed) -> None:
                results[matrix.name] = decomposed
                file = records[matrix.name]
                if file is not None and decomposed.values is not None and decomposed.values[0] >= 0:
                    noise = decomposed.noise
                    numbers = np.append(decomposed.values, [] if noise is None else noise)
                    file.put(key_of(matrix), numbers.astype("<f8").tobytes())
                bar.advance(matrix.nbytes)

            on_worker = partial(_decompose_alone, is_quick=is_quick)
            remaining = send_out(missing, on_worker, deliver, lambda matrix: matrix.array)
            on_threads(remaining, partial(_decompose, is_quick=is_quick), deliver)
    return results


def on_threads(
    matrices: Sequence[Matrix],
    work: Callable[[Matrix, int], R],
    deliver: Callable[[Matrix, R], None],
) -> None:
    """Work on matrices on the threads of this machine, in bounded memory."""
    # `work` also gets the number of threads for one matrix.
    # The bits of a result depend on the number of threads of BLAS, so that each matrix has one.
    cores = cpu_count()
    threads_each = max(1, cores // max(1, len(matrices)))
    most = min(_MOST_NBYTES, (available_nbytes() or _MOST_NBYTES) // 2)
    waiting, running = deque(matrices), dict[Any, Matrix]()
    # Stop reading ahead before the threads, so that none waits for a cancelled read.
    with (
        Threads(cores, "xckpt-spectrum") as threads,
        reading_ahead(_ranges(matrices)),
        blas_threads(1),
    ):
        while waiting or running:
            while waiting and len(running) < cores:
                nbytes = sum(matrix.working_nbytes for matrix in (*running.values(), waiting[0]))
                if running and nbytes > most:
                    break
                matrix = waiting.popleft()
                future = threads.submit(work, matrix, threads_each)
                running[future] = matrix
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                deliver(running.pop(future), future.result())


def _ranges(matrices: Iterable[Matrix]) -> Iterator[Range]:
    for matrix in matrices:
        if isinstance(matrix.array, LazyArray | _Difference):
            yield from matrix.array.ranges(...)


def blas_threads(count: int) -> Any:
    """Return a context in which BLAS uses `count` threads."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    return threadpool_limits(count, user_api="blas")


def _estimate(matrices: Sequence[Matrix]) -> str:
    """Return the estimated time as text, from the speed of a matrix product on this machine."""
    operations = sum(matrix.operations for matrix in matrices)
    if operations < _WORTH_ESTIMATING:
        return ""
    square = np.ones((_BENCHMARK_SIDE, _BENCHMARK_SIDE))
    with blas_threads(1):
        start = time.perf_counter()
        square @ square.T.copy()
        seconds = operations * (time.perf_counter() - start) / _BENCHMARK_SIDE**3
    seconds /= min(cpu_count(), len(matrices))
    duration = f"{seconds / 60:.0f} min" if seconds > 90 else f"{max(seconds, 1):.0f} s"
    return f" (about {duration})"


def _values_dataset(
    entries: Sequence[Entry], decomposed: Mapping[str, _Decomposed], contents: OpenTensors
) -> xr.Dataset:
    variables: dict[Hashable, xr.Variable] = {}
    dims: dict[int, str] = {}
    for entry in entries:
        tensor_values = [
            decomposed[r.name].values if r.name in decomposed else None for r in entry.streams
        ]
        size = max(len(values) for values in tensor_values if values is not None)
        missing = np.full(size, np.nan)
        data = np.array([missing if values is None else values for values in tensor_values])
        dim = dims.setdefault(size, f"value_{len(dims)}" if dims else "value")
        ordered = np.moveaxis(laid(data, entry.shape, entry.gone), 0, -1)
        noise = [decomposed[r.name].noise if r.name in decomposed else None for r in entry.streams]
        attrs: dict[str, Any] | None = None
        if any(floor is not None for floor in noise):
            attrs = {"noise_floor": [np.nan if floor is None else floor for floor in noise]}
        variables[entry.name] = xr.Variable((*entry.dims, dim), ordered, attrs, entry.encoding)
    used_dims = {dim for variable in variables.values() for dim in variable.dims}
    coords = {
        name: c
        for name, c in contents.common_coords.items()
        if c.dims and used_dims.issuperset(c.dims)
    }
    source_attrs = {"source": contents.source} if contents.source else {}
    return xr.Dataset(variables, coords, {**source_attrs, "floor": FLOOR})
