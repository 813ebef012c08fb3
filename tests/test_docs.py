"""Examples of the documentation give what they show."""

from __future__ import annotations

import doctest
import re
import shutil
from pathlib import Path
from typing import Any

import click
import dask
import numpy as np
import pytest
import xarray as xr

import xckpt
from benchmarks.checkpoints import gpt, mixture_of_experts, resnet, write_ztensor
from tests.conftest import GOLDEN
from tests.formats import torch_files
from tests.formats.gptrs_files import id_bytes, indexed_file, record, tagged
from tests.test_optimizer_numbers import Saved
from xckpt.sample import write_checkpoint

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)

# Pages whose examples are what a session shows: each has a test of its own.
SESSIONS = {"stacking", "how-to/optimizer", "how-to/netcdf-and-zarr"}
# Blocks that cannot be run here, by what they begin with.
ELSEWHERE = ("from dask_jobqueue", "from dask_kubernetes", "# xckpt/formats/__init__.py", ">>>")
# What stands for something that is not on this machine.
INSTEAD = {
    r'"s3://bucket/m-\*\.zt"': '"m-*.zt"',
    r'"s3://bucket/run/(.*?)"': r'"file://" + os.path.abspath("\1")',
    r'"https://example\.org/(.*?)"': r'"file://" + os.path.abspath("\1")',
    r'"hf://[^/"]+/([^@/"]+)(?:@[^/"]+)?': r'"\1',
    r'\{"anon": True\}': "{}",
    '"s3"': '"file"',
    r"LocalCluster\(.*?\)": "LocalCluster(n_workers=1, processes=False, dashboard_address=':0')",
}
# Names that a page does not make itself.
GIVEN = """
import json, os
from pathlib import Path
import dask, numpy as np, xarray as xr, xckpt
ds = xr.open_dataset("m.zt", engine="ztensor")
options = {}
"""
ALSO_GIVEN = {
    "how-to/compare": "b = other = xr.open_dataset('tuned.zt')",
    "how-to/health-check": "st = ds.ckpt.stats()",
    "how-to/notebook": "ds = xr.open_dataset('experts.zt', stack=True)",
    "how-to/plots": "ds = xr.open_dataset('experts.zt')",
    "how-to/quantized-models": "name = 'model.layers.0.self_attn.q_proj.weight'",
}


