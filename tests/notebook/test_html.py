"""The summary as HTML is small, complete, and inert whatever the file."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.notebook.checkpoints import gpt2, mixture_of_experts, resnet, row
from tests.notebook.rendering import render_html, render_text
from xckpt.index import Index, Part, Tensor, paused_collector
from xckpt.notebook.html import PALETTE, colors_of
from xckpt.notebook.summary import Summary, TensorFinding, new_summary
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    from collections.abc import Iterable

VOID = {"br", "wbr"}
TAGS = {
    *("div", "span", "b", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    *VOID,
}
NAMES = st.text(st.characters() | st.sampled_from("<>&\"'.0123{}"), max_size=80)


class Parsed(HTMLParser):
    """The tags, attributes and text of HTML in which every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def summary_of(rows: Iterable[Row], **more: Any) -> Summary:
    return new_summary(
        rows, **{"title": "m.zt", "format": "ztensor", "version": "1.0", "attrs": {}} | more
    )


def test_html_has_the_content_of_the_text() -> None:
    summary = summary_of(
        mixture_of_experts(),
        attrs={"license": "MIT"},
        dims={"hidden": 5120},
        notes=["version 1.1 is newer"],
        findings=[TensorFinding("lm_head.weight", "nan", 512.0, "error")],
    )
    text = re.sub(r"\s+", " ", Parsed(render_html(summary)).text.replace("\xa0", " "))
    for words in (
        *("m.zt", "ztensor 1.0", "25,155 tensors", "104.3 B params", "104.2 GiB"),
        *("float8_e4m3fn 90.0 GiB 86.4 %", "note: version 1.1 is newer"),
        "1 finding: 1 error",
        "error: nan in 1 tensor: lm_head.weight (512)",
        "{0..63}.mlp.experts.{0..63}.{gate,up,down}_proj.weight",
        *("12,288", "5120\N{MULTIPLICATION SIGN}1536", "hidden 5,120", "license 'MIT'"),
    ):
        assert words in text, words


@pytest.mark.parametrize("model", [gpt2, mixture_of_experts])
def test_html_has_all_patterns(model: Any) -> None:
    summary = summary_of(model())
    text = Parsed(render_html(summary)).text
    for pattern in summary.patterns:
        assert pattern.text in text


def test_omitted_lines_are_counted() -> None:
    summary = summary_of(resnet())
    text = Parsed(render_html(summary)).text
    assert all(pattern.text in text for pattern in summary.patterns[:20])
    assert "29 more patterns: 283 tensors, 3.2 MiB" in text
    assert f"… {len(summary.patterns) - 20} more" in text


def test_a_hundred_thousand_tensors_take_10_kb_and_linear_time() -> None:
    attrs = {f"a{n}": n for n in range(99)}
    rows: list[Any] = []
    fastest = []
    for experts in (26, 256):
        rows = [
            *mixture_of_experts(64, experts),
            *(row(f"extra.{n}.scale", "int8", 4) for n in range(8 * experts)),
        ]
        took = []
        for _ in range(3):
            start = time.process_time()
            with paused_collector():  # as callers of the summary do
                html = render_html(summary_of(rows, attrs=attrs), ["ds.ckpt.stats()"])
            took.append(time.process_time() - start)
            assert len(html.encode()) < 10_000
        fastest.append(min(took))
    assert len(rows) > 100_000
    # Ten times the tensors; a second loop over all of them for each would be a hundred times.
    assert fastest[1] < 30 * fastest[0]


def test_a_model_of_many_patterns_takes_10_kb_too() -> None:
    assert len(render_html(summary_of(resnet())).encode()) < 10_000


def test_the_size_is_bounded_for_any_file() -> None:
    names = [f"{'<' * 60}{chr(97 + n // 26)}{chr(97 + n % 26)}.{chr(97 + n)}" for n in range(400)]
    rows = [row(name, "float32", n, 2**40, 7) for n, name in enumerate(names)]
    hostile = dict.fromkeys(names, "&" * 5000)
    summary = summary_of(
        rows, title="<" * 999, attrs=hostile, dims=dict.fromkeys(names, 1), notes=["&" * 9999] * 99
    )
    assert len(render_html(summary).encode()) < 60_000


def test_styles_are_inline_and_nothing_else_is_needed() -> None:
    parsed = Parsed(
        render_html(summary_of(resnet(), attrs={"a": 1}, dims={"d": 2}), ["ds.ckpt.stats()"])
    )
    assert set(parsed.tags) <= TAGS
    assert parsed.attributes == {"style", "role", "aria-label", "scope"}


