"""Where each byte of a new file goes: `Plan`, `Extent`, `Literal`, `Written`.

A format module turns an `Index` of what is to be written into a `Plan`, without touching an
array; `xckpt.writing` streams the arrays to their extents, whatever the format. In that Index a
part has its raw size as ``nbytes``, the wanted compression as ``encoding``, and as ``digest`` the
name of the wanted algorithm; offsets mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xckpt.index import Part

__all__ = ["Extent", "Literal", "Plan", "Written"]


class Literal(NamedTuple):
    """Bytes that the format itself knows: headers, padding that is not zero, manifests.

    Parameters
    ----------
    offset : int or None
        First byte in the file; None is right behind all that is written before.
    data : bytes
        The bytes.
    """

    offset: int | None
    data: bytes


class Extent(NamedTuple):
    """Where the bytes of a part go.

    Parameters
    ----------
    tensor : str
        Name of the tensor.
    role : str
        Which of its parts.
    part : Part
        What is written: element type, shape, raw size, compression, digest algorithm.
    offset : int or None
        First byte in the file. None where the sizes of compressed parts before it are not known
        yet: at the next multiple of the plan's `alignment` behind them.
    """

    tensor: str
    role: str
    part: Part
    offset: int | None


class Written(NamedTuple):
    """Where the bytes of a part went.

    Parameters
    ----------
    offset : int
        First byte in the file.
    nbytes : int
        Stored size.
    digest : str or None
        ``algorithm:value`` in lower-case hexadecimal digits, where the part asked for one.
    """

    offset: int
    nbytes: int
    digest: str | None = None


def _nothing(written: Mapping[tuple[str, str], Written]) -> tuple[Literal, ...]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each byte of a new file goes. What nothing is written to is zero.

    Parameters
    ----------
    literals : tuple of Literal
        What is known beforehand, at offsets that are known.
    extents : tuple of Extent
        Where parts go, in file order. Only those behind a compressed one have no offset.
    alignment : int
        That extents without an offset keep, in bytes.
    nbytes : int or None
        Size of the file; None where only writing tells it.
    finish : callable
        Gets a `Written` for each (tensor, role) of this plan and of its companions when all of
        them are written, and gives the literals that depend on them: a manifest with digests.
    companions : mapping of str to Plan
        Other files of the same checkpoint, by their names in the same folder.

    Notes
    -----
    Companions are written first, so that a file with an old name refers to nothing half written.
    """

    literals: tuple[Literal, ...]
    extents: tuple[Extent, ...]
    alignment: int = 1
    nbytes: int | None = None
    finish: Callable[[Mapping[tuple[str, str], Written]], tuple[Literal, ...]] = _nothing
    companions: Mapping[str, Plan] = field(default_factory=dict)
