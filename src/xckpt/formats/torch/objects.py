"""The contents of a checkpoint by name: tensors, and plain values as attributes.

The name of a tensor is the path to it, joined by dots, without the levels ``_parameters``,
``_buffers`` and ``_modules`` of modules: these are the names of a ``state_dict``. By default,
tensors outside of it (buffers that are not persistent, plain attributes of a module) are short
texts among the attributes. So are objects of unknown classes; the tensors in their state are
listed. Modules of TorchScript have all values in one mapping; the flags that PyTorch adds to each
of them are left out.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import CheckpointError, UnsupportedError, shown
from xckpt.formats.pickles.records import (
    Call,
    Global,
    Pairs,
    Persistent,
    PickledSet,
    is_plain,
    items_of,
    key_text,
    name_of,
    scalar_of,
    spelled,
)
from xckpt.formats.torch.tensors import Tensors, storage_of, wrapped

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from xckpt.index import Tensor

    _Items = Iterator[tuple[Any, Any]]

# The walk visits every path to a value, but a few bytes can encode 2**200 paths. A tensor takes at
# least 80 bytes of a pickle, but another reference to it only two.
_VISITS, _VISITS_PER_BYTE = 10_000, 2
_TENSORS, _BYTES_PER_TENSOR = 50_000, 32
_DEEPEST = 1000
_LONGEST_NAME, _LONGEST_NAMES = 1 << 14, 1 << 26
_MOST_ATTRS, _LARGEST_ATTRS = 1000, 1 << 16
_MAPPINGS = {"collections.OrderedDict", "collections.defaultdict", "collections.Counter"}
_MAPPINGS |= {"builtins.dict"}
_SEQUENCES = {"collections.deque", "builtins.list", "builtins.tuple"}
_SEQUENCES |= {"builtins.set", "builtins.frozenset"}
# Functions of TorchScript that return their first argument, a list or a mapping.
_TYPED = {f"torch.jit._pickle.build_{kind}list" for kind in ("int", "bool", "double", "tensor")}
_TYPED |= {"torch.jit._pickle.restore_type_tag"}
_SCRIPTED = "__torch__"  # the root of the modules of TorchScript's classes
_SIZED = {list, tuple, Pairs, PickledSet}
_WITH_STATE = {"torch._utils._rebuild_parameter_with_state", "torch._tensor._rebuild_from_type_v2"}
_SUBCLASS = "torch._utils._rebuild_wrapper_subclass"
_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_FACTS = {"_parameters": {"parameter_of": "module"}, "_buffers": {"buffer_of": "module"}}
_LEVELS, _TRANSIENT = ("_parameters", "_buffers", "_modules"), "_non_persistent_buffers_set"


class _Member(NamedTuple):
    """A value of a module: a parameter, a buffer, or one that its state_dict does not have."""

    value: Any
    facts: dict[str, str] | None = None
    is_outside: bool = False


class _Container(NamedTuple):
    """A container that the walk has entered."""

    path: tuple[str, ...]
    length: int  # of the path as a text
    items: _Items  # the remaining ones
    identity: int
    is_outside: bool  # its tensors are not listed


class ObjectWalk:
    """A walk through the values of a pickle, which collects tensors and attributes by name."""

    # Apart from its results, the walk stores only the path to the current value.

    def __init__(self, tensors: Tensors, *, all_tensors: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.attrs: dict[str, Any] = {}
        self._maker, self._notes, self._base = tensors, tensors.notes, tensors.content.base
        nbytes = tensors.content.nbytes  # of the pickle
        self._visits = _VISITS + _VISITS_PER_BYTE * nbytes
        self._most_tensors = _TENSORS + nbytes // _BYTES_PER_TENSOR
        self._names_nbytes = self._attrs_nbytes = 0
        self._next_number: dict[str, int] = {}  # of repeated names
        self._all_tensors = all_tensors
        self._is_outside = False
        self._facts: dict[str, str] | None = None  # of the current value

    def walk(self, root: Any, path: tuple[str, ...] = ()) -> None:
        """Collect everything below a value at `path`."""
        containers: list[_Container] = []
        inside: set[int] = set()  # identities, to detect a container within itself
        self._enter(root, path, 0, containers, inside)
        while containers:
            path, length, items, identity, is_outside = containers[-1]
            item = next(items, None)
            if item is None:
                containers.pop()
                inside.discard(identity)
                continue
            key, value = item
            self._is_outside, self._facts = is_outside, None
            if type(value) is _Member:
                self._facts = value.facts
                self._is_outside = not self._all_tensors if value.is_outside else is_outside
                value = value.value
            name = key_text(key)
            if length + len(name) > _LONGEST_NAME:
                reason = f"a name has {length + len(name)} characters, more than {_LONGEST_NAME}"
                raise UnsupportedError(reason, offset=self._base, rule="Name")
            self._enter(value, (*path, name), length + 1 + len(name), containers, inside)

    def _enter(
        self,
        value: Any,
        path: tuple[str, ...],
        length: int,
        containers: list[_Container],
        inside: set[int],
    ) -> None:
        """Add a tensor or a plain value, or enter a container."""
        self._visits -= 1 + _width(value)
        if self._visits < 0 or len(self.tensors) > self._most_tensors:
            reason = "the pickle has implausibly many paths to its values for its size"
            raise UnsupportedError(reason, offset=self._base, rule="Paths")
        try:
            items = self._items(path, value)
        except CheckpointError as error:
            name = ".".join(path)[:200] or "tensor"
            raise error.located(tensor=name, offset=self._base) from error.__cause__
        if items is None or id(value) in inside:
            return
        if len(path) >= _DEEPEST:
            self._notes.add(f"nested deeper than {_DEEPEST} levels, and left out", "a value")
            return
        inside.add(id(value))
        containers.append(_Container(path, length, items, id(value), self._is_outside))

    def _items(self, path: tuple[str, ...], value: Any) -> _Items | None:
        """Add a tensor or a plain value, or return the items of a container."""
        kind = type(value)
        if kind is Call:
            return self._items_of_call(path, value)
        if kind is Pairs:
            return value.items() if value else None
        if kind in {list, tuple, PickledSet}:
            if all(map(is_plain, value)):
                self._add_attr(path, [*value])
                return None
            return enumerate(value)
        if kind is Persistent:
            storage = storage_of(value)
            if storage is not None:
                self._maker.name = ".".join(path) or "tensor"
                self._add(self._maker.view(value, 0, ((storage.numel,), (1,))))
                return None
        if kind is bytes:
            self._add_attr(path, f"<{len(value)} bytes>")
        else:
            self._add_attr(path, value if is_plain(value) else spelled(value))
        return None

    def _items_of_call(self, path: tuple[str, ...], call: Call) -> _Items | None:
        self._maker.name = ".".join(path) or "tensor"
        tensor = self._maker.tensor(call)
        if tensor is not None:
            self._add(tensor)
            return ((key, inner) for key, inner in _attached(call) if not is_plain(inner))
        name, args = name_of(call), call.args
        inside = args[0] if name in _TYPED and args else wrapped(call)
        if inside is not None:
            # An unknown class around a value, which may have tensors in its state.
            return self._items(path, inside)
        if name in _MAPPINGS:
            return mapping_of(call)
        if name in _SEQUENCES:
            first = args[0] if args and type(args[0]) in {list, tuple, PickledSet} else ()
            return self._items(path, [*first, *(call.values or ())])
        kind = args[0] if name == _SUBCLASS and args else call.function
        if type(kind) is Global and ".".join(kind) == _SHARDED:
            reason = "shown part by part, because shards of other ranks are in the files of these"
            self._notes.add(reason, shown(".".join(path)))
        value = _constant(name, args)
        if value is not None:
            self._add_attr(path, value)
            return None
        module = {
            key: level
            for key, level in items_of(call.state)
            if type(key) is str and key in {*_LEVELS, _TRANSIENT}
        }
        if "_parameters" in module or "_modules" in module:
            return _of_module(module, call.state)
        pairs, values = call.pairs or Pairs(), call.values or ()
        is_empty = next(items_of(call.state), None) is None and not pairs and not values
        if is_empty and not _is_scripted(kind):
            self._add_attr(path, spelled(call))
        state = _state_of(kind, call.state, is_root=not path)
        inner = chain(state, pairs.items(), enumerate(values))
        states = call.state if type(call.state) is tuple else (call.state,)
        unnamed = chain(enumerate(args), enumerate(s for s in states if type(s) is not Pairs))
        return chain(inner, (item for item in unnamed if _may_have_tensors(item[1])))

    def _add(self, tensor: Tensor) -> None:
        """Add a tensor; a repeated name gets a number."""
        name = tensor.name
        if self._is_outside:
            text = f"<{tensor.dtype} tensor {tensor.shape} outside the state_dict>"
            self._add_attr(tuple(name.split(".")), text)
            return
        self._names_nbytes += len(name)
        if self._names_nbytes > _LONGEST_NAMES:
            reason = f"the names have more than {_LONGEST_NAMES} characters in total"
            raise UnsupportedError(reason, offset=self._base, rule="Name")
        if name in self.tensors:
            number = self._next_number.get(name, 2)
            while f"{name}#{number}" in self.tensors:
                number += 1
            self._next_number[name] = number + 1
            name = f"{name}#{number}"
            tensor = replace(tensor, name=name)
        if tensor.problem is not None:
            tensor.problem.located(tensor=name, offset=self._base)
        if self._facts is not None:
            tensor = replace(tensor, declared=self._facts)
        self.tensors[name] = tensor

    def _add_attr(self, path: tuple[str, ...], value: Any) -> None:
        """Add a plain value as an attribute of the file."""
        name = ".".join(path) or "value"
        if type(value) is str and not value.isascii():
            value = key_text(value)
        count = len(value) if type(value) in {str, list} else 8
        self._attrs_nbytes += len(name) + count
        if len(self.attrs) >= _MOST_ATTRS or self._attrs_nbytes > _LARGEST_ATTRS:
            self._attrs_nbytes -= len(name) + count
            reason = "left out, since the attributes are too many or too long"
            self._notes.add(reason, f"the value {shown(name)}")
            return
        self.attrs.setdefault(name, value)


def mapping_of(value: Any) -> _Items:
    """Return the items of a mapping, also of an OrderedDict; nothing for other values."""
    if type(value) is not Call:
        return value.items() if type(value) is Pairs else iter(())
    if name_of(value) not in _MAPPINGS:
        return iter(())
    first = value.args[-1] if value.args else None
    items: Any = first.items() if type(first) is Pairs else ()
    if type(first) is list:  # Python 2
        items = (pair for pair in first if type(pair) in {list, tuple} and len(pair) == 2)
    return chain(items, (value.pairs or Pairs()).items())


def _width(value: Any) -> int:
    """Return the cost of a visit to a value: the number of values directly in it."""
    kind = type(value)
    if kind is Call:
        width = sum([len(arg) for arg in value.args if type(arg) in _SIZED], len(value.args))
        if value.state is None and value.pairs is None and value.values is None:
            return width  # a shortcut for tensors
        inner = value.state if type(value.state) is tuple else (value.state,)
        contents = (inner, *inner, value.pairs, value.values)
        return width + sum([len(values) for values in contents if hasattr(values, "__len__")])
    if kind is str:
        return len(value) >> 4
    return len(value) if hasattr(value, "__len__") else 0


def _may_have_tensors(value: Any) -> bool:
    if type(value) in {list, tuple, PickledSet}:
        return not all(map(is_plain, value))
    return type(value) in {Call, Pairs, Persistent}


def _attached(call: Call) -> _Items:
    """Return the attributes of a tensor."""
    args = call.args
    if call.state is None and len(args) != 4:
        return iter(())
    is_stated = name_of(call) in _WITH_STATE and len(args) > 3
    return chain(items_of(args[3]) if is_stated else (), items_of(call.state))


def _of_module(levels: dict[str, Any], state: Any) -> _Items:
    """Return the parameters, buffers and modules of a module, then its attributes."""
    transient = levels.get(_TRANSIENT)  # a set, in the spelling of any protocol
    if type(transient) is Call and name_of(transient) == "builtins.set" and transient.args:
        transient = transient.args[0]
    names: Any = transient if type(transient) in {list, PickledSet} else ()
    hidden = {name for name in names if type(name) is str}
    for level in _LEVELS:
        inner = levels.get(level)
        pairs = inner if type(inner) is Pairs else getattr(inner, "pairs", None)
        for key, value in (pairs or Pairs()).items():
            if value is not None:
                is_outside = level == "_buffers" and key in hidden
                yield key, _Member(value, _FACTS.get(level), is_outside)
    for key, value in items_of(state):
        if type(key) is str and not key.startswith("_"):
            yield key, _Member(value, is_outside=True)


def _is_scripted(kind: Any) -> bool:
    """Return whether a class is one of TorchScript."""
    return type(kind) is Global and kind.module.partition(".")[0] == _SCRIPTED


def _state_of(kind: Any, state: Any, *, is_root: bool) -> _Items:
    """Return the items of an object's state; for TorchScript, without the flags of each module."""
    is_scripted = _is_scripted(kind)
    for key, value in items_of(state):
        is_flag = type(key) is str and (key.startswith("_") or (key == "training" and not is_root))
        if not (is_scripted and is_flag and is_plain(value)):
            yield key, value


