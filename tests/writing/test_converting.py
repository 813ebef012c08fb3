"""Converting: the same tensors in another format, and no new digests for damaged data."""

from __future__ import annotations

import os
import re
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import safetensors
import xarray as xr

import xckpt
from tests.conftest import GOLDEN, golden_files
from tests.contracts.declared import computed
from tests.sources import CountingSource
from tests.writing.attributes import MOVED, missing
from tests.writing.saved import ENGINES, NO_SCALARS, assert_same_bits
from xckpt import CheckpointError, CheckpointWarning, IntegrityError, UnsupportedError, read_index
from xckpt.arrays.dense import DenseArray
from xckpt.arrays.parts import PartReader
from xckpt.formats import writable
from xckpt.formats.plan import WantedPart
from xckpt.index import Part
from xckpt.storage.sink import Sink
from xckpt.writing import convert, save, verify
from xckpt.writing.payloads import Payload

if TYPE_CHECKING:
    from pathlib import Path

WHOLE: dict[str, Any] = {"version": "2"}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with several types, large and small tensors, axes and attributes."""
    rng = np.random.default_rng(0)
    big = rng.integers(0, 2**16, (700, 1000), np.uint16).view(ml_dtypes.bfloat16)
    ds = xr.Dataset(
        {
            "big": (("out", "in"), big),
            "small": ("in", rng.random(1000, "f4")),
            "flags": ("n", np.array([True, False, True])),
            "half": ("n", np.array([1.5, -0.0, np.inf], "f2")),
        },
        attrs={"licence": "MIT"},
    )
    save(ds, tmp_path / "m.zt", encoding={"*": {"digest": "crc32c"}}, **WHOLE)
    return tmp_path / "m.zt"


@pytest.mark.parametrize("engine", ENGINES)
def test_values_types_and_axes(engine: str, model: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        convert(model, tmp_path / "new", engine)
    old = xr.open_dataset(model, engine="ztensor")
    new = xr.open_dataset(tmp_path / "new", engine=engine)
    assert set(new.variables) == set(old.variables)
    for name in old.variables:
        assert np.array_equal(new[name].values, old[name].values, equal_nan=name != "flags")
    stored = read_index(tmp_path / "new").tensors["big"].dtype
    assert stored == next(t for t in ("bfloat16", "float32") if t in writable(engine).can.types)


@pytest.mark.usefixtures("in_this_thread", "all_names_in_warnings")
@pytest.mark.parametrize(
    "path",
    golden_files("*/*", with_suffix=".expected.json"),
    ids=lambda p: f"{p.parent.name}-{p.name}",
)
def test_golden_files(path: Path, tmp_path: Path) -> None:
    """Converted tensors are read back, and omitted ones cause a warning."""
    values: dict[Any, Any] = {}
    for engine in ENGINES:
        target = tmp_path / engine
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            try:
                convert(path, target, engine, **(WHOLE if engine == "ztensor" else {}))
            except CheckpointError:
                assert not target.exists()
                continue
            before, after = read_index(path), read_index(target)
            old = xr.open_dataset(path, engine=before.format).variables
            new = xr.open_dataset(target, engine=engine).variables
        message = " ".join(str(warning.message) for warning in caught)
        assert missing(before, after, message, MOVED) == []
        both = {n for n in old if n in new and old[n].encoding["layout"] != "structural"}
        values |= computed({name: old[name] for name in both - values.keys()})
        for name, reopened in computed({name: new[name] for name in both}).items():
            expected = values[name]
            if engine in NO_SCALARS:  # a number is an array of one, or trailing ones are left out
                expected = expected.reshape(reopened.shape)
            assert reopened.shape == expected.shape
            with np.errstate(invalid="ignore"):
                same = np.array_equal(reopened, expected, equal_nan=expected.dtype.kind in "fc")
            assert same, (engine, name)
    assert set(names(tmp_path)) <= set(ENGINES)


def test_the_same_format_again_gives_equal_bytes(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "again.zt", **WHOLE)
    assert (tmp_path / "again.zt").read_bytes() == model.read_bytes()


# No version has both "zstd" and "zstd-seekable".
@pytest.mark.parametrize(
    ("compression", "again"),
    [pair for one in ("zstd", "zstd-seekable") for pair in ((one, one), (one, None), (None, one))]
    + [(None, None)],
)
def test_compression(
    compression: str | None, again: str | None, model: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.zt", tmp_path / "second.zt"
    version = "1.0" if "zstd" in (compression, again) else "2"
    convert(model, first, encoding={"*": {"compression": compression}}, version=version)
    convert(first, second, encoding={"*": {"compression": again}}, version=version)
    assert {t.parts["data"].encoding for t in read_index(second).tensors.values()} <= {again, None}
    old = xr.open_dataset(model, engine="ztensor", decode=False)
    new = xr.open_dataset(second, engine="ztensor", decode=False, verify=True)
    for name in old.variables:
        assert_same_bits(new[name].values, old[name].values)


@pytest.mark.parametrize("target", ["raw", "recoded", "pieces", "gathered", "compressed"])
def test_damaged_tensors_get_no_new_digest(target: str, model: Path, tmp_path: Path) -> None:
    name = "small" if target == "gathered" else "big"
    damaged = bytearray(model.read_bytes())
    damaged[read_index(model).tensors[name].parts["data"].offset + 7] ^= 1
    model.write_bytes(damaged)
    options: dict[str, Any] = dict(WHOLE)
    if target in {"recoded", "pieces"}:
        options["encoding"] = {"big": {"dtype": "float32"}}
    if target == "pieces":  # in any order, because no digest is written
        options["encoding"]["*"] = {"digest": None}
    if target == "compressed":
        options["encoding"] = {"*": {"compression": "zstd-seekable"}}
    with pytest.raises(IntegrityError, match=rf"'{name}'"):
        convert(model, tmp_path / "new.zt", **options)
    assert names(tmp_path) == ["m.zt"]
    convert(model, tmp_path / "new.zt", verify=False, **options)


def test_one_warning_lists_the_losses(model: Path, tmp_path: Path) -> None:
    with pytest.warns(CheckpointWarning) as caught:
        convert(model, tmp_path / "m.primitiv")
    assert len(caught) == 1
    assert "without a place: 'licence'" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_only_some_tensors(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "new.safetensors", tensors=["b*", "half"])
    assert set(read_index(tmp_path / "new.safetensors").tensors) == {"big", "half"}


def test_converting_in_place(model: Path) -> None:
    convert(model, model, tensors="b*", overwrite=True, **WHOLE)
    assert set(read_index(model).tensors) == {"big"}
    with pytest.raises(FileExistsError):
        convert(model, model)


@pytest.mark.filterwarnings("ignore:.*without a place:xckpt.CheckpointWarning")
def test_exact_is_the_default(tmp_path: Path) -> None:
    ds = xr.Dataset({"w": ("n", [0.1, 0.2])})
    save(ds, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedError, match=r"m\.primitiv: tensor 'w': float64 .*cast='allow'"):
        convert(tmp_path / "m.safetensors", tmp_path / "m.primitiv")
    convert(tmp_path / "m.safetensors", tmp_path / "m.primitiv", cast="allow")
    variable = xr.open_dataset(tmp_path / "m.primitiv")["w"]
    assert variable.values.tolist() == np.array([0.1, 0.2], "f4").tolist()


def test_sparse_files_keep_their_holes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[67108864],"data_offsets":[0,268435456]}}   '
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(1 << 27)
        file.write(b"data")
        file.truncate(8 + len(header) + (1 << 28))
    if path.stat().st_blocks * 512 > 1 << 27:
        pytest.skip("no sparse files here")
    convert(path, tmp_path / "new.safetensors")
    assert (tmp_path / "new.safetensors").stat().st_blocks * 512 < 1 << 25
    ds = xr.open_dataset(tmp_path / "new.safetensors")
    assert int((ds["w"] != 0).sum()) == 1


def test_without_copying_by_the_kernel(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    monkeypatch.delattr(os, "SEEK_DATA")
    convert(model, tmp_path / "slow.zt", verify=False, encoding={"*": {"digest": None}}, **WHOLE)
    monkeypatch.undo()
    convert(model, tmp_path / "fast.zt", verify=False, encoding={"*": {"digest": None}}, **WHOLE)
    assert (tmp_path / "slow.zt").read_bytes() == (tmp_path / "fast.zt").read_bytes()


def test_from_bytes_and_from_a_url(model: Path, tmp_path: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe("/converted/m.zt", model.read_bytes())
    sources: list[bytes | str] = [model.read_bytes(), "memory://converted/m.zt"]
    for number, src in enumerate(sources):
        convert(src, tmp_path / f"{number}.zt", **WHOLE)
        assert (tmp_path / f"{number}.zt").read_bytes() == model.read_bytes()


def test_a_full_disk_leaves_the_old_file(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "new.zt"
    target.write_bytes(b"old")
    monkeypatch.setattr(Sink, "write", full)
    with pytest.raises(OSError, match="No space left"):
        convert(model, target, overwrite=True, **WHOLE)
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["m.zt", "new.zt"]


def test_an_odd_number_of_small_elements_is_not_rounded_up() -> None:
    """Two of them share a byte, and the half that is left over is not an element."""
    packed = CountingSource(bytes([0x21, 0x43, 0x05]))
    reader = PartReader(packed, Part("float4_e2m1fn", (5,), 0, 3))
    array = DenseArray("w", reader, (5,), decode=False)
    part = WantedPart("float16", (5,), 10)
    payload = Payload("w", "float16", (5,), {"data": part}, data={"data": array})
    data = payload.part_bytes("data", part, "exact")
    ((position, (block,)),) = data.blocks(0, data.size, np.empty(64, np.uint8))
    assert position == 0
    assert block.view("f2").tolist() == [0.5, 1, 1.5, 2, 3]
    assert data.size == len(block)


def test_a_conversion_reports_its_changes(model: Path, tmp_path: Path) -> None:
    done = convert(model, tmp_path / "same.zt")
    assert (done.recasts, done.exact, done.tensors) == ((), True, 4)
    assert done.nbytes == (tmp_path / "same.zt").stat().st_size
    assert done.source_nbytes == model.stat().st_size
    done = convert(model, tmp_path / "wide.zt", tensors="big", encoding={"*": {"dtype": "f32"}})
    assert done.exact
    assert repr(done).endswith("  1 bfloat16 tensor written as float32 (exact), 2.0 x larger")
    done = convert(
        model,
        tmp_path / "low.zt",
        cast="allow",
        encoding={"small": {"dtype": "fp8_e4m3"}},
        version="2",
    )
    assert not done.exact
    assert str(done.recasts[0]) == (
        "1 float32 tensor written as float8_e4m3fn (rounded), 4.0 x smaller"
    )


@pytest.mark.parametrize("call", ["convert", "verify"])
def test_a_filter_without_a_match_raises(model: Path, tmp_path: Path, call: str) -> None:
    arguments = {"convert": (model, tmp_path / "new.zt"), "verify": (model,)}[call]
    with pytest.raises(ValueError, match=r"matches none of the 4 tensors; similar names: 'small'"):
        getattr(xckpt, call)(*arguments, tensors="smal")
    assert names(tmp_path) == ["m.zt"]


def test_the_format_of_the_old_file_may_be_named(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "new.zt", tensors="small", source_engine="ztensor")
    assert verify(tmp_path / "new.zt", "ztensor").ok
    with pytest.raises(CheckpointError, match="It is a ztensor file"):
        convert(model, tmp_path / "other.zt", source_engine="npz")
    with pytest.raises(ValueError, match="did you mean 'ztensor'"):
        verify(model, "ztensr")


class TestNewNames:
    """``names=`` renames tensors on the way, and touches no values."""

    def test_values_are_copied_as_they_are_stored(self, model: Path, tmp_path: Path) -> None:
        new = {"big": "a.big", "small": "a.small"}
        convert(model, tmp_path / "new.zt", names=new, **WHOLE)
        old, index = read_index(model), read_index(tmp_path / "new.zt")
        assert set(index) == {"a.big", "a.small", "flags", "half"}
        for name, tensor in old.items():
            after = index[new.get(name, name)]
            assert (after.dtype, after.shape, after.dims) == (
                tensor.dtype,
                tensor.shape,
                tensor.dims,
            )
            assert after.parts["data"].digest == tensor.parts["data"].digest
        back = {value: key for key, value in new.items()}
        convert(tmp_path / "new.zt", tmp_path / "back.zt", names=back, **WHOLE)
        with xr.open_dataset(model) as a, xr.open_dataset(tmp_path / "back.zt") as b:
            xr.testing.assert_identical(a, b)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_new_names_in_every_format(self, engine: str, model: Path, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            done = convert(
                model, tmp_path / "new", engine, tensors="[bs]*", names=lambda name: f"m.{name}"
            )
            ds = xr.open_dataset(done.path, engine=engine)
        assert {str(name) for name in ds} == {"m.big", "m.small"}

    def test_coordinates_and_their_order_follow(self, tmp_path: Path) -> None:
        ds = xr.Dataset({"w": ("x", np.ones(3, "f4"))}, {"x": [1, 2, 3]})
        save(ds, tmp_path / "a.zt", **WHOLE)
        convert(tmp_path / "a.zt", tmp_path / "b.zt", names=("^w$", "v"), **WHOLE)
        with xr.open_dataset(tmp_path / "b.zt") as reopened:
            xr.testing.assert_identical(reopened, ds.rename(w="v"))

    def test_quantised_weights_and_their_scales(self, tmp_path: Path) -> None:
        path = GOLDEN / "hf-quantized" / "awq_gemm_group32"
        index = read_index(path)
        name = next(name for name, tensor in index.items() if tensor.stored is not None)
        convert(path, tmp_path / "new.zt", names={name: f"new.{name}"}, **WHOLE)
        with xr.open_dataset(path) as a, xr.open_dataset(tmp_path / "new.zt") as b:
            np.testing.assert_array_equal(a[name], b[f"new.{name}"])
        with pytest.raises(ValueError, match="the new name must end as the old one"):
            convert(path, tmp_path / "other.zt", names={name: "codes"})

    @pytest.mark.parametrize(
        ("new", "error", "message"),
        [
            (
                {"bigg": "x"},
                ValueError,
                "'bigg', but no tensor is called that; similar names: 'big'",
            ),
            ({"bigg": "x", "a": "y"}, ValueError, "'bigg' and 1 more"),
            ({"big": "small"}, ValueError, "both 'big' and 'small' to 'small'"),
            ({"big": 3}, TypeError, "maps 'big' to 3, which is not a string"),
            ({3: "big"}, TypeError, "3 is not a string"),
            (lambda _: None, TypeError, "to None, which is not a string"),
            (("(", ""), ValueError, "is not a regular expression"),
            (("b", r"\3"), ValueError, "invalid group reference"),
            ("auto", TypeError, "a mapping, a function of a name, or a pair"),
        ],
    )
    def test_names_that_cannot_be_mapped_are_errors(
        self, new: Any, error: type[Exception], message: str, model: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(error, match=re.escape(message)):
            convert(model, tmp_path / "new.zt", names=new)
        assert names(tmp_path) == ["m.zt"]


@pytest.mark.parametrize("attrs", [{}, {"format": "mlx"}], ids=["not stated", "stated"])
def test_metadata_of_safetensors_state_their_format(attrs: dict[str, str], tmp_path: Path) -> None:
    save(xr.Dataset({"w": ("n", np.zeros(2))}, attrs={"epoch": 3, **attrs}), tmp_path / "m.npz")
    convert(tmp_path / "m.npz", tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as file:
        assert file.metadata()["format"] == attrs.get("format", "pt")


class TestWeightsOfATraining:
    """Attributes of an optimizer are written only beside its state."""

    ATTRS: ClassVar = {
        "epoch": 3,
        "hyper_parameters.lr": 0.1,
        "lr_schedulers.0.last_epoch": 1,
        "optimizer.param_groups.0.lr": 0.1,
    }

    @pytest.fixture
    def training(self, tmp_path: Path) -> Path:
        tensors = {
            "net.fc.weight": np.ones((2, 3), "f4"),
            "optimizer.state.0.exp_avg": np.zeros((2, 3), "f4"),
            "optimizer.state.0.exp_avg_sq": np.ones((2, 3), "f4"),
        }
        ds = xr.Dataset({name: (("out", "in"), value) for name, value in tensors.items()})
        save(ds.assign_attrs(self.ATTRS), tmp_path / "m.npz")
        return tmp_path / "m.npz"

    @pytest.mark.parametrize(
        ("write", "has_optimizer"),
        [
            (convert, True),
            (lambda a, b: convert(a, b, tensors="optimizer.*", names=("^optimizer.", "")), True),
            (lambda a, b: convert(a, b, tensors="net.*"), False),
            (lambda a, b: convert(a, b, only="weights", names=("^net.fc.", "")), False),
            (lambda a, b: xckpt.open(a, tensors="net.*").ckpt.save(b), False),
            (lambda a, b: (xckpt.open(a).ckpt.find("net.*") * 2).ckpt.save(b), False),
            (lambda a, b: xckpt.open(a).ckpt.find("net.*").load().ckpt.save(b), False),
        ],
        ids=["whole", "optimizer", "convert", "renamed", "opened", "computed", "in memory"],
    )
    @pytest.mark.parametrize("name", ["new.safetensors", "new/"])
    def test_attributes(self, write: Any, has_optimizer: bool, name: str, training: Path) -> None:
        target = f"{training.parent}/{name}"
        write(str(training), target)
        attrs = dict(read_index(target).attrs)
        attrs.pop("format")
        kept = {"epoch": 3, "hyper_parameters.lr": 0.1}
        assert attrs == (self.ATTRS if has_optimizer else kept)

    def test_attributes_of_the_user_stay(self, training: Path) -> None:
        target = training.with_name("new.safetensors")
        convert(training, target, only="weights", set_attrs={"optimizer.note": "dropped"})
        assert read_index(target).attrs["optimizer.note"] == "dropped"
