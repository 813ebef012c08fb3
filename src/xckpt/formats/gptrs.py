r"""gpt.rs: its checkpoints (``GPTRSCHK``) and tensor archives (``GPTRSTEN``), versions 1 and 2.

All integers are unsigned and little-endian; nothing is aligned. Version 2 has an index::

    GPTRSCHK                              GPTRSTEN
    "GPTRSCHK"                            "GPTRSTEN"
    version u32 = 2                       version u32 = 2
    length u32, config (JSON)
    length u32, index                     length u32, index
    data                                  data

    index:  number of tensors u32, then for each
            length u32, name (UTF-8)
            base id u128                  -
            number of axes u32, extents u64
            element type u32              0 float32, 1 float16, 2 bfloat16, 3 int32
            requires gradient u8          0 is false, any other value true
            offset u64, nbytes u64        absolute; row-major data

In version 1, the records follow the magic, the version and the config: the number of tensors, then
for each tensor the fields of the index without id and offset, and its data.

Early files of version 2 have an index in the encoding of bincode 1: the same fields, but with 64
bits for the number of tensors, the lengths of names and the numbers of axes. Neither magic nor
version distinguishes the encodings. An index that is invalid in the newer one is read in the older
one, which must then fill it exactly.

The base id is derived from the name (see `xckpt.identity`), or 0 if it is not stored; names of
parameters are ASCII. Entries may be in any order; data may have gaps and be shared. Up to the end
of 2025 ``config`` was the config of a GPT; later it is an object with ``kind``, ``config`` and
optionally ``runtime``. gpt.rs ignores further keys, and xckpt uses one, ``xckpt.dims``, for names
of axes. An archive has no room for them.

xckpt writes version 2 in the form of gpt.rs's exporter: tensors sorted by name, with consecutive
data. A tensor without axes gets an axis of length 1, because gpt.rs does not read it otherwise.

Specification: docs/file_formats.md, crates/gpt-rs/src/checkpoint, src/io/tensor_archive.rs and
scripts/gptrs_eval/checkpoint.py of github.com/Lallapallooza/gpt.rs, commits 60c78c3 (version 1),
2f8370f (bincode) and 99570e8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from struct import Struct
from typing import Any, NamedTuple

from xckpt.elements import nbytes_of
from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats import Can, Format, Readable, kit
from xckpt.formats.plan import LOST_DIMS, LOST_SCALARS, Draft, Plan, PlannedPart, WantedTensor
from xckpt.identity import base_id
from xckpt.index import Index, Part, Tensor

_CHECKPOINT, _ARCHIVE = b"GPTRSCHK", b"GPTRSTEN"
_U32, _U64 = Struct("<I"), Struct("<Q")
_ID_NBYTES = 16
_LARGEST_U32 = (1 << 32) - 1

# An entry after its name and id, by number of axes: extents, element type, whether it requires a
# gradient, offset where there is an index, size of the data.
_INDEXED = [Struct(f"<{rank}QIBQQ") for rank in range(kit.MOST_AXES + 1)]
_INLINE = [Struct(f"<{rank}QIBQ") for rank in range(kit.MOST_AXES + 1)]

_TYPES = dict(enumerate(("float32", "float16", "bfloat16", "int32")))


class Gptrs(Format):
    """gpt.rs: checkpoints (GPTRSCHK) and tensor archives (GPTRSTEN), versions 1 and 2."""

    name = "gptrs"
    description = "gpt.rs checkpoints and tensor archives"
    # Upstream has no fixed suffixes; its tools and its documentation use these.
    shared_suffixes = (".bin",)
    types = _TYPES
    storage_attrs = ("ids", "base_id")
    can = Can(
        types=("float32", "int32"),  # gpt.rs reads no others
        tensor_attrs=("requires_grad", "base_id"),
        file_attrs=("kind", "config", "runtime", "ids"),
    )

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file begins with a magic of gpt.rs."""
        return head.startswith((_CHECKPOINT, _ARCHIVE))

    def read(self, source: Readable) -> Index:
        """Read the index of a checkpoint or an archive, but no data."""
        cursor = kit.Cursor(source)
        magic = cursor.take(8, "the magic")
        if magic not in {_CHECKPOINT, _ARCHIVE}:
            raise FormatError(f"the file begins {magic!r}", offset=0, rule="Magic")
        version = cursor.number(_U32, "the version")
        if version not in {1, 2}:
            reason = f"version {version} is unknown; 1 and 2 are supported"
            raise UnsupportedError(reason, offset=8, rule="Version")
        attrs: dict[str, Any] = {}
        notes = kit.Notes()
        has_config = magic == _CHECKPOINT
        if has_config:
            length, start = cursor.number(_U32, "length of the config"), cursor.at
            if _LARGEST_CONFIG < length <= cursor.left:
                reason = f"the config has {length} bytes, more than {_LARGEST_CONFIG}"
                raise FormatError(reason, offset=start, rule="ConfigLength")
            attrs = _parse_config(cursor.take(length, "the config"), start, notes)
        if version == 1:
            collected, dialect = _Collected(cursor.at, source.size, has_config=has_config), "1"
            collected.add(_entries(cursor, _U32, ids=False, by_rank=_INLINE))
        else:
            collected, dialect = _indexed(cursor, source.size, has_config=has_config)
        collected.note(notes)
        tensors = kit.with_dims(collected.tensors, attrs.pop(kit.DIMS_KEY, None))
        if collected.has_ids:
            attrs["ids"] = "stored"
        return kit.index_of(self.name, source, tensors, attrs, notes=notes, version=dialect)

    def plan(
        self,
        draft: Draft,
        *,
        container: str | None = None,
        kind: str | None = None,
        config: Any = None,
        ids: str | None = None,
    ) -> Plan:
        """Lay out a checkpoint or an archive of version 2.

        Parameters
        ----------
        draft : Draft
            Contents of the file.
        container : {"checkpoint", "tensors"}, optional
            Container: ``GPTRSCHK``, or ``GPTRSTEN``, which has neither a config nor ids. By default
            a checkpoint if the kind of the model is known.
        kind : str, optional
            Kind of the model. By default the attribute ``kind`` of the draft.
        config : object, optional
            Config of the model, any JSON. By default the attribute ``config`` of the draft.
        ids : {"stored", "zero"}, optional
            Base ids in the file: derived from the names, or 0, in which case gpt.rs derives them.
            By default the attribute ``ids`` of the draft, else zero, as gpt.rs's exporter does.
        """
        kit.check_option("container", container, ("checkpoint", "tensors"))
        kit.check_option("ids", ids, ("stored", "zero"))
        self.check(draft)
        model = _model(draft, container, kind, config)
        if model is None and (ids or kind or config is not None):
            raise ValueError("without a kind, this is an archive, which has no config and no ids")
        stored = (ids or draft.attrs.get("ids")) == "stored"
        entries = [
            self._entry(tensor, ids=None if model is None else stored)
            for tensor in draft.tensors.values()
        ]
        entries.sort(key=lambda entry: entry.name)
        start = (_ARCHIVE if model is None else _CHECKPOINT) + _U32.pack(2)
        start += b"" if model is None else _sized(model, "the config")
        offset = len(start) + 2 * _U32.size + sum([entry.listed_nbytes for entry in entries])
        index, planned = [_U32.pack(len(entries))], []
        for entry in entries:
            name, rank = entry.name.encode(), len(entry.shape)
            base = b"" if entry.identity is None else entry.identity.to_bytes(_ID_NBYTES, "little")
            fields = _INDEXED[rank].pack(*entry.shape, entry.tag, entry.flag, offset, entry.nbytes)
            index += [_U32.pack(len(name)), name, base, _U32.pack(rank), fields]
            part = draft.tensors[entry.name].parts["data"]
            planned.append(PlannedPart(entry.name, "data", part, offset))
            offset += entry.nbytes
        head = start + _sized(b"".join(index), "the index")
        tensors = draft.tensors.values()
        dims = [tensor.name for tensor in tensors if any(tensor.dims or ()) and model is None]
        scalars = [tensor.name for tensor in tensors if not tensor.ndim]
        losses = {LOST_DIMS: dims, LOST_SCALARS: scalars}
        return replace(Plan.headed(head, planned, offset), losses=losses)

    def _entry(self, tensor: WantedTensor, *, ids: bool | None) -> _Entry:
        """Return the index entry of a new tensor; `ids` is None in an archive, which has no ids."""
        name, flag = tensor.name, tensor.attrs.get("requires_grad", False)
        try:
            name.encode("utf-8" if ids is None else "ascii")
        except UnicodeEncodeError as error:
            container = "archive" if ids is None else "checkpoint"
            characters = name[error.start : error.end]
            reason = f"gpt.rs refuses the {container} because of {characters!r} in a name"
            hint = "Rename it" + ("" if ids is None else "; container='tensors' takes any text")
            raise UnsupportedError(reason, tensor=name, rule="Name", hint=hint) from None
        identity = None if ids is None else base_id(name) if ids else 0
        if not isinstance(flag, Hashable) or flag not in {False, True}:
            reason = f"the attribute requires_grad is {flag!r}, neither True nor False"
            hint = "Set it, or remove it"
            raise UnsupportedError(reason, tensor=name, rule="RequiresGrad", hint=hint)
        tag, nbytes = self.spellings[tensor.dtype], nbytes_of(tensor.dtype, tensor.size)
        return _Entry(0, name, identity, tensor.shape or (1,), tag, bool(flag), 0, nbytes)


