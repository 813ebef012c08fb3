"""Small untrained models of known architectures: state_dict names and initial values.

Initial values are those of PyTorch's modules, or of the library that the architecture is from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]


class Initialiser:
    """The tensors of a model, module after module."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors: Tensors = {}

    def put(self, name: str, values: Any, dtype: Any = np.float32) -> None:
        """Add a tensor."""
        self.tensors[name] = np.asarray(values).astype(dtype)

    def normal(self, name: str, *shape: int, std: float = 0.02) -> None:
        """Add normally distributed numbers."""
        self.put(name, self.rng.standard_normal(shape) * std)

    def uniform(self, name: str, *shape: int, bound: float) -> None:
        """Add uniformly distributed numbers."""
        self.put(name, self.rng.uniform(-bound, bound, shape))

    def default(self, name: str, *shape: int, bias: bool = True) -> None:
        """Add a linear layer or a convolution as PyTorch makes it."""
        bound = 1 / np.sqrt(np.prod(shape[1:]))
        self.uniform(f"{name}.weight", *shape, bound=bound)
        if bias:
            self.uniform(f"{name}.bias", shape[0], bound=bound)

    def dense(self, name: str, *shape: int, std: float = 0.02, bias: bool = True) -> None:
        """Add a linear layer of normally distributed weights, whose bias is zero."""
        self.normal(f"{name}.weight", *shape, std=std)
        if bias:
            self.put(f"{name}.bias", np.zeros(shape[0]))

    def norm(self, name: str, width: int, *, bias: bool = True) -> None:
        """Add the gain, and the bias, of a norm."""
        self.put(f"{name}.weight", np.ones(width))
        if bias:
            self.put(f"{name}.bias", np.zeros(width))

    def batch_norm(self, name: str, width: int) -> None:
        """Add a batch norm with its running statistics."""
        self.norm(name, width)
        self.put(f"{name}.running_mean", np.zeros(width))
        self.put(f"{name}.running_var", np.ones(width))
        self.put(f"{name}.num_batches_tracked", 0, np.int64)


def resnet(blocks: tuple[int, ...] = (2, 2, 2, 2), width: int = 8) -> Tensors:
    """Return torchvision's ResNet: ``layer2.0.downsample.1`` is a norm."""
    model = Initialiser(1)

    def conv(name: str, out: int, *inner: int) -> None:
        model.normal(f"{name}.weight", out, *inner, std=np.sqrt(2 / (out * inner[-1] ** 2)))

    conv("conv1", width, 3, 7, 7)
    model.batch_norm("bn1", width)
    before = width
    for stage, count in enumerate(blocks, 1):
        size = width << (stage - 1)
        for block in range(count):
            base = f"layer{stage}.{block}"
            for number, inner in ((1, before), (2, size)):
                conv(f"{base}.conv{number}", size, inner, 3, 3)
                model.batch_norm(f"{base}.bn{number}", size)
            if before != size:
                conv(f"{base}.downsample.0", size, before, 1, 1)
                model.batch_norm(f"{base}.downsample.1", size)
            before = size
    model.default("fc", 10, before)
    return model.tensors


def mobilenet(width: int = 8) -> Tensors:
    """Return torchvision's MobileNetV2: sequences of convolutions and norms with numbers."""
    model = Initialiser(2)

    def conv(name: str, out: int, inner: int, size: int) -> None:
        model.normal(f"{name}.weight", out, inner, size, size, std=np.sqrt(2 / (out * size**2)))

    conv("features.0.0", width, 3, 3)
    model.batch_norm("features.0.1", width)
    for block in range(1, 7):
        base, wide = f"features.{block}.conv", 6 * width
        conv(f"{base}.0.0", wide, width, 1)
        model.batch_norm(f"{base}.0.1", wide)
        conv(f"{base}.1.0", wide, 1, 3)
        model.batch_norm(f"{base}.1.1", wide)
        conv(f"{base}.2", width, wide, 1)
        model.batch_norm(f"{base}.3", width)
    conv("features.7.0", 4 * width, width, 1)
    model.batch_norm("features.7.1", 4 * width)
    model.normal("classifier.1.weight", 10, 4 * width, std=0.01)
    model.put("classifier.1.bias", np.zeros(10))
    return model.tensors


