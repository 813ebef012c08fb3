"""Converters of language models: llama.cpp, Meta, Megatron, vLLM, FSDP, experts and quantisers."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

from torture.explaining.conversions import CONVERTERS, Conversion, Converter, converter, renaming
from torture.explaining.models import F32, Array, Model

_LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
_ROPED = ("llama", "mistral", "mixtral")
_BLOCK = 32  # of rows and columns of scaled float8

# --- llama.cpp ------------------------------------------------------------------------------------

#: Families by their names in GGUF.
_IN_GGUF = {"mistral": "llama", "mixtral": "llama", "siglip": "mmproj", "clip": "mmproj"}
_GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral",
                  "qwen3moe", "gpt2", "bloom", "falcon", "gptneox", "stablelm", "deepseek2",
                  "olmo2", "bert", "t5", "siglip", "clip")  # fmt: skip


def split_by_head(values: Array, heads: int) -> list[Array]:
    """Return queries, keys and values that alternate head by head."""
    rows = values.reshape(heads, 3, -1, *values.shape[1:])
    return [rows[:, n].reshape(-1, *values.shape[1:]) for n in range(3)]


def split_by_group(values: Array, groups: int, head: int) -> list[Array]:
    """Return queries, keys and values that alternate group by group."""
    rows = values.reshape(groups, -1, head, *values.shape[1:])
    parts = rows[:, :-2], rows[:, -2], rows[:, -1]
    return [part.reshape(-1, *values.shape[1:]) for part in parts]


def split_qkv(model: Model, values: Array) -> list[Array]:
    """Return queries, keys and values of a fused tensor of this model's family."""
    if model.family == "falcon":
        return split_by_group(values, model.sizes.key_heads, model.sizes.head)
    return split_by_head(values, model.sizes.heads)


def _gguf(c: Conversion) -> None:
    from gguf import MODEL_ARCH, get_tensor_name_map

    family, sizes = c.model.family, c.model.sizes
    arch = MODEL_ARCH[_IN_GGUF.get(family, family).upper()]
    mapped = get_tensor_name_map(arch, sizes.layers)

    def rename(name: str) -> str:
        return mapped.get_name(name, try_suffixes=(".weight", ".bias")) or ""

    _gguf_groups(c, rename)
    for name in c.names:
        new, values = rename(name), c[name]
        if not new:
            continue
        if family in _ROPED and re.search(r"\.[qk]_proj\.", name):
            values = c.roped(name, sizes.heads if ".q_proj." in name else sizes.key_heads)
        elif family.startswith("gemma") and name.endswith("norm.weight"):
            values = c.raised(name)
        elif family == "gpt2" and re.search(r"\.c_\w+\.weight", name):
            values = c.turned(name)
        elif "query_key_value" in name:
            split = split_qkv(c.model, values)
            right = np.concatenate(split)
            values = c.step("qkv", name, lambda v=right: v, **{"not reordered": lambda v=values: v})  # type: ignore[misc]
        c.put(new, values, name, is_apart="query_key_value" in name)


def _gguf_groups(c: Conversion, rename: Any) -> None:
    """Stack experts and the norms of StableLM, and split the keys and values of DeepSeek."""
    heads, head = c.model.sizes.heads, c.model.sizes.head
    groups: dict[str, list[str]] = {}
    for match in c.matching(r"(.*experts)\.\d+\.(.*\.weight)"):
        groups.setdefault(f"{match[1]}.{match[2]}", []).append(match[0])
    for match in c.matching(r"(.*layernorm)\.norms\.\d+\.(weight)"):
        groups.setdefault(f"{match[1]}.{match[2]}", []).append(match[0])
    for new, names in groups.items():
        c.put(rename(new), c.stacked(names), *names, is_apart="norm" in new)
    for match in c.matching(r"(.*)\.kv_b_proj\.weight"):
        parts = c[match[0]].reshape(heads, 2 * head, -1)
        keys, values = parts[:, :head], parts[:, head:]
        turned = c.step("transposed", match[0], lambda k=keys: k.swapaxes(1, 2),  # type: ignore[misc]
                        **{"not transposed": lambda k=keys: k})  # fmt: skip
        c.put(rename(f"{match[1]}.k_b_proj.weight"), turned, match[0], is_apart=True)
        c.put(rename(f"{match[1]}.v_b_proj.weight"), values, match[0], is_apart=True)


