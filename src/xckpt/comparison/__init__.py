"""Differences between the tensors of two checkpoints: `compare`, and explanations of them.

The room may import statistics, scan and everything below them, but not health. Read `comparing`
first: it turns two objects into a Dataset of measures. `matching` pairs tensors, `pairs` chooses
the order in which two are read (`arrangements`), `measures` and `cells` sum up their differences,
`explaining` finds causes.
"""

from xckpt.comparison.comparing import compare
from xckpt.comparison.measure import MEASURES

__all__ = ["MEASURES", "compare"]
