"""Records of a pickle: values, and calls that are described instead of made.

NumPy arrays and numbers have their bytes in the pickle itself.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import ELEMENT_TYPES, NUMPY_CODES, nbytes_of
from xckpt.errors import UnsupportedError
from xckpt.formats import kit
from xckpt.index import Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

# A limit of bytes to convert, since a pickle can refer to the same bytes many times.
_MOST_BYTES = 1 << 12
_SHOWN, _SHOWN_ITEMS, _SHOWN_LEVELS = 200, 8, 3
# Modules with other names in earlier or later versions.
_RENAMED = {"torch.tensor": "torch._tensor", "__builtin__": "builtins", "copy_reg": "copyreg"}
_RENAMED |= {"numpy._core.multiarray": "numpy.core.multiarray"}
_RENAMED |= {"numpy._core.numeric": "numpy.core.numeric", "exceptions": "builtins"}


class Global(NamedTuple):
    """The name of an object in a module, which is never imported."""

    module: str
    name: str


class Pairs(list[Any]):
    """A mapping as a list of alternating keys and values, because keys may be unhashable."""

    __slots__ = ()

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Iterate over pairs of keys and values; a list of all pairs would take much memory."""
        entries = iter(self)
        return zip(entries, entries, strict=True)


class PickledSet(list[Any]):
    """A set."""

    __slots__ = ()


class Call:
    """A description of a call: of a function, or of a class for an instance."""

    __slots__ = ("args", "at", "function", "is_built", "pairs", "state", "values")

    def __init__(self, function: Any, args: tuple[Any, ...], at: int) -> None:
        self.function = function
        self.args = args
        self.at = at  # offset in the pickle
        self.is_built = False
        self.state: Any = None  # the argument of ``__setstate__``
        self.pairs: Pairs | None = None  # the contents of a subclass of dict
        self.values: list[Any] | None = None  # the contents of a subclass of list


class Persistent:
    """An object outside of the pickle, by its id."""

    __slots__ = ("id",)

    def __init__(self, id: Any) -> None:  # noqa: A002  the name in pickle
        self.id = id


class Extension(NamedTuple):
    """An entry in a registry of the writing program, or a buffer outside of the pickle."""

    code: int


# --- meanings of records --------------------------------------------------------------------------


def name_of(call: Call) -> str:
    """Return the qualified name of the function of a call; "" if it is not a global name."""
    return _qualified(call.function) if type(call.function) is Global else ""


def renamed(name: Global) -> Global:
    """Return a name with the module that has it in the newest version."""
    return Global(_RENAMED.get(name.module, name.module), name.name)


@lru_cache(maxsize=256)
def _qualified(function: Global) -> str:
    return ".".join(renamed(function))


