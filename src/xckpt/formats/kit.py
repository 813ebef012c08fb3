"""Helpers for formats: a bounded reader of fields, strict JSON and CBOR, checks, names of axes.

Like the formats it is pure. Invalid contents of a file raise `FormatError`, and values that cannot
be written raise `UnsupportedError`; callers add the offset, the tensor and the rule.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite, prod
from struct import error as StructError  # noqa: N812
from typing import TYPE_CHECKING, Any, TypeVar

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import (
    CheckpointError,
    FormatError,
    MissingShardError,
    TruncatedError,
    UnsupportedError,
    escaped,
    shown,
)
from xckpt.index import DEEPEST_ATTRS, Arrangement, Index, Shard, Tensor, is_json

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from struct import Struct

    from xckpt.formats.plan import Draft, WantedTensor
    from xckpt.readable import Readable

_Entry = TypeVar("_Entry")
_Value = TypeVar("_Value")

# --- fields of a file -----------------------------------------------------------------------------

# The window grows during sequential reads and shrinks after a jump over data, so that little of the
# data is read. Its maximum bounds the memory, whatever length a file claims.
_SMALLEST_WINDOW, _LARGEST_WINDOW = 1 << 12, 1 << 20
_SHORT_JUMP = 1 << 14

TRUNCATED = "The file may be truncated"
CUT = f"{TRUNCATED}: copy or download it again"


class Cursor:
    """A reader of consecutive fields, through a window of the file; `at` may be set."""

    # A field beyond the end of the file, or of the area that was entered, raises a `FormatError`
    # with the rule Truncated before any memory is allocated. The `label` of a field is its name in
    # messages.

    __slots__ = ("_area", "_base", "_buffer", "_end", "_source", "_window", "at")

    def __init__(self, source: Readable, at: int = 0) -> None:
        self._source = source
        self._buffer = b""
        self._base = at
        self._area = "the file"
        self._end = source.size
        self._window = _SMALLEST_WINDOW >> 1  # the first read doubles it
        self.at = at

    @property
    def left(self) -> int:
        """Number of bytes up to the end of the file, or of the area that was entered."""
        return self._end - self.at

    def enter(self, nbytes: int, area: str) -> None:
        """Restrict reading to the next `nbytes` bytes; `area` is their name in messages."""
        self.require(nbytes, area)
        self._area = area
        self._end = self.at + nbytes

    @contextmanager
    def inside(self, nbytes: int, area: str) -> Iterator[None]:
        """Restrict reading to the next `nbytes` bytes for as long as the context lasts."""
        outer = self._area, self._end
        self.enter(nbytes, area)
        try:
            yield
        finally:
            self._area, self._end = outer

    def take(self, nbytes: int, label: str) -> bytes:
        """Read exactly `nbytes` bytes."""
        if nbytes > self._end - self.at:
            self.require(nbytes, label)
        start = self.at - self._base
        stop = start + nbytes
        if start < 0 or stop > len(self._buffer):
            start, stop = self._fill(nbytes)
        self.at += nbytes
        return self._buffer[start:stop]

    def peek(self, nbytes: int) -> bytes:
        """Return the next bytes, `nbytes` or all that are left, without moving on."""
        data = self.take(min(nbytes, self.left), "the next bytes")
        self.at -= len(data)
        return data

    def byte(self, label: str) -> int:
        """Read one byte."""
        place = self.at - self._base
        if not 0 <= place < len(self._buffer) or self.at >= self._end:
            return self.take(1, label)[0]
        self.at += 1
        return self._buffer[place]

    def _fill(self, nbytes: int) -> tuple[int, int]:
        """Move the window to `at`; return the start and stop of the next bytes in it."""
        jump = self.at - self._base - len(self._buffer)
        if self.at >= self._base and jump <= 0:
            self._window = min(2 * self._window, _LARGEST_WINDOW)
        elif 0 < jump <= _SHORT_JUMP:
            # One read of several small tensors is faster than one read per tensor.
            self._window = min(2 * self._window, 4 * _SHORT_JUMP)
        else:
            self._window = _SMALLEST_WINDOW
        size = max(nbytes, min(self._window, self.left))
        self._buffer = bytes(self._source.read(self.at, size))
        self._base = self.at
        return 0, nbytes

    def fields(self, kind: Struct, label: str) -> tuple[Any, ...]:
        """Read the fields of a struct."""
        return kind.unpack(self.take(kind.size, label))

    def number(self, kind: Struct, label: str) -> int:
        """Read a number: a struct with one field."""
        value: int = kind.unpack(self.take(kind.size, label))[0]
        return value

    def varint(self, label: str, *, longest: int = 10, rule: str = "Varint") -> int:
        """Read a number in groups of 7 bits, the lowest first, in at most `longest` bytes."""
        value, start = 0, self.at
        for shift in range(0, 7 * longest, 7):
            byte = self.byte(label)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        reason = f"{label}: a number has more than {longest} bytes"
        raise FormatError(reason, offset=start, rule=rule)

    def text(self, nbytes: int, label: str, rule: str = "Utf8") -> str:
        """Read `nbytes` bytes as UTF-8."""
        at = self.at
        try:
            return self.take(nbytes, label).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{label} is not UTF-8: {error}", offset=at, rule=rule) from error

    def skip_texts(self, count: int, length: Struct) -> None:
        """Skip texts with their lengths before them, without decoding any."""
        unpack, size, remaining = length.unpack_from, length.size, count
        while remaining:
            self.take(size, "a text")  # moves the window to the next length
            at = begin = self.at - size - self._base
            done = 0
            try:
                for done in range(remaining):  # noqa: B007  counts the texts before the window's end
                    at += size + unpack(self._buffer, at)[0]
                remaining = 0
            except (StructError, OverflowError):
                remaining -= done
            self.at = self._base + begin
            self.skip(at - begin, "a text")

    def skip(self, nbytes: int, label: str) -> None:
        """Skip bytes without reading them."""
        self.require(nbytes, label)
        self.at += nbytes

    def require(self, nbytes: int, label: str) -> None:
        """Raise `FormatError` if fewer bytes are left."""
        if nbytes > self._end - self.at:
            raise TruncatedError(
                f"{label}: {nbytes} bytes, but {self.left} are left of {self._area}",
                offset=self.at,
                rule="Truncated",
                hint=TRUNCATED if self._area == "the file" else None,
            )


class Inner:
    """A file inside of another one, without a folder."""

    def sibling(self, name: str) -> Readable:
        """Raise `FileNotFoundError`: it refers to no other files."""
        raise FileNotFoundError(name)

    def folders(self) -> tuple[str, ...]:
        """Return no folders."""
        return ()


class Memory(Inner):
    """Decoded bytes as a file."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name, self.size, self._data = name, len(data), memoryview(data)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of bytes."""
        return self._data[offset : offset + nbytes]


