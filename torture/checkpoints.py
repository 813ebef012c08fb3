"""Cases of writing for fault injection: an old checkpoint, a new one, and their comparison."""

from __future__ import annotations

import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from torture.calls import watched
from xckpt import CheckpointWarning, append, convert, formats, save
from xckpt.storage.partial import PARTIAL_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["Broken", "Case", "cases", "files", "lay_out", "left_over", "threads"]

Files = dict[str, bytes]
Values = dict[str, np.ndarray[Any, Any]]

#: Name of the folder of a case in the folder of the trial. Sources of conversions are next to it.
_FOLDER = "m"
_ALIAS = re.compile(r"\.xckpt-[0-9a-f]{16}(\.|$)")


class Broken(Exception):  # noqa: N818  a promise is
    """A promise that was broken."""


def dataset(value: float, *, lazy: bool = True) -> xr.Dataset:
    """Return tensors of one value, with a tensor for each way in which bytes are written."""
    arrays: dict[str, Any] = {
        "a.w": np.full((32, 64), value, "f4"),
        "b.w": da.full((48, 40), value, chunks=(20, 40), dtype="f4"),
        # Columns are scattered over the file, and written through a memory map.
        "c.w": da.full((56, 24), value, chunks=(56, 8), dtype="f4"),
        "d.w": np.full((8, 72), value, "f4"),
    }
    variables = {
        name: ([f"{name[0]}{axis}" for axis in "oi"], array if lazy else np.asarray(array))
        for name, array in arrays.items()
    }
    ds = xr.Dataset(variables)
    for rank, name in enumerate(arrays):
        ds[name].attrs["rank"] = rank % 3
    return ds


def files(folder: Path) -> Files:
    """Return the contents of all files of a folder; empty if it does not exist."""
    paths = folder.iterdir() if folder.exists() else ()
    return {path.name: path.read_bytes() for path in paths}


@contextmanager
def threads() -> Iterator[None]:
    """Compute with a new pool of threads; a forked process has none from its parent."""
    with ThreadPoolExecutor(4) as pool, dask.config.set(scheduler="threads", pool=pool):
        yield


def lay_out(folder: Path, content: Mapping[str, bytes]) -> None:
    """Replace the contents of a folder by these files."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in content:
            path.unlink()
    for name, data in content.items():
        path = folder / name
        # A new inode, so that caches do not take it for the old file.
        path.unlink(missing_ok=True)
        path.write_bytes(data)


def left_over(folder: Path) -> list[str]:
    """List the temporary files that a writer, or the next one, has to remove."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name.endswith((PARTIAL_SUFFIX, ".xckpt-lock")) or _ALIAS.search(path.name)
    )


@dataclass(eq=False)
class Case:
    """A way to write a checkpoint, over an old one or into an empty folder.

    ``write(folder, overwrite=)`` writes the new files, ``before(folder)`` the old ones.
    """

    name: str
    target: str
    engine: str
    write: Callable[..., Any]
    before: Callable[[Path], Any] | None = None
    old: Files = field(default_factory=dict)
    new: Files = field(default_factory=dict)
    old_values: Values = field(default_factory=dict)
    new_values: Values = field(default_factory=dict)

    @property
    def overwrites(self) -> bool:
        """Whether there are old files."""
        return self.before is not None

    def prepare(self, root: Path) -> None:
        """Write the old and the new files undisturbed, and remember them."""
        folder = root / _FOLDER
        lay_out(folder, {})
        if self.before is not None:
            self.before(folder)
            self.old, self.old_values = files(folder), self.values(folder)
        self.run(folder)
        self.new, self.new_values = files(folder), self.values(folder)
        if left_over(folder):
            raise Broken(f"{self.name} leaves {left_over(folder)}")

    def begin(self, root: Path) -> Path:
        """Put the old files in place, and return their folder."""
        lay_out(root / _FOLDER, self.old)
        return root / _FOLDER

    def run(self, folder: Path) -> None:
        """Write the new files without warnings."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            self.write(folder, overwrite=self.overwrites)

    def path(self, folder: Path) -> Path:
        """Return the path to open: the index of shards if there is one."""
        index = folder / f"{self.target}.index.json"
        return index if index.exists() else folder / self.target

    def values(self, folder: Path) -> Values:
        """Open the checkpoint as users do, and return all values."""
        with warnings.catch_warnings(), dask.config.set(scheduler="sync"):
            warnings.simplefilter("ignore", CheckpointWarning)
            with xr.open_dataset(self.path(folder), engine=self.engine, verify=True) as ds:
                return {str(name): variable.values for name, variable in ds.variables.items()}

    def state(self, folder: Path) -> str:
        """Return "old" or "new", or raise if the folder has neither checkpoint."""
        contents = {
            path.name: path.read_bytes()
            for path in folder.iterdir()
            if not path.name.startswith(".") and not _ALIAS.search(path.name)
        }
        if contents == self.new:
            return "new"
        if contents == self.old:
            return "old"
        if not self.path(folder).exists():
            if self.old:
                raise Broken(f"{self.target} is gone; there are {sorted(contents)}")
            return "old"
        try:
            values = self.values(folder)
        except Exception as error:
            raise Broken(f"{self.target} cannot be opened: {error!r}") from error
        for state, expected in (("old", self.old_values), ("new", self.new_values)):
            if expected and _same(values, expected):
                return state
        samples = {
            name: sorted({float(v) for v in array.flat})[:4] for name, array in values.items()
        }
        raise Broken(f"{self.target} is neither the old nor the new one: {samples}")

    def next_save(self, folder: Path) -> None:
        """Save once more, undisturbed; raise unless exactly the new files remain."""
        with warnings.catch_warnings(), watched(folder, lambda call: call.make()):
            warnings.simplefilter("ignore", CheckpointWarning)
            self.write(folder, overwrite=True)
        names = sorted(path.name for path in folder.iterdir())
        if names != sorted(self.new):
            raise Broken(f"the next save leaves {names}, not {sorted(self.new)}")
        if self.state(folder) != "new":
            raise Broken("the next save did not save")


def _same(values: Values, expected: Values) -> bool:
    return values.keys() == expected.keys() and all(
        np.array_equal(values[name], array) for name, array in expected.items()
    )


def cases(root: Path, only: str = "") -> list[Case]:
    """Return all cases, or the case with a name, prepared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        selected = [case for case in _cases(root) if only in {"", case.name}]
        for case in selected:
            case.prepare(root)
    return selected


