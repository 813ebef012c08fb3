"""A family is known by the type of the model, or by names that no other family has."""

from __future__ import annotations

import pickle
import re
import time
from importlib.resources import files
from typing import Any

import pytest

from tests.structure import named_models as named
from tests.structure.named_models import shapes_of
from xckpt.structure import Described, Structure
from xckpt.structure.facts import model_facts
from xckpt.structure.families import Family, family_of
from xckpt.structure.families.choosing import ListedTable, list_tables
from xckpt.structure.families.tables import load_table

Shapes = named.Shapes

CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 112,
    "vocab_size": 331,
}


def known(text: str | Shapes, config: dict[str, Any] | None = None) -> Family:
    shapes = shapes_of(text) if isinstance(text, str) else text
    family = family_of(shapes, model_facts({"config": config}))
    assert family is not None
    return family


def slot(family: Family, name: str) -> str:
    place = family.describe(name)
    assert place is not None, name
    return place.slot


def axes(family: Family, text: str) -> dict[str, tuple[str | None, ...]]:
    """Return the axes of the tensors of one layer, by slot and parameter."""
    places = (family.describe(*pair) for pair in shapes_of(text).items())
    return {f"{p.slot} {p.param}": p.axes or () for p in places if p is not None}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (named.LLAMA, "llama"),
        (named.GEMMA_2, "gemma2"),
        (named.MIXTRAL, "llama"),
        (named.META_LLAMA, "llama"),
        (named.MEGATRON, "megatron"),
        (named.OPENAI_CLIP, "clip"),
        (named.OPENAI_WHISPER, "whisper"),
        (named.STABLE_DIFFUSION, "unet"),
        (named.FLUX, "flux"),
        (named.STABLE_DIFFUSION_3, "sd3"),
    ],
)
def test_names_tell_the_family_and_every_tensor_has_a_slot(text: str, name: str) -> None:
    family = known(text)
    assert family.name == name
    outside = [n for n in shapes_of(text) if family.describe(n) is None]
    assert set(outside) <= {"betas", "alphas_cumprod"}


