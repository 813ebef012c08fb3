"""Words of 32 bits: ``qweight`` of GPTQ and AWQ, the transpose of a weight, and the codes of MLX.

Transformers calls MLX ``metal``. References: gptqmodel 7.7; AutoAWQ at commit 88e4c76b; mlx 0.32.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.quantization.model import (
    FLOATS,
    LayoutError,
    Model,
    Weight,
    ceil_div,
    check_bits,
    check_grid,
    check_group,
    is_match,
    make_quantization,
    short_name,
    view_as,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Part, Tensor

_GPTQ_FORMATS = {"gptq", "gptq_v2", "gptq_p", None}
# Widths of the pieces that the format gptq_p stores codes in.
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
_AWQ_VERSIONS = {"gemm", "gemv", "exllama", "exllamav2"}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def gptq_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a declaration of GPTQ is unsupported, or None."""
    format = _gptq_format(config)
    if format not in _GPTQ_FORMATS or config.get("is_marlin_format") is True:
        return f"GPTQ checkpoint format {format!r} is unsupported"
    if config.get("pack_dtype", "int32") != "int32":
        return "GPTQ codes are not packed in words of 32 bits"
    return None


def awq_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a declaration of AWQ is unsupported, or None."""
    version = config.get("version", "gemm")
    if isinstance(version, str) and version.lower() in _AWQ_VERSIONS:
        return None
    return f"AWQ version {version!r:.40} is unsupported"


def match_qweight(model: Model, name: str, codes: Tensor) -> Weight | None:
    """Match ``qweight`` of GPTQ or AWQ."""
    module = name.removesuffix(".qweight")
    if module == name:
        return None
    model.require(name, {"int32"})
    scales = model.require(f"{module}.scales", FLOATS)
    if codes.ndim != 2 or scales.ndim != 2:
        shapes = f"qweight has shape {list(codes.shape)}, scales {list(scales.shape)}"
        raise LayoutError("shape", f"{shapes}; both need two axes")
    is_awq = model.method == "awq"
    if model.method is None:
        has_order = f"{module}.g_idx" in model.tensors
        is_awq = not has_order and codes.shape[1] * 8 == scales.shape[1]
    if is_awq:
        return _match_awq(model, module, codes, scales)
    return _match_gptq(model, module, codes, scales)


def _require_shape(tensor: Tensor, shape: tuple[int, ...], bits: int, group: int) -> None:
    if tensor.shape != shape:
        raise LayoutError(
            "shape",
            f"{short_name(tensor.name)} has shape {list(tensor.shape)}, but {bits} bits in groups "
            f"of {group} need {list(shape)}",
        )


def _group_size(
    config: Mapping[str, Any], columns: int, groups: int | None, *, may_be_partial: bool = False
) -> int:
    """Return the size of a group, from the number of groups if it is not declared."""
    declared = config.get("group_size", config.get("q_group_size"))
    if declared is not None:
        return check_group(declared) or max(columns, 1)
    if not groups or (columns % groups and not may_be_partial):
        raise LayoutError("grid", f"{groups} groups do not divide {columns} columns")
    return max(ceil_div(columns, groups), 1)


# --- GPTQ ----------------------------------------------------------------------------------------


def _match_gptq(model: Model, module: str, codes: Tensor, scales: Tensor) -> Weight:
    """Return the weight that follows from any of the configs that may apply to a module."""
    match = partial(_gptq_weight, model, module, codes, scales)
    (_, weight), *alternatives = model.fit(_gptq_configs(model, module), match)
    if alternatives:
        reason = "its parameters depend on a pattern of 'dynamic' that is too complex to match"
        raise LayoutError("dynamic", reason)
    return weight


def _gptq_configs(model: Model, module: str) -> list[Mapping[str, Any]]:
    """Return the configs that may apply to a module."""
    # The first matching pattern of "dynamic" decides. Patterns that cannot be matched may decide.
    configs: list[Mapping[str, Any]] = []
    overrides = model.config.get("dynamic")
    overrides = overrides if isinstance(overrides, dict) else {}
    model.spend(patterns=len(overrides))
    for key, changes in overrides.items():
        matches = is_match(key.removeprefix("-:").removeprefix("+:"), module)
        if matches is not False:
            # A negative pattern declares that a module is not quantised, but this one has codes.
            is_override = not key.startswith("-:") and isinstance(changes, dict)
            configs.append({**model.config, **changes} if is_override else model.config)
        if matches:
            return configs
    return [*configs, model.config]


def _gptq_weight(
    model: Model, module: str, codes: Tensor, scales: Tensor, config: Mapping[str, Any]
) -> Weight:
    """Return the weight that follows from one config."""
    group_index = model.find(f"{module}.g_idx")
    zeros = model.find(f"{module}.qzeros")
    bits = _gptq_bits(config, codes, group_index, zeros)
    rows = codes.shape[1]
    columns = codes.shape[0] * 32 // bits if group_index is None else group_index.size
    has_index = group_index is not None
    group = _group_size(config, columns, scales.shape[0], may_be_partial=has_index)
    groups = ceil_div(columns, group)
    is_symmetric, format = config.get("sym") is True, _gptq_format(config)
    if format not in _GPTQ_FORMATS:
        raise LayoutError("format", f"GPTQ checkpoint format {format!r} is unsupported")
    if zeros is None and not is_symmetric:
        raise LayoutError("no qzeros", "qzeros is missing, and sym is not declared")
    expected = {
        "data": (codes, (ceil_div(columns * bits, 32), rows), {"int32"}),
        "scales": (scales, (groups, rows), FLOATS),
        "zeros": (zeros, (groups, ceil_div(rows * bits, 32)), {"int32"}),
        "index": (group_index, (columns,), {"int32", "int64"}),
    }
    parts: dict[str, tuple[Tensor, Part]] = {}
    for role, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        model.require(tensor.name, dtypes)
        _require_shape(tensor, shape, bits, group)
        parts[role] = view_as(tensor)
    planes = _PLANES.get(bits, ()) if format == "gptq_p" or bits in {5, 6, 7} else ()
    if planes and (columns % 32 or rows % 32):
        raise LayoutError("shape", f"{[rows, columns]} is not divisible into runs of 32 codes")
    quantization = make_quantization(
        block=(1, group),
        code="uint8",
        bits=bits,
        word_bits=32,
        axis=1,
        zero=1 << (bits - 1) if is_symmetric else None,
        packed_zeros=True,
        scale_axes=(1, 0),
        axes=(1, 0),
        stream=not planes,
        planes=planes,
        zero_axis=0,
        # Version 1 stores zero points less one.
        zero_add=0 if planes or format in {"gptq_v2", "gptq_p"} else 1,
        index_axis=None if group_index is None else 1,
    )
    return Weight(f"{module}.weight", (rows, columns), quantization, parts, strict=True)


def _gptq_format(config: Mapping[str, Any]) -> str | None:
    """Return how a config declares that codes are stored, as text whatever its type is."""
    format = config.get("checkpoint_format", config.get("format"))
    return None if format is None else str(format)[:40]


def _gptq_bits(
    config: Mapping[str, Any], codes: Tensor, group_index: Tensor | None, zeros: Tensor | None
) -> int:
    """Return the bits of a code, from shapes if they are not declared."""
    if "bits" in config:
        return check_bits(config["bits"], (2, 3, 4, 5, 6, 7, 8))
    words, rows = codes.shape
    if group_index is not None and group_index.size and not words * 32 % group_index.size:
        bits = words * 32 // group_index.size
    elif group_index is None and zeros is not None and zeros.ndim == 2 and rows:
        bits = zeros.shape[1] * 32 // rows
    else:
        raise LayoutError(
            "bits", "the bits of a code are not declared, and do not follow from shapes"
        )
    return check_bits(bits, (2, 3, 4, 8))


# --- AWQ -----------------------------------------------------------------------------------------


def _match_awq(model: Model, module: str, codes: Tensor, scales: Tensor) -> Weight:
    check_bits(model.config.get("bits", model.config.get("w_bit", 4)), (4,))
    is_gemv = str(model.config.get("version", "gemm")).lower() == "gemv"
    if is_gemv:
        rows, columns = codes.shape[0], codes.shape[1] * 8
        group = _group_size(model.config, columns, None)
        # Rows of zero points are padded to whole words, and to more of them for small groups.
        multiple = 1 if group >= 128 else 2 if group >= 64 else 4
        words = ceil_div(ceil_div(ceil_div(columns, group), 8), multiple) * multiple
        zeros_shape, scales_shape = (rows, words), (rows, words * 8)
    else:
        columns, rows = codes.shape[0], codes.shape[1] * 8
        group = _group_size(model.config, columns, scales.shape[0])
        groups = ceil_div(columns, group)
        zeros_shape, scales_shape = (groups, codes.shape[1]), (groups, rows)
    parts = {"data": view_as(codes), "scales": view_as(scales)}
    has_zeros = f"{module}.qzeros" in model.tensors or model.config.get("zero_point") is not False
    if has_zeros:
        zeros = model.require(f"{module}.qzeros", {"int32"})
        _require_shape(zeros, zeros_shape, 4, group)
        parts["zeros"] = view_as(zeros)
    _require_shape(scales, scales_shape, 4, group)
    quantization = make_quantization(
        block=(1, group),
        code="uint8",
        bits=4,
        word_bits=32,
        axis=1 if is_gemv else 0,
        zero=None if has_zeros else 8,
        packed_zeros=True,
        scale_axes=() if is_gemv else (1, 0),
        axes=() if is_gemv else (1, 0),
        order=() if is_gemv else _AWQ_ORDER,
        zero_axis=None if is_gemv else 0,
        stored_grid=scales_shape if is_gemv else (),
    )
    return Weight(f"{module}.weight", (rows, columns), quantization, parts)


# --- MLX ------------------------------------------------------------------------------------------


class _MlxParams(NamedTuple):
    """Parameters of quantisation: how codes are stored, codes per group, and bits per code."""

    mode: str
    group: int
    bits: int


# By mode; only affine can have other parameters.
_DEFAULTS = {
    params.mode: params
    for params in (
        _MlxParams("affine", 64, 4),
        _MlxParams("mxfp4", 32, 4),
        _MlxParams("mxfp8", 32, 8),
        _MlxParams("nvfp4", 16, 4),
    )
}
_BITS = (1, 2, 3, 4, 5, 6, 8)


def mlx_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a declaration of MLX is unsupported, or None."""
    mode = config.get("mode", "affine")
    if isinstance(mode, str) and mode in _DEFAULTS:
        return None
    return f"MLX mode {mode!r:.40} is unsupported"


