"""Facts that a file states about its model: the family, the sizes, and the quantised modules.

==========================  ========================================================================
attribute                   stated by
==========================  ========================================================================
``config``                  ``config.json`` of Hugging Face, diffusers or timm; the config of gpt.rs
``general.architecture``    GGUF, with sizes such as ``llama.embedding_length``
``kind``                    gpt.rs
==========================  ========================================================================

Sizes have the names that axes have: ``embd``, ``vocab``, ``head``. All values come from files: one
of an unexpected type counts as missing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.index import StoredList
from xckpt.structure.info import Role
from xckpt.structure.numbering import leaf_of, module_of, split_leaf, split_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Shape = tuple[int, ...]

_ARCHITECTURE = "general.architecture"
_LARGEST = 1 << 62
_LONGEST_FAMILY, _LONGEST_NAME = 100, 512
_MOST_TYPES = 64
_MOST_EXCLUDED, _DEEPEST = 10_000, 32
# Values of the attribute `kind` whose tensors have the names of gpt.rs.
_KINDS_OF_GPTRS = frozenset(["gpt", "ministral", "resnet34", "mobilenet_v2"])

#: Keys of configs by the name of the size, best first.
KEYS: dict[str, tuple[str, ...]] = {
    "embd": ("hidden_size", "n_embd", "d_model", "embed_dim"),
    "layer": ("num_hidden_layers", "n_layer", "num_layers"),
    "ff": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "mlp_hidden_dim"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "context_length"),
    "head": ("num_attention_heads", "n_head", "num_heads"),
    "head_kv": ("num_key_value_heads", "num_kv_heads"),
    "key": ("head_dim",),
    "expert": ("num_local_experts", "num_experts", "n_routed_experts"),
    "ff_exp": ("moe_intermediate_size",),
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "classes": ("num_classes",),
}
#: Keys of GGUF below the name of the architecture.
GGUF_KEYS = {
    "embd": "embedding_length",
    "layer": "block_count",
    "ff": "feed_forward_length",
    "vocab": "vocab_size",
    "context": "context_length",
    "head": "attention.head_count",
    "head_kv": "attention.head_count_kv",
    "key": "attention.key_length",
    "value": "attention.value_length",
    "q_lora": "attention.q_lora_rank",
    "kv_lora": "attention.kv_lora_rank",
    "expert": "expert_count",
    "ff_exp": "expert_feed_forward_length",
    "ff_shexp": "expert_shared_feed_forward_length",
    "rope": "rope.dimension_count",
    "conv": "ssm.conv_kernel",
    "inner": "ssm.inner_size",
    "state": "ssm.state_size",
    "dt": "ssm.time_step_rank",
}


# Words of names, and their spelling in keys of sections.
_WORD_ENDS = re.compile(r"[._/]")
_TOWERS = {"visual": "vision"}
# Ends of the names of classes with a head, which is tied to the embeddings if the tensors lack it.
_WITH_HEAD = ("CausalLM", "LMHead", "ConditionalGeneration")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The family and sizes of a model, and its quantisation."""

    #: As the file spells it: "llama", "gemma3"; empty if it is not stated.
    family: str = ""
    #: Types of the model and of its parts, as configs spell them; a table of names may fit one.
    types: Sequence[str] = ()
    #: Positive sizes by name; a size that differs between layers is left out.
    sizes: Mapping[str, int] = field(default_factory=dict)
    quantization: QuantizedModules | None = None
    #: Sizes of each layer, where these are stated apart.
    by_layer: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: Whose names and sizes the tensors have: "gguf" or "gptrs"; empty for others.
    naming: str = ""
    #: Name of the format of the file.
    format: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    #: Numbers of the parameters of each optimizer, by group.
    parameters: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    @property
    def is_untied(self) -> bool:
        """Whether the config states that the head is not tied to the embeddings."""
        stated = [section.get("tie_word_embeddings") for section in sections_of(self.config)]
        return False in stated and True not in stated

    @property
    def states_head(self) -> bool:
        """True if the class in the config has a head over the vocabulary."""
        classes = self.config.get("architectures")
        names = classes if isinstance(classes, list) else []
        return any(word in str(name) for name in names for word in _WITH_HEAD)


