"""The tensors of a picture, grouped into series that share a line or a colour, and their labels."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import starmap, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.datasets.tensors import OpenTensors
from xckpt.formatting import counted
from xckpt.labels import combined
from xckpt.labels.filters import Selection
from xckpt.notebook.folding import families_of, fold, united
from xckpt.notebook.short_names import apart, short_names
from xckpt.structure import Role
from xckpt.structure.numbering import (
    drop_indices,
    is_index,
    split_leaf,
    split_words,
    strip_separator,
)
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import xarray as xr

    from xckpt.labels import TensorFilter
    from xckpt.structure.numbering import ParsedName

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
        """Axis label for values other than weights."""
        return " of codes" if self.scales else ""

    @property
    def codes_note(self) -> str:
        """Note that the numbers are codes, if they are."""
        return codes_drawn(next(iter(self.scales.values()), None))


class Drawn(NamedTuple):
    """The object of a picture, with its statistics if they were computed before."""

    obj: Any
    stats: xr.Dataset | None = None

    def chosen(
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
    codes = codes_of(tensors)
    weights = [name for name in drawn if name not in codes]
    if not weights:
        return Chosen(tensors, drawn, {name: codes[name] for name in drawn}, note, roles)
    of_codes = codes_left_out([name for name in drawn if name in codes], codes)
    return Chosen(tensors, weights, {}, " · ".join(filter(None, (note, of_codes))), roles)


def require_any(chosen: Collection[str]) -> None:
    """Raise if there is nothing to draw."""
    if not len(chosen):
        raise ValueError("the object has no tensors")


def codes_of(tensors: OpenTensors) -> dict[str, str]:
    """Return the tensors that have codes, and the names of their scales."""
    return tensors.structure.scales


def codes_drawn(scales: str | None) -> str:
    """Return a note on codes whose numbers a picture shows, with the name of their scales."""
    return f"codes, whose scales are in {split_leaf(scales)[2]}" if scales else ""


def codes_left_out(names: Sequence[str], scales: dict[str, str]) -> str:
    """Return a note on tensors of codes that a picture leaves out."""
    if not names:
        return ""
    their = "its scales are" if len(names) == 1 else "their scales are"
    leaf = split_leaf(scales[names[0]])[2]
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
    # A row stands for each group.
    rows = {
        Row("".join("0" if part is None else part for part in template), kind, (), 0): at
        for at, (template, names) in enumerate(groups)
        for kind in [f"{template[-1]} {ndims.get(next(iter(names)))}"]
    }
    numbers = list(rows.values())
    families = united(families_of(rows))
    bundles = [sorted([numbers[place] for place in family.places]) for family in families]
    return [[groups[at] for at in places] for places in sorted(bundles)]


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
    return _patterns(starred)[0], labels


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
    patterns = _patterns(names)
    if len(patterns) > 1:  # for example dense layers and mixtures of experts
        starred = [["*" if p is None else p for p in group.template[depth:]] for group in bundle]
        patterns = _patterns(strip_separator("".join(pieces)) for pieces in starred)
    return " | ".join(patterns)


def _inside(parsed: ParsedName, depth: int) -> str:
    """Return a name without its first pieces."""
    return "".join(parsed.pieces[depth:])


def _patterns(names: Iterable[str]) -> list[str]:
    return [pattern.text for pattern in fold(Row(name, "", (), 0) for name in names)]


def numbers_of(parsed: ParsedName) -> dict[str, int]:
    """Return the numbers of a tensor's modules; the outermost number of modules with one name."""
    pairs = zip(reversed(parsed.modules), reversed(parsed.indices), strict=True)
    return {base: int(index) for base, index in pairs}


def outermost(parsed: Iterable[ParsedName]) -> str | None:
    """Return the most frequent outermost numbered module."""
    first = Counter(next(iter(parts.modules), None) for parts in parsed)
    first.pop(None, None)
    return first.most_common(1)[0][0] if first else None
