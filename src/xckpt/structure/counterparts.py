"""Tensors of a model by the names that they have elsewhere: in another library, format or wrapper.

An adapter names the modules that it changes as its library does. Names lead to a tensor of the
model by one of three kinds of evidence, the strongest first:

1. It has the same name.
2. It has the same name apart from what is in front of it, underscores for dots included. What is in
   front is the same for as many requested tensors as possible, so that an end that several modules
   share, such as ``layers.0.self_attn.q_proj``, leads to the one whose model has all of them.
3. It is at the same place of the family: component, slot, parameter and indices are equal.

A requested tensor that several tensors of the model fit is an error that names them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from xckpt.errors import shown, some

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from xckpt.structure.families import Place
    from xckpt.structure.families.tables import NameTable
    from xckpt.structure.model import Structure

    Position = tuple[tuple[str, int], ...]

#: Parts of a pipeline, whose models have names in common, by words for them.
PIPELINE_PARTS = {
    **dict.fromkeys(("unet", "diffusion_model", "transformer", "prior_unet"), "unet"),
    **dict.fromkeys(("text_encoder", "cond_stage_model", "clip_l"), "text_encoder"),
    **dict.fromkeys(("te", "te1", "prior_te"), "text_encoder"),
    **dict.fromkeys(("text_encoder_2", "clip_g", "te2"), "text_encoder_2"),
    **dict.fromkeys(("text_encoder_3", "t5xxl", "te3"), "text_encoder_3"),
    **dict.fromkeys(("vae", "first_stage_model"), "vae"),
}
_WORDS = PIPELINE_PARTS.keys() - {"transformer"}  # which is any module of other models
# Parts of one model whose modules have the same slots.
_INNER = frozenset({"vision", "text", "audio", "encoder", "decoder"})
# Parts of a model beside its language model.
_TOWERS = frozenset({"vision", "audio"})
# Slots that are fused in some models, with those that they consist of, in the order of their rows.
_FUSED = {
    "attention.qkv": ("attention.query", "attention.key", "attention.value"),
    "ffn.gate_up": ("ffn.gate", "ffn.up"),
    "expert.gate_up": ("expert.gate", "expert.up"),
}
# Slots with rows that rotary position embeddings turn, in the order of the library.
_TURNED = frozenset({"attention.query", "attention.key", "attention.qkv"})
_WHOLE_OF = {slot: whole for whole, slots in _FUSED.items() for slot in slots}
# Slots that hold a tensor if its own slot is empty: a tied head, and Phi-3 in GGUF.
_INSTEAD = {"output": "token_embedding", "ffn.gate_up": "ffn.up"}
# Blocks of one stage of the UNet of Stable Diffusion in single files, the downsampling included.
_USUAL_PERIOD = 3
_MOST_WORDS = 32


class Requested(NamedTuple):
    """A tensor of a model, as another file names it."""

    #: Path of the module; with underscores for dots if `is_flat`.
    path: str
    param: str = "weight"
    #: Part of a pipeline: "unet", "text_encoder_2"; empty if it is not stated.
    part: str = ""
    #: Text in front of the path that states the part.
    prefix: str = ""
    is_flat: bool = False
    #: Of the weight, in either order of axes; empty if it is unknown.
    shape: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name as it is in the file, apart from the parameter of flat names."""
        return f"{self.prefix}{self.path}" + ("" if self.is_flat else f".{self.param}")


class Counterpart(NamedTuple):
    """A tensor of the model that is the requested one, contains it, or is a part of it."""

    name: str
    #: Slot of the requested tensor, if it is fused with others in the model.
    slot: str = ""
    #: Number of this part and names of all parts, if the requested tensor is fused of them.
    split: tuple[int, tuple[str, ...]] = (0, ())
    #: Whether the requested tensor has the rows of each head in another order; None if that is
    #: unknown.
    is_permuted: bool | None = False
    #: Number of these heads; 0 if it is unknown.
    heads: int = 0
    #: Whether the halves of these heads alternate in the requested tensor, instead of the model.
    is_undone: bool = False
    #: Whether it is the embedding that the requested head is tied to.
    is_tied: bool = False
    #: Number of the expert that it is, if the requested tensor has all of them.
    expert: int | None = None
    #: Axis of the outputs of the weight; None if it is unknown.
    outputs: int | None = None
    #: Why it cannot be used.
    problem: str = ""


