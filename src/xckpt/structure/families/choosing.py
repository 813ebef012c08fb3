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
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from xckpt.structure.conventions import role_by_name
from xckpt.structure.facts import ModelFacts
from xckpt.structure.families.family import AGREEING, Family, Root, ShapedForm
from xckpt.structure.families.tables import load_table, normalise, plain, shorten
from xckpt.structure.forms import masked
from xckpt.structure.info import OF_TRAINING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from xckpt.structure.families.family import Kind
    from xckpt.structure.families.tables import NameTable, RowMatch

# Share of the names of a model that a table has to explain.
_OF_STATED, _OF_NAMES = 0.5, 0.9
# A model has at least as many forms of names, and no model more.
_FEWEST, _MOST = 4, 10_000
# Names with more words belong to no family, and a checkpoint has few models.
_MOST_WORDS, _MOST_ROOTS = 32, 64
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
_MAIN = frozenset({"", "text", "unet", "transformer"})
_WRAPPERS = frozenset({
    "model", "module", "_orig_mod", "base_model", "transformer", "state_dict", "params", "backbone",
    "bert", "roberta", "gpt_neox", "rwkv", "clip", "vit",
})  # fmt: skip


def component_of(words: Iterable[str]) -> str:
    """Return the component that the words in front of a name state; empty without one."""
    return next((_COMPONENTS[word] for word in words if word in _COMPONENTS), "")


# --- the tables -----------------------------------------------------------------------------------


@dataclass
class ListedTable:
    """A table in the list of tables."""

    table: str
    family: str
    types: tuple[str, ...] = ()
    signs: frozenset[str] = frozenset()
    unlike: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()

    def describes(self, model_type: str) -> bool:
        """Return whether the table is for a type of model, in small letters only."""
        return any(fnmatchcase(model_type, pattern) for pattern in self.types)


@lru_cache(maxsize=1)
def list_tables() -> tuple[ListedTable, ...]:
    """Return the list of tables."""
    data = pkgutil.get_data(__package__, "tables/index.txt") or b""
    entries: list[ListedTable] = []
    for line in data.decode().splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        if words[0].startswith("["):
            table = words[0].strip("[]")
            entries.append(ListedTable(table, words[-1] if len(words) > 1 else table))
        elif words[0] == "types":
            entries[-1].types += tuple(map(normalise, words[1:]))
        elif words[0] == "signs":
            entries[-1].signs |= set(words[1:])
        elif words[0] == "needs":
            entries[-1].needs |= set(words[1:])
        else:
            entries[-1].unlike |= set(words[1:])
    return tuple(entries)


def related_tables(family: Family | None, types: Iterable[str]) -> list[NameTable]:
    """Return the tables of all names that libraries give to the models of a family."""
    entries = list_tables()
    names = {root.table.name for root in family.roots} if family is not None else set()
    families = {entry.family for entry in entries if entry.table in names}
    types = list(map(normalise, types))
    related = [
        entry.table
        for entry in entries
        if entry.family in families or any(entry.describes(model_type) for model_type in types)
    ]
    # A family that is known by its tensors in GGUF only may have the names of any table.
    if not set(related) - {"gguf"}:
        related = [entry.table for entry in entries] if names else []
    return [load_table(name) for name in dict.fromkeys((*related, "gguf")) if related]


def has_table(types: Iterable[str]) -> bool:
    """Return whether there are names of tensors for one of these types of models."""
    entries = [entry for entry in list_tables() if entry.table != "gguf"]
    return any(entry.describes(t) for t in map(normalise, types) for entry in entries)


@lru_cache(maxsize=1)
def _renamed_modules() -> dict[str, str]:
    """Return a pattern of the names that modules do not have, by types and classes of models."""
    text = (pkgutil.get_data(__package__, "renamed.txt") or b"").decode()
    patterns: dict[str, str] = {}
    for block in text.split("\n\n")[1:]:
        words = [line.split() for line in block.splitlines() if not line.startswith(" ")]
        lines = [line.strip() for line in block.splitlines() if line.startswith(" ")]
        pattern = "|".join([f"(?:{line})" for line in lines])
        patterns |= {model: pattern for line in words for model in line}
    return patterns


