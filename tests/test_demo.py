from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from xckpt import sample

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("demo"))


def run(folder: Path, **arguments: Any) -> str:
    """Run the demonstration in a folder and return what it prints."""
    import contextlib
    import io

    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        sample.main(layers=4, width=64, **arguments)
    return printed.getvalue()


def test_every_family_of_tensors_has_a_line(output: str) -> None:
    lines = [line.split() for line in output.splitlines()]
    families = {line[0]: line[1] for line in lines if line and line[0].startswith("model.layers.*")}
    assert len(families) == 10  # a quantised weight and its scales are one tensor
    assert set(families.values()) == {"x4"}
    for name in ("model.embed_tokens.weight", "model.embed_tokens.delta", "lm_head.delta"):
        assert any(line and line[0] == name for line in lines)


def test_spread_is_shown_for_the_first_and_the_last_layer(output: str) -> None:
    match = re.search(r"\*\.self_attn\.q_proj\.weight +x4 .* (\S+) \.\. (\S+) ", output)
    assert match is not None
    first, last = map(float, match.groups())
    assert first == pytest.approx(0.02, rel=0.05)
    assert last == pytest.approx(0.02 * 1.75, rel=0.05)


def test_findings_list_the_faults_of_the_sample(output: str) -> None:
    lines = [line.strip() for line in output.splitlines()]
    assert "model.layers.2.mlp.up_proj.weight has 7 NaN" in lines
    assert "model.layers.1.self_attn.q_proj.bias is zero everywhere" in lines
    assert sum(line.endswith(("NaN", "everywhere")) for line in lines) == 3  # with the table's head


def test_the_summary_is_shown(output: str) -> None:
    assert "sample-decoder" in output or "decoder-4x64.zt" in output
    assert "{0..3}" in output


def test_lines_fit_a_terminal_of_100_columns(output: str) -> None:
    table = output[output.index("absmax") : output.index("Next")]
    assert max(map(len, table.splitlines())) <= 100


def test_a_second_run_keeps_the_sample(tmp_path: Path) -> None:
    run(tmp_path)
    before = (tmp_path / "demo" / "decoder-4x64.zt").stat()
    again = run(tmp_path)
    after = (tmp_path / "demo" / "decoder-4x64.zt").stat()
    assert "is there from an earlier run" in again
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert os.listdir(tmp_path / "demo") == ["decoder-4x64.zt"]  # noqa: PTH208  names, not paths


@pytest.mark.parametrize("argument", ["--help", "elsewhere"])
def test_arguments_show_the_usage_and_write_nothing(argument: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xckpt.sample", argument]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603
    assert "usage: python -m xckpt.sample" in process.stdout + process.stderr
    assert process.returncode == (0 if argument == "--help" else 2)
    assert not any(tmp_path.iterdir())
