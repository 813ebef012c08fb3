"""Tables of families: patterns of names, with the places that they stand for.

A table is a text file in the folder ``tables``. Its lines are

- ``# ...``, a comment with the source of the names;
- ``use TABLE``: all lines of another table, of which rows with the same pattern are replaced;
- ``size = a | b``: a size that configs do not state under a usual key (`xckpt.structure.facts`), as
  the first of several expressions over keys and sizes; ``ff | 4*embd`` is the usual one if stated;
- ``@trait TYPES SLOTS``: a trait of slots in models of these types (``*`` for all of them);
- ``over PREFIX=SLOT ...``: prefixes of the patterns below, with prefixes of their slots; ``*`` is
  no prefix;
- ``[component]``: rows of one component, such as ``[decoder]``; ``[]`` for the others; ``[heads]``,
  or ``[heads:component]``, for rows whose names may lack the prefix of the others, as ``model.``;
- ``PATTERN SLOT TYPE AXES FLAGS``: a row.

A pattern is the path of a module, and stands for its weight, its bias and its buffers; or the name
of a tensor with its parameter behind a colon: ``experts.down_proj:weight``. ``{layer}`` is an
index. Axes are those of the weight, in the vocabulary of GGUF: ``head*key,embd``; ``?`` and
numbers are axes without a name, and ``-`` a scalar. Of several rows with one pattern, the first
counts whose axes have the sizes of the model.

===============  ===================================================================================
flag             meaning
===============  ===================================================================================
``cut=0``        axis along which tensor parallelism divides the weight; ``cut=0,1`` is either one
``rotary``       rotary position embeddings turn the outputs
``in_first``     inputs come before outputs
``interleaved``  the fused parts alternate, head by head
``fused``        the fused parts follow one another, and tensor parallelism divides each of them
``shift_first``  shifts come before scales in the outputs; elsewhere scales come first
``alias``        another name of a tied tensor
===============  ===================================================================================
"""

from __future__ import annotations

import pkgutil
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from xckpt.structure.forms import masked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Axes = tuple[str | None, ...]

_ZEROS = re.compile(r"0+")
_INDEX = re.compile(r"([^{}]*)\{(\w+)\}([^{}]*)")
_PLACEHOLDER = re.compile(r"\{\w+\}")
_OF_HEADS = re.compile(r"head(_kv)?\*[a-z_]+")
_MAX_DIGITS = 9
# The end of the name of a class, after the type of the model: LlamaForCausalLM, CLIPTextModel.
_SUFFIX = re.compile(r"(For[A-Z]|LMHead|Model|WithProjection).*")
_SEPARATORS = str.maketrans("", "", "_-")
# Modules whose bias has the extent of the outputs; other biases are like the weight.
_WITH_OUTPUTS = frozenset({"linear", "convolution", "router"})
# Parameters of modules, in the spellings of frameworks.
_PARAMS = {
    **dict.fromkeys(("weight", "kernel", "embedding", "gamma", "scale"), "weight"),
    **dict.fromkeys(("bias", "beta"), "bias"),
}
_OF_BATCH_NORMS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_OF_QUANTISED = frozenset({
    "qweight", "qzeros", "scales", "biases", "g_idx", "SCB", "input_scale", "weight_format",
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_packed",
    "weight_shape", "weight_zero_point", "weight_g_idx",
})  # fmt: skip
_LARGEST_SIZE = 1 << 48
# Axes whose extents differ from module to module.
LOCAL_AXES = frozenset({"out", "in", "height", "width", "channel"})


class NumberedWord(NamedTuple):
    """A word of a pattern with an index: ``{layer}``, ``layer{stage}``."""

    before: str
    name: str
    after: str

    def parse(self, word: str) -> int | None:
        """Return the index in a word of a name; None if the word is another one."""
        digits = word[len(self.before) : len(word) - len(self.after)]
        is_index = digits.isdecimal() and digits.isascii() and len(digits) <= _MAX_DIGITS
        is_word = word == f"{self.before}{digits}{self.after}"
        return int(digits) if is_index and is_word else None


