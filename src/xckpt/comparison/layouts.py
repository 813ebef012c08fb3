"""Layouts that known conversions give to tensors, by their places in the model.

===========================  =======================================================================
layout                       conversion
===========================  =======================================================================
several axes for heads       kernels of attention in Flax and Keras: inputs, heads, head width
fused by groups of heads     queries, keys and values in Megatron, GPT-NeoX, BLOOM and Falcon
fused, one after the other   ``[q; k; v]`` and ``[gate; up]`` in Phi 3, GGUF, vLLM
stacked                      experts in transformers 5 and GGUF, norms of heads in StableLM
divided per head             ``kv_b`` of DeepSeek, as ``k_b``, transposed, and ``v_b`` in GGUF
===========================  =======================================================================

A conversion consists of pieces: elements of a tensor of one side that are elements of a tensor of
the other. It follows from the slots of the tensors, sizes of the models and shapes only, and proves
nothing: `explaining` verifies each piece on every element. `division` has the layouts of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.comparison.arrangements import (
    USUAL_WIDTHS,
    Cropped,
    HalvesExchanged,
    Padded,
    Regrouped,
    Reshaped,
    Transposed,
    cropped,
    lines_along,
)
from xckpt.formatting import natural_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from xckpt.comparison.arrangements import Shape, Step
    from xckpt.structure import Structure

    Steps = tuple[Step, ...]

#: Parts of fused slots, in the order of their rows.
PARTS_OF = {
    "qkv": ("query", "key", "value"),
    "kv": ("key", "value"),
    "gate_up": ("gate", "up"),
    "kv_b": ("key_b", "value_b"),
}
_PROJECTIONS = frozenset({"query", "key", "value", "qkv"})
_OF_HEADS = _PROJECTIONS | {"output"}
_MOST_PARTS = 1 << 14
# The widest heads to try if nothing states their width.
_WIDEST_HEAD = 256


def tiled(shape: Shape, size: int) -> Steps:
    """Return the steps to square tiles, one after the other; none for other tensors.

    Incomplete tiles are filled with zeros.
    """
    if len(shape) != 2 or prod(shape) < size**2:
        return ()
    rows, columns = (-(-extent // size) for extent in shape)
    padded = (rows * size, columns * size)
    split = (rows, size, columns, size)
    tiles = (Reshaped(padded, split), Transposed((0, 2, 1, 3)))
    flat = Reshaped((rows, columns, size, size), (rows * columns, size**2))
    return (*(() if padded == shape else (Padded(shape, padded),)), *tiles, flat)


def _undo(steps: Steps) -> Steps:
    back = [step.inverse() for step in reversed(steps)]
    return tuple([step for step in back if step is not None])


def _simplified(steps: Iterable[Step]) -> Steps:
    """Return steps without neighbours that undo each other."""
    chain: list[Step] = []
    for step in steps:
        if chain and chain[-1].inverse() == step:
            chain.pop()
        elif chain and isinstance(step, Reshaped) and isinstance(chain[-1], Reshaped):
            chain[-1] = Reshaped(chain[-1].before, step.after)
        else:
            chain.append(step)
    return tuple(chain)


# --- places ---------------------------------------------------------------------------------------


class Located(NamedTuple):
    """A tensor, or a part of one, and its place in the model."""

    name: str
    shape: Shape
    slot: str
    #: "weight" or "bias".
    param: str
    numbers: tuple[int, ...]
    component: str
    #: Whether it is called a kernel, so that inputs come first.
    is_kernel: bool
    #: Axis of the outputs; None if it is unknown.
    outputs: int | None
    #: Whether fused parts alternate; None if nothing states it.
    is_interleaved: bool | None
    #: Whether shifts come before scales in the outputs of a modulation.
    is_shift_first: bool

    @property
    def role(self) -> str:
        """The last word of the slot."""
        return self.slot.rpartition(".")[2]

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        """Names a tensor within a component."""
        return self.slot, self.param, self.numbers

    @property
    def rows(self) -> int:
        """Axis of the outputs, which come first unless something states otherwise."""
        if self.param == "bias" or len(self.shape) < 2:
            return len(self.shape) - 1
        return max(len(self.shape) - 2, 0) if self.outputs is None else self.outputs


class _Catalogue:
    """Tensors of one side by their places."""

    def __init__(self, tensors: Iterable[Located]) -> None:
        self.tensors = [tensor for tensor in tensors if tensor.slot]
        self.by_key: dict[Any, list[Located]] = defaultdict(list)
        #: Numbers of the members of repeated modules, by their keys without the last number.
        self.members: dict[Any, set[int]] = defaultdict(set)
        for tensor in self.tensors:
            self.by_key[tensor.key].append(tensor)
            if tensor.numbers:
                slot, param, numbers = tensor.key
                self.members[slot, param, numbers[:-1]].add(numbers[-1])

    def at(self, field: Located, *, is_alone: bool = True) -> Located | None:
        """Return the tensor at a place; the component counts if several have it."""
        tensors = self.by_key.get(field.key, [])
        same = [tensor for tensor in tensors if tensor.component == field.component]
        if len(same) == 1:
            return same[0]
        return tensors[0] if len(tensors) == 1 and is_alone else None


def _numbered_alike(ours: Sequence[Located], theirs: Sequence[Located]) -> list[list[Located]]:
    """Return tensors of heads numbered by the order of their names if the sides count otherwise.

    Keras calls layers ``attention``, ``attention_1``, and so on.
    """
    groups: dict[Any, tuple[list[Located], list[Located]]] = defaultdict(lambda: ([], []))
    for side, tensors in enumerate((ours, theirs)):
        for tensor in tensors:
            groups[tensor.slot, tensor.param][side].append(tensor)
    sides: list[list[Located]] = [[], []]
    for group in groups.values():
        numbers = [{t.numbers for t in tensors} for tensors in group]
        is_counted = len(group[0]) == len(group[1]) and group[0][0].role in _OF_HEADS
        for tensors, numbered in zip(group, sides, strict=True):
            if is_counted and numbers[0] != numbers[1]:
                ranked = enumerate(sorted(tensors, key=lambda tensor: natural_key(tensor.name)))
                tensors = [t._replace(numbers=(n,), component="") for n, t in ranked]  # noqa: PLW2901
            numbered.extend(tensors)
    return sides


def _canonical(t: Located) -> Iterator[Steps]:
    """Yield steps to outputs before inputs, with one axis for all heads."""
    shape, ndim, is_of_heads = t.shape, len(t.shape), t.role in _OF_HEADS
    if not is_of_heads or t.slot.startswith("expert"):
        is_turned = t.param == "weight" and ndim > 1 and t.outputs == ndim - 1
        yield (Transposed((*range(ndim - 2), ndim - 1, ndim - 2)),) if is_turned else ()
        return
    if t.param == "bias":
        yield () if ndim < 2 else (Reshaped(shape, (prod(shape),)),)
    elif ndim == 2:
        yield (Transposed((1, 0)),) if t.outputs == 1 else ()
    elif ndim > 2:
        # Kernels have inputs first, and so does the output projection, whose inputs are the heads.
        last = prod(shape[1:]) if t.role in _PROJECTIONS else shape[-1]
        flat = (prod(shape) // last, last)
        if t.is_kernel or t.role == "output":
            yield (Reshaped(shape, flat), Transposed((1, 0)))
        if not t.is_kernel and t.role == "output":
            yield (Reshaped(shape, (shape[0], prod(shape[1:]))),)
        elif not t.is_kernel and ndim == 3:
            heads, inputs, width = shape
            turned = (heads, width, inputs)
            yield (Transposed((0, 2, 1)), Reshaped(turned, (heads * width, inputs)))
            yield (Reshaped(shape, (shape[0] * shape[1], shape[2])),)


def _shape_after(shape: Shape, steps: Steps) -> Shape:
    for step in steps:
        shape = step.shape(shape)
    return shape


def _fits(ours: Located, theirs: Located) -> Iterator[Steps]:
    """Yield the steps between two layouts of the same elements."""
    if prod(ours.shape) != prod(theirs.shape) or not prod(ours.shape):
        return
    for to in _canonical(ours):
        for other in _canonical(theirs):
            if _shape_after(ours.shape, to) == _shape_after(theirs.shape, other):
                yield _simplified((*to, *_undo(other)))


# --- conversions ----------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Elements of a tensor of one side that are elements of a tensor of the other."""

    whole: str
    part: str
    #: From the whole to the elements.
    steps: Steps
    #: From the part to the elements, if these are not all of it.
    of_part: Steps = ()


