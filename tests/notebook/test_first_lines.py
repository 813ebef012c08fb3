"""The first line of a summary says what the file is, and claims no more than the file shows."""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.notebook.rendering import render_html
from tests.structure import named_models as named
from tests.structure.named_models import shapes_of
from xckpt.cli import main
from xckpt.formatting import columns
from xckpt.index import Index, Part, Tensor
from xckpt.notebook.summary import index_summary, new_summary
from xckpt.notebook.views import model_text
from xckpt.tensor_rows import Row

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def index_of(
    tensors: str | Mapping[str, tuple[int, ...]],
    attrs: dict[Any, Any] | None = None,
    dtype: str = "bfloat16",
    format: str = "safetensors",
) -> Index:
    shapes = shapes_of(tensors) if isinstance(tensors, str) else tensors
    described, end = {}, 8
    for name, shape in shapes.items():
        part = Part(dtype, shape, end, 2 * prod(shape))
        described[name] = Tensor(name, dtype, shape, {"data": part})
        end += part.nbytes
    return Index(format, "", described, attrs or {}, source="/a/m.safetensors")


def first_line(*args: Any, **options: Any) -> str:
    """Return the first line of a summary without the name of the file."""
    index = index_of(*args, **options)
    line, _, facts = repr(index).partition("\n  safetensors")
    assert facts
    return " ".join(line.removeprefix("<Checkpoint m.safetensors>  ").split())


class TestNames:
    """The name that a file states comes first, then its class, then its family."""

    def test_of_a_class(self) -> None:
        assert first_line(named.LLAMA, {"config": LLAMA}) == (
            "LlamaForCausalLM, 88.8 K parameters, bfloat16 "
            "(llama, 2 layers, 48 wide, 6 query and 2 key/value heads)"
        )

    def test_of_the_file(self) -> None:
        attrs = {"modelspec.title": "My Llama", "config": LLAMA}
        line = first_line(named.LLAMA, attrs)
        assert line.startswith("My Llama, 88.8 K parameters, bfloat16 (LlamaForCausalLM, llama, 2 ")

    def test_of_a_type_without_a_class(self) -> None:
        line = first_line(named.LLAMA, {"config": {"model_type": "mistral"}})
        assert line == "mistral, 88.8 K parameters, bfloat16 (2 layers, 48 wide)"

    def test_of_a_model_that_it_was_made_from(self) -> None:
        config = LLAMA | {"_name_or_path": "meta-llama/Llama-3-8B"}
        assert "from meta-llama/Llama-3-8B, 2 layers" in first_line(named.LLAMA, {"config": config})

    @pytest.mark.parametrize(
        "path", ["/home/jane/llama", "./", "../llama", "C:\\models\\llama", "checkpoint-500", "", 7]
    )
    def test_of_a_path_on_a_computer_are_left_out(self, path: Any) -> None:
        line = first_line(named.LLAMA, {"config": LLAMA | {"_name_or_path": path}})
        assert line == first_line(named.LLAMA, {"config": LLAMA})


class TestForm:
    """What only the names of tensors suggest is called a resemblance."""

    @pytest.mark.parametrize(
        ("tensors", "line"),
        [
            (named.LLAMA, "names as in llama, 88.8 K parameters, bfloat16 (2 layers, 48 wide)"),
            (
                named.OPENAI_WHISPER,
                (
                    "names as in whisper, 166.0 K parameters, bfloat16 "
                    "(2 encoder and 2 decoder layers, 48 wide)"
                ),
            ),
            (
                named.STABLE_DIFFUSION,
                (
                    "names as in Stable Diffusion, 311.3 K parameters, bfloat16 "
                    "(unet, vae and text_encoder)"
                ),
            ),
        ],
    )
    def test_of_names(self, tensors: str, line: str) -> None:
        assert first_line(tensors) == line

    def test_of_unknown_names_is_not_described(self) -> None:
        header = repr(index_of({"a": (3, 4), "b": (3,)})).splitlines()[0]
        assert (
            header
            == "<Checkpoint m.safetensors>  safetensors · 2 tensors · 15 params · 30 B · lazy"
        )

    def test_of_another_model_than_that_of_the_config(self) -> None:
        line = first_line(named.OPENAI_WHISPER, {"config": LLAMA})
        assert line.startswith("names unlike llama, the type in its config, ")
        assert "wide" not in line
        assert "LlamaForCausalLM" not in line

    def test_a_size_that_no_tensor_has_is_left_out(self) -> None:
        line = first_line(named.LLAMA, {"config": LLAMA | {"hidden_size": 4096}})
        assert "wide" not in line


