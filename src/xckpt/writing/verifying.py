"""Checks of a checkpoint: intact structure, and contents that match their digests."""

from __future__ import annotations

import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from posixpath import basename
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

from xckpt.arrays import ReadOptions, lazy_arrays
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader, decoded_shape, nbytes_of_elements, part_readers
from xckpt.arrays.sparse import SparseArray
from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import (
    CheckpointError,
    CheckpointWarning,
    FileChangedError,
    FormatError,
    MissingShardError,
    UnsupportedError,
    causes_of,
    locating,
    shown,
    some,
)
from xckpt.formatting import counted
from xckpt.index import CodeFinding, Index, Part, Tensor, code_findings
from xckpt.labels.filters import combined, select_or_raise
from xckpt.notebook.documents import Block, Heading, Sentence, more
from xckpt.notebook.shown import Shown
from xckpt.opening import open_index
from xckpt.options import TransferOptions, takes
from xckpt.progress import Progress
from xckpt.storage.source import sources_of
from xckpt.structure import structure_of
from xckpt.structure.description import NO_TENSORS, empty_weights
from xckpt.writing.contents import digest, side_by_side, stored_contents
from xckpt.writing.manifests import Manifest, differences, manifest_of
from xckpt.writing.manifests import manifest as make_manifest

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from pandas import DataFrame

    from xckpt.errors import Cause
    from xckpt.labels import TensorFilter
    from xckpt.opening import OpenPath
    from xckpt.progress import ProgressOption
    from xckpt.storage import Source
    from xckpt.storage.prefetch import Range
    from xckpt.writing.contents import TensorContent, TensorDigest

    _Hashed = Sequence[tuple[TensorContent, TensorDigest]]

_SHOWN_FINDINGS = 20
# Rule of findings about missing contents.
_EMPTY = "Empty"
# Rule of findings about functions that unpickling runs elsewhere.
_EXECUTES = "executes"
# Number of files that are checked for changes at the same time.
_CONCURRENCY = 16
# Size of the blocks in which parts are decoded to be checked.
_BLOCK_NBYTES = 8 << 20
# Layouts of tensors by kind of contents, for messages.
_STORED = {"elements": "dense", "decoded": "quantised", "nonzero": "sparse"}


