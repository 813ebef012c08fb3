"""What a model says of its quantisation: ``config.json``, and files next to it.

Everything here is a stranger's: nothing is executed, no pattern can take long, and what has a wrong
type is as if it were not there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DEEPEST = 64
# Where a method is declared in `config.json`, best first; `compression_config` may be either the
# declaration or around it.
_PLACES = (
    ("quantization_config",),
    ("text_config", "quantization_config"),
    ("compression_config", "quantization_config"),
    ("compression_config",),
    ("quantization",),
)
# What each of the other files declares, where it does not say so.
_FILES = {
    "hf_quant_config": ("modelopt", "quantization"),
    "quantize_config": ("gptq", None),
    "quant_config": ("awq", None),
}
_READ = {"awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq"}
_READ |= {"metal", "mlx", "modelopt", "mxfp4", "mxfp8"}


@dataclass(frozen=True, slots=True)
class Declared:
    """What is declared of the quantisation of a model."""

    method: str | None = None  # None where nothing says which
    config: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None  # why all tensors stay as they are stored
    warnings: tuple[str, ...] = ()  # what is wrong with the files
    #: The files that were looked at, by their names without a suffix.
    attrs: Mapping[str, Any] = field(default_factory=dict)


def parse_json(data: bytes) -> dict[str, Any]:
    """Read a JSON object; whatever is wrong with it is a `ValueError`."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object")  # noqa: TRY004
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {_DEEPEST} levels")


def declaration(look: Callable[[str], dict[str, Any] | None]) -> Declared:
    """Find out how a model is quantised.

    `look` returns what a file next to the model has, by its name without ``.json``, or None where
    there is none; a `ValueError` says what is wrong with it.
    """
    warnings: list[str] = []
    attrs: dict[str, Any] = {}
    for name in ("config", *_FILES):
        try:
            content = look(name)
        except ValueError as error:
            warnings.append(f"{name}.json is not used: {error}")
            continue
        if content is None:
            continue
        if name == "config":
            found = _declared(content, warnings)
        else:
            method, key = _FILES[name]
            value = content.get(key) if key else content
            found = _method_of(value, method) if isinstance(value, dict) else None
        if found is not None or name == "config":
            attrs[name] = content
        if found is not None:
            return replace(found, warnings=tuple(warnings), attrs=attrs)
    return Declared(warnings=tuple(warnings), attrs=attrs)


def _declared(config: dict[str, Any], warnings: list[str]) -> Declared | None:
    for place in _PLACES:
        value: Any = config
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, dict):
            mlx = config.get("quantization")
            if "quant_method" not in value and isinstance(mlx, dict):
                return Declared("mlx", mlx)
            default = "compressed-tensors" if place[0] == "compression_config" else None
            return _method_of(value, default)
        if value is not None and len(place) == 1:
            kind = type(value).__name__
            warnings.append(f"config.json is not used: {place[0]!r} is a {kind}, not an object")
    return None


def _method_of(config: dict[str, Any], default: str | None) -> Declared:
    method: Any = config.get("quant_method", default)
    if method is None and any(config.get(key) is True for key in ("load_in_4bit", "load_in_8bit")):
        method = "bitsandbytes"
    if method is None or (isinstance(method, str) and method in _READ):
        return Declared(method, config)
    if isinstance(method, str):
        return Declared(None, config, f"the method {shown(method)} is not read")
    kind = type(method).__name__
    return Declared(None, config, f"'quant_method' is a {kind}, not text")


# --- patterns ------------------------------------------------------------------------------------

_LONGEST_PATTERN = 1000
_ATOM = re.compile(r"\\[dw.\-/_]|\[[\w.\-]+\]|[\w\-/: ]|\.")


def is_match(pattern: str, name: str) -> bool | None:
    """Return whether a pattern matches a name from its beginning; None if it might take long."""
    compiled = _compiled(pattern)
    return None if compiled is None else compiled.match(name) is not None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """Compile what cannot take long: no repeated groups, and what follows a star is sought once."""
    if len(pattern) > _LONGEST_PATTERN:
        return None
    try:
        return re.compile("".join(_safe(pattern)))
    except (ValueError, re.error):
        return None


def _safe(pattern: str) -> Iterator[str]:
    """Rewrite a pattern so that its first match is found, or shown to be none, in a short time."""
    at, is_atomic, in_group, repeats = 0, False, False, 0
    while at < len(pattern):
        atom = _ATOM.match(pattern, at)
        if atom is not None:
            at = atom.end()
            repeat = pattern[at : at + 1] if pattern[at : at + 1] in "*+?" else ""
            at += len(repeat)
            at += pattern[at : at + 1] == "?" and bool(repeat)  # lazy ones match the same names
            if repeat and in_group:
                raise ValueError(pattern)
            if atom[0] == "." and repeat in {"*", "+"}:
                # The first place where what follows matches is as good as any other.
                yield f"{')' if is_atomic else ''}(?>.{repeat}?"
                is_atomic, repeats = True, 0
                continue
            repeats += bool(repeat)
            if repeats > 1:
                raise ValueError(pattern)
            yield atom[0] + repeat
        elif pattern[at] == "(" and not in_group:
            in_group = True
            at += 3 if pattern.startswith("(?:", at) else 1
            yield "(?:"
        elif pattern[at] == ")" and in_group and pattern[at + 1 : at + 2] not in {*"*+?{"}:
            in_group, at = False, at + 1
            yield ")"
        elif (pattern[at] == "|" and in_group) or pattern[at] in "^$":
            yield pattern[at]
            at += 1
        else:
            raise ValueError(pattern)
    if in_group:
        raise ValueError(pattern)
    yield ")" if is_atomic else ""
