"""Verification of merges: every element of ``b`` is the one of ``a`` plus the adapter's change.

The change of each tensor is computed in float64 from the factors, in blocks of rows. A tensor is a
merge if each element of ``b`` is within the rounding of the sum:

- half a step of the type that ``b`` is stored in, at the sum;
- the same at ``a``, if ``a`` is stored in a finer type than ``b`` and so was rounded first;
- a step of the coarser type of ``b`` and the adapter, at the change, as libraries round the product
  and its multiple to this type before they add it;
- the rounding of float32 in the sums of the product.

DoRA divides by norms and multiplies by magnitudes, which may be rounded to the type of ``b`` as
well: two more steps of the result; so are the factors of (IA)³.

The rows of an adapter may be in another order than those of the model, as llama.cpp permutes the
heads of queries and keys, and the model may have them in one tensor with others (`adapted_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from xckpt.arrays.kinds import kind_of
from xckpt.arrays.lazy import dense_values as in_memory
from xckpt.comparison.arrangements import RopePermuted
from xckpt.comparison.explaining.outcome import Case, Explanation
from xckpt.comparison.relations.causes import FRACTION_BITS, spacing_of
from xckpt.datasets.adapter_bases import match_bases
from xckpt.datasets.adapter_updates import matrices_of, update_rows
from xckpt.datasets.adapters import Adapter, find_adapters
from xckpt.datasets.tied_heads import untied_head
from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import UnsupportedError, locating, shown, some, warn
from xckpt.opening.reading import adapter_in, read_config
from xckpt.scan.entries import contents_of_all
from xckpt.statistics.spectra import blas_threads
from xckpt.storage.limits import cpu_count
from xckpt.structure.facts import model_facts
from xckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xckpt.arrays.streams import ElementStream
    from xckpt.comparison.pairs import Match
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.datasets.tied_heads import UntiedHead
    from xckpt.progress import Progress
    from xckpt.scan.entries import Describable
    from xckpt.structure import Structure
    from xckpt.structure.counterparts import Counterpart
    from xckpt.typing import Array

    Shape = tuple[int, ...]

_BLOCK_NBYTES = 8 << 20
# Roundings of float32 in a product beyond one for each term: the scale and the sum.
_MORE_ROUNDINGS = 4
_FLOAT32_STEP = 2.0**-23
# Another scale is suggested if it leaves at most this share of the norm of the difference.
_FITTED = 0.05
# A number with few digits replaces a fitted one within this share of it.
_ROUNDED = 2e-3
# Products of one element, by kind.
_FACTORS = {"loha": 2, "lokr": 2}
# Kinds that exclude each other for a tensor.
_WHOLE = {"saved", "rows"}
_FORMULAS = {
    "lora": "a + {scale:.6g} * B @ A of rank {rank}",
    "dora": "a + {scale:.6g} * B @ A of rank {rank}, with the norms of DoRA",
    "loha": "a + {scale:.6g} * the update of LoHa",
    "lokr": "a + {scale:.6g} * the update of LoKr",
    "adalora": "a + {scale:.6g} * B @ E @ A of rank {rank}",
    "experts": "a + {scale:.6g} * B @ A of rank {rank} for each expert",
    "ia3": "a times the factors of (IA)³",
    "bias": "a + {scale:.6g} * bias of the adapter",
    "saved": "the tensor of the adapter",
    "rows": "a with {rows:,} rows of the adapter",
}


@dataclass(frozen=True, slots=True)
class Merges:
    """An adapter, and its changes by the names of tensors in ``a``."""

    tensors: OpenTensors
    adapters: Mapping[str, list[tuple[Adapter, Counterpart]]]
    #: Trained tensors that only ``b`` has, by their names there.
    added: Mapping[str, list[tuple[Adapter, Counterpart]]]
    #: Number of the rows of the tensors in ``a``.
    extents: Mapping[str, int]
    base: OpenTensors
    #: Head that keeps the old values of the trained table that it was tied to.
    untied: UntiedHead | None = None

    def _sides(self, match: Match) -> tuple[ElementStream, ElementStream] | None:
        """Return both tensors, if they can be compared; a saved one may have another shape."""
        is_saved = any(adapter.kind == "saved" for adapter, _ in self.adapters[match.name])
        sides = match.ours, match.theirs
        if is_saved and all(side is not None and side.problem is None for side in sides):
            return cast("tuple[ElementStream, ElementStream]", sides)
        return match.both

    def explain(self, cases: Sequence[Case], bar: Progress) -> dict[int, Explanation]:
        """Explain the cases that the adapter changes, by their numbers."""
        tasks = []
        explanations = {}
        pairs = [
            (self.adapters[case.match.name], self._sides(case.match), number)
            for number, case in enumerate(cases)
            if case.match.name in self.adapters
        ]
        # PEFT's config has one `fan_in_fan_out`, even for a model with linear layers of both kinds.
        is_mixed = any(
            adapter.is_turned(tuple(both[0].array.shape), counterpart)
            for candidates, both, _ in pairs
            if both
            for adapter, counterpart in candidates
        )
        for changes, streams, number in pairs:
            if streams is None:
                continue
            parts = [adapted_rows(*change, streams, self.extents) for change in changes]
            problem = next((part.problem for part in parts if part.problem), "")
            kinds = {part.adapter.kind for part in parts}
            if not problem and len(parts) > 1 and (len(kinds) > 1 or kinds & _WHOLE):
                problem = f"the adapter changes it in several ways ({', '.join(sorted(kinds))})"
            if problem:
                text = f"the adapter changes it, which cannot be verified: {problem}"
                explanations[number] = Explanation(("unknown",), text, holds=False)
            else:
                tasks.append(_Merge(number, parts, *streams, self.tensors, is_mixed))
        tasks += list(self._additions(cases))
        bar.expect(sum([task.ours.nbytes + task.theirs.nbytes for task in tasks]))
        with Threads(cpu_count(), "xckpt-merge") as threads, blas_threads(1):
            for task, explanation in zip(tasks, threads.map(_Merge.explain, tasks), strict=True):
                if not explanation.holds and cases[task.number].status == "only_b":
                    explanation = replace(explanation, causes=("only_b",))  # noqa: PLW2901
                explanations[task.number] = explanation
                bar.advance(task.ours.nbytes + task.theirs.nbytes)
            fitted = [task for task in tasks if explanations[task.number].factor is not None]
            factor = _common_factor(
                [explanations[task.number].factor or 0.0 for task in fitted],
                lambda factor: all(threads.map(lambda task: task.fits(factor), fitted)),
            )
        for task in fitted:
            number = task.number
            explanations[number] = replace(explanations[number], factor=factor)
        return explanations

    def _additions(self, cases: Sequence[Case]) -> Iterator[_Merge]:
        """Yield the tensors that a merge adds, each on both sides of the task."""
        for number, case in enumerate(cases):
            stream, name, head = case.alone, case.match.name, self.untied
            if case.status != "only_b" or stream is None or stream.problem is not None:
                continue
            sides, shape = (stream, stream), tuple(stream.array.shape)
            if name in self.added:
                part = adapted_rows(*self.added[name][0], sides, self.extents)
                if not part.problem:
                    yield _Merge(number, [part], *sides, self.tensors, is_mixed=False)
            elif head is not None and name == head.name:
                part = AdaptedRows(Adapter(name, "saved", {"value": head.table}, shape))
                if self.base.variable(head.table).shape == shape:
                    text = f"{shown(head.table)} of a, which was tied to it"
                    yield _Merge(number, [part], *sides, self.base, is_mixed=False, formula=text)


def open_merges(
    adapter: Describable | None,
    a: OpenTensors,
    b: OpenTensors,
    matches: Sequence[Match],
    storage_options: dict[str, Any] | None,
) -> Merges | None:
    """Open an adapter, and warn of changes of tensors that `a` lacks; None without an adapter."""
    if adapter is None:
        return None
    of_a = dict.fromkeys(match.name for match in matches if match.ours is not None)
    only_in_b = dict.fromkeys(match.name for match in matches if match.status == "only_b")
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
    types = model_facts(tensors.attrs).types
    base = _structure(a, storage_options)
    bases, missing, heads = match_bases(adapters, base, of_a, a.source, types)
    trained = [
        adapter for adapter in adapters if adapter.kind == "saved" and adapter.base in missing
    ]
    added, lacking, _ = match_bases(
        trained, _structure(b, storage_options), only_in_b, b.source, types
    )
    if trained:
        names = {adapter.base for adapter in trained}
        missing = [name for name in missing if name not in names or name in lacking]
    if missing:
        warn(f"the adapter changes tensors that a lacks: {some(missing, 'tensors')}")
    extents = {name: (*base.described(name).shape, 1)[0] for name in bases}
    # Heads that the adapter has are added from it.
    changes = {name: [change for change, _ in of_name] for name, of_name in bases.items()}
    untied = None if heads else untied_head(a, (), changes, tensors)
    return Merges(tensors, bases, added, extents, a, untied)


def _structure(model: OpenTensors, storage_options: dict[str, Any] | None) -> Structure:
    """Return the structure of a model, with the type that the config beside its file states."""
    structure = model.structure
    if model.source and not structure.facts.types:
        stated = read_config(model.source, model.attrs, "config", storage_options)
        if stated is not None:
            return structure.with_facts(model_facts(model.attrs, stated))
    return structure


@dataclass(frozen=True, slots=True)
class _Change:
    """The matrices or values of an adapter for one tensor, in memory."""

    part: AdaptedRows
    matrices: Mapping[str, Array]
    scale: float

    def product(self, rows: slice) -> Array:
        """Return rows of the product, without the scale."""
        return self._rows(self.matrices, rows)

    def bound(self, rows: slice) -> Array | float:
        """Return a bound on the sums of the magnitudes of the terms of each element."""
        kind = self.part.adapter.kind
        if not self.part.adapter.is_product:
            return 0.0
        if kind in {"lora", "dora", "experts"}:
            matrices = {
                name: np.linalg.norm(self.matrices[name], axis=axis, keepdims=True)
                for name, axis in (("left", -1), ("right", -2))
            }
        else:
            matrices = {name: np.abs(matrix) for name, matrix in self.matrices.items()}
        return abs(self.scale) * self._rows(matrices, rows)

    def _rows(self, matrices: Mapping[str, Array], rows: slice) -> Array:
        own_rows = self.part.rows
        if own_rows is None:
            return self._update(matrices, rows)
        numbers = own_rows[rows]
        changed = numbers >= 0
        update = self._update(matrices, numbers[changed])
        # Rows that the adapter leaves are multiplied by one, or have zero added.
        unchanged = 1.0 if self.part.adapter.kind == "ia3" else 0.0
        product: Array = np.full((len(numbers), update.shape[1]), unchanged)
        product[changed] = update
        return product

    def _update(self, matrices: Mapping[str, Array], rows: Any) -> Array:
        if self.part.adapter.is_product:
            update: Array = update_rows(self.part.adapter.kind, matrices, rows)
            return update.reshape(len(update), -1)
        values = next(iter(matrices.values()))
        # Factors of the columns are the same for all rows.
        return values if self.part.adapter.kind == "ia3" and len(values) == 1 else values[rows]


@dataclass(frozen=True, slots=True)
class _Merge:
    """A tensor on both sides, and the adapters that may explain its difference."""

    number: int
    parts: list[AdaptedRows]
    ours: ElementStream
    theirs: ElementStream
    tensors: OpenTensors
    is_mixed: bool  # whether the order of the axes of a square matrix is unknown
    formula: str = ""  # in the place of the one of the kind

    def explain(self) -> Explanation:
        """Verify the merge, with all orders of rows or axes that the adapter may have."""
        explanation = self.verify()
        for parts in () if explanation.holds else self._other_orders():
            other = replace(self, parts=parts).verify()
            if other.holds:
                return other
        return explanation

    def _other_orders(self) -> Iterator[list[AdaptedRows]]:
        for number in range(max(len(part.orders) for part in self.parts)):
            yield [
                replace(part, rows=part.orders[number]) if part.orders else part
                for part in self.parts
            ]
        part, adapter = self.parts[0], self.adapter
        is_square = adapter.is_linear and adapter.shape == adapter.shape[::-1]
        if self.is_mixed and is_square and part.rows is None and len(self.parts) == 1:
            yield [replace(part, adapter=adapter.turned())]

    @property
    def adapter(self) -> Adapter:
        """The adapter, or the first of several."""
        return self.parts[0].adapter

    def verify(self) -> Explanation:
        """Verify the merge with the rows and axes of the adapter."""
        with locating(tensor=self.ours.name), np.errstate(all="ignore"):
            if self.theirs.kind.name not in FRACTION_BITS:
                text = f"the adapter changes it; merges of {self.theirs.kind.name} are not verified"
                return Explanation(("unknown",), text, holds=False)
            changes = [self._change(part) for part in self.parts]
            if self.adapter.kind == "lora" and self.adapter.scale is None:
                return self._verify_without_scale(changes)
            return self._verify(changes)

    def fits(self, factor: float) -> bool:
        """Return whether the merge of a multiple of the update explains the tensor."""
        changes = [self._change(part) for part in self.parts]
        scaled = [replace(change, scale=factor * change.scale) for change in changes]
        with locating(tensor=self.ours.name), np.errstate(all="ignore"):
            return self._verify(scaled).holds

    def _verify(self, changes: Sequence[_Change]) -> Explanation:
        factors = self._factors(changes) if self.adapter.kind == "dora" else None
        off, largest, products = 0, 0.0, np.zeros(3)
        for rows, x, y in self._blocks():
            updates = [change.scale * change.product(rows) for change in changes]
            expected, bound = self._expected(changes, updates, factors, rows, x)
            bound += _step(np.maximum(np.abs(expected), np.abs(y)), self.theirs.kind.name) / 2
            error = np.abs(y - expected)
            off += int(np.count_nonzero(~(error <= bound)))
            largest = max(largest, float(error.max(initial=0.0)))
            products += _inner_products(y - x, np.broadcast_to(sum(updates), x.shape))
        return self._describe(changes[0].scale, off, largest, products.tolist())

    def _verify_without_scale(self, changes: Sequence[_Change]) -> Explanation:
        """Verify the merge with the scale that fits."""
        products = np.zeros(3)
        for rows, x, y in self._blocks():
            products += _inner_products(y - x, sum(change.product(rows) for change in changes))
        note, rank = self.adapter.note, self.adapter.rank or 1
        _, mixed, squares = products.tolist()
        fitted = mixed / squares if squares else 0.0
        # The quotient of two numbers with few digits, or any number.
        for scale in dict.fromkeys((float(f"{fitted * rank:.4g}") / rank, fitted)):
            explanation = self._verify([replace(change, scale=scale) for change in changes])
            if explanation.holds and scale:
                text = f"{explanation.text}; {scale:.6g} is the scale that fits, as {note}"
                return replace(explanation, text=text)
        text = f"the adapter changes it, which cannot be verified: {note}"
        text += "; b is equal to a" if not products[0] else f", and no scale fits ({fitted:.4g})"
        return Explanation(("unknown",), text, holds=False, rank=self.adapter.rank)

    def _change(self, part: AdaptedRows) -> _Change:
        adapter = part.adapter
        matrices = {
            name: np.asarray(in_memory(matrix)).astype(np.float64)
            for name, matrix in matrices_of(adapter, self.tensors).items()
        }
        if "value" in matrices and len(adapter.shape) < 2:
            matrices["value"] = matrices["value"].reshape(-1, 1)
        return _Change(part, matrices, 1.0 if adapter.scale is None else adapter.scale)

    @property
    def _adapter_kind(self) -> str:
        """The stored element type of the adapter."""
        variable = self.tensors.variable(next(iter(self.adapter.tensors.values())))
        kind = kind_of(variable.encoding.get("stored_dtype", variable.dtype))
        return "float32" if kind is None else kind.name

    def _blocks(self) -> Iterator[tuple[slice, Array, Array]]:
        """Yield slices of rows, and these rows of both sides as float64 matrices."""
        shape = self.theirs.array.shape or (1,)
        columns = prod(shape[1:])
        step = max(1, _BLOCK_NBYTES // (8 * max(1, columns)))
        is_whole = self.ours.whole or self.theirs.whole or not self.theirs.array.shape
        is_saved = self.adapter.kind == "saved"  # the adapter has the whole tensor
        sides: list[Any] = [None if is_saved else self.ours.array, self.theirs.array]
        if is_whole:
            sides = [
                side if side is None else in_memory(side[...]).reshape(shape) for side in sides
            ]
        for start in range(0, shape[0], step):
            rows = slice(start, min(start + step, shape[0]))
            key = (rows, *(slice(None),) * (len(shape) - 1))
            y = in_memory(sides[1][key]).astype(np.float64).reshape(rows.stop - start, -1)
            x = np.zeros_like(y)
            if sides[0] is not None:
                x = in_memory(sides[0][key]).astype(np.float64).reshape(y.shape)
            yield rows, x, y

    def _factors(self, changes: Sequence[_Change]) -> Array:
        """Return the factors of the sum by DoRA: magnitudes over norms, along the outputs."""
        axis = self.adapter.out_axis
        squares: list[Array] = []
        for rows, x, _ in self._blocks():
            total = np.square(x + sum(change.scale * change.product(rows) for change in changes))
            squares.append(total.sum(axis=0 if axis else 1))
        norms = np.sqrt(np.sum(squares, axis=0) if axis else np.concatenate(squares))
        factors: Array = np.ones(len(norms))
        for change in changes:
            rows_of_adapter = change.part.rows
            if rows_of_adapter is None:
                rows_of_adapter = np.arange(len(norms))
            changed = rows_of_adapter >= 0
            magnitudes = change.matrices["magnitude"].reshape(-1)
            factors[changed] = magnitudes[rows_of_adapter[changed]] / norms[changed]
        return factors

    def _expected(
        self,
        changes: Sequence[_Change],
        updates: Sequence[Array],
        factors: Array | None,
        rows: slice,
        x: Array,
    ) -> tuple[Array, Array]:
        """Return the merged elements of a block, and the error that roundings before may cause."""
        kind = self.theirs.kind.name
        update: Array = sum(updates[1:], updates[0])
        expected = x + update
        if self.adapter.kind == "ia3":
            update = update - (len(updates) - 1)
            expected = x * update
        own_rows = self.parts[0].rows
        if self.adapter.kind == "rows" and own_rows is not None:
            expected = np.where(own_rows[rows, None] < 0, x, update)
        coarser_kind = min(kind, self._adapter_kind, key=lambda name: FRACTION_BITS.get(name, 99))
        bound = _step(update, coarser_kind)
        if self.adapter.kind == "saved":  # nothing is added to it
            return expected, np.zeros_like(bound)
        for change in changes:
            terms = (change.part.adapter.rank or 1) * _FACTORS.get(self.adapter.kind, 1)
            bound += (terms + _MORE_ROUNDINGS) * _FLOAT32_STEP * change.bound(rows)
        if FRACTION_BITS.get(self.ours.kind.name, 0) > FRACTION_BITS[kind]:
            bound += _step(x, kind) / 2
        if self.adapter.kind == "ia3":
            bound = bound * np.abs(x) + 2 * _step(expected, kind)
        if factors is not None:
            factor = factors[None] if self.adapter.out_axis else factors[rows, None]
            bound += _step(expected, kind) / 2
            expected = expected * factor
            bound = bound * np.abs(factor) + 2 * _step(expected, kind)
        return expected, bound

    def _describe(
        self, scale: float, off: int, largest: float, products: Sequence[float]
    ) -> Explanation:
        """Explain the tensor; `off` is the number of the elements that are not the sum."""
        # Inner products of the difference and the update.
        squares, mixed, product_squares = products
        adapter, kind, rank = self.adapter, self.theirs.kind.name, self.adapter.rank
        formula = self.formula or _FORMULAS[adapter.kind].format(
            scale=scale, rank=rank, rows=len(adapter.rows)
        )
        if self.parts[0].slot:
            slots = [part.slot.rpartition(".")[2] for part in self.parts]
            formula += f" in the rows of {', '.join(slots)}"
        elif any(self.parts[0].rows is order for order in self.parts[0].orders):
            formula += ", with the rows of each head permuted"
        if not off:
            text = f"b is {formula}, within the rounding of {kind}"
            if not squares and adapter.kind != "saved":
                text += "; b is equal to a, as the change is smaller than the rounding"
            return Explanation(("merged",), text, rank=rank)
        share = f"{100 * off / self.theirs.size:.3g} % of the elements are further off"
        text = f"b is not {formula}: {share} than the rounding of {kind}, by up to {largest:.3g}"
        factor = None
        if not squares and adapter.kind != "saved":
            text += "; b is equal to a"
        elif adapter.is_product and adapter.kind != "dora" and product_squares:
            fitted = mixed / product_squares
            remaining = 1 - mixed * fitted / squares
            if remaining <= _FITTED**2:
                factors = "B @ A" if adapter.kind == "lora" else "the update"
                text += f"; {fitted * scale:.4g} * {factors} fits best"
                factor = fitted
        return Explanation(("unknown",), text, holds=False, factor=factor, rank=rank)


def _common_factor(factors: Sequence[float], fits: Callable[[float], bool]) -> float | None:
    """Return a number, with few digits if possible, that fits all tensors; None without one."""
    if not factors:
        return None
    middle = float(np.median(factors))
    rounded = [float(f"{middle:.{digits}g}") for digits in (1, 2, 3, 4)]
    # Coarse types of elements would admit numbers further off.
    near = [number for number in rounded if abs(number - middle) <= _ROUNDED * abs(middle)]
    return next(filter(fits, dict.fromkeys([*near, middle])), None)


def _inner_products(difference: Array, update: Array | float) -> Array:
    """Return the inner products of a difference and an update."""
    pairs = ((difference, difference), (difference, update), (update, update))
    return np.array([np.vdot(first, second) for first, second in pairs])


def _step(values: Array, kind: str) -> Array:
    """Return the distance of numbers to the next ones of a type."""
    form = ELEMENT_TYPES[kind].float_format if kind in ELEMENT_TYPES else None
    smallest = 0.0 if form is None else form.smallest
    # A zero has no exponent.
    steps: Array = np.maximum(np.where(values == 0, 0.0, spacing_of(values, kind)), smallest)
    return steps


# --- rows of adapters -----------------------------------------------------------------------------

# Most adapters have the rows of the tensor. The rows of an adapter may be in another order, as
# llama.cpp permutes the heads of queries and keys; they may be some of the rows, if the tensor is
# fused of several; or the tensor may have some of theirs.

_FEWEST_ROWS_OF_HEAD, _MOST_HEADS = 4, 1024


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """An adapter, and the rows of a tensor that it changes."""

    adapter: Adapter
    #: For each row of the tensor, the row of the adapter; negative for rows that it leaves.
    rows: Array | None = None
    #: Rows of the adapter in the orders that heads may have.
    orders: tuple[Array, ...] = ()
    #: Slot of the adapter, if the tensor is fused of several.
    slot: str = ""
    #: Why the change cannot be verified.
    problem: str = ""


def adapted_rows(
    adapter: Adapter,
    counterpart: Counterpart,
    streams: tuple[ElementStream, ElementStream],
    extents: Mapping[str, int],
) -> AdaptedRows:
    """Return the rows of a tensor that an adapter changes.

    `streams` has the tensor of both sides, and `extents` the numbers of the rows of all tensors.
    """
    ours, theirs = streams
    if adapter.is_turned(tuple(ours.array.shape), counterpart):
        adapter = adapter.turned()
    # An embedding that was saved as a whole may have been resized.
    shape = tuple((theirs if adapter.kind == "saved" else ours).array.shape)
    count = adapter.shape[0] if adapter.shape else 1
    heads = _numbers_of_heads(count, counterpart)
    problem = (
        # The scale of LoRA may follow from the merged model.
        (adapter.note if adapter.kind != "lora" else "")
        or counterpart.problem
        or _problem_of_rows(adapter, counterpart, shape, heads)
        or _problem_of_split(counterpart, count, extents)
        or _problem_of_extents(adapter, counterpart, shape)
    )
    if problem:
        return AdaptedRows(adapter, problem=problem)
    rows = _rows(adapter, counterpart, count, shape, extents)
    if not heads:
        return AdaptedRows(adapter, rows, slot=counterpart.slot)
    orders = [RopePermuted(0, n, counterpart.is_undone).positions(count) for n in heads]
    if rows is None:
        rows = np.arange(count)
    orders = [np.where(rows < 0, rows, order[rows]) for order in orders]
    first = orders[0] if counterpart.is_permuted else rows
    return AdaptedRows(adapter, first, tuple(orders), counterpart.slot)


def _rows(
    adapter: Adapter,
    counterpart: Counterpart,
    count: int,
    shape: Shape,
    extents: Mapping[str, int],
) -> Array | None:
    """Return the row of the adapter for each row of the tensor; None if they are the same."""
    number, names = counterpart.split
    if names:
        start = sum([extents[name] for name in names[:number]])
        return np.arange(start, start + extents[names[number]])
    positions: Array | None = None
    if adapter.kind == "rows":
        positions = np.array(adapter.rows)
    elif counterpart.slot and count != shape[0]:
        positions = np.arange(count) + _start(counterpart.slot, count, shape[0])
    if positions is None:
        return None
    rows = np.full(shape[0], -1)
    rows[positions] = np.arange(count)
    return rows


def _start(slot: str, count: int, total: int) -> int:
    """Return the first row of a part of a fused tensor."""
    # Keys and values have equally many rows, and so have a gate and its partner.
    starts = {"key": total - 2 * count, "value": total - count, "up": total - count}
    return starts.get(slot.rpartition(".")[2], 0)


def _numbers_of_heads(count: int, counterpart: Counterpart) -> list[int]:
    """Return the numbers of heads that rows in another order may have."""
    if counterpart.is_permuted is False:
        return []
    most = min(count // _FEWEST_ROWS_OF_HEAD, _MOST_HEADS)
    numbers = [counterpart.heads] if counterpart.heads else range(1, most + 1)
    return [number for number in numbers if count % (2 * number) == 0]


# --- problems -------------------------------------------------------------------------------------


def _problem_of_rows(
    adapter: Adapter, counterpart: Counterpart, shape: Shape, heads: list[int]
) -> str:
    """Return why the rows of an adapter cannot be found in a tensor."""
    is_by_rows = bool(counterpart.slot or counterpart.split[1] or heads)
    if is_by_rows and adapter.out_axis:
        return "its outputs are columns, and those of the tensor are other rows"
    if counterpart.is_permuted and not heads:
        return f"its {adapter.shape[:1]} rows are not heads with an even number of rows"
    if counterpart.slot and adapter.kind == "saved":
        return f"the adapter replaces {counterpart.slot}, which is a part of the tensor"
    if adapter.kind == "rows" and shape and max(adapter.rows) >= shape[0]:
        return f"it changes row {max(adapter.rows):,} of {shape[0]:,}"
    return ""


def _problem_of_split(counterpart: Counterpart, count: int, extents: Mapping[str, int]) -> str:
    """Return why a fused adapter does not have the rows of its parts."""
    names = counterpart.split[1]
    total = sum([extents.get(name, 0) for name in names])
    if names and total != count:
        return f"its update has {count:,} rows, but {some(names)} have {total:,}"
    return ""


def _problem_of_extents(adapter: Adapter, counterpart: Counterpart, shape: Shape) -> str:
    """Return why an update does not have the extents of a tensor; empty if it has them."""
    matrix = _matrix(shape)
    update = _matrix(adapter.shape)
    if adapter.kind == "ia3" and matrix and not counterpart.slot:
        fits = update in {(matrix[0], 1), (1, prod(matrix[1:]))}
    elif counterpart.slot:
        start = _start(counterpart.slot, *update[:1], *matrix[:1]) if update and matrix else -1
        is_half = counterpart.slot.startswith(("ffn.", "expert.")) and matrix[:1] != update[:1]
        fits = start >= 0 and (not is_half or matrix[0] == 2 * update[0])
        fits = fits and update[0] <= matrix[0] and update[1:] in {matrix[1:], (1,)}
    elif counterpart.split[1] or adapter.kind == "rows":
        fits = update[1:] == matrix[1:]
    else:
        fits = update == matrix
    return "" if fits else f"its update has the shape {list(adapter.shape)}"


def _matrix(shape: Shape) -> Shape:
    """Return the extents of a tensor as a matrix, in which a convolution has a row per output."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else shape
