"""Users can ask what a tensor is and why, and correct it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.formats.onnx_files import initializer, model, node
from xckpt.cli import main
from xckpt.structure import Role, structure_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Return a model with a weight, a bias, and a setting."""
    tensors: dict[str, Any] = {
        "layers.0.w": np.ones((8, 4, 3, 3), "f4"),
        "layers.0.b": np.ones(8, "f4"),
        "low": np.float32(0),
    }
    nodes = (
        node("Conv", ["x", "layers.0.w", "layers.0.b"], ["y"]),
        node("Clip", ["y", "low"], ["z"]),
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(model(*(initializer(n, v) for n, v in tensors.items()), nodes=nodes))
    return path


def test_a_row_says_what_a_tensor_is(graph: Path) -> None:
    table = xckpt.open(graph).ckpt.structure()
    assert table.index.tolist() == ["layers.0.w", "layers.0.b", "low"]
    assert table["role"].tolist() == ["weight", "weight", "constant"]
    row = table.loc["layers.0.w"]
    assert (row["layer"], row["module_type"], row["param"]) == (
        "layers.0",
        "convolution",
        "weight",
    )
    assert row["axes"] == "out, in, height, width"
    assert row["evidence"] == "the file: Conv[1]"


def test_the_reasons_for_one_tensor(graph: Path) -> None:
    table = xckpt.open(graph).ckpt.structure("low")
    first = table.iloc[0]
    assert (first["field"], first["value"], first["source"]) == ("role", "constant", "file")
    assert first["reason"] == "Clip[1]"
    assert first["decided"]
    overruled = table[(table["field"] == "role") & ~table["decided"]]
    assert overruled["source"].tolist() == ["convention"]


def test_an_unknown_name_is_an_error(graph: Path) -> None:
    with pytest.raises(KeyError, match=r"no tensor 'lows'.*low"):
        xckpt.open(graph).ckpt.structure("lows")


def test_users_correct_roles(graph: Path) -> None:
    corrections = {"layers.*": {"role": "constant"}, "*.b": {"role": "statistic", "slot": "x"}}
    ds = xckpt.open(graph, structure=corrections)
    table = ds.ckpt.structure()
    assert table["role"].tolist() == ["constant", "statistic", "constant"]
    assert table.loc["layers.0.b", "slot"] == "x"
    assert "you:" in table.loc["layers.0.w", "evidence"]
    assert ds.ckpt.footprint()["parameters"] == 0
    reasons = ds.ckpt.structure("layers.0.w")
    assert reasons["source"].tolist()[:2] == ["user", "file"]
    assert not reasons["decided"].tolist()[1]


WRONG: list[tuple[Any, type[Exception], str]] = [
    ({"*": {"role": "wieght"}}, ValueError, "similar names: 'weight'"),
    ({"*": {"rôle": "weight"}}, ValueError, "unknown field"),
    ({"*": "weight"}, TypeError, "not a mapping of fields"),
    ({"*": {"role": 3}}, TypeError, "is a text"),
    (["*"], TypeError, "maps globs of tensor names"),
]


@pytest.mark.parametrize(("corrections", "error", "words"), WRONG)
def test_wrong_corrections_say_what_is_wrong(
    corrections: Any, error: type[Exception], words: str, graph: Path
) -> None:
    with pytest.raises(error, match=words):
        xckpt.open(graph, structure=corrections)


def test_a_glob_without_a_match_warns(graph: Path) -> None:
    with pytest.warns(xckpt.CheckpointWarning, match="matches no tensor"):
        xckpt.open(graph, structure={"nothing.*": {"role": "constant"}})


def test_the_command_line_lists_the_structure(
    graph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--structure", str(graph)]) == 0
    text = capsys.readouterr().out
    assert "3 tensors: 2 weight, 1 constant" in text
    assert "the file: Conv[1]" in text
    assert main(["info", "--structure", "--json", str(graph)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["structure"]["low"]["role"] == "constant"


def test_the_structure_of_an_index_is_made_once(graph: Path) -> None:
    index = xckpt.read_index(graph)
    assert structure_of(index) is structure_of(index)
    assert structure_of(index)["low"].role is Role.CONSTANT