class TestKinds:
    def test_training_checkpoint(self) -> None:
        shapes = shapes_of(named.LLAMA)
        state = {f"optimizer.state.{n}.exp_avg": s for n, s in enumerate(shapes.values())}
        line = first_line({**shapes, **state}, {"step": 2000})
        assert line.startswith("training checkpoint at step 2,000, names as in llama, ")
        line = first_line({**shapes, **state}, {"step": 2000, "config": LLAMA})
        assert line.startswith("training checkpoint of LlamaForCausalLM at step 2,000, 88.8 K ")

    def test_state_of_an_optimizer(self) -> None:
        assert first_line({"optimizer.state.0.exp_avg": (3, 4)}) == "optimizer state"

    def test_adapter_of_peft(self) -> None:
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        factors = {f"{module}.lora_A.weight": (8, 48), f"{module}.lora_B.weight": (96, 8)}
        config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "lora_alpha": 16}
        assert first_line(factors, {"adapter_config": config}) == (
            "LoRA adapter for org/base, rank 8, alpha 16, 1.2 K parameters, bfloat16"
        )
        assert first_line(factors) == "LoRA adapter, rank 8, 1.2 K parameters, bfloat16"

    def test_adapter_of_another_method(self) -> None:
        line = first_line({"h.0.ia3_l": (48, 1)}, {"adapter_config": {"peft_type": "IA3"}})
        assert line == "IA3 adapter, 48 parameters, bfloat16"

    def test_adapter_of_kohya(self) -> None:
        module = "lora_unet_down_blocks_0_attentions_0_to_q"
        factors = {f"{module}.lora_down.weight": (4, 32), f"{module}.lora_up.weight": (32, 4)}
        attrs = {
            "ss_network_alpha": "2.5",
            "ss_base_model_version": "sdxl_base_v1-0",
            "ss_output_name": "style",
        }
        assert first_line(factors, attrs) == (
            "style: LoRA adapter for sdxl_base_v1-0, rank 4, alpha 2.5, 256 parameters, bfloat16"
        )

    def test_factors_beside_a_whole_model_are_no_adapter(self) -> None:
        module = "model.layers.0.self_attn.q_proj"
        factors = {f"{module}.lora_A.weight": (8, 48), f"{module}.lora_B.weight": (96, 8)}
        assert "adapter" not in first_line({**shapes_of(named.LLAMA), **factors})

    def test_graph(self) -> None:
        attrs = {"producer_name": "pytorch", "producer_version": "2.7.0"}
        line = repr(index_of({"a": (3, 4)}, attrs, format="onnx")).splitlines()[0]
        assert line.endswith("graph exported by pytorch 2.7.0, 12 parameters, bfloat16")


class TestPrecision:
    @pytest.mark.parametrize(
        ("types", "text"),
        [
            (["float16"] * 4, "float16"),
            (["float16", "float16", "bfloat16", "float32"], "mostly float16"),
            (["float16", "bfloat16", "float32", "float64"], "float16, bfloat16 and 2 more types"),
            (["float16", "bfloat16", "float32"], "float16, bfloat16 and 1 more type"),
        ],
    )
    def test_names_the_types_of_most_parameters(self, types: list[str], text: str) -> None:
        rows = [Row(f"w{n}", dtype, (4,), 8) for n, dtype in enumerate(types)]
        attrs = {"general.name": "M"}
        summary = new_summary(rows, title="m", format="", version="", attrs=attrs)
        assert model_text(summary) == f"M, {4 * len(types)} parameters, {text}"


