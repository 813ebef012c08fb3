"""GGUF (``.gguf``), the format of llama.cpp: versions 1 to 3, any byte order, one or several files.

A file has metadata, a list of tensors, and their data::

    "GGUF"   the same in both byte orders
    version  u32; the file is big-endian if the low half is 0 when read as little-endian
    tensors  count    counts, lengths and extents are u64, in version 1 u32
    entries  count
    entry    key text, type u32, value            repeated `entries` times
    tensor   name text, axes u32, as many extents (count), type u32, offset u64
    zeros    up to a multiple of the alignment; offsets count from there
    data

A text is its length and UTF-8. A value is a number, a text, or a list: the type u32 and the count
of its entries, and the entries without types; lists of lists are allowed. Types of values::

    0 u8, 1 i8, 2 u16, 3 i16, 4 u32, 5 i32, 6 f32, 7 bool, 8 text, 9 list, 10 u64, 11 i64, 12 f64

The first extent is the fastest axis, so xckpt reverses shapes. Elements of most types share blocks
with their scales (`xckpt.elements.BLOCK_TYPES`); a block lies within a row. The data and all
offsets are aligned to ``general.alignment`` (u32, a power of two, 32 by default).

The size of the metadata is not stated, so the reader steps over every text; it leaves long lists in
the file. Some readers refuse tensors that are unaligned, share bytes, do not follow the previous
one, or have more than four axes or a name of 64 bytes, as well as odd keys and lists of lists.
xckpt reads such files with a warning.

The files of a split model have names like ``NAME-00001-of-00003.gguf``, and metadata ``split.no``
(from 0), ``split.count`` and ``split.tensors.count``. Offsets count within each file.

Big-endian blocks are supported for the types that converters write: float16 scales are swapped in
Q4_0, Q8_0, Q4_K and Q6_K, and MXFP4 and NVFP4 need no swapping.

xckpt writes version 3, little-endian, in the form that ggml requires: data in the order of the
tensors without gaps, each padded to the alignment. Numbers have the types that they were read with,
or else the smallest of u32, i32, u64, i64 and f32, f64 that holds them; lists prefer i32. Names of
axes are one text, which other readers ignore.

Specification: docs/gguf.md, src/gguf.cpp and src/ggml.c of github.com/ggml-org/ggml at d99724f; for
version 1 at ea9193f.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import BLOCK_TYPES, HALF_FLOATS, nbytes_of
from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import Can, Format, Readable, kit
from xckpt.formats.gguf import metadata
from xckpt.formats.gguf.metadata import BOOL, DEEPEST, LIST, NUMBERS, TEXT, template_code
from xckpt.formats.plan import Draft, Plan, WantedTensor, place_parts
from xckpt.index import FileSet, Index, Part, StoredList, Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT, _LEAST_ALIGNMENT = 32, 8
_NAME_LIMIT = 64  # GGML_MAX_NAME, with the NUL at the end
_MOST_WRITTEN_AXES = 4
# Longer lists stay in the file. Lists with a value for each layer are shorter.
_LONGEST_LIST = 256
_MOST_NESTED = 1 << 16
_MOST_ALIKE = 16  # names that are equal after escaping
_MOST_PADDING = 1 << 12  # bytes that are compared with zero
_HALF_VECTORS = (
    "vectors in half precision, with which llama.cpp does not compute on a CPU; "
    'encoding={"*norm*": {"dtype": "float32"}} keeps those of norms'
)
_ALIGNMENT_KEY, _ARCHITECTURE = "general.alignment", "general.architecture"
_FILE_TYPE = "general.file_type"
# `llama_ftype` of llama.cpp, of files without blocks.
_FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}
_TEMPLATE = "tokenizer.chat_template"
# The attribute of a tensor with the name of another tensor: a factor that is not applied yet.
_SCALE = "scale_tensor"
_SPLIT = ("split.no", "split.count", "split.tensors.count")
_JOIN_ADVICE = "join the parts of a model with `llama-gguf-split --merge FIRST_PART MODEL`"
_SPLIT_NAME = re.compile(r"(?is)(.*)-(\d{5})(-of-(\d{5})\.gguf)")
_KEY = re.compile(r"[a-z0-9_.-]{1,65535}")

_TYPES = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}
_TYPES |= {24: "int8", 25: "int16", 26: "int32", 27: "int64"}
_BLOCKS = {2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k"}
_BLOCKS |= {11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs"}
_BLOCKS |= {18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs"}
_BLOCKS |= {29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4", 41: "q1_0", 42: "q2_0"}
_BLOCK_CODES = {name: code for code, name in _BLOCKS.items()}
_REMOVED = {4: "q4_2", 5: "q4_3", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8"}
_REMOVED |= {36: "iq4_nl_4_4", 37: "iq4_nl_4_8", 38: "iq4_nl_8_8"}
_FIRST_REPACKED = 31  # from here on, they rearranged another type for one processor


class Gguf(Format):
    """GGUF files of llama.cpp and others."""

    name = "gguf"
    description = "GGUF files"
    types = _TYPES
    states_its_files = True
    storage_attrs = (
        *_SPLIT, _ALIGNMENT_KEY, _FILE_TYPE, "general.quantization_version", _SCALE,
    )  # fmt: skip
    can = Can(
        # gguf-py divides the last axis of BF16, and fails for the whole file without an axis.
        scalar_types=tuple([dtype for dtype in _TYPES.values() if dtype != "bfloat16"]),
        layouts=("dense", "blocks"),
        tensor_attrs=(_SCALE,),
        file_attrs=_KEY,
        stated_attrs=_SPLIT,
    )

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file begins with the magic."""
        return head.startswith(_MAGIC)

    def read(self, source: Readable) -> Index:
        """Read the metadata, except long lists, and the list of tensors."""
        reader = _HeadReader(source)
        attrs = reader.attrs()
        tensors = reader.tensors()
        files, version = _file_set(source.name, attrs, reader), str(reader.version)
        index = kit.index_of(self.name, source, tensors, attrs, notes=reader.notes, version=version)
        return kit.with_arrangement(replace(index, files=files, attr_types=reader.attr_types))

    def plan(self, draft: Draft, *, long_names: bool = False) -> Plan:
        """Plan the metadata, the list of tensors, and their data.

        Parameters
        ----------
        draft : Draft
            Contents of the file.
        long_names : bool, default False
            Allow names of 64 bytes and more, which llama.cpp refuses.
        """
        self.check(draft)
        attrs = {key: value for key, value in draft.attrs.items() if key not in _SPLIT}
        losses = _unloadable(draft.tensors, attrs)
        alignment = attrs.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not _is_power(alignment) or alignment >= 1 << 32:
            reason = f"the attribute {_ALIGNMENT_KEY!r} must be a power of two of 8 or more"
            hint = f"Remove it from ds.attrs, or pass unset_attrs={_ALIGNMENT_KEY!r} to convert"
            raise UnsupportedError(reason, rule="Alignment", hint=hint)
        if alignment < _LEAST_ALIGNMENT:
            attrs[_ALIGNMENT_KEY] = alignment = _DEFAULT_ALIGNMENT
            losses[f"less than {_LEAST_ALIGNMENT}, written as {alignment}"] = [_ALIGNMENT_KEY]
        attrs |= kit.arrangement_texts(draft, draft.tensors)
        tensors = draft.tensors.values()
        if _FILE_TYPE in attrs:
            attrs[_FILE_TYPE] = _file_type(attrs[_FILE_TYPE], tensors)
        padded = [kit.aligned(tensor.parts["data"].nbytes, alignment) for tensor in tensors]
        *offsets, nbytes = accumulate(padded, initial=0)
        types = {**draft.attr_types, _ALIGNMENT_KEY: "uint32"}
        entries = [metadata.entry(str(key), attrs[key], types.get(key)) for key in attrs]
        infos = [
            self._info(tensor, offset, long_names=long_names)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        head = _MAGIC + struct.pack("<IQQ", 3, len(infos), len(entries))
        head += b"".join([*entries, *infos])
        # A file without tensors is not padded.
        start = kit.aligned(len(head), alignment) if infos else len(head)
        plan = Plan.headed(head, place_parts(tensors, offsets, start), start + nbytes)
        return replace(plan, losses=losses)

    def _info(self, tensor: WantedTensor, offset: int, *, long_names: bool) -> bytes:
        name = kit.check_text("the name", tensor.name, tensor.name).encode()
        if b"\0" in name:
            reason = "its name has a NUL, where other readers end it"
            raise UnsupportedError(reason, tensor=tensor.name, rule="Name", hint="Rename it")
        if len(name) >= _NAME_LIMIT and not long_names:
            reason = f"its name has {len(name)} bytes; llama.cpp reads {_NAME_LIMIT - 1}"
            hint = "Rename it, or pass long_names=True"
            raise UnsupportedError(reason, tensor=tensor.name, rule="Name", hint=hint)
        if tensor.ndim > _MOST_WRITTEN_AXES:
            reason = f"it has {tensor.ndim} axes; GGUF allows {_MOST_WRITTEN_AXES}"
            raise UnsupportedError(reason, tensor=tensor.name, rule="Shape", hint="Reshape it")
        code = _BLOCK_CODES.get(tensor.dtype, self.spellings.get(tensor.dtype))
        shape = struct.pack(f"<I{tensor.ndim}Q", tensor.ndim, *reversed(tensor.shape))
        return struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", code, offset)


# Names of layers in models of other libraries, and names of llama.cpp.
_FOREIGN_LAYER = re.compile(r"(?:.+\.)?(?:layers?|h|blocks?)\.[0-9]+\..+")
_LLAMA_NAME = re.compile(r"blk\.[0-9]+\..+|token_embd\.weight")


def _unloadable(
    tensors: Mapping[str, WantedTensor], attrs: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return why llama.cpp cannot run a language model, with the names concerned."""
    names = list(tensors)
    if _ARCHITECTURE in attrs:
        # ggml adds and multiplies float32 by float32 only: `binary_op` in ggml-cpu/binary-ops.cpp.
        half = [t.name for t in tensors.values() if len(t.shape) == 1 and t.dtype in HALF_FLOATS]
        return {_HALF_VECTORS: half} if half and any(map(_LLAMA_NAME.fullmatch, names)) else {}
    unloadable = [name for name in names if _FOREIGN_LAYER.fullmatch(name)]
    if unloadable:
        hint = "its convert_hf_to_gguf.py gives names and metadata"
        return {f"no {_ARCHITECTURE}, and names that llama.cpp does not load; {hint}": unloadable}
    if any(map(_LLAMA_NAME.fullmatch, names)):
        return {"missing in ds.attrs, and llama.cpp loads no model without it": [_ARCHITECTURE]}
    return {}


def _file_type(stated: Any, tensors: Collection[WantedTensor]) -> Any:
    """Return the stated type of a file, or the type of most elements if no tensor has that one."""
    sizes: Counter[int] = Counter()
    for tensor in tensors:
        if tensor.dtype in BLOCK_TYPES:
            return stated
        if tensor.dtype in _FILE_TYPES:
            sizes[_FILE_TYPES[tensor.dtype]] += prod(tensor.shape)
    # The first type stands for all tensors, and others for most of them.
    is_true = stated in sizes and (stated != _FILE_TYPES["float32"] or len(sizes) == 1)
    is_kept = type(stated) is not int or is_true or not sizes
    return stated if is_kept else sizes.most_common(1)[0][0]


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


# --- reading --------------------------------------------------------------------------------------


_compiled = cache(struct.Struct)


class _Info(NamedTuple):
    """An entry in the list of tensors."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    entry_offset: int


class _HeadReader:
    """A reader of the header: metadata and list of tensors."""

    def __init__(self, source: Readable) -> None:
        self.size, self.notes = source.size, kit.Notes()
        self.attr_types: dict[str, str] = {}
        self._alignment = _DEFAULT_ALIGNMENT
        self.split_offset = 0  # offset of the number of files
        self._nested = 0  # number of entries in nested lists
        self._escaped: dict[tuple[str, bytes], str] = {}  # names that are not UTF-8
        self.cursor = cursor = kit.Cursor(source)
        magic = cursor.take(4, "the magic")
        if magic != _MAGIC:
            raise FormatError(f"the file begins {magic!r}, not {_MAGIC!r}", rule="Magic", offset=0)
        word = cursor.take(4, "the version")
        version = int.from_bytes(word, "little")
        self.byteorder: Any = "little" if version & 0xFFFF else "big"
        self.version = version if self.byteorder == "little" else int.from_bytes(word, "big")
        if self.version not in {1, 2, 3}:
            reason = f"version {self.version}, or {version:#x}, is not 1, 2 or 3"
            raise UnsupportedError(reason, offset=4, rule="Version")
        if self.byteorder == "big" and self.version < 3:
            reason = "big-endian files begin with version 3"
            self.notes.add(reason, f"version {self.version}")
        self._endian = "<" if self.byteorder == "little" else ">"
        self._length_code = "I" if self.version == 1 else "Q"
        self._u32, self._length = self._struct("I"), self._struct(self._length_code)
        self.tensor_count = cursor.number(self._length, "the number of tensors")
        self.entry_count = cursor.number(self._length, "the number of entries")
        width = self._length.size
        least = self.entry_count * (width + 5) + self.tensor_count * (2 * width + 8)
        if least > cursor.left:
            reason = f"{self.entry_count} entries and {self.tensor_count} tensors need at least "
            reason += f"{least} bytes, but only {cursor.left} follow"
            raise FormatError(reason, offset=8, rule="Count")

    def _struct(self, code: str) -> struct.Struct:
        return _compiled(self._endian + code)

    def _text(self, label: str) -> str | bytes:
        """Read a text, as bytes if it is not UTF-8."""
        data = self.cursor.take(self.cursor.number(self._length, label), label)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    # --- metadata ---

    def attrs(self) -> dict[str, Any]:
        """Read all entries."""
        attrs: dict[str, Any] = {}
        for _ in range(self.entry_count):
            entry_offset = self.cursor.at
            text = self._text("a key")
            key = self._named(text, "key", attrs) if type(text) is bytes else str(text)
            if key in attrs:
                raise FormatError(
                    f"the key {shown(key)} twice", offset=entry_offset, rule="DuplicateKey"
                )
            if type(text) is str and _KEY.fullmatch(key) is None:
                self.notes.add("a key must be of lower-case letters, digits, _ and .", shown(key))
            kind = self.cursor.number(self._u32, "the type of a value")
            if key == "split.count":
                self.split_offset = entry_offset
            if key == _ALIGNMENT_KEY and kind != 4:
                reason = f"{_ALIGNMENT_KEY} is of type {kind}, not u32"
                raise FormatError(reason, offset=entry_offset, rule="Alignment")
            try:
                attrs[key] = self._value(kind, key)
            except FormatError as error:
                error.reason = f"the value of {shown(key)}: {error.reason}"
                raise error.located(offset=self.cursor.at) from None
            if key.startswith(_TEMPLATE):
                self._add_code(key, attrs[key])
            if key == _ALIGNMENT_KEY and not _is_power(attrs[key]):
                reason = f"{_ALIGNMENT_KEY} is {attrs[key]}, not a power of two"
                raise FormatError(reason, offset=entry_offset, rule="Alignment")
        self._alignment = attrs.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        if self._alignment < _LEAST_ALIGNMENT:
            reason = f"it must be a multiple of {_LEAST_ALIGNMENT}"
            self.notes.add(reason, f"{_ALIGNMENT_KEY} {self._alignment}")
        return attrs

    def _add_code(self, key: str, template: Any) -> None:
        """Note expressions of a chat template that do more than format."""
        text = template.decode("latin-1") if type(template) is bytes else template
        if type(text) is str:
            self.notes.executes += [f"{key}: {code}" for code in template_code(text)]

    def _named(self, data: bytes, label: str, names: Mapping[str, Any]) -> str:
        """Return an escaped form of a name that is not UTF-8, the same for equal names."""
        if (label, data) in self._escaped:
            return self._escaped[label, data]
        name = data.decode(errors="backslashreplace")
        for _ in range(_MOST_ALIKE):
            if name not in names:
                break
            name += "_"
        self.notes.add(f"a {label} is not UTF-8, and escaped", shown(name))
        self._escaped[label, data] = name
        return name

    def _value(self, kind: int, key: str) -> Any:
        if kind == TEXT:
            return self._text("a text")
        if kind == LIST:
            return self._list(key)
        dtype, code = self._number_type(kind, self.cursor.at - 4)
        value = self.cursor.number(self._struct(code), "a number")
        if kind == BOOL:
            return self._bools([value], key)[0]
        # `default_type` chooses the others again.
        if dtype != metadata.default_type([value], in_list=False):
            self.attr_types[key] = dtype
        return value

    def _number_type(self, kind: int, offset: int) -> tuple[str, str]:
        if kind not in NUMBERS:
            reason = f"the type {kind} is unknown, and therefore the position of the next entry"
            raise FormatError(reason, offset=offset, rule="ValueType")
        return NUMBERS[kind]

    def _bools(self, codes: Sequence[int], key: str) -> list[bool]:
        if any(code > 1 for code in codes):
            self.notes.add("a bool that is neither 0 nor 1 is true", shown(key))
        return [code != 0 for code in codes]

    def _list(self, key: str, depth: int = 1) -> Any:
        cursor = self.cursor
        if depth > DEEPEST:
            raise FormatError(f"lists are nested deeper than {DEEPEST} levels", rule="Nesting")
        type_offset = cursor.at
        kind = cursor.number(self._u32, "the type of the entries of a list")
        count = cursor.number(self._length, "the length of a list")
        if kind == TEXT:
            dtype, code, least = "text", "", self._length.size
        elif kind == LIST:
            dtype, code, least = "list", "", self._length.size + 4
        else:
            dtype, code = self._number_type(kind, type_offset)
            least = self._struct(code).size
        if least * count > cursor.left:
            reason = f"a list has {count} entries of at least {least} bytes"
            reason += f", but only {cursor.left} bytes follow"
            raise FormatError(reason, offset=cursor.at, rule="Truncated")
        self._nested += count if depth > 1 or kind == LIST else 0
        if self._nested > _MOST_NESTED:
            reason = f"lists of lists have more than {_MOST_NESTED} entries"
            raise UnsupportedError(reason, offset=cursor.at, rule="Nesting")
        if kind == LIST:
            self.notes.add("ggml refuses lists of lists", f"the value of {shown(key)}")
            return [self._list(key, depth + 1) for _ in range(count)]
        if dtype not in {"text", "int32", "float32"} or (dtype == "text" and not count):
            self.attr_types[key] = dtype
        if count > _LONGEST_LIST and depth == 1:
            return self._stored_list(dtype, count, least)
        if kind == TEXT:
            return [self._text("a text") for _ in range(count)]
        layout = struct.Struct(f"{self._endian}{count}{code}")
        values = layout.unpack(cursor.take(layout.size, "a list"))
        return self._bools(values, key) if kind == BOOL else list(values)

    def _stored_list(self, dtype: str, count: int, least: int) -> StoredList:
        """Skip a list, and return its position in the file."""
        start, order = self.cursor.at, self.byteorder
        if dtype == "text":
            self.cursor.skip_texts(count, self._length)
            nbytes = self.cursor.at - start
            part = Part("uint8", (nbytes,), start, nbytes, byteorder=order)
            return StoredList(part, count, least)
        self.cursor.skip(count * least, "a list")
        return StoredList(Part(dtype, (count,), start, count * least, byteorder=order), count)

    # --- tensors ---

    def tensors(self) -> dict[str, Tensor]:
        """Read the list of tensors, with the positions of their data; `attrs` come before it."""
        infos, cursor = self._infos(), self.cursor
        start, padding_start = kit.aligned(cursor.at, self._alignment), cursor.at
        nbytes = min(start - padding_start, cursor.left, _MOST_PADDING)
        if infos and any(cursor.take(nbytes, "padding")):
            reason = "before the data is not zero: is the number of tensors right?"
            self.notes.add(reason, f"padding at byte {padding_start}")
        tensors = {info.name: self._tensor(info, start) for info in infos}
        for name, tensor in tensors.items():
            scale = f"{name.removesuffix('.weight')}.scale"
            if tensor.dtype == "nvfp4" and scale in tensors:
                tensors[name] = replace(tensor, attrs={_SCALE: scale})
        tensors = kit.with_cut_data(tensors, self.size)
        ranges = [
            (part.offset, part.offset + part.nbytes, tensor.name)
            for tensor in tensors.values()
            for part in tensor.parts.values()
            if part.nbytes
        ]
        self._check_order(infos, tensors, self._overlapping(ranges))
        if ranges and not any(tensor.problem for tensor in tensors.values()):
            data_end = max([end for _, end, _ in ranges])
            self._check_end(data_end, start + kit.aligned(data_end - start, self._alignment))
        return tensors

    def _infos(self) -> list[_Info]:
        cursor, code = self.cursor, self._length_code
        # Extents, type and offset, by number of axes.
        fields = [self._struct(f"{rank}{code}IQ") for rank in range(kit.MOST_AXES + 1)]
        infos: list[_Info] = []
        names: dict[str, None] = {}
        for _ in range(self.tensor_count):
            entry_offset = cursor.at
            data = cursor.take(cursor.number(self._length, "a name"), "the name of a tensor")
            try:
                name = data.decode()
            except UnicodeDecodeError:
                name = self._named(data, "name", names)
            if name in names:
                reason = "two tensors have this name"
                raise FormatError(reason, offset=entry_offset, tensor=name, rule="DuplicateTensor")
            names[name] = None
            rank = cursor.number(self._u32, "the number of axes")
            if rank > kit.MOST_AXES:
                reason = f"{rank} axes are more than {kit.MOST_AXES}"
                raise FormatError(reason, offset=entry_offset, tensor=name, rule="Shape")
            *extents, kind, offset = cursor.fields(fields[rank], "an entry in the list of tensors")
            if rank > _MOST_WRITTEN_AXES:
                self.notes.add(f"more than {_MOST_WRITTEN_AXES} axes", f"tensor {shown(name)}")
            if len(data) >= _NAME_LIMIT or "\0" in name:
                reason = f"its name has {_NAME_LIMIT} bytes or more, or a NUL"
                self.notes.add(reason, f"tensor {shown(name)}")
            infos.append(_Info(name, tuple(extents[::-1]), kind, offset, entry_offset))
        return infos

    def _tensor(self, info: _Info, start: int) -> Tensor:
        name, shape, kind, offset, entry_offset = info
        location: Any = {"offset": entry_offset, "tensor": name}
        fields: dict[str, Any] = {}
        dtype = _TYPES.get(kind) or _BLOCKS.get(kind) or _REMOVED.get(kind, f"type {kind}")
        if kit.is_oversized(shape, _TYPES.get(kind)):
            reason = f"the shape {shown(str(list(shape)))} is larger than an array can be"
            raise FormatError(reason, rule="Shape", **location)
        element, stored = dtype, shape
        if kind in _BLOCKS:
            block = BLOCK_TYPES[dtype]
            fields["layout"] = "blocks"
            if not shape or shape[-1] % block.size:
                length = shape[-1] if shape else 1
                reason = f"rows of {length} elements are not blocks of {block.size}"
                fields["problem"] = FormatError(reason, rule="BlockSize", **location)
                return Tensor(name, dtype, shape, {}, **fields)
            element, stored = "uint8", (*shape[:-1], shape[-1] // block.size * block.nbytes)
            if block.halves is None and self.byteorder == "big":
                reason = f"the storage of {dtype} blocks in a big-endian file is undefined"
                fields["problem"] = UnsupportedError(reason, rule="Endian", **location)
        elif kind not in _TYPES:
            fields["problem"] = _unknown_type(kind).located(**location)
            return Tensor(name, dtype, shape, {}, **fields)
        nbytes = nbytes_of(element, prod(stored))
        # The offset of an empty tensor has no meaning, and may be anything.
        place = start + offset if nbytes else min(start + offset, self.size)
        part = Part(element, stored, place, nbytes, byteorder=self.byteorder)
        return Tensor(name, dtype, shape, {"data": part}, **fields)

    def _overlapping(self, ranges: Iterable[tuple[int, int, str]]) -> set[str]:
        """Return the names of tensors that share bytes, with a warning."""
        overlapping: set[str] = set()
        # Sorting 100,000 ranges is slow; neighbours show whether it is needed.
        if any(end > begin for (_, end, _), (begin, _, _) in pairwise(ranges)):
            inside = [entry for entry in ranges if entry[1] <= self.size]
            for _, name, owner in kit.find_overlaps(inside):
                overlapping.update((name, owner))
                self.notes.add(f"the data overlap {shown(owner)}", f"tensor {shown(name)}")
        return overlapping

    def _check_order(
        self, infos: Iterable[_Info], tensors: Mapping[str, Tensor], overlapping: set[str]
    ) -> None:
        """Warn about offsets that ggml refuses."""
        next_offset: int | None = 0  # None after a tensor of unknown size
        for info in infos:
            tensor = tensors[info.name]
            if info.offset % self._alignment and tensor.nbytes:
                reason = f"data do not begin at a multiple of {self._alignment} bytes"
                self.notes.add(reason, f"tensor {shown(info.name)}")
            elif not (
                tensor.problem or info.name in overlapping or next_offset in {None, info.offset}
            ):
                reason = "the data do not begin where the previous tensor ends, as ggml requires"
                self.notes.add(reason, f"tensor {shown(info.name)}")
            end = kit.aligned(info.offset + tensor.nbytes, self._alignment)
            next_offset = end if tensor.problem is None else None

    def _check_end(self, data_end: int, padded_end: int) -> None:
        """Warn about bytes after the last tensor; raise an error if they are another file."""
        if padded_end < self.size:
            for at in (data_end, padded_end):  # files that were joined without padding, or with it
                self.cursor.at = at
                if self.cursor.peek(4) == _MAGIC:
                    raise kit.joined_files(at, f"Cut the file at byte {at}, and {_JOIN_ADVICE}")
            reason = f"{self.size - padded_end} bytes follow the last tensor, and are ignored; "
            self.notes.add(reason + "the tensors are intact", f"byte {padded_end}")


def _unknown_type(kind: int) -> UnsupportedError:
    """Return the problem of a tensor whose element type ggml removed, or never had."""
    name = _REMOVED.get(kind)
    if name is None:
        reason = f"the element type {kind} is unknown, so the size of its elements is unknown"
        hint = "A newer or another version of llama.cpp may have written it: convert it to a known"
        hint += " type with llama-quantize of that version"
        return UnsupportedError(reason, rule="Type", hint=hint)
    reason = f"the element type {kind}, {name.upper()}, was removed from GGUF"
    hint = "Quantise the original model again"
    if kind >= _FIRST_REPACKED:
        hint += (
            f" to {name[:-4].upper()}, which llama.cpp now rearranges itself when it loads a model"
        )
    else:
        hint += ", for example to Q4_K_M"
    return UnsupportedError(reason, rule="Type", hint=hint)


def _file_set(path: str, attrs: Mapping[str, Any], reader: _HeadReader) -> FileSet | None:
    """Return the list of files of a split model, after checking this file's position in it."""
    number, count, total = [attrs.get(key) for key in _SPLIT]
    if count is None or (type(count) is int and count < 2):
        return None
    if type(count) is not int or type(number) is not int or type(total) not in {int, type(None)}:
        reader.notes.add("must be numbers; this file is read alone", "split.*")
        return None
    name = kit.file_name(path)
    match = _SPLIT_NAME.fullmatch(name)
    if match is None:
        ending = f"-{number + 1:05}-of-{count:05}.gguf"
        reason = f"file {number + 1} of {count}, by its metadata, is read alone: to open all, "
        reason += f"rename it so that it ends with {shown(ending)} and begins as the others do, or "
        reader.notes.add(f"{reason}{_JOIN_ADVICE}", shown(name))
        return None
    stem, named_number, ending, named_count = match[1], int(match[2]), match[3], int(match[4])
    if (number + 1, count) != (named_number, named_count):
        reason = f"the file is {number + 1} of {count}, but its name is {named_number} of "
        reason += f"{named_count}"
        hint = f"It may have been renamed: it should end with '-{number + 1:05}-of-{count:05}.gguf'"
        raise FormatError(reason, offset=reader.split_offset, rule="Split", hint=hint)
    names = tuple([f"{stem}-{position + 1:05}{ending}" for position in range(count)])
    return FileSet(names, number, reader.split_offset, total)
