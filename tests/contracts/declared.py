"""Declarations of formats for the contracts: their files, and the expected contents.

Each format has a module of its name in this folder, with a `Declared` named ``DECLARED``. A format
without golden files is tested with files that `xckpt.save` writes.
"""

from __future__ import annotations

import json
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

from tests.conftest import golden_files
from tests.sources import CountingSource
from xckpt import CheckpointError, CheckpointWarning, PayloadMissingError, formats, save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hypothesis import strategies as st

    from xckpt.index import Index

Array = np.ndarray[Any, np.dtype[Any]]


class Want(NamedTuple):
    """The expected values of a variable, an array or bytes; None if computing must fail.

    Attributes with the value None must be absent.
    """

    values: Array | bytes | None
    encoding: Mapping[str, Any] = {}
    attrs: Mapping[str, Any] = {}
    exact: bool = True  # NaN payloads and signs of NaN too

    @property
    def shown(self) -> Array | bytes:
        """The values as they are decoded, of numpy's types."""
        values = self.values
        assert values is not None
        if isinstance(values, bytes) or values.dtype != np.float16:
            return values
        return values.astype(np.float32)


class Expected(NamedTuple):
    """The expected variables of a good file, decoded and as stored."""

    tensors: Mapping[str, Want]
    stored: Mapping[str, bytes] = {}
    version: str | None = None
    attrs: Mapping[str, Any] | None = None
    warns: bool = False
    complete: bool = True  # and in this order


class Bad(NamedTuple):
    """A malformed file, and the step at which a reader must refuse it.

    "open", "read" (of any tensor), "read:NAME", "either" for both or neither, "warn" if it opens
    with a warning. Alternatives are separated by bars.
    """

    file: Any
    when: str


