"""``xckpt stats``: columns, order, findings, and the JSON document."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt.statistics
from xckpt.cli import main
from xckpt.writing import save

if TYPE_CHECKING:
    from pathlib import Path


def table(out: str) -> list[dict[str, str]]:
    """Read a table that was printed as text."""
    head, *rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture
def statistics(checkpoint: Path) -> Any:
    return xckpt.table(xckpt.stats(checkpoint, progress=False))


def test_the_table_has_every_tensor_in_the_order_of_the_file(
    checkpoint: Path, statistics: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", str(checkpoint)]) == 0
    out, err = capsys.readouterr()
    rows = table(out)
    assert [row["tensor"] for row in rows] == statistics.index.tolist()
    assert [float(row["std"]) for row in rows] == pytest.approx(statistics["std"], rel=1e-3)
    assert [int(row["nan"]) for row in rows] == statistics["nan"].tolist()
    head = next(row for row in rows if row["tensor"] == "lm_head.weight")
    assert (head["dtype"], head["shape"]) == ("float16", "256×16")
    assert err == ""


def test_sorting_by_any_column(
    checkpoint: Path, statistics: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ["--columns", "kurtosis, nbytes"]
    assert main(["stats", str(checkpoint), *columns, "--sort", "kurtosis", "--limit", "3"]) == 0
    rows = table(capsys.readouterr().out)
    assert [row["tensor"] for row in rows] == statistics.nlargest(3, "kurtosis").index.tolist()
    assert set(rows[0]) == {"tensor", "kurtosis", "nbytes"}
    assert main(["stats", str(checkpoint), "--sort", "shape", "--ascending"]) == 0
    sizes = [np.prod([int(n) for n in row["shape"].split("×")]) for row in table_of(capsys)]
    assert sizes == sorted(sizes)
    assert main(["stats", str(checkpoint), "--sort", "name", "--limit", "1"]) == 0
    assert table_of(capsys)[0]["tensor"] == min(statistics.index)


def table_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return table(capsys.readouterr().out)


@pytest.mark.parametrize("option", ["--sort", "--columns"])
def test_an_unknown_column(
    option: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", str(checkpoint), option, "sdt"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "there is no column 'sdt', only dtype, shape, nbytes, count" in err


def test_requested_quantiles(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantiles = ["--quantile", "0.1", "--quantile", "1", "--exact-quantiles"]
    tensors = ["--tensors", "model.norm.weight"]
    assert main(["stats", str(checkpoint), *quantiles, *tensors, "--columns", "all"]) == 0
    row = table_of(capsys)[0]
    assert [name for name in row if name.startswith("q")] == ["q0.1", "q1"]
    assert row["q1"] == row["max"]


def test_findings_have_a_status(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(checkpoint), "--findings"]) == 1
    first, *findings = capsys.readouterr().out.splitlines()
    name = "model.layers.2.mlp.up_proj.weight"
    assert first == f"  error: tensor '{name}': 7 of 704 elements are NaN [nan]"
    assert {line.split(":")[0].strip() for line in findings} == {"warning"}


def test_findings_are_ignored(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ignore = ["--ignore", "nan", "--ignore", "*:*.delta", "--ignore=all_zero:*.bias"]
    assert main(["stats", str(checkpoint), "--findings", *ignore]) == 0
    assert capsys.readouterr() == ("", "xckpt: no findings\n")
    assert main(["stats", str(checkpoint), "--findings", "--json", *ignore]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert main(["stats", str(checkpoint), "--findings", "--ignore", "nam"]) == 2
    assert "--ignore='nam': unknown rule; similar names: 'nan'" in capsys.readouterr().err


def test_harmless_findings_have_status_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.zt"
    save(xr.Dataset({"w": ("x", np.arange(100, dtype=np.float32))}), path)
    assert main(["stats", str(path), "--findings"]) == 0
    sentence = "every value of this float32 is a bfloat16: 200 B would do"
    assert capsys.readouterr().out == f"  info: tensor 'w': {sentence} [wide_type]\n"
    save(xr.Dataset({"w": ("x", np.arange(5.0))}), path, overwrite=True)
    assert main(["stats", str(path), "--findings"]) == 0
    assert capsys.readouterr() == ("", "xckpt: no findings\n")


def test_the_document_has_statistics_and_findings(
    checkpoint: Path, statistics: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", str(checkpoint), "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert list(document) == ["source", "format", "tensors", "findings"]
    assert document["format"] == "ztensor"
    assert len(document["tensors"]) == len(statistics)
    for row in document["tensors"]:
        expected = statistics.loc[row["name"]]
        assert list(row) == ["name", "dtype", "shape", "nbytes", *statistics.columns]
        for name, value in expected.items():
            assert row[name] == (None if np.isnan(value) else value)
    findings = xckpt.findings(xckpt.stats(checkpoint, progress=False))
    assert document["findings"] == findings.to_dict("records")


def plain(out: str) -> str:
    """Remove colours and other control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)


