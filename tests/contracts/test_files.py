"""Good files have the expected values, and malformed ones the expected error, in every format."""

from __future__ import annotations

import xarray as xr

from tests.conftest import GOLDEN
from tests.contracts.every import DECLARED
from xckpt import formats
from xckpt.testing import BadFiles, GoodFiles


class TestGoodFiles(GoodFiles):
    tested = DECLARED


class TestBadFiles(BadFiles):
    tested = DECLARED


NEIGHBOURS = [
    path
    for declared in DECLARED
    for pattern in ("*", "bad/*")
    for path in sorted(GOLDEN.glob(f"{declared.name}/{pattern}"))
    if path.suffix in {".json", ".txt", ".md"}
]


def test_neighbouring_files_are_left_to_other_engines() -> None:
    engines = [xr.backends.list_engines()[name] for name in formats.names()]
    for path in NEIGHBOURS:
        if not path.name.endswith((".metadata.json", ".index.json", ".weights.json")):
            assert not [engine for engine in engines if engine.guess_can_open(path)], path
