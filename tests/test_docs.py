"""Examples of the documentation give what they show."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import xarray as xr

import xckpt
from benchmarks.checkpoints import gpt, mixture_of_experts, resnet, write_ztensor
from tests.formats import torch_files
from tests.formats.gptrs_files import id_bytes, indexed_file, record, tagged
from xckpt.sample import write_checkpoint

DOCS = Path(__file__).parents[1] / "docs"


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
    check("how-to/optimizer.md", examples=8)


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
    for step in (0, 1):
        arrays = {n: np.full(16, k + step, "f4") for k, n in enumerate(names)}
        ds = xr.Dataset({n: ("x", a) for n, a in arrays.items()})
        xckpt.save(ds, "model.safetensors", overwrite=True)
        old = Path("run/model-00002-of-00002.safetensors")
        content = old.read_bytes() if step else b""
        xckpt.save(ds, "run/model.safetensors", max_shard_size=200, overwrite=True)
    old.write_bytes(content)
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