class _Entry(NamedTuple):
    """The description of a tensor in a file, at byte `at`; `identity` is None in an archive."""

    at: int
    name: str
    identity: int | None
    shape: tuple[int, ...]
    tag: int
    flag: int
    offset: int
    nbytes: int

    @property
    def listed_nbytes(self) -> int:
        """Size of the entry in an index, in bytes."""
        identity = 0 if self.identity is None else _ID_NBYTES
        name = len(self.name.encode())
        return 2 * _U32.size + name + identity + _INDEXED[len(self.shape)].size


# --- reading --------------------------------------------------------------------------------------


def _indexed(cursor: kit.Cursor, size: int, *, has_config: bool) -> tuple[_Collected, str]:
    """Read an index in the newer encoding, or else in that of bincode; the file states neither."""
    length = cursor.number(_U32, "length of the index")
    start = cursor.at
    cursor.enter(length, "the index")
    collected = _Collected(start + length, size, has_config=has_config)
    try:
        collected.add(_entries(cursor, _U32, ids=has_config))
    except CheckpointError as error:
        cursor.at = start
        try:
            entries = list(_entries(cursor, _U64, ids=has_config))
        except CheckpointError as older_error:
            # Both fail: the error of the encoding that parsed further is more informative.
            raise max(error, older_error, key=lambda e: e.offset or 0) from None
        collected = _Collected(start + length, size, has_config=has_config)
        collected.add(entries)
        return collected, "2-bincode"
    return collected, "2"


