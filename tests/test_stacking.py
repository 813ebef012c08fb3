"""``stack=``, ``ds.ckpt.stack()`` and ``ds.ckpt.unstack()``: nothing is lost or read."""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import product
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from benchmarks.checkpoints import mixture_of_experts, write_ztensor
from tests.formats.burnpack_files import burnpack
from tests.formats.burnpack_files import dense as burnpack_dense
from tests.formats.ztensor_files import dense_v1, v1_file
from tests.sources import CountingSource
from xckpt import formats
from xckpt.datasets.making import make_dataset
from xckpt.datasets.options import OpenOptions
from xckpt.datasets.stack_records import member_variables
from xckpt.datasets.tensors import OpenTensors

if TYPE_CHECKING:
    from pathlib import Path

COMPONENTS = st.sampled_from(
    [
        *("0", "1", "2", "10", "00", "²", "9" * 20, "a", "b", "layers", "experts", "index", ""),
        *("%", "/", "layers_0", "layers_1", "a/0/b", "h0", "h1_a", "block-01", "layer_._1"),
    ]
)
NAMES = st.lists(COMPONENTS, min_size=1, max_size=5).map(".".join)
KINDS = st.sampled_from([("float32", (2,)), ("float32", (2, 2)), ("bfloat16", (2,)), ("int16", ())])
BAGS = st.dictionaries(NAMES, KINDS, min_size=1, max_size=30)
MODULES = st.sampled_from([True, "layers", ["layers", "experts"], ["a"]])
JOINS = st.sampled_from(["exact", "outer"])

LAYERS, EXPERTS = 4, 3
# Two dense layers before the others, which are mixtures of experts.
DENSE = 2


