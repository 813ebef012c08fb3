"""Updates of LoHa, LoKr, AdaLoRA and (IA)³ are computed as PEFT and LyCORIS compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]

ROWS, COLUMNS, RANK, ALPHA = 12, 8, 3, 5
FC = "model.fc.weight"


def numbers(*shape: int, seed: int = 0) -> Array:
    values = np.random.default_rng([seed, *shape]).normal(scale=0.5, size=shape)
    return values.astype(np.float32)


def loha(t: dict[str, Array]) -> Array:
    product: Array = (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
    return product


def lokr(t: dict[str, Array]) -> Array:
    first, second = (
        t[f"lokr_w{n}"] if f"lokr_w{n}" in t else t[f"lokr_w{n}_a"] @ t[f"lokr_w{n}_b"]
        for n in (1, 2)
    )
    product: Array = np.kron(first, second)
    return product


HADA: dict[str, tuple[int, ...]] = {
    "hada_w1_a": (ROWS, RANK), "hada_w1_b": (RANK, COLUMNS),
    "hada_w2_a": (ROWS, RANK), "hada_w2_b": (RANK, COLUMNS),
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, tuple[int, ...]], Callable[..., Array], float]] = {
    "LoHa": ("LOHA", HADA, loha, ALPHA / RANK),
    "LoKr": (
        "LOKR",
        {"lokr_w1": (4, 2), "lokr_w2_a": (3, RANK), "lokr_w2_b": (RANK, 4)},
        lokr,
        ALPHA / RANK,
    ),
    "LoKr of four factors": (
        "LOKR",
        {"lokr_w1_a": (4, RANK), "lokr_w1_b": (RANK, 2), "lokr_w2_a": (3, RANK),
         "lokr_w2_b": (RANK, 4)},
        lokr,
        ALPHA / RANK,
    ),
    "LoKr of two matrices": ("LOKR", {"lokr_w1": (4, 2), "lokr_w2": (3, 4)}, lokr, ALPHA / 6),
    "AdaLoRA": (
        "ADALORA",
        {"lora_A": (RANK, COLUMNS), "lora_B": (ROWS, RANK), "lora_E": (RANK, 1)},
        lambda t: t["lora_B"] @ (t["lora_A"] * t["lora_E"]),
        ALPHA / (RANK + 1e-5),
    ),
}  # fmt: skip


def made(kind: str) -> tuple[Any, Array]:
    """Return an adapter as PEFT writes it, and its update."""
    method, shapes, formula, scale = KINDS[kind]
    tensors = {name: numbers(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    ds = xckpt.open({f"base_model.model.model.fc.{name}": t for name, t in tensors.items()})
    config = {"peft_type": method, "r": 6, "alpha": ALPHA, "lora_alpha": ALPHA}
    return ds.assign_attrs(adapter_config=config), np.float32(scale) * formula(tensors)


@pytest.mark.parametrize("kind", KINDS)
class TestUpdates:
    def test_the_update_is_the_one_of_peft(self, kind: str) -> None:
        adapter, update = made(kind)
        updates = adapter.ckpt.updates()
        np.testing.assert_allclose(updates[FC].values, update, rtol=1e-5, atol=1e-6)
        row = adapter.ckpt.adapters().loc[FC]
        assert row["shape"] == (ROWS, COLUMNS)
        assert row["scale"] == pytest.approx(KINDS[kind][3])

    def test_a_merge_is_verified_in_every_element(self, kind: str) -> None:
        adapter, update = made(kind)
        base = {FC: numbers(ROWS, COLUMNS, seed=9)}
        merged = {FC: base[FC] + update}
        assert xckpt.compare(base, merged, adapter=adapter).ckpt.table()["cause"].item() == "merged"
        merged[FC][3, 5] += np.float32(1e-4)
        row = xckpt.compare(base, merged, adapter=adapter).ckpt.table().loc[FC]
        assert row["outcome"] == "changed"
        assert "1.04 % of the elements are further off" in row["explanation"]

    def test_another_scale_is_named(self, kind: str) -> None:
        adapter, update = made(kind)
        base = {FC: numbers(ROWS, COLUMNS, seed=9)}
        row = xckpt.compare(base, {FC: base[FC] + 2 * update}, adapter=adapter).ckpt.table().loc[FC]
        assert row["outcome"] == "changed"
        assert row["explanation"].endswith(f"{2 * KINDS[kind][3]:.4g} * the update fits best")


@pytest.mark.parametrize("shape", [(ROWS, 1), (1, COLUMNS)])
def test_the_factors_of_ia3_multiply_rows_or_columns(shape: tuple[int, int]) -> None:
    bias = "model.fc.bias"
    values = 1 + numbers(*shape)
    adapter = xckpt.open({"base_model.model.model.fc.ia3_l": values})
    base = {FC: numbers(ROWS, COLUMNS, seed=9), bias: numbers(ROWS)}
    factors = values.ravel() if shape[1] == 1 else np.float32(1)
    merged = {FC: base[FC] * values, bias: base[bias] * factors}
    table = xckpt.compare(base, merged, adapter=adapter).ckpt.table()
    assert table.loc[FC, "cause"] == "merged"
    assert table.loc[bias, "cause"] == ("equal" if shape[0] == 1 else "merged")
    merged[FC] = base[FC] * (values + np.float32(0.01))
    row = xckpt.compare(base, merged, adapter=adapter).ckpt.table().loc[FC]
    assert row["outcome"] == "changed"
    with pytest.warns(CheckpointWarning, match="multiplies the weights, and adds nothing"):
        assert not adapter.ckpt.updates().data_vars


def test_a_model_without_biases_lacks_nothing() -> None:
    adapter = xckpt.open({"base_model.model.model.fc.ia3_l": np.ones((ROWS, 1), np.float32)})
    base = {FC: numbers(ROWS, COLUMNS)}
    assert xckpt.compare(base, base, adapter=adapter).ckpt.table()["cause"].item() == "merged"


def test_factors_of_lycoris_have_the_rank_or_no_scale() -> None:
    module = "lycoris_model_fc"
    shapes = {"lokr_w1": (4, 2), "lokr_w2": (3, 4)}
    whole = {f"{module}.{name}": numbers(*shape) for name, shape in shapes.items()}
    whole[f"{module}.alpha"] = np.array(ALPHA, np.float32)  # without a rank, it is not used
    assert xckpt.open(whole).ckpt.adapters()["scale"].item() == 1
    factors = {f"{module}.{name}": numbers(*shape) for name, shape in HADA.items()}
    assert xckpt.open(factors).ckpt.adapters()["scale"].item() == 1
    factors[f"{module}.alpha"] = np.array(ALPHA, np.float32)
    assert xckpt.open(factors).ckpt.adapters()["scale"].item() == ALPHA / RANK


@pytest.mark.parametrize(
    "shapes",
    [
        HADA | {"hada_w2_b": (RANK, COLUMNS + 1)}, HADA | {"hada_w1_b": (RANK + 1, COLUMNS)},
        HADA | {"hada_w1_a": (0, RANK)}, HADA | {"hada_w1_a": ()},
    ],
)  # fmt: skip
def test_factors_that_do_not_fit_are_named(shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = {f"base_model.model.fc.{name}": np.ones(s, "f4") for name, s in shapes.items()}
    table = xckpt.open(tensors).ckpt.adapters()
    assert table["kind"].item() == "unsupported"
    assert "LoHa" in table["note"].item()


def test_singular_values_that_do_not_fit_are_named() -> None:
    shapes = {"lora_A": (RANK, COLUMNS), "lora_B": (ROWS, RANK), "lora_E": (RANK + 1, 1)}
    tensors = {f"base_model.model.fc.{name}": numbers(*shape) for name, shape in shapes.items()}
    table = xckpt.open(tensors).ckpt.adapters()
    assert table["kind"].item() == "unsupported"
    assert "AdaLoRA" in table["note"].item()


@pytest.mark.parametrize("shape", [(ROWS + 1,), (1, ROWS), (1, COLUMNS)])
def test_magnitudes_of_other_axes_are_named(shape: tuple[int, ...]) -> None:
    shapes = {"lora_down.weight": (RANK, COLUMNS), "lora_up.weight": (ROWS, RANK),
              "dora_scale": shape}  # fmt: skip
    tensors = {f"lycoris_fc.{name}": numbers(*extents) for name, extents in shapes.items()}
    table = xckpt.open(tensors).ckpt.adapters()
    assert table["kind"].item() == "unsupported"
    assert "its magnitudes have the shape" in table["note"].item()


@pytest.mark.parametrize("extra", ["hada_t1", "dora_scale", "hada_x"])
def test_factors_beyond_the_formula_are_named_as_unsupported(extra: str) -> None:
    shapes = HADA | {extra: (RANK, RANK, 3, 3)}
    tensors = {f"lycoris_fc.{name}": numbers(*shape) for name, shape in shapes.items()}
    table = xckpt.open(tensors).ckpt.adapters()
    assert table["kind"].tolist() == ["unsupported"]
    assert "LoHa adapters are unsupported" in table["note"].item()


class TestTrainedTokens:
    KEY = "base_model.model.model.embed.token_adapter.trainable_tokens_delta"

    @pytest.mark.parametrize(
        ("config", "rows"),
        [
            ({"trainable_token_indices": [4, 1]}, 2), ({"token_indices": [4, 1]}, 2),
            ({"trainable_token_indices": {"embed": [4, 1], "other": [3]}}, 2),
        ],
    )  # fmt: skip
    def test_the_config_has_their_indices(self, config: Any, rows: int) -> None:
        delta = numbers(rows, COLUMNS)
        adapter = xckpt.open({self.KEY: delta}).assign_attrs(adapter_config=config)
        base = {"model.embed.weight": numbers(ROWS, COLUMNS, seed=9)}
        merged = {"model.embed.weight": base["model.embed.weight"].copy()}
        merged["model.embed.weight"][[4, 1]] = delta
        row = xckpt.compare(base, merged, adapter=adapter).ckpt.table().iloc[0]
        assert row["cause"] == "merged"
        assert row["explanation"].startswith("b is a with 2 rows of the adapter")

    @pytest.mark.parametrize(
        "config",
        [
            {}, {"token_indices": [1]}, {"token_indices": [1, 1]}, {"token_indices": [-1, 2]},
            {"token_indices": [1, "2"]}, {"token_indices": "12"},
            {"trainable_token_indices": {"head": [1, 2]}},
        ],
    )  # fmt: skip
    def test_other_indices_are_refused(self, config: Any) -> None:
        adapter = xckpt.open({self.KEY: numbers(2, COLUMNS)}).assign_attrs(adapter_config=config)
        table = adapter.ckpt.adapters()
        assert table["kind"].item() == "unsupported"
        assert "adapter_config.json" in table["note"].item()

    def test_rows_that_the_base_lacks_are_named(self) -> None:
        config = {"token_indices": [1, ROWS]}
        adapter = xckpt.open({self.KEY: numbers(2, COLUMNS)}).assign_attrs(adapter_config=config)
        base = {"model.embed.weight": numbers(ROWS, COLUMNS, seed=9)}
        row = xckpt.compare(base, base, adapter=adapter).ckpt.table().iloc[0]
        assert row["outcome"] == "changed"
        assert f"row {ROWS}" in row["explanation"]
