"""Conditions under which a relation that holds for every element is an explanation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.stats.causes import BF16, rope
from xckpt.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32
_RNG = np.random.default_rng(0)


def random(*shape: int) -> Array:
    return (0.05 * _RNG.standard_normal(shape)).astype(F32)


def explained(a: dict[str, Array], b: dict[str, Array]) -> pd.DataFrame:
    result = xckpt.compare(a, b, explain=True, cache=False, progress=False)
    return result.ckpt.table()


@pytest.mark.parametrize("size", [512, 65536])
@pytest.mark.parametrize("place", [0, -1])
def test_one_changed_bit_is_not_rounding(size: int, place: int) -> None:
    values = random(size).astype(BF16).astype(F32)
    damaged = values.copy()
    damaged.view(np.uint32)[place] ^= 1 << 13
    for a, b in ((values, damaged), (damaged, values)):
        row = explained({"w": a}, {"w": b}).loc["w"]
        assert row["outcome"] == "changed"
        assert f"1 of {size:,}" in row["explanation"]


def test_small_numbers_on_a_coarser_grid_are_rounded() -> None:
    values = (random(64, 64) * F32(1e-5)).astype(BF16).astype(F32)
    rounded = values.astype(np.float16).astype(F32)
    assert explained({"w": values}, {"w": rounded}).loc["w", "outcome"] == "explained"


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("model.layers.1.self_attn.q_proj.weight", "explained"),
     ("model.layers.1.self_attn.v_proj.weight", "changed"),
     ("embed.weight", "changed"), ("bn.running_mean", "changed")],
)  # fmt: skip
def test_only_queries_and_keys_have_rotary_heads(name: str, outcome: str) -> None:
    values = random(64, 32)
    row = explained({name: values}, {name: rope(values, 4)}).loc[name]
    assert row["outcome"] == outcome
    assert row["cause"] == ("rope_permuted" if outcome == "explained" else "rows_permuted")


def test_exchanged_heads_are_no_rotary_permutation() -> None:
    values = random(4, 64, 32)
    name = "model.layers.1.self_attn.k_proj.weight"
    exchanged = values[[0, 2, 1, 3]].reshape(256, 32)
    row = explained({name: values.reshape(256, 32)}, {name: exchanged}).loc[name]
    assert row["cause"] == "rows_permuted"


@pytest.mark.parametrize("is_usual", [True, False])
def test_a_tensor_unlike_its_siblings_is_named(is_usual: bool) -> None:
    ours = {f"l.{layer}.{role}.weight": random(16, 16) for layer in range(6) for role in "qkvo"}
    odd = "l.3.v.weight"
    theirs = {n: x.T if (n != odd) == is_usual else x for n, x in ours.items()}
    table = explained(ours, theirs)
    assert table.index[table["outcome"] != "explained"].tolist() == [odd]
    text = "not transposed" if is_usual else "transposed"
    assert table.loc[odd, "explanation"] == f"unlike its 5 siblings, it was {text}"


def test_siblings_without_a_majority_are_not_accused() -> None:
    ours = {f"l.{layer}.up.weight": random(16, 16) for layer in range(4)}
    theirs = {n: x.T if n < "l.2" else x for n, x in ours.items()}
    assert set(explained(ours, theirs)["outcome"]) == {"explained"}


@pytest.mark.parametrize("spelling", ["encoder/layers_{}/{}/kernel", "{1}_{0}/kernel", "b.{}.{}.w"])
def test_exchanged_layers_are_misplaced_whatever_their_names(spelling: str) -> None:
    ours = {f"encoder.layers.{i}.{n}.weight": random(24, 16)
            for i in range(6) for n in ("fc1", "fc2", "proj")}  # fmt: skip
    theirs = {}
    for name, values in ours.items():
        _, _, layer, module, _ = name.split(".")
        number = {1: 2, 2: 1}.get(int(layer), int(layer))
        theirs[spelling.format(number, module)] = values.T
    table = explained(ours, theirs)
    wrong = {n for n in ours if ".1." in n or ".2." in n}
    assert {n for n in ours if table.loc[n, "outcome"] != "explained"} == wrong
    assert set(table.loc[list(wrong), "cause"]) == {"misplaced"}


def test_two_empty_files_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        xckpt.save({}, tmp_path / f"{name}.safetensors")
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("a", "b")]
    assert main(["compare", *paths, "--explain"]) == 0
    assert "both are empty" in capsys.readouterr().out


def test_not_a_number_is_named_first() -> None:
    values = random(32, 16)
    damaged = values + random(32, 16)
    damaged[3, 4] = np.nan
    row = explained({"w": values}, {"w": damaged}).loc["w"]
    assert row["explanation"].startswith("1 is NaN on one side, 512 of 512 elements differ")


@pytest.mark.parametrize(
    "names", [("mlp.{}.weight", "mlp.{}.weight"), ("mlp.{}.weight", "ffn.{}.w")]
)
def test_a_square_matrix_is_not_transposed_alone(names: tuple[str, str]) -> None:
    """Matrices that are not square show whether a conversion transposes."""
    rng = np.random.default_rng(5)
    shapes = {"a": (24, 16), "b": (8, 24), "c": (32, 8), "d": (16, 32), "e": (16, 16)}
    ours = {names[0].format(n): rng.standard_normal(s).astype(F32) for n, s in shapes.items()}
    theirs = {names[1].format(n): ours[names[0].format(n)] for n in shapes}
    square, other = (name.format("e") for name in names)
    table = explained(ours, theirs | {other: theirs[other].T.copy()})
    assert table.outcome[square] == "changed"
    assert (
        "transposed, and the 4 matrices that are not square were not" in table.explanation[square]
    )
    assert set(table.outcome.drop([n for n in (square, other) if n in table.index])) == {
        "explained"
    }
    turned = {name: values.T.copy() for name, values in theirs.items()}
    assert set(explained(ours, turned).outcome) == {"explained"}


def test_a_square_part_is_not_transposed_alone() -> None:
    rng = np.random.default_rng(6)
    parts = {f"attn.{n}_proj.weight": rng.standard_normal((16, 16)).astype(F32) for n in "qkv"}
    rest = {f"mlp.{n}.weight": rng.standard_normal((8, 16 + n)).astype(F32) for n in range(4)}
    fused = {"attn.qkv.weight": np.concatenate(list(parts.values()))}
    assert set(explained(parts | rest, fused | rest).outcome) == {"explained"}
    parts["attn.v_proj.weight"] = parts["attn.v_proj.weight"].T.copy()
    table = explained(parts | rest, fused | rest)
    assert table.outcome["attn.v_proj.weight"] == table.outcome["attn.qkv.weight"] == "changed"


@pytest.mark.parametrize("is_square", [False, True])
@pytest.mark.parametrize("stacks", [("encoder", "decoder"), ("encoder",)])
def test_a_matrix_is_transposed_as_others_of_its_role(
    stacks: tuple[str, ...], is_square: bool
) -> None:
    """With two layers, only other stacks show which is right; without one, both are open."""
    shape = (16, 16) if is_square else (16, 24)
    ours, theirs = {}, {}
    for stack in stacks:
        for n in range(2):
            ours[f"{stack}.block.{n}.mlp.up.weight"] = random(*shape) + n
            ours[f"{stack}.block.{n}.norm.weight"] = random(24) + n
    names = {name: name.replace("block.", "layers_").replace(".", "/") for name in ours}
    names = {a: b.replace("up/weight", "wi/kernel") for a, b in names.items()}
    theirs = {names[name]: values.T.copy() for name, values in ours.items()}
    assert set(explained(ours, theirs).outcome) == {"explained"}
    damaged = f"{stacks[0]}.block.1.mlp.up.weight"
    theirs[names[damaged]] = ours[damaged]
    wrong = [damaged] if len(stacks) == 2 else [n for n in ours if "mlp" in n]
    table = explained(ours, theirs)
    assert {n for n in table.index if table.outcome[n] != "explained"} == {
        *wrong,
        *map(names.get, wrong),
    }


def test_positions_are_not_transposed() -> None:
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"wte": (50, 32), "wpe": (32, 32), "ln_f": (32,)}
    for layer in range(2):
        base = f"h.{layer}"
        shapes |= {f"{base}.attn.c_attn": (32, 96), f"{base}.attn.c_proj": (32, 32)}
        shapes |= {f"{base}.mlp.c_fc": (32, 128), f"{base}.mlp.c_proj": (128, 32)}
        shapes |= {f"{base}.ln_1": (32,), f"{base}.ln_2": (32,)}
    ours = {f"transformer.{n}.weight": rng.standard_normal(s) for n, s in shapes.items()}
    theirs = {n: values.T.copy() if "wte" not in n else values for n, values in ours.items()}
    table = explained(ours, theirs)
    assert table.index[table.outcome != "explained"].tolist() == ["transformer.wpe.weight"]
