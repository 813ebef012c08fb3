"""``xckpt info``: the summary, and a JSON document with every tensor."""

from __future__ import annotations

import json
import struct
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import xckpt
from tests.formats.gguf_files import gguf_file, listed, text
from xckpt.cli import main
from xckpt.errors import CheckpointWarning, UnsupportedError
from xckpt.index import Index, Part, Shard, Tensor
from xckpt.storage import open_source

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace what opening a file gives: an index or an error."""

    def replace(result: Index | BaseException) -> None:
        def open_index(path: str, *_: Any, **__: Any) -> tuple[Any, Index]:
            assert path == "m.zt"
            if isinstance(result, BaseException):
                raise result
            warnings.warn("as the index says", CheckpointWarning, stacklevel=2)
            return open_source(b""), result

        monkeypatch.setattr("xckpt.opening.open_index", open_index)

    return replace


def test_info_prints_the_summary(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(checkpoint)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{xckpt.read_index(checkpoint)!r}\n"
    assert "model.layers.{0..3}.self_attn.q_proj.weight" in out.replace("{o,q}", "q")
    assert err == ""


def test_info_lists_all_patterns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, **{f"w_{'x' * n}": np.ones(n + 1, "f4") for n in range(40)})  # type: ignore[arg-type]
    assert main(["info", str(path)]) == 0
    assert "… 28 more tensors" in capsys.readouterr().out
    assert main(["info", str(path), "--all"]) == 0
    out = capsys.readouterr().out
    assert "more" not in out
    assert sum(line.startswith("  w_") for line in out.splitlines()) == 40


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


def test_json_holds_any_metadata(reads: Any, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_info_of_some_tensors(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    globs = ["--tensors", "*.q_proj.bias", "--tensors", "lm_head.w*"]
    assert main(["info", str(checkpoint), "--json", *globs]) == 0
    names = [tensor["name"] for tensor in json.loads(capsys.readouterr().out)["tensors"]]
    layers = [f"model.layers.{n}.self_attn.q_proj.bias" for n in range(4)]
    assert names == ["lm_head.weight", *layers]
    assert main(["info", str(checkpoint), *globs]) == 0
    out = capsys.readouterr().out
    assert "5 tensors" in out
    assert "do not belong to any tensor" not in out


def test_a_glob_that_matches_nothing(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(checkpoint), "--tensors", "lm_head.wieght"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "matches no tensor" in err
    assert "similar names: 'lm_head.weight'" in err


def test_an_engine_of_another_format(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(checkpoint), "--engine", "burnpack"]) == 1
    assert capsys.readouterr().err.startswith(f"xckpt: {checkpoint}: ")


@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize("flag", ["--storage-option", "-o"])
def test_storage_options_go_to_fsspec(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    received: dict[str, Any] = {}

    def open_index(path: str, engine: str | None, **options: Any) -> tuple[Any, Index]:
        received.update(options, path=path, engine=engine)
        return open_source(b""), Index("ztensor", "1.0", {})

    monkeypatch.setattr("xckpt.opening.open_index", open_index)
    options = ["anon=true", "key=a=b", 'client={"region": "x"}']
    flags = [word for option in options for word in (flag, option)]
    assert main(["info", "s3://b/m.zt", *flags]) == 0
    expected = {"anon": True, "key": "a=b", "client": {"region": "x"}}
    assert (received["path"], received["engine"]) == ("s3://b/m.zt", None)
    assert received["storage_options"] == expected
    err = capsys.readouterr().err
    assert ("-o KEY=VALUE is called --storage-option KEY=VALUE since" in err) == (flag == "-o")


def test_a_selection_is_a_part_of_the_model_in_the_file(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(checkpoint), "--exclude", "*.layers.3.*"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "4 layers" in first
    index = xckpt.read_index(checkpoint)
    count = sum(".layers.3." not in name for name in index)
    assert f"{count} of {len(index)} tensors" in second


class TestAttributes:
    """Attributes, whole and escaped."""

    TEMPLATE = "{% for m in messages %}\n  {{ m }}\x1b[31m\n" + "x" * 3000
    TOKENS: ClassVar = [f"token {n}" for n in range(5000)]

    @pytest.fixture
    def gguf(self, tmp_path: Path) -> str:
        attrs = {
            "general.architecture": text("llama"),
            "llama.block_count": struct.pack("<II", 4, 2),
            "tokenizer.chat_template": text(self.TEMPLATE),
            "tokenizer.ggml.tokens": listed(8, [text(token)[4:] for token in self.TOKENS]),
        }
        path = tmp_path / "m.gguf"
        path.write_bytes(gguf_file(attrs, [("w", (4,), 0, 0)], bytes(32)))
        return str(path)

    def test_all_are_whole(self, gguf: str, capsys: Any) -> None:
        assert main(["info", gguf, "--attrs"]) == 0
        lines = capsys.readouterr().out.splitlines()
        values = dict(line.split(": ", 1) for line in lines)
        assert [*values] == [*xckpt.read_index(gguf).attrs]
        assert json.loads(values["tokenizer.chat_template"]) == self.TEMPLATE
        assert json.loads(values["tokenizer.ggml.tokens"]) == self.TOKENS
        assert main(["info", gguf, "--attrs", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokenizer.ggml.tokens"] == self.TOKENS

    def test_one(self, gguf: str, capsys: Any) -> None:
        assert main(["info", gguf, "--attr", "llama.block_count"]) == 0
        assert capsys.readouterr().out == "2\n"
        assert main(["info", gguf, "--attr", "tokenizer.chat_template"]) == 0
        assert capsys.readouterr().out == self.TEMPLATE.replace("\x1b", "\\x1b") + "\n"
        assert main(["info", gguf, "--json", "--attr", "tokenizer.chat_template"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document == {"tokenizer.chat_template": self.TEMPLATE}

    def test_an_unknown_one_suggests_another(self, gguf: str, capsys: Any) -> None:
        assert main(["info", gguf, "--attr", "llama.blockcount"]) == 2
        assert "similar names: 'llama.block_count'" in capsys.readouterr().err

    def test_names_are_escaped(self, tmp_path: Path, capsys: Any) -> None:
        path = tmp_path / "m.npz"
        xckpt.save(xckpt.open({"w": np.ones(3)}).assign_attrs({"a\x1b[2J\n: b": 1}), path)
        assert main(["info", str(path), "--attrs"]) == 0
        assert capsys.readouterr().out == "a\\x1b[2J\\n: b: 1\n"