def moe() -> dict[str, np.ndarray]:
    """Make a small mixture of experts: every element of it is different."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (7, 4)}
    for layer in range(LAYERS):
        shapes[f"layers.{layer}.norm"] = (4,)
        if layer < DENSE:
            shapes[f"layers.{layer}.mlp.w"] = (4, 6)
        else:
            shapes |= {f"layers.{layer}.experts.{e}.w": (4, 5) for e in range(EXPERTS)}
    start = 0
    arrays = {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = np.arange(start, start + size, dtype="<f4").reshape(shape)
        start += size
    return arrays


def zt(arrays: dict[str, np.ndarray], attributes: dict[str, Any] | None = None) -> bytes:
    """Write arrays as a zTensor file."""
    return v1_file(
        {n: dense_v1(a.tobytes(), a.shape, a.dtype.name) for n, a in arrays.items()},
        attributes=attributes or {},
    )


def bag_file(bag: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Write tensors whose elements are their places in the file."""
    tensors = {}
    for at, (name, (dtype, shape)) in enumerate(bag.items()):
        size = {"float32": 4, "bfloat16": 2, "int16": 2}[dtype]
        data = at.to_bytes(2, "big") * (int(np.prod(shape)) * size // 2)
        tensors[name] = dense_v1(data, shape, dtype)
    return v1_file(tensors, attributes={"license": "MIT"})


def assert_same(actual: xr.Dataset, expected: xr.Dataset) -> None:
    """Compare everything: order, dimensions, attributes, encoding, and which arrays they have."""
    assert list(actual.variables) == list(expected.variables)
    assert dict(actual.sizes) == dict(expected.sizes)
    for name, variable in expected.variables.items():
        counterpart = actual.variables[name]
        assert counterpart.dims == variable.dims
        assert counterpart.attrs == variable.attrs
        assert counterpart.encoding == variable.encoding
        assert counterpart.chunks == variable.chunks
        assert counterpart.data.name == variable.data.name
    assert actual.attrs == expected.attrs
    assert _told(actual) == _told(expected)
    xr.testing.assert_identical(actual, expected)


def _told(ds: xr.Dataset) -> dict[Any, Any]:
    return {key: value for key, value in ds.encoding.items() if key != "namespace"}


# --- what stacking gives --------------------------------------------------------------------------


def test_layers_and_experts_are_dimensions() -> None:
    arrays = moe()
    ds = xr.open_dataset(zt(arrays), engine="ztensor", stack=True)
    assert list(ds.data_vars) == ["embed", "layers.norm", "layers.mlp.w", "layers.experts.w"]
    assert ds["layers.norm"].dims == ("layers", "d4")
    assert ds["layers.mlp.w"].dims == ("layers_1", "d4", "d6")
    assert ds["layers.experts.w"].dims == ("layers_2", "experts", "d4", "d5")
    for dim, indices in {"layers": [0, 1, 2, 3], "layers_1": [0, 1], "layers_2": [2, 3]}.items():
        assert ds.indexes[dim].tolist() == indices
    member = ds["layers.experts.w"].sel(layers_2=3, experts=1)
    np.testing.assert_array_equal(member, arrays["layers.3.experts.1.w"])
    np.testing.assert_array_equal(ds["layers.norm"].sel(layers=2), arrays["layers.2.norm"])
    assert isinstance(ds["layers.norm"].data, da.Array)


def test_every_tensor_is_at_one_position() -> None:
    arrays = moe()
    ds = xr.open_dataset(zt(arrays), engine="ztensor", stack=True)
    rows = [row.ravel() for v in ds.data_vars.values() for row in np.atleast_2d(v.values)]
    values = np.concatenate([np.ravel(row) for row in rows])
    expected = np.concatenate([array.ravel() for array in arrays.values()])
    assert sorted(values.tolist()) == sorted(expected.tolist())


def test_every_one_of_ten_thousand_tensors_is_at_one_position(tmp_path: Path) -> None:
    path = tmp_path / "moe.zt"
    write_ztensor(path, dict(mixture_of_experts(layers=10)))
    index = xckpt.read_index(path)
    ds = xr.open_dataset(path, engine="ztensor", stack=True)
    results = []
    for name, variable in ds.variables.items():
        if name in ds.coords:
            continue
        lazy = variable.data.dask.lazy
        names = list(member_variables(str(name), variable, ds.coords.variables))
        members = lazy.members if len(names) > 1 else [lazy]
        for tensor, member in zip(names, members, strict=True):
            assert member.reader.part == index.tensors[tensor].parts["data"]
            assert variable.shape[variable.ndim - member.ndim :] == index.tensors[tensor].shape
        results += names
    assert len(results) == len(index.tensors)
    assert set(results) == set(index.tensors)
    joined = xr.open_dataset(path, engine="ztensor", stack=True, join="outer")
    assert {v.sizes["layers"] for v in joined.variables.values() if "experts" in v.dims[1:]} == {10}
    assert set(OpenTensors(joined).stacked) == set(OpenTensors(ds).stacked)


def test_only_some_modules() -> None:
    for layers in ("layers", ["layers"], ("layers",)):
        ds = xr.open_dataset(zt(moe()), engine="ztensor", stack=layers)
        experts = [f"layers.experts.{e}.w" for e in range(EXPERTS)]
        assert list(ds.data_vars) == ["embed", "layers.norm", "layers.mlp.w", *experts]
    ds = xr.open_dataset(zt(moe()), engine="ztensor", stack="experts")
    assert ds["layers.3.experts.w"].dims == ("experts", "d4", "d5")
    assert "layers.3.norm" in ds


TOWERS = [f"model.{part}.layers.{n}.w" for part in ("encoder", "decoder") for n in range(3)]
EXPERTS_OF_LAYERS = [f"h.{n}.mlp.experts.{e}.w" for n in range(3) for e in range(2)]
JOINED = [f"{part}/Dense_{n}/w" for part in "ab" for n in range(2)]
DECODER = {"model.decoder.layers.w": "layers"}
BOTH = {"model.encoder.layers.w": "layers", **DECODER}
EXPERTS_ALONE = {f"h.{n}.mlp.experts.w": "experts" for n in range(3)}


@pytest.mark.parametrize(
    ("names", "stack", "dims"),
    [
        (TOWERS, "layers", BOTH),
        (TOWERS, "model.decoder.layers", DECODER),
        (TOWERS, "decoder.layers", DECODER),
        (TOWERS, "*.decoder.*", DECODER),
        (TOWERS, ["model.decoder.layers.*"], DECODER),
        (TOWERS, "model.*.layers", BOTH),
        (EXPERTS_OF_LAYERS, "h.mlp.experts", EXPERTS_ALONE),
        (EXPERTS_OF_LAYERS, "h.*.mlp.experts", EXPERTS_ALONE),
        (EXPERTS_OF_LAYERS, ["h", "mlp.experts"], {"h.mlp.experts.w": "h experts"}),
        (JOINED, "b/Dense", {"b/Dense/w": "Dense"}),
    ],
)
def test_modules_are_named_by_their_path(
    names: list[str], stack: Any, dims: dict[str, str]
) -> None:
    data = zt({name: np.zeros((2, 3), "<f4") for name in names})
    opened = xr.open_dataset(data, engine="ztensor", stack=stack)
    stacked = xr.open_dataset(data, engine="ztensor").ckpt.stack(stack)
    for ds in (opened, stacked):
        added = {n: v.dims[:-2] for n, v in ds.data_vars.items() if v.ndim > 2}
        assert added == {name: tuple(text.split()) for name, text in dims.items()}
        assert list(ds.ckpt.unstack()) == names


def test_paths_are_listed_where_modules_share_a_name() -> None:
    arrays = {name: np.zeros((2, 3), "<f4") for name in (*TOWERS, "blocks.0.w", "blocks.1.w")}
    text = "there are: 'model.encoder.layers', 'model.decoder.layers', 'blocks'"
    with pytest.warns(xckpt.CheckpointWarning, match=text):
        xr.open_dataset(zt(arrays), engine="ztensor", stack="encoder.layer")


def test_stacks_with_gaps_are_split() -> None:
    arrays = {f"h.{i}.w": np.full((2, 2), i, "<f4") for i in (0, 2, 7)}
    ds = xr.open_dataset(zt(arrays), engine="ztensor", stack=True)
    assert ds.indexes["h"].tolist() == [0, 2, 7]
    assert ds["h.w"].sel(h=7).values.tolist() == [[7, 7], [7, 7]]
    with pytest.raises(KeyError):
        ds.sel(h=1)


def test_other_shapes_and_types_stay_apart() -> None:
    arrays = {
        "h.0.w": np.zeros((2, 2), "<f4"),
        "h.1.w": np.ones((2, 2), "<f4"),
        "h.2.w": np.ones((2, 3), "<f4"),
        "h.3.w": np.ones((2, 2), "<f8"),
    }
    ds = xr.open_dataset(zt(arrays), engine="ztensor", stack=True)
    assert list(ds.data_vars) == ["h.w", "h.2.w", "h.3.w"]


def test_invalid_options() -> None:
    data = zt(moe())
    for wrong in (3, {"layers": 1}, [1], b"layers", None):
        with pytest.raises(TypeError, match="stack takes True"):
            xr.open_dataset(data, engine="ztensor", stack=wrong)
        with pytest.raises(TypeError, match="stack takes True"):
            xr.open_dataset(data, engine="ztensor").ckpt.stack(wrong)
    with pytest.warns(xckpt.CheckpointWarning, match="called 'layer'; there are: 'layers'"):
        flat = xr.open_dataset(data, engine="ztensor", stack="layer")
    assert list(flat.data_vars) == list(moe())
    with pytest.warns(xckpt.CheckpointWarning, match="called 'layer'; there are: 'layers'"):
        flat.ckpt.stack("layer")


def test_names_of_axes_with_stacking() -> None:
    data = zt(moe())
    for glob, names in {
        "*.experts.*.w": ("in", "out"),
        "layers.experts.w": ("in", "out"),
        "layers.experts.[w]": (None, None, "in", "out"),
        "layers.experts.w*": ("layers_2", None, "in", "out"),
    }.items():
        ds = xr.open_dataset(data, engine="ztensor", stack=True, dims={glob: names})
        assert ds["layers.experts.w"].dims == ("layers_2", "experts", "in", "out")
    with pytest.raises(ValueError, match=r"3 names.*'layers.experts.w' has 2 axes, 4 when stacked"):
        xr.open_dataset(data, engine="ztensor", stack=True, dims={"*.experts.w": ("a", "b", "c")})
    wrong = {"*.experts.w": ("depth", None, "a", "b")}
    with pytest.raises(ValueError, match=r"ds.rename\(\{'layers_2': 'depth'\}\)"):
        xr.open_dataset(data, engine="ztensor", stack=True, dims=wrong)
    # Members with other names of axes are not stacked.
    with_dims = xr.open_dataset(
        data, engine="ztensor", stack=True, dims={"layers.0.norm": ("one",)}
    )
    assert with_dims["layers.0.norm"].dims == ("one",)
    assert with_dims["layers.norm"].shape == (LAYERS - 1, 4)


def test_dropping_tensors_and_stacks() -> None:
    data = zt(moe())
    ds = xr.open_dataset(data, engine="ztensor", stack=True, drop_variables="layers.experts.w")
    assert "layers.experts.w" not in ds
    ds = xr.open_dataset(data, engine="ztensor", stack=True, drop_variables=["layers.1.norm"])
    assert ds["layers.norm"].shape == (3, 4)
    ds = xr.open_dataset(data, engine="ztensor", stack=True, tensors="layers.*")
    assert "embed" not in ds


# --- what is read ---------------------------------------------------------------------------------


def counted(arrays: dict[str, np.ndarray], **options: Any) -> tuple[CountingSource, xr.Dataset]:
    source = CountingSource(zt(arrays))
    index = formats.get("ztensor").read(source)
    source.reads.clear()
    return source, make_dataset(source, index, OpenOptions(**options))


def test_opening_reads_nothing_and_a_member_only_its_bytes() -> None:
    arrays = moe()
    source, ds = counted(arrays, stack=True)
    assert not source.reads
    member = ds["layers.experts.w"].sel(layers_2=3, experts=1).compute()
    np.testing.assert_array_equal(member, arrays["layers.3.experts.1.w"])
    assert source.nbytes_read == arrays["layers.3.experts.1.w"].nbytes
    source.reads.clear()
    ds["layers.experts.w"].isel(layers_2=0, d4=1, d5=slice(2, 4)).compute()
    assert source.nbytes_read == EXPERTS * 2 * 4
    source.reads.clear()
    everything = ds.compute()
    assert source.nbytes_read == sum(array.nbytes for array in arrays.values())
    xr.testing.assert_identical(everything.ckpt.unstack(), ds.ckpt.unstack().compute())


def test_small_members_share_a_chunk_and_large_ones_do_not() -> None:
    arrays = {f"h.{i}.b": np.full(8, i, "<f4") for i in range(50)}
    arrays |= {f"h.{i}.w": np.full((600, 600), i, "<f4") for i in range(3)}
    ds = xr.open_dataset(zt(arrays), engine="ztensor", stack=True)
    assert ds["h.b"].data.npartitions == 1
    assert ds["h.w"].chunks == ((1, 1, 1), (600,), (600,))
    with dask.config.set({"array.chunk-size": "480kB"}):
        ds = xr.open_dataset(zt(arrays), engine="ztensor", stack=True)
    assert ds["h.w"].chunks == ((1, 1, 1), (200, 200, 200), (600,))
    assert list(ds["h.w"].encoding["preferred_chunks"].values()) == [1, 200, 600]


@pytest.mark.parametrize(
    "key",
    [
        (slice(None), 1),
        (0, slice(None, None, -1)),
        ([2, 0], slice(None)),
        (-1, [1, 1], slice(1, 3)),
        (slice(None), slice(None), 2, 3),
        (slice(2, 1),),
        ([0], [2], [3], [1]),
    ],
)
def test_selections_equal_those_of_numpy(key: tuple[Any, ...]) -> None:
    arrays = {
        f"h.{i}.e.{e}.w": np.random.default_rng(i * 9 + e).random((4, 5)).astype("<f4")
        for i, e in product(range(3), range(4))
    }
    expected = np.stack(list(arrays.values())).reshape(3, 4, 4, 5)
    lazy = xr.open_dataset(zt(arrays), engine="ztensor", stack=True)["h.e.w"]
    np.testing.assert_array_equal(
        lazy[key].values, xr.Variable(tuple("abcd"), expected)[key].values
    )
    array = lazy.data.dask.lazy
    keys = [k if isinstance(k, list) else [k] if isinstance(k, int) else k for k in key]
    keys += [slice(None)] * (4 - len(keys))
    expected = expected[np.ix_(*[np.arange(n)[k] for k, n in zip(keys, (3, 4, 4, 5), strict=True)])]
    np.testing.assert_array_equal(array[tuple(keys)], expected)


def test_sparse_tensors_stack_sparse(golden: Path) -> None:
    path = golden / "ztensor" / "v1_sparse_csr.zt"
    flat = xr.open_dataset(path, engine="ztensor", sparse=True)
    name = next(name for name, v in flat.variables.items() if v.encoding["layout"] != "dense")
    renamed = xr.Dataset({f"h.{i}.w": flat.variables[name] for i in range(3)})
    stacked = renamed.ckpt.stack()["h.w"]
    assert type(stacked.data._meta).__name__ == "COO"
    loaded = stacked.compute().data
    assert type(loaded).__name__ == "COO"
    dense = flat.variables[name].data.compute().todense()
    np.testing.assert_array_equal(loaded.todense(), np.stack([dense] * 3))


# --- the inverse ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("open_", "assert_equal"),
    [(xr.open_dataset, assert_same), (xr.open_datatree, xr.testing.assert_identical)],
)
@given(bag=BAGS, modules=MODULES, join=JOINS)
def test_unstacking_is_the_inverse(
    open_: Any, assert_equal: Any, bag: dict[str, Any], modules: Any, join: Any
) -> None:
    data = bag_file(bag)
    flat = open_(data, engine="ztensor")
    with warnings.catch_warnings():
        # Modules that the bag does not have.
        warnings.simplefilter("ignore", xckpt.CheckpointWarning)
        opened = open_(data, engine="ztensor", stack=modules, join=join)
        stacked = flat.ckpt.stack(modules, join)
    xr.testing.assert_identical(opened, stacked)
    assert_equal(stacked.ckpt.unstack(), flat)
    assert_equal(opened.ckpt.unstack(), flat)
    for node in opened.subtree if isinstance(opened, xr.DataTree) else [opened]:
        for variable in node.variables.values():
            assert len(set(variable.dims)) == variable.ndim


