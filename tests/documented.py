"""The files that examples of the documentation name, as small as possible."""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import h5py
import ml_dtypes
import numpy as np
import xarray as xr

import xckpt
from benchmarks.checkpoints import gpt, mixture_of_experts, resnet, write_ztensor
from tests.conftest import GOLDEN
from tests.formats import flax_files, onnx_files, primitiv_files, torch_files
from tests.formats.burnpack_files import burnpack, dense
from tests.formats.deepspeed_files import Run
from tests.formats.gguf_files import listed, text
from tests.formats.gptrs_files import id_bytes, indexed_file, record, tagged
from tests.rank_files import Llama, Megatron
from tests.test_optimizer_numbers import Saved
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

#: The configs of the models of `write_models`.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": False,
}  # fmt: skip
BART = {
    "architectures": ["BartForConditionalGeneration"], "model_type": "bart", "d_model": 8,
    **{f"{side}_layers": 6 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 16 for side in ("encoder", "decoder")},
    "max_position_embeddings": 10, "vocab_size": 32,
}  # fmt: skip
_QUANTIZED = {"DeepSeek-V3": "fp8_block_deepseek_shards", "Llama-3.1-8B-AWQ": "awq_gemm_group32"}


def write_files(folder: Path) -> None:
    """Write the files that most pages speak of."""
    write_checkpoint(folder / "m.zt", layers=6, width=48)
    ds = xr.open_dataset(folder / "m.zt")
    clean = ds.drop_vars(name for name in ds.variables if "delta" in str(name)).load()
    for name in ("base.safetensors", "base.zt", "m.safetensors", "model.bpk"):
        clean.ckpt.save(folder / name, cast="allow")
    tuned = clean.assign({"lm_head.weight": clean["lm_head.weight"] * 1.01})
    for name in ("tuned.zt", "tuned.safetensors"):
        tuned.ckpt.save(folder / name, cast="allow")
    xckpt.convert(folder / "base.zt", folder / "renamed.zt", names=lambda name: f"module.{name}")
    float8 = {"*": {"dtype": "float8_e4m3fn"}}
    xckpt.convert(
        folder / "base.zt", folder / "quantised.safetensors", encoding=float8, cast="allow"
    )
    names = list(clean.variables)
    for n, half in enumerate((names[::2], names[1::2]), 1):
        clean[half].ckpt.save(folder / f"m-{n}.zt")
    clean.ckpt.save(folder / "model.safetensors", cast="allow")
    shards = folder / "shards"
    shards.mkdir()
    clean.ckpt.save(shards / "model.safetensors", max_shard_size="100kB", cast="allow")
    for path in shards.iterdir():
        path.rename(folder / path.name)
    shards.rmdir()
    (folder / "Llama-3.1-8B").mkdir()
    for name, golden in _QUANTIZED.items():
        shutil.copytree(GOLDEN / "hf-quantized" / golden, folder / name)
        merged = folder / "Llama-3.1-8B" / "model.safetensors"
        encoding = {"*": {"layout": "dense"}}
        xckpt.convert(folder / name, merged, encoding=encoding, cast="allow", overwrite=True)
    _write_ranks(folder)
    (folder / "run").mkdir()
    shutil.copy(folder / "m.zt", folder / "run/m.zt")
    for step in (500, 1000):
        xckpt.save({"lm_head": np.full(4, step)}, folder / f"run/step-{step}.zt")
    rng = np.random.default_rng(0)
    experts = {
        f"model.layers.{layer}.experts.{expert}.weight": rng.normal(size=(8, 4))
        for layer in range(18)
        for expert in range(4)
    }
    xckpt.save({**experts, "lm_head.weight": rng.normal(size=(16, 4))}, folder / "moe.zt")
    _write_adapter(folder, clean)
    _write_conversion(folder, clean)
    _write_training(folder / "training")
    _write_formats(folder)


