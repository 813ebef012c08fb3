"""A realistic sample checkpoint, a small decoder in a zTensor 1.0 file, and the `make demo` script.

Like real checkpoints, it has repeated modules, mixed element types, an int8 projection with scales,
zstd streams, sparse updates, and digests. Its values have irregularities to discover: spreads that
drift with depth, a channel of outliers, a few NaNs, and an untrained bias.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.elements import stored_dtype

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import pandas as pd
    from numpy.typing import NDArray

_VOCABULARY_PER_WIDTH = 16
_HEADS_PER_KEY_HEAD = 4
_INIT_STD = 0.02


class _SampleTensor(NamedTuple):
    """One tensor of the model and the distribution its elements are drawn from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    layout: str = "dense"
    nans: int = 0
    outlier_column: int | None = None


def write_checkpoint(
    path: str | os.PathLike[str], *, layers: int = 12, width: int = 1024, seed: int = 0
) -> Path:
    """Write a sample checkpoint of a decoder, about 300 MB by default.

    Parameters
    ----------
    path : str or os.PathLike
        Path of the file; an existing file is replaced.
    layers : int, default 12
        Number of decoder layers.
    width : int, default 1024
        Size of the hidden state: a multiple of 4, at least 8.
    seed : int, default 0
        Seed of the random numbers: equal arguments make equal files.

    Returns
    -------
    pathlib.Path
        Path of the file.

    Raises
    ------
    ValueError
        If `layers` or `width` is too small, or `width` is not a multiple of 4.

    Examples
    --------
    >>> from xckpt.sample import write_checkpoint
    >>> write_checkpoint("tiny.zt", layers=2, width=64).name
    'tiny.zt'
    """
    import xarray as xr

    from xckpt.writing import save

    if layers < 1:
        raise ValueError(f"layers must be at least 1, not {layers}")
    if width < 2 * _HEADS_PER_KEY_HEAD or width % _HEADS_PER_KEY_HEAD:
        raise ValueError(f"width must be a multiple of 4 and at least 8, not {width}")
    variables = {}
    for number, weight in enumerate(_weights(layers, width)):
        # One seed per tensor, so that adding a tensor does not change the others.
        for name, array in _arrays(weight, [seed, number]):
            # xckpt treats dimensions with such names as unnamed.
            dims = [f"d{size}_{axis}" for axis, size in enumerate(array.shape)]
            variables[name] = xr.Variable(dims, array, encoding={"layout": weight.layout})
    attrs = {
        "license": "CC0-1.0",
        "description": "Random numbers in the shape of a decoder, to try tools on",
        "framework": "PyTorch",
        "model_name": f"sample-decoder-{layers}x{width}",
        "generator": "xckpt sample",
    }
    compressed = {"compression": "zstd", "level": 1}
    encoding: dict[str, dict[str, Any]] = {"*": {"digest": "crc32c"}}
    encoding |= {f"*.{name}_proj.weight": compressed for name in ("k", "v", "down")}
    save(xr.Dataset(variables, attrs=attrs), path, "ztensor", encoding=encoding, overwrite=True)
    return Path(path)


def _weights(layers: int, width: int) -> Iterator[_SampleTensor]:
    vocabulary = (_VOCABULARY_PER_WIDTH * width, width)
    yield _SampleTensor("model.embed_tokens.weight", "float16", vocabulary, _INIT_STD)
    yield _SampleTensor(
        "model.embed_tokens.delta", "float32", vocabulary, 1e-3, layout="sparse_csr"
    )
    for layer in range(layers):
        yield from _layer_weights(layer, layers, width)
    yield _SampleTensor("model.norm.weight", "float32", (width,), 0.2, mean=2.5)
    yield _SampleTensor("lm_head.weight", "float16", vocabulary, _INIT_STD)
    yield _SampleTensor("lm_head.delta", "float32", vocabulary, 1e-3, layout="sparse_coo")


def _layer_weights(layer: int, layers: int, width: int) -> Iterator[_SampleTensor]:
    """Yield a decoder layer: queries and keys spread with depth, outputs shrink, norms grow."""
    depth = layer / layers
    keys = width // _HEADS_PER_KEY_HEAD
    hidden = 11 * width // 4
    spread = _INIT_STD * (1 + depth)
    residual = _INIT_STD / sqrt(2 * layers)
    untrained = layer == layers // 3
    broken = layer == layers // 2

    def weight(
        name: str, dtype: str, shape: tuple[int, ...], std: float, **more: Any
    ) -> _SampleTensor:
        return _SampleTensor(f"model.layers.{layer}.{name}", dtype, shape, std, **more)

    yield weight("input_layernorm.weight", "float32", (width,), 0.05, mean=0.4 + depth)
    yield weight("self_attn.q_proj.weight", "bfloat16", (width, width), spread)
    yield weight("self_attn.q_proj.bias", "float32", (width,), 0.0 if untrained else 0.1)
    yield weight("self_attn.k_proj.weight", "bfloat16", (keys, width), spread)
    yield weight("self_attn.v_proj.weight", "bfloat16", (keys, width), _INIT_STD)
    yield weight("self_attn.o_proj.weight", "bfloat16", (width, width), residual)
    yield weight("post_attention_layernorm.weight", "float32", (width,), 0.05, mean=0.6 + depth)
    yield weight(
        "mlp.gate_proj.weight", "bfloat16", (hidden, width), _INIT_STD, outlier_column=width // 3
    )
    yield weight("mlp.up_proj.weight", "bfloat16", (hidden, width), _INIT_STD, nans=7 * broken)
    yield weight("mlp.down_proj.weight", "int8", (width, hidden), residual)


def _arrays(weight: _SampleTensor, seed: list[int]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a tensor; dense arrays are drawn when they are written."""
    import dask.array as da
    from dask import delayed

    if weight.layout != "dense":
        # An update of few rows, as fine-tuning leaves it; every touched row has all columns.
        rng, values = np.random.default_rng(seed), np.zeros(weight.shape, np.float32)
        rows = np.sort(rng.choice(len(values), max(1, len(values) // 64), replace=False))
        values[rows] = _draw(weight, rng, (rows.size, weight.shape[1]))
        yield weight.name, values
        return
    drawn = delayed(_draw)(weight, seed, weight.shape)
    if weight.dtype == "int8":
        codes, scales = delayed(_quantized, nout=2)(drawn)
        yield weight.name, da.from_delayed(codes, weight.shape, "int8")
        yield f"{weight.name}_scale", da.from_delayed(scales, (weight.shape[0], 1), "float32")
    else:
        dtype = stored_dtype(weight.dtype)
        yield weight.name, da.from_delayed(drawn.astype(dtype), weight.shape, dtype)


def _draw(
    weight: _SampleTensor, seed: list[int] | np.random.Generator, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape, np.float32)
    values *= np.float32(weight.std)
    values += np.float32(weight.mean)
    if weight.outlier_column is not None:
        values[:, weight.outlier_column] *= 20
    if weight.nans:
        values.reshape(-1)[rng.choice(values.size, weight.nans, replace=False)] = np.nan
    return values


def _quantized(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round to int8 with one scale for each row."""
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(values / scales).astype(np.int8), scales


# --- the demonstration ---------------------------------------------------------------------------

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
    from argparse import ArgumentParser

    about = "Write a sample checkpoint of 300 MB to the folder demo, open it and compute on it."
    ArgumentParser("python -m xckpt.sample", description=about).parse_args()
    main()
