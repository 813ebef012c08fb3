"""Manifests: equal for equal content, and every difference is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import sparse
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.hostile_names import HOSTILE
from xckpt import FormatError, Manifest, formats, manifest, verify
from xckpt.writing import TensorDigest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WRITABLE = [name for name in formats.names() if formats.get(name).can.types]
RNG = np.random.default_rng(0)
WEIGHTS = {f"layers.{n}.w": RNG.random((8, 5), np.float32) for n in range(4)}


def dataset(arrays: Any) -> xr.Dataset:
    return xr.Dataset({n: ([f"{n}{k}" for k in range(a.ndim)], a) for n, a in arrays.items()})


def sha256(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    xckpt.save(dataset(WEIGHTS), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def findings_of(path: Any, expected: Any) -> list[tuple[str, str | None, str | None]]:
    """Return the findings of verify as rule, tensor and file name."""
    report = verify(path, manifest=expected)
    assert report.ok == (not [f for f in report.findings if f.severity == "error"])
    return [
        ((f.rule or "").removeprefix("Manifest"), f.tensor, f.file and f.file.rpartition("/")[2])
        for f in report.findings
    ]


class TestEqualContent:
    """Return the digest of the elements in numpy's layout."""

    @pytest.mark.parametrize("name", WRITABLE)
    @pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
    def test_manifest_is_the_same_in_every_format(self, name: str, tmp_path: Path) -> None:
        arrays = WEIGHTS | {"b": np.array([1, -0.0, np.nan, np.inf, 1e-40], "f4")}
        path = tmp_path / f"m{formats.get(name).suffixes[0]}"
        xckpt.save(dataset(arrays), path, name)
        expected = manifest(path)
        for key, array in arrays.items():
            (entry,) = [
                entry for file_key, entry in expected.items() if file_key.replace("/", ".") == key
            ]
            assert entry == TensorDigest("float32", array.shape, "elements", sha256(array))
        assert verify(path, manifest=expected).ok

    @pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "bfloat16", "float64"])
    def test_manifest_of_every_type(self, dtype: str, tmp_path: Path) -> None:
        stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        array = (RNG.random((3, 7)) * 5).astype(stored)
        xckpt.save(dataset({"x": array}), tmp_path / "m.zt")
        assert manifest(tmp_path / "m.zt")["x"] == (dtype, (3, 7), "elements", sha256(array))

    def test_manifest_is_independent_of_order_compression_and_byte_order(
        self, tmp_path: Path
    ) -> None:
        array = RNG.random((300, 70))
        np.savez(tmp_path / "a.npz", x=np.asfortranarray(array))
        np.savez_compressed(tmp_path / "b.npz", x=array.astype(">f8"))
        expected = manifest(dataset({"x": array}))
        assert manifest(tmp_path / "a.npz") == manifest(tmp_path / "b.npz") == expected
        assert expected["x"].sha256 == sha256(array)

    def test_manifest_of_files_in_another_order_and_of_several(
        self, model: Path, tmp_path: Path
    ) -> None:
        turned = dict(reversed(WEIGHTS.items()))
        (tmp_path / "shards").mkdir()
        several = tmp_path / "shards/m.safetensors"
        xckpt.save(dataset(turned), several, max_shard_size=200)
        expected = manifest(model)
        assert manifest(f"{several}.index.json").to_json() == expected.to_json()
        assert verify(f"{several}.index.json", manifest=expected).findings == ()

    @pytest.mark.parametrize("path", golden_files("ztensor/*", with_suffix=".expected.npz"))
    @pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
    def test_manifest_of_an_object_equals_its_file(self, path: Path) -> None:
        try:
            expected = manifest(path)
        except xckpt.CheckpointError:
            assert not verify(path).ok or verify(path).findings
            return
        ds = xr.open_dataset(path, engine="ztensor")
        assert ds.ckpt.manifest() == expected
        assert xr.open_dataset(path, engine="ztensor", decode=False).ckpt.manifest() == expected

    def test_manifest_of_loaded_and_stacked_objects_and_trees(self, model: Path) -> None:
        expected = manifest(model)
        ds = xr.open_dataset(model, engine="safetensors")
        tree = xr.open_datatree(model, engine="safetensors")
        assert ds.ckpt.stack().ckpt.manifest() == tree.ckpt.manifest() == expected
        assert ds.load().ckpt.manifest() == expected
        assert (ds.chunk(3) * 1).ckpt.manifest() == expected
        assert manifest(xckpt.read_index(model)) == expected
        assert ds["layers.1.w"].ckpt.manifest()["layers.1.w"] == expected["layers.1.w"]

    def test_manifest_of_sparse_tensors_covers_nonzero_elements(self, tmp_path: Path) -> None:
        array = np.where(RNG.random((40, 30)) < 0.1, RNG.random((40, 30)), 0).astype("f4")
        array[3, 4] = -0.0
        coords = np.argwhere(array.view("u4")).astype("<i8")
        values = array[tuple(coords.T)]
        digest = hashlib.sha256(
            hashlib.sha256(coords.tobytes()).digest() + hashlib.sha256(values.tobytes()).digest()
        )
        ds = xr.Dataset({"x": (("r", "c"), sparse.COO(coords.T, values, array.shape))})
        xckpt.save(ds, tmp_path / "s.zt")
        expected = manifest(tmp_path / "s.zt")
        assert expected["x"] == ("float32", (40, 30), "nonzero", digest.hexdigest())
        assert ds.ckpt.manifest() == expected
        # Dense, it has the same elements.
        xckpt.save(dataset({"x": array}), tmp_path / "d.safetensors")
        report = verify(tmp_path / "d.safetensors", manifest=expected)
        assert report.ok
        (finding,) = report.findings
        assert finding.rule == "ManifestType"
        assert finding.message == "the same elements are dense, not sparse"
        assert verify(tmp_path / "s.zt", manifest=manifest(tmp_path / "d.safetensors")).ok

    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_manifest_of_several_blocks(self, compression: str | None, tmp_path: Path) -> None:
        wide = np.zeros((1, 3, 1 << 20), "f4")
        wide[:, 1, ::7] = RNG.random((1, 149797), "f4")
        arrays = {"wide": wide, "mask": wide != 0, "turned": np.asfortranarray(wide[0])}
        path = tmp_path / "m.zt"
        xckpt.save(dataset(arrays), path, encoding={"*": {"compression": compression}})
        written = manifest(path)
        for name, array in arrays.items():
            assert written[name].sha256 == sha256(array)
        # As if it had been sparse.
        rows = dataset({"wide": sparse.COO.from_numpy(wide)}).ckpt.manifest()
        for like in (rows, dataset({"wide": wide}).chunk(wide2=1 << 18).ckpt.manifest()):
            assert verify(path, manifest=like, tensors="wide").ok

    @pytest.mark.parametrize("path", golden_files("gguf/*quantized.gguf"))
    def test_manifest_of_quantised_tensors_covers_decoded_values(self, path: Path) -> None:
        written = manifest(path)
        with np.load(path.with_suffix(".expected.npz")) as expected:
            for name, entry in written.items():
                if entry.kind == "decoded" and name in expected:
                    assert entry.sha256 == sha256(expected[name].astype("f4"))

    def test_manifest_of_other_types_differs(self, tmp_path: Path) -> None:
        halves = {n: a.astype(ml_dtypes.bfloat16) for n, a in WEIGHTS.items()}
        expected = manifest(dataset(halves))
        xckpt.save(dataset(halves), tmp_path / "m.npz")
        report = verify(tmp_path / "m.npz", manifest=expected)
        assert report.ok
        assert {f.message for f in report.findings} == {
            "the same elements are stored as float32, not bfloat16"
        }
        xckpt.save(dataset(WEIGHTS), tmp_path / "n.npz")  # which were not rounded
        assert [rule for rule, _, _ in findings_of(tmp_path / "n.npz", expected)] == [
            "File",
            *["Elements"] * 4,
        ]