@dataclass(kw_only=True, eq=False)
class Declared:
    """The base class; a format overrides what it has."""

    name: str
    #: Globs of good and of malformed golden files, in the folder of the format.
    good_patterns: Sequence[str] = ()
    bad_patterns: Sequence[str] = ()
    #: Options with which small files are saved.
    save_options: Sequence[Mapping[str, Any]] = ({},)
    #: Malformed files that are read although readers may refuse them, and whether they warn.
    tolerated: Mapping[str, bool] = field(default_factory=dict)
    #: Options of plans in which everything that the format can hold has a place.
    plan_options: Mapping[str, Any] = field(default_factory=dict)
    #: Whether all errors of opening state an offset in the file.
    tells_offsets: bool = True
    #: Whether the beginning of a file may be a valid file with fewer tensors.
    may_be_cut: bool = False
    #: Whether what is wrong with a tensor names it.
    names_problems: bool = True
    #: Whether no flipped bit outside of the data changes what the data are.
    guards_data: bool = False
    #: Whether tensors are in other files than the one that is opened.
    is_folder: bool = False
    #: Whether engines of other packages take its files as well; xarray asks those first.
    is_shared: bool = False
    #: Lengths, by label, at which a file that is cut short is a complete one.
    also_complete: frozenset[tuple[str, int]] = frozenset()

    def good(self) -> list[Any]:
        """List good files: paths, or bytes by label."""
        return [p for pattern in self.good_patterns for p in golden_files(f"{self.name}/{pattern}")]

    def bad(self) -> list[Any]:
        """List malformed files."""
        return [p for pattern in self.bad_patterns for p in golden_files(f"{self.name}/{pattern}")]

    def expected(self, path: Path) -> Expected:
        """Return the expected contents of a good file."""
        raise NotImplementedError

    def verdict(self, path: Path) -> Bad:
        """Return the step at which a malformed file must be refused."""
        raise NotImplementedError

    def attributes(
        self, actual: Mapping[str, Any], expected: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Bring the attributes of a file into the form of the expectation."""
        return actual

    def hostile(self) -> Mapping[str, st.SearchStrategy[list[bytes]]]:
        """Return strategies of files with any contents, by label."""
        return {}

    @cache  # noqa: B019  there are as many of them as formats
    def small_files(self) -> dict[str, bytes]:
        """Return what `small` makes, made once."""
        return self.small()

    def large(self, path: Path) -> None:
        """Make a file of `large_dataset`, whose header is small next to its data."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            save(large_dataset(), path, self.name, **self.save_options[0])

    def small(self) -> dict[str, bytes]:
        """Make complete files of a few hundred bytes, of each kind there is."""
        arrays = {}
        for number, options in enumerate(self.save_options):
            with TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                path = Path(folder) / f"small{formats.get(self.name).suffixes[0]}"
                save(small_dataset(), path, self.name, **options)
                arrays[f"saved {number}"] = path.read_bytes()
        return arrays


def small_dataset() -> xr.Dataset:
    """Make what every format can hold."""
    w = np.array([[1.5, -0.0, np.inf], [np.pi, 1e-40, -2]], "f4")
    return xr.Dataset({"a.w": (("out", "in"), w), "a.b": ("out", np.array([3, 4], "f4"))})


LARGE = np.arange(1 << 20, dtype="f4").reshape(1024, 1024)


def large_dataset() -> xr.Dataset:
    """Make the same with two tensors of 4 MiB."""
    return small_dataset().assign(large=(("x", "y"), LARGE), more=(("x", "y"), -LARGE))


def golden_json(path: Path, suffix: str = ".expected.json") -> dict[str, Any]:
    """Load what a golden file should hold, from the file with its whole name or its stem."""
    beside = path.with_name(path.name + suffix)
    beside = beside if beside.exists() else path.with_suffix(suffix)
    document: dict[str, Any] = json.loads(beside.read_text("utf-8"))
    return document


def arrays_in(path: Path) -> dict[str, Array]:
    """Load all arrays of an ``.npz`` file, which does not stay open."""
    with np.load(path) as arrays:
        return dict(arrays)


def golden_arrays(path: Path) -> dict[str, Array]:
    """Load the expected arrays of a golden file; empty without any."""
    beside = path.with_name(f"{path.name}.expected.npz")
    beside = beside if beside.exists() else path.with_suffix(".expected.npz")
    return arrays_in(beside) if beside.exists() else {}


def widened(bits: Array) -> Array:
    """Make float32 of the bits of bfloat16."""
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def assert_same(got: Array, expected: Array | bytes, *, exact: bool = True) -> None:
    """Compare values bit by bit, NaN payloads and signs of zero too, or as numbers."""
    if isinstance(expected, bytes):
        assert got.tobytes() == expected
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if exact:
        assert got.tobytes() == expected.tobytes()
    else:
        np.testing.assert_array_equal(got, expected)


def computed(variables: Mapping[Any, xr.Variable]) -> dict[Any, Array]:
    """Compute many variables at once, and their tasks as they are: the time is dask's otherwise."""
    arrays = {name: variable.data for name, variable in variables.items()}
    lazy = {name: array for name, array in arrays.items() if dask.is_dask_collection(array)}
    graph = {key: task for array in lazy.values() for key, task in array.dask.items()}
    chunks = dask.get(graph, [array.__dask_keys__() for array in lazy.values()])
    for (name, array), array_chunks in zip(lazy.items(), chunks, strict=True):
        joined, more = array.__dask_postcompute__()
        arrays[name] = joined(array_chunks, *more)
    return {name: np.asarray(values) for name, values in arrays.items()}


def outcome(declared: Declared, data: bytes) -> Index | CheckpointError:
    """Read an index, and check that errors and indexes are complete."""
    try:
        index = formats.get(declared.name).read(CountingSource(data))
    except CheckpointError as error:
        assert_told(error, len(data), offset=declared.tells_offsets)
        return error
    again = pickle.loads(pickle.dumps(index))
    assert again.tensors.keys() == index.tensors.keys()
    assert repr((again.tensors, again.attrs)) == repr((index.tensors, index.attrs))
    for tensor in index.tensors.values():
        if tensor.problem is not None:
            assert_told(tensor.problem, len(data))
            if declared.names_problems:
                assert tensor.problem.tensor == tensor.name
        for part in tensor.parts.values():
            inside = part.offset + part.nbytes <= len(data) or tensor.problem is not None
            assert inside or part.shard is not None or part.inline is not None
    return index


def assert_told(error: CheckpointError, size: int, *, offset: bool = False) -> None:
    """Check that an error names the broken rule, and an offset inside the file if `offset`."""
    assert error.offset is not None or not offset
    assert error.rule is not None or isinstance(error, PayloadMissingError)
    assert error.offset is None or 0 <= error.offset <= size
    str(error).encode()