def _constant(name: str, args: tuple[Any, ...]) -> Any:
    """Return the plain value that a call would return; None for other results."""
    if name == "torch.Size" and args and type(args[0]) is tuple and all(map(is_plain, args[0])):
        return list(args[0])
    if name == "torch.device" and args:
        return ":".join(map(key_text, args))
    if name == "_codecs.encode" and args and type(args[0]) is str:
        return f"<{len(args[0])} bytes>"
    if name == "numpy.core.multiarray.scalar" and len(args) == 2:
        return scalar_of(args)
    return None


# --- parameters of an optimizer -------------------------------------------------------------------

# Optimizers list them in ``param_groups``: as ``params`` (FSDP), as ``param_names`` (since PyTorch
# 2.6), or as the keys of the groups and of ``state`` (flattened by DCP). Lists of numbers name no
# tensor. The names may lack the first words of the tensors in the file, such as ``model.``.

_GROUPS = re.compile(r"(?P<optimizer>(?:.+\.)?)param_groups\.(?P<key>.+)", re.DOTALL)
_LIST = re.compile(r"[0-9]+\.param(?:s|_names)(?:\.[0-9]+)?")
# Words that wrappers of modules insert in names.
_WRAPPER = re.compile(
    r"(?<![^.])(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\."
)
# First words of the names of a model, in a file that also has the state of its training.
_ABOVE = frozenset({"model", "module", "state_dict", "model_state_dict", "app.model", "net"})
_MOST_TRIED = 100


