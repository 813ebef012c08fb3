"""The division of a model's tensors over ranks of tensor parallelism, by evidence.

Every rank has the entire tensor, or a piece along an axis that the family states. Each of these is
a hypothesis, which is refuted by an extent other than the stated size of the model. Exactly one has
to remain. Configs state sizes (``config.json``, ``params.json`` of Llama, the arguments in a
checkpoint of Megatron-LM). Extents alone prove nothing: copies of the entire model have them, too.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from xckpt.errors import UnsupportedError, shown
from xckpt.formatting import counted
from xckpt.structure.facts import ModelFacts, model_facts
from xckpt.structure.families.choosing import family_of
from xckpt.structure.families.tables import LOCAL_AXES, evaluate, plain, shorten, stated_sizes
from xckpt.structure.forms import masked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from xckpt.structure.families.family import Root
    from xckpt.structure.families.tables import RowMatch

    Shape = tuple[int, ...]

#: Attributes that have one value on all ranks of a checkpoint of Megatron-LM.
SHARED_ATTRS = (
    "iteration", "checkpoint_version", "args.num_layers", "args.hidden_size",
    "args.tensor_model_parallel_size", "args.pipeline_model_parallel_size",
)  # fmt: skip

# The arguments of Megatron-LM among the attributes of its checkpoints.
_ARGS = "args."
# Order of queries, keys and values in `query_key_value`: before this version it is not by head.
_FIRST_VERSION = 1
_LAYER = re.compile(r"(?P<path>(?:.*?\.)?layers)\.(?P<number>[0-9]{1,6})\.(?P<name>.+)")
# State of a module on one rank, such as the scales of Transformer Engine; it has no weights.
_EXTRA_STATE = "_extra_state"
_LARGEST = 1 << 40
# Powers of two, as numbers of heads are.
_USUAL_COUNTS = (2, 4, 8, 16, 32, 64)
# Ends of slots whose tensors consist of several parts.
_FUSED = (".qkv", ".kv", ".gate_up", ".kv_a", ".kv_b")


class Division(NamedTuple):
    """The axis along which ranks divide a tensor, and its fused parts."""

    #: None if every rank has the entire tensor.
    axis: int | None
    #: Extents along the axis, on one rank, of fused parts that are divided one by one; empty if
    #: they are unknown, or without an axis.
    blocks: tuple[int, ...] = ()


class _Hypothesis(NamedTuple):
    """A division, the shape of the joined tensor, and expressions for its extents."""

    division: Division
    shape: Shape
    axes: tuple[str | None, ...]


class Layout:
    """The statements of a checkpoint about its model and its ranks.

    Parameters
    ----------
    attrs : mapping
        Attributes of the checkpoint, with the arguments of Megatron-LM as ``args.hidden_size``.
    config : mapping or None
        ``config.json``, or ``params.json`` of Llama.
    """

    def __init__(self, attrs: Mapping[str, Any], config: Mapping[str, Any] | None) -> None:
        self._args = {k.removeprefix(_ARGS): v for k, v in attrs.items() if k.startswith(_ARGS)}
        self._version = attrs.get("checkpoint_version", 0)
        stated = _with_hidden_dim(config or {}) | _of_megatron(self._args)
        self._facts: ModelFacts = model_facts({}, stated)

    @property
    def has_sizes(self) -> bool:
        """True if sizes of the model are stated."""
        return bool(self._facts.sizes)

    @property
    def layers(self) -> int | None:
        """Stated number of layers of the model, or None."""
        return self._facts.sizes.get("layer")

    def check(self, tensor_ranks: int, stages: int) -> None:
        """Raise `UnsupportedError` unless the ranks are those that the checkpoint states."""
        present = {"tensor": tensor_ranks, "pipeline": stages}
        for kind, count in present.items():
            stated = self._args.get(f"{kind}_model_parallel_size", count)
            if type(stated) is not int or stated != count:
                noun = "ranks" if kind == "tensor" else "stages"
                _refuse(f"the checkpoint states {stated} {noun}, but {count} are here")
        if stages > 1 and "pipeline_model_parallel_size" not in self._args:
            _refuse("nothing states that the second number of a rank is a stage of a pipeline")
        for name, usual in {
            "expert_model_parallel_size": (None, 1),
            "expert_tensor_parallel_size": (None, tensor_ranks),
            "virtual_pipeline_model_parallel_size": (None,),
            "pipeline_model_parallel_split_rank": (None,),
            "moe_mlp_glu_interleave_size": (None,),
        }.items():
            if self._args.get(name) not in usual:
                _refuse(f"{name} = {self._args[name]} is not supported")

    def divisions(self, shapes: Mapping[str, Shape], count: int) -> tuple[str, dict[str, Division]]:
        """Return the family, and the division of each tensor of the model.

        Raise `UnsupportedError` if one is unknown.

        Parameters
        ----------
        shapes : mapping of str to tuple of int
            Shapes of the tensors of one rank, by name. Tensors beside the model, such as those of
            an optimizer, are left out of the result.
        count : int
            Number of ranks.
        """
        family = family_of(shapes, self._facts)
        if family is None or len(family.roots) != 1:
            reason = "the names of the tensors are those of several models"
            _refuse("no family has the names of the tensors" if family is None else reason)
        root = family.roots[0]
        if not self._facts.config:
            _refuse(
                "nothing states the sizes of the model",
                "They are in params.json or config.json beside the files, or in the arguments that "
                "Megatron-LM saves",
            )
        self._check_version(shapes)
        matches = _matches(root, shapes)
        unknown = next((name for name, rows in matches.items() if not rows), None)
        if unknown is not None:
            _refuse(f"the family {family.name!r} does not have {shown(unknown)}")
        sizes = _Sizes(root, self._facts, count, self._args)
        divisions = sizes.divide(matches, shapes)
        if count > 1 and all(division.axis is None for division in divisions.values()):
            _refuse("every rank has all of every tensor, so they may be copies of one model")
        return family.name, divisions

    def count_of(self, shapes: Mapping[str, Shape]) -> int:
        """Return a number of ranks, one of which has tensors of these shapes; 0 without any."""
        for count in _USUAL_COUNTS if self._facts.config else ():
            with suppress(UnsupportedError):
                self.divisions(shapes, count)
                return count
        return 0

    def _check_version(self, names: Collection[str]) -> None:
        """Raise for old checkpoints of Megatron-LM, whose queries, keys and values alternate."""
        version = self._version if type(self._version) in {int, float} else 0
        if self._args and version < _FIRST_VERSION:
            name = next((name for name in names if ".query_key_value." in name), None)
            if name is not None:
                _refuse(f"{shown(name)} has the order of checkpoint_version {version}")


class _Sizes:
    """The sizes of a model: stated ones, and others that follow from joined tensors."""

    def __init__(
        self, root: Root, facts: ModelFacts, count: int, args: Mapping[str, object]
    ) -> None:
        self._root = root
        self._sizes = stated_sizes(root.table, facts.config, facts.sizes)
        self._count = count
        # Megatron-LM divides every tensor that it can divide.
        self._is_parallel = args.get("tensor_model_parallel_size") == count

    def divide(
        self, matches: Mapping[str, Sequence[RowMatch]], shapes: Mapping[str, Shape]
    ) -> dict[str, Division]:
        """Return the division of each tensor; raise unless exactly one hypothesis remains."""
        divisions: dict[str, Division] = {}
        undecided = list(matches)
        while undecided:
            remaining = []
            for name in undecided:
                hypotheses = self._hypotheses(matches[name], shapes[name])
                if not hypotheses:
                    self._refuse_all(name, matches[name], shapes[name])
                if len({hypothesis.division for hypothesis in hypotheses}) > 1:
                    remaining.append(name)
                    continue
                division = divisions[name] = hypotheses[0].division
                if division.axis is not None and not division.blocks:
                    _refuse(f"nothing states how ranks divide the fused parts of {shown(name)}")
                self._learn(hypotheses)
            if len(remaining) == len(undecided):
                self._refuse_several(remaining[0], matches[remaining[0]], shapes[remaining[0]])
            undecided = remaining
        return {name: divisions[name] for name in matches}

    def _hypotheses(self, matches: Iterable[RowMatch], shape: Shape) -> list[_Hypothesis]:
        """Return the hypotheses that no size refutes."""
        hypotheses = []
        for match in matches:
            axes = match.axes
            if axes is None:  # codes of a quantised tensor
                continue
            cuts = match.cuts if self._count > 1 else ()
            for axis in cuts if cuts and self._is_parallel else (None, *cuts):
                joined = tuple([n * self._count if a == axis else n for a, n in enumerate(shape)])
                if any(self._refutes(name, n) for name, n in zip(axes, joined, strict=True)):
                    continue
                blocks = () if axis is None else self._blocks(match, axis, shape[axis])
                hypotheses.append(_Hypothesis(Division(axis, blocks), joined, axes))
        return hypotheses

    def _refutes(self, axis: str | None, extent: int) -> bool:
        size = None if axis is None or axis in LOCAL_AXES else evaluate(axis, self._sizes)
        return size is not None and size != extent

    def _blocks(self, match: RowMatch, axis: int, extent: int) -> tuple[int, ...]:
        """Return the extents of fused parts on a rank, none if their division is unknown."""
        expression, flags = (match.axes or ())[axis] or "", match.row.flags
        if "fused" in flags:
            parts = self._parts(expression)
            if len(set(parts)) == 1 and extent % len(parts) == 0:
                return (extent // len(parts),) * len(parts)
            sizes = [evaluate(part, self._sizes) or 0 for part in parts]
            is_divisible = all(size and size % self._count == 0 for size in sizes)
            return tuple([size // self._count for size in sizes]) if is_divisible else ()
        is_fused = match.row.slot.endswith(_FUSED) or "+" in expression or expression[:1].isdigit()
        return (extent,) if "interleaved" in flags or not is_fused else ()

    def _parts(self, expression: str) -> list[str]:
        """Return the parts of a sum, ``ff`` twice for ``2*ff``."""
        parts = []
        for term in self._root.table.sizes.get(expression, (expression,))[0].split("+"):
            number, _, part = term.partition("*")
            parts += [part] * int(number) if number.isdecimal() else [term]
        return parts

    def _learn(self, hypotheses: Iterable[_Hypothesis]) -> None:
        """Add sizes that are not stated, but follow from the shape of a joined tensor."""
        shapes = {(hypothesis.shape, hypothesis.axes) for hypothesis in hypotheses}
        if len(shapes) == 1:
            shape, axes = shapes.pop()
            for axis, extent in zip(axes, shape, strict=True):
                if axis is not None and axis.isidentifier() and axis not in LOCAL_AXES:
                    self._sizes.setdefault(axis, extent)

    # --- errors ----------------------------------------------------------------------------------

    def _refuse_all(self, name: str, matches: Sequence[RowMatch], shape: Shape) -> NoReturn:
        axes = matches[0].axes
        if axes is None:
            _refuse(f"{shown(name)} is quantised")
        sizes = [self._size_text(axis) for axis in axes]
        _refuse(
            f"{shown(name)} has shape {list(shape)} on each of {self._count} ranks, which does not "
            f"agree with the sizes of the model: [{', '.join(sizes)}]",
            "Ranks may be missing, or of another model",
        )

    def _refuse_several(self, name: str, matches: Sequence[RowMatch], shape: Shape) -> NoReturn:
        axes = {h.division.axis for h in self._hypotheses(matches, shape)}
        texts = [f"along axis {axis}" for axis in sorted(a for a in axes if a is not None)]
        texts += ["not at all"] if None in axes else []
        unknown = [axis for axis in matches[0].axes or () if axis and self._size_text(axis) == axis]
        _refuse(
            f"{shown(name)} with shape {list(shape)} may be divided {' or '.join(texts)}: nothing "
            f"states the size of {', '.join(unknown) or 'its parts'}"
        )

    def _size_text(self, axis: str | None) -> str:
        size = None if axis is None else evaluate(axis, self._sizes)
        return axis or "?" if size is None else f"{axis} = {size}"


def _matches(root: Root, shapes: Mapping[str, Shape]) -> dict[str, list[RowMatch]]:
    """Return the rows of the model's tensors, without those of an optimizer or a single rank."""
    container, dot, _ = root.prefix.partition(".")
    names = [name for name in shapes if not name.endswith(f".{_EXTRA_STATE}")]
    matches = {}
    for name, key in zip(names, masked(list(map(plain, names))), strict=True):
        rows = root.matches_of(plain(name), shorten(key), len(shapes[name]))
        if rows or name.startswith(container + dot):
            matches[name] = rows
    return matches


