"""An adapter finds the tensors of its base model under the names of other libraries and formats."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from xckpt.errors import CheckpointWarning, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]

RANK, ALPHA = 2, 3
EMBD, FF, VOCAB, HEADS, HEADS_KV, LAYERS = 16, 24, 40, 4, 2, 2


def numbers(*shape: int, seed: str = "") -> Array:
    values = np.random.default_rng([*seed.encode(), *shape]).normal(scale=0.1, size=shape)
    return values.astype(np.float32)


def factors(name: str, rows: int, columns: int, *window: int) -> tuple[Array, Array]:
    a = numbers(RANK, columns, *window, seed=f"{name} A")
    return a, numbers(rows, RANK, *(1 for _ in window), seed=f"{name} B")


def merged(tensors: Tensors, names: Mapping[str, str], scale: float = ALPHA / RANK) -> Tensors:
    """Return a model with the product of factors added; `names` has the names in the adapter."""
    result = dict(tensors)
    for name, key in names.items():
        a, b = factors(key, *tensors[name].shape)
        product = b.reshape(len(b), RANK) @ a.reshape(RANK, -1)
        result[name] = tensors[name] + np.float32(scale) * product.reshape(tensors[name].shape)
    return result


def table_of(base: Any, other: Any, adapter: Any) -> Any:
    return xckpt.compare(base, other, adapter=adapter, progress=False).ckpt.table()


def causes(table: Any) -> dict[str, str]:
    found: dict[str, str] = table[table["cause"] != "equal"]["cause"].to_dict()
    return found


# --- language models ------------------------------------------------------------------------------

MODULES = {
    "self_attn.q_proj": (EMBD, EMBD), "self_attn.k_proj": (EMBD // 2, EMBD),
    "self_attn.v_proj": (EMBD // 2, EMBD), "self_attn.o_proj": (EMBD, EMBD),
    "mlp.gate_proj": (FF, EMBD), "mlp.up_proj": (FF, EMBD), "mlp.down_proj": (EMBD, FF),
}  # fmt: skip
GGUF = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "embed_tokens": "token_embd", "norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip
META = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings", "norm": "norm",
    "lm_head": "output",
}  # fmt: skip
ADAPTED = [f"model.layers.{n}.{module}.weight" for n in range(LAYERS) for module in MODULES]
TYPES = {"llama": True, "qwen2": False}  # whether llama.cpp permutes queries and keys


def llama() -> Tensors:
    tensors = {"model.embed_tokens.weight": (VOCAB, EMBD), "model.norm.weight": (EMBD,),
               "lm_head.weight": (VOCAB, EMBD)}  # fmt: skip
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        tensors |= {f"{layer}.{module}.weight": shape for module, shape in MODULES.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = (EMBD,)
    return {name: numbers(*shape, seed=name) for name, shape in tensors.items()}


def in_pairs(name: str, rows: Array) -> Array:
    """Return the rows of queries and keys as llama.cpp orders those of llama."""
    for module, heads in (("q_proj", HEADS), ("k_proj", HEADS_KV)):
        if name.endswith((f"{module}.weight", f"{module}.bias")):
            halves = rows.reshape(heads, 2, len(rows) // heads // 2, -1)
            return halves.swapaxes(1, 2).reshape(rows.shape)
    return rows


def renamed(name: str, names: Mapping[str, str]) -> str:
    path, _, leaf = name.removeprefix("model.").rpartition(".")
    module = re.sub(r"^layers\.\d+\.", "", path)
    front = path.removesuffix(module)
    if names is GGUF:
        front = front.replace("layers", "blk")
    return f"{front}{names[module]}.{leaf}"


def in_folder(tensors: Tensors, kind: str) -> Any:
    return xckpt.open(tensors).assign_attrs(
        config={"model_type": kind, "num_attention_heads": HEADS, "num_key_value_heads": HEADS_KV,
                "hidden_size": EMBD}
    )  # fmt: skip


def in_gguf(tensors: Tensors, kind: str) -> Any:
    order = in_pairs if TYPES[kind] else lambda _, rows: rows
    arrays = {renamed(name, GGUF): order(name, rows) for name, rows in tensors.items()}
    return xckpt.open(arrays).assign_attrs(
        {"general.architecture": kind, f"{kind}.attention.head_count": HEADS,
         f"{kind}.attention.head_count_kv": HEADS_KV, f"{kind}.embedding_length": EMBD}
    )  # fmt: skip


def by_meta(tensors: Tensors, kind: str) -> Any:
    del kind
    return {renamed(name, META): in_pairs(name, rows) for name, rows in tensors.items()}


CONTAINERS: dict[str, Callable[[Tensors, str], Any]] = {
    "with config": in_folder,
    "state dict": lambda tensors, _: dict(tensors),
    "wrapped": lambda tensors, _: {f"module.{name}": t for name, t in tensors.items()},
    "bare": lambda tensors, _: {n.removeprefix("model."): t for n, t in tensors.items()},
    "GGUF": in_gguf,
    "Meta": by_meta,
}


def by_peft(prefix: str, adapter: str = "") -> Any:
    tensors: Tensors = {}
    for name in ADAPTED:
        module = prefix + name.removesuffix(".weight")
        a, b = factors(name, *MODULES[name.split(".", 3)[3].removesuffix(".weight")])
        tensors |= {f"{module}.lora_A.{adapter}weight": a, f"{module}.lora_B.{adapter}weight": b}
    ds = xckpt.open(tensors)
    return ds.assign_attrs(adapter_config={"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA})


def by_mlx(kind: str) -> Any:
    del kind
    ds = by_peft("")
    arrays = {
        re.sub(r"lora_([AB])\.weight", lambda m: f"lora_{m[1].lower()}", name): ds[name].values.T
        for name in ds
    }
    config = {"lora_parameters": {"rank": RANK, "scale": ALPHA / RANK}}
    return xckpt.open(arrays).assign_attrs(adapter_config=config)


def by_llama_cpp(kind: str) -> Any:
    tensors: Tensors = {}
    for name in ADAPTED:
        a, b = factors(name, *MODULES[name.split(".", 3)[3].removesuffix(".weight")])
        b = in_pairs(name, b) if TYPES[kind] else b
        tensors |= {f"{renamed(name, GGUF)}.lora_a": a, f"{renamed(name, GGUF)}.lora_b": b}
    attrs = {"general.architecture": kind, "general.type": "adapter", "adapter.lora.alpha": ALPHA}
    return xckpt.open(tensors).assign_attrs(attrs)


ADAPTERS: dict[str, Callable[[str], Any]] = {
    "PEFT": lambda _: by_peft("base_model.model."),
    "PEFT, without its prefix": lambda _: by_peft(""),
    "PEFT, with the adapter's name": lambda _: by_peft("base_model.model.", "default."),
    "MLX": by_mlx,
    "llama.cpp": by_llama_cpp,
}


class TestLanguageModels:
    @pytest.mark.parametrize("container", CONTAINERS)
    @pytest.mark.parametrize("writer", ADAPTERS)
    def test_every_adapter_fits_every_container(self, writer: str, container: str) -> None:
        base = llama()
        other = merged(base, {name: name for name in ADAPTED})
        wrap = CONTAINERS[container]
        table = table_of(wrap(base, "llama"), wrap(other, "llama"), ADAPTERS[writer]("llama"))
        assert len(table) == len(base)
        found = causes(table)
        assert set(found.values()) == {"merged"}
        assert len(found) == len(ADAPTED)

    @pytest.mark.parametrize("container", ["with config", "GGUF"])
    @pytest.mark.parametrize("writer", ["PEFT", "llama.cpp"])
    def test_rows_stay_in_order_where_the_converter_leaves_them(
        self, writer: str, container: str
    ) -> None:
        base = llama()
        other = merged(base, {name: name for name in ADAPTED})
        wrap = CONTAINERS[container]
        table = table_of(wrap(base, "qwen2"), wrap(other, "qwen2"), ADAPTERS[writer]("qwen2"))
        assert set(causes(table).values()) == {"merged"}

    def test_a_merge_that_ignores_the_order_of_rows_is_a_change(self) -> None:
        base = in_gguf(llama(), "llama")
        wrong = {name: base[name].values for name in base}
        for name in ADAPTED:
            a, b = factors(name, *wrong[renamed(name, GGUF)].shape)
            wrong[renamed(name, GGUF)] = wrong[renamed(name, GGUF)] + np.float32(1.5) * (b @ a)
        table = table_of(base, wrong, by_peft("base_model.model."))
        changed = table[table["outcome"] == "changed"].index
        assert set(changed) == {f"blk.{n}.attn_{x}.weight" for n in range(LAYERS) for x in "qk"}

    def test_one_wrong_element_of_permuted_rows_is_a_change(self) -> None:
        base = llama()
        other = merged(base, {name: name for name in ADAPTED})
        other[ADAPTED[0]][5, 3] += np.float32(0.01)
        table = table_of(in_gguf(base, "llama"), in_gguf(other, "llama"), by_peft(""))
        assert table.loc["blk.0.attn_q.weight", "outcome"] == "changed"


class TestMerging:
    """`merge` finds the tensors as `compare` does, and puts rows into the order of the model."""

    @pytest.mark.parametrize("kind", TYPES)
    @pytest.mark.parametrize("container", ["with config", "GGUF"])
    @pytest.mark.parametrize("writer", ADAPTERS)
    def test_every_adapter_is_merged_into_every_container(
        self, writer: str, container: str, kind: str
    ) -> None:
        base, wrap = llama(), CONTAINERS[container]
        expected = wrap(merged(base, {name: name for name in ADAPTED}), kind)
        result = wrap(base, kind).ckpt.merge(ADAPTERS[writer](kind))
        for name in expected:
            np.testing.assert_allclose(result[name], expected[name], rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("change", ["dora", "bias", "saved", "update", "loha"])
    def test_every_change_of_rows_has_their_order(self, change: str) -> None:
        name = ADAPTED[1]
        base = llama() | {name.replace("weight", "bias"): numbers(EMBD // 2, seed="bias")}
        weight, module = base[name], f"base_model.model.{name.removesuffix('.weight')}"
        a, b = factors("k", *weight.shape)
        total, extra = weight + b @ a, numbers(EMBD // 2, seed=change)
        tensors: Tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        new = {name: total}
        if change == "dora":
            tensors[f"{module}.lora_magnitude_vector"] = extra
            new[name] = total * (extra / np.linalg.norm(total, axis=1))[:, None]
        elif change == "bias":
            tensors[f"{module}.lora_B.bias"] = extra
            new[name.replace("weight", "bias")] = base[name.replace("weight", "bias")] + extra
        elif change == "saved":
            other = name.replace("layers.0", "layers.1")
            tensors[f"base_model.model.{other}"] = new[other] = base[other][::-1]
        elif change == "update":
            tensors = {name: b @ a}
        elif change == "loha":
            tensors = {
                f"{module}.hada_w{n}_{x}": y
                for n in "12"
                for x, y in zip("ab", (b, a), strict=True)
            }
            new[name] = weight + (b @ a) ** 2
        config = {"peft_type": "LOHA" if change == "loha" else "LORA", "r": RANK}
        config |= {"alpha": RANK, "lora_alpha": RANK, "use_dora": change == "dora"}
        adapter = xckpt.open(tensors).assign_attrs(adapter_config=config)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always", CheckpointWarning)
            result = in_gguf(base, "llama").ckpt.merge(adapter, scale=1)
        expected = in_gguf(base | new, "llama")
        for key in expected:
            np.testing.assert_allclose(result[key], expected[key], rtol=1e-5, atol=1e-6)

    def test_an_unknown_order_of_rows_is_an_error(self) -> None:
        base = in_gguf(llama(), "qwen2")
        base.attrs = {
            key.replace("qwen2", "new"): "new" if value == "qwen2" else value
            for key, value in base.attrs.items()
        }
        with pytest.raises(UnsupportedError, match="may have the rows of its heads in another"):
            base.ckpt.merge(by_peft("base_model.model."))

    def test_an_order_without_a_number_of_heads_is_an_error(self) -> None:
        with pytest.raises(UnsupportedError, match="order than the adapter, and states no number"):
            xckpt.open(by_meta(llama(), "")).ckpt.merge(by_peft("base_model.model."))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Any, Any]:
    """Return two models, the second one as GGUF, in files."""
    hf, gguf = in_folder(llama(), "llama"), in_gguf(llama(), "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        hf.ckpt.save(tmp_path / "hf/")
        gguf.ckpt.save(tmp_path / "model.gguf")
    return xckpt.open(tmp_path / "hf"), xckpt.open(tmp_path / "model.gguf")


TO_HF = {renamed(name, GGUF): name for name in llama()}
ORDER = r"order of model\.gguf, which is another one than that of these names.*q_proj"


class TestSourcesWithOtherOrders:
    """Rows of heads in different orders are not combined without a warning."""

    @pytest.mark.parametrize(
        "combine",
        [
            lambda hf, gguf: (hf + gguf.rename(TO_HF)) / 2,
            lambda _, gguf: gguf.rename(TO_HF),
            lambda _, gguf: gguf.rename(TO_HF) * 2,
            lambda hf, gguf: hf.assign(gguf.rename(TO_HF).data_vars),
            lambda hf, gguf: (hf.ckpt.stack() + gguf.rename(TO_HF).ckpt.stack()) / 2,
        ],
        ids=["mean", "renamed", "computed", "assigned", "stacked"],
    )
    def test_are_named(self, combine: Any, files: Any, tmp_path: Path) -> None:
        result = combine(*files)
        with pytest.warns(CheckpointWarning, match=rf"(?s)rows of heads are in the {ORDER}"):
            result.ckpt.save(tmp_path / "new.safetensors")
        assert "rows of heads are in the order of model.gguf" in repr(result.ckpt)

    @pytest.mark.filterwarnings("error::xckpt.errors.CheckpointWarning")
    @pytest.mark.parametrize(
        "combine",
        [
            lambda hf, gguf: (hf / 2).ckpt.merge(gguf / 2, scale=1),
            lambda hf, gguf: hf.ckpt.merge(gguf * 2 - gguf).ckpt.merge(-gguf, scale=1),
            lambda hf, gguf: (gguf / 2).ckpt.merge(hf / 2, scale=1).rename(TO_HF),
            lambda hf, _: (hf + hf) / 2,
        ],
        ids=["merged", "changes", "merged into GGUF", "the same order"],
    )
    def test_are_right_if_merge_has_the_names_of_both(
        self, combine: Any, files: Any, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        result = combine(*files)
        into_gguf = "into" in request.node.name
        for name, value in llama().items():
            rows = in_pairs(name, value) if into_gguf else value
            np.testing.assert_allclose(result[name], rows, rtol=1e-6)
        if not into_gguf:
            result.ckpt.save(tmp_path / "new.safetensors")

    def test_are_named_by_a_conversion(self, files: Any, tmp_path: Path) -> None:
        del files
        with pytest.warns(CheckpointWarning, match=rf"(?s)rows of heads are in the {ORDER}"):
            xckpt.convert(tmp_path / "model.gguf", tmp_path / "new.safetensors", names=TO_HF)

    def test_are_no_update(self, files: Any) -> None:
        hf, gguf = files
        with pytest.raises(UnsupportedError, match=ORDER):
            hf.ckpt.merge(gguf.rename(TO_HF) - hf)

    def test_are_possible_if_the_type_is_unknown(self, files: Any, tmp_path: Path) -> None:
        gguf = files[1].drop_attrs(deep=False).rename(TO_HF)
        with pytest.warns(CheckpointWarning, match="rows of heads may be in the order of model"):
            gguf.ckpt.save(tmp_path / "new.safetensors")

    def test_of_the_same_order_are_no_warning(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            in_gguf(llama(), "qwen2").ckpt.save(tmp_path / "model.gguf")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            xckpt.open(tmp_path / "model.gguf").rename(TO_HF).ckpt.save(tmp_path / "a.safetensors")
        assert not [w for w in caught if "rows of heads" in str(w.message)]


def fused(tensors: Tensors) -> Tensors:
    """Return a model with the fused projections of Phi-3."""
    result = {}
    for name, array in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            result[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
        elif "gate_proj" in name:
            parts = [array, tensors[name.replace("gate_proj", "up_proj")]]
            result[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(parts)
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            result[name] = array
    return result


class TestFusedProjections:
    def test_parts_are_rows_of_the_whole(self) -> None:
        base = llama()
        other = merged(base, {name: name for name in ADAPTED})
        table = table_of(fused(base), fused(other), by_peft("base_model.model."))
        assert len(causes(table)) == 4 * LAYERS
        assert set(causes(table).values()) == {"merged"}
        text = table.loc["model.layers.0.self_attn.qkv_proj.weight", "explanation"]
        assert "in the rows of query, key, value" in text

    def test_a_part_alone_leaves_the_others(self) -> None:
        base = llama()
        name = "model.layers.1.self_attn.v_proj.weight"
        other = merged(base, {name: name})
        a, b = factors(name, *base[name].shape)
        module = name.removesuffix(".weight")
        adapter = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        ds = xckpt.open(adapter).assign_attrs(adapter_config={"lora_alpha": ALPHA})
        found = causes(table_of(fused(base), fused(other), ds))
        assert found == {"model.layers.1.self_attn.qkv_proj.weight": "merged"}
        other["model.layers.1.self_attn.q_proj.weight"] = numbers(EMBD, EMBD)
        assert table_of(fused(base), fused(other), ds)["outcome"].eq("changed").sum() == 1

    def test_the_rows_of_a_whole_are_divided_among_its_parts(self) -> None:
        base = llama()
        whole = fused(base)
        names = {name: name for name in whole if "qkv" in name or "gate_up" in name}
        other = merged(whole, names)
        split: Tensors = {}
        for name, array in other.items():
            if "qkv" in name:
                parts = np.split(array, [EMBD, EMBD + EMBD // 2])
                split |= {name.replace("qkv", x): p for x, p in zip("qkv", parts, strict=True)}
            elif "gate_up" in name:
                for x, part in zip(("gate", "up"), np.split(array, 2), strict=True):
                    split[name.replace("gate_up", x)] = part
            else:
                split[name] = array
        adapter: Tensors = {}
        for name in names:
            a, b = factors(name, *whole[name].shape)
            module = name.removesuffix(".weight")
            adapter |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        ds = xckpt.open(adapter).assign_attrs(adapter_config={"lora_alpha": ALPHA})
        assert set(causes(table_of(base, split, ds)).values()) == {"merged"}
        assert len(causes(table_of(base, split, ds))) == 5 * LAYERS

    def test_parts_that_alternate_are_refused(self) -> None:
        layer = "gpt_neox.layers.0"
        shapes = {
            "gpt_neox.embed_in.weight": (VOCAB, EMBD), "embed_out.weight": (VOCAB, EMBD),
            "gpt_neox.final_layer_norm.weight": (EMBD,),
            f"{layer}.attention.query_key_value.weight": (3 * EMBD, EMBD),
            f"{layer}.attention.dense.weight": (EMBD, EMBD),
            f"{layer}.mlp.dense_h_to_4h.weight": (FF, EMBD),
            f"{layer}.mlp.dense_4h_to_h.weight": (EMBD, FF),
            f"{layer}.input_layernorm.weight": (EMBD,),
        }  # fmt: skip
        base = {name: numbers(*shape, seed=name) for name, shape in shapes.items()}
        a, b = factors("q", EMBD, EMBD)
        adapter = {"blk.0.attn_q.weight.lora_a": a, "blk.0.attn_q.weight.lora_b": b}
        attrs = {"general.architecture": "gptneox", "adapter.lora.alpha": ALPHA}
        table = table_of(base, base, xckpt.open(adapter).assign_attrs(attrs))
        text = table.loc[f"{layer}.attention.query_key_value.weight", "explanation"]
        assert "head by head" in text


class TestEmbeddings:
    @pytest.mark.parametrize("wrap", [in_folder, in_gguf])
    def test_a_tied_head_is_the_embedding(self, wrap: Any) -> None:
        base = llama()
        del base["lm_head.weight"]
        name = "model.embed_tokens.weight"
        other = merged(base, {name: "head"})
        a, b = factors("head", VOCAB, EMBD)
        adapter = {"base_model.model.lm_head.lora_A.weight": a,
                   "base_model.model.lm_head.lora_B.weight": b}  # fmt: skip
        ds = xckpt.open(adapter).assign_attrs(adapter_config={"lora_alpha": ALPHA})
        table = table_of(wrap(base, "llama"), wrap(other, "llama"), ds)
        assert list(causes(table).values()) == ["merged"]

    @pytest.mark.parametrize("wrap", [in_folder, in_gguf])
    def test_rows_of_trained_tokens_are_verified(self, wrap: Any) -> None:
        base, name = llama(), "model.embed_tokens.weight"
        rows = [7, 3, 30]
        delta = numbers(3, EMBD, seed="delta")
        other = dict(base) | {name: base[name].copy()}
        other[name][rows] = delta
        key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
        config = {"peft_type": "LORA", "trainable_token_indices": {"embed_tokens": rows}}
        ds = xckpt.open({key: delta}).assign_attrs(adapter_config=config)
        table = table_of(wrap(base, "llama"), wrap(other, "llama"), ds)
        assert list(causes(table).values()) == ["merged"]
        other[name][7] += 1
        assert (
            table_of(wrap(base, "llama"), wrap(other, "llama"), ds)["outcome"].eq("changed").any()
        )
        other[name] = base[name].copy()
        other[name][[7, 3, 31]] = delta
        assert (
            table_of(wrap(base, "llama"), wrap(other, "llama"), ds)["outcome"].eq("changed").any()
        )

    def test_a_resized_embedding_is_the_one_of_the_adapter(self) -> None:
        base, name = llama(), "model.embed_tokens.weight"
        saved = numbers(VOCAB + 2, EMBD, seed="saved")
        ds = xckpt.open({f"base_model.model.{name}": saved, **dict(zip(
            ("base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"),
            factors("head", VOCAB, EMBD), strict=True))})  # fmt: skip
        ds = ds.assign_attrs(adapter_config={"lora_alpha": ALPHA})
        other = merged(base, {"lm_head.weight": "head"}) | {name: saved}
        assert causes(table_of(base, other, ds)) == {name: "merged", "lm_head.weight": "merged"}
        other[name] = saved + 1
        assert table_of(base, other, ds).loc[name, "outcome"] == "changed"


# --- Stable Diffusion -----------------------------------------------------------------------------

SIDE = 8
# Names in diffusers, and in single files.
UNET = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "down_blocks.0.resnets.0.conv1": "input_blocks.1.0.in_layers.2",
    "down_blocks.0.resnets.0.time_emb_proj": "input_blocks.1.0.emb_layers.1",
    "down_blocks.0.resnets.1.conv1": "input_blocks.2.0.in_layers.2",
    "down_blocks.0.attentions.0.proj_in": "input_blocks.1.1.proj_in",
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q":
        "input_blocks.1.1.transformer_blocks.0.attn1.to_q",
    "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_q":
        "input_blocks.2.1.transformer_blocks.0.attn1.to_q",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
    "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0":
        "input_blocks.4.1.transformer_blocks.0.attn2.to_out.0",
    "down_blocks.1.attentions.0.transformer_blocks.1.ff.net.0.proj":
        "input_blocks.4.1.transformer_blocks.1.ff.net.0.proj",
    "down_blocks.1.resnets.1.conv_shortcut": "input_blocks.5.0.skip_connection",
    "mid_block.resnets.0.conv2": "middle_block.0.out_layers.3",
    "mid_block.resnets.1.conv2": "middle_block.2.out_layers.3",
    "mid_block.attentions.0.transformer_blocks.0.attn1.to_q":
        "middle_block.1.transformer_blocks.0.attn1.to_q",
    "up_blocks.0.resnets.2.conv1": "output_blocks.2.0.in_layers.2",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.2.1.conv",
    "up_blocks.1.attentions.1.transformer_blocks.0.attn1.to_v":
        "output_blocks.4.1.transformer_blocks.0.attn1.to_v",
    "conv_out": "out.2",
}  # fmt: skip
CONVOLUTION = re.compile(r"(conv_in|conv_out|conv[12]?|conv_shortcut)$")
TEXT = {
    **{f"self_attn.{x}_proj": "" for x in "qkv"},
    "self_attn.out_proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
}  # fmt: skip


def text_encoder() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "text_model.embeddings.token_embedding": (VOCAB, SIDE),
        "text_model.embeddings.position_embedding": (16, SIDE),
        "text_model.final_layer_norm": (SIDE,),
    }
    for n in range(2):
        layer = f"text_model.encoder.layers.{n}"
        shapes |= {f"{layer}.{name}": (SIDE, SIDE) for name in TEXT}
        shapes |= {f"{layer}.layer_norm{m}": (SIDE,) for m in (1, 2)}
    return shapes


TEXT_MODULES = [n for n, s in text_encoder().items() if len(s) == 2 and "embedd" not in n]


def shape_of(name: str) -> tuple[int, ...]:
    return (SIDE, SIDE, 3, 3) if CONVOLUTION.search(name) else (SIDE, SIDE)


class Pipeline:
    """Stable Diffusion XL in small: the tensors of its components by their names in diffusers."""

    def __init__(self) -> None:
        parts = {"unet": {name: shape_of(name) for name in UNET}, "text_encoder": text_encoder(),
                 "text_encoder_2": text_encoder()}  # fmt: skip
        self.parts = {
            part: {f"{n}.weight": numbers(*s, seed=f"{part} {n}") for n, s in shapes.items()}
            for part, shapes in parts.items()
        }

    def merged(self, *parts: str, scale: float = ALPHA / RANK) -> Pipeline:
        """Return the pipeline with the adapters of `kohya` merged into some parts."""
        other = Pipeline()
        for part in parts:
            names = UNET if part == "unet" else TEXT_MODULES
            keys = {f"{name}.weight": f"{part} {name}" for name in names}
            other.parts[part] = merged(self.parts[part], keys, scale)
        return other

    def single(self) -> Tensors:
        """Return the tensors of a single file."""
        result = {
            f"model.diffusion_model.{UNET[name.removesuffix('.weight')]}.weight": array
            for name, array in self.parts["unet"].items()
        }
        first = self.parts["text_encoder"]
        result |= {f"conditioner.embedders.0.transformer.{name}": t for name, t in first.items()}
        start = "conditioner.embedders.1.model."
        second = {n.removesuffix(".weight"): t for n, t in self.parts["text_encoder_2"].items()}
        result |= {
            f"{start}token_embedding.weight": second["text_model.embeddings.token_embedding"],
            f"{start}positional_embedding": second["text_model.embeddings.position_embedding"],
            f"{start}ln_final.weight": second["text_model.final_layer_norm"],
        }
        for n in range(2):
            layer, block = f"text_model.encoder.layers.{n}", f"{start}transformer.resblocks.{n}"
            qkv = [second[f"{layer}.self_attn.{x}_proj"] for x in "qkv"]
            result[f"{block}.attn.in_proj_weight"] = np.concatenate(qkv)
            result |= {
                f"{block}.{to}.weight": second[f"{layer}.{n}"] for n, to in TEXT.items() if to
            }
            result |= {f"{block}.ln_{m}.weight": second[f"{layer}.layer_norm{m}"] for m in (1, 2)}
        return result


def kohya(
    *parts: str, single: bool = False, alpha: bool = True, prefixes: Mapping[str, str] | None = None
) -> Tensors:
    """Return an adapter by kohya, of diffusers' modules or those of single files."""
    prefixes = prefixes or {"unet": "unet", "text_encoder": "te1", "text_encoder_2": "te2"}
    tensors: Tensors = {}
    for part in parts:
        for name in UNET if part == "unet" else TEXT_MODULES:
            a, b = factors(f"{part} {name}", *shape_of(name))
            path = UNET[name] if single and part == "unet" else name
            key = f"lora_{prefixes[part]}_{path.replace('.', '_')}"
            tensors |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
            if alpha:
                tensors[f"{key}.alpha"] = np.array(ALPHA, np.float32)
    return tensors