def under_other_modules(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the names in the files of a model that transformers gives to no module."""
    patterns, classes = _renamed_modules(), config.get("architectures")
    stated = [*(classes if isinstance(classes, list) else []), config.get("model_type")]
    pattern = next((patterns[str(model)] for model in stated if str(model) in patterns), None)
    return [] if pattern is None else [name for name in names if re.search(pattern, name)]


# --- choosing -------------------------------------------------------------------------------------


def family_of(
    shapes: Mapping[str, tuple[int, ...]], facts: ModelFacts | None = None
) -> Family | None:
    """Return the family of a checkpoint; None if it is unknown or ambiguous.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        Shapes of the tensors, by name.
    facts : ModelFacts, optional
        Facts about the model. Its type outranks the names, and its sizes those of the tensors.
    """
    kinds = list(zip(masked(list(shapes)), shapes.values(), strict=True))
    forms = _forms(shapes, kinds)
    facts = facts or ModelFacts()
    types = list(map(normalise, facts.types))
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
    roots += _twins(roots, shapes)
    _mark_members(roots)
    _name_components(roots)
    first = max(roots, key=lambda root: (root.component in _MAIN, len(root.matches)))
    name = next(entry.family for entry in entries if entry.table == first.table.name)
    return Family("" if name == "gguf" else name, roots, shapes, facts, kinds)


def _forms(names: Collection[str], kinds: Sequence[Kind]) -> list[ShapedForm]:
    """Group tensors whose names differ in numbers only, by their shapes."""
    counts = Counter(kinds)
    if len(counts) > _MOST:
        return []
    first = dict(zip(reversed(kinds), reversed(list(names)), strict=True))
    forms: dict[tuple[str, tuple[int, ...]], ShapedForm] = {}
    for (key, shape), count in counts.items():
        # An adapter or an optimizer, beside the model.
        if ".lora_" in key or role_by_name(key, "float32", shape) in OF_TRAINING:
            continue
        name, short = plain(first[key, shape]), plain(shorten(key))
        same = forms.get((short, shape), ShapedForm(name, short, shape, 0))
        forms[short, shape] = same._replace(total=same.total + count)
    return list(forms.values())


def _tails(key: str) -> Iterator[tuple[str, int]]:
    """Yield a name, and the text after each of its dots, with the number of words before it."""
    if key.count(".") > _MOST_WORDS:
        return
    yield key, 0
    position, number = key.find("."), 1
    while position >= 0:
        yield key[position + 1 :], number
        position, number = key.find(".", position + 1), number + 1


def _paths(keys: Iterable[str]) -> set[str]:
    """Return the ends of names, with and without the parameter of the module."""
    tails = {tail for key in keys for tail, _ in _tails(key)}
    return tails | {tail.rpartition(".")[0] for tail in tails}


def _roots(entry: ListedTable, forms: Iterable[ShapedForm], model_type: str) -> list[Root]:
    """Return the models in a checkpoint that a table explains."""
    table = load_table(entry.table)
    by_prefix: dict[str, dict[ShapedForm, list[RowMatch]]] = {}
    heads: list[tuple[str, ShapedForm, list[RowMatch]]] = []
    for form in forms:
        words = form.name.split(".")
        for tail, number in _tails(form.key):
            matches = table.matches(".".join(words[number:]), tail, len(form.shape))
            if not matches:
                continue
            prefix = "".join([f"{word}." for word in words[:number]])
            if matches[0].row.is_head:
                heads.append((prefix, form, matches))
            else:
                by_prefix.setdefault(prefix, {})[form] = matches
    if not by_prefix and heads:
        by_prefix[heads[0][0]] = {}
    # A selection of a model that is stated may be one tensor.
    fewest = 1 if model_type and entry.table != "gguf" else _FEWEST
    roots = []
    used: set[ShapedForm] = set()
    ordered = sorted(by_prefix.items(), key=lambda item: -len(item[1]))
    for prefix, explained in ordered[:_MOST_ROOTS]:
        explained |= {form: rows for before, form, rows in heads if prefix.startswith(before)}
        if len(explained) < fewest or len(used.intersection(explained)) * 2 > len(explained):
            continue
        root = Root(prefix, table, model_type, explained, family=entry.family)
        if _explains(root, entry, forms):
            roots.append(root)
            used |= explained.keys()
    return roots


def _explains(root: Root, entry: ListedTable, forms: Iterable[ShapedForm]) -> bool:
    """Return whether a table explains the names below a prefix."""
    region = {form.key for form in forms if form.name.startswith(root.prefix)}
    explained = {form.key for form in root.matches}
    share = len(explained & region) / max(len(region), 1)
    start = len(root.prefixes[0][1])
    if root.model_type and entry.table != "gguf":
        has_all = not entry.needs or entry.needs <= _paths(key[start:] for key in region)
        return has_all and share >= _OF_STATED
    paths = _paths(key[start:] for key in region)
    if share < _OF_NAMES or paths.isdisjoint(entry.signs) or not paths.isdisjoint(entry.unlike):
        return False
    widths: dict[str, Counter[int]] = {}
    for form, rows in root.matches.items():
        for axis, extent in zip(rows[0].axes or (), form.shape, strict=False):
            if axis == "embd":
                widths.setdefault(rows[0].row.component, Counter())[extent] += form.total
    return all(max(w.values()) >= AGREEING * w.total() for w in widths.values())


def _without_conflicts(roots: Collection[Root], *, is_stated: bool) -> list[Root]:
    """Drop models whose tensors a second table explains, too."""
    # A config states the type, so that the table that explains most is right.
    ordered = sorted(roots, key=lambda root: -len(root.matches))
    if is_stated:
        chosen: list[Root] = []
        for root in ordered:
            if not any(_overlap(root, rival) for rival in chosen):
                chosen.append(root)
        return chosen
    # Blocks of a model may look like another model.
    ordered = [root for root in ordered if not any(_is_part(root, whole) for whole in ordered)]
    return [
        root
        for root in ordered
        if not any(_overlap(root, rival) for rival in ordered if rival is not root)
    ]


def _is_part(root: Root, whole: Root) -> bool:
    """Return whether a model is a part of another one, which explains all of its tensors."""
    is_below = root.prefix != whole.prefix and root.prefix.startswith(whole.prefix)
    return is_below and root.matches.keys() <= whole.matches.keys()


def _overlap(root: Root, rival: Root) -> bool:
    shared = len(root.matches.keys() & rival.matches.keys())
    return shared * 2 > min(len(root.matches), len(rival.matches))


def _twins(roots: Collection[Root], shapes: Iterable[str]) -> list[Root]:
    """Return the models whose prefixes differ in a number: ``models.1.`` beside ``models.0.``."""
    twins: dict[str, Root] = {}
    for root in roots:
        pattern = _pattern(root.prefix)
        if pattern == re.escape(root.prefix):
            continue
        matches = map(re.compile(pattern).match, map(plain, shapes))
        twins |= {match[0]: root for match in matches if match is not None}
    for root in roots:
        twins.pop(root.prefix, None)
    return [replace(root, prefix=prefix) for prefix, root in [*twins.items()][:_MOST_ROOTS]]


def _pattern(prefix: str) -> str:
    return re.sub(r"[0-9]+", "[0-9]+", re.escape(prefix))


def _mark_members(roots: Collection[Root]) -> None:
    """Mark the models of an ensemble, whose prefixes differ in a number."""
    patterns = Counter(_pattern(root.prefix) for root in roots)
    for root in roots:
        root.is_member = patterns[_pattern(root.prefix)] > 1


def _name_components(roots: Collection[Root]) -> None:
    """Name the components of a checkpoint with several models."""
    for root in roots if len(roots) > 1 else ():
        words = root.prefix.split(".")[:-1]
        parts = [_COMPONENTS[word] for word in words if word in _COMPONENTS]
        if "conditioner" in words:  # Stable Diffusion XL in a single file
            root.component = "text_encoder_2" if "1" in words else "text_encoder"
        elif parts:
            is_transformer = parts[-1] == "unet" and root.family != "unet"
            root.component = "transformer" if is_transformer else parts[-1]
        else:
            root.component = ".".join([word for word in words if word not in _WRAPPERS])
