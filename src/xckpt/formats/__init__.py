"""File formats, and the registry that detects them by content.

A format is one object that reads and writes. It is pure: it turns bytes into an `Index`, and a
`Draft` into a `Plan`, without arrays, files or xarray. It may import `xckpt.index`, the element
types, the errors, and `xckpt.formats.kit`, which has helpers for all formats.

To add a format, subclass `Format` in a module of its name, and add the class and the suffixes of
its files to the registry below. Read `xckpt.formats.safetensors` first; it is a good example. Other
packages add formats by the entry-point group ``xckpt.formats``, with the same contract: see
docs/adding-a-format.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

from xckpt.errors import FormatError, UnsupportedError, shown, warn
from xckpt.readable import Readable

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterator, Mapping

    from xckpt.formats.foreign import Foreign
    from xckpt.formats.plan import Draft, Plan, WantedTensor
    from xckpt.index import Index

__all__ = [
    "CONTRACT",
    "HEAD_BYTES",
    "Can",
    "Format",
    "FormatOptions",
    "FormatReadOptions",
    "Readable",
    "advise",
    "cut_piece",
    "detect",
    "folder_marks",
    "foreign_folder",
    "get",
    "is_foreign",
    "loaded",
    "names",
    "recognized",
    "states_its_files",
    "suffixes",
    "writable",
]

# The registry: the class of each format and the suffixes of its files. The lower-case name of the
# class is the name of its module, of the format and of its engine. Suffixes are in lower case; one
# that begins with a slash is a whole name.
_REGISTRY = {
    "Burnpack": (".bpk",),
    "Flax": (".msgpack",),
    "Gguf": (".gguf",),
    "Gptrs": (".bin", ".ten", ".gptrs"),
    "Keras": (".keras", ".weights.h5", ".weights.json", ".h5", ".hdf5"),
    "Mlcp": (".checkpoint", ".metadata.json"),
    "Npz": (".npz", ".npy", ".eqx"),
    "Onnx": (".onnx",),
    "Orbax": (".ocdbt", "/checkpoint"),
    "Primitiv": (".primitiv", ".model", ".optimizer", ".param"),
    "Safetensors": (".safetensors",),
    "Torch": (".pt", ".pth", ".ckpt", ".bin", ".pth.tar"),
    "ZTensor": (".zt",),
}
_CLASSES = {title.lower(): title for title in _REGISTRY}

#: Version of the contract between xckpt and formats of other packages; see `Format.contract`.
CONTRACT = 1

HEAD_BYTES = 1024
_ZIP_HEADER, _ZIP_CONTENT = 30, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Can:
    """Capabilities of a format: the tensors and attributes that its files can store.

    `xckpt.save` converts tensors to a supported form.

    Parameters
    ----------
    types : tuple of str
        Element types, best first; all of `Format.types` by default. `Format.plan` may refuse a
        type for certain options. A format that sets no `can` is read-only.
    scalar_types : tuple of str
        Element types of tensors without axes; all of `types` by default.
    layouts : tuple of str
        Layouts of tensors; see `xckpt.index.Tensor`.
    compressions : tuple of str
        Encodings of parts. The first one replaces encodings that the format lacks.
    digests : tuple of str
        Digest algorithms of parts. The first one replaces algorithms that the format lacks.
    orders : tuple of {"C", "F"}
        Memory orders of dense data.
    tensor_attrs, file_attrs : tuple of str or None
        Names of the attributes that are stored; None stands for all names. `file_attrs` may also be
        a pattern that matches whole names.
    stated_attrs : tuple of str
        Names of further attributes, of the file or of tensors, that `Format.read` derives from
        other fields of the file; other values for these do not survive a round trip.
    arrangement : bool
        Whether files have room for the texts of `xckpt.formats.kit.arrangement_texts`: coordinates,
        and attributes of tensors that have no other place.
    """

    types: tuple[str, ...] = ()
    scalar_types: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("dense",)
    compressions: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    orders: tuple[Literal["C", "F"], ...] = ("C",)
    tensor_attrs: tuple[str, ...] | None = ()
    file_attrs: tuple[str, ...] | re.Pattern[str] | None = ()
    stated_attrs: tuple[str, ...] = ()
    arrangement: bool = False

    def types_for(self, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Return the element types of tensors of a shape."""
        return self.types if shape else self.scalar_types or self.types