class TestDifferences:
    """Each is named, with the file that it is in."""

    def test_every_flipped_bit(self, model: Path) -> None:
        expected = manifest(model)
        index = xckpt.read_index(model)
        data = bytearray(model.read_bytes())
        for name, tensor in index.tensors.items():
            at = tensor.parts["data"].offset + int(RNG.integers(tensor.nbytes))
            data[at] ^= 1 << int(RNG.integers(8))
            model.write_bytes(data)
            assert ("Elements", name, None) in findings_of(model, expected)
        # All of them by now.
        assert findings_of(model, expected)[0] == ("File", None, None)

    @pytest.fixture
    def shards(self, tmp_path: Path) -> Callable[[str, float], Path]:
        def save(folder: str, offset: float) -> Path:
            (tmp_path / folder).mkdir()
            path = tmp_path / folder / "m.safetensors"
            arrays = {n: a + np.float32(offset) for n, a in WEIGHTS.items()}
            xckpt.save(dataset(arrays), path, max_shard_size=400)
            return path.with_name("m.safetensors.index.json")

        return save

    def test_a_shard_of_another_step(self, shards: Callable[[str, float], Path]) -> None:
        old, new = shards("old", 0), shards("new", 1)
        expected, shard = manifest(new), "m-00002-of-00002.safetensors"
        shutil.copyfile(old.with_name(shard), new.with_name(shard))
        assert findings_of(new, expected) == [
            ("File", None, shard),
            ("Elements", "layers.2.w", shard),
            ("Elements", "layers.3.w", shard),
        ]
        assert f"error: tensor 'layers.2.w' in {shard}: its elements" in repr(
            verify(new, manifest=expected)
        )
        # A stale step, as a whole.
        assert [rule for rule, _, _ in findings_of(old, expected)].count("Elements") == 4

    def test_shards_that_changed_places(self, shards: Callable[[str, float], Path]) -> None:
        index = shards("m", 0)
        expected = manifest(index)
        first, second = sorted(index.parent.glob("*.safetensors"))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        report = verify(index, manifest=expected)
        assert report.ok  # the tensors are the same, but not where the index has them
        assert f"in {first.name!r}, but it is in {second.name!r}" in " ".join(repr(report).split())

    def test_tensors_that_changed_places(self, model: Path) -> None:
        expected = manifest(model)
        swapped = WEIGHTS | {"layers.0.w": WEIGHTS["layers.2.w"]}
        xckpt.save(dataset(swapped), model, overwrite=True)
        (finding,) = verify(model, manifest=expected).findings
        assert finding.message.endswith("they are the elements of 'layers.2.w'")

    def test_renamed_missing_and_extra_tensors_and_shapes(self, model: Path) -> None:
        expected = manifest(model)
        arrays = dict(WEIGHTS)
        arrays["new.w"] = arrays.pop("layers.0.w")
        arrays["more"] = arrays.pop("layers.1.w") + 1
        arrays["layers.2.w"] = arrays["layers.2.w"].T
        xckpt.save(dataset(arrays), model, overwrite=True)
        assert sorted(findings_of(model, expected)) == [
            ("Extra", "more", None),
            ("Missing", "layers.1.w", None),
            ("Renamed", "layers.0.w", None),
            ("Shape", "layers.2.w", None),
        ]
        messages = {f.tensor: f.message for f in verify(model, manifest=expected).findings}
        assert messages["layers.0.w"] == "its name is 'new.w' here"
        assert messages["layers.2.w"] == "its shape is (5, 8), not (8, 5)"

    def test_only_selected_tensors_are_compared(self, model: Path) -> None:
        expected = manifest(model)
        xckpt.save(dataset({"layers.3.w": WEIGHTS["layers.3.w"]}), model, overwrite=True)
        assert verify(model, manifest=expected, tensors="*.3.*").findings == ()
        assert findings_of(model, manifest(dataset(WEIGHTS), tensors="*.3.*")) == []
        assert [finding[:2] for finding in findings_of(model, expected)] == [
            ("Missing", f"layers.{n}.w") for n in range(3)
        ]
        with pytest.raises(ValueError, match="matches none"):
            verify(model, manifest=expected, tensors="absent")

    def test_checkpoints_without_common_tensors(self, model: Path) -> None:
        rules = [rule for rule, _, _ in findings_of(model, manifest(dataset({"z": np.ones(3)})))]
        assert rules == ["Missing"] + ["Extra"] * 4

    @pytest.mark.parametrize("path", golden_files("ztensor/v2_forward_compat.zt"))
    def test_unreadable_tensors_do_not_match(self, path: Path) -> None:
        unread = {f.tensor for f in verify(path).findings}
        expected = manifest(path, tensors=lambda name: name not in unread)
        assert verify(path).ok
        assert "ManifestUnread" in {f.rule for f in verify(path, manifest=expected).findings}

    def test_damage_is_reported_once(self, tmp_path: Path) -> None:
        path = tmp_path / "m.zt"
        xckpt.save(dataset(WEIGHTS), path, encoding={"*": {"digest": "sha256"}})
        expected = manifest(path)
        assert verify(path, manifest=expected).digests == 8
        data = bytearray(path.read_bytes())
        data[xckpt.read_index(path).tensors["layers.1.w"].parts["data"].offset] ^= 1
        path.write_bytes(data)
        assert findings_of(path, expected) == [("Digest", "layers.1.w", None)]
        with pytest.raises(xckpt.IntegrityError, match=r"m\.zt: tensor 'layers\.1\.w'"):
            manifest(path)


