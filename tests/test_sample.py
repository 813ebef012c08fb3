"""The sample checkpoint, read back with nothing of the package but its element types."""

from __future__ import annotations

import errno
import io
import operator
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cbor2
import google_crc32c
import numpy as np
import pytest
import zstandard

from xckpt.elements import stored_dtype
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

LAYERS = 4
WIDTH = 64


@dataclass
class Container:
    """A zTensor 1.0 file, parsed by sections 3 to 5 of its specification."""

    data: bytes

    @property
    def manifest_start(self) -> int:
        return len(self.data) - 8 - int.from_bytes(self.data[-8:], "little")

    @property
    def manifest(self) -> dict[str, Any]:
        file = io.BytesIO(self.data[self.manifest_start : -8])
        manifest: dict[str, Any] = cbor2.load(file)
        assert not file.read(), "bytes after the manifest"
        return manifest

    @property
    def tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = self.manifest["tensors"]
        return tensors

    def blob(self, component: dict[str, Any]) -> bytes:
        start = component["offset"]
        return self.data[start : start + component["length"]]

    def part(self, name: str, role: str, dtype: str | None = None) -> NDArray[Any]:
        component = self.tensors[name]["components"][role]
        data = self.blob(component)
        if component.get("encoding") == "zstd":
            data = zstandard.ZstdDecompressor().stream_reader(data).read()
        return np.frombuffer(data, stored_dtype(dtype or self.tensors[name]["dtype"]))

    def dense(self, name: str) -> NDArray[Any]:
        return self.part(name, "data").reshape(self.tensors[name]["shape"])

    def float64(self, name: str) -> NDArray[np.float64]:
        return self.dense(name).astype(np.float64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sample") / "m.zt"
    assert write_checkpoint(target, layers=LAYERS, width=WIDTH) == target
    return target


@pytest.fixture(scope="module")
def container(path: Path) -> Container:
    return Container(path.read_bytes())


def components(container: Container) -> list[dict[str, Any]]:
    """Return all components in the order of their data."""
    parts = [part for t in container.tensors.values() for part in t["components"].values()]
    return sorted(parts, key=operator.itemgetter("offset"))


# --- container -----------------------------------------------------------------------------------


def test_blobs_are_aligned_and_the_rest_is_zero(container: Container) -> None:
    assert container.data[:8] == b"ZTEN1000"
    end = 8
    for component in components(container):
        assert component["offset"] == -(-end // 64) * 64
        assert not any(container.data[end : component["offset"]])
        end = component["offset"] + component["length"]
    assert end == container.manifest_start


def test_manifest_has_the_fields_of_the_specification(container: Container) -> None:
    manifest = container.manifest
    assert manifest["version"] == "1.0"
    assert {"license", "description", "framework", "model_name"} <= manifest["attributes"].keys()
    assert all(type(value) is str for value in manifest["attributes"].values())
    for tensor in manifest["tensors"].values():
        assert tensor.keys() == {"dtype", "shape", "format", "components"}


def test_digests_cover_the_stored_bytes(container: Container) -> None:
    for component in components(container):
        assert (
            component["digest"] == f"crc32c:0x{google_crc32c.value(container.blob(component)):08X}"
        )


def test_some_projections_are_compressed(container: Container) -> None:
    compressed = {
        name
        for name, tensor in container.tensors.items()
        for component in tensor["components"].values()
        if component.get("encoding") == "zstd"
    }
    assert {name.split(".", 3)[3] for name in compressed} == {
        *("self_attn.k_proj.weight", "self_attn.v_proj.weight", "mlp.down_proj.weight"),
    }
    assert len(compressed) == 3 * LAYERS


# --- tensors -------------------------------------------------------------------------------------


def test_dense_tensors_have_their_shapes(container: Container) -> None:
    dense = [name for name, t in container.tensors.items() if t["format"] == "dense"]
    assert len(dense) == 3 + 11 * LAYERS
    for name in dense:
        assert container.dense(name).shape == tuple(container.tensors[name]["shape"])


def test_element_types_and_layouts(container: Container) -> None:
    kinds = {(t["dtype"], t["format"]) for t in container.tensors.values()}
    assert kinds == {
        ("float16", "dense"),
        ("bfloat16", "dense"),
        ("float32", "dense"),
        ("int8", "dense"),
        ("float32", "sparse_csr"),
        ("float32", "sparse_coo"),
    }


def test_csr_is_valid(container: Container) -> None:
    name = "model.embed_tokens.delta"
    nrows, ncols = container.tensors[name]["shape"]
    indptr = container.part(name, "indptr", "uint64").astype(int)
    indices = container.part(name, "indices", "uint64")
    assert len(indptr) == nrows + 1
    assert indptr[0] == 0
    assert set(np.diff(indptr)) == {0, ncols}
    assert indptr[-1] == len(indices) == len(container.part(name, "values"))
    assert indices.max() == ncols - 1


def test_coo_is_valid(container: Container) -> None:
    name = "lm_head.delta"
    coords = container.part(name, "coords", "uint64").astype(int).reshape(2, -1)
    assert coords.shape[1] == len(container.part(name, "values"))
    assert (coords.max(axis=1) < container.tensors[name]["shape"]).all()
    flat = np.ravel_multi_index(tuple(coords), container.tensors[name]["shape"])
    assert (np.diff(flat) > 0).all(), "sorted, without duplicates"


def test_int8_codes_times_scales_have_the_spread_of_an_output_projection(
    container: Container,
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    codes = container.dense(name)
    assert np.abs(codes.astype(int)).max(axis=1).tolist() == [127] * WIDTH
    values = codes * container.dense(f"{name}_scale")
    assert values.std() == pytest.approx(0.02 / np.sqrt(2 * LAYERS), rel=0.05)


# --- what statistics find ------------------------------------------------------------------------


def test_spread_grows_with_depth(container: Container) -> None:
    names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(LAYERS)]
    spreads = [container.float64(name).std() for name in names]
    expected = [0.02 * (1 + n / LAYERS) for n in range(LAYERS)]
    assert spreads == pytest.approx(expected, rel=0.05)


def test_one_tensor_has_nans(container: Container) -> None:
    names = [n for n, t in container.tensors.items() if t["format"] == "dense"]
    counts = {n: int(np.isnan(container.float64(n)).sum()) for n in names}
    assert {n: c for n, c in counts.items() if c} == {"model.layers.2.mlp.up_proj.weight": 7}


def test_one_bias_is_zero(container: Container) -> None:
    names = [n for n in container.tensors if n.endswith("bias")]
    assert len(names) == LAYERS
    zero = [n for n in names if not container.dense(n).any()]
    assert zero == ["model.layers.1.self_attn.q_proj.bias"]


def test_one_column_of_a_gate_has_outliers(container: Container) -> None:
    spreads = container.float64("model.layers.0.mlp.gate_proj.weight").std(axis=0)
    assert spreads.argmax() == WIDTH // 3
    assert spreads.max() > 10 * np.median(spreads)


# --- writing -------------------------------------------------------------------------------------


def test_equal_arguments_give_equal_bytes(path: Path, tmp_path: Path) -> None:
    again = write_checkpoint(tmp_path / "again.zt", layers=LAYERS, width=WIDTH)
    other_seed = write_checkpoint(tmp_path / "other.zt", layers=LAYERS, width=WIDTH, seed=1)
    assert again.read_bytes() == path.read_bytes()
    assert other_seed.read_bytes() != path.read_bytes()


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m.zt"
    target.write_bytes(b"old")

    def disk_full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(target, layers=1, width=16)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("arguments", [{"layers": 0}, {"width": 4}, {"width": 18}])
def test_unsuitable_sizes_are_refused(tmp_path: Path, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        write_checkpoint(tmp_path / "m.zt", **arguments)
    assert not list(tmp_path.iterdir())
