"""The page on options: which function, method, picture and command takes which option.

After a deliberate change: ``python -m tests.option_table > docs/options.md``
"""

from __future__ import annotations

import re
import sys
from inspect import isroutine, signature
from typing import Any

import click

import xckpt
from xckpt.accessor import CheckpointAccessor
from xckpt.cli import commands
from xckpt.datasets.options import OpenOptions
from xckpt.options import described, texts_of_options
from xckpt.plots import Plots

HEAD = """# Options

An option has one name, one text and one meaning in functions, methods of `ds.ckpt`, pictures of
`ds.ckpt.plot`, commands and `xarray.open_dataset(engine=...)`. `help()` and `--help` show the same
text. Another name for an option is answered with the one that works.
"""
KINDS = ("xckpt.", "ds.ckpt.", "ds.ckpt.plot.", "xckpt", "xarray.open_dataset")
# Names of options in commands, where they differ: values on the command line are single texts.
IN_COMMANDS = {
    "cache": "no_cache",
    "storage_options": "storage_option",
    "quantiles": "quantile",
    "explain": "no_explain",
}


def surfaces() -> dict[str, dict[str, set[str]]]:
    """Return the options of all that takes some, by kind and name."""

    # The whole text, whose first sentence is the one of commands.
    texts = {
        option: " ".join(described("", [option]).partition(f"\n{option} :")[2].split("\n")[1:])
        for option in texts_of_options()
    }
    texts = {option: re.sub(r"\s+", " ", text).strip() for option, text in texts.items()}

    def options_of(owner: Any, names: Any) -> dict[str, set[str]]:
        """Return the options whose text is the shared one, and all others with a mark."""
        found = {}
        for name in names:
            method = getattr(owner, name)
            plain = re.sub(r"\s+", " ", method.__doc__ or "")
            options = signature(method).parameters
            found[name] = {
                option if option not in texts or texts[option] in plain else f"{option} of its own"
                for option in options
            }
        return found

    methods = [n for n in dir(CheckpointAccessor) if not n.startswith("_")]
    methods = [n for n in methods if callable(getattr(CheckpointAccessor, n))]
    spelled = {old: new for new, old in IN_COMMANDS.items()}
    in_commands = {
        name: {
            spelled.get(word, word)
            for option in command.params
            if isinstance(option, click.Option) and not option.hidden
            for word in [option.opts[-1].lstrip("-").replace("-", "_")]
        }
        | ({"explain"} if name == "compare" else set())
        for name, command in commands.commands.items()
    }
    return {
        "xckpt.": options_of(xckpt, [n for n in xckpt.__all__ if isroutine(getattr(xckpt, n))]),
        "ds.ckpt.": options_of(CheckpointAccessor, methods),
        "ds.ckpt.plot.": options_of(Plots, [n for n in vars(Plots) if not n.startswith("_")]),
        "xckpt": in_commands,
        "xarray.open_dataset": {"": set(OpenOptions.keywords())},
    }


def page() -> str:
    """Return the page."""
    every = surfaces()
    lines = [
        HEAD,
        "| option | functions | `ds.ckpt` | pictures | commands | `open_dataset` | |",
        "|---|---|---|---|---|---|---|",
    ]
    for option, text in texts_of_options().items():
        cells = []
        for kind in KINDS:
            names = [name for name, options in every[kind].items() if option in options]
            listed = ", ".join(f"`{name}`" for name in sorted(names))
            cells.append("yes" if names == [""] else listed)
        flag = f"--{IN_COMMANDS.get(option, option).replace('_', '-')}"
        called = f" (`{flag}`)" if option in IN_COMMANDS else ""
        lines.append(f"| `{option}`{called} | {' | '.join(cells)} | {text} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{page()}\n")
