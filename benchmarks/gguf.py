"""GGUF beside the package gguf: decoding on one thread (CPU time), statistics, a vocabulary."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import xarray as xr

from benchmarks.checkpoints import write_ztensor
from benchmarks.measuring import Result, best_of, table
from xckpt.elements import BLOCK_TYPES
from xckpt.statistics import stats

if TYPE_CHECKING:
    from collections.abc import Callable

ROW = 4096
DECODED = 1 << 25  # bytes of float32
SCANNED = 1 << 30  # bytes of the file
TOKENS = 128_000
# The largest ratio of our time to the time of the package `gguf`.
BOUNDS = dict.fromkeys(("q4_0", "q8_0", "q4_k", "q6_k"), 1 / 4)
BOUNDS |= {name: 1 / 10 for name in BLOCK_TYPES if name.startswith("iq")}
# The package does not decode them.
LEFT_OUT = {"q8_1", "q8_k", "q1_0", "q2_0"}


def cpu_time(function: Callable[[], Any], repeats: int) -> float:
    """Return the shortest processor time of this thread in several calls, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
    return min(times)


def blocks_of(name: str, rows: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return rows of blocks with random codes and small scales."""
    block = BLOCK_TYPES[name]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (rows, ROW // block.size, block.nbytes), np.uint8)
    # A byte that may be the upper one of a float16 has no large exponent.
    for offset in (1, 3, 53, 65, 81, 83, 109, 209):
        if offset < block.nbytes:
            blocks[..., offset] &= 0x2F
    return blocks.reshape(rows, -1)


def write(path: Path, name: str, rows: int, times: int = 1) -> None:
    """Write a tensor of blocks that repeats its rows a few times."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    writer = gguf.GGUFWriter(path, "llama")
    blocks = blocks_of(name, rows)
    shape = (rows * times, blocks.shape[1])
    writer.add_tensor_info("w", shape, blocks.dtype, blocks.nbytes * times, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % 32))
        for _ in range(times):
            file.write(blocks.tobytes())
        file.write(bytes(-file.tell() % 32))


def decoding(folder: Path) -> list[Result]:
    """Decode each type from a file in the page cache, into reused memory.

    The package allocates its arrays; processor times are compared.
    """
    results = []
    out = np.empty((DECODED // 4 // ROW, ROW), np.float32)
    for name in BLOCK_TYPES:
        if name in LEFT_OUT:
            continue
        path = folder / f"{name}.gguf"
        write(path, name, DECODED // 4 // ROW)
        lazy = xr.open_dataset(path, engine="gguf").variables["w"].data.dask.lazy
        tensor = gguf.GGUFReader(path).tensors[0]
        with np.errstate(all="ignore"):
            decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if not np.array_equal(lazy[...], decoded, equal_nan=True):
                raise ValueError(f"{name}: values differ")
            decode = partial(gguf.quants.dequantize, tensor.data, tensor.tensor_type)
            theirs = cpu_time(decode, 3)
        ours = cpu_time(partial(lazy.read_into, out, ...), 5)
        speeds = f"{DECODED / ours / 1e9:.1f} GB/s of float32, gguf {DECODED / theirs / 1e9:.2f}"
        results.append(Result(f"decode {name}", ours / theirs, "x", speeds, BOUNDS.get(name)))
        path.unlink()
    return results


def scanning(folder: Path) -> list[Result]:
    """Compute statistics of 1 GiB of blocks, and of 1 GiB of the decoded float32."""
    block = BLOCK_TYPES["q4_k"]
    row_nbytes = ROW // block.size * block.nbytes
    rows = (1 << 24) // row_nbytes
    times = SCANNED // (rows * row_nbytes)
    blocks, plain = folder / "q4_k.gguf", folder / "float32.zt"
    write(blocks, "q4_k", rows, times)
    values = xr.open_dataset(blocks, engine="gguf")["w"][: SCANNED // 4 // ROW].values
    write_ztensor(plain, {"w": [*values.shape]}, "float32")
    with plain.open("r+b") as file:
        file.seek(64)
        file.write(values.tobytes())
    blocks_time = best_of(lambda: stats(blocks, progress=False, cache=False), 2)
    plain_time = best_of(lambda: stats(plain, progress=False, cache=False), 2)
    count = rows * times * ROW
    ours, floor = blocks_time / count, plain_time / values.size
    against = f"as many float32, {4 / floor / 1e9:.1f} GB/s"
    blocks.unlink()
    plain.unlink()
    return [
        Result("statistics of 1 GiB of q4_k", 4 / ours / 1e9, "GB/s", "of float32"),
        Result("the same", ours / floor, "x", against),
    ]


def vocabulary(folder: Path) -> list[Result]:
    """Open a file with many tokens."""
    path = folder / "tokens.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{number}" for number in range(TOKENS)])
    writer.add_token_scores([float(number) for number in range(TOKENS)])
    writer.add_tensor("output_norm.weight", np.zeros(ROW, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = best_of(lambda: xr.open_dataset(path, engine="gguf"))
    theirs = best_of(lambda: gguf.GGUFReader(path), 2)
    return [
        Result(f"open {TOKENS:,} tokens", ours * 1000, "ms", "open_dataset", 100),
        Result("the same", ours / theirs, "x", f"gguf.GGUFReader, {theirs:.1f} s"),
    ]


def run() -> list[Result]:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [*decoding(folder), *scanning(folder), *vocabulary(folder)]


if __name__ == "__main__":
    print(table(run()))
