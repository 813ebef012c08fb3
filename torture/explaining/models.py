"""Tiny models of known families: the names of their files, and random numbers.

Widths are either all different, or as equal as the family allows, so that nothing is recognised by
its shape alone. A tenth of the models have constant norms and biases, and some have a tied head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32

#: Shares of models with constant norms and biases, and with an output that is the embedding.
_FRESH, _TIED = 0.1, 0.15
#: Types that a model may be stored in, with their shares.
_TYPES = ((np.float32, 0.7), (ml_dtypes.bfloat16, 0.2), (np.float16, 0.1))


@dataclass
class Sizes:
    """Widths and numbers of the parts of a model."""

    layers: int
    width: int
    heads: int
    key_heads: int
    head: int
    inner: int
    vocabulary: int
    experts: int = 4

    @property
    def queries(self) -> int:
        """Rows of the queries."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Rows of the keys, and of the values."""
        return self.key_heads * self.head


def draw_sizes(rng: np.random.Generator, *, is_wide: bool) -> Sizes:
    """Return sizes; wide ones fill the blocks of K-quants."""
    layers = int(rng.choice([2, 4, 4, 4, 5, 6])) if not is_wide else 4
    vocabulary = int(rng.integers(60, 110))
    if is_wide:
        inner = int(rng.choice([128, 256]))
        return Sizes(layers, 256, 4, int(rng.choice([2, 4])), 16, inner, vocabulary, 4)
    if rng.random() < 0.4:  # square
        key_heads = int(rng.choice([2, 4]))
        return Sizes(layers, 64, 4, key_heads, 16, 64, vocabulary, 4)
    head = int(rng.choice([8, 16]))
    return Sizes(layers, int(rng.choice([96, 160])), 4, 2, head, 128, vocabulary, 4)


@dataclass
class Model:
    """The tensors of a model by name, in the order of its file."""

    family: str
    sizes: Sizes
    rng: np.random.Generator
    tensors: dict[str, Array] = field(default_factory=dict)
    is_fresh: bool = False

    def weight(self, name: str, *shape: int) -> None:
        """Add a weight whose rows have different spreads."""
        spread = 0.05 * np.exp(0.15 * self.rng.standard_normal((shape[0],) + (1,) * len(shape[1:])))
        self.tensors[name] = (spread * self.rng.standard_normal(shape)).astype(F32)

    def linear(self, name: str, *shape: int, bias: bool = True) -> None:
        """Add the weight and the bias of a linear layer or convolution."""
        self.weight(f"{name}.weight", *shape)
        if bias:
            self.bias(f"{name}.bias", shape[0])

    def bias(self, name: str, width: int) -> None:
        """Add a bias."""
        values = 0.0 if self.is_fresh else 0.05
        self.tensors[name] = (values * self.rng.standard_normal(width)).astype(F32)

    def norm(self, name: str, width: int, *, bias: bool = False, centre: float = 1.0) -> None:
        """Add the gain, and the bias, of a norm."""
        spread = 0.0 if self.is_fresh else 0.1
        gain = centre + spread * self.rng.standard_normal(width)
        self.tensors[f"{name}.weight"] = gain.astype(F32)
        if bias:
            self.bias(f"{name}.bias", width)

    def batch_norm(self, name: str, width: int) -> None:
        """Add a batch norm with its running statistics."""
        self.norm(name, width, bias=True)
        mean = self.rng.standard_normal(width)
        self.tensors[f"{name}.running_mean"] = (0.1 * mean).astype(F32)
        self.tensors[f"{name}.running_var"] = self.rng.uniform(0.5, 2, width).astype(F32)

    def head(self, name: str, embedding: str) -> None:
        """Add an output, which may be the embedding."""
        self.weight(name, self.sizes.vocabulary, self.sizes.width)
        if self.rng.random() < _TIED:
            self.tensors[name] = self.tensors[embedding].copy()


def draw_model(family: str, rng: np.random.Generator, *, is_wide: bool = False) -> Model:
    """Return a model of a family, possibly rounded to the type that it is stored in."""
    model = Model(family, draw_sizes(rng, is_wide=is_wide), rng, is_fresh=rng.random() < _FRESH)
    FAMILIES[family](model)
    dtype = _TYPES[rng.choice(len(_TYPES), p=[share for _, share in _TYPES])][0]
    model.tensors = {name: values.astype(dtype) for name, values in model.tensors.items()}
    return model


# --- decoders -------------------------------------------------------------------------------------


