"""Conventions of frameworks for the names, element types and shapes of tensors.

They decide where a file states nothing itself. `docs/roles.md` shows the table with examples.

==============  ==================================================================================
role            names and types
==============  ==================================================================================
``state``       random number generators, loss scalers, schedulers
``step``        counters and settings of an optimizer: ``step``, ``count``, ``time``, ``lr``
``master``      copies of the weights that an optimizer updates: ``fp32_flat_groups``
``moment``      other tensors of an optimizer: ``exp_avg``, ``mu``, ``Adam.m1``
``average``     averages of the weights: below ``ema``, ``model_ema``, ``shadow_params``
``scale``       scales, zero points, shapes and group indices of codes
``statistic``   ``running_mean``, ``moving_variance``, ``batch_stats/.../var``
``counter``     ``num_batches_tracked`` and other scalars that count
``constant``    masks, positions, frequencies, fixed transforms, settings below ``config``;
                booleans, and integers that are not codes
``codes``       integers and small floats with scales next to them, or with names of weights
``weight``      everything else
==============  ==================================================================================

The codes of a quantised weight are integers or small floats that mean nothing without their scales.
They are recognised because a tensor with the name of their scales is next to them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from xckpt.structure.forms import masked
from xckpt.structure.info import OF_TRAINING, Role
from xckpt.structure.numbering import leaf_of, module_of, split_leaf, split_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

# --- words in names ------------------------------------------------------------------------------

# Patterns match whole words. Numbers become 0 first, so that 100,000 names have few forms.
_NUMBER = re.compile(r"[0-9]+")
_MAX_FORMS = 1 << 14
# The colon before a part of a tensor, or before the state of a parameter in primitiv and after
# `join_optimizer`.
_PART = re.compile(r":(?=[^:/0])")


def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.VERBOSE)


# Modules that hold one kind of tensor, among the first words of a name.
_MAX_DEPTH = 3
_TRAINING = _words(r"(grad_|loss_)?scaler | (lr_)?schedulers? | callbacks | loops | \w*rng_states?")
_OPTIMIZER = _words(
    r"""optim(izer)?s? | (optim(izer)?|base_optimizer|opt)_(states?|state_dict|weights|vars)
    | opt | base_optimizer | chained_0"""
)
_AVERAGES = _words(
    r"""ema | ema_(model|params|state_dict|weights) | (model|params|state_dict|weights)_ema
    | shadow_params | averaged?_(model|params)"""
)
# Settings that a program saves beside the weights, which may be tensors.
_SETTINGS = _words(r"config | cfg | k?w?args | hparams | hyper_?parameters | settings")
_BURN = _words(r"momentum | lr_decay | square_avg | centered | __rank")

# Tensors of an optimizer: words anywhere in a name, and parts after a colon.
_MOMENT = _words(
    r"""(max_)?exp_avg(_sq)?(_row|_col)? | exp_inf | momentum_buffer | square_avg | grad_avg
    | acc_delta"""
)
_MOMENT_PART = _words(r"[a-z]+\.[mv]0? | sum | prev | ax | mu | step_size | (\w+\.)?moment_0")
_MASTER = _words(r"\w*fp0_(flat_)?groups?\w* | fp0_from_\w+ | fp0(_params?)? | master(_\w+)?")
_STEP_PART = _words(r"step | (\w+\.)?time | eta | mu_product | __rank")

# Buffers and scales, by the last word of their names.
_STATISTIC = _words(
    r"""(running|moving)_(mean|var|variance|std) | pop_(mean|variance) | _?ema_(w|cluster_size)
    | cluster_size | embed_avg"""
)
_COUNTER = _words(
    r"""num_batches_tracked | n_averaged | num_updates | decay | (global_)?steps? | epochs?
    | iterations? | iter | count(er)? | save_counter | version | initted"""
)
_CONSTANT = _words(
    r"""(\w+_)?mask | masked_bias | tril | inv_freq | freqs(_cis)? | rope_freqs | (cos|sin)_cached
    | (position|token_type|input)_ids | relative_position_index | relative_coords_table | pe
    | anchors? | _float_tensor | betas | (sqrt_|log_)?(recip_)?(recipm0_)?alphas_cumprod(_prev)?
    | sqrt_\w+ | log_one_minus_\w+ | posterior_\w+ | (log_)?sigmas | pixel_(mean|std)"""
)
# Transforms that are computed once and never trained: Fourier, mel, constant-Q, Wigner, windows.
_FIXED = _words(
    r"""(\w*_)?(buffer | window | basis | filter_?bank | fbank | mel_(fb | filters?) | dct(_mat)?
    | w0j\w* | wigner\w* | clebsch\w*) | _?w0j_\w+"""
)
_FIXED_MODULE = _words(
    r"""([\w-]*[_-])?(stft | istft | cqt\w* | cq_?t0\w* | spectrogram | mel_?spec(trogram)?
    | mel_?scale | mfcc)([_-](conv | real | imag)[\w-]*)?"""
)
_SCALE = _words(
    r"""(weight|input|output|act(ivation)?|prob_output|[qkv])_(global_)?scales?(_inv|_0)?
    | qzeros | zero_points? | (weight|input|output)_zero_points? | (weight_)?g_idx | weight_shape
    | scb | scale_packed | (nested_)?(absmax|quant_map)0? | bitsandbytes__\w+"""
)
_SCALE_PART = _words(r"scales | zeros | zero_points | biases | index | global | scale_scales")
# Norms and sums have these words, too: they are scales only in a module that has codes.
_SCALE_OF_MODULE = _words(r"scales? | zeros | biases | offset | perm")
_QUANTISED = _words(r"q?weight(_packed)? | kernel | codes | w_q")

_INTEGER = re.compile(r"u?int[0-9]+")


def role_by_name(form: str, dtype: str, shape: tuple[int, ...]) -> Role:
    """Return the role of a tensor regardless of its neighbours; `form` has 0 for every digit."""
    axes = sum([size != 1 for size in shape])
    is_square = len(shape) == 4 and shape[0] == shape[1] == 1 and shape[2] == shape[3]
    return _role_of(_NUMBER.sub("0", form), dtype, axes, is_square=is_square)


@lru_cache(_MAX_FORMS)
def _role_of(name: str, dtype: str, axes: int, *, is_square: bool) -> Role:
    """Return the role of a tensor whose name has 0 for every number."""
    owner, _, part = name.partition(":") if _PART.search(name) else (name, "", "")
    words = split_name(owner)
    front, last = words[:_MAX_DEPTH], words[-1]
    is_scalar = axes == 0
    if part and (role := _role_of_part(part)) is not None:
        return role
    if len(words) > 1 and _SETTINGS.fullmatch(words[0]):
        return Role.CONSTANT
    if any(map(_TRAINING.fullmatch, front)):
        return Role.STATE
    is_numbered = len(words) > 1 and words[0] == "0" and _BURN.fullmatch(words[1]) is not None
    has_state = words[:2] == ["state", "0"]
    if is_numbered or has_state or any(map(_OPTIMIZER.fullmatch, front)):
        return _role_in_optimizer(words, dtype, is_scalar=is_scalar)
    if _MOMENT.fullmatch(last) or any(map(_MOMENT.fullmatch, front)):
        return Role.MOMENT
    role = _role_in_model(words, dtype, axes, is_square=is_square)
    if role is Role.WEIGHT and any(map(_AVERAGES.fullmatch, front)):
        return Role.AVERAGE
    return role


def averaged_copy(name: str) -> str:
    """Return the name of the averaged copy of a model that a tensor is in; empty outside of one."""
    end = 0
    for word in split_name(name, _MAX_DEPTH)[:_MAX_DEPTH]:
        end += len(word) + 1
        if _AVERAGES.fullmatch(word):
            return name[:end]
    return ""


def _role_of_part(part: str) -> Role | None:
    """Return the role of a part of a tensor, or of a parameter's state in an optimizer."""
    if _MOMENT.fullmatch(part) or _MOMENT_PART.fullmatch(part):
        return Role.MOMENT
    if _STEP_PART.fullmatch(part):
        return Role.STEP
    if _MASTER.fullmatch(part):
        return Role.MASTER
    return Role.SCALE if _SCALE_PART.fullmatch(part) else None