def _in_tower(model: Model) -> None:
    """Name encoders of images as parts of a model of language and images."""
    model.tensors = {f"vision_tower.{name}": values for name, values in model.tensors.items()}


for _family in _GGUF_FAMILIES:
    _name = f"gguf {_family}"
    _arch = _IN_GGUF.get(_family, _family)
    _prepare = _in_tower if _arch == "mmproj" else None
    CONVERTERS[_name] = Converter(_name, (_family,), _gguf, _prepare, _arch)

# --- names of other projects ----------------------------------------------------------------------

_META = renaming((r"^model\.", ""), ("embed_tokens", "tok_embeddings"), ("lm_head", "output"),
                 (r"self_attn\.(.)_proj", r"attention.w\1"), (r"mlp\.gate_proj", "feed_forward.w1"),
                 (r"mlp\.up_proj", "feed_forward.w3"), (r"mlp\.down_proj", "feed_forward.w2"),
                 ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
                 ("block_sparse_moe", "feed_forward"))  # fmt: skip
_TUNE = renaming((r"^model\.", ""), ("embed_tokens", "tok_embeddings"), ("lm_head", "output"),
                 (r"self_attn\.(.)_proj", r"attn.\1_proj"), (r"attn\.o_proj", "attn.output_proj"),
                 (r"mlp\.gate_proj", "mlp.w1"), (r"mlp\.up_proj", "mlp.w3"),
                 (r"mlp\.down_proj", "mlp.w2"), ("input_layernorm", "sa_norm"),
                 ("post_attention_layernorm", "mlp_norm"))  # fmt: skip


def _rope_all(c: Conversion, rename: Any) -> None:
    sizes = c.model.sizes
    for match in c.matching(r".*\.self_attn\.([qk])_proj\.weight"):
        heads = sizes.heads if match[1] == "q" else sizes.key_heads
        c.put(rename(match[0]), c.roped(match[0], heads), match[0])


@converter("meta", "llama", "mistral", "mixtral")
def _meta(c: Conversion) -> None:
    _rope_all(c, _META)
    c.rest(_META)


@converter("torchtune", "llama", "mistral")
def _torchtune(c: Conversion) -> None:
    _rope_all(c, _TUNE)
    c.rest(_TUNE)


@converter("easylm", "llama", "mistral")
def _easylm(c: Conversion) -> None:
    """Linear layers are transposed, and queries and keys permuted as in Meta's files."""
    rename = renaming((r"^", "params/"), ("model.", "transformer/"), ("layers", "h"),
                      ("embed_tokens", "wte"), (r"self_attn\.(.)_proj", r"attention/w\1"),
                      (r"mlp\.gate_proj", "feed_forward/w1"), (r"mlp\.up_proj", "feed_forward/w3"),
                      (r"mlp\.down_proj", "feed_forward/w2"), ("input_layernorm", "attention_norm"),
                      ("post_attention_layernorm", "ffn_norm"), (r"(norm|norm_f)\.weight",
                      r"\1.kernel"), (r"wte\.weight", "wte.embedding"), ("weight", "kernel"),
                      (r"\.", "/"))  # fmt: skip
    c.linear(rename)
    c.rest(rename)


@converter("nanogpt", "gpt2")
def _nanogpt(c: Conversion) -> None:
    rename = renaming(("^", "transformer."))
    c.linear(rename, r"h\..*\.c_\w+\.weight")
    c.rest(rename)


@converter("tensorflow gpt2", "gpt2")
def _tf_gpt2(c: Conversion) -> None:
    rename = renaming((r"^h\.(\d+)", r"model.h\1"), (r"^w", "model.w"), (r"^ln_f", "model.ln_f"),
                      (r"(ln_\w)\.weight", r"\1.g"), (r"\.bias", ".b"), (r"(w.e)\.weight", r"\1"),
                      (r"\.weight", ".w"), (r"\.", "/"))  # fmt: skip
    for match in c.matching(r"h\..*\.c_\w+\.weight"):
        c.put(rename(match[0]), c[match[0]][None], match[0], is_apart=True)
    c.rest(rename)


