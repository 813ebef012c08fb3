"""The limits in the documentation equal those of the code."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.hostile_names import HOSTILE
from xckpt.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
ROWS = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text("utf-8"), re.MULTILINE))
LIMITS = {
    "axes of a tensor": "formats.kit.MOST_AXES",
    "levels of an attribute": "index.DEEPEST_ATTRS",
    "safetensors: ": "formats.safetensors._LARGEST_HEADER formats.safetensors._DEEPEST",
    "zTensor: ": "formats.ztensor.manifest.LARGEST formats.ztensor.manifest._DEEPEST_2"
    " formats.ztensor.v2._LONGEST_NAME",
    "Burnpack: ": "formats.burnpack.cbor._LONGEST_KEY",
    "Flax: ": "formats.flax._DEEPEST formats.flax._MOST_NAMES formats.flax._MOST_ATTRS",
    "GGUF: ": "formats.gguf.metadata.DEEPEST formats.gguf._MOST_NESTED",
    "gpt.rs: ": "formats.gptrs._LARGEST_CONFIG formats.gptrs._DEEPEST",
    "MLCP: ": "formats.mlcp._LARGEST_JSON formats.mlcp.metadata._DEEPEST"
    " formats.mlcp.records._MOST_SHARDS",
    "ONNX: graphs": "formats.onnx._DEEPEST formats.onnx._MOST_NAMES"
    " formats.onnx.tensors._LONGEST_TEXT",
    "ONNX: bytes": "formats.onnx.tensors._MOST_INLINE formats.onnx.tensors._MOST_INLINE_TOTAL",
    "primitiv: ": "formats.primitiv.models.MOST_DIMS formats.primitiv.models._LONGEST_TEXT"
    " formats.primitiv.models._LONGEST_NAMES",
    "NumPy: ": "formats.npz._LONGEST_TEXT",
    "PyTorch: bytes of the pickle": "formats.pickles.scanning.LARGEST"
    " formats.torch.objects._DEEPEST formats.torch.objects._LONGEST_NAME",
    "PyTorch: values": "formats.torch.objects._VISITS formats.torch.objects._VISITS_PER_BYTE",
    "PyTorch: bytes of an integer": "formats.pickles.machine._LONGEST_INT"
    " formats.pickles.machine._LONGEST_LINE",
    "PyTorch: bytes of an array": "formats.pickles.records._LARGEST_ARRAY"
    " formats.torch.tensors._MOST_INLINE",
    "code in archives": "formats.pickles.scanning._DEEPEST formats.pickles.scanning._LARGEST_INNER"
    " formats.pickles.scanning._MOST_PICKLES",
    "code in a chat": "formats.gguf.metadata._LONGEST",
    "deflated members": "formats.archive._MOST_INFLATED",
    "a frame of a seekable": "storage.seekable._LARGEST_FRAME",
    "`*.index.json`": "opening.reading._LARGEST_INDEX opening.reading._LARGEST_CONFIG",
    "characters of a pattern": "quantization.model._MAX_PATTERN quantization.model._MAX_GROUP",
    "the Hub's interface": "storage.hub._LARGEST_ANSWER storage.hub._MOST_PAGES"
    " storage.hub._MOST_FILES",
    "headers kept": "storage.cache._LARGEST_ENTRY storage.cache._MOST_NBYTES",
}


@pytest.mark.parametrize("row", LIMITS)
def test_documented_limits_match_the_code(row: str) -> None:
    results = [stated for module, stated in ROWS.items() if module.startswith(row)]
    assert len(results) == 1
    numbers = [int(text.replace(",", "")) for text in re.findall(r"\d[\d,]*", results[0])]
    code = [place.rpartition(".") for place in LIMITS[row].split()]
    assert numbers == [getattr(import_module(f"xckpt.{module}"), name) for module, _, name in code]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Write two checkpoints of tensors with hostile names, and open them."""
    folder = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((6, 8)).astype(np.float32) for name in HOSTILE}
    paths = []
    for number in range(2):
        paths.append(str(folder / f"{number}.zt"))
        dims: dict[str, Any] = {
            n: ([f"{k}", f"{k}x"], a + number) for k, (n, a) in enumerate(arrays.items())
        }
        dims["ones \x1b[2J"] = (["y"], np.ones(9))
        xckpt.save(xr.Dataset(dims, attrs=dict.fromkeys(HOSTILE, HOSTILE[1])), paths[-1])
    ds = xr.open_dataset(paths[0], engine="ztensor")
    return {"paths": paths, "ds": ds, "stats": xckpt.stats(paths[0], cache=False)}


SHOWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "ds.ckpt": lambda objects: repr(objects["ds"].ckpt),
    "ds.ckpt as HTML": lambda objects: objects["ds"].ckpt._repr_html_(),
    "ds.ckpt.tree": lambda objects: repr(xr.open_datatree(objects["paths"][0]).ckpt),
    "statistics": lambda objects: repr(objects["stats"].ckpt),
    "differences": lambda objects: repr(xckpt.compare(*objects["paths"], cache=False).ckpt),
    "findings": lambda objects: "".join(xckpt.findings(objects["paths"][0])["explanation"]),
    "an index": lambda objects: repr(xckpt.read_index(objects["paths"][0])),
    "a report": lambda objects: repr(
        xckpt.verify(objects["paths"][0], manifest=xckpt.manifest(objects["paths"][1]))
    ),
    "a manifest": lambda objects: repr(xckpt.manifest(objects["paths"][0])),
    "xckpt info": lambda objects: printed("info", objects["paths"][0]),
    "xckpt stats": lambda objects: printed("stats", objects["paths"][0]),
    "xckpt compare": lambda objects: printed("compare", *objects["paths"]),
}


def printed(*arguments: str) -> str:
    """Return what a command prints."""
    with redirect_stdout(StringIO()) as out:
        main(list(arguments))
    return out.getvalue()


@pytest.mark.parametrize("view", SHOWN)
def test_names_are_escaped_wherever_they_are_shown(hostile: dict[str, Any], view: str) -> None:
    text = SHOWN[view](hostile)
    assert not set(text) & {"\x1b", "\u202e", "\x07", "\r"}


def test_errors_and_warnings_escape_names(hostile: dict[str, Any]) -> None:
    for name in HOSTILE:
        with pytest.raises(KeyError) as error:
            hostile["ds"].ckpt[name + name]
        assert not set(str(error.value)) & {"\x1b", "\u202e", "\x07", "\r"}


def test_tables_have_the_exact_names(hostile: dict[str, Any]) -> None:
    # Exact names allow selection; output of pandas and xarray is theirs to escape.
    assert list(hostile["stats"].ckpt.table().index) == [*HOSTILE, "ones \x1b[2J"]
    assert list(hostile["ds"].data_vars) == [*HOSTILE, "ones \x1b[2J"]


def test_documented_server_limits_match_the_code() -> None:
    from xckpt.storage.requests import Limits

    timeout, read_timeout, retries = Limits()
    (stated,) = [text for module, text in ROWS.items() if module.startswith("a server: ")]
    assert stated == f"{timeout:g}; {read_timeout:g}; {retries}"
