"""State that a model keeps of the tokens so far: keys and values, windows of them, and recurrences.

`cache_of` follows the config of Hugging Face, or the keys of GGUF, as the code does that runs such
models: transformers and llama.cpp. The widths of keys and values that a config leaves to a default
follow from the tensors. Anything else that is not stated is unknown; `ModelCache.unknown` names it.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from xckpt.structure.facts import GGUF_KEYS, KEYS
from xckpt.structure.families.tables import evaluate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xckpt.structure.model import Structure

FULL, SLIDING, LATENT = "full attention", "sliding window", "latent attention"
RECURRENT, BOTH, NONE = "recurrent", "attention and recurrent", "no cache"

_MOST_LAYERS, _LARGEST = 4096, 1 << 32
# Kinds of layers as configs name them, in lists or as letters.
_KINDS = {
    **dict.fromkeys(("full_attention", "attention", "*"), FULL),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), SLIDING),
    **dict.fromkeys(("linear_attention", "mamba", "conv", "M"), RECURRENT),
    **dict.fromkeys(("mlp", "moe", "-", "E"), NONE),
}
_LISTS_OF_KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
# Every n-th layer of these families is without the window; all layers of the others have it.
_PERIODS = {
    **dict.fromkeys(("gemma2", "gpt_oss", "gpt-oss"), 2),
    **dict.fromkeys(("cohere2", "olmo3", "llama4", "llama4_text"), 4),
    **dict.fromkeys(("gemma3", "gemma3_text"), 6),
}
_ALWAYS_SLIDING = frozenset({"mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
# llama.cpp ignores keys of windows in these families.
_NEVER_SLIDING_IN_GGUF = frozenset({"llama", "phi3", "qwen2", "qwen3"})
_OF_RECURRENCES = ("mamba_", "ssm_", "linear_num_", "inner", "short_")
_WITHOUT_ATTENTION = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv6", "rwkv7"})
_PARALLEL = frozenset({"falcon_h1", "falcon-h1"})
# Families without grouped queries, or whose heads are all of one group unless stated.
_EQUAL_HEADS = frozenset({
    "gpt2", "gpt_neo", "gpt_neox", "gptneox", "gptj", "opt", "bloom", "codegen", "xglm", "llama",
    "phi", "persimmon", "biogpt", "mpt",
})  # fmt: skip
_ENCODERS = re.compile(r"(.*-)?bert(-.*)?|t5(encoder)?|clip")
_GENERATING = re.compile(r"(CausalLM|LMHeadModel|ConditionalGeneration)$")

# Keys by the size that they state, best first.
_KEYS = {
    "layers": (*KEYS["layer"], "n_layers"),
    "embd": ("hidden_size", "n_embd", "d_model"),
    "heads": (*KEYS["head"], "n_heads"),
    "heads_kv": (*KEYS["head_kv"], "n_head_kv", "kv_n_heads"),
    "key": (*KEYS["key"], "kv_channels"),
    "value": ("v_head_dim",),
    "window": ("sliding_window", "attention_chunk_size"),
}
_GGUF_KEYS = {
    **{size: GGUF_KEYS[size] for size in ("embd", "key", "value", "inner", "state", "ff")},
    "layers": GGUF_KEYS["layer"],
    "heads": GGUF_KEYS["head"],
    "heads_kv": GGUF_KEYS["head_kv"],
    "qk_rope_head_dim": GGUF_KEYS["rope"],
    "kv_lora_rank": GGUF_KEYS["kv_lora"],
    "kernel": GGUF_KEYS["conv"],
    "window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "full_attention_interval": "full_attention_interval",
    "key_mla": "attention.key_length_mla",
    "groups": "ssm.group_count",
    "short_kernel": "shortconv.l_cache",
}


class _Recurrence(NamedTuple):
    """Elements of a recurrent layer: of its convolution, and of its state in float32."""

    convolution: str
    state: str


# The first one counts whose keys are stated: sums of products.
_RECURRENCES = (
    # The gated delta rule of Qwen 3 Next.
    _Recurrence(
        "2*linear_num_key_heads*linear_key_head_dim*linear_conv_kernel_dim"
        "+linear_num_value_heads*linear_value_head_dim*linear_conv_kernel_dim",
        "linear_num_value_heads*linear_value_head_dim*linear_key_head_dim",
    ),
    # Mamba 2: Falcon H1; Bamba and Granite; Nemotron; alone.
    _Recurrence(
        "mamba_d_ssm*mamba_d_conv+2*mamba_n_groups*mamba_d_state*mamba_d_conv",
        "mamba_d_ssm*mamba_d_state",
    ),
    _Recurrence(
        "mamba_expand*embd*mamba_d_conv+2*mamba_n_groups*mamba_d_state*mamba_d_conv",
        "mamba_expand*embd*mamba_d_state",
    ),
    _Recurrence(
        "mamba_num_heads*mamba_head_dim*conv_kernel+2*n_groups*ssm_state_size*conv_kernel",
        "mamba_num_heads*mamba_head_dim*ssm_state_size",
    ),
    _Recurrence(
        "num_heads*head_dim*conv_kernel+2*n_groups*state_size*conv_kernel",
        "num_heads*head_dim*state_size",
    ),
    # Mamba: Jamba; alone.
    _Recurrence("mamba_expand*embd*mamba_d_conv", "mamba_expand*embd*mamba_d_state"),
    _Recurrence("intermediate_size*conv_kernel", "intermediate_size*state_size"),
    # The short convolutions of LFM2.
    _Recurrence("embd*conv_L_cache", ""),
)
_RWKV = _Recurrence("2*embd", "3*embd")
# llama.cpp keeps all in float32, and one row less of a convolution.
_RECURRENCES_OF_GGUF = (
    _Recurrence("", "inner*kernel_rows+2*groups*state*kernel_rows+inner*state"),
    _Recurrence("", "inner*kernel_rows+inner*state"),
    _Recurrence("", "embd*short_rows"),
)


class CachedLayers(NamedTuple):
    """Layers that keep the same amount of state for a sequence."""

    kind: str
    layers: int = 1
    #: Elements of a layer for each token, or for each of the last tokens if there is a window.
    per_token: int = 0
    window: int | None = None
    #: Elements of a layer for any number of tokens: in the type of the cache, and in float32.
    fixed: int = 0
    float32: int = 0

    def nbytes(self, context: int, bits: float) -> int:
        """Return the size of all layers for a sequence, with elements of so many bits."""
        elements = self.elements(context) - self.layers * self.float32
        return int(-(-elements * bits // 8)) + 4 * self.layers * self.float32

    def elements(self, context: int) -> int:
        """Return the elements of all layers for a sequence."""
        tokens = context if self.window is None else min(context, self.window)
        return self.layers * (self.per_token * tokens + self.fixed + self.float32)


class ModelCache(NamedTuple):
    """State that a model keeps of the tokens so far."""

    groups: tuple[CachedLayers, ...] = ()
    #: Element type of the model by its config; empty if it states none.
    dtype: str = ""
    #: Why the state is unknown; empty if it is known.
    unknown: str = ""


class _UnknownCacheError(Exception):
    """The size of the cache depends on a fact that is missing."""


def cache_of(structure: Structure, attrs: Mapping[Any, Any]) -> ModelCache:
    """Return the state that a model keeps of the tokens so far."""
    # `attrs` are the attributes of its file, with the content of ``config.json`` as ``"config"``.
    architecture, config = attrs.get("general.architecture"), attrs.get("config")
    try:
        if structure.contradicts_config:
            return ModelCache(unknown="the config describes another model")
        if isinstance(architecture, str):
            model, dtype = _of_gguf(architecture, attrs, structure), "float16"
        elif isinstance(config, dict):
            model, dtype = _of_config(config, structure)
        else:
            return ModelCache(unknown="no config states the sizes of the model")
        counts = Counter(model.layer(number, kind) for number, kind in enumerate(model.kinds()))
    except _UnknownCacheError as error:
        return ModelCache(unknown=str(error))
    groups = [group._replace(layers=count) for group, count in counts.items()]
    return ModelCache(tuple([group for group in groups if group.kind != NONE]), dtype)


def _of_config(config: Mapping[str, Any], structure: Structure) -> tuple[_Layers, str]:
    """Return the layers of a model by its ``config.json``, and its element type."""
    classes = config.get("architectures")
    names = [str(name) for name in islice(classes, 4)] if isinstance(classes, list) else []
    nested = [config.get(key) for key in ("text_config", "llm_config", "language_config")]
    section = next((part for part in nested if isinstance(part, dict)), config)
    family = section.get("model_type", config.get("model_type"))
    if config.get("is_encoder_decoder") is True:
        raise _UnknownCacheError("the cache of a model with an encoder depends on its input")
    if names and not any(map(_GENERATING.search, names)):
        raise _UnknownCacheError(f"the config names no class that generates: {', '.join(names)}")
    if not isinstance(family, str):
        raise _UnknownCacheError("the config has no model_type")
    if "cross_attention_layers" in section:
        raise _UnknownCacheError("the cache of cross attention depends on the pictures")
    parts = (section.get("attn_config"), section)
    facts = {key: n for part in parts if isinstance(part, dict) for key, n in part.items()}
    for size, keys in _KEYS.items():
        facts[size] = next((facts[key] for key in keys if facts.get(key) is not None), None)
    if facts.get("multi_query") is True and facts.get("new_decoder_architecture") is not True:
        facts["heads_kv"] = 1
    # Qwen 2 has windows only if the config enables them.
    if facts.get("use_sliding_window", not family.startswith("qwen")) is not True:
        facts["window"] = None
    recurrences = (_RWKV,) if family == "rwkv" else _RECURRENCES
    dtypes = [part.get(key) for part in (section, config) for key in ("dtype", "torch_dtype")]
    dtype = next((dtype for dtype in dtypes if isinstance(dtype, str)), "")
    return _Layers(facts, family, structure, recurrences), dtype.removeprefix("torch.")


def _of_gguf(family: str, attrs: Mapping[Any, Any], structure: Structure) -> _Layers:
    """Return the layers of a model by its keys of GGUF."""
    if _ENCODERS.fullmatch(family) or attrs.get(f"{family}.attention.causal") is False:
        raise _UnknownCacheError(f"{family} generates no text, or has an encoder")
    facts: dict[str, Any] = {size: attrs.get(f"{family}.{key}") for size, key in _GGUF_KEYS.items()}
    if facts["key_mla"] is None:  # a file from before llama.cpp kept the latent vector alone
        facts["kv_lora_rank"] = None
    if family in _NEVER_SLIDING_IN_GGUF:
        facts["window"] = None
    for kernel, rows in (("kernel", "kernel_rows"), ("short_kernel", "short_rows")):
        if _is_size(size := facts[kernel]):
            facts[rows] = size - 1
    if family.startswith("rwkv"):
        raise _UnknownCacheError("the keys of RWKV do not state its state")
    return _Layers(facts, family, structure, _RECURRENCES_OF_GGUF)


class _Layers:
    """The layers of a model by the facts that a file states about it, hostile ones included."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        family: str,
        structure: Structure,
        recurrences: Iterable[_Recurrence],
    ) -> None:
        self._facts, self._family, self._structure = facts, family, structure
        self._recurrences = recurrences
        self._sizes = {key: n for key, n in facts.items() if _is_size(n)}
        self._count = self._sizes.get("layers", 0)
        if not 0 < self._count <= _MOST_LAYERS:
            raise _UnknownCacheError("the number of layers is not stated")

    def kinds(self) -> list[str]:
        """Return the kind of each layer."""
        kinds = list(self._stated_kinds())
        if len(kinds) != self._count:
            raise _UnknownCacheError(f"kinds of {len(kinds)} of {self._count} layers are stated")
        sharing = self._sizes.get("num_kv_shared_layers", 0)  # with layers before them
        return kinds[: max(0, self._count - sharing)]

    def _stated_kinds(self) -> Iterable[str]:
        facts, layers = self._facts, range(self._count)
        words = next((facts[key] for key in _LISTS_OF_KINDS if facts.get(key) is not None), None)
        if self._family in _PARALLEL:
            return [BOTH for _ in layers]
        if self._family in _WITHOUT_ATTENTION:
            return [RECURRENT for _ in layers]
        if isinstance(words, list | str):
            return [_kind(word) for word in islice(words, _MOST_LAYERS)]
        hybrid = self._hybrid_kinds()
        if hybrid is not None:
            return hybrid
        if any(key.startswith(_OF_RECURRENCES) for key in self._sizes):
            raise _UnknownCacheError("the layers that have attention are not stated")
        return self._windowed_kinds() if "window" in self._sizes else [FULL for _ in layers]

    def _hybrid_kinds(self) -> list[str] | None:
        """Return the kinds of the layers if only some have attention; None otherwise."""
        facts, sizes, layers = self._facts, self._sizes, range(self._count)
        indices, heads = facts.get("attn_layer_indices"), facts.get("heads_kv")
        if isinstance(indices, list):
            return [FULL if n in indices[:_MOST_LAYERS] else RECURRENT for n in layers]
        if "attn_layer_period" in sizes:
            period, offset = sizes["attn_layer_period"], facts.get("attn_layer_offset")
            return [FULL if n % period == offset else RECURRENT for n in layers]
        if "full_attention_interval" in sizes:
            period = sizes["full_attention_interval"]
            return [RECURRENT if (n + 1) % period else FULL for n in layers]
        if isinstance(heads, list) and 0 in heads:
            widths = [self._in_layer("ff", n) for n in layers]
            is_apart = isinstance(facts.get("ff"), list) and 0 in facts["ff"]
            without = [NONE if is_apart and width else RECURRENT for width in widths]
            return [FULL if n else kind for n, kind in zip(heads, without, strict=False)]
        return None

    def _windowed_kinds(self) -> list[str]:
        facts, layers = self._facts, range(self._count)
        keys = ("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval")
        pattern = next((facts[key] for key in keys if facts.get(key)), None)
        if pattern is None:
            pattern = facts.get("no_rope_layers") or _PERIODS.get(self._family)
        if isinstance(pattern, list):  # a flag for each layer
            return [SLIDING if flag else FULL for flag in pattern]
        if isinstance(pattern, str) and set(pattern) == {"L", "G"}:
            letters = islice(cycle(pattern), self._count)
            return [SLIDING if letter == "L" else FULL for letter in letters]
        if _is_size(pattern):
            return [SLIDING if (layer + 1) % pattern else FULL for layer in layers]
        first = facts.get("max_window_layers")
        if type(first) is int:
            return [SLIDING if layer >= first else FULL for layer in layers]
        if self._family in _ALWAYS_SLIDING:
            return [SLIDING for _ in layers]
        raise _UnknownCacheError("the layers that have the window are not stated")

    def layer(self, number: int, kind: str) -> CachedLayers:
        """Return the state of one layer."""
        state = self._recurrence if kind in {RECURRENT, BOTH} else CachedLayers(kind)
        if kind in {RECURRENT, NONE}:
            return state._replace(kind=kind)
        latent = evaluate("kv_lora_rank+qk_rope_head_dim", self._sizes)
        if latent is not None:
            return state._replace(kind=LATENT, per_token=latent)
        window = self._sizes.get("window") if kind == SLIDING else None
        if kind == SLIDING and window is None:
            raise _UnknownCacheError("the size of the window is not stated")
        return state._replace(kind=kind, per_token=self._width(number, kind), window=window)

    def _width(self, number: int, kind: str) -> int:
        """Return the elements of the keys and values of a token in a layer."""
        key, heads_kv = self._in_layer("key", number), self._in_layer("heads_kv", number)
        if kind == FULL and "global_head_dim" in self._sizes:
            raise _UnknownCacheError("layers with and without a window have heads of other sizes")
        if key and heads_kv:
            return heads_kv * (key + (self._in_layer("value", number) or key))
        by_tensors = self._widths_of_tensors.get(number, {})
        if len(by_tensors) == 2:
            return sum(by_tensors.values())
        heads, embd = self._in_layer("heads", number), self._sizes.get("embd", 0)
        if not heads_kv and self._family in _EQUAL_HEADS:
            heads_kv = heads
        if not heads or not heads_kv:
            raise _UnknownCacheError("the heads of keys and values are not stated")
        if not key and embd % heads:
            raise _UnknownCacheError("the size of a head is not stated")
        key = key or embd // heads
        return heads_kv * (key + (self._in_layer("value", number) or key))

    def _in_layer(self, size: str, number: int) -> int:
        """Return a size that may be stated for each layer; 0 if it is not stated."""
        stated = self._facts.get(size)
        if isinstance(stated, list):
            stated = stated[number] if number < len(stated) else None
        return stated if _is_size(stated) else 0

    @cached_property
    def _widths_of_tensors(self) -> dict[int, dict[str, int]]:
        """Outputs of the projections to keys and to values by layer."""
        widths: dict[int, dict[str, int]] = {}
        structure = self._structure
        for name in structure:
            place = structure.place(name)
            if place is None or place.outputs is None or place.component not in {"", "text"}:
                continue
            layer = dict(place.indices).get("layer")
            if layer is not None and place.slot in {"attention.key", "attention.value"}:
                shape = structure.described(name).shape
                widths.setdefault(layer, {})[place.slot] = shape[place.outputs]
        return widths

    @cached_property
    def _recurrence(self) -> CachedLayers:
        for convolution, state in self._recurrences:
            parts = [evaluate(text, self._sizes) if text else 0 for text in (convolution, state)]
            if None not in parts:
                fixed, float32 = map(int, parts)  # type: ignore[arg-type]
                return CachedLayers(RECURRENT, fixed=fixed, float32=float32)
        raise _UnknownCacheError("the sizes of the recurrent layers are not stated")


def _kind(word: Any) -> str:
    if not isinstance(word, str) or word not in _KINDS:
        raise _UnknownCacheError(f"a layer is of the unknown kind {word!r:.40}")
    return _KINDS[word]


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= _LARGEST
