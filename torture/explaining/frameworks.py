"""Converters between frameworks: Flax, Keras, TensorFlow, MLX, ONNX, Burn, timm and others."""

from __future__ import annotations

import re
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from torture.explaining.conversions import Conversion, converter, renaming
from torture.explaining.models import F32, Array

if TYPE_CHECKING:
    from collections.abc import Callable

_BERTS = ("bert", "vit", "siglip", "clip")
_NORM = r"(\.(?:\w*[nN]orm\w*|layrnorm|ln_\w|bn\d?|layer_norm\d?)(?:\.\d+)?)\.weight$"
_FLAX = renaming((_NORM, r"\1.scale"), (r"patch_embedding\.weight$", "patch_embedding.kernel"),
                 (r"(embeddings?|embed\w*|shared)\.weight$", r"\1.embedding"),
                 (r"weight$", "kernel"), (r"running_", ""), (r"\.(\d+)\.", r".\1."),
                 (r"\.", "/"), ("^", "params/"))  # fmt: skip

# --- Flax -----------------------------------------------------------------------------------------


@converter("flax", "bert", "clip", "siglip", "vit", "resnet", "vae")
def _flax(c: Conversion) -> None:
    c.linear(_FLAX)
    c.rest(_FLAX)


@converter("flax numbered", "bert", "vit", "siglip", "llama", "qwen2")
def _flax_numbered(c: Conversion) -> None:
    """Put the numbers of layers behind underscores."""
    rename = renaming((r"\.?\blayers?\.(\d+)", r".layers_\1"), (_NORM, r"\1.scale"),
                      (r"patch_embedding\.weight$", "patch_embedding.kernel"),
                      (r"(embed\w*)\.weight$", r"\1.embedding"), (r"weight$", "kernel"),
                      (r"\.", "/"))  # fmt: skip
    c.linear(rename)
    c.rest(rename)


@converter("flax gpt2", "gpt2")
def _flax_gpt2(c: Conversion) -> None:
    rename = renaming(("^", "transformer."), (_NORM, r"\1.scale"),
                      (r"(w.e)\.weight", r"\1.embedding"),
                      (r"weight$", "kernel"), (r"\.", "/"))  # fmt: skip
    c.linear(rename, r"h\..*\.weight")
    c.rest(rename)


_ATTENTION = {
    "bert": (r"(.*attention\.self\.)(query|key|value)\.(weight|bias)",
             r"(.*attention\.output\.dense)\.weight"),
    "vit": (r"(.*attention\.attention\.)(query|key|value)\.(weight|bias)",
            r"(.*attention\.output\.dense)\.weight"),
    "siglip": (r"(.*self_attn\.)([qkv]_proj)\.(weight|bias)", r"(.*self_attn\.out_proj)\.weight"),
    "clip": (r"(.*self_attn\.)([qkv]_proj)\.(weight|bias)", r"(.*self_attn\.out_proj)\.weight"),
    "whisper": (r"(.*attn\.)([qkv]_proj)\.(weight|bias)", r"(.*attn\.out_proj)\.weight"),
}  # fmt: skip


def _dense_general(c: Conversion, rename: Callable[[str], str]) -> None:
    """Give kernels of attention an axis of heads."""
    inner, output = _ATTENTION[c.model.family]
    heads = c.model.sizes.heads
    for match in c.matching(inner):
        values = c[match[0]]
        if match[3] == "bias":
            c.put(rename(match[0]), values.reshape(heads, -1), match[0])
            continue
        turned = c.turned(match[0])
        c.put(rename(match[0]), turned.reshape(turned.shape[0], heads, -1), match[0])
    for match in c.matching(output):
        turned = c.turned(match[0])
        c.put(rename(match[0]), turned.reshape(heads, -1, turned.shape[1]), match[0])


@converter("flax heads", *_ATTENTION, is_apart=True)
def _flax_heads(c: Conversion) -> None:
    _dense_general(c, _FLAX)
    c.is_apart = False
    c.linear(_FLAX)
    c.rest(_FLAX)


