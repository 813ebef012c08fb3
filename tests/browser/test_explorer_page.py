"""The explorer in a browser without a kernel: search, order and display."""

from __future__ import annotations

import base64
import fnmatch
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip(
    "anywidget", reason="the explorer is an anywidget: pip install 'xckpt[widgets]'"
)

from tests.browser.pages import STATISTICS, explorer_page, send_statistics, shown_rows
from tests.notebook.checkpoints import gpt2, mixture_of_experts, row
from xckpt.formatting import printable
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Browser, Page

ROWS = list(gpt2())
NAMES = [row.name for row in ROWS]
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "model.<b>bold</b>.\"'&amp;",
    "evil\u202egnp.weight",
    "\x1b[31m\x00\n\t\ufeff",
    "",
)


# After these the list is drawn anew.
_TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Show the tensors of a small decoder; nothing may go wrong."""
    with explorer_page(browser, ROWS) as (page, complaints):
        yield page
        assert complaints == []


def wait_for_row(page: Page, row: int) -> None:
    """Wait until Python receives the selection of a row."""
    page.wait_for_function("(row) => model.get('_row') === row", arg=row)


def select(page: Page, label: str, option: str) -> None:
    page.get_by_label(label, exact=True).select_option(option)


def all_names(page: Page) -> list[str]:
    """Scroll through the list, and return the names in it."""
    box = page.locator(".xckpt-list")
    names = dict.fromkeys(shown_rows(page))
    while box.evaluate("(b) => b.scrollTop + b.clientHeight < b.scrollHeight"):
        box.evaluate("(b) => (b.scrollTop += 200)")
        page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        names |= dict.fromkeys(shown_rows(page))
    return list(names)


# --- search --------------------------------------------------------------------------------------

GLOBS = [
    *("*", "h.*", "*.weight", "h.?.attn.*", "h.1?.*bias", "h.[0-3].ln_[12].weight", "*ln_[!1]*"),
    *("h.[!0-9]*", "wte.weight", "wte", "[", "h.[", "[]]*", "[!]]*", "*[a-c-e]*", "*[z-a]*"),
    *("*[!z-a]*", "[^h]*", "*[--a]*", "*[a--]*", "***w*", "*a*t*t*n*", "?", "?*?.*.weight", "*[]"),
    *("*\\*", "*(*", "h.{0,1}*", "*.$", "*|*", "*[\\]*", "*[[]*", "*[!*", "*[a\\-z]*", "*[&&~|]*"),
]
STRANGE = [
    *NAMES[:20],
    "a]b",
    "]",
    "a*b",
    "(",
    "x|y",
    "a\\",
    "[",
    "\U0001f600.w",
    "-",
    "a\nb",
    "&~",
    "^",
]


def test_globs_match_as_they_do_in_python(page: Page) -> None:
    matches = page.evaluate(
        "([globs, names]) => globs.map((glob) => names.filter(explorer.matcher(glob)))",
        [GLOBS, STRANGE],
    )
    wild = [glob for glob in GLOBS if set(glob) & set("*?[")]
    assert len(wild) > 30
    for glob, names in zip(GLOBS, matches, strict=True):
        if glob in wild:
            assert names == [name for name in STRANGE if fnmatch.fnmatchcase(name, glob)], glob
        else:
            assert names == [name for name in STRANGE if glob in name], glob


def test_a_glob_of_many_asterisks_takes_no_time(page: Page) -> None:
    took = page.evaluate(
        """() => {
          const start = performance.now();
          explorer.matcher("*a".repeat(30) + "*b")("a".repeat(5000));
          return performance.now() - start;
        }"""
    )
    assert took < 200


def test_text_is_escaped_as_in_python(page: Page) -> None:
    texts = [
        *HOSTILE,
        "a\u00a0b\u3000c",
        "\U000e0001",
        "caf\u00e9 \u91cd\u307f \U0001f600",
        "\u2028\x7f\x85",
    ]
    assert page.evaluate("(all) => all.map(explorer.printable)", texts) == list(
        map(printable, texts)
    )


def test_a_word_is_searched_for_anywhere(page: Page) -> None:
    page.get_by_role("searchbox").fill("attn.c_proj.b")
    assert shown_rows(page) == [f"h.{n}.attn.c_proj.bias" for n in range(12)]
    assert page.locator(".xckpt-status").inner_text() == "12 of 148 tensors · 36.0 KiB"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("nothing", "No name has “nothing” in it."),
        ("attn*", "No whole name matches attn*. A glob may need * at its ends."),
        ("\u202e", r"No name has “\u202e” in it."),
    ],
)
def test_an_empty_search_gives_the_reason(page: Page, query: str, message: str) -> None:
    page.get_by_role("searchbox").fill(query)
    assert shown_rows(page) == []
    assert page.locator(".xckpt-empty").inner_text() == message


def test_an_empty_checkpoint_says_so(browser: Browser) -> None:
    with explorer_page(browser, []) as (page, complaints):
        assert page.locator(".xckpt-empty").inner_text() == "There are no tensors here."
        assert complaints == []


# --- types, order, tree --------------------------------------------------------------------------


def test_types_filter(browser: Browser) -> None:
    rows = [row("a", "float32", 4), row("b", "int8", 4), row("c", "float32", 4, storage="zstd")]
    with explorer_page(browser, rows) as (page, _):
        select(page, "Type", "float32")
        assert shown_rows(page) == ["a"]
        select(page, "Type", "float32 zstd")
        assert shown_rows(page) == ["c"]
        select(page, "Type", "all types")
        assert shown_rows(page) == ["a", "b", "c"]


def test_all_rows_come_in_the_order_of_the_file(page: Page) -> None:
    assert all_names(page) == NAMES


def test_names_sort_by_their_numbers(page: Page) -> None:
    select(page, "Sort by", "by name")
    page.get_by_role("searchbox").fill("*.ln_1.weight")
    assert shown_rows(page) == [f"h.{n}.ln_1.weight" for n in range(12)]
    page.get_by_role("button", name="Smallest first").click()
    assert shown_rows(page) == [f"h.{n}.ln_1.weight" for n in reversed(range(12))]


def test_sizes_sort_largest_first(page: Page) -> None:
    select(page, "Sort by", "by size")
    assert all_names(page) == [r.name for r in sorted(ROWS, key=lambda r: -r.nbytes)]


def test_unknown_statistics_sort_last(page: Page) -> None:
    values = np.full((4, len(STATISTICS)), np.nan)
    values[:, STATISTICS.index("std")] = [0.5, 2, math.nan, 1]
    send_statistics(page, [10, 20, 30, 40], values)
    select(page, "Sort by", "by std")
    order = [NAMES[20], NAMES[40], NAMES[10]]
    assert shown_rows(page)[:4] == [*order, NAMES[0]]
    cells = page.locator(".xckpt-list .xckpt-row:visible .xckpt-statistic").all_inner_texts()
    assert cells[:4] == ["2", "1", "0.5", ""]
    page.get_by_role("button", name="Largest first").click()
    assert shown_rows(page)[:3] == order[::-1]


def test_new_statistics_are_sorted_into_the_rows(page: Page) -> None:
    select(page, "Sort by", "by mean")
    assert shown_rows(page)[0] == NAMES[0]
    send_statistics(page, [77], np.ones((1, len(STATISTICS))))
    page.wait_for_function(f"document.querySelector('.xckpt-row[title=\"{NAMES[77]}\"]')")
    assert shown_rows(page)[0] == NAMES[77]


def test_numbers_ascend_in_the_tree_and_a_module_of_one_tensor_is_one_row(browser: Browser) -> None:
    names = ["wte.weight", *(f"h.{n}.ln.{leaf}" for n in (1, 2, 10) for leaf in "wb"), "f.0.x.y"]
    with explorer_page(browser, [row(name, "int8", 1) for name in names]) as (page, _):
        page.get_by_role("button", name="Tree").click()
        assert shown_rows(page)[:6] == ["wte.weight", "▾h", "▾1.ln", "w", "b", "▾2.ln"]
        page.locator(".xckpt-list").focus()
        page.keyboard.press("End")
        wait_for_row(page, len(names) - 1)
        assert shown_rows(page)[-4:] == ["▾10.ln", "w", "b", "f.0.x.y"]


def test_the_tree_opens_and_closes(page: Page) -> None:
    page.get_by_role("button", name="Tree").click()
    page.get_by_role("searchbox").fill("h.11.attn")
    leaves = ["c_attn", "weight", "bias", "c_proj", "weight", "bias"]
    assert [re.sub(r"^[▾▸]", "", name) for name in shown_rows(page)] == ["h.11.attn", *leaves]
    page.locator(".xckpt-list").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert [re.sub(r"^[▾▸]", "", n) for n in shown_rows(page)] == [
        "h.11.attn",
        "c_attn",
        *leaves[3:],
    ]
    page.keyboard.press("ArrowRight")
    assert len(shown_rows(page)) == 7
    page.keyboard.press("ArrowRight")
    wait_for_row(page, NAMES.index("h.11.attn.c_attn.weight"))


# --- selecting -----------------------------------------------------------------------------------


def test_a_click_selects(page: Page) -> None:
    page.locator(".xckpt-list .xckpt-row:visible").nth(3).click()
    wait_for_row(page, 3)
    assert page.locator(".xckpt-title").inner_text() == NAMES[3]
    assert page.locator(".xckpt-facts").inner_text() == "float32 · 768 · 3.0 KiB"
    assert page.get_by_text("Computing statistics…").is_visible()
    page.evaluate("model.tell({ tell: 'working', row: 3, share: 0.25 }, [])")
    assert page.locator(".xckpt-figures progress").evaluate("(bar) => bar.value") == 0.25


def test_keys_move_and_select_the_row_where_they_stop(page: Page) -> None:
    page.locator(".xckpt-list").focus()
    page.evaluate("window.rows = []; model.on('change:_row', () => rows.push(model.get('_row')))")
    # However long the keys take to arrive, no time passes between them.
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    for key in ("ArrowDown", "End", "ArrowUp", "PageUp"):
        page.keyboard.press(key)
    assert page.evaluate("rows") == []
    page.clock.run_for(1000)
    wait_for_row(page, len(ROWS) - 2 - 12)
    assert page.evaluate("rows") == [len(ROWS) - 2 - 12]
    active = page.locator(".xckpt-list").get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    assert page.locator(f"#{active} .xckpt-name").inner_text() == NAMES[len(ROWS) - 2 - 12]


def test_python_can_select_a_hidden_row(page: Page) -> None:
    page.get_by_role("searchbox").fill("wte")
    page.evaluate(f"model.set('_row', {NAMES.index('h.9.mlp.c_fc.bias')})")
    assert "h.9.mlp.c_fc.bias" in shown_rows(page)
    assert page.locator(".xckpt-selected .xckpt-name").inner_text() == "h.9.mlp.c_fc.bias"


def test_statistics_and_the_histogram_are_shown(page: Page) -> None:
    page.evaluate("model.set('_row', 5)")
    send_statistics(page, [5], [[768, 2, -1.25e-7, 0.01234567, math.nan]])
    edges, counts = np.linspace(-1.0, 1.0, 5), np.array([1.0, 0.0, 4.0, 2.0])
    send_histogram(page, 5, edges, counts)
    names = page.locator(".xckpt-figures dt").all_inner_texts()
    values = page.locator(".xckpt-figures dd").all_inner_texts()
    minus = "\N{MINUS SIGN}"
    assert dict(zip(names, values, strict=True)) == {
        "count": "768",
        "nan": "2",
        "mean": f"{minus}1.250e{minus}7",
        "std": "0.01235",
    }
    assert page.locator(".xckpt-wrong dt").all_inner_texts() == ["nan"]
    assert page.locator("dd").nth(3).get_attribute("title") == "0.01234567"
    bars = page.locator(".xckpt-histogram rect")
    assert bars.evaluate_all(
        "(all) => all.map((r) => [r.x.baseVal.value, r.height.baseVal.value])"
    ) == [
        [0, 25],
        [50, 100],
        [75, 50],
    ]
    page.get_by_label("log scale").check()
    heights = bars.evaluate_all("(all) => all.map((r) => r.height.baseVal.value)")
    assert heights == pytest.approx(100 * np.log1p([1, 4, 2]) / np.log1p(4), rel=1e-5)
    page.locator(".xckpt-histogram svg").hover(position={"x": 2, "y": 50})
    assert page.locator(".xckpt-reading").inner_text() == f"{minus}1 to {minus}0.5: 1"


def send_histogram(page: Page, number: int, *arrays: Any) -> None:
    buffers = [base64.b64encode(np.asarray(a, "<f8").tobytes()).decode() for a in arrays]
    page.evaluate(
        "([row, buffers]) => model.tell({ tell: 'histogram', row }, buffers)", [number, buffers]
    )


def test_a_failure_is_shown_with_its_tensor(page: Page) -> None:
    page.evaluate("model.set('_row', 5)")
    page.evaluate("model.tell({ tell: 'failed', row: 5, reason: 'digest <b>differs</b>' }, [])")
    assert page.get_by_role("alert").inner_text() == "digest <b>differs</b>"
    assert badges(page) == {NAMES[5]: "failed"}
    page.evaluate("model.set('_row', 6)")
    assert page.get_by_role("alert").count() == 0


def test_the_reason_for_an_early_end_is_shown(page: Page) -> None:
    page.evaluate("model.tell({ tell: 'stopped', reason: 'disk <b>gone</b>' }, [])")
    assert page.get_by_role("alert").inner_text() == "Stopped: disk <b>gone</b>"
    page.get_by_role("button", name="Compute all").click()
    assert page.get_by_role("alert").count() == 0


def test_code_is_copied(browser: Browser) -> None:
    with explorer_page(browser, ROWS) as (page, _):
        page.evaluate("model.set('_row', 1); model.set('_code', 'ds[\"wpe.weight\"]')")
        page.evaluate(
            "document.addEventListener('copy', () => (window.copied = getSelection().toString()"
            " || document.activeElement.value))"
        )
        page.get_by_role("button", name="Copy code").click()
        assert page.get_by_role("button", name="Copied").is_visible()
        assert page.evaluate("copied") == 'ds["wpe.weight"]'


# --- names ---------------------------------------------------------------------------------------


def test_names_lose_words_and_never_numbers(page: Page) -> None:
    name = "model.layers.17.mlp.experts.203.down_proj.weight"
    expected = {
        48: name,
        47: "…layers.17.mlp.experts.203.down_proj.weight",
        42: "…17.mlp.experts.203.down_proj.weight",
        35: "…17.…experts.203.down_proj.weight",
        32: "…17.…203.down_proj.weight",
        24: "…17.…203.…weight",
        9: "…17.…203.…weight",
    }
    for width, text in expected.items():
        assert page.evaluate("([n, w]) => explorer.elided(n, w)", [name, width]) == text
    assert page.evaluate("explorer.elided('model.a.0.b', 99, 6)") == "…a.0.b"
    flax = "params/encoder/layers_3/attn/kernel"
    assert page.evaluate("(n) => explorer.elided(n, 20)", flax) == "…layers_3/…kernel"
    long = page.evaluate("explorer.elided('h.3.' + 'n'.repeat(50), 20)")
    assert re.fullmatch("…3.n+…n+", long)
    assert len(long) == 20


def test_the_common_prefix_ends_before_a_number(page: Page) -> None:
    for names, text in (
        (["m.layers.1.a", "m.layers.1.b"], "m.layers."),
        (["m.a.x", "m.b.x"], "m."),
        (["p/layers_1/a", "p/layers_1/b"], "p/"),
        (["m.a", "n.a"], ""),
        (["m.a"], ""),
        ([], ""),
    ):
        assert page.evaluate("(names) => explorer.sharedPrefix(names)", names) == len(text)


def test_long_names_all_lose_the_same_words(browser: Browser) -> None:
    names = [f"model.language.layers.{n}.w" for n in (3, 30)] + ["model.language." + "x" * 300]
    rows = [row(name, "int8", 1) for name in names]
    with explorer_page(browser, rows) as (page, _):
        assert shown_rows(page)[:2] == ["…layers.3.w", "…layers.30.w"]
        page.get_by_role("searchbox").fill("layers")
        assert shown_rows(page) == names[:2]


def test_the_column_of_names_has_an_edge_that_moves(page: Page) -> None:
    cell = page.locator(".xckpt-list .xckpt-row:visible .xckpt-name").first
    before = cell.evaluate("(one) => one.offsetWidth")
    edge = page.get_by_role("separator", name="Width of the column of names")
    box = edge.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(box["x"] - 196, box["y"] + 4)
    page.mouse.up()
    assert cell.evaluate("(one) => one.offsetWidth") == pytest.approx(before - 200, abs=2)
    page.mouse.move(10, 10)
    edge.focus()
    page.keyboard.press("ArrowRight")
    assert cell.evaluate("(one) => one.offsetWidth") == pytest.approx(before - 176, abs=2)
    heads = page.locator(".xckpt-columns > span").evaluate_all(
        "(all) => all.map((o) => o.offsetLeft)"
    )
    cells = page.locator(".xckpt-list .xckpt-row:visible").first.locator("> span")
    places = cells.evaluate_all("(all) => all.map((o) => o.offsetLeft)")
    assert np.diff(places[:4]).tolist() == np.diff(heads[:4]).tolist()
    edge.dblclick()
    assert cell.evaluate("(one) => one.offsetWidth") == before
    for _ in range(60):
        edge.press("ArrowRight")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


# --- what is wrong -------------------------------------------------------------------------------


def send_findings(page: Page, *findings: tuple[int, str, str, str]) -> None:
    page.evaluate(
        "(found) => model.tell({ tell: 'findings', found }, [])", list(map(list, findings))
    )
    page.wait_for_function("document.querySelector('.xckpt-wrong-only').offsetHeight > 0")


def badges(page: Page) -> dict[str, str]:
    """Return the findings in the visible rows."""
    rows = page.locator(".xckpt-list .xckpt-row:visible").filter(
        has=page.locator(".xckpt-badge:visible")
    )
    names = rows.evaluate_all("(all) => all.map((one) => one.title.split('\\n')[0])")
    return dict(zip(names, rows.locator(".xckpt-badge").all_inner_texts(), strict=True))


def test_findings_are_marked_and_can_be_filtered(page: Page) -> None:
    assert page.locator(".xckpt-wrong-only").is_hidden()
    send_findings(page, (3, "nan", "error", "2"), (3, "inf", "error", "inf"))
    send_findings(page, (9, "dead_rows", "warning", "4"), (40, "<b>new</b>", "info", "1"))
    assert badges(page) == {NAMES[3]: "NaN …", NAMES[9]: "dead rows"}
    assert page.locator(".xckpt-row.xckpt-error").first.get_attribute("title") == (
        f"{NAMES[3]}\nerror: nan (2)\nerror: inf (inf)"
    )
    page.get_by_role("button", name="3 with findings").click()
    assert shown_rows(page) == [
        f"{NAMES[3]}NaN …",
        f"{NAMES[9]}dead rows",
        f"{NAMES[40]}<b>new</b>",
    ]
    assert page.locator(".xckpt-status").inner_text().startswith("3 of 148 tensors")
    page.evaluate("model.set('_row', 9)")
    send_statistics(page, [9], np.zeros((1, len(STATISTICS))))
    assert page.locator(".xckpt-figures .xckpt-mark").all_inner_texts() == [
        "warning: dead rows (4)"
    ]
    # A selection from Python is shown in spite of filters.
    page.evaluate("model.set('_row', 11)")
    assert page.locator(".xckpt-status").inner_text().startswith("148 tensors")


def test_a_finding_is_a_whole_sentence(page: Page) -> None:
    sentence = "1 column of 256 has elements beyond 20 standard deviations, up to 46 in column 85"
    finding = [9, "outlier_channels", "info", "46", sentence]
    page.evaluate("(found) => model.tell({ tell: 'findings', found: [found] }, [])", finding)
    page.evaluate("model.set('_row', 9)")
    send_statistics(page, [9], np.zeros((1, len(STATISTICS))))
    mark = page.locator(".xckpt-figures .xckpt-mark")
    assert mark.all_inner_texts() == [f"info: outlier channels: {sentence}"]
    assert mark.evaluate("(box) => box.scrollWidth <= box.clientWidth")


def test_codes_are_not_shown_as_weights(browser: Browser) -> None:
    rows = [row("a.weight", "int8", 4, storage="codes"), row("b.weight", "int8", 4)]
    with explorer_page(browser, rows) as (page, _):
        send_statistics(page, [0, 1], [[4, 0, 99.0, 50.0, 98.0], [4, 0, 1.0, 2.0, 3.0]])
        select(page, "Sort by", "by std")
        cells = page.locator(".xckpt-list .xckpt-row:visible .xckpt-statistic")
        assert shown_rows(page) == ["b.weight", "a.weight"]
        assert cells.all_inner_texts() == ["2", "codes"]
        select(page, "Sort by", "by count")
        assert cells.all_inner_texts() == ["4", "4"]
        page.evaluate("model.set('_row', 0)")
        figures = page.locator(".xckpt-figures").inner_text()
        assert "numbers of the codes, not of the weights" in figures


# --- computing all -------------------------------------------------------------------------------


def asked(page: Page) -> list[int]:
    """Give the rows of the last request."""
    rows: list[int] = page.evaluate("Array.from(new Uint32Array(model.sent.at(-1)[1][0]))")
    return rows


def test_missing_statistics_of_all_matches_are_requested(page: Page) -> None:
    assert page.evaluate("model.sent.map(([message]) => message)") == [{"ask": "known"}]
    page.get_by_role("searchbox").fill("*.attn.c_proj.bias")
    matches = [n for n, name in enumerate(NAMES) if name.endswith("attn.c_proj.bias")]
    send_statistics(page, matches[:2], np.zeros((2, len(STATISTICS))))
    page.get_by_role("button", name="Compute all 12").click()
    assert asked(page) == matches[2:]
    page.evaluate("model.set('_busy', true)")
    assert page.get_by_role("button", name="Computing…").is_disabled()
    done = page.get_by_role("progressbar", name="Tensors with statistics")
    assert done.evaluate("(bar) => [bar.value, bar.max]") == [0, 10]
    send_statistics(page, matches[2:], np.zeros((10, len(STATISTICS))))
    page.evaluate("model.set('_busy', false)")
    assert page.get_by_role("button", name="Statistics are complete").is_disabled()


def test_work_shows_its_figures_and_can_be_cancelled(page: Page) -> None:
    cancel = page.get_by_role("button", name="Cancel")
    assert cancel.is_hidden()
    page.evaluate("model.set('_busy', true)")
    page.evaluate("model.set('_figures', '1 of 2 tensors, 8 B of 16 B')")
    assert page.get_by_text("1 of 2 tensors, 8 B of 16 B").is_visible()
    cancel.click()
    assert page.evaluate("model.sent.at(-1)[0]") == {"ask": "cancel"}
    page.evaluate("model.set('_busy', false)")
    assert cancel.is_hidden()
    assert page.get_by_text("1 of 2 tensors").is_hidden()


def test_errors_about_the_file_are_shown_as_text(browser: Browser) -> None:
    errors = ["loading it runs posix.system", "<img src=x onerror=alert(1)>"]
    with explorer_page(browser, ROWS, errors=errors) as (page, complaints):
        for error in errors:
            assert page.get_by_text(error, exact=True).is_visible()
    assert complaints == []


def test_a_closed_view_removes_its_listeners(page: Page) -> None:
    page.evaluate("close_()")
    assert page.evaluate("Object.values(model.listeners).flat().length") == 0


# --- hostile and huge ----------------------------------------------------------------------------


def test_markup_in_names_is_inert(browser: Browser) -> None:
    rows = [row(name, "float32", 8) for name in HOSTILE]
    rows.append(Row("n" * 500, "<img src=x onerror=alert(2)>", (1,), 1))
    with explorer_page(browser, rows) as (page, complaints):
        for view in ("list", "tree"):
            for number in range(len(rows)):
                page.evaluate(f"model.set('_row', {number})")
                send_statistics(page, [number], np.zeros((1, len(STATISTICS))))
                title = page.locator(".xckpt-title").inner_text()
                assert title == (printable(rows[number].name) or '""')
            assert page.locator(".xckpt-explorer").locator("img, b, script").count() == 0, view
            page.get_by_role("button", name="Tree").click()
        shown = shown_rows(page)
        assert shown[:3] == [HOSTILE[0], HOSTILE[1], r"evil\u202egnp.weight"]
        assert re.fullmatch("n+…n+", shown[5])
        assert complaints == []


def test_a_name_of_ten_thousand_components_has_a_place_in_the_tree(browser: Browser) -> None:
    rows = [row("a." * 10_000 + "w", "float32", 1), row("b.w", "float32", 1)]
    with explorer_page(browser, rows) as (page, complaints):
        page.get_by_role("button", name="Tree").click()
        assert shown_rows(page)[0].startswith("…")
        assert shown_rows(page)[1:] == ["b.w"]
        assert complaints == []


def test_ten_million_rows_can_be_scrolled_to_the_end(page: Page) -> None:
    # Browsers do not make elements of 240 million pixels.
    height, selected = page.evaluate(
        """() => {
          const list = new explorer.List(new explorer.Tensors(model), () => {}, () => {});
          document.body.prepend(list.box);
          list.show(new Int32Array(1e7).map((_, n) => n % 100), null, null);
          list.move(1e7 - 1);
          return [list.space.offsetHeight, list.box.querySelector(".xckpt-selected").textContent];
        }"""
    )
    assert height <= 8_000_000
    assert NAMES[99] in selected


def test_a_hundred_thousand_rows_make_few_elements(browser: Browser) -> None:
    rows = list(mixture_of_experts(64, 256))
    with explorer_page(browser, rows) as (page, complaints):
        assert page.locator("*").count() < 350
        page.locator(".xckpt-list").press("End")
        assert shown_rows(page)[-1] == rows[-1].name
        page.get_by_role("searchbox").fill("layers.63.mlp.experts.255")
        page.locator(".xckpt-status", has_text="6 of 98,883 tensors").wait_for()
        assert complaints == []


@pytest.mark.parametrize("width", [1200, 480, 320])
def test_the_explorer_fits_into_any_width(browser: Browser, width: int) -> None:
    rows: Sequence[Row] = [*ROWS, row("n" * 500, "int8", 1)]
    with explorer_page(browser, rows, viewport={"width": width, "height": 900}) as (page, _):
        page.evaluate(f"model.set('_row', {len(rows) - 1})")
        send_statistics(page, [len(rows) - 1], np.full((1, len(STATISTICS)), -1.2345e-100))
        select(page, "Sort by", "by std")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
