"""Findings in the steps of a training run, and the picture of their changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from tests.stats.checkpoints import write
from xckpt.health import changes_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, np.ndarray[Any, np.dtype[Any]]]
STEPS = range(100, 1000, 100)


def run(folder: Path, **odd: Any) -> str:
    """Write checkpoints that change by random numbers; `odd` lists their faults."""
    rng = np.random.default_rng(0)
    tensors: Tensors = {
        f"m.layers.{n}.w": rng.standard_normal((32, 32)).astype(np.float32) for n in range(3)
    }
    tensors |= {
        "m.head": rng.standard_normal((8, 8)).astype(np.float32),
        "m.frozen": rng.random((9, 9)),
    }
    for step in STEPS:
        for name in tensors:
            is_still = name == "m.frozen" or (name == "m.head" and step > odd.get("stop", 10**6))
            if not is_still and step != odd.get("same"):
                size = 0.01 * (20 if step == odd.get("jump") else 1)
                change = rng.standard_normal(tensors[name].shape, np.float32)
                tensors[name] = tensors[name] + np.float32(size) * change
        write(folder / f"step-{step}.safetensors", tensors)
    if "swapped" in odd:
        first, second = (folder / f"step-{step}.safetensors" for step in odd["swapped"])
        second.write_bytes(first.read_bytes())
    return str(folder / "step-*.safetensors")


def rules(glob: str, **options: Any) -> list[tuple[Any, ...]]:
    frame = xckpt.open_steps(glob, **options).ckpt.findings(progress=False)
    return list(frame.drop(columns="severity").itertuples(index=False, name=None))


def test_a_good_run_has_no_findings(tmp_path: Path) -> None:
    glob = run(tmp_path)
    assert rules(glob) == []
    assert rules(str(tmp_path / "step-[12]00.safetensors")) == []
    ds = xckpt.open_steps(glob)
    assert ds.isel(step=[3]).ckpt.findings().empty
    assert ds.isel(step=3).ckpt.findings().empty


@pytest.mark.parametrize("stack", [False, True])
def test_steps_that_are_equal(stack: bool, tmp_path: Path) -> None:
    ((name, rule, value, text),) = rules(run(tmp_path, same=500), stack=stack)
    assert (name, rule, value) == ("step.500", "identical_step", 400)
    assert text == "all 5 tensors are equal to those of step 400"


def test_a_step_that_repeats_much_earlier_weights(tmp_path: Path) -> None:
    findings = rules(run(tmp_path, swapped=(200, 700)))
    assert ("step.700", "identical_step", 200.0) in [row[:3] for row in findings]


def test_a_step_out_of_line(tmp_path: Path) -> None:
    ((name, rule, value, text),) = rules(run(tmp_path, jump=600))
    assert (name, rule, round(value)) == ("step.600", "unlike_step", 20)
    assert text.startswith("from step 500 to 600 tensors change 20.2 times as much as around it")


@pytest.mark.parametrize("kind", ["weights", "training"])
def test_a_jump_among_five_changes(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {f"m.layers.{n}.w": rng.standard_normal((32, 32)) for n in range(3)}
    for step, size in zip(range(100, 700, 100), (0, 6.5, 4.1, 160, 8.6, 6.5), strict=True):
        tensors: Tensors = {}
        for number, name in enumerate(weights):
            change = rng.standard_normal((32, 32))
            weights[name] = weights[name] + size * change / np.linalg.norm(change)
            tensors[name] = weights[name].astype(np.float32)
            if kind == "training":  # which is much larger than the weights, and changes steadily
                tensors[f"optimizer.state.{number}.step"] = np.array(step, np.float32)
                tensors[f"optimizer.state.{number}.exp_avg"] = change.astype(np.float32) * 1e4
        write(tmp_path / f"step-{step}.safetensors", tensors)
    ((name, rule, value, text),) = rules(str(tmp_path / "step-*.safetensors"))
    assert (name.split(".")[:2], rule) == (["step", "400"], "unlike_step")
    assert 18 < value < 30
    assert text.startswith("from step 300 to 400 tensors change 2")


def test_counters_and_moments_are_not_summed_with_weights(tmp_path: Path) -> None:
    run(tmp_path, jump=600)
    rng = np.random.default_rng(1)
    for step in STEPS:
        path = tmp_path / f"step-{step}.safetensors"
        tensors = {name: v.to_numpy() for name, v in xr.open_dataset(path).variables.items()}
        tensors["optimizer.state.0.step"] = np.array(step, np.float32)
        tensors["optimizer.state.0.exp_avg"] = rng.standard_normal((32, 32)).astype(np.float32)
        write(path, {str(name): values for name, values in tensors.items()})
    ((name, rule, value, _),) = rules(str(tmp_path / "step-*.safetensors"))
    assert (name, rule, round(value)) == ("step.600", "unlike_step", 20)


@pytest.mark.parametrize("final", [0.3, 0.01])
def test_a_learning_rate_that_falls_is_not_out_of_line(final: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((32, 32))
    for step, size in enumerate([0, 0.1, 1, *np.geomspace(1, final, 6)]):
        weight = weight + size * rng.standard_normal((32, 32))
        write(tmp_path / f"step-{step}.safetensors", {"w": weight.astype(np.float32)})
    assert rules(str(tmp_path / "step-*.safetensors")) == []


def test_a_run_of_one_tensor_has_steps(tmp_path: Path) -> None:
    for step in range(3):
        write(tmp_path / f"step-{step}.safetensors", {"w": np.full(4, step, np.float32)})
    changes = changes_of(xckpt.open_steps(str(tmp_path / "step-*.safetensors")), None)
    assert (changes.names, changes.steps) == (["w"], [0, 1, 2])
    assert changes.norm.tolist() == [[2, 2]]


def test_a_tensor_that_stopped_changing(tmp_path: Path) -> None:
    ((name, rule, value, text),) = rules(run(tmp_path, stop=500))
    assert (name, rule, value) == ("step.900.m.head", "stopped", 500)
    assert text == "m.head did not change after step 500, in 4 steps in which others did"
    assert rules(str(tmp_path / "step-[1-6]00.safetensors")) == []  # one step is not enough


class TestPicture:
    @pytest.fixture(autouse=True)
    def agg(self) -> None:
        pytest.importorskip("matplotlib").use("Agg")

    def test_has_the_norm_of_each_change_of_each_layer(self, tmp_path: Path) -> None:
        from matplotlib import pyplot as plt

        ds = xckpt.open_steps(run(tmp_path, stop=500, jump=600))
        ax = ds.ckpt.plot.steps(relative=False)
        shown: Any = ax.images[0].get_array()
        labels = [text.get_text() for text in ax.get_yticklabels()]
        assert labels == ["m", "m.layers.0", "m.layers.1", "m.layers.2"]
        assert shown.shape == (4, len(STEPS) - 1)
        new, old = (ds["m.layers.1.w"].sel(step=step).to_numpy() for step in (600, 500))
        assert shown[2, 4] == pytest.approx(np.linalg.norm(new.astype(np.float64) - old), rel=1e-6)
        assert shown.mask[0].tolist() == [False] * 4 + [True] * 4
        assert [text.get_text() for text in ax.get_xticklabels()][4] == "600"
        ax = ds.ckpt.plot.steps("m.layers.1.*")
        relative = np.linalg.norm(new.astype(np.float64) - old) / np.linalg.norm(
            new.astype(np.float64)
        )
        drawn = ax.images[0].get_array()
        assert drawn is not None
        assert drawn[0, 4] == pytest.approx(relative, rel=1e-6)
        plt.close("all")

    def test_an_exploded_layer_is_named_and_beyond_the_colours(self, tmp_path: Path) -> None:
        from matplotlib import pyplot as plt

        rng = np.random.default_rng(0)
        for step in range(1, 5):
            tensors = {f"m.layers.{n}.w": rng.random((4, 4), np.float32) for n in range(20)}
            tensors["m.layers.7.w"] *= 1e6
            write(tmp_path / f"step-{step}.safetensors", tensors)
        ds = xckpt.open_steps(str(tmp_path / "step-*.safetensors"))
        ax = ds.ckpt.plot.steps(relative=False)
        assert ax.images[0].get_clim()[1] < 1e4
        notes = ax.texts[0].get_text()
        assert "x beyond the colours" in notes
        assert notes.count("at m.layers.7, step ") == 3
        plt.close("all")

    def test_each_group_of_roles_has_a_scale(self, tmp_path: Path) -> None:
        from matplotlib import pyplot as plt

        rng = np.random.default_rng(0)
        for step in range(1, 5):
            tensors = {f"m.layers.{n}.w": rng.random((4, 4), np.float32) for n in range(3)}
            for n in range(3):
                tensors[f"optimizer.state.{n}.exp_avg"] = rng.random((4, 4), np.float32) * 1e-6
                tensors[f"optimizer.state.{n}.step"] = np.array(step * 1000, np.float32)
            write(tmp_path / f"step-{step}.safetensors", tensors)
        ds = xckpt.open_steps(str(tmp_path / "step-*.safetensors"))
        ax = ds.ckpt.plot.steps(relative=False)
        panels = {axes.get_title(): axes for axes in ax.figure.axes if axes.images}
        assert list(panels) == ["parameters: 3 tensors, 4 steps", "optimizer state: 3 tensors"]
        scales = [axes.images[0].get_clim() for axes in panels.values()]
        assert scales[0][0] > 0.1
        assert scales[1][1] < 1e-5
        assert "without 3 tensors of other roles" in ax.texts[0].get_text()
        plot = ds.ckpt.plot.steps(ax=plt.subplots()[1])
        shown: Any = plot.images[0].get_array()
        assert shown.shape == (3, 3)
        plt.close("all")

    def test_colours_include_a_jump_and_have_few_readable_ticks(self, tmp_path: Path) -> None:
        from matplotlib import pyplot as plt

        rng = np.random.default_rng(0)
        tensors = {f"m.layers.{n}.w": rng.normal(size=(8, 8)).astype("f4") for n in range(20)}
        for step in range(1, 8):
            for name, values in tensors.items():
                size = 0.02 if (name, step) == ("m.layers.7.w", 5) else 0.001
                tensors[name] = (values + size * rng.normal(size=(8, 8))).astype("f4")
            write(tmp_path / f"step-{step}.safetensors", tensors)
        ax = xckpt.open_steps(str(tmp_path / "step-*.safetensors")).ckpt.plot.steps()
        drawn: Any = ax.images[0].get_array()
        assert ax.images[0].get_clim()[1] == pytest.approx(drawn.max())
        assert np.unravel_index(drawn.argmax(), drawn.shape) == (7, 3)
        bar = ax.images[0].colorbar
        assert bar is not None
        labels = [text.get_text() for text in bar.ax.get_yticklabels()]
        assert 2 <= len(labels) <= 5
        assert all(float(label) > 0 for label in labels)
        plt.close("all")

    def test_needs_steps_and_tensors(self, tmp_path: Path) -> None:
        ds = xckpt.open_steps(run(tmp_path))
        with pytest.raises(ValueError, match="open several with"):
            ds.isel(step=0).ckpt.plot.steps()
        with pytest.raises(ValueError, match="matches none of the 5 tensors; similar names"):
            ds.ckpt.plot.steps("m.layer.1.w")


class TestRightAgain:
    """Steps whose weights are wrong, while the next step continues from the step before."""

    def steps(self, folder: Path, bad: dict[int, Callable[[Tensors, list[Tensors]], None]]) -> str:
        rng = np.random.default_rng(7)
        shapes = {f"m.layers.{n}.w": (48, 48) for n in range(6)} | {"m.scale": (), "m.norm": (48,)}
        tensors: Tensors = {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
        past: list[Tensors] = []
        for step in range(1, 11):
            changes = {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
            tensors = {n: np.asarray(v + 0.02 * changes[n], "f4") for n, v in tensors.items()}
            past.append(tensors)
            written = dict(tensors)
            if step in bad:
                bad[step](written, past)
            write(folder / f"step-{step * 100}.safetensors", written)
        return str(folder / "step-*.safetensors")

    def test_noise_at_one_step(self, tmp_path: Path) -> None:
        def noise(tensors: Tensors, _: object) -> None:
            rng = np.random.default_rng(1)
            for name, values in tensors.items():
                tensors[name] = np.asarray(values + 0.4 * rng.standard_normal(values.shape), "f4")

        ((name, rule, value, text),) = rules(self.steps(tmp_path, {6: noise}))
        assert (name, rule, round(value)) == ("step.600", "unlike_step", 20)
        assert text.startswith("6 of 8 tensors changed from step 500 to 600, 20")
        assert text.endswith(
            "times as much as around it, and back by step 700: 'm.layers.{0..5}.w'"
        )

    def test_exchanged_layers(self, tmp_path: Path) -> None:
        def exchange(tensors: Tensors, _: object) -> None:
            a, b = "m.layers.2.w", "m.layers.3.w"
            tensors[a], tensors[b] = tensors[b], tensors[a]

        ((name, _, value, text),) = rules(self.steps(tmp_path, {6: exchange}))
        assert (name, 60 < value < 80) == ("step.600", True)
        assert "2 of 8 tensors" in text
        assert "'m.layers.{2,3}.w'" in text

    def test_tensors_of_an_early_step_for_two_steps(self, tmp_path: Path) -> None:
        def stale(tensors: Tensors, past: list[Tensors]) -> None:
            name = "m.layers.1.w"
            changes = np.random.default_rng(len(past)).standard_normal((48, 48))
            tensors[name] = np.asarray(past[0][name] + 0.01 * changes, "f4")

        ((name, _, value, text),) = rules(self.steps(tmp_path, {6: stale, 7: stale}))
        assert (name, 1.5 < value < 3) == ("step.600", True)
        assert text.startswith("1 of 8 tensors changed from step 500 to 600")
        assert text.endswith("back by step 800: 'm.layers.1.w'")

    def test_steps_that_only_go_faster_are_good(self, tmp_path: Path) -> None:
        def faster(tensors: Tensors, past: list[Tensors]) -> None:
            rng = np.random.default_rng(len(past))
            for name, values in past[-1].items():
                change = rng.standard_normal(values.shape)
                past[-1][name] = tensors[name] = np.asarray(values + 0.04 * change, "f4")

        assert rules(self.steps(tmp_path, {5: faster, 6: faster})) == []
