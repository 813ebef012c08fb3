"""Use of the code range, against counts of the stored codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
import xckpt.accessor
from tests.conftest import GOLDEN
from xckpt.cli import main

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
CODES = ["saturated", "unused"]


def compared(a: Any, b: Any, name: str = "w") -> list[float]:
    result = xckpt.compare(a, b, codes=True)
    values: list[float] = result[name].sel(statistic=CODES).to_numpy().tolist()
    return values


def share(codes: Array, low: int, high: int) -> list[float]:
    """Count integer codes of a range."""
    counts = np.bincount(codes.reshape(-1).astype(np.int64) - low, minlength=high - low + 1)
    first = 1 if counts[0] == 0 and low + 1 == -high else 0
    return [(counts[first] + counts[-1]) / counts.sum(), (counts == 0).mean()]


@pytest.mark.parametrize(
    ("kind", "first", "bits"), [("Q8_0", 2, 8), ("Q4_0", 2, 4), ("Q4_1", 4, 4)]
)
def test_blocks_of_gguf(kind: str, first: int, bits: int, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("w", stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    data = np.ascontiguousarray(stored).view(np.uint8).reshape(-1, nbytes)[:, first:]
    if bits == 8:
        expected = share(data.copy().view(np.int8), -128, 127)
    else:
        expected = share(np.concatenate([data & 15, data >> 4]), 0, 15)
    original = xr.Dataset({"w": (("out", "in"), values)})
    assert compared(original, tmp_path / "q.gguf") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("model", "stored", "dtype"),
    [("ct_int_quantized_channel", "weight", np.int8), ("bnb_nf4", "weight", np.uint8)],
)
def test_models_of_hugging_face(model: str, stored: str, dtype: Any) -> None:
    path = GOLDEN / "hf-quantized" / model
    name = "model.layers.0.mlp.down_proj"
    raw = xr.open_dataset(path, decode=False)[f"{name}.{stored}"].to_numpy().view(dtype)
    ds = xr.open_dataset(path)
    measured = compared(ds, ds, f"{name}.weight")
    if dtype == np.int8:
        assert measured == pytest.approx(share(raw, -128, 127))
    else:  # the codebook is in ascending order
        assert measured == pytest.approx(share(np.concatenate([raw & 15, raw >> 4]), 0, 15))


def test_floats_of_eight_bits(tmp_path: Path) -> None:
    x = np.linspace(-448, 448, 1000, dtype=np.float32)
    x[:3] = [np.nan, 448, -448]
    codes = x.astype(ml_dtypes.float8_e4m3fn)
    xckpt.save(xr.Dataset({"w": ("n", codes)}), tmp_path / "b.safetensors")
    ends = np.count_nonzero(np.abs(codes.astype(np.float32)) == 448)
    distinct = len(np.unique(codes.astype(np.float32)[1:]))
    # Of 254 patterns that are numbers two are zeros.
    expected = [ends / 1000, 1 - distinct / 253]
    assert compared(xr.Dataset({"w": ("n", x)}), tmp_path / "b.safetensors") == pytest.approx(
        expected
    )


def test_symmetric_codes_have_a_symmetric_range(tmp_path: Path) -> None:
    codes = np.array([-127, 0, 127, 3], np.int8)
    asymmetric = np.array([-128, -127, 127, 3], np.int8)
    ds = xr.Dataset({"w": ("n", codes), "v": ("n", asymmetric)})
    xckpt.save(ds, tmp_path / "b.safetensors")
    assert compared(ds, tmp_path / "b.safetensors")[0] == 0.5
    assert compared(ds, tmp_path / "b.safetensors", "v")[0] == 0.5


def test_tensors_without_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {f"layers.{n}.w": ("n", np.arange(4, dtype="i1" if n else "f4")) for n in range(2)}
    ds = xr.Dataset({**layers, "empty": ("m", np.zeros(0, np.int8)), "gone": ("n", np.ones(4))})
    path = tmp_path / "b.safetensors"
    xckpt.save(ds.drop_vars("gone"), path)
    table = xckpt.compare(ds, path, codes=True).ckpt.table()[CODES]
    assert np.isnan(table.loc[["layers.0.w", "empty", "gone"]]).all(axis=None)
    assert table.loc["layers.1.w"].tolist() == [0, 252 / 256]
    assert list(xckpt.compare(ds, path)["statistic"].to_numpy()[-2:]) == ["sqnr_db", "nmse"]
    assert main(["compare", str(path), str(path), "--codes", "--all", "--columns", "unused"]) == 0
    assert "0.9844" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"), [({"compute": False}, "compute=False"), ({"dim": -1}, "leave out dim")]
)
def test_code_statistics_need_whole_tensors(options: Any, message: str) -> None:
    ds = xr.Dataset({"w": ("n", np.ones(3, np.int8))})
    with pytest.raises(ValueError, match=message):
        xckpt.compare(ds, ds, codes=True, **options)
