"""What several formats share: fields in bounds, strict JSON and CBOR, checks, names of axes.

It is as pure as the formats are. What comes from a file is a `FormatError` where it breaks a rule,
what cannot be written an `UnsupportedError`; who calls knows the offset, the tensor and the rule,
and fills them in.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from math import isfinite, prod
from operator import itemgetter
from struct import error as StructError  # noqa: N812
from typing import TYPE_CHECKING, Any, TypeVar

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.index import DEEPEST_ATTRS, Arrangement, is_json

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence
    from struct import Struct

    from xckpt.formats import Readable
    from xckpt.formats.plan import Draft, WantedTensor
    from xckpt.index import Index, Tensor

_E = TypeVar("_E")
_T = TypeVar("_T")

# --- fields of a file -----------------------------------------------------------------------------

# Windows grow while a file is read through, and shrink where data are jumped over: of data as
# little as possible is read, and what a file claims to hold is read in pieces.
_SMALLEST_WINDOW, _LARGEST_WINDOW = 1 << 12, 1 << 20
_SHORT_JUMP = 1 << 14


TRUNCATED = "The file may be truncated"


class Cursor:
    """Reads a file field by field from byte `at` on, a window at a time; `at` may be set.

    Nothing is allocated by what a file claims: a field that is not in the file, or not in the area
    that was entered, is a `FormatError` of the rule Truncated.
    """

    __slots__ = ("_area", "_base", "_buffer", "_end", "_source", "_window", "at")

    def __init__(self, source: Readable, at: int = 0) -> None:
        self._source = source
        self._buffer = b""
        self._base = at
        self._area = "the file"
        self._end = source.size
        self._window = _SMALLEST_WINDOW >> 1  # which the first read doubles
        self.at = at

    @property
    def left(self) -> int:
        """How many bytes are left of the file, or of the area that was entered."""
        return self._end - self.at

    def enter(self, nbytes: int, area: str) -> None:
        """Stay within the next `nbytes` bytes, which messages call `area`."""
        self._require(nbytes, area)
        self._area = area
        self._end = self.at + nbytes

    def take(self, nbytes: int, what: str) -> bytes:
        """Read the next bytes, exactly so many."""
        if nbytes > self._end - self.at:
            self._require(nbytes, what)
        start = self.at - self._base
        stop = start + nbytes
        if start < 0 or stop > len(self._buffer):
            start, stop = self._fill(nbytes)
        self.at += nbytes
        return self._buffer[start:stop]

    def _fill(self, nbytes: int) -> tuple[int, int]:
        """Move the window here, and return where the next bytes are in it."""
        jump = self.at - self._base - len(self._buffer)
        if self.at >= self._base and jump <= 0:
            self._window = min(2 * self._window, _LARGEST_WINDOW)
        elif 0 < jump <= _SHORT_JUMP:
            # Reading several small tensors at once costs less than a read for each.
            self._window = min(2 * self._window, 4 * _SHORT_JUMP)
        else:
            self._window = _SMALLEST_WINDOW
        size = max(nbytes, min(self._window, self.left))
        self._buffer = bytes(self._source.read(self.at, size))
        self._base = self.at
        return 0, nbytes

    def fields(self, kind: Struct, what: str) -> tuple[Any, ...]:
        """Read the next fields of fixed size."""
        return kind.unpack(self.take(kind.size, what))

    def number(self, kind: Struct, what: str) -> int:
        """Read the next number; `kind` has one field."""
        found: int = kind.unpack(self.take(kind.size, what))[0]
        return found

    def text(self, nbytes: int, what: str, rule: str = "Utf8") -> str:
        """Read the next bytes as UTF-8."""
        at = self.at
        try:
            return self.take(nbytes, what).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{what} is not UTF-8: {error}", offset=at, rule=rule) from error

    def skip_texts(self, count: int, length: Struct, what: str) -> None:
        """Go on after texts that each have their length before them, without making any."""
        unpack, size, left = length.unpack_from, length.size, count
        while left:
            self.take(size, what)  # which moves the window here
            at = begin = self.at - size - self._base
            done = 0
            try:
                for done in range(left):  # noqa: B007  how many there were before the window ended
                    at += size + unpack(self._buffer, at)[0]
                left = 0
            except (StructError, OverflowError):
                left -= done
            self.at = self._base + begin
            self.skip(at - begin, what)

    def skip(self, nbytes: int, what: str) -> None:
        """Go on after the next bytes without reading them."""
        self._require(nbytes, what)
        self.at += nbytes

    def _require(self, nbytes: int, what: str) -> None:
        if nbytes > self.left:
            raise FormatError(
                f"{what}: {nbytes} bytes, but {self.left} are left of {self._area}",
                offset=self.at,
                rule="Truncated",
                hint=TRUNCATED if self._area == "the file" else None,
            )


# --- JSON -----------------------------------------------------------------------------------------


def decode_json(
    data: bytes,
    what: str,
    *,
    deepest: int | None,
    rule: str = "Json",
    offset: int | None = None,
    parse_int: Callable[[str], Any] = int,
    repeated: Callable[[str], object] | None = None,
) -> Any:
    """Decode JSON as strict parsers do: no NaN, no number out of range, no lone surrogate.

    At most `deepest` levels, unless the caller looks to that. `repeated` is called with each key
    that an object has twice, of which the last counts; without it that is an error. Errors have
    the rule and the offset.
    """

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            times = Counter(key for key, _ in pairs)
            for key in [key for key in times if times[key] > 1]:
                if repeated is None:
                    raise ValueError(f"duplicate key {shown(key)}")
                repeated(key)
        return found

    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=members,
            parse_int=parse_int,
            parse_float=finite,
            parse_constant=finite,
        )
        if b"\\u" in data:
            # Python lets lone surrogates pass, but cannot encode them.
            json.dumps(value, ensure_ascii=False).encode()
    # UnicodeDecodeError and JSONDecodeError are ValueErrors.
    except (ValueError, RecursionError) as error:
        reason = shown(str(error))[1:-1]
        reason = f"{what} is not valid JSON: {reason}"
        raise FormatError(reason, offset=offset, rule=rule) from error
    if deepest is not None and is_deeper(value, deepest):
        reason = f"{what} is nested deeper than {deepest} levels"
        raise FormatError(reason, offset=offset, rule=rule)
    return value


def finite(digits: str) -> float:
    """Read a number of JSON as a float, which must have a place for it."""
    number = float(digits)
    if not isfinite(number):
        raise ValueError(f"number out of range: {shown(digits)}")
    return number


def integer_64(digits: str) -> int | float:
    """Read an integer as serde_json does: -0 and what 64 bits do not hold are floats."""
    return int(digits) if len(digits) <= 20 and digits != "-0" else finite(digits)


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and dicts are nested deeper than so many levels."""
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
    """One function as the decoder of every semantic tag, so that cbor2 uses none of its own."""

    def __init__(self, tagged: Callable[[int, Any], Any]) -> None:
        self._tagged = tagged

    def __missing__(self, tag: int) -> Callable[[Any, bool], Any]:
        return lambda value, _hashable: self._tagged(tag, value)


