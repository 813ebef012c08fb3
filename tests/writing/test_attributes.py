"""Attributes from any format to any other: preserved, or listed in one warning."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

from tests.writing.attributes import missing
from tests.writing.saved import ENGINES, OPTIONS
from xckpt import CheckpointWarning, UnsupportedError, formats, read_index
from xckpt.writing import append, convert, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xckpt.index import Index

# Attributes that formats define, and attributes that only users set.
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
def _all_names_are_told(all_names_in_warnings: None) -> None:
    """Compare all of them."""


def rich(engine: str) -> xr.Dataset:
    w = np.arange(6, dtype="f4").reshape(2, 3)
    variables: dict[str, Any] = {
        "a.w": (("o", "i"), w, OF_TENSORS),
        "b": ("i", w[0], {"note": "y", "param_id": 2**63 + 1}),
    }
    return xr.Dataset(variables, attrs=OF_THE_FILE | OWN.get(engine, {}))


def warning_of(function: Callable[..., object], *args: Any, **options: Any) -> str:
    """Call what writes, and give the one warning, if there is one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **options)
    texts = [str(warning.message) for warning in caught if warning.category is CheckpointWarning]
    assert len(texts) <= 1, "one warning has it all"
    return "".join(texts)


def index_of(ds: xr.Dataset) -> Any:
    """Give attributes as an index has them."""
    return SimpleNamespace(attrs=ds.attrs, tensors=dict(ds.variables))


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_that_a_user_sets_is_lost_silently(engine: str, tmp_path: Path) -> None:
    ds = rich(engine)
    text = warning_of(save, ds, tmp_path / "m", engine, **OPTIONS.get(engine, {}))
    assert missing(index_of(ds), read_index(tmp_path / "m"), text) == []


@pytest.mark.parametrize("old", ENGINES)
@pytest.mark.parametrize("new", ENGINES)
def test_nothing_is_lost_silently_between_two_formats(old: str, new: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    warning_of(save, rich(old), first, old, **OPTIONS.get(old, {}))
    text = warning_of(convert, first, second, new, **OPTIONS.get(new, {}))
    before: Index = read_index(first)
    after = read_index(second)
    assert set(before.tensors) == set(after.tensors)
    assert missing(before, after, text) == []
    if old == new:
        assert text == ""
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("new", ENGINES)
def test_warnings_list_only_lost_attributes(new: str, tmp_path: Path) -> None:
    text = warning_of(save, rich(new), tmp_path / "m", new, **OPTIONS.get(new, {}))
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
    warning_of(save, rich(engine), tmp_path / "m", engine)
    attrs = read_index(tmp_path / "m").attrs
    assert (attrs["number"], attrs["yes"], attrs["nothing"]) == (7, True, None)
    assert b"true" in (tmp_path / "m").read_bytes()  # which other readers see as text
    assert (attrs["licence"], attrs["empty"]) == ("MIT", "")


class TestStatedAttributes:
    """Attributes that a file states itself are stated anew; changes by the user cause a warning."""

    def saved(self, engine: str, tmp_path: Path) -> xr.Dataset:
        warning_of(save, rich(engine), tmp_path / "old", engine, **OPTIONS.get(engine, {}))
        return xr.open_dataset(tmp_path / "old", engine=engine)

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("loaded", [False, True])
    def test_a_tensor_more_under_another_name_is_no_loss(
        self, engine: str, loaded: bool, tmp_path: Path
    ) -> None:
        ds = self.saved(engine, tmp_path).rename({"b": "c"})
        ds = (ds.load() if loaded else ds).assign(more=ds["c"] * 2)
        assert warning_of(save, ds, tmp_path / "new", engine, **OPTIONS.get(engine, {})) == ""

    @pytest.mark.parametrize("engine", ENGINES)
    def test_changed_attributes_cause_a_warning(self, engine: str, tmp_path: Path) -> None:
        ds, can = self.saved(engine, tmp_path), formats.get(engine).can
        of_file = can.file_attrs if isinstance(can.file_attrs, tuple) else ()
        stated = {*can.stated_attrs, *of_file, *(can.tensor_attrs or ())}
        for key in stated.intersection({*ds.attrs, *ds["b"].attrs}):
            changed = ds.copy()
            for attrs in (changed.attrs, changed["b"].attrs):
                attrs |= {key: "mine"} if key in attrs else {}  # noqa: PLW2901
            with suppress(UnsupportedError):
                text = warning_of(save, changed, tmp_path / key, engine, **OPTIONS.get(engine, {}))
                lost = missing(index_of(changed), read_index(tmp_path / key), text)
                assert not [line for line in lost if line.startswith(repr(key))]

    def test_the_warning_states_the_change(self, tmp_path: Path) -> None:
        w = xr.Variable("n", np.ones(2, "f4"), {"base_id": "mine"})
        ds = xr.Dataset({"w": w}, attrs={"kind": "gpt", "config": {}, "ids": "mine"})
        text = warning_of(save, ds, tmp_path / "m", "gptrs")
        assert "attributes of the file without a place: 'ids'" in text
        assert "attributes of tensors that the file states otherwise: 'base_id'" in text

    def test_an_option_replaces_an_attribute(self, tmp_path: Path) -> None:
        ds = xr.Dataset({"w": ("n", np.ones(2, "f4"))}, attrs={"kind": "gpt", "config": {}})
        assert warning_of(save, ds, tmp_path / "m", "gptrs", kind="mlp") == ""
        assert read_index(tmp_path / "m").attrs["kind"] == "mlp"

    def test_appending_keeps_stated_attributes(self, tmp_path: Path) -> None:
        ds = xr.Dataset({"w": ("n", np.ones(2, "f4"))})
        save(ds, tmp_path / "m.zt")
        more = ds.rename(w="v").assign_attrs(generator="mine", note="x")
        text = warning_of(append, more, tmp_path / "m.zt")
        assert "'generator'" in text
        assert "'note'" not in text

    def test_compressed_and_sharded_files(self, tmp_path: Path) -> None:
        w = xr.Variable("n", np.ones(2000, "f4"), {"type": "mine", "note": "x"})
        ds = xr.Dataset({"v": w, "w": w}, coords={"n": np.arange(2000)}, attrs={"total_size": 1})
        encoding = {"*": {"compression": "zstd", "digest": "sha256"}}
        for version in ("1.0", "2"):
            path = tmp_path / f"{version}.zt"
            text = warning_of(save, ds, path, encoding=encoding, version=version)
            assert missing(index_of(ds), read_index(path), text) == []
        text = warning_of(save, ds, tmp_path / "m.safetensors", max_shard_size=9000)
        assert "'total_size'" in text
        again = xr.open_dataset(tmp_path / "m.safetensors.index.json", engine="safetensors")
        assert again["w"].attrs == w.attrs
        assert list(again.coords) == ["n"]
