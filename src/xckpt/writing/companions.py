"""Files that describe a model, written beside a new file of its tensors.

They come from the folder of the checkpoint that most tensors are read or computed from, as far as
they still hold, and configs that are missing there from the attributes. The config gets the sizes
and the element type of the new tensors, and keeps its ``quantization_config`` if codes are written;
it is left out if it does not fit otherwise. Names of code are removed, and code is never copied.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import some
from xckpt.formatting import counted
from xckpt.index import StoredList
from xckpt.quantization.model import parse_json
from xckpt.storage import write_file
from xckpt.structure.config_check import (
    LABELS,
    ConfigFit,
    check_config,
    check_extents,
    check_labels,
)
from xckpt.structure.config_fit import (
    fit_config,
    fit_quantization,
    may_be_tied,
    names_that_stay,
    numbers_of_tokens,
    tokens_without_row,
    untie_head,
)
from xckpt.structure.config_images import check_channels, values_of_channels, with_new_images
from xckpt.structure.config_layers import edited_kinds
from xckpt.structure.facts import is_gguf, model_facts, sections_of, sizes_stated_in
from xckpt.structure.info import Described
from xckpt.structure.model import Structure
from xckpt.writing.companion_notes import content_bytes, notes_of
from xckpt.writing.config_edits import TYPE, with_values
from xckpt.writing.config_types import main_type, other_types, with_types
from xckpt.writing.origins import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION,
    PARSED,
    Origin,
    is_readable,
    origin_of,
    read_json,
)
from xckpt.writing.sentence_modules import SentenceModules, sentence_modules
from xckpt.writing.tokenizers import FILES, ChosenTokenizer, choose_tokenizer, numbers_in
from xckpt.writing.value_sources import stored_names, value_sources
from xckpt.writing.vocabulary import (
    are_rows_moved,
    has_table_of_tokens,
    is_head_apart,
    is_table_of_tokens,
    moved_routers,
    moved_tokens,
)

if TYPE_CHECKING:
    from xckpt.formats.plan import WantedTensor
    from xckpt.writing.fitting import Changes
    from xckpt.writing.payloads import Gathered
    from xckpt.writing.targets import Target

# Files of transformers that hold if the config does.
_OF_MODEL = (GENERATION, *(_OF_IMAGES := ("preprocessor_config.json", "processor_config.json")))
_CORRECTED = "config.json has new values, as the tensors have"
_CORRECTED_ATTRS = "attributes have new values, as the tensors have"
_CONTRADICTED_ATTRS = "attributes that the tensors contradict"
_TOKENS = "tokenizer.ggml.tokens"
_OTHER_TOKENS = "lists of the tokenizer stay as they are, which llama.cpp compares with the tables"
_ADDED = (
    "tensors that {}/ lacks, which libraries ignore or refuse (unless attrs['config'] states their "
    "class in 'architectures', and the labels of a head)"
)
_REPEATED = "tensors with the names of others except for a prefix; libraries take one of both"
_OTHER_EXPERTS = "rows of routers that are in another order than the experts"
_UNKNOWN_TOKENS = "{} names tokens that have no row"
_MOVED_TOKENS = "{} names tokens whose rows moved (state their new numbers in {})"
# Files whose contents may change.
_READ = frozenset({*PARSED, ADAPTER_CONFIG, GENERATION, *_OF_IMAGES})
_OF_MODULES = "modules that were not opened (open, combine and save each, into the new folder)"
_NEW_IMAGES = "{} has new values, as config.json has"
_OLD_CHANNELS = "values for each channel that images no longer have (state them in that file)"
_NO_TABLE = "no table of tokens is written"
_EXCHANGED = "tensors that layers no longer have, as the edited {} of config.json must state"
_REORDERED = "the rows of the vocabulary are in another order"
_NO_CONFIG = (
    "no config.json or tokenizer is known for the tensors, and none is written; copy those of the "
    "model, such as"
)
_FACTORS = frozenset({"lora_A", "lora_embedding_A"})


def fit_attributes(gathered: Gathered, changes: Changes) -> Gathered:
    """Return a new file whose attributes state the sizes of its tensors; note the changes."""
    attrs, payloads = gathered.attrs, gathered.payloads
    is_flat = is_gguf(attrs)
    stated = attrs if is_flat else attrs.get("config")
    if not isinstance(stated, Mapping) or not sizes_stated_in(stated):
        return gathered
    config = {
        key: value
        for key, value in stated.items()
        if key.endswith("_token_id") or not key.startswith("tokenizer.")
    }
    tokens = attrs.get(_TOKENS)
    if is_flat and isinstance(tokens, list | StoredList):
        config.setdefault(f"{attrs['general.architecture']}.vocab_size", len(tokens))
    after = [Described(payload.name, payload.dtype, payload.shape) for payload in payloads]
    origin = origin_of(gathered)
    before = origin.written({t.name: t.dtype for t in after}).tensors
    if not before:
        return gathered
    fit = fit_config(config, before, after, value_sources(origin, payloads))
    if fit.missing:  # a part of a model
        return gathered
    if main_type(before) != main_type(after):
        fit.config = with_types(fit.config, after)
    corrections = [text for text in fit.corrections if text.partition(":")[0] in stated]
    changes.add_all(_CORRECTED_ATTRS, corrections)
    changes.add_all(_CONTRADICTED_ATTRS, fit.problems)
    changes.add_all(_UNKNOWN_TOKENS.format("attributes"), fit.unknown_tokens)
    _check_experts(changes, origin, payloads, fit.config)
    if _TOKENS in attrs and fit.has_other_tokens:
        changes.add(_OTHER_TOKENS, f"{_TOKENS}: {len(attrs[_TOKENS])}")
    structure, numbers = Structure(after), [number for _, number in numbers_of_tokens(stated)]
    has_tokens = _TOKENS in attrs or bool(numbers)
    if has_tokens and are_rows_moved(payloads, structure, stored=origin.array):
        changes.add_all(f"{_REORDERED} than in", [_TOKENS] if _TOKENS in attrs else [])
        moved = moved_tokens(payloads, structure, numbers, origin.array)
        old = origin.in_file if is_flat else origin.config_in_attributes(CONFIG) or {}
        unedited = {key: stated[key] for key in stated if old.get(key, stated[key]) == stated[key]}
        text = _MOVED_TOKENS.format("attributes", "ds.attrs")
        changes.add_all(text, _keys_of_tokens(unedited, moved))
    new = {key: value for key, value in fit.config.items() if key in stated}
    return gathered._replace(attrs={**attrs, **(new if is_flat else {"config": {**stated, **new}})})


class Companions(NamedTuple):
    """Files to write beside a new file by name: new contents, or a file to copy."""

    contents: Mapping[str, bytes | Path]

    def write(self, target: Target) -> None:
        """Write all files; existing ones stay, unless they are to be overwritten."""
        for name, content in self.contents.items():
            path = Path(target.companion(name))
            if path.exists() and not target.overwrite:
                continue
            path.parent.mkdir(exist_ok=True)  # of a module
            if isinstance(content, bytes) or not (path.exists() and content.samefile(path)):
                write_file(str(path), content_bytes(content), overwrite=target.overwrite)


def companions_of(
    origin: Origin, tensors: Mapping[str, WantedTensor], target: Target, changes: Changes
) -> Companions:
    """Return the files that describe the origin of tensors and still hold for them."""
    after = [Described(t.name, t.dtype, t.shape) for t in tensors.values()]
    types = {t.name: t.dtype for t in after}
    before, quantized, dense = origin.written(types)
    old, place = Structure(origin.decoded), origin.folder or Path()
    tokenizer = choose_tokenizer(origin, tensors, Structure(after), old)
    beside = _beside(origin, tokenizer)
    in_file, of_adapter = beside.unedited(CONFIG), beside.unedited(ADAPTER_CONFIG)
    edited = origin.edited(CONFIG, in_file)
    generation = _generation(origin, tokenizer, beside.parsed.get(GENERATION), in_file, edited)
    config, edited, renumbered = _with_numbers(tokenizer, in_file, edited)
    is_stated = beside.is_stated(CONFIG if config else ADAPTER_CONFIG)
    if is_stated or edited.get(TYPE) != config.get(TYPE):
        before = []  # the tensors of another model
    fit = _fit((config, edited), before, after, origin, tensors)
    fit.missing = [name for name in fit.missing if not origin.has_twin(name, tensors)]
    old_names = [tensor.name for tensor in before]
    if fit.missing and _have_no_name_of(old_names, tensors):
        in_memory = _in_memory(origin, tensors.values())
        return companions_of(in_memory, tensors, target, changes) if in_memory else Companions({})
    fit.renamed = fit.renamed or _with_other_prefixes(names_that_stay(fit, old_names, old), tensors)
    fit.corrections += renumbered
    fit.has_fewer_tokens &= not tokenizer.is_of_another
    is_quantized = bool(quantized) or origin.may_have_codes(fit.config, types)
    codes = {part for name in quantized for part in origin.codes[name]}
    fit_quantization(fit, dense, after, codes, is_quantized=is_quantized)
    _check_order(fit, origin, tensors.values(), beside.files, generation.document)
    _check_experts(changes, origin, tensors.values(), fit.config)
    adapter = origin.edited(ADAPTER_CONFIG, of_adapter)
    has_new_adapter = adapter != of_adapter  # which the user states for these tensors
    dropped = _reasons(fit, [*beside.names], len(before), has_new_adapter=has_new_adapter)
    dropped |= _other_ranks(adapter, before, after)
    if has_table_of_tokens(old) and not _keeps_table(origin, old, tensors.values(), after):
        if not dropped:
            beside = beside.without(FILES)
        dropped = dict.fromkeys(FILES, _NO_TABLE) | dropped
    # Kernels of codes compute in the type that the config states.
    fitted = fit.config if quantized else with_types(fit.config, after)
    documents = {CONFIG: fitted, ADAPTER_CONFIG: adapter, GENERATION: generation.document}
    documents |= {n: with_new_images(beside.unedited(n), in_file, fitted) for n in _OF_IMAGES}
    new = {n: documents[n] for n in documents if beside.unedited(n) or n == GENERATION}
    contents = _contents(beside, new, dropped, target, changes)
    if not beside.names and _is_model(origin, after, target):
        changes.add(_NO_CONFIG, CONFIG)
    written = new.get(CONFIG) if CONFIG in contents else None
    notes = (
        notes_of(origin, contents, beside.files, tokenizer, is_compared=bool(before)),
        _other_parts(beside, contents, new, in_file, fitted),
        other_types(written or {}, config, [t for t in before if t.name not in dense], after),
    )
    for change, name in chain.from_iterable(notes):
        changes.add(change, name)
    if CONFIG in beside.files:
        changes.add_all(_REPEATED, fit.repeated)
        changes.add_all(_ADDED.format(place.name), fit.added)
    _add_changes(changes, contents, fit, target, generation)
    return Companions(contents)


class _Beside(NamedTuple):
    """Files beside the tensors by name, and objects of JSON: of these files, or without a file."""

    files: Mapping[str, Path]
    parsed: Mapping[str, dict[str, Any] | None]
    #: Objects of the attributes, and as they were before the user edited them.
    stated: Mapping[str, dict[str, Any]]
    opened: Mapping[str, dict[str, Any]]
    #: Modules that have tensors, with the folders of their models.
    modules: Mapping[str, Path]

    @property
    def names(self) -> list[str]:
        """Names of all files, copied or written anew."""
        return [*self.files, *self.stated]

    def unedited(self, name: str) -> dict[str, Any]:
        """Return an object of JSON that describes the old tensors; empty without one."""
        return self.parsed.get(name) or self.opened.get(name) or self.stated.get(name) or {}

    def is_stated(self, name: str) -> bool:
        """Return whether the user stated an object as a whole."""
        return name in self.stated and name not in self.opened

    def without(self, names: Collection[str]) -> _Beside:
        """Return the files that have other names."""
        return self._replace(files={n: path for n, path in self.files.items() if n not in names})


def _beside(origin: Origin, tokenizer: ChosenTokenizer) -> _Beside:
    """Return the files that describe a model, with all files of its tokenizer and modules."""
    names = [CONFIG, ADAPTER_CONFIG, *_OF_MODEL] if origin.folder else []
    place = origin.folder or Path()
    files = {name: path for name in names if is_readable(path := place / name)}
    # Only one part of a composed model reads images.
    for name in _OF_IMAGES if files else ():
        paths = [path for folder in origin.others if is_readable(path := folder / name)]
        if len(paths) == 1:
            files.setdefault(name, paths[0])
    modules = sentence_modules(place) if origin.folder else SentenceModules({}, [])
    files |= tokenizer.tokenizer.files | modules.files
    read = {name: read_json(files[name]) for name in files if name in _READ}
    # Other files than objects are copied, unless they may have code.
    parsed = {name: read[name] for name in read if name in PARSED or read[name] is not None}
    stated = {name: config for name, config in origin.configs.items() if name not in files}
    opened = {name: config for name in stated if (config := origin.config_in_attributes(name))}
    with_tensors = dict.fromkeys(modules.with_tensors, place)
    return _Beside(files, parsed, stated, opened, with_tensors)


def _other_parts(
    beside: _Beside,
    contents: Collection[str],
    documents: Mapping[str, dict[str, Any]],
    old: Mapping[str, Any],
    fitted: Mapping[str, Any],
) -> Iterator[tuple[str, str]]:
    """Yield notes of images of another size or other channels, and of modules left out.

    `old` and `fitted` are configs of the model.
    """
    for name in [name for name in _OF_IMAGES if name in contents]:
        before, after = beside.unedited(name), documents.get(name, {})
        for key in [key for key in after if after[key] != before[key]]:
            yield _NEW_IMAGES.format(name), key
        for key in values_of_channels(after, old, fitted):
            yield _OLD_CHANNELS, f"{name}: {key}"
    for name, folder in beside.modules.items():
        yield _OF_MODULES, f"{folder.name}/{name}"


def _contents(
    beside: _Beside,
    new: Mapping[str, dict[str, Any]],
    dropped: Mapping[str, str],
    target: Target,
    changes: Changes,
) -> dict[str, bytes | Path]:
    """Return the contents of files by name; note those that do not hold."""
    contents: dict[str, bytes | Path] = {}
    for name in beside.names:
        path, document = beside.files.get(name), new.get(name) or beside.unedited(name)
        if name in dropped:
            how = f"copied from {path.parent.name}/" if path else "written"
            changes.add(f"not {how}, as {dropped[name]}", name)
            if Path(target.companion(name)).exists():
                changes.add("stays in the folder as it is, and may not fit", name)
        elif path is not None and name not in beside.parsed:
            contents[name] = path
        elif beside.parsed.get(name, document) is not None:
            contents[name] = _json(document, beside.parsed.get(name), path)
    return contents


class _Generation(NamedTuple):
    """The config of generation, and its unedited values."""

    document: dict[str, Any]
    unedited: dict[str, Any]
    has_other_tokens: bool


def _generation(
    origin: Origin,
    tokenizer: ChosenTokenizer,
    in_file: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    edited: Mapping[str, Any],
) -> _Generation:
    """Return the config of generation with the numbers of tokens of the edited config."""
    before, after = numbers_in(config), numbers_in(edited)
    document = tokenizer.renumbered(GENERATION, in_file or {})
    document |= {
        key: after[key]
        for key, value in (in_file or {}).items()
        if key in before and before[key] == value and after.get(key, value) != value
    }
    values = origin.values.get(GENERATION, {})
    stated = with_values(origin.configs.get(GENERATION, {}), values, GENERATION)
    unedited = {k: v for k, v in document.items() if k not in stated and (in_file or {})[k] == v}
    return _Generation(document | stated, unedited, tokenizer.is_of_another)


def _with_numbers(
    tokenizer: ChosenTokenizer, config: Mapping[str, Any], edited: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return a config and its edited form with numbers of tokens of a tokenizer, and the new ones.

    Numbers that the user edited stay.
    """
    numbers = tokenizer.renumbered(CONFIG, config)
    new = {
        key: value
        for key, value in numbers.items()
        if value != config[key] and edited.get(key) == config[key]
    }
    texts = [f"{key}: {value} (was {config[key]})" for key, value in new.items()]
    return {**config, **new}, {**edited, **new}, texts


