"""Warnings point at the line of the caller, and appear each time."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from inspect import currentframe
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.errors import CheckpointWarning, deprecated_name, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMES = ("embed", "h.0.attn.w", "h.1.attn.w")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warnings") / "m.safetensors"
    save(NAMES, path)
    return path


def save(names: tuple[str, ...], path: Path) -> None:
    arrays = {name: (("out", "in"), np.ones((2, 3), "f4")) for name in names}
    xckpt.save(xr.Dataset({**arrays, "text": ("x", ["a"])}).drop_vars("text"), path)


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield caught


def line() -> int:
    """Return the line of the caller."""
    frame = currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


CALLS: dict[str, Callable[[Any], Any]] = {
    "open_dataset": lambda path: xr.open_dataset(path, tensors="attn"),
    "open_dataset with an engine": lambda path: xr.open_dataset(
        path, engine="safetensors", tensors="attn"
    ),
    "open_datatree": lambda path: xr.open_datatree(path, tensors="attn"),
    "open_groups": lambda path: xr.open_groups(path, tensors="attn"),
    "open_mfdataset": lambda path: xr.open_mfdataset([path], tensors="attn"),
    "dims": lambda path: xr.open_dataset(path, dims={"attn": ["out"]}),
    "stack": lambda path: xr.open_dataset(path, stack="layers"),
    "stack in a tree": lambda path: xr.open_datatree(path, stack="layers"),
    "ckpt.find": lambda path: xr.open_dataset(path).ckpt.find("attn"),
    "ckpt.find in a tree": lambda path: xr.open_datatree(path).ckpt.find("attn"),
    "ckpt.stack": lambda path: xr.open_dataset(path).ckpt.stack("layers"),
    "ckpt.plain": lambda _: xr.Dataset({"a/b": ("x", [1.0])}).ckpt.plain(),
    "stats": lambda _: xckpt.stats(xr.Dataset({"a": ("x", ["text"]), "b": ("x", [1.0])})),
    "ckpt.stats": lambda _: xr.Dataset({"a": ("x", ["text"]), "b": ("x", [1.0])}).ckpt.stats(),
    "compare": lambda path: xckpt.compare(path, xr.Dataset({"other": ("x", [1.0])})),
    "spectrum": lambda path: xckpt.spectrum(path, minus=xr.open_dataset(path).drop_vars("embed")),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_warning_points_at_the_caller_each_time(
    path: Path, call: Callable[[Any], Any], caught: list[warnings.WarningMessage]
) -> None:
    for _ in range(2):
        call(path)
    assert [warning.filename for warning in caught] == [__file__] * 2
    first = call.__code__.co_firstlineno
    assert all(first <= warning.lineno <= first + 2 for warning in caught)
    assert {warning.category for warning in caught} == {CheckpointWarning}


def test_a_warning_points_at_the_notebook_cell(
    path: Path, caught: list[warnings.WarningMessage]
) -> None:
    cell = compile("import xarray as xr\n\nxr.open_dataset(path, tensors='attn')", "<cell>", "exec")
    for _ in range(2):
        exec(cell, {"__name__": "__main__", "path": path})  # noqa: S102  as notebooks do
    assert [(warning.filename, warning.lineno) for warning in caught] == [("<cell>", 3)] * 2


def test_a_warning_in_a_user_thread_points_at_its_code(
    path: Path, caught: list[warnings.WarningMessage]
) -> None:
    def run() -> None:
        xr.open_dataset(path, tensors="attn")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line() - 5)]


def test_a_warning_in_a_thread_without_user_code(
    path: Path, caught: list[warnings.WarningMessage]
) -> None:
    """The line is the one where the main thread waits."""
    ds = xr.open_dataset(path)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ds.ckpt.find, "attn").result()
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line() - 1)]


def test_filters_of_the_user_apply(path: Path) -> None:
    def count(action: Any) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action, CheckpointWarning)
            for _ in range(3):
                xr.open_dataset(path, tensors=f"attn.{action}")
        return len(caught)

    assert {action: count(action) for action in ("ignore", "always", "default", "once")} == {
        "ignore": 0,
        "always": 3,
        "default": 3,
        "once": 1,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointWarning, match="matches none"):
            xr.open_dataset(path, tensors="attn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
        xr.open_dataset(path, tensors="attn")
    assert not caught


def test_a_script_shows_its_own_line(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import xarray as xr\nfor _ in range(2):\n    xr.open_dataset({str(path)!r}, tensors='q')"
    )
    run = subprocess.run(  # noqa: S603  written above
        [sys.executable, script], capture_output=True, text=True, check=True
    )
    assert run.stderr.count(f"{script}:3: CheckpointWarning: ") == 2


def test_the_command_line_prints_one_line(path: Path, tmp_path: Path) -> None:
    save(("other",), tmp_path / "other.safetensors")
    args = ["-m", "xckpt", "compare", str(path), str(tmp_path / "other.safetensors")]
    run = subprocess.run(  # noqa: S603  our own
        [sys.executable, *args], capture_output=True, text=True, check=False
    )
    printed = [line for line in run.stderr.splitlines() if "arning" in line]
    assert len(printed) == 1
    assert printed[0].startswith("xckpt: warning: no tensor of a has the name of one of b")


# --- filters that match nothing ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "suggestion"),
    [
        (lambda path: xr.open_dataset(path, tensors="attn"), "did you mean '*attn*'?"),
        (lambda path: xr.open_dataset(path, tensors=["ATTN", "mlp"]), "did you mean '*attn*'?"),
        (lambda path: xr.open_dataset(path, tensors="h.0"), "did you mean 'h.0.*'?"),
        (lambda path: xr.open_dataset(path, tensors="atn"), "did you mean '*attn*'?"),
        (lambda path: xr.open_dataset(path, tensors="embd"), "similar names: 'embed'"),
        (lambda path: xr.open_dataset(path, tensors="h.*.atn.w"), "did you mean 'h.*.attn.w'?"),
        (lambda path: xr.open_dataset(path, dims={"attn": ["a"]}), "did you mean '*attn*'?"),
        (lambda path: xr.open_dataset(path).ckpt.find("attn"), "did you mean '*attn*'?"),
        (lambda path: xr.open_datatree(path).ckpt.find("attn"), "did you mean '*attn*'?"),
    ],
)
def test_a_filter_without_a_match_has_a_suggestion(
    path: Path,
    call: Callable[[Any], Any],
    suggestion: str,
    caught: list[warnings.WarningMessage],
) -> None:
    call(path)
    (warning,) = caught
    assert suggestion in str(warning.message)


def test_an_error_has_the_same_suggestion(path: Path) -> None:
    with pytest.raises(ValueError, match=r"did you mean '\*attn\*'\?"):
        xckpt.manifest(path, tensors="attn")


def test_one_shard_of_several_needs_no_match(tmp_path: Path) -> None:
    save(("embed",), tmp_path / "m-00001-of-00002.safetensors")
    save(("head",), tmp_path / "m-00002-of-00002.safetensors")
    shards = sorted(tmp_path.glob("*.safetensors"))
    source: Any
    for source in (shards, str(tmp_path / "m-*.safetensors")):
        ds = xr.open_dataset(source, engine="safetensors", tensors="head")
        assert list(ds.variables) == ["head"]


def test_an_iterator_of_globs_is_a_filter(path: Path) -> None:
    assert list(xckpt.open(path, tensors=iter(["embed"])).variables) == ["embed"]
    ds = xr.open_dataset(path, engine="safetensors", tensors=iter(["embed"]))
    assert list(ds.variables) == ["embed"]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Return a glob for three files, which have no tensor in common."""
    for number, name in enumerate(("embed", "head", "norm")):
        save((name,), tmp_path / f"m-{number}.safetensors")
    return str(tmp_path / "m-*.safetensors")


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("options", [{"tensors": "head"}, {"dims": {"head": ["out", "in"]}}])
def test_open_mfdataset_is_silent_if_one_file_has_a_match(
    shards: str, options: Any, caught: list[warnings.WarningMessage], *, parallel: bool
) -> None:
    ds = _open_unrelated(shards, parallel=parallel, **options)
    assert ds["head"].dims == ("out", "in")
    assert not caught


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("options", [{"tensors": "hed"}, {"dims": {"hed": ["rows", "columns"]}}])
def test_open_mfdataset_warns_once_if_no_file_has_a_match(
    shards: str, options: Any, caught: list[warnings.WarningMessage], *, parallel: bool
) -> None:
    for _ in range(2):
        _open_unrelated(shards, parallel=parallel, **options)
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert all("hed" in str(warning.message) for warning in caught)
    if "tensors" in options:
        assert all("similar names: 'head'" in str(warning.message) for warning in caught)


