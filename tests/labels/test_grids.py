"""Every tensor is in one stack at one position, or in none; stacks are full grids."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.labels.stacks import find_stacks
from xckpt.labels.grids import member_names

WORDS = st.sampled_from(
    [
        *("0", "1", "2", "10", "00", "007", "a", "b", "layers", "²", "-1", ""),
        *("/", "a/1", "layers_0", "layers_1", "block-01", "layer_._0", "h0", "h1_a"),
    ]
)
NAMES = st.lists(WORDS, min_size=1, max_size=5).map(".".join)


@given(
    st.dictionaries(NAMES, st.integers(0, 2), max_size=40),
    st.sampled_from([None, {"layers"}]),
    st.booleans(),
)
def test_members_and_names_are_never_lost(
    kinds: dict[str, int], modules: set[str] | None, outer: bool
) -> None:
    # Tensors of kind 0 cannot be absent.
    may_be_absent = (lambda name: kinds[name] > 0) if outer else None
    stacks = find_stacks(kinds, modules, may_be_absent=may_be_absent)
    members = [name for stack in stacks for name in stack.members]
    assert len(members) == len(set(members))
    assert set(members) <= set(kinds)
    for stack in stacks:
        assert len(stack.members) > 1
        assert len({kinds[name] for name in stack.members}) == 1
        positions = list(stack.arrange(stack.members))
        all_names = member_names(stack.template, stack.indices)
        assert [name for name in all_names if name in stack.members] == list(stack.members)
        assert all(
            member in {None, name} for member, name in zip(positions, all_names, strict=True)
        )
        if stack.present is not None:
            assert outer
            assert None in positions
            assert kinds[stack.members[0]] > 0
        assert len(stack.dims) == len(set(stack.dims)) == len(stack.indices)
        assert all(tuple(sorted(set(indices))) == indices for indices in stack.indices)
    names = [stack.name for stack in stacks]
    indices_by_dim = {
        dim: indices
        for stack in stacks
        for dim, indices in zip(stack.dims, stack.indices, strict=True)
    }
    assert len(names) == len(set(names))
    for stack in stacks:
        assert [indices_by_dim[dim] for dim in stack.dims] == list(stack.indices)
    # A variable, a dimension and a tensor never have the same name.
    assert not {*names, *indices_by_dim} & set(kinds)
    assert not set(names) & set(indices_by_dim)


def test_experts_in_layers_have_two_dimensions() -> None:
    kinds = {f"m.layers.{i}.norm": 1 for i in range(5)}
    kinds |= {f"m.layers.{i}.mlp.w": 2 for i in range(2)}
    kinds |= {f"m.layers.{i}.experts.{e}.w": 2 for i, e in product(range(2, 5), range(4))}
    norm, dense, experts = find_stacks(kinds)
    assert (norm.name, norm.dims, norm.shape) == ("m.layers.norm", ("layers",), (5,))
    assert (dense.dims, dense.indices) == (("layers_1",), ((0, 1),))
    assert (experts.dims, experts.shape) == (("layers_2", "experts"), (3, 4))
    assert experts.members[:2] == ("m.layers.2.experts.0.w", "m.layers.2.experts.1.w")


def test_only_named_modules_are_stacked() -> None:
    kinds = {f"layers.{i}.experts.{e}.w": 0 for i, e in product(range(2), range(3))}
    stacks = find_stacks(kinds, {"layers"})
    assert [stack.name for stack in stacks] == [f"layers.experts.{e}.w" for e in range(3)]
    assert all(stack.dims == ("layers",) for stack in stacks)
    assert find_stacks(kinds, {"blocks"}) == []


def test_tensor_of_another_kind_is_not_stacked() -> None:
    kinds = {"layer1.0.conv": (64, 3), "layer1.1.conv": (64, 64), "layer1.5.conv": (64, 64)}
    (stack,) = find_stacks(kinds)
    assert stack.name == "layer1.conv"
    assert stack.indices == ((1, 5),)


def test_two_kinds_of_the_same_name_are_two_stacks() -> None:
    kinds = {f"h.{i}.w": 8 if i < 3 else 16 for i in range(8)}
    small, large = find_stacks(kinds)
    assert (large.name, large.dims) == ("h.w", ("h",))
    assert (small.name, small.dims) == ("h.w_1", ("h_1",))


def test_grid_with_holes_is_split_into_full_grids() -> None:
    kinds = {f"l.{i}.e.{e}.w": 0 for i, e in product(range(4), range(4)) if (i, e) != (3, 3)}
    large, small = find_stacks(kinds)
    assert large.shape == (3, 4)
    assert (small.name, small.dims, small.indices) == ("l.3.e.w", ("e_1",), ((0, 1, 2),))


def test_stack_never_has_the_name_of_a_tensor() -> None:
    (stack,) = find_stacks({"h.w": 0, "h": 0, "h.0.w": 1, "h.1.w": 1})
    assert (stack.name, stack.dims) == ("h.w_1", ("h_1",))


def test_index_without_module_names_its_dimension_index() -> None:
    (stack,) = find_stacks({"0.weight": 0, "2.weight": 0})
    assert (stack.name, stack.dims, stack.indices) == ("weight", ("index",), ((0, 2),))
    assert find_stacks({"0": 0, "1": 0}) == []


def test_stated_path_is_not_split_at_dots() -> None:
    kinds = {"a.0": 0, "a.1": 0}
    assert find_stacks(kinds, paths={name: (name,) for name in kinds}) == []


def test_name_with_hundreds_of_indices() -> None:
    name = ".".join(["a", *["1"] * 300])
    (stack,) = find_stacks({f"{name}.w": 0, f"{name[:-1]}2.w": 0})
    assert (stack.name, stack.dims) == (f"{name[:-2]}.w", ("a",))
