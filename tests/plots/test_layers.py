"""Lines along numbered modules: what they show, of flat and of stacked objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import PolyCollection

import xckpt.statistics
from tests.plots.pictures import legend_texts, notes
from xckpt.plots import Plots

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes


def lines(ax: Axes) -> list[Any]:
    return [np.asarray(line.get_ydata()) for line in ax.get_lines()]


@pytest.mark.parametrize("kind", ["flat", "stacked"])
def test_a_line_for_each_role(kind: str, flat: xr.Dataset, request: Any) -> None:
    ax = Plots(request.getfixturevalue(kind)).layers("std")
    attn, up = lines(ax)
    expected = [float(flat[f"m.layers.{layer}.attn.w"].std()) for layer in range(6)]
    assert attn == pytest.approx(expected, rel=1e-5)
    experts = np.array(
        [[float(flat[f"m.layers.{n}.experts.{e}.up"].std()) for e in range(3)] for n in range(6)]
    )
    assert up == pytest.approx(np.median(experts, axis=1), rel=1e-5)
    (band,) = [each for each in ax.collections if isinstance(each, PolyCollection)]
    assert band.get_paths()[0].get_extents().ymax == pytest.approx(experts.max(), rel=1e-5)
    key = legend_texts(ax)
    assert key[:2] == ["attn.w", "experts.{0..2}.up"]
    layer, expert = np.unravel_index(experts.argmax(), experts.shape)
    assert key[2] == f"layer {layer}, expert {expert}: {experts.max():.3g}"
    layer, expert = np.unravel_index(experts.argmin(), experts.shape)
    assert key[3] == f"layer {layer}, expert {expert}: {experts.min():.3g}"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layers", "std")
    assert ax.get_title() == "m.layers.{0..5}.*"


def test_a_tree_and_a_selection_are_drawn_too(model: Path, stacked: xr.Dataset) -> None:
    tree = xr.open_datatree(model, engine="ztensor")
    assert len(lines(Plots(tree).layers("std"))) == 2
    ax = Plots(stacked.isel(layers=[1, 4])).layers("std", "*.attn.w")
    (line,) = ax.get_lines()
    assert np.asarray(line.get_xdata()).tolist() == [1, 4]
    assert ax.get_title() == "m.layers.{1,4}.attn.w"


def test_a_line_for_each_number_of_another_module(flat: xr.Dataset) -> None:
    ax = Plots(flat).layers("std", "*.up", hue="experts")
    assert len(lines(ax)) == 3
    for expert, line in enumerate(lines(ax)):
        first = float(flat[f"m.layers.0.experts.{expert}.up"].std())
        assert line[0] == pytest.approx(first, rel=1e-5)
    assert len({line.get_color() for line in ax.get_lines()}) == 3
    (bar,) = [each for each in ax.figure.axes if each is not ax]
    assert bar.get_ylabel() == "experts"


def test_colours_by_a_function_of_the_name(flat: xr.Dataset) -> None:
    ax = Plots(flat).layers("std", hue=lambda name: name.rpartition(".")[2])
    assert legend_texts(ax)[:2] == ["w", "up"]
    assert all(text.startswith("layer ") for text in legend_texts(ax)[2:])


def test_along_another_module(flat: xr.Dataset) -> None:
    ax = Plots(flat).layers("std", x="experts")
    (line,) = ax.get_lines()
    assert np.asarray(line.get_xdata()).tolist() == [0, 1, 2]
    assert ax.get_xlabel() == "experts"


def test_it_draws_into_given_axes_with_given_style(flat: xr.Dataset) -> None:
    from matplotlib import pyplot as plt

    _, (left, right) = plt.subplots(1, 2)
    assert Plots(flat).layers("mean", "*.attn.w", ax=right, linewidth=5, color="red") is right
    assert not left.get_lines()
    (line,) = right.get_lines()
    assert (line.get_linewidth(), line.get_color()) == (5, "red")


def test_given_statistics_are_not_computed_again(
    flat: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = xckpt.stats(flat, quantiles=(0.1,))

    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("xckpt.statistics.api.gather", fail)
    ax = Plots(flat).layers("q0.1", "*.attn.w", stats=result)
    expected = [result[f"m.layers.{n}.attn.w"].sel(statistic="q0.1").item() for n in range(6)]
    assert lines(ax)[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("factors", "scale"), [((1, 2), "linear"), ((1, 1e4), "log"), ((0, 1, 1e4), "symlog")]
)
def test_the_scale_follows_the_values(factors: tuple[float, ...], scale: str) -> None:
    values = np.random.default_rng(0).normal(size=50)
    ds = xr.Dataset({f"l.{n}.w": ("x", values * factor) for n, factor in enumerate(factors)})
    ax = Plots(ds).layers("std")
    assert ax.get_yscale() == scale
    low, high = ax.get_ylim()
    for line in lines(ax):
        assert low <= line.min() <= line.max() <= high


def test_what_cannot_be_drawn_is_said(flat: xr.Dataset) -> None:
    with pytest.raises(ValueError, match="no statistic 'sdt', only count, nan"):
        Plots(flat).layers("sdt")
    with pytest.raises(ValueError, match="none of 1 tensors is numbered"):
        Plots(flat).layers("std", "embed")
    with pytest.raises(ValueError, match="none of 25 tensors is numbered along 'blocks'"):
        Plots(flat).layers("std", x="blocks")
    with pytest.raises(ValueError, match="numbered along 'layers' and 'heads'"):
        Plots(flat).layers("std", hue="heads")


def test_no_figure_is_left_behind(flat: xr.Dataset) -> None:
    from matplotlib import pyplot as plt

    with pytest.raises(ValueError, match="no statistic"):
        Plots(flat).layers("sdt")
    assert not plt.get_fignums()


def test_more_than_twelve_lines_are_bands_with_their_extremes_named() -> None:
    values = np.random.default_rng(0).normal(size=50)
    tensors = {
        f"layers.{layer}.experts.{expert}.{role}": ("x", values * (1 + expert / 100))
        for layer in range(3)
        for expert in range(40)
        for role in ("up", "down")
    }
    tensors["layers.2.experts.17.up"] = ("x", values * 9)
    tensors["layers.1.experts.5.down"] = ("x", values * 0)
    ds = xr.Dataset(tensors)
    for ax in (Plots(ds).layers("std", hue="experts"), Plots(ds).layers("std")):
        assert len(lines(ax)) == 2
        assert len({line.get_color() for line in ax.get_lines()}) == 2
        key = legend_texts(ax)
        assert (ax.get_title(), key[0]) == ("layers.{0..2}.experts.{0..39}.*", "up")
        assert key[1].startswith("layer 2, expert 17: ")
        assert key[5] == "layer 1, expert 5: 0"
        assert notes(ax) == "lines: medians; bands: 5 to 95 %, and all"
        # Both bands of both roles.
        assert len([each for each in ax.collections if isinstance(each, PolyCollection)]) == 4


def test_one_outlier_is_not_in_the_inner_band() -> None:
    values = np.random.default_rng(0).normal(size=50)
    tensors = {f"l.{n}.e.{e}.w": ("x", values) for n in range(3) for e in range(8)}
    tensors["l.1.e.5.w"] = ("x", values * 1000)
    ax = Plots(xr.Dataset(tensors)).layers("std")
    outer, inner = (
        each.get_paths()[0].get_extents().ymax
        for each in ax.collections
        if isinstance(each, PolyCollection)
    )
    assert outer == pytest.approx(1000 * inner)


def test_more_than_twelve_roles_are_united() -> None:
    values = np.random.default_rng(0).normal(size=9)
    words = ("q", "k", "v", "o", "gate", "up", "down")
    tensors = {
        f"l.{n}.{word}.{leaf}": ("x", values * (n + 1))
        for word in words
        for leaf in ("weight", "bias")
        for n in range(3)
    }
    tensors["l.1.k.bias"] = ("x", values * 100)
    ax = Plots(xr.Dataset(tensors)).layers("std")
    assert len(lines(ax)) == 2
    assert any(text.startswith("l 1, k: ") for text in legend_texts(ax))
    ax = Plots(xr.Dataset(tensors)).layers("std", hue=lambda name: name[-4:])
    assert len(lines(ax)) == 2
    assert legend_texts(ax)[0] == "ight"


def test_statistics_of_the_session_are_used(
    flat: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = flat.load()
    loaded.ckpt.stats()
    with monkeypatch.context() as patch:
        patch.setattr("xckpt.statistics.api.gather", None)
        assert len(lines(loaded.ckpt.plot.layers("std", "*.attn.w"))) == 1
    before = lines(loaded.ckpt.plot.layers("std", "*.attn.w"))[0]
    loaded["m.layers.0.attn.w"] = loaded["m.layers.0.attn.w"] * 3
    after = lines(loaded.ckpt.plot.layers("std", "*.attn.w"))[0]
    assert after[0] == pytest.approx(3 * before[0], rel=1e-5)


def test_codes_do_not_share_an_axis_with_weights() -> None:
    values = np.random.default_rng(0).normal(size=9)
    tensors: dict[str, Any] = {}
    for n in range(3):
        tensors[f"l.{n}.a.weight"] = ("x", (values * 30).astype(np.int8))
        tensors[f"l.{n}.a.weight_scale"] = ("y", np.array([n + 1.0, 2.0]))
        tensors[f"l.{n}.b.weight"] = ("x", values)
    plots = Plots(xr.Dataset(tensors))
    ax = plots.layers("std")
    assert legend_texts(ax) == ["a.weight_scale", "b.weight"]
    assert notes(ax) == "without 3 tensors of codes; their scales are in weight_scale"
    ax = plots.layers("std", "*.a.weight")
    assert ax.get_ylabel() == "std of codes"
    assert notes(ax) == "codes, whose scales are in weight_scale"


def test_experts_without_the_statistic_leave_a_gap() -> None:
    values = np.random.default_rng(0).normal(size=9)
    names = [f"l.{n}.e.{e}.w" for n in range(3) for e in range(2)]
    ds = xr.Dataset({name: ("x", values * (name[2] != "1")) for name in names})
    (line,) = lines(Plots(ds).layers("skew"))
    assert np.isnan(line).tolist() == [False, True, False]
