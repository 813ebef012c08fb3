"""Good files have the expected values, and malformed ones the expected error, in every format."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.contracts.declared import Declared, Want, assert_same, computed
from tests.contracts.every import DECLARED
from xckpt import formats
from xckpt.backend import DetectingBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def cases(files: str) -> list[Any]:
    """List the good or the bad files of all formats as parameters."""
    results = []
    for declared in DECLARED:
        for file in getattr(declared, files)():
            marks, obj = getattr(file, "marks", ()), getattr(file, "values", (file,))[0]
            label = getattr(file, "id", None) or getattr(obj, "name", files)
            results.append(pytest.param(declared, obj, id=f"{declared.name}-{label}", marks=marks))
    return results


good_files = pytest.mark.parametrize(("declared", "file"), cases("good"))
bad_files = pytest.mark.parametrize(("declared", "file"), cases("bad"))


def opened(file: Any, **options: Any) -> tuple[xr.Dataset, bool]:
    """Open a file, and return whether that warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = xr.open_dataset(file, **options)
    assert all(issubclass(w.category, xckpt.CheckpointWarning) for w in caught)
    return ds, bool(caught)


class TestGoodFiles:
    @pytest.mark.parametrize("mmap", [True, False])
    @good_files
    def test_good_files_have_the_expected_values(
        self, declared: Declared, file: Any, mmap: bool
    ) -> None:
        """Check decoded values, whole and in part, with encoding and attributes."""
        expected = declared.expected(file)
        ds, warned = opened(file, engine=declared.name, mmap=mmap)
        assert warned == expected.warns
        if expected.complete:
            assert list(ds.variables) == list(expected.tensors)
        _check(ds.variables, expected.tensors, str(file) if isinstance(file, Path) else "")

    @good_files
    def test_stored_values(self, declared: Declared, file: Any) -> None:
        ds, _ = opened(file, engine=declared.name, decode=False)
        stored = declared.expected(file).stored
        values = computed({name: ds.variables[name] for name in stored})
        for name, data in stored.items():
            assert values[name].tobytes() == data

    @good_files
    def test_attributes(self, declared: Declared, file: Any) -> None:
        expected = declared.expected(file)
        ds, _ = opened(file, engine=declared.name)
        assert ds.encoding["format"] == declared.name
        if expected.version is not None:
            assert ds.encoding["format_version"] == expected.version
        if expected.attrs is not None:
            assert declared.attributes(ds.attrs, expected.attrs) == expected.attrs

    @good_files
    def test_trees_have_the_same_values(self, declared: Declared, file: Any) -> None:
        expected = declared.expected(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", xckpt.CheckpointWarning)
            tree = xr.open_datatree(file, engine=declared.name)
        variables = {
            variable.encoding["tensor"]: variable
            for node in tree.subtree
            for variable in node.variables.values()
            if "part" not in variable.encoding
        }
        with_values = {
            name: want
            for name, want in expected.tensors.items()
            if want.values is not None and name in variables
        }
        values = computed({name: variables[name] for name in with_values})
        for name, want in with_values.items():
            assert_same(values[name], want.shown, exact=want.exact)

    @good_files
    def test_the_content_tells_the_engine(
        self, declared: Declared, file: Any, tmp_path: Path
    ) -> None:
        engines = [xr.backends.list_engines()[name] for name in formats.names()]
        takers = [engine for engine in engines if engine.guess_can_open(file)]
        assert [type(engine).__name__ for engine in takers] == [
            f"{formats.class_name(declared.name)}Backend"
        ]
        # Without engine=, xarray asks engines of other packages first.
        detecting = DetectingBackend if declared.is_shared else None
        assert opened(file, engine=detecting)[0].encoding["format"] == declared.name
        is_mark = isinstance(file, Path) and file.name in formats.folder_marks()
        if (
            isinstance(file, Path) and file.suffix != ".json" and not is_mark
        ):  # one that needs its neighbours
            bare = tmp_path / "without_suffix"
            bare.symlink_to(file)
            assert opened(bare, engine=detecting)[0].encoding["format"] == declared.name


def _check(variables: Mapping[Any, xr.Variable], expected: Mapping[str, Want], path: str) -> None:
    by_name = {}
    for name, want in expected.items():
        variable = variables[name]
        assert want.encoding.items() <= variable.encoding.items()
        assert {key: variable.attrs.get(key) for key in want.attrs} == want.attrs
        if want.values is not None:
            by_name[name] = variable
        elif not variable.size:  # tensors without elements need no data
            assert variable.values.shape == variable.shape
        else:
            with pytest.raises(xckpt.CheckpointError) as caught:
                variable.values  # noqa: B018
            assert caught.value.tensor == name
            assert path in str(caught.value)
    for name, values in computed(by_name).items():
        assert_same(values, expected[name].shown, exact=expected[name].exact)
    arrays = {name: expected[name].shown for name, variable in by_name.items() if variable.ndim}
    ends: tuple[Any, Any] = ((..., slice(-1, None)), (slice(-1, None),))
    shown = {name: v for name, v in arrays.items() if not isinstance(v, bytes)}
    (parts,) = dask.compute({n: [by_name[n][end].data for end in ends] for n in shown})
    for name, values in shown.items():
        for part, end in zip(parts[name], ends, strict=True):
            assert_same(np.asarray(part), values[end], exact=expected[name].exact)


NEIGHBOURS = [
    path
    for declared in DECLARED
    for pattern in ("*", "bad/*")
    for path in golden_files(f"{declared.name}/{pattern}")
    if path.suffix in {".json", ".txt", ".md"}
]


def test_neighbouring_files_are_left_to_other_engines() -> None:
    engines = [xr.backends.list_engines()[name] for name in formats.names()]
    for path in NEIGHBOURS:
        if not path.name.endswith((".metadata.json", ".index.json", ".weights.json")):
            assert not [engine for engine in engines if engine.guess_can_open(path)], path


class TestBadFiles:
    @bad_files
    def test_bad_files_raise_package_errors_in_time(self, declared: Declared, file: Any) -> None:
        bad = declared.verdict(file)
        label = file.stem if isinstance(file, Path) else ""
        start = time.process_time()
        try:
            ds, warned = opened(bad.file, engine=declared.name, verify=True)
        except xckpt.CheckpointError as error:
            _check_error(error, file, offset=declared.tells_offsets)
            outcome = "open"
        else:
            failed = list(_failures(ds.variables.items(), file))
            outcome = f"read:{','.join(failed)}" if failed else "warn" if warned else "ok"
            if label in declared.tolerated:
                assert warned == declared.tolerated[label]
        if bad.when == "either":
            assert not declared.tolerated or (outcome == "open") == (
                label not in declared.tolerated
            )
        elif bad.when == "read":
            assert outcome.startswith("read:")
        else:
            # Several with a bar between them; a text may follow the name.
            expected = [step.split()[0] for step in bad.when.split("|")]
            assert any(step in outcome if ":" in step else step == outcome for step in expected), (
                outcome
            )
        assert time.process_time() - start < 1


def _failures(variables: Iterable[tuple[Any, xr.Variable]], file: Any) -> Iterable[str]:
    for name, variable in variables:
        str(variable).encode()
        try:
            variable.values  # noqa: B018
        except xckpt.CheckpointError as error:
            _check_error(error, file)
            yield str(name) if error.tensor is None else error.tensor


def _check_error(error: xckpt.CheckpointError, file: Any, *, offset: bool = False) -> None:
    """Check that an error names the file and the broken rule, and the offset if required."""
    assert error.offset is not None or not offset
    if isinstance(file, Path):
        assert str(file) in str(error)
    assert error.rule or isinstance(error, xckpt.PayloadMissingError)
