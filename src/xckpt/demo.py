"""What `make demo` shows: a sample checkpoint written, opened, summarised and computed on."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

__all__ = ["main"]

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

_FINDINGS = {
    "nan": "has {:.0f} NaN",
    "all_zero": "is zero everywhere",
    "dead_rows": "has {:.0f} rows of zeros",
}


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


def _lines(frame: pd.DataFrame) -> Iterator[str]:
    """Write one line for each family of tensors that differ only by the number of their layer."""
    families: dict[str, list[str]] = {}
    for name in frame.index:
        families.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    width = max(map(len, families))
    yield f"{'tensor':{width}}     {'mean':>8} {'std':>16} {'absmax':>8} {'NaN':>3}"
    for family, names in families.items():
        names.sort(key=lambda name: [*map(int, re.findall(r"\.(\d+)\.", name))])
        members = frame.loc[names]
        number = f"x{len(names)}" if len(names) > 1 else ""
        # In the first and the last layer.
        ends = dict.fromkeys(f"{members['std'].iloc[at]:.2g}" for at in (0, -1))
        yield (
            f"{family:{width}} {number:3} {members['mean'].mean():8.1e} {' .. '.join(ends):>16} "
            f"{members['absmax'].max():8.2e} {int(members['nan'].sum()) or '':>3}"
        )


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
    with step("import xarray as xr; import xckpt"):
        import xarray as xr

        import xckpt
    with step(f'ds = xr.open_dataset("{path}", engine="ztensor")'):
        ds = xr.open_dataset(path, engine="ztensor")
    with step("ds.ckpt"):
        print(f"\n{ds.ckpt!r}\n")
    size = path.stat().st_size / 1e6
    with step(f"xckpt.stats(ds): statistics of all {len(ds)} tensors, {size:.0f} MB, in one pass"):
        stats = xckpt.stats(ds, cache=False)
    for line in _lines(xckpt.table(stats)):
        print(f"   {line}".rstrip())
    print()
    for tensor, rule, value, *_ in xckpt.findings(stats).itertuples(index=False):
        print(f"   {tensor} {_FINDINGS.get(rule, rule).format(value)}")
    print(f"\n{_NEXT.format(path=path)}", end="")


if __name__ == "__main__":
    main()