def _keeps_table(
    origin: Origin,
    old: Structure,
    tensors: Iterable[WantedTensor],
    after: Sequence[Described],
) -> bool:
    """Return whether tensors have, or are computed from, rows for tokens."""
    if has_table_of_tokens(Structure(after)):
        return True
    names = (name for tensor in tensors for name in stored_names(origin, tensor))
    return any(is_table_of_tokens(old, name) for name in names if name in old)


def _fit(
    configs: tuple[Mapping[str, Any], Mapping[str, Any]],  # before and after edits
    before: Sequence[Described],
    after: Sequence[Described],
    origin: Origin,
    tensors: Mapping[str, WantedTensor],
) -> ConfigFit:
    """Return the fit of a config to new tensors, whose old ones may be unknown."""
    config, edited = configs
    if before:
        return fit_config(config, before, after, value_sources(origin, tensors.values()), edited)
    fit = check_config(edited, after)
    check_labels(fit, after)
    check_extents(fit, after)
    check_channels(fit, after)
    structure = Structure(after, model_facts({"config": fit.config}))
    if may_be_tied(fit.config) and is_head_apart(tensors, structure):
        untie_head(fit)
    return fit


def _check_order(
    fit: ConfigFit,
    origin: Origin,
    tensors: Collection[WantedTensor],
    files: Mapping[str, Path],
    generation: Mapping[str, Any],
) -> None:
    """Find rows of tokens and labels in another order than what describes them."""
    after = [Described(t.name, t.dtype, t.shape) for t in tensors]
    structure = Structure(after, model_facts({"config": fit.config}))
    stated = [*sections_of(fit.config), generation]
    numbers = [number for section in stated for _, number in numbers_of_tokens(section)]
    if numbers or any(name in files for name in FILES):
        fit.has_reordered_tokens = are_rows_moved(tensors, structure, stored=origin.array)
    if fit.has_reordered_tokens:
        fit.moved_tokens = moved_tokens(tensors, structure, numbers, origin.array)
    labels = [key for key in LABELS if key in fit.config and key not in fit.edited]
    if labels and are_rows_moved(tensors, structure, "label", origin.array):
        fit.problems.append(f"the labels are in another order than in {some(labels, '')}")


