"""Where each byte of a new checkpoint or archive goes: in version 2, as gpt.rs's exporter does."""

from __future__ import annotations

from collections.abc import Hashable
from struct import pack
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.dims import DIMS_KEY, dims_text
from xckpt.dtypes import nbytes_of
from xckpt.errors import UnsupportedError
from xckpt.formats.gptrs.axes import ModelAxes
from xckpt.formats.gptrs.config import write_config
from xckpt.identity import base_id
from xckpt.plan import Extent, Literal, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.index import Index, Tensor

__all__ = ["FILE_ATTRS", "TENSOR_ATTRS", "WRITES", "WRITE_OPTIONS", "plan"]

#: Of the four element types that have a number gpt.rs reads these.
WRITES = ("float32", "int32")
WRITE_OPTIONS = ("container", "kind", "config", "ids")
TENSOR_ATTRS = ("requires_grad", "base_id")
FILE_ATTRS = ("kind", "config", "runtime", "ids")

_TAGS = {"float32": 0, "int32": 3}
_CONTAINERS = ("checkpoint", "tensors")
_IDS = ("stored", "zero")
_LARGEST_U32 = (1 << 32) - 1


class _Entry(NamedTuple):
    """A tensor of the new file."""

    tensor: Tensor
    name: bytes
    shape: tuple[int, ...]
    nbytes: int


def plan(
    index: Index,
    *,
    container: str | None = None,
    kind: str | None = None,
    config: Any = None,
    ids: str | None = None,
) -> Plan:
    """Plan a checkpoint or an archive of version 2.

    Tensors are sorted by name, with their data one after the other. One without axes gets one of
    length 1: gpt.rs does not read it otherwise. Names of axes that the kind of model does not give
    are text beside the config, under a key that gpt.rs ignores; an archive has no place for them.

    Parameters
    ----------
    index : Index
        What is written.
    container : {"checkpoint", "tensors"}, optional
        ``GPTRSCHK``, or ``GPTRSTEN``, which has neither a config nor ids. By default a checkpoint
        where a kind of model is known.
    kind : str, optional
        Kind of the model. By default the attribute ``kind`` of the index.
    config : object, optional
        Config of the model, any JSON. By default the attribute ``config`` of the index.
    ids : {"stored", "zero"}, optional
        Whether the base ids of names are stored, or 0, of which gpt.rs makes them. By default as
        the attribute ``ids`` of the index says, else 0, as gpt.rs's exporter writes it.

    Returns
    -------
    Plan
        Where everything goes.

    Raises
    ------
    UnsupportedError
        If gpt.rs would refuse the file: for the name, element type or layout of a tensor, the
        attribute ``requires_grad`` of one, or the config.
    ValueError
        If an option has an unknown value, or one that an archive has no place for.
    TypeError
        If `kind` is not text.

    Examples
    --------
    >>> plan(index, kind="gpt", config={"vocab_size": 11})  # doctest: +SKIP
    """
    _check_option("container", container, _CONTAINERS)
    _check_option("ids", ids, _IDS)
    model = _model(index, container, kind, config)
    if model is None and (ids or kind or config is not None):
        raise ValueError("without a kind this is an archive, which has no config and no ids")
    entries = _entries(index, ascii_only=model is not None)
    if model is None:
        return _laid_out(b"GPTRSTEN" + pack("<I", 2), entries, ids=None)
    stored = (ids or index.attrs.get("ids")) == "stored"
    head = b"GPTRSCHK" + pack("<I", 2) + _sized(model, "the config")
    return _laid_out(head, entries, ids=stored)


