"""Faults that resemble conversions are named, and never called explained."""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.formats.onnx_files import initializer, model, node
from tests.stats.causes import BF16, rope
from tests.stats.checkpoints import write
from xckpt.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]
Sides = tuple[Tensors, Tensors]
F32 = np.float32
HEADS = 4
_SPELLINGS = (
    ("model.embed_tokens", "token_embd"),
    ("model.layers.", "blk."),
    *((f"self_attn.{role}_proj", f"attn_{role}") for role in "qkv"),
    *((f"mlp.{role}_proj", f"ffn_{role}") for role in ("gate", "up", "down")),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("model.norm", "output_norm"),
)
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


def llama(layers: int = 3, centre: float = 1.0) -> Tensors:
    """Return a tiny model."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (40, 256), "model.norm": (256,)}
    for layer in range(layers):
        base = f"model.layers.{layer}"
        shapes |= {f"{base}.self_attn.{role}_proj": (32, 256) for role in "qkv"}
        shapes |= {f"{base}.mlp.{role}_proj": (48, 256) for role in ("gate", "up", "down")}
        shapes |= {f"{base}.{n}_layernorm": (256,) for n in ("input", "post_attention")}
    return {
        f"{name}.weight": (
            (centre if "norm" in name else 0) + 0.05 * rng.standard_normal(shape)
        ).astype(F32)
        for name, shape in shapes.items()
    }


def in_gguf(tensors: Tensors) -> Tensors:
    """Return the model with the names and the order of rows that GGUF has."""
    converted = {}
    for name, values in tensors.items():
        new = name
        for old, spelling in _SPELLINGS:
            new = new.replace(old, spelling)
        is_turned = "q_proj" in name or "k_proj" in name
        converted[new] = rope(values, HEADS) if is_turned else values
    return converted


def explained(a: Any, b: Any, **options: Any) -> dict[str, str]:
    """Return the outcomes of a comparison."""
    result = xckpt.compare(a, b, explain=True, cache=False, progress=False, **options)
    outcomes: dict[str, str] = xckpt.table(result)["outcome"].to_dict()
    return outcomes


def differing(a: Any, b: Any) -> set[str]:
    """Return the names of the tensors that a comparison does not explain."""
    return {name for name, outcome in explained(a, b).items() if outcome != "explained"}


def exchanged(tensors: Tensors, first: str, second: str) -> Tensors:
    """Return a model with the names of two roles or layers exchanged."""
    return {
        name.replace(first, "*").replace(second, first).replace("*", second): values
        for name, values in tensors.items()
    }


def replaced(values: Callable[[Array], Array], name: str = UP) -> Callable[[Tensors], Tensors]:
    """Return a conversion to bfloat16 that does something else to a tensor."""

    def convert(tensors: Tensors) -> Tensors:
        changed = {key: tensor.astype(BF16) for key, tensor in tensors.items()}
        return changed | {name: values(tensors[name].copy())}

    return convert


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).view(np.uint32)


def _rounded_at_random(bits: Array) -> Array:
    noise = np.random.default_rng(0).integers(1 << 16, size=bits.shape, dtype=np.uint32)
    return ((bits + noise) & 0xFFFF0000).view(F32).astype(BF16)


def _with(values: Array, place: Any, new: Any) -> Array:
    values[place] = new
    return values.astype(BF16)


_WRONG_CONVERSIONS: dict[str, Callable[[Tensors], Tensors]] = {
    "truncated": replaced(lambda x: (_bits(x) & 0xFFFF0000).view(F32).astype(BF16)),
    "rounded at random": replaced(lambda x: _rounded_at_random(_bits(x))),
    "one unit in the last place": replaced(
        lambda x: (x.astype(BF16).view(np.uint16) ^ np.eye(*x.shape, dtype=np.uint16)).view(BF16)
    ),
    "a NaN": replaced(lambda x: _with(x, (3, 5), np.nan)),
    "two rows": replaced(lambda x: x[[1, 0, *range(2, len(x))]].astype(BF16)),
    "a row twice": replaced(lambda x: _with(x, 4, x[5])),
    "zeros": replaced(lambda x: _with(x, (7, slice(0, 64)), 0)),
    "signs": replaced(lambda x: (-x).astype(BF16)),
    "two elements of a norm": replaced(lambda x: x[[1, 0, *range(2, len(x))]].astype(BF16), NORM),
    "a norm with 1 added": replaced(lambda x: (x + F32(1)).astype(BF16), NORM),
    "bytes": replaced(lambda x: x.astype(BF16).view(np.uint16).byteswap().view(BF16)),
    "another shape": replaced(lambda x: x.reshape(64, 192).astype(BF16)),
}


@pytest.mark.parametrize("fault", _WRONG_CONVERSIONS)
def test_only_a_wrongly_converted_tensor_differs(fault: str) -> None:
    ours = llama(layers=2)
    outcomes = explained(ours, _WRONG_CONVERSIONS[fault](ours))
    assert {name for name, outcome in outcomes.items() if outcome != "explained"} == {
        NORM if "norm" in fault else UP
    }


class TestExchangedNames:
    """Numbers that are all there, under each other's names."""

    @pytest.mark.parametrize("names", [None, "auto"])
    @pytest.mark.parametrize(
        "roles",
        [("attn_q", "attn_k"), ("ffn_gate", "ffn_up"), ("attn_norm", "ffn_norm"),
         (".1.", ".2."), (".0.", ".1.")],
    )  # fmt: skip
    def test_are_misplaced(self, roles: tuple[str, str], names: Any) -> None:
        pytest.importorskip("gguf")
        ours = llama()
        wrong = {a for a, b in zip(ours, in_gguf(ours), strict=True)
                 if any(role in b for role in roles)}  # fmt: skip
        outcomes = explained(ours, exchanged(in_gguf(ours), *roles), names=names)
        assert {n for n in ours if outcomes[n] != "explained"} == wrong

    @pytest.mark.parametrize("layers", [2, 3])
    def test_are_misplaced_with_a_prefix(self, layers: int) -> None:
        ours = llama(layers)
        theirs = {f"module.{n}": x for n, x in exchanged(ours, ".0.", ".1.").items()}
        outcomes = explained(ours, theirs)
        wrong = {n for n, outcome in outcomes.items() if outcome != "explained"}
        assert wrong == {n for n in outcomes if re.search(r"layers\.[01]\.", n)}

    @pytest.mark.parametrize(("copied", "damaged"), [(2, 0), (0, 2), (1, 3)])
    def test_of_equal_parts_the_damaged_one_is_named(self, copied: int, damaged: int) -> None:
        ours = llama()
        theirs: dict[str, Array] = {}
        for name, values in ours.items():
            parts = np.split(values, 4) if "q_proj" in name else [values]
            for rank, part in enumerate(parts):
                theirs[name.replace("q_proj", f"rank{rank}.q_proj")] = part
        name = "model.layers.1.self_attn.rank{}.q_proj.weight"
        theirs[name.format(damaged)] = theirs[name.format(copied)]
        outcomes = explained(ours, theirs)
        wrong = {n for n, outcome in outcomes.items() if outcome != "explained"}
        assert wrong == {name.format(damaged), "model.layers.1.self_attn.q_proj.weight"}

    @pytest.mark.parametrize("names", [None, "auto"])
    @pytest.mark.parametrize("side", ["a", "b"])
    @pytest.mark.parametrize("dtype", [F32, BF16])
    def test_a_copied_layer_is_named(self, names: Any, side: str, dtype: Any) -> None:
        ours = llama(4)
        copied = {n: ours[n.replace("layers.1.", "layers.3.")].astype(dtype) for n in ours}
        sides = (copied, ours) if side == "a" else (ours, copied)
        table = xckpt.table(xckpt.compare(*sides, explain=True, cache=False, names=names))
        wrong = table[table["outcome"] != "explained"]
        assert set(wrong.index) == {n for n in ours if "layers.1." in n}
        assert set(wrong["cause"]) == {"misplaced"}
        for name, text in wrong["explanation"].items():
            owner = str(name).replace("layers.1.", "layers.3.")
            assert text.startswith(f"its numbers are those of {owner!r} of ")

    def test_are_correct_with_layers_counted_from_1(self) -> None:
        ours = llama()
        theirs = {
            f"x.{re.sub('[012](?=[.])', lambda number: str(int(number[0]) + 1), n)}": values
            for n, values in ours.items()
        }
        assert set(explained(ours, theirs).values()) == {"explained"}


