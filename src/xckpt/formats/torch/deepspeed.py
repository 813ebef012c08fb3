"""Folders of DeepSpeed: a model whose optimizer is partitioned over ranks (ZeRO).

The folder of a step has the states of the model, and of the optimizer by rank::

    mp_rank_00_model_states.pt                    stages 1 and 2
    zero_pp_rank_<rank>_mp_rank_00_model_states.pt    stage 3
    [bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt

``param_shapes`` lists the parameters of each group, in order. A group is one flat float32 vector.
In stages 1 and 2 it has the parameters one after another, and is cut into one piece for each rank;
the end is padded to twice the number of ranks. In stage 3 each parameter is cut by itself, into
pieces of equal length, the last one padded; a rank has its pieces of all groups one after another.
The moments of an optimizer are vectors of the same layout.

The tensors are those of ``zero_to_fp32``: its float32 weights under the names of the model,
buffers, frozen parameters, and shared parameters under all of their names. Stage 1 does not list
frozen parameters, so that these come from ``module``.

Specification: deepspeed/utils/zero_to_fp32.py, deepspeed/runtime/engine.py and
deepspeed/runtime/zero of github.com/deepspeedai/DeepSpeed, 0.19.8.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import nbytes_of
from xckpt.errors import FormatError, MissingShardError, UnsupportedError, shown
from xckpt.formats import kit
from xckpt.formats.pickles.records import Call, Pairs, dict_of, key_text, sizes_of, spelled
from xckpt.formats.torch import containers
from xckpt.formats.torch.objects import ObjectWalk, mapping_of
from xckpt.formats.torch.tensors import Tensors
from xckpt.index import Index, Part, Shard, Tensor, runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xckpt.readable import Readable

    Shapes = dict[str, tuple[int, ...]]
    # The flat vectors of each rank, by group.
    Flats = Sequence[Sequence[Part]]

MODEL_STATES = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt")
_PREFIXES = ("zero", "bf16_zero", "fp16_zero")
_MOST_RANKS = 1 << 16
_MOST_MODEL_RANKS = 100
_MOST_FIELDS = 64  # of the state of an optimizer
# Entries of the states of the model that are not attributes.
_CONTENTS = {"module", "buffer_names", "param_shapes", "shared_params", "optimizer"}
_FRAGMENTS = "frozen_param_fragments"
_CONTENTS |= {"frozen_param_shapes", _FRAGMENTS}
_COMPLETE = "Copy the whole folder again, or open the file of a rank to see its own part"


class _States:
    """A file of states: its values, and its tensors."""

    def __init__(self, source: Readable, notes: kit.Notes, shard: str | None = None) -> None:
        self.source, self.shard = source, shard
        with kit.locating(path=source.name):
            content = containers.read(source, notes)
        self.version, self.value = content.version, content.value
        self.tensors = Tensors(content, notes, shard)
        self.fields = dict_of(mapping_of(content.value))

    def tensor(self, value: Any, name: str) -> Tensor | None:
        """Return a value as a tensor; None for other values."""
        self.tensors.name = name
        with kit.locating(path=self.source.name, tensor=name):
            return self.tensors.tensor(value) if type(value) is Call else None

    def flat(self, value: Any, name: str) -> Part:
        """Return a flat vector, or raise `FormatError`."""
        part = self.optional_flat(value, name)
        if part is None:
            raise self.broken(f"it is {spelled(value)}, not a vector", name, "Flat")
        return part

    def optional_flat(self, value: Any, name: str) -> Part | None:
        """Return a flat vector; None for other values."""
        tensor = self.tensor(value, name)
        if tensor is None or tensor.ndim != 1 or tensor.parts.keys() != {"data"}:
            return None
        if tensor.problem is not None:
            raise tensor.problem.located(path=self.source.name, tensor=name)
        part = tensor.parts["data"]
        if part.encoding is not None or part.strides is not None:
            reason = "a flat vector that is compressed, or has gaps, is unsupported"
            raise UnsupportedError(reason, path=self.source.name, tensor=name, rule="Flat")
        return part

    def walk(self, values: Any, path: tuple[str, ...] = ()) -> ObjectWalk:
        """Return all tensors and plain values below a value."""
        objects = ObjectWalk(self.tensors)
        with kit.locating(path=self.source.name):
            objects.walk(values, path)
        return objects

    def broken(self, reason: str, name: str, rule: str, hint: str = _COMPLETE) -> FormatError:
        """Return an error about this file; `name` is a tensor or a field."""
        return FormatError(reason, path=self.source.name, tensor=name, rule=rule, hint=hint)


def read(format: str, source: Readable) -> Index | None:
    """Read the folder with these states of a model; None if these have the whole model."""
    notes = kit.Notes()
    with notes.attached():
        return _read(format, source, notes)


def _read(format: str, source: Readable, notes: kit.Notes) -> Index | None:
    model = _States(source, notes)
    reader = _FolderReader(model, notes)
    reason = _reason_for_parts(model)
    if reason is not None:
        reader.read_parts(reason)
    elif model.fields.get("param_shapes") is None:
        return None
    else:
        reader.read_all()
    tensors, attrs, shards = reader.tensors, reader.attrs, reader.shards
    return kit.index_of(
        format, source, tensors, attrs, notes=notes, version=model.version, shards=shards
    )


def _reason_for_parts(model: _States) -> str | None:
    """Return the reason why a model can only be shown part by part; None if it is whole."""
    experts = model.fields.get("num_experts")
    count = model.fields.get("mp_world_size")
    is_tensor_parallel = type(count) is int and count > 1
    if is_tensor_parallel or kit.sibling(model.source, _of_rank(model, 1)) is not None:
        return (
            "shown part by part, because the files do not state along which axes the "
            "tensor-parallel ranks split the tensors"
        )
    if type(experts) is list and any(type(n) is int and n > 1 for n in experts):
        return "shown part by part, because experts are in files of their own"
    if "module" in model.fields and model.fields["module"] is None:
        return "shown part by part, because the layers of a pipeline are in files of their own"
    return None


def _of_rank(model: _States, number: int) -> str:
    """Return the name of the states of a model-parallel rank."""
    name = kit.file_name(model.source.name)
    return name.replace("mp_rank_00", f"mp_rank_{number:02}")


class _FolderReader:
    """A reader of the tensors and attributes of a folder."""

    def __init__(self, model: _States, notes: kit.Notes) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.attrs: dict[str, Any] = {}
        self.shards: dict[str, Shard] = {}
        self._model, self._notes = model, notes

    def _open(self, name: str, file: Readable | None = None) -> _States:
        """Read another file of the folder."""
        file = file or kit.sibling(self._model.source, name)
        if file is None:
            raise kit.missing_file(name, self._model.source, _COMPLETE, "Ranks")
        self.shards[name] = Shard(file.size, None, (name,))
        return _States(file, self._notes, name)

    def read_parts(self, reason: str) -> None:
        """List the contents of each model-parallel rank under the name of the rank."""
        self.attrs["parts"] = reason
        self._notes.add(reason, "the model")
        states, number = self._model, 0
        while True:
            objects = states.walk(states.value, (f"mp_rank_{number:02}",))
            self.tensors |= objects.tensors
            self.attrs |= objects.attrs
            number += 1
            name = _of_rank(self._model, number)
            file = kit.sibling(self._model.source, name)
            if file is None or number == _MOST_MODEL_RANKS:
                break
            states = self._open(name, file)

    def read_all(self) -> None:
        """Read the tensors of the model and the moments of its optimizer."""
        model = self._model
        is_cut = kit.file_name(model.source.name) == MODEL_STATES[0]
        ranks = self._ranks()
        states = [_optimizer_states(rank) for rank in ranks]
        key = "fp32_flat_groups" if is_cut else "single_partition_of_fp32_groups"
        flats: list[list[Part]] = []
        for rank, state in zip(ranks, states, strict=True):
            groups = state.get(key)
            if type(groups) is not list:
                raise rank.broken(f"it is {spelled(groups)}, not a list of groups", key, "Groups")
            flats.append([rank.flat(group, f"{key}.{n}") for n, group in enumerate(groups)])
            sizes, expected = ([part.shape for part in parts] for parts in (flats[-1], flats[0]))
            if len(sizes) != len(expected) or (is_cut and sizes != expected):
                reason = f"its groups have {spelled(sizes)} elements, but those of rank 0 have"
                raise rank.broken(f"{reason} {spelled(expected)}", key, "Groups")
        shapes = self._shapes()
        gaps = states[0].get("param_alignment_paddings")
        try:
            partitions = (
                Partitions.cut(shapes, flats) if is_cut else Partitions.joined(shapes, flats, gaps)
            )
        except FormatError as error:
            error.hint = _COMPLETE
            raise error.located(path=model.source.name, tensor="param_shapes") from None
        weights = partitions.tensors(flats)
        for name, tensor in weights.items():
            weights[name] = replace(tensor, declared={"parameter_of": "optimizer"})
        self._add_model(weights, len(ranks), is_cut=is_cut)
        self._add_moments(ranks, states, flats, partitions)
        others = Pairs()
        for name, value in model.fields.items():
            others += (name, value) if name not in _CONTENTS and value is not None else ()
        objects = model.walk(others)
        self.attrs |= objects.attrs
        for name, tensor in objects.tensors.items():
            self.tensors.setdefault(name, tensor)

    def _ranks(self) -> list[_States]:
        """Open the states of the optimizer on all ranks."""
        folder = self._model.source
        names = [f"{prefix}_pp_rank_0_mp_rank_00_optim_states.pt" for prefix in _PREFIXES]
        files = ((name, kit.sibling(folder, name)) for name in names)
        name, file = next(((name, file) for name, file in files if file is not None), (None, None))
        if name is None:
            reason = f"the states of the optimizer on rank 0 are missing, {names[0]} or {names[1]}"
            hint = f"{_COMPLETE}; {kit.file_name(folder.name)} has weights in fewer bits"
            raise MissingShardError(reason, path=folder.name, rule="Ranks", hint=hint)
        first = self._open(name, file)
        count = _partition_count(first)

        def of_rank(number: int) -> str:
            return name.replace("pp_rank_0", f"pp_rank_{number}")

        ranks = [first, *(self._open(of_rank(number)) for number in range(1, count))]
        for rank in ranks:
            if _partition_count(rank) != count:
                reason = f"it is one of {_partition_count(rank)} ranks, but rank 0 of {count}"
                raise rank.broken(reason, "partition_count", "Ranks")
        if kit.sibling(folder, of_rank(count)) is not None:
            reason = f"it is one of {count} ranks, but {of_rank(count)} exists"
            hint = "Move the files of other ranks away; they may be left from an earlier run"
            raise first.broken(reason, "partition_count", "Ranks", hint)
        return ranks

    def _shapes(self) -> list[Shapes]:
        """Return the shapes of the parameters of each group."""
        listed = self._model.fields["param_shapes"]
        if type(listed) is not list:
            raise self._model.broken(f"it is {spelled(listed)}", "param_shapes", "Shape")
        names: set[str] = set()
        return [self._shapes_of(value, names) for value in listed]

    def _shapes_of(self, value: Any, names: set[str]) -> Shapes:
        """Return the shapes of parameters, and add their names, which must be new."""
        shapes: Shapes = {}
        for key, size in mapping_of(value):
            name, shape = key_text(key), sizes_of(size)
            if name in names:
                raise self._model.broken("it is listed twice", name, "Name")
            if any(type(n) is not int or n < 0 for n in shape):
                raise self._model.broken(f"{spelled(size)} is not a shape", name, "Shape")
            if kit.is_oversized(shape) or len(shape) > kit.MOST_AXES:
                raise self._model.broken(f"the shape {spelled(shape)} is too large", name, "Shape")
            names.add(name)
            shapes[name] = shape
        return shapes

    # --- the model -------------------------------------------------------------------------------

    def _add_model(self, weights: dict[str, Tensor], count: int, *, is_cut: bool) -> None:
        """Add weights, buffers, frozen and shared parameters, in the order of the model."""
        model = self._model
        buffers = model.fields.get("buffer_names")
        names = {key_text(name) for name in buffers} if type(buffers) is list else set()
        weights = weights | {
            name: replace(tensor, declared={"parameter_of": "module"})
            for name, tensor in self._frozen(count, is_cut=is_cut).items()
        }
        for alias, key in mapping_of(model.fields.get("shared_params")):
            owner = weights.get(key_text(key))
            if owner is not None:
                weights[key_text(alias)] = replace(owner, name=key_text(alias))
        for key, value in mapping_of(model.fields.get("module")):
            name = key_text(key)
            tensor = weights.get(name)
            # In stage 3 the other values are empty.
            if tensor is None and (name in names or not is_cut):
                tensor = model.tensor(value, name)
                if tensor is not None and name in names:
                    tensor = replace(tensor, declared={"buffer_of": "module"})
            if tensor is not None:
                self.tensors[name] = tensor
        for name, tensor in weights.items():
            self.tensors.setdefault(name, tensor)

    def _frozen(self, count: int, *, is_cut: bool) -> dict[str, Tensor]:
        """Return the frozen parameters, in stage 3 joined from the states of all ranks."""
        model, states = self._model, [self._model]
        shapes = self._shapes_of(model.fields.get("frozen_param_shapes"), set())
        if shapes and is_cut:
            names = [MODEL_STATES[0].replace("rank_0", f"rank_{n}", 1) for n in range(1, count)]
            states += [self._open(name) for name in names]
        fragments = [
            {key_text(key): value for key, value in mapping_of(file.fields.get(_FRAGMENTS))}
            for file in states
        ]
        if not is_cut:
            tensors = {name: model.tensor(fragments[0].get(name), name) for name in shapes}
            frozen = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        else:
            frozen = {}
            for name, shape in shapes.items():
                flats = [
                    [file.flat(values.get(name), name)]
                    for file, values in zip(states, fragments, strict=True)
                ]
                length = share_of(shape, count)
                if all(part.shape == (length,) for [part] in flats):
                    frozen |= Partitions({name: Slot(shape)}, is_cut=True).tensors(flats)
        for name, shape in shapes.items():
            if name not in frozen or frozen[name].shape != shape:
                reason = f"its values do not have the shape {list(shape)} of {_FRAGMENTS}"
                raise model.broken(reason, name, "Frozen")
        return frozen

    # --- the optimizer ---------------------------------------------------------------------------

    def _add_moments(
        self,
        ranks: Sequence[_States],
        states: Sequence[dict[str, Any]],
        flats: Flats,
        partitions: Partitions,
    ) -> None:
        """Add the vectors of the optimizer that have the layout of the weights."""
        numbered = [_numbered(state) for state in states]
        groups = [[rank.get(n, {}) for n in range(len(flats[0]))] for rank in numbered]
        fields = dict.fromkeys([field for group in groups[0] for field in group])
        for field in islice(fields, _MOST_FIELDS):
            values = [[group.get(field) for group in rank] for rank in groups]
            first = values[0][0]  # of the first group of the first rank
            tensor = ranks[0].tensor(first, f"optimizer.{key_text(field)}")
            if first is not None and (tensor is None or not tensor.ndim):
                # A number for all parameters, such as the number of steps.
                objects = ranks[0].walk(first, ("optimizer", key_text(field)))
                self.tensors |= objects.tensors
                self.attrs |= objects.attrs
                continue
            moments = _moments(ranks, values, flats, key_text(field))
            if moments is None:
                reason = "left out, because it lacks the layout of the weights"
                self._notes.add(reason, f"the state {shown(key_text(field))} of the optimizer")
                continue
            self.tensors |= partitions.tensors(moments, "optimizer.state.", f".{key_text(field)}")


def _optimizer_states(rank: _States) -> dict[str, Any]:
    states = dict_of(mapping_of(rank.fields.get("optimizer_state_dict")))
    if not states:
        raise rank.broken("the file has no states of an optimizer", "optimizer_state_dict", "ZeRO")
    return states


def _partition_count(rank: _States) -> int:
    """Return the number of ranks that the groups are partitioned over."""
    count = _optimizer_states(rank).get("partition_count")
    counts = count if type(count) is list and count else [count]
    if any(type(n) is not int or not 0 < n <= _MOST_RANKS for n in counts):
        raise rank.broken(f"it is {spelled(count)}", "partition_count", "Ranks")
    if len({*counts}) > 1:
        reason = f"groups are partitioned over different numbers of ranks, {spelled(count)}"
        hint = "Convert the folder with ds_to_universal.py of DeepSpeed"
        raise UnsupportedError(
            reason, path=rank.source.name, tensor="partition_count", rule="Ranks", hint=hint
        )
    return int(counts[0] or 0)


def _numbered(states: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the state of the optimizer by the numbers of its vectors."""
    state = states.get("optimizer_state_dict", states.get("base_optimizer_state"))
    if type(state) is list:  # saved elastically
        entries: Any = enumerate(state)
    else:
        entries = mapping_of(dict_of(mapping_of(state)).get("state"))
    # Many numbers can refer to the same large mapping.
    return {
        number: dict_of(islice(mapping_of(fields), _MOST_FIELDS))
        for number, fields in entries
        if type(number) is int
    }


