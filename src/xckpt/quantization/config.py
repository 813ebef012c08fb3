"""Declarations of quantisation, from ``config.json`` and other files next to a model.

These files are untrusted. Values of a wrong type are ignored, and patterns are matched only if that
cannot take long.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown
from xckpt.structure.facts import declarations_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_MAX_DEPTH = 64
# Other files, with their default method and the key of the declaration.
_FILES = {
    "hf_quant_config": ("modelopt", "quantization"),
    "quantize_config": ("gptq", None),
    "quant_config": ("awq", None),
}
_METHODS = {"awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq"}
_METHODS |= {"metal", "mlx", "modelopt", "mxfp4", "mxfp8"}


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a model's quantisation."""

    method: str | None = None  # such as "gptq"; None without a supported declaration
    config: Mapping[str, Any] = field(default_factory=dict)  # parameters of the method
    problem: str | None = None  # reason why weights cannot be decoded
    warnings: tuple[str, ...] = ()  # files that are ignored, with the reasons
    # Contents of the files that are not ignored, by name without suffix.
    files: Mapping[str, Any] = field(default_factory=dict)


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object, and raise a ValueError if it is anything else."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object")  # noqa: TRY004
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return value
    raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")


def find_declaration(load: Callable[[str], dict[str, Any] | None]) -> Declaration:
    """Return the declaration of a model's quantisation."""
    # `load` takes the name of a file without ".json", and returns its content, or None if the file
    # does not exist, or raises a ValueError.
    warnings: list[str] = []
    files: dict[str, Any] = {}
    for name in ("config", *_FILES):
        try:
            content = load(name)
        except ValueError as error:
            warnings.append(f"{name}.json is ignored: {error}")
            continue
        if content is None:
            continue
        if name == "config":
            declaration = _declaration_in_config(content, warnings)
        else:
            method, key = _FILES[name]
            value = content.get(key) if key else content
            declaration = _declaration_of(value, method) if isinstance(value, dict) else None
        if declaration is not None or name == "config":
            files[name] = content
        if declaration is not None:
            return replace(declaration, warnings=tuple(warnings), files=files)
    return Declaration(warnings=tuple(warnings), files=files)


def _declaration_in_config(config: dict[str, Any], warnings: list[str]) -> Declaration | None:
    """Return the declaration in a ``config.json``, and add to its warnings."""
    for place, value in declarations_in(config):
        if isinstance(value, dict):
            mlx = config.get("quantization")
            if "quant_method" not in value and isinstance(mlx, dict):
                return Declaration("mlx", mlx)
            default = "compressed-tensors" if place[0] == "compression_config" else None
            return _declaration_of(value, default)
        if len(place) == 1:
            text = f"config.json is ignored: {place[0]!r} is {value!r:.40}, not an object"
            warnings.append(text)
    return None


def _declaration_of(config: dict[str, Any], default_method: str | None) -> Declaration:
    method: Any = config.get("quant_method", default_method)
    if method is None and any(config.get(key) is True for key in ("load_in_4bit", "load_in_8bit")):
        method = "bitsandbytes"
    if method is None or (isinstance(method, str) and method in _METHODS):
        return Declaration(method, config)
    if isinstance(method, str):
        problem = f"quantisation method {shown(method)} is unsupported"
    else:
        problem = f"'quant_method' is {method!r:.40}, not a string"
    return Declaration(None, config, problem)


# --- patterns ------------------------------------------------------------------------------------

_MAX_PATTERN = 1000
# One character, or a class of characters.
_ATOM = r"(?:\\[dw.\-/_]|\[[\w.\-]+\]|[\w\-/: ]|\.)"
# An atom that may be repeated, a group of alternatives that may not, or an anchor.
_TOKEN = re.compile(
    rf"(?P<atom>{_ATOM})(?:(?P<repeat>[*+?])\??)?"
    rf"|\((?:\?:)?(?P<group>(?:{_ATOM}|[|^$])*)\)(?![*+?{{])"
    r"|[\^$]"
)


def is_match(pattern: str, name: str) -> bool | None:
    """Return whether a pattern matches the start of a name; None if it could take long."""
    compiled = _compile(pattern)
    return None if compiled is None else compiled.match(name) is not None


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str] | None:
    if len(pattern) > _MAX_PATTERN:
        return None
    try:
        return re.compile("".join(_atomic(pattern)))
    except (ValueError, re.error):
        return None


def _atomic(pattern: str) -> Iterator[str]:
    """Rewrite a pattern so that it matches in a short time, or raise a ValueError."""
    # Each ".*" becomes an atomic group with the tokens that follow it. The group ends at the first
    # place where these match, and never backtracks. Between two of them, one atom can be repeated.
    tokens = list(_TOKEN.finditer(pattern))
    if sum(len(token[0]) for token in tokens) != len(pattern):
        raise ValueError(pattern)
    in_atomic, repetitions = False, 0
    for token in tokens:
        atom, repeat, group = token["atom"], token["repeat"] or "", token["group"]
        if atom is None:
            yield token[0] if group is None else f"(?:{group})"
        elif atom == "." and repeat in {"*", "+"}:
            yield f"{')' if in_atomic else ''}(?>.{repeat}?"
            in_atomic, repetitions = True, 0
        else:
            repetitions += bool(repeat)
            if repetitions > 1:
                raise ValueError(pattern)
            yield atom + repeat
    if in_atomic:
        yield ")"
