"""Test suites for the promises that every format keeps, to be subclassed."""

from __future__ import annotations

import contextlib
import pickle
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import dask
import fsspec
import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xckpt
from xckpt import CheckpointError, CheckpointWarning, formats
from xckpt.backend import DetectingBackend
from xckpt.index import Index, Tensor
from xckpt.opening import read_index
from xckpt.structure import structure_of
from xckpt.structure.declared import FACTS
from xckpt.testing.samples import (
    LARGE,
    CountingSource,
    Samples,
    assert_same,
    assert_told,
    computed,
    outcome,
)

# Each test has a separate instance, which hypothesis would report: instances have no state.
stateless = settings(suppress_health_check=[HealthCheck.differing_executors])


class Small(NamedTuple):
    """A complete file of a few hundred bytes."""

    samples: Samples
    label: str
    data: bytes


class Suite:
    """Base of the suites; a subclass lists the formats in `tested`."""

    tested: ClassVar[Sequence[Samples]] = ()
    files: ClassVar[str] = ""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run tests with each file, or with each format, as their arguments require."""
        arguments = metafunc.fixturenames
        if "file" in arguments:
            cases = []
            for samples in self.tested:
                for file in getattr(samples, self.files)():
                    marks, obj = getattr(file, "marks", ()), getattr(file, "values", (file,))[0]
                    label = getattr(file, "id", None) or getattr(obj, "name", self.files)
                    title = f"{samples.name}-{label}"
                    cases.append(pytest.param(samples, obj, id=title, marks=marks))
            metafunc.parametrize(("samples", "file"), cases)
        elif "small" in arguments or "guarded" in arguments:
            name = "small" if "small" in arguments else "guarded"
            files = [
                pytest.param(Small(samples, label, data), id=f"{samples.name}-{label}")
                for samples in self.tested
                if name == "small" or samples.guards_data
                for label, data in samples.small_files().items()
            ]
            metafunc.parametrize(name, files)
        elif "kind" in arguments:
            kinds = [
                pytest.param(samples, kind, id=f"{samples.name}-{kind}")
                for samples in self.tested
                for kind in samples.hostile()
            ]
            metafunc.parametrize(("samples", "kind"), kinds)
        elif "samples" in arguments:
            metafunc.parametrize("samples", self.tested, ids=[s.name for s in self.tested])

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Compute thousands of small arrays without waking a thread for each of them."""
        with dask.config.set(scheduler="sync"):
            yield