def _keys_of_tokens(section: Mapping[str, Any], numbers: Collection[int]) -> list[str]:
    """Return the keys that name tokens of these numbers."""
    pairs = numbers_of_tokens(section)
    return [f"{key}: {number}" for key, number in pairs if number in numbers]


def _check_experts(
    changes: Changes,
    origin: Origin,
    tensors: Collection[WantedTensor],
    config: Mapping[str, Any],
) -> None:
    """Note routers whose rows are in another order than the experts."""
    if "expert" in sizes_stated_in(config):
        facts = model_facts(config if is_gguf(config) else {"config": config})
        structure = Structure([Described(t.name, t.dtype, t.shape) for t in tensors], facts)
        stored = {tensor.name: stored_names(origin, tensor) for tensor in tensors}
        changes.add_all(_OTHER_EXPERTS, moved_routers(tensors, structure, stored))


def _in_memory(origin: Origin, tensors: Iterable[WantedTensor]) -> Origin | None:
    """Return the origin of a model in memory that files only change; None for changes alone."""
    is_adapter = origin.folder is not None and is_readable(origin.folder / ADAPTER_CONFIG)
    is_changed = is_adapter or not all(stored_names(origin, tensor) for tensor in tensors)
    return Origin(configs=origin.configs) if CONFIG in origin.configs and is_changed else None


