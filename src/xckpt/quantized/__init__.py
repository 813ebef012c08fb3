"""Quantised weights: what several stored tensors with the names of a scheme stand for.

Hugging Face's models, and those of other makers that use the same names, have quantised weights in
several tensors: codes, scales, zero points. Here an Index that has these becomes one that has the
weights, under the names and with the shapes that they have in the model without quantisation.
Whatever format the Index came from is of no account; shards are one Index already.

What cannot be read as a weight for sure stays as it is stored, with one warning for each reason.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown
from xckpt.index import Tensor
from xckpt.quantized.compressed import compressed, compressed_problem, float8_problem, full
from xckpt.quantized.floats import bitsandbytes, blocks, modelopt
from xckpt.quantized.model import FLOATS, Model, Unfit, leaf
from xckpt.quantized.words import awq_problem, gptq_problem, mlx, mlx_problem, qweight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xckpt.index import Index
    from xckpt.quantized.config import Declared
    from xckpt.quantized.model import Weight

__all__ = ["may_be_quantized", "with_weights"]

# Types that codes have, and other tensors of models hardly ever.
_CODES = frozenset(
    {"int8", "uint8", "int16", "int32", "uint32", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"}
)
# Names of what belongs to codes.
_COMPANIONS = (
    "_scale", "_scale_inv", "_scale_2", "_scales", ".scale", ".scales", "_zero_point", ".qzeros",
    ".g_idx", "_g_idx", ".absmax", "_shape", ".SCB", ".nested_absmax", "_format",
)  # fmt: skip
_NAMED = ("_packed", ".qweight", "_blocks", ".bitmask")
_STATES = (".absmax", ".quant_map")

# By method, what reads the tensors with codes, first come first; where nothing is declared, names
# and types tell. A reader is handed such a tensor, and returns None if it is not one of its own.
_READERS: dict[str | None, tuple[Callable[[Model, str, Tensor], Weight | None], ...]] = {
    None: (compressed, qweight, blocks, bitsandbytes, mlx, full, modelopt),
    "awq": (qweight,),
    "bitsandbytes": (bitsandbytes,),
    "compressed-tensors": (compressed, full),
    "fbgemm_fp8": (full,),
    "fp8": (full,),
    "gptq": (qweight,),
    "metal": (mlx,),
    "mlx": (mlx,),
    "modelopt": (full, modelopt),
    "mxfp4": (blocks,),
    "mxfp8": (full,),
}
# By method, what says what is wrong with its declaration, for all weights.
_PROBLEMS: dict[str | None, Callable[[Mapping[str, Any]], str | None]] = {
    "awq": awq_problem,
    "compressed-tensors": compressed_problem,
    "fp8": float8_problem,
    "gptq": gptq_problem,
    "metal": mlx_problem,
    "mlx": mlx_problem,
    "mxfp8": float8_problem,
}


def may_be_quantized(index: Index) -> bool:
    """Return whether any tensor has a type that codes have."""
    return any(t.dtype in _CODES and t.layout == "dense" for t in index.tensors.values())


def with_weights(
    index: Index,
    declared: Declared,
    read: Callable[[Sequence[Tensor]], Sequence[bytes]],
) -> Index:
    """Return an Index with the weights that stored tensors stand for in place of these.

    `read` returns the bytes of small tensors that say how others are to be read.
    """
    warnings = list(declared.warnings)
    reason = declared.problem
    if reason is None and declared.method in _PROBLEMS:
        reason = _PROBLEMS[declared.method](declared.config)
    if reason is not None:
        warnings.append(f"quantised tensors stay as they are stored: {reason}")
        return replace(index, warnings=(*index.warnings, *warnings))
    model = Model(index.tensors, declared, read)
    unfit: dict[str, list[tuple[str, Unfit]]] = defaultdict(list)
    weights = _weights(model, unfit)
    taken = {part.name for each in weights.values() for part, _ in each.parts.values()}
    for name, orphan in _orphans(model, taken):
        unfit[orphan.rule].append((name, orphan))
    warnings += _told(unfit)
    tensors = {}
    for name, tensor in index.tensors.items():
        if name in weights:
            of = weights[name]
            tensors[of.name] = Tensor(
                of.name,
                "float32",
                of.shape,
                {role: part for role, (_, part) in of.parts.items()},
                "quantized",
                attrs=tensor.attrs,
                quantization=of.quantization,
                strict=of.strict,
                stored={role: stored for role, (stored, _) in of.parts.items()},
            )
        elif name not in taken:
            tensors[name] = tensor
    attrs = index.attrs
    if weights:
        attrs = {**attrs, **{key: v for key, v in declared.attrs.items() if key not in attrs}}
    told = (*index.warnings, *warnings, *model.warnings)
    return replace(index, tensors=tensors, attrs=attrs, warnings=told)


def _weights(model: Model, unfit: dict[str, list[tuple[str, Unfit]]]) -> dict[str, Weight]:
    """Read weights by the names of their codes; note by reason what cannot be read."""
    weights: dict[str, Weight] = {}
    bases = {
        name.removesuffix(suffix)
        for name in model.tensors
        for suffix in _STATES
        if name.endswith(suffix)
    }
    for name, tensor in model.tensors.items():
        is_code = tensor.dtype in _CODES or name.endswith(_NAMED) or name in bases
        if not is_code or tensor.problem is not None or name.endswith(_COMPANIONS):
            continue
        try:
            weight = _weight(model, name, tensor)
            if weight is None:
                continue
            if weight.name != name and weight.name in model.tensors:
                raise Unfit("name", f"there is {leaf(weight.name)} as well")  # noqa: TRY301
            weights[name] = weight
        except Unfit as error:
            unfit[error.rule].append((name, error.with_traceback(None)))
    return weights


def _told(unfit: Mapping[str, Sequence[tuple[str, Unfit]]]) -> Iterator[str]:
    """Say of what stays as it is stored why, once for each reason."""
    for found in unfit.values():
        name, problem = found[0]
        which = f"the quantised weight {shown(name)} stays as it is stored"
        if len(found) > 1:
            which = f"{len(found)} quantised weights stay as they are stored, such as {shown(name)}"
        yield f"{which}: {problem}"


def _weight(model: Model, name: str, tensor: Tensor) -> Weight | None:
    """Read a weight by its codes, in a way that the declared method allows."""
    readers = _READERS[model.method]
    for reader in readers:
        weight = reader(model, name, tensor)
        if weight is not None:
            return weight
    if model.method is not None:
        for reader in _READERS[None]:
            if reader not in readers and reader(model, name, tensor) is not None:
                raise Unfit("method", f"it is stored in another way than by {model.method}")
    return None


def _orphans(model: Model, taken: set[str]) -> Iterator[tuple[str, Unfit]]:
    """List scales of what is not quantised."""
    for name in model.tensors:
        if name.endswith(("weight_scale", "weight_scale_inv")) and name not in taken:
            base = name.removesuffix("_inv").removesuffix("_scale")
            tensor = model.tensors.get(base)
            if f"{base}_packed" in model.tensors:
                continue
            if tensor is not None and tensor.dtype in FLOATS:
                yield base, Unfit("plain", f"it is {tensor.dtype}, and has {leaf(name)}")