def _entries(
    cursor: kit.Cursor, lengths: Struct, *, ids: bool, by_rank: Sequence[Struct] = _INDEXED
) -> Iterator[_Entry]:
    """Read entries with lengths of this encoding; 64-bit lengths must fill the index exactly."""
    smallest = 2 * lengths.size + by_rank[0].size + (_ID_NBYTES if ids else 0)
    at = cursor.at
    count = cursor.number(lengths, "number of tensors")
    if count * smallest > cursor.left:
        reason = f"{count} tensor(s) need {count * smallest} bytes or more, "
        reason += f"but {cursor.left} are left"
        raise FormatError(reason, offset=at, rule="TensorCount")
    for _ in range(count):
        at = cursor.at
        name = cursor.text(cursor.number(lengths, "length of a name"), "name of a tensor", "Name")
        identity = int.from_bytes(cursor.take(_ID_NBYTES, "a base id"), "little") if ids else None
        rank_at = cursor.at
        rank = cursor.number(lengths, "number of axes")
        if rank > kit.MOST_AXES:
            cursor.skip(8 * rank, "a shape")
            reason = f"{rank} axes are more than the {kit.MOST_AXES} that arrays can have"
            raise UnsupportedError(reason, offset=rank_at, tensor=name, rule="Rank")
        fields = cursor.fields(by_rank[rank], "a description")
        tag, flag, *stated, nbytes = fields[rank:]
        offset = stated[0] if stated else cursor.at
        if not stated:  # in version 1, the data follow
            with kit.locating(tensor=name):
                cursor.skip(nbytes, "data")
        yield _Entry(at, name, identity, fields[:rank], tag, flag, offset, nbytes)
    if lengths is _U64 and cursor.left:
        reason = f"{cursor.left} bytes follow the last entry of the index"
        raise FormatError(reason, offset=cursor.at, rule="IndexLength")


