"""Short, distinct labels for names that have much in common."""

from __future__ import annotations

from itertools import accumulate, pairwise, takewhile
from typing import TYPE_CHECKING

from xckpt.formatting import columns, printable, shortened
from xckpt.structure.numbering import parse_name, split_name, strip_separator

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH = 49


def short_names(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the words that all names share, with a star for the difference, and a label for each.

    The names ``layers.3.attn.q.weight`` and ``layers.7.attn.q.weight`` give
    ``layers.*.attn.q.weight`` with the labels ``3`` and ``7``. Names that share nothing, and a
    single name, are their own labels.
    """
    split = [parse_name(name).pieces for name in names]
    head = _common(split)
    tail = _common([pieces[len(head) :][::-1] for pieces in split])[::-1]
    middles = ["".join(pieces[len(head) : len(pieces) - len(tail)]) for pieces in split]
    labels = [strip_separator(middle) for middle in middles]
    if not all(labels):  # a name is a part of the others
        return (names[0] if len(names) == 1 else ""), apart(names)
    fronts = {middle.removesuffix(label) for middle, label in zip(middles, labels, strict=True)}
    front = fronts.pop() if len(fronts) == 1 else ""
    return "".join([*head, front, "*", *tail]), apart(labels)


def _common(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the pieces that all lists begin with."""
    pairs = zip(*lists, strict=False)
    return [pieces[0] for pieces in takewhile(lambda pieces: len(set(pieces)) == 1, pairs)]


def apart(labels: Sequence[str], width: int = _WIDTH) -> list[str]:
    """Return printable, short labels; different labels remain different.

    Outer modules are omitted if that suffices, from all labels that have them, else words that the
    labels share.
    """
    texts = [printable(label) or '""' for label in labels]
    needed = {_outer(text, depth) for text in texts if (depth := _depth(text, width))}
    deepest = max(map(len, needed), default=0)
    short = []
    for text in texts:
        depths = (n for n in range(deepest, 0, -1) if needed and _outer(text, n) in needed)
        short.append(_inner(text, next(depths, 0), width))
    places: dict[str, list[int]] = {}
    for position, text in enumerate(short):
        places.setdefault(text, []).append(position)
    for text, positions in places.items():
        different = list(dict.fromkeys(labels[position] for position in positions))
        if len(different) > 1:
            _, middles = _differences(different)
            by_label = dict(zip(different, middles, strict=True))
            for position in positions:
                middle = shortened(printable(by_label[labels[position]]), width // 2)
                last = shortened(text, width - columns(middle) - 2)
                short[position] = f"{middle}…{last.removeprefix('…')}"
    return _numbered_apart(labels, short, width)


def _differences(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the common first words of labels, and the words of each between common ends."""
    words = [split_name(label) for label in labels]
    head = _common(words)
    tail = _common([split[len(head) :][::-1] for split in words])
    return head, [".".join(split[len(head) : len(split) - len(tail)]) for split in words]


def _numbered_apart(labels: Sequence[str], short: Sequence[str], width: int) -> list[str]:
    """Append numbers to labels that are still equal."""
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    unique = []
    for label, text in zip(labels, short, strict=True):
        if first.setdefault(text, label) == label:
            unique.append(text)
            continue
        counts[text] = counts.get(text, 1) + 1
        end = f" #{counts[text]}"
        unique.append(shortened(text, width - len(end)) + end)
    return unique


def _starts(text: str) -> list[int]:
    """Return the places where the words of a name begin, or a pattern can be cut."""
    starts = [0, *accumulate([len(word) + 1 for word in split_name(text)[:-1]])]
    # Do not cut within braces, whose ranges have dots, nor directly before them.
    inner = [text[start:] for start in starts]
    return [
        start
        for start, end in zip(starts, inner, strict=True)
        if not start or (end.count("{") == end.count("}") and not end.startswith("{"))
    ]


def _depth(text: str, width: int) -> int:
    """Return how many outer modules, before the first number, to omit from a long name."""
    if columns(text) <= width:
        return 0
    starts = _starts(text)
    last = max(0, len(starts) - 2)
    numbered = (n for n, ends in enumerate(pairwise(starts)) if text[slice(*ends)][:-1].isdecimal())
    fitting = (n for n, start in enumerate(starts[:-1]) if len(text) - start < width)
    return min(next(fitting, last), next(numbered, last))


def _outer(text: str, depth: int) -> tuple[str, ...]:
    """Return the outer modules of a name, whatever their numbers."""
    starts = _starts(text)
    if depth >= len(starts):
        return ()
    pieces = pairwise(starts[: depth + 1])
    words = (text[start:stop] for start, stop in pieces)
    return tuple("#" if word[:-1].isdecimal() else word for word in words)


def _inner(text: str, depth: int, width: int) -> str:
    """Shorten a name by its outer modules, or else in the middle."""
    return shortened(f"…{text[_starts(text)[depth] :]}" if depth else text, width)
