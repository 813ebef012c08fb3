"""Errors for files of other kinds name the kind and a remedy."""

from __future__ import annotations

import gzip
import io
import pickle
import re
import tarfile
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.contracts.every import declared
from tests.formats import torch_files
from tests.formats.safetensors_files import entry, safetensors_file
from xckpt import FormatError, formats

if TYPE_CHECKING:
    from pathlib import Path


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return file.getvalue()


def pickled(value: object, protocol: int) -> bytes:
    return pickle.dumps(value, protocol)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
XML = b"<?xml version='1.0' encoding='UTF-8'?>"
S3 = XML + b"\n<Error><Code>NoSuchKey</Code><Message>The key does not exist.</Message></Error>"
BOM = b"\xef\xbb\xbf"
NOISE = bytes(range(7, 251)) * 4
# A message of protobuf: a version, then a message of some length.
CORE_ML = b"\x08\x05\x12\x0a\x0a\x08\x0a\x01x\x1a\x03\x12\x01\x04" + NOISE
SAVED_MODEL = b"\x08\x01\x12\xb6\x9f\x01\x0a\x5a\x0a\x1f" + NOISE
FILES = {
    "Git LFS": (LFS, "git lfs pull"),
    "git-annex": (b"/annex/objects/MD5E-s5--d41d8cd.bin\n", "git annex get"),
    "DVC": (b"outs:\n- md5: a304afb96060aad90176268345e10355\n", "dvc pull"),
    "GGJT": (b"tjgg\x03\0\0\0" + bytes(32), "llama.cpp"),
    "pickle": (pickle.dumps({"w": [1.0]}), "savez"),
    "pickle, and not": (pickled({"w": [1.0]}, 0), "savez"),
    "pickle with NumPy": (pickled({"w": np.ones(3)}, 4), "savez"),
    "joblib": (b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x13sklearn.linear_model", "savez"),
    "zip": (zipped("readme.txt"), "Extract"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(64) + b"_NCProperties", "h5netcdf"),
    "netCDF 3": (b"CDF\x05" + bytes(64), "scipy"),
    "Parquet": (b"PAR1" + NOISE, "read_parquet"),
    "Arrow": (b"ARROW1\0\0" + NOISE, "read_feather"),
    "PNG": (b"\x89PNG\r\n\x1a\n" + NOISE, "with the weights"),
    "JPEG": (b"\xff\xd8\xff\xe0" + NOISE, "with the weights"),
    "7-Zip": (b"7z\xbc\xaf\x27\x1c" + NOISE, "Extract"),
    "TensorFlow Lite": (b"\x1c\0\0\0TFL3" + NOISE, "converted from"),
    "TensorRT": (b"ftrt" + NOISE, "made from"),
    "weights of a Core ML": (
        b"\4\0\0\0\2" + bytes(59) + b"\xef\xbe\xad\xde" + NOISE,
        "coremltools",
    ),
    "Core ML or TensorFlow": (CORE_ML, "coremltools"),
    "model of Core ML or": (SAVED_MODEL, "save_weights"),
    "TensorFlow run": (b'model_checkpoint_path: "model-5"\n', "save_weights"),
    "OpenVINO": (XML + b'<net name="model" version="11"><layers>', "made from"),
    "error message 'NoSuchKey'": (S3, "address"),
    "'NoSuchKey' of an object store": (BOM + S3, "address"),
    "'Repository not found' of a server": (b'{"error":"Repository not found"}', "address"),
    "error message 'Unauthorized'": (b'{"message": "Unauthorized", "code": 1}', "address"),
    "text 'Entry not found'": (b"Entry not found", "address"),
    "text '404: Not Found'": (b"404: Not Found", "address"),
    "a text that begins": (b"A long description\n" * 400, "with the weights"),
    "UTF-16": ("Entry not found".encode("utf-16"), "PowerShell"),
    "web page": (b"\n<!DOCTYPE html><html>404</html>", "Download"),
    "a web page": (BOM + b"<html>404</html>", "Download"),
    "index of shards": (b'{"metadata": {}, "weight_map": {"w": "a"}}', ".index.json"),
    "JSON": (b'{"hidden_size": 64}', "configuration"),
    "JSON without tensors after a byte order mark": (BOM + b'{"a": 1}', "without a byte order"),
    "index of shards after a byte order mark": (BOM + b'{"weight_map": {}}', "without a byte"),
    "gzip": (gzip.compress(b"x" * 100), "Decompress"),
    "lz4": (b"\x04\x22\x4d\x18" + NOISE, "Decompress"),
    "only 100 zeros": (bytes(100), "repeat it"),
    "at least 1024 zeros": (bytes(5000), "repeat it"),
    "empty": (b"", "copying"),
}


@pytest.mark.parametrize("kind", FILES)
def test_errors_name_the_content_and_a_remedy(kind: str, tmp_path: Path) -> None:
    content, advice = FILES[kind]
    path = tmp_path / "model"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=kind) as caught:
        xckpt.read_index(path)
    assert advice in str(caught.value.hint)
    assert str(path) in str(caught.value)
    for engine in formats.names():
        with pytest.raises(xckpt.CheckpointError, match=re.escape(str(path))):
            xr.open_dataset(path, engine=engine)


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf", ".onnx", ".bin", ".msgpack", ".h5"])
@pytest.mark.parametrize("kind", ["text 'Entry not found'", "'NoSuchKey' of an object store"])
def test_errors_name_the_content_under_any_suffix(kind: str, suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"m{suffix}").write_bytes(FILES[kind][0])
    with pytest.raises(FormatError, match=kind):
        xckpt.open(tmp_path / f"m{suffix}")


