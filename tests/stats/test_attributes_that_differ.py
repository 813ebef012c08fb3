"""Attributes that differ between two checkpoints, and bounds of measures, in a comparison."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import xarray as xr

import xckpt
from xckpt.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Done(NamedTuple):
    exit_code: int
    output: str
    stdout: str


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[[list[str]], Done]:
    def run(arguments: list[str]) -> Done:
        capfd.readouterr()
        try:
            status = main(arguments)
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        texts = capfd.readouterr()
        return Done(status, texts.out + texts.err, texts.out)

    return run


W = np.arange(64, dtype=np.float32).reshape(8, 8)


def save(path: Path, attrs: dict[str, Any] | None = None, **tensor_attrs: Any) -> str:
    ds = xr.Dataset({"a.w": (("o", "i"), W, tensor_attrs)}, attrs=attrs or {})
    xckpt.save(ds, path)
    return str(path)


def sentences(a: Any, b: Any, **options: Any) -> list[str]:
    result = xckpt.compare(a, b, **options)
    assert result.ckpt.table()["status"].tolist() == ["same"]
    listed: list[str] = result.attrs.get("attributes", [])
    return listed


def test_attributes_of_files_that_differ(tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", {"lora_alpha": "16", "same": "x", "gone": "y"})
    b = save(tmp_path / "b.safetensors", {"lora_alpha": "32", "same": "x", "new": "z"})
    assert sentences(a, b) == [
        "lora_alpha is '16' in a, '32' in b",
        "gone is only in a: 'y'",
        "new is only in b: 'z'",
    ]
    assert sentences(a, a) == []
    assert sentences(a, b, ignore_attrs=True) == []
    assert sentences(a, {"a.w": W}) == []


@pytest.mark.parametrize("suffix", ["zt", "npz"])
def test_a_copy_in_another_format_has_no_differences(suffix: str, tmp_path: Path) -> None:
    attrs = {"number": 7, "float": 0.1, "list": [1, "two"], "text": "x", "map": {"a": {"b": 1.5}}}
    a = save(tmp_path / "a.safetensors", attrs)
    b = save(tmp_path / f"b.{suffix}", attrs)
    assert sentences(a, b) == []
    assert sentences(b, a) == []
    xckpt.convert(a, tmp_path / f"c.{suffix}")
    assert sentences(a, tmp_path / f"c.{suffix}") == []
    c = save(tmp_path / f"d.{suffix}", attrs | {"number": 8})
    assert sentences(a, c) == ["number is 7 in a, 8 in b"]


def test_what_only_describes_the_storage_is_no_difference(tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", {"format": "pt"})
    b = save(tmp_path / "b.safetensors", {"format": "np"})
    assert sentences(a, b) == []


def test_keys_of_gguf_and_lists_of_tokens(tmp_path: Path) -> None:
    keys = {"general.architecture": "llama", "llama.rope.freq_base": 10000.0}
    tokens = [f"token{n}" for n in range(2000)]
    a = save(tmp_path / "a.gguf", {**keys, "tokenizer.ggml.tokens": tokens})
    count = "[2,000 items]"
    other = {**keys, "llama.rope.freq_base": 5e5}
    b = save(tmp_path / "b.gguf", {**other, "tokenizer.ggml.tokens": [*tokens[:-1], "new"]})
    rope, listed = sentences(a, b)
    assert rope == "llama.rope.freq_base is 10000.0 in a, 500000.0 in b"
    ours, theirs = f"{count} (from 1,999: ['token1999'])", f"{count} (from 1,999: ['new'])"
    assert listed == f"tokenizer.ggml.tokens is {ours} in a, {theirs} in b"
    # Two formats have different keys.
    assert sentences(a, save(tmp_path / "c.safetensors", {"licence": "MIT"})) == []


def test_configs_key_by_key(tmp_path: Path) -> None:
    config = {"model_type": "llama", "rope_theta": 1e4, "text": {"heads": [1, 2]}}
    for side, changes in (("a", {}), ("b", {"rope_theta": 5e5, "text": {"heads": [1, 3]}})):
        (tmp_path / side).mkdir()
        save(tmp_path / side / "model.safetensors")
        text = json.dumps(config | changes | {"torch_dtype": side, "transformers_version": side})
        (tmp_path / side / "config.json").write_text(text)
    assert sentences(tmp_path / "a", tmp_path / "b") == [
        "config.rope_theta is 10000.0 in a, 500000.0 in b",
        "config.text.heads is [1, 2] in a, [1, 3] in b",
    ]
    assert sentences(tmp_path / "a", save(tmp_path / "bare.safetensors")) == []


def test_attributes_of_tensors_are_one_line_for_each_name(tmp_path: Path) -> None:
    for side in "ab":
        ds = xr.Dataset({f"{n}.w": ("i", W[0], {"note": side, "k": 1}) for n in range(9)})
        xckpt.save(ds, tmp_path / f"{side}.zt")
    result = xckpt.compare(tmp_path / "a.zt", tmp_path / "b.zt")
    assert result.attrs["attributes"] == ["note of 9 tensors, such as '0.w', is 'a' in a, 'b' in b"]


def test_hostile_names_and_values_are_escaped_and_bounded(
    tmp_path: Path, command: Callable[[list[str]], Done]
) -> None:
    attrs = {f"\x1b[31m<i>{n}": "x" * 10_000 for n in range(1500)}
    a, b = save(tmp_path / "a.safetensors", attrs), save(tmp_path / "b.safetensors")
    result = xckpt.compare(a, b)
    assert len(result.attrs["attributes"]) == 1000
    text, html = repr(result.ckpt), result.ckpt._repr_html_()
    assert "\x1b" not in text + html
    assert "<i>" not in html
    assert "attributes differ" in text
    assert "997 more" in text
    assert len(text) < 2000
    done = command(["compare", a, b])
    assert "\x1b" not in done.output
    assert len(done.output) < 2000


def test_the_command_fails_unless_attributes_are_ignored(
    tmp_path: Path, command: Callable[[list[str]], Done]
) -> None:
    a = save(tmp_path / "a.safetensors", {"lora_alpha": "16"})
    b = save(tmp_path / "b.safetensors", {"lora_alpha": "32"})
    done = command(["compare", a, b])
    assert done.exit_code == 1
    assert "1 attribute differs: lora_alpha is '16' in a, '32' in b" in done.output
    assert command(["compare", a, b, "--explain"]).exit_code == 1
    done = command(["compare", a, b, "--ignore-attrs"])
    assert (done.exit_code, "attribute" in done.output) == (0, False)
    done = command(["compare", a, b, "--json"])
    document = json.loads(done.stdout)
    assert document["same"]
    assert document["attributes"] == [
        {"name": "lora_alpha", "change": "changed", "a": "'16'", "b": "'32'"}
    ]


class TestBounds:
    @pytest.fixture
    def files(self, tmp_path: Path) -> list[str]:
        noise = np.random.default_rng(0).standard_normal((8, 8)).astype("f4")
        ours = {"same": W, "near": W, "far": W, "nan": W}
        theirs = {"same": W, "near": W + 1e-4 * noise, "far": W + noise, "nan": W.copy()}
        theirs["nan"][0, 0] = np.nan
        for name, tensors in (("a", ours), ("b", theirs)):
            xckpt.save(tensors, tmp_path / f"{name}.safetensors")
        return [str(tmp_path / f"{name}.safetensors") for name in "ab"]

    @pytest.mark.parametrize("compute", [True, False])
    def test_tensors_within_all_bounds_are_close(self, files: list[str], compute: bool) -> None:
        options: Any = {"compute": compute, "fail_above": {"rel_l2": 1e-3, "max_abs": 0.01}}
        result = xckpt.compare(*files, **options).compute()
        statuses = result.ckpt.table()["status"].to_dict()
        assert statuses == {"nan": "changed", "far": "changed", "near": "close", "same": "same"}
        assert result.attrs["status"][6] == "close"
        bounds = {"rel_l2": 1e-3, "max_abs": 1e-9}
        statuses = xckpt.compare(*files, fail_above=bounds).ckpt.table()["status"].to_dict()
        assert statuses["near"] == "changed"
        statuses = xckpt.compare(*files, fail_above={"nan": 1, "rel_l2": 0.1}).ckpt.table()[
            "status"
        ]
        assert statuses["nan"] == "close"

    def test_the_command_succeeds_if_all_are_close(
        self, files: list[str], command: Callable[[list[str]], Done]
    ) -> None:
        chosen = ["compare", *files, "--exclude", "far", "--exclude", "nan"]
        assert command(chosen).exit_code == 1
        done = command([*chosen, "--fail-above", "rel_l2=1e-3"])
        assert (done.exit_code, "2 tensors: 1 close" in done.output) == (0, True)
        done = command([*chosen, "--fail-above", "rel_l2=1e-3", "--json"])
        assert {"same": False, "close": True}.items() <= json.loads(done.stdout).items()
        strict = [*chosen, "--fail-above", "rel_l2=1e-3", "--fail-above", "max_abs=0"]
        assert command(strict).exit_code == 1
        explained = [*chosen, "--fail-above", "rel_l2=1e-3", "--explain"]
        assert command(explained).exit_code == 0

    @pytest.mark.parametrize(
        ("bound", "text"),
        [
            ("rel_l3=1", "similar names: 'rel_l2'"),
            ("sqnr_db=30", "falls as tensors differ more; there are nan, inf, max_abs"),
            ("rel_l2", "it takes MEASURE=VALUE"),
            ("rel_l2=small", "'small' is not a number"),
            ("rel_l2=-1", "a number of at least 0"),
        ],
    )
    def test_typos_are_answered(
        self, files: list[str], bound: str, text: str, command: Callable[[list[str]], Done]
    ) -> None:
        done = command(["compare", *files, "--fail-above", bound])
        assert done.exit_code == 2
        assert text in " ".join(done.output.split())

    def test_sentences_of_close_tensors(self, files: list[str]) -> None:
        from xckpt.statistics import comparison_lines

        table = xckpt.compare(*files, fail_above={"rel_l2": 1e-3}).ckpt.table()
        lines = [str(line) for line in comparison_lines(table)]
        assert "near is close" in lines
