"""What every format module keeps to, and that an engine goes with each."""

from __future__ import annotations

import subprocess
import sys
from inspect import Parameter, signature
from typing import TYPE_CHECKING

import pytest
import xarray as xr

from tests.sources import CountingSource
from xckpt import formats
from xckpt.backend import CheckpointBackend
from xckpt.dtypes import ELEMENT_TYPES
from xckpt.errors import CheckpointError, FormatError
from xckpt.index import Index
from xckpt.plan import Plan
from xckpt.storage.digests import is_known

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMATS = formats.names()
IMPURE = {"dask", "fsspec", "ml_dtypes", "numpy", "pandas", "xarray"}


def engines() -> Iterable[CheckpointBackend]:
    entrypoints = xr.backends.list_engines().values()
    return [engine for engine in entrypoints if isinstance(engine, CheckpointBackend)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_module_has_what_the_registry_needs(name: str) -> None:
    module = formats.get(name)
    assert name == module.NAME
    assert all(suffix.startswith(".") and suffix.islower() for suffix in module.SUFFIXES)
    assert list(signature(module.detect).parameters) == ["head", "size", "name"]


def test_every_format_has_an_engine_of_its_name() -> None:
    assert sorted(engine.format for engine in engines()) == sorted(FORMATS)
    for engine in engines():
        assert xr.backends.list_engines()[engine.format] is engine


@pytest.mark.parametrize("engine", engines(), ids=lambda engine: engine.format)
def test_an_engine_has_the_options_of_its_format(engine: CheckpointBackend) -> None:
    source, *options = signature(formats.get(engine.format).read).parameters.values()
    assert source.name == "source"
    named = {option.name for option in options if option.kind is not Parameter.VAR_KEYWORD}
    assert named == set(engine.format_options)


WRITTEN = [name for name in FORMATS if hasattr(formats.get(name), "plan")]
LAYOUTS = {"dense", "sparse_csr", "sparse_coo", "quantized", "structural"}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_format_says_of_its_files_is_known_elsewhere(name: str) -> None:
    writer = formats.get_writer(name)
    assert writer.format == name
    assert len(set(writer.writes)) == len(writer.writes) > 0
    assert set(writer.writes) <= set(ELEMENT_TYPES)
    assert {"dense"} <= set(writer.layouts) <= LAYOUTS
    assert set(writer.encodings) <= {"zstd", "zstd-seekable"}
    assert all(map(is_known, writer.digests))
    assert set(writer.orders) <= {"C", "F"}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_options_of_a_plan_are_keywords_with_defaults(name: str) -> None:
    writer = formats.get_writer(name)
    index, *options = signature(writer.plan).parameters.values()
    assert index.name == "index"
    assert {option.name for option in options} == set(writer.options)
    assert {option.kind for option in options} <= {Parameter.KEYWORD_ONLY}
    assert all(option.default is not Parameter.empty for option in options)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_plan_of_nothing_is_a_plan(name: str) -> None:
    assert isinstance(formats.get_writer(name).plan(Index(name, "", {})), Plan)


def test_a_format_that_is_only_read_has_no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("xckpt.formats.burnpack.plan")
    with pytest.raises(ValueError, match=r"'burnpack' is only read; written are: .*ztensor"):
        formats.get_writer("burnpack")
    with pytest.raises(ValueError, match="unknown format 'onnx'"):
        formats.get_writer("onnx")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("data", [b"", b"\0", bytes(600), b"{}", b"\x89HDF" + bytes(600)])
def test_no_format_claims_what_is_none(name: str, data: bytes) -> None:
    assert not formats.get(name).detect(data[: formats.HEAD_BYTES], len(data), "m.bin")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("data", [b"", b"\0", bytes(600), b"[]", b"\xff" * 600])
def test_a_reader_refuses_what_is_no_checkpoint(name: str, data: bytes) -> None:
    with pytest.raises(CheckpointError):
        formats.get(name).read(CountingSource(data))


def test_what_no_format_knows_is_an_error_that_lists_them() -> None:
    with pytest.raises(FormatError, match=", ".join(FORMATS)):
        formats.detect(CountingSource(b"no checkpoint"))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_module_needs_no_arrays(name: str) -> None:
    code = f"import sys; from xckpt import formats; formats.get({name!r}); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)  # noqa: S603
    assert not IMPURE & set(run.stdout.split())
