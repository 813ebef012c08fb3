"""The texts and parameters of explanations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xckpt.comparison.arrangements import RopePermuted
from xckpt.comparison.explaining.causes import percent
from xckpt.comparison.explaining.outcome import Explanation, quoted
from xckpt.comparison.explaining.quantised_causes import Quantised

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.comparison.arrangements import Step
    from xckpt.comparison.explaining.causes import Relation
    from xckpt.comparison.explaining.verification import Link
    from xckpt.comparison.explaining.work import Work


def related(work: Work, link: Link, relation: Relation, steps: Sequence[Step] = ()) -> Explanation:
    """Explain a link by a relation that holds for all elements, after steps that moved them."""
    evidence = link.evidence
    zeros = 0.0 if evidence is None else evidence.zeros / max(evidence.count, 1)
    text = relation.words(zeros)
    if evidence is not None and isinstance(relation, Quantised):
        text += f"; signal to noise {evidence.decibels:.3g} dB"
    explanation = Explanation(relation.causes or ("equal",), text)
    moved = relation.transform
    if moved.offset or moved.scale != 1.0:
        cause = "offset" if moved.offset else "scaled"
        source, result = link.names[:: -1 if relation.backwards else 1]
        explanation = replace(
            explanation,
            causes=tuple(dict.fromkeys([cause, *explanation.causes])),
            is_known=work.architecture.admits(moved, (source, result)),
            offset=moved.offset or None,
            scale=moved.scale if moved.scale != 1.0 else None,
        )
    return after(explanation, steps)


def after(explanation: Explanation, steps: Sequence[Any]) -> Explanation:
    """Add the steps that precede the comparison of the numbers to an explanation."""
    if not steps:
        return explanation
    heads = next((s.heads for s in reversed(steps) if isinstance(s, RopePermuted)), None)
    done = " and ".join(step.words for step in steps)
    text = f"{explanation.text}, after {done}" if explanation.changes else f"equal after {done}"
    causes = (*dict.fromkeys(step.cause for step in steps), *explanation.changes)
    return replace(explanation, causes=causes, text=text, heads=heads)


def both(a: Any, b: Any, explanation: Explanation) -> dict[int, Explanation]:
    """Return the explanations of two tensors of different names, by the numbers of their cases."""
    is_equal = explanation.causes == ("equal",)
    return {
        tensor.number: explanation.renamed(
            partner.name, f"{'equal to ' if is_equal else ''}{quoted([partner.name])} of {side}"
        )
        for tensor, partner, side in ((a, b, "b"), (b, a, "a"))
    }


def changed(measures: Mapping[str, float], shapes: str = "") -> Explanation:
    """Describe a change of unknown cause by its size."""
    if shapes:
        text = f"the shapes {shapes} differ, and the numbers do"
    else:
        facts = [f"{percent(1 - measures['equal_fraction'])} of the elements differ"]
        facts += [f"{name} {measures[name]:.4g}" for name in ("rel_l2", "cosine")]
        text = ", ".join(facts)
    return Explanation(("changed",), text, holds=False)


def unlike(link: Link, steps: Sequence[Step] = ()) -> str:
    """Describe the relation that holds for most elements of a changed tensor, if any."""
    if link.likely is None:
        return "the numbers differ"
    share, relation = link.likely
    done = f", after {' and '.join(step.words for step in steps)}," if steps else ""
    return f"looks like: {relation.words(0.0)}{done} for {percent(share)} of the elements"
