"""Names and shapes of models that no installed library builds, recorded from their files."""

from __future__ import annotations

import re

Shapes = dict[str, tuple[int, ...]]

LLAMA = """
model.embed_tokens.weight 331 48
model.layers.{2}.input_layernorm.weight 48
model.layers.{2}.self_attn.q_proj.weight 96 48
model.layers.{2}.self_attn.k_proj.weight 32 48
model.layers.{2}.self_attn.v_proj.weight 32 48
model.layers.{2}.self_attn.o_proj.weight 48 96
model.layers.{2}.post_attention_layernorm.weight 48
model.layers.{2}.mlp.gate_proj.weight 112 48
model.layers.{2}.mlp.up_proj.weight 112 48
model.layers.{2}.mlp.down_proj.weight 48 112
model.norm.weight 48
lm_head.weight 331 48
"""
GEMMA_2 = (
    LLAMA
    + """
model.layers.{2}.pre_feedforward_layernorm.weight 48
model.layers.{2}.post_feedforward_layernorm.weight 48
"""
)
# As transformers 4 writes it.
MIXTRAL = """
model.embed_tokens.weight 331 48
model.layers.{2}.input_layernorm.weight 48
model.layers.{2}.self_attn.q_proj.weight 96 48
model.layers.{2}.self_attn.k_proj.weight 32 48
model.layers.{2}.self_attn.v_proj.weight 32 48
model.layers.{2}.self_attn.o_proj.weight 48 96
model.layers.{2}.post_attention_layernorm.weight 48
model.layers.{2}.block_sparse_moe.gate.weight 5 48
model.layers.{2}.block_sparse_moe.experts.{5}.w1.weight 24 48
model.layers.{2}.block_sparse_moe.experts.{5}.w2.weight 48 24
model.layers.{2}.block_sparse_moe.experts.{5}.w3.weight 24 48
model.norm.weight 48
lm_head.weight 331 48
"""
# consolidated.00.pth
META_LLAMA = """
tok_embeddings.weight 331 48
layers.{2}.attention_norm.weight 48
layers.{2}.attention.wq.weight 96 48
layers.{2}.attention.wk.weight 32 48
layers.{2}.attention.wv.weight 32 48
layers.{2}.attention.wo.weight 48 96
layers.{2}.ffn_norm.weight 48
layers.{2}.feed_forward.w1.weight 112 48
layers.{2}.feed_forward.w2.weight 48 112
layers.{2}.feed_forward.w3.weight 112 48
norm.weight 48
output.weight 331 48
rope.freqs 8
"""
MEGATRON = """
model.embedding.word_embeddings.weight 331 48
model.decoder.layers.{2}.self_attention.linear_qkv.layer_norm_weight 48
model.decoder.layers.{2}.self_attention.linear_qkv.weight 160 48
model.decoder.layers.{2}.self_attention.linear_proj.weight 48 96
model.decoder.layers.{2}.mlp.linear_fc1.layer_norm_weight 48
model.decoder.layers.{2}.mlp.linear_fc1.weight 224 48
model.decoder.layers.{2}.mlp.linear_fc2.weight 48 112
model.decoder.final_layernorm.weight 48
model.output_layer.weight 331 48
"""
GGUF = """
token_embd.weight 331 48
blk.{2}.attn_norm.weight 48
blk.{2}.attn_q.weight 96 48
blk.{2}.attn_k.weight 32 48
blk.{2}.attn_v.weight 32 48
blk.{2}.attn_output.weight 48 96
blk.{2}.ffn_norm.weight 48
blk.{2}.ffn_gate.weight 112 48
blk.{2}.ffn_up.weight 112 48
blk.{2}.ffn_down.weight 48 112
output_norm.weight 48
output.weight 331 48
"""
OPENAI_CLIP = """
positional_embedding 77 48
text_projection 48 36
logit_scale
visual.class_embedding 60
visual.positional_embedding 26 60
visual.proj 60 36
visual.conv1.weight 60 3 6 6
visual.ln_pre.weight 60
visual.ln_pre.bias 60
visual.transformer.resblocks.{2}.attn.in_proj_weight 180 60
visual.transformer.resblocks.{2}.attn.in_proj_bias 180
visual.transformer.resblocks.{2}.attn.out_proj.weight 60 60
visual.transformer.resblocks.{2}.attn.out_proj.bias 60
visual.transformer.resblocks.{2}.ln_1.weight 60
visual.transformer.resblocks.{2}.ln_1.bias 60
visual.transformer.resblocks.{2}.mlp.c_fc.weight 240 60
visual.transformer.resblocks.{2}.mlp.c_fc.bias 240
visual.transformer.resblocks.{2}.mlp.c_proj.weight 60 240
visual.transformer.resblocks.{2}.mlp.c_proj.bias 60
visual.transformer.resblocks.{2}.ln_2.weight 60
visual.transformer.resblocks.{2}.ln_2.bias 60
visual.ln_post.weight 60
visual.ln_post.bias 60
transformer.resblocks.{2}.attn.in_proj_weight 144 48
transformer.resblocks.{2}.attn.in_proj_bias 144
transformer.resblocks.{2}.attn.out_proj.weight 48 48
transformer.resblocks.{2}.attn.out_proj.bias 48
transformer.resblocks.{2}.ln_1.weight 48
transformer.resblocks.{2}.ln_1.bias 48
transformer.resblocks.{2}.mlp.c_fc.weight 192 48
transformer.resblocks.{2}.mlp.c_fc.bias 192
transformer.resblocks.{2}.mlp.c_proj.weight 48 192
transformer.resblocks.{2}.mlp.c_proj.bias 48
transformer.resblocks.{2}.ln_2.weight 48
transformer.resblocks.{2}.ln_2.bias 48
token_embedding.weight 331 48
ln_final.weight 48
ln_final.bias 48
"""
OPENAI_WHISPER = """
encoder.conv1.weight 48 20 3
encoder.conv1.bias 48
encoder.conv2.weight 48 48 3
encoder.conv2.bias 48
encoder.positional_embedding 70 48
encoder.blocks.{2}.attn.query.weight 48 48
encoder.blocks.{2}.attn.query.bias 48
encoder.blocks.{2}.attn.key.weight 48 48
encoder.blocks.{2}.attn.value.weight 48 48
encoder.blocks.{2}.attn.value.bias 48
encoder.blocks.{2}.attn.out.weight 48 48
encoder.blocks.{2}.attn.out.bias 48
encoder.blocks.{2}.attn_ln.weight 48
encoder.blocks.{2}.attn_ln.bias 48
encoder.blocks.{2}.mlp.0.weight 192 48
encoder.blocks.{2}.mlp.0.bias 192
encoder.blocks.{2}.mlp.2.weight 48 192
encoder.blocks.{2}.mlp.2.bias 48
encoder.blocks.{2}.mlp_ln.weight 48
encoder.blocks.{2}.mlp_ln.bias 48
encoder.ln_post.weight 48
encoder.ln_post.bias 48
decoder.positional_embedding 130 48
decoder.token_embedding.weight 331 48
decoder.blocks.{2}.attn.query.weight 48 48
decoder.blocks.{2}.attn.key.weight 48 48
decoder.blocks.{2}.attn.value.weight 48 48
decoder.blocks.{2}.attn.out.weight 48 48
decoder.blocks.{2}.attn_ln.weight 48
decoder.blocks.{2}.cross_attn.query.weight 48 48
decoder.blocks.{2}.cross_attn.key.weight 48 48
decoder.blocks.{2}.cross_attn.value.weight 48 48
decoder.blocks.{2}.cross_attn.out.weight 48 48
decoder.blocks.{2}.cross_attn_ln.weight 48
decoder.blocks.{2}.mlp.0.weight 192 48
decoder.blocks.{2}.mlp.2.weight 48 192
decoder.blocks.{2}.mlp_ln.weight 48
decoder.ln.weight 48
"""
# A single file of Stable Diffusion 1: each model has two blocks only.
STABLE_DIFFUSION = """
model.diffusion_model.time_embed.0.weight 128 32
model.diffusion_model.time_embed.0.bias 128
model.diffusion_model.time_embed.2.weight 128 128
model.diffusion_model.input_blocks.0.0.weight 32 4 3 3
model.diffusion_model.input_blocks.0.0.bias 32
model.diffusion_model.input_blocks.1.0.in_layers.0.weight 32
model.diffusion_model.input_blocks.1.0.in_layers.2.weight 32 32 3 3
model.diffusion_model.input_blocks.1.0.emb_layers.1.weight 32 128
model.diffusion_model.input_blocks.1.0.out_layers.0.weight 32
model.diffusion_model.input_blocks.1.0.out_layers.3.weight 32 32 3 3
model.diffusion_model.input_blocks.1.1.norm.weight 32
model.diffusion_model.input_blocks.1.1.proj_in.weight 32 32 1 1
model.diffusion_model.input_blocks.1.1.proj_in.bias 32
model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight 32 32
model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_out.0.weight 32 32
model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight 32 40
model.diffusion_model.input_blocks.1.1.transformer_blocks.0.norm1.weight 32
model.diffusion_model.input_blocks.1.1.transformer_blocks.0.ff.net.0.proj.weight 256 32
model.diffusion_model.input_blocks.1.1.transformer_blocks.0.ff.net.2.weight 32 128
model.diffusion_model.input_blocks.1.1.proj_out.weight 32 32 1 1
model.diffusion_model.input_blocks.2.0.op.weight 32 32 3 3
model.diffusion_model.middle_block.0.in_layers.0.weight 32
model.diffusion_model.middle_block.0.in_layers.2.weight 32 32 3 3
model.diffusion_model.output_blocks.0.0.in_layers.2.weight 32 64 3 3
model.diffusion_model.output_blocks.0.0.skip_connection.weight 32 64 1 1
model.diffusion_model.output_blocks.0.1.conv.weight 32 32 3 3
model.diffusion_model.out.0.weight 32
model.diffusion_model.out.2.weight 4 32 3 3
first_stage_model.encoder.conv_in.weight 32 3 3 3
first_stage_model.encoder.down.{2}.block.{2}.norm1.weight 32
first_stage_model.encoder.down.{2}.block.{2}.conv1.weight 32 32 3 3
first_stage_model.encoder.down.{2}.block.{2}.norm2.weight 32
first_stage_model.encoder.down.{2}.block.{2}.conv2.weight 32 32 3 3
first_stage_model.encoder.down.0.downsample.conv.weight 32 32 3 3
first_stage_model.encoder.mid.block_1.conv1.weight 32 32 3 3
first_stage_model.encoder.mid.attn_1.q.weight 32 32 1 1
first_stage_model.encoder.norm_out.weight 32
first_stage_model.encoder.conv_out.weight 8 32 3 3
first_stage_model.decoder.conv_in.weight 32 4 3 3
first_stage_model.decoder.up.{2}.block.{2}.conv1.weight 32 32 3 3
first_stage_model.decoder.up.1.upsample.conv.weight 32 32 3 3
first_stage_model.decoder.norm_out.weight 32
first_stage_model.decoder.conv_out.weight 3 32 3 3
first_stage_model.quant_conv.weight 8 8 1 1
first_stage_model.post_quant_conv.weight 4 4 1 1
cond_stage_model.transformer.text_model.embeddings.token_embedding.weight 331 40
cond_stage_model.transformer.text_model.embeddings.position_embedding.weight 77 40
cond_stage_model.transformer.text_model.embeddings.position_ids 1 77
cond_stage_model.transformer.text_model.encoder.layers.{2}.self_attn.q_proj.weight 40 40
cond_stage_model.transformer.text_model.encoder.layers.{2}.self_attn.k_proj.weight 40 40
cond_stage_model.transformer.text_model.encoder.layers.{2}.self_attn.v_proj.weight 40 40
cond_stage_model.transformer.text_model.encoder.layers.{2}.self_attn.out_proj.weight 40 40
cond_stage_model.transformer.text_model.encoder.layers.{2}.layer_norm1.weight 40
cond_stage_model.transformer.text_model.encoder.layers.{2}.mlp.fc1.weight 160 40
cond_stage_model.transformer.text_model.encoder.layers.{2}.mlp.fc2.weight 40 160
cond_stage_model.transformer.text_model.encoder.layers.{2}.layer_norm2.weight 40
cond_stage_model.transformer.text_model.final_layer_norm.weight 40
betas 1000
alphas_cumprod 1000
"""
FLUX = """
model.diffusion_model.img_in.weight 48 20
model.diffusion_model.img_in.bias 48
model.diffusion_model.txt_in.weight 48 40
model.diffusion_model.txt_in.bias 48
model.diffusion_model.time_in.in_layer.weight 48 256
model.diffusion_model.time_in.in_layer.bias 48
model.diffusion_model.time_in.out_layer.weight 48 48
model.diffusion_model.time_in.out_layer.bias 48
model.diffusion_model.vector_in.in_layer.weight 48 28
model.diffusion_model.vector_in.in_layer.bias 48
model.diffusion_model.vector_in.out_layer.weight 48 48
model.diffusion_model.vector_in.out_layer.bias 48
model.diffusion_model.guidance_in.in_layer.weight 48 256
model.diffusion_model.guidance_in.in_layer.bias 48
model.diffusion_model.guidance_in.out_layer.weight 48 48
model.diffusion_model.guidance_in.out_layer.bias 48
model.diffusion_model.final_layer.linear.weight 20 48
model.diffusion_model.final_layer.linear.bias 20
model.diffusion_model.final_layer.adaLN_modulation.1.weight 96 48
model.diffusion_model.final_layer.adaLN_modulation.1.bias 96
model.diffusion_model.double_blocks.{3}.img_mod.lin.weight 288 48
model.diffusion_model.double_blocks.{3}.img_mod.lin.bias 288
model.diffusion_model.double_blocks.{3}.img_attn.qkv.weight 144 48
model.diffusion_model.double_blocks.{3}.img_attn.qkv.bias 144
model.diffusion_model.double_blocks.{3}.img_attn.norm.query_norm.scale 16
model.diffusion_model.double_blocks.{3}.img_attn.norm.key_norm.scale 16
model.diffusion_model.double_blocks.{3}.img_attn.proj.weight 48 48
model.diffusion_model.double_blocks.{3}.img_attn.proj.bias 48
model.diffusion_model.double_blocks.{3}.img_mlp.0.weight 192 48
model.diffusion_model.double_blocks.{3}.img_mlp.0.bias 192
model.diffusion_model.double_blocks.{3}.img_mlp.2.weight 48 192
model.diffusion_model.double_blocks.{3}.img_mlp.2.bias 48
model.diffusion_model.double_blocks.{3}.txt_mod.lin.weight 288 48
model.diffusion_model.double_blocks.{3}.txt_mod.lin.bias 288
model.diffusion_model.double_blocks.{3}.txt_attn.qkv.weight 144 48
model.diffusion_model.double_blocks.{3}.txt_attn.qkv.bias 144
model.diffusion_model.double_blocks.{3}.txt_attn.norm.query_norm.scale 16
model.diffusion_model.double_blocks.{3}.txt_attn.norm.key_norm.scale 16
model.diffusion_model.double_blocks.{3}.txt_attn.proj.weight 48 48
model.diffusion_model.double_blocks.{3}.txt_attn.proj.bias 48
model.diffusion_model.double_blocks.{3}.txt_mlp.0.weight 192 48
model.diffusion_model.double_blocks.{3}.txt_mlp.0.bias 192
model.diffusion_model.double_blocks.{3}.txt_mlp.2.weight 48 192
model.diffusion_model.double_blocks.{3}.txt_mlp.2.bias 48
model.diffusion_model.single_blocks.{2}.linear1.weight 336 48
model.diffusion_model.single_blocks.{2}.linear1.bias 336
model.diffusion_model.single_blocks.{2}.linear2.weight 48 240
model.diffusion_model.single_blocks.{2}.linear2.bias 48
model.diffusion_model.single_blocks.{2}.norm.query_norm.scale 16
model.diffusion_model.single_blocks.{2}.norm.key_norm.scale 16
model.diffusion_model.single_blocks.{2}.modulation.lin.weight 144 48
model.diffusion_model.single_blocks.{2}.modulation.lin.bias 144
"""
STABLE_DIFFUSION_3 = """
model.diffusion_model.x_embedder.proj.weight 48 5 2 2
model.diffusion_model.x_embedder.proj.bias 48
model.diffusion_model.pos_embed 1 144 48
model.diffusion_model.context_embedder.weight 48 40
model.diffusion_model.context_embedder.bias 48
model.diffusion_model.t_embedder.mlp.0.weight 48 256
model.diffusion_model.t_embedder.mlp.0.bias 48
model.diffusion_model.t_embedder.mlp.2.weight 48 48
model.diffusion_model.t_embedder.mlp.2.bias 48
model.diffusion_model.y_embedder.mlp.0.weight 48 28
model.diffusion_model.y_embedder.mlp.0.bias 48
model.diffusion_model.y_embedder.mlp.2.weight 48 48
model.diffusion_model.y_embedder.mlp.2.bias 48
model.diffusion_model.final_layer.linear.weight 20 48
model.diffusion_model.final_layer.linear.bias 20
model.diffusion_model.final_layer.adaLN_modulation.1.weight 96 48
model.diffusion_model.final_layer.adaLN_modulation.1.bias 96
model.diffusion_model.joint_blocks.0.x_block.adaLN_modulation.1.weight 432 48
model.diffusion_model.joint_blocks.0.x_block.adaLN_modulation.1.bias 432
model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight 144 48
model.diffusion_model.joint_blocks.0.x_block.attn.qkv.bias 144
model.diffusion_model.joint_blocks.0.x_block.attn.ln_q.weight 16
model.diffusion_model.joint_blocks.0.x_block.attn.ln_k.weight 16
model.diffusion_model.joint_blocks.0.x_block.attn.proj.weight 48 48
model.diffusion_model.joint_blocks.0.x_block.attn.proj.bias 48
model.diffusion_model.joint_blocks.0.x_block.mlp.fc1.weight 192 48
model.diffusion_model.joint_blocks.0.x_block.mlp.fc1.bias 192
model.diffusion_model.joint_blocks.0.x_block.mlp.fc2.weight 48 192
model.diffusion_model.joint_blocks.0.x_block.mlp.fc2.bias 48
model.diffusion_model.joint_blocks.0.x_block.attn2.qkv.weight 144 48
model.diffusion_model.joint_blocks.0.x_block.attn2.qkv.bias 144
model.diffusion_model.joint_blocks.0.x_block.attn2.ln_q.weight 16
model.diffusion_model.joint_blocks.0.x_block.attn2.ln_k.weight 16
model.diffusion_model.joint_blocks.0.x_block.attn2.proj.weight 48 48
model.diffusion_model.joint_blocks.0.x_block.attn2.proj.bias 48
model.diffusion_model.joint_blocks.1.x_block.adaLN_modulation.1.weight 288 48
model.diffusion_model.joint_blocks.1.x_block.adaLN_modulation.1.bias 288
model.diffusion_model.joint_blocks.1.x_block.attn.qkv.weight 144 48
model.diffusion_model.joint_blocks.1.x_block.attn.qkv.bias 144
model.diffusion_model.joint_blocks.1.x_block.attn.ln_q.weight 16
model.diffusion_model.joint_blocks.1.x_block.attn.ln_k.weight 16
model.diffusion_model.joint_blocks.1.x_block.attn.proj.weight 48 48
model.diffusion_model.joint_blocks.1.x_block.attn.proj.bias 48
model.diffusion_model.joint_blocks.1.x_block.mlp.fc1.weight 192 48
model.diffusion_model.joint_blocks.1.x_block.mlp.fc1.bias 192
model.diffusion_model.joint_blocks.1.x_block.mlp.fc2.weight 48 192
model.diffusion_model.joint_blocks.1.x_block.mlp.fc2.bias 48
model.diffusion_model.joint_blocks.2.x_block.adaLN_modulation.1.weight 288 48
model.diffusion_model.joint_blocks.2.x_block.adaLN_modulation.1.bias 288
model.diffusion_model.joint_blocks.2.x_block.attn.qkv.weight 144 48
model.diffusion_model.joint_blocks.2.x_block.attn.qkv.bias 144
model.diffusion_model.joint_blocks.2.x_block.attn.ln_q.weight 16
model.diffusion_model.joint_blocks.2.x_block.attn.ln_k.weight 16
model.diffusion_model.joint_blocks.2.x_block.attn.proj.weight 48 48
model.diffusion_model.joint_blocks.2.x_block.attn.proj.bias 48
model.diffusion_model.joint_blocks.2.x_block.mlp.fc1.weight 192 48
model.diffusion_model.joint_blocks.2.x_block.mlp.fc1.bias 192
model.diffusion_model.joint_blocks.2.x_block.mlp.fc2.weight 48 192
model.diffusion_model.joint_blocks.2.x_block.mlp.fc2.bias 48
model.diffusion_model.joint_blocks.0.context_block.adaLN_modulation.1.weight 288 48
model.diffusion_model.joint_blocks.0.context_block.adaLN_modulation.1.bias 288
model.diffusion_model.joint_blocks.0.context_block.attn.qkv.weight 144 48
model.diffusion_model.joint_blocks.0.context_block.attn.qkv.bias 144
model.diffusion_model.joint_blocks.0.context_block.attn.ln_q.weight 16
model.diffusion_model.joint_blocks.0.context_block.attn.ln_k.weight 16
model.diffusion_model.joint_blocks.0.context_block.attn.proj.weight 48 48
model.diffusion_model.joint_blocks.0.context_block.attn.proj.bias 48
model.diffusion_model.joint_blocks.0.context_block.mlp.fc1.weight 192 48
model.diffusion_model.joint_blocks.0.context_block.mlp.fc1.bias 192
model.diffusion_model.joint_blocks.0.context_block.mlp.fc2.weight 48 192
model.diffusion_model.joint_blocks.0.context_block.mlp.fc2.bias 48
model.diffusion_model.joint_blocks.1.context_block.adaLN_modulation.1.weight 288 48
model.diffusion_model.joint_blocks.1.context_block.adaLN_modulation.1.bias 288
model.diffusion_model.joint_blocks.1.context_block.attn.qkv.weight 144 48
model.diffusion_model.joint_blocks.1.context_block.attn.qkv.bias 144
model.diffusion_model.joint_blocks.1.context_block.attn.ln_q.weight 16
model.diffusion_model.joint_blocks.1.context_block.attn.ln_k.weight 16
model.diffusion_model.joint_blocks.1.context_block.attn.proj.weight 48 48
model.diffusion_model.joint_blocks.1.context_block.attn.proj.bias 48
model.diffusion_model.joint_blocks.1.context_block.mlp.fc1.weight 192 48
model.diffusion_model.joint_blocks.1.context_block.mlp.fc1.bias 192
model.diffusion_model.joint_blocks.1.context_block.mlp.fc2.weight 48 192
model.diffusion_model.joint_blocks.1.context_block.mlp.fc2.bias 48
model.diffusion_model.joint_blocks.2.context_block.adaLN_modulation.1.weight 96 48
model.diffusion_model.joint_blocks.2.context_block.adaLN_modulation.1.bias 96
model.diffusion_model.joint_blocks.2.context_block.attn.qkv.weight 144 48
model.diffusion_model.joint_blocks.2.context_block.attn.qkv.bias 144
model.diffusion_model.joint_blocks.2.context_block.attn.ln_q.weight 16
model.diffusion_model.joint_blocks.2.context_block.attn.ln_k.weight 16
"""
VISION = """
patch_embed.proj.weight 32 3 2 6 6
blocks.{2}.norm1.weight 32
blocks.{2}.norm1.bias 32
blocks.{2}.attn.qkv.weight 96 32
blocks.{2}.attn.qkv.bias 96
blocks.{2}.attn.proj.weight 32 32
blocks.{2}.attn.proj.bias 32
blocks.{2}.norm2.weight 32
blocks.{2}.norm2.bias 32
blocks.{2}.mlp.fc1.weight 64 32
blocks.{2}.mlp.fc1.bias 64
blocks.{2}.mlp.fc2.weight 32 64
blocks.{2}.mlp.fc2.bias 32
merger.ln_q.weight 32
merger.ln_q.bias 32
merger.mlp.0.weight 128 128
merger.mlp.0.bias 128
merger.mlp.2.weight 48 128
merger.mlp.2.bias 48
"""
_COUNT = re.compile(r"\{(\d+)\}")


def shapes_of(text: str) -> Shapes:
    """Return the shapes of tensors by name; ``{2}`` stands for the indices 0 and 1."""
    shapes: Shapes = {}
    for line in text.split("\n"):
        if line:
            name, *extents = line.split(" ")
            shapes |= dict.fromkeys(_expand(name), tuple(map(int, extents)))
    return shapes


def _expand(name: str) -> list[str]:
    match = _COUNT.search(name)
    if match is None:
        return [name]
    expanded = (name[: match.start()] + str(n) + name[match.end() :] for n in range(int(match[1])))
    return [full for partial in expanded for full in _expand(partial)]
