"""Statistics of every tensor in one pass: `stats`, `histogram`, `compare`, `findings`, `table`.

`spectrum` takes a pass for each matrix.
"""

from xckpt.interrupts import uninterrupted

# Numba and what it compiles are large.
with uninterrupted():
    from xckpt.statistics.api import QUANTILES, known_stats, stats
    from xckpt.statistics.bins import histogram
    from xckpt.statistics.codes import OF_CODES
    from xckpt.statistics.describe import statistic_names
    from xckpt.statistics.differences import MEASURES, STATUSES, compare
    from xckpt.statistics.evidence import out_of_line
    from xckpt.statistics.finding import examine, findings
    from xckpt.statistics.kinds import require_numbers
    from xckpt.statistics.rules import RULES
    from xckpt.statistics.runs import changes_of
    from xckpt.statistics.singular import STATISTICS as OF_MATRICES
    from xckpt.statistics.spectra import spectrum
    from xckpt.statistics.tables import (
        channel_values,
        matched_names,
        result_text,
        table,
        tensor_names,
        tensor_rows,
    )

__all__ = [
    "MEASURES",
    "OF_CODES",
    "OF_MATRICES",
    "QUANTILES",
    "RULES",
    "STATUSES",
    "changes_of",
    "channel_values",
    "compare",
    "examine",
    "findings",
    "histogram",
    "known_stats",
    "matched_names",
    "out_of_line",
    "require_numbers",
    "result_text",
    "spectrum",
    "statistic_names",
    "stats",
    "table",
    "tensor_names",
    "tensor_rows",
]
