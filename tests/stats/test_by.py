"""Groups of tensors have the statistics of all their elements together."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.stats.checkpoints import settled
from xckpt.cli import main
from xckpt.statistics.definitions import STATISTICS

if TYPE_CHECKING:
    from pathlib import Path

MERGED = [s.name for s in STATISTICS if s.merge is not None and not s.channels]
MEASURES = ("count", "equal_fraction", "nan", "inf", "max_abs")
RELATIVE = ("rmse", "rel_l2", "cosine", "sqnr_db", "nmse")
LAYERS = 12
DTYPES = ("float16", "float32", "float64", "int32")


def model(seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray[Any, Any]]:
    """Return tensors of several types and distributions, and layers beyond nine."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {"model.embed.weight": rng.normal(size=(50, 8)).astype("float32")}
    for layer in range(LAYERS):
        for number, dtype in enumerate(DTYPES):
            values = rng.gamma(1 + number, 1 + layer, (17 + number, 33)) * 3 - layer
            values = values * scale if dtype == "float64" else values
            tensors[f"model.layers.{layer}.{dtype}.weight"] = values.astype(dtype)
    tensors["model.layers.3.float32.weight"][2, :3] = np.nan, np.inf, -np.inf
    tensors["model.layers.4.empty.weight"] = np.zeros((0, 4))
    tensors["model.layers.4.nan.weight"] = np.full((2, 2), np.nan)
    return tensors


def layers_of(tensors: dict[str, Any], layer: int) -> np.ndarray[Any, Any]:
    """Return all elements of a layer."""
    own = [v for name, v in tensors.items() if name.startswith(f"model.layers.{layer}.")]
    return np.concatenate([values.astype("float64").ravel() for values in own])


def concatenated(tensors: dict[str, Any]) -> dict[str, Any]:
    return {f"layer.{layer}.w": layers_of(tensors, layer) for layer in range(LAYERS)}


@pytest.mark.parametrize("scale", [1.0, 1e120, 1e-200])
def test_groups_equal_the_concatenated_tensors(scale: float) -> None:
    tensors = model(scale=scale)
    grouped = xckpt.stats(tensors).ckpt.by("layer")
    expected = xckpt.stats(concatenated(tensors)).ckpt.by("layer")
    table = xckpt.stats(concatenated(tensors)).ckpt.table()
    assert grouped["layer"].values.tolist() == list(range(LAYERS))
    for name in MERGED:
        np.testing.assert_allclose(grouped[name], table[name], rtol=1e-12, err_msg=name)
        # A group of a single tensor has the numbers of the tensor.
        np.testing.assert_allclose(expected[name], table[name], rtol=1e-15, err_msg=name)


def test_constant_tensors_have_no_spread() -> None:
    tensors = {f"layers.0.{n}.weight": np.full(n, 0.1) for n in (3, 5, 7)}
    grouped = xckpt.stats(tensors).ckpt.by("layer")
    assert grouped["mean"].item() == 0.1
    assert grouped["std"].item() == 0.0
    assert np.isnan(grouped["skew"].item())


def test_layers_beside_roles() -> None:
    tensors = model()
    for layer in range(LAYERS - 2):
        tensors[f"model.layers.{layer}.norm.running_mean"] = np.full(4, float(layer))
    grouped = xckpt.stats(tensors).ckpt.by("layer", "role")
    assert grouped["std"].dims == ("layer", "role")
    assert {"weight", "statistic"} < set(grouped["role"].values.tolist())
    buffers = grouped.sel(role="statistic")
    assert buffers["mean"].values.tolist()[:-2] == list(range(LAYERS - 2))
    # Combinations without tensors.
    assert buffers["tensors"].values.tolist()[-2:] == [0, 0]
    assert buffers["count"].values.tolist()[-2:] == [0, 0]
    assert np.isnan(buffers["mean"].values[-2:]).all()
    assert "model.embed.weight" in grouped.attrs["outside"]
    assert "model.embed.weight" not in str(xckpt.stats(tensors).ckpt.by("role").attrs)


def test_roles_follow_from_all_tensors_and_their_types() -> None:
    tensors = {
        "layers.0.mlp.weight": np.zeros((4, 4), "int8"),
        "layers.0.mlp.scales": np.ones((4, 1), "float32"),
        "layers.0.norm.scale": np.ones(4, "float32"),
    }
    result = xckpt.stats(tensors)
    assert result.ckpt.by("role")["role"].values.tolist() == ["weight", "codes", "scale"]
    # A selection keeps the roles.
    part = result[["layers.0.mlp.weight"]].ckpt.by("role")
    assert part["role"].values.tolist() == ["codes"]