def model_facts(
    attrs: Mapping[Any, Any], config: Mapping[str, Any] | None = None, format: str = ""
) -> ModelFacts:
    """Return the facts about a model, from the attributes of its file and its ``config.json``."""
    return replace(_facts_in(attrs, config), format=format, parameters=groups_of_numbers(attrs))


def is_gguf(attrs: Mapping[Any, Any]) -> bool:
    """Return whether attributes come from a GGUF file that states its architecture."""
    return isinstance(attrs.get(_ARCHITECTURE), str)


def _facts_in(attrs: Mapping[Any, Any], config: Mapping[str, Any] | None) -> ModelFacts:
    if is_gguf(attrs):
        return _of_gguf(attrs[_ARCHITECTURE], attrs)
    kind = _family(attrs.get("kind"))
    config = attrs.get("config") if config is None else config
    if not isinstance(config, dict):
        return ModelFacts(kind)
    family = _family(config.get("model_type")) or kind
    return ModelFacts(
        family,
        types=tuple(dict.fromkeys(islice(_types(config), _MOST_TYPES))),
        sizes=sizes_in(*sections_of(config)),
        quantization=_quantized_modules(config),
        naming="gptrs" if kind in _KINDS_OF_GPTRS else "",
        config=config,
    )


class StatedSize(NamedTuple):
    """A size of a model, and where its config states it."""

    section: Mapping[str, Any]
    key: str
    value: int


def stated_sizes(*sections: Mapping[str, Any]) -> dict[str, StatedSize]:
    """Return the sizes that sections of a config state under their usual keys, first ones first."""
    places = {
        name: next(((s, key) for s in sections for key in keys if type(s.get(key)) is int), None)
        for name, keys in KEYS.items()
    }
    sizes = {n: StatedSize(*place, place[0][place[1]]) for n, place in places.items() if place}
    return {name: sizes[name] for name in _checked({n: s.value for n, s in sizes.items()})}


def sizes_stated_in(config: Mapping[str, Any]) -> dict[str, StatedSize]:
    """Return the sizes that a ``config.json``, or the attributes of a GGUF file, state."""
    if not is_gguf(config):
        return stated_sizes(*sections_of(config))
    keys = {name: f"{config[_ARCHITECTURE]}.{key}" for name, key in GGUF_KEYS.items()}
    sizes = _checked({name: config.get(key) for name, key in keys.items()})
    return {name: StatedSize(config, keys[name], size) for name, size in sizes.items()}


def sections_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the sections of a config that describe the language model."""
    # Models of several modalities have the sizes of the language model one level deeper.
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def tower_of(name: str, config: Mapping[str, Any]) -> str:
    """Return the key of the section for the tower or part that a tensor is in; empty if none."""
    sections = {
        k.removesuffix("_config"): k for k, part in config.items() if isinstance(part, dict)
    }
    words = _WORD_ENDS.split(name) if sections and len(name) <= _LONGEST_NAME else []
    return next((sections[word] for w in words if (word := _TOWERS.get(w, w)) in sections), "")


def sizes_of_tower(config: Mapping[str, Any], tower: str) -> dict[str, StatedSize]:
    """Return the sizes stated for a tower, or for the language model beside the towers."""
    section = config.get(tower)
    is_text = any(section is part for part in sections_of(config))
    return sizes_stated_in(config) if section is None or is_text else stated_sizes(section)


def sizes_in(*sections: Mapping[str, Any]) -> dict[str, int]:
    """Return the values of `stated_sizes`."""
    return {name: size.value for name, size in stated_sizes(*sections).items()}


def _types(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types of models that a config states: of the whole, then of its parts."""
    for part in (config, *config.values()):
        if not isinstance(part, dict):
            continue
        types = [part.get(key) for key in ("model_type", "_class_name", "architecture")]
        architectures = part.get("architectures")
        if isinstance(architectures, list) and "model_type" not in part:
            types += architectures
        yield from filter(None, map(_family, types))


