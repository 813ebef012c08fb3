"""compressed-tensors: the groups of parameters that it declares, and its packed codes.

References: compressed-tensors 0.20, and 0.12 for streams of bits and orders of groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
    is_size,
    make_quantization,
    short_name,
    view_as,
    whole_block,
)
from xckpt.quantization.small_floats import small_float_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xckpt.index import Tensor
    from xckpt.quantization.model import Shape

FULL_BYTES = {"int-quantized", "naive-quantized", "float-quantized", "mxfp8-quantized"}
_PACKED = {"pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized"}
# Formats of a model that do not determine the format of its groups.
_MIXED = {"mixed-precision", "dense", None}


# --- declared parameters -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Params:
    """Parameters of quantisation for a group of modules; None if undeclared."""

    bits: int | None = None  # of a code
    kind: str | None = None  # type of the codes: "int" or "float"
    symmetric: bool | None = None  # whether codes have no zero points
    # Extent of the elements that share a scale: "tensor", "channel", "group" or "block".
    strategy: str | None = None
    group: int | None = None  # size of a group, along the last axis
    block: tuple[int, ...] | None = None  # extents of a block, along the last two axes
    format: str | None = None  # how codes are stored
    targets: tuple[str, ...] = ()  # names of modules, and patterns after "re:"
    problem: str | None = None  # reason why the parameters are unsupported


def compressed_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a declaration of compressed-tensors is unsupported, or None."""
    format = _as_text(config.get("format"))
    if format not in _PACKED | FULL_BYTES | _MIXED:
        return f"compressed-tensors format {format!r} is unsupported"
    sparsity = config.get("sparsity_config")
    sparse_format = _as_text(sparsity.get("format")) if isinstance(sparsity, dict) else None
    if sparse_format not in {None, "dense"}:
        return f"sparse format {sparse_format!r} is unsupported"
    groups = config.get("config_groups")
    if groups is not None and not isinstance(groups, dict):
        return f"'config_groups' is {groups!r:.40}, not an object"
    return None


def fit_params(model: Model, module: str, match: Callable[[Params], Weight]) -> Weight:
    """Return the weight of a module for the declared parameters that fit its tensors."""
    # If several fit with different results, the first with a target of this name decides, or else
    # the first with a pattern that matches it.

    def match_supported(params: Params) -> Weight:
        if params.problem is not None:
            raise LayoutError("config", params.problem)
        return match(params)

    fitting = model.fit(model.once(_declared_params), match_supported)
    if len(fitting) == 1:
        return fitting[0][1]
    for params, weight in fitting:
        if module in params.targets:
            return weight
    for params, weight in fitting:
        patterns = [target[3:] for target in params.targets if target.startswith("re:")]
        matches = [is_match(pattern, module) for pattern in patterns]
        if None in matches:
            break  # this pattern may decide
        if True in matches:
            return weight
    reason = f"it fits {len(fitting)} groups of the config, and their targets do not decide"
    raise LayoutError("ambiguous", reason)


def _declared_params(model: Model) -> list[Params]:
    """Return the parameters of each declared group; without groups, of the model."""
    groups = model.config.get("config_groups")
    if not isinstance(groups, dict):
        groups = {}
    format = _as_text(model.config.get("format"))
    default_format = None if format in _MIXED else format
    params = [_group_params(name, group, default_format) for name, group in groups.items()]
    return params or [Params(format=default_format)]


def _group_params(name: str, group: Any, default_format: str | None) -> Params:
    if isinstance(group, list):
        # The group has the name of a preset, whose parameters follow from shapes.
        return Params(format=default_format, targets=_strings(group))
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return Params(problem=f"the group {name[:40]!r} of the config has no parameters of weights")
    try:
        params = _weight_params(weights)
    except LayoutError as error:
        return Params(problem=str(error))
    format = _as_text(group.get("format") or default_format)
    return replace(params, format=format, targets=_strings(group.get("targets")))


def _weight_params(weights: Mapping[str, Any]) -> Params:
    size, strategy = weights.get("group_size"), _as_text(weights.get("strategy"))
    block = weights.get("block_structure")
    if strategy is None and block is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = "group" if strategy == "tensor_group" else strategy or "block"
    if strategy not in {"tensor", "channel", "group", "block"}:
        raise LayoutError("strategy", f"compressed-tensors strategy {strategy!r} is unsupported")
    group = check_group(size) if strategy == "group" else None
    if strategy == "group" and group is None:
        raise LayoutError("group size", f"the group size {size!r} is unsupported")
    return Params(
        bits=check_bits(weights.get("num_bits")),
        kind=_as_text(weights.get("type", "int")),
        symmetric=weights.get("symmetric", True) is not False,
        strategy=strategy,
        group=group,
        block=parse_block(block) if strategy == "block" else None,
    )


def parse_block(value: Any) -> Shape | None:
    """Return a pair of extents, such as ``[128, 128]`` or ``"128x128"``; None if it is not one."""
    if isinstance(value, str) and len(value) < 40:
        value = [int(extent) for extent in value.split("x") if extent.isdecimal()]
    if not isinstance(value, list) or len(value) != 2:
        return None
    return tuple(value) if all(map(is_size, value)) else None