def first_bytes(source: Readable, most: int) -> bytes:
    """Return the first bytes of a file, at most `most`."""
    return bytes(source.read(0, min(most, source.size)))


# --- JSON -----------------------------------------------------------------------------------------


def decode_json(
    data: bytes,
    label: str,
    *,
    deepest: int | None,  # levels; None if the caller checks the nesting
    rule: str = "Json",
    offset: int | None = None,
    parse_int: Callable[[str], Any] = int,
    repeated: Callable[[str], object] | None = None,  # called with a key that an object has twice
) -> Any:
    """Decode JSON strictly: without NaN, numbers out of range, lone surrogates, repeated keys."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            times = Counter(key for key, _ in pairs)
            for key in [key for key in times if times[key] > 1]:
                if repeated is None:
                    raise ValueError(f"duplicate key {shown(key)}")
                repeated(key)
        return values

    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=members,
            parse_int=parse_int,
            parse_float=finite,
            parse_constant=finite,
        )
        if b"\\u" in data:
            # The decoder accepts lone surrogates, but the encoder does not.
            json.dumps(value, ensure_ascii=False).encode()
    # UnicodeDecodeError and JSONDecodeError are ValueErrors.
    except (ValueError, RecursionError) as error:
        reason = f"{label} is not valid JSON: {escaped(str(error))}"
        raise FormatError(reason, offset=offset, rule=rule) from error
    if deepest is not None and is_deeper(value, deepest):
        reason = f"{label} is nested deeper than {deepest} levels"
        raise FormatError(reason, offset=offset, rule=rule)
    return value


def finite(digits: str) -> float:
    """Parse a number of JSON as a float; raise ValueError if it is out of range."""
    number = float(digits)
    if not isfinite(number):
        raise ValueError(f"number out of range: {shown(digits)}")
    return number


def integer_64(digits: str) -> int | float:
    """Parse an integer as serde_json does: -0 and numbers of more than 64 bits are floats."""
    return int(digits) if len(digits) <= 20 and digits != "-0" else finite(digits)


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and dicts are nested deeper than `levels`."""
    level = [value]
    for _ in range(levels + 1):
        containers = [item for item in level if type(item) in {dict, list}]
        if not containers:
            return False
        level = [
            item
            for container in containers
            for item in (container.values() if type(container) is dict else container)
        ]
    return True


