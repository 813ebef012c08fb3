"""The summary lists numbered modules, and the tensors that only some of them have."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tests.notebook.checkpoints import gpt2, mixture_of_experts, resnet, row
from tests.notebook.rendering import render_html, render_text
from xckpt.index import paused_collector
from xckpt.notebook.folding import families_of
from xckpt.notebook.summary import ModuleSet, module_sets, new_summary, selection
from xckpt.tensor_rows import Row, StackedNames

if TYPE_CHECKING:
    from collections.abc import Iterable


def sets_of(rows: Iterable[Row], *stacked: StackedNames) -> list[ModuleSet]:
    return module_sets(families_of(rows), stacked)


def text_of(rows: Iterable[Row], **more: Any) -> str:
    return render_text(new_summary(rows, title="m", format="f", version="", attrs={}, **more))


def test_a_mixture_of_experts_has_three_sets_of_layers() -> None:
    norms = ("input_layernorm", "post_attention_layernorm")
    assert sets_of(mixture_of_experts(10, 4, dense=3)) == [
        ModuleSet("layers", "{0..9}", "", ("self_attn", *norms)),
        ModuleSet("layers", "{0..2}", "", ("mlp.{gate,up,down}_proj",)),
        ModuleSet("layers", "{3..9}", "", ("mlp.{gate,experts}",)),
    ]


def test_uniform_modules_have_no_note() -> None:
    assert sets_of(gpt2()) == []
    assert sets_of(mixture_of_experts(5, 4)) == []
    assert "choose" not in text_of(gpt2(), obj="ds")


def test_steps_of_a_sequence_are_not_layers() -> None:
    # The number after "downsample" is a convolution's or a norm's.
    assert {layers.module for layers in sets_of(resnet())} == {"layer2", "layer3"}


def test_a_dimension_is_named_with_its_set() -> None:
    rows = [row(f"layers.{n}.a", "int8", 2) for n in range(6)]
    rows += [row(f"layers.{n}.b", "int8", 2) for n in range(4, 6)]
    stacked = [
        StackedNames(("layers.", None, ".a"), ("layers",), (tuple(range(6)),)),
        StackedNames(("layers.", None, ".b"), ("layers_1",), ((4, 5),)),
    ]
    assert sets_of(rows, *stacked) == [
        ModuleSet("layers", "{0..5}", "layers", ("a",)),
        ModuleSet("layers", "{4,5}", "layers_1", ("b",)),
    ]
    text = text_of(rows, stacked=stacked, obj="ds")
    assert "\n  layers {4,5} (dimension layers_1): b\n" in text
    assert "choose with ds.ckpt.sel(layers=3), whatever the dimensions are called" in text


def test_modules_of_the_same_name_in_several_places_are_distinguished() -> None:
    rows = [row(f"encoder.layers.{n}.w", "int8", 2) for n in range(12)]
    rows += [row(f"decoder.layers.{n}.w", "int8", 2) for n in range(6)]
    assert sets_of(rows) == [
        ModuleSet("encoder.layers", "{0..11}", "", ("w",)),
        ModuleSet("decoder.layers", "{0..5}", "", ("w",)),
    ]


def test_the_same_name_in_two_shapes_is_one_set_unless_it_is_stacked() -> None:
    rows = [row(f"h.{n}.w", "int8", 2 + n % 2) for n in range(8)]
    assert sets_of(rows) == []
    numbers = [tuple(range(k, 8, 2)) for k in (0, 1)]
    parts = [StackedNames(("h.", None, ".w"), (f"h_{n[0]}",), (n,)) for n in numbers]
    assert [(part.dim, part.parts) for part in sets_of(rows, *parts)] == [
        ("h_0", ("w",)),
        ("h_1", ("w",)),
    ]


def test_the_example_is_from_the_largest_group() -> None:
    assert selection(families_of(mixture_of_experts(10, 5, dense=3))) == {"layers": 6, "experts": 2}
    assert selection(families_of(gpt2())) == {"h": 6}
    assert selection(families_of([row("a", "int8", 1)])) == {}
    assert selection(families_of([row("class.0.w", "int8", 1), row("a b.0.w", "int8", 1)])) == {}


def test_html_has_the_same_note() -> None:
    rows = mixture_of_experts(10, 4, dense=3)
    html = render_html(new_summary(rows, title="m", format="f", version="", attrs={}, obj="dt"))
    assert "layers {3..9}:" in html
    assert "choose with dt.ckpt.sel(layers=6, experts=2)" in html


def test_as_many_sets_as_tensors_take_linear_time() -> None:
    took = []
    for count in (300, 3_000):
        rows = [row(f"h.{n}.w{n}.weight", "int8", n) for n in range(count)]
        rows += [row(f"h.{n}.v.weight_scale", "float32", n) for n in range(count)]
        rows += [row(f"h.{n}.v.weight", "int8", n) for n in range(count)]
        times = []
        for _ in range(3):
            start = time.process_time()
            with paused_collector():  # as callers of the summary do
                summary = new_summary(rows, title="m", format="f", version="", attrs={})
            times.append(time.process_time() - start)
            assert len(summary.modules) == count + 1
            assert "more sets of modules" in render_text(summary)
        took.append(min(times))
    assert took[1] < 30 * took[0]


def test_names_of_many_components_take_little_time() -> None:
    rows = [row("h.0." + "a." * 20_000 + leaf, "int8", 1) for leaf in "xyz"]
    rows += [row(f"h.{n}.b", "int8", 1) for n in range(9)]
    assert sets_of(rows)[0] == ModuleSet("h", "{0..8}", "", ("b",))


def test_hostile_names_of_modules_are_inert() -> None:
    names = [f"<b>\x1b.{n}.{leaf}" for n in range(9) for leaf in ("x", "\u202ey")[: 1 + n % 2]]
    rows = [row(name, "int8", 1) for name in names]
    html = render_html(new_summary(rows, title="m", format="f", version="", attrs={}))
    assert "<b>\\x1b" not in html
    assert "&lt;b&gt;\\x1b {0..8}" in html
    assert r"\u202ey" in text_of(rows)


def test_numbers_of_tensors_and_variables_are_no_modules() -> None:
    names = [f"alphas.{n}" for n in range(8)] + [f"gates.{n}" for n in range(16)]
    names += [f"layers/dense/vars/{n}" for n in range(6)]
    names += [f"layers/conv/vars/{n}" for n in range(9)]
    summary = new_summary(
        [row(name, "float32", 4) for name in names],
        title="m", format="f", version="", attrs={}, obj="ds",
    )  # fmt: skip
    assert summary.modules == ()
    assert summary.choose == ""
