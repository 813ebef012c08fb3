"""Every tensor is in one stack at one position, or in none; stacks are full grids."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from xckpt.labels.grids import find_stacks, member_names

COMPONENTS = st.sampled_from(
    [
        *("0", "1", "2", "10", "00", "007", "a", "b", "layers", "²", "-1", ""),
        *("/", "a/1", "layers_0", "layers_1", "block-01", "layer_._0", "h0", "h1_a"),
    ]
)
NAMES = st.lists(COMPONENTS, min_size=1, max_size=5).map(".".join)


@given(
    st.dictionaries(NAMES, st.integers(0, 2), max_size=40),
    st.sampled_from([None, {"layers"}]),
    st.booleans(),
)
def test_nothing_is_lost_and_names_come_back(
    kinds: dict[str, int], only: set[str] | None, outer: bool
) -> None:
    # Those of kind 0 cannot be absent.
    stacks = find_stacks(
        kinds, only, may_be_absent=(lambda name: kinds[name] > 0) if outer else None
    )
    members = [name for each in stacks for name in each.members]
    assert len(members) == len(set(members))
    assert set(members) <= set(kinds)
    for each in stacks:
        assert len(each.members) > 1
        assert len({kinds[name] for name in each.members}) == 1
        places = list(each.arrange(each.members))
        every = member_names(each.template, each.indices)
        assert [name for name in every if name in each.members] == list(each.members)
        assert all(name in {None, at} for name, at in zip(places, every, strict=True))
        assert each.present is None or (outer and None in places and kinds[each.members[0]] > 0)
        assert len(each.dims) == len(set(each.dims)) == len(each.indices)
        assert all(tuple(sorted(set(along))) == along for along in each.indices)
    names = [each.name for each in stacks]
    dims = {
        dim: along for each in stacks for dim, along in zip(each.dims, each.indices, strict=True)
    }
    assert len(names) == len(set(names))
    for each in stacks:
        assert [dims[dim] for dim in each.dims] == list(each.indices)
    # A variable, a dimension and a tensor never share a name.
    assert not {*names, *dims} & set(kinds)
    assert not set(names) & set(dims)


def test_experts_within_layers() -> None:
    kinds = {f"m.layers.{i}.norm": 1 for i in range(5)}
    kinds |= {f"m.layers.{i}.mlp.w": 2 for i in range(2)}
    kinds |= {f"m.layers.{i}.experts.{e}.w": 2 for i, e in product(range(2, 5), range(4))}
    norm, dense, experts = find_stacks(kinds)
    assert (norm.name, norm.dims, norm.shape) == ("m.layers.norm", ("layers",), (5,))
    assert (dense.dims, dense.indices) == (("layers_1",), ((0, 1),))
    assert (experts.dims, experts.shape) == (("layers_2", "experts"), (3, 4))
    assert experts.members[:2] == ("m.layers.2.experts.0.w", "m.layers.2.experts.1.w")


def test_only_some_components() -> None:
    kinds = {f"layers.{i}.experts.{e}.w": 0 for i, e in product(range(2), range(3))}
    stacks = find_stacks(kinds, {"layers"})
    assert [each.name for each in stacks] == [f"layers.experts.{e}.w" for e in range(3)]
    assert all(each.dims == ("layers",) for each in stacks)
    assert find_stacks(kinds, {"blocks"}) == []


def test_members_of_other_kinds_and_gaps() -> None:
    """A block of another shape stays as it is, and gaps are honest."""
    kinds = {"layer1.0.conv": (64, 3), "layer1.1.conv": (64, 64), "layer1.5.conv": (64, 64)}
    (found,) = find_stacks(kinds)
    assert found.name == "layer1.conv"
    assert found.indices == ((1, 5),)


def test_two_kinds_of_one_name() -> None:
    kinds = {f"h.{i}.w": 8 if i < 3 else 16 for i in range(8)}
    small, large = find_stacks(kinds)
    assert (large.name, large.dims) == ("h.w", ("h",))
    assert (small.name, small.dims) == ("h.w_1", ("h_1",))


def test_a_grid_with_holes_is_cut_into_full_ones() -> None:
    kinds = {f"l.{i}.e.{e}.w": 0 for i, e in product(range(4), range(4)) if (i, e) != (3, 3)}
    whole, rest = find_stacks(kinds)
    assert whole.shape == (3, 4)
    assert (rest.name, rest.dims, rest.indices) == ("l.3.e.w", ("e_1",), ((0, 1, 2),))


def test_a_stack_gives_way_to_a_tensor_of_its_name() -> None:
    (found,) = find_stacks({"h.w": 0, "h": 0, "h.0.w": 1, "h.1.w": 1})
    assert (found.name, found.dims) == ("h.w_1", ("h_1",))


def test_an_index_that_stands_first() -> None:
    (found,) = find_stacks({"0.weight": 0, "2.weight": 0})
    assert (found.name, found.dims, found.indices) == ("weight", ("index",), ((0, 2),))
    assert find_stacks({"0": 0, "1": 0}) == []


def test_stated_paths_are_not_split() -> None:
    kinds = {"a.0": 0, "a.1": 0}
    assert find_stacks(kinds, paths={name: (name,) for name in kinds}) == []


def test_deeply_numbered_names() -> None:
    name = ".".join(["a", *["1"] * 300])
    (found,) = find_stacks({name: 0, name[:-1] + "2": 0})
    assert (found.name, found.dims) == (name[:-2], ("a",))
