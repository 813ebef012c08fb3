"""Options of the commands, each declared once, with the text of the function that has it.

A command lists those that it takes: ``@command("columns sort limit")``. Another name for an option,
and an option of another command, are answered with the one that works.
"""

from __future__ import annotations

import json
import os
import re
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from xckpt.cli.common import FileInput, TableInput
from xckpt.errors import deprecated_name, shown
from xckpt.formats import names
from xckpt.options import option_meant, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_REPEATED = "May be repeated."
_REDIRECTED = "it prints to the standard output, which > PATH writes to a file"


def _option(*spelling: str, text: str = "", **settings: Any) -> Callable[..., Any]:
    """Declare an option with the text of the option of functions, or with a text of its own."""
    help_text = text or text_of(spelling[0].strip("-").partition("/")[0].replace("-", "_"))
    end = f" {_REPEATED}" if settings.get("multiple") else ""
    return click.option(*spelling, help=help_text + end, **settings)


def _text_list(
    _context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]
) -> list[str] | None:
    return [part.strip() for text in texts for part in text.split(",")] or None


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Parse ``KEY=VALUE`` texts."""
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise click.BadParameter(f"{text!r} is not KEY=VALUE")
        values[key.strip()] = value
    return values


def _storage_options(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, Any]:
    """Parse ``KEY=VALUE``; values that are not JSON are texts."""
    if texts and parameter.name == "old_storage_options":
        if not all("=" in text for text in texts):  # the name of a new file
            raise click.NoSuchOption("-o", ctx=context)
        deprecated_name("-o KEY=VALUE", "--storage-option KEY=VALUE", since="0.2")
    values: dict[str, Any] = {}
    for key, text in pairs(texts).items():
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values


def split_dims(
    _context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str | int, int | None] | None:
    """Parse --dim: dimensions by name or position, each with a number of neighbours or None."""
    lengths: dict[str | int, int | None] = {}
    for text in texts:
        name, _, length = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "")
        key = int(name) if re.fullmatch(r"-?\d+", name) else name
        lengths[key] = int(length) if length else None
    return lengths or None


_OPTIONS: dict[str, Callable[..., Any]] = {
    "ignore": _option("--ignore", multiple=True, metavar="RULE[:GLOB]"),
    "columns": _option("--columns", multiple=True, metavar="A,B,...", callback=_text_list),
    "sort": _option("--sort", metavar="COLUMN"),
    "ascending": _option("--ascending/--descending", default=None),
    "limit": _option("--limit", type=click.IntRange(min=1)),
    "by": _option(
        "--by",
        "keys",
        multiple=True,
        metavar="KEY,...",
        callback=_text_list,
        text="Merge tensors into groups: layer, role, module, kind, component, dtype, a numbered "
        "module such as expert, or the step of a run.",
    ),
    "dim": _option(
        "--dim",
        "dims",
        multiple=True,
        metavar="DIM[:N]",
        callback=split_dims,
        text="Print a row for each channel or block: reduce only this dimension (a name, or a "
        "position such as -1), or N neighbours at a time.",
    ),
    "no-cache": _option("--no-cache", is_flag=True, text="Neither use nor store cached results."),
    "progress": _option("--progress/--no-progress", default=None),
    "names": _option(
        "--names",
        metavar="auto|FILE",
        text="Match tensors by content and known names, or by a JSON object of names in the first "
        "checkpoint with names in the second one.",
    ),
    "rename": _option(
        "--rename",
        nargs=2,
        multiple=True,
        metavar="REGEX NEW",
        text="Replace parts of names, of the first file if there are two: '^model\\.' ''.",
    ),
    "engine": _option(
        "--engine",
        type=click.Choice(names()),
        metavar="FORMAT",
        text=f"Format of the file, {', '.join(names())}; detected from the content by default.",
    ),
    "tensors": _option("--tensors", multiple=True, metavar="GLOB"),
    "exclude": _option("--exclude", multiple=True, metavar="GLOB"),
    "only": _option("--only", type=click.Choice(["weights"])),
    "storage-option": _option(
        "--storage-option",
        "storage_options",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_storage_options,
        text="Option for a URL, such as anon=true; VALUE is JSON or text.",
    ),
    # A hidden alias until -o means --output in all commands.
    "-o": click.option(
        "-o", "old_storage_options", multiple=True, hidden=True, callback=_storage_options
    ),
    "skip-unreadable": _option("--skip-unreadable", is_flag=True),
    "overwrite": _option("--overwrite", is_flag=True),
    "json": _option("--json", "as_json", is_flag=True, text="Print one JSON document."),
}
_READING = ("engine", "tensors", "exclude", "only", "storage-option")


def _spelled(flag: str) -> str:
    return f"{'-' if len(flag) == 1 else '--'}{flag.replace('_', '-')}"


class _Command(click.Command):
    """A command that answers unknown options with the one that is meant."""

    elsewhere: dict[str, str]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        ctx.allow_extra_args = True
        try:
            extra = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            flags = {
                flag.lstrip("-").replace("-", "_"): param
                for param in self.params
                if isinstance(param, click.Option) and not param.hidden
                for flag in (*param.opts, *param.secondary_opts)
            }
            meant = option_meant(name, flags)
            hint = f"it has {', '.join(map(_spelled, flags))}"
            if meant:
                value = f" {flags[meant].metavar}" if flags[meant].metavar else ""
                hint = f"did you mean {_spelled(meant)}{value}?"
            name = option_meant(name, self.elsewhere, exactly=True) or name
            if name in self.elsewhere:
                file = next((text for text in words if not text.startswith("-")), "FILE")
                hint = self.elsewhere[name].format(file=shown(file))
            raise click.UsageError(f"no option {error.option_name}; {hint}", ctx) from error
        if extra and not ctx.resilient_parsing:
            arguments = [p for p in self.params if isinstance(p, click.Argument)]
            metavars = " ".join(argument.make_metavar(ctx) for argument in arguments)
            hint = f"{self.name} takes {metavars} and options"
            if not os.path.lexists(extra[0]):
                glob = f"*{extra[0].strip('*')}*"
                hint = f"to select tensors: --tensors {shown(glob)}"
            raise click.UsageError(f"{shown(extra[0])} is one argument too many; {hint}", ctx)
        return extra


def command(options: str = "", **elsewhere: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command with shared options, those for reading included.

    The command gets options for reading as the `FileInput` ``reading``, and options for tables as
    the `TableInput` ``request``. `elsewhere` has the commands with options that this one lacks, by
    option.
    """
    chosen = options.split()

    def decorate(function: Callable[..., Any]) -> click.Command:
        @wraps(function)
        def called(
            engine: str | None,
            storage_options: dict[str, Any],
            old_storage_options: dict[str, Any] | None = None,
            *,
            progress: bool | None = None,
            no_cache: bool = False,
            **arguments: Any,
        ) -> Any:
            selection = {name: arguments.pop(name) for name in ("tensors", "exclude", "only")}
            access = {**(old_storage_options or {}), **storage_options} or None
            reading = FileInput(engine, access, **selection, progress=progress, cache=not no_cache)
            if "sort" in chosen:
                names = ("columns", "sort", "ascending", "limit")
                request = {name: arguments.pop(name) for name in names}
                arguments["request"] = TableInput(**request, keys=arguments.pop("keys") or ())
            return function(reading=reading, **arguments)

        stated: list[click.Parameter] = getattr(function, "__click_params__", [])
        has_output = any("--output" in parameter.opts for parameter in stated)
        listed = (*chosen, *_READING, *(() if has_output else ("-o",)))
        decorated: Any = called
        decorated.__click_params__ = []
        # Click reads parameters from the last one to the first.
        for name in reversed([n for n in listed if n != "json"] + ["json"] * ("json" in chosen)):
            decorated = _OPTIONS[name](decorated)
        decorated.__click_params__ += stated
        built: _Command = click.command(cls=_Command)(decorated)
        built.elsewhere = elsewhere if has_output else {"output": _REDIRECTED, **elsewhere}
        return built

    return decorate
