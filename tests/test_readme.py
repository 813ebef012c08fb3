"""The notebook session of the README runs as it is written, on a sample checkpoint."""

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
        '"s3://bucket/m.zt", engine="ztensor", storage_options={"anon": True}',
        '"file://" + os.path.abspath("m.zt"), engine="ztensor", storage_options={}',
    )
    names: dict[str, Any] = {}
    exec("import os", names)
    values = {}
    with warnings.catch_warnings():
        # Converting says that sparse tensors become dense.
        warnings.simplefilter("ignore", xckpt.CheckpointWarning)
        for node in ast.parse(session).body:
            source = ast.unparse(node)
            if isinstance(node, ast.Expr):
                values[source] = eval(source, names)
            else:
                exec(source, names)
    return values


def test_the_session_shows_what_it_says(shown: dict[str, Any]) -> None:
    values = list(shown.values())
    assert "{0..2}" in repr(shown["ds.ckpt"])
    assert shown["w[42].values"].shape == (64,)
    assert shown["w.std().compute()"].item() == pytest.approx(0.02, rel=0.1)
    assert set(shown["dt['model/layers/0/self_attn']"].children) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    assert values[4].shape == (64, 64)
    some, named, stored, sparse, remote = values[5:10]
    assert len(some.variables) == 3
    assert {"out", "in"} <= set(named.dims)
    assert stored["lm_head.weight"].dtype == "float16"
    assert "lm_head.delta:coords" in stored.variables
    assert type(sparse["lm_head.delta"].data._meta).__name__ == "COO"
    assert "lm_head.weight" in remote.variables
    assert values[10] > 0
    assert values[10] % 64 == 0


def test_all_tensors_at_once(shown: dict[str, Any]) -> None:
    table = shown["st.ckpt.table()"]
    assert table.loc["model.layers.0.self_attn.q_proj.weight", "std"] == pytest.approx(
        0.02, rel=0.1
    )
    assert "nan" in set(shown["ds.ckpt.findings(st)"]["rule"])
    assert shown["stacked.ckpt.plot.layers('std')"].lines
    assert shown["ds.ckpt.explore()"].selected is None
    compared = shown["xckpt.compare('m.zt', 'm.safetensors').ckpt.table()"]
    assert set(compared["status"]) == {"same"}
