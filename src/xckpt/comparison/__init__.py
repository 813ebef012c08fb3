"""Differences between the tensors of two checkpoints: `compare`, and explanations of them.

May import statistics, scan, and whatever these may; not health. Read `comparing` first: from two
objects to a Dataset of measures. `matching` decides which tensors belong together, `pairs` reads
two of them in step, `measures` and `cells` add up their differences, `explaining` finds causes.
"""

from xckpt.interrupts import uninterrupted

# Importing numba takes long, and an interrupt in the middle would break later imports.
with uninterrupted():
    from xckpt.comparison.comparing import compare
    from xckpt.comparison.measures import MEASURES

__all__ = ["MEASURES", "compare"]