class TestNamings:
    """Tensors with the same purpose have the same place under the names of any project."""

    @pytest.mark.parametrize("text", [named.META_LLAMA, named.GGUF])
    def test_of_llama(self, text: str) -> None:
        expected = axes(known(named.LLAMA), named.LLAMA)
        places = axes(known(text), text)
        places.pop("rotary freqs", None)
        assert places == expected

    def test_of_experts_one_by_one(self) -> None:
        family = known(named.MIXTRAL)
        place = family.describe("model.layers.1.block_sparse_moe.experts.4.w2.weight", (48, 24))
        assert place is not None
        assert (place.slot, place.axes) == ("expert.down", ("embd", "ff_exp"))
        assert place.indices == (("layer", 1), ("expert", 4))

    def test_of_experts_in_one_tensor(self) -> None:
        shapes = shapes_of(named.GGUF)
        shapes |= {f"blk.{n}.ffn_down_exps.weight": (5, 48, 24) for n in range(2)}
        place = known(shapes).describe("blk.1.ffn_down_exps.weight", (5, 48, 24))
        assert place is not None
        assert (place.slot, place.axes) == ("expert.down", ("expert", "embd", "ff_exp"))
        assert (place.outputs, place.inputs) == (1, 2)

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "ema."])
    def test_behind_a_prefix(self, prefix: str) -> None:
        shapes = {prefix + name: shape for name, shape in shapes_of(named.LLAMA).items()}
        family = known(shapes)
        assert slot(family, f"{prefix}model.layers.1.mlp.up_proj.weight") == "ffn.up"
        assert slot(family, f"{prefix}lm_head.weight") == "output"

    def test_with_slashes_and_kernels_of_flax(self) -> None:
        shapes: Shapes = {}
        for name, shape in shapes_of(named.LLAMA).items():
            path = f"params/{name.replace('.', '/')}"
            is_projection = len(shape) == 2 and "embed" not in name
            kernel = path.removesuffix("weight") + ("kernel" if is_projection else "embedding")
            shapes[kernel if len(shape) == 2 else path] = shape[::-1] if is_projection else shape
        place = known(shapes).describe("params/model/layers/0/mlp/up_proj/kernel", (48, 112))
        assert place is not None
        assert (place.param, place.axes) == ("weight", ("embd", "ff"))
        assert (place.outputs, place.inputs) == (1, 0)

    def test_with_an_axis_of_heads_of_flax(self) -> None:
        shapes: Shapes = {}
        for name, shape in shapes_of(named.LLAMA).items():
            path = f"params/{name.replace('.', '/')}"
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                shape = (48, shape[0] // 16, 16)  # noqa: PLW2901
            elif name.endswith("o_proj.weight"):
                shape = (6, 16, 48)  # noqa: PLW2901
            elif name.endswith("_proj.weight"):
                shape = shape[::-1]  # noqa: PLW2901
            is_kernel = name.endswith("_proj.weight")
            shapes[path.removesuffix("weight") + "kernel" if is_kernel else path] = shape
        family, module = known(shapes), "params/model/layers/1/self_attn"
        places = [
            family.describe(f"{module}/{role}_proj/kernel", shapes[f"{module}/{role}_proj/kernel"])
            for role in "qko"
        ]
        assert [place and (place.slot, place.axes) for place in places] == [
            ("attention.query", ("embd", "head", "key")),
            ("attention.key", ("embd", "head_kv", "key")),
            ("attention.output", ("head", "value", "embd")),
        ]
        bias = family.describe(f"{module}/q_proj/bias", (6, 16))
        assert bias is not None
        assert bias.axes == ("head", "key")

    def test_of_quantised_weights(self) -> None:
        shapes: Shapes = {}
        for name, shape in shapes_of(named.LLAMA).items():
            if name.endswith("_proj.weight"):
                path = name.removesuffix("weight")
                shapes[f"{path}qweight"] = shape[1] // 8, shape[0]
                shapes[f"{path}scales"] = shape[1] // 16, shape[0]
            else:
                shapes[name] = shape
        place = known(shapes).describe("model.layers.1.mlp.up_proj.qweight", (6, 112))
        assert place is not None
        assert (place.slot, place.param, place.axes) == ("ffn.up", "qweight", None)

    def test_with_an_adapter_of_peft(self) -> None:
        shapes: Shapes = {}
        for name, shape in shapes_of(named.LLAMA).items():
            path = f"base_model.model.{name.removesuffix('weight')}"
            if "q_proj" in name:
                shapes[f"{path}lora_A.default.weight"] = 8, shape[1]
                shapes[f"{path}lora_B.default.weight"] = shape[0], 8
                path += "base_layer."
            shapes[f"{path}weight"] = shape
        family = known(shapes)
        name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
        assert slot(family, name) == "attention.query"


class TestTables:
    """The list of tables and the tables fit together."""

    @pytest.mark.parametrize("entry", list_tables(), ids=lambda entry: entry.table)
    def test_a_table_has_the_paths_by_which_it_is_recognised(self, entry: ListedTable) -> None:
        table = load_table(entry.table)
        for sign in entry.signs:
            keys = (re.sub(r"\{\w+\}|\d+", "0", row.pattern) for row in table.rows)
            assert any(f".{key}".endswith(f".{sign}") for key in keys), sign

    @pytest.mark.parametrize("entry", list_tables(), ids=lambda entry: entry.table)
    def test_a_row_stands_for_names_of_its_pattern(self, entry: ListedTable) -> None:
        table = load_table(entry.table)
        for row in table.rows:
            name = re.sub(r"\{\w+\}", "7", row.pattern) + ("" if row.param else ".weight")
            matches = table.matches(name, re.sub(r"\d+", "0", name), len(row.axes))
            assert row in [match.row for match in matches]

    @pytest.mark.parametrize("entry", list_tables(), ids=lambda entry: entry.table)
    def test_a_table_names_its_sources(self, entry: ListedTable) -> None:
        path = files("xckpt.structure.families") / "tables" / f"{entry.table}.txt"
        head = path.read_text().partition("\n\n")[0]
        assert re.search(r"\d\.\d|github\.com", head)

    def test_all_are_in_the_list(self) -> None:
        folder = files("xckpt.structure.families") / "tables"
        names = {path.name.removesuffix(".txt") for path in folder.iterdir()}
        assert names - {"index"} == {entry.table for entry in list_tables()}


class TestTypes:
    """The type that a config states outranks the names."""

    def test_decides_what_norms_add(self) -> None:
        name = "model.layers.0.input_layernorm.weight"
        configs: list[tuple[dict[str, Any] | None, bool | None]] = [
            ({"model_type": "gemma"}, True),
            ({"architectures": ["GemmaForCausalLM"]}, True),
            ({"model_type": "llama"}, False),
            (None, None),
        ]
        for config, adds_one in configs:
            place = known(named.LLAMA, config).describe(name)
            assert place is not None
            assert place.adds_one is adds_one

    @pytest.mark.parametrize(
        "config",
        [
            {"model_type": "mistral"},
            {"architectures": ["MistralForCausalLM"]},
            {"text_config": {"model_type": "mistral"}},
        ],
    )
    def test_is_stated_in_several_ways(self, config: dict[str, Any]) -> None:
        place = known(named.LLAMA, config).describe("model.norm.weight")
        assert place is not None
        assert place.adds_one is False

    def test_of_another_family_leaves_it_unknown(self) -> None:
        facts = model_facts({"config": {"model_type": "gpt2"}})
        assert family_of(shapes_of(named.LLAMA), facts) is None

    def test_without_a_table_leaves_it_to_the_names(self) -> None:
        assert slot(known(named.LLAMA, {"model_type": "new"}), "lm_head.weight") == "output"

    @pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight"])
    def test_is_enough_for_one_tensor(self, name: str) -> None:
        shape = shapes_of(named.LLAMA)[name]
        place = known({name: shape}, CONFIG).describe(name, shape)
        assert place is not None
        assert place.axes == ("vocab", "embd")[-len(shape) :]

    def test_of_gguf_decides_on_rotation(self) -> None:
        shapes = shapes_of(named.GGUF)
        for architecture, is_rotary in (("llama", True), ("bloom", False)):
            place = known(shapes, {"model_type": architecture}).describe("blk.0.attn_q.weight")
            assert place is not None
            assert place.is_rotary is is_rotary

    @pytest.mark.parametrize(
        "config",
        [
            {"model_type": 3, "architectures": [None, {}], "text_config": []},
            {"model_type": "llama", "hidden_size": -1, "num_attention_heads": 0},
            {"model_type": "llama", "hidden_size": "48", "head_dim": None},
            {"model_type": "x" * 100_000},
        ],
    )
    def test_of_any_kind_are_safe(self, config: dict[str, Any]) -> None:
        assert slot(known(named.LLAMA, config), "lm_head.weight") == "output"


class TestDecoys:
    """Misleading names choose no family, and do not change one."""

    def test_few_names_of_a_family(self) -> None:
        shapes = shapes_of(named.LLAMA)
        shapes |= {f"model.blocks.{n}.part{n}.weight": (7, 9) for n in range(2)}
        shapes |= {f"model.other.{word}.weight": (7, 9) for word in "abcdefghijkl"}
        assert family_of(shapes) is None

    def test_names_of_one_layer(self) -> None:
        names = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "norm.weight")
        assert family_of({f"model.layers.0.{name}": (8, 8) for name in names}) is None

    def test_blocks_that_look_like_a_whole_model(self) -> None:
        shapes: Shapes = {}
        for block in (f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)):
            for name in ("conv1", "conv2", "shortcut.conv", "shortcut.bn", "attention.q"):
                shapes[f"{block}.{name}.weight"] = (8, 8, 3, 3)
                shapes[f"{block}.{name}.bias"] = (8,)
        assert family_of(shapes) is None

    def test_other_numbers_of_axes(self) -> None:
        assert family_of(dict.fromkeys(shapes_of(named.LLAMA), (4, 4, 3, 3))) is None

    def test_widths_that_differ(self) -> None:
        shapes = shapes_of(named.LLAMA)
        changed = {n: (*s[:-1], 40 + k % 13) for k, (n, s) in enumerate(shapes.items())}
        assert family_of(changed) is None

    def test_the_names_of_two_families_in_one_model(self) -> None:
        both = shapes_of(named.LLAMA) | shapes_of(named.LLAMA.replace("_proj", "_lin"))
        assert family_of(both) is None

    def test_misleading_modules_in_front(self) -> None:
        shapes = {f"running_mean.{n}": shape for n, shape in shapes_of(named.LLAMA).items()}
        family = known(shapes)
        assert slot(family, "running_mean.model.norm.weight") == "output_norm"

    def test_numbers_that_are_no_indices(self) -> None:
        family = known(named.LLAMA)
        for index in ("x", "", "1_0", "-1", "٣", "1" * 10):
            assert family.describe(f"model.layers.{index}.mlp.up_proj.weight") is None

    @pytest.mark.parametrize("shapes", [{}, {"": ()}, {".": (1,), "..": (2,)}, {"a" * 99_999: ()}])
    def test_strange_names(self, shapes: Shapes) -> None:
        assert family_of(shapes) is None

    @pytest.mark.parametrize("name", ["a." * 50_000, "layers.0." * 20_000, "0." * 50_000 + "w"])
    def test_a_name_of_many_words(self, name: str) -> None:
        shapes = {f"{front}{name}{n}": (n,) for n in range(4) for front in "xy"}
        start = time.perf_counter()
        assert family_of(shapes) is None
        assert known(shapes_of(named.LLAMA)).describe(name) is None
        assert time.perf_counter() - start < 10

    def test_many_prefixes(self) -> None:
        llama = shapes_of(named.LLAMA)
        shapes = {f"{'m' * n}.{name}": s for n in range(1, 400) for name, s in llama.items()}
        start = time.perf_counter()
        family_of(shapes)
        assert time.perf_counter() - start < 30

    def test_many_names_of_many_forms(self) -> None:
        assert (
            family_of({f"{'.'.join('ab' * (n % 40))}.{n:x}": (n,) for n in range(30_000)}) is None
        )


