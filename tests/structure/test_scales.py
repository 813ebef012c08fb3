"""Codes of quantised weights are recognised by the scales next to them."""

from __future__ import annotations

import pytest

from xckpt.structure import Described, Structure

CODES = [
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
]


def scales_of(dtypes: dict[str, str]) -> dict[str, str]:
    return Structure([Described(name, dtype, (8, 8)) for name, dtype in dtypes.items()]).scales


@pytest.mark.parametrize(("codes", "dtype", "scales"), CODES)
def test_codes_have_scales_next_to_them(codes: str, dtype: str, scales: str) -> None:
    assert scales_of({codes: dtype, scales: "float32"}) == {codes: scales}
    assert scales_of({codes: dtype, f"other.{scales}": "float32"}) == {}


@pytest.mark.parametrize(("codes", "scales"), [(codes, scales) for codes, _, scales in CODES])
def test_floats_with_scales_are_not_codes(codes: str, scales: str) -> None:
    assert scales_of({codes: "bfloat16", scales: "float32"}) == {}


def test_integers_without_scales_are_not_codes() -> None:
    dtypes = {
        "bn.weight": "float32",
        "bn.scale": "float32",
        "bn.num_batches_tracked": "int64",
        "ids": "int32",
        "scales": "float32",
        "w_scale": "float32",
    }
    assert scales_of(dtypes) == {}


@pytest.mark.parametrize("separator", [".", "/"])
def test_integers_in_the_module_of_codes_count_as_codes(separator: str) -> None:
    codes = {"m.0.qweight": "int32", "m.1.w": "uint8", "m.1.w.absmax": "uint8"}
    companions = {
        "m.0.g_idx": "int32",
        "m.0.weight_shape": "int64",
        "m.1.w.quant_state.nf4": "uint8",
    }
    unrelated = {
        "m.0.scales": "float16",
        "m.0.bias": "float16",
        "m.0.sub.ids": "int64",
        "m.ids": "int64",
        "ids": "int64",
    }
    dtypes = {
        name.replace(".", separator): dtype
        for name, dtype in (codes | companions | unrelated).items()
    }
    scales = scales_of(dtypes)
    assert scales.keys() == {name.replace(".", separator) for name in codes | companions}
    assert scales["m.0.g_idx".replace(".", separator)] == "m.0.scales".replace(".", separator)
