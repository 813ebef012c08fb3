"""What a new file is to hold (`Draft`), and where each byte of it goes (`Plan`).

A format module turns a `Draft` into a `Plan`, without touching an array; `xckpt.writing` streams
the arrays into place, whatever the format. New tensors have types of their own: an
`xckpt.index.Part` has an offset, a stored size and a digest, a `WantedPart` has none of them yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.elements import nbytes_of
from xckpt.index import Arrangement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xckpt.index import Layout, Quantization


class WantedPart(NamedTuple):
    """One array of a tensor that is to be written.

    Parameters
    ----------
    dtype : str
        Element type, a key of `xckpt.elements.ELEMENT_TYPES`.
    shape : tuple of int
        Its shape.
    nbytes : int
        Raw size in bytes.
    compression : str or None
        What it is compressed with.
    algorithm : str or None
        Name of the algorithm of its digest.
    digest_of : {"stored", "decoded"}
        Whether the digest covers the bytes after or before compression.
    source_offset : int
        First byte in the file that the values come from; 0 if they come from none.
    inline : bytes or None
        The bytes themselves, where `Format.is_inline` asks for them.
    level : int or None
        Level of compression; None is the default of the codec.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    compression: str | None = None
    algorithm: str | None = None
    digest_of: Literal["stored", "decoded"] = "stored"
    source_offset: int = 0
    inline: bytes | None = None
    level: int | None = None

    @classmethod
    def of(
        cls,
        dtype: str,
        shape: tuple[int, ...],
        compression: str | None = None,
        digest: str | None = None,
        source_offset: int = 0,
    ) -> WantedPart:
        """Return a part of the size that its shape makes, with a digest like another one."""
        nbytes = nbytes_of(dtype, prod(shape))
        algorithm = None if digest is None else digest.partition(":")[0]
        return cls(dtype, shape, nbytes, compression, algorithm, "stored", source_offset)


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A tensor that is to be written; its fields mean what those of `xckpt.index.Tensor` do.

    Parameters
    ----------
    name : str
        As it is to be in the file.
    dtype : str
        Element type of the values.
    shape : tuple of int
        Logical shape.
    parts : mapping of str to WantedPart
        By role.
    layout : {"dense", "sparse_csr", "sparse_coo", "quantized", "blocks", "structural"}
        How the parts make the tensor.
    order : {"C", "F"}
        Memory order of dense data.
    attrs : mapping
        Attributes of plain Python types.
    dims : tuple of (str or None), or None
        Names of axes.
    quantization : Quantization or None
        Set where `layout` is ``"quantized"``.
    path : tuple of str or None
        Where it is in the tree of modules.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Mapping[str, WantedPart]
    layout: Layout = "dense"
    order: Literal["C", "F"] = "C"
    attrs: Mapping[str, Any] = field(default_factory=dict)
    dims: tuple[str | None, ...] | None = None
    quantization: Quantization | None = None
    path: tuple[str, ...] | None = None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, implied zeros of a sparse tensor included."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a new file is to hold.

    Parameters
    ----------
    tensors : mapping of str to WantedTensor
        By name, in the order in which data are wanted.
    attrs : mapping
        What the file is to say of itself, of plain Python types.
    path : str
        Path or URL of the file.
    arrangement : Arrangement
        Which tensors are coordinates, and the like. Only if `Can.arrangement` is true.
    tensor_attrs : mapping of str to mapping
        By tensor, the attributes for which `Can.tensor_attrs` has no place, of what JSON has. Only
        if `Can.arrangement` is true.
    attr_types : mapping of str to str
        Element types that attributes had where they come from; see `xckpt.index.Index`.
    """

    tensors: Mapping[str, WantedTensor]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    arrangement: Arrangement = field(default_factory=Arrangement)
    tensor_attrs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    attr_types: Mapping[str, str] = field(default_factory=dict)


class LiteralBytes(NamedTuple):
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


class PlannedPart(NamedTuple):
    """A part with its place in a file.

    Parameters
    ----------
    tensor : str
        Name of the tensor.
    role : str
        Which of its parts.
    part : WantedPart
        Type, shape, compression and digest.
    offset : int or None
        First byte in the file. None where the sizes of compressed parts before it are not known
        yet: at the next multiple of the plan's `alignment` after them and the gap.
    gap : int
        How many bytes are left free before a part without an offset, for what `finish` writes.
    data : object
        The source of its bytes, which the writer adds; formats leave it out.
    """

    tensor: str
    role: str
    part: WantedPart
    offset: int | None
    gap: int = 0
    data: Any = None


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


def placed(
    tensors: Iterable[WantedTensor], offsets: Iterable[int], start: int = 0
) -> list[PlannedPart]:
    """Return where dense data go, by offsets that count from `start`."""
    pairs = zip(tensors, offsets, strict=False)
    return [PlannedPart(each.name, "data", each.parts["data"], start + at) for each, at in pairs]


#: Losses of several formats; see `Plan.losses`.
LOST_DIMS = "names of dimensions without a place"
LOST_SCALARS = "scalars that get an axis of length 1"


def by_source(tensors: Mapping[str, WantedTensor]) -> dict[str, WantedTensor]:
    """Put tensors in the order that their data have in the file they come from."""

    def place(item: tuple[str, WantedTensor]) -> float:
        offsets = [part.source_offset for part in item[1].parts.values()]
        return min([offset for offset in offsets if offset > 0], default=inf)

    return dict(sorted(tensors.items(), key=place))


def _nothing(written: Mapping[tuple[str, str], Written]) -> tuple[LiteralBytes, ...]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each byte of a new file goes. What nothing is written to is zero.

    Parameters
    ----------
    literals : tuple of LiteralBytes
        What is known beforehand, at offsets that are known.
    parts : tuple of PlannedPart
        All parts in file order. Parts after a compressed one have no offset.
    alignment : int
        Alignment of parts without an offset, in bytes.
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
    suffix : str
        What the name of this file has after the path of the draft: it is not the file that was
        asked for, but refers to those that it was made into.
    is_index : bool
        Whether this file only says which tensor is in which companion, and is of no format itself.
    losses : mapping of str to sequence of str
        What reading does not return of the draft, in words for a warning, with names of tensors.

    Notes
    -----
    Companions are written first, so that a file with an old name refers to nothing half written.
    """

    literals: tuple[LiteralBytes, ...]
    parts: tuple[PlannedPart, ...]
    alignment: int = 1
    nbytes: int | None = None
    finish: Callable[[Mapping[tuple[str, str], Written]], tuple[LiteralBytes, ...]] = _nothing
    companions: Mapping[str, Plan] = field(default_factory=dict)
    renamed: Callable[[Mapping[str, str]], Plan] | None = None
    suffix: str = ""
    is_index: bool = False
    losses: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def headed(
        cls, head: bytes, parts: Sequence[PlannedPart] = (), nbytes: int | None = None
    ) -> Plan:
        """Return the plan of a head and data after it, of so many bytes with both."""
        return cls((LiteralBytes(0, head),), tuple(parts), nbytes=nbytes or len(head))


