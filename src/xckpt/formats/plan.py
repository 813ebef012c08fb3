"""The contents of a new file (`Draft`), and the position of each byte in it (`Plan`).

A format module turns a `Draft` into a `Plan` without touching an array. `xckpt.writing` then writes
the arrays into place, in the same way for all formats. A draft does not use the types of
`xckpt.index`, because its parts have no offsets, stored sizes and digests yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.elements import nbytes_of
from xckpt.index import Arrangement, Layout, Quantization

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class WantedPart(NamedTuple):
    """One array of a tensor to write.

    Parameters
    ----------
    dtype : str
        Element type, a key of `xckpt.elements.ELEMENT_TYPES`.
    shape : tuple of int
        Shape of the array.
    nbytes : int
        Uncompressed size in bytes.
    compression : str or None
        Name of the compression; None for raw bytes.
    algorithm : str or None
        Name of the digest algorithm; None for no digest.
    digest_of : {"stored", "decoded"}
        Whether the digest covers the bytes after or before compression.
    source_offset : int
        Byte offset of the values in the file that they are copied from; 0 without such a file.
    inline : bytes or None
        The bytes themselves, if `Format.is_inline` is true.
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
        """Return a part with the size of its shape and the algorithm of a digest."""
        nbytes = nbytes_of(dtype, prod(shape))
        algorithm = None if digest is None else digest.partition(":")[0]
        return cls(dtype, shape, nbytes, compression, algorithm, "stored", source_offset)


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A tensor to write; its fields have the same meaning as in `xckpt.index.Tensor`.

    Parameters
    ----------
    name : str
        Name in the new file.
    dtype : str
        Element type of the values.
    shape : tuple of int
        Logical shape.
    parts : mapping of str to WantedPart
        Arrays by role.
    layout : {"dense", "sparse_csr", "sparse_coo", "quantized", "blocks", "structural"}
        How the parts represent the tensor.
    order : {"C", "F"}
        Memory order of dense data.
    attrs : mapping
        Attributes of plain Python types.
    dims : tuple of (str or None), or None
        Names of axes.
    quantization : Quantization or None
        Scheme that decodes the parts, if `layout` is ``"quantized"``.
    path : tuple of str or None
        Position in the tree of modules.
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
    """Contents of a new file.

    Parameters
    ----------
    tensors : mapping of str to WantedTensor
        Tensors by name, in the preferred order of their data.
    attrs : mapping
        Attributes of the file, of plain Python types.
    path : str
        Path or URL of the file.
    arrangement : Arrangement
        Coordinates, order and tree of the Dataset. Only if `Can.arrangement` is true.
    tensor_attrs : mapping of str to mapping
        By tensor, attributes of JSON types that are not in `Can.tensor_attrs`. Only if
        `Can.arrangement` is true.
    attr_types : mapping of str to str
        Element types of the attributes in the file that they come from; see `xckpt.index.Index`.
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
        First byte in the file; None for the first byte after everything written so far.
    data : bytes
        The bytes.
    """

    offset: int | None
    data: bytes


class PlannedPart(NamedTuple):
    """A part with its position in a new file.

    Parameters
    ----------
    tensor : str
        Name of the tensor.
    role : str
        Role of the part in the tensor.
    part : WantedPart
        Type, shape, compression and digest.
    offset : int or None
        First byte in the file. None after compressed parts of unknown size: the part then begins
        at the next multiple of the plan's `alignment` after them and the gap.
    gap : int
        Bytes to leave free before a part without an offset; `finish` fills them.
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
    """Position of a part that has been written.

    Parameters
    ----------
    offset : int
        First byte in the file.
    nbytes : int
        Stored size in bytes.
    digest : str or None
        ``algorithm:value`` in lower-case hexadecimal digits, if the part has an `algorithm`.
    """

    offset: int
    nbytes: int
    digest: str | None = None


def place_parts(
    tensors: Iterable[WantedTensor], offsets: Iterable[int], start: int = 0
) -> list[PlannedPart]:
    """Return dense tensors as planned parts, at offsets that count from `start`."""
    return [
        PlannedPart(tensor.name, "data", tensor.parts["data"], start + offset)
        for tensor, offset in zip(tensors, offsets, strict=False)
    ]


#: Losses of several formats; see `Plan.losses`.
LOST_DIMS = "names of dimensions without a place"
LOST_SCALARS = "scalars that get an axis of length 1"


def by_source(tensors: Mapping[str, WantedTensor]) -> dict[str, WantedTensor]:
    """Sort tensors by the offsets of their data in the file that they are copied from."""

    def source_offset(item: tuple[str, WantedTensor]) -> float:
        offsets = [part.source_offset for part in item[1].parts.values()]
        return min([offset for offset in offsets if offset > 0], default=inf)

    return dict(sorted(tensors.items(), key=source_offset))


def _nothing(written: Mapping[tuple[str, str], Written]) -> tuple[LiteralBytes, ...]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Position of each byte in a new file. Unwritten bytes are zero.

    Parameters
    ----------
    literals : tuple of LiteralBytes
        Bytes that do not depend on the data, at fixed offsets.
    parts : tuple of PlannedPart
        All parts in file order. Only parts after a compressed one have no offset.
    alignment : int
        Alignment of parts without an offset, in bytes.
    nbytes : int or None
        Size of the file; None if it is unknown before writing.
    finish : callable
        Called after all parts are written, with a `Written` for each (tensor, role) of this plan
        and of its companions. Returns the literals that depend on them, such as a manifest with
        digests.
    companions : mapping of str to Plan
        Other files of the same checkpoint, by their names in the same folder. They have all parts.
    renamed : callable or None
        ``renamed(names)`` plans this file with other names for its companions. Such a file
        temporarily replaces an old one while the companions are renamed. A reader that ignores the
        names in the file must refuse it, because fixed names still belong to old files.
    suffix : str
        Suffix to add to the path of the draft, if this file refers to the files that the draft
        was split into.
    is_index : bool
        Whether this file only maps tensors to companions, and has no format itself.
    losses : mapping of str to sequence of str
        Properties of the draft that a reader does not return, in words for a warning, with the
        names of the tensors concerned.

    Notes
    -----
    Companions are written first, so that this file never refers to an incomplete one.
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
        """Return the plan of a header with data after it; `nbytes` is the size of the file."""
        return cls((LiteralBytes(0, head),), tuple(parts), nbytes=nbytes or len(head))


def split(draft: Draft, most: int, nbytes_of: Callable[[WantedTensor], int]) -> list[Draft]:
    """Split a draft into several with at most `most` bytes of tensors, or one larger tensor."""
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
        # Variables of several files are in the order of the data.
        arrangement = replace(draft.arrangement.of(tensors), order=())
        attrs = {name: value for name, value in draft.tensor_attrs.items() if name in tensors}
        drafts.append(replace(draft, tensors=tensors, arrangement=arrangement, tensor_attrs=attrs))
    return drafts


def plan_main_file(
    companions: Mapping[str, Plan],
    write: Callable[[Mapping[str, str]], bytes],  # gets the actual names by the planned ones
    suffix: str = "",
    *,
    is_index: bool = False,
) -> Plan:
    """Return the plan of a file that lists its companions."""

    def renamed(names: Mapping[str, str]) -> Plan:
        return replace(Plan.headed(write(names)), suffix=suffix, is_index=is_index)

    plan = renamed({name: name for name in companions})
    return replace(plan, companions=companions, renamed=renamed)
