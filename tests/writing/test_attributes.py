"""Attributes from any format to any other: kept, or listed in one warning."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.writing.attributes import missing
from tests.writing.saved import ENGINES, OPTIONS
from xckpt import CheckpointWarning, formats, read_index
from xckpt.writing import convert, fitting, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xckpt.index import Index

# What each format has of its own, and what only users have.
OF_THE_FILE: dict[str, Any] = {
    "licence": "MIT",
    "empty": "",
    "ünï": "ç \n\t \x01",
    "number": 7,
    "large": 2**53,
    "float": 0.1,
    "yes": True,
    "nothing": None,
    "list": [1, "two", 3.5, [None, False]],
    "mapping": {"a": {"b": [1, 2]}, "c": "d"},
}
OWN: dict[str, dict[str, Any]] = {
    "gptrs": {"kind": "gpt", "config": {"num_layers": 1, "extra": [1, 2]}},
    "mlcp": {"version": "1.2.0", "training": {"epoch": 3}, "customFields": {"a": "b"}},
}
OF_TENSORS: dict[str, Any] = {
    "param_id": 12345,
    "requires_grad": True,
    "rank": 0,
    "note": "x",
    "sizes": [1, 2],
}


@pytest.fixture(autouse=True)
def _all_names_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_SHOWN_NAMES", 1000)


def rich(engine: str) -> xr.Dataset:
    w = np.arange(6, dtype="f4").reshape(2, 3)
    variables: dict[str, Any] = {
        "a.w": (("o", "i"), w, OF_TENSORS),
        "b": ("i", w[0], {"note": "y", "param_id": 2**63 + 1}),
    }
    return xr.Dataset(variables, attrs=OF_THE_FILE | OWN.get(engine, {}))


def told(function: Callable[..., object], *args: Any, **options: Any) -> str:
    """Call what writes, and give the one warning, if there is one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **options)
    texts = [str(each.message) for each in caught if each.category is CheckpointWarning]
    assert len(texts) <= 1, "one warning has it all"
    return "".join(texts)


def index_of(ds: xr.Dataset) -> Any:
    """Give attributes as an index has them."""
    return SimpleNamespace(attrs=ds.attrs, tensors=dict(ds.variables))


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_that_a_user_sets_is_lost_silently(engine: str, tmp_path: Path) -> None:
    ds = rich(engine)
    text = told(save, ds, tmp_path / "m", engine, **OPTIONS.get(engine, {}))
    assert missing(index_of(ds), read_index(tmp_path / "m"), text) == []


@pytest.mark.parametrize("old", ENGINES)
@pytest.mark.parametrize("new", ENGINES)
def test_nothing_is_lost_silently_between_two_formats(old: str, new: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    told(save, rich(old), first, old, **OPTIONS.get(old, {}))
    text = told(convert, first, second, new, **OPTIONS.get(new, {}))
    before: Index = read_index(first)
    after = read_index(second)
    assert set(before.tensors) == set(after.tensors)
    assert missing(before, after, text) == []
    if old == new:
        assert text == ""
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("new", ENGINES)
def test_only_what_has_no_place_is_told(new: str, tmp_path: Path) -> None:
    text = told(save, rich(new), tmp_path / "m", new, **OPTIONS.get(new, {}))
    can = formats.writable(new).can
    for places, attrs in [
        (can.file_attrs, OF_THE_FILE | OWN.get(new, {})),
        (None if can.arrangement else can.tensor_attrs, OF_TENSORS),
    ]:
        for name in attrs:
            assert (repr(name) in text) == (not has_place(name, places))


def has_place(name: str, places: tuple[str, ...] | re.Pattern[str] | None) -> bool:
    if isinstance(places, re.Pattern):
        return places.fullmatch(name) is not None
    return places is None or name in places


@pytest.mark.parametrize("engine", ["safetensors", "burnpack"])
def test_formats_of_texts_have_json(engine: str, tmp_path: Path) -> None:
    told(save, rich(engine), tmp_path / "m", engine)
    attrs = read_index(tmp_path / "m").attrs
    assert (attrs["number"], attrs["yes"], attrs["nothing"]) == (7, True, None)
    assert b"true" in (tmp_path / "m").read_bytes()  # which other readers see as text
    assert (attrs["licence"], attrs["empty"]) == ("MIT", "")
