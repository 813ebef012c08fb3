"""Keras: ``.keras``, ``.weights.h5``, their shards, and ``.h5`` of Keras 2; other HDF5 files.

All of them keep variables as datasets of HDF5 (`xckpt.formats.keras.hdf5`); a variable has the name
of its path in there::

    NAME.weights.h5       HDF5
    NAME.keras            a zip archive: metadata.json, config.json, model.weights.h5, assets/
    NAME.weights.json     {"weight_map": {"/layers/dense/vars": ["NAME_00000.weights.h5"]}}
    NAME.h5               HDF5 of Keras 2: configurations are attributes

Keras 3 numbers the variables of a layer, ``layers/dense/vars/0``; the group ``vars`` has the name
of the layer as an attribute. Their names and axes follow from the class of the layer, which
``config.json`` states, or from the path, whose components are classes in snake case. Keras 2 has
names of its own: ``dense/dense/kernel:0``.

The configuration of a model is an attribute. Nothing is built from it, and long texts in it, such
as marshalled code, are left out.

Specification: saving/saving_lib.py and legacy/saving/legacy_h5_format.py of
github.com/keras-team/keras, 3.15.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import CheckpointError, FormatError, UnsupportedError, shown
from xckpt.formats import Format, Readable, archive, kit
from xckpt.formats.chunks import clipped, missing
from xckpt.formats.keras import hdf5, library
from xckpt.formats.keras.layers import Layers, add_code
from xckpt.formatting import natural_key
from xckpt.index import Index, Part, Shard, Tensor, is_file_name, is_json, span_of, strides_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WEIGHTS, _CONFIG, _METADATA = "model.weights.h5", "config.json", "metadata.json"
_SHARDS = re.compile(
    rb'\s*\{\s*(?:"metadata"\s*:\s*\{[^{}]*\}\s*,\s*)?'
    rb'"weight_map"\s*:\s*\{\s*"/?(?:[^"\\]*/)?vars"'
)
_SCIENCE = (".nc", ".nc4", ".cdf", ".netcdf")
_LARGEST_TEXT, _LARGEST_MEMBER = 64 << 20, 1 << 30
# A name of 256 bytes or more cannot be opened.
_LONGEST_FILE_NAME = 255
_LONGEST_TEXT = 256  # in a configuration
_LISTS = ("layer_names", "weight_names")  # which repeat the names of groups and datasets
_CONFIGS = {"model_config": "config", "training_config": "training_config"}


class Keras(Format):
    """Keras: ``.keras``, ``.weights.h5`` and ``.h5``; other HDF5 files as datasets by path."""

    name = "keras"
    description = "Keras models, and other HDF5 files"
    storage_attrs = ("keras_version", "date_saved", "backend")
    shared_suffixes = (".h5", ".hdf5")
    folder_marks = ("model.weights.json",)

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file is HDF5 (but not netCDF), an archive of Keras, or lists shards."""
        if head.startswith(b"PK\3\4"):
            return archive.first_name(head) in {_WEIGHTS, _CONFIG, _METADATA}
        if head.startswith(hdf5.SIGNATURE) or head[512:520] == hdf5.SIGNATURE:
            file_name = name.partition("?")[0].lower()
            return b"_NCProperties" not in head and not file_name.endswith(_SCIENCE)
        return _SHARDS.match(head) is not None

    def read(self, source: Readable) -> Index:
        """Read the groups and the descriptions of datasets; tensors are in natural order."""
        head = kit.first_bytes(source, 512)
        notes = kit.Notes()
        if head.lstrip()[:1] == b"{":
            return self._sharded(source, notes)
        attrs: dict[str, Any] = {}
        if head.startswith(b"PK"):
            image, attrs = _member(source, notes)
        else:
            image = _image(source)
        contents = _read(image, notes)
        attrs = _attributes(contents, notes) | attrs
        tensors = _sorted(_tensors(contents, image))
        tensors = Layers(contents.groups, attrs.get("config")).named(tensors)
        version = str(attrs.get("keras_version", ""))
        return kit.index_of(self.name, source, tensors, attrs, notes=notes, version=version)

    def _sharded(self, source: Readable, notes: kit.Notes) -> Index:
        weight_map = _weight_map(source)
        tensors: dict[str, Tensor] = {}
        shards, groups = {}, hdf5.Contents()
        for name in dict.fromkeys(chain.from_iterable(weight_map.values())):
            shard = kit.sibling(source, name)
            if shard is None:
                hint = "Copy it into the folder of the list"
                raise kit.missing_file(name, source, hint).located(offset=0)
            shards[name] = Shard(shard.size, None, (name,))
            image = _image(shard)
            try:
                contents = _read(image, notes)
                entries = _tensors(contents, image)
            except CheckpointError as error:
                error.reason, error.offset = f"{name}: {error.reason}", 0
                raise
            # A layer may have variables in two files, and its name in the first of them.
            groups.groups = contents.groups | groups.groups
            for key, tensor in entries.items():
                if key in tensors:
                    reason = f"the variable is in two files, also in {shown(name)}"
                    raise FormatError(reason, offset=0, tensor=key, rule="Shards")
                tensors[key] = _in_shard(tensor, name)
        known = {name.rpartition("/")[0] for name in tensors}
        for group in weight_map:
            if group.strip("/") not in known:
                notes.add("no file has variables of this group", shown(group))
        attrs = _attributes(groups, notes)
        tensors = Layers(groups.groups, attrs.get("config")).named(_sorted(tensors))
        return kit.index_of(self.name, source, tensors, attrs, notes=notes, shards=shards)


