"""The tokenizer of a result, from the source with the tokens of its table."""

from __future__ import annotations

import filecmp
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xckpt.arrays.derived import lazies_of_payload
from xckpt.structure.facts import sections_of
from xckpt.writing.origins import ADAPTER_CONFIG, is_readable, read_json
from xckpt.writing.vocabulary import array_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xckpt.formats.plan import WantedTensor
    from xckpt.structure.model import Structure
    from xckpt.writing.origins import Origin

_TOKENIZER, _SETTINGS, _ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
# Files that number tokens.
_VOCABULARIES = (
    *(_TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "source.spm", "tekken.json"),
)
#: Files of a tokenizer of transformers, which are from one folder.
FILES = (
    *(*_VOCABULARIES, _SETTINGS, _ADDED, "special_tokens_map.json", "merges.txt", "target.spm"),
    *("target_vocab.json", "normalizer.json", "chat_template.jinja", "chat_template.json"),
)
_MOST_DIGITS = 9
_NUMBER = "_id"  # at the end of "eos_token_id"
_NUMBERS = f"_token{_NUMBER}"


class Tokenizer:
    """The files of a tokenizer in a folder, and its tokens as far as the files are JSON or text."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path()
        names = FILES if folder is not None else ()
        self.files = {name: path for name in names if is_readable(path := self.folder / name)}

    def __bool__(self) -> bool:
        return not self.files.keys().isdisjoint(_VOCABULARIES)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Numbers of tokens by their text; empty if they are unknown."""
        pairs = [*self._vocabulary()]
        document, settings = self._read(_TOKENIZER), self._read(_SETTINGS)
        added, by_number = document.get("added_tokens"), settings.get("added_tokens_decoder")
        if isinstance(added, list):
            pairs += [(_text(token), token.get("id")) for token in added if isinstance(token, dict)]
        if isinstance(by_number, dict) and pairs:
            pairs += [
                (_text(by_number[n]), int(n))
                for n in by_number
                if n.isdecimal() and len(n) <= _MOST_DIGITS
            ]
        pairs += self._read(_ADDED).items()
        return {text: n for text, n in pairs if type(text) is str and type(n) is int}

    def _vocabulary(self) -> Iterable[tuple[Any, Any]]:
        """Return the tokens that were not added later, with their numbers."""
        model = self._read(_TOKENIZER).get("model")
        tokens = model.get("vocab") if isinstance(model, dict) else self._read("vocab.json")
        if isinstance(tokens, list):  # each with its score
            return [
                (pair[0], n) for n, pair in enumerate(tokens) if isinstance(pair, list) and pair
            ]
        if isinstance(tokens, dict) and tokens:
            return tokens.items()
        with suppress(KeyError, OSError, ValueError):
            lines = self.files["vocab.txt"].read_text("utf-8").splitlines()
            return [(line, n) for n, line in enumerate(lines)]
        return []

    @property
    def count(self) -> int:
        """Number of rows that the tokens need; 0 if it is unknown."""
        return max(self.numbers.values(), default=-1) + 1

    def special(self, key: str) -> int | None:
        """Return the number of a special token, such as "eos_token_id"."""
        return self.numbers.get(_text(self._read(_SETTINGS).get(key.removesuffix(_NUMBER))) or "")

    def stated_numbers(self, name: str) -> dict[str, Any]:
        """Return the numbers of tokens that a config beside the tokenizer states."""
        config = read_json(path) if is_readable(path := self.folder / name) else None
        return {key: value for key, value in (config or {}).items() if key.endswith(_NUMBERS)}

    def _read(self, name: str) -> dict[str, Any]:
        path = self.files.get(name)
        return (read_json(path) if path is not None else None) or {}


