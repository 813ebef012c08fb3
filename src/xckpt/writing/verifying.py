"""Verifying: whether the structure of a checkpoint is intact, and contents match their digests."""

from __future__ import annotations

import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from posixpath import basename
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xckpt.arrays import ReadOptions, lazy_arrays
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader, decoded_shape, part_readers
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
from xckpt.formatting import counted
from xckpt.labels.filters import select_or_raise
from xckpt.opening import open_index
from xckpt.progress import Progress
from xckpt.storage.source import sources_of
from xckpt.writing.contents import digest, side_by_side, stored_contents
from xckpt.writing.manifests import Manifest, differences

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from pandas import DataFrame

    from xckpt.index import Tensor
    from xckpt.labels import TensorFilter
    from xckpt.opening import OpenPath
    from xckpt.progress import ProgressOption
    from xckpt.storage import Source
    from xckpt.storage.prefetch import Range
    from xckpt.writing.contents import TensorContent, TensorDigest

__all__ = ["Finding", "Report", "verify"]

_SHOWN_FINDINGS = 20
# Number of files that are checked for changes at the same time.
_CONCURRENCY = 16
# Size of the blocks in which parts are decoded to be checked.
_BLOCK_NBYTES = 8 << 20
# Kinds of contents, as words for the layout of a tensor.
_STORED = {"elements": "dense", "decoded": "quantised", "nonzero": "sparse"}


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
    file : str or None
        The file of a checkpoint of several that it is in, where that is known.
    """

    severity: Literal["error", "warning"]
    tensor: str | None
    rule: str | None
    offset: int | None
    message: str
    file: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The result of `verify`.

    Parameters
    ----------
    path : str
        Path or URL of the file.
    format, version : str
        Format of the file and its version; empty where it could not be opened.
    tensors : int
        Number of tensors that were checked.
    digests : int
        Number of digests, of the file and of the manifest, that were compared with what they cover.
    findings : tuple of Finding
        In file order.
    unchecked : int
        Number of tensors with contents that no digest covers: damage there would not be noticed.
    """

    path: str
    format: str
    version: str
    tensors: int
    digests: int
    findings: tuple[Finding, ...]
    unchecked: int = 0

    @property
    def ok(self) -> bool:
        """Whether there are no errors; contents without digests are not looked at, see `status`."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def status(self) -> Literal["ok", "unchecked", "damaged"]:
        """``"ok"`` if all contents match digests, ``"unchecked"`` if some have none."""
        if not self.ok:
            return "damaged"
        return "unchecked" if self.unchecked else "ok"

    @property
    def sentence(self) -> str:
        """The status in words."""
        if self.status != "unchecked":
            return "ok" if self.status == "ok" else "DAMAGED"
        contents = "contents"
        if self.unchecked < self.tensors:
            contents = f"the contents of {self.unchecked:,} of {self.tensors:,} tensors"
        return f"structure intact; {contents} have no digests, so they were not checked"

    def to_dataframe(self) -> DataFrame:
        """Return the findings as a table."""
        import pandas as pd

        return pd.DataFrame(list(self.findings), columns=list(Finding._fields))

    def __repr__(self) -> str:
        errors = sum(finding.severity == "error" for finding in self.findings)
        others = len(self.findings) - errors
        head = f"{self.path}: {self.sentence}  "
        head += " · ".join(
            [
                *([f"{self.format} {self.version}".strip()] if self.format else []),
                f"{self.tensors:,} tensors",
                f"{self.digests:,} digests",
                counted(errors, "error"),
                counted(others, "warning"),
            ]
        )
        lines = [head]
        for finding in self.findings[:_SHOWN_FINDINGS]:
            where = "" if finding.tensor is None else f" {shown(finding.tensor)}"
            where += "" if finding.file is None else f" in {basename(finding.file)}"
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
    manifest: Manifest | str | os.PathLike[str] | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: ProgressOption = None,
) -> Report:
    """Check a checkpoint: structure, extents, digests, compressed streams, sparse rules, shards.

    The header is checked as opening does. Then whatever has a rule is read: parts with a digest,
    compressed parts, indices of sparse tensors, booleans. Other values are not read: without a
    digest, nothing tells whether they are what was written. With a manifest all are read.

    Parameters
    ----------
    path : str, os.PathLike, bytes or binary file object
        The checkpoint, as `xckpt.read_index` takes it.
    engine : str, optional
        Name of its format; by default it is detected from the content.
    tensors : str, iterable of str, re.Pattern or callable, optional
        Check only these, as ``xr.open_dataset(..., tensors=)`` takes it.
    manifest : Manifest, str or os.PathLike, optional
        What `xckpt.manifest` made of this checkpoint or of another that has to hold the same, in
        whatever format, or the JSON file of it. What differs is an error: elements, shapes,
        tensors that are missing, renamed or extra. Elements that are the same as another element
        type are a warning.
    storage_options : dict, optional
        For fsspec.
    progress : bool or callable, optional
        As `xckpt.save` takes it.

    Returns
    -------
    Report
        ``report.status``, ``report.ok``, and one finding for each thing that is wrong.

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
    if manifest is not None and not isinstance(manifest, Manifest):
        manifest = Manifest.read(manifest, storage_options=storage_options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # they are findings
            source, index = open_index(path, engine, storage_options=storage_options, whole=False)
    except CheckpointError as error:
        message = error.reason if error.hint is None else f"{error.reason}. {error.hint}"
        finding = _finding(error)._replace(file=None, message=message)
        return Report(error.path or "", "", "", 0, 0, (finding,))
    findings = [Finding("warning", None, None, None, text) for text in index.warnings]
    digests = unchecked = 0
    with closing(source):
        names = index.tensors if manifest is None else {**index.tensors, **manifest}
        wanted = set(select_or_raise(names, tensors))
        chosen = [tensor for name, tensor in index.tensors.items() if name in wanted]
        total = sum([tensor.nbytes for tensor in chosen])
        compared = None if manifest is None else _Compared(manifest, wanted)
        with Progress(progress, "verify", total) as bar:
            sources = sources_of(source, index.shards)
            check = partial(_check, sources=sources, progress=bar, compared=compared)
            ranges = (
                _ranges(tensor, sources, everything=compared is not None) for tensor in chosen
            )
            ahead = chain.from_iterable(ranges)
            with side_by_side(check, chosen, ahead, lambda tensor: tensor.nbytes) as results:
                for result in results:
                    findings += [] if result.finding is None else [result.finding]
                    digests += result.digests
                    unchecked += not result.is_covered
            findings += [] if compared is None else compared.findings()
            # Each may take a request, and a wait for its answer.
            with ThreadPoolExecutor(_CONCURRENCY) as threads:
                findings += filter(None, threads.map(_change, set(sources.values())))
    named = tuple([f if f.file != source.name else f._replace(file=None) for f in findings])
    counts = len(chosen), digests, named, unchecked
    return Report(source.name, index.format, index.version, *counts)


def _change(file: Source) -> Finding | None:
    """Return a finding if a file is no longer the one that was opened."""
    try:
        file.check()
    except MissingShardError:  # whose tensors tell
        return None
    except CheckpointError as error:
        return _finding(error)
    return None


def _finding(error: CheckpointError, tensor: str | None = None) -> Finding:
    name = tensor if error.tensor is None else error.tensor
    severity: Any = "warning" if isinstance(error, UnsupportedError) else "error"
    return Finding(severity, name, error.rule, error.offset, error.reason, error.path)


class _Checked(NamedTuple):
    """The result for one tensor: digests that were compared, and whether they cover all of it."""

    finding: Finding | None
    digests: int
    is_covered: bool


class _Compared:
    """Contents of tensors, to be compared with a manifest."""

    def __init__(self, manifest: Manifest, wanted: Collection[str]) -> None:
        self.expected = {n: each for n, each in manifest.items() if _is_of(n, wanted)}
        self.found: dict[str, TensorDigest] = {}
        self.files: dict[str, str] = {}
        #: Those that hold the same as another type, and what kept others from being read.
        self.recast: dict[str, TensorContent] = {}
        self.failed: dict[str, Finding] = {}

    def take(
        self,
        contents: Iterable[TensorContent],
        advance: Callable[[int], None],
        stop: Callable[[], None],
    ) -> None:
        """Hash a tensor, or each of its parts; called by several threads."""
        for content in contents:
            like = self.expected.get(content.name)
            found = digest(content, like, advance, stop)
            self.files[content.name] = content.file
            if like is not None and found == like and _type(content) != _type(like):
                self.recast[content.name] = content
            self.found[content.name] = found

    def findings(self) -> Iterator[Finding]:
        """Return differences; files in which every tensor differs come first."""
        expected = {n: each for n, each in self.expected.items() if not _is_of(n, self.failed)}
        differing = {each.tensor: each for each in differences(expected, self.found)}
        by_file: dict[str, list[str]] = defaultdict(list)
        for name, file in self.files.items():
            if name in expected:
                by_file[file].append(name)
        for file, names in by_file.items():
            if len(names) > 1 and all(name in differing for name in names):
                reason = f"none of its {len(names)} tensors holds what the manifest says"
                hint = "another step, or a file of another checkpoint"
                yield Finding("error", None, "ManifestFile", None, f"{reason}: {hint}", file)
        for each in differing.values():
            place = self.files.get(each.tensor)
            yield Finding(each.severity, each.tensor, each.rule, None, each.message, place)
        for name, why in self.failed.items():
            if why.severity != "error":
                message = "it could not be read, so that what it holds is not known"
                yield Finding("error", name, "ManifestUnread", None, message, why.file)
        for name, content in self.recast.items():
            like = self.expected[name]
            message = f"the same elements are stored as {content.dtype}, not {like.dtype}"
            if content.dtype == like.dtype:
                message = f"the same elements are {_STORED[content.kind]}, not {_STORED[like.kind]}"
            yield Finding("warning", name, "ManifestType", None, message, content.file)


def _type(of: TensorContent | TensorDigest) -> tuple[str, str]:
    return of.dtype, of.kind


def _is_of(name: str, tensors: Collection[str]) -> bool:
    """Return whether a name belongs to a tensor, or to a part of one without own values."""
    return name in tensors or (":" in name and name.rpartition(":")[0] in tensors)


def _ranges(
    tensor: Tensor, sources: Mapping[str | None, Source], *, everything: bool
) -> Iterator[Range]:
    """Return the byte ranges that are read: parts with a digest, parts to decode, or all."""
    if tensor.problem is None:
        for part in tensor.parts.values():
            reader = PartReader(sources[part.shard], part)
            is_read = reader.is_checked or part.encoding is not None or _has_rules(tensor)
            is_read |= part.within is not None
            if is_read or everything:
                yield from reader.ranges()


def _check(
    tensor: Tensor,
    stop: Callable[[], None],
    *,
    sources: Mapping[str | None, Source],
    progress: Progress,
    compared: _Compared | None,
) -> _Checked:
    """Check a tensor, and count the digests that were compared."""
    if tensor.problem is not None:
        finding = _finding(tensor.problem, tensor.name)
        if compared is not None:
            compared.failed[tensor.name] = finding
        return _Checked(finding, 0, is_covered=False)
    digests, is_covered = 0, True
    try:
        with locating(tensor=tensor.name):
            contents: list[TensorContent] = []
            if compared is not None:
                contents += stored_contents(tensor, part_readers(tensor, sources), verify=None)
            # What is hashed as it is stored is checked by that.
            is_hashed = len(contents) == 1 and contents[0].is_plain
            for role, part in tensor.parts.items():
                reader = PartReader(sources[part.shard], part)
                shape = decoded_shape(tensor, role, reader)
                nbytes = nbytes_of(part.dtype, prod(shape))
                is_compared = reader.is_checked if is_hashed else _check_part(reader, nbytes)
                digests += is_compared
                # What the header itself has is structure.
                is_covered &= is_compared or not part.nbytes or part.inline is not None
                progress.advance(0 if is_hashed else part.nbytes)
            _check_values(tensor, sources)
            if compared is not None:
                advance = progress.advance if is_hashed else lambda _: None
                compared.take(contents, advance, stop)
            digests += len(contents)
    except CheckpointError as error:
        finding = _finding(error, tensor.name)
        if compared is not None:
            compared.failed[tensor.name] = finding
        return _Checked(finding, digests, is_covered=False)
    return _Checked(None, digests, is_covered=is_covered or compared is not None)


def _check_part(reader: PartReader, nbytes: int) -> bool:
    """Check the `nbytes` bytes of a part; return whether it has a digest that could be compared."""
    part = reader.part
    if part.within is not None:
        whole = replace(reader, part=part.within)
        return _check_part(whole, whole.decoded_nbytes())
    if part.encoding is None and (stated := reader.decoded_nbytes()) != nbytes:
        reason = f"{stated} bytes are not the {nbytes} of its shape and element type"
        raise FormatError(reason, offset=part.offset, rule="LayoutData")
    reader.check(nbytes)  # a malformed digest is damage, as it is for other readers
    if part.encoding is None and not reader.is_checked:
        # Look whether it is where it is said to be, without reading it.
        source, end = reader.source, part.offset + part.nbytes
        if part.inline is None and end > source.size:
            reason = f"it ends at byte {end}, but the file has {source.size}"
            raise FormatError(reason, offset=part.offset, rule="Truncated")
        if part.inline is None and part.nbytes:
            source.read(end, 0)  # looks at the file where that costs nothing
        return False
    for _ in reader.blocks(nbytes, _BLOCK_NBYTES, compare=True):
        pass
    return reader.is_checked


def _check_values(tensor: Tensor, sources: Mapping[str | None, Source]) -> None:
    """Read values with rules of their own: indices, booleans, padding bits."""
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
    return tensor.layout.startswith("sparse_")


def _has_rules(tensor: Tensor) -> bool:
    types = [ELEMENT_TYPES[part.dtype] for part in tensor.parts.values()]
    has_types = any(each.name == "bool" or each.bits < 8 for each in types)
    return _is_sparse(tensor) or (tensor.strict and has_types)
