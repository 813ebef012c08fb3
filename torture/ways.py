"""Checks that all ways to read a file, and other implementations, return the same."""

from __future__ import annotations

import io
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

import xckpt
from xckpt.errors import CheckpointError, FormatError, IntegrityError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from torture.seeds import Files
    from xckpt.writing import Report

__all__ = [
    "BROKEN",
    "Disagreement",
    "agreement",
    "check_named",
    "digested",
    "flipped",
    "unlike_others",
    "values_of",
]

Array = np.ndarray[Any, np.dtype[Any]]
#: Errors that break a promise. Documented errors are caught before.
BROKEN = (Exception,)

# In bytes. Sparse and broadcast tensors may be far larger than their file.
_LARGEST = 1 << 20


class Disagreement(AssertionError):  # noqa: N818
    """Two ways to read a file have different results."""


def values_of(obj: Any) -> None:
    """Open a file as a Dataset, and compute all stored values."""
    try:
        ds = _opened(xr.open_dataset, obj, decode=False, verify=True)
    except CheckpointError as error:
        check_named(error)
    else:
        _computed(ds.variables)


def check_named(error: CheckpointError) -> None:
    """Check that an error names the file."""
    if error.path is None or error.path not in str(error):
        raise Disagreement(f"no file is named in: {error}") from error


def agreement(obj: Any) -> dict[str, Array] | None:
    """Read a file in all ways; return stored values by variable, or None if it cannot be opened."""
    errors_by_way: dict[str, CheckpointError] = {}
    ways: dict[str, Callable[[], Any]] = {
        "index": lambda: xckpt.read_index(obj),
        "Dataset": lambda: _opened(xr.open_dataset, obj, decode=False, verify=True),
        "decoded": lambda: _opened(xr.open_dataset, obj, verify=True),
        "tree": lambda: _opened(xr.open_datatree, obj, decode=False, verify=True),
    }
    results = {}
    for way, read in ways.items():
        try:
            results[way] = read()
        except CheckpointError as error:
            errors_by_way[way] = error
            check_named(error)
    report = xckpt.verify(obj, progress=False)
    if errors_by_way.keys() not in (set(), ways.keys()):
        raise Disagreement(f"only some open it: {errors_by_way}")
    if errors_by_way:
        _agree(report, errors_by_way["index"])
        return None
    values, errors = _computed(results["Dataset"].variables)
    decoded, decoding_errors = _computed(results["decoded"].variables)
    problems = [*errors.values(), *decoding_errors.values()]
    damage = [e for e in problems if isinstance(e, FormatError | IntegrityError)]
    if damage and report.ok:
        raise Disagreement(f"verify finds nothing wrong, but {damage[0]}") from damage[0]
    is_all = len(values) == len(results["Dataset"].variables)
    is_damaged = report.status == "damaged"  # a file without tensors is "empty"
    if is_damaged and is_all and len(decoded) == len(results["decoded"].variables):
        raise Disagreement(f"everything is read, but {report}")
    _agree_on_values(results["tree"], values, errors)
    repr(results["decoded"].ckpt)
    _agree_on_statistics(results["decoded"], decoded)
    return values


def _opened(open_: Callable[..., Any], obj: Any, **options: Any) -> Any:
    engine = _engine_of(obj)
    return open_(obj, engine=engine, **options)


def _engine_of(obj: Any) -> str:
    from xckpt.opening.detection import format_of

    return format_of(obj)


def _agree(report: Report, error: CheckpointError) -> None:
    if len(report.findings) != 1 or report.findings[0].rule != error.rule:
        raise Disagreement(f"opening says {error}, verify {report}") from error
    is_unsupported = isinstance(error, UnsupportedError)
    if report.ok or (report.status == "unsupported") is not is_unsupported:
        raise Disagreement(f"verify says {report}") from error


