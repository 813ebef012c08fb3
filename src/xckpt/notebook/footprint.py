"""The footprint of a model: its parameters, what they take as stored, and in other precisions.

A `Footprint` follows from families of tensors, their roles and the config of the model; no tensor
is read. The summary shows it as a sentence, and ``ds.ckpt.footprint()`` as a Dataset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.elements import ELEMENT_TYPES, element_type_of
from xckpt.formatting import base_name, binary_size, counted, short_count
from xckpt.notebook.documents import Block, Cell, Field, Heading, Sentence, Share, Table
from xckpt.notebook.folding import Family, families_of
from xckpt.structure import PARAMETERS, Role, Structure
from xckpt.tensor_rows import TIED, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import xarray as xr

    from xckpt.structure.caches import ModelCache

#: Bytes of 32 parameters in each precision. ``int8`` and ``int4`` are Q8_0 and Q4_0 of GGUF: 32
#: codes with one scale in float16, so 8.5 and 4.5 bits for each parameter.
PRECISIONS = {"float32": 128, "bfloat16": 64, "int8": 34, "int4": 18}
#: Tensors of a model with several components that are in none of them.
OTHERS = "others"
#: Groups of tensors that a model needs to run.
_OF_MODEL = frozenset({role.group for role in (Role.WEIGHT, Role.SCALE, Role.CONSTANT)})
_LEFT_OUT = "activations and the overhead of the framework"
_DEFAULT_CACHE = "bfloat16"
_BLOCK = 32
# Keys of `config.json` with the number of experts that each token uses, and that a layer has.
_CHOSEN_KEYS = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k",
    "moe_topk", "num_selected_experts", "top_k_experts", "moe_k",
)  # fmt: skip
_TOTAL_KEYS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
    "num_routed_experts",
)  # fmt: skip
_MOST_EXPERTS = 1 << 20
_SEPARATORS = "./"


@dataclass(slots=True)
class GroupTotal:
    """Tensors of one heading, such as buffers, or parameters that are stored in one way."""

    group: str
    tensors: int = 0
    size: int = 0
    nbytes: int = 0

    def add(self, tensors: int, size: int, nbytes: int) -> None:
        """Add tensors, with the number of their elements and their bytes together."""
        self.tensors += tensors
        self.size += size
        self.nbytes += nbytes


class Experts(NamedTuple):
    """The experts of a mixture: how many each token uses, and how many a layer has."""

    chosen: int
    total: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a model."""

    parameters: int  # trainable elements; tied tensors count once
    groups: tuple[GroupTotal, ...]  # all tensors by role, parameters first
    #: Parameters by stored element type or quantisation scheme, largest first.
    schemes: tuple[GroupTotal, ...]
    experts: Experts | None  # if the config states them and tensors of experts exist
    active: int  # parameters that one token uses; all without `experts`
    #: Tensors by component, largest first; empty for a model of a single component.
    components: tuple[GroupTotal, ...] = ()

    def nbytes_in(self, precision: str) -> int:
        """Return the size of the parameters in a precision, in bytes."""
        return -(-self.parameters * PRECISIONS[precision] // _BLOCK)

    def document(self) -> dict[str, Any]:
        """Return the sizes as JSON has them."""
        document: dict[str, Any] = {
            "parameters": self.parameters,
            "precisions": {name: self.nbytes_in(name) for name in PRECISIONS},
            "schemes": _document(self.schemes, "elements"),
            "groups": _document(self.groups, "elements"),
        }
        if self.components:
            document["components"] = _document(self.components, "parameters")
        if self.experts is not None:
            document["active_parameters"] = self.active
            document["experts"] = self.experts._asdict()
        return document

    def __str__(self) -> str:
        sizes = [f"{name} {binary_size(self.nbytes_in(name))}" for name in PRECISIONS]
        text = f"parameters as {', '.join(sizes)}"
        if self.experts is not None:
            chosen, total = self.experts
            text += f"; {short_count(self.active)} active, {chosen} of {total} experts"
        return text


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a running model: its weights, and its state of the tokens so far."""

    cache: ModelCache
    context: int = 0  # number of tokens of each sequence; 0 for the weights alone
    batch: int = 1  # number of sequences
    #: Element type of keys and values, or a name of `PRECISIONS`; by default as the model.
    dtype: str | None = None
    limit: int | None = None  # size of the memory, in bytes
    stated: str = ""  # this size in the user's spelling

    @property
    def limit_attrs(self) -> dict[str, str]:
        """Size of the memory as text, if it has one."""
        return {} if self.limit is None else {"limit": self.stated or binary_size(self.limit)}

    @property
    def cache_dtype(self) -> str:
        """Element type of keys and values, or the name of a precision."""
        if self.dtype is not None:
            return self.dtype if self.dtype in PRECISIONS else element_type_of(self.dtype)
        stated = self.cache.dtype
        return stated if stated in ELEMENT_TYPES else _DEFAULT_CACHE

    @property
    def unknown(self) -> str:
        """Reason why the size of the cache is unknown; empty if it is known, or without a cache."""
        return self.cache.unknown if self.context else ""

    def caches(self) -> tuple[GroupTotal, ...]:
        """Return the layers with a cache by kind, with elements and bytes for the whole batch."""
        dtype = self.cache_dtype
        bits = 8 * PRECISIONS[dtype] / _BLOCK if dtype in PRECISIONS else ELEMENT_TYPES[dtype].bits
        totals: dict[str, GroupTotal] = {}
        for group in self.cache.groups if self.context else ():
            size, nbytes = group.elements(self.context), group.nbytes(self.context, bits)
            total = totals.setdefault(group.kind, GroupTotal(group.kind))
            total.add(group.layers, self.batch * size, self.batch * nbytes)
        return tuple(totals.values())

    def fits(self, nbytes: int) -> str:
        """Return whether weights of a size and the cache fit: yes, no or unknown."""
        nbytes += sum([total.nbytes for total in self.caches()])
        if self.limit is None or nbytes > self.limit:
            return "no"
        return "unknown" if self.unknown else "yes"


def _document(totals: Iterable[GroupTotal], size: str) -> dict[str, dict[str, int]]:
    return {
        total.group: {"tensors": total.tensors, size: total.size, "nbytes": total.nbytes}
        for total in totals
    }


def weigh(families: Sequence[Family], config: Mapping[Any, Any]) -> Footprint:
    """Return the footprint of families that have roles.

    `config` has the attributes of the file, or the content of ``config.json`` under ``"config"``.
    """
    groups = {role.group: GroupTotal(role.group) for role in Role}
    schemes: dict[str, GroupTotal] = {}
    experts = _experts_in(config)
    in_experts = parameters = 0
    for family in families:
        role = family.role or Role.WEIGHT
        is_parameter = role in PARAMETERS
        totals = [groups[role.group]]
        if is_parameter and family.parameters:
            totals.append(schemes.setdefault(family.dtype, GroupTotal(family.dtype)))
        for total in totals:
            size = family.parameters if is_parameter else family.size
            total.add(family.count, size, family.nbytes)
        parameters += family.parameters
        if experts is not None and is_parameter and _has_experts(family, experts.total):
            in_experts += family.parameters
    active = parameters
    if experts is not None and in_experts:
        active -= in_experts - in_experts * experts.chosen // experts.total
    return Footprint(
        parameters,
        tuple([total for total in groups.values() if total.tensors]),
        tuple(sorted(schemes.values(), key=lambda total: -total.nbytes)),
        experts if in_experts else None,
        active,
    )


def footprint_of(rows: Iterable[Row], structure: Structure, config: Mapping[Any, Any]) -> Footprint:
    """Return the footprint of tensors."""
    rows = list(rows)
    footprint = weigh(families_of(rows, structure), config)
    return replace(footprint, components=components_of(rows, structure))


def components_of(rows: Iterable[Row], structure: Structure) -> tuple[GroupTotal, ...]:
    """Return the sizes of the components of a model; none if it has a single one."""
    if len(structure.components) < 2:
        return ()
    totals = [
        replace(total, group=total.group or OTHERS)
        for total in totals_by(lambda row, model: model.component(row.name), rows, structure)
        if total.group in structure.components
    ]
    return tuple(sorted(totals, key=lambda total: -total.nbytes))


def totals_by(
    key: Callable[[Row, Structure], str], rows: Iterable[Row], structure: Structure
) -> list[GroupTotal]:
    """Return tensors, parameters and stored bytes by a key, in the order of the file."""
    totals: dict[str, GroupTotal] = {}
    for row in rows:
        group = key(row, structure)
        is_counted = structure.roles[row.name] in PARAMETERS and row.storage != TIED
        size = structure.packed.get(row.name, row.size) if is_counted else 0
        totals.setdefault(group, GroupTotal(group)).add(1, size, row.nbytes)
    return list(totals.values())


# --- experts -------------------------------------------------------------------------------------


def _experts_in(config: Mapping[Any, Any]) -> Experts | None:
    """Return the numbers of experts that a config or the metadata of GGUF state, or None."""
    architecture = config.get("general.architecture")
    keys = [(f"{architecture}.expert_used_count",), (f"{architecture}.expert_count",)]
    experts = _experts_of(config, keys)
    content = config.get("config")
    # Models of several modalities and DBRX have the numbers one level deeper.
    for section in (content, *content.values()) if isinstance(content, dict) else ():
        if experts is None and isinstance(section, dict):
            experts = _experts_of(section, (_CHOSEN_KEYS, _TOTAL_KEYS))
    return experts


def _experts_of(section: Mapping[Any, Any], keys: Sequence[Sequence[str]]) -> Experts | None:
    chosen, total = (
        next((section[name] for name in names if name in section), None) for names in keys
    )
    # From a file: True and 2.0 are not counts.
    if type(chosen) is int and type(total) is int and 0 < chosen <= total <= _MOST_EXPERTS:
        return Experts(chosen, total)
    return None


def _has_experts(family: Family, total: int) -> bool:
    """Return whether tensors belong to routed experts: numbered, or along their first axis."""
    numbers = iter(family.indices)
    is_fused = bool(family.shape) and family.shape[0] >= total and family.shape[0] % total == 0
    before = ""
    for part in family.template:
        if part is None:
            indices = next(numbers)
            if before == "experts":
                return all(len(index) < 8 and int(index) < total for index in indices)
            before = ""
            continue
        word = part.strip(_SEPARATORS)
        if is_fused and (before == "experts" or word.endswith("_exps")):
            return True
        before = word
    return False


# --- the result ----------------------------------------------------------------------------------


def footprint_dataset(
    footprint: Footprint, memory: Memory, *, file_nbytes: int | None, source: str
) -> xr.Dataset:
    """Return a footprint as a Dataset."""
    import xarray as xr

    variables: dict[str, Any] = {
        "parameters": footprint.parameters,
        "nbytes": sum([group.nbytes for group in footprint.groups]),
    }
    if file_nbytes is not None:
        variables["file_nbytes"] = file_nbytes
    if footprint.experts is not None:
        variables["active_parameters"] = footprint.active
        variables["experts"], variables["experts_per_token"] = footprint.experts[::-1]
    sizes = [footprint.nbytes_in(precision) for precision in PRECISIONS]
    bits = [8 * nbytes / _BLOCK for nbytes in PRECISIONS.values()]
    variables |= {"precision_nbytes": ("precision", sizes), "precision_bits": ("precision", bits)}
    dims = {"group": footprint.groups, "scheme": footprint.schemes}
    if footprint.components:
        dims["component"] = footprint.components
    if memory.caches():
        dims["cache"] = memory.caches()
    for dim, totals in dims.items():
        size = "elements" if dim in {"group", "cache"} else "parameters"
        count = "layers" if dim == "cache" else "tensors"
        variables |= {
            f"{dim}_{count}": (dim, [total.tensors for total in totals]),
            f"{dim}_{size}": (dim, [total.size for total in totals]),
            f"{dim}_nbytes": (dim, [total.nbytes for total in totals]),
        }
    variables["scheme_bits"] = (
        "scheme",
        [8 * total.nbytes / total.size for total in footprint.schemes],
    )
    coords = {dim: [total.group for total in totals] for dim, totals in dims.items()}
    coords["precision"] = list(PRECISIONS)
    attrs: dict[str, Any] = {"footprint": str(footprint)}
    if source:
        attrs["source"] = source
    if memory.context or memory.limit is not None:
        stored = sum([group.nbytes for group in footprint.groups if group.group in _OF_MODEL])
        variables |= _in_memory(memory, stored, sizes)
        left_out = _LEFT_OUT if memory.context else f"cache, {_LEFT_OUT}"
        attrs |= {"left_out": left_out, "context": memory.context, "batch": memory.batch}
        attrs |= memory.limit_attrs
        if memory.caches():
            attrs["cache_dtype"] = memory.cache_dtype
        if memory.unknown:
            attrs["unknown"] = memory.unknown
    return xr.Dataset(variables, coords, attrs)


def _in_memory(memory: Memory, stored: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the variables for weights as stored, and in other precisions, beside the cache."""
    variables: dict[str, Any] = {"weights_nbytes": stored}
    if not memory.unknown:
        cache = sum([total.nbytes for total in memory.caches()])
        totals = [size + cache for size in sizes]
        variables |= {"total_nbytes": stored + cache, "precision_total": ("precision", totals)}
    if memory.limit is not None:
        verdicts = [memory.fits(size) for size in sizes]
        variables |= {
            "limit_nbytes": memory.limit,
            "fits": memory.fits(stored),
            "precision_fits": ("precision", verdicts),
        }
    return variables


def footprint_blocks(footprint: xr.Dataset) -> list[Block] | None:
    """Return the view of the result of `footprint`; None for another Dataset."""
    attrs, sizes = footprint.attrs, footprint.variables
    if "footprint" not in attrs or not {"precision", "scheme", "group"} <= set(footprint.dims):
        return None
    values = {str(name): variable.to_numpy().tolist() for name, variable in sizes.items()}
    title = base_name(str(attrs.get("source", "")))
    heading = Heading(title, "Footprint of" if title else "Footprint", _facts(attrs, values))
    blocks: list[Block] = [heading]
    for dim, count in _TABLES.items():
        if len(values.get(dim, ())) >= (2 if dim in {"group", "component"} else 1):
            blocks.append(_size_table(values, dim, count, str(attrs.get("limit", ""))))
    return [*blocks, *(_sentences(attrs, values) if "left_out" in attrs else ())]


def _facts(attrs: Mapping[Any, Any], values: Mapping[str, Any]) -> list[str]:
    """Return the totals of a footprint."""
    facts = [f"{short_count(values['parameters'])} parameters"]
    if "active_parameters" in values:
        chosen, total = values["experts_per_token"], values["experts"]
        active = short_count(values["active_parameters"])
        facts.append(f"{active} active, {chosen} of {total} experts")
    facts.append(f"{binary_size(values['nbytes'])} of tensors")
    if "file_nbytes" in values:
        facts.append(f"{binary_size(values['file_nbytes'])} on disk")
    if "cache" in values:
        batch = f"{attrs['batch']} x " if attrs["batch"] > 1 else ""
        size = binary_size(sum(values["cache_nbytes"]))
        tokens = f"{batch}{counted(attrs['context'], 'token')}"
        facts.append(f"cache {size} for {tokens} in {attrs['cache_dtype']}")
    return facts


def _size_table(values: Mapping[str, Any], dim: str, count: str, limit: str) -> Table:
    """Return the sizes along a dimension, with their `count` of elements."""
    nbytes = values[f"{dim}_nbytes"]
    total = max(nbytes) if dim == "precision" else sum(nbytes)
    columns: list[tuple[Field, list[Cell]]] = [
        (Field(_TITLES.get(dim, dim), "name"), values[dim]),
        *[
            (Field(noun, "count"), values[f"{dim}_{noun}"])
            for noun in ("tensors", "layers")
            if f"{dim}_{noun}" in values
        ],
    ]
    if count:
        columns.append((Field(count, "word"), [*map(short_count, values[f"{dim}_{count}"])]))
    if f"{dim}_bits" in values:
        columns.append((Field("bits", "number", digits=3), values[f"{dim}_bits"]))
    columns.append((Field("size", "size"), nbytes))
    columns.append((Field("", "bar"), [Share(size, total) for size in nbytes]))
    if f"{dim}_total" in values and "cache" in values:
        columns.append((Field("with the cache", "size"), values[f"{dim}_total"]))
    if f"{dim}_fits" in values:
        columns.append((Field(f"fits {limit}", "word"), values[f"{dim}_fits"]))
    rows = list(zip(*[cells for _, cells in columns], strict=True))
    return Table([field for field, _ in columns], rows)


def _sentences(attrs: Mapping[Any, Any], values: Mapping[str, Any]) -> list[Block]:
    """Return what the model takes as stored, and what is unknown or left out."""
    sentences: list[Block] = []
    if "unknown" in attrs:
        sentences.append(Sentence("unknown", f"the size of the cache: {attrs['unknown']}"))
    size = binary_size(values.get("total_nbytes", values["weights_nbytes"]))
    kind = "weights and cache" if "cache" in values else "weights"
    text = f"{kind} as stored take {size}, without {attrs['left_out']}"
    if "fits" in values:
        verdict = {"yes": "fits", "no": "does not fit", "unknown": "may fit"}[values["fits"]]
        text += f": {verdict} {attrs['limit']}"
    return [*sentences, Sentence("", text)]


#: Dimensions of a footprint, with the column of their elements; titles of some of them.
_TABLES = {
    "precision": "",
    "scheme": "parameters",
    "group": "elements",
    "component": "parameters",
    "cache": "elements",
}
_TITLES = {
    "precision": "in other precisions",
    "scheme": "parameters as stored",
    "group": "tensors of",
    "cache": "cache of layers with",
}
