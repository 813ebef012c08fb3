"""Differences between the tensors of two checkpoints: `compare`, and explanations of them.

The room may import statistics, scan and everything below them, but not health. Read `comparing`
first: it turns two objects into a Dataset of measures, which `variables` lays out. `match` pairs
tensors, with `sketches` of their numbers and with their `names`. `relate` finds the steps between
their elements that formats state (`arrangements`), `pairs` chooses the order in which two are read,
`measure` and `cells` sum up their differences, and `explaining` searches for causes among
`relations`. `classify` knows the places of tensors in both models, and the causes that these admit.
"""

from xckpt.comparison.comparing import compare
from xckpt.comparison.measure import MEASURES
from xckpt.comparison.merging import by

__all__ = ["MEASURES", "by", "compare"]