def test_a_terminal_gets_a_table_that_fits(checkpoint: Path, terminal: Any) -> None:
    out, status = terminal("stats", str(checkpoint), columns=80)
    assert status == 0
    table = plain(out)[plain(out).index("tensor ") :]
    assert max(map(len, table.splitlines())) <= 80
    assert "…" in table
    assert "too narrow for" in table
    assert "──" in table
    assert "\x1b[1m" in out


def test_a_terminal_has_twenty_rows_with_distinct_names(tmp_path: Path, terminal: Any) -> None:
    part = "mlp.experts.gate_up_projection.weight"
    values = {f"model.language_model.layers.{n}.{part}": np.ones((8, 8)) for n in range(30)}
    path = tmp_path / "m.safetensors"
    xckpt.save(values, path)
    for command in ("stats", "spectrum"):
        out, _ = terminal(command, str(path), "--sort", "name", columns=80)
        rows = [line.split()[0] for line in plain(out).splitlines() if "…" in line]
        assert len(set(rows)) == len(rows) == 20
        assert "the first 20 of 30 tensors; --limit 30 prints all" in plain(out)
        assert plain(terminal(command, str(path), "--limit", "30")[0]).count("\n") > 30


def test_a_narrow_terminal_shows_the_column_of_the_order(checkpoint: Path, terminal: Any) -> None:
    out, _ = terminal("stats", str(checkpoint), "--sort", "kurtosis", columns=80)
    table, _, hidden = plain(out).partition("too narrow for")
    assert "kurtosis" in table
    assert "nan" in table
    assert "kurtosis" not in hidden
    out, _ = terminal("spectrum", str(checkpoint), "--sort", "alpha", columns=80)
    assert "alpha" in plain(out).partition("too narrow for")[0]
    out, _ = terminal("spectrum", str(checkpoint), "--sort", "nbytes", columns=80)
    assert "nbytes" in plain(out).partition("too narrow for")[0]


def test_a_terminal_shows_progress(checkpoint: Path, terminal: Any) -> None:
    out, _ = terminal("stats", str(checkpoint), "--no-cache")
    assert "statistics" in out
    assert "iB" in out


def test_the_column_of_the_order_is_printed(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", str(checkpoint), "--sort", "kurtosis", "--columns", "std"]) == 0
    head = capsys.readouterr().out.splitlines()[0].split()
    assert head == ["tensor", "std", "kurtosis"]
    assert main(["stats", str(checkpoint), "--sort", "kurtosi"]) == 2
    assert "did you mean 'kurtosis'" in capsys.readouterr().err


def test_piped_output_is_as_wide_as_the_user_states(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    main(["stats", str(checkpoint)])
    assert max(map(len, capsys.readouterr().out.splitlines())) > 80
    monkeypatch.setenv("COLUMNS", "80")
    main(["stats", str(checkpoint)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("too narrow for")
