"""The family of a checkpoint, or of each of its components.

A table is *stated* if a config names a type of model that it describes, and is then used if it
explains at least half of the names. Otherwise it has to explain nearly all of them, a sign of the
family among them, and no other table may. A checkpoint has one *root* for each model in it, which
is the text before the names of the table: ``model.``, ``vision_tower.``.
"""

from __future__ import annotations

import pkgutil
import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.structure.config import normalise, types_in
from xckpt.structure.families.tables import LOCAL_AXES, evaluate, load_table, shorten, stated_sizes
from xckpt.structure.forms import masked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from xckpt.structure.families.tables import Axes, Index, Match, Row, Table

    _Positions = tuple[tuple[int, Index], ...]

# Share of the names of a model that a table has to explain.
_OF_STATED, _OF_NAMES = 0.5, 0.9
# Share of the tensors with an axis that have the same extent, for it to be a size of the model.
_AGREEING = 0.9
# A model has at least as many forms of names, and no model more.
_FEWEST, _MOST = 4, 10_000
_COMPONENTS = {
    **dict.fromkeys(
        ("vision_tower", "vision_model", "visual", "vision", "vision_encoder"), "vision"
    ),
    **dict.fromkeys(("language_model", "text_model"), "text"),
    **dict.fromkeys(("audio_tower", "audio_model"), "audio"),
    **dict.fromkeys(("unet", "diffusion_model"), "unet"),
    **dict.fromkeys(("vae", "first_stage_model"), "vae"),
    **dict.fromkeys(("text_encoder", "cond_stage_model"), "text_encoder"),
    **{name: name for name in ("text_encoder_2", "text_encoder_3", "encoder", "decoder")},
}
# Components by whose family a checkpoint with several models is called.
_MAIN = frozenset({"", "text", "unet"})
_WRAPPERS = frozenset(
    {
        *("model", "module", "_orig_mod", "base_model", "transformer", "state_dict", "params"),
        *("backbone", "bert", "roberta", "gpt_neox", "rwkv", "clip", "vit", "embedders"),
    }
)
# Numbers that are words of a name.
_NUMBERS = re.compile(r"(?<![^.])[0-9]+(?![^.])")


class Place(NamedTuple):
    """The place of a tensor in the architecture of a family."""

    component: str
    slot: str
    #: Empty if the tensor belongs to no module of a known kind.
    module_type: str
    param: str
    #: Names of the axes; None without a name. None if even their number is unknown.
    axes: tuple[str | None, ...] | None
    indices: tuple[tuple[str, int], ...]
    #: Axes of the outputs and inputs of a weight; None if it has none.
    outputs: int | None
    inputs: int | None
    #: Axes along which ranks of tensor parallelism may divide it.
    cuts: tuple[int, ...]
    #: Whether rotary position embeddings turn the outputs.
    is_rotary: bool
    #: Whether the module multiplies by one more than the weight; None if the type is unknown.
    adds_one: bool | None
    #: Whether fused parts alternate, head by head.
    is_interleaved: bool
    #: Whether it is another name of a tied tensor.
    is_alias: bool
    #: Table and pattern.
    reason: str


class _Form(NamedTuple):
    """Tensors of one shape whose names differ in numbers only."""

    name: str
    key: str
    shape: tuple[int, ...]
    count: int


@dataclass
class Root:
    """One model in a checkpoint: the text before its names, and its table."""

    prefix: str
    table: Table
    #: Type of the model, as it is stated; empty if it is not.
    model_type: str
    #: Forms that the table explains, with their rows.
    matches: dict[_Form, Match]
    component: str = ""

    @cached_property
    def prefixes(self) -> tuple[tuple[str, str], ...]:
        """The prefix, and those of heads, longest first, each with zeros for its numbers."""
        starts = accumulate(self.prefix.split(".")[:-1], lambda a, b: f"{a}.{b}")
        prefixes = ["", *[f"{start}." for start in starts]]
        keys = [shorten(key) for key in masked(prefixes)]
        return tuple(reversed(list(zip(prefixes, keys, strict=True))))

    def component_of(self, row: Row) -> str:
        """Return the component of a row."""
        return row.component if row.is_head and row.component else self.component or row.component

    def match(self, name: str, key: str, ndim: int | None = None) -> Match | None:
        """Return the row of a tensor by its whole name."""
        for prefix, start in self.prefixes:
            if name.startswith(prefix):
                match = self.table.match(name[len(prefix) :], key[len(start) :], ndim)
                if match is not None and (prefix == self.prefix or match.row.is_head):
                    return match
        return None

    def depends_on_numbers(self, key: str) -> bool:
        """Return whether the row of a name depends on numbers in it."""
        return any(self.table.depends_on_numbers(key[len(start) :]) for _, start in self.prefixes)

    def trait(self, trait: str, row: Row) -> bool | None:
        """Return whether a row has a trait; None if that depends on an unknown type."""
        entries = self.table.traits.get(trait, ())
        fitting = [
            types for types, slots in entries if any(fnmatchcase(row.slot, slot) for slot in slots)
        ]
        if not fitting:
            return False
        if any("*" in types or self.model_type in types for types in fitting):
            return True
        return False if self.model_type else None


