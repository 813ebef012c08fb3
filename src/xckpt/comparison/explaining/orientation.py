"""Square matrices, whose shapes do not show whether a conversion transposed them.

A conversion transposes the matrices of linear layers, or leaves them. Where it left all matrices
that are not square, a square one that is transposed was damaged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.comparison.classify import Places
    from xckpt.comparison.explaining.outcome import Case, Explanation

__all__ = ["turned_alone"]

# The least number of matrices that show how a conversion stores them.
_FEWEST_WITNESSES = 4


def turned_alone(
    cases: Sequence[Case], explanations: Mapping[int, Explanation], places: Places
) -> dict[int, Explanation]:
    """Return new explanations of square matrices that are transposed unlike all other matrices."""
    suspects: list[int] = []
    upright = 0
    for n, explanation in explanations.items():
        if not explanation.verified or explanation.joint or explanation.is_constant:
            continue
        names, shapes = _names(cases[n], explanation), _shapes(cases[n])
        if any(len(shape) != 2 for shape in shapes) or not places.may_be_turned(names):
            continue
        is_square = len({*shapes[0]}) == 1
        is_turned = "transposed" in explanation.causes
        if is_turned and not is_square:
            return {}
        if is_turned and not places.are_turned(names):
            suspects.append(n)
        # Both tensors of a pair of two names are cases.
        upright += not is_turned and not is_square and cases[n].status != "only_b"
    return _accused(cases, explanations, suspects, upright) if upright >= _FEWEST_WITNESSES else {}


def _shapes(case: Case) -> list[tuple[int, ...]]:
    streams = (case.match.ours, case.match.theirs)
    return [tuple(stream.array.shape) for stream in streams if stream is not None]


def _names(case: Case, explanation: Explanation) -> tuple[str, str]:
    """Return the names of a tensor of `a`, and of one of `b`."""
    other = next(iter(explanation.other_names), case.other_name or case.match.name)
    return (other, case.match.name) if case.status == "only_b" else (case.match.name, other)


def _accused(
    cases: Sequence[Case],
    explanations: Mapping[int, Explanation],
    suspects: Sequence[int],
    upright: int,
) -> dict[int, Explanation]:
    accused: dict[int, Explanation] = {}
    text = f"it was transposed, and the {upright:,} matrices that are not square were not"
    for n in suspects:
        explanation = explanations[n]
        accused[n] = replace(explanation, causes=("unknown",), text=text, holds=False)
        for m, partner in explanations.items():
            # A joint that it is a part of.
            is_other_side = cases[m].status != cases[n].status
            if partner.joint and is_other_side and cases[n].match.name in partner.other_names:
                causes = (*partner.causes, "unknown")
                words = f"{partner.text}; a part of it was transposed: {cases[n].match.name!r}"
                accused[m] = replace(partner, causes=causes, text=words, holds=False)
    return accused