# --- shards ---------------------------------------------------------------------------------------


def _weight_map(source: Readable) -> dict[str, list[str]]:
    """Return the names of the files that each group is in."""
    if source.size > _LARGEST_TEXT:
        reason = f"a list of shards has {source.size} bytes, more than {_LARGEST_TEXT}"
        raise UnsupportedError(reason, offset=0, rule="Shards")
    data = bytes(source.read(0, source.size))
    root = kit.decode_json(data, "the list of shards", deepest=32, rule="Shards", offset=0)
    weight_map = root.get("weight_map") if type(root) is dict else None
    if type(weight_map) is not dict:
        reason = "'weight_map' must map groups to lists of files"
        raise FormatError(reason, offset=0, rule="Shards")
    files = {
        group: listed if type(listed) is list else [listed] for group, listed in weight_map.items()
    }
    for name in chain.from_iterable(files.values()):
        if not is_file_name(name) or len(name) > _LONGEST_FILE_NAME:
            reason = f"{shown(str(name))} is not the name of a file in the folder"
            raise FormatError(reason, offset=0, rule="FileName")
    return files


def _in_shard(tensor: Tensor, shard: str) -> Tensor:
    """Return a tensor with the parts and the problem of a shard."""
    if tensor.problem is not None:
        tensor.problem.reason, tensor.problem.offset = f"{shard}: {tensor.problem.reason}", None
    parts = {
        role: part if part.inline is not None else replace(part, shard=shard)
        for role, part in tensor.parts.items()
    }
    return replace(tensor, parts=parts)


# --- contents -------------------------------------------------------------------------------------


def _image(source: Readable) -> hdf5.Image:
    start = hdf5.find(source, 0, source.size)
    return hdf5.Image(source, start, source.size - start)


def _read(image: hdf5.Image, notes: kit.Notes) -> hdf5.Contents:
    """Read an HDF5 file, with h5py if it has newer structures."""
    before = deepcopy(notes)
    try:
        contents = hdf5.Walk(image, notes).contents
    except hdf5.NewerError as newer:
        return library.read(image, before, newer)
    is_newer = any(type(d.problem) is hdf5.NewerError for d in contents.datasets.values())
    return library.read(image, before) if is_newer and library.is_available() else contents


def _attributes(contents: hdf5.Contents, notes: kit.Notes) -> dict[str, Any]:
    """Return the attributes of a file, without the lists of names that repeat its groups."""
    attrs: dict[str, Any] = {}
    for key, value in contents.groups.get((), {}).items():
        if key in _CONFIGS and type(value) is str:
            config = _config(partial(value.encode, "utf-8", "replace"), key, notes)
            if config is not None:
                attrs[_CONFIGS[key]] = config
        elif key.rstrip("0123456789") not in _LISTS and is_json(value):
            attrs[key] = value
    return attrs


def _tensors(contents: hdf5.Contents, image: hdf5.Image) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path, dataset in contents.datasets.items():
        if not path:
            raise image.broken("the root is a dataset", dataset.header, "Name")
        tensor = _read_tensor(path, dataset, image)
        tensors[tensor.name] = tensor
    return tensors


