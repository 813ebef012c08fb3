"""The recipes of `docs/how-to/combine.md`, run as printed: bit by bit what numpy and torch compute.

Two recipes depend on the order of a sum: SLERP is within two units in the last place of the largest
element, and a merged adapter within one unit of bfloat16.
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.documented import BART, LLAMA, write_models
from tests.test_docs import PAGES
from xckpt.errors import CheckpointWarning

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensors = dict[str, Any]

BLOCKS = PAGES["docs/how-to/combine"]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BFLOAT16_EPS = 2.0**-7
TYPES = {"BF16": BFLOAT16, "F16": np.dtype("f2"), "F32": np.dtype("f4")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    write_models(folder)
    return folder


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def run(target: str) -> dict[str, Any]:
    """Run the recipe that writes a target, and return its names."""
    (block,) = [b for b in BLOCKS if any(target in line for line in writing_lines(b))]
    if Path(target).is_dir():
        shutil.rmtree(target)
    Path(target).unlink(missing_ok=True)
    names: dict[str, Any] = {}
    exec(block, names)  # noqa: S102  our page
    return names


def writing_lines(block: str) -> list[str]:
    lines = block.splitlines()
    return [line for line in lines if ".save(" in line or ".convert(" in line]


def stored(path: str) -> Tensors:
    """Return the tensors of a safetensors file or a folder with shards, as they are stored."""
    if Path(path).is_dir():
        shards = sorted(Path(path).glob("*.safetensors"))
        return {name: array for shard in shards for name, array in stored(str(shard)).items()}
    data = Path(path).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:end]).items():
        if name != "__metadata__":
            start, stop = (end + offset for offset in entry["data_offsets"])
            flat = np.frombuffer(data[start:stop], TYPES[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def float32(path: str) -> Tensors:
    return {name: array.astype("f4") for name, array in stored(path).items()}


def assert_same(target: str, expected: Tensors) -> None:
    tensors = stored(target)
    assert sorted(tensors) == sorted(expected)
    for name, array in expected.items():
        assert tensors[name].dtype == array.dtype, name
        assert tensors[name].tobytes() == array.tobytes(), name


# Recipes that are arithmetic, with their tensors. They give the same in numpy and torch.
ARITHMETIC: dict[str, tuple[list[str], Callable[..., Any], Any]] = {
    "soup.safetensors": (["model-1", "model-2", "model-3"], lambda a, b, c: (a + b + c) / 3, "f4"),
    "mixed.safetensors": (["model-1", "model-2"], lambda a, b: 0.3 * a + 0.7 * b, "f4"),
    "mean.safetensors": (["model-1", "model-2"], lambda a, b: (a + b) / 2, BFLOAT16),
    "other.safetensors": (
        ["model-2", "model-1", "base"], lambda other, a, b: other + 0.5 * (a - b), BFLOAT16,
    ),
    "last.safetensors": (
        [f"run/checkpoint-{step}/model" for step in (200, 300)], lambda a, b: (a + b) / 2, "f4",
    ),
    "ema.safetensors": (
        [f"run/checkpoint-{step}/model" for step in (100, 200, 300)],
        lambda a, b, c: 0.9 * (0.9 * a + 0.1 * b) + 0.1 * c, "f4",
    ),
    "cut.safetensors": (["base", "more-tokens"], lambda a, b: (a + b[: len(a)]) / 2, "f4"),
    "half.safetensors": (["base"], lambda a: a, "f2"),
    "step-200.safetensors": (["run/checkpoint-200/model"], lambda a: a, BFLOAT16),
    "shards/": (["base"], lambda a: a, BFLOAT16),
    "hf/mean/": (["model-1", "model-2"], lambda a, b: (a + b) / 2, "f4"),
}  # fmt: skip


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("target", ARITHMETIC)
def test_arithmetic_is_that_of_the_library(target: str, library: str) -> None:
    sources, compute, dtype = ARITHMETIC[target]
    convert: Callable[[Any], Any] = np.asarray
    if library == "torch":
        convert = pytest.importorskip("torch").from_numpy
    run(target)
    models = [float32(f"{source}.safetensors") for source in sources]
    expected = {
        name: np.asarray(compute(*[convert(model[name]) for model in models])).astype(dtype)
        for name in models[0]
    }
    assert_same(target, expected)


def test_a_folded_norm_scales_the_outputs() -> None:
    run("folded.safetensors")
    t = xckpt.open("cnn.safetensors").load()
    scale = t["bn1.weight"].values / np.sqrt(t["bn1.running_var"].values + np.float32(1e-5))
    expected = {
        "conv1.weight": t["conv1.weight"].values * scale[:, None, None, None],
        "conv1.bias": t["bn1.bias"].values - t["bn1.running_mean"].values * scale,
        "fc.weight": t["fc.weight"].values,
    }
    assert_same("folded.safetensors", expected)


def test_a_pipeline_keeps_all_that_is_no_weight() -> None:
    run("sd-mean/")
    for part in ("unet", "vae"):
        a, b, mean = (
            float32(f"{name}/{part}/diffusion_pytorch_model.safetensors")
            for name in ("sd-1", "sd-2", "sd-mean")
        )
        assert sorted(mean) == sorted(a)
        assert all(np.array_equal(mean[name], (a[name] + b[name]) / 2) for name in a)
    names = {str(path.relative_to("sd-1")) for path in Path("sd-1").rglob("*")}
    assert {str(path.relative_to("sd-mean")) for path in Path("sd-mean").rglob("*")} == names


def test_a_mean_in_a_folder_has_the_config_of_the_models() -> None:
    run("hf/mean/")
    assert json.loads(Path("hf/mean/config.json").read_text()) == LLAMA


def test_a_broken_step_is_visible_in_the_mean(tmp_path: Path, monkeypatch: Any) -> None:
    write_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = "run/checkpoint-300/model.safetensors"
    broken = xckpt.open(path).load()
    broken["lm_head.weight"][3, 5] = np.nan
    broken.ckpt.save(path, overwrite=True)
    run("last.safetensors")
    assert np.argwhere(np.isnan(stored("last.safetensors")["lm_head.weight"])).tolist() == [[3, 5]]


def test_slerp_goes_along_the_arc() -> None:
    run("slerp.safetensors")
    a, b, mixed = map(float32, ("model-1.safetensors", "model-2.safetensors", "slerp.safetensors"))
    for name, array in mixed.items():
        x, y = a[name].astype("f8"), b[name].astype("f8")
        angle = np.arccos((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()))
        arc = (np.sin(0.7 * angle) * x + np.sin(0.3 * angle) * y) / np.sin(angle)
        if np.cos(angle) > 0.9995:
            arc = 0.7 * x + 0.3 * y
        unit = np.spacing(np.maximum(abs(x), abs(y)).max().astype("f4"))
        np.testing.assert_allclose(array, arc, rtol=0, atol=2 * unit)


@pytest.mark.parametrize("factor", [0, 1, -1, 3])
def test_slerp_of_parallel_tensors_is_their_line(factor: int) -> None:
    slerp = run("slerp.safetensors")["slerp"]
    a = xckpt.open("model-1.safetensors")
    xr.testing.assert_allclose(slerp(a, factor * a, 0.3), (0.7 + 0.3 * factor) * a, atol=1e-6)
    assert float(slerp(0 * a, 0 * a, 0.3)["lm_head.weight"].max()) == 0


def test_ties_keeps_large_changes_of_the_elected_sign() -> None:
    run("ties.safetensors")
    base, *models = (float32(f"{n}.safetensors") for n in ("base", "model-1", "model-2", "model-3"))
    expected = {}
    for name, weight in base.items():
        changes = np.stack([model[name] - weight for model in models])
        for change in changes:
            change[abs(change) < np.quantile(abs(change), 0.8)] = 0
        agree = (np.sign(changes) == np.sign(changes.sum(0))) & (changes != 0)
        total, count = np.where(agree, changes, 0).sum(0), agree.sum(0).clip(1)
        expected[name] = (weight + (total / count).astype("f4")).astype(BFLOAT16)
    assert_same("ties.safetensors", expected)


def test_ties_is_that_of_peft() -> None:
    torch, utils = pytest.importorskip("torch"), pytest.importorskip("peft.utils.merge_utils")
    ties = run("ties.safetensors")["ties"]
    changes = np.random.default_rng(0).normal(size=(3, 10, 20)).astype("f4")
    weights = torch.ones(3)
    expected = utils.ties([torch.from_numpy(change) for change in changes], weights, 0.2).numpy()
    arrays = [xckpt.open({"w": change}) for change in changes]
    np.testing.assert_array_equal(ties(arrays, 0.2)["w"], expected)


def mask_of_dare(name: str, shape: tuple[int, ...], drop: float) -> Any:
    """Choose elements one by one, with the integers of Python."""
    key, whole = zlib.crc32(f"0 {name}".encode()) << 32, 2**64
    kept = []
    for position in range(int(np.prod(shape))):
        bits = position + key
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = ((bits ^ (bits >> shift)) * factor) % whole
        kept.append(bits ^ (bits >> 31) >= drop * whole)
    return np.reshape(kept, shape)


def test_dare_keeps_a_share_and_scales_it_up() -> None:
    run("dare.safetensors")
    base, tuned = map(float32, ("base.safetensors", "model-1.safetensors"))
    expected, count = {}, 0
    for name, weight in base.items():
        kept = mask_of_dare(name, weight.shape, 0.5)
        change = np.where(kept, tuned[name] - weight, 0) / np.float32(0.5)
        expected[name] = (weight + change).astype(BFLOAT16)
        count += kept.sum()
    assert_same("dare.safetensors", expected)
    size = sum(array.size for array in base.values())
    assert abs(count - size / 2) < 3 * np.sqrt(size / 4)  # three standard deviations


@pytest.mark.parametrize(
    "chunks", [{"vocab": 5, "embd": 3}, {"embd": 1}, {"vocab": 1}, {"ff": 7, "vocab": 31}]
)
@pytest.mark.filterwarnings("ignore:The specified chunks separate")
def test_the_mask_of_dare_depends_on_names_and_positions_only(chunks: dict[str, int]) -> None:
    dare = run("dare.safetensors")["dare"]
    ones = xr.ones_like(xckpt.open("base.safetensors")).map(dare, drop=0.3)
    chunked = xr.ones_like(xckpt.open("base.safetensors", chunks=chunks)).map(dare, drop=0.3)
    xr.testing.assert_equal(ones, chunked)
    xckpt.convert("base.safetensors", "pieces/", max_shard_size="1kB", overwrite=True)
    for opened in (xckpt.open("pieces/"), xckpt.open("base.safetensors", tensors="*_proj*")):
        masks = xr.ones_like(opened).map(dare, drop=0.3)
        xr.testing.assert_equal(masks, ones[list(masks)])
    other_seed = xr.ones_like(xckpt.open("base.safetensors")).map(dare, drop=0.3, seed=1)
    assert not other_seed["lm_head.weight"].equals(ones["lm_head.weight"])
    scalar = dare(xr.DataArray(np.float32(1), name="logit_scale"), drop=0.3)
    assert float(scalar) in {0, float(np.float32(1) / np.float32(0.7))}


def test_adapters_are_added_to_their_tensors() -> None:
    run("merged.safetensors")
    base, factors = float32("base.safetensors"), stored("adapter/adapter_model.safetensors")
    merged = float32("merged.safetensors")
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        total = weight
        if f"{module}.lora_A.weight" in factors:
            a, b = (factors[f"{module}.lora_{side}.weight"].astype("f8") for side in "AB")
            total = weight + 2 * (b @ a)
        unit = BFLOAT16_EPS * abs(total)
        assert (abs(merged[name] - total) <= (0 if total is weight else unit)).all()


def test_tensors_are_replaced_left_out_and_added() -> None:
    for target in ("replaced.safetensors", "attention.safetensors", "classifier.safetensors"):
        run(target)
    a, b, base = map(stored, ("model-1.safetensors", "model-2.safetensors", "base.safetensors"))
    assert_same("replaced.safetensors", a | {n: t for n, t in b.items() if ".mlp." in n})
    assert_same("attention.safetensors", {n: t for n, t in base.items() if ".self_attn." in n})
    del base["lm_head.weight"]
    assert_same("classifier.safetensors", base | {"score.weight": np.zeros((2, 8), "f4")})


def test_new_tokens_are_the_mean_of_the_others() -> None:
    run("larger.safetensors")
    expected = stored("base.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        row = expected[name].astype("f4").mean(0, keepdims=True)
        table = np.concatenate([expected[name].astype("f4"), *[row] * 4])
        expected[name] = table.astype(BFLOAT16)
    assert_same("larger.safetensors", expected)


# --- results in other libraries ------------------------------------------------------------------

MODELS = {
    **dict.fromkeys(
        [*ARITHMETIC, "slerp.safetensors", "ties.safetensors", "dare.safetensors"],
        ("LlamaForCausalLM", {}),
    ),
    "merged.safetensors": ("LlamaForCausalLM", {}),
    "replaced.safetensors": ("LlamaForCausalLM", {}),
    "larger.safetensors": ("LlamaForCausalLM", {"vocab_size": 36}),
    "classifier.safetensors": ("LlamaForSequenceClassification", {"pad_token_id": 0}),
}


def llama(target: str, folder: Path, kind: str = "LlamaForCausalLM", **config: Any) -> Any:
    """Load a model by transformers, and raise if a tensor is missing or not used."""
    transformers: Any = pytest.importorskip("transformers")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    for path in Path(target).iterdir() if Path(target).is_dir() else [Path(target)]:
        name = path.name if Path(target).is_dir() else "model.safetensors"
        (folder / name).write_bytes(path.read_bytes())
    model, report = getattr(transformers, kind).from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(report.values()), report
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", MODELS)
def test_transformers_computes_with_the_result(target: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    kind, config = MODELS[target]
    run(target)
    model = llama(target, tmp_path / "model", kind, **config)
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits.float()).all()
    state = model.state_dict()
    for name, array in float32(target).items():
        np.testing.assert_array_equal(state[name].float().numpy(), array)


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_decoder_with_fewer_layers() -> None:
    transformers: Any = pytest.importorskip("transformers")
    run("hf/student/")
    config = json.loads(Path("hf/student/config.json").read_text())
    assert config == BART | {"decoder_layers": 3}
    model, report = transformers.BartForConditionalGeneration.from_pretrained(
        "hf/student", output_loading_info=True
    )
    assert not any(report.values()), report
    teacher, state = stored("hf/bart"), model.state_dict()
    for name in stored("hf/student"):
        side, _, layer = name.partition("decoder.layers.")
        before = f"{side}decoder.layers.{(0, 2, 5)[int(layer[0])]}{layer[1:]}" if layer else name
        np.testing.assert_array_equal(state[name].numpy(), teacher[before])


@pytest.mark.filterwarnings("ignore")
def test_peft_merges_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    run("merged.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    config["target_modules"] = ["q_proj", "v_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights = Path("adapter/adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(weights)
    base = llama("base.safetensors", tmp_path / "base")
    state = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    for name, array in float32("merged.safetensors").items():
        theirs = state[name].float().numpy()
        unit = BFLOAT16_EPS * abs(theirs) if "_proj" in name else 0
        assert (abs(array - theirs) <= unit).all(), name


@pytest.mark.parametrize("target", ["soup.safetensors", "merged.safetensors"])
def test_gguf_reads_the_result(target: str, tmp_path: Path) -> None:
    gguf: Any = pytest.importorskip("gguf")
    run(target)
    with pytest.warns(CheckpointWarning, match=r"no general\.architecture.*convert_hf_to_gguf"):
        xckpt.convert(target, tmp_path / "model.gguf")
    expected = stored(target)
    tensors = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    assert len(tensors) == len(expected)
    for tensor in tensors:
        assert tensor.data.tobytes() == expected[tensor.name].tobytes()