# --- CBOR -----------------------------------------------------------------------------------------


class _EveryTag(dict[int, "Callable[[Any, bool], Any]"]):
    """A mapping of every semantic tag to one decoder, which replaces the decoders of cbor2."""

    def __init__(self, tagged: Callable[[int, Any], Any]) -> None:
        self._tagged = tagged

    def __missing__(self, tag: int) -> Callable[[Any, bool], Any]:
        return lambda value, _hashable: self._tagged(tag, value)


def decode_cbor(
    data: bytes, *, tagged: Callable[[int, Any], Any], deepest: int = 128, indefinite: bool = True
) -> tuple[Any, int]:
    """Decode the first CBOR value in `data`; return the value and its size in bytes."""
    from io import BytesIO

    import cbor2

    # By default, cbor2 is unsafe in three ways: it interprets semantic tags (a tag can compile a
    # regular expression, parse a date, or make a list contain itself), keeps the last of two equal
    # keys, and has no limit of nesting. Here ``tagged(tag, value)`` interprets tags, and the other
    # two are errors.
    stream = BytesIO(data)
    decoder = cbor2.CBORDecoder(
        stream,
        semantic_decoders=_EveryTag(tagged),
        allow_duplicate_keys=False,
        max_depth=deepest,
        allow_indefinite=indefinite,
    )
    try:
        return decoder.decode(), stream.tell()
    # Keys that cannot be hashed raise TypeError and ValueError.
    except (cbor2.CBORError, TypeError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error) if error.__cause__ is None else f"{error}: {error.__cause__}"
        # cbor2 has one error class for all of these.
        rule = "CborDepth" if "nesting depth" in str(error) else "CborSyntax"
        rule = "CborDuplicateKey" if "Duplicate map key" in str(error) else rule
        raise FormatError(f"not CBOR: {escaped(reason)}", rule=rule) from error


def encode_cbor(value: Any) -> bytes:
    """Encode a value as core deterministic CBOR (RFC 8949, section 4.2.1)."""
    import cbor2

    return cbor2.dumps(value, canonical=True, encoders={dict: _encode_map})


def _encode_map(encoder: Any, entries: dict[Any, Any]) -> None:
    # cbor2 follows RFC 7049, which orders keys of several types differently.
    if all(type(key) is str for key in entries):
        encoder.encode_map(entries)
        return
    encoder.encode_length(5, len(entries))
    for key in sorted(entries, key=encode_cbor):
        encoder.encode(key)
        encoder.encode(entries[key])


# --- checks ---------------------------------------------------------------------------------------

#: Limits of numpy's arrays: number of axes, and size in bytes.
MOST_AXES = 64
LARGEST = (1 << 63) - 1


def is_oversized(shape: Sequence[int], dtype: str | None = None) -> bool:
    """Return whether a shape is too large for numpy, as stored or decoded."""
    # numpy limits the product of the other extents even if one is zero.
    count = prod(shape) or prod(filter(None, shape))
    if count <= LARGEST >> 4:  # small enough for elements of 128 bits
        return False
    element = ELEMENT_TYPES.get(dtype or "")
    bits = max(element.bits, ELEMENT_TYPES[element.decoded].bits) if element is not None else 128
    return bits * count // 8 > LARGEST


