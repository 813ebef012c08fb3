"""Codes of quantised tensors: the range that they use, and the number of codes at its ends."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xckpt.arrays.dense import DenseArray
from xckpt.arrays.scaled import QuantizedArray
from xckpt.arrays.streams import of_tensor
from xckpt.elements import ELEMENT_TYPES
from xckpt.health.evidence import CODED, Rule
from xckpt.progress import Progress
from xckpt.scan.scanning import gather
from xckpt.statistics.channel_sketches import count_at_ends
from xckpt.statistics.counts import Sketch
from xckpt.statistics.describe import spectrum
from xckpt.structure import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xckpt.health.evidence import Evidence, RuleFinding


class CodeRange(NamedTuple):
    """Range of the codes of a quantised tensor, which has a row in the evidence."""

    row: int
    dtype: str
    elements: float
    low: float
    high: float
    at_ends: float
    #: Number of scales; each puts one code at an end.
    scales: float


def code_ranges(evidence: Evidence) -> list[CodeRange]:
    """Return the ranges of the codes of all quantised tensors."""
    return [*_plain_codes(evidence), *_decoded_codes(evidence)]


def _plain_codes(evidence: Evidence) -> Iterator[CodeRange]:
    """Yield the ranges of tensors whose statistics describe the stored codes."""
    names, dtypes = evidence.names, evidence.dtypes
    scales = evidence.structure.scales
    sizes = dict(zip(names, evidence["count"].tolist(), strict=True))
    for row in np.flatnonzero(~np.isnan(evidence["at_ends"])).tolist():
        is_code = evidence.roles[row] is Role.CODES and names[row] in scales
        if is_code or dtypes[row].startswith("float8"):
            count, low, high, ends = (
                evidence[name][row] for name in ("count", "min", "max", "at_ends")
            )
            scale_count = sizes.get(scales.get(names[row], ""), 0.0)
            yield CodeRange(row, dtypes[row], count, low, high, ends, scale_count)


def _decoded_codes(evidence: Evidence) -> list[CodeRange]:
    """Return the ranges of tensors whose statistics describe decoded numbers; skip packed codes."""
    tensors: list[tuple[int, QuantizedArray]] = []
    codes = []
    for row, stream in enumerate(evidence.streams):
        lazy = stream.array
        is_coded = isinstance(lazy, QuantizedArray)
        if is_coded and lazy.quantization.bits == lazy.quantization.word_bits == 8:
            flat = DenseArray(lazy.name, lazy.readers["data"], (prod(lazy.shape),), decode=False)
            tensors.append((row, lazy))
            codes.append(of_tensor(flat, lazy.name))
    with Progress(evidence.progress, "codes") as bar:

        def finish(number: int, sketch: Sketch) -> CodeRange:
            row, lazy = tensors[number]
            values = spectrum(sketch).values()
            blocks = zip(lazy.shape, lazy.quantization.block, strict=True)
            low, high = (values[0], values[-1]) if len(values) else (0.0, 0.0)
            scales = prod([-(-size // block) for size, block in blocks])
            kind, ends = sketch.kind.name, count_at_ends(sketch)
            return CodeRange(row, kind, sketch.count, float(low), float(high), ends, scales)

        return gather(codes, Sketch, finish, bar, cache=evidence.cache, stretched=True)


# --- rules ---------------------------------------------------------------------------------------


class _Codes(Rule):
    """Codes of quantised tensors use little of their range, or too much of its ends."""

    roles = CODED
    #: Tensors with fewer elements per possible code are skipped.
    elements_of_a_code = 64

    def _judge(self, evidence: Evidence) -> Iterator[RuleFinding]:
        for codes in evidence.once(code_ranges):
            levels = 1 << ELEMENT_TYPES[codes.dtype].bits
            if codes.elements >= self.elements_of_a_code * levels:
                for value, sentence in self._violations(codes, levels):
                    yield self.finding(evidence, codes.row, value, sentence)

    def _violations(self, codes: CodeRange, levels: int) -> Iterator[tuple[float, str]]:
        """Yield a value and a sentence for each finding."""
        raise NotImplementedError


class NarrowCodes(_Codes):
    """Codes use a part of their range."""

    name, severity = "narrow_codes", "info"
    is_of_kind = True
    threshold = 0.5  # of the range of integers
    threshold_of_floats = 1 / 16  # of the largest number

    def _violations(self, codes: CodeRange, levels: int) -> Iterator[tuple[float, str]]:
        low, high, dtype = codes.low, codes.high, codes.dtype
        float_format = ELEMENT_TYPES[dtype].float_format
        if float_format is not None:
            largest = max(abs(low), abs(high))
            used = largest / float_format.largest
            # Types with five bits of exponent are made for gradients.
            if float_format.exponent_bits != 5 and 0 < used < self.threshold_of_floats:
                sentence = f"the largest magnitude of its codes is {largest:.3g}, and {dtype}"
                yield used, f"{sentence} has {float_format.largest:g}"
        elif low < high and (part := (high - low + 1) / levels) < self.threshold:
            yield (
                part,
                f"codes are from {low:.0f} to {high:.0f}: {part:.0%} of the range of {dtype}",
            )


class SaturatedCodes(_Codes):
    """Values were cut off at the ends of the range of their codes."""

    name, severity = "saturated_codes", "warning"
    threshold = 0.05  # share of the codes; 0.25 of codes of 4 bits

    def _violations(self, codes: CodeRange, levels: int) -> Iterator[tuple[float, str]]:
        # Each scale puts one code at an end.
        share = max(0.0, codes.at_ends - codes.scales) / codes.elements
        if share > max(self.threshold, 4 / levels):
            yield (
                share,
                f"{share:.1%} of the codes are at an end of their range: values were cut off",
            )