class TestOrderOfDifferences:
    @pytest.mark.parametrize("dtype", ["float32", "float64"], ids=["elements", "types"])
    def test_findings_come_in_the_order_of_the_file_however_long_hashing_takes(
        self, tmp_path: Path, dtype: str
    ) -> None:
        sizes = {"large": 1 << 22, "medium": 1 << 20, "small": 1 << 16, "same": 1}
        is_recast = dtype == "float64"
        for file, value, kind in [("a", 0, "float32"), ("b", 0 if is_recast else 1, dtype)]:
            model = {name: np.full(size, value, kind) for name, size in sizes.items()}
            model["same"] = np.zeros(1, "float32")
            xckpt.save(model, tmp_path / f"{file}.npz")
        report = verify(tmp_path / "b.npz", manifest=manifest(tmp_path / "a.npz"))
        assert [finding.tensor for finding in report.findings] == ["large", "medium", "small"]


class TestManifestFile:
    """JSON that is equal for equal content; malformed files are errors."""

    def test_manifest_is_written_and_read(self, tmp_path: Path) -> None:
        written = manifest(dataset({name: np.arange(3) for name in HOSTILE}))
        written.save(tmp_path / "m.json")
        assert Manifest.read(tmp_path / "m.json") == written
        assert (tmp_path / "m.json").read_text("ascii") == written.to_json()
        with pytest.raises(FileExistsError):
            written.save(tmp_path / "m.json")
        assert repr(written) == f"<Manifest of {len(HOSTILE)} tensors, {written.digest}>"

    def test_the_digest_is_the_documented_one(self) -> None:
        written = manifest(dataset(WEIGHTS))
        tensors = json.loads(written.to_json())["tensors"]
        lines = [
            json.dumps([name, *entry.values()], separators=(",", ":")) + "\n"
            for name, entry in sorted(tensors.items())
        ]
        assert written.digest == f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('"xckpt-manifest"', '"other"', 'it has no "format": "xckpt-manifest"'),
            ('"version": 1', '"version": 2', "version 2 is unsupported"),
            ('"version": 1', '"version": true', "version True is unsupported"),
            ('"tensors": {', '"tensors": 7, "x": {', '"tensors" is 7, not an object'),
            ('"float32"', '"O"', "tensor 'b': dtype is 'O', not one of float64, "),
            ('"float32"', "[1]", "dtype is [1], not one of"),
            ("[2, 3]", "[2, -3]", "tensor 'b': shape is [2, -3], not a list of sizes"),
            ("[2, 3]", "[2, true]", "not a list of sizes"),
            ("[2, 3]", f"[{10**19}]", "not a list of sizes"),
            ("[2, 3]", f"[{'9' * 5000}]", "not a manifest"),
            ("[2, 3]", "[2, NaN]", "NaN is not JSON"),
            # Python 3.14 parses tens of thousands of levels.
            ("[2, 3]", "[" * 200_000 + "]" * 200_000, "nested too deeply"),
            ('"elements"', '"all"', "kind is 'all', not one of elements, decoded, nonzero"),
            ('"sha256": "', '"sha256": "A', "not 64 hexadecimal digits in lower case"),
            ('"kind"', '"sort"', "must have the fields dtype, shape, kind, sha256"),
            ('"a": {', '"b": {', "'b' is there twice"),
            ("[2, 3]", "[3, 2]", "it was changed"),
            ("}}", "}", "not a manifest"),
        ],
    )
    def test_differences_are_findings(self, old: str, new: str, message: str) -> None:
        text = manifest(dataset({"a": np.ones(3, "i4"), "b": np.ones((2, 3), "f4")})).to_json()
        assert old in text
        with pytest.raises(FormatError) as error:
            Manifest.read(text.replace(old, new, 1).encode())
        assert message in str(error.value)
        assert "Write one with: xckpt manifest FILE > m.json" in str(error.value)
        assert len(str(error.value)) < 600

    @pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"null", b'{"format": 1}'])
    def test_files_that_are_not_manifests(self, data: bytes, model: Path) -> None:
        with pytest.raises(FormatError, match="not a manifest"):
            Manifest.read(data)
        (model.parent / "m.json").write_bytes(data)
        with pytest.raises(FormatError, match=r"m\.json: not a manifest"):
            verify(model, manifest=model.parent / "m.json")

    def test_wrong_arguments(self, model: Path) -> None:
        with pytest.raises(TypeError, match="expected a path"):
            manifest(7)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="apply to a path or URL"):
            manifest(dataset(WEIGHTS), "ztensor")
        with pytest.raises(FileNotFoundError):
            verify(model, manifest=model.with_name("absent.json"))
        with pytest.raises(ValueError, match="matches none of the 4 tensors"):
            manifest(model, tensors="absent")


def test_progress_counts_all_bytes_and_can_end_it(model: Path) -> None:
    reports: list[tuple[int, int]] = []
    expected = manifest(model, progress=lambda *nbytes: reports.append(nbytes))
    total = sum(tensor.nbytes for tensor in xckpt.read_index(model).tensors.values())
    assert reports[-1] == (total, total)
    reports.clear()
    verify(model, manifest=expected, progress=lambda *nbytes: reports.append(nbytes))
    assert reports[-1] == (total, total)

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manifest(model, progress=stop)
