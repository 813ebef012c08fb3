"""`xckpt.spectrum`: singular values out of core, accurate to 1e-6 or NaN."""

from __future__ import annotations

import os
import sys
from math import prod
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.stats.checkpoints import sparse_file
from xckpt.arrays.kinds import kind_named
from xckpt.errors import CheckpointWarning
from xckpt.statistics import spectra
from xckpt.statistics.singular import FLOOR, STATISTICS, power_law, singular_values

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RNG = np.random.default_rng(0)


def of_condition(rows: int, columns: int, condition: float, rng: Any) -> Any:
    least = min(rows, columns)
    values = np.logspace(0, -np.log10(condition), least)
    basis = np.linalg.qr(rng.standard_normal((rows, least)))[0]
    return (basis * values) @ np.linalg.qr(rng.standard_normal((columns, least)))[0].T


def matrices() -> Iterator[np.ndarray[Any, Any]]:
    """Make matrices of many shapes, ranks, conditions, types and sizes of elements."""
    rng = np.random.default_rng(1)
    for number in range(200):
        columns = int(rng.integers(2, 60))
        rows = int(rng.integers(2, 120))
        kind = number % 5
        if kind == 0:
            array: Any = rng.standard_normal((rows, columns))
        elif kind == 1:
            array = of_condition(rows, columns, 10 ** rng.uniform(0, 14), rng)
        elif kind == 2:
            rank = int(rng.integers(1, min(rows, columns) + 1))
            array = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))
        elif kind == 3:
            array = rng.standard_normal((rows, columns)) * (1 + 1j)
            array += rng.standard_normal((rows, columns))
        else:
            array = rng.standard_normal((rows, columns)) * 10 ** rng.uniform(-8, 8, columns)
        array = array * 10 ** rng.uniform(-30, 30)
        if number % 2 and array.dtype.kind == "f":
            array = array.astype("float32")
        yield array


def complex_or_real(parts: Any, dtype: Any) -> Any:
    return parts[0] + 1j * parts[1] if np.dtype(dtype).kind == "c" else parts[0]


def wide(array: Any) -> Any:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


