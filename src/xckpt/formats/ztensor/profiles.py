"""Layouts of version 2 other than dense: from parts to tensors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from xckpt.errors import FormatError
from xckpt.formats.ztensor.layouts import coo, csr, first_dtype, flat, require_roles
from xckpt.formats.ztensor.quantized import check_gguf, group_quantized, microscaled
from xckpt.index import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xckpt.errors import UnsupportedError
    from xckpt.index import Layout, Part, Quantization

__all__ = ["ARRAYS", "profile", "shown_as_parts"]

_CSR, _COO = "zt.sparse_csr/1", "zt.sparse_coo/1"
_GGUF = re.compile(r"gguf\.[^/]+/1")

# What is an array even where its values cannot be decoded.
ARRAYS: Mapping[str, Layout] = {"dense": "dense", _CSR: "sparse_csr", _COO: "sparse_coo"}


def profile(layout: str) -> Callable[..., Tensor] | None:
    """Return what makes a tensor of a layout from its name, shape, parts and attributes."""
    return _opaque if _GGUF.fullmatch(layout) else _PROFILES.get(layout)


def shown_as_parts(
    name: str,
    shape: tuple[int, ...],
    parts: dict[str, Part],
    attrs: dict[str, Any],
    problem: UnsupportedError | None = None,
) -> Tensor:
    """Make a tensor that is shown as its parts."""
    flattened = {role: flat(part) for role, part in parts.items()}
    return Tensor(
        name,
        first_dtype(flattened.values()),
        shape,
        flattened,
        "structural",
        attrs=attrs,
        strict=True,
        problem=problem,
    )


def _sparse_rows(
    name: str, shape: tuple[int, ...], parts: dict[str, Part], attrs: dict[str, Any]
) -> Tensor:
    require_roles(_CSR, parts, "values", "indices", "indptr", exactly=True)
    _require_plain_indices(parts["indices"])
    if parts["indptr"].dtype != parts["indices"].dtype:
        raise FormatError("'indptr' and 'indices' differ in type", rule="LayoutRule")
    dtype = parts["values"].dtype
    return Tensor(name, dtype, shape, csr(shape, parts), "sparse_csr", attrs=attrs, strict=True)


def _sparse_coordinates(
    name: str, shape: tuple[int, ...], parts: dict[str, Part], attrs: dict[str, Any]
) -> Tensor:
    require_roles(_COO, parts, "values", "coords", exactly=True)
    _require_plain_indices(parts["coords"])
    dtype = parts["values"].dtype
    return Tensor(name, dtype, shape, coo(shape, parts), "sparse_coo", attrs=attrs, strict=True)


def _require_plain_indices(part: Part) -> None:
    if part.dtype not in {"uint32", "uint64"}:
        raise FormatError(
            f"indices of type {part.dtype}: expected u32 or u64",
            offset=part.offset,
            rule="LayoutRule",
        )


def _group_quantized(
    name: str, shape: tuple[int, ...], parts: dict[str, Part], attrs: dict[str, Any]
) -> Tensor:
    return _quantized(name, shape, parts, attrs, group_quantized(shape, parts, attrs))


def _microscaled(
    name: str, shape: tuple[int, ...], parts: dict[str, Part], attrs: dict[str, Any]
) -> Tensor:
    return _quantized(name, shape, parts, attrs, microscaled(shape, parts, attrs))


def _quantized(
    name: str,
    shape: tuple[int, ...],
    parts: dict[str, Part],
    attrs: dict[str, Any],
    pinned: tuple[dict[str, Part], Quantization] | None,
) -> Tensor:
    if pinned is None:
        return shown_as_parts(name, shape, parts, attrs)
    shaped, quantization = pinned
    return Tensor(
        name,
        "float32",
        shape,
        shaped,
        "quantized",
        attrs=attrs,
        quantization=quantization,
        strict=True,
    )


def _opaque(
    name: str, shape: tuple[int, ...], parts: dict[str, Part], attrs: dict[str, Any]
) -> Tensor:
    check_gguf(shape, parts, attrs)
    return shown_as_parts(name, shape, parts, attrs)


_PROFILES = {
    _CSR: _sparse_rows,
    _COO: _sparse_coordinates,
    "zt.quant_group/1": _group_quantized,
    "zt.mx/1": _microscaled,
}
