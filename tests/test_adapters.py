"""Adapters of low rank: their scales, products and spectra, and merges that are verified."""

from __future__ import annotations

import json
import math
import warnings
from typing import TYPE_CHECKING, Any

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.cli import main
from xckpt.errors import CheckpointWarning, UnsupportedError
from xckpt.statistics import comparison_lines

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]

PREFIX = "base_model.model."
Q, K, FC, EMBED, CONV, NORM = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.mlp.fc.weight",
    "model.embed_tokens.weight",
    "model.conv.weight",
    "model.norm.weight",
)
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6}


def numbers(*shape: int, seed: int = 0, scale: float = 0.1) -> Array:
    values = np.random.default_rng([seed, *shape]).normal(scale=scale, size=shape)
    return values.astype(np.float32)


def write(path: Path, tensors: dict[str, Array], config: Any = None) -> Path:
    """Write an adapter as PEFT does."""
    path.mkdir(exist_ok=True)
    xckpt.save(tensors, path / "adapter_model.safetensors", overwrite=True)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (path / "adapter_config.json").write_text(text)
    return path / "adapter_model.safetensors"


def factors(base: str, rank: int = 4, rows: int = 24, columns: int = 16) -> dict[str, Array]:
    module = PREFIX + base.removesuffix(".weight")
    return {
        f"{module}.lora_A.weight": numbers(rank, columns, seed=1),
        f"{module}.lora_B.weight": numbers(rows, rank, seed=2),
    }


def table_of(path: Path, **tensors_and_config: Any) -> Any:
    return xckpt.open(write(path, **tensors_and_config)).ckpt.adapters()


# --- what the file states -------------------------------------------------------------------------


