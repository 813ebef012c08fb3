"""What an index is, is the same for stacking, folding, trees of modules and pictures."""

from __future__ import annotations

import pytest

from xckpt.labels.stacking import flat_names, is_index, numbered, numbered_modules, stack
from xckpt.notebook.folding import Row, families_of
from xckpt.notebook.modules import ModuleTree
from xckpt.notebook.summary import sizes_table
from xckpt.plots.treemap import _tree

INDICES = ["0", "7", "10", "00", "007", "9" * 18]
WORDS = ["", "w1", "-1", "1e3", "²", "٣", "\uff13", "0x1", "9" * 19, "9" * 5000]


def rows(*names: str) -> list[Row]:
    return [Row(name, "float32", (2,), 8) for name in names]


@pytest.mark.parametrize("component", INDICES + WORDS)
def test_all_agree_on_what_an_index_is(component: str) -> None:
    expected = component in INDICES
    assert is_index(component) is expected
    # Next to it another one of the same form, so that both can be one.
    other = component[:-1] + "8" if expected else component + "x"
    names = [f"layers.{component}.w", f"layers.{other}.w"]
    found = numbered(names[0].split("."))
    assert found.indices == ((component,) if expected else ())
    assert bool(stack(dict.fromkeys(names, 0))) is expected
    assert numbered_modules(names[:1]) == (["layers"] if expected else [])
    assert ("layers.*.w" in str(_tree(rows(*names)))) is expected
    assert len(ModuleTree(rows(*names), 3)._root.children["layers"].children) == 2 - expected
    (layer,) = sizes_table(rows(names[0]), "layer").index
    assert layer == (f"layers.{component}" if expected else "")
    assert len(families_of(rows(*names))) == 2 - expected


def test_only_some_modules() -> None:
    found = numbered(["layers", "1", "experts", "2", "w"], {"experts"})
    assert found.template == ("layers", "1", "experts", None, "w")
    assert (found.bases, found.indices) == (("experts",), ("2",))


def test_an_index_that_stands_first_or_after_another() -> None:
    assert numbered(["0", "1", "w"]).bases == ("index", "index")
    assert numbered(["a", "0", "1"]).bases == ("a", "a")


def stacked(*names: str) -> list[tuple[tuple[int, ...], list[str]]]:
    found = stack(dict.fromkeys(names, 0))
    for each in found:
        assert flat_names(each.template, each.indices) == list(each.members)
    return [(each.indices[0], list(each.members)) for each in found]


@pytest.mark.parametrize("numbers", [range(12), range(98, 102), range(7, 10)])
def test_numbers_of_one_width_are_one_stack(numbers: range) -> None:
    names = [f"h.{number:02}.w" for number in numbers]
    assert stacked(*names) == [(tuple(numbers), names)]


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        (["0", "00", "1", "01"], [(0, 1), (0, 1)]),
        (["1", "01", "001"], []),
        (["09", "10", "11", "012"], [(10, 11)]),
        (["08", "09", "1"], [(8, 9)]),
        (["08", "09", "10", "011", "012"], [(8, 9), (11, 12)]),
    ],
)
def test_a_number_that_is_spelled_in_two_ways_is_never_mixed_up(
    spelled: list[str], expected: list[tuple[int, ...]]
) -> None:
    assert [indices for indices, _ in stacked(*(f"h.{text}.w" for text in spelled))] == expected


def test_zeros_along_one_of_two_axes() -> None:
    names = [f"h.{layer}.e.{expert:03}.w" for layer in range(2) for expert in range(3)]
    (found,) = stack(dict.fromkeys(names, 0))
    assert found.shape == (2, 3)
    assert flat_names(found.template, found.indices) == names
