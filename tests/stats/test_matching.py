"""``names="auto"``: tensors of one model are matched across the layouts of several projects."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
from safetensors.numpy import save_file

import xckpt
import xckpt.accessor
from tests.conftest import GOLDEN, calls_of
from xckpt.cli import main

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]

HIDDEN, WIDE, HEADS, KEY_HEADS, VOCABULARY, LAYERS = 32, 64, 4, 2, 40, 3
# Names of Hugging Face, with those of GGUF and of Burn's own Llama.
LINEAR = {
    "self_attn.q_proj": ("attn_q", "attention.wq"),
    "self_attn.k_proj": ("attn_k", "attention.wk"),
    "self_attn.v_proj": ("attn_v", "attention.wv"),
    "self_attn.o_proj": ("attn_output", "attention.wo"),
    "mlp.gate_proj": ("ffn_gate", "feed_forward.w1"),
    "mlp.up_proj": ("ffn_up", "feed_forward.w3"),
    "mlp.down_proj": ("ffn_down", "feed_forward.w2"),
}
NORMS = {
    "input_layernorm": ("attn_norm", "attention_norm"),
    "post_attention_layernorm": ("ffn_norm", "ffn_norm"),
}
SINGLE = {
    "model.embed_tokens": ("token_embd", "tok_embeddings"),
    "model.norm": ("output_norm", "norm"),
    "lm_head": ("output", "output"),
}


def shapes() -> dict[str, tuple[int, ...]]:
    keys = HIDDEN // HEADS * KEY_HEADS
    linear = [(HIDDEN, HIDDEN), (keys, HIDDEN), (keys, HIDDEN), (HIDDEN, HIDDEN)]
    linear += [(WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)]
    shapes_by_name: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        head = f"model.layers.{layer}."
        shapes_by_name |= {head + name: shape for name, shape in zip(LINEAR, linear, strict=True)}
        shapes_by_name |= {head + name: (HIDDEN,) for name in NORMS}
    return shapes_by_name


def hugging_face(*, trained: bool = True) -> Tensors:
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes().items():
        values: Array = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            values = 1 + values / 10 if trained else np.ones(shape)
        tensors[f"{name}.weight"] = values.astype(np.float32)
    return tensors


def spelled(name: str, project: int, layers: str) -> str:
    """Return the name of a module in another project, without its weight."""
    module = name.removesuffix(".weight")
    if module in SINGLE:
        return SINGLE[module][project]
    _, _, layer, inner = module.split(".", 3)
    return f"{layers}.{layer}.{(LINEAR | NORMS)[inner][project]}"


def in_gguf(tensors: Mapping[str, Array]) -> Tensors:
    """Do what llama.cpp's converter does: other names, and rows of q and k in another order."""
    names = {}
    for name, values in tensors.items():
        heads = HEADS if "q_proj" in name else KEY_HEADS
        new = values
        if "q_proj" in name or "k_proj" in name:
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            new = halves.swapaxes(1, 2).reshape(values.shape)
        names[spelled(name, 0, "blk") + ".weight"] = new
    return names


def in_burn(tensors: Mapping[str, Array], *, own_modules: bool) -> Tensors:
    """Do what Burn does: linear layers are transposed, norms have a gamma."""
    module_tensors = {}
    for name, values in tensors.items():
        is_linear = values.ndim == 2 and "embed" not in name
        module = spelled(name, 1, "layers") if own_modules else name.removesuffix(".weight")
        module_tensors[f"{module}.{'weight' if values.ndim == 2 else 'gamma'}"] = (
            np.ascontiguousarray(values.T) if is_linear else values
        )
    return module_tensors