def with_parameters(tensors: dict[str, Tensor], attrs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors, those in the lists of an optimizer with the fact that they are there."""
    listed: dict[str, None] = {}
    optimizers: dict[str, None] = {}
    for key, value in attrs.items():
        match = _GROUPS.fullmatch(key) if "param_groups." in key else None
        if match is None:
            continue
        optimizers[match["optimizer"]] = None
        if _LIST.fullmatch(match["key"]):
            values = value if isinstance(value, list) else [value]
            listed |= dict.fromkeys([name for name in values if isinstance(name, str)])
        else:
            listed[match["key"].rpartition(".")[0]] = None
    if not optimizers:
        return tensors
    states = tuple([f"{optimizer}state." for optimizer in optimizers])
    prefixes = tuple(optimizer for optimizer in optimizers if optimizer) or states
    model = {}
    for name in tensors:
        if name.startswith(states):
            start = next(len(state) for state in states if name.startswith(state))
            listed[name[start:].rpartition(".")[0]] = None
        elif not name.startswith(prefixes):
            model[_WRAPPER.sub("", name)] = name
    names = [_WRAPPER.sub("", name) for name in listed if name and not name.isdecimal()]
    above = _words_above(names, model)
    declared = dict(tensors)
    for name in names:
        owner = model.get(above + name)
        if owner is not None:
            facts = {**(tensors[owner].declared or {}), "parameter_of": "optimizer"}
            declared[owner] = replace(tensors[owner], declared=facts)
    return declared


def _words_above(names: Iterable[str], model: Collection[str]) -> str:
    """Return the first words that the tensors of the model have, and the names in lists lack."""
    for name in [*names][:_MOST_TRIED]:
        if name in model:
            return ""
        ending = f".{name}"
        for tensor in model:
            if tensor.endswith(ending) and tensor.removesuffix(ending) in _ABOVE:
                return tensor.removesuffix(name)
    return ""
