"""safetensors (``.safetensors``), the format of Hugging Face for weights.

A file is a length, a JSON header, and the data of all tensors without gaps::

    offset   bytes   what
    0        8       n, length of the header, little-endian, at most 100,000,000
    8        n       the header: a JSON object in UTF-8, padded with spaces
    8 + n            data, little-endian, up to the end of the file

The header begins with ``{`` and names every tensor; ``data_offsets`` count from ``8 + n``, the
second is exclusive::

    {"__metadata__": {"format": "pt"},
     "embed.weight": {"dtype": "BF16", "shape": [512, 64], "data_offsets": [0, 65536]}}

``__metadata__`` is optional, or null, and maps text to text. Other fields of a tensor are ignored.
Elements are in C order. The size of a tensor in bits must be a multiple of 8. In the order of their
offsets the tensors tile the data: the first begins at 0, the others begin where the previous one
ends, and the last ends with the file. A tensor without elements has an empty range. If the file
ends earlier, the tensors that it has can be read; the reference package refuses such a file.

The header must be JSON by the rules of serde_json: no NaN, no lone surrogates, no numbers beyond
64-bit floats, at most 127 levels. Duplicate keys are forbidden. The reference package tolerates
some of these, leading blanks, and a tensor written as an array of its fields; xckpt raises an
error, also for shapes that numpy cannot represent. The specification does not define how 6-bit
elements share bytes: such tensors are listed, but their values cannot be read.

xckpt writes the same bytes as the reference package: wide elements first, then by name; data begin
at a multiple of 8. (The package writes several metadata entries in random order.) An attribute that
is not text is written as JSON; names of axes are one text in ``__metadata__``, which other readers
ignore. Large models have several files, and a JSON file that maps tensors to files::

    {"metadata": {"total_size": 13476831232},
     "weight_map": {"embed.weight": "model-00001-of-00003.safetensors"}}

``torch.distributed.checkpoint`` can write such files without an index, one per rank, which have
chunks of tensors. ``DCP_SHARDING_INFO`` in their metadata is JSON with the origin of each chunk::

    {"embed.weight": {"saved_offsets": [256, 0]}}

Specification: README.md and safetensors/src/tensor.rs of github.com/huggingface/safetensors, 0.8;
rules have the names of its ``SafeTensorError``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import Can, Format, Readable, kit
from xckpt.formats.plan import Draft, Plan, WantedTensor, place_parts, plan_main_file, split
from xckpt.formatting import parse_size
from xckpt.index import Index, Part, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

_LARGEST_HEADER = 100_000_000
_RULE, _INCOMPLETE = "InvalidHeaderDeserialization", "MetadataIncompleteBuffer"
_BEGINNING = re.compile(rb'\{[ \t\r\n]*["}]')
_DEEPEST = 127
_INDEX = ".index.json"
# Metadata of torch.distributed.checkpoint: the origins of the chunks in a file.
_SHARDING = "DCP_SHARDING_INFO"

# In the order of the reference package's enumeration; it writes the last types first.
_TYPES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn",  # two in a byte, the first in its low half
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_BITS = {spelled: ELEMENT_TYPES[dtype].bits for spelled, dtype in _TYPES.items()}
_BITS |= {"F6_E2M3": 6, "F6_E3M2": 6}
_FORMAT = {"format": "pt"}
_RANKS = {dtype: -rank for rank, dtype in enumerate(_TYPES.values())}


class Safetensors(Format):
    """safetensors (``.safetensors``)."""

    name = "safetensors"
    description = "safetensors files"
    types = _TYPES
    # An index of shards has the attribute total_size.
    storage_attrs = ("format", "total_size", _SHARDING)
    can = Can(file_attrs=None, stated_attrs=("total_size", _SHARDING), arrangement=True)

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a valid length and a JSON object follow: the format has no magic."""
        length = int.from_bytes(head[:8], "little")
        return length <= _LARGEST_HEADER and _BEGINNING.match(head, 8) is not None

    def read(self, source: Readable) -> Index:
        """Read the header; tensors are in the order of their data."""
        entries, end = _header(source)
        if (attrs := entries.pop("__metadata__", None)) is None:
            attrs = {}
        if type(attrs) is not dict or not all(type(text) is str for text in attrs.values()):
            raise _broken("'__metadata__' must map text to text")
        by_name = kit.read_each(entries.items(), partial(_tensor, end))
        parts = {name: tensor.parts["data"] for name, tensor in by_name.items()}
        ordered = sorted(parts, key=lambda name: (parts[name].offset, parts[name].nbytes))
        for name in ordered:
            offset = parts[name].offset
            if offset != end:
                reason = f"data begin at byte {offset}, but the previous tensor ends at byte {end}"
                raise _broken(reason, "InvalidOffset").located(tensor=name)
            end += parts[name].nbytes
        if end < source.size:
            reason = f"data end at byte {end}, but the file has {source.size} bytes"
            hint = f"The tensors are intact: cut the file to {end} bytes to read them"
            raise _broken(reason, _INCOMPLETE, hint=hint)
        tensors = {name: by_name[name] for name in ordered}
        if end > source.size:  # an interrupted download: the first tensors can be read
            tensors = kit.with_cut_data(tensors, source.size, _INCOMPLETE)
        tensors = _chunks(tensors, kit.json_object(attrs.pop(_SHARDING, "{}")))
        return kit.with_arrangement(Index(self.name, "", tensors, attrs, source.name, source.size))

    def plan(self, draft: Draft, *, max_shard_size: int | str | None = None) -> Plan:
        """Plan one file, or several files and their index.

        Parameters
        ----------
        draft : Draft
            Contents of the checkpoint.
        max_shard_size : int or str, optional
            Most bytes of tensors in one file, also as text such as ``"5GB"``. Larger checkpoints
            are split into files with names like ``model-00001-of-00003.safetensors``, and
            ``model.safetensors.index.json`` lists the file of each tensor. The index is also
            written if its name is the path. A larger tensor gets its own file.

        Returns
        -------
        Plan
            Plan of one file, or of the index, with the files as companions.
        """
        self.check(draft)
        drafts = [draft]
        if max_shard_size is not None:
            drafts = split(draft, parse_size("max_shard_size", max_shard_size), _nbytes)
        is_index = draft.path.lower().endswith(_INDEX)
        if len(drafts) == 1 and not is_index:
            return self._in_one(draft)
        # Hugging Face's libraries require the format of shards; the index has the total size.
        attrs = _FORMAT | {k: v for k, v in draft.attrs.items() if k != "total_size"}
        stem = kit.file_stem(draft.path, f".safetensors{_INDEX}", _INDEX, ".safetensors")
        shards = {
            f"{stem}-{number:05}-of-{len(drafts):05}.safetensors": replace(shard, attrs=attrs)
            for number, shard in enumerate(drafts, 1)
        }

        def index(names: Mapping[str, str]) -> bytes:
            size = sum(map(_nbytes, draft.tensors.values()))
            weight_map = {
                tensor: names[file] for file, shard in shards.items() for tensor in shard.tensors
            }
            root = {"metadata": {"total_size": size}, "weight_map": weight_map}
            return json.dumps(root, indent=2, sort_keys=True).encode() + b"\n"

        plans = {name: self._in_one(shard) for name, shard in shards.items()}
        return plan_main_file(plans, index, "" if is_index else _INDEX, is_index=True)

    def _in_one(self, draft: Draft) -> Plan:
        tensors = sorted(draft.tensors.values(), key=lambda t: (_RANKS[t.dtype], t.name))
        metadata = kit.attribute_texts(draft, {tensor.name: tensor for tensor in tensors})
        # Libraries that look at metadata require the format.
        entries: dict[str, Any] = {"__metadata__": _FORMAT | metadata} if metadata else {}
        ends = [0, *accumulate(map(_nbytes, tensors))]
        for tensor, offsets in zip(tensors, pairwise(ends), strict=True):
            entry = {"dtype": self.spellings[tensor.dtype], "shape": tensor.shape}
            entries[tensor.name] = entry | {"data_offsets": offsets}
        header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        if len(header) > _LARGEST_HEADER:
            reason = f"the header would have {len(header)} bytes, more than {_LARGEST_HEADER}"
            hint = "Write several files with max_shard_size"
            raise UnsupportedError(reason, rule="HeaderTooLarge", hint=hint)
        header += b" " * (-len(header) % 8)
        head = len(header).to_bytes(8, "little") + header
        return Plan.headed(head, place_parts(tensors, ends, len(head)), len(head) + ends[-1])


