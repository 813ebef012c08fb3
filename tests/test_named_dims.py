"""Dimensions have the names of the model's axes, and arithmetic by them is right.

The model has as many features as heads times their size, so that its queries are square.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats.gguf_files import gguf_file, text
from xckpt import CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYERS, EMBD, FF, VOCAB = 2, 8, 12, 20
CONFIG = {
    "model_type": "llama",
    "hidden_size": EMBD,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": FF,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
}
# Names of transformers and of llama.cpp, with the axes.
EMBEDDING = ("model.embed_tokens.weight", "token_embd.weight", ("vocab", "embd"))
NORM = ("model.norm.weight", "output_norm.weight", ("embd",))
OF_LAYER = {
    "self_attn.q_proj.weight": ("attn_q.weight", ("head*key", "embd")),
    "self_attn.k_proj.weight": ("attn_k.weight", ("head_kv*key", "embd")),
    "self_attn.v_proj.weight": ("attn_v.weight", ("head_kv*value", "embd")),
    "self_attn.o_proj.weight": ("attn_output.weight", ("embd", "head*value")),
    "mlp.gate_proj.weight": ("ffn_gate.weight", ("ff", "embd")),
    "mlp.up_proj.weight": ("ffn_up.weight", ("ff", "embd")),
    "mlp.down_proj.weight": ("ffn_down.weight", ("embd", "ff")),
    "input_layernorm.weight": ("attn_norm.weight", ("embd",)),
    "post_attention_layernorm.weight": ("ffn_norm.weight", ("embd",)),
}
TENSORS = [
    EMBEDDING,
    NORM,
    *(
        (f"model.layers.{n}.{name}", f"blk.{n}.{other}", axes)
        for n in range(LAYERS)
        for name, (other, axes) in OF_LAYER.items()
    ),
]
AXES = {name: axes for name, _, axes in TENSORS}
IN_GGUF = {name: other for name, other, _ in TENSORS}
EXTENTS = {"vocab": VOCAB, "embd": EMBD, "ff": FF, "head*key": 8, "head*value": 8}
EXTENTS |= {"head_kv*key": 4, "head_kv*value": 4}


def shape(name: str) -> tuple[int, ...]:
    return tuple(EXTENTS[axis] for axis in AXES[name])


def values(name: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(sorted(AXES).index(name))
    return rng.normal(size=shape(name)).astype("f4")


VALUES = {name: values(name) for name in AXES}


def folder(path: Path) -> xr.Dataset:
    xckpt.save(VALUES, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return xckpt.open(path)


def without_config(path: Path) -> xr.Dataset:
    xckpt.save(VALUES, path / "model.safetensors")
    return xckpt.open(path)


def single_file(path: Path) -> xr.Dataset:
    xckpt.save(VALUES, path / "model.zt")
    return xckpt.open(path / "model.zt")


def state_dict(_: Path) -> xr.Dataset:
    return xckpt.open(VALUES)


def gguf(path: Path) -> xr.Dataset:
    attrs = {
        "general.architecture": text("qwen2"),  # whose rows of heads have the order of transformers
        **{
            f"qwen2.{key}": b"\4\0\0\0" + number.to_bytes(4, "little")
            for key, number in {
                "embedding_length": EMBD,
                "feed_forward_length": FF,
                "attention.head_count": 4,
                "attention.head_count_kv": 2,
                "vocab_size": VOCAB,
            }.items()
        },
    }
    tensors, data = [], b""
    for name, array in VALUES.items():
        data += bytes(-len(data) % 32)
        tensors.append((IN_GGUF[name], array.shape[::-1], 0, len(data)))
        data += array.tobytes()
    (path / "m.gguf").write_bytes(gguf_file(attrs, tensors, data))
    ds = xckpt.open(path / "m.gguf")
    return ds.rename({other: name for name, other in IN_GGUF.items()})


def without_names(path: Path) -> xr.Dataset:
    xckpt.save(VALUES, path / "sized.safetensors")
    return xckpt.open(path / "sized.safetensors", dims="size")


NAMED: list[Callable[[Path], xr.Dataset]] = [
    folder,
    without_config,
    single_file,
    state_dict,
    gguf,
]
QUERY, KEY, OUTPUT = (f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qko")
GAIN = "model.layers.0.input_layernorm.weight"


@pytest.fixture(params=NAMED)
def ds(request: pytest.FixtureRequest, tmp_path: Path) -> xr.Dataset:
    opened: xr.Dataset = request.param(tmp_path)
    return opened


class TestNames:
    def test_are_those_of_the_axes(self, ds: xr.Dataset) -> None:
        assert {name: ds.variables[name].dims for name in AXES} == AXES

    def test_of_a_selection_are_those_of_the_file(self, tmp_path: Path) -> None:
        folder(tmp_path)
        for name, axes in AXES.items():
            assert xckpt.open(tmp_path, tensors=name)[name].dims == axes
        tree = xr.open_datatree(tmp_path / "model.safetensors", tensors=QUERY)
        assert tree[QUERY.replace(".", "/")].dims == AXES[QUERY]

    def test_in_stacks_and_trees(self, tmp_path: Path) -> None:
        folder(tmp_path)
        stacked = xckpt.open(tmp_path, stack=True)
        assert stacked[QUERY.replace(".0.", ".")].dims == ("layers", *AXES[QUERY])
        tree = xr.open_datatree(tmp_path / "model.safetensors")
        assert {name: tree[name.replace(".", "/")].dims for name in AXES} == AXES

    def test_follow_again_from_copies(self, ds: xr.Dataset, tmp_path: Path) -> None:
        for name in ("copy.safetensors", "copy.zt", "copy.npz"):
            (ds * 2).ckpt.save(tmp_path / name)
            assert all(t.dims is None for t in xckpt.read_index(tmp_path / name).tensors.values())
            copy = xckpt.open(tmp_path / name)
            assert {tensor: copy.variables[tensor].dims for tensor in AXES} == AXES

    def test_of_components_of_other_sizes_have_the_component_in_front(self) -> None:
        vision = {
            f"vision_tower.vision_model.encoder.layers.{n}.{name}": np.ones(size, "f4")
            for n in range(2)
            for name, size in {
                **{f"self_attn.{letter}_proj.weight": (6, 6) for letter in ("q", "k", "v", "out")},
                **{f"layer_norm{number}.weight": (6,) for number in (1, 2)},
                "mlp.fc1.weight": (10, 6),
                "mlp.fc2.weight": (6, 10),
            }.items()
        }
        vision |= {
            "vision_tower.vision_model.embeddings.patch_embedding.weight": np.ones((6, 3, 2, 2)),
            "vision_tower.vision_model.embeddings.position_embedding.weight": np.ones((9, 6)),
            "vision_tower.vision_model.post_layernorm.weight": np.ones(6),
        }
        text = {name.replace("model.", "language_model.model.", 1): x for name, x in VALUES.items()}
        both = xckpt.open({**vision, **text})
        norm = "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight"
        assert both[norm].dims == ("vision.embd",)
        assert both[f"language_model.{GAIN}"].dims == ("text.embd",)


class TestArithmetic:
    """Scaling an axis by a vector is right, or has another shape; square matrices included."""

    def test_with_a_norm_scales_the_features(self, ds: xr.Dataset) -> None:
        for name in (QUERY, KEY):
            scaled = (ds[name] * ds[GAIN]).transpose(*AXES[name])
            np.testing.assert_array_equal(scaled, VALUES[name] * VALUES[GAIN])
        scaled = (ds[OUTPUT] * ds[GAIN]).transpose(*AXES[OUTPUT])
        np.testing.assert_array_equal(scaled, VALUES[OUTPUT] * VALUES[GAIN][:, None])

    def test_of_other_axes_has_another_shape(self, ds: xr.Dataset) -> None:
        assert (ds[OUTPUT] - ds[QUERY]).ndim == 3

    def test_without_names_has_another_shape(self, tmp_path: Path) -> None:
        few = {name: VALUES[name] for name in (QUERY, GAIN, OUTPUT)}  # no family
        ds = xckpt.open(few)
        assert ds[QUERY].dims == ds[OUTPUT].dims == ("d8_1", "d8_2")
        assert (ds[QUERY] * ds[GAIN]).ndim == 3

    @pytest.mark.parametrize("other", NAMED)
    def test_of_two_files(
        self, ds: xr.Dataset, other: Callable[[Path], xr.Dataset], tmp_path: Path
    ) -> None:
        (tmp_path / "other").mkdir()
        difference = ds - other(tmp_path / "other")
        assert {name: difference.variables[name].dims for name in AXES} == AXES
        assert not any(float(abs(variable).max()) for variable in difference.variables.values())

    def test_of_files_with_and_without_names_aligns_by_position(
        self, ds: xr.Dataset, tmp_path: Path
    ) -> None:
        (tmp_path / "other").mkdir()
        other = without_names(tmp_path / "other")
        for difference in (ds - other, other - ds, (ds * 2) - (other * 2), ds.load() - other):
            assert {name: difference.variables[name].dims for name in AXES} == AXES
            assert not any(float(abs(x).max()) for x in difference.variables.values())
        assert (other[GAIN] * ds[GAIN]).dims == ("embd",)

    def test_with_an_update_aligns_by_position(self, ds: xr.Dataset) -> None:
        update = xr.DataArray(np.ones(shape(QUERY), "f4"), dims=("d8_1", "d8_2"))
        for merged in (ds[QUERY] + update, update + ds[QUERY]):
            if isinstance(ds[QUERY].data, np.ndarray):  # variables of xarray itself
                continue
            assert merged.dims == AXES[QUERY]
            np.testing.assert_array_equal(merged, VALUES[QUERY] + 1)

    def test_axes_of_other_sizes_without_names_are_an_error(self, tmp_path: Path) -> None:
        values = np.arange(12, dtype="f4").reshape(4, 3)
        for name, of_name in (("p", values), ("q", values.T.copy())):
            xckpt.save({"x": of_name, "b": of_name[0]}, tmp_path / f"{name}.safetensors")
        p, q = (xckpt.open(tmp_path / f"{name}.safetensors") for name in "pq")
        named = r"'x' of p\.safetensors has the shape \[4, 3\] and 'x' of q.*\[3, 4\].*\(\.T\)"
        for compute in (
            lambda: p + q,
            lambda: (2 * p) - q,
            lambda: p["x"] * q["x"],
        ):
            with pytest.raises(ValueError, match=named):
                compute()
        with pytest.raises(ValueError, match=named):
            p.ckpt.merge(q[["x"]], scale=1)
        np.testing.assert_array_equal(p["x"] + q["x"].T, 2 * values)
        np.testing.assert_array_equal((p["x"] + p["b"]).transpose("d4", "d3"), values + values[0])
        merged = p.ckpt.merge(q[["x"]].transpose(), scale=1)
        np.testing.assert_array_equal(merged["x"], 2 * values)
        np.testing.assert_array_equal(p["x"] - p["x"].T, 0 * values)  # turned by the user

    def test_more_axes_in_the_only_tensor_are_named(self, tmp_path: Path) -> None:
        for name, of_name in (("a", np.ones((4, 4))), ("b", np.ones(4))):
            xckpt.save({"w": of_name}, tmp_path / f"{name}.safetensors")
        a, b = (xckpt.open(tmp_path / f"{name}.safetensors") for name in "ab")
        with pytest.warns(CheckpointWarning, match="more axes.*w 4x4x4, was 4x4 and 4"):
            (a + b).ckpt.save(tmp_path / "out.safetensors")

    def test_keeps_the_order_of_the_left_operand(self, tmp_path: Path) -> None:
        ds = single_file(tmp_path)
        gain = xr.DataArray(VALUES[GAIN], dims=("embd",))
        assert (gain * ds[QUERY]).dims == ("embd", "head*key")
        assert (ds[QUERY] * gain).dims == ("head*key", "embd")
        assert (1 - ds[GAIN]).dims == ("embd",)


class TestRequests:
    def test_get_the_extent_appended_if_another_has_the_name(self, tmp_path: Path) -> None:
        xckpt.save(VALUES, tmp_path / "m.zt")
        with pytest.warns(CheckpointWarning, match=r"'out' \(out_12, out_4\)") as caught:
            ds = xckpt.open(tmp_path / "m.zt", dims={"*_proj.weight": ("out", "in")})
        assert len(caught) == 1
        assert (ds[QUERY].dims, ds[KEY].dims) == (("out", "in"), ("out_4", "in"))
        assert ds["model.layers.1.mlp.down_proj.weight"].dims == ("out", "in_12")
        assert ds[GAIN].dims == ("embd",)

    def test_for_sizes_give_no_other_names(self, tmp_path: Path) -> None:
        ds = without_names(tmp_path)
        assert ds[QUERY].dims == ("d8", "d8_1")
        assert set(ds.dims) == {"d8", "d8_1", "d4", "d12", "d20"}
        for options in ({"stack": True}, {"tensors": "*.norm.weight"}):
            opened = xckpt.open(tmp_path / "sized.safetensors", dims="size", **options)
            assert "embd" not in opened.dims
        tree = xr.open_datatree(tmp_path / "sized.safetensors", dims="size")
        assert tree[QUERY.replace(".", "/")].dims == ("d8", "d8_1")
        xckpt.save(VALUES, tmp_path / "step-2.safetensors")
        paths = [tmp_path / "sized.safetensors", tmp_path / "step-2.safetensors"]
        steps = xckpt.open_steps(paths, step=[1, 2], dims="size")
        assert steps[GAIN].dims == ("step", "d8")

    def test_misspelled_raise(self, tmp_path: Path) -> None:
        xckpt.save(VALUES, tmp_path / "m.zt")
        with pytest.raises(ValueError, match="expected 'size'"):
            xckpt.open(tmp_path / "m.zt", dims="sizes")  # type: ignore[arg-type]
