"""Words of 32 bits: ``qweight`` of GPTQ and of AWQ, the transpose of a weight; MLX, and ``metal``.

Reference: gptqmodel 7.7; AutoAWQ at commit 88e4c76b; mlx 0.32, which is transformers' ``metal``.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from xckpt.quantized.config import is_match
from xckpt.quantized.model import (
    FLOATS,
    Model,
    Unfit,
    Weight,
    bits_of,
    cdiv,
    check_grid,
    group_of,
    leaf,
    quantization,
    stored_as,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Part, Tensor

_AWQ_VERSIONS = {"gemm", "gemv", "exllama", "exllamav2"}
_GPTQ_FORMATS = {"gptq", "gptq_v2", "gptq_p", None}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Microseconds that it takes to try parameters.
_EFFORT = 30
_MLX_MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
_MLX_BITS = (1, 2, 3, 4, 5, 6, 8)
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}


def gptq_problem(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a declaration of GPTQ for all modules."""
    format = _gptq_format(config)
    if format not in _GPTQ_FORMATS or config.get("is_marlin_format") is True:
        return f"the checkpoint format {format!r} is not read"
    if config.get("pack_dtype", "int32") != "int32":
        return "codes are not packed in words of 32 bits"
    return None


def _gptq_format(config: Mapping[str, Any]) -> str | None:
    """Return what a config says of how codes are stored, as text whatever its type is."""
    format = config.get("checkpoint_format", config.get("format"))
    return None if format is None else str(format)[:40]