@converter("flax scanned", "bert", "vit", "siglip", is_apart=True)
def _flax_scanned(c: Conversion) -> None:
    """Stack the kernels of all layers."""
    groups: dict[str, list[str]] = {}
    for match in c.matching(r"(.*?)\.\d+\.(.*)"):
        groups.setdefault(f"{match[1]}.{match[2]}", []).append(match[0])
    for new, names in groups.items():
        is_kernel = c[names[0]].ndim == 2
        c.put(_FLAX(new), c.stacked(names, np.transpose if is_kernel else None), *names,
              is_apart=is_kernel)  # fmt: skip
    c.is_apart = False
    c.linear(_FLAX)
    c.rest(_FLAX)


@converter("t5x", "t5")
def _t5x(c: Conversion) -> None:
    rename = renaming((r"block\.(\d+)\.layer\.\d+", r"layers_\1"),
                      ("SelfAttention", "self_attention"),
                      ("EncDecAttention", "cross_attention"), ("DenseReluDense", "mlp"),
                      (r"attention\.q", "attention.query"), (r"attention\.k", "attention.key"),
                      (r"attention\.v", "attention.value"), (r"attention\.o", "attention.out"),
                      (r"layer_norm\.weight", "layer_norm.scale"),
                      ("shared.weight", "token_embedder.embedding"),
                      (r"relative_attention_bias\.weight", "relpos_bias.rel_embedding"),
                      (r"weight$", "kernel"), (r"\.", "/"))  # fmt: skip
    names = {}

    def unique(name: str) -> str:
        """Keep the norms of the parts of a layer apart."""
        part = re.search(r"layer\.(\d+)\.layer_norm", name)
        names[name] = rename(name).replace(
            "layer_norm", f"layer_norm_{part[1]}" if part else "norm"
        )
        return names[name]

    c.linear(unique, r".*\.(q|k|v|o|wi_0|wi_1|wo|relative_attention_bias)\.weight", "")
    c.rest(unique)


# --- Keras and TensorFlow -------------------------------------------------------------------------

_KERAS_LEAVES = ((r"(bn\d?|downsample\.1|norm\w*|layernorm\w*|LayerNorm)\.weight$", r"\1.gamma"),
                 (r"(bn\d?|downsample\.1|norm\w*|layernorm\w*|LayerNorm)\.bias$", r"\1.beta"),
                 ("running_mean", "moving_mean"), ("running_var", "moving_variance"),
                 (r"(embeddings?)\.weight$", r"\1.embeddings"), (r"weight$", "kernel"))  # fmt: skip


@converter("keras", "resnet", "vae", "vit", "bert")
def _keras(c: Conversion) -> None:
    rename = renaming(*_KERAS_LEAVES, (r"\.(\d+)", r"_\1"), (r"\.", "/"))
    c.linear(rename)
    c.rest(rename)


@converter("keras variables", "resnet", "vit", "bert")
def _keras_variables(c: Conversion) -> None:
    """Name variables by their numbers, and put the numbers of blocks behind underscores."""
    rename = renaming((r"\.(\d+)\.", r"_\1."), (r"\.(weight|running_mean)$", ".vars.0"),
                      (r"\.(bias|running_var)$", ".vars.1"), (r"\.", "/"),
                      ("^", "layers/"))  # fmt: skip
    c.linear(rename)
    for name in c.names:
        is_statistics = "running_" in name
        new = rename(name)
        if is_statistics:
            new = new[:-1] + str(2 + int(new[-1]))
        c.put(new, c[name], name)


@converter("keras heads", "bert", "vit", is_apart=True)
def _keras_heads(c: Conversion) -> None:
    rename = renaming(*_KERAS_LEAVES, (r"\.(\d+)", r"_\1"), (r"\.", "/"))
    _dense_general(c, rename)
    c.is_apart = False
    c.linear(rename)
    c.rest(rename)