class TestComponents:
    def test_have_a_family_each(self) -> None:
        family = known(named.STABLE_DIFFUSION)
        components = {}
        for name in shapes_of(named.STABLE_DIFFUSION):
            place = family.describe(name)
            components[name.split(".")[0]] = place.component if place is not None else None
        assert components == {
            "model": "unet",
            "first_stage_model": "vae",
            "cond_stage_model": "text_encoder",
            "betas": None,
            "alphas_cumprod": None,
        }

    def test_have_their_own_sizes(self) -> None:
        family = known(named.OPENAI_CLIP)
        assert family.sizes["text.embd"] == 48
        assert family.sizes["vision.embd"] == 60
        place = family.describe("visual.ln_pre.weight", (60,))
        assert place is not None
        assert (place.component, place.axes) == ("vision", ("embd",))

    def test_of_a_diffusion_model_are_called_by_their_kind(self) -> None:
        vae = {n: s for n, s in shapes_of(named.STABLE_DIFFUSION).items() if "first_stage" in n}
        family = known({**shapes_of(named.FLUX), **vae})
        assert family.components == {"vae": "vae", "transformer": "flux"}

    def test_are_called_by_their_prefix_otherwise(self) -> None:
        llama = shapes_of(named.LLAMA)
        shapes = {f"{part}.{n}": s for part in ("teacher", "student") for n, s in llama.items()}
        place = known(shapes).describe("student.model.norm.weight")
        assert place is not None
        assert place.component == "student"

    def test_of_an_ensemble_are_called_by_their_numbers(self) -> None:
        llama = shapes_of(named.LLAMA)
        family = known({f"models.{k}.{n}": s for k in range(3) for n, s in llama.items()})
        places = [family.describe(f"models.{k}.lm_head.weight") for k in (0, 2, 1, 5)]
        assert [p and p.component for p in places] == ["models.0", "models.2", "models.1", None]
        place = family.describe("models.2.model.layers.1.mlp.up_proj.weight")
        assert place is not None
        assert place.indices == (("model", 2), ("layer", 1))


