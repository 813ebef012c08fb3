"""The checkpoint that the tensors of a new file come from, and what describes it."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.arrays import ReadOptions, lazy_arrays
from xckpt.arrays.derived import lazies_of_payload
from xckpt.elements import WIDE_FLOATS
from xckpt.errors import CheckpointError
from xckpt.opening import open_index
from xckpt.opening.names import part_of
from xckpt.opening.reading import CONFIGS, read_config
from xckpt.quantization.model import parse_json
from xckpt.storage import is_remote, local_path
from xckpt.storage.source import files_of, sources_of
from xckpt.structure.facts import declarations_in, is_gguf, model_facts
from xckpt.structure.info import OF_TRAINING, Described, Role
from xckpt.structure.model import Structure, structure_of
from xckpt.writing.config_edits import TYPE, completed, nearest, values_by_file, with_values
from xckpt.writing.payloads import Gathered, source_files
from xckpt.writing.vocabulary import no_array

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from xckpt.arrays.lazy import LazyArray
    from xckpt.index import Index, Tensor
    from xckpt.storage import Source
    from xckpt.writing.payloads import Payload
    from xckpt.writing.vocabulary import Stored

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
GENERATION = "generation_config.json"
#: Files that are written from attributes with their names.
STATED = (*CONFIGS, GENERATION)
#: Files whose JSON objects may name code.
PARSED = frozenset({CONFIG, "tokenizer_config.json", "processor_config.json"})
# Names that libraries look for in the place of "model": peft, mlx-lm, diffusers.
_ADAPTER = "adapter_model"
_STEMS = frozenset({_ADAPTER, "adapters", "diffusion_pytorch_model"})
# First words of attributes that describe an optimizer, too.
_SCHEDULES = frozenset({"lr_scheduler", "lr_schedulers"})
_MOST_FOLDERS = 16
_LARGEST_NBYTES = 256 << 20
_LARGEST_CONFIG_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that most tensors of a new file are read or computed from."""

    #: None for tensors in memory.
    folder: Path | None = None
    file_names: Sequence[str] = ()
    #: Tensors as the file and as the model has them; they differ if quantised.
    stored: Sequence[Described] = ()
    decoded: Sequence[Described] = ()
    #: Names of the tensors that hold a quantised one, by its name.
    codes: Mapping[str, Collection[str]] = field(default_factory=dict)
    #: Makes the array of a stored tensor, given its name; None if it is not known.
    array: Stored = no_array
    #: Names of tensors by the file and the offset of their parts.
    places: Mapping[tuple[Path, int], str] = field(default_factory=dict)
    #: Folders of the other checkpoints, and configs in the attributes by the name of their file.
    others: Sequence[Path] = ()
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    #: Values in these files that other attributes set, by the name of the file and their path.
    values: Mapping[str, Mapping[tuple[str, ...], Any]] = field(default_factory=dict)
    #: The config in the attributes when the object was opened; None for results of arithmetic.
    opened: Any = None
    #: Attributes of the file, and attributes that it does not have.
    in_file: Mapping[str, Any] = field(default_factory=dict)
    added: Mapping[str, Any] = field(default_factory=dict)
    #: Names of tensors that share the data of others, with the names of these.
    shared: Mapping[str, str] = field(default_factory=dict)

    def has_twin(self, name: str, names: Collection[str]) -> bool:
        """Return whether one of the names is of a tensor that is the same parameter."""
        owner = self.shared.get(name, name)
        twins = {owner, *(twin for twin in self.shared if self.shared[twin] == owner)}
        return not twins.isdisjoint(names)

    def config_in_attributes(self, name: str) -> dict[str, Any] | None:
        """Return the config that the attributes had before the user stated another one."""
        before = self.opened if name == CONFIG else None
        return before or _config_in(self.in_file, name)

    def edited(self, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config in the folder with the values that the user edited in the attributes."""
        return with_values(self._edited(name, config), self.values.get(name, {}), name)

    def _edited(self, name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
        stated = self.configs.get(name)
        if stated is None:
            return config
        unedited = [self.opened] if name == CONFIG else []
        if not any(unedited):
            # Sums have the config of any model, and lack those that differ.
            paths = [path for folder in self.others if is_readable(path := folder / name)]
            unedited = [config, _config_in(self.in_file, name), *map(read_json, paths)]
        if stated in unedited:
            return config
        before = nearest(stated, [old for old in unedited if old] or [config])
        edited = completed(stated, before)
        if before.get(TYPE) != config.get(TYPE):  # the config of another model was edited
            return edited
        new = {key: value for key, value in edited.items() if before.get(key, ...) != value}
        return {key: config[key] for key in config if key in edited or key not in before} | new

    def is_written(self, key: str) -> bool:
        """Return whether an attribute is a part of a file beside the tensors."""
        first, *path = key.split(".")
        name = f"{first}.json"
        return name in STATED if not path else tuple(path) in self.values.get(name, {})

    def written(self, types: Mapping[str, str]) -> _Written:
        """Return the tensors in the form that is written, given the new types by name."""
        stored = {tensor.name: tensor for tensor in self.stored}
        before, quantized, dense = [], [], []
        for tensor in self.decoded:
            parts = [stored[name] for name in self.codes.get(tensor.name, ()) if name in stored]
            if parts and all(types.get(part.name) == part.dtype for part in parts):
                quantized.append(tensor.name)
                before += parts
                continue
            before.append(tensor)
            if parts and tensor.name in types:
                dense.append(tensor.name)
        return _Written(list({t.name: t for t in before}.values()), quantized, dense)

    def may_have_codes(self, config: Mapping[str, Any], types: Mapping[str, str]) -> bool:
        """Return whether declarations of quantisation may hold without known quantised tensors."""
        if not self.stored:
            return not WIDE_FLOATS.issuperset(types.values())
        same = [tensor for tensor in self.stored if types.get(tensor.name) == tensor.dtype]
        if len(same) == len(self.stored) or not list(declarations_in(config)):
            return True
        structure = Structure(self.stored, model_facts({"config": config}))
        return any(structure[tensor.name].role is Role.CODES for tensor in same)

    def stem(self, names: Collection[str]) -> str:
        """Return the beginning of the file name that libraries look for, for these tensors."""
        if self.stored and not any(tensor.name in names for tensor in self.stored):
            return "model"
        stems = [name.partition(".")[0] for name in self.file_names]
        stem = next((stem for stem in stems if stem in _STEMS), "")
        return stem or (_ADAPTER if self._is_adapter() else "model")

    def _is_adapter(self) -> bool:
        """Return whether the only config of the checkpoint is the one of an adapter."""
        names = {
            name
            for name in (CONFIG, ADAPTER_CONFIG)
            if name in self.configs or (self.folder and is_readable(self.folder / name))
        }
        return names == {ADAPTER_CONFIG}


class _Written(NamedTuple):
    """Tensors of an origin in the form that is written."""

    tensors: list[Described]
    quantized: list[str]  # names of tensors that are written as codes
    dense: list[str]  # names of quantised tensors that are written as values


def origin_of(gathered: Gathered) -> Origin:
    """Return the checkpoint with the same names of tensors, or the one that most come from.

    It has no folder if it is remote.
    """
    stated = {name: _config_in(gathered.attrs, name) for name in STATED}
    configs = {name: config for name, config in stated.items() if config is not None}
    counts: Counter[str] = Counter()
    for payload in gathered.payloads:
        counts.update({file.name: None for file in source_files([payload])}.keys())
    counts = counts or Counter({gathered.opened: 1})
    counts.update(dict.fromkeys(gathered.merged, 0))
    names = [name for name in counts if name and not is_remote(name)]
    paths = {name: path for name in names if (path := Path(local_path(name))).exists()}
    folders: Counter[Path] = Counter()
    for name, path in paths.items():
        folders[path if path.is_dir() else path.parent] += counts[name]
    origins: list[Origin] = []
    written = {payload.name for payload in gathered.payloads}
    for folder, _ in folders.most_common(_MOST_FOLDERS):
        files = [path for path in paths.values() if path.parent == folder]
        is_single = len(files) == 1 and part_of(files[0].name) is None
        place = files[0] if is_single else folder
        with suppress(OSError, ValueError, CheckpointError):
            source, index = open_index(str(place), silent=True, missing="ignore")
            source.close()  # reading opens it again
            file_names = [Path(file.name).name for file in files_of(source)]
            decoded = list(index.tensors.values())
            codes = {t.name: [part.name for part in (t.stored or {}).values()] for t in decoded}
            parts = [part for t in decoded for part in (t.stored or {t.name: t}).values()]
            stored = {part.name: part for part in parts}.values()
            places = {
                (Path(folder, Path(part.shard or file_names[0]).name), part.offset): t.name
                for t in (*stored, *decoded)
                for part in t.parts.values()
            }
            added = {k: v for k, v in gathered.attrs.items() if k not in index.attrs}
            present = [n for n in STATED if n in configs or is_readable(folder / n)]
            origin = Origin(
                folder=folder,
                file_names=file_names,
                stored=_described(stored),
                decoded=_described(decoded),
                codes=codes,
                array=partial(_stored_array, index, source),
                places=places,
                others=[other for other in folders if other != folder],
                configs=configs,
                values=values_by_file(added, present),
                opened=gathered.config,
                in_file=index.attrs,
                added=added,
                shared=index.shared,
            )
            origins.append(origin)
            if written in ({*index.tensors}, {part.name for part in parts}):
                return origin
    # An adapter may set more tensors than its base keeps, but has other names.
    common = (o for o in origins if not written.isdisjoint(t.name for t in (*o.stored, *o.decoded)))
    return next(common, origins[0] if origins else Origin(configs=configs))


def _config_in(attrs: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the config in attributes, by the name of its file."""
    return read_config("", attrs, name.removesuffix(".json"))


def without_lost_training(gathered: Gathered, index: Index | None = None) -> Gathered:
    """Leave out attributes of an optimizer, and its schedule, if the new file lacks its state.

    Attributes and tensors of an optimizer have the same first word in the old file.
    """
    names = {_first_word(payload.name) for payload in gathered.payloads}
    words = {_first_word(key) for key in gathered.attrs if "." in key} - names
    if not words or is_gguf(gathered.attrs):
        return gathered
    index = index or _opened_index(gathered)
    lost = words & _words_of_training(index, gathered.payloads) if index else frozenset()
    if index is None or not lost:
        return gathered
    lost |= _SCHEDULES - names
    attrs = {
        key: value
        for key, value in gathered.attrs.items()
        if key not in index.attrs or _first_word(key) not in lost
    }
    return gathered._replace(attrs=attrs)


def _first_word(name: str) -> str:
    return name.partition(".")[0]


def _opened_index(gathered: Gathered) -> Index | None:
    """Return the index of the local checkpoint that tensors were opened from, or of their file."""
    files = (file.name for file in source_files(gathered.payloads))
    for name in (gathered.opened, next(files, "")):
        if name and not is_remote(name):
            with suppress(OSError, ValueError, CheckpointError):  # the folder of a run
                source, index = open_index(local_path(name), silent=True, missing="ignore")
                source.close()
                return index
    return None


def _words_of_training(index: Index, payloads: Iterable[Payload]) -> frozenset[str]:
    """Return the first words of names of training state alone, without a written tensor."""
    structure = structure_of(index)
    arrays = [array for payload in payloads for array in payload.data.values()]
    lazies = [lazy for array in arrays for lazy in lazies_of_payload(array)]
    places = {(Path(r.source.name).name, r.part.offset) for z in lazies for r in z.part_readers}
    words: dict[str, bool] = {}
    for name, tensor in index.tensors.items():
        files = [(Path(p.shard or index.source).name, p.offset) for p in tensor.parts.values()]
        is_lost = structure[name].role in OF_TRAINING and places.isdisjoint(files)
        words[_first_word(name)] = words.get(_first_word(name), True) and is_lost
    return frozenset([word for word, is_lost in words.items() if is_lost])


def _stored_array(index: Index, source: Source, name: str) -> LazyArray | None:
    """Return the array of a tensor of a checkpoint; None if it has none as a whole."""
    tensor = index.tensors.get(name)
    if tensor is None:
        return None
    return lazy_arrays(tensor, sources_of(source, index.shards), ReadOptions()).get(None)


def _described(tensors: Iterable[Tensor]) -> list[Described]:
    return [Described(t.name, t.dtype, t.shape) for t in tensors]


def is_readable(path: Path) -> bool:
    """Return whether a file is there, and not too large to be one that describes a model."""
    limit = _LARGEST_CONFIG_NBYTES if path.name in PARSED else _LARGEST_NBYTES
    return path.is_file() and path.stat().st_size <= limit


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object; None for any other content."""
    with suppress(OSError, ValueError):
        return parse_json(path.read_bytes())
    return None