class TestScales:
    def test_of_peft(self, tmp_path: Path) -> None:
        table = table_of(tmp_path, tensors=factors(Q) | factors(K, 2), config=CONFIG)
        assert table.index.tolist() == [Q, K]
        assert table["kind"].tolist() == ["lora", "lora"]
        assert table["rank"].tolist() == [4, 2]
        assert table["alpha"].tolist() == [6, 6]
        assert table["scale"].tolist() == [1.5, 3]

    def test_of_rslora(self, tmp_path: Path) -> None:
        config = CONFIG | {"use_rslora": True}
        assert table_of(tmp_path, tensors=factors(Q), config=config)["scale"].item() == 3

    @pytest.mark.parametrize(
        ("pattern", "alpha"),
        [
            ("q_proj", 8), ("self_attn.q_proj", 8), ("layers.0.self_attn.[qk]_proj", 8),
            ("^model.layers.0.self_attn.q_proj", 8), (".*q_proj", 8), ("(q|k)_proj", 8),
            ("k_proj", 6), ("_proj", 6), ("^q_proj", 6), ("q_pro", 6),
        ],
    )  # fmt: skip
    def test_of_patterns(self, pattern: str, alpha: int, tmp_path: Path) -> None:
        config = CONFIG | {"alpha_pattern": {pattern: 8}, "rank_pattern": {"q_proj": 2}}
        table = table_of(tmp_path, tensors=factors(Q, 2), config=config)
        assert (table["alpha"].item(), table["scale"].item()) == (alpha, alpha / 2)

    @pytest.mark.parametrize(
        "config",
        [
            None, {}, {"lora_alpha": None}, {"lora_alpha": "6"}, {"lora_alpha": True},
            {"lora_alpha": 10**400}, '{"lora_alpha": NaN}', '{"lora_alpha": Infinity}',
            CONFIG | {"alpha_pattern": {"(a+)+(b*)*q": 1}},
        ],
    )  # fmt: skip
    def test_a_scale_that_is_not_stated_is_not_guessed(self, config: Any, tmp_path: Path) -> None:
        table = table_of(tmp_path, tensors=factors(Q), config=config)
        assert math.isnan(table["scale"].item())
        assert table["note"].item()
        ds = xckpt.open(tmp_path / "adapter_model.safetensors")
        with pytest.warns(CheckpointWarning, match="pass updates"):
            assert not ds.ckpt.updates().data_vars
        assert ds.ckpt.updates(scale=2)[Q].attrs["scale"] == 2

    def test_a_config_that_is_not_json_is_ignored_with_a_warning(self, tmp_path: Path) -> None:
        ds = xckpt.open(write(tmp_path, factors(Q), "{"))
        with pytest.warns(CheckpointWarning, match=r"adapter_config\.json is ignored"):
            assert math.isnan(ds.ckpt.adapters()["scale"].item())

    @pytest.mark.parametrize("option", ["use_qalora", "target_parameters"])
    def test_other_methods_are_named_as_unsupported(self, option: str, tmp_path: Path) -> None:
        table = table_of(tmp_path, tensors=factors(Q), config=CONFIG | {option: ["x"]})
        assert table["kind"].item() == "unsupported"
        assert option in table["note"].item()

    @pytest.mark.parametrize(
        "options", [{"target_parameters": ["experts.gate_up", "experts.down"]}, {}]
    )
    def test_parameters_of_one_module_are_named_as_unsupported(
        self, options: dict[str, Any], tmp_path: Path
    ) -> None:
        experts = f"{PREFIX}layers.0.experts"
        nested = {
            f"{module}.lora_{x}.weight": numbers(*shape)
            for module in (experts, f"{experts}.base_layer")
            for x, shape in (("A", (8, 16)), ("B", (32, 8)))
        }
        path = write(tmp_path, nested, CONFIG | options)
        table = xckpt.open(path).ckpt.adapters()
        assert set(table.index) == {"layers.0.experts.weight"}
        assert "unsupported" in set(table["kind"])
        base = {"layers.0.experts.weight": numbers(32, 16)}
        with pytest.raises(UnsupportedError, match=r"option target_parameters.*merge"):
            xckpt.open(base).ckpt.merge(path)

    def test_factors_that_do_not_fit_are_unsupported(self, tmp_path: Path) -> None:
        module = PREFIX + Q.removesuffix(".weight")
        tensors = factors(K) | {
            f"{module}.lora_A.weight": numbers(4, 16),
            f"{module}.lora_B.weight": numbers(24, 5),
            f"{PREFIX}a.lora_A.weight": numbers(4, 16),
            f"{PREFIX}b.hada_w1_a": numbers(4, 16),
        }
        table = table_of(tmp_path, tensors=tensors, config=CONFIG)
        kinds = table["kind"].to_dict()
        assert kinds == {K: "lora", Q: "unsupported", "a.weight": "unsupported",
                         "b.weight": "unsupported"}  # fmt: skip

    def test_several_adapters_of_a_module_raise(self, tmp_path: Path) -> None:
        named = {n.replace("_A.", "_A.first.").replace("_B.", "_B.first."): array
                 for n, array in factors(Q).items()}  # fmt: skip
        path = write(tmp_path, named, CONFIG)
        assert xckpt.open(path).ckpt.adapters().index.tolist() == [Q]
        path = write(tmp_path, factors(Q) | named, CONFIG)
        with pytest.raises(ValueError, match="several adapters"):
            xckpt.open(path).ckpt.adapters()

    def test_two_modules_of_one_name_raise(self, tmp_path: Path) -> None:
        doubled = {n.removeprefix(PREFIX): array for n, array in factors(Q).items()}
        path = write(tmp_path, factors(Q) | doubled, CONFIG)
        with pytest.raises(ValueError, match="several adapters"):
            xckpt.open(path).ckpt.adapters()

    def test_a_folder_is_opened_with_its_config(self, tmp_path: Path) -> None:
        write(tmp_path, factors(Q), CONFIG)
        assert xckpt.open(tmp_path).ckpt.adapters()["scale"].item() == 1.5

    def test_a_model_has_no_adapters(self) -> None:
        ds = xckpt.open({"model.alpha": numbers(1), "w.m": numbers(4), Q: numbers(4, 4)})
        assert ds.ckpt.adapters().empty
        assert not ds.ckpt.updates().data_vars

    def test_trees_and_stacks_have_the_same_adapters(self, tmp_path: Path) -> None:
        path = write(tmp_path, factors(Q) | factors(Q.replace("0", "1")), CONFIG)
        table = xckpt.open(path).ckpt.adapters()
        assert table.equals(xr.open_datatree(path, engine="safetensors").ckpt.adapters())
        assert table.equals(xckpt.open(path, stack=True).ckpt.adapters())


# --- products and spectra -------------------------------------------------------------------------

