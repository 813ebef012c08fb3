"""How arrays are cut into chunks: along the slowest axis, so that each is one run of bytes."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["Chunks", "chunks_along_slowest", "target_nbytes"]

# Sparse tensors claim any shape in a few bytes; a chunk of a real file is no smaller for this.
_MOST_CHUNKS = 1 << 17

Chunks = tuple[tuple[int, ...], ...]


def target_nbytes() -> int:
    """Return the wanted size of a chunk in bytes: dask's ``array.chunk-size``."""
    import dask
    from dask.utils import parse_bytes

    return max(1, int(parse_bytes(dask.config.get("array.chunk-size", "128MiB"))))


@lru_cache(maxsize=4096)
def chunks_along_slowest(
    shape: tuple[int, ...], itemsize: int, target: int, order: str = "C"
) -> Chunks:
    """Cut a shape into chunks of about `target` bytes, each contiguous in memory order."""
    if order == "F":
        return chunks_along_slowest(shape[::-1], itemsize, target)[::-1]
    chunks: list[tuple[int, ...]] = []
    rest = itemsize
    for length in shape:
        rest *= length
    target = max(target, rest // _MOST_CHUNKS)
    if rest <= target:
        return tuple((length,) for length in shape)
    for length in shape:
        rest //= length
        step = min(length, max(1, target // rest)) if rest else length
        whole, left = divmod(length, step)
        chunks.append((step,) * whole + ((left,) if left else ()))
        # Once a chunk holds several positions of an axis, the faster axes must stay whole.
        if step > 1:
            target = rest
    return tuple(chunks)