def test_open_mfdataset_warns_if_the_first_file_is_empty_and_ignores_damaged_files(
    shards: str, tmp_path: Path, caught: list[warnings.WarningMessage]
) -> None:
    with pytest.warns(CheckpointWarning, match="no tensors"):
        save((), tmp_path / "m-.safetensors")
    (tmp_path / "m-9.safetensors").write_bytes(b"damaged")
    ds = _open_unrelated(shards, tensors="head", errors="ignore")
    assert list(ds.variables) == ["head"]
    assert not caught
    _open_unrelated(shards, tensors="hed", errors="ignore")
    assert len(caught) == 1


def _open_unrelated(paths: str, **options: Any) -> xr.Dataset:
    return xr.open_mfdataset(
        paths, engine="safetensors", combine="nested", concat_dim=None, **options
    )


def test_steps_and_references_have_no_tensors_without_a_match(
    tmp_path: Path, caught: list[warnings.WarningMessage]
) -> None:
    for step in (1, 2):
        save(NAMES, tmp_path / f"step-{step}.safetensors")
    with pytest.raises(ValueError, match=r"did you mean '\*attn\*'"):
        xckpt.open_steps(tmp_path, tensors="attn")
    xckpt.open_steps(tmp_path, dims={"attn": ["out"], "embed": ["rows", "columns"]})
    xckpt.references(tmp_path / "step-1.safetensors", tensors="attn")
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line() - n) for n in (2, 1)]
    assert all("did you mean '*attn*'?" in str(w.message) for w in caught)


def test_dims_of_steps_match_stacks_and_tensors(
    tmp_path: Path, caught: list[warnings.WarningMessage]
) -> None:
    for step in (1, 2):
        save(NAMES, tmp_path / f"step-{step}.safetensors")
    for glob in ("h.attn.w", "h.*.w"):
        ds = xckpt.open_steps(tmp_path, stack=True, dims={glob: ["rows", "columns"]})
        assert ds["h.attn.w"].dims == ("step", "h", "rows", "columns")
    assert not caught


# --- names of earlier releases -------------------------------------------------------------------


def test_a_deprecated_name_warns(caught: list[warnings.WarningMessage]) -> None:
    for _ in range(2):
        deprecated_name("join=", "missing=", since="0.2")
    assert {(warning.filename, warning.category) for warning in caught} == {
        (__file__, FutureWarning)
    }
    text = "join= is called missing= since xckpt 0.2; the old name will be removed"
    assert [str(warning.message) for warning in caught] == [text] * 2


def test_warning_texts_have_one_line(caught: list[warnings.WarningMessage]) -> None:
    warn("a message")
    (warning,) = caught
    assert (warning.filename, str(warning.message)) == (__file__, "a message")