@converter("pipeline stages", "llama", "mistral", "qwen2", "gptneox", "bloom")
def _stages(c: Conversion) -> None:
    layers = c.model.sizes.layers

    def rename(name: str) -> str:
        match = re.match(r"(?:model\.|gpt_neox\.|)(?:layers|h)\.(\d+)\.(.*)", name)
        if match:
            return f"{int(match[1]) + 1:02}.{match[2]}"
        return f"{0 if 'embed' in name else layers + 1:02}.{name.rpartition('.')[2]}" + (
            "_head" if "head" in name or "embed_out" in name else ""
            ) + ("_norm" if "norm" in name or "ln_f" in name else "")  # fmt: skip

    c.rest(rename)


@converter("scanned layers", *_LLAMAS, "bert", "vit")
def _scanned(c: Conversion) -> None:
    groups: dict[str, list[str]] = {}
    for match in c.matching(r"(.*?)\.\d+\.(.*)"):
        groups.setdefault(f"{match[1]}.{match[2]}", []).append(match[0])
    for new, names in groups.items():
        c.put(new, c.stacked(names), *names)
    c.rest(str)


# --- joined and split projections -----------------------------------------------------------------


@converter("vllm", *_LLAMAS)
def _vllm(c: Conversion) -> None:
    for match in c.matching(r"(.*self_attn)\.q_proj\.(weight|bias)"):
        names = [f"{match[1]}.{role}_proj.{match[2]}" for role in "qkv"]
        c.put(f"{match[1]}.qkv_proj.{match[2]}", c.joined(names), *names)
    for match in c.matching(r"(.*mlp)\.gate_proj\.weight"):
        names = [f"{match[1]}.{role}_proj.weight" for role in ("gate", "up")]
        c.put(f"{match[1]}.gate_up_proj.weight", c.joined(names), *names)
    c.rest(str)


@converter("unfused phi3", "phi3")
def _unfused(c: Conversion) -> None:
    sizes = c.model.sizes
    cuts = [sizes.queries, sizes.queries + sizes.keys]
    for match in c.matching(r"(.*)\.qkv_proj\.weight"):
        for role, part in zip("qkv", np.split(c[match[0]], cuts), strict=True):
            c.put(f"{match[1]}.{role}_proj.weight", part, match[0])
    for match in c.matching(r"(.*)\.gate_up_proj\.weight"):
        for role, part in zip(("gate", "up"), np.split(c[match[0]], 2), strict=True):
            c.put(f"{match[1]}.{role}_proj.weight", part, match[0])
    c.rest(str)


@converter("split qkv", "bloom", "gptneox", "falcon", is_apart=True)
def _split_qkv(c: Conversion) -> None:
    for match in c.matching(r"(.*)\.query_key_value\.(weight|bias)"):
        parts = split_qkv(c.model, c[match[0]])
        for role, part in zip(("query", "key", "value"), parts, strict=True):
            c.put(f"{match[1]}.{role}.{match[2]}", part, match[0])
    c.is_apart = False
    c.rest(str)


_MEGATRON = renaming((r"^model\.layers", "decoder.layers"), ("self_attn", "self_attention"),
                     (r"^model\.embed_tokens", "embedding.word_embeddings"),
                     (r"^model\.norm", "decoder.final_layernorm"), ("lm_head", "output_layer"),
                     (r"\.o_proj", ".linear_proj"), (r"down_proj", "linear_fc2"),
                     (r"input_layernorm\.weight", "self_attention.linear_qkv.layer_norm_weight"),
                     (r"post_attention_layernorm\.weight", "mlp.linear_fc1.layer_norm_weight"),
                     (r"([qk])_norm", r"\1_layernorm"))  # fmt: skip


def by_group(c: Conversion, base: str, leaf: str) -> tuple[Array, list[str]]:
    """Return queries, keys and values group by group, and their names."""
    names, groups = [f"{base}.{role}_proj.{leaf}" for role in "qkv"], c.model.sizes.key_heads
    parts = [c[name].reshape(groups, -1, *c[name].shape[1:]) for name in names]
    tail = c[names[0]].shape[1:]
    right = np.concatenate(parts, axis=1).reshape(-1, *tail)
    plain = np.concatenate([part.reshape(-1, *tail) for part in parts])
    return c.step("grouped", names[0], lambda: right, **{"not grouped": lambda: plain}), names


