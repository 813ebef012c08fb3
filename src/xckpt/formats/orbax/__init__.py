"""Orbax checkpoints of JAX: folders with a database (OCDBT), or with a folder for each array.

The files of a checkpoint::

    manifest.ocdbt, d/...           the database: arrays of zarr (`xckpt.formats.orbax.ocdbt`)
    NAME/.zarray, NAME/0.1          without a database, files of zarr (`xckpt.formats.orbax.zarr`)
    _METADATA                       JSON: the tree of arrays, texts and empty containers
    _strings.json, _sharding        JSON: texts by name; how devices have shared arrays
    array_metadatas/process_0       JSON: kinds of random keys
    checkpoint                      msgpack of old versions: the tree, with values or placeholders
    _CHECKPOINT_METADATA            JSON: marks a step, whose items are folders below; times,
                                    metrics, and since 0.10 the items
    ITEM/checkpoint/.zarray         an item that is one array
    ITEM/jax_random_key/...         an item that is a random key, also np_random_key

The name of an array joins the keys of its path with ``.``, so that paths are in `Tensor.path`. In a
step with several items with arrays, the first key is the item. Up to 0.5.15, values that were saved
with ``aggregate=True`` are in ``checkpoint``, and ``_METADATA`` marks them with
``skip_deserialize``. The class names in these files are texts; nothing is imported or executed.

Specification: checkpoint/orbax/checkpoint of github.com/google/orbax, 0.12.
"""

from __future__ import annotations

import base64
import binascii
from copy import copy
from dataclasses import replace
from errno import ENAMETOOLONG
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt import formats
from xckpt.errors import (
    CheckpointError,
    FormatError,
    MissingShardError,
    UnsupportedError,
    shown,
    some,
)
from xckpt.formats import Format, Readable, kit
from xckpt.formats.orbax import ocdbt, zarr
from xckpt.index import Index, Shard, Tensor, is_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xckpt.formats.orbax.ocdbt import Value

_MANIFEST, _TREE, _OLD_TREE = "manifest.ocdbt", "_METADATA", "checkpoint"
_STEP = "_CHECKPOINT_METADATA"
_DOCUMENTS = {name.encode() for name in zarr.DOCUMENTS}
_LARGEST_JSON, _MOST_FILES, _MOST_ITEMS = 256 << 20, 100_000, 1000
_EMPTY = {"None", "Dict", "List", "Tuple", "NamedTuple"}
_PLACEHOLDER = "PLACEHOLDER://"
# The folders of an item that may have its arrays, and the files that mark one of them.
_ITEM_FOLDERS = ("", "jax_random_key/", "np_random_key/")
_ONLY_ARRAY = "checkpoint"
_ITEM_MARKS = (_MANIFEST, _TREE, *[f"{_ONLY_ARRAY}/{name}" for name in zarr.DOCUMENTS])
_TIMES = ("init_timestamp_nsecs", "commit_timestamp_nsecs")
_STATED = ("metrics", "custom_metadata", *_TIMES)

Path = tuple[str, ...]


