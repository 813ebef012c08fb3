"""Configs of published models, as far as their caches and weights follow from them."""

from __future__ import annotations

from typing import Any, NamedTuple


class CachedModel(NamedTuple):
    """A config, and what its cache has for a number of tokens of one sequence."""

    config: dict[str, Any]
    #: Elements of each layer by the number of tokens: factor of tokens, window, fixed, float32.
    layers: list[tuple[int, int, int, int, int]]


def attention(
    layers: int, heads: int, key: int, window: int = 1 << 40
) -> tuple[int, int, int, int, int]:
    return layers, 2 * heads * key, window, 0, 0


def decoder(kind: str, embd: Any, layers: Any, heads: Any, ff: Any, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": embd,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ff,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
        **more,
    }


GRANITE = ["attention" if layer in {5, 15, 25, 35} else "mamba" for layer in range(40)]
MODELS = {
    "gpt2": CachedModel(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
        [attention(12, 12, 64)],
    ),
    "Llama 2 7B": CachedModel(
        decoder("llama", 4096, 32, 32, 11008, num_key_value_heads=32), [attention(32, 32, 128)]
    ),
    "Llama 3.1 8B": CachedModel(
        decoder("llama", 4096, 32, 32, 14336, num_key_value_heads=8), [attention(32, 8, 128)]
    ),
    "Falcon 7B": CachedModel(
        decoder(
            "falcon", 4544, 32, 71, 18176, multi_query=True, new_decoder_architecture=False,
            parallel_attn=True, bias=False, alibi=False,
        ),
        [attention(32, 1, 64)],
    ),
    "DeepSeek V2 Lite": CachedModel(
        decoder(
            "deepseek_v2", 2048, 27, 16, 10944, num_key_value_heads=16, kv_lora_rank=512,
            q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
            num_experts_per_tok=6, first_k_dense_replace=1,
        ),
        [(27, 512 + 64, 1 << 40, 0, 0)],
    ),
    "Gemma 2 9B": CachedModel(
        decoder(
            "gemma2", 3584, 42, 16, 14336, num_key_value_heads=8, head_dim=256,
            sliding_window=4096,
        ),
        [attention(21, 8, 256, 4096), attention(21, 8, 256)],
    ),
    "Gemma 3 1B": CachedModel(
        decoder(
            "gemma3_text", 1152, 26, 4, 6912, num_key_value_heads=1, head_dim=256,
            sliding_window=512, sliding_window_pattern=6,
        ),
        [attention(22, 1, 256, 512), attention(4, 1, 256)],
    ),
    "Mistral 7B v0.1": CachedModel(
        decoder("mistral", 4096, 32, 32, 14336, num_key_value_heads=8, sliding_window=4096),
        [attention(32, 8, 128, 4096)],
    ),
    "Qwen 2.5 7B": CachedModel(
        decoder(
            "qwen2", 3584, 28, 28, 18944, num_key_value_heads=4, use_sliding_window=False,
            sliding_window=131072, max_window_layers=28,
        ),
        [attention(28, 4, 128)],
    ),
    "Mixtral 8x7B": CachedModel(
        decoder(
            "mixtral", 4096, 32, 32, 14336, num_key_value_heads=8, sliding_window=None,
            num_local_experts=8, num_experts_per_tok=2,
        ),
        [attention(32, 8, 128)],
    ),
    "gpt-oss 20B": CachedModel(
        decoder(
            "gpt_oss", 2880, 24, 64, 2880, num_key_value_heads=8, head_dim=64,
            sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12,
            num_local_experts=32, num_experts_per_tok=4,
        ),
        [attention(12, 8, 64, 128), attention(12, 8, 64)],
    ),
    "Jamba v0.1": CachedModel(
        decoder(
            "jamba", 4096, 32, 32, 14336, num_key_value_heads=8, attn_layer_period=8,
            attn_layer_offset=4, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16,
            mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=256, num_experts=16,
            num_experts_per_tok=2, use_mamba_kernels=False,
        ),
        [attention(4, 8, 128), (28, 0, 0, 8192 * 4, 8192 * 16)],
    ),
    "Granite 4.0 H Tiny": CachedModel(
        decoder(
            "granitemoehybrid", 1536, 40, 12, 512, num_key_value_heads=4, layer_types=GRANITE,
            mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2,
            mamba_n_groups=1, num_local_experts=64, num_experts_per_tok=6,
            shared_intermediate_size=1024,
        ),
        [attention(4, 4, 128), (36, 0, 0, (3072 + 2 * 128) * 4, 48 * 64 * 128)],
    ),
    "Qwen 3 Next 80B": CachedModel(
        decoder(
            "qwen3_next", 2048, 48, 16, 5120, num_key_value_heads=2, head_dim=256,
            full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
            linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128,
            num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
            shared_expert_intermediate_size=512, decoder_sparse_step=1, mlp_only_layers=[],
        ),
        [attention(12, 2, 256), (36, 0, 0, (2 * 16 * 128 + 32 * 128) * 4, 32 * 128 * 128)],
    ),
    "Nemotron H": CachedModel(
        decoder(
            "nemotron_h", 4096, 6, 32, 21504, num_key_value_heads=8, head_dim=128,
            hybrid_override_pattern="M-M-*-", mamba_num_heads=128, mamba_head_dim=64, n_groups=8,
            ssm_state_size=128, conv_kernel=4, expand=2,
        ),
        [attention(1, 8, 128), (2, 0, 0, (8192 + 2 * 8 * 128) * 4, 128 * 64 * 128)],
    ),
    "Falcon H1 1.5B": CachedModel(
        decoder(
            "falcon_h1", 2048, 24, 8, 4096, num_key_value_heads=2, head_dim=128, mamba_d_ssm=3072,
            mamba_n_heads=48, mamba_d_head=64, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2,
            mamba_n_groups=1,
        ),
        [(24, 2 * 2 * 128, 1 << 40, (3072 + 2 * 256) * 4, 48 * 64 * 256)],
    ),
    "LFM2 1.2B": CachedModel(
        decoder(
            "lfm2", 2048, 4, 32, 12288, num_key_value_heads=8, conv_L_cache=3,
            layer_types=["conv", "conv", "full_attention", "conv"], block_ff_dim=12288,
        ),
        [attention(1, 8, 64), (3, 0, 0, 2048 * 3, 0)],
    ),
    "Mamba 2.8B": CachedModel(
        {
            "model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "state_size": 16,
            "conv_kernel": 4, "expand": 2, "intermediate_size": 5120, "time_step_rank": 160,
        },
        [(64, 0, 0, 5120 * 4, 5120 * 16)],
    ),
    "Codestral Mamba 7B": CachedModel(
        {
            "model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64,
            "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4,
            "expand": 2, "vocab_size": 32768,
        },
        [(64, 0, 0, (8192 + 2 * 8 * 128) * 4, 128 * 64 * 128)],
    ),
    "RWKV 4 169M": CachedModel(
        {
            "model_type": "rwkv", "hidden_size": 768, "num_hidden_layers": 12,
            "attention_hidden_size": 768, "intermediate_size": 3072, "vocab_size": 50277,
        },
        [(12, 0, 0, 2 * 768, 3 * 768)],
    ),
    "Gemma 3n": CachedModel(
        decoder(
            "gemma3n_text", 2048, 10, 8, 16384, num_key_value_heads=2, head_dim=256,
            sliding_window=512, num_kv_shared_layers=5,
            layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2,
        ),
        [attention(4, 2, 256, 512), attention(1, 2, 256)],
    ),
    "Llama 4 Scout": CachedModel(
        decoder(
            "llama4_text", 5120, 48, 40, 8192, num_key_value_heads=8, head_dim=128,
            attention_chunk_size=8192, num_local_experts=16, num_experts_per_tok=1,
            intermediate_size_mlp=16384, interleave_moe_layer_step=1, no_rope_layers=[],
        ),
        [attention(36, 8, 128, 8192), attention(12, 8, 128)],
    ),
}  # fmt: skip


#: Tensors by which families are recognised.
EMBEDDINGS = {
    "gpt2": "wte.weight",
    "falcon": "transformer.word_embeddings.weight",
    "rwkv": "rwkv.embeddings.weight",
    **dict.fromkeys(("mamba", "mamba2"), "backbone.embeddings.weight"),
    "bert": "embeddings.word_embeddings.weight",
    "t5": "shared.weight",
}


def nbytes(model: CachedModel, context: int, batch: int, itemsize: int = 2) -> int:
    """Return the size of the cache by the formula of the model."""
    return batch * sum(
        layers * (itemsize * (per_token * min(context, window) + fixed) + 4 * float32)
        for layers, per_token, window, fixed, float32 in model.layers
    )
