"""Folders of ``torch.distributed.checkpoint``: the file ``.metadata``, and files of items by rank.

``.metadata`` is a pickle, which PyTorch itself loads without restrictions::

    Metadata  state_dict_metadata  {name: TensorStorageMetadata(properties, size, chunks)
                                          or BytesStorageMetadata()}
              storage_data         {MetadataIndex(name, offset): _StorageInfo(relative_path,
                                          offset, length, transform_descriptors)}

Each chunk of a tensor, and each value that is not a tensor, is an item: a complete zip archive
(`xckpt.formats.torch.containers`) in one of the files, with one tensor or value. Alternatively, a
file has a complete safetensors file with all of its tensors after its values.

Specification: torch/distributed/checkpoint/metadata.py and filesystem.py of
github.com/pytorch/pytorch, 2.15.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt import formats
from xckpt.errors import CheckpointError, FormatError, MissingShardError, UnsupportedError, shown
from xckpt.formats import chunks, kit
from xckpt.formats.pickles.machine import Machine
from xckpt.formats.pickles.records import Call, Global, Pairs, key_text, sizes_of, spelled
from xckpt.formats.torch.containers import read_zip
from xckpt.formats.torch.objects import ObjectWalk, with_parameters
from xckpt.formats.torch.tensors import Region, Tensors, dtype_named, element_named, in_elements
from xckpt.index import Index, Shard, Tensor, is_file_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.readable import Readable

    # First element, and extents.
    _Block = tuple[tuple[int, ...], tuple[int, ...]]

METADATA = ".metadata"
SUFFIX = ".distcp"  # of the files of items
_MODULE = "torch.distributed.checkpoint"
_LARGEST_METADATA = 256 << 20
# Smaller items are read at once; of larger ones, only a little at both ends.
_SMALL = 1 << 16
_LARGEST_VALUE = 1 << 20
_MOST_VALUES = 1000


def is_metadata(head: bytes) -> bool:
    """Return whether a file is a pickle that begins with the class of the metadata."""
    return head[:1] == b"\x80" and head[1:2] <= b"\5" and f"{_MODULE}.metadata".encode() in head


class _StorageInfo(NamedTuple):
    """The position of an item: file, first byte, and size in bytes."""

    file: str
    offset: int
    nbytes: int
    is_plain: bool


class _Window(kit.Inner):
    """A range of a file as a file."""

    def __init__(self, source: Readable, item: _StorageInfo) -> None:
        self.name, self.size = source.name, item.nbytes
        self._source, self._offset = source, item.offset
        self._whole = source.read(item.offset, item.nbytes) if item.nbytes <= _SMALL else None

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Read a range of bytes."""
        if offset + nbytes > self.size:
            reason = f"{nbytes} bytes at byte {offset} exceed the item, which has {self.size}"
            raise FormatError(reason, rule="Truncated")
        if self._whole is not None:
            return self._whole[offset : offset + nbytes]
        return self._source.read(self._offset + offset, nbytes)


def read(format: str, source: Readable, notes: kit.Notes) -> Index:
    """Read the metadata, and the headers of all items."""
    if source.size > _LARGEST_METADATA:
        reason = f"the metadata have {source.size} bytes, more than {_LARGEST_METADATA}"
        raise UnsupportedError(reason, offset=0, rule="Metadata")
    machine = Machine(bytes(source.read(0, source.size)))
    root = machine.run()
    notes.add_code(machine.uses.executes, machine.uses.imports)
    with kit.locating(offset=0):
        reader = _MetadataReader(source, notes, _fields(root, "metadata.Metadata"))
        reader.read_all()
    version = reader.fields.get("version")
    version = version if type(version) is str else ""
    attrs, shards = reader.attrs, reader.shards
    tensors = with_parameters(reader.tensors, attrs)
    return kit.index_of(format, source, tensors, attrs, notes=notes, version=version, shards=shards)