def opened(file: Any, **options: Any) -> tuple[xr.Dataset, bool]:
    """Open a file, and return whether that warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = xr.open_dataset(file, **options)
    assert all(issubclass(w.category, xckpt.CheckpointWarning) for w in caught)
    return ds, bool(caught)


class GoodFiles(Suite):
    """Good files have the expected values and attributes, and are recognised by their content."""

    files = "good"

    @pytest.mark.parametrize("mmap", [True, False])
    def test_good_files_have_the_expected_values(
        self, samples: Samples, file: Any, mmap: bool
    ) -> None:
        """Check decoded values, whole and in part, with encoding and attributes."""
        expected = samples.expected(file)
        ds, warned = opened(file, engine=samples.name, mmap=mmap)
        assert warned == expected.warns
        if expected.complete:
            assert list(ds.variables) == list(expected.tensors)
        path = str(file) if isinstance(file, Path) else ""
        by_name = {}
        for name, want in expected.tensors.items():
            variable = ds.variables[name]
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
        shown = {name: expected.tensors[name].shown for name in by_name}
        for name, values in computed(by_name).items():
            assert_same(values, shown[name], exact=expected.tensors[name].exact)
        ends: tuple[Any, Any] = ((..., slice(-1, None)), (slice(-1, None),))
        arrays = {
            name: values
            for name, values in shown.items()
            if by_name[name].ndim and not isinstance(values, bytes)
        }
        (parts,) = dask.compute({n: [by_name[n][end].data for end in ends] for n in arrays})
        for name, values in arrays.items():
            for part, end in zip(parts[name], ends, strict=True):
                exact = expected.tensors[name].exact
                assert_same(np.asarray(part), values[end], exact=exact)

    def test_stored_values(self, samples: Samples, file: Any) -> None:
        ds, _ = opened(file, engine=samples.name, decode=False)
        stored = samples.expected(file).stored
        values = computed({name: ds.variables[name] for name in stored})
        for name, data in stored.items():
            assert values[name].tobytes() == data

    def test_attributes(self, samples: Samples, file: Any) -> None:
        expected = samples.expected(file)
        ds, _ = opened(file, engine=samples.name)
        assert ds.encoding["format"] == samples.name
        if expected.version is not None:
            assert ds.encoding["format_version"] == expected.version
        if expected.attrs is not None:
            assert samples.attributes(ds.attrs, expected.attrs) == expected.attrs

    def test_trees_have_the_same_values(self, samples: Samples, file: Any) -> None:
        expected = samples.expected(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", xckpt.CheckpointWarning)
            tree = xr.open_datatree(file, engine=samples.name)
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

    def test_the_content_tells_the_engine(
        self, samples: Samples, file: Any, tmp_path: Path
    ) -> None:
        engines = [xr.backends.list_engines()[name] for name in formats.names()]
        takers = [engine for engine in engines if engine.guess_can_open(file)]
        assert takers == [xr.backends.list_engines()[samples.name]]
        # Without engine=, xarray asks engines of other packages first.
        detecting = DetectingBackend if samples.is_shared else None
        assert opened(file, engine=detecting)[0].encoding["format"] == samples.name
        # Indexes and marks of folders need their names.
        is_named = isinstance(file, Path) and (
            file.suffix == ".json" or file.name in formats.folder_marks()
        )
        if isinstance(file, Path) and not is_named:
            bare = tmp_path / "without_suffix"
            bare.symlink_to(file)
            assert opened(bare, engine=detecting)[0].encoding["format"] == samples.name


class BadFiles(Suite):
    """Malformed files raise an error of this package, in time."""

    files = "bad"

    def test_bad_files_raise_package_errors_in_time(self, samples: Samples, file: Any) -> None:
        bad = samples.verdict(file)
        label = file.stem if isinstance(file, Path) else ""
        start = time.process_time()
        try:
            ds, warned = opened(bad.file, engine=samples.name, verify=True)
        except xckpt.CheckpointError as error:
            _check_error(error, file, offset=samples.tells_offsets)
            outcome = "open"
        else:
            failed = list(_failures(ds.variables.items(), file))
            outcome = f"read:{','.join(failed)}" if failed else "warn" if warned else "ok"
            if label in samples.tolerated:
                assert warned == samples.tolerated[label]
        if bad.when == "either":
            assert not samples.tolerated or (outcome == "open") == (label not in samples.tolerated)
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
    """Check that an error names the broken rule, the file, and optionally the offset."""
    assert error.offset is not None or not offset
    if isinstance(file, Path):
        assert str(file) in str(error)
    assert error.rule or isinstance(error, xckpt.PayloadMissingError)


class Damage(Suite):
    """Truncated and changed files raise an error of this package, or return values."""

    def test_intact_files_are_read(self, small: Small) -> None:
        samples, _, data = small
        index = outcome(samples, data)
        assert isinstance(index, Index)
        assert formats.detect(CountingSource(data, "m.bin")).name == samples.name
        readable = {name for name, tensor in index.tensors.items() if tensor.problem is None}
        assert len(read(samples, data)) >= len(readable)

    def test_files_cut_short_at_every_byte(self, small: Small) -> None:
        """The beginning of a file is refused, or has the same values as far as it goes."""
        samples, label, data = small
        full = read(samples, data)
        # Some files are mostly padding.
        lengths = {*range(min(len(data), 1500)), *range(0, len(data), max(1, len(data) // 500))}
        for length in sorted({*lengths, *range(max(0, len(data) - 300), len(data))}):
            if (label, length) in samples.also_complete:
                continue
            if isinstance(outcome(samples, data[:length]), Index):
                assert samples.may_be_cut
                for name, values in read(samples, data[:length]).items():
                    assert values.size == 0 or np.array_equal(values, full[name], equal_nan=True)

    def test_every_byte_inverted(self, small: Small) -> None:
        samples, _, data = small
        ends = {*range(min(len(data), 700)), *range(max(0, len(data) - 700), len(data))}
        for at in sorted(ends):
            if data[at] == 0 and not any(data[max(0, at - 40) : at + 40]):
                continue  # padding
            changed = bytearray(data)
            changed[at] ^= 0xFF
            if isinstance(outcome(samples, bytes(changed)), Index) and at % 7 == 0:
                read(samples, bytes(changed))

    @stateless
    @given(data=st.data())
    def test_any_byte_changed_in_any_way(self, small: Small, data: st.DataObject) -> None:
        samples, _, full = small
        changed = bytearray(full)
        at = data.draw(st.integers(0, len(full) - 1))
        changed[at] ^= data.draw(st.integers(1, 255))
        if isinstance(outcome(samples, bytes(changed)), Index):
            read(samples, bytes(changed))

    def test_any_flipped_bit_outside_the_data(self, guarded: Small) -> None:
        """Values are correct, or there is an error."""
        samples, _, data = guarded
        full = outcome(samples, data)
        assert isinstance(full, Index)
        meanings = {name: meaning(tensor, data) for name, tensor in full.tensors.items()}
        parts = [part for tensor in full.tensors.values() for part in tensor.parts.values()]
        stored = [range(p.offset, p.offset + p.nbytes) for p in parts if p.inline is None]
        texts = [range(*match.span()) for match in re.finditer(rb"[\n\x20-\x7e]{64,}", data)]
        for at in set(range(len(data))).difference(*stored):
            # In metadata that are text, one bit of each byte.
            for bit in [at % 8] if any(at in text for text in texts) else range(8):
                changed = bytearray(data)
                changed[at] ^= 1 << bit
                index = outcome(samples, bytes(changed))
                if isinstance(index, Index):
                    for name in index.tensors.keys() & meanings.keys():
                        tensor = index.tensors[name]
                        if tensor.problem is None and tensor.size:
                            assert meaning(tensor, bytes(changed)) == meanings[name]

    @stateless
    @given(data=st.data())
    def test_changed_bytes_raise_errors_or_return_values(
        self, samples: Samples, kind: str, data: st.DataObject
    ) -> None:
        for file in data.draw(samples.hostile()[kind]):
            outcome(samples, file)

    @stateless
    @given(data=st.data())
    def test_a_valid_head_with_other_bytes_after_it(
        self, samples: Samples, data: st.DataObject
    ) -> None:
        _, start = data.draw(st.sampled_from(sorted(samples.small_files().items())))
        begin = start[: data.draw(st.integers(0, min(64, len(start))))]
        outcome(samples, begin + data.draw(st.binary(max_size=200)))

    @pytest.mark.parametrize("data", [b"", b"\0", bytes(600), b"[]", b"\xff" * 600])
    def test_other_content_is_refused(self, samples: Samples, data: bytes) -> None:
        assert isinstance(outcome(samples, data), CheckpointError)
        file_format = formats.get(samples.name)
        for content in (data, b"{}", b"\x89HDF" + bytes(600)):
            assert not file_format.detect(content[: formats.HEAD_BYTES], len(content), "m.bin")


def read(samples: Samples, data: bytes) -> dict[Any, Any]:
    """Compute all variables that can be read."""
    values: dict[Any, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        ds = xr.open_dataset(data, engine=samples.name, decode=False, verify=True)
        # A size that fits the file may still be huge where it is sparse or repeated.
        small = {
            name: variable for name, variable in ds.variables.items() if variable.nbytes < 1 << 20
        }
        with contextlib.suppress(CheckpointError):
            return computed(small)
        for name, variable in small.items():
            try:
                values[name] = variable.values
            except CheckpointError as error:
                assert_told(error, len(data))
    return values


def meaning(tensor: Tensor, data: bytes) -> Any:
    """Return everything that the values of a tensor depend on, except values in the header."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.quantization,
        {
            role: (p.dtype, p.shape, data[p.offset : p.offset + p.nbytes])
            for role, p in tensor.parts.items()
            if p.inline is None
        },
    )


