"""State that torch.optim numbers is joined to unambiguous parameters only."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats import torch_files
from tests.formats.torch_files import number, text, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Shapes = Mapping[Any, tuple[int, ...]]

BATCH_NORM = {"bn.weight": (4,), "bn.bias": (4,), "bn.running_mean": (4,), "bn.running_var": (4,)}
NET: dict[str, tuple[int, ...]] = {
    "conv.weight": (4, 3, 3, 3),
    "conv.bias": (4,),
    **BATCH_NORM,
    "fc.weight": (2, 4),
    "fc.bias": (2,),
}
TRAINED = [name for name in NET if "running" not in name]


def listed(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def by_number(items: Mapping[int, bytes]) -> bytes:
    return b"}(" + b"".join(number(key) + value for key, value in items.items()) + b"u"


class Saved:
    """A dictionary as `torch.save` would write it."""

    def __init__(self) -> None:
        self.storages: dict[str, bytes] = {}

    def array(self, shape: tuple[int, ...], value: float) -> bytes:
        key = str(len(self.storages))
        array = np.full(shape, value, "<f4")
        self.storages[key] = array.tobytes()
        return whole(key, array)

    def optimizer(
        self,
        shapes: Mapping[int, tuple[int, ...]],
        groups: Sequence[Sequence[int]],
        names: Sequence[Sequence[str]] = (),
        fields: Sequence[str] = ("step", "exp_avg", "exp_avg_sq"),
    ) -> bytes:
        """Write the state of Adam, whose moments of parameter 3 are 3."""
        state = {
            at: torch_files.mapping(
                {f: self.array((), 7) if f == "step" else self.array(shape, at) for f in fields}
            )
            for at, shape in shapes.items()
        }
        written = []
        for at, group in enumerate(groups):
            entry = {"lr": number(1), "params": listed(*map(number, group))}
            if names:
                entry["param_names"] = listed(*map(text, names[at]))
            written.append(torch_files.mapping(entry))
        value = {"state": by_number(state), "param_groups": listed(*written)}
        return torch_files.mapping(value)

    def opened(self, value: bytes) -> xr.Dataset:
        return xr.open_dataset(io.BytesIO(torch_files.archive(value, self.storages)))


def model(shapes: Mapping[str, tuple[int, ...]] = NET) -> xr.Dataset:
    arrays = {name: np.zeros(shape, "<f4") for name, shape in shapes.items()}
    return xr.open_dataset(io.BytesIO(torch_files.checkpoint(arrays)))


def state(
    shapes: Sequence[tuple[int, ...]] | Mapping[int, tuple[int, ...]],
    groups: Sequence[Sequence[int]] | None = None,
    **more: Any,
) -> xr.Dataset:
    numbered = dict(shapes if isinstance(shapes, dict) else enumerate(shapes))
    saved = Saved()
    return saved.opened(saved.optimizer(numbered, groups or [[*numbered]], **more))


def numbers(joined: xr.Dataset) -> dict[str, float]:
    """Return which number each parameter has, from the values of its state."""
    return {
        str(variable.attrs["parameter"]): float(variable.values.flat[0])
        for name, variable in joined.variables.items()
        if str(name).endswith(":exp_avg")
    }


# --- warnings and errors -------------------------------------------------------------------------


def test_parameters_are_counted_in_the_order_of_the_model() -> None:
    joined = xckpt.join_optimizer(model(), state([NET[name] for name in TRAINED]))
    assert numbers(joined) == {name: at for at, name in enumerate(TRAINED)}
    moment = joined["conv.weight:exp_avg_sq"]
    assert moment.dims == joined["conv.weight"].dims
    assert float(joined["conv.weight:step"]) == 7
    assert not [name for name in joined.variables if str(name).startswith("state.")]


def test_groups_are_identified_by_their_shapes() -> None:
    decayed = [name for name in TRAINED if len(NET[name]) > 1]
    undecayed = [name for name in TRAINED if len(NET[name]) < 2]
    order = [*decayed, *undecayed]
    groups = [range(len(decayed)), range(len(decayed), len(order))]
    joined = xckpt.join_optimizer(model(), state([NET[name] for name in order], groups))
    assert numbers(joined) == {name: at for at, name in enumerate(order)}


def test_invalid_parameter_numbers() -> None:
    shapes = {9: NET["conv.weight"], 5: NET["fc.weight"]}
    joined = xckpt.join_optimizer(model(), state(shapes, [[9, 5]]))
    assert numbers(joined) == {"conv.weight": 9, "fc.weight": 5}


def test_a_parameter_without_state_has_its_place() -> None:
    shapes = {at: NET[name] for at, name in enumerate(TRAINED) if name != "conv.bias"}
    joined = xckpt.join_optimizer(model(), state(shapes, [range(len(TRAINED))]))
    assert numbers(joined) == {n: at for at, n in enumerate(TRAINED) if n != "conv.bias"}


def test_a_buffer_of_another_shape_is_left_out() -> None:
    shapes = {"a.weight": (4, 4), "a.mask": (8, 8), "a.bias": (4,)}
    joined = xckpt.join_optimizer(model(shapes), state([(4, 4), (4,)]))
    assert numbers(joined) == {"a.weight": 0, "a.bias": 1}


def test_names_that_the_optimizer_was_given_come_first() -> None:
    names = [["module.fc.bias", "bn.bias"], ["bn.weight"]]
    optimizer = state([(2,), (4,), (4,)], [[0, 1], [2]], names=names)
    joined = xckpt.join_optimizer(model(), optimizer)
    assert numbers(joined) == {"fc.bias": 0, "bn.bias": 1, "bn.weight": 2}


def test_the_caller_may_give_the_order() -> None:
    optimizer = state([(4,), (4,), (4,)], [[0], [1, 2]])
    order = ["bn.bias", "conv.bias", "bn.weight"]
    joined = xckpt.join_optimizer(model(), optimizer, parameters=order)
    assert numbers(joined) == {name: at for at, name in enumerate(order)}
    with pytest.raises(ValueError, match=r"parameters has 2 names, and the optimizer 3"):
        xckpt.join_optimizer(model(), optimizer, parameters=order[:2])
    with pytest.raises(ValueError, match=r"'state.2.exp_avg' is of 'fc', which the model lacks"):
        xckpt.join_optimizer(model(), optimizer, parameters=[*order[:2], "fc"])
    with pytest.raises(ValueError, match=r"'state.2.exp_avg' .*\(4,\).* 'fc.bias' of shape \(2,\)"):
        xckpt.join_optimizer(model(), optimizer, parameters=[*order[:2], "fc.bias"])


RESNET: dict[str, tuple[int, ...]] = {}
for _name in ("conv1", "layer1.0.conv1", "layer1.0.conv2", "layer2.0.conv1"):
    RESNET[f"{_name}.weight"] = (4, 4, 3, 3)
    RESNET |= {f"{_name.replace('conv', 'bn')}.{leaf[3:]}": (4,) for leaf in BATCH_NORM}
RESNET |= {"fc.weight": (2, 4), "fc.bias": (2,)}


@pytest.mark.parametrize("decay_first", [True, False])
def test_weights_and_norms_in_separate_groups(decay_first: bool) -> None:
    """The weights alone are in alphabetic order, but the model is not."""
    trained = [name for name in RESNET if "running" not in name]
    groups = [[n for n in trained if (len(RESNET[n]) > 1) is kind] for kind in (True, False)]
    groups = groups if decay_first else groups[::-1]
    order = [name for group in groups for name in group]
    split = len(groups[0])
    optimizer = state([RESNET[n] for n in order], [range(split), range(split, len(order))])
    joined = xckpt.join_optimizer(model(RESNET), optimizer)
    assert numbers(joined) == {name: at for at, name in enumerate(order)}


class Training(NamedTuple):
    path: Path
    ds: xr.Dataset


@pytest.fixture
def training(tmp_path: Path) -> Training:
    """Write the checkpoint of a whole training, with averages of the weights."""
    saved = Saved()
    shapes = {at: NET[name] for at, name in enumerate(TRAINED)}
    value = {
        "model": torch_files.mapping({n: saved.array(s, -1) for n, s in NET.items()}),
        "optimizer": saved.optimizer(shapes, [[*shapes]]),
        "ema": torch_files.mapping({n: saved.array(s, -2) for n, s in NET.items()}),
        "epoch": number(3),
    }
    data = torch_files.archive(torch_files.mapping(value), saved.storages)
    (tmp_path / "training.pt").write_bytes(data)
    return Training(tmp_path / "training.pt", xr.open_dataset(tmp_path / "training.pt"))


@pytest.mark.parametrize("form", ["dataset", "path", "text", "mapping"])
def test_a_whole_training_needs_no_second_argument(form: str, training: Training) -> None:
    path, ds = training
    obj: Any = {"dataset": ds, "path": path, "text": str(path)}.get(form)
    if form == "mapping":
        obj = {name: variable.values for name, variable in ds.variables.items()} | ds.attrs
    joined = xckpt.join_optimizer(obj)
    assert numbers(joined) == {f"model.{name}": at for at, name in enumerate(TRAINED)}
    names = {str(name) for name in joined.variables}
    weights = {f"{part}.{name}" for part in ("model", "ema") for name in NET}
    fields = ("step", "exp_avg", "exp_avg_sq")
    assert names == weights | {f"model.{n}:{field}" for n in TRAINED for field in fields}
    assert joined.attrs["epoch"] == 3


@pytest.mark.parametrize("form", ["paths", "mappings"])
def test_model_and_optimizer_as_paths_and_mappings(form: str, tmp_path: Path) -> None:
    full, moments = model(), state([NET[name] for name in TRAINED])
    parts: list[Any] = []
    for name, part in (("model", full), ("optimizer", moments)):
        if form == "mappings":
            parts.append({n: v.values for n, v in part.variables.items()} | part.attrs)
            continue
        # Of formats, only those that keep the order of tensors.
        xckpt.save(part, tmp_path / f"{name}.npz")
        parts.append(tmp_path / f"{name}.npz")
    assert numbers(xckpt.join_optimizer(*parts)) == {n: at for at, n in enumerate(TRAINED)}


def test_a_model_alone_has_nothing_to_join(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no state of an optimizer"):
        xckpt.join_optimizer(model())
    with pytest.raises(TypeError, match="a path, not int"):
        xckpt.join_optimizer(model(), 1)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        xckpt.join_optimizer(tmp_path / "m.pt")


@pytest.mark.parametrize("split", [False, True])
def test_a_whole_training_in_one_file(*, split: bool) -> None:
    saved = Saved()
    weights = {name: saved.array(shape, -1) for name, shape in NET.items()}
    shapes = {at: NET[name] for at, name in enumerate(TRAINED)}
    value = {"model": torch_files.mapping(weights)}
    value["optimizer"] = saved.optimizer(shapes, [[*shapes]])
    ds = saved.opened(torch_files.mapping(value))
    parts = [ds.ckpt.find("model.*"), ds.ckpt.find("optimizer.*")] if split else [ds, ds]
    joined = xckpt.join_optimizer(*parts)
    assert numbers(joined) == {f"model.{name}": at for at, name in enumerate(TRAINED)}


def test_adafactor_keeps_rows_and_columns() -> None:
    saved = Saved()
    fields = {"exp_avg_sq_row": (4,), "exp_avg_sq_col": (2,), "RMS": ()}
    state = torch_files.mapping({f: saved.array(shape, 3) for f, shape in fields.items()})
    group = torch_files.mapping({"params": listed(number(0))})
    value = {"state": by_number({0: state}), "param_groups": listed(group)}
    joined = xckpt.join_optimizer(
        model({"a.weight": (2, 4), "b.weight": (4, 2), "b.bias": (4,)}),
        saved.opened(torch_files.mapping(value)),
    )
    assert joined["b.weight:exp_avg_sq_row"].attrs["parameter"] == "b.weight"


def test_many_parameters() -> None:
    shapes = {f"h.{at}.{leaf}": (2, 1 + at % 3) for at in range(800) for leaf in ("w", "b")}
    joined = xckpt.join_optimizer(model(shapes), state([*shapes.values()]))
    assert numbers(joined) == {name: at for at, name in enumerate(shapes)}


# --- what is not ---------------------------------------------------------------------------------


def refused(shapes: Mapping[str, tuple[int, ...]], optimizer: xr.Dataset, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        xckpt.join_optimizer(model(shapes), optimizer)


def test_the_first_shape_that_differs_is_named() -> None:
    shapes = [NET[name] for name in TRAINED]
    shapes[2:] = [(5,), (4,), (4, 2), (2,)]
    match = r"'state.2.exp_avg' .*\(5,\).*place in the model is 'bn.weight' of shape \(4,\)"
    refused(NET, state(shapes), match)
    swapped = [NET[name] for name in TRAINED]
    swapped[0], swapped[1] = swapped[1], swapped[0]
    refused(NET, state(swapped), r"'state.0.exp_avg' .*'conv.weight'")


def test_an_optimizer_of_a_larger_model() -> None:
    refused(
        NET, state([*(NET[n] for n in TRAINED), (9,)]), r"'state.6.exp_avg' of shape \(9,\) none"
    )


@pytest.mark.parametrize(
    ("shapes", "optimizer"),
    [
        ({"a.weight": (4, 4), "a.bias": (4,), "a.scale": (4,)}, [(4, 4), (4,)]),
        ({"q.weight": (4, 4), "k.weight": (4, 4), "k.bias": (4,)}, [(4, 4), (4,)]),
    ],
)
def test_ambiguous_state_is_joined_to_no_parameter(shapes: Any, optimizer: Any) -> None:
    refused(shapes, state(optimizer), r"may belong to '.*' or to '.*': pass parameters=\[")


def test_groups_that_share_a_shape_need_names() -> None:
    match = r"another group of parameters have the shape \(4,\), .* pass parameters="
    refused({"a.weight": (4,), "a.bias": (4,)}, state([(4,), (4,)], [[0], [1]]), match)


def test_alphabetical_order_is_not_assumed() -> None:
    names = {f"attn.{role}_proj.weight": (4, 4) for role in "koqv"} | {"mlp.w": (4, 8)}
    refused(names, state([(4, 4)] * 4 + [(4, 8)]), r"alphabetic order.* 'attn.k_proj.weight' or")
    joined = xckpt.join_optimizer(model(names), state([(4, 8)]))
    assert numbers(joined) == {"mlp.w": 0}


def test_state_that_no_group_lists() -> None:
    refused(NET, state([(4,), (4,)], [[0]]), r"list parameter 1, which has state, 0 times")
    refused(NET, state([(4,), (4,)], [[0, 1, 1]]), r"list parameter 1, which has state, 2 times")


def test_state_of_one_parameter_in_two_shapes() -> None:
    saved = Saved()
    state = {"exp_avg": saved.array((4,), 0), "exp_avg_sq": saved.array((2,), 0)}
    value = {"state": by_number({0: torch_files.mapping(state)})}
    value["param_groups"] = listed(torch_files.mapping({"params": listed(number(0))}))
    optimizer = saved.opened(torch_files.mapping(value))
    refused(NET, optimizer, r"'state.0.exp_avg' and others of parameter 0 have several shapes")


def test_an_order_for_an_optimizer_that_has_names() -> None:
    optimizer = xr.Dataset({"fc.bias.exp_avg": ("x", np.zeros(2))})
    with pytest.raises(ValueError, match="numbers its parameters"):
        xckpt.join_optimizer(model(), optimizer, parameters=["fc.bias"])