def _role_in_optimizer(words: list[str], dtype: str, *, is_scalar: bool) -> Role:
    if any(map(_MOMENT.fullmatch, words)):
        return Role.MOMENT
    if any(map(_MASTER.fullmatch, words)):
        return Role.MASTER
    # Integers of eight bits are quantised moments.
    is_counter = _INTEGER.fullmatch(dtype) is not None and not dtype.endswith("int8")
    return Role.STEP if is_scalar or is_counter else Role.MOMENT


def _role_in_model(words: list[str], dtype: str, axes: int, *, is_square: bool) -> Role:
    last = words[-1]
    is_integer = _INTEGER.fullmatch(dtype) is not None
    if _STATISTIC.fullmatch(last) or "batch_stats" in words:
        return Role.STATISTIC
    if _SCALE.fullmatch(last):
        return Role.SCALE
    if axes == 0 and (is_integer or _COUNTER.fullmatch(last)):
        return Role.COUNTER
    if dtype.startswith("bool") or (is_square and last == "bias") or _CONSTANT.fullmatch(last):
        return Role.CONSTANT
    if is_fixed(words):
        return Role.CONSTANT
    # GGUF has `rope_freqs.weight`.
    if len(words) > 1 and last == "weight" and words[-2] == "rope_freqs":
        return Role.CONSTANT
    if not is_integer:
        return Role.WEIGHT
    return Role.CODES if _QUANTISED.fullmatch(last) else Role.CONSTANT


