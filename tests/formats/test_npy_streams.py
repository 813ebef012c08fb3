"""Arrays that follow one another in one file, as Equinox writes them, have names by position."""

from __future__ import annotations

import io
import json
import warnings
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import xckpt

if TYPE_CHECKING:
    from pathlib import Path

ARRAYS: dict[str, Any] = {
    "matrix": np.arange(12, dtype="f4").reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "flag": np.asarray([True])[0],
    "count": np.asarray(3),
    "rate": np.asarray(1e-3),
    "phase": np.asarray(1 + 2j),
    "big": np.arange(3, dtype=">i4"),
    "empty": np.zeros((0, 2), "f4"),
}


def stream(*arrays: Any) -> bytes:
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("name", ["m.eqx", "m.npy", "m"])
def test_all_arrays_have_their_values(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(stream(*ARRAYS.values()))
    ds = xckpt.open(tmp_path / name)
    assert ds.encoding["format"] == "npz"
    assert list(ds.variables) == [f"arr_{n}" for n in range(len(ARRAYS))]
    for n, array in enumerate(ARRAYS.values()):
        np.testing.assert_array_equal(ds[f"arr_{n}"].values, array)


def test_conversion_keeps_all_arrays(tmp_path: Path) -> None:
    (tmp_path / "m.eqx").write_bytes(stream(*[np.full((8, 8), n, "f4") for n in range(16)]))
    xckpt.convert(tmp_path / "m.eqx", tmp_path / "m.safetensors")
    assert len(xckpt.open(tmp_path / "m.safetensors")) == 16


# A long line is recognised by the suffix.
@pytest.mark.parametrize(
    ("name", "length"), [("m.eqx", 0), ("m.eqx", 50), ("m.eqx", 5000), ("m", 0), ("m", 50)]
)
def test_a_line_of_json_before_the_arrays_has_attributes(
    name: str, length: int, tmp_path: Path
) -> None:
    attrs = {"width": 64, "depth": 2, "text": "x" * length}
    line = json.dumps(attrs).encode() + b"\n"
    (tmp_path / name).write_bytes(line + stream(*ARRAYS.values()))
    ds = xckpt.open(tmp_path / name)
    assert ds.attrs == attrs
    np.testing.assert_array_equal(ds["arr_0"].values, ARRAYS["matrix"])
    assert len(ds.variables) == len(ARRAYS)


@pytest.mark.parametrize("line", [b"[64, 2]\n", b'"mlp"\n'])
def test_other_json_before_the_arrays_is_one_attribute(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.eqx").write_bytes(line + stream(np.ones(2)))
    assert xckpt.open(tmp_path / "m.eqx").attrs == {"header": json.loads(line)}


@pytest.mark.parametrize(
    "line", [b"{}", b"{\n", b'{"a": 1}\nmore\n', b'{"a": \xff}\n', b'{"a":' + b"[" * 5000 + b"\n"]
)
def test_a_line_that_is_not_json_is_refused(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.eqx").write_bytes(line + stream(np.ones(2)))
    with pytest.raises(xckpt.FormatError, match="before the first array"):
        xckpt.open(tmp_path / "m.eqx")


def test_a_line_without_arrays_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.eqx").write_bytes(b'{"width": 64}\n')
    with pytest.raises(xckpt.FormatError, match="no array follows"):
        xckpt.open(tmp_path / "m.eqx")


def test_bfloat16_is_read(tmp_path: Path) -> None:
    """ml_dtypes writes it as ``<V2``, which numpy writes for no type of its own."""
    values = np.array([1.5, -2, 3e38], ml_dtypes.bfloat16)
    (tmp_path / "m.eqx").write_bytes(stream(values, np.ones(2)))
    np.savez(tmp_path / "m.npz", w=values)
    for file, name in (("m.eqx", "arr_0"), ("m.npz", "w")):
        ds = xckpt.open(tmp_path / file)
        np.testing.assert_array_equal(ds[name].values, values.astype("f4"))
        assert ds[name].encoding["stored_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "array",
    [
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array(["2024-01-01"], "M8[D]"),
        np.zeros(2, [("a", "<i4"), ("b", "<f8", (2, 3)), ("c", [("d", "<u2")])]),
        np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        np.zeros(3, "V2"),
        np.zeros(3, ml_dtypes.float8_e4m3fn),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda array: str(array.dtype)[:20],
)
def test_arrays_after_an_unsupported_one_are_read(array: Any, tmp_path: Path) -> None:
    (tmp_path / "m.eqx").write_bytes(stream(np.zeros(1), array, ARRAYS["matrix"]))
    ds = xckpt.open(tmp_path / "m.eqx")
    assert list(ds.variables) == ["arr_0", "arr_1", "arr_2"]
    np.testing.assert_array_equal(ds["arr_2"].values, ARRAYS["matrix"])
    with pytest.raises(xckpt.UnsupportedError, match="element type"):
        ds["arr_1"].values  # noqa: B018


def test_objects_end_the_list_because_their_pickles_have_no_size(tmp_path: Path) -> None:
    data = stream(np.zeros(1), np.array([{}, None], object), np.ones(2))
    (tmp_path / "m.eqx").write_bytes(data)
    ds = xckpt.open(tmp_path / "m.eqx")
    assert ds["arr_0"].values == 0
    with pytest.raises(xckpt.UnsupportedError, match=r"pickles.*cannot be found"):
        ds["arr_1"].values  # noqa: B018


def test_a_stream_cut_at_every_byte_keeps_the_arrays_before(tmp_path: Path) -> None:
    arrays = (np.arange(4.0), np.arange(6, dtype="i4").reshape(2, 3), np.asarray(2.5))
    data = stream(*arrays)
    ends = [len(stream(*arrays[: n + 1])) for n in range(len(arrays))]
    for length in range(ends[0], len(data)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", xckpt.CheckpointWarning)
            index = xckpt.read_index(data[:length])
        complete = [n for n, end in enumerate(ends) if end <= length]
        is_between = length in ends
        assert len(index) == len(complete) + (not is_between)
        for n in complete:
            assert index[f"arr_{n}"].problem is None
        if not is_between:
            problem = index[f"arr_{len(complete)}"].problem
            assert isinstance(problem, xckpt.FormatError)
            assert (problem.rule, problem.tensor) == ("Truncated", f"arr_{len(complete)}")
    (tmp_path / "m.eqx").write_bytes(data[: ends[1] - 5])
    with pytest.warns(xckpt.CheckpointWarning, match="'arr_1'"):
        ds = xckpt.open(tmp_path / "m.eqx")
    np.testing.assert_array_equal(ds["arr_0"].values, arrays[0])
    assert ds["arr_1"].shape == (2, 3)
    with pytest.raises(xckpt.FormatError, match="may be truncated"):
        ds["arr_1"].values  # noqa: B018


@pytest.mark.parametrize("more", [b"\0", b"garbage", bytes(4096), b"\x93NUMPX\1\0"])
def test_other_bytes_between_and_after_arrays_are_refused(more: bytes) -> None:
    before = stream(np.ones(3), np.zeros(2))
    with pytest.raises(xckpt.FormatError, match=f"{len(more)} bytes .*not an array") as caught:
        xckpt.read_index(before + more)
    assert caught.value.offset == len(before)
    with pytest.raises(xckpt.FormatError, match=str(len(before))):
        xckpt.read_index(before + more + stream(np.ones(3)))


def test_other_bytes_after_a_single_array_are_ignored_as_by_numpy(tmp_path: Path) -> None:
    data = stream(np.ones(3))
    (tmp_path / "m.npy").write_bytes(data + b"more")
    with pytest.warns(xckpt.CheckpointWarning, match=f"4 bytes from byte {len(data)} on"):
        ds = xckpt.open(tmp_path / "m.npy")
    np.testing.assert_array_equal(ds["arr_0"].values, np.ones(3))


def test_saved_streams_load_with_numpy_in_order(tmp_path: Path) -> None:
    arrays = {"w": ARRAYS["matrix"], "b": np.asfortranarray(np.eye(3)), "step": np.asarray(7)}
    with pytest.warns(xckpt.CheckpointWarning, match="names"):
        xckpt.save(arrays, tmp_path / "m.eqx")
    with (tmp_path / "m.eqx").open("rb") as file:
        for array in arrays.values():
            loaded = np.load(file)
            np.testing.assert_array_equal(loaded, array)
            assert loaded.dtype == array.dtype
        assert file.read() == b""
    ds = xckpt.open(tmp_path / "m.eqx")
    xckpt.save(ds, tmp_path / "again.eqx")
    assert (tmp_path / "again.eqx").read_bytes() == (tmp_path / "m.eqx").read_bytes()
    with pytest.raises(xckpt.UnsupportedError, match=r"3 tensors.*\.npz"):
        xckpt.save(arrays, tmp_path / "m.npy")
