"""Merges by PEFT and diffusers are verified: adapters as these libraries save them."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.structure.libraries import CASES

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 4, "lora_alpha": 6}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", LORA),
    "rsLoRA and biases": ("LoraConfig", LORA | {"use_rslora": True, "bias": "lora_only"}),
    "DoRA": ("LoraConfig", LORA | {"use_dora": True}),
    "patterns": (
        "LoraConfig", LORA | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 9}},
    ),
    "embedding": ("LoraConfig", LORA | {"target_modules": ["q_proj", "embed_tokens"]}),
    "saved modules": ("LoraConfig", LORA | {"modules_to_save": ["lm_head", "norm"]}),
    "tokens": ("LoraConfig", LORA | {"trainable_token_indices": [7, 3]}),
    "tokens alone": (
        "TrainableTokensConfig", {"token_indices": [7, 3], "target_modules": ["embed_tokens"]},
    ),
    "LoHa": ("LoHaConfig", {"r": 4, "alpha": 6}),
    "LoKr": ("LoKrConfig", {"r": 2, "alpha": 6, "decompose_both": True}),
    "LoKr of whole matrices": ("LoKrConfig", {"r": 64, "alpha": 6}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 4, "target_r": 4, "lora_alpha": 6, "total_step": 9}),
    "(IA)³": (
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
}  # fmt: skip
TRAINED = ("lora_", "hada", "lokr", "ia3", "trainable_tokens", "modules_to_save")


def llama(*, tied: bool = False) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, pad_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def merge(model: Any, config: Any, folder: Path) -> list[Path]:
    """Save a model, an adapter of it, and the merged model; return their folders."""
    paths = [folder / name for name in ("base", "adapter", "merged")]
    model.save_pretrained(paths[0])
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if any(word in name for word in TRAINED):
            parameter.data = torch.randn_like(parameter) * 0.1 + ("ia3" in name)
    adapted.save_pretrained(paths[1])
    adapted.merge_and_unload().save_pretrained(paths[2])
    return paths


def causes_of(base: Any, merged: Any, adapter: Any) -> set[str]:
    table = xckpt.compare(base, merged, adapter=adapter, progress=False).ckpt.table()
    assert set(table["outcome"]) <= {"explained", "same"}
    return set(table["cause"])


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_what_peft_merges_is_verified(kind: str, tied: bool, tmp_path: Path) -> None:
    name, options = CONFIGS[kind]
    config = getattr(peft, name)(**{"target_modules": MODULES} | options)
    base, adapter, merged = merge(llama(tied=tied), config, tmp_path)
    assert causes_of(base, merged, adapter) == {"merged", "equal"}
    ours = xckpt.open(base).ckpt.merge(adapter)
    for tensor, expected in xckpt.open(merged).items():
        np.testing.assert_allclose(ours[tensor], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("edit", "left_out"),
    [
        ({"target_modules": ["q_proj"]}, 4),
        ({"target_modules": r"model\.layers\.0\..*(q|v|down)_proj"}, 3),
        ({"layers_to_transform": [0]}, 3),
        ({"layers_to_transform": 0}, 3),
        ({}, 0),
    ],
)
def test_modules_that_the_config_leaves_out_are_named(
    edit: dict[str, Any], left_out: int, tmp_path: Path
) -> None:
    modules = ["q_proj", "v_proj", "down_proj"]
    base, adapter, _ = merge(llama(), peft.LoraConfig(**LORA, target_modules=modules), tmp_path)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", xckpt.CheckpointWarning)
        xckpt.open(base).ckpt.merge(adapter)
    messages = [str(w.message) for w in caught if "leave out modules" in str(w.message)]
    assert len(messages) == bool(left_out)
    assert all("v_proj.weight" in text for text in messages)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    names = [name for name, _ in peft.PeftModel.from_pretrained(model, adapter).named_modules()]
    assert sum(name.endswith("_proj.lora_A") for name in names) == 6 - left_out


@pytest.mark.parametrize("tied", [False, True])
def test_factors_of_resized_embeddings_change_the_new_rows(tied: bool, tmp_path: Path) -> None:
    base = llama(tied=tied)
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(99)
    config = peft.LoraConfig(**LORA, target_modules=["q_proj", "embed_tokens"])
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "lora")
    ds = xckpt.open(tmp_path / "base")
    if not tied:
        with pytest.raises(ValueError, match=r"99 rows .* no such 'lm_head.weight'"):
            ds.ckpt.merge(tmp_path / "lora")
        ds = ds.drop_vars("lm_head.weight")
    merged = ds.ckpt.merge(tmp_path / "lora")
    expected = model.merge_and_unload().state_dict()
    for name, variable in merged.items():
        np.testing.assert_array_equal(variable, expected[name].numpy(), err_msg=str(name))


def test_conv1d_of_gpt2_is_verified(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96)
    lora = peft.LoraConfig(**LORA, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = transformers.GPT2LMHeadModel(config)
    base, adapter, merged = merge(model, lora, tmp_path)
    assert causes_of(base, merged, adapter) == {"merged", "equal"}
    ours = xckpt.open(base).ckpt.merge(adapter)
    for tensor, expected in xckpt.open(merged).items():
        np.testing.assert_allclose(ours[tensor], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_alpha", [True, False])
def test_what_diffusers_fuses_of_kohya_is_verified(has_alpha: bool, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet = CASES["unet"].build()
    encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            hidden_size=32, intermediate_size=40, num_attention_heads=4, num_hidden_layers=2,
            vocab_size=96,
        )
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        unet=unet, text_encoder=encoder, vae=CASES["vae"].build(), tokenizer=None,
        scheduler=diffusers.DDIMScheduler(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    adapter = {}
    for prefix, model in (("lora_unet", unet), ("lora_te", encoder)):
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and "att" in name:
                is_whole = model is unet or name.startswith("text_model.")
                path = name if is_whole else f"text_model.{name}"
                key = f"{prefix}_{path.replace('.', '_')}"
                out, inner = module.weight.shape
                adapter[f"{key}.lora_down.weight"] = torch.randn(3, inner) * 0.1
                adapter[f"{key}.lora_up.weight"] = torch.randn(out, 3) * 0.1
                if has_alpha:
                    adapter[f"{key}.alpha"] = torch.tensor(2.0)
    parts = {"unet": unet, "text_encoder": encoder}
    for name, part in parts.items():
        part.save_pretrained(tmp_path / "base" / name)
    pipeline.load_lora_weights(dict(adapter))
    pipeline.fuse_lora(components=list(parts))
    pipeline.unload_lora_weights()
    for name, part in parts.items():
        part.save_pretrained(tmp_path / "merged" / name)
        base, merged = tmp_path / "base" / name, tmp_path / "merged" / name
        assert causes_of(base, merged, adapter) == {"merged", "equal"}


SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
MOES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 3}),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"num_experts": 3, "moe_intermediate_size": 24},
    ),
    "gpt-oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {"num_local_experts": 3, "layer_types": ["full_attention"] * 2},
    ),
    "Llama 4": ("Llama4ForCausalLM", "Llama4TextConfig", {"num_local_experts": 3}),
}  # fmt: skip
NAMED = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
PATTERNS = {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"gate_up_proj": 5}}
TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("Mixtral", {"target_modules": ["w1", "w2", "w3"]}),
    ("Mixtral", {"target_modules": ["w2"], "use_rslora": True}),
    ("Mixtral", {"target_modules": "all-linear"}),
    ("Mixtral", {"target_modules": ["q_proj", "gate"]}),
    ("Mixtral", {"target_modules": ["q_proj"]} | NAMED | PATTERNS),
    ("Qwen3-MoE", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    ("Qwen3-MoE", {"target_modules": "all-linear"}),
    ("Qwen3-MoE", {"target_modules": ["gate", "v_proj"]}),
    ("gpt-oss", {"target_modules": ["q_proj"]} | NAMED | PATTERNS),
    (
        "gpt-oss",
        {
            "target_modules": [],
            "target_parameters": [
                "router.weight", "experts.down_proj_bias", "gate_up_proj", "down_proj",
                "experts.gate_up_proj_bias",
            ],
        },
    ),
    ("gpt-oss", {"target_modules": [], "target_parameters": ["layers.1.mlp.experts.down_proj"]}),
    ("Llama 4", {"target_modules": "all-linear"} | NAMED),
]  # fmt: skip


def moe(kind: str, **sizes: int) -> Any:
    model, config, stated = MOES[kind]
    torch.manual_seed(0)
    options = SIZES | {"intermediate_size": 40} | stated | sizes
    return getattr(transformers, model)(getattr(transformers, config)(**options))


class TestExperts:
    """PEFT adapts fused experts of transformers 5, which saves some models expert by expert."""

    @pytest.mark.parametrize(("kind", "options"), TARGETS)
    def test_merges_are_verified(self, kind: str, options: dict[str, Any], tmp_path: Path) -> None:
        base, adapter, merged = merge(moe(kind), peft.LoraConfig(**LORA | options), tmp_path)
        assert causes_of(base, merged, adapter) == {"merged", "equal"}
        ours, theirs = xckpt.open(base).ckpt.merge(adapter), xckpt.open(merged)
        assert set(ours) == set(theirs)
        for tensor, expected in theirs.items():
            np.testing.assert_allclose(ours[tensor], expected, rtol=1e-6, atol=1e-6)

    def test_a_merged_model_loads(self, tmp_path: Path) -> None:
        config = peft.LoraConfig(**LORA, target_modules="all-linear")
        base, adapter, merged = merge(moe("Mixtral"), config, tmp_path)
        xckpt.open(base).ckpt.merge(adapter).ckpt.save(tmp_path / "ours")
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            ours, theirs = (
                transformers.MixtralForCausalLM.from_pretrained(path)(tokens).logits
                for path in (tmp_path / "ours", merged)
            )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def test_a_state_dict_has_the_parameters_of_the_module(self, tmp_path: Path) -> None:
        model = moe("Mixtral")
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        config = peft.LoraConfig(**LORA, target_modules=["w1", "w2", "w3"])
        adapted = peft.get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) * 0.1
        adapted.save_pretrained(tmp_path)
        ours = xckpt.open(state).ckpt.merge(tmp_path)
        for tensor, expected in adapted.merge_and_unload().state_dict().items():
            np.testing.assert_allclose(ours[tensor], expected, rtol=1e-6, atol=1e-6)

    def test_another_number_of_experts_is_an_error(self, tmp_path: Path) -> None:
        config = peft.LoraConfig(**LORA, target_modules=["w1", "w2", "w3"])
        _, adapter, _ = merge(moe("Mixtral"), config, tmp_path)
        moe("Mixtral", num_local_experts=4).save_pretrained(tmp_path / "other")
        with pytest.raises(xckpt.UnsupportedError, match="3 experts in the adapter"):
            xckpt.open(tmp_path / "other").ckpt.merge(adapter)


class TestExtracting:
    """PEFT loads extracted adapters, and merges them into the tuned model."""

    @staticmethod
    def tune(model: Any, ranks: dict[str, int]) -> None:
        """Add updates of known ranks to weights."""
        weights = dict(model.named_parameters())
        for name, rank in ranks.items():
            shape = weights[name].shape
            update = torch.randn(shape[0], rank) @ torch.randn(rank, shape[1]) / 50
            weights[name].data += update

    @staticmethod
    def merged(base: Path, adapter: Path) -> dict[str, Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        loaded = peft.PeftModel.from_pretrained(model, adapter)
        return dict(loaded.merge_and_unload().state_dict())

    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    def test_planted_updates_are_merged_to_the_tuned_model(self, kind: str, tmp_path: Path) -> None:
        ranks = {
            f"model.layers.{n}.mlp.{m}_proj.weight": 2 + n for n in (0, 1) for m in ("up", "down")
        }
        ranks["model.layers.1.self_attn.q_proj.weight"] = 5
        model = llama()
        if kind == "gpt2":
            config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96)
            model = transformers.GPT2LMHeadModel(config)
            ranks = {"transformer.h.0.attn.c_attn.weight": 3, "transformer.h.1.mlp.c_fc.weight": 2}
        model.save_pretrained(tmp_path / "base")
        self.tune(model, ranks)
        model.save_pretrained(tmp_path / "tuned")
        table = xckpt.extract_adapter(tmp_path / "base", tmp_path / "tuned", tmp_path / "a", 8)
        assert table["rank"].to_dict() == ranks
        merged = self.merged(tmp_path / "base", tmp_path / "a")
        for name, weight in model.state_dict().items():
            assert torch.allclose(merged[name], weight, rtol=0, atol=1e-6), name

    @pytest.mark.parametrize("energy", [0.8, 0.95])
    def test_the_merged_model_has_the_stated_energy(self, energy: float, tmp_path: Path) -> None:
        model = llama()
        model.save_pretrained(tmp_path / "base")
        base = {name: weight.clone() for name, weight in model.state_dict().items()}
        linear = [name for name in base if "_proj" in name]
        for name in linear:
            dict(model.named_parameters())[name].data += torch.randn(base[name].shape) / 50
        model.save_pretrained(tmp_path / "tuned")
        table = xckpt.extract_adapter(
            tmp_path / "base", tmp_path / "tuned", tmp_path / "a", energy=energy
        )
        merged = self.merged(tmp_path / "base", tmp_path / "a")
        tuned = model.state_dict()
        assert sorted(table.index) == sorted(linear)
        for name in linear:
            update = (tuned[name] - base[name]).double()
            kept = 1 - (tuned[name] - merged[name]).double().norm() ** 2 / update.norm() ** 2
            assert kept >= energy
            assert table.loc[name, "energy"] == pytest.approx(float(kept), abs=1e-4)

    def test_a_resized_adapter_merges_to_its_product(self, tmp_path: Path) -> None:
        model = llama()
        merge(model, peft.LoraConfig(**LORA, target_modules=MODULES), tmp_path)
        adapter = tmp_path / "adapter"
        xckpt.resize_adapter(adapter, tmp_path / "same", energy=1.0)
        xckpt.resize_adapter(adapter, tmp_path / "smaller", rank=2)
        expected = self.merged(tmp_path / "base", adapter)
        for name, weight in self.merged(tmp_path / "base", tmp_path / "same").items():
            assert torch.allclose(weight, expected[name], rtol=0, atol=1e-5), name
        base = llama().state_dict()
        for name, weight in self.merged(tmp_path / "base", tmp_path / "smaller").items():
            if "_proj" in name:
                rank = torch.linalg.matrix_rank((weight - base[name]).double(), rtol=1e-4)
                assert rank == 2, name
