"""Verifying: all that can be said of the bytes of a checkpoint, and what is wrong with them."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.arrays import ReadOptions, lazy_arrays
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader
from xckpt.arrays.sparse import SparseArray
from xckpt.dtypes import ELEMENT_TYPES
from xckpt.errors import (
    CheckpointError,
    CheckpointWarning,
    FormatError,
    UnsupportedError,
    locating,
    shown,
)
from xckpt.index import Part
from xckpt.opening import open_index
from xckpt.progress import Progress
from xckpt.storage.shard import sources_of
from xckpt.writing.hashing import Hashing, stated_digest
from xckpt.writing.stored import raw_nbytes
from xckpt.writing.stored_data import StoredData

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pandas import DataFrame

    from xckpt.index import Index, Tensor
    from xckpt.progress import ProgressOption
    from xckpt.storage import Source

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
        lines = [head, *map(_line, self.findings[:_SHOWN_FINDINGS])]
        more = len(self.findings) - _SHOWN_FINDINGS
        return "\n".join([*lines, *([f"  and {more:,} more"] if more > 0 else [])])


def _line(finding: Finding) -> str:
    where = "" if finding.tensor is None else f" {shown(finding.tensor)}"
    at = "" if finding.offset is None else f" byte {finding.offset}"
    rule = "" if finding.rule is None else f" [{finding.rule}]"
    return f"  {finding.severity}{where}{at}: {finding.message}{rule}"


def verify(
    path: Any, *, storage_options: dict[str, Any] | None = None, progress: ProgressOption = None
) -> Report:
    """Check a checkpoint: structure, extents, digests, compressed streams, sparse rules, shards.

    The header is checked as opening does. Then whatever has a rule is read: parts with a digest,
    compressed parts, indices of sparse tensors, booleans. Values as such are not judged.

    Parameters
    ----------
    path : str, os.PathLike, bytes or binary file object
        The checkpoint, as `xckpt.read_index` takes it.
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

    Examples
    --------
    >>> xckpt.verify("m.zt")  # doctest: +SKIP
    m.zt: ok  ztensor 1.0 · 111 tensors · 111 digests · 0 errors · 0 warnings
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # they are findings
            source, index = open_index(path, storage_options=storage_options)
    except CheckpointError as error:
        return Report(error.path or "", "", "", 0, 0, (_finding(error),))
    try:
        findings, digests = _check_tensors(source, index, progress)
    finally:
        source.close()
    said = [Finding("warning", None, None, None, text) for text in index.warnings]
    return Report(
        source.name, index.format, index.version, len(index.tensors), digests, (*said, *findings)
    )


def _finding(error: CheckpointError, tensor: str | None = None) -> Finding:
    name = tensor if error.tensor is None else error.tensor
    severity: Any = "warning" if isinstance(error, UnsupportedError) else "error"
    return Finding(severity, name, error.rule, error.offset, error.reason)


def _check_tensors(
    source: Source, index: Index, progress: ProgressOption
) -> tuple[list[Finding], int]:
    sources = sources_of(source, index.shards)
    total = sum([tensor.nbytes for tensor in index.tensors.values()])
    findings, digests = [], 0
    with Progress(progress, "verify", total) as bar, ThreadPoolExecutor(_THREADS) as threads:
        checks = threads.map(lambda tensor: _check(tensor, sources, bar), index.tensors.values())
        for found, hashed in checks:
            findings += found
            digests += hashed
    return findings, digests


def _check(
    tensor: Tensor, sources: Mapping[str | None, Source], progress: Progress
) -> tuple[list[Finding], int]:
    """Check a tensor, and count the digests that were compared."""
    if tensor.problem is not None:
        return [_finding(tensor.problem, tensor.name)], 0
    readers = {role: PartReader(sources[part.shard], part) for role, part in tensor.parts.items()}
    findings, digests = [], 0
    try:
        with locating(tensor=tensor.name):
            for role, reader in readers.items():
                digests += _check_part(StoredData(reader, raw_nbytes(tensor, role, reader)))
                progress.advance(reader.part.nbytes)
            _check_values(tensor, sources)
    except CheckpointError as error:
        findings.append(_finding(error, tensor.name))
    return findings, digests


def _check_part(data: StoredData) -> bool:
    """Check the bytes of a part, and tell whether it has a digest that could be compared."""
    reader, nbytes = data.reader, data.nbytes
    part = reader.part
    stated = stated_digest(data)
    if part.encoding is None and part.nbytes != nbytes:
        reason = f"{part.nbytes} bytes are not the {nbytes} of its shape and element type"
        raise FormatError(reason, offset=part.offset, rule="LayoutData")
    if part.encoding is None and stated is None:
        _check_presence(reader.source, part)
        return False
    hashing = Hashing(data, Part(part.dtype, part.shape, 0, nbytes))
    blocks = reader.stored_blocks() if reader.is_raw else data.blocks()
    for block in blocks:
        hashing.add_raw(block)
    hashing.finish()
    return stated is not None


def _check_presence(source: Source, part: Part) -> None:
    """Look whether a part is where it is said to be, without reading it."""
    if part.inline is not None:
        return
    end = part.offset + part.nbytes
    if end > source.size:
        reason = f"it ends at byte {end}, but the file has {source.size}"
        raise FormatError(reason, offset=part.offset, rule="Truncated")
    if part.nbytes:
        source.read(end - 1, 1)


def _check_values(tensor: Tensor, sources: Mapping[str | None, Source]) -> None:
    """Read what has rules beyond its bytes: indices, booleans, padding bits."""
    is_sparse = tensor.layout in {"sparse_csr", "sparse_coo"}
    if not is_sparse and not (tensor.strict and _has_rules(tensor)):
        return
    options = ReadOptions(decode=is_sparse, verify=False)
    for lazy in lazy_arrays(tensor, sources, options).values():
        if isinstance(lazy, DenseArray):
            lazy.check()
        elif isinstance(lazy, SparseArray):
            for _ in lazy.blocks():
                pass


def _has_rules(tensor: Tensor) -> bool:
    dtypes = {part.dtype for part in tensor.parts.values()}
    return any(dtype == "bool" or ELEMENT_TYPES[dtype].bits < 8 for dtype in dtypes)
