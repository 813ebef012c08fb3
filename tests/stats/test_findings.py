"""Findings in single tensors, among siblings, and between equal tensors; none in new models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.formats import torch_files
from tests.stats.architectures import ARCHITECTURES, resnet
from tests.stats.checkpoints import write
from tests.stats.models import FRESH, gpt2, llama, quantised, torch_mixture
from xckpt.health import RULES
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd

    from tests.stats.models import Tensors


def findings_of(path: Path, tensors: Tensors, **options: Any) -> pd.DataFrame:
    return xckpt.findings(write(path, tensors), progress=False, **options)


def in_memory(tensors: Tensors) -> xr.Dataset:
    variables = {}
    for name, values in tensors.items():
        dims = [f"{name}:{axis}" for axis in range(values.ndim)]
        variables[name] = (dims, values)
    return xr.Dataset(variables)


def rules(frame: pd.DataFrame) -> set[tuple[str, str]]:
    return set(zip(frame["tensor"], frame["rule"], strict=True))


class TestSoundModels:
    @pytest.mark.parametrize("model", [*FRESH, *ARCHITECTURES, quantised])
    def test_new_model_has_no_findings(self, model: Callable[[], Tensors], tmp_path: Path) -> None:
        frame = findings_of(tmp_path / "m.safetensors", model())
        assert frame.empty, frame.to_string()

    @pytest.mark.parametrize("model", FRESH)
    def test_model_with_slashes_in_names_has_no_findings(
        self, model: Callable[[], Tensors], tmp_path: Path
    ) -> None:
        tensors = {name.replace(".", "/"): values for name, values in model().items()}
        frame = findings_of(tmp_path / "m.safetensors", tensors)
        assert frame.empty, frame.to_string()

    def test_float16_model_has_no_findings(self, tmp_path: Path) -> None:
        assert findings_of(tmp_path / "m.safetensors", llama(4, 64, np.float16)).empty

    def test_demo_has_only_its_planted_faults(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path / "m.zt", layers=4, width=128)
        expected = {
            ("model.layers.2.mlp.gate_proj.weight", "outlier_channels"),  # and three more like it
            ("model.layers.2.mlp.up_proj.weight", "nan"),
            ("model.layers.1.self_attn.q_proj.bias", "all_zero"),
            ("model.embed_tokens.delta", "dead_rows"),
            ("lm_head.delta", "dead_rows"),
        }
        assert rules(xckpt.findings(path, progress=False)) == expected


def plant_nan(t: Tensors) -> str:
    t["layers.1.attn.out_proj.weight"][0, :3] = np.nan
    return "layers.1.attn.out_proj.weight"


def plant_inf(t: Tensors) -> str:
    t["layers.1.attn.out_proj.bias"][5] = np.inf
    return "layers.1.attn.out_proj.bias"


def plant_zero_bias(t: Tensors) -> str:
    t["layers.3.attn.out_proj.bias"][:] = 0
    return "layers.3.attn.out_proj.bias"


def plant_constant(t: Tensors) -> str:
    t["layers.3.attn.out_proj.weight"][:] = 0.5
    return "layers.3.attn.out_proj.weight"


def plant_exploding(t: Tensors) -> str:
    t["embeddings.word_embeddings.weight"][7, 7] = 1e6
    return "embeddings.word_embeddings.weight"


def plant_dead_rows(t: Tensors) -> str:
    t["layers.0.moe.experts.3.up.weight"][[3, 9]] = 0
    return "layers.0.moe.experts.3.up.weight"


def plant_dead_column(t: Tensors) -> str:
    t["layers.0.moe.experts.3.up.weight"][:, 5] = 0
    return "layers.0.moe.experts.3.up.weight"


def plant_dead_heads(t: Tensors) -> str:
    t["layers.2.attn.in_proj.weight"][32:64] = 0
    return "layers.2.attn.in_proj.weight"


def plant_dead_heads_of_columns(t: Tensors) -> str:
    t["layers.2.attn.out_proj.weight"][:, 16:32] = 0
    return "layers.2.attn.out_proj.weight"


def plant_dead_expert(t: Tensors) -> str:
    t["layers.2.moe.experts.2.up.weight"][:] = 0
    return "layers.2.moe.experts.2.up.weight"


def plant_idle_expert(t: Tensors) -> str:
    t["layers.2.moe.gate.weight"][3] *= 1e-4
    return "layers.2.moe.gate.weight"


def plant_unrouted_expert(t: Tensors) -> str:
    t["layers.2.moe.gate.weight"][3] = 0
    return "layers.2.moe.gate.weight"


def plant_stacked_expert(t: Tensors) -> str:
    t["layers.0.moe.experts.gate_up"] = np.random.default_rng(0).random((6, 32, 32), np.float32)
    t["layers.0.moe.experts.gate_up"][4] = 0
    return "layers.0.moe.experts.gate_up"


def plant_norm_without_one(t: Tensors) -> str:
    t["layers.2.bn.weight"] = np.random.default_rng(0).normal(0, 0.1, 64).astype(np.float32)
    return "layers.2.bn.weight"


def plant_negative_norm(t: Tensors) -> str:
    for layer in range(5):
        rng = np.random.default_rng(layer)
        t[f"layers.{layer}.bn.weight"] = rng.normal(1, 0.1, 64).astype(np.float32)
    t["layers.2.bn.weight"][9] = -0.2
    return "layers.2.bn.weight"


def plant_unlike_layer(t: Tensors) -> str:
    t["layers.2.attn.out_proj.weight"] *= 3
    return "layers.2.attn.out_proj.weight"


def plant_outlier_column(t: Tensors) -> str:
    t["embeddings.word_embeddings.weight"][3::50, 17] = 40
    return "embeddings.word_embeddings.weight"


def plant_outlier_row(t: Tensors) -> str:
    t["embeddings.word_embeddings.weight"][17, 3::10] = 40
    return "embeddings.word_embeddings.weight"


def plant_subnormal(t: Tensors) -> str:
    t["layers.1.attn.out_proj.weight"] *= 1e-38
    t |= {
        f"layers.{n}.attn.out_proj.weight": t["layers.1.attn.out_proj.weight"][n:]
        for n in (0, 2, 3, 4)
    }
    return "layers.1.attn.out_proj.weight"


def plant_wide_type(t: Tensors) -> str:
    name = "embeddings.word_embeddings.weight"
    t[name] = t[name].astype(ml_dtypes.bfloat16).astype(np.float32)
    return name


def plant_wider_type(t: Tensors) -> str:
    name = "embeddings.word_embeddings.weight"
    t[name] = t[name].astype(np.float64)
    return name


def plant_mixed_types(t: Tensors) -> str:
    name = "layers.4.attn.in_proj.weight"
    t[name] = t[name].astype(np.float16)
    return name


def plant_duplicate(t: Tensors) -> str:
    t["layers.3.moe.experts.2.up.weight"] = t["layers.1.moe.experts.1.up.weight"].copy()
    return "layers.3.moe.experts.2.up.weight"


PLANTED: list[tuple[str, str, Callable[[Tensors], str]]] = [
    ("nan", "3 of 4,096 elements are NaN", plant_nan),
    ("inf", "1 of 64 elements is infinite", plant_inf),
    ("all_zero", "all 64 elements are 0, unlike those of 4 siblings", plant_zero_bias),
    ("all_zero", "all 4,096 elements are 0, unlike those of 19 siblings", plant_dead_expert),
    ("constant", "all 4,096 elements are 0.5, unlike those of 4 siblings", plant_constant),
    ("exploding", "the largest magnitude, 1e+06, is 160 standard deviations", plant_exploding),
    ("dead_rows", "2 of 64 rows are zero", plant_dead_rows),
    ("dead_columns", "1 of 64 columns is zero", plant_dead_column),
    ("dead_heads", "32 of 192 rows are zero: as many as 1 head of 32", plant_dead_heads),
    (
        "dead_heads",
        "16 of 64 columns are zero: as many as 1 head of 16",
        plant_dead_heads_of_columns,
    ),
    ("dead_experts", "a row of the router near zero, first expert 3", plant_idle_expert),
    ("dead_experts", "1 of 4 experts", plant_unrouted_expert),
    ("dead_experts", "1 of 6 experts", plant_stacked_expert),
    ("zero_centred_norm", "those of 4 like it on 1: is 1 missing?", plant_norm_without_one),
    ("negative_norm", "its smallest weight is -0.2", plant_negative_norm),
    ("unlike_layer", "is 3 times that of the layers next to it", plant_unlike_layer),
    ("outlier_channels", "1 column of 64", plant_outlier_column),
    ("outlier_channels", "1 row of 400", plant_outlier_row),
    ("subnormal", "of the elements are subnormal", plant_subnormal),
    ("wide_type", "every value of this float32 is a bfloat16: 50.0 KiB would do", plant_wide_type),
    ("wide_type", "every value of this float64 is a float32", plant_wider_type),
    ("mixed_types", "it is float16, and 4 of its 4 siblings float32", plant_mixed_types),
    ("duplicated", "equal to layers.1.moe.experts.1.up.weight: 16.0 KiB", plant_duplicate),
]


@pytest.mark.parametrize(("rule", "words", "plant"), PLANTED, ids=[p.__name__ for *_, p in PLANTED])
def test_each_rule_finds_what_is_planted(
    rule: str, words: str, plant: Callable[[Tensors], str]
) -> None:
    tensors = torch_mixture(experts=4)
    name = plant(tensors)
    # The adapters of the mixture are new, which only shows if nothing else is.
    frame = xckpt.findings(in_memory(tensors), ignore="untrained", progress=False)
    mine = frame[frame["rule"] == rule]
    if not RULES[rule].is_of_kind:  # otherwise another tensor may stand for it
        mine = mine[mine["tensor"] == name]
    assert words in mine["explanation"].item(), frame.to_string()
    assert mine["severity"].item() == RULES[rule].severity
    if rule not in {"exploding", "subnormal"}:  # which change more than one thing
        assert set(frame["tensor"]) == {name}, frame.to_string()


class TestCodes:
    def test_codes_that_use_little_of_their_range(self, tmp_path: Path) -> None:
        tensors = quantised()
        tensors["layers.1.up.weight"] //= 4
        (row,) = findings_of(tmp_path / "m.safetensors", tensors).itertuples()
        assert (row.tensor, row.rule) == ("layers.1.up.weight", "narrow_codes")
        assert row.explanation == "codes are from -32 to 31: 25% of the range of int8"

    def test_small_floats_that_use_little_of_their_range(self, tmp_path: Path) -> None:
        tensors = quantised()
        tensors["layers.2.down.weight"] = (
            tensors["layers.2.down.weight"].astype(np.float32) / 100
        ).astype(ml_dtypes.float8_e4m3fn)
        frame = findings_of(tmp_path / "m.safetensors", tensors)
        (row,) = frame[frame["rule"] == "narrow_codes"].itertuples()
        assert row.tensor == "layers.2.down.weight"
        assert row.explanation.startswith("the largest magnitude of its codes is 4.5, ")

    def test_clipped_codes(self, tmp_path: Path) -> None:
        tensors = quantised()
        codes = tensors["layers.0.up.weight"].astype(int)
        tensors["layers.0.up.weight"] = (codes * 3).clip(-128, 127).astype(np.int8)
        (row,) = findings_of(tmp_path / "m.safetensors", tensors).itertuples()
        assert (row.tensor, row.rule) == ("layers.0.up.weight", "saturated_codes")
        assert "of the codes are at an end of their range" in row.explanation

    def test_integers_without_scales_are_no_codes(self, tmp_path: Path) -> None:
        tokens = np.random.default_rng(0).integers(0, 3, (200, 200), np.uint8)
        assert findings_of(tmp_path / "m.safetensors", {"tokens": tokens}).empty


class TestEqualTensors:
    def test_a_copied_layer_is_one_finding(self, tmp_path: Path) -> None:
        tensors = llama(5, 64)
        for name in [key for key in tensors if key.startswith("model.layers.1.")]:
            tensors[name.replace(".1.", ".3.")] = tensors[name].copy()
        frame = findings_of(tmp_path / "m.safetensors", tensors)
        assert list(frame["rule"]) == ["copied_layer"]
        assert frame["value"][0] == 7  # matrices: norms of ones are equal in all layers
        assert frame["explanation"][0] == (
            "it is equal to model.layers.1.mlp.down_proj.weight: "
            "all of model.layers.3 is a copy of model.layers.1"
        )

    def test_equal_statistics_are_not_enough(self, tmp_path: Path) -> None:
        weight = np.random.default_rng(0).permutation(4096).reshape(64, 64).astype(np.float32)
        tensors = {"a.w": weight, "b.w": weight[::-1].copy(), "c.w": weight[::-1].copy()}
        frame = findings_of(tmp_path / "m.safetensors", tensors)
        assert rules(frame) == {("c.w", "duplicated")}
        assert "equal to b.w" in frame["explanation"].item()

    def test_the_same_bytes_of_a_file_are_tied(self, tmp_path: Path) -> None:
        tied = torch_files.view(torch_files.storage("0", 6), 0, (3, 2), (2, 1))
        value = torch_files.mapping({"embed.weight": tied, "lm_head.weight": tied})
        storage = np.arange(6, dtype=np.float32).tobytes()
        (tmp_path / "m.pt").write_bytes(torch_files.archive(value, {"0": storage}))
        (row,) = xckpt.findings(tmp_path / "m.pt", progress=False).itertuples()
        assert (row.rule, row.severity) == ("tied", "info")
        assert "both have the same bytes" in row.explanation


def adam(tensors: Tensors, *, seed: int = 0) -> Tensors:
    """Return the state of Adam for weights: few large gradients, and rows without any."""
    rng = np.random.default_rng(seed)
    state: Tensors = {}
    trained = [v for name, v in tensors.items() if not name.endswith(("attn.bias", "masked_bias"))]
    for number, values in enumerate(trained):
        gradients = np.abs(rng.standard_cauchy(values.shape)) ** 1.5 * 1e-6
        gradients[..., :1] *= 1000
        if values.ndim > 1:
            gradients[1:3] = 0
        state[f"optimizer.state.{number}.step"] = np.array(700, np.float32)
        state[f"optimizer.state.{number}.exp_avg"] = gradients * rng.choice((-1, 1), values.shape)
        state[f"optimizer.state.{number}.exp_avg_sq"] = gradients**2
    return {name: np.asarray(values, np.float32) for name, values in state.items()}


class TestTrainingCheckpoints:
    """Rules about weights do not judge buffers and the state of an optimizer."""

    @pytest.fixture
    def training(self) -> Tensors:
        weights = gpt2(3, 32)
        return {f"model.{name}": values for name, values in weights.items()} | adam(weights)

    def test_moments_are_not_weights(self, training: Tensors, tmp_path: Path) -> None:
        frame = findings_of(tmp_path / "m.safetensors", training)
        assert frame.empty, frame.to_string()

    def test_averages_and_copies_are_not_weights(self, training: Tensors, tmp_path: Path) -> None:
        weights = {name: v for name, v in training.items() if name.startswith("model.")}
        training |= {name.replace("model.", "ema.", 1): v.copy() for name, v in weights.items()}
        masks = ("attn.bias", "masked_bias")
        flat = np.concatenate([v.ravel() for n, v in weights.items() if not n.endswith(masks)])
        training["optimizer_state_dict.fp32_flat_groups.0"] = flat
        frame = findings_of(tmp_path / "m.safetensors", training)
        assert frame.empty, frame.to_string()

    def test_a_mask_of_infinities_is_fine(self, tmp_path: Path) -> None:
        mask = np.where(np.tri(64) > 0, 0, -np.inf).astype(np.float32)
        assert findings_of(tmp_path / "m.safetensors", llama(4, 64) | {"attn_mask": mask}).empty

    @pytest.mark.parametrize(
        ("rule", "field", "words"),
        [
            ("nan", "exp_avg", "1 of 3,072 elements is NaN"),
            ("all_zero", "exp_avg", "all 3,072 elements are 0, unlike those of"),
            ("negative_moment", "exp_avg_sq", "an average of squares is -1e-05"),
        ],
    )
    def test_moments_have_rules_of_their_own(
        self, rule: str, field: str, words: str, training: Tensors, tmp_path: Path
    ) -> None:
        name = f"optimizer.state.2.{field}"
        changed = {"nan": np.nan, "all_zero": 0, "negative_moment": -1e-5}[rule]
        training[name][... if rule == "all_zero" else (5, 5)] = changed
        frame = findings_of(tmp_path / "m.safetensors", training)
        assert rules(frame) == {(name, rule)}, frame.to_string()
        assert words in frame["explanation"].item()


@pytest.mark.parametrize(
    "form",
    [
        "optim.state.layers.{n}.attn.{m}.weight.{f}",
        "opt_state.0.{f}.layers.{n}.attn.{m}.kernel",
        "optimizer/{f}/layers/{n}/{m}/w",
    ],
)
@pytest.mark.parametrize("module", ["v_proj", "v", "to_v", "nu"])
def test_first_moments_may_be_negative(form: str, module: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 3, 8, 8), "f4")
    is_torch = "weight" in form
    fields = ("exp_avg", "exp_avg_sq") if is_torch or "/" in form else ("mu", "nu")
    tensors = {}
    for number in range(3):
        for field, of_field in zip(fields, (values[0], abs(values[1])), strict=True):
            tensors[form.format(n=number, m=module, f=field)] = of_field[number]
    frame = findings_of(tmp_path / "m.safetensors", tensors)
    assert "negative_moment" not in set(frame["rule"]), frame.to_string()
    tensors[form.format(n=1, m=module, f=fields[1])][2, 3] = -1
    frame = findings_of(tmp_path / "m.safetensors", tensors)
    assert rules(frame) == {(form.format(n=1, m=module, f=fields[1]), "negative_moment")}


def test_a_norm_is_recognised_without_its_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = resnet()
    for name in tensors:
        if name.endswith(("bn1.weight", "bn2.weight", "downsample.1.weight")):
            tensors[name] += rng.standard_normal(tensors[name].shape, np.float32) / 10
    name = "layer3.0.downsample.1.weight"
    tensors[name] -= 1
    frame = findings_of(tmp_path / "m.safetensors", tensors)
    assert rules(frame) == {(name, "zero_centred_norm")}, frame.to_string()


class TestSiblings:
    def test_a_pattern_of_the_model_is_not_a_layer_unlike_the_others(self, tmp_path: Path) -> None:
        tensors = llama(20, 32)
        for layer in (5, 11, 17):
            tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] *= ml_dtypes.bfloat16(4)
        for layer in range(10, 20):
            tensors[f"model.layers.{layer}.mlp.up_proj.weight"] *= ml_dtypes.bfloat16(4)
        assert findings_of(tmp_path / "m.safetensors", tensors).empty

    def test_a_trend_is_not_unlike_its_neighbours(self, tmp_path: Path) -> None:
        tensors = gpt2(8, 64)
        for layer in range(8):
            tensors[f"transformer.h.{layer}.mlp.c_fc.weight"] *= np.float32(1.5**layer)
        assert findings_of(tmp_path / "m.safetensors", tensors).empty

    def test_norms_around_zero_in_all_layers_are_a_convention(self, tmp_path: Path) -> None:
        tensors = {
            f"layers.{n}.input_layernorm.weight": np.random.default_rng(n).normal(0, 0.1, 64)
            for n in range(6)
        }
        assert findings_of(tmp_path / "m.safetensors", tensors).empty


class TestIgnoredRules:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        tensors = torch_mixture(experts=1)
        plant_nan(tensors)
        plant_zero_bias(tensors)
        return write(tmp_path / "m.safetensors", tensors)

    @pytest.mark.parametrize(
        ("ignore", "remaining"),
        [
            (None, ["nan", "all_zero"]),
            ("nan", ["all_zero"]),
            (["nan:*.out_proj.weight", "constant"], ["all_zero"]),
            (["nan:*.bias"], ["nan", "all_zero"]),
            ("*:layers.3.*", ["nan"]),
            ("*", []),
        ],
    )
    def test_ignored_rules_have_no_findings(
        self, ignore: Any, remaining: list[str], path: Path
    ) -> None:
        assert xckpt.findings(path, ignore=ignore)["rule"].tolist() == remaining
        ds = xr.open_dataset(path, engine="safetensors", stack=True)
        st = xckpt.stats(ds, progress=False)
        assert ds.ckpt.findings(stats=st, ignore=ignore)["rule"].tolist() == remaining

    def test_an_unknown_rule_raises_before_reading(self) -> None:
        with pytest.raises(ValueError, match="unknown rule; similar names: 'dead_rows'"):
            xckpt.findings("nowhere.safetensors", ignore="dead_row")
        wrong: list[Any] = [[3], 3]
        for ignore in wrong:
            with pytest.raises(TypeError, match="ignore takes rules such as"):
                xckpt.findings("nowhere.safetensors", ignore=ignore)


def test_the_documentation_has_every_rule() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/health-check.md").read_text("utf-8")
    for name, rule in RULES.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
        assert f"| {rule.severity} |" in line
