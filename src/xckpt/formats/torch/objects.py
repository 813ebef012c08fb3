"""What a checkpoint holds by name: tensors, and plain values as attributes.

The name of a tensor is the path to it, joined by dots; the levels ``_parameters``, ``_buffers`` and
``_modules`` of modules are left out, so that a module has the names of its ``state_dict``. Whatever
has no meaning here is opaque: a short text among the attributes, and tensors that its state holds
are listed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, UnsupportedError, shown
from xckpt.formats.torch.records import (
    Call,
    Pairs,
    Persistent,
    PickledSet,
    dict_of,
    is_plain,
    items_of,
    key_text,
    name_of,
    scalar_of,
    spelled,
)
from xckpt.formats.torch.tensors import storage_of, wrapped

if TYPE_CHECKING:
    from xckpt.formats import kit
    from xckpt.formats.torch.tensors import Tensors
    from xckpt.index import Tensor

# Paths are walked as often as they are there, but a few bytes can make 2**200 of them.
_VISITS, _VISITS_PER_BYTE = 10_000, 2
_DEEPEST = 1000
_LONGEST_NAME, _LONGEST_NAMES = 1 << 14, 1 << 26
_MOST_ATTRS, _LARGEST_ATTRS = 1000, 1 << 16
_MAPPINGS = {"collections.OrderedDict", "collections.defaultdict", "collections.Counter"}
_MAPPINGS |= {"builtins.dict"}
_SEQUENCES = {"collections.deque", "builtins.list", "builtins.tuple"}
_SEQUENCES |= {"builtins.set", "builtins.frozenset"}
_SIZED = {list, tuple, Pairs, PickledSet}
_WITH_STATE = {"torch._utils._rebuild_parameter_with_state", "torch._tensor._rebuild_from_type_v2"}


class ObjectWalk:
    """Walks what a pickle of `nbytes` holds, and collects tensors by name and attributes."""

    def __init__(self, tensors: Tensors, nbytes: int, notes: kit.Notes, base: int = 0) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.attrs: dict[str, Any] = {}
        self._maker, self._notes, self._base = tensors, notes, base
        self._visits = _VISITS + _VISITS_PER_BYTE * nbytes
        self._names_nbytes = self._attrs_nbytes = 0
        self._again: dict[str, int] = {}  # by name, how many have it, and one

    def walk(self, root: Any, path: tuple[str, ...] = ()) -> None:
        """List all that is below a value, whose path is given."""
        # A value with its path; or what was entered and is left now, to notice what holds itself.
        todo: list[tuple[tuple[str, ...], int, Any, int]] = [(path, 0, root, 0)]
        inside: set[int] = set()
        while todo:
            path, length, value, leaving = todo.pop()
            if leaving:
                inside.discard(leaving)
                continue
            self._visits -= 1 + _width(value)
            if self._visits < 0:
                reason = "more paths lead to what it holds than a file of its size should have"
                raise UnsupportedError(reason, offset=self._base, rule="Paths")
            try:
                children = self._children(path, value)
            except CheckpointError as error:
                name = ".".join(path)[:200] or "tensor"
                raise error.located(tensor=name, offset=self._base) from error.__cause__
            if not children:
                continue
            if id(value) in inside:
                continue
            if len(path) >= _DEEPEST:
                self._notes.add(f"nested deeper than {_DEEPEST}, and left out", "a value")
                continue
            inside.add(id(value))
            todo.append((path, length, None, id(value)))
            for key, inner in reversed(children):
                name = key_text(key)
                if length + len(name) > _LONGEST_NAME:
                    reason = f"a name of {length + len(name)} characters"
                    raise UnsupportedError(reason, offset=self._base, rule="Name")
                todo.append(((*path, name), length + 1 + len(name), inner, 0))

    def _children(self, path: tuple[str, ...], value: Any) -> list[tuple[Any, Any]] | None:
        """List a tensor or a plain value, or return what is in a container."""
        kind = type(value)
        if kind is Call:
            return self._of_call(path, value)
        if kind is Pairs:
            return list(value.items())
        if kind in {list, tuple, PickledSet}:
            if all(map(is_plain, value)):
                self._say(path, [*value])
                return None
            return list(enumerate(value))
        if kind is Persistent:
            storage = storage_of(value)
            if storage is not None:
                self._maker.name = ".".join(path) or "tensor"
                self._add(self._maker.view(value, 0, ((storage.numel,), (1,))))
                return None
        if kind is bytes:
            self._say(path, f"<{len(value)} bytes>")
        else:
            self._say(path, value if is_plain(value) else spelled(value))
        return None

    def _of_call(self, path: tuple[str, ...], call: Call) -> list[tuple[Any, Any]] | None:
        self._maker.name = ".".join(path) or "tensor"
        tensor = self._maker.tensor(call)
        if tensor is not None:
            self._add(tensor)
            return [(key, inner) for key, inner in _attached(call) if not is_plain(inner)]
        inside = wrapped(call)
        if inside is not None:
            # Of a class that is not known: what it is made of, and the tensors in its state.
            return self._children(path, inside)
        name, args = name_of(call), call.args
        if name in _MAPPINGS:
            first = args[-1] if args else None
            given = [*first.items()] if type(first) is Pairs else []
            if type(first) is list:  # as Python 2 has it
                given = [pair for pair in first if type(pair) in {list, tuple} and len(pair) == 2]
            return [*given, *(call.pairs or Pairs()).items()]
        if name in _SEQUENCES:
            first = args[0] if args and type(args[0]) in {list, tuple, PickledSet} else ()
            values = [*first, *(call.values or ())]
            return self._children(path, values)
        value = _constant(name, args)
        if value is not None:
            self._say(path, value)
            return None
        state = dict_of(items_of(call.state))
        if "_parameters" in state or "_modules" in state:
            return _of_module(state)
        inner = [
            *items_of(call.state),
            *(call.pairs or Pairs()).items(),
            *enumerate(call.values or ()),
        ]
        if not inner:
            self._say(path, spelled(call))
        states = call.state if type(call.state) is tuple else (call.state,)
        unnamed = [
            *enumerate(args),
            *enumerate([each for each in states if type(each) is not Pairs]),
        ]
        return inner + [(at, each) for at, each in unnamed if _may_have_tensors(each)]

    def _add(self, tensor: Tensor) -> None:
        """List a tensor, whose name is changed where another one has it."""
        name = tensor.name
        self._names_nbytes += len(name)
        if self._names_nbytes > _LONGEST_NAMES:
            reason = f"names of more than {_LONGEST_NAMES} characters in total"
            raise UnsupportedError(reason, offset=self._base, rule="Name")
        if name in self.tensors:
            again = self._again.get(name, 2)
            while f"{name}#{again}" in self.tensors:
                again += 1
            self._again[name] = again + 1
            name = f"{name}#{again}"
            tensor = replace(tensor, name=name)
        if tensor.problem is not None:
            tensor.problem.located(tensor=name, offset=self._base)
        self.tensors[name] = tensor

    def _say(self, path: tuple[str, ...], value: Any) -> None:
        """Keep a plain value as an attribute of the file."""
        name = ".".join(path) or "value"
        if type(value) is str and not value.isascii():
            value = key_text(value)
        count = len(value) if type(value) in {str, list} else 8
        self._attrs_nbytes += len(name) + count
        if len(self.attrs) >= _MOST_ATTRS or self._attrs_nbytes > _LARGEST_ATTRS:
            self._attrs_nbytes -= len(name) + count
            where = f"the value {shown(name)}"
            self._notes.add("there are more attributes than are kept, and it is left out", where)
            return
        self.attrs.setdefault(name, value)


def _width(value: Any) -> int:
    """Return how much there is to look at in a value, which may be there many times."""
    kind = type(value)
    if kind is Call:
        width = sum([len(each) for each in value.args if type(each) in _SIZED], len(value.args))
        if value.state is None and value.pairs is None and value.values is None:
            return width  # a tensor, of which there are very many
        inner = value.state if type(value.state) is tuple else (value.state,)
        more = (inner, *inner, value.pairs, value.values)
        return width + sum([len(each) for each in more if hasattr(each, "__len__")])
    if kind is str:
        return len(value) >> 4
    return len(value) if hasattr(value, "__len__") else 0


def _may_have_tensors(value: Any) -> bool:
    if type(value) in {list, tuple, PickledSet}:
        return not all(map(is_plain, value))
    return type(value) in {Call, Pairs, Persistent}


def _attached(call: Call) -> list[tuple[Any, Any]]:
    """Return the attributes that a tensor has."""
    args = call.args
    if call.state is None and len(args) != 4:
        return []
    name = name_of(call)
    given = items_of(args[3]) if name in _WITH_STATE and len(args) > 3 else []
    return given if call.state is None else [*given, *items_of(call.state)]


def _of_module(state: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the parameters, buffers and modules of a module, then its plain attributes."""
    found, own = [], ("_parameters", "_buffers", "_modules")
    for level in own:
        inner = state.get(level)
        items = inner if type(inner) is Pairs else getattr(inner, "pairs", None)
        found += [(key, value) for key, value in (items or Pairs()).items() if value is not None]
    return found + [(key, value) for key, value in state.items() if not key.startswith("_")]


def _constant(name: str, args: tuple[Any, ...]) -> Any:
    """Return the plain value that a call gives, None if it gives something else."""
    if name == "torch.Size" and args and type(args[0]) is tuple and all(map(is_plain, args[0])):
        return list(args[0])
    if name == "torch.device" and args:
        return ":".join(map(key_text, args))
    if name == "_codecs.encode" and args and type(args[0]) is str:
        return f"<{len(args[0])} bytes>"
    if name == "numpy.core.multiarray.scalar" and len(args) == 2:
        return scalar_of(args)
    return None
