"""``ds.ckpt.plot.by``: a heat map of groups."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xckpt
from tests.plots.pictures import notes

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

MODULES = ("attn.q", "attn.k", "mlp.up", "mlp.down")


def layered(layers: int = 12) -> dict[str, Any]:
    """Return tensors whose standard deviation grows with the layer."""
    return {
        f"model.layers.{layer}.{module}.weight": np.array([-1.0, 1.0]) * (1 + layer / layers)
        for layer in range(layers)
        for module in MODULES
    }


def ticks(ax: Axes, axis: str) -> list[str]:
    return [text.get_text() for text in getattr(ax, f"get_{axis}ticklabels")()]


def image(ax: Axes, number: int = 0) -> Any:
    return ax.images[number]


def test_layers_are_sorted_and_modules_short() -> None:
    ax = xckpt.stats(layered()).ckpt.plot.by("std")
    assert ticks(ax, "y") == [str(layer) for layer in range(12)]
    assert ticks(ax, "x") == list(MODULES)
    assert image(ax, 0).get_array()[:, 2].tolist() == [1 + layer / 12 for layer in range(12)]
    assert ax.get_title(loc="center").startswith("std of 48 tensors by layer and module")
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("layer", "module")


def test_many_layers_have_labels_at_equal_intervals() -> None:
    ax = xckpt.stats(layered(126)).ckpt.plot.by("std")
    numbers = [int(text) for text in ticks(ax, "y")]
    assert len(set(np.diff(numbers))) == 1
    assert 12 <= len(numbers) <= 80
    figure: Any = ax.get_figure(root=True)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.get_yticklabels()]
    heights = sorted(boxes, key=lambda box: box.y0)
    assert all(a.y1 <= b.y0 + 1 for a, b in pairwise(heights))


def test_one_extreme_value_does_not_spoil_the_colours() -> None:
    tensors = layered()
    tensors["model.layers.5.mlp.up.weight"] *= 1e6
    ax = xckpt.stats(tensors).ckpt.plot.by("std")
    norm = image(ax, 0).norm
    assert (norm.vmin, norm.vmax) == (1.0, 1 + 11 / 12)
    assert "at layer 5, module mlp.up" in notes(ax)
    marks: Any = ax.collections[-1]
    assert marks.get_offsets().tolist() == [[2, 5]]
    assert image(ax, 0).colorbar.extend == "max"


def test_values_of_both_signs_have_zero_in_the_middle() -> None:
    tensors = {f"h.{n}.w": np.array([n - 4.0, n - 4.0]) for n in range(7)}
    norm = image(xckpt.stats(tensors).ckpt.plot.by("mean", "layer")).norm
    assert (norm.vmin, norm.vmax) == (-4, 4)


def test_wide_ranges_are_logarithmic() -> None:
    tensors = {f"h.{n}.w": np.array([-1.0, 1.0]) * 10**n for n in range(7)}
    norm = image(xckpt.stats(tensors).ckpt.plot.by("std", "layer")).norm
    assert type(norm).__name__ == "LogNorm"


def test_equal_and_absent_groups() -> None:
    first = layered()
    del first["model.layers.3.attn.q.weight"]
    second = {n: v * (1 if "mlp" in n else 1.5) for n, v in first.items()}
    ax = xckpt.compare(first, second).ckpt.plot.by("sqnr_db")
    assert "grey: infinite" in notes(ax)
    colours = image(ax, 1).get_array()
    assert colours[:, 2:, 3].all()
    assert not colours[:, :2, 3].any()
    assert image(ax, 0).get_array().mask[3, 0]


def test_groups_of_all_results(flat: xr.Dataset) -> None:
    grouped = flat.ckpt.stats().ckpt.by("layer", "role")
    first = image(grouped.ckpt.plot.by("std")).get_array()
    np.testing.assert_array_equal(
        first, image(flat.ckpt.plot.by("std", "layer", "role")).get_array()
    )
    flat.ckpt.plot.by("frobenius", "layer", "experts")
    flat.ckpt.spectrum().ckpt.plot.by("stable_rank")
    flat.ckpt.findings().ckpt.by("layer", "module").ckpt.plot.by("warning")


@pytest.mark.parametrize(
    ("statistic", "keys", "error"),
    [
        ("stdd", (), "no statistic 'stdd'"),
        ("std", ("layer", "role", "module"), "rows and columns"),
        ("unique", ("layer",), "groups have no 'unique'; unique: distinct"),
    ],
)
def test_wrong_arguments(statistic: str, keys: tuple[str, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        xckpt.stats(layered()).ckpt.plot.by(statistic, *keys)
