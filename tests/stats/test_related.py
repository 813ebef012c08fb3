"""Measures are those of the elements that belong together, where the relation is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.stats.causes import rope
from tests.stats.checkpoints import write

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]
LAYERS, WIDTH, HEADS = 2, 64, 4
ROLES = {
    **{f"self_attn.{role}_proj": f"attn_{role}" for role in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{role}_proj": f"ffn_{role}" for role in ("gate", "up", "down")},
}


def original() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        f"model.layers.{layer}.{role}.weight": rng.standard_normal((WIDTH, WIDTH), np.float32)
        for layer in range(LAYERS)
        for role in ROLES
    }


@pytest.fixture
def quantised(tmp_path: Path) -> tuple[Path, Path]:
    """Write a model, and the GGUF file that llama.cpp makes of it."""
    gguf: Any = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(HEADS)
    writer.add_embedding_length(WIDTH)
    kind = gguf.GGMLQuantizationType.Q4_0
    for name, values in original().items():
        _, _, layer, role = name.removesuffix(".weight").split(".", 3)
        is_turned = "q_proj" in name or "k_proj" in name
        turned = rope(values, HEADS) if is_turned else values
        data = gguf.quants.quantize(turned, kind)
        writer.add_tensor(f"blk.{layer}.{ROLES[role]}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return write(tmp_path / "hf.safetensors", original()), tmp_path / "m.gguf"


@pytest.mark.parametrize("explain", [False, True])
def test_permuted_heads_are_measured_in_order(quantised: tuple[Path, Path], explain: bool) -> None:
    result = xckpt.compare(*quantised, names="auto", explain=explain)
    table = result.ckpt.table()
    assert table["sqnr_db"].between(20, 23).all()
    assert (result.ckpt.by("layer")["sqnr_db"] > 20).all()
    rows = table["relation"].to_dict()
    assert rows["model.layers.0.self_attn.q_proj.weight"].startswith(
        "rows permuted as for rotary embeddings (4 heads)"
    )
    assert "permuted" not in rows["model.layers.0.self_attn.v_proj.weight"]
    assert set(table["status"]) == {"changed"}
    # The other way, by channels, and with statistics of the codes.
    back = xckpt.compare(*quantised[::-1], names="auto").ckpt.table()
    assert back["sqnr_db"].between(20, 23).all()
    channels = xckpt.compare(*quantised, names="auto", dim=-1)
    values = channels["model.layers.0.self_attn.q_proj.weight"].sel(statistic="sqnr_db")
    assert (values > 17).all()
    codes = xckpt.compare(*quantised, names="auto", codes=True).ckpt.table()
    assert (codes["clipped"].fillna(0) < 0.5).all()


def test_unpermuted_heads_keep_their_order() -> None:
    ours = original()
    theirs = {
        f"blk.{n.split('.')[2]}.{ROLES['.'.join(n.split('.')[3:5])]}.weight": x + np.float32(0.01)
        for n, x in ours.items()
    }
    table = xckpt.compare(ours, theirs, names="auto").ckpt.table()
    assert (table["rel_l2"] < 0.02).all()
    assert "relation" not in table


def test_transposed_tensors_are_measured() -> None:
    x = np.random.default_rng(0).standard_normal((24, 16), np.float32)
    y = x.T + np.float32(0.01)
    result = xckpt.compare({"w": x, "v": x[:8]}, {"w": y, "v": x[:8]})
    table = result.ckpt.table()
    assert table.loc["w", "status"] == "shape"
    assert table.loc["w", "relation"] == "transposed"
    np.testing.assert_allclose(table.loc["w", "max_abs"], 0.01, rtol=1e-4)
    total = result.ckpt.by("role").ckpt.table()
    np.testing.assert_allclose(total["max_abs"], 0.01, rtol=1e-4)
    assert table.loc["v", ["status", "relation"]].tolist() == ["same", ""]


def test_a_matched_transposition_is_measured() -> None:
    x = np.random.default_rng(0).standard_normal((16, 16), np.float32)
    table = xckpt.compare({"fc.weight": x}, {"dense/kernel": x.T}, names="auto").ckpt.table()
    assert table.loc["fc.weight", ["status", "relation"]].tolist() == ["changed", "transposed"]
    assert table.loc["fc.weight", "rel_l2"] == 0


def test_a_repeated_comparison_reads_nothing(quantised: tuple[Path, Path]) -> None:
    first = xckpt.compare(*quantised, names=_names())
    second = xckpt.compare(*quantised, names=_names())
    assert first.identical(second)


def _names() -> dict[str, str]:
    pairs = {}
    for name in original():
        _, _, layer, role = name.removesuffix(".weight").split(".", 3)
        pairs[name] = f"blk.{layer}.{ROLES[role]}.weight"
    return pairs