def test_experts_modules_and_several_stacks() -> None:
    tensors = {
        f"{stack}.block.{layer}.experts.{expert}.w": np.full(3, float(expert))
        for stack in ("encoder", "decoder")
        for layer in range(11)
        for expert in (0, 1, 10)
    }
    result = xckpt.stats(tensors)
    assert result.ckpt.by("expert")["mean"].to_series().to_dict() == {0: 0.0, 1: 1.0, 10: 10.0}
    assert result.ckpt.by("block")["tensors"].values.tolist() == [6] * 11
    layers = result.ckpt.by("layer")["layer"].values.tolist()
    assert layers[:3] == ["encoder.block.0", "encoder.block.1", "encoder.block.2"]
    assert layers[-1] == "decoder.block.10"
    modules = result.ckpt.by("module")["module"].values.tolist()
    assert modules == ["encoder.block.experts", "decoder.block.experts"]


def test_stacked_tensors_have_the_same_groups(tmp_path: Path) -> None:
    tensors = {
        f"h.{layer}.{word}.w": np.random.default_rng(layer).normal(size=(3, 4))
        for layer in range(11)
        for word in ("a", "b")
    }
    xckpt.save(tensors, tmp_path / "m.zt")
    settled(tmp_path / "m.zt")
    flat = xckpt.stats(tmp_path / "m.zt").ckpt.by("layer")
    stacked = xckpt.open(tmp_path / "m.zt", stack=True).ckpt.stats().ckpt.by("layer")
    xr.testing.assert_identical(flat.drop_attrs(), stacked.drop_attrs())


def test_a_tensor_without_a_name_is_in_its_groups() -> None:
    result = xckpt.stats({"": np.ones(3, "f4"), "l.0.w": np.ones(5, "f4")})
    assert result.ckpt.by("dtype")["count"].sel(dtype="float32") == 8


def test_tied_copies_count_once() -> None:
    tensors = {"embed.weight": np.ones((5, 4)), "lm_head.weight": np.ones((5, 4))}
    result = xckpt.stats(tensors)
    assert result.ckpt.by("role")["count"].values.tolist() == [40]
    shared = {"lm_head.weight": "embed.weight"}
    result.encoding["origin"] = result.encoding["origin"]._replace(shared=shared)
    assert result.ckpt.by("role")["count"].values.tolist() == [20]
    # The copy counts if its owner is not there.
    assert result[["lm_head.weight"]].ckpt.by("role")["count"].values.tolist() == [20]


@pytest.mark.parametrize("scale", [1.0, 1e120, 1e-200])
def test_measures_equal_those_of_the_concatenated_tensors(scale: float) -> None:
    first, second = model(scale=scale), model(scale=scale)
    rng = np.random.default_rng(1)
    for name, values in second.items():
        if "float64" in name or "5.float32" in name:
            second[name] = values * (1 + 1e-3 * rng.normal(size=values.shape))
    second["model.layers.6.float32.weight"][0, 0] = np.nan
    grouped = xckpt.compare(first, second).ckpt.by("layer")
    table = xckpt.compare(concatenated(first), concatenated(second)).ckpt.table()
    table = table.loc[[f"layer.{layer}.w" for layer in range(LAYERS)]]
    for name in (*MEASURES, *RELATIVE):
        np.testing.assert_allclose(grouped[name], table[name], rtol=1e-12, err_msg=name)
    assert grouped["changed"].values.tolist() == [1, 1, 1, 1, 1, 2, 2, *[1] * (LAYERS - 7)]
    assert "unknown" not in grouped.attrs


