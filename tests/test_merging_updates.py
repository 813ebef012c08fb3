"""`ds.ckpt.merge` adds adapters and updates to a model, and keeps all its other tensors."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.documented import write_models
from xckpt.errors import CheckpointWarning, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, np.dtype[Any]]

Q, K, FC, EMBED, CONV, BIAS, NORM = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.mlp.fc.weight",
    "model.embed_tokens.weight",
    "model.conv.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.norm.weight",
)
SHAPES = {
    Q: (24, 16), K: (16, 16), FC: (16, 24), EMBED: (40, 16), CONV: (8, 4, 2, 2), BIAS: (24,),
    NORM: (16,),
}  # fmt: skip
UP = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(3)]
LAYERS = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)] + UP
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6}


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).normal(scale=0.1, size=shape).astype("f4")


def lora(base: str, rows: int, columns: int, rank: int = 4) -> dict[str, Array]:
    module = f"base_model.model.{base.removesuffix('.weight')}"
    return {
        f"{module}.lora_A.weight": numbers(rank, columns, seed=1),
        f"{module}.lora_B.weight": numbers(rows, rank, seed=2),
    }


def product(base: str, rows: int, columns: int) -> Array:
    a, b = lora(base, rows, columns).values()
    return b @ a


@pytest.fixture
def weights() -> dict[str, Array]:
    return {name: numbers(*shape, seed=3) for name, shape in SHAPES.items()}


@pytest.fixture
def base(weights: dict[str, Array], tmp_path: Path) -> xr.Dataset:
    xckpt.save(weights, tmp_path / "base.safetensors")
    return xckpt.open(tmp_path / "base.safetensors")


def adapter(folder: Path, tensors: dict[str, Array], **config: Any) -> Path:
    folder.mkdir()
    xckpt.save(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def saved(ds: Any, tmp_path: Path, name: str = "new.safetensors") -> dict[str, Array]:
    ds.ckpt.save(tmp_path / name, overwrite=True)
    opened = xckpt.open(tmp_path / name, decode=False)
    return {str(name): variable.values for name, variable in opened.variables.items()}


def assert_changed(
    tensors: dict[str, Array], weights: dict[str, Array], changed: dict[str, Array]
) -> None:
    assert list(tensors) == list(weights)
    for name, values in weights.items():
        if name in changed:
            np.testing.assert_allclose(tensors[name], changed[name], rtol=1e-5, atol=1e-7)
        else:
            assert tensors[name].tobytes() == values.tobytes()


class TestAdapters:
    def test_a_folder_is_merged_and_verified(
        self, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        folder = adapter(tmp_path / "lora", lora(Q, 24, 16))
        merged = base.ckpt.merge(folder)
        assert all(isinstance(v.data, da.Array) for v in merged.variables.values())
        tensors = saved(merged, tmp_path)
        assert_changed(tensors, weights, {Q: weights[Q] + 1.5 * product(Q, 24, 16)})
        check = xckpt.compare(
            tmp_path / "base.safetensors", tmp_path / "new.safetensors", adapter=folder
        )
        assert "1 merged" in repr(check.ckpt)

    def test_an_open_adapter_and_its_updates_give_the_same(
        self, base: xr.Dataset, tmp_path: Path
    ) -> None:
        folder = adapter(tmp_path / "lora", lora(Q, 24, 16))
        opened = xckpt.open(folder)
        expected = base.ckpt.merge(folder)
        assert base.ckpt.merge(opened).identical(expected)
        updates = opened.ckpt.updates()
        np.testing.assert_allclose(base.ckpt.merge(updates)[Q], expected[Q], rtol=1e-6)

    def test_the_scale_multiplies_the_stated_one(
        self, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        folder = adapter(tmp_path / "lora", lora(Q, 24, 16))
        half = base.ckpt.merge(folder, scale=0.5)[Q].values
        np.testing.assert_allclose(half, weights[Q] + 0.75 * product(Q, 24, 16), rtol=1e-5)

    def test_an_adapter_without_a_scale_needs_one(
        self, base: xr.Dataset, weights: dict[str, Array]
    ) -> None:
        with pytest.raises(ValueError, match=r"alpha; pass merge\(\.\.\., scale="):
            base.ckpt.merge(lora(Q, 24, 16))
        merged = base.ckpt.merge(lora(Q, 24, 16), scale=2)[Q].values
        np.testing.assert_allclose(merged, weights[Q] + 2 * product(Q, 24, 16), rtol=1e-5)

    @pytest.mark.parametrize(
        "scale", ["0.5", [0.5], 1j, xr.DataArray([0.5, 1], dims="layers")], ids=type
    )
    def test_the_scale_is_a_number(self, scale: Any, base: xr.Dataset, tmp_path: Path) -> None:
        folder = adapter(tmp_path / "lora", lora(Q, 24, 16))
        for change in (folder, {Q: numbers(24, 16)}):
            with pytest.raises(TypeError, match=r"scale is a number, not .*each layer"):
                base.ckpt.merge(change, scale=scale)
        for number in (2, np.float32(2), np.int64(2), np.array(2.0), xr.DataArray(2.0)):
            merged = base.ckpt.merge(folder, scale=number)
            np.testing.assert_array_equal(merged[Q], base.ckpt.merge(folder, scale=2.0)[Q])
            assert merged[Q].dtype == np.float32

    def test_layers_have_weights_of_their_own(self, tmp_path: Path) -> None:
        names = [Q, Q.replace(".0.", ".1.")]
        weights = {name: numbers(24, 16) for name in names}
        xckpt.save(weights, tmp_path / "base.safetensors")
        tensors = lora(names[0], 24, 16) | lora(names[1], 24, 16)
        updates = xckpt.open(adapter(tmp_path / "lora", tensors)).ckpt.updates().ckpt.stack()
        factors = xr.DataArray(np.array([0.5, 2], "f4"), dims="layers")
        merged = xckpt.open(tmp_path / "base.safetensors").ckpt.merge(updates * factors)
        for name, factor in zip(names, (0.5, 2), strict=True):
            expected = weights[name] + factor * 1.5 * product(Q, 24, 16)
            np.testing.assert_allclose(merged[name], expected, rtol=1e-5)

    def test_dora_sets_the_norms(
        self, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        module = f"base_model.model.{Q.removesuffix('.weight')}"
        magnitude = np.abs(numbers(24, seed=7)) + 1
        tensors = lora(Q, 24, 16) | {f"{module}.lora_magnitude_vector": magnitude}
        folder = adapter(tmp_path / "dora", tensors, use_dora=True)
        merged = base.ckpt.merge(folder)
        total = weights[Q] + 1.5 * product(Q, 24, 16)
        expected = total * (magnitude / np.linalg.norm(total, axis=1))[:, None]
        assert_changed(saved(merged, tmp_path), weights, {Q: expected})
        text = rf"norms that DoRA sets have no scale, and are merged as a whole: '{Q}'"
        with pytest.warns(CheckpointWarning, match=text):
            half = base.ckpt.merge(folder, scale=0.5)[Q].values
        np.testing.assert_allclose(np.linalg.norm(half, axis=1), magnitude, rtol=1e-5)
        with pytest.raises(ValueError, match="pass the adapter itself"):
            base.ckpt.merge(xckpt.open(folder).ckpt.updates())

    def test_convolutions_embeddings_and_saved_tensors(
        self, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        a, b = numbers(4, 4, 2, 2, seed=1), numbers(8, 4, seed=2)
        ea, eb = numbers(4, 40, seed=1), numbers(16, 4, seed=2)
        norm = numbers(16, seed=9)
        tensors = {
            "base_model.model.model.conv.lora_A.weight": a,
            "base_model.model.model.conv.lora_B.weight": b[..., None, None],
            "base_model.model.model.embed_tokens.lora_embedding_A": ea,
            "base_model.model.model.embed_tokens.lora_embedding_B": eb,
            "base_model.model.model.norm.weight": norm,
        }
        merged = base.ckpt.merge(adapter(tmp_path / "lora", tensors))
        expected = {
            CONV: weights[CONV] + 1.5 * np.einsum("or,rihw->oihw", b, a),
            EMBED: weights[EMBED] + 1.5 * (eb @ ea).T,
            NORM: norm,
        }
        assert_changed(saved(merged, tmp_path), weights, expected)

    def test_tensors_that_replace_those_of_the_model_have_no_scale(
        self, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        norm = numbers(16, seed=9)
        tensors = lora(Q, 24, 16) | {"base_model.model.model.norm.weight": norm}
        folder = adapter(tmp_path / "lora", tensors, modules_to_save=["norm"])
        with pytest.warns(CheckpointWarning, match=f"no scale, and are merged as a whole: '{NORM}"):
            merged = base.ckpt.merge(folder, scale=0.5)
        changed = {Q: weights[Q] + 0.75 * product(Q, 24, 16), NORM: norm}
        assert_changed(saved(merged, tmp_path), weights, changed)
        base.ckpt.merge(folder)
        base.ckpt.merge(folder, scale=1)

    def test_sums_that_are_too_large_for_the_model_are_counted(
        self, base: xr.Dataset, tmp_path: Path
    ) -> None:
        base.ckpt.save(tmp_path / "half.safetensors", dtype="float16", cast="allow")
        half = xckpt.open(tmp_path / "half.safetensors")
        merged = half.ckpt.merge({NORM: np.full(16, 1e5, "f4")})
        with pytest.warns(CheckpointWarning, match=f"16 elements too large.*'{NORM}'") as caught:
            merged.ckpt.save(tmp_path / "new.safetensors")
        assert len(caught) == 1
        assert np.isinf(xckpt.open(tmp_path / "new.safetensors")[NORM]).all()
        assert np.isinf(merged[NORM]).all()

    def test_several_are_merged_one_after_the_other(self, base: xr.Dataset, tmp_path: Path) -> None:
        path = adapter(tmp_path / "lora", lora(Q, 24, 16))
        with pytest.raises(TypeError, match=r"one after the other: .*merge\(a\)\.ckpt\.merge\(b\)"):
            base.ckpt.merge([path, path])

    def test_resized_embeddings_of_peft_replace_those_of_the_model(
        self, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        module, table = "base_model.model.model.embed_tokens", numbers(42, 16, seed=9)
        names = [f"{module}.{word}weight" for word in ("", "modules_to_save.", "original_module.")]
        tensors = lora(Q, 24, 16) | dict.fromkeys(names[:2], table) | {names[2]: table[::-1]}
        path = adapter(tmp_path / "lora", tensors, modules_to_save=["embed_tokens"])
        assert list(xckpt.open(path).ckpt.adapters().index) == [Q, EMBED]
        changed = {Q: weights[Q] + 1.5 * product(Q, 24, 16), EMBED: table}
        assert_changed(saved(base.ckpt.merge(path), tmp_path), weights, changed)

    def test_linear_layers_with_inputs_first_are_turned(
        self, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        folder = adapter(tmp_path / "lora", lora(Q, 16, 24))
        merged = base.ckpt.merge(folder)[Q].values
        np.testing.assert_allclose(merged, weights[Q] + 1.5 * product(Q, 16, 24).T, rtol=1e-5)

    def test_other_methods_are_named_and_nothing_is_merged(
        self, base: xr.Dataset, tmp_path: Path
    ) -> None:
        tensors = {f"base_model.model.{Q[:-7]}.hada_w1_a": numbers(4, 4)} | lora(K, 16, 16)
        with pytest.raises(UnsupportedError, match="LoHa"):
            base.ckpt.merge(adapter(tmp_path / "loha", tensors))

    def test_half_precision_is_written_as_it_was(
        self, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        half = {name: values.astype(ml_dtypes.bfloat16) for name, values in weights.items()}
        xckpt.save(half, tmp_path / "half.safetensors")
        folder = adapter(tmp_path / "lora", lora(Q, 24, 16))
        merged = xckpt.open(tmp_path / "half.safetensors").ckpt.merge(folder)
        tensors = saved(merged, tmp_path)
        assert {values.dtype for values in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
        expected = half[Q].astype("f4") + np.float32(1.5) * product(Q, 24, 16)
        assert tensors[Q].tobytes() == expected.astype(ml_dtypes.bfloat16).tobytes()
        paths = [tmp_path / f"{name}.safetensors" for name in ("half", "new")]
        assert "1 merged" in repr(xckpt.compare(*paths, adapter=folder).ckpt)


class TestUpdates:
    def test_tensors_that_are_only_scaled_are_named(self, base: xr.Dataset) -> None:
        partial = base.drop_vars([NORM, FC])
        text = f"lacks stay multiplied by 0.5 .*'{FC}', '{NORM}'"
        with pytest.warns(CheckpointWarning, match=text):
            (base / 2).ckpt.merge(partial / 2, scale=1)
        with pytest.warns(CheckpointWarning, match="multiplied by 3"):
            (base * 3).ckpt.merge({Q: numbers(24, 16)})
        base.ckpt.merge({Q: numbers(24, 16)})
        (base / 2).ckpt.merge(base / 2, scale=1)
        ((base + base) / 2).ckpt.merge({Q: numbers(24, 16)})

    def test_a_difference_is_a_task_vector(
        self, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        tuned = {name: numbers(*weights[name].shape, seed=5) for name in (Q, K)}
        xckpt.save(tuned, tmp_path / "tuned.safetensors")
        vector = xckpt.open(tmp_path / "tuned.safetensors") - base
        merged = base.ckpt.merge(vector, scale=0.5)
        half = np.float32(0.5)
        expected = {n: weights[n] + (tuned[n] - weights[n]) * half for n in tuned}
        assert_changed(saved(merged, tmp_path), weights, expected)

    def test_a_mapping_of_arrays_is_added(
        self, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        update = numbers(24, 16, seed=8)
        merged = base.ckpt.merge({Q: update})
        assert_changed(saved(merged, tmp_path), weights, {Q: weights[Q] + update})

    def test_another_model_is_not_added_by_mistake(self, base: xr.Dataset, tmp_path: Path) -> None:
        message = r"no tensors of an adapter.*pass scale=1; \(a \+ b\) / 2 is the mean"
        for other in (base, tmp_path / "base.safetensors"):
            with pytest.raises(ValueError, match=message):
                base.ckpt.merge(other)
        doubled = base.ckpt.merge(base, scale=1)
        np.testing.assert_array_equal(doubled[Q], 2 * base[Q])

    @pytest.mark.parametrize("kind", ["mean", "scaled", "selected", "stacked"])
    def test_a_mean_is_not_added_by_mistake(
        self, kind: str, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        xckpt.save({name: 2 * array for name, array in weights.items()}, tmp_path / "b.safetensors")
        other = xckpt.open(tmp_path / "b.safetensors")
        means: dict[str, xr.Dataset] = {
            "mean": (base + other) / 2,
            "scaled": 0.5 * base + 0.1 * other,
            "selected": (base + other).ckpt.find("*weight"),
            "stacked": (base.ckpt.stack() + other.ckpt.stack()) / 2,
        }
        mean = means[kind]
        with pytest.raises(ValueError, match="no tensors of an adapter"):
            base.ckpt.merge(mean)
        assert set(base.ckpt.merge(mean, scale=1)) == set(base)

    @pytest.mark.parametrize("kind", ["opened", "path", "mean", "stacked"])
    def test_half_of_a_model_is_no_change(
        self, kind: str, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        path = tmp_path / "b.safetensors"
        xckpt.save({name: 2 * array for name, array in weights.items()}, path)
        other = xckpt.open(path)
        models: dict[str, Any] = {
            "opened": other,
            "path": path,
            "mean": (base + other) / 2,
            "stacked": xckpt.open(path, stack=True),
        }
        for model in (base, xckpt.open(tmp_path / "base.safetensors", stack=True)):
            with pytest.raises(ValueError, match="goes half of the way from a to b"):
                model.ckpt.merge(models[kind], scale=0.5)

    def test_saved_updates_have_a_scale(
        self, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        updates = {name: 0.01 * weights[name] for name in (Q, NORM)}
        xckpt.save(updates, tmp_path / "updates.safetensors")
        merged = base.ckpt.merge(tmp_path / "updates.safetensors", scale=0.5)
        assert_changed(
            saved(merged, tmp_path), weights, {n: weights[n] + 0.5 * updates[n] for n in updates}
        )

    @pytest.mark.parametrize("kind", ["masked", "ties", "sum", "of one"])
    def test_changes_need_no_scale(
        self, kind: str, base: xr.Dataset, weights: dict[str, Array], tmp_path: Path
    ) -> None:
        xckpt.save({name: 2 * array for name, array in weights.items()}, tmp_path / "b.safetensors")
        other = xckpt.open(tmp_path / "b.safetensors")
        change = other - base
        changes: dict[str, xr.Dataset] = {
            "masked": change.where(abs(change) > 0.1, 0) / 0.9,
            "ties": xr.concat([change, change / 2], "model").mean("model").fillna(0),
            "sum": (other - base) + (base - other) / 2,
            "of one": base.map(lambda tensor: 0.01 * tensor),
        }
        assert set(base.ckpt.merge(changes[kind])) == set(base)

    def test_unknown_names_and_shapes_are_named(self, base: xr.Dataset) -> None:
        with pytest.raises(ValueError, match="has none of the changed tensors: 'transformer'"):
            base.ckpt.merge({"transformer": numbers(4, 4)})
        with pytest.warns(CheckpointWarning, match="lacks tensors that are to be changed: 'xy'"):
            merged = base.ckpt.merge({"xy": numbers(4), Q: numbers(24, 16)})
        assert list(merged) == list(base)
        with pytest.raises(ValueError, match=r"shape \[24, 16\], and its change the shape \[4\]"):
            base.ckpt.merge({Q: numbers(4)})

    def test_nothing_to_merge_is_named(self, base: xr.Dataset, tmp_path: Path) -> None:
        folder = adapter(tmp_path / "lora", lora(Q, 24, 16))
        with pytest.warns(CheckpointWarning, match="matches none"):
            nothing = [xckpt.open(folder, tensors="typo"), (base * 2).ckpt.find("typo")]
        for change in (*nothing, {}):
            for scale in (None, 1):
                with pytest.raises(ValueError, match=r"nothing to merge: .* has no tensors"):
                    base.ckpt.merge(change, scale=scale)

    def test_a_difference_without_common_names_says_how_to_rename(self, base: xr.Dataset) -> None:
        other = base.rename({name: f"state_dict.{name}" for name in base})
        with pytest.raises(ValueError, match=r"nothing to merge: .*b\.rename.*names='auto'"):
            base.ckpt.merge(other - base)

    @pytest.mark.parametrize("name", [K, FC], ids=["square", "oblong"])
    @pytest.mark.parametrize("options", [{}, {"stack": True}], ids=["plain", "stacked"])
    def test_axes_are_matched_by_their_names(
        self, name: str, options: dict[str, Any], weights: dict[str, Array], tmp_path: Path
    ) -> None:
        other = {n.replace(".0.", ".1."): 2 * values for n, values in weights.items()}
        xckpt.save(weights | other, tmp_path / "model.safetensors")
        base = xckpt.open(tmp_path / "model.safetensors")
        scaled = base[[name]].transpose() * 2
        assert scaled[name].dims == base[name].dims[::-1]
        merged = xckpt.open(tmp_path / "model.safetensors", **options).ckpt.merge(scaled, scale=1)
        expected = (base + scaled)[name]
        assert merged.ckpt[name].dims == base[name].dims
        np.testing.assert_allclose(merged.ckpt[name], expected, rtol=1e-6)
        updates = {name: xr.DataArray(weights[name].T, dims=base[name].dims[::-1])}
        np.testing.assert_array_equal(base.ckpt.merge(updates)[name], 2 * weights[name])

    def test_axes_with_other_names_keep_their_positions(
        self, base: xr.Dataset, weights: dict[str, Array]
    ) -> None:
        for dims in (("a", "b"), (base[K].dims[1], "a")):
            update = xr.DataArray(weights[K], dims=dims)
            np.testing.assert_array_equal(base.ckpt.merge({K: update})[K], 2 * weights[K])

    def test_names_may_differ_by_a_prefix(
        self, base: xr.Dataset, weights: dict[str, Array]
    ) -> None:
        update = numbers(24, 16, seed=8)
        merged = base.ckpt.merge({Q.removeprefix("model."): update})
        np.testing.assert_array_equal(merged[Q], weights[Q] + update)


class TestObjects:
    @pytest.mark.parametrize("kind", ["stack", "tree", "memory", "loaded", "selected"])
    def test_of_all_kinds(
        self, kind: str, weights: dict[str, Array], base: xr.Dataset, tmp_path: Path
    ) -> None:
        path = tmp_path / "base.safetensors"
        objects: dict[str, Any] = {
            "stack": lambda: xckpt.open(path, stack=True),
            "tree": lambda: xr.open_datatree(path, engine="safetensors"),
            "memory": lambda: xckpt.open(weights),
            "loaded": base.load,
            "selected": lambda: base[[Q, K]],
        }
        obj = objects[kind]()
        names = [Q, K] if kind == "selected" else list(weights)
        merged = obj.ckpt.merge(adapter(tmp_path / "lora", lora(Q, 24, 16)))
        assert type(merged) is type(obj)
        tensors = saved(merged, tmp_path)
        assert sorted(tensors) == sorted(names)
        expected = weights[Q] + 1.5 * product(Q, 24, 16)
        np.testing.assert_allclose(tensors[Q], expected, rtol=1e-5, atol=1e-7)
        assert tensors[K].tobytes() == weights[K].tobytes()

    SELECTIONS: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "all": lambda ds: ds,
        "tree": lambda ds: ds,
        "fewer": lambda ds: ds.isel(layers=[0, 2]),
        "one": lambda ds: ds.isel(layers=0),
        "turned": lambda ds: ds.transpose(..., "layers", missing_dims="ignore"),
        "stacked later": lambda ds: ds.ckpt.unstack().ckpt.stack(),
        "absent": lambda ds: ds.ckpt.unstack().drop_vars(UP[2]).ckpt.stack(join="outer"),
        "in memory": lambda ds: ds.compute(),
    }

    @pytest.mark.parametrize("kind", SELECTIONS)
    def test_stacked_models_stay_stacked(self, kind: str, tmp_path: Path) -> None:
        models: list[Any] = []
        for seed in (1, 2):
            path = tmp_path / f"{seed}.safetensors"
            xckpt.save({name: numbers(4, 3, seed=seed) for name in (*LAYERS, "norm")}, path)
            if kind == "tree":
                models.append(xr.open_datatree(path, engine="safetensors", stack=True))
            else:
                models.append(xckpt.open(path, stack=True))
        a, b = map(self.SELECTIONS[kind], models)
        change = {LAYERS[0]: np.ones((4, 3), "f4")}
        merged = a.ckpt.merge(change)
        assert list(merged.variables) == list(a.variables)
        xr.testing.assert_equal(merged - a, (b * 0 + merged) - a)
        expected = {n: v.copy() for n, v in saved(a, tmp_path).items()}
        for ds in (merged, (merged * 2 + b * 0) / 2, merged.ckpt.unstack()):
            tensors = saved(ds, tmp_path)
            assert sorted(tensors) == sorted(expected)
            for name, values in expected.items():
                np.testing.assert_allclose(tensors[name], values + (name in change), rtol=1e-6)


class TestHeads:
    """The change of a head never takes the place of that of the embeddings."""

    HEAD = "lm_head.weight"
    CHANGE: ClassVar = {HEAD: np.full((40, 16), 2, "f4"), EMBED: np.ones((40, 16), "f4")}

    def model(self, **config: Any) -> xr.Dataset:
        weights = {EMBED: numbers(40, 16), NORM: numbers(16)}
        return xckpt.open(weights).assign_attrs(config={"model_type": "llama", **config})

    @pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False}], ids=str)
    @pytest.mark.parametrize("order", [1, -1])
    def test_each_tensor_gets_its_own_change(self, config: Any, order: int) -> None:
        change = dict([*self.CHANGE.items()][::order])
        model = self.model(**config)
        with pytest.warns(CheckpointWarning, match=r"lacks tensors.*changed: 'lm_head\.weight'$"):
            merged = model.ckpt.merge(change)
        np.testing.assert_allclose(merged[EMBED], model[EMBED] + 1)

    @pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}], ids=str)
    def test_both_changes_of_a_tied_tensor_may_be_the_same(self, config: Any) -> None:
        model = self.model(**config)
        merged = model.ckpt.merge(dict.fromkeys(self.CHANGE, self.CHANGE[EMBED]))
        np.testing.assert_allclose(merged[EMBED], model[EMBED] + 1)
        merged = model.ckpt.merge({self.HEAD: self.CHANGE[self.HEAD]})
        np.testing.assert_allclose(merged[EMBED], model[EMBED] + 2)

    @pytest.mark.parametrize("order", [1, -1])
    def test_names_of_another_format(self, order: int) -> None:
        shapes = {"token_embd": (40, 16), "blk.0.attn_norm": (16,), "blk.0.attn_q": (16, 16),
                  "blk.0.ffn_up": (24, 16), "blk.0.ffn_down": (16, 24)}  # fmt: skip
        model = xckpt.open({f"{name}.weight": numbers(*shape) for name, shape in shapes.items()})
        model = model.assign_attrs({"general.architecture": "llama", "llama.embedding_length": 16})
        with pytest.warns(CheckpointWarning, match=r"lacks tensors.*changed: 'lm_head\.weight'$"):
            merged = model.ckpt.merge(dict([*self.CHANGE.items()][::order]))
        new = merged["token_embd.weight"].values
        np.testing.assert_allclose(new, model["token_embd.weight"].values + 1)

    def test_a_head_that_is_not_tied_is_missing(self, tmp_path: Path) -> None:
        model = self.model(text_config={"tie_word_embeddings": False})
        head = lora(self.HEAD, 40, 16)
        with pytest.raises(ValueError, match=r"none of the changed tensors: 'lm_head\.weight'"):
            model.ckpt.merge(adapter(tmp_path / "head", head))
        with pytest.warns(CheckpointWarning, match=r"lacks.*changed: 'lm_head\.weight'$"):
            merged = model.ckpt.merge(adapter(tmp_path / "both", head | lora(EMBED, 40, 16)))
        assert np.abs(merged[EMBED] - model[EMBED]).max() > 0
        with pytest.raises(ValueError, match=r"none of the changed tensors: 'lm_head\.weight'"):
            model.ckpt.merge({self.HEAD: self.CHANGE[self.HEAD]})


class TestTiedHeads:
    """An adapter that trained the head, or the embeddings, of a tied model unties them, as PEFT."""

    HEAD = "lm_head.weight"
    MODULES: ClassVar = {
        "self_attn.q_proj": (16, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
        "input_layernorm": (16,),
    }  # fmt: skip

    @pytest.fixture(params=["stated", "by default", "GGUF", "tree", "stack"])
    def model(self, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
        names = {f"model.layers.{n}.{m}.weight": s for m, s in self.MODULES.items() for n in (0, 1)}
        weights = {n: numbers(*s) for n, s in names.items()} | {EMBED: numbers(40, 16)}
        self.head, self.table = self.HEAD, EMBED
        if request.param == "GGUF":
            gguf = {"model.layers": "blk", "self_attn.q_proj": "attn_q", "mlp.": "ffn_",
                    "_proj": "", "input_layernorm": "attn_norm",
                    "model.embed_tokens": "token_embd"}  # fmt: skip
            for old, new in gguf.items():
                weights = {name.replace(old, new): array for name, array in weights.items()}
            self.head, self.table = "output.weight", "token_embd.weight"
            attrs = {"general.architecture": "qwen2", "qwen2.embedding_length": 16,
                     "qwen2.block_count": 2}  # fmt: skip
            return xckpt.open(weights).assign_attrs(attrs)
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16}
        config["vocab_size"] = 40
        config |= {} if request.param == "by default" else {"tie_word_embeddings": True}
        folder = tmp_path / "base"
        folder.mkdir()
        half = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()}
        xckpt.save(half, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        if request.param == "tree":
            return xr.open_datatree(folder, engine="safetensors")
        return xckpt.open(folder, stack=request.param == "stack")

    def result(
        self, model: Any, tmp_path: Path, trained: dict[str, Array]
    ) -> tuple[dict[str, Array], Any]:
        """Return the tensors of the merged model, and whether its config states a tied head."""
        tensors = {f"base_model.model.{name}": array for name, array in trained.items()}
        module = "model.layers.0.self_attn.q_proj.weight"
        path = adapter(tmp_path / "lora", tensors | lora(module, 16, 16))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*lacks tensors.*")
            warnings.filterwarnings("ignore", ".*config.json|.*llama.cpp")
            merged = model.ckpt.merge(path)
            if self.head == "output.weight":
                return saved(merged, tmp_path, "new.gguf"), None
            merged.ckpt.save(f"{tmp_path}/merged/")
        config = json.loads((tmp_path / "merged/config.json").read_text())
        tensors = saved(xckpt.open(tmp_path / "merged"), tmp_path)
        return tensors, config.get("tie_word_embeddings")

    def verify(self, model: Any, tmp_path: Path) -> None:
        """Require that a comparison explains all tensors by the adapter, without a warning."""
        is_gguf = self.head == "output.weight"
        merged = tmp_path / ("new.gguf" if is_gguf else "merged")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = xckpt.compare(model, merged, adapter=tmp_path / "lora", progress=False)
        table = result.ckpt.table()
        assert set(table["outcome"]) == {"explained"}
        assert set(table.loc[table["status"] == "only_b", "cause"]) <= {"merged"}

    def rounded(self, values: Array) -> Array:
        return values if self.head == "output.weight" else values.astype(ml_dtypes.bfloat16)

    def test_a_trained_head_stays(self, model: Any, tmp_path: Path) -> None:
        new = numbers(40, 16, seed=7)
        tensors, tied = self.result(model, tmp_path, {self.HEAD: new})
        np.testing.assert_array_equal(tensors[self.head], self.rounded(new))
        np.testing.assert_array_equal(tensors[self.table], self.rounded(numbers(40, 16)))
        assert not tied
        self.verify(model, tmp_path)

    def test_trained_embeddings_leave_the_head(self, model: Any, tmp_path: Path) -> None:
        new = numbers(40, 16, seed=7)
        tensors, tied = self.result(model, tmp_path, {EMBED: new})
        np.testing.assert_array_equal(tensors[self.table], self.rounded(new))
        if self.head == "output.weight":  # which does not state that it has a head
            assert self.head not in tensors
        else:
            np.testing.assert_array_equal(tensors[self.head], self.rounded(numbers(40, 16)))
            assert tied is False
        self.verify(model, tmp_path)

    @pytest.mark.parametrize("read", ["load", "persist", "compute"])
    def test_a_base_in_memory_keeps_its_config(self, read: str, tmp_path: Path) -> None:
        names = {f"model.layers.{n}.{m}.weight": s for m, s in self.MODULES.items() for n in (0, 1)}
        weights = {n: numbers(*s) for n, s in names.items()} | {EMBED: numbers(40, 16)}
        weights[self.HEAD] = numbers(40, 16)
        (tmp_path / "base").mkdir()
        xckpt.save(weights, tmp_path / "base/model.safetensors")
        config = {"model_type": "llama", "hidden_size": 16, "vocab_size": 40}
        (tmp_path / "base/config.json").write_text(json.dumps(config))
        model = getattr(xckpt.open(tmp_path / "base"), read)()
        module = "model.layers.0.self_attn.q_proj.weight"
        path = adapter(tmp_path / "lora", lora(module, 16, 16))
        with pytest.warns(CheckpointWarning, match="written from the attributes"):
            model.ckpt.merge(path).ckpt.save(f"{tmp_path}/merged/")
        assert json.loads((tmp_path / "merged/config.json").read_text()) == config

    def test_both_stay(self, model: Any, tmp_path: Path) -> None:
        trained = {EMBED: numbers(44, 16, seed=7), self.HEAD: numbers(44, 16, seed=8)}
        tensors, tied = self.result(model, tmp_path, trained)
        np.testing.assert_array_equal(tensors[self.table], self.rounded(trained[EMBED]))
        np.testing.assert_array_equal(tensors[self.head], self.rounded(trained[self.HEAD]))
        assert not tied
        self.verify(model, tmp_path)

    @pytest.mark.parametrize("kind", ["trained", "old"])
    def test_equal_values_stay_tied(self, kind: str, model: Any, tmp_path: Path) -> None:
        if kind == "trained":  # ensure_weight_tying
            trained = dict.fromkeys([EMBED, self.HEAD], numbers(40, 16, seed=7))
        else:  # saved because of save_embedding_layers
            trained = {self.HEAD: self.rounded(numbers(40, 16)).astype("f4")}
        tensors, tied = self.result(model, tmp_path, trained)
        assert self.head not in tensors
        assert tied is not False
        np.testing.assert_array_equal(
            tensors[self.table], self.rounded(trained.get(EMBED, numbers(40, 16)))
        )

    @pytest.mark.parametrize("is_tied", [False, True])
    def test_an_update_of_embeddings_names_the_head(
        self, is_tied: bool, model: Any, tmp_path: Path
    ) -> None:
        config = {"ensure_weight_tying": True} if is_tied else {}
        path = adapter(tmp_path / "lora", lora(EMBED, 40, 16), **config)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            model.ckpt.merge(path)
        is_stated = self.head != "output.weight" and not is_tied
        assert any("'lm_head.weight' is tied to" in str(w.message) for w in caught) == is_stated

    def test_a_head_of_its_own_stays_as_it_is(self, tmp_path: Path) -> None:
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        base = xckpt.open({EMBED: numbers(40, 16), NORM: numbers(16)}).assign_attrs(config=config)
        base = base.assign({self.HEAD: base[EMBED]})
        with warnings.catch_warnings():
            warnings.simplefilter("error", CheckpointWarning)
            merged = base.ckpt.merge(adapter(tmp_path / "lora", lora(EMBED, 40, 16)))
        np.testing.assert_array_equal(merged[self.HEAD], numbers(40, 16))
        assert not np.array_equal(merged[EMBED], numbers(40, 16))

    def test_a_trained_tensor_that_the_model_lacks_is_added(self, tmp_path: Path) -> None:
        base = xckpt.open({Q: numbers(24, 16), NORM: numbers(16)})
        new = {"classifier.weight": numbers(3, 16), "classifier.bias": numbers(3)}
        trained = {f"base_model.model.{name}": array for name, array in new.items()}
        merged = base.ckpt.merge(adapter(tmp_path / "lora", lora(Q, 24, 16) | trained))
        tensors = saved(merged, tmp_path)
        assert set(tensors) == {Q, NORM, *new}
        for name, array in new.items():
            np.testing.assert_array_equal(tensors[name], array)
        path = adapter(tmp_path / "other", lora(Q, 24, 16) | lora(K, 16, 16) | trained)
        with pytest.warns(CheckpointWarning, match=r"lacks tensors.*'classifier\.bias'"):
            assert set(base.ckpt.merge(path)) == {Q, NORM}


def test_updates_of_names_without_a_module() -> None:
    merged = xckpt.open({"embed": np.ones((2, 3), "f4")}).ckpt.merge({"embed": np.ones((2, 3))})
    np.testing.assert_array_equal(merged["embed"], 2)


class TestOperandsOfUpdates:
    """Arithmetic of adapters and updates names what it drops, and multiplies the right axes."""

    @pytest.fixture(autouse=True)
    def _models(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        write_models(tmp_path)
        factors = xckpt.open("adapter")
        first = [name for name in factors if ".layers.0." in str(name)]
        Path("small").mkdir()
        factors[first].ckpt.save("small/adapter_model.safetensors")
        shutil.copy("adapter/adapter_config.json", "small/adapter_config.json")

    def test_sums_of_updates_name_what_they_drop(self) -> None:
        total = xckpt.open("adapter").ckpt.updates() + xckpt.open("small").ckpt.updates()
        text = r"2 of 4 tensors of adapter missing.*: 'model\.layers\.1\.self_attn\.[qv]_proj"
        with pytest.warns(CheckpointWarning, match=text):
            total.ckpt.save("sum.safetensors")
        with pytest.warns(CheckpointWarning, match=text):
            xckpt.open("base.safetensors").ckpt.merge(total)
        assert "2 of 4 tensors of adapter missing" in repr(total.ckpt)

    def test_sums_of_task_vectors_name_what_they_drop(self) -> None:
        base, a, b = (xckpt.open(f"{n}.safetensors") for n in ("base", "model-1", "decoder"))
        with pytest.warns(CheckpointWarning, match=r"3 of 21 tensors of model-1\.safetensors"):
            base.ckpt.merge((a - base) + (b - base))
        both = base.ckpt.merge(a - base).ckpt.merge(b - base)
        both.ckpt.save("both.safetensors")
        assert len(xckpt.open("both.safetensors")) == 21

    def test_factors_are_multiplied_along_the_rank(self) -> None:
        ds, base = xckpt.open("adapter"), xckpt.open("base.safetensors")
        name = "model.layers.0.self_attn.q_proj"
        a, b = (ds[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        product = b @ a
        np.testing.assert_allclose(product, b.values @ a.values, rtol=1e-5, atol=1e-7)
        weight = base[f"{name}.weight"] + 2 * product
        assert weight.dims == base[f"{name}.weight"].dims
        merged = base.ckpt.merge("adapter")[f"{name}.weight"]
        np.testing.assert_allclose(weight, merged, rtol=2**-7, atol=2**-7)

    def test_axes_in_another_order_are_named(self) -> None:
        name, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
        base = xckpt.open("base.safetensors")
        scaled = base.drop_vars(name).assign({name: base[norm] * base[name]})
        assert scaled[name].dims == ("embd", "head*key")
        text = r"another order.*transpose\('head\*key', 'embd'\)"
        with pytest.warns(CheckpointWarning, match=text):
            scaled.ckpt.save("scaled.safetensors")
        in_order = scaled.assign({name: scaled[name].transpose(*base[name].dims)})
        in_order.ckpt.save("scaled.safetensors", overwrite=True)
        base.drop_vars(name).assign({name: base[name].T}).ckpt.save("turned.safetensors")

    def test_axes_turned_by_a_vector_of_the_tensor_itself_are_named(self) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        base = xckpt.open("base.safetensors")
        normed = (base[name] ** 2).sum("ff") ** -0.5 * base[name]
        assert normed.dims == ("embd", "ff")
        with pytest.warns(CheckpointWarning, match=r"another order.*transpose\('ff', 'embd'\)"):
            base.assign({name: normed}).ckpt.save("normed.safetensors")
        base.assign({name: 2 * base[name].T}).ckpt.save("turned.safetensors")

    @pytest.mark.parametrize(
        ("name", "vector"),
        [("lm_head.weight", "model.norm.weight"), ("x.weight", "x.bias")],
        ids=["named", "unnamed"],
    )
    def test_axes_of_oblong_tensors_in_another_order_are_named(
        self, name: str, vector: str
    ) -> None:
        shapes = {"lm_head.weight": (10, 8), "model.norm.weight": (8,), "x.weight": (6, 4)}
        tensors = {n: numbers(*shape) for n, shape in shapes.items()} | {"x.bias": numbers(4)}
        xckpt.save(tensors, "oblong.safetensors")
        base = xckpt.open("oblong.safetensors")
        (dim,), dims = base[vector].dims, base[name].dims
        row = base[vector].rename({dim: dims[1]}) if dim != dims[1] else base[vector]
        scaled = row * base[name]
        assert scaled.dims == dims[::-1]
        with pytest.warns(CheckpointWarning, match="another order") as caught:
            base.drop_vars(name).assign({name: scaled}).ckpt.save("scaled.safetensors")
        assert f"{name}.transpose{dims}" in str(caught[0].message)
        in_order = base.assign({name: scaled.transpose(*dims)})
        in_order.ckpt.save("scaled.safetensors", overwrite=True)
        base.assign({name: base[name].T}).ckpt.save("turned.safetensors")

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda a: 0.5 * a, r"updates of an adapter are multiplied by 0\.25,.*'model\.layers"),
            (lambda a: -a, "multiplied by 1,"),
            (lambda a: a.map(lambda factor: factor / 2), "multiplied by 0.25,"),
            (lambda a: a + xckpt.open("other"), "several adapters.*not the sum of their updates"),
            (lambda a: a - xckpt.open("other"), "several adapters.*not the sum of their updates"),
            (lambda a: (a + xckpt.open("other")) / 2, "averaged.*not the mean.*scale=.5"),
            (lambda a: 0.3 * a + 0.7 * xckpt.open("other"), "averaged.*extract_adapter"),
        ],
        ids=["half", "negative", "map", "sum", "difference", "mean", "weights"],
    )
    def test_scaled_factors_are_no_scaled_update(self, change: Any, text: str) -> None:
        shutil.copytree("adapter", "other")
        other = {str(name): factor.values + 1 for name, factor in xckpt.open("adapter").items()}
        xckpt.save(other, "other/adapter_model.safetensors", overwrite=True)
        with pytest.warns(CheckpointWarning, match=text):
            change(xckpt.open("adapter")).ckpt.save("out.safetensors")

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda x, _: 0.5 * x, r"multiplied by 0\.25,.*merge\(adapter, scale=.*'model\."),
            (
                lambda x, y: (x + y) / 2,
                r"averaged.*merge\(x, scale=\.5\)\..*'model\.",
            ),
            (lambda x, y: x + y, "several adapters are added"),
        ],
        ids=["half", "mean", "sum"],
    )
    def test_merging_scaled_factors_is_a_warning(self, change: Any, text: str) -> None:
        shutil.copytree("adapter", "other")
        other = {str(name): factor.values + 1 for name, factor in xckpt.open("adapter").items()}
        xckpt.save(other, "other/adapter_model.safetensors", overwrite=True)
        base, x, y = (xckpt.open(name) for name in ("base.safetensors", "adapter", "other"))
        with pytest.warns(CheckpointWarning, match=text):
            base.ckpt.merge(change(x, y), scale=1)
        base.ckpt.merge(x, scale=0.5).ckpt.merge(y, scale=0.5)
        base.ckpt.merge(x.assign((0.5 * x.ckpt.find("*lora_B*")).data_vars), scale=1)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda x, _: 0.5 * x, r"multiplied by 0\.25,.*'model\.layers\.0.*'model\.layers\.1"),
            (lambda x, y: (x + y) / 2, r"averaged.*'model\.layers\.0.*'model\.layers\.1"),
            (lambda x, y: xr.concat([x, y], "x").mean("x"), "averaged"),
            (lambda x, y: x + y, "several adapters are added"),
        ],
        ids=["half", "mean", "mean of concat", "sum"],
    )
    def test_stacked_factors_are_no_stacked_update(self, change: Any, text: str) -> None:
        shutil.copytree("adapter", "other")
        other = {str(name): factor.values + 1 for name, factor in xckpt.open("adapter").items()}
        xckpt.save(other, "other/adapter_model.safetensors", overwrite=True)
        x, y = (xckpt.open(name, stack=True) for name in ("adapter", "other"))
        with pytest.warns(CheckpointWarning, match=text):
            change(x, y).ckpt.save("out.safetensors")
        with pytest.warns(CheckpointWarning, match=text):
            xckpt.open("base.safetensors").ckpt.merge(change(x, y), scale=1)

    def test_the_mean_of_steps_is_no_mean_of_updates(self) -> None:
        for number in (1, 2):
            folder = shutil.copytree("adapter", f"tuning/checkpoint-{number}")
            factors = {str(n): f.values + number for n, f in xckpt.open("adapter").items()}
            xckpt.save(factors, Path(folder, "adapter_model.safetensors"), overwrite=True)
        run = xckpt.open_steps("tuning")
        with pytest.warns(CheckpointWarning, match=r"averaged.*not the mean.*scale=\.5"):
            run.mean("step", skipna=False).ckpt.save("mean.safetensors")
        run.isel(step=0).ckpt.save("first.safetensors")

    def test_concatenated_factors_are_not_averaged(self) -> None:
        a = xckpt.open("adapter")
        shutil.copytree("adapter", "other")
        other = {str(name): factor.values + 1 for name, factor in a.items()}
        xckpt.save(other, "other/adapter_model.safetensors", overwrite=True)
        xr.concat([a, xckpt.open("other")], "rank").ckpt.save("both.safetensors")
        with pytest.warns(CheckpointWarning, match="averaged"):
            xr.concat([a, xckpt.open("other")], "x").mean("x").ckpt.save("mean.safetensors")

    def test_the_mean_of_equal_factors_is_that_of_the_updates(self) -> None:
        shutil.copytree("adapter", "same")
        a, same = xckpt.open("adapter"), xckpt.open("same")
        ((a + same) / 2).ckpt.save("mean.safetensors")
        # One factor that all have in common, such as a frozen one.
        other = {str(n): f.values * (1 + ("lora_B" in str(n))) for n, f in same.items()}
        xckpt.save(other, "same/adapter_model.safetensors", overwrite=True)
        ((a + xckpt.open("same")) / 2).ckpt.save("frozen.safetensors")

    def test_one_scaled_factor_is_an_adapter(self) -> None:
        a = xckpt.open("adapter")
        half = a.assign((0.5 * a.ckpt.find("*lora_B*")).data_vars)
        half.ckpt.save("assigned.safetensors")
        left = {name: 0.5 * a[name] for name in a if "lora_B" in str(name)}
        a.drop_vars(list(left)).assign(left).ckpt.save("half.safetensors")


def test_a_step_of_a_run_keeps_its_type(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": numbers(8, 4, seed=3)}
    paths = [tmp_path / f"step-{number}.safetensors" for number in (1, 3)]
    for path in paths:
        xckpt.save(tensors, path, dtype="bfloat16", cast="allow")
    run = xckpt.open_steps(str(tmp_path / "step-*.safetensors"))
    steps = xckpt.open(paths[1]), run.sel(step=3), run.sel(step=3, drop=True)
    for number, step in enumerate(steps):
        step.ckpt.merge(tensors, scale=0.3).ckpt.save(tmp_path / f"out-{number}.safetensors")
    written = [(tmp_path / f"out-{number}.safetensors").read_bytes() for number in range(3)]
    (tensor,) = xckpt.read_index(tmp_path / "out-0.safetensors").tensors.values()
    assert tensor.dtype == "bfloat16"
    assert written[1] == written[0] == written[2]


@pytest.mark.parametrize("are_equal", [True, False])
def test_a_tied_head_that_is_stored_beside_the_embeddings_changes_with_them(
    are_equal: bool, tmp_path: Path
) -> None:
    table = numbers(40, 16)
    head = 2 * table
    weights = {EMBED: table, "lm_head.weight": table if are_equal else head}
    weights |= {
        f"model.layers.{n}.self_attn.{m}_proj.weight": numbers(16, 16)
        for n in range(2)
        for m in "qkvo"
    }
    xckpt.save(weights, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16}
    config |= {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    base, change = xckpt.open(tmp_path), numbers(40, 16)
    merged = base.ckpt.merge(xckpt.open({EMBED: change}))
    np.testing.assert_array_equal(merged[EMBED].values, table + change)
    expected = table + change if are_equal else head
    np.testing.assert_array_equal(merged["lm_head.weight"].values, expected)


def test_a_model_in_memory_keeps_its_type(tmp_path: Path) -> None:
    weight = numbers(16, 16).astype(ml_dtypes.bfloat16)
    base = {"model.layers.0.self_attn.q_proj.weight": weight, "model.norm.weight": weight[0]}
    factors = lora("model.layers.0.self_attn.q_proj.weight", 16, 16)
    merged = xckpt.open(base).ckpt.merge(factors, scale=2)
    tensors = saved(merged, tmp_path)
    update = 2 * np.matmul(*reversed(factors.values()))
    expected = (weight.astype("f4") + update).astype(weight.dtype)
    np.testing.assert_array_equal(tensors["model.layers.0.self_attn.q_proj.weight"], expected)


class TestTiedInMemory:
    """Arrays of a mapping that are the same memory, as in the state dict of a tied model."""

    @pytest.mark.parametrize("changed", [EMBED, "lm_head.weight"])
    def test_both_change(self, changed: str, tmp_path: Path) -> None:
        # A tied model has one parameter for both: it would load the last one.
        table, change = numbers(40, 16), numbers(40, 16, seed=1)
        state = {EMBED: table, "lm_head.weight": table, "model.norm.weight": numbers(16)}
        tensors = saved(xckpt.open(state).ckpt.merge({changed: change}), tmp_path)
        for name in (EMBED, "lm_head.weight"):
            np.testing.assert_array_equal(tensors[name], table + change)

    @pytest.mark.parametrize("name", [EMBED, "lm_head.weight"])
    def test_one_that_was_replaced_is_no_longer_tied(self, name: str) -> None:
        table, change = numbers(40, 16), numbers(40, 16, seed=1)
        base = xckpt.open({EMBED: table, "lm_head.weight": table})
        base[name] = base[name] * 2
        merged = base.ckpt.merge({EMBED: change})
        factors = {EMBED: 1, "lm_head.weight": 1} | {name: 2}
        np.testing.assert_array_equal(merged[EMBED].values, factors[EMBED] * table + change)
        np.testing.assert_array_equal(
            merged["lm_head.weight"].values, factors["lm_head.weight"] * table
        )

    def test_views_of_one_memory_with_other_elements_are_not_tied(self) -> None:
        both, change = numbers(80, 16), numbers(40, 16)
        base = xckpt.open({EMBED: both[:40], "lm_head.weight": both[40:]})
        merged = base.ckpt.merge({EMBED: change})
        np.testing.assert_array_equal(merged["lm_head.weight"].values, both[40:])
