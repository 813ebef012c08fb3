"""The tensors of a picture, grouped into series that share a line or a colour, and their labels.

Panels of `plot.layers` have some of the series, with the positions of tensors along their axes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, starmap, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.datasets.tensors import OpenTensors
from xckpt.formatting import counted
from xckpt.labels import TensorFilter, combined
from xckpt.labels.filters import Selection
from xckpt.notebook.folding import ascending, families_of, fold_names, united
from xckpt.notebook.short_names import apart, short_names
from xckpt.structure import Role, Structure
from xckpt.structure.numbering import (
    ParsedName,
    drop_indices,
    is_index,
    leaf_of,
    split_words,
    strip_separator,
)
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import xarray as xr


_BY_DEFAULT = frozenset({Role.WEIGHT, Role.CODES, Role.AVERAGE})
_DRAWN = frozenset(Role) - {Role.COUNTER, Role.STEP, Role.CONSTANT, Role.STATE}
#: Readers cannot distinguish more lines: these become bands.
MOST_LINES = 12


# --- which tensors -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tensors of a picture: all of them are weights, or all of them are codes."""

    tensors: OpenTensors
    names: list[str]
    #: The scales of codes, if these are drawn.
    scales: dict[str, str]
    #: Tensors that are left out.
    note: str
    roles: dict[str, Role]

    @property
    def parsed(self) -> dict[str, ParsedName]:
        """Names of the tensors, taken apart."""
        return {name: self.tensors.structure.siblings_key(name) for name in self.names}

    @property
    def rows(self) -> list[Row]:
        """Shapes and types of the tensors."""
        names = set(self.names)
        return [row for row in self.tensors.rows if row.name in names]

    @property
    def ndims(self) -> dict[str, int]:
        """Number of axes of each tensor."""
        return {row.name: len(row.shape) for row in self.tensors.rows}

    @property
    def of_codes(self) -> str:
        """End of an axis label, if the values are codes."""
        return " of codes" if self.scales else ""

    @property
    def codes_note(self) -> str:
        """Note that the numbers are codes, if they are."""
        return codes_drawn(next(iter(self.scales.values()), None))


class Drawn(NamedTuple):
    """The object of a picture, with its statistics if they were computed before."""

    obj: Any
    stats: xr.Dataset | None = None

    def filter(
        self, tensors: TensorFilter | None, exclude: TensorFilter | None, only: str | None
    ) -> TensorFilter | None:
        """Return one filter for the options of `xckpt.options.SelectOptions`."""
        return combined(tensors, exclude, only, lambda: [OpenTensors(self.obj).structure])


def choose(obj: Any, names: TensorFilter | None) -> Chosen:
    """Choose the tensors of a picture: by default the parameters; never codes next to weights."""
    tensors = OpenTensors(obj)
    selected = tensors.select(names)
    require_any(selected)
    roles = tensors.structure.roles
    # Without names, parameters and their averages; counters and masks only if nothing else is left.
    is_default = (names.tensors if isinstance(names, Selection) else names) is None
    drawable = _BY_DEFAULT if is_default else _DRAWN
    drawn = [name for name in selected if roles[name] in drawable] or selected
    left_out = Counter(roles[n].group for n in set(selected).difference(drawn))
    groups = ", ".join(f"{count:,} {group}" for group, count in sorted(left_out.items()))
    note = f"without tensors of other roles: {groups}" if groups else ""
    scales = tensors.structure.scales
    weights = [name for name in drawn if name not in scales]
    if not weights:
        return Chosen(tensors, drawn, {name: scales[name] for name in drawn}, note, roles)
    codes_note = codes_left_out([name for name in drawn if name in scales], scales)
    return Chosen(tensors, weights, {}, " · ".join(filter(None, (note, codes_note))), roles)


def require_any(chosen: Collection[str]) -> None:
    """Raise if the selection is empty."""
    if not len(chosen):
        raise ValueError("the object has no tensors")


def codes_drawn(scales: str | None) -> str:
    """Return a note on codes whose numbers a picture shows, with the name of their scales."""
    return f"codes, whose scales are in {leaf_of(scales)}" if scales else ""


def codes_left_out(names: Sequence[str], scales: dict[str, str]) -> str:
    """Return a note on tensors of codes that a picture leaves out."""
    if not names:
        return ""
    their = "its scales are" if len(names) == 1 else "their scales are"
    leaf = leaf_of(scales[names[0]])
    return f"without {counted(len(names), 'tensor')} of codes; {their} in {leaf}"


