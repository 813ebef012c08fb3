"""A description of a file that is the same for all formats: `Index`, `Tensor`, `Part`.

A format module turns bytes into an `Index`; the rest of the package uses the Index and no format.
All three types are immutable, and pickle to about the size of their names.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, make_dataclass, replace
from difflib import get_close_matches
from functools import wraps
from math import prod
from posixpath import commonprefix
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard, TypeVar, cast

from xckpt.errors import Cause, CheckpointError, causes_of, some

if TYPE_CHECKING:
    from xckpt.opening.checkpoint import CheckpointFiles

T = TypeVar("T")

__all__ = [
    "DEEPEST_ATTRS",
    "Arrangement",
    "CodeFinding",
    "Codebook",
    "FileSet",
    "Index",
    "Part",
    "Quantization",
    "Shard",
    "StoredList",
    "Tensor",
    "code_findings",
    "is_file_name",
    "is_json",
    "paused_collector",
    "runs_of",
    "show_indexes_with",
]

# Levels of lists and dicts in an attribute that is stored as JSON.
DEEPEST_ATTRS = 32
# With more new objects than this, a run of the garbage collector takes noticeable time.
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


class CodeFinding(NamedTuple):
    """Code that other programs import or run when they load a file."""

    severity: Literal["error", "warning"]
    rule: str  # "executes" or "imports"
    message: str
    names: tuple[str, ...]


def code_findings(executes: Sequence[str], imports: Sequence[str]) -> tuple[CodeFinding, ...]:
    """Describe the code in the fields `executes` and `imports` of an Index, errors first."""
    findings = []
    if executes:
        reason = (
            f"loading it elsewhere runs or imports {some(executes, 'functions')}: "
            "load it only where code of files is refused, as by torch.load(weights_only=True)"
        )
        findings.append(CodeFinding("error", "executes", reason, tuple(executes)))
    if imports:
        reason = (
            f"it has objects of {some(imports, 'classes')}, which torch.load(weights_only=True) "
            "refuses; unpickling imports them"
        )
        findings.append(CodeFinding("warning", "imports", reason, tuple(imports)))
    return tuple(findings)


def _set_quickly(cls: type[T]) -> type[T]:
    """Make objects of a frozen dataclass with slots in less than half the time."""
    # `__init__` of a frozen class calls a function for each field. Here an object gets its fields
    # while it is one of a class that is not frozen.
    names: list[Any] = [(f.name, f.type, copy(f)) for f in fields(cast("Any", cls))]
    unfrozen: Any = make_dataclass(cls.__name__, names, slots=True)
    set_attribute, set_fields = object.__setattr__, unfrozen.__init__

    @wraps(cls.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        set_attribute(self, "__class__", unfrozen)
        set_fields(self, *args, **kwargs)
        self.__class__ = cls

    cast("Any", cls).__init__ = init
    return cls


@_set_quickly
@dataclass(frozen=True, slots=True)
class Part:
    """One array of a tensor: a contiguous byte range of a file.

    Parameters
    ----------
    dtype : str
        Element type, a key of `xckpt.elements.ELEMENT_TYPES`.
    shape : tuple of int or None
        Shape of the array; None if the length is unknown before decoding (a compressed list).
    offset : int
        First byte, absolute in the file.
    nbytes : int
        Stored size in bytes (the compressed size of a compressed part).
    encoding : {None, "zstd", "zstd-seekable", "deflate"} or str
        Compression of the bytes, by a name of `xckpt.storage.encodings`; None for raw bytes.
    decoded_nbytes : int or None
        Size in bytes after decoding, if the file states it.
    digest : str or None
        Checksum as ``algorithm:value``, as the file spells it.
    digest_of : {"stored", "decoded"}
        Whether the digest covers the bytes before or after decoding.
    byteorder : {"little", "big"}
        Byte order of the elements.
    shard : str or None
        Name of the file of a sharded checkpoint that holds the bytes; None is the file itself.
    inline : bytes or None
        The bytes themselves if they are not a range of the file, such as a number in a header.
    skip : int or None
        Number of decoded bytes before the first byte of this part, if several parts are compressed
        together; None if the part is all of the decoded bytes.
    strides : tuple of int or None
        Distance between elements along each axis, counted in elements; 0 along an axis that repeats
        one element. None if the elements are in the order of the tensor. With strides, the byte
        range extends from the first element to the last one, and elements of less than 8 bits have
        a byte each.
    inverted : bytes or None
        Bits of each element that are stored inverted, such as the sign of an imaginary part.
    origin : tuple of int or None
        Position of the first element in a chunked tensor.
    within : Part or None
        Longer byte range that begins with this part, if the file states a decoded size or a digest
        for the longer one; read by `verify`, and with ``verify=True``.

    Examples
    --------
    >>> part = xckpt.Part("float32", (2, 3), offset=64, nbytes=24)
    >>> part.offset + part.nbytes
    88
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
    """A scheme that decodes a quantised tensor: ``(code - zero) * scale + bias``.

    The parts are ``data`` (codes), ``scales``, and optionally ``zeros`` (zero points), ``biases``,
    ``index``, and ``global`` (a factor that all scales have in common). Scales, zero points and
    biases form a grid with one entry for each block of the tensor.

    Parameters
    ----------
    block : tuple of int
        Extent of a block along each axis of the tensor; each block has one scale.
    code : str
        Element type of a code. Packed codes are ``"uint8"``, ``"int8"`` if they have a sign, or a
        small float.
    bits : int
        Bits of a code.
    word_bits : int
        Size in bits of the words that codes are packed into. Equal to `bits` if codes are not
        packed; the part ``data`` is then a dense array of the tensor's shape.
    axis : int
        Axis along which codes are packed; each line begins with a new word.
    msb_first : bool
        Whether the first code of a word is in its highest bits.
    zero : int or None
        Zero point of every code; None if the part ``zeros`` has the zero points.
    packed_zeros : bool
        Whether stored zero points are packed in the same way as the codes.
    scale_axes : tuple of int
        Order of the axes of the stored scale grid, slowest first.
    global_scale : bool
        Whether every scale is first multiplied with the number in the part ``global``.
    global_divides : bool
        Whether every scale is divided by that number instead.
    axes : tuple of int
        Order of the axes of the stored codes, slowest first; the tensor's order by default.
    stream : bool
        Whether the packed codes are a continuous stream of bits, in which a code may begin in one
        word and end in the next.
    order : tuple of int
        Position in a word, counted from its lowest bits, of the first code, the second, and so on;
        in order by default. Packed zero points have the same order.
    planes : tuple of int
        Widths in bits of the pieces of a code, lowest bits first, if pieces are stored in separate
        words: 32 codes take as many words as a code has bits. By default a code is one piece.
    zero_axis : int or None
        Axis of the grid along which zero points are packed, if it is not `axis`.
    zero_add : int
        Number added to stored zero points; to packed ones modulo two to the power of `bits`.
    stored_grid : tuple of int
        Extents of the stored grid, if it has more entries than there are blocks.
    index_axis : int or None
        Axis whose positions the part ``index`` assigns to entries of the grid; by default the
        entries follow from `block`. Unless a tensor is strict, an index of only -1 is ignored.
    reciprocal : bool
        Whether the stored scales are one divided by the scale.
    biases : bool
        Whether the part ``biases`` has a number for each block, which is added last.
    factor : float or None
        Factor of all values, applied after the scale.
    wide : bool
        Whether the product with a scale is computed in float64 and then rounded to float32.
        Zero points are subtracted in float32 either way.
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
    """A scheme that looks up codes of four bits in a table: ``table[code] * scale``.

    Elements are in C order, the first one of each byte in its high bits, and blocks are consecutive
    elements regardless of axes. The parts are ``data``, ``table``, and ``scales`` with one number
    for each block. Scales may be codes themselves, decoded with the parts ``scale_table`` and
    ``scale_scales``: ``scale_table[code] * scale_scale + offset``.

    Parameters
    ----------
    block : int
        Number of elements in a block.
    scale_block : int or None
        Number of scales in a block of scales, if scales are codes.
    offset : float
        Number added to scales that are codes.
    """

    block: int
    scale_block: int | None = None
    offset: float = 0.0


@_set_quickly
@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint: its name, type and shape, and the parts that store it.

    Parameters
    ----------
    name : str
        Name, exactly as in the file.
    dtype : str
        Element type of the stored values: a key of `xckpt.elements.ELEMENT_TYPES`, or of
        `xckpt.elements.BLOCK_TYPES` if `layout` is ``"blocks"``. A type that xckpt does not know
        has the name that the file uses, and a `problem`.
    shape : tuple of int
        Logical shape.
    parts : mapping of str to Part
        Stored arrays by role: ``data`` for dense tensors; ``values, indices, indptr`` for CSR, CSC,
        BSR and BSC; ``values, coords`` for COO and hybrid ones; ``data, scales, zeros`` for
        quantised ones; chunks with an `origin` for chunked ones; ``real, imag`` for complex numbers
        without a numpy type; otherwise the names that the file uses.
        In the layout ``"blocks"``, ``data`` has type uint8, and its last axis has the bytes of a
        row of the tensor.
    layout : {"dense", "chunked", "sparse_csr", "sparse_csc", "sparse_coo", "sparse_bsr", \
"sparse_bsc", "sparse_hybrid", "quantized", "blocks", "structural"}
        How the parts represent the tensor. In BSR and BSC each value is a matrix, and the shape is
        a multiple of its shape; in hybrid tensors each value of a COO is an array along the last
        axes. Only the parts of a structural tensor are variables.
    order : {"C", "F"}
        Memory order of dense data: whether the last or the first axis is contiguous.
    attrs : mapping
        Attributes of the tensor in the file.
    dims : tuple of (str or None), or None
        Names of axes from the file or from its kind of model; None without names.
    quantization : Quantization, Codebook or None
        Scheme that decodes the parts, if `layout` is ``"quantized"``.
    strict : bool
        Whether the format forbids values that other formats tolerate: booleans other than 0
        and 1, unsorted or repeated sparse indices, bits set in padding.
    problem : CheckpointError or None
        Error to raise when the values are computed, if only this tensor cannot be read.
    path : tuple of str or None
        Position in the tree of modules, the tensor's own name last; None if the dots of its name
        separate the modules.
    stored : mapping of str to Tensor, or None
        Tensors of the file that represent this one, by role.
    method : str
        Method of quantisation that the model declares, such as ``"gptq"``; empty without a
        declaration.
    declared : mapping or None
        Facts that the file states about the purpose of the tensor, such as the operators of a graph
        that use it, or the class of its layer; see `xckpt.structure.declared`. None without facts.

    Examples
    --------
    >>> part = xckpt.Part("bfloat16", (2, 3), offset=64, nbytes=12)
    >>> tensor = xckpt.Tensor("lm_head", "bfloat16", (2, 3), {"data": part})
    >>> tensor.size, tensor.nbytes
    (6, 12)
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
    method: str = ""
    declared: Mapping[str, Any] | None = None

    @property
    def scheme(self) -> str:
        """Method, bits and group of a quantised tensor, such as ``"gptq 4-bit, group 64"``.

        Empty for other tensors.
        """
        quantization = self.quantization
        if self.layout != "quantized" or quantization is None:
            return ""
        if isinstance(quantization, Codebook):
            return f"{self.method} 4-bit, group {quantization.block}".lstrip()
        code = quantization.code
        kind = code if code.startswith("float") else f"{quantization.bits}-bit"
        return f"{self.method} {kind}, {_group_text(quantization.block, self.shape)}".lstrip()

    @property
    def facts(self) -> Mapping[str, Any] | None:
        """The facts that the file states about the tensor, including the names of its axes."""
        if self.dims is None:
            return self.declared
        return {**(self.declared or {}), "axes": self.dims}

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
        """Return the tensor under another name, with its stored tensors renamed likewise.

        If ``a.weight`` becomes ``b.weight``, its ``a.qweight`` becomes ``b.qweight``. `stored` is
        dropped if the new name has another ending.
        """
        if self.stored is None or name == self.name:
            return replace(self, name=name)
        stored = {}
        for role, tensor in self.stored.items():
            prefix = commonprefix([self.name, tensor.name])
            ending = self.name.removeprefix(prefix)
            if not name.endswith(ending):
                return replace(self, name=name, stored=None)
            new_prefix = name.removesuffix(ending)
            stored[role] = replace(tensor, name=new_prefix + tensor.name.removeprefix(prefix))
        return replace(self, name=name, stored=stored)


def _group_text(block: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Describe which elements have one scale."""
    if block == shape:
        return "per tensor"
    grouped = [(extent, size) for extent, size in zip(block, shape, strict=True) if extent > 1]
    if all(extent == size for extent, size in grouped):
        return "per channel"
    if len(grouped) == 1:
        return f"group {grouped[0][0]}"
    return f"blocks of {'x'.join([str(extent) for extent, _ in grouped])}"


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
        Paths to try, best first, relative to the folder of the referring file.
    is_confined : bool
        Whether a link that leads out of the folder is refused, unless the referring file is such a
        link too: for files whose contents nothing checks.
    """

    size: int
    digest: str | None
    candidates: tuple[str, ...]
    is_confined: bool = False


@dataclass(frozen=True, slots=True)
class StoredList:
    """A list among the attributes that is read from the file on demand.

    Parameters
    ----------
    part : Part
        Numbers of the list, or the bytes of its texts.
    count : int
        Number of entries.
    length_nbytes : int
        Size in bytes of the length before each text, in the part's byte order; 0 for numbers.
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
    """The list of files, in one of the files of a split checkpoint; each is complete by itself.

    Parameters
    ----------
    names : tuple of str
        Names of all files, in order; they are in the same folder.
    position : int
        Position of this file in `names`.
    offset : int
        Byte offset of the statement in the file, for messages.
    count : int or None
        Number of tensors in all files, if the file states it.
    """

    names: tuple[str, ...]
    position: int
    offset: int
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Coordinates, order and tree of the object that was saved, beyond its tensors and axes.

    Parameters
    ----------
    coords : tuple of str
        Names of the tensors that are coordinates.
    order : tuple of str
        Names of all tensors in the order of the variables; empty if that is the order of the file.
    modules : mapping of str to mapping
        Attributes of the nodes of a tree, by path, without its root. A node without tensors has an
        entry even if it has no attributes.
    """

    coords: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, names: Collection[str]) -> Arrangement:
        """Return the arrangement of a selection of tensors."""
        coords = tuple([name for name in self.coords if name in names])
        return Arrangement(coords, tuple([n for n in self.order if n in names]), self.modules)

    def renamed(self, names: Mapping[str, str]) -> Arrangement:
        """Return the arrangement after tensors are renamed, from old names to new ones."""
        coords = tuple([names.get(name, name) for name in self.coords])
        order = tuple([names.get(name, name) for name in self.order])
        return Arrangement(coords, order, self.modules)

    def grown(self, more: Arrangement, names: Collection[str]) -> Arrangement:
        """Return the arrangement after tensors are added, or replace others of the same name."""
        coords = [name for name in self.coords if name not in names]
        order = [name for name in self.order if name not in names]
        order += names if order else ()
        return Arrangement((*coords, *more.coords), tuple(order), {**self.modules, **more.modules})


# Drives, streams and patterns of Windows, control characters, and lone surrogates that are not a
# byte.
_UNSAFE_IN_NAMES = re.compile(r'[\x00-\x1f\\/:*?"<>|\ud800-\udc7f\udd00-\udfff]')


def is_file_name(name: object) -> TypeGuard[str]:
    """Return whether a value from a file is a text that names a file in the same folder."""
    if not isinstance(name, str) or name in {"", ".", ".."}:
        return False
    return _UNSAFE_IN_NAMES.search(name) is None


def is_json(value: Any, levels: int = DEEPEST_ATTRS) -> bool:
    """Return whether an attribute is the same after a round trip through JSON.

    True for texts, numbers, booleans, None, and lists and dicts of them, at most `levels` deep.
    """
    kind: Any = type(value)
    if kind is str:
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 64)
    if kind in {list, tuple}:  # a tuple comes back as a list
        return levels > 0 and all(is_json(entry, levels - 1) for entry in value)
    if kind is dict:
        keys = all(type(key) is str and is_json(key) for key in value)
        return levels > 0 and keys and all(is_json(entry, levels - 1) for entry in value.values())
    return kind in {bool, float} or value is None


# Names that people try, by the attribute of an Index.
_INSTEAD = {
    "attrs": "metadata meta attributes config",
    "tensors": "names tensor_names shapes dtypes parameters params state_dict",
    "nbytes": "size file_size",
    "source": "path filename file",
}


@dataclass(frozen=True, slots=True, repr=False)
class Index(Mapping[str, "Tensor"]):
    """Contents of a file without its data: tensors, attributes, and the position of every byte.

    An Index is a mapping of names to tensors, in file order.

    Parameters
    ----------
    format : str
        Name of the format, also the name of the xarray engine.
    version : str
        Version of the format, as stated in the file.
    tensors : mapping of str to Tensor
        Tensors by name, in file order.
    attrs : mapping
        Attributes of the file: plain Python types, and long lists as `StoredList`.
    source : str
        Path or URL of the file.
    nbytes : int
        Size of the file in bytes.
    shards : mapping of str to Shard
        Other files that hold parts, by the name that `Part.shard` uses.
    warnings : tuple of str
        Irregularities that the specification tolerates with a warning.
    arrangement : Arrangement
        Coordinates, order and tree of the object that was saved.
    attr_types : mapping of str to str
        Element types of numbers and lists among the attributes, if they do not follow from the
        values; ``"text"`` for an empty list of texts.
    files : FileSet or None
        List of all files of a checkpoint that is split into several; None for a single file.
    checkpoint : CheckpointFiles or None
        Which files are the checkpoint, what is missing, and what was left alone in their folder.
        None in the index of a single file that a format has read.
    executes : tuple of str
        Code that runs when another program loads the file, and that weights do not need: calls of a
        pickle, such as ``"posix.system"``, lambdas of a Keras model, expressions of a chat template
        that do more than format. Nothing in a file is executed here.
    imports : tuple of str
        Other classes and functions of packages that a pickle names, such as those of the modules of
        a model; ``torch.load(weights_only=True)`` refuses them.

    Examples
    --------
    >>> index = xckpt.read_index("m.zt")
    >>> index["lm_head.weight"].dtype
    'float16'
    """

    format: str
    version: str
    # Merging files replaces the parts of tensors: no other field may have a copy of a tensor.
    tensors: Mapping[str, Tensor]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    nbytes: int = 0
    shards: Mapping[str, Shard] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    arrangement: Arrangement = field(default_factory=Arrangement)
    attr_types: Mapping[str, str] = field(default_factory=dict)
    files: FileSet | None = None
    checkpoint: CheckpointFiles | None = None
    executes: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    _computed: dict[Any, Any] = field(default_factory=dict, init=False, compare=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def unreadable(self, names: Iterable[str] | None = None) -> list[Cause]:
        """Return why tensors cannot be read, and which; empty if all can be read.

        Parameters
        ----------
        names : iterable of str, optional
            Tensors to consider; all by default.

        Returns
        -------
        list of xckpt.errors.Cause
            One entry for each cause, such as a missing file, with the names of its tensors.

        Examples
        --------
        >>> xckpt.read_index("m.zt").unreadable()
        []
        """
        tensors = self.tensors
        chosen = tensors.values() if names is None else [tensors[name] for name in names]
        return causes_of([(t.name, t.problem) for t in chosen if t.problem is not None])

    @property
    def risks(self) -> tuple[CodeFinding, ...]:
        """Code that other programs import or run when they load the file."""
        return code_findings(self.executes, self.imports)

    @property
    def facts(self) -> tuple[str, ...]:
        """Sentences about the files of the checkpoint that are no warnings."""
        return () if self.checkpoint is None else self.checkpoint.facts

    def once(self, compute: Callable[[Index], T]) -> T:
        """Return what a function computes from the Index; later calls return the same result."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        result: T = self._computed[compute]
        return result

    def __getstate__(self) -> list[Any]:
        return [
            {} if field.name == "_computed" else getattr(self, field.name) for field in fields(self)
        ]

    @property
    def shared(self) -> dict[str, str]:
        """Names of tensors that share the data of an earlier tensor, such as tied weights.

        The values are the names of the earlier tensors.
        """
        return self.once(_owners_of_shared_data)

    if not TYPE_CHECKING:  # or a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            attributes = [field.name for field in fields(self) if field.init]
            similar = [new for new, names in _INSTEAD.items() if name in names.split()]
            similar += get_close_matches(name, attributes, 1)
            hint = f"did you mean .{similar[0]}?" if similar else f"it has {', '.join(attributes)}"
            raise AttributeError(f"an Index has no attribute {name!r}; {hint}")

    def __repr__(self) -> str:
        return repr(_views[0](self)) if _views else f"<Index of {self.source!r}>"

    def _repr_html_(self) -> str | None:
        html: str | None = _views[0](self)._repr_html_() if _views else None
        return html


