"""Titles and legends: patterns, and the parts of names that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from xckpt.plots import series
from xckpt.plots.series import title_and_labels
from xckpt.structure import Described, Structure

if TYPE_CHECKING:
    from xckpt.structure.numbering import ParsedName


def taken_apart(names: list[str]) -> dict[str, ParsedName]:
    structure = Structure([Described(name, "float32", (4, 4)) for name in names])
    return {name: structure.parse(name) for name in names}


def series_of(names: list[str], *args: Any) -> Any:
    return series.series_of(taken_apart(names), *args)


def groups_of(names: list[str]) -> Any:
    return series.groups_of(taken_apart(names))


def outermost(names: list[str]) -> str | None:
    return series.outermost(taken_apart(names).values())


def names_of_a_mixture() -> list[str]:
    names = ["model.embed.weight", "lm_head.weight"]
    for layer in range(4):
        base = f"model.layers.{layer}"
        names += [f"{base}.self_attn.{word}_proj.{leaf}" for word in "qkvo" for leaf in ("w", "b")]
        experts = range(0 if layer < 1 else 16)
        names += [f"{base}.mlp.experts.{e}.{w}.w" for e in experts for w in ("gate", "up", "down")]
        names += [f"{base}.mlp.{word}.w" for word in ("gate", "up", "down") if layer < 1]
    return names


def test_a_title_is_the_pattern_of_the_summary() -> None:
    names = [f"layers.{n}.experts.{e}.w" for n in range(24) for e in range(256)]
    title, (role,) = series_of(names)
    assert title == role.label == "layers.{0..23}.experts.{0..255}.w"
    assert role.place("layers.17.experts.3.w") == "layer 17, expert 3"
    assert title_and_labels([groups_of(["wte.weight"])]) == ("wte.weight", ["wte.weight"])


def test_roles_are_the_parts_of_names_that_differ() -> None:
    names = [f"m.layers.{n}.{w}" for n in (0, 1, 2) for w in ("attn.w", "mlp.experts.5.w")]
    title, roles = series_of(names)
    assert title == "m.layers.{0..2}.*"
    assert [role.label for role in roles] == ["attn.w", "mlp.experts.5.w"]
    title, roles = series_of(["a.w", "b.w"])
    assert (title, [role.label for role in roles]) == ("*.w", ["a", "b"])
    title, roles = series_of(["a.w", "b.x"])
    assert (title, [role.label for role in roles]) == ("2 tensors", ["a.w", "b.x"])


def test_many_roles_are_merged_by_words_without_loss() -> None:
    names = names_of_a_mixture()
    _, roles = series_of(names)
    assert sorted(name for role in roles for name in role.names) == sorted(names)
    labels = [role.label for role in roles]
    assert "model.layers.{0..3}.self_attn.{q,k,v,o}_proj.w" in labels
    assert "model.layers.{0..3}.self_attn.{q,k,v,o}_proj.b" in labels
    (role,) = [role for role in roles if role.label.endswith("self_attn.{q,k,v,o}_proj.b")]
    assert role.place("model.layers.2.self_attn.k_proj.b") == "layer 2, k_proj"


def test_gains_are_not_merged_with_weights() -> None:
    names = [f"layers.{n}.{word}.weight" for n in range(3) for word in ("q", "k", "norm")]
    ndims = {name: 1 if "norm" in name else 2 for name in names}
    _, roles = series_of(names, 2, ndims)
    assert [role.label for role in roles] == ["{q,k}.weight", "norm.weight"]


@pytest.mark.parametrize("most", [2, 3, 5])
def test_remaining_series_share_the_last_panel(most: int) -> None:
    names = [f"a{n}.b{n}.c{n}.{m}" for n in range(9) for m in range(n + 1)]
    _, roles = series_of(names, most)
    assert len(roles) == most
    assert roles[-1].label == "all others"
    assert sorted(name for role in roles for name in role.names) == sorted(names)


def test_long_labels_begin_at_a_module() -> None:
    base = "encoder.tower.with.very.long.names.of.modules"
    groups = [groups_of([f"{base}.{n}.x.experts.{n}.up.weight" for n in (1, 2)])]
    groups.append(groups_of(["head"]))
    title, labels = title_and_labels(groups)
    assert title == "3 tensors"
    assert labels == ["…names.of.modules.{1,2}.x.experts.{1,2}.up.weight", "head"]


def test_the_axis_is_the_outermost_module_of_most_tensors() -> None:
    assert outermost(names_of_a_mixture()) == "layers"
    assert outermost(["a.0.w", "b.1.c.2.w", "b.2.c.2.w"]) == "b"
    assert outermost(["w"]) is None
