"""Verifying: intact files are called intact, and each kind of damage is one finding."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sparse
import xarray as xr

from tests.conftest import golden_files
from xckpt import CheckpointWarning, manifest, read_index
from xckpt.cli import main
from xckpt.writing import save, verify

if TYPE_CHECKING:
    from pathlib import Path


# Malformed, but of no harm to a reader.
TAKEN = {"config_runtime_bad.bin", "name_empty.bin"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with digests, compressed and sparse tensors."""
    rng = np.random.default_rng(0)
    ds = xr.Dataset(
        {
            "raw": ("n", rng.random(1000)),
            "packed": ("n", rng.integers(0, 3, 1000)),
            "sparse": (("r", "c"), sparse.COO.from_numpy(np.eye(5, dtype="f4"))),
        }
    )
    encoding: dict[str, Any] = {
        "*": {"digest": "crc32c"},
        "packed": {"compression": "zstd"},
        "sparse": {"digest": None},
    }
    save(ds, tmp_path / "m.zt", encoding=encoding)
    return tmp_path / "m.zt"


def damage(path: Path, tensor: str, role: str, at: int = 5, value: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    offset = read_index(path).tensors[tensor].parts[role].offset + at
    data[offset] = data[offset] ^ 255 if value is None else value
    path.write_bytes(data)


def test_an_intact_file(model: Path) -> None:
    report = verify(model, tensors=["raw", "packed"])
    assert report.ok
    assert (report.tensors, report.digests, report.findings) == (2, 2, ())
    assert (report.status, report.unchecked) == ("ok", 0)
    assert repr(report).startswith(f"{model}: ok, ztensor 1.0, 2 tensors, 2 digests")
    assert len(report.to_dataframe()) == 0


def test_contents_without_digests_are_not_called_ok(model: Path) -> None:
    report = verify(model)
    assert report.ok
    assert (report.tensors, report.digests, report.unchecked) == (3, 2, 1)
    assert report.status == "unchecked"
    expected = "structure intact; the contents of 1 of 3 tensors have no digests, "
    text = " ".join(repr(report).split())  # a long path is broken into lines
    assert text.startswith(f"{model}: {expected}so they were not checked, ztensor 1.0, 3")


def test_undetectable_damage_is_not_called_ok(tmp_path: Path) -> None:
    """Zeros over values of a file without digests are as good as other values."""
    path = tmp_path / "m.safetensors"
    save(xr.Dataset({"w": ("n", np.ones(1000, "f4")), "empty": ("m", np.ones(0, "f4"))}), path)
    written = manifest(path)
    assert verify(path, manifest=written).status == "ok"
    data = path.read_bytes()
    path.write_bytes(data[:-400] + bytes(400))
    report = verify(path)
    assert (report.status, report.digests, report.unchecked) == ("unchecked", 0, 1)
    expected = "structure intact; contents have no digests, so they were not checked"
    assert verify(path, tensors="w").sentence == expected
    assert verify(path, tensors="empty").status == "ok"
    assert verify(path, manifest=written).status == "damaged"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("kind", ["longer by the directory", "longer", "damaged at the end"])
def test_arrays_in_members_that_are_longer(kind: str, method: int, tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(100, dtype="f4"))
    data = file.getvalue()
    data += b"more bytes" if kind != "longer by the directory" else b""
    with zipfile.ZipFile(tmp_path / "m.npz", "w", method) as archive:
        archive.writestr("w.npy", data)
    content = bytearray((tmp_path / "m.npz").read_bytes())
    entry = content.index(b"PK\1\2")
    if kind == "longer by the directory":
        size = struct.pack("<I", len(data) + 5)
        # Only the directory states the larger size.
        content[entry + 24 : entry + 28] = size
        if method == zipfile.ZIP_STORED:
            content[entry + 20 : entry + 24] = size
    elif kind == "damaged at the end":
        content[entry + 16] ^= 1  # the checksum
    (tmp_path / "m.npz").write_bytes(content)
    report = verify(tmp_path / "m.npz")
    assert report.status == ("ok" if kind == "longer" else "damaged")
    if kind == "longer" or method == zipfile.ZIP_DEFLATED:
        with pytest.warns(CheckpointWarning, match="by the directory, its member has bytes after"):
            ds = xr.open_dataset(tmp_path / "m.npz")
        np.testing.assert_array_equal(ds["w"], np.arange(100))


@pytest.mark.parametrize(
    ("tensor", "role", "rule"),
    [
        ("raw", "data", "Digest"),
        ("packed", "data", "Encoding"),
        ("sparse", "indices", "LayoutData"),
    ],
)
def test_damage_is_one_finding(tensor: str, role: str, rule: str, model: Path) -> None:
    damage(model, tensor, role)
    report = verify(model)
    assert not report.ok
    (finding,) = report.findings
    assert (finding.severity, finding.tensor, finding.rule) == ("error", tensor, rule)
    table = report.to_dataframe()
    assert table.tensor.tolist() == [tensor]
    assert f"error: tensor '{tensor}'" in repr(report)
    assert "DAMAGED" in repr(report)


def test_several_findings(model: Path) -> None:
    damage(model, "raw", "data")
    damage(model, "sparse", "indptr", at=0, value=9)
    assert {finding.tensor for finding in verify(model).findings} == {"raw", "sparse"}


def test_an_unreadable_file_is_a_finding(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:-1])
    report = verify(model)
    assert not report.ok
    assert report.findings[0].tensor is None
    assert verify(b"no checkpoint").findings[0].rule is None
    assert "Writing or copying it" in verify(b"").findings[0].message
    with pytest.raises(FileNotFoundError):
        verify(model.with_name("absent"))


