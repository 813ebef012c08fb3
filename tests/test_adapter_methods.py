"""Adapters of methods that have no formula are named, with what to do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from xckpt.cli import main
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODULE = "base_model.model.model.fc"
LORA = {f"{MODULE}.lora_A.weight": (4, 16), f"{MODULE}.lora_B.weight": (16, 4)}
# What PEFT 0.21.2 writes for one linear layer, and the method's name.
PEFT: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "VERA": (
        "VeRA",
        {f"{MODULE}.vera_lambda_b": (16,), f"{MODULE}.vera_lambda_d": (4,),
         "base_model.vera_A": (4, 16), "base_model.vera_B": (16, 4)},
    ),
    "OFT": ("OFT", {f"{MODULE}.oft_R.weight": (4, 6)}),
    "BOFT": ("BOFT", {f"{MODULE}.boft_R": (1, 4, 4, 4), f"{MODULE}.boft_s": (16, 1)}),
    "FOURIERFT": ("FourierFT", {f"{MODULE}.fourierft_spectrum": (10,)}),
    "VBLORA": (
        "VB-LoRA",
        {f"{MODULE}.vblora_logits_A": (2, 4, 8), f"{MODULE}.vblora_logits_B": (4, 2, 8),
         "base_model.vblora_vector_bank": (8, 4)},
    ),
    "HRA": ("HRA", {f"{MODULE}.hra_u": (16, 4)}),
    "BONE": ("Bone", {f"{MODULE}.bone_block": (4, 16)}),
    "MISS": ("MiSS", {f"{MODULE}.miss_block": (4, 16)}),
    "LN_TUNING": (
        "LN tuning",
        {f"{MODULE}.ln_tuning_layers.bias": (16,), f"{MODULE}.ln_tuning_layers.weight": (16,)},
    ),
    "RANDLORA": (
        "RandLoRA",
        {f"{MODULE}.randlora_gamma": (4, 16), f"{MODULE}.randlora_lambda": (4, 4),
         "base_model.randlora_A": (4, 1, 16)},
    ),
    "ROAD": ("RoAd", {f"{MODULE}.road_alpha": (8,), f"{MODULE}.road_theta": (8,)}),
    "SHIRA": ("SHiRA", {f"{MODULE}.shira_weight": (64,), f"{MODULE}.shira_indices": (2, 64)}),
    "C3A": ("C3A", {f"{MODULE}.c3a_kernel": (4, 4, 4)}),
    "WAVEFT": ("WaveFT", {f"{MODULE}.waveft_spectrum": (10,)}),
    "DELORA": (
        "DeLoRA",
        {f"{MODULE}.delora_A": (4, 16), f"{MODULE}.delora_B": (16, 4),
         f"{MODULE}.delora_lambda": (1,), f"{MODULE}.delora_w_norm": (16,)},
    ),
    "GRALORA": ("GraLoRA", {f"{MODULE}.gralora_A": (2, 8, 4), f"{MODULE}.gralora_B": (2, 4, 8)}),
    "POLY": (
        "Poly",
        {f"{MODULE}.poly_lora_A": (1, 4, 16, 4), f"{MODULE}.poly_lora_B": (1, 4, 4, 16),
         f"{MODULE}.poly_router.module_logits": (1, 4)},
    ),
    "GLORA": ("GLoRA", {f"{MODULE}.glora_A.Xd": (16, 8), f"{MODULE}.glora_A.Xu": (8, 16)}),
}  # fmt: skip
# What LyCORIS 4.1.3 and kohya write for one layer, without a config.
FLAT = "lora_unet_mid_block_proj"
LYCORIS: dict[str, tuple[str, ...]] = {
    "LoHa": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "alpha"),
    "LoKr": ("lokr_w1", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "alpha", "dora_scale"),
    "OFT": ("oft_blocks", "rescale", "alpha"),
    "Tucker": ("lora_up.weight", "lora_down.weight", "lora_mid.weight", "alpha"),
    "Full": ("diff", "diff_b"),
    "Norm": ("w_norm", "b_norm"),
    r"\(IA\)³": ("weight", "on_input"),
    "GLoRA": ("a1.weight", "a2.weight", "b1.weight", "b2.weight", "bm.weight", "alpha"),
    "T-LoRA": ("q_layer.weight", "p_layer.weight", "lambda_layer", "alpha"),
}


def write(folder: Path, shapes: Mapping[str, tuple[int, ...]], config: Any = None) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir(exist_ok=True)
    tensors = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}
    xckpt.save(tensors, folder / "adapter_model.safetensors", overwrite=True)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder / "adapter_model.safetensors"


def table_of(*arguments: Any) -> Any:
    return xckpt.open(write(*arguments)).ckpt.adapters()


@pytest.mark.parametrize("peft_type", PEFT)
@pytest.mark.parametrize("with_config", [True, False])
def test_the_method_is_named_for_the_tensor_that_it_changes(
    peft_type: str, with_config: bool, tmp_path: Path
) -> None:
    name, shapes = PEFT[peft_type]
    table = table_of(tmp_path, shapes, {"peft_type": peft_type} if with_config else None)
    assert table.index.tolist() == ["model.fc.weight"]
    assert table["kind"].item() == "unsupported"
    note = table["note"].str
    assert note.match(f"{name} adapters are unsupported: ").item()
    merge = "cannot be merged" if peft_type == "POLY" else "merge them .* first"
    assert note.contains(merge).item()


@pytest.mark.parametrize("name", LYCORIS)
def test_methods_of_lycoris_are_named_without_a_config(name: str, tmp_path: Path) -> None:
    words = LYCORIS[name]
    table = table_of(tmp_path, {f"{FLAT}.{word}": (4, 4) for word in words})
    assert table.index.tolist() == [FLAT]
    assert table["kind"].item() == "unsupported"
    assert table["note"].str.match(rf".*{name}.* adapters are unsupported: .* first, ").item()


@pytest.mark.parametrize("peft_type", ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "CPT"])
def test_prompts_change_no_weights(peft_type: str, tmp_path: Path) -> None:
    table = table_of(tmp_path, {"prompt_embeddings": (8, 16)}, {"peft_type": peft_type})
    assert table["kind"].tolist() == ["unsupported"]
    assert table["note"].str.contains("cannot be merged").all()


def test_an_unknown_method_is_named_as_the_config_does(tmp_path: Path) -> None:
    config = {"peft_type": "NEWLORA"}
    table = table_of(tmp_path, {f"{MODULE}.newlora_x": (4, 4)}, config)
    assert table["note"].str.match("'NEWLORA' adapters are unsupported: ").item()


def test_the_config_outranks_the_names_of_tensors(tmp_path: Path) -> None:
    table = table_of(tmp_path, LORA, {"peft_type": "ADALORA", "lora_alpha": 4})
    assert table["note"].str.startswith("AdaLoRA adapters are unsupported").item()
    assert table.index.tolist() == ["model.fc.weight"]


@pytest.mark.parametrize(
    ("init", "name"),
    [
        ("pissa", "PiSSA"), ("pissa_niter_16", "PiSSA"), ("olora", "OLoRA"), ("corda", "CorDA"),
        ("loftq", "LoftQ"), ("lora_ga", "LoRA-GA"),
    ],
)  # fmt: skip
def test_factors_that_start_from_the_base_weights_are_no_update_of_them(
    init: str, name: str, tmp_path: Path
) -> None:
    config = {"peft_type": "LORA", "lora_alpha": 4, "init_lora_weights": init}
    table = table_of(tmp_path, LORA, config)
    assert table["kind"].item() == "unsupported"
    assert table["note"].str.startswith(f"{name} adapters are unsupported").item()
    assert table["note"].str.contains("path_initial_model_for_weight_conversion").item()


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica", None, 3])
def test_other_initial_values_are_lora(init: Any, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "lora_alpha": 4, "init_lora_weights": init}
    table = table_of(tmp_path, LORA, config)
    assert table["kind"].item() == "lora"
    assert table["scale"].item() == 1


@pytest.mark.parametrize(
    ("options", "extra", "word"),
    [
        ({"kasa_config": {"beta": 1}}, {f"{MODULE}.lora_diag": (4,)}, "KaSA"),
        ({}, {f"{MODULE}.lora_diag": (4,)}, "KaSA"),
        ({"alora_invocation_tokens": [1, 2]}, {}, "alora_invocation_tokens"),
        ({"arrow_config": {"top_k": 1}}, {}, "arrow_config"),
        ({"use_dora": True}, {}, "magnitude"),
    ],
)
def test_options_that_change_the_update_are_named(
    options: Any, extra: Any, word: str, tmp_path: Path
) -> None:
    table = table_of(tmp_path, LORA | extra, {"peft_type": "LORA", "lora_alpha": 4} | options)
    assert table["kind"].tolist() == ["unsupported"]
    assert table["note"].str.contains(word).item()


def test_whole_modules_of_any_method_are_saved(tmp_path: Path) -> None:
    shapes = PEFT["HRA"][1] | {"base_model.model.head.weight": (4, 16)}
    kinds = table_of(tmp_path, shapes, {"peft_type": "HRA"})["kind"].to_dict()
    assert kinds == {"model.fc.weight": "unsupported", "head.weight": "saved"}


@pytest.mark.parametrize(
    "names",
    [
        ("road_block.weight", "shadow_map.weight", "x.miss_rate", "lily_pad.bias"),
        ("diff", "x.diff", "x.diff_b", "x.on_input", "x.a1.weight", "x.lambda_layer"),
        ("prompt_embeddings", "x.w_norm", "x.b_norm"),
    ],
)
def test_models_with_similar_names_are_no_adapters(names: tuple[str, ...]) -> None:
    ds = xckpt.open({name: np.ones((4, 4), np.float32) for name in names})
    assert ds.ckpt.adapters().empty


def test_factors_of_lycoris_are_lora(tmp_path: Path) -> None:
    module = "lycoris_model_fc"
    shapes = {
        f"{module}.lora_down.weight": (4, 16),
        f"{module}.lora_up.weight": (16, 4),
        f"{module}.alpha": (),
    }
    adapter = write(tmp_path, shapes)
    assert xckpt.open(adapter).ckpt.adapters()["kind"].to_dict() == {module: "lora"}
    base = {"model.fc.weight": np.ones((16, 16), np.float32)}
    merged = {"model.fc.weight": np.full((16, 16), 1.125, np.float32)}
    table = xckpt.compare(base, merged, adapter=adapter, progress=False).ckpt.table()
    assert table["cause"].tolist() == ["merged"]


class TestUse:
    """What is done with an adapter raises or warns with the name of its method."""

    def test_updates_warn(self, tmp_path: Path) -> None:
        ds = xckpt.open(write(tmp_path, PEFT["HRA"][1], {"peft_type": "HRA"}))
        with pytest.warns(CheckpointWarning, match=r"no update of 'model\.fc\.weight': HRA adap"):
            assert not ds.ckpt.updates().data_vars

    @pytest.mark.parametrize("peft_type", ["HRA", "OFT", "VERA", "LN_TUNING"])
    def test_comparisons_raise(self, peft_type: str, tmp_path: Path) -> None:
        name, shapes = PEFT[peft_type]
        adapter = write(tmp_path / "adapter", shapes, {"peft_type": peft_type})
        base = {"model.fc.weight": np.ones((16, 16), np.float32)}
        with pytest.raises(xckpt.UnsupportedError, match=f"{name} adapters are unsupported"):
            xckpt.compare(base, base, adapter=adapter, progress=False)

    def test_a_tensor_of_another_method_is_named_beside_verified_ones(self, tmp_path: Path) -> None:
        other, fc = "model.other.weight", "model.fc.weight"
        config = {"peft_type": "LORA", "lora_alpha": 4}
        tensors = LORA | {"base_model.model.model.other.hra_u": (16, 4)}
        adapter = write(tmp_path / "adapter", tensors, config)
        base = {name: np.ones((16, 16), np.float32) for name in (other, fc)}
        # The product of factors of 0.5 and rank 4 is 1, and so is the scale.
        merged = {other: base[other] * 2, fc: base[fc] * 2}
        table = xckpt.compare(base, merged, adapter=adapter, progress=False).ckpt.table()
        assert table.loc[fc, "cause"] == "merged"
        assert table.loc[other, "outcome"] == "changed"
        assert "HRA adapters are unsupported" in table.loc[other, "explanation"]

    def test_the_command_line_names_the_method(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        adapter = write(tmp_path / "adapter", PEFT["BOFT"][1], {"peft_type": "BOFT"})
        path = str(tmp_path / "base.safetensors")
        xckpt.save({"model.fc.weight": np.ones((16, 16), np.float32)}, path)
        assert main(["compare", path, path, "--adapter", str(adapter.parent)]) == 2
        assert "BOFT adapters are unsupported" in capsys.readouterr().err

    def test_a_file_without_an_adapter_is_named(self) -> None:
        base = {"model.fc.weight": np.ones((16, 16), np.float32)}
        with pytest.raises(ValueError, match=r"no tensors of an adapter"):
            xckpt.compare(base, base, adapter=base, progress=False)