def _text(token: Any) -> str | None:
    """Return the text of a token, which settings state by itself or with properties."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


@dataclass(frozen=True, slots=True)
class ChosenTokenizer:
    """The tokenizer of a result, and the other tokenizers of its sources."""

    tokenizer: Tokenizer
    base: Tokenizer
    #: Tokenizers of other sources, which have other tokens.
    differing: Sequence[Tokenizer] = ()
    #: Rows of the table of tokens; 0 without one.
    rows: int = 0

    @property
    def is_of_another(self) -> bool:
        """True if the tokenizer is from another source than the config."""
        return self.tokenizer is not self.base

    def renumbered(self, name: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the numbers of tokens that the tokenizer has."""
        if not self.is_of_another:
            return dict(document)
        stated = self.tokenizer.stated_numbers(name)
        new = {key: stated[key] for key in document if key in stated}
        for key, value in document.items() if not stated else ():
            old, number = self.base.special(key), self.tokenizer.special(key)
            if key.endswith(_NUMBERS) and number is not None and old not in {None, number}:
                is_list = type(value) is list
                values = [number if n == old else n for n in (value if is_list else [value])]
                distinct = [n for place, n in enumerate(values) if n not in values[:place]]
                new[key] = distinct if is_list else distinct[0]
        return {**document, **new}

    def notes(self) -> list[tuple[str, str]]:
        """Return notes of a tokenizer of another source, or of several that may be right."""
        if not self.differing:
            return []
        count, folder = self.tokenizer.count, self.tokenizer.folder.name
        tokens = f"{count} tokens" if count else "tokens"
        text = f"the tokenizer is from {folder}/ with {tokens}, beside a table of {self.rows} rows"
        if self.is_of_another:
            return [(text, next(iter(self.tokenizer.files)))] if self.base else []
        text += " (copy all files of another one if the rows are of its tokens)"
        numbered = [t for t in self.differing if count and self.rows and t.count]
        return [(text, f"{t.folder.name}/ another tokenizer of {t.count} tokens") for t in numbered]


def choose_tokenizer(
    origin: Origin, tensors: Mapping[str, WantedTensor], after: Structure, before: Structure
) -> ChosenTokenizer:
    """Return the tokenizer of the source whose tokens the table has."""
    if origin.folder is None:
        return ChosenTokenizer(nothing := Tokenizer(), nothing)
    base, rows = Tokenizer(origin.folder), _rows_of(after)
    sources = [tokenizer for folder in origin.others if (tokenizer := Tokenizer(folder))]
    differing = [tokenizer for tokenizer in sources if _has_other_tokens(tokenizer, base)]
    chosen = base
    if rows and differing:
        folders = _folders_of(tensors[_table_of(after)])
        fitting = [tokenizer for tokenizer in differing if tokenizer.count <= rows]
        matches = [t for t in fitting if folders == {t.folder}]
        if not matches and (rows != _rows_of(before) or base.count > rows):
            matches = [t for t in fitting if t.count == rows != base.count]
        # Tokens that were trained in rows of the base that it did not use.
        extended = [t for t in fitting if t.folder in folders and _extends(t, base)]
        matches = matches or extended
        chosen = matches[0] if len(matches) == 1 else base
    return ChosenTokenizer(chosen, base, differing, rows)


def _table_of(structure: Structure) -> str:
    """Return the name of the table of tokens, or of the head; empty without both."""
    names = map(structure.weight_of, ("token_embedding", "output"))
    return next(filter(None, names), "")


def _rows_of(structure: Structure) -> int:
    """Return the number of rows of the table of tokens; 0 without one."""
    if not (name := _table_of(structure)):
        return 0
    pairs = zip(structure[name].axes, structure.described(name).shape, strict=True)
    return dict(pairs).get("vocab", 0)


def _folders_of(tensor: WantedTensor) -> set[Path]:
    """Return the folders of the files that a tensor is read or computed from."""
    lazies = lazies_of_payload(array_of(tensor))
    return {Path(reader.source.name).parent for lazy in lazies for reader in lazy.part_readers}


def _has_other_tokens(a: Tokenizer, b: Tokenizer) -> bool:
    """Return whether two tokenizers have other tokens, or other files if those are unknown."""
    names = [name for name in _VOCABULARIES if name in a.files and name in b.files]
    pairs = [(a.files[name], b.files[name]) for name in names]
    has_added = _ADDED in a.files or _ADDED in b.files
    if names and not has_added and all(filecmp.cmp(*pair, shallow=False) for pair in pairs):
        return False
    return a.numbers != b.numbers or not a.numbers


def _extends(a: Tokenizer, b: Tokenizer) -> bool:
    """Return whether the tokenizer of an adapter has the tokens of another one, and more."""
    is_of_adapter = is_readable(a.folder / ADAPTER_CONFIG)
    return is_of_adapter and bool(b.numbers) and b.numbers.items() < a.numbers.items()


def numbers_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config that name tokens of the language model by their numbers."""
    sections = reversed(sections_of(config))
    return {k: v for section in sections for k, v in section.items() if k.endswith(_NUMBERS)}