def is_fixed_by_name(name: str) -> bool:
    """Return whether a tensor or a node of this name is a fixed transform."""
    return is_fixed(split_name(_NUMBER.sub("0", name)))


def is_fixed(words: Iterable[str]) -> bool:
    """Return whether words name a transform that is never trained; 0 for every number."""
    *modules, last = words
    return _FIXED.fullmatch(last) is not None or any(map(_FIXED_MODULE.fullmatch, modules))


def roles_beside_codes(
    roles: Mapping[str, Role], dtypes: Mapping[str, str]
) -> tuple[dict[str, Role], dict[str, str]]:
    """Return roles that follow from codes in the same module, and the scales of codes."""
    # `roles` and `dtypes` have the tensors whose roles follow from their names.
    codes, companions = codes_and_companions(dtypes)
    changed: dict[str, Role] = {}
    modules = set()
    for name, scales in codes.items():
        changed[scales] = Role.SCALE
        if roles[name] in _MAY_BE_CODES:
            changed[name] = Role.CODES
        if changed.get(name, roles[name]) is Role.CODES:
            modules.add(module_of(name))
    for name in companions:
        if roles[name] is Role.CONSTANT:
            changed[name] = Role.SCALE
    for name, role in roles.items() if modules else ():
        if changed.get(name, role) is Role.WEIGHT:
            module, _, last = split_leaf(name)
            if module in modules and _SCALE_OF_MODULE.fullmatch(last):
                changed[name] = Role.SCALE
    return changed, codes | companions


# --- norms ---------------------------------------------------------------------------------------

_GAIN = _words(r"weight | gamma | scale | g | gain")
_NORM_MODULE = _words(r"\w*norm\w* | (\w+_)?(ln|bn)(_?\w+)?")
_NORM_ALONE = _words(r"\w*norm\w*?(_weight)? | (ln|bn)(_?\w+)?")
_NOT_GAIN = _words(r"\w*(bias|beta|shift|mean|var|_b)")


