"""Finished numbers that are kept: a repeated call computes nothing, and believes no nonsense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.stats.checkpoints import model, settled, write
from tests.stats.test_plausible import joined, of_all_types, payloads
from tests.stats.test_plausible import settled as saved
from xckpt.statistics import api, bins, differences, results

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return settled(write(tmp_path / "m.safetensors", model()))


@pytest.fixture
def worked_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect which tensors are looked at, be it their elements or their sketches."""
    names: list[str] = []

    def noting(gather: Any) -> Any:
        def wrapped(readers: Any, *args: Any, **kwargs: Any) -> Any:
            names.extend(reader.name for reader in readers)
            return gather(readers, *args, **kwargs)

        return wrapped

    for module in (api, bins, differences):
        monkeypatch.setattr(module, "gather", noting(module.gather))
    return names


def calls(path: Path, other: Path) -> list[Callable[[], xr.Dataset]]:
    return [
        lambda: xckpt.stats(path),
        lambda: xckpt.stats(path, quantiles=[0.9, 0.1]),
        lambda: xckpt.stats(path, exact_quantiles=True),
        lambda: xckpt.histogram(path),
        lambda: xckpt.histogram(path, [-1.0, 0.0, 1.0]),
        lambda: xckpt.compare(path, other),
    ]


def test_a_repeated_call_computes_nothing(tmp_path: Path, worked_on: list[str]) -> None:
    tensors = of_all_types()
    path = saved(tmp_path / "a.safetensors", tensors)
    others = {name: values[::-1].copy() for name, values in tensors.items()}
    other = saved(tmp_path / "b.safetensors", others)
    for number, call in enumerate(calls(path, other)):
        first = call()
        assert worked_on, number
        worked_on.clear()
        xr.testing.assert_identical(call(), first)
        assert worked_on == [], number


def test_nor_does_one_for_some_of_the_tensors(path: Path, worked_on: list[str]) -> None:
    ds = xr.open_dataset(path, engine="safetensors")
    first = xckpt.stats(ds)
    worked_on.clear()
    some = ds.ckpt.find("layers.*")
    xr.testing.assert_identical(
        xckpt.stats(some).drop_attrs(), first[list(some.data_vars)].drop_attrs()
    )
    stacked = ds.ckpt.stack()
    again = xckpt.stats(stacked)["layers.w"].sel(layers=2)
    np.testing.assert_array_equal(again.values, first["layers.2.w"].values)
    assert ds.ckpt.findings(xckpt.stats(ds)).equals(xckpt.findings(first))
    assert worked_on == []


def test_only_new_tensors_are_computed(path: Path, worked_on: list[str]) -> None:
    ds = xr.open_dataset(path, engine="safetensors")
    xckpt.stats(ds[["embed", "mask"]])
    worked_on.clear()
    xckpt.stats(ds)
    assert set(worked_on) == set(ds.data_vars) - {"embed", "mask"}


def test_a_changed_file_has_other_numbers(path: Path, worked_on: list[str]) -> None:
    before = xckpt.stats(path)
    settled(write(path, model(seed=1)), 30)
    worked_on.clear()
    after = xckpt.stats(path)
    assert len(worked_on) == len(model())
    assert not after["embed"].equals(before["embed"])


def test_where_nothing_can_be_written_they_stay_in_memory(
    path: Path, worked_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCKPT_CACHE_DIR", "/dev/null/nowhere")
    first = xckpt.stats(path)
    worked_on.clear()
    xr.testing.assert_identical(xckpt.stats(path), first)
    assert worked_on == []
    xckpt.stats(path, cache=False)
    assert worked_on


def test_what_may_change_unseen_is_not_kept(path: Path, worked_on: list[str]) -> None:
    data = bytearray(path.read_bytes())
    for changed in (False, True):
        if changed:
            data[-4:] = bytes(4)
        worked_on.clear()
        xckpt.stats(bytes(data))
        assert len(worked_on) == len(model())


def test_memory_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XCKPT_CACHE_DIR", "/dev/null/nowhere")
    monkeypatch.setattr(results, "_LARGEST_SESSION", 4000)
    for number in range(5):
        xckpt.stats(path, quantiles=[0.1 * number])
    assert sum(len(row) for rows in results._session.values() for row in rows.values()) <= 4000


def kept(cache_folder: Path) -> Path:
    (path,) = (cache_folder / results.FOLDER).iterdir()
    return path


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "empty"])
def test_damaged_files_are_ignored(
    path: Path, damage: str, cache_folder: Path, worked_on: list[str]
) -> None:
    first = xckpt.stats(path)
    stored = kept(cache_folder)
    data = bytearray(stored.read_bytes())
    if damage == "cut":
        data = data[: len(data) * 2 // 3]
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF
    else:
        data = bytearray(b"something else" if damage == "foreign" else b"")
    stored.write_bytes(data)
    xr.testing.assert_identical(xckpt.stats(path), first)
    worked_on.clear()
    xr.testing.assert_identical(xckpt.stats(path), first)
    assert worked_on == []


def test_rows_that_cannot_be_true_are_not_believed(path: Path, cache_folder: Path) -> None:
    first = xckpt.stats(path)
    names = [*first["statistic"].values.tolist(), "dead"]
    stored = kept(cache_folder)
    ((key, data),) = payloads(stored.read_bytes())
    each = 16 + 8 * len(names)
    count = len(data) // each
    table = np.frombuffer(data[16 * count :]).reshape(count, len(names))
    at = next(i for i, row in enumerate(table) if row[0] == 64 * 32)
    # Others have no bounds that follow from the rest.
    bounded = [name for name in names if name not in {"skew", "kurtosis", "dead", "unique"}]
    changes = dict.fromkeys(bounded, (np.nan, -9.0, np.inf, 1000000000.0))
    for name, values in (changes | dict.fromkeys(("dead", "unique"), (-1.0, 0.5, 1e9))).items():
        for value in values:
            forged = table.copy()
            forged[at, names.index(name)] = value
            stored.write_bytes(joined([(key, data[: 16 * count] + forged.tobytes())]))
            xr.testing.assert_identical(xckpt.stats(path), first)
