"""Where each byte of a new file goes: `Plan`, `Extent`, `Literal`, `Written`.

A format module turns an `Index` of what is to be written into a `Plan`, without touching an
array; `xckpt.writing` streams the arrays to their extents, whatever the format. In that Index a
part has its raw size as ``nbytes``, the wanted compression as ``encoding``, and as ``digest`` the
name of the wanted algorithm. Its ``offset`` is where the bytes are in the file that they come
from, 0 if they come from none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xckpt.index import Part, Tensor

__all__ = ["Extent", "Literal", "Plan", "Written", "by_source"]


class Literal(NamedTuple):
    """Bytes that the format itself knows: headers, padding that is not zero, manifests.

    Parameters
    ----------
    offset : int or None
        First byte in the file; None is right after all that is written before.
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
        yet: at the next multiple of the plan's `alignment` after them and the gap.
    gap : int
        How many bytes are left free before a part without an offset, for what `finish` writes.
    """

    tensor: str
    role: str
    part: Part
    offset: int | None
    gap: int = 0


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


def by_source(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put tensors in the order that their data have in the file they come from."""

    def place(item: tuple[str, Tensor]) -> float:
        return min([p.offset for p in item[1].parts.values() if p.offset > 0], default=inf)

    return dict(sorted(tensors.items(), key=place))


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
        Where parts go, in file order. Only those after a compressed one have no offset.
    alignment : int
        That extents without an offset keep, in bytes.
    nbytes : int or None
        Size of the file; None where only writing tells it.
    finish : callable
        Gets a `Written` for each (tensor, role) of this plan and of its companions when all of
        them are written, and returns the literals that depend on them: a manifest with digests.
    companions : mapping of str to Plan
        Other files of the same checkpoint, by their names in the same folder. They have all parts.
    renamed : callable or None
        ``renamed(names)`` plans this file with other names for its companions, by their names. For
        moments it takes the place of an old file, while companions get their names. A reader
        that knows fixed names only must refuse it, since it would find old files under these.

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
    renamed: Callable[[Mapping[str, str]], Plan] | None = None