def _write_ranks(folder: Path) -> None:
    """Write a model of Llama and one of Megatron-LM, each divided over two ranks."""
    files = {f"Llama-2-70b/{name}": data for name, data in Llama().files(2).items()}
    steps = {f"megatron/iter_0100000/{name}": data for name, data in Megatron().files(2).items()}
    for name, data in (files | steps).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _write_adapter(folder: Path, base: xr.Dataset) -> None:
    """Write a LoRA adapter of the sample as PEFT does, and the model that it is merged into."""
    rng, rank = np.random.default_rng(0), 4
    factors: dict[str, Any] = {}
    merged: dict[Any, Any] = {}
    for name, weight in base.ckpt.find("*.[qv]_proj.weight").variables.items():
        out, inner = weight.shape
        module = f"base_model.model.{str(name).removesuffix('.weight')}"
        a, b = (rng.normal(scale=0.1, size=s).astype("f4") for s in ((rank, inner), (out, rank)))
        factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        merged[name] = (weight.dims, weight.values + 2 * (b @ a))
    (folder / "adapter").mkdir()
    xckpt.save(factors, folder / "adapter/adapter_model.safetensors")
    config = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank})
    (folder / "adapter/adapter_config.json").write_text(config)
    base.assign(merged).ckpt.save(folder / "merged.safetensors", cast="allow")


def _write_conversion(folder: Path, base: xr.Dataset) -> None:
    """Write the sample as another project would, with two matrices exchanged."""
    tensors: dict[str, Any] = {}
    for name, weight in base.variables.items():
        values = weight.values.astype(ml_dtypes.bfloat16 if weight.ndim > 1 else "f4")
        new = str(name).replace("model.layers.", "blocks.").replace("self_attn", "attention")
        tensors[new] = values.T if new.endswith("_proj.weight") else values
    a, b = (f"blocks.{layer}.attention.k_proj.weight" for layer in (3, 4))
    tensors[a], tensors[b] = tensors[b], tensors[a]
    xckpt.save(tensors, folder / "converted.safetensors")