@cache
def _another_process() -> ProcessPoolExecutor:
    """Start a process for all formats, since importing everything takes seconds."""
    return ProcessPoolExecutor(1, get_context("spawn"))


class Opening(Suite):
    """Opening a file reads no data, from any storage, and its Dataset is a light reference."""

    @pytest.fixture
    def path(self, samples: Samples, tmp_path: Path) -> Path:
        """Return a file whose header is small next to its data."""
        path = tmp_path / f"m{formats.get(samples.name).suffixes[0]}"
        samples.large(path)
        return path

    def test_no_data_are_read_at_opening(self, samples: Samples, path: Path) -> None:
        """Only what no tensor occupies is looked at: without all data the index is the same."""
        data, index = bytearray(path.read_bytes()), read_index(path)
        for tensor in index.tensors.values():
            for part in tensor.parts.values():
                data[part.offset : part.offset + part.nbytes] = b"\xee" * part.nbytes
        source = CountingSource(bytes(data), index.source)
        again = formats.get(samples.name).read(source)
        assert (again.tensors, again.attrs) == (index.tensors, index.attrs)
        # A window or two of 64 KiB for each of the tensors, in whatever order they are.
        assert source.nbytes_read < 600_000

    def test_files_in_memory_and_on_other_file_systems(self, samples: Samples, path: Path) -> None:
        data, local = path.read_bytes(), xr.open_dataset(path, engine=samples.name).compute()
        fsspec.filesystem("memory").pipe(f"/contracts/{path.name}", data)
        for obj in (data, memoryview(data), f"memory://contracts/{path.name}", path.as_uri()):
            xr.testing.assert_identical(xr.open_dataset(obj, engine=samples.name).compute(), local)

    def test_datasets_pickle_by_reference(self, samples: Samples, path: Path) -> None:
        ds = xr.open_dataset(path, engine=samples.name)
        pickled = pickle.dumps(ds)
        assert len(pickled) < 20_000
        xr.testing.assert_identical(pickle.loads(pickled).compute(), ds.compute())
        tasks = [task for v in ds.variables.values() for task in dict(v.data.dask).values()]
        assert max(len(pickle.dumps(task)) for task in tasks) < 1536
        with dask.config.set(scheduler="processes", pool=_another_process()):
            assert float(ds["large"][-1, -1]) == LARGE[-1, -1]


