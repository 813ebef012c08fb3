"""Configs of gpt.rs checkpoints: accepted forms and their meaning."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from tests.formats.gptrs_files import CHECKPOINT, GPT, indexed_file, inline_file
from tests.sources import CountingSource
from xckpt import formats
from xckpt.errors import FormatError

gptrs = formats.get("gptrs")


def config_of(config: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    index = gptrs.read(CountingSource(indexed_file([], config)))
    return dict(index.attrs), index.warnings


def test_tagged_configs() -> None:
    runtime = {"functional_overrides": {"attention": "force=flash"}}
    content = {"kind": "x", "config": {"n": [1, None]}, "runtime": runtime}
    assert config_of(json.dumps(content).encode()) == (content, ())
    assert config_of(b' {"kind": "x"}\n') == ({"kind": "x", "config": None}, ())
    assert config_of(b'{"kind":"x","kind":"y","config":3,"more":1}')[0] == {
        "kind": "y",
        "config": 3,
        "more": 1,
    }


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dropout": 0},
        {"more": [1]},
        {"kind": 3},
        {"functional_overrides": {}},
        {
            "functional_overrides": {
                "default": "",
                "forced": " force=x ",
                "nothing forced": "force=",
                "any case": "BenchMark",
                "size": "benchmark(cache=64)",
                "no size": "benchmark()",
                "spaces": "benchmark( cache=+1, )",
            }
        },
    ],
)
def test_bare_configs_of_a_gpt(more: dict[str, Any]) -> None:
    config = {**GPT, **more}
    expected = {"kind": "gpt", "config": config}
    encoded = json.dumps(config).encode()
    assert config_of(encoded) == (expected, ())
    assert gptrs.read(CountingSource(inline_file([], encoded))).attrs == expected


@pytest.mark.parametrize(
    "config",
    [
        *({**GPT, "vocab_size": count} for count in (7.0, -1, True)),
        *({**GPT, "mlp_ratio": count} for count in (4.5, None, "4")),
        *({k: v for k, v in GPT.items() if k != key} for key in GPT),
        *({**GPT, "dropout": chance} for chance in (None, "0.1", True)),
        {**GPT, "num_layers": 2**64},
        {**GPT, "functional_overrides": None},
        {**GPT, "functional_overrides": []},
        {**GPT, "functional_overrides": {"a": 1}},
        *(
            {**GPT, "functional_overrides": {"a": policy}}
            for policy in ("bogus", "Force=x", "Benchmark(cache=1)", "benchmark(cache=0)")
        ),
        {**GPT, "functional_overrides": {"a": f"benchmark(cache={2**64})"}},
        {**GPT, "functional_overrides": {"a": "benchmark(size=1)"}},
        {**GPT, "functional_overrides": {"a": "benchmark(cache=1"}},
        *({}, [], [GPT], None, 3, "gpt", {"kind": None, "config": {}}),
    ],
)
def test_configs_that_name_no_kind(config: Any) -> None:
    attrs, messages = config_of(json.dumps(config).encode())
    assert attrs == {"config": config}
    assert len(messages) == 1


@pytest.mark.parametrize(
    "config",
    [
        *(b"", b" ", b"{", b'{"kind":"x"}x', b'{"kind":"x"}\0', b"\xff", b'{"kind":"\xff"}'),
        *(b'{"kind":"x","config":NaN}', b"[Infinity]", b"[-Infinity]", b"[1e999]", b"nul"),
        *(b"\xef\xbb\xbf{}", b'["\\ud800"]', b'["\\uDC00x"]', b'["\n"]', "{}".encode("utf-16")),
        *(b"[" * 128 + b"]" * 128, b"[" * 100_000, b'{"a":' * 5000, b"9" * 5000),
    ],
)
def test_configs_that_are_not_json(config: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        config_of(config)
    assert (caught.value.rule, caught.value.offset) == ("ConfigJson", 16)
    assert len(str(caught.value)) < 400


def test_the_depth_and_the_surrogates_that_are_json() -> None:
    deep = b"[" * 127 + b"]" * 127
    assert config_of(deep)[0]["config"] == json.loads(deep)
    assert config_of(b'{"kind": "\\ud83d\\ude00"}')[0]["kind"] == "\U0001f600"


def test_a_config_beyond_the_limit() -> None:
    class Sparse(CountingSource):
        size = 1 << 40

        def __init__(self, data: bytes) -> None:
            super().__init__(data)
            self.size = 1 << 40

        def read(self, offset: int, nbytes: int) -> memoryview:
            assert nbytes <= 1 << 20
            return memoryview(self.data[offset : offset + nbytes].ljust(nbytes, b"\0"))

    with pytest.raises(FormatError, match="config has 4294967295 bytes"):
        gptrs.read(Sparse(CHECKPOINT + struct.pack("<II", 2, 2**32 - 1)))
