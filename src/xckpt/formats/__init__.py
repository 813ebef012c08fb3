"""Formats: one object each, that reads and writes, and the registry that picks one by content.

To add a format, write a subclass of `Format` in a module that has its name, and name the class and
the endings of its files in the registry below. A format is pure: from bytes to an `Index`, and from
a `Draft` to a `Plan`, with no arrays, files or xarray. What several need is in `xckpt.formats.kit`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypedDict

from xckpt.errors import FormatError, UnsupportedError
from xckpt.interrupts import uninterrupted

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping

    from xckpt.formats.plan import Draft, Plan, WantedTensor
    from xckpt.index import Index

__all__ = [
    "HEAD_BYTES",
    "Can",
    "Format",
    "FormatOptions",
    "Readable",
    "advise",
    "class_name",
    "detect",
    "folder_marks",
    "get",
    "names",
    "recognized",
    "suffixes",
    "writable",
]

# The registry: the class of each format, in the module of the same name in lower case, and how its
# file names end, in lower case. The name of the module is that of the format and of its engine.
_REGISTRY = {
    "Burnpack": (".bpk",),
    "Gguf": (".gguf",),
    "Gptrs": (".bin", ".ten", ".gptrs"),
    "Mlcp": (".checkpoint", ".metadata.json"),
    "Npz": (".npz", ".npy"),
    "Primitiv": (".primitiv", ".model", ".optimizer", ".param"),
    "Safetensors": (".safetensors",),
    "Torch": (".pt", ".pth", ".ckpt", ".bin"),
    "ZTensor": (".zt",),
}
_CLASSES = {title.lower(): title for title in _REGISTRY}

HEAD_BYTES = 512
_ZIP_HEADER, _ZIP_CONTENT = 30, 16


class Readable(Protocol):
    """What a format reads from."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return exactly `nbytes` bytes, or raise `FormatError` where they are not in the file."""

    def sibling(self, name: str) -> Readable:
        """Open a file in the same folder, or raise `FileNotFoundError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Can:
    """What a file of a format can hold; `xckpt.save` brings tensors into such a form.

    Parameters
    ----------
    types : tuple of str
        Element types, best first; `Format.plan` may refuse some for some options. By default all
        of `Format.types`; a format that has none is only read.
    layouts : tuple of str
        Layouts of tensors; see `xckpt.index.Tensor`.
    compressions : tuple of str
        Encodings of parts, the first in place of those of other formats.
    digests : tuple of str
        Digest algorithms of parts, the first in place of those of other formats.
    orders : tuple of {"C", "F"}
        Memory orders of dense data.
    tensor_attrs, file_attrs : tuple of str or None
        Names of the attributes that are stored; None is any. Those of the file may be given by a
        pattern instead, which is that of whole names.
    stated_attrs : tuple of str
        Those of the file or of tensors that `Format.read` may make of something else, besides
        names that are listed above: an attribute that says otherwise does not come back.
    arrangement : bool
        Whether there is room for texts: which tensors are coordinates, and attributes of tensors
        that have no other place; see `xckpt.formats.kit.arrangement_texts`.
    """

    types: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("dense",)
    compressions: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    orders: tuple[Literal["C", "F"], ...] = ("C",)
    tensor_attrs: tuple[str, ...] | None = ()
    file_attrs: tuple[str, ...] | re.Pattern[str] | None = ()
    stated_attrs: tuple[str, ...] = ()
    arrangement: bool = False


class Format:
    """A file format: what its files are called and can hold, how they are read and written.

    The keyword-only parameters of `read` and `plan` are options of the format's own. Those of
    `read` are keywords of its engine, and their descriptions in its docstring are the engine's.

    Attributes
    ----------
    name : str
        Name of the format, also of its xarray engine.
    description : str
        What its files are, in a few words.
    shared_suffixes : tuple of str
        Those of `suffixes` that other programs use too: they do not mark a remote file as of it.
    folder_marks : tuple of str
        Names of files that make a folder a checkpoint of it, and are what `read` gets then.
    types : mapping of object to str
        How a file spells element types, and their names in `xckpt.elements.ELEMENT_TYPES`.
    spelled : mapping of str to object
        The same the other way round; of several spellings the first.
    can : Can
        What is written.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    shared_suffixes: ClassVar[tuple[str, ...]] = ()
    folder_marks: ClassVar[tuple[str, ...]] = ()
    types: ClassVar[Mapping[Any, str]] = {}
    spelled: ClassVar[Mapping[str, Any]] = {}
    can: ClassVar[Can] = Can()

    def __init_subclass__(cls) -> None:
        cls.spelled = {dtype: spelled for spelled, dtype in reversed([*cls.types.items()])}
        if "can" in cls.__dict__ and not cls.can.types:
            cls.can = replace(cls.can, types=tuple(dict.fromkeys(cls.types.values())))

    @property
    def suffixes(self) -> tuple[str, ...]:
        """How its file names end, for messages and for writing: as the registry says."""
        return suffixes(self.name)

    @property
    def open_options(self) -> Mapping[str, Parameter]:
        """The keywords of `read`."""
        return _keywords(self.read)

    @property
    def write_options(self) -> Mapping[str, Parameter]:
        """The keywords of `plan`."""
        return _keywords(self.plan)

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Whether a file is of this format; damaged ones too, so that `read` says what is wrong.

        Parameters
        ----------
        head : bytes
            The first bytes of the file, at most `HEAD_BYTES`; of a zip archive more where the name
            of its first member is longer.
        size : int
            Size of the file in bytes.
        name : str
            Its path or URL. The content decides wherever it can.

        Returns
        -------
        bool
            Whether `read` is the right reader.
        """
        raise NotImplementedError

    def read(self, source: Readable, *args: Any, **options: Any) -> Index:
        """Read what a file holds: headers, never the data of a tensor.

        Parameters
        ----------
        source : Readable
            The file. It is hostile: each count, length and offset is checked against what is left
            before anything is allocated or repeated that often.
        **options
            The format's own, keyword-only and with defaults.

        Returns
        -------
        Index
            Tensors in file order. One that cannot be read while the others can has a `problem`.
            Data in other files are parts with a `shard`, which `Index.shards` tells where to find.

        Raises
        ------
        FormatError
            If the file breaks a rule; it names the rule and the offset.
        UnsupportedError
            If it uses a feature that is not read.
        """
        raise NotImplementedError

    def plan(self, draft: Draft, *args: Any, **options: Any) -> Plan:
        """Lay a file out, from no array: then ``read(plan(draft))`` gives the same tensors.

        Parameters
        ----------
        draft : Draft
            What is to be written. All of it is what `can` allows.
        **options
            The format's own, keyword-only and with defaults.

        Returns
        -------
        Plan
            Data are little-endian. Where the part of an extent has another element type than the
            draft has (indices of sparse tensors), they are cast to it.

        Raises
        ------
        UnsupportedError
            If something cannot be represented; it names the tensor and says what to do.
        ValueError, TypeError
            If an option is wrong.
        """
        raise NotImplementedError

    @property
    def own_suffixes(self) -> tuple[str, ...]:
        """The suffixes that only files of this format have."""
        return tuple(each for each in self.suffixes if each not in self.shared_suffixes)

    def can_in(self, path: str) -> Can:
        """Return what a file of some name can hold.

        Parameters
        ----------
        path : str
            Where it is to be.

        Returns
        -------
        Can
            By default `can`.
        """
        return self.can

    def check(self, draft: Draft) -> None:
        """Check that a draft has only what `can` names; for the beginning of `plan`.

        Parameters
        ----------
        draft : Draft
            What is to be written.

        Raises
        ------
        UnsupportedError
            If a tensor has another layout, element type or memory order.
        """
        for tensor in draft.tensors.values():
            if tensor.layout not in self.can.layouts:
                rule, reason = "Layout", f"{tensor.layout} tensors"
            elif tensor.layout == "dense" and tensor.dtype not in self.can.types:
                rule, reason = "DType", f"{tensor.dtype} elements"
            elif tensor.layout == "dense" and tensor.order not in self.can.orders:
                rule, reason = "Order", f"tensors in {tensor.order} order"
            else:
                continue
            reason += f" have no place in format {self.name!r}"
            hint = f"Convert it to a dense tensor of {', '.join(self.can.types)}, or leave it out"
            raise UnsupportedError(reason, tensor=tensor.name, rule=rule, hint=hint)

    def append(self, source: Readable, draft: Draft, *args: Any, **options: Any) -> Plan:
        """Lay out what makes a file hold more tensors.

        No byte of the old file is written to, so that cutting the file to its old size undoes what
        was not finished.

        Parameters
        ----------
        source : Readable
            The file.
        draft : Draft
            What is added, as for `plan`.
        **options
            As for `plan`, and ``replace``: whether tensors replace those of the same name.

        Returns
        -------
        Plan
            With all offsets after the end of the file.

        Raises
        ------
        UnsupportedError
            If files of the format cannot grow.
        """
        raise UnsupportedError(
            f"files of format {self.name!r} cannot grow",
            rule="Append",
            hint="Join the Datasets with .merge(...), and save that",
        )

    def module_axes(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> Mapping[str, tuple[str | None, ...]]:
        """Name axes within one module of a tree.

        Parameters
        ----------
        shapes : mapping of str to tuple of int
            Of its tensors, by their names in it.

        Returns
        -------
        mapping of str to tuple
            A name for each axis, or None, for some of the tensors.
        """
        return {}

    def is_inline(self, tensor: WantedTensor) -> bool:
        """Whether the value of a tensor is written before all data.

        Then `plan` needs it as the ``inline`` bytes of its part, and makes no extent for it.

        Parameters
        ----------
        tensor : WantedTensor
            Any that is to be written.

        Returns
        -------
        bool
            By default False.
        """
        return False


class FormatOptions(TypedDict, total=False):
    """Options of single formats; each is described with its format. Others are a `TypeError`."""

    alignment: int | None  # ztensor
    config: Any  # gptrs
    container: str | None  # gptrs
    data_type: str | None  # primitiv
    dialect: str  # burnpack
    ids: str | None  # gptrs
    kind: str | None  # gptrs
    long_names: bool  # gguf
    max_shard_size: int | str | None  # safetensors
    multi_shard: bool | None  # mlcp
    param_ids: str  # burnpack
    version: str  # ztensor


def _keywords(method: Callable[..., Any]) -> dict[str, Parameter]:
    parameters = signature(method).parameters
    return {name: each for name, each in parameters.items() if each.kind is Parameter.KEYWORD_ONLY}


def names() -> tuple[str, ...]:
    """Return the names of all formats."""
    return tuple(_CLASSES)


def class_name(name: str) -> str:
    """Return the name of a format's class, without loading it."""
    try:
        return _CLASSES[name]
    except KeyError:
        by_suffix = [known for known in names() if f".{name}" in suffixes(known)]
        alike = by_suffix or get_close_matches(str(name), names(), n=1)
        hint = f"did you mean {alike[0]!r}? Known" if alike else "known"
        raise ValueError(f"unknown format {name!r}; {hint} are: {', '.join(names())}") from None


