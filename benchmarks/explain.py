"""Explained comparisons with every cause: time beside plain comparisons, and memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from benchmarks.checkpoints import WRITERS
from benchmarks.measuring import Result, best_of, in_fresh_process, table
from xckpt.comparison import compare
from xckpt.opening import read_index
from xckpt.statistics import table as frame

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = np.ndarray[Any, np.dtype[Any]]
Made = dict[str, Array]

GIB = 1 << 30
F32 = np.float32
#: Rows and columns of most tensors; 2 GiB in all.
WIDTH = 5376
HEAD = 128
#: Rows and columns of a tensor in a sparse file, 1 GiB, and of its corner that is not zero.
SPARSE, CORNER = 16384, 1024


#: Of causes that explain nothing.
_OUTCOMES = dict.fromkeys(
    ("offset", "scaled", "rows_permuted", "pruned", "low_rank", "unknown", "cut"), "changed"
) | dict.fromkeys(("only_a", "only_b"), "unmatched")


def _interleaved(rows: Array) -> Array:
    """Permute rows as for rotary embeddings."""
    heads = rows.reshape(-1, 2, HEAD // 2, rows.shape[1])
    permuted: Array = heads.swapaxes(1, 2).reshape(rows.shape)
    return permuted


def _quantised(values: Array) -> Array:
    blocks = values.reshape(-1, 32)
    low = blocks.min(axis=1, keepdims=True)
    step = (blocks.max(axis=1, keepdims=True) - low) / 15
    rounded: Array = np.rint((blocks - low) / step) * step + low
    return rounded.astype(F32).reshape(values.shape)


def _in_place(new: Any, n: int) -> Iterator[tuple[str, Array, Array]]:
    """Return tensors of `n` rows and columns, and tensors of the same shape derived from them."""
    rng = np.random.default_rng(0)
    yield "rounded", (x := new(n, n)), x.astype(ml_dtypes.bfloat16).astype(F32)
    yield "rounded.float16", (x := new(n, n)), x.astype(np.float16).astype(F32)
    yield "scaled", (x := new(n, n)), x * F32(0.3)
    yield "rows_permuted", (x := new(n, n)), x[rng.permutation(n)]
    yield "rope_permuted.q_proj", (x := new(n, n)), _interleaved(x)
    yield "pruned", (x := new(n, n)), np.where(rng.random((n, n)) < 0.5, F32(0), x)
    yield "low_rank", (x := new(n, n)), x + new(n, 8) @ new(8, n)
    yield "quantised", (x := new(n, n)), _quantised(x)
    yield "unknown", new(n, n), new(n, n)
    yield "unknown.tuned", (x := new(n, n)), x + F32(0.01) * new(n, n)


def _every_cause(n: int) -> Iterator[tuple[Made, Made]]:
    """Return the tensors of both sides for each cause."""
    rng = np.random.default_rng(0)

    def new(rows: int, columns: int = n) -> Array:
        return rng.standard_normal((rows, columns), F32) * F32(0.02)

    for name, x, y in _in_place(new, n):
        yield {name: x}, {name: y}
    # A square matrix that is transposed would be a fault, as the other square ones are not.
    yield {"transposed": (x := new(n // 2))}, {"transposed": x.T}
    yield {"equal": (x := new(n))}, {"equal": x}
    yield {"offset": (x := new(n))}, {"offset": x + F32(1)}
    yield {"renamed.a": (x := new(n))}, {"renamed.b": x}
    yield {"padded": (x := new(n // 8 * 7))}, {"padded": np.pad(x, ((0, n // 8), (0, 0)))}
    yield {"cut": (x := new(n))}, {"cut": x[: -n // 8]}
    yield {"split": (x := new(n // 4 * 5))}, {"split.0": x[:n], "split.1": x[n:]}
    parts = {f"fused.{role}": new(n // 2 if role == "q" else n // 4) for role in "qkv"}
    yield parts, {"fused": np.concatenate(list(parts.values()))}
    yield {"only_a": new(n // 2)}, {"only_b": new(n // 4 * 3)}


def _write(folder: Path, n: int) -> tuple[Path, Path, Path]:
    """Write both sides, and the bytes of the second one under the names of the first."""
    # The same with few numbers has the names and, in small, the shapes.
    shapes = [
        {name: values.shape for tensors in side for name, values in tensors.items()}
        for side in zip(*_every_cause(HEAD), strict=True)
    ]
    paths = folder / "a.safetensors", folder / "b.safetensors", folder / "same-names.safetensors"
    for path, file_shapes in zip(paths, (*shapes, shapes[0]), strict=True):
        scaled_shapes = {
            name: [size * n // HEAD for size in shape] for name, shape in file_shapes.items()
        }
        WRITERS["safetensors"](path, scaled_shapes)
    indexes = [read_index(path) for path in paths[:2]]
    files = [path.open("r+b") for path in paths]
    for sides in _every_cause(n):
        for tensors, index, file in zip(sides, indexes, files[:2], strict=True):
            for name, values in tensors.items():
                file.seek(index.tensors[name].parts["data"].offset)
                file.write(np.ascontiguousarray(values).data)
    begin, second_begin = (min(t.parts["data"].offset for t in i.tensors.values()) for i in indexes)
    files[1].seek(second_begin)
    files[2].seek(begin)
    remaining = paths[0].stat().st_size - begin
    while remaining:
        data = files[1].read(min(remaining, 1 << 24))
        if not data:
            files[1].seek(second_begin)
        remaining -= files[2].write(data)
    for file in files:
        file.close()
    return paths


def cost(folder: Path) -> list[Result]:
    """Measure 2 GiB on either side with every cause."""
    ours, theirs, same_names = _write(folder, WIDTH)
    plain = best_of(lambda: compare(ours, theirs, progress=False, cache=False), 3)
    full_read = best_of(lambda: compare(ours, same_names, progress=False, cache=False), 3)
    comparison = compare(ours, theirs, explain=True, progress=False, cache=False)
    for name, variable in comparison.data_vars.items():
        cause = str(name).partition(".")[0]
        causes, outcome = variable.attrs["cause"], variable.attrs["outcome"]
        is_expected = outcome == _OUTCOMES.get(cause, "explained") and cause in causes.split("+")
        if not is_expected:
            raise AssertionError(f"{name} is {causes}, {outcome}")
    seconds = best_of(lambda: compare(ours, theirs, explain=True, progress=False, cache=False), 3)
    for path in (ours, theirs, same_names):
        path.unlink()
    title = "2 GiB of float32 with 2 GiB of it in which there is every cause, explained"
    read = "a comparison that reads all bytes of both, {:.2f} s"
    half = "a plain comparison of the same files, which reads {:.0%} of them, {:.2f} s"
    rows = frame(comparison)
    share = rows["count"][rows["status"].isin(["same", "changed"])].sum() / rows["count"].sum()
    return [
        Result(title, seconds / full_read, "x", read.format(full_read), 2.5),
        Result("the same", seconds / plain, "x", half.format(share, plain)),
    ]


def memory(folder: Path, gib: int = 16) -> list[Result]:
    """Measure the peak of anonymous memory for sparse files, whose tensors have a corner only."""
    paths = [folder / "sparse-a.safetensors", folder / "sparse-b.safetensors"]
    rng = np.random.default_rng(1)

    def new(rows: int, columns: int) -> Array:
        return rng.standard_normal((rows, columns), F32) * F32(0.02)

    pairs: list[tuple[str, Array, Array]] = []
    while len(pairs) < gib:
        pairs += [
            (f"{len(pairs) + k}.{n}", x, y) for k, (n, x, y) in enumerate(_in_place(new, CORNER))
        ]
    for side, path in enumerate(paths):
        WRITERS["safetensors"](path, {pair[0]: [SPARSE, SPARSE] for pair in pairs[:gib]})
        index = read_index(path)
        with path.open("r+b") as file:
            for name, *sides in pairs[:gib]:
                start = index.tensors[name].parts["data"].offset
                for row, values in enumerate(sides[side]):
                    file.seek(start + row * SPARSE * 4)
                    file.write(values.tobytes())
    measured = in_fresh_process(f"""
import time
import xarray, dask.array, tqdm.auto, xckpt.comparison.explaining, xckpt.storage, numba
most = watch()
start = time.perf_counter(), time.process_time()
found = xckpt.compare(*{[str(path) for path in paths]!r}, explain=True, cache=False, progress=False)
causes = {{str(n): v.attrs["cause"] for n, v in found.data_vars.items()}}
took = time.perf_counter() - start[0], time.process_time() - start[1]
print(json.dumps({{"peak": most(), "causes": causes, "took": took}}))
""")
    for name, causes in measured["causes"].items():
        if name.split(".")[1] not in causes.split("+"):
            raise AssertionError(f"{name} is {causes}")
    for path in paths:
        path.unlink()
    title = f"{gib} GiB of float32 with {gib} GiB of it, sparse files: anonymous memory"
    took = "above the imports, at its peak; {:.0f} s, of which {:.0f} s of processor time"
    return [Result(title, measured["peak"] / (1 << 20), "MiB", took.format(*measured["took"]), 500)]


def run() -> list[Result]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as name:
        return [*cost(Path(name)), *memory(Path(name))]


if __name__ == "__main__":
    print(table(run()))