def vit(layers: int = 4, width: int = 32) -> Tensors:
    """Return torchvision's vision transformer: the token of the class begins with zeros."""
    model = Initialiser(3)
    model.put("class_token", np.zeros((1, 1, width)))
    model.normal("conv_proj.weight", width, 3, 4, 4, std=np.sqrt(1 / 48))
    model.put("conv_proj.bias", np.zeros(width))
    model.normal("encoder.pos_embedding", 1, 17, width)
    for layer in range(layers):
        base = f"encoder.layers.encoder_layer_{layer}"
        model.norm(f"{base}.ln_1", width)
        bound = np.sqrt(6 / (4 * width))
        model.uniform(f"{base}.self_attention.in_proj_weight", 3 * width, width, bound=bound)
        model.put(f"{base}.self_attention.in_proj_bias", np.zeros(3 * width))
        model.default(f"{base}.self_attention.out_proj", width, width, bias=False)
        model.put(f"{base}.self_attention.out_proj.bias", np.zeros(width))
        model.norm(f"{base}.ln_2", width)
        for number, rows, columns in ((0, 4 * width, width), (3, width, 4 * width)):
            bound = np.sqrt(6 / (rows + columns))
            model.uniform(f"{base}.mlp.{number}.weight", rows, columns, bound=bound)
            model.normal(f"{base}.mlp.{number}.bias", rows, std=1e-6)
    model.norm("encoder.ln", width)
    model.put("heads.head.weight", np.zeros((10, width)))
    model.put("heads.head.bias", np.zeros(10))
    return model.tensors


def hf_vit(layers: int = 4, width: int = 32) -> Tensors:
    """Return the vision transformer of Hugging Face, with a token for masks."""
    model = Initialiser(4)
    model.normal("vit.embeddings.cls_token", 1, 1, width)
    model.put("vit.embeddings.mask_token", np.zeros((1, 1, width)))
    model.normal("vit.embeddings.position_embeddings", 1, 17, width)
    model.dense("vit.embeddings.patch_embeddings.projection", width, 3, 4, 4)
    for layer in range(layers):
        base = f"vit.encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            model.dense(f"{base}.attention.attention.{name}", width, width)
        model.dense(f"{base}.attention.output.dense", width, width)
        model.dense(f"{base}.intermediate.dense", 4 * width, width)
        model.dense(f"{base}.output.dense", width, 4 * width)
        model.norm(f"{base}.layernorm_before", width)
        model.norm(f"{base}.layernorm_after", width)
    model.norm("vit.layernorm", width)
    model.dense("classifier", 10, width)
    return model.tensors


def unet(width: int = 8) -> Tensors:
    """Return the UNet of diffusers: blocks down, in the middle and up."""
    model = Initialiser(5)
    widths = (width, 2 * width, 4 * width)
    model.default("conv_in", width, 4, 3, 3)
    model.default("time_embedding.linear_1", 4 * width, width)
    model.default("time_embedding.linear_2", 4 * width, 4 * width)
    before = width
    for block, size in enumerate(widths):
        for number in range(2):
            _resnet_block(model, f"down_blocks.{block}.resnets.{number}", before, size)
            _attention_block(model, f"down_blocks.{block}.attentions.{number}", size)
            before = size
        if block < 2:
            model.default(f"down_blocks.{block}.downsamplers.0.conv", size, size, 3, 3)
    for number in range(2):
        _resnet_block(model, f"mid_block.resnets.{number}", before, before)
    _attention_block(model, "mid_block.attentions.0", before)
    for block, size in enumerate(reversed(widths)):
        for number in range(3):
            _resnet_block(model, f"up_blocks.{block}.resnets.{number}", before + size, size)
            _attention_block(model, f"up_blocks.{block}.attentions.{number}", size)
            before = size
        if block < 2:
            model.default(f"up_blocks.{block}.upsamplers.0.conv", size, size, 3, 3)
    model.norm("conv_norm_out", width)
    model.default("conv_out", 4, width, 3, 3)
    return model.tensors


