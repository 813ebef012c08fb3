"""Stacking, folding, trees of modules and pictures agree on what an index in a name is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.labels.stacks import find_stacks
from xckpt.labels.grids import member_names
from xckpt.notebook.folding import families_of
from xckpt.notebook.summary import ModuleTree, sizes_table
from xckpt.structure.numbering import (
    drop_indices,
    is_index,
    module_indices,
    modules_by_frequency,
    numbered_modules,
    parse_name,
    split_leaf,
)
from xckpt.tensor_rows import Row

INDICES = ["0", "7", "10", "00", "007", "9" * 18]
WORDS = ["", "w1", "-1", "1e3", "²", "٣", "\uff13", "0x1", "9" * 19, "9" * 5000]


def rows(*names: str) -> list[Row]:
    return [Row(name, "float32", (2,), 8) for name in names]


@pytest.mark.parametrize("word", INDICES + WORDS)
def test_index_is_the_same_everywhere(word: str) -> None:
    expected = word in INDICES
    assert is_index(word) is expected
    # A second name of the same form, so that the two can be stacked or folded.
    sibling = word[:-1] + "8" if expected else word + "x"
    names = [f"layers.{word}.w", f"layers.{sibling}.w"]
    assert parse_name(names[0]).indices == ((word,) if expected else ())
    assert bool(find_stacks(dict.fromkeys(names, 0))) is expected
    assert [*modules_by_frequency(names[:1]).values()] == (["layers"] if expected else [])
    assert len(ModuleTree(rows(*names), 3)._root.children["layers"].children) == 2 - expected
    (layer,) = sizes_table(rows(names[0]), "layer").index
    assert layer == (f"layers.{word}" if expected else "")
    assert len(families_of(rows(*names))) == 2 - expected


def test_parse_name_for_some_modules() -> None:
    parsed = parse_name("layers.1.experts.2.w", {"experts"})
    assert parsed.template == ("layers.", "1", ".experts.", None, ".w")
    assert (parsed.modules, parsed.indices) == (("experts",), ("2",))
    assert parse_name("layers.1.experts.2.w", {"layers.experts"}) == parsed
    assert parse_name("layers.1.experts.2.w", {"layers.*.experts"}) == parsed


def test_module_of_index_without_word_before_it() -> None:
    assert parse_name("0.1.w").modules == ("index", "index")
    assert parse_name("a.0.1").modules == ("a", "a")


@given(st.text(st.sampled_from("ah0129._-/ layers"), max_size=16))
def test_pieces_spell_the_name(name: str) -> None:
    parsed = parse_name(name)
    assert "".join(parsed.pieces) == name
    assert drop_indices(parsed.pieces) == name
    assert len(module_indices(parsed.pieces)) == len(parsed.indices) == len(parsed.modules)
    assert tuple(numbered_modules(parsed.template)) == parsed.modules


# --- leading zeros -------------------------------------------------------------------------------


def stacked(*names: str) -> list[tuple[tuple[int, ...], list[str]]]:
    """Return the indices and members of stacks along one axis."""
    stacks = find_stacks(dict.fromkeys(names, 0))
    for stack in stacks:
        assert member_names(stack.template, stack.indices) == list(stack.members)
    return [(stack.indices[0], list(stack.members)) for stack in stacks]


@pytest.mark.parametrize("numbers", [range(12), range(98, 102), range(7, 10)])
def test_indices_of_one_width_are_one_stack(numbers: range) -> None:
    names = [f"h.{number:02}.w" for number in numbers]
    assert stacked(*names) == [(tuple(numbers), names)]


@pytest.mark.parametrize(
    ("spellings", "expected"),
    [
        (["0", "00", "1", "01"], [(0, 1), (0, 1)]),
        (["1", "01", "001"], []),
        (["09", "10", "11", "012"], [(10, 11)]),
        (["08", "09", "1"], [(8, 9)]),
        (["08", "09", "10", "011", "012"], [(8, 9), (11, 12)]),
    ],
)
def test_spellings_of_one_number_are_never_in_one_stack(
    spellings: list[str], expected: list[tuple[int, ...]]
) -> None:
    assert [indices for indices, _ in stacked(*(f"h.{text}.w" for text in spellings))] == expected


def test_leading_zeros_along_one_of_two_axes() -> None:
    names = [f"h.{layer}.e.{expert:03}.w" for layer in range(2) for expert in range(3)]
    (stack,) = find_stacks(dict.fromkeys(names, 0))
    assert stack.shape == (2, 3)
    assert member_names(stack.template, stack.indices) == names


# --- words and modules ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module", "bare_name"),
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
def test_index_of_numbered_module(name: str, module: str, bare_name: str | None) -> None:
    parsed = parse_name(name)
    assert (parsed.modules, parsed.indices) == ((module,), ("3",))
    assert "".join(parsed.pieces) == name
    assert drop_indices(parsed.template) == (bare_name or name.replace("_3", "", 1))
    names = [name.replace("3", str(number), 1) for number in (3, 4, 11)]
    (stack,) = find_stacks(dict.fromkeys(names, 0))
    assert stack.name == drop_indices(parsed.template)
    assert (stack.dims, stack.indices) == ((module,), ((3, 4, 11),))
    assert member_names(stack.template, stack.indices) == names


@pytest.mark.parametrize(
    "name",
    [
        *("mlp/wi_0/kernel", "norm_1.weight", "linear_2.bias", "Dense_0/kernel", "fc1.weight"),
        *("w1", "conv2d_3/kernel", "LayerNorm_0/scale", "lstm/h0", "h0", "player_1/w", "bias_1"),
        *("layer1.conv", "layer_norm_2.weight", "x3/w", "3x/w", "layers_3b/w", "moment_1", "a/1b"),
    ],
)
def test_number_that_distinguishes_roles_belongs_to_its_word(name: str) -> None:
    parsed = parse_name(name)
    assert parsed.indices == ()
    assert drop_indices(parsed.template) == name


def test_caller_can_name_further_numbered_modules() -> None:
    names = [f"net/Dense_{number}/kernel" for number in range(3)]
    assert find_stacks(dict.fromkeys(names, 0)) == []
    (stack,) = find_stacks(dict.fromkeys(names, 0), {"Dense"})
    assert (stack.name, stack.dims, stack.members) == ("net/Dense/kernel", ("Dense",), (*names,))


def test_index_that_all_members_share_is_not_a_dimension() -> None:
    names = [f"blocks.{block}.to_out.0.w" for block in range(3)]
    (stack,) = find_stacks(dict.fromkeys(names, 0))
    assert (stack.name, stack.dims) == ("blocks.to_out.0.w", ("blocks",))
    assert stack.index_dims == ("blocks", None)
    assert member_names(stack.template, stack.indices) == names


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
def test_leaf_follows_the_last_dot_or_slash(name: str, leaf: str) -> None:
    assert split_leaf(name)[2] == leaf
    assert "".join(split_leaf(name)) == name
