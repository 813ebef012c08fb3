"""A checkpoint of 2 TB: what its graph costs, and how long reading it takes on many workers.

It has no data: a model of 92,000 tensors in 400 shards is described, its Dataset and its graph
are made, and the graph is counted and pickled as a scheduler would get it. The times of a scan are
arithmetic: bytes over bandwidth, or tasks over what the scheduler gets done, whichever is longer.
"""

from __future__ import annotations

import pickle
from itertools import islice
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

import dask.array as da

from benchmarks.checkpoints import mixture_of_experts
from benchmarks.measuring import Result, table
from xckpt.datasets.making import make_dataset
from xckpt.datasets.options import OpenOptions
from xckpt.index import Index, Part, Shard, Tensor, paused_collector
from xckpt.storage.source import ShardedSource, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

TENSORS = 92_000
NBYTES = 2 << 40
SHARDS = 400
WORKERS = (1, 16, 256)
#: Bytes in a second from the store to one worker (10 Gbit/s), and from the store in all (1 Tbit/s).
BANDWIDTH, STORE_BANDWIDTH = 1.25e9, 125e9
#: Seconds of the scheduler for a task; `benchmarks.cluster` measures what it is on a machine.
OVERHEAD = 1e-3

BOUND_OF_BUILD = 30.0  # seconds
BOUND_OF_TASK = 2048  # bytes
SAMPLE = 2000


class AbsentSource(Source):
    """A source without data, for a checkpoint that is only described."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.identity = (size, ("ETag", f'"{hash(name):032x}"'))

    def read_into(self, offsets: Sequence[int], memory: memoryview) -> None:
        """Raise an error, because there are no data."""
        raise FileNotFoundError(self.name)

    def sibling(self, name: str) -> Source:
        """Raise an error, because there are no other files."""
        raise FileNotFoundError(name)


def model() -> tuple[Source, Index]:
    """Describe the checkpoint: a mixture of experts, its tensors scaled to a total size."""
    shapes = [(n, tuple(s)) for n, s in islice(mixture_of_experts(), TENSORS)]
    scale = NBYTES / (2 * sum(prod(shape) for _, shape in shapes))
    names = [f"model-{n:05d}-of-{SHARDS:05d}.zt" for n in range(SHARDS)]
    ends = dict.fromkeys(names, 0)
    tensors = {}
    for number, (name, shape) in enumerate(shapes):
        shard = names[number * SHARDS // len(shapes)]
        grown = (max(1, round(shape[0] * scale)), *shape[1:])
        nbytes = 2 * prod(grown)
        part = Part("bfloat16", grown, ends[shard], nbytes, shard=shard)
        tensors[name] = Tensor(name, "bfloat16", grown, {"data": part})
        ends[shard] += nbytes
    files = {name: AbsentSource(f"s3://bucket/run/{name}", ends[name]) for name in names}
    shards = {name: Shard(ends[name], None, (name,)) for name in names}
    source = ShardedSource("s3://bucket/run/model-*.zt", files)
    return source, Index("ztensor", "2", tensors, source=source.name, shards=shards)


def arrays(ds: xr.Dataset) -> list[Any]:
    """Return the dask arrays of a Dataset. A walk over ``ds.data_vars`` would be quadratic."""
    return [v.data for v in ds.variables.values() if isinstance(v.data, da.Array)]


def graph(ds: xr.Dataset) -> tuple[int, int, float]:
    """Return the number of tasks, the bytes of a task on the wire, and the seconds to make all."""
    layers = [array.dask.layers[array.name] for array in arrays(ds)]
    start = perf_counter()
    tasks = 0
    sizes = []
    step = max(1, sum(map(len, layers)) // SAMPLE)
    for layer in layers:
        for key in layer.get_output_keys():
            task = layer[key]
            if tasks % step == 0:
                sizes.append(len(pickle.dumps(task)))
            tasks += 1
    return tasks, max(sizes), perf_counter() - start


def projected(workers: int, nbytes: int, tasks: int) -> float:
    """Return the lower bound of the seconds to read everything."""
    transfer = nbytes / min(workers * BANDWIDTH, STORE_BANDWIDTH)
    return max(transfer, tasks * OVERHEAD)


def run() -> list[Result]:
    """Measure everything."""
    source, index = model()
    nbytes = sum(tensor.nbytes for tensor in index.tensors.values())
    what = f"{len(index.tensors):,} tensors, {nbytes / 2**40:.1f} TiB"
    results = []
    for stack in (False, True):
        kind = "stacked" if stack else "flat"
        start = perf_counter()
        with paused_collector():
            ds = make_dataset(source, index, OpenOptions(stack=stack))
        built = perf_counter() - start
        pickled = len(pickle.dumps(arrays(ds)))
        tasks, size, made = graph(ds)
        results += [
            Result(f"{kind}: Dataset of {what}", built, "s", "", BOUND_OF_BUILD),
            Result(f"{kind}: tasks", tasks, "tasks", f"{made:.1f} s to make all"),
            # A chunk of a stack may be hundreds of small tensors, each with its place in a file.
            Result(
                f"{kind}: largest task of {SAMPLE}",
                size,
                "bytes",
                "small tensors share tasks" if stack else "",
                None if stack else BOUND_OF_TASK,
            ),
            Result(f"{kind}: graph as it is sent", pickled / tasks, "bytes per task"),
        ]
        if not stack:
            for workers in WORKERS:
                limits = f"{BANDWIDTH / 1e9} GB/s each, {STORE_BANDWIDTH / 1e9:.0f} GB/s in all"
                seconds = projected(workers, nbytes, tasks)
                results.append(
                    Result(f"scan by {workers} workers, projected", seconds, "s", limits)
                )
    return results


if __name__ == "__main__":
    print(table(run()))
