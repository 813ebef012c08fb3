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
    keyword arguments are options of its own, which its engine declares.

To add a format, write such a module and name it in `_MODULES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from xckpt.errors import FormatError

if TYPE_CHECKING:
    from xckpt.index import Index

__all__ = ["HEAD_BYTES", "Format", "Readable", "detect", "get", "names"]

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