def match_mlx(model: Model, name: str, codes: Tensor) -> Weight | None:
    """Match integers with scales and biases, or small floats with scales."""
    module = name.removesuffix(".weight")
    if codes.dtype != "uint32" or module == name or f"{module}.scales" not in model.tensors:
        return None
    scales = model.require(f"{module}.scales", FLOATS | {"uint8"})
    if codes.ndim < 2 or scales.ndim != codes.ndim:
        shapes = f"weight has shape {list(codes.shape)}, scales {list(scales.shape)}"
        raise LayoutError("shape", f"{shapes}; they differ in their number of axes")
    mode, group, bits = _params_of(model, module, codes, scales)
    words, groups = codes.shape[-1], scales.shape[-1]
    shape = (*codes.shape[:-1], words * 32 // bits)
    if shape[-1] * bits != words * 32 or shape[-1] != groups * group:
        raise LayoutError(
            "grid", f"{words} words do not hold {groups} groups of {group} codes of {bits} bits"
        )
    axis = codes.ndim - 1
    block = (1,) * axis + (group,)
    check_grid(shape, block, scales)
    if f"{module}.global_scale" in model.tensors:
        raise LayoutError("global", "global_scale is unsupported")
    if mode == "affine":
        model.require(scales.name, FLOATS)
        has_qbiases = f"{module}.qbiases" in model.tensors
        biases = model.require(f"{module}.{'qbiases' if has_qbiases else 'biases'}", FLOATS)
        check_grid(shape, block, biases)
        quantization = make_quantization(
            block=block, code="uint8", bits=bits, word_bits=32, axis=axis, stream=True, biases=True
        )
        parts = {"data": view_as(codes), "scales": view_as(scales), "biases": view_as(biases)}
        return Weight(name, shape, quantization, parts)
    model.require(scales.name, {"uint8"})
    scale_type = "float8_e4m3fn" if mode == "nvfp4" else "float8_e8m0fnu"
    parts = {"data": view_as(codes), "scales": view_as(scales, scale_type)}
    if bits == 8:
        parts["data"] = view_as(codes, "float8_e4m3fn", shape)
        quantization = make_quantization(
            block=block, code="float8_e4m3fn", bits=8, word_bits=8, axis=axis
        )
    else:
        quantization = make_quantization(
            block=block, code="float4_e2m1fn", bits=4, word_bits=32, axis=axis
        )
    return Weight(name, shape, quantization, parts)


def _params_of(model: Model, module: str, codes: Tensor, scales: Tensor) -> _MlxParams:
    """Return the declared parameters of a module, or those that follow from shapes."""
    override = model.config.get(module)
    if override is False:
        raise LayoutError("config", "it has scales, but is declared as not quantised")
    config = override if isinstance(override, dict) else model.config
    if model.method is None and "bits" not in config:
        return _params_from_shapes(model, module, codes, scales)
    mode = config.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _DEFAULTS:
        raise LayoutError("mode", f"MLX mode {mode!r:.40} is unsupported")
    default = _DEFAULTS[mode]
    bits = check_bits(config.get("bits") or default.bits, _BITS)
    group = check_group(config.get("group_size") or default.group)
    if group is None:
        raise LayoutError("group size", "the group size -1 is unsupported")
    params = _MlxParams(mode, group, bits)
    if mode != "affine" and params != default:
        reason = f"MLX mode {mode} with {bits} bits in groups of {group} is unsupported"
        raise LayoutError("mode", reason)
    return params


def _params_from_shapes(model: Model, module: str, codes: Tensor, scales: Tensor) -> _MlxParams:
    if f"{module}.biases" in model.tensors or f"{module}.qbiases" in model.tensors:
        return model.once(_affine_params_from_shapes)
    words, groups = codes.shape[-1], scales.shape[-1]
    for params in _DEFAULTS.values():
        if params.mode != "affine" and words * 32 == groups * params.group * params.bits:
            return params
    raise LayoutError("grid", f"no mode has {words} words for {groups} groups")


def _affine_params_from_shapes(model: Model) -> _MlxParams:
    """Return the parameters that fit all modules."""
    # Shapes alone allow several. The best ones make most widths that vectors of the model have.
    widths = {t.shape[0] for t in model.tensors.values() if t.ndim == 1 and t.dtype in FLOATS}
    scores = {(group, bits): 0 for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)}
    for name, tensor in model.tensors.items():
        scales = model.tensors.get(f"{name.removesuffix('weight')}scales")
        has_codes = tensor.dtype == "uint32" and name.endswith(".weight") and tensor.ndim > 1
        if not has_codes or scales is None or not scales.ndim:
            continue
        nbits, groups = tensor.shape[-1] * 32, scales.shape[-1]
        scores = {
            params: score + (groups * params[0] in widths)
            for params, score in scores.items()
            if nbits == prod(params) * groups
        }
    highest = max(scores.values(), default=0)
    best = [params for params, score in scores.items() if score == highest]
    if len(best) == 1:
        return _MlxParams("affine", *best[0])
    if (64, 4) not in best:
        raise LayoutError(
            "undeclared", "the bits of a code are not declared, and do not follow from shapes"
        )
    model.warnings.append(
        "the bits of quantised weights are not declared; 4 bits in groups of 64 are assumed"
    )
    return _MlxParams("affine", 64, 4)
