"""Relations between the elements of two tensors that are known before a search.

The formats and the family of a model state them: llama.cpp permutes the rows of queries and keys
for rotary embeddings, and linear layers of Burn, Flax and Keras are transposed. A sample decides
between a stated relation and the elements at their own positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xckpt.comparison.arrangements import USUAL_WIDTHS, RopePermuted, Step, Transposed
from xckpt.comparison.classify import TURNED_SLOTS, Places
from xckpt.comparison.pairs import Match, identity_of, pair_of
from xckpt.comparison.relations.verification import correlation_of, sample_of, sides_after
from xckpt.scan.statistics_cache import open_rows
from xckpt.storage.limits import cpu_count
from xckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.arrays.kinds import Kind
    from xckpt.arrays.streams import ChunkedZip, ElementStream, Zip

    StepChain = tuple[Step, ...]

# Elements in the two orders correlate less than this if they are not the same numbers.
_RELATED = 0.5
# Margin by which a stated relation has to agree better than the elements at their own positions.
_CLEARLY = 0.1


@dataclass(frozen=True)
class _Choice:
    """A pair of tensors, and the chains of steps that may relate their elements."""

    match: Match
    chains: Sequence[StepChain]
    kind: Kind
    identity: tuple[Any, ...] | None

    def best(self) -> int:
        """Return the number of the chain that a sample supports; -1 for none."""
        direct = self._correlation(()) if self.match.pair is not None else -1.0
        scores = np.array([self._correlation(chain) for chain in self.chains])
        if np.isnan(scores).all():  # of constants
            return -1 if self.match.pair is not None else 0
        best = int(np.nanargmax(scores))
        is_related = scores[best] >= _RELATED and not scores[best] <= direct + _CLEARLY
        return best if is_related else -1

    def _correlation(self, steps: StepChain) -> float:
        ours, theirs = self.match.ours, self.match.theirs
        if ours is None or theirs is None:
            return -1.0
        pair = _related_pair(ours, theirs, steps, self.match.name)
        sample = sample_of(pair, *sides_after(ours, theirs, steps))
        return correlation_of(sample.x, sample.y)


def relate_known(
    rows: Sequence[Sequence[Match]], places: Places, *, cache: bool
) -> list[list[Match]]:
    """Return the matches with the steps that their places in the model state, if these hold."""
    choices: dict[int, _Choice] = {}
    for match in (match for matches in rows for match in matches):
        ours, theirs = match.ours, match.theirs
        if ours is None or theirs is None or match.problem is not None or not match.size:
            continue
        chains = _known_chains(match, places)
        if chains:
            identity = identity_of(ours, theirs, repr(chains))
            choices[id(match)] = _Choice(match, chains, ours.kind, identity)
    listed = list(choices.values())
    with (
        open_rows(listed, ("relation",), 1, enabled=cache) as cached,
        Threads(cpu_count(), "xckpt-relate") as threads,
    ):
        missing = [listed[number] for number in cached.missing]
        cached.add([float(best)] for best in threads.map(_Choice.best, missing))
    bests = cached.values[:, 0].astype(int).tolist()
    chosen = {
        key: choice.chains[best]
        for (key, choice), best in zip(choices.items(), bests, strict=True)
        if best >= 0
    }
    return [[_related(match, chosen.get(id(match), ())) for match in matches] for matches in rows]


def _related(match: Match, steps: StepChain) -> Match:
    if not steps or match.ours is None or match.theirs is None:
        return match
    related = _related_pair(match.ours, match.theirs, steps, match.name)
    return match._replace(steps=steps, related=related)


def _related_pair(
    ours: ElementStream, theirs: ElementStream, steps: StepChain, name: str
) -> Zip | ChunkedZip:
    """Return a pair of the elements that belong together after steps."""
    first, second = sides_after(ours, theirs, steps)
    pair = pair_of(first.stream(name), second.stream(name), name)
    if steps:
        pair.identity = identity_of(ours, theirs, repr(steps))
    return pair


def _known_chains(match: Match, places: Places) -> list[StepChain]:
    """Return the chains of steps that the match, the shapes, or the places of two tensors state."""
    ours, theirs, partner = match.ours, match.theirs, match.partner
    if ours is None or theirs is None:
        return []
    shape, shape_of_b = tuple(ours.array.shape), tuple(theirs.array.shape)
    names = match.name, partner.name if partner else match.name
    chains: list[StepChain] = []
    if partner is not None and partner.steps:
        chains.append(partner.steps)
    if shape == shape_of_b:
        chains += [(step,) for step in _rope_steps(names, shape, places)]
    is_reversed = len(shape) == 2 and shape == shape_of_b[::-1]
    if is_reversed and (shape != shape_of_b or places.are_turned(names)):
        chains.append((Transposed((1, 0)),))
    return list(dict.fromkeys(chains))


def _rope_steps(
    names: tuple[str, str], shape: tuple[int, ...], places: Places
) -> list[RopePermuted]:
    """Return the permutations of the heads of queries and keys between two spellings."""
    ours, theirs = places.both(names)
    if ours is None or theirs is None or ours.slot != theirs.slot or not shape:
        return []
    is_known = ours.is_rotary and theirs.is_rotary and ours.slot in TURNED_SLOTS
    if not is_known or ours.alternates == theirs.alternates:
        return []
    is_undone = ours.alternates is True or theirs.alternates is False
    rows = shape[0]
    numbers = places.heads(names) or [rows // size for size in USUAL_WIDTHS if rows % size == 0]
    return [RopePermuted(0, n, is_undone) for n in numbers if n and rows % (2 * n) == 0]