def _moments(
    ranks: Sequence[_States],
    values: Sequence[Sequence[Any]],
    flats: Flats,
    name: str,
) -> list[list[Part]] | None:
    """Return vectors of an optimizer by rank and group; None unless they fit the weights."""
    moments = []
    for rank, entries, parts in zip(ranks, values, flats, strict=True):
        fitted = []
        for value, part in zip(entries, parts, strict=True):
            moment, size = rank.optional_flat(value, name), size_of(part)
            # Padding at the end is stored with moments, but not with weights.
            if moment is None or size_of(moment) < size:
                return None
            nbytes = nbytes_of(moment.dtype, size)
            digest = moment.digest if size_of(moment) == size else None
            fitted.append(replace(moment, shape=(size,), nbytes=nbytes, digest=digest))
        moments.append(fitted)
    return moments


# --- partitions over ranks ------------------------------------------------------------------------


class Slot(NamedTuple):
    """The shape of a parameter, and its first element in its vector, or in each rank's vector."""

    shape: tuple[int, ...]
    group: int = 0
    start: int = 0


def share_of(shape: tuple[int, ...], count: int) -> int:
    """Return the number of elements of a parameter on each of the ranks in stage 3."""
    return -(-prod(shape) // count)


@dataclass(frozen=True, slots=True)
class Partitions:
    """The slots of parameters in the vectors; in stage 3 each parameter is cut by itself."""

    slots: Mapping[str, Slot]
    is_cut: bool

    @classmethod
    def joined(cls, shapes: Sequence[Shapes], flats: Flats, gaps: Any) -> Partitions:
        """Return the layout of stages 1 and 2; `gaps` has the padding after each parameter."""
        slots: dict[str, Slot] = {}
        if len(shapes) != len(flats[0]):
            reason = f"it has {len(shapes)} groups, but the optimizer has {len(flats[0])}"
            raise FormatError(reason, rule="Groups")
        for group, named in enumerate(shapes):
            paddings = gaps[group] if type(gaps) is list and group < len(gaps) else [0] * len(named)
            if (
                type(paddings) is not list
                or len(paddings) != len(named)
                or any(type(padding) is not int or padding < 0 for padding in paddings)
            ):
                reason = f"group {group} has {len(named)} parameters, but {spelled(paddings)} gaps"
                raise FormatError(reason, rule="Alignment")
            size, start = sum([size_of(rank[group]) for rank in flats]), 0
            for (name, shape), padding in zip(named.items(), paddings, strict=True):
                slots[name] = Slot(shape, group, start)
                end = start + prod(shape)
                _require_room(name, end, size)
                start = end + padding
            _require_size(start, size, 2 * len(flats))
        return cls(slots, is_cut=False)

    @classmethod
    def cut(cls, shapes: Sequence[Shapes], flats: Flats) -> Partitions:
        """Return the layout of stage 3; all ranks have vectors of the same lengths."""
        slots: dict[str, Slot] = {}
        size, start = sum([size_of(part) for part in flats[0]]), 0
        for named in shapes:
            for name, shape in named.items():
                slots[name] = Slot(shape, 0, start)
                start += share_of(shape, len(flats))
                _require_room(name, start, size)
        _require_size(start, size, 1)
        return cls(slots, is_cut=True)

    def tensors(self, flats: Flats, prefix: str = "", suffix: str = "") -> dict[str, Tensor]:
        """Return the parameters in vectors, under their names with a prefix and a suffix."""
        # In stage 3 a vector for each rank, otherwise for each group.
        rows = flats if self.is_cut else list(zip(*flats, strict=True))
        vectors = [_Vector(row) for row in rows]
        names = {name: f"{prefix}{name}{suffix}" for name in self.slots}
        return {
            names[name]: _tensor(names[name], slot.shape, self._pieces(vectors, slot))
            for name, slot in self.slots.items()
        }

    def _pieces(self, vectors: Sequence[_Vector], slot: Slot) -> Iterator[_Piece]:
        start, remaining = slot.start, prod(slot.shape)
        if not self.is_cut:
            yield from vectors[slot.group].pieces(start, start + remaining)
            return
        share = share_of(slot.shape, len(vectors))
        for vector in vectors:
            if remaining <= 0:
                break
            yield from vector.pieces(start, start + min(share, remaining))
            remaining -= share


class _Piece(NamedTuple):
    """A range of elements of a flat vector."""

    part: Part
    first: int
    length: int


class _Vector:
    """Flat vectors one after another."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate([size_of(part) for part in parts])]

    def pieces(self, start: int, stop: int) -> Iterator[_Piece]:
        """Return the pieces of a range, which is within the vectors."""
        vector = bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[vector + 1])
            if start < end:
                yield _Piece(self._parts[vector], start - self._starts[vector], end - start)
            start, vector = end, vector + 1


def size_of(part: Part) -> int:
    """Return the number of elements of a flat vector."""
    return prod(part.shape or ())


def _require_room(name: str, end: int, size: int) -> None:
    """Raise if a parameter ends after its flat vector."""
    if end > size:
        reason = f"it ends at element {end} of its flat vector, which has {size}"
        raise FormatError(reason, tensor=name, rule="Flat")


def _require_size(end: int, size: int, alignment: int) -> None:
    """Raise if the flat vectors do not end with the last parameter and its padding."""
    if -(-end // alignment) != -(-size // alignment):
        reason = f"the parameters take {end} elements, but the flat vectors have {size}"
        raise FormatError(reason, rule="Flat")


def _tensor(name: str, shape: tuple[int, ...], pieces: Iterator[_Piece]) -> Tensor:
    """Join the pieces of a tensor, which are ranges of its elements, as blocks of it."""
    blocks: list[Part] = []
    position = 0
    for part, first, length in pieces:
        offset = part.offset + nbytes_of(part.dtype, first)
        for key in runs_of(shape, position, position + length):
            extents = tuple([entry.stop - entry.start for entry in key])
            nbytes = nbytes_of(part.dtype, prod(extents))
            # A checksum covers the whole vector, which begins with this block.
            within = part if part.digest is not None and offset == part.offset else None
            block = replace(
                part,
                shape=extents,
                offset=offset,
                nbytes=nbytes,
                digest=None,
                within=within,
                origin=tuple([entry.start for entry in key]),
            )
            blocks.append(block)
            offset += nbytes
        position += length
    blocks = blocks or [Part("float32", shape, 0, 0)]
    dtype = blocks[0].dtype
    if any(block.dtype != dtype for block in blocks):
        problem = UnsupportedError("its pieces have several element types", rule="Dtype")
        return Tensor(name, dtype, shape, {}, problem=problem)
    if len(blocks) == 1:
        return Tensor(name, dtype, shape, {"data": replace(blocks[0], origin=None)})
    parts = {str(position): block for position, block in enumerate(blocks)}
    return Tensor(name, dtype, shape, parts, "chunked")