class Finding(NamedTuple):
    """A fault of a checkpoint.

    Parameters
    ----------
    severity : {"error", "warning"}
        ``"error"`` for damage, missing contents and code; ``"warning"`` for an irregularity that
        the specification tolerates, or for an unsupported feature.
    tensor : str or None
        Name of the tensor; None for a fault of the whole file, or of several tensors, which the
        message lists.
    rule : str or None
        Name of the broken rule in the specification or its reference reader.
    offset : int or None
        Byte offset in the file.
    message : str
        Description of the fault.
    file : str or None
        File with the fault, if the checkpoint has several files.

    Examples
    --------
    >>> for finding in xckpt.verify("m.zt").findings:
    ...     print(finding.severity, finding.tensor, finding.message)
    """

    severity: Literal["error", "warning"]
    tensor: str | None
    rule: str | None
    offset: int | None
    message: str
    file: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Report(Shown):
    """The result of `verify`.

    Parameters
    ----------
    path : str
        Path or URL of the file.
    format, version : str
        Format of the file and its version; empty if the file could not be opened.
    tensors : int
        Number of tensors that were checked.
    digests : int
        Number of digests, in the file and in the manifest, that were compared with the data.
    findings : tuple of Finding
        Faults in file order.
    unchecked : int
        Number of tensors whose contents no digest covers, so that damage would not be noticed.

    Examples
    --------
    >>> report = xckpt.verify("m.zt")
    >>> report.status, len(report.findings)
    ('ok', 0)
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
        """True without errors. Contents without digests are not checked; see `status`."""
        return self.status in {"ok", "unchecked"}

    @property
    def status(
        self,
    ) -> Literal["ok", "unchecked", "empty", "unsafe", "unsupported", "damaged"]:
        """Status of the checkpoint.

        ``"damaged"`` if there are errors, ``"empty"`` if the only errors are missing contents: no
        tensors, or weights without elements; ``"unsafe"`` if the contents are intact, but
        unpickling them elsewhere runs functions that weights do not need; ``"unsupported"`` if the
        file uses a feature that xckpt does not support, so that nothing was checked;
        ``"unchecked"`` if there are no errors but contents without a digest, and ``"ok"`` if all
        contents match digests.
        """
        rules = {finding.rule for finding in self.findings if finding.severity == "error"}
        if rules == {_EMPTY}:
            return "empty"
        if rules:
            return "unsafe" if rules <= {_EMPTY, _EXECUTES} else "damaged"
        if not self.format:
            return "unsupported"
        return "unchecked" if self.unchecked else "ok"

    @property
    def sentence(self) -> str:
        """The status as a sentence."""
        if self.status != "unchecked":
            return "ok" if self.status == "ok" else self.status.upper()
        contents = "contents"
        if self.unchecked < self.tensors:
            contents = f"the contents of {self.unchecked:,} of {self.tensors:,} tensors"
        return f"structure intact; {contents} have no digests, so they were not checked"

    def to_dataframe(self) -> DataFrame:
        """Return the findings as a table, with a column for each field of `Finding`."""
        import pandas as pd

        return pd.DataFrame(list(self.findings), columns=list(Finding._fields))

    def _blocks(self, most: int | None = _SHOWN_FINDINGS) -> list[Block]:
        facts = [
            self.sentence,
            f"{self.format} {self.version}".strip(),
            counted(self.tensors, "tensor"),
            counted(self.digests, "digest"),
        ]
        blocks: list[Block] = [Heading(self.path, facts=list(filter(None, facts)))]
        for finding in self.findings[:most]:
            place = "" if finding.tensor is None else f"tensor {shown(finding.tensor)}"
            if finding.file is not None:
                place = f"{place} in {basename(finding.file)}".strip()
            at = "" if finding.offset is None else f"byte {finding.offset}"
            rule = "" if finding.rule is None else f" [{finding.rule}]"
            text = ": ".join(filter(None, (place, at, finding.message)))
            blocks.append(Sentence(finding.severity, f"{text}{rule}"))
        rest = 0 if most is None else len(self.findings) - most
        return [*blocks, *([Sentence("hint", more(rest, "finding"))] if rest > 0 else [])]


@takes(TransferOptions, findings="xckpt.findings(path) and ds.ckpt.findings() check values")
def verify(
    path: OpenPath,
    engine: str | None = None,
    *,
    tensors: TensorFilter | None = None,
    manifest: Manifest | str | os.PathLike[str] | None = None,
    **options: Unpack[TransferOptions],
) -> Report:
    """Check a checkpoint: structure, extents, digests, compressed streams, sparse rules, shards.

    The header is checked as in opening. Then all data with a rule are read: parts with a digest,
    compressed parts, indices of sparse tensors, booleans. Other values are not read, because
    without a digest damage cannot be detected. With a manifest, all values are read and compared.

    Parameters
    ----------
    path : str, os.PathLike, bytes or binary file object
        The checkpoint, as in `xckpt.read_index`.
    engine : str, optional
        Name of the format; detected from the content by default.
    manifest : Manifest, str or os.PathLike, optional
        Manifest of this checkpoint, or of another one that should have the same contents in any
        format; or its JSON file. Differences are errors: other elements or shapes, and tensors that
        are missing, renamed or extra. Equal elements of another type are a warning.

    Returns
    -------
    Report
        ``report.status``, ``report.ok``, and ``report.findings`` with one entry per fault, also if
        several tensors have it.

    Raises
    ------
    FileChangedError
        If another process changes or replaces the file meanwhile, which is no damage.
    OSError
        If the file cannot be read at all.
    ValueError
        If no tensor matches `tensors`, or the format is unknown.

    Examples
    --------
    >>> report = xckpt.verify("m.zt")
    >>> report.status, report.tensors, report.digests
    ('ok', 71, 74)
    """
    storage_options, progress = options["storage_options"], options["progress"]
    if manifest is not None and not isinstance(manifest, Manifest):
        manifest = Manifest.read(manifest, storage_options=storage_options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # they are findings
            source, index = open_index(path, engine, storage_options=storage_options, whole=False)
    except FileChangedError:
        raise
    except CheckpointError as error:
        return _report_of_error(error)
    findings = _stated(index)
    findings += _copies(source, index, storage_options)
    findings += _copies_on_ranks(path, engine, index, storage_options)
    errors: list[tuple[str, CheckpointError]] = []
    digests = unchecked = 0
    with closing(source):
        names = index.tensors if manifest is None else {**index.tensors, **manifest}
        structures = lambda: [structure_of(index)]  # noqa: E731
        chosen = combined(tensors, options["exclude"], options["only"], structures)
        selected = set(select_or_raise(names, chosen))
        checked_tensors = [tensor for name, tensor in index.tensors.items() if name in selected]
        compared = None if manifest is None else _Compared(manifest, selected)
        sources = sources_of(source, index.shards)
        results = _check_all(checked_tensors, sources, compared, progress)
        for tensor, result in zip(checked_tensors, results, strict=True):
            if result.error is not None:
                errors.append((tensor.name, result.error))
            if compared is not None:
                compared.add(tensor.name, result)
            digests += result.digests
            unchecked += not result.is_covered
        findings += map(_finding_of, causes_of(errors))
        findings += _findings_of_emptiness(index, checked_tensors)
        findings += [] if compared is None else compared.findings()
        # Checking a file may take a request.
        with ThreadPoolExecutor(_CONCURRENCY) as threads:
            findings += filter(None, threads.map(_change, set(sources.values())))
    return Report(
        source.name,
        index.format,
        index.version,
        len(checked_tensors),
        digests,
        tuple([f if f.file != source.name else f._replace(file=None) for f in findings]),
        unchecked,
    )


def _report_of_error(error: CheckpointError) -> Report:
    """Return the report on a checkpoint that cannot be opened."""
    message = error.reason if error.hint is None else f"{error.reason}. {error.hint}"
    finding = _finding(error)._replace(file=None, message=message)
    code = map(_finding_of_code, code_findings(error.executes, ()))
    return Report(error.path or "", "", "", 0, 0, (finding, *code))


def _stated(index: Index) -> list[Finding]:
    """Report warnings, functions that run when others unpickle it, and files with holes."""
    texts = (*index.warnings, *index.facts)
    findings = [Finding("warning", None, None, None, text) for text in texts]
    findings += map(_finding_of_code, index.risks)
    incomplete = () if index.checkpoint is None else index.checkpoint.incomplete
    reason = "a download into the file did not end: its contents may have holes"
    return [*findings, *[Finding("error", None, None, None, reason, name) for name in incomplete]]


def _finding_of_code(code: CodeFinding) -> Finding:
    return Finding(code.severity, None, code.rule, None, code.message)


def _copies(
    source: Source, index: Index, storage_options: dict[str, Any] | None
) -> Iterator[Finding]:
    """Compare tensors that are in several files of the checkpoint."""
    if index.checkpoint is None or not index.checkpoint.duplicates:
        return
    names_by_file: dict[str, set[str]] = defaultdict(set)
    for name, files in index.checkpoint.duplicates.items():
        for file in files:
            names_by_file[file].add(name)
    for file, names in names_by_file.items():
        path = source.sibling(file).name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # they are findings
            digests = [
                make_manifest(obj, tensors=names.__contains__, storage_options=storage_options)
                for obj in (index, path)
            ]
        for name in sorted(names):
            is_equal = digests[0][name] == digests[1][name]
            verb = "equals" if is_equal else "differs from"
            text = f"its copy in {shown(file)}, which does not count, {verb} it"
            yield Finding("warning", name, "DuplicateTensor", None, text, path)


def _copies_on_ranks(
    path: OpenPath, engine: str | None, index: Index, storage_options: dict[str, Any] | None
) -> Iterator[Finding]:
    """Compare tensors that every rank has."""
    groups = () if index.checkpoint is None else index.checkpoint.copies
    if not groups:
        return
    source, side_by_side = open_index(
        path, engine, storage_options=storage_options, whole=False, silent=True, join_ranks=False
    )
    with closing(source):
        names = dict.fromkeys(name for group in groups for name in group)
        digests = manifest_of(source, side_by_side, list(names))
    names_by_rank: dict[str, list[str]] = defaultdict(list)
    for first, *copies in groups:
        for copy in copies:
            if digests.get(copy) != digests.get(first):
                rank, _, name = copy.partition(".")
                names_by_rank[rank].append(name)
    for rank, differing in names_by_rank.items():
        text = (
            f"{some(differing)} in {shown(rank)} differ from the copies that count: the ranks may "
            "be of different steps"
        )
        yield Finding("warning", None, "Ranks", None, text)


def _change(file: Source) -> Finding | None:
    """Return a finding if a file cannot be opened again; raise if it changed meanwhile."""
    try:
        file.check()
    except FileChangedError:
        raise
    except MissingShardError:  # its tensors have findings
        return None
    except CheckpointError as error:
        return _finding(error)
    return None


def _finding(error: CheckpointError, tensor: str | None = None) -> Finding:
    name = tensor if error.tensor is None else error.tensor
    severity: Any = "warning" if isinstance(error, UnsupportedError) else "error"
    return Finding(severity, name, error.rule, error.offset, error.reason, error.path)


def _finding_of(cause: Cause) -> Finding:
    """Return one finding for all tensors that have the same fault."""
    finding = _finding(cause.error, cause.tensors[0])
    message = (
        finding.message if cause.error.hint is None else f"{finding.message}. {cause.error.hint}"
    )
    if len(cause.tensors) > 1:
        count = counted(len(cause.tensors), "tensor")
        message = f"{count} ({some(cause.tensors)}): {message}"
        finding = finding._replace(tensor=None, offset=None)
    return finding._replace(message=message)


def _findings_of_emptiness(index: Index, tensors: Sequence[Tensor]) -> Iterator[Finding]:
    """Yield a finding if a checkpoint has no tensors, and one for weights without elements."""
    if not index.tensors:
        yield Finding("error", None, _EMPTY, None, NO_TENSORS)
    checked_names = {tensor.name for tensor in tensors}
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in empty_weights(structure_of(index)).items():
        if name in checked_names:
            by_reason[reason].append(name)
    for reason, names in by_reason.items():
        if len(names) == 1:
            yield Finding("error", names[0], _EMPTY, None, reason)
        else:
            text = f"{counted(len(names), 'tensor')} ({some(names)}): {reason}"
            yield Finding("error", None, _EMPTY, None, text)


class _Checked(NamedTuple):
    """Result for a tensor: its fault, the number of compared digests, and whether they cover it."""

    error: CheckpointError | None
    digests: int
    is_covered: bool
    hashed: _Hashed = ()


class _Compared:
    """A comparison of tensors with a manifest."""

    def __init__(self, manifest: Manifest, selected: Collection[str]) -> None:
        self.expected = {n: entry for n, entry in manifest.items() if _is_of(n, selected)}
        self.actual: dict[str, TensorDigest] = {}
        self.files: dict[str, str] = {}
        #: Tensors with the same elements as another type.
        self.recast: dict[str, TensorContent] = {}
        #: Faults of tensors that could not be read.
        self.failed: dict[str, Finding] = {}

    def hashed(
        self,
        contents: Iterable[TensorContent],
        advance: Callable[[int], None],
        stop: Callable[[], None],
    ) -> _Hashed:
        """Hash a tensor, or each of its parts; called by several threads."""
        likes = ((content, self.expected.get(content.name)) for content in contents)
        return [(content, digest(content, like, advance, stop)) for content, like in likes]

    def add(self, name: str, checked: _Checked) -> None:
        """Add the fault or the digests of a tensor; findings come in this order."""
        if checked.error is not None:
            self.failed[name] = _finding(checked.error, name)
        for content, actual in checked.hashed:
            like = self.expected.get(content.name)
            self.files[content.name] = content.file
            if like is not None and actual == like and _type(content) != _type(like):
                self.recast[content.name] = content
            self.actual[content.name] = actual

    def findings(self) -> Iterator[Finding]:
        """Yield differences; files in which every tensor differs come first."""
        expected = {n: entry for n, entry in self.expected.items() if not _is_of(n, self.failed)}
        differing = {mismatch[0]: mismatch for mismatch in differences(expected, self.actual)}
        by_file: dict[str, list[str]] = defaultdict(list)
        for name, file in self.files.items():
            if name in expected:
                by_file[file].append(name)
        for file, names in by_file.items():
            if len(names) > 1 and all(name in differing for name in names):
                reason = f"all of its {len(names)} tensors differ from the manifest"
                hint = "it may be of another step, or of another checkpoint"
                yield Finding("error", None, "ManifestFile", None, f"{reason}; {hint}", file)
        for name, rule, message in differing.values():
            yield Finding("error", name, rule, None, message, self.files.get(name))
        for name, failure in self.failed.items():
            if failure.severity != "error":
                message = "it could not be read, so it was not compared with the manifest"
                yield Finding("error", name, "ManifestUnread", None, message, failure.file)
        for name, content in self.recast.items():
            like = self.expected[name]
            message = f"the same elements are stored as {content.dtype}, not {like.dtype}"
            if content.dtype == like.dtype:
                message = f"the same elements are {_STORED[content.kind]}, not {_STORED[like.kind]}"
            yield Finding("warning", name, "ManifestType", None, message, content.file)


def _type(content: TensorContent | TensorDigest) -> tuple[str, str]:
    return content.dtype, content.kind


def _is_of(name: str, tensors: Collection[str]) -> bool:
    """Return whether a name denotes a tensor, or a part of one, such as ``tensor:scales``."""
    return name in tensors or (":" in name and name.rpartition(":")[0] in tensors)


def _ranges(
    tensor: Tensor, sources: Mapping[str | None, Source], *, everything: bool
) -> Iterator[Range]:
    """Yield the byte ranges to read: parts with a digest, parts to decode, or all parts."""
    if tensor.problem is None:
        for part in tensor.parts.values():
            reader = PartReader(sources[part.shard], part)
            is_read = reader.is_checked or part.encoding is not None or _has_rules(tensor)
            is_read |= part.within is not None
            if is_read or everything:
                yield from reader.ranges()


def _check_all(
    tensors: Sequence[Tensor],
    sources: Mapping[str | None, Source],
    compared: _Compared | None,
    progress: ProgressOption,
) -> Iterator[_Checked]:
    """Check tensors side by side; yield the results in their order."""
    with Progress(progress, "verify", sum([tensor.nbytes for tensor in tensors])) as bar:
        check = partial(_check, sources=sources, progress=bar, compared=compared)
        ranges = (_ranges(tensor, sources, everything=compared is not None) for tensor in tensors)
        ahead = chain.from_iterable(ranges)
        with side_by_side(check, tensors, ahead, lambda tensor: tensor.nbytes) as results:
            yield from results


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
        return _Checked(tensor.problem, 0, is_covered=False)
    digests, is_covered = 0, True
    hashed: _Hashed = ()
    try:
        with locating(tensor=tensor.name):
            contents: list[TensorContent] = []
            if compared is not None:
                contents += stored_contents(tensor, part_readers(tensor, sources), verify=None)
            # Hashing the stored bytes also checks their digest in the file.
            is_hashed = len(contents) == 1 and contents[0].is_plain
            longer: list[Part] = []
            for role, part in tensor.parts.items():
                reader = PartReader(sources[part.shard], part)
                shape = decoded_shape(tensor, role, reader)
                nbytes = nbytes_of_elements(part, prod(shape))
                is_compared = reader.is_checked if is_hashed else _check_part(reader, nbytes)
                digests += is_compared
                # Values in the header are covered by the checks of the structure.
                is_in_header = not part.nbytes or part.inline is not None
                is_covered &= is_compared or is_in_header or _lies_in(part, longer)
                longer += [part.within] if is_compared and part.within is not None else []
                progress.advance(0 if is_hashed else part.nbytes)
            _check_values(tensor, sources)
            if compared is not None:
                advance = progress.advance if is_hashed else lambda _: None
                hashed = compared.hashed(contents, advance, stop)
            digests += len(contents)
    except FileChangedError:
        raise
    except CheckpointError as error:
        return _Checked(error.with_traceback(None), digests, is_covered=False)
    return _Checked(None, digests, is_covered or compared is not None, hashed)


def _lies_in(part: Part, longer: Iterable[Part]) -> bool:
    """Return whether one of several longer parts has the bytes of a part."""
    return any(
        (part.shard, part.encoding) == (candidate.shard, candidate.encoding)
        and candidate.offset <= part.offset
        and part.offset + part.nbytes <= candidate.offset + candidate.nbytes
        for candidate in longer
    )


def _check_part(reader: PartReader, nbytes: int) -> bool:
    """Check the `nbytes` bytes of a part; return whether a digest was compared."""
    part = reader.part
    if reader.whole is not None:
        return _check_part(reader.whole, reader.whole.count_decoded_nbytes())
    reader.check(nbytes)  # a malformed digest is damage, as it is for other readers
    if part.encoding is None and not reader.is_checked:
        # Check the stated range without reading it.
        source, end = reader.source, part.offset + part.nbytes
        if part.inline is None and end > source.size:
            reason = f"it ends at byte {end}, but the file has {source.size}"
            raise FormatError(reason, offset=part.offset, rule="Truncated")
        if part.inline is None and part.nbytes:
            source.read(end, 0)  # checks that the file is unchanged, if that needs no request
        return False
    for _ in reader.blocks(nbytes, _BLOCK_NBYTES, compare=True):
        pass
    return reader.is_checked


def _check_values(tensor: Tensor, sources: Mapping[str | None, Source]) -> None:
    """Read and check values that must follow rules: indices, booleans, padding bits."""
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
    has_types = any(kind.name == "bool" or kind.bits < 8 for kind in types)
    return _is_sparse(tensor) or (tensor.strict and has_types)
