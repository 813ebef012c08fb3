"""A checkpoint on a web server: everything that reads all of it, beside the bare requests.

24 tensors of 16 MiB and 480 of 8 KiB; each connection has 100 MB/s. The floor is aiohttp with 32
requests of 8 MiB at a time, its body thrown away. It and the scans take turns, and the fastest of
each counts. Rows over S3 read the same file from the same server, as an object.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import numpy as np
import xarray as xr

import xckpt
from benchmarks.measuring import Result, in_fresh_process, table
from benchmarks.web import Counts, Server, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LINES = ((0.0, 0.0), (0.02, 100e6), (0.1, 100e6))
REQUEST = 8 << 20
IN_FLIGHT = 32
BUCKET = "bucket"
ROUNDS = 6
# Times the floor: 0.6 and 0.5 of its speed.
BOUND_OF_STATS, BOUND = 1 / 0.6, 2.0
MIB = 1 << 20


def write(path: Path) -> None:
    """Write a checkpoint with digests, so that verifying reads it."""
    rng = np.random.default_rng(0)
    large = {f"layers.{n}.w": (("a", "b"), rng.normal(size=(2048, 2048))) for n in range(24)}
    small = {f"layers.{n // 20}.b.{n % 20}": ("c", rng.normal(size=2048)) for n in range(480)}
    ds = xr.Dataset({**large, **small}).astype("float32")
    xckpt.save(ds, path, encoding={str(name): {"digest": "crc32c"} for name in ds.variables})


async def bare_requests(url: str, size: int) -> None:
    """Request all of a file."""
    turns = asyncio.Semaphore(IN_FLIGHT)
    connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def request(start: int) -> None:
            headers = {"Range": f"bytes={start}-{min(start + REQUEST, size) - 1}"}
            async with turns, session.get(url, headers=headers) as answer:
                async for _ in answer.content.iter_any():
                    pass

        await asyncio.gather(*map(request, range(0, size, REQUEST)))


def request_all(url: str, size: int) -> None:
    """Request a whole file, on a separate event loop."""
    asyncio.run(bare_requests(url, size))


def scans(url: str, path: Path) -> dict[str, Callable[[], Any]]:
    """Return the functions that read a whole checkpoint, by name."""
    copy = path.with_suffix(".safetensors")
    quiet: dict[str, Any] = {"cache": False, "progress": False}
    return {
        "stats": partial(xckpt.stats, url, **quiet),
        "compute": lambda: xr.open_dataset(url, engine="ztensor").compute(),
        "convert": lambda: xckpt.convert(url, copy, overwrite=True, progress=False),
        "verify": partial(xckpt.verify, url, progress=False),
        "compare with a local copy": partial(xckpt.compare, url, path, **quiet),
    }


def scans_over_s3(server: Server) -> dict[str, Callable[[], Any]]:
    """Return the functions that read a whole object, by name."""
    url = f"s3://{BUCKET}/m.zt"
    endpoint = {"endpoint_url": server.url, "region_name": "us-east-1"}
    options = {"key": "key", "secret": "secret", "client_kwargs": endpoint}
    quiet: dict[str, Any] = {"cache": False, "progress": False, "storage_options": options}
    return {
        "stats over S3": partial(xckpt.stats, url, **quiet),
        "compute over S3": lambda: xr.open_dataset(
            url, engine="ztensor", storage_options=options
        ).compute(),
    }


class Fastest(NamedTuple):
    """The fastest of several calls: seconds, processor seconds, and requests."""

    took: float
    processor: float
    counts: Counts


def fastest_of_each(calls: Mapping[str, Callable[[], Any]], server: Server) -> dict[str, Fastest]:
    """Make calls in turn, so that all of them run under the same load."""
    fastest: dict[str, Fastest] = {}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            gc.collect()
            server.counts()
            start, processor = time.perf_counter(), time.process_time()
            call()
            took = time.perf_counter() - start
            current = Fastest(took, time.process_time() - processor, server.counts())
            fastest[name] = min(fastest.get(name, current), current)
    return fastest


def on_line(server: Server, path: Path, latency: float) -> list[Result]:
    """Measure everything on one line."""
    url, size = f"{server.url}/{BUCKET}/m.zt", path.stat().st_size
    line = f"{latency * 1e3:.0f} ms to the first byte"
    bare = partial(request_all, url, size)
    calls: dict[str, Callable[[], Any]] = {"bare": bare, **scans(url, path)}
    calls |= scans_over_s3(server) if latency else {}
    fastest = fastest_of_each(calls, server)
    floor = fastest.pop("bare")
    results = []
    for name, result in fastest.items():
        context = f"bare requests, {size / floor.took / 1e6:.0f} MB/s; processor time "
        context += f"{result.processor:.2f} s, of the bare ones {floor.processor:.2f}; "
        context += f"{result.counts.at_once} at once, {result.counts.nbytes / size:.2f} x its bytes"
        bound = BOUND_OF_STATS if name.startswith("stats") else BOUND
        ratio = result.took / floor.took
        results.append(Result(f"{line}: {name}", ratio, "x", context, bound if latency else None))
    ds = xr.open_dataset(url, engine="ztensor")
    server.counts()
    ds["layers.3.w"][5].compute()
    row = server.counts()
    context = f"{row.requests} requests"
    return [*results, Result(f"{line}: one row", row.nbytes, "bytes", context, 8192)]


def run() -> list[Result]:
    """Measure on all lines."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / BUCKET / "m.zt"
        path.parent.mkdir()
        write(path)
        for scan in scans(str(path), path).values():
            scan()  # compiled, and in the page cache
        for latency, rate in LINES:
            with serving(Path(folder), latency, rate) as server:
                results += on_line(server, path, latency)
        with serving(Path(folder), 0.1, 100e6) as server:
            code = f"""
import xckpt, xckpt.statistics.computing, numba, obstore.store
forget_peak()
watched = watch()
xckpt.stats({f"{server.url}/{BUCKET}/m.zt"!r}, cache=False, progress=False)
print(json.dumps({{"most": watched()}}))
"""
            most = in_fresh_process(code)["most"]
            results.append(
                Result("stats: anonymous memory", most / MIB, "MiB", "above the imports", 500)
            )
    return results


if __name__ == "__main__":
    print(table(run()))