def _with_other_prefixes(before: Iterable[str], after: Iterable[str]) -> str:
    """Name the tensors with another prefix than before; loaders add or remove one."""
    old, new = (
        {name.removeprefix("_orig_mod.").removeprefix("module."): name for name in names}
        for names in (before, after)
    )
    gone = {bare.partition(".")[2]: old[bare] for bare in old if bare not in new}
    rests = [bare.partition(".")[2] for bare in new if bare not in old]
    names = [gone[name] for name in rests if "." in name and name in gone]
    return f"no tensor has the name {some(names, 'names', 3)} any more" if names else ""


def _have_no_name_of(before: Collection[str], after: Collection[str]) -> bool:
    """Return whether no tensor has the name of an old one, prefixes aside."""
    return set(after).isdisjoint(before) and _with_rests(after).isdisjoint(_with_rests(before))


def _with_rests(names: Iterable[str]) -> set[str]:
    """Return names with and without their first parts, which may be prefixes."""
    pairs = [(name, name.partition(".")[2]) for name in names]
    return {name for pair in pairs for name in pair if "." in name}


def _is_model(origin: Origin, tensors: Sequence[Described], target: Target) -> bool:
    """Return whether tensors of a known family come from another format than the target's."""
    is_same = all(Path(name).suffix in Path(target.path).name for name in origin.file_names)
    return not (origin.folder and is_same) and Structure(tensors).family != ""