def split(draft: Draft, most: int, nbytes_of: Callable[[WantedTensor], int]) -> list[Draft]:
    """Split a draft over files of at most so many bytes: tensors in their order, as many as fit."""
    files: list[dict[str, WantedTensor]] = [{}]
    filled = 0
    for name, tensor in draft.tensors.items():
        nbytes = nbytes_of(tensor)
        if files[-1] and filled + nbytes > most:
            files.append({})
            filled = 0
        files[-1][name] = tensor
        filled += nbytes
    drafts = []
    for tensors in files:
        # The order of the files is that of their data.
        arrangement = replace(draft.arrangement.of(tensors), order=())
        attrs = {name: of for name, of in draft.tensor_attrs.items() if name in tensors}
        drafts.append(replace(draft, tensors=tensors, arrangement=arrangement, tensor_attrs=attrs))
    return drafts


def referring(
    companions: Mapping[str, Plan],
    write: Callable[[Mapping[str, str]], bytes],
    suffix: str = "",
    *,
    is_index: bool = False,
) -> Plan:
    """Return the plan of a file that `write` makes of the names of its companions, by their own."""

    def renamed(names: Mapping[str, str]) -> Plan:
        return replace(Plan.headed(write(names)), suffix=suffix, is_index=is_index)

    own_names = renamed({name: name for name in companions})
    return replace(own_names, companions=companions, renamed=renamed)
