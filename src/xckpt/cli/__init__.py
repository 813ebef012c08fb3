"""The command ``xckpt``: its subcommands, its error messages, and its exit statuses.

It may import everything else. Read `xckpt.cli.common` first: the options, the input files and the
output that all subcommands share.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from xckpt import __version__
from xckpt.cli.common import DAMAGED, FAILED, complain, one_line
from xckpt.cli.files import browse, convert, footprint, info, manifest, steps, verify
from xckpt.cli.values import compare, extract, report, spectrum, stats
from xckpt.errors import (
    CheckpointWarning,
    FormatError,
    IntegrityError,
    PayloadMissingError,
    UnreadableWarning,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_INTERRUPTED = 130
_UNREAD = 141  # the status of a process that SIGPIPE ended

# Words that people try, by the command that does the work.
_INSTEAD = {
    "browse": "explore tui ui",
    "info": "open show print ls list head header keys summary describe inspect cat tree",
    "footprint": "memory size vram fits",
    "stats": "statistics histogram",
    "stats --findings": "findings health check lint",
    "compare": "diff cmp delta equal",
    "convert": "save cast copy export quantize",
    "extract": "lora adapter",
    "verify": "validate test",
    "manifest": "hash digest checksum sha256sum sha256",
    "spectrum": "svd rank",
    "report": "html",
    "steps": "run training history log metrics",
    "--help": "help man usage",
}

_IN_PYTHON = {
    "xckpt.open(path).ckpt.merge(adapter).ckpt.save(new)": "merge fuse merge_adapter",
    "xckpt.resize_adapter(path, new)": "resize resize_adapter",
}

_STATUSES = """\b
Exit status:
  0    success
  1    findings, differences or damage, including malformed files
  2    no result: wrong usage, or a file that cannot be opened or written
  130  interrupted
  141  the reader of the output has ended, as with | head
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of ``xckpt``, and print its output.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; the arguments of the process by default.

    Returns
    -------
    int
        Exit status: 0 for success, 1 for findings, differences or damage, 2 without a result.

    Examples
    --------
    >>> from xckpt.cli import main
    >>> main(["verify", "--json", "m.zt"])
    {...
    0
    """
    # Characters that the terminal's encoding lacks are printed as escapes, also surrogates.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _warnings_as_lines() as lost:
            status: int = commands.main(argv, "xckpt", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return FAILED
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        if context is not None:
            click.echo(context.get_usage(), err=True)
        complain(error.format_message())
        return FAILED
    except click.Abort:
        return _INTERRUPTED
    except SystemExit:  # click raises it for a closed pipe only
        return _UNREAD
    except (FormatError, IntegrityError, PayloadMissingError) as error:
        complain(str(error))
        return DAMAGED
    except (NotImplementedError, OSError) as error:
        complain(one_line(error))
        return FAILED
    except MemoryError:
        complain("out of memory")
        return FAILED
    return max(status, _report_lost(lost))


def _report_lost(lines: Collection[str]) -> int:
    """Print the causes of unreadable tensors, at the end, where they are seen; return a status."""
    for line in lines:
        complain(line)
    return DAMAGED if lines else 0


class _Commands(click.Group):
    """A group of subcommands in which `info` is the default."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        first = args[0]
        if first not in self.commands and not first.startswith("-"):
            if not set("./\\*") & set(first) and not os.path.lexists(first):
                from xckpt.labels.filters import suggest_word

                suggestion = suggest_word(first, _INSTEAD, self.commands)
                hint = f"; did you mean 'xckpt {suggestion}'?" if suggestion else ""
                if call := suggest_word(first, _IN_PYTHON):
                    hint = f"; in Python: {call}"
                ctx.fail(f"{shown(first)} is neither a command nor a file{hint}")
            args = ["info", *args]
        return super().resolve_command(ctx, args)


@click.group(
    "xckpt",
    cls=_Commands,
    epilog=_STATUSES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, message="xckpt %(version)s")
def commands() -> None:
    """Inspect, compare, convert and verify tensor files of machine-learning frameworks.

    A FILE is a path or a URL. The format is detected from the content. `xckpt FILE` is `xckpt info
    FILE`.
    """


_IN_ORDER = [info, browse, footprint, steps, stats, spectrum, compare, report]
_IN_ORDER += [convert, extract, manifest, verify]
for _command in _IN_ORDER:
    commands.add_command(_command)


@commands.result_callback()
def _flushed(status: int | None, /, **_: Any) -> int:
    # Flush while click still handles a closed pipe.
    sys.stdout.flush()
    return status or 0


@contextmanager
def _warnings_as_lines() -> Iterator[dict[str, None]]:
    """Print warnings for users as single lines, without a position in a source file.

    Yields the lines of warnings of unreadable tensors instead, which several steps of a command
    may repeat.
    """
    lost: dict[str, None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("always", CheckpointWarning)
        show = warnings.showwarning

        def print_line(message: Any, category: type[Warning], *more: Any, **others: Any) -> None:
            if issubclass(category, UnreadableWarning):
                lost.update(dict.fromkeys(str(message).split("\n")))
            elif issubclass(category, CheckpointWarning | FutureWarning):
                complain(f"warning: {message}")
            else:
                show(message, category, *more, **others)

        warnings.showwarning = print_line
        yield lost
