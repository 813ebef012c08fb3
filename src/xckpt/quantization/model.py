"""Declarations of quantisation, and the stored tensors of a model with which schemes build weights.

Declarations come from ``config.json`` and other files next to a model, which are untrusted: values
of a wrong type are ignored, and patterns are matched only if that cannot take long.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from xckpt.elements import ELEMENT_TYPES, nbytes_of
from xckpt.errors import shown
from xckpt.index import Codebook, Part, Quantization, Tensor
from xckpt.structure.facts import declarations_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    Shape = tuple[int, ...]

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


# --- models ---------------------------------------------------------------------------------------

T = TypeVar("T")
P = TypeVar("P")  # parameters of a scheme

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
# More than the size of any stored shape, or of any state of bitsandbytes, in bytes.
_MAX_CONTENT = 4096
#: End of the names of tensors of bitsandbytes that have the order of codes.
CODE_ORDER = ".weight_format"
_MAX_AXES = 32
_MAX_NBYTES = (1 << 63) - 1
_MAX_GROUP = 1 << 32
# Time to try alternative parameters for all weights of a model, and for one alternative.
_MAX_MICROSECONDS = 500_000
_MICROSECONDS_PER_TRIAL = 30

#: Models have few schemes and many weights, which share their `Quantization`.
make_quantization = lru_cache(maxsize=4096)(Quantization)


class LayoutError(Exception):
    """Stored tensors are not the quantised weight that their names suggest."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(reason)
        # Short name of the fault; weights with the same fault share a warning.
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that several stored tensors encode."""

    name: str  # in the model without quantisation
    shape: Shape  # logical
    quantization: Quantization | Codebook
    # Stored tensors by role, each with its part, which may have another element type or shape.
    parts: Mapping[str, tuple[Tensor, Part]]
    strict: bool = False  # see `xckpt.index.Tensor`


class Model:
    """The stored tensors of a model, and its declaration."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        declaration: Declaration,
        # Returns the contents of several tensors, empty bytes for those that cannot be read.
        read: Callable[[Sequence[Tensor]], Sequence[bytes]],
        attrs: Mapping[str, Any],  # of the file
    ) -> None:
        self.tensors = tensors
        self.attrs = attrs
        self.config = declaration.config
        self.method = declaration.method
        self.warnings: list[str] = []
        self._microseconds = 0
        self._results: dict[Callable[[Model], Any], Any] = {}
        # All tensors that describe how to decode others are read at once.
        descriptive = [
            tensor
            for name, tensor in tensors.items()
            if name.endswith(("_shape", CODE_ORDER, ".comfy_quant")) or ".quant_state." in name
            if tensor.layout == "dense" and tensor.problem is None
            if 0 < decoded_nbytes(tensor) <= _MAX_CONTENT
        ]
        contents = read(descriptive) if descriptive else ()
        self._contents = {
            tensor.name: content for tensor, content in zip(descriptive, contents, strict=True)
        }

    def once(self, function: Callable[[Model], T]) -> T:
        """Call a function with the model once; later calls return or raise the same result."""
        if function not in self._results:
            try:
                self._results[function] = function(self)
            except LayoutError as error:
                self._results[function] = error.with_traceback(None)
        result: Any = self._results[function]
        if isinstance(result, LayoutError):
            raise result
        return result  # type: ignore[no-any-return]  # of the function's type

    def spend(self, *, trials: int = 0, patterns: int = 0) -> None:
        """Count parameters and patterns that are tried; raise if a config declares too many."""
        self._microseconds += _MICROSECONDS_PER_TRIAL * trials + patterns
        if self._microseconds > _MAX_MICROSECONDS:
            raise LayoutError("effort", "the config has too many alternative parameters to try")

    def fit(self, candidates: Sequence[P], match: Callable[[P], Weight]) -> list[tuple[P, Weight]]:
        """Return the parameters that fit with their weights, the first for each; raise if none."""
        self.spend(trials=len(candidates) - 1)
        fitting: list[tuple[P, Weight]] = []
        errors: list[LayoutError] = []
        for params in candidates:
            try:
                weight = match(params)
            except LayoutError as error:
                errors.append(error)
                continue
            if all(weight != previous for _, previous in fitting):
                fitting.append((params, weight))
        if not fitting:
            raise errors[0]
        return fitting

    def find(self, name: str) -> Tensor | None:
        """Return a stored tensor, or None if it is missing; raise if it is not a plain array."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        _check_plain(tensor)
        return tensor

    def require(self, name: str, dtypes: AbstractSet[str]) -> Tensor:
        """Return a stored tensor; raise if it is missing or has another element type."""
        tensor = self.find(name)
        if tensor is None:
            raise LayoutError(f"no {short_name(name)}", f"{short_name(name)} is missing")
        if tensor.dtype not in dtypes:
            expected = " or ".join(sorted(dtypes))
            reason = f"{short_name(name)} has type {tensor.dtype}, not {expected}"
            raise LayoutError("type", reason)
        return tensor

    def require_scalar(self, name: str) -> tuple[Tensor, Part]:
        """Return a stored tensor of one number, with its part."""
        tensor = self.require(name, FLOATS)
        if tensor.size != 1:
            raise LayoutError("global", f"{short_name(name)} has {tensor.size} elements, not one")
        return view_as(tensor)

    def find_zeros(self, name: str, *dtypes: str, symmetric: bool | None) -> Tensor | None:
        """Return zero points; raise if their presence contradicts the declaration."""
        zeros = self.find(name)
        if symmetric is True and zeros is not None:
            raise LayoutError("zero points", f"symmetric weights cannot have {short_name(name)}")
        if symmetric is False and zeros is None:
            raise LayoutError("zero points", f"{short_name(name)} is missing")
        return None if zeros is None else self.require(name, {*dtypes})

    def content(self, tensor: Tensor) -> bytes:
        """Return the bytes of a tensor that describes others, empty if they cannot be read."""
        return self._contents.get(tensor.name, b"")

    def read_shape(self, tensor: Tensor) -> Shape:
        """Return the shape that a tensor's values state."""
        content = self.content(tensor)
        if tensor.dtype not in {"int64", "int32"} or not content:
            raise LayoutError("shape", f"{short_name(tensor.name)} is not a list of integers")
        width = ELEMENT_TYPES[tensor.dtype].bits // 8
        return check_shape(
            [
                int.from_bytes(content[start : start + width], "little", signed=True)
                for start in range(0, len(content), width)
            ]
        )

    def read_json(self, tensor: Tensor) -> dict[str, Any]:
        """Return the JSON object in a tensor's bytes."""
        try:
            value = json.loads(self.content(tensor))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise LayoutError("state", f"{short_name(tensor.name)} is not a JSON object")
        return value


