"""Names of tensors taken apart into words and the indices of modules, and put together again.

A name is cut into *pieces*, which spell it when they are joined. A piece is an index, or a word
with the separator in front of it and, before an index, the joint between the two::

    h.0.attn.w                       h.          0  .attn     .w
    params/encoder/layers_3/kernel   params      /encoder     /layers_  3  /kernel
    transformer/h0_attn/linear/w     transformer /h        0  _attn     /linear  /w

A *template* has None in place of each index, such as ``("h.", None, ".attn", ".w")``. The *numbered
module* of an index is the word before it: ``h``, ``layers``.

Words are separated by dots and slashes. A number is an index if it is

- a word of its own: ``layers.0``, ``layer/0``,
- after a word for things that models repeat, and ``_`` or ``-``: ``layers_0``, ``encoderblock_0``,
  ``layer-0``, and Keras's ``layer_._0``,
- after ``h`` alone, as in GPT-2 for TensorFlow and Haiku: ``h0/attn``, ``h0_attn``.

Other numbers belong to their word, because they distinguish modules with different roles:
``norm_1`` and ``norm_2``, ``wi_0`` and ``wi_1``, ``Dense_0``, ``conv1``. Callers can list other
modules whose numbers are indices.
"""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import translate
from functools import lru_cache
from itertools import accumulate, compress, pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    # Indices are None, or a number of digits if they have leading zeros.
    Template = Iterable[str | int | None]

# The module of an index that begins a name, as in a bare `Sequential`: "0.weight".
_UNNAMED = "index"
# Coordinates are 64-bit integers, and `int` refuses more than 4300 digits.
_MAX_DIGITS = 18
# Numbers that may be an index, depending on the text around them.
_DIGITS = re.compile(r"(?<![^./_\-h])([0-9]{1,18})(?![^./_])")
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_SEPARATOR = re.compile("[./]")
_BEFORE_SEPARATOR = re.compile("(?=[./])")
# The end of a text, if it joins a word to its index.
_JOINT = re.compile(r"_\._$|[._/\-]$")
# Words for things that models repeat.
_REPEATED = re.compile(
    r"[\w-]*(?:(?<!p)layer|block|blk|expert|stage)s?|layer_with_weights|h"
    r"|[\w-]*(?:resnet|attention|sampler|encoder|decoder|head|level|module|cell)s",
    re.IGNORECASE | re.ASCII,
)
# A parsed name without its indices: template and modules.
_Form = tuple[tuple[str | None, ...], tuple[str, ...]]
# The names of a model have few forms. Long names are not cached, so that a hostile file cannot fill
# the memory.
_MAX_FORMS = 4096
_MAX_CACHED_LENGTH = 512


class ParsedName(NamedTuple):
    """A tensor's name, taken apart."""

    #: Pieces of the name, None for indices.
    template: tuple[str | None, ...]
    #: Numbered module of each index.
    modules: tuple[str, ...]
    #: Indices as they are spelled.
    indices: tuple[str, ...]

    @property
    def pieces(self) -> list[str]:
        """Pieces of the name, indices included."""
        indices = iter(self.indices)
        return [next(indices) if piece is None else piece for piece in self.template]

    def restricted(self, mask: Sequence[bool]) -> ParsedName:
        """Return the name with some of its indices; the others are text."""
        if all(mask):
            return self
        pieces, remaining = [], iter(zip(self.indices, mask, strict=True))
        for piece in self.template:
            index, is_kept = next(remaining) if piece is None else (piece, True)
            pieces.append(None if piece is None and is_kept else index)
        modules, indices = (tuple(compress(items, mask)) for items in (self.modules, self.indices))
        return ParsedName(tuple(pieces), modules, indices)

    @property
    def outermost(self) -> str:
        """The name up to its first index, such as ``model.layers.3``; empty without an index."""
        if not self.indices:
            return ""
        return "".join(self.pieces[: self.template.index(None) + 1])


def split_name(name: str, max_splits: int = -1) -> list[str]:
    """Split a name at its dots and slashes."""
    if "/" in name:
        return _SEPARATOR.split(name, max(max_splits, 0))
    return name.split(".", max_splits)