class TestSingularValues:
    def test_every_kind_of_matrix(self, tmp_path: Path) -> None:
        arrays = dict(enumerate(matrices()))
        ds = xr.Dataset({f"m{n}": ((f"a{n}", f"b{n}"), a) for n, a in arrays.items()})
        xckpt.save(ds, tmp_path / "m.zt", version="2")
        result = xckpt.spectrum(tmp_path / "m.zt", values=True, progress=False)
        stated = xckpt.spectrum(tmp_path / "m.zt", progress=False)
        assert result.attrs["floor"] == FLOOR
        for number, array in arrays.items():
            expected = np.linalg.svd(wide(array), compute_uv=False)
            values = result[f"m{number}"].values
            above_floor = ~np.isnan(values)
            np.testing.assert_allclose(values[above_floor], expected[above_floor], rtol=1e-6)
            assert (expected[~above_floor] <= 1.001 * FLOOR * expected[0]).all()
            statistics = dict(zip(STATISTICS, stated[f"m{number}"].values, strict=True))
            share = expected / expected[0]
            weights = (expected / expected.sum())[share > 1e-13]
            sums = {
                "spectral_norm": expected[0],
                "frobenius": np.sqrt((expected**2).sum()),
                "stable_rank": (share**2).sum(),
                "effective_rank": np.exp(-(weights * np.log(weights)).sum()),
            }
            for name, value in sums.items():
                np.testing.assert_allclose(
                    statistics[name], value, rtol=1e-6, err_msg=f"{number} {name}"
                )
            epsilon = np.finfo(array.real.dtype).eps
            if not ((share > 1e-16) & (share < 1.1 * FLOOR)).any():
                assert statistics["rank"] == np.linalg.matrix_rank(
                    array, rtol=max(array.shape) * epsilon
                )
            if above_floor.all():
                np.testing.assert_allclose(statistics["condition"], 1 / share[-1], rtol=2e-6)
            else:
                assert np.isnan(statistics["condition"])

    @pytest.mark.parametrize(
        "smallest",
        [[1e-5], [1e-6, 3e-9], [0.0], np.geomspace(4e-5, 1e-4, 12), np.full(12, 8e-5)],
        ids=["one", "two", "none", "close to visible ones", "equal"],
    )
    @pytest.mark.parametrize("dtype", ["float64", "complex128"])
    def test_a_few_values_that_rounding_hides(
        self, smallest: Any, dtype: Any, tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(5)
        values = np.concatenate([np.geomspace(1, 2e-4, 400 - len(smallest)), smallest])
        left, right = (
            np.linalg.qr(complex_or_real(rng.standard_normal((2, size, 400)), dtype))[0]
            for size in (500, 400)
        )
        array = left * values @ right.conj().T
        xckpt.save(xr.Dataset({"m": (("a", "b"), array)}), tmp_path / "m.zt", version="2")
        result = xckpt.spectrum(tmp_path / "m.zt", values=True, progress=False)["m"].values
        expected = np.sort(values)[::-1]
        above_floor = ~np.isnan(result)
        assert (above_floor == (expected > FLOOR)).all()
        np.testing.assert_allclose(result[above_floor], expected[above_floor], rtol=1e-6)

    @pytest.mark.parametrize("dtype", ["float32", "complex64"])
    def test_a_value_that_rounding_hides_needs_no_eigenvectors_of_all(
        self, dtype: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        eigh, size = np.linalg.eigh, 1100  # several panels of columns

        def of_few(matrix: Any) -> Any:
            assert len(matrix) < size / 8
            return eigh(matrix)

        monkeypatch.setattr(np.linalg, "eigh", of_few)
        array = complex_or_real(np.random.default_rng(3).standard_normal((2, size, size)), dtype)
        array[0] = array[1] + 1e-4 * array[0]
        values = xckpt.spectrum(xr.DataArray(array), values=True, progress=False)["data"].values
        expected = np.linalg.svd(wide(array), compute_uv=False)
        np.testing.assert_allclose(values, expected, rtol=1e-6)

    @pytest.mark.parametrize("order", "CF")
    def test_matrices_that_are_read_in_blocks(self, order: Any, tmp_path: Path) -> None:
        array = np.asarray(of_condition(220_000, 20, 1e7, RNG), "float32", order=order)
        xckpt.save(xr.Dataset({"m": (("a", "b"), array)}), tmp_path / "m.bpk")
        values = xckpt.spectrum(tmp_path / "m.bpk", values=True, progress=False)["m"].values
        expected = np.linalg.svd(array.astype(float), compute_uv=False)
        above_floor = ~np.isnan(values)
        np.testing.assert_allclose(values[above_floor], expected[above_floor], rtol=1e-6)

    def test_wide_matrices_larger_than_memory_should_be(self, tmp_path: Path) -> None:
        path = sparse_file(tmp_path / "m.safetensors", "F32", (8, 9 << 20), 9 << 25)
        array = RNG.standard_normal((8, 1000)).astype("f4")
        with path.open("r+b") as file:
            begin = path.stat().st_size - (9 << 25)
            for row, values in enumerate(array):
                file.seek(begin + row * (9 << 22) + (5 << 22))
                file.write(values.tobytes())
        values = xckpt.spectrum(path, values=True, cache=False, progress=False)["w"].values
        expected = np.linalg.svd(array.astype(float), compute_uv=False)
        np.testing.assert_allclose(values, expected, rtol=1e-6)

    @pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e160, 1e300])
    def test_squares_that_overflow_or_vanish(self, scale: float) -> None:
        array = RNG.standard_normal((30, 7))
        values = singular_values(lambda: iter([array * scale]))
        expected = np.linalg.svd(array, compute_uv=False) * scale
        np.testing.assert_allclose(values, expected, rtol=1e-6)

    @pytest.mark.parametrize("number", [np.nan, np.inf])
    def test_numbers_that_are_not_finite(self, number: float) -> None:
        array = np.ones((5, 3))
        array[2, 1] = number
        ds = xr.Dataset({"m": (("a", "b"), array), "n": (("c", "d"), np.eye(3))})
        result = xckpt.spectrum(ds, progress=False)
        assert np.isnan(result["m"].values).all()
        assert result["n"].sel(statistic="rank") == 3

    def test_zeros(self) -> None:
        result = xckpt.spectrum(xr.DataArray(np.zeros((4, 5))), progress=False)["data"]
        statistics = dict(zip(STATISTICS, result.values, strict=True))
        assert (statistics["spectral_norm"], statistics["frobenius"], statistics["rank"]) == (
            0,
            0,
            0,
        )
        assert np.isnan(statistics["stable_rank"])

    @pytest.mark.parametrize("shape", [(300, 200), (200, 300), (20, 10)])
    @pytest.mark.parametrize("dtype", ["float32", "complex64", "float64"])
    def test_largest_value_alone(self, shape: tuple[int, int], dtype: str) -> None:
        pytest.importorskip("scipy")
        array = RNG.standard_normal(shape).astype(dtype)
        statistics = ("stable_rank", "spectral_norm")
        result = xckpt.spectrum(xr.DataArray(array), statistics=statistics, progress=False)["data"]
        expected = np.linalg.svd(wide(array), compute_uv=False)
        np.testing.assert_allclose(
            result.values, [(expected**2).sum() / expected[0] ** 2, expected[0]], rtol=1e-6
        )
        assert result["statistic"].values.tolist() == list(statistics)

    def test_without_scipy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "scipy", None)
        monkeypatch.setitem(sys.modules, "scipy.linalg", None)
        monkeypatch.setattr(spectra, "find_spec", lambda _: None)
        array = of_condition(200, 100, 1e8, RNG)
        da = xr.DataArray(array)
        values = xckpt.spectrum(da, values=True, progress=False)["data"].values
        np.testing.assert_allclose(values, np.linalg.svd(array, compute_uv=False), rtol=1e-6)
        norm = xckpt.spectrum(da, statistics=["spectral_norm"], progress=False)["data"]
        np.testing.assert_allclose(norm.values, values[:1])