def _check_option(name: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")


def _model(index: Index, container: str | None, kind: str | None, config: Any) -> bytes | None:
    """Write the config of a checkpoint; None for an archive."""
    if container == "tensors":
        return None
    if kind is not None and not isinstance(kind, str):
        raise TypeError(f"kind={kind!r} is not text")
    attrs = index.attrs
    kind = attrs.get("kind") if kind is None else kind
    if kind is None and container is None and config is None and "config" not in attrs:
        return None
    if not isinstance(kind, str):
        raise UnsupportedError(
            "a checkpoint names the kind of its model, or gpt.rs refuses it"
            + ("" if kind is None else f": {kind!r} is not text"),
            rule="ConfigKind",
            hint="kind= names it; container='tensors' writes the tensors alone",
        )
    config = attrs.get("config") if config is None else config
    return write_config(kind, config, _more_of_config(index, kind, config))


def _more_of_config(index: Index, kind: str, config: Any) -> dict[str, Any]:
    """Give what stands beside kind and config: gpt.rs ignores the names of axes."""
    axes = ModelAxes(kind, config)
    unlike = {n: t for n, t in index.tensors.items() if t.dims != axes.of(n, t.shape)}
    more = {"runtime": index.attrs.get("runtime"), DIMS_KEY: dims_text(unlike)}
    return {key: value for key, value in more.items() if value is not None}


def _entries(index: Index, *, ascii_only: bool) -> list[_Entry]:
    entries = []
    for tensor in index.tensors.values():
        if tensor.layout != "dense" or tensor.dtype not in _TAGS:
            raise _unwritable(tensor)
        nbytes = nbytes_of(tensor.dtype, tensor.size)
        name = _encoded_name(tensor.name, ascii_only=ascii_only)
        entries.append(_Entry(tensor, name, tensor.shape or (1,), nbytes))
    return sorted(entries, key=lambda entry: entry.name)


def _unwritable(tensor: Tensor) -> UnsupportedError:
    if tensor.layout == "dense":
        reason = f"{tensor.dtype} values: gpt.rs reads {' and '.join(WRITES)}"
    else:
        reason = f"the layout {tensor.layout!r}: gpt.rs has dense tensors only"
    hint = f"Convert it to {' or '.join(WRITES)} before, or leave it out"
    return UnsupportedError(reason, tensor=tensor.name, rule="DType", hint=hint)


def _encoded_name(name: str, *, ascii_only: bool) -> bytes:
    try:
        return name.encode("ascii" if ascii_only else "utf-8")
    except UnicodeEncodeError as error:
        found = name[error.start : error.end]
        refused = "checkpoint" if ascii_only else "archive"
        reason = f"gpt.rs refuses a whole {refused} for {found!r} in a name"
        hint = "Rename it" + ("; container='tensors' takes any text" if ascii_only else "")
        raise UnsupportedError(reason, tensor=name, rule="Name", hint=hint) from None


def _laid_out(head: bytes, entries: Sequence[_Entry], *, ids: bool | None) -> Plan:
    """Put index and data behind a head; without ids at all where `ids` is None."""
    each = 29 if ids is None else 45
    nbytes = 4 + sum(each + len(name) + 8 * len(shape) for _, name, shape, _ in entries)
    offset = len(head) + 4 + nbytes
    listed = [pack("<I", len(entries))]
    extents = []
    for entry in entries:
        tensor = entry.tensor
        listed.append(_described(entry, offset, ids=ids))
        extents.append(Extent(tensor.name, "data", tensor.parts["data"], offset))
        offset += entry.nbytes
    written = head + _sized(b"".join(listed), "the index")
    return Plan((Literal(0, written),), tuple(extents), nbytes=offset)


def _described(entry: _Entry, offset: int, *, ids: bool | None) -> bytes:
    tensor, name, shape, nbytes = entry
    identity = b""
    if ids is not None:
        identity = (base_id(tensor.name) if ids else 0).to_bytes(16, "little")
    axes = pack(f"<I{len(shape)}Q", len(shape), *shape)
    data = pack("<IBQQ", _TAGS[tensor.dtype], _requires_grad(tensor), offset, nbytes)
    return pack("<I", len(name)) + name + identity + axes + data


def _requires_grad(tensor: Tensor) -> bool:
    value = tensor.attrs.get("requires_grad", False)
    if not isinstance(value, Hashable) or value not in {False, True}:
        reason = f"the attribute requires_grad is {value!r}, neither True nor False"
        raise UnsupportedError(
            reason, tensor=tensor.name, rule="RequiresGrad", hint="Set it, or remove it"
        )
    return bool(value)


def _sized(data: bytes, what: str) -> bytes:
    if len(data) > _LARGEST_U32:
        reason = f"{what} has {len(data)} bytes, but its length has 32 bits"
        raise UnsupportedError(reason, rule="Length", hint="Write several files")
    return pack("<I", len(data)) + data