def _owners_of_shared_data(index: Index) -> dict[str, str]:
    first: dict[tuple[Any, ...], str] = {}
    owners = {}
    for name, tensor in index.tensors.items():
        part = tensor.parts.get("data")
        place: tuple[Any, ...]
        if part is not None and part.nbytes and part.inline is None:
            place = (part.offset, part.nbytes, part.shard, part.skip)
        elif tensor.layout == "chunked":
            parts = tensor.parts.values()
            place = tuple([(part.offset, part.nbytes, part.shard) for part in parts])
        else:
            continue
        owner = first.setdefault(place, name)
        if owner is not name:
            owners[name] = owner
    return owners


_views: list[Callable[[Index], Any]] = []


def show_indexes_with(view: Callable[[Index], Any]) -> None:
    """Register the function that returns the view of an Index; its room imports this module."""
    _views[:] = [view]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the cyclic garbage collector while many objects are created."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # The new objects stay alive. Freezing and unfreezing moves them to the oldest
            # generation without traversing them.
            if gc.get_count()[0] > _MANY_OBJECTS and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def strides_of(shape: Sequence[int], order: str = "C") -> tuple[int, ...]:
    """Return the strides of an array without gaps, counted in elements."""
    is_fortran = order == "F"
    return tuple(
        [prod(shape[:axis] if is_fortran else shape[axis + 1 :]) for axis in range(len(shape))]
    )


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first one of a strided array to the last one."""
    return 1 + sum([(n - 1) * step for n, step in zip(shape, strides, strict=True)])


def runs_of(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Return keys of the blocks that make up a range of elements in C order."""
    if len(shape) < 2:
        yield (slice(start, stop, 1),) * len(shape)
        return
    length, inner = shape[0], shape[1:]
    row = prod(inner)
    first, last = start // row, (stop - 1) // row
    if first == last:
        for key in runs_of(inner, start - first * row, stop - first * row):
            yield (slice(first, first + 1, 1), *key)
        return
    if start % row:
        yield from runs_of(shape, start, (first + 1) * row)
        first += 1
    end = min(stop // row, length)
    if first < end:
        yield (slice(first, end, 1), *(slice(0, n, 1) for n in inner))
    if stop % row:
        yield from runs_of(shape, end * row, stop)