def reference_power_law(values: Any) -> tuple[float, float]:
    """Fit as the program of Clauset, Shalizi and Newman (plfit) does, number by number."""
    ordered = sorted(values)
    best = (np.inf, np.nan, np.nan)
    for start in sorted(set(ordered))[:-1]:
        tail = [value for value in ordered if value >= start]
        alpha = 1 + len(tail) / sum(np.log(value / start) for value in tail)
        distance = max(
            abs((1 - (start / value) ** (alpha - 1)) - at / len(tail))
            for at, value in enumerate(tail)
        )
        best = min(best, (distance, alpha, start))
    return best[1], best[2]


class TestPowerLaw:
    @pytest.mark.parametrize("seed", range(8))
    def test_published_examples(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        values = [
            rng.pareto(1.5 + seed, 150) + 1,
            np.linalg.svd(rng.standard_normal((90, 60)), compute_uv=False) ** 2,
            np.round(rng.pareto(2, 100) + 1, 1),  # some are equal
        ][seed % 3]
        np.testing.assert_allclose(power_law(values), reference_power_law(values), rtol=1e-9)

    @pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [3.0] * 9])
    def test_no_tail(self, values: list[float]) -> None:
        assert np.isnan(power_law(np.array(values))).all()

    def test_a_known_exponent_is_recovered(self) -> None:
        alpha, _ = power_law(np.random.default_rng(3).pareto(1.5, 20_000) + 1)
        assert abs(alpha - 2.5) < 0.1


