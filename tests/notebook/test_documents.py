"""All views in all renderings are safe whatever the names, fit, and show the same."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.hostile_names import HOSTILE
from xckpt.formatting import columns
from xckpt.notebook import view_of_index
from xckpt.notebook.documents import (
    Bar,
    BarPart,
    Field,
    Folded,
    Heading,
    Picture,
    Sentence,
    Share,
    Table,
)
from xckpt.notebook.html import to_html, to_page
from xckpt.notebook.markdown import to_markdown
from xckpt.notebook.short_names import apart
from xckpt.notebook.text import to_text
from xckpt.statistics import result_blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xckpt.notebook.documents import Block, Cell

NAMES = (*HOSTILE, "layers.0." + "x" * 5000, "重" * 300, "a|b`c``", "](http://x)", "&lt;b&gt;")
TAGS = {
    *("div", "span", "b", "h1", "h2", "table", "thead", "tbody", "tr", "th", "td", "br", "wbr"),
    *("details", "summary", "html", "head", "body", "meta", "title", "style", "figure"),
}


def every_block(name: str) -> list[Block]:
    """Return a block of each kind with fields of each kind, all with a name in each text."""
    kinds = ("name", "pattern", "tree", "text", "word", "status", "key")
    fields = [Field(name, kind) for kind in kinds]
    fields += [Field("n", kind) for kind in ("number", "count", "size", "share", "bar")]
    numbers: list[Cell] = [1.5, 2, 3, Share(1, 2), Share(1, 2)]
    row: list[Cell] = [*[name] * len(kinds), *numbers]
    return [
        Heading(name, level=1),
        Heading(name, name, [name], name, [name]),
        Heading(name, facts=[name]),
        *[Sentence(kind, name, name) for kind in ("", "lead", "hint", "exception", "error", name)],
        Sentence("code", name),
        Table(fields, [row, [name], row], name, 2, [name], [0, 1, 2]),
        Table([Field("", "name"), Field("", "size")], [(name, 2**80)]),
        Bar([BarPart(name, 2**70), BarPart(name, 1)]),
        Folded(name, [(name, name)] * 99, 99),
        Picture(lambda: "", name),
    ]


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Any]]:
    folder = tmp_path_factory.mktemp("views")
    files = [folder / "a.zt", folder / "b.zt"]
    steps = [folder / f"step-{n}.zt" for n in (1, 2)]
    rng = np.random.default_rng(0)
    for n, path in enumerate((*files, *steps)):
        tensors = {name: rng.random((4, 4), "f4") for name in NAMES[: 6 if n > 1 else None]}
        tensors |= {
            f"layers.{i}.{name}": rng.random((4, 4), "f4") for i in (0, 1) for name in HOSTILE
        }
        tensors["w\x1b[1m"] = np.full((3, 4), np.nan, "f4")
        xckpt.save(tensors, path)
    ds = xckpt.open(files[0])
    return {
        "summary": lambda: ds.ckpt,
        "index": lambda: view_of_index(xckpt.read_index(files[0])),
        "tree": lambda: ds.ckpt.tree(4),
        "footprint": lambda: ds.ckpt.footprint().ckpt,
        "statistics": lambda: ds.ckpt.stats().ckpt,
        "groups": lambda: ds.ckpt.stats().ckpt.by("layer", "module").ckpt,
        "comparison": lambda: xckpt.compare(*files).ckpt,
        "explanation": lambda: xckpt.compare(*files, explain=True).ckpt,
        "groups of a comparison": lambda: xckpt.compare(*files).ckpt.by("layer").ckpt,
        "spectrum": lambda: ds.ckpt.spectrum().ckpt,
        "findings": ds.ckpt.findings,
        "groups of findings": lambda: ds.ckpt.findings().ckpt.by("layer").ckpt,
        "run": lambda: xckpt.open_steps(steps).ckpt.summary(changes=True),
        "verification": lambda: xckpt.verify(files[0], manifest=xckpt.manifest(files[1])),
        "manifest": lambda: xckpt.manifest(files[0]),
        "conversion": lambda: xckpt.convert(files[0], folder / "new.npz", overwrite=True),
    }


VIEWS = (
    *("summary", "index", "tree", "footprint", "statistics", "groups", "comparison", "explanation"),
    *("groups of a comparison", "spectrum", "findings", "groups of findings", "run"),
    *("verification", "manifest", "conversion"),
)


class Parsed(HTMLParser):
    """The text of HTML, which has known elements and no attributes that run or load anything."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in {"src", "href"}
            assert name != "style" or "url" not in (value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def require_safe_text(text: str, width: int) -> None:
    for line in text.split("\n"):
        assert line.isprintable()
        assert columns(line) <= width


def require_safe_markdown(text: str) -> None:
    assert text.replace("\n", "").isprintable()
    outside = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", re.sub(r"\\[^`|]|\\`(?!`* )", "", text))
    assert not re.search(r"<|\]\(", outside)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_hostile_names_are_only_text(name: str, width: int) -> None:
    blocks = every_block(name)
    for is_terminal in (False, True):
        text = to_text(blocks, width, is_terminal=is_terminal)
        require_safe_text(re.sub(r"\x1b\[[0-9;]*m", "", text) if is_terminal else text, 10**4)
    for html in (to_html(blocks), to_page(blocks)):
        text = Parsed(html).text.replace("\xa0", " ")
        assert text.replace("\n", "").isprintable()
        assert len(html) < 60_000
    require_safe_markdown(to_markdown(blocks))


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_safe_and_fit(
    view: str, views: dict[str, Callable[[], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = views[view]()
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        # The path of a file is not cut.
        require_safe_text(repr(shown), 400 if view in {"verification", "conversion"} else width)
    html = Parsed(shown._repr_html_()).text.replace("\xa0", " ")
    assert html.replace("\n", "").isprintable()
    require_safe_markdown(to_markdown(shown._blocks()))


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("view", VIEWS)
def test_text_and_html_have_the_same_first_words(
    view: str, views: dict[str, Callable[[], Any]]
) -> None:
    shown = views[view]()
    words = re.findall(r"[\w.]+", repr(shown).splitlines()[0])
    html = Parsed(shown._repr_html_()).text
    assert all(word in html for word in words if word != "params")


def test_a_command_prints_the_sentences_of_the_view(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from xckpt.cli import main

    rng = np.random.default_rng(0)
    path = tmp_path / "m.npz"
    xckpt.save({"w": np.full((3, 4), np.nan), "v": rng.random((4, 4))}, path)
    report = xckpt.verify(path)
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out == f"{report!r}\n"
    assert main(["stats", str(path), "--findings"]) == 1
    _, *lines = repr(xckpt.findings(path)).splitlines()
    assert capsys.readouterr().out.splitlines() == lines


def test_numbers_of_omitted_things_are_stated_once() -> None:
    rows = [(f"w{n}", 1) for n in range(20)]
    table = Table([Field("tensor", "name"), Field("n", "count")], rows, "… 8 more tensors", 12)
    assert to_text([table]).count("more") == 1
    assert "8 more tensors" in Parsed(to_html([table])).text
    assert to_markdown([table]).count("more") == 1


def test_names_in_one_column_are_cut_alike() -> None:
    names = [f"model.layers.{n}.{word}.weight" for n in (0, 10) for word in ("q", "post_attention")]
    names = [*names, "model.embed.weight", "lm_head.weight"]
    labels = apart(names, 30)
    assert labels == [
        *("…0.q.weight", "…0.post_attention.weight"),
        *("…10.q.weight", "…10.post_attention.weight"),
        *("model.embed.weight", "lm_head.weight"),
    ]
    assert apart(names, 80) == names


def test_a_label_keeps_the_numbers_of_its_name() -> None:
    names = [f"model.layers.{n}.{word}.weight" for n in (0, 10) for word in ("q", "x" * 40)]
    first, second, third, fourth = apart(names, 30)
    assert (first, third) == ("…0.q.weight", "…10.q.weight")
    assert (second[:5], fourth[:6]) == ("…0.xx", "…10.xx")


def test_a_tensor_without_a_name_has_quotes() -> None:
    blocks = result_blocks(xckpt.stats({"": np.eye(3), "w": np.eye(3)})) or []
    assert re.search(r'^ *"" ', to_text(blocks), re.MULTILINE)


def test_columns_that_are_not_shown_are_counted() -> None:
    result = xckpt.stats({"w": np.eye(3)})
    text = " ".join(to_text(result_blocks(result) or [], 40).split())
    assert re.search(r"too narrow for .*, 16 more columns$", text)


def test_a_histogram_names_its_file(tmp_path: Path) -> None:
    xckpt.save({"h.0.w": np.eye(3)}, tmp_path / "m.npz")
    result = xckpt.histogram(tmp_path / "m.npz")
    assert "m.npz" in repr(result.ckpt)
    assert "m.npz" in repr(result.ckpt.by("layer").ckpt)


def test_notes_name_only_the_keys_that_are_missing() -> None:
    groups = xckpt.stats({"h.0.w": np.eye(3), "lm_head": np.eye(3)}).ckpt.by("layer", "dtype")
    assert "without layer: 'lm_head'" in repr(groups.ckpt)
