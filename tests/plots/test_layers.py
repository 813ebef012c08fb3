"""Lines along numbered modules, of flat and of stacked objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
from matplotlib import pyplot as plt
from matplotlib.collections import PolyCollection

import xckpt
import xckpt.statistics
from tests.plots.pictures import end_labels, notes, point_labels
from tests.stats.architectures import resnet, t5, unet, whisper
from tests.stats.models import llama
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
    (band,) = [
        collection for collection in ax.collections if isinstance(collection, PolyCollection)
    ]
    assert band.get_paths()[0].get_extents().ymax == pytest.approx(experts.max(), rel=1e-5)
    assert end_labels(ax) == ["attn.w", "experts.{0..2}.up"]
    assert ax.get_legend() is None
    lowest, highest = point_labels(ax)
    layer, expert = np.unravel_index(experts.argmax(), experts.shape)
    assert highest == f"layer {layer}, expert {expert}: {experts.max():.3g}"
    layer, expert = np.unravel_index(experts.argmin(), experts.shape)
    assert lowest == f"layer {layer}, expert {expert}: {experts.min():.3g}"
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
    (bar,) = [axes for axes in ax.figure.axes if axes is not ax]
    assert bar.get_ylabel() == "experts"


def test_colours_by_a_function_of_the_name(flat: xr.Dataset) -> None:
    ax = Plots(flat).layers("std", hue=lambda name: name.rpartition(".")[2])
    assert end_labels(ax) == ["w", "up"]
    assert all(text.startswith("layer ") for text in point_labels(ax))


def test_along_another_module(flat: xr.Dataset) -> None:
    ax = Plots(flat).layers("std", x="experts")
    (line,) = ax.get_lines()
    assert np.asarray(line.get_xdata()).tolist() == [0, 1, 2]
    assert ax.get_xlabel() == "experts"


def test_given_axes_and_style_are_used(flat: xr.Dataset) -> None:
    from matplotlib import pyplot as plt

    _, (empty, axes) = plt.subplots(1, 2)
    assert Plots(flat).layers("mean", "*.attn.w", ax=axes, linewidth=5, color="red") is axes
    assert not empty.get_lines()
    (line,) = axes.get_lines()
    assert (line.get_linewidth(), line.get_color()) == (5, "red")


def test_given_statistics_are_not_computed_again(
    flat: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = xckpt.stats(flat, quantiles=(0.1,))

    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("xckpt.statistics.computing.gather", fail)
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


def test_statistics_that_cannot_be_drawn_are_errors(flat: xr.Dataset) -> None:
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
        assert ax.get_title() == "layers.{0..2}.experts.{0..39}.*"
        assert end_labels(ax) == ["down", "up"]
        assert any(text.startswith("layer 2, expert 17: ") for text in point_labels(ax))
        assert "layer 1, expert 5: 0" in point_labels(ax)
        assert notes(ax) == "lines: medians; bands: 5 to 95 %, and all"
        # Both bands of both roles.
        assert (
            len(
                [
                    collection
                    for collection in ax.collections
                    if isinstance(collection, PolyCollection)
                ]
            )
            == 4
        )


def test_one_outlier_is_not_in_the_inner_band() -> None:
    values = np.random.default_rng(0).normal(size=50)
    tensors = {f"l.{n}.e.{e}.w": ("x", values) for n in range(3) for e in range(8)}
    tensors["l.1.e.5.w"] = ("x", values * 1000)
    ax = Plots(xr.Dataset(tensors)).layers("std")
    outer, inner = (
        collection.get_paths()[0].get_extents().ymax
        for collection in ax.collections
        if isinstance(collection, PolyCollection)
    )
    assert outer == pytest.approx(1000 * inner)


@pytest.mark.parametrize("statistic", ["std", "min", "absmax"])
def test_one_exploded_expert_does_not_flatten_the_others(statistic: str) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        f"layers.{n}.experts.{e}.w": ("x", rng.normal(size=50) * (1 + n / 8))
        for n in range(8)
        for e in range(16)
    }
    tensors["layers.5.experts.3.w"] = ("x", rng.normal(size=50) * 1e5)
    ax = Plots(xr.Dataset(tensors)).layers(statistic)
    ax.figure.canvas.draw()
    low, high = ax.get_ylim()
    middle = lines(ax)[0]
    assert np.ptp(middle) > (high - low) / 10
    assert any(text.startswith("layer 5, expert 3: ") for text in point_labels(ax))
    assert ax.get_yscale() == "linear"


def test_a_single_layer_far_from_its_line_is_marked_at_the_edge() -> None:
    rng = np.random.default_rng(0)
    tensors = {f"l.{n}.{word}": ("x", rng.normal(size=90)) for n in range(12) for word in "ab"}
    tensors["l.7.a"] = ("x", rng.normal(size=90) + 1e3)
    ax = Plots(xr.Dataset(tensors)).layers("mean")
    assert ax.get_ylim()[1] < 10
    (label,) = point_labels(ax)
    assert label.startswith("l 7: 1e+03")
    assert len(end_labels(ax)) == 2


def of_architecture(tensors: dict[str, np.ndarray[Any, Any]]) -> xr.Dataset:
    variables = {}
    for name, values in tensors.items():
        variables[name] = ([f"{name}:{axis}" for axis in range(values.ndim)], values)
    return xr.Dataset(variables)


def panels(ax: Axes) -> dict[str, list[str]]:
    """Give the labels of the lines of each panel, by its title."""
    axes = ax.get_figure(root=True).axes  # type: ignore[union-attr]
    return {panel.get_title(): sorted(end_labels(panel)) for panel in axes}


class TestPanels:
    """Tensors of one kind and module share a scale; others have separate scales."""

    def test_layers_of_a_whole_model(self) -> None:
        ax = Plots(of_architecture(llama(6, 16, np.float32))).layers("std")
        base = "model.layers.{0..5}"
        assert panels(ax) == {
            f"{base}.mlp.*": ["down_proj.weight", "gate_proj.weight", "up_proj.weight"],
            f"{base}.self_attn.*": [f"{word}_proj.weight" for word in "koqv"],
            f"{base}.*": ["input_layernorm.weight", "post_attention_layernorm.weight"],
        }

    def test_layer_numbers_are_shared_and_labelled_once(self) -> None:
        ax = Plots(of_architecture(llama(6, 16, np.float32))).layers("std")
        every = ax.get_figure(root=True).axes  # type: ignore[union-attr]
        assert len({axes.get_xlim() for axes in every}) == 1
        assert [axes.get_xlabel() for axes in every] == ["", "", "layers"]

    def test_at_most_six_panels_hold_every_role(self) -> None:
        for model in (unet, t5, whisper):
            ds = of_architecture(model())
            with plt.rc_context({"figure.max_open_warning": 0}):
                ax = Plots(ds).layers("absmax")
            every = ax.get_figure(root=True).axes  # type: ignore[union-attr]
            assert len(every) <= 6
            assert all(len(axes.get_lines()) <= 8 for axes in every)

    def test_given_axes_are_one_panel(self) -> None:
        _, axes = plt.subplots()
        ds = of_architecture(llama(6, 16, np.float32))
        assert Plots(ds).layers("std", ax=axes) is axes
        assert len(axes.get_figure(root=True).axes) == 1  # type: ignore[union-attr]
        assert end_labels(axes)

    def test_buffers_and_optimizer_state_are_drawn_only_by_name(self) -> None:
        tensors = resnet((3, 3), 4)
        for number in range(9):
            tensors[f"optimizer.state.{number}.exp_avg"] = np.ones((3, 3), np.float32)
        plots = Plots(of_architecture(tensors))
        ax = plots.layers("std")
        assert notes(ax) == "without tensors of other roles: 42 buffers, 9 optimizer state"
        assert all("running" not in label for labels in panels(ax).values() for label in labels)
        ax = plots.layers("mean", "*.running_*")
        assert panels(ax) == {
            f"*.{norm}.*": ["running_mean", "running_var"]
            for norm in ("bn1", "bn2", "downsample.1")
        }

    def test_a_point_out_of_line_has_a_label(self) -> None:
        tensors = llama(24, 16, np.float32)
        tensors["model.layers.9.self_attn.q_proj.weight"] *= 3
        ax = Plots(of_architecture(tensors)).layers("std", "*.self_attn.*")
        (label,) = point_labels(ax)
        assert label.startswith("layer 9: 0.0")


class TestStages:
    """Modules that repeat the same tensors under several names follow each other."""

    @staticmethod
    def ticks(ax: Axes) -> list[str]:
        lowest = ax.get_figure(root=True).axes[-1]  # type: ignore[union-attr]
        return [text.get_text() for text in lowest.get_xticklabels()]

    def test_layers_of_a_resnet(self) -> None:
        ax = Plots(of_architecture(resnet())).layers("std", "*.conv?.weight")
        assert self.ticks(ax) == [
            f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)
        ]
        assert [len(line) for line in lines(ax)] == [8, 8]
        assert end_labels(ax) == ["conv1.weight", "conv2.weight"] or end_labels(ax) == [
            "conv2.weight",
            "conv1.weight",
        ]
        assert ax.get_title() == "layer1.0 … layer4.1.*"

    def test_layers_of_a_unet(self) -> None:
        ds = of_architecture(unet())
        ax = Plots(ds).layers("std", "*resnets*.conv1.weight")
        assert self.ticks(ax) == [
            *(f"down_blocks.{n}" for n in range(3)),
            "mid_block",
            *(f"up_blocks.{n}" for n in range(3)),
        ]
        (line,) = lines(ax)
        middle = [float(ds[f"mid_block.resnets.{n}.conv1.weight"].std()) for n in (0, 1)]
        assert line[3] == pytest.approx(np.median(middle), rel=1e-5)

    def test_encoder_and_decoder_have_the_same_numbers(self) -> None:
        ax = Plots(of_architecture(whisper())).layers("std", "*.fc1.weight")
        assert sorted(end_labels(ax)) == [
            "decoder.layers.{0..2}.fc1.weight",
            "encoder.layers.{0..2}.fc1.weight",
        ]
        assert ax.get_xlabel() == "layers"

    def test_an_outlier_is_named_by_its_stage(self) -> None:
        tensors = resnet((4, 4, 4, 4), 4)
        tensors["layer3.2.conv2.weight"] *= 20
        ax = Plots(of_architecture(tensors)).layers("std", "*.conv?.weight")
        assert [label.partition(":")[0] for label in point_labels(ax)] == ["layer3.2"]

    def test_a_stage_can_be_chosen(self) -> None:
        ax = Plots(of_architecture(resnet())).layers("std", "*.conv?.weight", x="layer2")
        assert ax.get_xlabel() == "layer2"


def test_more_than_eight_series_of_a_panel_are_merged() -> None:
    values = np.random.default_rng(0).normal(size=9)
    words = ("q", "k", "v", "o", "gate", "up", "down")
    tensors = {
        f"l.{n}.{word}.{leaf}": ("x", values * (n + 1))
        for word in words
        for leaf in ("weight", "bias")
        for n in range(3)
    }
    tensors["l.1.k.bias"] = ("x", values * 100)
    ax = Plots(xr.Dataset(tensors)).layers("std", ax=plt.subplots()[1])
    assert len(lines(ax)) == 2
    assert any(text.startswith("l 1, k: ") for text in point_labels(ax))
    ax = Plots(xr.Dataset(tensors)).layers("std", hue=lambda name: name[-4:])
    assert len(lines(ax)) == 2
    assert sorted(end_labels(ax)) == ["bias", "ight"]


def test_statistics_of_the_session_are_used(
    flat: xr.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = flat.load()
    loaded.ckpt.stats()
    with monkeypatch.context() as patch:
        patch.setattr("xckpt.statistics.computing.gather", None)
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
    assert ax.get_title() == "l.{0..2}.b.weight"
    assert notes(ax).split(" · ") == [
        "without tensors of other roles: 3 quantisation",
        "without 3 tensors of codes; their scales are in weight_scale",
    ]
    ax = plots.layers("std", "*.a.weight")
    assert ax.get_ylabel() == "std of codes"
    assert notes(ax) == "codes, whose scales are in weight_scale"


def test_experts_without_the_statistic_leave_a_gap() -> None:
    values = np.random.default_rng(0).normal(size=9)
    names = [f"l.{n}.e.{e}.w" for n in range(3) for e in range(2)]
    ds = xr.Dataset({name: ("x", values * (name[2] != "1")) for name in names})
    (line,) = lines(Plots(ds).layers("skew"))
    assert np.isnan(line).tolist() == [False, True, False]


def test_only_repeated_modules_are_an_axis() -> None:
    names = [f"alphas.{n}" for n in range(4)] + [f"block.norm_{n}.weight" for n in (1, 2)]
    ds = xr.Dataset({name: ("x", np.ones(4)) for name in names})
    with pytest.raises(ValueError, match="none of 6 tensors is numbered"):
        Plots(ds).layers("std")
    ax = Plots(ds).layers("std", x="alphas")
    assert ax.get_xlabel() == "alphas"


def test_labels_of_lines_are_different(flat: xr.Dataset) -> None:
    ax = Plots(flat).layers("std", hue=lambda name: name.split(".")[0])
    labels = end_labels(ax)
    assert len(set(labels)) == len(labels) > 0
    long = {f"layers.{n}.{'x' * 60}{word}": np.eye(3) * n for n in range(3) for word in "abc"}
    labels = end_labels(Plots(xckpt.open(long)).layers("std"))
    assert len(set(labels)) == len(labels) == 3