def _resnet_block(model: Initialiser, base: str, before: int, after: int) -> None:
    model.norm(f"{base}.norm1", before)
    model.default(f"{base}.conv1", after, before, 3, 3)
    model.default(f"{base}.time_emb_proj", after, 32)
    model.norm(f"{base}.norm2", after)
    model.default(f"{base}.conv2", after, after, 3, 3)
    if before != after:
        model.default(f"{base}.conv_shortcut", after, before, 1, 1)


def _attention_block(model: Initialiser, base: str, size: int) -> None:
    model.norm(f"{base}.norm", size)
    model.default(f"{base}.proj_in", size, size, 1, 1)
    inner = f"{base}.transformer_blocks.0"
    for number, context in ((1, size), (2, 24)):
        model.norm(f"{inner}.norm{number}", size)
        for name, columns in (("q", size), ("k", context), ("v", context)):
            model.default(f"{inner}.attn{number}.to_{name}", size, columns, bias=False)
        model.default(f"{inner}.attn{number}.to_out.0", size, size)
    model.norm(f"{inner}.norm3", size)
    model.default(f"{inner}.ff.net.0.proj", 8 * size, size)
    model.default(f"{inner}.ff.net.2", size, 4 * size)
    model.default(f"{base}.proj_out", size, size, 1, 1)


def bert(layers: int = 4, width: int = 32) -> Tensors:
    """Return BERT: positions as a buffer, a row of zeros for padding."""
    model = Initialiser(6)
    base = "bert.embeddings"
    model.put(f"{base}.position_ids", np.arange(64)[None], np.int64)
    model.put(f"{base}.token_type_ids", np.zeros((1, 64)), np.int64)
    model.normal(f"{base}.word_embeddings.weight", 300, width)
    model.tensors[f"{base}.word_embeddings.weight"][0] = 0
    model.normal(f"{base}.position_embeddings.weight", 64, width)
    model.normal(f"{base}.token_type_embeddings.weight", 2, width)
    model.norm(f"{base}.LayerNorm", width)
    for layer in range(layers):
        base = f"bert.encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            model.dense(f"{base}.attention.self.{name}", width, width)
        model.dense(f"{base}.attention.output.dense", width, width)
        model.norm(f"{base}.attention.output.LayerNorm", width)
        model.dense(f"{base}.intermediate.dense", 4 * width, width)
        model.dense(f"{base}.output.dense", width, 4 * width)
        model.norm(f"{base}.output.LayerNorm", width)
    model.dense("bert.pooler.dense", width, width)
    model.put("cls.predictions.bias", np.zeros(300))
    model.dense("cls.predictions.transform.dense", width, width)
    model.norm("cls.predictions.transform.LayerNorm", width)
    return model.tensors


def t5(layers: int = 4, width: int = 32) -> Tensors:
    """Return T5, whose queries are small and whose feed-forward layers are large."""
    model = Initialiser(7)
    model.normal("shared.weight", 300, width, std=1.0)
    for side, cross in (("encoder", False), ("decoder", True)):
        for layer in range(layers):
            base = f"{side}.block.{layer}.layer"
            attentions = ["0.SelfAttention", *(["1.EncDecAttention"] if cross else [])]
            for name in attentions:
                model.normal(f"{base}.{name}.q.weight", width, width, std=(width * 8) ** -0.5)
                for word in "kvo":
                    model.normal(f"{base}.{name}.{word}.weight", width, width, std=width**-0.5)
                model.norm(f"{base}.{name[0]}.layer_norm", width, bias=False)
            if layer == 0:
                bias = f"{base}.0.SelfAttention.relative_attention_bias.weight"
                model.normal(bias, 32, 4, std=width**-0.5)
            last = f"{base}.{len(attentions)}"
            for name, rows, columns in (
                ("wi_0", 64, width),
                ("wi_1", 64, width),
                ("wo", width, 64),
            ):
                weight = f"{last}.DenseReluDense.{name}.weight"
                model.normal(weight, rows, columns, std=columns**-0.5)
            model.norm(f"{last}.layer_norm", width, bias=False)
        model.norm(f"{side}.final_layer_norm", width, bias=False)
    return model.tensors