def _other_ranks(
    config: Mapping[str, Any], before: Iterable[Described], after: Iterable[Described]
) -> dict[str, str]:
    """Return why the config of an adapter does not hold for new factors of LoRA."""
    rank, pattern = config.get("r"), config.get("rank_pattern")
    is_lora = config.get("peft_type") == "LORA" and type(rank) is int
    # Factors of parameters have the ranks of all experts in a row.
    if not is_lora or config.get("target_parameters"):
        return {}
    stated = [rank, *(pattern.values() if isinstance(pattern, dict) else ())]
    old = {tensor.name: tensor.shape for tensor in before}
    new = [t for t in after if old.get(t.name) != t.shape]
    new = [t for t in new if not _FACTORS.isdisjoint(t.name.split("."))]
    ranks = sorted({t.shape[0] for t in new if t.shape and t.shape[0] not in stated})
    text = f"r {rank}: the tensors have {', '.join(map(str, ranks))}"
    return {ADAPTER_CONFIG: text} if ranks else {}


def _add_changes(
    changes: Changes,
    contents: Mapping[str, bytes | Path],
    fit: ConfigFit,
    target: Target,
    generation: _Generation,
) -> None:
    """Add new values of a config that is written, and files that stay and differ."""
    has_fewer_tokens = fit.has_fewer_tokens or generation.has_other_tokens
    for name, content in contents.items():
        existing = Path(target.companion(name))
        if existing.exists() and not target.overwrite:
            if difference := _difference(existing, content):
                changes.add(f"stays as it is without overwrite=True, and {difference}", name)
        elif name == CONFIG:
            changes.add_all(_CORRECTED, fit.corrections)
            kinds = some(edited_kinds(fit), "")
            changes.add_all(_EXCHANGED.format(kinds), fit.exchanged)
            changes.add_all(_UNKNOWN_TOKENS.format(name), fit.unknown_tokens)
            for section in [part for part in sections_of(fit.config) if fit.moved_tokens]:
                unedited = {key: section[key] for key in section if key not in fit.edited}
                moved = _keys_of_tokens(unedited, fit.moved_tokens)
                changes.add_all(_MOVED_TOKENS.format(name, "attrs['config']"), moved)
            if fit.contradicted_key:
                changes.add("labels of config.json that an edit contradicts", fit.contradicted_key)
        elif name == GENERATION:
            size = sizes_stated_in(fit.config).get("vocab")
            if size and has_fewer_tokens:
                unknown = tokens_without_row(generation.document, size.value)
                changes.add_all(_UNKNOWN_TOKENS.format(name), unknown)
            moved = _keys_of_tokens(generation.unedited, fit.moved_tokens)
            place = "attrs['generation_config']"
            changes.add_all(_MOVED_TOKENS.format(name, place), moved)


