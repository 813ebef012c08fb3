"""Comparisons of many tensors in a few sentences, in all renderings."""

from __future__ import annotations

import json
import re
from html import escape
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from xckpt.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pandas as pd

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


# --- sentences and the table ---------------------------------------------------------------------

Values = np.ndarray[Any, Any]

#: Changes of a tensor by name: functions of its values, whose results are the values of both sides.
CHANGES: dict[str, Callable[[Values], tuple[Values | None, Values | None]]] = {
    "equal": lambda x: (x, x),
    "zero": lambda x: (0 * x, 0 * x),
    "tiny": lambda x: (x, x * np.float32(1 + 2e-6)),
    "small": lambda x: (x, x * np.float32(1.01)),
    "large": lambda x: (x, x * np.float32(3)),
    "varied": lambda x: (x, x + np.float32(0.3) * x[::-1] ** 2),
    "from zeros": lambda x: (0 * x, x),
    "to zeros": lambda x: (x, 0 * x),
    "to NaN": lambda x: (x, x * np.float32(np.nan)),
    "zeros to infinity": lambda x: (0 * x, np.full_like(x, np.inf)),
    "both NaN": lambda x: (x * np.float32(np.nan), x * np.float32(np.nan)),
    "partly infinite": lambda x: (
        x,
        np.where(x == x.flat[0], np.float32(np.inf), x * np.float32(2)),
    ),
    "permuted": lambda x: (x, x[::-1].copy()),
    "shape": lambda x: (x, np.concatenate([x, x])),
    "half": lambda x: (x, x.astype("f2")),
    "only in a": lambda x: (x, None),
    "only in b": lambda x: (None, x),
}
NAMES = [
    *map(".".join, product(("attn.q", "attn.k", "mlp.up", "norm"), ("weight", "bias"))),
    *[f"mlp.experts.{n}.w" for n in range(2)],
]


@st.composite
def changes_of_models(draw: st.DrawFn) -> dict[str, str]:
    """Draw the changes of a model of several layers: one for each place, with exceptions."""
    change = st.sampled_from(sorted(CHANGES))
    stacks = draw(st.sampled_from([["layers"], ["model.layers"], ["encoder.h", "decoder.h"]]))
    places = draw(st.lists(st.sampled_from(NAMES), min_size=3, unique=True))
    layers = range(draw(st.integers(2, 12)))
    usual = {place: draw(change) for place in places}
    changes = {
        f"{stack}.{n}.{place}": usual[place] for stack, n, place in product(stacks, layers, places)
    } | {f"{name}.weight": draw(change) for name in ("embed", "head")}
    exceptions = st.dictionaries(st.sampled_from(sorted(changes)), change, max_size=6)
    return changes | draw(exceptions)


def models(changes: dict[str, str]) -> tuple[dict[str, Values], dict[str, Values]]:
    """Return two models that differ by changes."""
    rng = np.random.default_rng(0)
    a: dict[str, Values] = {}
    b: dict[str, Values] = {}
    for name, kind in changes.items():
        shape = (4, 4) if name.endswith(("weight", "w")) and "norm" not in name else (4,)
        old, new = CHANGES[kind](rng.standard_normal(shape).astype(F32))
        a |= {} if old is None else {name: old}
        b |= {} if new is None else {name: new}
    return a, b


LINE = re.compile(
    r"(?P<subject>.+?) (?P<predicate>(?:is|are|has|have|differs?|cannot|changed)\b.*?)"
    r"(?: \((?P<number>[\d,]+)(?: of [\d,]+)? tensors?(?P<some> in .*)?\))?"
)
NUMBERED = re.compile(r"(?:(?P<inner>.+) of )?(?P<path>\S+) (?P<numbers>\d+(?:(?: to |, )\d+)*)")


def expanded(text: str) -> Iterator[str]:
    """Yield the texts that braces and ranges stand for."""
    head, brace, tail = text.partition("{")
    members, _, tail = tail.partition("}")
    if not brace:
        yield text
        return
    for member in members.split(","):
        first, dots, last = member.partition("..")
        numbers = map(str, range(int(first), int(last) + 1)) if dots else [member]
        for number, rest in product(numbers, list(expanded(tail))):
            yield head + number + rest


