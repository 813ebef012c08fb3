"""Small models of transformers, timm, torchvision and diffusers, without values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# All sizes differ, so that no axis has another one's extent.
DECODER = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 112,
    "vocab_size": 331,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
}
OF_DECODER = {
    "embd": 48,
    "ff": 112,
    "vocab": 331,
    "head": 6,
    "head_kv": 2,
    "key": 16,
    "value": 16,
    "qkv": 160,
    "context": 130,
}
ENCODER = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 112,
    "vocab_size": 331,
    "max_position_embeddings": 130,
    "type_vocab_size": 3,
}
OF_ENCODER = {
    "embd": 48,
    "ff": 112,
    "vocab": 331,
    "head": 4,
    "head_kv": 4,
    "key": 12,
    "value": 12,
    "context": 130,
    "type": 3,
}
PICTURE = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 112,
    "image_size": 30,
    "patch_size": 6,
    "num_channels": 5,
}
OF_PICTURE = {
    "embd": 48,
    "ff": 112,
    "head": 4,
    "head_kv": 4,
    "key": 12,
    "value": 12,
    "colour": 5,
    "context": 26,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_routed_experts": 5,
    "n_shared_experts": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 6,
}
OF_MLA = {
    **OF_DECODER,
    "q_lora": 20,
    "kv_lora": 28,
    "rope": 6,
    "nope": 10,
    "key": 16,
    "value": 14,
    "head_kv": 6,
    "expert": 5,
    "ff_exp": 24,
    "ff_shexp": 72,
}


class Case(NamedTuple):
    """A model to build, and what its family is to know about it."""

    family: str
    build: Callable[[], Any]
    #: Sizes of the model; empty if every module has its own.
    sizes: Mapping[str, int] = {}
    #: Family by the names alone, if it is another one.
    by_names: str = ""


def of_transformers(name: str, config: str, **options: Any) -> Callable[[], Any]:
    """Return a function that builds a model of transformers."""

    def build() -> Any:
        transformers = pytest.importorskip("transformers")
        nested = {key: n for key, n in options.items() if key.endswith("_config")}
        parts = {
            key: getattr(transformers, class_name)(**values)
            for key, (class_name, values) in nested.items()
        }
        settings = getattr(transformers, config)(**{**options, **parts})
        return getattr(transformers, name)(settings)

    return build


def of_timm(name: str, **options: Any) -> Callable[[], Any]:
    """Return a function that builds a model of timm."""
    return lambda: pytest.importorskip("timm").create_model(name, **options)


def of_torchvision(name: str, **options: Any) -> Callable[[], Any]:
    """Return a function that builds a model of torchvision."""
    return lambda: getattr(pytest.importorskip("torchvision.models"), name)(**options)


def of_diffusers(name: str, **options: Any) -> Callable[[], Any]:
    """Return a function that builds a model of diffusers."""
    return lambda: getattr(pytest.importorskip("diffusers.models"), name)(**options)


def decoder(prefix: str, head: str = "ForCausalLM", **options: Any) -> Any:
    """Return a function that builds a decoder of transformers."""
    return of_transformers(f"{prefix}{head}", f"{prefix}Config", **{**DECODER, **options})


EXPERTS = {**OF_DECODER, "expert": 5, "ff_exp": 24, "ff_shexp": 40}
GPT2 = {
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 112,
    "n_positions": 130,
    "vocab_size": 331,
}
OF_GPT2 = {**OF_ENCODER, "qkv": 144}
BLOOM = {"hidden_size": 48, "n_layer": 3, "n_head": 4, "vocab_size": 331}
FALCON = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 331,
    "ffn_hidden_size": 112,
}
T5 = {
    "d_model": 48,
    "d_ff": 112,
    "d_kv": 10,
    "num_layers": 3,
    "num_heads": 6,
    "vocab_size": 331,
    "relative_attention_num_buckets": 9,
}
OF_T5 = {
    "embd": 48,
    "ff": 112,
    "head": 6,
    "head_kv": 6,
    "key": 10,
    "value": 10,
    "vocab": 331,
    "bucket": 9,
}
WHISPER = {
    "d_model": 48,
    "encoder_ffn_dim": 112,
    "decoder_ffn_dim": 112,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 331,
    "num_mel_bins": 20,
    "max_source_positions": 70,
    "pad_token_id": 0,
    "max_target_positions": 130,
}
OF_WHISPER = {**OF_ENCODER, "mel": 20, "audio_context": 70}
OF_VISION = {f"vision.{name}": size for name, size in OF_PICTURE.items()}
OF_CLIP = {**OF_ENCODER, **OF_VISION, "projection": 36}
OF_TIMM = {"embd": 192, "ff": 768, "qkv": 576, "head": 3, "value": 64, "colour": 3, "label": 7}
MAMBA = {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": 331, "state_size": 10}
OF_MAMBA = {"embd": 48, "vocab": 331, "state": 10, "inner": 96, "conv": 4, "dt": 7}
UNET = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 40,
    "layers_per_block": 1,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
    "use_linear_projection": True,
}
VAE = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}

BART = {
    **{key: n for key, n in WHISPER.items() if "positions" not in key and "mel" not in key},
    "max_position_embeddings": 130,
}
OF_BART = {key: n for key, n in OF_ENCODER.items() if key not in {"type", "context"}}
SPEECH = {
    **{key: n for key, n in ENCODER.items() if "position" not in key and "type" not in key},
    "conv_dim": (20, 28),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
FLUX = {
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 40,
    "pooled_projection_dim": 28,
}
OF_FLUX = {"embd": 48, "ff": 192, "head": 3, "key": 16, "context_width": 40, "pooled": 28}


QWEN_VISION = {"hidden_size": 32, "num_heads": 4, "intermediate_size": 80}
OF_QWEN_VISION = {
    "embd": 32,
    "ff": 80,
    "qkv": 96,
    "head": 4,
    "head_kv": 4,
    "key": 8,
    "value": 8,
    "colour": 3,
}


def bart(prefix: str, model: str, **options: Any) -> Any:
    """Return a function that builds an encoder and decoder of transformers."""
    return of_transformers(model, f"{prefix}Config", **BART, **options)


CASES = {
    "llama": Case("llama", decoder("Llama"), OF_DECODER),
    "llama base": Case("llama", decoder("Llama", "Model"), OF_DECODER),
    "llama classifier": Case(
        "llama", decoder("Llama", "ForSequenceClassification"), OF_DECODER | {"label": 2}
    ),
    "mistral": Case("mistral", decoder("Mistral"), OF_DECODER, by_names="llama"),
    "mixtral": Case(
        "mixtral",
        decoder("Mixtral", num_local_experts=5),
        EXPERTS | {"ff_exp": 112},
        by_names="llama",
    ),
    "qwen2": Case(
        "qwen2",
        decoder("Qwen2", head_dim=8),
        OF_DECODER | {"key": 8, "value": 8},
        by_names="llama",
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        decoder(
            "Qwen2Moe",
            head_dim=8,
            num_experts=5,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
        ),
        EXPERTS | {"key": 8, "value": 8},
        by_names="llama",
    ),
    "qwen3": Case("qwen3", decoder("Qwen3"), OF_DECODER, by_names="llama"),
    "qwen3_moe": Case(
        "qwen3_moe",
        decoder("Qwen3Moe", num_experts=5, moe_intermediate_size=24),
        EXPERTS,
        by_names="llama",
    ),
    "phi": Case(
        "phi",
        decoder("Phi", head_dim=8),
        OF_DECODER | {"key": 8, "value": 8},
        by_names="llama",
    ),
    "phi3": Case(
        "phi3",
        decoder("Phi3", head_dim=8),
        OF_DECODER | {"key": 8, "value": 8, "qkv": 80},
        by_names="llama",
    ),
    "gemma": Case("gemma", decoder("Gemma"), OF_DECODER, by_names="llama"),
    "gemma2": Case("gemma2", decoder("Gemma2"), OF_DECODER),
    "gemma3": Case(
        "gemma3_text",
        of_transformers("Gemma3ForCausalLM", "Gemma3TextConfig", **DECODER),
        OF_DECODER,
        by_names="gemma2",
    ),
    "olmo": Case(
        "olmo",
        decoder("Olmo", head_dim=8),
        OF_DECODER | {"key": 8, "value": 8},
        by_names="llama",
    ),
    "olmo2": Case("olmo2", decoder("Olmo2", head_dim=8), OF_DECODER | {"key": 8, "value": 8}),
    "olmoe": Case(
        "olmoe",
        decoder("Olmoe", head_dim=8, num_experts=5),
        EXPERTS | {"key": 8, "value": 8, "ff_exp": 112},
        by_names="llama",
    ),
    "deepseek_v2": Case("deepseek_v2", decoder("DeepseekV2", **MLA), OF_MLA, by_names="llama"),
    "deepseek_v3": Case("deepseek_v3", decoder("DeepseekV3", **MLA), OF_MLA, by_names="llama"),
    "gpt_oss": Case(
        "gpt_oss",
        decoder("GptOss", num_local_experts=5),
        EXPERTS | {"ff_exp": 112},
    ),
    "llama4": Case(
        "llama4_text",
        of_transformers(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            **{**DECODER, "intermediate_size": 24},
            intermediate_size_mlp=112,
            num_local_experts=5,
            interleave_moe_layer_step=2,
        ),
        EXPERTS | {"ff_shexp": 24},
        by_names="llama4",
    ),
    "gpt2": Case("gpt2", of_transformers("GPT2LMHeadModel", "GPT2Config", **GPT2), OF_GPT2),
    "gpt_neox": Case(
        "gpt_neox", of_transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", **ENCODER), OF_GPT2
    ),
    "bloom": Case(
        "bloom",
        of_transformers("BloomForCausalLM", "BloomConfig", **BLOOM),
        OF_GPT2 | {"ff": 192},
    ),
    "falcon": Case(
        "falcon",
        of_transformers("FalconForCausalLM", "FalconConfig", **FALCON),
        OF_ENCODER | {"qkv": 72},
    ),
    "falcon new": Case(
        "falcon",
        of_transformers(
            "FalconForCausalLM",
            "FalconConfig",
            **FALCON,
            new_decoder_architecture=True,
            num_kv_heads=2,
        ),
        OF_ENCODER | {"qkv": 96},
    ),
    "bert": Case(
        "bert",
        of_transformers("BertForPreTraining", "BertConfig", **ENCODER),
        OF_ENCODER | {"label": 2},
    ),
    "roberta": Case(
        "roberta",
        of_transformers("RobertaForMaskedLM", "RobertaConfig", **ENCODER),
        OF_ENCODER,
        by_names="bert",
    ),
    "distilbert": Case(
        "distilbert",
        of_transformers(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            dim=48,
            hidden_dim=112,
            n_heads=4,
            n_layers=3,
            vocab_size=331,
            max_position_embeddings=130,
        ),
        OF_ENCODER,
    ),
    "t5": Case("t5", of_transformers("T5ForConditionalGeneration", "T5Config", **T5), OF_T5),
    "t5 gated": Case(
        "t5",
        of_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            **T5,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
        OF_T5,
    ),
    "t5 encoder": Case("t5", of_transformers("T5EncoderModel", "T5Config", **T5), OF_T5),
    "bart": Case("bart", bart("Bart", "BartForConditionalGeneration"), OF_BART),
    "bart classifier": Case(
        "bart", bart("Bart", "BartForSequenceClassification"), OF_BART | {"label": 3}
    ),
    "mbart": Case("mbart", bart("MBart", "MBartForConditionalGeneration"), OF_BART, "bart"),
    "marian": Case(
        "marian", bart("Marian", "MarianMTModel", decoder_start_token_id=0), OF_BART, "bart"
    ),
    "pegasus": Case("pegasus", bart("Pegasus", "PegasusForConditionalGeneration"), OF_BART, "bart"),
    "m2m_100": Case("m2m_100", bart("M2M100", "M2M100ForConditionalGeneration"), OF_BART, "bart"),
    "opt": Case(
        "opt",
        of_transformers(
            "OPTForCausalLM",
            "OPTConfig",
            hidden_size=48,
            num_hidden_layers=3,
            ffn_dim=112,
            num_attention_heads=4,
            vocab_size=331,
            max_position_embeddings=130,
            word_embed_proj_dim=20,
        ),
        OF_BART | {"width": 20},
    ),
    "mpnet": Case(
        "mpnet",
        of_transformers("MPNetForMaskedLM", "MPNetConfig", **ENCODER),
        OF_ENCODER | {"bucket": 32},
    ),
    "deberta_v2": Case(
        "deberta-v2",
        of_transformers(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **ENCODER,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            conv_kernel_size=3,
            conv_act="gelu",
        ),
        OF_ENCODER | {"label": 2},
    ),
    "albert": Case(
        "albert",
        of_transformers("AlbertForMaskedLM", "AlbertConfig", **ENCODER, embedding_size=20),
        OF_ENCODER | {"width": 20},
    ),
    "modernbert": Case(
        "modernbert",
        of_transformers("ModernBertForMaskedLM", "ModernBertConfig", **ENCODER, pad_token_id=0),
        OF_ENCODER | {"qkv": 144},
    ),
    "esm": Case(
        "esm", of_transformers("EsmForMaskedLM", "EsmConfig", **ENCODER, pad_token_id=0), OF_ENCODER
    ),
    "gpt_neo": Case(
        "gpt_neo",
        of_transformers(
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            hidden_size=48,
            num_layers=2,
            attention_types=[[["global"], 2]],
            num_heads=4,
            intermediate_size=112,
            vocab_size=331,
            max_position_embeddings=130,
        ),
        OF_ENCODER,
    ),
    "gptj": Case(
        "gptj", of_transformers("GPTJForCausalLM", "GPTJConfig", **GPT2, rotary_dim=4), OF_ENCODER
    ),
    "wav2vec2": Case(
        "wav2vec2", of_transformers("Wav2Vec2ForCTC", "Wav2Vec2Config", **SPEECH), OF_BART
    ),
    "hubert": Case(
        "hubert", of_transformers("HubertModel", "HubertConfig", **SPEECH), OF_BART, "wav2vec2"
    ),
    "wavlm": Case(
        "wavlm",
        of_transformers("WavLMModel", "WavLMConfig", **SPEECH),
        OF_BART | {"bucket": 320},
        "wav2vec2",
    ),
    "flux": Case(
        "FluxTransformer2DModel",
        of_diffusers(
            "FluxTransformer2DModel",
            **FLUX,
            in_channels=20,
            num_single_layers=2,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
        OF_FLUX,
        "flux",
    ),
    "sd3": Case(
        "SD3Transformer2DModel",
        of_diffusers(
            "SD3Transformer2DModel",
            **FLUX,
            in_channels=5,
            out_channels=5,
            caption_projection_dim=48,
            pos_embed_max_size=12,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        OF_FLUX,
        "sd3",
    ),
    "whisper": Case(
        "whisper",
        of_transformers("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER),
        OF_WHISPER,
    ),
    "vit": Case(
        "vit",
        of_transformers("ViTForImageClassification", "ViTConfig", **PICTURE),
        OF_PICTURE | {"label": 2},
    ),
    "beit": Case(
        "beit",
        of_transformers(
            "BeitForImageClassification",
            "BeitConfig",
            **PICTURE,
            use_relative_position_bias=True,
            use_shared_relative_position_bias=False,
        ),
        {key: n for key, n in OF_PICTURE.items() if key != "context"} | {"label": 2},
        by_names="vit",
    ),
    "segformer": Case(
        "segformer",
        of_transformers(
            "SegformerForImageClassification",
            "SegformerConfig",
            hidden_sizes=[16, 32],
            depths=[1, 2],
            num_attention_heads=[1, 2],
            sr_ratios=[2, 1],
            mlp_ratios=[2, 2],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_encoder_blocks=2,
        ),
        {"label": 2},
    ),
    "dinov2": Case(
        "dinov2",
        of_transformers("Dinov2Model", "Dinov2Config", **PICTURE, mlp_ratio=2),
        OF_PICTURE | {"ff": 96},
        by_names="vit",
    ),
    "clip": Case(
        "clip",
        of_transformers(
            "CLIPModel",
            "CLIPConfig",
            text_config=("CLIPTextConfig", ENCODER),
            projection_dim=36,
            vision_config=("CLIPVisionConfig", PICTURE),
        ),
        OF_CLIP,
    ),
    "clip text": Case(
        "clip_text_model",
        of_transformers("CLIPTextModel", "CLIPTextConfig", **ENCODER),
        OF_CLIP,
        by_names="clip",
    ),
    "clip text with projection": Case(
        "clip_text_model",
        of_transformers(
            "CLIPTextModelWithProjection", "CLIPTextConfig", **ENCODER, projection_dim=36
        ),
        OF_CLIP,
        by_names="clip",
    ),
    "siglip": Case(
        "siglip",
        of_transformers(
            "SiglipModel",
            "SiglipConfig",
            text_config=("SiglipTextConfig", ENCODER),
            vision_config=("SiglipVisionConfig", PICTURE),
        ),
        OF_CLIP | {"vision.context": 25},
    ),
    "llava": Case(
        "llava",
        of_transformers(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            text_config=("LlamaConfig", DECODER),
            vision_config=("CLIPVisionConfig", PICTURE),
        ),
        OF_DECODER | OF_VISION,
        by_names="llama",
    ),
    "gemma3 with vision": Case(
        "gemma3",
        of_transformers(
            "Gemma3ForConditionalGeneration",
            "Gemma3Config",
            text_config=("Gemma3TextConfig", DECODER),
            vision_config=("SiglipVisionConfig", PICTURE),
        ),
        OF_DECODER | OF_VISION | {"vision.context": 25},
        by_names="gemma2",
    ),
    "qwen3_next": Case(
        "qwen3_next",
        decoder(
            "Qwen3Next",
            num_hidden_layers=4,
            num_experts=5,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=10,
            linear_value_head_dim=14,
            num_experts_per_tok=2,
        ),
        EXPERTS | {"ssm_head": 4, "ssm_value": 14, "conv": 4},
    ),
    "jamba": Case(
        "jamba",
        decoder(
            "Jamba",
            head_dim=8,
            num_hidden_layers=4,
            num_experts=5,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=10,
            mamba_dt_rank=7,
        ),
        EXPERTS
        | {"key": 8, "value": 8, "ff_exp": 112, "inner": 96, "state": 10, "conv": 4, "dt": 7},
    ),
    "gemma3n": Case(
        "gemma3n_text",
        of_transformers(
            "Gemma3nForCausalLM",
            "Gemma3nTextConfig",
            **DECODER,
            hidden_size_per_layer_input=20,
            vocab_size_per_layer_input=333,
            laurel_rank=9,
            altup_num_inputs=4,
            num_kv_shared_layers=0,
            layer_types=["full_attention"] * 3,
            activation_sparsity_pattern=[0.0] * 3,
        ),
        OF_DECODER | {"ple": 20, "laurel": 9, "altup": 4},
    ),
    **{
        name: Case(
            name,
            of_transformers(
                f"{prefix}ForConditionalGeneration",
                f"{prefix}Config",
                text_config=(
                    f"{prefix}TextConfig",
                    {
                        **{key: n for key, n in DECODER.items() if key != "pad_token_id"},
                        **({} if prefix == "Qwen3VL" else {"head_dim": 8}),
                        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
                    },
                ),
                vision_config=(f"{prefix}VisionConfig", {"depth": 3, "patch_size": 6, **vision}),
            ),
            OF_DECODER | key | {f"vision.{axis}": n for axis, n in of_vision.items()},
            by_names="llama",
        )
        for name, prefix, key, vision, of_vision in (
            (
                "qwen2_vl",
                "Qwen2VL",
                {"key": 8, "value": 8},
                {"embed_dim": 32, "num_heads": 4, "hidden_size": 48, "mlp_ratio": 2},
                OF_QWEN_VISION | {"ff": 64},
            ),
            (
                "qwen2_5_vl",
                "Qwen2_5_VL",
                {"key": 8, "value": 8},
                {**QWEN_VISION, "out_hidden_size": 48},
                OF_QWEN_VISION,
            ),
            (
                "qwen3_vl",
                "Qwen3VL",
                {},
                {
                    **QWEN_VISION,
                    "out_hidden_size": 48,
                    "num_position_embeddings": 64,
                    "deepstack_visual_indexes": [1],
                },
                OF_QWEN_VISION | {"context": 64},
            ),
        )
    },
    "dinov3": Case(
        "dinov3_vit",
        of_transformers(
            "DINOv3ViTModel",
            "DINOv3ViTConfig",
            **PICTURE,
            num_register_tokens=2,
            key_bias=True,
        ),
        {key: n for key, n in OF_PICTURE.items() if key != "context"},
        by_names="dinov3",
    ),
    "swin": Case(
        "swin",
        of_transformers(
            "SwinForImageClassification",
            "SwinConfig",
            embed_dim=12,
            depths=[2, 2],
            num_heads=[2, 4],
            image_size=32,
            patch_size=4,
            window_size=4,
        ),
        {"label": 2},
    ),
    "sam": Case(
        "sam",
        of_transformers(
            "SamModel",
            "SamConfig",
            vision_config=(
                "SamVisionConfig",
                {
                    **PICTURE,
                    "image_size": 64,
                    "patch_size": 8,
                    "output_channels": 32,
                    "mlp_dim": 112,
                    "window_size": 4,
                    "global_attn_indexes": [1],
                },
            ),
            prompt_encoder_config=(
                "SamPromptEncoderConfig",
                {"hidden_size": 32, "image_size": 64, "patch_size": 8},
            ),
            mask_decoder_config=(
                "SamMaskDecoderConfig",
                {
                    "hidden_size": 32,
                    "mlp_dim": 80,
                    "num_attention_heads": 2,
                    "iou_head_hidden_dim": 36,
                },
            ),
        ),
        OF_VISION | {"embd": 32, "vision.qkv": 144, "ff": 80, "mask": 4},
    ),
    "efficientnet": Case(
        "efficientnet",
        of_transformers("EfficientNetForImageClassification", "EfficientNetConfig"),
        {"label": 2},
    ),
    "unet": Case(
        "UNet2DConditionModel", of_diffusers("UNet2DConditionModel", **UNET), by_names="unet"
    ),
    "vae": Case("vae", of_diffusers("AutoencoderKL", **VAE)),
    "resnet": Case(
        "resnet",
        of_transformers(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[12, 20, 28, 36],
            depths=[2, 2, 2, 2],
        ),
        {"label": 2},
        by_names="resnet",
    ),
    "convnext": Case(
        "convnext",
        of_transformers(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[12, 20, 28, 36],
            depths=[2, 2, 2, 2],
        ),
        {"label": 2},
    ),
    "mobilenet_v1": Case(
        "mobilenet_v1",
        of_transformers("MobileNetV1ForImageClassification", "MobileNetV1Config"),
        {"label": 2},
        by_names="mobilenet",
    ),
    "mobilenet_v2": Case(
        "mobilenet_v2",
        of_transformers("MobileNetV2ForImageClassification", "MobileNetV2Config"),
        {"label": 2},
        by_names="mobilenet",
    ),
    "mamba": Case(
        "mamba",
        of_transformers("MambaForCausalLM", "MambaConfig", **MAMBA, time_step_rank=7),
        OF_MAMBA,
    ),
    "mamba2": Case(
        "mamba2",
        of_transformers(
            "Mamba2ForCausalLM", "Mamba2Config", **MAMBA, num_heads=6, head_dim=16, n_groups=2
        ),
        OF_MAMBA | {"ssm_head": 6, "group": 2},
    ),
    "rwkv": Case(
        "rwkv",
        of_transformers(
            "RwkvForCausalLM",
            "RwkvConfig",
            hidden_size=48,
            attention_hidden_size=56,
            intermediate_size=112,
            num_hidden_layers=3,
            vocab_size=331,
        ),
        {"embd": 48, "ff": 112, "vocab": 331, "inner": 56},
    ),
    **{
        f"timm {name}": Case(family, of_timm(name, num_classes=7), sizes, by_names=family)
        for family, sizes, names in (
            ("resnet", {"label": 7}, ("resnet18", "resnet50", "resnet50d", "seresnet50")),
            ("convnext", {"label": 7}, ("convnext_atto", "convnextv2_atto", "convnext_tiny")),
            (
                "mobilenet",
                {"label": 7},
                ("mobilenetv2_100", "mobilenetv3_small_100", "efficientnet_b0"),
            ),
            ("swin", {"label": 7}, ("swin_tiny_patch4_window7_224",)),
        )
        for name in names
    },
    **{
        f"timm {name}": Case(
            "vit", of_timm(name, num_classes=7), {**OF_TIMM, "context": n}, by_names="vit"
        )
        for name, n in (
            ("vit_tiny_patch16_224", 197),
            ("deit_tiny_distilled_patch16_224", 198),
            ("vit_tiny_patch16_384", 577),
        )
    },
    **{
        f"torchvision {name}": Case(
            family, of_torchvision(name, num_classes=7), {"label": 7}, by_names=family
        )
        for family, name in (
            ("resnet", "resnet18"),
            ("resnet", "resnext50_32x4d"),
            ("mobilenet", "mobilenet_v2"),
            ("mobilenet", "mobilenet_v3_small"),
            ("convnext", "convnext_tiny"),
            ("efficientnet", "efficientnet_b0"),
            ("efficientnet", "efficientnet_v2_s"),
        )
    },
}
