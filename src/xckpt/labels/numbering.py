"""Names taken apart: the words in them, and the numbers of modules; and put together again.

A name is cut into pieces that spell it when they are put one after another, so that nothing else
knows what separates them. A piece is a number, or a word with what is in front of it and, where a
number follows, what is between them::

    h.0.attn.w                       h.          0  .attn     .w
    params/encoder/layers_3/kernel   params      /encoder     /layers_  3  /kernel
    transformer/h0_attn/linear/w     transformer /h        0  _attn     /linear  /w

Words are separated by dots and slashes. A number is the index of a module, which is called by the
word before it, if it is

- a word of its own: ``layers.0``, ``layer/0``,
- after a word for what models repeat, and ``_`` or ``-``: ``layers_0``, ``encoderblock_0``,
  ``layer-0``, and Keras's ``layer_._0``,
- after ``h`` alone, as in models after GPT-2 of TensorFlow and Haiku: ``h0/attn``, ``h0_attn``.

Other numbers tell things apart that are not alike, and stay in the name: ``norm_1`` and ``norm_2``,
``wi_0`` and ``wi_1``, ``Dense_0``, ``conv1``. A caller who names the module knows better.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from itertools import accumulate, compress, pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    # An index is None, or its number of digits where zeros stand in front of it.
    Template = Iterable[str | int | None]

__all__ = [
    "Numbered",
    "bare",
    "has_words",
    "is_index",
    "numbered",
    "numbered_bases",
    "numbered_modules",
    "numbered_places",
    "spans",
    "split_leaf",
    "split_name",
    "without_front",
    "words",
]

# What an index stands after where it stands first, as the layers of a bare sequence do.
_FIRST = "index"
# Digits of an index: coordinates have 64-bit integers, and int refuses more than 4300 digits.
_LONGEST_INDEX = 18
# What may be an index, if what is next to it says so.
_DIGITS = re.compile(r"(?<![^./_\-h])([0-9]{1,18})(?![^./_])")
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_SEPARATOR = re.compile("[./]")
_BEFORE_SEPARATOR = re.compile("(?=[./])")
# What stands between a word and its number.
_JOINT = re.compile(r"_\._$|[._/\-]$")
# What models repeat.
_REPEATED = re.compile(
    r"[\w-]*(?:(?<!p)layer|block|blk|expert|stage)s?|layer_with_weights|h"
    r"|[\w-]*(?:resnet|attention|sampler|encoder|decoder|head|level|module|cell)s",
    re.IGNORECASE | re.ASCII,
)
# The names of a file have few forms. Long ones may be those of a file that is to fill memory.
_MOST_FORMS, _LONGEST_KEPT = 4096, 512


class Numbered(NamedTuple):
    """A name taken apart: its pieces with None for indices, what these number, and they."""

    template: tuple[str | None, ...]
    bases: tuple[str, ...]
    indices: tuple[str, ...]

    @property
    def pieces(self) -> list[str]:
        """The pieces that spell the name."""
        indices = iter(self.indices)
        return [next(indices) if piece is None else piece for piece in self.template]

    @property
    def outermost(self) -> str:
        """The name up to its first index; empty where there is none."""
        if not self.indices:
            return ""
        return "".join(self.pieces[: self.template.index(None) + 1])


def split_name(name: str, most: int = 0) -> list[str]:
    """Split a name at its dots and slashes, numbers or not: at all of them, or at the first."""
    return _SEPARATOR.split(name, most) if "/" in name else name.split(".", most or -1)


def split_leaf(name: str) -> tuple[str, str, str]:
    """Split a name at its last dot or slash, as `str.rpartition` does."""
    return name.rpartition("/" if name.rfind("/") > name.rfind(".") else ".")


def is_index(piece: str) -> bool:
    """Return whether a piece of a name is a whole number; zeros may stand in front."""
    # isdigit alone takes "³" and other scripts.
    return piece.isdigit() and piece.isascii() and len(piece) <= _LONGEST_INDEX


def numbered(
    name: str, only: Collection[str] | None = None, path: Sequence[str] | None = None
) -> Numbered:
    """Find the indices in a name: all, or those of certain modules.

    `path` has the words of a name that dots join, where they have dots in them.
    """
    if path is not None:
        pieces = _pieces_of_path(path)
        template = tuple([None if is_index(piece) else piece for piece in pieces])
        indices = tuple([piece for piece in pieces if is_index(piece)])
        found = Numbered(template, tuple(numbered_bases(template)), indices)
    else:
        found = _numbered(name, None if only is None else frozenset(only))
    if only is None or all(base in only for base in found.bases):
        return found
    chosen = [base in only for base in found.bases]
    each = iter(zip(chosen, found.indices, strict=True))
    template = tuple(
        [(None if (at := next(each))[0] else at[1]) if p is None else p for p in found.template]
    )
    return Numbered(
        template, tuple(compress(found.bases, chosen)), tuple(compress(found.indices, chosen))
    )


def _numbered(name: str, also: frozenset[str] | None) -> Numbered:
    """Find all indices in a name; words in `also` have numbers behind ``_`` as well."""
    if also is None and len(name) <= _LONGEST_KEPT and name.isascii():
        # Layers have names that differ in digits only, and these are cut at the same places.
        form, texts, places = _cuts(name.encode().translate(_ZEROS))
        if form is None:
            form = _form(tuple([name[text] for text in texts]), None, are_known=True)
        return Numbered(form.template, form.bases, tuple([name[place] for place in places]))
    cut, form = _cut(name, also)
    return Numbered(form.template, form.bases, tuple(cut[1::2]))


@lru_cache(_MOST_FORMS)
def _cuts(zeros: bytes) -> tuple[_Form | None, list[slice], list[slice]]:
    """Return the form of names with any digits for zeros, if it is one, and where to cut them."""
    cut, form = _cut(zeros.decode(), None)
    ends = list(accumulate(map(len, cut)))
    slices = list(map(slice, [0, *ends], ends))
    is_one = not any("0" in text for text in cut[::2])
    return form if is_one else None, slices[::2], slices[1::2]


def _cut(name: str, also: frozenset[str] | None) -> tuple[list[str], _Form]:
    """Cut a name into texts and the indices between them."""
    form_of = _form if len(name) <= _LONGEST_KEPT else _form.__wrapped__
    cut = _DIGITS.split(name)
    form = form_of(tuple(cut[::2]), also)
    if form.are_indices is not None:
        cut = _merged(cut, form.are_indices)
        form = form_of(tuple(cut[::2]), also, are_known=True)
    return cut, form


class _Form(NamedTuple):
    """What names are like that have digits between the same texts."""

    template: tuple[str | None, ...]
    bases: tuple[str, ...]
    # Which of the digits are an index, where some of them are a part of the text around them.
    are_indices: list[bool] | None = None


@lru_cache(_MOST_FORMS)
def _form(
    between: tuple[str, ...], also: frozenset[str] | None, *, are_known: bool = False
) -> _Form:
    """Return what names are like that have digits between texts, known to be indices or not."""
    if not are_known:
        are_indices = [_is_between(before, after, also) for before, after in pairwise(between)]
        if not all(are_indices):
            return _Form((), (), are_indices)
    template: list[str | None] = []
    for at, text in enumerate(between):
        if at:
            template.append(None)
        pieces = _BEFORE_SEPARATOR.split(text)
        if at and not pieces[0]:
            del pieces[0]
        is_last = at == len(between) - 1
        if not is_last and len(pieces) > 1 and (text[-1] in "./" or text.endswith("_._")):
            pieces[-2:] = ["".join(pieces[-2:])]
        template += pieces if text or len(between) == 1 else []
    return _Form(tuple(template), tuple(numbered_bases(template)))


def _merged(found: list[str], are_indices: Iterable[bool]) -> list[str]:
    """Make digits that are no index a part of the text around them."""
    merged = found[:1]
    for is_one, digits, after in zip(are_indices, found[1::2], found[2::2], strict=True):
        if is_one:
            merged += [digits, after]
        else:
            merged[-1] += digits + after
    return merged


def _is_between(before: str, after: str, also: frozenset[str] | None) -> bool:
    """Return whether digits between two texts are an index."""
    found = _JOINT.search(before)
    joint = found[0] if found else before[-1:]
    word = split_name(before.removesuffix(joint))[-1]
    if joint == "h":
        return not word and after != ""
    if after.startswith("_"):
        return False
    if joint in {"", ".", "/"}:
        return True
    return _REPEATED.fullmatch(word) is not None or (also is not None and word in also)


def _pieces_of_path(path: Sequence[str]) -> list[str]:
    pieces: list[str] = []
    for word in path:
        if not is_index(word):
            pieces.append(f".{word}" if pieces else word)
            continue
        if pieces and is_index(pieces[-1]):
            pieces.append(".")
        elif pieces:
            pieces[-1] += "."
        pieces.append(word)
    return pieces


def without_front(text: str) -> str:
    """Return some pieces of a name without the separator in front of them."""
    return text[1:] if text.startswith((".", "/")) else text


def spans(template: Template) -> list[tuple[str, str | int | None]]:
    """Split each piece of a template into what is in front of a word or an index, and that.

    Where it is neither a dot nor a slash, both belong to the word before.
    """
    pieces = list(template)
    found: list[tuple[str, str | int | None]] = []
    joint = ""
    for at, piece in enumerate(pieces):
        if not isinstance(piece, str) or is_index(piece):
            found.append((joint, piece))
            joint = ""
            continue
        text = without_front(piece) if at else piece
        separator = piece.removesuffix(text)
        following = pieces[at + 1] if at + 1 < len(pieces) else ""
        if not isinstance(following, str) or is_index(following):
            if separator and not text:  # between two numbers
                joint = separator
                continue
            end = _JOINT.search(text)
            joint = end[0] if end else ""
            text = text.removesuffix(joint)
        found.append((separator, text))
    return found


def _words(template: Template) -> Iterator[tuple[str, str]]:
    """Return the words of a template, and what is in front of each."""
    front, word = "", None
    for joint, part in spans(template):
        if not isinstance(part, str):
            continue
        if word is None:
            word = part
        elif joint in {".", "/"}:
            yield front, word
            front, word = joint, part
        else:
            word += joint + part
    if word is not None:
        yield front, word


def words(template: Template) -> tuple[str, ...]:
    """Return the words of a template, without its indices."""
    return tuple([word for _, word in _words(template)])


def bare(template: Template) -> str:
    """Return a name without its indices."""
    return "".join([front + word for front, word in _words(template)])


def numbered_places(template: Template) -> list[tuple[str, str | int | None]]:
    """Return the numbers in a template, each after what it numbers; a text is not an index."""
    base, places = _FIRST, []
    for _, part in spans(template):
        if isinstance(part, str) and not is_index(part):
            base = part or _FIRST
        else:
            places.append((base, part))
    return places


def numbered_bases(template: Template) -> list[str]:
    """Return what the indices of a template number: the word before each."""
    return [base for base, part in numbered_places(template) if not isinstance(part, str)]


def has_words(template: Template) -> bool:
    """Return whether there is something else than indices in a template."""
    return any(isinstance(piece, str) and piece.strip("./") for piece in template)


def numbered_modules(names: Iterable[str], also: Collection[str] = ()) -> list[str]:
    """List what the indices in names would name dimensions, most frequent first."""
    counted: Counter[str] = Counter()
    for name in names:
        found = _numbered(name, frozenset(also))
        counted.update(found.bases if has_words(found.template) else ())
    return [base for base, _ in counted.most_common()]
