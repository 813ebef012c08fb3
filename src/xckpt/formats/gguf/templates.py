"""Expressions of a chat template that do more than format messages.

A chat template is a text in the language of Jinja. Programs that render it without a sandbox run
what it reaches through attributes of Python, such as ``''.__class__``. Templates that format use no
names with two underscores, no frames, and no other files. Names that are put together at run time
are found by their underscores, or by the filter ``attr``.

Specification: src/jinja2/lexer.py and sandbox.py of github.com/pallets/jinja, 3.1.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_BEGIN = re.compile(r"\{[{%#]")
_RAW = re.compile(r"\{%[-+]?\s*raw\s*[-+]?%\}")
_END_RAW = re.compile(r"\{%[-+]?\s*endraw\s*[-+]?%\}")
_TOKEN = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")|(?P<name>[^\W\d]\w*+)|(?P<end>[-+]?[%}]\})"""
    r"""|(?P<sign>\S)""",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})"
    r"|N\{((?:LOW LINE|low line))\})"
)
_UNDERSCORES = re.compile(r"_+|.*__[a-z_]+__.*", re.DOTALL | re.IGNORECASE)
# Names, or ends of names, that lead from a value to other objects.
_LEADING = "base bases builtins call class code closure dict func getattribute globals import init"
_LEADING += " kwdefaults loader mro reduce reduce_ex self subclasses wrapped"
_NAMES = [f"__{name}__" for name in _LEADING.split()]
_SHORTEST_PIECE = 4
# Attributes without underscores in front that a sandbox refuses: frames, and code of functions.
_FRAMES = {"f_back", "f_builtins", "f_globals", "f_locals", "func_closure", "func_code"}
_FRAMES |= {"func_defaults", "func_globals", "gi_code", "gi_frame", "cr_code", "cr_frame"}
_FRAMES |= {"ag_code", "ag_frame", "im_class", "im_func", "im_self", "mro", "tb_frame"}
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_FILES = {"extends", "from", "import", "include"}
_LONGEST, _LONGEST_SHOWN, _MOST = 1 << 20, 60, 10


def template_code(template: str) -> list[str]:
    """Return expressions that run code or read files, at most ten."""
    expressions = dict.fromkeys(_suspects(template[:_LONGEST]))
    if len(template) > _LONGEST:
        expressions[f"{len(template)} characters, more than {_LONGEST}"] = None
    return [text[:_LONGEST_SHOWN] for text in expressions][:_MOST]


def _suspects(template: str) -> Iterator[str]:
    at = 0
    while (begin := _BEGIN.search(template, at)) is not None:
        raw = _RAW.match(template, begin.start())
        if begin[0] == "{#" or raw is not None:
            end = template.find("#}", begin.end())
            if raw is not None:
                match = _END_RAW.search(template, raw.end())
                end = -1 if match is None else match.end()
            if end < 0:
                return
            at = end
            continue
        words: list[str] = []
        at, depth = begin.end(), 0
        while (token := _TOKEN.search(template, at)) is not None:
            at = token.end()
            if token["end"] is not None and not depth:
                break
            if token["end"] is not None:  # of a mapping in the expression
                at = token.start() + 1
            first = template[token.start()] if token["text"] is None else ""
            depth += (first in _OPENING) - (first in _CLOSING)
            yield from _judge(token, words, is_statement=begin[0] == "{%")
            words.append(token[0])
        else:
            return


def _judge(token: re.Match[str], words: list[str], *, is_statement: bool) -> Iterator[str]:
    """Yield a token that makes an expression reach further, given the tokens before it."""
    name, before = token["name"], words[-1] if words else ""
    if name is not None:
        is_attribute = before == "." and (name.startswith("_") or name in _FRAMES)
        if is_attribute or (name.startswith("__") and name.endswith("__")):
            yield f"{''.join(words[-2:])}{name}" if before == "." else name
        elif before == "|" and name == "attr":
            yield "the filter attr"
        elif is_statement and name in _FILES and words in ([], ["-"], ["+"]):
            yield f"the statement {name}"
    elif token["text"] is not None:
        text = _unescaped(token["text"][1:-1])
        if _UNDERSCORES.fullmatch(text) is not None or _is_piece(text):
            yield token["text"]


def _is_piece(text: str) -> bool:
    """Return whether a text begins or ends a name with two underscores, such as ``__cl``."""
    if len(text) < _SHORTEST_PIECE or "__" not in text:
        return False
    return any(name.startswith(text) or name.endswith(text) for name in _NAMES)


def _unescaped(text: str) -> str:
    """Return a text with its characters instead of numeric escapes."""

    def character(match: re.Match[str]) -> str:
        *digits, octal, name = match.groups()
        number = next((int(d, 16) for d in digits if d), int(octal, 8) if octal else 0)
        return "_" if name else chr(number) if number < 0x110000 else ""

    return _ESCAPE.sub(character, text)