def _header(source: Readable) -> tuple[dict[str, Any], int]:
    """Return the entries of the header, and the offset of the data after it."""
    if source.size < 8:
        reason = f"the file has {source.size} bytes, too few for the length of a header"
        raise _broken(reason, "HeaderTooSmall", 0)
    length = int.from_bytes(source.read(0, 8), "little")
    if length > _LARGEST_HEADER:
        reason = f"the header has {length} bytes, more than {_LARGEST_HEADER}"
        raise _broken(reason, "HeaderTooLarge", 0)
    if length > source.size - 8:
        reason = f"the header has {length} bytes, but only {source.size - 8} follow"
        raise _broken(reason, "InvalidHeaderLength", 0, hint=kit.TRUNCATED)
    header = bytes(source.read(8, length))
    if not header.startswith(b"{"):
        raise _broken(f"the header begins {header[:8]!r}, not '{{'", "InvalidHeaderStart")
    options: Any = {"rule": _RULE, "offset": 8, "parse_int": kit.integer_64}
    return kit.decode_json(header, "the header", deepest=None, **options), 8 + length


def _broken(reason: str, rule: str = _RULE, at: int = 8, hint: str | None = None) -> FormatError:
    return FormatError(reason, offset=at, rule=rule, hint=hint)


def _tensor(start: int, name: str, entry: Any) -> Tensor:
    if type(entry) is not dict:
        raise _broken("a tensor must be an object")
    # Only ignored fields can be nested; checking the others would be slow for 100,000 tensors.
    if len(entry) > 3 and kit.is_deeper(entry, _DEEPEST - 1):
        raise _broken(f"the header is nested deeper than {_DEEPEST} levels")
    spelled = entry.get("dtype")
    if type(spelled) is not str:
        raise _broken("'dtype' must be text")
    if spelled not in _BITS:
        reason = f"the element type {shown(spelled)} is not one of {', '.join(_BITS)}"
        raise UnsupportedError(reason, offset=8, rule="Dtype")
    shape = _sizes("shape", entry.get("shape"), kit.MOST_AXES)
    offsets = _sizes("data_offsets", entry.get("data_offsets"), 2)
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _broken(f"the offsets {offsets} are not a range", "InvalidOffset")
    offset, nbytes = start + offsets[0], offsets[1] - offsets[0]
    dtype = _TYPES.get(spelled)
    bits = _BITS[spelled] * prod(shape)
    if bits % 8:
        raise _broken(f"{bits} bits of data are not a number of bytes", "MisalignedSlice")
    if bits != nbytes * 8:
        reason = f"{nbytes} bytes of data, but {spelled} {list(shape)} has {bits // 8} bytes"
        raise _broken(reason, "TensorInvalidInfo")
    if not bits and kit.is_oversized(shape, dtype):
        raise _broken(f"the shape {list(shape)} is too large", "ValidationOverflow")
    if dtype is not None:
        return Tensor(name, dtype, shape, {"data": Part(dtype, shape, offset, nbytes)})
    reason = f"how {spelled} elements share bytes is not defined"
    problem = UnsupportedError(reason, tensor=name, offset=offset, rule="Dtype")
    parts = {"data": Part("uint8", (nbytes,), offset, nbytes)}
    return Tensor(name, spelled, shape, parts, problem=problem)


