"""Layouts that known conversions give to tensors are explained, and damage in them is not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import xckpt
from tests.stats.checkpoints import write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]
Sides = tuple[Tensors, Tensors]
F32 = np.float32
LAYERS, WIDTH, HEADS, GROUPS, HEAD = 3, 48, 4, 2, 16


def random_of(seed: int = 0) -> Callable[..., Array]:
    rng = np.random.default_rng(seed)
    return lambda *shape: (0.05 * rng.standard_normal(shape)).astype(F32)


def explained(a: Any, b: Any, **options: Any) -> Any:
    """Return the table of a comparison."""
    result = xckpt.compare(a, b, explain=True, cache=False, progress=False, **options)
    return xckpt.table(result)


def separate(groups: int = GROUPS) -> Tensors:
    """Return queries, keys, values and output projections of a decoder."""
    normal, tensors = random_of(), {}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}.self_attn"
        for name, heads in (("q", HEADS), ("k", groups), ("v", groups)):
            tensors[f"{base}.{name}_proj.weight"] = normal(heads * HEAD, WIDTH)
            tensors[f"{base}.{name}_proj.bias"] = normal(heads * HEAD)
        tensors[f"{base}.o_proj.weight"] = normal(WIDTH, HEADS * HEAD)
    return tensors


def parts(tensors: Tensors, layer: int, param: str) -> list[Array]:
    base = f"model.layers.{layer}.self_attn"
    return [tensors[f"{base}.{name}_proj.{param}"] for name in "qkv"]


def by_groups(three: list[Array], groups: int) -> Array:
    rest = three[0].shape[1:]
    blocks = [x.reshape(groups, -1, *rest) for x in three]
    return np.concatenate(blocks, axis=1).reshape(-1, *rest)


def fused(name: str, groups: int | None, source: Tensors) -> Tensors:
    """Return the model with fused queries, keys and values, by groups or one after the other."""
    tensors = {}
    for layer in range(LAYERS):
        for param in ("weight", "bias"):
            three = parts(source, layer, param)
            joined = by_groups(three, groups) if groups else np.concatenate(three)
            tensors[name.format(layer) + f".{param}"] = joined
        tensors[name.format(layer).rpartition(".")[0] + ".dense.weight"] = source[
            f"model.layers.{layer}.self_attn.o_proj.weight"
        ]
    return tensors


# --- layouts --------------------------------------------------------------------------------------


def megatron() -> Sides:
    ours = separate()
    return ours, fused("decoder.layers.{}.self_attention.linear_qkv", GROUPS, ours)


def neox() -> Sides:
    ours = separate(HEADS)
    return ours, fused("gpt_neox.layers.{}.attention.query_key_value", HEADS, ours)


def neox_in_gguf() -> Sides:
    source = separate(HEADS)
    ours = fused("gpt_neox.layers.{}.attention.query_key_value", HEADS, source)
    theirs = fused("blk.{}.attn_qkv", None, source)
    named = {n.replace(".dense.", ".attn_output."): v for n, v in theirs.items()}
    return ours, {n.replace("blk.attn", "blk.0.attn"): v for n, v in named.items()}


def bloom() -> Sides:
    source = separate(HEADS)
    ours = fused("transformer.h.{}.self_attention.query_key_value", HEADS, source)
    return ours, fused("transformer.h.{}.attn.qkv", None, source)


def of_unusual_width() -> Sides:
    normal = random_of()
    source = {
        f"model.layers.{layer}.self_attn.{name}_proj.{param}": normal(4 * 60, *rest)
        for layer in range(LAYERS)
        for name in "qkvo"
        for param, rest in (("weight", (240,)), ("bias", ()))
    }
    ours = fused("transformer.h.{}.self_attention.query_key_value", 4, source)
    return ours, fused("transformer.h.{}.attn.qkv", None, source)


def falcon_in_gguf() -> Sides:
    normal = random_of()
    ours, theirs = {}, {}
    for layer in range(LAYERS):
        three = [normal(heads * HEAD, HEADS * HEAD) for heads in (HEADS, GROUPS, GROUPS)]
        name = f"transformer.h.{layer}.self_attention.query_key_value.weight"
        ours[name] = by_groups(three, GROUPS)
        theirs[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(three)
    return ours, theirs


def falcon() -> Sides:
    ours = separate()
    return ours, fused("transformer.h.{}.self_attention.query_key_value", GROUPS, ours)


def falcon_of_one_group() -> Sides:
    ours = separate(1)
    return ours, fused("transformer.h.{}.self_attention.query_key_value", 1, ours)


def experts(*, in_first: bool = False) -> Sides:
    normal = random_of(1)
    ours: Tensors = {}
    theirs: Tensors = {}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = ([normal(*s) for _ in range(4)] for s in ((96, 64), (96, 64), (64, 96)))
        for n in range(4):
            ours[f"{base}.{n}.gate_proj.weight"] = gates[n]
            ours[f"{base}.{n}.up_proj.weight"] = ups[n]
            ours[f"{base}.{n}.down_proj.weight"] = downs[n]
        joined = np.stack([np.concatenate(pair) for pair in zip(gates, ups, strict=True)])
        down = np.stack(downs)
        theirs[f"{base}.gate_up_proj"] = joined.swapaxes(1, 2).copy() if in_first else joined
        theirs[f"{base}.down_proj"] = down.swapaxes(1, 2).copy() if in_first else down
    return ours, theirs


def flax() -> Sides:
    ours = separate(HEADS)
    theirs: Tensors = {}
    for layer in range(LAYERS):
        base = f"encoder/layers_{layer}/attention"
        for name, new in zip("qkv", ("query", "key", "value"), strict=True):
            old = f"model.layers.{layer}.self_attn.{name}_proj"
            kernel = ours[f"{old}.weight"].T.reshape(WIDTH, HEADS, HEAD)
            theirs[f"{base}/{new}/kernel"] = np.ascontiguousarray(kernel)
            theirs[f"{base}/{new}/bias"] = ours[f"{old}.bias"].reshape(HEADS, HEAD)
        output = ours[f"model.layers.{layer}.self_attn.o_proj.weight"]
        theirs[f"{base}/out/kernel"] = np.ascontiguousarray(output.T.reshape(HEADS, HEAD, WIDTH))
    return {n.replace("model.", "encoder."): v for n, v in ours.items()}, theirs


def keras(
    first: str = "", later: str = "_{}", *, kernel: str = "kernel", bias: str = "bias"
) -> Sides:
    """Return the attention of Keras, whose layers have numbers behind underscores."""
    ours, kernels = flax()
    words = {"query": "query_dense", "key": "key_dense", "value": "value_dense"}
    words |= {"out": "output_dense", "kernel": kernel, "bias": bias}
    theirs = {}
    for name, values in kernels.items():
        _, layer, _, *path = name.split("/")
        number = int(layer.removeprefix("layers_"))
        module = "layers/attention" + (later.format(number) if number else first)
        theirs["/".join([module, *[words[word] for word in path]])] = values
    return ours, theirs


def stablelm() -> Sides:
    normal = random_of(2)
    ours: Tensors = {}
    theirs: Tensors = {}
    for layer in range(LAYERS):
        for name, count in (("q", HEADS), ("k", GROUPS)):
            norms = 1 + normal(count, HEAD)
            theirs[f"blk.{layer}.attn_{name}_norm.weight"] = norms
            base = f"model.layers.{layer}.self_attn.{name}_layernorm.norms"
            ours |= {f"{base}.{n}.weight": row.copy() for n, row in enumerate(norms)}
    return ours, theirs


def deepseek() -> Sides:
    normal = random_of(3)
    ours: Tensors = {}
    theirs: Tensors = {}
    for layer in range(LAYERS):
        heads = normal(HEADS, 12 + 20, 24)
        ours[f"model.layers.{layer}.self_attn.kv_b_proj.weight"] = heads.reshape(-1, 24)
        theirs[f"blk.{layer}.attn_k_b.weight"] = heads[:, :12].swapaxes(1, 2).copy()
        theirs[f"blk.{layer}.attn_v_b.weight"] = heads[:, 12:].copy()
    return ours, theirs


LAYOUTS: dict[str, Callable[[], Sides]] = {
    "megatron": megatron,
    "neox": neox,
    "neox in gguf": neox_in_gguf,
    "bloom": bloom,
    "bloom, heads of 60": of_unusual_width,
    "falcon": falcon,
    "falcon in gguf": falcon_in_gguf,
    "falcon of one group": falcon_of_one_group,
    "experts": experts,
    "experts, inputs first": lambda: experts(in_first=True),
    "flax": flax,
    "keras": keras,
    "keras, numbered variables": lambda: keras("_0", kernel="vars/0", bias="vars/1"),
    "stablelm": stablelm,
    "deepseek": deepseek,
}


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_known_layouts_are_explained(layout: str, is_turned: bool) -> None:
    sides = LAYOUTS[layout]()
    table = explained(*(sides[::-1] if is_turned else sides))
    assert table.query("outcome != 'explained'").empty, table.explanation.to_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_known_layouts_may_be_rounded(layout: str) -> None:
    ours, theirs = LAYOUTS[layout]()
    table = explained(ours, {n: v.astype(ml_dtypes.bfloat16) for n, v in theirs.items()})
    assert table.query("outcome != 'explained'").empty
    assert table.cause.str.contains("rounded").all()


def _one_element(values: Array) -> Array:
    values.reshape(-1)[values.size // 3] += F32(0.5)
    return values


def _stale(values: Array) -> Array:
    return (values + random_of(9)(*values.shape) / 20).astype(F32)


def _exchanged(values: Array) -> Array:
    """Exchange the first blocks of rows, which are heads or a part of one."""
    size = max(1, min(HEAD, len(values) // 2))
    order = np.arange(len(values))
    order[:size], order[size : 2 * size] = np.arange(size, 2 * size), np.arange(size)
    return values[order]


def _of_last_axis(values: Array) -> Array:
    order = np.arange(values.shape[-1])
    order[:2] = 1, 0
    return np.ascontiguousarray(values[..., order])


DAMAGES: dict[str, Callable[[Array], Array]] = {
    "one element": _one_element,
    "stale": _stale,
    "exchanged": _exchanged,
    "two columns": _of_last_axis,
}


def _related(table: Any, name: str) -> set[str]:
    """Return a tensor, and the tensors of the other side that it consists of or belongs to."""
    others = {n for n in table.index if name in re.split(", ", table.other_names[n])}
    return {name, *others, *re.split(", ", table.other_names[name])} - {""}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_in_a_known_layout_is_never_explained(layout: str, damage: str) -> None:
    ours, theirs = LAYOUTS[layout]()
    for side in (ours, theirs):
        for name in [n for n in side if "1" in re.findall(r"\d+", n)[:1]]:
            damaged = {**side, name: DAMAGES[damage](side[name].copy())}
            if np.array_equal(damaged[name], side[name]):
                continue
            pair = (damaged, theirs) if side is ours else (ours, damaged)
            table = explained(*pair)
            bad = set(table.query("outcome != 'explained'").index)
            assert name in bad, (name, table.explanation[name])
            healthy = [n for n in table.index if re.findall(r"\d+", n)[:1] != ["1"]]
            assert not bad.intersection(healthy)


@pytest.mark.parametrize("layout", ["experts", "stablelm"])
def test_exchanged_members_are_not_explained(layout: str) -> None:
    ours, theirs = LAYOUTS[layout]()
    names = [n for n in ours if ".1." in n[:16] and (".1.weight" in n or ".1.down" in n)]
    first = names[0]
    second = first.replace(".1.weight", ".0.weight").replace(".1.down", ".0.down")
    ours[first], ours[second] = ours[second], ours[first]
    table = explained(ours, theirs)
    assert set(table.query("outcome != 'explained'").index) >= {first, second}


def test_layouts_need_their_slots() -> None:
    # Three axes, of a tensor that has no heads.
    normal = random_of()
    ours = {f"model.layers.{n}.mlp.up.weight": normal(64, 48) for n in range(3)}
    theirs = {n: v.reshape(4, 16, 48) for n, v in ours.items()}
    assert set(explained(ours, theirs).outcome) == {"changed"}


# --- ranks ----------------------------------------------------------------------------------------


def on_ranks(word: str, count: int = 2) -> Sides:
    normal = random_of(4)
    ours = {"model.embed_tokens.weight": normal(100, 64)}
    theirs: Tensors = {}
    for layer in range(3):
        base = f"model.layers.{layer}.mlp"
        gates = [normal(96, 64) for _ in range(2)]
        ours[f"{base}.gate_up_proj.weight"] = np.concatenate(gates)
        ours[f"{base}.down_proj.weight"] = normal(64, 96)
        ours[f"{base}.norm.weight"] = 1 + normal(64)
    for name, values in ours.items():
        for rank in range(count):
            part = np.array_split(values, count, axis=int("down" in name))[rank]
            if "gate_up" in name:
                halves = np.split(values, 2)
                part = np.concatenate([np.array_split(half, count)[rank] for half in halves])
            part = values if "norm" in name else part
            theirs[name.replace(".weight", f".{word.format(rank)}.weight")] = part.copy()
    return ours, theirs


@pytest.mark.parametrize("word", ["tp{}", "rank{}", "shard_{}", "mp_rank_0{}", "{}"])
def test_parts_on_ranks_are_explained(word: str) -> None:
    for sides in (on_ranks(word), on_ranks(word)[::-1]):
        table = explained(*sides)
        assert table.query("outcome != 'explained'").empty, table.explanation.to_dict()


@pytest.mark.parametrize(
    "name", ["embed_tokens", "layers.1.mlp.gate_up_proj", "layers.1.mlp.down_proj"]
)
def test_parts_in_the_wrong_order_are_not_explained(name: str) -> None:
    ours, theirs = on_ranks("tp{}")
    first, second = (f"model.{name}.tp{rank}.weight" for rank in range(2))
    theirs[first], theirs[second] = theirs[second], theirs[first]
    table = explained(ours, theirs)
    bad = set(table.query("outcome != 'explained'").index)
    assert bad == {f"model.{name}.weight", first, second}


@pytest.mark.parametrize("damage", ["one element", "stale"])
def test_damaged_parts_on_ranks_are_not_explained(damage: str) -> None:
    ours, theirs = on_ranks("tp{}")
    for name in [n for n in theirs if ".1." in n]:
        damaged = {**theirs, name: DAMAGES[damage](theirs[name].copy())}
        table = explained(ours, damaged)
        assert table.outcome[name] != "explained"
        assert set(table.query("outcome != 'explained'").index) <= _related(table, name)


# --- flat parameters ------------------------------------------------------------------------------


def flat(
    ranks: int = 1,
    *,
    pad: int = 0,
    mark: float = 0,
    large: bool = False,
    word: str = "rank{}._flat_param",
) -> Sides:
    normal = random_of(5)
    ours: Tensors = {"model.embed_tokens.weight": normal(37, 24)}
    for layer in range(3):
        base = f"model.layers.{layer}"
        ours[f"{base}.self_attn.q_proj.weight"] = normal(24, 24)
        ours[f"{base}.self_attn.q_proj.bias"] = np.zeros(24, F32)
        ours[f"{base}.mlp.up_proj.weight"] = normal(320 if large else 31, 1000 if large else 24)
        ours[f"{base}.input_layernorm.weight"] = np.ones(23, F32)
    ours["model.norm.weight"] = np.ones(23, F32)
    pieces = []
    for values in ours.values():
        pieces += [values.ravel(), np.full(-values.size % pad if pad else 0, mark, F32)]
    vector = np.concatenate(pieces)
    vector = np.pad(vector, (0, -len(vector) % ranks))
    if ranks == 1:
        return ours, {"_fsdp_wrapped_module._flat_param": vector}
    return ours, {word.format(n): v for n, v in enumerate(np.split(vector, ranks))}


FLAT: dict[str, dict[str, Any]] = {
    "one vector": {},
    "aligned": {"pad": 4, "mark": 42},
    "four ranks": {"ranks": 4},
    "seven ranks": {"ranks": 7, "pad": 8, "mark": 42},
    "flat_param.0": {"ranks": 2, "word": "flat_param.{}"},
    "flat_param_rank_0": {"ranks": 2, "word": "_fsdp_wrapped_module.flat_param_rank_{}"},
    "fsdp_rank_0": {"ranks": 2, "word": "fsdp_rank_{}._flat_param"},
    "large": {"large": True},
    "large on ranks": {"large": True, "ranks": 3},
}


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("case", FLAT)
def test_flat_parameters_are_explained(case: str, is_sorted: bool) -> None:
    ours, theirs = flat(**FLAT[case])
    ours = dict(sorted(ours.items())) if is_sorted else ours
    for sides in ((ours, theirs), (theirs, ours)):
        table = explained(*sides)
        assert table.query("outcome != 'explained'").empty, table.explanation.to_dict()


def test_flat_parameters_may_be_rounded() -> None:
    ours, theirs = flat()
    table = explained({n: v.astype(ml_dtypes.bfloat16) for n, v in ours.items()}, theirs)
    assert table.query("outcome != 'explained'").empty


@pytest.mark.parametrize("case", FLAT)
def test_an_element_of_a_flat_parameter_is_not_explained(case: str) -> None:
    ours, theirs = flat(**FLAT[case])
    name = list(theirs)[-1]
    theirs[name][len(theirs[name]) // 3] += F32(0.5)
    table = explained(ours, theirs)
    bad = set(table.query("outcome != 'explained'").index)
    assert name in bad
    assert len(bad & ours.keys()) == 1


def test_a_stale_tensor_in_a_flat_parameter_is_not_explained() -> None:
    for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
        ours, theirs = flat(2)
        ours[name] = _stale(ours[name])
        assert explained(ours, theirs).outcome[name] != "explained"


def test_exchanged_layers_in_a_flat_parameter_are_not_explained() -> None:
    ours, theirs = flat()
    first, second = (f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1))
    ours[first], ours[second] = ours[second], ours[first]
    table = explained(ours, theirs)
    assert set(table.query("outcome != 'explained'").index) >= {first, second}


WRAPPED = "_fsdp_wrapped_module.model.layers.{}._fsdp_wrapped_module._flat_param.rank{}"


def wrapped_layers() -> Sides:
    """Return tensors, and a vector for each layer on two ranks; keys and values have one size."""
    normal = random_of(7)
    kinds = {"self_attn.k_proj": (16, 24), "self_attn.v_proj": (16, 24), "self_attn.q_norm": (8,)}
    kinds["mlp.up_proj"] = (31, 24)
    ours: Tensors = {}
    theirs: Tensors = {}
    for layer in range(3):
        own = {f"model.layers.{layer}.{kind}.weight": normal(*kinds[kind]) for kind in kinds}
        vector = np.concatenate([values.ravel() for values in own.values()])
        theirs |= {WRAPPED.format(layer, n): v for n, v in enumerate(np.split(vector, 2))}
        ours.update(own)
    return ours, theirs


def test_flat_parameters_of_layers_are_explained() -> None:
    assert set(explained(*wrapped_layers()).outcome) == {"explained"}


def test_exchanged_tensors_of_a_layer_are_not_in_the_order_of_other_layers() -> None:
    ours, theirs = wrapped_layers()
    keys, values = (f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "kv")
    ours[keys], ours[values] = ours[values], ours[keys]
    table = explained(ours, theirs)
    bad = set(table.query("outcome != 'explained'").index)
    assert bad >= {keys, values, WRAPPED.format(1, 0)}
    assert all(".layers.1." in name for name in bad)


def test_zeros_instead_of_a_small_tensor_are_no_padding() -> None:
    ours, theirs = wrapped_layers()
    name = "model.layers.1.self_attn.q_norm.weight"
    vector, start = theirs[WRAPPED.format(1, 1)], 2 * 16 * 24 - (2 * 16 * 24 + 8 + 31 * 24) // 2
    assert np.array_equal(vector[start : start + 8], ours[name])
    vector[start : start + 8] = 0
    outcomes = explained(ours, theirs).outcome
    assert outcomes[name] != "explained"
    assert outcomes[WRAPPED.format(1, 1)] != "explained"


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_files_are_read_in_pieces(layout: str, tmp_path: Path) -> None:
    paths = []
    for name, tensors in zip("ab", LAYOUTS[layout](), strict=True):
        paths.append(tmp_path / f"{name}.safetensors")
        write(paths[-1], tensors)
    assert set(explained(*paths).outcome) == {"explained"}
    opened = [xckpt.open(path).chunk() for path in paths]
    assert set(explained(*opened).outcome) == {"explained"}


# --- numbers on the grid of codes -----------------------------------------------------------------

_F8 = ml_dtypes.float8_e4m3fn
_NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    F32,
)


def in_float8(values: Array) -> Array:
    """Quantise tiles of 128 x 128, as `weight` and `weight_scale_inv` of DeepSeek 3 hold them."""
    decoded = np.empty_like(values)
    for row in range(0, values.shape[0], 128):
        for column in range(0, values.shape[1], 128):
            tile = values[row : row + 128, column : column + 128]
            scale = np.abs(tile).max() / F32(448)
            codes = (tile / scale).astype(_F8)
            decoded[row : row + 128, column : column + 128] = codes.astype(F32) * scale
    return decoded


def in_nf4(values: Array) -> Array:
    blocks = values.reshape(-1, 64)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    codes = np.abs((blocks / largest)[..., None] - _NF4).argmin(axis=-1)
    decoded: Array = (_NF4[codes] * largest).reshape(values.shape)
    return decoded


@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(256, 384), (320, 200), (128, 128)])
@pytest.mark.parametrize("quantise", [in_float8, in_nf4])
def test_decoded_numbers_are_quantised(
    quantise: Callable[[Array], Array], shape: tuple[int, int], dtype: Any
) -> None:
    normal = random_of(6)
    ours = {f"layers.{n}.mlp.up.weight": normal(*shape) for n in range(3)}
    theirs = {name: quantise(values).astype(dtype) for name, values in ours.items()}
    assert set(explained(ours, theirs).cause) == {"quantised"}
    assert set(explained(theirs, ours).cause) == {"quantised"}
    name = "layers.1.mlp.up.weight"
    for damage in DAMAGES.values():
        damaged = {**theirs, name: damage(theirs[name].astype(F32)).astype(dtype)}
        table = explained(ours, damaged)
        assert set(table.query("outcome != 'explained'").index) == {name}


@pytest.mark.parametrize("size", [0.02, 0.08])
def test_noise_within_the_steps_of_scales_is_not_quantised(size: float) -> None:
    """A block has one number for each level, and noise on ones has several."""
    normal = random_of(7)
    ones = {f"layers.{n}.norm.weight": np.ones(256, F32) for n in range(3)}
    name = "layers.1.norm.weight"
    noisy = {**ones, name: (1 + normal(256) * F32(size)).astype(np.float16)}
    for pair in ((ones, noisy), (noisy, ones)):
        assert set(explained(*pair).query("outcome != 'explained'").index) == {name}


# --- axes of one position -------------------------------------------------------------------------


@pytest.mark.parametrize("is_renamed", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
def test_axes_of_one_position_come_and_go(is_renamed: bool, is_turned: bool) -> None:
    """Linear layers as convolutions, tokens with a batch axis, directions of ONNX."""
    normal = random_of(4)
    shapes = {"to_q": (48, 32), "cls_token": (1, 1, 48), "pos_embed": (17, 48), "hidden": (96, 24)}
    ours = {f"mid.{name}.weight": normal(*shape) for name, shape in shapes.items()}
    others = {"to_q": (48, 32, 1, 1), "cls_token": (48,), "pos_embed": (1, 17, 48)}
    others["hidden"] = (1, 96, 24)
    new = "middle.0.{}.weight" if is_renamed else "mid.{}.weight"
    theirs = {new.format(n): ours[f"mid.{n}.weight"].reshape(shape) for n, shape in others.items()}
    sides = (theirs, ours) if is_turned else (ours, theirs)
    for names in (None, "auto"):
        table = explained(*sides, names=names)
        assert set(table.outcome) == {"explained"}, table.explanation.to_dict()
        assert table.cause.str.contains("reshaped").all()
    name = "mid.to_q.weight"
    ours[name] = ours[name].copy()
    ours[name][[3, 5]] = ours[name][[5, 3]]
    table = explained(*sides)
    assert {name, new.format("to_q")} & set(table.index[table.outcome != "explained"])


# --- names ----------------------------------------------------------------------------------------


def numbered_otherwise() -> Sides:
    """Return blocks that one side counts in two numbers, and the other side in one, as in UNets."""
    normal = random_of(5)
    ours: Tensors = {}
    theirs: Tensors = {}
    modules: dict[str, tuple[str, tuple[int, ...]]] = {
        "conv_in": ("input_blocks.0.0", (8, 4, 3, 3))
    }
    for stage, block in ((stage, block) for stage in range(4) for block in range(3)):
        base, new = f"up_blocks.{stage}.resnets.{block}", f"output_blocks.{3 * stage + block}.0"
        modules[f"{base}.norm1"] = f"{new}.in_layers.0", (8,)
        modules[f"{base}.conv1"] = f"{new}.in_layers.2", (8, 8, 3, 3)
        if not block:
            modules[f"{base}.conv_shortcut"] = f"{new}.skip_connection", (8, 8, 1, 1)
    for name, (new, shape) in modules.items():
        ours |= {f"{name}.weight": normal(*shape), f"{name}.bias": normal(shape[0])}
        theirs |= {f"{new}.{leaf}": ours[f"{name}.{leaf}"] for leaf in ("weight", "bias")}
    return ours, theirs


@pytest.mark.parametrize("names", [None, "auto"])
def test_blocks_may_be_numbered_in_another_way(names: Any) -> None:
    ours, theirs = numbered_otherwise()
    rounded = {name: values.astype(np.float16) for name, values in theirs.items()}
    for b in (theirs, rounded):
        table = explained(ours, b, names=names)
        assert table.query("outcome != 'explained'").empty, table.explanation.to_dict()
    # Exchanged in one block.
    first, second = (f"output_blocks.4.0.in_layers.{n}.bias" for n in (0, 2))
    exchanged = theirs | {first: theirs[second], second: theirs[first]}
    table = explained(ours, exchanged, names=names)
    assert not table.query("outcome != 'explained'").empty


def autoencoder() -> Sides:
    """Return the autoencoder of Stable Diffusion; its single files count decoders backwards."""
    normal = random_of(6)
    modules = {
        **{f"{side}.{name}": f"{side}.{name}" for side in ("encoder", "decoder")
           for name in ("conv_in", "conv_out")},
        **{f"{side}.conv_norm_out": f"{side}.norm_out" for side in ("encoder", "decoder")},
    }  # fmt: skip
    for side in ("encoder", "decoder"):
        for n in range(2):
            for name in ("norm1", "conv1", "norm2", "conv2"):
                old, new = f"{side}.mid_block.resnets.{n}", f"{side}.mid.block_{n + 1}"
                modules[f"{old}.{name}"] = f"{new}.{name}"
    for stage, block in ((stage, block) for stage in range(4) for block in range(2)):
        for name in ("norm1", "conv1", "norm2", "conv2"):
            down, up = f"encoder.down_blocks.{stage}", f"decoder.up_blocks.{stage}"
            modules[f"{down}.resnets.{block}.{name}"] = f"encoder.down.{stage}.block.{block}.{name}"
            modules[f"{up}.resnets.{block}.{name}"] = f"decoder.up.{3 - stage}.block.{block}.{name}"
    ours: Tensors = {}
    theirs: Tensors = {}
    for name, new in modules.items():
        shape = (8,) if "norm" in name else (8, 8, 3, 3)
        ours |= {f"{name}.weight": normal(*shape), f"{name}.bias": normal(8)}
        for leaf in ("weight", "bias"):
            theirs[f"first_stage_model.{new}.{leaf}"] = ours[f"{name}.{leaf}"]
    return ours, theirs


@pytest.mark.parametrize("is_turned", [False, True])
def test_stages_may_be_counted_backwards(is_turned: bool) -> None:
    ours, theirs = autoencoder()
    for names in (None, "auto"):
        table = explained(*((theirs, ours) if is_turned else (ours, theirs)), names=names)
        assert set(table.outcome) == {"explained"}, table.explanation.to_dict()
    # An encoder does not.
    first, second = (f"first_stage_model.encoder.down.{n}.block.0.conv1.weight" for n in (1, 2))
    table = explained(ours, theirs | {first: theirs[second], second: theirs[first]})
    assert table.outcome[first] == table.outcome[second] == "changed"


# --- modulations ----------------------------------------------------------------------------------


def flux(single_blocks: int = 3) -> Sides:
    """Return a Flux of one file, and as diffusers stores it, with scales before shifts at last."""
    width = 32
    pairs: dict[str, tuple[str, tuple[int, ...]]] = {
        "img_in": ("x_embedder", (width, 16)),
        "txt_in": ("context_embedder", (width, 24)),
        "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1", (width, 20)),
        "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2", (width, width)),
        "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1", (width, 12)),
        "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2", (width, width)),
        "final_layer.linear": ("proj_out", (16, width)),
        "final_layer.adaLN_modulation.1": ("norm_out.linear", (2 * width, width)),
    }
    for layer in range(2):
        old, new = f"double_blocks.{layer}", f"transformer_blocks.{layer}"
        pairs |= {
            f"{old}.img_mod.lin": (f"{new}.norm1.linear", (6 * width, width)),
            f"{old}.txt_mod.lin": (f"{new}.norm1_context.linear", (6 * width, width)),
            f"{old}.img_attn.proj": (f"{new}.attn.to_out.0", (width, width)),
            f"{old}.img_mlp.0": (f"{new}.ff.net.0.proj", (4 * width, width)),
            f"{old}.img_mlp.2": (f"{new}.ff.net.2", (width, 4 * width)),
        }
    fused = {}
    for layer in range(single_blocks):
        base = f"single_transformer_blocks.{layer}"
        names = [f"{base}.attn.to_{role}" for role in "qkv"]
        fused[f"single_blocks.{layer}.linear1"] = [*names, f"{base}.proj_mlp"]
    for layer in range(2):
        names = [f"transformer_blocks.{layer}.attn.to_{role}" for role in "qkv"]
        fused[f"double_blocks.{layer}.img_attn.qkv"] = names
    return modulated(pairs, fused, width)


def stable_diffusion_3() -> Sides:
    """Return a Stable Diffusion 3 of one file, and as diffusers stores it."""
    width, layers = 32, 3
    pairs: dict[str, tuple[str, tuple[int, ...]]] = {
        "x_embedder.proj": ("pos_embed.proj", (width, 4, 2, 2)),
        "context_embedder": ("context_embedder", (width, 24)),
        "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1", (width, 20)),
        "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2", (width, width)),
        "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1", (width, 12)),
        "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2", (width, width)),
        "final_layer.linear": ("proj_out", (16, width)),
        "final_layer.adaLN_modulation.1": ("norm_out.linear", (2 * width, width)),
    }
    fused = {}
    for layer in range(layers):
        old, new = f"joint_blocks.{layer}", f"transformer_blocks.{layer}"
        parts = 2 if layer == layers - 1 else 6
        pairs |= {
            f"{old}.x_block.adaLN_modulation.1": (f"{new}.norm1.linear", (6 * width, width)),
            f"{old}.context_block.adaLN_modulation.1": (
                f"{new}.norm1_context.linear",
                (parts * width, width),
            ),
            f"{old}.x_block.attn.proj": (f"{new}.attn.to_out.0", (width, width)),
            f"{old}.x_block.mlp.fc1": (f"{new}.ff.net.0.proj", (4 * width, width)),
            f"{old}.x_block.mlp.fc2": (f"{new}.ff.net.2", (width, 4 * width)),
        }
        fused[f"{old}.x_block.attn.qkv"] = [f"{new}.attn.to_{role}" for role in "qkv"]
    ours, theirs = modulated(pairs, fused, width)
    ours["pos_embed"] = theirs["pos_embed.pos_embed"] = random_of(8)(1, 9, width)
    return ours, theirs


def modulated(
    pairs: dict[str, tuple[str, tuple[int, ...]]], fused: dict[str, list[str]], width: int
) -> Sides:
    """Return two models, of which the second has scales before shifts if there are no gates."""
    normal = random_of(7)
    ours: Tensors = {}
    theirs: Tensors = {}
    for name, (other, shape) in pairs.items():
        is_exchanged = "adaLN" in name and shape[0] == 2 * width
        for param, extents in (("weight", shape), ("bias", shape[:1])):
            values = ours[f"{name}.{param}"] = normal(*extents)
            theirs[f"{other}.{param}"] = np.roll(values, width, 0) if is_exchanged else values
    for name, members in fused.items():
        for param, extents in (("weight", (width, width)), ("bias", (width,))):
            rows = [4 * width if "mlp" in member else width for member in members]
            parts = [normal(n, *extents[1:]) for n in rows]
            ours[f"{name}.{param}"] = np.concatenate(parts)
            theirs |= {f"{n}.{param}": x for n, x in zip(members, parts, strict=True)}
    return ours, theirs


@pytest.mark.parametrize("names", [None, "auto"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_the_last_modulation_of_flux_exchanges_its_halves(is_turned: bool, names: Any) -> None:
    ours, theirs = flux()
    table = explained(*((theirs, ours) if is_turned else (ours, theirs)), names=names)
    assert set(table.outcome) == {"explained"}, table.explanation.to_dict()
    assert table.cause.str.contains("regrouped").sum() == (2 if names else 4)
    for param in ("weight", "bias"):
        new, old = f"norm_out.linear.{param}", f"final_layer.adaLN_modulation.1.{param}"
        damaged = theirs[new].copy()
        damaged[[3, 4]] = damaged[[4, 3]]
        for values in (ours[old], damaged):  # not exchanged, and two rows
            pair = (theirs | {new: values}, ours) if is_turned else (ours, theirs | {new: values})
            table = explained(*pair, names=names)
            wrong = set(table.index[table.outcome != "explained"])
            assert wrong >= ({new, old} if names is None else {new if is_turned else old})
            assert all("norm_out" in name or "adaLN" in name for name in wrong)


@pytest.mark.parametrize("is_turned", [False, True])
def test_the_last_modulation_of_the_context_exchanges_its_halves(is_turned: bool) -> None:
    ours, theirs = stable_diffusion_3()
    table = explained(*((theirs, ours) if is_turned else (ours, theirs)))
    assert set(table.outcome) == {"explained"}, table.explanation.to_dict()
    name = "transformer_blocks.2.norm1_context.linear.weight"
    theirs[name] = ours["joint_blocks.2.context_block.adaLN_modulation.1.weight"]
    table = explained(*((theirs, ours) if is_turned else (ours, theirs)))
    assert table.outcome[name] != "explained"


@pytest.mark.parametrize("is_turned", [False, True])
def test_the_only_single_block_of_flux_joins_its_projections(is_turned: bool) -> None:
    ours, theirs = flux(single_blocks=1)
    table = explained(*((theirs, ours) if is_turned else (ours, theirs)))
    assert set(table.outcome) == {"explained"}, table.explanation.to_dict()
