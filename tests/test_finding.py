"""``ds.ckpt.find()``: by name, stored element type and size."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats.ztensor_files import dense_v1, v1_file
from xckpt.elements import stored_dtype

TENSORS = {
    "emb": dense_v1(bytes(4000), [100, 10], "float32"),
    "layers.0.attn.q_proj.weight": dense_v1(bytes(32), [4, 4], "bfloat16"),
    "layers.0.attn.k_proj.weight": dense_v1(bytes(64), [4, 4], "float32"),
    "layers.1.attn.q_proj.weight": dense_v1(bytes(32), [4, 4], "bfloat16"),
}
Q_PROJ = ["layers.0.attn.q_proj.weight", "layers.1.attn.q_proj.weight"]


@pytest.fixture(params=["dataset", "tree"])
def opened(request: pytest.FixtureRequest) -> Any:
    data = v1_file(TENSORS, attributes={"license": "MIT"})
    opener = xr.open_dataset if request.param == "dataset" else xr.open_datatree
    return opener(data, engine="ztensor")


def names(obj: Any) -> list[str]:
    if isinstance(obj, xr.Dataset):
        return [str(name) for name in obj.data_vars]
    return [v.encoding["tensor"] for node in obj.subtree for v in node.dataset.variables.values()]


@pytest.mark.parametrize(
    "expected",
    ["*.q_proj.*", ["*0.attn.q*", "*1.attn.q*"], re.compile("q_proj"), lambda n: "q_" in n],
)
def test_by_name(opened: Any, expected: Any) -> None:
    selection = opened.ckpt.find(expected)
    assert names(selection) == Q_PROJ
    assert selection.attrs == {"license": "MIT"}
    assert selection.ckpt.format == "ztensor"
    assert type(selection) is type(opened)


@pytest.mark.parametrize("dtype", ["bfloat16", stored_dtype("bfloat16"), {"bfloat16"}])
def test_by_stored_type(opened: Any, dtype: Any) -> None:
    assert names(opened.ckpt.find(dtype=dtype)) == Q_PROJ
    assert names(opened.ckpt.find(dtype=[np.float32])) == ["emb", "layers.0.attn.k_proj.weight"]
    assert names(opened.ckpt.find(dtype=["f4", "bfloat16"])) == list(TENSORS)
    assert names(opened.ckpt.find(dtype="f8")) == []


def test_by_size(opened: Any) -> None:
    assert names(opened.ckpt.find(min_bytes=33)) == ["emb", "layers.0.attn.k_proj.weight"]
    assert names(opened.ckpt.find(min_bytes="1 kB")) == ["emb"]
    assert names(opened.ckpt.find("layers.*", min_bytes=64)) == ["layers.0.attn.k_proj.weight"]


def test_missing_names_cause_a_warning(opened: Any) -> None:
    with pytest.warns(xckpt.CheckpointWarning, match=r"similar names: 'layers\.0\.attn\.q_proj"):
        assert not names(opened.ckpt.find("layers.0.attn.q_prj.weight"))
    with pytest.raises(TypeError, match="glob"):
        opened.ckpt.find(3)
    with pytest.raises(TypeError, match="did you mean 'bfloat16'"):
        opened.ckpt.find(dtype="bfloat17")
    assert names(opened.ckpt.find(dtype=["f32"])) == names(opened.ckpt.find(dtype=np.float32))
    with pytest.raises(ValueError, match="byte unit"):
        opened.ckpt.find(min_bytes="many")


def test_stacked_variables_and_coordinates() -> None:
    ds = xr.open_dataset(v1_file(TENSORS), engine="ztensor", stack=True)
    selection = ds.ckpt.find("*.q_proj.*")
    assert names(selection) == ["layers.attn.q_proj.weight"]
    assert list(selection.coords) == ["layers"]
    assert names(selection.ckpt.unstack()) == Q_PROJ
    assert not ds.ckpt.find("emb").coords


def test_time_is_proportional_to_the_number_of_names() -> None:
    """A loop over ``ds[name]`` would take a hundred times as long for ten times the names."""

    def seconds(count: int) -> float:
        ds = xr.Dataset({f"h.{i}.w": ("x", [1.0]) for i in range(count)})
        start = time.perf_counter()
        assert len(ds.ckpt.find("*.w")) == count
        return time.perf_counter() - start

    few = min(seconds(500) for _ in range(3))
    assert min(seconds(5000) for _ in range(3)) < 40 * few
