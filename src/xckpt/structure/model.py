"""`Structure`: the tensors of a model, described from all sources, strongest first.

1. The file states facts about the tensor: operators, classes of layers (`declared`).
2. The file states facts about the model: its config, the lists of an optimizer (`facts`).
3. Names of a family of architectures (`families`).
4. Conventions of frameworks: words in names (`conventions`).
5. Shapes: a vector next to a matrix with the same extent is its bias.

The stronger source decides, field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from xckpt.index import Index, paused_collector
from xckpt.structure import conventions
from xckpt.structure.axes import (
    Channels,
    axes_by_facts,
    axes_in_modules,
    channels_by_axes,
    channels_by_name,
    channels_of_family,
)
from xckpt.structure.declared import Conclusion, describe_facts, facts_of
from xckpt.structure.facts import ModelFacts, model_facts
from xckpt.structure.forms import Form, RepeatedModules, forms_of_groups
from xckpt.structure.info import OF_TRAINING, Described, Evidence, Role, TensorInfo
from xckpt.structure.numbering import (
    ParsedName,
    drop_indices,
    leaf_of,
    module_of,
    numbered_modules,
    parse_name,
)
from xckpt.structure.roles import Roles

if TYPE_CHECKING:
    from xckpt.structure.families import Family, Place
    from xckpt.structure.families.tables import NameTable
    from xckpt.tensor_rows import Row

    Template = tuple[str | None, ...]

_OPEN = Conclusion()


class Structure(Roles, Mapping[str, TensorInfo]):
    """The tensors of a model: a mapping of names to `TensorInfo`.

    Roles, repeated modules and scales are worked out for all tensors together, when they are first
    asked for.
    """

    def __init__(
        self,
        tensors: Iterable[Described | Row],
        facts: ModelFacts | None = None,
        find_family: Callable[[], Family | None] | None = None,
    ) -> None:
        super().__init__(tensors, facts)
        self._find_family = find_family

    def __getitem__(self, name: str) -> TensorInfo:
        return self._info(self.described(name))

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (list(self._tensors.values()), self.facts)

    def with_facts(self, facts: ModelFacts) -> Structure:
        """Return the structure of the same tensors with other facts about their model."""
        return Structure(self._tensors.values(), facts)

    def described(self, name: str) -> Described:
        """Return the name, type and shape of a tensor, and the facts about it."""
        tensor = self._tensors[name]
        declared, axes = tensor.declared, self._axes_by_facts.get(name)
        if axes is not None:
            declared = {**(declared or {}), "axes": axes}
        return Described(name, tensor.dtype, tensor.shape, declared)

    @cached_property
    def _axes_by_facts(self) -> dict[str, tuple[str | None, ...]]:
        """Names of axes that the file does not state, but that follow from its facts."""
        tensors = self._tensors.values()
        unnamed = [t for t in tensors if not t.declared or "axes" not in t.declared]
        return axes_in_modules(unnamed, self.facts) | axes_by_facts(unnamed, self.facts)

    # --- family ----------------------------------------------------------------------------------

    @cached_property
    def models(self) -> Family | None:
        """The family of the models in the file; None if it is unknown."""
        if self._find_family is not None:
            return self._find_family()
        # Most processes need no tables.
        from xckpt.structure.families import family_of

        roles = self.roles
        of_model = {
            name: tensor.shape
            for name, tensor in self._tensors.items()
            # Most of 100,000 tensors are weights, and hashing a role takes longer.
            if (role := roles[name]) is Role.WEIGHT or role not in OF_TRAINING
        }
        return family_of(of_model, self.facts)

    @property
    def family(self) -> str:
        """Family of architectures: "llama", "gemma3"; empty if it is unknown.

        It is spelled as in the file, or as the table of names if the file states none.
        """
        return self.facts.family or (self.models.name if self.models is not None else "")

    @property
    def components(self) -> Mapping[str, str]:
        """Family of each model in the checkpoint, by component; empty if they are unknown."""
        return self.models.components if self.models is not None else {}

    @property
    def contradicts_config(self) -> bool:
        """True if this model lacks the tensors of the known type that its config states."""
        if self.models is not None or not self.facts.config:
            return False
        from xckpt.structure.families import has_table

        return has_table(self.facts.types)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the model by the names of its axes, such as ``{"embd": 4096, "head": 32}``.

        Those that the file does not state are the extents on which the tensors of a family agree.
        """
        by_family = self.models.sizes if self.models is not None else {}
        return {**self.facts.sizes, **by_family}

    def sizes_of(self, component: str, *axes: str) -> list[int]:
        """Return the known sizes of axes in a component, or else in the model."""
        sizes = self.sizes
        stated = [sizes.get(f"{component}.{axis}", sizes.get(axis)) for axis in axes]
        return [size for size in stated if size is not None]

    def place(self, name: str) -> Place | None:
        """Return the place of a tensor in its family; None if it is unknown."""
        if self.models is None or self.roles[name] in OF_TRAINING:
            return None
        return self.models.describe(name, tuple(self._tensors[name].shape))

    @property
    def tables(self) -> Sequence[NameTable]:
        """Tables of all names that libraries give to models of the family."""
        from xckpt.structure.families.choosing import related_tables

        return related_tables(self.models, self.facts.types)

    # --- modules ---------------------------------------------------------------------------------

    @cached_property
    def forms(self) -> list[Form]:
        """Tensors of one shape and role whose names differ only in numbers."""
        names = list(self._tensors)
        roles = list(self.roles.values())
        groups: dict[Any, list[int]] = {}
        for (mask, _, shape), places in self._groups.items():
            of_role: dict[Role, list[int]] = {roles[places[0]]: places}
            if self.special_roles:
                of_role = {}
                for place in places:
                    of_role.setdefault(roles[place], []).append(place)
            for role, members in of_role.items():
                key = mask, (len(shape), role.value)
                groups[key] = groups[key] + members if key in groups else members
        return forms_of_groups(names, groups)

    @cached_property
    def _repeated(self) -> RepeatedModules:
        return RepeatedModules(
            lambda: [
                (form.template, form.kind[0], form.indices)
                for form in self.forms
                if Role(form.kind[1]) not in {*OF_TRAINING, Role.CONSTANT}
            ]
        )

    def indices(self, name: str) -> tuple[tuple[str, int], ...]:
        """Return the number of each repeated module that a tensor is in, outermost first."""
        return self._indices(name, self.place(name))

    def _indices(self, name: str, place: Place | None) -> tuple[tuple[str, int], ...]:
        if place is not None:
            return place.indices
        parsed = self.parse(name)
        return tuple(
            [
                (conventions.repeated_module(module), int(index))
                for module, index in zip(parsed.modules, parsed.indices, strict=True)
            ]
        )

    def parse(
        self, name: str, only: Collection[str] | None = None, path: Sequence[str] | None = None
    ) -> ParsedName:
        """Take a name apart, with indices of repeated modules only.

        `only` has the numbered modules that a user names instead, repeated or not; `path` the words
        of the name if dots do not separate them.
        """
        if only is not None:
            return parse_name(name, only, path)
        if self.roles.get(name) in OF_TRAINING:
            return ParsedName((name,), (), ())
        return self._repeated.restrict(parse_name(name, None, path))

    def kept(self, template: Template) -> tuple[bool, ...]:
        """Return whether each number in a template is the index of a repeated module."""
        return self._repeated.kept(template)

    def numbered(
        self, only: Collection[str] | None = None
    ) -> Iterator[tuple[Template, list[tuple[tuple[str, ...], str]]]]:
        """Yield tensors in repeated modules by template, each with its indices.

        `only` has the numbered modules that a user names instead, repeated or not.
        """
        names = list(self._tensors)
        groups: dict[Template, list[tuple[tuple[str, ...], str]]] = {}
        for name in names if only is not None else ():
            parsed = parse_name(name, only)
            groups.setdefault(parsed.template, []).append((parsed.indices, name))
        yield from groups.items()
        for form in self.forms if only is None else ():
            kept = self._repeated.kept(form.template) if form.columns else ()
            if not any(kept) or Role(form.kind[1]) in OF_TRAINING:
                continue
            members = [names[place] for place in form.places]
            if all(kept):
                yield (
                    form.template,
                    list(zip(zip(*form.columns, strict=True), members, strict=True)),
                )
                continue
            groups = {}
            for name in members:
                parsed = self.parse(name)
                groups.setdefault(parsed.template, []).append((parsed.indices, name))
            yield from groups.items()

    def repeated_modules(self, names: Container[str] | None = None) -> list[str]:
        """Return the names of the repeated modules, such as ``layers``, that tensors are in."""
        modules: dict[str, None] = {}
        for template, members in self.numbered():
            if names is None or any(name in names for _, name in members):
                modules |= dict.fromkeys(numbered_modules(template))
        return list(modules)

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
                path = module_of(name).removesuffix("/vars")
                layers[name] = layer, path
                paths.setdefault(layer, set()).add(path)
        return {n: layer if len(paths[layer]) == 1 else path for n, (layer, path) in layers.items()}

    def bare_module(self, name: str) -> str:
        """Return the path of the module of a tensor without the indices of repeated modules."""
        return module_of(drop_indices(self.siblings_key(name).template))

    def layer(self, name: str) -> str:
        """Return the path of the outermost repeated module of a tensor, or its layer; or ``""``."""
        if self._layers:
            return self._layers.get(name, "")
        return self.parse(name).outermost

    @property
    def has_layers(self) -> bool:
        """True if the file states the layers of the model by name."""
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
        return frozenset([module for name in self.norms if (module := module_of(name))])

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
        if name in self.norms or module_of(name) in self._modules_of_norms:
            return "norm"
        return conventions.module_type_by_name(name, self._tensors[name].shape)

    def param(self, name: str) -> str:
        """Return the name of a tensor in its module, as PyTorch calls it if the file states it."""
        return self._param(name, self.place(name))

    def _param(self, name: str, place: Place | None) -> str:
        stated = self._conclusions.get(name, _OPEN).param
        return stated or (leaf_of(name) if place is None else place.param)

    def slot(self, name: str) -> str:
        """Return the place of a tensor in the architecture; empty if it is unknown."""
        return self._slot(name, self.place(name))

    def _slot(self, name: str, place: Place | None) -> str:
        if place is not None:
            return self._user(name, "slot") or place.slot
        node = (self._tensors[name].declared or {}).get("node", "")
        by_name = conventions.slot_by_name(name) or conventions.slot_by_name(node)
        return self._user(name, "slot") or by_name

    def weight_of(self, slot: str) -> str | None:
        """Return the weight of a module that a model has once, such as ``"output"``, the head."""
        names = (name for name in self if self.slot(name) == slot)
        return next((name for name in names if self.param(name) == "weight"), None)

    def is_bias(self, name: str) -> bool:
        """Return whether a tensor is the bias of its module."""
        is_bias = conventions.param_in_dense(name) == "bias"
        return is_bias or conventions.names_bias(self.param(name))

    def is_kernel(self, name: str) -> bool:
        """Return whether a tensor is a kernel of Flax or Keras, whose inputs come first."""
        return "kernel" in {leaf_of(name), conventions.param_in_dense(name)}

    def is_variance(self, name: str) -> bool:
        """Return whether a tensor is a running variance."""
        is_statistic = self.roles[name] is Role.STATISTIC
        return is_statistic and conventions.names_variance(self.param(name))

    def is_counter(self, name: str) -> bool:
        """Return whether a tensor counts something, such as the batches of a norm."""
        is_counter = self.roles[name] is Role.COUNTER
        return is_counter and conventions.names_counter(self.param(name))

    def is_factor(self, name: str) -> bool:
        """Return whether a tensor multiplies codes; a zero point does not."""
        is_float = self._tensors[name].dtype.startswith(("float", "bfloat"))
        is_scale = self.roles[name] is Role.SCALE and is_float
        return is_scale and not conventions.names_zero_point(leaf_of(name))

    def is_setting(self, name: str) -> bool:
        """Return whether the file states that a tensor is an argument of an operator."""
        return self._conclusions.get(name, _OPEN).role is Role.CONSTANT

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

    def begins_as_zeros(self, name: str) -> bool:
        """Return whether a matrix is all zeros in a new model."""
        return conventions.begins_as_zeros(name)

    def is_of_squares(self, name: str) -> bool:
        """Return whether a moment is an average of squares, so that no element is negative."""
        return conventions.is_of_squares(name)

    def channels(self, name: str) -> Channels | None:
        """Return the axes of the channels of a weight; None if they are unknown."""
        tensor = self.described(name)
        if len(tensor.shape) < 2:
            return None
        if self.module_type(name) == "embedding":  # a row for each token
            return Channels((0,), (1,)) if len(tensor.shape) == 2 else None
        by_facts = channels_by_axes(tensor.axes)
        if by_facts is not None:
            return by_facts
        place = self.place(name)
        if place is not None and place.outputs is not None and place.inputs is not None:
            return channels_of_family(place.axes or (), place.outputs, place.inputs)
        return None if any(tensor.axes) else channels_by_name(name, len(tensor.shape))

    # --- one tensor ------------------------------------------------------------------------------

    def _info(self, tensor: Described) -> TensorInfo:
        name = tensor.name
        role = self.roles[name]
        conclusion = self._conclusions.get(name, _OPEN)
        place = self.place(name)
        return TensorInfo(
            role=role,
            component=self._component(name, place),
            module=self._layers.get(name, module_of(name)),
            module_type=self._module_type(name, place),
            slot=self._slot(name, place),
            param=self._param(name, place),
            axes=self._axes(tensor, place),
            indices=self._indices(name, place),
            owner=self._owners.get(name),
            evidence=tuple(self._evidence(tensor, role, conclusion, place)),
        )

    def _axes(self, tensor: Described, place: Place | None) -> tuple[str | None, ...]:
        """Return the names of the axes; names by facts come first."""
        if any(tensor.axes) or place is None or place.axes is None:
            return tensor.axes
        return place.axes

    def _evidence(
        self, tensor: Described, role: Role, conclusion: Conclusion, place: Place | None
    ) -> Iterator[Evidence]:
        """Yield the reasons for the fields of a tensor, strongest first."""
        for field, value in (tensor.declared or {}).get("user", {}).items():
            yield Evidence("user", field, value, "structure=")
        by_facts = [
            *self._evidence_of_facts(tensor, role, conclusion),
            *self._evidence_of_axes(tensor, conclusion),
        ]
        yield from sorted(by_facts, key=lambda evidence: evidence.source == "model")
        if place is not None:
            yield from self._evidence_of_family(tensor, conclusion, place)
        name, by_name = tensor.name, self._named_roles[tensor.name]
        if name in self.scales and role is Role.CODES and self.scales[name]:
            yield Evidence("convention", "role", role, f"its scales are {self.scales[name]}")
        elif by_name is not role and role is Role.SCALE and conclusion.role is None:
            yield Evidence("convention", "role", role, "it is next to codes")
        else:
            yield Evidence("convention", "role", by_name, "its name", by_name is role)

    def _evidence_of_facts(
        self, tensor: Described, role: Role, conclusion: Conclusion
    ) -> Iterator[Evidence]:
        """Yield the reasons for the role and the type of the module that the file states."""
        name, stated = tensor.name, conclusion.role
        if stated is not None:
            yield Evidence("file", "role", stated, conclusion.reason, stated is role)
        if conclusion.module_type:
            yield Evidence("file", "module_type", conclusion.module_type, conclusion.reason)
        if stated is None and tensor.declared:
            facts = ", ".join(describe_facts(tensor.declared))
            if facts:
                is_buffer = "buffer_of" in tensor.declared and role is not self._named_roles[name]
                value = role if is_buffer else ""
                yield Evidence("file", "role", value, facts, decided=is_buffer)
        if by_config := self._roles_by_config.get(name):
            quantization = self.facts.quantization
            reason = f"config: quantised with {quantization.method}" if quantization else ""
            yield Evidence("model", "role", by_config, reason, by_config is role)
        if name in self._listed:
            reason = "in the list of an optimizer, by its order and shape"
            yield Evidence("model", "role", Role.WEIGHT, reason, role is Role.WEIGHT)

    def _evidence_of_axes(self, tensor: Described, conclusion: Conclusion) -> Iterator[Evidence]:
        """Yield the reason for the names of the axes that the file states or that follow."""
        name = tensor.name
        if any(tensor.axes):
            axes = ", ".join([str(axis) for axis in tensor.axes])
            by_facts = name in self._axes_by_facts
            reason = (conclusion.reason or "its module") if by_facts else "names of axes"
            if by_facts and self.facts.naming and not self._tensors[name].declared:
                yield Evidence("model", "axes", axes, "sizes of the model")
            else:
                yield Evidence("file", "axes", axes, reason)

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