def _attention(
    m: Model, base: str, *, bias: bool = False, output_bias: bool = False, output: str = "o_proj"
) -> None:
    s = m.sizes
    for role, rows in (("q", s.queries), ("k", s.keys), ("v", s.keys)):
        m.linear(f"{base}.{role}_proj", rows, s.width, bias=bias)
    m.linear(f"{base}.{output}", s.width, s.queries, bias=output_bias)


def _gated(m: Model, base: str, names: tuple[str, str, str], inner: int = 0) -> None:
    gate, up, down = names
    inner = inner or m.sizes.inner
    m.linear(f"{base}.{gate}", inner, m.sizes.width, bias=False)
    m.linear(f"{base}.{up}", inner, m.sizes.width, bias=False)
    m.linear(f"{base}.{down}", m.sizes.width, inner, bias=False)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _query_norms(m: Model, base: str, kind: str, centre: float) -> None:
    s = m.sizes
    for role, rows in (("q", s.queries), ("k", s.keys)):
        if kind == "head":
            m.norm(f"{base}.{role}_norm", s.head, centre=centre)
        elif kind == "row":
            m.norm(f"{base}.{role}_norm", rows)
        elif kind == "stablelm":
            for head in range(rows // s.head):
                m.norm(f"{base}.{role}_layernorm.norms.{head}", s.head)


def _feed_forward(m: Model, base: str, experts: str) -> None:
    s = m.sizes
    if not experts:
        _gated(m, f"{base}.mlp", _PROJECTIONS)
        return
    is_mixtral = experts == "mixtral"
    block = "block_sparse_moe" if is_mixtral else "mlp"
    m.linear(f"{base}.{block}.gate", s.experts, s.width, bias=False)
    for expert in range(s.experts):
        gates = ("w1", "w3", "w2") if is_mixtral else _PROJECTIONS
        _gated(m, f"{base}.{block}.experts.{expert}", gates, s.inner // 2)


def _llama(
    m: Model, *, bias: bool = False, norms: tuple[str, ...] = ("input_layernorm",
    "post_attention_layernorm"), centre: float = 1.0, qk: str = "", experts: str = "",
    has_head: bool = True, norm_bias: bool = False,
) -> None:  # fmt: skip
    s = m.sizes
    m.weight("model.embed_tokens.weight", s.vocabulary, s.width)
    for layer in range(s.layers):
        base = f"model.layers.{layer}"
        _attention(m, f"{base}.self_attn", bias=bias)
        _query_norms(m, f"{base}.self_attn", qk, centre)
        _feed_forward(m, base, experts)
        for norm in norms:
            m.norm(f"{base}.{norm}", s.width, centre=centre, bias=norm_bias)
    m.norm("model.norm", s.width, centre=centre, bias=norm_bias)
    if has_head:
        m.head("lm_head.weight", "model.embed_tokens.weight")


_GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                "post_feedforward_layernorm")  # fmt: skip


def _phi3(m: Model) -> None:
    s = m.sizes
    m.weight("model.embed_tokens.weight", s.vocabulary, s.width)
    for layer in range(s.layers):
        base = f"model.layers.{layer}"
        m.weight(f"{base}.self_attn.qkv_proj.weight", s.queries + 2 * s.keys, s.width)
        m.weight(f"{base}.self_attn.o_proj.weight", s.width, s.queries)
        m.weight(f"{base}.mlp.gate_up_proj.weight", 2 * s.inner, s.width)
        m.weight(f"{base}.mlp.down_proj.weight", s.width, s.inner)
        m.norm(f"{base}.input_layernorm", s.width)
        m.norm(f"{base}.post_attention_layernorm", s.width)
    m.norm("model.norm", s.width)
    m.head("lm_head.weight", "model.embed_tokens.weight")


def _deepseek(m: Model) -> None:
    s = m.sizes
    rank, rope = 32, 8
    m.weight("model.embed_tokens.weight", s.vocabulary, s.width)
    for layer in range(s.layers):
        base = f"model.layers.{layer}"
        m.weight(f"{base}.self_attn.q_proj.weight", s.heads * (s.head + rope), s.width)
        m.weight(f"{base}.self_attn.kv_a_proj_with_mqa.weight", rank + rope, s.width)
        m.norm(f"{base}.self_attn.kv_a_layernorm", rank)
        m.weight(f"{base}.self_attn.kv_b_proj.weight", s.heads * 2 * s.head, rank)
        m.weight(f"{base}.self_attn.o_proj.weight", s.width, s.queries)
        m.linear(f"{base}.mlp.gate", s.experts, s.width, bias=False)
        for expert in range(s.experts):
            _gated(m, f"{base}.mlp.experts.{expert}", _PROJECTIONS, s.inner // 2)
        _gated(m, f"{base}.mlp.shared_experts", _PROJECTIONS)
        m.norm(f"{base}.input_layernorm", s.width)
        m.norm(f"{base}.post_attention_layernorm", s.width)
    m.norm("model.norm", s.width)
    m.head("lm_head.weight", "model.embed_tokens.weight")


def _gpt2(m: Model) -> None:
    s, width = m.sizes, m.sizes.width
    m.weight("wte.weight", s.vocabulary, width)
    m.weight("wpe.weight", 40, width)
    for layer in range(s.layers):
        base = f"h.{layer}"
        for name, rows, columns in (("attn.c_attn", width, 3 * width),
                                    ("attn.c_proj", width, width),
                                    ("mlp.c_fc", width, s.inner),
                                    ("mlp.c_proj", s.inner, width)):  # fmt: skip
            m.weight(f"{base}.{name}.weight", rows, columns)
            m.bias(f"{base}.{name}.bias", columns)
        m.norm(f"{base}.ln_1", width, bias=True)
        m.norm(f"{base}.ln_2", width, bias=True)
    m.norm("ln_f", width, bias=True)


def _bloom(m: Model) -> None:
    s, width = m.sizes, m.sizes.width
    m.weight("word_embeddings.weight", s.vocabulary, width)
    m.norm("word_embeddings_layernorm", width, bias=True)
    for layer in range(s.layers):
        base = f"h.{layer}"
        m.linear(f"{base}.self_attention.query_key_value", 3 * width, width)
        m.linear(f"{base}.self_attention.dense", width, width)
        m.linear(f"{base}.mlp.dense_h_to_4h", s.inner, width)
        m.linear(f"{base}.mlp.dense_4h_to_h", width, s.inner)
        m.norm(f"{base}.input_layernorm", width, bias=True)
        m.norm(f"{base}.post_attention_layernorm", width, bias=True)
    m.norm("ln_f", width, bias=True)


def _falcon(m: Model) -> None:
    s = m.sizes
    m.weight("transformer.word_embeddings.weight", s.vocabulary, s.width)
    for layer in range(s.layers):
        base = f"transformer.h.{layer}"
        m.weight(f"{base}.self_attention.query_key_value.weight", s.queries + 2 * s.keys, s.width)
        m.weight(f"{base}.self_attention.dense.weight", s.width, s.queries)
        m.weight(f"{base}.mlp.dense_h_to_4h.weight", s.inner, s.width)
        m.weight(f"{base}.mlp.dense_4h_to_h.weight", s.width, s.inner)
        m.norm(f"{base}.ln_attn", s.width, bias=True)
        m.norm(f"{base}.ln_mlp", s.width, bias=True)
    m.norm("transformer.ln_f", s.width, bias=True)
    m.head("lm_head.weight", "transformer.word_embeddings.weight")


def _neox(m: Model) -> None:
    s, width = m.sizes, m.sizes.width
    m.weight("gpt_neox.embed_in.weight", s.vocabulary, width)
    for layer in range(s.layers):
        base = f"gpt_neox.layers.{layer}"
        m.linear(f"{base}.attention.query_key_value", 3 * width, width)
        m.linear(f"{base}.attention.dense", width, width)
        m.linear(f"{base}.mlp.dense_h_to_4h", s.inner, width)
        m.linear(f"{base}.mlp.dense_4h_to_h", width, s.inner)
        m.norm(f"{base}.input_layernorm", width, bias=True)
        m.norm(f"{base}.post_attention_layernorm", width, bias=True)
    m.norm("gpt_neox.final_layer_norm", width, bias=True)
    m.head("embed_out.weight", "gpt_neox.embed_in.weight")


# --- encoders, pictures and sound -----------------------------------------------------------------


def _bert(m: Model) -> None:
    s, width = m.sizes, m.sizes.width
    m.weight("embeddings.word_embeddings.weight", s.vocabulary, width)
    m.weight("embeddings.position_embeddings.weight", 40, width)
    m.weight("embeddings.token_type_embeddings.weight", 2, width)
    m.norm("embeddings.LayerNorm", width, bias=True)
    for layer in range(s.layers):
        base = f"encoder.layer.{layer}"
        for role in ("query", "key", "value"):
            m.linear(f"{base}.attention.self.{role}", width, width)
        m.linear(f"{base}.attention.output.dense", width, width)
        m.norm(f"{base}.attention.output.LayerNorm", width, bias=True)
        m.linear(f"{base}.intermediate.dense", s.inner, width)
        m.linear(f"{base}.output.dense", width, s.inner)
        m.norm(f"{base}.output.LayerNorm", width, bias=True)


def _t5(m: Model) -> None:
    s = m.sizes
    m.weight("shared.weight", s.vocabulary, s.width)
    for stack in ("encoder", "decoder"):
        for layer in range(s.layers):
            base = f"{stack}.block.{layer}.layer"
            attentions = ["SelfAttention"] + ["EncDecAttention"] * (stack == "decoder")
            for number, attention in enumerate(attentions):
                for role in "qkv":
                    m.weight(f"{base}.{number}.{attention}.{role}.weight", s.queries, s.width)
                m.weight(f"{base}.{number}.{attention}.o.weight", s.width, s.queries)
                m.norm(f"{base}.{number}.layer_norm", s.width)
            number = len(attentions)
            _gated(m, f"{base}.{number}.DenseReluDense", ("wi_0", "wi_1", "wo"))
            m.norm(f"{base}.{number}.layer_norm", s.width)
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        m.weight(bias, 16, s.heads)
        m.norm(f"{stack}.final_layer_norm", s.width)


def _vit(m: Model) -> None:
    s, width = m.sizes, m.sizes.width
    m.weight("vit.embeddings.cls_token", 1, 1, width)
    m.weight("vit.embeddings.position_embeddings", 1, 17, width)
    m.linear("vit.embeddings.patch_embeddings.projection", width, 3, 4, 4)
    for layer in range(s.layers):
        base = f"vit.encoder.layer.{layer}"
        for role in ("query", "key", "value"):
            m.linear(f"{base}.attention.attention.{role}", width, width)
        m.linear(f"{base}.attention.output.dense", width, width)
        m.linear(f"{base}.intermediate.dense", s.inner, width)
        m.linear(f"{base}.output.dense", width, s.inner)
        m.norm(f"{base}.layernorm_before", width, bias=True)
        m.norm(f"{base}.layernorm_after", width, bias=True)
    m.norm("vit.layernorm", width, bias=True)
    m.linear("classifier", 10, width)


def _clip_layers(m: Model, base: str, count: int) -> None:
    s, width = m.sizes, m.sizes.width
    for layer in range(count):
        for role in ("k_proj", "v_proj", "q_proj", "out_proj"):
            m.linear(f"{base}.{layer}.self_attn.{role}", width, width)
        m.norm(f"{base}.{layer}.layer_norm1", width, bias=True)
        m.linear(f"{base}.{layer}.mlp.fc1", s.inner, width)
        m.linear(f"{base}.{layer}.mlp.fc2", width, s.inner)
        m.norm(f"{base}.{layer}.layer_norm2", width, bias=True)


def _clip(m: Model) -> None:
    s, width = m.sizes, m.sizes.width
    m.weight("text_model.embeddings.token_embedding.weight", s.vocabulary, width)
    m.weight("text_model.embeddings.position_embedding.weight", 20, width)
    _clip_layers(m, "text_model.encoder.layers", s.layers)
    m.norm("text_model.final_layer_norm", width, bias=True)
    m.weight("vision_model.embeddings.class_embedding", width)
    m.weight("vision_model.embeddings.patch_embedding.weight", width, 3, 4, 4)
    m.weight("vision_model.embeddings.position_embedding.weight", 17, width)
    m.norm("vision_model.pre_layrnorm", width, bias=True)
    _clip_layers(m, "vision_model.encoder.layers", s.layers)
    m.norm("vision_model.post_layernorm", width, bias=True)
    m.weight("visual_projection.weight", 48, width)
    m.weight("text_projection.weight", 48, width)


def _siglip(m: Model) -> None:
    width = m.sizes.width
    m.linear("vision_model.embeddings.patch_embedding", width, 3, 4, 4)
    m.weight("vision_model.embeddings.position_embedding.weight", 16, width)
    _clip_layers(m, "vision_model.encoder.layers", m.sizes.layers)
    m.norm("vision_model.post_layernorm", width, bias=True)


def _whisper(m: Model) -> None:
    s, width = m.sizes, m.sizes.width
    m.linear("model.encoder.conv1", width, 20, 3)
    m.linear("model.encoder.conv2", width, width, 3)
    m.weight("model.encoder.embed_positions.weight", 30, width)
    m.weight("model.decoder.embed_tokens.weight", s.vocabulary, width)
    m.weight("model.decoder.embed_positions.weight", 24, width)
    for stack in ("encoder", "decoder"):
        for layer in range(s.layers):
            base = f"model.{stack}.layers.{layer}"
            for attention in ("self_attn", "encoder_attn")[: 1 + (stack == "decoder")]:
                for role in ("k_proj", "v_proj", "q_proj", "out_proj"):
                    m.linear(f"{base}.{attention}.{role}", width, width, bias=role != "k_proj")
                m.norm(f"{base}.{attention}_layer_norm", width, bias=True)
            m.linear(f"{base}.fc1", s.inner, width)
            m.linear(f"{base}.fc2", width, s.inner)
            m.norm(f"{base}.final_layer_norm", width, bias=True)
        m.norm(f"model.{stack}.layer_norm", width, bias=True)


def _resnet(m: Model) -> None:
    m.weight("conv1.weight", 24, 3, 7, 7)
    m.batch_norm("bn1", 24)
    before = 24
    for stage in (1, 2, 3):
        width = 24 + 8 * (stage - 1)
        for block in range(2):
            base = f"layer{stage}.{block}"
            m.weight(f"{base}.conv1.weight", width, before, 3, 3)
            m.batch_norm(f"{base}.bn1", width)
            m.weight(f"{base}.conv2.weight", width, width, 3, 3)
            m.batch_norm(f"{base}.bn2", width)
            if before != width:
                m.weight(f"{base}.downsample.0.weight", width, before, 1, 1)
                m.batch_norm(f"{base}.downsample.1", width)
            before = width
    m.linear("fc", 10, before)


def _vae(m: Model) -> None:
    m.linear("encoder.conv_in", 24, 3, 3, 3)
    before = 24
    for block, width in enumerate((24, 32, 40)):
        for number in range(2):
            base = f"encoder.down_blocks.{block}.resnets.{number}"
            m.norm(f"{base}.norm1", before, bias=True)
            m.linear(f"{base}.conv1", width, before, 3, 3)
            m.norm(f"{base}.norm2", width, bias=True)
            m.linear(f"{base}.conv2", width, width, 3, 3)
            if before != width:
                m.linear(f"{base}.conv_shortcut", width, before, 1, 1)
            before = width
        if block < 2:
            m.linear(f"encoder.down_blocks.{block}.downsamplers.0.conv", width, width, 3, 3)
    for number in range(2):
        base = f"encoder.mid_block.resnets.{number}"
        m.norm(f"{base}.norm1", before, bias=True)
        m.linear(f"{base}.conv1", before, before, 3, 3)
        m.norm(f"{base}.norm2", before, bias=True)
        m.linear(f"{base}.conv2", before, before, 3, 3)
    base = "encoder.mid_block.attentions.0"
    m.norm(f"{base}.group_norm", before, bias=True)
    for role in ("to_q", "to_k", "to_v", "to_out.0"):
        m.linear(f"{base}.{role}", before, before)
    m.norm("encoder.conv_norm_out", before, bias=True)
    m.linear("encoder.conv_out", 8, before, 3, 3)
    m.linear("quant_conv", 8, 8, 1, 1)


def _lstm(m: Model) -> None:
    s = m.sizes
    m.weight("embedding.weight", s.vocabulary, s.width)
    before, hidden = s.width, s.inner // 2
    for layer in range(4):
        m.weight(f"lstm.weight_ih_l{layer}", 4 * hidden, before)
        m.weight(f"lstm.weight_hh_l{layer}", 4 * hidden, hidden)
        before = hidden
    m.linear("fc", s.vocabulary, hidden)


#: Functions that add the tensors of a family.
FAMILIES: dict[str, Callable[[Model], None]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda m: _llama(m, bias=True),
    "qwen3": lambda m: _llama(m, qk="head"),
    "gemma2": lambda m: _llama(m, norms=_GEMMA_NORMS, centre=0.0, has_head=False),
    "gemma3": lambda m: _llama(m, norms=_GEMMA_NORMS, centre=0.0, qk="head", has_head=False),
    "olmo2": lambda m: _llama(m, norms=("post_attention_layernorm", "post_feedforward_layernorm"),
                              qk="row"),
    "stablelm": lambda m: _llama(m, qk="stablelm", norm_bias=True),
    "mixtral": lambda m: _llama(m, experts="mixtral"),
    "qwen3moe": lambda m: _llama(m, experts="qwen", qk="head"),
    "phi3": _phi3,
    "deepseek2": _deepseek,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "falcon": _falcon,
    "gptneox": _neox,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "clip": _clip,
    "siglip": _siglip,
    "whisper": _whisper,
    "resnet": _resnet,
    "vae": _vae,
    "lstm": _lstm,
}  # fmt: skip