def short_name(name: str) -> str:
    """Return the last word of a tensor's name, for messages."""
    # The word before ".quant_state.bitsandbytes__nf4" is part of it.
    start = name.rfind(".", 0, name.find(".quant_state.")) + 1
    return shown(name[start:])[1:-1]


def decoded_nbytes(tensor: Tensor) -> int:
    """Return the size of a stored tensor in bytes after decompression."""
    return nbytes_of(tensor.dtype, tensor.size)


def ceil_div(a: int, b: int) -> int:
    """Divide, and round up."""
    return -(-a // b)


def _check_plain(tensor: Tensor) -> None:
    """Raise unless the data of a tensor are one range of elements in C order."""
    is_plain = tensor.layout == "dense" and tensor.order == "C" and tensor.problem is None
    if not is_plain or tensor.parts["data"].byteorder != "little":
        reason = f"{short_name(tensor.name)} is not stored as one range in C order"
        raise LayoutError("companion", reason)


def view_as(
    tensor: Tensor, dtype: str | None = None, shape: Shape | None = None
) -> tuple[Tensor, Part]:
    """Return a stored tensor and its part, which gets another element type or shape."""
    _check_plain(tensor)
    part = tensor.parts["data"]
    if (dtype or part.dtype, shape or part.shape) != (part.dtype, part.shape):
        part = replace(part, dtype=dtype or part.dtype, shape=shape or part.shape)
    return tensor, part


def whole_block(shape: Shape, leading: int = 0) -> Shape:
    """Return a block of the whole tensor, or of length 1 along its leading axes."""
    return tuple(1 if axis < leading else max(size, 1) for axis, size in enumerate(shape))


# --- checks of untrusted values ------------------------------------------------------------------


def check_shape(sizes: Any) -> Shape:
    """Return a shape from a file; raise if no array can have it."""
    if not isinstance(sizes, list) or len(sizes) > _MAX_AXES:
        raise LayoutError("shape", "its shape is not a list of sizes")
    if not all(type(size) is int and 0 <= size <= _MAX_NBYTES for size in sizes):
        raise LayoutError("shape", f"{sizes!r:.80} is not a shape")
    if prod(max(size, 1) for size in sizes) * 4 > _MAX_NBYTES:
        raise LayoutError("shape", f"the shape {sizes} is too large for an array")
    return tuple(sizes)


def check_grid(shape: Shape, block: Shape, tensor: Tensor) -> None:
    """Raise unless a stored tensor has one number for each block of a weight."""
    grid = tuple(ceil_div(size, extent) for size, extent in zip(shape, block, strict=True))
    stored = tensor.shape
    if stored == grid or (tensor.size == 1 and prod(grid) == 1 and len(stored) <= 1):
        return
    # Axes of size one at the end can be left out.
    if stored and stored == grid[: len(stored)] and prod(grid[len(stored) :]) == 1:
        return
    raise LayoutError(
        "grid",
        f"{short_name(tensor.name)} has shape {list(stored)}, but {list(shape)} in blocks of "
        f"{list(block)} needs {list(grid)}",
    )


def check_bits(value: Any, supported: Sequence[int] = range(1, 9)) -> int:
    """Return the number of bits of a code; raise if it is unsupported."""
    if type(value) is not int or value not in supported:
        raise LayoutError("bits", f"codes of {value!r:.40} bits are unsupported")
    return value


def is_size(value: Any) -> TypeGuard[int]:
    """Return whether a value is the extent of a group or block."""
    return type(value) is int and 0 < value <= _MAX_GROUP


def check_group(value: Any) -> int | None:
    """Return the size of a group, None for a whole axis; raise if it is not a size."""
    if value is None or value == -1:
        return None
    if not is_size(value):
        raise LayoutError("group size", f"the group size {value!r:.40} is unsupported")
    return value
