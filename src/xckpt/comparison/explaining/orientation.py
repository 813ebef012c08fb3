"""Matrices that a conversion transposed, or left, unlike the others.

A conversion transposes the matrices of linear layers, or leaves them. Matrices of one role, such as
the keys of all layers of all components, are treated alike. The shape of a square matrix does not
show whether it was transposed, but the other matrices do: if none of them was, it was damaged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from xckpt.comparison.arrangements import Transposed
from xckpt.comparison.explaining.outcome import ALONE, Case, Explanation
from xckpt.comparison.names import last_word, last_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xckpt.comparison.classify import Places

__all__ = ["turned_alone"]

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


def turned_alone(
    cases: Sequence[Case], explanations: Mapping[int, Explanation], places: Places
) -> dict[int, Explanation]:
    """Return new explanations of matrices that are transposed, or not, unlike all others."""
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
    return _accused(cases, explanations, reasons)


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


def _accused(
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
