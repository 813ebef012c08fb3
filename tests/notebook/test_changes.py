"""Comparisons of many tensors in a few sentences, in all renderings."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.cli import main

F32 = np.dtype("f4")
MOST_LINES = 20


def llama(layers: int, experts: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    parts = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    gated = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
    parts += [f"mlp.experts.{n}.{part}" for n in range(experts) for part in gated]
    parts += [f"mlp.{part}" for part in gated if not experts]
    tensors = {"model.embed_tokens.weight": rng.standard_normal((6, 4)).astype(F32)}
    for layer in range(layers):
        for part in parts:
            values = rng.standard_normal((4, 4)).astype(F32)
            tensors[f"model.layers.{layer}.{part}"] = values
    return tensors | {"lm_head.weight": np.ones((6, 4), F32)}


def tuned(base: dict[str, np.ndarray], first: int) -> dict[str, np.ndarray]:
    """Return the model with its last mlp changed by 8 to 12 %, and three damaged tensors."""
    scales = iter(np.linspace(1.08, 1.12, len(base)))
    new = {
        name: (values * next(scales)).astype(F32)
        if ".mlp." in name and int(name.split(".")[2]) >= first
        else values
        for name, values in base.items()
    }
    new["model.layers.1.self_attn.k_proj.weight"] = np.full((4, 4), np.nan, F32)
    new["model.layers.0.self_attn.q_proj.weight"] = (
        base["model.layers.0.self_attn.q_proj.weight"] * 3
    )
    del new["lm_head.weight"]
    return new


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("changes")
    base = llama(6)
    xckpt.save(base, folder / "a.safetensors")
    xckpt.save(tuned(base, 4), folder / "b.safetensors")
    return str(folder / "a.safetensors"), str(folder / "b.safetensors")


SENTENCES = [
    "lm_head.weight is only in a",
    "model.layers.1.self_attn.k_proj.weight differs by NaN or infinities",
    "model.layers.0.self_attn.q_proj.weight changed by 200 %",
]


def test_only_changes_from_zeros_are_called_so() -> None:
    rng = np.random.default_rng(0)
    weights = {f"layers.{n}.fc.weight": rng.normal(size=(8, 8)).astype(F32) for n in range(8)}
    biases = {name.replace("weight", "bias"): np.zeros(8, F32) for name in weights}
    new = {name: values * F32.type(1.01) for name, values in weights.items()}
    new |= {name: values + F32.type(0.1) for name, values in biases.items()}
    text = repr(xckpt.compare(weights | biases, new).ckpt)
    assert "fc.bias of layers 0 to 7 changed from zeros (8 tensors)" in text
    assert "fc.weight of layers 0 to 7 changed by 1 % (8 tensors)" in text


@pytest.mark.parametrize("explain", [False, True])
def test_exceptions_come_first_and_the_rest_last(pair: tuple[str, str], explain: bool) -> None:
    text = repr(xckpt.compare(*pair, explain=explain).ckpt).splitlines()
    lines = [line.strip() for line in text if line.startswith("  ")]
    assert [line.partition(" (scaled")[0] for line in lines[:3]] == SENTENCES
    assert lines[3].startswith("mlp of layers 4, 5 changed by ")
    assert lines[-2] == "everything else is equal (35 tensors)"
    assert len(text) <= MOST_LINES


def test_all_renderings_have_the_same_sentences(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = xckpt.compare(*pair)
    lines = [line.strip() for line in repr(result.ckpt).splitlines()[1:-1]]
    html = result.ckpt._repr_html_()
    assert main(["compare", *pair, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["summary"] == lines
    for path in (tmp_path / "r.html", tmp_path / "r.md"):
        xckpt.report(pair[0], path, pair[1], explain=False)
    report = (tmp_path / "r.html").read_text("utf-8").replace("<wbr>", "")
    for line in lines:
        assert line in html
        subject = line.partition(" is ")[0].partition(" changed")[0].partition(" differs")[0]
        assert subject in report


def test_no_line_is_wider_than_a_narrow_terminal(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    paths = [tmp_path / f"{side}-of-a-model-whose-name-is-long.safetensors" for side in "ab"]
    for path, old in zip(paths, pair, strict=True):
        path.write_bytes(Path(old).read_bytes())
    for explain in (False, True):
        lines = repr(xckpt.compare(*paths, explain=explain).ckpt).splitlines()
        assert max(map(len, lines)) <= 80
        assert "long.safetensors>" in lines[1]


def test_rows_of_a_result_are_a_table_in_html(pair: tuple[str, str]) -> None:
    result = xckpt.stats(pair[0])
    for rows in (result, result.ckpt.by("layer"), xckpt.compare(*pair).ckpt.by("layer", "role")):
        html = rows.ckpt._repr_html_()
        heading, *_ = repr(rows.ckpt).splitlines()
        name, _, facts = heading.removeprefix("<").partition(">  ")
        assert f"<b>{name}</b>" in html
        assert escape(facts) in html
        assert html.count("<tr") <= 11
        assert "<pre" not in html
    assert "… 34 more: .ckpt.table()" in result.ckpt._repr_html_()


def test_the_command_line_summarises_many_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = llama(6)
    paths = [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    for path, tensors in zip(paths, (base, tuned(base, 0)), strict=True):
        xckpt.save(tensors, path)
    assert main(["compare", *paths]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == SENTENCES
    assert lines[3].startswith("mlp of layers 0 to 5 changed by 8")
    assert lines[5].split()[:2] == ["tensor", "status"]


HINT = "may have other names in b (equal shapes): names='auto' matches them, explain=True also"


def renamed(tensors: dict[str, np.ndarray], old: str, new: str) -> dict[str, np.ndarray]:
    return {name.replace(old, new): values for name, values in tensors.items()}


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [("self_attn", "attention", 24), ("model.layers", "h", 42), ("o_proj.weight", "out", 6)],
)
def test_tensors_of_equal_shapes_under_other_names_have_a_hint(
    old: str, new: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = llama(6)
    b = renamed(a, old, new)
    paths = [str(tmp_path / f"{side}.safetensors") for side in "ab"]
    for path, tensors in zip(paths, (a, b), strict=True):
        xckpt.save(tensors, path)
    result = xckpt.compare(a, b)
    hint = f"{count} tensors {HINT} says why"
    assert repr(result.ckpt).splitlines()[-2].strip() == hint
    assert escape(hint) in result.ckpt._repr_html_()
    for name in ("r.html", "r.md"):
        xckpt.report(paths[0], tmp_path / name, paths[1], explain=False)
        page = (tmp_path / name).read_text("utf-8").replace("\\", "")
        assert f"{count} tensors may have other names in b" in page
    assert main(["compare", *paths]) == 1
    text = capsys.readouterr().err
    assert f"{count} tensors may have other names in b (equal shapes): --names auto" in text
    assert "--explain also says why" in text
    for options in ({"names": "auto"}, {"explain": True}, {"names": {}}):
        arguments: Any = options
        assert "may have" not in repr(xckpt.compare(a, b, **arguments).ckpt)


def test_few_tensors_of_equal_shapes_have_a_hint_in_small_models() -> None:
    a = {"fc.weight": np.ones((3, 3)), "ln.gamma": np.ones(3), "ln.beta": np.zeros(3)}
    b = {"fc.weight": np.ones((3, 3)), "ln.weight": np.ones(3), "ln.bias": np.zeros(3)}
    assert f"2 tensors {HINT} says why" in repr(xckpt.compare(a, b).ckpt)
    del a["ln.beta"], b["ln.bias"]
    assert "1 tensor may have another name in b" in repr(xckpt.compare(a, b).ckpt)


def test_new_heads_have_no_hint() -> None:
    base = llama(6)
    old = base | {f"lm_head.{name}": np.ones(4, F32) for name in ("dense", "bias", "norm")}
    new = base | {f"classifier.{name}": np.ones(4, F32) for name in ("dense", "bias", "out")}
    assert "may have" not in repr(xckpt.compare(old, new).ckpt)
    new = renamed(base, "q_proj", "q") | {f"extra.{n}": np.ones(n, F32) for n in range(7, 20)}
    old = base | {f"more.{n}": np.ones((1, n), F32) for n in range(7, 20)}
    assert "may have" not in repr(xckpt.compare(old, new).ckpt)


def test_equal_models_take_one_line(pair: tuple[str, str]) -> None:
    lines = repr(xckpt.compare(pair[0], pair[0]).ckpt).splitlines()
    assert lines[1:] == ["  all 44 tensors are equal", "  every tensor: .ckpt.table()"]


def test_names_from_files_are_escaped() -> None:
    names = [f"<img src=x onerror=alert(1)>.{n}.\x1b[31m" for n in range(20)]
    a = {name: np.ones(n + 1, F32) for n, name in enumerate(names)}
    result = xckpt.compare(a, {name: -values for name, values in a.items()})
    assert "<img" not in result.ckpt._repr_html_()
    assert "\x1b" not in repr(result.ckpt)


def test_patterns_with_missing_members_count_them() -> None:
    a = {f"h.{n}.e.{m}.w": np.ones(2, F32) for n in range(4) for m in range(4)}
    b = {name: values * (1 + (name[2] == name[6])) for name, values in a.items()}
    text = repr(xckpt.compare(a, b).ckpt)
    assert "(4 of 16 tensors)" in text


def synthetic(count: int, seed: int) -> Any:
    """Return a comparison of many tensors, as `compare` makes it."""
    rng = np.random.default_rng(seed)
    parts = [f"experts.{n}.{part}" for n in range(128) for part in ("gate", "up", "down")]
    names = [
        f"model.layers.{n}.{part}.weight" for n in range(count // len(parts)) for part in parts
    ]
    reference = xckpt.compare({"w": np.ones(3)}, {"w": np.full(3, 2.0)})
    statistics = reference["statistic"].to_numpy().tolist()
    rows = np.zeros((len(names), len(statistics)))
    rows[:, statistics.index("status")] = rng.integers(0, 5, len(names))
    rows[:, statistics.index("rel_l2")] = rng.lognormal(-3, 3, len(names))
    variables = {name: ("statistic", row) for name, row in zip(names, rows, strict=True)}
    result = xr.Dataset(variables, {"statistic": statistics}, reference.attrs)
    result.encoding = dict(reference.encoding)
    return result


def test_18_000_tensors_in_disorder_take_twenty_lines() -> None:
    result = synthetic(18_432, 0)
    text = repr(result.ckpt)
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) <= 120
