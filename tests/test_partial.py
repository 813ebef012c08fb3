"""A checkpoint of which a part is missing opens; the rest of it is as usable as ever."""

from __future__ import annotations

import io
import os
import re
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.partial_files import NBYTES, PARTIAL, VALUES, cut, lost, safetensors_file, written
from xckpt.cli import main
from xckpt.errors import (
    CheckpointError,
    CheckpointWarning,
    FileChangedError,
    FormatError,
    MissingShardError,
    UnreadableWarning,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KINDS = list(PARTIAL)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path, kind: str) -> Path:
    return PARTIAL[kind](tmp_path)


def opened(path: Path, **options: Any) -> xr.Dataset:
    """Open a checkpoint and ignore what is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreadableWarning)
        return xckpt.open(path, **options)


@pytest.fixture
def unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreadableWarning)
        yield


class TestOpening:
    def test_the_other_tensors_are_readable(self, path: Path, kind: str) -> None:
        ds = opened(path)
        assert list(ds.data_vars) == list(VALUES) or kind == "shards"
        for name in VALUES.keys() - lost(kind):
            np.testing.assert_array_equal(ds[name].values, VALUES[name])

    def test_names_shapes_and_types_are_those_of_the_header(self, path: Path, kind: str) -> None:
        with pytest.warns(UnreadableWarning):
            index = xckpt.read_index(path)
        for name in lost(kind) if kind != "shards" else ():
            assert (index[name].dtype, index[name].shape) == ("float32", (8, 16))
            assert opened(path)[name].shape == (8, 16)

    def test_a_tensor_raises_the_error_of_the_file_by_its_own_name(
        self, path: Path, kind: str
    ) -> None:
        ds = opened(path)
        for name in lost(kind):
            with pytest.raises(CheckpointError) as caught:
                ds[name].values  # noqa: B018
            error = caught.value
            assert error.tensor == name
            assert error.path == str(path)
            assert str(error).count(str(path)) == 1
            assert error.hint

    def test_one_warning_has_one_line_for_one_cause(self, path: Path, kind: str) -> None:
        with pytest.warns(UnreadableWarning) as caught:
            xckpt.open(path)
        [message] = [str(warning.message) for warning in caught]
        names = ", ".join(map(repr, lost(kind)))
        assert message.startswith(f"{path}: 2 of 5 tensors cannot be read ({names}): ")
        assert "\n" not in message
        assert message.count(str(path)) == 1

    def test_only_selected_tensors_cause_a_warning(self, path: Path, kind: str) -> None:
        xckpt.open(path, tensors=[name for name in VALUES if name not in lost(kind)])
        with pytest.warns(UnreadableWarning):
            xckpt.open(path, tensors=lost(kind)[:1])

    def test_missing_raise_raises_the_first_error(self, path: Path, kind: str) -> None:
        engine = opened(path).encoding["format"]
        for open_it in (
            lambda: xckpt.open(path, missing="raise"),
            lambda: xr.open_dataset(path, engine=engine, missing="raise"),
            lambda: xr.open_datatree(path, engine=engine, missing="raise"),
        ):
            with pytest.raises(CheckpointError) as caught:
                open_it()
            assert caught.value.tensor == lost(kind)[0]
            assert caught.value.path == str(path)
        intact = [name for name in VALUES if name not in lost(kind)]
        assert len(xckpt.open(path, tensors=intact, missing="raise")) == 3

    def test_missing_has_two_values(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="missing='ignore': expected 'warn' or 'raise'"):
            xckpt.open(written(tmp_path / "m.zt"), missing="ignore")  # type: ignore[arg-type]

    def test_two_causes_have_two_lines(self, tmp_path: Path) -> None:
        index = PARTIAL["shards"](tmp_path)
        cut(tmp_path / "m-00003-of-00003.safetensors", 8)
        with pytest.warns(UnreadableWarning) as caught:
            xckpt.open(index)
        [message] = [str(warning.message) for warning in caught]
        head, *causes = message.splitlines()
        assert head == f"{index}: 3 of 5 tensors cannot be read"
        assert len(causes) == 2
        first, second = sorted(causes)
        assert first.startswith("1 ('layers.4.w'): m-00003-of-00003.safetensors: ")
        assert second.startswith("2 ('layers.2.w', 'layers.3.w'): the file 'm-00002-of-0")

    def test_the_summary_has_one_line_for_one_cause(self, path: Path, kind: str) -> None:
        with pytest.warns(UnreadableWarning):
            index = xckpt.read_index(path)
        for text in (repr(index), repr(opened(path).ckpt)):
            assert text.count("error:") == 1, text
            assert f"2 tensors cannot be read: '{lost(kind)[0]}'" in text

    def test_an_array_of_a_cut_npy_file_has_its_shape(self, tmp_path: Path) -> None:
        np.save(tmp_path / "m.npy", VALUES["layers.0.w"])
        ds = opened(cut(tmp_path / "m.npy", 10))
        assert ds["arr_0"].shape == (8, 16)
        with pytest.raises(FormatError, match="tensor 'arr_0'"):
            ds["arr_0"].values  # noqa: B018

    def test_an_unsupported_type_is_no_damage(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "m.npz", text=np.array(["a"]), x=np.ones(3))
        ds = xckpt.open(tmp_path / "m.npz", missing="raise")
        with pytest.raises(UnsupportedError):
            ds["text"].values  # noqa: B018


OPERATIONS: dict[str, Callable[[xr.Dataset, str], object]] = {
    "values": lambda ds, name: ds[name].values,
    "asarray": lambda ds, name: np.asarray(ds[name]),
    "load": lambda ds, _: ds.copy().load(),
    "compute": lambda ds, _: ds.compute(),
    "mean": lambda ds, _: ds.mean().compute(),
    "sum": lambda ds, name: ds[name].sum().compute(),
    "plus one": lambda ds, _: (ds + 1).compute(),
    "of two": lambda ds, _: (ds - ds).compute(),
    "isnull": lambda ds, _: ds.isnull().sum().compute(),
    "astype": lambda ds, _: ds.astype("float64").compute(),
    "std": lambda ds, name: ds[name].std().compute(),
    "max": lambda ds, _: ds.max().compute(),
}


class TestComputing:
    @pytest.mark.parametrize("operation", OPERATIONS)
    @pytest.mark.parametrize("kind", ["safetensors", "shards"])
    def test_every_operation_raises_the_error_of_the_file(
        self, path: Path, kind: str, operation: str
    ) -> None:
        ds = opened(path)
        with pytest.raises(CheckpointError) as caught:
            OPERATIONS[operation](ds, lost(kind)[0])
        assert caught.value.tensor in lost(kind)
        assert caught.value.path == str(path)

    def test_zarr_gets_the_error_of_the_file(self, tmp_path: Path) -> None:
        pytest.importorskip("zarr")
        ds = opened(PARTIAL["shards"](tmp_path))
        with pytest.raises(MissingShardError):
            ds.drop_encoding().drop_attrs().to_zarr(tmp_path / "m.zarr", consolidated=False)


@pytest.mark.usefixtures("unwarned")
class TestStatistics:
    @pytest.mark.parametrize(
        "compute",
        [
            lambda obj: xckpt.table(xckpt.stats(obj)).index,
            lambda obj: xckpt.table(xckpt.spectrum(obj)).index,
            lambda obj: list(xckpt.histogram(obj).data_vars),
            lambda obj: list(xckpt.findings(obj).names),
            xckpt.manifest,
        ],
    )
    def test_the_other_tensors_have_results(
        self, path: Path, kind: str, compute: Callable[[Any], Any]
    ) -> None:
        intact = sorted(VALUES.keys() - lost(kind))
        assert sorted(compute(path)) == intact
        assert sorted(compute(opened(path))) == intact

    def test_a_call_warns_once(self, path: Path) -> None:
        with pytest.warns(UnreadableWarning) as caught:
            xckpt.stats(path)
        assert len(caught) == 1
        with pytest.warns(UnreadableWarning) as caught:
            xckpt.manifest(path)
        assert len(caught) == 1

    def test_findings_warn_once(self, path: Path) -> None:
        with pytest.warns(UnreadableWarning) as caught:
            xckpt.findings(path)
        assert len(caught) == 1

    def test_a_stack_of_unreadable_tensors_is_left_out(self, tmp_path: Path) -> None:
        ds = opened(PARTIAL["safetensors"](tmp_path), stack=True)
        assert set(xckpt.table(xckpt.stats(ds)).index) == set(list(VALUES)[:3])


@pytest.mark.usefixtures("unwarned")
class TestComparison:
    def test_a_tensor_is_unreadable_on_either_side(
        self, path: Path, kind: str, tmp_path: Path
    ) -> None:
        (tmp_path / "whole").mkdir()
        whole = written(tmp_path / "whole" / "m.zt")
        for sides in ((path, whole), (whole, path), (path, path)):
            table = xckpt.table(xckpt.compare(*sides))
            statuses = table["status"].astype(str).to_dict()
            unreadable = {name for name, status in statuses.items() if status == "unreadable"}
            assert unreadable == set(lost(kind))
            assert {statuses[name] for name in VALUES.keys() - unreadable} == {"same"}

    def test_explanations_name_the_cause(self, path: Path, kind: str, tmp_path: Path) -> None:
        whole = written(tmp_path / "whole.zt")
        result = xckpt.compare(whole, path, explain=True, names="auto")
        table = xckpt.table(result)
        assert set(table.index[table["outcome"] == "unreadable"]) == set(lost(kind))
        assert result.attrs["explanation"].startswith("2 cannot be read: ")
        assert "only in" not in result.attrs["explanation"]
        assert (table["cause"][lost(kind)] == "unreadable").all()

    def test_renamed_tensors_are_unreadable_too(
        self, path: Path, kind: str, tmp_path: Path
    ) -> None:
        renamed = {f"model.{name}": values for name, values in VALUES.items()}
        whole = written(tmp_path / "whole.zt", renamed)
        table = xckpt.table(xckpt.compare(path, whole, names="auto"))
        statuses = table["status"].astype(str)
        assert set(table.index[statuses == "unreadable"]) == set(lost(kind))
        assert set(statuses) == {"same", "unreadable"}

    def test_each_side_warns_once(self, path: Path) -> None:
        with pytest.warns(UnreadableWarning) as caught:
            xckpt.compare(path, dict(VALUES))
        assert len(caught) == 1


class TestVerifying:
    def test_one_cause_is_one_finding(self, path: Path, kind: str) -> None:
        report = xckpt.verify(path)
        assert not report.ok
        assert report.status == "damaged"
        [finding] = [finding for finding in report.findings if finding.severity == "error"]
        names = ", ".join(map(repr, lost(kind)))
        assert finding.message.startswith(f"2 tensors ({names}): ")
        assert [finding for finding in report.findings if finding.severity == "warning"] == []

    def test_a_file_that_is_replaced_meanwhile_is_not_damaged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = written(tmp_path / "m.zt", encoding={"*": {"digest": "crc32c"}})
        other = written(tmp_path / "new.zt", {"x": np.zeros((300, 300), "f4")})
        preadv, remaining = os.preadv, [0]

        def replacing(fileno: int, buffers: Any, offset: int, flags: int = 0) -> int:
            remaining[0] -= 1
            if remaining[0] == 0:
                shutil.copy(other, tmp_path / "copy.zt")
                (tmp_path / "copy.zt").replace(path)
            return preadv(fileno, buffers, offset, flags)

        monkeypatch.setattr(os, "preadv", replacing)
        data = path.read_bytes()
        outcomes: list[str] = []
        for moment in range(1, 9):
            path.unlink()
            path.write_bytes(data)
            remaining[0] = moment
            try:
                outcomes.append(xckpt.verify(path).status)
            except FileChangedError as error:
                outcomes.append(type(error).__name__)
        assert "FileChangedError" in outcomes
        assert "damaged" not in outcomes


class TestWriting:
    @pytest.mark.parametrize("target", ["new.safetensors", "new.zt"])
    def test_convert_refuses_a_partial_source(
        self, path: Path, kind: str, tmp_path: Path, target: str
    ) -> None:
        with pytest.raises(CheckpointError) as caught:
            xckpt.convert(path, tmp_path / target)
        text = str(caught.value)
        assert text.startswith(f"{path}: 2 of 5 tensors cannot be read ('{lost(kind)[0]}', ")
        assert text.endswith("Pass skip_unreadable=True to write the others")
        assert text.count(str(path)) == 1
        assert not (tmp_path / target).exists()

    @pytest.mark.parametrize("target", ["new.safetensors", "new.zt"])
    def test_intact_tensors_are_equal_bit_for_bit(
        self, path: Path, kind: str, tmp_path: Path, target: str
    ) -> None:
        with pytest.warns(CheckpointWarning, match="left out, unreadable") as caught:
            done = xckpt.convert(path, tmp_path / target, skip_unreadable=True)
        assert len(caught) == 1
        assert done.tensors == 3
        ds = xckpt.open(tmp_path / target)
        assert ds.data_vars.keys() == VALUES.keys() - lost(kind)
        for name in ds.data_vars:
            assert ds[name].values.tobytes() == VALUES[str(name)].tobytes()

    def test_a_file_without_any_tensor_is_not_written(self, tmp_path: Path) -> None:
        path = cut(written(tmp_path / "m.safetensors"), 5 * NBYTES)
        with pytest.raises(FormatError, match="5 of 5 tensors cannot be read"):
            xckpt.convert(path, tmp_path / "new.zt", skip_unreadable=True)
        assert not (tmp_path / "new.zt").exists()

    def test_a_selection_of_intact_tensors_is_converted(
        self, path: Path, kind: str, tmp_path: Path
    ) -> None:
        intact = [name for name in VALUES if name not in lost(kind)]
        assert xckpt.convert(path, tmp_path / "new.zt", tensors=intact).tensors == 3

    def test_save_refuses_and_skips_likewise(self, path: Path, kind: str, tmp_path: Path) -> None:
        ds = opened(path)
        with pytest.raises(CheckpointError, match=r"2 of 5 tensors .* skip_unreadable=True"):
            xckpt.save(ds, tmp_path / "new.zt")
        with pytest.warns(CheckpointWarning, match="left out, unreadable"):
            xckpt.save(ds, tmp_path / "new.zt", skip_unreadable=True)
        new = xckpt.open(tmp_path / "new.zt")
        for name in VALUES.keys() - lost(kind):
            assert new[name].values.tobytes() == VALUES[name].tobytes()
        assert len(new) == 3

    def test_append_refuses_and_skips_likewise(self, path: Path, tmp_path: Path) -> None:
        ds = opened(path)
        target = written(tmp_path / "new.zt", {"x": np.ones(3)})
        with pytest.raises(CheckpointError, match=r"2 of 5 tensors .* skip_unreadable=True"):
            xckpt.append(ds, target)
        with pytest.warns(CheckpointWarning, match="left out, unreadable"):
            xckpt.append(ds, target, skip_unreadable=True)
        assert len(xckpt.open(target)) == 4

    def test_errors_of_requests_suggest_no_loss(self, tmp_path: Path) -> None:
        sparse_array = pytest.importorskip("sparse").COO.from_numpy(np.eye(3, dtype="f4"))
        ds = xr.Dataset({"w": (("a", "b"), sparse_array)})
        with pytest.raises(UnsupportedError, match="cast='exact' writes") as caught:
            xckpt.save(ds, tmp_path / "new.safetensors", cast="never")
        assert "skip_unreadable" not in str(caught.value)

    def test_types_that_cannot_be_stored_are_skipped_on_request(self, tmp_path: Path) -> None:
        path = tmp_path / "m.npz"
        np.savez(path, text=np.array(["a"]), z=np.ones(3, "complex128"), x=np.ones(3))
        with pytest.raises(UnsupportedError, match="skip_unreadable=True") as caught:
            xckpt.convert(path, tmp_path / "new.safetensors")
        assert caught.value.tensor == "text"
        with pytest.raises(UnsupportedError, match="skip_unreadable=True") as caught:
            xckpt.convert(path, tmp_path / "new.safetensors", tensors=["z", "x"])
        assert caught.value.tensor == "z"
        with pytest.warns(CheckpointWarning, match=r"left out.*'text'.*left out.*'z'"):
            xckpt.convert(path, tmp_path / "new.safetensors", skip_unreadable=True)
        assert list(xckpt.open(tmp_path / "new.safetensors")) == ["x"]

    def test_sizes_of_files_are_compared_with_sizes_of_files(self, tmp_path: Path) -> None:
        path = written(tmp_path / "m.safetensors")
        done = xckpt.convert(path, tmp_path / "new.safetensors")
        assert (done.nbytes, done.source_nbytes) == (path.stat().st_size,) * 2
        done = xckpt.convert(path, tmp_path / "one.safetensors", tensors="*.0.w")
        assert done.source_nbytes is None
        assert "was" not in repr(done)


class TestCommands:
    @pytest.mark.parametrize(
        "command",
        [
            "stats FILE",
            "stats FILE --findings",
            "stats FILE --by layer",
            "spectrum FILE",
            "manifest FILE",
            "verify FILE",
            "compare FILE WHOLE",
            "compare WHOLE FILE --explain",
            "report FILE -o OUT",
        ],
    )
    @pytest.mark.parametrize("kind", ["gguf", "shards"])
    def test_commands_go_on_and_exit_with_1(
        self,
        path: Path,
        kind: str,
        tmp_path: Path,
        command: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        whole = written(tmp_path / "whole.zt")
        words = {"FILE": str(path), "WHOLE": str(whole), "OUT": str(tmp_path / "report.md")}
        assert main([words.get(word, word) for word in command.split()]) == 1
        output = capsys.readouterr()
        assert "layers.0.w" in output.out or not command.startswith("stats FILE\n")
        lines = [line for line in (output.out + output.err).splitlines() if "the file" in line]
        lines = [line for line in lines if lost(kind)[0] in line and lost(kind)[1] in line]
        assert len(lines) == 1, output

    def test_intact_selections_exit_with_0(self, path: Path, capsys: Any) -> None:
        assert main(["stats", str(path), "--tensors", "layers.0.w"]) == 0
        assert "cannot be read" not in capsys.readouterr().err

    def test_info_lists_each_cause_once(self, path: Path, capsys: Any) -> None:
        assert main(["info", str(path)]) == 0
        output = capsys.readouterr()
        assert (output.out + output.err).count("cannot be read") == 1

    def test_convert_names_its_option(self, path: Path, tmp_path: Path, capsys: Any) -> None:
        new = str(tmp_path / "new.zt")
        assert main(["convert", str(path), new]) == 1
        error = capsys.readouterr().err
        assert error.count("cannot be read") == 1
        assert "--skip-unreadable" in error
        assert main(["convert", str(path), new, "--skip-unreadable"]) == 0
        assert capsys.readouterr().err.count("unreadable") == 1
        assert len(xckpt.open(new)) == 3


class TestNothing:
    def contents(self, tmp_path: Path, label: str) -> Path:
        path = tmp_path / "m.safetensors"
        if label == "no tensors":
            path.write_bytes(safetensors_file({}))
        elif label == "all empty":
            path.write_bytes(safetensors_file({"a.lora_A.weight": [0], "a.lora_B.weight": [0]}))
        elif label == "one of many":
            path.write_bytes(safetensors_file({"0.weight": [4, 4], "1.weight": [0]}))
        elif label == "no rows":
            path.write_bytes(safetensors_file({"0.weight": [4, 4], "1.weight": [0, 4]}))
        elif label == "HDF5":
            h5py = pytest.importorskip("h5py")
            path = tmp_path / "m.h5"
            h5py.File(path, "w").close()
        elif label == "pt":
            from tests.formats.torch_files import legacy

            path = tmp_path / "m.pt"
            path.write_bytes(legacy({}))
        return path

    @pytest.mark.parametrize(
        "label", ["no tensors", "all empty", "one of many", "no rows", "HDF5", "pt"]
    )
    def test_nothing_is_not_ok(self, tmp_path: Path, label: str, capsys: Any) -> None:
        path = self.contents(tmp_path, label)
        report = xckpt.verify(path)
        assert (report.ok, report.status) == (False, "empty")
        [finding] = report.findings
        assert finding.rule == "Empty"
        expected = "length 0" if label == "no rows" else "gathered|no tensors"
        assert re.search(expected, finding.message)
        assert main(["verify", str(path)]) == 1
        assert "EMPTY" in capsys.readouterr().out
        frame = xckpt.findings(path)
        assert "empty" in set(frame["rule"])
        assert main(["stats", str(path), "--findings"]) == 1

    @pytest.mark.parametrize(
        "shapes",
        [
            {"weight": [4, 4], "removed": [0]},
            {"0.weight": [4, 4], "0.removed_rows": [0]},
            {"0.weight": [4, 4], "1.weight": [4]},
            {"0.weight": [4, 4], "1.tp.weight": [0], "1.tp.output_mask": [4]},
        ],
    )
    def test_other_empty_tensors_are_ok(self, tmp_path: Path, shapes: dict[str, list[int]]) -> None:
        path = tmp_path / "m.safetensors"
        path.write_bytes(safetensors_file(shapes))
        assert xckpt.verify(path).ok
        assert "empty" not in set(xckpt.findings(path)["rule"])

    def test_one_empty_weight_of_a_whole_model_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        layers = {f"layers.{layer}.{name}.weight": [4, 4] for layer in range(4) for name in "abc"}
        path.write_bytes(safetensors_file(layers | {"lm_head.weight": [0]}))
        [finding] = xckpt.verify(path).findings
        assert (finding.rule, finding.tensor) == ("Empty", "lm_head.weight")

    def test_weights_that_were_not_gathered_are_one_finding(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        path.write_bytes(safetensors_file({f"layers.{n}.weight": [0] for n in range(40)}))
        frame = xckpt.findings(path)
        assert list(frame["tensor"]) == ["layers.0.weight"]
        assert "39 more like it, such as layers.1.weight" in frame["explanation"][0]

    def test_an_index_without_tensors_is_named(self, tmp_path: Path, capsys: Any) -> None:
        path = tmp_path / "model.safetensors.index.json"
        path.write_text('{"weight_map": {}}')
        with pytest.raises(FormatError, match="lists no tensors"):
            xckpt.open(path)
        assert main(["verify", str(path)]) == 1

    def test_unreadable_tensors_are_not_nothing(self, tmp_path: Path) -> None:
        path = cut(written(tmp_path / "m.safetensors"), 5 * NBYTES)
        assert all(finding.rule != "Empty" for finding in xckpt.verify(path).findings)


def test_bytes_and_open_files_can_be_partial(tmp_path: Path) -> None:
    data = PARTIAL["safetensors"](tmp_path).read_bytes()
    for obj in (data, io.BytesIO(data)):
        with pytest.warns(UnreadableWarning, match="2 of 5 tensors cannot be read"):
            ds = xckpt.open(obj)
        np.testing.assert_array_equal(ds["layers.0.w"].values, VALUES["layers.0.w"])
