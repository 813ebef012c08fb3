"""MLX, and transformers' ``metal``: words of 32 bits. Reference: mlx 0.32."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.quantized.model import (
    FLOATS,
    Model,
    Unfit,
    Weight,
    bits_of,
    check_grid,
    group_of,
    quantization,
    stored_as,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Tensor

__all__ = ["mlx", "mlx_problem"]

_MLX_MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
_MLX_BITS = (1, 2, 3, 4, 5, 6, 8)


def mlx_problem(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a declaration of MLX for all modules."""
    mode = config.get("mode", "affine")
    known = isinstance(mode, str) and mode in _MLX_MODES
    return None if known else f"the mode {str(mode)[:40]!r} is not read"


def mlx(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read words of MLX: integers with scales and biases, or small floats with scales."""
    stem = name.removesuffix(".weight")
    if data.dtype != "uint32" or stem == name or f"{stem}.scales" not in model.tensors:
        return None
    scales = model.need(f"{stem}.scales", FLOATS | {"uint8"})
    if data.ndim < 2 or scales.ndim != data.ndim:
        raise Unfit("shape", f"weight is {list(data.shape)}, scales {list(scales.shape)}")
    mode, size, bits = _mlx_params(model, stem, data, scales)
    words, groups = data.shape[-1], scales.shape[-1]
    shape = (*data.shape[:-1], words * 32 // bits)
    if shape[-1] * bits != words * 32 or shape[-1] != groups * size:
        reason = f"{words} words and {groups} groups are not codes of {bits} bits in groups of"
        raise Unfit("grid", f"{reason} {size}")
    block = (*(1,) * (data.ndim - 1), size)
    check_grid(shape, block, scales)
    if f"{stem}.global_scale" in model.tensors:
        raise Unfit("global", "there is a global_scale")
    parts = {"data": (data, stored_as(data)), "scales": (scales, stored_as(scales))}
    axis = data.ndim - 1
    if mode == "affine":
        model.need(scales.name, FLOATS)
        names = [f"{stem}.{each}" for each in ("qbiases", "biases")]
        name_of = next((each for each in names if each in model.tensors), names[-1])
        biases = model.need(name_of, FLOATS)
        check_grid(shape, block, biases)
        parts["biases"] = (biases, stored_as(biases))
        scheme = quantization(block, "uint8", bits, 32, axis, stream=True, biases=True)
        return Weight(name, shape, scheme, parts)
    model.need(scales.name, {"uint8"})
    exponent = "float8_e4m3fn" if mode == "nvfp4" else "float8_e8m0fnu"
    parts["scales"] = (scales, stored_as(scales, exponent))
    if bits == 8:
        parts["data"] = (data, stored_as(data, "float8_e4m3fn", shape))
        return Weight(name, shape, quantization(block, "float8_e4m3fn", 8, 8, axis), parts)
    return Weight(name, shape, quantization(block, "float4_e2m1fn", 4, 32, axis), parts)


def _mlx_params(model: Model, stem: str, data: Tensor, scales: Tensor) -> tuple[str, int, int]:
    """Return mode, group size and bits: of the module, of the model, or as shapes tell."""
    own = model.config.get(stem)
    if own is False:
        raise Unfit("config", "it is declared as not quantised, and has scales")
    config = own if isinstance(own, dict) else model.config
    if model.method is None and "bits" not in config:
        return _mlx_guess(model, stem, data, scales)
    mode = config.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _MLX_MODES:
        raise Unfit("mode", f"the mode {str(mode)[:40]!r} is not read")
    size, bits = [
        config.get(key) or default
        for key, default in zip(("group_size", "bits"), _MLX_MODES[mode], strict=True)
    ]
    bits, size = bits_of(bits, _MLX_BITS), group_of(size)
    if size is None:
        raise Unfit("group size", "the group size is -1")
    if mode != "affine" and (size, bits) != _MLX_MODES[mode]:
        raise Unfit("mode", f"{mode} of {bits} bits in groups of {size} is not read")
    return mode, size, bits


def _mlx_guess(model: Model, stem: str, data: Tensor, scales: Tensor) -> tuple[str, int, int]:
    """Return mode, group size and bits where nothing is declared."""
    words, groups = data.shape[-1], scales.shape[-1]
    if f"{stem}.biases" not in model.tensors and f"{stem}.qbiases" not in model.tensors:
        for mode, (size, bits) in list(_MLX_MODES.items())[1:]:
            if words * 32 == groups * size * bits:
                return mode, size, bits
        raise Unfit("grid", f"{words} words and {groups} groups are not those of any mode")
    size, bits = model.once(_mlx_affine)
    return "affine", size, bits


def _mlx_affine(model: Model) -> tuple[int, int]:
    """Return the group size and bits that fit all modules, and make widths that the model has."""
    widths = {t.shape[0] for t in model.tensors.values() if t.ndim == 1 and t.dtype in FLOATS}
    counts = {(size, bits): 0 for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)}
    for name, tensor in model.tensors.items():
        scales = model.tensors.get(f"{name.removesuffix('weight')}scales")
        is_weight = tensor.dtype == "uint32" and name.endswith(".weight") and tensor.ndim > 1
        if not is_weight or scales is None or not scales.ndim:
            continue
        nbits, groups = tensor.shape[-1] * 32, scales.shape[-1]
        counts = {each: n for each, n in counts.items() if nbits == prod(each) * groups}
        for each in counts:
            counts[each] += groups * each[0] in widths
    most = max(counts.values(), default=0)
    best = [each for each, count in counts.items() if count == most]
    if len(best) == 1:
        return best[0]
    if (64, 4) not in best:
        raise Unfit("undeclared", "nothing says how many bits a code has, and shapes do not tell")
    model.warnings.append("nothing declares the bits of its codes: 4 in groups of 64 are assumed")
    return 64, 4