def split_leaf(name: str) -> tuple[str, str, str]:
    """Split a name at its last dot or slash, as `str.rpartition` does."""
    return name.rpartition("/" if name.rfind("/") > name.rfind(".") else ".")


def module_of(name: str) -> str:
    """Return a name up to its last dot or slash; empty without one."""
    return split_leaf(name)[0]


def leaf_of(name: str) -> str:
    """Return a name after its last dot or slash."""
    return split_leaf(name)[2]


def is_index(piece: str) -> bool:
    """Return whether a piece is a whole number, with or without leading zeros."""
    # isdigit alone accepts "³" and digits of other scripts.
    return piece.isdigit() and piece.isascii() and len(piece) <= _MAX_DIGITS


def names_repeated_modules(word: str) -> bool:
    """Return whether a word is one for things that models repeat, such as ``layers``."""
    return _REPEATED.fullmatch(word) is not None


# --- parsing -------------------------------------------------------------------------------------


def parse_name(
    name: str, only: Collection[str] | None = None, path: Sequence[str] | None = None
) -> ParsedName:
    """Parse the indices in a name, or only the indices of the numbered modules in `only`.

    `only` has names of modules, paths, ends of paths, or globs of them, as `is_module` takes.
    """
    # `path` has the words of the name if dots do not separate them.
    if path is None:
        parsed = _parse(name, frozenset() if only is None else _last_words(frozenset(only)))
    else:
        pieces = _path_pieces(path)
        template = tuple(None if is_index(piece) else piece for piece in pieces)
        indices = tuple(piece for piece in pieces if is_index(piece))
        parsed = ParsedName(template, tuple(numbered_modules(template)), indices)
    if only is None or all(module in only for module in parsed.modules):
        return parsed
    is_cached = len(name) <= _MAX_CACHED_LENGTH
    mask_of = _modules_in if is_cached else _modules_in.__wrapped__
    return parsed.restricted(mask_of(parsed.template, frozenset(only)))


@lru_cache
def _last_words(modules: frozenset[str]) -> frozenset[str]:
    """Return the words before the indices of modules, from their names or paths."""
    return modules | {leaf_of(module) for module in modules}


@lru_cache(_MAX_FORMS)
def _modules_in(template: tuple[str | None, ...], modules: frozenset[str]) -> tuple[bool, ...]:
    """Return whether each index in a template is one of some modules."""
    return tuple(
        [
            any(is_module(template[: place + 1], module) for module in modules)
            for place, piece in enumerate(template)
            if piece is None
        ]
    )


def is_module(template: Template, text: str) -> bool:
    """Return whether a text names the module of the last index in a template.

    It is the name of the module, its path with or without numbers, or the end of the path; also as
    a glob.
    """
    pieces = ["0" if piece is None else str(piece) for piece in template]
    numbered = "".join(pieces)
    if text == numbered_modules(template)[-1]:
        return True
    paths = (drop_indices(template), numbered.removesuffix("0")[:-1], numbered)
    return any(map(_end_of_path(text), paths))


@lru_cache
def _end_of_path(glob: str) -> Callable[[str], object]:
    return re.compile(f"(?s:.*[./])?{translate(glob)}").match


def _parse(name: str, extra: frozenset[str]) -> ParsedName:
    """Parse all indices in a name; modules in `extra` may have an index after ``_``."""
    if len(name) <= _MAX_CACHED_LENGTH and name.isascii() and not _have_digits(extra):
        form, texts, indices = _cuts(name.encode().translate(_DIGITS_TO_ZERO), extra)
        if form is None:
            form = _form_of(tuple([name[cut] for cut in texts]))
        # Lists first: this runs for every tensor of a file, and a generator takes longer.
        return ParsedName(*form, tuple([name[cut] for cut in indices]))
    parts = _split_indices(name, extra)
    form_of = _form_of if len(name) <= _MAX_CACHED_LENGTH else _form_of.__wrapped__
    return ParsedName(*form_of(tuple(parts[::2])), tuple(parts[1::2]))


