"""Codes in full bytes (FP8 of all kinds, int8), and packed ones of compressed-tensors.

Reference: compressed-tensors 0.20 and, for streams of bits and orders of groups, 0.12; DeepSeek-V3
and transformers 5.23 for FP8 in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from xckpt.quantized.config import is_match
from xckpt.quantized.floats import small_floats
from xckpt.quantized.model import (
    FLOATS,
    Model,
    Unfit,
    Weight,
    bits_of,
    cdiv,
    check_grid,
    group_of,
    is_size,
    leaf,
    quantization,
    stored_as,
    whole_block,
    zero_points,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xckpt.index import Tensor
    from xckpt.quantized.model import Shape

_FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
_SCALES = FLOATS | {"float8_e8m0fnu", "uint8"}
# What the formats of compressed-tensors are stored as.
_PACKED = {"pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized"}
_FULL = {"int-quantized", "naive-quantized", "float-quantized", "mxfp8-quantized"}
_MIXED = {"mixed-precision", "dense", None}
# Microseconds that it takes to try parameters.
_EFFORT = 30
_MICRO = "uint8 exponents are of blocks of 32"


# --- what is declared ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Params:
    """Parameters of a scheme that modules may have; None where nothing is said."""

    bits: int | None = None
    kind: str | None = None  # of codes, "int" or "float"
    symmetric: bool | None = None  # whether there are no zero points
    strategy: str | None = None  # what has a scale: "tensor", "channel", "group" or "block"
    group: int | None = None  # how many elements along the last axis have one,
    block: tuple[int, ...] | None = None  # or along the last two
    format: str | None = None  # how codes are stored
    targets: tuple[str, ...] = ()  # modules
    problem: str | None = None  # why no module has these


def compressed_problem(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a declaration of compressed-tensors for all modules."""
    format = _text(config.get("format"))
    if format not in _PACKED | _FULL | _MIXED:
        return f"the format {format!r} is not read"
    sparsity = config.get("sparsity_config")
    sparse = _text(sparsity.get("format")) if isinstance(sparsity, dict) else None
    if sparse not in {None, "dense"}:
        return f"the format {sparse!r} is not read"
    groups = config.get("config_groups")
    if groups is not None and not isinstance(groups, dict):
        return f"'config_groups' is a {type(groups).__name__}, not an object"
    return None