def check_option(name: str, value: str | None, choices: Iterable[str]) -> None:
    """Raise ValueError unless the value of an option is None or one of the choices."""
    if value is not None and value not in (choices := tuple(choices)):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def check_text(label: str, text: str, tensor: str | None = None) -> str:
    """Return text for a file unchanged; raise `UnsupportedError` if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedError(
            f"{label} {shown(text)} is not valid Unicode: it has lone surrogates",
            tensor=tensor,
            rule="Name",
            hint="Rename it",
        ) from None
    return text


def as_text(name: str, value: Any, *, nan: bool = False) -> str:
    """Return an attribute as text: JSON unless it is text already."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=nan)
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"the attribute {shown(str(name))} cannot be converted to JSON: {error}"
        hint = "Convert it to text, or remove it from ds.attrs"
        raise UnsupportedError(reason, rule="Metadata", hint=hint) from None


def file_name(path: str) -> str:
    """Return the last component of a path or a URL."""
    path = path.partition("?")[0] if "://" in path else path
    return re.split(r"[/\\]", path)[-1]


def file_stem(path: str, *suffixes: str) -> str:
    """Return the last component of a path without the first of `suffixes` that it has."""
    name = file_name(path)
    # Suffixes are in lower case, and match in any case.
    return next((name[: -len(s)] for s in suffixes if name.lower().endswith(s)), name)


def find_overlaps(
    ranges: Iterable[tuple[int, int, str]], *, shared: bool = False
) -> list[tuple[int, str, str]]:
    """Return the ranges (start, end, name) that begin within another: start, name, other name."""
    if shared:  # equal ranges are not an overlap
        first: dict[tuple[int, int], str] = {}
        for start, end, name in ranges:
            first.setdefault((start, end), name)
        ranges = [(start, end, name) for (start, end), name in first.items()]
    overlapping = []
    reached, owner = 0, ""
    for start, end, name in sorted(ranges):
        if start < end:  # empty ranges overlap nothing
            if start < reached:
                overlapping.append((start, name, owner))
            if end > reached:
                reached, owner = end, name
    return overlapping


def read_each(
    entries: Iterable[tuple[str, _Entry]], read: Callable[[str, _Entry], _Value]
) -> dict[str, _Value]:
    """Call `read` with the name and the entry of each tensor, and add the name to errors."""
    values = {}
    for name, entry in entries:
        try:
            values[name] = read(name, entry)
        except CheckpointError as error:
            raise error.located(tensor=name) from None
    return values


def cut_error(size: int, end: int, offset: int, rule: str = "Truncated") -> FormatError:
    """Return the error of data at `offset` that end after the file, which has `size` bytes.

    `end` is where all data should end, so that the error has one text for all tensors.
    """
    reason = f"the file ends at byte {size}, but its data end at byte {end}"
    return FormatError(reason, offset=min(offset, size), rule=rule, hint=CUT)


def with_cut_data(
    tensors: Mapping[str, Tensor], size: int, rule: str = "Truncated"
) -> dict[str, Tensor]:
    """Return tensors with a problem where the data end after the file, which has `size` bytes."""
    ends = {
        name: part.offset + part.nbytes
        for name, tensor in tensors.items()
        for part in tensor.parts.values()
        if part.nbytes and tensor.problem is None
    }
    end = max(ends.values(), default=0)
    marked = dict(tensors)
    for name in [name for name in ends if ends[name] > size] if end > size else ():
        tensor = tensors[name]
        problem = cut_error(size, end, tensor.parts["data"].offset, rule)
        marked[name] = replace(tensor, problem=problem.located(tensor=name))
    return marked


@contextmanager
def locating(
    *, path: str | None = None, offset: int | None = None, tensor: str | None = None
) -> Iterator[None]:
    """Add the file, the byte offset and the tensor to errors that lack them."""
    try:
        yield
    except CheckpointError as error:
        error.located(path=path, offset=offset, tensor=tensor)
        raise


