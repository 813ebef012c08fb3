"""``xckpt.open`` and ``xckpt.report``, and hints after common mistakes."""

from __future__ import annotations

import copy
import operator
import os
import pickle
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sparse
import xarray as xr

import xckpt
from tests.formats import torch_files
from tests.storage.web_server import WebServer
from xckpt import accessor, plots
from xckpt.cli import main
from xckpt.entry import _INSTEAD

ARRAYS = {"embed": np.ones((4, 3), "f4"), "h.0.w": np.eye(3), "h.1.w": np.eye(3)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    xckpt.save(ARRAYS, "m.npz")
    xckpt.save(ARRAYS, "m.safetensors")
    return tmp_path


# --- open ----------------------------------------------------------------------------------------


def test_open_needs_no_engine(folder: Path) -> None:
    for name in ("m.npz", "m.safetensors"):
        expected = xr.open_dataset(name)
        for path in (name, folder / name, Path(name).read_bytes(), [name]):
            xr.testing.assert_identical(xckpt.open(path), expected)
    assert xckpt.open("m.npz").encoding["source"] == str(folder / "m.npz")
    assert xckpt.open("m.npz", "npz").ckpt.format == "npz"
    assert xckpt.open(xckpt.read_index("m.npz")).ckpt.format == "npz"


def test_open_detects_the_content() -> None:
    for name in ("without_ending", "wrong.safetensors"):
        shutil.copy("m.npz", name)
        assert xckpt.open(name).ckpt.format == "npz"


def test_open_takes_the_keywords_of_open_dataset() -> None:
    names = ("out", "in")
    ds = xckpt.open("m.npz", tensors="h.*", stack=True, dims={"*": names}, chunks={"h": 2})
    assert ds["h.w"].dims == ("h", "out", "in")
    assert ds["h.w"].chunksizes["h"] == (2,)
    with pytest.raises(TypeError, match="no option 'tensor'; did you mean 'tensors'"):
        xckpt.open("m.npz", tensor="h.*")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no option 'torch_dtype'; the result is lazy: ds\.astype"):
        xckpt.open("m.npz", torch_dtype="auto")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'device'; arrays are of numpy"):
        xckpt.open("m.npz", device="cpu")  # type: ignore[call-arg]


def test_open_takes_the_options_of_one_format() -> None:
    ds = xr.Dataset({"w": ("x", np.ones(3))})
    ds.ckpt.save("m.bpk")
    assert "w" in xckpt.open("m.bpk", layout=None)
    with pytest.raises(TypeError, match="'npz' has no option 'layout'"):
        xckpt.open("m.npz", layout=None)


@pytest.mark.parametrize(
    ("engine", "hint"),
    [
        ("safetensor", "did you mean 'safetensors'?"),
        ("pytorch", "did you mean 'torch'?"),
        ("pt", "did you mean 'torch'?"),
        ("zt", "did you mean 'ztensor'?"),
        ("nonsense", "known are: burnpack, flax"),
    ],
)
def test_an_unknown_engine_has_a_suggestion(engine: str, hint: str) -> None:
    for call in (xckpt.open, xckpt.references):
        with pytest.raises(ValueError, match=re.escape(hint)):
            call("m.npz", engine)


def test_save_of_a_path_names_convert() -> None:
    with pytest.raises(TypeError, match=r"xckpt\.convert writes a file in another format"):
        xckpt.save("m.npz", "new.npz")  # type: ignore[arg-type]


def test_open_makes_no_more_requests_than_an_engine() -> None:
    data = Path("m.npz").read_bytes()
    with WebServer(**{"a.npz": data, "b.npz": data}) as web:
        xr.open_dataset(f"{web.url}/a.npz", engine="npz")
        with_engine = len(web.requests)
        xckpt.open(f"{web.url}/b.npz")
        assert len(web.requests) == 2 * with_engine


def test_open_accepts_a_mapping_and_selects_and_stacks_its_arrays() -> None:
    ds = xckpt.open(ARRAYS)
    np.testing.assert_array_equal(ds["h.0.w"], ARRAYS["h.0.w"])
    xr.testing.assert_identical(xckpt.open(ARRAYS, stack=True), ds.ckpt.stack())
    assert list(xckpt.open(ARRAYS, tensors="h.*", exclude="h.0.*")) == ["h.1.w"]
    assert ds.ckpt.stack()["h.w"].dims == ("h", "d3_1", "d3_2")
    assert xckpt.open(ds) is ds
    options: dict[str, Any]
    for options in ({"engine": "npz"}, {"chunks": {}}, {"decode": False}):
        with pytest.raises(TypeError, match="a mapping is opened with tensors, exclude, only"):
            xckpt.open(ARRAYS, **options)


# --- report --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "obj",
    [
        lambda: "m.npz",
        lambda: Path("m.npz"),
        lambda: ARRAYS,
        lambda: xckpt.read_index("m.npz"),
        lambda: xckpt.open("m.npz"),
        lambda: xr.open_datatree("m.npz"),
    ],
    ids=["text", "path", "mapping", "index", "dataset", "tree"],
)
def test_report_accepts_every_kind_of_object(obj: Any) -> None:
    xckpt.report(obj(), "one.md", cache=False)
    assert "embed" in Path("one.md").read_text()
    xckpt.report(obj(), "two.md", {**ARRAYS, "embed": ARRAYS["embed"] * 2}, cache=False)
    assert "embed" in Path("two.md").read_text()
    with pytest.raises(FileExistsError):
        xckpt.report(obj(), "one.md")


