"""The browser in the terminal shows a file, and reads values only for what is selected."""

from __future__ import annotations

import asyncio
import io
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.hostile_names import HOSTILE
from xckpt.cli import main
from xckpt.notebook.text import to_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytest.importorskip("textual")

from textual.widgets import OptionList, Static, Tree

from xckpt.cli.browser import Browser, Pages


def model(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": rng.normal(size=(6, 4)).astype("float32"),
        "layers.0.w": np.arange(8, dtype="float32").reshape(2, 4),
        "layers.0.b": np.array([1, np.nan], "float32"),
        "layers.1.w": rng.normal(size=(2, 4)).astype("float32"),
        "layers.10.w": rng.normal(size=(2, 4)).astype("float32"),
    }


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "m.npz")
    xckpt.save(model(), path)
    return path


def browse(pages: Pages, use: Callable[[Browser, Any], Awaitable[None]], width: int = 140) -> None:
    """Use the application in a terminal of the given width."""

    async def run() -> None:
        app = Browser(pages, "m.npz")
        async with app.run_test(size=(width, 60)) as pilot:
            await pilot.pause()
            await use(app, pilot)

    asyncio.run(run())


async def ready(app: Browser, pilot: Any) -> str:
    """Wait for the page, and return its text."""
    await pilot.pause()
    await app.workers.wait_for_complete()
    await pilot.pause()
    return str(app.query_one("#page", Static).content)


def labels(app: Browser) -> list[str]:
    """Return the labels that the tree shows."""
    tree, shown = app.query_one(Tree), []
    nodes = [tree.root]
    while nodes:
        node = nodes.pop(0)
        shown.append(str(node.label))
        nodes = [*(node.children if node.is_expanded else ()), *nodes]
    return shown


class TestTree:
    def test_it_begins_with_the_summary(self, path: str) -> None:
        async def use(app: Browser, pilot: Any) -> None:
            assert "5 tensors" in await ready(app, pilot)
            assert labels(app) == ["m.npz", "embed", "layers"]

        browse(Pages(xckpt.open(path)), use)

    def test_modules_unfold_in_the_order_of_their_numbers(self, path: str) -> None:
        async def use(app: Browser, pilot: Any) -> None:
            await pilot.press("down", "down", "enter")
            page = await ready(app, pilot)
            assert labels(app)[2:] == ["layers", "0", "1", "10"]
            assert "<Module layers>  4 tensors" in page
            assert "0.w" in page
            assert "embed" not in page

        browse(Pages(xckpt.open(path)), use)

    def test_a_tensor_shows_its_statistics(self, path: str) -> None:
        async def use(app: Browser, pilot: Any) -> None:
            await pilot.press("down", "down", "enter", "down", "enter", "down")
            page = await ready(app, pilot)
            assert "<Tensor layers.0.w>  2×4 · 8 elements" in page
            assert "mean 3.5" in page
            assert "max 7" in page

        browse(Pages(xckpt.open(path)), use)

    def test_a_very_wide_module_is_cut(self, tmp_path: Path) -> None:
        one = np.zeros(1, "int8")
        xckpt.save({f"t{n}": one for n in range(2_100)}, str(tmp_path / "m.npz"))

        async def use(app: Browser, pilot: Any) -> None:
            await ready(app, pilot)
            assert len(labels(app)) == 1 + 2_000 + 1
            assert labels(app)[-1] == "… 100 more tensors: search with /"

        browse(Pages(xckpt.open(str(tmp_path / "m.npz"))), use)


class TestSearch:
    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("EMBED", ["embed.weight"]),
            ("*.w", ["layers.0.w", "layers.1.w", "layers.10.w"]),
            ("nothing", ["no tensor has such a name"]),
        ],
    )
    def test_a_part_of_a_name_or_a_glob(self, path: str, text: str, names: list[str]) -> None:
        async def use(app: Browser, pilot: Any) -> None:
            await pilot.press("slash", *text)
            await pilot.pause()
            found = app.query_one(OptionList)
            shown = [found.get_option_at_index(n).prompt for n in range(found.option_count)]
            assert list(map(str, shown)) == names

        browse(Pages(xckpt.open(path)), use)

    def test_a_name_that_was_found_can_be_selected(self, path: str) -> None:
        async def use(app: Browser, pilot: Any) -> None:
            await pilot.press("slash", *"0.b", "enter")
            page = await ready(app, pilot)
            assert "<Tensor layers.0.b>" in page
            assert "nan 1" in page
            await pilot.press("escape")
            assert app.query_one(Tree).display

        browse(Pages(xckpt.open(path)), use)


