"""Codes of quantised weights are not mistaken for the weights."""

from __future__ import annotations

import pytest

from tests.notebook.checkpoints import row
from tests.notebook.rendering import render_text
from xckpt.notebook.folding import marked
from xckpt.notebook.summary import new_summary
from xckpt.structure import Structure


@pytest.mark.parametrize(
    ("codes", "dtype", "scale"),
    [
        ("a.weight", "int8", "a.weight_scale"),
        ("a.weight", "float8_e4m3fn", "a.weight_scale_inv"),
        ("a.weight", "float8_e5m2", "a.scale"),
        ("a.weight", "int8", "a.SCB"),
        ("a.weight", "int8", "a.weight_scales"),
        ("a.weight", "uint8", "a.weight.absmax"),
        ("a.weight", "uint32", "a.scales"),
        ("a.qweight", "int32", "a.scales"),
        ("a.weight_packed", "int32", "a.weight_scale"),
        ("experts.gate_up_proj", "float8_e4m3fn", "experts.gate_up_proj_scale_inv"),
        ("experts.down_proj_blocks", "uint8", "experts.down_proj_scales"),
        ("a.weight:data", "int8", "a.weight:scale"),
    ],
)
def test_codes_are_recognised_by_the_names_of_scales(codes: str, dtype: str, scale: str) -> None:
    rows = [row(codes, dtype, 8, 8), row(scale, "float32", 8)]
    structure = Structure(rows)
    assert [row.storage for row in marked(rows, structure)] == ["codes", ""]
    assert marked(marked(rows, structure), structure) == marked(rows, structure)
    layers = [row(f"h.{n}.{r.name}", r.dtype, *r.shape) for n in range(20) for r in rows]
    summary = new_summary(layers, title="m", format="f", version="", attrs={})
    assert {(p.count, p.dtype, p.storage) for p in summary.patterns} == {
        (20, dtype, "codes"),
        (20, "float32", ""),
    }
    assert f"{dtype} codes" in render_text(summary)
    assert "stored as: codes" in render_text(summary)


@pytest.mark.parametrize(
    ("name", "dtype", "companion"),
    [
        ("a.weight", "bfloat16", "a.weight_scale"),
        ("a.weight", "int8", "b.weight_scale"),
        ("a.steps", "int64", "a.scale"),
        ("a.weight", "bool", "a.weight_scale"),
        ("a.weight", "f6", "a.weight_scale"),
        ("a.weight_scale", "float8_e4m3fn", "a.weight"),
        ("a.weight:scale", "uint8", "a.weight:data"),
    ],
)
def test_tensors_with_unrelated_companions_are_not_codes(
    name: str, dtype: str, companion: str
) -> None:
    rows = [row(name, "int8", 8)._replace(dtype=dtype), row(companion, "float32", 8)]
    assert marked(rows, Structure(rows)) == rows


def test_only_layers_that_have_scales_are_codes() -> None:
    rows = [row(f"h.{n}.weight", "int8", 8) for n in range(20)]
    rows += [row(f"h.{n}.weight_scale", "float32", 8) for n in range(9)]
    storages = [row.storage for row in marked(rows, Structure(rows))]
    assert storages == ["codes"] * 9 + [""] * 20
    summary = new_summary(rows, title="m", format="f", version="", attrs={})
    assert {p.text for p in summary.patterns if p.storage} == {"h.{0..8}.weight"}
