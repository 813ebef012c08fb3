"""Findings: tensors that look wrong, in one checkpoint or along a training run.

The room may import comparison, statistics, scan and everything below them. Read `examining` first:
it gathers the `evidence` (statistics of all tensors with their roles) and applies each rule of
`rules` to it. `runs` has the rules for changes between steps, `overview` their table;
`equal_tensors` and `code_ranges` have rules that read elements again.
"""

from xckpt.health.evidence import out_of_line
from xckpt.health.examining import FindingsAccessor, examine, findings, findings_blocks
from xckpt.health.overview import RunSummary, run_blocks, run_summary
from xckpt.health.rules import RULES
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