@dataclass(frozen=True, slots=True, eq=False)
class NameRow:
    """A pattern of names, and the place of its tensors in the model."""

    pattern: str
    words: tuple[str | NumberedWord, ...]
    #: Parameter of a tensor; empty for the path of a module.
    param: str
    component: str
    slot: str
    module_type: str
    axes: Axes
    #: Axes along which ranks may divide the weight.
    cuts: tuple[int, ...]
    flags: frozenset[str]
    is_head: bool

    def indices(self, words: Sequence[str]) -> tuple[tuple[str, int], ...] | None:
        """Return the indices in the words of a name; None if the pattern does not match."""
        indices = []
        for part, word in zip(self.words, words, strict=True):
            if isinstance(part, str):
                if part != word:
                    return None
                continue
            index = part.parse(word)
            if index is None:
                return None
            indices.append((part.name, index))
        return tuple(indices)

    @property
    def outputs(self) -> int | None:
        """Axis of the outputs of the weight; None for tables and vectors."""
        if self.module_type not in _WITH_OUTPUTS or len(self.axes) < 2:
            return None
        if "in_first" in self.flags:
            return len(self.axes) - 1
        return 1 if self.axes[0] == "expert" and len(self.axes) > 2 else 0

    @property
    def inputs(self) -> int | None:
        """Axis of the inputs of the weight; None for tables and vectors."""
        if self.outputs is None:
            return None
        return self.outputs - 1 if "in_first" in self.flags else self.outputs + 1


class RowMatch(NamedTuple):
    """A row that a name matches, and the parameter of the module that it names."""

    row: NameRow
    param: str
    indices: tuple[tuple[str, int], ...]
    #: None if they are unknown, as those of codes.
    axes: Axes | None
    #: Axes along which ranks may divide it.
    cuts: tuple[int, ...] = ()
    #: Axes of the outputs and inputs of a weight.
    outputs: int | None = None
    inputs: int | None = None


@dataclass
class NameTable:
    """The rows, sizes and traits of a family."""

    name: str
    rows: list[NameRow] = field(default_factory=list)
    #: Keys of a config, or expressions, by the name of the size.
    sizes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Types of models, and patterns of slots, that have a trait.
    traits: dict[str, list[tuple[frozenset[str], tuple[str, ...]]]] = field(default_factory=dict)

    def trait(self, trait: str, row: NameRow, model_type: str) -> bool | None:
        """Return whether a row has a trait; None if that depends on an unknown type."""
        fitting = [
            types
            for types, slots in self.traits.get(trait, ())
            if any(fnmatchcase(row.slot, slot) for slot in slots)
        ]
        if not fitting:
            return False
        if any("*" in types or model_type in types for types in fitting):
            return True
        return False if model_type else None

    def alternates(self, row: NameRow, model_types: Iterable[str]) -> bool | None:
        """Return whether rows of the halves of heads alternate; None if that is unknown."""
        if not ("rotary" in row.flags and "alternating" in self.traits):
            return False
        types = set(map(normalise, model_types))
        if any(self.trait("alternating", row, model_type) for model_type in types):
            return True
        return False if any(self.trait("in_halves", row, t) for t in types) else None

    @cached_property
    def _rows_by_key(self) -> Mapping[tuple[str, bool], list[NameRow]]:
        """Rows by their patterns with zeros for numbers, and whether these are of tensors."""
        rows: dict[tuple[str, bool], list[NameRow]] = {}
        keys = masked([_PLACEHOLDER.sub("0", row.pattern) for row in self.rows])
        for key, row in zip(keys, self.rows, strict=True):
            rows.setdefault((shorten(key), bool(row.param)), []).append(row)
        return rows

    @cached_property
    def _flat_patterns(self) -> Mapping[str, list[re.Pattern[str]]]:
        """Patterns of modules with underscores for dots and zeros for numbers."""
        patterns: dict[str, list[re.Pattern[str]]] = {}
        for (key, is_tensor), of_key in self._rows_by_key.items():
            for row in () if is_tensor else of_key:
                words = [
                    re.escape(word)
                    if isinstance(word, str)
                    else f"{re.escape(word.before)}[0-9]{{1,{_MAX_DIGITS}}}{re.escape(word.after)}"
                    for word in row.words
                ]
                pattern = re.compile("_".join([f"({word})" for word in words]))
                patterns.setdefault(key.replace(".", "_"), []).append(pattern)
        return patterns

    def dotted(self, flat: str) -> list[str]:
        """Return the paths of modules that are equal to a text with underscores for dots."""
        patterns = self._flat_patterns.get(shorten(masked([flat])[0]), [])
        matches = [pattern.fullmatch(flat) for pattern in patterns]
        return list(dict.fromkeys(".".join(match.groups()) for match in matches if match))

    @cached_property
    def _varying(self) -> frozenset[tuple[str, bool]]:
        """Keys of several rows: ``downsample.0`` and ``downsample.1``."""
        return frozenset(
            key
            for key, rows in self._rows_by_key.items()
            if len(rows) > 1
            or any(word.isdigit() for word in rows[0].words if isinstance(word, str))
        )

    def varies(self, key: str) -> bool:
        """Return whether the row of a name depends on more than its form and shape."""
        path = key[: max(key.rfind("."), 0)]
        return (key, True) in self._varying or (path, False) in self._varying

    def matches(self, name: str, key: str, ndim: int | None = None) -> list[RowMatch]:
        """Return the rows of a name without its prefix.

        `key` is the name with a zero for each number. A match has `ndim` axes, or unknown ones.
        """
        matches = self._matches(name, key)
        if name.endswith((".kernel", ".bias")):
            matches = (_with_heads(match, ndim) for match in matches)
        return [m for m in matches if ndim is None or m.axes is None or len(m.axes) == ndim]

    def _matches(self, name: str, key: str) -> Iterator[RowMatch]:
        rows = self._rows_by_key.get((key, True))
        if rows:
            words = name.split(".")
            for row in rows:
                indices = row.indices(words)
                if indices is not None:
                    yield _match(row, row.param, indices)
        rows = self._rows_by_key.get((key[: max(key.rfind("."), 0)], False))
        if not rows:
            return
        path, _, leaf = name.rpartition(".")
        if not (leaf in _PARAMS or leaf in _OF_BATCH_NORMS or leaf in _OF_QUANTISED):
            return
        words = path.split(".")
        for row in rows:
            indices = row.indices(words)
            if indices is not None and (leaf not in _OF_BATCH_NORMS or row.module_type == "norm"):
                yield _match(row, leaf, indices)


