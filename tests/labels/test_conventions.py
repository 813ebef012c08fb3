"""Which tensors hold codes: those whose scales are next to them, and no others."""

from __future__ import annotations

import pytest

from xckpt.labels import scales_of_codes


@pytest.mark.parametrize(
    ("codes", "dtype", "scales"),
    [
        ("l.0.weight", "int8", "l.0.weight_scale"),
        ("l.0.weight", "float8_e4m3fn", "l.0.weight_scale_inv"),
        ("l.0.weight", "int8", "l.0.SCB"),
        ("l.0.weight", "uint32", "l.0.scales"),
        ("l.0.weight", "float8_e4m3fn", "l.0.scale"),
        ("l.0.qweight", "int32", "l.0.scales"),
        ("l.0.qzeros", "int32", "l.0.scales"),
        ("l.0.weight_packed", "uint8", "l.0.weight_scale"),
        ("l.0.weight_zero_point", "int8", "l.0.weight_scale"),
        ("l.0.weight", "uint8", "l.0.weight.absmax"),
        ("gate_up_proj_blocks", "uint8", "gate_up_proj_scales"),
        ("w", "int8", "w_scale"),
        ("w:data", "int8", "w:scales"),
        ("l.0.weight_scale", "float8_e4m3fn", "l.0.weight_scale_2"),
        ("l.0.weight_scale", "float8_e4m3fn", "l.0.weight_global_scale"),
        ("l.0.weight_packed", "int32", "l.0.scale_packed"),
        ("l.0.W_q", "uint8", "l.0.scale"),
        ("params/encoder/layers_3/kernel", "int8", "params/encoder/layers_3/scale"),
        ("params/layers_3/kernel", "int8", "params/layers_3/kernel/scale"),
        ("params/layers_3/mlp.kernel", "int8", "params/layers_3/mlp.scales"),
        ("net/~/linear/w", "uint8", "net/~/linear/w/absmax"),
    ],
)
def test_codes_are_known_by_their_scales(codes: str, dtype: str, scales: str) -> None:
    assert scales_of_codes({codes: dtype, scales: "float32"}) == {codes: scales}
    assert scales_of_codes({codes: dtype, f"other.{scales}": "float32"}) == {}
    # Weights that come with a scale are weights.
    assert scales_of_codes({codes: "bfloat16", scales: "float32"}) == {}


def test_what_is_counted_is_no_code() -> None:
    dtypes = {
        "bn.weight": "float32",
        "bn.scale": "float32",
        "bn.num_batches_tracked": "int64",
        "ids": "int32",
        "scales": "float32",
        "w_scale": "float32",
    }
    assert scales_of_codes(dtypes) == {}


def test_integers_that_say_how_codes_are_read_are_none_of_weights() -> None:
    scales = {"m.0.qweight": "int32", "m.0.scales": "float16", "m.1.w.absmax": "uint8"}
    parts = {"m.0.g_idx": "int32", "m.0.weight_shape": "int64", "m.1.w.quant_state.nf4": "uint8"}
    others = {"m.0.bias": "float16", "m.0.sub.ids": "int64", "m.ids": "int64", "ids": "int64"}
    found = scales_of_codes({**scales, "m.1.w": "uint8", **parts, **others})
    assert found.keys() == {"m.0.qweight", "m.1.w", "m.1.w.absmax", *parts}
    assert found["m.0.g_idx"] == "m.0.scales"
    every = {**scales, "m.1.w": "uint8", **parts, **others}
    slashed = scales_of_codes({name.replace(".", "/"): dtype for name, dtype in every.items()})
    assert slashed.keys() == {name.replace(".", "/") for name in found}
