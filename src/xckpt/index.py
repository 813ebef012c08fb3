"""What a file holds, whatever its format: `Index`, `Tensor`, `Part`.

A format module turns bytes into an `Index`; everything else in the package knows the Index and
no format. All three are immutable and pickle to about the size of their names.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from math import prod
from posixpath import commonprefix
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from xckpt.errors import CheckpointError

__all__ = [
    "DEEPEST_ATTRS",
    "Arrangement",
    "Codebook",
    "FileSet",
    "Index",
    "Part",
    "Quantization",
    "Shard",
    "StoredList",
    "Tensor",
    "is_json",
    "paused_collector",
    "show_indexes_with",
]

# Levels of lists and dicts in an attribute that is kept as JSON.
DEEPEST_ATTRS = 32
# To look through more than these takes the garbage collector noticeable time.
_MANY_OBJECTS = 100_000

Layout = Literal[
    "dense",
    "chunked",
    "sparse_csr",
    "sparse_csc",
    "sparse_coo",
    "sparse_bsr",
    "sparse_bsc",
    "sparse_hybrid",
    "quantized",
    "blocks",
    "structural",
]


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a tensor: a contiguous byte range of a file.

    Parameters
    ----------
    dtype : str
        Element type, a key of `xckpt.elements.ELEMENT_TYPES`.
    shape : tuple of int or None
        None where only decoding tells the length (a compressed list of unknown length).
    offset : int
        First byte, absolute in the file.
    nbytes : int
        Stored size in bytes (the compressed size of a compressed part).
    encoding : {None, "zstd", "zstd-seekable", "deflate"} or str
        How the bytes are stored; None is raw.
    decoded_nbytes : int or None
        Size after decoding, where the file states it.
    digest : str or None
        ``algorithm:value`` as the file has it.
    digest_of : {"stored", "decoded"}
        Whether the digest covers the bytes before or after decoding.
    byteorder : {"little", "big"}
        Of the elements.
    shard : str or None
        Name of the file of a sharded checkpoint that holds the bytes; None is the file itself.
    inline : bytes or None
        The bytes themselves, where they are not a range of the file: a number that a header
        spells out.
    skip : int or None
        How many decoded bytes of a compressed part come before its own, and others may follow;
        None where all are its own.
    strides : tuple of int or None
        Distance of elements along each axis, in elements, where they lie neither in C order nor in
        that of the tensor; 0 where one element is all of an axis. The bytes are those from the
        first to the last of them then.
    inverted : bytes or None
        Bits of each element that are stored inverted, such as the sign of an imaginary part.
    origin : tuple of int or None
        Where in a chunked tensor its first element is.
    within : Part or None
        A longer run of bytes that these are the beginning of, where the file states its decoded
        size or its digest; only verifying reads it.
    """

    dtype: str
    shape: tuple[int, ...] | None
    offset: int
    nbytes: int
    encoding: str | None = None
    decoded_nbytes: int | None = None
    digest: str | None = None
    digest_of: Literal["stored", "decoded"] = "stored"
    byteorder: Literal["little", "big"] = "little"
    shard: str | None = None
    inline: bytes | None = None
    skip: int | None = None
    strides: tuple[int, ...] | None = None
    inverted: bytes | None = None
    origin: tuple[int, ...] | None = None
    within: Part | None = None


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the codes of a quantised tensor become numbers: ``(code - zero) * scale + bias``.

    The parts are ``data`` (codes), ``scales``, ``zeros`` where the zero points are stored,
    ``biases`` and ``index`` where there are any, and ``global`` where all scales have a factor in
    common. Scales, zero points and biases form a grid with one entry for each block of the tensor.

    Parameters
    ----------
    block : tuple of int
        Extent of a block along each axis of the tensor, one scale each.
    code : str
        Element type of a code. Packed codes are ``"uint8"``, ``"int8"`` if they have a sign, or a
        small float.
    bits : int
        Bits of one code.
    word_bits : int
        Size of the words that several codes share. Equal to `bits` where they share none; then
        the part ``data`` is a dense array of the tensor's shape.
    axis : int
        The axis along which codes share words, rounded up to whole words for each line.
    msb_first : bool
        Whether the first code of a word is in its highest bits.
    zero : int or None
        Zero point of every code, where it is not stored; None where it is in the part ``zeros``.
    packed_zeros : bool
        Whether stored zero points are packed as the codes are.
    scale_axes : tuple of int
        Order of the axes of the stored scale grid, slowest first.
    global_scale : bool
        Whether the part ``global`` has one number that every scale is multiplied with first.
    global_divides : bool
        Whether every scale is divided by that number instead.
    axes : tuple of int
        Order of the axes of the stored codes, slowest first; by default that of the tensor.
    stream : bool
        Whether codes follow each other without regard to words, and may begin in one and end in
        the next.
    order : tuple of int
        Places in a word, counted from its lowest bits, of the first code, the second, and so on;
        by default they are in order. Of packed zero points too.
    planes : tuple of int
        Widths in bits of the pieces of a code, lowest bits first, where each piece has words of its
        own: 32 codes take as many words as a code has bits. By default a code is in one piece.
    zero_axis : int or None
        The axis of the grid along which zero points are packed, if it is not `axis`.
    zero_add : int
        Added to stored zero points; to packed ones modulo two to the power of `bits`.
    stored_grid : tuple of int
        Extents of the stored grid, where it has more entries than there are blocks.
    index_axis : int or None
        The axis whose positions the part ``index`` gives entries of the grid to; by default they
        follow from `block`. Where a tensor is not strict, -1 for all stands for no index.
    reciprocal : bool
        Whether what is stored is one divided by the scale.
    biases : bool
        Whether the part ``biases`` has a number for each block that is added last.
    factor : float or None
        What all is multiplied with after the scale.
    wide : bool
        Whether the product with a scale is computed in float64 and then rounded to float32.
        Differences from zero points are of float32 either way.
    """

    block: tuple[int, ...]
    code: str
    bits: int
    word_bits: int
    axis: int
    msb_first: bool = False
    zero: int | None = 0
    packed_zeros: bool = False
    scale_axes: tuple[int, ...] = ()
    global_scale: bool = False
    global_divides: bool = False
    axes: tuple[int, ...] = ()
    stream: bool = False
    order: tuple[int, ...] = ()
    planes: tuple[int, ...] = ()
    zero_axis: int | None = None
    zero_add: int = 0
    stored_grid: tuple[int, ...] = ()
    index_axis: int | None = None
    reciprocal: bool = False
    biases: bool = False
    factor: float | None = None
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Codebook:
    """How codes of four bits become numbers by a table: ``table[code] * scale``.

    Elements are in C order, the first one of each byte in its high bits, and blocks run over all of
    them regardless of axes. The parts are ``data``, ``table``, and ``scales`` with one number for
    each block. Scales may be codes as well: they are then ``scale_table[code] * scale_scale +
    offset`` of the parts ``scale_table`` and ``scale_scales``.

    Parameters
    ----------
    block : int
        Elements of a block.
    scale_block : int or None
        Scales of a block of scales, where these are codes.
    offset : float
        Added to scales that are codes.
    """

    block: int
    scale_block: int | None = None
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Tensor:
    """One logical tensor.

    Parameters
    ----------
    name : str
        Exactly as in the file.
    dtype : str
        Element type of the stored values, a key of `xckpt.elements.ELEMENT_TYPES`, or of
        `xckpt.elements.BLOCK_TYPES` where `layout` is ``"blocks"``; another text only where the
        file names a type that is not known (then `problem` is set).
    shape : tuple of int
        Logical shape.
    parts : mapping of str to Part
        By role: ``data`` for dense tensors, ``values, indices, indptr`` for CSR, CSC, BSR and BSC,
        ``values, coords`` for COO and hybrid ones, ``data, scales, zeros`` for quantised ones,
        blocks with an `origin` for chunked ones, ``real, imag`` for complex numbers that numpy has
        no type for, the file's own otherwise.
        Of blocks ``data`` is bytes, with those of a row of the tensor along the last axis.
    layout : {"dense", "chunked", "sparse_csr", "sparse_csc", "sparse_coo", "sparse_bsr", \
"sparse_bsc", "sparse_hybrid", "quantized", "blocks", "structural"}
        How the parts make the tensor. In BSR and BSC each value is a matrix, and the shape is whole
        blocks; in hybrid ones each value of a COO is an array along the last axes. A structural
        tensor is shown as its parts only.
    order : {"C", "F"}
        Memory order of dense data: whether the last or the first axis is contiguous.
    attrs : mapping
        What the file says of the tensor.
    dims : tuple of (str or None), or None
        Names of axes that the file or its model kind gives; None where it gives none.
    quantization : Quantization, Codebook or None
        Set where `layout` is ``"quantized"``.
    strict : bool
        Whether the format forbids what others tolerate in the values: booleans other than 0
        and 1, unsorted or repeated sparse indices, bits set in padding.
    problem : CheckpointError or None
        Why the values cannot be read, where the rest of the file can; raised on computing.
    path : tuple of str or None
        Where it is in the tree of modules, its own name last; None where the dots of its name
        say so.
    stored : mapping of str to Tensor, or None
        By role, the tensors that the file has in place of this one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Mapping[str, Part]
    layout: Layout = "dense"
    order: Literal["C", "F"] = "C"
    attrs: Mapping[str, Any] = field(default_factory=dict)
    dims: tuple[str | None, ...] | None = None
    quantization: Quantization | Codebook | None = None
    strict: bool = False
    problem: CheckpointError | None = None
    path: tuple[str, ...] | None = None
    stored: Mapping[str, Tensor] | None = None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, implied zeros of a sparse tensor included."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Stored size of all parts, in bytes."""
        return sum([part.nbytes for part in self.parts.values()])

    def named(self, name: str) -> Tensor:
        """Return it under another name, and what is stored in its place under names alike.

        ``a.qweight`` of ``a.weight`` becomes ``b.qweight`` of ``b.weight``. Names that cannot
        follow leave nothing that is stored in place of it.
        """
        if self.stored is None or name == self.name:
            return replace(self, name=name)
        stored = {}
        for role, tensor in self.stored.items():
            same = len(commonprefix([self.name, tensor.name]))
            stem = name.removesuffix(self.name[same:])
            if not name.endswith(self.name[same:]):
                return replace(self, name=name, stored=None)
            stored[role] = replace(tensor, name=stem + tensor.name[same:])
        return replace(self, name=name, stored=stored)


