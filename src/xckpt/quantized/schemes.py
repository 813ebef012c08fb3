"""From stored tensors with the names of a scheme to the weights that they stand for.

Names and types say which scheme it is; what is declared, or the shapes where nothing is, says with
which parameters. Shapes have to agree with all of it: numbers are never guessed. A reader is handed
the tensor with the codes, and returns a `Weight`, or None if it is not one of its own.

Reference: compressed-tensors 0.20, gptqmodel 7.7, AutoAWQ, bitsandbytes 0.50, mlx 0.32, modelopt
0.47, transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

from xckpt.index import Codebook, Quantization
from xckpt.quantized.config import Params, is_match
from xckpt.quantized.model import (
    FLOATS,
    Model,
    Unfit,
    Weight,
    cdiv,
    check_grid,
    check_shape,
    leaf,
    nbytes,
    stored_as,
    whole_block,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xckpt.index import Tensor
    from xckpt.quantized.model import Shape

__all__ = ["METHODS", "READERS", "check_config"]

_FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
_SCALES = FLOATS | {"float8_e8m0fnu", "uint8"}
# What the formats of compressed-tensors are stored as.
_PACKED = {"pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized"}
_FULL = {"int-quantized", "naive-quantized", "float-quantized", "mxfp8-quantized"}
_MIXED = {"mixed-precision", "dense", None}
_MICRO = "uint8 exponents are of blocks of 32"

quantization = lru_cache(maxsize=4096)(Quantization)


# --- what is declared ----------------------------------------------------------------------------


def check_config(method: str | None, config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a declaration for all modules."""
    if method == "compressed-tensors":
        return _compressed_problem(config)
    if method == "gptq":
        known = (None, "gptq", "gptq_v2", "gptq_p")
        format = config.get("checkpoint_format", config.get("format"))
        if format not in known or config.get("is_marlin_format") is True:
            return f"the checkpoint format {str(format)[:40]!r} is not read"
        if config.get("pack_dtype", "int32") != "int32":
            return "codes are not packed in words of 32 bits"
    if method == "awq" and config.get("version", "gemm") not in _AWQ_VERSIONS:
        return f"the version {str(config['version'])[:40]!r} is not read"
    if method in {"mlx", "metal"} and config.get("mode", "affine") not in _MLX_MODES:
        return f"the mode {str(config['mode'])[:40]!r} is not read"
    if method in {"fp8", "mxfp8"}:
        size = config.get("weight_block_size")
        if size is not None and _sizes(size) is None:
            return f"'weight_block_size' is {str(size)[:40]}"
    return None


def _compressed_problem(config: Mapping[str, Any]) -> str | None:
    format = config.get("format")
    if format not in _PACKED | _FULL | _MIXED:
        return f"the format {str(format)[:40]!r} is not read"
    sparsity = config.get("sparsity_config")
    sparse = sparsity.get("format") if isinstance(sparsity, dict) else None
    if sparse not in {None, "dense"}:
        return f"the format {str(sparse)[:40]!r} is not read"
    groups = config.get("config_groups")
    if groups is not None and not isinstance(groups, dict):
        return f"'config_groups' is a {type(groups).__name__}, not an object"
    return None


def _sizes(value: Any) -> Shape | None:
    """Return the extents of a block."""
    if isinstance(value, str) and len(value) < 40:
        value = [int(each) for each in value.split("x") if each.isdecimal()]
    if not isinstance(value, list) or len(value) != 2:
        return None
    return tuple(value) if all(type(size) is int and size > 0 for size in value) else None


def _group(value: Any) -> int | None:
    """Return the size of a group; None stands for all of an axis."""
    if value is None or (type(value) is int and (value > 0 or value == -1)):
        return None if value == -1 else value
    raise Unfit("group size", f"the group size is {str(value)[:40]!r}")


def _bits(value: Any, known: Sequence[int] = range(1, 9)) -> int:
    if type(value) is not int or value not in known:
        raise Unfit("bits", f"codes of {str(value)[:40]!r} bits are not read")
    return value