def model(layers: int = 3) -> xr.Dataset:
    rng = np.random.default_rng(5)
    arrays: dict[str, Any] = {"embed": rng.standard_normal((60, 8)), "bias": np.ones(5)}
    for n in range(layers):
        arrays[f"layers.{n}.w"] = rng.standard_normal((12, 8)) * (n + 1)
        arrays[f"layers.{n}.conv"] = rng.standard_normal((6, 3, 2, 2))
        arrays[f"layers.{n}.norm"] = rng.standard_normal(8)
    arrays["ids"] = np.arange(12).reshape(3, 4)
    dims = {
        name: [f"{name.split('.')[-1]}_{k}" for k in range(a.ndim)] for name, a in arrays.items()
    }
    return xr.Dataset({name: (dims[name], a.astype("f4")) for name, a in arrays.items()}).assign(
        ids=(("i", "j"), arrays["ids"])
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.zt"
    xckpt.save(model(), path)
    os.utime(path, (1, 1))  # of files that were written just now nothing is kept
    return path


def norm(array: Any) -> float:
    return float(np.linalg.norm(np.asarray(array, float).reshape(len(array), -1), 2))


class TestSelection:
    def test_flat_datasets(self, path: Path) -> None:
        result = xckpt.spectrum(path, progress=False)
        assert set(result) == {
            "embed",
            *(f"layers.{n}.{k}" for n in range(3) for k in ("w", "conv")),
        }
        for name, array in model().variables.items():
            if name in result:
                np.testing.assert_allclose(result[name][0], norm(array.values), rtol=1e-6)
        table = result.ckpt.table()
        assert list(table.columns) == list(STATISTICS)
        assert "layers.1.conv" in table.index

    def test_stacked_datasets_and_trees(self, path: Path) -> None:
        flat = xckpt.spectrum(path, progress=False).ckpt.table().sort_index()
        for obj in (
            xr.open_dataset(path, stack=True),
            xr.open_datatree(path),
            xr.open_datatree(path, stack=True),
            xr.open_dataset(path).load(),
        ):
            table = obj.ckpt.spectrum(progress=False).ckpt.table().sort_index()
            np.testing.assert_allclose(table.loc[flat.index], flat, rtol=1e-9)
        stacked = xr.open_dataset(path, stack=True).ckpt.spectrum(progress=False)
        assert stacked["layers.w"].dims == ("statistic", "layers")

    def test_part_of_a_stack(self, path: Path) -> None:
        ds = xr.open_dataset(path, stack=True)
        result = ds.ckpt.spectrum("layers.1.*", progress=False)
        assert set(result) == {"layers.w", "layers.conv"}
        assert np.isfinite(result["layers.w"].sel(layers=1)).all()
        assert np.isnan(result["layers.w"].sel(layers=[0, 2])).all()
        values = ds.ckpt.spectrum("layers.1.*", values=True, progress=False)
        assert values["layers.w"].shape == (3, 8)
        assert values["layers.conv"].dims != values["layers.w"].dims

    def test_large_matrices_are_computed_only_by_name(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(spectra, "LARGEST", 400)  # that of 2**27 elements takes long
        with pytest.warns(CheckpointWarning, match="1 have more than 400 elements"):
            assert "embed" not in xckpt.spectrum(path, progress=False)
        assert "embed" in xckpt.spectrum(path, "embed", progress=False)

    def test_a_pattern_without_a_match(self, path: Path) -> None:
        with pytest.raises(KeyError, match=r"similar names.*embed"):
            xckpt.spectrum(path, "embedd")
        with pytest.raises(ValueError, match="stable_rank"):
            xckpt.spectrum(path, statistics=["stable_rnak"])

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, "float16", ml_dtypes.float8_e4m3fn])
    def test_small_floats(self, dtype: Any, tmp_path: Path) -> None:
        array = RNG.standard_normal((40, 20)).astype(dtype)
        xckpt.save(xr.Dataset({"m": (("a", "b"), array)}), tmp_path / "m.zt", version="2")
        for decode in (True, False):
            ds = xr.open_dataset(tmp_path / "m.zt", decode=decode)
            statistics = ds.ckpt.spectrum(progress=False, cache=False)["m"]
            np.testing.assert_allclose(statistics[0], norm(array.astype(float)), rtol=1e-6)
            assert statistics.sel(statistic="rank") == 20


class TestDifferences:
    def test_the_rank_of_an_added_update(self, path: Path, tmp_path: Path) -> None:
        tuned = model()
        added = np.outer(np.arange(12.0), np.ones(8)) + np.outer(np.ones(12), np.arange(8.0))
        tuned["layers.1.w"] = tuned["layers.1.w"] + added.astype("f4")
        tuned = tuned.drop_vars("layers.2.w").assign(embed=(("x", "y"), np.ones((3, 3), "f4")))
        with pytest.warns(CheckpointWarning) as caught:
            result = xckpt.spectrum(tuned, minus=path, progress=False)
        assert "1 have another shape" in str(caught[0].message)
        assert len(caught) == 1
        assert result["layers.1.w"].sel(statistic="rank") == 2
        np.testing.assert_allclose(result["layers.1.w"][0], norm(added), rtol=1e-5)
        assert (result["layers.0.w"].sel(statistic=["spectral_norm", "rank"]) == 0).all()
        with pytest.warns(CheckpointWarning, match="1 are not in the other"):
            xckpt.spectrum(path, minus=tuned, progress=False)


def adapter(shape: tuple[int, int], size: float, rank: int = 8, seed: int = 0) -> Any:
    """Return a base of normal weights, and what an adapter adds to it, in float64."""
    rng = np.random.default_rng(seed)
    down, up = rng.standard_normal((shape[0], rank)), rng.standard_normal((rank, shape[1]))
    return rng.standard_normal(shape) * 0.02, down @ up * size


def of_difference(tuned: Any, base: Any, **options: Any) -> dict[str, float]:
    pair = [xr.Dataset({"w": (("a", "b"), np.asarray(array))}) for array in (tuned, base)]
    statistics = xckpt.spectrum(pair[0], minus=pair[1], progress=False, **options)["w"]
    return dict(
        zip(statistics["statistic"].values.tolist(), statistics.values.tolist(), strict=True)
    )