def _match(row: NameRow, leaf: str, indices: tuple[tuple[str, int], ...]) -> RowMatch:
    """Return the match of a row with a parameter, which is called `leaf` in the name."""
    match = RowMatch(row, row.param or _PARAMS.get(leaf, leaf), indices, axes=None)
    if leaf == "kernel":  # of Flax: the window, inputs, outputs
        if row.outputs != 0:
            return match
        order = (*range(2, len(row.axes)), 1, 0)
        return match._replace(
            axes=tuple([row.axes[axis] for axis in order]),
            cuts=tuple([order.index(axis) for axis in row.cuts]),
            outputs=len(order) - 1,
            inputs=len(order) - 2,
        )
    if _PARAMS.get(leaf) == "weight":
        return match._replace(axes=row.axes, cuts=row.cuts, outputs=row.outputs, inputs=row.inputs)
    if leaf == "num_batches_tracked":
        return match._replace(axes=())
    if leaf in _OF_QUANTISED:
        return match
    if row.outputs is None or row.param:
        return match._replace(axes=row.axes, cuts=row.cuts)
    cuts = (0,) if row.outputs in row.cuts else ()
    return match._replace(axes=(row.axes[row.outputs],), cuts=cuts)


def _with_heads(match: RowMatch, ndim: int | None) -> RowMatch:
    """Return a match with an axis of heads, as attention of Flax has it, if there is one more."""
    axes = match.axes or ()
    products = [n for n, axis in enumerate(axes) if axis and _OF_HEADS.fullmatch(axis)]
    if ndim != len(axes) + 1 or len(products) != 1:
        return match
    heads = products[0]
    moved = [None if n == heads else n + (n > heads) for n in range(len(axes))]
    split = [part for n, axis in enumerate(axes)
             for part in (axis.split("*") if axis and n == heads else [axis])]  # fmt: skip
    return match._replace(
        axes=tuple(split),
        cuts=tuple([axis + (axis > heads) for axis in match.cuts]),
        outputs=None if match.outputs is None else moved[match.outputs],
        inputs=None if match.inputs is None else moved[match.inputs],
    )


def plain(name: str) -> str:
    """Return a name with dots for slashes, and without PEFT's wrapper of a module."""
    return name.replace("/", ".").replace(".base_layer.", ".")


def normalise(model_type: str) -> str:
    """Return a type in small letters only: ``gptneox`` for ``gpt_neox`` and ``GPTNeoXModel``."""
    return _SUFFIX.sub("", model_type).translate(_SEPARATORS).lower()


