from __future__ import annotations

import pytest

from xckpt.errors import FormatError
from xckpt.storage.source import components


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "..",
        "a/../../b",
        "./a",
        "a//b",
        "a/",
        "a\\..\\b",
        "C:a",
        "a\0b",
        "a?b",
        "a\nb",
        "a\ud800",
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="not the name of a file"):
        components(name)


@pytest.mark.parametrize(
    "name", ["m-0.zt", "..zt", "blobs/xxh3/00", "model 1.zt", "größe", "\udcff"]
)
def test_plain_names(name: str) -> None:
    assert "/".join(components(name)) == name