class Orbax(Format):
    """Orbax checkpoints: folders with OCDBT, or zarr for each array."""

    name = "orbax"
    description = "Orbax checkpoints of JAX"
    storage_attrs = _TIMES
    shared_suffixes = ("/checkpoint",)
    folder_marks = (_MANIFEST, _TREE, _OLD_TREE, _STEP)

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a file is a manifest of OCDBT, or one that marks a checkpoint."""
        if head.startswith((ocdbt.MAGIC, b'{"tree_metadata"', b'{"item_handlers"')):
            return True
        file_name = kit.file_name(name)
        if file_name == _OLD_TREE:
            return head[:1] in _MAPS and _PLACEHOLDER.encode() in head
        return file_name == _STEP and head.startswith(b"{")

    def read(self, source: Readable) -> Index:
        """Read the tree and the documents of arrays, in the order of the tree."""
        head = kit.first_bytes(source, 64)
        if head.lstrip().startswith(b"{") and b'"tree_metadata"' not in head:
            return _Folder(source, "").step(self.name)
        is_old = head[:1] in _MAPS and kit.file_name(source.name) == _OLD_TREE
        if not (is_old or head.startswith((ocdbt.MAGIC, b"{"))):
            reason = f"the file begins {head[:8]!r}, and marks no checkpoint of Orbax"
            raise FormatError(reason, offset=0, rule="Magic")
        return _Folder(source, "").read(self.name, head)


def _joined(
    format: str, source: Readable, indexes: Mapping[str, Index], attrs: Mapping[str, Any]
) -> Index:
    """Return several items as one checkpoint, with the name of the item before all names."""
    tensors: dict[str, Tensor] = {}
    shards: dict[str, Shard] = {}
    merged, warnings = dict(attrs), []
    for item, index in indexes.items():
        is_array = index.tensors.keys() in ({_ONLY_ARRAY}, {"tensor"})
        for tensor in index.tensors.values():
            path = () if is_array else tensor.path or (tensor.name,)
            name = ".".join((item, *path))
            if name in tensors:
                reason = f"two items have the name {shown(name)}"
                raise FormatError(reason, offset=0, tensor=name, rule="DuplicateName")
            problem = tensor.problem
            if problem is not None:
                problem = copy(problem)
                problem.tensor = name
            tensors[name] = replace(tensor, name=name, path=(item, *path), problem=problem)
        merged |= {f"{item}.{key}": value for key, value in index.attrs.items()}
        warnings += [f"{item}: {text}" for text in index.warnings]
        shards |= index.shards
    size = source.size + sum(shard.size for shard in shards.values())
    return Index(format, "", tensors, merged, source.name, size, shards, tuple(warnings))


_MAPS = {bytes([code]) for code in (*range(0x80, 0x90), 0xDE, 0xDF)}


class _ItemTree(NamedTuple):
    """The values of an item."""

    paths: dict[str, Path]  # of arrays in folders or in the database, by name
    attrs: dict[str, Any]
    tensors: dict[str, Tensor]  # in the msgpack file


class _Folder:
    """A folder of an item, at `prefix` in the folder of `source`."""

    def __init__(self, source: Readable, prefix: str) -> None:
        self._source, self._prefix = source, prefix
        self._files: dict[str, Readable | None] = {}
        self._notes = kit.Notes()

    def step(self, format: str) -> Index:
        """Read the items of a step that have arrays."""
        fields = _json_object(self._source, _STEP)
        handlers = fields.get("item_handlers")
        if type(handlers) is dict and handlers:
            names = [*handlers]
        else:  # before 0.10; not all folders can be listed
            names = [*self._source.folders()] or ["default"]
        if len(names) > _MOST_ITEMS:
            reason = f"the checkpoint has {len(names)} items, more than {_MOST_ITEMS}"
            raise UnsupportedError(reason, offset=0, rule="Items")
        marks = {name: mark for name in names if (mark := self._item(name)) is not None}
        if not marks:
            listed = some(names, "items") if names else "no items"
            reason = f"the checkpoint has {listed}, and none of them has arrays"
            hint = "If it has others, open the folder of one of them"
            raise FormatError(reason, offset=0, rule="Items", hint=hint)
        indexes = {
            name: _Folder(self._source, prefix).read(format, kit.first_bytes(mark, 64), mark)
            for name, (prefix, mark) in marks.items()
        }
        attrs = {key: fields[key] for key in _STATED if fields.get(key) and is_json(fields[key])}
        if len(indexes) == 1:
            [index] = indexes.values()
            return replace(index, attrs={**attrs, **index.attrs})
        return _joined(format, self._source, indexes, attrs)

    def _item(self, name: str) -> tuple[str, Readable] | None:
        """Return the folder of an item's arrays, and the file that marks it; None without any."""
        for folder in _ITEM_FOLDERS:
            for mark in _ITEM_MARKS:
                file = self._optional(f"{name}/{folder}{mark}")
                if file is not None:
                    return f"{name}/{folder}", file
        return None

    # --- files ------------------------------------------------------------------------------------

    def _optional(self, name: str) -> Readable | None:
        """Open a file by its path in the folder of the source; None if it is missing."""
        if name not in self._files:
            if len(self._files) > _MOST_FILES:
                reason = f"the checkpoint has more than {_MOST_FILES} files"
                raise UnsupportedError(reason, offset=0, rule="Limit", hint="Save it with OCDBT")
            try:
                self._files[name] = self._source.sibling(name)
            # The last one is that of bytes, which have no folder.
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnsupportedError):
                self._files[name] = None
            except OSError as error:
                if error.errno != ENAMETOOLONG:
                    raise
                self._files[name] = None
            except FormatError as error:
                raise error.located(offset=0) from None
        return self._files[name]

    def _open(self, name: str) -> Readable:
        file = self._optional(name)
        if file is None:
            hint = "Copy the whole folder"
            raise kit.missing_file(name, self._source, hint, "Missing").located(offset=0)
        return file

    def _json(self, name: str) -> dict[str, Any]:
        """Return a JSON object next to the database; an empty one if it is missing or malformed."""
        file = self._optional(self._prefix + name)
        try:
            return {} if file is None else _json_object(file, name)
        except (FormatError, UnsupportedError) as error:
            self._notes.add(f"it is left out: {error.reason}", name)
            return {}

    # --- contents ---------------------------------------------------------------------------------

    def read(self, format: str, head: bytes, source: Readable | None = None) -> Index:
        """Read an item; `source` is one of its marks, by default the source of the folder."""
        source = source or self._source
        is_database = head.startswith(ocdbt.MAGIC)
        manifest = source if is_database else self._optional(self._prefix + _MANIFEST)
        database = ocdbt.read(manifest, self._prefix, self._open) if manifest is not None else None
        metadata = self._metadata(source if b'"tree_metadata"' in head else None)
        tree = self._tree(metadata, source, head)
        paths = tree.paths
        if kit.file_name(source.name) in zarr.DOCUMENTS:
            paths = {_ONLY_ARRAY: ()}
        values = self._folders(paths) if database is None else database
        is_complete = bool(metadata.get("store_array_data_equal_to_fill_value"))
        store = zarr.Store(values, self._open, is_complete=is_complete)
        tensors = self._described(self._tensors(paths, values, store) | tree.tensors)
        used = {part.shard for tensor in tensors.values() for part in tensor.parts.values()}
        shards = {
            name: Shard(file.size, None, (name,))
            for name, file in self._files.items()
            if file is not None and name in used
        }
        notes = self._notes
        return kit.index_of(format, self._source, tensors, tree.attrs, notes=notes, shards=shards)

    def _metadata(self, source: Readable | None) -> Mapping[str, Any]:
        file = source or self._optional(self._prefix + _TREE)
        if file is None:
            return {}
        metadata = _json_object(file, _TREE)
        if type(metadata.get("tree_metadata")) is not dict:
            raise FormatError(f"{_TREE} has no map 'tree_metadata'", offset=0, rule="Metadata")
        return metadata

    def _tree(self, metadata: Mapping[str, Any], source: Readable, head: bytes) -> _ItemTree:
        """Return the tree in the metadata, or in the msgpack file of old versions."""
        if not metadata:
            return self._old_tree(source if head[:1] in _MAPS else None)
        custom = metadata.get("custom_metadata")
        attrs: dict[str, Any] = {"custom_metadata": custom} if custom and is_json(custom) else {}
        texts = self._json("_strings.json")
        paths: dict[str, Path] = {}
        elsewhere: dict[str, Path] = {}
        for entry in metadata["tree_metadata"].values():
            keys = entry.get("key_metadata") if type(entry) is dict else None
            value = entry.get("value_metadata") if type(entry) is dict else None
            if type(keys) is not list or type(value) is not dict:
                raise FormatError(f"an entry of {_TREE} is malformed", offset=0, rule="Metadata")
            path = tuple([str(key.get("key")) if type(key) is dict else "" for key in keys])
            name, kind = ".".join(path), value.get("value_type")
            if kind == "string":
                if type(texts.get(name)) is str:
                    attrs[name] = texts[name]
            elif str(kind) not in _EMPTY:
                places = elsewhere if value.get("skip_deserialize") else paths
                if name in places:
                    self._notes.add("two paths have this name, and one array", shown(name))
                places.setdefault(name, path)
        tree = _ItemTree(paths, attrs, {})
        self._add_aggregated(tree, elsewhere)
        return tree

    def _add_aggregated(self, tree: _ItemTree, paths: Mapping[str, Path]) -> None:
        """Add the attributes and tensors whose values are in the msgpack file."""
        aggregated = self._old_tree(None) if paths else _ItemTree({}, {}, {})
        for name, path in paths.items():
            if name in aggregated.tensors:
                tree.tensors[name] = aggregated.tensors[name]
            elif name in aggregated.attrs:
                tree.attrs[name] = aggregated.attrs[name]
            else:
                reason = f"its value is not in the file {shown(self._prefix + _OLD_TREE)}"
                problem = MissingShardError(
                    reason,
                    path=self._source.name,
                    offset=0,
                    tensor=name,
                    rule="Missing",
                    hint="Copy the whole folder",
                )
                tree.tensors[name] = Tensor(name, "unknown", (), {}, problem=problem, path=path)

    def _old_tree(self, source: Readable | None) -> _ItemTree:
        """Return the tree in the msgpack file of old versions, as the format flax reads it."""
        tree = _ItemTree({}, {}, {})
        file = source or self._optional(self._prefix + _OLD_TREE)
        if file is None:
            return tree
        index = formats.get("flax").read(file)
        for key, value in index.attrs.items():
            if type(value) is str and value.startswith(_PLACEHOLDER):
                tree.paths[value.removeprefix(_PLACEHOLDER)] = tuple(key.split("/"))
            elif value is not None:
                tree.attrs[key.replace("/", ".")] = value
        label = self._prefix + _OLD_TREE
        for tensor in index.tensors.values():
            path = tensor.path or (tensor.name,)
            parts = dict(tensor.parts)
            if file is not self._source:
                self._files[label] = file
                parts = {role: replace(part, shard=label) for role, part in parts.items()}
            tree.tensors[".".join(path)] = replace(tensor, name=".".join(path), parts=parts)
        return tree

    def _folders(self, names: Iterable[str]) -> dict[bytes, Value]:
        """Return the files of arrays that are folders, like the values of a database."""
        values: dict[bytes, Value] = {}
        for name in names:
            for document in zarr.DOCUMENTS:
                file = self._optional(f"{self._prefix}{name}/{document}")
                if file is not None:
                    break
            else:
                continue
            for key in (document, *self._chunk_keys(file, document)):
                path = f"{self._prefix}{name}/{key}"
                stored = self._optional(path)
                if stored is not None:
                    values[f"{name}/{key}".encode()] = ocdbt.Value(stored.size, None, path, 0)
        return dict(sorted(values.items()))

    def _chunk_keys(self, file: Readable, document: str) -> list[str]:
        if file.size > 1 << 20:
            return []
        try:
            array = zarr.parse(bytes(file.read(0, file.size)), document)
        except CheckpointError:  # a problem of the array
            return []
        return zarr.keys_of(array, _MOST_FILES - len(self._files))

    # --- tensors ----------------------------------------------------------------------------------

    def _tensors(
        self, paths: Mapping[str, Path], values: Mapping[bytes, Value], store: zarr.Store
    ) -> dict[str, Tensor]:
        documents: dict[str, tuple[str, Value]] = {}
        for key, value in values.items():
            folder, _, document = key.rpartition(b"/")
            if document in _DOCUMENTS:
                try:
                    name = folder.decode()
                except UnicodeDecodeError as error:
                    reason = f"the name of an array is not UTF-8: {error}"
                    raise FormatError(reason, offset=0, rule="Utf8") from error
                documents.setdefault(name, (document.decode(), value))
        tensors: dict[str, Tensor] = {}
        parsed: dict[tuple[str, bytes], zarr.Array] = {}
        for name in dict.fromkeys([*paths, *documents]):
            path, shown_name = paths.get(name), name or "tensor"
            try:
                if name not in documents:
                    reason = "the tree of the checkpoint names the array, but it is not stored"
                    raise MissingShardError(reason, path=self._source.name, rule="Missing")
                kind, stored = documents[name]
                data = store.read(stored, 0, min(stored.nbytes, 1 << 20))
                # Arrays of equal shapes have equal documents.
                if (kind, data) not in parsed:
                    parsed[kind, data] = zarr.parse(data, kind)
                tensor = zarr.tensor(name, parsed[kind, data], store)
            except CheckpointError as error:
                problem = error.located(tensor=shown_name, offset=0)
                tensor = Tensor(name, "unknown", (), {}, problem=problem)
            path = path if path is not None and any(path) else None
            tensors[shown_name] = replace(tensor, name=shown_name, path=path)
        return tensors

    def _described(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with what other files state about their devices and random keys."""
        attrs: dict[str, dict[str, Any]] = {}
        for encoded, text in self._json("_sharding").items():
            sharding = kit.json_object(text) if type(text) is str else {}
            try:
                name = base64.urlsafe_b64decode(encoded).decode()
            except (ValueError, binascii.Error):
                continue
            stated = {key: sharding.get(key) for key in ("partition_spec", "axis_names")}
            attrs[name] = {key: value for key, value in stated.items() if value and is_json(value)}
        listed = self._json("array_metadatas/process_0").get("array_metadatas")
        for entry in listed if type(listed) is list else ():
            fields = entry.get("array_metadata") if type(entry) is dict else None
            fields = fields if type(fields) is dict else {}
            extra = fields.get("ext_metadata")
            kind = extra.get("random_key_impl") if type(extra) is dict else None
            if type(kind) is str and type(fields.get("param_name")) is str:
                attrs.setdefault(fields["param_name"], {})["random_key_impl"] = kind
        for name in attrs.keys() & tensors.keys():
            tensor = tensors[name]
            tensors[name] = replace(tensor, attrs={**attrs[name], **tensor.attrs})
        return tensors


def _json_object(file: Readable, name: str) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one for any other value."""
    if file.size > _LARGEST_JSON:
        raise UnsupportedError(f"{name} has {file.size} bytes", offset=0, rule="Limit")
    data = bytes(file.read(0, file.size))
    value = kit.decode_json(data, name, deepest=64, offset=0, repeated=lambda _: None)
    return value if type(value) is dict else {}