def _broken(reason: str, rule: str = "Metadata") -> FormatError:
    return FormatError(reason, rule=rule)


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Return the attributes of an instance of the class `name`."""
    function = value.function if type(value) is Call else None
    if type(function) is not Global or ".".join(function) != f"{_MODULE}.{name}":
        raise _broken(f"{spelled(value)} is not {name}")
    state = value.state if type(value.state) is Pairs else Pairs()
    return {key: inner for key, inner in state.items() if type(key) is str}


def _shape(value: Any) -> tuple[int, ...]:
    """Return a torch.Size."""
    sizes = sizes_of(value)
    if any(type(n) is not int or n < 0 for n in sizes):
        raise _broken(f"{spelled(value)} is not a shape", "Shape")
    return sizes


class _MetadataReader:
    """A reader of the tensors and values in the metadata of a checkpoint."""

    def __init__(self, source: Readable, notes: kit.Notes, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.tensors: dict[str, Tensor] = {}
        self.attrs: dict[str, Any] = {}
        self.shards: dict[str, Shard] = {}
        self._source, self._notes = source, notes
        self._files: dict[str, Readable | None] = {}
        self._items = self._listed_items()
        self._values = 0
        self._embedded: dict[tuple[str, int], Mapping[str, Tensor]] = {}

    def _mapping(self, name: str) -> Pairs:
        value = self.fields.get(name)
        if type(value) is not Pairs:
            raise _broken(f"{name} is {spelled(value)}")
        return value

    def _listed_items(self) -> dict[str, _StorageInfo]:
        """Return the positions of items, by name and offset as text."""
        items = {}
        for index, info in self._mapping("storage_data").items():
            key = _fields(index, "metadata.MetadataIndex")
            place = _fields(info, "filesystem._StorageInfo")
            at, nbytes = place.get("offset"), place.get("length")
            file = place.get("relative_path")
            if not is_file_name(file):
                reason = f"{spelled(file)} is not the name of a file in the folder"
                raise _broken(reason, "FileName")
            if type(at) is not int or type(nbytes) is not int or at < 0 or nbytes < 0:
                raise _broken(f"an item of {spelled(nbytes)} bytes at {spelled(at)}", "Item")
            name, offset = key.get("fqn"), key.get("offset")
            if type(name) is not str:
                raise _broken(f"{spelled(name)} is not the name of an item", "Item")
            origin = None if offset is None else _shape(offset)
            is_plain = not place.get("transform_descriptors")
            items[_key(name, origin)] = _StorageInfo(file, at, nbytes, is_plain)
        return items

    def read_all(self) -> None:
        """Read all tensors and values."""
        for name, entry in self._mapping("state_dict_metadata").items():
            if type(name) is not str:
                raise _broken(f"{spelled(name)} is not a name", "Name")
            if type(entry) is Call and entry.function == _VALUE:
                self._read_value(name)
                continue
            tensor = self._tensor(name, _fields(entry, "metadata.TensorStorageMetadata"))
            self._add(replace(tensor, name=key_text(name)))

    def _add(self, tensor: Tensor) -> None:
        name = tensor.name
        if name in self.tensors:
            raise _broken(f"two tensors have the name {shown(name)}", "Name")
        if tensor.problem is not None:
            tensor.problem.located(tensor=name, offset=0)
        self.tensors[name] = tensor

    # --- items -----------------------------------------------------------------------------------

    def _file(self, name: str) -> Readable | None:
        """Return a file of items; None if it is missing."""
        if name not in self._files:
            self._files[name] = file = kit.sibling(self._source, name)
            if file is not None:
                self.shards[name] = Shard(file.size, None, (name,))
        return self._files[name]

    def _objects(self, name: str, item: _StorageInfo) -> ObjectWalk:
        """Read an item."""
        file = self._file(item.file)
        if file is None:
            hint = "Copy it into the folder of .metadata"
            raise kit.missing_file(item.file, self._source, hint)
        if not item.is_plain:
            reason = "transformed items, such as compressed ones, are unsupported"
            raise UnsupportedError(reason, rule="Transform")
        if item.offset + item.nbytes > file.size:
            reason = f"an item ends at byte {item.offset + item.nbytes}"
            reason += f", but the file has {file.size} bytes"
            raise FormatError(f"{item.file}: {reason}", rule="Truncated")
        try:
            content = read_zip(_Window(file, item), self._notes)

            def place(key: str) -> Region:
                region = content.place(key)
                return region._replace(offset=region.offset + item.offset)

            tensors = Tensors(content._replace(place=place), self._notes, item.file)
            objects = ObjectWalk(tensors)
            objects.walk(content.value, (name,))
        except CheckpointError as error:
            # The error's offset counts within the item, but its path is that of `.metadata`.
            error.reason = f"the item at byte {item.offset} of {item.file}: {error.reason}"
            error.offset = None
            raise
        return objects

    def _read_value(self, name: str) -> None:
        item = self._items.get(_key(name, None))
        self._values += 1
        if item is None or item.nbytes > _LARGEST_VALUE or self._values > _MOST_VALUES:
            self._notes.add("a value that is not a tensor is left out", shown(name))
            return
        try:
            objects = self._objects(name, item)
        except (FormatError, MissingShardError, UnsupportedError) as error:
            reason = f"a value that is not a tensor is left out: {error.reason}"
            self._notes.add(reason, shown(name))
            return
        self.attrs |= objects.attrs
        for tensor in objects.tensors.values():
            self._add(tensor)

    # --- tensors ---------------------------------------------------------------------------------

    def _tensor(self, name: str, fields: Mapping[str, Any]) -> Tensor:
        size, listed = _shape(fields.get("size")), fields.get("chunks")
        properties = fields.get("properties")
        kind = properties.state if type(properties) is Call else None
        dtype = dtype_named(kind[0]) if type(kind) is tuple and kind else None
        if dtype is None or type(listed) is not list:
            raise _broken(f"{shown(name)} has an unknown type, or no chunks")
        if kit.is_oversized(in_elements(dtype, size)) or len(size) > kit.MOST_AXES:
            raise _broken(f"the shape {spelled(size)} is too large", "Shape")
        places: list[_Block] = []
        for chunk in listed:
            block = _fields(chunk, "metadata.ChunkStorageMetadata")
            origin, extents = _shape(block.get("offsets")), _shape(block.get("sizes"))
            if len(origin) != len(size) or len(extents) != len(size):
                raise _broken(f"a chunk of {shown(name)} has another number of axes", "Chunks")
            if prod(extents) or prod(size) == 0:  # not empty
                places.append((origin, extents))
        chunks.check_cover(name, size, places)
        size = in_elements(dtype, size)
        try:
            blocks = {
                in_elements(dtype, origin): self._chunk(name, origin, in_elements(dtype, extents))
                for origin, extents in places
            }
        except CheckpointError as problem:  # of a missing, truncated or unsupported file
            problem = copy(problem).with_traceback(None)
            return Tensor(name, element_named(dtype), size, {}, problem=problem)
        # A tensor in one piece can be of any layout.
        if len(blocks) == 1:
            return next(iter(blocks.values()))
        return chunks.joined(name, size, blocks)

    def _chunk(self, name: str, origin: tuple[int, ...], extents: tuple[int, ...]) -> Tensor:
        item = self._items.get(_key(name, origin))
        if item is None:
            reason = f"the chunk of {shown(name)} at {spelled(origin)} has no item"
            raise _broken(reason, "Item")
        tensors = self._tensors_of(name, item)
        if len(tensors) != 1 or tensors[0].shape != extents:
            shapes = [tensor.shape for tensor in tensors]
            reason = f"the item of {shown(name)} at {spelled(origin)} has {spelled(shapes)}"
            raise _broken(f"{reason}, not {spelled(extents)}", "Item")
        [tensor] = tensors
        if tensor.problem is not None:
            raise tensor.problem
        return tensor

    def _tensors_of(self, name: str, item: _StorageInfo) -> list[Tensor]:
        """Return the tensors of an item."""
        place = (item.file, item.offset)
        if place not in self._embedded:
            try:
                return [*self._objects(name, item).tensors.values()]
            except CheckpointError:
                embedded = self._safetensors_at(item)
                if embedded is None:
                    raise
                self._embedded[place] = embedded
        tensor = self._embedded[place].get(name)
        if tensor is None:
            reason = f"the safetensors in {shown(item.file)} have no tensor of this name"
            raise UnsupportedError(reason, rule="Item")
        return [tensor]

    def _safetensors_at(self, item: _StorageInfo) -> Mapping[str, Tensor] | None:
        """Return the tensors of the safetensors file at the offset of an item; None without one."""
        # `FileSystemWriter` can write a safetensors file after the values. The metadata then have
        # the offset of this file for all of its tensors.
        file, safetensors = self._file(item.file), formats.get("safetensors")
        if file is None or item.offset > file.size or not item.is_plain:
            return None
        window = _Window(file, item._replace(nbytes=file.size - item.offset))
        head = bytes(window.read(0, min(window.size, 16)))
        if not safetensors.detect(head, window.size, window.name):
            return None
        tensors = {}
        for name, tensor in safetensors.read(window).items():
            part = tensor.parts["data"]
            part = replace(part, offset=part.offset + item.offset, shard=item.file, origin=None)
            tensors[name] = replace(tensor, parts={"data": part}, attrs={})
        return tensors


_VALUE = Global(f"{_MODULE}.metadata", "BytesStorageMetadata")


def _key(name: str, origin: tuple[int, ...] | None) -> str:
    return f"{name}\0{origin}"
