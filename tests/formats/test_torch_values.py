"""Values of PyTorch's special tensors equal those of PyTorch, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats import torch_files as files

if TYPE_CHECKING:
    from pathlib import Path

# --- quantised ------------------------------------------------------------------------------------

CODES = np.array([[-128, -45, -1, 0, 9, 127], [-100, -31, 7, 19, 64, 125]], "i1")
LONG = np.array(
    [[16777217, -33554435, 5, 0, 2**31 - 1, -(2**31)], [16777219, 100000007, -9, 1, 2, 3]], "i4"
)
ROWS, COLUMNS = [0.1, 1 / 3], [0.1, 1 / 3, 0.7, 1e-3, 0.2, 1 / 7]

# Results of `dequantize()` in PyTorch 2.15, as bytes.
DEQUANTIZED = {
    "rows": "9a9951c19a9999c0cdccccbe9a9999be9a99193f666646410000f8c1000000c155559540abaa0a41"
    "5555bd4100003042",
    "columns": "cdcc4cc1555575c1666606c0a69b44bb0000803fb76d8b41000020c1abaa2ac10000604"
    "06f12833c0000404192248941",
    "of 32 bits": "cacccc49d0cc4ccacdcc4c3e9a9999becdcc4c4dcdcc4ccdb3aaaa4a2d50fe4babaa2abfabaa2a40"
    "0000404055555540",
    "float parameters": "cdcc50c1000098c03333b3be000080be6766263f33334741bcbb05c2efee26c1"
    "efee0e407877c740dedda94144442642",
    "one scale": "9a9951c19a9999c0cdccccbe9a9999be9a99193f67664641cdcc24c19a9959c0cdcccc3ecdcccc3f"
    "3333c34033334341",
}


def channels(
    codes: np.ndarray[Any, Any], scales: list[float], zeros: list[float], axis: int, dtype: str
) -> bytes:
    parameters = np.array(scales, dtype), np.array(zeros, "i8" if dtype == "f8" else dtype)
    written = [files.whole(str(at + 1), parameter) for at, parameter in enumerate(parameters)]
    value = files.quantized("0", codes, "per_channel_affine", *written, files.number(axis))
    parts = enumerate([codes, *parameters])
    return files.archive(files.mapping({"w": value}), {str(at): p.tobytes() for at, p in parts})


QUANTISED = {
    "rows": channels(CODES, ROWS, [3, -7], 0, "f8"),
    "columns": channels(CODES, COLUMNS, [0, 1, 2, 3, 4, 5], 1, "f8"),
    "of 32 bits": channels(LONG, ROWS, [3, -7], 0, "f8"),
    "float parameters": channels(CODES, ROWS, [2.5, 0.3], 0, "f4"),
    "one scale": files.archive(
        files.mapping(
            {
                "w": files.quantized(
                    "0", CODES, "per_tensor_affine", files.real(0.1), files.number(3)
                )
            }
        ),
        {"0": CODES.tobytes()},
    ),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_tensors_are_dequantised_as_by_pytorch(kind: str) -> None:
    ds = xr.open_dataset(QUANTISED[kind], engine="torch")
    expected = np.frombuffer(bytes.fromhex(DEQUANTIZED[kind]), "f4").reshape(2, 6)
    assert ds["w"].values.tobytes() == expected.tobytes()
    assert ds["w"][1, 1:5:2].values.tobytes() == expected[1, 1:5:2].tobytes()


@pytest.mark.parametrize("kind", ["rows", "of 32 bits"])
def test_dequantised_tensors_keep_their_values_when_saved(kind: str, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(QUANTISED[kind])
    with pytest.warns(xckpt.CheckpointWarning, match="quantized tensors written dense"):
        xckpt.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    ds = xr.open_dataset(tmp_path / "m.safetensors")
    assert ds["w"].values.tobytes().hex() == DEQUANTIZED[kind]


def test_scales_of_channels_keep_their_precision_in_ztensor(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(QUANTISED["rows"])
    xckpt.convert(tmp_path / "m.pt", tmp_path / "m.zt", version="2")
    ds = xr.open_dataset(tmp_path / "m.zt")
    assert ds["w"].encoding["layout"] == "quantized"
    assert ds["w"].values.tobytes().hex() == DEQUANTIZED["rows"]


# --- complex numbers of halves --------------------------------------------------------------------

HALVES = np.array([[[1, 2], [3, -4], [5, 0.5]], [[-6, 7], [8, 9], [10, -0.25]]], "f2")
BITS = {
    "plain": (None, 1, 1),
    "conj": ({"conj": b"\x88"}, 1, -1),
    "neg": ({"neg": b"\x88"}, -1, -1),
    "conj and neg": ({"neg": b"\x88", "conj": b"\x88"}, -1, 1),
    "neither": ({"conj": b"\x89"}, 1, 1),
}


@pytest.mark.parametrize("byteorder", ["little", "big"])
@pytest.mark.parametrize("kind", BITS)
def test_the_bits_of_complex_halves_are_applied(kind: str, byteorder: str) -> None:
    bits, real, imag = BITS[kind]
    value = {
        "w": files.typed_view("0", "complex32", HALVES.view("u1"), bits),
        "t": files.typed_view("0", "complex32", HALVES.view("u1").swapaxes(0, 1), bits),
    }
    stored = HALVES if byteorder == "little" else HALVES.byteswap()
    members = {"m/data.pkl": files.pickled(files.mapping(value)), "m/data/0": stored.tobytes()}
    members |= {"m/version": b"3\n", "m/byteorder": byteorder.encode()}
    data = files.zipped(members)
    ds = xr.open_dataset(data, engine="torch")
    for name, expected in (("w", HALVES), ("t", HALVES.swapaxes(0, 1))):
        np.testing.assert_array_equal(ds[f"{name}:real"], real * expected[..., 0])
        np.testing.assert_array_equal(ds[f"{name}:imag"], imag * expected[..., 1])
    assert ds["w:imag"][1, ::2].values.tolist() == [7 * imag, -0.25 * imag]


def test_complex_halves_open_as_float32_like_other_halves(tmp_path: Path) -> None:
    value = files.typed_view("0", "complex32", HALVES.view("u1"), {"conj": b"\x88"})
    data = files.archive(files.mapping({"w": value}), {"0": HALVES.tobytes()})
    ds = xr.open_dataset(data, engine="torch")
    assert {array.dtype for array in ds.values()} == {np.dtype("f4")}
    assert ds["w:imag"].encoding["stored_dtype"] == np.dtype("f2")
    stored = xr.open_dataset(data, engine="torch", decode=False)
    assert {value.dtype for value in stored.values()} == {np.dtype("f2")}
    with pytest.warns(xckpt.CheckpointWarning, match="written as their parts"):
        xckpt.save(ds, tmp_path / "m.safetensors")
    written = xr.open_dataset(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(written["w:imag"], -HALVES[..., 1])
    assert written["w:imag"].encoding["stored_dtype"] == np.dtype("f2")


# --- sparse ---------------------------------------------------------------------------------------

INDICES = np.array([[0, 1, 2], [1, 0, 3]])
DENSE = np.zeros((3, 4), "f4")
DENSE[tuple(INDICES)] = [1.5, -2, 0.25]


@pytest.mark.parametrize("kind", ["f2", "u2"])
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
def test_sparse_halves_are_written_as_halves(layout: str, kind: str, tmp_path: Path) -> None:
    values = DENSE[tuple(INDICES)]
    order = np.argsort(INDICES[1]) if layout == "sparse_csc" else slice(None)
    values, rows, columns = values[order], INDICES[0][order], INDICES[1][order]
    stored = values.astype("f2") if kind == "f2" else (values.view("u4") >> 16).astype("u2")
    parts = [np.stack([rows, columns]), stored]
    if layout != "sparse_coo":
        count, compressed_axis = (3, rows) if layout == "sparse_csr" else (4, columns)
        pointers = np.searchsorted(compressed_axis, np.arange(count + 1))
        parts = [pointers, columns if layout == "sparse_csr" else rows, stored]
    written = [files.whole(str(at), part) for at, part in enumerate(parts)]
    value = files.mapping({"w": files.sparse(layout, (3, 4), *written)})
    data = files.archive(value, {str(at): part.tobytes() for at, part in enumerate(parts)})
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.warns(xckpt.CheckpointWarning, match="written dense"):
        xckpt.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    ds = xr.open_dataset(tmp_path / "m.safetensors")
    expected = "float16" if kind == "f2" else "bfloat16"
    assert ds["w"].encoding["stored_dtype"].name == expected
    np.testing.assert_array_equal(ds["w"], DENSE)


BLOCKS = np.arange(1, 13, dtype="f4").reshape(3, 2, 2)
# By layout: the shape, the parts, and where each block begins.
BLOCKED: dict[str, tuple[tuple[int, ...], list[np.ndarray[Any, Any]], list[tuple[int, ...]]]] = {
    "sparse_bsr": (
        (4, 6),
        [np.array([0, 2, 3]), np.array([2, 0, 1]), BLOCKS],
        [(0, 4), (0, 0), (2, 2)],
    ),
    "sparse_bsc": (
        (6, 4),
        [np.array([0, 1, 3]), np.array([2, 0, 1]), BLOCKS],
        [(4, 0), (0, 2), (2, 2)],
    ),
    "sparse_coo": (
        (3, 5, 2, 2),
        [np.array([[2, 0, 2], [4, 1, 4]]), BLOCKS],
        [(2, 4), (0, 1), (2, 4)],  # the first one twice
    ),
}


def blocked(layout: str, kind: str = "f4", **changed: Any) -> bytes:
    shape, parts, _ = BLOCKED[layout]
    arrays = [changed.get(str(at), part) for at, part in enumerate(parts)]
    arrays[-1] = arrays[-1].astype(kind)
    written = [files.whole(str(at), array) for at, array in enumerate(arrays)]
    value = files.mapping({"w": files.sparse(layout, changed.get("shape", shape), *written)})
    return files.archive(value, {str(at): array.tobytes() for at, array in enumerate(arrays)})


def densified(layout: str) -> np.ndarray[Any, Any]:
    shape, _, places = BLOCKED[layout]
    dense = np.zeros(shape, "f4")
    for block, place in zip(BLOCKS, places, strict=True):
        if layout == "sparse_coo":
            dense[place] += block
        else:
            dense[place[0] : place[0] + 2, place[1] : place[1] + 2] += block
    return dense


@pytest.mark.parametrize("layout", BLOCKED)
def test_blocks_that_are_sparse_have_their_values(layout: str, tmp_path: Path) -> None:
    data, dense = blocked(layout, "f2"), densified(layout)
    ds = xr.open_dataset(data, engine="torch")
    np.testing.assert_array_equal(ds["w"], dense)
    np.testing.assert_array_equal(ds["w"][1:, ::-2], dense[1:, ::-2])
    sparse = xr.open_dataset(data, engine="torch", sparse=True)["w"].data.compute()
    np.testing.assert_array_equal(sparse.todense(), dense)
    parts = xr.open_dataset(data, engine="torch", decode=False)
    np.testing.assert_array_equal(parts["w:values"], BLOCKS)
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.warns(xckpt.CheckpointWarning, match="written dense: 'w'"):
        xckpt.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    written = xr.open_dataset(tmp_path / "m.safetensors")["w"]
    np.testing.assert_array_equal(written, dense)
    assert written.encoding["stored_dtype"] == np.dtype("f2")
    assert float(ds.ckpt.stats()["w"].sel(statistic="max")) == dense.max()
    xckpt.save(ds.load(), tmp_path / "m.zt")
    np.testing.assert_array_equal(xr.open_dataset(tmp_path / "m.zt")["w"], dense)


@pytest.mark.parametrize(
    ("layout", "changed"),
    [
        ("sparse_bsr", {"1": np.array([3, 0, 1])}),
        ("sparse_bsr", {"1": np.array([-1, 0, 1])}),
        ("sparse_bsr", {"0": np.array([0, 2, 4])}),
        ("sparse_bsr", {"0": np.array([1, 2, 3])}),
        ("sparse_bsc", {"0": np.array([0, 4, 3])}),
        ("sparse_coo", {"0": np.array([[2, 0, 3], [4, 1, 4]])}),
    ],
)
def test_positions_of_sparse_blocks_are_checked(layout: str, changed: dict[str, Any]) -> None:
    data = blocked(layout, **changed)
    ds = xr.open_dataset(data, engine="torch")
    with pytest.raises(xckpt.FormatError) as caught:
        ds["w"].values  # noqa: B018
    assert (caught.value.tensor, caught.value.rule) == ("w", "LayoutData")
    assert not xckpt.verify(data).ok


def test_blocks_that_do_not_fit_are_an_error_or_parts() -> None:
    with pytest.raises(
        xckpt.FormatError, match=r"shape \(3,\), not \(4,\), for a matrix of shape \(6, 6\)"
    ):
        xr.open_dataset(blocked("sparse_bsr", shape=(6, 6)), engine="torch")
    ds = xr.open_dataset(blocked("sparse_bsr", shape=(5, 6)), engine="torch")
    assert set(ds) == {"w:indptr", "w:indices", "w:values"}
