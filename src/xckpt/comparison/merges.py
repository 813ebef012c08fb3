"""Verification of merges: every element of ``b`` is the one of ``a`` plus the adapter's change.

The change of each tensor is computed in float64 from the factors, in blocks of rows. A tensor is a
merge if each element of ``b`` is within the rounding of the sum:

- half a step of the type that ``b`` is stored in, at the sum;
- the same at ``a``, if ``a`` is stored in a finer type than ``b`` and so was rounded first;
- a step of the coarser type of ``b`` and the adapter, at the change, as libraries round the product
  and its multiple to this type before they add it;
- the rounding of float32 in the sums of the product.

DoRA divides by norms and multiplies by magnitudes, which may be rounded to the type of ``b`` as
well: two more steps of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.arrays.kinds import kind_of
from xckpt.comparison.explaining.outcome import Explanation
from xckpt.comparison.explaining.rounding import FRACTION_BITS, spacing_of
from xckpt.datasets.adapters import factors_of, find_adapters, match_bases
from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import UnsupportedError, locating, some, warn
from xckpt.opening.configs import adapter_in, read_config
from xckpt.scan.entries import contents_of_all
from xckpt.statistics.spectra import blas_threads, in_memory
from xckpt.storage.limits import cpu_count
from xckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.comparison.explaining.outcome import Case
    from xckpt.datasets.adapters import Adapter
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.progress import Progress
    from xckpt.scan.entries import Describable
    from xckpt.typing import Array

__all__ = ["Merges", "open_merges"]

_BLOCK_NBYTES = 8 << 20
# Roundings of float32 in a product beyond one for each term: the scale and the sum.
_MORE_ROUNDINGS = 4
_FLOAT32_STEP = 2.0**-23
# Another scale is suggested if it leaves at most this share of the norm of the difference.
_FITTED = 0.05


def is_turned(adapter: Adapter, reader: ElementStream) -> bool:
    """Return whether a linear layer has the axes of the adapter in the other order."""
    shape = tuple(reader.array.shape)
    return adapter.is_linear and adapter.shape == shape[::-1] != shape


@dataclass(frozen=True, slots=True)
class Merges:
    """An adapter, and its changes by the names of tensors in ``a``."""

    tensors: OpenTensors
    adapters: Mapping[str, Adapter]

    def explain(self, cases: Sequence[Case], bar: Progress) -> dict[int, Explanation]:
        """Explain the cases that the adapter changes, by their numbers."""
        tasks = []
        explanations = {}
        pairs = [(self.adapters.get(case.match.name), case.match.both) for case in cases]
        # PEFT's config has one `fan_in_fan_out`, even for a model with linear layers of both kinds.
        is_mixed = any(a and both and is_turned(a, both[0]) for a, both in pairs)
        for number, (adapter, readers) in enumerate(pairs):
            if adapter is None or readers is None:
                continue
            problem = adapter.note
            update = adapter.turned() if is_turned(adapter, readers[0]) else adapter
            if not problem and update.shape != tuple(readers[0].array.shape):
                problem = f"its update has the shape {list(update.shape)}"
            if problem:
                text = f"the adapter changes it, which cannot be verified: {problem}"
                explanations[number] = Explanation(("changed",), text, holds=False)
            else:
                tasks.append(_Merge(number, update, *readers, self.tensors, is_mixed))
        bar.expect(sum([task.ours.nbytes + task.theirs.nbytes for task in tasks]))
        with Threads(cpu_count(), "xckpt-merge") as threads, blas_threads(1):
            for task, explanation in zip(tasks, threads.map(_Merge.explain, tasks), strict=True):
                explanations[task.number] = explanation
                bar.advance(task.ours.nbytes + task.theirs.nbytes)
        return explanations


def open_merges(
    adapter: Describable, names: Collection[str], storage_options: dict[str, Any] | None
) -> Merges:
    """Open an adapter; warn of changes of tensors that the base model lacks."""
    [tensors] = contents_of_all([adapter_in(adapter, storage_options)], storage_options)
    config = read_config(tensors.source, tensors.attrs, "adapter_config", storage_options)
    adapters = find_adapters(tensors, config)
    if not adapters:
        raise ValueError(
            f"{tensors.source or 'the object'} has no tensors of an adapter; pass the folder or "
            "file with the factors"
        )
    if all(adapter.kind == "unsupported" for adapter in adapters):
        notes = dict.fromkeys(adapter.note for adapter in adapters)
        raise UnsupportedError("; ".join(notes), path=tensors.source or None)
    matches, missing = match_bases(adapters, names)
    if missing:
        warn(f"the adapter changes tensors that a lacks: {some(missing, 'tensors')}")
    return Merges(tensors, matches)


@dataclass(frozen=True, slots=True)
class _Change:
    """The factors or values of an adapter for one tensor, in memory."""

    left: Array
    #: None if `left` is the whole change.
    right: Array | None
    scale: float
    magnitude: Array | None = None

    def product(self, rows: slice) -> Array:
        """Return rows of the product, without the scale."""
        left: Array = self.left[rows]
        return left if self.right is None else left @ self.right

    def product_bound(self, rows: slice) -> Array | float:
        """Return a bound on the sums of the magnitudes of the terms of each element."""
        if self.right is None:
            return 0.0
        left, right = np.linalg.norm(self.left[rows], axis=1), np.linalg.norm(self.right, axis=0)
        bound: Array = abs(self.scale) * np.multiply.outer(left, right)
        return bound


@dataclass(frozen=True, slots=True)
class _Merge:
    """A tensor on both sides, and the adapter that may explain its difference."""

    number: int
    adapter: Adapter
    ours: ElementStream
    theirs: ElementStream
    tensors: OpenTensors
    is_mixed: bool  # whether the order of the axes of a square matrix is unknown

    def explain(self) -> Explanation:
        """Verify the merge, for a square matrix of a mixed model in both orders of axes."""
        adapter, explanation = self.adapter, self.verify()
        is_square = adapter.is_linear and adapter.shape == adapter.shape[::-1]
        if self.is_mixed and is_square and not explanation.holds:
            turned = replace(self, adapter=adapter.turned()).verify()
            return turned if turned.holds else explanation
        return explanation

    def verify(self) -> Explanation:
        """Verify the merge with the axes of the adapter."""
        with locating(tensor=self.ours.name), np.errstate(all="ignore"):
            if self.theirs.kind.name not in FRACTION_BITS:
                text = f"the adapter changes it; merges of {self.theirs.kind.name} are not verified"
                return Explanation(("changed",), text, holds=False)
            change = self._change()
            norms = None if change.magnitude is None else self._norms(change)
            off, largest, products = 0, 0.0, np.zeros(3)
            for rows, x, y in self._blocks():
                product = change.product(rows)
                expected, bound = self._expected(change, norms, rows, x, product)
                bound += _step(np.maximum(np.abs(expected), np.abs(y)), self.theirs.kind.name) / 2
                error = np.abs(y - expected)
                off += int(np.count_nonzero(~(error <= bound)))
                largest = max(largest, float(error.max(initial=0.0)))
                difference = y - x
                products += [
                    *(np.vdot(difference, difference), np.vdot(difference, product)),
                    np.vdot(product, product),
                ]
        return self._describe(change.scale, off, largest, products.tolist())

    def _change(self) -> _Change:
        adapter = self.adapter
        if not adapter.is_product:
            value = self._read("value").reshape(adapter.shape[0] if adapter.shape else 1, -1)
            scale = 1.0 if adapter.scale is None else adapter.scale
            return _Change(value, None, scale)
        factors = factors_of(adapter, self.tensors, adapter.scale or 0.0)
        left, right = factors.arrays()
        magnitude = self._read("magnitude").reshape(-1) if "magnitude" in adapter.tensors else None
        return _Change(left, right, factors.scale, magnitude)

    def _read(self, purpose: str) -> Array:
        array = in_memory(self.tensors.variable(self.adapter.tensors[purpose]).data)
        return np.asarray(array).astype(np.float64)

    @property
    def _adapter_kind(self) -> str:
        """The stored element type of the adapter."""
        name = self.adapter.tensors.get("left") or self.adapter.tensors["value"]
        variable = self.tensors.variable(name)
        kind = kind_of(variable.encoding.get("stored_dtype", variable.dtype))
        return "float32" if kind is None else kind.name

    def _blocks(self) -> Iterator[tuple[slice, Array, Array]]:
        """Yield slices of rows, and these rows of both sides as float64 matrices."""
        shape = self.ours.array.shape or (1,)
        columns = prod(shape[1:])
        step = max(1, _BLOCK_NBYTES // (8 * max(1, columns)))
        is_whole = self.ours.whole or self.theirs.whole or not self.ours.array.shape
        sides: list[Any] = [self.ours.array, self.theirs.array]
        if is_whole:
            sides = [in_memory(side[...]).reshape(shape) for side in sides]
        for start in range(0, shape[0], step):
            rows = slice(start, min(start + step, shape[0]))
            key = (rows, *(slice(None),) * (len(shape) - 1))
            x, y = (in_memory(side[key]).astype(np.float64) for side in sides)
            if self.adapter.kind == "saved":  # the adapter has the whole tensor
                x = np.zeros_like(x)
            yield rows, x.reshape(len(x), -1), y.reshape(len(y), -1)

    def _norms(self, change: _Change) -> Array:
        """Return the norms of the outputs of the sum, along the axis that DoRA normalises."""
        squares: list[Array] = []
        for rows, x, _ in self._blocks():
            expected = np.square(x + change.scale * change.product(rows))
            squares.append(expected.sum(axis=0 if self.adapter.out_axis else 1))
        total = np.sum(squares, axis=0) if self.adapter.out_axis else np.concatenate(squares)
        norms: Array = np.sqrt(total)
        return norms

    def _expected(
        self, change: _Change, norms: Array | None, rows: slice, x: Array, product: Array
    ) -> tuple[Array, Array]:
        """Return the merged elements of a block, and the error that roundings before may cause."""
        kind = self.theirs.kind.name
        update = change.scale * product
        expected = x + update
        coarser_kind = min(kind, self._adapter_kind, key=lambda name: FRACTION_BITS.get(name, 99))
        bound = _step(update, coarser_kind)
        terms = (self.adapter.rank or 0) + _MORE_ROUNDINGS
        bound += terms * _FLOAT32_STEP * change.product_bound(rows)
        if FRACTION_BITS.get(self.ours.kind.name, 0) > FRACTION_BITS[kind]:
            bound += _step(x, kind) / 2
        if change.magnitude is not None and norms is not None:
            factor = change.magnitude / norms
            factor = factor[None] if self.adapter.out_axis else factor[rows, None]
            bound += _step(expected, kind) / 2
            expected = expected * factor
            bound = bound * np.abs(factor) + 2 * _step(expected, kind)
        return expected, bound

    def _describe(
        self, scale: float, off: int, largest: float, products: Sequence[float]
    ) -> Explanation:
        """Explain the tensor; `off` is the number of the elements that are not the sum."""
        # Inner products of the difference and the product of the factors.
        squares, mixed, product_squares = products
        adapter, kind, rank = self.adapter, self.theirs.kind.name, self.adapter.rank
        formula = {
            "lora": f"a + {scale:.6g} * B @ A of rank {rank}",
            "dora": f"a + {scale:.6g} * B @ A of rank {rank}, with the norms of DoRA",
            "bias": f"a + {scale:.6g} * bias of the adapter",
            "saved": "the tensor of the adapter",
        }[adapter.kind]
        if not off:
            text = f"b is {formula}, within the rounding of {kind}"
            if not squares:
                text += "; b is equal to a, as the change is smaller than the rounding"
            return Explanation(("merged",), text, rank=rank)
        share = f"{100 * off / self.ours.size:.3g} % of the elements are further off"
        text = f"b is not {formula}: {share} than the rounding of {kind}, by up to {largest:.3g}"
        if not squares:
            text += "; b is equal to a"
        elif adapter.kind == "lora" and product_squares:
            fitted = mixed / product_squares
            remaining = 1 - mixed * fitted / squares
            if remaining <= _FITTED**2:
                text += f"; {fitted:.4g} * B @ A fits best"
        return Explanation(("changed",), text, holds=False, rank=rank)


def _step(values: Array, kind: str) -> Array:
    """Return the distance of numbers to the next ones of a type."""
    form = ELEMENT_TYPES[kind].float_format if kind in ELEMENT_TYPES else None
    smallest = 0.0 if form is None else form.smallest
    # A zero has no exponent.
    steps: Array = np.maximum(np.where(values == 0, 0.0, spacing_of(values, kind)), smallest)
    return steps
