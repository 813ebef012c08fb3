"""How ranks of tensor parallelism divide the tensors of a model, by evidence.

A tensor is whole on every rank, or divided along one of the axes that its family states. Each of
these is a hypothesis, which is refuted by an extent other than the stated size of the model.
Exactly one has to remain. Sizes are those of a config (``config.json``, ``params.json`` of Llama,
the arguments in a checkpoint of Megatron-LM); extents alone prove nothing, because whole copies on
every rank have the same ones.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from xckpt.errors import UnsupportedError, shown
from xckpt.formatting import counted
from xckpt.structure.facts import model_facts
from xckpt.structure.families.choosing import family_of
from xckpt.structure.families.tables import LOCAL_AXES, evaluate, plain, shorten, stated_sizes
from xckpt.structure.forms import masked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from xckpt.structure.facts import ModelFacts
    from xckpt.structure.families.family import Root
    from xckpt.structure.families.tables import RowMatch

    Shape = tuple[int, ...]

__all__ = ["SHARED_ATTRS", "Division", "Layout", "stage_names"]

#: Attributes that have one value on all ranks of a checkpoint of Megatron-LM.
SHARED_ATTRS = (
    *("iteration", "checkpoint_version", "args.num_layers", "args.hidden_size"),
    *("args.tensor_model_parallel_size", "args.pipeline_model_parallel_size"),
)

# The arguments of Megatron-LM among the attributes of its checkpoints.
_ARGS = "args."
# Order of queries, keys and values in `query_key_value`: before this version it is not by head.
_FIRST_VERSION = 1
_LAYER = re.compile(r"(?P<path>(?:.*?\.)?layers)\.(?P<number>[0-9]{1,6})\.(?P<name>.+)")
# State of a module that is no weight, such as the scales of Transformer Engine: of one rank only.
_EXTRA_STATE = "_extra_state"
_LARGEST = 1 << 40
# Powers of two, as numbers of heads are.
_USUAL_COUNTS = (2, 4, 8, 16, 32, 64)
# Ends of slots whose tensors consist of several parts.
_FUSED = (".qkv", ".kv", ".gate_up", ".kv_a", ".kv_b")


class Division(NamedTuple):
    """How ranks divide a tensor."""

    #: Axis along which they divide it; None if every rank has all of it.
    axis: int | None
    #: Extents along the axis, on one rank, of fused parts that are divided one by one.
    blocks: tuple[int, ...] = ()


class _Hypothesis(NamedTuple):
    """A division, the shape of the whole tensor, and expressions for its extents."""

    division: Division
    whole: Shape
    axes: tuple[str | None, ...]


class Layout:
    """What a checkpoint states about its model and its ranks.

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
    def layers(self) -> int | None:
        """Number of layers of the model, if it is stated."""
        return self._facts.sizes.get("layer")

    def check(self, tensor_ranks: int, stages: int) -> None:
        """Raise `UnsupportedError` if the statements about ranks are others."""
        present = {"tensor": tensor_ranks, "pipeline": stages}
        for kind, count in present.items():
            stated = self._args.get(f"{kind}_model_parallel_size", count)
            if type(stated) is not int or stated != count:
                what = "ranks" if kind == "tensor" else "stages"
                _refuse(f"the checkpoint states {stated} {what}, but {count} are here")
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
        """Return the family, and how each tensor of the model is divided; raise if that is unknown.

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
        known = _Sizes(root, self._facts, count, self._args)
        divisions = known.divide(matches, shapes)
        if count > 1 and all(division.axis is None for division in divisions.values()):
            _refuse("every rank has all of every tensor, so they may be copies of one model")
        return family.name, divisions

    def count_of(self, shapes: Mapping[str, Shape]) -> int:
        """Return the number of ranks of which the tensors are those of one; 0 if it is unknown."""
        for count in _USUAL_COUNTS:
            with suppress(UnsupportedError):
                self.divisions(shapes, count)
                return count
        return 0

    def _check_version(self, names: Collection[str]) -> None:
        """Raise for old checkpoints of Megatron-LM, in which other parts of a tensor alternate."""
        version = self._version if type(self._version) in {int, float} else 0
        if self._args and version < _FIRST_VERSION:
            name = next((name for name in names if ".query_key_value." in name), None)
            if name is not None:
                _refuse(f"{shown(name)} has the order of checkpoint_version {version}")


class _Sizes:
    """The sizes of a model: stated ones, and those that follow from divided tensors."""

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
        """Return the only hypothesis for each tensor; raise if there is none, or another one."""
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
                divisions[name] = hypotheses[0].division
                self._learn(hypotheses)
            if len(remaining) == len(undecided):
                self._refuse_several(remaining[0], matches[remaining[0]], shapes[remaining[0]])
            undecided = remaining
        return {name: divisions[name] for name in matches}

    def _hypotheses(self, matches: Iterable[RowMatch], shape: Shape) -> list[_Hypothesis]:
        """Return what no size refutes."""
        hypotheses = []
        for match in matches:
            axes = match.axes
            if axes is None:  # codes of a quantised tensor
                continue
            cuts = match.cuts if self._count > 1 else ()
            for axis in cuts if cuts and self._is_parallel else (None, *cuts):
                whole = tuple([n * self._count if a == axis else n for a, n in enumerate(shape)])
                if any(self._refutes(name, n) for name, n in zip(axes, whole, strict=True)):
                    continue
                blocks = () if axis is None else self._blocks(match, axis, shape[axis])
                if blocks is not None:
                    hypotheses.append(_Hypothesis(Division(axis, blocks), whole, axes))
        return hypotheses

    def _refutes(self, axis: str | None, extent: int) -> bool:
        size = None if axis is None or axis in LOCAL_AXES else evaluate(axis, self._sizes)
        return size is not None and size != extent

    def _blocks(self, match: RowMatch, axis: int, extent: int) -> tuple[int, ...] | None:
        """Return the extents of fused parts on a rank; None if their division is unknown."""
        expression, flags = (match.axes or ())[axis] or "", match.row.flags
        if "fused" in flags:
            sizes = [evaluate(part, self._sizes) for part in self._parts(expression)]
            if len(set(self._parts(expression))) == 1 and extent % len(sizes) == 0:
                return (extent // len(sizes),) * len(sizes)
            if any(size is None or size % self._count for size in sizes):
                return None
            return tuple([size // self._count for size in sizes if size is not None])
        is_fused = match.row.slot.endswith(_FUSED) or "+" in expression or expression[:1].isdigit()
        return (extent,) if "interleaved" in flags or not is_fused else None

    def _parts(self, expression: str) -> list[str]:
        """Return the parts of a sum, ``ff`` twice for ``2*ff``."""
        parts = []
        for term in self._root.table.sizes.get(expression, (expression,))[0].split("+"):
            number, _, part = term.partition("*")
            parts += [part] * int(number) if number.isdecimal() else [term]
        return parts

    def _learn(self, hypotheses: Iterable[_Hypothesis]) -> None:
        """Take over sizes that are not stated, but follow from the shape of a whole tensor."""
        shapes = {hypothesis[1:] for hypothesis in hypotheses}
        if len(shapes) == 1:
            whole, axes = shapes.pop()
            for axis, extent in zip(axes, whole, strict=True):
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
        ways = [f"along axis {axis}" for axis in sorted(a for a in axes if a is not None)]
        ways += ["not at all"] if None in axes else []
        unknown = [axis for axis in matches[0].axes or () if axis and self._size_text(axis) == axis]
        _refuse(
            f"{shown(name)} with shape {list(shape)} may be divided {' or '.join(ways)}: nothing "
            f"states the size of {', '.join(unknown) or 'its parts'}"
        )

    def _size_text(self, axis: str | None) -> str:
        size = None if axis is None else evaluate(axis, self._sizes)
        return axis or "?" if size is None else f"{axis} = {size}"


def _matches(root: Root, shapes: Mapping[str, Shape]) -> dict[str, list[RowMatch]]:
    """Return the rows of the tensors of the model; others belong to an optimizer or to one rank."""
    container, dot, _ = root.prefix.partition(".")
    names = [name for name in shapes if not name.endswith(f".{_EXTRA_STATE}")]
    matches = {}
    for name, key in zip(names, masked(list(map(plain, names))), strict=True):
        rows = root.matches_of(plain(name), shorten(key), len(shapes[name]))
        if rows or name.startswith(container + dot):
            matches[name] = rows
    return matches


def _with_hidden_dim(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the extent of the feed-forward layers of Llama.

    It follows from other sizes, as in ``FeedForward`` of github.com/meta-llama/llama, model.py.
    """
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
    """Return the names in the whole model of the tensors in each stage of a pipeline.

    Every stage counts its layers from 0. Raise `UnsupportedError` unless they are as many as
    `layers`, the number that is stated.
    """
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
