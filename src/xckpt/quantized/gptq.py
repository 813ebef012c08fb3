"""``qweight`` of GPTQ and of AWQ: the transpose of a weight, in words of 32 bits.

Reference: gptqmodel 7.7; AutoAWQ at commit 88e4c76b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xckpt.quantized.config import is_match
from xckpt.quantized.model import (
    FLOATS,
    Model,
    Unfit,
    Weight,
    bits_of,
    cdiv,
    group_of,
    leaf,
    quantization,
    stored_as,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xckpt.index import Part, Tensor
    from xckpt.quantized.model import Shape

__all__ = ["awq_problem", "gptq_problem", "qweight"]

_AWQ_VERSIONS = {"gemm", "gemv", "exllama", "exllamav2"}
_GPTQ_FORMATS = {"gptq", "gptq_v2", "gptq_p"}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Microseconds that it takes to try parameters.
_EFFORT = 30
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}


def gptq_problem(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a declaration of GPTQ for all modules."""
    format = config.get("checkpoint_format", config.get("format"))
    known = format is None or (isinstance(format, str) and format in _GPTQ_FORMATS)
    if not known or config.get("is_marlin_format") is True:
        return f"the checkpoint format {str(format)[:40]!r} is not read"
    if config.get("pack_dtype", "int32") != "int32":
        return "codes are not packed in words of 32 bits"
    return None


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
    if is_awq and str(model.config.get("version", "gemm")).lower() == "gemv":
        return _awq_gemv(model, stem, data, scales)
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
    sym, format = config.get("sym"), config.get("checkpoint_format", config.get("format"))
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
        parts[role] = tensor, stored_as(tensor)
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
    columns, words = data.shape
    shape = (words * 8, columns)
    group = _awq_group(model, columns, scales.shape[0])
    grid = (cdiv(columns, group), words)
    zeros = _awq_zeros(model, stem, grid)
    if scales.shape != (grid[0], words * 8):
        reason = f"scales is {list(scales.shape)}, but {[grid[0], words * 8]} is needed"
        raise Unfit("shape", f"{reason} for groups of {group}")
    parts = {"data": (data, stored_as(data)), "scales": (scales, stored_as(scales))} | zeros
    scheme = quantization(
        (1, group), "uint8", 4, 32, 0, zero=None if zeros else 8, packed_zeros=True,
        scale_axes=(1, 0), axes=(1, 0), order=_AWQ_ORDER, zero_axis=0,
    )  # fmt: skip
    return Weight(f"{stem}.weight", shape, scheme, parts)


def _awq_gemv(model: Model, stem: str, data: Tensor, scales: Tensor) -> Weight:
    out, words = data.shape
    columns = words * 8
    group = _awq_group(model, columns, None)
    # Rows of zero points are padded, the more the smaller groups are.
    step = 1 if group >= 128 else 2 if group >= 64 else 4
    stored = cdiv(cdiv(cdiv(columns, group), 8), step) * step
    zeros = _awq_zeros(model, stem, (out, stored))
    if scales.shape != (out, stored * 8):
        reason = f"scales is {list(scales.shape)}, but {[out, stored * 8]} is needed"
        raise Unfit("shape", f"{reason} for groups of {group}")
    parts = {"data": (data, stored_as(data)), "scales": (scales, stored_as(scales))} | zeros
    scheme = quantization(
        (1, group), "uint8", 4, 32, 1, zero=None if zeros else 8, packed_zeros=True,
        stored_grid=(out, stored * 8),
    )  # fmt: skip
    return Weight(f"{stem}.weight", (out, columns), scheme, parts)


def _awq_group(model: Model, columns: int, groups: int | None) -> int:
    bits_of(model.config.get("bits", model.config.get("w_bit", 4)), (4,))
    declared = model.config.get("group_size", model.config.get("q_group_size"))
    if declared is not None:
        return group_of(declared) or max(columns, 1)
    if not groups or columns % groups:
        raise Unfit("grid", f"{groups} groups do not divide {columns}")
    return max(columns // groups, 1)


def _awq_zeros(model: Model, stem: str, shape: Shape) -> dict[str, tuple[Tensor, Part]]:
    if f"{stem}.qzeros" not in model.tensors and model.config.get("zero_point") is False:
        return {}
    zeros = model.need(f"{stem}.qzeros", {"int32"})
    if zeros.shape != shape:
        raise Unfit("shape", f"qzeros is {list(zeros.shape)}, but {list(shape)} is needed")
    return {"zeros": (zeros, stored_as(zeros))}
