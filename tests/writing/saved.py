"""Helpers of the tests of writing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt import formats
from xckpt.elements import stored_dtype

if TYPE_CHECKING:
    import numpy as np

ENGINES = [name for name in formats.names() if formats.get(name).can.types]
# Formats in which a number is an array of one.
NO_SCALARS = {"gptrs", "primitiv"}


# Options that let a format hold all its element types.
OPTIONS: dict[str, dict[str, Any]] = {"ztensor": {"version": "2"}}


def writable_types(engine: str) -> list[str]:
    """List the element types that a format holds, as far as numpy has them."""
    return [n for n in formats.writable(engine).can.types if stored_dtype(n).name == n]


def clean(codes: np.ndarray, name: str) -> np.ndarray:
    """Make bytes that are elements of a type: booleans are 0 or 1, and 4 bits are 4 bits."""
    return codes & {"bool": 1, "float4_e2m1fn": 15}.get(name, 255)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Compare arrays, NaN payloads and all."""
    expected = expected.astype(expected.dtype.newbyteorder("="))
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()