def float8_problem(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a declaration of FP8 for all modules."""
    size = config.get("weight_block_size")
    wrong = size is not None and _sizes(size) is None
    return f"'weight_block_size' is {str(size)[:40]}" if wrong else None


def _sizes(value: Any) -> Shape | None:
    """Return the extents of a block."""
    if isinstance(value, str) and len(value) < 40:
        value = [int(each) for each in value.split("x") if each.isdecimal()]
    if not isinstance(value, list) or len(value) != 2:
        return None
    return tuple(value) if all(map(is_size, value)) else None


def _compressed_params(model: Model) -> list[Params]:
    """Return what the groups of compressed-tensors declare; nothing is known without any."""
    groups = model.config.get("config_groups")
    if not isinstance(groups, dict):
        groups = {}
    default = _text(model.config.get("format"))
    params = [_params_of(name, group, default) for name, group in groups.items()]
    return params or [Params(format=None if default in _MIXED else default)]


def _params_of(name: str, group: Any, default: Any) -> Params:
    if isinstance(group, list):
        # A preset by its name: what it stands for follows from the shapes.
        return Params(format=None if default in _MIXED else default, targets=_texts(group))
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return Params(problem=f"the group {name[:40]!r} does not say how weights are stored")
    targets = _texts(group.get("targets"))
    format = group.get("format") or (None if default in _MIXED else default)
    try:
        return replace(_scheme_of(weights), format=_text(format), targets=targets)
    except Unfit as error:
        return Params(problem=str(error))


def _scheme_of(weights: Mapping[str, Any]) -> Params:
    size, strategy = weights.get("group_size"), _text(weights.get("strategy"))
    block = weights.get("block_structure")
    if strategy is None and block is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = "group" if strategy == "tensor_group" else strategy or "block"
    if strategy not in {"tensor", "channel", "group", "block"}:
        raise Unfit("strategy", f"the strategy {strategy!r} is not read")
    group = group_of(size) if strategy == "group" else None
    if strategy == "group" and group is None:
        raise Unfit("group size", f"the group size is {size!r}")
    return Params(
        bits_of(weights.get("num_bits")),
        _text(weights.get("type", "int")),
        weights.get("symmetric", True) is not False,
        strategy,
        group,
        _sizes(block) if strategy == "block" else None,
    )


def _text(value: Any) -> str | None:
    """Return what should be a text, of whatever type it is."""
    return value if value is None else str(value)[:40]


def _texts(value: Any) -> tuple[str, ...]:
    return tuple([each for each in value if isinstance(each, str)]) if type(value) is list else ()


def _fitting(model: Model, module: str, fit: Callable[[Params], Weight]) -> Weight:
    """Return the weight with the only parameters that fit; else those that are for the module."""
    params = model.once(_compressed_params)
    model.spend(_EFFORT * (len(params) - 1))
    found: list[tuple[Params, Weight]] = []
    failures: list[Unfit] = []
    for each in params:
        if each.problem is not None:
            failures.append(Unfit("config", each.problem))
            continue
        try:
            weight = fit(each)
        except Unfit as error:
            failures.append(error)
            continue
        if all(weight != other for _, other in found):
            found.append((each, weight))
    if not found:
        raise failures[0]
    return found[0][1] if len(found) == 1 else _targeted(found, module)


def _targeted(found: Sequence[tuple[Params, Weight]], module: str) -> Weight:
    """Return the weight of the first group that names a module, or has a pattern for it."""
    for params, weight in found:
        if module in params.targets:
            return weight
    for params, weight in found:
        patterns = [target[3:] for target in params.targets if target.startswith("re:")]
        matches = [is_match(pattern, module) for pattern in patterns]
        if None in matches:
            break
        if True in matches:
            return weight
    raise Unfit("ambiguous", f"it fits {len(found)} groups, and their targets do not decide")


# --- codes in full bytes: FP8, integers, and pairs of them ----------------------------------------


def full(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read codes of eight bits with scales: FP8 of all kinds, int8 of compressed-tensors."""
    stem = name.removesuffix(".weight")
    names = [f"{name}_scale_inv", f"{name}_scale", *([f"{stem}.scale"] if stem != name else [])]
    found = next((each for each in names if each in model.tensors), None)
    is_compressed = model.method == "compressed-tensors"
    if data.dtype not in _FLOAT8:
        if found == f"{stem}.scale" and data.dtype == "int8":
            # Two floats in a byte, as DeepSeek-V4 has its experts.
            return small_floats(model, name, data, found, "float8_e8m0fnu", group=32)
        if data.dtype != "int8" or not (is_compressed or (model.method is None and found)):
            return None
    if found is None:
        if model.method is None:
            return None
        raise Unfit("no scale", f"there is no {leaf(names[0 if model.method == 'fp8' else 1])}")
    if not data.ndim:
        raise Unfit("shape", f"{leaf(name)} has no axes")
    scales = model.need(found, _SCALES)
    fit = partial(_full_weight, model, name, data, scales)
    if is_compressed:
        return _fitting(model, stem, fit)
    if model.method == "mxfp8":
        return fit(Params(strategy="group", group=32))
    block = _sizes(model.config.get("weight_block_size"))
    return fit(Params(block=block, strategy=None if block is None else "block"))


def _full_weight(model: Model, name: str, data: Tensor, scales: Tensor, params: Params) -> Weight:
    kind, bits = ("float", {None, 8}) if data.dtype in _FLOAT8 else ("int", {None, *range(1, 9)})
    if params.format not in _FULL | {None}:
        raise Unfit("format", f"the format {params.format} is not of codes in full bytes")
    if params.kind not in {None, kind} or params.bits not in bits:
        raise Unfit("type", f"codes are {data.dtype}, not {params.kind} of {params.bits} bits")
    micro = scales.dtype == "uint8"
    if micro and (kind != "float" or params.group not in {32, None}):
        raise Unfit("type", f"{leaf(scales.name)} is uint8: {_MICRO}")
    block = _block(data.shape, scales, replace(params, group=32) if micro else params)
    exponents = stored_as(scales, "float8_e8m0fnu" if micro else None)
    parts = {"data": stored_as(data), "scales": exponents}
    zeros = zero_points(model, f"{name}_zero_point", "int8", symmetric=params.symmetric)
    if zeros is not None:
        check_grid(data.shape, block, zeros)
        parts["zeros"] = stored_as(zeros)
    scheme = quantization(
        block,
        data.dtype,
        8,
        8,
        data.ndim - 1,
        zero=0 if zeros is None else None,
        reciprocal=model.config.get("weight_scale_semantics") == "inverse",
    )
    return Weight(name, data.shape, scheme, parts)


def _block(shape: Shape, scales: Tensor, params: Params) -> Shape:
    """Return the block that has a scale of its own."""
    lead, last = (1,) * (len(shape) - 1), max(shape[-1], 1)
    strategy = params.strategy or ("group" if params.group else None)
    if strategy == "block" and scales.shape == ():
        strategy = "tensor"
    if strategy is None:
        return _block_of_grid(shape, scales)
    if strategy == "tensor":
        block = whole_block(shape, leading=len(shape) - 2 if scales.size > 1 else 0)
    elif strategy == "block":
        if params.block is None or len(shape) < 2:
            raise Unfit("block", "the size of blocks is not a pair of positive integers")
        block = (*lead[1:], *params.block)
    else:
        block = (*lead, last if strategy == "channel" else params.group or last)
    check_grid(shape, block, scales)
    return block


def _block_of_grid(shape: Shape, scales: Tensor) -> Shape:
    """Return the block that follows from how many scales there are."""
    has = scales.shape
    if scales.size == 1:
        return whole_block(shape)
    channel = (*(1,) * (len(shape) - 1), max(shape[-1], 1))
    if has in {shape[:-1], (*shape[:-1], 1)}:
        return channel
    if len(has) == 4 and has[1] == has[3] == 1 and len(shape) == 2:
        has = (has[0], has[2])
    if len(has) == len(shape) >= 2 and has[:-2] == shape[:-2]:
        block = (*(1,) * (len(shape) - 2), 128, 128)
        if has == tuple([cdiv(*each) for each in zip(shape, block, strict=True)]):
            return block
        if all(
            count and not size % count for size, count in zip(shape[-2:], has[-2:], strict=True)
        ):
            return (*block[:-2], shape[-2] // has[-2], shape[-1] // has[-1])
    raise Unfit(
        "grid", f"{leaf(scales.name)} is {list(has)}, which no blocks of {list(shape)} have"
    )


# --- compressed-tensors --------------------------------------------------------------------------


def compressed(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read ``weight_packed`` of compressed-tensors."""
    stem = name.removesuffix("_packed")
    if stem == name:
        return None

    def fit(params: Params) -> Weight:
        if params.format not in _PACKED | {None}:
            raise Unfit("format", f"the format {params.format} is not packed")
        is_words = params.format is None and data.dtype not in {"uint8", "int8"}
        is_words = is_words or params.format == "pack-quantized"
        if params.kind not in {None, "int" if is_words else "float"}:
            raise Unfit("type", f"codes are {params.kind}, and packed in {data.dtype}")
        return (_words if is_words else _floats)(model, stem, data, params)

    return _fitting(model, stem.removesuffix(".weight"), fit)


def _floats(model: Model, name: str, data: Tensor, params: Params) -> Weight:
    """Read small floats in bytes: NVFP4, MXFP4 and MXFP6."""
    model.need(data.name, {"uint8"})
    scale, shared = f"{name}_scale", f"{name}_global_scale"
    format = params.format
    if format is None:
        format = "nvfp4-pack-quantized" if shared in model.tensors else "mxfp4-pack-quantized"
        if format[:2] == "mx" and model.need(scale, {"uint8"}).size * 24 == data.size:
            format = "mxfp6-pack-quantized"
    bits = 6 if format == "mxfp6-pack-quantized" else 4
    if params.bits not in {None, bits}:
        raise Unfit("bits", f"codes of {params.bits} bits, in the format {format}")
    if format == "nvfp4-pack-quantized":
        how: Any = {"group": params.group or 16, "shared": shared, "divides": True}
        return small_floats(model, name, data, scale, "float8_e4m3fn", **how)
    if shared in model.tensors:
        raise Unfit("global", f"there is {leaf(shared)}, which {format} has not")
    how = {"group": params.group or 32, "bits": bits}
    return small_floats(model, name, data, scale, "float8_e8m0fnu", **how)


def _words(model: Model, name: str, data: Tensor, params: Params) -> Weight:
    """Read integers in words of 32 bits, unsigned with an offset."""
    model.need(data.name, {"int32"})
    scales = model.need(f"{name}_scale", FLOATS)
    about = model.find(f"{name}_shape")
    shape = _shape_of(model, data, about, scales, params)
    bits, stream = _packing(model, shape[-1], data.shape[-1], params.bits)
    if params.strategy is None and scales.ndim == len(shape) and scales.shape[-1] > 1:
        groups = scales.shape[-1]
        if shape[-1] % groups:
            raise Unfit("grid", f"{groups} groups do not divide {shape[-1]}")
        params = replace(params, strategy="group", group=shape[-1] // groups)
    block = _block(shape, scales, params)
    parts = {"data": stored_as(data), "scales": stored_as(scales)}
    if about is not None:
        parts["shape"] = stored_as(about)
    axis = len(shape) - 1
    zeros = zero_points(model, f"{name}_zero_point", "int32", "int8", symmetric=params.symmetric)
    is_packed = zeros is not None and zeros.dtype == "int32"
    if zeros is not None:
        if is_packed:
            grid = [cdiv(size, extent) for size, extent in zip(shape, block, strict=True)]
            grid[-2] = cdiv(grid[-2] * bits, 32) if stream else cdiv(grid[-2], 32 // bits)
            if zeros.shape != tuple(grid):
                reason = f"{leaf(zeros.name)} is {list(zeros.shape)}, but {grid} is needed"
                raise Unfit("zero points", reason)
        else:
            check_grid(shape, block, zeros)
        parts["zeros"] = stored_as(zeros)
    index = model.find(f"{name}_g_idx")
    if index is not None:
        model.need(index.name, {"int32", "int64"})
        if index.shape != shape[-1:]:
            reason = f"{leaf(index.name)} has {index.size} entries for {shape[-1]} columns"
            raise Unfit("index", reason)
        parts["index"] = stored_as(index)
    scheme = quantization(
        block,
        "uint8",
        bits,
        32,
        axis,
        zero=1 << (bits - 1) if zeros is None else None,
        packed_zeros=is_packed,
        stream=stream,
        zero_axis=axis - 1 if is_packed else None,
        # Codes have an offset, which zero points of a tensor or of blocks have not.
        zero_add=1 << (bits - 1) if zeros is not None and not is_packed else 0,
        index_axis=None if index is None else axis,
    )
    return Weight(name, shape, scheme, parts)


def _shape_of(
    model: Model, data: Tensor, about: Tensor | None, scales: Tensor, params: Params
) -> Shape:
    """Return the shape of a weight, of which the words tell all but the last extent."""
    if data.ndim < 2:
        raise Unfit("shape", f"{leaf(data.name)} has {data.ndim} axes")
    if about is not None:
        shape = model.integers(about)
        shape = (*data.shape[:-2], *shape) if len(shape) == 2 else shape
    elif params.group and scales.ndim == data.ndim:
        shape = (*data.shape[:-1], scales.shape[-1] * params.group)
    else:
        raise Unfit("no shape", "there is no weight_shape")
    if len(shape) != data.ndim or shape[:-1] != data.shape[:-1]:
        raise Unfit("shape", f"the shape is {list(shape)}, but codes are {list(data.shape)}")
    return shape


def _packing(model: Model, columns: int, words: int, declared: int | None) -> tuple[int, bool]:
    """Return the bits of codes, and whether they are one stream, by the number of words."""
    fitting: dict[int, list[bool]] = {}
    for bits in range(1, 9) if declared is None else [declared]:
        for stream in (True, False):
            if words == (cdiv(columns * bits, 32) if stream else cdiv(columns, 32 // bits)):
                fitting.setdefault(bits, []).append(stream)
    if not fitting:
        needs = "" if declared is None else f", which need {cdiv(columns * declared, 32)}"
        of = "" if declared is None else f" of {declared} bits"
        raise Unfit("words", f"{words} words for {columns} codes{of}{needs}")
    if len(fitting) > 1:
        raise Unfit("words", f"{words} words for {columns} codes of {sorted(fitting)} bits")
    ((bits, ways),) = fitting.items()
    if len(ways) == 1 or not 32 % bits or columns * bits <= 32:
        return bits, ways[0]
    # Only the version tells what few columns are: 0.20 began to write streams.
    version = str(model.config.get("version", "")).split(".")[:2]
    if len(version) < 2 or not all(each.isdecimal() for each in version):
        raise Unfit("words", f"{words} words for {columns} codes of {bits} bits, in either way")
    return bits, [int(each) for each in version] >= [0, 20]