def _chunks(tensors: dict[str, Tensor], info: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors with their origins in larger ones; origins that do not fit are ignored."""
    chunks = dict(tensors)
    for name, tensor in tensors.items() if info else ():
        entry = info.get(name)
        origin = entry.get("saved_offsets") if type(entry) is dict else None
        is_whole = tensor.parts["data"].shape == tensor.shape  # not of 6-bit elements
        if type(origin) is not list or len(origin) != tensor.ndim or not is_whole:
            continue
        if all(type(at) is int and 0 <= at <= kit.LARGEST for at in origin):
            parts = {"data": replace(tensor.parts["data"], origin=(*origin,))}
            attrs = {"saved_offsets": origin} if any(origin) else {}
            chunks[name] = replace(tensor, parts=parts, attrs=attrs)
    return chunks


def _sizes(field: str, value: Any, most: int) -> tuple[int, ...]:
    # A loop, because it runs twice for every tensor of a file, and a list of errors takes longer.
    if type(value) is list and len(value) <= most:
        for size in value:
            if type(size) is not int or not 0 <= size <= kit.LARGEST:
                break
        else:
            return tuple(value)
    raise _broken(f"{field!r} must have at most {most} integers from 0 to {kit.LARGEST}")


def _nbytes(tensor: WantedTensor) -> int:
    """Return the size of a tensor in bytes, or raise `UnsupportedError` if it cannot be written."""
    bits = ELEMENT_TYPES[tensor.dtype].bits * tensor.size
    if tensor.name == "__metadata__":
        reason, rule, hint = "the name is reserved for attributes", "Name", "Rename it"
    elif bits % 8:
        reason, rule = f"{bits} bits of data are not a number of bytes", "MisalignedSlice"
        hint = f"Write it as float8_e4m3fn: encoding={{{shown(tensor.name)}: "
        hint += "{'dtype': 'float8_e4m3fn'}}"
    else:
        return bits // 8
    raise UnsupportedError(reason, tensor=tensor.name, rule=rule, hint=hint)
