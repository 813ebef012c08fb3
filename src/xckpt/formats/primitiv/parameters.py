"""From tensors of any names to parameters, each with its key and its statistics."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from xckpt.errors import UnsupportedError, shown
from xckpt.formats.primitiv.names import key_and_stat, key_and_stat_at, variable_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xckpt.index import Tensor

__all__ = ["Parameter", "parameters_of"]

_K = TypeVar("_K")
_Key = tuple[str, ...]


class Parameter(NamedTuple):
    """A parameter that is written.

    Parameters
    ----------
    key : tuple of str
        Elements of its key.
    value : Tensor
        Its value.
    stats : dict of str to Tensor
        Statistics by name, in the order of the tensors.
    """

    key: _Key
    value: Tensor
    stats: dict[str, Tensor]


def parameters_of(tensors: Iterable[Tensor]) -> list[Parameter]:
    """Find the parameters among tensors, and their statistics."""
    values: dict[_Key, Tensor] = {}
    stats: list[tuple[_Key, str, Tensor]] = []
    for tensor in tensors:
        key, stat = _key_and_stat(tensor)
        if stat is None:
            _add(values, tuple(key), tensor)
        else:
            stats.append((tuple(key), stat, tensor))
    owned: dict[_Key, dict[str, Tensor]] = {}
    for owner, stat, tensor in stats:
        if owner in values:
            _add(owned.setdefault(owner, {}), stat, tensor)
        elif "stat" in tensor.attrs:
            raise UnsupportedError(
                f"a statistic of {shown(variable_name(owner))}, which is not written",
                tensor=tensor.name,
                rule="Statistic",
                hint="Write the parameter too, or leave the statistic out",
            )
        else:
            # A colon in a name of another format.
            _add(values, tuple(_split(tensor)), tensor)
    found = [Parameter(key, value, owned.get(key, {})) for key, value in values.items()]
    found.sort(key=_encoded)
    _check_modules(found)
    return found


def _key_and_stat(tensor: Tensor) -> tuple[list[str], str | None]:
    named = key_and_stat(tensor.name)
    if tensor.path:
        placed = key_and_stat_at(tensor.path)
        # Where both should agree and do not, the variable was renamed.
        if "key" not in tensor.attrs or variable_name(*placed) == tensor.name:
            return placed
    return named or (_split(tensor), None)


def _split(tensor: Tensor) -> list[str]:
    return list(tensor.path or tensor.name.split("."))


def _add(tensors: dict[_K, Tensor], key: _K, tensor: Tensor) -> None:
    other = tensors.setdefault(key, tensor)
    if other is not tensor:
        reason = f"its key is that of {shown(other.name)} too"
        hint = "Rename one of them"
        raise UnsupportedError(reason, tensor=tensor.name, rule="DuplicateName", hint=hint)


def _encoded(parameter: Parameter) -> list[bytes]:
    try:
        return [element.encode("utf-8", "surrogateescape") for element in parameter.key]
    except UnicodeEncodeError:
        name = parameter.value.name
        reason = "half of a surrogate pair in the name is no text"
        raise UnsupportedError(reason, tensor=name, rule="Key", hint="Rename it") from None


def _check_modules(parameters: Sequence[Parameter]) -> None:
    # What begins with a key comes right after it in order.
    for parameter, following in pairwise(parameters):
        if following.key[: len(parameter.key)] == parameter.key:
            raise UnsupportedError(
                f"it is a parameter, and also a module that has {shown(following.value.name)}: no "
                "model of primitiv can have both",
                tensor=parameter.value.name,
                rule="Key",
                hint="Rename one of them",
            )
