"""Detection, the choice of the version, and the golden files, without arrays."""

from __future__ import annotations

import numpy as np
import pytest

from tests.formats.ztensor_files import (
    dense_v1,
    dense_v2,
    dense_v12,
    read,
    stored,
    v0_file,
    v1_file,
    v2_file,
    v12_file,
)
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import FormatError

ztensor = formats.get("ztensor")


def one_of_each() -> dict[str, bytes]:
    data = np.arange(6, dtype="<f4").tobytes()
    entry = {"name": "w", "dtype": "float32", "shape": [2, 3], "layout": "dense"}
    return {
        "0.1": v0_file({**entry, "data": stored(data, encoding="raw")}),
        "1.0": v1_file({"w": dense_v1(data, [2, 3], "float32")}),
        "1.2.0": v12_file({"w": dense_v12(data, [2, 3], "f32")}),
        "2": v2_file({"w": dense_v2(data, [2, 3], "f32")}),
    }


@pytest.mark.parametrize("version", one_of_each())
def test_versions_are_distinguished(version: str) -> None:
    data = one_of_each()[version]
    index = read(data)
    assert (index.format, index.version, index.nbytes) == ("ztensor", version, len(data))
    (tensor,) = index.tensors.values()
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.layout) == (
        "w",
        "float32",
        (2, 3),
        "dense",
    )
    part = tensor.parts["data"]
    assert np.frombuffer(data, "<f4", 6, part.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert tensor.strict == (version == "2")


@pytest.mark.parametrize("version", one_of_each())
def test_only_head_footer_and_manifest_are_read(version: str) -> None:
    data = np.zeros(1 << 18).tobytes()
    entry = {"name": "w", "dtype": "float64", "shape": [1 << 18], "layout": "dense"}
    source = CountingSource(
        {
            "0.1": lambda: v0_file({**entry, "data": stored(data, encoding="raw")}),
            "1.0": lambda: v1_file({"w": dense_v1(data, [1 << 18], "float64")}),
            "1.2.0": lambda: v12_file({"w": dense_v12(data, [1 << 18], "f64")}),
            "2": lambda: v2_file({"w": dense_v2(data, [1 << 18], "f64")}),
        }[version]()
    )
    ztensor.read(source)
    assert source.nbytes_read < 300
    assert len(source.reads) == 3


def test_other_files_are_not_detected() -> None:
    assert not ztensor.detect(b"", 0, "m.zt")
    assert not ztensor.detect(b"ZTEN100", 7, "m.zt")
    assert not ztensor.detect(b"zten1000" + bytes(56), 64, "m.zt")
    assert not ztensor.detect(b"\x89PNG\r\n\x1a\n", 8, "m.zt")


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "FileTooSmall"),
        (b"ZTEN1000", "FileTooSmall"),
        (b"\x89ZT2\r\n\x1a\n" + bytes(39), "FileTooSmall"),
        (bytes(64), "HeaderMagic"),
        (b"ZTEN9999" + bytes(64), "HeaderMagic"),
    ],
)
def test_other_content_is_refused(data: bytes, rule: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(data)
    assert caught.value.rule == rule
    assert caught.value.offset == 0
