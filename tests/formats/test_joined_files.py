"""A file that several files were joined into is never read as one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.contracts.every import declared
from tests.formats import torch_files
from tests.formats.gguf_files import gguf_file

if TYPE_CHECKING:
    from pathlib import Path

ARCHIVES = [
    pytest.param(name, data, id=f"{name}-{label}")
    for name in ("npz", "torch", "keras", "gptrs")
    for label, data in declared(name).small_files().items()
    if data.startswith(b"PK")
]


def checkpoint(rows: int) -> bytes:
    return torch_files.checkpoint({"w": np.ones((rows, 4), "f4")})


@pytest.mark.parametrize(("name", "data"), ARCHIVES)
def test_equal_archives(name: str, data: bytes) -> None:
    with pytest.raises(xckpt.FormatError, match="joined into one") as caught:
        xr.open_dataset(data + data, engine=name)
    assert caught.value.offset == len(data)
    assert f"at byte {len(data)}" in str(caught.value.hint)


@pytest.mark.parametrize("rows", [(1, 9), (9, 1)], ids=["the last is larger", "smaller"])
def test_archives_of_different_sizes(rows: tuple[int, int]) -> None:
    first, last = map(checkpoint, rows)
    with pytest.raises(xckpt.FormatError, match="joined into one") as caught:
        xr.open_dataset(first + last, engine="torch")
    assert caught.value.offset == len(first)


@pytest.mark.parametrize("second", [torch_files.legacy({"v": np.ones(2, "f4")}), checkpoint(1)])
def test_chains_of_pickles(second: bytes) -> None:
    first = torch_files.legacy({"w": np.ones((2, 4), "f4")})
    with pytest.raises(xckpt.FormatError, match="joined into one") as caught:
        xr.open_dataset(first + second, engine="torch")
    assert caught.value.offset == len(first)


@pytest.mark.parametrize("padding", [0, 20])
def test_files_of_gguf(padding: int) -> None:
    data = np.ones(27 if padding else 32, "f4").tobytes()
    file = gguf_file({}, [("w", [len(data) // 4], 0, 0)], data)
    with pytest.raises(xckpt.FormatError, match="joined into one") as caught:
        xr.open_dataset(file + file, engine="gguf")
    assert caught.value.offset == len(file)
    assert "gguf-split --merge" in str(caught.value.hint)


class TestRanksOfADistributedCheckpoint:
    def folder(self, path: Path, ranks: int) -> Path:
        rows: dict[tuple[int, ...], Any] = {(n, 0): np.full((1, 4), n, "f4") for n in range(4)}
        written = torch_files.distributed({"w": rows}, {"w": (4, 4)})
        for name, data in list(written.items())[: ranks + 1]:
            (path / name).write_bytes(data)
        return path

    @pytest.mark.parametrize("items", [1, 2])
    def test_a_file_without_its_metadata(self, items: int, tmp_path: Path) -> None:
        file = self.folder(tmp_path, 2) / "__0_0.distcp"
        (tmp_path / ".metadata").unlink()
        file.write_bytes(file.read_bytes()[: len(file.read_bytes()) * items // 2])
        with pytest.raises(xckpt.CheckpointError, match="distributed checkpoint") as caught:
            xckpt.open(file)
        assert "copy '.metadata' from the folder of rank 0" in str(caught.value.hint)

    def test_a_file_beside_its_metadata(self, tmp_path: Path) -> None:
        file = self.folder(tmp_path, 2) / "__0_0.distcp"
        with pytest.raises(xckpt.CheckpointError, match="distributed checkpoint") as caught:
            xckpt.open(file)
        assert "Open the folder" in str(caught.value.hint)

    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("opened", [xckpt.open, xckpt.open_steps])
    def test_a_folder_without_metadata(self, opened: object, ranks: int, tmp_path: Path) -> None:
        (self.folder(tmp_path, ranks) / ".metadata").unlink()
        with pytest.raises(
            (xckpt.CheckpointError, OSError), match="distributed checkpoint"
        ) as caught:
            opened(tmp_path)  # type: ignore[operator]
        assert "copy '.metadata' from the folder of rank 0" in str(caught.value)
        assert "open_steps(" not in str(caught.value)