class Conversion(NamedTuple):
    """A way in which tensors of one side may consist of tensors of the other."""

    pieces: tuple[Piece, ...]
    #: Description of the layout, to follow "part of x,"; empty for a pair.
    words: str = ""
    #: Whether fused parts are in another order than one after the other.
    is_regrouped: bool = False
    #: Whether parts are in the order of their names; only flat parameters may differ.
    is_in_order: bool = True
    #: The layout, the same for siblings.
    key: tuple[Any, ...] = ()


class _Field(NamedTuple):
    """A part of a whole, with its place and the steps to it."""

    located: Located
    steps: Steps


class _Order(NamedTuple):
    """A hypothesis about the layout of a whole."""

    #: Axis of the outputs.
    outputs: int
    #: Groups of heads; 0 for parts one after the other.
    groups: int = 0
    #: Whether single rows of the parts alternate.
    is_alternating: bool = False


class Layouts:
    """The layouts that known conversions between two models admit.

    Parameters
    ----------
    structures : sequence of Structure
        Structures of the tensors of both sides.
    """

    def __init__(self, structures: Sequence[Structure]) -> None:
        self._structures = structures
        self._located: tuple[dict[str, Located], dict[str, Located]] = ({}, {})

    def chains(self, a: str, b: str, shapes: tuple[Shape, Shape]) -> list[Steps]:
        """Return the chains of steps from a tensor of `a` to one of `b`, the likeliest first."""
        ours, theirs = (
            self._locate(n, s, k) for k, (n, s) in enumerate(zip((a, b), shapes, strict=True))
        )
        if ours is None or theirs is None or ours.slot != theirs.slot or not ours.slot:
            return []
        if ours.param != theirs.param:
            return []
        return list(self._chains(ours, theirs))

    def pairs(
        self, ours: Mapping[str, Shape], theirs: Mapping[str, Shape]
    ) -> list[tuple[str, str, list[Steps]]]:
        """Return tensors at one place of both models, with chains of steps from `a` to `b`."""
        # The match compares sums along axes, which reshaping and regrouping change.
        sides = [self._tensors(side, shapes) for side, shapes in enumerate((ours, theirs))]
        first, second = map(_Catalogue, _numbered_alike(*sides))
        pairs = []
        for tensor in first.tensors:
            is_alone = len(first.by_key[tensor.key]) == 1
            partner = second.at(tensor, is_alone=is_alone)
            if partner is not None and (chains := list(self._chains(tensor, partner))):
                pairs.append((tensor.name, partner.name, chains))
        return pairs

    def joints(
        self, side: int, wholes: Mapping[str, Shape], parts: Mapping[str, Shape]
    ) -> dict[str, list[Conversion]]:
        """Return ways to compose tensors of a side of tensors of the other, by their names."""
        catalogue = self._catalogue(1 - side, parts)
        joints = {}
        for combined in self._catalogue(side, wholes).tensors:
            conversions = list(dict.fromkeys(self._compositions(combined, catalogue)))
            if conversions:
                joints[combined.name] = conversions
        return joints

    def fused_rows(self, side: int, name: str, shape: Shape) -> list[int]:
        """Return the extents of the fused parts of a tensor; empty if there are none."""
        located = self._locate(name, shape, side)
        if located is None or not shape or located.is_interleaved:
            return []
        extent = shape[located.rows]
        if located.role == "gate_up" and extent % 2 == 0:
            return [extent // 2] * 2
        if located.role != "qkv":
            return []
        return list(next(self._rows_of_parts(located), ()))

    # --- places ----------------------------------------------------------------------------------

    def _tensors(self, side: int, shapes: Mapping[str, Shape]) -> list[Located]:
        tensors = [self._locate(name, shape, side) for name, shape in shapes.items()]
        return [tensor for tensor in tensors if tensor is not None]

    def _catalogue(self, side: int, shapes: Mapping[str, Shape]) -> _Catalogue:
        return _Catalogue(self._tensors(side, shapes))

    def _locate(self, name: str, shape: Shape, side: int) -> Located | None:
        """Return the place of a tensor; None if the structure does not have it."""
        if name not in self._located[side]:
            structure = self._structures[side]
            if name not in structure:
                return None
            place = structure.place(name)
            param, ndim = structure.param(name), len(shape)
            is_kernel = structure.is_kernel(name)
            outputs = ndim - 1 if is_kernel and ndim else None
            self._located[side][name] = Located(
                name,
                shape,
                structure.slot(name),
                "bias" if structure.is_bias(name) or param == "bias" else "weight",
                tuple([number for _, number in structure.indices(name)]),
                structure.component(name),
                is_kernel,
                outputs if place is None else place.outputs,
                None if place is None else place.is_interleaved,
                place is not None and place.is_shift_first,
            )
        return self._located[side][name]

    def _sizes(self, component: str, *keys: str) -> list[int]:
        """Return the sizes that either model has under the first of some keys that is known."""
        stated = [structure.sizes_of(component, *keys)[:1] for structure in self._structures]
        return list(dict.fromkeys(chain.from_iterable(stated)))

    def _group_counts(self, component: str, rows: Sequence[int]) -> list[int]:
        """Return how many groups of heads queries, keys and values of these rows may have."""
        common = gcd(*rows)
        widths = self._sizes(component, "key")
        counts = self._sizes(component, "head_kv") + [common // w for w in widths]
        counts = counts or [n for n in self._sizes(component, "head") if n]
        counts = [n for n in counts if n and common % n == 0]
        if not counts:
            widths = [*USUAL_WIDTHS, *range(_WIDEST_HEAD, 1, -2)]
            counts = [common // width for width in widths if common % width == 0]
        return [n for n in dict.fromkeys(counts) if n > 1]

    # --- pairs -----------------------------------------------------------------------------------

    def _chains(self, ours: Located, theirs: Located) -> Iterator[Steps]:
        for steps in _fits(ours, theirs):
            if not steps:
                continue
            yield steps
        are_exchanged = ours.is_shift_first != theirs.is_shift_first
        if are_exchanged and ours.shape == theirs.shape and ours.shape[0] % 2 == 0:
            yield (HalvesExchanged(),)
        if ours.role == "qkv" and ours.shape == theirs.shape:
            yield from self._regroupings(ours, theirs)

    def _regroupings(self, ours: Located, theirs: Located) -> Iterator[Steps]:
        """Yield orders of fused queries, keys and values that only one side has."""
        stated = ours.is_interleaved, theirs.is_interleaved
        # Interleaved parts of `a` are taken out of their groups, and put into them if `b` has them.
        directions = [
            is_undone for is_undone in (False, True)
            if stated[is_undone] is not False and stated[not is_undone] is not True
        ]  # fmt: skip
        for rows in self._rows_of_parts(ours):
            for groups in self._group_counts(ours.component, rows):
                of_group = tuple([n // groups for n in rows])
                for is_undone in directions:
                    yield (Regrouped(ours.rows, groups, of_group, is_undone),)

    def _rows_of_parts(self, qkv: Located) -> Iterator[tuple[int, int, int]]:
        """Yield the rows that the queries, keys and values of a fused tensor may have."""
        length = qkv.shape[qkv.rows]
        heads = self._sizes(qkv.component, "head")
        groups = self._sizes(qkv.component, "head_kv") or heads
        stated = [(n, k) for n in heads for k in groups if k and n % k == 0]
        for n, k in stated:
            if length % (n + 2 * k) == 0:
                width = length // (n + 2 * k)
                yield n * width, k * width, k * width
        if not stated and length % 3 == 0:
            yield (length // 3,) * 3
        inputs = prod(qkv.shape) // length
        keys, odd = divmod(length - inputs, 2)
        if not stated and not odd and 0 < keys < inputs:
            yield inputs, keys, keys

    # --- joints ----------------------------------------------------------------------------------

    def _compositions(self, combined: Located, parts: _Catalogue) -> Iterator[Conversion]:
        for order in self._orders(combined, parts):
            field = _Field(combined._replace(outputs=order.outputs), ())
            pieces = list(self._pieces(field, parts, order))
            covered = sum([prod(_shape_after(combined.shape, piece.steps)) for piece in pieces])
            is_same = len(pieces) == 1 and not pieces[0].steps
            if len(pieces) < 2 or is_same or covered != prod(combined.shape):
                continue
            yield Conversion(
                tuple(pieces),
                self._words(combined, pieces, order),
                is_regrouped=bool(order.groups or order.is_alternating),
                key=(combined.slot, combined.param, combined.shape, order),
            )

    @staticmethod
    def _words(combined: Located, pieces: Sequence[Piece], order: _Order) -> str:
        if order.groups:
            return f"by groups of heads ({order.groups} groups)"
        if order.is_alternating:
            return "row by row"
        if combined.role == "kv_b":
            return "head by head"
        if (
            any(
                isinstance(piece.steps[0], Cropped) and piece.steps[0].after[0] == 1
                for piece in pieces
            )
            and len(combined.shape) != 2
        ):
            return "stacked"
        axis = combined._replace(outputs=order.outputs).rows
        return f"one after the other along the {lines_along(axis) if axis < 2 else 'last axis'}"

    def _orders(self, combined: Located, parts: _Catalogue) -> Iterator[_Order]:
        """Yield the hypotheses about the layout of a whole, the likeliest first."""
        ndim = len(combined.shape)
        axes = [combined.rows]
        if combined.param == "weight" and ndim == 3 and combined.slot.startswith("expert"):
            axes = list(dict.fromkeys([*axes, 1, 2]))
        for outputs in axes:
            if combined.is_interleaved is not True or combined.role not in PARTS_OF:
                yield _Order(outputs)
            if combined.role == "gate_up" and combined.is_interleaved:
                yield _Order(outputs, is_alternating=True)
            elif combined.role in {"qkv", "kv"} and combined.is_interleaved is not False:
                rows = self._rows(combined._replace(outputs=outputs), parts)
                for groups in self._group_counts(combined.component, rows) if rows else ():
                    yield _Order(outputs, groups)

    @staticmethod
    def _rows(field: Located, parts: _Catalogue) -> list[int]:
        """Return the extents of the parts of a fused tensor along its outputs; none if unknown."""
        front = field.slot.removesuffix(field.role)
        names = PARTS_OF[field.role]
        tensors = [parts.at(field._replace(slot=front + name)) for name in names]
        extent = field.shape[field.rows]
        if field.role == "kv_b":
            # k_b has heads, rank and width, and v_b heads, width and rank.
            return (
                [0 if t is None else prod(t.shape) * extent // prod(field.shape) for t in tensors]
                if all(tensors)
                else []
            )
        if not any(tensors) and field.role == "gate_up":
            return [extent // 2] * 2 if extent % 2 == 0 else []
        rows = [prod(t.shape) * extent // prod(field.shape) for t in tensors if t is not None]
        return rows if len(rows) == len(names) and sum(rows) == extent else []

    def _pieces(self, field: _Field, parts: _Catalogue, order: _Order) -> Iterator[Piece]:
        """Yield the pieces of a field; fewer than cover it if a part is missing."""
        located = field.located
        part = parts.at(located)
        if part is not None and part.shape:
            steps = next(_fits(located, part), None)
            if steps is not None:
                yield Piece(located.name, part.name, _simplified((*field.steps, *steps)))
            return
        members = self._members(located, parts)
        fields = (
            [self._member(field, n) for n in range(len(members))]
            if members
            else self._fused(field, parts, order)
        )
        for inner in fields:
            yield from self._pieces(inner, parts, order)

    @staticmethod
    def _members(located: Located, parts: _Catalogue) -> Collection[int]:
        """Return the numbers of the tensors that are stacked in a field; empty without any."""
        front = located.slot.removesuffix(located.role)
        slots = [located.slot, *[front + role for role in PARTS_OF.get(located.role, ())]]
        for slot in slots:
            numbers = parts.members.get((slot, located.param, located.numbers), ())
            count = located.shape[0] if located.shape else 0
            if len(numbers) == count <= _MOST_PARTS and numbers == set(range(count)):
                return numbers if len(located.shape) > 1 else ()
        return ()

    @staticmethod
    def _member(field: _Field, number: int) -> _Field:
        located = field.located
        shape = located.shape[1:]
        crop = cropped(located.shape, 0, number, number + 1)
        outputs = None if located.outputs is None else located.outputs - 1
        inner = located._replace(
            shape=shape, numbers=(*located.numbers, number), outputs=outputs, is_interleaved=None
        )
        return _Field(inner, (*field.steps, crop, Reshaped(crop.after, shape)))

    def _fused(self, field: _Field, parts: _Catalogue, order: _Order) -> list[_Field]:
        """Return the parts of a fused field."""
        located, axis = field.located, field.located.rows
        names = PARTS_OF.get(located.role, ())
        rows = self._rows(located, parts) if names else []
        if not rows or not all(rows):
            return []
        shape, front = located.shape, located.slot.removesuffix(located.role)
        length = shape[axis]
        if located.role == "kv_b":
            return self._heads_of_kv(field, parts, rows)
        count = order.groups or (length // len(rows) if order.is_alternating else 1)
        if any(n % count for n in rows):
            return []
        split = (*shape[:axis], count, length // count, *shape[axis + 1 :])
        fields, start = [], 0
        for name, n in zip(names, rows, strict=True):
            steps: Steps
            if count == 1:
                steps = (cropped(shape, axis, start, start + n),)
            else:
                crop = cropped(split, axis + 1, start, start + n // count)
                joined = (*shape[:axis], n, *shape[axis + 1 :])
                steps = (Reshaped(shape, split), crop, Reshaped(crop.after, joined))
            start += n // count
            inner = located._replace(
                slot=front + name,
                shape=(*shape[:axis], n, *shape[axis + 1 :]),
                is_interleaved=None,
                is_kernel=False,
            )
            fields.append(_Field(inner, (*field.steps, *steps)))
        return fields

    @staticmethod
    def _heads_of_kv(field: _Field, parts: _Catalogue, rows: Sequence[int]) -> list[_Field]:
        """Return the keys, transposed for each head, and the values of DeepSeek's `kv_b`."""
        located = field.located
        value = parts.at(located._replace(slot=located.slot.removesuffix("kv_b") + "value_b"))
        if value is None or len(located.shape) != 2 or len(value.shape) != 3:
            return []
        length, rank = located.shape
        heads = value.shape[0]
        if sum(rows) != length or any(n % heads for n in rows):
            return []
        split = (heads, length // heads, rank)
        width = rows[0] // heads
        of_keys = cropped(split, 1, 0, width)
        of_values = cropped(split, 1, width, split[1])
        front = (*field.steps, Reshaped(located.shape, split))
        slot = located.slot.removesuffix("kv_b")
        keys = located._replace(slot=slot + "key_b", shape=(heads, rank, width), outputs=None)
        values = located._replace(slot=slot + "value_b", shape=of_values.after, outputs=None)
        return [
            _Field(keys, (*front, of_keys, Transposed((0, 2, 1)))),
            _Field(values, (*front, of_values)),
        ]