def _write_training(folder: Path) -> None:
    """Write a run whose third layer jumps at step 500, and breaks at step 800."""
    rng = np.random.default_rng(0)
    shapes = {"attn.qkv.weight": (48, 16), "mlp.up.weight": (64, 16), "mlp.down.weight": (16, 64)}
    names = {f"layers.{layer}.{name}": s for layer in range(6) for name, s in shapes.items()}
    weights = {name: rng.normal(scale=0.05, size=s).astype("f4") for name, s in names.items()}
    logs: list[dict[str, float]] = []
    for step in range(100, 900, 100):
        for name, values in weights.items():
            rate = 0.2 if step == 500 and name.startswith("layers.2.") else 0.01
            weights[name] = values * (1 + rate * rng.normal(size=values.shape).astype("f4"))
        if step == 800:
            weights["layers.2.mlp.up.weight"][7, :3] = np.nan
        loss = 300 / step + (2 if step >= 500 else 0)
        logs.append({"step": step, "loss": round(loss, 3), "learning_rate": 1e-4})
        path = folder / f"checkpoint-{step}"
        path.mkdir(parents=True)
        (path / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
        moments = {f"optimizer.state.{n}.exp_avg": v * 0.1 for n, v in weights.items()}
        xckpt.save({**weights, **moments}, path / "model.safetensors")


def _write_formats(folder: Path) -> None:
    """Write the files that the pages of formats speak of."""
    weight = np.ones((16, 8), "f4")
    tree = {"encoder": {"layer_0": {"mlp": {"kernel": flax_files.array(weight)}}}}
    linear = onnx_files.node("Gemm", ["x", "fc1.weight"], ["y"])
    data = onnx_files.model(onnx_files.initializer("fc1.weight", weight), nodes=(linear,))
    (folder / "model.onnx").write_bytes(data)
    (folder / "flax_model.msgpack").write_bytes(flax_files.flax_file(tree))
    (folder / "old.bpk").write_bytes(burnpack({"w": dense(weight)}, legacy=True))
    model = {"conv1.weight": dense(weight, param_id=7)}
    (folder / "model-3.bpk").write_bytes(burnpack(model))
    moments = {"7.momentum.moment_1": dense(weight, param_id=7)}
    (folder / "optim-3.bpk").write_bytes(burnpack(moments))
    tokens = [struct.pack("<Q", 3) + f"{number:03}".encode() for number in range(300)]
    attrs = {
        "general.architecture": text("llama"),
        "llama.context_length": struct.pack("<II", 4, 131072),
        "tokenizer.ggml.tokens": listed(8, tokens),
        "tokenizer.ggml.scores": listed(6, [bytes(4)] * 300),
    }
    (folder / "Llama-3.1-8B-Q4_K_M.gguf").write_bytes(_gguf(attrs))
    vocabulary = {
        name: record(name, weight, flag=1, stored_id=id_bytes(name))
        for name in ("tok_embeddings.weight", "lm_head")
    }
    config = tagged("gpt", {"vocab_size": 16, "embed_dim": 8, "num_layers": 1})
    (folder / "model.bin").write_bytes(indexed_file(list(vocabulary.values()), config))
    for name in ("step_100.checkpoint", "step_100.metadata.json"):
        xckpt.save({"w": weight}, folder / name)
    xckpt.save({"layer.0.w": weight}, folder / "weights.npz")
    for name in ("a", "b"):
        with h5py.File(folder / f"{name}.weights.h5", "w") as file:
            file["layers/dense/vars/0"] = weight
    weights = primitiv_files.parameter(primitiv_files.tensor(weight))
    content = primitiv_files.model((["w"], weights))
    (folder / "m.model").write_bytes(primitiv_files.file(0x300, content))
    settings = primitiv_files.optimizer([("Optimizer.epoch", 1)], [("Adam.alpha", 0.1)])
    (folder / "m.optimizer").write_bytes(primitiv_files.file(0x400, settings))
    for name in ("model.pt", "lightning.ckpt"):
        (folder / name).write_bytes(torch_files.checkpoint({"fc.weight": weight}))
    step = folder / "checkpoint" / "step-1000"
    step.mkdir(parents=True)
    zero = Run([{"emb.weight": weight}], shared={"head.weight": "emb.weight"})
    zero.write(folder / "zero-run/global_step10")
    (folder / "zero-run/latest").write_text("global_step10")
    for name, data in torch_files.distributed({"w": {(0, 0): weight}}, {"w": weight.shape}).items():
        (step / name).write_bytes(data)


def _gguf(attrs: dict[str, bytes]) -> bytes:
    from tests.formats.gguf_files import gguf_file

    values = np.ones((16, 8), "f4")
    return gguf_file(attrs, [("blk.17.attn_q.weight", (8, 16), 0, 0)], values.tobytes())


def write_families(folder: Path) -> None:
    """Write large models, without the values."""
    families = {"gpt2-xl": gpt(), "resnet50": resnet(), "moe": mixture_of_experts()}
    for name, tensors in families.items():
        write_ztensor(folder / f"{name}.zt", dict(tensors))


def write_optimizers(folder: Path) -> None:
    """Write models with the state of their optimizers."""
    weights = {"fc.weight": np.ones((2, 3), "f4"), "fc.bias": np.ones(2, "f4")}
    state: dict[str, Any] = {
        "step": np.float32(3),
        "optimizer.state.module.fc.weight.step": np.float32(3),
    }
    for name, array in weights.items():
        state[f"optimizer.state.module.{name}.exp_avg"] = array / 4
        state[f"optimizer.state.module.{name}.exp_avg_sq"] = array / 16
    files: dict[str, dict[str, Any]] = {"model": weights, "optimizer": state}
    for path, arrays in files.items():
        variables = {
            n: ([f"{n}{axis}" for axis in range(np.ndim(a))], a) for n, a in arrays.items()
        }
        xckpt.save(xr.Dataset(variables), folder / f"{path}.safetensors")
    (folder / "training.pt").write_bytes(_training(weights))


def _training(weights: dict[str, Any]) -> bytes:
    """Write a model and the state of its optimizer as PyTorch does."""
    saved = Saved()
    arrays = {name: saved.array(array.shape, 1.0) for name, array in weights.items()}
    shapes = {at: array.shape for at, array in enumerate(weights.values())}
    value = {"model": torch_files.mapping(arrays)}
    value["optimizer"] = saved.optimizer(shapes, [[*shapes]], fields=("exp_avg",))
    return torch_files.archive(torch_files.mapping(value), saved.storages)


def write_odd_names(folder: Path) -> None:
    """Write a sample, and a file with what netCDF lacks."""
    write_checkpoint(folder / "m.zt", layers=2, width=16)
    tensor = record("w/1", np.ones(2, "<f4"), flag=1, stored_id=id_bytes("w/1"))
    config = tagged("gpt", {"vocab_size": 7, "context_length": 5})
    (folder / "model.bin").write_bytes(indexed_file([tensor], config))


def write_pickle(folder: Path) -> None:
    """Write a model with tied weights."""
    stored, weight = np.arange(6, dtype="f4"), np.arange(8, dtype="u2").reshape(2, 4)
    tied = torch_files.view(torch_files.storage("0", 6), 0, (3, 2), (2, 1))
    value = {"embed.weight": tied, "fc.weight": torch_files.whole("1", weight)}
    value |= {"lm_head.weight": tied, "epoch": torch_files.number(3)}
    storages = {"0": stored.tobytes(), "1": weight.tobytes()}
    (folder / "model.pt").write_bytes(torch_files.archive(torch_files.mapping(value), storages))


def write_steps(folder: Path) -> None:
    """Write a model in several forms, and a set of shards with one from another step."""
    (folder / "run").mkdir()
    names = [*(f"layers.{n}.w" for n in range(3)), "lm_head.w", "norm"]
    shard, shards = folder / "run/model-00002-of-00002.safetensors", []
    for step in (0, 1):
        ds = xr.Dataset({n: ("x", np.full(16, k + step, "f4")) for k, n in enumerate(names)})
        xckpt.save(ds, folder / "model.safetensors", overwrite=True)
        xckpt.save(ds, folder / "run/model.safetensors", max_shard_size=200, overwrite=True)
        shards.append(shard.read_bytes())
    shard.write_bytes(shards[0])
    xckpt.convert(folder / "model.safetensors", folder / "converted.zt")


def write_models(folder: Path) -> None:
    """Write a Llama, three tuned ones, a run, an adapter, others, and one with more tokens."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys([f"self_attn.{name}_proj" for name in "qkvo"], (8, 8)),
        **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], (16, 8)),
        "mlp.down_proj": (8, 16),
        **dict.fromkeys(["input_layernorm", "post_attention_layernorm"], (8,)),
    }
    names = {f"model.layers.{n}.{name}.weight": s for n in range(2) for name, s in shapes.items()}
    names |= {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,)}
    names["lm_head.weight"] = (32, 8)
    base = {
        name: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in names.items()
    }

    def tuned() -> dict[str, Any]:
        noise = {name: 0.1 * rng.normal(size=array.shape) for name, array in base.items()}
        return {name: (array + noise[name]).astype(array.dtype) for name, array in base.items()}

    paths = ["base", *(f"model-{number}" for number in (1, 2, 3))]
    paths += [f"run/checkpoint-{step}/model" for step in (100, 200, 300)]
    for path in paths:
        target = folder / f"{path}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        xckpt.save(base if path == "base" else tuned(), target)
    for name in ("model-1", "model-2"):
        (folder / "hf" / name).mkdir(parents=True)
        shutil.copy(folder / f"{name}.safetensors", folder / "hf" / name / "model.safetensors")
        (folder / "hf" / name / "config.json").write_text(json.dumps(LLAMA))
    more = {n: np.concatenate([w, w[:4]]) if len(w) == 32 else w for n, w in tuned().items()}
    xckpt.save(more, folder / "more-tokens.safetensors")
    decoder = {name: array for name, array in tuned().items() if "layers" in name}
    xckpt.save(decoder, folder / "decoder.safetensors")
    factors: dict[str, Any] = {}
    for name in (name for name in base if "q_proj" in name or "v_proj" in name):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        factors[f"{module}.lora_A.weight"] = rng.normal(size=(2, 8)).astype("f4")
        factors[f"{module}.lora_B.weight"] = rng.normal(size=(8, 2)).astype("f4")
    (folder / "adapter").mkdir()
    xckpt.save(factors, folder / "adapter/adapter_model.safetensors")
    config = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4})
    (folder / "adapter/adapter_config.json").write_text(config)
    _write_encoder_and_decoder(folder / "hf/bart", rng)
    _write_convolutions(folder, rng)


def _write_encoder_and_decoder(folder: Path, rng: np.random.Generator) -> None:
    """Write a BART of twelve layers."""
    shapes: dict[str, tuple[int, ...]] = {"model.shared": (32, 8)}
    for side, attentions in (("encoder", ["self"]), ("decoder", ["self", "encoder"])):
        shapes |= {f"model.{side}.embed_positions": (12, 8)}
        shapes |= {f"model.{side}.layernorm_embedding": (8,)}
        for layer in (f"model.{side}.layers.{number}" for number in range(6)):
            shapes |= {
                f"{layer}.{a}_attn.{p}_proj": (8, 8) for a in attentions for p in (*"kvq", "out")
            }
            shapes |= {f"{layer}.{a}_attn_layer_norm": (8,) for a in attentions}
            shapes |= {
                f"{layer}.fc1": (16, 8),
                f"{layer}.fc2": (8, 16),
                f"{layer}.final_layer_norm": (8,),
            }
    has_bias = [
        name for name in shapes if name.endswith(("_proj", "fc1", "fc2", "norm", "_embedding"))
    ]
    names = {f"{name}.weight": shape for name, shape in shapes.items()}
    names |= {f"{name}.bias": shapes[name][:1] for name in has_bias}
    tensors = {name: rng.normal(size=shape).astype("f4") for name, shape in names.items()}
    folder.mkdir()
    xckpt.save(
        {**tensors, "final_logits_bias": np.zeros((1, 32), "f4")}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(BART))


def _write_convolutions(folder: Path, rng: np.random.Generator) -> None:
    """Write a ResNet of one layer, pipelines of diffusers, and sentence encoders."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (8, 3, 3, 3), "fc.weight": (2, 8)}
    shapes |= {f"bn1.{name}": (8,) for name in ("weight", "bias", "running_mean", "running_var")}
    tensors = {name: rng.uniform(0.5, 2, shape).astype("f4") for name, shape in shapes.items()}
    xckpt.save({**tensors, "bn1.num_batches_tracked": np.array(9)}, folder / "cnn.safetensors")
    for pipeline in ("sd-1", "sd-2"):
        for name, kind in (("unet", "UNet2DConditionModel"), ("vae", "AutoencoderKL")):
            part = folder / pipeline / name
            part.mkdir(parents=True)
            weight = rng.normal(size=(8, 4, 3, 3)).astype("f4")
            weights = {"conv_in.weight": weight, "conv_in.bias": weight[:, 0, 0, 0]}
            xckpt.save(weights, part / "diffusion_pytorch_model.safetensors")
            (part / "config.json").write_text(json.dumps({"_class_name": kind}))
        (folder / pipeline / "scheduler").mkdir()
        (folder / pipeline / "scheduler/scheduler_config.json").write_text("{}")
        (folder / pipeline / "model_index.json").write_text("{}")
    for encoder in ("st-1", "st-2"):
        for module in ("", "2_Dense"):
            place = folder / encoder / module
            place.mkdir(parents=True, exist_ok=True)
            weight = rng.normal(size=(8, 8)).astype("f4")
            xckpt.save({"linear.weight": weight}, place / "model.safetensors")
            (place / "config.json").write_text("{}")