@dataclass(frozen=True, slots=True)
class Shard:
    """A file that holds parts of another file's tensors.

    Parameters
    ----------
    size : int
        Exact size in bytes.
    digest : str or None
        ``algorithm:value`` of the whole file.
    candidates : tuple of str
        Where it may lie, relative to the folder of the referring file, best first.
    """

    size: int
    digest: str | None
    candidates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredList:
    """A list among the attributes that is left in the file until it is looked at.

    Parameters
    ----------
    part : Part
        Its numbers, or the bytes of its texts.
    count : int
        How many entries it has.
    length_nbytes : int
        Bytes of the length, in the part's byte order, before each text; 0 where it has numbers.
    """

    part: Part
    count: int
    length_nbytes: int = 0

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        kind = "texts" if self.length_nbytes else self.part.dtype
        return f"<list of {self.count} {kind}>"


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of a checkpoint that a file says it is one of; each is complete by itself.

    Parameters
    ----------
    names : tuple of str
        Of all of them, in their order, in the same folder.
    position : int
        Which of them it is, from 0.
    offset : int
        Where the file says so, for messages.
    count : int or None
        How many tensors they have in total, where the file states it.
    """

    names: tuple[str, ...]
    position: int
    offset: int
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What the object that a file was saved from is besides its tensors and their names of axes.

    Parameters
    ----------
    coords : tuple of str
        Names of the tensors that are coordinates.
    order : tuple of str
        Names of all tensors in the order of the variables, where that is not the order of the file.
    modules : mapping of str to mapping
        Attributes of nodes of a tree below its root, by path; empty ones of nodes without tensors.
    """

    coords: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, names: Collection[str]) -> Arrangement:
        """Return that of some of the tensors."""
        coords = tuple([name for name in self.coords if name in names])
        return Arrangement(coords, tuple([n for n in self.order if n in names]), self.modules)

    def renamed(self, names: Mapping[str, str]) -> Arrangement:
        """Return that of tensors with other names."""
        coords = tuple([names.get(name, name) for name in self.coords])
        order = tuple([names.get(name, name) for name in self.order])
        return Arrangement(coords, order, self.modules)

    def grown(self, more: Arrangement, names: Collection[str]) -> Arrangement:
        """Return that of a file to which tensors of some names are added, or in which replaced."""
        coords = [name for name in self.coords if name not in names]
        order = [name for name in self.order if name not in names]
        order += names if order else ()
        return Arrangement((*coords, *more.coords), tuple(order), {**self.modules, **more.modules})


