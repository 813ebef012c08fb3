"""Codes of quantised tensors: whether they use their range, and whether values were cut off."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xckpt.arrays.dense import DenseArray
from xckpt.arrays.quantized import QuantizedArray
from xckpt.labels import scales_of_codes
from xckpt.progress import Progress
from xckpt.statistics.accumulate import Sketch
from xckpt.statistics.channels import count_at_ends
from xckpt.statistics.describe import spectrum
from xckpt.statistics.kinds import kind_named
from xckpt.statistics.readers import reader_of
from xckpt.statistics.scan import gather

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xckpt.progress import ProgressOption
    from xckpt.statistics.measured import Found, Measured
    from xckpt.statistics.readers import Reader

#: Share of codes at the ends of their range from which values were cut off.
SATURATED = 0.05
#: Part of the range that codes use; tensors with fewer elements for each code are not judged.
NARROW, ELEMENTS_OF_A_CODE = 0.5, 64
#: Of float8 that is made for weights: the part of the largest number that the largest element is.
NARROW_FLOAT = 1 / 16


class CodeRange(NamedTuple):
    """The codes of a tensor, by its number."""

    at: int
    dtype: str
    elements: float
    low: float
    high: float
    at_ends: float
    #: How many scales there are: each puts one code at an end.
    scales: float


def plain_codes(measured: Measured) -> Iterator[CodeRange]:
    """Find the codes among tensors that are described as they are stored."""
    scales = scales_of_codes(dict(zip(measured.names, measured.dtypes, strict=True)))
    sizes = dict(zip(measured.names, measured["count"].tolist(), strict=True))
    facts = ("count", "min", "max", "at_ends")
    for at in np.flatnonzero(~np.isnan(measured["at_ends"])).tolist():
        name, dtype = measured.names[at], measured.dtypes[at]
        is_code = name in scales and not name.endswith(("_zero_point", "zeros"))
        if is_code or dtype.startswith("float8"):
            count, low, high, ends = (measured[each][at] for each in facts)
            yield CodeRange(at, dtype, count, low, high, ends, sizes.get(scales.get(name, ""), 0.0))


def decoded_codes(
    readers: Sequence[Reader], *, progress: ProgressOption, cache: bool
) -> list[CodeRange]:
    """Read the codes of tensors that are described as the numbers they stand for.

    Those that share words are left out.
    """
    quantised = {at: reader.array for at, reader in enumerate(readers) if _has_codes(reader.array)}
    codes, numbered = [], list(quantised.items())
    for _, lazy in numbered:
        flat = DenseArray(lazy.name, lazy.readers["data"], (prod(lazy.shape),), decode=False)
        codes.append(reader_of(flat, lazy.name))
    with Progress(progress, "codes") as bar:

        def finish(number: int, sketch: Sketch) -> CodeRange:
            at, lazy = numbered[number]
            values = spectrum(sketch).values()
            blocks = zip(lazy.shape, lazy.quantization.block, strict=True)
            low, high = (values[0], values[-1]) if len(values) else (0.0, 0.0)
            scales = prod([-(-size // block) for size, block in blocks])
            kind, ends = sketch.kind.name, count_at_ends(sketch)
            return CodeRange(at, kind, sketch.count, float(low), float(high), ends, scales)

        return gather(codes, Sketch, finish, bar, cache=cache, stretched=True)


def _has_codes(array: Any) -> bool:
    if not isinstance(array, QuantizedArray):
        return False
    return array.quantization.bits == array.quantization.word_bits == 8


def judge(measured: Measured, codes: CodeRange) -> Iterator[Found]:
    """Say what is odd about the codes of a tensor."""
    at, dtype, count, low, high, at_ends, scales = codes
    kind = kind_named(dtype)
    levels = 1 << kind.bits
    if count < ELEMENTS_OF_A_CODE * levels:
        return
    if dtype.startswith("float8"):
        most = float(kind.values[np.isfinite(kind.values)].max())
        largest = max(abs(low), abs(high))
        if "e5" not in dtype and 0 < largest < NARROW_FLOAT * most:
            what = f"the largest magnitude of its codes is {largest:.3g}, and {dtype} has {most:g}"
            yield measured.found(at, "narrow_codes", largest / most, what)
    elif low < high and (part := (high - low + 1) / levels) < NARROW:
        what = f"codes are from {low:.0f} to {high:.0f}: {part:.0%} of the range of {dtype}"
        yield measured.found(at, "narrow_codes", part, what)
    share = max(0.0, at_ends - scales) / count
    if share > max(SATURATED, 4 / levels):
        what = f"{share:.1%} of the codes are at an end of their range: values were cut off"
        yield measured.found(at, "saturated_codes", share, what)
