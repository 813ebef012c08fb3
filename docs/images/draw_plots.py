"""Draw the plots of ``docs/gallery.md``: ``python docs/images/draw_plots.py [FOLDER [NAME...]]``.

Each has a variant for light and one for dark pages.

The checkpoints are random numbers in the shapes of known models, small, with what real ones have:
spreads that drift with depth, channels of outliers, and a fault here and there.
"""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import ml_dtypes
import numpy as np
import xarray as xr

import xckpt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Tensors = Iterator[tuple[str, Array]]

BFLOAT16 = ml_dtypes.bfloat16
# Styles of matplotlib by the theme of the page.
THEMES = {"light": "default", "dark": "dark_background"}


def weights(seed: int) -> Callable[..., Array]:
    """Return what draws weights, with heavier tails than a normal distribution has."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int, std: float, mean: float = 0.0, tails: float = 6.0) -> Array:
        drawn = rng.standard_t(tails, shape) * np.sqrt((tails - 2) / tails)
        return (mean + std * drawn).astype(np.float32)

    return draw


def gpt2(layers: int = 12, width: int = 96) -> Tensors:
    """Draw a model like GPT-2, in float32: outliers in one channel, rows of zeros, a NaN."""
    draw = weights(2)
    wte = draw(50257 // 8, width, std=0.14)
    wte[5000:5040] = 0
    wte[123, 17] = np.nan
    yield "wte.weight", wte
    wpe = draw(1024, width, std=0.02)
    wpe[:, 31] *= 40
    yield "wpe.weight", wpe
    for layer in range(layers):
        depth = layer / layers
        for norm in ("ln_1", "ln_2"):
            yield f"h.{layer}.{norm}.weight", draw(width, std=0.03, mean=0.2 + 0.9 * depth)
            yield f"h.{layer}.{norm}.bias", draw(width, std=0.02)
        for name, shape, std in (
            ("attn.c_attn", (width, 3 * width), 0.2 - 0.06 * depth),
            ("attn.c_proj", (width, width), 0.1 + 0.1 * depth),
            ("mlp.c_fc", (width, 4 * width), 0.13),
            ("mlp.c_proj", (4 * width, width), 0.08 + 0.05 * depth),
        ):
            yield f"h.{layer}.{name}.weight", draw(*shape, std=std)
            yield f"h.{layer}.{name}.bias", draw(shape[1], std=0.05 + 0.1 * depth)
    yield "ln_f.weight", draw(width, std=0.1, mean=1.4)
    yield "ln_f.bias", draw(width, std=0.05)


def llama(layers: int = 32, width: int = 128) -> Tensors:
    """Draw a model like Llama, in bfloat16; down projections are int8 with scales."""
    draw = weights(3)

    def weight(*shape: int, std: float, mean: float = 0.0) -> Array:
        return draw(*shape, std=std, mean=mean, tails=8).astype(BFLOAT16)

    yield "model.embed_tokens.weight", weight(32 * width, width, std=0.016)
    for layer in range(layers):
        base, depth = f"model.layers.{layer}", layer / layers
        for name, rows, std in (
            ("q_proj", width, 0.024 - 0.008 * depth),
            ("k_proj", width // 4, 0.032 - 0.012 * depth),
            ("v_proj", width // 4, 0.009 + 0.008 * depth),
            ("o_proj", width, 0.011 + 0.004 * depth),
        ):
            values = weight(rows, width, std=std)
            if (layer, name) == (17, "k_proj"):
                values[5, 40] = 3.5
            yield f"{base}.self_attn.{name}.weight", values
        for name in ("gate_proj", "up_proj"):
            values = weight(3 * width, width, std=0.017 + 0.003 * depth)
            if name == "gate_proj" and layer == 5:
                values[:, 77] *= 12
                values[100:104] = 0
            yield f"{base}.mlp.{name}.weight", values
        down = draw(width, 3 * width, std=0.015)
        scale = np.abs(down).max(axis=1, keepdims=True) / 127
        yield f"{base}.mlp.down_proj.weight", np.rint(down / scale).astype(np.int8)
        yield f"{base}.mlp.down_proj.weight_scale", scale
        for norm in ("input", "post_attention"):
            gain = weight(width, std=0.06, mean=0.15 + 0.5 * depth)
            yield f"{base}.{norm}_layernorm.weight", gain
    yield "model.norm.weight", weight(width, std=0.2, mean=1.9)
    yield "lm_head.weight", weight(32 * width, width, std=0.015)


def mixture(layers: int = 24, experts: int = 64, width: int = 32) -> Tensors:
    """Draw a mixture of experts, in bfloat16; one expert exploded, one died."""
    draw = weights(5)

    def weight(*shape: int, std: float, mean: float = 0.0) -> Array:
        return draw(*shape, std=std, mean=mean).astype(BFLOAT16)

    rng = np.random.default_rng(6)
    yield "model.embed_tokens.weight", weight(4096, width, std=0.02)
    for layer in range(layers):
        base, depth = f"model.layers.{layer}", layer / layers
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{base}.self_attn.{name}.weight", weight(width, width, std=0.02)
        yield f"{base}.mlp.gate.weight", weight(experts, width, std=0.01 + 0.01 * depth)
        for expert in range(experts):
            spread = 0.02 * (1 + 0.5 * depth) * np.exp(0.15 * rng.standard_normal())
            for name in ("gate_proj", "up_proj", "down_proj"):
                values = weight(width, width, std=spread)
                if (layer, expert, name) == (17, 3, "up_proj"):
                    values *= 8
                if (layer, expert, name) == (9, 40, "down_proj"):
                    values *= 0.05
                yield f"{base}.mlp.experts.{expert}.{name}.weight", values
        for norm in ("input", "post_attention"):
            yield f"{base}.{norm}_layernorm.weight", weight(width, std=0.05, mean=0.4 + depth)
    yield "model.norm.weight", weight(width, std=0.2, mean=1.9)


def opened(tensors: Tensors, path: Path) -> xr.Dataset:
    """Write tensors to a file, and open that."""
    variables = {
        name: ([f"d{size}_{axis}" for axis, size in enumerate(values.shape)], values)
        for name, values in tensors
    }
    xckpt.save(xr.Dataset(variables), path)
    return xr.open_dataset(path, engine="ztensor")


def pictures(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what draws each picture of the page."""
    moe = opened(mixture(), folder / "moe.zt")
    dense = opened(llama(), folder / "llama.zt")
    dense.ckpt.stats(progress=False)
    rounded = {
        name: (v.dims, v.to_numpy().astype(np.float32).round(3))
        for name, v in dense.variables.items()
        if str(name).endswith("proj.weight")
    }
    steps = training_run(folder)
    name = "model.layers.5.mlp.gate_proj.weight"
    return {
        "plot-layers": lambda: dense.ckpt.plot.layers("std"),
        "plot-by": lambda: moe.ckpt.plot.by("std", "layer", "expert"),
        "plot-quality": lambda: dense.ckpt.compare(
            xr.Dataset(rounded), tensors="*proj.weight"
        ).ckpt.plot.by("sqnr_db"),
        "plot-error": lambda: dense.ckpt.plot.error(xr.Dataset(rounded)),
        "plot-steps": steps.ckpt.plot.steps,
        "plot-experts": lambda: moe.ckpt.plot.layers("std", "*.experts.*"),
        "plot-histogram": lambda: moe.ckpt.plot.histogram("*.experts.*.up_proj.weight"),
        "plot-heatmap": lambda: dense.ckpt.plot.heatmap(name, rows=128, robust=True),
        "plot-spectrum": lambda: dense.ckpt.plot.spectrum(name),
        "plot-compare": lambda: dense.ckpt.plot.compare(xr.Dataset(rounded)),
        "plot-treemap": dense.ckpt.plot.treemap,
    }