ALL = ("unet", "text_encoder", "text_encoder_2")


class TestStableDiffusion:
    @pytest.mark.parametrize("single", [False, True])
    def test_kohya_fits_a_single_file(self, single: bool) -> None:
        base = Pipeline()
        other = base.merged(*ALL)
        table = table_of(base.single(), other.single(), kohya(*ALL, single=single))
        found = causes(table)
        assert set(found.values()) == {"merged"}
        # Queries, keys and values of the second text encoder are one tensor.
        assert len(found) == len(UNET) + len(TEXT_MODULES) + len(TEXT_MODULES) - 2 * 2

    @pytest.mark.parametrize("single", [False, True])
    def test_kohya_fits_the_unet_of_diffusers(self, single: bool) -> None:
        base = Pipeline()
        other = base.merged("unet").parts["unet"]
        table = table_of(base.parts["unet"], other, kohya("unet", single=single))
        assert set(table["cause"]) == {"merged"}

    @pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
    def test_the_text_encoders_are_not_mixed_up(self, part: str) -> None:
        base = Pipeline()
        both = base.merged("text_encoder", "text_encoder_2").single()
        one = base.merged(part).single()
        adapter = kohya(part)
        assert set(causes(table_of(base.single(), one, adapter)).values()) == {"merged"}
        changed = table_of(base.single(), both, adapter)
        others = changed[(changed["cause"] != "merged") & (changed["cause"] != "equal")].index
        number = 1 if part == "text_encoder" else 0
        assert all(name.startswith(f"conditioner.embedders.{number}.") for name in others)
        assert len(others)

    def test_the_folder_of_a_component_names_it(self, tmp_path: Path) -> None:
        base = Pipeline()
        other = base.merged("text_encoder", "text_encoder_2")
        adapter = kohya("text_encoder", "text_encoder_2")
        paths = []
        for pipeline, name in ((base, "base"), (other, "merged")):
            for part in ("text_encoder_2", "anonymous"):
                folder = tmp_path / name / part
                folder.mkdir(parents=True)
                xckpt.save(pipeline.parts["text_encoder_2"], folder / "model.safetensors")
                paths.append(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table = table_of(paths[0], paths[2], adapter)
        assert set(causes(table).values()) == {"merged"}
        with pytest.raises(ValueError, match=r"'lora_te1_\w+', 'lora_te2_\w+'"):
            table_of(paths[1], paths[3], adapter)

    @pytest.mark.parametrize("part", ["unet", "text_encoder"])
    @pytest.mark.parametrize("is_named", [False, True])
    def test_tensors_of_other_parts_are_not_missing(
        self, is_named: bool, part: str, tmp_path: Path
    ) -> None:
        base, adapter = Pipeline(), kohya("unet", "text_encoder")
        folder = tmp_path / (part if is_named else "model")
        folder.mkdir()
        xckpt.save(base.parts[part], folder / "model.safetensors")
        other = base.merged(part).parts[part]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            new = xckpt.open(folder).ckpt.merge(adapter)
            assert set(causes(table_of(folder, other, adapter)).values()) == {"merged"}
        for name, array in other.items():
            np.testing.assert_allclose(new[name], array, atol=1e-6)
        name = next(name for name in other if name.endswith(("to_q.weight", "q_proj.weight")))
        text = r"lacks tensors that are to be changed: '\w+_q(_proj)?'$"
        with pytest.warns(CheckpointWarning, match=text):
            xckpt.open(folder).drop_vars(name).ckpt.merge(adapter)

    def test_tensors_that_a_single_file_lacks_in_one_of_its_parts(self) -> None:
        base = Pipeline().single()
        names = [n for n in base if "diffusion_model" in n or n.endswith("final_layer_norm.weight")]
        model = xckpt.open(base)[names]
        with pytest.warns(CheckpointWarning, match="to be changed: 'lora_te1_text_model"):
            model.ckpt.merge(kohya("unet", "text_encoder", single=True))

    def test_the_shape_decides_between_text_encoders(self) -> None:
        base = Pipeline()
        other = base.merged("text_encoder").parts["text_encoder"]
        adapter = kohya("text_encoder", "text_encoder_2")
        for name, array in adapter.items():
            if "te2" in name and array.ndim == 2:
                adapter[name] = numbers(*[2 * n if n == SIDE else n for n in array.shape])
        with pytest.warns(CheckpointWarning, match="a lacks: 'lora_te2_"):
            table = table_of(base.parts["text_encoder"], other, adapter)
        assert set(causes(table).values()) == {"merged"}

    def test_without_alpha_the_scale_is_1(self) -> None:
        base = Pipeline()
        other = base.merged("unet", scale=1)
        adapter = kohya("unet", alpha=False)
        table = xckpt.open(adapter).ckpt.adapters()
        assert table["scale"].tolist() == [1.0] * len(UNET)
        assert table["alpha"].isna().all()
        table = table_of(base.parts["unet"], other.parts["unet"], adapter)
        assert set(table["cause"]) == {"merged"}

    @pytest.mark.parametrize("form", ["lora_A", "lora", "lora_linear_layer", "processor"])
    def test_diffusers_in_its_spellings(self, form: str) -> None:
        base = Pipeline()
        other = base.merged("unet", "text_encoder", scale=1)
        adapter: Tensors = {}
        for part, names in (("unet", UNET), ("text_encoder", TEXT_MODULES)):
            for name in names:
                ends = ("lora_A", "lora_B") if form == "lora_A" else (
                    f"{'lora' if form == 'processor' else form}.down",
                    f"{'lora' if form == 'processor' else form}.up",
                )  # fmt: skip
                key = f"{part}.{name}."
                if form == "processor" and re.search(r"attn\d?\.", name):
                    head, _, last = name.replace("to_out.0", "to_out").rpartition(".")
                    last = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v",
                            "out_proj": "to_out"}.get(last, last)  # fmt: skip
                    middle = "processor." if part == "unet" else ""
                    key = f"{part}.{head}.{middle}{last}_"
                arrays = factors(f"{part} {name}", *shape_of(name))
                adapter |= {f"{key}{end}.weight": t for end, t in zip(ends, arrays, strict=True)}
        found = causes(table_of(base.single(), other.single(), adapter))
        assert set(found.values()) == {"merged"}
        assert len(found) == len(UNET) + len(TEXT_MODULES)

    def test_an_unknown_model_matches_by_flat_names(self) -> None:
        names = ["double_blocks.0.img_attn.proj", "double_blocks.0.txt_attn.proj",
                 "single_blocks.11.linear1"]  # fmt: skip
        base = {f"model.diffusion_model.{n}.weight": numbers(8, 8, seed=n) for n in names}
        other = merged(base, {name: name for name in base})
        adapter: Tensors = {}
        for name in base:
            key = "lora_unet_" + name[22:-7].replace(".", "_")
            a, b = factors(name, 8, 8)
            adapter |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b,
                        f"{key}.alpha": np.array(ALPHA, np.float32)}  # fmt: skip
        assert set(table_of(base, other, adapter)["cause"]) == {"merged"}