def part_of_pipeline(words: Iterable[str]) -> str:
    """Return the part of a pipeline that the words of a path state; empty without one."""
    words = list(words)
    if "conditioner" in words:  # Stable Diffusion XL in a single file
        return "text_encoder_2" if "1" in words[:4] else "text_encoder"
    return next((PIPELINE_PARTS[word] for word in words if word in _WORDS), "")


class _Candidate(NamedTuple):
    """A tensor with the requested name, apart from what is in front of both names."""

    name: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class _Spelling:
    """A place that a requested name may stand for, in a table of names."""

    table: str
    slot: str
    param: str
    position: Position
    inner: str
    alternates: bool | None
    #: Whether fused parts alternate.
    is_interleaved: bool
    #: Whether it is a stack of experts with inputs before outputs.
    is_in_first: bool


@dataclass
class Counterparts:
    """The tensors of a model, to be found by other names."""

    structure: Structure
    names: Collection[str]
    #: Part of a pipeline that the model is.
    part: str = ""
    #: Types of the model that the other file states.
    types: Sequence[str] = ()

    def find(self, requested: Sequence[Requested]) -> list[list[Counterpart]]:
        """Return the counterparts of each requested tensor; none if the model lacks it.

        Raises
        ------
        ValueError
            If several tensors of the model fit a requested one, or several requested ones a tensor.
        """
        by_name = self._by_names(requested)
        lists = []
        for request, candidates in zip(requested, by_name, strict=True):
            names = self._fitting(request, candidates)
            if len(names) > 1:
                raise _ambiguous(request, names)
            same = [self._same(name) for name in names]
            lists.append(same or self._by_expert(request) or self._by_place(request))
        return self._without_rivals(requested, lists)

    def is_permuted(self, name: str, requested: Requested) -> bool | None:
        """Return whether a tensor has the rows of each head in another order than a requested one.

        None if that is unknown.
        """
        place = self.structure.place(name)
        if place is None or not (place.is_rotary and place.slot in _TURNED):
            return False
        orders = [s.alternates for s in self._spellings(requested) if s.slot == place.slot]
        if not orders or place.alternates in orders:
            return False
        return None if None in {place.alternates, *orders} else True

    def part_of(self, name: str) -> str:
        """Return the part of a pipeline that a tensor of the model is in; empty if unknown."""
        stated = part_of_pipeline(name.split(".", _MOST_WORDS))
        return stated or PIPELINE_PARTS.get(self._component(name), self.part)

    def _component(self, name: str) -> str:
        place = self.structure.place(name)
        return "" if place is None else place.component

    def _same(self, name: str) -> Counterpart:
        place = self.structure.place(name)
        return Counterpart(name, outputs=None if place is None else place.outputs)

    # --- names -----------------------------------------------------------------------------------

    def _by_names(self, requested: Sequence[Requested]) -> list[list[str]]:
        """Return the names that are equal apart from what is in front of them."""
        candidates = self._candidates(requested)
        fronts = Counter(
            (request.part, c.ours, c.theirs)
            for request, of_request in zip(requested, candidates, strict=True)
            for c in set(of_request)
        )
        chosen = []
        for request, of_request in zip(requested, candidates, strict=True):
            counts = {c: fronts[request.part, c.ours, c.theirs] for c in of_request}
            most = max(counts.values(), default=0)
            exact = {c.name: 0 for c in counts if c.name == request.name}
            chosen.append(list(exact) or list({c.name: 0 for c, n in counts.items() if n == most}))
        return chosen

    def _candidates(self, requested: Sequence[Requested]) -> list[list[_Candidate]]:
        by_tail: dict[str, list[int]] = {}
        by_flat_tail: dict[str, list[int]] = {}
        candidates: list[list[_Candidate]] = [[] for _ in requested]
        for number, request in enumerate(requested):
            tails = by_flat_tail if request.is_flat else by_tail
            path = request.path if request.is_flat else f"{request.path}.{request.param}"
            tails.setdefault(path, []).append(number)
            if request.name != path and not request.is_flat:
                tails.setdefault(request.name, []).append(number)
            # Wrappers that only the requested name has; one word proves too little.
            shortened = [path[n:] for n in _starts(path) if n and not request.is_flat]
            candidates[number] += [
                _Candidate(end, "", path.removesuffix(end))
                for end in shortened
                if end.count(".") > 1 and end in self.names and self._agree(request, end)
            ]
        for name in self.names:
            flat = name.removesuffix(".weight").replace(".", "_")
            for start in _starts(name):
                numbers = by_tail.get(name[start:], ()), by_flat_tail.get(flat[start:], ())
                for number in (*numbers[0], *numbers[1]):
                    if self._agree(requested[number], name):
                        candidates[number].append(_Candidate(name, name[:start], ""))
        return candidates

    def _agree(self, request: Requested, name: str, inner: str = "") -> bool:
        """Return whether a tensor may be in the part of the model that is requested."""
        component, part = self._component(name), self.part_of(name)
        if request.part and part and request.part != part:
            return False
        if request.part and component == "vision" and request.part.startswith("text"):
            return False
        stated = _stated_component(request.path)
        if stated and component != stated and {stated, component} & _TOWERS:
            return False
        return not inner or component not in _INNER or inner == component

    def _fitting(self, request: Requested, names: list[str]) -> list[str]:
        """Return the names whose tensors have the requested shape, if there is a choice."""
        if len(names) < 2 or not request.shape:
            return names
        return [n for n in names if self._has_shape(request, n)] or names

    def _has_shape(self, request: Requested, name: str) -> bool:
        shape = tuple(self.structure.described(name).shape)
        return sorted(shape) == sorted(request.shape)

    def _without_rivals(
        self, requested: Sequence[Requested], lists: list[list[Counterpart]]
    ) -> list[list[Counterpart]]:
        """Leave one requested tensor for each tensor of the model."""
        rivals: dict[tuple[str, str, bool], list[int]] = {}
        for number, counterparts in enumerate(lists):
            for c in counterparts:
                rivals.setdefault((c.name, c.slot, c.is_tied), []).append(number)
        for (name, *_), numbers in rivals.items():
            if len(numbers) < 2:
                continue
            best = [n for n in numbers if requested[n].name == name]
            best = best or [n for n in numbers if self._has_shape(requested[n], name)]
            if len(best) != 1:
                texts = [requested[n].name for n in best or numbers]
                raise ValueError(
                    f"the model has one tensor {shown(name)} for {some(texts, 'modules')}; pass "
                    "the whole model, or the folder of the component that is meant"
                )
            for number in set(numbers) - set(best):
                lists[number] = []
        return lists

    # --- places ----------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> Mapping[tuple[str, str, Position], list[tuple[str, Place]]]:
        places: dict[tuple[str, str, Position], list[tuple[str, Place]]] = {}
        for name in self.names:
            place = self.structure.place(name)
            if place is not None and place.slot and not place.is_alias:
                key = self._key(place.table, place.slot, place.param, place.indices)
                places.setdefault(key, []).append((name, place))
        return places

    @cached_property
    def _tables(self) -> Sequence[NameTable]:
        return self.structure.tables

    @cached_property
    def _period(self) -> int:
        """Number of the blocks of a stage of the UNet, with its downsampling."""
        blocks = [dict(p.indices) for n in self.names if (p := self.structure.place(n)) is not None
                  and p.slot in {"down.downsample", "down.residual.conv1"}
                  and (p.table == "ldm_unet") == (p.slot == "down.downsample")]  # fmt: skip
        single = [numbers["block"] for numbers in blocks if "part" in numbers]
        of_stage = {n["block"] for n in blocks if n.get("stage") == 0 and "block" in n}
        return min(single, default=len(of_stage) + 1 if of_stage else _USUAL_PERIOD) or 1

    def _key(
        self, table: str, slot: str, param: str, indices: Position
    ) -> tuple[str, str, Position]:
        if table == "ldm_unet" and indices:
            indices = _in_stages(slot, dict(indices), self._period)
        return slot, param, indices

    def _by_place(self, request: Requested) -> list[Counterpart]:
        """Return the counterparts at the requested place."""
        counterparts: dict[str, Counterpart] = {}
        parts: tuple[str, ...] = ()
        for spelling in dict.fromkeys(self._spellings(request)):
            slots = _FUSED.get(spelling.slot, ())
            members = [self._at(request, spelling, slot) for slot in slots]
            if members and all(len(member) == 1 for member in members):
                names = [member[0][0] for member in members]
                if not parts:
                    counterparts |= {
                        name: self._counterpart(spelling, *member[0])._replace(
                            split=(number, tuple(names))
                        )
                        for number, (name, member) in enumerate(zip(names, members, strict=True))
                    }
                parts = tuple(names)
            for slot in (spelling.slot, _WHOLE_OF.get(spelling.slot)):
                for name, place in self._at(request, spelling, slot):
                    counterpart = self._counterpart(spelling, name, place)
                    counterparts.setdefault(name, counterpart)
            if not counterparts:
                for name, place in self._at(request, spelling, self._instead_of(spelling.slot)):
                    counterparts[name] = self._counterpart(spelling, name, place)
        if len(parts) == len(counterparts):
            return list(counterparts.values())
        names = self._fitting(request, list(counterparts))
        if len(names) > 1:
            raise _ambiguous(request, names)
        return [counterparts[name] for name in names]

    def _by_expert(self, request: Requested) -> list[Counterpart]:
        """Return the tensors of the experts that a requested tensor has along its first axis."""
        for spelling in dict.fromkeys(self._spellings(request) if len(request.shape) == 3 else ()):
            counterparts = self._experts(request, spelling)
            if counterparts:
                count, requested = len(counterparts), request.shape[0]
                if count == requested:
                    return list(chain.from_iterable(counterparts))
                more = "more than " if count > requested else ""
                problem = (
                    f"{shown(request.name)} has {requested:,} experts in the adapter, and "
                    f"{more}{min(count, requested):,} in the model"
                )
                return [counterparts[0][0]._replace(problem=problem)]
        return []

    def _experts(self, request: Requested, spelling: _Spelling) -> list[list[Counterpart]]:
        """Return the counterparts of the experts, of at most one more than are requested."""
        experts: list[list[Counterpart]] = []
        is_stack = spelling.slot.startswith("expert.")
        slots = _FUSED.get(spelling.slot, (spelling.slot,)) if is_stack else ()
        while slots and len(experts) <= request.shape[0]:
            index = ("expert", len(experts))
            at_expert = replace(spelling, position=(*spelling.position, index))
            members = [self._at(request, at_expert, slot) for slot in slots]
            if any(len(member) != 1 for member in members):
                break
            names = tuple([name for [(name, _)] in members])
            experts.append([
                self._counterpart(at_expert, name, place)._replace(
                    split=(number, names) if len(names) > 1 else (0, ()), expert=len(experts)
                )
                for number, [(name, place)] in enumerate(members)
            ])  # fmt: skip
        return experts

    def _instead_of(self, slot: str) -> str | None:
        is_untied = slot == "output" and self.structure.facts.is_untied
        return None if is_untied else _INSTEAD.get(slot)

    def _at(
        self, request: Requested, spelling: _Spelling, slot: str | None
    ) -> list[tuple[str, Place]]:
        """Return the tensors of the model in a slot at the indices of a spelling."""
        places = self._places.get((slot or "", spelling.param, spelling.position), [])
        return [pair for pair in places if self._agree(request, pair[0], spelling.inner)]

    def _counterpart(self, spelling: _Spelling, name: str, place: Place) -> Counterpart:
        is_fused = place.slot == _WHOLE_OF.get(spelling.slot)
        orders = (spelling.alternates, place.alternates)
        is_permuted = None if None in orders else orders[0] != orders[1]
        if not (place.is_rotary and place.slot in _TURNED):
            is_permuted = False
        problem = ""
        if place.slot != spelling.slot and place.is_interleaved:
            problem = f"{name} has its parts head by head"
        elif place.slot != spelling.slot and spelling.is_interleaved:
            problem = "its parts alternate in the adapter"
        elif spelling.is_in_first and (place.slot != spelling.slot or place.outputs == 0):
            problem = "it may have another order of axes than the adapter"
        elif place.slot != spelling.slot and is_permuted is not False:
            problem = f"{name} has the rows of each head in another order"
        return Counterpart(
            name,
            slot=spelling.slot if is_fused else "",
            is_permuted=is_permuted,
            heads=0 if is_permuted is False else self._heads(spelling.slot),
            is_undone=spelling.alternates is True or place.alternates is False,
            is_tied=spelling.slot == "output" and place.slot == "token_embedding",
            outputs=None if spelling.is_in_first else place.outputs,
            problem=problem,
        )

    def _heads(self, slot: str) -> int:
        sizes = self.structure.sizes
        heads = sizes.get("head", 0)
        return sizes.get("head_kv", heads) if slot == "attention.key" else heads

    def _spellings(self, request: Requested) -> Iterator[_Spelling]:
        """Yield the places that a requested name has in the tables of the model's family."""
        from xckpt.structure.families.tables import plain, shorten
        from xckpt.structure.forms import masked

        types = [*self.structure.facts.types, *self.types]
        for table in self._tables:
            paths = table.dotted(request.path) if request.is_flat else [request.path]
            for path in paths:
                name = plain(f"{path}.{request.param}")
                for start in _starts(name):
                    tail = name[start:]
                    for match in table.matches(tail, shorten(masked([tail])[0])):
                        slot, param, indices = match.row.slot, match.param, match.indices
                        position = self._key(table.name, slot, param, indices)
                        inner = match.row.component
                        inner = inner if inner in _INNER else ""
                        alternates = table.alternates(match.row, types)
                        flags = match.row.flags
                        is_in_first = "in_first" in flags and slot.startswith("expert.")
                        orders = alternates, "interleaved" in flags, is_in_first
                        yield _Spelling(table.name, *position, inner, *orders)


