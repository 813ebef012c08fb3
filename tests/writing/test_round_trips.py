"""Round trips of any types, shapes, memory layouts, names and attributes."""

from __future__ import annotations

import tempfile
import warnings
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from tests.formats.burnpack_files import burnpack
from tests.writing.attributes import missing
from tests.writing.saved import (
    ENGINES,
    NO_SCALARS,
    OPTIONS,
    assert_same_bits,
    clean,
    writable_types,
)
from xckpt import CheckpointError, CheckpointWarning, formats, read_index
from xckpt.elements import stored_dtype
from xckpt.writing import save

# primitiv has no tensors without elements.
LEAST_SIDE = {"primitiv": 1}


@st.composite
def shapes(draw: st.DrawFn, engine: str) -> tuple[int, ...]:
    sides = st.integers(LEAST_SIDE.get(engine, 0), 5)
    return tuple(draw(st.lists(sides, min_size=int(engine in NO_SCALARS), max_size=4)))


@st.composite
def arrays(draw: st.DrawFn, engine: str) -> Any:
    """Make any bits of any type, laid out in memory in any way."""
    shape = draw(shapes(engine))
    types = formats.writable(engine).can.types_for(shape)
    name = draw(st.sampled_from([n for n in writable_types(engine) if n in types]))
    size = stored_dtype(name).itemsize
    if name == "float4_e2m1fn" and prod(shape) % 2:
        shape = (2, *shape)  # safetensors has whole bytes only
    codes = draw(nps.arrays("u1", prod(shape) * size))
    values = clean(codes, name).view(stored_dtype(name)).reshape(shape)
    return draw(laid_out(values))


@st.composite
def laid_out(draw: st.DrawFn, values: np.ndarray) -> Any:
    """Lay values out in memory in another way, and leave some of them to dask."""
    layout = draw(st.sampled_from(["C", "F", "strided", "reversed", "broadcast"]))
    if layout == "F":
        values = np.asfortranarray(values)
    elif layout == "strided" and values.ndim:
        values = np.repeat(values, 2, axis=-1)[..., ::2]
    elif layout == "reversed":
        values = np.flip(np.flip(values).copy())
    elif layout == "broadcast" and values.ndim:
        values = np.broadcast_to(values[..., :1], values.shape)
    if draw(st.booleans()) and values.dtype.kind in "iufc":
        values = values.astype(values.dtype.newbyteorder(), order="K")
    if not draw(st.booleans()):
        return values
    chunks = tuple(draw(st.integers(1, max(1, side))) for side in values.shape)
    return da.from_array(values, chunks=chunks)


def dataset(arrays: dict[str, Any]) -> xr.Dataset:
    variables = {
        name: xr.Variable([f"d{n}_{axis}" for axis, n in enumerate(array.shape)], array)
        for name, array in arrays.items()
    }
    return xr.Dataset(variables)


def assert_equal_to(ds: xr.Dataset, engine: str, expected: dict[str, Any]) -> None:
    assert set(ds.variables) == set(expected)
    values_of, arrays_of = dask.compute(
        {name: variable.data for name, variable in ds.variables.items()}, expected, scheduler="sync"
    )
    for name in expected:
        reopened, values = np.asarray(values_of[name]), np.asarray(arrays_of[name])
        if engine in NO_SCALARS:
            # A number is an array of one, or trailing axes of length 1 are left out.
            assert prod(reopened.shape) == prod(values.shape)
            values = values.reshape(reopened.shape)
        assert_same_bits(reopened, values)


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=60)
@given(data=st.data())
def test_values(engine: str, data: Any) -> None:
    """Bits come back, and again when what was opened is saved: decoded, loaded and untouched."""
    keys = st.text("abcXYZ019_", min_size=1, max_size=8)
    drawn = data.draw(st.dictionaries(keys, arrays(engine), min_size=1, max_size=4))
    options = OPTIONS.get(engine, {})
    # Other tests cover threads, which take longer to start than these arrays to compute.
    with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="sync"):
        first, second = Path(folder) / "first", Path(folder) / "second"
        save(dataset(drawn), first, engine, **options)
        with xr.open_dataset(first, engine=engine, decode=False) as ds:
            assert_equal_to(ds, engine, drawn)
        with xr.open_dataset(first, engine=engine) as ds:
            for opened in (ds, ds.load()):
                save(opened, second, engine, overwrite=True, **options)
                with xr.open_dataset(second, engine=engine, decode=False) as again:
                    assert_equal_to(again, engine, drawn)


