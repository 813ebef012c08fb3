"""Files of a format and their contents, and the checks that several suites share."""

from __future__ import annotations

import itertools
import pickle
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
import numpy as np
import xarray as xr

from xckpt import CheckpointError, CheckpointWarning, PayloadMissingError, formats, save
from xckpt.storage import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hypothesis import strategies as st

    from xckpt.index import Index
    from xckpt.typing import Array


class Want(NamedTuple):
    """Expected contents of a variable.

    Parameters
    ----------
    values : numpy.ndarray, bytes or None
        Values, or their bytes; None if computing must fail.
    encoding : mapping
        Entries of the encoding; others are not compared.
    attrs : mapping
        Attributes; a value of None stands for a missing one.
    exact : bool
        Whether the payloads and signs of NaN are compared.
    """

    values: Array | bytes | None
    encoding: Mapping[str, Any] = {}
    attrs: Mapping[str, Any] = {}
    exact: bool = True

    @property
    def shown(self) -> Array | bytes:
        """The values in the type that ``decode=True`` returns."""
        values = self.values
        assert values is not None
        if isinstance(values, bytes) or values.dtype != np.float16:
            return values
        return values.astype(np.float32)


class Expected(NamedTuple):
    """Expected contents of a good file.

    Parameters
    ----------
    tensors : mapping of str to Want
        Variables by name.
    stored : mapping of str to bytes
        Bytes of variables that are opened with ``decode=False``.
    version : str or None
        Version of the format; None if it is not compared.
    attrs : mapping or None
        Attributes of the file; None if they are not compared.
    warns : bool
        Whether opening the file warns.
    complete : bool
        Whether `tensors` has all variables, in order.
    """

    tensors: Mapping[str, Want]
    stored: Mapping[str, bytes] = {}
    version: str | None = None
    attrs: Mapping[str, Any] | None = None
    warns: bool = False
    complete: bool = True


class Bad(NamedTuple):
    """A malformed file, and the step at which it must be refused.

    `when` is "open", "read" (of any tensor), "read:NAME", "warn" (it opens with a warning), "ok",
    or "either" (it may be read or refused). Alternatives have a bar between them.
    """

    file: Any
    when: str