class Family:
    """The family of a checkpoint, with one root for each model in it."""

    def __init__(self, roots: Sequence[Root], config: Mapping[str, Any], name: str) -> None:
        self.name = name
        self.roots = tuple(sorted(roots, key=lambda root: -len(root.prefix)))
        self._config = config
        self._sizes: dict[str, dict[str, int]] = {}
        # Places by names with zeros for their numbers, and shapes.
        self._places: dict[tuple[str, tuple[int, ...] | None], tuple[Place | None, _Positions]] = {}
        for root in roots:
            self._measure(root)

    def _measure(self, root: Root) -> None:
        """Find the sizes of a model, from its config and from the extents of its axes."""
        votes: dict[tuple[str, str], Counter[int]] = {}
        for form, match in root.matches.items():
            component = root.component_of(match.row)
            for axis, extent in zip(match.axes or (), form.shape, strict=False):
                if axis is not None and axis not in LOCAL_AXES:
                    votes.setdefault((component, axis), Counter())[extent] += form.count
        for component in {component for component, _ in votes} | {root.component}:
            nested = self._config.get(f"{component}_config") if component else None
            config = nested if isinstance(nested, dict) else self._config
            is_one = len(self.roots) == 1 or config is nested
            stated = stated_sizes(root.table, config) if is_one else {}
            sizes = self._sizes.setdefault(component, {})
            sizes |= stated
            for (owner, axis), extents in votes.items():
                value = evaluate(axis, stated)
                extent, count = extents.most_common(1)[0]
                if owner == component and value is not None:
                    sizes[axis] = value
                elif owner == component and count >= _AGREEING * extents.total():
                    sizes.setdefault(axis, extent)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model; with its component if components differ: ``vision.embd``."""
        if len(self._sizes) == 1:
            return dict(*self._sizes.values())
        sizes: dict[str, int] = {}
        for axis in dict.fromkeys(axis for known in self._sizes.values() for axis in known):
            values = {c: known[axis] for c, known in self._sizes.items() if axis in known}
            if len(set(values.values())) == 1:
                sizes[axis] = next(iter(values.values()))
            else:
                sizes |= {f"{c}.{axis}" if c else axis: value for c, value in values.items()}
        return sizes

    def describe(self, name: str, shape: tuple[int, ...] | None = None) -> Place | None:
        """Return the place of a tensor; None if the family does not have its name.

        With a shape, only those axes have names whose extents are the sizes of the model.
        """
        dotted = name.replace("/", ".")
        form = _NUMBERS.sub("0", dotted), shape
        if form in self._places:
            place, positions = self._places[form]
            if place is None or not positions:
                return place
            words = dotted.split(".")
            return place._replace(indices=_indices(words, positions))
        key = shorten(masked([dotted])[0])
        place, positions = self._place(dotted, key, shape)
        is_general = not any(root.depends_on_numbers(key) for root in self.roots)
        if is_general and len(self._places) < _MOST:
            self._places[form] = place, positions
        return place

    def _place(
        self, name: str, key: str, shape: tuple[int, ...] | None
    ) -> tuple[Place | None, _Positions]:
        """Return the place of a tensor, and the words of its name that have indices."""
        ndim = None if shape is None else len(shape)
        for root in self.roots:
            match = root.match(name, key, ndim)
            if match is None:
                continue
            row = match.row
            words = name.count(".") + (1 if row.param else 0)
            positions = [
                (words - len(row.words) + number, word)
                for number, word in enumerate(row.words)
                if not isinstance(word, str)
            ]
            component = root.component_of(row)
            place = Place(
                component=component,
                slot=row.slot,
                module_type=row.module_type,
                param=match.param,
                axes=self._axes(match.axes, component, shape),
                indices=match.indices,
                outputs=match.outputs,
                inputs=match.inputs,
                cuts=match.cuts,
                is_rotary="rotary" in row.flags and root.trait("not_rotary", row) is not True,
                adds_one=root.trait("add_one", row) if match.param == "weight" else False,
                is_interleaved="interleaved" in row.flags,
                is_alias="alias" in row.flags,
                reason=f"{root.table.name}: {row.pattern}",
            )
            return place, tuple(positions)
        return None, ()

    def _axes(
        self, axes: Axes | None, component: str, shape: tuple[int, ...] | None
    ) -> Axes | None:
        """Return the names of axes whose extents are the sizes of the model."""
        if axes is None or shape is None:
            return axes
        sizes = self._sizes.get(component, {})
        pairs = zip(axes, shape, strict=True)
        return tuple(
            [
                a if a in LOCAL_AXES or (a and sizes.get(a) == extent) else None
                for a, extent in pairs
            ]
        )


def _indices(words: Sequence[str], positions: _Positions) -> tuple[tuple[str, int], ...]:
    """Return the indices in the words of a name."""
    return tuple(
        [
            (index.name, int(words[position][len(index.before) :].removesuffix(index.after)))
            for position, index in positions
        ]
    )


# --- the tables -----------------------------------------------------------------------------------


@dataclass
class Entry:
    """A table in the list of tables."""

    table: str
    types: tuple[str, ...] = ()
    signs: frozenset[str] = frozenset()
    unlike: frozenset[str] = frozenset()

    def describes(self, model_type: str) -> bool:
        """Return whether the table is for a type of model."""
        return any(fnmatchcase(normalise(model_type), pattern) for pattern in self.types)


@lru_cache(maxsize=1)
def list_tables() -> tuple[Entry, ...]:
    """Return the list of tables."""
    data = pkgutil.get_data(__package__, "tables/index.txt") or b""
    entries: list[Entry] = []
    for line in data.decode().splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        if words[0].startswith("["):
            entries.append(Entry(words[0].strip("[]")))
        elif words[0] == "types":
            entries[-1].types += tuple(map(normalise, words[1:]))
        elif words[0] == "signs":
            entries[-1].signs |= set(words[1:])
        else:
            entries[-1].unlike |= set(words[1:])
    return tuple(entries)


# --- choosing -------------------------------------------------------------------------------------


def family_of(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None = None
) -> Family | None:
    """Return the family of a checkpoint; None if it is unknown or ambiguous.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        Shapes of the tensors, by name.
    config : mapping, optional
        Config of the model, such as the content of ``config.json``.
    """
    forms = _forms(shapes)
    if not _FEWEST <= len(forms) <= _MOST:
        return None
    config = config or {}
    types = list(dict.fromkeys(types_in(config)))
    entries = list_tables()
    stated = {entry.table: next((t for t in types if entry.describes(t)), "") for entry in entries}
    is_stated = any(model_type and table != "gguf" for table, model_type in stated.items())
    paths = _paths(form.key for form in forms)
    roots = []
    for entry in entries:
        has_signs = not paths.isdisjoint(entry.signs)
        if has_signs if entry.table == "gguf" or not is_stated else stated[entry.table]:
            roots += _roots(entry, forms, stated[entry.table])
    roots = _without_conflicts(roots, is_stated=is_stated)
    if not roots:
        return None
    _name_components(roots)
    first = max(roots, key=lambda root: (root.component in _MAIN, len(root.matches)))
    name = types[0] if types and (is_stated or first.table.name == "gguf") else first.table.name
    return Family(roots, config, "" if name == "gguf" else name)


def _forms(shapes: Mapping[str, tuple[int, ...]]) -> list[_Form]:
    """Group tensors whose names differ in numbers only, by their shapes."""
    names = list(shapes)
    keys = masked(names)
    groups = list(zip(keys, shapes.values(), strict=True))
    counts = Counter(groups)
    if len(counts) > _MOST:
        return []
    first = dict(zip(reversed(groups), reversed(names), strict=True))
    forms: dict[tuple[str, tuple[int, ...]], _Form] = {}
    for (key, shape), count in counts.items():
        name = first[key, shape].replace("/", ".")
        short = shorten(key).replace("/", ".")
        known = forms.get((short, shape))
        total = count if known is None else count + known.count
        forms[short, shape] = _Form(name if known is None else known.name, short, shape, total)
    return list(forms.values())


def _tails(key: str) -> Iterator[tuple[str, int]]:
    """Yield a name, and what follows each of its dots, with the number of words before it."""
    yield key, 0
    position, number = key.find("."), 1
    while position >= 0:
        yield key[position + 1 :], number
        position, number = key.find(".", position + 1), number + 1


def _paths(keys: Iterable[str]) -> set[str]:
    """Return the ends of names, with and without the parameter of the module."""
    tails = {tail for key in keys for tail, _ in _tails(key)}
    return tails | {tail.rpartition(".")[0] for tail in tails}


def _roots(entry: Entry, forms: Iterable[_Form], model_type: str) -> list[Root]:
    """Return the models in a checkpoint that a table explains."""
    table = load_table(entry.table)
    by_prefix: dict[str, dict[_Form, Match]] = {}
    heads: list[tuple[str, _Form, Match]] = []
    for form in forms:
        words = form.name.split(".")
        for tail, number in _tails(form.key):
            match = table.match(".".join(words[number:]), tail, len(form.shape))
            if match is None:
                continue
            prefix = "".join([f"{word}." for word in words[:number]])
            if match.row.is_head:
                heads.append((prefix, form, match))
            else:
                by_prefix.setdefault(prefix, {})[form] = match
    roots = []
    used: set[_Form] = set()
    for prefix, matches in sorted(by_prefix.items(), key=lambda item: -len(item[1])):
        if len(matches) < _FEWEST or len(used.intersection(matches)) * 2 > len(matches):
            continue
        matches |= {form: match for before, form, match in heads if prefix.startswith(before)}
        root = Root(prefix, table, model_type, matches)
        if _explains(root, entry, forms):
            roots.append(root)
            used |= matches.keys()
    return roots


def _explains(root: Root, entry: Entry, forms: Iterable[_Form]) -> bool:
    """Return whether a table explains the names below a prefix."""
    region = {form.key for form in forms if form.name.startswith(root.prefix)}
    explained = {form.key for form in root.matches}
    share = len(explained & region) / max(len(region), 1)
    if root.model_type and entry.table != "gguf":
        return share >= _OF_STATED
    paths = _paths(explained | region)
    if share < _OF_NAMES or paths.isdisjoint(entry.signs) or not paths.isdisjoint(entry.unlike):
        return False
    widths: Counter[int] = Counter()
    for form, match in root.matches.items():
        for axis, extent in zip(match.axes or (), form.shape, strict=False):
            widths[extent] += form.count if axis == "embd" else 0
    return not widths.total() or max(widths.values()) >= _AGREEING * widths.total()


def _without_conflicts(roots: Collection[Root], *, is_stated: bool) -> list[Root]:
    """Drop models whose tensors another table explains, too."""
    # A config states the type, so that the table that explains most is right.
    ordered = sorted(roots, key=lambda root: -len(root.matches))
    if is_stated:
        chosen: list[Root] = []
        for root in ordered:
            if not any(_overlap(root, other) for other in chosen):
                chosen.append(root)
        return chosen
    return [
        root
        for root in ordered
        if not any(_overlap(root, other) for other in ordered if other is not root)
    ]


def _overlap(root: Root, other: Root) -> bool:
    shared = len(root.matches.keys() & other.matches.keys())
    return shared * 2 > min(len(root.matches), len(other.matches))


def _name_components(roots: Collection[Root]) -> None:
    """Name the components of a checkpoint with several models."""
    for root in roots if len(roots) > 1 else ():
        words = root.prefix.split(".")[:-1]
        numbered = f"{words[-1]}" if words and words[-1].isdigit() else ""
        known = [_COMPONENTS[word] for word in words if word in _COMPONENTS]
        if "conditioner" in words:
            is_second = "embedders" in words and words[words.index("embedders") + 1 :][:1] == ["1"]
            root.component = "text_encoder_2" if is_second else "text_encoder"
        elif known:
            root.component = known[-1]
        else:
            names = [word for word in words if word not in _WRAPPERS]
            root.component = ".".join(names) + ("" if names else numbered)