class Format:
    """A file format: its names, its capabilities, its reader and its writer.

    The keyword-only parameters of `read` and `plan` are options of the format. The options of
    `read` become keywords of its engine, with their descriptions from its docstring.

    Attributes
    ----------
    name : str
        Name of the format, also of its xarray engine.
    contract : int
        Version of this contract that a format of another package is written for: `CONTRACT` at the
        time of writing. Formats of other versions are not loaded.
    description : str
        Description of its files, in a few words.
    suffixes : tuple of str
        Suffixes of its files in lower case, the usual one first; those of the formats in this
        package are in the registry.
    shared_suffixes : tuple of str
        Suffixes that other programs use too; they do not identify a remote file.
    folder_marks : tuple of str
        Names of files that mark a folder as a checkpoint; `read_folder` gets the file of that name.
    states_its_files : bool
        Whether a file of several states so (`Index.files`), whatever numbers its name has.
    types : mapping of object to str
        Element types: from the spelling in a file to a key of `xckpt.elements.ELEMENT_TYPES`.
    spellings : mapping of str to object
        The reverse of `types`; the first of several spellings.
    can : Can
        Capabilities for writing.
    storage_attrs : tuple of str
        Names of attributes, of the file or of tensors, that state how it is stored and by which
        program, not what it contains; comparisons leave them out.
    """

    name: ClassVar[str]
    contract: ClassVar[int] = 0
    description: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    shared_suffixes: ClassVar[tuple[str, ...]] = ()
    folder_marks: ClassVar[tuple[str, ...]] = ()
    states_its_files: ClassVar[bool] = False
    types: ClassVar[Mapping[Any, str]] = {}
    spellings: ClassVar[Mapping[str, Any]] = {}
    can: ClassVar[Can] = Can()
    storage_attrs: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.suffixes = cls.suffixes or _REGISTRY.get(cls.__name__, ())
        cls.spellings = {dtype: spelled for spelled, dtype in reversed([*cls.types.items()])}
        if "can" in cls.__dict__ and not cls.can.types:
            cls.can = replace(cls.can, types=tuple(dict.fromkeys(cls.types.values())))

    @property
    def open_options(self) -> Mapping[str, Parameter]:
        """Keyword-only parameters of `read`."""
        return _keywords(self.read)

    @property
    def write_options(self) -> Mapping[str, Parameter]:
        """Keyword-only parameters of `plan`."""
        return _keywords(self.plan)

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file is of this format.

        True for damaged files as well, so that `read` can explain the damage.

        Parameters
        ----------
        head : bytes
            The first bytes of the file, at most `HEAD_BYTES`; more of a zip archive whose first
            member has a long name.
        size : int
            Size of the file in bytes.
        name : str
            Path or URL; only for formats that the content does not identify.
        """
        raise NotImplementedError

    def read(self, source: Readable, *args: Any, **options: Any) -> Index:
        """Read the headers of a file, never the data of a tensor.

        Parameters
        ----------
        source : Readable
            The file, which may be hostile: check every count, length and offset against the size of
            the file before allocating memory or looping.
        **options
            Options of the format, keyword-only and with defaults.

        Returns
        -------
        Index
            Tensors in file order. A tensor that cannot be read, while others can, has a `problem`.
            Parts in other files have a `shard`, and `Index.shards` has the paths of these files.

        Raises
        ------
        FormatError
            If the file breaks a rule; the error names the rule and the offset.
        UnsupportedError
            If the file uses an unsupported feature.
        """
        raise NotImplementedError

    def read_folder(self, source: Readable, *args: Any, **options: Any) -> Index:
        """Read a folder by the file that marks it; by default, as that file alone.

        Parameters
        ----------
        source : Readable
            The file with a name in `folder_marks`; the others are its siblings.
        **options
            Options of `read`.

        Returns
        -------
        Index
            Tensors of the whole folder.
        """
        return self.read(source, *args, **options)

    def plan(self, draft: Draft, *args: Any, **options: Any) -> Plan:
        """Plan a new file without touching an array: ``read`` of the file returns the same tensors.

        Parameters
        ----------
        draft : Draft
            Contents of the new file, within the capabilities in `can`.
        **options
            Options of the format, keyword-only and with defaults.

        Returns
        -------
        Plan
            Position of every byte. Data are little-endian; they are cast if a planned part
            has another element type than the draft, as for the indices of sparse tensors.

        Raises
        ------
        UnsupportedError
            If the format cannot represent a tensor; the error names it and has advice.
        ValueError, TypeError
            If an option is invalid.
        """
        raise NotImplementedError

    @property
    def own_suffixes(self) -> tuple[str, ...]:
        """Suffixes that only files of this format have."""
        return tuple(suffix for suffix in self.suffixes if suffix not in self.shared_suffixes)

    def can_in(self, path: str) -> Can:
        """Return the capabilities of a file at `path`; `can` by default."""
        return self.can

    def check(self, draft: Draft) -> None:
        """Raise `UnsupportedError` if a tensor has a layout, element type or order not in `can`."""
        for tensor in draft.tensors.values():
            if tensor.layout not in self.can.layouts:
                rule, reason = "Layout", f"{tensor.layout} tensors"
            elif tensor.layout == "dense" and tensor.dtype not in self.can.types_for(tensor.shape):
                rule, reason = "Dtype", f"{tensor.dtype} elements"
            elif tensor.layout == "dense" and tensor.order not in self.can.orders:
                rule, reason = "Order", f"tensors in {tensor.order} order"
            else:
                continue
            reason += f" cannot be stored in format {self.name!r}"
            types = ", ".join(self.can.types_for(tensor.shape))
            hint = f"Convert it to a dense tensor of {types}, or leave it out"
            raise UnsupportedError(reason, tensor=tensor.name, rule=rule, hint=hint)

    def append(self, source: Readable, draft: Draft, *args: Any, **options: Any) -> Plan:
        """Plan the addition of tensors to a file.

        Existing bytes are not overwritten, so that truncating the file to its old size undoes an
        interrupted write.

        Parameters
        ----------
        source : Readable
            The file.
        draft : Draft
            New tensors, as for `plan`.
        **options
            As for `plan`, and ``replace``: let new tensors replace existing ones of the same name.

        Returns
        -------
        Plan
            Position of every new byte; all offsets are after the end of the file.

        Raises
        ------
        UnsupportedError
            If the format does not allow it.
        """
        raise UnsupportedError(
            f"tensors cannot be added to files of format {self.name!r}",
            rule="Append",
            hint="Join the Datasets with .merge(...), and save the result",
        )

    def module_axes(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> Mapping[str, tuple[str | None, ...]]:
        """Name axes within one module of a tree.

        Parameters
        ----------
        shapes : mapping of str to tuple of int
            Shapes of the tensors by their names in the module.

        Returns
        -------
        mapping of str to tuple
            Names of axes by tensor, None for an unnamed axis. Tensors without names are left out.
        """
        return {}

    def is_inline(self, tensor: WantedTensor) -> bool:
        """Return whether the value of a tensor is written in the header; False by default.

        The part of such a tensor has its bytes as ``inline``, and is not in the plan.
        """
        return False


class FormatOptions(TypedDict, total=False):
    """Options for writing single formats, documented with their formats."""

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


class FormatReadOptions(TypedDict, total=False):
    """Options for reading single formats, documented with their formats."""

    all_tensors: bool  # torch
    constants: bool  # onnx
    layout: str | None  # burnpack
    payload: Any  # mlcp
    with_stats: bool  # primitiv


def _keywords(method: Callable[..., Any]) -> dict[str, Parameter]:
    parameters = signature(method).parameters.items()
    return {name: option for name, option in parameters if option.kind is Parameter.KEYWORD_ONLY}


def names() -> tuple[str, ...]:
    """Return the names of all formats; formats of other packages come last."""
    return (*_CLASSES, *_plugins())


def _require_known(name: str) -> None:
    if name not in names():
        by_suffix = [format_name for format_name in names() if f".{name}" in suffixes(format_name)]
        similar = by_suffix or get_close_matches(str(name), names(), n=1)
        hint = f"did you mean {similar[0]!r}? Known" if similar else "known"
        raise ValueError(f"unknown format {name!r}; {hint} are: {', '.join(names())}")


def suffixes(name: str) -> tuple[str, ...]:
    """Return the suffixes of a format's files; formats of this package are not imported."""
    if name in _CLASSES:
        return _REGISTRY[_CLASSES[name]]
    _require_known(name)
    return next((format.suffixes for format in _loaded_plugins() if format.name == name), ())


