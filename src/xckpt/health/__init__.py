"""Findings: tensors that look wrong, in one checkpoint or along a training run.

The room may import comparison, statistics, scan and everything below them. Read `examining` first:
it gathers the `evidence` (statistics of all tensors with their roles), applies each rule to
it, and shows a training run. `elements` has the rules about single tensors, `channels` about rows
and columns, `siblings` about tensors that belong together, and `runs` about changes between steps.
"""

from xckpt.health.evidence import out_of_line
from xckpt.health.examining import (
    RULES,
    FindingsAccessor,
    RunSummary,
    examine,
    findings,
    findings_blocks,
    run_blocks,
    run_summary,
)
from xckpt.health.runs import changes_of

__all__ = [
    "RULES",
    "FindingsAccessor",
    "RunSummary",
    "changes_of",
    "examine",
    "findings",
    "findings_blocks",
    "out_of_line",
    "run_blocks",
    "run_summary",
]
