"""Tensors of one model, joined from the pieces of its ranks along the axes that a family states.

A joined tensor is chunked, with its chunks in several files. Joining reads nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from xckpt.errors import CheckpointError, UnsupportedError, shown, some
from xckpt.formats import chunks
from xckpt.opening.names import numbers_of
from xckpt.opening.reading import read_sibling
from xckpt.quantization.model import parse_json
from xckpt.storage.source import first_file
from xckpt.structure.ranks import SHARED_ATTRS, Division, Layout, stage_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xckpt.index import Index, Tensor
    from xckpt.opening.merging import OpenFile
    from xckpt.storage import Source

    JoinRanks = bool | Literal["auto"]

_SIDE_BY_SIDE = "the files are ranks of one model, opened side by side: "
# Files with the sizes of a model: of Llama, of transformers.
_CONFIGS = ("params.json", "config.json")
# Words before the numbers of ranks, without "_rank", that stand for tensor parallelism.
_TENSOR, _STAGE = ("mp", "tp", "rank"), "pp"


class _Rank(NamedTuple):
    """The tensors of one rank, by their names in its file."""

    name: str
    tensors: Mapping[str, Tensor]


def join_ranks(index: Index, opened: Sequence[OpenFile], mode: JoinRanks) -> Index:
    """Join the tensors of ranks that stand side by side in an Index, if it is known how."""
    # Otherwise raise an error, or warn if the mode is ``"auto"``.
    if mode is False:
        return index
    try:
        return _joined(index, opened)
    except UnsupportedError as error:
        if mode is True:
            error.hint = error.hint or "join_ranks=False opens the ranks side by side"
            raise error.located(path=index.source) from None
        text = error.reason if error.hint is None else f"{error.reason}. {error.hint}"
        return replace(index, warnings=(_SIDE_BY_SIDE + text, *index.warnings))


def look_for_others(index: Index, opened: OpenFile) -> Index:
    """Add a warning to the Index of a file without others if the model has several ranks."""
    layout = Layout(index.attrs, _config_of(index, opened.source))
    count = layout.count_of({name: tensor.shape for name, tensor in index.tensors.items()})
    if not count:
        return index
    text = f"the file is one of {count} ranks by the sizes of the model: the others are missing"
    return replace(index, warnings=(*index.warnings, text))


def _joined(index: Index, opened: Sequence[OpenFile]) -> Index:
    stages = _stages_of(index)
    count = len(stages[0])
    _check_attrs(opened)
    layout = Layout(index.attrs, _config_of(index, opened[0].source))
    layout.check(count, len(stages))
    # Names in the model, by those in the files of a stage.
    names_by_stage = stage_names([ranks[0].tensors for ranks in stages], layout.layers)
    shapes: dict[str, tuple[int, ...]] = {}
    for names, ranks in zip(names_by_stage, stages, strict=True):
        shapes |= {names[name]: tensor.shape for name, tensor in ranks[0].tensors.items()}
    family, divisions = layout.divisions(shapes, count)
    tensors: dict[str, Tensor] = {}
    pieces_by_name: dict[str, list[Tensor]] = {}
    copies: list[tuple[str, ...]] = []
    for names, ranks in zip(names_by_stage, stages, strict=True):
        selected = {key: name for key, name in names.items() if name in divisions}
        _check_equal(ranks, selected)
        for key, name in selected.items():
            pieces = [rank.tensors[key] for rank in ranks]
            if name in tensors:  # an embedding that several stages have
                _check_copies(pieces_by_name[name], pieces)
                copies += _names_of(zip(pieces_by_name[name], pieces, strict=False))
                pieces_by_name[name] += pieces
                continue
            pieces_by_name[name] = pieces
            if divisions[name].axis is None:
                copies += _names_of([pieces])
            tensors[name] = _join(name, key, pieces, divisions[name])
    joined = {piece.name for pieces in pieces_by_name.values() for piece in pieces}
    unjoined = [name for name in index.tensors if name not in joined]
    tensors |= {name: index.tensors[name] for name in unjoined}
    notes = [f"not joined, because they are of single ranks: {some(unjoined)}"] if unjoined else []
    checkpoint = index.checkpoint and replace(
        index.checkpoint,
        joined_along=family,
        copies=tuple(copies),
        notes=(*index.checkpoint.notes, *notes),
    )
    arrangement = index.arrangement.of(tensors)
    return replace(index, tensors=tensors, arrangement=arrangement, checkpoint=checkpoint)


def _stages_of(index: Index) -> list[list[_Rank]]:
    """Return the tensor-parallel ranks of each stage of a pipeline, in order."""
    tensors_by_rank: dict[str, dict[str, Tensor]] = {}
    for name, tensor in index.tensors.items():
        rank, _, name_in_file = name.partition(".")
        tensors_by_rank.setdefault(rank, {})[name_in_file] = tensor
    places: dict[tuple[int, int], _Rank] = {}
    for file in () if index.checkpoint is None else index.checkpoint.files:
        place = _place_of(file.rank)
        if place in places or file.rank not in tensors_by_rank:
            _refuse(f"{shown(file.rank)} is there twice, or has no tensors")
        places[place] = _Rank(file.rank, tensors_by_rank[file.rank])
    stages = sorted({stage for stage, _ in places})
    return [[places[key] for key in sorted(places) if key[0] == stage] for stage in stages]


def _place_of(rank: str) -> tuple[int, int]:
    """Return the stage of a pipeline, and the rank of tensor parallelism."""
    numbers = {"": 0, _STAGE: 0}
    for position, (word, number) in enumerate(numbers_of(rank)):
        kind = word.removesuffix("rank").rstrip("_-") or word
        # mp_rank_00_001: Megatron-LM adds the stage.
        kind = _STAGE if not word and position == 1 else "" if kind in _TENSOR else kind
        if kind not in numbers or (not word and position > 1):
            _refuse(f"{shown(rank)} is a rank of another kind of parallelism")
        numbers[kind] = number
    return numbers[_STAGE], numbers[""]


def _check_attrs(opened: Sequence[OpenFile]) -> None:
    """Raise if ranks are of different steps or models by their attributes."""
    for name in SHARED_ATTRS:
        values = [file.index.attrs.get(name) for file in opened]
        position = next((n for n, value in enumerate(values) if value != values[0]), None)
        if position is not None:
            _refuse(
                f"{name} is {values[0]} in {shown(opened[0].rank)}, but {values[position]} in "
                f"{shown(opened[position].rank)}"
            )


def _config_of(index: Index, source: Source) -> Mapping[str, Any] | None:
    """Return the config among the attributes, or beside the first file."""
    config = index.attrs.get("config")
    if isinstance(config, dict) or Layout(index.attrs, None).has_sizes:
        return config if isinstance(config, dict) else None
    first = first_file(source)
    for name in _CONFIGS:
        try:
            content = read_sibling(first, name)
            if content is not None:
                return parse_json(content)
        except (OSError, CheckpointError, ValueError):
            continue
    return None


def _check_equal(ranks: Sequence[_Rank], names: Mapping[str, str]) -> None:
    """Raise unless all ranks have tensors of the same names, shapes and types."""
    first = ranks[0]
    roots = {name.partition(".")[0] for name in names}
    for rank in ranks[1:]:
        extra = [n for n in rank.tensors if n not in first.tensors and n.partition(".")[0] in roots]
        if extra:
            _refuse(f"{some(extra)} in {shown(rank.name)}, but not in {shown(first.name)}")
        for name in names:
            if name not in rank.tensors:
                _refuse(f"{shown(name)} is in {shown(first.name)}, but not in {shown(rank.name)}")
            if not _are_alike(first.tensors[name], rank.tensors[name]):
                texts = [_text_of(first, name), _text_of(rank, name)]
                _refuse(f"{shown(name)} has {', but '.join(texts)}")


def _text_of(rank: _Rank, name: str) -> str:
    tensor = rank.tensors[name]
    return f"{tensor.dtype} {list(tensor.shape)} in {shown(rank.name)}"


def _are_alike(tensor: Tensor, copy: Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (copy.shape, copy.dtype)


def _check_copies(pieces: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Raise unless pieces in two stages of a pipeline may be equal."""
    for piece, copy in zip(pieces, copies, strict=False):
        if not _are_alike(piece, copy):
            _refuse(f"{shown(piece.name)} and {shown(copy.name)} differ in shape or type")