def _computed(
    variables: Any,
) -> tuple[dict[str, Array], dict[str, CheckpointError]]:
    values, errors = {}, {}
    for name, variable in variables.items():
        if variable.nbytes < _LARGEST:
            try:
                values[str(name)] = np.asarray(variable.values)
            except CheckpointError as error:
                check_named(error)
                errors[str(name)] = error
    return values, errors


def _agree_on_values(
    tree: xr.DataTree, values: dict[str, Array], errors: dict[str, CheckpointError]
) -> None:
    stored = {
        (v.encoding.get("tensor"), v.encoding.get("part")): v
        for node in tree.subtree
        for v in node.variables.values()
    }
    count = sum(variable.nbytes < _LARGEST for variable in stored.values())
    if count != len(values) + len(errors):
        raise Disagreement(f"{count} variables in the tree, {len(values) + len(errors)} without")
    tree_values, problems = _computed({str(key): variable for key, variable in stored.items()})
    expected = sorted([(v.shape, v.tobytes()) for v in values.values()])
    if sorted([(v.shape, v.tobytes()) for v in tree_values.values()]) != expected:
        raise Disagreement("the tree has other values")
    if len(problems) != len(errors):
        raise Disagreement(f"the tree has other problems: {problems}, {errors}")


def _agree_on_statistics(ds: xr.Dataset, decoded: dict[str, Array]) -> None:
    """Check extremes and counts against numpy."""
    names = [n for n, v in decoded.items() if v.dtype.kind in "biuf" and v.dtype.itemsize <= 8]
    if not names or len(names) > 8:
        return
    table = xckpt.stats(ds[names], cache=False, progress=False)
    for name in names:
        values = decoded[name]
        finite = values[np.isfinite(values)]
        expected = {"count": values.size, "nan": np.count_nonzero(np.isnan(values))}
        if finite.size:
            expected |= {"min": float(finite.min()), "max": float(finite.max())}
        for statistic, value in expected.items():
            actual = float(table[name].sel(statistic=statistic))
            if actual != value:
                raise Disagreement(f"{statistic} of {name!r} is {actual}, of its values {value}")


# --- others ---------------------------------------------------------------------------------------


def unlike_others(data: bytes, values: dict[str, Array]) -> None:
    """Check stored values against another implementation, if it can read the tensor."""
    from xckpt.opening.detection import format_of

    read = _OTHER_READERS.get(format_of(data))
    if read is None:
        return
    for name, theirs in read(data).items():
        ours = values.get(name)
        if ours is not None and ours.nbytes == len(theirs) and ours.tobytes() != theirs:
            raise Disagreement(f"{name!r} has other values than another implementation reads")
        if ours is not None and ours.nbytes != len(theirs):
            raise Disagreement(f"{name!r} has {ours.nbytes} bytes, for others {len(theirs)}")


def _safetensors(data: bytes) -> dict[str, bytes]:
    import safetensors

    try:
        return {n: bytes(tensor["data"]) for n, tensor in safetensors.deserialize(data)}  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return {}


def _numpy(data: bytes) -> dict[str, bytes]:
    if data.startswith(b"PK"):
        arrays: dict[str, bytes] = {}
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                for name in archive.files:
                    arrays |= _array(name, lambda name=name: archive[name])  # type: ignore[misc]
        except Exception:  # noqa: BLE001  zipfile raises many types
            return arrays
        return arrays
    return _array("arr_0", lambda: np.load(io.BytesIO(data), allow_pickle=False))


def _array(name: str, load: Callable[[], Any]) -> dict[str, bytes]:
    try:
        array = load()
    except Exception:  # noqa: BLE001  numpy refuses more files than xckpt
        return {}
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
        return {}
    if array.dtype.kind == "b":
        array = array.view(np.uint8) != 0  # stored bytes may be other than 0 and 1
    return {name: array.astype(array.dtype.newbyteorder("=")).tobytes()}