# --- series --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """Tensors whose names differ in the numbers of their modules, or in little more."""

    label: str
    #: Names of the tensors, taken apart.
    parsed: Mapping[str, ParsedName]
    #: Words that all names have.
    shared: frozenset[str]

    @classmethod
    def of(cls, label: str, groups: Sequence[_Siblings]) -> Series:
        """Return a series of groups of tensors."""
        parsed = {name: group.names[name] for group in groups for name in group.names}
        every = [frozenset(split_words(group.template)) for group in groups]
        return cls(label, parsed, frozenset.intersection(*every))

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self.parsed)

    @property
    def bare(self) -> str:
        """The first name without numbers."""
        return drop_indices(self.parsed[self.names[0]].template)

    def place(self, name: str) -> str:
        """Return the place of a tensor in the series: ``layer 17, expert 3``."""
        parts = self.parsed[name]
        numbers = zip(parts.modules, parts.indices, strict=True)
        places = [f"{one_of(base)} {index}" for base, index in numbers]
        places += [word for word in split_words(parts.template) if word not in self.shared]
        return ", ".join(places) or name


def one_of(base: str) -> str:
    """Return the word for one of several modules, where it is English."""
    return base[:-1] if len(base) > 2 and base[-1] == "s" != base[-2] else base


class _Siblings(NamedTuple):
    """Tensors whose names differ in numbers only."""

    template: tuple[str | None, ...]
    names: dict[str, ParsedName]


def groups_of(parsed: Mapping[str, ParsedName]) -> list[_Siblings]:
    """Group tensors by their names without numbers."""
    groups: dict[Any, dict[str, ParsedName]] = {}
    for name, parts in parsed.items():
        groups.setdefault(parts.template, {})[name] = parts
    return list(starmap(_Siblings, groups.items()))


def series_of(
    parsed: Mapping[str, ParsedName], most: int = MOST_LINES, ndims: Mapping[str, int] | None = None
) -> tuple[str, list[Series]]:
    """Group tensors by their names without numbers; return the shared pattern and the series."""
    # If there are more than `most`, series whose names differ in one word are united, as in the
    # summary, and then the smallest of the rest.
    bundles = [[group] for group in groups_of(parsed)]
    if len(bundles) > most:
        bundles = _united([group for (group,) in bundles], ndims or {})
    is_cut = len(bundles) > most
    if is_cut:
        bundles.sort(key=lambda groups: -sum(len(group.names) for group in groups))
        smallest = [group for groups in bundles[most - 1 :] for group in groups]
        bundles = [*bundles[: most - 1], smallest]
    title, labels = title_and_labels(bundles)
    if is_cut:
        labels[-1] = "all others"
    return title, list(map(Series.of, labels, bundles))


def _united(groups: Sequence[_Siblings], ndims: Mapping[str, int]) -> list[list[_Siblings]]:
    """Unite groups whose names differ in one word, but not weights with biases or gains."""
    rows = []
    for template, names in groups:
        text = "".join("0" if piece is None else piece for piece in template)
        # The last word and the number of axes stand for a type: rows of other types stay apart.
        rows.append(Row(text, f"{template[-1]} {ndims.get(next(iter(names)))}", (), 0))
    bundles = sorted([sorted(family.places) for family in united(families_of(rows))])
    return [[groups[place] for place in places] for places in bundles]


# --- names ---------------------------------------------------------------------------------------


def title_and_labels(bundles: Sequence[Sequence[_Siblings]]) -> tuple[str, list[str]]:
    """Return the pattern of the words that all names share, and the rest of each bundle."""
    # ``layers.{0..23}.*``, and ``attn.w`` and ``experts.{0..7}.w``; for one bundle its pattern. No
    # two labels are alike.
    if len(bundles) == 1:
        text = _label(bundles[0], 0)
        return text, apart([text])
    every = [group for bundle in bundles for group in bundle]
    if all(len(bundle) == len(bundle[0].names) == 1 for bundle in bundles):
        single = [group.names.items() for group in every]
        return _title_and_labels_of_names({n: parts for items in single for n, parts in items})
    columns = zip(*(group.template[:-1] for group in every), strict=False)
    depth = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, columns))
    labels = apart([_label(bundle, depth) for bundle in bundles])
    parsed = {name: group.names[name] for group in every for name in group.names}
    if not depth:
        return counted(len(parsed), "tensor"), labels
    starred = []
    for name, parts in parsed.items():
        inside = _inside(parts, depth)
        starred.append(name.removesuffix(strip_separator(inside)) + "*")
    return fold_names(starred)[0], labels