def suffixes(name: str) -> tuple[str, ...]:
    """Return how the file names of a format end, without loading it."""
    return _REGISTRY[class_name(name)]


@cache
def get(name: str) -> Format:
    """Return a format by its name."""
    title = class_name(name)
    with uninterrupted():
        found: Format = getattr(import_module(f"{__name__}.{name}"), title)()
    return found


def folder_marks() -> tuple[str, ...]:
    """Return the names of files that make a folder a checkpoint."""
    return tuple([mark for name in names() for mark in get(name).folder_marks])


def writable(name: str) -> Format:
    """Return a format that is written, by its name."""
    found = get(name)
    if not found.can.types:
        written = ", ".join(known for known in names() if get(known).can.types)
        raise ValueError(f"format {name!r} is only read; written are: {written}")
    return found


def recognized(source: Readable) -> Format | None:
    """Return the format that a content is of, None if it is of none."""
    head, name = _head(source), source.name.partition("?")[0].lower()
    # First those whose files are called so: then the others need not be loaded.
    in_order = sorted(names(), key=lambda known: not name.endswith(suffixes(known)))
    found = map(get, in_order)
    return next((each for each in found if each.detect(head, source.size, source.name)), None)


def detect(source: Readable) -> Format:
    """Find the format of a file by its content."""
    found = recognized(source)
    if found is not None:
        return found
    head = _head(source)
    known = _foreign(head, source.size, source.name)
    reason = f"the file begins {head[:16]!r}" if known is None else f"it is {known[0]}"
    raise FormatError(
        f"not a checkpoint of a known format; {reason}",
        path=source.name,
        offset=0,
        hint=f"Formats that are read: {', '.join(names())}" if known is None else known[1],
    )


