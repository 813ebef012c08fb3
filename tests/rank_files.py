"""Models that are divided over ranks, and their files, as Llama and Megatron-LM write them.

`divided` follows ``_initialize_affine_weight_cpu`` of Megatron-LM core 0.19,
megatron/core/tensor_parallel/layers.py, which fairscale's layers in Llama follow as well: rank `r`
has the pieces ``[r::world]`` of a tensor. A gate fused with its projection has a stride of 2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.formats import torch_files
from tests.formats.torch_files import mapping, number, real, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    Array = np.ndarray[Any, Any]

#: Axis along which a tensor is divided, and the number of its fused parts; None if it is copied.
Cut = tuple[int, int] | None
COLUMN, ROW, GATED, COPIED = (0, 1), (1, 1), (0, 2), None


def divided(array: Array, cut: Cut, rank: int, world: int) -> Array:
    """Return the piece of a rank."""
    if cut is None:
        return array
    axis, stride = cut
    pieces = np.split(array, world * stride, axis)
    return np.ascontiguousarray(np.concatenate(pieces[rank::world], axis))


@dataclass
class Model:
    """A model whose tensors have random bits, and how each is divided."""

    dtype: str = "f4"
    seed: int = 0
    tensors: dict[str, Array] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, ...], cut: Cut = COPIED) -> None:
        rng = np.random.default_rng([self.seed, len(self.tensors)])
        values = rng.standard_normal(shape).astype("f4")
        if self.dtype == "u2":  # bfloat16
            values = (values.view("u4") >> 16).astype("u2")
        self.tensors[name], self.cuts[name] = values.astype(self.dtype), cut

    def rank(self, rank: int, world: int) -> dict[str, Array]:
        """Return the tensors of a rank."""
        return {n: divided(a, self.cuts[n], rank, world) for n, a in self.tensors.items()}


# --- Llama ----------------------------------------------------------------------------------------


@dataclass
class Llama:
    """A model in the names of github.com/meta-llama/llama and llama3, model.py."""

    dim: int = 64
    n_layers: int = 2
    n_heads: int = 8
    n_kv_heads: int | None = None
    vocab: int = 96
    multiple_of: int = 32
    ffn_dim_multiplier: float | None = None
    generation: int = 2
    dtype: str = "f4"
    seed: int = 0

    @property
    def hidden(self) -> int:
        hidden_dim = int(2 * (4 * self.dim) / 3)
        if self.ffn_dim_multiplier is not None:
            hidden_dim = int(self.ffn_dim_multiplier * hidden_dim)
        return self.multiple_of * ((hidden_dim + self.multiple_of - 1) // self.multiple_of)

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = {
            "dim": self.dim,
            "multiple_of": self.multiple_of,
            "n_heads": self.n_heads,
        }
        params |= {"n_layers": self.n_layers, "norm_eps": 1e-05}
        params["vocab_size"] = -1 if self.generation < 3 else self.vocab
        more = {"n_kv_heads": self.n_kv_heads, "ffn_dim_multiplier": self.ffn_dim_multiplier}
        return params | {key: value for key, value in more.items() if value is not None}

    @property
    def model(self) -> Model:
        model, dim = Model(self.dtype, self.seed), self.dim
        keys = (self.n_kv_heads or self.n_heads) * (dim // self.n_heads)
        # ParallelEmbedding, or VocabParallelEmbedding.
        model.add(
            "tok_embeddings.weight", (self.vocab, dim), ROW if self.generation < 3 else COLUMN
        )
        for layer in range(self.n_layers):
            at = f"layers.{layer}"
            model.add(f"{at}.attention.wq.weight", (dim, dim), COLUMN)
            model.add(f"{at}.attention.wk.weight", (keys, dim), COLUMN)
            model.add(f"{at}.attention.wv.weight", (keys, dim), COLUMN)
            model.add(f"{at}.attention.wo.weight", (dim, dim), ROW)
            model.add(f"{at}.feed_forward.w1.weight", (self.hidden, dim), COLUMN)
            model.add(f"{at}.feed_forward.w2.weight", (dim, self.hidden), ROW)
            model.add(f"{at}.feed_forward.w3.weight", (self.hidden, dim), COLUMN)
            model.add(f"{at}.attention_norm.weight", (dim,))
            model.add(f"{at}.ffn_norm.weight", (dim,))
        model.add("norm.weight", (dim,))
        model.add("output.weight", (self.vocab, dim), COLUMN)
        if self.generation < 3:
            model.add("rope.freqs", (dim // self.n_heads // 2,))
        return model

    def files(self, world: int) -> dict[str, bytes]:
        """Return the files of a folder."""
        model = self.model
        return {"params.json": json.dumps(self.params).encode()} | {
            f"consolidated.{rank:02}.pth": torch_files.checkpoint(model.rank(rank, world))
            for rank in range(world)
        }


# --- Megatron-LM ----------------------------------------------------------------------------------


@dataclass
class Megatron:
    """A model in the names of GPTModel of Megatron Core, or of those before it."""

    hidden: int = 64
    layers: int = 2
    heads: int = 8
    groups: int | None = None
    ffn: int = 96
    vocab: int = 128
    gated: bool = True
    tied: bool = False
    legacy: bool = False
    dtype: str = "f4"
    seed: int = 0
    changes: dict[str, Any] = field(default_factory=dict)

    def args(self, tensor: int, stages: int = 1) -> dict[str, Any]:
        """Return the arguments that a checkpoint keeps."""
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.heads,
            "kv_channels": self.hidden // self.heads,
            "group_query_attention": self.groups is not None,
            "num_query_groups": self.groups or 1,
            "max_position_embeddings": 32,
            "padded_vocab_size": self.vocab,
            "swiglu": self.gated,
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": None,
            "expert_model_parallel_size": 1,
        } | self.changes

    def stage(self, stage: int, stages: int) -> Model:
        """Return the part of the model in a stage, which counts its layers from 0."""
        model, hidden = Model(self.dtype, self.seed + stage), self.hidden
        groups, key = self.groups or self.heads, self.hidden // self.heads
        qkv, fused = (self.heads + 2 * groups) * key, GATED if self.gated else COLUMN
        names = dict(zip(_CORE, _CORE, strict=True))
        names |= _LEGACY if self.legacy else {}
        if stage == 0:
            model.add("embedding.word_embeddings.weight", (self.vocab, hidden), COLUMN)
            model.add("embedding.position_embeddings.weight", (32, hidden))
        for layer in range(self.layers // stages):
            at = f"{names['decoder']}.layers.{layer}"
            model.add(f"{at}.input_layernorm.weight", (hidden,))
            model.add(f"{at}.self_attention.{names['linear_qkv']}.weight", (qkv, hidden), COLUMN)
            model.add(f"{at}.self_attention.{names['linear_qkv']}.bias", (qkv,), COLUMN)
            model.add(f"{at}.self_attention.{names['linear_proj']}.weight", (hidden, hidden), ROW)
            model.add(f"{at}.self_attention.{names['linear_proj']}.bias", (hidden,))
            model.add(f"{at}.{names['pre_mlp_layernorm']}.weight", (hidden,))
            rows = self.ffn * (2 if self.gated else 1)
            model.add(f"{at}.mlp.{names['linear_fc1']}.weight", (rows, hidden), fused)
            model.add(f"{at}.mlp.{names['linear_fc1']}.bias", (rows,), fused)
            model.add(f"{at}.mlp.{names['linear_fc2']}.weight", (hidden, self.ffn), ROW)
            model.add(f"{at}.mlp.{names['linear_fc2']}.bias", (hidden,))
        if stage == stages - 1:
            model.add(f"{names['decoder']}.final_layernorm.weight", (hidden,))
            if not self.tied:
                model.add("output_layer.weight", (self.vocab, hidden), COLUMN)
        return model

    @property
    def prefix(self) -> str:
        return "model.language_model." if self.legacy else "model."

    def whole(self, stages: int = 1) -> dict[str, Array]:
        """Return the tensors of the whole model, as a checkpoint of one rank names them."""
        whole = {}
        for stage in range(stages):
            start = stage * (self.layers // stages)
            for name, array in self.stage(stage, stages).tensors.items():
                head, layers, tail = name.partition(".layers.")
                layer, _, inner = tail.partition(".")
                shifted = f"{head}{layers}{int(layer) + start}.{inner}" if layers else name
                whole[self.prefix + shifted] = array
        return whole

    def files(self, tensor: int, stages: int = 1, **more: bytes) -> dict[str, bytes]:
        """Return the files of a folder ``iter_...``; `more` are other entries of each."""
        files = {}
        for stage in range(stages):
            model = self.stage(stage, stages)
            for rank in range(tensor):
                place = f"mp_rank_{rank:02}" + (f"_{stage:03}" if stages > 1 else "")
                args = self.args(tensor, stages) | {"rank": stage * tensor + rank}
                files[f"{place}/model_optim_rng.pt"] = self.file(
                    model.rank(rank, tensor), args, **more
                )
        return files

    def file(self, arrays: Mapping[str, Array], args: Mapping[str, Any], **more: bytes) -> bytes:
        """Return the file of a rank."""
        numbered = {str(n): item for n, item in enumerate(arrays.items())}
        prefix = self.prefix.removeprefix("model.")
        tensors = {prefix + n: torch_files.whole(key, a) for key, (n, a) in numbered.items()}
        state = mapping({key: _value(value) for key, value in args.items()})
        items = {
            "args": torch_files.name("argparse", "Namespace") + b")\x81" + state + b"b",
            "checkpoint_version": real(3.0),
            "iteration": number(100),
            "model": mapping(tensors),
        }
        storages = {key: array.tobytes() for key, (_, array) in numbered.items()}
        return torch_files.archive(mapping(items | more), storages)


_CORE = ("decoder", "linear_qkv", "linear_proj", "pre_mlp_layernorm", "linear_fc1", "linear_fc2")
_LEGACY = dict(
    zip(
        _CORE,
        (
            *("encoder", "query_key_value", "dense"),
            *("post_attention_layernorm", "dense_h_to_4h", "dense_4h_to_h"),
        ),
        strict=True,
    )
)


def _value(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    return text(value) if isinstance(value, str) else number(value)
