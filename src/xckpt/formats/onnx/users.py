"""The operators of a graph that use a tensor."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Path = tuple[str, ...]
    _Value = tuple[Path, str]

# Operators whose first input has the same elements as their output, in the same axes.
KEPT = frozenset({"Cast", "CastLike", "Identity", "DequantizeLinear", "QuantizeLinear"})
# The same, but in other axes.
_MOVED = frozenset({"Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Tile"})
# Uses of a tensor that are stated, and operators between it and a use.
_MOST_USES, _MOST_BETWEEN = 8, 6
# A number from a file: no tensor has more elements.
_MOST_ELEMENTS = 1 << 62


class Node(NamedTuple):
    """A node of a graph."""

    path: Path  # of its graph
    label: str
    operator: str
    inputs: list[str]
    outputs: list[str]
    numbers: Mapping[str, int]  # attributes


class Use(NamedTuple):
    """A use of a tensor by an operator."""

    node: str
    operator: str
    position: int
    #: Attributes of the operator that are integers.
    numbers: Mapping[str, int]
    #: Operators that compute the other inputs; empty for an input of the graph.
    others: tuple[str, ...]
    #: Whether the operator sees the axes of the tensor, or both in reverse; None if it does not.
    axes: str | None = "kept"


class Users:
    """The nodes of all graphs of a model, by the values that they use."""

    # A value is the path of its graph and its name there: joined, paths could take much memory.

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        #: First words of paths beyond which no name of an outer graph is visible.
        self.scopes: set[str] = set()
        #: Full names of the tensors of graphs.
        self.tensors: dict[_Value, str] = {}
        self._operators: dict[_Value, str] = {}
        self._users: dict[_Value, list[tuple[Node, int]]] = defaultdict(list)

    def add(self, node: Node) -> None:
        """Add a node."""
        self._nodes.append(node)

    def by_tensor(self) -> dict[str, list[Use]]:
        """Return the uses of each tensor that has any, directly or through other operators."""
        self._operators = {
            (node.path, output): node.operator
            for node in self._nodes
            if node.operator != "Constant"
            for output in node.outputs
        }
        self._users.clear()
        for node in self._nodes:
            for position, name in enumerate(node.inputs):
                value = self._value(node.path, name)
                if value is not None:
                    self._users[value].append((node, position))
        return {
            name: list(islice(self._uses(value, "kept", _MOST_BETWEEN), _MOST_USES))
            for value, name in self.tensors.items()
            if value in self._users
        }

    def _value(self, path: Path, name: str) -> _Value | None:
        """Return the value that a name in a graph means: that of the innermost graph with it."""
        least = 1 if path and path[0] in self.scopes else 0
        for depth in range(len(path), least - 1, -1) if name else ():
            value = path[:depth], name
            if value in self.tensors or value in self._operators:
                return value
        return None

    def _uses(self, value: _Value, axes: str | None, room: int) -> Iterator[Use]:
        for node, position in self._users.get(value, ()):
            yield Use(
                node.label,
                node.operator,
                position,
                node.numbers,
                self._others(node, position),
                axes,
            )
            if not position and room and node.operator in KEPT | _MOVED and node.outputs:
                after = axes if node.operator in KEPT else None
                if node.operator == "Transpose" and axes is not None:
                    after = "reversed" if axes == "kept" else "kept"
                yield from self._uses((node.path, node.outputs[0]), after, room - 1)

    def _others(self, node: Node, position: int) -> tuple[str, ...]:
        """Return the operators that compute the other inputs of a node."""
        values = [
            self._value(node.path, name)
            for place, name in enumerate(node.inputs[:_MOST_USES])
            if place != position and name
        ]
        return tuple(
            [
                self._operators.get(value, "") if value is not None else ""
                for value in values
                if value not in self.tensors
            ]
        )


def elements_by(use: Use) -> int | None:
    """Return the number of elements in packed codes, if the operator states it."""
    if (use.operator, use.position) != ("MatMulNBits", 1):
        return None
    elements = use.numbers.get("K", 0) * use.numbers.get("N", 0)
    return elements if 0 < elements <= _MOST_ELEMENTS else None