def _difference(existing: Path, content: bytes | Path) -> str:
    """Return how a file differs from new contents; empty if it does not."""
    new = content_bytes(content)
    if existing.is_file() and existing.stat().st_size == len(new) and existing.read_bytes() == new:
        return ""
    document = read_json(existing) if existing.name == CONFIG and is_readable(existing) else None
    if document is None:
        return "differs from that of the tensors"
    wanted = parse_json(new)
    keys = [key for key in wanted if document.get(key) != wanted[key]]
    states = [f"{k}: {document.get(k)}, not {wanted[k]}" for k in keys if type(wanted[k]) is int]
    return f"states {some(states or keys, 'values', 3)}" if keys else ""


def _reasons(
    fit: ConfigFit, names: Collection[str], count: int, *, has_new_adapter: bool
) -> dict[str, str]:
    """Return the files that do not hold for the new tensors, with the reasons."""
    if fit.missing:
        total = counted(count, "tensor")
        lacks = f"the file lacks {len(fit.missing)} of its {total}: {some(fit.missing, '', 3)}"
        hint = '{} (state "{}" of the new model in attrs["{}"], which is written then)'
        keys = 'tie_word_embeddings" (true if the head is the table of tokens) or "architectures'
        key = keys if fit.lacks_head else "architectures"
        reasons = dict.fromkeys(names, hint.format(lacks, key, "config"))
        if reasons.pop(ADAPTER_CONFIG, None) and not has_new_adapter:
            reasons[ADAPTER_CONFIG] = hint.format(lacks, "target_modules", "adapter_config")
        return reasons
    problems = [*filter(None, [fit.renamed]), *fit.problems]
    of_model = [name for name in names if name not in {ADAPTER_CONFIG, *FILES}]
    reasons = dict.fromkeys(of_model if problems else (), "; ".join(problems))
    if fit.has_fewer_tokens:
        reasons |= dict.fromkeys(FILES, "the vocabulary has fewer rows")
    elif fit.has_reordered_tokens:
        reasons |= dict.fromkeys(FILES, _REORDERED)
    return reasons


def _json(
    config: Mapping[str, Any], before: Mapping[str, Any] | None, path: Path | None
) -> bytes | Path:
    """Return a configuration without names of code; the file itself if nothing changed."""
    config = {key: value for key, value in config.items() if key != "auto_map"}
    if path is not None and config == before:
        return path
    return json.dumps(config, indent=2, ensure_ascii=False).encode("utf-8") + b"\n"