class TestConstants:
    """Fit any type and any quantiser."""

    @pytest.mark.parametrize("value", [0.0, 1.0])
    @pytest.mark.parametrize("difference", [1e-40, 1e-6, 1e-3])
    def test_with_one_different_element_are_changed(self, value: float, difference: float) -> None:
        ours = {"norm": np.full(64, value, F32)}
        theirs = {"norm": ours["norm"].copy()}
        theirs["norm"][5] += F32(difference) if difference > 1e-7 or not value else F32(2**-22)
        assert explained(ours, theirs) == {"norm": "changed"}
        assert explained(theirs, ours) == {"norm": "changed"}

    def test_are_explained_by_their_stored_type(self) -> None:
        ours = {"norm": 1 + F32(1e-4) * np.arange(8, dtype=F32)}
        assert explained(ours, {"norm": np.ones(8, BF16)}) == {"norm": "explained"}

    @pytest.mark.parametrize("names", [None, "auto"])
    @pytest.mark.parametrize("is_systematic", [True, False])
    def test_constants_of_a_weight_and_a_bias_are_not_exchanged(
        self, names: Any, is_systematic: bool
    ) -> None:
        ours: Tensors = {}
        for layer in range(3):
            ours[f"h.{layer}.ln.weight"] = np.ones(16, F32)
            ours[f"h.{layer}.ln.bias"] = np.zeros(16, F32)
            ours[f"h.{layer}.fc.weight"] = np.random.default_rng(layer).random((16, 8), F32)
        theirs = {name.replace("h.", "x.").replace("ln", "norm"): x for name, x in ours.items()}
        layers = range(3) if is_systematic else [1]
        for layer in layers:
            weight, bias = f"x.{layer}.norm.weight", f"x.{layer}.norm.bias"
            theirs[weight], theirs[bias] = theirs[bias], theirs[weight]
        outcomes = explained(ours, theirs, names=names)
        wrong = {f"h.{layer}.ln.{leaf}" for layer in layers for leaf in ("weight", "bias")}
        assert {name for name in ours if outcomes[name] != "explained"} == wrong

    def test_constants_of_one_number_are_changed(self) -> None:
        assert explained({"scale": np.array(2.97, F32)}, {"scale": np.array(3, F32)}) == {
            "scale": "changed"
        }