@converter("keras numbered convolutions", "resnet")
def _keras_numbered(c: Conversion) -> None:
    """Layers of a kind have consecutive numbers, whatever block they are in."""
    numbers: dict[str, str] = {}
    counts = {kind: count() for kind in ("conv2d", "batch_normalization", "dense")}

    def rename(name: str) -> str:
        base, _, leaf = name.rpartition(".")
        if base not in numbers:
            kind = (
                "conv2d"
                if c[name].ndim == 4
                else "dense"
                if base == "fc"
                else "batch_normalization"
            )
            number = next(counts[kind])
            numbers[base] = kind + (f"_{number}" if number else "")
        is_norm = numbers[base].startswith("batch")
        leaves = {"weight": "gamma" if is_norm else "kernel", "bias": "beta" if is_norm else "bias",
                  "running_mean": "moving_mean", "running_var": "moving_variance"}  # fmt: skip
        return f"{numbers[base]}/{numbers[base]}/{leaves[leaf]}:0"

    for name in c.names:  # in the order of the layers, before kernels are taken out of it
        rename(name)
    c.linear(rename)
    c.rest(rename)


@converter("tensorflow bert", "bert")
def _tensorflow_bert(c: Conversion) -> None:
    rename = renaming((r"embeddings\.(word|position|token_type)_embeddings\.weight",
                       r"embeddings.\1_embeddings"), (r"layer\.(\d+)", r"layer_\1"),
                      (r"LayerNorm\.weight", "LayerNorm.gamma"),
                      (r"LayerNorm\.bias", "LayerNorm.beta"),
                      (r"weight$", "kernel"), (r"\.", "/"), ("^", "bert/"))  # fmt: skip
    c.linear(rename)
    c.rest(rename)


@converter("keras lstm", "lstm")
def _keras_lstm(c: Conversion) -> None:
    rename = renaming((r"lstm\.weight_ih_l(\d)", r"lstm_\1/lstm_cell/kernel"),
                      (r"lstm\.weight_hh_l(\d)", r"lstm_\1/lstm_cell/recurrent_kernel"),
                      (r"embedding\.weight", "embedding/embeddings"),
                      (r"fc\.weight", "dense/kernel"),
                      (r"fc\.bias", "dense/bias"))  # fmt: skip
    c.linear(rename, r"(lstm\.weight|fc\.weight).*")
    c.rest(rename)


@converter("keras lstm paths", "lstm")
def _keras_lstm_paths(c: Conversion) -> None:
    rename = renaming((r"lstm\.weight_ih_l0", "layers/lstm/cell/vars/0"),
                      (r"lstm\.weight_hh_l0", "layers/lstm/cell/vars/1"),
                      (r"lstm\.weight_ih_l(\d)", r"layers/lstm_\1/cell/vars/0"),
                      (r"lstm\.weight_hh_l(\d)", r"layers/lstm_\1/cell/vars/1"),
                      (r"embedding\.weight", "layers/embedding/vars/0"),
                      (r"fc\.weight", "layers/dense/vars/0"),
                      (r"fc\.bias", "layers/dense/vars/1"))  # fmt: skip
    c.linear(rename, r"(lstm\.weight|fc\.weight).*")
    c.rest(rename)


# --- timm, torchvision, OpenCLIP, diffusers, MLX --------------------------------------------------


def _fuse(
    c: Conversion, pattern: str, roles: tuple[str, ...], new: Callable[[str, str], str]
) -> None:
    """Join queries, keys and values under the name of a base and a leaf."""
    for match in c.matching(pattern):
        names = [f"{match[1]}{role}.{match[2]}" for role in roles]
        c.put(new(match[1], match[2]), c.joined(names), *names)