def mixtral(layers: int = 4, width: int = 32, experts: int = 4) -> Tensors:
    """Return Mixtral: a router and experts in each layer."""
    model = Initialiser(8)
    model.normal("model.embed_tokens.weight", 300, width)
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for name, rows in (("q", width), ("k", 8), ("v", 8), ("o", width)):
            model.normal(f"{base}.self_attn.{name}_proj.weight", rows, width)
        model.normal(f"{base}.block_sparse_moe.gate.weight", experts, width)
        for expert in range(experts):
            for name, rows, columns in (("w1", 64, width), ("w2", width, 64), ("w3", 64, width)):
                weight = f"{base}.block_sparse_moe.experts.{expert}.{name}.weight"
                model.normal(weight, rows, columns)
        model.norm(f"{base}.input_layernorm", width, bias=False)
        model.norm(f"{base}.post_attention_layernorm", width, bias=False)
    model.norm("model.norm", width, bias=False)
    model.normal("lm_head.weight", 300, width)
    return model.tensors


def convnext(width: int = 8) -> Tensors:
    """Return Hugging Face's ConvNeXt, whose layers are scaled by a millionth at first."""
    model = Initialiser(9)
    widths, depths = (width, 2 * width, 4 * width), (2, 3, 2)
    model.dense("embeddings.patch_embeddings", width, 3, 4, 4)
    model.norm("embeddings.layernorm", width)
    for stage, (size, depth) in enumerate(zip(widths, depths, strict=True)):
        base = f"encoder.stages.{stage}"
        if stage:
            model.norm(f"{base}.downsampling_layer.0", size // 2)
            model.dense(f"{base}.downsampling_layer.1", size, size // 2, 2, 2)
        for layer in range(depth):
            inner = f"{base}.layers.{layer}"
            model.put(f"{inner}.layer_scale_parameter", np.full(size, 1e-6))
            model.dense(f"{inner}.dwconv", size, 1, 7, 7)
            model.norm(f"{inner}.layernorm", size)
            model.dense(f"{inner}.pwconv1", 4 * size, size)
            model.dense(f"{inner}.pwconv2", size, 4 * size)
    model.norm("layernorm", widths[-1])
    return model.tensors


def swin(layers: int = 2, width: int = 16) -> Tensors:
    """Return Swin, with indices and masks as buffers, and positions that begin with zeros."""
    model = Initialiser(10)
    model.default("patch_embed.proj", width, 3, 4, 4)
    model.norm("patch_embed.norm", width)
    for stage in range(2):
        size = width << stage
        for block in range(layers):
            base = f"layers.{stage}.blocks.{block}"
            model.norm(f"{base}.norm1", size)
            model.put(f"{base}.attn.relative_position_bias_table", np.zeros((49, 4)))
            index = np.random.default_rng(0).integers(0, 49, (16, 16))
            model.put(f"{base}.attn.relative_position_index", index, np.int64)
            model.dense(f"{base}.attn.qkv", 3 * size, size)
            model.dense(f"{base}.attn.proj", size, size)
            model.norm(f"{base}.norm2", size)
            model.dense(f"{base}.mlp.fc1", 4 * size, size)
            model.dense(f"{base}.mlp.fc2", size, 4 * size)
            if block % 2:
                mask = np.where(np.tri(16, 16)[None].repeat(4, 0) > 0, 0, -100.0)
                model.put(f"{base}.attn_mask", mask)
        if not stage:
            model.dense(f"layers.{stage}.downsample.reduction", 2 * size, 4 * size, bias=False)
            model.norm(f"layers.{stage}.downsample.norm", 4 * size)
    model.norm("norm", 2 * width)
    model.dense("head", 10, 2 * width)
    return model.tensors


def mamba(layers: int = 4, width: int = 32) -> Tensors:
    """Return Mamba: ``A_log`` is the same in every row and layer, ``D`` is ones."""
    model = Initialiser(11)
    inner = 2 * width
    model.normal("backbone.embeddings.weight", 300, width)
    for layer in range(layers):
        base = f"backbone.layers.{layer}"
        model.norm(f"{base}.norm", width, bias=False)
        model.put(f"{base}.mixer.A_log", np.log(np.arange(1, 17))[None].repeat(inner, 0))
        model.put(f"{base}.mixer.D", np.ones(inner))
        model.default(f"{base}.mixer.conv1d", inner, 1, 4)
        model.default(f"{base}.mixer.in_proj", 2 * inner, width, bias=False)
        model.default(f"{base}.mixer.x_proj", 34, inner, bias=False)
        model.default(f"{base}.mixer.dt_proj", inner, 2, bias=False)
        step = np.exp(model.rng.uniform(np.log(1e-3), np.log(0.1), inner))
        model.put(f"{base}.mixer.dt_proj.bias", step + np.log(-np.expm1(-step)))
        model.default(f"{base}.mixer.out_proj", width, inner, bias=False)
    model.norm("backbone.norm_f", width, bias=False)
    return model.tensors


def dit(layers: int = 4, width: int = 32) -> Tensors:
    """Return DiT: modulations and the last layer are zeros, positions are sines."""
    model = Initialiser(12)
    angles = np.outer(np.arange(16), 1 / 10000 ** (np.arange(width // 2) / (width // 2)))
    model.put("pos_embed", np.concatenate([np.sin(angles), np.cos(angles)], 1)[None])
    model.default("x_embedder.proj", width, 4, 2, 2)
    model.dense("t_embedder.mlp.0", width, 64)
    model.dense("t_embedder.mlp.2", width, width)
    model.normal("y_embedder.embedding_table.weight", 11, width)
    for layer in range(layers):
        base = f"blocks.{layer}"
        for name, rows, columns in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", 4 * width, width),
            ("mlp.fc2", width, 4 * width),
        ):
            bound = np.sqrt(6 / (rows + columns))
            model.uniform(f"{base}.{name}.weight", rows, columns, bound=bound)
            model.put(f"{base}.{name}.bias", np.zeros(rows))
        model.dense(f"{base}.adaLN_modulation.1", 6 * width, width, std=0)
    model.dense("final_layer.linear", 16, width, std=0)
    model.dense("final_layer.adaLN_modulation.1", 2 * width, width, std=0)
    return model.tensors


def whisper(layers: int = 3, width: int = 32) -> Tensors:
    """Return Whisper: sines for positions, an encoder and a decoder."""
    model = Initialiser(13)
    model.dense("model.encoder.conv1", width, 8, 3)
    model.dense("model.encoder.conv2", width, width, 3)
    angles = np.outer(np.arange(60), 1 / 10000 ** (np.arange(width // 2) / (width // 2 - 1)))
    sines = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    model.put("model.encoder.embed_positions.weight", sines)
    model.normal("model.decoder.embed_tokens.weight", 300, width)
    model.normal("model.decoder.embed_positions.weight", 48, width)
    for side in ("encoder", "decoder"):
        for layer in range(layers):
            base = f"model.{side}.layers.{layer}"
            for name in ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]:
                for word in "kvq":
                    model.dense(f"{base}.{name}.{word}_proj", width, width, bias=word != "k")
                model.dense(f"{base}.{name}.out_proj", width, width)
                model.norm(f"{base}.{name}_layer_norm", width)
            model.dense(f"{base}.fc1", 4 * width, width)
            model.dense(f"{base}.fc2", width, 4 * width)
            model.norm(f"{base}.final_layer_norm", width)
        model.norm(f"model.{side}.layer_norm", width)
    return model.tensors


def lstm(layers: int = 2, width: int = 24) -> Tensors:
    """Return a language model with an LSTM, a PReLU and weight normalisation."""
    model = Initialiser(14)
    model.normal("encoder.weight", 200, width, std=1.0)
    for layer in range(layers):
        for name, shape in (("ih", (4 * width, width)), ("hh", (4 * width, width))):
            model.uniform(f"rnn.weight_{name}_l{layer}", *shape, bound=width**-0.5)
            model.uniform(f"rnn.bias_{name}_l{layer}", 4 * width, bound=width**-0.5)
    model.put("activation.weight", np.full(width, 0.25))
    direction = model.rng.uniform(-0.2, 0.2, (200, width))
    lengths = np.linalg.norm(direction, axis=1, keepdims=True)
    model.put("decoder.parametrizations.weight.original0", lengths)
    model.put("decoder.parametrizations.weight.original1", direction)
    model.norm("norm", width)
    return model.tensors


ARCHITECTURES: tuple[Callable[[], Tensors], ...] = (
    *(resnet, mobilenet, vit, hf_vit, unet, bert, t5, mixtral),
    *(convnext, swin, mamba, dit, whisper, lstm),
)
