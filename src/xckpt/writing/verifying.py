"""Verifying: all that can be said of the bytes of a checkpoint, and what is wrong with them."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.arrays import ReadOptions, lazy_arrays
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader, decoded_shape
from xckpt.arrays.sparse import SparseArray
from xckpt.elements import ELEMENT_TYPES, nbytes_of
from xckpt.errors import (
    CheckpointError,
    CheckpointWarning,
    FormatError,
    MissingShardError,
    UnsupportedError,
    locating,
    shown,
)
from xckpt.labels.selection import select_some
from xckpt.opening import open_index
from xckpt.progress import Progress
from xckpt.storage import reading_ahead
from xckpt.storage.source import sources_of
from xckpt.writing.data import StoredData

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pandas import DataFrame

    from xckpt.index import Tensor
    from xckpt.labels import TensorFilter
    from xckpt.opening import OpenPath
    from xckpt.progress import ProgressOption
    from xckpt.storage import Source
    from xckpt.storage.ahead import Range

__all__ = ["Finding", "Report", "verify"]

_THREADS = 4
_SHOWN_FINDINGS = 20


class Finding(NamedTuple):
    """One thing that is wrong, or that a specification lets pass with a warning.

    Parameters
    ----------
    severity : {"error", "warning"}
        Errors are damage. Warnings are what a specification lets pass, and what is not known here
        and so cannot be judged.
    tensor : str or None
        Name of the tensor, None where it is about the file.
    rule : str or None
        The broken rule, as the specification or its reference reader calls it.
    offset : int or None
        Byte offset in the file.
    message : str
        What is wrong.
    """

    severity: Literal["error", "warning"]
    tensor: str | None
    rule: str | None
    offset: int | None
    message: str


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What `verify` found.

    Parameters
    ----------
    path : str
        Of the file.
    format, version : str
        Of the file; empty where it could not be opened.
    tensors : int
        How many were checked.
    digests : int
        How many digests were compared with the bytes that they cover.
    findings : tuple of Finding
        In file order.
    """

    path: str
    format: str
    version: str
    tensors: int
    digests: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return all(finding.severity != "error" for finding in self.findings)

    def to_dataframe(self) -> DataFrame:
        """Return the findings as a table."""
        import pandas as pd

        return pd.DataFrame(list(self.findings), columns=list(Finding._fields))

    def __repr__(self) -> str:
        errors = sum(finding.severity == "error" for finding in self.findings)
        others = len(self.findings) - errors
        head = f"{self.path}: {'ok' if self.ok else 'DAMAGED'}  "
        head += " · ".join(
            [
                *([f"{self.format} {self.version}".strip()] if self.format else []),
                f"{self.tensors:,} tensors",
                f"{self.digests:,} digests",
                f"{errors:,} errors",
                f"{others:,} warnings",
            ]
        )
        lines = [head]
        for finding in self.findings[:_SHOWN_FINDINGS]:
            where = "" if finding.tensor is None else f" {shown(finding.tensor)}"
            at = "" if finding.offset is None else f" byte {finding.offset}"
            rule = "" if finding.rule is None else f" [{finding.rule}]"
            lines.append(f"  {finding.severity}{where}{at}: {finding.message}{rule}")
        more = len(self.findings) - _SHOWN_FINDINGS
        return "\n".join([*lines, *([f"  and {more:,} more"] if more > 0 else [])])


