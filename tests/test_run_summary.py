"""A training run at a glance: `summary` of a Dataset of `open_steps`, and ``xckpt steps``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.cli import main

if TYPE_CHECKING:
    from pathlib import Path

STEPS = (100, 200, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run as transformers' Trainer does, whose weights double at each step."""
    run = tmp_path_factory.mktemp("run")
    logs: list[dict[str, Any]] = []
    for number, step in enumerate(STEPS):
        logs += [
            {"step": step - 50, "loss": 9.0, "grad_norm": 1},
            {"step": step, "loss": 3 - number},
        ]
        logs[-1] |= {"comment": "text", "huge": 10**400, "is_best": True}
        path = run / f"checkpoint-{step}"
        path.mkdir()
        (path / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
        tensors: dict[str, Any] = {
            f"model.layers.{layer}.mlp.weight": np.full((4, 3), 2.0 ** (number * (layer != 1)))
            for layer in (0, 1, 10)
        }
        tensors["optimizer.state.exp_avg.model.layers.0.mlp.weight"] = np.full((4, 3), number + 1.0)
        tensors["optimizer.state.step"] = np.int64(step)
        xckpt.save(tensors, path / "model.safetensors")
    return run


def test_metrics_come_from_the_logs_without_reading_tensors(folder: Path) -> None:
    run = xckpt.open_steps(folder)
    summary = run.ckpt.summary()
    assert summary.columns.tolist() == list(STEPS)
    assert summary.index.tolist() == [("metric", "loss"), ("metric", "grad_norm")]
    assert summary.loc["metric"].to_numpy().tolist() == [[3, 2, 1], [1, 1, 1]]
    assert "summary(changes=True) reads each step once" in repr(summary)
    assert "ds.ckpt.summary() has their metrics" in repr(run.ckpt)
    assert run.ckpt.summary("dtype").loc["float64", "tensors"] == 12
    assert run.sel(step=[200]).ckpt.summary().to_numpy().tolist() == [[2], [1]]
    assert "has their metrics" not in repr(run.sel(step=200).ckpt)


def test_a_step_has_the_name_of_its_folder(folder: Path) -> None:
    run = xckpt.open_steps(folder)
    first, last = run.sel(step=100), run.sel(step=300)
    assert repr(first.ckpt).startswith("<Checkpoint checkpoint-100>")
    result = xckpt.compare(first, last)
    assert repr(result.ckpt).startswith("<Comparison of checkpoint-100 with checkpoint-300>")
    assert result.attrs["compared_with"] == str(folder / "checkpoint-300")
    assert repr(run.ckpt).startswith(f"<Checkpoint {folder.name}>")


def test_attributes_of_files_are_metrics(tmp_path: Path) -> None:
    for step in STEPS:
        attrs = {"loss": 1 / step, "run": "a", "metrics": {"accuracy": step / 1000}}
        xr.Dataset({"w": ("x", np.ones(3))}, attrs=attrs).ckpt.save(tmp_path / f"step-{step}.zt")
    summary = xckpt.open_steps(tmp_path).ckpt.summary()
    assert summary.loc[("metric", "loss")].tolist() == [1 / step for step in STEPS]
    assert summary.loc[("metric", "accuracy")].tolist() == [0.1, 0.2, 0.3]


def test_layers_moments_and_counters_have_rows_of_their_own(folder: Path) -> None:
    summary = xckpt.open_steps(folder, stack=True).ckpt.summary(changes=True)
    weights = summary.loc["relative change of weights"]
    layers = [f"model.layers.{layer}" for layer in (0, 1, 10)]
    assert weights.index.tolist() == ["all", *layers]
    # Relative to the norm at the later step, of all tensors, whether they changed or not.
    for layer, change in zip(layers, (0.5, 0.0, 0.5), strict=True):
        np.testing.assert_allclose(weights.loc[layer], [np.nan, change, change])
    np.testing.assert_allclose(weights.loc["all"], [np.nan, 2**0.5 / 3, 8**0.5 / 33**0.5])
    assert summary.loc["relative change of others"].index.tolist() == ["moments"]
    np.testing.assert_allclose(
        summary.loc[("relative change of others", "moments")][1:], [1 / 2, 1 / 3]
    )
    np.testing.assert_allclose(summary.loc[("change of counters", "steps")][1:], [100, 100])
    text = repr(summary)
    assert "finding" in text
    html = summary._repr_html_()
    assert all(name in html.replace("<wbr>", "") for name in (*layers, "moments", "grad_norm"))


def test_findings_of_a_run_are_marked_by_their_severity(tmp_path: Path) -> None:
    for step, value in enumerate((1.0, 2.0, np.nan)):
        xckpt.save({"l.0.w": np.full((4, 3), value)}, tmp_path / f"step-{step}.npz")
    summary = xckpt.open_steps(tmp_path).ckpt.summary(changes=True)
    assert any(note.startswith("error: ") for note in summary.attrs["notes"])
    assert "<b>error:</b>" in summary._repr_html_()


@pytest.mark.parametrize("broken", [1, 6, 8])
def test_steps_and_layers_with_findings_are_printed(broken: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for step in range(10):
        layers = {f"layers.{n}.w": rng.normal(size=(4, 3)) for n in range(40)}
        if step == broken:
            layers["layers.17.w"][0] = np.nan
        xckpt.save(layers, tmp_path / f"step-{step}.npz")
    summary = xckpt.open_steps(tmp_path).ckpt.summary(changes=True)
    titles = repr(summary).splitlines()[1].split()[1:]
    assert len(titles) == 6
    assert {"0", str(broken), "9"} <= {*titles}
    assert "layers.17 " in repr(summary)
    assert "… 4 more steps and " in repr(summary)
    assert f"step.{broken}.layers.17" in repr(summary)


def test_no_more_steps_are_printed_if_all_have_findings(tmp_path: Path) -> None:
    for step in range(10):
        weight = np.full((4, 3), np.nan if step else 1.0)
        xckpt.save({"l.0.w": weight}, tmp_path / f"step-{step}.npz")
    titles = repr(xckpt.open_steps(tmp_path).ckpt.summary(changes=True)).splitlines()[1].split()
    assert titles == ["step", "0", "1", "2", "3", "4", "9"]


def test_infinite_metrics_and_as_many_steps_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(100, 800, 100):
        attrs = {"loss": np.inf if step == 100 else 1 / step, "tokens": 12345.0 * step}
        xr.Dataset({"w": ("x", np.ones(3))}, attrs=attrs).ckpt.save(tmp_path / f"step-{step}.zt")
    monkeypatch.setenv("COLUMNS", "80")
    summary = xckpt.open_steps(tmp_path).ckpt.summary()
    titles, kind, loss, tokens = (line.split() for line in repr(summary).splitlines()[1:5])
    assert titles == ["step", "100", "200", "300", "500", "600", "700"]
    assert (kind, loss[:3]) == (["metric:"], ["loss", "inf", "0.005"])
    assert tokens[:3] == ["tokens", "1234500", "2469000"]
    assert max(map(len, repr(summary).splitlines())) <= 80
    assert "… 1 more step: the result is a DataFrame" in repr(summary)
    assert "inf" in summary._repr_html_()
    assert main(["steps", str(tmp_path)]) == 0
    assert "… 1 more step: --json prints all" in capsys.readouterr().out


def test_the_command_prints_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "3 steps, 100 to 300 · 5 tensors each" in out
    assert "--changes reads each step once" in out
    files = [str(path) for path in sorted(folder.glob("*/model.safetensors"))]
    assert main(["steps", *files, "--changes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["steps"] == list(STEPS)
    rows = {(row["kind"], row["name"]): row["values"] for row in document["rows"]}
    assert rows["metric", "loss"] == [3, 2, 1]
    assert rows["change of counters", "steps"] == [None, 100, 100]
    assert main(["steps", files[0], "--engine", "npz"]) != 0
    assert main(["info", str(folder)]) == 2
    assert "'xckpt steps " in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["[1]", "{}", '{"log_history": 3}', '{"log_history": [3]}', "{"]
)
@pytest.mark.filterwarnings("ignore::xckpt.CheckpointWarning")
def test_other_contents_of_the_logs(content: str, tmp_path: Path) -> None:
    for step in STEPS:
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        (path / "trainer_state.json").write_text(content)
        xckpt.save({"<i>\x1b.w": np.full(3, step)}, path / "model.safetensors")
    summary = xckpt.open_steps(tmp_path).ckpt.summary(changes=True)
    assert "metric" not in summary.index.get_level_values(0)
    assert "\x1b" not in repr(summary)
    assert "<i>" not in summary._repr_html_()


def test_wrong_arguments(folder: Path) -> None:
    run = xckpt.open_steps(folder)
    with pytest.raises(ValueError, match="leave `by` out"):
        run.ckpt.summary("dtype", changes=True)
    one: Any = xckpt.open(folder / "checkpoint-100")
    with pytest.raises(ValueError, match="open several with"):
        one.ckpt.summary("step")
    with pytest.raises(ValueError, match="by must be"):
        one.ckpt.summary("steps")


def test_groups_of_a_run_have_layers_and_steps(folder: Path) -> None:
    result = xckpt.open_steps(folder).ckpt.stats()
    assert result.ckpt.by("layer")["tensors"].to_dict()["data"] == [3, 3, 3]
    groups = result.ckpt.by(["step", "layer"])
    assert groups["step"].to_numpy().tolist() == list(STEPS)
    assert groups["layer"].to_numpy().tolist() == [0, 1, 10]
    xr.testing.assert_identical(groups, result.ckpt.by("step,layer"))
    xr.testing.assert_identical(groups, result.ckpt.by("step", "layer"))


def test_a_run_has_no_findings_only_if_its_steps_were_compared(folder: Path) -> None:
    run = xckpt.open_steps(folder)
    run.ckpt.stats()
    assert "findings" not in repr(run.ckpt)
    assert "for changes and findings" in repr(run.ckpt.summary())
    run.ckpt.findings()
    assert "finding" in repr(run.ckpt.summary())
    assert "for changes\n" in f"{run.ckpt.summary()!r}\n"
    assert "step." not in repr(run.ckpt).partition("\n")[0]
