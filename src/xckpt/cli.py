"""The command ``xckpt``: what is in a checkpoint, from the shell."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xckpt.errors import CheckpointError, CheckpointWarning
from xckpt.notebook.formatting import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xckpt.index import Index, Part, Tensor

__all__ = ["main"]

_FAILED = 1
_INTERRUPTED = 130
_DEEPEST_VALUE = 100
_LONGEST_INTEGER_BITS = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; by default those of the process.

    Returns
    -------
    int
        Exit status: 0, or 1 where a file cannot be read.

    Raises
    ------
    SystemExit
        With status 2 on wrong usage, 0 after ``--help`` and ``--version``.

    Examples
    --------
    >>> main(["info", "m.zt"])  # doctest: +SKIP
    0
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except (CheckpointError, OSError) as error:
        print(f"xckpt: {_one_line(error)}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    from xckpt import __version__

    parser = argparse.ArgumentParser(
        prog="xckpt", description="Look into tensor files of machine-learning frameworks."
    )
    parser.add_argument("--version", action="version", version=f"xckpt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_info,):
        add(commands)
    return parser


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return printable(f"{os.fsdecode(error.filename)}: {error.strerror}")
    return printable(str(error) or type(error).__name__)


def _print(text: str) -> None:
    """Print what the terminal's encoding has, and escapes for the rest."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


# --- xckpt info ----------------------------------------------------------------------------------


def _add_info(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "info",
        help="show what a file holds",
        description="Show what a file holds: repeated modules folded, sizes, element types. "
        "Reads headers only.",
    )
    parser.add_argument("file", metavar="FILE", help="path or URL of a checkpoint")
    parser.add_argument("--json", action="store_true", help="all tensors, for programs")
    parser.set_defaults(run=_info)


def _info(arguments: argparse.Namespace) -> int:
    from xckpt.opening import read_index

    with warnings.catch_warnings():
        # Both outputs state them.
        warnings.simplefilter("ignore", CheckpointWarning)
        index = read_index(arguments.file)
    _print(json.dumps(_document(index), allow_nan=False) if arguments.json else repr(index))
    return 0


def _document(index: Index) -> dict[str, Any]:
    return {
        "format": index.format,
        "version": index.version,
        "source": index.source,
        "nbytes": index.nbytes,
        "attrs": _plain(index.attrs),
        "warnings": list(index.warnings),
        "shards": {
            name: {"size": shard.size, "digest": shard.digest}
            for name, shard in index.shards.items()
        },
        "tensors": [_tensor(tensor) for tensor in index.tensors.values()],
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    # What is nearly always the same is left out where it is.
    unusual = {
        "dims": None if tensor.dims is None else list(tensor.dims),
        "problem": None if tensor.problem is None else tensor.problem.reason,
        "attrs": _plain(tensor.attrs) or None,
    }
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "layout": tensor.layout,
        "order": tensor.order,
        "nbytes": tensor.nbytes,
        "offset": min([p.offset for p in tensor.parts.values() if p.shard is None], default=None),
        "parts": {role: _part(part) for role, part in tensor.parts.items()},
        **{key: value for key, value in unusual.items() if value is not None},
    }


def _part(part: Part) -> dict[str, Any]:
    unusual = {
        "encoding": part.encoding,
        "decoded_nbytes": part.decoded_nbytes,
        "digest": part.digest,
        "shard": part.shard,
    }
    return {
        "dtype": part.dtype,
        "shape": None if part.shape is None else list(part.shape),
        "offset": part.offset,
        "nbytes": part.nbytes,
        **{key: value for key, value in unusual.items() if value is not None},
    }


def _plain(value: Any, depth: int = 0) -> Any:
    """Turn a value of an attribute into one that any reader of JSON takes.

    Bytes become ``{"hex": "..."}``, what JSON has no number for becomes a string.
    """
    if depth > _DEEPEST_VALUE:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER_BITS:
        return hex(value)  # Python refuses to write more than 4300 digits
    return value if value is None or isinstance(value, str | int | float) else str(value)
