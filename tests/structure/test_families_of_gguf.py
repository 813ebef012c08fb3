"""Axes of a family have the names that the engine of GGUF gives them."""

from __future__ import annotations

import pytest

from tests.structure import named_models as named
from tests.structure.named_models import shapes_of
from xckpt.structure import Described
from xckpt.structure.axes import axes_by_facts
from xckpt.structure.facts import model_facts
from xckpt.structure.families import family_of

SIZES = {
    "embedding_length": 48,
    "feed_forward_length": 112,
    "vocab_size": 331,
    "context_length": 130,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 14,
    "attention.q_lora_rank": 20,
    "attention.kv_lora_rank": 28,
    "expert_count": 5,
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 40,
    "rope.dimension_count": 10,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 96,
    "ssm.state_size": 9,
    "ssm.time_step_rank": 7,
}
TENSORS = """
token_embd.weight 331 48
position_embd.weight 130 48
token_embd_norm.weight 48
output_norm.weight 48
output.weight 331 48
rope_freqs.weight 5
blk.{2}.attn_norm.weight 48
blk.{2}.attn_norm.bias 48
blk.{2}.attn_q.weight 96 48
blk.{2}.attn_q.bias 96
blk.{2}.attn_k.weight 32 48
blk.{2}.attn_v.weight 28 48
blk.{2}.attn_qkv.weight 156 48
blk.{2}.attn_qkv.bias 156
blk.{2}.attn_output.weight 48 84
blk.{2}.attn_output.bias 48
blk.{2}.attn_q_norm.weight 16
blk.{2}.attn_k_norm.weight 16
blk.{2}.attn_q_a.weight 20 48
blk.{2}.attn_q_b.weight 96 20
blk.{2}.attn_kv_a_mqa.weight 38 48
blk.{2}.attn_v_b.weight 6 14 28
blk.{2}.post_attention_norm.weight 48
blk.{2}.post_ffw_norm.weight 48
blk.{2}.ffn_norm.weight 48
blk.{2}.ffn_gate.weight 112 48
blk.{2}.ffn_up.weight 112 48
blk.{2}.ffn_up.bias 112
blk.{2}.ffn_down.weight 48 112
blk.{2}.ffn_gate_inp.weight 5 48
blk.{2}.ffn_gate_exps.weight 5 24 48
blk.{2}.ffn_up_exps.weight 5 24 48
blk.{2}.ffn_down_exps.weight 5 48 24
blk.{2}.ffn_gate_shexp.weight 40 48
blk.{2}.ffn_up_shexp.weight 40 48
blk.{2}.ffn_down_shexp.weight 48 40
blk.{2}.ssm_conv1d.weight 96 4
blk.{2}.ssm_conv1d.bias 96
blk.{2}.ssm_x.weight 25 96
blk.{2}.ssm_dt.weight 96 7
blk.{2}.ssm_dt.bias 96
blk.{2}.ssm_out.weight 48 96
"""


@pytest.mark.parametrize("name", list(shapes_of(TENSORS)))
def test_the_engine_gives_the_same_names(name: str) -> None:
    attrs = {f"llama.{key}": size for key, size in SIZES.items()}
    facts = model_facts({"general.architecture": "llama", **attrs})
    shapes = shapes_of(TENSORS)
    by_facts = axes_by_facts([Described(name, "float32", shapes[name])], facts)
    family = family_of(shapes, facts)
    assert family is not None
    place = family.describe(name, shapes[name])
    assert place is not None
    assert place.axes == by_facts[name]


def test_axes_have_their_names_without_metadata() -> None:
    shapes = shapes_of(named.GGUF)
    family = family_of(shapes)
    assert family is not None
    assert family.name == ""
    place = family.describe("blk.1.attn_k.weight", (32, 48))
    assert place is not None
    assert place.axes == ("head_kv*key", "embd")
