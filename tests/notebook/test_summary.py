"""The summary reads well, fits, and hides nothing, whatever the file."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.notebook.checkpoints import gpt2, mixture_of_experts, resnet, row
from tests.notebook.rendering import render_text
from xckpt.errors import CheckpointError, UnsupportedError
from xckpt.formatting import columns
from xckpt.index import Index, Part, Shard, Tensor
from xckpt.notebook.summary import index_summary, new_summary
from xckpt.tensor_rows import Row, storage_words

if TYPE_CHECKING:
    from collections.abc import Iterable

TIMES = "\N{MULTIPLICATION SIGN}"
NAMES = st.text(st.characters() | st.sampled_from(".0123{}"), max_size=200)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def text_of(rows: Iterable[Row], **more: Any) -> str:
    facts = {"title": "m.zt", "format": "ztensor", "version": "1.0", "attrs": {}}
    return render_text(new_summary(rows, **facts | more))


def dense(
    name: str,
    dtype: str = "float32",
    nbytes: int = 16,
    shape: tuple[int, ...] = (4,),
    problem: CheckpointError | None = None,
    offset: int = 64,
) -> Tensor:
    return Tensor(name, dtype, shape, {"data": Part(dtype, shape, offset, nbytes)}, problem=problem)


def index_of(*tensors: Tensor, **more: Any) -> Index:
    return Index("ztensor", "1.0", {t.name: t for t in tensors}, source="/a/m.zt", **more)


def test_a_mixture_of_experts_reads_well() -> None:
    text = text_of(
        mixture_of_experts(),
        title="https://user:key@host/qwen-moe.zt?signature=1",
        format="ztensor",
        version="1.0",
        attrs={"license": "MIT", "n_layer": 64},
        dims={"layers": 64, "d5120": 5120},
        notes=["1 warning: version 1.1 is newer"],
    )
    assert text + "\n" == Path(__file__).with_name("mixture_of_experts.txt").read_text("utf-8")


def test_a_narrow_terminal_shows_names_titles_and_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    scheme = "compressed-tensors 8-bit, per channel"
    rows = [
        row(f"model.layers.{n}.mlp.down_proj.weight", "int8", 9000, 9000)._replace(dtype=scheme)
        for n in range(12)
    ]
    head, _, *lines = text_of(rows, title="quantised.zt").splitlines()
    assert head.startswith("<Checkpoint quantised.zt>  ztensor 1.0 · 12 tensors")
    rows_shown = [re.split("  +", line.strip()) for line in lines[-2:]]
    assert rows_shown == [
        [
            "model.layers.11.mlp.down_proj.",
            f"9000{TIMES}9000",
            "compressed-tensors 8-bit,",
            "77.2 MiB",
        ],
        ["weight", "per channel"],
    ]
    assert max(map(columns, lines)) <= 80


def test_shares_show_where_there_is_room() -> None:
    assert re.findall(r"[^ ]+ %$", text_of(gpt2()), re.MULTILINE) == [
        *("31.0 %", "22.8 %", "22.8 %", "17.1 %", "5.7 %", "0.6 %"),
        *("<0.1 %", "<0.1 %", "<0.1 %", "<0.1 %", "<0.1 %"),
    ]
    assert text_of(gpt2()).splitlines()[5].split() == [
        "h.{0..11}.mlp.c_fc.weight",
        f"{TIMES}12",
        f"768{TIMES}3072",
        "float32",
        *("108.0", "MiB"),
        *("22.8", "%"),
    ]


def test_numbers_ascend_where_sizes_are_equal() -> None:
    rows = [row(f"w{n}.x{n}", "float32", 9) for n in (1, 10, 11, 2)]
    assert [line.split()[0] for line in text_of(rows).splitlines()[2:]] == [
        f"w{n}.x{n}" for n in (1, 2, 10, 11)
    ]


def test_omitted_lines_are_counted() -> None:
    lines = text_of(resnet()).splitlines()
    assert lines[3:5] == [
        "  parameters  161 tensors  25.6 M elements   97.6 MiB  99.8 %",
        "  buffers     159 tensors  53.2 K elements  207.9 KiB   0.2 %",
    ]
    assert len(lines) == 6 + 12 + 1 + 4
    assert lines[18] == "  … 29 more patterns: 283 tensors, 3.2 MiB"
    lines = text_of(row(name, "float8_e5m2", 9) for name in "abcdefghijklmno").splitlines()
    assert lines[-1] == "  … 3 more tensors, 27 B"


def test_the_last_line_is_a_pattern_if_it_fits() -> None:
    lines = text_of(row(name, "int8", 9) for name in "abcdefghijklm").splitlines()
    assert lines[-1].split()[0] == "m"


def test_few_tensors_are_listed_one_by_one() -> None:
    names = [line.split()[0] for line in text_of(islice(gpt2(), 12)).splitlines()[4:]]
    assert sorted(names) == sorted(r.name for r in islice(gpt2(), 12))


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([], ["<Checkpoint m.zt>  ztensor 1.0 · 0 tensors · 0 params · 0 B · lazy"]),
        (
            [row("a", "float32")],
            [
                "<Checkpoint m.zt>  ztensor 1.0 · 1 tensor · 1 param · 4 B · lazy",
                "  float32 4 B (100 %)",
                "  a  scalar  float32  4 B  100 %",
            ],
        ),
        (
            [row("a", "float32", 0, 3), row("b", "int8", 0)],
            [
                "<Checkpoint m.zt>  ztensor 1.0 · 2 tensors · 0 params · 0 B · lazy",
                "  float32   int8",
                "  parameters  1 tensor  0 elements  0 B",
                "  buffers     1 tensor  0 elements  0 B",
                f"  a  0{TIMES}3  float32  0 B",
                "  b  0    int8     0 B",
            ],
        ),
    ],
)
def test_small_numbers_read_well(rows: list[Row], lines: list[str]) -> None:
    assert text_of(rows).split("\n") == lines


def test_an_incomplete_grid_shows() -> None:
    rows = [row(f"h.{i}.{j}", "int8", 3) for i in range(5) for j in range(5) if i != j]
    assert f"h.{{0..4}}.{{0..4}}  {TIMES}20 of 25  3  int8" in text_of(rows)


def test_the_repr_of_an_index_is_its_summary() -> None:
    index = index_of(dense("a"), attrs={"license": "MIT"})
    assert repr(index) == render_text(index_summary(index))
    assert repr(index).startswith("<Checkpoint m.zt>  ztensor 1.0 · 1 tensor · 4 params · 16 B")
    assert "license='MIT'" in repr(index)


def test_figures_of_an_index_add_up() -> None:
    rows = list(resnet())
    tensors = [dense(r.name, r.dtype, r.nbytes, r.shape, offset=at) for at, r in enumerate(rows)]
    summary = index_summary(index_of(*tensors))
    assert summary.count == len(rows)
    assert summary.nbytes == sum(r.nbytes for r in rows)
    assert sum(total.size for total in summary.groups) == sum(r.size for r in rows)
    assert sum(total.nbytes for total in summary.groups) == summary.nbytes
    buffers = sum(r.size for r in rows if "running_" in r.name or "num_batches" in r.name)
    assert summary.size == sum(r.size for r in rows) - buffers
    assert sum(t.count for t in summary.dtypes) == len(rows)
    assert sum(t.nbytes for t in summary.dtypes) == summary.nbytes
    assert [p.nbytes for p in summary.patterns] == sorted(
        [p.nbytes for p in summary.patterns], reverse=True
    )


def test_sparse_quantised_and_compressed_tensors_are_noted() -> None:
    packed = Part("float32", (4,), 64, 10, encoding="zstd-seekable")
    plain = Part("uint64", (4,), 64, 32)
    text = repr(
        index_of(
            Tensor("s", "float32", (4, 4), {"values": packed, "indices": packed}, "sparse_csr"),
            Tensor("c", "float32", (4, 4), {"values": plain, "coords": plain}, "sparse_coo"),
            Tensor("z", "float32", (4,), {"data": packed}),
            Tensor("q", "float32", (4,), {"data": plain, "scales": plain}, "quantized"),
            dense("d"),
        )
    )
    assert "float32 csr zstd" in text
    assert (
        "stored as: coo 64 B (1 tensor) · quantized 64 B (1 tensor) · csr zstd 20 B (1 tensor)"
        in text
    )


def test_an_unknown_layout_is_named() -> None:
    assert storage_words("lattice", ["zstd", None, "zstd-seekable", "lz4"]) == "lattice zstd lz4"
    assert storage_words("dense", [None]) == ""


def test_warnings_and_problems_are_noted_without_the_path() -> None:
    problem = UnsupportedError("unknown type 'f6'", path="/home/someone/m.zt", tensor="b")
    text = repr(
        index_of(dense("a"), dense("b", problem=problem), warnings=("odd offset", "newer version"))
    )
    assert "  error: 1 tensor cannot be read: 'b': unknown type 'f6'\n" in text
    assert "  note: 2 warnings, first: odd offset\n" in text
    assert "someone" not in text


def test_a_file_of_another_size_than_its_tensors_is_noted() -> None:
    index = index_of(dense("a", nbytes=1 << 20))
    assert "note" not in repr(replace(index, nbytes=(1 << 20) + 4096))
    assert "note: the file has 4.0 MiB: 3.0 MiB do not belong to any tensor" in repr(
        replace(index, nbytes=4 << 20)
    )
    shared = index_of(dense("a"), dense("b"), nbytes=20)
    assert "note: 1 tensor shares its bytes with another: 'b' is 'a'" in repr(shared)
    overlapping = index_of(dense("a"), dense("b", nbytes=21), nbytes=22)
    assert "note: the file has only 22 B: some tensors share their bytes" in repr(overlapping)
    assert "note" not in repr(replace(overlapping, shards={"s": Shard(9, None, ())}))


def test_shards_are_counted() -> None:
    index = index_of(dense("a"), shards={"s": Shard(9, None, ()), "t": Shard(9, None, ())})
    assert "ztensor 1.0 · 2 shards · 1 tensor ·" in repr(index)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("MIT", "'MIT'"),
        ("x" * 41, f"'{'x' * 40}'…"),
        ("a\n\u202eb", r"'a\n\u202eb'"),
        (b"\0", "1 byte"),
        ({"a": 1, "b": 2}, "{2 keys}"),
        ([1, 2.5, None, "a"], "[1, 2.5, None, 'a']"),
        ([[1]], "[1 item]"),
        (list(range(1000)), "[1,000 items]"),
        (True, "True"),
        (float("nan"), "nan"),
        pytest.param(2**20000, "integer of 20,001 bits", id="huge"),
        (object(), "object"),
    ],
)
def test_values_of_attributes_are_short(value: object, text: str) -> None:
    assert text_of([], attrs={"key": value}).splitlines()[1:] == [f"  attrs: key={text}"]


def test_many_attributes_are_counted() -> None:
    lines = text_of([], attrs={f"some_attribute_{i}": i for i in range(10_000)}).splitlines()
    assert len(lines) == 4
    shown = sum(line.count("=") for line in lines)
    assert lines[-1].endswith(f" · … {10_000 - shown:,} more")


@given(
    st.dictionaries(NAMES, st.lists(st.integers(0, 2**64), max_size=9).map(tuple), max_size=40),
    st.text(),
    st.text(),
    st.dictionaries(NAMES, VALUES, max_size=5),
    st.lists(st.text(), max_size=3),
)
def test_any_text_is_safe_to_print_and_fits(
    tensors: dict[str, tuple[int, ...]],
    dtype: str,
    title: str,
    attrs: dict[str, Any],
    notes: list[str],
) -> None:
    text = text_of(
        [Row(name, dtype, shape, len(name)) for name, shape in tensors.items()],
        title=title,
        format="ztensor",
        version=dtype,
        attrs=attrs,
        dims=dict.fromkeys(attrs, 2**64),
        notes=notes,
    )
    assert len(text.split("\n")) < 100
    for line in text.split("\n"):
        assert line.isprintable()
        assert columns(line) <= 120


def test_enormous_claims_do_not_overflow() -> None:
    shape = (2**63,) * 40
    summary = new_summary(
        [Row("a", "float32", shape, 0)],
        title="x" * 500,
        format="ztensor",
        version="9" * 500,
        attrs={},
        shards=10**6,
    )
    assert summary.size == 2 ** (63 * 40)
    text = text_of([Row("a", "float32", shape, 0)])
    assert "e+758 params" in text
    assert max(map(columns, text.splitlines())) <= 120
