"""Attributes in NumPy archives are invisible to other readers and harmless if malformed."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.errors import UnreadableWarning
from xckpt.formats import archive
from xckpt.storage import open_source

if TYPE_CHECKING:
    from pathlib import Path

EXTRA = b"PK\6\x08"


@pytest.fixture
def ds() -> xr.Dataset:
    return xr.Dataset(
        {"w": (("x", "y"), np.arange(6.0).reshape(2, 3), {"unit": "m"})},
        {"x": ("x", np.array([3, 5]))},
        {"step": 7, "tokens": ["a"] * 30_000},
    )


@pytest.fixture
def path(ds: xr.Dataset, tmp_path: Path) -> Path:
    xckpt.save(ds, tmp_path / "m.npz")
    return tmp_path / "m.npz"


def test_numpy_ignores_the_attributes(ds: xr.Dataset, path: Path) -> None:
    assert EXTRA in path.read_bytes()
    with np.load(path, allow_pickle=False) as archive:
        assert archive.files == ["w", "x"]
        np.testing.assert_array_equal(archive["w"], ds["w"])
    with zipfile.ZipFile(path) as found_zip:
        assert found_zip.testzip() is None
        assert found_zip.comment == b""


def test_files_without_attributes_have_no_extra_member(tmp_path: Path) -> None:
    xckpt.save(xr.Dataset({"w": ("x", np.ones(3))}), tmp_path / "m.npz")
    assert EXTRA not in (tmp_path / "m.npz").read_bytes()


def test_attributes_without_tensors(tmp_path: Path) -> None:
    with pytest.warns(xckpt.CheckpointWarning, match="it has no tensors"):
        xckpt.save(xr.Dataset(attrs={"step": 7}), tmp_path / "m.npz")
    xr.testing.assert_identical(xr.open_dataset(tmp_path / "m.npz"), xr.Dataset(attrs={"step": 7}))


def test_a_single_array_has_no_room(ds: xr.Dataset, tmp_path: Path) -> None:
    with pytest.warns(xckpt.CheckpointWarning, match="attributes"):
        xckpt.save(ds[["w"]].drop_vars("x"), tmp_path / "w.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), ds["w"])


@pytest.mark.parametrize(
    "extra",
    [b"", b"{", b"[" * 100_000, b'{"a": 1}', b"[]", b"\xff", b'{"xckpt.arrangement": "["}'],
)
@pytest.mark.filterwarnings("ignore:.*is malformed:xckpt.CheckpointWarning")
def test_foreign_records_are_ignored(path: Path, extra: bytes) -> None:
    ds = xr.open_dataset(replaced(path.read_bytes(), EXTRA + struct.pack("<I", len(extra)) + extra))
    assert set(ds.variables) == {"w", "x"}
    assert ds.attrs == {}


@pytest.mark.parametrize("record", [EXTRA, EXTRA + b"\xff\xff\xff\xff{}", b"PK\7\x08" + bytes(12)])
def test_malformed_records_are_ignored(path: Path, record: bytes) -> None:
    ds = xr.open_dataset(replaced(path.read_bytes(), record))
    assert set(ds.variables) == {"w", "x"}
    assert ds.attrs == {}


def replaced(data: bytes, record: bytes) -> Any:
    """Put something else in the place of the extra data of an archive."""
    start = data.index(EXTRA)
    directory = archive.Archive(open_source(data)).start
    end = bytearray(data[directory:])
    end[-6:-2] = struct.pack("<I", start + len(record))
    return io.BytesIO(data[:start] + record + bytes(end))


@pytest.mark.parametrize("nbytes", [469, 470, 600, 65_000])
@pytest.mark.parametrize("suffix", ["", ".npy"])
def test_long_names_of_first_members(nbytes: int, suffix: str, tmp_path: Path) -> None:
    name = "n" * nbytes
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        file = io.BytesIO()
        np.save(file, np.arange(3))
        archive.writestr(name + suffix, file.getvalue())
    ds = xr.open_dataset(tmp_path / "m.npz")
    assert ds.encoding["format"] == "npz"
    assert ds[name].values.tolist() == [0, 1, 2]


def test_omitted_members_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", x=np.ones(3), y=np.zeros(2))
    with zipfile.ZipFile(tmp_path / "m.npz", "a") as archive:
        archive.writestr("x", b"no array")
    with pytest.warns(xckpt.CheckpointWarning, match="left out"):
        ds = xr.open_dataset(tmp_path / "m.npz")
    assert list(ds) == ["x.npy", "y"]


@pytest.mark.parametrize("place", ["attribute", "name", "axis"])
def test_values_that_are_not_text_are_refused(place: str, tmp_path: Path) -> None:
    text = {"attribute": "a", "name": "w", "axis": "x"} | {place: "\ud800"}
    ds = xr.Dataset({text["name"]: (text["axis"], np.ones(2))}, attrs={"a": text["attribute"]})
    with pytest.raises(xckpt.UnsupportedError, match="lone surrogates"):
        xckpt.save(ds, tmp_path / "m.npz")


def test_notes_and_errors_name_the_variable(tmp_path: Path) -> None:
    """Not the member that it is in, which ends in ``.npy``."""
    file = io.BytesIO()
    np.save(file, np.arange(3))
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("arr_0.npy", file.getvalue() + b"more")
    with pytest.warns(xckpt.CheckpointWarning, match=r"tensor 'arr_0': by the directory"):
        xr.open_dataset(tmp_path / "m.npz")
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("arr_0.npy", file.getvalue()[:-4])
    with pytest.warns(UnreadableWarning, match="'arr_0'"):
        ds = xr.open_dataset(tmp_path / "m.npz")
    with pytest.raises(xckpt.FormatError) as caught:
        ds["arr_0"].values  # noqa: B018
    assert caught.value.tensor == "arr_0"


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_bytes_after_an_array_are_verified_with_it(compression: int) -> None:
    member, archived = io.BytesIO(), io.BytesIO()
    np.save(member, np.arange(6, dtype="f4"))
    with zipfile.ZipFile(archived, "w", compression, compresslevel=0) as target:
        target.writestr("a.npy", member.getvalue())
    data = bytearray(archived.getvalue())
    data[data.index(b"\x93NUMPY") + 8] -= 35  # the array begins earlier, among spaces
    with pytest.warns(xckpt.CheckpointWarning, match="bytes after the array"):
        ds = xr.open_dataset(bytes(data), verify=True)
    with pytest.raises(xckpt.IntegrityError, match="'a'"):
        ds["a"].load()