@cache
def get(name: str) -> Format:
    """Return a format by its name."""
    _require_known(name)
    if name in _CLASSES:
        module = import_module(f"{__name__}.{name}")
        format: Format = getattr(module, _CLASSES[name])()
        return format
    return _load(_plugins()[name])


def folder_marks() -> tuple[str, ...]:
    """Return the names of files that mark a folder as a checkpoint."""
    return tuple([mark for format in loaded() for mark in format.folder_marks])


def states_its_files(file_name: str) -> bool:
    """Return whether a file, by its suffix, states the other files of its checkpoint."""
    lower = file_name.lower()
    return any(get(name).states_its_files for name in names() if lower.endswith(suffixes(name)))


def writable(name: str) -> Format:
    """Return a format that can be written, by its name."""
    format = get(name)
    if not format.can.types:
        writable_names = ", ".join(format.name for format in loaded() if format.can.types)
        raise ValueError(
            f"format {name!r} is read-only; writable formats are: {writable_names}; its "
            "library can write the tensors (docs/how-to/other-libraries.md)"
        )
    return format


# --- formats of other packages --------------------------------------------------------------------


@cache
def _plugins() -> dict[str, EntryPoint]:
    """Return the formats that other packages register, without importing them."""
    plugins: dict[str, EntryPoint] = {}
    for entry in entry_points(group="xckpt.formats"):
        if entry.name in _CLASSES:
            warn(f"the format {shown(entry.name)} of {entry.value} is left out: xckpt has it")
        else:
            plugins.setdefault(entry.name, entry)
    return plugins