def write_gguf(path: Path, tensors: Mapping[str, Array], kind: str) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in tensors.items():
        stored = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        data = gguf.quants.quantize(values, stored)
        is_block = kind.startswith("Q") and values.ndim == 2
        writer.add_tensor(name, data, raw_dtype=stored if is_block else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_burn(path: Path, tensors: Mapping[str, Array]) -> Path:
    variables = {
        name: ([f"{name}:{axis}" for axis in range(values.ndim)], values)
        for name, values in tensors.items()
    }
    xckpt.save(xr.Dataset(variables), path)
    return path


@pytest.fixture
def original(tmp_path: Path) -> Path:
    save_file(hugging_face(), tmp_path / "hf.safetensors")
    return tmp_path / "hf.safetensors"


def rules(result: xr.Dataset) -> dict[str, int]:
    counts: dict[str, int] = result.ckpt.table()["matched_by"].value_counts().to_dict()
    return counts


class TestProjectLayouts:
    """Every tensor of a model is found in the file that another project made of it."""

    @pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
    def test_hugging_face_matches_gguf(self, original: Path, tmp_path: Path, kind: str) -> None:
        tensors = hugging_face()
        names = dict(zip(tensors, in_gguf(tensors), strict=True))
        path = write_gguf(tmp_path / "model.gguf", in_gguf(tensors), kind)
        result = xckpt.compare(original, path, names="auto")
        assert result.ckpt.names == names
        assert xckpt.compare(path, original, names="auto").ckpt.names == {
            new: old for old, new in names.items()
        }
        norms, linear = 2 * LAYERS + 1, 5 * LAYERS + 2
        content = {"values": norms + linear, "rows": 2 * LAYERS}
        rounded = {"values": norms, "gguf": linear + 2 * LAYERS}
        assert rules(result) == (content if kind == "F32" else rounded)
        if kind == "F32":
            assert (result.ckpt.table()["status"] == "same").sum() == norms + linear

    @pytest.mark.parametrize("own_modules", [False, True])
    def test_hugging_face_matches_burn(
        self, original: Path, tmp_path: Path, own_modules: bool
    ) -> None:
        tensors = hugging_face()
        burn = in_burn(tensors, own_modules=own_modules)
        path = write_burn(tmp_path / "model.bpk", burn)
        result = xckpt.compare(original, path, names="auto")
        assert result.ckpt.names == dict(zip(tensors, burn, strict=True))
        embedding, linear = 1, 7 * LAYERS + 1
        if own_modules:
            norms = 2 * LAYERS + 1
            assert rules(result) == {"values": norms + embedding, "transposed": linear}
        # Tensors of equal names are not read.
        else:
            norms = 2 * LAYERS + 1
            assert rules(result) == {"name": embedding + linear, "values": norms}

    def test_burn_matches_gguf(self, tmp_path: Path) -> None:
        tensors = hugging_face()
        burn = in_burn(tensors, own_modules=True)
        first = write_burn(tmp_path / "model.bpk", burn)
        second = write_gguf(tmp_path / "model.gguf", in_gguf(tensors), "F32")
        result = xckpt.compare(first, second, names="auto")
        assert result.ckpt.names == dict(zip(burn, in_gguf(tensors), strict=True))
        assert rules(result)["rows"] == 2 * LAYERS

    def test_untrained_norms_are_matched_by_name(self, tmp_path: Path) -> None:
        tensors = hugging_face(trained=False)
        save_file(tensors, tmp_path / "hf.safetensors")
        path = write_gguf(tmp_path / "model.gguf", in_gguf(tensors), "F32")
        result = xckpt.compare(tmp_path / "hf.safetensors", path, names="auto")
        assert result.ckpt.names == dict(zip(tensors, in_gguf(tensors), strict=True))
        assert rules(result)["gguf"] == 2 * LAYERS + 1

    def test_content_is_enough_without_the_package(
        self, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_gguf(tmp_path / "model.gguf", in_gguf(hugging_face()), "F32")
        rounded = write_gguf(tmp_path / "rounded.gguf", in_gguf(hugging_face()), "F16")
        monkeypatch.setitem(sys.modules, "gguf", None)
        result = xckpt.compare(original, path, names="auto")
        assert set(rules(result)) == {"values", "rows"}
        with pytest.warns(xckpt.CheckpointWarning, match="pip install gguf to match them"):
            result = xckpt.compare(original, rounded, names="auto")
        # Sums of rows and columns find what was rounded.
        assert rules(result) == {"values": 2 * LAYERS + 1, "alike": 7 * LAYERS + 2}
        tensors = hugging_face()
        assert result.ckpt.names == dict(zip(tensors, in_gguf(tensors), strict=True))

    @pytest.mark.parametrize("model", ["llama", "gemma2", "gpt2"])
    def test_names_recorded_from_converters(self, model: str) -> None:
        path = GOLDEN / "gguf" / f"convert_{model}.gguf"
        pairs = json.loads(path.with_suffix(".expected.json").read_text("utf-8"))["pairs"]
        expected = {pair["hf"]: pair["gguf"] for pair in pairs if pair.get("gguf")}
        with np.load(path.with_suffix(".hf.npz")) as arrays:
            ours = {
                name: ([f"{name}:{axis}" for axis in range(arrays[name].ndim)], arrays[name])
                for name in arrays
            }
        result = xckpt.compare(xr.Dataset(ours), path, names="auto")
        assert result.ckpt.names == expected


class TestRules:
    """The rules that match two tensors, and similarities that are not enough."""

    def compared(self, ours: Tensors, theirs: Tensors, **options: Any) -> xr.Dataset:
        first, second = (
            xr.Dataset({n: ([f"{n}:{k}" for k in range(v.ndim)], v) for n, v in tensors.items()})
            for tensors in (ours, theirs)
        )
        result: xr.Dataset = xckpt.compare(first, second, names="auto", **options)
        return result

    def test_tensors_are_matched_by_content(self) -> None:
        rng = np.random.default_rng(0)
        a: Tensors = {n: rng.standard_normal((6, 8)).astype(np.float32) for n in "abcde"}
        b: Tensors = {
            "A": a["a"].astype(np.float64),
            "B": a["b"].T,
            "C": a["c"][rng.permutation(6)],
            "D": a["d"][:, rng.permutation(8)].T,
            "E": a["e"].reshape(2, 24)[:, ::-1],
        }
        result = self.compared(a, b)
        assert result.ckpt.names == {name: name.upper() for name in a}
        rules = [result[name].attrs["matched_by"] for name in a]
        assert rules == ["values", "transposed", "rows", "rows", "elements"]
        assert result["b"].attrs["shapes"] == "b: (6, 8) and (8, 6)"

    def test_many_renamed_tensors_take_linear_time(self, tmp_path: Path) -> None:
        def compare(layers: int) -> None:
            rng = np.random.default_rng(0)
            values = [rng.standard_normal((4, 8), np.float32) for _ in range(layers)]
            for side, name in (("a", "layers.{}.mlp.up.weight"), ("b", "blk.{}.ffn_up.weight")):
                save_file({name.format(n): v for n, v in enumerate(values)}, tmp_path / side)
            paths = tmp_path / "a", tmp_path / "b"
            result = xckpt.compare(*paths, names="auto", explain=True, cache=False)
            assert len(result.ckpt.names) == layers

        compare(2)  # compiles loops
        few, many = (calls_of(partial(compare, n), ("call", "c_call")) for n in (100, 400))
        assert many < 5 * few

    def test_equal_tensors_are_paired_in_order_and_only_once(self) -> None:
        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        result = self.compared({"a": x, "b": x}, {"c": x, "d": x})
        assert result.ckpt.names == {"a": "c", "b": "d"}
        with pytest.warns(xckpt.CheckpointWarning, match="neither by its name nor by its content"):
            result = self.compared({"a": x, "b": x}, {"c": x})
        assert result.ckpt.names == {}

    def test_a_changed_tensor_has_the_name_that_its_siblings_lead_to_expect(self) -> None:
        rng = np.random.default_rng(0)
        a = {f"h.{n}.{k}.weight": rng.standard_normal((8, 8)) for n in range(3) for k in "xy"}
        b = {name.replace("h.", "block."): values for name, values in a.items()}
        b["block.1.y.weight"] = rng.standard_normal((8, 8))
        result = self.compared(a, b)
        attrs = result["h.1.y.weight"].attrs
        assert (attrs["other_name"], attrs["matched_by"]) == ("block.1.y.weight", "siblings")
        assert result.ckpt.table().loc["h.1.y.weight", "status"] == "changed"

    def test_different_tensors_of_different_names_stay_unmatched(self) -> None:
        rng = np.random.default_rng(0)
        x, y = rng.standard_normal((2, 5, 7))
        result = self.compared({"a": x, "w": x}, {"b": y, "w": y})
        assert result.ckpt.names == {"w": "w"}
        assert (result["a"].attrs["other_name"], result["a"].attrs["matched_by"]) == ("", "")
        frame = result.ckpt.table()
        assert frame["status"].to_dict() == {"w": "changed", "a": "only_a", "b": "only_b"}

    def test_prefixes_of_wrappers_are_ignored(self) -> None:
        x = np.ones((3, 4), np.float32)
        result = self.compared({"module.model.fc.weight": x}, {"_orig_mod.fc.weight": 2 * x})
        assert result["module.model.fc.weight"].attrs["matched_by"] == "prefix"

    def test_names_of_gpt_rs(self) -> None:
        x = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
        ours = {"blocks.1.attention.w_out": x, "blocks.1.ln_1.gamma": x[0], "lm_head": x[1:]}
        names = ["transformer.h.1.attn.c_proj.weight", "transformer.h.1.ln_1.weight"]
        theirs = dict(zip([*names, "lm_head.weight"], (y * 2 for y in ours.values()), strict=True))
        result = self.compared(ours, theirs)
        assert result.ckpt.names == dict(zip(ours, theirs, strict=True))
        llama = {"blocks.1.feed_forward.w_up": x, "final_norm.gamma": x[0]}
        theirs = {"model.layers.1.mlp.up_proj.weight": x.T * 2, "model.norm.weight": x[0] * 2}
        assert self.compared(llama, theirs).ckpt.names == dict(zip(llama, theirs, strict=True))

    def test_only_some_tensors(self) -> None:
        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        result = self.compared(
            {"a": x, "b": 2 * x, "c": x + 1}, {"A": x, "B": 2 * x, "c": x}, tensors="a"
        )
        assert result.ckpt.names == {"a": "A"}

    def test_stacked_tensors_have_a_match_per_member(self) -> None:
        rng = np.random.default_rng(0)
        ours = {f"layers.{n}.w": (("x", "y"), rng.standard_normal((3, 4))) for n in range(3)}
        theirs = {f"h.{n}.v": array for n, (_, array) in enumerate(ours.values())}
        del theirs["h.1.v"]
        stacked = xr.Dataset(ours).ckpt.stack()
        flat = xr.Dataset(
            {
                name: (("x", "y"), array[1])
                for name, array in zip(theirs, [*ours.values()][::2], strict=True)
            }
        )
        result = xckpt.compare(stacked, flat, names="auto")
        assert result["layers.w"].attrs["other_name"] == ["h.0.v", "", "h.2.v"]
        assert result.ckpt.names == {"layers.0.w": "h.0.v", "layers.2.w": "h.2.v"}
        # Names of selected layers are ambiguous.
        assert "other_name" not in result.isel(layers=[0]).ckpt.table()

    def test_progress_covers_matching_and_comparing(self, original: Path, tmp_path: Path) -> None:
        path = write_burn(tmp_path / "m.bpk", in_burn(hugging_face(), own_modules=True))
        reports: list[tuple[int, int]] = []
        options: Any = {"progress": lambda *nbytes: reports.append(nbytes), "cache": False}
        xckpt.compare(original, path, names="auto", **options)
        assert reports == sorted(reports)
        assert (
            reports[-1][0]
            == reports[-1][1]
            > sum(tensor.nbytes for tensor in hugging_face().values())
        )

    def test_names_of_other_results_raise(self) -> None:
        ds = xr.Dataset({"x": ("n", [1.0])})
        with pytest.raises(TypeError, match="only results of"):
            _ = ds.ckpt.names
        assert xckpt.compare(ds, ds).ckpt.names == {"x": "x"}
        with pytest.raises(TypeError, match="a mapping, a function of a name, or a pair"):
            xckpt.compare(ds, ds, names="atuo")  # type: ignore[arg-type]


class TestCommandLine:
    """A mapping that `compare` found is what `convert` takes."""

    def test_names_map_from_one_file_to_the_other(
        self, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tensors = hugging_face()
        path = write_gguf(tmp_path / "model.gguf", in_gguf(tensors), "F16")
        names = str(tmp_path / "names.json")
        assert (
            main(["compare", str(original), str(path), "--names", "auto", "--write-names", names])
            == 1
        )
        assert json.loads((tmp_path / "names.json").read_text("utf-8")) == dict(
            zip(tensors, in_gguf(tensors), strict=True)
        )
        new = str(tmp_path / "new.safetensors")
        assert main(["convert", str(original), new, "--names", names]) == 0
        assert set(xckpt.read_index(new)) == set(in_gguf(tensors))
        # Nothing is written over.
        options = ["--names", "auto", "--write-names", new]
        assert main(["compare", str(original), str(path), *options]) == 2
        capsys.readouterr()
        assert main(["compare", str(original), new, "--names", names]) == 0
        assert capsys.readouterr().err.endswith("all are the same\n")

    def test_names_and_a_pattern_are_exclusive(
        self, original: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        both = ["--names", "auto", "--rename", "a", "b"]
        assert main(["compare", str(original), str(original), *both]) == 2
        assert "exclude each other" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[1]", "must be an object that maps old names"),
            ('{"a": 1}', "must be an object that maps old names"),
            ("{", "not a JSON file"),
            ('{"lm_head": "x"}', "but no tensor is called that; similar names: 'lm_head.weight'"),
        ],
    )
    @pytest.mark.parametrize("command", ["compare", "convert"])
    def test_wrong_names(
        self,
        original: Path,
        tmp_path: Path,
        text: str,
        message: str,
        command: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / "names.json").write_text(text)
        argument = str(original) if command == "compare" else str(tmp_path / "new.zt")
        names = ["--names", str(tmp_path / "names.json")]
        assert main([command, str(original), argument, *names]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("has_weight", [False, True])
def test_constants_are_paired_only_with_their_weights(value: int, has_weight: bool) -> None:
    rng = np.random.default_rng(0)
    shared = {f"layers.{n}.mlp.weight": rng.normal(size=(8, 8)) for n in range(3)}
    bias = np.full(8, value, "f4")
    first = {**shared, "pooler.dense.bias": bias, "pooler.dense.weight": rng.normal(size=(8, 8))}
    weight = first["pooler.dense.weight"] if has_weight else rng.normal(size=(8, 8))
    second = {f"bert.{name}": values for name, values in shared.items()}
    second |= {"cls.transform.dense.bias": bias, "cls.transform.dense.weight": weight}
    names = xckpt.compare(first, second, names="auto").ckpt.names
    expected = {name: f"bert.{name}" for name in shared}
    if has_weight:
        leaves = ("bias", "weight")
        expected |= {f"pooler.dense.{leaf}": f"cls.transform.dense.{leaf}" for leaf in leaves}
    assert dict(names) == expected