def _title_and_labels_of_names(parsed: Mapping[str, ParsedName]) -> tuple[str, list[str]]:
    """Return the words that names of single tensors share, and the rest of each."""
    title, labels = short_names(list(parsed))
    if not title or title == "*":
        return counted(len(parsed), "tensor"), labels
    if all(map(is_index, labels)):  # indices of a module with a star in the title
        columns = zip(*[parts.indices for parts in parsed.values()], strict=False)
        place = next((at for at, column in enumerate(columns) if len(set(column)) > 1), None)
        if place is not None:
            module = one_of(next(iter(parsed.values())).modules[place])
            labels = [f"{module} {label}" for label in labels]
    return title, labels


def _label(bundle: Sequence[_Siblings], depth: int) -> str:
    """Write the pattern of names without the modules that all share; one name as it is."""
    parsed = [parts for group in bundle for parts in group.names.values()]
    names = [strip_separator(_inside(parts, depth)) for parts in parsed]
    if len(names) == 1:
        return names[0]
    patterns = fold_names(names)
    if len(patterns) > 1:  # for example dense layers and mixtures of experts
        starred = [["*" if p is None else p for p in group.template[depth:]] for group in bundle]
        patterns = fold_names(strip_separator("".join(pieces)) for pieces in starred)
    return " | ".join(patterns)


def _inside(parsed: ParsedName, depth: int) -> str:
    """Return a name without its first pieces."""
    return "".join(parsed.pieces[depth:])


def numbers_of(parsed: ParsedName) -> dict[str, int]:
    """Return the number of a tensor in each module; of modules with one name the outermost."""
    pairs = zip(reversed(parsed.modules), reversed(parsed.indices), strict=True)
    return {base: int(index) for base, index in pairs}


def outermost(parsed: Iterable[ParsedName]) -> str | None:
    """Return the most frequent outermost numbered module."""
    first = Counter(next(iter(parts.modules), None) for parts in parsed)
    first.pop(None, None)
    return first.most_common(1)[0][0] if first else None


# --- positions along the axis --------------------------------------------------------------------

# Replaces the names of stages, such as `layer1.0`.
_STAGE = "stage"


class Positions(NamedTuple):
    """Positions of tensors along the axis, and their names there."""

    # The numbers of a module are its positions. Where a model repeats the same tensors in modules
    # of several names (``layer1.0``, ``layer2.0``; ``down_blocks``, ``mid_block``), these follow
    # each other, and ``stage.{position}`` replaces the name of the stage in the names of tensors.

    along: str
    names: dict[str, str]  # on the axis, by the names of the file
    parsed: dict[str, ParsedName]  # names on the axis, taken apart
    stages: list[str]  # by position; empty if positions are the numbers themselves


def positions_of(
    names: Sequence[str], along: str | None, hue: str | None, structure: Structure
) -> Positions | None:
    """Return the positions of tensors, or None if no names have numbers.

    The caller may name numbered modules that the model does not repeat, in `along` and `hue`.
    """
    base = along or outermost(map(structure.parse, names))
    if base is None:
        return None
    if axis_modules := {module for module in (along, hue) if module is not None}:
        only = axis_modules.union(structure.repeated_modules())
        parsed = {name: structure.parse(name, only) for name in names}
    else:
        parsed = {name: structure.siblings_key(name) for name in names}
    numbered = {name: parts for name, parts in parsed.items() if base in parts.modules}
    if not numbered:
        return None
    by_number = Positions(base, {name: name for name in numbered}, numbered, [])
    if along is not None:
        return by_number
    places = {n: _split_stage(parts) for n, parts in numbered.items() if parts.modules[0] == base}
    insides = {place.inside.template for place in places.values()}
    for name, parts in parsed.items():
        if name not in numbered:
            place = _other_stage(parts, insides)
            places |= {name: place} if place is not None else {}
    # The layers of an encoder and of a decoder have the same numbers: these are no stages.
    if len({place.module for place in places.values()}) < 2 or len(places) < len(numbered):
        return by_number
    stages = sorted({place.stage for place in places.values()})
    stages = [stages[at] for at in ascending(stages)]
    numbers = {stage: str(number) for number, stage in enumerate(stages)}
    renamed = {name: place.renamed(numbers[place.stage]) for name, place in places.items()}
    new_names = {name: "".join(parts.pieces) for name, parts in renamed.items()}
    new_parsed = {new_names[name]: parts for name, parts in renamed.items()}
    return Positions(_STAGE, new_names, new_parsed, stages)


