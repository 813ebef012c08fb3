"""What is written while things go wrong: an old checkpoint, a new one, and how to tell them."""

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

#: The folder of the case, in that of the trial; next to it is what is converted.
_FOLDER = "m"
_ALIAS = re.compile(r"\.xckpt-[0-9a-f]{16}(\.|$)")


class Broken(Exception):  # noqa: N818  a promise is
    """A promise that was broken."""


def dataset(value: float, *, lazy: bool = True) -> xr.Dataset:
    """Make tensors that are all of one value, for each way in which bytes get into a file."""
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
    """Read everything that is in a folder, if there is one."""
    paths = folder.iterdir() if folder.exists() else ()
    return {path.name: path.read_bytes() for path in paths}


@contextmanager
def threads() -> Iterator[None]:
    """Compute with threads of this process, which a fork does not have from its parent."""
    with ThreadPoolExecutor(4) as pool, dask.config.set(scheduler="threads", pool=pool):
        yield


def lay_out(folder: Path, content: Mapping[str, bytes]) -> None:
    """Make a folder hold these files and nothing else."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in content:
            path.unlink()
    for name, data in content.items():
        path = folder / name
        # Anew, so that nobody takes it for the file that it was.
        path.unlink(missing_ok=True)
        path.write_bytes(data)


def left_over(folder: Path) -> list[str]:
    """List what writers are to remove, or the next one if they cannot."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name.endswith((PARTIAL_SUFFIX, ".xckpt-lock")) or _ALIAS.search(path.name)
    )


@dataclass(eq=False)
class Case:
    """One way to write a checkpoint in the place of an old one, or of nothing.

    ``write(folder, overwrite=)`` writes it, ``before(folder)`` makes what was there.
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
        """Whether there was something."""
        return self.before is not None

    def prepare(self, root: Path) -> None:
        """Write it undisturbed, to know what it is."""
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
        """Write it; warnings are not about anything that matters here."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            self.write(folder, overwrite=self.overwrites)

    def path(self, folder: Path) -> Path:
        """Return what a user opens."""
        index = folder / f"{self.target}.index.json"
        return index if index.exists() else folder / self.target

    def values(self, folder: Path) -> Values:
        """Open what is there as users do, and load it."""
        with warnings.catch_warnings(), dask.config.set(scheduler="sync"):
            warnings.simplefilter("ignore", CheckpointWarning)
            with xr.open_dataset(self.path(folder), engine=self.engine, verify=True) as ds:
                return {str(name): each.values for name, each in ds.variables.items()}

    def state(self, folder: Path) -> str:
        """Return which of the two is there, "old" or "new", or raise what is wrong."""
        found = {
            path.name: path.read_bytes()
            for path in folder.iterdir()
            if not path.name.startswith(".") and not _ALIAS.search(path.name)
        }
        if found == self.new:
            return "new"
        if found == self.old:
            return "old"
        if not self.path(folder).exists():
            if self.old:
                raise Broken(f"{self.target} is gone; there are {sorted(found)}")
            return "old"
        try:
            values = self.values(folder)
        except Exception as error:
            raise Broken(f"{self.target} cannot be opened: {error!r}") from error
        for state, wanted in (("old", self.old_values), ("new", self.new_values)):
            if wanted and _same(values, wanted):
                return state
        told = {name: sorted({float(v) for v in of.flat})[:4] for name, of in values.items()}
        raise Broken(f"{self.target} is neither the old nor the new one: {told}")

    def next_save(self, folder: Path) -> None:
        """Write it once more, undisturbed: it is the new one then, and nothing is left over."""
        with warnings.catch_warnings(), watched(folder, lambda call: call.make()):
            warnings.simplefilter("ignore", CheckpointWarning)
            self.write(folder, overwrite=True)
        names = sorted(path.name for path in folder.iterdir())
        if names != sorted(self.new):
            raise Broken(f"the next save leaves {names}, not {sorted(self.new)}")
        if self.state(folder) != "new":
            raise Broken("the next save did not save")


def _same(values: Values, wanted: Values) -> bool:
    return values.keys() == wanted.keys() and all(
        np.array_equal(values[name], each) for name, each in wanted.items()
    )


def cases(root: Path, only: str = "") -> list[Case]:
    """Make all of them, or the one of a name; files that some need are next to their folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        found = [case for case in _cases(root) if only in {"", case.name}]
        for case in found:
            case.prepare(root)
    return found


#: Of one file, in bytes: there are three then.
_MOST = 12000

#: Names of files by format, and options with which they are written.
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
        found = formats.get(engine)
        if found.can.types:
            suffix = next(s for s in found.suffixes if s not in found.shared_suffixes)
            for kind, target, options in _KINDS.get(engine, [(engine, f"m{suffix}", {})]):
                yield engine, kind, target, options


def _cases(root: Path) -> Iterator[Case]:
    """Save and convert to all formats that are written, with and without an old file; append."""
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
    # Only the new one has lazy arrays: for the old one it makes no difference.
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
    """Save so much that the kernel copies it."""
    large = xr.Dataset({"large": ("n", np.ones(3 << 19, "u1"))})
    save(dataset(1.0, lazy=False).merge(large), folder / "m.zt")
