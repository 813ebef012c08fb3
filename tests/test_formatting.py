"""Figures and names as text for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.formatting import (
    base_name,
    binary_size,
    columns,
    counted,
    printable,
    share,
    short_count,
    shortened,
    wrapped,
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (int(195.5 * 2**30), "195.5 GiB"),
        (2**60, "1.0 EiB"),
        pytest.param(10**4400, "1.0e+4400 B", id="huge"),
    ],
)
def test_binary_size(nbytes: int, text: str) -> None:
    assert binary_size(nbytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0 K"),
        (999_949, "999.9 K"),
        (999_950, "1.0 M"),
        (201_600_000_000, "201.6 B"),
        (2**126, "8.5e+37"),
    ],
)
def test_short_count(count: int, text: str) -> None:
    assert short_count(count) == text


@pytest.mark.parametrize(
    ("part", "total", "text"),
    [
        (0, 0, ""),
        (0, 5, "0 %"),
        (5, 5, "100 %"),
        (1, 10**9, "<0.1 %"),
        (10**9 - 1, 10**9, ">99.9 %"),
        (921, 1000, "92.1 %"),
    ],
)
def test_share(part: int, total: int, text: str) -> None:
    assert share(part, total) == text


def test_counted() -> None:
    assert [counted(n, "tensor") for n in (0, 1, 2, 1234)] == [
        "0 tensors",
        "1 tensor",
        "2 tensors",
        "1,234 tensors",
    ]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("m.zt", "m.zt"),
        ("/home/someone/secret project/m.zt", "m.zt"),
        ("C:\\Users\\someone\\m.zt", "m.zt"),
        ("a file?.zt", "a file?.zt"),
        ("https://host/a/m.zt?X-Signature=a/b#c", "m.zt"),
        ("https://user:password@host", "host"),
        ("s3://bucket/folder/", "folder"),
        ("memory://m.zt", "m.zt"),
        ("simplecache::https://host/m.zt?token=1", "m.zt"),
        ("zip://inner/m.zt::https://host/outer.zip?token=1", "m.zt"),
        ("", ""),
        ("a\x1b[31m.zt", r"a\x1b[31m.zt"),
    ],
)
def test_base_name_hides_folders_and_credentials(source: str, name: str) -> None:
    assert base_name(source) == name


@given(st.text())
def test_printable_text_shows_as_it_is(text: str) -> None:
    assert printable(text).isprintable()
    assert (printable(text) == text) == text.isprintable()


@pytest.mark.parametrize("hidden", ["\n", "\x1b", "\x9b", "\u202e", "\u2066", "\u200b", "\ud800"])
def test_characters_that_deceive_are_escaped(hidden: str) -> None:
    assert printable(f"a{hidden}b").isascii()


@given(st.text(), st.integers(0, 40))
def test_wrapped_text_fits_and_has_all_words(text: str, width: int) -> None:
    lines = wrapped(printable(text), width + 8, 10**6)
    assert all(columns(line) <= width + 8 for line in lines)
    if columns(text) == len(text):  # otherwise wide words are shortened
        assert "".join(lines).replace(" ", "") == printable(text).replace(" ", "")


def test_arguments_are_not_broken() -> None:
    lines = wrapped("one two three f(a, b, c) four", 20, 9)
    assert lines == ["one two three", "  f(a, b, c) four"]
    assert wrapped("one two three four five", 10, 2) == ["one two", "  three …"]


@given(st.text(), st.integers(0, 40))
def test_shortened_text_fits(text: str, width: int) -> None:
    text = printable(text)
    short = shortened(text, width)
    assert columns(short) <= width
    assert (short == text) == (columns(text) <= width)
    assert columns(short) >= min(width, columns(text)) - 2  # half of a wide character on each side