def test_equal_bytes_need_the_norms_of_the_first_side(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = {f"h.{n}.{w}": rng.normal(size=(300, 300)) for n in range(2) for w in ("a", "b")}
    second = first | {"h.0.a": first["h.0.a"] * 1.5, "h.2.c": np.ones(3)}
    paths = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for path, tensors in zip(paths, (first, second), strict=True):
        xckpt.save(tensors, path)
    result = xckpt.compare(*paths)
    grouped = result.ckpt.by("h", stats=xckpt.stats(paths[0]))
    expected = xckpt.compare(
        *({"all": np.concatenate([side["h.0.a"], side["h.0.b"]])} for side in (first, second))
    )["all"]
    for name in RELATIVE:
        value = expected.sel(statistic=name).item()
        np.testing.assert_allclose(grouped[name].values[0], value, rtol=1e-12, err_msg=name)
    assert grouped["only_b"].values.tolist() == [0, 0, 1]
    assert grouped["rel_l2"].values[1] == 0.0
    assert grouped["count"].values.tolist() == [180000, 180000, 0]
    sums = result.encoding["sums"]
    if np.isnan(sums["h.0.b"][0]):  # compared by bytes
        without = result.ckpt.by("h")
        assert np.isnan(without["rel_l2"].values[0])
        assert "pass stats=" in without.attrs["unknown"]


def test_a_histogram_adds_its_counts() -> None:
    tensors = model()
    histogram = xckpt.histogram(tensors, bins=7, scale="linear")
    grouped = histogram.ckpt.by("layer")
    assert grouped["count"].dims == ("layer", "bin")
    own = [v.values for name, v in histogram.variables.items() if ".3." in str(name)]
    np.testing.assert_array_equal(grouped["count"].sel(layer=3), sum(own))
    assert "bin_left" in grouped.coords


def test_missing_statistics_are_named() -> None:
    result = xckpt.stats(model())
    missing = " ".join(result.ckpt.by("layer").attrs["missing"])
    assert "q0.5" in missing
    assert "unique" in missing
    part = result.sel(statistic=["count", "mean"]).ckpt.by("layer")
    assert list(part.data_vars) == ["tensors", "count"]
    assert part.attrs["missing"] == ["mean: it needs the statistic nan"]


def test_saved_results(tmp_path: Path) -> None:
    tensors = {f"h.{n}.{w}": np.arange(9.0) + n for n in range(3) for w in "ab"}
    changed = {name: values * 2 for name, values in tensors.items()}
    result, comparison = xckpt.stats(tensors), xckpt.compare(tensors, changed)
    result.to_netcdf(tmp_path / "s.nc", engine="h5netcdf")
    comparison.to_netcdf(tmp_path / "c.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "s.nc", engine="h5netcdf") as saved:
        grouped = saved.ckpt.by("layer")
        assert "saved" in grouped.attrs["note"]
        xr.testing.assert_equal(grouped, result.ckpt.by("layer"))
    with xr.open_dataset(tmp_path / "c.nc", engine="h5netcdf") as saved:
        grouped = saved.ckpt.by("layer")
        assert grouped["max_abs"].values.tolist() == [8.0, 9.0, 10.0]
        assert "rel_l2" not in grouped
        assert any("rel_l2" in reason for reason in grouped.attrs["missing"])


def spectra(count: int = 3) -> dict[str, Any]:
    """Return matrices of several shapes in layers, the last of which has a NaN."""
    rng = np.random.default_rng(3)
    shapes = {"a": (9, 5), "b": (4, 11)}
    tensors: dict[str, Any] = {
        f"h.{layer}.{name}.weight": rng.normal(size=shape) * (1 + layer)
        for layer in range(count)
        for name, shape in shapes.items()
    }
    return tensors | {
        "embed.weight": rng.normal(size=(5, 5)),
        "h.0.c.weight": np.full((3, 3), np.nan),
    }


def test_spectra_equal_those_of_block_diagonal_matrices() -> None:
    tensors = spectra()
    result = xckpt.spectrum(tensors)
    grouped = result.ckpt.by("layer")
    table = result.ckpt.table()
    for layer in range(3):
        first, second = (tensors[f"h.{layer}.{name}.weight"] for name in "ab")
        own = [np.linalg.svd(matrix, compute_uv=False) for matrix in (first, second)]
        group = grouped.sel(layer=layer)
        norms = table.loc[[f"h.{layer}.a.weight", f"h.{layer}.b.weight"]]
        whole = np.sqrt((np.concatenate([first.ravel(), second.ravel()]) ** 2).sum())
        np.testing.assert_allclose(group["frobenius"], whole, rtol=1e-12)
        assert group["spectral_norm"] == norms["spectral_norm"].max()
        values = np.concatenate(own)
        expected = (values**2).sum() / values.max() ** 2
        np.testing.assert_allclose(group["stable_rank"], expected, rtol=1e-6)
        np.testing.assert_allclose(group["condition"], values.max() / values.min(), rtol=1e-6)
        assert group["rank"] == len(values)
        assert group["tensors"] == 2
    assert "embed.weight" in grouped.attrs["outside"]
    assert "h.0.c.weight" in grouped.attrs["outside"]  # it has no spectrum
    missing = "effective_rank, alpha: it needs the singular values of all matrices"
    assert grouped.attrs["missing"] == [missing]


def test_some_statistics_of_spectra() -> None:
    result = xckpt.spectrum(spectra(), statistics=["stable_rank", "rank"])
    grouped = result.ckpt.by("layer")
    assert list(grouped.data_vars) == ["tensors", "rank"]
    assert grouped.attrs["missing"] == ["stable_rank: it needs the statistic frobenius"]


@pytest.fixture
def several_types(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Return a file with tensors of 8, 16 and 32 bits in layers, and its tensors."""
    rng = np.random.default_rng(4)
    tensors: dict[str, Any] = {}
    for layer in range(3):
        tensors[f"h.{layer}.a.weight"] = rng.normal(size=(40, 30)).astype("float16")
        tensors[f"h.{layer}.b.weight"] = rng.normal(size=(50, 20)).astype(ml_dtypes.bfloat16)
        tensors[f"h.{layer}.c.ids"] = rng.integers(-9, 9, (7, 7)).astype("int8")
    tensors["h.0.d.weight"] = np.array([np.nan, np.inf, -3.25, 0.0, -0.0], "float16")
    tensors["h.0.e.weight"] = np.zeros((0, 3), "float16")
    tensors["h.2.d.weight"] = rng.normal(size=(60, 50)).astype("float32")
    path = tmp_path / "m.zt"
    xckpt.save(tensors, path)
    return settled(path), tensors


def test_quantiles_follow_from_the_counts_of_all_elements(
    several_types: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, tensors = several_types
    levels = (0.0, 0.01, 0.25, 0.5, 0.9, 1.0)
    result = xckpt.stats(path, quantiles=levels)
    grouped = result.ckpt.by("layer")
    for layer in range(3):
        own = [v.astype("float64").ravel() for n, v in tensors.items() if f"h.{layer}." in n]
        values = np.concatenate(own)
        values = values[np.isfinite(values)]
        # Elements of float32 have eight significant bits, except for the extremes.
        bound = 0.0 if layer < 2 else 2.0**-8
        for level in levels:
            actual = grouped[f"q{level:g}"].sel(layer=layer)
            expected = np.quantile(values, level, method="nearest")
            np.testing.assert_allclose(actual, expected, rtol=bound if 0 < level < 1 else 0.0)
    assert [reason.split(":")[0] for reason in grouped.attrs["missing"]] == ["unique"]
    # A group of one tensor has its quantiles.
    modules = result.ckpt.by("layer", "module")["q0.9"].sel(layer=1, module="h.a").item()
    assert modules == result["h.1.a.weight"].sel(statistic="q0.9").item()
    again = pickle.loads(pickle.dumps(result)).ckpt.by("layer")
    xr.testing.assert_identical(again, grouped)
    result.drop_attrs().to_netcdf(tmp_path / "s.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "s.nc", engine="h5netcdf") as saved:
        missing = saved.ckpt.by("layer").attrs["missing"]
    assert any("q0.5" in reason and "cache" in reason for reason in missing)


def test_quantiles_of_a_part(several_types: tuple[Path, dict[str, Any]]) -> None:
    result = xckpt.stats(several_types[0])
    whole = result.ckpt.by("layer")
    part = result.sel(statistic=["count", "nan", "inf", "q0.5"]).ckpt.by("layer")
    np.testing.assert_array_equal(part["q0.5"], whole["q0.5"])
    alone = result.sel(statistic=["q0.5", "q0.95"]).ckpt.by("layer")
    assert list(alone.data_vars) == ["tensors"]
    assert alone.attrs["missing"] == ["q0.5, q0.95: it needs the statistic count"]
    # Another tensor of a group has no counts: its quantiles are unknown.
    result.encoding["counts"].pop("h.1.a.weight")
    grouped = result.ckpt.by("layer")
    assert np.isnan(grouped["q0.5"].values).tolist() == [False, True, False]
    assert any("q0.5" in reason for reason in grouped.attrs["missing"])


def test_quantiles_without_cached_counts_are_missing(
    several_types: tuple[Path, dict[str, Any]],
) -> None:
    path, tensors = several_types
    for result in (xckpt.stats(path, cache=False), xckpt.stats(tensors)):
        grouped = result.ckpt.by("layer")
        assert "q0.5" not in grouped
        assert any("q0.5" in reason and "cache" in reason for reason in grouped.attrs["missing"])


def test_findings_are_counted() -> None:
    tensors = model()
    findings = xckpt.findings(tensors)
    grouped = findings.ckpt.by("layer")
    assert repr(grouped.ckpt).startswith("<Groups>  by layer: ")
    assert grouped["layer"].values.tolist() == list(range(LAYERS))
    nan = [1 if layer in {3, 4} else 0 for layer in range(LAYERS)]
    assert grouped["nan"].values.tolist() == nan
    assert grouped["inf"].values.tolist() == [int(layer == 3) for layer in range(LAYERS)]
    assert int(grouped["error"].sum()) == (findings["severity"] == "error").sum()
    assert (
        grouped["tensors"].values.tolist()
        == xckpt.stats(tensors).ckpt.by("layer")["tensors"].values.tolist()
    )
    assert (grouped["affected"] <= grouped["tensors"]).all()
    part = pickle.loads(pickle.dumps(findings[findings["rule"] == "inf"])).ckpt.by("layer", "role")
    assert set(part.data_vars) == {"tensors", "affected", "error", "warning", "info", "inf"}
    assert int(part["error"].sum()) == 1


def test_no_findings_are_counted_as_zero(tmp_path: Path) -> None:
    xckpt.save({"h.0.w": np.array([1.0, 2.0]), "h.1.w": np.array([2.0, 3.0])}, tmp_path / "m.zt")
    findings = xckpt.open(tmp_path / "m.zt").ckpt.findings()
    assert findings.empty
    assert findings.ckpt.by("layer")["error"].values.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ((), "different keys"),
        (("role", "role"), "different keys"),
        (("layr",), "did you mean 'layer'"),
        (("expert",), "no tensor has a number for 'expert'"),
    ],
)
def test_wrong_keys(keys: tuple[str, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        xckpt.stats(model()).ckpt.by(*keys)


def test_other_objects() -> None:
    ds = xr.Dataset({"h.0.w": ("x", np.ones(3))})
    with pytest.raises(TypeError, match="call stats"):
        ds.ckpt.by("layer")
    with pytest.raises(ValueError, match="whole tensors"):
        xckpt.stats({"h.0.w": np.ones((3, 4))}, dim="d4").ckpt.by("layer")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = {f"h.{n}.w": np.full(4, float(n)) for n in range(11)}
    paths = [str(tmp_path / "a.zt"), str(tmp_path / "b.zt")]
    xckpt.save(first, paths[0])
    xckpt.save(first | {"h.2.w": np.full(4, 3.0)}, paths[1])
    assert main(["stats", paths[0], "--by", "layer,role", "--columns", "mean"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["layer", "role", "tensors", "mean"],
        ["0", "weight", "1", "0"],
    ]
    assert lines[-1].split() == ["10", "weight", "1", "10"]
    assert main(["compare", *paths, "--by", "layer", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["by"] == ["layer"]
    assert [group["changed"] for group in document["groups"]] == [0, 0, 1, *[0] * 8]
    assert document["groups"][2]["rel_l2"] == 0.5
    assert main(["stats", paths[0], "--by", "expert"]) == 2
    assert "no tensor has a number for 'expert'" in capsys.readouterr().err


def test_findings_and_spectra_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "m.zt")
    xckpt.save(spectra(), path)
    assert main(["stats", path, "--findings", "--by", "layer"]) == 1
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["layer", "tensors", "affected", "error", "warning"]
    layer, tensors, affected, _, errors, *_ = first.split()  # with a bar of those affected
    assert (layer, tensors, affected, errors) == ("0", "3", "1", "1")
    assert main(["spectrum", path, "--by", "layer", "--columns", "rank,spectral_norm"]) == 0
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["layer", "tensors", "rank", "spectral_norm"]
    assert first.split()[:3] == ["0", "2", "9"]
    assert main(["spectrum", path, "--by", "layer", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [group["rank"] for group in document["groups"]] == [9, 9, 9]


def test_pickled_results_keep_their_roles() -> None:
    tensors = {"layers.0.mlp.weight": np.zeros(4, "int8"), "layers.0.mlp.scales": np.ones(4)}
    result = pickle.loads(pickle.dumps(xckpt.stats(tensors)))
    assert result.ckpt.by("role")["role"].values.tolist() == ["codes", "scale"]


def test_a_file_and_its_dataset_have_the_same_groups(tmp_path: Path) -> None:
    tensors = model() | {"model.mask": np.ones((3, 3), bool), "steps": np.array(3)}
    xckpt.save(tensors, tmp_path / "m.zt")
    settled(tmp_path / "m.zt")
    by_path = xckpt.stats(tmp_path / "m.zt").ckpt.by("role")
    by_dataset = xckpt.open(tmp_path / "m.zt").ckpt.stats().ckpt.by("role")
    xr.testing.assert_identical(by_path, by_dataset)
    assert by_path["role"].values.tolist() == ["weight", "codes", "counter", "constant"]
