"""The kernel's side of the explorer: messages, computations, cancelling and caching."""

from __future__ import annotations

import math
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip(
    "anywidget", reason="the explorer is an anywidget: pip install 'xckpt[widgets]'"
)

import traitlets

from tests.notebook.checkpoints import mixture_of_experts, row
from tests.notebook.views import LONG, View
from xckpt.errors import IntegrityError
from xckpt.notebook.explorer import Explorer
from xckpt.notebook.html import colors_of
from xckpt.notebook.summary import KnownResults, TensorFinding, new_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xckpt.tensor_rows import Row


NAMES = ("a.0.w", "a.1.w", "b", "\u91cd\u307f", "\U0001f600.w", "text")
ROWS = [row(name, "float32", 4) for name in NAMES]


class Source:
    """Statistics whose values identify their tensor."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.broken: set[str] = set()
        self.gate = Event()
        self.gate.set()
        self.before: Callable[[Sequence[str]], object] = lambda _: None
        self.results: Callable[[Sequence[str]], Any] = self.known
        self.names: Sequence[str] = ()

    def compute(self, names: Sequence[str], report: Callable[[int, int], object]) -> KnownResults:
        self.calls.append(list(names))
        assert self.gate.wait(LONG)
        self.before(names)
        report(16 * len(names), 16 * len(names))
        if self.broken & set(names):
            raise IntegrityError("digest differs", path="/home/someone/m.zt")
        results: KnownResults = self.results(names)
        return results

    def known(self, names: Sequence[str]) -> KnownResults:
        numbers = [name for name in names if name != "text"]
        return KnownResults(
            {name: {"mean": float(self.names.index(name)), "new": 0.0} for name in numbers},
            [TensorFinding(name, "inf", math.inf, "error") for name in numbers if name == "b"],
        )

    def histogram(
        self, name: str, report: Callable[[int, int], object]
    ) -> tuple[list[float], list[int]]:
        report(0, 16)
        return [0.0, 1.0, 2.0], [self.names.index(name), 7]


class Opened(View):
    """An explorer, its computation, and its messages to the browser."""

    def __init__(self, rows: Sequence[Row] = ROWS, computed: KnownResults | None = None) -> None:
        self.source = Source()
        self.source.names = [row.name for row in rows]
        summary = new_summary(rows, title="/a/m.zt", format="ztensor", version="1.0", attrs={})
        explorer = Explorer(
            rows,
            summary=summary,
            statistics=["count", "mean"],
            compute=self.source.compute,
            histogram=self.source.histogram,
            code="ds[{!r}]".format,
            computed=computed,
        )
        super().__init__(explorer)


@pytest.fixture
def opened() -> Opened:
    return Opened()


# --- rows ----------------------------------------------------------------------------------------


def test_rows_are_sent_as_columns(opened: Opened) -> None:
    state = opened.state
    assert tuple(opened.names()) == NAMES
    assert np.frombuffer(state["_nbytes"], "<f8").tolist() == [16.0] * 6
    assert state["_shapes"] == ["4"]
    assert state["_kinds"] == ["float32"]


def test_types_have_the_colours_of_the_summary() -> None:
    rows = [
        row("a", "int8", 1),
        row("b", "float32", 9),
        row("c", "int8", 5, storage="zstd"),
    ]
    state = Opened(rows).state
    assert state["_kinds"] == ["int8", "float32", "int8 zstd"]
    first, second, _ = colors_of(["float32", "int8", "other"]).values()
    assert state["_colors"] == [second, first, second]


@pytest.mark.parametrize("name", ["\udc80", "a\ud83d", "\x00", ""])
def test_no_name_breaks_the_message(name: str) -> None:
    rows = [row(name, "float32", 1), row("next", "float32", 1)]
    state = Opened(rows).state
    lengths = np.frombuffer(state["_lengths"], "<u4").tolist()
    assert lengths == [len(name), 4]
    assert len(state["_names"].decode("utf-8")) == sum(lengths)


def test_a_hundred_thousand_rows_take_a_moment() -> None:
    rows = list(mixture_of_experts(64, 256))
    opened = Opened(rows)
    assert len(opened.state["_lengths"]) == 4 * len(rows)


# --- selecting -----------------------------------------------------------------------------------


def test_selecting_computes_and_reports(opened: Opened) -> None:
    opened.explorer.selected = "a.1.w"
    opened.done()
    assert opened.state["_row"] == 1
    assert opened.state["_code"] == "ds['a.1.w']"
    assert opened.statistics() == {1: [pytest.approx(np.nan, nan_ok=True), 1.0]}
    message, buffers = opened.told[-1]
    assert message == {"tell": "histogram", "row": 1}
    assert [np.frombuffer(b, "<f8").tolist() for b in buffers] == [[0.0, 1.0, 2.0], [1.0, 7.0]]


def test_a_click_selects(opened: Opened) -> None:
    selections = []
    opened.explorer.observe(lambda change: selections.append(change["new"]), "selected")
    opened.click(2)
    opened.click(-1)
    opened.done()
    assert selections == ["b", None]


@pytest.mark.parametrize("row", [6, 2**31, -5])
def test_a_missing_row_selects_nothing(opened: Opened, row: int) -> None:
    opened.explorer.selected = "b"
    opened.click(row)
    assert opened.explorer.selected is None


def test_only_tensors_can_be_selected(opened: Opened) -> None:
    with pytest.raises(traitlets.TraitError, match=r"the explorer has no tensor 'a\\u202e'"):
        opened.explorer.selected = "a\u202e"
    assert opened.explorer.selected is None


def test_cached_results_are_not_computed_again(opened: Opened) -> None:
    for name in ("b", "a.0.w", "b"):
        opened.explorer.selected = name
        opened.done()
    assert opened.source.calls == [["b"], ["a.0.w"]]


def test_the_next_selection_stops_the_one_before(opened: Opened) -> None:
    opened.source.gate.clear()
    opened.explorer.selected = "a.0.w"
    opened.explorer.selected = "b"
    opened.source.gate.set()
    opened.done()
    assert list(opened.statistics()) == [2]


def test_a_failure_is_shown_without_the_path(opened: Opened) -> None:
    opened.source.broken = {"b"}
    opened.explorer.selected = "b"
    opened.done()
    assert opened.told == [({"tell": "failed", "row": 2, "reason": "digest differs"}, [])]


def test_errors_are_shown(opened: Opened) -> None:
    opened.ask({"ask": "compute"}, 0, 2)
    opened.done()
    results = [(2, "inf", "error", "inf", "")]
    assert opened.told[0] == ({"tell": "findings", "found": results}, [])
    opened.explorer.selected = "text"
    opened.done()
    opened.told.clear()
    opened.ask({"ask": "known"})
    assert [message["tell"] for message, _ in opened.told] == ["findings", "statistics", "failed"]


def test_progress_of_a_large_tensor_is_reported(
    opened: Opened, later: Callable[[float], None]
) -> None:
    opened.source.before = lambda _: later(1)
    opened.explorer.selected = "b"
    opened.done()
    shares = [message["share"] for message, _ in opened.told if message["tell"] == "working"]
    assert shares == [1]


def test_earlier_results_are_not_computed() -> None:
    cached = KnownResults(
        {"b": {"mean": 3.0}, "elsewhere": {}}, [TensorFinding("b", "nan", 1, "error", "1 is NaN")]
    )
    opened = Opened(computed=cached)
    opened.ask({"ask": "known"})
    assert opened.findings() == [(2, "nan", "error", "1", "1 is NaN")]
    assert list(opened.statistics()) == [2]
    opened.ask({"ask": "compute"}, *range(3))
    opened.done()
    assert opened.source.calls == [["a.0.w", "a.1.w"]]


def test_codes_are_marked() -> None:
    rows = [row("a", "int8", 1, storage="codes zstd"), row("b", "int8", 1, storage="zstd")]
    assert Opened(rows).state["_codes"] == b"\1\0"


def test_findings_of_weights_do_not_apply_to_codes() -> None:
    rows = [row("a", "int8", 1, storage="codes"), row("b", "int8", 1)]
    rules = ("constant", "exploding", "all_zero")
    results = [TensorFinding(name, rule, 1.0, "warning") for name in "ab" for rule in rules]
    opened = Opened(rows, KnownResults({}, results))
    opened.ask({"ask": "known"})
    assert [finding[:2] for finding in opened.findings()] == [
        (0, "all_zero"),
        *((1, rule) for rule in rules),
    ]


# --- computing all -------------------------------------------------------------------------------


def test_all_statistics_are_computed_in_batches() -> None:
    names = [f"w{n}" for n in range(1200)]
    opened = Opened([row(name, "float32", 4) for name in names])
    opened.explorer.selected = "w2"
    opened.done()
    opened.ask({"ask": "compute"}, *range(1200), 9999)
    opened.done()
    rest = [name for name in names if name != "w2"]
    assert opened.source.calls == [["w2"], rest[:512], rest[512:1024], rest[1024:]]
    assert {row: values[1] for row, values in opened.statistics().items()} == {
        n: float(n) for n in range(1200)
    }
    assert opened.state["_busy"] is False
    assert opened.state["_figures"] == ""


def test_large_tensors_are_batches_of_their_own() -> None:
    opened = Opened([row(name, "float32", 6 << 20) for name in NAMES])
    opened.ask({"ask": "compute"}, 0, 1, 2, 3)
    opened.done()
    assert [len(call) for call in opened.source.calls] == [3, 1]


def test_a_failure_does_not_stop_other_tensors(opened: Opened) -> None:
    opened.source.broken = {"a.1.w", NAMES[4]}
    opened.ask({"ask": "compute"}, *range(6))
    opened.done()
    assert sorted(opened.statistics()) == [0, 2, 3]
    failures = {m["row"]: m["reason"] for m, _ in opened.told if m["tell"] == "failed"}
    assert failures == {
        1: "digest differs",
        4: "digest differs",
        5: "It has no statistics: its elements are not numbers.",
    }


def test_cancelling_keeps_finished_results() -> None:
    opened = Opened([row(name, "float32", 16 << 20) for name in NAMES])

    def cancelling(names: Sequence[str]) -> None:
        if names == ["b"]:
            opened.ask({"ask": "cancel"})

    opened.source.before = cancelling
    for _ in range(2):
        opened.ask({"ask": "compute"}, *range(5))
        opened.done()
        assert sorted(opened.statistics()) == [0, 1]
        assert opened.state["_busy"] is False


def test_progress_shows_while_it_lasts(opened: Opened) -> None:
    opened.source.gate.clear()
    opened.ask({"ask": "compute"}, 0, 1)
    for _ in range(2000):
        if opened.source.calls:
            break
        Event().wait(0.005)
    assert opened.state["_figures"] == "0 of 2 tensors, 0 B of 32 B"
    assert opened.state["_busy"] is True
    opened.ask({"ask": "compute"}, 3)
    opened.source.gate.set()
    opened.done()
    assert opened.source.calls == [["a.0.w", "a.1.w"]]
    assert opened.state["_figures"] == ""


def test_a_new_view_receives_cached_results(opened: Opened) -> None:
    opened.ask({"ask": "compute"}, 0, 1)
    opened.done()
    opened.told.clear()
    opened.ask({"ask": "known"})
    assert sorted(opened.statistics()) == [0, 1]


def test_an_internal_error_is_shown(opened: Opened) -> None:
    opened.source.results = lambda _: 1  # which is no result
    opened.ask({"ask": "compute"}, 0)
    opened.done()
    reason = "'int' object has no attribute 'statistics'"
    assert opened.told[-1][0] == {"tell": "stopped", "reason": reason}
    assert opened.state["_busy"] is False


def test_closing_stops_everything(opened: Opened) -> None:
    opened.source.gate.clear()
    opened.explorer.selected = "b"
    opened.ask({"ask": "compute"}, 0, 1)
    opened.explorer.close()
    opened.source.gate.set()
    opened.done()
    assert opened.statistics() == {}


# --- showing -------------------------------------------------------------------------------------


def test_without_widgets_the_summary_is_shown(opened: Opened) -> None:
    bundle, _ = opened.explorer._repr_mimebundle_()
    assert set(bundle) == {
        "text/plain",
        "text/html",
        "application/vnd.jupyter.widget-view+json",
    }
    assert bundle["text/plain"] == repr(opened.explorer)
    assert bundle["text/plain"].startswith("<Checkpoint m.zt>")
    assert bundle["text/html"].startswith("<div")


def test_the_widget_fetches_nothing_and_escapes_names() -> None:
    state = Opened().state
    code, style = str(state["_esm"]), str(state["_css"])
    assert "export default" in code
    assert ".xckpt-explorer" in style
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "import ", "fetch(", "eval("):
        assert banned not in code
    assert "@import" not in style
    assert "url(" not in style
