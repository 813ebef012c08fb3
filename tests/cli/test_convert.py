"""``xckpt convert``: options of the command and their effect on the new file."""

from __future__ import annotations

import json
import re
import struct
from typing import TYPE_CHECKING, Any

import pytest
import xarray as xr

import xckpt
from tests.formats.gguf_files import gguf_file, listed, text
from xckpt import formats
from xckpt.cli import main
from xckpt.opening import open_index

if TYPE_CHECKING:
    from pathlib import Path


def test_another_format_with_the_same_values(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "m.safetensors"
    dense = ["--tensors", "*.weight", "--tensors", "*.bias"]
    assert main(["convert", str(checkpoint), str(new), *dense]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"xckpt: {new}: safetensors, " in err
    with (
        xr.open_dataset(checkpoint, engine="ztensor", tensors=["*.weight", "*.bias"]) as old,
        xr.open_dataset(new, engine="safetensors") as written,
    ):
        assert set(written.variables) == set(old.variables)
        assert written.drop_attrs().equals(old.drop_attrs())


def test_how_tensors_are_stored(checkpoint: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.bin"
    options = [
        *("--to", "ztensor", "--option", "version=2", "--option", "alignment=4096"),
        *("--compression", "zstd", "--level", "3"),
        *("--encode", "*.bias", "compression=none,digest=sha256"),
        *("--encode", "*norm.weight", "dtype=float64"),
    ]
    assert main(["convert", str(checkpoint), str(new), *options]) == 0
    index = xckpt.read_index(new)
    assert index.version == "2"
    bias = index.tensors["model.layers.0.self_attn.q_proj.bias"].parts["data"]
    assert bias.encoding is None
    assert (bias.digest or "").startswith("sha256:")
    assert bias.offset % 4096 == 0
    weight = index.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert (weight.parts["data"].encoding or "").startswith("zstd")
    assert index.tensors["model.norm.weight"].dtype == "float64"


def test_the_json_document_lists_the_written_files(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.zt"
    assert main(["convert", str(checkpoint), str(new), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "source": str(checkpoint),
        "destination": str(new),
        "format": "ztensor",
        "version": "1.0",
        "nbytes": new.stat().st_size,
        "tensors": len(open_index(checkpoint, whole=False)[1].tensors),
        "recasts": [],
    }
    assert err == ""


def test_changes_of_form_are_printed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "m.safetensors")]) == 0
    err = capsys.readouterr().err
    assert "xckpt: warning: " in err
    assert "written dense" in err
    assert ".py" not in err


def test_an_existing_file_is_replaced_only_when_asked(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.zt"
    new.write_bytes(b"precious")
    assert main(["convert", str(checkpoint), str(new)]) == 2
    assert "replace it with --overwrite" in capsys.readouterr().err
    assert new.read_bytes() == b"precious"
    assert main(["convert", str(checkpoint), str(new), "--overwrite"]) == 0
    assert xckpt.read_index(new).format == "ztensor"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("new.xyz", [], "name the format with --to"),
        ("new.zt", ["--option", "version"], "'version' is not KEY=VALUE"),
        ("new.zt", ["--option", "verzion=2"], "no option 'verzion' for writing"),
        ("new.zt", ["--option", "version=7"], "expected '1.0' or '2'"),
        ("new.zt", ["--option", "alignment=big"], "alignment must be a whole number, not 'big'"),
        ("new.checkpoint", ["--option", "multi_shard=yes"], "multi_shard must be JSON"),
        ("new.zt", ["--level", "high"], "level must be a whole number, not 'high'"),
        ("new.zt", ["--level", "99"], "level 99 is not in 1 to 22"),
        ("new.zt", ["--dtype", "float99"], "'float99' is not an element type"),
        ("new.zt", ["--encode", "*.nothing", "dtype=float32"], "matches no tensor"),
        ("new.zt", ["--encode", "*", "size=3"], "'size' is not known"),
    ],
)
def test_wrong_options_write_nothing(
    name: str,
    options: list[str],
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / name), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert not list(tmp_path.iterdir())


def test_lossy_conversions_are_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.zt"
    arguments = ["convert", str(checkpoint), str(new), "--tensors", "*norm*", "--dtype", "bfloat16"]
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not new.exists()
    assert main([*arguments, "--cast", "allow"]) == 0
    assert {tensor.dtype for tensor in xckpt.read_index(new).tensors.values()} == {"bfloat16"}


def test_element_types_that_change_are_listed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.zt"
    options = ["--tensors", "*norm.weight", "--dtype", "f64", "--json"]
    assert main(["convert", str(checkpoint), str(new), *options[:-1]]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"xckpt: {new}: ztensor, ")
    assert any("tensors written as float64 (exact), 2.0 x larger" in line for line in lines[1:])
    assert main(["convert", str(checkpoint), str(new), *options, "--overwrite"]) == 0
    recasts = json.loads(capsys.readouterr().out)["recasts"]
    assert {recast["written"] for recast in recasts} == {"float64"}
    assert sum(recast["tensors"] for recast in recasts) == len(xckpt.read_index(new))


def test_several_files(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "m.safetensors"
    options = ["--tensors", "*.weight", "--max-shard-size", "5kB"]
    assert main(["convert", str(checkpoint), str(new), *options]) == 0
    assert f"{new}.index.json: safetensors" in capsys.readouterr().err
    assert len(list(tmp_path.glob("m-0*-of-*.safetensors"))) > 1
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["convert", str(checkpoint), str(tmp_path / "m.zt"), *options]) == 2
    assert "ztensor has no option 'max_shard_size'" in capsys.readouterr().err


def test_help_lists_writable_formats_only(capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", "--help"])
    listed = re.search(r"--to \[([^\]]*)\]", capsys.readouterr().out)
    assert listed is not None
    writable = {name for name in formats.names() if formats.get(name).can.types}
    assert set(re.sub(r"\s", "", listed[1]).split("|")) == writable


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "bflot16"], "did you mean 'bfloat16'"),
        (["--max-shard-size", "huge", "--to", "safetensors"], "number of bytes"),
        (["--to", "onnx"], "'onnx' is not one of 'burnpack', "),
        (["--tensors", "model.norm.wieght"], "similar names"),
    ],
)
def test_mistakes_have_status_2(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "new.zt"), *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_ambiguous_suffix_needs_a_format(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("new.bin", "new.txt"):
        assert main(["convert", str(checkpoint), str(tmp_path / name)]) == 2
        assert "name the format with --to" in capsys.readouterr().err


class TestEditing:
    """Names and attributes of a copy."""

    @pytest.fixture
    def gguf(self, tmp_path: Path) -> Path:
        attrs = {
            "general.architecture": text("llama"),
            "general.name": text("5"),
            "llama.block_count": struct.pack("<IH", 2, 4),
            "llama.rope.freq_base": struct.pack("<If", 6, 1e4),
            "llama.flag": struct.pack("<IB", 7, 1),
            "llama.widths": listed(4, [struct.pack("<I", 3)]),
        }
        path = tmp_path / "m.gguf"
        names = ("blk.0.attn_q.weight", "blk.1.attn_q.weight")
        tensors = [(name, (4,), 0, 32 * n) for n, name in enumerate(names)]
        path.write_bytes(gguf_file(attrs, tensors, bytes(64)))
        return path

    def test_attributes_keep_their_types(self, gguf: Path, tmp_path: Path) -> None:
        new = tmp_path / "new.gguf"
        changes = {
            "general.name": "7",
            "llama.block_count": "3",
            "llama.rope.freq_base": "500000",
            "llama.flag": "false",
            "llama.widths": "[4, 5]",
            "general.author": "a=b",
            "x.count": "12",
        }
        options = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        unset = ["--unset", "general.architecture"]
        assert main(["convert", str(gguf), str(new), *options, *unset]) == 0
        index, old = xckpt.read_index(new), xckpt.read_index(gguf)
        assert index.attrs == {
            "general.name": "7",
            "llama.block_count": 3,
            "llama.rope.freq_base": 500000.0,
            "llama.flag": False,
            "llama.widths": [4, 5],
            "general.author": "a=b",
            "x.count": 12,
        }
        assert old.attr_types.items() <= index.attr_types.items()
        assert old.attr_types["llama.block_count"] == "uint16"
        assert list(index.tensors) == list(old.tensors)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--set", "llama.block_count=many"], "llama.block_count' is a whole number"),
            (["--set", "llama.block_count=3.5"], "is a whole number, and 3.5"),
            (["--set", "llama.flag=1"], "true or false"),
            (["--set", "llama.widths=4"], "is a list"),
            (["--set", "llama.block_count"], "is not KEY=VALUE"),
            (["--unset", "llama.blockcount"], "similar names: 'llama.block_count'"),
            (["--set", "a=1", "--unset", "a"], "both set and unset"),
            (["--rename", r"blk\.\d", "blk"], "names maps both"),
            (["--rename", "(", ""], "--rename: '(' is not a regular expression"),
            (["--rename", "a", "b", "--names", "n.json"], "exclude each other"),
        ],
    )
    def test_invalid_edits_write_nothing(
        self, gguf: Path, tmp_path: Path, options: list[str], message: str, capsys: Any
    ) -> None:
        new = tmp_path / "new.gguf"
        assert main(["convert", str(gguf), str(new), *options]) == 2
        assert message in capsys.readouterr().err
        assert not new.exists()

    def test_names_change_by_a_regular_expression(self, gguf: Path, tmp_path: Path) -> None:
        new = tmp_path / "new.safetensors"
        assert main(["convert", str(gguf), str(new), "--rename", r"^blk\.(\d)", r"h.\1"]) == 0
        assert [*xckpt.read_index(new)] == ["h.0.attn_q.weight", "h.1.attn_q.weight"]

    def test_the_same_in_python(self, gguf: Path, tmp_path: Path) -> None:
        new = tmp_path / "new.gguf"
        xckpt.convert(
            gguf, new, names=("^blk", "h"), unset_attrs="llama.flag",
            set_attrs={"llama.block_count": 70000, "x": [1.5]},
        )  # fmt: skip
        index = xckpt.read_index(new)
        assert [*index] == ["h.0.attn_q.weight", "h.1.attn_q.weight"]
        assert index.attrs["llama.block_count"] == 70000
        assert index.attr_types.get("llama.block_count") is None  # more than a uint16 holds
        assert index.attrs["x"] == [1.5]
        assert "llama.flag" not in index.attrs
        with pytest.raises(ValueError, match="whole number"):
            xckpt.convert(gguf, tmp_path / "b.gguf", set_attrs={"llama.block_count": "x"})