def _load(entry: EntryPoint) -> Format:
    """Import a format of another package; raise ImportError if it breaks the contract."""
    try:
        format = entry.load()()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ImportError(f"the format {shown(entry.name)} cannot be loaded: {reason}") from error
    if not isinstance(format, Format):
        reason = "it is not a Format"
    elif format.contract != CONTRACT:
        reason = f"it is written for contract {format.contract}, and xckpt has {CONTRACT}"
    elif format.name != entry.name:
        reason = f"its name is {shown(format.name)}"
    else:
        return format
    raise ImportError(f"the format {shown(entry.name)} of {entry.value} is not loaded: {reason}")


@cache
def _loaded_plugins() -> tuple[Format, ...]:
    """Import the formats of other packages; warn about formats that cannot be loaded."""
    formats = []
    for name in _plugins():
        try:
            formats.append(get(name))
        except ImportError as error:
            warn(f"{error}; it is left out")
    return tuple(formats)


def loaded() -> Iterator[Format]:
    """Yield all formats that can be loaded; formats of other packages come last."""
    yield from map(get, _CLASSES)
    yield from _loaded_plugins()


def recognized(source: Readable) -> Format | None:
    """Return the format of a file by its content, or None if the format is unknown."""
    head, file_name = _head(source), source.name.partition("?")[0].lower()
    # Formats with this suffix are first, then plug-ins: the others are usually not imported.
    likely = [name for name in _CLASSES if file_name.endswith(suffixes(name))]
    others = [name for name in _CLASSES if name not in likely]
    for format in map(get, likely):
        if format.detect(head, source.size, source.name):
            return format
    for plugin in _loaded_plugins():
        try:
            if plugin.detect(head, source.size, source.name):
                return plugin
        except Exception as error:  # noqa: BLE001  of a package that is not this one
            reason = f"{type(error).__name__}: {error}"
            warn(f"the format {shown(plugin.name)} cannot look at {shown(source.name)}: {reason}")
    return next((f for f in map(get, others) if f.detect(head, source.size, source.name)), None)


