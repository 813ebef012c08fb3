"""The interface of every format module and its engine."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xarray as xr

from tests.sources import CountingSource
from xckpt import backend, formats
from xckpt.backend import CheckpointBackend
from xckpt.datasets.options import OpenOptions
from xckpt.elements import ELEMENT_TYPES
from xckpt.errors import FormatError
from xckpt.formats.plan import Draft, Plan
from xckpt.storage.digests import is_known
from xckpt.storage.encodings import STREAMS

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMATS = formats.names()
IMPURE = {"dask", "fsspec", "ml_dtypes", "numpy", "pandas", "xarray"}


def engines() -> Iterable[CheckpointBackend]:
    entrypoints = xr.backends.list_engines().values()
    return [engine for engine in entrypoints if isinstance(engine, CheckpointBackend)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_declares_its_files(name: str) -> None:
    file_format = formats.get(name)
    assert (file_format.name, type(file_format).__name__.lower()) == (name, name)
    assert file_format is formats.get(name)
    assert all(s.startswith((".", "/")) and s.islower() for s in file_format.suffixes)
    assert {*file_format.shared_suffixes} <= {*file_format.suffixes}
    assert set(file_format.types.values()) <= set(ELEMENT_TYPES)
    assert all(
        file_format.types[spelled] == dtype for dtype, spelled in file_format.spellings.items()
    )
    assert list(signature(file_format.detect).parameters) == ["head", "size", "name"]


def test_every_format_has_an_engine_of_its_name() -> None:
    assert sorted(engine.format for engine in engines()) == sorted(FORMATS)
    for engine in engines():
        assert xr.backends.list_engines()[engine.format] is engine


@pytest.mark.parametrize("engine", engines(), ids=lambda engine: engine.format)
def test_an_engine_describes_its_format(engine: CheckpointBackend) -> None:
    file_format = formats.get(engine.format)
    assert f"{type(file_format).__name__}Backend" == type(engine).__name__
    assert engine.description.startswith("Open ")
    assert all(suffix in engine.description for suffix in file_format.suffixes)
    assert {*file_format.open_options, *OpenOptions.keywords()} < {*engine.open_dataset_parameters}
    described = str(type(engine).__doc__)
    assert described.startswith(str(type(file_format).__doc__))
    assert all(f"\n{option} : " in described for option in file_format.open_options)
    assert "\nsource : " not in described


def test_an_engine_is_one_class_in_every_process() -> None:
    for engine in engines():
        assert pickle.loads(pickle.dumps(type(engine))) is type(engine)
        assert type(engine).__name__ in dir(backend)
        assert getattr(backend, type(engine).__name__) is type(engine)


def test_the_engines_load_no_format() -> None:
    code = "import sys, xarray; xarray.backends.list_engines(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)  # noqa: S603
    loaded = {name for name in run.stdout.split() if name.startswith("xckpt")}
    assert "xckpt.backend" in loaded
    assert not {name for name in loaded if name.startswith("xckpt.formats.")}


def test_detection_loads_the_format_of_the_suffix_only(
    tmp_path: Path,
) -> None:
    code = """if True:
        import sys
        from xckpt import formats
        from xckpt.opening.detection import is_format
        content = (2).to_bytes(8, "little") + b"{}"
        for path in ("m.SafeTensors", "m.gguf"):
            with open(path, "wb") as file:
                file.write(content)
            print(*[name for name in formats.names() if is_format(path, name)])
            if path != "m.gguf":
                print(*[each for each in formats.names() if f"xckpt.formats.{each}" in sys.modules])
        """
    run = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert run.stdout.split() == ["safetensors"] * 3


@pytest.mark.parametrize("name", FORMATS)
def test_options_are_keywords_with_defaults_and_descriptions(name: str) -> None:
    file_format = formats.get(name)
    methods: dict[str, Any] = {"source": file_format.read}
    if file_format.can.types:
        methods["draft"] = file_format.plan
    for first, method in methods.items():
        required, *options = signature(method).parameters.values()
        assert required.name == first
        assert all(option.default is not Parameter.empty for option in options)
        assert {option.kind for option in options} <= {Parameter.KEYWORD_ONLY}
        assert all(f"{option.name} : " in str(method.__doc__) for option in options)


WRITTEN = [name for name in FORMATS if formats.get(name).can.types]
LAYOUTS = {"dense", "sparse_csr", "sparse_coo", "quantized", "blocks", "structural"}


@pytest.mark.parametrize("name", WRITTEN)
def test_declarations_of_a_format_reach_the_registry(name: str) -> None:
    can = formats.writable(name).can
    assert len(set(can.types)) == len(can.types) > 0
    assert set(can.types) <= set(ELEMENT_TYPES)
    assert {"dense"} <= set(can.layouts) <= LAYOUTS
    assert set(can.compressions) <= {*STREAMS, "zstd-seekable"}
    assert all(map(is_known, can.digests))
    assert set(can.orders) <= {"C", "F"}


def test_a_rule_has_one_spelling_in_all_errors() -> None:
    files = Path(formats.__file__).parents[1].rglob("*.py")
    rules = {rule for file in files for rule in re.findall('rule="([^"]+)"', file.read_text())}
    assert len({rule.casefold() for rule in rules}) == len(rules)


@pytest.mark.parametrize("name", WRITTEN)
def test_an_empty_draft_can_be_planned(name: str) -> None:
    assert isinstance(formats.writable(name).plan(Draft({})), Plan)


def test_a_format_that_is_only_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(formats.get("burnpack")), "can", formats.Can())
    with pytest.raises(
        ValueError, match=r"'burnpack' is read-only; writable formats are: .*ztensor"
    ):
        formats.writable("burnpack")
    with pytest.raises(ValueError, match="unknown format 'hdf4'"):
        formats.writable("hdf4")


def test_unknown_content_is_an_error_that_lists_the_formats() -> None:
    with pytest.raises(FormatError, match=", ".join(FORMATS)):
        formats.detect(CountingSource(b"\1\2no checkpoint\xff"))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_needs_no_arrays(name: str) -> None:
    code = f"import sys; from xckpt import formats; formats.get({name!r}); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)  # noqa: S603
    assert not IMPURE & set(run.stdout.split())
