"""Statistics of every tensor in one pass: `stats`, `histogram`, `compare`, `findings`, `table`."""

from xckpt.statistics.bins import histogram
from xckpt.statistics.differences import compare
from xckpt.statistics.result import QUANTILES, stats, table
from xckpt.statistics.rules import findings

__all__ = ["QUANTILES", "compare", "findings", "histogram", "stats", "table"]
