"""Siblings: tensors with one place in several layers, which a conversion treats alike.

A tensor that is explained by other steps, another joint, or another number in its name than most of
its siblings was not converted as they were, if their way fails for it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

from xckpt.comparison.arrangements import Permutation, Permuted, Transposed
from xckpt.comparison.explaining.outcome import ALONE, Case, Explanation, quoted
from xckpt.comparison.names import last_word, last_words, stem_of_leaf
from xckpt.statistics.tables import TIED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from xckpt.comparison.arrangements import Shape
    from xckpt.comparison.classify import Places
    from xckpt.comparison.explaining.work import Explanations, Work
    from xckpt.structure.model import Structure

# The least number of siblings that show how a tensor should have been changed.
_FEWEST_SIBLINGS = 4
# Numbers in names, which siblings do not have in common.
_NUMBER = re.compile(r"_?[0-9]+")


class Siblings:
    """Groups of tensors that a conversion treats alike, by the numbers of their cases."""

    def __init__(self, cases: Sequence[Case], explanations: Mapping[int, Explanation]) -> None:
        self.cases, self.explanations = cases, explanations
        self.numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for n, case in enumerate(cases):
            for side, tensor in enumerate((case.match.ours, case.match.theirs)):
                if tensor is not None and case.status:
                    self.numbers[side][tensor.name] = n

    def size(self, side: int, name: str) -> int:
        """Return the number of elements of a tensor; 0 if a side does not have it."""
        n = self.numbers[side].get(name)
        if n is None:
            return 0
        match = self.cases[n].match
        tensor = match.theirs if side else match.ours
        return 0 if tensor is None else tensor.size

    def groups(
        self, places: Places, forms_of: Callable[[Structure, str], Iterable[object]]
    ) -> dict[object, list[int]]:
        """Return the cases of each side and form; a pair is on both sides."""
        groups: dict[object, list[int]] = defaultdict(list)
        for side, numbers in enumerate(self.numbers):
            structure = places.structures[side]
            for name, n in numbers.items():
                match = self.cases[n].match
                tensor = match.theirs if side else match.ours
                if name in structure and tensor is not None:
                    for form in forms_of(structure, name):
                        groups[side, form, len(tensor.array.shape)].append(n)
        return groups

    def explained(self, members: Sequence[int]) -> list[int]:
        """Return the members in `a`, and the joints of both sides, that a layout explains."""
        return [
            n
            for n in members
            if (explanation := self.explanations.get(n)) is not None
            and explanation.has_layout
            and (explanation.joint or self.cases[n].match.ours is not None)
        ]

    def failed(self, members: Sequence[int]) -> int:
        """Count the members without a partner, or without a known layout."""
        return sum([self.explanations[n].has_no_layout for n in members if n in self.explanations])

    def partners(self, n: int) -> list[int]:
        """Return the cases of the tensors of the other side that explain one."""
        side = self.cases[n].status == "only_b"
        numbers = self.numbers[not side]
        return [numbers[name] for name in self.explanations[n].other_names if name in numbers]


def _template(structure: Structure, name: str) -> list[object]:
    return [structure.siblings_key(name).template]


def _one_number(_: Structure, name: str) -> list[object]:
    """Return what a name has in common with names that differ in one number."""
    words, numbers = _NUMBER.sub("", name), _NUMBER.findall(name)
    return [(words, n, *numbers[:n], *numbers[n + 1 :]) for n in range(len(numbers))]


def _convolution(structure: Structure, name: str) -> list[object]:
    is_kernel = structure.module_type(name) == "convolution"
    return [structure.param(name)] if is_kernel else []


def unlike_siblings(work: Work) -> Explanations:
    """Return new explanations of tensors that were not arranged as most of their siblings were."""
    explanations = work.explanations
    siblings = Siblings(work.cases, explanations)
    unlike: dict[int, Explanation] = {}
    judged: set[int] = set()
    for forms_of in (_template, _one_number, _convolution):
        groups = siblings.groups(work.places, forms_of)
        of_case = {n: members for members in groups.values() for n in members}
        suspects: list[_Suspect] = []
        for members in groups.values():
            explained = [n for n in siblings.explained(members) if n not in judged]
            showing = [n for n in explained if _shows_layout(explanations[n])]
            if len(showing) >= _FEWEST_SIBLINGS:
                judged.update(explained)
                suspects += _suspects(explained, showing, explanations)
            if forms_of is not _convolution:
                unlike |= _alone(siblings, members, of_case)
        checkable = [s for s in suspects if not s.usual.joint]
        holds = work.verify([(s.case, s.usual.steps) for s in checkable])
        for suspect, is_like in zip(checkable, holds, strict=True):
            differs = suspect.usual.offset != explanations[suspect.case].offset
            # Convolutions may be of several kinds.
            is_comparable = is_like is not None or forms_of is not _convolution
            if (not is_like and is_comparable) or differs:
                unlike |= _accused(siblings, suspect)
        for suspect in suspects:
            if suspect.usual.joint:
                unlike |= _out_of_order(siblings, suspect)
    return unlike | _exchanged(siblings)


class _Claims:
    """The cases that each tensor of the other side explains, by the side and name of the tensor."""

    def __init__(self, cases: Sequence[Case], explanations: Mapping[int, Explanation]) -> None:
        self.of_tensor: dict[tuple[int, str], set[int]] = defaultdict(set)
        self._shapes: dict[tuple[int, str], Shape] = {}
        # Sides and shapes of the tensors that are not explained.
        self._lonely: set[tuple[int, Shape]] = set()
        for n, explanation in explanations.items():
            partner = cases[n].match.partner
            is_tied = TIED in {*explanation.causes, partner.rule if partner else ""}
            is_whole = explanation.verified and not explanation.is_part and not is_tied
            tensors = cases[n].match[1:3]
            for side, tensor in enumerate(tensors):
                if tensor is not None:
                    shape = self._shapes[side, tensor.name] = tuple(tensor.array.shape)
                    if not explanation.verified:
                        self._lonely.add((side, shape))
                    elif is_whole and None not in tensors:
                        self.of_tensor[side, tensor.name].add(n)
            if is_whole and cases[n].status in ALONE:
                for name in explanation.other_names:
                    self.of_tensor[1 - ALONE.index(cases[n].status), name].add(n)

    def is_contested(self, side: int, name: str) -> bool:
        """Return whether a tensor explains several cases, while one of its shape has no partner."""
        is_lonely = (side, self._shapes.get((side, name))) in self._lonely
        return len(self.of_tensor[side, name]) > 1 and is_lonely


def claimed_twice(work: Work) -> Explanations:
    """Return new explanations of tensors that consist of the same tensor of the other side.

    If another tensor of its shape has no partner, one of them is a copy in the wrong place.
    """
    cases, explanations = work.cases, work.explanations
    siblings = Siblings(cases, explanations)
    claims = _Claims(cases, explanations)
    unlike: dict[int, Explanation] = {}
    for (side, name), numbers in claims.of_tensor.items():
        owner = siblings.numbers[side].get(name)
        if owner is None or not claims.is_contested(side, name):
            continue
        # A tensor that is divided names all that have a part of it.
        if not {cases[n].match.name for n in numbers} <= {*explanations[owner].other_names}:
            reason = f"{quoted([cases[n].match.name for n in sorted(numbers)])} are copies"
            unlike |= doubted(siblings, [owner, *numbers], reason)
    return unlike


def unlike_few_siblings(work: Work) -> Explanations:
    """Return new explanations of tensors whose siblings are too few to show which of them is right.

    Joints are left out, which cannot be tried in another order, and offsets.
    """
    explanations = work.explanations
    siblings = Siblings(work.cases, explanations)
    suspects = []
    for members in siblings.groups(work.places, _template).values():
        explained = [n for n in siblings.explained(members) if not explanations[n].is_constant]
        alone = [n for n in explained if not explanations[n].joint]
        layouts = {n: replace(explanations[n], offset=None).layout for n in alone}
        counts = Counter(layouts.values())
        if len(counts) > 1 and len(alone) < _FEWEST_SIBLINGS:
            suspects += [
                _Suspect(n, explanations[m], counts[layouts[m]])
                for n, m in permutations(alone, 2)
                if layouts[n] != layouts[m]
            ]
    holds = work.verify([(suspect.case, suspect.usual.steps) for suspect in suspects])
    unlike: dict[int, Explanation] = {}
    for suspect, is_like in zip(suspects, holds, strict=True):
        if not is_like:
            unlike |= _accused(siblings, suspect)
    return unlike


def unlike_norms(work: Work) -> Explanations:
    """Return new explanations of norms without the offset that most norms of their model have."""
    cases, explanations = work.cases, work.explanations
    siblings = Siblings(cases, explanations)
    norms = [
        n
        for n, explanation in explanations.items()
        if explanation.has_layout
        and cases[n].status != ALONE[1]
        and work.places.offset(_names_of_pair(cases[n], explanation)) is not None
    ]
    moved = [n for n in norms if explanations[n].offset]
    unlike: dict[int, Explanation] = {}
    if len(norms) >= _FEWEST_SIBLINGS and 2 * len(moved) > len(norms):
        usual = explanations[moved[0]]
        for n in norms:
            if not explanations[n].offset:
                unlike |= _accused(siblings, _Suspect(n, usual, len(moved)))
    return unlike


def _names_of_pair(case: Case, explanation: Explanation) -> tuple[str, str]:
    """Return the name of a tensor of `a`, and of its partner."""
    partner = next(iter(explanation.other_names), case.other_name or case.match.name)
    return case.match.name, partner


def unlike_module(work: Work) -> Explanations:
    """Return new explanations of a weight or a bias whose rows kept the order that the other lost.

    Most rows of the other one are in another order, or its heads are.
    """
    cases, explanations = work.cases, work.explanations
    siblings = Siblings(cases, explanations)
    modules: dict[tuple[str, ...], dict[int, object]] = defaultdict(dict)
    for n, explanation in explanations.items():
        case, order = cases[n], _order_of_rows(explanation)
        stems = tuple(map(stem_of_leaf, _names_of_pair(case, explanation)))
        is_one = not explanation.is_constant and not explanation.joint and not explanation.is_part
        if order is not None and case.status != ALONE[1] and is_one and all(stems):
            modules[stems][n] = order
    unlike: dict[int, Explanation] = {}
    for orders in modules.values():
        if len({*orders.values()}) > 1:
            for n in [n for n in orders if explanations[n].verified]:
                names = [cases[m].match.name for m in orders if orders[m] != orders[n]]
                reason = f"the rows of {quoted(names)} are in another order"
                unlike |= doubted(siblings, [n, *siblings.partners(n)], reason)
    return unlike


def _order_of_rows(explanation: Explanation) -> object:
    """Return the permutation of the rows of a tensor, () for none; None if it is unknown."""
    steps = explanation.steps
    is_permuted = any(isinstance(step, Permuted) for step in steps)
    if not (explanation.verified or is_permuted) or any(isinstance(s, Transposed) for s in steps):
        return None
    orders = [step for step in steps if isinstance(step, Permutation) and step.axis == 0]
    moved = [sum(n != m for n, m in enumerate(s.order)) / len(s.order)
             for s in orders if isinstance(s, Permuted)]  # fmt: skip
    return tuple(orders) if all(2 * share > 1 for share in moved) else None


class _Suspect(NamedTuple):
    """A tensor that is explained in another way than most of its siblings."""

    case: int
    usual: Explanation
    #: Number of these siblings.
    siblings: int


def _shows_layout(explanation: Explanation) -> bool:
    """Return whether equal elements, which any order explains, were at least given an offset."""
    return not explanation.is_constant or bool(explanation.offset)


def _suspects(
    members: Sequence[int], showing: Sequence[int], explanations: Mapping[int, Explanation]
) -> list[_Suspect]:
    """Return the members unlike most of those that show a layout."""
    layouts = Counter([explanations[n].layout for n in showing])
    layout, count = layouts.most_common(1)[0]
    if 2 * count <= len(showing):
        return []
    usual = next(explanations[n] for n in showing if explanations[n].layout == layout)
    suspects = members if usual.offset and not usual.joint else showing
    return [_Suspect(n, usual, count) for n in suspects if explanations[n].layout != layout]


def _accused(siblings: Siblings, suspect: _Suspect) -> dict[int, Explanation]:
    n, explanation = suspect.case, siblings.explanations[suspect.case]
    contrast = _contrast(explanation, suspect.usual)
    text = f"unlike {_count(suspect.siblings)}, it was {contrast}"
    unlike = {n: replace(explanation, text=text, holds=False, causes=("unknown",))}
    for partner in siblings.partners(n):
        unlike[partner] = replace(unlike[n], other_names=(siblings.cases[n].match.name,))
    return unlike


def _forms_of_parts(joint: Explanation) -> list[str]:
    """Return the forms of the names of parts, in any order."""
    return sorted([part.partition("\n")[0] for part in joint.joint[1:]])


def _out_of_order(siblings: Siblings, suspect: _Suspect) -> dict[int, Explanation]:
    """Return new explanations of a joint whose parts are not those of its siblings."""
    explanation = siblings.explanations[suspect.case]
    usual, count = suspect.usual, suspect.siblings
    if _forms_of_parts(explanation) != _forms_of_parts(usual):
        return {}
    moved = [
        name
        for name, part, usual_part in zip(
            explanation.other_names, explanation.joint[1:], usual.joint[1:], strict=True
        )
        if part != usual_part or explanation.joint[0] != usual.joint[0]
    ]
    side = siblings.cases[suspect.case].status == "only_b"
    parts = [siblings.numbers[not side][name] for name in moved]
    wholes = [case for part in parts for case in siblings.partners(part)]
    numbers = dict.fromkeys([suspect.case, *parts, *wholes])
    return doubted(siblings, list(numbers), f"unlike {_count(count)}")


def _alone(
    siblings: Siblings, members: Sequence[int], of_case: Mapping[int, Sequence[int]]
) -> dict[int, Explanation]:
    """Return new explanations of tensors that have a partner though most of their siblings fail."""
    verified = [
        n for n in members if n in siblings.explanations and siblings.explanations[n].verified
    ]
    missed = siblings.failed(members)
    unlike: dict[int, Explanation] = {}
    if len(verified) >= missed or len(verified) + missed < _FEWEST_SIBLINGS:
        return unlike
    for n in verified:
        partners = [p for p in siblings.partners(n) if p != n]
        failed = min([siblings.failed(of_case.get(p, ())) for p in partners], default=0)
        count = min(missed, failed)
        if count > len(verified) and count + len(verified) >= _FEWEST_SIBLINGS:
            unlike |= doubted(siblings, [n, *partners], f"not so for {count:,} of its siblings")
    return unlike


def doubted(siblings: Siblings, numbers: Sequence[int], reason: str) -> dict[int, Explanation]:
    """Return new explanations of tensors that are in the wrong place."""
    unlike = {}
    for n in numbers:
        explanation = siblings.explanations[n]
        causes = ("misplaced", *[cause for cause in explanation.causes if cause != "misplaced"])
        unlike[n] = replace(
            explanation, text=f"{explanation.text}; {reason}", holds=False, causes=causes
        )
    return unlike


def _exchanged(siblings: Siblings) -> dict[int, Explanation]:
    """Return new explanations of tensors whose partner has the name that siblings of others have.

    A number may be the only difference between kinds, such as in ``cell/vars/1``.
    """
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    for name, n in siblings.numbers[0].items():
        explanation = siblings.explanations.get(n)
        if explanation is not None and explanation.verified and "renamed" in explanation.causes:
            groups[_NUMBER.sub("", name)][n] = explanation.other_names[0]
    unlike: dict[int, Explanation] = {}
    for end_of in (_words_of, _end_of):
        usual: dict[str, tuple[str, str]] = {}
        for form, partners in groups.items():
            ends = Counter([end_of(partner) for partner in partners.values()])
            end, count = ends.most_common(1)[0]
            if len(partners) >= _FEWEST_SIBLINGS and 2 * count > len(partners):
                usual[form] = end
        for form, partners in groups.items():
            for n, partner in partners.items():
                end = end_of(partner)
                if form in usual and end != usual[form] and end in usual.values():
                    number = usual[form][1]
                    numbered = f"numbered {number} at the end of their names"
                    reason = f"its siblings are {numbered if number else repr(usual[form][0])}"
                    unlike |= doubted(siblings, [n, *siblings.partners(n)], reason)
    return unlike


def _words_of(name: str) -> tuple[str, str]:
    return _NUMBER.sub("", name), ""


def _end_of(name: str) -> tuple[str, str]:
    """Return a name without its numbers, and the last number."""
    return _NUMBER.sub("", name), next(iter(re.findall(r"[0-9]+", name)[::-1]), "")


def _count(siblings: int) -> str:
    return "its sibling" if siblings == 1 else f"its {siblings:,} siblings"


def _contrast(explanation: Explanation, usual: Explanation) -> str:
    """Return what happened to a tensor in contrast to its siblings."""
    done = [step.done for step in explanation.steps]
    done += [f"given an offset of {explanation.offset:+.4g}"] if explanation.offset else []
    if done:
        return " and ".join(done)
    missing = [step.done for step in usual.steps]
    missing += [f"given an offset of {usual.offset:+.4g}"] if usual.offset else []
    return f"not {' and '.join(missing)}"


# --- matrices transposed unlike the others --------------------------------------------------------

# A conversion transposes the matrices of linear layers, or leaves them. Matrices of one role, such
# as the keys of all layers of all components, are treated alike. The shape of a square matrix does
# not show whether it was transposed, but the other matrices do: if none of them was, it was
# damaged.

# The least number of matrices that show how a conversion stores them.
_FEWEST_WITNESSES = 4


class _Matrix(NamedTuple):
    """A matrix, or the kernel of a convolution, that is explained, by the number of its case."""

    case: int
    names: tuple[str, str]
    #: Whether its outputs come first on one side only.
    is_turned: bool
    is_square: bool
    is_kernel: bool
    #: Whether the case counts; both tensors of a pair of two names are cases.
    is_counted: bool

    @property
    def role(self) -> tuple[str, ...] | None:
        """The last words of both names; None if one of them has none."""
        roles = tuple(map(last_words, self.names))
        return None if "" in roles or self.is_kernel else roles

    @property
    def leaves(self) -> tuple[str, ...]:
        """The last word of both names."""
        return tuple([last_word(name) for name in self.names])


def turned_alone(work: Work) -> Explanations:
    """Return new explanations of matrices that are transposed, or not, unlike all others."""
    cases, explanations, places = work.cases, work.explanations, work.places
    matrices = list(_matrices(cases, explanations, places))
    reasons = _among_roles(matrices)
    witnesses = [matrix for matrix in matrices if not matrix.is_square]
    of_matrices = [matrix for matrix in witnesses if not matrix.is_kernel]
    upright = sum([matrix.is_counted for matrix in of_matrices])
    shows_upright = upright >= _FEWEST_WITNESSES and not any(m.is_turned for m in of_matrices)
    of_leaves: dict[tuple[str, ...], Counter[bool]] = defaultdict(Counter)
    for witness in witnesses:
        of_leaves[witness.leaves][witness.is_turned] += witness.is_counted
    for matrix in [matrix for matrix in matrices if not matrix.is_kernel]:
        counts = of_leaves[matrix.leaves]
        if matrix.is_turned and shows_upright and not places.are_turned(matrix.names):
            text = f"the {upright:,} matrices that are not square were not"
            reasons.setdefault(matrix, text)
        shows_turned = counts[True] >= _FEWEST_WITNESSES and not counts[False]
        if matrix.is_square and not matrix.is_turned and shows_turned:
            reasons.setdefault(matrix, f"the {counts[True]:,} that are not square were")
    reasons |= {m: t for m, t in _against_graph(matrices, places).items() if m not in reasons}
    return _accused_matrices(cases, explanations, reasons)


def _against_graph(matrices: Sequence[_Matrix], places: Places) -> dict[_Matrix, str]:
    """Return the square matrices whose axes contradict the graph on the other side.

    Together with the graph, the other matrices show which axis the outputs are.
    """
    orders: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)
    squares: dict[_Matrix, tuple[tuple[int, str], int]] = {}
    for matrix in matrices:
        order = places.other_outputs(matrix.names, is_turned=matrix.is_turned)
        if order is None or matrix.is_kernel:
            continue
        side, axis = order
        if matrix.is_square:
            squares[matrix] = (side, matrix.leaves[side]), axis
        else:
            orders[side, matrix.leaves[side]][axis] += 1
    return {
        matrix: f"the other {sum(orders[key].values()):,} have their outputs in another axis"
        for matrix, (key, axis) in squares.items()
        if orders[key] and axis not in orders[key]
    }


def _among_roles(matrices: Sequence[_Matrix]) -> dict[_Matrix, str]:
    """Return the matrices that are transposed, or not, unlike others of their role."""
    reasons: dict[_Matrix, str] = {}
    by_role: dict[tuple[str, ...], list[_Matrix]] = defaultdict(list)
    for matrix in matrices:
        if matrix.role is not None:
            by_role[matrix.role].append(matrix)
    for of_role in by_role.values():
        counted = [matrix.is_turned for matrix in of_role if matrix.is_counted]
        turned = sum(counted)
        upright = len(counted) - turned
        if not turned or not upright:
            continue
        # Of few matrices, none shows how the others should be.
        is_clear = len(counted) >= _FEWEST_WITNESSES
        if is_clear and turned == upright:
            continue
        for matrix in of_role:
            if not is_clear or matrix.is_turned == (turned < upright):
                others = f"{upright:,} of its role were not"
                reasons[matrix] = others if matrix.is_turned else f"{turned:,} of its role were"
    return reasons


def _matrices(
    cases: Sequence[Case], explanations: Mapping[int, Explanation], places: Places
) -> Iterator[_Matrix]:
    """Yield the matrices and kernels that are explained, and that a conversion may transpose."""
    for n, explanation in explanations.items():
        if not explanation.verified or explanation.joint or explanation.is_constant:
            continue
        streams = (cases[n].match.ours, cases[n].match.theirs)
        shapes = [tuple(stream.array.shape) for stream in streams if stream is not None]
        names = _names(cases[n], explanation)
        ndim = len(shapes[0])
        if ndim > 1 and len(shapes[-1]) == ndim and places.may_be_turned(names):
            turns = [step.axes for step in explanation.steps if isinstance(step, Transposed)]
            is_moved = ndim == 2 or any(axes[0] != 0 for axes in turns)
            is_turned = "transposed" in explanation.causes and is_moved
            is_square = ndim == 2 and len({*shapes[0]}) == 1
            is_counted = cases[n].status != "only_b" or "split" in explanation.causes
            yield _Matrix(n, names, is_turned, is_square, ndim > 2, is_counted)


def _names(case: Case, explanation: Explanation) -> tuple[str, str]:
    """Return the names of a tensor of `a`, and of one of `b`."""
    other = next(iter(explanation.other_names), case.other_name or case.match.name)
    return (other, case.match.name) if case.status == "only_b" else (case.match.name, other)


def _accused_matrices(
    cases: Sequence[Case], explanations: Mapping[int, Explanation], reasons: Mapping[_Matrix, str]
) -> dict[int, Explanation]:
    """Return new explanations of matrices, and of the joints that they are parts of."""
    accused: dict[int, Explanation] = {}
    parts: dict[tuple[str, str], str] = {}
    for matrix, others in reasons.items():
        n = matrix.case
        done = f"{'' if matrix.is_turned else 'not '}transposed"
        text = f"it was {done}, and {others}"
        accused[n] = replace(explanations[n], causes=("unknown",), text=text, holds=False)
        parts[cases[n].status, cases[n].match.name] = done
    for m, joint in explanations.items():
        if joint.joint:
            other = ALONE[cases[m].status == ALONE[0]]
            for name in joint.other_names:
                if (other, name) in parts:
                    text = f"{joint.text}; a part of it was {parts[other, name]}: {name!r}"
                    causes = (*joint.causes, "unknown")
                    accused[m] = replace(joint, causes=causes, text=text, holds=False)
    return accused
