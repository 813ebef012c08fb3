"""The files of a format for the contract suites: `xckpt.testing.Samples` with golden files.

A format has a module of its name in this folder with a `Declared` called ``DECLARED``. Without
golden files of its own it gets everything else from `xckpt.save`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.conftest import golden_files
from xckpt.testing import Bad, Expected, Samples, Want
from xckpt.testing.samples import (
    LARGE,
    assert_same,
    assert_told,
    computed,
    large_dataset,
    outcome,
    small_dataset,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xckpt.typing import Array

__all__ = [
    "LARGE",
    "Bad",
    "Declared",
    "Expected",
    "Want",
    "arrays_in",
    "assert_same",
    "assert_told",
    "computed",
    "golden_arrays",
    "golden_json",
    "large_dataset",
    "outcome",
    "small_dataset",
    "widened",
]


@dataclass(kw_only=True, eq=False)
class Declared(Samples):
    """Samples of a format of this package.

    `good_patterns` and `bad_patterns` are globs of golden files in the folder of the format.
    """

    good_patterns: Sequence[str] = ()
    bad_patterns: Sequence[str] = ()

    def good(self) -> list[Any]:
        return [p for pattern in self.good_patterns for p in golden_files(f"{self.name}/{pattern}")]

    def bad(self) -> list[Any]:
        return [p for pattern in self.bad_patterns for p in golden_files(f"{self.name}/{pattern}")]


def golden_json(path: Path, suffix: str = ".expected.json") -> dict[str, Any]:
    """Load what a golden file should hold, from the file with its whole name or its stem."""
    beside = path.with_name(path.name + suffix)
    beside = beside if beside.exists() else path.with_suffix(suffix)
    document: dict[str, Any] = json.loads(beside.read_text("utf-8"))
    return document


def arrays_in(path: Path) -> dict[str, Array]:
    """Load all arrays of an ``.npz`` file, which does not stay open."""
    with np.load(path) as arrays:
        return dict(arrays)


def golden_arrays(path: Path) -> dict[str, Array]:
    """Load the arrays that a golden file should hold; none where there are none."""
    beside = path.with_name(f"{path.name}.expected.npz")
    beside = beside if beside.exists() else path.with_suffix(".expected.npz")
    return arrays_in(beside) if beside.exists() else {}


def widened(bits: Array) -> Array:
    """Make float32 of the bits of bfloat16."""
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide
