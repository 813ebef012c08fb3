"""The sources of the values of new tensors, which lists by layer of a config follow."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xckpt.arrays.dense import OnePartArray
from xckpt.arrays.derived import is_computed, lazies_in, lazies_of_payload
from xckpt.arrays.lazy import LazyArray
from xckpt.storage.source import files_of
from xckpt.structure.config_layers import Sources, lists_by_layer
from xckpt.structure.facts import sizes_stated_in
from xckpt.structure.model import Structure
from xckpt.writing.origins import CONFIG, Origin, is_readable, read_json
from xckpt.writing.vocabulary import LayersInMemory, array_of, is_computed_from

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from xckpt.formats.plan import WantedTensor

# Computed tensors that show which layers they are of, as the norms in each.
_SMALL_NBYTES = 1 << 20


def value_sources(origin: Origin, tensors: Iterable[WantedTensor]) -> Sources:
    """Return where the values of new tensors come from."""
    by_name = {tensor.name: tensor for tensor in tensors}
    arrays: dict[str, Any] = {n: array_of(t) for n, t in by_name.items()}

    @cache
    def layers() -> LayersInMemory:
        return LayersInMemory(Structure(origin.decoded), origin.array)

    @cache
    def small(name: str) -> bool:
        return is_computed(arrays[name]) and 0 < arrays[name].nbytes <= _SMALL_NBYTES

    @cache
    def alike() -> set[Path]:
        return _folders_of_equal_layers(origin)

    def names(name: str) -> list[str]:
        array = arrays[name]
        sources = {source for lazy in lazies_of_payload(array) for source in lazy.sources}
        files = {file.name for source in sources for file in files_of(source)}
        if not alike().issuperset([Path(file).parent for file in files]):
            return []
        return stored_names(origin, by_name[name]) or layers().names_of(name, array)

    def uses(name: str, sources: Collection[str]) -> bool:
        return bool(sources) and (not small(name) or is_computed_from(arrays[name], sources))

    return Sources({name: _source(tensor) for name, tensor in by_name.items()}, names, uses)


def _folders_of_equal_layers(origin: Origin) -> set[Path]:
    """Return the folders whose config has the same values for each layer as the origin's."""
    if origin.folder is None:
        return set()
    lists = {}
    for place in (origin.folder, *origin.others):
        if is_readable(place / CONFIG):
            size = sizes_stated_in(read_json(place / CONFIG) or {}).get("layer")
            lists[place] = lists_by_layer(size) if size else {}
    of_origin = lists.get(origin.folder)
    return {place for place in lists if lists[place] == of_origin} | {origin.folder}


def stored_names(origin: Origin, tensor: WantedTensor) -> list[str]:
    """Return the names of the tensors that a tensor is read or may be computed from."""
    array = array_of(tensor)
    if isinstance(array, LazyArray):
        readers = [(Path(r.source.name), r.part.offset) for r in array.part_readers]
        return [origin.places[place] for place in readers if place in origin.places]
    return [o.tensor.name for lazy in lazies_in(array).values() for o in lazy.tensor_origins]


def _source(tensor: WantedTensor) -> Any:
    """Return the folder of the values of a tensor, or the operations that compute them."""
    array = array_of(tensor)
    if isinstance(array, OnePartArray):
        return Path(array.source.name).parent
    layers = getattr(getattr(array, "dask", None), "layers", {}).items()
    return sorted([n.rpartition("-")[0] for n, layer in layers if not hasattr(layer, "lazy")])