# --- hints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "names"), _INSTEAD.items())
def test_errors_for_other_names_have_a_working_hint(call: str, names: str) -> None:
    for name in names.split():
        assert not hasattr(xckpt, name)
        with pytest.raises(AttributeError, match=re.escape(f"{name!r}; did you mean {call}?")):
            getattr(xckpt, name)
    names_of_a_session = {"xckpt": xckpt, "xarray": xr, "path": "m.npz", "ds": xckpt.open("m.npz")}
    eval(call, names_of_a_session)  # noqa: S307  our own text


def hint_of(error: BaseException) -> Any:
    """Evaluate the call in a message."""
    call = re.search(r"xckpt\.open\w*\('[^']*'\)", str(error))
    assert call is not None, str(error)
    return eval(call.group(), {"xckpt": xckpt})  # noqa: S307  our own text


@pytest.mark.parametrize(
    "names",
    [
        ["step-5.npz", "step-10.npz", "step-100.npz"],
        ["step-5.npz", "step-10.npz", "step-final.npz"],
        ["epoch=0-step=5.npz", "epoch=1-step=10.npz", "last.npz"],
        ["checkpoint-5/model.npz", "checkpoint-10/model.npz", "logs/events"],
        ["5.npz", "10.npz", "[best].npz"],
        ["odd [name]/step5.npz", "odd [name]/step10.npz"],
    ],
)
def test_the_folder_of_a_run(names: list[str]) -> None:
    run = Path("run", names[0]).parent if "odd" in names[0] else Path("run")
    for name in names:
        Path("run", name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("m.npz", Path("run", name))
    with pytest.raises(IsADirectoryError) as caught:
        xckpt.open(run)
    steps = [5, 10, 100] if "100" in names[-1] else [5, 10]
    has_last = "final" in names[-1]
    with pytest.warns(xckpt.CheckpointWarning, match="step-final") if has_last else nullcontext():
        assert hint_of(caught.value)["step"].values.tolist() == steps
        assert xckpt.open_steps(run)["step"].values.tolist() == steps
    assert main(["info", str(run)]) == 2


def test_shards_are_not_a_run() -> None:
    Path("run").mkdir()
    for number in (1, 2):
        shutil.copy("m.npz", f"run/model-{number:05}-of-00003.npz")
    with pytest.raises(xckpt.MissingShardError):
        xckpt.open("run")
    with pytest.raises(xckpt.MissingShardError):
        xckpt.open_steps("run")


def test_a_folder_of_deepspeed(folder: Path) -> None:
    for step in ("global_step5", "global_step10"):
        Path("run", step).mkdir(parents=True)
        # Without ZeRO, this file has the whole model.
        model = torch_files.checkpoint({"w": np.ones(2, "f4")})
        Path("run", step, "mp_rank_00_model_states.pt").write_bytes(model)
    Path("run/latest").write_text("global_step10\n")
    for path in ("run", "run/global_step10"):
        ds = xckpt.open(path)
        assert ds.encoding["source"] == str(folder / "run/global_step10")
        assert ds["w"].values.tolist() == [1, 1]


@pytest.mark.parametrize("latest", ["../..", "", "\0", "x" * 300, "global_step7", "/"])
def test_a_misleading_name_of_the_latest_step(latest: str) -> None:
    Path("run").mkdir()
    Path("run/latest").write_text(latest)
    with pytest.raises(IsADirectoryError, match="no checkpoint is in this folder"):
        xckpt.open("run")


def test_a_folder_with_folders() -> None:
    Path("pipeline/unet").mkdir(parents=True)
    Path("pipeline/scheduler").mkdir()
    shutil.copy("m.npz", "pipeline/unet/model.npz")
    with pytest.raises(IsADirectoryError) as caught:
        xckpt.open("pipeline")
    assert hint_of(caught.value).ckpt.format == "npz"


def test_the_parts_of_a_pipeline_in_each_step_are_suggested() -> None:
    for step in (9, 10):
        for part in ("text_encoder", "unet"):
            Path(f"run/checkpoint-{step}/{part}").mkdir(parents=True)
            shutil.copy("m.npz", f"run/checkpoint-{step}/{part}/model.npz")
    for call in (xckpt.open, xckpt.open_steps):
        with pytest.raises(IsADirectoryError) as caught:
            call("run")
        assert hint_of(caught.value).sizes["step"] == 2


def test_a_folder_with_files_and_folders_suggests_no_folder() -> None:
    Path("bad").mkdir()
    shutil.copy("m.npz", "bad/m.npz")
    with pytest.raises(IsADirectoryError, match=r"2 checkpoints are in this folder") as caught:
        xckpt.open(".")
    assert "bad" not in str(caught.value)


def test_a_folder_with_folders_of_other_files() -> None:
    Path("home/bin").mkdir(parents=True)
    Path("home/bin/tool").touch()
    with pytest.raises(IsADirectoryError, match=r"no files, and the folders 'bin': '.*home'$"):
        xckpt.open("home")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("meta-llama/Llama-3.1-8B", "is the model on the Hugging Face Hub meant"),
        ("meta-llama/Llama-3.1-8B", "'hf://meta-llama/Llama-3.1-8B'"),
        ("gpt2", "'hf://openai-community/gpt2'"),
        ("hf://gpt2", "'hf://openai-community/gpt2'"),
        ("hf://bert-base-uncased@main", "'hf://google-bert/bert-base-uncased@main'"),
        ("m", "did you mean 'm.npz'?"),
        ("n.npz", "did you mean 'm.npz'?"),
        ("m.npy", "did you mean 'm.npz'?"),
        ("", "the path is empty"),
    ],
)
def test_unopenable_names_have_a_hint(path: str, hint: str) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match=re.escape(hint)):
        xckpt.open(path)
    with pytest.raises((FileNotFoundError, ValueError), match=re.escape(hint)):
        xckpt.stats(path)