@converter("megatron", *_LLAMAS, is_apart=True)
def _megatron(c: Conversion) -> None:
    for match in c.matching(r"(.*self_attn)\.q_proj\.(weight|bias)"):
        values, names = by_group(c, match[1], match[2])
        c.put(f"{_MEGATRON(match[1])}.linear_qkv.{match[2]}", values, *names)
    c.is_apart = False
    for match in c.matching(r"(.*mlp)\.gate_proj\.weight"):
        names = [match[0], f"{match[1]}.up_proj.weight"]
        c.put(f"{_MEGATRON(match[1])}.linear_fc1.weight", c.joined(names), *names)
    c.rest(_MEGATRON)


@converter("megatron ranks", *_LLAMAS[:2], is_apart=True)
def _megatron_ranks(c: Conversion) -> None:
    """Two ranks; each has its half of the gates over its half of the other rows."""
    for match in c.matching(r"(.*self_attn)\.q_proj\.(weight|bias)"):
        values, names = by_group(c, match[1], match[2])
        for rank, part in enumerate(np.split(values, 2)):
            c.put(f"mp_rank_{rank:02}.{_MEGATRON(match[1])}.linear_qkv.{match[2]}", part, *names)
    for match in c.matching(r"(.*mlp)\.gate_proj\.weight"):
        names = [match[0], f"{match[1]}.up_proj.weight"]
        halves = [np.split(c[name], 2) for name in names]
        for rank in range(2):
            joined = np.concatenate([half[rank] for half in halves])
            c.put(f"mp_rank_{rank:02}.{_MEGATRON(match[1])}.linear_fc1.weight", joined, *names)
    c.is_apart = False
    for match in c.matching(r".*(o_proj|down_proj|embed_tokens|lm_head)\.weight"):
        axis = 0 if "embed" in match[0] or "head" in match[0] else 1
        if c[match[0]].shape[axis] % 2:
            continue
        for rank, part in enumerate(np.split(c[match[0]], 2, axis)):
            c.put(f"mp_rank_{rank:02}.{_MEGATRON(match[0])}", part, match[0])
    c.rest(_MEGATRON)


@converter("tensor parallel", *_LLAMAS, "mixtral")
def _tensor_parallel(c: Conversion) -> None:
    ranks = int(c.rng.choice([2, 4]))
    label = str(c.rng.choice(["tp{}", "rank{}", "shard_{}"]))
    for match in c.matching(r"(.*)\.((?:[qkvo]_proj|gate_proj|up_proj|down_proj|w[123]|lm_head"
                            r"|embed_tokens)\.weight)"):  # fmt: skip
        axis = 1 if re.match(r"o_proj|down_proj|w2", match[2]) else 0
        if c[match[0]].shape[axis] % ranks:
            continue
        parts = np.split(c[match[0]], ranks, axis)
        order = list(range(ranks))
        values = c.step("ranks", match[0], lambda o=order: np.array(o),  # type: ignore[misc]
                        **{"ranks exchanged": lambda o=order: np.array(o[::-1])})  # fmt: skip
        for rank, source in enumerate(values):
            c.put(f"{match[1]}.{label.format(rank)}.{match[2]}", parts[source], match[0])
    c.rest(str)


@converter("litgpt", *_LLAMAS[:2], is_apart=True)
def _litgpt(c: Conversion) -> None:
    rename = renaming((r"^model\.layers", "transformer.h"), ("embed_tokens", "wte"),
                      (r"^model", "transformer"), ("self_attn", "attn"), ("o_proj", "proj"),
                      ("input_layernorm", "norm_1"), ("post_attention_layernorm", "norm_2"),
                      ("gate_proj", "fc_1"), ("up_proj", "fc_2"), ("down_proj", "proj"),
                      (r"r\.norm\.", "r.ln_f."))  # fmt: skip
    for match in c.matching(r"(.*self_attn)\.q_proj\.(weight|bias)"):
        values, names = by_group(c, match[1], match[2])
        c.put(f"{rename(match[1])}.attn.{match[2]}", values, *names)
    c.is_apart = False
    c.rest(rename)


@converter("fsdp flat", *_LLAMAS, "bert", is_apart=True)
def _flat(c: Conversion) -> None:
    _flatten(c, 1)


@converter("fsdp ranks", *_LLAMAS, "bert", is_apart=True)
def _flat_ranks(c: Conversion) -> None:
    _flatten(c, 2)