class _Collected:
    """Checks and collects the tensors of one file, whose data are after `data_start`."""

    def __init__(self, data_start: int, size: int, *, has_config: bool) -> None:
        self._data_start, self._size, self._has_config = data_start, size, has_config
        self._nameless: list[str] = []
        self._ranges: list[tuple[int, int, str]] = []
        self.tensors: dict[str, Tensor] = {}
        self.has_ids = False

    def add(self, entries: Iterable[_Entry]) -> None:
        """Add the tensors described by entries, after checking each entry."""
        for entry in entries:
            name, shape, nbytes = entry.name, entry.shape, entry.nbytes
            if name in self.tensors:
                raise _broken(entry, "another tensor before it has this name", "DuplicateName")
            attrs: dict[str, Any] = {"requires_grad": entry.flag != 0}
            if self._has_config:
                self._identify(entry, attrs)
            dtype = _TYPES.get(entry.tag)
            if dtype is None:
                supported = "0 (f32), 1 (f16), 2 (bf16) or 3 (i32)"
                reason = f"the element type {entry.tag} is unknown: expected {supported}"
                raise _broken(entry, reason, "Dtype")
            if kit.is_oversized(shape, dtype):
                raise _broken(entry, f"the shape {shape} is larger than an array can be", "Shape")
            expected = nbytes_of(dtype, prod(shape))
            if nbytes != expected:
                reason = f"{nbytes} bytes of data: expected {expected} for {dtype} of shape {shape}"
                raise _broken(entry, reason, "ByteLength")
            start, end = entry.offset, entry.offset + nbytes
            if end > self._size or (nbytes and start < self._data_start):
                data_range = f"{self._data_start} to {self._size}"
                error = _broken(
                    entry, f"bytes {start} to {end}, but data are in {data_range}", "Bounds"
                )
                error.hint = kit.TRUNCATED if end > self._size else None
                raise error
            self._ranges.append((start, end, name))
            parts = {"data": Part(dtype, shape, start, nbytes)}
            self.tensors[name] = Tensor(name, dtype, shape, parts, attrs=attrs)

    def _identify(self, entry: _Entry, attrs: dict[str, Any]) -> None:
        expected = base_id(entry.name) if entry.name.isascii() else None
        if entry.identity and entry.identity != expected:
            expected_text = "0, since the name is not ASCII"
            expected_text = expected_text if expected is None else f"{expected:032x}"
            reason = f"the stored base id is {entry.identity:032x}, expected {expected_text}"
            raise _broken(entry, reason, "BaseId")
        self.has_ids = self.has_ids or bool(entry.identity)
        if expected is None:
            self._nameless.append(entry.name)
        else:
            attrs["base_id"] = f"{expected:032x}"

    def note(self, notes: kit.Notes) -> None:
        """Add warnings about names and overlapping data."""
        for name in self._nameless:
            reason = "a name beyond ASCII; it has no base id, and gpt.rs refuses the file"
            notes.add(reason, f"tensor {shown(name)}")
        for start, name, other in kit.find_overlaps(self._ranges, shared=True):
            notes.add("overlapping others", f"tensor {shown(name)} at byte {start}, {shown(other)}")


def _broken(entry: _Entry, reason: str, rule: str) -> FormatError:
    return FormatError(reason, offset=entry.at, tensor=entry.name, rule=rule)


# --- writing --------------------------------------------------------------------------------------


def _model(draft: Draft, container: str | None, kind: str | None, config: Any) -> bytes | None:
    """Return the config of a checkpoint as JSON; None for an archive."""
    if container == "tensors":
        return None
    if kind is not None and not isinstance(kind, str):
        raise TypeError(f"kind={kind!r} is not text")
    attrs = draft.attrs
    kind = attrs.get("kind") if kind is None else kind
    if kind is None and container is None and config is None and "config" not in attrs:
        return None
    if not isinstance(kind, str):
        reason = "a checkpoint needs the kind of its model, or gpt.rs refuses it"
        reason += "" if kind is None else f": {kind!r} is not text"
        hint = "Pass kind=, or container='tensors' to write the tensors alone"
        raise UnsupportedError(reason, rule="ConfigKind", hint=hint)
    config = attrs.get("config") if config is None else config
    # gpt.rs ignores the names of axes.
    more = {"runtime": attrs.get("runtime"), kit.DIMS_KEY: kit.dims_text(draft.tensors)}
    extras = {key: value for key, value in more.items() if value is not None}
    return _config_text(kind, config, extras)


def _sized(data: bytes, label: str) -> bytes:
    if len(data) > _LARGEST_U32:
        reason = f"{label} has {len(data)} bytes, but its length has 32 bits"
        raise UnsupportedError(reason, rule="Length", hint="Write several files")
    return _U32.pack(len(data)) + data


