"""MLX, which transformers calls ``metal``: words of 32 bits with scales, and with biases.

Reference: mlx 0.32.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.quantization.model import (
    FLOATS,
    LayoutError,
    Model,
    Weight,
    check_bits,
    check_grid,
    check_group,
    make_quantization,
    view_as,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Tensor


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