class TestPages:
    def test_findings(self, path: str) -> None:
        async def use(app: Browser, pilot: Any) -> None:
            await pilot.press("f")
            page = await ready(app, pilot)
            assert "layers.0.b" in page
            assert "[nan]" in page

        browse(Pages(xckpt.open(path)), use)

    def test_differences_mark_the_tree(self, path: str, tmp_path: Path) -> None:
        changed = model()
        changed["layers.1.w"] = changed["layers.1.w"] + 1
        xckpt.save(changed, str(tmp_path / "b.npz"))
        pages = Pages(xckpt.open(path), xckpt.open(str(tmp_path / "b.npz")))

        async def use(app: Browser, pilot: Any) -> None:
            await pilot.press("d")
            page = await ready(app, pilot)
            assert "1 changed" in page
            assert ".ckpt" not in page
            assert pages.status("layers.1.w") == "changed"
            assert pages.status("embed.weight") == "same"
            assert "status changed" in to_text(pages.tensor("layers.1.w"), 200)

        browse(pages, use)

    def test_nothing_to_compare_with(self, path: str) -> None:
        async def use(app: Browser, pilot: Any) -> None:
            await pilot.press("d")
            assert "xckpt browse A B" in await ready(app, pilot)

        browse(Pages(xckpt.open(path)), use)

    def test_a_damaged_tensor_shows_why(self, tmp_path: Path) -> None:
        path = tmp_path / "m.zt"
        packed = {"*": {"compression": "zstd"}}
        xckpt.save({"w": np.arange(1000, dtype="float32")}, path, encoding=packed)
        index = xckpt.read_index(path)
        (part,) = index.tensors["w"].parts.values()
        data = bytearray(path.read_bytes())
        data[part.offset + 4 : part.offset + part.nbytes] = bytes(part.nbytes - 4)
        path.write_bytes(data)

        async def use(app: Browser, pilot: Any) -> None:
            await pilot.press("down")
            page = await ready(app, pilot)
            assert "<Tensor w>" in page
            assert "error:" in page
            assert "zstd" in page

        browse(Pages(xckpt.open(str(path))), use)

    def test_names_are_text_and_not_markup(self, tmp_path: Path) -> None:
        path = str(tmp_path / "m.safetensors")
        xckpt.save({name: np.ones(2, "float32") for name in HOSTILE}, path)
        pages = Pages(xckpt.open(path))
        shown = [to_text(pages.tensor(name), 300) for name in HOSTILE]
        shown += [pages.label(name).plain for name in HOSTILE]
        assert not any({"\x1b", "\u202e", "\r", "\x07"} & set(text) for text in shown)

        async def use(app: Browser, pilot: Any) -> None:
            for _ in HOSTILE:
                await pilot.press("down")
                await ready(app, pilot)
            assert any("[bold red]w[" in label for label in labels(app))

        browse(pages, use)


def test_without_textual(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "xckpt.cli.browser")
    monkeypatch.setitem(sys.modules, "textual", None)
    assert main(["browse", path]) == 2
    assert "pip install 'xckpt[browse]'" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["browse", path]) == 2
    assert "needs a terminal; 'xckpt info'" in capsys.readouterr().err


def test_the_command_opens_both_files(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Browser] = []

    def run(app: Browser) -> None:
        started.append(app)

    monkeypatch.setattr(Browser, "run", run)
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(sys, stream, Terminal())
    assert main(["browse", path, path, "--tensors", "layers.*"]) == 0
    assert started[0].pages.names == ["layers.0.w", "layers.0.b", "layers.1.w", "layers.10.w"]
