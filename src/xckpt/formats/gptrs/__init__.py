r"""gpt.rs: checkpoints (``GPTRSCHK``) and tensor archives (``GPTRSTEN``), versions 1 and 2.

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
            requires gradient u8          0 is no, all else yes
            offset u64, nbytes u64        absolute; row-major data

In version 1, records follow the head (and the config) at once: the number of tensors, then for
each what the index has, without the id and the offset, and behind it the data.

For an hour of its development version 2 had its index in the encoding of bincode 1: the same
fields, but with 64 bits for the number of tensors, the lengths of names and the numbers of axes.
Neither magic nor version tells, so an index that makes no sense as the one is read as the other,
which must then fill it exactly.

The base id is made of the name (see `xckpt.identity`), and 0 where it is not stored; names of
parameters are ASCII. Entries may be in any order, with gaps between data, and share them. All of
``config`` is the config of a gpt up to the end of 2025, and later an object with ``kind``,
``config`` and perhaps ``runtime``. gpt.rs ignores what else there is; names of axes that the kind
of model does not give are there as one text, under the key ``xckpt.dims``.

References: docs/file_formats.md, crates/gpt-rs/src/checkpoint, src/io/tensor_archive.rs and
scripts/gptrs_eval/checkpoint.py of github.com/Lallapallooza/gpt.rs, commits 60c78c3 (version 1),
2f8370f (bincode) and 99570e8.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any

from xckpt.cursor import Cursor
from xckpt.dims import DIMS_KEY, with_dims
from xckpt.errors import CheckpointError, FormatError, UnsupportedError
from xckpt.formats.gptrs.axes import ModelAxes
from xckpt.formats.gptrs.config import LARGEST_CONFIG, parse_config
from xckpt.formats.gptrs.entries import BINCODE, COMPACT, indexed_entries, inline_entries
from xckpt.formats.gptrs.plan import FILE_ATTRS, TENSOR_ATTRS, WRITE_OPTIONS, WRITES, plan
from xckpt.formats.gptrs.tensors import Tensors
from xckpt.identity import base_id, param_key
from xckpt.index import Index

if TYPE_CHECKING:
    from xckpt.formats import Readable
    from xckpt.formats.gptrs.config import ModelConfig

__all__ = [
    "FILE_ATTRS",
    "NAME",
    "SHARED_SUFFIXES",
    "SUFFIXES",
    "TENSOR_ATTRS",
    "WRITES",
    "WRITE_OPTIONS",
    "base_id",
    "detect",
    "param_key",
    "plan",
    "read",
]

NAME = "gptrs"
# Upstream has no fixed ones; these are those of its tools and its documentation.
SUFFIXES = (".bin", ".ten", ".gptrs")
SHARED_SUFFIXES = (".bin",)

_CHECKPOINT, _ARCHIVE = b"GPTRSCHK", b"GPTRSTEN"
_U32 = Struct("<I")


def detect(head: bytes, size: int, name: str) -> bool:  # noqa: ARG001 (the registry's signature)
    """Tell whether a file is a checkpoint or an archive of gpt.rs, by its magic.

    Parameters
    ----------
    head : bytes
        The first bytes of the file, at least 8 where it has so many.
    size : int
        Size of the file in bytes.
    name : str
        Its path or URL.

    Returns
    -------
    bool
        Whether `read` is the right reader; it may still find the file malformed.

    Examples
    --------
    >>> detect(b"GPTRSCHK\x02\x00\x00\x00", 4096, "model.bin")
    True
    """
    return head.startswith((_CHECKPOINT, _ARCHIVE))


def read(source: Readable) -> Index:
    """Read the index of a checkpoint or an archive, no data.

    Parameters
    ----------
    source : Readable
        The file.

    Returns
    -------
    Index
        Every tensor, with the attributes ``requires_grad`` and, in checkpoints, ``base_id``: 32
        hexadecimal digits of the number, the highest first. The attributes of a checkpoint are
        its ``kind``, ``config`` and ``runtime``, and ``ids="stored"`` where it has base ids.

    Raises
    ------
    FormatError
        If the file breaks a rule.
    UnsupportedError
        If its version is not known.
    """
    cursor = Cursor(source)
    magic = cursor.take(8, "the magic")
    if magic not in {_CHECKPOINT, _ARCHIVE}:
        raise FormatError(f"the file begins {magic!r}", offset=0, rule="Magic")
    version = cursor.number(_U32, "the version")
    if version not in {1, 2}:
        raise UnsupportedError(f"version {version}: 1 and 2 are read", offset=8, rule="Version")
    config = _config(cursor) if magic == _CHECKPOINT else None
    tensors, dialect = (_inline if version == 1 else _indexed)(cursor, source.size, config)
    warnings = tensors.warnings()
    attrs = _attrs(config, tensors)
    if config is not None and config.warning is not None:
        warnings = (config.warning, *warnings)
    return Index(
        format=NAME,
        version=dialect,
        tensors=with_dims(tensors.found, attrs.pop(DIMS_KEY, None)),
        attrs=attrs,
        source=source.name,
        nbytes=source.size,
        warnings=warnings,
    )


def _attrs(config: ModelConfig | None, tensors: Tensors) -> dict[str, Any]:
    if config is None:
        return {}
    return config.attrs | ({"ids": "stored"} if tensors.has_ids else {})


def _config(cursor: Cursor) -> ModelConfig:
    length = cursor.number(_U32, "length of the config")
    start = cursor.at
    if LARGEST_CONFIG < length <= cursor.left:
        raise FormatError(
            f"a config of {length} bytes is larger than {LARGEST_CONFIG}",
            offset=start,
            rule="ConfigLength",
        )
    return parse_config(cursor.take(length, "the config"), start)


def _inline(cursor: Cursor, size: int, config: ModelConfig | None) -> tuple[Tensors, str]:
    tensors = _tensors(cursor.at, size, config)
    return tensors.add(inline_entries(cursor)), "1"


def _indexed(cursor: Cursor, size: int, config: ModelConfig | None) -> tuple[Tensors, str]:
    length = cursor.number(_U32, "length of the index")
    start = cursor.at
    cursor.enter(length, "the index")
    ids = config is not None
    try:
        tensors = _tensors(start + length, size, config)
        return tensors.add(indexed_entries(cursor, COMPACT, ids=ids)), "2"
    except CheckpointError as error:
        cursor.at = start
        try:
            entries = list(indexed_entries(cursor, BINCODE, ids=ids))
        except CheckpointError as other:
            # Neither makes sense: the one that made sense for longer has the telling error.
            raise max(error, other, key=lambda e: e.offset or 0) from None
    return _tensors(start + length, size, config).add(entries), "2-bincode"


def _tensors(data_start: int, size: int, config: ModelConfig | None) -> Tensors:
    if config is None:
        return Tensors(data_start, size)
    return Tensors(data_start, size, axes=ModelAxes(config.kind, config.config), ids=True)