@dataclass(kw_only=True, eq=False)
class Samples:
    """Files of a format, for the suites of `xckpt.testing`.

    Without overridden methods the suites use small files that `xckpt.save` writes; a format that is
    only read overrides `small` and `large`.

    Parameters
    ----------
    name : str
        Name of the format.
    save_options : sequence of mapping
        Options of `xckpt.save`; each makes a small file.
    tolerated : mapping of str to bool
        Malformed files, by stem, that are read although they could be refused, and whether opening
        them warns.
    plan_options : mapping
        Options of plans with a place for everything that the format can hold.
    tells_offsets : bool
        Whether all errors at opening have an offset.
    may_be_cut : bool
        Whether the beginning of a file can be a valid file with fewer tensors.
    names_problems : bool
        Whether problems of tensors name the tensor.
    guards_data : bool
        Whether no flipped bit outside the data changes the meaning of the data.
    is_folder : bool
        Whether tensors are in other files than the one that is opened.
    is_shared : bool
        Whether engines of other packages recognise its files as well; xarray asks those first.
    also_complete : frozenset of (str, int)
        Labels of small files, and lengths at which a truncated one is complete.
    """

    name: str
    save_options: Sequence[Mapping[str, Any]] = ({},)
    tolerated: Mapping[str, bool] = field(default_factory=dict)
    plan_options: Mapping[str, Any] = field(default_factory=dict)
    tells_offsets: bool = True
    may_be_cut: bool = False
    names_problems: bool = True
    guards_data: bool = False
    is_folder: bool = False
    is_shared: bool = False
    also_complete: frozenset[tuple[str, int]] = frozenset()

    def good(self) -> list[Any]:
        """Return good files: paths, or bytes as ``pytest.param(data, id=label)``."""
        return []

    def bad(self) -> list[Any]:
        """Return malformed files, in the same form."""
        return []

    def expected(self, file: Any) -> Expected:
        """Return the contents of a good file."""
        raise NotImplementedError

    def verdict(self, file: Any) -> Bad:
        """Return the step at which a malformed file must be refused."""
        raise NotImplementedError

    def attributes(
        self, actual: Mapping[str, Any], expected: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the attributes of a file in the form of `Expected.attrs`."""
        return actual

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        """Return strategies of random files, by label."""
        return {}

    @cache  # noqa: B019  there are as many of them as formats
    def small_files(self) -> dict[str, bytes]:
        """Return the files of `small`, made once."""
        return self.small()

    def large(self, path: Path) -> None:
        """Write a file of `large_dataset`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            save(large_dataset(), path, self.name, **self.save_options[0])

    def small(self) -> dict[str, bytes]:
        """Return complete files of a few hundred bytes, one of each kind, by label."""
        files = {}
        for number, options in enumerate(self.save_options):
            with TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                path = Path(folder) / f"small{formats.get(self.name).suffixes[0]}"
                save(small_dataset(), path, self.name, **options)
                files[f"saved {number}"] = path.read_bytes()
        return files


def small_dataset() -> xr.Dataset:
    """Return tensors that every format can hold."""
    w = np.array([[1.5, -0.0, np.inf], [np.pi, 1e-40, -2]], "f4")
    return xr.Dataset({"a.w": (("out", "in"), w), "a.b": ("out", np.array([3, 4], "f4"))})


LARGE = np.arange(1 << 20, dtype="f4").reshape(1024, 1024)


def large_dataset() -> xr.Dataset:
    """Return the same and two tensors of 4 MiB."""
    return small_dataset().assign(large=(("x", "y"), LARGE), more=(("x", "y"), -LARGE))


def assert_same(actual: Array, expected: Array | bytes, *, exact: bool = True) -> None:
    """Compare values bit by bit, NaN payloads and signs of zero too, or as numbers."""
    if isinstance(expected, bytes):
        assert actual.tobytes() == expected
        return
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if exact:
        assert actual.tobytes() == expected.tobytes()
    else:
        np.testing.assert_array_equal(actual, expected)


def computed(variables: Mapping[Any, xr.Variable]) -> dict[Any, Array]:
    """Compute many variables at once, without the overhead of one dask call for each."""
    arrays = {name: variable.data for name, variable in variables.items()}
    lazy = {name: array for name, array in arrays.items() if dask.is_dask_collection(array)}
    graph = {key: task for array in lazy.values() for key, task in array.dask.items()}
    chunks = dask.get(graph, [array.__dask_keys__() for array in lazy.values()])
    for (name, array), array_chunks in zip(lazy.items(), chunks, strict=True):
        joined, more = array.__dask_postcompute__()
        arrays[name] = joined(array_chunks, *more)
    return {name: np.asarray(values) for name, values in arrays.items()}


def outcome(samples: Samples, data: bytes) -> Index | CheckpointError:
    """Read an index, or return the error; check that both are complete."""
    try:
        index = formats.get(samples.name).read(CountingSource(data))
    except CheckpointError as error:
        assert_told(error, len(data), offset=samples.tells_offsets)
        return error
    again = pickle.loads(pickle.dumps(index))
    assert again.tensors.keys() == index.tensors.keys()
    assert repr((again.tensors, again.attrs)) == repr((index.tensors, index.attrs))
    for tensor in index.tensors.values():
        if tensor.problem is not None:
            assert_told(tensor.problem, len(data))
            if samples.names_problems:
                assert tensor.problem.tensor == tensor.name
        for part in tensor.parts.values():
            inside = part.offset + part.nbytes <= len(data) or tensor.problem is not None
            assert inside or part.shard is not None or part.inline is not None
    return index


def assert_told(error: CheckpointError, size: int, *, offset: bool = False) -> None:
    """Check that an error names the broken rule, and optionally the offset."""
    assert error.offset is not None or not offset
    assert error.rule is not None or isinstance(error, PayloadMissingError)
    assert error.offset is None or 0 <= error.offset <= size
    str(error).encode()


# --- files in memory ------------------------------------------------------------------------------

_serial = itertools.count()


class CountingSource(Source):
    """Bytes in memory that count what is read of them."""

    def __init__(self, data: bytes, name: str = "memory") -> None:
        self.data = data
        self.name = name
        self.size = len(data)
        self.identity = next(_serial)
        self.reads: list[tuple[int, int]] = []

    @property
    def nbytes_read(self) -> int:
        """Bytes read so far."""
        return sum(nbytes for _, nbytes in self.reads)

    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Read and count."""
        nbytes = len(memory) // len(offsets)
        for number, offset in enumerate(offsets):
            self.check_range(offset, nbytes)
            self.reads.append((offset, nbytes))
            data = memoryview(self.data)[offset : offset + nbytes]
            memory[number * nbytes : (number + 1) * nbytes] = data

    def sibling(self, name: str) -> Source:
        """Raise; the source has no folder."""
        raise FileNotFoundError(name)