A, B = numbers(4, 16, seed=1), numbers(24, 4, seed=2)


@pytest.mark.parametrize(
    ("tensors", "attrs", "base", "expected"),
    [
        ({"unet.to_q.lora_A.weight": A, "unet.to_q.lora_B.weight": B},
         {"lora_adapter_metadata": '{"unet.lora_alpha": 8, "unet.r": 4}'}, "unet.to_q.weight", 2),
        ({"mid.to_q.lora_A.weight": A, "mid.to_q.lora_B.weight": B},
         {"lora_adapter_metadata": '{"lora_alpha": 8, "r": 4}'}, "mid.to_q.weight", 2),
        ({"unet.to_q.lora.down.weight": A, "unet.to_q.lora.up.weight": B,
          "unet.to_q.alpha": np.float32(8)}, {}, "unet.to_q.weight", 2),
        ({"lora_unet_mid_to_q.lora_down.weight": A, "lora_unet_mid_to_q.lora_up.weight": B,
          "lora_unet_mid_to_q.alpha": np.float32(2)}, {}, "lora_unet_mid_to_q", 0.5),
        ({"layers.0.fc.lora_a": A.T, "layers.0.fc.lora_b": B.T},
         {"adapter_config": {"lora_parameters": {"rank": 4, "scale": 20.0}}},
         "layers.0.fc.weight", 20),
        ({"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": B},
         {"adapter.lora.alpha": 8.0}, "blk.0.attn_q.weight", 2),
        ({"conv.lora_A.weight": A.reshape(4, 4, 2, 2), "conv.lora_B.weight": B[..., None, None]},
         {"adapter_config": {"lora_alpha": 4}}, "conv.weight", 1),
        ({"c_fc.lora_A.weight": A, "c_fc.lora_B.weight": B},
         {"adapter_config": {"lora_alpha": 4, "fan_in_fan_out": True}}, "c_fc.weight", 1),
        ({"embed.lora_embedding_A": A, "embed.lora_embedding_B": B},
         {"adapter_config": {"lora_alpha": 4}}, "embed.weight", 1),
    ],
    ids=["diffusers", "diffusers-model", "diffusers-old", "kohya", "mlx", "llama.cpp", "conv",
         "gpt2", "embedding"],
)  # fmt: skip
def test_products_of_all_namings(
    tensors: dict[str, Array], attrs: dict[str, Any], base: str, expected: float
) -> None:
    ds = xr.Dataset({n: ([f"{n}{i}" for i in range(np.ndim(t))], t) for n, t in tensors.items()})
    updates = ds.assign_attrs(attrs).ckpt.updates()
    assert list(updates.data_vars) == [base]
    update = updates[base]
    assert isinstance(update.data, da.Array)
    assert update.attrs == {"kind": "lora", "rank": 4, "scale": expected}
    product = expected * (B @ A)
    if base in {"c_fc.weight", "embed.weight"}:
        product = product.T
    np.testing.assert_allclose(update.values.reshape(product.shape), product, rtol=1e-5, atol=1e-7)
    values = xckpt.spectrum(updates, values=True, progress=False)[base].values
    explicit = np.linalg.svd(product.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(values[:4], explicit[:4], rtol=1e-6)
    assert np.isnan(values[4:]).all()


class TestSpectra:
    def test_statistics_are_those_of_the_product(self, tmp_path: Path) -> None:
        updates = xckpt.open(write(tmp_path, factors(Q), CONFIG)).ckpt.updates()
        quick = xckpt.spectrum(updates, progress=False).ckpt.table()
        explicit = xckpt.spectrum(updates.compute(), progress=False).ckpt.table()
        for name in ("spectral_norm", "frobenius", "stable_rank", "effective_rank", "rank"):
            assert quick[name].item() == pytest.approx(explicit[name].item(), rel=1e-5)
        assert quick["rank"].item() == 4

    def test_the_product_is_not_formed(self) -> None:
        side = 30_000  # the product would take 3.6 GB
        tensors = {"w.lora_A.weight": numbers(2, side), "w.lora_B.weight": numbers(side, 2)}
        ds = xckpt.open(tensors).assign_attrs(adapter_config={"lora_alpha": 2})
        result = xckpt.spectrum(ds.ckpt.updates(), progress=False).ckpt.table()
        assert result["rank"].item() == 2
        left, right = (np.linalg.norm(t) for t in tensors.values())
        assert result["spectral_norm"].item() <= left * right

    def test_changed_updates_are_read_as_they_are(self, tmp_path: Path) -> None:
        updates = xckpt.open(write(tmp_path, factors(Q), CONFIG)).ckpt.updates()
        for changed in (updates.isel({updates[Q].dims[0]: slice(5)}), updates * 2, -updates):
            values = xckpt.spectrum(changed, values=True, progress=False)[Q].values
            explicit = np.linalg.svd(changed[Q].values.astype(np.float64), compute_uv=False)
            np.testing.assert_allclose(values[:4], explicit[:4], rtol=1e-6)

    def test_of_zeros_and_nan(self) -> None:
        zeros = {"w.lora_A.weight": A, "w.lora_B.weight": 0 * B}
        nan = {"v.lora_A.weight": A, "v.lora_B.weight": B * np.float32("nan")}
        ds = xckpt.open(zeros | nan)
        table = xckpt.spectrum(ds.ckpt.updates(scale=1), progress=False).ckpt.table()
        assert table.loc["w.weight", "rank"] == 0
        assert math.isnan(table.loc["v.weight", "rank"])


# --- merges ---------------------------------------------------------------------------------------


def rounded(array: Array, dtype: Any) -> Array:
    return array.astype(np.float32).astype(dtype)


class Merge:
    """A base model, an adapter of it, and the merged model, as PEFT computes them."""

    def __init__(self, folder: Path, dtype: Any = np.float32, config: Any = None) -> None:
        self.folder, self.dtype = folder, dtype
        self.config = CONFIG if config is None else config
        shapes = {Q: (24, 16), K: (24, 16), FC: (24, 16), EMBED: (40, 16), CONV: (8, 6, 3, 3),
                  NORM: (16,)}  # fmt: skip
        self.base = {n: rounded(numbers(*s, seed=9), dtype) for n, s in shapes.items()}
        self.merged = dict(self.base)
        self.adapter: dict[str, Array] = {}

    def lora(self, name: str, scale: float = 1.5, magnitude: Array | None = None) -> Merge:
        out, *inner = self.base[name].shape
        a, b = numbers(4, *inner, seed=1), numbers(out, 4, *(1 for _ in inner[1:]), seed=2)
        module = PREFIX + name.removesuffix(".weight")
        self.adapter |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        update = np.float32(scale) * (b.reshape(out, 4) @ a.reshape(4, -1))
        total = self.base[name].astype(np.float32) + rounded(
            update.reshape(self.base[name].shape), self.dtype
        ).astype(np.float32)
        if magnitude is not None:
            self.adapter[f"{module}.lora_magnitude_vector"] = magnitude
            norm = np.sqrt(np.square(total.reshape(out, -1)).sum(axis=1))
            total *= (magnitude / norm).reshape(-1, *(1 for _ in inner))
        self.merged[name] = rounded(total, self.dtype)
        return self

    def compare(self, **options: Any) -> Any:
        path = write(self.folder / "adapter", self.adapter, self.config)
        for name, tensors in (("base", self.base), ("merged", self.merged)):
            xckpt.save(tensors, self.folder / f"{name}.safetensors", overwrite=True)
        paths = (self.folder / "base.safetensors", self.folder / "merged.safetensors")
        return xckpt.compare(*paths, adapter=path, progress=False, **options)

    def row(self, name: str, **options: Any) -> Any:
        return self.compare(**options).ckpt.table().loc[name]


TYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


class TestMerges:
    @pytest.mark.parametrize("dtype", TYPES)
    def test_every_element_is_verified(self, dtype: Any, tmp_path: Path) -> None:
        magnitude = np.abs(numbers(24, seed=5)) + np.float32(0.5)
        merge = Merge(tmp_path, dtype).lora(Q).lora(CONV).lora(FC, magnitude=magnitude)
        result = merge.compare()
        table = result.ckpt.table()
        assert table["outcome"].unique().tolist() == ["explained"]
        merged = table[table["cause"] == "merged"]
        assert set(merged.index) == {Q, CONV, FC}
        assert merged["rank"].tolist() == [4, 4, 4]
        assert result.attrs["explanation"].startswith("all 6 tensors are explained: 3 merged")
        # The result does not depend on how the base is opened.
        base = xckpt.open(tmp_path / "base.safetensors", stack=True)
        path = tmp_path / "adapter/adapter_model.safetensors"
        again = base.ckpt.compare(tmp_path / "merged.safetensors", adapter=path, progress=False)
        assert again.ckpt.table()["outcome"].unique().tolist() == ["explained"]

    def test_a_forgotten_merge_is_named(self, tmp_path: Path) -> None:
        merge = Merge(tmp_path, np.float32).lora(Q).lora(FC)
        merge.merged[Q] = merge.base[Q]
        lines = [str(line) for line in comparison_lines(merge.compare().ckpt.table())]
        assert lines[0] == f"{Q} is without the adapter"

    def test_the_command_line_verifies_a_merge(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        merge = Merge(tmp_path, np.float32).lora(Q)
        merge.compare()
        paths = [str(tmp_path / f"{name}.safetensors") for name in ("base", "merged")]
        options = ["--adapter", str(tmp_path / "adapter/adapter_model.safetensors")]
        assert main(["compare", *paths, *options]) == 0
        assert capsys.readouterr().out.startswith("all 6 tensors are explained: 1 merged, 5 equal")
        merge.merged[Q] = merge.merged[Q] + 1
        merge.compare()
        assert main(["compare", *paths, *options]) == 1
        assert capsys.readouterr().out.startswith("1 of 6 tensors differs")
        assert main(["compare", *paths, *options, "--dim", "-1"]) == 2
        assert "--adapter is of whole tensors" in capsys.readouterr().err
        assert main(["compare", *paths, "--adapter", str(tmp_path / "missing.safetensors")]) == 2
        assert "missing.safetensors" in capsys.readouterr().err

    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("magnitude", [None, np.full(24, 0.6, np.float32)])
    def test_one_wrong_element_is_a_change(
        self, dtype: Any, magnitude: Any, tmp_path: Path
    ) -> None:
        merge = Merge(tmp_path, dtype).lora(Q, magnitude=magnitude)
        merge.merged[Q] = merge.merged[Q].copy()
        merge.merged[Q][7, 3] += 0.02
        row = merge.row(Q)
        assert row["outcome"] == "changed"
        assert "0.26 % of the elements" in row["explanation"]

    def test_another_scale_is_a_change_and_is_described(self, tmp_path: Path) -> None:
        row = Merge(tmp_path).lora(Q, scale=1).row(Q)
        assert (row["cause"], row["outcome"], row["verified"]) == ("unknown", "changed", 0)
        assert row["explanation"].endswith("1 * B @ A fits best")

    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("factor", [0.8, -1, 0.5])
    def test_one_factor_that_explains_all_changes_is_stated(
        self, dtype: Any, factor: float, tmp_path: Path
    ) -> None:
        merge = Merge(tmp_path, dtype).lora(Q, scale=1.5 * factor).lora(K, scale=1.5 * factor)
        text = merge.compare().attrs["explanation"]
        assert f"; 2 fit {factor:g} times the scale that the adapter states" in text
        assert f"base.ckpt.merge(adapter, scale={factor:g})" in text
        base = xckpt.open(tmp_path / "base.safetensors")
        again = base.ckpt.merge(tmp_path / "adapter", scale=factor)
        table = xckpt.compare(again, tmp_path / "merged.safetensors").ckpt.table()
        assert table["rel_l2"].max() < 0.01  # some libraries round the update first

    @pytest.mark.parametrize("damaged", [False, True])
    def test_factors_that_do_not_explain_all_changes_are_not_stated(
        self, damaged: bool, tmp_path: Path
    ) -> None:
        merge = Merge(tmp_path).lora(Q, scale=1.2).lora(K, scale=1.2 if damaged else 0.9)
        if damaged:
            merge.merged[K][7, 3] += 0.02
        assert "times the scale" not in merge.compare().attrs["explanation"]

    def test_a_tensor_that_was_not_merged_is_a_change(self, tmp_path: Path) -> None:
        merge = Merge(tmp_path).lora(Q).lora(K)
        merge.merged[K] = merge.base[K]
        row = merge.row(K)
        assert row["outcome"] == "changed"
        assert row["explanation"].endswith("b is equal to a")

    def test_a_change_that_no_adapter_explains_stays_a_change(self, tmp_path: Path) -> None:
        merge = Merge(tmp_path).lora(Q)
        merge.merged[FC] = merge.base[FC] + numbers(24, 16, seed=4)
        table = merge.compare().ckpt.table()
        assert table["outcome"].to_dict()[FC] == "changed"
        assert table["outcome"].to_dict()[Q] == "explained"

    def test_nan_is_a_change(self, tmp_path: Path) -> None:
        merge = Merge(tmp_path).lora(Q)
        merge.merged[Q][0, 0] = np.nan
        assert merge.row(Q)["outcome"] == "changed"

    @pytest.mark.parametrize("dtype", TYPES[1:])
    def test_saved_modules_and_biases(self, dtype: Any, tmp_path: Path) -> None:
        merge = Merge(tmp_path, dtype).lora(Q)
        module = PREFIX + Q.removesuffix(".weight")
        bias = f"{Q.removesuffix('weight')}bias"
        merge.base[bias] = rounded(numbers(24, seed=6), dtype)
        change = numbers(24, seed=7)
        merge.adapter |= {f"{module}.lora_B.bias": change, PREFIX + NORM: numbers(16, seed=8)}
        merge.merged[bias] = rounded(
            merge.base[bias].astype("f4") + rounded(np.float32(1.5) * change, dtype).astype("f4"),
            dtype,
        )
        merge.merged[NORM] = rounded(numbers(16, seed=8), dtype)
        table = merge.compare().ckpt.table()
        assert table.loc[[Q, bias, NORM], "cause"].tolist() == ["merged"] * 3
        kinds = xckpt.open(tmp_path / "adapter/adapter_model.safetensors").ckpt.adapters()["kind"]
        assert kinds.to_dict() == {Q: "lora", bias: "bias", NORM: "saved"}
        merge.merged[NORM] = merge.base[NORM]
        assert merge.row(NORM)["outcome"] == "changed"

    @pytest.mark.parametrize("use_dora", [False, True])
    def test_transposed_weights(self, use_dora: bool, tmp_path: Path) -> None:
        square = "h.0.c_proj.weight"
        magnitude = np.full(16, 0.7, np.float32) if use_dora else None
        merge = Merge(tmp_path, config=CONFIG | {"fan_in_fan_out": True})
        merge.base[square] = numbers(16, 16, seed=3)
        merge.lora(square, magnitude=magnitude)  # as if [out, in], and then transposed
        for tensors in (merge.base, merge.merged):
            tensors[square] = np.ascontiguousarray(tensors[square].T)
        assert merge.row(square)["cause"] == "merged"

    def test_names_match_by_their_ends_and_with_underscores(self, tmp_path: Path) -> None:
        merge = Merge(tmp_path).lora(Q)
        merge.adapter = {
            "lora_te_model_layers_0_self_attn_q_proj.lora_down.weight": numbers(4, 16, seed=1),
            "lora_te_model_layers_0_self_attn_q_proj.lora_up.weight": numbers(24, 4, seed=2),
            "lora_te_model_layers_0_self_attn_q_proj.alpha": np.array(6, np.float32),
        }
        assert merge.row(Q)["cause"] == "merged"
        merge.adapter = factors("layers.0.self_attn.q_proj.weight")
        assert merge.row(Q)["cause"] == "merged"
        merge.adapter = factors(f"whole.{Q}")
        assert merge.row(Q)["cause"] == "merged"

    def test_tensors_that_the_base_lacks_are_named(self, tmp_path: Path) -> None:
        merge = Merge(tmp_path).lora(Q)
        merge.adapter |= factors("model.other.weight")
        with pytest.warns(CheckpointWarning, match=r"a lacks: 'model\.other\.weight'"):
            assert merge.row(Q)["cause"] == "merged"

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
    def test_whole_tensors_that_only_the_merged_model_has(self, dtype: Any, tmp_path: Path) -> None:
        merge = Merge(tmp_path, dtype).lora(Q)
        head, bias = "score.weight", "score.bias"
        merge.adapter |= {PREFIX + head: numbers(3, 16), PREFIX + bias: np.zeros(3, "f4")}
        merge.merged |= {head: numbers(3, 16).astype(dtype), bias: np.zeros(3, dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table = merge.compare().ckpt.table()
        for name in (head, bias):
            assert table.loc[name, ["status", "outcome", "cause"]].tolist() == [
                "only_b", "explained", "merged",
            ]  # fmt: skip
            text = f"b is the tensor of the adapter, within the rounding of {np.dtype(dtype)}"
            assert table.loc[name, "explanation"] == text
        assert "2 are only in b, from the adapter: 'score" in str(merge.compare().ckpt)
        merge.merged[head] = merge.merged[head] * dtype(1 + 2**-6)
        row = merge.row(head)
        assert row[["outcome", "cause"]].tolist() == ["unmatched", "only_b"]
        assert "b is not the tensor of the adapter" in row["explanation"]
        del merge.merged[head]
        with pytest.warns(CheckpointWarning, match="a lacks: 'score.weight'"):
            merge.compare()

    def test_an_update_of_another_shape_is_not_verified(self, tmp_path: Path) -> None:
        merge = Merge(tmp_path).lora(Q)
        merge.adapter = factors(Q, rows=23)
        assert "shape [23, 16]" in merge.row(Q)["explanation"]

    def test_a_file_without_factors_raises(self, tmp_path: Path) -> None:
        merge = Merge(tmp_path)
        merge.adapter = {"w": numbers(4)}
        with pytest.raises(ValueError, match="no tensors of an adapter"):
            merge.compare()

    def test_options_that_exclude_each_other(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="adapter needs whole tensors"):
            Merge(tmp_path).lora(Q).compare(dim=-1)

    def test_updates_below_the_rounding_leave_equal_tensors(self, tmp_path: Path) -> None:
        merge = Merge(tmp_path, ml_dtypes.bfloat16, CONFIG | {"lora_alpha": 1e-6})
        merge.lora(Q, scale=2.5e-7)
        row = merge.row(Q)
        assert (row["status"], row["cause"]) == ("same", "merged")
        assert "smaller than the rounding" in row["explanation"]


def test_linear_layers_of_both_kinds_in_one_model(tmp_path: Path) -> None:
    # PEFT's config has one `fan_in_fan_out`; Linear and transformers' Conv1D differ in it.
    fc = FC.replace("mlp.fc", "mlp.c_fc")
    base = {Q: numbers(16, 16), K: numbers(24, 16), fc: numbers(16, 24)}
    tensors = factors(Q, rows=16) | factors(K) | factors(fc)
    path = write(tmp_path / "adapter", tensors, CONFIG | {"fan_in_fan_out": True})
    modules = {name: PREFIX + name.removesuffix(".weight") for name in base}
    products = {
        name: np.float32(1.5) * (tensors[f"{m}.lora_B.weight"] @ tensors[f"{m}.lora_A.weight"])
        for name, m in modules.items()
    }
    merged = {Q: base[Q] + products[Q], K: base[K] + products[K], fc: base[fc] + products[fc].T}
    table = xckpt.compare(base, merged, adapter=path).ckpt.table()
    assert table["cause"].to_dict() == dict.fromkeys(base, "merged")
    # Without a layer of the other kind, the order of a square matrix is known.
    with pytest.warns(xckpt.CheckpointWarning, match="changes tensors that a lacks"):
        table = xckpt.compare({Q: base[Q]}, {Q: merged[Q]}, adapter=path).ckpt.table()
    assert table.loc[Q, "outcome"] == "changed"


@pytest.mark.parametrize("stem", ["adapter_model", "adapters"])
def test_the_config_in_a_folder_chooses_the_adapter_beside_the_model(
    stem: str, tmp_path: Path
) -> None:
    base, tensors = numbers(24, 16), factors(Q)
    module = PREFIX + Q.removesuffix(".weight")
    product = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
    merged = base + np.float32(1.5) * product
    folder = write(tmp_path / "merged", tensors, CONFIG).parent
    (folder / "adapter_model.safetensors").rename(folder / f"{stem}.safetensors")
    xckpt.save({Q: merged}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    table = xckpt.compare({Q: base}, {Q: merged}, adapter=folder).ckpt.table()
    assert table["cause"].to_dict() == {Q: "merged"}
