"""ONNX models (``.onnx``): initializers and constants, in the file or in files next to it.

A file is a protobuf message without a magic and without a table of contents. A message is a
sequence of fields. A field begins with ``number << 3 | wire type``, a varint: seven bits per byte,
the lowest first, at most ten bytes. Its value follows::

    0  varint              2  varint length, bytes: text, message, packed numbers
    1  8 bytes             3  fields of a group, up to wire type 4 of the same number (obsolete)
    5  4 bytes

Fields have any order; unknown ones are skipped. The last of several values counts, but messages are
merged. Of the messages, these fields are read::

    Model      1 ir_version  2 producer_name  3 producer_version  4 domain  5 model_version
               6 doc_string  7 graph  8 opset_import {1 domain, 2 version}
               14 metadata_props {1 key, 2 value}  20 training_info {1, 2 graph}  25 functions
    Graph      1 node  2 name  5 initializer  15 sparse_initializer
    Function   1 name  7 node
    Node       1 input  2 output  3 name  4 op_type  5 attribute
    Attribute  1 name  3 i  5 tensor  6 graph  10 tensors  11 graphs  22 sparse_tensor
               23 sparse_tensors
    Tensor     1 dims  2 data_type  3 segment  8 name  9 raw_data  12 doc_string
               4 float_data  5 int32_data  6 string_data  7 int64_data  10 double_data
               11 uint64_data  13 external_data {1 key, 2 value}
               14 data_location (1: external)
    Sparse     1 values  2 indices  3 dims

``raw_data`` is little-endian; elements of 4 and 2 bits share bytes, the first in the lowest bits.
In ``int32_data`` each number is one element, or one byte of such elements. External data are a
range of a file in the folder of the model: ``location``, ``offset``, ``length`` as decimal texts.

The name of an initializer is its own, that of a Constant the name of its output; other tensors have
the path of node, attribute and inner graph, joined by "/". Axes are named by the operators that use
a tensor. Names in a graph are unique. xckpt raises an error for data that do not fit the shape,
also where onnx ignores the rest, and reads no file but those in the folder of the model.

Specification: onnx/onnx.proto and docs/ExternalData.md of github.com/onnx/onnx, 1.23.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from xckpt.errors import FormatError, UnsupportedError, shown
from xckpt.formats import Format, Readable
from xckpt.formats.foreign import is_versioned_message
from xckpt.formats.onnx.tensors import BYTES, TYPES, VARINT, ProtoReader, signed
from xckpt.index import Index, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Path = tuple[str, ...]
    _Value = tuple[Path, str]

# Attributes of the model by field.
_NUMBERS = {1: "ir_version", 5: "model_version"}
_TEXTS = {2: "producer_name", 3: "producer_version", 4: "domain", 6: "doc_string"}

_DEEPEST = 32  # graphs in graphs: protobuf stops at 100 messages
_MOST_NAMES = 1 << 25  # characters of all names together: each repeats the names of outer graphs
_SEEN_FIRST = frozenset(bytes([0x08, 0x12, 0x1A, 0x22, 0x2A, 0x32, 0x3A, 0x42, 0x72]))


class Onnx(Format):
    """ONNX models (``.onnx``), with data inside or next to the file."""

    name = "onnx"
    description = "ONNX models"
    storage_attrs = ("ir_version", "opset_import", "producer_name", "producer_version")
    types = {number: dtype for number, (dtype, _) in TYPES.items()}  # noqa: RUF012

    def detect(self, head: bytes, size: int, name: str) -> bool:
        """Return whether a model begins; without a magic, a fitting suffix lowers the demand."""
        if head[4:8] == b"ORTM" or len(head) < 2 or is_versioned_message(head):
            return False
        is_model = head[0] == 8 and 0 < head[1] <= 20 and head[2:3] and head[2] in _SEEN_FIRST
        is_named = name.partition("?")[0].lower().endswith(".onnx")
        return bool(is_model) or (is_named and head[0] & 7 in {0, 1, 2} and not head.isascii())

    def read(self, source: Readable, *, constants: bool = True) -> Index:
        """Walk the model, and skip the data of tensors.

        Parameters
        ----------
        source : Readable
            The file.
        constants : bool
            Include the tensors in attributes of nodes, such as those of Constant nodes.

        Returns
        -------
        Index
            Initializers, constants, and tensors of inner graphs.
        """
        if not source.size:
            raise FormatError("the file is empty", offset=0, rule="Empty")
        model = _ModelReader(source, constants=constants)
        model.read()
        version, size = str(model.attrs.get("ir_version", "")), source.size
        tensors, attrs, notes = model.named(), model.attrs, model.notes.warnings()
        return Index(self.name, version, tensors, attrs, source.name, size, model.shards, notes)


class _ModelReader(ProtoReader):
    """The model of a file, whose tensors are collected by name."""

    __slots__ = ("_constants", "_room", "_tensors", "_users", "_values", "attrs")

    def __init__(self, source: Readable, *, constants: bool) -> None:
        super().__init__(source)
        self.attrs: dict[str, Any] = {}
        self._constants = constants
        self._tensors: dict[str, Tensor] = {}
        self._room = _MOST_NAMES
        self._values: set[str] = set()  # of Constant nodes
        self._users = Users()

    def read(self) -> None:
        """Read all fields of the model."""
        trainings = 0
        for number, wire, value in self.entries():
            if number in _NUMBERS and wire == VARINT:
                self.attrs[_NUMBERS[number]] = signed(value)
            elif wire != BYTES:
                continue
            elif number == 7:
                self._graph(value, (), 0)
            elif number == 20:
                self._training(value, str(trainings))
                trainings += 1
            elif number == 25:
                self._function(value)
            else:
                self._describe(number, value)
        if not self.attrs.get("ir_version") and not self._tensors:
            reason = "the message has neither a version nor tensors"
            raise FormatError(reason, offset=0, rule="Model")

    def _describe(self, number: int, nbytes: int) -> None:
        """Read an attribute of the model."""
        if number in _TEXTS:
            self.attrs[_TEXTS[number]] = self.string(nbytes, _TEXTS[number])
        elif number == 8:
            domain, _, version = self.pair(nbytes)
            self.attrs.setdefault("opset_import", {})[domain] = version
        elif number == 14:
            key, text, _ = self.pair(nbytes)
            self.attrs.setdefault(key, text)

    def _training(self, nbytes: int, position: str) -> None:
        with self.inside(nbytes, "training_info"):
            for number, wire, value in self.entries():
                if wire == BYTES and number in {1, 2}:
                    name = "initialization" if number == 1 else "algorithm"
                    self._graph(value, ("training_info", position, name), 1)

    def named(self) -> dict[str, Tensor]:
        """Return all tensors, with their users if operators of a graph use them."""
        tensors = dict(self._tensors)
        for name, uses in self._users.by_tensor().items():
            tensor = tensors[name]
            declared: dict[str, Any] = {
                "uses": tuple([(use.operator, use.position, use.others) for use in uses]),
                "orders": tuple([use.axes for use in uses]),
                "settings": tuple([use.numbers for use in uses]),
                "node": next((u.node for u in uses if u.operator not in KEPT), uses[0].node),
            }
            if name in self._values:
                declared["constant"] = True
            elements = next((n for use in uses if (n := elements_by(use))), None)
            if elements is not None:
                declared["elements"] = elements
            first = uses[0]
            used_by = f"{first.node}: {first.operator}[{first.position}]"
            attrs = {**tensor.attrs, "used_by": used_by}
            tensors[name] = replace(tensor, attrs=attrs, declared=declared)
        return tensors

    # --- graphs, nodes, attributes ---

    def _graph(self, nbytes: int, path: tuple[str, ...], depth: int) -> None:
        if depth > _DEEPEST:
            reason = f"graphs are nested deeper than {_DEEPEST} levels"
            raise FormatError(reason, offset=self.at, rule="Depth")
        with self.inside(nbytes, "a graph"):
            position = 0
            for number, wire, value in self.entries():
                if wire != BYTES:
                    continue
                if number == 1:
                    self._node(value, path, depth, position)
                    position += 1
                elif number == 2 and not path:
                    self.attrs["graph_name"] = self.string(value, "the name of a graph")
                elif number == 5:
                    self._add_initializer(self.dense(value, path, None), path)
                elif number == 15:
                    self._add_initializer(self.sparse(value, path, None), path)

    def _function(self, nbytes: int) -> None:
        nodes, name = [], ""
        with self.inside(nbytes, "a function"):
            for number, wire, value in self.entries():
                if number == 1 and wire == BYTES:
                    name = self.string(value, "the name of a function")
                elif number == 7 and wire == BYTES:
                    nodes.append((self.at, value))
            self._users.scopes.add(name)
            for position, (offset, size) in enumerate(nodes):
                self.at = offset
                self._node(size, (name,), 1, position)

    def _node(self, nbytes: int, path: tuple[str, ...], depth: int, position: int) -> None:
        name, operator = "", ""
        inputs: list[str] = []
        outputs: list[str] = []
        attributes = []
        with self.inside(nbytes, "a node"):
            for number, wire, value in self.entries():
                if wire != BYTES or number not in {1, 2, 3, 4, 5}:
                    continue
                if number == 5:
                    attributes.append((self.at, value))
                    continue
                text = self.string(value, "a name in a node")
                if number == 3:
                    name = text
                elif number == 4:
                    operator = text
                else:
                    (inputs if number == 1 else outputs).append(text)
            output = next((text for text in outputs if text), "")
            label = name or output or f"#{position}"
            numbers: dict[str, int] = {}
            for offset, size in attributes:
                self.at = offset
                result = output if operator == "Constant" else None
                self._attribute(size, (*path, label), depth, numbers, (path, result))
        self._users.add(Node(path, label, operator, inputs, outputs, numbers))

    def _attribute(
        self,
        nbytes: int,
        path: tuple[str, ...],
        depth: int,
        numbers: dict[str, int],
        result: tuple[tuple[str, ...], str | None],
    ) -> None:
        """Read an attribute of a node; `result` is the path and the name of a constant."""
        name = ""
        values: list[tuple[int, int, int]] = []
        with self.inside(nbytes, "an attribute"):
            for number, wire, value in self.entries():
                if number == 1 and wire == BYTES:
                    name = self.string(value, "the name of an attribute")
                elif number == 3 and wire == VARINT:
                    numbers[name] = signed(value)
                elif number in {5, 6, 10, 11, 22, 23} and wire == BYTES:
                    values.append((number, self.at, value))
            in_lists: dict[int, int] = defaultdict(int)
            for number, offset, size in values:
                self.at = offset
                graph_path = (*path, name)
                if number in {10, 11, 23}:
                    graph_path = (*graph_path, str(in_lists[number]))
                    in_lists[number] += 1
                if number in {6, 11}:
                    self._graph(size, graph_path, depth + 1)
                elif self._constants:
                    place, constant = graph_path, ""
                    if result[1] is not None and name in {"value", "sparse_value"}:
                        place, constant = result[0], result[1]
                    read = self.sparse if number in {22, 23} else self.dense
                    self._add_value(read(size, place, constant), place, constant)

    def _add_initializer(self, tensor: Tensor, path: tuple[str, ...]) -> None:
        name = tensor.name.removeprefix("/".join(path) + "/") if path else tensor.name
        self._users.tensors[path, name] = tensor.name
        self._add(tensor)

    def _add_value(self, tensor: Tensor, path: tuple[str, ...], constant: str) -> None:
        """Add a tensor in an attribute; `constant` is its name if it is the value of a node."""
        if not constant:
            self._add(replace(tensor, declared={"attribute": True}), is_unique=False)
            return
        self._add(tensor)
        self._values.add(tensor.name)
        self._users.tensors[path, constant] = tensor.name

    def _add(self, tensor: Tensor, *, is_unique: bool = True) -> None:
        """Add a tensor; names of initializers and constants are unique, names of nodes are not."""
        name, number = tensor.name, 2
        while name in self._tensors:
            if is_unique:
                reason = f"the name {shown(name)} is there twice"
                raise FormatError(reason, offset=self.at, tensor=name, rule="DuplicateName")
            name, number = f"{tensor.name}#{number}", number + 1
        self._room -= len(name) + 64
        if self._room < 0:
            reason = f"all names together are longer than {_MOST_NAMES}"
            raise UnsupportedError(reason, offset=self.at, rule="NameLength")
        self._tensors[name] = tensor if name == tensor.name else replace(tensor, name=name)


# --- operators that use a tensor ------------------------------------------------------------------

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
        """Return the value of a name in a graph, from the innermost graph that has the name."""
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