def test_a_path_without_anything_like_it_has_no_hint() -> None:
    Path("other").mkdir()
    for path in ("nonexistent", "other/nonexistent", "no/such/folder"):
        with pytest.raises(FileNotFoundError) as caught:
            xckpt.open(path)
        assert caught.value.strerror == os.strerror(2)


def test_a_missing_folder_behind_a_url() -> None:
    with pytest.raises(FileNotFoundError, match="memory://folder_of_files"):
        xckpt.open("memory://folder_of_files")


@pytest.mark.parametrize(
    ("call", "error", "hint"),
    [
        (lambda ds: ds.ckpt["h.*.w"], KeyError, "ds.ckpt.find('h.*.w') chooses what matches"),
        (lambda ds: ds.ckpt["h.0"], KeyError, "ds.ckpt.find('h.0.*') chooses its tensors"),
        (lambda ds: ds.ckpt["embd"], KeyError, "similar names: 'embed'"),
        (lambda ds: ds.ckpt["x.*"], KeyError, "no tensor 'x.*' among 3"),
        (lambda ds: ds.ckpt[["embed"]], TypeError, "ds.ckpt.find takes several"),
        (lambda ds: ds.ckpt.stat(), AttributeError, "did you mean .ckpt.stats?"),
        (lambda ds: ds.ckpt.info(), AttributeError, "did you mean .ckpt.summary()?"),
        (lambda ds: ds.ckpt.hist(), AttributeError, "did you mean .ckpt.plot.histogram?"),
        (lambda ds: ds.ckpt.filter("x"), AttributeError, "did you mean .ckpt.find?"),
        (lambda ds: ds.ckpt.nonsense, AttributeError, "it has format, summary, "),
        (lambda ds: ds.ckpt.plot(), TypeError, "choose a picture: .plot.layers(), "),
        (lambda ds: ds.ckpt.plot("embed", bins=3), TypeError, "choose a picture: .plot.layers(), "),
        (lambda ds: ds.ckpt.plot.hist(), AttributeError, "did you mean .plot.histogram?"),
        (lambda ds: ds.ckpt.plot.layer(), AttributeError, "did you mean .plot.layers?"),
        (lambda ds: ds.ckpt.plot.nonsense(), AttributeError, "it has layers, histogram, "),
    ],
)
def test_common_first_mistakes_have_hints(call: Any, error: type[Exception], hint: str) -> None:
    for opened in (xckpt.open("m.npz"), xr.open_datatree("m.npz")):
        with pytest.raises(error, match=re.escape(hint)):
            call(opened)


