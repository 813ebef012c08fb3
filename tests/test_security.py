"""The limits that the documentation states are those of the code."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
ROWS = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text("utf-8"), re.MULTILINE))
LIMITS = {
    "axes of a tensor": "formats.kit.MOST_AXES",
    "levels of an attribute": "index.DEEPEST_ATTRS",
    "safetensors: ": "formats.safetensors._LARGEST_HEADER formats.safetensors._DEEPEST",
    "zTensor: ": "formats.ztensor.manifest.LARGEST formats.ztensor.manifest._DEEPEST_2"
    " formats.ztensor.v2._LONGEST_NAME",
    "Burnpack: ": "formats.burnpack.cbor._LONGEST_KEY",
    "GGUF: ": "formats.gguf.metadata.DEEPEST formats.gguf._MOST_NESTED",
    "gpt.rs: ": "formats.gptrs.models.LARGEST_CONFIG formats.gptrs.models._DEEPEST",
    "MLCP: ": "formats.mlcp._LARGEST_JSON formats.mlcp.metadata._DEEPEST"
    " formats.mlcp.records._MOST_SHARDS",
    "primitiv: ": "formats.primitiv.models.MOST_DIMS formats.primitiv.models._LONGEST_TEXT"
    " formats.primitiv.models._LONGEST_NAMES",
    "NumPy: ": "formats.npz._LONGEST_TEXT",
    "PyTorch: bytes of the pickle": "formats.torch.containers._LARGEST_PICKLE"
    " formats.torch.objects._DEEPEST formats.torch.objects._LONGEST_NAME",
    "PyTorch: values": "formats.torch.objects._VISITS formats.torch.objects._VISITS_PER_BYTE",
    "PyTorch: bytes of an integer": "formats.torch.pickles._LONGEST_INT"
    " formats.torch.pickles._LONGEST_LINE",
    "PyTorch: bytes of an array": "formats.torch.records._LARGEST_ARRAY"
    " formats.torch.tensors._MOST_INLINE",
    "deflated members": "formats.archive._MOST_INFLATED",
    "a frame of a seekable": "storage.encodings._LARGEST_FRAME",
    "`*.index.json`": "opening.sharding._LARGEST_INDEX opening.sharding._LARGEST_CONFIG",
    "characters of a pattern": "quantized.config._LONGEST_PATTERN",
    "headers kept": "storage.cache._LARGEST_ENTRY storage.cache._MOST_NBYTES",
}


@pytest.mark.parametrize("row", LIMITS)
def test_limits(row: str) -> None:
    found = [stated for of, stated in ROWS.items() if of.startswith(row)]
    assert len(found) == 1
    numbers = [int(text.replace(",", "")) for text in re.findall(r"\d[\d,]*", found[0])]
    code = [place.rpartition(".") for place in LIMITS[row].split()]
    assert numbers == [getattr(import_module(f"xckpt.{of}"), name) for of, _, name in code]


def test_limits_of_servers() -> None:
    from xckpt.storage.requests import ATTEMPTS, Limits

    timeout, rate = Limits()
    (stated,) = [text for of, text in ROWS.items() if of.startswith("a server: ")]
    assert stated == f"{ATTEMPTS}; {timeout:g}; {rate:,.0f}"
