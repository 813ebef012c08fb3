"""Names and attributes that netCDF and zarr hold, for those that they do not.

What they hold as it is, stays. All else is replaced by something that says what it was, in
attributes of its own; so nothing that JSON has is lost.
"""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from xckpt.writing.fitting import Notes

__all__ = ["NUMBERS", "fitting", "held_attrs", "held_name", "is_text"]

_INTEGERS = tuple([f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)])
#: Names of the types of numbers that both hold.
NUMBERS = ("float64", "float32", *_INTEGERS)

# What we say of attributes: their names by their new ones, and which are JSON now.
_ATTRS, _JSON = "xckpt_attrs", "xckpt_json"

# Of a netCDF name the C library refuses control characters, slashes, spaces at the end, and most
# of ASCII at the beginning, and normalises the rest; it has a prefix of its own. zarr takes a
# backslash for a slash.
_NOT_IN_A_NAME = re.compile(r"[\x00-\x1f\x7f/\\\ud800-\udfff]| (?= *\Z)|_(?=nc4_non_coord_)")
_NOT_IN_A_TEXT = re.compile(r"[\0\ud800-\udfff]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_BEGINS_WELL = re.compile(r"[A-Za-z0-9_]|[^\x00-\x7f]")
# In bytes; most file systems and netCDF stop at 255.
_LONGEST_NAME = 240
# These mean something to xarray, or to the libraries that it writes with.
_TAKEN_ATTR = re.compile(
    "_.*|CLASS|NAME|REFERENCE_LIST|DIMENSION_LIST|DIMENSION_LABELS|missing_value|scale_factor"
    "|add_offset|dtype|coordinates"
)
_UNIT_OF_TIME = re.compile(r"(?s).*\bsince\b.*|((nano|micro|milli)?second|minute|hour|day|week)s?")


# --- names ---------------------------------------------------------------------------------------


def fitting(wanted: Mapping[Any, str], taken: Collection[str]) -> dict[Any, str]:
    """Return every name that must change one that no other has."""
    used = {*taken, *(name for name, new in wanted.items() if new == name)}
    counts: dict[str, int] = {}
    found: dict[Any, str] = {}
    for name, new in wanted.items():
        found[name] = new
        while new != name and found[name] in used:
            counts[new] = counts.get(new, 1) + 1
            found[name] = f"{new}_{counts[new]}"
        used.add(found[name])
    return found


def held_name(name: Any, *, no_spaces: bool = False) -> str:
    """Return the name itself where netCDF and zarr hold it, else one with ``%2F`` and the like."""
    text = _NOT_IN_A_NAME.sub(_percent, str(name))
    if no_spaces:
        text = text.replace(" ", "%20")
    if unicodedata.normalize("NFC", text) != text:
        text = _NOT_ASCII.sub(_percent, text)
    if _BEGINS_WELL.match(text) is None or text == "zarr.json":
        text = f"_{text}"
    encoded = text.encode()
    if len(encoded) > _LONGEST_NAME:
        digest = blake2b(encoded, digest_size=8).hexdigest()
        text = f"{encoded[: _LONGEST_NAME - 17].decode(errors='ignore')}_{digest}"
    return text


def _percent(match: re.Match[str]) -> str:
    return "".join([f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass")])


# --- attributes ----------------------------------------------------------------------------------


def held_attrs(attrs: Mapping[Any, Any], said: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Return attributes that are held; `said` is what else was replaced, in our own words."""
    words = set(said)
    if not all(map(_is_held, (*attrs.values(), *said.values()))):
        words.add(_JSON)
    if any(_attr_name(name, value, words) != name for name, value in attrs.items()):
        words |= {_ATTRS, _JSON}
    wanted = {name: _attr_name(name, value, words) for name, value in attrs.items()}
    names = fitting(wanted, words)
    found = {new: attrs[name] for name, new in names.items()} | dict(said)
    renamed = {new: name for name, new in names.items() if new != name}
    if renamed:
        found[_ATTRS] = renamed
    for name in renamed.values():
        notes.add("attributes have other names", str(name))
    as_json = []
    for name, value in list(found.items()):
        if _is_held(value):
            continue
        what, text = _as_json(value)
        if name not in words:
            notes.add(what, str(renamed.get(name, name)))
        if text is None:
            del found[name]
        else:
            found[name] = text
            as_json.append(name)
    if as_json:
        found[_JSON] = _as_json(as_json)[1]
    return found


def _attr_name(name: Any, value: Any, words: Collection[str]) -> str:
    text = held_name(name)
    is_time = text == "units" and isinstance(value, str) and _UNIT_OF_TIME.fullmatch(value)
    if text in words or _TAKEN_ATTR.fullmatch(text) or is_time:
        return f"attr_{text}"
    return text


def _is_held(value: Any) -> bool:
    """Return whether netCDF and zarr give a value back: text, a number, or several of one type."""
    if isinstance(value, str):
        return is_text(value)
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.size > 1 and value.dtype.name in NUMBERS
    if isinstance(value, np.generic):
        return value.dtype.name in NUMBERS
    if isinstance(value, list | tuple):
        # One number alone comes back without its list.
        return len(value) > 1 and len({*map(type, value)}) == 1 and all(map(_is_number, value))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is float


def is_text(value: str) -> bool:
    """Return whether netCDF and zarr hold a text."""
    return _NOT_IN_A_TEXT.search(value) is None


def _as_json(value: Any) -> tuple[str, str | None]:
    """Say what becomes of a value, and give its text; None where it has none."""
    lost: list[Any] = []
    try:
        simple = _simple(value, lost)
        text = json.dumps(simple, ensure_ascii=False)
    except RecursionError:
        return "attributes that are nested too deeply were left out", None
    if not is_text(text):
        text = json.dumps(simple)
    if lost:
        return "attributes became JSON text, which does not have all of their values", text
    return "attributes became JSON text", text


def _simple(value: Any, lost: list[Any]) -> Any:
    """Return what JSON has for a value; `lost` collects what it has nothing for."""
    if isinstance(value, dict):
        lost += [key for key in value if not isinstance(key, str)]
        return {str(key): _simple(inner, lost) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_simple(inner, lost) for inner in value]
    if isinstance(value, np.ndarray | np.generic):
        return _simple(value.tolist(), lost)
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if value is None or isinstance(value, str | int | float):
        return value
    lost.append(value)
    return str(value)
