"""Statistics of every tensor in one pass: `stats`, `histogram`, `compare`, `findings`, `table`.

The package has the name of its main function, so it can be called like it: ``xckpt.stats(obj)`` is
right whether or not something imported this package before.
"""

from __future__ import annotations

import sys
from types import ModuleType

from xckpt.stats.bins import histogram
from xckpt.stats.differences import compare
from xckpt.stats.result import QUANTILES, stats, table
from xckpt.stats.rules import findings

__all__ = ["QUANTILES", "compare", "findings", "histogram", "stats", "table"]


class _CallableModule(ModuleType):
    __call__ = staticmethod(stats)


sys.modules[__name__].__class__ = _CallableModule
