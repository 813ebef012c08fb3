from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.contracts.declared import Bad, Declared, Expected, Want
from tests.formats.safetensors_files import entry, safetensors_file

if TYPE_CHECKING:
    from pathlib import Path

    from xckpt.typing import Array

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64", "complex64"]
NARROW = [
    *["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"],
    *["float8_e4m3fnuz", "float8_e5m2fnuz"],
]


def every_bit_pattern(dtype: str) -> Array:
    """Make an array of many values, NaN with all payloads of the narrow types among them."""
    size = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    codes = np.arange(2**16 if size > 1 else 2**8, dtype=f"u{min(size, 2)}")
    if size > 2:
        codes = (codes.astype("u8") * 0x9E3779B97F4A7C15).view(f"u{min(size, 4)}")
    return codes.view(getattr(ml_dtypes, dtype, dtype)).reshape(4, -1)


ARRAYS = {f"m.{dtype}": every_bit_pattern(dtype) for dtype in [*INTEGERS, *FLOATS, *NARROW]}
ARRAYS |= {
    "bool": np.array([[True, False]]),
    "scalar": np.array(2.5),
    "none": np.zeros((3, 0), "f4"),
}
HEADERS: dict[str, Any] = {
    "gap": {"w": entry("F32", [1], 4, 8)},
    "range": {"w": entry("F32", [1], 8, 4)},
    "size": {"w": entry("F32", [3], 0, 8)},
    "type": {"w": entry("F99", [2], 0, 8)},
    "huge": {"w": entry("F32", [1 << 40, 1 << 40], 0, 8)},
    "text": '{"w":',
}


class Safetensors(Declared):
    """The package is the oracle."""

    def good(self) -> list[Any]:
        return [pytest.param(safetensors.numpy.save(ARRAYS, {"k": "v"}), id="package")]

    def expected(self, path: Path) -> Expected:
        with np.errstate(invalid="ignore"):
            decoded = {n: a.astype("f4") if n[2:] in NARROW else a for n, a in ARRAYS.items()}
        tensors = {
            name: Want(values, {"stored_dtype": ARRAYS[name].dtype}, exact=name[2:] not in NARROW)
            for name, values in decoded.items()
        }
        stored = {name: values.tobytes() for name, values in ARRAYS.items()}
        return Expected(tensors, stored, "", {"k": "v"}, complete=False)

    def bad(self) -> list[Any]:
        return [
            pytest.param(safetensors_file(h, bytes(8)), id=label) for label, h in HEADERS.items()
        ]

    def verdict(self, path: Path) -> Bad:
        return Bad(path, "open")


# The header comes first, so that the tensors before the end of a cut file can be read.
DECLARED = Safetensors(name="safetensors", may_be_cut=True)
