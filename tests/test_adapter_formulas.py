"""Updates of LoHa, LoKr, AdaLoRA, (IA)³ and experts are those of PEFT and LyCORIS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from xckpt.errors import CheckpointWarning, UnsupportedError

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


# --- experts ---------------------------------------------------------------------------------

EXPERTS, EMBD, FF = 3, 8, 12
GATE_UP, DOWN = "gate_up_proj", "down_proj"
#: Outputs and inputs of an expert.
EXTENTS = {GATE_UP: (2 * FF, EMBD), DOWN: (EMBD, FF)}
LAYER = "model.layers.0"
MODULE = f"{LAYER}.mlp.experts"


def adapter_of_experts(*names: str, experts: int = EXPERTS, **config: Any) -> Any:
    """Return an adapter as PEFT writes it: the factors of the first parameter are innermost."""
    tensors = {}
    for depth, name in enumerate(reversed(names)):
        outputs, inputs = EXTENTS[name]
        module = f"base_model.model.{MODULE}" + depth * ".base_layer"
        tensors[f"{module}.lora_A.weight"] = numbers(experts * RANK, inputs, seed=depth)
        tensors[f"{module}.lora_B.weight"] = numbers(outputs, experts * RANK, seed=depth)
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"],
              "target_parameters": [f"mlp.experts.{name}" for name in reversed(names)]}  # fmt: skip
    return xckpt.open(tensors).assign_attrs(adapter_config=stated | config)


def updates_of_experts(adapter: Any, scale: float = ALPHA / RANK) -> dict[str, Array]:
    """Return the updates of the experts, one expert after the other."""
    depths = {GATE_UP: ".base_layer", DOWN: ""}
    updates = {}
    for name, (outputs, inputs) in EXTENTS.items():
        module = f"base_model.model.{MODULE}{depths[name]}"
        a = adapter[f"{module}.lora_A.weight"].values.reshape(EXPERTS, RANK, inputs)
        b = adapter[f"{module}.lora_B.weight"].values.reshape(outputs, RANK, EXPERTS)
        products = [b[:, :, expert] @ a[expert] for expert in range(EXPERTS)]
        updates[name] = np.float32(scale) * np.stack(products)
    return updates


def moe(experts: dict[str, Array]) -> dict[str, Array]:
    """Return a model with experts, which has the names of Mixtral or Qwen3-MoE."""
    block = "block_sparse_moe" if any("block_sparse_moe" in name for name in experts) else "mlp"
    projections = {f"{LAYER}.self_attn.{x}_proj.weight": numbers(EMBD, EMBD) for x in "qkvo"}
    norms = [f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm"]
    return {
        "model.embed_tokens.weight": numbers(16, EMBD), "lm_head.weight": numbers(16, EMBD),
        f"{LAYER}.{block}.gate.weight": numbers(EXPERTS, EMBD),
        **projections, **{f"{name}.weight": numbers(EMBD) for name in norms}, **experts,
    }  # fmt: skip


def in_one_tensor(stacks: dict[str, Array]) -> dict[str, Array]:
    return {f"{MODULE}.{name}": stack for name, stack in stacks.items()}


def inputs_first(stacks: dict[str, Array]) -> dict[str, Array]:
    return in_one_tensor({name: stack.swapaxes(1, 2) for name, stack in stacks.items()})


def one_by_one(module: str, gate: str, up: str, down: str) -> Callable[..., dict[str, Array]]:
    def split(stacks: dict[str, Array]) -> dict[str, Array]:
        experts = {}
        for number, (gate_up, expert) in enumerate(zip(stacks[GATE_UP], stacks[DOWN], strict=True)):
            parts = (*np.split(gate_up, 2), expert)
            for name, part in zip((gate, up, down), parts, strict=True):
                experts[f"{LAYER}.{module}.experts.{number}.{name}.weight"] = part
        return experts

    return split


CONTAINERS = {
    "one tensor": in_one_tensor,
    "inputs first": inputs_first,
    "Mixtral": one_by_one("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen3-MoE": one_by_one("mlp", "gate_proj", "up_proj", "down_proj"),
}
STACKS = {n: numbers(EXPERTS, *extents, seed=5) for n, extents in EXTENTS.items()}


class TestExperts:
    """Factors of `target_parameters` are divided among the experts, as PEFT does."""

    @pytest.mark.parametrize("container", CONTAINERS)
    def test_a_merge_adds_the_product_of_each_expert(self, container: str) -> None:
        adapter, split = adapter_of_experts(GATE_UP, DOWN), CONTAINERS[container]
        base = moe(split(STACKS))
        updates = updates_of_experts(adapter)
        expected = moe(split({name: STACKS[name] + updates[name] for name in STACKS}))
        merged = xckpt.open(base).ckpt.merge(adapter)
        assert set(merged) == set(base)
        for name, values in expected.items():
            np.testing.assert_allclose(merged[name].values, values, rtol=1e-6, atol=1e-6)
        table = xckpt.compare(base, expected, adapter=adapter).ckpt.table()
        assert set(table["cause"]) == {"merged", "equal"}
        assert (table["cause"] == "merged").sum() == len(split(STACKS))
        first = next(iter(split(STACKS)))
        expected[first].flat[0] += np.float32(1e-3)
        row = xckpt.compare(base, expected, adapter=adapter).ckpt.table().loc[first]
        assert row["outcome"] == "changed"

    def test_updates_have_a_matrix_for_each_expert(self) -> None:
        adapter = adapter_of_experts(GATE_UP, DOWN)
        table, updates = adapter.ckpt.adapters(), adapter.ckpt.updates()
        assert table["kind"].to_dict() == dict.fromkeys(in_one_tensor(STACKS), "experts")
        assert set(table["rank"]) == {RANK}
        for name, update in in_one_tensor(updates_of_experts(adapter)).items():
            assert table.loc[name, "shape"] == update.shape
            np.testing.assert_allclose(updates[name].values, update, rtol=1e-5, atol=1e-6)

    def test_an_expert_is_computed_by_itself(self) -> None:
        adapter, base = adapter_of_experts(GATE_UP, DOWN), xckpt.open(in_one_tensor(STACKS))
        name = f"{MODULE}.{DOWN}"
        chunked = base.chunk({base[name].dims[0]: 1})
        merged = chunked.ckpt.merge(adapter)[name]
        assert merged.chunks == chunked[name].chunks
        update = updates_of_experts(adapter)[DOWN]
        np.testing.assert_allclose(merged[1].values, (STACKS[DOWN] + update)[1], rtol=1e-6)

    def test_a_parameter_has_the_rank_and_alpha_of_its_pattern(self) -> None:
        names: dict[str, Any] = {"target_parameters": [DOWN, GATE_UP], "r": 1, "lora_alpha": 1}
        names |= {"rank_pattern": {r".*\.gate_up_proj": RANK, "experts.down_proj": RANK},
                  "alpha_pattern": {r".*\.gate_up_proj": 7, DOWN: 2}}  # fmt: skip
        adapter = adapter_of_experts(GATE_UP, DOWN, **names, use_rslora=True)
        table = adapter.ckpt.adapters()
        assert table["alpha"].to_dict() == {f"{MODULE}.{GATE_UP}": 7, f"{MODULE}.{DOWN}": 2}
        assert table.loc[f"{MODULE}.{DOWN}", "scale"] == pytest.approx(2 / RANK**0.5)

    @pytest.mark.parametrize("module", ["block_sparse_moe", "mlp"])
    def test_the_weight_of_a_router_is_a_parameter(self, module: str) -> None:
        names = ("w1", "w3", "w2") if module != "mlp" else ("gate_proj", "up_proj", "down_proj")
        base = moe(one_by_one(module, *names)(STACKS))
        gate = f"base_model.model.{LAYER}.mlp.gate"
        factors = {f"{gate}.lora_A.weight": numbers(RANK, EMBD),
                   f"{gate}.lora_B.weight": numbers(EXPERTS, RANK)}  # fmt: skip
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA,
                  "target_parameters": ["gate.weight", DOWN, GATE_UP]}  # fmt: skip
        adapter = xckpt.open(factors).assign_attrs(adapter_config=config)
        a, b = factors.values()
        name = f"{LAYER}.{module}.gate.weight"
        merged = xckpt.open(base).ckpt.merge(adapter)
        expected = base[name] + np.float32(ALPHA / RANK) * b @ a
        np.testing.assert_allclose(merged[name].values, expected, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("experts", [EXPERTS - 1, EXPERTS + 1])
    @pytest.mark.parametrize("container", CONTAINERS)
    def test_another_number_of_experts_is_an_error(self, container: str, experts: int) -> None:
        adapter = adapter_of_experts(GATE_UP, DOWN, experts=experts)
        base = xckpt.open(moe(CONTAINERS[container](STACKS)))
        with pytest.raises((UnsupportedError, ValueError), match=r"experts|has the shape"):
            base.ckpt.merge(adapter)

    def test_factors_of_another_rank_are_named(self) -> None:
        table = adapter_of_experts(GATE_UP, DOWN, r=RANK + 1).ckpt.adapters()
        assert set(table["kind"]) == {"unsupported"}
        assert "states the rank 4, and its factors have the rank 9" in table["note"].iloc[0]

    @pytest.mark.parametrize(
        "targets", [[], [DOWN], ["experts.w1", "experts.w2"], ["other.gate_up_proj", "w1", "w2"]]
    )
    def test_parameters_that_are_unknown_are_named(self, targets: list[str]) -> None:
        adapter = adapter_of_experts(GATE_UP, DOWN, target_parameters=targets)
        base = xckpt.open(moe(CONTAINERS["Mixtral"](STACKS)))
        with pytest.raises(UnsupportedError, match=r"target_parameters.*layers\.0\.mlp\.experts"):
            base.ckpt.merge(adapter)

    def test_no_model_gets_half_of_an_adapter(self) -> None:
        adapter = adapter_of_experts(GATE_UP, DOWN)
        base = moe({f"{MODULE}.{DOWN}": STACKS[DOWN], f"{MODULE}.w13": STACKS[GATE_UP]})
        with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.mlp\.experts\.gate_up_pr"):
            xckpt.open(base).ckpt.merge(adapter)

    def test_halves_with_all_experts_are_parts_of_one_parameter(self) -> None:
        gate, up = np.split(STACKS[GATE_UP], 2, axis=1)
        arrays = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": STACKS[DOWN],
                  "ffn_gate_inp": numbers(EXPERTS, EMBD), "attn_norm": numbers(EMBD),
                  "ffn_norm": numbers(EMBD), "attn_q": numbers(EMBD, EMBD)}  # fmt: skip
        base = xckpt.open({f"blk.0.{name}.weight": array for name, array in arrays.items()})
        base = base.assign_attrs({"general.architecture": "qwen3moe"})
        adapter = adapter_of_experts(GATE_UP, DOWN)
        merged, updates = base.ckpt.merge(adapter), updates_of_experts(adapter)
        gate_update, up_update = np.split(updates[GATE_UP], 2, axis=1)
        for name, expected in {
            "gate": gate + gate_update, "up": up + up_update, "down": STACKS[DOWN] + updates[DOWN],
        }.items():  # fmt: skip
            values = merged[f"blk.0.ffn_{name}_exps.weight"].values
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)


class TestSquareExperts:
    """Square matrices have the order of axes that other tensors of the model have."""

    @staticmethod
    def square(*names: str) -> tuple[Any, dict[str, Array]]:
        module = f"base_model.model.{MODULE}"
        extents = {GATE_UP: (2 * EMBD, EMBD), DOWN: (EMBD, EMBD)}
        factors: dict[str, Array] = {}
        stacks: dict[str, Array] = {}
        for depth, name in enumerate(reversed(names)):
            outputs, inputs = extents[name]
            path = module + depth * ".base_layer"
            factors[f"{path}.lora_A.weight"] = numbers(EXPERTS * RANK, inputs, seed=depth)
            factors[f"{path}.lora_B.weight"] = numbers(outputs, EXPERTS * RANK, seed=depth)
            stacks[f"{MODULE}.{name}"] = numbers(EXPERTS, inputs, outputs)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK,
                  "target_parameters": [f"experts.{name}" for name in names]}  # fmt: skip
        return xckpt.open(factors).assign_attrs(adapter_config=config), stacks

    def test_the_other_parameter_decides(self) -> None:
        adapter, base = self.square(GATE_UP, DOWN)
        merged = xckpt.open(base).ckpt.merge(adapter)
        name = f"{MODULE}.{DOWN}"
        a, b = (adapter[f"base_model.model.{MODULE}.lora_{x}.weight"].values for x in "AB")
        a, b = a.reshape(EXPERTS, RANK, EMBD), b.reshape(EMBD, RANK, EXPERTS)
        products = [(b[:, :, expert] @ a[expert]).T for expert in range(EXPERTS)]
        np.testing.assert_allclose(merged[name], base[name] + products, rtol=1e-6, atol=1e-6)

    def test_an_order_that_is_unknown_is_an_error(self) -> None:
        adapter, base = self.square(DOWN)
        with pytest.raises(UnsupportedError, match=r"down_proj.*square matrices"):
            xckpt.open(base).ckpt.merge(adapter)

    @pytest.mark.parametrize(("module", "kind"), [("mlp", "gpt-oss"), ("feed_forward", "llama4")])
    @pytest.mark.parametrize("names", [(GATE_UP, DOWN), (DOWN,)])
    def test_inputs_before_outputs_are_not_divided(
        self, names: tuple[str, ...], module: str, kind: str
    ) -> None:
        adapter, _ = self.square(*names)
        arrays = {name.replace("mlp", module): adapter[name].values for name in adapter}
        attrs = {**adapter.attrs, "config": {"model_type": kind.replace("-", "_")}}
        base = {"ffn_gate_exps": (EXPERTS, EMBD, EMBD), "ffn_up_exps": (EXPERTS, EMBD, EMBD),
                "ffn_down_exps": (EXPERTS, EMBD, EMBD), "ffn_gate_inp": (EXPERTS, EMBD),
                "attn_q": (EMBD, EMBD), "attn_norm": (EMBD,)}  # fmt: skip
        model = xckpt.open({f"blk.0.{n}.weight": numbers(*shape) for n, shape in base.items()})
        with pytest.raises(UnsupportedError, match=r"order of axes|alternate|counterpart"):
            model.assign_attrs({"general.architecture": kind}).ckpt.merge(
                xckpt.open(arrays).assign_attrs(attrs)
            )