class Facts(Suite):
    """Facts about tensors are plain values, and users can correct what follows from them."""

    def test_declared_facts_are_plain(self, small: Small) -> None:
        """Facts go with tensors to other processes, and into the encoding of variables."""
        for tensor in small_index(small).tensors.values():
            if tensor.declared is not None:
                assert tensor.declared, f"no facts about {tensor.name} are None"
                assert tensor.declared.keys() <= FACTS
                assert all(map(_is_plain, tensor.declared.values()))
                assert pickle.loads(pickle.dumps(tensor.declared)) == tensor.declared

    def test_facts_say_the_same_in_a_dataset(self, small: Small) -> None:
        """An open Dataset has the roles and axes of its file."""
        roles = structure_of(small_index(small)).roles
        ds, _ = opened(small.data, engine=small.samples.name)
        shown = ds.ckpt.structure()["role"]
        assert {name: roles[name] for name in shown.index if name in roles} == {
            name: role for name, role in shown.items() if name in roles
        }

    def test_users_correct_the_structure(self, small: Small) -> None:
        """Users outrank the file; their corrections change no dimensions."""
        before, _ = opened(small.data, engine=small.samples.name)
        corrections = {"*": {"role": "constant"}}
        options = {"structure": corrections} if before.variables else {}
        after, _ = opened(small.data, engine=small.samples.name, **options)
        assert set(after.ckpt.structure()["role"]) <= {"constant"}
        assert list(after.variables) == list(before.variables)
        assert [v.dims for v in after.variables.values()] == [
            v.dims for v in before.variables.values()
        ]


def small_index(small: Small) -> Index:
    """Return the index of a small file."""
    return formats.get(small.samples.name).read(CountingSource(small.data))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value, *value.values())))
    return value is None or type(value) in {str, int, bool, float}
