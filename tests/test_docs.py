"""Examples of the documentation give what they show."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.checkpoints import gpt, mixture_of_experts, resnet, write_ztensor

if TYPE_CHECKING:
    import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_stacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    families = {"gpt2-xl": gpt(), "resnet50": resnet(), "moe": mixture_of_experts()}
    for name, tensors in families.items():
        write_ztensor(tmp_path / f"{name}.zt", dict(tensors))
    text = (DOCS / "stacking.md").read_text(encoding="utf-8")
    # The end of a code block would be taken for output.
    text = text.replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, "stacking.md", "stacking.md", 0)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert runner.failures == 0
    assert runner.tries > 15


def test_the_command_line() -> None:
    from xckpt.cli.application import commands

    text = (DOCS / "how-to" / "command-line.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(--[a-z-]+)", text))
    parameters = [each for command in commands.commands.values() for each in command.params]
    options = {name for each in parameters if isinstance(each, click.Option) for name in each.opts}
    assert described == options
    for command in commands.commands:
        assert f"\nxckpt {command} " in text
