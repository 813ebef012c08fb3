"""Families against models that their libraries build; skipped where these are not installed."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import pytest

from tests.structure.libraries import CASES
from xckpt.structure import Described, Structure
from xckpt.structure.facts import model_facts
from xckpt.structure.families import Family, family_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")


class Model:
    """A model without values: the shapes of its tensors, and the classes of its modules."""

    def __init__(self, case: str) -> None:
        with torch.device("meta"):
            module = CASES[case].build()
        self.module = module
        self.parameters = {name for name, _ in module.named_parameters()}
        self.shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        self.classes = {name: type(part) for name, part in module.named_modules()}
        self.bases = torch.nn
        config = getattr(module, "config", None) or {}
        to_dict = getattr(config, "to_dict", lambda: dict(config))
        self.config: dict[str, Any] = json.loads(json.dumps(to_dict(), default=str))
        self.sizes = CASES[case].sizes

    def module_type(self, name: str) -> str | None:
        """Return the kind of the module of a tensor by its class; None if the class is special."""
        owner = self.classes.get(name.rpartition(".")[0])
        if owner is None or name.rpartition(".")[2] not in {"weight", "bias"}:
            return None
        if issubclass(owner, self.bases.Linear) or owner.__name__ == "Conv1D":
            return "linear"
        if issubclass(owner, self.bases.Conv1d | self.bases.Conv2d):
            return "convolution"
        if issubclass(owner, self.bases.Embedding):
            return "embedding"
        return "norm" if "Norm" in owner.__name__ else None


LOCAL = frozenset({"out", "in", "channel", "height", "width"})


@lru_cache(maxsize=4)
def model(case: str) -> Model:
    return Model(case)


def family(case: str, *, with_config: bool) -> Family:
    built = model(case)
    facts = model_facts({"config": built.config}) if with_config else None
    chosen = family_of(built.shapes, facts)
    assert chosen is not None
    return chosen


def extent(axis: str, sizes: Any) -> int:
    value: int = eval(axis, {}, dict(sizes))  # noqa: S307
    return value


@pytest.mark.parametrize("case", CASES)
class TestFamilies:
    def test_every_parameter_has_a_slot(self, case: str) -> None:
        chosen = family(case, with_config=False)
        assert [name for name in model(case).parameters if chosen.describe(name) is None] == []

    def test_the_names_tell_the_family(self, case: str) -> None:
        expected = CASES[case].by_names or CASES[case].family
        assert family(case, with_config=False).name == expected.removesuffix("_text")

    def test_the_config_tells_the_family(self, case: str) -> None:
        if not {"model_type", "_class_name"} & model(case).config.keys():
            pytest.skip("the library has no config")
        described = (Described(name, "float32", s) for name, s in model(case).shapes.items())
        structure = Structure(described, model_facts({"config": model(case).config}))
        assert structure.family == CASES[case].family

    def test_a_place_belongs_to_one_tensor(self, case: str) -> None:
        chosen = family(case, with_config=False)
        names: dict[Any, str] = {}
        for name in model(case).parameters:
            described = chosen.describe(name)
            if described is not None and not described.is_alias:
                key = described.component, described.slot, described.param, described.indices
                assert names.setdefault(key, name) == name

    def test_named_axes_are_those_of_the_module(self, case: str) -> None:
        sizes = model(case).sizes
        chosen = family(case, with_config=False)
        for name, shape in model(case).shapes.items():
            described = chosen.describe(name, shape)
            assert described is not None, name
            local = {
                k.removeprefix("vision."): n for k, n in sizes.items() if k.startswith("vision.")
            }
            known = {**sizes, **local} if described.component == "vision" else sizes
            for axis, length in zip(described.axes or (), shape, strict=True):
                if axis is not None and axis not in LOCAL:
                    assert extent(axis, known) == length, (name, axis)

    def test_most_axes_have_names(self, case: str) -> None:
        chosen = family(case, with_config=False)
        axes = [
            (name, axis)
            for name, shape in model(case).shapes.items()
            if name in model(case).parameters and (place := chosen.describe(name, shape))
            for axis, length in zip(place.axes or (), shape, strict=True)
            if length > 1
        ]
        assert sum(axis is not None for _, axis in axes) >= 0.97 * len(axes)

    def test_the_config_changes_no_axes(self, case: str) -> None:
        by_names, by_type = family(case, with_config=False), family(case, with_config=True)
        for name, shape in model(case).shapes.items():
            first, second = by_names.describe(name, shape), by_type.describe(name, shape)
            assert first is not None
            assert second is not None
            assert first.axes == second.axes, name

    def test_modules_have_the_type_of_their_class(self, case: str) -> None:
        chosen = family(case, with_config=False)
        for name, shape in model(case).shapes.items():
            expected = model(case).module_type(name)
            described = chosen.describe(name, shape)
            if expected is not None and described is not None:
                actual = described.module_type.replace("router", "linear")
                assert actual == expected, name

    def test_outputs_and_inputs_are_those_of_the_module(self, case: str) -> None:
        chosen = family(case, with_config=False)
        for name, shape in model(case).shapes.items():
            described = chosen.describe(name, shape)
            bias = model(case).shapes.get(name.removesuffix("weight") + "bias")
            if described is not None and described.outputs is not None and bias is not None:
                assert (shape[described.outputs],) == bias, name


@pytest.mark.parametrize(
    ("case", "adding"),
    [
        ("gemma", {""}),
        ("gemma2", {""}),
        ("gemma3 with vision", {"text", "projector"}),
        ("olmo2", set()),
        ("qwen3_next", {""}),
        ("gemma3n", set()),
    ],
)
def test_norms_add_one_where_the_library_does(case: str, adding: set[str]) -> None:
    chosen = family(case, with_config=True)
    components = set()
    for name, part in model(case).module.named_modules():
        place = chosen.describe(f"{name}.weight")
        if place is None or place.module_type != "norm":
            continue
        # A new norm has the gain 1, which is stored as 0 if the module adds 1.
        gain = type(part)(4).weight
        assert bool(torch.all(gain == 0)) is place.adds_one, name
        components |= {place.component} if place.adds_one else set()
    assert components == adding


# Architectures of GGUF that have the tensors of a model under other names.
GGUF = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "olmo2")},
    **{name: name for name in ("gpt2", "bloom", "falcon", "bert", "t5", "mamba", "olmoe")},
    "falcon new": "falcon",
    "mixtral": "llama",
    "mistral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3": "gemma3",
    "gpt_neox": "gptneox",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    "t5 gated": "t5",
}


@pytest.mark.parametrize("case", GGUF)
def test_names_of_gguf_have_the_same_places(case: str) -> None:
    gguf = pytest.importorskip("gguf")
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == GGUF[case])
    names = gguf.get_tensor_name_map(architecture, 3)
    by_library = family(case, with_config=True)
    renamed = {}
    for name, shape in model(case).shapes.items():
        new = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        if new is not None and name in model(case).parameters:
            # The converter gives parameters without a module a suffix, and outputs come first.
            is_bare = new.endswith(("_exps", "_sinks"))
            place = by_library.describe(name, shape)
            is_turned = place is not None and place.outputs == len(shape) - 1 == 1
            stored = shape[::-1] if is_turned else tuple(n for n in shape if n != 1)
            renamed[f"{new}.weight" if is_bare else new] = name, stored
    facts = model_facts({"general.architecture": GGUF[case]})
    by_gguf = family_of({new: shape for new, (_, shape) in renamed.items()}, facts)
    assert by_gguf is not None
    assert len(renamed) > 10
    for new, (name, _) in renamed.items():
        first, second = by_library.describe(name), by_gguf.describe(new)
        assert first is not None
        assert second is not None, new
        # Phi 3 calls the fused projection "up".
        slots = second.slot, first.slot.replace("gate_up", "up" if case == "phi3" else "gate_up")
        assert slots[0] == slots[1], (new, name)
        assert second.indices == first.indices


@pytest.mark.parametrize("case", CASES)
def test_cuts_are_those_of_the_library(case: str) -> None:
    plan = getattr(model(case).module, "_tp_plan", None) or {}
    if not plan:
        pytest.skip("the library states no plan")
    chosen = family(case, with_config=True)
    for name, shape in model(case).shapes.items():
        module = re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight"))
        style = str(plan.get(module, "")).split("_")[0]
        place = chosen.describe(name, shape)
        if place is not None and style in {"colwise", "rowwise"} and len(shape) == 2:
            axis = place.outputs if style == "colwise" else place.inputs
            assert place.cuts == (axis,), name
