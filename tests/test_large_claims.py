"""Small files that claim large tensors: work and memory follow the stored bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr
import zstandard

import xckpt
from tests.formats import torch_files as torch
from tests.formats.ztensor_files import dense_v1, dense_v2, stored, v1_file, v2_file
from xckpt.arrays.lazy import LazyArray
from xckpt.arrays.sparse import SparseArray
from xckpt.cli import main
from xckpt.storage.seekable import new_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ONE = np.array([1.5], "<f4").tobytes()
NBYTES = 32 << 20


def coo(coords: Any, shape: list[int], dtype: str = "float32", values: bytes = ONE) -> bytes:
    parts = {"values": stored(values), "coords": stored(np.array(coords, "<u8").tobytes())}
    tensor = {"dtype": dtype, "shape": shape, "format": "sparse_coo", "components": parts}
    return v1_file({"t": tensor})


def csr(indices: list[int], indptr: list[int], columns: int) -> bytes:
    parts = {
        "values": stored(ONE * len(indices)),
        "indices": stored(np.array(indices, "<u8").tobytes()),
        "indptr": stored(np.array(indptr, "<u8").tobytes()),
    }
    shape = [len(indptr) - 1, columns]
    tensor = {"dtype": "float32", "shape": shape, "format": "sparse_csr", "components": parts}
    return v1_file({"t": tensor})


def coo_2() -> bytes:
    parts = {
        "values": stored(ONE, dtype="f32"),
        "coords": stored(np.array([5, 7], "<u4").tobytes(), dtype="u32"),
    }
    shape = [1 << 30, 1 << 30]
    return v2_file({"t": {"shape": shape, "layout": "zt.sparse_coo/1", "parts": parts}})


SPARSE: dict[str, Callable[[], bytes]] = {
    "COO": lambda: coo([[5], [7]], [1 << 30, 1 << 30]),
    "COO, repeated": lambda: coo([[5, 5], [7, 7]], [1 << 30, 1 << 30], values=ONE * 2),
    "COO, one axis": lambda: coo([[5]], [1 << 61]),
    "COO, four axes": lambda: coo([[5], [0], [6], [0]], [1 << 15] * 4),
    "COO, integers": lambda: coo([[5], [7]], [1 << 30, 1 << 30], "int32"),
    "COO 2": coo_2,
    "CSR": lambda: csr([7], [0, 1, 1], 1 << 40),
    "CSR, unsorted": lambda: csr([9, 7], [0, 2, 2], 1 << 40),
}


@pytest.fixture(params=SPARSE)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a file with a tensor that no memory holds."""
    path = tmp_path / "m.zt"
    path.write_bytes(SPARSE[request.param]())
    return path


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Count blocks of stored elements; nothing may be selected of a sparse tensor."""
    decoded: list[Any] = []

    def refused(*_: Any) -> None:
        raise AssertionError("a selection was made")

    monkeypatch.setattr(SparseArray, "select", refused)
    for kind in SparseArray.__subclasses__():

        def counted(self: Any, real: Any = kind.blocks) -> Iterator[Any]:
            for block in real(self):
                decoded.append(block)
                yield block

        monkeypatch.setattr(kind, "blocks", counted)
    with dask.config.set({"xckpt.memory-limit": "1 MiB", "scheduler": "sync"}):
        yield decoded


def test_verifying_reads_stored_bytes_once(path: Path, blocks: list[Any]) -> None:
    assert xckpt.verify(path).ok
    assert len(blocks) == 1


def test_writing_reads_stored_bytes_only(path: Path, blocks: list[Any]) -> None:
    target = path.with_name("n.zt")
    for version in ("1.0", "2"):
        xckpt.convert(path, target, version=version, overwrite=True)
        assert len(blocks) <= 2
        blocks.clear()
        assert xckpt.verify(target).ok
        blocks.clear()
    for options in ({}, {"sparse": True}, {"decode": False}):
        ds = xr.open_dataset(path, engine="ztensor", **options)  # type: ignore[arg-type]
        xckpt.save(ds, target, overwrite=True)
        assert len(blocks) <= 2
        blocks.clear()
    assert xckpt.compare(path, target, progress=False)["t"].sel(statistic="status") == 0


def test_statistics_read_stored_bytes_only(path: Path, blocks: list[Any]) -> None:
    result = xckpt.stats(path, progress=False, cache=False, exact_quantiles=True)["t"]
    size = xckpt.read_index(path).tensors["t"].size
    assert result.sel(statistic="count") == size
    assert result.sel(statistic="zero") == size - len(blocks[0].values)
    assert float(result.sel(statistic="max")) in {1.5, 3.0, np.frombuffer(ONE, "<i4")[0]}
    result = xckpt.histogram(path, progress=False, cache=False)["t"]
    assert result.sum() == size
    assert len(blocks) <= 4


def test_comparing_reads_stored_bytes_only(path: Path, blocks: list[Any]) -> None:
    second = path.with_name("n.zt")
    xckpt.convert(path, second)
    blocks.clear()
    comparison = xckpt.compare(path, second, progress=False, cache=False)["t"]
    assert comparison.sel(statistic="status") == 0
    assert len(blocks) <= 2


@pytest.mark.parametrize("options", [{}, {"stack": True}], ids=str)
def test_a_whole_large_tensor_is_refused_before_reading(
    path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = xr.open_dataset(path, engine="ztensor", **options)
    monkeypatch.setattr(LazyArray, "__getitem__", None)
    advice = r"m\.zt: tensor 't': \d+ bytes \(.*iB\) of memory .* Select less .* sparse=True"
    for compute in (
        lambda: ds["t"].values,
        ds.load,
        ds["t"].data.compute,
        lambda: ds["t"][: 1 << 59].values,
    ):
        with pytest.raises(xckpt.TooLargeError, match=advice):
            compute()


def test_a_part_of_a_large_tensor_is_readable(path: Path) -> None:
    ds = xr.open_dataset(path, engine="ztensor")
    corner = ds["t"][(slice(4, 6), *[slice(6, 10)] * (ds["t"].ndim - 1))]
    with dask.config.set({"xckpt.memory-limit": "1 MiB"}):
        assert corner.values.shape == corner.shape
        sparse = xr.open_dataset(path, engine="ztensor", sparse=True)
        assert sparse["t"].data.compute(scheduler="sync").nnz >= 1


@pytest.mark.parametrize("command", ["info", "stats --no-cache", "verify", "convert", "compare"])
@pytest.mark.usefixtures("blocks")
def test_commands_read_large_tensors_in_blocks(path: Path, command: str) -> None:
    more = {"convert": [str(path.with_name("n.zt"))], "compare": [str(path), "--no-cache"]}
    assert main([*command.split(), str(path), *more.get(command, [])]) == 0


def test_a_dense_copy_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = path.with_name("n.safetensors")
    with dask.config.set({"xckpt.memory-limit": "1 MiB"}):
        assert main(["convert", str(path), str(dense)]) == 2
    assert capsys.readouterr().err.count("\n") == 2  # the other line warns of dense values
    assert not dense.exists()


@pytest.mark.usefixtures("blocks")
def test_complex_numbers(tmp_path: Path) -> None:
    path, second = tmp_path / "m.zt", tmp_path / "n.zt"
    for target, number in ((path, 3 + 4j), (second, 3 + 5j)):
        parts = {
            "values": stored(np.array([number], "<c8").tobytes(), dtype="f32", type="complex64"),
            "coords": stored(np.array([5, 7], "<u4").tobytes(), dtype="u32"),
        }
        shape = [1 << 30, 1 << 30]
        tensor = {"shape": shape, "layout": "zt.sparse_coo/1", "parts": parts}
        target.write_bytes(v2_file({"t": tensor}))
    result = xckpt.stats(path, progress=False, cache=False)["t"]
    assert result.sel(statistic="absmax") == 5
    assert result.sel(statistic="zero") == (1 << 60) - 1
    result = xckpt.compare(path, second, progress=False, cache=False)["t"]
    assert result.sel(statistic="max_abs") == 1
    assert result.sel(statistic="rel_l2") == pytest.approx(1 / 5)


def test_more_elements_than_can_be_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.zt"
    path.write_bytes(coo([[5], [7]], [1 << 32, 1 << 31]))
    assert xckpt.verify(path).ok
    with pytest.raises(xckpt.UnsupportedError, match=r"m\.zt: tensor 't': 9223372036854775808 el"):
        xckpt.stats(path, progress=False, cache=False)


def test_more_rows_than_can_be_described(tmp_path: Path) -> None:
    path = tmp_path / "m.zt"
    path.write_bytes(coo([[5], [7]], [1 << 40, 1 << 20]))
    ds = xr.open_dataset(path, engine="ztensor", dims={"t": ("row", "column")})
    with pytest.raises(xckpt.TooLargeError, match=r"'t': .* Describe fewer rows"):
        xckpt.stats(ds, dim="column", progress=False, cache=False)


# --- compressed streams --------------------------------------------------------------------------


def seekable(nbytes: int) -> Any:
    encoder = new_encoder("zstd-seekable", nbytes)
    data = encoder.add(bytes(nbytes)) + encoder.end()
    return stored(data, encoding="zt.zstd-seekable/1", decoded_length=nbytes)


def zeros(nbytes: int, *, sized: bool = True) -> Any:
    compressor = zstandard.ZstdCompressor(write_content_size=sized)
    return stored(compressor.compress(bytes(nbytes)), encoding="zstd")


def compressed(kind: str) -> bytes:
    if kind == "float4":
        part = seekable(NBYTES)
        return v2_file({"t": dense_v2(part.data, [NBYTES, 2], "u8", type="f4_e2m1", **part.fields)})
    if kind == "seekable":
        part = seekable(NBYTES)
        return v2_file({"t": dense_v2(part.data, [1024, NBYTES // 4096], "f32", **part.fields)})
    if kind == "structural":
        parts = {"data": zeros(NBYTES), "more": zeros(NBYTES, sized=False)}
        return v1_file({"t": {"dtype": "u1", "shape": [3], "format": "x", "components": parts}})
    size = {"float32": 4, "bool": 1}[kind]
    part = zeros(NBYTES)
    return v1_file({"t": dense_v1(part.data, [1024, NBYTES // size // 1024], kind, **part.fields)})


KINDS = ["float32", "bool", "structural", "seekable", "float4"]


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_decoded_in_bounded_memory(kind: str, tmp_path: Path) -> None:
    path, target = tmp_path / "m.zt", tmp_path / "n.zt"
    path.write_bytes(compressed(kind))
    with dask.config.set({"xckpt.memory-limit": "16 MiB"}):
        assert xckpt.verify(path).ok
        result = xckpt.stats(path, progress=False, cache=False)
        for variable in result.data_vars.values():
            count = float(variable.sel(statistic="count"))
            assert count == variable.sel(statistic="zero") >= NBYTES / 4
        assert xckpt.histogram(path, progress=False, cache=False).sizes["bin"]
        for options in ({"compression": None}, {"compression": "zstd"}):
            version = "2" if kind in {"float4", "seekable"} else "1.0"
            encoding = {"*": options}
            xckpt.convert(path, target, version=version, encoding=encoding, overwrite=True)
            assert xckpt.verify(target).ok
        result = xckpt.compare(path, target, progress=False, cache=False)
        assert all(v.sel(statistic="status") == 0 for v in result.data_vars.values())


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_size_has_a_limit(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.zt"
    path.write_bytes(compressed(kind))
    message = r"m\.zt: tensor 't': .*\d+ bytes \(.* MiB\) of memory .*16\.00 MiB is the limit"
    with dask.config.set({"xckpt.memory-limit": "16 MiB"}):
        for variable in xr.open_dataset(path, engine="ztensor").variables.values():
            with pytest.raises(xckpt.TooLargeError, match=message):
                variable.values  # noqa: B018
            # The end of a stream costs its beginning, but no memory.
            assert not variable[-5:].values.any()
    for variable in xr.open_dataset(path, engine="ztensor").variables.values():
        assert not variable.values.any()


def test_commands_report_tensors_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.zt"
    parts = {"values": zeros(1 << 18), "coords": zeros(NBYTES // 4)}
    tensor = {"dtype": "uint8", "shape": [9], "format": "sparse_coo", "components": parts}
    path.write_bytes(v1_file({"t": tensor}))
    with dask.config.set({"xckpt.memory-limit": "1 MiB"}):
        assert main(["stats", "--no-cache", str(path)]) == 2
        assert main(["convert", str(path), str(tmp_path / "n.zt")]) == 2
        assert main(["verify", str(path)]) == 0
    output = capsys.readouterr()
    assert output.err.count("tensor 't': byte") == 2
    assert "warning: tensor 't': byte" in output.out

    def ended(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("xckpt.opening.open_index", ended)
    assert main(["info", str(path)]) == 2
    assert capsys.readouterr().err == "xckpt: out of memory\n"


# --- elements that are repeated ------------------------------------------------------------------

# Shape, strides and kind of views of two elements that stand for terabytes.
VIEWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
    "floats": ((1 << 40,), (0,), "FloatStorage"),
    "petabytes": ((1 << 50, 16), (0, 0), "FloatStorage"),
    "booleans": ((1 << 20, 1 << 20), (0, 0), "BoolStorage"),
    "complex": ((1 << 39, 2), (0, 1), "ComplexFloatStorage"),
}
WAYS: dict[str, Callable[[Path], Any]] = {
    "stats": lambda path: xckpt.stats(path, cache=False),
    "histogram": xckpt.histogram,
    "findings": xckpt.findings,
    "compare": lambda path: xckpt.compare(path, xr.open_dataset(path, engine="torch") * 1),
    "manifest": xckpt.manifest,
    "convert": lambda path: xckpt.convert(path, path.with_suffix(".safetensors")),
    "save": lambda path: xckpt.save(
        xr.open_dataset(path, engine="torch"), path.with_suffix(".npz")
    ),
    "max": lambda path: xr.open_dataset(path, engine="torch").max().compute(),
    "values": lambda path: xr.open_dataset(path, engine="torch")["w"].values,
}


@pytest.fixture(params=VIEWS)
def view(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a file with a broadcast tensor."""
    shape, strides, kind = VIEWS[request.param]
    stored_view = torch.view(torch.storage("0", 2, kind), 0, shape, strides)
    path = tmp_path / "m.pt"
    nbytes = 2 * {"FloatStorage": 4, "BoolStorage": 1}.get(kind, 8)
    path.write_bytes(torch.archive(torch.mapping({"w": stored_view}), {"0": bytes(nbytes)}))
    return path