def gains_of_norms(vectors: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names of the gains of norms, from the shapes of all vectors by name."""
    # They are recognised by their names, by running statistics next to them, or because they are
    # vectors with a bias of the same length, which only norms have.
    norms = set()
    for name, shape in vectors.items():
        module, separator, last = split_leaf(name)
        words = split_name(name)
        if _GAIN.fullmatch(last):
            before = words[-3:-1]
            # An index can follow: `norm.0.weight`.
            is_named = any(map(_NORM_MODULE.fullmatch, before[-1:])) or (
                len(before) == 2 and before[1].isdigit() and _NORM_MODULE.fullmatch(before[0])
            )
            biases = (f"{module}{separator}{leaf}" for leaf in ("bias", "beta"))
            has_bias = len(shape) == 1 and any(vectors.get(bias) == shape for bias in biases)
            if is_named or has_bias or f"{module}{separator}running_mean" in vectors:
                norms.add(name)
        elif _NORM_ALONE.fullmatch(last) and not _NOT_GAIN.fullmatch(last):
            norms.add(name)
    return norms


# --- modules -------------------------------------------------------------------------------------

_EMBEDDING = re.compile(r"emb|wte|wpe|(^|[./])shared[./]", re.IGNORECASE)
_ROUTER = re.compile(r"(^|[._/])(router|gate|wg|ffn_gate_inp)([._/]\w+)?$")
_ATTENTION = _words(
    r"""\w*(attn|attention)\w* | [qkvo]_proj | (to_)?(q|k|v|qkv) | (query|key|value)(_dense)?
    | output_dense | query_key_value | w[qkvo] | w_qkv | self_?att\w*"""
)
_PARAM = re.compile(r"[./](weight|kernel)$")
_RECURRENT = re.compile(r"(^|[./])weight_(ih|hh|hr)(_l0(_reverse)?)?$")
_BIAS = _words(r"(\w+_)?bias(_(ih|hh)(_l0(_reverse)?)?)? | beta")
# Variables of Keras' attention, which have numbers: the kernel, then the bias.
_OF_DENSE = re.compile(r"_?(query|key|value|output)_dense[./]vars[./]([01])$")
_VARIANCE = _words(r"(\w+_)?(var|variance)")
_ZERO_POINT = _words(
    r"\w*zero\w* | \w*biases | \w*offset | \w*idx | \w*shape | \w*quant_map0? | perm"
)
_CONVOLUTION = re.compile(r"conv", re.IGNORECASE)
_COMPONENTS = frozenset({
    "encoder", "decoder", "vision_tower", "vision_model", "text_model", "language_model", "visual",
    "unet", "vae", "text_encoder", "text_encoder_2", "first_stage_model", "cond_stage_model",
    "conditioner", "audio_tower", "discriminator", "generator",
})  # fmt: skip


def module_type_by_name(name: str, shape: tuple[int, ...]) -> str:
    """Return the type of a module by its path; empty if unknown."""
    # The router of a mixture has a row for each expert.
    may_route = len(shape) == 2 and 2 <= shape[0] < shape[1]
    return _module_type(_NUMBER.sub("0", name), len(shape), may_route=may_route)


@lru_cache(_MAX_FORMS)
def _module_type(name: str, ndim: int, *, may_route: bool) -> str:
    """Return the type of a module; `name` has 0 for every number."""
    module = _PARAM.sub("", name)
    if may_route and _ROUTER.search(module) is not None and not module.endswith("_proj"):
        return "router"
    if _EMBEDDING.search(name):
        return "embedding"
    if ndim == 2 and _RECURRENT.search(name):
        return "recurrent"
    if ndim < 2 or module == name:
        return ""
    if ndim in {4, 5} or (ndim == 3 and _CONVOLUTION.search(name)):
        return "convolution"
    return "linear" if ndim == 2 else ""


def names_bias(param: str) -> bool:
    """Return whether a tensor of this name in its module is a bias."""
    return _BIAS.fullmatch(_NUMBER.sub("0", param)) is not None


def param_in_dense(name: str) -> str:
    """Return what a numbered variable of Keras' attention is; empty for other names."""
    match = _OF_DENSE.search(name)
    return "" if match is None else ("kernel", "bias")[int(match[2])]


def names_variance(param: str) -> bool:
    """Return whether a statistic of this name in its module is a variance."""
    return _VARIANCE.fullmatch(param.removesuffix(":0")) is not None


def names_counter(param: str) -> bool:
    """Return whether a tensor of this name in its module is a number that only grows."""
    return _COUNTER.fullmatch(param) is not None


def names_zero_point(param: str) -> bool:
    """Return whether a tensor of this name beside codes has zero points or positions."""
    return _ZERO_POINT.fullmatch(_NUMBER.sub("0", param)) is not None


_ATTENTION_SLOTS = {
    "query": _words(r"q | q_(proj|einsum) | query(_proj|_dense)? | wq | to_q | attn_q"),
    "key": _words(r"k | k_proj | key(_proj|_dense)? | wk | to_k | attn_k"),
    "value": _words(r"v | v_proj | value(_proj|_dense)? | wv | to_v | attn_v"),
    "qkv": _words(
        r"""qkv(_proj)? | w_?qkv | to_qkv | query_key_value | linear_qkv | attn_qkv
        | in_proj(_weight|_bias)? | c_attn"""
    ),
    "output": _words(
        r"o | o_proj | wo | to_out | out(_proj)? | output | linear_proj | attn_output | c_proj"
        r" | (attention_)?output(_dense)? | dense | attn_vec_einsum"
    ),
    "query_norm": _words(r"q_(layer)?norm | attn_q_norm | query_norm"),
    "key_norm": _words(r"k_(layer)?norm | attn_k_norm | key_norm"),
    "kv_b": _words(r"kv_b_proj | attn_kv_b"),
    "key_b": _words(r"attn_k_b"),
    "value_b": _words(r"attn_v_b"),
}
_FEED_FORWARD = _words(r"mlp | ffn | feed_?forward")
_FEED_FORWARD_SLOTS = {
    "gate": _words(r"gate(_proj)? | w1 | wi_0 | ffn_gate(_exps)?"),
    "up": _words(r"up(_proj)? | w3 | wi_1 | ffn_up(_exps)?"),
    "down": _words(r"down(_proj)? | w2 | wo | ffn_down(_exps)?"),
    "gate_up": _words(r"gate_up(_proj)? | gate_and_up_projs? | linear_fc1 | ffn_gate_up_exps"),
}


def slot_by_name(name: str) -> str:
    """Return the place of a tensor in the architecture; empty if unknown."""
    words = split_name(name)
    has_param = _PARAM.search(name) is not None or names_bias(words[-1])
    modules = words[:-1] if has_param else words
    path = [word for word in modules if not (word.isdigit() or word in {"norms", "vars"})]
    module = path[-1] if path else ""
    if any(map(names_experts, words[:-1])):
        slot = _slot_in(_FEED_FORWARD_SLOTS, module)
        return f"expert.{slot}" if slot else ""
    if any(map(_FEED_FORWARD.fullmatch, words[:-1])):
        slot = _slot_in(_FEED_FORWARD_SLOTS, module)
        return f"ffn.{slot}" if slot else ""
    if not any(map(_ATTENTION.fullmatch, words[:-1])):
        return ""
    slot = _slot_in(_ATTENTION_SLOTS, module)
    return f"attention.{slot}" if slot else "attention"


def _slot_in(slots: Mapping[str, re.Pattern[str]], module: str) -> str:
    return next((slot for slot, words in slots.items() if words.fullmatch(module)), "")


def names_experts(name: str) -> bool:
    """Return whether a path leads to the experts of a mixture."""
    return "expert" in name


# Words for layers. Other repeated modules are called by their word without its "s".
_LAYERS = frozenset({"blk", "h", "block", "blocks", "resblocks", "transformer_blocks"})
# Fields of moments: names that stand for themselves, and letters, which modules have, too.
_FIELD_OF_SQUARES = re.compile(r"(\w+_)?(exp_avg_sq|square_avg|moment_2)(_\w+)?")
_FIELD = re.compile(r"(\w+_)?(exp_avg|exp_inf|grad_avg|acc_delta|momentum_buffer|moment_\d)(_\w+)?")
_LETTER_OF_SQUARES, _LETTER = re.compile(r"nu|m2|v|v_row|v_col"), re.compile(r"mu|m|m1|trace")
_FIELD_ENDS = re.compile(r"[.:/]")
_FACTOR = re.compile(r"(^|[._])lora[._]?(embedding_)?(A|B|a|b|up|down)([._]|$)")
_SECOND_FACTOR = re.compile(r"lora_[bB]\b")


def is_of_squares(name: str) -> bool:
    """Return whether a moment is an average of squares, as in Adam."""
    words = _FIELD_ENDS.split(name)
    for of_squares, of_values in ((_FIELD_OF_SQUARES, _FIELD), (_LETTER_OF_SQUARES, _LETTER)):
        for word in words:
            if of_squares.fullmatch(word):
                return True
            if of_values.fullmatch(word):
                return False
    return False


def names_factor(name: str) -> bool:
    """Return whether a tensor of this name is a factor of an adapter of low rank."""
    return _FACTOR.search(name) is not None


def begins_as_zeros(name: str) -> bool:
    """Return whether a matrix is all zeros in a new model, as the second factor of an adapter."""
    return _SECOND_FACTOR.search(name) is not None


def repeated_module(word: str) -> str:
    """Return what a repeated module is called in all conventions: ``"layer"``, ``"expert"``."""
    if names_experts(word):
        return "expert"
    return "layer" if word in _LAYERS else word.removesuffix("s")


def component_by_name(name: str, role: Role) -> str:
    """Return the part of a checkpoint that a tensor belongs to."""
    if role in OF_TRAINING:
        return role.group.split()[0]
    return next((word for word in split_name(name)[:_MAX_DEPTH] if word in _COMPONENTS), "")


# --- codes and scales ----------------------------------------------------------------------------

_MAY_BE_CODES = frozenset({Role.WEIGHT, Role.CONSTANT, Role.COUNTER})
# Element types of codes, one per element or several in a word.
_CODES = re.compile(r"u?int(2|4|8|16|32)|float[468]_\w+")
# Endings of the names of codes and zero points, which the name of their scales does not have.
_ENDINGS = (
    "_packed", "_blocks", "_qdata", "_quantized", "_zero_point", "._data", ":data", ":zero_points",
)  # fmt: skip
_SCALES = (
    "_scale", "_scale_inv", "_scales", ".scale", "/scale", "._scale", ":scale", ":scales",
    ".absmax", "/absmax", "_absmax",
)  # fmt: skip
_SCALES_OF_SCALES = ("_scale_2", "_global_scale", ":global")
# A module of quantised layers has one of these, for the tensors of these names.
_MODULE_SCALES = ("scales", "scale", "SCB", "scale_packed")
_MODULE_CODES = frozenset({"weight", "qweight", "qzeros", "kernel", "codes", "W_q"})


def may_have_codes(dtypes: Iterable[str]) -> bool:
    """Return whether any element type is one of codes."""
    return any(map(_CODES.fullmatch, dtypes))


def codes_and_companions(dtypes: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return codes with their scales, and other integers in their modules with the same scales."""
    code_types = {dtype for dtype in set(dtypes.values()) if _CODES.fullmatch(dtype)}
    codes: dict[str, str] = {}
    companions: dict[str, str] = {}
    if not code_types:
        return codes, companions
    codes = _scales_by_codes(dtypes, code_types)
    if not codes:
        return codes, companions
    modules = {module_of(name): scales for name, scales in codes.items()}
    modules.pop("", None)
    modules |= codes
    for name, dtype in dtypes.items():
        if not dtype.startswith(("int", "uint")) or name in codes:
            continue
        # In the module of the codes, or below them: "weight.quant_state.bitsandbytes__nf4".
        module = module_of(name)
        scales = modules.get(module) or codes.get(module_of(module))
        if scales is not None:
            companions[name] = scales
    return codes, companions


def _scales_by_codes(dtypes: Mapping[str, str], code_types: Collection[str]) -> dict[str, str]:
    """Return the name of the scales of each tensor of codes."""
    codes: dict[str, str] = {}
    # 100,000 names have few masks, and the mask of a name of scales is one of them.
    masks = masked(list(dtypes))
    present = set(masks)
    edits: dict[str, list[_Edit]] = {}
    for (name, dtype), mask in zip(dtypes.items(), masks, strict=True):
        if dtype not in code_types:
            continue
        if mask not in edits:
            edits[mask] = [
                edit
                for edit in _edits_to_scales(mask)
                if edit._replace(ending=_NUMBER.sub("0", edit.ending)).apply(mask) in present
            ]
        for edit in edits[mask]:
            scales = edit.apply(name)
            if scales in dtypes:
                codes[name] = scales
                break
    return codes


class _Edit(NamedTuple):
    """A change of the end of a name: how many characters are cut off, and what is appended."""

    cut: int
    ending: str

    def apply(self, name: str) -> str:
        """Return the changed name."""
        return name[: len(name) - self.cut] + self.ending


def _edits_to_scales(name: str) -> Iterator[_Edit]:
    """Yield the changes that may turn the name of codes into the name of scales."""
    stem = name
    if name.endswith(_ENDINGS):
        stem = name.removesuffix(next(ending for ending in _ENDINGS if name.endswith(ending)))
    cut = len(name) - len(stem)
    for ending in _SCALES:
        yield _Edit(cut, ending)
    if stem.endswith("_scale"):
        for ending in _SCALES_OF_SCALES:
            yield _Edit(cut + len("_scale"), ending)
    leaf = leaf_of(stem)
    if leaf in _MODULE_CODES:
        for scales in _MODULE_SCALES:
            yield _Edit(cut + len(leaf), scales)