def _with_hidden_dim(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the extent of the feed-forward layers of Llama."""
    # It follows from other sizes, as in ``FeedForward`` of github.com/meta-llama/llama, model.py.
    dim, multiple = config.get("dim"), config.get("multiple_of")
    factor = config.get("ffn_dim_multiplier") or 1
    if type(dim) is not int or type(multiple) is not int or "hidden_dim" in config:
        return dict(config)
    is_plausible = 0 < dim < _LARGEST and 0 < multiple < _LARGEST
    if type(factor) not in {int, float} or not 0 < factor < _LARGEST or not is_plausible:
        return dict(config)
    hidden = int(factor * int(2 * (4 * dim) / 3))
    return {**config, "hidden_dim": -(-hidden // multiple) * multiple}


def _of_megatron(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Megatron-LM as a config."""
    config = dict(args)
    if config.get("group_query_attention") is False:  # their number is then a default
        config.pop("num_query_groups", None)
    return config


# --- pipelines ------------------------------------------------------------------------------------


def stage_names(stages: Sequence[Collection[str]], layers: int | None) -> list[dict[str, str]]:
    """Return the names in the model, by those in each stage of a pipeline."""
    # A stage counts its layers from 0. Raise `UnsupportedError` unless all stages have `layers` in
    # total, the stated number.
    if len(stages) == 1:
        return [{name: name for name in stages[0]}]
    numbers = [sorted({int(m["number"]) for m in _layers_in(names)}) for names in stages]
    paths = {m["path"] for names in stages for m in _layers_in(names)}
    if len(paths) != 1:
        _refuse(f"the stages of the pipeline have layers of several kinds: {sorted(paths)[:5]}")
    total = sum(map(len, numbers))
    if layers is None or total != layers:
        _refuse(f"the stages have {counted(total, 'layer')} in total, but {layers} are stated")
    if sorted(n for stage in numbers for n in stage) == list(range(total)):
        starts = [0] * len(stages)
    elif all(stage == list(range(len(stage))) for stage in numbers):
        starts = [sum(map(len, numbers[:stage])) for stage in range(len(stages))]
    else:
        _refuse(f"the layers of the stages are {numbers[:5]}, which leaves gaps")
    return [
        {name: _shifted(name, start) for name in names}
        for names, start in zip(stages, starts, strict=True)
    ]


def _layers_in(names: Iterable[str]) -> list[re.Match[str]]:
    return [match for match in map(_LAYER.fullmatch, names) if match is not None]


def _shifted(name: str, start: int) -> str:
    match = _LAYER.fullmatch(name)
    if match is None or not start:
        return name
    return f"{match['path']}.{int(match['number']) + start}.{match['name']}"


def _refuse(reason: str, hint: str | None = None) -> NoReturn:
    raise UnsupportedError(reason, rule="Ranks", hint=hint)
