"""Defects that a specialist sees, and healthy models that look like them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt

if TYPE_CHECKING:
    from collections.abc import Callable

Tensors = dict[str, Any]


def trained(layers: int = 6, width: int = 64) -> Tensors:
    """Return a model whose vectors are not those of a new one."""
    rng = np.random.default_rng(0)
    tensors: Tensors = {"embed.weight": rng.normal(0, 0.02, (200, width))}
    for layer in range(layers):
        base = f"layers.{layer}"
        for name in ("up", "down"):
            tensors[f"{base}.{name}.weight"] = rng.normal(0, 0.05, (width, width))
        tensors[f"{base}.norm.weight"] = rng.normal(1, 0.05, width)
    return {name: values.astype("f4") for name, values in tensors.items()}


def rules(tensors: Tensors) -> set[tuple[str, str]]:
    frame = xckpt.findings(tensors, progress=False)
    return set(zip(frame["tensor"], frame["rule"], strict=True))


def lone_element(w: Any) -> None:
    w[20, 30] = 18 * w.std()


def signs_lost(w: Any) -> None:
    w[:] = np.abs(w)


def hole(w: Any) -> None:
    w[10:30, 10:30] = 0


def exploding(w: Any) -> None:
    w[3, 3] = 1e4


def equal_rows(w: Any) -> None:
    w[:40] = w[0]


def rank_one(w: Any) -> None:
    w[:] = 0.05 * np.outer(w[:, 3], w[5]) / w[:, 3].std() / w[5].std()


PLANTED = [equal_rows, rank_one, lone_element, signs_lost, hole, exploding]


@pytest.mark.parametrize("plant", PLANTED, ids=[plant.__name__ for plant in PLANTED])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_defect_of_one_matrix_is_named(plant: Callable[[Any], None], layer: int) -> None:
    tensors = trained()
    name = f"layers.{layer}.up.weight"
    plant(tensors[name])
    found = rules(tensors)
    assert (name, plant.__name__) in found
    assert {tensor for tensor, _ in found} == {name}


@pytest.mark.parametrize("layer", [0, 5])
def test_the_first_and_the_last_layer_are_compared_with_the_others(layer: int) -> None:
    tensors = trained()
    name = f"layers.{layer}.up.weight"
    tensors[name] *= 8
    assert rules(tensors) == {(name, "unlike_layer")}


def test_experts_that_are_all_equal_are_one_finding() -> None:
    tensors = trained()
    for layer in range(2):
        for expert in range(4):
            seed = 100 + 10 * layer + (expert if layer else 0)
            weight = np.random.default_rng(seed).normal(0, 0.05, (64, 64)).astype("f4")
            tensors[f"layers.{layer}.experts.{expert}.weight"] = weight
    assert rules(tensors) == {("layers.0.experts.0.weight", "equal_experts")}


def test_a_matrix_of_rank_one_is_named_in_half_precision() -> None:
    tensors = trained()
    rank_one(tensors["layers.3.up.weight"])
    half = {name: values.astype("f2") for name, values in tensors.items()}
    assert rules(half) == {("layers.3.up.weight", "rank_one")}


@pytest.mark.parametrize("size", [500.0, 1e5])
def test_a_matrix_with_one_large_element_has_no_rank_of_one(size: float) -> None:
    tensors = trained()
    tensors["layers.3.up.weight"][2, 5] = size
    assert ("layers.3.up.weight", "lone_element") in rules(tensors)
    assert "rank_one" not in {rule for _, rule in rules(tensors)}
    text = xckpt.findings(tensors, progress=False)["explanation"].str.cat()
    assert re.search(r"elsewhere 0\.0*[1-9]", text)


def test_a_factor_of_a_low_rank_has_no_rank_of_its_own() -> None:
    tensors = trained()
    for layer in range(6):
        tensors[f"layers.{layer}.up.lora_A.weight"] = tensors[f"layers.{layer}.up.weight"][:1]
        tensors[f"layers.{layer}.up.lora_B.weight"] = tensors[f"layers.{layer}.up.weight"][:, :1]
    assert rules(tensors) == set()


def test_channels_of_outliers_of_like_tensors_are_one_finding() -> None:
    tensors = trained()
    for layer in range(6):
        tensors[f"layers.{layer}.up.weight"][3] *= np.where(np.arange(64) % 9 == 0, 40 + layer, 1)
    frame = xckpt.findings(tensors, progress=False)
    (sentence,) = frame["explanation"]
    assert sentence.startswith("1 column of 64 has elements beyond 20 standard deviations")
    assert "; 4 more like it, such as layers." in sentence


def test_a_depthwise_kernel_has_no_input_channel_of_outliers() -> None:
    tensors = trained()
    kernel = np.random.default_rng(0).normal(0, 0.01, (96, 1, 5, 5)).astype("f4")
    kernel[::7, 0, 2, 2] = 1
    tensors["conv.weight"] = kernel
    assert rules(tensors) == set()


def repeated(w: Any) -> None:
    w[32:] = w[:32]


def test_a_half_that_repeats_the_other_half_is_named() -> None:
    tensors = trained()
    repeated(tensors["layers.3.up.weight"])
    frame = xckpt.findings(tensors, progress=False)
    assert list(frame["rule"]) == ["equal_rows"]
    assert frame["explanation"][0] == "32 of 64 rows are equal to another one"


def test_tokens_that_are_equal_are_told_without_a_warning() -> None:
    tensors = trained()
    tensors["embed.weight"][20:60] = tensors["embed.weight"][20]
    frame = xckpt.findings(tensors, progress=False)
    assert list(frame["rule"]) == ["equal_tokens"]
    assert list(frame["severity"]) == ["info"]


@pytest.mark.parametrize("name", ["running_var", "moving_variance"])
def test_a_negative_variance_is_an_error(name: str) -> None:
    tensors = trained()
    tensors["bn.running_mean"] = np.linspace(-1, 1, 64, dtype="f4")
    assert rules(tensors) == set()
    tensors[f"bn.{name}"] = np.linspace(-0.1, 1, 64, dtype="f4")
    assert rules(tensors) == {(f"bn.{name}", "negative_statistic")}


def normed(layers: int = 6) -> Tensors:
    tensors = trained()
    rng = np.random.default_rng(3)
    for layer in range(layers):
        base = f"layers.{layer}.bn"
        tensors[f"{base}.running_mean"] = rng.normal(0, 1, 64).astype("f4")
        tensors[f"{base}.running_var"] = rng.uniform(0.5, 2, 64).astype("f4")
        tensors[f"{base}.num_batches_tracked"] = np.int64(1000)
    return tensors


@pytest.mark.parametrize(
    ("name", "factor", "rule"),
    [
        ("layers.2.bn.num_batches_tracked", -1, "negative_statistic"),
        ("layers.2.bn.running_mean", 1e6, "unlike_statistic"),
        ("layers.2.bn.running_var", 1e9, "unlike_statistic"),
    ],
)
def test_odd_statistics_of_a_norm_are_named(name: str, factor: float, rule: str) -> None:
    tensors = normed()
    assert rules(tensors) == set()
    tensors[name] = np.multiply(tensors[name], factor, casting="unsafe").astype(tensors[name].dtype)
    assert rules(tensors) == {(name, rule)}


def test_gains_of_zero_are_named() -> None:
    tensors = trained()
    tensors["layers.2.norm.weight"][:32] = 0
    assert ("layers.2.norm.weight", "dead_gains") in rules(tensors)


def quantised(layers: int = 5) -> Tensors:
    rng = np.random.default_rng(0)
    tensors: Tensors = {"norm.weight": rng.normal(1, 0.05, 64).astype("f4")}
    for layer in range(layers):
        base = f"layers.{layer}.up"
        tensors[f"{base}.qweight"] = rng.integers(-127, 127, (64, 64), np.int8)
        tensors[f"{base}.scales"] = rng.uniform(0.01, 0.02, (64, 1)).astype("f4")
        tensors[f"{base}.zeros"] = np.zeros((64, 1), "f4")
    return tensors


@pytest.mark.parametrize(("factor", "words"), [(0, "all of its elements are 0"), (-1, "positive")])
def test_a_scale_that_is_zero_or_negative_is_named(factor: float, words: str) -> None:
    tensors = quantised()
    assert rules(tensors) == set()
    tensors["layers.2.up.scales"] *= factor
    frame = xckpt.findings(tensors, progress=False)
    assert list(zip(frame["tensor"], frame["rule"], strict=True)) == [
        ("layers.2.up.scales", "odd_scale")
    ]
    assert words in frame["explanation"][0]


def test_a_recurrent_layer_is_compared_with_the_others() -> None:
    rng = np.random.default_rng(0)
    tensors = {
        f"lstm.{kind}_l{layer}": rng.normal(0, 0.05, shape).astype("f4")
        for layer in range(3)
        for kind, shape in (("weight_ih", (256, 64)), ("weight_hh", (256, 64)), ("bias_ih", 256))
    }
    assert rules(tensors) == set()
    tensors["lstm.weight_hh_l1"] *= 40
    assert rules(tensors) == {("lstm.weight_hh_l1", "unlike_layer")}


def test_parameters_of_one_number_do_not_make_a_model_new() -> None:
    tensors = {name: values for name, values in trained().items() if "norm" not in name}
    tensors["temperature_bias"] = np.ones(1, "f4")
    tensors["head.bias"] = np.linspace(-1, 1, 64, dtype="f4")
    signs_lost(tensors["layers.3.up.weight"])
    assert rules(tensors) == {("layers.3.up.weight", "signs_lost")}


def test_matrices_that_are_all_zero_are_asked_about() -> None:
    tensors = trained()
    for layer in range(6):
        tensors[f"layers.{layer}.up.lora_A.weight"] = tensors[f"layers.{layer}.up.weight"][:8]
        tensors[f"layers.{layer}.up.lora_B.weight"] = np.zeros((64, 8), "f4")
    assert rules(tensors) == {("layers.0.up.lora_B.weight", "untrained")}


def test_a_checkpoint_of_zeros_is_no_new_model() -> None:
    tensors = {name: np.zeros_like(values) for name, values in trained().items()}
    assert "all_zero" in {rule for _, rule in rules(tensors)}


def test_rows_of_negative_infinity_mask() -> None:
    tensors = trained()
    tensors["spatial.weight"] = np.random.default_rng(0).normal(0, 1, (13, 16)).astype("f4")
    tensors["spatial.weight"][1] = -np.inf
    assert rules(tensors) == set()
    tensors["spatial.weight"][4, 4] = -np.inf
    assert rules(tensors) == {("spatial.weight", "inf")}


def test_settings_beside_the_weights_are_not_examined() -> None:
    tensors = {f"model.{name}": values for name, values in trained().items()}
    tensors["config.scale"] = np.full((89, 4), 1.73, "f4")
    assert rules(tensors) == set()


def mixture(experts: int = 6) -> Tensors:
    tensors = trained(4)
    rng = np.random.default_rng(7)
    for layer in range(4):
        for expert in range(experts):
            weight = rng.normal(0, 0.05, (64, 32)).astype("f4")
            tensors[f"layers.{layer}.experts.{expert}.weight"] = weight
    return tensors


def test_an_expert_is_compared_with_the_others_of_its_layer() -> None:
    tensors = mixture()
    assert rules(tensors) == set()
    tensors["layers.2.experts.1.weight"] *= 10
    assert rules(tensors) == {("layers.2.experts.1.weight", "unlike_layer")}


@pytest.mark.parametrize("width", [32, 4096])
def test_experts_of_a_stack_that_are_all_equal_are_named(width: int) -> None:
    tensors = trained()
    rng = np.random.default_rng(7)
    tensors["layers.0.experts.up_proj"] = rng.normal(0, 0.05, (6, 48, width)).astype("f4")
    assert rules(tensors) == set()
    tensors["layers.0.experts.up_proj"][:] = tensors["layers.0.experts.up_proj"][:1]
    assert rules(tensors) == {("layers.0.experts.up_proj", "equal_experts")}


def test_a_parameter_that_takes_no_steps_is_told() -> None:
    tensors = {f"model.{name}": values for name, values in trained().items()}
    for number in range(6):
        steps = 3 if number == 4 else 250
        tensors[f"optimizer.state.{number}.step"] = np.float32(steps)
    frame = xckpt.findings(tensors, progress=False)
    assert list(frame["explanation"]) == ["it is 3, and that of 5 siblings 250"]


def test_a_healthy_model_has_no_findings() -> None:
    assert rules(trained()) == set()


def test_a_first_layer_of_another_shape_is_no_defect() -> None:
    tensors = trained()
    tensors["layers.0.up.weight"] = np.random.default_rng(1).normal(0, 1, (64, 4)).astype("f4")
    assert rules(tensors) == set()


def test_outliers_that_several_channels_have_are_a_feature() -> None:
    tensors = trained()
    tensors["layers.2.up.weight"][[3, 9, 40], [30, 31, 50]] = 0.9
    assert {rule for _, rule in rules(tensors)} <= {"outlier_channels"}


def test_fixed_transforms_are_not_examined() -> None:
    tensors = trained()
    time, frequency = np.arange(256), np.arange(129)
    sine = np.round(np.sin(2 * np.pi * np.outer(frequency, time) / 256), 6)
    for name in ("stft.forward_basis_buffer", "conv._w3j_1_1_2", "mel_scale.filterbank"):
        tensors[name] = sine[:, None].astype("f4")
    assert rules(tensors) == set()


def test_gains_of_wide_spread_lost_nothing() -> None:
    tensors: Tensors = {}
    rng = np.random.default_rng(0)
    for layer in range(8):
        gain = rng.normal(1.8, 4, 64)
        gain += 1.8 - gain.mean() - (1.787 if layer == 5 else 0)
        tensors[f"layers.{layer}.norm.weight"] = gain.astype("f4")
    assert rules(tensors) == set()


def test_padding_of_a_head_with_the_shape_of_the_embedding_is_excused() -> None:
    tensors = trained()
    tensors["lm_head.weight"] = np.random.default_rng(2).normal(0, 0.02, (200, 64)).astype("f4")
    tensors["lm_head.weight"][1] = tensors["embed.weight"][1] = 0
    assert rules(tensors) == set()


def test_a_norm_that_was_never_trained_is_one_fact() -> None:
    tensors = trained()
    for layer in range(6):
        bias = np.random.default_rng(layer).normal(0, 0.1, 64)
        tensors[f"layers.{layer}.norm.bias"] = bias.astype("f4")
    tensors["layers.3.norm.weight"][:] = 1
    tensors["layers.3.norm.bias"][:] = 0
    assert rules(tensors) == {("layers.3.norm.weight", "constant")}


def test_a_module_that_gets_its_weights_from_another_one_has_none() -> None:
    tensors = trained()
    tensors["gate.mul.weight"] = np.zeros(0, "f4")
    tensors["gate.mul.output_mask"] = np.ones(4, "f4")
    assert rules(tensors) == set()


def test_weights_without_elements_whose_siblings_are_matrices_are_a_fault() -> None:
    tensors = trained()
    tensors["layers.3.up.weight"] = np.zeros(0, "f4")
    assert rules(tensors) == {("layers.3.up.weight", "empty")}