@lru_cache
def _have_digits(words: frozenset[str]) -> bool:
    return any(character.isdigit() for word in words for character in word)


@lru_cache(_MAX_FORMS)
def _cuts(mask: bytes, extra: frozenset[str]) -> tuple[_Form | None, list[slice], list[slice]]:
    """Return the form of the names that have a mask, and the slices of their texts and indices."""
    # The mask of a name has zeros for its digits. The form is None if some of them are not indices.
    parts = _split_indices(mask.decode(), extra)
    ends = list(accumulate(map(len, parts)))
    cuts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    texts = tuple(parts[::2])
    form = None if any("0" in text for text in texts) else _form_of(texts)
    return form, cuts[::2], cuts[1::2]


def _split_indices(name: str, extra: frozenset[str]) -> list[str]:
    """Split a name into texts and the indices between them."""
    parts = _DIGITS.split(name)
    merged = parts[:1]
    for digits, (before, after) in zip(parts[1::2], pairwise(parts[::2]), strict=True):
        if _is_index_between(before, after, extra):
            merged += [digits, after]
        else:
            merged[-1] += digits + after
    return merged


def _is_index_between(before: str, after: str, extra: frozenset[str]) -> bool:
    """Return whether digits between two texts are an index."""
    match = _JOINT.search(before)
    joint = match[0] if match else before[-1:]
    word = split_name(before.removesuffix(joint))[-1]
    if joint == "h":  # h0/attn and h0_attn, but neither lstm/h0 at the end nor fh0
        return not word and after != ""
    if after.startswith("_"):
        return False
    if joint in {"", ".", "/"}:
        return True
    return word in extra or _REPEATED.fullmatch(word) is not None


@lru_cache(_MAX_FORMS)
def _form_of(texts: tuple[str, ...]) -> _Form:
    """Return the template and the modules of names with an index between every two texts."""
    template: list[str | None] = []
    for position, text in enumerate(texts):
        is_first, is_last = position == 0, position == len(texts) - 1
        if not is_first:
            template.append(None)
        pieces = _BEFORE_SEPARATOR.split(text)
        if not is_first and not pieces[0]:
            del pieces[0]
        # A separator in front of an index belongs to the piece before it.
        if not is_last and len(pieces) > 1 and (text[-1] in "./" or text.endswith("_._")):
            pieces[-2:] = ["".join(pieces[-2:])]
        if text or len(texts) == 1:
            template += pieces
    return tuple(template), tuple(numbered_modules(template))


def _path_pieces(path: Sequence[str]) -> list[str]:
    """Return the pieces of a name whose words are known, joined by dots."""
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


# --- templates -----------------------------------------------------------------------------------


def strip_separator(text: str) -> str:
    """Return pieces of a name without the separator in front of them."""
    return text[1:] if text.startswith((".", "/")) else text


def tokens(template: Template) -> list[tuple[str, str | int | None]]:
    """List the words and indices in a template, each after its separator."""
    # ``params/layers_3`` has the tokens ``("", "params"), ("/", "layers"), ("_", "3")``. A token
    # belongs to the word before it unless it follows a dot or slash.
    pieces = list(template)
    result: list[tuple[str, str | int | None]] = []
    joint = ""
    for position, piece in enumerate(pieces):
        if not isinstance(piece, str) or is_index(piece):
            result.append((joint, piece))
            joint = ""
            continue
        text = strip_separator(piece) if position else piece
        separator = piece.removesuffix(text)
        following = pieces[position + 1] if position + 1 < len(pieces) else ""
        if not isinstance(following, str) or is_index(following):
            if separator and not text:  # between two indices
                joint = separator
                continue
            match = _JOINT.search(text)
            joint = match[0] if match else ""
            text = text.removesuffix(joint)
        result.append((separator, text))
    return result


def _separated_words(template: Template) -> Iterator[tuple[str, str]]:
    """Yield the words in a template without its indices, each after its separator."""
    separator, word = "", None
    for joint, token in tokens(template):
        if not isinstance(token, str):
            continue
        if word is None:
            word = token
        elif joint in {".", "/"}:
            yield separator, word
            separator, word = joint, token
        else:
            word += joint + token
    if word is not None:
        yield separator, word