def test_selections_unstack_to_their_tensors() -> None:
    arrays = moe()
    ds = xr.open_dataset(zt(arrays), engine="ztensor", stack=True)
    unstacked = ds.sel(layers=[3, 0], layers_2=3, experts=[2]).ckpt.unstack()
    expected = {"embed", "layers.0.norm", "layers.3.norm", "layers.3.experts.2.w"}
    expected |= {name for name in arrays if name.endswith("mlp.w")}
    assert list(unstacked.variables) == [name for name in arrays if name in expected]
    for name in expected:
        np.testing.assert_array_equal(unstacked[name], arrays[name])
        assert unstacked[name].encoding["tensor"] == name


@pytest.mark.parametrize("numbers", [[1, 2, 3, 4], [3, 2, 1, 0], [10, 11, 12, 13]])
def test_layers_that_are_numbered_anew_have_their_own_values(numbers: list[int]) -> None:
    arrays = moe()
    ds = xr.open_dataset(zt(arrays), engine="ztensor", stack=True).assign_coords(layers=numbers)
    flat = ds.ckpt.unstack()
    statistics = ds.ckpt.stats().ckpt.table()
    for old, new in enumerate(numbers):
        np.testing.assert_array_equal(flat[f"layers.{new}.norm"], arrays[f"layers.{old}.norm"])
        assert statistics.loc[f"layers.{new}.norm", "max"] == arrays[f"layers.{old}.norm"].max()


