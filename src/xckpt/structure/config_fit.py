"""Fit of the config of a model to tensors that were computed from the tensors of the model.

The tensors that the config was written for show what its sizes mean: a number of layers counts
modules, and other sizes are extents of axes. A new size is certain if all of these agree on it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from xckpt.elements import WIDE_FLOATS
from xckpt.errors import some
from xckpt.formatting import counted
from xckpt.structure.config_check import (
    CONFIG_KEYS,
    LABELS,
    ConfigFit,
    check_config,
    count,
    label_counts,
    main_or_tower,
    other_rows,
    stated_classes,
)
from xckpt.structure.config_images import IMAGE_SIZE, fit_images, positions_follow_images
from xckpt.structure.config_layers import (
    Sources,
    check_edited_layers,
    exchanged_tensors,
    fit_layers,
    in_some_layers,
    ranges,
)
from xckpt.structure.facts import (
    StatedSize,
    compare_extents,
    declarations_in,
    is_gguf,
    model_facts,
    sizes_of_tower,
    sizes_stated_in,
)
from xckpt.structure.info import PARAMETERS, Described
from xckpt.structure.model import Structure
from xckpt.structure.numbering import drop_indices, parse_name, split_leaf

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    Shape = tuple[int, ...]

# Sizes that no other value follows from, as the size of a head does from the number of heads.
_INDEPENDENT = frozenset({"layer", "vocab", "ff", "ff_exp", "context"})
_SHOWN = 3
_WORD_ENDS = re.compile("[._/]")
_TIED = "tie_word_embeddings"
_CLASSES = "architectures"
_HEAD_DIM = "head_dim"
_STATE_HEAD_DIM = " (state head_dim, which otherwise follows from the width and the heads)"
_NUMBERS_OF_TOKENS = "_token_id"  # at the end of keys
# Wrappers, and usual prefixes of a base model, in their order.
_PREFIXES = ("_orig_mod.", "module.", "model.", "transformer.")
_ALL_DENSE = " (encoding={'*': {'layout': 'dense'}} writes all values, which need no declaration)"
# Where methods of quantisation list modules that stay as they are.
_EXCLUDED_KEYS = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "awq", "mxfp4"), "modules_to_not_convert"),
    "compressed-tensors": "ignore",
    "bitsandbytes": "llm_int8_skip_modules",
}


def fit_config(
    config: Mapping[str, Any],
    before: Sequence[Described],
    after: Sequence[Described],
    sources: Sources,
    edited: Mapping[str, Any] | None = None,
) -> ConfigFit:
    """Return a config with the sizes of new tensors, given the tensors that it was written for."""
    # `edited` is the config with the values that the user wants for the new tensors.
    fit = ConfigFit(deepcopy(dict(config)))
    if edited is not None:
        edited = deepcopy(dict(edited))
        keys = [*config, *edited]  # which may be removed or None
        fit.edited = frozenset([k for k in keys if edited.get(k, ...) != config.get(k, ...)])
    sizes = sizes_stated_in(fit.config)
    facts = model_facts(config if is_gguf(config) else {"config": config})
    structure = Structure(before, facts)
    old, new = ({tensor.name: tensor.shape for tensor in side} for side in (before, after))
    removed = fit_layers(fit, edited, structure, new, sources)
    remaining = [name for name in structure if name not in removed]
    removed |= _check_experts(fit, sizes.get("expert"), structure, remaining, new)
    fit.exchanged = exchanged_tensors(fit, structure, new)
    tied = edited if edited is not None and _TIED in fit.edited else fit.config
    fit.missing = _missing(fit, structure, old, new, removed.union(fit.exchanged))
    _fit_missing_head(fit, structure, old, tied)
    if not fit.renamed:
        fit.repeated = _repeated(fit, old, new)
        fit.added = _added(fit, {} if edited is None else edited, old, new)
    if _CLASSES in fit.edited:  # another class of model has other modules, such as its head
        fit.missing = _below_same_modules(fit.missing, new)
    of_images = fit_images(fit, config, edited, old, new)
    configs = config, config if edited is None else edited
    shapes = old
    if fit.has_moved_kinds:
        shapes = {name: _old_shape(name, old, new, sources) for name in old if name in new}
    _fit_axes(fit, structure, shapes, new, configs=configs, of_images=of_images)
    _fit_head(fit, Structure(after), old, sources.values, tied)
    if edited is not None and fit.edited:
        for key in fit.edited:
            fit.config.pop(key, None)
        fit.config |= {key: edited[key] for key in edited if key in fit.edited}
        # Tensors that the config contradicted before have other sizes of this name.
        problems = check_config(config, before, counts_layers=False).problems
        contradicted = {text.partition(":")[0] for text in problems}
        implied = _implied_head_dim(fit.config)
        if implied and problems != (
            check_config(
                dict(config) | _implied_head_dim(config), before, counts_layers=False
            ).problems
        ):
            implied = {}  # heads had another size
        for text in check_config(fit.config | implied, after, counts_layers=False).problems:
            if text.partition(":")[0] not in contradicted:
                fit.add_problem(
                    f"{text}{_STATE_HEAD_DIM}" if implied and _HEAD_DIM in text else text
                )
        check_edited_layers(fit, config, structure, new)
        _check_edited_labels(
            fit, config, label_counts(structure, old), label_counts(Structure(after, facts), new)
        )
    _check_tokens(fit)
    return fit


def _old_shape(
    name: str, old: Mapping[str, Shape], new: Mapping[str, Shape], sources: Sources
) -> Shape:
    """Return the shape of the old tensor of the same name, or of the layer that a new one is."""
    template = drop_indices(parse_name(name).template)
    origins = sources.names(name) if old[name] != new[name] else ()
    shapes = {
        old[origin]
        for origin in origins
        if origin in old and drop_indices(parse_name(origin).template) == template
    }
    return shapes.pop() if len(shapes) == 1 else old[name]


def _repeated(fit: ConfigFit, old: Collection[str], new: Collection[str]) -> list[str]:
    """Return the tensors that the model lacks, and that another one differs from by a prefix."""
    bare = Counter([_without_prefix(name, fit.config) for name in new])
    return [n for n in new if n not in old and bare[_without_prefix(n, fit.config)] > 1]


def _added(
    fit: ConfigFit, edited: Mapping[str, Any], old: Collection[str], new: Collection[str]
) -> list[str]:
    """Return the tensors that the model lacks, and that no edit of the config is about."""
    known = {_without_numbers(name, fit.config) for name in (*old, *fit.repeated)}
    added = [name for name in new if _without_numbers(name, fit.config) not in known]
    if _CLASSES in fit.edited:
        return in_some_layers(added, new)
    flags = [key for key in fit.edited if edited.get(key) is True]  # such as `attention_bias`
    words = {word for key in flags for word in key.split("_")}
    stated = [name for name in added if not words.isdisjoint(_WORD_ENDS.split(name))]
    expected = {*stated}.difference(in_some_layers(stated, new))
    return [name for name in added if name not in expected]


def _implied_head_dim(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the size of heads that models compute where their config states none."""
    sizes = sizes_stated_in(config)
    if "key" in sizes or not {"embd", "head"} <= sizes.keys():
        return {}
    return {_HEAD_DIM: sizes["embd"].value // sizes["head"].value}


def _check_edited_labels(
    fit: ConfigFit, config: Mapping[str, Any], old: set[int], new: set[int]
) -> None:
    """Compare edited labels with the rows of the classifier, and with each other."""
    for key in (key for key in CONFIG_KEYS["label"] if key in fit.edited and key in fit.config):
        was, now = (count(c[key]) if key in c else None for c in (config, fit.config))
        if new and now is not None and now not in new and (was is None or was in old):
            fit.problems.append(other_rows(key, now, new))
    for size in stated_classes(fit.config) if len(new) == 1 else ():
        if fit.is_edited(size) and size.value not in new:
            fit.problems.append(other_rows(fit.place(size), size.value, new))
        elif size.value in old - new:
            fit.correct(size, *new)
    labels, numbers = (fit.config.get(key) for key in LABELS)
    if isinstance(labels, dict) and isinstance(numbers, dict):
        _relate_labels(fit, labels, numbers)


def _relate_labels(fit: ConfigFit, labels: dict[Any, Any], numbers: dict[Any, Any]) -> None:
    """Let labels, or their numbers, follow an edit of the other ones; note a contradiction."""
    pairs = {(str(number), str(label)) for number, label in labels.items()}
    if fit.edited.isdisjoint(LABELS) or pairs == {
        (str(number), label) for label, number in numbers.items()
    }:
        return
    is_distinct = all(number.isdecimal() for number, _ in pairs) and len(
        {label for _, label in pairs}
    ) == len(labels)
    if "label2id" not in fit.edited and is_distinct:
        fit.config["label2id"] = {str(label): int(number) for number, label in labels.items()}
    elif "id2label" not in fit.edited and len({*map(str, numbers.values())}) == len(numbers):
        fit.config["id2label"] = {str(number): label for label, number in numbers.items()}
    else:
        fit.contradicted_key = "id2label" if "label2id" in fit.edited else "label2id"


def _fit_head(
    fit: ConfigFit,
    structure: Structure,
    old: Collection[str],
    sources: Mapping[str, Any],
    stated: Mapping[str, Any],
) -> None:
    """State that the head is not tied to the embeddings if its values are others."""
    head, table = structure.weight_of("output"), structure.weight_of("token_embedding")
    if head is None or table is None:
        return
    is_apart = not may_be_tied(stated)
    if not is_apart and _TIED not in fit.edited:
        is_apart = head not in old or sources[head] != sources[table]
        if is_apart:
            untie_head(fit)
    if is_apart:
        fit.added = [name for name in fit.added if name != head]


def _fit_missing_head(
    fit: ConfigFit, structure: Structure, old: Mapping[str, Shape], stated: Mapping[str, Any]
) -> None:
    """Take a head for the table of tokens if the config states that they are tied."""
    head, table = structure.weight_of("output"), structure.weight_of("token_embedding")
    if table is None or (head is not None and sorted(old[head]) != sorted(old[table])):
        return
    without_head = [name for name in fit.missing if structure[name].slot != "output"]
    if may_be_tied(stated):
        fit.missing = without_head
    else:
        fit.lacks_head = _TIED in stated and not without_head


def untie_head(fit: ConfigFit) -> None:
    """State that the head is not tied to the embeddings."""
    was = fit.config.get(_TIED, "not stated")
    fit.config[_TIED] = False
    fit.corrections.append(f"{_TIED}: False (was {was})")


def may_be_tied(config: Mapping[str, Any]) -> bool:
    """Return whether a table may be tied to the head, which transformers need not state."""
    return config.get(_TIED, "model_type" in config) is True


def _check_tokens(fit: ConfigFit) -> None:
    """Find numbers of tokens without a row in a vocabulary that became smaller."""
    size = sizes_stated_in(fit.config).get("vocab")
    is_edited = any(key.endswith(_NUMBERS_OF_TOKENS) for key in fit.edited)
    if size is not None and (fit.has_fewer_tokens or is_edited):
        for section in (fit.config, size.section):
            fit.unknown_tokens |= dict.fromkeys(tokens_without_row(section, size.value))


def tokens_without_row(section: Mapping[str, Any], rows: int) -> list[str]:
    """Return the numbers of tokens that a vocabulary of so many rows lacks, with their keys."""
    return [f"{key}: {number}" for key, number in numbers_of_tokens(section) if number >= rows]


def numbers_of_tokens(section: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the keys of a section that name tokens by their numbers, with each of these."""
    return [
        (key, number)
        for key, value in section.items()
        if key.endswith(_NUMBERS_OF_TOKENS)
        for number in (value if isinstance(value, list) else [value])
        if type(number) is int and number >= 0
    ]


def fit_quantization(
    fit: ConfigFit,
    dense: Sequence[str],
    tensors: Sequence[Described],
    codes: Collection[str],
    *,
    is_quantized: bool,
) -> None:
    """List modules as not quantised whose weights are dense; remove declarations if all are.

    `dense` has the weights that were quantised, and `codes` the names of stored parts of others.
    """
    if not is_quantized:
        _remove_quantization(fit.config)
        return
    modules = list(dict.fromkeys(split_leaf(name)[0] for name in dense))
    for place, value in declarations_in(fit.config) if modules else ():
        method = value.get("quant_method") if isinstance(value, dict) else None
        key = _EXCLUDED_KEYS.get(method) if isinstance(method, str) else None
        listed = value.get(key) if key else ...
        if listed is None:  # a list replaces the default of transformers, which has the head
            value[key] = _dense_modules(fit, tensors, codes)
            number = counted(len(value[key]), "module")
            fit.corrections.append(f"{'.'.join(place)}.{key}: {number} (was not stated)")
            continue
        if not isinstance(listed, list):
            names = some(list(dense), most=_SHOWN)
            reason = f"{'.'.join(place)} has no place for weights that are dense"
            fit.problems.append(f"{reason}{_ALL_DENSE}: {names}")
            continue
        value[key] = [*listed, *(module for module in modules if module not in listed)]
        fit.corrections.append(f"{'.'.join(place)}.{key}: {counted(len(modules), 'more module')}")


def _dense_modules(
    fit: ConfigFit, tensors: Sequence[Described], codes: Collection[str]
) -> list[str]:
    """Return the modules whose matrices are dense, and a tied head, which has no tensor."""
    names = [
        tensor.name
        for tensor in tensors
        if len(tensor.shape) > 1 and tensor.dtype in WIDE_FLOATS and tensor.name not in codes
    ]
    structure = Structure(tensors, model_facts({"config": fit.config}))
    table = structure.weight_of("token_embedding")
    if table is not None and structure.models and structure.weight_of("output") is None:
        names += filter(None, [structure.models.name_beside(table, "output")])
    with_codes = {name[: dot.start()] for name in codes for dot in re.finditer(r"\.", name)}
    modules = dict.fromkeys(split_leaf(name)[0] for name in names)
    return [module for module in modules if module not in with_codes]


def _remove_quantization(config: dict[str, Any]) -> None:
    """Remove the declarations of quantisation."""
    for place, _ in list(declarations_in(config)):
        section = config
        for key in place[:-1]:
            section = section[key]
        section.pop(place[-1], None)


def _check_experts(
    fit: ConfigFit,
    size: StatedSize | None,
    structure: Structure,
    old: Collection[str],
    new: Collection[str],
) -> set[str]:
    """Note other experts, whose number more keys depend on; return the tensors that are gone."""
    numbers = {name: dict(structure[name].indices).get("expert") for name in old}
    gone = {name: n for name, n in numbers.items() if n is not None and name not in new}
    lost = {*gone.values()}
    if size is None or not 0 < len(lost) < len({*numbers.values()} - {None}):  # none of them left
        return set()
    text = f"{size.key} {size.value}: the tensors lack experts {ranges(lost)}"
    fit.add_problem(text, [fit.place(size)])
    return {*gone}


def _missing(
    fit: ConfigFit,
    structure: Structure,
    old: Mapping[str, Shape],
    new: Mapping[str, Shape],
    removed: Collection[str],
) -> list[str]:
    """Return the weights of the model that are missing, unless all of them have other names."""
    missing = [name for name in old if name not in new and name not in removed]
    if Counter([old[n] for n in missing]) == Counter([s for n, s in new.items() if n not in old]):
        names = {_without_prefix(name, fit.config) for name in new}
        renamed = [name for name in missing if _without_prefix(name, fit.config) not in names]
        if renamed := names_that_stay(fit, renamed, structure):
            fit.renamed = f"no tensor has the name {some(renamed, 'names', _SHOWN)} any more"
        return []
    return [name for name in missing if structure[name].role in PARAMETERS]


def names_that_stay(fit: ConfigFit, names: Sequence[str], structure: Structure) -> list[str]:
    """Return the names that an edited class of model has, too: those in layers."""
    if _CLASSES not in fit.edited:
        return list(names)
    return [name for name in names if "layer" in dict(structure[name].indices)]


def _below_same_modules(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the names whose first module others have, too."""
    modules = {name.partition(".")[0] for name in others}
    return [name for name in names if name.partition(".")[0] in modules]


def _without_prefix(name: str, config: Mapping[str, Any]) -> str:
    """Remove the prefixes that loaders of models add and remove themselves."""
    family = config.get("model_type")
    for prefix in (*_PREFIXES, f"{family}.") * 2:  # in any order
        name = name.removeprefix(prefix)
    return name


def _without_numbers(name: str, config: Mapping[str, Any]) -> str:
    return drop_indices(parse_name(_without_prefix(name, config)).template)


def _fit_axes(
    fit: ConfigFit,
    structure: Structure,
    old: Mapping[str, Shape],
    new: Mapping[str, Shape],
    *,
    configs: Sequence[Mapping[str, Any]],  # before and after edits
    of_images: Collection[tuple[str, int]],  # axes that fit the images
) -> None:
    """Correct the sizes that are extents of axes."""
    # By tower and axis.
    extents: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    sizes: dict[str, dict[str, StatedSize]] = {}
    unexplained: dict[str, None] = {}
    keys: dict[str, None] = {}  # of the config, which may have to be edited
    problems: dict[str, str] = {}  # by key
    # Models of two labels state none in their config.
    labels = {count(fit.config.get(key)) for key in CONFIG_KEYS["label"] if key in fit.edited}
    for name in [name for name in old if name in new]:
        if len(old[name]) != len(new[name]):
            unexplained[name] = None
            continue
        stated, contradictions, unedited = compare_extents(name, old[name], new[name], configs)
        problems |= contradictions
        shapes = zip(old[name], new[name], strict=True)
        tower = main_or_tower(name, fit.config)
        if tower not in sizes:
            sizes[tower] = sizes_of_tower(fit.config, tower)
        of_section = configs[1].get(tower) if tower in fit.edited else None
        edited = [*of_section.values()] if isinstance(of_section, dict) else []
        for number, (axis, pair) in enumerate(zip(structure[name].axes, shapes, strict=True)):
            # Other axes may have the same extent, such as labels and layers.
            size = sizes[tower].get(axis or "")
            is_size = size.value == pair[0] if size is not None else "*" in (axis or "")
            is_edited = pair[0] != pair[1] and pair[1] in (labels if axis == "label" else edited)
            if axis is not None and is_size and (size is not None or not is_edited):
                extents[tower, axis].add(pair)
            elif (name, number) in of_images or number in stated or is_edited:
                continue
            elif pair[0] != pair[1]:
                unexplained[name] = None
                of_axis = [key for key in CONFIG_KEYS.get(axis or "", ()) if key in fit.config]
                keys |= dict.fromkeys(of_axis or (LABELS if axis == "label" else ()))
                keys |= dict.fromkeys(unedited.get(number, ()))
    fit.problems += problems.values()
    for (tower, axis), pairs in extents.items():
        _fit_size(fit, axis, pairs, sizes[tower])
    if unexplained:
        name = min(unexplained)
        names = some(sorted(unexplained), most=_SHOWN)
        text = f"other shapes than before: {names} ({old[name]} to {new[name]})"
        is_of_images = any(positions_follow_images(name, fit.config) for name in unexplained)
        shown = [*keys, *([IMAGE_SIZE] if is_of_images else [])]
        fit.add_problem(f"{text}; see {some(shown, '')}" if shown else text, keys)


def _fit_size(
    fit: ConfigFit, axis: str, extents: set[tuple[int, int]], sizes: Mapping[str, StatedSize]
) -> None:
    """Correct a size if all axes that have it agree on a new one."""
    if all(old == new for old, new in extents):
        return
    if axis == "vocab":
        fit.has_other_tokens = True
        fit.has_fewer_tokens = any(new < old for old, new in extents)
    if axis in _INDEPENDENT and len(extents) == 1:
        fit.correct(sizes[axis], next(iter(extents))[1])
        return
    factors = [sizes[name] for name in axis.split("*") if name in sizes]
    stated = [f"{fit.place(size)} {size.value}" for size in factors]
    new_sizes = " and ".join([str(new) for _, new in sorted(extents)])
    was = "" if axis in sizes else f" instead of {min(extents)[0]}"
    text = f"{' and '.join(stated) or axis}: the tensors have {new_sizes}{was}"
    fit.add_problem(text, map(fit.place, factors))
