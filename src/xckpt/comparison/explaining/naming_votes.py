"""Pairs with equal numbers in whose place a tensor without a partner fits better.

The numbers of another tensor may be under a name, and so explain it. The tensor that belongs there
then has no partner. Votes of the other pairs, and the places in the models, show which one fits.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from functools import lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING, NamedTuple

from xckpt.comparison.explaining.outcome import ALONE, SIDES, quoted
from xckpt.comparison.explaining.siblings import Siblings, doubted
from xckpt.comparison.names import likeness, stem_of
from xckpt.statistics.tables import TIED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from xckpt.comparison.classify import Places
    from xckpt.comparison.explaining.outcome import Case, Explanation
    from xckpt.comparison.explaining.work import Explanations, Work

_SEPARATOR = re.compile(r"([./])")
_DIGITS = re.compile(r"(?<![0-9])[0-9]{1,9}(?![0-9])")
# Names with more numbers do not vote with the last ones.
_MOST_NUMBERS = 4
# The last words of names with more words are not numbered.
_MOST_WORDS = 32
# A pair that so many others follow, with the same distance of the numbers, is not doubted.
_REGULAR = 3
# The most tensors of one size without a partner that are tried for a pair, and for all pairs.
_MOST_LONELY, _MOST_TRIED = 32, 1 << 13


class _Name(NamedTuple):
    """The parts of a name that votes count."""

    #: The name with one of its numbers left out, and the number.
    forms: tuple[tuple[str, int], ...]
    #: The text before and with each number: ``layers.3``.
    fronts: tuple[str, ...]
    stem: str


def _with_zeros(names: Sequence[str]) -> dict[str, str]:
    """Return other spellings of names: ``lstm`` beside ``lstm_1`` is ``lstm_0``."""
    pieces = {name: _SEPARATOR.split(name, _MOST_WORDS) for name in names}
    modules: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for words in pieces.values():
        for n, word in enumerate(words):
            base, _, number = word.rpartition("_")
            if base and number.isdecimal():
                modules[*words[:n], base].add(number)
    spellings = {
        name: "".join([
            f"{word}_0" if "0" not in modules.get(tuple(words[: n + 1]), "0") else word
            for n, word in enumerate(words)
        ])
        for name, words in pieces.items()
    }  # fmt: skip
    return {name: spelling for name, spelling in spellings.items() if spelling != name}


@lru_cache(maxsize=1 << 16)
def _parsed(name: str) -> _Name:
    numbers = list(_DIGITS.finditer(name))[:_MOST_NUMBERS]
    forms = tuple([(f"{name[: m.start()]}#{name[m.end() :]}", int(m[0])) for m in numbers])
    return _Name(forms, tuple([name[: m.end()] for m in numbers]), stem_of(name))


class _Fit(NamedTuple):
    """Votes for two tensors as a pair; larger numbers are better."""

    #: Agreement of their places in both models.
    place: int
    #: Numbers of the other pairs with the same words, and with the same distance of numbers.
    words: int
    distances: int
    #: Numbers of the other pairs of their modules, and of their layers.
    modules: int
    layers: int


class _Subject(NamedTuple):
    """A trait of two names, which other pairs may share."""

    both: object
    #: Traits of one name alone. `both` counts only if most pairs with one of them share it.
    ours: object
    theirs: object


def _subjects(a: str, b: str) -> Iterator[list[_Subject]]:
    """Yield what two names have in common with other pairs, for each number of votes of a fit."""
    first, second = _parsed(a), _parsed(b)
    forms = list(product(first.forms, second.forms))
    yield [_Subject((x, y), (0, x), (1, y)) for (x, _), (y, _) in forms]
    yield [_Subject((x, y, m - n), (x, y), (x, y)) for (x, n), (y, m) in forms]
    yield [_Subject((first.stem, second.stem, ""), (first.stem, 0), (second.stem, 1))]
    fronts = product(first.fronts, second.fronts)
    yield [_Subject((x, y, "front"), (x, 0, "front"), (y, 1, "front")) for x, y in fronts]


class _Votes:
    """Numbers of pairs by what their names have in common."""

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        places: Places,
        spellings: Sequence[Mapping[str, str]],
    ) -> None:
        self.places, self.spellings = places, spellings
        self._counts = Counter(chain.from_iterable(map(self._subjects, pairs)))

    def _subjects(self, pair: tuple[str, str]) -> frozenset[object]:
        subjects = _subjects(*_respelled(pair, self.spellings))
        return frozenset(chain.from_iterable(chain.from_iterable(subjects)))

    def without(self, pair: tuple[str, str]) -> _VotesOfOthers:
        """Return the votes of all other pairs."""
        return _VotesOfOthers(self._counts, self._subjects(pair), self.places, self.spellings)


def _respelled(pair: tuple[str, str], spellings: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    a, b = pair
    return spellings[0].get(a, a), spellings[1].get(b, b)


class _VotesOfOthers(NamedTuple):
    """The votes of all pairs but one."""

    counts: Mapping[object, int]
    omitted: Collection[object]
    places: Places
    #: Other spellings of names of each side, for the votes.
    spellings: Sequence[Mapping[str, str]]

    def fit(self, a: str, b: str) -> _Fit:
        """Return how well a tensor of `a` and one of `b` fit together."""
        subjects_of_votes = _subjects(*_respelled((a, b), self.spellings))
        votes = [sum(map(self._votes, subjects)) for subjects in subjects_of_votes]
        return _Fit(self.places.likelihood(a, b), *votes)

    def _votes(self, subject: _Subject) -> int:
        """Return how many pairs agree on both; 0 unless most do that agree on one of them."""
        both, ours, theirs = (self.counts.get(s, 0) - (s in self.omitted) for s in subject)
        return both if 2 * both > max(ours, theirs) else 0

    def prefers(self, side: int, partner: str, first: str, second: str) -> bool:
        """Return whether the first of two tensors of a side fits a tensor of the other better."""
        is_worse = self.is_as_good(side, partner, second, first)
        return not is_worse and self.is_as_good(side, partner, first, second)

    def is_as_good(self, side: int, partner: str, first: str, second: str) -> bool:
        """Return whether the first of two tensors of a side fits a partner as well as the second.

        The numbers and words of their names count if all else is equal.
        """
        pairs = [(partner, name) if side else (name, partner) for name in (first, second)]
        fit, fit_of_second = (self.fit(*names) for names in pairs)
        if fit == fit_of_second:
            spelled = [_respelled(names, self.spellings) for names in pairs]
            return _resemblance(*spelled[0]) >= _resemblance(*spelled[1])
        return all(n >= m for n, m in zip(fit, fit_of_second, strict=True))


def _resemblance(a: str, b: str) -> tuple[bool, int]:
    """Return whether two names have as many numbers, and how many words they have in common."""
    words = likeness(_DIGITS.sub("", a), _DIGITS.sub("", b))
    return len(_parsed(a).fronts) == len(_parsed(b).fronts), words


class _Pair(NamedTuple):
    """The names and sizes of a tensor and of its explanation."""

    names: tuple[str, str]
    sizes: tuple[int, int]


def fitting_worse(work: Work) -> Explanations:
    """Return new explanations of pairs in whose place a tensor without a partner fits better."""
    cases, explanations = work.cases, work.explanations
    siblings = Siblings(cases, explanations)
    lonely = _lonely(cases, explanations)
    if not any(lonely):
        return {}
    pairs = _pairs(siblings)
    spellings = [_with_zeros(list(numbers)) for numbers in siblings.numbers]
    votes = _Votes([pair.names for pair in pairs], work.places, spellings)
    limit = max(1, min(_MOST_LONELY, _MOST_TRIED // max(1, len(pairs))))
    for of_side in lonely:
        of_side.update({size: names[:limit] for size, names in of_side.items()})
    wholes = _Wholes(_pairs(siblings, are_parts=True), votes, lonely)
    unlike: dict[int, Explanation] = {}
    for pair in pairs:
        better = _better(pair, lonely, votes) or wholes.better(pair, limit)
        if better is not None:
            side, name = better
            reason = f"{quoted([name])} of {SIDES[side]}, which has no partner, fits better"
            numbers = [of_side[n] for n, of_side in zip(pair.names, siblings.numbers, strict=True)]
            unlike |= doubted(siblings, list(dict.fromkeys(numbers)), reason)
    return unlike


def _better(
    pair: _Pair, lonely: Sequence[Mapping[int, Sequence[str]]], votes: _Votes
) -> tuple[int, str] | None:
    """Return the side and name of a tensor without a partner that fits better; None without one."""
    if not any(of_side.get(n) for of_side, n in zip(lonely, pair.sizes, strict=True)):
        return None
    remaining = votes.without(pair.names)
    fit = remaining.fit(*pair.names)
    if votes.places.agree(*pair.names) or fit.distances >= _REGULAR:
        return None
    for side in (0, 1):
        tensor, partner = pair.names[side], pair.names[1 - side]
        for name in lonely[side].get(pair.sizes[side], ()):
            rivals = lonely[1 - side].get(pair.sizes[1 - side], ())
            if remaining.prefers(side, partner, name, tensor) and not any(
                remaining.is_as_good(1 - side, name, rival, partner) for rival in rivals
            ):
                return side, name
    return None


class _Wholes:
    """Larger tensors without a partner, by which the parts of other such tensors are explained."""

    def __init__(
        self, pairs: Sequence[_Pair], votes: _Votes, lonely: Sequence[Mapping[int, Sequence[str]]]
    ) -> None:
        of_parts = _Votes([pair.names for pair in pairs], votes.places, votes.spellings)
        self._votes, self._of_parts = votes, of_parts.without(("", ""))
        self._lonely = [
            sorted([(size, name) for size in side for name in side[size]]) if pairs else []
            for side in lonely
        ]

    def better(self, pair: _Pair, limit: int) -> tuple[int, str] | None:
        """Return the side and name of a tensor whose part should be in a pair; None without one."""
        for side, size in enumerate(pair.sizes):
            start = bisect_left(self._lonely[side], (size + 1, ""))
            for _, name in self._lonely[side][start : start + limit]:
                names = (pair.names[0], name) if side else (name, pair.names[1])
                if self._of_parts.fit(*names).distances > 1 and not self._is_regular(pair):
                    return side, name
        return None

    def _is_regular(self, pair: _Pair) -> bool:
        fit = self._votes.without(pair.names).fit(*pair.names)
        return bool(fit.distances) or self._votes.places.agree(*pair.names)


def _lonely(
    cases: Sequence[Case], explanations: Mapping[int, Explanation]
) -> list[dict[int, list[str]]]:
    """Return the names of the tensors of each side that are not explained, by their sizes."""
    lonely: list[dict[int, list[str]]] = [defaultdict(list), defaultdict(list)]
    for n, explanation in explanations.items():
        if not explanation.verified:
            for side, tensor in enumerate((cases[n].match.ours, cases[n].match.theirs)):
                if tensor is not None:
                    lonely[side][tensor.size].append(tensor.name)
    return lonely


def _pairs(siblings: Siblings, *, are_parts: bool = False) -> list[_Pair]:
    """Return the explained pairs of different names, and the parts of stacks with the stacks.

    With `are_parts`, return the parts of other tensors instead, with these.
    """
    pairs: dict[_Pair, None] = {}
    for n, explanation in siblings.explanations.items():
        is_pair = (
            explanation.verified
            and explanation.is_part == are_parts
            and TIED not in explanation.causes
        )
        case = siblings.cases[n]
        name, partners = case.match.name, explanation.other_names or (case.other_name,)
        are_alike = len({_DIGITS.sub("", partner) for partner in partners}) == 1
        if not is_pair or not are_alike or explanation.is_constant:
            continue
        for partner in filter(None, partners):
            names = (partner, name) if case.status == ALONE[1] else (name, partner)
            sizes = [siblings.size(side, names[side]) for side in (0, 1)]
            if all(sizes):
                pairs[_Pair(names, (sizes[0], sizes[1]))] = None
    return list(pairs)
