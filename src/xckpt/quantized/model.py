"""The stored tensors of a model, and how some of them become one weight."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from xckpt.elements import ELEMENT_TYPES, nbytes_of
from xckpt.errors import shown
from xckpt.index import Quantization

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from xckpt.index import Codebook, Part, Tensor
    from xckpt.quantized.config import Declared

    Shape = tuple[int, ...]

T = TypeVar("T")

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
# More than any of these has: the shape of a weight, a state of bitsandbytes.
_LARGEST_SMALL = 4096
_MOST_AXES = 32
_MOST_EFFORT = 500_000
_LARGEST_NBYTES = (1 << 63) - 1
_LARGEST_GROUP = 1 << 32

#: Models have few schemes and many weights.
quantization = lru_cache(maxsize=4096)(Quantization)


class Unfit(Exception):  # noqa: N818  it never leaves this room
    """Tensors are not the weight that their names say: what is wrong, in words with figures.

    `rule` is the same for modules of which the same is wrong.
    """

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight: `parts` has by role the stored tensor, and its part as the scheme takes it."""

    name: str
    shape: Shape
    quantization: Quantization | Codebook
    parts: Mapping[str, tuple[Tensor, Part]]
    strict: bool = False


class Model:
    """What there is of a model: stored tensors by name, what is declared, and small contents.

    `read` returns the bytes of some tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        declared: Declared,
        read: Callable[[Sequence[Tensor]], Sequence[bytes]],
    ) -> None:
        self.tensors = tensors
        self.config = declared.config
        self.method = declared.method
        self.warnings: list[str] = []
        self._effort = 0
        self._once: dict[Callable[[Model], Any], Any] = {}
        # Those whose values say how others are to be read.
        small = [
            tensor
            for name, tensor in tensors.items()
            if name.endswith(("_shape", ".weight_format")) or ".quant_state." in name
            if tensor.layout == "dense" and tensor.problem is None
            if 0 < nbytes(tensor) <= _LARGEST_SMALL
        ]
        contents = read(small) if small else ()
        self._contents = {tensor.name: data for tensor, data in zip(small, contents, strict=True)}

    def once(self, function: Callable[[Model], T]) -> T:
        """Return what a function says of the model, which is asked but once."""
        if function not in self._once:
            try:
                self._once[function] = function(self)
            except Unfit as error:
                self._once[function] = error.with_traceback(None)
        found: Any = self._once[function]
        if isinstance(found, Unfit):
            raise found
        return found  # type: ignore[no-any-return]  # kept by the function that made it

    def spend(self, microseconds: int) -> None:
        """Refuse to try more than a model needs: configs can have any number of alternatives."""
        self._effort += microseconds
        if self._effort > _MOST_EFFORT:
            raise Unfit("effort", "more parameters and patterns are declared than are tried")

    def find(self, name: str) -> Tensor | None:
        """Return a stored tensor, if it is a plain array that can be read."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        is_plain = tensor.layout == "dense" and tensor.order == "C" and tensor.problem is None
        if not is_plain or tensor.parts["data"].byteorder != "little":
            raise Unfit("companion", f"{leaf(name)} cannot be read")
        return tensor

    def need(self, name: str, dtypes: AbstractSet[str]) -> Tensor:
        """Return a stored tensor of one of these types."""
        tensor = self.find(name)
        if tensor is None:
            raise Unfit(f"no {leaf(name)}", f"there is no {leaf(name)}")
        if tensor.dtype not in dtypes:
            known = " or ".join(sorted(dtypes))
            raise Unfit("type", f"{leaf(name)} is {tensor.dtype}, not {known}")
        return tensor

    def integers(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape that a stored tensor has as its values."""
        data = self._contents.get(tensor.name, b"")
        if tensor.dtype not in {"int64", "int32"} or not data:
            raise Unfit("shape", f"{leaf(tensor.name)} is not a list of integers")
        step = ELEMENT_TYPES[tensor.dtype].bits // 8
        values = [data[at : at + step] for at in range(0, len(data), step)]
        return check_shape([int.from_bytes(each, "little", signed=True) for each in values])

    def content(self, tensor: Tensor) -> bytes:
        """Return the bytes of a small tensor."""
        return self._contents.get(tensor.name, b"")

    def state(self, tensor: Tensor) -> dict[str, Any]:
        """Return the JSON object that a stored tensor holds."""
        try:
            value = json.loads(self.content(tensor))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Unfit("state", f"{leaf(tensor.name)} is not a JSON object")
        return value


def leaf(name: str) -> str:
    """Return the last name of a tensor, to say which companion is meant."""
    return shown(name[name.rfind(".", 0, name.find(".quant_state.")) + 1 :])[1:-1]


def nbytes(tensor: Tensor) -> int:
    """Return how many bytes a stored tensor has when it is not compressed."""
    return nbytes_of(tensor.dtype, tensor.size)


def cdiv(a: int, b: int) -> int:
    """Divide, and round up."""
    return -(-a // b)


def check_shape(sizes: Any) -> Shape:
    """Check a shape that values in a file give."""
    if not isinstance(sizes, list) or len(sizes) > _MOST_AXES:
        raise Unfit("shape", "its shape is not a list of sizes")
    if not all(type(size) is int and 0 <= size <= _LARGEST_NBYTES for size in sizes):
        raise Unfit("shape", f"its shape is {str(sizes)[:80]}")
    count = 4
    for size in sizes:
        count *= max(size, 1)
    if count > _LARGEST_NBYTES:
        raise Unfit("shape", f"its shape is {sizes}, which no array can have")
    return tuple(sizes)


def whole_block(shape: Shape, leading: int = 0) -> Shape:
    """Return the block that has all of a tensor, or of each part along some leading axes."""
    return tuple([1 if axis < leading else max(size, 1) for axis, size in enumerate(shape)])


def stored_as(
    tensor: Tensor, dtype: str | None = None, shape: Shape | None = None
) -> tuple[Tensor, Part]:
    """Return a stored tensor with its part, taken as another type or shape."""
    part = tensor.parts["data"]
    if (dtype or part.dtype, shape or part.shape) != (part.dtype, part.shape):
        part = replace(part, dtype=dtype or part.dtype, shape=shape or part.shape)
    return tensor, part


def check_grid(shape: Shape, block: Shape, tensor: Tensor) -> None:
    """Check that a stored tensor has one number for each block."""
    grid = tuple([cdiv(size, each) for size, each in zip(shape, block, strict=True)])
    has = tensor.shape
    if has == grid or (tensor.size == 1 and all(n == 1 for n in grid) and len(has) <= 1):
        return
    # What ends in ones may leave them out.
    if has and has == grid[: len(has)] and all(n == 1 for n in grid[len(has) :]):
        return
    raise Unfit(
        "grid",
        f"{leaf(tensor.name)} is {list(has)}, but {list(shape)} in blocks of {list(block)} needs "
        f"{list(grid)}",
    )


def bits_of(value: Any, known: Sequence[int] = range(1, 9)) -> int:
    """Check how many bits a code has."""
    if type(value) is not int or value not in known:
        raise Unfit("bits", f"codes of {str(value)[:40]!r} bits are not read")
    return value


def is_size(value: Any) -> TypeGuard[int]:
    """Return whether a value is the extent of a group or block."""
    return type(value) is int and 0 < value <= _LARGEST_GROUP


def group_of(value: Any) -> int | None:
    """Check the size of a group; None stands for all of an axis."""
    if value is None or value == -1 or is_size(value):
        return None if value == -1 else value
    raise Unfit("group size", f"the group size is {str(value)[:40]!r}")


def single(model: Model, name: str) -> tuple[Tensor, Part]:
    """Return a stored tensor that has one number."""
    tensor = model.need(name, FLOATS)
    if tensor.size != 1:
        raise Unfit("global", f"{leaf(name)} has {tensor.size} entries, not one")
    return stored_as(tensor)


def zero_points(model: Model, name: str, *dtypes: str, symmetric: bool | None) -> Tensor | None:
    """Return zero points, which have to be there if it is not symmetric, and only then."""
    zeros = model.find(name)
    if symmetric is not None and symmetric != (zeros is None):
        has = "there is no" if zeros is None else "it is symmetric, and there is"
        raise Unfit("zero points", f"{has} {leaf(name)}")
    return None if zeros is None else model.need(name, {*dtypes})