class TestSizes:
    def test_follow_from_the_config(self) -> None:
        sizes = known(named.LLAMA, CONFIG).sizes
        assert {
            "embd": 48,
            "head": 6,
            "key": 16,
            "head*key": 96,
            "ff": 112,
        }.items() <= sizes.items()

    def test_of_a_language_model_follow_from_its_own_config(self) -> None:
        llama = shapes_of(named.LLAMA)
        shapes = {**llama, **{f"visual.{n}": s for n, s in shapes_of(named.VISION).items()}}
        text = {"num_attention_heads": 6, "hidden_size": 48}
        vision = {"num_heads": 4, "embed_dim": 32}
        config = {"model_type": "qwen2_vl", "text_config": text, "vision_config": vision}
        sizes = known(shapes, config).sizes
        assert (sizes["embd"], sizes["head"]) == (48, 6)
        assert (sizes["vision.embd"], sizes["vision.head"]) == (32, 4)

    def test_follow_from_tensors_that_agree(self) -> None:
        sizes = known(named.LLAMA).sizes
        assert {"embd": 48, "head*key": 96, "head_kv*key": 32, "ff": 112}.items() <= sizes.items()
        assert "head" not in sizes

    def test_names_of_axes_are_the_same_with_and_without_a_config(self) -> None:
        places = axes(known(named.LLAMA), named.LLAMA)
        assert places == axes(known(named.LLAMA, CONFIG), named.LLAMA)
        assert places["attention.query weight"] == ("head*key", "embd")

    def test_an_axis_with_another_extent_has_no_name(self) -> None:
        place = known(named.LLAMA).describe("model.layers.0.self_attn.q_proj.weight", (95, 48))
        assert place is not None
        assert place.axes == (None, "embd")

    def test_a_size_that_differs_by_layer_names_no_axis(self) -> None:
        shapes = shapes_of(named.LLAMA)
        shapes["model.layers.1.mlp.up_proj.weight"] = (96, 48)
        shapes["model.layers.1.mlp.gate_proj.weight"] = (96, 48)
        shapes["model.layers.1.mlp.down_proj.weight"] = (48, 96)
        place = known(shapes).describe("model.layers.1.mlp.up_proj.weight", (96, 48))
        assert place is not None
        assert place.axes == (None, "embd")


