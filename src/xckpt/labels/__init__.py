"""Names: of axes, of tensors in a tree or a stack, and of tensors that a caller asks for.

Everything here works on names, element types and shapes, never on values. The room may import
`structure`, `index`, `elements` and `errors`, but no other room. Read `structure.numbering` first:
it defines the words, indices and templates of names, which `grids` and `paths` build on.
"""

from __future__ import annotations

from xckpt.labels.axes import AxisNamer, explicit_name
from xckpt.labels.filters import TensorFilter, combined, select, suggest_filters, suggest_names
from xckpt.labels.paths import child_nodes, flat_name, tree_paths

__all__ = [
    "AxisNamer",
    "TensorFilter",
    "child_nodes",
    "combined",
    "explicit_name",
    "flat_name",
    "select",
    "suggest_filters",
    "suggest_names",
    "tree_paths",
]