def shorten(key: str) -> str:
    """Return a name, whose digits are zeros, with one zero for each number."""
    return _ZEROS.sub("0", key)


# --- reading --------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def load_table(name: str) -> NameTable:
    """Read the table of a family."""
    data = pkgutil.get_data(__package__, f"tables/{name}.txt")
    if data is None:
        raise FileNotFoundError(f"xckpt is installed without its table {name}.txt")
    return parse_table(name, data.decode())


def parse_table(name: str, text: str) -> NameTable:
    """Parse the lines of a table."""
    table = NameTable(name)
    component, is_head, prefixes = "", False, [("", "")]
    rows: list[NameRow] = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        match words:
            case ["use", base_name]:
                base = load_table(base_name)
                table.rows, table.sizes = list(base.rows), dict(base.sizes)
                table.traits = {trait: list(values) for trait, values in base.traits.items()}
            case ["over", *pairs]:
                split = [pair.partition("=") for pair in pairs]
                prefixes = [("" if path == "*" else f"{path}.", slot) for path, _, slot in split]
                prefixes = prefixes or [("", "")]
            case [head] if head.startswith("["):
                section, _, of_heads = head.strip("[]").partition(":")
                is_head = section == "heads"
                component = of_heads if is_head else section
            case [trait, types, slots] if trait.startswith("@"):
                model_types = frozenset(map(normalise, types.split(",")))
                table.traits.setdefault(trait[1:], []).append(
                    (model_types, tuple(slots.split(",")))
                )
            case [size, "=", *expressions]:
                table.sizes[size] = tuple([text for text in expressions if text != "|"])
            case [pattern, slot, *fields]:
                for path, prefix in prefixes:
                    # A part of a model has no components.
                    of_row = "" if path == "" and len(prefixes) > 1 else component
                    full_slot = f"{prefix}.{slot}" if prefix else slot
                    rows.append(_row([path + pattern, full_slot, *fields], of_row, is_head=is_head))
            case _:
                raise ValueError(f"table {name} has no line like {line!r}")
    replaced = {(row.pattern, row.param) for row in rows}
    table.rows = [row for row in table.rows if (row.pattern, row.param) not in replaced] + rows
    return table


def _row(words: Sequence[str], component: str, *, is_head: bool) -> NameRow:
    full_pattern, slot, module_type, axes, *flags = words
    pattern, _, param = full_pattern.partition(":")
    matches = [(word, _INDEX.fullmatch(word)) for word in pattern.split(".")]
    cuts = next((flag.removeprefix("cut=") for flag in flags if flag.startswith("cut=")), "")
    names = () if axes == "-" else axes.split(",")
    return NameRow(
        pattern=pattern,
        words=tuple(
            [word if match is None else NumberedWord(*match.groups()) for word, match in matches]
        ),
        param=param,
        component=component,
        slot=slot,
        module_type="" if module_type == "-" else module_type,
        axes=tuple([None if axis == "?" or axis.isdecimal() else axis for axis in names]),
        cuts=tuple(map(int, cuts.split(","))) if cuts else (),
        flags=frozenset(flag for flag in flags if not flag.startswith("cut=")),
        is_head=is_head,
    )


# --- sizes ----------------------------------------------------------------------------------------


def evaluate(expression: str, sizes: Mapping[str, int]) -> int | None:
    """Return the value of a sum of products such as ``a*b+2*c``; None if a size is unknown."""
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.split("*"):
            dividend, _, divisor = factor.partition("/")
            pair = [
                int(n) if n.isdecimal() else sizes.get(n, 0) for n in (dividend, divisor or "1")
            ]
            if 0 in pair:
                return None
            product = product * pair[0] // pair[1]
        total += product
    return total


def stated_sizes(
    table: NameTable, config: Mapping[str, object], usual: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of a model that its config states, some under `usual` keys."""
    stated = {key: n for key, n in config.items() if type(n) is int and 0 < n < _LARGEST_SIZE}
    sizes = {name: size for name, size in usual.items() if name not in table.sizes}
    for name, expressions in table.sizes.items():
        values = (evaluate(text, {**stated, **usual, **sizes}) for text in expressions)
        size = next((value for value in values if value is not None), None)
        if size is not None:
            sizes[name] = size
    return sizes
