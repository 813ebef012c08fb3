"""What `make demo` shows: a sample checkpoint written, opened, summarised and computed on."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan, sqrt
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import xarray as xr

__all__ = ["Moments", "describe", "main"]

_PIECE = 1 << 17  # elements that fit a second-level cache, in float64

_NEXT = """\
Next, in Python (.venv/bin/python) or in a notebook:

  import xarray as xr
  ds = xr.open_dataset("{path}", engine="ztensor")
  ds["lm_head.weight"][42].values                    # reads one row, nothing else
  ds["model.embed_tokens.delta"]                     # a sparse tensor, dense where it is computed
  dt = xr.open_datatree("{path}", engine="ztensor")
  dt["model/layers/0/self_attn"]                     # modules as a tree
  xr.open_dataset("{path}", engine="ztensor", tensors="*.q_proj.weight")
"""


@dataclass(slots=True)
class Moments:
    """Count, mean, spread and extreme of some elements; those of two blocks can be merged.

    Parameters
    ----------
    count : int
        Elements that are numbers.
    nans : int
        Elements that are not.
    mean : float
        Mean of the numbers.
    squares : float
        Sum of their squared distances from the mean.
    absmax : float
        Largest magnitude.
    """

    count: int = 0
    nans: int = 0
    mean: float = 0.0
    squares: float = 0.0
    absmax: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the numbers."""
        return sqrt(self.squares / self.count) if self.count else nan

    def merge(self, other: Moments) -> None:
        """Add the elements of another block (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        if other.count:
            step = other.mean - self.mean
            self.mean += step * other.count / count
            self.squares += other.squares + step * step * self.count * other.count / count
        self.count = count
        self.nans += other.nans
        self.absmax = max(self.absmax, other.absmax)


def describe(block: Any) -> Moments:
    """Compute the moments of a block in float64, piece by piece."""
    flat = np.reshape(block, -1)
    moments = Moments()
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE].astype(np.float64)
        missing = np.isnan(piece)
        nans = int(np.count_nonzero(missing))
        if nans:
            piece = piece[~missing]
        if piece.size:
            mean = float(piece.mean())
            extreme = float(max(piece.max(), -piece.min()))
            piece -= mean
            piece *= (
                piece  # not piece @ piece: BLAS has threads of its own, which fight with dask's
            )
            found = Moments(piece.size, nans, mean, float(piece.sum()), extreme)
        else:
            found = Moments(nans=nans)
        moments.merge(found)
    return moments


def _statistics(variables: Mapping[Any, xr.Variable]) -> dict[str, Moments]:
    """Describe every variable in one computation with one task for each chunk."""
    import dask

    task = dask.delayed(describe, pure=False)
    blocks = {
        str(name): [task(block) for block in variable.data.to_delayed().ravel()]
        for name, variable in variables.items()
    }
    (computed,) = dask.compute(blocks)
    return {name: _merged(parts) for name, parts in computed.items()}


def _merged(parts: list[Moments]) -> Moments:
    total = Moments()
    for part in parts:
        total.merge(part)
    return total


# --- showing -------------------------------------------------------------------------------------


class _Steps:
    """Numbers the steps of the demonstration and shows the time each takes."""

    def __init__(self) -> None:
        self._number = 0

    @contextmanager
    def __call__(self, text: str) -> Iterator[None]:
        self._number += 1
        print(f"\n{self._number}. {text}", flush=True)
        start = perf_counter()
        yield
        print(f"   {perf_counter() - start:.2f} s", flush=True)


def _table(statistics: Mapping[str, Moments]) -> Iterator[str]:
    """Return one line for each family of tensors that differ only by the number of their layer."""
    families: dict[str, list[Moments]] = {}
    for name, moments in statistics.items():
        families.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(moments)
    width = max(map(len, families))
    yield f"{'tensor':{width}}     {'mean':>8} {'std':>16} {'absmax':>8} {'NaN':>3}"
    for family, members in families.items():
        number = f"x{len(members)}" if len(members) > 1 else ""
        all_of_them = _merged(members)
        yield (
            f"{family:{width}} {number:3} {all_of_them.mean:8.1e} {_trend(members):>16} "
            f"{all_of_them.absmax:8.2e} {all_of_them.nans or '':>3}"
        )


def _trend(members: list[Moments]) -> str:
    """Show the spread in the first and the last layer."""
    first, last = f"{members[0].std:.2g}", f"{members[-1].std:.2g}"
    return first if first == last else f"{first} .. {last}"


def _found(statistics: Mapping[str, Moments]) -> Iterator[str]:
    for name, moments in statistics.items():
        if moments.nans:
            yield f"{name} has {moments.nans} NaN"
        if moments.absmax == 0:
            yield f"{name} is zero everywhere"


def main(folder: Path = Path("demo"), *, layers: int = 12, width: int = 1024) -> None:
    """Write the sample checkpoint unless it is there, open it and compute on it."""
    path = folder / f"decoder-{layers}x{width}.zt"
    step = _Steps()
    if path.exists():
        with step(f"{path} is there from an earlier run"):
            pass
    else:
        folder.mkdir(parents=True, exist_ok=True)
        with step(f"Write a sample checkpoint, {path}"):
            write_checkpoint(path, layers=layers, width=width)
    with step("import xarray as xr"):
        import xarray as xr
    with step(f'ds = xr.open_dataset("{path}", engine="ztensor")'):
        ds = xr.open_dataset(path, engine="ztensor")
    with step("ds.ckpt"):
        print(f"\n{ds.ckpt!r}\n")
    size = path.stat().st_size / 1e6
    with step(f"Statistics of all {len(ds.variables)} tensors, {size:.0f} MB, by dask"):
        statistics = _statistics(ds.variables)
    for line in [*_table(statistics), "", *_found(statistics)]:
        print(f"   {line}".rstrip())
    print(f"\n{_NEXT.format(path=path)}", end="")


if __name__ == "__main__":
    main()
