"""Manifests: digests of the contents of all tensors of a checkpoint, as JSON, and their comparison.

A manifest has the names of tensors and the digests of `xckpt.writing.contents`, but nothing about
the format, the order, the shards or the attributes of the file. Therefore two files with the same
contents have the same manifest, byte for byte::

    {"format": "xckpt-manifest", "version": 1, "digest": "sha256:...",
     "tensors": {
      "fc.bias": {"dtype": "bfloat16", "shape": [10], "kind": "elements", "sha256": "..."},
      ...}}

Tensors are sorted by name. The digest covers all of them: it is the SHA-256 of one line per tensor,
the JSON list of name, dtype, shape, kind and sha256 in ASCII, without spaces.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any, Unpack

from xckpt.arrays.parts import part_readers
from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import (
    FormatError,
    UnreadableWarning,
    causes_of,
    locating,
    shown,
    unreadable_text,
    warn,
)
from xckpt.formatting import counted
from xckpt.index import Index, paused_collector
from xckpt.labels.filters import combined, select, select_or_raise
from xckpt.notebook.documents import Block, Heading
from xckpt.notebook.shown import Shown
from xckpt.opening import open_index
from xckpt.options import TransferOptions, takes
from xckpt.progress import Progress
from xckpt.storage import Source, open_source, write_file
from xckpt.storage.source import sources_of
from xckpt.structure import structure_of
from xckpt.writing.contents import (
    KINDS,
    TensorDigest,
    contents_of,
    digest,
    side_by_side,
    stored_contents,
)
from xckpt.writing.fitting import Changes

if TYPE_CHECKING:
    import xarray as xr

    from xckpt.errors import CheckpointError
    from xckpt.labels import TensorFilter
    from xckpt.opening import OpenPath
    from xckpt.progress import ProgressOption
    from xckpt.writing.contents import TensorContent

_FORMAT, _VERSION = "xckpt-manifest", 1
# 100,000 tensors take 20 MB.
_LARGEST_NBYTES = 1 << 30
_LARGEST_RANK = 1024
_DIGITS = re.compile(r"[0-9a-f]{64}")
_FIELDS = TensorDigest._fields
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, repr=False)
class Manifest(Shown, Mapping[str, TensorDigest]):
    """Digests of the contents of all tensors of a checkpoint: a mapping of names to `TensorDigest`.

    Two manifests are equal if the same names have the same elements of the same types. `digest`
    sums up the manifest in one line.

    Parameters
    ----------
    tensors : mapping of str to TensorDigest
        Digests of tensors by name.

    Examples
    --------
    >>> xckpt.manifest("base.safetensors") == xckpt.manifest("base.zt")
    True
    """

    tensors: Mapping[str, TensorDigest]

    def __getitem__(self, name: str) -> TensorDigest:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def digest(self) -> str:
        """Digest of all names and digests, as ``sha256:`` and 64 hexadecimal digits."""
        hasher = sha256()
        for name in sorted(self.tensors):
            line = json.dumps([name, *self.tensors[name]], separators=(",", ":"))
            hasher.update(line.encode("ascii") + b"\n")
        return f"sha256:{hasher.hexdigest()}"

    def to_json(self) -> str:
        """Return the manifest as JSON, in ASCII, with one tensor per line.

        Returns
        -------
        str
            Equal texts for equal manifests.

        Examples
        --------
        >>> print(xckpt.manifest("m.zt").to_json())
        """
        head = json.dumps({"format": _FORMAT, "version": _VERSION, "digest": self.digest})
        lines = [
            f"  {json.dumps(name)}: {json.dumps(self.tensors[name]._asdict())}"
            for name in sorted(self.tensors)
        ]
        body = ",\n".join(lines)
        return f'{head[:-1]},\n "tensors": {{\n{body}\n}}}}\n'

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the manifest to a JSON file, atomically.

        Parameters
        ----------
        path : str or os.PathLike
            The new file.
        overwrite : bool, default False
            Replace an existing file.

        Raises
        ------
        FileExistsError
            If the file exists and `overwrite` is false.
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> xckpt.manifest("m.zt").save("m.json")
        """
        write_file(os.fsdecode(path), self.to_json().encode("ascii"), overwrite=overwrite)

    @classmethod
    def read(
        cls, path: str | os.PathLike[str] | bytes, *, storage_options: dict[str, Any] | None = None
    ) -> Manifest:
        """Read a manifest from a JSON file.

        Parameters
        ----------
        path : str, os.PathLike or bytes
            Path or URL of the file, or its content.
        storage_options : dict, optional
            Options for a URL, such as ``{"anon": True}``.

        Returns
        -------
        Manifest
            The manifest, checked by its digest.

        Raises
        ------
        FormatError
            If the file is not a manifest, or was changed.
        OSError
            If the file cannot be read.

        Examples
        --------
        >>> xckpt.manifest("m.zt").save("m.json")
        >>> xckpt.Manifest.read("m.json") == xckpt.manifest("m.zt")
        True
        """
        with closing(open_source(path, storage_options=storage_options)) as source:
            if source.size > _LARGEST_NBYTES:
                reason = f"{source.size} bytes are too many for a manifest"
                raise FormatError(reason, path=source.name, rule="Manifest")
            data = bytes(source.read(0, source.size))
            try:
                with paused_collector():
                    return _parsed(data)
            except ValueError as error:
                hint = "Write one with: xckpt manifest FILE > m.json"
                raise FormatError(
                    f"not a manifest: {error}", path=source.name, rule="Manifest", hint=hint
                ) from error

    def _blocks(self) -> list[Block]:
        return [Heading(f"{counted(len(self), 'tensor')}, {self.digest}", "Manifest of")]


