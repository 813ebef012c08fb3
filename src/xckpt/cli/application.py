"""The command with its subcommands: what is printed when something goes wrong, exit statuses."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from xckpt import __version__
from xckpt.cli.compare import compare
from xckpt.cli.convert import convert
from xckpt.cli.info import info
from xckpt.cli.output import complain, one_line
from xckpt.cli.stats import stats
from xckpt.cli.verify import verify
from xckpt.errors import CheckpointWarning, FormatError, IntegrityError, PayloadMissingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["commands", "main"]

_DAMAGED = 1
_FAILED = 2
_INTERRUPTED = 130

_STATUSES = """\b
Exit status:
  0    all is well
  1    findings, differences or damage, a malformed file among them
  2    no answer: wrong usage, a file that cannot be opened or written
  130  interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    _escape_what_has_no_code()
    try:
        with _warnings_as_lines():
            status: int = commands.main(argv, "xckpt", standalone_mode=False)
    except click.ClickException as error:
        _show_usage(error)
        return _FAILED
    except click.Abort:
        return _INTERRUPTED
    except (FormatError, IntegrityError, PayloadMissingError) as error:
        complain(str(error))
        return _DAMAGED
    except (NotImplementedError, OSError) as error:
        complain(one_line(error))
        return _FAILED
    except MemoryError:
        complain("memory ran out")
        return _FAILED
    return status


@click.group("xckpt", epilog=_STATUSES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="xckpt %(version)s")
def commands() -> None:
    """Look into tensor files of machine-learning frameworks."""


for _command in (info, stats, compare, convert, verify):
    commands.add_command(_command)


@commands.result_callback()
def _flushed(status: int | None, /, **_: Any) -> int:
    # Here click still sees that nobody reads any more.
    sys.stdout.flush()
    return status or 0


def _escape_what_has_no_code() -> None:
    """Let what the terminal's encoding lacks be printed as escapes, surrogates included."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print what a file gives cause to, without the place in our source."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", CheckpointWarning)
        show = warnings.showwarning

        def print_line(message: Any, category: type[Warning], *more: Any, **others: Any) -> None:
            if issubclass(category, CheckpointWarning):
                complain(f"warning: {message}")
            else:
                show(message, category, *more, **others)

        warnings.showwarning = print_line
        yield


def _show_usage(error: click.ClickException) -> None:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return
    context = getattr(error, "ctx", None)
    if context is not None:
        click.echo(context.get_usage(), err=True)
    complain(error.format_message())
