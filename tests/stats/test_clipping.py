"""Quality of a quantised model: outliers that it cut off, scales at their limits, gains of bits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import xckpt
from tests.formats.safetensors_files import safetensors_file
from xckpt.cli import main

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
LAYERS = 3
NAME = "model.layers.{}.mlp.{}.weight"
LARGEST = 5.0
GROUPED = ("saturated", "outliers", "clipped", "scales", "scale_limits", "gain_db")


@pytest.fixture(scope="module")
def original() -> dict[str, Any]:
    """Return layers of heavy tails, which have outliers."""
    rng = np.random.default_rng(0)
    return {
        NAME.format(layer, module): (rng.standard_t(4, (30 + layer, 64)) * (1 + layer)).astype("f4")
        for layer in range(LAYERS)
        for module in ("up", "down")
    }


def quantised(original: dict[str, Any]) -> tuple[bytes, dict[str, tuple[Array, Array]]]:
    """Return a file with int8 codes of rows, and the codes and scales of each tensor.

    Scales are fitted to the limit of all layers, so that outliers of the last ones are cut off.
    """
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    header: dict[str, Any] = {
        "__metadata__": {"config": json.dumps({"quantization_config": config})}
    }
    data, parts = b"", {}
    for name, values in original.items():
        scales = np.full((len(values), 1), LARGEST / 127, "f2")
        scales[0], scales[1] = 0, 65504
        with np.errstate(all="ignore"):
            codes = np.clip(np.nan_to_num(np.rint(values / scales)), -127, 127).astype("i1")
        parts[name] = codes, scales.astype("f4")
        for key, array, dtype in ((name, codes, "I8"), (f"{name}_scale", scales, "F16")):
            stop = len(data) + array.nbytes
            entry = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), stop]}
            header[key] = entry
            data += array.tobytes()
    return safetensors_file(header, data), parts


@pytest.fixture(scope="module")
def comparison(original: dict[str, Any]) -> Any:
    return xckpt.compare(original, quantised(original)[0], codes=True)


def test_clipped_outliers_are_beyond_the_last_code_by_half_a_step(
    original: dict[str, Any], comparison: Any
) -> None:
    parts = quantised(original)[1]
    table = comparison.ckpt.table()
    for name, values in original.items():
        codes, scales = parts[name]
        wide = values.astype("f8")
        is_outlier = np.abs(wide) > 4 * np.sqrt(np.mean(wide**2))
        is_clipped = is_outlier & (np.abs(codes) == 127)
        with np.errstate(all="ignore"):
            is_clipped &= np.abs(wide - codes * scales.astype("f8")) > scales / 2
        assert table.loc[name, "outliers"] == is_outlier.sum()
        assert table.loc[name, "clipped"] == is_clipped.sum() / is_outlier.sum()
    assert table["clipped"].max() > 0.5
    # A scale of zero, and the largest one.
    assert table["scale_limits"].tolist() == [2 / n for n in table["scales"]]


def test_gains_are_those_of_halved_errors(original: dict[str, Any], comparison: Any) -> None:
    parts = quantised(original)[1]
    noise = {n: ((v - c * s.astype("f8")) ** 2).sum() for (n, v), (c, s) in
             zip(original.items(), parts.values(), strict=True)}  # fmt: skip
    total = sum(noise.values())
    table = comparison.ckpt.table()
    for name, own in noise.items():
        expected = 10 * np.log10(total / (total - own + own / 4))
        np.testing.assert_allclose(table.loc[name, "gain_db"], expected, rtol=1e-5)
    grouped = comparison.ckpt.by("layer")
    for layer in range(LAYERS):
        own = sum(value for name, value in noise.items() if f".{layer}." in name)
        expected = 10 * np.log10(total / (total - own + own / 4))
        np.testing.assert_allclose(grouped["gain_db"].sel(layer=layer), expected, rtol=1e-5)


def test_groups_equal_the_concatenated_tensors(original: dict[str, Any]) -> None:
    joined = {
        NAME.format(layer, "both"): np.concatenate(
            [original[NAME.format(layer, module)] for module in ("up", "down")]
        )
        for layer in range(LAYERS)
    }
    contents, parts = quantised(original)
    split = xckpt.compare(original, contents, codes=True).ckpt.by("layer", "role")
    stored = {
        name: np.concatenate(
            [
                np.multiply(*parts[name.replace("both", module)], dtype="f4")
                for module in ("up", "down")
            ]
        )
        for name in joined
    }
    whole = xckpt.compare(joined, stored).ckpt.by("layer", "role")
    for name in ("sqnr_db", "nmse", "rmse", "rel_l2", "cosine"):
        np.testing.assert_allclose(split[name], whole[name], rtol=1e-12, err_msg=name)
    table = xckpt.compare(original, contents, codes=True).ckpt.table()
    for layer in range(LAYERS):
        own = table.loc[[NAME.format(layer, module) for module in ("up", "down")]]
        group = split.sel(layer=layer, role="weight")
        clipped = (own["clipped"] * own["outliers"]).sum() / own["outliers"].sum()
        saturated = (own["saturated"] * own["count"]).sum() / own["count"].sum()
        for name, expected in (("clipped", clipped), ("saturated", saturated)):
            np.testing.assert_allclose(group[name], expected, rtol=1e-12)
        assert group["outliers"] == own["outliers"].sum()
        assert group["scales"] == own["scales"].sum()
    assert any(reason.startswith("unused: ") for reason in split.attrs["missing"])


def test_floats_of_eight_bits_are_cut_off_at_their_largest_number(tmp_path: Path) -> None:
    values = np.full((8, 64), 2.0, "f4")
    values[0, :4] = 447, -450, 462, -463  # the next step would be 480
    values[1, :2] = 900, -900
    xckpt.save(
        {"w": np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)},
        tmp_path / "q.safetensors",
    )
    statistics = xckpt.compare({"w": values}, tmp_path / "q.safetensors", codes=True)["w"]
    assert statistics.sel(statistic="outliers") == 6
    assert statistics.sel(statistic="clipped") == 2 / 6
    assert np.isnan(statistics.sel(statistic="scale_limits"))


def test_blocks_of_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(0).uniform(-1, 1, (8, 256)).astype("f4")
    values[:, 0], values[:, 1] = -16, 15.9  # the scale is 2, and codes are from -8 to 7
    values[4:, 1] = 14.9
    kind = gguf.GGMLQuantizationType.Q4_0
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("w", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    statistics = xckpt.compare({"w": values}, tmp_path / "q.gguf", codes=True)["w"]
    assert statistics.sel(statistic="outliers") == 16
    assert statistics.sel(statistic="clipped") == 4 / 16


def test_equal_and_unquantised_tensors(original: dict[str, Any]) -> None:
    table = xckpt.compare(original, original, codes=True).ckpt.table()
    assert (table["gain_db"] == 0).all()
    assert table[["outliers", "clipped", "scales", "saturated"]].isna().all(axis=None)
    with np.errstate(all="ignore"):
        extreme = {name: values.astype("f8") * 1e200 for name, values in original.items()}
        table = xckpt.compare(extreme, original, codes=True).ckpt.table()
    assert np.isfinite(table["gain_db"]).all()


def test_saved_comparisons(comparison: Any, tmp_path: Path) -> None:
    comparison.drop_attrs().to_netcdf(tmp_path / "c.nc", engine="h5netcdf")
    import xarray as xr

    with xr.open_dataset(tmp_path / "c.nc", engine="h5netcdf") as saved:
        grouped = saved.ckpt.by("layer")
        whole = comparison.ckpt.by("layer")
        for name in GROUPED:
            np.testing.assert_allclose(grouped[name], whole[name], rtol=1e-12)
        assert any("sqnr_db" in reason for reason in grouped.attrs["missing"])


def test_the_command_line(
    original: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xckpt.save(original, tmp_path / "a.zt")
    path = tmp_path / "model.safetensors"
    path.write_bytes(quantised(original)[0])
    options = ["--codes", "--by", "layer,role", "--columns", "sqnr_db", "--json"]
    assert main(["compare", str(tmp_path / "a.zt"), str(path), *options]) == 1
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert [group["layer"] for group in groups] == [0, 1, 2]
    assert all(group["clipped"] > 0 for group in groups[1:])