def is_json(value: Any, levels: int = DEEPEST_ATTRS) -> bool:
    """Whether an attribute is the same after it was JSON: texts, numbers, lists and dicts."""
    kind: Any = type(value)
    if kind is str:
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 64)
    if kind in {list, tuple}:  # which becomes a list
        return levels > 0 and all(is_json(each, levels - 1) for each in value)
    if kind is dict:
        keys = all(type(key) is str and is_json(key) for key in value)
        return levels > 0 and keys and all(is_json(each, levels - 1) for each in value.values())
    return kind in {bool, float} or value is None


@dataclass(frozen=True, slots=True, repr=False)
class Index(Mapping[str, "Tensor"]):
    """What a file holds: tensors, attributes, and where every byte is; no data.

    It is a mapping of names to tensors, in file order.

    Parameters
    ----------
    format : str
        Name of the format, also the name of the xarray engine.
    version : str
        Version of the format that the file has.
    tensors : mapping of str to Tensor
        In file order.
    attrs : mapping
        What the file says of itself: plain Python types, and long lists as `StoredList`.
    source : str
        Path or URL it was read from.
    nbytes : int
        Size of the file.
    shards : mapping of str to Shard
        Other files that hold parts, by the name that `Part.shard` uses.
    warnings : tuple of str
        What the specification lets pass with a warning.
    arrangement : Arrangement
        Which tensors are coordinates, and the like.
    attr_types : mapping of str to str
        Element types of attributes that are numbers or lists, where the file has one that their
        values do not tell; ``"text"`` of an empty list of texts.
    files : FileSet or None
        The files that this one belongs to, if it is not alone.

    Examples
    --------
    >>> index = xckpt.read_index("m.zt")  # doctest: +SKIP
    >>> index["lm_head"].shape  # doctest: +SKIP
    (32000, 4096)
    """

    format: str
    version: str
    tensors: Mapping[str, Tensor]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    nbytes: int = 0
    shards: Mapping[str, Shard] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    arrangement: Arrangement = field(default_factory=Arrangement)
    attr_types: Mapping[str, str] = field(default_factory=dict)
    files: FileSet | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def shared(self) -> dict[str, str]:
        """Tensors whose data are those of one before them, such as tied weights, by its name."""
        first: dict[tuple[Any, ...], str] = {}
        found = {}
        for name, tensor in self.tensors.items():
            part = tensor.parts.get("data")
            if part is not None and part.nbytes and part.inline is None:
                owner = first.setdefault((part.offset, part.nbytes, part.shard, part.skip), name)
                if owner is not name:
                    found[name] = owner
        return found

    def __repr__(self) -> str:
        render = _renderers.get("text")
        return f"<Index of {self.source!r}>" if render is None else render(self)

    def _repr_html_(self) -> str:
        render = _renderers.get("html")
        return escape(repr(self)) if render is None else render(self)


_renderers: dict[str, Callable[[Index], str]] = {}


def show_indexes_with(*, text: Callable[[Index], str], html: Callable[[Index], str]) -> None:
    """Register the functions that show an Index, as this module knows of no room above it."""
    _renderers.update(text=text, html=html)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the cyclic garbage collector out while many objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # What was made stays: it becomes old at once, without a look through all of it.
            if gc.get_count()[0] > _MANY_OBJECTS and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
