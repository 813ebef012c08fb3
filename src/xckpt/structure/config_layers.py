"""Numbers of layers in the config of a model, and its values for each layer."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import some
from xckpt.structure.facts import KEYS, StatedSize, is_gguf, sizes_stated_in, tower_of
from xckpt.structure.numbering import drop_indices, leaf_of, parse_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from xckpt.structure.config_check import ConfigFit
    from xckpt.structure.model import Structure

_SHOWN = 3
_LAYER_KEYS = (*KEYS["layer"], "n_layers")
# Words of keys that state kinds of layers (`mlp_only_layers`, `layer_types`,
# `first_k_dense_replace`), and ends of keys that state numbers of layers.
_KINDS, _COUNTS = ("layer", "dense", "sparse"), ("layer", "layers")
_OF_LAYERS = "values of the layers that the tensors come from"


class Sources(NamedTuple):
    """Where the values of new tensors come from."""

    #: By name; equal values have equal ones.
    values: Mapping[str, Any]
    #: Returns the names of the old tensors that a new one is read or may be computed from.
    names: Callable[[str], Collection[str]]
    #: Returns whether a new tensor is computed from some of these old ones.
    uses: Callable[[str, Collection[str]], bool]


@dataclass(frozen=True, slots=True)
class _Stacks:
    """Stacks of layers whose number the config states under one key."""

    size: StatedSize
    #: Numbers of layers by the names of tensors, by the name up to the number.
    before: Mapping[str, Mapping[str, int]]
    after: Mapping[str, Mapping[str, int]]

    @property
    def count(self) -> int | None:
        """Return the number of new layers; None if it differs, or numbers are missing."""
        present = [{*self.after.get(stem, {}).values()} for stem in self.before]
        count = len(present[0])
        return count if count and all(_are_all(numbers, count) for numbers in present) else None


def fit_layers(
    fit: ConfigFit,
    edited: dict[str, Any] | None,
    structure: Structure,
    new: Collection[str],
    sources: Sources,
) -> set[str]:
    """Correct the numbers of layers, and the values that the config has for each layer.

    Return the names of the tensors that are gone with their layers, or that layers of another kind
    lack. The edited config gets the values for each layer, too, unless the user set them.
    """
    gone: set[str] = set()
    for stacks in _counted_stacks(fit, structure, new):
        gone |= _fit_lists(fit, edited, stacks, sources)
        gone |= _fit_number(fit, stacks)
    return gone


def _counted_stacks(
    fit: ConfigFit, structure: Structure, new: Collection[str]
) -> Iterable[_Stacks]:
    """Return the stacks of layers whose number the config states, by the key of the number."""
    after, size = _layers(new), sizes_stated_in(fit.config).get("layer")
    stacks: dict[tuple[int, str], _Stacks] = {}
    for stem, numbers in _stacks(structure, structure).items():
        stated = _size_of_stack(stem, fit.config, size)
        if stated is not None and _are_all(set(numbers.values()), stated.value):
            place = id(stated.section), stated.key
            before = {**stacks[place].before, stem: numbers} if place in stacks else {stem: numbers}
            stacks[place] = _Stacks(stated, before, after)
    return stacks.values()


def _layers(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the outermost numbers in names, by the name up to the number."""
    numbers: dict[str, dict[str, int]] = defaultdict(dict)
    for name in names:
        parsed = parse_name(name)
        if parsed.indices:
            number = parsed.indices[0]
            numbers[parsed.outermost.removesuffix(number)][name] = int(number)
    return numbers