def _flatten(c: Conversion, ranks: int) -> None:
    """Join all tensors of a layer into one, padded to a multiple of the ranks, and cut it."""
    groups: dict[str, list[str]] = {}
    for name in c.names:
        match = re.match(r".*?\.(?:layers?|h)\.\d+", name)
        groups.setdefault(f"_fsdp_wrapped_module.{match[0]}." if match else "", []).append(name)
    for base, names in groups.items():
        flat = np.concatenate([c[name].reshape(-1) for name in names])
        flat = np.pad(flat, (0, -flat.size % ranks))
        for rank, part in enumerate(np.split(flat, ranks)):
            suffix = f".rank{rank}" if ranks > 1 else ""
            c.put(f"{base}_fsdp_wrapped_module._flat_param{suffix}", part, *names)


@converter("gemma einsum", "gemma2", is_apart=True)
def _einsum(c: Conversion) -> None:
    """Give queries an axis of heads, and join keys and values; norms stay as they are."""
    heads, head, width = c.model.sizes.heads, c.model.sizes.head, c.model.sizes.width
    rename = renaming((r"^model\.layers\.", "transformer/layer_"), (r"^model\.", "transformer/"),
                      (r"embed_tokens\.weight", "embedder/input_embedding"),
                      (r"^transformer/norm\.weight", "transformer/final_norm/scale"),
                      (r"\.input_layernorm\.weight", "/pre_attention_norm/scale"),
                      (r"\.post_attention_layernorm\.weight", "/post_attention_norm/scale"),
                      (r"\.pre_feedforward_layernorm\.weight", "/pre_ffw_norm/scale"),
                      (r"\.post_feedforward_layernorm\.weight", "/post_ffw_norm/scale"),
                      (r"\.mlp\.down_proj\.weight", "/mlp/linear/w"))  # fmt: skip
    for match in c.matching(r"(.*)\.self_attn\.q_proj\.weight"):
        base = f"{match[1]}.self_attn"
        names = [f"{base}.{role}_proj.weight" for role in "kv"]
        queries = c[match[0]].reshape(heads, head, width).swapaxes(1, 2)
        pairs = [c[name].reshape(-1, head, width).swapaxes(1, 2) for name in names]
        output = c[f"{base}.o_proj.weight"].T.reshape(heads, head, width)
        c.put(f"{rename(match[1])}/attn/q_einsum/w", queries, match[0])
        c.put(f"{rename(match[1])}/attn/kv_einsum/w", np.stack(pairs), *names)
        c.put(f"{rename(match[1])}/attn/attn_vec_einsum/w", output, f"{base}.o_proj.weight")
        gates = [f"{match[1]}.mlp.{role}_proj.weight" for role in ("gate", "up")]
        gated = np.stack([c[name].T for name in gates])
        c.put(f"{rename(match[1])}/mlp/gating_einsum/w", gated, *gates)
    c.is_apart = False
    for match in c.matching(r".*\.down_proj\.weight"):
        c.put(rename(match[0]), c.turned(match[0]), match[0])
    c.rest(rename)


# --- experts --------------------------------------------------------------------------------------


def _experts(c: Conversion, base: str, leaf: str) -> list[str]:
    return [f"{base}.experts.{n}.{leaf}.weight" for n in range(c.model.sizes.experts)]


def _joined_experts(c: Conversion, mode: str) -> None:
    is_mixtral = c.model.family == "mixtral"
    gates = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    for match in c.matching(r"(.*)\.experts\.0\." + gates[0] + r"\.weight"):
        gate, up, down = (_experts(c, match[1], leaf) for leaf in gates)
        both = [[c[g], c[u]] for g, u in zip(gate, up, strict=True)]
        if mode == "interleaved":
            pairs = [np.stack(pair, 1).reshape(-1, pair[0].shape[1]).T for pair in both]
        elif mode == "transposed":
            pairs = [np.concatenate(pair).T for pair in both]
        else:
            pairs = [np.concatenate(pair) for pair in both]
        exchanged = [np.concatenate(pair[::-1]) for pair in both]
        exchanged = exchanged if mode == "plain" else [pair.T for pair in exchanged]
        values = c.step("experts", match[0], lambda p=pairs: np.stack(p),  # type: ignore[misc]
                        **{"gate and up exchanged": lambda p=exchanged: np.stack(p)})  # fmt: skip
        c.put(f"{match[1].replace('block_sparse_moe', 'mlp')}.experts.gate_up_proj", values,
              *gate, *up)  # fmt: skip
        c.put(f"{match[1].replace('block_sparse_moe', 'mlp')}.experts.down_proj",
              c.stacked(down, None if mode == "plain" else np.transpose), *down)  # fmt: skip
    c.is_apart = False
    c.rest(renaming(("block_sparse_moe", "mlp")))


