"""Rules that pairs of names follow, and pairs that break them.

A conversion renames systematically: ``model.layers.3.self_attn.q_proj.weight`` becomes
``blk.3.attn_q.weight`` in every layer. Pairs with equal numbers therefore predict the name of any
other tensor, and a tensor under another name is misplaced.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import accumulate, combinations, pairwise, product, takewhile
from typing import TYPE_CHECKING, NamedTuple

from xckpt.labels.conventions import match_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_NUMBER = re.compile(r"(?<![0-9A-Za-z])([0-9]{1,9})(?![0-9A-Za-z])")
_DIGITS = re.compile(r"[0-9]{1,9}")
_PIECE = re.compile(r"[./]")
_pieces = lru_cache(maxsize=1 << 16)(re.compile(r"([./])").split)
_split_behind_dots = lru_cache(maxsize=1 << 16)(re.compile(r"(?<=[./])").split)
_split_before_dots = lru_cache(maxsize=1 << 16)(re.compile(r"(?=[./])").split)
_WORD = re.compile(r"[a-z]+")
# The most pairs of one shape that are tested for exchanged names.
_MOST_EXCHANGED = 400
# The share of pairs that has to agree on a shift of the numbers of layers.
_MAJORITY = 0.8
# The least number of pairs that prove such a shift; two exchanged tensors do not.
_FEWEST = 6
# The order of joined parts, unless other layers show another one.
_USUAL_ORDERS = (
    *(("q", "k", "v"), ("query", "key", "value"), ("gate", "up"), ("w1", "w3")),
    ("q", "k", "v", "proj_mlp"),  # single blocks of Flux
    # gates in cells of Flax, for inputs and for hidden states
    *((f"{kind}i", f"{kind}f", f"{kind}g", f"{kind}o") for kind in "ih"),
    *((f"{kind}r", f"{kind}z", f"{kind}n") for kind in "ih"),
)
# Names of projections across projects.
_ROLES = {
    "query": frozenset({"q", "query", "wq"}),
    "key": frozenset({"k", "key", "wk"}),
    "value": frozenset({"v", "value", "wv"}),
    "gate": frozenset({"gate"}),
    "up": frozenset({"up"}),
    "down": frozenset({"down"}),
    "output": frozenset({"o"}),
}
# Words for the model of a kind of input.
_INPUTS = (frozenset({"text", "language"}), frozenset({"vision", "visual"}), frozenset({"audio"}))
# The last words of names, across projects.
_LEAVES = (frozenset({"weight", "kernel", "gamma", "scale"}), frozenset({"bias", "beta"}))


def role_of(name: str) -> str | None:
    """Return the projection that the words of a name state; None without one."""
    roles = _roles_of(name)
    return roles[0] if len(roles) == 1 else None


def _roles_of(name: str) -> list[str]:
    words = _words(name).keys()
    return [role for role, spellings in _ROLES.items() if spellings & words]


class Spelled(NamedTuple):
    """A name as a template with placeholders, and its numbers."""

    template: str
    numbers: tuple[int, ...]


@lru_cache(maxsize=1 << 16)
def spelled(name: str) -> Spelled:
    """Replace the separate numbers in a name by placeholders."""
    numbers = tuple([int(digits) for digits in _NUMBER.findall(name)])
    return Spelled(_NUMBER.sub("{}", name), numbers)


@lru_cache(maxsize=1 << 16)
def _words(name: str) -> Counter[str]:
    pieces = _PIECE.split(name.lower())
    words = [word for piece in pieces if not piece.isdigit() for word in _WORD.findall(piece)]
    return Counter([*pieces, *words])


@lru_cache(maxsize=1 << 18)
def likeness(first: str, second: str) -> int:
    """Return how many words and numbers two names have in common."""
    a, b = _words(first), _words(second)
    return sum(min(count, b[word]) for word, count in a.items() if word in b)


def first_numbers(a: str, b: str) -> int:
    """Return the number of equal numbers in two names before the first that differ."""
    pairs = zip(_DIGITS.findall(a), _DIGITS.findall(b), strict=False)
    return sum(1 for _ in takewhile(lambda pair: int(pair[0]) == int(pair[1]), pairs))


def last_word(name: str) -> str:
    """Return the last word of a name, such as "weight"."""
    return _PIECE.split(name)[-1]


def last_words(name: str) -> str:
    """Return the last two words of a name without numbers; empty if the first one is a number."""
    *_, module, leaf = ["", "", *_PIECE.split(name)]
    return _DIGITS.sub("", f"{module}.{leaf}") if module and not module.isdigit() else ""


def stem_of_leaf(name: str) -> str:
    """Return the name of the module of a weight or a bias; empty for other tensors."""
    stem, leaf = stem_of(name), last_word(name)
    return stem if any(leaf in leaves for leaves in _LEAVES) else ""


class Rules:
    """The rules that pairs of names follow."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.pairs = list(pairs)
        #: The difference between the numbers of a layer in `b` and in `a`.
        self.shift = _shift((spelled(a), spelled(b)) for a, b in self.pairs)
        self._templates: dict[str, Counter[str]] = defaultdict(Counter)
        self._stems: dict[str, Counter[str]] = defaultdict(Counter)
        # Other first words, and other last words, of names that have the remaining words in common.
        self._fronts: dict[str, Counter[str]] = defaultdict(Counter)
        self._ends: dict[str, Counter[str]] = defaultdict(Counter)
        #: Numbers of pairs of two modules.
        self._modules = Counter((stem_of(a), stem_of(b)) for a, b in self.pairs)
        for a, b in self.pairs:
            first, second = spelled(a), spelled(b)
            if self._numbers(first) == second.numbers:
                self._templates[first.template][second.template] += 1
                (stem, leaf), (new_stem, last) = _split(first.template), _split(second.template)
                if leaf == last:
                    self._stems[stem][new_stem] += 1
                for front, new in _fronts(a, b):
                    self._fronts[front][new] += 1
                for end, new in _ends(a, b):
                    self._ends[end][new] += 1

    def _numbers(self, name: Spelled) -> tuple[int, ...]:
        return (name.numbers[0] + self.shift, *name.numbers[1:]) if name.numbers else ()

    def support(self, a: str, b: str) -> int:
        """Count the pairs that follow the same rule as a pair, itself included."""
        first, second = spelled(a), spelled(b)
        if self._numbers(first) != second.numbers:
            return 0
        counts = [self._fronts[front][new] for front, new in _fronts(a, b)]
        counts += [self._ends[end][new] for end, new in _ends(a, b)]
        return max(self._templates[first.template][second.template], *counts, 0)

    def expected(self, name: str, names_of_b: Collection[str]) -> tuple[str, int] | None:
        """Return the name in `b` that most pairs support, and their number; None if it is open."""
        first = spelled(name)
        numbers = self._numbers(first)
        votes: Counter[str] = Counter()
        for template, count in self._templates.get(first.template, Counter()).items():
            votes[_filled(template, numbers)] += count
        stem, leaf = _split(first.template)
        if not votes:
            for template_of_b, count in self._stems.get(stem, Counter()).items():
                votes[_filled(template_of_b + leaf, numbers)] += count
        for front in accumulate(_split_behind_dots(name)[:-1], initial=""):
            for new, count in self._fronts.get(front, Counter()).items():
                candidate = new + name.removeprefix(front)
                votes[candidate] = max(votes[candidate], count)
        end = _split_before_dots(name)[-1]
        for new, count in self._ends.get(end, Counter()).items():
            candidate = name.removesuffix(end) + new
            votes[candidate] = max(votes[candidate], count)
        return _elected(votes, names_of_b)

    @cached_property
    def _known_but_for_a_word(self) -> dict[tuple[str, ...], list[tuple[str, str]]]:
        """Words of names of `a` and names of `b`, by the remaining words of the names of `a`."""
        pairs: dict[tuple[str, ...], list[tuple[str, str]]] = defaultdict(list)
        for a, b in self.pairs:
            for word, others in _each_word(a):
                pairs[others].append((word, b))
        return pairs

    def analogous(self, name: str, names_of_b: Collection[str]) -> tuple[str, int] | None:
        """Return the name in `b` that differs in the same word from a pair, and their number.

        ``decoder.mid_block.0.w`` is ``decoder.mid.block_1.w``, and so in an encoder.
        """
        votes: Counter[str] = Counter()
        for word, others in _each_word(name):
            for known, b in self._known_but_for_a_word.get(others, ()):
                pieces = _pieces(b)
                if pieces.count(known) == 1:
                    votes["".join([word if piece == known else piece for piece in pieces])] += 1
        return _elected(votes, names_of_b)

    def _contradicts(self, expected: tuple[str, int], a: str, b: str) -> bool:
        """Return whether an expected name and its support contradict a pair."""
        name, support = expected
        if name == b or support <= self.support(a, b):
            return False
        # One other pair is less than the tensors of a module that stay together.
        is_together = self._modules[stem_of(a), stem_of(b)] > 1
        return support > 1 or not is_together or stem_of(name) == stem_of(b)

    def _keep_numbers(self) -> bool:
        """Return whether most pairs have the same numbers."""
        pairs = [(spelled(a), spelled(b)) for a, b in self.pairs]
        counts = Counter(
            self._numbers(first) == second.numbers
            for first, second in pairs
            if first.numbers and len(first.numbers) == len(second.numbers)
        )
        return counts[True] > 1 and counts[True] > counts[False]

    def broken(
        self,
        names_of_a: Collection[str],
        names_of_b: Collection[str],
        shapes: Mapping[str, object],
        conventions: Mapping[str, str],
        *,
        keeps_numbers: bool = False,
    ) -> dict[str, str]:
        """Return the expected names of the pairs that break the rules, by their names in `a`.

        The expected name is empty if it is unknown, such as for a query paired with a key. With
        `keeps_numbers`, layers have the same numbers on both sides. Only tensors with the same
        value in `shapes` can have been exchanged. `conventions` maps names of `a` to the equivalent
        names of `b` in known projects.
        """
        keeps_numbers = keeps_numbers or self._keep_numbers()
        broken = {}
        back = Rules((b, a) for a, b in self.pairs)
        for a, b in self.pairs:
            expected, origin = self.expected(a, names_of_b), back.expected(b, names_of_a)
            if origin is not None and back._contradicts(origin, b, a):
                broken[a] = ""
            if expected is not None and self._contradicts(expected, a, b):
                broken[a] = expected[0]
            elif are_other_roles(a, b):
                broken[a] = ""
        for a in self._renumbered(names_of_a, names_of_b) if keeps_numbers else ():
            broken.setdefault(a, "")
        for a in self._disordered():
            broken.setdefault(a, "")
        for a in self._parted(shapes):
            broken.setdefault(a, "")
        for a, expected_name in self._unconventional(conventions):
            broken.setdefault(a, expected_name)
        for a, expected_name in self._exchanged(shapes):
            broken.setdefault(a, expected_name)
        return broken

    def _renumbered(
        self, names_of_a: Collection[str], names_of_b: Collection[str]
    ) -> Iterator[str]:
        """Yield names of `a` whose numbers another tensor has in `b`."""
        by_template = [_by_template(names) for names in (names_of_a, names_of_b)]
        schemes: dict[tuple[str, str], _Scheme] = {}
        for a, b in self.pairs:
            first, second = spelled(a), spelled(b)
            numbers = self._numbers(first)
            are_all = len(_DIGITS.findall(a)) == len(_DIGITS.findall(b))
            if not are_all or len(numbers) != len(second.numbers) or numbers == second.numbers:
                continue
            templates = first.template, second.template
            if templates not in schemes:
                schemes[templates] = _Scheme.of(
                    [self._numbers(name) for name in by_template[0][first.template]],
                    [name.numbers for name in by_template[1][second.template]],
                )
            if schemes[templates].is_broken_by(numbers, second.numbers):
                yield a

    def _disordered(self) -> Iterator[str]:
        """Yield names of `a` whose number has another rank among its siblings than in `b`.

        Numbers may be anywhere in a word: ``layers_3``, ``conv2d_3``, ``l3``.
        """
        groups: dict[object, list[tuple[str, int, int]]] = defaultdict(list)
        for a, b in self.pairs:
            numbers, numbers_of_b = (list(map(int, _DIGITS.findall(n))) for n in (a, b))
            forms = _DIGITS.sub("0", a), _DIGITS.sub("0", b)
            for j, k in product(range(len(numbers)), range(len(numbers_of_b))):
                # Siblings have all other numbers in common.
                fixed = (
                    *numbers[:j],
                    None,
                    *numbers[j + 1 :],
                    *numbers_of_b[:k],
                    None,
                    *numbers_of_b[k + 1 :],
                )
                groups[forms, fixed].append((a, numbers[j], numbers_of_b[k]))
        for group in groups.values():
            names, *sides = zip(*group, strict=True)
            if len(group) < 2 or any(len(set(side)) < len(side) for side in sides):
                continue
            ranks = [{n: rank for rank, n in enumerate(sorted(side))} for side in sides]
            wrong = [
                name
                for name, first, second in zip(names, *sides, strict=True)
                if ranks[0][first] != ranks[1][second]
            ]
            are_counted_alike = len({n - m for m, n in zip(*map(sorted, sides), strict=True)}) == 1
            if are_counted_alike or len(wrong) <= len(group) / 3:
                yield from wrong

    def _parted(self, shapes: Mapping[str, object]) -> Iterator[str]:
        """Yield names of `a` that two modules exchanged, while their other tensors stayed.

        A bias is then in one module, and the weight that belongs to it in another one.
        """
        partners: dict[str, dict[str, str]] = defaultdict(dict)
        for a, b in self.pairs:
            stem = stem_of(a)
            partners[stem][a.removeprefix(stem)] = b
        by_targets: dict[frozenset[str], list[str]] = defaultdict(list)
        for stem, leaves in partners.items():
            targets = frozenset(map(stem_of, leaves.values()))
            if len(targets) == 2:
                by_targets[targets].append(stem)
        for stems in by_targets.values():
            if len(stems) != 2:
                continue
            first, second = (partners[stem] for stem in stems)
            for leaf in first.keys() & second.keys():
                if shapes.get(first[leaf]) == shapes.get(second[leaf]):
                    yield from (stem + leaf for stem in stems)

    def _unconventional(self, conventions: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield names of `a` with their conventional name, if another tensor has it."""
        partners = {b: a for a, b in self.pairs}
        for a, b in self.pairs:
            usual = conventions.get(a, b)
            competitor = partners.get(usual, a)
            if usual != b and conventions.get(competitor, usual) != usual:
                yield a, usual

    def _exchanged(self, shapes: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """Yield names of `a` with the name of `b` that fits better after exchanging two pairs."""
        groups: dict[object, list[tuple[str, str]]] = defaultdict(list)
        # Tensors of one module that stay together show that its other shapes are right, too.
        modules: dict[object, set[tuple[str, object]]] = defaultdict(set)
        stems = [(stem_of(a), stem_of(b)) for a, b in self.pairs]
        for (_, b), stem in zip(self.pairs, stems, strict=True):
            modules[stem].add((b, shapes.get(b)))
        for (a, b), stem in zip(self.pairs, stems, strict=True):
            together = sorted(str(shape) for _, shape in modules[stem])
            groups[shapes.get(b), *together].append((a, b))
        for group in groups.values():
            tested = [(a, b, self.support(a, b) > 1) for a, b in group[:_MOST_EXCHANGED]]
            if all(is_supported for *_, is_supported in tested):
                continue
            for (a, b, is_supported), (c, d, is_other_supported) in combinations(tested, 2):
                if is_supported and is_other_supported:
                    continue
                if _exchange_is_likelier(*(_DIGITS.sub("", name) for name in (a, b, c, d))):
                    yield a, d
                    yield c, b


def _elected(votes: Counter[str], names: Collection[str]) -> tuple[str, int] | None:
    """Return the name with the most votes, and their number; None without one."""
    ranked = [vote for vote in votes.most_common() if vote[0] in names]
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return None
    return ranked[0]


def _each_word(name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each word of a name that is not a number, and the remaining pieces."""
    pieces = _pieces(name)
    for n, piece in enumerate(pieces):
        if n % 2 == 0 and not piece.isdigit():
            yield piece, (*pieces[:n], "", *pieces[n + 1 :])


def _by_template(names: Iterable[str]) -> dict[str, list[Spelled]]:
    groups: dict[str, list[Spelled]] = defaultdict(list)
    for name in map(spelled, names):
        groups[name.template].append(name)
    return groups


class _Scheme(NamedTuple):
    """Numbers in the names of two templates; all may have one offset, as in ``mid.block_1``."""

    ours: frozenset[tuple[int, ...]]
    theirs: frozenset[tuple[int, ...]]
    has_offset: bool

    @classmethod
    def of(cls, ours: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> _Scheme:
        """Return the scheme of the numbers of both sides."""
        pairs = zip(sorted(ours), sorted(theirs), strict=False)
        offsets = {tuple(n - m for m, n in zip(*pair, strict=True)) for pair in pairs}
        has_offset = len(ours) == len(theirs) and len(offsets) == 1
        return cls(frozenset(ours), frozenset(theirs), has_offset)

    def is_broken_by(self, first: tuple[int, ...], second: tuple[int, ...]) -> bool:
        """Return whether two tensors have numbers of other tensors, and not of another scheme."""
        return not self.has_offset and (first in self.theirs or second in self.ours)


def _exchange_is_likelier(a: str, b: str, c: str, d: str) -> bool:
    """Return whether names without numbers fit better after exchanging two pairs."""
    return likeness(a, d) + likeness(c, b) > likeness(a, b) + likeness(c, d)


def conventions(ours: Collection[str], theirs: Collection[str]) -> dict[str, str]:
    """Return the equivalent names of `b` in known projects, by the names of `a`."""
    if not ours or not theirs or find_spec("gguf") is None:
        return {}
    return {name: name_of_b for name, name_of_b, _ in match_names(ours, theirs)}


def _shift(pairs: Iterable[tuple[Spelled, Spelled]]) -> int:
    """Return the shift of the numbers of layers; 0 unless nearly all pairs agree on another one."""
    shifts = Counter(b.numbers[0] - a.numbers[0] for a, b in pairs if a.numbers and b.numbers)
    most = shifts.most_common(1)
    if not most or most[0][1] < _FEWEST or most[0][1] <= _MAJORITY * shifts.total():
        return 0
    return most[0][0]


def are_other_roles(a: str, b: str) -> bool:
    """Return whether two names belong to different projections, or to a weight and a bias."""
    roles = [_roles_of(name) for name in (a, b)]
    leaves = [[n for n, words in enumerate(_LEAVES) if last_word(name) in words] for name in (a, b)]
    return _are_different(roles) or _are_different(leaves) or are_other_inputs(a, b)


def are_other_inputs(a: str, b: str) -> bool:
    """Return whether two names belong to the models of different inputs: of text, of images."""
    return _are_different(
        [[n for n, words in enumerate(_INPUTS) if words & _words(name).keys()] for name in (a, b)]
    )


def _are_different(facts: Sequence[Sequence[object]]) -> bool:
    """Return whether one fact is known about each of two names, and they differ."""
    return all(len(of_name) == 1 for of_name in facts) and facts[0] != facts[1]


def _filled(template: str, numbers: tuple[int, ...]) -> str:
    pieces = template.split("{}")
    if len(pieces) != len(numbers) + 1:
        return ""
    return "".join([p + str(n) for p, n in zip(pieces, numbers, strict=False)]) + pieces[-1]


def _split(template: str) -> tuple[str, str]:
    stem, dot, leaf = template.rpartition(".")
    return stem, dot + leaf


def stem_of(name: str) -> str:
    """Return a name without its last word."""
    return "".join(_split_before_dots(name)[:-1])


def _fronts(a: str, b: str) -> list[tuple[str, str]]:
    """Return two names without their common last words, if there are any."""
    first, second = (_split_behind_dots(name) for name in (a, b))
    pairs = zip(reversed(first), reversed(second), strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return [("".join(first[:-count]), "".join(second[:-count]))] if count else []


def _ends(a: str, b: str) -> list[tuple[str, str]]:
    """Return the last words of two names, if the names are equal up to there."""
    first, second = (_split_before_dots(name) for name in (a, b))
    return [(first[-1], second[-1])] if len(first) > 1 and first[:-1] == second[:-1] else []


# --- joined parts ---------------------------------------------------------------------------------


class Order(NamedTuple):
    """The name of a joined tensor, and the names of its parts in order."""

    whole: str
    parts: tuple[str, ...]


def out_of_order(orders: Sequence[Order], names: Collection[str]) -> set[int]:
    """Return the positions of the joints whose parts are in another order than in their siblings.

    `names` are the names of all tensors on the side of the joined tensors.
    """
    irregular = set()
    rows = [[spelled(part) for part in order.parts] for order in orders]
    wholes = [spelled(order.whole) for order in orders]
    # The roles of parts, by the template of the joined tensor.
    roles: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for parts, combined in zip(rows, wholes, strict=True):
        roles[combined.template][tuple([part.template for part in parts])] += 1
    shift = _shift((parts[0], combined) for combined, parts in zip(wholes, rows, strict=True))
    for n, (parts, combined) in enumerate(zip(rows, wholes, strict=True)):
        # All parts belong to the layer of the joined tensor; ranks may have numbers, too.
        columns = list(zip(*[part.numbers for part in parts if part.numbers], strict=False))
        layers = [{number - shift} for number in combined.numbers]
        is_elsewhere = layers and columns and not any(set(column) in layers for column in columns)
        is_other = any(
            are_other_roles(part, orders[n].whole)
            or _owner(part, names) not in {"", orders[n].whole}
            for part in orders[n].parts
        )
        if is_elsewhere or is_other or not _is_regular(parts, roles[combined.template]):
            irregular.add(n)
    for n, first in enumerate(orders[:_MOST_EXCHANGED]):
        for m, second in enumerate(orders[:n]):
            exchanged = _likeness(first, second) + _likeness(second, first)
            if exchanged > _likeness(first, first) + _likeness(second, second):
                irregular |= {n, m}
    return irregular


def _owner(part: str, names: Collection[str]) -> str:
    """Return the longest name that becomes `part` by adding words before its last word, or ""."""
    stem, leaf = _split(part)
    while "." in stem:
        stem = stem.rpartition(".")[0]
        if stem + leaf in names:
            return stem + leaf
    return ""


def _likeness(first: Order, second: Order) -> float:
    """Return the mean likeness of one joined tensor's name to the names of another one's parts."""
    return sum(likeness(first.whole, part) for part in second.parts) / len(second.parts)


def _core(name: Spelled) -> str:
    """Return the words between the number of the layer and the last word."""
    stem = _split(name.template)[0]
    return stem.partition("{}")[2] or stem


def _is_regular(parts: Sequence[Spelled], siblings: Counter[tuple[str, ...]] | None) -> bool:
    """Return whether parts are in the order of their numbers, or in the order of most siblings."""
    templates = tuple([part.template for part in parts])
    numbers = [part.numbers for part in parts]
    is_numbered = len(set(numbers)) > 1
    if is_numbered and len({(_core(part), len(part.numbers)) for part in parts}) == 1:
        # Only one of the numbers differs from part to part.
        slots = [len(set(values)) for values in zip(*numbers, strict=False)]
        return sum(n > 1 for n in slots) == 1 and all(a < b for a, b in pairwise(numbers))
    if not is_numbered:
        return _is_usual(templates, siblings)
    if len(set(templates)) == len(templates):
        return False
    # Roles of one expert after the other, or one role of all experts after the other.
    by_number: dict[tuple[int, ...], list[str]] = defaultdict(list)
    by_role: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for part in parts:
        by_number[part.numbers].append(part.template)
        by_role[part.template].append(part.numbers)
    is_even = len({tuple(roles) for roles in by_number.values()}) == 1
    ascending = all(a < b for numbers in by_role.values() for a, b in pairwise(numbers))
    return is_even and ascending


def _is_usual(templates: tuple[str, ...], siblings: Counter[tuple[str, ...]] | None) -> bool:
    """Return whether roles are in the order of most siblings, or without one, in a usual order."""
    ranked = siblings.most_common(2) if siblings else []
    if ranked and ranked[0][1] > 1 and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]):
        return ranked[0][0] == templates
    words = [set(_words(template)) for template in templates]
    for usual in _USUAL_ORDERS:
        places = [[n for n, word in enumerate(usual) if word in part] for part in words]
        if all(len(place) == 1 for place in places):
            return places == sorted(places)
    return False


def analogous(sibling: Order, joined: str) -> tuple[str, ...] | None:
    """Return the parts of a joined tensor by analogy with a sibling; None if they are unrelated."""
    first, second = spelled(sibling.whole), spelled(joined)
    (stem, leaf), (stem_of_whole, last) = _split(first.template), _split(second.template)
    if stem != stem_of_whole or len(first.numbers) != len(second.numbers):
        return None
    names = []
    for part in sibling.parts:
        name = spelled(part)
        stem_of_part, end = _split(name.template)
        numbers = name.numbers
        if first.numbers and numbers:
            moved = numbers[0] + second.numbers[0] - first.numbers[0]
            numbers = (moved, *numbers[1:])
        names.append(_filled(stem_of_part + (last if end == leaf else end), numbers))
    return tuple(names)


def begun_alike(sibling: Order, combined: str) -> tuple[str, ...] | None:
    """Return the parts of a tensor whose name begins like a sibling's, such as in one stack."""
    fronts = [front for part in sibling.parts for front in _fronts(part, sibling.whole)]
    begins = {begin for _, begin in fronts}
    begin = begins.pop() if len(begins) == 1 else ""
    if len(fronts) < len(sibling.parts) or not begin or not combined.startswith(begin):
        return None
    return tuple([front + combined.removeprefix(begin) for front, _ in fronts])
