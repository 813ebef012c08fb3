"""The command line: what it prints, where, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest

import xckpt
from xckpt.cli import main
from xckpt.errors import CheckpointWarning, UnsupportedError
from xckpt.index import Index, Part, Shard, Tensor
from xckpt.sample import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "m.zt", layers=2, width=16)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace what ``read_index`` does: give an index or raise an error."""

    def replace(result: Index | BaseException) -> None:
        def read_index(path: str) -> Index:
            assert path == "m.zt"
            if isinstance(result, BaseException):
                raise result
            warnings.warn("as the index says", CheckpointWarning, stacklevel=2)
            return result

        monkeypatch.setattr("xckpt.opening.read_index", read_index)

    return replace


def test_info_prints_the_summary(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(checkpoint)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{xckpt.read_index(checkpoint)!r}\n"
    assert "model.layers.{0,1}.self_attn.q_proj.weight" in out.replace("{q,o}", "q")
    assert err == ""


def test_info_as_json_has_every_tensor(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(checkpoint), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    index = xckpt.read_index(checkpoint)
    assert (document["format"], document["version"]) == ("ztensor", index.version)
    assert document["nbytes"] == checkpoint.stat().st_size
    assert document["attrs"] == index.attrs
    assert [t["name"] for t in document["tensors"]] == list(index.tensors)
    for shown in document["tensors"]:
        tensor = index.tensors[shown["name"]]
        assert shown["dtype"] == tensor.dtype
        assert shown["shape"] == list(tensor.shape)
        assert shown["layout"] == tensor.layout
        assert shown["nbytes"] == tensor.nbytes == sum(p["nbytes"] for p in shown["parts"].values())
        assert shown["offset"] == min(part.offset for part in tensor.parts.values())


def test_json_takes_whatever_a_file_says(reads: Any, capsys: pytest.CaptureFixture[str]) -> None:
    nested: Any = "deep"
    for _ in range(500):
        nested = [nested]
    data = Part("float32", (2,), 0, 8, encoding="zstd", digest="crc32c:1", shard="s")
    tensor = Tensor(
        "\ud800\u202e",
        "float32",
        (2,),
        {"data": data},
        attrs={"scale": float("inf")},
        dims=("x",),
        problem=UnsupportedError("no", path="/a/m.zt"),
    )
    attrs = {
        "nan": float("nan"),
        "bytes": b"\x00\xff",
        "big": 2**20000,
        "nested": nested,
        "map": {1: (None, True, 2**64)},
        "other": {1},
    }
    shards = {"s": Shard(99, None, ("s.zt",))}
    reads(Index("ztensor", "1.0", {tensor.name: tensor}, attrs, warnings=("w",), shards=shards))
    assert main(["info", "m.zt", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["attrs"]["nan"] == "nan"
    assert document["attrs"]["bytes"] == {"hex": "00ff"}
    assert int(document["attrs"]["big"], 16) == 2**20000
    assert document["attrs"]["map"] == {"1": [None, True, 2**64]}
    assert document["attrs"]["other"] == "{1}"
    assert document["warnings"] == ["w"]
    assert document["shards"] == {"s": {"size": 99, "digest": None}}
    assert document["tensors"] == [
        {
            "name": tensor.name,
            "dtype": "float32",
            "shape": [2],
            "layout": "dense",
            "order": "C",
            "nbytes": 8,
            "offset": None,
            "parts": {
                "data": {
                    "dtype": "float32",
                    "shape": [2],
                    "offset": 0,
                    "nbytes": 8,
                    "encoding": "zstd",
                    "digest": "crc32c:1",
                    "shard": "s",
                }
            },
            "dims": ["x"],
            "problem": "no",
            "attrs": {"scale": "inf"},
        }
    ]


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.zt"
    assert main(["info", str(path)]) == 1
    assert capsys.readouterr() == ("", f"xckpt: {path}: No such file or directory\n")


def test_a_file_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil\x1b[2J\n.txt"
    path.write_text("nothing of the kind")
    assert main(["info", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"xckpt: {tmp_path}")
    assert r"evil\x1b[2J\n.txt" in err
    assert err.count("\n") == 1


def test_an_error_without_words_is_named(reads: Any, capsys: pytest.CaptureFixture[str]) -> None:
    reads(ConnectionResetError())
    assert main(["info", "m.zt"]) == 1
    assert capsys.readouterr().err == "xckpt: ConnectionResetError\n"


def test_an_interrupt_is_quiet(reads: Any, capsys: pytest.CaptureFixture[str]) -> None:
    reads(KeyboardInterrupt())
    assert main(["info", "m.zt"]) == 130
    assert capsys.readouterr() == ("", "")


def test_other_errors_are_not_hidden(reads: Any) -> None:
    reads(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["info", "m.zt"])


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["info"], ["info", "a", "b"]])
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: xckpt")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"xckpt {xckpt.__version__}\n"


def run(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-W", "error", "-m", "xckpt", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        **more,
    )


def test_it_runs_as_a_module(checkpoint: Path) -> None:
    with run("info", str(checkpoint)) as process:
        out, err = process.communicate()
    assert out.startswith("<Checkpoint m.zt>")
    assert (err, process.returncode) == ("", 0)


def test_a_reader_that_leaves_early_is_no_news(checkpoint: Path) -> None:
    with run("info", str(checkpoint), "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_a_terminal_without_the_characters_gets_escapes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with run("info", str(checkpoint)) as process:
        out, err = process.communicate()
    assert r" \xb7 " in out
    assert (err, process.returncode) == ("", 0)