def verify(
    path: OpenPath,
    engine: str | None = None,
    *,
    tensors: TensorFilter | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: ProgressOption = None,
) -> Report:
    """Check a checkpoint: structure, extents, digests, compressed streams, sparse rules, shards.

    The header is checked as opening does. Then whatever has a rule is read: parts with a digest,
    compressed parts, indices of sparse tensors, booleans. Values as such are not judged.

    Parameters
    ----------
    path : str, os.PathLike, bytes or binary file object
        The checkpoint, as `xckpt.read_index` takes it.
    engine : str, optional
        Name of its format; by default it is detected from the content.
    tensors : str, iterable of str, re.Pattern or callable, optional
        Check only these, as ``xr.open_dataset(..., tensors=)`` takes it.
    storage_options : dict, optional
        For fsspec.
    progress : bool or callable, optional
        As `xckpt.save` takes it.

    Returns
    -------
    Report
        ``report.ok``, and one finding for each thing that is wrong.

    Raises
    ------
    OSError
        If the file cannot be read at all.
    ValueError
        If no tensor matches `tensors`, or there is no such format.

    Examples
    --------
    >>> xckpt.verify("m.zt")  # doctest: +SKIP
    m.zt: ok  ztensor 1.0 · 111 tensors · 111 digests · 0 errors · 0 warnings
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # they are findings
            source, index = open_index(path, engine, storage_options=storage_options)
    except CheckpointError as error:
        return Report(error.path or "", "", "", 0, 0, (_finding(error),))
    findings = [Finding("warning", None, None, None, text) for text in index.warnings]
    digests = 0
    with closing(source):
        chosen = [index.tensors[name] for name in select_some(index.tensors, tensors)]
        total = sum([tensor.nbytes for tensor in chosen])
        with Progress(progress, "verify", total) as bar:
            sources = sources_of(source, index.shards)
            wanted = (_ranges(tensor, sources) for tensor in chosen)
            ahead = reading_ahead(chain.from_iterable(wanted))
            with ThreadPoolExecutor(_THREADS) as threads, ahead:
                check = partial(_check, sources=sources, progress=bar)
                for finding, compared in threads.map(check, chosen):
                    findings += [] if finding is None else [finding]
                    digests += compared
            for file in set(sources.values()):
                try:
                    file.check()
                except MissingShardError:  # whose tensors tell
                    pass
                except CheckpointError as error:
                    findings.append(_finding(error))
    return Report(source.name, index.format, index.version, len(chosen), digests, tuple(findings))


def _finding(error: CheckpointError, tensor: str | None = None) -> Finding:
    name = tensor if error.tensor is None else error.tensor
    severity: Any = "warning" if isinstance(error, UnsupportedError) else "error"
    return Finding(severity, name, error.rule, error.offset, error.reason)


def _ranges(tensor: Tensor, sources: Mapping[str | None, Source]) -> Iterator[Range]:
    """Return what is read of a tensor: parts with a digest, or that have to be decoded."""
    if tensor.problem is None:
        for part in tensor.parts.values():
            reader = PartReader(sources[part.shard], part)
            if reader.is_checked or part.encoding is not None or _has_rules(tensor):
                yield from reader.ranges()


def _check(
    tensor: Tensor, *, sources: Mapping[str | None, Source], progress: Progress
) -> tuple[Finding | None, int]:
    """Check a tensor, and count the digests that were compared."""
    if tensor.problem is not None:
        return _finding(tensor.problem, tensor.name), 0
    compared = 0
    try:
        with locating(tensor=tensor.name):
            for role, part in tensor.parts.items():
                reader = PartReader(sources[part.shard], part)
                shape = decoded_shape(tensor, role, reader)
                nbytes = nbytes_of(part.dtype, prod(shape))
                compared += _check_part(StoredData(reader, nbytes, shape))
                progress.advance(part.nbytes)
            _check_values(tensor, sources)
    except CheckpointError as error:
        return _finding(error, tensor.name), compared
    return None, compared


def _check_part(data: StoredData) -> bool:
    """Check the bytes of a part; return whether it has a digest that could be compared."""
    part = data.reader.part
    if part.encoding is None and part.nbytes != data.nbytes:
        reason = f"{part.nbytes} bytes are not the {data.nbytes} of its shape and element type"
        raise FormatError(reason, offset=part.offset, rule="LayoutData")
    if part.encoding is None and not data.is_checked:
        # Look whether it is where it is said to be, without reading it.
        source, end = data.reader.source, part.offset + part.nbytes
        if part.inline is None and end > source.size:
            reason = f"it ends at byte {end}, but the file has {source.size}"
            raise FormatError(reason, offset=part.offset, rule="Truncated")
        if part.inline is None and part.nbytes:
            source.read(end, 0)  # looks at the file where that costs nothing
        return False
    for _ in data.blocks():  # which compares
        pass
    return data.is_checked


def _check_values(tensor: Tensor, sources: Mapping[str | None, Source]) -> None:
    """Read what has rules beyond its bytes: indices, booleans, padding bits."""
    if not _has_rules(tensor):
        return
    options = ReadOptions(decode=_is_sparse(tensor), verify=False)
    for lazy in lazy_arrays(tensor, sources, options).values():
        if isinstance(lazy, DenseArray):
            lazy.check()
        elif isinstance(lazy, SparseArray):
            for _ in lazy.blocks():
                pass


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.layout in {"sparse_csr", "sparse_coo"}


def _has_rules(tensor: Tensor) -> bool:
    types = [ELEMENT_TYPES[part.dtype] for part in tensor.parts.values()]
    has_types = any(each.name == "bool" or each.bits < 8 for each in types)
    return _is_sparse(tensor) or (tensor.strict and has_types)