class Notes:
    """A collection of warnings about a file, with one short text for each reason."""

    __slots__ = ("_notes", "executes", "imports")

    def __init__(self) -> None:
        #: For `Index.executes` and `Index.imports`.
        self.executes: list[str] = []
        self.imports: list[str] = []
        self._notes: dict[str, tuple[int, str]] = {}

    def add_code(self, executes: Iterable[str], imports: Iterable[str]) -> None:
        """Add the code that a file runs and imports elsewhere."""
        self.executes += executes
        self.imports += imports

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Add the code that was found so far to errors."""
        try:
            yield
        except CheckpointError as error:
            error.executes = tuple(dict.fromkeys((*self.executes, *error.executes)))
            raise

    def add(self, reason: str, place: str) -> None:
        """Add a warning. Repeated reasons are counted, and the text names the first place."""
        count, first = self._notes.get(reason, (0, place))
        self._notes[reason] = (count + 1, first)

    def warnings(self) -> tuple[str, ...]:
        """Return the texts for `Index.warnings`."""
        return tuple(
            f"{first}{f' and {count - 1} more' if count > 1 else ''}: {reason}"
            for reason, (count, first) in self._notes.items()
        )


# --- files of a folder ----------------------------------------------------------------------------


def sibling(source: Readable, name: str) -> Readable | None:
    """Return another file of the folder; None if it is missing."""
    try:
        return source.sibling(name)
    except FileNotFoundError:
        return None


def missing_file(
    name: str, source: Readable, hint: str, rule: str | None = None
) -> CheckpointError:
    """Return the error for a file of the folder that `source` refers to."""
    reason = f"the file {shown(name)} is missing"
    return MissingShardError(reason, path=source.name, rule=rule, hint=hint)


def joined_files(offset: int, hint: str | None = None) -> FormatError:
    """Return the error for a file that has another file behind its own contents."""
    reason = f"another file begins at byte {offset}: several files were joined into one"
    hint = hint or f"Cut the file at byte {offset}, and open the pieces"
    return FormatError(reason, offset=offset, rule="Joined", hint=hint)


def index_of(
    format: str,
    source: Readable,
    tensors: Mapping[str, Tensor],
    attrs: Mapping[str, Any],
    *,
    notes: Notes,
    version: str = "",
    shards: Mapping[str, Shard] | None = None,
) -> Index:
    """Return the Index of a file and its shards, with their total size."""
    shards = shards or {}
    size = source.size + sum(shard.size for shard in shards.values())
    fields = (format, version, tensors, attrs, source.name, size, shards, notes.warnings())
    code = [tuple(dict.fromkeys(names)) for names in (notes.executes, notes.imports)]
    return Index(*fields, executes=code[0], imports=code[1])


# --- names of axes --------------------------------------------------------------------------------

#: The attribute for names of axes, in formats that store texts but not such names. Its value is
#: JSON: names of tensors to names of axes, null for an unnamed axis, such as
#: ``{"conv.weight":["out","in",null,null]}``. Tensors without a named axis are left out.
DIMS_KEY = "xckpt.dims"


def dims_text(tensors: Mapping[str, Tensor | WantedTensor]) -> str | None:
    """Return the names of axes of tensors as the text for `DIMS_KEY`; None without names."""
    dims_by_name = {name: tensor.dims for name, tensor in tensors.items() if any(tensor.dims or ())}
    if not dims_by_name:
        return None
    return json.dumps(dims_by_name, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def with_dims(tensors: dict[str, Tensor], text: Any) -> dict[str, Tensor]:
    """Return tensors with the names of axes from the text of `DIMS_KEY`; unfit ones are ignored."""
    if not (dims_by_name := json_object(text) if text and type(text) is str else {}):
        return tensors
    renamed = dict(tensors)
    for name, tensor in tensors.items():
        dims = dims_by_name.get(name)
        if type(dims) is list and len(dims) == tensor.ndim and all(map(_is_name, dims)):
            renamed[name] = replace(tensor, dims=tuple(dims))
    return renamed


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a text of unknown origin; an empty one if it is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if type(value) is dict else {}


def _is_name(value: Any) -> bool:
    if type(value) is not str:
        return value is None
    # Lone surrogates, which JSON can spell, cannot be printed.
    return bool(value) and not any("\ud800" <= character <= "\udfff" for character in value)


# --- coordinates, order and tree of a Dataset -----------------------------------------------------

#: The attribute for the rest of a Dataset or tree, in formats that store texts. Its value is a JSON
#: object; empty fields are left out::
#:
#:     coords   names of the tensors that are coordinates
#:     order    positions of tensors in the file, in the order of the variables
#:     attrs    names of tensors to the attributes that the format cannot store
#:     modules  paths of nodes to their attributes
#:     json     names of the attributes of the file that are stored as JSON, and were not text
ARRANGEMENT_KEY = "xckpt.arrangement"


def arrangement_texts(
    draft: Draft,
    tensors: Mapping[str, Tensor | WantedTensor],  # all, as a reader names and orders them
    rule: str = "Metadata",
    *,
    only_texts: bool = False,  # attributes are stored by `as_text`
) -> dict[str, str]:
    """Return the texts for `DIMS_KEY` and `ARRANGEMENT_KEY`, by key; empty ones are left out."""
    for key in (DIMS_KEY, ARRANGEMENT_KEY):
        if key in draft.attrs:
            reason = f"the attribute {key!r} is reserved for names of axes and coordinates"
            raise UnsupportedError(reason, rule=rule, hint="Rename it")
    for name in tensors:
        check_text("the name", name, name)
    read_as = {tensor.name: name for name, tensor in tensors.items()}
    coords = {read_as[name]: None for name in draft.arrangement.coords if name in read_as}
    order = [read_as[name] for name in draft.arrangement.order if name in read_as]
    fields = {
        "coords": list(coords),
        "order": _positions(order, list(tensors), coords),
        "attrs": {read_as[name]: attrs for name, attrs in draft.tensor_attrs.items()},
        "modules": draft.arrangement.modules,
        "json": sorted(
            key
            for key, value in draft.attrs.items()
            if only_texts and type(value) is not str and is_json(value)
        ),
    }
    fields = {field: value for field, value in fields.items() if value}
    compact: Any = {"ensure_ascii": False, "separators": (",", ":")}
    texts = {
        DIMS_KEY: dims_text(tensors),
        ARRANGEMENT_KEY: json.dumps(fields, **compact) if fields else None,
    }
    label = "a name of an axis or a coordinate"
    return {key: check_text(label, text) for key, text in texts.items() if text is not None}


def attribute_texts(draft: Draft, tensors: Mapping[str, Tensor | WantedTensor]) -> dict[str, str]:
    """Return all attributes of a file as texts, including the texts of `arrangement_texts`."""
    texts = {}
    for key, value in draft.attrs.items():
        if type(key) is not str:
            reason = f"the name of an attribute is a {type(key).__name__}, not text"
            raise UnsupportedError(reason, rule="Metadata", hint="Rename it")
        check_text("the attribute", key)
        texts[key] = check_text("an attribute", as_text(key, value, nan=True))
    return texts | arrangement_texts(draft, tensors, only_texts=True)


def _positions(order: list[str], names: list[str], coords: Container[str]) -> list[int]:
    """Return the positions of `order` in `names`; empty if a reader returns this order anyway."""
    # A Dataset orders its coordinates and its data variables separately.
    if len(order) != len(names) or all(
        [name for name in order if (name in coords) is is_coord]
        == [name for name in names if (name in coords) is is_coord]
        for is_coord in (True, False)
    ):
        return []
    positions = {name: position for position, name in enumerate(names)}
    return [positions[name] for name in order]


def with_arrangement(index: Index, texts: Mapping[str, Any] | None = None) -> Index:
    """Return an index with the axes, coordinates and attributes in `arrangement_texts`."""
    # Contents that do not fit are ignored, because no tensor depends on them.
    attrs = dict(index.attrs)
    if texts is None:  # they are attributes
        texts = {key: attrs.pop(key, None) for key in (DIMS_KEY, ARRANGEMENT_KEY)}
    tensors = with_dims(dict(index.tensors), texts.get(DIMS_KEY))
    (fields, are_valid), names = _fitting_fields(texts.get(ARRANGEMENT_KEY)), list(tensors)
    for name, tensor_attrs in fields["attrs"].items():
        if name in tensors:
            tensors[name] = replace(tensors[name], attrs={**tensor_attrs, **tensors[name].attrs})
    for name in dict.fromkeys(fields["json"]):
        if type(attrs.get(name)) is str:
            try:
                attrs[name] = _loaded(attrs[name], DEEPEST_ATTRS)
            except ValueError:
                are_valid = False
    coords = tuple([name for name in dict.fromkeys(fields["coords"]) if name in tensors])
    if fields["order"] and sorted(fields["order"]) != list(range(len(names))):
        are_valid, fields["order"] = False, []
    order = tuple([names[position] for position in fields["order"]])
    arrangement = Arrangement(coords, order, fields["modules"])
    warnings = index.warnings
    if not are_valid:
        warnings += (f"{ARRANGEMENT_KEY!r} is malformed, and ignored in part",)
    return replace(index, tensors=tensors, attrs=attrs, warnings=warnings, arrangement=arrangement)


def _loaded(text: Any, levels: int) -> Any:
    """Parse an attribute that is stored as JSON, or raise ValueError."""
    if type(text) is not str:
        raise ValueError(f"a {type(text).__name__} is not JSON")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not is_json(value, levels):
        raise ValueError("not the JSON of an attribute")
    return value


# The fields of `ARRANGEMENT_KEY`, with the types of their entries.
_ARRANGEMENT = {"coords": (list, str), "order": (list, int), "attrs": (dict, dict)}
_ARRANGEMENT |= {"modules": (dict, dict), "json": (list, str)}


def _fitting_fields(text: Any) -> tuple[dict[str, Any], bool]:
    """Return the entries of a text for `ARRANGEMENT_KEY` that fit, and whether all of them do."""
    try:
        stated: Any = {} if text is None else _loaded(text, DEEPEST_ATTRS + 3)
    except ValueError:
        stated = None
    are_valid = type(stated) is dict
    stated = stated if are_valid else {}
    fields: dict[str, Any] = {}
    for field, (kind, entry) in _ARRANGEMENT.items():
        value = stated.get(field, kind())
        if type(value) is not kind:
            are_valid, value = False, kind()
        if kind is dict:
            fields[field] = {name: item for name, item in value.items() if type(item) is entry}
        else:
            fields[field] = [item for item in value if type(item) is entry]
        are_valid &= len(fields[field]) == len(value)
    return fields, are_valid


# --- fields of decoded JSON and CBOR --------------------------------------------------------------


def mistyped(label: str, value: Any, expected: str, rule: str = "Schema") -> FormatError:
    """Return the error for a field that is missing or has the wrong type."""
    actual = "missing or null" if value is None else type(value).__name__
    if type(value) in {str, int, float, bool}:
        actual = shown(value) if type(value) is str else str(value)
    elif type(value) in {list, dict}:
        actual = f"{'an array' if type(value) is list else 'a map'} of {len(value)}"
    return FormatError(f"{label} is {actual}: expected {expected}", rule=rule)


def mapping(label: str, value: Any, rule: str = "Schema") -> dict[Any, Any]:
    """Return a field that must be a map."""
    if type(value) is not dict:
        raise mistyped(label, value, "a map", rule)
    return value


def number(label: str, value: Any, rule: str = "Schema") -> int:
    """Return a field that must be a non-negative integer."""
    if type(value) is not int or value < 0:
        raise mistyped(label, value, "a non-negative integer", rule)
    return value


def as_shape(value: Any, most: int, rule: str = "Schema") -> tuple[int, ...]:
    """Return a field that must be a shape with at most `most` elements, extents of 0 aside."""
    if type(value) is not list:
        raise mistyped("shape", value, "an array", rule)
    for extent in value:
        if type(extent) is not int or extent < 0:
            raise mistyped("an extent of shape", extent, "a non-negative integer", rule)
        if extent > LARGEST:
            raise FormatError(f"an axis of {extent} elements", rule="Shape")
    if len(value) > MOST_AXES:
        raise FormatError(f"{len(value)} axes are more than {MOST_AXES}", rule="Shape")
    if (prod(value) or prod(filter(None, value))) > most:
        raise FormatError(f"the shape {value} has more than {most} elements", rule="Shape")
    return tuple(value)


def aligned(offset: int, alignment: int) -> int:
    """Return the next multiple of an alignment."""
    return -(-offset // alignment) * alignment


def without(tensor: str) -> str:
    """Return the hint to open a file without a tensor."""
    return f"Open the rest of the file with drop_variables=[{shown(tensor)}]"
