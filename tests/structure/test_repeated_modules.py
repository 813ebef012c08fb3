"""A number in a name is an index only if it repeats modules of the model."""

from __future__ import annotations

import pytest

from xckpt.structure import Described, Structure


def structure(*names: str, shape: tuple[int, ...] = (8, 8)) -> Structure:
    return Structure([Described(name, "float32", shape) for name in names])


def layers(*names: str) -> list[str]:
    result = structure(*names)
    return list(dict.fromkeys([result.layer(name) for name in names]))


REPEATED = [
    ["model.layers.0.w.weight", "model.layers.1.w.weight"],
    ["blk.0.attn_q.weight", "blk.1.attn_q.weight"],
    ["params/layers_0/k/kernel", "params/layers_1/k/kernel"],
    ["features.0.conv.weight", "features.1.conv.weight", "features.1.norm.weight"],
    ["layer1.0.conv1.weight", "layer1.1.conv1.weight", "layer1.1.down.0.weight"],
    ["encoder.0.weight", "encoder.2.weight"],
]


@pytest.mark.parametrize("names", REPEATED)
def test_repeated_modules_are_layers(names: list[str]) -> None:
    assert len(layers(*names)) == 2
    assert "" not in layers(*names)


NOT_REPEATED = [
    ["optimizer_state_dict.state.0.exp_avg", "optimizer_state_dict.state.1.exp_avg"],
    ["optimizer_state.state.140178894882496.exp_avg", "model_state.w"],
    ["layers/dense/vars/0", "layers/dense/vars/1"],
    ["block.norm_1.weight", "block.norm_2.weight"],
    ["t5.wi_0.weight", "t5.wi_1.weight"],
    ["260", "262", "p2o.helper.constant.203"],
    ["alphas.0", "alphas.1"],
    ["lstm.weight_ih_l0", "lstm.weight_ih_l1"],
]


@pytest.mark.parametrize("names", NOT_REPEATED)
def test_other_numbers_are_not_layers(names: list[str]) -> None:
    assert layers(*names) == [""]


def test_steps_of_a_sequence_that_differ_are_not_layers() -> None:
    norms = ["weight", "bias", "running_mean", "running_var"]
    names = ["down.0.weight", *(f"down.1.{name}" for name in norms)]
    tensors = [Described(n, "float32", (8, 8, 1, 1) if n == names[0] else (8,)) for n in names]
    assert {Structure(tensors).layer(name) for name in names} == {""}


def test_constants_of_a_graph_are_in_no_layer() -> None:
    names = ["model.2.conv.weight", "model.3.conv.weight", "model.4.mask"]
    result = structure(*names)
    assert result.layer("model.3.conv.weight") == "model.3"
    assert "model.4" not in {result.layer(name) for name in names[:2]}


def test_layers_of_a_file_that_names_them() -> None:
    declared = {"class": "dense", "variable": "kernel"}
    tensors = [
        Described(f"layers/{name}/vars/0", "float32", (8, 8), {**declared, "layer": name})
        for name in ("dense", "dense_1")
    ]
    result = Structure(tensors)
    assert [result.layer(name) for name in result] == ["dense", "dense_1"]


def test_indices_have_one_name_in_all_frameworks() -> None:
    for names in REPEATED[:3]:
        result = structure(*names)
        assert [result[name].indices for name in names] == [(("layer", 0),), (("layer", 1),)]
