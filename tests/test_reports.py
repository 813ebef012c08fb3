"""Reports: a single file that runs nothing, whatever the names."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
from safetensors.numpy import save_file

import xckpt
from tests.hostile_names import HOSTILE
from xckpt.cli import main
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOID = {"meta", "br", "img", "wbr", "hr", "input", "link"}


class Page(HTMLParser):
    """The elements of a page, which is well-formed, and its text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def require_inert(page: Page) -> None:
    """Nothing runs, and nothing is requested."""
    for tag, attrs in page.elements:
        assert tag not in {"script", "iframe", "object", "embed", "link", "base", "form", "a"}
        assert not [name for name in attrs if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "data", "action", "srcset"):
            assert (attrs.get(name) or "#").startswith(("#", "data:image/png;base64,"))
    (policy,) = [a["content"] for t, a in page.elements if a.get("http-equiv")]
    assert policy is not None
    assert "default-src 'none'" in policy


@pytest.fixture
def model(tmp_path: Path) -> xr.Dataset:
    path = write_checkpoint(tmp_path / "m.zt", layers=4, width=16)
    return xr.open_dataset(path, engine="ztensor")


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    def write(ds: xr.Dataset, *args: Any, suffix: str = ".html", **options: Any) -> str:
        path = tmp_path / f"report{suffix}"
        ds.ckpt.report(path, *args, overwrite=True, **options)
        return path.read_text("utf-8")

    return write


def tuned(model: xr.Dataset) -> xr.Dataset:
    name = "model.layers.2.mlp.gate_proj.weight"
    return model.drop_vars("lm_head.weight").assign({name: model[name] * 1.5})