def test_nodes_of_a_tree_have_their_own_numbers() -> None:
    arrays = {f"{s}.layers.{n}.w": np.full((2, 2), n, "f4") for s in ("a", "b") for n in range(3)}
    tree = xr.open_datatree(zt(arrays), engine="ztensor", stack=True)
    nodes = {node.path: node.to_dataset() for node in tree.subtree if node.data_vars}
    (path,) = [path for path in nodes if path.startswith("/b")]
    nodes[path] = nodes[path].assign_coords(layers=[5, 6, 7])
    tree = xr.DataTree.from_dict(nodes)
    names = {f"a.layers.{n}.w" for n in (0, 1, 2)} | {f"b.layers.{n}.w" for n in (5, 6, 7)}
    for result in (xckpt.stats(tree), xckpt.histogram(tree), xckpt.spectrum(tree)):
        assert set(result.ckpt.table().index) == names
    assert set(xckpt.compare(tree, tree).ckpt.table()["status"]) == {"same"}


@pytest.mark.parametrize("labels", [["a", "b", "c", "d"], [0, 0, 1, 1], [0, 1, 2, np.nan]])
def test_statistics_of_layers_without_numbers_have_positions(labels: list[Any]) -> None:
    ds = xr.open_dataset(zt(moe()), engine="ztensor", stack=True).assign_coords(layers=labels)
    names = set(ds.ckpt.stats().ckpt.table().index)
    assert {f"layers.norm[{position}]" for position in range(4)} < names


