"""Attributes from any format to any other: preserved, or listed in one warning."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.writing.attributes import missing
from tests.writing.saved import ENGINES, OPTIONS
from xckpt import CheckpointWarning, UnsupportedError, formats, read_index
from xckpt.writing import append, convert, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xckpt.index import Index

# Attributes that formats define, and attributes that only users set.
OF_THE_FILE: dict[str, Any] = {
    "licence": "MIT",
    "empty": "",
    "ünï": "ç \n\t \x01",
    "number": 7,
    "large": 2**53,
    "float": 0.1,
    "yes": True,
    "nothing": None,
    "list": [1, "two", 3.5, [None, False]],
    "mapping": {"a": {"b": [1, 2]}, "c": "d"},
}
OWN: dict[str, dict[str, Any]] = {
    "gptrs": {"kind": "gpt", "config": {"num_layers": 1, "extra": [1, 2]}},
    "mlcp": {"version": "1.2.0", "training": {"epoch": 3}, "customFields": {"a": "b"}},
}
OF_TENSORS: dict[str, Any] = {
    "param_id": 12345,
    "requires_grad": True,
    "rank": 0,
    "note": "x",
    "sizes": [1, 2],
}


@pytest.fixture(autouse=True)
def _all_names_are_told(all_names_in_warnings: None) -> None:
    """Compare all of them."""


def rich(engine: str) -> xr.Dataset:
    w = np.arange(6, dtype="f4").reshape(2, 3)
    variables: dict[str, Any] = {
        "a.w": (("o", "i"), w, OF_TENSORS),
        "b": ("i", w[0], {"note": "y", "param_id": 2**63 + 1}),
    }
    return xr.Dataset(variables, attrs=OF_THE_FILE | OWN.get(engine, {}))


def warning_of(function: Callable[..., object], *args: Any, **options: Any) -> str:
    """Call what writes, and give the one warning, if there is one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **options)
    texts = [str(warning.message) for warning in caught if warning.category is CheckpointWarning]
    assert len(texts) <= 1, "one warning has it all"
    return "".join(texts)


def index_of(ds: xr.Dataset) -> Any:
    """Give attributes as an index has them."""
    return SimpleNamespace(attrs=ds.attrs, tensors=dict(ds.variables))


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_that_a_user_sets_is_lost_silently(engine: str, tmp_path: Path) -> None:
    ds = rich(engine)
    text = warning_of(save, ds, tmp_path / "m", engine, **OPTIONS.get(engine, {}))
    assert missing(index_of(ds), read_index(tmp_path / "m"), text) == []


