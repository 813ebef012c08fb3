"""Why tensors differ: what `compare(explain=True)` says of them."""

from xckpt.statistics.explaining.explain import explain
from xckpt.statistics.explaining.wording import CAUSES, COLUMNS, Case, explained_attrs, sentence

__all__ = ["CAUSES", "COLUMNS", "Case", "explain", "explained_attrs", "sentence"]