def test_an_empty_checkpoint() -> None:
    parsed = Parsed(render_html(summary_of([])))
    assert "0 tensors" in parsed.text
    assert "table" not in parsed.tags


def test_tensors_without_elements_have_no_share() -> None:
    assert "%" not in Parsed(render_html(summary_of([row("a", "float32", 0)]))).text


def test_findings_are_counted_with_cached_statistics() -> None:
    assert "finding" not in render_html(summary_of(gpt2()))
    assert "no findings" in render_html(summary_of(gpt2(), findings=[]))
    many = [TensorFinding(f"t{n}", "dead_rows" if n else "nan", n, "error") for n in range(3)]
    many += [TensorFinding(f"h.{n}.w", "all_zero", 9 * n, "warning") for n in (1, 10, 2)]
    for text in (
        "6 findings: 3 errors, 3 warnings",
        "error: nan in 1 tensor: t0 (0)",
        "error: dead rows in 2 tensors: t{1,2} (up to 2)",
        "warning: all zero in 3 tensors: h.{1,2,10}.w (up to 90)",
    ):
        assert text in Parsed(render_html(summary_of(gpt2(), findings=many))).text
        assert f"\n  {text}\n" in render_text(summary_of(gpt2(), findings=many))


def test_errors_precede_findings_and_findings_precede_notes() -> None:
    kinds = ("info", "error", "strange", "warning")
    results = [TensorFinding(f"{kind}_tensor", kind, 1.0, kind) for kind in kinds]
    summary = summary_of(gpt2(), errors=["cut short"], notes=["newer"], findings=results)
    words = ["cut short", "findings", *(f"{k}_tensor" for k in sorted(kinds)), "newer"]
    words[2:6] = [f"{kind}_tensor" for kind in ("error", "warning", "info", "strange")]
    for text in (Parsed(render_html(summary)).text, render_text(summary)):
        places = [text.index(word) for word in words]
        assert places == sorted(places)


def test_many_findings_are_counted() -> None:
    names = [f"{chr(97 + n)}.{chr(120 - n)}" for n in range(12)]
    results = [TensorFinding(name, "nan", 1.0, "error") for name in names]
    assert "… 4 more findings" in render_text(summary_of(gpt2(), findings=results))


def test_neither_folders_nor_signatures_are_shown() -> None:
    source = "https://user:key@host/private/m.zt?X-Signature=abc"
    html = render_html(summary_of(gpt2(), title=source))
    assert "m.zt" in html
    for secret in ("user", "key", "private", "Signature"):
        assert secret not in html


def test_an_index_is_shown_with_its_warnings() -> None:
    part = Part("float32", (4,), 64, 16)
    tensors = {"a": Tensor("a", "float32", (4,), {"data": part})}
    index = Index("ztensor", "1.0", tensors, source="/home/someone/m.zt", warnings=("odd offset",))
    html = str(index._repr_html_())
    assert "1 warning: odd offset" in Parsed(html).text
    assert "someone" not in html


@given(
    st.dictionaries(NAMES, st.lists(st.integers(0, 2**70), max_size=5).map(tuple), max_size=20),
    NAMES,
    st.dictionaries(NAMES, NAMES, max_size=3),
    st.lists(NAMES, max_size=3),
)
def test_any_text_is_only_text(
    tensors: dict[str, tuple[int, ...]], word: str, attrs: dict[str, str], notes: list[str]
) -> None:
    html = render_html(
        new_summary(
            [Row(name, word, shape, len(name), word) for name, shape in tensors.items()],
            title=word,
            format=word,
            version=word,
            attrs=attrs,
            dims=dict.fromkeys(attrs, 2**70),
            notes=notes,
            findings=[TensorFinding(word, note, 1.0, word) for note in notes],
        ),
        notes,
    )
    parsed = Parsed(html)
    assert set(parsed.tags) <= TAGS
    assert parsed.attributes <= {"style", "role", "aria-label", "scope"}
    assert html.replace("\xa0", "").isprintable()


# --- colours -------------------------------------------------------------------------------------


def luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(c * share for c, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


@pytest.mark.parametrize("color", PALETTE)
@pytest.mark.parametrize("ground", ["#ffffff", "#111111"])
def test_colours_have_contrast_with_the_page(color: str, ground: str) -> None:
    dark, bright = sorted([luminance(color), luminance(ground)])
    assert (bright + 0.05) / (dark + 0.05) >= 3


def test_there_are_colours_for_any_number_of_types() -> None:
    colors = colors_of(f"t{n}" for n in range(20))
    assert list(colors.values())[: len(PALETTE)] == list(PALETTE)
    assert colors["t19"] == PALETTE[-1]