def decode_cbor(
    data: bytes, *, tagged: Callable[[int, Any], Any], deepest: int = 128, indefinite: bool = True
) -> tuple[Any, int]:
    """Decode the first CBOR value in some bytes; return it and its size.

    cbor2 does it, with three traps closed: it runs semantic tags (a tag can compile a regular
    expression, parse a date, or tie a list to itself), keeps the last of two equal keys, and nests
    without end. ``tagged(tag, value)`` gives the meaning of a tag.
    """
    from io import BytesIO

    import cbor2

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
    # Besides its own errors: TypeError and ValueError from keys that cannot be hashed.
    except (cbor2.CBORError, TypeError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error) if error.__cause__ is None else f"{error}: {error.__cause__}"
        # cbor2 has one error class for all of these.
        rule = "CborDepth" if "nesting depth" in str(error) else "CborSyntax"
        rule = "CborDuplicateKey" if "Duplicate map key" in str(error) else rule
        raise FormatError(f"not CBOR: {shown(reason)[1:-1]}", rule=rule) from error


_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP = range(6)
_SIMPLE = {False: b"\xf4", True: b"\xf5", None: b"\xf6"}


def encode_cbor(value: Any) -> bytes:
    """Encode a value as core deterministic CBOR (RFC 8949, section 4.2.1).

    It is made of dict, list, str, bytes, int of 64 bits, float, bool and None. The canonical
    encoding of cbor2 is that of RFC 7049, which has another order of keys of several types.

    >>> encode_cbor({"b": [1, -1], "a": 0.5}).hex(" ")
    'a2 61 61 f9 38 00 61 62 82 01 20'
    """
    pieces: list[bytes] = []
    _encode(value, pieces.append)
    return b"".join(pieces)


