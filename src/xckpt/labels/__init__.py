"""Labels: names for axes, tensors chosen by name, and dotted names as paths of a tree."""

from __future__ import annotations

from xckpt.labels.axes import AxisNames, stated_name
from xckpt.labels.conventions import scales_of_codes
from xckpt.labels.paths import child_nodes, flat_name, tree_paths
from xckpt.labels.selection import TensorFilter, select, similar, similar_filter

__all__ = [
    "AxisNames",
    "TensorFilter",
    "child_nodes",
    "flat_name",
    "scales_of_codes",
    "select",
    "similar",
    "similar_filter",
    "stated_name",
    "tree_paths",
]
