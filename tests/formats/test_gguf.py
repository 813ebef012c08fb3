"""GGUF: blocks against the package gguf, metadata types, split models, names of axes."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import struct
import sys
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import fsspec
import gguf
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.conftest import golden_files
from tests.contracts.declared import assert_same, golden_json
from tests.formats.gguf_files import gguf_file, listed, text
from tests.sources import CountingSource
from xckpt import formats
from xckpt.arrays import ReadOptions, lazy_arrays
from xckpt.arrays.blocks import byteswapped
from xckpt.elements import BLOCK_TYPES
from xckpt.errors import UnreadableWarning
from xckpt.opening import read_index
from xckpt.structure.dims import axes_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CODES = {t.name.lower(): int(t) for t in gguf.GGMLQuantizationType} | {"q2_0": 42}
# Types that the package can dequantise.
ORACLE = sorted(set(BLOCK_TYPES) - {"q8_1", "q8_k", "q1_0", "q2_0"})
ROWS, BLOCKS = 5, 3


def u32(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def random_blocks(name: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Make rows of blocks of any bits at all."""
    block = BLOCK_TYPES[name]
    random = np.random.default_rng(seed)
    row_nbytes = shape[-1] // block.size * block.nbytes
    return random.integers(0, 256, (*shape[:-1], row_nbytes), np.uint8)


def block_file(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], attrs: dict[str, bytes] | None = None
) -> bytes:
    """Write tensors of blocks."""
    infos, data = [], b""
    for name, (kind, shape) in tensors.items():
        infos.append((name, shape[::-1], CODES[kind], len(data)))
        data += random_blocks(kind, shape).tobytes()
        data += bytes(-len(data) % 32)
    return gguf_file(attrs or {}, infos, data)


def values_of(name: str, shape: tuple[int, ...]) -> Any:
    """Let the package decode the same blocks."""
    with np.errstate(all="ignore"):
        kind = gguf.GGMLQuantizationType(CODES[name])
        return gguf.quants.dequantize(random_blocks(name, shape), kind)


