"""The IPython extension shows large checkpoints as summaries and other objects as before."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr

pytest.importorskip("IPython", reason="the extension is one of IPython")

from IPython.core.completer import provisionalcompleter
from IPython.core.formatters import DisplayFormatter
from IPython.core.interactiveshell import InteractiveShell

import xckpt
from xckpt import registration
from xckpt.notebook.extension import load_ipython_extension, unload_ipython_extension

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGE, SMALL = 4, 3


class _Extensions:
    """The extensions that a session has loaded, as IPython keeps them."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.loaded: set[str] = set()

    def load_extension(self, name: str) -> None:
        self.loaded.add(name)
        sys.modules[name].load_ipython_extension(self.session)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Give a session without anything registered, in which small Datasets are large."""
    monkeypatch.setattr(registration, "is_extension_declined", False)
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    shell.extension_manager = _Extensions(shell)
    with dask.config.set({"xckpt.summary-above": SMALL}):
        yield shell


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extension")
    np.savez(folder / "m.npz", **{f"h.{n}.w": np.full(2, n, "f4") for n in range(LARGE)})  # type: ignore[arg-type]
    return folder / "m.npz"


@pytest.fixture
def ds(path: Path) -> xr.Dataset:
    return xr.open_dataset(path, engine="npz")


def html(session: Any, obj: object) -> str:
    shown: str = session.display_formatter.format(obj)[0]["text/html"]
    return shown


def text(session: Any, obj: object) -> str:
    shown: str = session.display_formatter.format(obj)[0]["text/plain"]
    return shown


def is_summary(session: Any, obj: object) -> bool:
    """Return whether an object is shown as a summary, with the hint that turns it off."""
    shown = [
        "4 tensors" in text(session, obj) and "shown as a summary" in text(session, obj),
        "4 tensors" in html(session, obj) and "shown as a summary" in html(session, obj),
    ]
    assert shown[0] == shown[1]
    if shown[0]:
        assert "dask.config.set({'xckpt.summary-above': None})" in text(session, obj)
        assert "xckpt.summary-above" in html(session, obj)
    else:
        assert text(session, obj) == repr(obj)
        assert "xarray" in html(session, obj)
    return shown[0]


def test_large_checkpoints_are_shown_as_their_summary(session: Any, path: Path) -> None:
    load_ipython_extension(session)
    assert is_summary(session, xr.open_dataset(path, engine="npz"))
    assert is_summary(session, xr.open_datatree(path, engine="npz"))


def test_computed_datasets_are_shown_as_summaries(session: Any, ds: xr.Dataset, path: Path) -> None:
    load_ipython_extension(session)
    for computed in (
        ds * 2,
        ds.map(np.abs),
        ds.astype("f8"),
        ds.isel(d2=0),
        ds.compute(),
        ds.copy(),
    ):
        assert is_summary(session, computed)
    assert is_summary(session, xr.open_datatree(path, engine="npz")["h"].copy())


def test_other_objects_are_shown_as_before(session: Any, ds: xr.Dataset) -> None:
    load_ipython_extension(session)
    unrelated = xr.Dataset({f"v{n}": ("x", np.zeros(2)) for n in range(LARGE)})
    for obj in (unrelated, unrelated.chunk(), xr.DataTree(unrelated), ds[["h.0.w"]], ds["h.0.w"]):
        assert not is_summary(session, obj)


def test_statistics_of_many_tensors_have_a_short_text(session: Any, ds: xr.Dataset) -> None:
    load_ipython_extension(session)
    result = ds.ckpt.stats(cache=False, progress=False)
    for shown in (text(session, result), html(session, result)):
        assert "ds.ckpt.table() is a DataFrame" in shown
    assert "white-space:pre-wrap" in html(session, result)


def test_the_option_sets_the_smallest_number_of_tensors(session: Any, ds: xr.Dataset) -> None:
    load_ipython_extension(session)
    for most in (None, False, LARGE):
        with dask.config.set({"xckpt.summary-above": most}):
            assert not is_summary(session, ds)


# --- loading -------------------------------------------------------------------------------------


def test_opening_a_checkpoint_loads_it(
    session: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: session)
    assert xckpt.load_ipython_extension is load_ipython_extension
    xr.open_dataset(path, engine="npz")
    assert session.extension_manager.loaded == {"xckpt"}
    assert is_summary(session, xr.open_dataset(path, engine="npz"))
    # An unloaded extension stays unloaded.
    session.extension_manager.loaded.clear()
    unload_ipython_extension(session)
    assert not is_summary(session, xr.open_dataset(path, engine="npz"))
    load_ipython_extension(session)
    assert is_summary(session, xr.open_dataset(path, engine="npz"))


def test_outside_of_ipython_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    registration.register_formatter()
    monkeypatch.delitem(sys.modules, "IPython")
    registration.register_formatter()
    assert "IPython" not in sys.modules


def test_unloading_leaves_nothing_behind(session: Any, ds: xr.Dataset) -> None:
    display = session.display_formatter
    formatters = [*display.formatters.values(), display.mimebundle_formatter]
    before = [dict(formatter.type_printers) for formatter in formatters]
    for _ in range(2):
        load_ipython_extension(session)
        load_ipython_extension(session)
        unload_ipython_extension(session)
        assert [formatter.type_printers for formatter in formatters] == before
    assert not is_summary(session, ds)
    unload_ipython_extension(session)


def test_formatters_for_a_mimetype_come_first(session: Any, ds: xr.Dataset) -> None:
    for kind in ("text/html", "image/png"):
        formatter = session.display_formatter.formatters[kind]
        formatter.for_type(xr.Dataset, lambda _: "registered")
    load_ipython_extension(session)
    for obj in (ds, ds[["h.0.w"]]):
        assert html(session, obj) == "registered"
    unload_ipython_extension(session)
    assert session.display_formatter.format(ds)[0]["image/png"] == "registered"


def test_formatters_registered_by_name_stay(session: Any, ds: xr.Dataset) -> None:
    bundles = session.display_formatter.mimebundle_formatter
    bundles.for_type_by_name(xr.Dataset.__module__, "Dataset", lambda _: {"text/html": "by name"})
    load_ipython_extension(session)
    assert html(session, ds[["h.0.w"]]) == "by name"
    assert is_summary(session, ds)
    unload_ipython_extension(session)
    assert html(session, ds) == "by name"


def test_formatters_of_a_base_class_stay(session: Any, ds: xr.Dataset) -> None:
    markdown = session.display_formatter.formatters["text/markdown"]
    markdown.for_type(object, lambda _: "any object")
    load_ipython_extension(session)
    assert session.display_formatter.format(ds[["h.0.w"]])[0]["text/markdown"] == "any object"
    unload_ipython_extension(session)
    assert set(markdown.type_printers) == {object}


def test_other_mimetypes_are_not_rendered(session: Any, ds: xr.Dataset) -> None:
    load_ipython_extension(session)
    ds["_repr_png_"] = ("x", [1.0])
    assert set(session.display_formatter.format(ds)[0]) == {"text/plain", "text/html"}


def test_later_formatters_stay(session: Any, ds: xr.Dataset) -> None:
    load_ipython_extension(session)
    bundles = session.display_formatter.mimebundle_formatter
    bundles.for_type(xr.Dataset, lambda _: {"text/html": "later"})
    unload_ipython_extension(session)
    assert html(session, ds) == "later"


# --- completion ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_jedi", [True, False])
def test_tab_completes_the_names_of_tensors(path: Path, *, use_jedi: bool) -> None:
    shell: Any = InteractiveShell()  # type: ignore[no-untyped-call]
    shell.push({"ds": xr.open_dataset(path, engine="npz")})
    shell.Completer.use_jedi = use_jedi

    def completions(text: str) -> list[str]:
        with provisionalcompleter():
            return [completion.text for completion in shell.Completer.completions(text, len(text))]

    load_ipython_extension(shell)
    assert completions('ds.ckpt["') == list(shell.user_ns["ds"].variables)
    assert any("stats" in name for name in completions("ds.ckpt.st"))
    unload_ipython_extension(shell)
    assert not set(completions('ds.ckpt["')) & set(shell.user_ns["ds"].variables)