@lru_cache(maxsize=1 << 12)
def _stated_component(path: str) -> str:
    """Return whether a path leads to the text, vision or audio of a model; empty if unknown."""
    from xckpt.structure.families.choosing import component_of

    component = component_of(path.split(".", _MOST_WORDS))
    return component if component == "text" or component in _TOWERS else ""


def _ambiguous(request: Requested, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"{shown(request.name)} fits {len(names)} tensors of the model: {some(names, 'tensors')}; "
        "pass the component that is meant, such as the folder of one text encoder"
    )


def _starts(name: str) -> Iterator[int]:
    """Yield the positions at which words begin."""
    yield 0
    position = name.find(".")
    for _ in range(_MOST_WORDS):
        if position < 0:
            return
        yield position + 1
        position = name.find(".", position + 1)


def _in_stages(slot: str, numbers: Mapping[str, int], period: int) -> Position:
    """Return the indices in diffusers of a block that a single file numbers from 0 to the end."""
    layers = [("layer", numbers["layer"])] if "layer" in numbers else []
    if "block" not in numbers:  # of the middle: residual, attention, residual
        return (("block", numbers.get("part", 0) // 2), *layers)
    block = numbers["block"] - 1 if slot.startswith("down.") else numbers["block"]
    stage, place = divmod(block, period)
    if slot in {"down.downsample", "up.upsample"}:
        return (("stage", stage),)
    return (("stage", stage), ("block", place), *layers)
