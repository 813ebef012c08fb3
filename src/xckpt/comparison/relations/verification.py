"""Links between tensors: relations that a sample suggests, and that every element verifies."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from xckpt.arrays.blocks import BlockArray
from xckpt.arrays.streams import (
    LEAF,
    ChunkedStream,
    ChunkedZip,
    ElementStream,
    Zip,
    columns_of,
    whole_leaves,
)
from xckpt.comparison.arrangements import Step, arranged, part_of, parts_of_view
from xckpt.comparison.measure import (
    MEASURES,
    Comparison,
    as_floats,
    measures_of_pairs,
    with_same_bytes,
)
from xckpt.comparison.pairs import is_in_c_order, pair_of, stream_of_view
from xckpt.comparison.relations.causes import (
    FRACTION_BITS,
    LIKELY,
    Elementwise,
    Relation,
    SampledPairs,
    Transform,
    spacing_of,
)
from xckpt.comparison.relations.quantised_causes import (
    Quantised,
    WithinScales,
    suspect_levels,
    suspect_quantised,
)
from xckpt.comparison.relations.quantisers import graded
from xckpt.elements import ELEMENT_TYPES
from xckpt.scan.scanning import Accumulator, gather
from xckpt.storage.limits import cpu_count
from xckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from xckpt.progress import Progress
    from xckpt.typing import Array

T = TypeVar("T")
K = TypeVar("K", bound="Hashable")

#: Kinds with numbers that float64 cannot represent exactly.
INEXACT = frozenset({"int64", "uint64", "complex128"})
_SAMPLED = 4 * LEAF
_PIECE = 1 << 16
# Elements of a first sample that rules relations out, and relations to test on the whole sample.
_FEW = 2048
_TRIED = 8
# Elements of the sample whose correlation is computed.
_CORRELATED = 4096
# Below this correlation, one side is not a quantised copy of the other.
_RELATED = 0.5
# The least number of distinct values that shows a type other than the stored one.
_FEWEST_VALUES = 3
# The least number of values that show a grid.
_FEWEST_VARIED = 8
# The least number of values that show how far rounding moves them, and the least mean square of it.
_FEWEST_MOVED, _LEAST_MOVED = 32, 1 / 24
# The same for fewer values, whose mean varies.
_FEWEST, _LEAST_OF_FEW = 4, 1e-3


@dataclass(frozen=True, slots=True)
class Side:
    """A view of a tensor of one side."""

    view: Any
    tensor: ElementStream
    #: Position of the first element if the view is a contiguous run of the tensor, else None.
    run: int | None = None

    @classmethod
    def whole(cls, stream: ElementStream) -> Side:
        """Return a side that is a whole tensor."""
        return cls(stream.array, stream, 0)

    @classmethod
    def of(cls, view: Any, stream: ElementStream) -> Side:
        """Return a side that is a view of a tensor."""
        return cls.whole(stream) if view is stream.array else cls(view, stream)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.view.shape)

    @property
    def block_type(self) -> str:
        """Type of the blocks that store the numbers; empty without blocks."""
        array, _ = parts_of_view(self.view)
        return array.block_type if isinstance(array, BlockArray) else ""

    def stream(self, name: str) -> ElementStream:
        """Return a stream of the elements in C order."""
        return stream_of_view(self.view, self.tensor, name)

    def graded(self) -> ElementStream | None:
        """Return a stream of the elements with the distances that stored scales allow."""
        if self.run is None:
            return None
        is_whole = self.size == self.tensor.size
        return graded(self.tensor, self.run, None if is_whole else self.size)


def sides_after(
    ours: ElementStream, theirs: ElementStream, steps: Sequence[Step]
) -> tuple[Side, Side]:
    """Return two tensors as the sides of one order, the first one after steps."""
    return Side.of(arranged(ours.array, steps), ours), Side.whole(theirs)


@dataclass(slots=True)
class Link:
    """Numbers of `a` that may correspond to numbers of `b`, in one or several orders of reading."""

    #: The names of both tensors.
    names: tuple[str, str]
    #: Two sides of one shape for each order of reading, the preferred order first.
    orders: list[tuple[Side, Side]]
    #: The number that the architecture is known to add.
    offset: float | None = None
    #: Whether zeros were added, which hides pruning.
    is_padded: bool = False
    #: The `MEASURES` of the pair, if they are known; else they are computed on the way.
    known: Mapping[str, float] | None = None
    #: Results of the examination.
    is_sampled: bool = False
    order: int = 0
    correlation: float = math.nan
    pair: Zip | ChunkedZip | None = None
    relations: tuple[Relation, ...] = ()
    evidence: RelationCounts | None = None
    #: Share of the sample for which the first relation holds.
    share: float = 0.0
    #: Type that represents nearly all numbers of the finer side; empty for none.
    grid: str = ""

    @property
    def is_constant(self) -> bool:
        """True if the sample is constant."""
        return math.isnan(self.correlation)

    @property
    def is_graded(self) -> bool:
        """True if the pair has the distances that the stored scales of one side allow."""
        return bool(self.relations) and isinstance(self.relations[0], WithinScales)

    @property
    def relation(self) -> Relation | None:
        """The strictest relation that holds for all elements."""
        if self.evidence is None or not self.relations:
            return None
        for relation, matches in zip(self.relations, self.evidence.matches.tolist(), strict=True):
            if matches == self.evidence.count and not (relation.masked and self.is_padded):
                return relation
        return None

    @property
    def measures(self) -> Mapping[str, float]:
        """The `MEASURES` of the pair."""
        if self.known is not None or self.evidence is None or self.evidence.measures is None:
            return self.known or {}
        row = measures_of_pairs(np.array([self.evidence.measures.row()]))[0]
        return dict(zip(MEASURES, row.tolist(), strict=True))

    @property
    def different(self) -> int:
        """Number of elements that differ."""
        return round(self.measures["count"] * (1 - self.measures["equal_fraction"]))

    @property
    def likely(self) -> tuple[float, Relation] | None:
        """The relation that holds for most elements, after its share of them."""
        if self.evidence is None or not self.relations:
            return None
        shares = (self.evidence.matches / max(1, self.evidence.count)).tolist()
        share = max(shares)
        return (share, self.relations[shares.index(share)]) if share >= LIKELY else None


class RelationCounts(Accumulator):
    """Counts of the pairs of elements for which each relation holds."""

    # Blocks of quantised elements are in one leaf.
    leaf = LEAF

    def __init__(
        self,
        kinds: tuple[str, str],
        measures: Comparison | None,
        relations: tuple[Relation, ...],
        grid: str = "",
    ) -> None:
        self.kinds = kinds
        self.relations = relations
        self.grid = Transform(types=(grid,)) if grid else None
        self.measures = measures
        #: Numbers of each side that the grid does not represent.
        self.off_grid = np.zeros(2, np.int64)
        #: Elements that are equal and not zero; counted for quantised tensors only.
        self.equal = self.filled = 0
        self.count = 0
        self.matches = np.zeros(len(relations), np.int64)
        #: Zeros in the derived side; counted only if the first relation is masked.
        self.zeros = 0

    @classmethod
    def begin(cls, stream: Any, argument: Any) -> RelationCounts:
        """Return empty counts for a stream; the argument is a link."""
        measures = Comparison.begin(stream, None) if argument.known is None else None
        return cls(stream.kinds, measures, argument.relations, argument.grid)

    def update(self, start: int, *columns: Array) -> None:
        """Add pairs."""
        count = len(columns[0])
        self.count += count
        if self.measures is not None:
            plain = [np.ascontiguousarray(c["value"]) if c.dtype.names else c for c in columns]
            self.measures.update(start, *plain)
        block = max(relation.block for relation in self.relations)
        # Elements outside whole blocks stay unverified.
        first = min(count, -start % block)
        for offset in range(first, count, _PIECE):
            x, y = (
                side[offset : offset + _PIECE]
                if side.dtype.names
                else as_floats(np.ascontiguousarray(side[offset : offset + _PIECE]), kind)
                for side, kind in zip(columns, self.kinds, strict=True)
            )
            size = len(x) // block * block
            self._add(x[:size], y[:size])

    def _add(self, x: Array, y: Array) -> None:
        if not len(x):
            return
        backwards = self.relations[0].backwards
        if self.relations[0].masked:
            self.zeros += int(np.count_nonzero((x if backwards else y) == 0))
        with np.errstate(all="ignore"):
            for number, relation in enumerate(self.relations):
                count = relation.count_in(x, y)
                if count == len(x) and number == 0:
                    # The remaining relations are more lenient.
                    self.matches += count
                    break
                self.matches[number] += count
            if self.grid is not None:
                self.off_grid += [np.count_nonzero(self.grid(side) != side) for side in (x, y)]
            if self.relations[0].causes == ("quantised",):
                u, v = (values["value"] if values.dtype.names else values for values in (x, y))
                is_filled = u != 0
                self.filled += int(np.count_nonzero(is_filled))
                self.equal += int(np.count_nonzero(is_filled & (u == v)))

    def imply(self, zeros: int, row: int = 0, dead: int = 0) -> None:
        """Add pairs of zeros that neither side stores."""
        self.count += zeros
        self.zeros += zeros
        if self.measures is not None:
            self.measures.imply(zeros)
        block = np.zeros(max(relation.block for relation in self.relations), np.float32)
        for number, relation in enumerate(self.relations):
            if relation.count_matches(block, block) == len(block):
                self.matches[number] += zeros

    def merge(self, other: RelationCounts) -> None:
        """Add the counts of other pairs."""
        self.count += other.count
        self.matches += other.matches
        self.zeros += other.zeros
        self.off_grid += other.off_grid
        self.equal += other.equal
        self.filled += other.filled
        if self.measures is not None and other.measures is not None:
            self.measures.merge(other.measures)

    def close(self) -> RelationCounts:
        """Add what the measures have in the memory of this thread."""
        if self.measures is not None:
            self.measures.close()
        return self


def examine(links: Sequence[Link], bar: Progress, *, certain: bool = False) -> None:
    """Suggest relations for each link from a sample, and verify them on every element.

    With `certain`, verify only relations that hold for the whole sample. Links that were examined
    before keep their results.
    """
    links = [link for link in links if link.evidence is None]
    _suggest_all(links)
    _verify([link for link in links if link.relations and (not certain or link.share == 1.0)], bar)


def compare_and_examine(
    all_pairs: Sequence[Zip | ChunkedZip],
    links: Sequence[Link | None],
    numbers: Sequence[int],
    bar: Progress,
    *,
    cache: bool,
) -> list[Comparison]:
    """Compare some pairs, and verify what samples of their links suggest in the same pass."""
    pairs = [all_pairs[number] for number in numbers]
    comparisons = dict(with_same_bytes(pairs, bar, range(len(pairs))))
    candidates = [
        (n, link)
        for n, link in enumerate([links[number] for number in numbers])
        # Sums depend on the order of the elements, which links read in C order.
        if link is not None and n not in comparisons and is_in_c_order(pairs[n])
    ]
    _suggest_all([link for _, link in candidates])
    related = {n: link for n, link in candidates if link.relations and not link.is_graded}
    _verify(list(related.values()), bar)
    for n, link in related.items():
        if link.evidence is not None and link.evidence.measures is not None:
            comparisons[n] = link.evidence.measures
    uncompared = [n for n in range(len(pairs)) if n not in comparisons]
    finish = lambda _, comparison: comparison  # noqa: E731
    remaining = gather([pairs[n] for n in uncompared], Comparison, finish, bar, cache=cache)
    comparisons |= zip(uncompared, remaining, strict=True)
    return [comparisons[n] for n in range(len(pairs))]


def _suggest_all(links: Sequence[Link]) -> None:
    """Suggest relations for the links without a sample."""
    links = [link for link in links if not link.is_sampled]
    with Threads(cpu_count(), "xckpt-explain") as threads:
        list(threads.map(_suggest, links) if len(links) > 1 else map(_suggest, links))


def _verify(links: Sequence[Link], bar: Progress) -> None:
    """Test the suggested relations of links on every element."""
    pairs: list[Any] = [link.pair for link in links]
    results = gather(pairs, RelationCounts, lambda _, counts: counts, bar, arguments=links)
    for link, evidence in zip(links, results, strict=True):
        link.evidence = evidence


class Attempt(NamedTuple, Generic[T]):
    """A suggestion, and the examined links that it consists of."""

    suggestion: T
    links: list[Link]

    @property
    def held(self) -> int:
        """Number of the links that hold for all elements."""
        return sum([link.relation is not None for link in self.links])

    @property
    def holds(self) -> bool:
        """True if all links hold."""
        return self.held == len(self.links)

    @property
    def likelihood(self) -> float:
        """Number of the links that hold, and in part that hold for most elements."""
        return sum([1.0 if link.relation else link.likely[0] / 2 if link.likely else 0.0
                    for link in self.links])  # fmt: skip


def examine_in_turn(
    suggestions: Mapping[K, Sequence[T]],
    links_of: Callable[[T], list[Link]],
    bar: Progress,
    kind_of: Callable[[T], Hashable] = lambda _: None,
) -> dict[K, Attempt[T]]:
    """Examine the suggestions for each key, likeliest first, until one holds; return the best ones.

    A kind of suggestion that holds for one key is tried first for the others.
    """
    results: dict[K, Attempt[T]] = {}
    pending = [(key, list(untried), list[Attempt[T]]()) for key, untried in suggestions.items()]
    proven_kinds: set[Hashable] = set()
    while pending := [entry for entry in pending if entry[1] and entry[0] not in results]:
        for _, untried, attempts in pending:
            untried.sort(key=lambda suggestion: kind_of(suggestion) not in proven_kinds)
            suggestion = untried.pop(0)
            attempts.append(Attempt(suggestion, links_of(suggestion)))
        examine(list(chain.from_iterable(attempts[-1].links for *_, attempts in pending)), bar)
        for key, untried, attempts in pending:
            if attempts[-1].holds:
                proven_kinds.add(kind_of(attempts[-1].suggestion))
            if attempts[-1].holds or not untried:
                results[key] = max(attempts, key=lambda attempt: (attempt.held, attempt.likelihood))
    return results


def _suggest(link: Link) -> None:
    """Choose an order of reading from a sample, and the relations to verify in that order."""
    link.is_sampled = True
    for order, (ours, theirs) in enumerate(link.orders):
        pair = pair_of(ours.stream(link.names[0]), theirs.stream(link.names[0]), link.names[0])
        if not ours.size or INEXACT & set(pair.kinds):
            return
        sample = sample_of(pair, ours, theirs)
        if order == 0:
            link.correlation = correlation_of(sample.x, sample.y)
        graded_pair = _graded_pair(ours, theirs, link.names[0])
        graded_sample = None if graded_pair is None else sample_of(graded_pair, ours, theirs)
        relations = _suspect(sample, graded_sample, link.offset)
        is_graded = bool(relations) and isinstance(relations[0], WithinScales)
        # Graded relations hold for their whole sample.
        share = 1.0 if is_graded else _share_of(relations, sample)
        if relations and (share > link.share or not link.relations):
            link.relations, link.order, link.share = relations, order, share
            link.grid = next(filter(None, [_grid_of(sample, r) for r in relations]), "")
            link.pair = graded_pair if is_graded else pair
        if share == 1.0:
            break


def _graded_pair(ours: Side, theirs: Side, name: str) -> Zip | ChunkedZip | None:
    """Return a pair with the stored scales of one side, preferably of `theirs`; None without."""
    # A scheduler computes chunks of numbers alone.
    if isinstance(ours.tensor, ChunkedStream) or isinstance(theirs.tensor, ChunkedStream):
        return None
    if (graded_stream := theirs.graded()) is not None:
        return pair_of(ours.stream(name), graded_stream, name)
    if (graded_stream := ours.graded()) is not None:
        return pair_of(graded_stream, theirs.stream(name), name)
    return None


def _grid_of(sample: SampledPairs, relation: Relation) -> str:
    """Return the type that represents nearly all numbers of the side that is rounded."""
    if "rounded" not in relation.causes:
        return ""
    side = sample.reverse if relation.backwards else sample
    finite = side.x[np.isfinite(side.x)]
    varied = finite[_are_varied(finite)]
    bits = FRACTION_BITS.get(side.kinds[0], 0)
    for name in ("float8_e4m3fn", "bfloat16", "float16"):
        if FRACTION_BITS[name] < bits and len(varied) >= _FEWEST_VARIED:
            is_on = Transform(types=(name,))(varied) == varied
            if np.count_nonzero(is_on) >= LIKELY * len(varied):
                return name
    return ""


def _moves_too_little(relation: Elementwise, side: SampledPairs, grid: str) -> bool:
    """Return whether rounding moves numbers less than it moves real ones: by 1/12 step squared.

    It does if they were on the grid before a small damage.
    """
    if "rounded" not in relation.causes:
        return False
    kind = min(relation.transform.types, key=FRACTION_BITS.__getitem__)
    if FRACTION_BITS.get(grid or side.kinds[0], 99) <= FRACTION_BITS[kind]:
        return False
    moved = replace(relation.transform, types=())(side.x).astype(np.float64)
    is_moved = np.isfinite(moved) & np.isfinite(side.y) & (side.y != 0) & _are_varied(moved)
    moved, rounded = moved[is_moved], side.y[is_moved].astype(np.float64)
    count = len(np.unique(moved))
    if count < _FEWEST:
        return False
    least = _LEAST_MOVED if count >= _FEWEST_MOVED else _LEAST_OF_FEW
    form = ELEMENT_TYPES[kind].float_format
    step = np.maximum(spacing_of(moved, kind), form.smallest if form else 0.0)
    return float(np.mean(np.square((rounded - moved) / step))) < least


def _are_varied(numbers: Array) -> Array:
    """Return a mask without zeros, powers of two and the like, which are numbers of any type."""
    mantissas = np.frexp(numbers)[0] * 8
    mask: Array = mantissas != np.rint(mantissas)
    return mask


def _share_of(relations: tuple[Relation, ...], sample: SampledPairs) -> float:
    """Return the share of a sample for which the first relation holds."""
    if not relations:
        return 0.0
    with np.errstate(all="ignore"):
        pairs = sample.first(len(sample.x), relations[0].block)
        return relations[0].count_in(*pairs) / max(1, len(sample.x))


def begins_quantised(names: tuple[str, str], order: tuple[Side, Side], size: int) -> bool:
    """Return whether a quantiser makes the first numbers of one side from the other side."""
    ours, theirs = (
        Side(part_of(side.view, (0,) * len(side.view.shape), (1, size)), side.tensor)
        for side in order
    )
    pair = pair_of(ours.stream(names[0]), theirs.stream(names[0]), names[0])
    if INEXACT & set(pair.kinds):
        return False
    return suspect_quantised(sample_of(pair, ours, theirs), None, None) is not None


def sample_of(pair: Zip | ChunkedZip, ours: Side, theirs: Side) -> SampledPairs:
    """Return pairs of elements as floats, from the beginning and the middle of the tensors."""
    blocks: list[tuple[Any, ...]] = []
    if isinstance(pair, ChunkedZip):
        first = pair.array.blocks[(0,) * pair.array.ndim]
        blocks.append(columns_of(np.asarray(first.compute()).reshape(-1)[:_SAMPLED]))
    else:
        buffer = np.empty(_SAMPLED * 16, np.uint8)
        middle = pair.size // 2 // LEAF * LEAF
        for start in [0, middle] if middle >= _SAMPLED and not pair.whole else [0]:
            stop = min(start + _SAMPLED, pair.size)
            _, columns = next(whole_leaves(pair.blocks(start, stop, buffer), _SAMPLED))
            blocks.append(tuple([column[:_SAMPLED].copy() for column in columns]))
    sides = []
    for columns, kind in zip(zip(*blocks, strict=True), pair.kinds, strict=True):
        parts = [
            part if part.dtype.names else as_floats(np.ascontiguousarray(part), kind)
            for part in columns
        ]
        sides.append(np.concatenate(parts))
    return SampledPairs(sides[0], sides[1], pair.kinds, (ours.block_type, theirs.block_type))


# --- relations that a sample suggests -------------------------------------------------------------


def _suspect(
    sample: SampledPairs, graded: SampledPairs | None = None, offset: float | None = None
) -> tuple[Relation, ...]:
    """Return the relations that hold for the whole sample, or else one that holds for most of it.

    `graded` is the sample with the distances that the stored scales of one side allow. `offset` is
    the number that the architecture is known to add to this tensor.
    """
    thinned = slice(None, None, max(1, len(sample.x) // _FEW))
    thin = replace(sample, x=sample.x[thinned].copy(), y=sample.y[thinned].copy())
    with np.errstate(all="ignore"):
        shares, certain = _of_one_direction(sample, thin, backwards=False)
        # Elements outside a sample of equal numbers may have been rounded on either side.
        if not any(relation.causes for relation in certain):
            shares_back, certain_back = _of_one_direction(sample, thin, backwards=True)
            shares += shares_back
            certain += [relation for relation in certain_back if relation.causes or not certain]
        plain = [relation for relation in certain if not relation.masked]
        if plain:
            # Elements outside the sample may have been set to zero.
            return *plain, *(replace(relation, masked=True) for relation in plain)
        is_related = not correlation_of(thin.x, thin.y) < _RELATED
        quantised = suspect_quantised(sample, graded, offset) if is_related else None
        if quantised is not None and _is_shown(quantised, sample):
            return (quantised,)
        levels = suspect_levels(sample)
        if levels is not None and not _is_shown(levels[1], sample):
            levels = None
        if is_related and levels is not None and levels[0] == 1.0:
            return (levels[1],)
        if certain:
            return (certain[0],)
        equal = float(np.mean(thin.x == thin.y))
        best: Relation | None
        share, best = max(shares, key=lambda entry: entry[0], default=(0.0, None))
        if levels is not None and levels[0] > share:
            share, best = levels
    if best is None or share < LIKELY or share < (1 + equal) / 2:
        return ()
    return (best,)


def _of_one_direction(
    sample: SampledPairs, thin: SampledPairs, *, backwards: bool
) -> tuple[list[tuple[float, Relation]], list[Elementwise]]:
    """Return relations with their shares of a thin sample, and those that hold for the sample."""
    suspected = [
        (share, replace(relation, backwards=backwards))
        for share, relation in Elementwise.suspected(thin.reverse if backwards else thin)
    ]
    suspected = [(share, relation) for share, relation in suspected if _is_shown(relation, thin)]
    certain = [relation for share, relation in suspected if share == 1.0][:_TRIED]
    size = len(sample.x)
    return [*suspected], [e for e in certain if e.count_in(sample.x, sample.y) == size]


def _is_shown(relation: Relation, sample: SampledPairs) -> bool:
    """Return whether types or varied numbers support a relation; a constant fits any type."""
    side = sample.reverse if relation.backwards else sample
    is_stated = False
    if isinstance(relation, Elementwise):
        if _moves_too_little(relation, side, _grid_of(sample, relation)):
            return False
        types = {"float32", "float64", side.kinds[1]}
        # A small damage to zeros would be rounded away, too.
        is_lost = np.any(side.x) and not np.any(side.y)
        is_stated = not is_lost and types.issuperset(relation.transform.types)
    elif isinstance(relation, Quantised):
        is_in_blocks = relation.scheme == side.blocks[1] or isinstance(relation, WithinScales)
        is_stated = is_in_blocks and not relation.earlier and not relation.transform.types
    return is_stated or len(np.unique(side.y)) >= _FEWEST_VALUES


def correlation_of(x: Array, y: Array) -> float:
    """Estimate the correlation of two vectors from a few pairs; NaN if one side is constant."""
    few = slice(None, None, max(1, len(x) // _CORRELATED))
    x, y = x[few], y[few]
    both = np.isfinite(x) & np.isfinite(y)
    u, v = x[both].astype(np.float64), y[both].astype(np.float64)
    if len(u) < 2:
        return float("nan")
    with np.errstate(all="ignore"):
        u -= u.mean()
        v -= v.mean()
        return float(np.vdot(u, v) / np.sqrt(np.vdot(u, u) * np.vdot(v, v)))
