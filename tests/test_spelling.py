"""An option has one name, text and meaning in functions, methods, pictures and commands."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, cast

import click
import numpy as np
import pytest

import xckpt
from xckpt.accessor import CheckpointAccessor
from xckpt.cli import commands, main
from xckpt.datasets.options import OpenOptions
from xckpt.options import text_of
from xckpt.plots import Plots

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SELECTING = ("tensors", "exclude", "only")
SCANNING = (*SELECTING, "progress", "cache")
FUNCTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("stats", "histogram", "spectrum", "compare", "findings", "report"), SCANNING),
    **dict.fromkeys(("verify", "manifest", "convert"), (*SELECTING, "progress")),
    "open": SELECTING,
}
METHODS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("stats", "histogram", "spectrum", "compare", "findings", "report"), SCANNING),
    "manifest": (*SELECTING, "progress"),
    "find": SELECTING,
}
PICTURES = ("layers", "histogram", "treemap", "by", "steps", "compare", "error")
SURFACES = [
    *((f"xckpt.{n}", getattr(xckpt, n), options) for n, options in FUNCTIONS.items()),
    *((f".ckpt.{n}", getattr(CheckpointAccessor, n), options) for n, options in METHODS.items()),
    *((f".plot.{n}", getattr(Plots, n), SELECTING) for n in PICTURES),
]
CASES = [
    pytest.param(call, option, id=f"{name}-{option}")
    for name, call, options in SURFACES
    for option in options
]


def entry(docstring: str | None, option: str) -> str:
    """Return the description of a parameter, without its indentation."""
    text = inspect.cleandoc(docstring or "")
    match = re.search(rf"^{option} : .*\n(?:    .*\n)+", text, re.MULTILINE)
    assert match is not None, f"{option} is not described"
    return match[0].rstrip()


@pytest.mark.parametrize(("call", "option"), CASES)
def test_an_option_is_accepted_with_the_same_text(call: Any, option: str) -> None:
    assert option in inspect.signature(call).parameters
    owner = OpenOptions if option in SELECTING else xckpt.stats
    assert entry(call.__doc__, option) == entry(owner.__doc__, option)


@pytest.mark.parametrize("command", sorted(commands.commands))
def test_commands_select_tensors_with_the_texts_of_functions(command: str) -> None:
    params = commands.commands[command].params
    helps = {p.name: p.help for p in params if isinstance(p, click.Option)}
    for option in SELECTING:
        assert str(helps[option]).startswith(text_of(option))
    for option in ("overwrite", "skip_unreadable"):
        assert helps.get(option, text_of(option)) == text_of(option)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    model = {f"layers.{n}.{k}": rng.random((4, 4), "f4") for n in range(3) for k in ("q", "mlp")}
    state = {f"model.{name}": values for name, values in model.items()}
    state |= {f"optimizer.state.exp_avg.{name}": values for name, values in model.items()}
    xckpt.save(model, "m.npz")
    xckpt.save(state, "train.npz")


Q = [f"layers.{n}.q" for n in range(3)]
RESULTS: dict[str, Callable[..., Any]] = {
    "stats": lambda **o: xckpt.stats("m.npz", **o),
    "stats of a stack": lambda **o: xckpt.open("m.npz", stack=True).ckpt.stats(**o),  # noqa: PLW0108
    "spectrum": lambda **o: xckpt.spectrum("m.npz", **o),
    "histogram": lambda **o: xckpt.histogram("m.npz", **o),
    "compare": lambda **o: xckpt.compare("m.npz", "m.npz", **o),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize(
    "selection",
    [{"tensors": "*.q"}, {"exclude": "*.mlp"}, {"tensors": "layers.*", "exclude": ["*.mlp"]}],
    ids=str,
)
def test_results_have_the_selected_tensors(name: str, selection: dict[str, Any]) -> None:
    assert sorted(RESULTS[name](**selection).ckpt.table().index) == Q


def test_members_of_a_stack_are_selected_by_their_names() -> None:
    result = xckpt.open("m.npz", stack=True).ckpt.stats("*.q", exclude="layers.1.*")
    assert list(result.ckpt.table().index) == ["layers.0.q", "layers.2.q"]
    assert result.ckpt.by("layer")["tensors"].to_numpy().tolist() == [1, 1]


def test_only_weights_leaves_out_the_state_of_an_optimizer() -> None:
    weights = {f"model.{n}" for n in [*Q, *(q.replace(".q", ".mlp") for q in Q)]}
    ds = xckpt.open("train.npz")
    assert set(xckpt.open("train.npz", only="weights")) == weights
    assert set(ds.ckpt.find(only="weights")) == weights
    assert set(ds.ckpt.stats(only="weights").ckpt.table().index) == weights
    assert set(xckpt.manifest("train.npz", only="weights")) == weights
    xckpt.convert("train.npz", "new.npz", only="weights")
    assert set(xckpt.open("new.npz")) == weights
    assert main(["convert", "train.npz", "cli.npz", "--only", "weights"]) == 0
    assert set(xckpt.open("cli.npz")) == weights
    with pytest.raises(ValueError, match="only='model': expected 'weights'"):
        ds.ckpt.stats(only="model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("names", "tensors"), ("tensor", "tensors"), ("axis", "dim"), ("skip", "exclude")],
)
def test_an_option_of_another_name_is_answered_with_the_one_that_works(
    wrong: str, right: str
) -> None:
    value: Any = -1 if right == "dim" else "*.q"
    with pytest.raises(TypeError, match=rf"stats\(\) has no option '{wrong}'; did you mean '(.*)'"):
        xckpt.stats("m.npz", **{wrong: value})
    assert xckpt.stats("m.npz", **{right: value}).sizes


def test_options_of_other_calls_are_answered_with_the_call() -> None:
    ds, compare = xckpt.open("m.npz"), cast("Any", xckpt.compare)
    ckpt = cast("Any", ds.ckpt)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: xckpt.open("m.npz", format="npz"), "did you mean 'engine'"),
        (lambda: ckpt.find(type="f4"), "did you mean 'dtype'"),
        (lambda: ckpt.stats(by="layer"), r"result\.ckpt\.by\('layer'\)"),
        (lambda: ckpt.stats(layers=1), r"ds\.ckpt\.sel\(layers=1\)"),
        (lambda: ckpt.save("x.npz", tensors="*.q"), r"ds\.ckpt\.find\(tensors="),
        (lambda: compare("m.npz", "m.npz", "m.npz"), "takes 2 positional arguments, not 3"),
    ]
    for call, hint in calls:
        with pytest.raises(TypeError, match=hint):
            call()


def test_a_filter_without_a_match_is_answered_with_one_that_matches() -> None:
    with pytest.raises(ValueError, match=r"tensors='layer\.\*' matches none.*'layers\.\*'"):
        xckpt.stats("m.npz", "layer.*")
    with pytest.warns(xckpt.CheckpointWarning, match=r"exclude='\*\.mpl'.*did you mean '\*\.mlp'"):
        xckpt.stats("m.npz", exclude="*.mpl")
    with pytest.raises(TypeError, match=r"pass '\*\.q' by name, as tensors='\*\.q'"):
        xckpt.compare("m.npz", "m.npz", "*.q")  # type: ignore[call-arg]


def test_positions_and_names_of_axes_are_equal() -> None:
    ds = xckpt.open("m.npz", dims={"*": ("out", "in")})
    by_name, by_position = ds.ckpt.stats(dim="in"), ds.ckpt.stats(dim=-1)
    assert by_name.equals(by_position)
    assert ds.ckpt.stats(dim=[0, "in"]).sizes == {"statistic": by_name.sizes["statistic"]}
    with pytest.raises(ValueError, match="no variable has the dimension '5'"):
        ds.ckpt.stats(dim=5)


def test_every_result_has_a_table() -> None:
    ds = xckpt.open("m.npz")
    results = [ds.ckpt.stats(), ds.ckpt.spectrum(), ds.ckpt.compare("m.npz"), ds.ckpt.histogram()]
    for result in results:
        assert sorted(result.ckpt.table().index) == sorted(map(str, ds))
        assert list(result.ckpt.by("layer").ckpt.table().index) == [0, 1, 2]
    assert ds.ckpt.findings().ckpt.by("layer").ckpt.table().columns[0] == "tensors"
