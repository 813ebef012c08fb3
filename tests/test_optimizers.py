"""The state of an optimizer finds its parameters, and nothing is read or lost."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.contracts.declared import arrays_in
from tests.formats.burnpack_files import burnpack, dense, quantized

if TYPE_CHECKING:
    from pathlib import Path

WEIGHT = np.arange(6, dtype="<f4").reshape(2, 3)
BIAS = np.arange(3, dtype="<f4")
LARGE = (1 << 64) - 1


def opened(folder: Path, name: str, tensors: dict[str, Any], **more: Any) -> xr.Dataset:
    path = folder / f"{name}.bpk"
    path.write_bytes(burnpack(tensors, **{k: v for k, v in more.items() if k != "options"}))
    return xr.open_dataset(path, engine="burnpack", **more.get("options", {}))


@pytest.fixture
def model(tmp_path: Path) -> xr.Dataset:
    tensors = {
        "fc.weight": dense(WEIGHT, param_id=LARGE),
        "fc.bias": dense(BIAS, param_id=7),
        "frozen": dense(BIAS, param_id=8),
    }
    options = {"dims": {"fc.weight": ("in", "out"), "fc.bias": ("out",)}}
    return opened(tmp_path, "model", tensors, options=options, metadata={"epoch": "3"})


@pytest.fixture
def optimizer(tmp_path: Path) -> xr.Dataset:
    tensors = {
        f"{LARGE}.momentum.moment_1": dense(WEIGHT + 1, param_id=LARGE),
        f"{LARGE}.factor": dense(BIAS, param_id=LARGE),
        "7.momentum.moment_1": dense(BIAS + 1, param_id=7),
    }
    scalars = {f"{LARGE}.momentum.time": {"UInt": 42}, "7.__rank": {"UInt": 1}}
    return opened(tmp_path, "optim", tensors, scalars=scalars, metadata={"7": "fc.bias"})


def test_state_is_named_and_shaped_like_its_parameter(
    model: xr.Dataset, optimizer: xr.Dataset
) -> None:
    joined = xckpt.join_optimizer(model, optimizer)
    assert list(joined.variables) == [
        *model.variables,
        "fc.weight:factor",
        "fc.weight:momentum.moment_1",
        "fc.bias:momentum.moment_1",
        "fc.weight:momentum.time",
        "fc.bias:__rank",
    ]
    moment = joined.variables["fc.weight:momentum.moment_1"]
    assert moment.dims == ("in", "out")
    assert moment.encoding["preferred_chunks"] == {"in": 2, "out": 3}
    assert isinstance(moment.data, da.Array)
    np.testing.assert_array_equal(moment.to_numpy(), WEIGHT + 1)
    assert joined.variables["fc.bias:momentum.moment_1"].dims == ("out",)
    assert joined.variables["fc.weight:factor"].dims == ("d3",)
    assert joined["fc.weight:momentum.time"].values == 42
    assert joined.attrs == {"epoch": "3"}
    assert moment.attrs == {"param_id": str(LARGE), "parameter": "fc.weight"}
    assert joined.encoding["source"] == model.encoding["source"]


def test_the_summary_shows_the_names_of_parameters(
    model: xr.Dataset, optimizer: xr.Dataset
) -> None:
    summary = repr(xckpt.join_optimizer(model, optimizer).ckpt)
    assert "fc.weight:momentum.moment_1" in summary
    assert str(LARGE) not in summary


def test_cached_results_belong_to_one_join(model: xr.Dataset, optimizer: xr.Dataset) -> None:
    name = "fc.weight:factor"
    keys = {xckpt.join_optimizer(model, optimizer).ckpt.param_key(name) for _ in range(2)}
    assert len(keys) == 2


def test_renamed_dimensions(model: xr.Dataset, optimizer: xr.Dataset) -> None:
    joined = xckpt.join_optimizer(model, optimizer.rename_dims({"d3": "columns"}))
    assert joined.variables["fc.weight:momentum.moment_1"].dims == ("in", "out")
    assert joined.variables["fc.weight:factor"].dims == ("columns",)


def test_the_arguments_stay_as_they_are(model: xr.Dataset, optimizer: xr.Dataset) -> None:
    before = [dict(ds.variables) for ds in (model, optimizer)]
    dims = [[v.dims for v in ds.variables.values()] for ds in (model, optimizer)]
    xckpt.join_optimizer(model, optimizer)
    assert [dict(ds.variables) for ds in (model, optimizer)] == before
    assert [[v.dims for v in ds.variables.values()] for ds in (model, optimizer)] == dims


def test_dimensions_of_equal_names_have_equal_sizes(tmp_path: Path, optimizer: xr.Dataset) -> None:
    # Here d3 is an axis of two elements: the state, which has an axis d3 of three, gives way.
    tensors = {"a": dense(WEIGHT, param_id=LARGE), "b": dense(BIAS, param_id=7)}
    options = {"dims": {"a": ("d3", "out")}}
    model = opened(tmp_path, "model", tensors, options=options)
    joined = xckpt.join_optimizer(model, optimizer)
    assert joined.sizes["d3"] == 2
    assert joined.variables["a:factor"].shape == (3,)
    assert joined.variables["a:factor"].dims == joined.variables["b"].dims == ("d3_1",)


def test_state_of_unknown_parameters_keeps_its_name(
    model: xr.Dataset, optimizer: xr.Dataset
) -> None:
    partial = model.drop_vars("fc.bias")
    with pytest.warns(xckpt.CheckpointWarning, match=r"2 variables .* '7.momentum.moment_1'"):
        joined = xckpt.join_optimizer(partial, optimizer)
    np.testing.assert_array_equal(joined.variables["7.momentum.moment_1"].to_numpy(), BIAS + 1)
    assert "7.__rank" in joined.variables


def test_state_without_a_parameter_keeps_its_name(tmp_path: Path, model: xr.Dataset) -> None:
    scalars = {"step": {"UInt": 3}, "frozen": {"Bool": True}, "7.time": {"UInt": 1}}
    optimizer = opened(tmp_path, "optim", {}, scalars=scalars)
    joined = xckpt.join_optimizer(model, optimizer)
    assert joined.variables["step"].to_numpy() == 3
    assert joined.variables["frozen"].shape == (3,)
    assert joined.variables["frozen:"].to_numpy()


def test_parameters_that_share_an_identity_share_the_state(tmp_path: Path) -> None:
    tied = {"embed": dense(WEIGHT, param_id=7), "head": dense(WEIGHT, param_id=7)}
    model = opened(tmp_path, "model", tied)
    optimizer = opened(tmp_path, "optim", {"7.m": dense(WEIGHT, param_id=7)})
    joined = xckpt.join_optimizer(model, optimizer)
    assert list(joined.variables) == ["embed", "head", "embed:m", "head:m"]


def test_parts_belong_to_one_parameter(tmp_path: Path) -> None:
    model = opened(
        tmp_path,
        "model",
        {"w": quantized((2, 3), bytes(6) + bytes(4), param_id=7)},
        options={"decode": False},
    )
    optimizer = opened(tmp_path, "optim", {"7.m": dense(WEIGHT, param_id=7)})
    joined = xckpt.join_optimizer(model, optimizer)
    assert list(joined.variables) == ["w:data", "w:scales", "w:m"]


def test_two_optimizers_may_be_joined(
    tmp_path: Path, model: xr.Dataset, optimizer: xr.Dataset
) -> None:
    second = opened(tmp_path, "other", {"7.average": dense(BIAS, param_id=7)})
    joined = xckpt.join_optimizer(xckpt.join_optimizer(model, optimizer), second)
    assert len(joined.variables) == 3 + 5 + 1
    assert joined.variables["fc.bias:average"].dims == ("out",)
    again = xckpt.join_optimizer(joined, second)
    assert "fc.bias:average:" in again.variables


def test_unrelated_files_are_not_joined(
    tmp_path: Path, model: xr.Dataset, optimizer: xr.Dataset
) -> None:
    unmarked = opened(tmp_path, "unmarked", {"w": dense(BIAS)})
    unrelated = opened(tmp_path, "other", {"9.m": dense(BIAS, param_id=9)})
    with pytest.raises(ValueError, match="no parameters with the attribute 'param_id'"):
        xckpt.join_optimizer(unmarked, optimizer)
    with pytest.raises(ValueError, match="no parameters with the attribute 'param_id'"):
        xckpt.join_optimizer(optimizer, model)
    with pytest.raises(ValueError, match="no variables with names of the form"):
        xckpt.join_optimizer(model, unmarked)
    with pytest.raises(ValueError, match=r"'9.m' is in the optimizer, 7 in the model"):
        xckpt.join_optimizer(model, unrelated)


FIELDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step")


def of_names(*names: str, prefix: str = "") -> xr.Dataset:
    arrays: dict[str, Any] = {f"{prefix}fc.weight": (("in", "out"), WEIGHT)}
    arrays[f"{prefix}fc.bias"] = ("out", BIAS)
    shapes = {name: BIAS if "bias" in name else WEIGHT for name in names}
    scalar = ((), np.float32(3))
    state = {
        name: scalar if "step" in name else ([f"{name}{axis}" for axis in range(a.ndim)], a)
        for name, a in shapes.items()
    }
    return xckpt.join_optimizer(xr.Dataset(arrays), xr.Dataset(state))


@pytest.mark.parametrize(
    "form",
    [
        "{p}.{f}",
        "state.{p}.{f}",
        "optimizer.state.{p}.{f}",
        "optimizer_state_dict.base_optimizer_state.state.{p}.{f}",
        "module.{p}.{f}",
        "optim.state.model.{p}.{f}",
        "state._orig_mod.module.{p}.{f}",
        "{f}.{p}",
        "state.{f}.module.{p}",
    ],
)
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_fsdp_wrapped_module."])
def test_state_by_the_name_of_its_parameter(form: str, prefix: str) -> None:
    names = [form.format(p=p, f=f) for p in ("fc.weight", "fc.bias") for f in FIELDS]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joined = of_names(*names, prefix=prefix)
    expected = [f"{prefix}{p}:{f}" for p in ("fc.weight", "fc.bias") for f in FIELDS]
    assert set(joined.data_vars) == {f"{prefix}fc.weight", f"{prefix}fc.bias", *expected}
    moment = joined[f"{prefix}fc.weight:exp_avg"]
    assert moment.dims == ("in", "out")
    assert moment.attrs["parameter"] == f"{prefix}fc.weight"


def test_wrappers_anywhere_in_a_name() -> None:
    wrapper = "_fsdp_wrapped_module"
    joined = of_names(f"state.{wrapper}.fc.{wrapper}.weight.exp_avg", "state.fc.bias.step")
    assert {"fc.weight:exp_avg", "fc.bias:step"} <= set(joined.data_vars)


@pytest.mark.parametrize(
    "above", ["0", "1.0", "inner_opt_state.0", "inner_state.0", "inner_states.slow.inner_state.0"]
)
@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("field", ["mu", "nu", "trace", "v", "ema", "sum_of_squares"])
def test_state_below_numbers_and_labels(above: str, separator: str, field: str) -> None:
    def named(name: str) -> str:
        return name.replace(".", separator)

    arrays = {named("params.fc.kernel"): (("in", "out"), WEIGHT)}
    state = {
        named(f"opt_state.{above}.{field}.fc.kernel"): (("a", "b"), WEIGHT),
        named(f"opt_state.{above}.count"): ((), np.int32(3)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joined = xckpt.join_optimizer(xr.Dataset(arrays), xr.Dataset(state))
    moment = joined[f"{named('params.fc.kernel')}:{field}"]
    assert moment.dims == ("in", "out")


def test_state_of_optax_is_of_the_parameters_with_its_names(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    serialization = pytest.importorskip("flax.serialization")
    params = {"layers_0": {"kernel": np.ones((3, 4), "f4")}, "head": {"bias": np.ones(2, "f4")}}
    labels = {"layers_0": "slow", "head": "fast"}
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.ema(0.9))
    by_label = {"slow": optax.adam(1e-3), "fast": optax.sgd(1e-2, 0.9)}
    expected = {"layers_0.kernel": {"mu", "nu"}, "head.bias": {"mu", "nu"}}
    for made, fields in (
        (optax.MultiSteps(chain, 2), {n: {*f, "ema", "acc_grads"} for n, f in expected.items()}),
        (optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3), expected),
        (
            optax.multi_transform(by_label, labels),
            {"layers_0.kernel": {"mu", "nu"}, "head.bias": {"trace"}},
        ),
    ):
        tree = {"params": params, "opt_state": made.init(params), "step": np.int32(3)}
        (tmp_path / "m.msgpack").write_bytes(serialization.to_bytes(tree))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            joined = xckpt.join_optimizer(tmp_path / "m.msgpack")
        states = [str(name).replace("/", ".") for name in joined.data_vars if ":" in str(name)]
        names = {f"params.{n}:{field}" for n, of_one in fields.items() for field in of_one}
        assert {*states} == names


def test_the_longest_matching_parameter_name_wins() -> None:
    model = xr.Dataset({"a": ("x", BIAS), "a.b": ("x", BIAS)})
    joined = xckpt.join_optimizer(model, xr.Dataset({"a.b.m": ("x", BIAS), "a.m": ("x", BIAS)}))
    assert list(joined.data_vars) == ["a", "a.b", "a.b:m", "a:m"]


def test_parameters_that_share_a_name_without_wrappers() -> None:
    model = xr.Dataset({"model.w": ("x", BIAS), "module.w": ("x", BIAS)})
    state = xr.Dataset({"model.w.exp_avg": ("x", BIAS), "w.exp_avg": ("x", BIAS)})
    with pytest.warns(xckpt.CheckpointWarning, match=r"1 variables .*'w.exp_avg'"):
        joined = xckpt.join_optimizer(model, state)
    assert list(joined.data_vars) == ["model.w", "module.w", "model.w:exp_avg", "w.exp_avg"]


def test_unmatched_state_causes_one_warning() -> None:
    names = ["state.fc.weight.exp_avg", "state.gone.exp_avg", "state.0.exp_avg", "groups.lr"]
    with pytest.warns(xckpt.CheckpointWarning) as shown:
        joined = of_names(*names)
    (text,) = [str(warning.message) for warning in shown]
    assert text.startswith("2 variables of the optimizer, 'state.gone.exp_avg' the first")
    assert {"state.gone.exp_avg", "state.0.exp_avg", "groups.lr"} <= set(joined.data_vars)
    with pytest.raises(ValueError, match=r"'state.0.exp_avg' for one; 'fc.weight' is in the model"):
        of_names("state.0.exp_avg")


def test_golden_checkpoint(golden: Path) -> None:
    folder = golden / "burnpack" / "ckpt"
    files = ("model-3", "optim-3", "scheduler-3")
    model, optimizer, scheduler = (xr.open_dataset(folder / f"{name}.bpk") for name in files)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joined = xckpt.join_optimizer(model, optimizer)
    expected = json.loads((folder / "optim-3.expected.json").read_text())
    arrays = arrays_in(folder / "optim-3.expected.npz")
    assert len(joined.variables) == len(model.variables) + len(optimizer.variables)
    for tensor in expected["tensors"]:
        identity, _, field = tensor["name"].partition(".")
        parameter = expected["metadata"][identity]
        state = joined.variables[f"{parameter}:{field}"]
        assert state.dims == model.variables[parameter].dims
        np.testing.assert_array_equal(state.to_numpy(), arrays[tensor["key"]])
    assert joined["linear.weight:momentum.time"].values == 42
    assert joined["linear.bias:__rank"].values == 1
    with pytest.raises(ValueError, match="no variables with names of the form"):
        xckpt.join_optimizer(model, scheduler)


def test_many_parameters(tmp_path: Path) -> None:
    names = [f"m.{i}.w" for i in range(1000)]
    model = opened(tmp_path, "m", {n: dense(BIAS, param_id=i) for i, n in enumerate(names)})
    state = {f"{i}.m1": dense(BIAS, param_id=i) for i in range(1000)}
    joined = xckpt.join_optimizer(model, opened(tmp_path, "o", state))
    assert [*joined.variables][1000:] == [f"m.{name.split('.')[0]}.w:m1" for name in sorted(state)]


def test_stacked_models_are_unstacked_first(tmp_path: Path) -> None:
    ids = {"h.0.w": 5, "h.1.w": 6}
    model = {name: dense(WEIGHT, param_id=number) for name, number in ids.items()}
    state = {f"{number}.moment": dense(WEIGHT + number, param_id=number) for number in (5, 6)}
    optimizer = opened(tmp_path, "optim", state)
    stacked = opened(tmp_path, "model", model, options={"stack": True})
    assert list(stacked.data_vars) == ["h.w"]
    joined = xckpt.join_optimizer(stacked, optimizer)
    assert list(joined.variables) == ["h.0.w", "h.1.w", "h.0.w:moment", "h.1.w:moment"]
    np.testing.assert_array_equal(joined["h.1.w:moment"], WEIGHT + 6)