class TestStructures:
    """The structure of a checkpoint takes what its family knows."""

    @pytest.fixture
    def structure(self) -> Structure:
        described = (Described(n, "float32", s) for n, s in shapes_of(named.LLAMA).items())
        return Structure(described, model_facts({"config": {"model_type": "gemma"}}))

    def test_have_slots_axes_and_indices(self, structure: Structure) -> None:
        info = structure["model.layers.1.self_attn.k_proj.weight"]
        assert (info.slot, info.module_type, info.param) == ("attention.key", "linear", "weight")
        assert info.axes == ("head_kv*key", "embd")
        assert info.indices == (("layer", 1),)
        assert structure.family == "gemma"
        assert structure.sizes["embd"] == 48

    def test_show_the_family_as_the_source(self, structure: Structure) -> None:
        evidence = structure["lm_head.weight"].evidence
        reasons = {e.field: e.reason for e in evidence if e.source == "family"}
        assert reasons == dict.fromkeys(("slot", "module_type", "axes"), "llama: lm_head")
        ranks = [e.source for e in evidence]
        assert ranks.index("family") < ranks.index("convention")

    def test_keep_what_the_file_states(self) -> None:
        facts = {"axes": ("rows", "columns"), "uses": (("Conv", 1, ()),)}
        tensors = [Described(n, "float32", s, facts) for n, s in shapes_of(named.LLAMA).items()]
        info = Structure(tensors)["model.layers.0.mlp.up_proj.weight"]
        assert info.axes == ("rows", "columns")
        assert info.module_type == "convolution"
        assert info.slot == "ffn.up"

    @pytest.mark.parametrize(
        "text",
        [named.MIXTRAL, named.META_LLAMA, named.MEGATRON, named.GGUF, named.OPENAI_CLIP],
    )
    def test_have_the_indices_of_tensors_without_a_family(self, text: str) -> None:
        tensors = [Described(n, "float32", s) for n, s in shapes_of(text).items()]
        structure = Structure(tensors)
        for tensor in tensors:
            form = re.sub(r"\d+", "0", tensor.name)
            alike = [t for t in tensors if re.sub(r"\d+", "0", t.name) == form]
            assert Structure(alike).family == ""
            expected = Structure(alike).indices(tensor.name)
            assert structure.indices(tensor.name) == expected, tensor.name

    def test_leave_the_state_of_an_optimizer_alone(self) -> None:
        shapes = shapes_of(named.LLAMA)
        moments = {f"optimizer.exp_avg.{name}": shape for name, shape in shapes.items()}
        tensors = [Described(n, "float32", s) for n, s in (shapes | moments).items()]
        structure = Structure(tensors)
        assert structure["optimizer.exp_avg.lm_head.weight"].component == "optimizer"
        assert structure["lm_head.weight"].slot == "output"

    def test_pickle(self, structure: Structure) -> None:
        copy = pickle.loads(pickle.dumps(structure))
        assert copy["lm_head.weight"] == structure["lm_head.weight"]
