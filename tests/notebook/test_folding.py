"""Folding puts every tensor into exactly one pattern, whose text states its members."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.notebook.checkpoints import gpt2, mixture_of_experts, resnet, row
from xckpt.formatting import columns
from xckpt.notebook.folding import ascending, fold, one_by_one
from xckpt.tensor_rows import Row

ROWS = st.lists(
    st.builds(
        Row,
        name=st.text(st.characters() | st.sampled_from(".0129_{}\\"), max_size=30),
        dtype=st.sampled_from(["float32", "int8"]),
        shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
        nbytes=st.integers(0, 2**70),
        storage=st.sampled_from(["", "zstd"]),
    ),
    unique_by=lambda row: row.name,
    max_size=30,
)
COMPONENTS = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "3",
        "5",
        "00",
        "07",
        "q_proj",
        "k_proj",
        "w1",
        "w2",
        "w10",
        "norm",
        "q_norm",
        "",
    ]
)
PATHS = st.lists(st.lists(COMPONENTS, min_size=1, max_size=4).map(".".join), unique=True)


def texts(*names: str) -> list[str]:
    return [pattern.text for pattern in fold(row(name, "float32", 4) for name in names)]


def spelled_out(text: str) -> set[str]:
    """Give the names that a pattern without left-out members stands for."""
    pieces = re.split(r"\{([^}]*)\}", "" if text == '""' else text)
    choices = [_members(piece) if at % 2 else [piece] for at, piece in enumerate(pieces)]
    names = set()
    for choice in map(list, product(*choices)):
        for at in range(3, len(choice), 2):
            if choice[at] == "=":
                choice[at] = choice[at - 2]
        names.add("".join(choice))
    return names


def _members(listed: str) -> list[str]:
    members = []
    for member in listed.split(","):
        first, dots, last = member.partition("..")
        if dots:
            members += [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
        else:
            members.append(member)
    return members


# --- numbers ------------------------------------------------------------------------------------


def test_numbers_that_a_name_repeats_are_one_number() -> None:
    names = [f"conv1d_{n}/conv1d_{n}/kernel:0" for n in range(9, 13)]
    assert texts(*names) == ["conv1d_{9..12}/conv1d_{=}/kernel:0"]
    names = [f"w/bn_{n}/bn_{n}_1/gamma" for n in (1, 2, 3)]
    assert texts(*names) == ["w/bn_{1..3}/bn_{=}_1/gamma"]
    assert texts("conv_1/conv_1/kernel") == ["conv_1/conv_1/kernel"]
    assert texts("a_1/a_1/w", "a_2/a_1/w") == ["a_1/a_1/w", "a_2/a_1/w"]


def test_numbers_before_a_suffix_fold() -> None:
    assert texts("135_quantized", "359_quantized") == ["{135,359}_quantized"]
    assert texts("onnx::MatMul_4_scale", "onnx::MatMul_5_scale", "onnx::MatMul_6_scale") == [
        "onnx::MatMul_{4..6}_scale"
    ]
    assert texts("1_q", "1_k") == ["1_q", "1_k"]


# --- what well-known models look like ------------------------------------------------------------


def test_a_decoder_of_the_gpt_family() -> None:
    assert [(p.text, p.count, p.shape) for p in fold(gpt2())] == [
        ("wte.weight", 1, (50257, 768)),
        ("wpe.weight", 1, (1024, 768)),
        ("h.{0..11}.ln_{1,2}.{weight,bias}", 48, (768,)),
        ("h.{0..11}.attn.c_attn.weight", 12, (768, 2304)),
        ("h.{0..11}.attn.c_attn.bias", 12, (2304,)),
        ("h.{0..11}.attn.c_proj.weight", 12, (768, 768)),
        ("h.{0..11}.{attn,mlp}.c_proj.bias", 24, (768,)),
        ("h.{0..11}.mlp.c_fc.weight", 12, (768, 3072)),
        ("h.{0..11}.mlp.c_fc.bias", 12, (3072,)),
        ("h.{0..11}.mlp.c_proj.weight", 12, (3072, 768)),
        ("ln_f.{weight,bias}", 2, (768,)),
    ]


def test_tensors_of_other_shapes_have_another_line() -> None:
    rows = [row(f"h.{i}.w", "float32", 4 if i % 6 else 8) for i in range(12)]
    rows += [row(f"{name}.weight", "float32", 9, 4) for name in ("a", "b")]
    rows.append(row("c.weight", "float32", 7, 4))
    assert [(p.text, p.shape, p.count, p.size) for p in fold(rows)] == [
        ("h.{0,6}.w", (8,), 2, 16),
        ("h.{1..5,7..11}.w", (4,), 10, 40),
        ("{a,b}.weight", (9, 4), 2, 72),
        ("c.weight", (7, 4), 1, 28),
    ]


def test_a_convolutional_network_with_stages_of_different_depth() -> None:
    counts = {pattern.text: pattern.count for pattern in fold(resnet())}
    assert counts["layer3.{0..5}.conv2.weight"] == 6
    assert counts["layer3.0.conv1.weight"] == 1
    assert counts["layer3.{1..5}.conv1.weight"] == 5
    assert counts["layer3.{0..5}.bn{1,2}.{weight,bias,running_mean,running_var}"] == 6 * 2 * 4
    assert counts["layer{1..4}.0.downsample.1.num_batches_tracked"] == 4
    assert counts["fc.bias"] == 1


def test_a_mixture_of_experts() -> None:
    patterns = {pattern.text: pattern for pattern in fold(mixture_of_experts(61, 256, dense=3))}
    experts = patterns["model.layers.{3..60}.mlp.experts.{0..255}.{gate,up,down}_proj.weight"]
    assert experts.count == experts.grid == 58 * 256 * 3
    assert experts.shape == (5120, 1536)
    assert experts.dtype == "float8_e4m3fn"
    assert experts.nbytes == experts.size == experts.count * 5120 * 1536
    assert "model.layers.{0..2}.mlp.{gate,up,down}_proj.weight" in patterns
    assert "model.layers.{0..60}.self_attn.{q,o}_proj.weight" in patterns
    assert "model.layers.{0..60}.self_attn.{k,v}_proj.weight" in patterns
    assert len(patterns) == 12


# --- indices -------------------------------------------------------------------------------------


def test_gaps_in_a_set_of_indices_show() -> None:
    assert texts(*[f"h.{i}.w" for i in (5, 2, 0, 1)]) == ["h.{0..2,5}.w"]
    assert texts("h.3.w", "h.4.w") == ["h.{3,4}.w"]


def test_a_long_irregular_set_is_abbreviated() -> None:
    assert texts(*[f"h.{i * i}.w" for i in range(9)]) == ["h.{0,1,4,…,64}.w"]


def test_an_incomplete_grid_shows_in_the_count() -> None:
    (pattern,) = fold(row(f"h.{i}.{j}", "int8") for i in range(4) for j in range(4) if i + j < 6)
    assert (pattern.text, pattern.count, pattern.grid) == ("h.{0..3}.{0..3}", 15, 16)


def test_a_single_index_is_not_folded() -> None:
    assert texts("layers.0.w", "layers.0.v") == ["layers.0.{w,v}"]


def test_numbers_with_leading_zeros_stay_separate() -> None:
    assert texts("h.0.w", "h.00.w") == ["h.{0,00}.w"]
    assert texts(*[f"h.{i:02}.w" for i in range(12)]) == ["h.{00..11}.w"]
    assert texts(*[f"h.{i:02}.w" for i in range(98, 102)]) == ["h.{98..101}.w"]
    assert texts("h.09.w", "h.10.w", "h.11.w", "h.012.w") == ["h.{09..11,012}.w"]
    assert texts("h.09.w", "h.10.w", "h.11.w", *[f"h.{i}.w" for i in range(12, 103)]) == [
        "h.{09..99,100..102}.w"
    ]
    assert texts("b_09.w", "b_10.w", "b_11.w") == ["b_{09..11}.w"]
    assert texts("h.01.w", "h.1.w", "h.001.w") == ["h.{1,01,001}.w"]


@pytest.mark.parametrize("digit", ["٣", "³", "\uff13"])
def test_only_ascii_digits_are_numbers(digit: str) -> None:
    assert texts(f"h.{digit}.w", "h.1.w") == [f"h.{digit}.w", "h.1.w"]


def test_numbers_too_long_for_int_are_words() -> None:
    assert len(texts("h.1.w", f"h.{'9' * 5000}.w")) == 2


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a.q_proj", "a.k_proj"], "a.{q,k}_proj"),
        (["a.c_fc", "a.c_proj"], "a.c_{fc,proj}"),
        (["a.kv_a_norm", "a.kv_b_norm"], "a.kv_{a,b}_norm"),
        (["a.conv1_bn", "a.conv2_bn"], "a.conv{1,2}_bn"),
        (["a.x:indices", "a.x:indptr"], "a.x:{indices,indptr}"),
        (["a.input", "a.output"], "a.{input,output}"),
        (["a.norm", "a.norm_q"], "a.{norm,norm_q}"),
        (["a._proj", "a.q_proj"], "a.{_proj,q_proj}"),
        (["a.w10", "a.w1", "a.w2"], "a.w{1,2,10}"),
        (["w3", "w1", "w2"], "w{1..3}"),
        (["a.one", "a.two", "a.three", "a.four", "a.five", "a.six", "a.seven"],
         "a.{one,two,three,…,seven}"),
    ],
)  # fmt: skip
def test_alternatives_are_cut_at_word_boundaries(names: list[str], text: str) -> None:
    assert texts(*names) == [text]


def test_names_with_nothing_in_common_stay_apart() -> None:
    assert texts("embedding", "head", "w1") == ["embedding", "head", "w1"]
    assert texts("a.x", "b.y") == ["a.x", "b.y"]


def test_patterns_that_differ_in_more_than_a_word_stay_apart() -> None:
    rows = [
        row("a.q", "float32", 4),
        row("a.k", "int8", 4),
        row("a.v", "float32", 4, 4),
        row("a.z", "float32", 4, storage="zstd"),
        row("a.0.w", "float32", 4),
        row("b.0.w", "float32", 4),
        row("b.1.w", "float32", 4),
    ]
    assert [p.text for p in fold(rows)] == ["a.q", "a.k", "a.v", "a.z", "a.0.w", "b.{0,1}.w"]


# --- hostile names -------------------------------------------------------------------------------


def test_notation_in_real_names_is_escaped() -> None:
    assert texts("a.{0..9}") == [r"a.\{0..9\}"]
    assert texts("m.a,b", "m.c{}") == [r"m.{a\,b,c\{\}}"]
    assert texts("a\\b\x1b[2J\u202e") == [r"a\\b\x1b[2J\u202e"]


def test_long_names_lose_their_middle_in_whole_components() -> None:
    (text,) = texts(".".join(["model", *(f"block_{i:03}" for i in range(50)), "weight"]))
    assert columns(text) <= 120
    assert re.fullmatch(r"model(\.block_\d{3})+\.…(\.block_\d{3})+\.weight", text)
    (text,) = texts("x" * 500)
    assert columns(text) == 120


def test_the_empty_name_can_be_seen() -> None:
    assert texts("") == ['""']


@given(ROWS)
def test_every_tensor_is_counted_once(rows: list[Row]) -> None:
    for patterns in (fold(rows), one_by_one(rows)):
        assert sum(p.count for p in patterns) == len(rows)
        assert sum(p.nbytes for p in patterns) == sum(r.nbytes for r in rows)
        assert sum(p.size for p in patterns) == sum(r.size for r in rows)
        assert {(p.dtype, p.storage, p.shape) for p in patterns} == {
            (r.dtype, r.storage, r.shape) for r in rows
        }
        assert {p.first for p in patterns} <= {r.name for r in rows}


@given(ROWS)
def test_texts_are_short_and_printable(rows: list[Row]) -> None:
    for pattern in fold(rows) + one_by_one(rows):
        assert pattern.text.isprintable()
        assert 1 <= columns(pattern.text) <= 120


@given(PATHS)
def test_a_pattern_stands_for_the_names_in_it(names: list[str]) -> None:
    patterns = fold(row(name, "float32", 4) for name in names)
    meant = [spelled_out(pattern.text) for pattern in patterns]
    assert set(names) <= set().union(*meant)
    for pattern, stands_for in zip(patterns, meant, strict=True):
        assert len(stands_for) == pattern.grid >= pattern.count
        assert len(stands_for & set(names)) >= pattern.count


@pytest.mark.parametrize("separator", ["\n", "\0"])
def test_characters_of_the_notation_may_appear_in_names(separator: str) -> None:
    names = [f"a{separator}b.1.w", "a\0b.2.w", "a\nb.3.w"]
    (first, second) = sorted(fold(row(n, "int8", 1) for n in names), key=lambda p: p.count)
    assert (first.count, second.count) == (1, 2)


# --- order ---------------------------------------------------------------------------------------


def in_order(*names: str) -> list[str]:
    return [names[at] for at in ascending(names)]


def test_numbers_ascend_and_words_keep_the_order_of_the_file() -> None:
    assert in_order("wte", "h.0.w", "h.0.b", "h.10.w", "h.10.b", "h.2.w", "h.2.b", "b10", "b9") == [
        *("wte", "h.0.w", "h.0.b", "h.2.w", "h.2.b", "h.10.w", "h.10.b", "b9", "b10")
    ]
    assert in_order("h.010.w", "h.9.w", f"h.{'9' * 5000}.w", "h.x.w") == [
        *("h.9.w", "h.010.w", f"h.{'9' * 5000}.w", "h.x.w")
    ]


@given(PATHS)
def test_order_is_a_permutation(names: list[str]) -> None:
    assert sorted(ascending(names)) == list(range(len(names)))


@given(PATHS)
def test_patterns_come_in_order_of_first_appearance(names: list[str]) -> None:
    meant = [spelled_out(text) for text in texts(*names)]
    first = [min(names.index(name) for name in names if name in group) for group in meant]
    assert first == sorted(first)