class TestComponents:
    def test_have_a_line_each(self) -> None:
        lines = repr(index_of(named.STABLE_DIFFUSION)).splitlines()
        components = [line.split() for line in lines if " parameters " in line and "%" in line]
        assert [words[0] for words in components][-3:] == ["vae", "unet", "text_encoder"]

    def test_of_a_single_model_have_none(self) -> None:
        assert index_summary(index_of(named.LLAMA)).components == ()

    def test_are_groups_of_results(self, tmp_path: Path) -> None:
        tensors = {
            name: np.ones(shape, np.float32)
            for name, shape in shapes_of(named.OPENAI_WHISPER).items()
        }
        xckpt.save(tensors, tmp_path / "m.safetensors")
        ds = xckpt.open(tmp_path / "m.safetensors")
        sizes = ds.ckpt.summary("component")
        assert {"encoder", "decoder"} <= set(sizes.index)
        stats = ds.ckpt.stats().ckpt.by("component")
        assert stats["component"].to_numpy().tolist() == ["encoder", "decoder"]
        count = int(stats["count"].sel(component="encoder"))
        assert count == sizes.loc["encoder", "parameters"]
        compared = ds.ckpt.compare(tmp_path / "m.safetensors").ckpt.by("component")
        assert compared["component"].to_numpy().tolist() == ["encoder", "decoder"]
        footprint = ds.ckpt.footprint()
        assert int(footprint["component_parameters"].sel(component="encoder")) == count

    def test_of_a_single_model_are_no_groups(self, tmp_path: Path) -> None:
        xckpt.save({"a": np.ones((3, 4), np.float32)}, tmp_path / "m.safetensors")
        stats = xckpt.stats(tmp_path / "m.safetensors")
        with pytest.raises(ValueError, match="has a single component; keys are"):
            stats.ckpt.by("component")


class TestSafety:
    @pytest.mark.parametrize(
        "text", ["\x1b[31mred", "<script>alert(1)</script>", "a" * 5000, "\u202e"]
    )
    @pytest.mark.parametrize(
        "attrs",
        [
            lambda text: {"general.name": text},
            lambda text: {"config": LLAMA | {"architectures": [text]}},
            lambda text: {"config": LLAMA | {"model_type": text}},
            lambda text: {"config": LLAMA | {"_name_or_path": text}},
            lambda text: {"adapter_config": {"peft_type": text, "base_model_name_or_path": text}},
        ],
    )
    def test_texts_of_a_file_are_escaped_and_short(self, text: str, attrs: Any) -> None:
        index = index_of(named.LLAMA, attrs(text))
        head = repr(index).partition("safetensors ·")[0]
        assert head.replace("\n", "").isprintable()
        assert max(map(columns, head.splitlines())) <= 120
        assert len(head) < 400
        assert "<script>" not in render_html(index_summary(index))

    @pytest.mark.parametrize(
        "value", [None, 7, [], {}, [None], {"a": 1}, float("nan"), 10**400, "x"]
    )
    def test_values_of_other_types_count_as_missing(self, value: Any) -> None:
        keys = ("architectures", "_name_or_path", "model_type", "_class_name", "hidden_size")
        config = dict.fromkeys((*keys, "config", "class_name"), value)
        adapter = dict.fromkeys(("peft_type", "r", "lora_alpha", "lora_parameters"), value)
        attrs = dict.fromkeys(("general.name", "step", "ss_network_dim", "general.type"), value)
        for name in (named.LLAMA, {"x.lora_A.weight": (4, 3), "x.lora_B.weight": (3, 4)}):
            assert repr(index_of(name, {**attrs, "config": config, "adapter_config": adapter}))
        assert repr(index_of(named.LLAMA, {"config": value, "adapter_config": value}))


def test_info_has_the_model_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {n: np.ones(s, np.float32) for n, s in shapes_of(named.LLAMA).items()}
    xckpt.save(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["info", "--json", str(tmp_path)]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["text"].startswith("LlamaForCausalLM, 88.8 K parameters, float32 (llama, 2 layers")
    assert model["kind"] == "model"
    assert model["family"] == "llama"
    assert model["sizes"] == {"embd": 48, "head": 6, "head_kv": 2}
    assert model["layers"] == {"": 2}