#: Size of a shard in bytes, which makes three shards.
_MOST = 12000

#: Kinds of files by format: name, name of the file, and options of the writer.
_KINDS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "ztensor": [
        ("zt 1.0", "m.zt", {"encoding": {"a.*": {"digest": "sha256"}}}),
        ("zt 2 zstd", "m.zt", {"version": "2", "encoding": {"*": {"compression": "zstd"}}}),
    ],
    "mlcp": [
        ("checkpoint", "m.checkpoint", {}),
        ("metadata.json with shards", "m.metadata.json", {}),
    ],
    "npz": [("npz", "m.npz", {})],
    "safetensors": [
        ("safetensors", "m.safetensors", {}),
        ("safetensors with shards", "m.safetensors", {"max_shard_size": _MOST}),
    ],
}


def _kinds() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for engine in formats.names():
        format_ = formats.get(engine)
        if format_.can.types:
            suffix = next(s for s in format_.suffixes if s not in format_.shared_suffixes)
            for kind, target, options in _KINDS.get(engine, [(engine, f"m{suffix}", {})]):
                yield engine, kind, target, options


def _cases(root: Path) -> Iterator[Case]:
    """Yield saves and conversions to all formats with a writer, with and without old files."""
    source = root / "source.zt"
    packed = {"d.*": {"compression": "zstd"}}
    save(dataset(2.0, lazy=False), source, encoding=packed, overwrite=True)
    for engine, kind, target, options in _kinds():
        old = partial(_save, 1.0, target, engine, options)
        new = partial(_save, 2.0, target, engine, options)
        yield Case(f"save {kind}", target, engine, new)
        yield Case(f"save {kind} over", target, engine, new, old)
        converted = partial(_convert, source, target, engine, options)
        yield Case(f"convert {kind} over", target, engine, converted, old)
    shards = partial(_save, 2.0, "m.safetensors", "safetensors", {"max_shard_size": _MOST})
    single = partial(_save, 1.0, "m.safetensors", "safetensors", {})
    yield Case("save shards over a file", "m.safetensors", "safetensors", shards, single)
    plain = partial(_save, 1.0, "m.zt", "ztensor", {})
    yield Case("convert in place", "m.zt", "ztensor", _compress, plain)
    yield Case("append zt 1.0", "m.zt", "ztensor", _append, plain)
    second = partial(_save, 1.0, "m.zt", "ztensor", {"version": "2"})
    yield Case("append zt 2", "m.zt", "ztensor", _append, second)
    yield Case("append zt 1.0 to 1.5 MiB", "m.zt", "ztensor", _append, _save_large)


def _save(
    value: float, target: str, engine: str, options: Any, folder: Path, *, overwrite: bool = False
) -> None:
    # Only the new checkpoint needs lazy arrays.
    save(dataset(value, lazy=value > 1), folder / target, engine, overwrite=overwrite, **options)


def _convert(
    source: Path, target: str, engine: str, options: Any, folder: Path, *, overwrite: bool
) -> None:
    convert(source, folder / target, engine, overwrite=overwrite, **options)


def _compress(folder: Path, *, overwrite: bool) -> None:
    path = folder / "m.zt"
    convert(path, path, encoding={"*": {"compression": "zstd"}}, overwrite=overwrite)


def _append(folder: Path, *, overwrite: bool) -> None:
    more = dataset(2.0).rename({f"{name}.w": f"{name}.v" for name in "abcd"})
    encoding = {"a.*": {"digest": "sha256"}, "d.*": {"compression": "zstd"}}
    append(more, folder / "m.zt", replace=overwrite, encoding=encoding)


def _save_large(folder: Path) -> None:
    """Save a file that is large enough to be copied by the kernel."""
    large = xr.Dataset({"large": ("n", np.ones(3 << 19, "u1"))})
    save(dataset(1.0, lazy=False).merge(large), folder / "m.zt")