names = st.one_of(
    st.text(max_size=6),
    st.text(st.characters(), max_size=4),  # surrogates too
    st.text("ab.\0/:01%", max_size=8),
)


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=150)
@example(chosen={"\ud800"})
@given(chosen=st.sets(names, min_size=1, max_size=4))
def test_names_come_back_or_are_refused(engine: str, chosen: set[str]) -> None:
    ds = dataset({name: np.full(2, at, "f4") for at, name in enumerate(sorted(chosen))})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m"
        if (refused := refusal(ds, path, engine)) is not None:
            assert refused.tensor in chosen
            return
        reopened = xr.open_dataset(path, engine=engine)
        # The name of a variable of primitiv is not always the only one of a key, but one of them.
        shown = {str(v.values[0]): str(name) for name, v in reopened.variables.items()}
        assert len(shown) == len(chosen)
        if engine != "primitiv":
            assert [shown[str(float(at))] for at in range(len(chosen))] == sorted(chosen)
        assert refusal(reopened, path.with_name("again"), engine) is None
        assert path.with_name("again").read_bytes() == path.read_bytes()


def refusal(ds: xr.Dataset, path: Path, engine: str) -> CheckpointError | None:
    """Save, and give the error if it is refused, which leaves nothing."""
    before = sorted(path.parent.iterdir())
    try:
        save(ds, path, engine, **OPTIONS.get(engine, {}))
    except CheckpointError as error:
        refused = error
    else:
        return None
    assert sorted(path.parent.iterdir()) == before
    return refused


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
)
attributes = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)


# Also those that some format states itself, of a file or of tensors.
CAN = [formats.get(name).can for name in ENGINES]
STATED = sorted(
    {
        name
        for can in CAN
        for names in (can.stated_attrs, can.file_attrs, can.tensor_attrs)
        for name in (names if isinstance(names, tuple) else ())
    }
)
attribute_names = names | st.sampled_from(STATED)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=150)
@given(
    of_file=st.dictionaries(attribute_names, attributes, max_size=2),
    of_tensor=st.dictionaries(attribute_names, attributes, max_size=2),
)
@example(of_file={"bytes": b"x", "list": [b"a", b"\xff"]}, of_tensor={})
@example(of_file={"runtime": "mine", "ids": 7}, of_tensor={"base_id": "mine", "stat": "mine"})
@example(of_file={"payload": "mine", "total_size": 1}, of_tensor={"name": "mine", "scalar": "Int"})
@example(of_file={"shards": "mine"}, of_tensor={"scale_tensor": "mine", "burn_dtype": "mine"})
@example(of_file={"split.no": "mine"}, of_tensor={"key": "mine", "type": "f32"})
def test_attributes_come_back_or_warn_or_are_refused(
    engine: str, of_file: dict[str, Any], of_tensor: dict[str, Any]
) -> None:
    ds = xr.Dataset({"w": ("n", np.ones(2, "f4"), of_tensor)}, attrs=of_file)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = Path(folder) / "m"
        if refusal(ds, path, engine) is not None:
            return
        after = read_index(path)
    assert all(warning.category is CheckpointWarning for warning in caught)
    message = " ".join(str(warning.message) for warning in caught)
    before: Any = SimpleNamespace(attrs=of_file, tensors={"w": SimpleNamespace(attrs=of_tensor)})
    assert missing(before, after, message) == []


@pytest.mark.parametrize("loaded", [False, True])
def test_scalars_in_metadata_are_written_with_their_values(tmp_path: Path, loaded: bool) -> None:
    """Burnpack has numbers in its metadata, which are planned with their values."""
    weight = {"dtype": "F32", "shape": [2], "data": bytes(8)}
    scalars: dict[str, dict[str, Any]] = {
        "rate": {"Float": 0.5},
        "step": {"UInt": 7},
        "on": {"Bool": True},
    }
    ds = xr.open_dataset(burnpack({"w": weight}, scalars=scalars), engine="burnpack")
    save(ds.load() if loaded else ds, tmp_path / "m.bpk")
    again = xr.open_dataset(tmp_path / "m.bpk", engine="burnpack")
    assert {name: again[name].values.item() for name in scalars} == {
        "rate": 0.5,
        "step": 7,
        "on": True,
    }
    assert {name: again[name].attrs["scalar"] for name in scalars} == {
        name: kind for name, kinds in scalars.items() for kind in kinds
    }
