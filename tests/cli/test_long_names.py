"""Output stays readable with names of any length, and JSON has them in full."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.cli import main
from xckpt.formatting import columns

if TYPE_CHECKING:
    from pathlib import Path

LONG = "model." + "x" * 65_000 + ".weight"
WIDE = "重" * 20_000
DOTS = ".".join(["a"] * 30_000)
NAMES = [LONG, WIDE, DOTS, *(f"layers.{n}.w" for n in range(30))]
MOST = 400


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "m.safetensors"
    values = np.array([[np.nan, 1.0], [2.0, 3.0]], np.float32)
    xckpt.save(xr.Dataset(dict.fromkeys(NAMES, (("a", "b"), values))), path)
    return path


@pytest.fixture(scope="module")
def copy(path: Path) -> Path:
    copy = path.with_name("other.safetensors")
    values = np.array([[0.0, 1.0], [2.0, 4.0]], np.float32)
    xckpt.save(xr.Dataset(dict.fromkeys(NAMES, (("a", "b"), values))), copy)
    return copy


@pytest.mark.parametrize(
    "arguments",
    [
        ["info"],
        ["stats"],
        ["stats", "--findings"],
        ["compare", "COPY"],
        ["verify"],
        ["stats", "--tensors", LONG],
        ["stats", "--tensors", LONG + "x"],
    ],
    ids=lambda arguments: " ".join(arguments)[:30],
)
def test_no_line_is_wider_than_a_name_needs(
    path: Path, copy: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = [str(copy) if argument == "COPY" else argument for argument in arguments]
    main([command, str(path), *options])
    out, err = capsys.readouterr()
    assert max(map(columns, out.splitlines()), default=0) <= MOST + len(str(path))
    assert len(out) < 40 * MOST
    # A message names several tensors.
    assert max(map(columns, err.splitlines()), default=0) <= 4 * MOST


def test_the_ends_of_a_name_stay(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(path), "--limit", "40"]) == 0
    out, _ = capsys.readouterr()
    (row,) = [line for line in out.splitlines() if line.startswith("model.")]
    name = row.split()[0]
    assert "…" in name
    assert name.endswith("x.weight")


def test_programs_get_whole_names(
    path: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["info"], ["stats"], ["compare", str(copy)]):
        main([arguments[0], str(path), *arguments[1:], "--json"])
        document = json.loads(capsys.readouterr().out)
        assert {tensor["name"] for tensor in document["tensors"]} == set(NAMES)


def test_texts_of_python_are_bounded_as_well(path: Path) -> None:
    ds = xr.open_dataset(path)
    report = xckpt.verify(path)
    shown = [xckpt.read_index(path), ds.ckpt, ds.ckpt.tree(), report]
    for text in map(repr, shown):
        assert max(map(columns, text.splitlines())) <= MOST + len(str(path))