def _sorted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the numbers in their paths in order."""

    def key(item: tuple[str, Tensor]) -> list[Any]:
        return [natural_key(name) for name in item[1].path or ()]

    return dict(sorted(tensors.items(), key=key))


def _config(read: Callable[[], bytes], label: str, notes: kit.Notes) -> Any:
    """Return a configuration without long texts; None, with a warning, if it cannot be read."""
    try:
        value = kit.decode_json(read(), label, deepest=64, repeated=lambda _: None)
        add_code(value, notes)
        value = _short(value)
        if not is_json(value):
            raise FormatError("it is nested too deep")
    except CheckpointError as error:
        notes.add(f"it is left out: {error.reason}", label)
        return None
    return value


def _short(value: Any) -> Any:
    """Return JSON with long texts replaced by their sizes."""
    if type(value) is dict:
        return {_short(key): _short(entry) for key, entry in value.items()}
    if type(value) is list:
        return [_short(entry) for entry in value]
    if type(value) is str and len(value) > _LONGEST_TEXT:
        return f"<{len(value)} characters>"
    return value


# --- archives -------------------------------------------------------------------------------------


def _member(source: Readable, notes: kit.Notes) -> tuple[hdf5.Image, dict[str, Any]]:
    """Return the weights in an archive, and the facts about them in its other members."""
    members = archive.Archive(source)
    contents = {member.name: (member, content) for member, content in members.contents()}
    if _WEIGHTS not in contents:
        raise FormatError(f"the archive has no member {_WEIGHTS!r}", offset=0, rule="Member")
    attrs: dict[str, Any] = {}
    for name in (_METADATA, _CONFIG):
        if name in contents:
            config = _config(partial(_text, *contents[name]), name, notes)
            if name == _CONFIG and config is not None:
                attrs["config"] = config
            elif type(config) is dict:
                attrs |= config
    member, content = contents[_WEIGHTS]
    member.check(content.at)
    if member.method == archive.STORED:
        start = hdf5.find(source, content.at, member.nbytes)
        return hdf5.Image(source, content.at + start, member.nbytes - start), attrs
    if member.nbytes > _LARGEST_MEMBER:
        reason = f"{_WEIGHTS} is compressed, and has {member.nbytes} bytes"
        hint = "Store it uncompressed: zip -0"
        raise UnsupportedError(reason, offset=content.at, rule="Method", hint=hint)
    outer = content.rest()
    inflated = kit.Memory(source.name, content.whole(_WEIGHTS))
    if hdf5.find(inflated, 0, inflated.size):
        reason = "a user block in a compressed member is unsupported"
        raise UnsupportedError(reason, offset=content.at, rule="Method")
    return hdf5.Image(inflated, 0, inflated.size, outer), attrs


def _text(member: archive.Member, content: archive.Content) -> bytes:
    if member.nbytes > _LARGEST_TEXT:
        raise UnsupportedError(f"it has {member.nbytes} bytes")
    return content.whole(member.name)


# --- tensors of datasets --------------------------------------------------------------------------

# Numbers of filters, and their names in `Part.encoding`.
_FILTERS = {1: "zlib", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
_ORDER = ["shuffle", "zlib", "lzf", "fletcher32"]
_LARGEST_CHUNK = 1 << 32


def _read_tensor(path: hdf5.Path, dataset: hdf5.Dataset, image: hdf5.Image) -> Tensor:
    """Return the tensor of a dataset; a dataset that cannot be read is its problem."""
    name = "/".join(path)
    attrs = {key: value for key, value in dataset.attrs.items() if key != "dtype"}
    try:
        return replace(_tensor_of(name, dataset, image), path=path, attrs=attrs)
    except CheckpointError as error:
        problem = error.located(tensor=name, offset=image.offset(dataset.header))
        shape, element = dataset.shape or (), dataset.element
        label = "unknown" if element is None else element.dtype or element.label
        shape = () if kit.is_oversized(shape) else shape
        return Tensor(name, label, shape, {}, problem=problem, path=path, attrs=attrs)


def _tensor_of(name: str, dataset: hdf5.Dataset, image: hdf5.Image) -> Tensor:
    if dataset.problem is not None:
        raise dataset.problem
    shape, dtype = dataset.shape, _dtype(dataset)
    if shape is None:
        raise UnsupportedError("it has no extents, and no elements", rule="Null")
    if kit.is_oversized(shape, dtype):
        raise FormatError(f"the shape {list(shape)} is too large", rule="Shape")
    itemsize = ELEMENT_TYPES[dtype].bits // 8
    if dataset.element is None or dataset.element.nbytes != itemsize:
        raise FormatError(f"its elements do not have {itemsize} bytes", rule="Dtype")
    nbytes = itemsize * prod(shape)
    byteorder = dataset.element.byteorder
    base = Part(dtype, shape, 0, 0, byteorder=byteorder)
    if dataset.chunk is not None:
        parts = dict(_chunked(dataset, base, image, itemsize))
        return Tensor(name, dtype, shape, parts, "chunked")
    if not nbytes:
        part = replace(base, offset=image.offset(dataset.header))
    elif dataset.at is None:
        part = _filled(dataset, base, itemsize)
    elif dataset.nbytes < nbytes:
        reason = f"{dataset.nbytes} bytes are stored for the {nbytes} of its shape {list(shape)}"
        raise FormatError(reason, rule="Layout")
    else:
        part = _placed(base, dataset.at, nbytes, image)
    return Tensor(name, dtype, shape, {"data": part})


def _dtype(dataset: hdf5.Dataset) -> str:
    """Return the element type; an attribute is opaque bytes."""
    element = dataset.element
    if element is not None and element.dtype is not None:
        return element.dtype
    label = "unknown" if element is None else element.label
    stated = dataset.attrs.get("dtype")
    if label.startswith("opaque") and type(stated) is str and stated in ELEMENT_TYPES:
        return stated
    raise UnsupportedError(f"{label} are unsupported as elements", rule="Dtype")


def _placed(part: Part, at: int, nbytes: int, image: hdf5.Image) -> Part:
    """Return a part with its bytes at an address."""
    if at + nbytes > image.size:
        reason = f"{nbytes} bytes at address {at} are not in the file, of {image.size}"
        raise FormatError(reason, rule="Truncated", hint=kit.TRUNCATED)
    outer = image.outer
    if outer is None:
        return replace(part, offset=image.start + at, nbytes=nbytes)
    place: Any = {"offset": outer.offset, "nbytes": outer.nbytes, "encoding": outer.encoding}
    return replace(part, **place, decoded_nbytes=nbytes, skip=at)


def _filled(dataset: hdf5.Dataset, part: Part, itemsize: int) -> Part:
    """Return a part of the fill value, for elements that were never written."""
    fill = dataset.fill if dataset.fill is not None else bytes(itemsize)
    if len(fill) != itemsize:
        raise FormatError(f"a fill value of {len(fill)} bytes, not {itemsize}", rule="Fill")
    strides = (0,) * len(part.shape or ())
    return replace(part, offset=0, nbytes=itemsize, inline=fill, strides=strides or None)


def _chunked(
    dataset: hdf5.Dataset, base: Part, image: hdf5.Image, itemsize: int
) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a chunked dataset, in the order of the file, then those never written."""
    shape, chunk = base.shape or (), dataset.chunk or ()
    decoded = itemsize * prod(chunk)
    if not 0 < decoded <= _LARGEST_CHUNK:
        raise FormatError(f"chunks of {decoded} bytes", rule="Chunks")
    steps = strides_of(chunk)
    origins = set()
    for number, stored in enumerate(dataset.chunks):
        origin = stored.origin
        if any(at >= n for at, n in zip(origin, shape, strict=True)):
            continue  # the dataset has been made smaller
        if any(at % n for at, n in zip(origin, chunk, strict=True)) or origin in origins:
            raise FormatError(f"a chunk at {list(origin)} overlaps another one", rule="Chunks")
        origins.add(origin)
        part = replace(base, shape=clipped(origin, chunk, shape), origin=origin)
        encoding = _encoding(dataset, stored.skipped, itemsize)
        if encoding is None:
            if stored.nbytes != decoded:
                reason = f"a chunk at {list(origin)} has {stored.nbytes} bytes, not {decoded}"
                raise FormatError(reason, rule="Chunks")
            span = span_of(part.shape or (), steps) * itemsize
            part = _placed(part, stored.at, span, image)
        elif image.outer is not None:
            reason = "its chunks are compressed, in a compressed member of an archive"
            raise UnsupportedError(reason, rule="Method", hint="Store the member uncompressed")
        else:
            part = _placed(part, stored.at, stored.nbytes, image)
            part = replace(part, encoding=encoding, decoded_nbytes=decoded)
        yield str(number), part if part.shape == chunk else replace(part, strides=steps)
    for origin, extents in missing(shape, chunk, origins):
        part = replace(base, shape=extents, origin=origin)
        yield f"fill {origin}", _filled(dataset, part, itemsize)


def _encoding(dataset: hdf5.Dataset, skipped: int, itemsize: int) -> str | None:
    """Return the encoding of a chunk: its filters, the last one first; None without filters."""
    names = []
    for bit, (number, values) in enumerate(dataset.filters):
        if number not in _FILTERS:
            reason = f"filter {number} is unsupported"
            raise UnsupportedError(reason, rule="Filter", hint="Pack the file again with h5repack")
        if not skipped >> bit & 1:
            names.append(_FILTERS[number])
        if number == 2 and values[:1] != (itemsize,):
            raise UnsupportedError(f"bytes are shuffled by {values}", rule="Filter")
    if sorted(names, key=_ORDER.index) != names or len({*names}) < len(names):
        raise UnsupportedError(f"filters in the order {', '.join(names)}", rule="Filter")
    if itemsize == 1 and "shuffle" in names:  # it changes nothing
        names.remove("shuffle")
    spelled = [f"shuffle{itemsize}" if name == "shuffle" else name for name in reversed(names)]
    return "+".join(spelled) or None
