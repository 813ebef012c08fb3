"""One row of a 1 GiB tensor: bytes read from a file, from memory and over HTTP, and the time.

`.values` of a row reads it; `.compute()` makes a graph, and takes what dask takes for any array.
"""

from __future__ import annotations

import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import fsspec
import numpy as np
import xarray as xr
from fsspec.implementations.memory import MemoryFileSystem

from benchmarks.checkpoints import write_ztensor
from benchmarks.measuring import Result, best_of, in_fresh_process, table

SHAPE = [65536, 4096]
ROW = SHAPE[1] * 4
SLACK = 64 * 1024


class RangeHandler(SimpleHTTPRequestHandler):
    """A file server that answers single byte ranges and counts what it sends."""

    sent: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        """Answer a range of the file."""
        path = Path(self.translate_path(self.path))
        size = path.stat().st_size
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        start, stop = int(first), min(int(last) + 1, size)
        self.sent.append(stop - start)  # first: the client goes on as soon as it has the bytes
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        with path.open("rb") as file:
            file.seek(start)
            self.wfile.write(file.read(stop - start))

    def end_headers(self) -> None:
        """Announce ranges."""
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, *args: object) -> None:
        """Ignore the message."""


def pages_touched(path: Path) -> int:
    """Return the bytes that reading a row of a mapped file brings into memory."""
    code = f"""
import xarray as xr
def mapped():
    # Pages of the file that are resident in this process, not in the page cache.
    with open("/proc/self/smaps") as file:
        lines = file.readlines()
    for i, line in enumerate(lines):
        if {str(path)!r} in line:
            rss = next(l for l in lines[i:] if l.startswith("Rss:"))
            return int(rss.split()[1]) * 1024
    return 0
ds = xr.open_dataset({str(path)!r}, engine="ztensor", mmap=True)
data = ds.variables["w"].data
lazy = data.dask.lazy
before = mapped()
row = lazy[1000]
row.sum()
print(json.dumps({{"mapped": mapped() - before, "copied": row.flags.owndata}}))
"""
    result = in_fresh_process(code)
    return int(result["mapped"])


def bytes_read(path: Path) -> int:
    """Return the bytes that reading a row requests from the system."""
    code = f"""
import xarray as xr
def read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
ds = xr.open_dataset({str(path)!r}, engine="ztensor")
lazy = ds.variables["w"].data.dask.lazy
before = read()
lazy[1000].sum()
print(json.dumps({{"read": read() - before}}))
"""
    return int(in_fresh_process(code)["read"])


def run() -> list[Result]:
    """Measure everything."""
    import safetensors.numpy

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "big.zt"
        write_ztensor(path, {"w": SHAPE}, "float32")
        bound = ROW + SLACK
        results = [
            Result("one row, file", bytes_read(path), "bytes", "read", bound),
            Result("one row, mmap=True", pages_touched(path), "bytes", "mapped in", bound),
        ]
        results.append(_from_memory(path, bound))
        results.append(_over_http(folder, bound))
        peer = folder / "big.safetensors"
        safetensors.numpy.save_file({"w": np.zeros(SHAPE, np.float32)}, peer)
        return [*results, *_times(path, peer)]


def _times(path: Path, peer: Path) -> list[Result]:
    """Measure how long the ways to one row take, beside the library and data in memory."""
    import safetensors

    ds = xr.open_dataset(path, engine="ztensor")
    lazy = ds.variables["w"].data.dask.lazy
    held = xr.Dataset({"w": (ds["w"].dims, np.zeros(SHAPE, np.float32))})
    tasks = held.chunk({held["w"].dims[0]: 8192})
    held_row = best_of(lambda: held["w"][1000].values)
    tasks_row = best_of(lambda: tasks["w"][1000].compute(scheduler="threads"))
    with safetensors.safe_open(peer, "numpy") as file:
        library_row = best_of(lambda: file.get_slice("w")[1000])
    library = f"safetensors get_slice, {library_row * 1e6:.0f} µs"
    in_memory = f"the same of a Dataset in memory, {held_row * 1e6:.0f} µs"
    computed = f"the same of a Dataset of dask arrays in memory, {tasks_row * 1e6:.0f} µs"
    row = best_of(lambda: ds["w"][1000].values)
    read = best_of(lambda: np.array(lazy[1000]))
    compute = best_of(lambda: ds["w"][1000].compute(scheduler="threads"))
    return [
        Result("ds['w'][1000].values", row * 1e6, "µs"),
        Result("the same", row / held_row, "x", in_memory),
        Result("the same", row / library_row, "x", library),
        Result("the read in it", read / library_row, "x", library),
        Result("ds['w'][1000].compute()", compute * 1e6, "µs"),
        Result("the same", compute / tasks_row, "x", computed),
        Result("the same", compute / library_row, "x", library),
    ]


def _from_memory(path: Path, bound: int) -> Result:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/big.zt", path.read_bytes())
    sent: list[int] = []

    original = MemoryFileSystem.cat_file

    def counted(self: MemoryFileSystem, path: str, **limits: Any) -> bytes:
        data: bytes = original(self, path, **limits)
        sent.append(len(data))
        return data

    with patch.object(MemoryFileSystem, "cat_file", counted):
        ds = xr.open_dataset("memory://big.zt", engine="ztensor")
        sent.clear()
        ds["w"][1000].compute()
    filesystem.rm("/big.zt")
    return Result("one row, fsspec memory://", sum(sent), "bytes", f"{len(sent)} reads", bound)


def _over_http(folder: Path, bound: int) -> Result:
    handler = partial(RangeHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/big.zt"
        ds = xr.open_dataset(url, engine="ztensor")
        RangeHandler.sent.clear()
        ds["w"][1000].compute()
        sent = list(RangeHandler.sent)
    finally:
        server.shutdown()
        server.server_close()
    return Result("one row, HTTP ranges", sum(sent), "bytes", f"{len(sent)} requests", bound)


if __name__ == "__main__":
    print(table(run()))