@pytest.mark.parametrize(
    ("owner", "synonyms"), [("ckpt", accessor._INSTEAD), ("ckpt.plot", plots._PICTURES)]
)
def test_misspelled_attributes_have_hints(owner: str, synonyms: dict[str, str]) -> None:
    obj = operator.attrgetter(owner)(xckpt.open(ARRAYS))
    last = owner.rpartition(".")[2]
    for meant, words in synonyms.items():
        assert callable(operator.attrgetter(meant.partition("(")[0].partition(".to")[0])(obj))
        for word in words.split():
            with pytest.raises(AttributeError, match=re.escape(f"did you mean .{last}.{meant}?")):
                getattr(obj, word)


def test_missing_attributes_raise_attribute_errors() -> None:
    ds = xckpt.open("m.npz")
    for obj in (ds.ckpt, ds.ckpt.plot):
        assert not hasattr(obj, "_repr_png_")
        assert not hasattr(obj, "nonsense")
        assert copy.copy(obj) is not obj
        assert pickle.loads(pickle.dumps(obj)) is not obj


# --- the command line ----------------------------------------------------------------------------


def test_a_file_alone_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "m.npz"]) == 0
    expected = capsys.readouterr()
    assert main(["m.npz"]) == 0
    assert capsys.readouterr() == expected
    assert main(["m.npz", "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")
    Path("no_ending").write_bytes(Path("m.npz").read_bytes())
    assert main(["no_ending"]) == 0


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("inof", "; did you mean 'xckpt info'?"),
        ("diff", "; did you mean 'xckpt compare'?"),
        ("findings", "; did you mean 'xckpt stats --findings'?"),
        ("help", "; did you mean 'xckpt --help'?"),
        ("nonexistent", ""),
    ],
)
def test_an_argument_that_is_neither_command_nor_file(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "m.npz"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"xckpt: {word!r} is neither a command nor a file{hint}"


def test_hints_on_the_command_line_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2/"]) == 2
    assert "'xckpt hf://openai-community/gpt2' opens" in capsys.readouterr().err
    assert main(["none.npz"]) == 2


def test_sparse_chunks_without_sparse_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense arrays of the same file need no extra."""
    dense = np.diag(np.arange(1.0, 4.0))
    stored = sparse.COO.from_numpy(dense)
    xckpt.save(xr.Dataset({"w": (("r", "c"), stored)}), tmp_path / "m.zt")
    monkeypatch.setitem(sys.modules, "sparse", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'xckpt[sparse]'")):
        xckpt.open(tmp_path / "m.zt", sparse=True)
    np.testing.assert_array_equal(xckpt.open(tmp_path / "m.zt")["w"], dense)
