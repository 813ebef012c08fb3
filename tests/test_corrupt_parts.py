"""Opening decodes nothing: a damaged part affects its own tensor, and only when computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import pytest
import xarray as xr
import zstandard

import xckpt
from tests.formats.ztensor_files import dense_v1, stored, v1_file, v12_file
from xckpt.cli import main

if TYPE_CHECKING:
    from pathlib import Path

VALUES = np.arange(6, dtype="<f4")
COORDS = np.array([[0, 0, 1, 1, 2, 3], [0, 2, 1, 3, 2, 3]], "<u8")
DENSE = np.zeros((4, 4), "<f4")
DENSE[tuple(COORDS.astype(int))] = VALUES
OPTIONS: list[dict[str, Any]] = [
    {},
    {"decode": False},
    {"sparse": True},
    {"stack": True},
    {"decode": False, "stack": True},
]


def packed(array: np.ndarray, *, sized: bool = True, damaged: bool = False) -> Any:
    """Compress an array; a damaged one has valid headers, and data that do not decode."""
    compressor = zstandard.ZstdCompressor(write_content_size=sized, write_checksum=True)
    data = compressor.compress(array.tobytes())
    if damaged:
        data = data[:-6] + bytes(b ^ 0xFF for b in data[-6:])
    return stored(data, encoding="zstd")


def written(folder: Path, damaged: str | None = None, *, sized: bool = True) -> Path:
    """Write sparse, structural and dense tensors with compressed parts, one of them damaged."""

    def part(name: str, array: np.ndarray) -> Any:
        return packed(array, sized=sized, damaged=name == damaged)

    coo = {"values": part("coo:values", VALUES), "coords": part("coo:coords", COORDS)}
    indptr = np.searchsorted(COORDS[0], np.arange(5)).astype("<u8")
    csr = {
        "values": part("csr:values", VALUES),
        "indices": part("csr:indices", COORDS[1]),
        "indptr": part("csr:indptr", indptr),
    }
    layers = {
        f"layers.{n}.w": {
            "dtype": "uint8",
            "shape": [4, 4],
            "format": "quantized_4bit",
            "components": {"data": part(f"layers.{n}.w:data", np.arange(8 + n, dtype="u1"))},
        }
        for n in range(3)
    }
    sparse = {"dtype": "float32", "shape": [4, 4]}
    tensors = {
        "coo": {**sparse, "format": "sparse_coo", "components": coo},
        "csr": {**sparse, "format": "sparse_csr", "components": csr},
        "dense": dense_v1(part("dense", DENSE).data, [4, 4], "float32", encoding="zstd"),
        "plain": dense_v1(DENSE.tobytes(), [4, 4], "float32"),
        **layers,
    }
    path = folder / "m.zt"
    path.write_bytes(v1_file(tensors))
    return path


def unsparse(values: Any) -> Any:
    return values.todense() if hasattr(values, "todense") else values


PARTS = ["coo:values", "coo:coords", "csr:values", "csr:indices", "csr:indptr", "layers.1.w:data"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_opening_decodes_nothing(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    decoded = []
    real = zstandard.ZstdDecompressor

    def counted(*args: Any, **keywords: Any) -> Any:
        decoded.append(args)
        return real(*args, **keywords)

    monkeypatch.setattr(zstandard, "ZstdDecompressor", counted)
    xckpt.read_index(path)
    ds = xr.open_dataset(path, engine="ztensor", **options)
    assert repr(ds.ckpt)
    assert repr(xr.open_datatree(path, engine="ztensor", **options).ckpt)
    assert main(["info", str(path)]) == 0
    assert decoded == []
    ds["dense"].load()
    assert len(decoded) == 1


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("damaged", [*PARTS, "dense", None])
def test_a_damaged_part_affects_only_its_tensor(
    damaged: str | None, options: dict[str, Any], sized: bool, tmp_path: Path
) -> None:
    path = written(tmp_path, damaged, sized=sized)
    full = written(tmp_path / "..", sized=sized)
    ds = xr.open_dataset(path, engine="ztensor", **options)
    expected = xr.open_dataset(full, engine="ztensor", **options).load()
    assert list(ds.variables) == list(expected.variables)
    harmed = "" if damaged is None else damaged.partition(":")[0]
    errors = {}
    for name, variable in ds.variables.items():
        try:
            values = variable.data.compute()
        except xckpt.CheckpointError as error:
            errors[name] = error
        else:
            np.testing.assert_equal(unsparse(values), unsparse(expected[name].data))
    assert list(errors) == ([] if damaged is None else [damaged if damaged in ds else harmed])
    for value in errors.values():
        parts = xckpt.read_index(path).tensors[harmed].parts.values()
        assert (value.path, value.tensor) == (str(path), harmed)
        assert value.offset in {part.offset for part in parts}


@pytest.mark.parametrize("damaged", ["coo:coords", "layers.1.w:data"])
def test_other_operations_name_the_damaged_tensor(
    damaged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, damaged)
    tensor = damaged.partition(":")[0]
    message = rf"m\.zt: tensor '{tensor}': byte \d+: a zstd stream is corrupt"
    with pytest.raises(xckpt.FormatError, match=message):
        xckpt.stats(path, progress=False, cache=False)
    with pytest.raises(xckpt.FormatError, match=message):
        xckpt.convert(path, tmp_path / "n.zt", version="2", cast="allow")
    findings = xckpt.verify(path).findings
    assert [finding.tensor for finding in findings] == [tensor]
    for command in (["stats", "--no-cache"], ["verify"]):
        assert main([*command, str(path)]) == 1
        assert f"'{tensor}': byte" in "".join(capsys.readouterr())


@pytest.mark.parametrize("verify", [None, True])
def test_empty_parts_have_a_digest(tmp_path: Path, verify: bool | None) -> None:
    """A damaged header of a stream can claim zero bytes."""
    path = tmp_path / "m.zt"
    digest = f"crc32c:0x{google_crc32c.value(VALUES.tobytes()):08x}"
    part = stored(zstandard.compress(b""), encoding="zstd", digest=digest)
    tensor = {"dtype": "uint8", "shape": [3], "format": "odd", "components": {"data": part}}
    path.write_bytes(v1_file({"t": tensor}))
    ds = xr.open_dataset(path, engine="ztensor", verify=verify)
    with pytest.raises(xckpt.IntegrityError, match=r"m\.zt: tensor 't': byte 64: the bytes have"):
        ds["t:data"].values  # noqa: B018
    assert not xckpt.verify(path).ok


@pytest.mark.filterwarnings("ignore:.*unknown algorithm")
def test_a_malformed_digest_is_damage_for_every_operation(tmp_path: Path) -> None:
    path = tmp_path / "m.zt"
    path.write_bytes(v1_file({"t": dense_v1(bytes(8), [2], "float32", digest="crc;2c:0xZZ")}))
    with pytest.raises(xckpt.FormatError, match="is not algorithm:value"):
        xr.open_dataset(path, engine="ztensor")["t"].values  # noqa: B018
    (finding,) = [finding for finding in xckpt.verify(path).findings if finding.severity == "error"]
    assert (finding.rule, finding.offset) == ("Digest", 64)


def test_a_size_that_is_not_a_whole_number_of_elements(tmp_path: Path) -> None:
    coo = {"values": packed(VALUES), "coords": packed(COORDS.view("u1")[:, :-1])}
    shape = {"dtype": "float32", "shape": [4, 4]}
    tensors = {
        "s": {**shape, "format": "sparse_coo", "components": coo},
        # A role of that name in a layout that is not known, of a tensor without axes.
        "q": {**shape, "shape": [], "format": "x", "components": {"coords": packed(VALUES)}},
    }
    path = tmp_path / "m.zt"
    path.write_bytes(v1_file(tensors))
    ds = xr.open_dataset(path, engine="ztensor", decode=False)
    np.testing.assert_array_equal(ds["s:values"], VALUES)
    np.testing.assert_array_equal(ds["q:coords"], VALUES.view("u1"))
    with pytest.raises(xckpt.FormatError, match=r"'s': byte \d+: .*94 bytes.* not a whole number"):
        ds["s:coords"].load()


def test_parts_that_decode_to_too_many_bytes_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "m.zt"
    most = 256 << 20
    many = np.zeros(most + 1, "u1")
    parts = {"sized": packed(many), "not": packed(many, sized=False), "few": packed(many[:100])}
    group = {"dtype": "uint8", "shape": [4], "format": "x", "components": parts}
    path.write_bytes(v1_file({"q": group}))
    ds = xr.open_dataset(path, engine="ztensor")
    assert ds["q:sized"].shape == (most + 1,)
    assert ds["q:few"].shape == (100,)
    with pytest.raises(xckpt.UnsupportedError, match=rf"'q': byte .* counting ends after {most}"):
        ds["q:not"].load()


def test_sizes_in_the_manifest_are_not_read_from_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zstandard, "get_frame_parameters", None)
    part = packed(VALUES, sized=False)
    part.fields |= {"dtype": "f32", "uncompressed_length": VALUES.nbytes}
    path = tmp_path / "m.zt"
    path.write_bytes(v12_file({"q": {"shape": [4], "format": "x", "components": {"a": part}}}))
    ds = xr.open_dataset(path, engine="ztensor")
    np.testing.assert_array_equal(ds["q:a"], VALUES)
