"""The notebook session of the README runs as printed, on a sample checkpoint."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import xckpt
from xckpt.sample import write_checkpoint

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the session and return the value of each line that shows one, by its source."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    write_checkpoint("m.zt", layers=3, width=64)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    session = "".join(blocks).replace(
        '"s3://bucket/m.zt", storage_options={"anon": True}',
        '"file://" + os.path.abspath("m.zt"), storage_options={}',
    )
    names: dict[str, Any] = {}
    exec("import os", names)
    values = {}
    with warnings.catch_warnings():
        # Converting warns that sparse tensors become dense.
        warnings.simplefilter("ignore", xckpt.CheckpointWarning)
        for node in ast.parse(session).body:
            source = ast.unparse(node)
            if isinstance(node, ast.Expr):
                values[source] = eval(source, names)
            else:
                exec(source, names)
    return values


def test_the_session_prints_what_the_readme_shows(shown: dict[str, Any]) -> None:
    assert "{0..2}" in repr(shown["ds.ckpt"])
    assert shown["w[42].values"].shape == (64,)
    assert shown["w.std().compute()"].item() == pytest.approx(0.02, rel=0.1)
    selected, with_axes, stored, sparse, remote = (
        value for source, value in shown.items() if source.startswith("xckpt.open(")
    )
    assert len(selected.variables) == 3
    assert {"out", "in"} <= set(with_axes.dims)
    assert stored["lm_head.weight"].dtype == "float16"
    assert "lm_head.delta:coords" in stored.variables
    assert type(sparse["lm_head.delta"].data._meta).__name__ == "COO"
    assert "lm_head.weight" in remote.variables
    offset = shown["index.tensors['lm_head.weight'].parts['data'].offset"]
    assert offset > 0
    assert offset % 64 == 0
    modules = set(shown["dt['model/layers/0/self_attn']"].children)
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_all_tensors_at_once(shown: dict[str, Any]) -> None:
    table = shown["st.ckpt.table()"]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert table.loc[name, "std"] == pytest.approx(0.02, rel=0.1)
    assert "nan" in set(shown["ds.ckpt.findings()"]["rule"])
    assert shown["ds.ckpt.plot.layers('std')"].get_figure() is not None
    assert shown["ds.ckpt.explore()"].selected is None
    compared = shown["xckpt.compare('m.zt', 'new.safetensors').ckpt.table()"]
    assert set(compared["status"]) == {"same"}
