"""One pass over the elements of many tensors, on threads or on a cluster, with a cache of results.

May import arrays, labels, datasets, opening and storage; no format, and none of the rooms above:
statistics, comparison, health. Read `scanning` first, from `gather` down; then `readers` (a tensor
as a flat sequence of elements) and `accumulators` (what a pass finds in it). `entries` says which
tensors an object has, and lays results out like it.
"""

from xckpt.interrupts import uninterrupted

# Numba and what it compiles are large.
with uninterrupted():
    from xckpt.scan.kinds import require_numbers

__all__ = ["require_numbers"]