def _as_text(value: Any) -> str | None:
    """Return a value of any type as a short string; None stays None."""
    return None if value is None else str(value)[:40]


def _strings(value: Any) -> tuple[str, ...]:
    """Return the strings in a value, if it is a list."""
    return tuple(item for item in value if isinstance(item, str)) if type(value) is list else ()


# --- blocks that share a scale -------------------------------------------------------------------


def scale_block(shape: Shape, scales: Tensor, params: Params) -> Shape:
    """Return the extents of the blocks of a weight that share a scale."""
    last = max(shape[-1], 1)
    leading = (1,) * (len(shape) - 1)
    strategy = params.strategy or ("group" if params.group else None)
    if strategy == "block" and scales.shape == ():
        strategy = "tensor"
    if strategy is None:
        return _block_from_grid(shape, scales)
    if strategy == "tensor":
        block = whole_block(shape, leading=len(shape) - 2 if scales.size > 1 else 0)
    elif strategy == "block":
        if params.block is None or len(shape) < 2:
            raise LayoutError("block", "the size of blocks is not a pair of positive integers")
        block = (*leading[1:], *params.block)
    elif strategy == "channel":
        block = (*leading, last)
    else:
        block = (*leading, params.group or last)
    check_grid(shape, block, scales)
    return block