def test_changes_survive_unstacking() -> None:
    arrays = moe()
    ds = xr.open_dataset(zt(arrays), engine="ztensor", stack=True)
    ds["layers.norm"].attrs["note"] = "mine"
    ds["layers.norm"] = ds["layers.norm"].transpose().copy(data=2 * ds["layers.norm"].T.values)
    ds["largest"] = ds["layers.experts.w"].max(("d4", "d5"))
    back = ds.ckpt.unstack()
    assert back["layers.2.norm"].attrs == {"note": "mine"}
    np.testing.assert_array_equal(back["layers.2.norm"], 2 * arrays["layers.2.norm"])
    assert back["largest"].dims == ("layers_2", "experts")
    assert set(back.coords) == {"layers_2", "experts"}


def test_variables_that_cannot_be_unstacked() -> None:
    ds = xr.open_dataset(zt(moe()), engine="ztensor", stack=True)
    for lost in (ds.rename(layers="depth"), ds.drop_vars("layers"), ds.isel(layers=[1, 1])):
        with pytest.raises(ValueError, match=r"'layers'.*(dropping|distinct)"):
            lost.ckpt.unstack()
    with pytest.raises(ValueError, match=r"'layers\.1\.norm' is a variable, and stacked"):
        ds.assign({"layers.1.norm": ("x", [1])}).ckpt.unstack()