def _names_of(groups: Iterable[Iterable[Tensor]]) -> list[tuple[str, ...]]:
    return [tuple([tensor.name for tensor in group]) for group in groups]


def _join(name: str, name_in_file: str, pieces: Sequence[Tensor], division: Division) -> Tensor:
    """Return the tensor that ranks have pieces or copies of."""
    first, axis = pieces[0], division.axis
    path = first.path[1:] if first.path is not None and name == name_in_file else None
    if axis is None:
        return replace(first.named(name), path=path)
    if any(piece.layout != "dense" for piece in pieces):
        _refuse(f"{shown(first.name)} is not dense")
    shape = tuple([n * len(pieces) if a == axis else n for a, n in enumerate(first.shape)])
    parts: dict[tuple[int, ...], Tensor] = {}
    start = 0  # of a block on a rank
    for extent in division.blocks:
        for rank, piece in enumerate(pieces):
            origin = [0] * len(shape)
            origin[axis] = start * len(pieces) + rank * extent
            is_all = len(division.blocks) == 1
            block = piece if is_all else chunks.sliced(piece, axis, start, start + extent)
            parts[tuple(origin)] = block
        start += extent
    joined = chunks.joined(name, shape, parts)
    return replace(joined, path=path, dims=first.dims, declared=first.declared)


def _refuse(reason: str) -> NoReturn:
    raise UnsupportedError(reason, rule="Ranks")