def _stacks(structure: Structure, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the numbers of the layers of each stack, by the name up to the number."""
    return _layers([name for name in names if "layer" in dict(structure[name].indices[:1])])


def _size_of_stack(
    stem: str, config: Mapping[str, Any], size: StatedSize | None
) -> StatedSize | None:
    """Return the stated number of layers of a stack: of its tower or part, or of the model."""
    words, tower = {*re.split(r"[._/]", stem)}, tower_of(stem, config)
    sections: list[Mapping[str, Any]] = [config, *([size.section] if size else [])]
    for section in [config[tower]] if tower else sections:
        of_part = [
            key
            for key in section
            if key.endswith("_layers") and not words.isdisjoint(key.split("_")[:-1])
        ]
        for key in (*of_part, *_LAYER_KEYS):
            if type(section.get(key)) is int:
                return StatedSize(section, key, section[key])
    return size


def _fit_number(fit: ConfigFit, stacks: _Stacks) -> set[str]:
    """Correct the number of layers of stacks; return the tensors of layers that are gone."""
    size, after = stacks.size, stacks.after
    present = [{*after[stem].values()} for stem in stacks.before if stem in after]
    if not present or all(_are_all(numbers, size.value) for numbers in present):
        return set()
    count = stacks.count
    if count is None:
        numbers = " and ".join([ranges(numbers) for numbers in present])
        text = f"{size.key} {size.value}: the tensors have layers {numbers} "
        fit.add_problem(f"{text}({_renumbering(stacks, len(present[0]))} renumbers them)")
    else:
        fit.correct(size, count)
    return {
        name
        for stem, numbers in stacks.before.items()
        for name, number in numbers.items()
        if number not in after.get(stem, {}).values()
    }


def _renumbering(stacks: _Stacks, count: int) -> str:
    """Return how to close the gaps in the numbers of layers."""
    paths = [stem.rstrip("._/-") for stem in stacks.before]
    dim = leaf_of(paths[0])
    # Layers of an encoder have a dimension of the same name.
    namesakes = {stem for stem in stacks.after if leaf_of(stem.rstrip("._/-")) == dim}
    one_or_all = paths[0] if len(paths) == 1 else paths
    stack = True if namesakes <= stacks.before.keys() else one_or_all
    call = f"ds.assign_coords({dim}=ds[{dim!r}].copy(data=range({count})))"
    return f"opened with stack={stack!r}, {call}"


# --- values for each layer ------------------------------------------------------------------------


def _fit_lists(
    fit: ConfigFit, edited: dict[str, Any] | None, stacks: _Stacks, sources: Sources
) -> set[str]:
    """Give layers the values of the layers that their tensors come from.

    Return the tensors that layers of another kind than before lack.
    """
    size, count = stacks.size, stacks.count
    if count is None:
        return set()
    place = fit.place(size).removesuffix(size.key)
    stated = edited if edited is None or not place else edited.get(place.removesuffix("."))
    sections: list[Any] = [size.section, stated if isinstance(stated, dict) else size.section]
    gone: set[str] = set()
    unknown: list[str] = []
    for key, kinds in lists_by_layer(size).items():
        if sections[-1].get(key) != kinds:  # the user set or removed it
            continue
        new, *more = [
            _kinds_of_layers(kinds, stem, stacks.after[stem], sources) for stem in stacks.before
        ]
        if new is None or more != len(more) * [new]:
            unknown.append(f"{place}{key}")
        elif new != kinds:
            for section in sections:
                section[key] = new
            if any(kind != kinds[0] for kind in kinds):
                fit.corrections.append(f"{place}{key}: {_OF_LAYERS}")
                fit.has_moved_kinds = True
            for numbers in stacks.before.values():
                gone |= _of_other_kinds(kinds, new, numbers)
    if unknown:
        fit.problems.append(_unknown_kinds(fit, size, count, unknown))
    return gone


def lists_by_layer(size: StatedSize) -> dict[str, list[Any]]:
    """Return the lists of a config that have a value for each layer."""
    prefix = size.key.rpartition(".")[0]
    return {
        key: value
        for key, value in size.section.items()
        if key.startswith(prefix)
        and isinstance(value, list)
        and len(value) == size.value
        and "token" not in key  # numbers of tokens may be as many
        and key != "architectures"
        and value != [*range(size.value)]  # numbers of layers
    }


def _kinds_of_layers(
    kinds: Sequence[Any], stem: str, numbers: Mapping[str, int], sources: Sources
) -> list[Any] | None:
    """Return the value for each new layer; None if the tensors of one do not agree on it."""
    values, count = {repr(kind): kind for kind in kinds}, len({*numbers.values()})
    if len(values) == 1:
        return [kinds[0]] * count
    options: dict[int, set[str]] = {}
    for name, number in numbers.items():
        if used := _kinds_used(kinds, stem, name, number, sources):
            options[number] = options.get(number, used) & used
    new = []
    for number in range(count):
        before = {repr(kinds[number])} if count == len(kinds) else set()
        possible = options.get(number, before)
        # A layer of several kinds, as a mean is, keeps the one of its place.
        kind = possible if len(possible) == 1 else possible & before
        if not kind:
            return None
        new.append(values[min(kind)])
    return new


def _kinds_used(
    kinds: Sequence[Any], stem: str, name: str, number: int, sources: Sources
) -> set[str]:
    """Return the values of the layers that a tensor is computed from, as text."""
    names: dict[str, list[str]] = defaultdict(list)
    for origin, old in _layers(sources.names(name)).get(stem, {}).items():
        if old < len(kinds):
            names[repr(kinds[old])].append(origin)
    if len(names) < 2:
        return {*names}
    in_place = repr(kinds[number]) if number < len(kinds) else ""
    moved = [origin for kind in names if kind != in_place for origin in names[kind]]
    if in_place in names and not sources.uses(name, moved):
        return {in_place}

    def used(texts: list[str]) -> set[str]:
        if not sources.uses(name, [origin for text in texts for origin in names[text]]):
            return set()
        half = len(texts) // 2
        return used(texts[:half]) | used(texts[half:]) if half else {*texts}

    return used([*names])


def _of_other_kinds(
    kinds: Sequence[Any], new: Sequence[Any], numbers: Mapping[str, int]
) -> set[str]:
    """Return the tensors that only layers of other kinds have than the new ones of their number."""
    templates = {name: drop_indices(parse_name(name).template) for name in numbers}
    layers: dict[str, set[int]] = defaultdict(set)
    for name, template in templates.items():
        layers[template].add(numbers[name])
    gone = set()
    for name, template in templates.items():
        with_it = {repr(kinds[number]) for number in layers[template]}
        without = {repr(kind) for n, kind in enumerate(kinds) if n not in layers[template]}
        is_moved = numbers[name] < len(new) and repr(new[numbers[name]]) in without
        if is_moved and with_it.isdisjoint(without):
            gone.add(name)
    return gone


def _unknown_kinds(fit: ConfigFit, size: StatedSize, count: int, keys: Sequence[str]) -> str:
    """Describe values for each layer that do not follow from the tensors."""
    number, lists = fit.place(size), some([*keys], "")
    attrs = "the attributes" if is_gguf(fit.config) else 'attrs["config"]'
    if count != size.value:
        text = f"{number} {size.value}: the tensors have {count} layers"
        remedy = f"state {number} and {lists} in {attrs}"
    else:
        text = f"{number} {count}: layers come from several layers, or from other ones"
        remedy = f"edit {lists} in {attrs}, or copy the config if it holds"
    return f"{text}, and which values of {lists} these have is not certain ({remedy})"


# --- edits ----------------------------------------------------------------------------------------


def check_edited_layers(
    fit: ConfigFit, config: Mapping[str, Any], structure: Structure, new: Collection[str]
) -> None:
    """Compare edited numbers of layers with the layers of stacks that they counted before."""
    size, edited = (sizes_stated_in(c).get("layer") for c in (config, fit.config))
    after = _layers(new)
    problems: dict[str, None] = {}
    for stem, numbers in _stacks(structure, structure).items():
        was = _size_of_stack(stem, config, size)
        now = _size_of_stack(stem, fit.config, edited)
        present = {*after.get(stem, {}).values()}
        if (
            was is None
            or now is None
            or not present
            or not _are_all({*numbers.values()}, was.value)
        ):
            continue
        if fit.is_edited(now) and not _are_all(present, now.value):
            count = len(present)
            has = str(count) if _are_all(present, count) else f"layers {ranges(present)}"
            problems[f"{fit.place(now)} {now.value}: the tensors have {has}"] = None
    fit.problems += problems


def edited_kinds(fit: ConfigFit) -> list[str]:
    """Return the edited keys that state the kinds of layers."""
    keys = [key for key in fit.edited if any(word in key for word in _KINDS)]
    return sorted([
        key for key in keys if not (type(fit.config.get(key)) is int and key.endswith(_COUNTS))
    ])  # fmt: skip


def exchanged_tensors(fit: ConfigFit, structure: Structure, new: Collection[str]) -> list[str]:
    """Return tensors that are gone from layers that have others, whose kinds the user edited."""
    if not edited_kinds(fit):
        return []
    changed = {parse_name(name).outermost for name in new if name not in structure}
    of_layers = [name for name in structure if "layer" in dict(structure[name].indices)]
    layers: dict[str, set[str]] = defaultdict(set)  # that have a tensor of the same name
    for name in of_layers:
        layers[drop_indices(parse_name(name).template)].add(parse_name(name).outermost)
    count = len(set().union(*layers.values()))
    return [
        name
        for name in of_layers
        if name not in new
        and parse_name(name).outermost in changed
        and len(layers[drop_indices(parse_name(name).template)]) < count
    ]


def in_some_layers(names: Sequence[str], new: Collection[str]) -> list[str]:
    """Return the names of tensors that only some layers of their stack have."""
    counts = Counter([drop_indices(parse_name(name).template) for name in names])
    return [
        name
        for stem, numbers in _layers(new).items()
        for name in _layers(names).get(stem, ())
        if counts[drop_indices(parse_name(name).template)] < len({*numbers.values()})
    ]


def _are_all(numbers: set[int], count: int) -> bool:
    """Return whether natural numbers are those below a count, which may be huge."""
    return len(numbers) == count == max(numbers, default=-1) + 1


def ranges(numbers: Collection[int]) -> str:
    """Return numbers as text: "0 to 3", "0, 2"."""
    ordered = sorted(numbers)
    if len(ordered) > 2 and ordered[-1] - ordered[0] + 1 == len(ordered):
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered[:_SHOWN])) + (", ..." if len(ordered) > _SHOWN else "")
