"""Scalars of Burnpack: numbers in the header, which `plan` needs before anything is written."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.burnpack_files import burnpack, dense
from xckpt import UnsupportedError, read_index
from xckpt.writing import convert, save

if TYPE_CHECKING:
    from collections.abc import Callable

VALUES: dict[str, dict[str, Any]] = {
    "lowest": {"Int": -(1 << 63)},
    "highest": {"Int": (1 << 63) - 1},
    "zero": {"Int": 0},
    "no count": {"UInt": 0},
    "count": {"UInt": (1 << 64) - 1},
    "lr": {"Float": 1e-3},
    "tiny": {"Float": 5e-324},
    "huge": {"Float": 1.7976931348623157e308},
    "-0": {"Float": -0.0},
    "nan": {"Float": float("nan")},
    "other nan": {"Float": struct.unpack("<d", struct.pack("<Q", 0xFFF0000000000123))[0]},
    "inf": {"Float": float("inf")},
    "-inf": {"Float": float("-inf")},
    "yes": {"Bool": True},
    "no": {"Bool": False},
    "w": {"Int": 1},
    "1.__rank": {"UInt": 2},
    "2.__rank": {"UInt": 3},
}
OPENERS: dict[str, Callable[[Path], Any]] = {
    "opened": xr.open_dataset,
    "as stored": lambda path: xr.open_dataset(path, decode=False),
    "stacked": lambda path: xr.open_dataset(path, stack=True),
    "tree": lambda path: xr.open_datatree(path, engine="burnpack"),
    "loaded": lambda path: xr.open_dataset(path).load(),
    "chunked": lambda path: xr.open_dataset(path).chunk(),
    "copied": lambda path: xr.open_dataset(path).copy(deep=True),
}


def scalars_of(path: Path) -> dict[str, tuple[str, str, bytes | None]]:
    """Return the scalars of a file, exact to the last bit."""
    return {
        name: (tensor.attrs["scalar"], tensor.dtype, tensor.parts["data"].inline)
        for name, tensor in read_index(path).tensors.items()
        if "scalar" in tensor.attrs
    }


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A file with tensors and with scalars of all kinds."""
    path = tmp_path / "optim.bpk"
    tensors = {"w": dense(np.arange(6, dtype="f4").reshape(2, 3)), "b": dense(np.array(1.5, "f4"))}
    path.write_bytes(burnpack(tensors, scalars=VALUES, metadata={"k": "v"}))
    assert len(scalars_of(path)) == len(VALUES)
    return path


@pytest.mark.parametrize("opener", OPENERS)
def test_opened_scalars_are_saved(opener: str, record: Path, tmp_path: Path) -> None:
    save(OPENERS[opener](record), tmp_path / "saved.bpk")
    assert scalars_of(tmp_path / "saved.bpk") == scalars_of(record)
    convert(record, tmp_path / "converted.bpk")
    assert (tmp_path / "saved.bpk").read_bytes() == (tmp_path / "converted.bpk").read_bytes()
    tensors = read_index(tmp_path / "saved.bpk").tensors
    assert {name for name, tensor in tensors.items() if not tensor.attrs} == {"w", "b"}


@pytest.mark.parametrize("dialect", ["0.20", "0.21", "0.22"])
def test_a_file_of_scalars_alone(dialect: str, tmp_path: Path) -> None:
    path = tmp_path / "scheduler.bpk"
    path.write_bytes(burnpack({}, scalars={"0.step": {"UInt": 7}, "lr": {"Float": 0.5}}))
    convert(path, tmp_path / "new.bpk", dialect=dialect)
    assert (tmp_path / "new.bpk").read_bytes()[10:] != b""
    assert scalars_of(tmp_path / "new.bpk") == scalars_of(path)


@pytest.mark.parametrize("engine", ["ztensor", "mlcp"])
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_scalars_survive_another_format(engine: str, record: Path, tmp_path: Path) -> None:
    convert(record, tmp_path / "other", engine)
    with xr.open_dataset(record) as old, xr.open_dataset(tmp_path / "other", engine=engine) as ds:
        for name in old.variables:
            expected, values = old.variables[name].values, ds.variables[name].values
            assert (values.dtype, values.tobytes()) == (expected.dtype, expected.tobytes())
    convert(tmp_path / "other", tmp_path / "back.bpk")
    assert scalars_of(tmp_path / "back.bpk") == scalars_of(record)