@converter("timm vit", "vit")
def _timm_vit(c: Conversion) -> None:
    rename = renaming(
        (r"^vit\.encoder\.layer", "blocks"),
        (r"attention\.output\.dense", "attn.proj"),
        (r"intermediate\.dense", "mlp.fc1"),
        (r"output\.dense", "mlp.fc2"),
        (r"layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
        (r"^vit\.layernorm", "norm"),
        ("classifier", "head"),
        (r"vit\.embeddings\.cls_token", "cls_token"),
        (r"vit\.embeddings\.position_embeddings", "pos_embed"),
        (r"vit\.embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    )
    _fuse(
        c,
        r"(.*attention\.attention\.)query\.(weight|bias)",
        ("query", "key", "value"),
        lambda base, leaf: rename(base).replace("attention.attention.", f"attn.qkv.{leaf}"),
    )
    c.rest(rename)


@converter("torchvision vit", "vit")
def _torchvision_vit(c: Conversion) -> None:
    rename = renaming((r"^vit\.encoder\.layer\.(\d+)", r"encoder.layers.encoder_layer_\1"),
                      (r"attention\.output\.dense", "self_attention.out_proj"),
                      (r"intermediate\.dense", "mlp.0"), (r"output\.dense", "mlp.3"),
                      (r"layernorm_before", "ln_1"), ("layernorm_after", "ln_2"),
                      (r"^vit\.layernorm", "encoder.ln"), ("classifier", "heads.head"),
                      (r"vit\.embeddings\.cls_token", "class_token"),
                      (r"vit\.embeddings\.position_embeddings", "encoder.pos_embedding"),
                      (r"vit\.embeddings\.patch_embeddings\.projection", "conv_proj"))  # fmt: skip
    _fuse(
        c,
        r"(.*attention\.attention\.)query\.(weight|bias)",
        ("query", "key", "value"),
        lambda base, leaf: rename(base).replace(
            "attention.attention.", f"self_attention.in_proj_{leaf}"
        ),
    )
    c.rest(rename)


@converter("openclip", "clip")
def _openclip(c: Conversion) -> None:
    rename = renaming(
        (r"^text_model\.encoder\.layers", "transformer.resblocks"),
        (r"^vision_model\.encoder\.layers", "visual.transformer.resblocks"),
        (r"self_attn\.out_proj", "attn.out_proj"),
        ("layer_norm", "ln_"),
        (r"mlp\.fc1", "mlp.c_fc"),
        (r"mlp\.fc2", "mlp.c_proj"),
        (r"^text_model\.embeddings\.token", "token"),
        (r"^text_model\.embeddings\.position_embedding\.weight", "positional_embedding"),
        (r"^text_model\.final_ln_", "ln_final"),
        (r"^vision_model\.embeddings\.class_embedding", "visual.class_embedding"),
        (r"^vision_model\.embeddings\.patch_embedding", "visual.conv1"),
        (r"^vision_model\.embeddings\.position_embedding\.weight", "visual.positional_embedding"),
        (r"^vision_model\.pre_layrnorm", "visual.ln_pre"),
        (r"^vision_model\.post_layernorm", "visual.ln_post"),
        (r"visual_projection\.weight", "visual.proj"),
        (r"text_projection\.weight", "text_projection"),
    )
    _fuse(
        c,
        r"(.*self_attn\.)q_proj\.(weight|bias)",
        ("q_proj", "k_proj", "v_proj"),
        lambda base, leaf: rename(base).replace("self_attn.", f"attn.in_proj_{leaf}"),
    )
    c.linear(rename, r"(visual|text)_projection\.weight")
    c.rest(rename)


@converter("timm siglip", "siglip")
def _timm_siglip(c: Conversion) -> None:
    rename = renaming(
        (r"^vision_model\.encoder\.layers", "visual.trunk.blocks"),
        (r"self_attn\.out_proj", "attn.proj"),
        ("layer_norm", "norm"),
        (r"^vision_model\.embeddings\.patch_embedding", "visual.trunk.patch_embed.proj"),
        (r"^vision_model\.embeddings\.position_embedding\.weight", "visual.trunk.pos_embed"),
        (r"^vision_model\.post_layernorm", "visual.trunk.norm"),
    )
    _fuse(
        c,
        r"(.*self_attn\.)q_proj\.(weight|bias)",
        ("q_proj", "k_proj", "v_proj"),
        lambda base, leaf: rename(base).replace("self_attn.", f"attn.qkv.{leaf}"),
    )
    for match in c.matching(r".*position_embedding\.weight"):
        c.put(rename(match[0]), c[match[0]][None], match[0], is_apart=True)
    c.rest(rename)


@converter("hf resnet", "resnet")
def _hf_resnet(c: Conversion) -> None:
    c.rest(renaming((r"^conv1", "resnet.embedder.embedder.convolution"),
                    (r"^bn1", "resnet.embedder.embedder.normalization"),
                    (r"^layer(\d)\.(\d)", r"resnet.encoder.stages.\1.layers.\2"),
                    (r"conv1", "layer.0.convolution"), (r"bn1", "layer.0.normalization"),
                    (r"conv2", "layer.1.convolution"), (r"bn2", "layer.1.normalization"),
                    (r"downsample\.0", "shortcut.convolution"),
                    (r"downsample\.1", "shortcut.normalization"),
                    (r"^fc", "classifier.1")))  # fmt: skip


_WHISPER = renaming((r"^model\.", ""), (r"\.layers\.", ".blocks."),
                    (r"encoder_attn_layer_norm", "cross_attn_ln"),
                    ("self_attn_layer_norm", "attn_ln"), ("final_layer_norm", "mlp_ln"),
                    ("encoder_attn", "cross_attn"), ("self_attn", "attn"), ("q_proj", "query"),
                    ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out"),
                    (r"embed_tokens", "token_embedding"),
                    (r"embed_positions\.weight", "positional_embedding"),
                    (r"encoder\.layer_norm", "encoder.ln_post"),
                    (r"decoder\.layer_norm", "decoder.ln"))  # fmt: skip


@converter("openai whisper", "whisper")
def _openai_whisper(c: Conversion) -> None:
    c.rest(lambda name: _WHISPER(name).replace("fc1", "mlp.0").replace("fc2", "mlp.2"))


@converter("mlx whisper", "whisper")
def _mlx_whisper(c: Conversion) -> None:
    def rename(name: str) -> str:
        return _WHISPER(name).replace("fc1", "mlp1").replace("fc2", "mlp2")

    for match in c.matching(r".*conv\d\.weight"):
        c.put(rename(match[0]), c.turned(match[0], (0, 2, 1)), match[0])
    c.rest(rename)


@converter("mlx convolutions", "resnet", "vae", "vit", "siglip")
def _mlx(c: Conversion) -> None:
    for name in c.names:
        if c[name].ndim == 4:
            c.put(name, c.turned(name, (0, 2, 3, 1)), name)
    c.rest(str)


def _ldm_name(name: str) -> str:
    name = re.sub(r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2", name)
    name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
    name = name.replace("to_out.0", "proj_out").replace("conv_shortcut", "nin_shortcut")
    name = re.sub(r"to_([qkv])\.", r"\1.", name).replace("conv_norm_out", "norm_out")
    return f"first_stage_model.{name}"


@converter("ldm", "vae")
def _ldm(c: Conversion) -> None:
    """Linear layers of attention are convolutions of one pixel."""
    for match in c.matching(r".*\.to_\w+(\.0)?\.weight"):
        c.put(_ldm_name(match[0]), c[match[0]][:, :, None, None], match[0], is_apart=True)
    c.rest(_ldm_name)


# --- ONNX, Burn, prefixes -------------------------------------------------------------------------


@converter("onnx", "bert", "vit", "clip")
def _onnx(c: Conversion) -> None:
    """Matrices are transposed and have numbers for names."""
    numbers = count(int(c.rng.integers(200, 900)))
    for name in c.names:
        if c[name].ndim == 2 and not re.match(r".*embed", name):
            c.put(f"onnx::MatMul_{next(numbers)}", c.turned(name), name)
    c.rest(str)


@converter("onnx folded", "resnet", is_final=True)
def _onnx_folded(c: Conversion) -> None:
    """Batch norms are multiplied into the convolutions before them."""
    numbers = count(100)
    for name in [name for name in c.names if c[name].ndim == 4]:
        base = name.removesuffix(".weight")
        norm = base.replace("conv", "bn").replace("downsample.0", "downsample.1")
        norms = [f"{norm}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
        gain, bias, mean, variance = (c[n].astype(F32) for n in norms)
        scale = gain / np.sqrt(variance + F32(1e-5))
        folded = c[name].astype(F32) * scale[:, None, None, None]
        c.put(f"onnx::Conv_{next(numbers)}", folded, name, *norms[::3], is_free=True)
        c.put(f"onnx::Conv_{next(numbers)}", bias - mean * scale, *norms, is_free=True)
    c.rest(str)


_BURN = renaming((r"([nN]orm\w*|bn\d|downsample\.1|layer_norm\d)\.weight", r"\1.gamma"),
                 (r"([nN]orm\w*|bn\d|downsample\.1|layer_norm\d)\.bias", r"\1.beta"))  # fmt: skip


@converter("burn", "bert", "vit", "siglip", "llama", "qwen2")
def _burn(c: Conversion) -> None:
    for name in c.names:
        if c[name].ndim == 2 and not re.match(r".*embed", name):
            c.put(_BURN(name), c.turned(name), name)
    c.rest(_BURN)


@converter("gamma and beta", *_BERTS, "resnet", "vae")
def _gamma(c: Conversion) -> None:
    c.rest(_BURN)


for _prefix in ("module.", "_orig_mod.", "base_model.model.", "model."):

    @converter(f"prefix {_prefix}")
    def _prefixed(c: Conversion, prefix: str = _prefix) -> None:
        c.rest(lambda name: prefix + name)


@converter("same names")
def _same(c: Conversion) -> None:
    c.rest(str)


@converter("no prefix", "llama", "qwen3", "mixtral", "whisper", "gptneox", "falcon", "vit")
def _unprefixed(c: Conversion) -> None:
    c.rest(renaming((r"^(model|gpt_neox|transformer|vit)\.", "")))


_HEADS = (("lm_head.weight", "model.embed_tokens.weight"),
          ("embed_out.weight", "gpt_neox.embed_in.weight"))  # fmt: skip


@converter(
    "tied head dropped",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gptneox",
    prepare=lambda m: m.tensors.update(
        (head, m.tensors[embedding].copy()) for head, embedding in _HEADS if head in m.tensors
    ),
)
def _tied(c: Conversion) -> None:
    for head, _ in _HEADS:
        if head in c.model.tensors:
            c.tied.add(head)
            c.used.add(head)
    c.rest(str)


@converter("padded vocabulary", "llama", "qwen2", "gpt2", "bert", "whisper", "falcon", "t5")
def _padded(c: Conversion) -> None:
    for match in c.matching(r"(.*(word_embeddings|embed_tokens|shared|lm_head)|wte)\.weight"):
        rows = -c[match[0]].shape[0] % 64 or 64
        c.put(match[0], np.pad(c[match[0]], ((0, rows), (0, 0))), match[0])
    c.rest(str)


@converter("merged adapter", "llama", "mistral", "qwen3", "gemma2", is_final=True)
def _merged(c: Conversion) -> None:
    roles = ("q_proj", "v_proj") if c.rng.random() < 0.5 else ("gate_proj", "down_proj", "o_proj")
    rank = int(c.rng.choice([2, 4]))
    for match in c.matching(rf"(.*\.({'|'.join(roles)}))\.weight"):
        values = c[match[0]]
        down = (0.1 * c.rng.standard_normal((rank, values.shape[1]))).astype(F32)
        up = (0.1 * c.rng.standard_normal((values.shape[0], rank))).astype(F32)
        base = f"base_model.model.{match[1]}"
        c.adapter |= {f"{base}.lora_A.weight": down, f"{base}.lora_B.weight": up}
        merged = values.astype(np.float64) + 2 * (up.astype(np.float64) @ down)
        precision = np.finfo(np.float32).eps if values.dtype == F32 else 2.0**-7
        bound: Array = 4 * precision * (np.abs(values.astype(np.float64)) + np.abs(merged) + 0.02)
        c.put(match[0], merged.astype(values.dtype), match[0], bound=bound)
    c.rest(str)