def detect(source: Readable) -> Format:
    """Return the format of a file by its content, or raise `FormatError`."""
    format = recognized(source)
    if format is not None:
        return format
    head = _head(source)
    kind, advice = _foreign(head, source) or (None, f"Known formats: {', '.join(names())}")
    reason = f"the file begins {head[:16]!r}" if kind is None else f"it is {kind}"
    reason = f"not a checkpoint of a known format; {reason}"
    error = FormatError(reason, path=source.name, offset=0, hint=advice)
    error.executes = _code_of(head, source)
    raise error


def advise(error: FormatError, format: str, source: Readable) -> None:
    """Add the actual type of a file to an error, if the user asked for another format."""
    head = _head(source)
    if get(format).detect(head, source.size, source.name):
        return
    actual = recognized(source)
    if actual is not None:
        error.hint = f"It is a {actual.name} file: open it with engine={actual.name!r}"
        return
    foreign = _foreign(head, source)
    if foreign is not None:
        error.reason = error.reason if foreign.kind is None else f"it is {foreign.kind}"
        error.hint = foreign.advice


def cut_piece(format: Format, source: Readable) -> Foreign | None:
    """Return the kind of a file whose name states that it is a piece of a larger one, or None."""
    if source.name.partition("?")[0].lower().endswith(format.suffixes):
        return None
    from xckpt.formats import foreign  # only for unusual names

    return foreign.by_part(source.name)


def is_foreign(source: Readable) -> bool:
    """Return whether a file is of a known type that is not a checkpoint."""
    return _foreign(_head(source), source) is not None and recognized(source) is None


def foreign_folder(
    path: str, files: Collection[str], folders: Collection[str] = ()
) -> Foreign | None:
    """Return the type of a folder that is not a checkpoint, by the names in it, and advice."""
    from xckpt.formats import foreign

    return foreign.describe_folder(path, files, folders)


def _foreign(head: bytes, source: Readable) -> Foreign | None:
    from xckpt.formats import foreign  # only for errors

    return foreign.describe(head, source, tuple([s for name in names() for s in suffixes(name)]))


def _code_of(head: bytes, source: Readable) -> tuple[str, ...]:
    from xckpt.formats import foreign

    return foreign.code_of(head, source)


def _head(source: Readable) -> bytes:
    """Read the first bytes; for a zip archive, up to the content of its first member."""
    head = bytes(source.read(0, min(HEAD_BYTES, source.size)))
    if head.startswith(b"PK\3\4"):
        # Lengths of the name and of the extra fields, which precede the content.
        name, extra = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
        nbytes = min(_ZIP_HEADER + name + extra + _ZIP_CONTENT, source.size)
        if nbytes > len(head):
            head = bytes(source.read(0, nbytes))
    return head