def _compressed_params(model: Model) -> list[Params]:
    """Return what the groups of compressed-tensors declare; nothing is known without any."""
    groups = model.config.get("config_groups") or {}
    default = model.config.get("format")
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
        size, strategy = weights.get("group_size"), weights.get("strategy")
        block = weights.get("block_structure")
        if strategy is None and block is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = "group" if strategy == "tensor_group" else strategy or "block"
        if strategy not in {"tensor", "channel", "group", "block"}:
            raise Unfit("strategy", f"the strategy {str(strategy)[:40]!r} is not read")
        return Params(
            _bits(weights.get("num_bits")),
            weights.get("type", "int"),
            weights.get("symmetric", True) is not False,
            strategy,
            _required_group(size) if strategy == "group" else None,
            _sizes(block) if strategy == "block" else None,
            str(format) if format is not None else None,
            targets,
        )
    except Unfit as error:
        return Params(problem=str(error))


def _required_group(value: Any) -> int:
    size = _group(value)
    if size is None:
        raise Unfit("group size", f"the group size is {value!r}")
    return size


def _texts(value: Any) -> tuple[str, ...]:
    return tuple([each for each in value if isinstance(each, str)]) if type(value) is list else ()


def _fitting(
    params: Sequence[Params], module: str, fit: Callable[[Params], Weight]
) -> Weight:
    """Return the weight with the only parameters that fit; else those that are for the module."""
    found: list[tuple[Params, Weight]] = []
    failures: list[Unfit] = []
    for each in params:
        try:
            if each.problem is not None:
                raise Unfit("config", each.problem)
            weight = fit(each)
        except Unfit as error:
            failures.append(error)
            continue
        if all(weight != other for _, other in found):
            found.append((each, weight))
    if not found:
        raise failures[0]
    if len(found) == 1:
        return found[0][1]
    for each, weight in found:
        if module in each.targets:
            return weight
    for each, weight in found:
        patterns = [target[3:] for target in each.targets if target.startswith("re:")]
        matches = [is_match(pattern, module) for pattern in patterns]
        if None in matches:
            break
        if True in matches:
            return weight
    raise Unfit("ambiguous", f"it fits {len(found)} groups, and their targets do not decide")


# --- codes in full bytes: FP8, integers, and pairs of them ----------------------------------------


