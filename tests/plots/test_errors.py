"""Error of a quantised model by tensor and channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
import xckpt.accessor
from tests.hostile_names import HOSTILE
from tests.plots.pictures import end_labels, notes
from xckpt.plots import Plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYERS = 5


@pytest.fixture
def base() -> xr.Dataset:
    rng = np.random.default_rng(0)
    layers = {
        f"layers.{n}.q.weight": (("out", "in"), rng.normal(size=(6, 32))) for n in range(LAYERS)
    }
    return xr.Dataset(layers | {"norm": ("in", np.ones(32)), "gone": ("in", np.ones(32))})


@pytest.fixture
def rounded(base: xr.Dataset) -> xr.Dataset:
    """Round channel 2 of layer 3 much more than all others, channel 5 of layer 0 not at all."""
    rounded = base.round(3).drop_vars("gone")
    rounded["layers.3.q.weight"][2] = base["layers.3.q.weight"][2].round(0)
    rounded["layers.0.q.weight"][5] = base["layers.0.q.weight"][5]
    return rounded


def drawn(ax: Axes) -> Any:
    (image,) = ax.get_images()
    return np.asarray(image.get_array())


def labels(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_yticklabels()]


def test_layers_against_channels(base: xr.Dataset, rounded: xr.Dataset) -> None:
    ax = Plots(base).error(rounded)
    values = drawn(ax)
    assert values.shape == (LAYERS, 6)
    assert np.unravel_index(values.argmin(), values.shape) == (3, 2)
    expected = xckpt.compare(base, rounded, dim="in")["layers.1.q.weight"].sel(statistic="sqnr_db")
    np.testing.assert_allclose(values[1], expected)
    assert labels(ax) == ["0", "1", "2", "3", "4"]
    assert ax.get_title() == "layers.*.q.weight"
    assert "1 channel equal" in notes(ax)
    assert "without 2 tensors" in notes(ax)


def test_a_comparison_draws_itself(base: xr.Dataset, rounded: xr.Dataset) -> None:
    comparison = xckpt.compare(base, rounded, dim=-1)
    for ax in (comparison.ckpt.plot.error(), Plots(base).error(comparison)):
        assert drawn(ax).shape == (LAYERS, 6)
    axes = comparison.ckpt.plot.error(statistic="max_abs", tensors="layers.3.*")
    assert drawn(axes).argmax() == 2
    stacked = xckpt.compare(base.ckpt.stack(), rounded, dim=-1).ckpt.plot.error(tensors="layers.*")
    np.testing.assert_array_equal(
        drawn(stacked), drawn(comparison.ckpt.plot.error(tensors="layers.*"))
    )


def test_the_worst_of_many_channels_is_visible() -> None:
    x = np.ones((700, 1200), np.float32)
    y = x * np.float32(1.01)
    y[123] = x[123]
    y[123, 456] = 2
    tensors = [{f"m.{n}.w": ("c", row) for n, row in enumerate(rows)} for rows in (x, y)]
    ax = Plots(xr.Dataset(tensors[0])).error(xr.Dataset(tensors[1]), "max_abs", dim={"c": 1})
    values = drawn(ax)
    assert values.shape == (256, 512)
    assert values.max() == 1
    assert "700 tensors, the worst of neighbours" in notes(ax)
    assert ax.get_title() == "max_abs of channels"
    ax.figure.canvas.draw()


def test_layers_are_in_order() -> None:
    x = np.random.default_rng(0).normal(size=(32, 6, 8))
    tensors = {f"m.layers.{n}.q.weight": (("out", "in"), x[n]) for n in range(32)}
    ds = xr.Dataset(dict(sorted(tensors.items())))
    ax = Plots(ds).error(ds.round(2))
    assert labels(ax) == [str(n) for n in range(32)]
    assert ax.get_ylabel() == "layers"


def test_a_whole_model_has_names_and_no_empty_columns() -> None:
    rng = np.random.default_rng(0)
    tensors = {}
    for n in range(20):
        for word, channels in (("q", 64), ("up", 96), ("down", 64)):
            tensors[f"layers.{n}.{word}.weight"] = rng.normal(size=(channels, 8))
    tensors["embed.weight"] = rng.normal(size=(400, 8))
    ds = xr.Dataset({n: ((f"{n}0", f"{n}1"), values) for n, values in sorted(tensors.items())})
    ax = Plots(ds).error(ds.round(2))
    values = drawn(ax)
    assert values.shape == (61, 400)
    assert np.isfinite(values).all()
    assert set(end_labels(ax)) == {
        "embed.weight",
        *(f"layers.{{0..19}}.{word}.weight  ×20" for word in ("q", "up", "down")),
    }
    assert ax.get_xlabel() == "channels of each tensor, 64 to 400"
    assert ax.get_title() == "61 tensors"


def test_channels_of_zeros(base: xr.Dataset) -> None:
    zero = base[["layers.0.q.weight"]].copy(deep=True)
    zero["layers.0.q.weight"][1] = 0
    ax = Plots(zero).error(base)
    (image,) = ax.get_images()
    assert drawn(ax)[0, 1] < image.norm.vmin
    assert ax.get_title() == "layers.0.q.weight"


def test_names_are_drawn_as_plain_text() -> None:
    ds = xr.Dataset({name: (("a", "b"), np.ones((2, 3))) for name in HOSTILE})
    ax = Plots(ds).error(ds * 2, "nmse")
    ax.figure.canvas.draw()


def test_comparisons_that_cannot_be_drawn_are_errors(base: xr.Dataset, rounded: xr.Dataset) -> None:
    with pytest.raises(TypeError, match="takes a checkpoint to compare with"):
        Plots(base).error()
    with pytest.raises(ValueError, match="compare with dim=-1 for channels"):
        Plots(base).error(xckpt.compare(base, rounded))
    with pytest.raises(ValueError, match="tensors='layer' matches none of the"):
        Plots(base).error(xckpt.compare(base, rounded, dim=-1), tensors="layer")
    with pytest.raises(ValueError, match="similar names: 'sqnr_db'"):
        Plots(base).error(rounded, "sqnr")
    with pytest.raises(ValueError, match="is in both with the same shape"):
        Plots(base).error(rounded.drop_vars("norm")[["layers.0.q.weight"]], tensors="gone")
    with pytest.raises(TypeError, match="one matplotlib"):
        Plots(base).error(rounded, ax=3)  # type: ignore[arg-type]
