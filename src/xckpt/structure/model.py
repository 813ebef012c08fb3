"""`Structure`: the tensors of a model, described from all sources, strongest first.

1. The file states facts about the tensor: operators, classes of layers (`declared`).
2. The file states facts about the model: its config, the lists of an optimizer.
3. Names of a family of architectures (`families`).
4. Conventions of frameworks: words in names (`conventions`).
5. Shapes: a vector next to a matrix with the same extent is its bias.

The stronger source decides, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from xckpt.structure import conventions
from xckpt.structure.channels import Channels, channels_by_axes, channels_by_name
from xckpt.structure.config import config_in
from xckpt.structure.declared import Conclusion, conclude, describe_facts, facts_of
from xckpt.structure.forms import Form, forms_of, masked
from xckpt.structure.info import OF_TRAINING, PARAMETERS, Described, Evidence, Role, TensorInfo
from xckpt.structure.modules import RepeatedModules
from xckpt.structure.numbering import ParsedName, parse_name, split_leaf

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from xckpt.index import Index
    from xckpt.structure.families import Family, Place
    from xckpt.tensor_rows import Row

_SINGULAR = {"blk": "layer", "h": "layer", "block": "layer", "blocks": "layer", "layers": "layer"}
_OPEN = Conclusion()
# Facts from which roles follow.
_ABOUT_ROLES = frozenset({"uses", "class", "attribute"})
# Modules that transforms with fixed kernels are made of.
_OF_TRANSFORMS = frozenset({"convolution", "linear"})


class Structure(Mapping[str, TensorInfo]):
    """The tensors of a model: a mapping of names to `TensorInfo`.

    Roles, repeated modules and scales are worked out for all tensors together, when they are first
    asked for. `config` is the config of the model, such as the content of ``config.json``.
    """

    def __init__(
        self, tensors: Iterable[Described | Row], config: Mapping[str, Any] | None = None
    ) -> None:
        self._tensors: dict[str, Described | Row] = {tensor.name: tensor for tensor in tensors}
        self._config = config or {}

    def __getitem__(self, name: str) -> TensorInfo:
        return self._info(self.described(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (list(self._tensors.values()), self._config)

    def described(self, name: str) -> Described:
        """Return the name, type and shape of a tensor, and the facts about it."""
        tensor = self._tensors[name]
        return Described(name, tensor.dtype, tensor.shape, tensor.declared)

    # --- roles -----------------------------------------------------------------------------------

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
        forms = masked(list(self._tensors))
        tensors = self._tensors.values()
        keys = [(form, t.dtype, t.shape) for form, t in zip(forms, tensors, strict=True)]
        roles = {key: conventions.role_by_name(*key) for key in set(keys)}
        return dict(zip(self._tensors, map(roles.__getitem__, keys), strict=True))

    @cached_property
    def _resolved(self) -> tuple[dict[str, Role], dict[str, str]]:
        """Roles that do not follow from the name of the tensor alone, and the scales of codes."""
        declared = {
            name: role
            for name, conclusion in self._conclusions.items()
            if (role := self._declared_role(name, conclusion)) is not None
        }
        declared |= {n: Role(text) for n in self._corrected if (text := self._user(n, "role"))}
        if not conventions.may_have_codes({tensor.dtype for tensor in self._tensors.values()}):
            return declared, {}
        roles = self._named_roles | declared
        dtypes = {name: t.dtype for name, t in self._tensors.items() if name not in declared}
        changed, scales = conventions.roles_beside_codes(roles, dtypes)
        scales = {n: s for n, s in scales.items() if declared.get(n) in {None, Role.CODES}}
        if declared:
            dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
            by_name = conventions.roles_beside_codes(roles, dtypes)[1]
            codes = [name for name, role in declared.items() if role is Role.CODES]
            scales |= {name: by_name.get(name, "") for name in codes}
        return changed | declared, scales

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
        fixed, nodes = set(), set()
        kernels = {n: c for n, c in self._conclusions.items() if c.module_type in _OF_TRANSFORMS}
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
        return conclusion.role

    @property
    def scales(self) -> dict[str, str]:
        """Name of the scales of each tensor of codes; empty if it is unknown."""
        return self._resolved[1]

    @cached_property
    def packed(self) -> dict[str, int]:
        """Number of elements of tensors whose stored elements hold several each."""
        return {
            name: tensor.declared["elements"]
            for name, tensor in self._tensors.items()
            if tensor.declared and "elements" in tensor.declared
        }

    @cached_property
    def _owners(self) -> dict[str, str]:
        """Tensor that each scale belongs to."""
        return {
            scales: codes
            for codes, scales in reversed(self.scales.items())
            if self.roles[codes] is Role.CODES and scales
        }

    # --- family ----------------------------------------------------------------------------------

    @cached_property
    def _family(self) -> Family | None:
        # Most processes need no tables.
        from xckpt.structure.families import family_of

        of_model = {
            n: t.shape for n, t in self._tensors.items() if self.roles[n] not in OF_TRAINING
        }
        return family_of(of_model, self._config)

    @property
    def family(self) -> str:
        """Name of the family of architectures, such as ``"llama"``; empty if it is unknown."""
        return self._family.name if self._family is not None else ""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model by the names of its axes, such as ``{"embd": 4096}``."""
        return self._family.sizes if self._family is not None else {}

    def place(self, name: str) -> Place | None:
        """Return the place of a tensor in its family; None if it is unknown."""
        if self._family is None or self.roles[name] in OF_TRAINING:
            return None
        return self._family.describe(name, tuple(self._tensors[name].shape))

    # --- modules ---------------------------------------------------------------------------------

    @cached_property
    def forms(self) -> list[Form]:
        """Tensors of one shape and role whose names differ only in numbers."""
        roles = self.roles
        kinds = ((len(t.shape), roles[name].value) for name, t in self._tensors.items())
        return forms_of(list(self._tensors), kinds)

    @cached_property
    def _repeated(self) -> RepeatedModules:
        forms = (
            (form.template, form.kind[0], form.indices)
            for form in self.forms
            if Role(form.kind[1]) not in {*OF_TRAINING, Role.CONSTANT}
        )
        return RepeatedModules(forms)

    def parse(self, name: str) -> ParsedName:
        """Take a name apart, with indices of repeated modules only."""
        if self.roles.get(name) in OF_TRAINING:
            return ParsedName((name,), (), ())
        return self._repeated.restrict(parse_name(name))

    def siblings_key(self, name: str) -> ParsedName:
        """Take a name apart for comparison with its siblings, which differ in indices only.

        The entries of an optimizer are siblings, too.
        """
        if self.roles.get(name) in OF_TRAINING:
            return parse_name(name)
        return self.parse(name)

    @cached_property
    def _layers(self) -> dict[str, str]:
        """Name of the layer that owns each tensor, if the file states layers."""
        paths: dict[str, set[str]] = {}
        layers: dict[str, tuple[str, str]] = {}
        for name, tensor in self._tensors.items():
            layer = (tensor.declared or {}).get("layer")
            if layer and self.roles[name] not in OF_TRAINING:
                path = split_leaf(name)[0].removesuffix("/vars")
                layers[name] = layer, path
                paths.setdefault(layer, set()).add(path)
        return {n: layer if len(paths[layer]) == 1 else path for n, (layer, path) in layers.items()}

    def layer(self, name: str) -> str:
        """Return the path of the outermost repeated module of a tensor, or its layer; or ``""``."""
        if self._layers:
            return self._layers.get(name, "")
        return self.parse(name).outermost

    @property
    def has_layers(self) -> bool:
        """Whether the file states the layers of the model by name."""
        return bool(self._layers)

    @cached_property
    def norms(self) -> frozenset[str]:
        """Names of the gains of norms."""
        vectors = {
            name: tensor.shape
            for name, tensor in self._tensors.items()
            if sum([extent != 1 for extent in tensor.shape]) <= 1
        }
        norms = conventions.gains_of_norms(vectors)
        for name, conclusion in self._conclusions.items():
            if conclusion.module_type:
                is_gain = conclusion.module_type == "norm" and conclusion.param == "weight"
                (norms.add if is_gain and name in vectors else norms.discard)(name)
        # Names of a file without facts do not tell constants of a graph from gains.
        return frozenset(n for n in norms if self.roles[n] not in {Role.CONSTANT, Role.SCALE})

    @cached_property
    def _modules_of_norms(self) -> frozenset[str]:
        return frozenset([module for name in self.norms if (module := split_leaf(name)[0])])

    def module_type(self, name: str) -> str:
        """Return the kind of the module that owns a tensor; empty if it is unknown."""
        return self._module_type(name, self.place(name))

    def _module_type(self, name: str, place: Place | None) -> str:
        conclusion = self._conclusions.get(name, _OPEN)
        stated = self._user(name, "module_type") or conclusion.module_type
        if stated:
            return stated
        if place is not None and place.module_type:
            return place.module_type
        if name in self.norms or split_leaf(name)[0] in self._modules_of_norms:
            return "norm"
        return conventions.module_type_by_name(name, self._tensors[name].shape)

    def slot(self, name: str) -> str:
        """Return the place of a tensor in the architecture; empty if it is unknown."""
        return self._slot(name, self.place(name))

    def _slot(self, name: str, place: Place | None) -> str:
        if place is not None:
            return self._user(name, "slot") or place.slot
        node = (self._tensors[name].declared or {}).get("node", "")
        by_name = conventions.slot_by_name(name) or conventions.slot_by_name(node)
        return self._user(name, "slot") or by_name

    def component(self, name: str) -> str:
        """Return the part of a checkpoint that a tensor belongs to; empty if it has one part."""
        return self._component(name, self.place(name))

    def _component(self, name: str, place: Place | None) -> str:
        stated = self._user(name, "component")
        if place is not None:
            return stated or place.component
        return stated or conventions.component_by_name(name, self.roles[name])

    def has_experts(self, name: str) -> bool:
        """Return whether a tensor belongs to the experts of a mixture."""
        return conventions.names_experts(name)

    def channels(self, name: str) -> Channels | None:
        """Return the axes of the channels of a weight; None if they are unknown."""
        tensor = self.described(name)
        if len(tensor.shape) < 2:
            return None
        if self.module_type(name) == "embedding":  # a row for each token
            return Channels((0,), (1,)) if len(tensor.shape) == 2 else None
        if any(tensor.axes):
            return channels_by_axes(tensor.axes)
        return channels_by_name(name, len(tensor.shape))

    # --- one tensor ------------------------------------------------------------------------------

    def _info(self, tensor: Described) -> TensorInfo:
        name = tensor.name
        role = self.roles[name]
        conclusion = self._conclusions.get(name, _OPEN)
        place = self.place(name)
        module, _, leaf = split_leaf(name)
        return TensorInfo(
            role=role,
            component=self._component(name, place),
            module=self._layers.get(name, module),
            module_type=self._module_type(name, place),
            slot=self._slot(name, place),
            param=conclusion.param or (place.param if place is not None else leaf),
            axes=self._axes(tensor, place),
            indices=place.indices if place is not None else self._indices(name),
            owner=self._owners.get(name),
            evidence=tuple(self._evidence(tensor, role, conclusion, place)),
        )

    def _axes(self, tensor: Described, place: Place | None) -> tuple[str | None, ...]:
        """Return the names of the axes, of which those in the file come first."""
        if any(tensor.axes) or place is None or place.axes is None:
            return tensor.axes
        return place.axes

    def _indices(self, name: str) -> tuple[tuple[str, int], ...]:
        """Return the indices of repeated modules in a name."""
        parsed = self.parse(name)
        return tuple(
            [
                (_SINGULAR.get(module, module.removesuffix("s")), int(index))
                for module, index in zip(parsed.modules, parsed.indices, strict=True)
            ]
        )

    def _evidence(
        self, tensor: Described, role: Role, conclusion: Conclusion, place: Place | None
    ) -> Iterator[Evidence]:
        """Yield the reasons for the role and the type of the module, strongest first."""
        name, stated = tensor.name, conclusion.role
        for field, value in (tensor.declared or {}).get("user", {}).items():
            yield Evidence("user", field, value, "structure=")
        if stated is not None:
            yield Evidence("file", "role", stated, conclusion.reason, stated is role)
        if conclusion.module_type:
            yield Evidence("file", "module_type", conclusion.module_type, conclusion.reason)
        if stated is None and tensor.declared:
            facts = ", ".join(describe_facts(tensor.declared))
            if facts:
                yield Evidence("file", "role", "", facts, decided=False)
        if any(tensor.axes):
            axes = ", ".join([str(axis) for axis in tensor.axes])
            yield Evidence("file", "axes", axes, "names of axes")
        if place is not None:
            yield from self._evidence_of_family(tensor, conclusion, place)
        by_name = self._named_roles[name]
        if name in self.scales and role is Role.CODES and self.scales[name]:
            yield Evidence("convention", "role", role, f"its scales are {self.scales[name]}")
        elif by_name is not role and role is Role.SCALE and stated is None:
            yield Evidence("convention", "role", role, "it is next to codes")
        else:
            yield Evidence("convention", "role", by_name, "its name", by_name is role)

    def _evidence_of_family(
        self, tensor: Described, conclusion: Conclusion, place: Place
    ) -> Iterator[Evidence]:
        """Yield the fields of a tensor that follow from its family."""
        name = tensor.name
        yield Evidence("family", "slot", place.slot, place.reason, not self._user(name, "slot"))
        if place.module_type:
            is_stated = self._user(name, "module_type") or conclusion.module_type
            kind = place.module_type
            yield Evidence("family", "module_type", kind, place.reason, not is_stated)
        if place.axes is not None and any(place.axes):
            axes = ", ".join([axis or "?" for axis in place.axes])
            yield Evidence("family", "axes", axes, place.reason, not any(tensor.axes))


def structure_of(index: Index) -> Structure:
    """Return the structure of a file; it is made once for each Index."""
    return index.once(_structure)


def _structure(index: Index) -> Structure:
    tensors = index.tensors.values()
    return Structure(
        [Described(t.name, t.scheme or t.dtype, t.shape, facts_of(t)) for t in tensors],
        config_in(index.attrs),
    )