# Names of files whose content says nothing.
NAMES = {
    "model.gguf.part2of2": ("one part of 'model.gguf'", "cat model.gguf"),
    "Model.gguf-split-ab": ("one part of 'Model.gguf'", "cat Model.gguf"),
    "model.safetensors.partaa": ("one part of 'model.safetensors'", "Join all parts"),
    "model.safetensors.part_3": ("one part of 'model.safetensors'", "Join all parts"),
    "model.zip.002": ("one part of 'model.zip'", "Join all parts"),
    "model.z02": ("one part of an archive", "Extract"),
    "model.safetensors.incomplete": ("unfinished download", "Download"),
    "model.gguf.crdownload": ("unfinished download", "Download"),
    "variables.data-00000-of-00001": ("data of a TensorFlow checkpoint", "save_weights"),
    "weights.dat": ("the file begins", "numpy.fromfile"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [NOISE, bytes(4096)], ids=["noise", "zeros"])
def test_names_tell_what_contents_do_not(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    is_part = "part of" in NAMES[name][0]
    if content != NOISE and not is_part:
        return  # zeros are never weights
    with pytest.raises(FormatError, match=re.escape(NAMES[name][0])) as caught:
        xckpt.open(tmp_path / name)
    assert NAMES[name][1] in str(caught.value.hint)


def test_names_of_versioned_messages_are_exact(tmp_path: Path) -> None:
    for name, content, kind in (
        ("m.mlmodel", CORE_ML, "a Core ML model"),
        ("saved_model.pb", SAVED_MODEL, "a SavedModel of TensorFlow"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match=kind):
            xckpt.open(tmp_path / name)


def test_companions_tell_what_names_do_not(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(NOISE)
    with pytest.raises(FormatError, match="the file begins"):
        xckpt.open(tmp_path / "m.bin")
    (tmp_path / "m.xml").write_text("<net>")
    with pytest.raises(FormatError, match=r"weights of the OpenVINO model 'm\.xml'"):
        xckpt.open(tmp_path / "m.bin")
    (tmp_path / "variables.index").write_bytes(NOISE + bytes.fromhex("57fb808b247547db"))
    with pytest.raises(FormatError, match="index of a TensorFlow checkpoint"):
        xckpt.open(tmp_path / "variables.index")


@pytest.mark.parametrize("format", formats.names())
def test_errors_name_another_engine_of_the_package(format: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(next(iter(declared(format).small_files().values())))
    for engine in formats.names():
        if engine == format:
            continue
        with pytest.raises(xckpt.CheckpointError) as caught:
            xr.open_dataset(path, engine=engine)
        assert f"engine={format!r}" in str(caught.value)


def packed(names: dict[str, bytes], mode: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in names.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


MEMBERS = {"m/README": b"x", "m/a.safetensors": NOISE, "m/b.PT": NOISE}
APPLE = "__MACOSX/m/._a.safetensors"
AROUND = {
    "zip": zipped(APPLE, *MEMBERS),
    "tar": packed({APPLE: b"x", **MEMBERS}, "w"),
    "gzip": packed({APPLE: b"x", **MEMBERS}, "w:gz"),
}


@pytest.mark.parametrize("kind", AROUND)
def test_archives_list_the_checkpoints_in_them(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(AROUND[kind])
    with pytest.raises(FormatError, match=rf"{kind}.*'m/a.safetensors', 'm/b.PT'") as caught:
        xckpt.open(path)
    assert "Extract" in str(caught.value.hint)
    assert "__MACOSX" not in str(caught.value)
    path.write_bytes(AROUND[kind][:700])
    with pytest.raises(FormatError):
        xckpt.open(path)


def test_metadata_of_macos_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "._model.safetensors"
    path.write_bytes(bytes.fromhex("0005160700020000") + b"Mac OS X" + bytes(4080))
    with pytest.raises(FormatError, match="metadata of macOS") as caught:
        xckpt.open(path)
    assert "Open 'model.safetensors'" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["real.pt", "real.pt\n", "runs/7/real.pt", "sub/real.pt"])
def test_texts_that_stand_for_links_name_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "real.pt").write_bytes(NOISE)
    (tmp_path / "sub" / "real.pt").write_bytes(NOISE)
    (tmp_path / "latest.pt").write_text(text)
    with pytest.raises(FormatError, match=f"a text with the path '{text.strip()}'") as caught:
        xckpt.open(tmp_path / "latest.pt")
    expected = text if text.startswith("sub") else "real.pt"
    assert f"Open '{expected}'" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["gone.pt", "../latest.pt", "latest.pt", "/etc/passwd", "."])
def test_other_texts_name_no_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest.pt").write_text(text)
    with pytest.raises(FormatError, match="the text"):
        xckpt.open(tmp_path / "latest.pt")


class TestPickleOfAnUnpackedFile:
    DATA = torch_files.pickled(torch_files.mapping({"w": torch_files.whole("0", np.ones(4, "f4"))}))

    def test_the_pickle_alone(self, tmp_path: Path) -> None:
        (tmp_path / "data.pkl").write_bytes(self.DATA)
        with pytest.raises(FormatError, match="without the storages") as caught:
            xckpt.open(tmp_path / "data.pkl")
        assert "zip -0 -r" in str(caught.value.hint)

    @pytest.mark.parametrize("opened", ["model", "."])
    def test_its_folder_and_the_folder_around(self, opened: str, tmp_path: Path) -> None:
        (tmp_path / "model" / "data").mkdir(parents=True)
        (tmp_path / "model" / "data.pkl").write_bytes(self.DATA)
        with pytest.raises(FormatError, match="unpacked file of PyTorch") as caught:
            xckpt.open(tmp_path / opened)
        assert "zip -0 -r model.pt 'model'" in str(caught.value.hint)


class TestSavedModels:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "exported"
        (folder / "variables").mkdir(parents=True)
        (folder / "assets").mkdir()
        (folder / "saved_model.pb").write_bytes(SAVED_MODEL)
        for name in ("variables.index", "variables.data-00000-of-00001"):
            (folder / "variables" / name).write_bytes(bytes(64))
        return folder

    @pytest.mark.parametrize("name", [".", "..", "saved_model.pb"])
    def test_the_folder_is_named(self, folder: Path, name: str) -> None:
        with pytest.raises(FormatError, match="is a SavedModel of TensorFlow") as caught:
            xckpt.open(folder / name)
        assert "save_weights" in str(caught.value)

    def test_a_model_beside_it_opens(self, folder: Path) -> None:
        xckpt.save({"w": np.ones(1)}, folder / "model.safetensors")
        assert xckpt.open(folder)["w"].values.tolist() == [1]


class TestCheckpointsOfTensorFlow:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ckpt-50"\n')
        (tmp_path / "ckpt-50.data-00000-of-00001").write_bytes(NOISE)
        table = NOISE + bytes.fromhex("57fb808b247547db")
        (tmp_path / "ckpt-50.index").write_bytes(table)
        return tmp_path

    @pytest.mark.parametrize(
        "name", [".", "checkpoint", "ckpt-50", "ckpt-50.index", "ckpt-50.data-00000-of-00001"]
    )
    def test_every_name_of_it(self, folder: Path, name: str) -> None:
        with pytest.raises((FormatError, FileNotFoundError), match="TensorFlow") as caught:
            xckpt.open(folder / name)
        assert "save_weights" in str(caught.value)

    def test_a_model_beside_it_opens(self, folder: Path) -> None:
        data = safetensors_file({"w": entry("F32", [1], 0, 4)}, np.ones(1, "f4").tobytes())
        (folder / "model.safetensors").write_bytes(data)
        assert xckpt.open(folder)["w"].values.tolist() == [1]