# --- JSON ----------------------------------------------------------------------------------------


def _parsed(data: bytes) -> Manifest:
    """Parse JSON of unknown origin; raise ValueError if it is not a valid manifest."""
    try:
        root = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(root, dict) or root.get("format") != _FORMAT:
        raise ValueError(f'it has no "format": "{_FORMAT}"')
    if (version := root.get("version")) != _VERSION or isinstance(version, bool):
        raise ValueError(f"version {_short(version)} is unsupported; expected {_VERSION}")
    tensors = root.get("tensors")
    if not isinstance(tensors, dict):
        raise ValueError(f'"tensors" is {_short(tensors)}, not an object')  # noqa: TRY004
    manifest = Manifest({name: _entry(name, entry) for name, entry in tensors.items()})
    if root.get("digest") != manifest.digest:
        raise ValueError(
            f"its digest is {_short(root.get('digest'))}, but its tensors have {manifest.digest}: "
            "it was changed"
        )
    return manifest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        visited: set[str] = set()
        twice = next(key for key, _ in pairs if key in visited or visited.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{shown(twice)} is there twice")
    return fields


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _entry(name: str, entry: Any) -> TensorDigest:
    if not isinstance(entry, dict) or entry.keys() != set(_FIELDS):
        raise ValueError(f"tensor {shown(name)} must have the fields {', '.join(_FIELDS)}")
    dtype, shape, kind, digits = (entry[field] for field in _FIELDS)
    if not isinstance(dtype, str) or dtype not in ELEMENT_TYPES:
        expected = f"one of {', '.join(ELEMENT_TYPES)}"
        raise ValueError(f"tensor {shown(name)}: dtype is {_short(dtype)}, not {expected}")
    is_list = isinstance(shape, list) and len(shape) <= _LARGEST_RANK
    if not is_list or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise ValueError(f"tensor {shown(name)}: shape is {_short(shape)}, not a list of sizes")
    if not isinstance(kind, str) or kind not in KINDS:
        expected = f"one of {', '.join(KINDS)}"
        raise ValueError(f"tensor {shown(name)}: kind is {_short(kind)}, not {expected}")
    if not isinstance(digits, str) or not _DIGITS.fullmatch(digits):
        expected = "64 hexadecimal digits in lower case"
        raise ValueError(f"tensor {shown(name)}: sha256 is {_short(digits)}, not {expected}")
    return TensorDigest(dtype, tuple(shape), kind, digits)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


# --- making one ----------------------------------------------------------------------------------


@takes(TransferOptions)
def manifest(
    obj: OpenPath | Index | xr.Dataset | xr.DataTree | xr.DataArray | Mapping[str, Any],
    engine: str | None = None,
    *,
    tensors: TensorFilter | None = None,
    **options: Unpack[TransferOptions],
) -> Manifest:
    """Digest the contents of all tensors, independent of format, order, sharding and byte order.

    All bytes are read once, in bounded memory, and several tensors are hashed in parallel. Digests
    in the file are checked on the way.

    Parameters
    ----------
    obj : path, mapping, Index, xarray.Dataset, xarray.DataTree or xarray.DataArray
        A checkpoint, as in `xckpt.read_index`, or an object in memory. The manifest of an object is
        equal to the manifest of the file that `xckpt.save` writes for it, if the format supports
        its types.
    engine : str, optional
        Name of the format of a file; detected from the content by default.

    Returns
    -------
    Manifest
        Element type, shape and SHA-256 of each tensor. The SHA-256 covers the elements in C order
        and little-endian, as numpy's ``array.tobytes()`` returns them. For a quantised tensor it
        covers the decoded float32 values, for a sparse one the elements other than zero. Quantised
        models of several tensors per weight (``qweight``, ``scales``) have digests of these
        tensors. ``manifest.to_json()`` is the output of ``xckpt manifest``.

    Warns
    -----
    UnreadableWarning
        If tensors cannot be read; the manifest lacks them.

    Raises
    ------
    CheckpointError
        If a digest in the file is wrong, or the file changes meanwhile.
    OSError
        If the file cannot be read.
    ValueError
        If no tensor matches `tensors`.
    TypeError
        If `obj` has another type.

    Examples
    --------
    >>> xckpt.manifest("base.safetensors").save("base.json")
    >>> xckpt.verify("base.zt", manifest="base.json").ok
    True
    """
    storage_options, progress = options["storage_options"], options["progress"]
    exceptions = options["exclude"], options["only"]
    if not isinstance(obj, Index) and (isinstance(obj, Mapping) or hasattr(obj, "to_dataset")):
        if engine is not None or storage_options is not None:
            raise TypeError(
                "engine and storage_options apply to a path or URL, not to an open object"
            )
        return _manifest_of_object(obj, tensors, exceptions, progress)
    path: Any = obj
    if isinstance(obj, Index):
        path, engine = obj.source, engine or obj.format
    source, index = open_index(
        path, engine, storage_options=storage_options, whole=False, missing="ignore"
    )
    with closing(source):
        chosen = combined(tensors, *exceptions, lambda: [structure_of(index)])
        return manifest_of(source, index, select_or_raise(index.tensors, chosen), progress)


def _manifest_of_object(
    obj: Any,
    tensors: TensorFilter | None,
    exceptions: tuple[TensorFilter | None, str | None],
    progress: ProgressOption,
) -> Manifest:
    """Return the manifest of tensors of an xarray object, or of a mapping of names to arrays."""
    from xckpt.datasets.mappings import as_dataset
    from xckpt.datasets.tensors import OpenTensors
    from xckpt.writing.gathering import listed

    obj = as_dataset(obj)
    changes, opened = Changes(), OpenTensors(obj)
    chosen = combined(tensors, *exceptions, lambda: [opened.structure])
    payloads = {tensor.name: tensor for tensor in listed(obj, changes)[0]}
    lost = select(changes.lost, chosen)
    _warn_of_unreadable(
        str(obj.encoding.get("source", "")),
        {name: changes.lost[name] for name in lost},
        len(payloads),
    )
    selected = [payloads[name] for name in select_or_raise(payloads, chosen)]
    return _hashed(list(chain.from_iterable(map(contents_of, selected))), progress)


def manifest_of(
    source: Source, index: Index, names: Collection[str], progress: ProgressOption = None
) -> Manifest:
    """Return the manifest of tensors of an open checkpoint; warn of those that cannot be read."""
    with locating(path=source.name):
        sources = sources_of(source, index.shards)
        selected_tensors = [index.tensors[name] for name in names]
        problems = {t.name: t.problem for t in selected_tensors if t.problem is not None}
        _warn_of_unreadable(index.source, problems, len(names) - len(problems))
        with paused_collector():
            contents = [
                content
                for tensor in selected_tensors
                if tensor.problem is None
                for content in stored_contents(tensor, part_readers(tensor, sources))
            ]
        return _hashed(contents, progress)


def _warn_of_unreadable(path: str, problems: Mapping[str, CheckpointError], count: int) -> None:
    """Warn of tensors that a manifest lacks, besides the `count` others."""
    if causes := causes_of(problems.items()):
        warn(unreadable_text(path, causes, count + len(problems)), UnreadableWarning)


def _hashed(contents: list[TensorContent], progress: ProgressOption) -> Manifest:
    digests: dict[str, TensorDigest] = {}
    total = sum([content.nbytes for content in contents])
    with Progress(progress, "manifest", total) as bar:

        def work(content: TensorContent, check: Any) -> tuple[str, TensorDigest]:
            return content.name, digest(content, None, bar.advance, check)

        ranges = chain.from_iterable(content.ranges() for content in contents)
        with side_by_side(work, contents, ranges, lambda content: content.nbytes) as results:
            for name, tensor_digest in results:
                if name in digests:
                    raise ValueError(f"two tensors have the name {shown(name)}")
                digests[name] = tensor_digest
    return Manifest(digests)


# --- comparing -----------------------------------------------------------------------------------


def differences(
    expected: Mapping[str, TensorDigest], actual: Mapping[str, TensorDigest]
) -> Iterator[tuple[str, str, str]]:
    """Yield tensors that differ from a manifest, each with the rule and a message."""
    homes: dict[TensorDigest, list[str]] = defaultdict(list)
    for name in sorted(expected):
        homes[expected[name]].append(name)
    missing = "ManifestMissing", "it is in the manifest, but not in the checkpoint"
    absent = {name: missing for name in expected if name not in actual}
    unmatched = set(absent)
    extra: list[str] = []
    for name in sorted(actual.keys() - expected.keys()):
        old = next((owner for owner in homes.get(actual[name], ()) if owner in unmatched), None)
        if old is None:
            extra.append(name)
        else:
            absent[old] = "ManifestRenamed", f"its name is {shown(name)} here"
            unmatched.remove(old)
    for name, now in actual.items():
        then = expected.get(name, now)
        if now == then:
            continue
        owner = next((other for other in homes.get(now, ()) if other != name), None)
        suffix = "" if owner is None else f": they are the elements of {shown(owner)}"
        rule, message = "ManifestElements", f"its elements differ from the manifest{suffix}"
        if now.shape != then.shape:
            rule, message = "ManifestShape", f"its shape is {now.shape}, not {then.shape}"
        elif (now.dtype, now.kind) != (then.dtype, then.kind) and not now.sha256:
            message = f"its {now.dtype} elements differ from the {then.dtype} elements of the "
            message += "manifest"
        yield name, rule, message
    for name, (rule, message) in absent.items():
        yield name, rule, message
    for name in extra:
        yield name, "ManifestExtra", "it is in the checkpoint, but not in the manifest"
