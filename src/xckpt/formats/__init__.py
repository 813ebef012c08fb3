"""Formats: one self-contained module each, and the registry that picks one by content.

A format module is pure. It has

``NAME``
    the format's name, also the name of its xarray engine;
``SUFFIXES``
    file name endings, lower case, for messages and for writing;
``SHARED_SUFFIXES`` (optional)
    those of them that other programs use too: they do not mark a remote file as of this format;
``detect(head, size, name)``
    whether a file of that size and name that begins with these bytes (at most `HEAD_BYTES`) is of
    this format; the content decides wherever it can;
``read(source, **options)``
    the `Index` of a file, from anything with ``name``, ``size`` and ``read(offset, nbytes)``;
    keyword arguments are options of its own, which its engine declares;
``module_axes(shapes)`` (optional)
    names of axes in one module of a tree, from the shapes of its tensors by their names in it.

A format that is written has also

``plan(index, **options)``
    the `xckpt.plan.Plan` of a file that holds what the index says, from no array. The index is as
    `read` gives it, of this or of another format, in the order in which data are wanted; of a part
    ``nbytes`` is the raw size, ``encoding`` the wanted compression and ``digest`` the name of the
    wanted algorithm, offsets mean nothing, and ``source`` is the path of the new file. What cannot
    be represented is an `UnsupportedError` that names the tensor and says what to do; wrong
    options are a `ValueError` or `TypeError`.
    Elements are little-endian. An `Extent` says what is written: where its part has another
    element type than the index has (indices of sparse tensors), the data are cast to it;
``WRITES``
    element types that a file can hold, best first; `plan` may refuse some for some options;

and, where they are not what the parentheses say,

``LAYOUTS`` (``("dense",)``), ``ENCODINGS`` (none), ``DIGESTS`` (none)
    layouts of tensors, compressions of parts and digest algorithms that it has;
``ORDERS`` (``("C",)``)
    memory orders that dense data may have;
``WRITE_OPTIONS`` (none)
    names of the keyword arguments of `plan`;
``TENSOR_ATTRS``, ``FILE_ATTRS`` (none)
    names of the attributes that it stores, of tensors and of the file; None is any. `plan` leaves
    out all others;
``is_inline(tensor)`` (none is)
    whether the value of a tensor is in what comes before all data, so that `plan` needs it as the
    ``inline`` bytes of its part, and gives it no extent;
``plan_append(source, index, *, replace=False, **options)`` (none)
    the `Plan` that adds tensors to the file `source`. No byte of the old file is written to, so
    that cutting the file to its old size undoes what was not finished.

Then ``read(plan(index))`` gives the same tensors and attributes, wherever their bytes are.

To add a format, write such a module and name it in `_MODULES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from xckpt.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

    from xckpt.index import Index, Tensor
    from xckpt.plan import Plan

__all__ = ["HEAD_BYTES", "Format", "Readable", "Writer", "detect", "get", "get_writer", "names"]

HEAD_BYTES = 512

_MODULES = {
    "burnpack": "xckpt.formats.burnpack",
    "gptrs": "xckpt.formats.gptrs",
    "mlcp": "xckpt.formats.mlcp",
    "primitiv": "xckpt.formats.primitiv",
    "safetensors": "xckpt.formats.safetensors",
    "ztensor": "xckpt.formats.ztensor",
}


class Readable(Protocol):
    """What a format module reads from."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Give exactly `nbytes` bytes, or raise `FormatError` where they are not in the file."""

    def sibling(self, name: str) -> Readable:
        """Open a file in the same folder, or raise `FileNotFoundError`."""


class Format(Protocol):
    """What a format module has."""

    NAME: str
    SUFFIXES: tuple[str, ...]

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Tell whether a file with these first bytes is of this format."""

    def read(self, source: Readable, **options: Any) -> Index:
        """Read the index of a file."""


@dataclass(frozen=True, slots=True)
class Writer:
    """What a format module has for writing.

    Parameters
    ----------
    format : str
        Name of the format.
    plan : callable
        ``plan(index, **options)`` gives the `Plan` of a file.
    writes : tuple of str
        Element types, best first.
    layouts : tuple of str
        Layouts of tensors.
    encodings : tuple of str
        Compressions of parts.
    digests : tuple of str
        Digest algorithms.
    orders : tuple of str
        Memory orders of dense data.
    options : tuple of str
        Keyword arguments of `plan`.
    tensor_attrs, file_attrs : tuple of str or None
        Attributes that are stored; None is any.
    is_inline : callable or None
        ``is_inline(tensor)`` tells whether `plan` needs the value of a tensor.
    plan_append : callable or None
        ``plan_append(source, index, *, replace=False, **options)`` gives the `Plan` that adds to a
        file; None where the format does not let a file grow.
    """

    format: str
    plan: Callable[..., Plan]
    writes: tuple[str, ...]
    layouts: tuple[str, ...] = ("dense",)
    encodings: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    orders: tuple[str, ...] = ("C",)
    options: tuple[str, ...] = ()
    tensor_attrs: tuple[str, ...] | None = ()
    file_attrs: tuple[str, ...] | None = ()
    is_inline: Callable[[Tensor], bool] | None = None
    plan_append: Callable[..., Plan] | None = None


# Names in a module of the fields of `Writer` that it may leave out.
_OPTIONAL = {
    "layouts": "LAYOUTS",
    "encodings": "ENCODINGS",
    "digests": "DIGESTS",
    "orders": "ORDERS",
    "options": "WRITE_OPTIONS",
    "tensor_attrs": "TENSOR_ATTRS",
    "file_attrs": "FILE_ATTRS",
    "is_inline": "is_inline",
    "plan_append": "plan_append",
}


def names() -> tuple[str, ...]:
    """Return the names of all formats."""
    return tuple(_MODULES)


def get(name: str) -> Format:
    """Return a format module by name.

    Parameters
    ----------
    name : str
        One of `names`.

    Returns
    -------
    Format
        The module.

    Raises
    ------
    ValueError
        If there is no such format.
    """
    try:
        module = _MODULES[name]
    except KeyError:
        known = ", ".join(names())
        raise ValueError(f"unknown format {name!r}; known are: {known}") from None
    return cast("Format", import_module(module))


def get_writer(name: str) -> Writer:
    """Return how files of a format are written.

    Parameters
    ----------
    name : str
        One of `names`.

    Returns
    -------
    Writer
        Its plan, and what a file can hold.

    Raises
    ------
    ValueError
        If there is no such format, or it is only read.
    """
    module = vars(get(name))
    if "plan" not in module:
        written = ", ".join(known for known in names() if "plan" in vars(get(known)))
        raise ValueError(f"format {name!r} is only read; written are: {written}")
    optional = {field: module[spelled] for field, spelled in _OPTIONAL.items() if spelled in module}
    return Writer(name, module["plan"], module["WRITES"], **optional)


def detect(source: Readable) -> Format:
    """Find the format of a file by its content.

    Parameters
    ----------
    source : Readable
        The file.

    Returns
    -------
    Format
        The module that reads it.

    Raises
    ------
    FormatError
        If no format knows it.
    """
    head = bytes(source.read(0, min(HEAD_BYTES, source.size)))
    for name in names():
        module = get(name)
        if module.detect(head, source.size, source.name):
            return module
    raise FormatError(
        f"not a checkpoint of a known format; the file begins {head[:16]!r}",
        path=source.name,
        offset=0,
        hint=f"Formats that are read: {', '.join(names())}",
    )
