"""Statistics of every tensor in one pass: `stats`, `histogram`, `table`; `spectrum` of matrices.

May import scan and everything below it, but neither comparison nor health. Read `computing` first:
it turns an object into a Dataset of statistics. A pass makes a sketch of each tensor, with counts
of bit patterns and moments (`counts`), from which `describe` computes the statistics.
"""

from xckpt.statistics.codes import OF_CODES
from xckpt.statistics.computing import QUANTILES, known_stats, stats
from xckpt.statistics.definitions import statistic_names
from xckpt.statistics.histograms import histogram
from xckpt.statistics.singular import STATISTICS as OF_MATRICES
from xckpt.statistics.spectra import spectrum
from xckpt.statistics.tables import (
    EXPLANATION_COLUMNS,
    STATUSES,
    attribute_sentence,
    channel_values,
    comparison_lines,
    count_statuses,
    frame_table,
    group_notes,
    matched_names,
    represented,
    result_blocks,
    table,
    tensor_names,
    tensor_rows,
)

__all__ = [
    "EXPLANATION_COLUMNS",
    "OF_CODES",
    "OF_MATRICES",
    "QUANTILES",
    "STATUSES",
    "attribute_sentence",
    "channel_values",
    "comparison_lines",
    "count_statuses",
    "frame_table",
    "group_notes",
    "histogram",
    "known_stats",
    "matched_names",
    "represented",
    "result_blocks",
    "spectrum",
    "statistic_names",
    "stats",
    "table",
    "tensor_names",
    "tensor_rows",
]
