"""`Explorer`: a widget to search 100,000 tensors, and to compute statistics of one or all of them.

The browser has the rows as columns of bytes, and searches, filters and sorts them
(``explorer.js``). Statistics are computed in a thread, so the kernel stays responsive.

The two sides exchange messages with arrays as buffers::

    browser -> kernel   {ask: "known"}              a new view requests all results so far
                        {ask: "compute"}            uint32 rows
    kernel -> browser   {tell: "statistics"}        uint32 rows, float64 (rows, statistics)
                        {tell: "findings", found}   lists of row, rule, severity, value and sentence
                        {tell: "histogram", row}    float64 edges, float64 counts
                        {tell: "working", row, share}
                        {tell: "failed", row, reason}
                        {tell: "stopped", reason}   a job ended early

Both sides have the selected row as the trait `_row`, -1 for none.
"""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import anywidget
import numpy as np
import traitlets

from xckpt.errors import shown
from xckpt.formatting import UNKNOWN, binary_size, printable, shape_text, shortened, word
from xckpt.notebook.folding import CODES
from xckpt.notebook.html import colors_of
from xckpt.notebook.shown import View
from xckpt.notebook.views import summary_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from xckpt.notebook.summary import KnownResults, Summary
    from xckpt.tensor_rows import Row

    Report = Callable[[int, int], object]
    #: Returns results for the named tensors that are numeric; called in a thread.
    Compute = Callable[[Sequence[str], Report], KnownResults]
    #: Returns the edges of the bins of a tensor, and one count fewer; called in a thread.
    Histogram = Callable[[str, Report], tuple[ArrayLike, ArrayLike]]

_HERE = Path(__file__).parent
# Statistics appear, and can be cancelled, after this number of tensors or bytes.
_BATCH_ROWS = 512
_BATCH_NBYTES = 64 << 20
_SECONDS_BETWEEN_REPORTS = 0.1
_LONGEST_REASON = 300
# Rules that do not apply to codes of quantised weights.
_OF_WEIGHTS = {"constant", "exploding"}


class _Table(anywidget.AnyWidget):
    """The data of ``explorer.js``."""

    _esm = _HERE / "explorer.js"
    _css = _HERE / "explorer.css"

    _names = traitlets.Bytes().tag(sync=True)
    _lengths = traitlets.Bytes().tag(sync=True)
    _kind = traitlets.Bytes().tag(sync=True)
    _kinds = traitlets.List(traitlets.Unicode()).tag(sync=True)
    _colors = traitlets.List(traitlets.Unicode()).tag(sync=True)
    _shape = traitlets.Bytes().tag(sync=True)
    _shapes = traitlets.List(traitlets.Unicode()).tag(sync=True)
    _nbytes = traitlets.Bytes().tag(sync=True)
    _codes = traitlets.Bytes().tag(sync=True)
    _statistics = traitlets.List(traitlets.Unicode()).tag(sync=True)
    _row = traitlets.Int(-1).tag(sync=True)
    _code = traitlets.Unicode().tag(sync=True)
    _busy = traitlets.Bool(default_value=False).tag(sync=True)
    _figures = traitlets.Unicode().tag(sync=True)  # of the progress
    _errors = traitlets.List(traitlets.Unicode()).tag(sync=True)  # about the file

    def __init__(
        self, rows: Sequence[Row], statistics: Sequence[str], errors: Sequence[str]
    ) -> None:
        names = [row.name for row in rows]
        # JavaScript counts the units of UTF-16.
        units = [
            len(n) if n.isascii() else len(n.encode("utf-16-le", "surrogatepass")) // 2
            for n in names
        ]
        lengths = np.array(units, "<u4")
        kinds, kind = _numbered([(row.dtype, row.storage) for row in rows])
        shapes, shape = _numbered([(r.shape, UNKNOWN if r.dtype == UNKNOWN else "") for r in rows])
        nbytes = np.array([float(row.nbytes) for row in rows], "<f8")
        # The same colours as in the summary: by element type, most bytes first.
        dtypes, dtype = _numbered([row.dtype for row in rows])
        sums = np.bincount(dtype, nbytes, len(dtypes))
        colors = colors_of(dtypes[n] for n in np.argsort(-sums, kind="stable"))
        super().__init__(
            _names="".join(names).encode("utf-8", "replace"),
            _lengths=lengths.tobytes(),
            _kind=kind.tobytes(),
            _kinds=[word(" ".join(kind).strip()) for kind in kinds],
            _colors=[colors[dtype] for dtype, _ in kinds],
            _shape=shape.tobytes(),
            _shapes=[shape_text(*shape) for shape in shapes],
            _nbytes=nbytes.tobytes(),
            _codes=bytes([CODES in row.storage.split() for row in rows]),
            _statistics=list(statistics),
            _errors=list(errors),
        )