def awq_problem(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a declaration of AWQ for all modules."""
    version = config.get("version", "gemm")
    if isinstance(version, str) and version.lower() in _AWQ_VERSIONS:
        return None
    return f"the version {str(version)[:40]!r} is not read"


def qweight(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read ``qweight`` of GPTQ or AWQ."""
    stem = name.removesuffix(".qweight")
    if stem == name:
        return None
    model.need(name, {"int32"})
    scales = model.need(f"{stem}.scales", FLOATS)
    if data.ndim != 2 or scales.ndim != 2:
        raise Unfit("shape", f"qweight is {list(data.shape)}, scales {list(scales.shape)}")
    is_awq = model.method == "awq"
    if model.method is None:
        is_awq = f"{stem}.g_idx" not in model.tensors and data.shape[1] * 8 == scales.shape[1]
    return (_awq if is_awq else _gptq)(model, stem, data, scales)


def _gptq(model: Model, stem: str, data: Tensor, scales: Tensor) -> Weight:
    found: list[Weight] = []
    failures: list[Unfit] = []
    configs = _gptq_configs(model, stem)
    model.spend(_EFFORT * (len(configs) - 1))
    for config in configs:
        try:
            weight = _gptq_weight(model, stem, data, scales, config=config)
        except Unfit as error:
            failures.append(error)
            continue
        if weight not in found:
            found.append(weight)
    if not found:
        raise failures[0]
    if len(found) > 1:
        raise Unfit("dynamic", "a pattern of 'dynamic' that is not evaluated decides on it")
    return found[0]


def _gptq_weight(
    model: Model, stem: str, data: Tensor, scales: Tensor, *, config: Mapping[str, Any]
) -> Weight:
    index, qzeros = model.find(f"{stem}.g_idx"), model.find(f"{stem}.qzeros")
    out, bits = data.shape[1], _gptq_bits(config, data, index, qzeros)
    columns = index.size if index is not None else data.shape[0] * 32 // bits
    group = _gptq_group(config, columns, scales.shape[0], has_index=index is not None)
    sym, format = config.get("sym"), _gptq_format(config)
    if format not in _GPTQ_FORMATS:
        raise Unfit("format", f"the checkpoint format {format!r} is not read")
    if qzeros is None and sym is not True:
        raise Unfit("no qzeros", "there are no qzeros, and it is not symmetric")
    groups = cdiv(columns, group)
    needed = {
        "data": (data, (cdiv(columns * bits, 32), out), {"int32"}),
        "scales": (scales, (groups, out), FLOATS),
        "zeros": (qzeros, (groups, cdiv(out * bits, 32)), {"int32"}),
        "index": (index, (columns,), {"int32", "int64"}),
    }
    parts: dict[str, tuple[Tensor, Part]] = {}
    for role, (tensor, shape, dtypes) in needed.items():
        if tensor is None:
            continue
        model.need(tensor.name, dtypes)
        if tensor.shape != shape:
            reason = f"{leaf(tensor.name)} is {list(tensor.shape)}, but {list(shape)} is needed"
            raise Unfit("shape", f"{reason} for {bits} bits in groups of {group}")
        parts[role] = stored_as(tensor)
    planes = _PLANES.get(bits, ()) if format == "gptq_p" or bits in {5, 6, 7} else ()
    if planes and (columns % 32 or out % 32):
        raise Unfit("shape", f"{[out, columns]} is not whole runs of 32 codes")
    scheme = quantization(
        (1, group),
        "uint8",
        bits,
        32,
        1,
        zero=1 << (bits - 1) if sym is True else None,
        packed_zeros=True,
        scale_axes=(1, 0),
        axes=(1, 0),
        stream=not planes,
        planes=planes,
        zero_axis=0,
        # Version 1 stores one less.
        zero_add=0 if planes or format in {"gptq_v2", "gptq_p"} else 1,
        index_axis=None if index is None else 1,
    )
    return Weight(f"{stem}.weight", (out, columns), scheme, parts, strict=True)


def _gptq_configs(model: Model, stem: str) -> list[Mapping[str, Any]]:
    """Return what may be declared for a module: the first pattern that matches its name counts."""
    configs: list[Mapping[str, Any]] = []
    overrides = model.config.get("dynamic")
    overrides = overrides if isinstance(overrides, dict) else {}
    model.spend(len(overrides))
    for key, changes in overrides.items():
        matched = is_match(key.removeprefix("-:").removeprefix("+:"), stem)
        if matched is not False:
            # That it is not quantised is not so: its tensors are there.
            is_other = not key.startswith("-:") and isinstance(changes, dict)
            configs.append({**model.config, **changes} if is_other else model.config)
        if matched:
            return configs
    return [*configs, model.config]


def _gptq_group(config: Mapping[str, Any], columns: int, groups: int, *, has_index: bool) -> int:
    size = config.get("group_size", config.get("q_group_size"))
    if size is not None:
        return group_of(size) or max(columns, 1)
    group = cdiv(columns, max(groups, 1)) or 1
    if columns % group and not has_index:
        raise Unfit("grid", f"{groups} groups do not divide {columns}")
    return group


def _gptq_bits(
    config: Mapping[str, Any], data: Tensor, index: Tensor | None, qzeros: Tensor | None
) -> int:
    """Return the bits of codes, from the shapes where they are not declared."""
    if "bits" in config:
        return bits_of(config["bits"], (2, 3, 4, 5, 6, 7, 8))
    rows, out = data.shape
    if index is not None and index.size and not rows * 32 % index.size:
        bits = rows * 32 // index.size
    elif index is None and qzeros is not None and qzeros.ndim == 2 and out:
        bits = qzeros.shape[1] * 32 // out
    else:
        raise Unfit("bits", "nothing says how many bits a code has")
    return bits_of(bits, (2, 3, 4, 8))


def _awq(model: Model, stem: str, data: Tensor, scales: Tensor) -> Weight:
    is_gemv = str(model.config.get("version", "gemm")).lower() == "gemv"
    if is_gemv:
        out, columns = data.shape[0], data.shape[1] * 8
        group = _awq_group(model, columns, None)
        # Rows of zero points are padded, the more the smaller groups are.
        step = 1 if group >= 128 else 2 if group >= 64 else 4
        stored = cdiv(cdiv(cdiv(columns, group), 8), step) * step
        grid, needed = (out, stored), (out, stored * 8)
        how: dict[str, Any] = {"stored_grid": needed}
    else:
        columns, out = data.shape[0], data.shape[1] * 8
        group = _awq_group(model, columns, scales.shape[0])
        grid = (cdiv(columns, group), data.shape[1])
        needed = (grid[0], out)
        how = {"scale_axes": (1, 0), "axes": (1, 0), "order": _AWQ_ORDER, "zero_axis": 0}
    parts = {"data": stored_as(data), "scales": stored_as(scales)}
    zero: int | None = 8
    if f"{stem}.qzeros" in model.tensors or model.config.get("zero_point") is not False:
        zeros, zero = model.need(f"{stem}.qzeros", {"int32"}), None
        if zeros.shape != grid:
            raise Unfit("shape", f"qzeros is {list(zeros.shape)}, but {list(grid)} is needed")
        parts["zeros"] = stored_as(zeros)
    if scales.shape != needed:
        reason = f"scales is {list(scales.shape)}, but {list(needed)} is needed"
        raise Unfit("shape", f"{reason} for groups of {group}")
    block, axis = (1, group), 1 if is_gemv else 0
    scheme = quantization(block, "uint8", 4, 32, axis, zero=zero, packed_zeros=True, **how)
    return Weight(f"{stem}.weight", (out, columns), scheme, parts)


def _awq_group(model: Model, columns: int, groups: int | None) -> int:
    bits_of(model.config.get("bits", model.config.get("w_bit", 4)), (4,))
    declared = model.config.get("group_size", model.config.get("q_group_size"))
    if declared is not None:
        return group_of(declared) or max(columns, 1)
    if not groups or columns % groups:
        raise Unfit("grid", f"{groups} groups do not divide {columns}")
    return max(columns // groups, 1)


# --- MLX ------------------------------------------------------------------------------------------


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
    parts = {"data": stored_as(data), "scales": stored_as(scales)}
    axis = data.ndim - 1
    if mode == "affine":
        model.need(scales.name, FLOATS)
        names = [f"{stem}.{each}" for each in ("qbiases", "biases")]
        name_of = next((each for each in names if each in model.tensors), names[-1])
        biases = model.need(name_of, FLOATS)
        check_grid(shape, block, biases)
        parts["biases"] = stored_as(biases)
        scheme = quantization(block, "uint8", bits, 32, axis, stream=True, biases=True)
        return Weight(name, shape, scheme, parts)
    model.need(scales.name, {"uint8"})
    exponent = "float8_e4m3fn" if mode == "nvfp4" else "float8_e8m0fnu"
    parts["scales"] = stored_as(scales, exponent)
    if bits == 8:
        parts["data"] = stored_as(data, "float8_e4m3fn", shape)
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
