"""Metadata of GGUF: types of values, their encoding, and code in chat templates.

A chat template is a text in the language of Jinja. Programs that render it without a sandbox run
what it reaches through attributes of Python, such as ``''.__class__``. Templates that format use no
names with two underscores, no frames, and no other files. Names that are put together at run time
are found by their underscores, or by the filter ``attr``.

Specification: src/jinja2/lexer.py and sandbox.py of github.com/pallets/jinja, 3.1.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

from xckpt.formats import kit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# --- types, and writing ---------------------------------------------------------------------------

BOOL, TEXT, LIST = 7, 8, 9
DEEPEST = 16  # levels of lists
NUMBERS = {0: ("uint8", "B"), 1: ("int8", "b"), 2: ("uint16", "H"), 3: ("int16", "h")}
NUMBERS |= {4: ("uint32", "I"), 5: ("int32", "i"), 6: ("float32", "f"), 7: ("bool", "B")}
NUMBERS |= {10: ("uint64", "Q"), 11: ("int64", "q"), 12: ("float64", "d")}
_CODES = {dtype: (kind, code) for kind, (dtype, code) in NUMBERS.items()}


def default_type(values: Sequence[Any], *, in_list: bool) -> str | None:
    """Return the type that numbers are written with by default; None if they are not numbers."""
    kinds = {*map(type, values)}
    types: tuple[str, ...]
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        types = ("int32", "uint32", "int64", "uint64")
        types = types if in_list else ("uint32", "int32", "uint64", "int64")
    elif kinds <= {int, float} and values:
        types = ("float32", "float64")
    else:
        return None if values else "int32"
    return next((dtype for dtype in types if _packed(dtype, values) is not None), None)


def _packed(dtype: str, values: Sequence[Any]) -> bytes | None:
    """Return the bytes of numbers as a type; None if the type does not hold their values."""
    layout = struct.Struct(f"<{len(values)}{_CODES[dtype][1]}")
    try:
        data = layout.pack(*values)
    except (struct.error, OverflowError):
        return None
    if dtype.startswith("float"):
        pairs = zip(layout.unpack(data), values, strict=True)
        if any(a != b and (a == a or b == b) for a, b in pairs):  # noqa: PLR0124  NaN
            return None
    return data


def entry(key: str, value: Any, dtype: str | None) -> bytes:
    """Encode an attribute, with its former type `dtype` if that still holds its value."""
    name = kit.check_text("the attribute", key).encode()
    body = None if kit.is_deeper(value, DEEPEST) else _encoded(value, dtype)
    if body is None:
        body = _encoded(kit.check_text("an attribute", kit.as_text(key, value)), None) or b""
    return struct.pack("<Q", len(name)) + name + body


def _encoded(value: Any, dtype: str | None) -> bytes | None:
    """Return a value with its type; None if GGUF has no such type."""
    if _is_text(value):
        return struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, bool | int | float):
        chosen, data = _as_numbers([value], dtype, in_list=False)
        return None if data is None else struct.pack("<I", _CODES[chosen][0]) + data
    if not isinstance(value, list | tuple):
        return None
    if all(map(_is_text, value)) and (value or dtype == "text"):
        head = struct.pack("<IIQ", LIST, TEXT, len(value))
        return head + b"".join([_text(text) for text in value])
    chosen, data = _as_numbers(value, dtype, in_list=True)
    if data is None:
        return None
    return struct.pack("<IIQ", LIST, _CODES[chosen][0], len(value)) + data


def _as_numbers(
    values: Sequence[Any], dtype: str | None, *, in_list: bool
) -> tuple[str, bytes | None]:
    """Return a type and the bytes of numbers: their former type `dtype` if it still holds them."""
    kinds = {*map(type, values)}
    if not kinds <= {bool, int, float} or (bool in kinds and len(kinds) > 1):
        return "", None
    is_same = (dtype == "bool") == (kinds == {bool}) or not values
    if dtype in _CODES and is_same and (float in kinds) <= dtype.startswith("float"):
        data = _packed(dtype, values)
        if data is not None:
            return dtype, data
    chosen = default_type(values, in_list=in_list)
    return ("", None) if chosen is None else (chosen, _packed(chosen, values))


def _is_text(value: Any) -> bool:
    """Return whether a value is a text, or bytes that a reader would not decode as UTF-8."""
    if not isinstance(value, bytes):
        return isinstance(value, str)
    try:
        value.decode()
    except UnicodeDecodeError:
        return True
    return False


def _text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else kit.check_text("an attribute", value).encode()
    return struct.pack("<Q", len(data)) + data


# --- chat templates -------------------------------------------------------------------------------

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
