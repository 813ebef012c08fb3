"""An option has one name, text and meaning in functions, methods, pictures and commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import numpy as np
import pytest

import xckpt
from tests.option_table import page, surfaces
from xckpt.cli import commands, main
from xckpt.options import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

SELECTING = ("tensors", "exclude", "only")
OF_ONE = "one tensor is named"
OF_ALL = "all tensors are needed: find() selects before"
OF_RESULT = "a result has its tensors"
# Why a function, method, picture or command does not take an option.
LACKING: dict[str, dict[str, str]] = {
    "xckpt.": {
        **dict.fromkeys(("append", "save"), "tensors= in find() or open() before"),
        "join_optimizer": OF_ALL,
        "resize_adapter": OF_ALL,
        "read_index": "a header is read, and an Index is a mapping",
        "table": OF_RESULT,
    },
    "ds.ckpt.": {
        **dict.fromkeys(("adapters", "updates", "merge", "plain", "explore"), OF_ALL),
        **dict.fromkeys(("by", "table"), OF_RESULT),
        **dict.fromkeys(("by_base_id", "param_key"), OF_ONE),
        **dict.fromkeys(("sel", "isel", "stack", "unstack"), "modules are selected"),
        "save": "tensors= in find() before",
    },
    "ds.ckpt.plot.": dict.fromkeys(("heatmap", "spectrum"), OF_ONE),
    "xckpt": {},
    "xarray.open_dataset": {},
}
READING = {
    "xckpt.": "append compare convert extract_adapter findings histogram manifest report save "
    "spectrum stats verify",
    "ds.ckpt.": "compare findings histogram manifest report save spectrum stats",
    "xckpt": "compare convert extract manifest report spectrum stats verify",
}
CACHED = {"xckpt.": "compare findings histogram report spectrum stats"}
CACHED |= {"ds.ckpt.": CACHED["xckpt."], "xckpt": "compare report spectrum stats verify"}


@pytest.mark.parametrize("option", SELECTING)
@pytest.mark.parametrize("kind", LACKING)
def test_tensors_are_selected_by_one_name_and_text_wherever_there_are_several(
    kind: str, option: str
) -> None:
    assert {n for n, has in surfaces()[kind].items() if option not in has} == set(LACKING[kind])


@pytest.mark.parametrize(("option", "expected"), [("progress", READING), ("cache", CACHED)])
def test_calls_that_read_elements_take_the_options_of_a_scan(
    option: str, expected: dict[str, str]
) -> None:
    found = {
        kind: " ".join(sorted(name for name, has in named.items() if option in has))
        for kind, named in surfaces().items()
    }
    assert {kind: names for kind, names in found.items() if names} == expected


def test_an_option_of_one_name_has_one_text() -> None:
    others = {
        (kind + name, option)
        for kind, named in surfaces().items()
        for name, options in named.items()
        for option in options
        if "of its own" in option
    }
    # Blocks of a matrix, not of a table.
    assert others == {("ds.ckpt.plot.heatmap", "columns of its own")}


def test_the_page_on_options_is_current() -> None:
    text = (Path(__file__).parents[1] / "docs/options.md").read_text("utf-8")
    assert text == f"{page()}\n", "python -m tests.option_table > docs/options.md"


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
    ds, compare, load = xckpt.open("m.npz"), cast("Any", xckpt.compare), cast("Any", xckpt.open)
    ckpt = cast("Any", ds.ckpt)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: load("m.npz", format="npz"), "did you mean 'engine'"),
        (lambda: ckpt.find(type="f4"), "did you mean 'dtype'"),
        (lambda: ckpt.stats(by="layer"), r"result\.ckpt\.by\('layer'\)"),
        (lambda: ckpt.stats(layers=1), r"ds\.ckpt\.sel\(layers=1\)"),
        (lambda: ckpt.save("x.npz", tensors="*.q"), r"ds\.ckpt\.find\(tensors="),
        (lambda: compare("m.npz", "m.npz", "m.npz"), "takes 2 positional arguments, not 3"),
    ]
    for call, hint in calls:
        with pytest.raises(TypeError, match=hint):
            call()


GUESSES: dict[str, tuple[Callable[[Any], object], str]] = {
    "sizes of groups": (lambda ds: ds.ckpt.footprint(by="layer"), r"ds\.ckpt\.summary\('layer'\)"),
    "pictures of groups": (
        lambda ds: ds.ckpt.plot.layers(by="role"),
        r"\.plot\.by\('std', 'role'\)",
    ),
    "bins": (lambda ds: ds.ckpt.plot.histogram(nbins=3), "did you mean 'bins'"),
    "sort": (lambda ds: ds.ckpt.stats().ckpt.sort("std"), r"\.ckpt\.table\(sort='std', limit=10\)"),
    "top": (lambda ds: ds.ckpt.spectrum(top=3), r"result\.ckpt\.table\(limit=3\)"),
    "rows": (lambda ds: ds.ckpt.summary(limit=3), r"\.head\(3\)"),
    "atol": (lambda ds: ds.ckpt.compare("m.npz", atol=0.1), r"fail_above=\{'max_abs': 0.1\}"),
    "a path": (lambda _: xckpt.table("m.npz"), r"xckpt\.table\(xckpt\.stats\('m\.npz'\)\)"),  # type: ignore[arg-type]
    "dim": (lambda ds: ds.ckpt.stats(dim="out"), "dimensions are 'd4_1', 'd4_2'"),
    "dim of a pair": (lambda ds: ds.ckpt.compare("m.npz", dim="out"), "dimensions are 'd4_1'"),
    "rename": (
        lambda _: cast("Any", xckpt.convert)("m.npz", "n.npz", rename=("a", "b")),
        "did you mean 'names'.*pairs of a regular expression",
    ),
    "metadata": (
        lambda _: cast("Any", xckpt.convert)("m.npz", "n.npz", metadata={}),
        "did you mean 'set_attrs'",
    ),
    "findings": (
        lambda _: cast("Any", xckpt.verify)("m.npz", findings=True),
        r"ds\.ckpt\.findings\(\)",
    ),
    "arrays": (lambda ds: ds.ckpt.to_numpy(), r"\{name: v\.values for name, v in ds\.items\(\)\}"),
    "torch": (lambda ds: ds.ckpt.to_torch(), r"torch\.from_numpy\(v\.values\)"),
    "merge": (lambda _: cast("Any", xckpt).merge, r"\.ckpt\.merge"),
    "resize": (lambda _: cast("Any", xckpt).resize, r"xckpt\.resize_adapter"),
    "size": (lambda ds: ds.ckpt.stats().ckpt.table(sort="size"), "did you mean 'nbytes'"),
    "size of a model": (lambda ds: ds.ckpt.table(sort="size"), r"ds\.ckpt\.stats\(\)\.ckpt\.table"),
    "rule": (lambda ds: ds.ckpt.findings("nan"), "'nan' is a rule.*ignore="),
    "attributes": (
        lambda _: cast("Any", xckpt.read_index("m.npz")).metadata,
        r"did you mean \.attrs",
    ),
    "shapes": (lambda _: cast("Any", xckpt.read_index("m.npz")).shapes, r"did you mean \.tensors"),
    "column": (lambda ds: ds.ckpt.stats().ckpt.table(sort="xyzzy"), "columns are "),
}


@pytest.mark.parametrize("name", GUESSES)
def test_a_guess_is_answered_with_the_call_that_works(name: str) -> None:
    guess, call = GUESSES[name]
    with pytest.raises((TypeError, ValueError, AttributeError), match=call):
        guess(xckpt.open("m.npz"))


def test_rows_of_a_table_are_arranged_as_by_commands() -> None:
    result = xckpt.stats("m.npz")
    frame = result.ckpt.table()
    largest = result.ckpt.table(["std", "tensor"], sort="std", limit=2)
    assert list(largest.index) == list(frame.nlargest(2, "std").index)
    assert list(largest) == ["std"]
    assert result.ckpt.table("all").equals(frame)
    assert list(result.ckpt.table(sort="name").index) == sorted(frame.index)
    by_layer = result.ckpt.by("layer").ckpt.table(sort="layer", limit=1)
    assert list(by_layer.index) == [0]
    assert list(result.ckpt.by("layer").ckpt.table(sort="layer", ascending=False).index) == [
        2,
        1,
        0,
    ]


def test_a_table_begins_with_the_column_to_sort_by() -> None:
    result = xckpt.stats("m.npz")
    assert next(iter(result.ckpt.table(sort="kurtosis"))) == "kurtosis"
    assert list(result.ckpt.by("layer").ckpt.table(sort="max"))[:2] == ["max", "tensors"]
    assert next(iter(result.ckpt.table(sort="nbytes"))) == "nbytes"


def save_run() -> None:
    Path("run").mkdir()
    for step in (1, 2):
        xckpt.convert("m.npz", f"run/step-{step}.npz")


COMMANDS = {
    "spectrum m.npz --top 3": "did you mean --limit?",
    "compare m.npz m.npz --tolerance 1e-3": "did you mean --fail-above MEASURE=VALUE?",
    "stats m.npz --group layer": "did you mean --by KEY,...?",
    "convert m.npz n.npz --format npz": "did you mean --to?",
    "steps run --sort loss": "xckpt stats 'run' --by step",
    "steps run --columns loss": "xckpt stats 'run' --by step",
    "stats m.npz --dim out": "dimensions are 'd4_1', 'd4_2', or positions such as -1",
    "stats m.npz --only weight": "'weights'",
    "footprint m.npz --fits 24": "did you mean '24GB'?",
    "convert m.npz n.npz --metadata a=b": "did you mean --set KEY=VALUE?",
    "manifest m.npz --check m.json": "did you mean xckpt verify 'm.npz' --manifest JSON?",
    "manifest m.npz --xyzzy": "it has -o, --output",
    "info m.npz --sort size": "xckpt stats 'm.npz' --sort nbytes",
    "stats m.npz --csv t.csv": "xckpt.stats('m.npz').ckpt.table().to_csv('new.csv')",
    "stats m.npz -o t.csv": "no option -o; --json > new.json writes a document",
    "compare m.npz m.npz --out t.txt": "no option --out; it prints to the standard output",
    "stats m.npz --sort size": "did you mean 'nbytes'?",
    "resize a.npz": "in Python: xckpt.resize_adapter(path, new)",
    "merge m.npz a.npz": "in Python: xckpt.open(path).ckpt.merge(adapter)",
    "compare m.npz m.npz --tensors layer.*": "in m.npz or m.npz; did you mean 'layers.*'?",
    "stats run --by layer": "run has several checkpoints: --by step,layer",
    "spectrum run": "run has several checkpoints: --by step",
    "convert m.npz n.npz --rename *.q q": "it takes REGEX NEW, where .* stands for the * of globs",
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_guessed_option_is_answered_with_the_one_that_works(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run()
    assert main(line.split()) == 2
    assert COMMANDS[line] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "is_run"), [(("step-1", "step-2"), True), (("one", "two"), False)], ids=str
)
def test_a_glob_of_folders_is_a_run_if_their_names_have_steps(
    names: tuple[str, str], is_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in names:
        Path("models", name).mkdir(parents=True)
        xckpt.convert("m.npz", f"models/{name}/model.npz")
    assert main(["stats", "models/*", "--by", "layer"]) != 0
    assert ("--by step,layer" in capsys.readouterr().err) is is_run


WORKING = (
    "stats m.npz --dim -1",
    "stats run --by step",
    "stats run --by step --by layer --sort layer",
    "stats run/step-* --by step,layer --sort step",
    "spectrum run --by step --limit 1",
    "compare m.npz m.npz --sort name --descending --all",
    "compare m.npz m.npz --columns tensor,rel_l2 --all",
    "report m.npz -o m.md --progress",
    "manifest m.npz -o m.json --no-progress",
    "verify m.npz --findings --no-cache",
)


@pytest.mark.parametrize("line", WORKING)
def test_an_option_has_one_name_in_all_commands(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run()
    assert main(line.split()) in {0, 1}
    out, err = capsys.readouterr()
    assert out or "wrote m." in err


def test_repeated_options_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    columns = "stats m.npz --columns std --columns max,min --by layer --by module --limit 1"
    assert main(columns.split()) == 0
    head = capsys.readouterr().out.splitlines()[0].split()
    assert head == ["layer", "module", "tensors", "std", "max", "min"]
    assert main(["stats", "m.npz", "--quantile", "0.1", "--quantile", "0.9"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[-2:] == ["q0.1", "q0.9"]
    renames = ["--rename", "^layers", "h", "--rename", r"^h\.(\d)", r"x\1"]
    assert main(["convert", "m.npz", "n.npz", *renames]) == 0
    assert [*xckpt.read_index("n.npz")][:2] == ["x0.q", "x0.mlp"]
    assert main(["compare", "m.npz", "n.npz", *renames]) == 0
    both = [("^layers", "h"), (r"^h\.(\d)", r"x\1")]
    assert not xckpt.compare("m.npz", "n.npz", names=both).ckpt.table()["status"].ne("same").any()
    xckpt.convert("m.npz", "again.npz", names=both)
    assert [*xckpt.read_index("again.npz")] == [*xckpt.read_index("n.npz")]


def test_a_renaming_without_a_match_warns(capsys: pytest.CaptureFixture[str]) -> None:
    match = r"regular expression 'nothere\.' matches none of the names of the 6 tensors"
    with pytest.warns(xckpt.CheckpointWarning, match=match):
        xckpt.convert("m.npz", "n.npz", names=("nothere.", "x."))
    with pytest.warns(xckpt.CheckpointWarning, match=match):
        xckpt.compare("m.npz", "n.npz", names=("nothere.", "x."))
    assert main(["convert", "m.npz", "cli.npz", "--rename", "nothere.", "x."]) == 0
    assert "'nothere.' matches none of the names" in capsys.readouterr().err


def test_tables_have_sizes_on_request() -> None:
    result = xckpt.stats("m.npz")
    assert "nbytes" not in result.ckpt.table()
    assert result.ckpt.table(sort="nbytes")["nbytes"].tolist() == [64] * 6
    facts = result.ckpt.table(["dtype", "shape", "nbytes"], limit=1)
    assert facts.iloc[0].tolist() == ["float32", (4, 4), 64]


def test_a_table_sorted_by_likeness_begins_with_the_largest_change() -> None:
    changed = {str(name): v.values for name, v in xckpt.open("m.npz").items()}
    changed["layers.1.q"] = -changed["layers.1.q"]
    xckpt.save(changed, "n.npz")
    result = xckpt.compare("m.npz", "n.npz")
    assert result.ckpt.table(sort="cosine").index[0] == "layers.1.q"
    assert result.ckpt.table(sort="cosine", ascending=False).index[0] != "layers.1.q"


def test_numbers_of_tokens_may_be_texts(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("8k", "8K", "8192"):
        assert xckpt.footprint("m.npz", context=text).attrs["context"] == 8192
    with pytest.raises(ValueError, match="context must be a number"):
        xckpt.footprint("m.npz", context="many")
    assert main(["footprint", "m.npz", "--context", "8k", "--json"]) == 0
    assert '"context": 8192' in capsys.readouterr().out


def test_a_singular_module_is_answered_with_the_plural() -> None:
    with pytest.raises(KeyError, match="did you mean 'layers'"):
        xckpt.open("m.npz").ckpt.sel(layer=1)


def test_findings_of_an_empty_selection_blame_the_selection() -> None:
    with pytest.warns(xckpt.CheckpointWarning, match="matches none"):
        ds = xckpt.open("m.npz", tensors="layer.*")
    [reason] = ds.ckpt.findings()["explanation"]
    assert reason == "the selection has none of the 6 tensors of the file"


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