def _ztensor(data: bytes) -> dict[str, bytes]:
    try:
        import ztensor
    except ImportError:  # no wheel for this Python
        return {}
    arrays: dict[str, bytes] = {}
    with NamedTemporaryFile(suffix=".zt") as file:
        file.write(data)
        file.flush()
        with _refusing(), ztensor.open(file.name) as source:
            for name in source.keys():  # noqa: SIM118  it is no mapping
                with _refusing():
                    tensor = source[name]
                    if tensor.layout == "dense" and tensor.logical is None:
                        arrays[name] = bytes(tensor.tobytes())
    return arrays


@contextmanager
def _refusing() -> Iterator[None]:
    """Ignore errors of another implementation; a panic of Rust is a `BaseException`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit) or type(error).__module__ == __name__:
            raise


def _gguf(data: bytes) -> dict[str, bytes]:
    from gguf import GGUFReader

    arrays: dict[str, bytes] = {}
    with NamedTemporaryFile(suffix=".gguf") as file, suppress(Exception):
        file.write(data)
        file.flush()
        reader = GGUFReader(file.name)
        for tensor in reader.tensors:
            array = np.asarray(tensor.data)
            # It has 40 bytes for the blocks of ggml with 36, and does not swap bytes in blocks.
            if tensor.tensor_type.name == "Q8_1" or (
                data[4:8] < data[7:3:-1] and array.dtype == "u1"
            ):
                continue
            name = tensor.name if tensor.tensor_type.name[0] in "FIB" else f"{tensor.name}:data"
            arrays[name] = array.astype(array.dtype.newbyteorder("=")).tobytes()
    return arrays


_OTHER_READERS: dict[str, Callable[[bytes], dict[str, bytes]]] = {
    "safetensors": _safetensors,
    "npz": _numpy,
    "ztensor": _ztensor,
    "gguf": _gguf,
}


# --- digests --------------------------------------------------------------------------------------


@dataclass
class Digested:
    """A file with byte ranges that digests cover."""

    files: Files
    ranges: list[tuple[int, int]]
    values: dict[str, Array]

    def check(self, files: Files) -> None:
        """Raise if reading returns changed values without an error."""
        data = next(iter(files.values()))
        try:
            ds = xr.open_dataset(data, engine=_engine_of(data), decode=False, verify=True)
        except CheckpointError:
            return
        actual, _ = _computed(ds.variables)
        for name, values in actual.items():
            if name in self.values and values.tobytes() != self.values[name].tobytes():
                raise Disagreement(f"{name!r} has other values, and its digest says nothing")


def digested(files: Files) -> Digested | None:
    """Return the byte ranges that digests cover; None without any, or for a damaged file."""
    if len(files) > 1:
        return None
    [data] = files.values()
    try:
        index = xckpt.read_index(data)
        ranges = [
            (part.offset, part.offset + part.nbytes)
            for tensor in index.tensors.values()
            if tensor.problem is None
            for part in tensor.parts.values()
            if part.digest is not None and part.nbytes and part.shard is None
        ]
        if not ranges:
            return None
        ds = xr.open_dataset(data, engine=index.format, decode=False, verify=True)
        values, errors = _computed(ds.variables)
    except CheckpointError:
        return None
    # Variables whose parts lack a digest may change unnoticed.
    covered = {
        name
        for name, variable in ds.variables.items()
        if all(p.digest for p in index[variable.encoding["tensor"]].parts.values())
    }
    covered_values = {name: array for name, array in values.items() if name in covered}
    return None if errors else Digested(files, ranges, covered_values)


def flipped(guarded: Digested, random: Random) -> Files:
    """Return the file with changed bytes in ranges that digests cover."""
    [(name, data)] = guarded.files.items()
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 8])):
        start, stop = random.choice(guarded.ranges)
        changed[random.randrange(start, stop)] ^= random.randrange(1, 256)
    return {name: bytes(changed)}