def pages() -> list[str]:
    """List the pages that have code."""
    every = (*DOCS.glob("*.md"), *DOCS.glob("how-to/*.md"))
    found = {str(path.relative_to(DOCS).with_suffix("")): path.read_text("utf-8") for path in every}
    return sorted(page for page, text in found.items() if BLOCK.search(text))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the files that pages speak of."""
    folder = tmp_path_factory.mktemp("docs")
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
    clean.ckpt.save(folder / "model.safetensors", max_shard_size="100kB")
    (folder / "Llama-3.1-8B").mkdir()
    quantized = {"DeepSeek-V3": "fp8_block_deepseek_shards", "Llama-3.1-8B-AWQ": "awq_gemm_group32"}
    for name, golden in quantized.items():
        if GOLDEN.is_dir():
            shutil.copytree(GOLDEN / "hf-quantized" / golden, folder / name)
            dense = folder / "Llama-3.1-8B" / "model.safetensors"
            encoding = {"*": {"layout": "dense"}}
            xckpt.convert(folder / name, dense, encoding=encoding, cast="allow", overwrite=True)
    (folder / "run").mkdir()
    for step in (500, 1000):
        xckpt.save(xr.Dataset({"lm_head": ("x", np.ones(4))}), folder / f"run/step-{step}.zt")
    rng = np.random.default_rng(0)
    experts = {
        f"model.layers.{layer}.experts.{expert}.weight": (("out", "in"), rng.normal(size=(8, 4)))
        for layer in range(18)
        for expert in range(4)
    }
    experts["lm_head.weight"] = (("vocab", "in"), rng.normal(size=(16, 4)))
    xckpt.save(xr.Dataset(experts), folder / "experts.zt")
    return folder


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.parametrize("page", [page for page in pages() if page not in SESSIONS])
def test_every_line_of_a_page_runs(
    page: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in {"how-to/hub", "how-to/quantized-models"} and not GOLDEN.is_dir():
        pytest.skip(f"no golden files at {GOLDEN}")
    monkeypatch.chdir(shutil.copytree(files, tmp_path / "files"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    exec(GIVEN + ALSO_GIVEN.get(page, ""), names)  # noqa: S102  written above
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    with dask.config.set(dask.config.config):  # which keeps what pages set to themselves
        for indent, block in BLOCK.findall(text):
            code = re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
            for pattern, instead in INSTEAD.items():
                code = re.sub(pattern, instead, code)
            if not code.startswith(ELSEWHERE):
                exec(code, names)  # noqa: S102  our own documentation
    if "client" in names:
        names["client"].close()


def test_stacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    families = {"gpt2-xl": gpt(), "resnet50": resnet(), "moe": mixture_of_experts()}
    for name, tensors in families.items():
        write_ztensor(tmp_path / f"{name}.zt", dict(tensors))
    check("stacking.md", examples=15)


def check(page: str, *, examples: int, shortened: bool = False) -> None:
    """Run the examples of a page, of which there are more than so many; "..." may be anything."""
    text = (DOCS / page).read_text(encoding="utf-8")
    # The end of a code block would be taken for output.
    text = text.replace("```", "")
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE if shortened else 0
    runner = doctest.DocTestRunner(optionflags=options)
    runner.run(doctest.DocTestParser().get_doctest(text, {}, page, page, 0))
    assert runner.failures == 0
    assert runner.tries > examples


def test_the_state_of_an_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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
        named = {n: ([f"{n}{axis}" for axis in range(np.ndim(a))], a) for n, a in arrays.items()}
        xckpt.save(xr.Dataset(named), f"{path}.safetensors")
    Path("training.pt").write_bytes(training(weights))
    check("how-to/optimizer.md", examples=12)


def training(weights: dict[str, Any]) -> bytes:
    """Write a model and the state of its optimizer as PyTorch does."""
    saved = Saved()
    arrays = {name: saved.array(array.shape, 1.0) for name, array in weights.items()}
    shapes = {at: array.shape for at, array in enumerate(weights.values())}
    value = {"model": torch_files.mapping(arrays)}
    value["optimizer"] = saved.optimizer(shapes, [[*shapes]], fields=("exp_avg",))
    return torch_files.archive(torch_files.mapping(value), saved.storages)


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
@pytest.mark.filterwarnings("ignore:.*(Zarr format 3|Zarr V3) specification")
def test_netcdf_and_zarr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint("sample.zt", layers=2, width=16)
    tensor = record("w/1", np.ones(2, "<f4"), flag=1, stored_id=id_bytes("w/1"))
    config = tagged("gpt", {"vocab_size": 7, "context_length": 5})
    Path("model.bin").write_bytes(indexed_file([tensor], config))
    check("how-to/netcdf-and-zarr.md", examples=15)


@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_leave_pickle_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stored, weight = np.arange(6, dtype="f4"), np.arange(8, dtype="u2").reshape(2, 4)
    tied = torch_files.view(torch_files.storage("0", 6), 0, (3, 2), (2, 1))
    value = {"embed.weight": tied, "fc.weight": torch_files.whole("1", weight)}
    value |= {"lm_head.weight": tied, "epoch": torch_files.number(3)}
    storages = {"0": stored.tobytes(), "1": weight.tobytes()}
    Path("model.pt").write_bytes(torch_files.archive(torch_files.mapping(value), storages))
    check("how-to/leave-pickle-behind.md", examples=10)


def test_the_same_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    names = [*(f"layers.{n}.w" for n in range(3)), "lm_head.w", "norm"]
    shard, shards = Path("run/model-00002-of-00002.safetensors"), []
    for step in (0, 1):
        arrays = {n: np.full(16, k + step, "f4") for k, n in enumerate(names)}
        ds = xr.Dataset({n: ("x", a) for n, a in arrays.items()})
        xckpt.save(ds, "model.safetensors", overwrite=True)
        xckpt.save(ds, "run/model.safetensors", max_shard_size=200, overwrite=True)
        shards.append(shard.read_bytes())
    shard.write_bytes(shards[0])
    xckpt.convert("model.safetensors", "converted.zt")
    check("how-to/same-content.md", examples=12, shortened=True)


def test_the_command_line() -> None:
    from xckpt.cli import commands

    text = (DOCS / "how-to" / "command-line.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(--?[a-z-]+)", text))
    parameters = [each for command in commands.commands.values() for each in command.params]
    options = {name for each in parameters if isinstance(each, click.Option) for name in each.opts}
    assert described == options
    for command in commands.commands:
        assert f"\nxckpt {command} " in text