class TestSingleCheckpoint:
    """A report on one checkpoint: contents, findings, and statistics of layers."""

    @pytest.mark.parametrize("suffix", [".html", ".md"])
    def test_report_lists_findings(
        self, suffix: str, model: xr.Dataset, report: Callable[..., str]
    ) -> None:
        text = report(model, suffix=suffix)
        findings = model.ckpt.findings(stats=model.ckpt.stats())
        assert not findings.empty
        for rule in set(findings.rule):
            assert rule in text.replace("\\", "")
        assert "m.zt" in text
        assert "65 tensors" in re.sub(r"<.*?>", "", text) or "45 tensors" in text
        assert "model.layers.{0..3}.mlp.gate_proj.weight" in text.replace("<wbr>", "")

    def test_report_has_statistics_of_layers(
        self, model: xr.Dataset, report: Callable[..., str]
    ) -> None:
        std = model.ckpt.stats().ckpt.table()["std"]
        name = "model.layers.{}.self_attn.q_proj.weight"
        values = [std[name.format(layer)] for layer in range(4)]
        of_std, of_absmax = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in report(model, suffix=".md").splitlines()
            if line.startswith(f"| `{name.format('{0..3}')}` | 4 |")
        ]
        expected = [values[0], np.median(values), values[-1]]
        assert of_std[2:5] == [f"{value:.3g}" for value in expected]
        low, high = int(np.argmin(values)), int(np.argmax(values))
        assert of_std[5:7] == [f"{values[low]:.3g}", f"layer {low}"]
        assert of_std[7:] == [f"{values[high]:.3g}", f"layer {high}"]
        assert len(of_absmax) == len(of_std)

    def test_a_dead_expert_is_the_lowest(self, report: Callable[..., str]) -> None:
        rng = np.random.default_rng(0)
        tensors = {
            f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": (
                ("a", "b"),
                rng.normal(0, 1e-4 if (layer, expert) == (3, 5) else 0.02, (16, 16)).astype("f4"),
            )
            for layer in range(6)
            for expert in range(8)
        }
        text = report(xr.Dataset(tensors), suffix=".md").replace("\\", "")
        assert "First, median and last layer: median over experts." in text
        text = text[text.index("Along the layers") :]
        (row, _) = [line for line in text.splitlines() if line.startswith("| `model.layers.{0..5}")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        lowest = float(tensors["model.layers.3.mlp.experts.5.up_proj.weight"][1].std())
        assert cells[5:7] == [f"{lowest:.3g}", "layer 3, expert 5"]
        assert all(len(re.sub(r"e.*|^-?0?\.?0*|\.", "", cell)) <= 3 for cell in cells[2:6])

    def test_layers_are_counted_by_the_outermost_number(self, report: Callable[..., str]) -> None:
        tensors = {
            f"blocks.{outer}.layers.{middle}.blocks.{inner}.w": ("x", np.arange(1.0, 9) + outer)
            for outer in range(4)
            for middle in range(3)
            for inner in range(3)
        }
        text = report(xr.Dataset(tensors), suffix=".md")
        assert "| `blocks.{0..3}.layers.{0..2}.blocks.{0..2}.w` | 4 |" in text

    def test_names_break_between_words(self, report: Callable[..., str]) -> None:
        name = "transformer.layers.{}.feed_forward.post_attention_layernorm.weight"
        tensors = {name.format(n): ("x", np.arange(1.0, 9) * (n + 1)) for n in range(4)}
        page = report(xr.Dataset(tensors))
        broken = name.format("{0..3}").replace(".{", ".<wbr>{").replace("}.", "}.<wbr>")
        for word in ("layers", "post_attention_layernorm", "weight"):
            broken = broken.replace(f".{word}", f".<wbr>{word}")
        assert f">{broken}</td>" in page
        assert "overflow-wrap:anywhere}.t code" not in page

    def test_report_has_pictures_and_is_inert(
        self, model: xr.Dataset, report: Callable[..., str]
    ) -> None:
        page = Page(report(model))
        require_inert(page)
        assert len([tag for tag, _ in page.elements if tag == "svg"]) == 2

    def test_report_is_written_without_matplotlib(
        self, model: xr.Dataset, report: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        page = Page(report(model))
        assert not [tag for tag, _ in page.elements if tag == "svg"]
        assert "Along the layers" in page.text

    def test_report_is_reproducible(self, model: xr.Dataset, report: Callable[..., str]) -> None:
        assert report(model) == report(model)

    def test_report_without_findings(self, report: Callable[..., str]) -> None:
        text = report(xr.Dataset({"w": ("x", np.arange(9, dtype="f4"))}), suffix=".md")
        assert "Nothing looks wrong." in text
        assert "Along the layers" not in text


class TestComparison:
    """A report on two checkpoints: changes, and the largest ones first."""

    @pytest.mark.parametrize("suffix", [".html", ".md"])
    def test_report_starts_with_the_largest_changes(
        self, suffix: str, model: xr.Dataset, report: Callable[..., str]
    ) -> None:
        text = report(model, tuned(model), suffix=suffix, explain=False)
        if suffix == ".html":
            page = Page(text)
            require_inert(page)
            text = page.text
        count = len(model)
        assert f"{count} tensors: {count - 2} the same, 1 changed, 1 only in m.zt." in text
        assert "0.5" in text

    @pytest.mark.parametrize("explain", [True, False])
    def test_report_explains_changes(
        self, explain: bool, model: xr.Dataset, report: Callable[..., str]
    ) -> None:
        norm = "model.norm.weight"
        changed = model.assign({norm: model[norm] + 1}).rename({"lm_head.weight": "output"})
        text = report(model, changed, suffix=".md", names="auto", explain=explain)
        assert ("## Causes" in text) == explain
        row = f"| `{norm}` | changed | {'offset | b is a + 1 | ' if explain else ''}"
        assert row in re.sub(r"` \| `.*?` \| ", "` | ", text)

    def test_report_on_equal_checkpoints(
        self, model: xr.Dataset, report: Callable[..., str]
    ) -> None:
        assert "Nothing: all elements are equal." in report(model, model, suffix=".md")

    def test_report_on_unrelated_checkpoints(
        self, model: xr.Dataset, report: Callable[..., str]
    ) -> None:
        unrelated = xr.Dataset({"z": ("x", np.ones(3, "f4"))})
        text = report(model, unrelated, suffix=".md")
        assert "1 only in the second." in text
        assert "Nothing: no tensor is in both." in text

    @pytest.mark.parametrize("explain", [True, False])
    def test_report_on_checkpoints_that_differ_in_tensors_of_one_side(
        self, explain: bool, report: Callable[..., str]
    ) -> None:
        both = xr.Dataset({f"w{n}": (f"x{n}", np.arange(9.0) + n) for n in range(3)})
        text = report(both, both.drop_vars("w0"), suffix=".md", explain=explain)
        assert "Nothing: tensors in both are equal or explained." in text

    def test_attributes_follow_the_differences_of_tensors(
        self, model: xr.Dataset, report: Callable[..., str], tmp_path: Path
    ) -> None:
        xckpt.save(tuned(model).assign_attrs(note="new"), tmp_path / "tuned.zt")
        text = report(model, tmp_path / "tuned.zt", suffix=".md")
        assert text.index("| difference |") < text.index("## Attributes")

    def test_report_on_a_path(
        self, model: xr.Dataset, report: Callable[..., str], tmp_path: Path
    ) -> None:
        assert "all elements are equal" in report(model, tmp_path / "m.zt")
        assert "all elements are equal" in report(model, xckpt.read_index(tmp_path / "m.zt"))


class TestResults:
    """A result is no checkpoint: the error has the call that writes a report on its checkpoints."""

    @pytest.mark.parametrize("suffix", [".html", ".md"])
    def test_report_on_a_result(self, suffix: str, model: xr.Dataset, tmp_path: Path) -> None:
        path, source = tmp_path / f"r{suffix}", str(tmp_path / "m.zt")
        stats = model.ckpt.stats()
        of_one = re.escape(f"xckpt.report({source!r}, {str(path)!r})")
        for result in (
            stats,
            model.ckpt.spectrum(),
            model.ckpt.histogram(),
            stats.ckpt.by("layer"),
        ):
            with pytest.raises(ValueError, match=of_one):
                result.ckpt.report(path)
        of_two = re.escape(f"xckpt.report({source!r}, {str(path)!r}, {source!r})")
        comparison = model.ckpt.compare(tmp_path / "m.zt")
        with pytest.raises(ValueError, match=of_two):
            comparison.ckpt.report(path)
        with pytest.raises(ValueError, match=of_two):
            model.ckpt.report(path, comparison)
        assert not path.exists()

    def test_report_on_a_result_of_arrays_in_memory(self, tmp_path: Path) -> None:
        ds = xr.Dataset({"w": ("x", np.ones(3, "f4"))})
        with pytest.raises(ValueError, match=r"xckpt\.report\(checkpoint, '.*r\.md'\)"):
            xckpt.report(ds.ckpt.stats(), tmp_path / "r.md")


class TestHostileNames:
    """Hostile names are shown and not interpreted as markup."""

    @pytest.fixture
    def hostile(self) -> xr.Dataset:
        names = [f"layers.{layer}.{name}" for layer in range(3) for name in (*HOSTILE, "a|`b``")]
        values = np.array([np.nan, 1.0, 2.0], np.float32)
        ds = xr.Dataset({name: ("x", values * (n + 1)) for n, name in enumerate(names)})
        return ds.assign_attrs({name: name for name in HOSTILE})

    def test_a_page_breaks_long_words(
        self, hostile: xr.Dataset, report: Callable[..., str]
    ) -> None:
        body = report(hostile).partition("body{")[2].partition("}")[0]
        assert "overflow-wrap:break-word" in body

    def test_hostile_names_in_html(self, hostile: xr.Dataset, report: Callable[..., str]) -> None:
        for page in (Page(report(hostile)), Page(report(hostile, hostile * 2))):
            require_inert(page)
            assert "<img src=x onerror=alert(1)>" in page.text
            assert not [tag for tag, attrs in page.elements if attrs.get("src") == "x"]
            assert not set(page.text) & {"\x1b", "\u202e", "\x07", "\r"}

    def test_hostile_names_in_markdown(
        self, hostile: xr.Dataset, report: Callable[..., str]
    ) -> None:
        text = report(hostile, hostile * 2, suffix=".md")
        outside = re.sub(r"(?s)```text.*?```", "", text)
        assert "<img" not in re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", outside)
        # As many cells as there are columns.
        (head,) = [line for line in outside.splitlines() if line.startswith("| tensor | status")]
        cut = re.compile(r"(?<!\\)\|")
        lines = outside[outside.index(head) :].splitlines()
        rows = [line for line in lines if line.startswith("| `") and "changed" in line]
        assert len(rows) == len(hostile)
        assert {len(cut.split(row)) for row in rows} == {len(cut.split(head))}


class TestReportFile:
    """The file of a report is complete or absent, and small; unwritable paths raise at once."""

    def test_report_is_replaced_only_on_request(self, model: xr.Dataset, tmp_path: Path) -> None:
        path = tmp_path / "r.html"
        path.write_text("mine")

        def stop(*_: int) -> None:
            raise AssertionError  # nothing is computed

        with pytest.raises(FileExistsError):
            model.ckpt.report(path, progress=stop)
        with pytest.raises(FileNotFoundError):
            model.ckpt.report(tmp_path / "absent" / "r.html", progress=stop)
        with pytest.raises(ValueError, match=r"ends in one of \.html, .*unlike '.*r\.pdf'"):
            model.ckpt.report(tmp_path / "r.pdf", progress=stop)
        with pytest.raises(AssertionError):
            model.ckpt.report(path, overwrite=True, progress=stop, cache=False)
        assert path.read_text() == "mine"
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.zt", "r.html"]

    def test_report_on_many_tensors_is_small(
        self, tmp_path: Path, report: Callable[..., str]
    ) -> None:
        names = [f"a.{n}.{'x' * 300}.w{kind}" for n in range(10) for kind in range(50)]
        for file, value in {"a": np.nan, "b": np.inf}.items():
            tensors = {name: np.array([1.0, value], np.float32) for name in names}
            save_file(tensors, tmp_path / f"{file}.safetensors")
        ds = xr.open_dataset(tmp_path / "a.safetensors", engine="safetensors")
        for suffix in (".html", ".md"):
            assert len(report(ds, suffix=suffix).encode()) < 250_000
            second = tmp_path / "b.safetensors"
            assert len(report(ds, second, suffix=suffix, explain=False).encode()) < 250_000


def test_the_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_checkpoint(tmp_path / "m.zt", layers=3, width=16))
    weights = xr.open_dataset(path, engine="ztensor").ckpt.find("*.weight").drop_attrs()
    weights.ckpt.save(tmp_path / "n.npz")
    new = tmp_path / "r.md"
    assert main(["report", path, "-o", str(new)]) == 0
    assert new.read_text("utf-8").startswith("# m.zt\n")
    assert main(["report", path, str(tmp_path / "n.npz"), "-o", str(new)]) == 2
    assert "already exists; replace it with --overwrite" in capsys.readouterr().err
    arguments = [str(tmp_path / "n.npz"), "-o", str(new), "--overwrite", "--tensors", "*norm*"]
    assert main(["report", path, *arguments]) == 0
    assert new.read_text("utf-8").startswith("# m.zt compared with n.npz\n")
    assert main(["report", path, "-o", "r.pdf"]) == 2
    assert "a report ends in one of" in capsys.readouterr().err