def advise(error: FormatError, format: str, source: Readable) -> None:
    """Say in an error what a file is that is not of the format that was asked for."""
    head = _head(source)
    if get(format).detect(head, source.size, source.name):
        return
    found = recognized(source)
    if found is not None:
        error.hint = f"It is a {found.name} file: open it with engine={found.name!r}"
        return
    known = _foreign(head, source.size, source.name)
    if known is not None:
        error.reason, error.hint = f"it is {known[0]}", known[1]


def is_foreign(source: Readable) -> bool:
    """Return whether a file is of no format, and it is known what it is instead."""
    known = _foreign(_head(source), source.size, source.name)
    return known is not None and recognized(source) is None


def _head(source: Readable) -> bytes:
    """Read the first bytes; of a zip archive as many as its first member begins with."""
    head = bytes(source.read(0, min(HEAD_BYTES, source.size)))
    if head.startswith(b"PK\3\4"):
        # The lengths of the name and of what is between it and the content.
        name, extra = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
        nbytes = min(_ZIP_HEADER + name + extra + _ZIP_CONTENT, source.size)
        if nbytes > len(head):
            head = bytes(source.read(0, nbytes))
    return head


# --- files that are no checkpoint ----------------------------------------------------------------

_UNZIP = "Decompress it first"
_OLD_GGML = "Convert it with convert_llama_ggml_to_gguf.py of llama.cpp"
_PICKLE = (
    "Of pickles xckpt reads those of torch.save, and runs none: load it where it was written, and "
    "save its arrays with numpy.savez"
)

