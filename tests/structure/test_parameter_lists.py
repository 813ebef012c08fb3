"""A tensor in the list of an optimizer or a module is a parameter, whatever its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.formats import torch_files
from tests.formats.deepspeed_files import Run, listed
from tests.formats.torch_files import mapping, text
from xckpt.structure import Described, Role, Structure, structure_of
from xckpt.structure.facts import model_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

W = np.ones((4, 3), "f4")
#: Names of buffers by the conventions of frameworks.
MISLEADING = ["bn.running_mean", "attn.mask", "head.pe", "stft.window", "optim.anchors"]


class Saved:
    """A dictionary as `torch.save` writes it."""

    def __init__(self) -> None:
        self.storages: dict[str, bytes] = {}

    def array(self) -> bytes:
        key = str(len(self.storages))
        self.storages[key] = W.tobytes()
        return torch_files.whole(key, W)

    def arrays(self, names: Iterable[str]) -> bytes:
        return mapping({name: self.array() for name in names})

    def roles(self, items: Mapping[str, bytes]) -> dict[str, str]:
        data = torch_files.archive(mapping(items), self.storages)
        return {n: str(role) for n, role in structure_of(xckpt.read_index(data)).roles.items()}


def group(**fields: bytes) -> bytes:
    return listed(mapping({"lr": torch_files.number(1), **fields}))


def named_groups(saved: Saved, names: list[str]) -> bytes:
    """Write an optimizer that got `named_parameters()`."""
    numbers = listed(*map(torch_files.number, range(len(names))))
    groups = group(params=numbers, param_names=listed(*map(text, names)))
    return mapping({"state": saved.arrays([]), "param_groups": groups})


def keyed_state(saved: Saved, names: list[str]) -> bytes:
    """Write the whole state of FSDP, which has names in place of numbers."""
    state = {name: saved.arrays(["exp_avg", "exp_avg_sq"]) for name in names}
    groups = group(params=listed(*map(text, names)))
    return mapping({"state": mapping(state), "param_groups": groups})


def flattened(saved: Saved, names: list[str]) -> bytes:
    """Write the state that DCP flattens."""
    fields = {f"param_groups.{name}.lr": torch_files.number(1) for name in names}
    states = {f"state.{name}.exp_avg": saved.array() for name in names}
    return mapping(fields | states)


LISTS = [named_groups, keyed_state, flattened]


@pytest.mark.parametrize("optimizer", LISTS)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_listed_tensors_are_parameters(optimizer: Any, prefix: str) -> None:
    saved = Saved()
    names = [*MISLEADING, "fc.weight"]
    model = saved.arrays([*(f"{prefix}{name}" for name in names), "other.running_mean"])
    roles = saved.roles({"model": model, "optim": optimizer(saved, names)})
    assert {name for name, role in roles.items() if role == "weight"} == {
        f"model.{prefix}{name}" for name in names
    }
    assert roles["model.other.running_mean"] == "statistic"


@pytest.mark.parametrize("optimizer", LISTS)
def test_absence_from_a_list_proves_nothing(optimizer: Any) -> None:
    """Adapters and new heads are trained on a frozen model, which has parameters nevertheless."""
    saved = Saved()
    model = saved.arrays(["base.fc.weight", "base.fc.lora_A.weight", "base.bn.running_var"])
    roles = saved.roles({"model": model, "optim": optimizer(saved, ["base.fc.lora_A.weight"])})
    assert roles["model.base.fc.weight"] == roles["model.base.fc.lora_A.weight"] == "weight"
    assert roles["model.base.bn.running_var"] == "statistic"


def test_averages_of_listed_parameters_stay_averages() -> None:
    saved = Saved()
    names = ["fc.weight", "fc.running_mean"]
    parts = {"model": saved.arrays(names), "ema": saved.arrays(names)}
    roles = saved.roles({**parts, "optim": named_groups(saved, names)})
    assert roles["model.fc.running_mean"] == "weight"
    assert roles["ema.fc.weight"] == "average"


def test_the_reason_is_the_list() -> None:
    saved = Saved()
    items = {"model": saved.arrays(["a.pe"]), "optim": named_groups(saved, ["a.pe"])}
    data = torch_files.archive(mapping(items), saved.storages)
    first, *others = structure_of(xckpt.read_index(data))["model.a.pe"].evidence
    assert (first.source, first.value, first.reason) == (
        "file",
        Role.WEIGHT,
        "parameter of the optimizer",
    )
    last = others[-1]
    assert (last.source, last.value, last.decided) == ("convention", "constant", False)


# --- lists of numbers ----------------------------------------------------------------------------

MODEL = {
    "net.pe": (1, 5, 4),
    "bn.weight": (4,),
    "bn.bias": (4,),
    "bn.running_mean": (4,),
    "bn.running_var": (4,),
    "fc.mask": (2, 4),
}
TRAINED = ["net.pe", "bn.weight", "bn.bias", "fc.mask"]
NUMBERED: dict[str, tuple[dict[str, tuple[int, ...]], list[list[str]], set[str]]] = {
    "all": (MODEL, [TRAINED], {*TRAINED}),
    "two groups": (MODEL, [["net.pe", "fc.mask"], ["bn.weight", "bn.bias"]], {*TRAINED}),
    "a head alone": (MODEL, [["fc.mask"]], {"bn.weight", "bn.bias", "fc.mask"}),
    "shapes of buffers": (
        {"a.running_mean": (4,), "b.running_var": (3,)},
        [["a.running_mean", "b.running_var"]],
        {"a.running_mean", "b.running_var"},
    ),
    "ambiguous": ({"a.mask": (4,), "b.mask": (4,)}, [["b.mask"]], set()),
    "other shapes": ({"a.mask": (4,), "b.w": (4,)}, [["x", "y"]], {"b.w"}),
}


@pytest.mark.parametrize("case", NUMBERED)
def test_numbers_stand_for_tensors_if_one_assignment_is_possible(case: str) -> None:
    shapes, groups, parameters = NUMBERED[case]
    rows = [Described(f"model.{name}", "float32", shape) for name, shape in shapes.items()]
    numbers: list[list[int]] = []
    count = 0
    for group in groups:
        numbers.append(list(range(count, count + len(group))))
        for number, name in zip(numbers[-1], group, strict=True):
            moment = f"optim.state.{number}.exp_avg"
            rows.append(Described(moment, "float32", shapes.get(name, (9, 9))))
        count += len(group)
    attrs = {f"optim.param_groups.{n}.params": group for n, group in enumerate(numbers)}
    structure = Structure(rows, model_facts(attrs))
    roles = {name: structure.roles[f"model.{name}"] for name in shapes}
    assert {name for name, role in roles.items() if role is Role.WEIGHT} == parameters


def test_hostile_lists_of_numbers_are_no_lists() -> None:
    attrs = {"param_groups.0.params": [True, 2.5, "x"], "param_groups.1.params": "0", 3: [1]}
    assert not model_facts(attrs).parameters


def test_modules_state_their_parameters_and_buffers() -> None:
    """Whole modules, unlike their state dicts, have parameters and buffers apart."""
    saved = Saved()
    inner = {
        "_parameters": saved.arrays(["running_mean", "weight"]),
        "_buffers": saved.arrays(["kernel", "running_var"]),
        "_modules": mapping({}),
    }
    outer = {
        "_parameters": mapping({}),
        "_buffers": mapping({}),
        "_modules": mapping({"a": torch_files.name("m", "M") + b")\x81" + mapping(inner) + b"b"}),
    }
    module = torch_files.name("m", "M") + b")\x81" + mapping(outer) + b"b"
    data = torch_files.archive(module, saved.storages)
    structure = structure_of(xckpt.read_index(data))
    assert structure.roles == {
        "a.running_mean": Role.WEIGHT,
        "a.weight": Role.WEIGHT,
        "a.kernel": Role.CONSTANT,
        "a.running_var": Role.STATISTIC,
    }
    assert structure["a.kernel"].evidence[0].decided


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_lists_parameters_and_buffers(stage: int, tmp_path: Path) -> None:
    run = Run(
        [{"fc.running_mean": W, "fc.weight": W}],
        stage,
        2,
        {"table": W, "fc.running_var": W},
        {"frozen.pe": W.astype("f2")},
        {},
    )
    roles = structure_of(xckpt.read_index(run.write(tmp_path / "global_step10"))).roles
    assert roles["fc.running_mean"] == roles["fc.weight"] == roles["frozen.pe"] == "weight"
    assert roles["table"] == "constant"
    assert roles["fc.running_var"] == "statistic"