def test_changed_scalars(record: Path, tmp_path: Path) -> None:
    ds = xr.open_dataset(record)
    with xr.set_options(keep_attrs=True):  # the default of later releases
        ds["lr"] = ds["lr"] * 0.5
        ds["count"] = ds["count"] - 1
    ds["yes"] = ds["yes"].copy(data=False)
    ds["zero"].load().values[...] = -5
    ds["1.__rank"] = ((), 12, {"scalar": "UInt"})
    save(ds, tmp_path / "new.bpk")
    reopened = xr.open_dataset(tmp_path / "new.bpk").load()
    assert reopened["lr"].item() == 5e-4
    assert reopened["count"].item() == (1 << 64) - 2
    assert reopened["yes"].item() is False
    assert reopened["zero"].item() == -5
    assert reopened["1.__rank"].item() == 12
    kinds = {name: kind for name, (kind, _, _) in scalars_of(record).items()}
    assert {n: kind for n, (kind, _, _) in scalars_of(tmp_path / "new.bpk").items()} == kinds


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("compute", [False, True])
def test_new_scalars(lazily: bool, compute: bool, tmp_path: Path) -> None:
    arrays = {
        "int": (7, "Int"),
        "count": (7, "UInt"),
        "np": (np.uint64(1 << 63), "UInt"),
        "small": (np.int8(-3), "Int"),
        "lr": (0.1, "Float"),
        "half": (np.float16(0.5), "Float"),
        "whole": (3, "Float"),
        "flag": (True, "Bool"),
        "swapped": (np.array(2.5, ">f8"), "Float"),
    }
    variables: dict[str, Any] = {"w": ("n", np.ones(3, "f4")), "tensor": ((), np.float32(2))}
    for name, (value, kind) in arrays.items():
        array: Any = np.asarray(value)
        variables[name] = ((), da.from_array(array) if lazily else array, {"scalar": kind})
    path = tmp_path / "new.bpk"
    delayed = save(xr.Dataset(variables), path, compute=compute)
    if not compute:
        assert not path.exists()
        dask.compute(delayed)
    ds = xr.open_dataset(path).load()
    assert {name: v.attrs.get("scalar") for name, v in ds.variables.items()} == {
        "w": None,
        "tensor": None,
        **{name: kind for name, (_, kind) in arrays.items()},
    }
    types: dict[str, Any] = {"Int": "int64", "UInt": "uint64", "Float": "float64", "Bool": "bool"}
    for name, (value, kind) in arrays.items():
        assert (ds[name].dtype, ds[name].item()) == (types[kind], value)


def test_lazy_scalars_are_computed_at_once(tmp_path: Path) -> None:
    calls = []

    def counted(values: np.ndarray) -> np.ndarray:
        calls.append(values.size)
        return values

    shared = da.ones(4, chunks=4).map_blocks(counted, dtype="f8", meta=np.empty(0))
    ds = xr.Dataset({n: ((), shared.sum() * i, {"scalar": "Float"}) for i, n in enumerate("abc")})
    save(ds, tmp_path / "new.bpk")
    assert calls == [4]
    assert [v.item() for v in xr.open_dataset(tmp_path / "new.bpk").load().values()] == [0, 4, 8]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(-1, "UInt"), (1.5, "Int"), (1, "Bool"), ((1 << 53) + 1, "Float"), (1, "Text"), (1, [1])],
)
def test_values_of_another_kind_are_refused(value: Any, kind: Any, tmp_path: Path) -> None:
    ds = xr.Dataset({"s": ((), value, {"scalar": kind}), "w": ("n", [1.0])})
    with pytest.raises(UnsupportedError, match=r"new\.bpk: tensor 's': a scalar of the kind"):
        save(ds, tmp_path / "new.bpk")
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_scalar_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bpk"
    path.write_bytes(burnpack({}, scalars={"k": {"Str": "x"}, "n": {"Int": 1}}))
    ds = xr.open_dataset(path)
    with pytest.raises(UnsupportedError, match="'k'"):
        save(ds, tmp_path / "new.bpk")
    save(ds[["n"]], tmp_path / "new.bpk")
    assert scalars_of(tmp_path / "new.bpk").keys() == {"n"}


@given(st.floats(), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, (1 << 64) - 1))
def test_every_number_is_stored_exactly(real: float, signed: int, unsigned: int) -> None:
    values = {"Float": np.float64(real), "Int": np.int64(signed), "UInt": np.uint64(unsigned)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.bpk"
        save(xr.Dataset({k: ((), v, {"scalar": k}) for k, v in values.items()}), path)
        reopened = scalars_of(path)
        assert {kind: data for kind, (_, _, data) in reopened.items()} == {
            kind: value.tobytes() for kind, value in values.items()
        }
        convert(path, path.with_name("again.bpk"))
        assert path.with_name("again.bpk").read_bytes() == path.read_bytes()