def test_a_report_is_short(model: Path) -> None:
    many = {f"t{i}": ("n", np.zeros(3)) for i in range(30)}
    save(xr.Dataset(many), model, encoding={"*": {"digest": "sha256"}}, overwrite=True)
    for name in many:
        damage(model, name, "data")
    assert repr(verify(model)).endswith("… 10 more findings")


def test_progress(model: Path) -> None:
    reports: list[int] = []
    verify(model, progress=lambda done, _: reports.append(done))
    assert reports[-1] == sum(t.nbytes for t in read_index(model).tensors.values())


@pytest.mark.parametrize("path", golden_files("*/*", with_suffix=".expected.npz"))
def test_golden_files_are_intact(path: Path) -> None:
    report = verify(path)
    # Of a digest by an algorithm that its version does not know, the value is made up.
    is_empty = report.status == "empty" and not report.tensors
    assert report.ok or is_empty or "digest_unknown" in os.fspath(path), report


@pytest.mark.parametrize("path", golden_files("*/bad/*", with_suffix=".txt"))
def test_malformed_golden_files_are_damaged(path: Path) -> None:
    if path.suffix != ".txt":
        report = verify(path)
        assert report.findings or path.name in TAKEN or may_be_whole(path), report


def may_be_whole(path: Path) -> bool:
    """Return whether the text next to a file allows reading it, or it is part of another file."""
    verdict = path.with_suffix(".txt").read_text("utf-8")
    return verdict.startswith(("[either]", "[open] open", "[with "))


@pytest.mark.parametrize(
    "header",
    [b"GGUF" + struct.pack("<IQQ", 4, 0, 0), b"GPTRSCHK" + struct.pack("<III", 3, 0, 0)],
    ids=["gguf", "gptrs"],
)
def test_a_file_of_an_unknown_version_is_neither_intact_nor_damaged(
    header: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(header)
    report = verify(path)
    assert (report.status, report.ok) == ("unsupported", False)
    assert [finding.rule for finding in report.findings] == ["Version"]
    assert main(["verify", os.fspath(path)]) == 2