def structure_of(index: Index, config: Mapping[str, Any] | None = None) -> Structure:
    """Return the structure of a file; it is made once for each Index.

    Parameters
    ----------
    index : Index
        Contents of the file.
    config : mapping, optional
        ``config.json`` of the model. By default, the attribute ``config`` of the file.
    """
    structure = index.once(_structure)
    if config is None or config == index.attrs.get("config"):
        return structure
    return structure.with_facts(model_facts(index.attrs, config, index.format))


def family_of_index(index: Index) -> Family | None:
    """Return the family of the models in a file; None if it is unknown."""
    return index.once(_family)


def _family(index: Index) -> Family | None:
    # Roles that follow from facts separate the tensors of a model and of its training.
    declared = [tensor.declared for tensor in index.tensors.values()]
    if any(declared):
        return structure_of(index).models
    from xckpt.structure.families import family_of

    shapes = {name: tensor.shape for name, tensor in index.tensors.items()}
    return family_of(shapes, model_facts(index.attrs, format=index.format))


def _structure(index: Index) -> Structure:
    tensors = index.tensors.values()
    # A loop over up to 100,000 tensors, most of which are dense and have no facts.
    dtypes = [t.dtype if t.layout == "dense" else t.scheme or t.dtype for t in tensors]
    facts = [facts_of(t) if t.attrs or t.declared or t.dims else None for t in tensors]
    shapes = [t.shape for t in tensors]
    declared = [t.declared for t in tensors]
    with paused_collector():
        return Structure(
            map(Described._make, zip(index.tensors, dtypes, shapes, facts, strict=True)),
            model_facts(index.attrs, format=index.format),
            None if any(declared) else lambda: family_of_index(index),
        )
