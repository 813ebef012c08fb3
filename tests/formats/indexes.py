"""Drafts and indexes with the bytes of their parts, by hand or by hypothesis."""

from __future__ import annotations

from dataclasses import replace
from hashlib import shake_128
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from xckpt.elements import ELEMENT_TYPES
from xckpt.formats.plan import Draft, WantedPart, WantedTensor
from xckpt.index import Codebook

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xckpt.index import Index

Data = dict[tuple[str, str], bytes]


part = WantedPart.of


def dense(
    name: str, dtype: str = "float32", shape: tuple[int, ...] = (2, 3), **more: Any
) -> WantedTensor:
    """Make a dense tensor; fields of its part are those that a `WantedPart` has."""
    fields = {key: more.pop(key) for key in ("compression", "algorithm", "inline") if key in more}
    return WantedTensor(name, dtype, shape, {"data": part(dtype, shape)._replace(**fields)}, **more)


def csr(name: str, dtype: str, shape: tuple[int, int], nonzero: int, index: str) -> WantedTensor:
    """Make rows of a sparse matrix."""
    parts = {
        "indices": part(index, (nonzero,)),
        "indptr": part(index, (shape[0] + 1,)),
        "values": part(dtype, (nonzero,)),
    }
    return WantedTensor(name, dtype, shape, parts, "sparse_csr")


def coo(name: str, dtype: str, shape: tuple[int, ...], nonzero: int, index: str) -> WantedTensor:
    """Make a list of coordinates."""
    parts = {"coords": part(index, (len(shape), nonzero)), "values": part(dtype, (nonzero,))}
    return WantedTensor(name, dtype, shape, parts, "sparse_coo")


def draft_of(*tensors: WantedTensor, **attrs: Any) -> Draft:
    """Ask for tensors, and attributes of the file."""
    return Draft({tensor.name: tensor for tensor in tensors}, attrs)


def drafted(index: Index | Draft) -> Draft:
    """Ask for what a file holds, compressed and with digests as it is."""
    if isinstance(index, Draft):
        return index
    tensors = {}
    for name, tensor in index.tensors.items():
        assert tensor.problem is None
        assert not isinstance(tensor.quantization, Codebook)  # no format has one
        parts = {}
        for role, source_part in tensor.parts.items():
            draft_part = part(
                source_part.dtype,
                source_part.shape or (),
                source_part.encoding,
                source_part.digest,
                source_part.offset,
            )
            parts[role] = draft_part._replace(
                nbytes=source_part.decoded_nbytes or source_part.nbytes, inline=source_part.inline
            )
        tensors[name] = WantedTensor(
            name,
            tensor.dtype,
            tensor.shape,
            parts,
            tensor.layout,
            tensor.order,
            tensor.attrs,
            tensor.dims,
            tensor.quantization,
            tensor.path,
        )
    return Draft(tensors, index.attrs, index.source)


def filled(index: Draft) -> Data:
    """Make bytes for all parts, which differ wherever they can."""
    return {
        (name, role): shake_128(f"{name}/{role}".encode()).digest(part.nbytes)
        for name, tensor in index.tensors.items()
        for role, part in tensor.parts.items()
    }


def plain(contents: Index | Draft) -> tuple[Any, ...]:
    """Give what files of equal content have in common, wherever their bytes are."""
    draft = drafted(contents)
    tensors = {
        name: replace(
            tensor,
            dims=tensor.dims if any(tensor.dims or ()) else None,
            parts={role: WantedPart(*part[:3]) for role, part in tensor.parts.items()},
        )
        for name, tensor in draft.tensors.items()
    }
    return tensors, dict(draft.attrs)


shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=5).map(tuple)
texts = st.text(max_size=12)
_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=5)
)
_keys = texts | st.integers(-300, 300) | st.booleans() | st.none() | st.binary(max_size=2)
values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=8,
)


def attributes(names: st.SearchStrategy[str] = texts) -> st.SearchStrategy[dict[str, Any]]:
    """Attributes of any type that CBOR has."""
    return st.dictionaries(names.filter(lambda name: name != "type"), values, max_size=3)


@st.composite
def drafts(
    draw: st.DrawFn,
    tensors: st.SearchStrategy[WantedTensor],
    attrs: st.SearchStrategy[Mapping[str, Any]],
    names: st.SearchStrategy[str] = texts,
) -> Draft:
    """Draw tensors with distinct names, some with dims."""
    chosen: Sequence[str] = draw(st.lists(names, max_size=5, unique=True))
    drafted_tensors = {}
    for name in chosen:
        tensor = draw(tensors)
        axis = st.none() | st.text(min_size=1, max_size=3)
        dims = draw(st.none() | st.tuples(*[axis] * tensor.ndim))
        drafted_tensors[name] = replace(tensor, name=name, dims=dims)
    return Draft(drafted_tensors, draw(attrs))


@st.composite
def dense_tensors(
    draw: st.DrawFn,
    /,
    dtypes: Sequence[str],
    attrs: st.SearchStrategy[dict[str, Any]],
    **strategies: st.SearchStrategy[str | None],
) -> WantedTensor:
    """Draw dense tensors; strategies for fields of their parts by name."""
    fields = {key: draw(strategy) for key, strategy in strategies.items()}
    dtype = draw(st.sampled_from(dtypes))
    return dense("", dtype, draw(shapes), attrs=draw(attrs), **fields)


@st.composite
def sparse_tensors(
    draw: st.DrawFn, dtypes: Sequence[str], index_types: Sequence[str]
) -> WantedTensor:
    """Draw sparse tensors of both layouts."""
    dtype, index = draw(st.sampled_from(dtypes)), draw(st.sampled_from(index_types))
    nonzero = draw(st.integers(0, 5))
    if draw(st.booleans()):
        return csr("", dtype, (draw(st.integers(0, 4)), draw(st.integers(0, 4))), nonzero, index)
    return coo("", dtype, draw(shapes.filter(bool)), nonzero, index)


WHOLE_BYTES = [name for name, element in ELEMENT_TYPES.items() if element.bits >= 8]