def covered(subject: str, names: list[str]) -> list[str]:
    """Return the tensors that the subject of a sentence names."""
    texts = [subject]
    if match := NUMBERED.fullmatch(subject):
        listed = match["numbers"].replace(" to ", "..").replace(", ", ",")
        texts = [f"{match['path']}.{{{listed}}}" + (f".{match['inner']}" if match["inner"] else "")]
    patterns = "|".join(re.escape(name) for text in texts for name in expanded(text))
    is_named = re.compile(rf"(?:.+\.)?(?:{patterns})(?:\..+)?").fullmatch
    return [name for name in names if is_named(name)]


def agrees(row: pd.Series[Any], predicate: str) -> bool:
    """Return whether a sentence is true of a row of the table."""
    is_spoilt = row["nan"] + row["inf"] > 0
    if predicate.startswith(("is only in ", "are only in ")):
        is_unmatched = row.get("outcome", "unmatched") == "unmatched"
        return bool(row["status"] == f"only_{predicate[-1]}" and is_unmatched)
    if "another shape" in predicate:
        return bool(row["status"] == "shape")
    if "NaN" in predicate:
        return bool(is_spoilt)
    if not predicate.startswith("changed"):
        cause = predicate.split(" ")[1]
        status = "equal" if row["status"] == "same" else row["status"]
        return bool(row.get("cause", status) == cause)
    if " (" in predicate and predicate[predicate.index(" (") + 2 : -1] != row["cause"]:
        return False
    size, is_changed = row["rel_l2"], row.get("outcome", row["status"]) == "changed"
    if not is_changed or is_spoilt or "from zeros" in predicate or " by " not in predicate:
        expected = inf if "from zeros" in predicate else np.nan
        is_size = np.array_equal(size, expected, equal_nan=True)
        return bool(is_changed and not is_spoilt and is_size)
    numbers = [
        float(text.replace(",", "")) / 100
        for text in re.findall(r"[\d.,]+(?:e[-+]\d+)?", predicate.partition(" (")[0])
    ]
    return bool(min(numbers) * 0.949 <= size <= max(numbers) * 1.051)


@given(changes=changes_of_models(), explain=st.booleans())
def test_sentences_agree_with_the_table(changes: dict[str, str], explain: bool) -> None:
    result = xckpt.compare(*models(changes), explain=explain, cache=False, progress=False)
    table = result.ckpt.table()
    if explain:
        partners = {name for names in table["other_names"] for name in names.split(", ")}
        table = table[~((table["status"] == "only_b") & table.index.isin(partners))]
    text = repr(result.ckpt)
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    sentences = [line for line in lines if "may have other names" not in line][:-1]
    if len(table) <= 12:
        return
    unnamed, total, remaining = set(table.index), 0, []
    for sentence in sentences:
        match = LINE.fullmatch(sentence)
        assert match, sentence
        number = int((match["number"] or "1").replace(",", ""))
        subject = match["subject"]
        if all_of_them := re.fullmatch(r"all (\d+) tensors", subject):
            number = int(all_of_them[1])
            names = list(table.index)
        elif subject in {"everything else", "others", "… and others", "all others"}:
            remaining.append((match["subject"], match["predicate"], number))
            total += number
            continue
        else:
            names = covered(subject, list(table.index))
        true = {name for name in names if agrees(table.loc[name], match["predicate"])}
        is_partial = " of " in sentence[len(subject) :].rpartition("(")[2]
        assert len(true) >= number if is_partial else len(true) == len(names) == number, (
            sentence,
            text,
        )
        unnamed -= true
        total += number
    assert total == len(table), text
    for subject, predicate, number in remaining:
        if subject != "all others":
            true = {name for name in unnamed if agrees(table.loc[name], predicate)}
            assert len(true) >= number, (predicate, text)
    if [subject for subject, *_ in remaining] == ["everything else"]:
        assert len(unnamed) == remaining[0][2], text


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
    all_options: list[Any] = [{"names": "auto"}, {"explain": True}, {"names": {}}]
    for options in all_options:
        assert "may have" not in repr(xckpt.compare(a, b, **options).ckpt)


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
