"""What a user sees and does in a real JupyterLab, checked against Python."""

from __future__ import annotations

import json
import math
import re
import struct
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

pytest.importorskip(
    "playwright", reason="playwright drives the browser: pip install 'xckpt[browser]'"
)

from playwright.sync_api import expect

from tests.browser.lab import Lab, guarded_page, open_notebook, run_all, write_notebook
from tests.notebook.checkpoints import mixture_of_experts
from xckpt.notebook.html import render
from xckpt.notebook.summary import new_summary
from xckpt.sample import write_checkpoint
from xckpt.statistics import stats

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, BrowserContext, Locator, Page

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)>"
BIDI = "evil\u202egnp.weight\x1b[31m"
OPEN = "import xarray as xr\nds = xr.open_dataset('model.zt', engine='ztensor')\n"
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


@pytest.fixture
def page(context: BrowserContext, lab: Lab) -> Iterator[Page]:
    """Open a page that asks nobody but the server, and on which nothing goes wrong."""
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
    """Run cells in a new notebook, with a kernel of its own; give the outputs of each."""
    file = new_notebook(lab)
    write_notebook(file, cells)
    open_notebook(page, lab, file.name)
    run_all(page)
    return [cell.locator(".jp-OutputArea") for cell in page.locator(".jp-CodeCell").all()]


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


def test_a_tensor_is_searched_for_selected_and_described(page: Page, lab: Lab) -> None:
    outputs = run_cells(page, lab, OPEN + "explorer = ds.ckpt.explore()\nexplorer")
    box = outputs[0].locator(".xckpt-explorer")
    box.get_by_role("searchbox").fill("*.2.*q_proj.bias")
    box.get_by_role("searchbox").press("ArrowDown")
    expect(box.locator(".xckpt-histogram rect").first).to_be_visible(timeout=20_000)
    name = "model.layers.2.self_attn.q_proj.bias"
    result = stats(lab.root / "model.zt", cache=False)
    expected = dict(
        zip(result.statistic.values.tolist(), result[name].values.tolist(), strict=True)
    )
    known = {key: value for key, value in expected.items() if not math.isnan(value)}
    names = box.locator(".xckpt-plain dt").all_inner_texts()
    shown = box.locator(".xckpt-plain dd").evaluate_all("(all) => all.map((one) => one.title)")
    assert {n: float(v) for n, v in zip(names, shown, strict=True)} == {
        key: value for key, value in known.items() if not key.startswith("q")
    }
    count = sum(1 for key in known if key.startswith("q"))
    assert box.locator(".xckpt-quantiles dd").count() == count


def test_python_and_the_explorer_select_for_each_other(page: Page, lab: Lab) -> None:
    outputs = run_cells(
        page,
        lab,
        OPEN + "explorer = ds.ckpt.explore()\nexplorer",
        "explorer.selected = 'model.norm.weight'",
        "explorer.selected",
    )
    box = outputs[0].locator(".xckpt-explorer")
    expect(box.locator(".xckpt-title")).to_have_text("model.norm.weight")
    expect(outputs[2]).to_contain_text("'model.norm.weight'")
    code = box.get_by_role("button", name="Copy code").get_attribute("title")
    assert code == 'ds["model.norm.weight"]'
    # JupyterLab has commands of its own for arrows and for letters.
    box.locator(".xckpt-list").focus()
    page.keyboard.press("Home")
    page.keyboard.press("b")
    expect(box.locator(".xckpt-title")).to_have_text("model.embed_tokens.weight")
    assert page.locator(".jp-CodeCell").count() == 3
    page.locator(".jp-CodeCell").nth(2).locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    expect(outputs[2]).to_contain_text("'model.embed_tokens.weight'")


def test_all_statistics_are_computed_and_sorted_by(page: Page, lab: Lab) -> None:
    outputs = run_cells(page, lab, OPEN + "ds.ckpt.explore()")
    box = outputs[0].locator(".xckpt-explorer")
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
    expect(outputs[0].get_by_role("button", name="Cancel")).to_be_hidden()


def test_the_kernel_stays_free_and_work_can_be_cancelled(page: Page, lab: Lab) -> None:
    outputs = run_cells(page, lab, OPEN + SLOW, "1 + 1")
    box = outputs[0].locator(".xckpt-explorer")
    box.get_by_role("button", name="Compute all").click()
    cancel = outputs[0].get_by_role("button", name="Cancel")
    expect(cancel).to_be_visible()
    expect(outputs[0].get_by_text("0 of 45 tensors")).to_be_visible()
    page.locator(".jp-CodeCell").nth(1).locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    prompt = page.locator(".jp-CodeCell").nth(1).locator(".jp-InputPrompt")
    expect(prompt).to_have_text("[3]:", timeout=3_000)
    cancel.click()
    expect(cancel).to_be_hidden()
    expect(box.get_by_role("button", name="Compute all")).to_be_enabled()


def test_a_saved_notebook_is_small_and_has_the_summary(page: Page, lab: Lab) -> None:
    run_cells(page, lab, OPEN + "ds.ckpt.explore()")
    notebook = saved(page, lab)
    (output,) = notebook["cells"][0]["outputs"]
    html = "".join(output["data"]["text/html"])
    text = "".join(output["data"]["text/plain"])
    assert html.startswith("<div")
    assert text.startswith("<Checkpoint model.zt>")
    assert len(json.dumps(notebook)) < 30_000
    assert str(lab.root) not in json.dumps(notebook)


def test_what_is_in_names_does_nothing(page: Page, lab: Lab) -> None:
    path = "'hostile.safetensors', engine='safetensors'"
    outputs = run_cells(
        page,
        lab,
        f"import xarray as xr\nds = xr.open_dataset({path})\nds.ckpt",
        "explorer = ds.ckpt.explore()\nexplorer.selected = list(ds.variables)[0]\nexplorer",
        "import xckpt\nxckpt.read_index('hostile.safetensors')",
    )
    box = outputs[1].locator(".xckpt-explorer")
    rows = box.locator(".xckpt-list .xckpt-row .xckpt-name")
    shown = r"evil\u202egnp.weight\x1b[31m"
    expect(rows.nth(0)).to_have_text(HOSTILE)
    expect(rows.nth(1)).to_have_text(shown)
    expect(box.locator(".xckpt-title")).to_have_text(HOSTILE)
    for output in (outputs[0], outputs[2]):
        expect(output).to_contain_text(HOSTILE)
        expect(output).to_contain_text(shown)
    assert page.locator(".jp-Notebook img").count() == 0


def test_large_datasets_are_shown_as_their_summary_without_asking(page: Page, lab: Lab) -> None:
    path = "'hostile.safetensors', engine='safetensors'"
    outputs = run_cells(
        page,
        lab,
        f"import xarray as xr\nds = xr.open_dataset({path})\nds",
        "%unload_ext xckpt\nxr.set_options(display_style='text')\nds",
    )
    expect(outputs[0].get_by_text("602 tensors")).to_be_visible()
    expect(outputs[0].get_by_text("xckpt.summary-above")).to_be_visible()
    expect(outputs[1]).to_contain_text("xarray.Dataset")


def test_notebooks_that_are_not_trusted_show_the_same(page: Page, lab: Lab) -> None:
    html = render(
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
    found = re.findall(r'style="([^"]*)"', html)
    return [style.replace(" ", "").replace("&quot;", '"').rstrip(";") for style in found]