def items_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return the items of a state: of a mapping, or of several in a tuple."""
    states = value if type(value) is tuple else (value,)
    return chain.from_iterable(state.items() for state in states if type(state) is Pairs)


def dict_of(items: Any) -> dict[str, Any]:
    """Return the items whose keys are text."""
    return {key: value for key, value in items if type(key) is str}


def data_of(value: Any, most: int = _MOST_BYTES) -> bytes | None:
    """Return bytes, in the spelling of any protocol; None if there are more than `most`."""
    if type(value) is Call and name_of(value) == "_codecs.encode":
        text, *codec = value.args or ("",)
        if type(text) is str and len(text) <= most and codec in (["latin1"], ["latin-1"]):
            value = text.encode("latin-1", "replace")
    if type(value) is Call and name_of(value) == "builtins.bytearray":
        value = next(iter(value.args or (b"",)))
    return value if type(value) is bytes and len(value) <= most else None


def sizes_of(value: Any) -> tuple[Any, ...]:
    """Return the sizes in a tuple, list or torch.Size; (None,) for anything else."""
    if type(value) is tuple:
        return value
    if type(value) is Call and name_of(value) == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is tuple else tuple(value) if type(value) is list else (None,)


def is_plain(value: Any) -> bool:
    """Return whether a value can be an attribute."""
    return value is None or type(value) in {bool, int, float, str}


# --- NumPy arrays and numbers ---------------------------------------------------------------------

# Arrays stay in memory as long as the Index.
_LARGEST_ARRAY = 1 << 20


def _numpy_type(value: Any) -> tuple[str, Any] | None:
    """Return the element type and byte order of a numpy dtype; None unless it is numeric."""
    if type(value) is not Call or name_of(value) != "numpy.dtype":
        return None
    code = value.args[0] if value.args else None
    name = NUMPY_CODES.get(code) if type(code) is str else None
    mark = value.state[1] if type(value.state) is tuple and len(value.state) > 1 else "|"
    if name is None or mark not in ("<", ">", "|", "="):
        return None
    return name, "big" if mark == ">" else "little"


def scalar_of(args: tuple[Any, ...]) -> Any:
    """Return the value of a numpy scalar."""
    kind, data = _numpy_type(args[0]), data_of(args[1])
    if kind is None or data is None or len(data) != nbytes_of(kind[0], 1):
        return None
    code = ELEMENT_TYPES[kind[0]].struct_code
    if code is None:
        return None
    return struct.unpack(f"{'>' if kind[1] == 'big' else '<'}{code}", data)[0]


def array_of(call: Call, name: str, most: int) -> Tensor | None:
    """Return the tensor of a numpy array; None unless it is numeric."""
    state = call.state if type(call.state) is tuple and len(call.state) == 5 else None
    if name_of(call) == "numpy.core.numeric._frombuffer" and len(call.args) == 4:
        content, kind, shape, letter = call.args
        state = (1, shape, kind, letter == "F", content)
    if state is None:
        return None
    _, shape, kind, is_fortran, content = state
    numpy_type, size = _numpy_type(kind), sizes_of(shape)
    if numpy_type is None or not {*map(type, size)} <= {int} or len(size) > kit.MOST_AXES:
        return None
    dtype, byteorder = numpy_type
    if any(extent < 0 for extent in size) or kit.is_oversized(size, dtype):
        return None
    nbytes = nbytes_of(dtype, prod(size))
    if nbytes > min(most, _LARGEST_ARRAY):  # limits of all arrays together, and of one
        reason = f"the array has {nbytes} bytes in the pickle itself, which is too large to read"
        hint = "Save it as a tensor, with torch.from_numpy(...)"
        problem = UnsupportedError(reason, rule="Array", hint=hint)
        return Tensor(name, dtype, size, {}, problem=problem)
    data = data_of(content, nbytes)
    if data is None or len(data) != nbytes:
        return None
    order: Any = "F" if is_fortran is True else "C"
    part = Part(dtype, size, 0, nbytes, byteorder=byteorder, inline=data)
    return Tensor(name, dtype, size, {"data": part}, order=order)


# --- texts of records -----------------------------------------------------------------------------


def kind_of(value: Any) -> str:
    """Return the kind of a value, for messages."""
    names = {Pairs: "a mapping", list: "a list", PickledSet: "a set", Call: "the result of a call"}
    return names.get(type(value), f"a {type(value).__name__}")


def spelled(value: Any, level: int = 0) -> str:
    """Return a short text of any value."""
    kind = type(value)
    if kind is Global:
        return ".".join(value)
    if level > _SHOWN_LEVELS:
        return "..."
    if kind is Call:
        return f"<{spelled(value.function, level + 1)}{_listed(value.args, level)}>"[:_SHOWN]
    if kind is Persistent:
        return "<persistent>"
    if kind is Extension:
        return "<extension>"
    if kind is bytes:
        return repr(value[: _SHOWN // 4])
    if kind in {tuple, list, PickledSet, Pairs}:
        return _listed(value, level)[:_SHOWN]
    return repr(value[:_SHOWN] if kind is str else value)[:_SHOWN]


def _listed(values: Any, level: int) -> str:
    if level >= _SHOWN_LEVELS:
        return "(...)"
    texts = [spelled(value, level + 1) for value in values[:_SHOWN_ITEMS]]
    texts += ["..."] if len(values) > _SHOWN_ITEMS else []
    text = ", ".join(texts)
    return f"[{text}]" if type(values) is not tuple else f"({text})"


def key_text(key: Any) -> str:
    """Return a key of a mapping as a printable component of a name."""
    key = key if data_of(key) is None else data_of(key)
    text = key if type(key) is str else str(key) if type(key) is int else spelled(key)
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()