def _of_gguf(architecture: str, attrs: Mapping[Any, Any]) -> ModelFacts:
    sizes = {name: attrs.get(f"{architecture}.{key}") for name, key in GGUF_KEYS.items()}
    tokens = attrs.get("tokenizer.ggml.tokens")
    if sizes["vocab"] is None and isinstance(tokens, list | StoredList):
        sizes["vocab"] = len(tokens)
    by_layer = {name: size for name, size in sizes.items() if isinstance(size, list)}
    checked = _checked(sizes)
    naming = "gguf" if checked or by_layer else ""
    family = _family(architecture)
    return ModelFacts(family, types=(family,), sizes=checked, by_layer=by_layer, naming=naming)


def _family(value: Any) -> str:
    is_name = isinstance(value, str) and len(value) <= _LONGEST_FAMILY and value.isprintable()
    return value if is_name else ""


def _checked(sizes: Mapping[str, Any]) -> dict[str, int]:
    return {n: size for n, size in sizes.items() if type(size) is int and 0 < size <= _LARGEST}


# --- sizes of single tensors ----------------------------------------------------------------------


class _ExtentRule(NamedTuple):
    """An axis of some tensors, and the values of a config that its extent follows from."""

    name: re.Pattern[str]
    axis: int
    keys: tuple[str, ...]
    extent: Callable[[Sequence[int]], int] = itemgetter(0)
    #: Rows that tables of positions have for tokens of classes.
    most_extra: int = 0
    #: Key that states it otherwise.
    unless: str = ""

    @classmethod
    def of(cls, name: str, *fields: Any) -> _ExtentRule:
        """Return the rule for tensors whose names end so."""
        return cls(re.compile(rf"(?:^|[./]){name}$"), *fields)