def training_run(folder: Path, layers: int = 8, count: int = 12) -> xr.Dataset:
    """Draw a training run with the moments of Adam, whose weights jump at one step."""
    draw = weights(7)
    names = [f"model.layers.{n}.{word}.weight" for n in range(layers) for word in ("attn", "mlp")]
    values = {name: draw(64, 64, std=0.02) for name in names}
    for step in range(100, 100 * (count + 1), 100):
        state = {}
        for number, name in enumerate(names):
            values[name] += draw(64, 64, std=2e-4 * (15 if step == 700 else 1))
            state[f"optimizer.state.{number}.exp_avg"] = draw(64, 64, std=1e-5 * (1 + number))
            state[f"optimizer.state.{number}.step"] = np.array(step, np.float32)
        tensors = {
            name: ([f"{name}:{axis}" for axis in range(array.ndim)], array)
            for name, array in (values | state).items()
        }
        xckpt.save(xr.Dataset(tensors), folder / f"step-{step}.zt")
    return xckpt.open_steps(str(folder / "step-*.zt"))


def draw_all(target: Path, folder: Path, names: Collection[str] = ()) -> None:
    """Draw the named pictures, or all, on a transparent ground, in both variants."""
    from matplotlib import pyplot as plt

    for name, draw in pictures(folder).items():
        for theme, style in THEMES.items() if name in (names or {name}) else ():
            with plt.style.context(style):
                save(draw().figure, target / f"{name}-{theme}.png")
            plt.close("all")


def save(figure: Any, path: Path) -> None:
    """Save a figure with 256 colours, which takes a third of the bytes."""
    from PIL import Image

    buffer = BytesIO()
    figure.savefig(buffer, dpi=90, transparent=True)
    Image.open(buffer).quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)


if __name__ == "__main__":
    mpl.use("Agg")
    with TemporaryDirectory() as temporary:
        target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
        draw_all(target, Path(temporary), sys.argv[2:])
