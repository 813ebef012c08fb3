"""``%load_ext`` changes how large Datasets of checkpoints are shown, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr

pytest.importorskip("IPython", reason="the extension is one of IPython")

from IPython.core.formatters import HTMLFormatter

from xckpt.notebook import extension
from xckpt.notebook.extension import load_ipython_extension, unload_ipython_extension


class _Accessor:
    """As ``ds.ckpt`` is, for Datasets that say they are of a checkpoint."""

    def __init__(self, ds: xr.Dataset) -> None:
        self.format = ds.encoding.get("format")

    def _repr_html_(self) -> str:
        return f"<p>{self.format}</p>"


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Give a session without anything registered, in which small Datasets are large."""
    monkeypatch.setattr(extension, "MOST_VARIABLES", 3)
    monkeypatch.setattr(xr.Dataset, "ckpt", property(_Accessor), raising=False)
    formatters = {"text/html": HTMLFormatter()}
    return SimpleNamespace(display_formatter=SimpleNamespace(formatters=formatters))


def dataset(count: int, ours: bool = True) -> xr.Dataset:  # noqa: FBT002  reads well here
    ds = xr.Dataset({f"v{n}": ("x", np.zeros(2)) for n in range(count)})
    ds.encoding["format"] = "ztensor" if ours else None
    return ds


def html(session: Any, obj: object) -> Any:
    return session.display_formatter.formatters["text/html"](obj)


def test_large_datasets_of_checkpoints_are_shown_as_the_summary(session: Any) -> None:
    load_ipython_extension(session)
    assert html(session, dataset(4)) == "<p>ztensor</p>"


def test_others_are_shown_as_before(session: Any) -> None:
    load_ipython_extension(session)
    for ds in (dataset(3), dataset(4, ours=False), dataset(4)["v0"]):
        assert "xarray" in html(session, ds)
        assert "<p>ztensor</p>" not in html(session, ds)


def test_unloading_leaves_nothing_behind(session: Any) -> None:
    printers = session.display_formatter.formatters["text/html"].type_printers
    for _ in range(2):
        load_ipython_extension(session)
        load_ipython_extension(session)
        assert xr.Dataset in printers
        unload_ipython_extension(session)
        assert xr.Dataset not in printers
    assert "xarray" in html(session, dataset(4))
    unload_ipython_extension(session)


def test_what_was_registered_before_stays_in_use(session: Any) -> None:
    formatter = session.display_formatter.formatters["text/html"]

    def before(_: object) -> str:
        return "before"

    formatter.for_type(xr.Dataset, before)
    load_ipython_extension(session)
    assert html(session, dataset(3)) == "before"
    assert html(session, dataset(4)) == "<p>ztensor</p>"
    unload_ipython_extension(session)
    assert formatter.type_printers[xr.Dataset] is before


def test_what_was_registered_by_name_stays_in_use(session: Any) -> None:
    formatter = session.display_formatter.formatters["text/html"]
    formatter.for_type_by_name(xr.Dataset.__module__, "Dataset", lambda _: "by name")
    load_ipython_extension(session)
    assert html(session, dataset(3)) == "by name"
    unload_ipython_extension(session)
    assert html(session, dataset(4)) == "by name"


def test_what_was_registered_for_a_base_class_stays_there(session: Any) -> None:
    formatter = session.display_formatter.formatters["text/html"]
    formatter.for_type(object, lambda _: "any object")
    load_ipython_extension(session)
    assert html(session, dataset(3)) == "any object"
    unload_ipython_extension(session)
    assert set(formatter.type_printers) == {object}


def test_what_was_registered_later_is_not_undone(session: Any) -> None:
    load_ipython_extension(session)
    formatter = session.display_formatter.formatters["text/html"]
    formatter.for_type(xr.Dataset, lambda _: "later")
    unload_ipython_extension(session)
    assert html(session, dataset(4)) == "later"