@pytest.mark.parametrize("operation", WAYS)
def test_a_broadcast_tensor_of_terabytes_is_refused(view: Path, operation: str) -> None:
    refusal = r"'w'.*xckpt\.\w+-limit|File too large"
    with pytest.raises((xckpt.TooLargeError, OSError), match=refusal) as caught:
        WAYS[operation](view)
    assert getattr(caught.value, "path", str(view)) == str(view)
    assert [path.name for path in view.parent.iterdir()] == ["m.pt"]


def test_a_selection_of_a_broadcast_tensor_is_read(view: Path) -> None:
    assert not xr.open_dataset(view, engine="torch")["w"][:3].values.any()
    assert xckpt.verify(view).ok


def test_the_limit_of_expansion_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    values = np.arange(4.0, dtype="f4")
    stored_view = torch.view(torch.storage("0", 4), 0, (1 << 18, 4), (0, 1))
    path.write_bytes(torch.archive(torch.mapping({"w": stored_view}), {"0": values.tobytes()}))
    with (
        dask.config.set({"xckpt.expansion-limit": "3 MiB"}),
        pytest.raises(xckpt.TooLargeError, match=r"16 stored bytes.*4\.00 MiB.*expansion-limit"),
    ):
        xckpt.stats(path)
    table = xckpt.stats(path)
    assert float(table["w"].sel(statistic="mean")) == 1.5
