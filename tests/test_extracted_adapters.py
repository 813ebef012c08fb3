"""`extract_adapter` and `resize_adapter`: the best factors of an update, as PEFT stores them."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import xckpt
from xckpt.cli import main
from xckpt.errors import CheckpointWarning, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SHAPES = {"self_attn.q_proj": (48, 48), "mlp.up_proj": (90, 48), "mlp.down_proj": (48, 90)}
RANKS = {"self_attn.q_proj": 3, "mlp.up_proj": 5, "mlp.down_proj": 3}
Array = np.ndarray[Any, Any]


def name_of(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{module}.weight"


def base_model(dtype: Any = "f4") -> dict[str, Array]:
    rng = np.random.default_rng(0)
    model = {
        "model.embed_tokens.weight": rng.normal(size=(96, 48)),
        "model.norm.weight": np.ones(48),
    }
    for layer in range(2):
        for module, shape in SHAPES.items():
            model[name_of(layer, module)] = rng.normal(size=shape)
    return {name: values.astype(dtype) for name, values in model.items()}


def planted(model: Mapping[str, Array]) -> dict[str, Array]:
    """Return a model with an update of low rank in each module of the second layer."""
    rng = np.random.default_rng(1)
    tuned = dict(model)
    for module, rank in RANKS.items():
        name = name_of(1, module)
        out, inner = SHAPES[module]
        update = rng.normal(size=(out, rank)) @ rng.normal(size=(rank, inner)) / 10
        tuned[name] = (model[name].astype("f8") + update).astype(model[name].dtype)
    return tuned


def changed(model: Mapping[str, Array], power: float) -> dict[str, Array]:
    """Return a model with updates whose singular values fall as a power."""
    rng = np.random.default_rng(2)
    tuned = dict(model)
    for layer in range(2):
        for module, shape in SHAPES.items():
            u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
            values = np.arange(1, len(v) + 1) ** -power
            tuned[name_of(layer, module)] = (
                model[name_of(layer, module)] + (u * values) @ v
            ).astype("f4")
    return tuned


def updates(folder: Path) -> dict[str, Array]:
    ds = xckpt.open(folder).ckpt.updates()
    return {str(name): array.values for name, array in ds.items()}


class TestExtracting:
    def test_planted_updates_have_their_rank(self, tmp_path: Path) -> None:
        base = base_model()
        tuned = planted(base)
        table = xckpt.extract_adapter(base, tuned, tmp_path / "adapter", rank=20)
        expected = {name_of(1, module): rank for module, rank in RANKS.items()}
        assert table["rank"].to_dict() == expected
        assert (table["energy"] > 1 - 1e-9).all()
        products = updates(tmp_path / "adapter")
        assert products.keys() == expected.keys()
        for name, product in products.items():
            update = tuned[name].astype("f8") - base[name]
            np.testing.assert_allclose(product, update, rtol=0, atol=1e-6)
            assert table.loc[name, "frobenius"] == pytest.approx(np.linalg.norm(update))
        config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 3, "LORA")
        up = "model.layers.1.mlp.up_proj"
        assert config["rank_pattern"] == config["alpha_pattern"] == {up: 5}

    def test_rounding_is_no_rank(self, tmp_path: Path) -> None:
        base = base_model(ml_dtypes.bfloat16)
        table = xckpt.extract_adapter(base, planted(base), tmp_path / "adapter", rank=40)
        assert table["rank"].tolist() == [RANKS[name.split(".", 3)[3][:-7]] for name in table.index]
        assert (table["energy"] < 1).all()

    @pytest.mark.parametrize("energy", [0.5, 0.9, 0.99])
    def test_the_lowest_rank_that_keeps_the_energy(self, energy: float, tmp_path: Path) -> None:
        base = base_model()
        tuned = changed(base, 1.0)
        table = xckpt.extract_adapter(base, tuned, tmp_path / "adapter", energy=energy)
        products = updates(tmp_path / "adapter")
        assert len(table) == 2 * len(SHAPES)
        for name, rank in table["rank"].items():
            update = tuned[str(name)].astype("f8") - base[str(name)]
            squares = np.cumsum(np.linalg.svd(update, compute_uv=False) ** 2)
            shares = squares / squares[-1]
            assert rank == np.argmax(shares >= energy) + 1
            assert table.loc[name, "energy"] == pytest.approx(shares[rank - 1], abs=1e-6)
            lost = np.sum((update - products[str(name)]) ** 2) / squares[-1]
            assert 1 - lost == pytest.approx(shares[rank - 1], abs=1e-6)

    def test_the_rank_limits_the_energy_with_a_warning(self, tmp_path: Path) -> None:
        base = base_model()
        with pytest.warns(CheckpointWarning, match="a higher rank than 4 would keep 0.99"):
            table = xckpt.extract_adapter(
                base, changed(base, 0.5), tmp_path / "a", rank=4, energy=0.99
            )
        assert set(table["rank"]) == {4}

    @pytest.mark.parametrize("power", [0.0, 0.5, 1.5])
    @pytest.mark.parametrize("energy", [None, 0.9])
    def test_a_few_values_of_many(self, energy: float | None, power: float, tmp_path: Path) -> None:
        rng = np.random.default_rng(3)
        base = {name_of(0, "mlp.up_proj"): np.zeros((500, 400), "f4")}
        u, _, v = np.linalg.svd(rng.normal(size=(500, 400)), full_matrices=False)
        values = np.arange(1.0, 401) ** -power
        tuned = {name: ((u * values) @ v).astype("f4") for name in base}
        with pytest.warns() if energy and power < 1 else nullcontext():
            table = xckpt.extract_adapter(base, tuned, tmp_path / "a", rank=4, energy=energy)
        shares = np.cumsum(values**2) / np.sum(values**2)
        rank = 4 if energy is None else min(4, int(np.argmax(shares >= energy)) + 1)
        assert table["rank"].tolist() == [rank]
        assert table["energy"].iloc[0] == pytest.approx(shares[rank - 1], abs=1e-6)
        (product,) = updates(tmp_path / "a").values()
        lost = np.sum((next(iter(tuned.values())) - product) ** 2) / np.sum(values**2)
        assert 1 - lost == pytest.approx(shares[rank - 1], abs=1e-6)

    def test_rounding_takes_no_eigenvectors(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rng = np.random.default_rng(4)
        name = name_of(0, "mlp.up_proj")
        base = rng.normal(size=(500, 400)).astype(ml_dtypes.bfloat16)
        update = rng.normal(size=(500, 3)) @ rng.normal(size=(3, 400)) / 10
        tuned = (base.astype("f8") + update).astype(ml_dtypes.bfloat16)
        solve = np.linalg.eigh
        sizes: list[int] = []

        def counted(matrix: Any) -> Any:
            sizes.append(len(matrix))
            return solve(matrix)

        monkeypatch.setattr("numpy.linalg.eigh", counted)
        table = xckpt.extract_adapter({name: base}, {name: tuned}, tmp_path / "a", rank=8)
        assert table["rank"].tolist() == [3]
        assert max(sizes, default=0) < 400

    def test_files_are_read_in_blocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base = base_model()
        tuned = planted(base)
        for name, model in {"base": base, "tuned": tuned}.items():
            xckpt.save(model, tmp_path / f"{name}.safetensors")
        table = xckpt.extract_adapter(
            tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "a", 8
        )
        monkeypatch.setattr("xckpt.statistics.spectra._BLOCK_NBYTES", 64)
        monkeypatch.setattr("xckpt.statistics.spectra._WHOLE_NBYTES", 64)
        cut = xckpt.extract_adapter(base, tuned, tmp_path / "b", 8)
        assert cut["rank"].equals(table["rank"])
        first, second = updates(tmp_path / "a"), updates(tmp_path / "b")
        for name, product in first.items():
            np.testing.assert_allclose(product, second[name], rtol=0, atol=1e-6)

    def test_other_changes_are_named(self, tmp_path: Path) -> None:
        base = base_model()
        tuned = planted(base)
        tuned["model.norm.weight"] = tuned["model.norm.weight"] * 2
        tuned["new.weight"] = np.ones((4, 4), "f4")
        with pytest.warns(CheckpointWarning, match=r"lacks the changes of .*new\.weight.*norm"):
            xckpt.extract_adapter(base, tuned, tmp_path / "a", 4)

    @pytest.mark.parametrize(
        ("config", "name", "is_elsewhere"),
        [
            ({"model_type": "vit"}, "vit.encoder.layer.0.attention.attention.query", True),
            ({"model_type": "vit"}, "vit.layers.0.attention.q_proj", False),
            ({"model_type": "llama"}, "vit.encoder.layer.0.attention.attention.query", False),
            ("SiglipModel", "vision_model.encoder.layers.0.self_attn.q_proj", False),
            ("SiglipVisionModel", "vision_model.encoder.layers.0.self_attn.q_proj", True),
            ("SiglipVisionModel", "encoder.layers.0.self_attn.q_proj", False),
            ("LlavaModel", "language_model.model.layers.0.self_attn.q_proj", True),
            ("LlavaModel", "language_model.layers.0.self_attn.q_proj", False),
            ("LlavaForConditionalGeneration", "language_model.model.layers.0.mlp.up_proj", True),
            ("LlavaForConditionalGeneration", "model.language_model.layers.0.mlp.up_proj", False),
        ],
    )
    def test_names_that_no_module_has_are_named(
        self, config: Any, name: str, is_elsewhere: bool, tmp_path: Path
    ) -> None:
        base = {f"{name}.weight": np.eye(8, dtype="f4")}
        tuned = {key: value + np.outer(np.arange(8), np.ones(8)) for key, value in base.items()}
        types = {"SiglipModel": "siglip", "SiglipVisionModel": "siglip_vision_model"}
        if isinstance(config, str):
            config = {"model_type": types.get(config, "llava"), "architectures": [config]}
        for folder, tensors in (("base", base), ("tuned", tuned)):
            (tmp_path / folder).mkdir()
            xckpt.save(tensors, tmp_path / folder / "model.safetensors")
            (tmp_path / folder / "config.json").write_text(json.dumps(config))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            xckpt.extract_adapter(tmp_path / "base", tmp_path / "tuned", tmp_path / "a", 1)
            xckpt.extract_adapter(base, tuned, tmp_path / "b", 1)
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == is_elsewhere
        assert all("transformers 5 names modules" in t and f"{name}.weight" in t for t in texts)

    def test_updates_with_nan_are_left_out(self, tmp_path: Path) -> None:
        base = base_model()
        tuned, name = planted(base), name_of(1, "mlp.up_proj")
        tuned[name][3, 4] = np.nan
        with pytest.warns(
            CheckpointWarning, match=r"layers\.1\.mlp\.up_proj\.weight', which have NaN"
        ):
            table = xckpt.extract_adapter(base, tuned, tmp_path / "a", 4)
        assert len(table) == 2
        assert name not in table.index

    def test_selected_tensors(self, tmp_path: Path) -> None:
        base = base_model()
        table = xckpt.extract_adapter(base, planted(base), tmp_path / "a", 9, tensors="*.up_proj.*")
        assert list(table.index) == [name_of(1, "mlp.up_proj")]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "state the rank"),
            ({"rank": 0}, "rank must be"),
            ({"rank": 2.0}, "rank must be"),
            ({"energy": 1.5}, "energy must be"),
        ],
    )
    def test_invalid_options(self, options: Any, message: str, tmp_path: Path) -> None:
        base = base_model()
        with pytest.raises(ValueError, match=message):
            xckpt.extract_adapter(base, planted(base), tmp_path / "a", **options)
        with pytest.raises(ValueError, match=message):
            xckpt.resize_adapter(tmp_path, tmp_path / "a", **options)
        assert not (tmp_path / "a").exists()

    def test_without_a_result_nothing_is_written(self, tmp_path: Path) -> None:
        base = base_model()
        with pytest.raises(ValueError, match="no linear weight of the checkpoints differs"):
            xckpt.extract_adapter(base, base, tmp_path / "a", 4)
        assert not (tmp_path / "a").exists()
        tuned = planted(base)
        xckpt.extract_adapter(base, tuned, tmp_path / "a", 4)
        before = (tmp_path / "a/adapter_config.json").read_bytes()
        with pytest.raises(FileExistsError):
            xckpt.extract_adapter(base, tuned, tmp_path / "a", 2)
        assert (tmp_path / "a/adapter_config.json").read_bytes() == before
        xckpt.extract_adapter(base, tuned, tmp_path / "a", 2, overwrite=True)
        assert set(xckpt.open(tmp_path / "a").ckpt.adapters()["rank"]) == {2}

    def test_the_command(self, tmp_path: Path, capsys: Any) -> None:
        base = base_model()
        for name, model in {"base": base, "tuned": planted(base)}.items():
            xckpt.save(model, tmp_path / f"{name}.safetensors")
        files = [str(tmp_path / f"{name}.safetensors") for name in ("base", "tuned")]
        assert main(["extract", *files, str(tmp_path / "a"), "--rank", "8"]) == 0
        out = capsys.readouterr().out
        assert name_of(1, "mlp.up_proj") in out
        assert main(["extract", *files, str(tmp_path / "a"), "--rank", "8"]) == 2
        assert "--overwrite" in capsys.readouterr().err
        again = ["extract", *files, str(tmp_path / "a"), "--energy", "0.5", "--overwrite", "--json"]
        assert main(again) == 0
        document = json.loads(capsys.readouterr().out)
        assert {row["name"] for row in document["tensors"]} == {name_of(1, m) for m in SHAPES}
        assert all(0.5 <= row["energy"] <= 1 for row in document["tensors"])
        assert main(["extract", *files, str(tmp_path / "b")]) == 2


class TestResizing:
    def adapter(self, folder: Path, **config: Any) -> dict[str, Array]:
        """Write an adapter of rank 6 with a scale of 2, and return its products."""
        rng = np.random.default_rng(3)
        tensors: dict[str, Array] = {}
        products = {}
        for module, (out, inner) in SHAPES.items():
            a, b = rng.normal(size=(6, inner)), rng.normal(size=(out, 6))
            stem = f"base_model.model.model.layers.0.{module}"
            tensors |= {
                f"{stem}.lora_A.weight": a.astype("f4"),
                f"{stem}.lora_B.weight": b.astype("f4"),
            }
            products[name_of(0, module)] = 2 * (b.astype("f4").astype("f8") @ a.astype("f4"))
        tensors["base_model.model.model.norm.weight"] = np.ones(48, "f4")
        folder.mkdir()
        xckpt.save(tensors, folder / "adapter_model.safetensors")
        stated = {"peft_type": "LORA", "r": 6, "lora_alpha": 12, "modules_to_save": ["norm"]}
        (folder / "adapter_config.json").write_text(json.dumps(stated | config))
        return products

    def test_the_best_product_of_a_lower_rank(self, tmp_path: Path) -> None:
        products = self.adapter(tmp_path / "old")
        table = xckpt.resize_adapter(tmp_path / "old", tmp_path / "new", rank=2)
        resized = updates(tmp_path / "new")
        for name, product in products.items():
            u, values, v = np.linalg.svd(product, full_matrices=False)
            np.testing.assert_allclose(resized[name], (u[:, :2] * values[:2]) @ v[:2], atol=1e-4)
            share = np.sum(values[:2] ** 2) / np.sum(values**2)
            assert table.loc[name, "energy"] == pytest.approx(share)
        assert set(table["rank"]) == {2}
        old = xckpt.open(tmp_path / "old/adapter_model.safetensors")
        new = xckpt.open(tmp_path / "new/adapter_model.safetensors")
        assert set(old) == set(new)
        saved = "base_model.model.model.norm.weight"
        assert new[saved].equals(old[saved])
        config = json.loads((tmp_path / "new/adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (2, 2, ["norm"])

    def test_all_of_the_energy_keeps_the_product(self, tmp_path: Path) -> None:
        products = self.adapter(tmp_path / "old")
        table = xckpt.resize_adapter(tmp_path / "old", tmp_path / "new", energy=0.999999999)
        assert set(table["rank"]) == {6}
        for name, product in updates(tmp_path / "new").items():
            np.testing.assert_allclose(product, products[name], rtol=0, atol=1e-4)

    @pytest.mark.parametrize("config", [{"use_dora": True}, {"peft_type": "VERA"}])
    def test_other_methods_are_refused(self, config: Any, tmp_path: Path) -> None:
        self.adapter(tmp_path / "old", **config)
        with pytest.raises(UnsupportedError, match="only LoRA adapters of PEFT"):
            xckpt.resize_adapter(tmp_path / "old", tmp_path / "new", 2)
        assert not (tmp_path / "new").exists()

    def test_a_model_is_no_adapter(self, tmp_path: Path) -> None:
        xckpt.save(base_model(), tmp_path / "m.safetensors")
        with pytest.raises(UnsupportedError, match="only LoRA adapters of PEFT"):
            xckpt.resize_adapter(tmp_path / "m.safetensors", tmp_path / "new", 2)