def _block_from_grid(shape: Shape, scales: Tensor) -> Shape:
    """Derive the extents of blocks from the shape of their scales."""
    grid = scales.shape
    if scales.size == 1:
        return whole_block(shape)
    if grid in {shape[:-1], (*shape[:-1], 1)}:  # one scale per row
        return (*(1,) * (len(shape) - 1), max(shape[-1], 1))
    if len(grid) == 4 and grid[1] == grid[3] == 1 and len(shape) == 2:  # the axes of blocks, too
        grid = (grid[0], grid[2])
    if len(grid) == len(shape) >= 2 and all(grid):
        # Blocks of 128 need not divide a matrix, others do.
        tiles = (ceil_div(shape[-2], 128), ceil_div(shape[-1], 128))
        if grid == (*shape[:-2], *tiles):
            return (*(1,) * (len(shape) - 2), 128, 128)
        if not any(size % count for size, count in zip(shape, grid, strict=True)):
            return tuple(max(size // count, 1) for size, count in zip(shape, grid, strict=True))
    raise LayoutError(
        "grid",
        f"{short_name(scales.name)} has shape {list(grid)}, which does not divide "
        f"{list(shape)} into blocks",
    )


# --- packed codes --------------------------------------------------------------------------------


def match_compressed(model: Model, name: str, codes: Tensor) -> Weight | None:
    """Match ``weight_packed``: integers in words of 32 bits, or small floats in bytes."""
    stem = name.removesuffix("_packed")
    if stem == name:
        return None

    def match(params: Params) -> Weight:
        if params.format not in _PACKED | {None}:
            raise LayoutError("format", f"the format {params.format!r} has no packed codes")
        if params.format is None:
            has_integers = codes.dtype not in {"uint8", "int8"}
        else:
            has_integers = params.format == "pack-quantized"
        if params.kind not in {None, "int" if has_integers else "float"}:
            raise LayoutError(
                "type", f"{codes.dtype} cannot hold packed codes of type {params.kind!r}"
            )
        matcher = _match_integers if has_integers else _match_floats
        return matcher(model, stem, codes, params)

    return fit_params(model, stem.removesuffix(".weight"), match)


def _match_floats(model: Model, name: str, codes: Tensor, params: Params) -> Weight:
    """Match small floats in bytes: NVFP4, MXFP4 and MXFP6."""
    model.require(codes.name, {"uint8"})
    scales, global_scale = f"{name}_scale", f"{name}_global_scale"
    format = params.format
    if format is None and global_scale in model.tensors:
        format = "nvfp4-pack-quantized"
    elif format is None:
        # 32 codes of six bits are 24 bytes.
        has_six_bits = model.require(scales, {"uint8"}).size * 24 == codes.size
        format = "mxfp6-pack-quantized" if has_six_bits else "mxfp4-pack-quantized"
    bits = 6 if format == "mxfp6-pack-quantized" else 4
    if params.bits not in {None, bits}:
        raise LayoutError("bits", f"the format {format} has no codes of {params.bits} bits")
    is_nvfp4 = format == "nvfp4-pack-quantized"
    if global_scale in model.tensors and not is_nvfp4:
        raise LayoutError("global", f"the format {format} has no {short_name(global_scale)}")
    return small_float_weight(
        model,
        name,
        codes,
        scales=scales,
        scale_type="float8_e4m3fn" if is_nvfp4 else "float8_e8m0fnu",
        group=params.group or (16 if is_nvfp4 else 32),
        bits=bits,
        global_scale=global_scale if is_nvfp4 else None,
        global_divides=is_nvfp4,
    )


def _match_integers(model: Model, name: str, codes: Tensor, params: Params) -> Weight:
    """Match integers in words of 32 bits, which are unsigned with an offset."""
    model.require(codes.name, {"int32"})
    scales = model.require(f"{name}_scale", FLOATS)
    stored_shape = model.find(f"{name}_shape")
    shape = _logical_shape(model, codes, stored_shape, scales, params)
    bits, stream = _packing(model, shape[-1], codes.shape[-1], params.bits)
    offset = 1 << (bits - 1)
    if params.strategy is None and scales.ndim == len(shape) and scales.shape[-1] > 1:
        groups = scales.shape[-1]
        if shape[-1] % groups:
            raise LayoutError("grid", f"{groups} groups do not divide {shape[-1]} columns")
        params = replace(params, strategy="group", group=shape[-1] // groups)
    block = scale_block(shape, scales, params)
    parts = {"data": view_as(codes), "scales": view_as(scales)}
    if stored_shape is not None:
        parts["shape"] = view_as(stored_shape)
    axis = len(shape) - 1
    zeros = model.find_zeros(f"{name}_zero_point", "int32", "int8", symmetric=params.symmetric)
    has_packed_zeros = zeros is not None and zeros.dtype == "int32"
    if zeros is not None:
        if has_packed_zeros:
            _check_packed_grid(shape, block, zeros, bits, stream=stream)
        else:
            check_grid(shape, block, zeros)
        parts["zeros"] = view_as(zeros)
    group_index = model.find(f"{name}_g_idx")
    if group_index is not None:
        model.require(group_index.name, {"int32", "int64"})
        if group_index.shape != shape[-1:]:
            size = f"{short_name(group_index.name)} has {group_index.size} elements"
            raise LayoutError("index", f"{size} for {shape[-1]} columns")
        parts["index"] = view_as(group_index)
    quantization = make_quantization(
        block=block,
        code="uint8",
        bits=bits,
        word_bits=32,
        axis=axis,
        zero=offset if zeros is None else None,
        packed_zeros=has_packed_zeros,
        stream=stream,
        zero_axis=axis - 1 if has_packed_zeros else None,
        # Codes and packed zero points are stored with an offset, other zero points without.
        zero_add=offset if zeros is not None and not has_packed_zeros else 0,
        index_axis=None if group_index is None else axis,
    )
    return Weight(name, shape, quantization, parts)


def _logical_shape(
    model: Model, codes: Tensor, stored_shape: Tensor | None, scales: Tensor, params: Params
) -> Shape:
    """Return the shape of a weight; its codes do not determine it, because words are padded."""
    if codes.ndim < 2:
        raise LayoutError("shape", f"{short_name(codes.name)} has {codes.ndim} axes")
    if stored_shape is not None:
        shape = model.read_shape(stored_shape)
        if len(shape) == 2:  # the stored shape describes a single matrix
            shape = (*codes.shape[:-2], *shape)
    elif params.group and scales.ndim == codes.ndim:
        shape = (*codes.shape[:-1], scales.shape[-1] * params.group)
    else:
        raise LayoutError("no shape", "weight_shape is missing")
    if len(shape) != codes.ndim or shape[:-1] != codes.shape[:-1]:
        reason = f"weight_shape is {list(shape)}, but codes have shape {list(codes.shape)}"
        raise LayoutError("shape", reason)
    return shape


def _packing(model: Model, columns: int, words: int, declared: int | None) -> tuple[int, bool]:
    """Return the bits of a code, and whether codes form a stream, from the number of words."""
    fitting: dict[int, list[bool]] = {}
    for bits in range(1, 9) if declared is None else [declared]:
        for stream in (True, False):
            if words == _words_for(columns, bits, stream=stream):
                fitting.setdefault(bits, []).append(stream)
    sizes = f"{words} words for {columns} codes"
    if not fitting and declared is not None:
        needed = ceil_div(columns * declared, 32)
        raise LayoutError("words", f"{sizes} of {declared} bits, which need {needed}")
    if len(fitting) != 1:
        raise LayoutError("words", f"{sizes} do not determine the bits of a code")
    ((bits, layouts),) = fitting.items()
    if len(layouts) == 1 or not 32 % bits or columns * bits <= 32:
        return bits, layouts[0]
    # Both layouts can have the same size; version 0.20 began to write streams.
    version = str(model.config.get("version", "")).split(".")[:2]
    if len(version) < 2 or not all(number.isdecimal() for number in version):
        raise LayoutError("words", f"{sizes} of {bits} bits fit two layouts")
    return bits, [int(number) for number in version] >= [0, 20]


def _words_for(count: int, bits: int, *, stream: bool) -> int:
    """Return the number of words for codes, in a stream or without straddling words."""
    return ceil_div(count * bits, 32) if stream else ceil_div(count, 32 // bits)


def _check_packed_grid(
    shape: Shape, block: Shape, zeros: Tensor, bits: int, *, stream: bool
) -> None:
    """Raise unless packed zero points have one code for each block."""
    grid = [ceil_div(size, extent) for size, extent in zip(shape, block, strict=True)]
    grid[-2] = _words_for(grid[-2], bits, stream=stream)
    if zeros.shape != tuple(grid):
        reason = f"{short_name(zeros.name)} has shape {list(zeros.shape)}, not {grid}"
        raise LayoutError("zero points", reason)