class TestRounding:
    """Singular values that rounding to the stored types explains are not rank."""

    @pytest.mark.parametrize("shape", [(120, 160), (200, 60), (40, 300)])
    @pytest.mark.parametrize(
        "dtype", [ml_dtypes.bfloat16, "float16", "float32", ml_dtypes.float8_e4m3fn]
    )
    def test_a_merged_adapter(self, shape: tuple[int, int], dtype: Any) -> None:
        base, added = adapter(shape, 0.004)
        base = base.astype(dtype)
        tuned = (base.astype(float) + added).astype(dtype)
        statistics = of_difference(tuned, base)
        assert statistics["rank"] == 8
        assert statistics["effective_rank"] < 8.5
        assert statistics["noise_floor"] < 0.3 * np.linalg.svd(added, compute_uv=False)[7]
        assert np.isnan(statistics["condition"])

    @pytest.mark.parametrize("seed", range(40))
    def test_rounding_alone_has_no_rank(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        weight = rng.standard_normal(rng.integers(3, 90, 2)) * 10 ** rng.uniform(-3, 1)
        weight *= 10 ** rng.uniform(-1, 1, (1, weight.shape[1]))
        for dtype in (ml_dtypes.bfloat16, np.float16):
            statistics = of_difference(weight.astype(dtype), weight)
            assert statistics["rank"] == 0
            assert 0.2 < statistics["spectral_norm"] / statistics["noise_floor"] < 1

    def test_a_weak_adapter_has_at_most_its_rank(self) -> None:
        for size in (1e-3, 1e-4, 3e-5, 1e-5):
            base, added = adapter((100, 140), size)
            base = base.astype(ml_dtypes.bfloat16)
            tuned = (base.astype(float) + added).astype(ml_dtypes.bfloat16)
            assert of_difference(tuned, base)["rank"] <= 8

    def test_values_of_a_small_type_stored_in_a_large_one(self) -> None:
        base, added = adapter((100, 140), 0.004)
        pair = [np.asarray(x, ml_dtypes.bfloat16).astype("f4") for x in (base + added, base)]
        assert of_difference(*pair)["rank"] == 8

    def test_files_read_twice_in_blocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base, added = adapter((60_000, 80), 0.0004)
        paths = [tmp_path / "tuned.safetensors", tmp_path / "base.safetensors"]
        for path, values in zip(paths, (base + added, base), strict=True):
            ds = xr.Dataset({"w": (("a", "b"), values.astype(ml_dtypes.bfloat16))})
            xckpt.save(ds, path)
            os.utime(path, (1, 1))
        first = xckpt.spectrum(paths[0], minus=paths[1], progress=False)
        assert first["w"].sel(statistic="rank") == 8
        values = xckpt.spectrum(paths[0], minus=paths[1], values=True, progress=False)["w"]
        (floor,) = values.attrs["noise_floor"]
        assert floor == first["w"].sel(statistic="noise_floor")
        assert (values > floor).sum() == 8
        monkeypatch.setattr(spectra, "singular_values", None)
        again = xckpt.spectrum(paths[0], minus=paths[1], progress=False)
        xr.testing.assert_identical(again, first)
        opened = [xr.open_dataset(path).isel(a=slice(0, 57_000)) for path in paths]
        monkeypatch.undo()
        part = xckpt.spectrum(opened[0], minus=opened[1], progress=False)["w"]
        assert part.sel(statistic="rank") == 8

    def test_noise_of_quantised_tensors_is_unknown(self, tmp_path: Path) -> None:
        import gguf

        weight = RNG.standard_normal((64, 64)).astype("f4")
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        codes = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_0)
        writer.add_tensor("w", codes, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        quantised = xr.open_dataset(tmp_path / "m.gguf")
        ds = xr.Dataset({"w": (quantised["w"].dims, weight)})
        rows = {ds["w"].dims[0]: slice(0, 32)}
        for tuned, base in (
            (quantised, ds),
            (ds, quantised),
            (quantised.isel(rows), ds.isel(rows)),
        ):
            statistics = xckpt.spectrum(tuned, minus=base, progress=False)["w"]
            unknown = statistics.sel(
                statistic=["rank", "effective_rank", "condition", "noise_floor"]
            )
            assert np.isnan(unknown).all()
            assert np.isfinite(statistics.sel(statistic="spectral_norm"))

    def test_noise_without_a_difference_follows_from_the_type(self) -> None:
        array = RNG.standard_normal((30, 20)).astype("f4")
        statistics = xckpt.spectrum(xr.DataArray(array), progress=False)["data"]
        expected = 30 * np.finfo("f4").eps * statistics.sel(statistic="spectral_norm")
        np.testing.assert_allclose(statistics.sel(statistic="noise_floor"), expected, rtol=1e-12)


class TestCache:
    def test_a_second_call_reads_nothing(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = xckpt.spectrum(path, progress=False)
        monkeypatch.setattr(spectra, "singular_values", None)
        xr.testing.assert_identical(xckpt.spectrum(path, progress=False), first)
        assert xckpt.spectrum(path, values=True, progress=False)["embed"].size == 8
        with pytest.raises(TypeError):
            xckpt.spectrum(path, progress=False, cache=False)

    def test_an_interrupted_call_keeps_finished_matrices(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = []

        def interrupting(*nbytes: int) -> None:
            done.append(nbytes)
            if len(done) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            xckpt.spectrum(path, progress=interrupting)
        count = []

        def counting(blocks: Any, *args: Any) -> Any:
            count.append(blocks)
            return singular_values(blocks, *args)

        monkeypatch.setattr(spectra, "singular_values", counting)
        xckpt.spectrum(path, progress=False)
        assert len(count) == 4  # of 7

    def test_a_difference_and_its_noise_are_cached(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subtrahend = tmp_path / "other.zt"
        xckpt.save(model() * 2, subtrahend)
        os.utime(subtrahend, (1, 1))
        first = xckpt.spectrum(path, minus=subtrahend, progress=False)
        monkeypatch.setattr(spectra, "singular_values", None)
        xr.testing.assert_identical(xckpt.spectrum(path, minus=subtrahend, progress=False), first)

    @pytest.mark.parametrize("position", [-1, -100, 20, 30])
    def test_damaged_records_are_computed_again(
        self, path: Path, cache_folder: Path, position: int
    ) -> None:
        first = xckpt.spectrum(path, progress=False)
        (cached,) = (entry for entry in cache_folder.rglob("*") if entry.is_file())
        data = bytearray(cached.read_bytes())
        data[position] ^= 1
        cached.write_bytes(data)
        xr.testing.assert_identical(xckpt.spectrum(path, progress=False), first)

    def test_progress_counts_the_bytes_of_the_matrices(self, path: Path) -> None:
        reports: list[tuple[int, int]] = []
        result = xckpt.spectrum(path, progress=lambda *nbytes: reports.append(nbytes))
        total = sum(model()[name].nbytes for name in result)
        assert reports[-1] == (total, total)


@pytest.fixture(scope="module")
def local() -> xr.Dataset:
    return xckpt.spectrum(model(), progress=False)


@pytest.fixture(scope="module")
def client(local: xr.Dataset) -> Iterator[Any]:
    assert local  # before there is a cluster
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


class TestCluster:
    @pytest.mark.usefixtures("client")
    def test_the_same_numbers(self, path: Path, local: xr.Dataset) -> None:
        distributed = xckpt.spectrum(path, progress=False, cache=False)
        minus = xckpt.spectrum(path, minus=path, progress=False, cache=False)
        xr.testing.assert_allclose(distributed, local, rtol=1e-9)
        assert (minus["embed"].sel(statistic="rank") == 0).all()

    def test_a_worker_that_is_killed_costs_time_only(
        self, path: Path, local: xr.Dataset, kill_one: Any
    ) -> None:
        result = xckpt.spectrum(path, progress=kill_one, cache=False)
        xr.testing.assert_allclose(result, local, rtol=1e-9)


def test_memory_does_not_grow_with_rows() -> None:
    """No block has more than its share, however long the matrix is."""
    sizes = []

    class Long:
        shape, dtype, ndim = (600_000, 16), np.dtype("f4"), 2

        def __getitem__(self, key: Any) -> Any:
            rows = len(range(*key[0].indices(self.shape[0])))
            sizes.append(rows)
            return np.ones((rows, 16), "f4")

    matrix: Any = spectra.Matrix("m", Long(), kind_named("float32"), None)
    values = singular_values(matrix.blocks())
    assert values[0] == pytest.approx(np.sqrt(prod(Long.shape)))
    assert max(sizes) * 16 * 8 <= 32 << 20