def assert_same_bits(got: Any, expected: Any) -> None:
    """Compare bits, except those of NaN."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    same = (got.view("u4") == expected.view("u4")) | (np.isnan(got) & np.isnan(expected))
    assert same.all()


class TestBlocks:
    @pytest.mark.parametrize("name", ORACLE)
    def test_any_bits_decode_as_the_package_decodes_them(self, name: str) -> None:
        shape = (ROWS, BLOCKS * BLOCK_TYPES[name].size)
        ds = xr.open_dataset(block_file({"w": (name, shape)}), engine="gguf")
        assert_same_bits(ds["w"].values, values_of(name, shape))
        assert ds["w"].encoding["stored_dtype"] == name

    def test_block_sizes_equal_those_of_ggml(self) -> None:
        sizes = {t.name.lower(): size for t, size in gguf.GGML_QUANT_SIZES.items()}
        wrong = {"q8_1": (32, 40)}  # of the package: a block has two float16 and 32 codes
        for name, block in BLOCK_TYPES.items():
            if name != "q2_0":  # is newer than the package
                assert sizes[name] == wrong.get(name, (block.size, block.nbytes))

    @pytest.mark.parametrize(
        "key",
        [
            (3,),
            (slice(1, 4), slice(250, 270)),
            (slice(None, None, 2), 5),
            (slice(None, None, -1), slice(None, None, 7)),
            (np.array([4, 0, 4]), slice(None)),
            (slice(None), np.array([767, 0, 300])),
            (4, -1),
            (slice(2, 2), slice(None)),
        ],
    )
    def test_a_selection_has_the_same_values(self, key: Any) -> None:
        shape = (ROWS, 768)
        index, sources = indexed(block_file({"w": ("q4_k", shape)}))
        lazy = lazy_arrays(index.tensors["w"], sources, ReadOptions())[None]
        expected = values_of("q4_k", shape)[key]
        assert_same_bits(np.array(lazy[key]), np.array(expected))
        out = np.empty(expected.shape, np.float32)
        lazy.read_into(out, key)
        assert_same_bits(out, np.array(expected))

    def test_scattered_rows_are_decoded_a_few_at_a_time(self) -> None:
        shape = (600, 1024)
        index, sources = indexed(block_file({"w": ("q8_0", shape)}))
        lazy = lazy_arrays(index.tensors["w"], sources, ReadOptions())[None]
        expected = values_of("q8_0", shape)
        for key in [(slice(None), 1000), (slice(0, None, 50), slice(None)), (slice(5, None, 7), 3)]:
            assert_same_bits(np.array(lazy[key]), np.array(expected[key]))
        sources[None].reads.clear()
        lazy[::299, 40:60]
        assert sum(nbytes for _, nbytes in sources[None].reads) == 3 * 34  # one block of each row

    def test_ranges_to_read_are_known_in_advance(self) -> None:
        index, sources = indexed(block_file({"w": ("q8_0", (4, 64))}))
        lazy = lazy_arrays(index.tensors["w"], sources, ReadOptions())[None]
        [(source, offset, nbytes)] = lazy.ranges((2, slice(30, 40)))
        sources[None].reads.clear()
        lazy[2, 30:40]
        assert sources[None].reads == [(offset, nbytes)]
        assert (source, nbytes) == (sources[None], 2 * 34)

    def test_chunks_are_whole_blocks(self) -> None:
        index, sources = indexed(block_file({"w": ("q6_k", (4, 2048))}))
        lazy = lazy_arrays(index.tensors["w"], sources, ReadOptions())[None]
        assert lazy.chunks(1 << 20) == ((4,), (2048,))
        assert lazy.chunks(8192) == ((1, 1, 1, 1), (2048,))
        assert lazy.chunks(3000) == ((1, 1, 1, 1), (512, 512, 512, 512))
        assert lazy.chunks(1) == ((1, 1, 1, 1), (256,) * 8)

    def test_layers_of_several_types_are_one_stack(self) -> None:
        shape = (4, 256)
        kinds = {"blk.0.w": ("q4_k", shape), "blk.1.w": ("q6_k", shape), "blk.2.w": ("q8_0", shape)}
        file = block_file(kinds)
        ds = xr.open_dataset(file, engine="gguf", stack=True)
        assert ds["blk.w"].shape == (3, *shape)
        assert ds["blk.w"].encoding["stored_dtype"] == "q4_k, q6_k, q8_0"
        for number, (kind, _) in enumerate(kinds.values()):
            full = values_of(kind, shape)
            alone = xr.open_dataset(file, engine="gguf")[f"blk.{number}.w"].values
            assert_same_bits(ds["blk.w"][number].values, alone)
            assert alone.shape == full.shape
        parts = xr.open_dataset(file, engine="gguf", stack=True, decode=False)
        assert set(parts) == {f"{name}:data" for name in kinds}

    def test_statistics_are_those_of_the_values(self) -> None:
        random = np.random.default_rng(1)
        values = random.normal(size=(70, 512)).astype("f4")
        blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        file = gguf_file({}, [("w", (512, 70), 8, 0)], blocks.tobytes())
        ds = xr.open_dataset(file, engine="gguf")
        plain = xr.Dataset({"w": (("d70", "d512"), ds["w"].values)})
        xr.testing.assert_allclose(ds.ckpt.stats(), plain.ckpt.stats(), rtol=1e-12)
        comparison = xckpt.compare(ds, plain)["w"]
        assert float(comparison.sel(statistic="max_abs")) == 0


def indexed(data: bytes) -> tuple[Any, Any]:
    source = CountingSource(data)
    return formats.get("gguf").read(source), {None: source}


def is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(entry, list) for entry in value)


class TestSaving:
    def test_keys_that_gguf_lacks_cause_a_warning(self, tmp_path: Path) -> None:
        attrs = {"a.b-c_1": 1, "worldSize": 2, "": 3, "k" * 65536: 4}
        ds = xr.Dataset({"w": ("x", np.ones(2, "f4"))}, attrs=attrs)
        with pytest.warns(xckpt.CheckpointWarning, match="'worldSize', '', 'kkk") as caught:
            xckpt.save(ds, tmp_path / "m.gguf")
        assert len(caught) == 1
        assert read_index(tmp_path / "m.gguf").attrs == {"a.b-c_1": 1}

    @pytest.mark.parametrize("path", golden_files("gguf/*.gguf"))
    def test_data_and_metadata_survive_saving(self, path: Path, tmp_path: Path) -> None:
        copied = tmp_path / "m.gguf"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", xckpt.CheckpointWarning)
            ds, index = xr.open_dataset(path, engine="gguf"), read_index(path)
            xckpt.save(ds, copied, long_names=True)
            if ds.attrs.get("general.alignment") == 4:
                ds.attrs["general.alignment"] = 32  # which GGUF allows
            again, new = xr.open_dataset(copied, engine="gguf"), read_index(copied)
        # Keys that GGUF does not allow are read, but not written; nor are lists of lists.
        attrs = {
            key: json.dumps(value) if is_nested(value) else value
            for key, value in ds.attrs.items()
            if re.fullmatch(r"(?!split\.)[a-z0-9_.-]+", key)
        }
        assert repr({k: spelled(v) for k, v in again.attrs.items()}) == repr(
            {k: spelled(v) for k, v in attrs.items()}
        )
        assert new.attr_types == {
            key: dtype
            for key, dtype in index.attr_types.items()
            if key in attrs and not is_nested(ds.attrs[key])
        }
        assert list(new.tensors) == list(index.tensors)
        is_little = all(
            part.byteorder == "little" for t in index.tensors.values() for part in t.parts.values()
        )
        for name, tensor in index.tensors.items() if is_little else []:
            old = path.with_name(tensor.parts["data"].shard or path.name).read_bytes()
            assert stored(copied.read_bytes(), new.tensors[name]) == stored(old, tensor)
            assert new.tensors[name].dtype == tensor.dtype
        for key, variable in ds.variables.items():
            assert_same(again[key].values, variable.values)

    def test_a_small_alignment_is_written_as_the_usual_one(self, tmp_path: Path) -> None:
        file = gguf_file({"general.alignment": u32(4)}, W, struct.pack("<f", 2.5), alignment=4)
        (tmp_path / "old.gguf").write_bytes(file)
        with pytest.warns(xckpt.CheckpointWarning) as caught:
            xckpt.convert(tmp_path / "old.gguf", tmp_path / "new.gguf")
        assert "less than 8, written as 32: 'general.alignment'" in str(caught[-1].message)
        new = read_index(tmp_path / "new.gguf")
        assert (new.attrs, new.warnings) == ({"general.alignment": 32}, ())
        assert new.tensors["w"].parts["data"].offset % 32 == 0
        assert xr.open_dataset(tmp_path / "new.gguf")["w"].values == [2.5]

    def test_an_error_about_an_alignment_names_the_option(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "m.npz", w=np.ones(2, "f4"))
        target, attrs = tmp_path / "m.gguf", {"general.alignment": 3}
        with pytest.raises(xckpt.UnsupportedError, match=r"unset_attrs='general\.alignment'"):
            xckpt.convert(tmp_path / "m.npz", target, set_attrs=attrs)

    def test_the_package_reads_what_is_written(self, tmp_path: Path) -> None:
        attrs: dict[str, Any] = {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "eps": 1e-5,
            "half": 0.5,
            "negative": -1,
            "large": 1 << 40,
            "huge": 1 << 63,
            "flag": True,
            "per_layer": [1, 2, 3],
            "flags": [True, False],
            "scores": [0.5, -1.0],
            "texts": ["a", "ü", ""],
            "nested": [[1, 2], [], [3]],
            "mapping": {"a": [None]},
            "nothing": None,
            "mixed": [1, "a"],
        }
        w = np.arange(12, dtype="f4").reshape(3, 4)
        ds = xr.Dataset({"w": (("out", "in"), w), "b": ("out", np.ones(3, "f2"))}, attrs=attrs)
        xckpt.save(ds, tmp_path / "m.gguf")
        reader = gguf.GGUFReader(tmp_path / "m.gguf")
        kinds = {name: field.types for name, field in reader.fields.items() if "." not in name[:5]}
        value = gguf.GGUFValueType
        assert kinds["llama.block_count"] == [value.UINT32]
        assert (kinds["eps"], kinds["half"]) == ([value.FLOAT64], [value.FLOAT32])
        assert (kinds["negative"], kinds["large"]) == ([value.INT32], [value.UINT64])
        assert kinds["flags"] == [value.ARRAY, value.BOOL]
        assert kinds["per_layer"] == [value.ARRAY, value.INT32]
        assert kinds["mapping"] == kinds["nested"] == [value.STRING]
        assert reader.fields["texts"].contents() == attrs["texts"]
        assert reader.fields["huge"].contents() == attrs["huge"]
        assert [(t.name, t.data.tolist()) for t in reader.tensors] == [
            ("w", w.tolist()),
            ("b", [1.0, 1.0, 1.0]),
        ]
        again = xr.open_dataset(tmp_path / "m.gguf")
        changed = {"mapping": '{"a": [null]}', "nothing": "null", "mixed": '[1, "a"]'}
        changed |= {"nested": "[[1, 2], [], [3]]"}  # which ggml has no type for
        assert again.attrs == attrs | changed
        assert again["w"].dims == ("out", "in")

    def test_a_type_is_kept_until_a_value_does_not_fit_it(self, tmp_path: Path) -> None:
        entries = {"a": struct.pack("<IB", 0, 7), "b": struct.pack("<IB", 0, 7)}
        entries |= {"c": struct.pack("<Id", 12, 0.5), "d": listed(0, [b"\1", b"\2"])}
        ds = xr.open_dataset(gguf_file(entries, [], b""), engine="gguf")
        ds.attrs["b"] = 300
        xckpt.save(ds, tmp_path / "m.gguf")
        fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
        value = gguf.GGUFValueType
        kinds = [fields[key].types[-1] for key in "abcd"]
        assert kinds == [value.UINT8, value.UINT32, value.FLOAT64, value.UINT8]

    @pytest.mark.parametrize(
        ("value", "stored"),
        [([0, 1.5], [0.0, 1.5]), ([2**60 + 1, 0.5], "[1152921504606846977, 0.5]")],
    )
    def test_mixed_numbers_are_floats_if_these_hold_them(
        self, value: list[float], stored: Any, tmp_path: Path
    ) -> None:
        xckpt.save(
            xr.Dataset({"w": ("x", np.ones(4, "f4"))}, {}, {"n": value}), tmp_path / "m.gguf"
        )
        assert read_index(tmp_path / "m.gguf").attrs["n"] == stored

    @pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q6_k", "mxfp4"])
    def test_big_endian_blocks_are_swapped(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("xckpt.writing.streaming.BLOCK_NBYTES", 1000)  # which cuts blocks
        file = block_file({"w": (name, (16, 512))})
        (tmp_path / "little.gguf").write_bytes(file)
        part = read_index(tmp_path / "little.gguf").tensors["w"].parts["data"]
        head = struct.pack(">IQQQ", 3, 1, 0, 1) + b"w" + struct.pack(">IQQ", 2, 512, 16)
        head = b"GGUF" + head + struct.pack(">IQ", CODES[name], 0)
        blocks = byteswapped(memoryview(file)[part.offset : part.offset + part.nbytes], name, 0)
        big = head + bytes(-len(head) % 32) + bytes(blocks)
        ds = xr.open_dataset(big, engine="gguf")
        assert_same_bits(ds["w"].values, xr.open_dataset(file, engine="gguf")["w"].values)
        xckpt.save(ds, tmp_path / "m.gguf")
        assert (tmp_path / "m.gguf").read_bytes() == file

    def test_nothing_is_quantised(self, tmp_path: Path) -> None:
        ds = xr.Dataset({"w": ("x", np.ones(256, "f4"))})
        with pytest.raises(xckpt.UnsupportedError, match="nothing is quantised"):
            xckpt.save(ds, tmp_path / "m.gguf", encoding={"*": {"dtype": "q4_k"}})
        assert not (tmp_path / "m.gguf").exists()

    def test_computed_values_are_written_as_float32(self, tmp_path: Path) -> None:
        ds = xr.open_dataset(block_file({"w": ("q8_0", (2, 64))}), engine="gguf")
        ds["w"] = ds["w"].copy(data=ds["w"].data * 2)
        with pytest.warns(xckpt.CheckpointWarning, match="written dense"):
            xckpt.save(ds, tmp_path / "m.gguf")
        assert read_index(tmp_path / "m.gguf").tensors["w"].dtype == "float32"

    @pytest.mark.parametrize(("dtype", "code"), [(None, 0), ("float16", 1), ("bfloat16", 32)])
    @pytest.mark.filterwarnings("ignore:.*(infinity or NaN|computed element)")
    def test_values_have_the_file_type_of_their_elements(
        self, dtype: str | None, code: int, tmp_path: Path
    ) -> None:
        ds = xckpt.open(block_file({"w": ("q8_0", (2, 64))}))
        ds = ds.assign_attrs({"general.file_type": 7})
        ds.ckpt.save(tmp_path / "same.gguf")
        assert read_index(tmp_path / "same.gguf").attrs["general.file_type"] == 7
        with pytest.warns(xckpt.CheckpointWarning, match="computed are written dense, .*: .w.$"):
            ((ds + ds) / 2).ckpt.save(tmp_path / "new.gguf", dtype=dtype, cast="allow")
        index = read_index(tmp_path / "new.gguf")
        assert index.tensors["w"].dtype == (dtype or "float32")
        assert index.attrs["general.file_type"] == code

    def test_a_file_of_several_types_is_not_all_of_one(self, tmp_path: Path) -> None:
        tensors = {"w": ("o", np.ones(64, "f4")), "norm": ("i", np.ones(4, "f4"))}
        ds = xr.Dataset(tensors, attrs={"general.architecture": "x", "general.file_type": 0})
        xckpt.save(ds, tmp_path / "a.gguf")
        assert read_index(tmp_path / "a.gguf").attrs["general.file_type"] == 0
        xckpt.convert(
            tmp_path / "a.gguf", tmp_path / "b.gguf", encoding={"w": {"dtype": "float16"}}
        )
        assert read_index(tmp_path / "b.gguf").attrs["general.file_type"] == 1

    def test_moved_layers_keep_their_blocks(self, tmp_path: Path) -> None:
        shape = (4, 256)
        kinds = {"blk.0.w": ("q4_k", shape), "blk.1.w": ("q6_k", shape), "blk.2.w": ("q8_0", shape)}
        ds = xckpt.open(block_file(kinds), stack=True)
        moved = ds.isel(blk=[2, 0, 0, 1]).assign_coords(blk=range(4))
        xckpt.save(moved.assign_attrs({"general.architecture": "x"}), tmp_path / "m.gguf")
        again = xckpt.open(tmp_path / "m.gguf")
        assert [again[n].encoding["stored_dtype"] for n in again] == [
            "q8_0",
            "q4_k",
            "q4_k",
            "q6_k",
        ]
        assert_same_bits(again["blk.0.w"].values, ds["blk.w"][2].values)

    def test_parts_become_blocks_again(self, tmp_path: Path) -> None:
        file = block_file({"w": ("q4_k", (2, 512))})
        ds = xr.open_dataset(file, engine="gguf", decode=False)
        assert ds["w:data"].dtype == "uint8"
        assert ds["w:data"].shape == (2, 288)
        xckpt.save(ds, tmp_path / "m.gguf")
        assert (tmp_path / "m.gguf").read_bytes() == file

    def test_other_formats_get_the_values(self, tmp_path: Path) -> None:
        file = block_file(
            {"w": ("q4_0", (2, 64))}, {"tokens": listed(8, [struct.pack("<Q", 1) + b"t"] * 300)}
        )
        (tmp_path / "m.gguf").write_bytes(file)
        with pytest.warns(xckpt.CheckpointWarning, match="blocks tensors written dense"):
            xckpt.convert(tmp_path / "m.gguf", tmp_path / "m.safetensors")
        ds = xr.open_dataset(tmp_path / "m.safetensors")
        assert_same_bits(ds["w"].values, values_of("q4_0", (2, 64)))
        assert ds.attrs["tokens"] == ["t"] * 300

    def test_names_beyond_the_limit_of_other_readers(self, tmp_path: Path) -> None:
        for name, advice in [("n" * 64, "long_names=True"), ("a\0b", "Rename")]:
            ds = xr.Dataset({name: ("x", np.ones(1, "f4"))})
            with pytest.raises(xckpt.UnsupportedError, match=advice):
                xckpt.save(ds, tmp_path / "m.gguf")
        xckpt.save(xr.Dataset({"n" * 64: ("x", np.ones(1))}), tmp_path / "m.gguf", long_names=True)

    def test_five_axes_are_refused(self, tmp_path: Path) -> None:
        ds = xr.Dataset({"w": (tuple("abcde"), np.ones((1,) * 5, "f4"))})
        with pytest.raises(xckpt.UnsupportedError, match="5 axes"):
            xckpt.save(ds, tmp_path / "m.gguf")


def spelled(value: Any) -> str:
    return repr(value.tolist() if hasattr(value, "tolist") else value)


def stored(data: bytes, tensor: Any) -> bytes:
    part = tensor.parts["data"]
    return data[part.offset : part.offset + part.nbytes]


class TestLists:
    TOKENS: tuple[str | bytes, ...] = ("ab", "", "ü", b"\xff\xfe", *map(str, range(400)))

    def file(self) -> bytes:
        texts = [t.encode() if isinstance(t, str) else t for t in self.TOKENS]
        entries = [struct.pack("<Q", len(t)) + t for t in texts]
        scores = [struct.pack("<f", n / 2) for n in range(300)]
        attrs = {"tokens": listed(8, entries), "scores": listed(6, scores), "short": u32(1)}
        return gguf_file(attrs, [("w", [1], 0, 0)], bytes(4))

    def test_long_lists_are_read_on_demand(self) -> None:
        attrs = xr.open_dataset(self.file(), engine="gguf").attrs
        assert repr(attrs["tokens"]) == "<list of 404 texts>"
        assert len(attrs["tokens"]) == 404
        assert tuple(attrs["tokens"]) == self.TOKENS
        assert attrs["tokens"][:3] == ["ab", "", "ü"]
        assert np.asarray(attrs["scores"])[:3].tolist() == [0, 0.5, 1]
        assert attrs["tokens"] == list(self.TOKENS)
        assert attrs["tokens"] != attrs["scores"]

    def test_a_dataset_with_long_lists_pickles_and_copies(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(self.file())
        ds = xr.open_dataset(tmp_path / "m.gguf")
        xr.testing.assert_identical(ds, copy.deepcopy(ds))
        data = pickle.dumps(ds)
        assert len(data) < len(pickle.dumps(list(self.TOKENS)))
        assert tuple(pickle.loads(data).attrs["tokens"]) == self.TOKENS
        assert "404 items" in repr(ds.ckpt)
        assert "404 items" in repr(read_index(tmp_path / "m.gguf"))

    def test_no_text_is_made_at_opening(self) -> None:
        """A list of ten times as many texts takes no more memory."""
        stored = indexed(self.file())[0].attrs["tokens"]
        assert (stored.count, stored.part.dtype, stored.length_nbytes) == (404, "uint8", 8)


class TestSplit:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for number in range(3):
            attrs = {"general.architecture": text("llama")} if number == 0 else {}
            attrs |= {"tokens": listed(4, [bytes(4)] * 300)} if number == 0 else {}
            attrs |= {"split.no": struct.pack("<IH", 2, number)}
            attrs |= {"split.count": struct.pack("<IH", 2, 3)}
            attrs |= {"split.tensors.count": struct.pack("<Ii", 5, 3)}
            data = struct.pack("<f", number)
            file = gguf_file(attrs, [(f"blk.{number}.w", [1], 0, 0)], data)
            (tmp_path / f"m-{number + 1:05d}-of-00003.gguf").write_bytes(file)
        return tmp_path

    def names(self, obj: Any) -> dict[str, float]:
        ds = xr.open_dataset(obj, engine="gguf")
        return {str(name): float(variable[0]) for name, variable in ds.items()}

    def test_any_of_the_files_opens_all(self, folder: Path) -> None:
        full = {"blk.0.w": 0.0, "blk.1.w": 1.0, "blk.2.w": 2.0}
        for number in (1, 2, 3):
            assert self.names(folder / f"m-{number:05d}-of-00003.gguf") == full
        ds = xr.open_dataset(folder / "m-00003-of-00003.gguf", engine="gguf")
        assert ds.attrs["general.architecture"] == "llama"
        assert list(ds.attrs["tokens"]) == [0] * 300
        assert pickle.loads(pickle.dumps(ds))["blk.0.w"].values == [0]

    @pytest.mark.skipif(sys.platform == "win32", reason="no file has such a name")
    def test_an_unsafe_name_of_a_split_file_is_an_error(self, folder: Path) -> None:
        """Others are only opened by names without control characters."""
        paths = sorted(folder.iterdir())
        odd = [path.rename(folder / path.name.replace("m-", "m\x01-")) for path in paths]
        with pytest.raises(xckpt.CheckpointError, match="not the name of a file") as caught:
            read_index(odd[1])
        assert caught.value.path == str(odd[1])
        assert caught.value.offset is not None
        assert len(self.names([*odd])) == 3

    def test_folders_globs_and_lists_open_them_too(self, folder: Path) -> None:
        assert len(self.names(folder)) == 3
        assert len(self.names(str(folder / "m-*.gguf"))) == 3
        assert list(self.names([folder / "m-00002-of-00003.gguf"])) == ["blk.1.w"]

    def test_split_files_open_on_other_file_systems(self, folder: Path) -> None:
        for path in folder.iterdir():
            fsspec.filesystem("memory").pipe(f"/split/{path.name}", path.read_bytes())
        assert len(self.names("memory://split/m-00002-of-00003.gguf")) == 3

    def test_names_in_upper_case_open_all(self, folder: Path) -> None:
        for path in folder.iterdir():
            path.rename(folder / path.name.upper())
        assert len(self.names(folder / "M-00002-OF-00003.GGUF")) == 3
        assert len(self.names(folder)) == 3

    def test_parts_that_were_joined_are_an_error(self, folder: Path) -> None:
        parts = [path.read_bytes() for path in sorted(folder.iterdir())]
        with pytest.raises(xckpt.FormatError, match="joined into one") as caught:
            self.names(b"".join(parts))
        assert "llama-gguf-split --merge" in str(caught.value.hint)

    def test_split_files_are_saved_as_one(self, folder: Path) -> None:
        xckpt.save(xr.open_dataset(folder, engine="gguf"), folder / "whole.gguf")
        assert not [k for k in read_index(folder / "whole.gguf").attrs if k.startswith("split")]
        xckpt.convert(folder / "m-00001-of-00003.gguf", folder / "more.gguf")
        assert (folder / "more.gguf").read_bytes() == (folder / "whole.gguf").read_bytes()

    def test_a_missing_split_file_is_named(self, folder: Path) -> None:
        (folder / "m-00002-of-00003.gguf").unlink()
        with pytest.raises(xckpt.MissingShardError, match="m-00002-of-00003"):
            xr.open_dataset(folder / "m-00001-of-00003.gguf", engine="gguf")

    def test_a_renamed_split_file_is_read_alone(self, folder: Path) -> None:
        path = (folder / "m-00001-of-00003.gguf").rename(folder / "m.gguf")
        with pytest.warns(xckpt.CheckpointWarning, match="1 of 3.*'-00001-of-00003.gguf'"):
            assert list(xr.open_dataset(path, engine="gguf")) == ["blk.0.w"]


class TestAxes:
    @pytest.mark.parametrize("path", golden_files("gguf/model_llama.gguf"))
    def test_names_follow_from_the_metadata(self, path: Path) -> None:
        ds = xr.open_dataset(path, engine="gguf")
        axes = golden_json(path)["axes"]
        assert {name: list(ds[name].dims) for name in axes if name in ds} == {
            name: dims for name, dims in axes.items() if name in ds
        }

    def test_sizes_may_differ_by_layer(self) -> None:
        widths = [2] * 19 + [4]
        attrs = {
            "general.architecture": text("deci"),
            "deci.embedding_length": u32(8),
            "deci.feed_forward_length": listed(4, [struct.pack("<I", n) for n in widths]),
        }
        tensors = [(f"blk.{n}.ffn_up.weight", [8, w], 0, 0) for n, w in enumerate(widths)]
        tensors += [("blk.0.ffn_down.bias", [8], 0, 0), ("blk.0.ffn_gate.weight", [8, 3], 0, 0)]
        index, _ = indexed(gguf_file(attrs, tensors, bytes(128)))
        dims = axes_of(index)
        assert {dims[f"blk.{n}.ffn_up.weight"] for n in range(20)} == {("ff", "embd")}
        assert dims["blk.0.ffn_down.bias"] == ("embd",)
        assert dims["blk.0.ffn_gate.weight"] == (None, "embd")


W = [("w", [1], 0, 0)]
# A malformed file, the broken rule, and the offset in the error.
MALFORMED = {
    "version": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "Version"),
    "counts": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "Count"),
    "alignment of 3": (gguf_file({"general.alignment": u32(3)}, [], b""), "Alignment"),
    "alignment of text": (gguf_file({"general.alignment": text("8")}, [], b""), "Alignment"),
    "value type": (gguf_file({"k": struct.pack("<IQ", 13, 0)}, [], b""), "ValueType"),
    "list of 2**61": (gguf_file({"k": struct.pack("<IIQ", 9, 12, 1 << 61)}, [], b""), "Truncated"),
    "text of 2**63": (gguf_file({"k": struct.pack("<IQ", 8, 1 << 63)}, [], b""), "Truncated"),
    "texts that end too late": (
        gguf_file({"k": listed(8, [struct.pack("<Q", 0)] * 300 + [b"\xff" * 8])}, [], b""),
        "Truncated",
    ),
    "nesting": (
        gguf_file({"k": struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20}, W, bytes(4)),
        "Nesting",
    ),
    "the same name twice": (gguf_file({}, W * 2, bytes(4)), "DuplicateTensor"),
    "a key that is not UTF-8 twice": (
        gguf_file({"\xff": u32(1), "\xfe": u32(1)}, W, bytes(4))
        .replace(b"\xc3\xbf", b"a\xff")
        .replace(b"\xc3\xbe", b"a\xff"),
        "DuplicateKey",
    ),
    "a name that is not UTF-8 twice": (
        gguf_file({}, [("\xff", [1], 0, 0)] * 2, bytes(4)).replace(b"\xc3\xbf", b"a\xff"),
        "DuplicateTensor",
    ),
    "65 axes": (gguf_file({}, [("w", [1] * 65, 0, 0)], bytes(4)), "Shape"),
    "a product of 2**64": (gguf_file({}, [("w", [1 << 32] * 2, 0, 0)], bytes(4)), "Shape"),
}
# A malformed tensor next to a readable one.
UNREAD = {
    "behind the end": ([1], 0, 64, "Truncated"),
    "terabytes": ([1 << 42], 0, 0, "Truncated"),
    "unknown type": ([32], 43, 0, "Type"),
    "removed type": ([32], 31, 0, "Type"),
    "not whole blocks": ([33], 2, 0, "BlockSize"),
    "no row": ([], 8, 0, "BlockSize"),
}
QUESTIONABLE = {
    "an odd key": gguf_file({"A key": u32(1)}, W, bytes(4)),
    "a key that is not UTF-8": gguf_file({"ab": u32(1)}, W, bytes(4)).replace(b"ab", b"a\xff"),
    "a bool of 2": gguf_file({"k": struct.pack("<IB", 7, 2)}, W, bytes(4)),
    "alignment of 4": gguf_file({"general.alignment": u32(4)}, W, bytes(4), alignment=4),
    "unaligned": gguf_file({}, [("w", [1], 0, 4)], bytes(8)),
    "shared": gguf_file({}, [*W, ("v", [1], 0, 0)], bytes(4)),
    "a gap": gguf_file({}, [*W, ("v", [1], 0, 64)], bytes(68)),
    "another order": gguf_file({}, [("v", [1], 0, 32), ("w", [1], 0, 0)], bytes(36)),
    "a gap before the first": gguf_file({}, [("w", [1], 0, 32)], bytes(36)),
    "lists of lists": gguf_file({"k": listed(9, [struct.pack("<IQ", 4, 0)])}, W, bytes(4)),
    "a long name": gguf_file({}, [("w" * 64, [1], 0, 0)], bytes(4)),
    "five axes": gguf_file({}, [("w", [1] * 5, 0, 0)], bytes(4)),
    "padding": gguf_file({}, W, b"")[:-1] + b"\1" + bytes(4),
}


class TestRules:
    @pytest.mark.parametrize("label", MALFORMED)
    def test_broken_rules_are_errors(self, label: str) -> None:
        data, rule = MALFORMED[label]
        with pytest.raises(xckpt.CheckpointError) as caught:
            indexed(data)
        assert caught.value.rule == rule
        assert caught.value.offset is not None

    @pytest.mark.parametrize(
        ("value", "offset"),
        [(struct.pack("<IQ", 13, 0), 33), (struct.pack("<IIQ", 9, 13, 0), 37)],
        ids=["a value", "the entries of a list"],
    )
    def test_an_error_names_the_byte_of_an_unknown_type(self, value: bytes, offset: int) -> None:
        with pytest.raises(xckpt.FormatError, match="the type 13 is unknown") as caught:
            indexed(gguf_file({"k": value}, [], b""))
        assert caught.value.offset == offset

    def test_a_warning_names_the_byte_where_the_padding_begins(self) -> None:
        index, _ = indexed(QUESTIONABLE["padding"])
        assert [text.partition(":")[0] for text in index.warnings] == ["padding at byte 57"]

    @pytest.mark.parametrize("label", UNREAD)
    def test_an_unreadable_tensor_leaves_the_others_readable(self, label: str) -> None:
        extents, kind, offset, rule = UNREAD[label]
        file = gguf_file({}, [("t", extents, kind, offset), *W], struct.pack("<f", 2.5))
        is_supported = rule != "Type"
        with pytest.warns(UnreadableWarning) if is_supported else nullcontext():
            ds = xr.open_dataset(file, engine="gguf")
        assert ds["w"].values == [2.5]
        # All of it may not fit in memory.
        elements = ds["t"][:1] if ds["t"].ndim else ds["t"]
        with pytest.raises(xckpt.CheckpointError) as caught:
            elements.values  # noqa: B018
        assert (caught.value.rule, caught.value.tensor) == (rule, "t")

    @pytest.mark.parametrize("label", QUESTIONABLE)
    def test_questionable_values_cause_a_warning(self, label: str) -> None:
        index, _ = indexed(QUESTIONABLE[label])
        assert len(index.warnings) == 1
        assert len(index.tensors) >= 1
        report = xckpt.verify(QUESTIONABLE[label])
        assert [finding.severity for finding in report.findings] == ["warning"]

    def test_a_scale_that_is_not_applied_is_named(self) -> None:
        tensors = [("a.weight", [64], 40, 0), ("a.scale", [1], 0, 64), ("b.weight", [64], 40, 0)]
        index, _ = indexed(gguf_file({}, tensors, bytes(68)))
        assert index.tensors["a.weight"].attrs == {"scale_tensor": "a.scale"}
        assert not index.tensors["b.weight"].attrs

    def test_metadata_numbers_keep_their_value(self) -> None:
        values: dict[int, Any] = {
            0: ("B", 255),
            1: ("b", -1),
            2: ("H", 65535),
            3: ("h", -1),
            4: ("I", 7),
        }
        values |= {5: ("i", -7), 6: ("f", 0.5), 7: ("B", 1), 10: ("Q", 1 << 63), 11: ("q", -1)}
        values |= {12: ("d", math.pi)}
        entries = {f"k{k}": struct.pack(f"<I{code}", k, v) for k, (code, v) in values.items()}
        entries["k9"] = listed(9, [struct.pack("<IQ", 9, 1) + struct.pack("<IQB", 0, 1, 5)])
        index, _ = indexed(gguf_file(entries, [], b""))
        assert index.attrs == {f"k{k}": v for k, (_, v) in values.items()} | {"k9": [[[5]]]}
        assert index.attrs["k7"] is True


def test_half_precision_of_vectors_is_a_warning(tmp_path: Path) -> None:
    values = {"blk.0.ffn_up.weight": np.ones((4, 32)), "blk.0.ffn_norm.weight": np.ones(32)}
    state = {name: array.astype("f4") for name, array in values.items()}
    ds = xckpt.open(state).assign_attrs({"general.architecture": "llama"})
    path = tmp_path / "m.gguf"
    options: Any = {"dtype": "float16", "cast": "allow"}
    text = r"llama\.cpp does not compute.*: 'blk\.0\.ffn_norm\.weight'"
    with pytest.warns(xckpt.CheckpointWarning, match=text):
        ds.ckpt.save(path, **options)
    encoding = {"*norm*": {"dtype": "float32"}}
    ds.ckpt.save(path, encoding=encoding, overwrite=True, **options)
    dtypes = [tensor.dtype for tensor in xckpt.read_index(path).tensors.values()]
    assert sorted(dtypes) == ["float16", "float32"]


@pytest.mark.parametrize(
    ("names", "attrs", "text"),
    [
        (["model.layers.0.mlp.up_proj.weight"], {}, r"convert_hf_to_gguf.*: 'model\.layers\.0"),
        (["blk.0.ffn_up.weight"], {}, r"missing in ds\.attrs.*: 'general\.architecture'"),
        (["blk.0.ffn_up.weight"], {"general.architecture": "llama"}, ""),
        (["double_blocks.0.weight", "conv.weight"], {}, ""),
    ],
    ids=["names of transformers", "no architecture", "complete", "another model"],
)
def test_a_model_that_llama_cpp_cannot_load_is_a_warning(
    names: list[str], attrs: dict[str, str], text: str, tmp_path: Path
) -> None:
    ds = xr.Dataset({name: (("a", "b"), np.ones((4, 32), "f4")) for name in names}, attrs=attrs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        xckpt.save(ds, tmp_path / "m.gguf")
    assert [re.search(text, str(warning.message)) is None for warning in caught] == [False] * bool(
        text
    )