def _encode(value: Any, put: Callable[[bytes], None]) -> None:
    kind = type(value)
    if kind is str:
        data = value.encode()
        put(_head(_TEXT, len(data)) + data)
    elif kind is int:
        put(_head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, ~value))
    elif kind is dict:
        put(_head(_MAP, len(value)))
        keys = [(encode_cbor(key), item) for key, item in value.items()]
        for key, item in sorted(keys, key=itemgetter(0)):
            put(key)
            _encode(item, put)
    elif kind is list:
        put(_head(_ARRAY, len(value)))
        for item in value:
            _encode(item, put)
    elif kind is bytes:
        put(_head(_BYTES, len(value)) + value)
    elif kind is float:
        import cbor2

        put(cbor2.dumps(value, canonical=True))
    else:
        put(_SIMPLE[value])


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes((major << 5 | argument,))
    for code, size in ((24, 1), (25, 2), (26, 4)):
        if argument < 1 << 8 * size:
            return bytes((major << 5 | code,)) + argument.to_bytes(size, "big")
    return bytes((major << 5 | 27,)) + argument.to_bytes(8, "big")


# --- checks ---------------------------------------------------------------------------------------

#: Of an array of numpy.
MOST_AXES = 64
LARGEST = (1 << 63) - 1


def is_oversized(shape: Sequence[int], dtype: str | None = None) -> bool:
    """Whether numpy has no array of a shape, stored or decoded; an unknown type may be of any size.

    An extent of zero does not make up for the others: numpy wants them to be countable in bytes.
    """
    count = prod(shape) or prod(filter(None, shape))
    if count <= LARGEST >> 4:  # small enough for elements of 128 bits
        return False
    element = ELEMENT_TYPES.get(dtype or "")
    bits = max(element.bits, ELEMENT_TYPES[element.decoded].bits) if element is not None else 128
    return bits * count // 8 > LARGEST


def check_option(name: str, value: str | None, known: Iterable[str]) -> None:
    """Check the value of an option of a format's own; None is not given."""
    if value is not None and value not in (known := tuple(known)):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")


def parse_size(name: str, value: Any) -> int:
    """Return a number of bytes that is given as a number or a text such as ``"5GB"``."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    nbytes = value
    if found is not None:
        base = 1024 if found["binary"] else 1000
        nbytes = int(float(found["number"]) * base ** " kmgt".index(found["unit"].lower() or " "))
    if type(nbytes) is not int or nbytes < 1:
        known = "is a number of bytes, or a text such as '5GB' or '500MiB'"
        raise ValueError(f"{name} {known}, not {value!r}")
    return nbytes


_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[kmgt]?)(?P<binary>i?)b?", re.IGNORECASE)


def check_text(what: str, text: str, tensor: str | None = None) -> str:
    """Return text that is to be written, which UTF-8 must have: no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedError(
            f"{what} {shown(text)} has lone surrogates, which are not characters",
            tensor=tensor,
            rule="Name",
            hint="Rename it",
        ) from None
    return text


