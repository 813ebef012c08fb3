"""Roles of tensors: cases from many frameworks, as their files spell them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.stats.architectures import ARCHITECTURES, Tensors
from xckpt.structure import Described, Role, Structure

F, H, B = "float32", "bfloat16", "bool"
I8, U8, I32, I64 = "int8", "uint8", "int32", "int64"
V, M = (8,), (8, 8)

# Tensors of one file with their roles, by framework.
GOLDEN: dict[str, list[tuple[str, str, tuple[int, ...], str]]] = {
    "torch state_dict with batch norm": [
        ("layer1.0.downsample.0.weight", F, (8, 4, 1, 1), "weight"),
        ("layer1.0.downsample.1.weight", F, V, "weight"),
        ("layer1.0.downsample.1.running_mean", F, V, "statistic"),
        ("layer1.0.downsample.1.running_var", F, V, "statistic"),
        ("layer1.0.downsample.1.num_batches_tracked", I64, (), "counter"),
    ],
    "gpt-2 in transformers": [
        ("h.0.attn.c_attn.weight", F, M, "weight"),
        ("h.0.attn.c_attn.bias", F, V, "weight"),
        ("h.0.attn.bias", F, (1, 1, 64, 64), "constant"),
        ("h.1.attn.bias", B, (1, 1, 64, 64), "constant"),
        ("h.0.attn.masked_bias", F, (), "constant"),
    ],
    "buffers in transformers": [
        ("bert.embeddings.position_ids", I64, (1, 64), "constant"),
        ("bert.embeddings.token_type_ids", I64, (1, 64), "constant"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", F, V, "constant"),
        ("model.rotary_emb.cos_cached", F, M, "constant"),
        ("swin.layers.0.blocks.1.attn_mask", F, (4, 8, 8), "constant"),
        ("swin.layers.0.blocks.1.attn.relative_position_index", I64, M, "constant"),
        ("swin.layers.0.blocks.1.attn.relative_position_bias_table", F, M, "weight"),
        ("vit.embeddings.mask_token", F, (1, 1, 8), "weight"),
        ("logit_scale", F, (), "weight"),
        ("stages.0.layer_scale", F, V, "weight"),
    ],
    "training checkpoint of torch": [
        ("epoch", I64, (), "counter"),
        ("model.fc.weight", F, M, "weight"),
        ("optimizer.state.0.step", F, (), "step"),
        ("optimizer.state.0.exp_avg", F, M, "moment"),
        ("optimizer.state.0.exp_avg_sq", F, M, "moment"),
        ("optimizer.state.0.max_exp_avg_sq", F, M, "moment"),
        ("optimizer.param_groups.0.lr", F, (), "step"),
        ("scaler.scale", F, (), "state"),
        ("rng_state", U8, (5056,), "state"),
        ("cuda_rng_state.0", U8, (16,), "state"),
    ],
    "optimizer.pt of the Trainer": [
        ("state.0.step", F, (), "step"),
        ("state.0.exp_avg", H, V, "moment"),
        ("state.1.momentum_buffer", H, M, "moment"),
        ("state.1.exp_avg_sq_row", F, V, "moment"),
    ],
    "8-bit adam": [
        ("state.0.state1", U8, M, "moment"),
        ("state.0.state2", U8, M, "moment"),
        ("state.0.qmap1", F, (256,), "moment"),
        ("state.0.absmax1", F, V, "moment"),
        ("state.0.step", I64, (), "step"),
    ],
    "distributed checkpoint": [
        ("model.layers.0.mlp.weight", H, M, "weight"),
        ("optim.state.layers.0.mlp.weight.exp_avg", F, M, "moment"),
        ("optim.state.layers.0.mlp.weight.step", F, (), "step"),
        ("optimizer.state.exp_avg.decoder.layers.0.weight", F, M, "moment"),
        ("optimizer.state.fp32_param.decoder.layers.0.weight", F, M, "master"),
        ("chained_0.optimizer.state.exp_avg_sq.decoder.layers.0.weight", F, M, "moment"),
        ("exp_avg.fc.weight", F, M, "moment"),
    ],
    "deepspeed": [
        ("module.fc.weight", "float16", M, "weight"),
        ("optimizer_state_dict.base_optimizer_state.state.0.exp_avg", F, (64,), "moment"),
        ("optimizer_state_dict.single_partition_of_fp32_groups.0", F, (64,), "master"),
        ("optimizer_state_dict.fp32_flat_groups.0", F, (64,), "master"),
        ("optimizer_state_dict.loss_scaler.cur_scale", F, (), "state"),
    ],
    "lightning": [
        ("state_dict.model.fc.weight", F, M, "weight"),
        ("optimizer_states.0.state.0.exp_avg", F, M, "moment"),
        ("optimizer_states.0.state.0.step", F, (), "step"),
        ("lr_schedulers.0.best", F, (), "state"),
        ("callbacks.EarlyStopping.best_score", F, (), "state"),
    ],
    "averages": [
        ("model.fc.weight", F, M, "weight"),
        ("ema.fc.weight", F, M, "average"),
        ("ema.bn.running_mean", F, V, "statistic"),
        ("model_ema.decay", F, (), "counter"),
        ("model_ema.num_updates", I32, (), "counter"),
        ("model_ema.diffusion_modelinput_blocks00weight", F, M, "average"),
        ("shadow_params.3", F, M, "average"),
        ("n_averaged", I64, (), "counter"),
    ],
    "averages without weights": [
        ("ema.fc.weight", F, M, "weight"),
        ("ema.fc.bias", F, V, "weight"),
    ],
    "names of averages in a weight": [
        ("mega.layers.0.ema_gate.damping_factor", F, M, "weight"),
    ],
    "vector quantisation": [
        ("quantizer.embed", F, M, "weight"),
        ("quantizer.cluster_size", F, V, "statistic"),
        ("quantizer._ema_w", F, M, "statistic"),
    ],
    "diffusion schedule": [
        ("betas", F, V, "constant"),
        ("alphas_cumprod_prev", F, V, "constant"),
        ("sqrt_one_minus_alphas_cumprod", F, V, "constant"),
        ("posterior_mean_coef1", F, V, "constant"),
        ("model.diffusion_model.out.2.weight", F, (4, 8, 3, 3), "weight"),
    ],
    "gptq": [
        ("model.layers.0.q_proj.qweight", I32, M, "codes"),
        ("model.layers.0.q_proj.qzeros", I32, V, "scale"),
        ("model.layers.0.q_proj.scales", "float16", M, "scale"),
        ("model.layers.0.q_proj.g_idx", I32, V, "scale"),
        ("model.layers.0.q_proj.bias", "float16", V, "weight"),
        ("model.layers.0.input_layernorm.weight", "float16", V, "weight"),
    ],
    "awq": [
        ("model.layers.0.q_proj.qweight", I32, M, "codes"),
        ("model.layers.0.q_proj.qzeros", I32, M, "scale"),
        ("model.layers.0.q_proj.scales", "float16", M, "scale"),
    ],
    "compressed tensors": [
        ("a.weight_packed", I32, M, "codes"),
        ("a.weight_scale", H, M, "scale"),
        ("a.weight_zero_point", I8, M, "scale"),
        ("a.weight_shape", I64, (2,), "scale"),
        ("b.weight", "float8_e4m3fn", M, "codes"),
        ("b.weight_scale", H, (), "scale"),
        ("b.input_scale", H, (), "scale"),
        ("k_proj.k_scale", F, (), "scale"),
    ],
    "bitsandbytes": [
        ("a.weight", U8, (64, 1), "codes"),
        ("a.weight.absmax", U8, V, "scale"),
        ("a.weight.quant_map", F, (16,), "scale"),
        ("a.weight.nested_absmax", F, V, "scale"),
        ("a.weight.quant_state.bitsandbytes__nf4", U8, (99,), "scale"),
        ("b.weight", I8, M, "codes"),
        ("b.SCB", F, V, "scale"),
    ],
    "gpt-oss": [
        ("model.layers.0.mlp.experts.down_proj_blocks", U8, (4, 8, 8, 16), "codes"),
        ("model.layers.0.mlp.experts.down_proj_scales", U8, (4, 8, 8), "scale"),
        ("model.layers.0.mlp.experts.down_proj_bias", H, M, "weight"),
        ("model.layers.0.self_attn.sinks", H, V, "weight"),
    ],
    "mlx": [
        ("model.layers.0.mlp.up_proj.weight", "uint32", M, "codes"),
        ("model.layers.0.mlp.up_proj.scales", "float16", M, "scale"),
        ("model.layers.0.mlp.up_proj.biases", "float16", M, "scale"),
    ],
    "gguf": [
        ("blk.0.attn_q.weight", "q4_k", M, "weight"),
        ("blk.0.attn_norm.weight", F, V, "weight"),
        ("rope_freqs.weight", F, V, "constant"),
    ],
    "burn, module": [
        ("norm1.gamma", F, V, "weight"),
        ("norm1.running_mean", F, V, "statistic"),
        ("conv1.weight", F, (8, 4, 3, 3), "weight"),
    ],
    "burn, optimizer": [
        ("9283745982374598273.momentum.moment_1", F, M, "moment"),
        ("9283745982374598273.momentum.moment_2", F, M, "moment"),
        ("9283745982374598273.momentum.time", I64, (), "step"),
        ("9283745982374598273.__rank", I64, (), "step"),
    ],
    "sequential without names": [
        ("0.weight", F, M, "weight"),
        ("1.running_mean", F, V, "statistic"),
        ("2.weight", F, M, "weight"),
    ],
    "flax": [
        ("params/Dense_0/kernel", F, M, "weight"),
        ("params/LayerNorm_0/scale", F, V, "weight"),
        ("params/LayerNorm_0/bias", F, V, "weight"),
        ("batch_stats/BatchNorm_0/mean", F, V, "statistic"),
        ("batch_stats/BatchNorm_0/var", F, V, "statistic"),
        ("opt_state/0/count", I32, (), "step"),
        ("opt_state/0/mu/Dense_0/kernel", F, M, "moment"),
        ("opt_state/0/nu/Dense_0/kernel", F, M, "moment"),
        ("opt_state/1/trace/Dense_0/kernel", F, M, "moment"),
        ("ema_params/Dense_0/kernel", F, M, "average"),
        ("step", I32, (), "counter"),
    ],
    "keras": [
        ("layers/dense/kernel", F, M, "weight"),
        ("layers/batch_normalization/moving_mean", F, V, "statistic"),
        ("layers/batch_normalization/moving_variance", F, V, "statistic"),
        ("optimizer/vars/0", I64, (), "step"),
        ("optimizer/vars/2", F, M, "moment"),
        ("optimizer_weights/adam/iteration", I64, (), "step"),
    ],
    "gpt.rs": [
        ("blocks.0.attention.w_qkv", F, M, "weight"),
        ("blocks.0.ln_1.weight", F, V, "weight"),
        ("bn1.running_mean", F, V, "statistic"),
        ("bn1.running_var", F, V, "statistic"),
    ],
    "primitiv": [
        ("encoder.w", F, M, "weight"),
        ("encoder.w:Adam.m1", F, M, "moment"),
        ("encoder.w:Adam.m2", F, M, "moment"),
        ("encoder.w:MomentumSGD.m", F, M, "moment"),
        ("encoder.w:RMSProp.m", F, M, "moment"),
    ],
    "joined by join_optimizer": [
        ("fc.weight", F, M, "weight"),
        ("fc.weight:exp_avg", F, M, "moment"),
        ("fc.weight:step", F, (), "step"),
        ("conv1.weight:momentum.moment_1", F, M, "moment"),
        ("conv1.weight:momentum.time", I64, (), "step"),
    ],
    "parts": [
        ("w:real", "float16", M, "weight"),
        ("w:imag", "float16", M, "weight"),
        ("q:data", U8, V, "codes"),
        ("q:scales", F, V, "scale"),
        ("q:zeros", U8, V, "scale"),
    ],
    "words of other roles in the names of weights": [
        ("decoder.velocity.weight", F, M, "weight"),
        ("state_encoder.0.weight", F, M, "weight"),
        ("counter.weight", F, M, "weight"),
        ("optimus.layers.0.weight", F, M, "weight"),
        ("encoder.scale", F, V, "weight"),
        ("fc.biases", F, V, "weight"),
    ],
}


def _structure(tensors: Tensors) -> Structure:
    return Structure(
        [Described(name, str(values.dtype), values.shape) for name, values in tensors.items()]
    )


@pytest.mark.parametrize("framework", GOLDEN)
def test_roles_of_framework(framework: str) -> None:
    cases = GOLDEN[framework]
    roles = Structure([Described(*case[:3]) for case in cases]).roles
    assert {n: r.value for n, r in roles.items()} == {name: role for name, *_, role in cases}


MODEL: dict[str, tuple[str, tuple[int, ...]]] = {
    "conv.weight": ("float32", (8, 3, 3, 3)),
    "bn.weight": ("float32", (8,)),
    "bn.running_mean": ("float32", (8,)),
    "bn.num_batches_tracked": ("int64", ()),
    "position_ids": ("int64", (1, 8)),
}


@pytest.mark.parametrize(
    ("model", "average", "more"),
    [
        ("state_dict.", "state_dict_ema.", []),
        ("model.", "ema.module.", ["ema.num_updates"]),
        ("state_dict.model.", "state_dict.ema_model.", []),
        ("", "model_ema.", ["model_ema.decay"]),
        ("params/", "ema_params/", []),
    ],
)
def test_buffers_of_an_averaged_copy_are_none_of_the_model(
    model: str, average: str, more: list[str]
) -> None:
    separator = average[-1]
    spelled = {name.replace(".", separator): kind for name, kind in MODEL.items()}
    of_model = {model + name: kind for name, kind in spelled.items()}
    copies = {average + name: kind for name, kind in spelled.items()}
    copies |= dict.fromkeys(more, ("float32", ()))
    tensors = {n: np.ones(shape, dtype) for n, (dtype, shape) in (of_model | copies).items()}
    assert _structure(tensors).averaged == set(copies)
    ds = xckpt.open(tensors)
    assert set(ds.ckpt.find(only="weights")) == set(of_model)
    assert set(xckpt.open(tensors, only="weights")) == set(of_model)
    alone = {name: tensors[name] for name in copies}
    assert set(xckpt.open(alone, only="weights")) == set(copies)


def test_buffers_beside_words_of_averages_are_those_of_the_model() -> None:
    names = ["fc.weight", "codebook.ema.cluster_size", "codebook.ema.running_mean"]
    assert not Structure([Described(name, F, V) for name in names]).averaged


def test_documentation_lists_every_role() -> None:
    page = (Path(__file__).parents[2] / "docs/roles.md").read_text("utf-8")
    for role in Role:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{role}` |")]
        assert f"| {role.group} |" in line


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_only_buffers_of_untrained_models_are_not_weights(model: object) -> None:
    assert callable(model)
    tensors = model()
    roles = _structure(tensors).roles
    buffers = {name for name, role in roles.items() if role is not Role.WEIGHT}
    words = ("running_", "num_batches", "_ids", "position_index", "attn_mask")
    assert buffers == {name for name in tensors if any(word in name for word in words)}


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_norms_are_gains_of_ones(model: object) -> None:
    assert callable(model)
    tensors = model()
    all_ones = {n for n, v in tensors.items() if v.size > 1 and (v == 1).all()}
    no_gain = {n for n in all_ones if n.endswith(("running_var", ".D"))}
    assert _structure(tensors).norms == all_ones - no_gain


def test_time_for_many_names() -> None:
    rows = [
        Described(f"model.layers.{n}.mlp.experts.{e}.{w}.weight", H, M)
        for n in range(50)
        for e in range(256)
        for w in ("up", "down")
    ]
    start = time.process_time()
    structure = Structure(rows)
    assert len(structure.roles) == len(rows)
    assert time.process_time() - start < 1
