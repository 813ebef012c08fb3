"""Arithmetic between checkpoints drops no tensor without a word."""

from __future__ import annotations

import json
import pickle
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import h5py
import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

Q = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)]
UP = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(3)]
HEAD = "lm_head.weight"
ALL = [*Q, *UP, HEAD]


def opened(path: Path, names: Collection[str], seed: int = 0, **options: Any) -> xr.Dataset:
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(size=(4, 4)).astype("f4") for name in names}
    xckpt.save(tensors, path)
    return xckpt.open(path, **options)


def warnings_of(ds: Any, path: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds.ckpt.save(path, overwrite=True)
    return [str(warning.message) for warning in caught]


@pytest.fixture
def base(tmp_path: Path) -> xr.Dataset:
    return opened(tmp_path / "base.safetensors", ALL)


@pytest.fixture
def some(tmp_path: Path) -> xr.Dataset:
    """A checkpoint that lacks four of the tensors."""
    return opened(tmp_path / "some.safetensors", Q, seed=1)


@pytest.fixture
def tuned(tmp_path: Path) -> xr.Dataset:
    """A checkpoint that has all tensors."""
    return opened(tmp_path / "tuned.safetensors", ALL, seed=2)


def mean_by_function(a: xr.Dataset, b: xr.Dataset) -> xr.Dataset:
    options: Any = {"dask": "allowed", "dataset_join": "inner"}
    ds: xr.Dataset = xr.apply_ufunc(lambda x, y: (x + y) / 2, a, b, **options)
    return ds


DERIVED: dict[str, Callable[[xr.Dataset, xr.Dataset, xr.Dataset], xr.Dataset]] = {
    "sum": lambda base, some, _: base + some,
    "reversed": lambda base, some, _: some + base,
    "weights": lambda base, some, _: 0.3 * base + 0.7 * some,
    "mean of three": lambda base, some, tuned: (base + some + tuned) / 3,
    "task vector": lambda base, some, tuned: tuned + 0.5 * (base - some),
    "map": lambda base, some, _: (base + some).map(lambda tensor: tensor * 2),
    "function": lambda base, some, _: mean_by_function(base, some),
    "where": lambda base, some, _: base.where(base > 0, 0) + some,
    "type": lambda base, some, _: (base + some).astype("float64"),
    "pickled": lambda base, some, _: pickle.loads(pickle.dumps(base + some)),
    "merged": lambda base, some, _: xr.merge([base + some]),
    "concatenated": lambda base, some, _: xr.concat([base + some, some], "copy").mean("copy"),
    "renamed later": lambda base, some, _: (base + some).rename({Q[0]: "q"}),
    "array in memory": lambda base, some, _: base + some.load(),
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_saving_warns_of_tensors_that_arithmetic_dropped(
    derive: Callable[..., xr.Dataset],
    base: xr.Dataset,
    some: xr.Dataset,
    tuned: xr.Dataset,
    tmp_path: Path,
) -> None:
    ds = derive(base, some, tuned)
    assert len(ds) == 3
    (text, *others) = warnings_of(ds, tmp_path / "new.safetensors")
    assert not others
    assert "4 of 7 tensors of base.safetensors missing" in text
    assert "base.ckpt.merge(updates)" in text
    for name in [*UP, HEAD]:
        assert repr(name) in text
    assert not any(repr(name) in text for name in Q)


def test_a_head_that_one_side_has_tied_is_named_with_the_remedy(tmp_path: Path) -> None:
    shapes = {f"self_attn.{name}_proj": (4, 4) for name in "qkvo"} | {
        "mlp.up_proj": (6, 4), "mlp.gate_proj": (6, 4), "mlp.down_proj": (4, 6),
        "input_layernorm": (4,), "post_attention_layernorm": (4,),
    }  # fmt: skip
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    names = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    for side, seed in (("tied", 1), ("untied", 2)):
        folder, rng = tmp_path / side, np.random.default_rng(seed)
        folder.mkdir()
        of_side = names | {table: (8, 4)} | ({head: (8, 4)} if side == "untied" else {})
        tensors = {name: rng.normal(size=shape).astype("f4") for name, shape in of_side.items()}
        xckpt.save(tensors, folder / "model.safetensors")
        config = {"model_type": "llama", "tie_word_embeddings": side == "tied", "vocab_size": 8}
        (folder / "config.json").write_text(json.dumps(config))
    a, b = xckpt.open(tmp_path / "untied"), xckpt.open(tmp_path / "tied")
    for mean in ((a + b) / 2, 0.3 * b + 0.7 * a):
        (text, *others) = warnings_of(mean, tmp_path / "new.safetensors")
        assert not others
        remedy = f"b.assign({{{head!r}: b[{table!r}]}})"
        assert "1 of 11 tensors of untied missing" in text
        assert remedy in text
        assert "merge" not in text
    mean = (a + b.assign({head: b[table]})) / 2
    with pytest.warns(CheckpointWarning, match="tie_word_embeddings True"):  # of the other
        mean.ckpt.save(f"{tmp_path}/mean/")
    np.testing.assert_array_equal(xckpt.open(tmp_path / "mean")[head], (a[head] + b[table]) / 2)
    config = json.loads((tmp_path / "mean/config.json").read_text())
    assert config["tie_word_embeddings"] is False


COMPLETE: dict[str, Callable[[xr.Dataset, xr.Dataset, xr.Dataset], Any]] = {
    "all": lambda base, _, tuned: base + tuned,
    "factor": lambda base, _, __: base.ckpt.find("*.q_proj.*") * 2,
    "selected": lambda base, _, tuned: base.ckpt.find("*.q_proj.*") + tuned,
    "selected before": lambda base, _, tuned: base[Q] + tuned[Q],
    "selected after": lambda base, _, tuned: (base + tuned)[Q],
    "assigned": lambda base, some, _: base.assign({name: base[name] + some[name] for name in some}),
    "added again": lambda base, some, _: xr.merge([base + some, base[[*UP, HEAD]]]),
    "another head": lambda base, some, _: base.drop_vars(HEAD).assign(
        {"new": base[HEAD] + some[Q[0]]}
    ),
    "array": lambda base, _, __: base[Q] * xr.DataArray(np.ones(4, "f4"), dims=base[Q[0]].dims[:1]),
    "one tensor": lambda base, some, _: base[Q[0]] + some[Q[0]],
    "renamed": lambda base, _, tuned: (
        base.rename({name: f"model.{name}" for name in ALL})
        + tuned.rename({name: f"model.{name}" for name in ALL})
    ),
}


def test_tensors_of_a_mapping_that_arithmetic_dropped_are_named(
    base: xr.Dataset, some: xr.Dataset, tmp_path: Path
) -> None:
    large, small = ({str(n): v.values for n, v in ds.items()} for ds in (base, some))
    text = r"4 of 7 tensors of a mapping missing, as arithmetic keeps.*'model\.layers\.0\.mlp"
    for result in (
        xckpt.open(large) + xckpt.open(small),
        (0.3 * xckpt.open(small) + 0.7 * xckpt.open(large)) / 2,
        xckpt.open(large) + some,
        some - xckpt.open(large),
        xckpt.open(large).copy(deep=True) + some,
        pickle.loads(pickle.dumps(xckpt.open(large) + xckpt.open(small))),
    ):
        with pytest.warns(CheckpointWarning, match=text):
            result.ckpt.save(tmp_path / "out.safetensors", overwrite=True)
        assert "4 of 7 tensors of a mapping missing" in repr(result.ckpt)
    text = r"4 of 7 tensors of base\.safetensors missing"
    with pytest.warns(CheckpointWarning, match=text):
        (base + xckpt.open(small)).ckpt.save(tmp_path / "out.safetensors", overwrite=True)
    for result in (
        xckpt.open(large)[Q] + base,
        (xckpt.open(large) + base)[Q],
        xckpt.open(large).ckpt.find("*.q_proj.*") + base,
        xckpt.open(large).ckpt.merge(some - xckpt.open(large)),
    ):
        result.ckpt.save(tmp_path / "out.safetensors", overwrite=True)


@pytest.mark.parametrize("derive", COMPLETE.values(), ids=COMPLETE)
def test_tensors_that_the_user_left_out_are_no_loss(
    derive: Callable[..., Any],
    base: xr.Dataset,
    some: xr.Dataset,
    tuned: xr.Dataset,
    tmp_path: Path,
) -> None:
    assert warnings_of(derive(base, some, tuned), tmp_path / "new.safetensors") == []


def test_an_array_for_one_of_the_tensors_drops_all_others(base: xr.Dataset, tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    update: Any = {HEAD: np.ones((4, 4), "f4")}
    (text,) = warnings_of(base + update, path)
    assert "6 of 7 tensors of base.safetensors missing" in text
    row = xr.DataArray(np.ones(4, "f4"), dims=base[HEAD].dims[:1])
    assert warnings_of(base[[HEAD]] * row, path) == []
    assert warnings_of(base[[HEAD]] * 2, path) == []


def test_tensors_that_were_not_opened_are_no_loss(some: xr.Dataset, tmp_path: Path) -> None:
    base = opened(tmp_path / "base.safetensors", ALL, tensors="*.q_proj.*")
    assert warnings_of(base + some, tmp_path / "new.safetensors") == []


def test_both_sides_may_lack_tensors(base: xr.Dataset, tmp_path: Path) -> None:
    other = opened(tmp_path / "other.safetensors", [*Q, "model.norm.weight"])
    (text,) = warnings_of(base + other, tmp_path / "new.safetensors")
    assert "4 of 7 tensors of base.safetensors missing" in text
    assert "1 of 4 tensors of other.safetensors missing" in text


def test_stacked_tensors_are_named_one_by_one(tmp_path: Path) -> None:
    base = opened(tmp_path / "base.safetensors", ALL, stack=True)
    other = opened(tmp_path / "some.safetensors", Q, stack=True)
    (text,) = warnings_of(base + other, tmp_path / "new.safetensors")
    assert "4 of 7 tensors of base.safetensors missing" in text
    assert repr(UP[0]) in text


@pytest.mark.parametrize("chosen", [slice(None), slice(1, 3)], ids=["all", "selected"])
def test_layers_that_only_one_stack_has_are_named(chosen: slice, tmp_path: Path) -> None:
    base = opened(tmp_path / "base.safetensors", ALL, stack=True)
    other = opened(tmp_path / "other.safetensors", [*Q[:2], *UP[:2], HEAD], stack=True)
    ds = base.isel(layers=chosen) + other
    (text,) = warnings_of(ds, tmp_path / "new.safetensors")
    assert "2 of 7 tensors of base.safetensors missing" in text
    assert repr(Q[2]) in text
    assert "2 of 7 tensors of base.safetensors missing" in repr(ds.ckpt)


def test_repeated_layers_that_only_one_side_has_are_named(tmp_path: Path) -> None:
    a, b = (opened(tmp_path / f"{name}.safetensors", ALL, stack=True) for name in "ab")
    deep, other = (ds.isel(layers=[0, 1, 2, 1, 2]).assign_coords(layers=range(5)) for ds in (a, b))
    (text,) = warnings_of((deep + b) / 2, tmp_path / "mean.safetensors")
    assert "4 repeated tensors of a.safetensors missing, as arithmetic keeps the numbers" in text
    assert f"'{UP[1]} at position 3 of layers'" in text
    assert warnings_of((deep + other) / 2, tmp_path / "same.safetensors") == []
    assert warnings_of(deep.isel(layers=[0, 1, 2]), tmp_path / "chosen.safetensors") == []


def test_layers_that_the_user_left_out_are_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    base = opened(tmp_path / "base.safetensors", ALL, stack=True)
    assert warnings_of((base * 2).isel(layers=[0]), path) == []
    assert warnings_of((base + base).isel(layers=[0]), path) == []


# --- labels ---------------------------------------------------------------------------------------

LAYERS = [*Q, *UP]
#: Factors along layers 1 and 2 of 0, 1 and 2.
SHIFTED: dict[str, Callable[[xr.Dataset, xr.Dataset, xr.DataArray], Any]] = {
    "factor first": lambda a, _, weights: weights * a,
    "factor last": lambda a, _, weights: a * weights,
    "sum of two": lambda a, b, weights: (0.5 * a + b) * weights,
    "pickled": lambda a, _, weights: pickle.loads(pickle.dumps(a * weights)),
    "reduced": lambda a, _, weights: (a * weights).sum("layers"),
}


def numbers(dim: str, *labels: int) -> xr.DataArray:
    return xr.DataArray(np.ones(len(labels), "f4"), {dim: list(labels)}, (dim,))


@pytest.mark.parametrize("derive", SHIFTED.values(), ids=SHIFTED)
def test_layers_without_a_factor_of_their_number_are_named(
    derive: Callable[..., Any], tmp_path: Path
) -> None:
    a, b = (opened(tmp_path / f"{n}.safetensors", LAYERS, seed=n, stack=True) for n in range(2))
    path = tmp_path / "new.safetensors"
    (text,) = warnings_of(derive(a, b, numbers("layers", 1, 2, 3)), path)
    assert "2 of 6 tensors of 0.safetensors missing" in text
    assert "numbers of layers that both sides have" in text
    assert "layers=ds['layers']" in text
    assert repr(Q[0]) in text
    assert repr(Q[1]) not in text
    assert warnings_of(derive(a, b, numbers("layers", 0, 1, 2)), path) == []
    (text,) = warnings_of(derive(a, b, numbers("layers", 7, 8)), path)
    assert "6 of 6 tensors of 0.safetensors missing" in text


@pytest.mark.parametrize("chosen", [[1, 2], slice(1, 3)], ids=["list", "slice"])
def test_factors_of_selected_layers_are_no_loss(chosen: Any, tmp_path: Path) -> None:
    a = opened(tmp_path / "a.safetensors", ALL, stack=True).ckpt.find("*.layers.*")
    path = tmp_path / "new.safetensors"
    assert warnings_of(a.isel(layers=chosen) * numbers("layers", 1, 2), path) == []
    assert warnings_of((a * numbers("layers", 0, 1, 2)).isel(layers=chosen), path) == []
    # The factor of a layer that was not selected is not needed.
    assert warnings_of(a.isel(layers=chosen) * numbers("layers", 0, 1, 2), path) == []


def test_layers_that_were_not_selected_are_not_named(tmp_path: Path) -> None:
    a, b = (opened(tmp_path / f"{n}.safetensors", ALL, seed=n, stack=True) for n in range(2))
    path = tmp_path / "new.safetensors"
    assert warnings_of(a.isel(layers=[0, 1]) + b, path) == []
    assert warnings_of(b + a.isel(layers=[0, 1]), path) == []
    aligned, _ = xr.align(a.ckpt.find("*.layers.*"), numbers("layers", 1, 2), join="inner")
    assert warnings_of(aligned, path) == []


@pytest.mark.parametrize("stack", [False, True], ids=["flat", "stacked"])
def test_steps_without_a_weight_of_their_number_are_named(stack: bool, tmp_path: Path) -> None:
    for step in (100, 200, 300):
        opened(tmp_path / f"step-{step}.safetensors", ALL, seed=step)
    run = xckpt.open_steps(str(tmp_path / "step-*.safetensors"), stack=stack)
    path = tmp_path / "new.safetensors"
    (text,) = warnings_of((run * numbers("step", 200, 300, 400)).sum("step"), path)
    assert "7 of 21 tensors" in text
    assert repr(f"step.100.{HEAD}") in text
    (text,) = warnings_of((run * numbers("step", 1, 2, 3)).sum("step"), path)
    assert "21 of 21 tensors" in text
    assert warnings_of((run * numbers("step", 100, 200, 300)).sum("step"), path) == []
    last = run.isel(step=slice(-2, None))
    assert warnings_of((last * numbers("step", 200, 300)).sum("step"), path) == []


# --- stacks ---------------------------------------------------------------------------------------

ONE_STACKED: dict[str, Callable[[xr.Dataset, xr.Dataset], xr.Dataset]] = {
    "first": lambda stacked, flat: stacked + flat,
    "last": lambda stacked, flat: flat - stacked,
    "mean": lambda stacked, flat: (stacked + flat) / 2,
    "stacked later": lambda stacked, flat: stacked.ckpt.unstack().ckpt.stack() + flat,
    "in memory": lambda stacked, flat: stacked + flat.load(),
    "pickled": lambda stacked, flat: pickle.loads(pickle.dumps(stacked + flat)),
}


@pytest.mark.parametrize("derive", ONE_STACKED.values(), ids=ONE_STACKED)
def test_layers_that_only_one_side_has_stacked_are_named(
    derive: Callable[..., xr.Dataset], tmp_path: Path
) -> None:
    stacked = opened(tmp_path / "a.safetensors", ALL, stack=True)
    flat = opened(tmp_path / "b.safetensors", ALL, seed=1)
    ds = derive(stacked, flat)
    (text,) = warnings_of(ds, tmp_path / "new.safetensors")
    assert "6 of 7 tensors of a.safetensors missing" in text
    assert "stacked along layers" in text
    assert ".ckpt.stack()" in text
    assert "6 of 7 tensors" in repr(ds.ckpt)
    whole = derive(stacked, flat.ckpt.stack())
    assert warnings_of(whole, tmp_path / "new.safetensors") == []


UNSTACKED: dict[str, Callable[[xr.Dataset, xr.Dataset, xr.Dataset], xr.Dataset]] = {
    "first": lambda a, b, _: a.ckpt.unstack() + b,
    "last": lambda a, b, _: b * 0.5 - a.ckpt.unstack() * 0.5,
    "merged": lambda a, b, _: a.ckpt.merge(b - a).ckpt.unstack() + b,
    "again": lambda a, b, _: a.ckpt.unstack().ckpt.stack() + b.ckpt.unstack(),
    "of one": lambda a, _, __: a.ckpt.unstack() * 0.5 + a * 0.5,
    "merged, of one": lambda a, _, __: a * 0.5 + a.ckpt.merge(a, scale=1).ckpt.unstack(),
    "of one file": lambda a, _, flat: a * 0.5 + flat * 0.5,
    "selected": lambda a, b, _: a.isel(layers=[0, 1, 2]).ckpt.unstack() - b,
    "pickled": lambda a, b, _: pickle.loads(pickle.dumps(a.ckpt.unstack() + b)),
}


@pytest.mark.parametrize("derive", UNSTACKED.values(), ids=UNSTACKED)
def test_layers_of_one_side_that_was_unstacked_are_named(
    derive: Callable[..., xr.Dataset], tmp_path: Path
) -> None:
    a, b = (opened(tmp_path / f"{n}.safetensors", ALL, seed=n, stack=True) for n in range(2))
    ds = derive(a, b, xckpt.open(tmp_path / "0.safetensors"))
    (text,) = warnings_of(ds, tmp_path / "new.safetensors")
    assert "6 of 7 tensors" in text
    assert "stacked along layers" in text
    assert "6 of 7 tensors" in repr(ds.ckpt)


def test_sums_of_unstacked_models_are_whole(tmp_path: Path) -> None:
    a, b = (opened(tmp_path / f"{n}.safetensors", ALL, seed=n, stack=True) for n in range(2))
    path = tmp_path / "new.safetensors"
    for ds in (a.ckpt.unstack() + b.ckpt.unstack(), a.ckpt.merge(b, scale=1).ckpt.unstack() * 2):
        assert warnings_of(ds, path) == []
        assert len(xckpt.open(path)) == 7
        np.testing.assert_array_equal(ds[HEAD], xckpt.open(path)[HEAD])


def test_selected_layers_that_only_one_side_has_stacked_are_named(tmp_path: Path) -> None:
    stacked = opened(tmp_path / "a.safetensors", ALL, stack=True)
    flat = opened(tmp_path / "b.safetensors", ALL, seed=1)
    path = tmp_path / "new.safetensors"
    (text,) = warnings_of(stacked.isel(layers=[0, 1]) + flat, path)
    assert "4 of 7 tensors of a.safetensors missing" in text
    assert repr(Q[2]) not in text
    nothing = stacked.ckpt.find("*.layers.*") + flat.ckpt.find("*.layers.*")
    with pytest.raises(ValueError, match="no tensors"):
        nothing.ckpt.save(path)
    (text,) = warnings_of(nothing.drop_attrs(), path)
    assert "no tensors" in text


def test_stacks_that_the_user_left_out_are_no_loss(tmp_path: Path) -> None:
    a, b = (opened(tmp_path / f"{n}.safetensors", ALL, seed=n, stack=True) for n in range(2))
    stacks = [name for name, tensor in a.items() if "layers" in tensor.dims]
    path = tmp_path / "new.safetensors"
    assert warnings_of((a + b).drop_vars(stacks), path) == []
    assert warnings_of(a.drop_vars(stacks) * 2, path) == []


def test_a_step_of_a_run_has_the_names_of_the_model(some: xr.Dataset, tmp_path: Path) -> None:
    for step in (100, 200):
        opened(tmp_path / f"step-{step}.safetensors", ALL, seed=step)
    run = xckpt.open_steps(str(tmp_path / "step-*.safetensors"))
    (text,) = warnings_of(run.sel(step=200, drop=True) + some, tmp_path / "new.safetensors")
    assert "4 of 7 tensors" in text
    assert repr(HEAD) in text
    assert warnings_of(run.mean("step"), tmp_path / "mean.safetensors") == []


def test_names_without_a_common_one_are_a_warning(base: xr.Dataset, tmp_path: Path) -> None:
    other = opened(tmp_path / "other.safetensors", ["transformer.wte.weight"])
    text = "no tensors; arithmetic keeps only those whose names both"
    with pytest.raises(
        ValueError, match="no tensors: arithmetic keeps only"
    ):  # attributes of a file
        (base + other).ckpt.save(tmp_path / "new.safetensors")
    with pytest.warns(CheckpointWarning, match=text):
        (base + other).drop_attrs().ckpt.save(tmp_path / "new.safetensors")


def test_models_without_a_common_name_are_an_error(base: xr.Dataset, tmp_path: Path) -> None:
    nothing = base + opened(tmp_path / "other.safetensors", ["transformer.wte.weight"])
    config = {"config": {"hidden_size": 4, "num_hidden_layers": 3}}
    for ds, place in ((nothing, "new/"), (nothing.assign_attrs(config), "new.safetensors")):
        with pytest.raises(ValueError, match="arithmetic keeps only those whose names both sides"):
            ds.ckpt.save(f"{tmp_path}/{place}")
    assert not (tmp_path / "new.safetensors").exists()
    assert not (tmp_path / "new").exists()


MIXED: dict[str, Callable[[xr.DataTree, xr.Dataset], Any]] = {
    "tree first": lambda tree, ds: (tree + ds) / 2,
    "tree last": lambda tree, ds: ds - tree,
}


@pytest.mark.parametrize("derive", MIXED.values(), ids=MIXED)
def test_a_tree_and_a_dataset_have_no_names_in_common(
    derive: Callable[[xr.DataTree, xr.Dataset], Any], base: xr.Dataset, tmp_path: Path
) -> None:
    opened(tmp_path / "other.safetensors", ALL, seed=3)
    tree = xr.open_datatree(tmp_path / "other.safetensors", engine="safetensors")
    result = derive(tree, base)
    with pytest.raises(ValueError, match=r"a DataTree and a Dataset.*open both with xckpt\.open"):
        result.ckpt.save(f"{tmp_path}/new/")
    result.attrs = {}
    (text,) = warnings_of(result, tmp_path / "new.safetensors")
    assert "no tensors; arithmetic keeps only those whose names both sides have" in text
    assert text.endswith("'DataTree'")
    result.attrs["config"] = {"hidden_size": 4, "num_hidden_layers": 3}
    with pytest.raises(ValueError, match="a DataTree and a Dataset"):
        result.ckpt.save(tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_models_of_a_library_without_a_common_name_are_an_error(tmp_path: Path) -> None:
    for module in ("sequential", "sequential_1"):
        with h5py.File(tmp_path / f"{module}.h5", "w") as file:
            file[f"model_weights/{module}/dense/kernel"] = np.ones(3, "f4")
            file.attrs["keras_version"] = "3.0.0"
        attrs = {"format": "pt", "id": module}
        tensors = {f"{module}.dense.kernel": ("x", np.ones(3, "f4"))}
        xckpt.save(xr.Dataset(tensors, attrs=attrs), tmp_path / f"{module}.safetensors")
    path = tmp_path / "new.safetensors"
    for suffix in ("h5", "safetensors"):
        a, b = (xckpt.open(tmp_path / f"{m}.{suffix}") for m in ("sequential", "sequential_1"))
        with xr.set_options(keep_attrs=True), pytest.raises(ValueError, match="Keras numbers"):
            ((a + b) / 2).ckpt.save(path)
        assert not path.exists()
        renamed = b.rename({name: str(name).replace("_1", "") for name in b})
        assert warnings_of((a + renamed) / 2, path) == []
        path.unlink()


def test_the_summary_of_a_result_names_the_loss(base: xr.Dataset, some: xr.Dataset) -> None:
    assert "4 of 7 tensors of base.safetensors missing" in repr((base + some).ckpt)
    assert "missing" not in repr((base + base).ckpt)


def test_pickled_results_know_the_loss(base: xr.Dataset, some: xr.Dataset) -> None:
    ds = pickle.loads(pickle.dumps(base + some))
    assert "4 of 7 tensors" in repr(ds.ckpt)


# --- shapes ---------------------------------------------------------------------------------------

GAINED: dict[str, Callable[[xr.Dataset, xr.Dataset], xr.Dataset]] = {
    "weights": lambda a, b: a * (1 - weights_of_layers(a)) + b * weights_of_layers(a),
    "where": lambda a, b: a.where(a["layers"] < 2, b),
    "concatenated": lambda a, b: xr.concat(
        [a.isel(layers=[0]), b.isel(layers=[1, 2])], "layers", data_vars="all"
    ),
}


def weights_of_layers(ds: xr.Dataset) -> xr.DataArray:
    return xr.DataArray(np.array([0.0, 0.5, 1.0], "f4"), {"layers": ds["layers"]}, "layers")


def test_axes_that_broadcasting_added_are_a_warning(tmp_path: Path) -> None:
    models = []
    for rows in (10, 5):
        path = tmp_path / f"cnn{rows}.safetensors"
        xckpt.save({"f.weight": np.ones((rows, 8)), "c.weight": np.ones((3, 3))}, path)
        models.append(xckpt.open(path))
    (text,) = warnings_of((models[0] + models[1]) / 2, tmp_path / "new.safetensors")
    assert "f.weight 10x8x5, was 10x8 and 5x8" in text
    assert "dimensions with other names broadcast" in text
    assert "c.weight" not in text


@pytest.mark.parametrize("names", [[HEAD], Q, ALL], ids=len)
def test_axes_of_a_mask_with_other_names_are_a_warning(
    names: list[str], base: xr.Dataset, tmp_path: Path
) -> None:
    model, path = base[names], tmp_path / "new.safetensors"
    mask = xr.Dataset({name: (("x", "y"), np.ones((4, 4), bool)) for name in names})
    xckpt.save(mask, tmp_path / "mask.safetensors")
    for opened_mask in (mask, xckpt.open(tmp_path / "mask.safetensors")):
        (text,) = warnings_of(model.where(opened_mask, 0), path)
        assert "dimensions with other names broadcast (b.rename({dim: name})" in text
        assert f"{names[0]} 4x4x4x4, was 4x4" in text
    assert warnings_of(xr.concat([model, model * 2, model], "model"), path) == []


@pytest.mark.parametrize("derive", GAINED.values(), ids=GAINED)
def test_axes_of_layers_in_unstacked_tensors_are_a_warning(
    derive: Callable[..., xr.Dataset], tmp_path: Path
) -> None:
    a, b = (opened(tmp_path / f"{n}.safetensors", ALL, seed=n, stack=True) for n in range(2))
    (text,) = warnings_of(derive(a, b), tmp_path / "new.safetensors")
    assert f"{HEAD} 3x4x4, was 4x4" in text or f"{HEAD} 4x4x3, was 4x4" in text
    assert "q_proj" not in text


class TestAxesThatOneTensorGained:
    """Broadcasting over axes with other names is a warning, for one tensor and for all."""

    FACTOR = xr.DataArray(np.ones(7, "f4"), dims="factor")
    GAINED: ClassVar[dict[str, tuple[Callable[[xr.Dataset], Any], str, str]]] = {
        "scaled convolution": (
            lambda a: a["c.weight"] * (a["n.weight"] / np.sqrt(a["n.running_var"] + 1e-5)),
            "c.weight",
            "4x4x3x3x4, was 4x4x3x3",
        ),
        "vector times convolution": (
            lambda a: a["n.weight"] * a["c.weight"],
            "c.weight",
            "4x4x4x3x3, was 4x4x3x3",
        ),
        "convolution times an array": (
            lambda a: a["c.weight"] * TestAxesThatOneTensorGained.FACTOR,
            "c.weight",
            "4x4x3x3x7, was 4x4x3x3",
        ),
        "in chunks": (
            lambda a: a["f.weight"].chunk(5) * TestAxesThatOneTensorGained.FACTOR.chunk(3),
            "f.weight",
            "5x4x7, was 5x4",
        ),
        "sum of two": (lambda a: a["f.weight"] + a["p.bias"], "f.weight", "5x4x6, was 5x4"),
        "another name": (lambda a: a["f.weight"] + a["p.bias"], "new", "5x4x6, was 5x4 and 6"),
        "vector with axes of a matrix": (
            lambda a: a["f.bias"] * a["f.weight"],
            "f.bias",
            "5x4, was 5",
        ),
    }

    FUNCTIONS: ClassVar[dict[str, tuple[Callable[[xr.Dataset], Any], str, str]]] = {
        "function of numpy": (
            lambda a: np.maximum(TestAxesThatOneTensorGained.FACTOR, a["c.weight"]),
            "c.weight",
            "7x4x4x3x3, was 4x4x3x3",
        ),
        "where": (
            lambda a: a["f.weight"].where(TestAxesThatOneTensorGained.FACTOR > 0, 0),
            "f.weight",
            "5x4x7, was 5x4",
        ),
    }

    @pytest.fixture
    def model(self) -> dict[str, Any]:
        shapes = {"c.weight": (4, 4, 3, 3), "f.weight": (5, 4), "f.bias": (5,), "p.bias": (6,)}
        shapes |= {"n.weight": (4,), "n.bias": (4,), "n.running_mean": (4,), "n.running_var": (4,)}
        return {name: np.ones(shape, "f4") for name, shape in shapes.items()}

    @pytest.fixture(params=["file", "state dict"])
    def opened(self, request: Any, model: dict[str, Any], tmp_path: Path) -> xr.Dataset:
        if request.param == "state dict":
            return xckpt.open(model)
        xckpt.save(model, tmp_path / "model.safetensors")
        return xckpt.open(tmp_path / "model.safetensors")

    @pytest.mark.parametrize(("compute", "name", "text"), GAINED.values(), ids=GAINED)
    def test_are_named(
        self, compute: Any, name: str, text: str, opened: xr.Dataset, tmp_path: Path
    ) -> None:
        changed = opened.drop_vars([name], errors="ignore").assign({name: compute(opened)})
        (warning,) = warnings_of(changed, tmp_path / "new.safetensors")
        assert f"'{name} {text}'" in warning

    @pytest.mark.parametrize(("compute", "name", "text"), FUNCTIONS.values(), ids=FUNCTIONS)
    def test_by_a_function_are_named(
        self, compute: Any, name: str, text: str, model: dict[str, Any], tmp_path: Path
    ) -> None:
        xckpt.save(model, tmp_path / "model.safetensors")
        ds = xckpt.open(tmp_path / "model.safetensors")
        (warning,) = warnings_of(ds.assign({name: compute(ds)}), tmp_path / "new.safetensors")
        assert f"'{name} {text}'" in warning

    def test_of_every_tensor_are_named(self, opened: xr.Dataset, tmp_path: Path) -> None:
        (warning,) = warnings_of(opened * self.FACTOR, tmp_path / "new.safetensors")
        assert "'c.weight 4x4x3x3x7, was 4x4x3x3'" in warning
        renamed = opened.rename({name: f"m.{name}" for name in opened}) * self.FACTOR
        (warning,) = warnings_of(renamed, tmp_path / "new.safetensors")
        assert "'m.c.weight 4x4x3x3x7, was 4x4x3x3'" in warning

    def test_as_requested_are_no_warning(self, opened: xr.Dataset, tmp_path: Path) -> None:
        path = tmp_path / "new.safetensors"
        models = xr.concat([opened, 2 * opened], "model")
        factors = xr.DataArray(np.ones(2, "f4"), dims="model")
        for computed in (models, models * factors, models - opened, opened.expand_dims(model=2)):
            assert warnings_of(computed, path) == []
        one = opened["f.weight"].expand_dims(model=3)
        assert warnings_of(opened.assign({"f.weight": one}), path) == []
        scaled = opened["f.weight"] * opened["f.bias"]
        assert warnings_of(opened.assign({"f.weight": scaled, "new": scaled}), path) == []


def test_selected_and_reduced_axes_are_no_warning(base: xr.Dataset, tmp_path: Path) -> None:
    dim = str(base[HEAD].dims[0])
    path = tmp_path / "new.safetensors"
    assert warnings_of(base.isel({dim: slice(2)}) * 2, path) == []
    assert warnings_of(base.mean(dim), path) == []


# --- numbers of layers ----------------------------------------------------------------------------


def saved_layers(ds: xr.Dataset, path: Path) -> dict[str, Any]:
    ds.ckpt.save(path, overwrite=True)
    return {str(name): tensor.values for name, tensor in xckpt.open(path).items()}


@pytest.mark.parametrize("scale", [None, 2.0], ids=["stored", "computed"])
def test_layers_in_another_order_keep_their_numbers_with_a_warning(
    scale: float | None, tmp_path: Path
) -> None:
    a = opened(tmp_path / "a.safetensors", ALL, stack=True)
    a = a if scale is None else a * scale
    turned = a.isel(layers=[2, 1, 0])
    path = tmp_path / "new.safetensors"
    with pytest.warns(CheckpointWarning, match="layers in another order.*own numbers.*2,1,0"):
        new = saved_layers(turned, path)
    np.testing.assert_array_equal(new[Q[2]], a.ckpt[Q[2]])

    renumbered = turned.assign_coords(layers=turned["layers"].copy(data=range(3)))
    new = saved_layers(renumbered, path)
    assert new.keys() == set(ALL)
    np.testing.assert_array_equal(new[Q[0]], a.ckpt[Q[2]])


def test_numbers_of_layers_are_no_tensor(tmp_path: Path) -> None:
    a = opened(tmp_path / "a.safetensors", ALL, stack=True)
    shorter = a.isel(layers=[0, 2]).assign_coords(layers=range(2))
    new = saved_layers(shorter, tmp_path / "new.safetensors")
    assert new.keys() == {*Q[:2], *UP[:2], HEAD}
    np.testing.assert_array_equal(new[Q[1]], a.ckpt[Q[2]])


@pytest.mark.parametrize("layers", [[0, 2], [0, 1, 1, 2]], ids=["fewer", "more"])
def test_new_numbers_of_computed_layers_name_their_tensors(
    layers: list[int], tmp_path: Path
) -> None:
    a = opened(tmp_path / "a.safetensors", ALL, stack=True)
    chosen = (a * 2).isel(layers=layers).assign_coords(layers=range(len(layers)))
    assert len(chosen.ckpt.structure()) == 1 + 2 * len(layers)
    new = saved_layers(chosen, tmp_path / "new.safetensors")
    last = f"model.layers.{len(layers) - 1}.self_attn.q_proj.weight"
    assert len(new) == 1 + 2 * len(layers)
    np.testing.assert_array_equal(new[last], 2 * a.ckpt[Q[2]])


def test_stacks_whose_coordinate_was_dropped_are_a_warning(tmp_path: Path) -> None:
    a = opened(tmp_path / "a.safetensors", ALL, stack=True)
    shorter = (a * 2).isel(layers=[0, 2]).drop_vars("layers")
    (text,) = warnings_of(shorter, tmp_path / "new.safetensors")
    assert "written as one" in text
    assert "'model.layers.self_attn.q_proj.weight'" in text
    assert ".copy(data=" in text
    assert warnings_of((a * 2).mean("layers"), tmp_path / "new.safetensors") == []


@pytest.mark.parametrize("change", [lambda ds: ds, lambda ds: ds.compute() * 2])
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_stacks_that_come_back_from_zarr_are_a_warning(change: Any, tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    a = opened(tmp_path / "a.safetensors", ALL, stack=True)
    a.ckpt.plain().to_zarr(tmp_path / "a.zarr")
    stored = change(xr.open_dataset(tmp_path / "a.zarr", engine="zarr", chunks={}))
    (text,) = warnings_of(stored, tmp_path / "new.safetensors")
    assert "stacks written as one tensor, as no record of the stack along 'layers'" in text
    assert "'model.layers.self_attn.q_proj.weight'" in text
    a.ckpt.unstack().ckpt.plain().to_zarr(tmp_path / "unstacked.zarr")
    stored = change(xr.open_dataset(tmp_path / "unstacked.zarr", engine="zarr", chunks={}))
    assert warnings_of(stored, tmp_path / "new.safetensors") == []


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_head_that_shares_the_bytes_of_the_table_is_no_loss(
    is_stacked: bool, tmp_path: Path
) -> None:
    table, head, config = (
        "model.embed_tokens.weight",
        "lm_head.weight",
        {"tie_word_embeddings": True},
    )
    ones = np.ones((8, 4), "f4")
    layers = {f"model.layers.{n}.mlp.weight": np.ones((4, 4), "f4") for n in range(2)}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    xckpt.save(layers | {table: ones}, tmp_path / "a/model.safetensors")
    torch = pytest.importorskip("torch")
    weight = torch.ones(8, 4)
    state = {name: torch.ones(4, 4) for name in layers} | {table: weight, head: weight}
    torch.save(state, tmp_path / "b/pytorch_model.bin")
    a, b = (xckpt.open(tmp_path / name, stack=is_stacked) for name in ("a", "b"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((a + b) / 2).ckpt.save(tmp_path / "out/")
    assert head not in xckpt.open(tmp_path / "out")


def test_a_tied_head_that_keeps_its_old_values_is_named(tmp_path: Path) -> None:
    table = np.arange(48, dtype="f4").reshape(6, 8)
    name, head = "transformer.wte.weight", "lm_head.weight"
    layer = {"transformer.h.0.attn.c_attn.weight": np.ones((8, 24), "f4")}
    ds = xckpt.open(layer | {name: table, head: table})
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "tie_word_embeddings": True}
    ds = ds.assign_attrs(config=config)
    changed = ds.assign({name: ds[name] * 2})
    (text,) = warnings_of(changed, tmp_path / "new.safetensors")
    assert "keep their old values" in text
    assert f"'{head} ({name})'" in text
    (text,) = warnings_of(changed, tmp_path / "out")
    assert "tie_word_embeddings: False (was True)" in text
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    for n, both in enumerate((ds, ds.assign({name: ds[name] * 2, head: ds[head] * 2}))):
        assert warnings_of(both, tmp_path / "new.safetensors") == []
        (text,) = warnings_of(both, tmp_path / f"{n}")
        assert "tie_word_embeddings" not in text
        assert "old values" not in text


def test_stacks_that_were_computed_after_their_numbers_were_replaced_are_a_warning(
    tmp_path: Path,
) -> None:
    a = opened(tmp_path / "a.safetensors", ALL, stack=True)
    renumbered = (a * 2).assign_coords(layers=range(a.sizes["layers"]))
    assert warnings_of(renumbered, tmp_path / "new.safetensors") == []
    texts = warnings_of(renumbered.compute(), tmp_path / "new.safetensors")
    assert any("stacks written as one tensor, as no record of the stack" in text for text in texts)


@pytest.mark.parametrize("is_computed", [False, True])
def test_counters_that_arithmetic_in_memory_made_floats_are_a_warning(
    is_computed: bool, tmp_path: Path
) -> None:
    state = {"bn.weight": np.ones(4, "f4"), "bn.num_batches_tracked": np.array(3)}
    xckpt.save(state, tmp_path / "a.safetensors")
    a = xckpt.open(tmp_path / "a.safetensors")
    mean = (a + a * 2) / 2
    texts = warnings_of(mean.compute() if is_computed else mean, tmp_path / "new.safetensors")
    assert any("counters are floats" in text for text in texts) == is_computed
    dtype = xckpt.read_index(tmp_path / "new.safetensors").tensors["bn.num_batches_tracked"].dtype
    assert dtype == ("float64" if is_computed else "int64")


class TestReductions:
    """Means of arrays in memory, of which xarray leaves out bfloat16, name what they lack."""

    @staticmethod
    def state(value: float, names: Collection[str] = (*Q, HEAD)) -> dict[str, Any]:
        matrices = {name: np.full((4, 4), value).astype(ml_dtypes.bfloat16) for name in names}
        return {**matrices, "model.norm.weight": np.full(4, value, "f4")}

    @pytest.mark.parametrize("options", [{}, {"stack": True}])
    def test_tensors_that_xarray_leaves_out_are_named(self, options: Any, tmp_path: Path) -> None:
        a, b = (xckpt.open(self.state(value), **options) for value in (1, 2))
        mean = xr.concat([a, b], "m").mean("m")
        text = r"of a mapping missing, as means .*ds\.astype\('float32'\)"
        with pytest.warns(CheckpointWarning, match=text):
            mean.ckpt.save(tmp_path / "mean.safetensors")

    def test_a_mean_of_no_numbers_at_all_has_this_reason(self, tmp_path: Path) -> None:
        states = [self.state(value) for value in (1, 2)]
        models = [xckpt.open({name: state[name] for name in Q}) for state in states]
        mean = xr.concat(models, "m").mean("m")
        (text,) = warnings_of(mean, tmp_path / "mean.safetensors")
        assert "3 of 3 tensors of a mapping missing, as means" in text
        assert "both sides" not in text
        with pytest.raises(ValueError, match=r"no tensors: 3 of 3 .*astype\('float32'\)"):
            mean.ckpt.save(f"{tmp_path}/out/")

    def test_results_that_have_them_are_no_warning(self, tmp_path: Path) -> None:
        a, b = (xckpt.open(self.state(value)) for value in (1, 2))
        wide = [ds.astype("float32") for ds in (a, b)]
        selected = xckpt.open(self.state(1), tensors="*norm*")
        results = [
            a, a[["model.norm.weight"]], a[["model.norm.weight"]] * 2, (a + b) / 2,
            xr.concat(wide, "m").mean("m"), xr.concat([selected, selected], "m").mean("m"),
        ]  # fmt: skip
        for number, result in enumerate(results):
            assert warnings_of(result, tmp_path / f"{number}.safetensors") == []


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_that_differ_by_a_prefix_are_renamed_as_advised(prefix: str, tmp_path: Path) -> None:
    config = '{"model_type": "llama", "hidden_size": 4}'
    values = {f"layers.{n}.weight": np.ones((4, 4), "f4") for n in range(2)}
    for folder, start in (("a", prefix), ("b", "")):
        (tmp_path / folder).mkdir()
        tensors = {start + name: array for name, array in values.items()}
        xckpt.save(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(config)
    a, b = xckpt.open(tmp_path / "a"), xckpt.open(tmp_path / "b")
    with pytest.raises(ValueError, match=r"prefix.*b\.rename\(\{name: 'module\.' \+ name"):
        (a - b).ckpt.save(tmp_path / "difference")
    (a - b.rename({name: prefix + str(name) for name in b})).ckpt.save(tmp_path / "difference")
    names = xckpt.compare(a, b, names="auto").ckpt.names
    (a.rename(names) - b).ckpt.save(tmp_path / "again")
    assert len(xckpt.open(tmp_path / "difference")) == len(xckpt.open(tmp_path / "again")) == 2
