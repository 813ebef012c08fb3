"""Quantisation schemes of Hugging Face models: from stored tensors to the weights they encode.

GPTQ, AWQ and others store a quantised weight as several tensors: codes, scales, zero points.
`assemble_weights` takes the `Index` of a model, whatever its format, and replaces these tensors by
the weight that they encode, with the name and shape that it has in the model without quantisation.

The structure of the stored tensors names the codes. The room may import `structure`, `index`,
`elements` and `errors`; it reads no files. Read `model` first, which all schemes build on, then
`words` as an example of one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xckpt.errors import shown
from xckpt.index import Index, Tensor
from xckpt.quantization.compressed_tensors import compressed_problem, match_compressed
from xckpt.quantization.full_bytes import float8_problem, match_comfy, match_full_bytes
from xckpt.quantization.model import FLOATS, Declaration, LayoutError, Model, Weight, short_name
from xckpt.quantization.small_floats import (
    match_bitsandbytes,
    match_gpt_oss,
    match_modelopt,
    names_with_state,
)
from xckpt.quantization.words import (
    awq_problem,
    gptq_problem,
    match_mlx,
    match_qweight,
    mlx_problem,
)
from xckpt.structure import PARAMETERS, Role, Structure, structure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    # Weights that are left as stored: by the rule that they break, the names and errors.
    Failures = dict[str, list[tuple[str, LayoutError]]]

# Element types of codes, which other tensors of models rarely have.
_CODE_TYPES = frozenset(
    {"int8", "uint8", "int16", "int32", "uint32", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"}
)
_SHOWN_NAMES = 3

# The matchers for each declared method, in order; all of them if the model declares no method. A
# matcher takes a tensor with codes, and returns its weight, or None if the scheme is another one.
_MATCHERS: dict[str | None, tuple[Callable[[Model, str, Tensor], Weight | None], ...]] = {
    None: (
        match_compressed,
        match_qweight,
        match_gpt_oss,
        match_bitsandbytes,
        match_mlx,
        match_full_bytes,
        match_modelopt,
    ),
    "awq": (match_qweight,),
    "bitsandbytes": (match_bitsandbytes,),
    "compressed-tensors": (match_compressed, match_full_bytes),
    "fbgemm_fp8": (match_full_bytes,),
    "fp8": (match_full_bytes,),
    "gptq": (match_qweight,),
    "metal": (match_mlx,),
    "mlx": (match_mlx,),
    "modelopt": (match_full_bytes, match_modelopt),
    "mxfp4": (match_gpt_oss,),
    "mxfp8": (match_full_bytes,),
}
# By method, functions that return why a declaration is unsupported, or None.
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
    """Return whether any tensor has an element type of codes."""
    return any(t.dtype in _CODE_TYPES and t.layout == "dense" for t in index.tensors.values())


def assemble_weights(
    index: Index,
    declaration: Declaration,
    read: Callable[[Sequence[Tensor]], Sequence[bytes]],
) -> Index:
    """Return an index with each quantised weight instead of the stored tensors that encode it."""
    # A weight that cannot be decoded with certainty stays as stored, with one warning per reason.
    # `read` returns the contents of small tensors, which describe how to decode others.
    warnings = [*index.warnings, *declaration.warnings]
    problem = declaration.problem
    if problem is None and declaration.method in _PROBLEMS:
        problem = _PROBLEMS[declaration.method](declaration.config)
    if problem is not None:
        warnings.append(f"quantised weights stay as stored: {problem}")
        attrs = {**declaration.files, **index.attrs}
        return replace(index, attrs=attrs, warnings=tuple(warnings))
    model = Model(index.tensors, declaration, read, index.attrs)
    weights, failures = _find_weights(model, structure_of(index))
    used = {stored.name for weight in weights.values() for stored, _ in weight.parts.values()}
    for name, error in _orphaned_scales(model, used):
        failures[error.rule].append((name, error))
    tensors = {}
    for name, tensor in index.tensors.items():
        if name in weights:
            weight = weights[name]
            tensors[weight.name] = Tensor(
                name=weight.name,
                dtype="float32",
                shape=weight.shape,
                parts={role: part for role, (_, part) in weight.parts.items()},
                layout="quantized",
                attrs=tensor.attrs,
                # The weight has the place in the model that its codes have.
                dims=tensor.dims if tensor.shape == weight.shape else None,
                path=tensor.path if weight.name == name else None,
                declared=tensor.declared,
                quantization=weight.quantization,
                strict=weight.strict,
                stored={role: stored for role, (stored, _) in weight.parts.items()},
                method=declaration.method or "",
            )
        elif name not in used:
            tensors[name] = tensor
    is_quantized = bool(weights or declaration.config)
    attrs = {**(declaration.files if is_quantized else {}), **index.attrs}
    warnings += [*_explain(failures), *model.warnings]
    return replace(index, tensors=tensors, attrs=attrs, warnings=tuple(warnings))


def with_counts(index: Index, assembled: Index) -> Index:
    """Return an index of stored tensors whose codes declare how many elements they hold."""
    counts = {
        weight.stored["data"].name: weight.size
        for weight in assembled.tensors.values()
        if weight.stored is not None and "data" in weight.stored
    }
    tensors = {
        name: replace(tensor, declared={**(tensor.declared or {}), "elements": counts[name]})
        if name in counts
        else tensor
        for name, tensor in index.tensors.items()
    }
    return replace(index, tensors=tensors)


def _find_weights(model: Model, structure: Structure) -> tuple[dict[str, Weight], Failures]:
    """Return all weights by the names of their codes, and the weights that cannot be decoded."""
    weights: dict[str, Weight] = {}
    failures: Failures = defaultdict(list)
    with_state = names_with_state(model)
    for name, role in structure.roles.items():
        tensor = model.tensors[name]
        if role not in PARAMETERS or tensor.problem is not None:
            continue
        # In a model that declares its method, faulty codes may have any type.
        may_be_codes = role is Role.CODES or tensor.dtype in _CODE_TYPES or name in with_state
        if not may_be_codes and model.method is None:
            continue
        try:
            weight = _match(model, name, tensor)
        except LayoutError as error:
            failures[error.rule].append((name, error.with_traceback(None)))
        else:
            if weight is not None:
                weights[name] = weight
    return weights, failures


def _match(model: Model, name: str, codes: Tensor) -> Weight | None:
    """Return the weight whose codes a tensor holds, or None if it holds no codes."""
    # A statement about a layer outranks the declaration of the model.
    matchers = (match_comfy, *_MATCHERS[model.method])
    for matcher in matchers:
        weight = matcher(model, name, codes)
        if weight is not None:
            if weight.name != name and weight.name in model.tensors:
                raise LayoutError("name", f"the file also has {short_name(weight.name)}")
            return weight
    if model.method is not None:
        for matcher in _MATCHERS[None]:
            if matcher not in matchers and matcher(model, name, codes) is not None:
                raise LayoutError("method", f"its tensors do not have the layout of {model.method}")
    return None


def _orphaned_scales(model: Model, used: set[str]) -> Iterator[tuple[str, LayoutError]]:
    """Yield tensors of floats that have scales nevertheless."""
    endings = ("weight_scale", "weight_scale_inv", ".scale_weight")
    for name in model.tensors:
        if name.endswith(endings) and name not in used:
            base = name.removesuffix("_inv").removesuffix("_scale")
            if name.endswith(".scale_weight"):
                base = f"{name.removesuffix('scale_weight')}weight"
            tensor = model.tensors.get(base)
            if f"{base}_packed" in model.tensors:
                continue
            if tensor is not None and tensor.dtype in FLOATS:
                reason = f"it has {short_name(name)}, but {tensor.dtype} is not a type of codes"
                yield base, LayoutError("plain", reason)


def _explain(failures: Failures) -> Iterator[str]:
    """Yield a warning for each rule that weights break."""
    for weights in failures.values():
        names = ", ".join(shown(name) for name, _ in weights[:_SHOWN_NAMES])
        error = weights[0][1]
        if len(weights) == 1:
            yield f"quantised weight {names} stays as stored: {error}"
        else:
            yield f"{len(weights)} quantised weights stay as stored, such as {names}: {error}"
