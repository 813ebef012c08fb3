"""Roles of tensors: trained weights, and what frameworks store next to them.

A role follows from name, element type and shape. `docs/roles.md` shows the table with examples.

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
``constant``    masks, positions, frequencies; booleans, and integers that are not codes
``codes``       integers and small floats with scales next to them, or with names of weights
``weight``      everything else
==============  ==================================================================================
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from xckpt.labels.conventions import codes_and_companions
from xckpt.structure.numbering import split_leaf, split_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Role(StrEnum):
    """Purpose of a tensor in a checkpoint."""

    WEIGHT = "weight"
    CODES = "codes"
    AVERAGE = "average"
    STATISTIC = "statistic"
    COUNTER = "counter"
    CONSTANT = "constant"
    MOMENT = "moment"
    MASTER = "master"
    STEP = "step"
    SCALE = "scale"
    STATE = "state"

    @property
    def group(self) -> str:
        """Heading under which summaries and pictures show the tensor."""
        return _GROUPS[self]


#: Roles of trainable tensors. Only their elements count as parameters.
PARAMETERS = frozenset({Role.WEIGHT, Role.CODES})

_GROUPS = {
    Role.WEIGHT: "parameters",
    Role.CODES: "parameters",
    Role.AVERAGE: "averages",
    Role.STATISTIC: "buffers",
    Role.COUNTER: "buffers",
    Role.CONSTANT: "buffers",
    Role.MOMENT: "optimizer state",
    Role.MASTER: "optimizer state",
    Role.STEP: "optimizer state",
    Role.SCALE: "quantisation",
    Role.STATE: "training state",
}

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


def roles_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Role]:
    """Return the role of each tensor of a checkpoint, from names, stored types and shapes."""
    # All tensors are needed: scales belong to the codes in their module, and averages are weights
    # if a checkpoint has no other weights.
    dtypes: dict[str, str] = {}
    roles: dict[str, Role] = {}
    for name, dtype, shape in tensors:
        dtypes[name] = dtype
        axes = sum([size != 1 for size in shape])
        is_square = len(shape) == 4 and shape[0] == shape[1] == 1 and shape[2] == shape[3]
        roles[name] = _role_of(_NUMBER.sub("0", name), dtype, axes, is_square=is_square)
    _mark_codes(roles, dtypes)
    if not PARAMETERS.intersection(roles.values()):
        roles = {n: Role.WEIGHT if r is Role.AVERAGE else r for n, r in roles.items()}
    return roles


@lru_cache(_MAX_FORMS)
def _role_of(name: str, dtype: str, axes: int, *, is_square: bool) -> Role:
    """Return the role of a tensor regardless of its neighbours; `name` has 0 for every number."""
    owner, _, part = name.partition(":") if _PART.search(name) else (name, "", "")
    words = split_name(owner)
    front, last = words[:_MAX_DEPTH], words[-1]
    is_scalar = axes == 0
    if part and (role := _role_of_part(part)) is not None:
        return role
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
    if dtype == "bool" or (is_square and last == "bias") or _CONSTANT.fullmatch(last):
        return Role.CONSTANT
    # GGUF has `rope_freqs.weight`.
    if len(words) > 1 and last == "weight" and words[-2] == "rope_freqs":
        return Role.CONSTANT
    if not is_integer:
        return Role.WEIGHT
    return Role.CODES if _QUANTISED.fullmatch(last) else Role.CONSTANT


def _mark_codes(roles: dict[str, Role], dtypes: Mapping[str, str]) -> None:
    """Set the roles of codes, of their scales, and of other tensors that decoding needs."""
    codes, companions = codes_and_companions(dtypes)
    modules = set()
    for name, scales in codes.items():
        roles[scales] = Role.SCALE
        if roles[name] in {Role.WEIGHT, Role.CONSTANT}:
            roles[name] = Role.CODES
        if roles[name] is Role.CODES:
            modules.add(split_leaf(name)[0])
    for name in companions:
        if roles[name] is Role.CONSTANT:
            roles[name] = Role.SCALE
    for name, role in roles.items() if modules else ():
        module, _, last = split_leaf(name)
        if role is Role.WEIGHT and _SCALE_OF_MODULE.fullmatch(last) and module in modules:
            roles[name] = Role.SCALE


# --- norms ---------------------------------------------------------------------------------------

_GAIN = _words(r"weight | gamma | scale | g | gain")
_NORM_MODULE = _words(r"\w*norm\w* | (\w+_)?(ln|bn)(_?\w+)?")
_NORM_ALONE = _words(r"\w*norm\w*?(_weight)? | (ln|bn)(_?\w+)?")
_NOT_GAIN = _words(r"\w*(bias|beta|shift|mean|var|_b)")


def norms_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> set[str]:
    """Return the names of the gains of norms."""
    # They are recognised by their names, by running statistics next to them, or because they are
    # vectors with a bias of the same length, which only norms have.
    vectors = {name: shape for name, _, shape in tensors if sum([n != 1 for n in shape]) <= 1}
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
