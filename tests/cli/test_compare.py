"""``xckpt compare``: the listed differences and the exit status."""

from __future__ import annotations

import json
import re
from io import BytesIO
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.cli import main
from xckpt.writing import save

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("compare")
    base = xr.Dataset({n: (("a", "b"), np.ones((4, 3), np.float32)) for n in ("u", "v", "w")})
    save(base, folder / "a.zt")
    tuned = base.assign(v=base["v"] * 3, w=base["w"] * 1.5).drop_vars("u")
    save(tuned.assign(x=("a", np.ones(4, np.float32))), folder / "b.safetensors")
    return str(folder / "a.zt"), str(folder / "b.safetensors")


def test_the_largest_difference_comes_first(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *pair]) == 1
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["tensor", "status", "equal_fraction", "max_abs", "rmse", "rel_l2", "cosine"]
    assert [row[:2] for row in rows[1:]] == [
        ["u", "only_a"],
        ["x", "only_b"],
        ["v", "changed"],
        ["w", "changed"],
    ]
    assert rows[3][2:] == ["0", "2", "2", "2", "1"]
    assert err == "xckpt: 4 tensors: 2 changed, 1 only in A, 1 only in B\n"


def test_equal_files_have_status_0_whatever_their_formats(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = str(tmp_path / "copy.safetensors")
    assert main(["convert", pair[0], copy, "--dtype", "float64"]) == 0
    capsys.readouterr()
    assert main(["compare", pair[0], copy]) == 0
    assert capsys.readouterr() == ("", "xckpt: 3 tensors: all are the same\n")
    assert main(["compare", pair[0], copy, "--all"]) == 0
    assert capsys.readouterr().out.count("same") == 3


def test_files_on_other_machines_take_options(capsys: pytest.CaptureFixture[str]) -> None:
    content = BytesIO()
    np.savez(content, w=np.ones(3, np.float32))
    fsspec.filesystem("memory").pipe_file("/compared.npz", content.getvalue())
    urls = ["memory://compared.npz"] * 2
    assert main(["compare", *urls, "--storage-option", 'xckpt={"retries": 1}']) == 0
    assert capsys.readouterr().err == "xckpt: 1 tensor: all are the same\n"


def test_order_number_and_names_of_rows(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *pair, "--tensors", "[vw]", "--sort", "cosine", "--limit", "1"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err == "xckpt: 2 tensors: 2 changed\n"
    assert main(["compare", *pair, "--tensors", "[vw]", "--columns", "sqnr_db,nmse"]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["tensor", "status", "sqnr_db", "nmse"]
    assert rows[2] == ["w", "changed", "6.021", "0.25"]
    assert main(["compare", *pair, "--rename", "^u$", "w", "--tensors", "u"]) == 1
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["u", "changed"]


def test_a_row_for_each_channel_or_block(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *pair, "--tensors", "w", "--dim", "-1", "--columns", "nmse"]) == 1
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()[1:]]
    assert rows == [[f"w[{row}]", "changed", "0.25"] for row in range(4)]
    assert err == "xckpt: 4 channels: 4 changed\n"
    assert main(["compare", *pair, "--tensors", "w", "--dim", "a:3", "--dim", "b"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_narrow_terminal_shows_what_matters_most(
    tmp_path: Path, checkpoint: Path, terminal: Any
) -> None:
    other = tmp_path / "other.safetensors"
    ds = xckpt.open(checkpoint)
    xckpt.save({str(name): ds[name].to_numpy() * 1.5 for name in list(ds)[:4]}, other)
    for options in ([], ["--by", "role"], ["--explain"]):
        out, _ = terminal("compare", str(other), str(checkpoint), *options, columns=80)
        assert "rel_l2" in out.partition("too narrow")[0]
    out, _ = terminal("compare", str(other), str(checkpoint), "--codes", columns=80)
    assert "saturated" in out.partition("too narrow")[0]


def test_explanations_have_several_lines_in_a_narrow_terminal(
    tmp_path: Path, terminal: Any
) -> None:
    rng = np.random.default_rng(0)
    name = "model.layers.10.self_attn.some_projection.weight"
    a, b = ({name: rng.normal(size=(30, 9))} for _ in "ab")
    paths = [str(tmp_path / f"{side}.safetensors") for side in "ab"]
    for path, tensors in zip(paths, (a, b), strict=True):
        xckpt.save(tensors, path)
    out, _ = terminal("compare", *paths, "--explain", columns=80)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    start = next(n for n, line in enumerate(lines) if line.lstrip().startswith("tensor "))
    table = lines[start : next(n for n, line in enumerate(lines) if "too narrow" in line)]
    assert "explanation" in table[0]
    words = " ".join(line[40:] for line in table[2:]).split()
    assert " ".join(words[words.index("270") :]).startswith("270 of 270 elements differ (100 %)")
    assert "for outcome" in out
    assert max(map(len, table)) <= 80


def test_the_json_document_of_compare(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *pair, "--json"]) == 1
    out, err = capsys.readouterr()
    document = json.loads(out, parse_constant=pytest.fail)
    assert (document["a"], document["b"], document["same"]) == (*pair, False)
    rows = {row.pop("name"): row for row in document["tensors"]}
    assert rows["w"]["status"] == "changed"
    assert rows["w"]["rel_l2"] == pytest.approx(0.5)
    assert rows["u"]["rel_l2"] is None
    assert err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sort", "size"], "there is no column 'size', only status, count"),
        (["--columns", "sqnr"], "did you mean 'sqnr_db'?"),
        (["--dim", "c"], "no variable has the dimension 'c'"),
        (["--dim", "a:0"], "a whole number of at least 1"),
        (["--dim", "a", "--write-names", "x"], "--write-names is of whole tensors"),
        (["--tensors", "nothing"], "--tensors matches no tensor in"),
        (["--rename", "(", ""], "is not a regular expression"),
    ],
)
def test_wrong_usage(
    options: list[str], message: str, pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *pair, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_missing_file_is_not_a_difference(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", pair[0], "missing.zt"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_equal_tensors_are_called_equal(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compare", pair[0], pair[0], "--explain"])
    assert "explained" not in (err := capsys.readouterr().err)
    assert "equal" in err