_PATCHES = r"patch_embed\w*(?:\.proj\w*)?\.weight"
_FIRST_CONV = r"resnets\.0\.conv1\.weight"
_WIDTHS = ("block_out_channels",)
_HEADS = ("num_key_value_heads", "hidden_size", "num_attention_heads")
_EXTENTS = (
    _ExtentRule.of(_PATCHES, 1, ("num_channels",)),
    _ExtentRule.of(_PATCHES, 1, ("in_chans",)),
    *[_ExtentRule.of(_PATCHES, axis, ("patch_size",)) for axis in (-2, -1)],
    _ExtentRule.of(
        r"pos\w*_embed\w*(?:\.weight)?", -2, ("image_size", "patch_size"),
        lambda sizes: (sizes[0] // sizes[1]) ** 2, 2,
    ),
    _ExtentRule.of(r"(?:text|visual)_projection\.weight", 0, ("projection_dim",)),
    _ExtentRule.of(r"token_type_embeddings\.weight", 0, ("type_vocab_size",)),
    _ExtentRule.of(
        r"[kv]_proj\.(?:weight|bias)", 0, _HEADS,
        lambda sizes: sizes[0] * sizes[1] // sizes[2], 0, "head_dim",
    ),
    _ExtentRule.of(r"encoder\.embed_positions\.weight", 0, ("max_source_positions",)),
    _ExtentRule.of(r"decoder\.embed_positions\.weight", 0, ("max_target_positions",)),
    _ExtentRule.of(
        r"embed_positions\.weight", 0, ("max_position_embeddings",), itemgetter(0), 2
    ),
    _ExtentRule.of(r"encoder\.conv1\.weight", 1, ("num_mel_bins",)),
    _ExtentRule.of(r"relative_attention_bias\.weight", 0, ("relative_attention_num_buckets",)),
    _ExtentRule.of(r"query_position_embeddings\.weight", 0, ("num_queries",)),
    _ExtentRule.of(r"conv_in\.weight", 1, ("in_channels",)),
    _ExtentRule.of(r"conv_out\.weight", 0, ("out_channels",)),
    _ExtentRule.of(r"conv_in\.weight", 0, _WIDTHS),
    _ExtentRule.of(rf"mid_block\.{_FIRST_CONV}", 0, _WIDTHS, itemgetter(-1)),
    *[_ExtentRule.of(rf"down_blocks\.{n}\.{_FIRST_CONV}", 0, _WIDTHS, itemgetter(n))
      for n in range(8)],
)  # fmt: skip


class _StatedExtent(NamedTuple):
    """The extent of an axis of a tensor, as the values of a config state it."""

    axis: int
    extent: int
    most_extra: int
    text: str  # "image_size 224 and patch_size 16"


def _extents_stated_for(
    name: str, config: Mapping[str, Any]
) -> dict[tuple[str, int], _StatedExtent]:
    """Return the extents of a tensor that a config states, by the first key and the axis."""
    tower, text = tower_of(name, config), config.get("text_config")
    parts = {f"{tower}.": config[tower]} if tower else {}
    if not parts and isinstance(text, dict):
        parts = {"text_config.": text}
    extents = {}
    rules = _EXTENTS if len(name) <= _LONGEST_NAME else ()
    for rule in [rule for rule in rules if rule.name.search(name)]:
        for path, section in ({"": config} | parts).items():
            values = [section.get(key) for key in rule.keys]
            listed = values[0] if len(values) == 1 and isinstance(values[0], list) else values
            numbers = [*_checked({str(n): value for n, value in enumerate(listed)}).values()]
            is_sized = len(numbers) == len(listed)
            if is_sized and section.get(rule.unless) is None:
                with suppress(IndexError):
                    pairs = zip(rule.keys, values, strict=True)
                    keys = " and ".join([f"{path}{key} {value}" for key, value in pairs])
                    extent = rule.extent(numbers)
                    place = f"{path}{rule.keys[0]}", rule.axis
                    extents[place] = _StatedExtent(rule.axis, extent, rule.most_extra, keys)
    return extents


def compare_extents(
    name: str, before: Shape, after: Shape, configs: Sequence[Mapping[str, Any]]
) -> tuple[set[int], dict[str, str], dict[int, list[str]]]:
    """Return the axes of a tensor that fit an edited config, and by key how others contradict it.

    The third are the keys of axes with another extent that were not edited. Only extents that
    followed from the config before count.
    """
    stated, edited = (_extents_stated_for(name, config) for config in configs)
    axes, problems = set(), {}
    unedited: dict[int, list[str]] = defaultdict(list)
    for place, size in stated.items():
        extra = before[size.axis] - size.extent if -len(before) <= size.axis < len(before) else -1
        if place not in edited or not 0 <= extra <= size.most_extra:
            continue
        new, extent, key = edited[place], after[size.axis], place[0]
        target = new.extent + extra
        if extent == target:
            axes.add(size.axis % len(before))
        elif new.extent != size.extent:
            was = "" if new.text == f"{key} {target}" else f" instead of {target}"
            problems[key] = f"{new.text}: the tensors have {extent}{was}"
        else:
            unedited[size.axis % len(before)].append(key)
    return axes, problems, unedited


def contradicted_extents(name: str, shape: Shape, config: Mapping[str, Any]) -> dict[str, str]:
    """Return how a tensor contradicts values of a config that alone state an extent, by key."""
    stated = {
        key: size
        for (key, _), size in _extents_stated_for(name, config).items()
        if " and " not in size.text and -len(shape) <= size.axis < len(shape)
    }
    # Sections of a config may differ, and the model uses one of them.
    right = {
        size.axis
        for size in stated.values()
        if 0 <= shape[size.axis] - size.extent <= size.most_extra
    }
    return {
        key: f"{size.text}: the tensors have {shape[size.axis]}"
        for key, size in stated.items()
        if size.axis not in right
    }


# --- quantisation --------------------------------------------------------------------------------

# Places of the declaration in `config.json`, best first. `compression_config` is a declaration or
# contains one.
_PLACES = (
    ("quantization_config",),
    ("text_config", "quantization_config"),
    ("compression_config", "quantization_config"),
    ("compression_config",),
    ("quantization",),
)
#: Keys of the element type that a model computes in.
DTYPE_KEYS = ("dtype", "torch_dtype")
_BITSANDBYTES = ("load_in_4bit", "load_in_8bit")
# Lists of modules that stay as they are.
_EXCLUDED = ("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers", "ignore")
_CODES = re.compile(r"weight|qweight|weight_packed|W_q|\w+_blocks")
_SCALES = re.compile(
    r"""(weight|input|output|k|v|q|kv_cache|prob_output)_(global_)?scales?(_inv|_2)?
    | scales? | qzeros | zeros | biases | (weight|input|output)_zero_point | (weight_)?g_idx
    | weight_shape | weight_format | SCB | perm | \w+_scales""",
    re.VERBOSE,
)
# Parts of the codes of bitsandbytes: `weight.absmax`, `weight.quant_state.bitsandbytes__nf4`.
_STATES = re.compile(
    r"(?P<codes>.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)"
)
_NARROW = re.compile(r"u?int(2|4|8|16|32)|float[468]_\w+")
# Element types of the words of 32 bits that methods pack several codes into.
_MOST_BITS = 32
_WORDS = {"gptq": "int32", "awq": "int32", "mlx": "uint32"}


class QuantizedModules(NamedTuple):
    """The quantised modules of a model, as its config declares them."""

    method: str
    #: Names of modules, or of the last words of their names, that stay as they are.
    excluded: frozenset[str] = frozenset()
    #: Bits of a code; 0 if the config does not state one number for all.
    bits: int = 0

    def roles(self, dtypes: Mapping[str, str]) -> dict[str, Role]:
        """Return the roles that follow for tensors, given by name with their element types."""
        codes = {
            name
            for name, dtype in dtypes.items()
            if _NARROW.fullmatch(dtype)
            and _CODES.fullmatch(leaf_of(name))
            and not self.excludes(module_of(name))
        }
        modules = {module_of(name) for name in codes}
        roles = dict.fromkeys(codes, Role.CODES)
        for name, dtype in dtypes.items():
            if name in codes:
                continue
            module, _, leaf = split_leaf(name)
            state = _STATES.fullmatch(name)
            if state is not None and state["codes"] in codes:
                roles[name] = Role.SCALE
            elif _SCALES.fullmatch(leaf):
                if module in modules:
                    roles[name] = Role.SCALE
                elif self.excludes(module) and dtype.startswith(("float", "bfloat")):
                    roles[name] = Role.WEIGHT
        return roles

    def excludes(self, module: str) -> bool:
        """Return whether the config lists a module, or one that contains it, as not quantised."""
        words = split_name(module)[:_DEEPEST] if self.excluded else []
        return any(
            ".".join(words[start:stop]) in self.excluded
            for start in range(len(words))
            for stop in range(start + 1, len(words) + 1)
        )

    def elements(self, dtype: str, size: int) -> int | None:
        """Return the number of codes in a tensor; None if it does not follow from the config."""
        if _WORDS.get(self.method) == dtype and self.bits and _MOST_BITS % self.bits == 0:
            return size * _MOST_BITS // self.bits
        if self.method in {"bitsandbytes", "mxfp4"} and dtype == "uint8":
            return 2 * size
        return None


def stated_dtype(config: Mapping[str, Any]) -> str:
    """Return the element type that a ``config.json`` states; empty without one."""
    stated = next((config[key] for key in DTYPE_KEYS if key in config), None)
    return stated if isinstance(stated, str) else ""


def declarations_in(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the declarations of quantisation in a ``config.json``, best first, with their place."""
    for place in _PLACES:
        value: Any = config
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            yield place, value


def _quantized_modules(config: Mapping[str, Any]) -> QuantizedModules | None:
    declarations = declarations_in(config)
    place, value = next(((p, v) for p, v in declarations if isinstance(v, dict)), ((), {}))
    by_place = "compressed-tensors" if place[:1] == ("compression_config",) else None
    method = value.get("quant_method", by_place)
    if "quant_method" not in value and isinstance(config.get("quantization"), dict):
        method, value = "mlx", config["quantization"]
    elif method is None and any(value.get(key) is True for key in _BITSANDBYTES):
        method = "bitsandbytes"
    if not isinstance(method, str) or not method:
        return None
    bits = value.get("bits")
    bits = bits if type(bits) is int and 0 < bits <= _MOST_BITS else 0
    excluded = frozenset([name for key in _EXCLUDED for name in _names(value.get(key))])
    return QuantizedModules(method, excluded, bits)


def _names(value: Any) -> Iterable[str]:
    """Return the names in a list; patterns of compressed-tensors are left out."""
    names = value[:_MOST_EXCLUDED] if isinstance(value, list) else ()
    return [name for name in names if isinstance(name, str) and name and "re:" not in name[:3]]


# --- parameters of an optimizer -------------------------------------------------------------------

# `torch.optim` numbers parameters in the order in which it got them. The numbers name no tensor,
# but the tensors of a model are in the same order in a file, and the state of each parameter has
# its shape. A tensor counts as listed only if no other assignment in this order is possible.

_GROUP = re.compile(r"((?:.+\.)?)param_groups\.[0-9]{1,9}\.params", re.DOTALL)
_STATE = re.compile(r"state\.([0-9]{1,18})\.([A-Za-z_]+)")
#: Fields of the state of an optimizer that have the shape of their parameter.
WHOLE = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "acc_delta", "sum", "prev", "step_size", "ax",
})  # fmt: skip
_MOST_LISTED = 1 << 20


def groups_of_numbers(attrs: Mapping[Any, Any]) -> dict[str, list[list[int]]]:
    """Return the numbers in each group of parameters, by the words before ``param_groups``."""
    groups: dict[str, list[list[int]]] = {}
    for key, value in attrs.items():
        match = _GROUP.fullmatch(key) if isinstance(key, str) and "param_groups." in key else None
        if match is None or not isinstance(value, list) or len(value) > _MOST_LISTED:
            continue
        if all(type(number) is int for number in value):
            groups.setdefault(match[1], []).append(value)
    return groups


def listed_by_number(
    groups: Mapping[str, Sequence[Sequence[int]]],
    shapes: Mapping[str, Shape],  # all tensors of the file
    candidates: Sequence[str],  # tensors of the model, in their order
    buffers: frozenset[str],  # candidates that have the names of buffers
) -> set[str]:
    """Return the tensors that are certain to be in the lists of the optimizers of a file."""
    listed: set[str] = set()
    for prefix, numbers in groups.items():
        by_number = _shapes_of_state(prefix, shapes)
        inside = {name: shapes[name] for name in candidates}
        all_numbers = [number for group in numbers for number in group]
        trained = [name for name in candidates if name not in buffers]
        is_counted = len(numbers) == 1 and len(trained) == len(all_numbers)
        if is_counted and by_number.keys() >= set(all_numbers):
            # As many tensors as numbers: the others are buffers if the shapes agree.
            names = align(all_numbers, by_number, trained, inside)
            if len(names) == len(all_numbers):
                listed.update(names)
                continue
        for group in numbers:
            first = align(group, by_number, candidates, inside)
            last = align(group[::-1], by_number, candidates[::-1], inside)[::-1]
            if len(first) == len(last) == len(group):
                pairs = zip(group, first, last, strict=True)
                listed.update(a for number, a, b in pairs if a == b and number in by_number)
    return listed


def _shapes_of_state(prefix: str, shapes: Mapping[str, Shape]) -> dict[int, Shape]:
    """Return the shape of each parameter that has state of this shape, by its number."""
    by_number = {}
    for name, shape in shapes.items():
        match = _STATE.fullmatch(name, len(prefix)) if name.startswith(prefix) else None
        if match is not None and match[2] in WHOLE:
            by_number[int(match[1])] = shape
    return by_number


def align(
    group: Iterable[int],
    shapes: Mapping[int, Shape | None],
    names: Iterable[str],
    candidates: Mapping[str, Shape],
) -> list[str]:
    """Assign each number to the next tensor of its shape; stop at a number without one."""
    remaining, assigned = iter(names), []
    for number in group:
        shape = shapes.get(number)
        name = next((name for name in remaining if shape in {None, candidates[name]}), None)
        if name is None:
            break
        assigned.append(name)
    return assigned