def _numbered(values: Sequence[Any]) -> tuple[list[Any], NDArray[np.uint32]]:
    """Return the distinct values, and the position of each value among them."""
    numbers: dict[Any, int] = {}
    positions = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(positions, "<u4")


class _RowFinding(NamedTuple):
    """A finding in the form that is sent to the browser."""

    row: int
    rule: str
    severity: str
    value: str
    explanation: str


class CancelledError(Exception):
    """The job was cancelled, or replaced by a newer one."""


class Background:
    """A daemon thread that runs one job, until a newer job replaces it.

    A job is called with a function that raises `CancelledError` once the job was replaced or
    cancelled. `failed` is called in the thread with any other error.
    """

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self._failed = failed
        self._lock = Lock()
        self._stop = Event()
        self._thread: Thread | None = None

    def start(self, job: Callable[[Callable[..., None]], object]) -> None:
        """Run a job, and cancel the running one."""
        with self._lock:
            self._stop.set()
            self._stop = Event()
            self._thread = Thread(target=self._run, args=(job, self._stop), daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """Stop the running job, if any, at its next check."""
        self._stop.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the newest job to end."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self, job: Callable[[Callable[..., None]], object], stop: Event) -> None:
        def check(*_: object) -> None:
            if stop.is_set():
                raise CancelledError

        try:
            job(check)
        except CancelledError:
            return
        except Exception as error:  # noqa: BLE001  shown to the user, as there is no caller
            if not stop.is_set():
                self._failed(error)


class Explorer(_Table):
    """A widget to search, sort and examine tensors.

    If widgets cannot run (GitHub, nbviewer, a saved notebook), the summary is shown instead.

    Attributes
    ----------
    selected : str or None
        Name of the selected tensor. Assign to it to select another tensor, and use `observe` to
        follow changes.

    Examples
    --------
    >>> explorer = ds.ckpt.explore()
    >>> explorer.selected = "lm_head.weight"
    """

    selected = traitlets.Unicode(None, allow_none=True)

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        summary: Summary,
        statistics: Sequence[str],
        compute: Compute,
        histogram: Histogram,
        code: Callable[[str], str],  # returns the Python expression for a tensor
        computed: KnownResults | None = None,
    ) -> None:
        self._tensor_names = [row.name for row in rows]
        self._row_of = {name: at for at, name in enumerate(self._tensor_names)}
        self._tensor_nbytes = [row.nbytes for row in rows]
        self._has_codes = [CODES in row.storage.split() for row in rows]
        self._shown = View(summary_blocks(summary))
        self._compute = compute
        self._histogram = histogram
        self._expression = code
        self._columns = {name: at for at, name in enumerate(statistics)}
        self._known: dict[int, NDArray[np.float64]] = {}
        self._found: list[_RowFinding] = []
        self._failed: dict[int, str] = {}
        self._one = Background(self._stopped)
        self._many = Background(self._stopped)
        super().__init__(rows, statistics, [printable(text) for text in summary.errors])
        if computed is not None:
            self._keep(computed)
        self.on_msg(self._hear)
        self.observe(self._picked, "_row")

    def __repr__(self) -> str:
        return repr(self._shown)

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle, metadata = super()._repr_mimebundle_(**options) or ({}, {})
        summary = {"text/plain": repr(self), "text/html": self._shown._repr_html_()}
        return bundle | summary, metadata

    def close(self) -> None:
        """Stop computing, and remove the widget."""
        self._one.cancel()
        self._many.cancel()
        super().close()

    # --- selecting -------------------------------------------------------------------------------

    @traitlets.validate("selected")
    def _checked(self, proposal: Any) -> str | None:
        name: str | None = proposal["value"]
        if name is not None and name not in self._row_of:
            raise traitlets.TraitError(f"the explorer has no tensor {shown(name)}")
        return name

    @traitlets.observe("selected")
    def _chosen(self, change: Any) -> None:
        name = change["new"]
        row = -1 if name is None else self._row_of[name]
        self._code = "" if name is None else self._expression(name)
        self._row = row
        if name is None:
            self._one.cancel()
        else:
            self._one.start(lambda check: self._describe(row, check))

    def _picked(self, change: Any) -> None:
        row = change["new"]
        self.selected = self._tensor_names[row] if 0 <= row < len(self._tensor_names) else None

    def _describe(self, row: int, check: Callable[..., None]) -> None:
        """Compute the statistics and the histogram of a tensor, and send them to the browser."""
        check()
        pace = _Pace(time.monotonic())

        def report(done: int, total: int) -> None:
            check()
            if pace.is_due():
                self._post({"tell": "working", "row": row, "share": done / max(1, total)})

        if row not in self._known:
            self._describe_rows([row], report)
        if row not in self._known:
            return
        edges, counts = self._histogram(self._tensor_names[row], check)
        arrays = [np.ascontiguousarray(array, "<f8") for array in (edges, counts)]
        self._post({"tell": "histogram", "row": row}, *arrays)

    # --- computing -------------------------------------------------------------------------------

    def _hear(self, _widget: Any, message: Any, buffers: Sequence[Any]) -> None:
        """Answer a message from a view."""
        request = message.get("ask")
        if request == "known":
            self._post_results(list(self._known), self._found)
            for row, reason in self._failed.items():
                self._post({"tell": "failed", "row": row, "reason": reason})
        elif request == "cancel":
            self._many.cancel()
        elif request == "compute" and not self._busy:
            rows = np.frombuffer(buffers[0], "<u4").tolist()
            missing = [
                row for row in rows if row < len(self._tensor_names) and row not in self._known
            ]
            self._busy = True
            self._many.start(lambda check: self._describe_all(missing, check))

    def _describe_all(self, rows: Sequence[int], check: Callable[..., None]) -> None:
        total = binary_size(sum([self._tensor_nbytes[row] for row in rows]))
        done = nbytes = 0
        pace = _Pace()
        try:
            for batch in self._batches(rows):

                def report(more: int, _: int, nbytes: int = nbytes, done: int = done) -> None:
                    check()
                    if pace.is_due():
                        sizes = f"{binary_size(nbytes + more)} of {total}"
                        self._figures = f"{done:,} of {len(rows):,} tensors, {sizes}"

                self._describe_rows(batch, report)
                done += len(batch)
                nbytes += sum([self._tensor_nbytes[row] for row in batch])
        finally:
            self._figures = ""
            self._busy = False

    def _batches(self, rows: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        nbytes = 0
        for row in rows:
            batch.append(row)
            nbytes += self._tensor_nbytes[row]
            if len(batch) == _BATCH_ROWS or nbytes >= _BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch

    def _describe_rows(self, rows: Sequence[int], report: Callable[[int, int], object]) -> None:
        """Compute statistics; after an error, bisect the rows to find the tensor that caused it."""
        report(0, sum([self._tensor_nbytes[row] for row in rows]))
        try:
            results = self._compute([self._tensor_names[row] for row in rows], report)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  shown next to the tensor
            if len(rows) == 1:
                self._fail(rows[0], _reason(error))
                return
            middle = len(rows) // 2
            self._describe_rows(rows[:middle], report)
            self._describe_rows(rows[middle:], report)
            return
        self._post_results(*self._keep(results))
        for row in rows:
            if row not in self._known:
                self._fail(row, "It has no statistics: its elements are not numbers.")

    def _keep(self, results: KnownResults) -> tuple[list[int], list[_RowFinding]]:
        """Store results; return the rows with statistics, and their findings."""
        rows = [self._row_of[name] for name in results.statistics if name in self._row_of]
        for row in rows:
            values = self._known[row] = np.full(len(self._columns), np.nan)
            for name, value in results.statistics[self._tensor_names[row]].items():
                if name in self._columns:
                    values[self._columns[name]] = value
            self._failed.pop(row, None)
        findings = [
            _RowFinding(
                self._row_of[finding.tensor],
                word(finding.rule),
                finding.severity,
                f"{finding.value:.6g}",  # JSON has no infinities
                shortened(printable(finding.explanation), _LONGEST_REASON),
            )
            for finding in results.findings
            if finding.tensor in self._row_of
            and not (finding.rule in _OF_WEIGHTS and self._has_codes[self._row_of[finding.tensor]])
        ]
        self._found += findings
        return rows, findings

    def _post_results(self, rows: Collection[int], findings: Collection[_RowFinding]) -> None:
        if findings:
            self._post({"tell": "findings", "found": [tuple(finding) for finding in findings]})
        if rows:
            values = np.array([self._known[row] for row in rows], "<f8")
            self._post({"tell": "statistics"}, np.array(rows, "<u4"), values)

    def _fail(self, row: int, reason: str) -> None:
        self._failed[row] = reason
        self._post({"tell": "failed", "row": row, "reason": reason})

    def _stopped(self, error: Exception) -> None:
        """Show why a job ended early."""
        self._post({"tell": "stopped", "reason": _reason(error)})

    def _post(self, message: dict[str, Any], *arrays: NDArray[Any]) -> None:
        self.send(message, [array.tobytes() for array in arrays])


def _reason(error: Exception) -> str:
    # Prefer the reason, because the whole message has the path.
    reason = str(getattr(error, "reason", "") or error) or type(error).__name__
    return shortened(printable(reason), _LONGEST_REASON)


class _Pace:
    """The pace of reports, which are not more frequent than a browser can show."""

    def __init__(self, last: float = 0.0) -> None:
        self._last = last

    def is_due(self) -> bool:
        """Return whether it is time for the next report."""
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_REPORTS:
            return False
        self._last = now
        return True