# --- configs of models ----------------------------------------------------------------------------

_LARGEST_CONFIG = 1 << 26
# The limit of serde_json, which the reference reader uses.
_DEEPEST = 127
_COUNTS = 1 << 64

_GPT_COUNTS = ("vocab_size", "context_length", "embed_dim", "num_layers", "num_heads", "mlp_ratio")
_STREAMING_COUNTS = (
    "device_budget_bytes",
    "cache_budget_cap_bytes",
    "prefetch_layers",
    "small_param_persist_threshold",
)


def _parse_config(data: bytes, offset: int, notes: kit.Notes) -> dict[str, Any]:
    """Return a config as attributes, with a note if gpt.rs refuses it: the tensors are readable."""
    value = _strict(data, offset)
    if type(value) is dict and type(value.get("kind")) is str:
        value.setdefault("config", None)
        return value
    if _is_gpt_config(value):
        return {"kind": "gpt", "config": value}
    place = "the config has no kind of model and is not the bare config of a gpt"
    notes.add("gpt.rs refuses it", place)
    return {"config": value}


def _strict(data: bytes, offset: int | None = None) -> Any:
    return kit.decode_json(
        data,
        "the config",
        deepest=_DEEPEST,
        rule="ConfigJson",
        offset=offset,
        repeated=lambda _key: None,
    )


def _is_gpt_config(value: Any) -> bool:
    """Return whether gpt.rs reads this as a config of its GPT; it ignores other keys."""
    if type(value) is not dict or type(value.get("dropout")) not in {int, float}:
        return False
    counts = [value.get(key) for key in _GPT_COUNTS]
    if not all(type(count) is int and 0 <= count < _COUNTS for count in counts):
        return False
    return _are_overrides(value.get("functional_overrides", {}))


def _are_overrides(value: Any) -> bool:
    return type(value) is dict and all(map(_is_policy, value.values()))


def _is_policy(value: Any) -> bool:
    """Return whether this is a policy: ``""``, ``force=<impl>``, ``benchmark[(cache=N)]``."""
    if type(value) is not str:
        return False
    text = value.strip()
    if not text or text.startswith("force=") or text.lower() == "benchmark":
        return True
    if not (text.startswith("benchmark(") and text.endswith(")")):
        return False
    options = [option.strip() for option in text[len("benchmark(") : -1].split(",")]
    sizes = [_CACHE_SIZE.fullmatch(option) for option in options if option]
    return all(size is not None and 0 < int(size[1]) < _COUNTS for size in sizes)


_CACHE_SIZE = re.compile(r"cache=\+?0*([0-9]{1,20})")


def _config_text(kind: str, config: Any, more: Mapping[str, Any]) -> bytes:
    """Write a config as gpt.rs's exporter does: compact, in ASCII, keys as they are."""
    value = {"kind": kind, "config": config, **more}
    if "runtime" in more and not _is_runtime(more["runtime"]):
        reason = "the attribute runtime is not a runtime config that gpt.rs accepts"
        raise UnsupportedError(reason, rule="ConfigRuntime", hint="Correct it, or remove it")
    try:
        data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
        if len(data) > _LARGEST_CONFIG:
            raise ValueError(f"{len(data)} bytes are more than {_LARGEST_CONFIG}")  # noqa: TRY301
        # Keys that are numbers become texts, and tuples lists.
        if _strict(data) != value:
            raise ValueError("it would read back as a different value")  # noqa: TRY301
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedError(
            f"kind and config cannot be written as JSON: {error}",
            rule="ConfigJson",
            hint="Use dicts with text as keys, lists, texts, finite numbers, booleans and None",
        ) from error
    return data


def _is_runtime(value: Any) -> bool:
    """Return whether gpt.rs accepts this as a runtime config; it ignores unknown keys."""
    if type(value) is not dict or not _are_overrides(value.get("functional_overrides", {})):
        return False
    streaming = value.get("weight_streaming", {})
    if type(streaming) is not dict or type(streaming.get("enabled", False)) is not bool:
        return False
    counts = [streaming.get(key) for key in _STREAMING_COUNTS]
    percent = streaming.get("device_weights_percent")
    is_part = percent is None or (type(percent) in {int, float} and 0 <= percent <= 1)
    return is_part and all(
        count is None or (type(count) is int and 0 <= count < _COUNTS) for count in counts
    )