def test_other_datasets_can_be_stacked() -> None:
    arrays = {f"h.{i}.w": ("x", np.arange(3.0) + i, {"unit": "m", "i": i}) for i in range(3)}
    ds = xr.Dataset({**arrays, "h.0.b": ("y", [1]), 7: ("y", [2])}, {"x": [1, 2, 3]})
    for dataset in (ds, ds.chunk(), ds.chunk({"x": 2})):
        stacked = dataset.ckpt.stack()
        assert stacked["h.w"].dims == ("h", "x")
        assert stacked["h.w"].attrs == {"unit": "m"}
        assert stacked["h.w:i"].values.tolist() == [0, 1, 2]
        assert stacked.chunks.keys() == dataset.chunks.keys() | ({"h"} if dataset.chunks else set())
        xr.testing.assert_identical(stacked.ckpt.unstack(), dataset)


def test_other_engines_stay_lazy(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    xr.Dataset({f"h.{i}.w": ("x", np.arange(3.0) + i) for i in range(3)}).to_netcdf(
        path, engine="h5netcdf"
    )
    with xr.open_dataset(path, engine="h5netcdf") as ds:
        stacked = ds.ckpt.stack()["h.w"]
        assert isinstance(stacked.data, da.Array)
        assert stacked.values.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


@pytest.mark.parametrize("tree", [False, True])
def test_stacked_objects_pickle_and_copy(tree: bool) -> None:
    opener = xr.open_datatree if tree else xr.open_dataset
    opened = opener(zt(moe()), engine="ztensor", stack=True)
    flat = opened.ckpt.unstack()
    for twin in (pickle.loads(pickle.dumps(opened)), copy.deepcopy(opened), opened.copy(deep=True)):
        xr.testing.assert_identical(twin, opened)
        xr.testing.assert_identical(twin.ckpt.unstack(), flat)


# --- attributes -----------------------------------------------------------------------------------


def test_attributes_along_the_stack() -> None:
    tensors = {
        f"h.{i}.w": burnpack_dense(np.full((2, 2), i, "<f4"), param_id=2**63 + i) for i in range(3)
    }
    tensors["h.0.b"] = burnpack_dense(np.zeros(2, "<f4"), param_id=1)
    tensors["h.1.b"] = burnpack_dense(np.zeros(2, "<f4"))
    data = burnpack(tensors)
    flat = xr.open_dataset(data, engine="burnpack")
    ds = xr.open_dataset(data, engine="burnpack", stack=True)
    assert ds["h.w:param_id"].dims == ("h",)
    assert ds["h.w:param_id"].values.tolist() == [str(2**63 + i) for i in range(3)]
    assert ds["h.w"].sel(h=1).coords["h.w:param_id"].item() == str(2**63 + 1)
    assert "param_id" not in ds["h.w"].attrs
    assert ds.encoding["dropped_attrs"] == {"h.b": ["param_id"]}
    assert_same(ds.ckpt.unstack(), flat)


def test_a_tensor_by_its_id_in_a_stack() -> None:
    arrays = {f"h.{i}.w": ("x", np.full(2, i), {"base_id": f"{i:032x}"}) for i in range(3)}
    tensor = xr.Dataset(arrays).ckpt.stack().ckpt.by_base_id(2)
    assert tensor.name == "h.2.w"
    assert tensor.values.tolist() == [2, 2]


def test_stable_ids_of_stacked_tensors() -> None:
    data = zt(moe())
    ds = xr.open_dataset(data, engine="ztensor", stack=True)
    flat = ds.ckpt.unstack()
    for name in ("embed", "layers.3.experts.1.w"):
        assert ds.ckpt.param_key(name) == flat.ckpt.param_key(name)
    with pytest.raises(KeyError):
        ds.sel(experts=[0]).ckpt.param_key("layers.3.experts.1.w")


def test_the_summary_counts_tensors() -> None:
    ds = xr.open_dataset(zt(moe()), engine="ztensor", stack=True)
    text = repr(ds.ckpt)
    assert f"{len(moe())} tensors" in text
    assert "layers.{2,3}.experts.{0..2}.w" in text
    assert "layers.3.experts.2.w  4×5  float32   80 B" in repr(ds.sel(layers_2=3).ckpt)


# --- trees ----------------------------------------------------------------------------------------


def test_a_stacked_tree() -> None:
    arrays = moe()
    tree = xr.open_datatree(zt(arrays), engine="ztensor", stack=True)
    node = tree["/layers/experts"]
    assert node["w"].dims == ("layers_2", "experts", "d4", "d5")
    assert node["w"].sel(layers_2=2, experts=0).values.tolist() == (
        arrays["layers.2.experts.0.w"].tolist()
    )
    assert list(tree["layers"].children) == ["mlp", "experts"]


def test_names_of_nodes_and_coordinates_differ() -> None:
    names = ["a.0.b", "a.1.b", "a.0.a.x", "a.1.a.x", "a.a", "b.0.c", "b.1.c", "b.b.0", "b.b.1"]
    data = bag_file(dict.fromkeys(names, ("float32", (2,))))
    flat = xr.open_datatree(data, engine="ztensor")
    tree = xr.open_datatree(data, engine="ztensor", stack=True)
    assert tree["a"]["b"].dims == ("a_1", "d2")
    xr.testing.assert_identical(tree.ckpt.unstack(), flat)


def test_a_node_of_a_tree_unstacks_too() -> None:
    tree = xr.open_datatree(zt(moe()), engine="ztensor", stack=True)
    node = tree["layers"].ckpt.unstack()
    assert node["1"]["norm"].values.tolist() == moe()["layers.1.norm"].tolist()
    assert node.ckpt.stack()["norm"].sizes == {"index": LAYERS, "d4": 4}


# --- names with slashes --------------------------------------------------------------------------


@pytest.fixture
def flax(tmp_path: Path) -> Path:
    """Write the tree of parameters of a transformer as those who use JAX do."""
    arrays: dict[str, Any] = {"params/embed/embedding": np.ones((5, 4), "f4")}
    for layer in range(12):
        module = f"params/encoder/layers_{layer}"
        roles = ("attn/q", "attn/k", "mlp/wi_0", "mlp/wi_1")
        arrays |= {f"{module}/{role}/kernel": np.full((4, 4), layer, "f4") for role in roles}
        arrays[f"{module}/norm_1/scale"] = np.full(4, layer, "f4")
    np.savez(tmp_path / "flax.npz", **arrays)
    return tmp_path / "flax.npz"


def written(obj: Any, folder: Path) -> list[str]:
    xckpt.save(obj, folder / "new.npz", overwrite=True)
    with np.load(folder / "new.npz") as archive:
        return list(archive)


def test_layers_of_flax_are_a_dimension(flax: Path) -> None:
    flat = xr.open_dataset(flax, engine="npz")
    ds = xr.open_dataset(flax, engine="npz", stack=True)
    roles = ("attn/q/kernel", "attn/k/kernel", "mlp/wi_0/kernel", "mlp/wi_1/kernel", "norm_1/scale")
    assert list(ds)[1:] == [f"params/encoder/layers/{role}" for role in roles]
    kernel = ds["params/encoder/layers/mlp/wi_1/kernel"]
    assert kernel.sizes == {"layers": 12, "d4_1": 4, "d4_2": 4}
    assert kernel.mean(["d4_1", "d4_2"]).values.tolist() == list(range(12))
    assert_same(ds.ckpt.unstack(), flat)
    assert_same(flat.ckpt.stack().ckpt.unstack(), flat)
    name = "params/encoder/layers_7/attn/q/kernel"
    assert float(ds.ckpt[name][0, 0]) == 7
    assert list(ds.ckpt.sel(layers=7)) == list(ds)[1:]
    assert next(iter(flat.ckpt.sel(layers=7))) == name
    (modules,) = ds.ckpt.modules().itertuples()
    assert modules[1:4] == ("params/encoder/layers", "{0..11}", 12)


def test_written_names_have_their_slashes(flax: Path, tmp_path: Path) -> None:
    with np.load(flax) as archive:
        names = list(archive)
    for stack in (False, True):
        ds = xr.open_dataset(flax, engine="npz", stack=stack)
        assert written(ds, tmp_path) == written(ds * 2, tmp_path) == names
        tree = xr.open_datatree(flax, engine="npz", stack=stack)
        assert written(tree, tmp_path) == names
    # Computed objects know only the layers that they have.
    tree = xr.open_datatree(flax, engine="npz", stack=True)
    assert {*written(tree * 2, tmp_path)} - {*names} == {"params.embed.embedding"}


def test_modules_of_flax_are_nodes(flax: Path) -> None:
    tree: Any = xr.open_datatree(flax, engine="npz", stack=True)
    assert tree["params/encoder/layers/attn/q/kernel"].sizes == {"layers": 12, "d4_1": 4, "d4_2": 4}
    flat: Any = xr.open_datatree(flax, engine="npz")
    assert float(flat["params/encoder/layers_7/norm_1/scale"][0]) == 7
    for obj in (tree, flat):
        assert "params/encoder/layers_{0..11}/attn/{q,k}/kernel" in repr(obj.ckpt)
        assert "params/encoder/layers_3/norm_1/scale" in OpenTensors(obj).names


def test_a_name_with_dots_and_one_with_slashes_are_two_tensors() -> None:
    data = zt({"a/b": np.zeros(1, "<f4"), "a.b": np.ones(1, "<f4"), "c/d": np.ones(2, "<f4")})
    tree: Any = xr.open_datatree(data, engine="ztensor")
    assert set(tree.ckpt.find("*").groups) == {"/", "/a", "/c"}
    assert float(tree["a/b"][0]) == 1
    assert sorted(row.name for row in OpenTensors(tree).rows) == ["a.b", "a/b", "c/d"]