def as_text(name: str, value: Any, *, nan: bool = False) -> str:
    """Return an attribute of a file as text: what is not text as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=nan)
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"the attribute {shown(str(name))} cannot be text: {error}"
        hint = "Make it text, or remove it from ds.attrs"
        raise UnsupportedError(reason, rule="Metadata", hint=hint) from None


def file_name(path: str) -> str:
    """Return the last component of a path or a URL."""
    path = path.partition("?")[0] if "://" in path else path
    return re.split(r"[/\\]", path)[-1]


def file_stem(path: str, *suffixes: str) -> str:
    """Return the last component without the suffix, in whatever case, if it has one of them."""
    name = file_name(path)
    return next((name[: -len(s)] for s in suffixes if name.lower().endswith(s)), name)


def numbered(stem: str, count: int, suffix: str) -> list[str]:
    """Name the files that a checkpoint is split into, as all of its formats do."""
    return [f"{stem}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]


def overlaps(
    ranges: Iterable[tuple[int, int, str]], *, shared: bool = False
) -> list[tuple[int, str, str]]:
    """Find ranges of bytes that begin within another one: where, whose, and whose that is.

    Each is (start, end, name). Empty ranges overlap nothing, equal ones may be `shared` on purpose.
    """
    if shared:
        first: dict[tuple[int, int], str] = {}
        for start, end, name in ranges:
            first.setdefault((start, end), name)
        ranges = [(start, end, name) for (start, end), name in first.items()]
    found = []
    reached, owner = 0, ""
    for start, end, name in sorted(ranges):
        if start < end:
            if start < reached:
                found.append((start, name, owner))
            if end > reached:
                reached, owner = end, name
    return found


def read_each(entries: Iterable[tuple[str, _E]], read: Callable[[str, _E], _T]) -> dict[str, _T]:
    """Read all tensors, each of a name and what is said of it; errors have the name."""
    found = {}
    for name, entry in entries:
        try:
            found[name] = read(name, entry)
        except CheckpointError as error:
            raise error.located(tensor=name) from None
    return found


class Notes:
    """What a user should know of a file, in one short text for each reason."""

    __slots__ = ("_notes",)

    def __init__(self) -> None:
        self._notes: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, where: str) -> None:
        """Count a reason to warn; the first place that has it is named."""
        count, first = self._notes.get(reason, (0, where))
        self._notes[reason] = (count + 1, first)

    def warnings(self) -> tuple[str, ...]:
        """Return the texts, for `Index.warnings`."""
        return tuple(
            f"{first}{f' and {count - 1} more' if count > 1 else ''}: {reason}"
            for reason, (count, first) in self._notes.items()
        )


# --- names of axes --------------------------------------------------------------------------------

#: The attribute that has names of axes, in formats that have room for texts but not for them. It
#: is JSON, names of tensors to a name for each axis, null where an axis has none:
#: ``{"conv.weight":["out","in",null,null]}``. Tensors without a named axis are left out.
DIMS_KEY = "xckpt.dims"


def dims_text(tensors: Mapping[str, Tensor | WantedTensor]) -> str | None:
    """Write the names of axes of tensors as one text, whatever their order; None without names.

    >>> from xckpt.index import Tensor
    >>> dims_text({"w": Tensor("w", "float32", (2, 3), {}, dims=("row", None))})
    '{"w":["row",null]}'
    """
    named = {name: tensor.dims for name, tensor in tensors.items() if any(tensor.dims or ())}
    if not named:
        return None
    return json.dumps(named, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def with_dims(tensors: dict[str, Tensor], text: Any) -> dict[str, Tensor]:
    """Return tensors with the names of axes that a file has for them.

    These are no reason to refuse a file: what is malformed or does not fit a tensor is ignored.
    """
    if not (named := json_object(text) if text and type(text) is str else {}):
        return tensors
    found = dict(tensors)
    for name, tensor in tensors.items():
        dims = named.get(name)
        if type(dims) is list and len(dims) == tensor.ndim and all(map(_is_name, dims)):
            found[name] = replace(tensor, dims=tuple(dims))
    return found


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object that a text of others is; one without members if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if type(found) is dict else {}


def _is_name(value: Any) -> bool:
    if type(value) is not str:
        return value is None
    # Lone surrogates, which JSON can spell, cannot be printed.
    return bool(value) and not any("\ud800" <= character <= "\udfff" for character in value)


# --- what an object is besides its tensors --------------------------------------------------------

#: The attribute that has all else that a Dataset or a tree is, in formats that have room for texts.
#: It is JSON; each field is only there if it says something::
#:
#:     coords   names of the tensors that are coordinates
#:     order    positions in the file of the tensors, in the order of the variables
#:     attrs    names of tensors to their attributes, those that the format has no place for
#:     modules  paths of nodes to their attributes
#:     json     names of the attributes of the file whose text is JSON of something else
ARRANGEMENT_KEY = "xckpt.arrangement"


def arrangement_texts(
    draft: Draft,
    tensors: Mapping[str, Tensor | WantedTensor],
    rule: str = "Metadata",
    *,
    only_texts: bool = False,
) -> dict[str, str]:
    """Return the texts that a file has next to its tensors, by their keys; none without need.

    `tensors` are all of the file by the names that they are read with, in the order that they are
    read in. Errors have the `rule`. With `only_texts`, `as_text` makes texts of the attributes.
    """
    for key in (DIMS_KEY, ARRANGEMENT_KEY):
        if key in draft.attrs:
            reason = f"the attribute {key!r} is where names of axes and coordinates are kept"
            raise UnsupportedError(reason, rule=rule, hint="Rename it")
    for name in tensors:
        check_text("the name", name, name)
    read_as = {tensor.name: name for name, tensor in tensors.items()}
    coords = {read_as[name]: None for name in draft.arrangement.coords if name in read_as}
    order = [read_as[name] for name in draft.arrangement.order if name in read_as]
    said = {
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
    said = {field: value for field, value in said.items() if value}
    compact: Any = {"ensure_ascii": False, "separators": (",", ":")}
    texts = {
        DIMS_KEY: dims_text(tensors),
        ARRANGEMENT_KEY: json.dumps(said, **compact) if said else None,
    }
    what = "a name of an axis or a coordinate"
    return {key: check_text(what, text) for key, text in texts.items() if text is not None}


def attribute_texts(draft: Draft, tensors: Mapping[str, Tensor | WantedTensor]) -> dict[str, str]:
    """Return the attributes of a file that has texts only, and those of `arrangement_texts`."""
    texts = {}
    for key, value in draft.attrs.items():
        if type(key) is not str:
            reason = f"an attribute is named by a {type(key).__name__}"
            raise UnsupportedError(reason, rule="Metadata", hint="Rename it")
        check_text("the attribute", key)
        texts[key] = check_text("an attribute", as_text(key, value, nan=True))
    return texts | arrangement_texts(draft, tensors, only_texts=True)


def _positions(order: list[str], names: list[str], coords: Container[str]) -> list[int]:
    """Return where tensors are that are wanted in some order; none if they are read in it.

    Coordinates and data variables have an order of their own.
    """
    if len(order) != len(names) or all(
        [name for name in order if (name in coords) is kind]
        == [name for name in names if (name in coords) is kind]
        for kind in (True, False)
    ):
        return []
    positions = {name: at for at, name in enumerate(names)}
    return [positions[name] for name in order]


def arranged(index: Index, texts: Mapping[str, Any] | None = None) -> Index:
    """Return an index with what the texts of a file say of it; by default they are attributes.

    What does not fit is ignored, because no tensor depends on it.
    """
    attrs = dict(index.attrs)
    if texts is None:
        texts = {key: attrs.pop(key, None) for key in (DIMS_KEY, ARRANGEMENT_KEY)}
    tensors = with_dims(dict(index.tensors), texts.get(DIMS_KEY))
    said, names = _Said(texts.get(ARRANGEMENT_KEY)), list(tensors)
    for name, own in said.mappings("attrs"):
        if name in tensors:
            tensors[name] = replace(tensors[name], attrs={**own, **tensors[name].attrs})
    for name in said.names("json"):
        if type(attrs.get(name)) is str:
            try:
                attrs[name] = _loaded(attrs[name], DEEPEST_ATTRS)
            except ValueError:
                said.fits = False
    coords = tuple([name for name in said.names("coords") if name in tensors])
    order = said.order(len(names))
    modules = dict(said.mappings("modules"))
    arrangement = Arrangement(coords, tuple([names[at] for at in order]), modules)
    warnings = index.warnings
    if not said.fits:
        warnings += (f"{ARRANGEMENT_KEY!r} is not as xckpt writes it, and ignored in part",)
    return replace(index, tensors=tensors, attrs=attrs, warnings=warnings, arrangement=arrangement)


def _loaded(text: Any, levels: int) -> Any:
    """Return what a JSON text has, or raise ValueError."""
    if type(text) is not str:
        raise ValueError(f"a {type(text).__name__} is not JSON")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not is_json(value, levels):
        raise ValueError("not the JSON of an attribute")
    return value


class _Said:
    """The fields of an arrangement, of which a file may say anything."""

    def __init__(self, text: Any) -> None:
        try:
            fields: Any = {} if text is None else _loaded(text, DEEPEST_ATTRS + 3)
        except ValueError:
            fields = None
        #: Whether all that was asked for has the right type.
        self.fits = type(fields) is dict
        self._fields: dict[str, Any] = fields if self.fits else {}

    def names(self, field: str) -> list[str]:
        found = self._typed(field, list)
        self.fits &= all(type(name) is str for name in found)
        return list(dict.fromkeys([name for name in found if type(name) is str]))

    def mappings(self, field: str) -> list[tuple[str, dict[str, Any]]]:
        found = self._typed(field, dict)
        self.fits &= all(type(value) is dict for value in found.values())
        return [(name, value) for name, value in found.items() if type(value) is dict]

    def order(self, count: int) -> list[int]:
        """Return positions, if they are those of all tensors."""
        found: list[int] = self._typed("order", list)
        if found and not (
            len(found) == count
            and all(type(at) is int for at in found)
            and set(found) == set(range(count))
        ):
            self.fits = False
            return []
        return found

    def _typed(self, field: str, kind: type) -> Any:
        found = self._fields.get(field, kind())
        if type(found) is not kind:
            self.fits = False
            return kind()
        return found


# --- fields of decoded JSON and CBOR --------------------------------------------------------------


def mistyped(what: str, value: Any, expected: str, rule: str = "Schema") -> FormatError:
    """Make the error for a field that is missing or of the wrong type."""
    found = "missing or null" if value is None else type(value).__name__
    if type(value) in {str, int, float, bool}:
        found = shown(value) if type(value) is str else str(value)
    elif type(value) in {list, dict}:
        found = f"{'an array' if type(value) is list else 'a map'} of {len(value)}"
    return FormatError(f"{what} is {found}: expected {expected}", rule=rule)


def mapping(what: str, value: Any, rule: str = "Schema") -> dict[Any, Any]:
    """Return a field that must be a map."""
    if type(value) is not dict:
        raise mistyped(what, value, "a map", rule)
    return value


def number(what: str, value: Any, rule: str = "Schema") -> int:
    """Return a field that must be an integer that is not negative."""
    if type(value) is not int or value < 0:
        raise mistyped(what, value, "a non-negative integer", rule)
    return value


def as_shape(value: Any, most: int, rule: str = "Schema") -> tuple[int, ...]:
    """Return a field that must be a shape, of at most so many elements; zeros do not count."""
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
    """Say how the rest of a file opens, in a hint."""
    return f"The rest opens with drop_variables=[{shown(tensor)}]"