@pytest.mark.parametrize(("direction", "outcome"), [(1, "explained"), (-1, "changed")])
def test_an_offset_is_known_in_one_direction_only(
    direction: int, outcome: str, tmp_path: Path
) -> None:
    gguf: Any = pytest.importorskip("gguf")
    ours = llama(layers=1, centre=0.0)
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "gemma")
    for name, values in in_gguf(ours).items():
        writer.add_tensor(name, values + F32(direction) if "norm" in name else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    outcomes = explained(ours, tmp_path / "b.gguf")
    assert {outcomes[name] for name in ours if "norm" in name} == {outcome}
    back = explained(tmp_path / "b.gguf", ours)
    assert {back[name] for name in back if "norm" in name} == {outcome}


def test_equal_elements_without_the_offset_of_their_siblings_differ(tmp_path: Path) -> None:
    gguf: Any = pytest.importorskip("gguf")
    ours = {
        name: np.zeros_like(x) if "input_layernorm" in name else x
        for name, x in llama(layers=6, centre=0.0).items()
    }
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "gemma")
    for name, values in in_gguf(ours).items():
        is_moved = "norm" in name and name != "blk.4.attn_norm.weight"
        writer.add_tensor(name, values + F32(1) if is_moved else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    outcomes = explained(ours, tmp_path / "b.gguf")
    norms = {name for name in ours if "norm" in name and outcomes[name] != "explained"}
    assert norms == {"model.layers.4.input_layernorm.weight"}


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("name", ["blk.1.attn_norm.weight", "output_norm.weight"])
def test_one_norm_without_the_offset_of_the_others_differs(
    name: str, layers: int, is_turned: bool, tmp_path: Path
) -> None:
    gguf: Any = pytest.importorskip("gguf")
    ours = llama(layers=layers, centre=0.0)
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "gemma")
    for other, values in in_gguf(ours).items():
        is_moved = "norm" in other and other != name
        writer.add_tensor(other, values + F32(1) if is_moved else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    sides = ours, tmp_path / "b.gguf"
    norms = {n for n in differing(*(sides[::-1] if is_turned else sides)) if "norm" in n}
    spelled = {"blk.1.attn_norm.weight": NORM, "output_norm.weight": "model.norm.weight"}
    assert norms == {name, spelled[name]}


@pytest.mark.parametrize(("heads", "outcome"), [(HEADS, "explained"), (HEADS // 2, "changed")])
def test_rows_are_permuted_for_the_stated_heads(heads: int, outcome: str, tmp_path: Path) -> None:
    gguf: Any = pytest.importorskip("gguf")
    ours = llama(layers=2)
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    for name, values in in_gguf(ours).items():
        is_turned = "attn_q" in name or "attn_k" in name
        source = ours[name.replace("blk", "model.layers").replace("attn_", "self_attn.")
                      .replace(".weight", "_proj.weight")] if is_turned else values  # fmt: skip
        writer.add_tensor(name, rope(source, heads) if is_turned else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    outcomes = explained(ours, tmp_path / "b.gguf")
    turned = {outcomes[name] for name in ours if "q_proj" in name or "k_proj" in name}
    assert turned <= ({outcome} if heads == HEADS else {"changed", "unmatched"})
    assert {outcomes[name] for name in ours if "mlp" in name} == {"explained"}


@pytest.mark.parametrize("centre", [0.2, 1.0])
def test_an_offset_of_norms_is_not_known_for_other_architectures(centre: float) -> None:
    ours = llama(layers=1, centre=centre)
    theirs = {name: x + F32(1) if "norm" in name else x for name, x in ours.items()}
    outcomes = explained(ours, theirs)
    assert {outcomes[name] for name in ours if "norm" in name} == {"changed"}


def test_parts_of_another_role_are_misplaced() -> None:
    rng = np.random.default_rng(0)
    ours = {f"attn.{role}_proj.weight": rng.standard_normal((16, 8)).astype(F32) for role in "kv"}
    parts = {f"attn.{role}_proj.part.{n}.weight": ours[f"attn.{role}_proj.weight"][8 * n:][:8]
             for role in "kv" for n in range(2)}  # fmt: skip
    assert set(explained(ours, parts).values()) == {"explained"}
    first, second = "attn.k_proj.part.1.weight", "attn.v_proj.part.0.weight"
    parts[first], parts[second] = parts[second], parts[first]
    assert "explained" not in explained(ours, parts).values()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_all_views_agree(
    is_damaged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = llama(layers=1)
    theirs = in_gguf(ours)
    if is_damaged:
        theirs["blk.0.ffn_up.weight"] = theirs["blk.0.ffn_up.weight"][::-1]
    paths = [
        write(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate((ours, theirs))
    ]
    result = xckpt.compare(*paths, explain=True, cache=False)
    table = xckpt.table(result)
    is_explained = table["outcome"] == "explained"
    assert is_explained.all() == (not is_damaged)
    assert table["verified"].equals(is_explained)
    assert table.query("cause == 'unknown' or not verified").equals(table[~is_explained])
    sentence = result.attrs["explanation"]
    beginning = f"1 of {len(ours)} tensors differs" if is_damaged else f"all {len(ours)} tensors"
    assert sentence.startswith(beginning)
    assert main(["compare", *map(str, paths), "--explain", "--no-cache"]) == is_damaged
    assert beginning in capsys.readouterr().out
    assert beginning in repr(result.ckpt)
    xckpt.report(paths[0], tmp_path / "r.md", paths[1], cache=False)
    assert beginning in (tmp_path / "r.md").read_text("utf-8")


def test_parts_named_for_another_tensor_are_misplaced() -> None:
    rng = np.random.default_rng(0)
    ours = {f"{role}.weight": rng.standard_normal((32, 8)).astype(F32) for role in "uvxy"}
    theirs: Tensors = {f"module.{role}.weight": ours[f"{role}.weight"] for role in "uv"}
    theirs["module.x.weight"] = ours["y.weight"]
    theirs |= {f"y.part.{n}.weight": ours["x.weight"][16 * n :][:16] for n in range(2)}
    outcomes = explained(ours, theirs)
    wrong = {name for name, outcome in outcomes.items() if outcome != "explained"}
    assert wrong == {n for n in outcomes if "x" in n or "y" in n}


def test_constant_parts_are_fused_like_siblings_of_another_size() -> None:
    rng = np.random.default_rng(0)
    ours: Tensors = {f"h.0.{role}.weight": rng.standard_normal((32, 8)).astype(F32)
                     for role in "qkv"}  # fmt: skip
    ours |= {f"h.1.{role}.weight": np.zeros((35, 8), F32) for role in "qkv"}
    turned = [rope(ours["h.0.q.weight"], 1), ours["h.0.k.weight"], ours["h.0.v.weight"]]
    theirs = {"h.0.qkv.weight": np.concatenate(turned), "h.1.qkv.weight": np.zeros((105, 8), F32)}
    assert set(explained(ours, theirs).values()) == {"explained"}


def test_the_command_line_lists_exceptions_first_and_each_pair_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ours = llama(6)
    theirs = in_gguf(ours)
    theirs["blk.3.ffn_up.weight"] = theirs["blk.3.ffn_up.weight"][::-1]
    theirs["blk.5.attn_v.weight"] = theirs["blk.5.attn_v.weight"] * F32(2)
    paths = [
        write(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate((ours, theirs))
    ]
    assert main(["compare", *map(str, paths), "--explain", "--no-cache"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("2 of 50 tensors differ: 'model.layers.3.mlp.up_proj.weight' ('blk.")
    assert [line.split()[0] for line in lines[2:4]] == [
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.5.self_attn.v_proj.weight",
    ]
    assert len(lines) == 15
    assert "model.layers.{0..2,4,5}.mlp.up_proj.weight -> blk.{0..2,4,5}.ffn_up.weight" in out
    assert err == "xckpt: 50 tensors: 2 changed, 48 explained\n"


@pytest.mark.parametrize("stem", ["fused", "layers.3", "layers.3.attn"])
@pytest.mark.parametrize("order", ["qkv", "qvk", "kqv"])
def test_joined_parts_whose_last_word_is_their_role(stem: str, order: str) -> None:
    rng = np.random.default_rng(0)
    rows = {"q": 64, "k": 32, "v": 32}
    parts = {f"{stem}.{role}": rng.standard_normal((rows[role], 128)) for role in order}
    joined = {stem: np.concatenate(list(parts.values()))}
    table = xckpt.compare(parts, joined, explain=True, progress=False).ckpt.table()
    is_usual = order == "qkv"
    assert set(table["outcome"]) == {"explained" if is_usual else "changed"}
    assert set(table["cause"]) == {"fused" if is_usual else "misplaced+fused"}


class TestRounding:
    """Moves real numbers, by an amount that follows from them."""

    def numbers(self, dtype: Any = F32) -> Array:
        values = 0.02 * np.random.default_rng(0).standard_normal((64, 64))
        values[:4] *= 2e-4  # which float16 has with fewer digits
        return values.astype(dtype)

    @pytest.mark.parametrize("container", [np.float16, F32])
    def test_bfloat16_as_float16_loses_the_smallest_numbers(self, container: Any) -> None:
        ours = {"w": self.numbers(BF16)}
        theirs = {"w": ours["w"].astype(F32).astype(np.float16).astype(container)}
        assert 0 < np.count_nonzero(ours["w"].astype(F32) != theirs["w"].astype(F32)) < 256
        assert explained(ours, theirs) == {"w": "explained"}
        theirs["w"][40, 3] = np.nextafter(theirs["w"][40, 3], container(1))
        assert explained(ours, theirs) == {"w": "changed"}

    @pytest.mark.parametrize("share", [0.01, 0.25, 1.0])
    @pytest.mark.parametrize("size", ["last digits", "noise"])
    def test_small_differences_from_a_grid_are_no_rounding(self, share: float, size: str) -> None:
        rng = np.random.default_rng(1)
        ours = {"w": self.numbers(BF16)}
        exact = ours["w"].astype(F32)
        chosen = rng.random(exact.shape) < share
        bits = exact.view(np.uint32) ^ rng.integers(4, size=exact.shape, dtype=np.uint32)
        noisy = exact * F32(1 + 1e-5) if size == "noise" else bits.view(F32)
        theirs = {"w": np.where(chosen, noisy, exact)}
        assert explained(ours, theirs) == {"w": "changed"}
        assert explained(theirs, ours) == {"w": "changed"}

    @pytest.mark.parametrize("is_stack", [False, True])
    @pytest.mark.parametrize("count", [1, 3])
    def test_of_the_parts_of_a_tensor_is_one(self, count: int, is_stack: bool) -> None:
        rng = np.random.default_rng(0)
        names = [f"layers.0.{part}.weight" for part in ("q_proj", "k_proj", "v_proj")]
        names = [f"experts.{n}.w.weight" for n in range(3)] if is_stack else names
        ours = {name: rng.standard_normal((16, 24)).astype(F32) for name in names}
        rounded = [x.astype(BF16).astype(F32) for x in ours.values()]
        parts = [*rounded[:count], *[*ours.values()][count:]]
        combined = np.stack(parts) if is_stack else np.concatenate(parts)
        whole = "experts.w.weight" if is_stack else "layers.0.qkv.weight"
        outcomes = explained(ours, {whole: combined})
        wrong = {name for name, outcome in outcomes.items() if outcome != "explained"}
        assert wrong == ({names[0], whole} if count == 1 else set())

    def test_to_fewer_exponents_changes_the_smallest_numbers_of_some_parts(self) -> None:
        rng = np.random.default_rng(0)
        ours = {f"experts.{n}.w.weight": rng.standard_normal((32, 24)) for n in range(4)}
        ours = {name: x.astype(BF16).astype(F32) for name, x in ours.items()}
        for name in [*ours][:2]:
            ours[name][3, 5] = F32(2.0**-24 * 1.5)  # between two numbers of float16
        theirs = {"experts.w.weight": np.stack([*ours.values()]).astype(np.float16).astype(F32)}
        assert set(explained(ours, theirs).values()) == {"explained"}

    def test_one_zero_is_no_second_quantiser(self) -> None:
        quants: Any = pytest.importorskip("gguf.quants")
        gguf: Any = pytest.importorskip("gguf")
        ours = {"w": self.numbers()}
        made = {"w": ours["w"].copy()}
        made["w"][7, 9] = 0
        for name in ("Q4_0", "Q5_0", "Q8_0"):
            kind = gguf.GGMLQuantizationType[name]
            right, wrong = (
                {"w": quants.dequantize(quants.quantize(x["w"], kind), kind)} for x in (ours, made)
            )
            assert explained(ours, right) == {"w": "explained"}
            assert explained(ours, wrong) == {"w": "changed"}


class TestSiblings:
    """Are changed by a conversion in the same way."""

    LAYERS = 5

    def normal(self) -> Callable[..., Array]:
        rng = np.random.default_rng(0)
        return lambda *shape: rng.standard_normal(shape).astype(F32)

    def wrong(self, ours: Tensors, theirs: Tensors) -> set[str]:
        return differing(ours, theirs)

    def projections(self) -> Tensors:
        normal = self.normal()
        return {
            f"model.layers.{n}.self_attn.{role}_proj.weight": normal(32, 24)
            for n in range(self.LAYERS)
            for role in "qkv"
        }

    def fused(self, ours: Tensors, ungrouped: set[int], name: str) -> Tensors:
        theirs = {}
        for n in range(self.LAYERS):
            three = [ours[f"model.layers.{n}.self_attn.{role}_proj.weight"] for role in "qkv"]
            groups = 1 if n in ungrouped else 4
            rows = [x.reshape(groups, -1, 24) for x in three]
            theirs[name.format(n)] = np.concatenate(rows, axis=1).reshape(96, 24)
        return theirs

    @pytest.mark.parametrize("ungrouped", [(), (2,)])
    def test_have_one_order_of_fused_heads(self, ungrouped: tuple[int, ...]) -> None:
        ours = self.projections()
        name = "decoder.layers.{}.self_attention.linear_qkv.weight"
        wrong = self.wrong(ours, self.fused(ours, {*ungrouped}, name))
        parts = {n for n in ours if any(f".{layer}." in n for layer in ungrouped)}
        assert wrong == parts | {name.format(layer) for layer in ungrouped}

    def test_of_an_unknown_layout_outweigh_one_that_fits(self) -> None:
        ours = self.projections()
        theirs = self.fused(ours, {2}, "transformer.h.{}.attn.attn.weight")
        for name in [n for n in theirs if ".2." not in n]:
            theirs[name] = theirs[name][np.random.default_rng(1).permutation(96)]
        assert self.wrong(ours, theirs) == {*ours, *theirs}

    def test_in_an_unknown_order_outweigh_one_in_order(self) -> None:
        normal = self.normal()
        ours = {f"h.{n}.mixed.{p}": normal(96, *[24] * (p == "weight"))
                for n in range(self.LAYERS) for p in ("weight", "bias")}  # fmt: skip
        order = np.random.default_rng(1).permutation(96)
        theirs = {n.replace("mixed", "all"): x[order] for n, x in ours.items()}
        theirs["h.3.all.bias"] = ours["h.3.mixed.bias"]
        assert self.wrong(ours, theirs) == {*ours, *theirs}

    def test_of_an_order_that_holds_for_most_rows_outweigh_one_in_order(self) -> None:
        normal, order = self.normal(), np.random.default_rng(1).permutation(96)
        ours = {f"h.{n}.mixed.weight": normal(96, 24) for n in range(self.LAYERS)}
        for n in (0, 1, 3):  # sums of rows do not show the order of the first two
            ours[f"h.{n}.mixed.weight"][1] = ours[f"h.{n}.mixed.weight"][0, ::-1]
        theirs = {n.replace("mixed", "all"): x[order] for n, x in ours.items()}
        theirs["h.4.all.weight"] = ours["h.4.mixed.weight"]
        assert self.wrong(ours, theirs) == {*ours, *theirs}

    def test_are_regrouped_for_as_many_heads(self) -> None:
        normal = self.normal()
        ours, theirs = {}, {}
        for n in range(self.LAYERS):
            values = normal(96, 32)
            heads = 8 if n == 2 else 4
            ours[f"transformer.h.{n}.self_attention.query_key_value.weight"] = values
            rows = values.reshape(heads, 3, -1, 32).swapaxes(0, 1).reshape(96, 32)
            theirs[f"transformer.h.{n}.attn.qkv.weight"] = rows
        assert self.wrong(ours, theirs) == {n for n in (*ours, *theirs) if ".2." in n}

    @pytest.mark.parametrize("turned", ["q", "v"])
    def test_have_parts_that_are_turned_alike(self, turned: str) -> None:
        rng = np.random.default_rng(1)
        ours = {
            f"layers.{n}.{role}_proj.weight": rng.standard_normal((16, 16)).astype(F32)
            for n in range(4)
            for role in "qkv"
        }
        theirs = {}
        for n in range(4):
            parts = {role: ours[f"layers.{n}.{role}_proj.weight"] for role in "qkv"}
            parts[turned] = parts[turned].T if n == 2 else parts[turned]
            theirs[f"layers.{n}.qkv.weight"] = np.concatenate(list(parts.values()))
        outcomes = explained(ours, theirs)
        wrong = {name for name, outcome in outcomes.items() if outcome != "explained"}
        assert wrong == {f"layers.2.{turned}_proj.weight", "layers.2.qkv.weight"}

    @pytest.mark.parametrize("is_stack", [False, True])
    def test_are_joined_in_one_order_of_rows(self, is_stack: bool) -> None:
        ours = {n: x for n, x in self.projections().items() if "q_proj" in n}
        join: Any = np.stack if is_stack else np.concatenate
        name = "net.layers.self_attn.q_proj.weight"
        assert not self.wrong(ours, {name: join(list(ours.values()))})
        other = "model.layers.3.self_attn.q_proj.weight"
        rows = [rope(x, HEADS) if n == other else x for n, x in ours.items()]
        assert self.wrong(ours, {name: join(rows)}) == {name, other}

    @pytest.mark.parametrize("is_exchanged", [False, True])
    def test_convolutions_of_several_kinds(self, is_exchanged: bool) -> None:
        normal = self.normal()
        names = [f"down.{n}.{m}.weight" for n in range(3) for m in ("conv1", "conv2", "conv_out")]
        ours = {name: normal(8, 6, 3, 3) for name in names}
        theirs = {f"net.{n}": x.transpose(0, 2, 3, 1).copy() for n, x in ours.items()}
        if is_exchanged:
            theirs[f"net.{names[4]}"] = ours[names[4]].transpose(0, 3, 2, 1).copy()
        expected = {names[4], f"net.{names[4]}"} if is_exchanged else set()
        assert self.wrong(ours, theirs) == expected

    def test_kernels_show_how_a_square_matrix_should_be(self) -> None:
        normal = self.normal()
        ours = {f"conv.{n}.weight": normal(8, 4 + 2 * n, 3, 3) for n in range(4)}
        ours["head.weight"] = normal(16, 16)
        theirs = {n.replace(".", "/").replace("weight", "kernel"): x.T for n, x in ours.items()}
        kernels = {n: x.transpose(1, 0, *range(2, x.ndim)) for n, x in theirs.items()}
        assert not self.wrong(ours, kernels | {"head/kernel": theirs["head/kernel"]})
        assert self.wrong(ours, kernels) == {"head.weight", "head/kernel"}
        # Outputs come first in MLX, in kernels and matrices.
        mlx = {n: x.transpose(0, *range(2, x.ndim), 1) for n, x in ours.items()}
        mlx["head.weight"] = ours["head.weight"]
        assert not self.wrong(ours, {f"net.{name}": x for name, x in mlx.items()})

    def recurrent(self, *ends: str) -> Sides:
        normal = self.normal()
        names = dict(zip(("weight_ih", "weight_hh"), ends or ("vars/0", "vars/1"), strict=True))
        ours = {f"lstm.{m}_l{n}": normal(32, 8) for n in range(self.LAYERS) for m in names}
        theirs = {
            f"layers/lstm{f'_{n}' if n else ''}/cell/{k}": ours[f"lstm.{m}_l{n}"].T.copy()
            for n in range(self.LAYERS)
            for m, k in names.items()
        }
        return ours, theirs

    @pytest.mark.parametrize("is_exchanged", [False, True])
    @pytest.mark.parametrize("gates", ["ifgo", "rzn"])
    def test_have_gates_in_one_order(self, gates: str, is_exchanged: bool) -> None:
        normal = self.normal()
        ours: dict[str, Array] = {}
        theirs: dict[str, Array] = {}
        for n, kind in product(range(2), "ih"):
            kernels = {f"params/cell_{n}/{kind}{gate}/kernel": normal(24, 32) for gate in gates}
            parts = [values.T for values in kernels.values()]
            if is_exchanged and (n, kind) == (1, "h"):
                parts[:2] = parts[1::-1]
            ours[f"rnn.weight_{kind}h_l{n}"] = np.concatenate(parts)
            theirs |= kernels
        wrong = {"rnn.weight_hh_l1", *(name for name in theirs if "_1/h" in name)}
        assert self.wrong(ours, theirs) == (wrong if is_exchanged else set())

    @pytest.mark.parametrize("ends", [("vars/0", "vars/1"), ("kernel", "recurrent_kernel")])
    def test_have_one_name_or_number_at_the_end(self, ends: tuple[str, str]) -> None:
        ours, theirs = self.recurrent(*ends)
        assert not self.wrong(ours, theirs)
        pair = [f"layers/lstm_3/cell/{end}" for end in ends]
        theirs |= {pair[0]: theirs[pair[1]], pair[1]: theirs[pair[0]]}
        assert self.wrong(ours, theirs) == {*pair, "lstm.weight_ih_l3", "lstm.weight_hh_l3"}

    def test_with_a_number_in_a_word(self) -> None:
        ours = {f"cell.u_l{n}": self.normal()(32, 8) * F32(n + 1) for n in range(self.LAYERS)}
        theirs = {f"x/y_{n}/w": ours[f"cell.u_l{n}"].T.copy() for n in range(self.LAYERS)}
        assert not self.wrong(ours, theirs)
        theirs["x/y_2/w"] = ours["cell.u_l2"]
        assert self.wrong(ours, theirs) == {"cell.u_l2", "x/y_2/w"}

    def test_are_doubted_if_they_are_too_few_to_agree(self) -> None:
        normal = self.normal()
        ours = {f"x.{n}.self_attn.q_proj.weight": normal(32, 24) for n in range(2)}
        theirs = {name.replace("x.", "y."): rope(x, HEADS) for name, x in ours.items()}
        assert not self.wrong(ours, theirs)
        name = "x.1.self_attn.q_proj.weight"
        theirs[name.replace("x.", "y.")] = ours[name]
        assert self.wrong(ours, theirs) == {*ours, *theirs}

    def test_may_be_counted_from_another_number(self) -> None:
        normal = self.normal()
        ours = {f"down.{n}.resnets.{m}.conv.weight": normal(8, 8) for n in range(4) for m in "01"}
        theirs = {n.replace("resnets", "block"): x for n, x in ours.items()}
        for n in range(2):
            ours[f"middle.resnets.{n}.conv.weight"] = normal(8, 8)
            theirs[f"mid.block_{n + 1}.conv.weight"] = ours[f"middle.resnets.{n}.conv.weight"]
        assert not self.wrong(ours, theirs)
        pair = [f"mid.block_{n}.conv.weight" for n in (1, 2)]
        theirs |= {pair[0]: theirs[pair[1]], pair[1]: theirs[pair[0]]}
        expected = {*pair, *(n for n in ours if n.startswith("middle"))}
        assert self.wrong(ours, theirs) == expected
        assert self.wrong(theirs, ours) == expected


class TestModules:
    """Have a weight and a bias whose rows are in one order."""

    @pytest.mark.parametrize("kept", ["weight", "bias"])
    @pytest.mark.parametrize("other", ["{}.weight", "net.{}.w.weight"])
    def test_one_of_which_lost_it(self, other: str, kept: str) -> None:
        rng = np.random.default_rng(0)
        names = [f"{layer}.{param}" for layer in ("first", "last") for param in ("weight", "bias")]
        ours = {n: rng.standard_normal((32, 24) if "w" in n else 32).astype(F32) for n in names}
        theirs = {other.format(n.split(".")[0]).replace("weight", n.split(".")[1]): x
                  for n, x in ours.items()}  # fmt: skip
        changed = {"weight": "bias", "bias": "weight"}[kept]
        pair = [f"last.{changed}", other.format("last").replace("weight", changed)]
        theirs[pair[1]] = np.roll(ours[pair[0]], 16, axis=0)
        expected = {*pair, f"last.{kept}", other.format("last").replace("weight", kept)}
        assert differing(ours, theirs) == expected
        # Two rows are a damage of one of them.
        theirs[pair[1]] = ours[pair[0]][[1, 0, *range(2, 32)]]
        assert differing(ours, theirs) == {*pair}


class TestZeros:
    """Are no evidence of a part."""

    def test_in_a_stack_are_a_lost_part(self) -> None:
        rng = np.random.default_rng(0)
        ours = {f"mlp.experts.{n}.w1.weight": rng.random((16, 24), F32) for n in range(6)}
        stack = np.stack(list(ours.values()))
        assert set(explained(ours, {"mlp.w1": stack}).values()) == {"explained"}
        stack[3] = 0
        outcomes = explained(ours, {"mlp.w1": stack})
        assert outcomes["mlp.w1"] != "explained"
        assert outcomes["mlp.experts.3.w1.weight"] != "explained"

    @pytest.mark.parametrize("lost", [(1,), (2,), (1, 2)])
    def test_between_parts_are_a_lost_part(self, lost: tuple[int, ...]) -> None:
        rng = np.random.default_rng(0)
        parts = {f"x.{role}_proj.weight": rng.random((32, 24), F32) for role in "qkv"}
        rows = [np.zeros_like(x) if n in lost else x for n, x in enumerate(parts.values())]
        assert explained(parts, {"x.joint": np.concatenate(rows)})["x.joint"] != "explained"

    @pytest.mark.parametrize("dtype", [F32, np.float16])
    def test_are_not_what_a_tiny_number_is_rounded_to(self, dtype: Any) -> None:
        zeros = {f"layers.{n}.attn.q.bias": np.zeros(64, dtype) for n in range(4)}
        damaged = {name: x.astype(F32) for name, x in zeros.items()}
        damaged["layers.2.attn.q.bias"][5] = np.float32(1e-45)
        for pair in ((zeros, damaged), (damaged, zeros)):
            outcomes = explained(*pair)
            assert [n for n, o in outcomes.items() if o != "explained"] == ["layers.2.attn.q.bias"]


def test_vectors_are_stacked_as_matrices_are() -> None:
    rng = np.random.default_rng(0)
    shapes = {"self_attn.o_proj": (16, 24), "input_layernorm": (24,), "post_layernorm": (24,)}
    ours = {
        f"model.layers.{n}.{name}.weight": rng.standard_normal(shape).astype(F32)
        for n in range(5)
        for name, shape in shapes.items()
    }
    theirs = {
        f"model.layers.{name}.weight": np.stack([ours[f"model.layers.{n}.{name}.weight"]
                                                 for n in range(5)])
        for name in shapes
    }  # fmt: skip
    assert set(explained(ours, theirs).values()) == {"explained"}
    norms = "model.layers.input_layernorm.weight"
    theirs[norms] = theirs[norms][[0, 2, 1, 3, 4]]
    assert explained(ours, theirs)[norms] != "explained"


class TestRowsOfZeros:
    """Are damage, and many zeros are pruning."""

    @pytest.mark.parametrize("side", ["a", "b"])
    @pytest.mark.parametrize("dtype", [F32, BF16])
    def test_a_row_is_named(self, side: str, dtype: Any) -> None:
        values = np.random.default_rng(0).standard_normal((12, 64)).astype(F32)
        damaged = values.astype(dtype)
        damaged[7] = 0
        sides = ({"w": damaged}, {"w": values}) if side == "a" else ({"w": values}, {"w": damaged})
        row = xckpt.table(xckpt.compare(*sides, explain=True, cache=False)).loc["w"]
        assert (row["outcome"], row["cause"]) == ("changed", "unknown")
        assert row["explanation"].startswith(f"1 of 12 rows is zero in {side}, such as row 7; ")

    def test_half_of_the_rows_are_pruned(self) -> None:
        values = np.random.default_rng(0).standard_normal((12, 64)).astype(F32)
        pruned = values.copy()
        pruned[::2] = 0
        row = xckpt.table(xckpt.compare({"w": values}, {"w": pruned}, explain=True)).loc["w"]
        assert (row["outcome"], row["cause"]) == ("changed", "pruned")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_graph_shows_whether_a_square_matrix_is_transposed(
    is_damaged: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    shapes = {"up.weight": (24, 12), "square.weight": (24, 24), "head.weight": (5, 24)}
    ours = {n: rng.standard_normal(shape).astype(F32) for n, shape in shapes.items()}
    theirs = {name: np.ascontiguousarray(x.T) for name, x in ours.items()}
    if is_damaged:
        theirs["square.weight"] = ours["square.weight"]
    nodes = [node("MatMul", [f"x{n}", name], [f"x{n + 1}"]) for n, name in enumerate(shapes)]
    graph = model(*[initializer(n, x) for n, x in theirs.items()], nodes=tuple(nodes))
    (tmp_path / "b.onnx").write_bytes(graph)
    write(tmp_path / "a.safetensors", ours)
    paths = tmp_path / "a.safetensors", tmp_path / "b.onnx"
    for sides in (paths, paths[::-1]):
        assert differing(*sides) == ({"square.weight"} if is_damaged else set())
