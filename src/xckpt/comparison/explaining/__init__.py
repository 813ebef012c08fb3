"""Explanations of differences between tensors, for `compare(explain=True)`.

Read `passes` first: the passes over what is not explained yet, in their order. `search` suggests
arrangements because of `sketches`, `arrangements` are views of the same numbers in other places,
`verification` tests relations on every element, and `causes` are these relations. The outcome of a
tensor is decided in `outcome`.
"""

from xckpt.comparison.explaining.architectures import Architecture
from xckpt.comparison.explaining.outcome import CAUSES, Case, explained_attrs, sentence
from xckpt.comparison.explaining.passes import explain

__all__ = ["CAUSES", "Architecture", "Case", "explain", "explained_attrs", "sentence"]
