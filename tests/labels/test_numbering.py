"""What an index is, is the same for stacking, folding, trees of modules and pictures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.labels.conventions import match_names
from xckpt.labels.grids import find_stacks, member_names
from xckpt.labels.numbering import (
    drop_indices,
    is_index,
    module_indices,
    modules_by_frequency,
    numbered_modules,
    parse_name,
    split_leaf,
)
from xckpt.notebook.folding import Row, families_of
from xckpt.notebook.summary import ModuleTree, sizes_table
from xckpt.plots.treemap import _tree

INDICES = ["0", "7", "10", "00", "007", "9" * 18]
WORDS = ["", "w1", "-1", "1e3", "²", "٣", "\uff13", "0x1", "9" * 19, "9" * 5000]


def rows(*names: str) -> list[Row]:
    return [Row(name, "float32", (2,), 8) for name in names]


@pytest.mark.parametrize("component", INDICES + WORDS)
def test_all_agree_on_what_an_index_is(component: str) -> None:
    expected = component in INDICES
    assert is_index(component) is expected
    # Next to it another one of the same form, so that both can be one.
    other = component[:-1] + "8" if expected else component + "x"
    names = [f"layers.{component}.w", f"layers.{other}.w"]
    found = parse_name(names[0])
    assert found.indices == ((component,) if expected else ())
    assert bool(find_stacks(dict.fromkeys(names, 0))) is expected
    assert modules_by_frequency(names[:1]) == (["layers"] if expected else [])
    assert ("layers.*.w" in str(_tree(rows(*names)))) is expected
    assert len(ModuleTree(rows(*names), 3)._root.children["layers"].children) == 2 - expected
    (layer,) = sizes_table(rows(names[0]), "layer").index
    assert layer == (f"layers.{component}" if expected else "")
    assert len(families_of(rows(*names))) == 2 - expected


def test_only_some_modules() -> None:
    found = parse_name("layers.1.experts.2.w", {"experts"})
    assert found.template == ("layers.", "1", ".experts.", None, ".w")
    assert (found.modules, found.indices) == (("experts",), ("2",))


def test_an_index_that_stands_first_or_after_another() -> None:
    assert parse_name("0.1.w").modules == ("index", "index")
    assert parse_name("a.0.1").modules == ("a", "a")


def stacked(*names: str) -> list[tuple[tuple[int, ...], list[str]]]:
    found = find_stacks(dict.fromkeys(names, 0))
    for each in found:
        assert member_names(each.template, each.indices) == list(each.members)
    return [(each.indices[0], list(each.members)) for each in found]


@pytest.mark.parametrize("numbers", [range(12), range(98, 102), range(7, 10)])
def test_numbers_of_one_width_are_one_stack(numbers: range) -> None:
    names = [f"h.{number:02}.w" for number in numbers]
    assert stacked(*names) == [(tuple(numbers), names)]


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        (["0", "00", "1", "01"], [(0, 1), (0, 1)]),
        (["1", "01", "001"], []),
        (["09", "10", "11", "012"], [(10, 11)]),
        (["08", "09", "1"], [(8, 9)]),
        (["08", "09", "10", "011", "012"], [(8, 9), (11, 12)]),
    ],
)
def test_a_number_that_is_spelled_in_two_ways_is_never_mixed_up(
    spelled: list[str], expected: list[tuple[int, ...]]
) -> None:
    assert [indices for indices, _ in stacked(*(f"h.{text}.w" for text in spelled))] == expected


def test_zeros_along_one_of_two_axes() -> None:
    names = [f"h.{layer}.e.{expert:03}.w" for layer in range(2) for expert in range(3)]
    (found,) = find_stacks(dict.fromkeys(names, 0))
    assert found.shape == (2, 3)
    assert member_names(found.template, found.indices) == names


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "base", "rest"),
    [
        ("params/encoder/layers_3/attn/kernel", "layers", "params/encoder/layers/attn/kernel"),
        (
            "target.decoder.layers_3.mlp.wi_0.kernel",
            "layers",
            "target.decoder.layers.mlp.wi_0.kernel",
        ),
        ("params/layer/3/dense_1/kernel", "layer", "params/layer/dense_1/kernel"),
        ("Transformer/encoderblock_3/LayerNorm_0/scale", "encoderblock", None),
        ("bert/encoder/layer_3/output/dense/kernel:0", "layer", None),
        ("bert/encoder/layer_._3/output/kernel", "layer", "bert/encoder/layer/output/kernel"),
        ("model/h3/attn/c_attn/w", "h", "model/h/attn/c_attn/w"),
        ("transformer/h3_attn/linear/w", "h", "transformer/h_attn/linear/w"),
        ("h_3.ln_1.weight", "h", "h.ln_1.weight"),
        ("layer_with_weights-3/kernel", "layer_with_weights", "layer_with_weights/kernel"),
        ("ResNetBlock_3/Conv_0/kernel", "ResNetBlock", "ResNetBlock/Conv_0/kernel"),
        ("down_blocks.3.w", "down_blocks", "down_blocks.w"),
        ("3/w", "index", "w"),
    ],
)
def test_how_projects_number_their_layers(name: str, base: str, rest: str | None) -> None:
    found = parse_name(name)
    assert (found.modules, found.indices) == ((base,), ("3",))
    assert "".join(found.pieces) == name
    assert drop_indices(found.template) == (rest or name.replace("_3", "", 1))
    names = [name.replace("3", str(number), 1) for number in (3, 4, 11)]
    (one,) = find_stacks(dict.fromkeys(names, 0))
    assert (one.name, one.dims, one.indices) == (
        drop_indices(found.template),
        (base,),
        ((3, 4, 11),),
    )
    assert member_names(one.template, one.indices) == names


@pytest.mark.parametrize(
    "name",
    [
        *("mlp/wi_0/kernel", "norm_1.weight", "linear_2.bias", "Dense_0/kernel", "fc1.weight"),
        *("w1", "conv2d_3/kernel", "LayerNorm_0/scale", "lstm/h0", "h0", "player_1/w", "bias_1"),
        *("layer1.conv", "layer_norm_2.weight", "x3/w", "3x/w", "layers_3b/w", "moment_1", "a/1b"),
    ],
)
def test_numbers_that_tell_roles_apart_stay_in_the_name(name: str) -> None:
    assert parse_name(name).indices == ()
    assert drop_indices(parse_name(name).template) == name


def test_a_caller_knows_which_modules_are_numbered() -> None:
    names = [f"net/Dense_{number}/kernel" for number in range(3)]
    assert find_stacks(dict.fromkeys(names, 0)) == []
    (found,) = find_stacks(dict.fromkeys(names, 0), {"Dense"})
    assert (found.name, found.dims, found.members) == ("net/Dense/kernel", ("Dense",), (*names,))


def test_an_index_that_all_have_is_no_dimension() -> None:
    names = [f"blocks.{block}.to_out.0.w" for block in range(3)]
    (found,) = find_stacks(dict.fromkeys(names, 0))
    assert (found.name, found.dims) == ("blocks.to_out.0.w", ("blocks",))
    assert found.index_dims == ("blocks", None)
    assert member_names(found.template, found.indices) == names


@given(st.text(st.sampled_from("ah0129._-/ layers"), max_size=16))
def test_the_pieces_of_a_name_spell_it(name: str) -> None:
    found = parse_name(name)
    assert "".join(found.pieces) == name
    assert drop_indices(found.pieces) == name
    # What was taken apart is the same again.
    assert len(module_indices(found.pieces)) == len(found.indices) == len(found.modules)
    assert tuple(numbered_modules(found.template)) == found.modules


class TestTheLeafOfAName:
    @pytest.mark.parametrize(
        ("name", "leaf"),
        [
            ("params/encoder/layers_3/kernel", "kernel"),
            ("net/~/linear.w", "w"),
            ("a.b/c", "c"),
            ("model/w:0", "w:0"),
            ("w", "w"),
            ("a/", ""),
        ],
    )
    def test_follows_the_last_dot_or_slash(self, name: str, leaf: str) -> None:
        assert split_leaf(name)[2] == leaf
        assert "".join(split_leaf(name)) == name

    def test_norms_are_found_whatever_separates_words(self) -> None:
        mine = ["params/encoder/layers_3/norm/gamma", "params/encoder/layers_3/norm/beta"]
        other = ["params/encoder/layers_3/norm/weight", "params/encoder/layers_3/norm/bias"]
        assert [found[:2] for found in match_names(mine, other)] == list(
            zip(mine, other, strict=True)
        )