def _full(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read codes of eight bits with scales: FP8 of all kinds, int8 of compressed-tensors."""
    stem = name.removesuffix(".weight")
    names = [f"{name}_scale_inv", f"{name}_scale", *([f"{stem}.scale"] if stem != name else [])]
    found = next((each for each in names if each in model.tensors), None)
    is_float = data.dtype in _FLOAT8
    if data.dtype == "int8":
        if found is None and f"{stem}.SCB" in model.tensors:
            return None
        if found == f"{stem}.scale" and model.tensors[found].dtype == "float8_e8m0fnu":
            return _pairs(model, name, data, found)
    if found is None:
        if model.method is None or (not is_float and model.method != "compressed-tensors"):
            return None
        raise Unfit("no scale", f"there is no {leaf(names[0 if model.method == 'fp8' else 1])}")
    if not is_float and not (data.dtype == "int8" and model.method in {"compressed-tensors", None}):
        return None
    scales = model.need(found, _SCALES)

    def fit(params: Params) -> Weight:
        if params.format not in _FULL | {None}:
            raise Unfit("format", f"the format {params.format} is not of codes in full bytes")
        if params.kind is not None and params.kind != ("float" if is_float else "int"):
            raise Unfit("type", f"codes are {data.dtype}, not {params.kind}")
        micro = scales.dtype == "uint8"
        if micro and (not is_float or params.group not in {32, None}):
            raise Unfit("type", f"{leaf(scales.name)} is uint8: {_MICRO}")
        block = _block(data.shape, scales, replace(params, group=32) if micro else params)
        exponents = stored_as(scales, "float8_e8m0fnu" if micro else None)
        parts = {"data": (data, stored_as(data)), "scales": (scales, exponents)}
        zeros = model.find(f"{name}_zero_point")
        symmetric = zeros is None if params.symmetric is None else params.symmetric
        if symmetric != (zeros is None):
            has = "there is no" if zeros is None else "it is symmetric, and there is"
            raise Unfit("zero points", f"{has} {leaf(name)}_zero_point")
        if zeros is not None:
            model.need(zeros.name, {"int8"})
            check_grid(data.shape, block, zeros)
            parts["zeros"] = (zeros, stored_as(zeros))
        scheme = quantization(
            block, data.dtype, 8, 8, data.ndim - 1, zero=0 if symmetric else None,
            reciprocal=model.config.get("weight_scale_semantics") == "inverse",
        )  # fmt: skip
        return Weight(name, data.shape, scheme, parts)

    if not data.ndim:
        raise Unfit("shape", f"{leaf(name)} has no axes")
    if model.method == "compressed-tensors":
        return _fitting(model.once(_compressed_params), stem, fit)
    size = model.config.get("weight_block_size")
    if model.method == "mxfp8":
        return fit(Params(strategy="group", group=32))
    block = None if size is None else _sizes(size)
    return fit(Params(block=block, strategy=None if block is None else "block"))


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
        if all(count and not size % count for size, count in zip(shape[-2:], has[-2:], strict=True)):
            return (*block[:-2], shape[-2] // has[-2], shape[-1] // has[-1])
    raise Unfit("grid", f"{leaf(scales.name)} is {list(has)}, which no blocks of {list(shape)} have")


def _pairs(model: Model, name: str, data: Tensor, scale: str) -> Weight:
    """Read bytes of two 4-bit floats each, with a power of two for 32 of them."""
    return _small_floats(model, name, name, data, scale, "float8_e8m0fnu", 32)


def _small_floats(
    model: Model,
    name: str,
    stored: str,
    data: Tensor,
    scale: str,
    dtype: str,
    group: int,
    *,
    bits: int = 4,
    shared: str | None = None,
    divides: bool = False,
) -> Weight:
    """Read packed floats of 4 or 6 bits; `shared` is the name of a factor of all scales."""
    if not data.ndim:
        raise Unfit("shape", f"{leaf(stored)} has no axes")
    scales = model.need(scale, {dtype, "uint8"})
    size = nbytes(data) * 8
    shape = (*data.shape[:-1], size // max(prod(data.shape[:-1]), 1) // bits)
    block = (*(1,) * (data.ndim - 1), group)
    check_grid(shape, block, scales)
    if prod(shape) * bits != size or shape[-1] % group:
        raise Unfit("grid", f"{leaf(stored)} is {list(data.shape)}, not whole groups of {group}")
    parts = {
        "data": (data, stored_as(data, "uint8")),
        "scales": (scales, stored_as(scales, dtype)),
    }
    if shared is not None:
        parts["global"] = _single(model, shared)
    code = "float4_e2m1fn" if bits == 4 else "float6_e2m3fn"
    scheme = quantization(
        block, code, bits, 8, data.ndim - 1, stream=bits != 4,
        global_scale=shared is not None, global_divides=divides,
    )  # fmt: skip
    return Weight(name, shape, scheme, parts)


def _single(model: Model, name: str) -> tuple[Tensor, Any]:
    tensor = model.need(name, FLOATS)
    if tensor.size != 1:
        raise Unfit("global", f"{leaf(name)} has {tensor.size} entries, not one")
    return tensor, stored_as(tensor)


# --- compressed-tensors --------------------------------------------------------------------------


def _compressed(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read ``weight_packed`` of compressed-tensors."""
    stem = name.removesuffix("_packed")
    if stem == name:
        return None
    scale, shared = f"{stem}_scale", f"{stem}_global_scale"

    def fit(params: Params) -> Weight:
        if params.format not in _PACKED | {None}:
            raise Unfit("format", f"the format {params.format} is not packed")
        is_words = params.format in {"pack-quantized", None} and data.dtype == "int32"
        if is_words or params.format == "pack-quantized":
            if params.kind not in {"int", None}:
                raise Unfit("type", f"codes are {params.kind}, in words of integers")
            return _words(model, stem, data, params)
        model.need(name, {"uint8"})
        if params.kind not in {"float", None}:
            raise Unfit("type", f"codes are {params.kind}, in bytes of floats")
        how = params.format
        if how is None:
            how = "nvfp4-pack-quantized" if shared in model.tensors else "mxfp4-pack-quantized"
        if how == "nvfp4-pack-quantized":
            return _small_floats(
                model, stem, name, data, scale, "float8_e4m3fn", params.group or 16,
                shared=shared, divides=True,
            )  # fmt: skip
        if shared in model.tensors:
            raise Unfit("global", f"there is {leaf(shared)}, which {how} has not")
        bits = 6 if how == "mxfp6-pack-quantized" else 4
        if params.format is None and model.need(scale, {"uint8"}).size * 24 == data.size:
            bits = 6
        group = params.group or 32
        return _small_floats(
            model, stem, name, data, scale, "float8_e8m0fnu", group, bits=bits
        )

    return _fitting(model.once(_compressed_params), stem.removesuffix(".weight"), fit)


def _words(model: Model, name: str, data: Tensor, params: Params) -> Weight:
    """Read integers in words of 32 bits, unsigned with an offset."""
    model.need(f"{name}_packed", {"int32"})
    scales = model.need(f"{name}_scale", FLOATS)
    if data.ndim < 2:
        raise Unfit("shape", f"{leaf(name)}_packed has {data.ndim} axes")
    about = model.find(f"{name}_shape")
    if about is not None:
        shape = model.integers(about)
        shape = (*data.shape[:-2], *shape) if len(shape) == 2 else shape
    elif params.strategy == "group" and scales.ndim == data.ndim:
        shape = (*data.shape[:-1], scales.shape[-1] * (params.group or 0))
    else:
        raise Unfit("no shape", f"there is no {leaf(name)}_shape")
    if len(shape) != data.ndim or shape[:-1] != data.shape[:-1]:
        raise Unfit("shape", f"{leaf(name)}_shape is {list(shape)}, but codes {list(data.shape)}")
    bits, stream = _packing(model, shape[-1], data.shape[-1], params.bits)
    zeros = model.find(f"{name}_zero_point")
    symmetric = zeros is None if params.symmetric is None else params.symmetric
    if symmetric != (zeros is None):
        has = "there is no" if zeros is None else "it is symmetric, and there is"
        raise Unfit("zero points", f"{has} {leaf(name)}_zero_point")
    grouped = params
    if params.strategy is None and scales.ndim == len(shape) and scales.shape[-1] > 1:
        groups = scales.shape[-1]
        if shape[-1] % groups:
            raise Unfit("grid", f"{groups} groups do not divide {shape[-1]}")
        grouped = replace(params, strategy="group", group=shape[-1] // groups)
    block = _block(shape, scales, grouped)
    parts = {"data": (data, stored_as(data)), "scales": (scales, stored_as(scales))}
    if about is not None:
        parts["shape"] = (about, stored_as(about))
    axis = len(shape) - 1
    if zeros is not None:
        model.need(zeros.name, {"int32"})
        grid = [cdiv(size, each) for size, each in zip(shape, block, strict=True)]
        grid[-2] = cdiv(grid[-2] * bits, 32) if stream else cdiv(grid[-2], 32 // bits)
        if zeros.shape != tuple(grid):
            reason = f"{leaf(zeros.name)} is {list(zeros.shape)}, but {grid} is needed"
            raise Unfit("zero points", reason)
        parts["zeros"] = (zeros, stored_as(zeros))
    index = model.find(f"{name}_g_idx")
    if index is not None:
        model.need(index.name, {"int32", "int64"})
        if index.shape != shape[-1:]:
            reason = f"{leaf(index.name)} has {index.size} entries for {shape[-1]} columns"
            raise Unfit("index", reason)
        parts["index"] = (index, stored_as(index))
    scheme = quantization(
        block, "uint8", bits, 32, axis, zero=1 << (bits - 1) if symmetric else None,
        packed_zeros=not symmetric, stream=stream, zero_axis=None if symmetric else axis - 1,
        index_axis=None if index is None else axis,
    )  # fmt: skip
    return Weight(name, shape, scheme, parts)


def _packing(model: Model, columns: int, words: int, declared: int | None) -> tuple[int, bool]:
    """Return the bits of codes, and whether they are one stream, by the number of words."""
    fitting = {}
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


# --- GPTQ and AWQ --------------------------------------------------------------------------------

_AWQ_VERSIONS = ("gemm", "gemv", "exllama", "exllamav2", "GEMM", "GEMV")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}


def _qweight(model: Model, name: str, data: Tensor) -> Weight | None:
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
    config: Mapping[str, Any] = model.config
    overrides = config.get("dynamic")
    if isinstance(overrides, dict):
        for key, changes in overrides.items():
            matched = is_match(key.removeprefix("-:").removeprefix("+:"), stem)
            if matched is None:
                raise Unfit("dynamic", f"the pattern {key[:40]!r} is not evaluated")
            if matched:
                if not key.startswith("-:") and isinstance(changes, dict):
                    config = {**config, **changes}
                break
    index, qzeros = model.find(f"{stem}.g_idx"), model.find(f"{stem}.qzeros")
    rows, out = data.shape
    bits = _gptq_bits(config, data, index, qzeros)
    columns = index.size if index is not None else rows * 32 // bits
    groups = scales.shape[0]
    size = config.get("group_size", config.get("q_group_size"))
    if "group_size" in config and size is None:
        raise Unfit("group size", "the group size is None")
    declared = _group(size)
    group = declared or max(columns, 1)
    if size is None:
        group = cdiv(columns, max(groups, 1)) or 1
        if index is None and columns % group:
            raise Unfit("grid", f"{groups} groups do not divide {columns}")
    sym, format = config.get("sym"), config.get("checkpoint_format", config.get("format"))
    planes = _PLANES.get(bits, ()) if format == "gptq_p" or bits in {5, 6, 7} else ()
    shape, axes = (out, columns), (1, 0)
    turned = {"qweight": (data, (cdiv(columns * bits, 32), out))}
    turned["scales"] = scales, (cdiv(columns, group), out)
    if qzeros is not None:
        model.need(qzeros.name, {"int32"})
        turned["qzeros"] = qzeros, (cdiv(columns, group), cdiv(out * bits, 32))
    elif sym is not True:
        raise Unfit("no qzeros", "there are no qzeros, and it is not symmetric")
    for role, (tensor, needed) in turned.items():
        if tensor.shape != needed:
            reason = f"{role} is {list(tensor.shape)}, but {list(needed)} is needed"
            raise Unfit("shape", f"{reason} for {bits} bits in groups of {group}")
    if planes and (columns % 32 or out % 32):
        raise Unfit("shape", f"{list(shape)} is not whole runs of 32 codes")
    parts = {"data": (data, stored_as(data)), "scales": (scales, stored_as(scales))}
    if qzeros is not None:
        parts["zeros"] = (qzeros, stored_as(qzeros))
    if index is not None:
        model.need(index.name, {"int32", "int64"})
        if index.ndim != 1:
            raise Unfit("index", f"g_idx is {list(index.shape)}")
        parts["index"] = (index, stored_as(index))
    scheme = quantization(
        (1, group), "uint8", bits, 32, 1, zero=1 << (bits - 1) if sym is True else None,
        packed_zeros=True, scale_axes=axes, axes=axes, stream=not planes, planes=planes,
        zero_axis=0, zero_add=0 if planes or format in {"gptq_v2", "gptq_p"} else 1,
        index_axis=None if index is None else 1,
    )  # fmt: skip
    return Weight(f"{stem}.weight", shape, scheme, parts, strict=True)


def _gptq_bits(
    config: Mapping[str, Any], data: Tensor, index: Tensor | None, qzeros: Tensor | None
) -> int:
    """Return the bits of codes, from the shapes where they are not declared."""
    if "bits" in config:
        return _bits(config["bits"], (2, 3, 4, 5, 6, 7, 8))
    rows, out = data.shape
    if index is not None and index.size and not rows * 32 % index.size:
        bits = rows * 32 // index.size
    elif index is None and qzeros is not None and qzeros.ndim == 2 and out:
        bits = qzeros.shape[1] * 32 // out
    else:
        raise Unfit("bits", "nothing says how many bits a code has")
    return _bits(bits, (2, 3, 4, 8))


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
    _bits(model.config.get("bits", model.config.get("w_bit", 4)), (4,))
    declared = model.config.get("group_size", model.config.get("q_group_size"))
    if declared is not None:
        return _group(declared) or max(columns, 1)
    if not groups or columns % groups:
        raise Unfit("grid", f"{groups} groups do not divide {columns}")
    return max(columns // groups, 1)


def _awq_zeros(model: Model, stem: str, shape: Shape) -> dict[str, tuple[Tensor, Any]]:
    if f"{stem}.qzeros" not in model.tensors and model.config.get("zero_point") is False:
        return {}
    zeros = model.need(f"{stem}.qzeros", {"int32"})
    if zeros.shape != shape:
        raise Unfit("shape", f"qzeros is {list(zeros.shape)}, but {list(shape)} is needed")
    return {"zeros": (zeros, stored_as(zeros))}


# --- bitsandbytes --------------------------------------------------------------------------------

_STATE = "quant_state.bitsandbytes__"
# 1/127 as the package has it.
_INT8_FACTOR = 7.874015718698502e-3


def _bitsandbytes(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read 4-bit codes with a table, or 8-bit integers with a scale for each row."""
    stem = name.removesuffix(".weight")
    is_known = f"{stem}.SCB" in model.tensors or model.method == "bitsandbytes"
    if data.dtype == "int8" and stem != name and is_known:
        return _int8(model, name, stem, data)
    kinds = [kind for kind in ("nf4", "fp4") if f"{name}.{_STATE}{kind}" in model.tensors]
    if not kinds and not {f"{name}.absmax", f"{name}.quant_map"} & model.tensors.keys():
        return None
    if len(kinds) != 1:
        raise Unfit("no state", f"there is no {_STATE}nf4, or more than one")
    state = model.need(f"{name}.{_STATE}{kinds[0]}", {"uint8"})
    about = model.state(state)
    if about.get("quant_type") != kinds[0]:
        reason = f"the type is {str(about.get('quant_type'))[:40]!r}, but its name says {kinds[0]}"
        raise Unfit("state", reason)
    shape = check_shape(about.get("shape"))
    count, block = prod(shape), about.get("blocksize")
    if nbytes(data) != cdiv(count, 2):
        raise Unfit("shape", f"{nbytes(data)} bytes for a shape of {list(shape)}")
    blocks = _counted(about, "blocksize", count)
    scales = model.need(f"{name}.absmax", {"float32", "uint8"})
    parts = {
        "data": (data, stored_as(data, "uint8", (nbytes(data),))),
        "scales": _list_of(scales, blocks),
        "table": _list_of(model.need(f"{name}.quant_map", {"float32"}), 16),
    }
    book = Codebook(block)
    if scales.dtype == "uint8":
        offset = about.get("nested_offset")
        if type(offset) not in {int, float} or not isfinite(offset) or abs(offset) > 3e38:
            raise Unfit("state", f"'nested_offset' is {str(offset)[:40]!r}")
        nested = _counted(about, "nested_blocksize", blocks)
        absmax = model.need(f"{name}.nested_absmax", {"float32"})
        parts["scale_scales"] = _list_of(absmax, nested)
        table = model.need(f"{name}.nested_quant_map", {"float32"})
        parts["scale_table"] = _list_of(table, 256)
        book = Codebook(block, about["nested_blocksize"], float(offset))
    parts["state"] = (state, stored_as(state))
    return Weight(name, shape, book, parts)


def _counted(about: Mapping[str, Any], key: str, count: int) -> int:
    """Return how many blocks there are."""
    size = about.get(key)
    if type(size) is not int or size <= 0:
        raise Unfit("state", f"{key!r} is {str(size)[:40]!r}")
    return cdiv(count, size)


def _list_of(tensor: Tensor, count: int) -> tuple[Tensor, Any]:
    if tensor.size != count:
        raise Unfit("count", f"{leaf(tensor.name)} has {tensor.size} entries, not {count}")
    return tensor, stored_as(tensor)


def _int8(model: Model, name: str, stem: str, data: Tensor) -> Weight:
    scales = model.need(f"{stem}.SCB", {"float32"})
    if data.ndim != 2:
        raise Unfit("shape", f"{leaf(name)} is {list(data.shape)}")
    format = model.find(f"{stem}.weight_format")
    if format is not None and any(model.content(format) or b"\1"):
        raise Unfit("order", "weight_format says that its bytes are in an order of tiles")
    block = (1, max(data.shape[1], 1))
    check_grid(data.shape, block, scales)
    parts = {"data": (data, stored_as(data)), "scales": (scales, stored_as(scales))}
    return Weight(name, data.shape, quantization(block, "int8", 8, 8, 1, factor=_INT8_FACTOR), parts)


# --- gpt-oss -------------------------------------------------------------------------------------


def _blocks(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read ``_blocks`` of gpt-oss: the transpose of what is stored."""
    stem = name.removesuffix("_blocks")
    if stem == name or (f"{stem}_scales" not in model.tensors and model.method != "mxfp4"):
        return None
    model.need(name, {"uint8"})
    scales = model.need(f"{stem}_scales", {"uint8"})
    if data.ndim < 3 or data.shape[-1] != 16:
        raise Unfit("shape", f"{leaf(name)} is {list(data.shape)}: blocks have 16 bytes")
    if scales.shape != data.shape[:-1]:
        reason = f"{leaf(scales.name)} is {list(scales.shape)}, blocks {list(data.shape)}"
        raise Unfit("grid", reason)
    *lead, rows, groups = data.shape[:-1]
    count = len(lead)
    axes = (*range(count), count + 1, count)
    scheme = quantization(
        (*(1,) * count, 32, 1), "float4_e2m1fn", 4, 8, count, scale_axes=axes, axes=axes
    )
    parts = {
        "data": (data, stored_as(data, shape=(*lead, rows, groups * 16))),
        "scales": (scales, stored_as(scales, "float8_e8m0fnu")),
    }
    return Weight(stem, (*lead, groups * 32, rows), scheme, parts)


# --- MLX -----------------------------------------------------------------------------------------

_MLX_MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
_MLX_BITS = (1, 2, 3, 4, 5, 6, 8)


def _mlx(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read words of MLX: integers with scales and biases, or small floats with scales."""
    stem = name.removesuffix(".weight")
    if data.dtype != "uint32" or stem == name or f"{stem}.scales" not in model.tensors:
        return None
    if data.ndim < 2:
        raise Unfit("shape", f"{leaf(name)} is {list(data.shape)}")
    scales = model.need(f"{stem}.scales", FLOATS | {"uint8"})
    own = model.config.get(stem)
    if own is False:
        raise Unfit("config", "it is declared as not quantised, and has scales")
    config = own if isinstance(own, dict) else model.config
    words, groups = data.shape[-1], scales.shape[-1] if scales.ndim else 0
    if model.method is None and "bits" not in config:
        mode, size, bits = _mlx_guess(model, stem, data, scales)
    else:
        mode = config.get("mode", "affine")
        if mode not in _MLX_MODES:
            raise Unfit("mode", f"the mode {str(mode)[:40]!r} is not read")
        size = config.get("group_size") or _MLX_MODES[mode][0]
        bits = _bits(config.get("bits") or _MLX_MODES[mode][1], _MLX_BITS)
    if _group(size) is None:
        raise Unfit("group size", f"the group size is {size}")
    columns = words * 32 // bits
    shape = (*data.shape[:-1], columns)
    if columns * bits != words * 32 or columns != groups * size:
        reason = f"{words} words and {groups} groups are not codes of {bits} bits in groups of"
        raise Unfit("grid", f"{reason} {size}")
    block = (*(1,) * (data.ndim - 1), size)
    check_grid(shape, block, scales)
    if f"{stem}.global_scale" in model.tensors:
        raise Unfit("global", "there is a global_scale")
    parts = {"data": (data, stored_as(data)), "scales": (scales, stored_as(scales))}
    if mode == "affine":
        if scales.dtype == "uint8":
            raise Unfit("type", "scales is uint8 in mode affine")
        bias = next((n for n in ("qbiases", "biases") if f"{stem}.{n}" in model.tensors), "biases")
        biases = model.need(f"{stem}.{bias}", FLOATS)
        check_grid(shape, block, biases)
        parts["biases"] = (biases, stored_as(biases))
        scheme = quantization(block, "uint8", bits, 32, data.ndim - 1, stream=True, biases=True)
        return Weight(name, shape, scheme, parts)
    model.need(scales.name, {"uint8"})
    if (size, bits) != _MLX_MODES[mode]:
        raise Unfit("mode", f"{mode} of {bits} bits in groups of {size} is not read")
    exponent = "float8_e4m3fn" if mode == "nvfp4" else "float8_e8m0fnu"
    parts["scales"] = (scales, stored_as(scales, exponent))
    if bits == 8:
        parts["data"] = (data, stored_as(data, "float8_e4m3fn", shape))
        scheme = quantization(block, "float8_e4m3fn", 8, 8, data.ndim - 1)
    else:
        scheme = quantization(block, "float4_e2m1fn", 4, 32, data.ndim - 1)
    return Weight(name, shape, scheme, parts)


def _mlx_guess(model: Model, stem: str, data: Tensor, scales: Tensor) -> tuple[str, int, int]:
    """Return mode, group size and bits where nothing is declared."""
    words, groups = data.shape[-1], scales.shape[-1] if scales.ndim else 0
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


# --- ModelOpt ------------------------------------------------------------------------------------


def _modelopt(model: Model, name: str, data: Tensor) -> Weight | None:
    """Read bytes of two codes each: NVFP4, or rows of integers."""
    scale = f"{name}_scale"
    if data.dtype != "uint8" or not name.endswith(".weight") or scale not in model.tensors:
        if data.dtype == "uint8" and name.endswith(".weight") and model.method == "modelopt":
            raise Unfit("no scale", f"there is no {leaf(scale)}")
        return None
    if model.tensors[scale].dtype == "float8_e4m3fn":
        shared = f"{name}_scale_2"
        return _small_floats(model, name, name, data, scale, "float8_e4m3fn", 16, shared=shared)
    if model.method != "modelopt":
        return None
    scales = model.need(scale, FLOATS)
    if data.ndim != 2 or scales.ndim != 2:
        raise Unfit("shape", f"{leaf(name)} is {list(data.shape)}")
    shape, groups = (data.shape[0] * 2, data.shape[1]), scales.shape[1]
    if not groups or shape[1] % groups:
        raise Unfit("grid", f"{groups} groups do not divide {shape[1]}")
    block = (1, max(shape[1] // groups, 1))
    check_grid(shape, block, scales)
    parts = {"data": (data, stored_as(data)), "scales": (scales, stored_as(scales))}
    shared = f"{name}_scale_2" in model.tensors
    if shared:
        parts["global"] = _single(model, f"{name}_scale_2")
    return Weight(name, shape, quantization(block, "int8", 4, 8, 0, global_scale=shared), parts)


# --- all of them ---------------------------------------------------------------------------------

#: By what a tensor with codes is: who may read it, first come first.
READERS: dict[str, Callable[[Model, str, Tensor], Weight | None]] = {
    "full": _full,
    "compressed": _compressed,
    "qweight": _qweight,
    "bitsandbytes": _bitsandbytes,
    "blocks": _blocks,
    "mlx": _mlx,
    "modelopt": _modelopt,
}
#: By method, who may read its tensors.
METHODS: dict[str | None, tuple[str, ...]] = {
    None: ("compressed", "qweight", "blocks", "bitsandbytes", "mlx", "full", "modelopt"),
    "awq": ("qweight",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed", "full"),
    "fbgemm_fp8": ("full",),
    "fp8": ("full",),
    "gptq": ("qweight",),
    "metal": ("mlx",),
    "mlx": ("mlx",),
    "modelopt": ("full", "modelopt"),
    "mxfp4": ("blocks",),
    "mxfp8": ("full",),
}