# --- evidence -------------------------------------------------------------------------------------


def two_towers(layers: tuple[int, int]) -> Tensors:
    return {
        f"{front}.layers.{n}.{module}.weight": numbers(8, 8, seed=f"{front} {n} {module}")
        for front, count in zip(("language_model.model", "vision_tower"), layers, strict=True)
        for n in range(count)
        for module in ("q_proj", "v_proj")
    }


def adapter_of(names: list[str], keys: list[str]) -> Any:
    tensors: Tensors = {}
    for name, key in zip(names, keys, strict=True):
        a, b = factors(key, 8, 8)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    return xckpt.open(tensors).assign_attrs(adapter_config={"lora_alpha": ALPHA})


class TestEvidence:
    def test_the_model_with_all_modules_is_the_base(self) -> None:
        base = two_towers((3, 2))
        names = [f"layers.{n}.q_proj" for n in range(3)]
        keys = [f"language_model.model.{name}.weight" for name in names]
        other = merged(base, dict(zip(keys, keys, strict=True)))
        assert causes(table_of(base, other, adapter_of(names, keys))) == dict.fromkeys(
            keys, "merged"
        )

    def test_an_end_that_several_modules_share_is_an_error_that_names_them(self) -> None:
        base = two_towers((3, 2))
        names = [f"layers.{n}.q_proj" for n in range(2)]
        with pytest.raises(
            ValueError,
            match=r"'layers\.0\.q_proj\.weight' fits 2 tensors of the model: "
            r"'language_model\.model\.layers\.0\.q_proj\.weight', "
            r"'vision_tower\.layers\.0\.q_proj\.weight'",
        ):
            table_of(base, base, adapter_of(names, names))

    def test_equal_flat_names_are_an_error_that_names_them(self) -> None:
        base = {"a_b.c.weight": numbers(8, 8), "a.b_c.weight": numbers(8, 8)}
        a, b = factors("", 8, 8)
        adapter = {"lycoris_a_b_c.lora_down.weight": a, "lycoris_a_b_c.lora_up.weight": b}
        with pytest.raises(ValueError, match=r"'a_b\.c\.weight', 'a\.b_c\.weight'"):
            table_of(base, base, adapter)

    @pytest.mark.parametrize("is_new", [False, True])
    def test_towers_are_told_apart_by_their_names(self, is_new: bool) -> None:
        """Transformers 4.52 renamed `language_model.model` to `model.language_model`."""
        text = {f"language_model.{name}": array for name, array in llama().items()}
        tower = "vision_tower.vision_model.encoder.layers.{}.{}.weight"
        modules = {f"self_attn.{x}_proj": (EMBD, EMBD) for x in ("q", "k", "v", "out")} | {
            "mlp.fc1": (FF, EMBD), "mlp.fc2": (EMBD, FF), "layer_norm1": (EMBD,),
            "layer_norm2": (EMBD,),
        }  # fmt: skip
        vision = {
            tower.format(n, module): numbers(*shape, seed=f"{n}{module}")
            for n in range(LAYERS)
            for module, shape in modules.items()
        }
        base = text | vision
        adapted = [name for name in base if "q_proj" in name]
        keys = {name: name.removesuffix(".weight") for name in adapted}
        if is_new:
            for name in adapted:
                keys[name] = keys[name].replace("language_model.model", "language_model")
                keys[name] = f"model.{keys[name]}"
        tensors: Tensors = {}
        for key in keys.values():
            a, b = factors(key, EMBD, EMBD)
            module = f"base_model.model.{key}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        adapter = xckpt.open(tensors).assign_attrs(adapter_config={"r": RANK, "lora_alpha": ALPHA})
        config = {"model_type": "llava", "text_config": {"model_type": "llama"},
                  "vision_config": {"model_type": "clip_vision_model"}}  # fmt: skip
        result = xckpt.open(base).assign_attrs(config=config).ckpt.merge(adapter)
        expected = merged(base, keys)
        for name in expected:
            np.testing.assert_allclose(result[name], expected[name], rtol=1e-6, atol=1e-7)

    def test_a_tensor_that_has_the_name_in_two_ways_is_one(self) -> None:
        names = [f"transformer.blocks.{n}.attn.Wqkv.weight" for n in range(2)]
        base = {name: numbers(8, 4, seed=name) for name in names}
        other = merged(base, {name: name for name in names})
        tensors: Tensors = {}
        for name in names:
            a, b = factors(name, 8, 4)
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
        result = xckpt.open(base).ckpt.merge(
            xckpt.open(tensors).assign_attrs(adapter_config=config)
        )
        for name in names:
            np.testing.assert_allclose(result[name], other[name], rtol=1e-6)

    def test_an_equal_name_outranks_an_equal_end(self) -> None:
        base = {"layers.0.q_proj.weight": numbers(8, 8), "b.layers.0.q_proj.weight": numbers(8, 8)}
        name = "layers.0.q_proj.weight"
        other = merged(base, {name: name})
        adapter = adapter_of(["layers.0.q_proj"], [name])
        assert causes(table_of(base, other, adapter)) == {name: "merged"}

    def test_a_model_of_another_family_lacks_the_tensors(self) -> None:
        base = {f"blocks.{n}.conv.weight": numbers(8, 8) for n in range(3)}
        adapter = adapter_of(["model.layers.0.self_attn.q_proj"], ["q"])
        with pytest.warns(CheckpointWarning, match="a lacks"):
            assert table_of(base, base, adapter)["cause"].eq("equal").all()


class TestScalesThatFit:
    @pytest.mark.parametrize("scale", [1.5, 0.7, 2**-0.5, -3])
    def test_a_scale_that_is_not_stated_is_found(self, scale: float) -> None:
        base = llama()
        other = merged(base, {name: name for name in ADAPTED}, scale)
        table = table_of(base, other, by_peft("").drop_attrs(deep=False))
        assert set(causes(table).values()) == {"merged"}
        text = table.loc[ADAPTED[0], "explanation"]
        assert f"{scale:.6g} is the scale that fits, as adapter_config.json is missing" in text

    def test_without_a_merge_no_scale_fits(self) -> None:
        base = llama()
        other = dict(base) | {ADAPTED[1]: base[ADAPTED[1]] + numbers(*base[ADAPTED[1]].shape)}
        table = table_of(base, other, by_peft("").drop_attrs(deep=False))
        assert table.loc[ADAPTED, "outcome"].eq("changed").all()
        assert table.loc[ADAPTED[0], "explanation"].endswith("b is equal to a")
        assert "no scale fits" in table.loc[ADAPTED[1], "explanation"]