def split_words(template: Template) -> tuple[str, ...]:
    """Split a template into its words, without indices."""
    return tuple(word for _, word in _separated_words(template))


def drop_indices(template: Template) -> str:
    """Return a name without its indices."""
    return "".join(separator + word for separator, word in _separated_words(template))


def module_indices(template: Template) -> list[tuple[str, str | int | None]]:
    """List the indices in a template, each with its numbered module."""
    # An index that is text is the same in all names of the template.
    module, indices = _UNNAMED, []
    for _, token in tokens(template):
        if isinstance(token, str) and not is_index(token):
            module = token or _UNNAMED
        else:
            indices.append((module, token))
    return indices


def numbered_modules(template: Template) -> list[str]:
    """List the numbered modules of the indices that vary in a template."""
    return [module for module, index in module_indices(template) if not isinstance(index, str)]


def renamed_template(template: Template, name: str) -> tuple[str | int | None, ...] | None:
    """Return the template of another name, with each index after the word that it follows.

    The word for things that models repeat may be another one, such as ``h`` for ``layers``. None if
    the name has no word for an index.
    """
    words = [strip_separator(piece) for piece in _BEFORE_SEPARATOR.split(name)]
    old_words: Counter[str] = Counter()
    word = ""
    indices: dict[int, list[tuple[str, int | None]]] = {}
    listed = tokens(template)
    old_tokens = {token for _, token in listed}
    repeated = (n for n, w in enumerate(words) if w not in old_tokens and names_repeated_modules(w))
    for joint, token in listed:
        if isinstance(token, str):
            word = token
            old_words[word] += 1
            continue
        places = [n for n, w in enumerate(words) if w == word][old_words[word] - 1 :]
        place = places[0] if places else next(repeated, None)
        if place is None:
            return None
        indices.setdefault(place, []).append((joint, token))
    pieces: list[str | int | None] = []
    for position, piece in enumerate(_BEFORE_SEPARATOR.split(name)):
        if position > 0 and is_index(words[position]):  # the same in all names
            _append_index(pieces, piece[:1], words[position])
        else:
            pieces.append(piece)
        for joint, index in indices.get(position, ()):
            _append_index(pieces, joint, index)
    return tuple(pieces)


def _append_index(pieces: list[str | int | None], joint: str, index: str | int | None) -> None:
    """Add an index to a template; its joint belongs to the word before it."""
    last = pieces[-1]
    if isinstance(last, str) and not is_index(last):
        pieces[-1] = last + joint
    else:
        pieces.append(joint)
    pieces.append(index)


def has_words(template: Template) -> bool:
    """Return whether a template has anything other than indices."""
    return any(isinstance(piece, str) and piece.strip("./") for piece in template)


def modules_by_frequency(
    names: Iterable[str], extra: Collection[str] = ()
) -> dict[tuple[str | None, ...], str]:
    """Return numbered modules by template, up to their index, most frequent first.

    A module is called by its path if another one has its name.
    """
    extra = _last_words(frozenset(extra))
    templates = Counter(_parse(name, extra).template for name in names)
    counts: Counter[tuple[str | None, ...]] = Counter()
    for template, count in templates.items():
        if has_words(template):
            places = [place for place, piece in enumerate(template) if piece is None]
            counts.update({template[: place + 1]: count for place in places})
    paths = {template: drop_indices(template) for template, _ in counts.most_common()}
    words = {template: numbered_modules(template)[-1] for template in paths}
    shared = Counter(word for word, _ in {*zip(words.values(), paths.values(), strict=True)})
    return {t: path if shared[words[t]] > 1 else words[t] for t, path in paths.items()}


def number_in_place(stored: str, name: str, number: int) -> int | None:
    """Return the number of a stored tensor in the place of a number in a name of the same form."""
    before, after = parse_name(stored), parse_name(name)
    places = [place for place, text in enumerate(after.indices) if int(text) == number]
    is_same = before.template == after.template
    return int(before.indices[places[-1]]) if is_same and places else None
