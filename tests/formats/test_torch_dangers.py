"""Functions that run when another program unpickles a PyTorch file."""

from __future__ import annotations

import builtins
import os
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import xckpt
from xckpt.cli import main


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def write(path: Path, value: Any, protocol: int = 2) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol))
        archive.writestr("archive/version", "3\n")
    return str(path)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Evil(os.system, "echo pwned"), f"{os.system.__module__}.system"),
        (Evil(builtins.eval, "1"), ".eval"),
        (Evil(partial(os.remove, "x")), f"{os.remove.__module__}.remove"),
    ],
)
def test_verify_fails_and_names_the_function(
    value: Any, name: str, protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "evil.pt", {"note": "x", "deep": [{"value": value}]}, protocol)
    (executes,) = xckpt.read_index(path).executes
    assert executes.endswith(name)
    assert main(["verify", path]) == 1
    out = capsys.readouterr().out
    assert "UNSAFE" in out
    assert name in out


def test_values_of_usual_checkpoints_are_good(tmp_path: Path) -> None:
    value = [Namespace(lr=0.1), datetime.now(UTC), PurePosixPath("x"), OrderedDict(a={1}), 1j]
    path = write(tmp_path / "good.pt", {"values": value})
    assert xckpt.read_index(path).executes == ()