class _Place(NamedTuple):
    """A tensor in one of several stages with the same tensors."""

    stage: str
    module: str  # the word of the stage
    inside: ParsedName  # the rest of the name

    def renamed(self, number: str) -> ParsedName:
        """Return the name with a number for the stage."""
        template, modules, indices = self.inside
        return ParsedName((f"{_STAGE}.", None, *template), (_STAGE, *modules), (number, *indices))


def _split_stage(parts: ParsedName) -> _Place:
    """Split a name after its first number."""
    depth = parts.template.index(None) + 1
    inside = ParsedName(parts.template[depth:], parts.modules[1:], parts.indices[1:])
    return _Place(parts.outermost, parts.modules[0], inside)


def _other_stage(parts: ParsedName, insides: set[tuple[str | None, ...]]) -> _Place | None:
    """Split a name where a tensor that stages repeat begins, after a number or one word."""
    if parts.indices and (place := _split_stage(parts)).inside.template in insides:
        return place
    first = parts.template[0]
    if first is None or not parts.template[1:] or parts.template[1:] not in insides:
        return None
    return _Place(first, first, parts._replace(template=parts.template[1:]))


# --- panels --------------------------------------------------------------------------------------

#: Lines of a panel whose labels can be read.
MOST_LINES_OF_PANEL = 8
_MOST_PANELS = 6
# So many lines of one kind share a panel, whatever modules they are in.
_FEW_LINES = 4


def panels_of(
    rows: Iterable[Row],
    structure: Structure,
    originals: Mapping[str, str],
    parsed: Mapping[str, ParsedName],
) -> list[list[str]]:
    """Divide tensors into panels by their kinds, and by their modules if they are many.

    `originals` has the names of the tensors in the file, and `parsed` the names taken apart.
    """
    # Weights come first, then gains of norms, biases, and other roles.
    rows = list(rows)
    norms, roles = structure.norms, structure.roles
    kinds: dict[tuple[int, str], list[str]] = {}
    order = list(Role)
    for row in rows:
        original = originals[row.name]
        role = roles[original]
        is_vector = sum([size != 1 for size in row.shape]) <= 1
        kind = "norm" if original in norms else "vector" if is_vector else "matrix"
        rank = order.index(role) * 3 + ["matrix", "norm", "vector"].index(kind)
        kinds.setdefault((rank, kind), []).append(row.name)
    panels = [names for _, names in sorted(kinds.items())]
    panels = [*panels[: _MOST_PANELS - 1], list(chain(*panels[_MOST_PANELS - 1 :]))]
    panels = [names for names in panels if names]
    place = 0
    while place < len(panels):
        smaller = _by_module({name: parsed[name] for name in panels[place]})
        if 1 < len(smaller) <= _MOST_PANELS - len(panels) + 1:
            panels[place : place + 1] = smaller  # which may be divided again
        else:
            place += 1
    return panels


def _by_module(parsed: Mapping[str, ParsedName]) -> list[list[str]]:
    """Divide tensors by the first word in which their names differ, but not into single lines."""
    templates = {group.template: split_words(group.template) for group in groups_of(parsed)}
    columns = enumerate(zip(*templates.values(), strict=False))
    depth = next((at for at, column in columns if len(set(column)) > 1), None)
    if depth is None or len(templates) <= _FEW_LINES:
        return [list(parsed)]
    modules: dict[str, list[str]] = {}
    for name, parts in parsed.items():
        modules.setdefault(templates[parts.template][depth], []).append(name)
    counts = {
        module: len({parsed[name].template for name in members})
        for module, members in modules.items()
    }
    several = [members for module, members in modules.items() if counts[module] > 1]
    single = [name for module in modules if counts[module] == 1 for name in modules[module]]
    return [*several, *([single] if single else [])] if several else [list(parsed)]