@pytest.mark.parametrize("old", ENGINES)
@pytest.mark.parametrize("new", ENGINES)
def test_nothing_is_lost_silently_between_two_formats(old: str, new: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    warning_of(save, rich(old), first, old, **OPTIONS.get(old, {}))
    text = warning_of(convert, first, second, new, **OPTIONS.get(new, {}))
    before: Index = read_index(first)
    after = read_index(second)
    assert set(before.tensors) == set(after.tensors)
    assert missing(before, after, text) == []
    if old == new:
        assert text == ""
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("new", ENGINES)
def test_warnings_list_only_lost_attributes(new: str, tmp_path: Path) -> None:
    text = warning_of(save, rich(new), tmp_path / "m", new, **OPTIONS.get(new, {}))
    can = formats.writable(new).can
    for places, attrs in [
        (can.file_attrs, OF_THE_FILE | OWN.get(new, {})),
        (None if can.arrangement else can.tensor_attrs, OF_TENSORS),
    ]:
        for name in attrs:
            assert (repr(name) in text) == (not has_place(name, places))


def has_place(name: str, places: tuple[str, ...] | re.Pattern[str] | None) -> bool:
    if isinstance(places, re.Pattern):
        return places.fullmatch(name) is not None
    return places is None or name in places


@pytest.mark.parametrize("engine", ["safetensors", "burnpack"])
def test_formats_of_texts_have_json(engine: str, tmp_path: Path) -> None:
    warning_of(save, rich(engine), tmp_path / "m", engine)
    attrs = read_index(tmp_path / "m").attrs
    assert (attrs["number"], attrs["yes"], attrs["nothing"]) == (7, True, None)
    assert b"true" in (tmp_path / "m").read_bytes()  # which other readers see as text
    assert (attrs["licence"], attrs["empty"]) == ("MIT", "")


class TestStatedAttributes:
    """Attributes that a file states itself are stated anew; changes by the user cause a warning."""

    def saved(self, engine: str, tmp_path: Path) -> xr.Dataset:
        warning_of(save, rich(engine), tmp_path / "old", engine, **OPTIONS.get(engine, {}))
        return xr.open_dataset(tmp_path / "old", engine=engine)

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("loaded", [False, True])
    def test_a_tensor_more_under_another_name_is_no_loss(
        self, engine: str, loaded: bool, tmp_path: Path
    ) -> None:
        ds = self.saved(engine, tmp_path).rename({"b": "c"})
        ds = (ds.load() if loaded else ds).assign(more=ds["c"] * 2)
        assert warning_of(save, ds, tmp_path / "new", engine, **OPTIONS.get(engine, {})) == ""

    @pytest.mark.parametrize("engine", ENGINES)
    def test_changed_attributes_cause_a_warning(self, engine: str, tmp_path: Path) -> None:
        ds, can = self.saved(engine, tmp_path), formats.get(engine).can
        of_file = can.file_attrs if isinstance(can.file_attrs, tuple) else ()
        stated = {*can.stated_attrs, *of_file, *(can.tensor_attrs or ())}
        for key in stated.intersection({*ds.attrs, *ds["b"].attrs}):
            changed = ds.copy()
            for attrs in (changed.attrs, changed["b"].attrs):
                attrs |= {key: "mine"} if key in attrs else {}  # noqa: PLW2901
            with suppress(UnsupportedError):
                text = warning_of(save, changed, tmp_path / key, engine, **OPTIONS.get(engine, {}))
                lost = missing(index_of(changed), read_index(tmp_path / key), text)
                assert not [line for line in lost if line.startswith(repr(key))]

    def test_the_warning_states_the_change(self, tmp_path: Path) -> None:
        w = xr.Variable("n", np.ones(2, "f4"), {"base_id": "mine"})
        ds = xr.Dataset({"w": w}, attrs={"kind": "gpt", "config": {}, "ids": "mine"})
        text = warning_of(save, ds, tmp_path / "m", "gptrs")
        assert "attributes of the file without a place: 'ids'" in text
        assert "attributes of tensors that the file states otherwise: 'base_id'" in text

    def test_an_option_replaces_an_attribute(self, tmp_path: Path) -> None:
        ds = xr.Dataset({"w": ("n", np.ones(2, "f4"))}, attrs={"kind": "gpt", "config": {}})
        assert warning_of(save, ds, tmp_path / "m", "gptrs", kind="mlp") == ""
        assert read_index(tmp_path / "m").attrs["kind"] == "mlp"

    def test_appending_keeps_stated_attributes(self, tmp_path: Path) -> None:
        ds = xr.Dataset({"w": ("n", np.ones(2, "f4"))})
        save(ds, tmp_path / "m.zt")
        more = ds.rename(w="v").assign_attrs(generator="mine", note="x")
        text = warning_of(append, more, tmp_path / "m.zt")
        assert "'generator'" in text
        assert "'note'" not in text

    def test_compressed_and_sharded_files(self, tmp_path: Path) -> None:
        w = xr.Variable("n", np.ones(2000, "f4"), {"type": "mine", "note": "x"})
        ds = xr.Dataset({"v": w, "w": w}, coords={"n": np.arange(2000)}, attrs={"total_size": 1})
        encoding = {"*": {"compression": "zstd", "digest": "sha256"}}
        for version in ("1.0", "2"):
            path = tmp_path / f"{version}.zt"
            text = warning_of(save, ds, path, encoding=encoding, version=version)
            assert missing(index_of(ds), read_index(path), text) == []
        text = warning_of(save, ds, tmp_path / "m.safetensors", max_shard_size=9000)
        assert "'total_size'" in text
        again = xr.open_dataset(tmp_path / "m.safetensors.index.json", engine="safetensors")
        assert again["w"].attrs == w.attrs
        assert list(again.coords) == ["n"]


# --- sizes of a model -----------------------------------------------------------------------------

SIZES = {"block_count": 3, "embedding_length": 8, "feed_forward_length": 12, "vocab_size": 16}
LLAMA_CPP: dict[str, Any] = {
    "general.architecture": "llama",
    **{f"llama.{key}": value for key, value in SIZES.items()},
    "tokenizer.ggml.tokens": [f"token {n}" for n in range(16)],
}
SHAPES = {"attn_q": (8, 8), "ffn_up": (12, 8), "ffn_down": (8, 12), "attn_norm": (8,)}
CUT: dict[str, tuple[Callable[[xr.Dataset], xr.Dataset], dict[str, int]]] = {
    "layers": (lambda ds: ds.isel(blk=[0, 1]), {"block_count": 2}),
    "a sum": (lambda ds: (ds + ds).isel(blk=[0, 1]), {"block_count": 2}),
    "in memory": (lambda ds: ds.isel(blk=[0, 1]).load(), {"block_count": 2}),
    "numbered": (
        lambda ds: ds.isel(blk=[0, 2]).assign_coords(blk=range(2)),
        {"block_count": 2},
    ),
    "more": (
        lambda ds: ds.isel(blk=[0, 1, 1, 2]).assign_coords(blk=range(4)),
        {"block_count": 4},
    ),
    "width": (lambda ds: ds.isel(ff=slice(6)), {"feed_forward_length": 6}),
    "tokens": (lambda ds: ds.isel(vocab=slice(8)), {"vocab_size": 8}),
}


class TestSizes:
    """Attributes that state the sizes of a model are those of the tensors that are written."""

    @pytest.fixture
    def gguf(self, tmp_path: Path) -> xr.Dataset:
        rng = np.random.default_rng(0)
        shapes: dict[str, Any] = {"token_embd.weight": (16, 8), "output.weight": (16, 8)}
        for n in range(3):
            shapes |= {f"blk.{n}.{name}.weight": shape for name, shape in SHAPES.items()}
        tensors = {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
        ds = xckpt.open(tensors).assign_attrs(LLAMA_CPP)
        save(ds, tmp_path / "base.gguf")
        return xckpt.open(tmp_path / "base.gguf", stack=True)

    @pytest.mark.parametrize(("cut", "sizes"), CUT.values(), ids=CUT)
    def test_gguf_states_the_sizes_of_its_tensors(
        self, cut: Any, sizes: dict[str, int], gguf: xr.Dataset, tmp_path: Path
    ) -> None:
        path = tmp_path / "new.gguf"
        text = warning_of(save, cut(gguf), path)
        for key, value in sizes.items():
            assert f"llama.{key}: {value} (was {SIZES[key]})" in text
        assert ("tokenizer.ggml.tokens: 16" in text) == ("vocab_size" in sizes)
        new = read_index(path)
        assert {key: new.attrs[f"llama.{key}"] for key in SIZES} == SIZES | sizes
        assert new.attr_types == read_index(tmp_path / "base.gguf").attr_types

    def test_sizes_without_a_certain_value_are_named(
        self, gguf: xr.Dataset, tmp_path: Path
    ) -> None:
        path = tmp_path / "new.gguf"
        text = warning_of(save, gguf.isel(blk=[0, 2]), path)
        assert "llama.block_count 3: the tensors have layers 0, 2" in text
        assert "ds.assign_coords(blk=ds['blk'].copy(data=range(2)))" in text
        text = warning_of(save, gguf.isel(embd=slice(4)), path, overwrite=True)
        assert "llama.embedding_length 8: the tensors have 4" in text

    def test_rows_in_another_order_than_the_tokenizer_are_named(
        self, gguf: xr.Dataset, tmp_path: Path
    ) -> None:
        gguf.attrs["tokenizer.ggml.bos_token_id"] = 1
        text = warning_of(save, gguf.isel(vocab=np.arange(16)[::-1]), tmp_path / "new.gguf")
        assert "another order than in: 'tokenizer.ggml.tokens'" in text
        line = "whose rows moved (state their new numbers in ds.attrs)"
        assert f"{line}: 'tokenizer.ggml.bos_token_id: 1'" in text
        save(gguf, tmp_path / "old.gguf")
        stated = xckpt.open(tmp_path / "old.gguf").isel(vocab=np.arange(16)[::-1])
        stated.attrs["tokenizer.ggml.bos_token_id"] = 14
        assert "rows moved" not in warning_of(save, stated, tmp_path / "stated.gguf")

    @pytest.mark.parametrize(
        "derive",
        [
            lambda ds: ds,
            lambda ds: (ds + ds) / 2,
            lambda ds: ds.ckpt.find("*attn_q*"),
            lambda ds: ds[["token_embd.weight"]],
            lambda ds: ds.ckpt.unstack().assign(more=("n", np.ones(3, "f4"))),
            lambda ds: ds.load(),
        ],
        ids=["unchanged", "mean", "part", "table", "more", "in memory"],
    )
    def test_sizes_of_whole_models_and_of_parts_stay(
        self, derive: Any, gguf: xr.Dataset, tmp_path: Path
    ) -> None:
        assert warning_of(save, derive(gguf), tmp_path / "new.gguf") == ""
        new = read_index(tmp_path / "new.gguf").attrs
        assert {key: new[f"llama.{key}"] for key in SIZES} == SIZES

    def test_a_config_in_the_attributes_has_the_sizes_of_the_tensors(self, tmp_path: Path) -> None:
        config = {"model_type": "llama", "num_hidden_layers": 3, "torch_dtype": "float32"}
        tensors = {f"model.layers.{n}.mlp.up_proj.weight": np.ones((4, 4), "f4") for n in range(3)}
        save(xckpt.open(tensors).assign_attrs(config=config), tmp_path / "base.zt")
        ds = xckpt.open(tmp_path / "base.zt", stack=True)
        cut = ds.isel(layers=slice(2)).astype("float16")
        assert "num_hidden_layers: 2" in warning_of(save, cut, tmp_path / "new.zt")
        sizes = {"num_hidden_layers": 2, "torch_dtype": "float16"}
        assert read_index(tmp_path / "new.zt").attrs["config"] == config | sizes
