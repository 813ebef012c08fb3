"""A real JupyterLab session, checked against Python."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import pytest

pytest.importorskip(
    "playwright", reason="playwright drives the browser: pip install 'xckpt[browser]'"
)

from playwright.sync_api import expect

from tests.browser.lab import Lab, guarded_page, open_notebook, run_all, write_notebook
from tests.notebook.checkpoints import mixture_of_experts
from tests.notebook.rendering import render_html
from xckpt.notebook.summary import new_summary
from xckpt.sample import write_checkpoint
from xckpt.statistics import stats

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, BrowserContext, Locator, Page

pytestmark = pytest.mark.slow

Test = TypeVar("Test", bound=Callable[..., None])

HOSTILE = "<img src=x onerror=alert(1)>"
BIDI = "evil\u202egnp.weight\x1b[31m"
OPEN = "import xarray as xr\nds = xr.open_dataset('model.zt', engine='ztensor')\n"
OPEN_HOSTILE = (
    "import xarray as xr\nds = xr.open_dataset('hostile.safetensors', engine='safetensors')\n"
)
SLOW = """
import time
import xckpt.accessor.exploring

def compute(self, names, report):
    for _ in range(600):
        time.sleep(0.05)
        report(0, 1)

xckpt.accessor.exploring.compute = compute
ds.ckpt.explore()
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Run JupyterLab in a folder with two checkpoints, or skip."""
    for module in ("jupyterlab", "anywidget", "ipykernel"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install 'xckpt[browser]'")
    folder = tmp_path_factory.mktemp("lab")
    write_checkpoint(folder / "model.zt", layers=4, width=64)
    write_safetensors(
        folder / "hostile.safetensors", [HOSTILE, BIDI, *(f"t{n}" for n in range(600))]
    )
    with Lab(folder) as running:
        yield running


@pytest.fixture(scope="module")
def context(browser: Browser) -> BrowserContext:
    """Keep JupyterLab in one cache: to load and compile it takes longer than most tests."""
    return browser.new_context(viewport={"width": 1300, "height": 1500})


CELLS: dict[str, tuple[str, ...]] = {}


def cells(*sources: str) -> Callable[[Test], Test]:
    """Run the cells of a test in the notebook that all tests share.

    A page and a kernel take longer to start than these tests.
    """

    def noted(test: Test) -> Test:
        CELLS[test.__name__] = sources
        return test

    return noted


@pytest.fixture(scope="module")
def shared(context: BrowserContext, lab: Lab) -> Iterator[tuple[list[str], list[Locator]]]:
    """Run all cells of tests that share a notebook; nothing may go wrong on its page."""
    with guarded_page(context, [lab.url]) as (page, complaints):
        yield complaints, run_cells(page, lab, *chain.from_iterable(CELLS.values()))


@pytest.fixture
def ran(
    request: pytest.FixtureRequest, shared: tuple[list[str], list[Locator]]
) -> Iterator[list[Locator]]:
    """Return the cells of a test, on a page on which nothing goes wrong."""
    complaints, outputs = shared
    before = [*CELLS].index(request.node.name)
    start = sum(len(CELLS[name]) for name in [*CELLS][:before])
    yield outputs[start : start + len(CELLS[request.node.name])]
    assert complaints == []


@pytest.fixture
def page(context: BrowserContext, lab: Lab) -> Iterator[Page]:
    """Open a page that requests nothing from other servers and reports no errors."""
    with guarded_page(context, [lab.url]) as (page, complaints):
        yield page
        assert complaints == []


def write_safetensors(path: Path, names: list[str]) -> None:
    entries = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * n, 16 * n + 16]}
        for n, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16 * len(names)))


def run_cells(page: Page, lab: Lab, *cells: str) -> list[Locator]:
    """Run cells in a new notebook with a new kernel, and return the cells."""
    file = new_notebook(lab)
    write_notebook(file, cells)
    open_notebook(page, lab, file.name)
    run_all(page)
    return page.locator(".jp-CodeCell").all()


def output(cell: Locator) -> Locator:
    return cell.locator(".jp-OutputArea")


def new_notebook(lab: Lab) -> Path:
    return lab.root / f"{uuid4().hex}.ipynb"


def saved(page: Page, lab: Lab) -> dict[str, Any]:
    """Save the notebook and read it."""
    (file,) = [file for file in lab.root.glob("*.ipynb") if file.name in page.url]
    page.keyboard.press("Control+s")
    # It is empty while it is being written.
    for _ in range(100):
        page.wait_for_timeout(200)
        text = file.read_text(encoding="utf-8")
        if "output_type" in text and text.rstrip().endswith("}"):
            notebook: dict[str, Any] = json.loads(text)
            return notebook
    raise TimeoutError("the notebook was not saved")


@cells(OPEN + "ds.ckpt.explore()")
def test_a_tensor_is_searched_for_selected_and_described(ran: list[Locator], lab: Lab) -> None:
    box = ran[0].locator(".xckpt-explorer")
    box.get_by_role("searchbox").fill("*.2.*q_proj.bias")
    box.get_by_role("searchbox").press("ArrowDown")
    expect(box.locator(".xckpt-histogram rect").first).to_be_visible(timeout=20_000)
    name = "model.layers.2.self_attn.q_proj.bias"
    result = stats(lab.root / "model.zt", cache=False)
    expected = dict(
        zip(result.statistic.values.tolist(), result[name].values.tolist(), strict=True)
    )
    finite = {key: value for key, value in expected.items() if not math.isnan(value)}
    names = box.locator(".xckpt-plain dt").all_inner_texts()
    shown = box.locator(".xckpt-plain dd").evaluate_all("(all) => all.map((one) => one.title)")
    assert {n: float(v) for n, v in zip(names, shown, strict=True)} == {
        key: value for key, value in finite.items() if not key.startswith("q")
    }
    count = sum(1 for key in finite if key.startswith("q"))
    assert box.locator(".xckpt-quantiles dd").count() == count


@cells(
    OPEN + "explorer = ds.ckpt.explore()\nexplorer",
    "explorer.selected = 'model.norm.weight'",
    "explorer.selected",
)
def test_selections_in_python_and_in_the_explorer_agree(ran: list[Locator]) -> None:
    page, count = ran[0].page, ran[0].page.locator(".jp-CodeCell").count()
    box = ran[0].locator(".xckpt-explorer")
    expect(box.locator(".xckpt-title")).to_have_text("model.norm.weight")
    expect(output(ran[2])).to_contain_text("'model.norm.weight'")
    code = box.get_by_role("button", name="Copy code").get_attribute("title")
    assert code == 'ds["model.norm.weight"]'
    # JupyterLab binds commands to arrows and to letters.
    box.locator(".xckpt-list").focus()
    page.keyboard.press("Home")
    page.keyboard.press("b")
    expect(box.locator(".xckpt-title")).to_have_text("model.embed_tokens.weight")
    assert page.locator(".jp-CodeCell").count() == count
    ran[2].locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    expect(output(ran[2])).to_contain_text("'model.embed_tokens.weight'")


@cells(OPEN + "ds.ckpt.explore()")
def test_all_statistics_are_computed_and_sortable(ran: list[Locator], lab: Lab) -> None:
    box = ran[0].locator(".xckpt-explorer")
    box.get_by_role("button", name="Compute all").click()
    done = box.get_by_role("button", name="Statistics are complete")
    expect(done).to_be_visible(timeout=60_000)
    box.get_by_label("Sort by").select_option("by absmax")
    result = stats(lab.root / "model.zt", cache=False).sel(statistic="absmax")
    # Codes are not sorted among weights.
    weights = [name for name in result.data_vars if not str(name).endswith("down_proj.weight")]
    largest = sorted(weights, key=lambda name: -float(result[name]))
    first = box.locator(".xckpt-list .xckpt-row").first
    expect(first).to_have_attribute("title", re.compile(f"^{re.escape(str(largest[0]))}(\n|$)"))
    rows = box.locator(".xckpt-list .xckpt-row:visible")
    titles = rows.evaluate_all("(all) => all.map((one) => one.title.split('\\n')[0])")
    assert titles == largest[: len(titles)]
    expect(ran[0].get_by_role("button", name="Cancel")).to_be_hidden()


def test_the_kernel_stays_free_and_work_can_be_cancelled(page: Page, lab: Lab) -> None:
    slow, quick = run_cells(page, lab, OPEN + SLOW, "1 + 1")
    box = slow.locator(".xckpt-explorer")
    box.get_by_role("button", name="Compute all").click()
    cancel = slow.get_by_role("button", name="Cancel")
    expect(cancel).to_be_visible()
    expect(slow.get_by_text("0 of 45 tensors")).to_be_visible()
    quick.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    prompt = quick.locator(".jp-InputPrompt")
    expect(prompt).to_have_text("[3]:", timeout=3_000)
    cancel.click()
    expect(cancel).to_be_hidden()
    expect(box.get_by_role("button", name="Compute all")).to_be_enabled()


@cells(OPEN + "ds.ckpt.explore()  # to be saved")
def test_a_saved_notebook_is_small_and_has_the_summary(ran: list[Locator], lab: Lab) -> None:
    notebook = saved(ran[0].page, lab)
    (cell,) = [
        candidate
        for candidate in notebook["cells"]
        if "to be saved" in "".join(candidate["source"])
    ]
    (data,) = [output["data"] for output in cell["outputs"]]
    html = "".join(data["text/html"])
    text = "".join(data["text/plain"])
    assert html.startswith("<div")
    assert text.startswith("<Checkpoint model.zt>")
    assert len(json.dumps([cell, notebook["metadata"]])) < 30_000
    assert str(lab.root) not in json.dumps(notebook)


@cells(
    f"{OPEN_HOSTILE}ds.ckpt",
    "other = ds.ckpt.explore()\nother.selected = list(ds.variables)[0]\nother",
    "import xckpt\nxckpt.read_index('hostile.safetensors')",
)
def test_markup_in_names_is_inert(ran: list[Locator]) -> None:
    box = ran[1].locator(".xckpt-explorer")
    rows = box.locator(".xckpt-list .xckpt-row .xckpt-name")
    shown = r"evil\u202egnp.weight\x1b[31m"
    # The statistics of the selected tensor come first, then the finding next to its name.
    expect(rows.nth(0)).to_have_text(re.compile(f"^{re.escape(HOSTILE)}(all zero)?$"))
    expect(rows.nth(1)).to_have_text(shown)
    expect(box.locator(".xckpt-title")).to_have_text(HOSTILE)
    for cell in (ran[0], ran[2]):
        expect(output(cell)).to_contain_text(HOSTILE)
        expect(output(cell)).to_contain_text(shown)
    assert ran[0].page.locator(".jp-Notebook img").count() == 0


@cells(f"{OPEN_HOSTILE}ds", "%unload_ext xckpt\nxr.set_options(display_style='text')\nds")
def test_large_datasets_are_shown_as_their_summary_without_asking(ran: list[Locator]) -> None:
    expect(output(ran[0]).get_by_text("602 tensors")).to_be_visible()
    expect(output(ran[0]).get_by_text("xckpt.summary-above")).to_be_visible()
    expect(output(ran[1])).to_contain_text("xarray.Dataset")


def test_untrusted_notebooks_show_the_same(page: Page, lab: Lab) -> None:
    html = render_html(
        new_summary(
            mixture_of_experts(4, 4),
            title="m.zt",
            format="ztensor",
            version="1.0",
            attrs={"license": "MIT"},
            notes=["version 1.1 is newer"],
        )
    )
    output = {"output_type": "display_data", "data": {"text/html": html}, "metadata": {}}
    file = new_notebook(lab)
    write_notebook(file, [""])
    notebook = json.loads(file.read_text())
    notebook["cells"][0]["outputs"] = [output]
    file.write_text(json.dumps(notebook))
    open_notebook(page, lab, file.name)
    shown = page.locator(".jp-OutputArea [data-mime-type='text/html']")
    cleaned = shown.locator("div div").first.evaluate("(one) => one.parentElement.outerHTML")
    assert "aria-label" not in cleaned  # it was cleaned
    assert styles(cleaned) == styles(html)
    assert shown.locator("details").count() == 2
    expect(shown.get_by_text("license 'MIT'")).to_be_hidden()
    shown.locator("summary").last.click()
    expect(shown.get_by_text("license 'MIT'")).to_be_visible()


def styles(html: str) -> list[str]:
    """List the inline styles without spaces."""
    values = re.findall(r'style="([^"]*)"', html)
    return [style.replace(" ", "").replace("&quot;", '"').rstrip(";") for style in values]
