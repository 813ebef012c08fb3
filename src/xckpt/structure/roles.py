"""`Roles`: the purpose of each tensor of a model, and the scales that belong to codes."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from xckpt.structure import conventions
from xckpt.structure.declared import TRAINED, Conclusion, conclude
from xckpt.structure.facts import ModelFacts, listed_by_number
from xckpt.structure.forms import grouped, masked
from xckpt.structure.info import OF_TRAINING, PARAMETERS, Described, Role
from xckpt.structure.numbering import module_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from xckpt.tensor_rows import Row

# Facts from which roles follow.
_ABOUT_ROLES = frozenset({"uses", "class", "attribute", "parameter_of", "module_class"})
_OF_NO_GRAPH = OF_TRAINING | {Role.AVERAGE, Role.STATISTIC}
# Modules that transforms with fixed kernels are made of.
_OF_TRANSFORMS = frozenset({"convolution", "linear"})


class Roles:
    """The tensors of a model, and their roles, which are worked out for all tensors together."""

    def __init__(self, tensors: Iterable[Described | Row], facts: ModelFacts | None = None) -> None:
        self._tensors: dict[str, Described | Row] = {tensor.name: tensor for tensor in tensors}
        #: Facts about the model as a whole.
        self.facts = facts or ModelFacts()

    @cached_property
    def _conclusions(self) -> dict[str, Conclusion]:
        """Conclusions from the facts of the file, for tensors that it states facts about."""
        stated = {
            name: (tensor.declared, tensor.dtype, tensor.shape)
            for name, tensor in self._tensors.items()
            if tensor.declared and not _ABOUT_ROLES.isdisjoint(tensor.declared)
        }
        conclusions = {name: conclude(*facts) for name, facts in stated.items()}
        # Some exporters write initializers, and others store the weights as values of nodes.
        if any(
            conclusions[name].module_type in {"convolution", "linear"} and facts[0].get("constant")
            for name, facts in stated.items()
        ):
            return {n: conclude(*facts, has_weights_in_nodes=True) for n, facts in stated.items()}
        return conclusions

    @cached_property
    def _named_roles(self) -> dict[str, Role]:
        """Role of each tensor by its own name."""
        roles = [Role.WEIGHT] * len(self._tensors)
        for key, places in self._groups.items():
            role = conventions.role_by_name(*key)
            for place in places if role is not Role.WEIGHT else ():
                roles[place] = role
        return dict(zip(self._tensors, roles, strict=True))

    @cached_property
    def _groups(self) -> dict[tuple[str, str, tuple[int, ...]], list[int]]:
        """Positions of tensors by masked name, type and shape: 100,000 tensors have few groups."""
        tensors = self._tensors.values()
        shapes = [tensor.shape for tensor in tensors]
        return grouped(masked(list(self._tensors)), [tensor.dtype for tensor in tensors], shapes)

    @property
    def extents(self) -> frozenset[int]:
        """Extents of all axes of the tensors."""
        return frozenset(extent for _, _, shape in self._groups for extent in shape)

    @property
    def factors(self) -> frozenset[tuple[int, ...]]:
        """Shapes of the factors of an adapter; empty if most weights are those of a model."""
        shapes: Counter[tuple[int, ...]] = Counter()
        for (mask, _, shape), places in self._groups.items():
            if conventions.names_factor(mask):
                shapes[shape] += len(places)
        weights = Counter(self.roles.values())[Role.WEIGHT] if shapes else 0
        return frozenset(shapes) if shapes.total() * 2 >= weights else frozenset()

    @cached_property
    def _resolved(self) -> tuple[dict[str, Role], dict[str, str]]:
        """Roles that do not follow from the name of the tensor alone, and the scales of codes."""
        declared = {
            name: role
            for name, conclusion in self._conclusions.items()
            if (role := self._declared_role(name, conclusion)) is not None
        }
        declared |= {n: Role(text) for n in self._corrected if (text := self._user(n, "role"))}
        by_model = self._roles_by_config | dict.fromkeys(self._listed, Role.WEIGHT)
        if not conventions.may_have_codes({tensor.dtype for tensor in self._tensors.values()}):
            return by_model | self._constant_buffers(()) | declared, {}
        roles = self._named_roles | by_model | declared
        dtypes = {name: t.dtype for name, t in self._tensors.items() if name not in declared}
        changed, scales = conventions.roles_beside_codes(roles, dtypes)
        if declared:
            scales = {n: s for n, s in scales.items() if declared.get(n) in {None, Role.CODES}}
            dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
            codes, companions = conventions.codes_and_companions(dtypes)
            by_name = codes | companions
            stated = [name for name, role in declared.items() if role is Role.CODES]
            scales |= {name: by_name.get(name, "") for name in stated}
        modules = {module_of(name) for name, role in changed.items() if role is Role.CODES}
        return changed | self._constant_buffers(modules) | by_model | declared, scales

    @cached_property
    def _roles_by_config(self) -> dict[str, Role]:
        """Role of each tensor that the quantisation in the config of the model decides about."""
        if self.facts.quantization is None:
            return {}
        return self.facts.quantization.roles({n: t.dtype for n, t in self._tensors.items()})

    @cached_property
    def _listed(self) -> set[str]:
        """Names of the tensors that an optimizer lists by number."""
        if not self.facts.parameters:
            return set()
        roles, tensors = self._named_roles, self._tensors.values()
        excluded = {*OF_TRAINING, Role.AVERAGE}
        model = [t.name for t in tensors if t.dtype in TRAINED and roles[t.name] not in excluded]
        buffers = frozenset([n for n in model if roles[n] in {Role.STATISTIC, Role.COUNTER}])
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        return listed_by_number(self.facts.parameters, shapes, model, buffers)

    def _constant_buffers(self, modules_with_codes: Container[str]) -> dict[str, Role]:
        """Return the role of buffers with names of weights; buffers are not trained."""
        return {
            name: Role.CONSTANT
            for name, tensor in self._tensors.items()
            if tensor.declared and "buffer_of" in tensor.declared
            if self._named_roles[name] is Role.WEIGHT
            if module_of(name) not in modules_with_codes
        }

    @property
    def special_roles(self) -> dict[str, Role]:
        """Roles that do not follow from the name, type and shape of the tensor alone."""
        return self._resolved[0]

    def role(self, name: str) -> Role:
        """Return the role of a tensor, without working out those of all tensors."""
        tensor = self._tensors[name]
        role = self.special_roles.get(name)
        if role is None:
            (form,) = masked([name])
            role = conventions.role_by_name(form, tensor.dtype, tensor.shape)
        return self.roles[name] if role is Role.AVERAGE else role

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Role of each tensor."""
        roles = self._named_roles | self.special_roles
        # Averages are the weights of a checkpoint that has no others.
        if not any(role in PARAMETERS for role in roles.values()):
            roles = {n: Role.WEIGHT if r is Role.AVERAGE else r for n, r in roles.items()}
        return roles

    @cached_property
    def averaged(self) -> frozenset[str]:
        """Names of averages, and of the buffers of the copies of a model that they are in."""
        averages = {name for name, role in self.roles.items() if role is Role.AVERAGE}
        copies = set(map(conventions.averaged_copy, averages)) - {""}
        if not copies:
            return frozenset(averages)
        buffers = {
            name
            for name, role in self.roles.items()
            if role is not Role.WEIGHT and conventions.averaged_copy(name) in copies
        }
        return frozenset(averages | buffers)

    @cached_property
    def _corrected(self) -> frozenset[str]:
        """Names of tensors that the user states something about."""
        tensors = self._tensors.items()
        return frozenset([name for name, t in tensors if t.declared and "user" in t.declared])

    def _user(self, name: str, field: str) -> str:
        """Return what the user states about a field of a tensor; empty if nothing."""
        if name not in self._corrected:
            return ""
        text: str = (self._tensors[name].declared or {})["user"].get(field, "")
        return text

    @cached_property
    def _fixed(self) -> frozenset[str]:
        """Names of kernels of transforms that are never trained, and of their biases."""
        # An operator does not state whether its kernel was trained; names of nodes often tell.
        # The class of a layer does.
        fixed, nodes = set(), set()
        kernels = [
            name
            for name, conclusion in self._conclusions.items()
            if conclusion.module_type in _OF_TRANSFORMS
            if "uses" in (self._tensors[name].declared or {})
        ]
        for name in kernels:
            node = (self._tensors[name].declared or {}).get("node", "")
            if any(map(conventions.is_fixed_by_name, (name, node))):
                fixed.add(name)
                nodes.add(node)
        for name in kernels:
            if (self._tensors[name].declared or {}).get("node", "") in nodes - {""}:
                fixed.add(name)
        return frozenset(fixed)

    def _declared_role(self, name: str, conclusion: Conclusion) -> Role | None:
        """Return the role that facts decide; None leaves it to names."""
        if conclusion.role is Role.WEIGHT and name in self._fixed:
            return Role.CONSTANT
        # No graph has the state of an optimizer, whatever its tensors are called.
        if conclusion.role is None and self._named_roles[name] in _OF_NO_GRAPH:
            uses = (self._tensors[name].declared or {}).get("uses")
            return Role.WEIGHT if uses else None
        return conclusion.role

    @property
    def scales(self) -> dict[str, str]:
        """Name of the scales of each tensor of codes; empty if it is unknown."""
        return self._resolved[1]

    @cached_property
    def packed(self) -> dict[str, int]:
        """Number of elements of tensors whose stored elements hold several each."""
        packed = {
            name: tensor.declared["elements"]
            for name, tensor in self._tensors.items()
            if tensor.declared and "elements" in tensor.declared
        }
        quantization = self.facts.quantization
        if quantization is None:
            return packed
        for name, role in self._roles_by_config.items():
            tensor = self._tensors[name]
            elements = quantization.elements(tensor.dtype, prod(tensor.shape))
            if role is Role.CODES and elements is not None:
                packed.setdefault(name, elements)
        return packed

    @cached_property
    def _owners(self) -> dict[str, str]:
        """Tensor that each scale belongs to."""
        return {
            scales: codes
            for codes, scales in reversed(self.scales.items())
            if self.roles[codes] is Role.CODES and scales
        }