# The first bytes, what they tell, and what to do.
_BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a pointer of Git LFS, not the file that it stands for",
        "Run `git lfs pull` in its repository",
    ),
    (b"lmgg", "a GGML file, older than GGUF", _OLD_GGML),
    (b"fmgg", "a GGMF file, older than GGUF", _OLD_GGML),
    (b"tjgg", "a GGJT file, older than GGUF", _OLD_GGML),
    (
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file (netCDF 4, Keras)",
        "Open it with engine='h5netcdf', or with h5py",
    ),
    (b"CDF\x01", "a netCDF 3 file", "Open it with engine='scipy'"),
    (b"CDF\x02", "a netCDF 3 file", "Open it with engine='scipy'"),
    (b"\x1f\x8b", "compressed by gzip", _UNZIP),
    (b"\xfd7zXZ\x00", "compressed by xz", _UNZIP),
    (b"BZh", "compressed by bzip2", _UNZIP),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNZIP),
)
_WEB_PAGES = (b"<!doctype html", b"<html", b"<?xml")


def _foreign(head: bytes, size: int, name: str) -> tuple[str, str] | None:
    """Return what a file is that begins with some bytes, and what to do; None if unknown."""
    for beginning, what, advice in _BEGINNINGS:
        if head.startswith(beginning):
            return what, advice
    if size == 0:
        return "empty", "Was it written, or copied, to its end?"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive without arrays of NumPy or PyTorch", "Extract it first"
    if head[:1] == b"\x80" and head[1:2] in {b"\x02", b"\x03", b"\x04", b"\x05"}:
        return "a pickle of Python, and not a checkpoint of PyTorch", _PICKLE
    if head[257:262] == b"ustar":
        return "a tar archive", "Extract it first"
    if name.partition("?")[0].lower().endswith(".onnx"):
        return "an ONNX model", "The package onnx reads it: onnx.load(path)"
    return _text(head.lstrip().lower())


def _text(head: bytes) -> tuple[str, str] | None:
    if head.startswith(_WEB_PAGES):
        return "a web page, as servers send for errors and logins", "Download the file again"
    if head.startswith(b"{") and b'"weight_map"' in head:
        return "an index of shards", "Give it a name that ends with .index.json"
    if head.startswith((b"{", b"[")):
        return "JSON without tensors", "Is it the configuration next to a checkpoint?"
    return None