_MIXTURES = ("mixtral", "qwen3moe", "deepseek2")


@converter("transformers 5", *_MIXTURES, is_apart=True)
def _transformers_5(c: Conversion) -> None:
    _joined_experts(c, "plain")


@converter("transposed experts", *_MIXTURES, is_apart=True)
def _transposed_experts(c: Conversion) -> None:
    _joined_experts(c, "transposed")


@converter("interleaved experts", *_MIXTURES, is_apart=True)
def _interleaved_experts(c: Conversion) -> None:
    _joined_experts(c, "interleaved")


@converter("stacked experts", *_MIXTURES)
def _stacked_experts(c: Conversion) -> None:
    for match in c.matching(r"(.*)\.experts\.0\.(\w+)\.weight"):
        names = _experts(c, match[1], match[2])
        c.put(f"{match[1]}.experts.{match[2]}", c.stacked(names), *names)
    c.rest(str)


# --- grids ----------------------------------------------------------------------------------------

_NF4 = np.array([-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004,
                 0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684,
                 1.0], F32)  # fmt: skip


def scaled_float8(values: Array) -> tuple[Array, Array]:
    """Round blocks of a matrix to float8 with a scale each; return floats and largest errors."""
    rows, columns = values.shape
    padded = np.pad(values.astype(F32), ((0, -rows % _BLOCK), (0, -columns % _BLOCK)))
    blocks = padded.reshape(len(padded) // _BLOCK, _BLOCK, -1, _BLOCK)
    scale = np.maximum(np.abs(blocks).max(axis=(1, 3), keepdims=True), F32(1e-12)) / F32(448)
    rounded = (blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(F32) * scale
    bound = np.abs(blocks) / 8 + scale * F32(0.002)
    return tuple(x.reshape(padded.shape)[:rows, :columns].astype(F32) for x in (rounded, bound))


def nf4(values: Array) -> tuple[Array, Array]:
    """Round blocks of 64 to the nearest of 16 levels; return floats and largest errors."""
    blocks = values.astype(F32).reshape(-1, 32)
    most = np.maximum(np.abs(blocks).max(axis=1, keepdims=True), F32(1e-12))
    codes = np.abs((blocks / most)[..., None] - _NF4).argmin(axis=-1)
    bound = np.broadcast_to(F32(0.31) * most, blocks.shape)
    return (_NF4[codes] * most).reshape(values.shape), bound.reshape(values.shape)


@converter("scaled float8", "deepseek2", *_LLAMAS, is_apart=True, is_final=True)
def _scaled_float8(c: Conversion) -> None:
    for match in c.matching(r".*\.layers\..*_proj\.weight"):
        values, bound = scaled_float8(c[match[0]])
        c.put(match[0], values, match[0], bound=bound)
    c.is_apart = False
    c.rest(str)


@converter("nf4", *_LLAMAS, "phi3", is_apart=True, is_final=True)
def _nf4(c: Conversion) -> None:
    for match in c.matching(r".*\.layers\..*_proj\.weight"):
        values, bound = nf4(c[match[0]])
        c.put(match[0], values, match[0], bound=bound)
    c.is_apart = False
    c.rest(str)


def on_grid(model: Model) -> None:
    """Round the matrices of a model to a grid of GGUF."""
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType[str(model.rng.choice(["Q4_0", "Q8_0", "Q4_1", "Q5_0"]))]
    for name, values in model.tensors.items():
        if values.ndim == 2 and values.shape[1] % 32 == 0 and ".layers." in name:
            blocks = quants.quantize(np.ascontiguousarray(values, F32), kind)
            model.tensors[name] = quants.dequantize(blocks, kind).astype(F32)


@converter("dequantised copy", *_LLAMAS, "olmo2", prepare=on_grid, is_final=True)
def _dequantised(c: Conversion) -> None:
    c.rest(str)


@converter("dequantised and renamed", "llama", "mistral", prepare=on_grid, is_final=True)
def _dequantised_renamed(c: Conversion) -> None:
    c.rest(_META)
